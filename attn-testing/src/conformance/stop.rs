//! Why a case has no result: skipped, or failed.

use attn_core::AttnError;

/// Why a case has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The library has no way to run it.
    Skip(String),
    /// It should have run.
    Fail(String),
}

impl From<AttnError> for Stop {
    fn from(error: AttnError) -> Self {
        match error {
            AttnError::Unsupported { .. } => Self::Skip(error.to_string()),
            _ => Self::Fail(format!("refused: {error}")),
        }
    }
}
