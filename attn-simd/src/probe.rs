//! The peaks of this core, yardsticks for the kernels: fused multiply-adds, reading, products of bf16.
//!
//! Multiply-adds run in twenty-four independent chains for AVX-512 and twelve for AVX2, with nothing to load: more than
//! enough to hide the latency of two units. Measure a peak right beside a kernel, because clocks move.

use core::hint::black_box;
use std::time::Instant;

use crate::amx::product::{AmxUnit, Operand, Products, SIDE, Square};
use crate::isa::{Isa, MAX_LANES};
use crate::level::{Level, Run};

/// Steps of one timed piece: some tens of microseconds.
const STEPS: usize = 20_000;

/// The largest rate of fused multiply-adds seen in about `seconds`, in FLOP/s (a multiply-add counts two).
///
/// ```
/// let peak = attn_simd::probe::fma_peak(attn_simd::Level::detect(), 0.01);
/// assert!(peak > 1e8);
/// ```
pub fn fma_peak(level: Level, seconds: f64) -> f64 {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < seconds || best == f64::INFINITY {
        let piece = Instant::now();
        let chains = level.run(Chains);
        best = best.min(piece.elapsed().as_secs_f64() / chains as f64);
    }
    2.0 * (STEPS * level.lanes()) as f64 / best
}

/// Reads all of `data` once, in order, with vector loads and next to nothing else: the yardstick for a pass over keys
/// and values. Returns the largest element.
///
/// ```
/// assert_eq!(attn_simd::probe::read(attn_simd::Level::detect(), &[1.0, 3.0, 2.0]), 3.0);
/// ```
pub fn read(level: Level, data: &[f32]) -> f32 {
    level.run(Read(data))
}

struct Read<'d>(&'d [f32]);

impl Run<f32> for Read<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> f32 {
        const CHAINS: usize = 8;
        let mut top = [isa.splat(f32::NEG_INFINITY); CHAINS];
        let lines = self.0.chunks_exact(CHAINS * I::LANES);
        let rest = lines.remainder().iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        for line in lines {
            for (n, top) in top.iter_mut().enumerate() {
                *top = isa.max(isa.load(&line[n * I::LANES..]), *top);
            }
        }
        top.into_iter().fold(rest, |a, x| a.max(isa.max_across(x)))
    }
}

/// The largest rate of bf16 products seen in about `seconds` on this thread, by AMX or AVX512_BF16, in FLOP/s; `None`
/// for a level that has none, or only a model of them.
///
/// ```
/// use attn_simd::{Level, probe};
/// let peak = probe::bf16_peak(Level::detect(), 0.001);
/// assert_eq!(peak.is_some(), Level::detect().multiplies_bf16());
/// ```
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables, reason = "no other architecture has them"))]
pub fn bf16_peak(level: Level, seconds: f64) -> Option<f64> {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Amx(amx) => Some(bf16_products(&mut amx.open(), seconds)),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Bf16(mut unit) => Some(bf16_products(&mut unit, seconds)),
        _ => None,
    }
}

/// The rate of products whose operands stay in the first cache: a step loads two of A and two of B for four products.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no other architecture has them"))]
fn bf16_products(unit: &mut dyn AmxUnit, seconds: f64) -> f64 {
    const DEPTH: usize = 8; // steps: 16 KiB of each operand
    const WORDS: usize = 32; // bf16 numbers that a step sums over
    let operand = [Operand([0.0; 256]); 2 * DEPTH];
    let mut sums: Square = [0.0; SIDE * SIDE];
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < seconds || best == f64::INFINITY {
        let piece = Instant::now();
        for _ in 0..16 {
            unit.block(Products::One, black_box(&operand), &operand, DEPTH, false, &mut sums);
        }
        best = best.min(piece.elapsed().as_secs_f64() / 16.0);
    }
    black_box(sums);
    (2 * SIDE * SIDE * WORDS * DEPTH) as f64 / best
}

/// Runs the chains and says how many there were.
struct Chains;

impl Run<usize> for Chains {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> usize {
        match I::LANES {
            16 => chains::<I, 24>(isa),
            8 => chains::<I, 12>(isa),
            _ if cfg!(target_arch = "aarch64") => chains::<I, 24>(isa),
            _ => chains::<I, 12>(isa),
        }
    }
}

#[inline(always)]
fn chains<I: Isa, const N: usize>(isa: I) -> usize {
    // Converges to 1, so that nothing overflows or becomes subnormal.
    let (a, b) = (isa.splat(black_box(0.5)), isa.splat(black_box(0.5)));
    let mut acc: [I::F; N] = core::array::from_fn(|n| isa.splat(black_box(n as f32)));
    for _ in 0..STEPS {
        for x in &mut acc {
            *x = isa.mul_add(*x, a, b);
        }
    }
    let mut sum = isa.splat(0.0);
    for x in acc {
        sum = isa.add(sum, x);
    }
    let mut lanes = [0.0; MAX_LANES];
    isa.store(sum, &mut lanes);
    black_box(lanes);
    N
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "ten minutes of nothing but the model's arithmetic")]
    fn products_of_the_amx_kernel_are_probed_on_the_model_too() {
        let rate = bf16_products(&mut crate::amx::model::Model::new(), 0.0);
        assert!(rate.is_finite() && rate > 0.0);
    }
}
