//! The instructions of AMX in plain Rust, exactly as the processor computes them: for tests, Miri and machines without
//! AMX.
//!
//! From the description of TDPBF16PS (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2). The real
//! instructions give the same bits, on an emulated processor (Bochs) and on Granite Rapids. Per element of C the
//! products of the even halves form one chain of fused multiply-adds that starts at 0, those of the odd halves another;
//! the two sums are added, and the result to C. Everything rounds to nearest even whatever MXCSR says, subnormal
//! operands count as 0 and subnormal results become 0. TILELOADD zeroes what is beyond the register's rows and columns.
//!
//! In doubles: a product of two bfloat16 has 16 bits and is exact; adding a float to it rounds twice, to 53 bits and to
//! 24, which differs from rounding once only where the first rounding lands on the middle between two floats. The sum
//! is exact wherever it comes that near: the smaller term then begins no lower than the 25th bit of the sum, and has at
//! most 24 bits itself.

use super::product::{AmxUnit, Load, Operand, Products, SIDE, Square};

/// Rows of a register, and words of a row.
const ROWS: usize = 16;

/// AMX's registers of one thread, and their configuration.
pub(crate) struct Model {
    rows: [usize; 8],
    words: [usize; 8],
    tmm: [[[u32; ROWS]; ROWS]; 8],
}

impl Model {
    /// All eight registers configured to sixteen rows of sixteen words, all zero.
    pub(crate) fn new() -> Self {
        Self { rows: [ROWS; 8], words: [ROWS; 8], tmm: [[[0; ROWS]; ROWS]; 8] }
    }

    /// TILEZERO.
    fn zero(&mut self, register: usize) {
        self.tmm[register] = [[0; ROWS]; ROWS];
    }

    /// TILELOADD: rows of `src`, `stride` words apart.
    fn load(&mut self, register: usize, src: &[f32], stride: usize) {
        self.zero(register);
        let (rows, words) = (self.rows[register], self.words[register]);
        for (n, row) in self.tmm[register].iter_mut().enumerate().take(rows) {
            for (word, x) in row.iter_mut().zip(&src[n * stride..][..words]) {
                *word = x.to_bits();
            }
        }
    }

    /// TILESTORED: rows of `dst`, `stride` words apart.
    fn store(&self, register: usize, dst: &mut [f32], stride: usize) {
        let (rows, words) = (self.rows[register], self.words[register]);
        for (n, row) in self.tmm[register].iter().enumerate().take(rows) {
            for (x, word) in dst[n * stride..][..words].iter_mut().zip(row) {
                *x = f32::from_bits(*word);
            }
        }
    }

    /// TDPBF16PS: `c += a·b`.
    fn multiply(&mut self, c: usize, a: usize, b: usize) {
        for m in 0..self.rows[c] {
            let (mut even, mut odd) = ([0.0f32; ROWS], [0.0f32; ROWS]);
            for k in 0..self.words[a] {
                let (a_even, a_odd) = halves(self.tmm[a][m][k]);
                for n in 0..ROWS {
                    let (b_even, b_odd) = halves(self.tmm[b][k][n]);
                    even[n] = rounded(f64::from(a_even) * f64::from(b_even) + f64::from(even[n]));
                    odd[n] = rounded(f64::from(a_odd) * f64::from(b_odd) + f64::from(odd[n]));
                }
            }
            let words = self.words[c];
            for (n, sum) in self.tmm[c][m].iter_mut().enumerate() {
                let product = rounded(f64::from(even[n]) + f64::from(odd[n]));
                let total = rounded(f64::from(flushed(f32::from_bits(*sum))) + f64::from(product));
                *sum = if n < words { total.to_bits() } else { 0 };
            }
        }
        for row in &mut self.tmm[c][self.rows[c]..] {
            *row = [0; ROWS];
        }
    }
}

/// The lower and the upper half of a word, widened; subnormal ones are 0.
#[inline(always)]
pub(super) fn halves(word: u32) -> (f32, f32) {
    (flushed(f32::from_bits(word << 16)), flushed(f32::from_bits(word & 0xffff_0000)))
}

/// A subnormal number becomes 0 of its sign.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & (1 << 31)) } else { x }
}

/// Rounds to `f32`: a number that 24 bits leave below the smallest normal one becomes 0 of its sign.
#[inline(always)]
pub(super) fn rounded(x: f64) -> f32 {
    // 2⁻¹²⁶ − 2⁻¹⁵¹: from there on 24 bits round up to 2⁻¹²⁶.
    const TINY: f64 = f64::from_bits(0x380f_ffff_f000_0000);
    if x.abs() < TINY { if x.is_sign_negative() { -0.0 } else { 0.0 } } else { x as f32 }
}

impl AmxUnit for Model {
    fn refresh(&mut self) {}

    fn block(&mut self, products: Products, a: &[Operand], b: &[Operand], steps: usize, fresh: bool, c: &mut Square) {
        products.check(a, b, steps);
        // The same registers as the leaf: sums in 0 to 3, A in 4 and 5, B in 6 and 7.
        const SUMS: [(usize, usize); 4] = [(0, 0), (0, 1), (1, 0), (1, 1)];
        for (register, (i, j)) in SUMS.into_iter().enumerate() {
            if fresh {
                self.zero(register);
            } else {
                self.load(register, &c[(i * SIDE + j) * ROWS..], SIDE);
            }
        }
        let (in_a, in_b) = products.parts();
        for step in 0..steps {
            for loads in products.steps() {
                for half in 0..2 {
                    for load in *loads {
                        match *load {
                            Load::A(part) => self.load(4 + half, &a[(step * in_a + part) * 2 + half].0, ROWS),
                            Load::B(part) => self.load(6 + half, &b[(step * in_b + part) * 2 + half].0, ROWS),
                        }
                    }
                }
                for (register, (i, j)) in SUMS.into_iter().enumerate() {
                    self.multiply(register, 4 + i, 6 + j);
                }
            }
        }
        for (register, (i, j)) in SUMS.into_iter().enumerate() {
            self.store(register, &mut c[(i * SIDE + j) * ROWS..], SIDE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use attn_core::half::bf16;

    use super::*;

    /// Words of two bfloat16, the first in the lower half.
    fn words(numbers: &[f32]) -> Vec<f32> {
        let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
        numbers.chunks(2).map(|pair| f32::from_bits(bits(pair[0]) | bits(pair[1]) << 16)).collect()
    }

    /// One element of C: `c + Σ a·b` over 32 numbers, what is not given being 0.
    fn element(c: f32, pairs: &[(f32, f32)]) -> f32 {
        let (mut a, mut b) = ([0.0f32; 32], [0.0f32; 32]);
        for (n, &(x, y)) in pairs.iter().enumerate() {
            (a[n], b[n]) = (x, y);
        }
        let mut model = Model::new();
        model.load(0, &[c; 256], 16);
        let row = words(&a);
        model.load(4, &row.repeat(16), 16);
        let column: Vec<f32> = words(&b).into_iter().flat_map(|word| [word; 16]).collect();
        model.load(6, &column, 16);
        model.multiply(0, 4, 6);
        let mut got = [0.0; 256];
        model.store(0, &mut got, 16);
        // Nobody promises which NaN it is; Miri picks one at random.
        let same = |x: &f32| x.to_bits() == got[0].to_bits() || x.is_nan() && got[0].is_nan();
        assert!(got.iter().all(same), "all elements are the same");
        got[0]
    }

    const TINY: f32 = f32::MIN_POSITIVE;

    #[test]
    fn products_are_added_up_before_they_meet_the_sum() {
        let u = 1.0 / 16_777_216.0; // half a unit in the last place of 1
        assert_eq!(element(1.0, &[(u, 1.0); 4]), 1.0 + 4.0 * u);
        assert_eq!(element(1.0, &[(u, 1.0)]), 1.0);
    }

    #[test]
    fn even_and_odd_products_form_chains_of_their_own() {
        let large = 16_777_216.0; // 2²⁴: adding 1 rounds back
        let even = [(large, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0)];
        assert_eq!(element(0.0, &even), large);
        let odd = [(large, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0)];
        assert_eq!(element(0.0, &odd), large + 2.0);
    }

    #[test]
    fn sums_round_to_nearest_even() {
        assert_eq!(element(16_777_216.0, &[(1.0, 1.0)]), 16_777_216.0);
        assert_eq!(element(16_777_218.0, &[(1.0, 1.0)]), 16_777_220.0);
        assert_eq!(element(16_777_216.0, &[(1.0, 1.0), (1.0, 1.0 / 128.0)]), 16_777_218.0);
    }

    #[test]
    fn subnormal_numbers_are_zero_anywhere() {
        assert_eq!(element(0.0, &[(TINY / 2.0, 1e30)]), 0.0);
        assert_eq!(element(0.0, &[(TINY, 0.5)]), 0.0);
        assert_eq!(element(0.0, &[(TINY, 1.0)]), TINY);
        assert_eq!(element(TINY / 2.0, &[]), 0.0);
        // A difference that is subnormal, in a chain, between the chains, and with C.
        assert_eq!(element(0.0, &[(1.5 * TINY, 1.0), (0.0, 0.0), (-TINY, 1.0), (0.0, 0.0), (TINY, 1.0)]), TINY);
        assert_eq!(element(0.0, &[(1.5 * TINY, 1.0), (-TINY, 1.0)]), 0.0);
        assert_eq!(element(1.5 * TINY, &[(-TINY, 1.0)]), 0.0);
        // A product that is too small by itself counts where the sum is normal.
        assert_eq!(element(0.0, &[(TINY, 1.0), (0.0, 0.0), (TINY, 0.5)]), 1.5 * TINY);
    }

    #[test]
    fn tininess_is_seen_after_rounding() {
        let below = |ulps: f64| f64::from(TINY) - ulps * f64::powi(2.0, -152);
        assert_eq!(rounded(below(4.0)), 0.0);
        assert_eq!(rounded(below(2.001)), 0.0);
        assert_eq!(rounded(below(2.0)), TINY);
        assert_eq!(rounded(-below(2.0)), -TINY);
        assert!(rounded(-below(4.0)).is_sign_negative());
    }

    #[test]
    fn nan_and_infinity_spread() {
        for pairs in [[(0.0, f32::NAN)], [(0.0, f32::INFINITY)], [(f32::NAN, 1.0)]] {
            assert!(element(1.0, &pairs).is_nan(), "{pairs:?}");
        }
        assert_eq!(element(1.0, &[(f32::INFINITY, 2.0)]), f32::INFINITY);
        assert_eq!(element(0.0, &[(3e38, 3e38)]), f32::INFINITY);
        assert!(element(0.0, &[(f32::INFINITY, 1.0), (f32::NEG_INFINITY, 1.0)]).is_nan());
    }

    /// Two roundings in doubles are one: against the fused operation of the library, over products and sums of all
    /// relative sizes.
    #[test]
    fn products_and_sums_round_once() {
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 32) as u32
        };
        for _ in 0..if cfg!(miri) { 300 } else { 1_000_000 } {
            // Significands at random, exponents between 2⁻⁴⁰ and 2⁴⁰, so that nothing is subnormal unless it cancels.
            let mut number = |mask: u32| {
                let bits = random();
                f32::from_bits((bits & (0x807f_ffff & mask)) | (87 + random() % 80) << 23)
            };
            let (a, b, c) = (number(0xffff_0000), number(0xffff_0000), number(u32::MAX));
            let got = rounded(f64::from(a) * f64::from(b) + f64::from(c));
            assert_eq!(got.to_bits(), a.mul_add(b, c).to_bits(), "{a:e}·{b:e} + {c:e}");
        }
    }

    #[test]
    fn loads_and_products_stop_at_the_end_of_a_register() {
        let mut model = Model::new();
        model.rows = [3, 16, 16, 16, 3, 16, 5, 16];
        model.words = [4, 16, 16, 16, 5, 16, 4, 16];
        let ones = words(&[1.0; 512]);
        model.load(0, &[7.0; 256], 16);
        model.load(4, &ones, 16);
        model.load(6, &ones, 16);
        for (register, rows, columns) in [(0, 3, 4), (4, 3, 5), (6, 5, 4)] {
            for (r, row) in model.tmm[register].iter().enumerate() {
                for (c, word) in row.iter().enumerate() {
                    assert_eq!(*word != 0, r < rows && c < columns, "register {register} row {r} word {c}");
                }
            }
        }
        model.multiply(0, 4, 6);
        let mut got = [-1.0; 256];
        model.store(0, &mut got, 16);
        for (n, x) in got.into_iter().enumerate() {
            // Five words of two ones each, added to seven; nothing outside of the register is written.
            assert_eq!(x, if n / 16 < 3 && n % 16 < 4 { 17.0 } else { -1.0 }, "{n}");
        }
    }

    /// The block operation is a product of matrices, over all parts that meet.
    #[test]
    fn a_block_is_a_product_of_matrices() {
        use Products::*;
        let (steps, all) = if cfg!(miri) { (1, 3..4) } else { (2, 0..9) };
        for products in &[One, OneByTwo, OneByThree, Three, Four, Five, Six, TwoByOne, ThreeByOne][all] {
            let (in_a, in_b) = products.parts();
            // Small integers, so that everything is exact: number `n` of a part.
            let operands = |parts: usize, scale: usize| -> Vec<Operand> {
                (0..steps * parts * 2)
                    .map(|operand| {
                        let numbers: Vec<f32> =
                            (0..512).map(|n| ((n * scale + operand * 5) % 7) as f32 - 3.0).collect();
                        Operand(words(&numbers).try_into().expect("an operand"))
                    })
                    .collect()
            };
            let (a, b) = (operands(in_a, 3), operands(in_b, 11));
            // A: rows of channel pairs; B: pairs of rows by columns.
            let at_a = |step: usize, part: usize, row: usize, k: usize| {
                let word = a[(step * in_a + part) * 2 + row / 16].0[row % 16 * 16 + k / 2];
                if k.is_multiple_of(2) { halves(word.to_bits()).0 } else { halves(word.to_bits()).1 }
            };
            let at_b = |step: usize, part: usize, k: usize, column: usize| {
                let word = b[(step * in_b + part) * 2 + column / 16].0[k / 2 * 16 + column % 16];
                if k.is_multiple_of(2) { halves(word.to_bits()).0 } else { halves(word.to_bits()).1 }
            };
            let pairs = &products.pairs()[..products.steps().len()];
            for fresh in if cfg!(miri) { &[false][..] } else { &[true, false] } {
                let (fresh, mut c) = (*fresh, [0.5; SIDE * SIDE]);
                Model::new().block(*products, &a, &b, steps, fresh, &mut c);
                for row in (0..SIDE).step_by(if cfg!(miri) { 7 } else { 1 }) {
                    for column in (0..SIDE).step_by(if cfg!(miri) { 5 } else { 1 }) {
                        let mut want = if fresh { 0.0 } else { 0.5 };
                        for step in 0..steps {
                            for &(p, q) in pairs {
                                want +=
                                    (0..SIDE).map(|k| at_a(step, p, row, k) * at_b(step, q, k, column)).sum::<f32>();
                            }
                        }
                        assert_eq!(c[row * SIDE + column], want, "{products:?} {row} {column}");
                    }
                }
            }
        }
    }
}
