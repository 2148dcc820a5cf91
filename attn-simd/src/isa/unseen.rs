//! A vector of which compilers know nothing, for where what they know makes them choose slow instructions.

#![allow(unsafe_code, reason = "the leaf: an instruction of none")]

use core::arch::x86_64::__m256;

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
