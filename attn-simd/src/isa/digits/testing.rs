//! What tests of products of integers share: numbers, and weights and sums of any level beside those of plain Rust.

use core::mem::MaybeUninit;
use std::vec::Vec;

use super::*;
use crate::isa::{Isa, MAX_LANES};

/// Numbers at random.
pub(in crate::isa) fn numbers(mut seed: u64) -> impl FnMut() -> u32 {
    move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as u32
    }
}

/// Weights, their integers and sums of values, at a level whose integers are read by `integer`.
pub(in crate::isa) fn weights_and_sums_are_those_of_plain_rust<I: Isa>(isa: I, integer: fn(&Weights, usize) -> i32) {
    let mut number = numbers(5);
    let data: Vec<i8> = (0..64 * 100).map(|n| if n % 7 == 3 { -128 } else { number() as i8 }).collect();
    let values: [*const i8; 64] = core::array::from_fn(|n| data[n * 100..].as_ptr());
    let rows: [[f32; 64]; 4] = core::array::from_fn(|r| core::array::from_fn(|_| (number() >> r) as f32 * 1e-7));
    let scales: [f32; 64] = core::array::from_fn(|_| (number() % 99) as f32 / 64.0);
    for len in [64, 1, 16, 17, 50, 63] {
        // All of them, or all but one.
        let [all, some] = [u64::MAX >> (64 - len), u64::MAX >> (64 - len) & !(1 << (len / 2))];
        for scales in [None, Some(&scales)] {
            for (row, odd) in rows.iter().flat_map(|row| [1.0, -1e-9, f32::NAN, f32::INFINITY].map(|x| (row, x))) {
                let mut row = *row;
                row[len / 2] *= odd;
                for seen in [all, some] {
                    let most = isa.most_weight(&row, scales, seen);
                    assert_eq!(most, most_weight(&row, scales, seen), "{len} {odd}");
                }
            }
        }
        let (mut weights, mut wants) = ([Weights::ZERO; 4], [Weights::ZERO; 4]);
        for (r, row) in rows.iter().enumerate() {
            let mut scales = scales;
            let seen = if r % 2 == 0 { all } else { some };
            let most = most_weight(row, (r > 1).then_some(&scales), all);
            if r % 2 == 1 {
                scales[len / 2] = f32::NAN; // hidden
            }
            let (factor, scales) = (Weights::MOST / most.expect("weights"), (r > 1).then_some(&scales));
            isa.write_weights(row, factor, scales, seen, &mut weights[r]);
            write_weights(row, factor, scales, seen, &mut wants[r]);
            for n in 0..64 {
                let place = Weights::place(n / 4 * 4) + n % 4;
                let [high, low] = [0, 1].map(|digit| i32::from(wants[r].bytes[digit][place]));
                assert_eq!(integer(&weights[r], n), 256 * high + low, "{len}, row {r}, value {n}");
            }
        }
        for vectors in [4, 3, 2, 1] {
            let (next, bytes) = (Next { row: 3, part: 1, parts: 3, step: 32 }, vectors * I::LANES);
            let of = Values { values: &values, len, at: 3, bytes, ahead: [0, 0], next };
            check::<I, 1, 1>(isa, &of, &weights, &wants);
            check::<I, 2, 1>(isa, &of, &weights, &wants);
            check::<I, 4, 1>(isa, &of, &weights, &wants);
            check::<I, 1, 2>(isa, &Values { at: 5, bytes: 8 * I::LANES, ..of }, &weights, &wants);
        }
    }
}

fn check<I: Isa, const R: usize, const C: usize>(
    isa: I,
    of: &Values<'_>,
    weights: &[Weights; 4],
    wants: &[Weights; 4],
) {
    let (weights, units) = (weights.first_chunk::<R>().expect("rows"), [0.25; R]);
    let mut out: [[[MaybeUninit<[f32; MAX_LANES]>; 4]; R]; C] = [[[MaybeUninit::new([f32::NAN; MAX_LANES]); 4]; R]; C];
    // SAFETY: 100 bytes of each value.
    unsafe { isa.weigh_bytes(of, (weights, &units), &mut out) };
    for (c, r) in (0..C).flat_map(|c| (0..R).map(move |r| (c, r))) {
        let (mut want, bytes) = ([0.0; 64], if C > 1 { 4 * I::LANES } else { of.bytes });
        // SAFETY: the same.
        unsafe { weigh(&Values { at: of.at + 4 * I::LANES * c, bytes, ..*of }, &wants[r], units[r], &mut want) };
        for n in 0..bytes {
            // SAFETY: written above.
            let got = unsafe { out[c][r][n / I::LANES].assume_init() }[n % I::LANES];
            assert_eq!(got, want[n], "{R} rows, {C} times, row {r}, byte {n} of {bytes}");
        }
    }
}
