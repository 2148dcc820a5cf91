//! Borrowed 4-D views with strides: q, k, v, masks, biases and outputs are passed as views, without copying.
//!
//! A view is checked when it is made: every element it can reach is inside its slice, so that reading cannot fail
//! afterwards. Sizes are always in the logical order `[batch, heads, seq, dim]`; the [`Layout`] or the strides give
//! their order in memory. Strides count elements, and may be 0 (a broadcast) or negative (a reversed axis) on inputs.
//! An output view also proves that no two of its elements share memory.

use crate::error::{AttnError, Result};
use crate::row::Row;
use crate::shape::product;

/// The order in which a contiguous buffer stores the axes, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum Layout {
    /// `[batch, heads, seq, dim]`: the layout of torch's SDPA.
    Bhsd,
    /// `[batch, seq, heads, dim]`: the layout of a projection's output, and of FlashAttention.
    Bshd,
    /// `[seq, batch, heads, dim]`: sequence-first models.
    Sbhd,
}

impl Layout {
    /// Strides, in elements, of a contiguous tensor of these logical sizes `[batch, heads, seq, dim]`.
    ///
    /// # Errors
    /// [`AttnError::Overflow`] if the tensor has more elements than `isize::MAX`.
    pub const fn strides(self, [batch, heads, seq, dim]: [usize; 4]) -> Result<[isize; 4]> {
        match product(&[max1(batch), max1(heads), max1(seq), max1(dim)]) {
            Some(n) if n <= isize::MAX as usize => {}
            _ => {
                // A tensor with an axis of 0 has no elements: its strides are never used.
                if product(&[batch, heads, seq, dim]).is_some() && (batch == 0 || heads == 0 || seq == 0 || dim == 0) {
                    return Ok([0, 0, 0, 1]);
                }
                return Err(AttnError::Overflow { what: "batch · heads · seq · dim" });
            }
        }
        let (batch, heads, seq, dim) = (batch as isize, heads as isize, seq as isize, dim as isize);
        Ok(match self {
            Self::Bhsd => [heads * seq * dim, seq * dim, dim, 1],
            Self::Bshd => [seq * heads * dim, dim, heads * dim, 1],
            Self::Sbhd => [heads * dim, dim, batch * heads * dim, 1],
        })
    }
}

const fn max1(x: usize) -> usize {
    if x == 0 { 1 } else { x }
}

/// Sizes, strides and first element of a [`View`] or [`ViewMut`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub(crate) struct Strided {
    sizes: [usize; 4],
    strides: [isize; 4],
    offset: usize,
}

impl Strided {
    /// Checks that all elements are inside a buffer of `len` elements; `what` names the tensor.
    const fn new(
        what: &'static str,
        len: usize,
        sizes: [usize; 4],
        strides: [isize; 4],
        offset: usize,
    ) -> Result<Self> {
        let this = Self { sizes, strides, offset };
        if matches!(product(&sizes), Some(0)) {
            return Ok(this);
        }
        if product(&sizes).is_none() {
            return Err(AttnError::Overflow { what: "batch · heads · seq · dim" });
        }
        // The lowest and highest element reached, relative to `offset`; the intermediate values fit in i128 always.
        let (mut low, mut high) = (0i128, 0i128);
        let mut axis = 0;
        while axis < 4 {
            let reach = (sizes[axis] as i128 - 1) * strides[axis] as i128;
            if reach < 0 {
                low += reach;
            } else {
                high += reach;
            }
            axis += 1;
        }
        if offset as i128 + low < 0 {
            return Err(AttnError::Underflow { what });
        }
        let needed = offset as i128 + high + 1;
        if needed > isize::MAX as i128 {
            return Err(AttnError::Overflow { what: "strides · sizes" });
        }
        if needed > len as i128 {
            return Err(AttnError::TooShort { what, needed: needed as usize, found: len });
        }
        Ok(this)
    }

    /// Refuses strides with which two elements could share memory.
    ///
    /// The axes are taken by ascending stride; each must step over everything that the smaller ones reach. That holds
    /// for every permuted, padded or sliced dense tensor (and refuses some exotic interleavings that would be sound).
    fn check_distinct(&self) -> Result<()> {
        if product(&self.sizes) == Some(0) {
            return Ok(());
        }
        let mut order = [0usize, 1, 2, 3];
        order.sort_unstable_by_key(|&axis| self.stride(axis).unsigned_abs());
        let mut span = 0usize; // the largest distance that the axes so far reach
        for axis in order {
            let (size, stride) = (self.size(axis), self.stride(axis));
            if size > 1 {
                if stride.unsigned_abs() <= span {
                    return Err(AttnError::Overlap { what: "output", size, stride });
                }
                span += (size - 1) * stride.unsigned_abs(); // fits: `new` bounded the whole reach
            }
        }
        Ok(())
    }

    fn size(&self, axis: usize) -> usize {
        self.sizes.get(axis).copied().unwrap_or(1)
    }

    fn stride(&self, axis: usize) -> isize {
        self.strides.get(axis).copied().unwrap_or(0)
    }

    /// Index into the buffer; valid for positions inside `sizes`, anything otherwise.
    #[inline]
    fn index(&self, b: usize, h: usize, s: usize, d: usize) -> usize {
        let [sb, sh, ss, sd] = self.strides;
        let step = (b as isize)
            .wrapping_mul(sb)
            .wrapping_add((h as isize).wrapping_mul(sh))
            .wrapping_add((s as isize).wrapping_mul(ss))
            .wrapping_add((d as isize).wrapping_mul(sd));
        self.offset.wrapping_add_signed(step)
    }
}

macro_rules! strided_queries {
    () => {
        /// Logical sizes `[batch, heads, seq, dim]`.
        pub const fn sizes(&self) -> [usize; 4] {
            self.at.sizes
        }

        /// Strides in elements, of `[batch, heads, seq, dim]`.
        pub const fn strides(&self) -> [isize; 4] {
            self.at.strides
        }

        /// Index in the buffer of the element `[0, 0, 0, 0]`.
        pub const fn offset(&self) -> usize {
            self.at.offset
        }

        /// Whether the view has no element.
        pub fn is_empty(&self) -> bool {
            product(&self.at.sizes) == Some(0)
        }
    };
}

/// A borrowed, read-only 4-D tensor `[batch, heads, seq, dim]` with strides.
///
/// ```
/// use attn_core::{Layout, View};
/// let data: Vec<f32> = (0..24).map(|x| x as f32).collect();
/// let bhsd = View::new(&data, Layout::Bhsd, [1, 2, 3, 4])?; // 2 heads, 3 positions, dim 4
/// let bshd = View::new(&data, Layout::Bshd, [1, 2, 3, 4])?; // the same memory read as [seq, heads, dim]
/// assert_eq!((bhsd.at(0, 1, 0, 0), bshd.at(0, 1, 0, 0)), (12.0, 4.0));
/// assert!(View::new(&data, Layout::Bhsd, [1, 2, 3, 5]).is_err()); // 30 elements, 24 given
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    data: &'a [T],
    at: Strided,
}

impl<'a, T: Copy> View<'a, T> {
    /// A contiguous tensor; `sizes` are `[batch, heads, seq, dim]` whatever the layout.
    ///
    /// # Errors
    /// [`AttnError::TooShort`] or [`AttnError::Overflow`].
    pub const fn new(data: &'a [T], layout: Layout, sizes: [usize; 4]) -> Result<Self> {
        match layout.strides(sizes) {
            Ok(strides) => Self::strided(data, sizes, strides, 0),
            Err(e) => Err(e),
        }
    }

    /// Any strides (in elements; 0 and negative ones included); `offset` is the index of element `[0, 0, 0, 0]`.
    ///
    /// # Errors
    /// [`AttnError::TooShort`], [`AttnError::Underflow`] or [`AttnError::Overflow`].
    pub const fn strided(data: &'a [T], sizes: [usize; 4], strides: [isize; 4], offset: usize) -> Result<Self> {
        match Strided::new("view", data.len(), sizes, strides, offset) {
            Ok(at) => Ok(Self { data, at }),
            Err(e) => Err(e),
        }
    }

    /// One of `parts` tensors packed along the sequence, `[batch, seq, parts, heads, dim]`: packed QKV has 3 parts,
    /// packed KV has 2.
    ///
    /// # Errors
    /// As [`View::strided`]; [`AttnError::Index`] if `part` is not below `parts`.
    ///
    /// ```
    /// use attn_core::View;
    /// let qkv: Vec<f32> = (0..2 * 3 * 4).map(|x| x as f32).collect(); // 1 batch, 2 positions, 1 head, dim 4
    /// let k = View::packed(&qkv, [1, 1, 2, 4], 3, 1)?;
    /// assert_eq!(k.at(0, 0, 1, 0), 16.0);
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub const fn packed(data: &'a [T], sizes: [usize; 4], parts: usize, part: usize) -> Result<Self> {
        if part >= parts {
            return Err(AttnError::Index { what: "packed part", at: 0, value: part, limit: parts });
        }
        let [batch, heads, seq, dim] = sizes;
        let total = product(&[max1(batch), max1(heads), max1(seq), max1(dim), parts]);
        match total {
            Some(n) if n <= isize::MAX as usize => {}
            _ => {
                return Err(AttnError::Overflow { what: "batch · seq · parts · heads · dim" });
            }
        }
        let (h, d) = (heads as isize, dim as isize);
        let row = parts as isize * h * d;
        Self::strided(data, sizes, [seq as isize * row, d, row, 1], part * heads * dim)
    }

    /// A matrix of `rows` positions, one batch and one head: Q, K or V of a textbook.
    ///
    /// # Errors
    /// As [`View::new`].
    pub const fn matrix(data: &'a [T], rows: usize, dim: usize) -> Result<Self> {
        Self::new(data, Layout::Bhsd, [1, 1, rows, dim])
    }

    /// A mask or bias of NumPy shape `shape` (rank 0 to 4, row-major), to be broadcast to
    /// `[batch, heads, q_len, kv_len]`: missing leading axes count as 1.
    ///
    /// # Errors
    /// [`AttnError::Rank`] above rank 4; as [`View::new`].
    pub const fn broadcast(data: &'a [T], shape: &[usize]) -> Result<Self> {
        if shape.len() > 4 {
            return Err(AttnError::Rank { what: "broadcast tensor", found: shape.len(), max: 4 });
        }
        let mut sizes = [1; 4];
        let mut i = 0;
        while i < shape.len() {
            sizes[4 - shape.len() + i] = shape[i];
            i += 1;
        }
        Self::new(data, Layout::Bhsd, sizes)
    }

    strided_queries!();

    /// The whole buffer of the view.
    pub const fn data(&self) -> &'a [T] {
        self.data
    }

    /// One row: the elements `[batch, head, seq, ..]`. Empty if a position is outside.
    #[inline]
    pub fn row(&self, batch: usize, head: usize, seq: usize) -> Row<'a, T> {
        let [nb, nh, ns, nd] = self.at.sizes;
        if batch >= nb || head >= nh || seq >= ns {
            return Row { data: &[], start: 0, stride: 1, len: 0 };
        }
        let (start, stride) = (self.at.index(batch, head, seq, 0), self.at.strides[3]);
        Row { data: self.data, start, stride, len: nd }
    }

    /// The same tensor with a last stride of 1, for rows that are contiguous: one element is at any stride.
    pub(crate) fn with_contiguous_rows(mut self) -> Self {
        self.at.strides[3] = 1;
        self
    }
}

impl<T: Copy + Default> View<'_, T> {
    /// One element; the type's zero if a position is outside.
    #[inline]
    pub fn at(&self, batch: usize, head: usize, seq: usize, dim: usize) -> T {
        self.row(batch, head, seq).get(dim)
    }

    /// One element of a tensor that broadcasts: an axis of size 1 answers for every position.
    #[inline]
    pub fn at_broadcast(&self, batch: usize, head: usize, seq: usize, dim: usize) -> T {
        let [nb, nh, ns, nd] = self.at.sizes;
        let pick = |i: usize, n: usize| if n == 1 { 0 } else { i };
        self.at(pick(batch, nb), pick(head, nh), pick(seq, ns), pick(dim, nd))
    }
}

impl<T> View<'_, T> {
    /// Checks that the tensor broadcasts to `[batch, heads, q_len, kv_len]`.
    ///
    /// # Errors
    /// [`AttnError::Broadcast`] naming the axis.
    pub const fn check_broadcast(&self, what: &'static str, to: [usize; 4]) -> Result<()> {
        let mut axis = 0;
        while axis < 4 {
            let (found, expected) = (self.at.sizes[axis], to[axis]);
            if found != expected && found != 1 {
                return Err(AttnError::Broadcast { what, axis, found, expected });
            }
            axis += 1;
        }
        Ok(())
    }
}

/// A borrowed, writable 4-D tensor `[batch, heads, seq, dim]` with strides, no two elements of which share memory.
///
/// ```
/// use attn_core::{Layout, ViewMut};
/// let mut data = [0.0f32; 24];
/// let mut out = ViewMut::new(&mut data, Layout::Bshd, [1, 2, 3, 4])?;
/// out.set(0, 1, 0, 0, 7.0);
/// assert_eq!(data[4], 7.0);
/// assert!(ViewMut::strided(&mut data, [1, 1, 3, 4], [0, 0, 0, 1], 0).is_err()); // three rows in one place
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    data: &'a mut [T],
    at: Strided,
}

impl<'a, T: Copy> ViewMut<'a, T> {
    /// A contiguous tensor; `sizes` are `[batch, heads, seq, dim]` whatever the layout.
    ///
    /// # Errors
    /// [`AttnError::TooShort`] or [`AttnError::Overflow`].
    pub fn new(data: &'a mut [T], layout: Layout, sizes: [usize; 4]) -> Result<Self> {
        let strides = layout.strides(sizes)?;
        Self::strided(data, sizes, strides, 0)
    }

    /// Any strides that keep all elements apart; `offset` is the index of element `[0, 0, 0, 0]`.
    ///
    /// # Errors
    /// As [`View::strided`], and [`AttnError::Overlap`] if two elements could share memory.
    pub fn strided(data: &'a mut [T], sizes: [usize; 4], strides: [isize; 4], offset: usize) -> Result<Self> {
        let at = Strided::new("output view", data.len(), sizes, strides, offset)?;
        at.check_distinct()?;
        Ok(Self { data, at })
    }

    /// A matrix of `rows` positions, one batch and one head.
    ///
    /// # Errors
    /// As [`ViewMut::new`].
    pub fn matrix(data: &'a mut [T], rows: usize, dim: usize) -> Result<Self> {
        Self::new(data, Layout::Bhsd, [1, 1, rows, dim])
    }

    strided_queries!();

    /// Writes one element; does nothing if a position is outside.
    #[inline]
    pub fn set(&mut self, batch: usize, head: usize, seq: usize, dim: usize, value: T) {
        let [nb, nh, ns, nd] = self.at.sizes;
        if batch < nb && head < nh && seq < ns && dim < nd {
            let index = self.at.index(batch, head, seq, dim);
            if let Some(x) = self.data.get_mut(index) {
                *x = value;
            }
        }
    }

    /// One row as a slice if its elements are contiguous; `None` if they are not, or if there is no such
    /// row.
    #[inline]
    pub fn row_mut(&mut self, batch: usize, head: usize, seq: usize) -> Option<&mut [T]> {
        let ([nb, nh, ns, nd], [.., unit]) = (self.at.sizes, self.at.strides);
        if batch >= nb || head >= nh || seq >= ns || (unit != 1 && nd > 1) {
            return None;
        }
        let start = self.at.index(batch, head, seq, 0);
        self.data.get_mut(start..)?.get_mut(..nd)
    }

    /// The same tensor, read-only.
    pub fn as_view(&self) -> View<'_, T> {
        View { data: self.data, at: self.at }
    }

    /// The same tensor for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { data: self.data, at: self.at }
    }

    /// The whole buffer of the view, for engines that write rows themselves.
    pub fn into_data(self) -> &'a mut [T] {
        self.data
    }
}
