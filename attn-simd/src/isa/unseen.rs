//! A vector of which compilers know nothing, for where what they know makes them choose slow instructions.

#![allow(unsafe_code, reason = "the leaf: an instruction of none")]

use core::arch::x86_64::{__m256, __m512i};

/// The same vector, of which compilers know nothing.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn unseen(x: __m256) -> __m256 {
    #[cfg(miri)]
    return x;
    #[cfg(not(miri))]
    {
        let mut same = x;
        // SAFETY: no instruction at all.
        unsafe {
            core::arch::asm!("/* {} */", inlateout(ymm_reg) same, options(pure, nomem, nostack, preserves_flags));
        }
        same
    }
}

/// The same of a long vector of integers. Of sums in a loop: else compilers add the products of many steps first, and
/// keep them in memory.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn unseen_integers(x: __m512i) -> __m512i {
    #[cfg(miri)]
    return x;
    #[cfg(not(miri))]
    {
        let mut same = x;
        // SAFETY: no instruction at all.
        unsafe {
            core::arch::asm!("/* {} */", inlateout(zmm_reg) same, options(pure, nomem, nostack, preserves_flags));
        }
        same
    }
}
