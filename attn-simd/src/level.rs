//! The levels that this machine has, and the choice of one. No other module asks for an instruction set.
//!
//! A [`Level`] holds a proof token: whoever has one may use its instructions. A plan chooses it once and hands it down,
//! and nothing below asks again.

use core::fmt;

#[cfg(all(target_arch = "x86_64", feature = "std"))]
use crate::isa::cpuid;
use crate::isa::pairs::{PairModel, Pairs};
#[cfg(all(target_arch = "aarch64", not(miri)))]
use crate::isa::portable::Dotprod;
use crate::isa::portable::Portable;
use crate::isa::{Isa, LevelError};
#[cfg(target_arch = "x86_64")]
use crate::isa::{amx::Amx, avx2::Avx2, avx512::Avx512, avx512bf16::Avx512Bf16};

/// Whether the processor has all of some features; without `std`, whether the build demands them.
#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($($feature:tt)*) => {{
        #[cfg(feature = "std")]
        let has = true $(&& std::arch::is_x86_feature_detected!($feature))*;
        #[cfg(not(feature = "std"))]
        let has = cfg!(all($(target_feature = $feature),*));
        has
    }};
}

/// An instruction-set level that this machine has.
///
/// ```
/// use attn_simd::Level;
/// for level in Level::available() {
///     println!("{}", level.name());
/// }
/// assert!(Level::by_name("portable").is_ok());
/// ```
///
/// # AMX needs a permission that binds the process
///
/// Linux lets a process use AMX only after it has asked (`arch_prctl`). If processor and system have AMX,
/// [`detect`](Self::detect), [`try_detect`](Self::try_detect), [`available`](Self::available) and `by_name("amx")` ask,
/// once per process. Linux never takes the permission back before `exec`; children by `fork` inherit it.
///
/// From then on Linux refuses small alternate signal stacks to every thread of the process: `sigaltstack` fails with
/// `ENOMEM` below `getauxval(AT_MINSIGSTKSZ)`. With AMX 2048, 8192 and 11 264 bytes are too few; 16 384 are enough.
/// Stacks for signals that are `AT_MINSIGSTKSZ` larger than what their handlers need are always right. The other way
/// round, Linux refuses the permission while any thread has a stack that is too small ([`LevelError::Refused`]): `amx`
/// is then absent, and `avx512` runs.
///
/// A program that needs small signal stacks never asks: it sets `ATTN_LEVEL=avx512` and leaves out `available`, or it
/// hands `Level::by_name("avx512")` to every call. Neither asks for AMX, nor does
/// [`Plan::explain`](crate::Plan::explain).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Level {
    /// The vectors of the build target, through `wide`: NEON on aarch64, simd128 on WASM, SSE2 on stock x86-64.
    Portable(Portable),
    /// SDOT beside [`Portable`](Self::Portable), on processors of ARMv8.2 and later that have it: of few queries the
    /// products with int8 and q8_0. All others run as on `Portable`.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    Dotprod(Dotprod),
    /// AVX2 with FMA and F16C: x86-64-v3.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 F, BW, DQ and VL: x86-64-v4.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// Pairs of bf16 multiplied by AVX512_BF16, beside AVX-512. Calls run on it where most of them gain: inputs in
    /// bf16, unless an exact output is wider or channels would need much padding, and gradients of bf16; of few queries
    /// in bf16 the scores with keys in bf16, for dims that are multiples of 32 (not over bytes, not with rope tables or
    /// a score_mod). All others run as on [`Avx512`](Self::Avx512). The best level only of processors where it was
    /// measured to be faster: AMD's Zen 4 and Zen 5. Intel's take two cycles an instruction, and gain nothing.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
    /// AMX on bf16, on Linux, beside AVX-512: many queries of any type in bf16 parts, and gradients of bf16.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// The kernels of [`Amx`](Self::Amx) on a model of its instructions: the same bits on a machine with AVX-512,
    /// hundreds of times slower. Few queries run on AMX too, where another level decodes them. For tests; chosen by
    /// name only.
    AmxModel(AmxModel),
    /// The kernels of `Avx512Bf16` on a model of its instruction: the same bits on a machine with AVX-512, many times
    /// slower. Gradients run on the model in vectors of [`Portable`](Self::Portable): other bits. For tests; chosen by
    /// name only.
    Avx512Bf16Model(AmxModel),
}

/// The vectors beside a model of instructions: AVX-512, or those of the build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AmxModel {
    #[cfg(target_arch = "x86_64")]
    avx512: Option<Avx512>,
}

impl AmxModel {
    fn detect() -> Self {
        Self {
            #[cfg(target_arch = "x86_64")]
            avx512: avx512(),
        }
    }

    fn run_pairs<R>(self, kernel: impl Run<R>) -> R {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx512) = self.avx512 {
            let isa = Pairs(PairModel(avx512));
            return isa.vectorize(
                #[inline(always)]
                || kernel.run(isa),
            );
        }
        let isa = Pairs(PairModel(<Portable>::PROVEN));
        isa.vectorize(
            #[inline(always)]
            || kernel.run(isa),
        )
    }
}

impl fmt::Debug for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Names of all levels, weakest first.
const NAMES: [&str; 6] = ["portable", "dotprod", "avx2", "avx512", "avx512bf16", "amx"];
/// Names of the levels for tests.
const MODELS: [&str; 2] = ["avx512bf16-model", "amx-model"];

impl Level {
    /// The level of the build itself, which every machine has that can run the program.
    pub const fn portable() -> Self {
        Self::Portable(Portable::PROVEN)
    }

    /// The best level of this machine, or the one that the environment variable `ATTN_LEVEL` names. Asked once per
    /// process.
    ///
    /// Where `ATTN_LEVEL` names a level that is unknown or missing here, the best one runs, and a line on the standard
    /// error says so, once per process; [`try_detect`](Self::try_detect) makes an error of it. An empty `ATTN_LEVEL`
    /// names nothing. Without the feature `std`, the level that the build's target features prove.
    ///
    /// May ask Linux for [permission to use AMX](Self#amx-needs-a-permission-that-binds-the-process).
    #[cfg(feature = "std")]
    pub fn detect() -> Self {
        use std::io::Write as _;
        use std::sync::OnceLock;
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| {
            Self::try_detect().unwrap_or_else(|error| {
                let (best, asked) = (Self::best(), std::env::var_os("ATTN_LEVEL").unwrap_or_default());
                let (name, best_name) = (asked.to_string_lossy(), best.name());
                let line = alloc::format!("attn: ATTN_LEVEL={name} is ignored ({error}); {best_name} runs\n");
                let _ = std::io::stderr().write_all(line.as_bytes()); // whoever has closed it wants to hear nothing
                best
            })
        })
    }

    /// The level that the build's target features prove; there is no detection without the feature `std`.
    #[cfg(not(feature = "std"))]
    pub fn detect() -> Self {
        Self::best()
    }

    /// As [`detect`](Self::detect), but an `ATTN_LEVEL` that cannot run is an error, and nothing is printed.
    ///
    /// ```
    /// use attn_simd::Level;
    /// match Level::try_detect() {
    ///     Ok(level) => assert_eq!(level, Level::detect()),
    ///     Err(error) => eprintln!("ATTN_LEVEL: {error}"),
    /// }
    /// ```
    ///
    /// # Errors
    /// [`LevelError`]: what [`by_name`](Self::by_name) says of the name in `ATTN_LEVEL`. Never without the feature
    /// `std`.
    #[cfg(feature = "std")]
    pub fn try_detect() -> Result<Self, LevelError> {
        use std::sync::OnceLock;
        static LEVEL: OnceLock<Result<Level, LevelError>> = OnceLock::new();
        *LEVEL.get_or_init(|| match std::env::var_os("ATTN_LEVEL").filter(|name| !name.is_empty()) {
            None => Ok(Self::best()),
            Some(name) => name.to_str().map_or(Err(LevelError::Unknown), Self::by_name),
        })
    }

    /// As [`detect`](Self::detect): without the feature `std` no environment can ask for a level that is not there.
    ///
    /// # Errors
    /// None without the feature `std`.
    #[cfg(not(feature = "std"))]
    pub fn try_detect() -> Result<Self, LevelError> {
        Ok(Self::best())
    }

    fn best() -> Self {
        Self::available().filter(|level| level.is_worth_it()).last().unwrap_or(Self::portable())
    }

    /// Whether the level was measured to be faster than those before it, on this processor. (SDOT was measured nowhere
    /// yet. It runs where it is, because it takes fewer instructions.)
    fn is_worth_it(self) -> bool {
        match self {
            #[cfg(all(target_arch = "x86_64", feature = "std"))]
            Self::Avx512Bf16(_) => cpuid::multiplies_pairs_at_once(cpuid::maker()),
            #[cfg(all(target_arch = "x86_64", not(feature = "std")))]
            Self::Avx512Bf16(_) => false,
            _ => true,
        }
    }

    /// The names of all levels that a machine may have, weakest first; [`by_name`](Self::by_name) says why this machine
    /// lacks one.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.into_iter()
    }

    /// Every level of this machine, weakest first. May ask Linux for
    /// [permission to use AMX](Self#amx-needs-a-permission-that-binds-the-process).
    pub fn available() -> impl Iterator<Item = Self> {
        NAMES.into_iter().filter_map(|name| Self::by_name(name).ok())
    }

    /// The names of the levels for tests, which every machine has.
    pub fn model_names() -> impl Iterator<Item = &'static str> {
        MODELS.into_iter()
    }

    /// A level by its name: `portable`, `dotprod`, `avx2`, `avx512`, `avx512bf16`, `amx`, or `avx512bf16-model` and
    /// `amx-model`, which every machine has.
    ///
    /// # Errors
    /// [`LevelError`]: no such level, or not on this machine.
    pub fn by_name(name: &str) -> Result<Self, LevelError> {
        match name {
            "portable" => Ok(Self::portable()),
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            "dotprod" => has_dotprod().then_some(Self::Dotprod(Dotprod::WHERE_FOUND)).ok_or(LevelError::Missing),
            #[cfg(target_arch = "x86_64")]
            "avx2" => has_avx2().then_some(Self::Avx2(Avx2 { _proof: () })).ok_or(LevelError::Missing),
            #[cfg(target_arch = "x86_64")]
            "avx512" => avx512().map(Self::Avx512).ok_or(LevelError::Missing),
            #[cfg(target_arch = "x86_64")]
            "amx" => {
                let vectors = avx512().ok_or(LevelError::Missing)?;
                amx_obstacle().map_or(Ok(Self::Amx(Amx { vectors, _proof: () })), Err)
            }
            #[cfg(target_arch = "x86_64")]
            "avx512bf16" => avx512()
                .filter(|_| has!("avx512bf16"))
                .map(|vectors| Self::Avx512Bf16(Avx512Bf16 { vectors, _proof: () }))
                .ok_or(LevelError::Missing),
            "amx-model" => Ok(Self::AmxModel(AmxModel::detect())),
            "avx512bf16-model" => Ok(Self::Avx512Bf16Model(AmxModel::detect())),
            _ if NAMES.contains(&name) => Err(LevelError::Missing),
            _ => Err(LevelError::Unknown),
        }
    }

    /// The name: `portable`, `dotprod`, `avx2`, `avx512`, `avx512bf16`, `amx`, `avx512bf16-model`, `amx-model`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable(_) => "portable",
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            Self::Dotprod(_) => "dotprod",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(_) => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => "amx",
            Self::AmxModel(_) => "amx-model",
            Self::Avx512Bf16Model(_) => "avx512bf16-model",
        }
    }

    /// The level of the vectors beside SDOT, products of bf16 or their models; of other levels the level itself.
    pub const fn vectors(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(amx) => Self::Avx512(amx.vectors),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(unit) => Self::Avx512(unit.vectors),
            #[cfg(target_arch = "x86_64")]
            Self::AmxModel(AmxModel { avx512: Some(avx512) })
            | Self::Avx512Bf16Model(AmxModel { avx512: Some(avx512) }) => Self::Avx512(avx512),
            Self::AmxModel(_) | Self::Avx512Bf16Model(_) => Self::portable(),
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            Self::Dotprod(_) => Self::portable(),
            vectors => vectors,
        }
    }

    /// The level, without tiles: if it has any, that of the vectors beside them.
    pub(crate) const fn without_tiles(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => self.vectors(),
            Self::AmxModel(_) => self.vectors(),
            _ => self,
        }
    }

    /// [`Isa::DIGITS`].
    pub(crate) const fn digits(self) -> usize {
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        if let Self::Dotprod(_) = self {
            return Dotprod::DIGITS;
        }
        match self.vectors() {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::DIGITS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::DIGITS,
            _ => <Portable>::DIGITS,
        }
    }

    /// Whether the level has products of bf16: those of AMX, or of AVX512_BF16.
    pub const fn multiplies_bf16(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) | Self::Avx512Bf16(_) => true,
            Self::AmxModel(_) | Self::Avx512Bf16Model(_) => true,
            _ => false,
        }
    }

    /// Whether its products of bf16 are AVX512_BF16's.
    pub(crate) const fn uses_dot_products(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(_) => true,
            Self::Avx512Bf16Model(_) => true,
            _ => false,
        }
    }

    /// Whether it is a [model](Self::model_names).
    pub(crate) const fn is_model(self) -> bool {
        matches!(self, Self::AmxModel(_) | Self::Avx512Bf16Model(_))
    }

    /// Most products of bf16, of scores and of values together, that are faster than one each in f32.
    pub(crate) const fn most_products(self) -> usize {
        if self.uses_dot_products() { 3 } else { usize::MAX }
    }

    /// Floats in a vector of this level.
    pub const fn lanes(self) -> usize {
        match self.vectors() {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::LANES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::LANES,
            _ => <Portable>::LANES,
        }
    }

    /// Runs a kernel compiled for the vectors of this level. Without `#[inline]`, which would compile a copy of the
    /// kernel for each codegen unit that calls it.
    pub(crate) fn run<R, K: Run<R>>(self, kernel: K) -> R {
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        if const { K::OF_BYTES }
            && let Self::Dotprod(isa) = self
        {
            return kernel.run(isa);
        }
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
                let isa = <Portable>::PROVEN;
                isa.vectorize(
                    #[inline(always)]
                    || kernel.run(isa),
                )
            }
        }
    }

    /// Runs a kernel on products of pairs of bfloat16, if the level [has them](Self::uses_dot_products).
    pub(crate) fn run_pairs<R>(self, kernel: impl Run<R>) -> Option<R> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(unit) => {
                let isa = Pairs(unit);
                Some(isa.vectorize(
                    #[inline(always)]
                    || kernel.run(isa),
                ))
            }
            Self::Avx512Bf16Model(model) => Some(model.run_pairs(kernel)),
            _ => None,
        }
    }
}

/// A kernel: a struct of its arguments that can run on any instruction set.
pub(crate) trait Run<R> {
    /// Whether some of its products may be [those of bytes](Isa::DIGITS): where these are a level beside vectors, it
    /// runs there.
    #[cfg_attr(not(target_arch = "aarch64"), allow(dead_code, reason = "no such level"))]
    const OF_BYTES: bool = false;
    /// Runs it; `#[inline(always)]`, with everything it calls.
    fn run<I: Isa>(self, isa: I) -> R;
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
fn has_dotprod() -> bool {
    #[cfg(feature = "std")]
    let has = std::arch::is_aarch64_feature_detected!("dotprod");
    #[cfg(not(feature = "std"))]
    let has = cfg!(target_feature = "dotprod");
    has && cfg!(target_endian = "little") // words of bytes are read as they lie
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    has!("avx2" "fma" "f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2() && has!("avx512f" "avx512bw" "avx512dq" "avx512vl")
}

/// The token of AVX-512, if the processor has it.
#[cfg(target_arch = "x86_64")]
fn avx512() -> Option<Avx512> {
    has_avx512().then(|| Avx512 { vnni: has!("avx512vnni"), _proof: () })
}

/// The system's answer to the request for permission.
#[cfg(all(target_arch = "x86_64", feature = "std"))]
static AMX_OBSTACLE: std::sync::OnceLock<Option<LevelError>> = std::sync::OnceLock::new();

/// The reason why this process lacks AMX, if it does. Asks the system for permission, once per process.
#[cfg(all(target_arch = "x86_64", feature = "std"))]
fn amx_obstacle() -> Option<LevelError> {
    *AMX_OBSTACLE.get_or_init(Amx::obstacle)
}

/// The known reason why this process lacks AMX. Asks for no permission, so that a text changes nothing in the process.
pub(crate) fn known_obstacle() -> Option<LevelError> {
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    return match has_avx512() {
        true => AMX_OBSTACLE.get().copied().unwrap_or_else(Amx::lacking),
        false => Some(LevelError::Missing),
    };
    #[cfg(not(all(target_arch = "x86_64", feature = "std")))]
    Level::by_name("amx").err() // nothing can be asked
}

/// Without `std` nothing is asked at run time, and no target feature proves the permission.
#[cfg(all(target_arch = "x86_64", not(feature = "std")))]
const fn amx_obstacle() -> Option<LevelError> {
    Some(LevelError::Disabled)
}
