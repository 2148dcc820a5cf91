//! Why a call over ranks is refused: on every rank, before anything is computed.

use std::fmt;

use attn_core::AttnError;

/// Why a call over ranks was refused. Every rank gets an error for the same call, and no output has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// This rank's own arguments do not fit.
    Attn(AttnError),
    /// Another rank refused its own arguments; it has the reason.
    Refused {
        /// The first rank that did.
        rank: usize,
    },
    /// Two ranks call with different arguments, options or versions.
    Disagree {
        /// In what: `"kv_len"`, `"mask"`, `"version"`.
        what: &'static str,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// What rank 0 has: a size, or a hash of what is no number.
        first: u64,
        /// What that rank has.
        found: u64,
    },
    /// Two ranks run at different instruction-set levels, whose bits differ. `Cluster::allow_mixed_levels` permits it.
    MixedLevels {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Number of the level of rank 0, in the order portable, avx2, avx512, avx512bf16, amx, other. `dotprod`
        /// counts as portable: no call of ranks decodes over bytes, and all else has the same bits.
        first: u64,
        /// Number of the level of that rank.
        found: u64,
    },
}

/// `Result` with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl From<AttnError> for Error {
    fn from(error: AttnError) -> Self {
        Self::Attn(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Attn(error) => error.fmt(f),
            Self::Refused { rank } => write!(f, "rank {rank} refused its arguments"),
            Self::Disagree { what, rank, first, found } => {
                write!(f, "ranks disagree about {what}: {first} on rank 0, {found} on rank {rank}")
            }
            Self::MixedLevels { rank, first, found } => {
                let name = |n: u64| usize::try_from(n).ok().and_then(|n| LEVELS.get(n)).copied().unwrap_or("another");
                write!(f, "ranks run at different levels: {} on rank 0, {} on rank {rank}", name(first), name(found))
            }
        }
    }
}

impl std::error::Error for Error {}

/// Names of the levels in the order of their numbers in [`Error::MixedLevels`].
pub(crate) const LEVELS: [&str; 5] = ["portable", "avx2", "avx512", "avx512bf16", "amx"];
