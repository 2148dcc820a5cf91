//! The output of the kernels: each block of query rows is handed out exactly once, to the first thread that claims it.
//!
//! [`Queue`] cuts the output into blocks of rows. [`Queue::claim`] gives each block to one caller, by an atomic
//! counter, and the [`Claim`] is the right to write those rows and no others. So threads can share a queue with safe
//! code: two claims never name the same row, and a [`ViewMut`] has proved that no two rows share memory. Blocks with
//! the most keys under a causal mask come first, so that what is left at the end is small.

#![allow(
    unsafe_code,
    reason = "the leaf: rows of one output written by several threads, through claims that never overlap"
)]

pub(crate) mod heads;
pub(crate) mod rows;

use core::marker::PhantomData;
use core::sync::atomic::{AtomicUsize, Ordering};

use attn_core::half::{bf16, f16};
use attn_core::{AttnShape, ViewMut};

use crate::isa::{Isa, MAX_LANES, narrow_bf16};

/// An output of any element type that the kernels take.
#[derive(Debug)]
pub enum Target<'o> {
    /// Single precision.
    F32(RawView<'o, f32>),
    /// Half precision, rounded once.
    F16(RawView<'o, f16>),
    /// bfloat16, rounded once.
    Bf16(RawView<'o, bf16>),
}

/// A [`ViewMut`] taken apart, so that rows can be written through a shared reference.
#[derive(Debug)]
pub struct RawView<'o, T> {
    data: *mut T,
    strides: [isize; 4],
    offset: usize,
    _borrow: PhantomData<&'o mut [T]>,
}

// SAFETY: it stands for an exclusive borrow of the elements; rows are written only through claims, no two of which
// overlap.
unsafe impl<T: Send> Send for RawView<'_, T> {}
// SAFETY: as above: sharing the view shares no element.
unsafe impl<T: Send> Sync for RawView<'_, T> {}

impl<'o, T: Copy> RawView<'o, T> {
    pub(crate) fn new(view: ViewMut<'o, T>) -> Self {
        let (strides, offset) = (view.strides(), view.offset());
        Self { data: view.into_data().as_mut_ptr(), strides, offset, _borrow: PhantomData }
    }

    /// Address of the element `[batch, head, query, channel]`.
    ///
    /// # Safety
    /// The position lies inside the view.
    #[inline(always)]
    unsafe fn at(&self, [batch, head, query, channel]: [usize; 4]) -> *mut T {
        let [sb, sh, sq, sc] = self.strides;
        let index = self.offset as isize
            + batch as isize * sb
            + head as isize * sh
            + query as isize * sq
            + channel as isize * sc;
        // SAFETY: the caller vouches for the position, and `ViewMut` has proved that all positions lie inside its
        // slice.
        unsafe { self.data.offset(index) }
    }

    /// The first `count` elements of `count` rows from a position on.
    ///
    /// # Safety
    /// They lie inside the view, side by side within a row, and nobody else reads or writes them as long as the slices
    /// live.
    #[inline(always)]
    unsafe fn lines<'l>(&self, position: [usize; 4], count: usize) -> impl Iterator<Item = &'l mut [T]> + use<'l, 'o, T>
    where
        T: 'l,
    {
        // SAFETY: the caller vouches for the position.
        let (start, stride) = (unsafe { self.at(position) }, self.strides[2]);
        (0..count).map(move |n| {
            // SAFETY: the caller vouches for `count` elements of as many rows.
            unsafe { core::slice::from_raw_parts_mut(start.offset(n as isize * stride), count) }
        })
    }
}

/// The log-sum-exp of all rows, or nowhere to write it.
#[derive(Debug)]
struct RawLse<'o> {
    data: Option<*mut f32>,
    _borrow: PhantomData<&'o mut [f32]>,
}

// SAFETY: it stands for an exclusive borrow; one element per row, written only through the row's claim.
unsafe impl Send for RawLse<'_> {}
// SAFETY: as above.
unsafe impl Sync for RawLse<'_> {}

/// Some query rows of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    /// The first query.
    pub(crate) first: usize,
    /// How many; at least 1.
    pub(crate) count: usize,
}

impl Rows {
    /// The same rows in order, at most `most` at a time.
    pub(crate) fn pieces(self, most: usize) -> impl Iterator<Item = Self> {
        (0..self.count).step_by(most).map(move |from| {
            let count = (self.count - from).min(most);
            Self { first: self.first + from, count, ..self }
        })
    }
}

/// The output of a call, cut into blocks of at most `q_tile` query rows.
#[derive(Debug)]
pub(crate) struct Queue<'o> {
    target: Target<'o>,
    lse: RawLse<'o>,
    shape: AttnShape,
    q_tile: usize,
    next: AtomicUsize,
}

impl<'o> Queue<'o> {
    /// `target` and `lse` have been checked against the shape.
    pub(crate) fn new(target: Target<'o>, lse: Option<&'o mut [f32]>, shape: AttnShape, q_tile: usize) -> Self {
        if let Some(lse) = &lse {
            assert_eq!(lse.len(), shape.rows(), "checked by the caller");
        }
        let lse = RawLse { data: lse.map(<[f32]>::as_mut_ptr), _borrow: PhantomData };
        Self { target, lse, shape, q_tile, next: AtomicUsize::new(0) }
    }

    /// Cuts it anew, into blocks of at most `q_tile` rows, before any has been claimed.
    pub(crate) fn cut(&mut self, q_tile: usize) {
        debug_assert_eq!(*self.next.get_mut(), 0, "nothing was claimed");
        self.q_tile = q_tile;
    }

    /// How many blocks there are in all.
    pub(crate) fn len(&self) -> usize {
        if self.shape.value_dim == 0 && self.lse.data.is_none() {
            return 0; // nothing would be written, and no memory bounds the number of rows
        }
        self.shape.batch * self.shape.q_heads * self.shape.q_len.div_ceil(self.q_tile)
    }

    /// The rows of a block; the same for every call, and disjoint for different indices.
    fn rows(&self, index: usize) -> Rows {
        let AttnShape { q_heads, q_len, .. } = self.shape;
        let blocks = q_len.div_ceil(self.q_tile);
        let (pair, block) = (index / blocks, blocks - 1 - index % blocks);
        // The first block takes what is left over: a block of few rows keeps fewer lanes busy, and under a causal mask
        // the first rows have the fewest keys.
        let start =
            |block: usize| (block * self.q_tile).saturating_sub((self.q_tile - q_len % self.q_tile) % self.q_tile);
        let first = start(block);
        Rows { batch: pair / q_heads, head: pair % q_heads, first, count: start(block + 1) - first }
    }

    /// The next block that nobody has, if any.
    pub(crate) fn claim(&self) -> Option<Claim<'_, 'o>> {
        // Relaxed is enough: the counter alone hands out blocks, and the end of the call joins the threads.
        let index = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < self.len()).then(|| n + 1));
        Some(Claim { rows: self.rows(index.ok()?), queue: self })
    }
}

/// The exclusive right to write the rows of one block.
#[derive(Debug)]
pub(crate) struct Claim<'q, 'o> {
    queue: &'q Queue<'o>,
    rows: Rows,
}

impl<'o> Claim<'_, 'o> {
    /// Which rows.
    pub(crate) fn rows(&self) -> Rows {
        self.rows
    }

    /// The right to some of the block's rows, as long as the whole is not used.
    pub(crate) fn part(&mut self, from: usize, count: usize) -> Claim<'_, 'o> {
        assert!(count > 0 && count <= self.rows.count && from <= self.rows.count - count);
        Claim { queue: self.queue, rows: Rows { first: self.rows.first + from, count, ..self.rows } }
    }

    /// Whether the call writes the log-sum-exp.
    pub(crate) fn wants_lse(&self) -> bool {
        self.queue.lse.data.is_some()
    }

    /// Writes the log-sum-exp of the block's row `row`.
    pub(crate) fn set_lse(&mut self, row: usize, value: f32) {
        assert!(row < self.rows.count);
        if let Some(data) = self.queue.lse.data {
            let index = self.queue.shape.row(self.rows.batch, self.rows.head, self.rows.first + row);
            // SAFETY: the row lies inside the shape and `new` checked that there is one element per row; this claim
            // alone writes the row's.
            unsafe { data.add(index).write(value) }
        }
    }

    /// The first of the block's rows and their stride, if they are `f32` with contiguous channels.
    #[inline(always)]
    pub(crate) fn plain_rows(&self) -> Option<(*mut f32, isize)> {
        match &self.queue.target {
            Target::F32(view) if view.strides[3] == 1 && self.queue.shape.value_dim > 0 => {
                // SAFETY: the first row of the claim lies inside the view, and it has at least one channel.
                let first = unsafe { view.at([self.rows.batch, self.rows.head, self.rows.first, 0]) };
                Some((first, view.strides[2]))
            }
            _ => None,
        }
    }

    /// The block that this thread will probably claim next: a guess, for hints.
    pub(crate) fn likely_next(&self) -> Option<Rows> {
        let index = self.queue.next.load(Ordering::Relaxed);
        (index < self.queue.len()).then(|| self.queue.rows(index))
    }

    /// Writes a square of `LANES` rows from `row` on and as many channels from `channel` on, transposed from
    /// `src[channel][row]`, if the rows are plain `f32`. Says whether it has.
    #[inline(always)]
    pub(crate) fn write_square<I: Isa>(
        &mut self,
        isa: I,
        [row, channel]: [usize; 2],
        src: &[f32],
        width: usize,
    ) -> bool {
        let Some((first, stride)) = self.plain_rows() else { return false };
        assert!(row + I::LANES <= self.rows.count && channel + I::LANES <= self.queue.shape.value_dim);
        assert!((I::LANES - 1) * width + I::LANES <= src.len());
        // SAFETY: the rows are this claim's and the channels below `value_dim`, as was just asserted, so that the
        // square lies inside the view and nobody else writes it; the source holds LANES rows `width` apart.
        unsafe {
            let dst = first.offset(row as isize * stride).add(channel);
            isa.transpose_ptr(src.as_ptr(), width as isize, dst, stride);
        }
        true
    }

    /// Writes a square of `LANES` rows from `row` on and as many channels from `channel` on, from `src[row][channel]`,
    /// rounded once, if the rows are halves with contiguous channels. Says whether it has.
    #[inline(always)]
    pub(crate) fn write_halves<I: Isa>(&mut self, isa: I, [row, channel]: [usize; 2], src: &[f32; 256]) -> bool {
        assert!(row + I::LANES <= self.rows.count && channel + I::LANES <= self.queue.shape.value_dim);
        let at = [self.rows.batch, self.rows.head, self.rows.first + row, channel];
        let lines = src.chunks_exact(I::LANES).take(I::LANES);
        match &self.queue.target {
            Target::F16(view) if view.strides[3] == 1 => {
                // SAFETY: the square lies inside the view, as was just asserted; this claim alone writes its rows, and
                // no other row shares memory with them.
                for (dst, src) in unsafe { view.lines(at, I::LANES) }.zip(lines) {
                    isa.store_f16(isa.load(src), dst);
                }
            }
            Target::Bf16(view) if view.strides[3] == 1 => {
                // SAFETY: as above.
                for (dst, src) in unsafe { view.lines(at, I::LANES) }.zip(lines) {
                    isa.store_bf16(isa.load(src), dst);
                }
            }
            _ => return false,
        }
        true
    }

    /// Writes `values`, a vector at most, to the channels from `from` on of the block's row `row`, rounding once where
    /// the output is narrower.
    #[inline(always)]
    pub(crate) fn write<I: Isa>(&mut self, isa: I, row: usize, from: usize, values: &[f32]) {
        let end = from.checked_add(values.len());
        assert!(row < self.rows.count && end.is_some_and(|end| end <= self.queue.shape.value_dim));
        assert!(values.len() <= I::LANES);
        if values.is_empty() {
            return;
        }
        let at = [self.rows.batch, self.rows.head, self.rows.first + row, from];
        // SAFETY: the position and the channels behind it lie inside the view, whose sizes were checked against the
        // shape; this claim alone writes the row, and no other row shares memory with it.
        unsafe {
            match &self.queue.target {
                Target::F32(view) => {
                    fill(
                        view,
                        at,
                        values,
                        #[inline(always)]
                        |dst| {
                            // A vector of known length, where a copy of any length would be a call.
                            if values.len() == I::LANES {
                                isa.store(isa.load(values), dst);
                            } else {
                                dst.copy_from_slice(values);
                            }
                        },
                        |x| x,
                    );
                }
                Target::F16(view) => {
                    fill(
                        view,
                        at,
                        values,
                        #[inline(always)]
                        |dst| {
                            let (mut wide, mut narrow) = ([0.0; MAX_LANES], [f16::ZERO; MAX_LANES]);
                            wide[..values.len()].copy_from_slice(values);
                            isa.store_f16(isa.load(&wide), &mut narrow);
                            dst.copy_from_slice(&narrow[..values.len()]);
                        },
                        f16::from_f32,
                    );
                }
                Target::Bf16(view) => {
                    fill(
                        view,
                        at,
                        values,
                        #[inline(always)]
                        |dst| {
                            let (mut wide, mut narrow) = ([0.0; MAX_LANES], [bf16::ZERO; MAX_LANES]);
                            wide[..values.len()].copy_from_slice(values);
                            isa.store_bf16(isa.load(&wide), &mut narrow);
                            dst.copy_from_slice(&narrow[..values.len()]);
                        },
                        narrow_bf16,
                    );
                }
            }
        }
    }
}

/// Writes a run of channels: as a slice if they are contiguous, else one by one.
///
/// # Safety
/// The run lies inside the view, and nobody else reads or writes it.
#[inline(always)]
unsafe fn fill<T: Copy>(
    view: &RawView<'_, T>,
    at: [usize; 4],
    values: &[f32],
    whole: impl FnOnce(&mut [T]),
    one: impl Fn(f32) -> T,
) {
    // SAFETY: the caller vouches for the whole run; with a stride of 1 its elements lie side by side.
    unsafe {
        let start = view.at(at);
        let stride = view.strides[3];
        if stride == 1 {
            whole(core::slice::from_raw_parts_mut(start, values.len()));
        } else {
            for (n, &x) in values.iter().enumerate() {
                start.offset(n as isize * stride).write(one(x));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use attn_core::Layout;

    use super::*;

    #[test]
    fn every_row_is_claimed_exactly_once() {
        for (batch, heads, q_len) in [(1, 1, 0), (2, 3, 1), (1, 2, 47), (2, 2, 48), (1, 1, 49), (3, 1, 200)] {
            let shape = AttnShape::new([batch, heads, q_len, 8], [batch, heads, 4, 8], [batch, heads, 4, 2]).unwrap();
            let mut data = vec![0.0f32; shape.rows() * 2];
            let view = ViewMut::new(&mut data, Layout::Bhsd, shape.output()).unwrap();
            let queue = Queue::new(Target::F32(RawView::new(view)), None, shape, 48);
            let mut seen: Vec<usize> = Vec::new();
            while let Some(claim) = queue.claim() {
                let rows = claim.rows();
                assert!(rows.count >= 1 && rows.count <= 48);
                seen.extend((rows.first..rows.first + rows.count).map(|i| shape.row(rows.batch, rows.head, i)));
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..shape.rows()).collect::<Vec<_>>());
            assert!(queue.claim().is_none());
        }
    }

    #[test]
    fn bf16_rounds_like_the_library() {
        for bits in (0..=u32::MAX).step_by(if cfg!(miri) { 10_000_019 } else { 4099 }) {
            let x = f32::from_bits(bits);
            let (got, want) = (narrow_bf16(x), bf16::from_f32(x));
            assert!(got == want || got.is_nan() && want.is_nan(), "{bits:#x}: {got} {want}");
        }
    }
}
