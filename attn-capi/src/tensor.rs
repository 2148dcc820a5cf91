//! Which elements of a caller's buffer a tensor reaches, and whether two buffers overlap. All of it is arithmetic,
//! before any reference is made.

use core::ops::Range;

use attn_core::formats::Format;
use attn_core::{AttnError, Layout};

use crate::error::{Error, Result};
use crate::types::{AttnDtype, AttnLayout, AttnTensor};

/// A tensor's elements, relative to the start of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reach {
    /// The lowest element reached.
    pub(crate) first: usize,
    /// Elements from there to the highest one reached; 0 for a tensor without elements.
    pub(crate) count: usize,
    /// Index of the element `[0, 0, 0, 0]`, from `first` on.
    pub(crate) offset: usize,
}

/// The part of its buffer that a tensor reaches, inside `len`.
pub(crate) fn reach(what: &'static str, tensor: &AttnTensor) -> Result<Reach> {
    if tensor.reserved != 0 {
        return Err(Error::Unknown { what: "AttnTensor.reserved", value: tensor.reserved });
    }
    if tensor.shape.contains(&0) {
        return Ok(Reach { first: 0, count: 0, offset: 0 });
    }
    if tensor.shape.into_iter().try_fold(1usize, usize::checked_mul).is_none() {
        return Err(AttnError::Overflow { what }.into());
    }
    // The lowest and the highest element. As the sizes' product fits in usize, none of these sums leaves an i128.
    let (mut low, mut high) = (tensor.offset as i128, tensor.offset as i128);
    for (size, stride) in tensor.shape.into_iter().zip(tensor.strides) {
        let way = (size as i128 - 1) * stride as i128;
        if way < 0 {
            low += way;
        } else {
            high += way;
        }
    }
    if low < 0 {
        return Err(AttnError::Underflow { what }.into());
    }
    let needed = usize::try_from(high + 1).map_err(|_| AttnError::Overflow { what })?;
    AttnError::check_len(what, needed, tensor.len)?;
    let first = low as usize; // at most `high`, which is below `len`
    Ok(Reach { first, count: needed - first, offset: tensor.offset - first })
}

/// The number type of a tensor, by its number.
pub(crate) fn dtype(what: &'static str, value: u32) -> Result<AttnDtype> {
    AttnDtype::of(value).ok_or(Error::Dtype { what, wanted: "an AttnDtype", value })
}

/// The format of rows of a dtype that caches may have in bytes.
pub(crate) fn format(dtype: AttnDtype) -> Option<Format> {
    Some(match dtype {
        AttnDtype::I8 => Format::Int8,
        AttnDtype::F8e4m3 => Format::E4m3,
        AttnDtype::F8e5m2 => Format::E5m2,
        AttnDtype::Q8_0 => Format::Q8_0,
        AttnDtype::Q4_0 => Format::Q4_0,
        AttnDtype::F16 => Format::F16,
        AttnDtype::Bf16 => Format::Bf16,
        _ => return None,
    })
}

/// Whether a dtype is one for caches only.
pub(crate) fn is_packed(dtype: AttnDtype) -> bool {
    format(dtype).is_some_and(|format| !matches!(format, Format::F16 | Format::Bf16))
}

/// The unit of a row's strides: elements, or bytes if blocks are larger than a number.
pub(crate) fn row_len(dtype: AttnDtype, dim: usize) -> Result<usize> {
    match format(dtype).filter(|format| format.block() > 1) {
        Some(format) => Ok(format.row_bytes(dim)?),
        None => Ok(dim),
    }
}

/// The same tensor with its sizes in bytes, of a dtype that caches may have.
pub(crate) fn in_bytes(what: &'static str, tensor: &AttnTensor) -> Result<(AttnTensor, Format)> {
    let dtype = dtype(what, tensor.dtype)?;
    let Some(format) = format(dtype) else {
        let wanted = "F16, BF16 or one for caches";
        return Err(Error::Dtype { what, wanted, value: tensor.dtype });
    };
    let ([batch, heads, seq, dim], overflow) = (tensor.shape, AttnError::Overflow { what });
    let shape = [batch, heads, seq, format.row_bytes(dim)?];
    // Halves count elements of two bytes, all others bytes.
    let size = if is_packed(dtype) { 1 } else { format.block_bytes() };
    let times = |n: usize| n.checked_mul(size).ok_or(overflow);
    let mut strides = tensor.strides;
    for stride in &mut strides[..3] {
        *stride = stride.checked_mul(size as isize).ok_or(overflow)?;
    }
    Ok((AttnTensor { shape, strides, len: times(tensor.len)?, offset: times(tensor.offset)?, ..*tensor }, format))
}

/// A layout, by its number.
pub(crate) fn layout(value: u32) -> Result<Layout> {
    match value {
        _ if value == AttnLayout::Bhsd as u32 => Ok(Layout::Bhsd),
        _ if value == AttnLayout::Bshd as u32 => Ok(Layout::Bshd),
        _ if value == AttnLayout::Sbhd as u32 => Ok(Layout::Sbhd),
        _ => Err(Error::Unknown { what: "layout", value }),
    }
}

/// Addresses that a call reads or writes, so that no output can meet anything else.
#[derive(Debug)]
pub(crate) struct Extents {
    all: [(&'static str, Range<usize>); Self::MAX],
    count: usize,
}

impl Extents {
    /// The most is a backward call: nine tensors, the lse and the sinks' gradient, and of the options five tensors and
    /// nine tables; with room to spare.
    const MAX: usize = 26;

    pub(crate) fn new() -> Self {
        Self { all: [const { ("", 0..0) }; Self::MAX], count: 0 }
    }

    /// Notes bytes that the call reads.
    pub(crate) fn read(&mut self, what: &'static str, bytes: Range<usize>) {
        if !bytes.is_empty() {
            self.all[self.count] = (what, bytes);
            self.count += 1;
        }
    }

    /// Notes bytes that the call writes, which must meet nothing noted before.
    pub(crate) fn write(&mut self, what: &'static str, bytes: Range<usize>) -> Result<()> {
        let meets = |other: &Range<usize>| other.start < bytes.end && bytes.start < other.end;
        if let Some((with, _)) = self.all[..self.count].iter().find(|(_, other)| !bytes.is_empty() && meets(other)) {
            return Err(Error::Overlap { what, with });
        }
        self.read(what, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(len: usize, shape: [usize; 4], strides: [isize; 4], offset: usize) -> AttnTensor {
        let struct_size = size_of::<AttnTensor>();
        AttnTensor { struct_size, data: core::ptr::null_mut(), len, shape, strides, offset, dtype: 1, reserved: 0 }
    }

    #[test]
    fn a_reach_is_what_the_strides_touch() {
        let reach = |len, shape, strides, offset| reach("q", &tensor(len, shape, strides, offset));
        assert_eq!(reach(24, [1, 2, 3, 4], [24, 12, 4, 1], 0), Ok(Reach { first: 0, count: 24, offset: 0 }));
        assert_eq!(reach(30, [1, 1, 3, 2], [0, 0, -8, 1], 20), Ok(Reach { first: 4, count: 18, offset: 16 }));
        assert_eq!(reach(0, [1, 0, 3, 4], [isize::MAX; 4], usize::MAX), Ok(Reach { first: 0, count: 0, offset: 0 }));
        assert_eq!(
            reach(23, [1, 2, 3, 4], [24, 12, 4, 1], 0),
            Err(AttnError::TooShort { what: "q", needed: 24, found: 23 }.into())
        );
        assert_eq!(reach(24, [1, 1, 2, 2], [0, 0, -2, 1], 1), Err(AttnError::Underflow { what: "q" }.into()));
        assert_eq!(
            reach(24, [usize::MAX; 4], [isize::MAX; 4], usize::MAX),
            Err(AttnError::Overflow { what: "q" }.into())
        );
    }

    #[test]
    fn outputs_meet_nothing_else() {
        let mut extents = Extents::new();
        extents.read("q", 100..200);
        extents.read("k", 150..250); // inputs may share memory
        extents.read("v", 0..0);
        assert_eq!(extents.write("out", 250..300), Ok(()));
        assert_eq!(extents.write("lse", 299..310), Err(Error::Overlap { what: "lse", with: "out" }));
        assert_eq!(extents.write("lse", 90..101), Err(Error::Overlap { what: "lse", with: "q" }));
        assert_eq!(extents.write("lse", 90..100), Ok(()));
        assert_eq!(extents.write("none", 120..120), Ok(()));
    }
}
