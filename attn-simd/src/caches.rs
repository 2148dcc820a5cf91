//! Sizes of a core's caches. Block sizes follow from them, from shape and level, and from nothing else.

#[cfg(all(target_arch = "x86_64", feature = "std"))]
use crate::isa::cpuid;

/// The sizes of a core's own caches that block sizes follow from.
///
/// They decide how many blocks of queries share a tile of keys and values before it leaves the caches, and so memory
/// traffic and scratch. They decide no bit: a result is the same on every machine of one [`Level`](crate::Level). The
/// sizes of tiles do decide bits; they fit a first cache of 32 KiB, which every level's machines have.
///
/// ```
/// use attn_simd::Caches;
/// assert!(Caches::detect().l2 >= Caches::SMALLEST.l2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caches {
    /// Bytes of the second cache: the largest that a core has for itself.
    pub l2: usize,
}

impl Caches {
    /// The smallest that the kernels are laid out for; unknown caches count as these.
    pub const SMALLEST: Self = Self { l2: 256 << 10 };

    /// The largest that is believed: a virtual machine may say anything.
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    const LARGEST: Self = Self { l2: 16 << 20 };

    /// The caches that this core reports, within reason; [`SMALLEST`](Self::SMALLEST) if it cannot be asked. Asked once
    /// per process.
    pub fn detect() -> Self {
        #[cfg(all(target_arch = "x86_64", feature = "std"))]
        {
            use std::sync::OnceLock;
            static CACHES: OnceLock<Caches> = OnceLock::new();
            *CACHES.get_or_init(|| Self::within_reason(cpuid::second_cache()))
        }
        #[cfg(not(all(target_arch = "x86_64", feature = "std")))]
        Self::SMALLEST
    }

    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    fn within_reason(l2: usize) -> Self {
        Self { l2: l2.clamp(Self::SMALLEST.l2, Self::LARGEST.l2) }
    }
}

#[cfg(all(test, target_arch = "x86_64", feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn what_a_machine_says_is_held_within_reason() {
        assert_eq!(Caches::within_reason(0), Caches::SMALLEST);
        assert_eq!(Caches::within_reason(1 << 20).l2, 1 << 20);
        assert_eq!(Caches::within_reason(usize::MAX), Caches::LARGEST);
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "reads files")]
    fn the_cpu_and_the_system_agree() {
        // Under an emulator, the CPU is not the one that the system describes.
        if std::env::var_os("ATTN_EXPECT_LEVEL").is_some() {
            return;
        }
        let said = cpuid::second_cache();
        // The test may run on any CPU, and they may differ. A guest's system may show less than its CPU does, or
        // nothing.
        let shown: Vec<usize> = (0..1024).map_while(second_cache_of).collect();
        assert!(shown.is_empty() || shown.contains(&said), "the CPU says {said}, the system {shown:?}");
    }

    #[cfg(target_os = "linux")]
    fn second_cache_of(cpu: usize) -> Option<usize> {
        let file =
            |what: &str| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/cache/index2/{what}")).ok();
        let (level, kind, size) = (file("level")?, file("type")?, file("size")?);
        let kib: usize = size.trim().strip_suffix('K')?.parse().ok()?;
        (level.trim() == "2" && kind.trim() == "Unified").then_some(kib << 10)
    }
}
