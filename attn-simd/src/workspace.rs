//! Scratch memory of a call, aligned to cache lines and owned by the caller.
//!
//! A plan knows how many lines it needs, and then runs without allocating. [`Workspace`] is an owner that grows. A
//! caller without a heap passes a slice of [`Line`]s, which may be a static array.

#![allow(unsafe_code, reason = "allocates lines, and reads lines of floats as floats and as operands of AMX")]

use alloc::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use alloc::vec::Vec;

use attn_core::{AttnError, Result};

use crate::amx::product::Operand;
use crate::gemv::Stored;
use crate::pages::advise_huge_pages;

/// Refuses a head_dim or value_dim whose scratch sizes, which are small multiples of it, could overflow on 32 bits.
pub(crate) fn check_dims([head_dim, value_dim]: [usize; 2]) -> Result<()> {
    for (what, size) in [("head_dim", head_dim), ("value_dim", value_dim)] {
        if size > (isize::MAX as usize) >> 12 {
            return Err(AttnError::Overflow { what });
        }
    }
    Ok(())
}

/// One cache line of scratch: sixteen floats, aligned to 64 bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub struct Line(pub [f32; 16]);

// SAFETY: sixteen floats without padding, for which every pattern of bytes is a value.
#[cfg(feature = "bytemuck")]
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; `Copy`, `repr(C)`, as large as its alignment.
#[cfg(feature = "bytemuck")]
unsafe impl bytemuck::Pod for Line {}

impl Line {
    /// All zeros, for arrays.
    pub const ZERO: Self = Self([0.0; 16]);
}

/// Scratch that grows to what a call needs and is then reused.
///
/// ```
/// let mut workspace = attn_simd::Workspace::new();
/// assert_eq!(workspace.bytes(), 0);
/// workspace.lines(4); // what a plan does
/// assert!(workspace.bytes() >= 4 * 64);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    /// Some more than the lines need, because they start where the first of them is aligned.
    memory: Vec<Quarter>,
}

/// A quarter of a line, aligned as the system aligns what it allocates: for a larger alignment, zeros would be written.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Quarter([f32; 4]);

/// Quarters that hold `count` lines wherever they start.
fn quarters_for(count: usize) -> Option<usize> {
    if count == 0 { Some(0) } else { count.checked_mul(4)?.checked_add(3) }
}

impl Workspace {
    /// An empty workspace; allocates nothing.
    pub const fn new() -> Self {
        Self { memory: Vec::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.memory.capacity() * size_of::<Quarter>()
    }

    /// As [`lines`](Self::lines), with an error instead of an abort if there is not enough memory.
    ///
    /// # Errors
    /// [`AttnError::Memory`].
    pub fn try_lines(&mut self, count: usize) -> Result<&mut [Line]> {
        let error = AttnError::Memory { what: "workspace", bytes: count.saturating_mul(size_of::<Line>()) };
        let quarters = quarters_for(count).ok_or(error)?;
        if self.memory.len() < quarters {
            self.memory = Vec::new();
            self.memory = zeros(quarters).ok_or(error)?;
        }
        Ok(&mut aligned(&mut self.memory)[..count])
    }

    /// `count` lines, allocated anew if there are fewer. They hold numbers of earlier calls.
    pub fn lines(&mut self, count: usize) -> &mut [Line] {
        if self.try_lines(count).is_err() {
            // End as every vector does that gets no memory.
            handle_alloc_error(Layout::array::<Line>(count).unwrap_or(Layout::new::<Line>()));
        }
        &mut aligned(&mut self.memory)[..count]
    }
}

/// The lines in some memory.
fn aligned(memory: &mut [Quarter]) -> &mut [Line] {
    // SAFETY: four quarters without padding have the size of a line, whose floats may be any bits; the exclusive borrow
    // of the quarters is given up for that of the lines.
    unsafe { memory.align_to_mut::<Line>().1 }
}

/// Zeros from the system, not written here, so that the threads that use them touch their memory pages first. `None` if
/// there is not enough memory.
fn zeros(quarters: usize) -> Option<Vec<Quarter>> {
    let layout = Layout::array::<Quarter>(quarters).ok()?;
    if layout.size() == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the layout has a size.
    let start = unsafe { alloc_zeroed(layout) }.cast::<Quarter>();
    // SAFETY: the global allocator, which is `Vec`'s, has just given this memory for so many quarters; all of them are
    // zeros, which are floats.
    let mut memory = (!start.is_null()).then(|| unsafe { Vec::from_raw_parts(start, quarters, quarters) })?;
    advise_huge_pages(&mut memory);
    Some(memory)
}

/// Cuts scratch into arrays of floats, each starting on a line of its own.
pub(crate) struct Cutter<'w> {
    rest: &'w mut [f32],
}

impl<'w> Cutter<'w> {
    pub(crate) fn new(lines: &'w mut [Line]) -> Self {
        let len = lines.len() * 16;
        // SAFETY: a `Line` is `repr(C)` and exactly sixteen floats, so that the lines are `16·len` floats side by side;
        // the exclusive borrow of the lines is given up for that of the floats.
        let rest = unsafe { core::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<f32>(), len) };
        Self { rest }
    }

    /// The next `len` floats.
    pub(crate) fn floats(&mut self, len: usize) -> &'w mut [f32] {
        let rest = core::mem::take(&mut self.rest);
        let (now, later) = rest.split_at_mut(lines_for(len) * 16);
        self.rest = later;
        &mut now[..len]
    }

    /// The next `len` doubles.
    pub(crate) fn doubles(&mut self, len: usize) -> &'w mut [f64] {
        let floats = self.floats(2 * len);
        // SAFETY: these are `2·len` floats, which have the size of `len` doubles, and they start on a line, which is
        // further than a double must be aligned; any bits are a double. The borrow of the floats is given up.
        unsafe { core::slice::from_raw_parts_mut(floats.as_mut_ptr().cast::<f64>(), len) }
    }

    /// The next `count` operands of AMX.
    pub(crate) fn operands(&mut self, count: usize) -> &'w mut [Operand] {
        let floats = self.floats(count * 256);
        // SAFETY: an `Operand` is `repr(C)` and exactly 256 floats, so that these are `count` contiguous operands. They
        // start on a line, which is the alignment that an operand needs. The borrow of the operands replaces that of
        // the floats.
        unsafe { core::slice::from_raw_parts_mut(floats.as_mut_ptr().cast::<Operand>(), count) }
    }
}

/// Lines as the floats they hold.
pub(crate) fn floats(lines: &mut [Line]) -> &mut [f32] {
    let len = 16 * lines.len();
    Cutter::new(lines).floats(len)
}

/// Scratch as elements of another type that rows are stored in, as many as it holds.
pub(crate) fn elements_of<T: Stored>(floats: &mut [f32]) -> &mut [T] {
    const { assert!(size_of::<T>() <= size_of::<f32>() && align_of::<T>() <= align_of::<f32>()) }
    let len = size_of_val(floats) / size_of::<T>();
    // SAFETY: the memory of the floats holds `len` elements, which are not more aligned; any bits are a value of either
    // type; the exclusive borrow of the floats is given up for that of the elements.
    unsafe { core::slice::from_raw_parts_mut(floats.as_mut_ptr().cast::<T>(), len) }
}

/// Lines that hold `len` floats.
pub(crate) const fn lines_for(len: usize) -> usize {
    len.div_ceil(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_aligned_wherever_their_memory_starts() {
        for count in [0, 1, 2, 5] {
            let mut memory = [Quarter([1.0; 4]); 4 * 5 + 3 + 3];
            for start in 0..4 {
                let lines = aligned(&mut memory[start..][..quarters_for(count).unwrap()]);
                assert!(lines.len() >= count && lines.as_ptr().addr().is_multiple_of(64), "{count} lines from {start}");
            }
        }
        let mut workspace = Workspace::new();
        for (count, before) in [(3, 0.0), (2, 7.0), (9, 0.0)] {
            let lines = workspace.lines(count);
            assert_eq!((lines.len(), lines.as_ptr().addr() % 64), (count, 0));
            assert!(lines.iter().all(|line| line.0 == [before; 16]));
            lines.fill(Line([7.0; 16]));
        }
        assert!(workspace.bytes() >= 9 * 64 && workspace.try_lines(usize::MAX).is_err());
    }

    #[test]
    fn arrays_are_aligned_and_do_not_overlap() {
        let mut lines = [Line::ZERO; 8 + 32];
        let mut cutter = Cutter::new(&mut lines);
        let (a, b, operands, c) = (cutter.floats(17), cutter.floats(0), cutter.operands(2), cutter.doubles(48));
        a.fill(1.0);
        operands.fill(Operand([3.0; 256]));
        c.fill(2.0);
        assert_eq!((operands.len(), operands.as_ptr().addr() % 64), (2, 0));
        assert!(operands.iter().all(|operand| operand.0 == [3.0; 256]));
        assert_eq!((a.len(), b.len(), c.len(), c.as_ptr().addr() % 64), (17, 0, 48, 0));
        assert!(a.iter().all(|&x| x == 1.0));
        assert_eq!(a.as_ptr().addr() % 64, 0);
    }
}
