//! What CPUID tells about the core that runs it: its second cache, and its maker.

#![allow(unsafe_code, reason = "CPUID is not a safe function in the oldest compiler that is promised")]
#![allow(unused_unsafe, reason = "it is one in newer compilers")]

/// Bytes of the second cache, or 0 if CPUID does not list it. AMD lists caches in leaf 0x8000001d, Intel and others in
/// leaf 4, in one form.
#[cfg(not(miri))]
pub(crate) fn second_cache() -> usize {
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
    const DATA: u32 = 1;
    const BOTH: u32 = 3;
    // SAFETY: every x86-64 CPU has CPUID, and no leaf above the highest is read.
    unsafe {
        let amd = __cpuid(0x8000_0000).eax >= 0x8000_001d && __cpuid(0x8000_0001).ecx & TOPOLOGY_EXTENSIONS != 0;
        let leaf = match amd {
            true => 0x8000_001d,
            false if __cpuid(0).eax >= 4 => 4,
            false => return 0,
        };
        // Four or five caches are usual, and type 0 ends the list.
        for index in 0..8 {
            let cache = __cpuid_count(leaf, index);
            let (kind, level) = (cache.eax & 0x1f, cache.eax >> 5 & 7);
            if kind == 0 {
                break;
            }
            if level == 2 && (kind == DATA || kind == BOTH) {
                let (ways, partitions, line) = (cache.ebx >> 22, cache.ebx >> 12 & 0x3ff, cache.ebx & 0xfff);
                return [ways, partitions, line, cache.ecx]
                    .map(|n| n as usize + 1)
                    .into_iter()
                    .fold(1, usize::saturating_mul);
            }
        }
    }
    0
}

/// Miri has CPUID only for the detection of features.
#[cfg(miri)]
pub(crate) fn second_cache() -> usize {
    0
}

/// The makers of processors.
#[cfg(feature = "std")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maker {
    /// AMD: family and model, extended parts added as its manuals say.
    Amd(u32, u32),
    /// Intel, likewise.
    Intel(u32, u32),
    Other,
}

/// The maker of this processor.
#[cfg(all(not(miri), feature = "std"))]
pub(crate) fn maker() -> Maker {
    use core::arch::x86_64::__cpuid;
    // SAFETY: every x86-64 CPU has CPUID, and leaves 0 and 1 of it.
    let (vendor, signature) = unsafe { (__cpuid(0), __cpuid(1).eax) };
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    let (base, model) = (signature >> 8 & 0xf, signature >> 4 & 0xf);
    let family = base + if base == 0xf { signature >> 20 & 0xff } else { 0 };
    let model = model | if matches!(base, 6 | 0xf) { signature >> 12 & 0xf0 } else { 0 };
    match name.as_flattened() {
        b"AuthenticAMD" => Maker::Amd(family, model),
        b"GenuineIntel" => Maker::Intel(family, model),
        _ => Maker::Other,
    }
}

/// Models of family 25 that are Zen 4.
#[cfg(feature = "std")]
pub(crate) const fn is_model_of_zen4(model: u32) -> bool {
    matches!(model, 0x10..=0x1f | 0x60..=0x7f | 0xa0..=0xaf)
}

/// Models of family 26 that are Zen 5, as Linux counts them (arch/x86/kernel/cpu/amd.c); others are Zen 6.
#[cfg(feature = "std")]
pub(crate) const fn is_model_of_zen5(model: u32) -> bool {
    matches!(model, 0..=0x2f | 0x40..=0x4f | 0x60..=0x7f)
}

/// The model of family 6 that is Skylake's servers, and Cascade Lake's and Cooper Lake's.
#[cfg(feature = "std")]
pub(crate) const SKYLAKE_SERVER: u32 = 0x55;

/// Whether a product of pairs of bf16 takes as long as one of f32: AMD's Zen 4 and Zen 5. Measured on EPYCs, models 17
/// of family 25 and 2 of family 26.
#[cfg(feature = "std")]
pub(crate) const fn multiplies_pairs_at_once(maker: Maker) -> bool {
    match maker {
        Maker::Amd(25, model) => is_model_of_zen4(model),
        Maker::Amd(26, model) => is_model_of_zen5(model),
        _ => false,
    }
}

/// Miri has CPUID only for the detection of features.
#[cfg(all(miri, feature = "std"))]
pub(crate) fn maker() -> Maker {
    Maker::Other
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_fast_on_zen_4_and_zen_5() {
        let fast = |family, model| multiplies_pairs_at_once(Maker::Amd(family, model));
        // Genoa, Raphael, Turin, Strix Point, Granite Ridge.
        assert!(fast(25, 0x11) && fast(25, 0x61) && fast(26, 2) && fast(26, 0x24) && fast(26, 0x44));
        // Milan, and the first models after Zen 5.
        assert!(!fast(25, 1) && !fast(26, 0x50) && !fast(26, 0x80) && !fast(27, 2));
        assert!(!multiplies_pairs_at_once(Maker::Intel(6, SKYLAKE_SERVER)) && !multiplies_pairs_at_once(Maker::Other));
    }
}
