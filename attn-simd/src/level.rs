//! Which instruction sets this machine has, and which one runs: the only module that asks the CPU.
//!
//! A [`Level`] holds a proof token, so that having one means having the instructions. It is chosen once per plan and handed
//! down; nothing below asks again.

use core::fmt;

use crate::isa::Isa;
use crate::isa::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::isa::{amx::Amx, avx2::Avx2, avx512::Avx512};

/// An instruction-set level that this machine has.
///
/// ```
/// use attn_simd::Level;
/// for level in Level::available() {
///     println!("{}", level.name());
/// }
/// assert!(Level::by_name("portable").is_ok());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Level {
    /// What the build was made for, through `wide`: NEON on aarch64, simd128 on WASM, SSE2 on stock x86-64.
    Portable(Portable),
    /// AVX2 with FMA and F16C: x86-64-v3.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 F, BW, DQ and VL: x86-64-v4.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// AMX tiles of bf16, on Linux, beside AVX-512.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// The kernels of [`Amx`](Self::Amx) on a model of the tile instructions: the same bits on a machine with AVX-512, hundreds of times
    /// slower. Few queries run on tiles too, where another level decodes them. For tests; chosen by name only.
    AmxModel(TileModel),
}

/// The vectors beside the model of the tile instructions: AVX-512, or those of the build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileModel {
    #[cfg(target_arch = "x86_64")]
    avx512: Option<Avx512>,
}

impl TileModel {
    fn detect() -> Self {
        Self {
            #[cfg(target_arch = "x86_64")]
            avx512: has_avx512().then_some(Avx512 { _proof: () }),
        }
    }
}

/// Why a level cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LevelError {
    /// No level has this name; the names are `portable`, `avx2`, `avx512`, `amx` and, for tests, `amx-model`.
    Unknown,
    /// This machine lacks the level's instructions.
    Missing,
    /// The processor has the instructions, but the system has not turned them on, or offers no way to ask for them.
    Disabled,
    /// The system refuses this process what the instructions need: a filter of system calls, an alternate signal stack that is too
    /// small, a kernel that is too old.
    Refused,
}

impl fmt::Display for LevelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "no such level; the levels are portable, avx2, avx512, amx and amx-model",
            Self::Missing => "this machine lacks the instructions of that level",
            Self::Disabled => "this machine has the instructions of that level, but its system has not turned them on",
            Self::Refused => {
                "this machine has the instructions of that level, but its system refuses this process the use of them"
            }
        })
    }
}

impl core::error::Error for LevelError {}

impl fmt::Debug for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Names of all levels, weakest first.
const NAMES: [&str; 4] = ["portable", "avx2", "avx512", "amx"];
/// Name of the level for tests.
const MODEL: &str = "amx-model";

impl Level {
    /// The level of the build itself, which every machine has that can run the program.
    pub const fn portable() -> Self {
        Self::Portable(Portable { _proof: () })
    }

    /// The best level of this machine, or the one that the environment variable `ATTN_LEVEL` names. Asked once per process.
    ///
    /// A name in `ATTN_LEVEL` that is unknown or missing here is ignored; [`by_name`](Self::by_name) says which it is.
    /// Without the feature `std`, the level that the build's target features prove.
    #[cfg(feature = "std")]
    pub fn detect() -> Self {
        use std::sync::OnceLock;
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| {
            let forced = std::env::var("ATTN_LEVEL").ok().and_then(|name| Self::by_name(&name).ok());
            forced.unwrap_or_else(Self::best)
        })
    }

    /// The level that the build's target features prove; there is no detection without the feature `std`.
    #[cfg(not(feature = "std"))]
    pub fn detect() -> Self {
        Self::best()
    }

    fn best() -> Self {
        Self::available().last().unwrap_or(Self::portable())
    }

    /// The names of all levels that a machine may have, weakest first; [`by_name`](Self::by_name) says what keeps this one from any.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.into_iter()
    }

    /// Every level of this machine, weakest first.
    pub fn available() -> impl Iterator<Item = Self> {
        NAMES.into_iter().filter_map(|name| Self::by_name(name).ok())
    }

    /// A level by its name: `portable`, `avx2`, `avx512`, `amx`, or `amx-model`, which every machine has.
    ///
    /// # Errors
    /// [`LevelError`]: no such level, or not on this machine.
    pub fn by_name(name: &str) -> Result<Self, LevelError> {
        match name {
            "portable" => Ok(Self::portable()),
            #[cfg(target_arch = "x86_64")]
            "avx2" => has_avx2().then_some(Self::Avx2(Avx2 { _proof: () })).ok_or(LevelError::Missing),
            #[cfg(target_arch = "x86_64")]
            "avx512" => has_avx512().then_some(Self::Avx512(Avx512 { _proof: () })).ok_or(LevelError::Missing),
            #[cfg(target_arch = "x86_64")]
            "amx" => match if has_avx512() { amx_obstacle() } else { Some(LevelError::Missing) } {
                None => Ok(Self::Amx(Amx { vectors: Avx512 { _proof: () }, _proof: () })),
                Some(obstacle) => Err(obstacle),
            },
            MODEL => Ok(Self::AmxModel(TileModel::detect())),
            _ if NAMES.contains(&name) => Err(LevelError::Missing),
            _ => Err(LevelError::Unknown),
        }
    }

    /// The name: `portable`, `avx2`, `avx512`, `amx`, `amx-model`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => "amx",
            Self::AmxModel(_) => MODEL,
        }
    }

    /// The level of the vectors: of what runs beside matrix tiles, or instead of them; of other levels the level itself.
    pub const fn vectors(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(amx) => Self::Avx512(amx.vectors),
            #[cfg(target_arch = "x86_64")]
            Self::AmxModel(TileModel { avx512: Some(avx512) }) => Self::Avx512(avx512),
            Self::AmxModel(_) => Self::portable(),
            vectors => vectors,
        }
    }

    /// Whether the level multiplies matrix tiles.
    pub const fn has_tiles(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => true,
            Self::AmxModel(_) => true,
            _ => false,
        }
    }

    /// Floats in a vector of this level.
    pub const fn lanes(self) -> usize {
        match self.vectors() {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::LANES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::LANES,
            _ => Portable::LANES,
        }
    }

    /// Runs a kernel compiled for the vectors of this level.
    #[inline]
    pub(crate) fn run<R>(self, kernel: impl Run<R>) -> R {
        match self.vectors() {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(isa) => isa.vectorize(
                #[inline(always)]
                || kernel.run(isa),
            ),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(isa) => isa.vectorize(
                #[inline(always)]
                || kernel.run(isa),
            ),
            _ => {
                let isa = Portable { _proof: () };
                isa.vectorize(
                    #[inline(always)]
                    || kernel.run(isa),
                )
            }
        }
    }
}

/// A kernel: a struct of its arguments that can run on any instruction set.
pub(crate) trait Run<R> {
    /// Runs it; `#[inline(always)]`, with everything it calls.
    fn run<I: Isa>(self, isa: I) -> R;
}

#[cfg(all(target_arch = "x86_64", feature = "std"))]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("f16c")
}

#[cfg(all(target_arch = "x86_64", feature = "std"))]
fn has_avx512() -> bool {
    has_avx2()
        && std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vl")
}

/// What keeps this process from matrix tiles, if anything does: the system is asked for permission, once per process.
#[cfg(all(target_arch = "x86_64", feature = "std"))]
fn amx_obstacle() -> Option<LevelError> {
    static OBSTACLE: std::sync::OnceLock<Option<LevelError>> = std::sync::OnceLock::new();
    *OBSTACLE.get_or_init(Amx::obstacle)
}

/// Without `std` nothing is asked at run time, and no target feature proves the system's permission.
#[cfg(all(target_arch = "x86_64", not(feature = "std")))]
const fn amx_obstacle() -> Option<LevelError> {
    Some(LevelError::Disabled)
}

#[cfg(all(target_arch = "x86_64", not(feature = "std")))]
const fn has_avx2() -> bool {
    cfg!(all(target_feature = "avx2", target_feature = "fma", target_feature = "f16c"))
}

#[cfg(all(target_arch = "x86_64", not(feature = "std")))]
const fn has_avx512() -> bool {
    has_avx2()
        && cfg!(all(
            target_feature = "avx512f",
            target_feature = "avx512bw",
            target_feature = "avx512dq",
            target_feature = "avx512vl"
        ))
}
