//! The one error type of every engine.
//!
//! Errors come before anything is written to an output. Each variant names the two facts that disagree, and holds no
//! float and no allocation, so that printing one on a microcontroller does not link float formatting.

use core::fmt;

/// Why an attention call was refused. Nothing has been written to any output when this is returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub enum AttnError {
    /// Two sizes that must be equal are not.
    Size {
        /// What was checked, for example `"k head_dim against q head_dim"`.
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
    /// A product of sizes does not fit in `usize`.
    Overflow {
        /// Which product.
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
    /// An option has a value without meaning, such as a NaN scale.
    Option {
        /// Which option.
        name: &'static str,
        /// What it must be.
        must: &'static str,
    },
    /// An index or length from a table points outside of what it indexes.
    Index {
        /// Which table.
        what: &'static str,
        /// Position in the table.
        at: usize,
        /// The value found there (saturated).
        value: usize,
        /// The first value that is too large.
        limit: usize,
    },
    /// A table that must not decrease does.
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
    /// There is not as much memory as the scratch of a call needs.
    Memory {
        /// What it was for.
        what: &'static str,
        /// Bytes asked for (saturated).
        bytes: usize,
    },
    /// The options ask for something that this engine does not do.
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
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
                write!(f, "{q_heads} query heads do not divide into groups over {kv_heads} key/value heads")
            }
            Self::TooShort { what, needed, found } => {
                write!(f, "{what}: needs {needed} elements, the buffer holds {found}")
            }
            Self::Overflow { what } => write!(f, "{what}: the product of its sizes overflows"),
            Self::Underflow { what } => {
                write!(f, "{what}: its strides reach below the start of the buffer")
            }
            Self::Overlap { what, size, stride } => {
                write!(f, "{what}: elements share memory (an axis of size {size} with stride {stride})")
            }
            Self::Broadcast { what, axis, found, expected } => {
                write!(f, "{what}: axis {axis} has size {found}, which does not broadcast to {expected}")
            }
            Self::Rank { what, found, max } => {
                write!(f, "{what}: rank {found}, at most {max} is accepted")
            }
            Self::Option { name, must } => write!(f, "{name} must be {must}"),
            Self::Index { what, at, value, limit } => {
                write!(f, "{what}[{at}] is {value}, it must be below {limit}")
            }
            Self::Order { what, at } => write!(f, "{what}[{at}] is less than the entry before it"),
            Self::MaskTerms { max } => write!(f, "a mask holds at most {max} terms"),
            Self::Memory { what, bytes } => write!(f, "{what}: {bytes} bytes of memory are not to be had"),
            Self::Unsupported { what } => write!(f, "not supported: {what}"),
        }
    }
}

impl core::error::Error for AttnError {}
