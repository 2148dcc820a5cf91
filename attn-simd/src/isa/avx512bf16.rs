//! AVX512_BF16: products of pairs of bfloat16. On processors whose units are as wide as their registers a cycle has
//! twice as many of them as fused multiply-adds.
//!
//! VDPBF16PS adds two products to each lane. AMX multiplies squares of 32 × 32 sums in four registers; here four bands
//! of eight rows replace them. The sums of a band stay in sixteen registers for all steps. A row of B is two registers,
//! and a word of A is broadcast. The sums start at 0 and join C at the end, so that no chain of additions grows with
//! the number of keys. [`dot`](crate::amx::dot) does the same in plain Rust.

#![allow(unsafe_code, reason = "the leaf: intrinsics behind a token that proves the CPU has them")]

use core::arch::x86_64::*;

use attn_core::half::bf16;

use super::avx512::Avx512;
use super::pairs::PairUnit;
use crate::amx::product::{AmxUnit, Operand, Products, SIDE, Square, with_products};

/// Proof that the CPU has AVX512_BF16; and AVX-512 for everything else. Made only by `level`, after asking the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Avx512Bf16 {
    pub(crate) vectors: Avx512,
    pub(crate) _proof: (),
}

/// Rows of C whose sums are in registers at a time.
const BAND: usize = 8;
/// Words of a row of A, rows of an operand.
const WORDS: usize = 16;

/// One instance per list of products. The pairs are an array in memory, for a loop of loads. As an iterator, or
/// computed where they are used, they took 2 to 4 % longer.
macro_rules! blocks {
    ([$products:ident $operands:tt $steps:ident $fresh:ident $c:ident]
        $($(#[$doc:meta])* $name:ident $in_a:literal $in_b:literal $([$($load:ident)+])+;)*) => {
        match $products {
            // SAFETY: a unit exists only where its token did, which proves the features.
            $(Products::$name => unsafe {
                let pairs = &const { Products::$name.pairs() }[..Products::$name.steps().len()];
                square::<$in_a, $in_b>(pairs, $operands, $steps, $fresh, $c);
            })*
        }
    };
}

/// `c += Σ a·b`, or `c = Σ a·b`.
///
/// # Safety
/// The CPU has AVX512_BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")]
unsafe fn square<const IN_A: usize, const IN_B: usize>(
    pairs: &[(usize, usize)],
    (a, b): (&[Operand], &[Operand]),
    steps: usize,
    fresh: bool,
    c: &mut Square,
) {
    for band in 0..SIDE / BAND {
        let (operand, first) = (band * BAND / WORDS, band * BAND % WORDS);
        let mut sums = [[_mm512_setzero_ps(); 2]; BAND];
        for step in 0..steps {
            let (a, b) = (&a[step * 2 * IN_A..][..2 * IN_A], &b[step * 2 * IN_B..][..2 * IN_B]);
            for &(part_a, part_b) in pairs {
                let rows = &a[2 * part_a + operand].0[first * WORDS..][..BAND * WORDS];
                let [left, right] = [&b[2 * part_b].0, &b[2 * part_b + 1].0];
                for word in 0..WORDS {
                    // SAFETY: sixteen floats each, of rows 0 to 15 of an operand, which is aligned to 64 bytes.
                    let columns = unsafe {
                        [_mm512_load_ps(left.as_ptr().add(word * 16)), _mm512_load_ps(right.as_ptr().add(word * 16))]
                    };
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let word = bf16s(_mm512_set1_ps(rows[row * WORDS + word]));
                        for (sum, column) in sums.iter_mut().zip(columns) {
                            *sum = _mm512_dpbf16_ps(*sum, word, bf16s(column));
                        }
                    }
                }
            }
        }
        let lines = c[band * BAND * SIDE..][..BAND * SIDE].as_chunks_mut::<SIDE>().0;
        for (line, sums) in lines.iter_mut().zip(sums) {
            for (half, sum) in line.as_chunks_mut::<16>().0.iter_mut().zip(sums) {
                // SAFETY: sixteen floats.
                unsafe {
                    let all = if fresh { sum } else { _mm512_add_ps(_mm512_loadu_ps(half.as_ptr()), sum) };
                    _mm512_storeu_ps(half.as_mut_ptr(), all);
                }
            }
        }
    }
}

/// Sixteen words as pairs of bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16s(words: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes, and any bits are valid in either.
    unsafe { core::mem::transmute::<__m512, __m512bh>(words) }
}

impl Avx512Bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")]
    fn with_features<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
}

impl PairUnit for Avx512Bf16 {
    type Vectors = Avx512;

    #[inline(always)]
    fn vectors(self) -> Avx512 {
        self.vectors
    }

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        // SAFETY: `self` proves the features that `with_features` enables.
        unsafe { Self::with_features(f) }
    }

    #[inline(always)]
    fn step(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves the instructions, none of which touches memory.
        unsafe { _mm512_dpbf16_ps(c, bf16s(a), bf16s(b)) }
    }

    #[inline(always)]
    fn narrow(self, x: __m512, dst: &mut [bf16]) {
        assert!(dst.len() >= 16);
        // SAFETY: sixteen elements of two bytes were asserted above; the token proves the instructions. Any bits are
        // valid in either vector of 32 bytes.
        unsafe {
            let halves = core::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x));
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), halves);
        }
    }

    #[inline(always)]
    fn narrow_pair(self, even: __m512, odd: __m512) -> __m512 {
        // SAFETY: the token proves the instructions, none of which touches memory; any bits are valid in either vector
        // of 64 bytes.
        unsafe {
            // Those of `even` are the lower half.
            let halves = core::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_loadu_si512(ZIP.as_ptr().cast()), halves))
        }
    }
}

/// Where each half of a pair comes from: the n-th of the lower sixteen, and the n-th of the upper ones.
static ZIP: [u16; 32] = {
    let (mut from, mut n) = ([0; 32], 0);
    while n < 32 {
        from[n] = (n / 2 + n % 2 * 16) as u16;
        n += 1;
    }
    from
};

impl AmxUnit for Avx512Bf16 {
    fn refresh(&mut self) {}

    #[inline]
    fn block(&mut self, products: Products, a: &[Operand], b: &[Operand], steps: usize, fresh: bool, c: &mut Square) {
        products.check(a, b, steps);
        with_products!(blocks, products, (a, b), steps, fresh, c);
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::amx::dot::DotModel;
    use crate::isa::Isa;
    use crate::isa::pairs::{PairModel, Pairs};
    use crate::isa::portable::Portable;
    use crate::level::Level;

    /// The token, if this machine has one. If not, the tests say so and pass, unless `ATTN_TEST_LEVELS` names the
    /// level.
    fn unit() -> Option<Avx512Bf16> {
        match Level::by_name("avx512bf16") {
            Ok(Level::Avx512Bf16(unit)) => Some(unit),
            other => {
                assert!(!attn_testing::is_demanded("avx512bf16"), "{other:?}");
                std::eprintln!("no AVX512_BF16 here: nothing was compared");
                None
            }
        }
    }

    /// Any bits, subnormal numbers, infinities and NaN among them; or sizes that meet in sums; or those whose products
    /// are near the smallest normal number.
    #[derive(Clone, Copy, Debug)]
    enum Sizes {
        Any,
        Alike,
        Tiny,
    }

    fn operands(count: usize, seed: &mut u64, sizes: Sizes) -> Vec<Operand> {
        let mut word = || {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = (*seed >> 32) as u32;
            f32::from_bits(match sizes {
                Sizes::Any => bits,
                Sizes::Alike => (bits & 0x83ff_83ff) | 0x3c00_3c00,
                Sizes::Tiny => (bits & 0x83ff_83ff) | 0x1e00_1e00,
            })
        };
        (0..count).map(|_| Operand(core::array::from_fn(|_| word()))).collect()
    }

    /// One step, and both ways to make words, beside the model of portable vectors, which rounds in plain Rust.
    #[test]
    fn lanes_of_pairs_are_the_models() {
        let Some(unit) = unit() else { return };
        let (pairs, model) = (Pairs(unit), Pairs(PairModel(<Portable>::PROVEN)));
        let (mut seed, lanes) = (11, <Portable>::LANES);
        for sizes in [Sizes::Any, Sizes::Alike, Sizes::Tiny].repeat(40) {
            let [a, b, c] = [(); 3].map(|()| operands(1, &mut seed, sizes)[0].0);
            let (mut ours, mut want) = ([0.0f32; 16], [0.0f32; 16]);
            let same = |ours: &[f32], want: &[f32]| {
                let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(ours.iter().zip(want).all(|(&a, &b)| same(a, b)), "{sizes:?}: {ours:?}, model {want:?}");
            };
            pairs.vectorize(|| pairs.store(pairs.step(pairs.load(&a), pairs.load(&b), pairs.load(&c)), &mut ours));
            for n in (0..16).step_by(lanes) {
                let step = model.step(model.load(&a[n..]), model.load(&b[n..]), model.load(&c[n..]));
                model.store(step, &mut want[n..]);
            }
            same(&ours, &want);
            // Normal numbers: the processor takes smaller ones for 0.
            let normal = |x: f32| if x.is_normal() { x } else { 1.0 + x.to_bits() as f32 };
            let (a, b) = (a.map(normal), b.map(normal));
            pairs.vectorize(|| pairs.store(pairs.narrow_pair(pairs.load(&a), pairs.load(&b)), &mut ours));
            for n in (0..16).step_by(lanes) {
                model.store(model.narrow_pair(model.load(&a[n..]), model.load(&b[n..])), &mut want[n..]);
            }
            assert_eq!(ours.map(f32::to_bits), want.map(f32::to_bits), "{sizes:?}");
            let [mut halves, mut wanted] = [[bf16::ZERO; 16]; 2];
            pairs.vectorize(|| pairs.narrow(pairs.load(&a), &mut halves));
            for n in (0..16).step_by(lanes) {
                model.narrow(model.load(&a[n..]), &mut wanted[n..]);
            }
            assert_eq!(halves, wanted, "{sizes:?}");
        }
    }

    #[test]
    fn the_processor_computes_what_the_model_says() {
        use Products::*;
        let Some(mut unit) = unit() else { return };
        let mut seed = 7;
        for round in 0..8 {
            for products in [One, OneByTwo, OneByThree, TwoByOne, ThreeByOne, Three, Four, Five, Six] {
                for (steps, fresh, sizes) in [
                    (0, true, Sizes::Alike),
                    (0, false, Sizes::Alike),
                    (1, true, Sizes::Alike),
                    (3, false, Sizes::Alike),
                    (1, true, Sizes::Tiny),
                    (2, false, Sizes::Any),
                    (1, true, Sizes::Any),
                ] {
                    let (in_a, in_b) = products.parts();
                    let mut operands = |parts| operands(steps * 2 * parts, &mut seed, sizes);
                    let (a, b) = (operands(in_a), operands(in_b));
                    let mut ours: Square =
                        core::array::from_fn(|n| if n % 5 == 0 { 1e-30 } else { n as f32 * 1e-3 - 0.5 });
                    let mut want = ours;
                    unit.block(products, &a, &b, steps, fresh, &mut ours);
                    DotModel.block(products, &a, &b, steps, fresh, &mut want);
                    for (n, (ours, want)) in ours.iter().zip(&want).enumerate() {
                        let same = ours.to_bits() == want.to_bits() || ours.is_nan() && want.is_nan();
                        assert!(same, "{round} {products:?} {steps} {fresh} {sizes:?}: {n}: {ours:e}, model {want:e}");
                    }
                }
            }
        }
    }
}
