//! Requests of lines that are read later, on x86-64.

#![allow(unsafe_code, reason = "the leaf: a prefetch, which all x86-64 have")]

use core::arch::x86_64::*;
use core::sync::atomic::{Ordering, compiler_fence};

/// Requests the lines at two distances from a byte.
#[inline(always)]
pub(super) fn request(from: *const i8, ahead: [usize; 2]) {
    // SAFETY: a prefetch is a hint: it reads nothing and faults on no address. All x86-64 have it.
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(ahead[1]));
        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead[0]));
    }
    // The fence keeps the requests here: in a burst, the processor would drop some.
    compiler_fence(Ordering::SeqCst);
}
