//! How the rows of a cache are prefetched while a step of decoding reads them: a policy of the processor.
//!
//! No bit of a result depends on it. A row's lines are requested twice: far ahead, so that memory has time to answer,
//! and near, so that they come from the second cache into the first. Processors differ in where the far request should
//! go. A core can wait for few lines at its first cache: 24 on Zen 4, and 24 × 64 bytes in 100 ns are 15 GB/s, at any
//! distance. Its second cache has buffers of its own. Zen 5 waits for more lines at the first cache.
//!
//! Where several heads are read together, only the far distance is the policy's, and at least that of the next turn:
//! which lines and which cache, the products say.

use core::fmt;

#[cfg(all(target_arch = "x86_64", feature = "std"))]
use crate::isa::cpuid::{self, Maker};

/// How rows are prefetched. Distances are in bytes.
///
/// ```
/// let policy = attn_simd::Prefetch::detect();
/// println!("{policy}"); // second cache 16384 bytes ahead, first 1024 (Intel)
/// ```
///
/// The environment variable `ATTN_PREFETCH` forces another one for experiments: `first:FAR:NEAR` or `second:FAR:NEAR`,
/// in bytes; a far distance is 0, for the line itself, or at least a row of the cache. It holds for any number of rows.
/// It is read once per process. If it means nothing, a line on the standard error says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// The cache that the far request fills.
    pub(crate) into: Into,
    /// How far ahead lines are requested first.
    pub(crate) far: usize,
    /// How far ahead they are requested again.
    pub(crate) near: usize,
    /// How one row or two request lines once, if that is better there.
    pub(crate) once: Option<Once>,
    /// Whether three or four rows over `f32` read values one line at a time, at AVX-512. Then memory and arithmetic
    /// have work all the time; but a weight is loaded for each line again.
    pub(crate) by_line: bool,
    /// Whose policy it is.
    of: &'static str,
}

/// The cache that a far request fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Into {
    First,
    #[cfg_attr(not(feature = "std"), allow(dead_code, reason = "detection and the environment choose it"))]
    Second,
}

/// How one or two rows of queries request each line once, into the first cache. They compute so little for each byte
/// that a second request costs more than it gains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Once {
    /// One row over `f32`: so many bytes ahead.
    Ahead(usize),
    /// One row or two over `f32`, and, if halves read so too, one over halves of at most 256 bytes a row, and two over
    /// bfloat16 of 256 bytes: the line itself, for keys of two rows three times. What comes next is left to the
    /// processor's own prefetcher, which follows lines in the order of memory.
    #[cfg_attr(not(all(target_arch = "x86_64", feature = "std")), allow(dead_code, reason = "detection chooses it"))]
    InOrder { halves: bool },
}

impl Once {
    /// Whether `rows` rows over numbers of `size` bytes read so. `in_order` says whether all lines are read in turn, or
    /// nearly: pages and gaps break the order, and so do several passes over a value, for sums of a few channels each.
    pub(crate) const fn takes(self, rows: usize, size: usize, row_bytes: usize, in_order: bool) -> bool {
        match self {
            Self::Ahead(_) => rows == 1 && size == 4,
            Self::InOrder { halves } => match rows {
                1 => in_order && (size == 4 || halves && row_bytes <= 256),
                2 => in_order && (size == 4 || halves && row_bytes == 256),
                _ => false,
            },
        }
    }

    /// Bytes from a line to the one that is requested.
    pub(crate) const fn distance(self) -> usize {
        match self {
            Self::Ahead(bytes) => bytes,
            Self::InOrder { .. } => 0,
        }
    }
}

/// How far ahead one row of every group is requested besides, so that its page is translated before its rows are
/// requested: a page walk can take as long as reading the page, above all in a virtual machine. Without, 0.79 to 0.92
/// of the speed on Zen 5.
pub(crate) const PAGE: usize = 32 << 10;

impl Prefetch {
    /// Measured 2026-11-22 on an EPYC, caches of 32 to 256 MiB: against 8 KiB, f32 reads 0.96 to 1.0 times as fast and
    /// halves 1.12 to 1.14; 16 KiB is 0.89 to 1.0 of this; into the second cache, 4 KiB ahead, 0.7 to 0.8. Requesting
    /// twice is 1.09 to 1.2 times as fast as once.
    ///
    /// Measured again 2026-11-28, caches of 128 and 256 MiB: one row over `f32` that requests each line once, 6 KiB
    /// ahead, is 1.12 times as fast; 4 KiB 1.11, 3 KiB 1.08, 12 KiB 1.01. Four rows want both requests (once: 0.87),
    /// and 12 KiB: 4 to 8 KiB take halves 0.75 to 1.0 of their speed. Near requests of 6 KiB are 1.0 to 1.04 times as
    /// fast as 4, for four rows over `f32`.
    const ZEN5: Self = Self {
        into: Into::First,
        far: 12 << 10,
        near: 6 << 10,
        once: Some(Once::Ahead(6 << 10)),
        by_line: false,
        of: "Zen 5",
    };

    /// Measured 2026-11-25 on an EPYC, one thread, caches of 256 MiB: into the second cache instead of the first, f32
    /// is 1.3 to 2.0 times as fast and halves 1.4 to 1.7. Distances of 8 and 12 KiB are 0.85 to 1.0 of 16 KiB. Near
    /// requests help no longer, since keys are read one after the other.
    ///
    /// Measured 2026-11-28, caches of 64 to 256 MiB. One row: lines in order, without a request ahead, are 1.2 to 1.3
    /// times as fast over f32, and 1.1 over halves of 128 channels. Requests 512 bytes to 6 KiB ahead take that away.
    /// For halves of 192 and 256 channels it is 0.95 to 1.0. Two rows over f32: 1.17 to 1.3 times as fast; three 0.93,
    /// four 0.73. Three and four rows that read values by line: 1.05 to 1.23; halves 0.97; four over 512 KiB in the
    /// second cache 0.94 to 0.97. Measured 2026-11-29: two rows over bfloat16 of 128 channels 1.07, of 64 0.93.
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    const ZEN4: Self = Self { once: Some(Once::InOrder { halves: true }), by_line: true, of: "Zen 4", ..Self::ZEN3 };

    /// Zen to Zen 3. Measured 2026-11-27 on a Zen 3 (EPYC), one thread, cold caches of 8 to 256 MiB: no distance and no
    /// cache is much better than another.
    ///
    /// Measured 2026-11-29, caches of 128 MiB: one row over f32 in order is 1.05 times as fast, for 64 channels 1.1;
    /// halves are 0.94. Four rows over f32 and int8 take as long without a request far ahead.
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    const ZEN3: Self = Self {
        into: Into::Second,
        far: 16 << 10,
        near: 0,
        once: Some(Once::InOrder { halves: false }),
        by_line: false,
        of: "Zen to Zen 3",
    };

    /// Measured 2026-11-25 on a Xeon (Granite Rapids, 2 MiB of second cache a core), one thread, caches of 128 and 256
    /// MiB, cold, against 12 KiB into the first cache and 4 KiB near: f32 1.2 to 1.3 times as fast, f16 1.1 to 1.3; on
    /// two threads 1.05 to 1.17 and 1.0 to 1.1. Without near requests a step takes up to 1.07 times as long; with 8 KiB
    /// and 512 bytes near, in f32 1.1 to 1.2 times. Of Intel's others only [`SKYLAKE`](Self::SKYLAKE) is measured.
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    const INTEL: Self =
        Self { into: Into::Second, far: 16 << 10, near: 1 << 10, once: None, by_line: false, of: "Intel" };

    /// Skylake's servers, and those of Cascade Lake and Cooper Lake. Measured 2026-11-30 on a Xeon (model 85, 1 MiB of
    /// second cache a core, 7 GB/s a core), one thread, caches of 128 and 256 MiB, medians of calls in turn, against
    /// [`INTEL`](Self::INTEL): at AVX-512 f32 is 1.05 to 1.09 times as fast, one row over halves 1.04 to 1.07, four 1.0
    /// to 1.02; 4 MiB 1.13. Into the second cache, 4 and 6 KiB ahead, f32 is 1.03 to 1.07 times as fast and halves 0.94
    /// to 1.06. Lines in order are 0.73 to 0.8. At AVX2 f32 is 1.0 and f16 0.95 for four rows.
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    const SKYLAKE: Self = Self {
        into: Into::First,
        far: 4 << 10,
        near: 0,
        once: None,
        by_line: false,
        of: "Skylake to Cooper Lake, servers",
    };

    /// With what only Zen 4 does, for tests on any processor.
    #[cfg(test)]
    pub(crate) const IN_ORDER: Self = Self { once: Some(Once::InOrder { halves: true }), by_line: true, ..Self::ZEN5 };

    /// Whatever else there is. Not measured.
    pub(crate) const OTHER: Self = Self { of: "not measured: as Zen 5", ..Self::ZEN5 };

    /// The policy of this processor, or the one that `ATTN_PREFETCH` forces. Asked once per process.
    pub fn detect() -> Self {
        #[cfg(feature = "std")]
        {
            use std::io::Write as _;
            use std::sync::OnceLock;
            static POLICY: OnceLock<Prefetch> = OnceLock::new();
            *POLICY.get_or_init(|| {
                let own = Self::of_this_processor();
                let Some(text) = std::env::var_os("ATTN_PREFETCH").filter(|text| !text.is_empty()) else { return own };
                let text = text.to_string_lossy();
                Self::parse(&text).unwrap_or_else(|| {
                    let line = alloc::format!(
                        "attn: ATTN_PREFETCH={text} is ignored: it must be first:FAR:NEAR or second:FAR:NEAR, with \
                         distances of at most {} bytes\n",
                        Self::FARTHEST
                    );
                    let _ = std::io::stderr().write_all(line.as_bytes()); // whoever has closed it wants to hear nothing
                    own
                })
            })
        }
        #[cfg(not(feature = "std"))]
        Self::OTHER
    }

    /// The largest distance that is taken: requests beyond it would be gone before they are needed.
    #[cfg(feature = "std")]
    const FARTHEST: usize = 1 << 20;

    #[cfg(feature = "std")]
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let into = match parts.next()? {
            "first" => Into::First,
            "second" => Into::Second,
            _ => return None,
        };
        let mut bytes = || parts.next()?.parse().ok().filter(|&bytes: &usize| bytes <= Self::FARTHEST);
        let (far, near) = (bytes()?, bytes()?);
        parts.next().is_none().then_some(Self { into, far, near, once: None, by_line: false, of: "ATTN_PREFETCH" })
    }

    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    fn of_this_processor() -> Self {
        Self::of(cpuid::maker())
    }

    #[cfg(all(not(target_arch = "x86_64"), feature = "std"))]
    fn of_this_processor() -> Self {
        Self::OTHER
    }

    /// By who made the processor; AMD's by family and model.
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    const fn of(maker: Maker) -> Self {
        match maker {
            Maker::Amd(26, model) if cpuid::is_model_of_zen5(model) => Self::ZEN5,
            Maker::Amd(25, model) if cpuid::is_model_of_zen4(model) => Self::ZEN4,
            Maker::Amd(23 | 25, _) => Self::ZEN3,
            Maker::Intel(6, cpuid::SKYLAKE_SERVER) => Self::SKYLAKE,
            Maker::Intel(..) => Self::INTEL,
            Maker::Amd(..) | Maker::Other => Self::OTHER,
        }
    }
}

impl fmt::Display for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { into, far, near, once, by_line, of } = self;
        let into = match into {
            Into::First => "first",
            Into::Second => "second",
        };
        write!(f, "{into} cache {far} bytes ahead, first {near}")?;
        match once {
            Some(Once::Ahead(bytes)) => write!(f, "; one row over f32: first {bytes}")?,
            Some(Once::InOrder { halves: true }) => f.write_str(
                "; in order: one row over f32 or halves of up to 256 bytes, two over f32 of 64 or 128 channels or bf16 \
                 of 128 at AVX-512",
            )?,
            Some(Once::InOrder { halves: false }) => f.write_str("; in order: one row over f32")?,
            None => {}
        }
        if *by_line {
            f.write_str("; by line: values of three or four rows over f32 at AVX-512")?;
        }
        write!(f, " ({of})")
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_forced_is_read_as_written() {
        let parse = |text| Prefetch::parse(text).map(|p| (p.into, p.far, p.near));
        assert_eq!(parse("second:8192:256"), Some((Into::Second, 8192, 256)));
        assert_eq!(parse("first:0:64"), Some((Into::First, 0, 64)));
        for text in ["", "third:1:1", "second", "second:1", "second:1:2:3", "first:-1:0", "first:1048577:0", "none"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn few_rows_read_in_order_what_was_measured() {
        let takes = |rows, size, row, in_order| Once::InOrder { halves: true }.takes(rows, size, row, in_order);
        assert!(takes(1, 4, 512, true) && takes(1, 4, 1024, true) && takes(1, 2, 256, true) && takes(2, 4, 512, true));
        assert!(!takes(1, 2, 384, true) && !takes(1, 4, 512, false) && !takes(1, 2, 256, false));
        assert!(
            takes(2, 2, 256, true) && !takes(2, 2, 128, true) && !takes(2, 2, 256, false) && !takes(3, 4, 512, true)
        );
        let takes = |rows, size, row| Once::InOrder { halves: false }.takes(rows, size, row, true);
        assert!(takes(1, 4, 512) && takes(2, 4, 512) && !takes(1, 2, 256) && !takes(2, 2, 256));
        let takes = |rows, size| Once::Ahead(64).takes(rows, size, 512, false);
        assert!(takes(1, 4) && !takes(1, 2) && !takes(2, 4));
    }

    #[test]
    fn no_bit_depends_on_it() {
        use attn_core::half::bf16;

        use crate::Level;
        use crate::gemv::{self, Group, Heads, Places, Stored, Sums, TILE, Unchecked, dots, pairs, weighted};
        use crate::isa::Isa;
        use crate::level::Run;

        const COLUMNS: usize = 128;
        /// Both products of one tile, for as many rows of queries; of pairs those with keys.
        struct Both<'a, T>(Unchecked<'a, T>, &'a [f32]);
        impl<T: Stored> Run<(Vec<f32>, Vec<f32>)> for Both<'_, T> {
            #[inline(always)]
            fn run<I: Isa>(self, isa: I) -> (Vec<f32>, Vec<f32>) {
                let (rows, size) = (self.1.len() / COLUMNS, self.1.len());
                let mut s = vec![0.0; rows * TILE];
                if I::WORD > 1 {
                    let mut words = vec![0.0; size / I::WORD];
                    assert!(pairs::write(self.1, COLUMNS, rows, &mut words).count_ones() as usize == rows);
                    dots(isa, rows, (&self.0.check(), 0..1), &words, (&mut s, 0));
                    return (s, Vec::new());
                }
                let (mut o, mut rest) = (vec![0.5; size], vec![0.0; size]);
                dots(isa, rows, (&self.0.check(), 0..1), self.1, (&mut s, 0));
                let mut waiting = [vec![0.0; size], vec![0.0; size], vec![0.0; size]];
                let sums =
                    Sums { o: &mut o, rest: &mut rest, waiting: waiting.each_mut().map(|array| array.as_mut_slice()) };
                weighted(isa, rows, (&self.0.check(), 0..1), [(&s, 0), (&[0.5; 4], 0)], sums);
                (s, o)
            }
        }

        let data: Vec<f32> = (0..TILE * COLUMNS).map(|n| (n as f32 * 0.7).sin()).collect();
        let halves: Vec<bf16> = data.iter().map(|&x| bf16::from_f32(x)).collect();
        let wide: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
        let (mut places, heads) = (Places::NONE, Heads::ONE);
        places.find(&Group::new(0, TILE, 1), COLUMNS as isize, |n| (n < TILE).then_some((n * COLUMNS, TILE - n)));
        for level in Level::available() {
            // Miri takes hundreds of times as long, and looks for something else.
            let rows = if cfg!(miri) { &[1][..] } else { &[1, 2, 3, 4] };
            for &rows in rows.iter().filter(|&&rows| gemv::rows_for(rows, level.lanes()) == rows) {
                let run = |prefetch| {
                    let keys = Unchecked { data: &data, places: &places, heads, columns: COLUMNS, prefetch };
                    let halves = Unchecked { data: &halves, places: &places, heads, columns: COLUMNS, prefetch };
                    let (q, wide) = (&data[..rows * COLUMNS], &wide[..rows * COLUMNS]);
                    [
                        Some(level.run(Both(keys, q))),
                        Some(level.run(Both(halves, q))),
                        level.run_pairs(Both(halves, wide)),
                    ]
                };
                let want = run(Prefetch::OTHER);
                assert!(want.iter().flatten().all(|(s, _)| s.iter().any(|&x| x != 0.0)));
                let forced = ["second:12288:256", "second:1048576:64", "first:64:1024"];
                let forced = if cfg!(miri) { &forced[1..2] } else { &forced };
                for policy in
                    forced.iter().map(|text| Prefetch::parse(text).unwrap()).chain([Prefetch::ZEN5, Prefetch::IN_ORDER])
                {
                    assert_eq!(run(policy), want, "{}, {rows} rows: {policy}", level.name());
                }
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn each_generation_has_its_policy() {
        let of = |maker| Prefetch::of(maker).of;
        let amd = |family, model| of(Maker::Amd(family, model));
        assert_eq!([amd(26, 2), amd(25, 17), amd(25, 0x61)], ["Zen 5", "Zen 4", "Zen 4"]);
        assert_eq!([amd(25, 1), amd(23, 49)], [Prefetch::ZEN3.of; 2]);
        let by_line = |model| Prefetch::of(Maker::Amd(25, model)).by_line;
        assert!(by_line(17) && !by_line(1));
        assert_eq!([of(Maker::Other), amd(27, 0), amd(26, 0x50)], [Prefetch::OTHER.of; 3]);
        assert_eq!(of(Maker::Intel(6, 0x55)), "Skylake to Cooper Lake, servers");
        assert_eq!(of(Maker::Intel(6, 0x8f)), "Intel");
    }
}
