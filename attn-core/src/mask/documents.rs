//! Packed sequences of different lengths ("varlen"): attention stays inside a document.

use core::ops::Range;

use super::align::{Align, Window};
use crate::error::{AttnError, Result};
use crate::shape::AttnShape;

/// Documents laid end to end along the sequence axis: document `n` owns the queries `cu_q[n]..cu_q[n + 1]` and the keys
/// `cu_k[n]..cu_k[n + 1]` (FlashAttention's `cu_seqlens`). Either side of a document may be empty. Queries behind the
/// last document see nothing.
///
/// Causal order and windows are relative to the document: its first query and its first key are at 0.
///
/// ```
/// use attn_core::{Align, AttnShape, Mask};
/// use attn_core::mask::Documents;
/// let mask = Mask::documents(Documents::new(&[0, 2, 5], &[0, 2, 5]).causal(Align::TopLeft));
/// let shape = AttnShape::new([1, 1, 5, 8], [1, 1, 5, 8], [1, 1, 5, 8])?;
/// mask.check(&shape)?;
/// assert_eq!(mask.row_range(&shape, 0, 0, 3), 2..4); // second token of the second document
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Documents<'a> {
    cu_q: &'a [usize],
    cu_k: &'a [usize],
    causal: Option<Align>,
    window: Option<Window>,
}

impl<'a> Documents<'a> {
    /// Bounds of the queries and of the keys, each `[documents + 1]` and not decreasing.
    pub const fn new(cu_q: &'a [usize], cu_k: &'a [usize]) -> Self {
        Self { cu_q, cu_k, causal: None, window: None }
    }

    /// Causal inside each document, aligned by the document's own lengths.
    pub const fn causal(mut self, align: Align) -> Self {
        self.causal = Some(align);
        self
    }

    /// A window inside each document, aligned by the document's own lengths.
    pub const fn window(mut self, window: Window) -> Self {
        self.window = Some(window);
        self
    }

    /// The tables, for engines that compute a part of a call.
    #[doc(hidden)]
    pub const fn bounds(&self) -> [&'a [usize]; 2] {
        [self.cu_q, self.cu_k]
    }

    /// Whether a query sees all keys of its document.
    #[doc(hidden)]
    pub const fn is_plain(&self) -> bool {
        self.causal.is_none() && self.window.is_none()
    }

    pub(crate) fn check(&self, shape: &AttnShape) -> Result<()> {
        AttnError::check_size("cu_k length against cu_q length", self.cu_q.len(), self.cu_k.len())?;
        if self.cu_q.is_empty() {
            return Err(AttnError::Size { what: "cu_q length", expected: 1, found: 0 });
        }
        for (what, cu, limit) in [("cu_q", self.cu_q, shape.q_len), ("cu_k", self.cu_k, shape.kv_len)] {
            let mut last = 0;
            for (at, &value) in cu.iter().enumerate() {
                if value < last {
                    return Err(AttnError::Order { what, at });
                }
                if value > limit {
                    return Err(AttnError::Index { what, at, value, limit: limit.saturating_add(1) });
                }
                last = value;
            }
        }
        Ok(())
    }

    /// The visible keys of a query.
    pub(crate) fn row_range(&self, query: usize) -> Range<usize> {
        // The last document whose queries start at or before this one; empty documents are passed over by the search.
        let n = self.cu_q.partition_point(|&start| start <= query);
        let bounds = |cu: &[usize]| Some((cu.get(n.checked_sub(1)?).copied()?, cu.get(n).copied()?));
        let (Some((q_start, q_end)), Some((k_start, k_end))) = (bounds(self.cu_q), bounds(self.cu_k)) else {
            return 0..0;
        };
        let (q_len, kv_len) = (q_end.saturating_sub(q_start), k_end.saturating_sub(k_start));
        let local = query.saturating_sub(q_start);
        let mut range = 0..kv_len;
        if let Some(align) = self.causal {
            let causal = Window { left: None, right: Some(0), align };
            range = causal.range_at(align.position(local, q_len, kv_len), kv_len);
        }
        if let Some(window) = self.window {
            let r = window.range_at(window.align.position(local, q_len, kv_len), kv_len);
            range = range.start.max(r.start)..range.end.min(r.end);
        }
        if range.start >= range.end { 0..0 } else { k_start + range.start..k_start + range.end }
    }
}
