//! Halves to floats and back on NEON, four at a time. Without this, compilers convert each number by itself.
//!
//! FCVTL and FCVTN between half and single precision belong to the base of NEON. They round to nearest even in the mode
//! in which programs start, and keep subnormal numbers in any mode. Their intrinsics are younger than the oldest
//! supported compiler.

#![allow(unsafe_code, reason = "the leaf: intrinsics, and two instructions without one")]

use core::arch::aarch64::{
    float32x4_t, uint16x4_t, vld1_u16, vld1q_f32, vreinterpretq_f32_u32, vshll_n_u16, vst1_u16, vst1q_f32,
};
use core::arch::asm;

use attn_core::half::{bf16, f16};

/// Widens four; exact.
#[inline(always)]
pub(crate) fn widen_f16(src: &[f16; 4]) -> [f32; 4] {
    // SAFETY: four elements are read, which are words of 16 bits (`repr(transparent)`); the instruction touches its two
    // registers only.
    floats(unsafe {
        let (narrow, wide): (uint16x4_t, float32x4_t);
        narrow = vld1_u16(src.as_ptr().cast());
        asm!("fcvtl {wide:v}.4s, {narrow:v}.4h", wide = lateout(vreg) wide, narrow = in(vreg) narrow,
            options(pure, nomem, nostack, preserves_flags));
        wide
    })
}

/// Widens four; exact.
#[inline(always)]
pub(crate) fn widen_bf16(src: &[bf16; 4]) -> [f32; 4] {
    // SAFETY: four elements are read, which are words of 16 bits (`repr(transparent)`).
    floats(unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(src.as_ptr().cast()))) })
}

/// Rounds four to nearest even; a NaN stays one.
#[inline(always)]
pub(crate) fn narrow_f16(src: [f32; 4], dst: &mut [f16; 4]) {
    // SAFETY: four floats are read and four words of 16 bits written (`repr(transparent)`); the instruction touches its
    // two registers only.
    unsafe {
        let (wide, narrow): (float32x4_t, uint16x4_t);
        wide = vld1q_f32(src.as_ptr());
        asm!("fcvtn {narrow:v}.4h, {wide:v}.4s", narrow = lateout(vreg) narrow, wide = in(vreg) wide,
            options(pure, nomem, nostack, preserves_flags));
        vst1_u16(dst.as_mut_ptr().cast(), narrow);
    }
}

#[inline(always)]
fn floats(x: float32x4_t) -> [f32; 4] {
    let mut floats = [0.0; 4];
    // SAFETY: four floats are written.
    unsafe { vst1q_f32(floats.as_mut_ptr(), x) };
    floats
}
