//! Bugs that attention libraries really had, one law each; the number is the report in that project.

use attn_core::{Align, Attention, Mask, Outputs, View, ViewMut};

use super::{Answer, attend, oracle, same_bits, share};
use crate::cases::{Inputs, Memory, Tensor4, shape};
use crate::engine::Engine;
use crate::paint::nonfinite;
use crate::tolerance::{ETA, TWICE};

fn dead(answer: &Answer<f32>, row: usize, dim: usize) -> bool {
    answer.out[row * dim..(row + 1) * dim].iter().all(|x| x.to_bits() == 0) && answer.lse[row] == f32::NEG_INFINITY
}

/// pytorch#127055: a row whose first block of keys is masked gave NaN from then on. A long band mask; keys 0.., some in
/// the middle, or the last ones masked.
pub fn a_block_of_keys_fully_masked_anywhere<E: Engine>(engine: &E) {
    let inputs = Inputs::<f32>::plain(shape((1, 1, 1, 40, 600, 8, 4)), 71);
    for masked in [0..128, 0..512, 0..599, 200..400, 256..320, 472..600, 1..600] {
        let keep: Vec<bool> = (0..600).map(|j| !masked.contains(&j)).collect();
        for bias in [false, true] {
            let numbers: Vec<f32> = keep.iter().map(|&k| if k { 0.0 } else { f32::NEG_INFINITY }).collect();
            let attn = if bias {
                Attention::new().bias(View::broadcast(&numbers, &[600]).expect("bias"))
            } else {
                Attention::new().mask(Mask::keep(View::broadcast(&keep, &[600]).expect("mask")))
            };
            oracle(&attn, &inputs).check(ETA, &attend(engine, &attn, &inputs), &(engine.label(), masked.clone(), bias));
        }
    }
    let band = Attention::new().mask(Mask::window(10, 0, Align::BottomRight));
    oracle(&band, &inputs).check(ETA, &attend(engine, &band, &inputs), &engine.label());
}

/// pytorch#103749, #103963, mlx#2608, rten#1321, onnxruntime#28904: fully masked rows were NaN or a mean of V. First,
/// middle, last and all rows, by bools and by −∞.
pub fn fully_masked_rows_at_any_place<E: Engine>(engine: &E) {
    let (q_len, kv_len, dim) = (35, 70, 6);
    let inputs = Inputs::<f32>::plain(shape((1, 2, 1, q_len, kv_len, 8, dim)), 72);
    for rows in [vec![0], vec![17], vec![34], vec![0, 17, 34], (0..35).collect()] {
        let keep: Vec<bool> = (0..q_len * kv_len).map(|n| !rows.contains(&(n / kv_len))).collect();
        let bias: Vec<f32> = keep.iter().map(|&k| if k { 0.25 } else { f32::NEG_INFINITY }).collect();
        let by_bools = Attention::new().mask(Mask::keep(View::broadcast(&keep, &[q_len, kv_len]).expect("mask")));
        let by_bias = Attention::new().bias(View::broadcast(&bias, &[q_len, kv_len]).expect("bias"));
        for attn in [by_bools, by_bias] {
            let answer = attend(engine, &attn, &inputs);
            for row in 0..2 * q_len {
                assert_eq!(dead(&answer, row, dim), rows.contains(&(row % q_len)), "{}: row {row}", engine.label());
            }
            oracle(&attn, &inputs).check(ETA, &answer, &(engine.label(), &rows));
        }
    }
}

/// ik_llama.cpp#2344: NaN only where the masked rows lead their tile. The same dead rows at every offset.
pub fn masked_rows_leading_a_tile<E: Engine>(engine: &E) {
    let inputs = Inputs::<f32>::plain(shape((1, 1, 1, 70, 40, 8, 4)), 73);
    for start in 0..66 {
        let keep: Vec<bool> = (0..70).map(|i| !(start..start + 4).contains(&i)).collect();
        let attn = Attention::new().mask(Mask::keep(View::broadcast(&keep, &[70, 1]).expect("mask")));
        let answer = attend(engine, &attn, &inputs);
        for row in 0..70 {
            assert_eq!(dead(&answer, row, 4), !keep[row], "{}: dead rows from {start}, row {row}", engine.label());
            assert!(answer.out[row * 4..row * 4 + 4].iter().all(|x| x.is_finite()));
        }
    }
}

/// flashinfer#4401: a finite sentinel for −∞ zeroed rows whose true logits are below it. All logits near ±1e5 and ±1e6.
pub fn all_logits_far_from_zero<E: Engine>(engine: &E) {
    for offset in [-1e6f32, -1.2e5, -5.1e4, 5.1e4, 1.2e5, 1e6] {
        let inputs = Inputs::<f32>::plain(shape((1, 1, 1, 17, 130, 8, 4)), 74);
        let attn = Attention::new().bias(View::broadcast(core::slice::from_ref(&offset), &[]).expect("a scalar"));
        let answer = attend(engine, &attn, &inputs);
        oracle(&attn, &inputs).check(ETA, &answer, &(engine.label(), offset));
        assert!(answer.out.iter().any(|&x| x != 0.0), "{}: logits near {offset} vanished", engine.label());
    }
}

/// flashinfer#5090: the last keys of a tile were filled up with zeros, whose weight exp(0) swamped large negative
/// scores.
pub fn a_tail_of_keys_is_not_filled_with_zeros<E: Engine>(engine: &E) {
    for kv_len in (1..=17).chain([31, 33, 47, 49, 63, 65, 95, 97, 127, 129]) {
        let mut inputs = Inputs::<f32>::plain(shape((1, 1, 1, 9, kv_len, 4, 3)), 75);
        inputs.q.each(|_, x| *x = x.abs() + 3.0);
        inputs.k.each(|_, x| *x = -x.abs() - 3.0); // every score below −18
        oracle(&Attention::new(), &inputs).check(
            ETA,
            &attend(engine, &Attention::new(), &inputs),
            &(engine.label(), kv_len),
        );
    }
}

/// pytorch#159247: key counts that are not a multiple of the block.
pub fn key_counts_around_blocks<E: Engine>(engine: &E) {
    for block in [32, 64, 96, 128, 256, 512] {
        for kv_len in [block - 1, block, block + 1, 2 * block + 1] {
            let inputs = Inputs::<f32>::plain(shape((1, 1, 1, 3, kv_len, 4, 2)), 76);
            let what = (engine.label(), kv_len);
            oracle(&Attention::new(), &inputs).check(ETA, &attend(engine, &Attention::new(), &inputs), &what);
        }
    }
}

/// FlashAttention#1076: one query against 257 keys read out of bounds. Decoding shapes; slack behind each row is
/// nonfinite numbers.
pub fn one_query_against_odd_key_counts<E: Engine>(engine: &E) {
    for kv_len in [1, 2, 63, 127, 255, 256, 257, 511, 513, 1025] {
        for (q_heads, kv_heads) in [(1, 1), (4, 1), (6, 3)] {
            let dims = shape((1, q_heads, kv_heads, 1, kv_len, 32, 32));
            let inputs = Inputs::<f32>::painted(dims, Memory::Padded, 77, 1.0);
            let what = (engine.label(), kv_len, q_heads);
            oracle(&Attention::new(), &inputs).check(ETA, &attend(engine, &Attention::new(), &inputs), &what);
        }
    }
}

/// oneDNN#5717: a head dim that is not a multiple of the tile let garbage into other rows. Every dim from 1 to 160,
/// with nonfinite numbers around each row.
pub fn every_head_dim<E: Engine>(engine: &E) {
    for dim in 1..=160 {
        let dims = shape((1, 1, 1, 5, 19, dim, 161 - dim));
        let inputs = Inputs::<f32>::painted(dims, Memory::Padded, 78, 1.0);
        oracle(&Attention::new(), &inputs).check(
            ETA,
            &attend(engine, &Attention::new(), &inputs),
            &(engine.label(), dim),
        );
    }
}

/// MNN#4898: keys were cut to the query count in cross attention.
pub fn keys_are_not_cut_to_the_query_count<E: Engine>(engine: &E) {
    for (q_len, kv_len) in [(2, 300), (300, 2), (1, 129), (129, 1)] {
        let inputs = Inputs::<f32>::plain(shape((1, 2, 1, q_len, kv_len, 4, 4)), 79);
        let what = (engine.label(), q_len, kv_len);
        oracle(&Attention::new(), &inputs).check(ETA, &attend(engine, &Attention::new(), &inputs), &what);
    }
}

/// onnxruntime#29020: causal was top-left on one path and bottom-right on another. Both, on the shapes of prefill,
/// decoding and chunked prefill.
pub fn causal_alignment_when_lengths_differ<E: Engine>(engine: &E) {
    for (q_len, kv_len) in [(1, 40), (4, 100), (70, 100), (100, 70), (40, 1)] {
        let inputs = Inputs::<f32>::plain(shape((1, 2, 1, q_len, kv_len, 4, 4)), 80);
        for align in [Align::TopLeft, Align::BottomRight] {
            let attn = Attention::new().mask(Mask::causal(align));
            let answer = attend(engine, &attn, &inputs);
            oracle(&attn, &inputs).check(ETA, &answer, &(engine.label(), q_len, kv_len, align));
            // The first query sees only the first key top-left; bottom-right as many as there are more keys, and
            // itself.
            let first = match align {
                Align::TopLeft => 1,
                _ => (kv_len + 1).saturating_sub(q_len),
            };
            if first == 1 {
                let close = |d| share(f64::from(answer.out[d]), f64::from(inputs.v.at([0, 0, 0, d])), 1e-6) <= 1.0;
                assert!((0..4).all(close), "{}: {align:?} {q_len}x{kv_len}", engine.label());
            }
        }
    }
}

/// onnxruntime#28379, onnx#7867: the soft-cap came after the mask, so that −∞ became −cap and masked keys got weight.
pub fn softcap_comes_before_the_mask<E: Engine>(engine: &E) {
    let mut inputs = Inputs::<f32>::plain(shape((1, 1, 1, 20, 50, 8, 4)), 81);
    let keep: Vec<bool> = (0..50).map(|j| j % 2 == 0).collect();
    let bias: Vec<f32> = keep.iter().map(|&k| if k { 3.0 } else { f32::NEG_INFINITY }).collect();
    let capped = Attention::new().softcap(0.5);
    let by_bools = capped.mask(Mask::keep(View::broadcast(&keep, &[50]).expect("mask")));
    let by_bias = capped.bias(View::broadcast(&bias, &[50]).expect("bias"));
    for attn in [by_bools, by_bias] {
        let before = attend(engine, &attn, &inputs);
        oracle(&attn, &inputs).check(ETA, &before, &engine.label());
        inputs.v.each(|[_, _, j, d], x| {
            if j % 2 == 1 {
                *x = nonfinite(d);
            }
        });
        same_bits(&attend(engine, &attn, &inputs).out, &before.out, &engine.label());
        inputs = Inputs::plain(inputs.shape, 81);
    }
}

/// The lowest finite number as a bias is a number, not a mask: a row of nothing else is a mean (as in torch).
pub fn lowest_finite_bias_is_not_a_mask<E: Engine>(engine: &E) {
    let inputs = Inputs::<f32>::plain(shape((1, 1, 1, 20, 50, 8, 4)), 82);
    let lowest = [f32::MIN];
    let attn = Attention::new().bias(View::broadcast(&lowest, &[]).expect("a scalar"));
    // Adding it swallows the scores: every weight is 1/50. A temperature below 1 makes it no infinity.
    for attn in [attn, attn.temperature(0.5)] {
        for (n, got) in attend(engine, &attn, &inputs).out.iter().enumerate() {
            let mean = (0..50).map(|j| f64::from(inputs.v.at([0, 0, j, n % 4]))).sum::<f64>() / 50.0;
            assert!((f64::from(*got) - mean).abs() < 1e-6, "{}: {got}, not the mean {mean}", engine.label());
        }
    }
    // Where other keys are visible with ordinary scores, it is as good as hidden.
    let some: Vec<f32> = (0..50).map(|j| if j % 2 == 0 { 0.0 } else { f32::MIN }).collect();
    let keep: Vec<bool> = (0..50).map(|j| j % 2 == 0).collect();
    let low = Attention::new().bias(View::broadcast(&some, &[50]).expect("bias"));
    let hidden = Attention::new().mask(Mask::keep(View::broadcast(&keep, &[50]).expect("mask")));
    let want: Vec<f64> = attend(engine, &hidden, &inputs).out.iter().map(|&x| f64::from(x)).collect();
    oracle(&hidden, &inputs).near(TWICE, &attend(engine, &low, &inputs).out, &want, &engine.label());
}

/// pytorch#156022, FlagGems#5235: writes beyond the output, or with its wrong stride. Canaries around and between rows.
pub fn nothing_is_written_beyond_the_output<E: Engine>(engine: &E) {
    for (q_len, value_dim) in [(1, 1), (1, 33), (17, 5), (49, 16), (65, 80)] {
        let dims = shape((2, 2, 1, q_len, 37, 8, value_dim));
        let inputs = Inputs::<f32>::plain(dims, 83);
        let want = attend(engine, &Attention::new(), &inputs);
        for gap in [0usize, 1, 7] {
            let row = value_dim + gap;
            let strides = [2 * q_len * row, q_len * row, row, 1].map(|n| n as isize);
            let mut data = vec![-777.0f32; 64 + 4 * q_len * row + 64];
            let view = ViewMut::strided(&mut data, dims.output(), strides, 64).expect("output");
            let mut lse = vec![-777.0f32; dims.rows()];
            let outputs = Outputs::new(view).lse(&mut lse);
            let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
            engine.forward(&Attention::new(), q, k, v, outputs).expect("accepted");
            let mut got = Tensor4 { data, sizes: dims.output(), strides, offset: 64 };
            let mut out = Vec::new();
            got.each(|_, x| {
                out.push(*x);
                *x = -777.0;
            });
            same_bits(&out, &want.out, &(engine.label(), q_len, value_dim, gap));
            let touched = got.data.iter().position(|&x| x != -777.0);
            assert_eq!(touched, None, "{}: wrote beside its rows ({q_len}, {value_dim}, {gap})", engine.label());
        }
    }
}

/// oneDNN#5308, numpy#20356: infinities in exp. Scores that reach −∞ by overflow, and values near the largest number.
pub fn infinite_and_huge_values<E: Engine>(engine: &E) {
    let mut inputs = Inputs::<f32>::plain(shape((1, 1, 1, 17, 70, 4, 3)), 84);
    inputs.q.each(|_, x| *x = 1e20);
    inputs.k.each(|[_, _, j, _], x| *x = if j % 2 == 0 { 0.0 } else { -1e20 }); // −∞ on the odd keys
    let answer = attend(engine, &Attention::new(), &inputs);
    for (n, got) in answer.out.iter().enumerate() {
        let mean = (0..35).map(|j| f64::from(inputs.v.at([0, 0, 2 * j, n % 3]))).sum::<f64>() / 35.0;
        assert!((f64::from(*got) - mean).abs() < 1e-6, "{}: {got}, not the mean {mean}", engine.label());
    }
    let mut inputs = Inputs::<f32>::plain(shape((1, 1, 1, 17, 70, 4, 3)), 85);
    inputs.v.each(|_, x| *x *= 1e35);
    oracle(&Attention::new(), &inputs).check(ETA, &attend(engine, &Attention::new(), &inputs), &engine.label());
    inputs.v.each(|_, x| *x *= 1e-35 * 1e-30);
    oracle(&Attention::new(), &inputs).check(ETA, &attend(engine, &Attention::new(), &inputs), &engine.label());
}
