//! The place of the diagonal if there are not as many queries as keys.

/// The alignment of causal and windowed masks: query `i` has key position `i + offset`.
///
/// Never a bare flag: torch aligns top-left, FlashAttention bottom-right, and results differ whenever
/// `q_len ≠ kv_len`.
///
/// ```
/// use attn_core::Align;
/// assert_eq!(Align::TopLeft.offset(3, 10), 0);
/// assert_eq!(Align::BottomRight.offset(3, 10), 7); // the last query sees the last key
/// assert_eq!(Align::with_past(5).offset(3, 10), 5);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum Align {
    /// Query 0 is at key 0.
    TopLeft,
    /// The last query is at the last key: decoding with a cache.
    BottomRight,
    /// Query 0 is at this key; may be negative.
    Offset(isize),
}

impl Align {
    /// Query 0 follows `past` cached keys.
    pub const fn with_past(past: usize) -> Self {
        Self::Offset(if past > isize::MAX as usize { isize::MAX } else { past as isize })
    }

    /// The key position of query 0.
    pub const fn offset(self, q_len: usize, kv_len: usize) -> isize {
        match self {
            Self::TopLeft => 0,
            Self::BottomRight => (kv_len as isize).saturating_sub(q_len as isize),
            Self::Offset(offset) => offset,
        }
    }

    /// The key position of query `i`.
    #[inline]
    #[doc(hidden)]
    pub const fn position(self, query: usize, q_len: usize, kv_len: usize) -> isize {
        self.offset(q_len, kv_len).saturating_add_unsigned(query)
    }
}

/// A sliding window: inclusive distances to the left and to the right of a query's position; `None` is no bound.
///
/// FlashAttention and ONNX count this way. vLLM and ONNX Runtime's `local_window_size` count the token itself: their
/// `w` is `left = w − 1` here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct Window {
    /// Keys visible before the position.
    pub left: Option<usize>,
    /// Keys visible after the position.
    pub right: Option<usize>,
    /// The key position of query 0.
    pub align: Align,
}

impl Window {
    /// The visible keys of a query at `position`, clipped to `0..kv_len`.
    pub(crate) fn range_at(&self, position: isize, kv_len: usize) -> core::ops::Range<usize> {
        let start = self.left.map_or(0, |left| clip(position.saturating_sub_unsigned(left), kv_len));
        let end =
            self.right.map_or(kv_len, |right| clip(position.saturating_add_unsigned(right).saturating_add(1), kv_len));
        start..end
    }
}

/// `x` clipped to `0..=limit`.
pub(crate) fn clip(x: isize, limit: usize) -> usize {
    usize::try_from(x).map_or(0, |x| x.min(limit))
}
