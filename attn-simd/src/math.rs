//! 2ˣ and tanh on lanes.
//!
//! `2ˣ = 2ⁿ·2ᶠ` with `n` the nearest integer and `|f| ≤ ½`; `2ᶠ = 1 + f·g(f)` with `g` a polynomial of degree 5. Its
//! coefficients are a relative minimax fit (Remez exchange in 50 digits, constant term of `2ᶠ` held at 1 so that the
//! largest score of a row gets the weight 1 exactly). The fit's relative error is 2.6e-9; the rest is the rounding of
//! `f32`. Results below 2⁻¹⁰¹ are exactly 0: they change no sum with a weight of 1, and their products with values
//! would be subnormal, which is slow.

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

/// 2ʸ for `y ≤ 127` (weights have `y ≤ 0`): below [`LEAST_POWER`](crate::isa::LEAST_POWER) exactly 0, NaN stays NaN,
/// 2⁰ is 1.
#[inline(always)]
pub(crate) fn exp2<I: Isa>(isa: I, y: I::F) -> I::F {
    let (pow, f) = isa.split(y);
    let p = isa.mul_add(f, polynomial(isa, f), isa.splat(1.0));
    isa.scale_by_pow2(p, pow)
}

/// As [`exp2`], of several vectors, step by step: one alone is 50 cycles of instructions that wait for each other, and
/// a processor looks ahead over few of them.
#[inline(always)]
pub(crate) fn exp2_each<I: Isa, const N: usize, const ROWS: usize>(isa: I, y: [[I::F; N]; ROWS]) -> [[I::F; N]; ROWS] {
    let (mut pow, mut f, mut g) = ([[isa.split(y[0][0]).0; N]; ROWS], y, [[isa.splat(EXP2[5]); N]; ROWS]);
    for row in 0..ROWS {
        for i in 0..N {
            (pow[row][i], f[row][i]) = isa.split(y[row][i]);
        }
    }
    for c in [EXP2[4], EXP2[3], EXP2[2], EXP2[1], EXP2[0], 1.0] {
        for row in 0..ROWS {
            for i in 0..N {
                g[row][i] = isa.mul_add(g[row][i], f[row][i], isa.splat(c));
            }
        }
    }
    for row in 0..ROWS {
        for i in 0..N {
            g[row][i] = isa.scale_by_pow2(g[row][i], pow[row][i]);
        }
    }
    g
}

/// `2ᶠ` on [−½, ½] to a relative 7.5e-5, lowest first: a minimax fit whose constant term is free, as the next.
const EXP2_COARSE: [f32; 4] = [0.99992807354, 0.693260985457, 0.242611122194, 0.0551716690749];
/// The same to a relative 2.6e-6.
const EXP2_FAIR: [f32; 5] = [0.999999261446, 0.693121814737, 0.240247448279, 0.0559178603193, 0.00957010190809];

/// The factor of [`exp2_raised`], 2²⁴: every bit of the smallest result is a normal number.
pub(crate) const RAISE: f32 = 16_777_216.0;

/// [`RAISE`]`·2ʸ` for `y ≤ 103`, for weights that are split into parts: below
/// [`LEAST_POWER`](crate::isa::LEAST_POWER) exactly 0. By a polynomial of `DEGREE` 3 (relative error 7.5e-5) or 4
/// (2.6e-6), whose 2⁰ is 1 only within that error; any other degree means that of `exp2`.
#[inline(always)]
pub(crate) fn exp2_raised<I: Isa, const DEGREE: usize>(isa: I, y: I::F) -> I::F {
    let (pow, f) = isa.split(y);
    let p = match DEGREE {
        3 => horner(isa, f, &const { raised(EXP2_COARSE) }),
        4 => horner(isa, f, &const { raised(EXP2_FAIR) }),
        _ => isa.mul_add(f, horner(isa, f, &const { raised(EXP2) }), isa.splat(RAISE)),
    };
    isa.scale_by_pow2(p, pow)
}

/// Coefficients of the polynomial times [`RAISE`]: exact.
const fn raised<const N: usize>(mut coefficients: [f32; N]) -> [f32; N] {
    let mut n = 0;
    while n < N {
        coefficients[n] *= RAISE;
        n += 1;
    }
    coefficients
}

/// A polynomial by its coefficients, lowest first.
#[inline(always)]
fn horner<I: Isa, const N: usize>(isa: I, x: I::F, coefficients: &[f32; N]) -> I::F {
    let mut sum = isa.splat(coefficients[N - 1]);
    for c in coefficients[..N - 1].iter().rev() {
        sum = isa.mul_add(sum, x, isa.splat(*c));
    }
    sum
}

/// Hyperbolic tangent: `(e − 1)/(e + 1)` with `e − 1 = 2ⁿ·(2ᶠ − 1) + (2ⁿ − 1)`, `n + f = 2·log₂e·|x|`, which keeps the
/// relative accuracy for small `x`. Beyond ±10 it is ±1; NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<I: Isa>(isa: I, x: I::F) -> I::F {
    let one = isa.splat(1.0);
    let size = isa.abs(x);
    // The smaller of size and 10, as −max(−size, −10); written so that a NaN in `x` is put back at the end.
    let capped = isa.sub(isa.splat(0.0), isa.max(isa.sub(isa.splat(0.0), size), isa.splat(-10.0)));
    let y = isa.mul(capped, isa.splat(2.0 * core::f32::consts::LOG2_E));
    let (pow, f) = isa.split(y);
    let pow = isa.scale_by_pow2(one, pow);
    let e1 = isa.mul_add(pow, exp2_minus_1(isa, f), isa.sub(pow, one));
    let t = isa.div(e1, isa.add(e1, isa.splat(2.0)));
    let t = isa.copysign(t, x);
    isa.select(isa.eq(x, x), t, x)
}

/// `sum + rest = (sum + rest)·factor + part`, where `rest` is what the sum has lost to rounding: however many parts are
/// added, sum and rest together are off by one or two roundings (Kahan, "Further remarks on reducing truncation
/// errors", 1965). A part of 0 without a factor, or with a factor of 1, changes no bit, because `rest` is exact (Knuth,
/// TAOCP 2, 4.2.2, theorem B): it is at most half of the sum's last bit. The rest of an infinite sum is NaN or
/// infinite: the caller makes it 0.
#[inline(always)]
pub(crate) fn add_compensated<I: Isa>(
    isa: I,
    (sum, rest): (I::F, I::F),
    factor: Option<I::F>,
    part: I::F,
) -> (I::F, I::F) {
    let (old, more) = match factor {
        None => (sum, isa.add(part, rest)),
        Some(factor) => {
            let scaled = isa.mul(sum, factor);
            let beyond = isa.mul_add(sum, isa.sub(isa.splat(0.0), factor), scaled);
            // Of an infinite sum it would be NaN.
            let beyond = isa.select(isa.eq(beyond, beyond), beyond, isa.splat(0.0));
            (scaled, isa.sub(isa.mul_add(rest, factor, part), beyond))
        }
    };
    let sum = isa.add(old, more);
    let added = isa.sub(sum, old);
    (sum, isa.add(isa.sub(old, isa.sub(sum, added)), isa.sub(more, added)))
}

/// Finite lanes; 0 instead of others.
#[inline(always)]
pub(crate) fn finite_or_zero<I: Isa>(isa: I, x: I::F) -> I::F {
    let zero = isa.splat(0.0);
    isa.select(isa.eq(isa.mul(x, zero), zero), x, zero)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::LEAST_POWER;
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
                } else if y < LEAST_POWER {
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

    /// All 2³² arguments; some minutes unoptimised, so that it is run by name:
    /// `cargo test --release -p attn-simd -- --ignored`.
    #[test]
    #[ignore = "4 billion arguments per level; CI's step exp2 runs it"]
    fn exp2_exhaustive() {
        for level in Level::available() {
            let worst = check_exp2(level, 1);
            std::eprintln!("exp2 at {}: at most {worst:.3} ulp over all f32", level.name());
            assert!(worst <= 1.5, "{level:?}: {worst} ulp");
        }
    }

    /// The polynomials of lower degree, against the one of full degree.
    struct Raised<'a, const DEGREE: usize>(&'a mut [f32]);

    impl<const DEGREE: usize> Run<()> for Raised<'_, DEGREE> {
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) {
            for x in self.0.chunks_exact_mut(I::LANES) {
                let lanes = isa.load(x);
                isa.store(exp2_raised::<I, DEGREE>(isa, lanes), x);
            }
        }
    }

    #[test]
    fn coarse_exponentials_are_as_good_as_they_say() {
        let steps = if cfg!(miri) { 64 } else { 65_536 };
        for level in Level::available() {
            let mut worst = [0.0f64; 2];
            for n in (0..steps).step_by(16) {
                let input: [f32; 16] = std::array::from_fn(|lane| ((n + lane) as f32 / steps as f32 - 1.0) * 8.0);
                let mut outputs = [input; 2];
                level.run(Raised::<3>(&mut outputs[0]));
                level.run(Raised::<4>(&mut outputs[1]));
                for (worst, output) in worst.iter_mut().zip(outputs) {
                    for (y, got) in input.into_iter().zip(output) {
                        *worst = worst.max((f64::from(got) / f64::from(RAISE) / f64::from(y).exp2() - 1.0).abs());
                    }
                }
            }
            assert!(worst[0] <= 7.6e-5 && worst[1] <= 2.8e-6, "{level:?}: {worst:?}");
            let mut ends = [f32::NEG_INFINITY; 16];
            (ends[1], ends[2]) = (f32::NAN, -127.0);
            level.run(Raised::<3>(&mut ends));
            assert!(ends[0].to_bits() == 0 && ends[1].is_nan() && ends[2].to_bits() == 0, "{level:?}: {ends:?}");
        }
    }

    #[test]
    fn the_raised_exponential_of_full_degree_has_the_bits_of_the_plain_one() {
        for level in Level::available() {
            let input: [f32; 16] = [
                f32::NEG_INFINITY,
                -127.0,
                -126.0,
                -101.5,
                -101.0,
                -100.7,
                -78.0,
                -76.0,
                -60.2,
                -1.5,
                -0.3,
                -0.0,
                0.0,
                0.7,
                5.3,
                8.0,
            ];
            let (mut plain, mut raised) = (input, input);
            level.run(Map::<false>(&mut plain));
            level.run(Raised::<6>(&mut raised));
            for (y, (plain, raised)) in input.into_iter().zip(plain.into_iter().zip(raised)) {
                assert_eq!((plain * RAISE).to_bits(), raised.to_bits(), "{level:?}: 2^{y}");
            }
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

    /// Five roundings of half an ulp lead to the quotient, each worth up to two where the result lies low in its
    /// binade.
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
