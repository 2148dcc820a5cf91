//! Products of integers of 16 bits with bytes, by VPMADDWD: for AVX2, under `Precision::Fast`.
//!
//! The instruction multiplies sixteen pairs of 16 bits and adds two products to each lane: twice as many as a fused
//! multiply-add has. Bytes are widened to 16 bits, which takes one instruction for sixteen, where floats take four. So
//! integers of two digits lie whole ([`Order::Whole`](super::Order::Whole)), and lanes are channels. Integers of three
//! digits would gain nothing.
//!
//! Sums are those of [`digits`](super::digits), but for keys in blocks: there each lane adds up the scaled sums of its
//! own channels.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;
use core::sync::atomic::{Ordering, compiler_fence};

use super::Bytes;
use super::digits::{BLOCK, BLOCK_BYTES};
use super::request::request;
use super::unseen::unseen;

pub(super) mod values;

/// Keys whose sums are written together.
const EIGHT: usize = 8;
/// Sums that are finished together: of `8 / R` keys and R rows.
const SUMS: usize = 8;
/// Most blocks of a key.
const BLOCKS: usize = 8;

/// As [`Isa::dot_bytes`](super::Isa::dot_bytes), with integers of two digits, whole.
///
/// # Safety
/// As there; and the CPU has AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dot_bytes<const R: usize, const D: usize>(of: Bytes<'_, R, D>) {
    // SAFETY: the caller vouches for the bytes and the instructions.
    unsafe {
        if const { R == 1 } {
            sums::<R, D, 8>(of);
        } else if const { R == 2 } {
            sums::<R, D, 4>(of);
        } else {
            sums::<R, D, 2>(of);
        }
    }
}

/// As [`Isa::dot_blocks`](super::Isa::dot_blocks), with integers of two digits, whole: each lane adds up its own.
///
/// # Safety
/// As there; and the CPU has AVX2, FMA and F16C.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dot_blocks<const R: usize, const D: usize>(of: Bytes<'_, R, D>) -> u64 {
    // SAFETY: the caller vouches for the bytes and the instructions.
    unsafe {
        if const { R == 1 } {
            block_sums::<R, D, 8>(of)
        } else if const { R == 2 } {
            block_sums::<R, D, 4>(of)
        } else {
            block_sums::<R, D, 2>(of)
        }
    }
}

/// Rows of integers: their first, and how many a row has, zeros included.
#[derive(Clone, Copy)]
struct Rows16 {
    first: *const i16,
    each: usize,
}

impl Rows16 {
    fn of<const R: usize, const D: usize>(of: &Bytes<'_, R, D>) -> Self {
        const { assert!(R * (8 / R) == SUMS, "one, two or four rows") }
        assert!(D == 2, "integers of two digits lie whole");
        Self { first: of.digits.cast(), each: of.columns.next_multiple_of(64) }
    }

    /// Sixteen of a row.
    ///
    /// # Safety
    /// The row has as many from `column` on; the CPU has AVX2.
    #[inline(always)]
    unsafe fn load(self, row: usize, column: usize) -> __m256i {
        // SAFETY: the caller vouches for the row and the instruction.
        unsafe { _mm256_loadu_si256(self.first.add(row * self.each + column).cast()) }
    }
}

/// Sixteen bytes, as 16 bits each.
///
/// # Safety
/// As many bytes are readable, or half as many if they are `few`; the CPU has AVX2.
#[inline(always)]
unsafe fn widened(from: *const i8, few: bool) -> __m256i {
    // SAFETY: the caller vouches for the bytes and the instructions.
    unsafe {
        let bytes = if few { _mm_loadl_epi64(from.cast()) } else { _mm_loadu_si128(from.cast()) };
        _mm256_cvtepi8_epi16(bytes)
    }
}

/// Adds the products of two pairs of 16 bits to each lane.
///
/// Compilers know nothing of the sum: else they would add products of several steps first, and keep those in memory.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn add_products(sum: &mut __m256i, a: __m256i, b: __m256i) {
    // SAFETY: the caller vouches for the instructions.
    unsafe { *sum = _mm256_castps_si256(unseen(_mm256_castsi256_ps(_mm256_add_epi32(*sum, _mm256_madd_epi16(a, b))))) }
}

/// # Safety
/// As [`dot_bytes`]; compiled into a function with its features. K is `8 / R`.
#[inline(always)]
unsafe fn sums<const R: usize, const D: usize, const K: usize>(of: Bytes<'_, R, D>) {
    let rows = Rows16::of(&of);
    let Bytes { keys, columns, unit, ahead, s, stride, .. } = of;
    // SAFETY: 16 bytes of each key below `columns`, or 8 where no more are left, and integers of all rows up to a
    // multiple of 64. The caller vouches for both.
    unsafe {
        let zero = _mm256_setzero_si256();
        for (n, keys) in keys.as_chunks::<K>().0.iter().enumerate() {
            let mut acc = [[zero; K]; R];
            for line in (0..columns).step_by(64) {
                for key in keys {
                    request(key.wrapping_add(line), ahead);
                }
                // Written out by a macro: sums of few keys are in registers, all others would be in memory.
                macro_rules! add {
                    ($from:expr, $few:expr) => {
                        // Nothing crosses this line: else some sums would be in memory after all.
                        compiler_fence(Ordering::SeqCst);
                        let mut x = [zero; K];
                        for k in 0..K {
                            x[k] = widened(keys[k].add($from), $few);
                        }
                        for r in 0..R {
                            let y = rows.load(r, $from);
                            for k in 0..K {
                                add_products(&mut acc[r][k], y, x[k]);
                            }
                        }
                    };
                }
                if columns - line >= 64 {
                    add!(line, false);
                    add!(line + 16, false);
                    add!(line + 32, false);
                    add!(line + 48, false);
                } else {
                    for from in (line..columns).step_by(16) {
                        if columns - from >= 16 {
                            add!(from, false);
                        } else {
                            add!(from, true);
                        }
                    }
                }
            }
            let mut flat = [zero; SUMS];
            for r in 0..R {
                for k in 0..K {
                    flat[r * K + k] = acc[r][k];
                }
            }
            let four = |a, b, c, d| _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
            let [a, b, c, d, e, f, g, h] = flat;
            let (low, high) = (four(a, b, c, d), four(e, f, g, h));
            let (x, y) = (_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high));
            write::<R, K>(_mm256_cvtepi32_ps(_mm256_add_epi32(x, y)), unit, &mut s[n * K..], stride);
        }
    }
}

/// # Safety
/// As [`dot_blocks`]; compiled into a function with its features. K is `8 / R`.
#[inline(always)]
unsafe fn block_sums<const R: usize, const D: usize, const K: usize>(of: Bytes<'_, R, D>) -> u64 {
    let rows = Rows16::of(&of);
    let Bytes { keys, columns, unit, ahead, s, stride, .. } = of;
    let (blocks, mut odd) = (columns / BLOCK, 0);
    assert!(blocks <= BLOCKS);
    // SAFETY: the blocks of each key, and integers of all rows for them. The caller vouches for both.
    unsafe {
        for (n, keys) in keys.as_chunks::<EIGHT>().0.iter().enumerate() {
            let mut scales = [[0.0f32; EIGHT]; BLOCKS];
            for (block, scales) in scales.iter_mut().enumerate().take(blocks) {
                let mut halves = _mm_setzero_si128();
                macro_rules! insert {
                    ($($k:literal)*) => {$(
                        let half = keys[$k].add(block * BLOCK_BYTES).cast::<u16>().read_unaligned();
                        halves = _mm_insert_epi16::<$k>(halves, i32::from(half));
                    )*};
                }
                insert!(0 1 2 3 4 5 6 7);
                let of_block = _mm256_cvtph_ps(halves);
                // Neither NaN nor infinite: times 0 they are 0.
                let none = _mm256_mul_ps(of_block, _mm256_setzero_ps());
                let held = _mm256_cmp_ps::<_CMP_EQ_OQ>(none, _mm256_setzero_ps());
                odd |= u64::from(!_mm256_movemask_ps(held) as u8) << (EIGHT * n);
                _mm256_storeu_ps(scales.as_mut_ptr(), of_block);
            }
            for (m, keys) in keys.as_chunks::<K>().0.iter().enumerate() {
                let mut acc = [[_mm256_setzero_ps(); K]; R];
                for block in 0..blocks {
                    for k in 0..K {
                        let from = keys[k].add(block * BLOCK_BYTES + 2);
                        if block % 2 == 0 {
                            request(from, ahead);
                        }
                        let x = [widened(from, false), widened(from.add(16), false)];
                        let scale = _mm256_set1_ps(scales[block][m * K + k]);
                        for r in 0..R {
                            let at = block * BLOCK;
                            let two = [rows.load(r, at), rows.load(r, at + 16)];
                            let sum =
                                _mm256_add_epi32(_mm256_madd_epi16(two[0], x[0]), _mm256_madd_epi16(two[1], x[1]));
                            acc[r][k] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc[r][k]);
                        }
                    }
                }
                let mut flat = [_mm256_setzero_ps(); SUMS];
                for r in 0..R {
                    for k in 0..K {
                        flat[r * K + k] = acc[r][k];
                    }
                }
                let four = |a, b, c, d| _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
                let [a, b, c, d, e, f, g, h] = flat;
                let (low, high) = (four(a, b, c, d), four(e, f, g, h));
                let (x, y) = (_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high));
                write::<R, K>(_mm256_add_ps(x, y), unit, &mut s[n * EIGHT + m * K..], stride);
            }
        }
    }
    odd
}

/// Writes the sums of K keys and R rows, each times the row's unit.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn write<const R: usize, const K: usize>(sums: __m256, unit: &[f32; R], s: &mut [f32], stride: usize) {
    let mut all = [0.0; SUMS];
    // SAFETY: eight floats; the caller vouches for the instruction.
    unsafe { _mm256_storeu_ps(all.as_mut_ptr(), sums) }
    for r in 0..R {
        for (s, sum) in s[r * stride..][..K].iter_mut().zip(&all[r * K..]) {
            *s = unit[r] * sum;
        }
    }
}

#[cfg(test)]
mod testing {
    use crate::isa::avx2::Avx2;
    pub(super) use crate::isa::digits::testing::numbers;
    use crate::level::Level;

    /// The proof of AVX2, if it is here.
    pub(super) fn avx2() -> Option<Avx2> {
        if let Ok(Level::Avx2(isa)) = Level::by_name("avx2") {
            return Some(isa);
        }
        assert!(!attn_testing::is_demanded("avx2"));
        std::eprintln!("no AVX2 here: nothing was compared");
        None
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use attn_core::half::f16;

    use super::*;

    /// Rows of integers, and keys, whose sums are known.
    struct Case {
        columns: usize,
        integers: Vec<Vec<i16>>,
        /// Zeros included.
        whole: Vec<i16>,
    }

    impl Case {
        fn new(rows: usize, columns: usize, mut number: impl FnMut() -> i16) -> Self {
            let integers: Vec<Vec<i16>> = (0..rows).map(|_| (0..columns).map(|_| number()).collect()).collect();
            let pad = columns.next_multiple_of(64) - columns;
            let whole = integers.iter().flat_map(|row| row.iter().copied().chain((0..pad).map(|_| 0))).collect();
            Self { columns, integers, whole }
        }

        /// The scores of 16 keys in two rows of 20 floats, and what the products return.
        fn run<const R: usize>(&self, keys: &[*const i8], blocks: bool) -> (Vec<f32>, u64) {
            let (mut s, unit, start) = (vec![f32::NAN; R * 20], [0.5; R], vec![[[0; 2]; R]; 8]);
            let (columns, digits, start, unit) = (self.columns, self.whole.as_ptr().cast(), &*start, &unit);
            let of = Bytes::<R, 2> { keys, columns, digits, start, unit, ahead: [0, 0], s: &mut s, stride: 20 };
            // SAFETY: as many bytes of each key and integers of all rows; the caller has the proof of AVX2.
            let odd = unsafe {
                if blocks {
                    dot_blocks(of)
                } else {
                    dot_bytes(of);
                    0
                }
            };
            (s, odd)
        }
    }

    /// Sums of all sizes, for any number of rows, are exact and then rounded.
    #[test]
    fn sums_of_bytes_are_exact() {
        fn check<const R: usize>(columns: usize, extreme: bool) {
            let mut number = testing::numbers(3);
            let case = Case::new(R, columns, || if extreme { 32_639 } else { number() as i16 / 2 });
            let data: Vec<i8> = (0..16 * columns).map(|_| if extreme { -128 } else { number() as i8 }).collect();
            let keys: Vec<*const i8> = data.chunks(columns).map(<[i8]>::as_ptr).collect();
            let (s, _) = case.run::<R>(&keys, false);
            for (r, k) in (0..R).flat_map(|r| (0..16).map(move |k| (r, k))) {
                let key = &data[k * columns..][..columns];
                let sum: i32 = key.iter().zip(&case.integers[r]).map(|(&k, &n)| i32::from(k) * i32::from(n)).sum();
                assert_eq!(s[r * 20 + k], 0.5 * sum as f32, "{columns} columns, {R} rows, row {r}, key {k}");
            }
        }
        if testing::avx2().is_none() {
            return;
        }
        for columns in [8, 16, 24, 56, 64, 72, 80, 128, 136, 256] {
            for extreme in [false, true] {
                check::<1>(columns, extreme);
                check::<2>(columns, extreme);
                check::<4>(columns, extreme);
            }
        }
    }

    /// Sums of blocks are those of f64 but for the last bits, and scales that are not finite are told.
    #[test]
    fn sums_of_blocks_are_accurate_and_odd_scales_are_told() {
        fn check<const R: usize>(columns: usize) {
            let (mut number, row) = (testing::numbers(4), columns / BLOCK * BLOCK_BYTES);
            let case = Case::new(R, columns, || number() as i16 / 2);
            let mut data: Vec<i8> = (0..16 * row).map(|_| number() as i8).collect();
            let mut scales = Vec::new();
            for (n, block) in data.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate() {
                let scale = f16::from_f32([0.37, -0.011, 1.9, 0.0][n % 4]);
                // The last block of the keys 5 and 12.
                let (key, last) = (n * BLOCK_BYTES / row, ((n + 1) * BLOCK_BYTES).is_multiple_of(row));
                let scale = match (key, last) {
                    (5, true) => f16::NEG_INFINITY,
                    (12, true) => f16::NAN,
                    _ => scale,
                };
                block[..2].copy_from_slice(&scale.to_le_bytes().map(u8::cast_signed));
                scales.push(f64::from(scale.to_f32()));
            }
            let keys: Vec<*const i8> = data.chunks(row).map(<[i8]>::as_ptr).collect();
            let (s, odd) = case.run::<R>(&keys, true);
            assert_eq!(odd, 1 << 5 | 1 << 12, "{columns} columns, {R} rows");
            for (r, k) in (0..R).flat_map(|r| (0..16).map(move |k| (r, k))).filter(|(_, k)| ![5, 12].contains(k)) {
                let (mut want, mut size) = (0.0, 0.0);
                for c in 0..columns {
                    let scale = scales[k * columns / BLOCK + c / BLOCK];
                    let x = f64::from(data[k * row + c / BLOCK * BLOCK_BYTES + 2 + c % BLOCK]);
                    let product = 0.5 * scale * x * f64::from(case.integers[r][c]);
                    (want, size) = (want + product, size + product.abs());
                }
                let off = (f64::from(s[r * 20 + k]) - want).abs();
                // Eight blocks and eight lanes: at most some ten roundings.
                assert!(
                    off <= 11.0 * size / f64::from(1 << 24),
                    "{columns} columns, row {r}, key {k}: {off} of {size}"
                );
            }
        }
        if testing::avx2().is_none() {
            return;
        }
        for columns in [32, 64, 96, 128, 256] {
            check::<1>(columns);
            check::<2>(columns);
            check::<4>(columns);
        }
    }
}
