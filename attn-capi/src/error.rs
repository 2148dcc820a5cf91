//! Errors in C: a status, and a text that the thread keeps.
//!
//! Each thread has a fixed buffer for the text, so that reporting an error allocates nothing, and a pointer to it is
//! valid as long as the thread lives. [`guard`] wraps every function of the header, so that no panic leaves this
//! library.

use core::cell::Cell;
use core::ffi::c_char;
use core::fmt::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use attn_core::AttnError;
use attn_simd::LevelError;

use crate::types::{AttnDtype, AttnStatus};

/// Why a function refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Error {
    /// The engines' own.
    Attn(AttnError),
    /// A pointer that must not be null.
    Null(&'static str),
    /// A struct_size that no version has.
    StructSize { what: &'static str, found: usize, known: usize },
    /// A struct of a newer version that sets a field which this version does not know.
    StructTail { what: &'static str, known: usize },
    /// A pointer that is not aligned for its type.
    Misaligned { what: &'static str, align: usize },
    /// An output that shares memory with another buffer.
    Overlap { what: &'static str, with: &'static str },
    /// A number that is no constant of its enum, or a reserved field that is not zero.
    Unknown { what: &'static str, value: u32 },
    /// A field that would have no effect, because another field has the wrong value.
    Idle { what: &'static str, needs: &'static str },
    /// A dtype that is not allowed here.
    Dtype { what: &'static str, wanted: &'static str, value: u32 },
    /// A byte of a boolean tensor that is neither 0 nor 1.
    NotBool { what: &'static str, at: usize, value: u8 },
    /// A text longer than the caller's buffer.
    Text { needed: usize, found: usize },
    /// A level that does not exist, or that this machine lacks, and what names it.
    Level { what: &'static str, error: LevelError },
    /// A workspace that another call uses.
    Busy,
    /// A panic was caught.
    Panic,
}

/// The result of everything inside.
pub(crate) type Result<T> = core::result::Result<T, Error>;

impl From<AttnError> for Error {
    fn from(error: AttnError) -> Self {
        Self::Attn(error)
    }
}

impl Error {
    fn status(self) -> AttnStatus {
        match self {
            Self::Attn(error) => match error {
                AttnError::TooShort { .. } | AttnError::Underflow { .. } => AttnStatus::Bounds,
                AttnError::Overflow { .. } => AttnStatus::Overflow,
                AttnError::Overlap { .. } => AttnStatus::Overlap,
                AttnError::Option { .. } | AttnError::MaskTerms { .. } => AttnStatus::Option,
                AttnError::Index { .. } | AttnError::Order { .. } | AttnError::Beyond { .. } => AttnStatus::Table,
                AttnError::Unsupported { .. } => AttnStatus::Unsupported,
                AttnError::Memory { .. } => AttnStatus::OutOfMemory,
                _ => AttnStatus::Shape, // sizes, heads, broadcasts, ranks
            },
            Self::Null(_) => AttnStatus::NullPointer,
            Self::StructSize { .. } | Self::StructTail { .. } => AttnStatus::StructSize,
            Self::Misaligned { .. } => AttnStatus::Misaligned,
            Self::Overlap { .. } => AttnStatus::Overlap,
            Self::Unknown { .. }
            | Self::Idle { .. }
            | Self::Dtype { .. }
            | Self::Level { error: LevelError::Unknown, .. } => AttnStatus::Option,
            Self::NotBool { .. } => AttnStatus::Table,
            Self::Text { .. } => AttnStatus::Bounds,
            Self::Level { .. } => AttnStatus::Unsupported,
            Self::Busy => AttnStatus::Busy,
            Self::Panic => AttnStatus::Internal,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Attn(error) => error.fmt(f),
            Self::Null(what) => write!(f, "{what} is null"),
            Self::StructSize { what, found, known } => {
                write!(f, "{what}: struct_size is {found}, this version has {known} bytes")
            }
            Self::StructTail { what, known } => {
                write!(f, "{what}: a field after byte {known} is set, and this version of the library does not know it")
            }
            Self::Misaligned { what, align } => write!(f, "{what} is not aligned to {align} bytes"),
            Self::Overlap { what, with } => write!(f, "{what} shares memory with {with}"),
            Self::Unknown { what, value } => write!(f, "{what} is {value}, which is not an allowed value"),
            Self::Idle { what, needs } => write!(f, "{what} is set without effect: {needs}"),
            Self::Dtype { what, wanted, value } => match AttnDtype::of(value) {
                Some(dtype) => write!(f, "{what}: dtype is {} ({value}), must be {wanted}", dtype.name()),
                None => write!(f, "{what}: dtype is {value}, must be {wanted}"),
            },
            Self::NotBool { what, at, value } => {
                write!(f, "{what}: byte {at} is {value}; a boolean tensor holds 0 and 1 only")
            }
            Self::Text { needed, found } => write!(f, "text needs {needed} bytes, text_size is {found}"),
            Self::Level { what, error } => write!(f, "{what}: {error}"),
            Self::Busy => write!(f, "another call uses the workspace"),
            Self::Panic => write!(f, "internal error: a panic was caught, please report it"),
        }
    }
}

/// Bytes of the text, with its closing zero.
const TEXT: usize = 256;

thread_local! {
    static LAST: Cell<[u8; TEXT]> = const { Cell::new([0; TEXT]) };
}

/// This thread's text: a string that ends with 0, empty if no call has failed.
pub(crate) fn last() -> *const c_char {
    LAST.with(|last| last.as_ptr().cast::<c_char>().cast_const())
}

/// A text, cut at the end of the buffer.
struct Cut {
    bytes: [u8; TEXT],
    len: usize,
}

impl Write for Cut {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut take = text.len().min(TEXT - 1 - self.len);
        while !text.is_char_boundary(take) {
            take -= 1;
        }
        self.bytes[self.len..self.len + take].copy_from_slice(&text.as_bytes()[..take]);
        self.len += take;
        if take < text.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

/// Runs a function of the header: an error becomes a status and a text, and a panic is caught.
pub(crate) fn guard(entry: impl FnOnce() -> Result<()>) -> AttnStatus {
    let error = match catch_unwind(AssertUnwindSafe(entry)) {
        Ok(Ok(())) => return AttnStatus::Ok,
        Ok(Err(error)) => error,
        Err(payload) => {
            core::mem::forget(payload); // dropping it could panic again
            Error::Panic
        }
    };
    let mut text = Cut { bytes: [0; TEXT], len: 0 };
    let _ = write!(text, "{error}"); // a text that was cut is still a text
    LAST.with(|last| last.set(text.bytes));
    error.status()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> String {
        let bytes = LAST.with(Cell::get);
        let end = bytes.iter().position(|&b| b == 0).expect("a closing zero");
        String::from_utf8(bytes[..end].to_vec()).expect("whole characters")
    }

    #[test]
    fn a_panic_becomes_a_status() {
        let status = guard(|| panic!("this message belongs to a test"));
        assert_eq!((status, text().starts_with("internal error")), (AttnStatus::Internal, true));
    }

    #[test]
    fn the_text_stays_until_the_next_error_and_belongs_to_the_thread() {
        assert_eq!(text(), "");
        assert_eq!(guard(|| Err(Error::Null("q"))), AttnStatus::NullPointer);
        assert_eq!(guard(|| Ok(())), AttnStatus::Ok);
        assert_eq!(text(), "q is null");
        std::thread::spawn(|| assert_eq!(text(), "")).join().unwrap();
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let mut cut = Cut { bytes: [0; TEXT], len: 0 };
        assert!(cut.write_str(&"é".repeat(200)).is_err());
        assert_eq!((cut.len, cut.bytes[TEXT - 1]), (254, 0));
        assert!(core::str::from_utf8(&cut.bytes[..cut.len]).is_ok());
    }
}
