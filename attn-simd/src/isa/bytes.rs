//! Products of integers with the bytes of sixteen keys, by AVX512_VNNI or, with the same sums, by AVX512BW (`pairs`).
//!
//! VPDPBUSD adds four products of bytes to each lane: 64 a cycle on Zen 4, where a fused multiply-add has sixteen. A
//! lane is a key, so that no sum goes across lanes. For that a square of 16 keys × 64 channels is transposed as words
//! of four channels: 64 shuffles, which run beside the products. The instruction takes unsigned bytes of keys: they are
//! 128 too large, and the sums start 128 times the sum of the digits too small.
//!
//! [`digits`](super::digits) does the same in plain Rust.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;

use super::Bytes;
use super::request::request;
use dot::{Dot, Vnni, started, transposed};
use pairs::Pairs;

mod blocks;
mod dot;
mod pairs;
pub(super) mod values;
mod width;

/// Compiles `$sums` with AVX512_VNNI and without.
macro_rules! compiled {
    ($(#[$doc:meta])* $name:ident, $vnni:ident, $plain:ident, $sums:path $(=> $out:ty)?) => {
        $(#[$doc])*
        #[inline(always)]
        pub(super) unsafe fn $name<const R: usize, const D: usize>(vnni: bool, of: Bytes<'_, R, D>) $(-> $out)? {
            // SAFETY: the caller vouches for the features, and for the bytes.
            unsafe { if vnni { $vnni(of) } else { $plain(of) } }
        }

        /// # Safety
        #[doc = concat!("As [`", stringify!($name), "`].")]
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni")]
        unsafe fn $vnni<const R: usize, const D: usize>(of: Bytes<'_, R, D>) $(-> $out)? {
            // SAFETY: this function has the features; the caller vouches for the bytes.
            unsafe { $sums(Vnni, of) }
        }

        /// # Safety
        #[doc = concat!("As [`", stringify!($name), "`].")]
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn $plain<const R: usize, const D: usize>(of: Bytes<'_, R, D>) $(-> $out)? {
            // SAFETY: this function has the features; the caller vouches for the bytes.
            unsafe { $sums(Pairs, of) }
        }
    };
}

compiled! {
    /// As [`Isa::dot_bytes`](super::Isa::dot_bytes).
    ///
    /// # Safety
    /// As there; and the CPU has AVX-512 F, BW, DQ, VL, and AVX512_VNNI if `vnni` says so.
    dot_bytes, with_vnni, without_vnni, sums
}

compiled! {
    /// As [`Isa::dot_blocks`](super::Isa::dot_blocks).
    ///
    /// # Safety
    /// As there; and the CPU has AVX-512 F, BW, DQ, VL, and AVX512_VNNI if `vnni` says so.
    dot_blocks, blocks_with_vnni, blocks_without_vnni, blocks::sums => u64
}

/// # Safety
/// As [`dot_bytes`]; compiled into a function with the features of `unit`.
#[inline(always)]
unsafe fn sums<U: Dot, const R: usize, const D: usize>(unit: U, of: Bytes<'_, R, D>) {
    let Bytes { keys, columns, digits, start, unit: units, ahead, s, stride } = of;
    // SAFETY: words of digits up to a multiple of 64 columns, for all rows; the caller vouches for them.
    let digits = unsafe { unit.digits::<R, D>(digits, columns.next_multiple_of(64) / 4) };
    for (n, keys) in keys.as_chunks::<16>().0.iter().enumerate() {
        // Opaque: else a compiler would broadcast all digits beforehand, and keep those in memory.
        let digits = core::hint::black_box(&digits);
        // SAFETY: 64 bytes of each key below `columns`, or as many as the mask has bits; the caller vouches for them.
        // There are words of digits up to a multiple of 64 columns.
        unsafe {
            let flip = _mm512_set1_epi8(-128);
            let mut sums = started::<U, R, D>(&start[0]);
            for from in (0..columns).step_by(64) {
                let (mut x, mut square) = ([flip; 16], [flip; 16]);
                if columns - from >= 64 {
                    for k in 0..16 {
                        x[k] = _mm512_xor_si512(_mm512_loadu_si512(keys[k].add(from).cast()), flip);
                    }
                } else {
                    let some = (1 << (columns - from)) - 1;
                    for k in 0..16 {
                        x[k] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, keys[k].add(from)), flip);
                    }
                }
                // Within quarters: x[4k + n] becomes the nth words of all quarters, each of the keys 4k to 4k + 3.
                for k in 0..4 {
                    let four = transposed([x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]]);
                    for n in 0..4 {
                        x[4 * k + n] = four[n];
                    }
                }
                // Quarters: the words n, 4 + n, 8 + n and 12 + n of all keys. Written out by a macro, so that the
                // square stays in registers.
                macro_rules! words {
                    ($($n:literal)*) => {$(
                        let [a, b, c, d] = [x[$n], x[4 + $n], x[8 + $n], x[12 + $n]];
                        let low = [_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d)];
                        let high = [_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d)];
                        let words = [
                            _mm512_shuffle_i32x4::<0x88>(low[0], low[1]),
                            _mm512_shuffle_i32x4::<0xdd>(low[0], low[1]),
                            _mm512_shuffle_i32x4::<0x88>(high[0], high[1]),
                            _mm512_shuffle_i32x4::<0xdd>(high[0], high[1]),
                        ];
                        for g in 0..4 {
                            if const { U::AT_ONCE } {
                                request(keys[4 * $n + g].wrapping_add(from), ahead);
                                unit.add_word(&mut sums, words[g], (digits, from / 4 + 4 * g + $n));
                            } else {
                                square[4 * g + $n] = words[g];
                            }
                        }
                    )*};
                }
                words!(0 1 2 3);
                if const { !U::AT_ONCE } {
                    // A loop that compilers do not unroll.
                    let square = core::hint::black_box(&square);
                    for (n, word) in square[..core::hint::black_box(16)].iter().enumerate() {
                        request(keys[n].wrapping_add(from), ahead);
                        unit.add_word(&mut sums, *word, (digits, from / 4 + n));
                    }
                }
            }
            for r in 0..R {
                let line = &mut s[r * stride + 16 * n..][..16];
                _mm512_storeu_ps(line.as_mut_ptr(), _mm512_mul_ps(unit.joined(sums[r]), _mm512_set1_ps(units[r])));
            }
        }
    }
}

#[cfg(test)]
pub(super) mod testing {
    use crate::isa::avx512::Avx512;
    pub(super) use crate::isa::digits::testing::numbers;
    use crate::level::Level;

    /// The proof of AVX-512, if it is here.
    pub(super) fn avx512() -> Option<Avx512> {
        if let Ok(Level::Avx512(isa)) = Level::by_name("avx512") {
            return Some(isa);
        }
        assert!(!attn_testing::is_demanded("avx512"));
        std::eprintln!("no AVX-512 here: nothing was compared");
        None
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use attn_core::half;

    use super::*;
    use crate::isa::digits;

    /// Keys and digits: any, or all of one size.
    const KINDS: [Option<(i8, i8)>; 4] = [None, Some((-128, -128)), Some((127, -128)), Some((127, 127))];

    /// Both ways beside plain Rust, over all bytes, and digits of every size.
    #[test]
    fn both_instructions_sum_what_plain_rust_sums() {
        let Some(isa) = testing::avx512() else { return };
        let bytes = [1, 16, 48, 63, 64, 65, 80, 128, 208, 256].map(|columns| (columns, false));
        let blocks = [32, 64, 96, 128, 256].map(|columns| (columns, true));
        for case in bytes.into_iter().chain(blocks) {
            for kind in KINDS {
                check::<1, 3>(isa.vnni, case, kind);
                check::<2, 3>(isa.vnni, case, kind);
                check::<2, 2>(isa.vnni, case, kind);
                check::<4, 3>(isa.vnni, case, kind);
                check::<4, 2>(isa.vnni, case, kind);
            }
        }
    }

    /// Rows over 32 keys, which are sixteen.
    fn check<const R: usize, const D: usize>(vnni: bool, (columns, blocks): (usize, bool), kind: Option<(i8, i8)>) {
        let mut number = testing::numbers(3);
        let mut any =
            |n: usize, one: Option<i8>| -> Vec<i8> { (0..n).map(|_| one.unwrap_or_else(|| number() as i8)).collect() };
        let row = if blocks { columns / 32 * 34 } else { columns };
        let (mut data, padded) = (any(16 * row, kind.map(|x| x.0)), columns.next_multiple_of(64));
        if blocks {
            for (n, block) in data.as_chunks_mut::<34>().0.iter_mut().enumerate() {
                // Powers of two, so that a sum is rounded alike in f64 and in f32.
                let scale = half::f16::from_f32([1.0, -0.5, 2.0, 0.25][n % 4]).to_le_bytes();
                block[..2].copy_from_slice(&scale.map(|byte| byte as i8));
            }
        }
        let mut digits = any(padded * R * D, kind.map(|x| x.1)).as_chunks::<4>().0.to_vec();
        let mut start = vec![[[0i32; D]; R]; if blocks { columns / 32 } else { 1 }];
        for (n, word) in digits.iter_mut().enumerate() {
            for (i, x) in word.iter_mut().enumerate() {
                let column = n / (R * D) * 4 + i;
                // The first digit is at least -127.
                *x = if column >= columns { 0 } else { (*x).max(if n % D == 0 { -127 } else { -128 }) };
                if let Some(start) = start.get_mut(if blocks { column / 32 } else { 0 }) {
                    start[n / D % R][n % D] -= 128 * i32::from(*x);
                }
            }
        }
        let keys: Vec<*const i8> = (0..32).map(|k| data[k % 16 * row..].as_ptr()).collect();
        let unit: [f32; R] = core::array::from_fn(|r| 0.5 + r as f32);
        let run = |by: &dyn Fn(Bytes<'_, R, D>)| {
            let (mut s, stride) = (vec![f32::NAN; R * 40], 40);
            let (keys, digits, start, unit) = (keys.as_slice(), digits.as_ptr(), &*start, &unit);
            by(Bytes { keys, columns, digits, start, unit, ahead: [0, 0], s: &mut s, stride });
            s.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        // SAFETY: 32 keys of `columns` numbers, digits for 64 columns at a time; the token proves AVX-512, and says
        // whether there is AVX512_VNNI.
        let want = run(&|of| unsafe {
            if blocks {
                assert_eq!(digits::dot_blocks(of), 0);
            } else {
                digits::dot_bytes(of);
            }
        });
        for vnni in [false, vnni] {
            // SAFETY: the same.
            let got = run(&|of| unsafe {
                if blocks {
                    assert_eq!(dot_blocks(vnni, of), 0);
                } else {
                    dot_bytes(vnni, of);
                }
            });
            assert_eq!(got, want, "{columns} {blocks} {kind:?} {vnni}, {R} rows of {D} digits");
        }
    }
}
