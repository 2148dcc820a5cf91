//! 2ˣ and tanh on lanes.
//!
//! `2ˣ = 2ⁿ·2ᶠ` with `n` the nearest integer and `|f| ≤ ½`; `2ᶠ = 1 + f·g(f)` with `g` a polynomial of degree 5. Its
//! coefficients are a relative minimax fit (Remez exchange in 50 digits, constant term of `2ᶠ` held at 1 so that the largest
//! score of a row gets the weight 1 exactly); the fit's relative error is 2.6e-9, what is left is the rounding of `f32`.
//! Results below 2⁻¹²⁶ are exactly 0: subnormal ones would be slow, and far below what a weight of 1 can notice.

use crate::isa::Isa;

/// Coefficients of g, lowest first: `(2ᶠ − 1)/f` on [−½, ½].
const EXP2: [f32; 6] =
    [0.693147214968, 0.240226527829, 0.0555031055101, 0.00961769297299, 0.00134066439024, 0.000155946781613];

/// `2ᶠ − 1` for `|f| ≤ ½`, relatively accurate near 0.
#[inline(always)]
fn exp2_minus_1<I: Isa>(isa: I, f: I::F) -> I::F {
    isa.mul(f, polynomial(isa, f))
}

#[inline(always)]
fn polynomial<I: Isa>(isa: I, f: I::F) -> I::F {
    let mut g = isa.splat(EXP2[5]);
    for c in EXP2[..5].iter().rev() {
        g = isa.mul_add(g, f, isa.splat(*c));
    }
    g
}

/// 2ʸ for `y ≤ 127` (weights have `y ≤ 0`): below −126 exactly 0, NaN stays NaN, 2⁰ is 1.
#[inline(always)]
pub(crate) fn exp2<I: Isa>(isa: I, y: I::F) -> I::F {
    let (n, f) = isa.split(y);
    let p = isa.mul_add(f, polynomial(isa, f), isa.splat(1.0));
    isa.scale_by_pow2(p, n, y)
}

/// As [`exp2`], of several vectors, step by step, so that none waits for itself.
#[inline(always)]
pub(crate) fn exp2_each<I: Isa, const N: usize>(isa: I, y: [I::F; N]) -> [I::F; N] {
    let (mut n, mut f, mut g) = (y, y, [isa.splat(EXP2[5]); N]);
    for i in 0..N {
        (n[i], f[i]) = isa.split(y[i]);
    }
    for c in EXP2[..5].iter().rev() {
        for i in 0..N {
            g[i] = isa.mul_add(g[i], f[i], isa.splat(*c));
        }
    }
    for i in 0..N {
        g[i] = isa.mul_add(g[i], f[i], isa.splat(1.0));
    }
    for i in 0..N {
        g[i] = isa.scale_by_pow2(g[i], n[i], y[i]);
    }
    g
}

/// Hyperbolic tangent: `(e − 1)/(e + 1)` with `e − 1 = 2ⁿ·(2ᶠ − 1) + (2ⁿ − 1)`, `n + f = 2·log₂e·|x|`, which keeps the relative
/// accuracy for small `x`. Beyond ±10 it is ±1; NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<I: Isa>(isa: I, x: I::F) -> I::F {
    let one = isa.splat(1.0);
    let size = isa.abs(x);
    // The smaller of size and 10, as −max(−size, −10); written so that a NaN in `x` is put back at the end.
    let capped = isa.sub(isa.splat(0.0), isa.max(isa.sub(isa.splat(0.0), size), isa.splat(-10.0)));
    let y = isa.mul(capped, isa.splat(2.0 * core::f32::consts::LOG2_E));
    let (n, f) = isa.split(y);
    let pow = isa.scale_by_pow2(one, n, y);
    let e1 = isa.mul_add(pow, exp2_minus_1(isa, f), isa.sub(pow, one));
    let t = isa.div(e1, isa.add(e1, isa.splat(2.0)));
    let t = isa.copysign(t, x);
    isa.select(isa.eq(x, x), t, x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::level::Level;
    use crate::level::Run;

    /// Applies a function of lanes to a slice.
    struct Map<'a, const TANH: bool>(&'a mut [f32]);

    impl<const TANH: bool> Run<()> for Map<'_, TANH> {
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) {
            for x in self.0.chunks_exact_mut(I::LANES) {
                let lanes = isa.load(x);
                isa.store(if TANH { tanh(isa, lanes) } else { exp2(isa, lanes) }, x);
            }
        }
    }

    /// Distance in units of the last place of the correctly rounded result.
    fn ulps(got: f32, want: f64) -> f64 {
        let rounded = want as f32;
        let ulp = f64::from(f32::from_bits(rounded.abs().to_bits() + 1)) - f64::from(rounded.abs());
        (f64::from(got) - want).abs() / ulp
    }

    /// Every f32 in 0..=127 by size and both signs where in the domain; `step` thins it out.
    fn check_exp2(level: Level, step: usize) -> f64 {
        let mut worst = 0.0f64;
        let mut chunk = [0.0f32; 1024];
        let mut bits = 0u64;
        while bits <= u64::from(u32::MAX) {
            for (n, x) in chunk.iter_mut().enumerate() {
                *x = f32::from_bits((bits + (n * step) as u64).min(u64::from(u32::MAX)) as u32);
            }
            let input = chunk;
            level.run(Map::<false>(&mut chunk));
            for (&y, &got) in input.iter().zip(&chunk) {
                if y.is_nan() {
                    assert!(got.is_nan(), "{level:?}: exp2(NaN {:#x}) = {got}", y.to_bits());
                } else if y < -126.0 {
                    assert_eq!(got.to_bits(), 0, "{level:?}: exp2({y})");
                } else if y <= 127.0 {
                    worst = worst.max(ulps(got, f64::from(y).exp2()));
                }
            }
            bits += (1024 * step) as u64;
        }
        worst
    }

    #[test]
    fn exp2_is_within_one_and_a_half_ulp() {
        let step = if cfg!(miri) { 4_000_037 } else { 997 };
        for level in Level::available() {
            let worst = check_exp2(level, step);
            assert!(worst <= 1.5, "{level:?}: {worst} ulp");
        }
    }

    /// All 2³² arguments; some minutes unoptimised, so that it is run by name: `cargo test --release -p attn-simd -- --ignored`.
    #[test]
    #[ignore = "4 billion arguments per level; CI runs it in release"]
    fn exp2_exhaustive() {
        for level in Level::available() {
            let worst = check_exp2(level, 1);
            std::eprintln!("exp2 at {}: at most {worst:.3} ulp over all f32", level.name());
            assert!(worst <= 1.5, "{level:?}: {worst} ulp");
        }
    }

    #[test]
    fn exp2_of_zero_is_one() {
        for level in Level::available() {
            let mut x = [0.0f32; 16];
            x[1] = -0.0;
            level.run(Map::<false>(&mut x));
            assert_eq!(x, [1.0; 16], "{level:?}");
        }
    }

    /// Five roundings of half an ulp lead to the quotient, each worth up to two where the result lies low in its binade.
    #[test]
    fn tanh_is_within_five_ulp() {
        let step = if cfg!(miri) { 40_000_037 } else { 9_973 };
        for level in Level::available() {
            for chunk in (0..=u32::MAX).step_by(step).collect::<Vec<_>>().chunks_exact(16) {
                let input: [f32; 16] = std::array::from_fn(|n| f32::from_bits(chunk[n]));
                let mut x = input;
                level.run(Map::<true>(&mut x));
                for (x, got) in input.into_iter().zip(x) {
                    if x.is_nan() {
                        assert!(got.is_nan());
                    } else if x.abs() >= f32::MIN_POSITIVE {
                        assert!(ulps(got, f64::from(x).tanh()) <= 5.0, "{level:?}: tanh({x:e}) = {got:e}");
                    }
                }
            }
        }
    }
}
