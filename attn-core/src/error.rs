//! The one error type of every engine.
//!
//! An error comes before any output is written, unless the caller stopped a running call. Each variant names the two
//! facts that disagree. It holds no float, so that printing it on a microcontroller links no float formatting, and it
//! allocates nothing.

use core::fmt;

/// Why an attention call was refused. No output has been written, but for [`Stopped`](Self::Stopped).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub enum AttnError {
    /// Two sizes that must be equal are not.
    Size {
        /// Which sizes, for example `"k head_dim against q head_dim"`.
        what: &'static str,
        /// The size that was required.
        expected: usize,
        /// The size that was given.
        found: usize,
    },
    /// The query heads do not divide into groups of the key/value heads.
    Heads {
        /// Number of query heads.
        q_heads: usize,
        /// Number of key/value heads.
        kv_heads: usize,
    },
    /// A buffer holds fewer elements than its sizes and strides reach.
    TooShort {
        /// Which buffer.
        what: &'static str,
        /// Elements needed.
        needed: usize,
        /// Elements given.
        found: usize,
    },
    /// A product or sum of sizes does not fit in `usize`.
    Overflow {
        /// Which one.
        what: &'static str,
    },
    /// The strides reach below the first element of the buffer.
    Underflow {
        /// Which view.
        what: &'static str,
    },
    /// Two elements of an output share memory, or an output shares memory with an input.
    Overlap {
        /// Which output.
        what: &'static str,
        /// Size of the axis whose steps collide.
        size: usize,
        /// Its stride in elements.
        stride: isize,
    },
    /// A mask or bias axis is neither 1 nor the size it must broadcast to.
    Broadcast {
        /// Which tensor.
        what: &'static str,
        /// Axis, counted over `[batch, heads, q_len, kv_len]`.
        axis: usize,
        /// The size given.
        found: usize,
        /// The size it must be, if it is not 1.
        expected: usize,
    },
    /// More axes than four.
    Rank {
        /// Which tensor.
        what: &'static str,
        /// The rank given.
        found: usize,
        /// The largest rank accepted.
        max: usize,
    },
    /// An option has a value that is not allowed, such as a NaN scale.
    Option {
        /// Which option.
        name: &'static str,
        /// The values that it may have.
        must: &'static str,
    },
    /// An index or length in a table is out of range.
    Index {
        /// Which table.
        what: &'static str,
        /// Position in the table.
        at: usize,
        /// The value found there (saturated).
        value: usize,
        /// The first value that is out of range.
        limit: usize,
    },
    /// A number is larger than another one allows.
    Beyond {
        /// Which number.
        what: &'static str,
        /// The number given.
        value: usize,
        /// The largest that is allowed.
        most: usize,
    },
    /// A table decreases, and must not.
    Order {
        /// Which table.
        what: &'static str,
        /// Position of the value that is less than the one before it.
        at: usize,
    },
    /// More mask terms than a [`Mask`](crate::Mask) holds.
    MaskTerms {
        /// How many a mask can hold.
        max: usize,
    },
    /// The scratch of a call cannot be allocated.
    Memory {
        /// Which buffer.
        what: &'static str,
        /// Its size in bytes (saturated).
        bytes: usize,
    },
    /// This engine does not have a feature that the options need.
    Unsupported {
        /// Which feature.
        what: &'static str,
    },
    /// The caller stopped a running call. Rows of the output that were written have their results; the others hold what
    /// they held before.
    Stopped,
}

/// `Result` with [`AttnError`].
pub type Result<T> = core::result::Result<T, AttnError>;

impl AttnError {
    /// `Ok` if the two sizes agree, otherwise [`AttnError::Size`].
    ///
    /// ```
    /// use attn_core::AttnError;
    /// assert!(AttnError::check_size("value_dim", 4, 4).is_ok());
    /// assert!(AttnError::check_size("value_dim", 4, 5).is_err());
    /// ```
    pub const fn check_size(what: &'static str, expected: usize, found: usize) -> Result<()> {
        if expected == found { Ok(()) } else { Err(Self::Size { what, expected, found }) }
    }

    /// `Ok` if a buffer of `found` elements holds `needed`, otherwise [`AttnError::TooShort`].
    pub const fn check_len(what: &'static str, needed: usize, found: usize) -> Result<()> {
        if needed <= found { Ok(()) } else { Err(Self::TooShort { what, needed, found }) }
    }
}

impl fmt::Display for AttnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Size { what, expected, found } => write!(f, "{what}: expected {expected}, found {found}"),
            Self::Heads { q_heads, kv_heads } => {
                write!(f, "q_heads is {q_heads}, which is not a multiple of kv_heads = {kv_heads}")
            }
            Self::TooShort { what, needed, found } => {
                write!(f, "{what}: {needed} elements are needed, {found} were given")
            }
            Self::Overflow { what } => write!(f, "{what}: the size overflows"),
            Self::Underflow { what } => {
                write!(f, "{what}: the strides reach below the start of the buffer")
            }
            Self::Overlap { what, size, stride } => {
                write!(f, "{what}: two elements share memory (axis of size {size}, stride {stride})")
            }
            Self::Broadcast { what, axis, found, expected } => {
                write!(f, "{what}: axis {axis} has size {found}, which does not broadcast to {expected}")
            }
            Self::Rank { what, found, max } => {
                write!(f, "{what} has {found} axes, at most {max} are allowed")
            }
            Self::Option { name, must } => write!(f, "{name} must be {must}"),
            Self::Index { what, at, value, limit } => {
                match value {
                    // The number was negative, or does not fit in `usize`.
                    usize::MAX => write!(f, "{what}[{at}] is out of range, ")?,
                    _ => write!(f, "{what}[{at}] is {value}, ")?,
                }
                match limit.checked_sub(1) {
                    Some(most) => write!(f, "at most {most} is allowed"),
                    None => f.write_str("but there is nothing to index"),
                }
            }
            Self::Beyond { what, value, most } => write!(f, "{what} is {value}, at most {most} is allowed"),
            Self::Order { what, at } => write!(f, "{what}[{at}] is less than the entry before it"),
            Self::MaskTerms { max } => write!(f, "a mask holds at most {max} terms"),
            Self::Memory { what, bytes } => write!(f, "{what}: cannot allocate {bytes} bytes"),
            Self::Unsupported { what } => write!(f, "not supported: {what}"),
            Self::Stopped => f.write_str("the caller stopped the call"),
        }
    }
}

impl core::error::Error for AttnError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{Documents, Tree};
    use crate::{Attention, AttnShape, Layout, Mask, View, ViewMut};
    use std::string::ToString;

    #[test]
    fn what_a_table_may_hold_is_said() {
        let sizes = [2, 1, 90, 4];
        let shape = AttnShape::new(sizes, sizes, sizes).unwrap();
        let text = |mask: Mask<'_>| Attention::new().mask(mask).check(&shape).unwrap_err().to_string();
        assert_eq!(text(Mask::kv_lens(&[90, 91])), "kv_lens[1] is 91, at most 90 is allowed");
        let documents = Documents::new(&[0, 90], &[0, 91]);
        assert_eq!(text(Mask::documents(documents)), "cu_k[1] is 91, at most 90 is allowed");
        let mut parents = [None; 90];
        (parents[0], parents[2]) = (Some(0), Some(1));
        let first = text(Mask::tree(Tree { parents: &parents }));
        assert_eq!(first, "tree parents[0] is 0, but there is nothing to index");
        parents[0] = None;
        parents[2] = Some(2);
        assert_eq!(text(Mask::tree(Tree { parents: &parents })), "tree parents[2] is 2, at most 1 is allowed");
        let negative = AttnError::Index { what: "block_table", at: 3, value: usize::MAX, limit: 3 };
        assert_eq!(negative.to_string(), "block_table[3] is out of range, at most 2 is allowed");
    }

    #[test]
    fn a_short_buffer_is_that_of_a_view() {
        let mut data = [0.0f32; 24];
        let sizes = [1, 2, 3, 5];
        let text = View::new(&data, Layout::Bhsd, sizes).unwrap_err().to_string();
        assert_eq!(text, "view: 30 elements are needed, 24 were given");
        let text = ViewMut::new(&mut data, Layout::Bhsd, sizes).err().map(|e| e.to_string());
        assert_eq!(text.as_deref(), Some("output view: 30 elements are needed, 24 were given"));
        let text = ViewMut::strided(&mut data, [1, 1, 2, 1], [0, 0, -1, 1], 0).err().map(|e| e.to_string());
        assert_eq!(text.as_deref(), Some("output view: the strides reach below the start of the buffer"));
    }
}
