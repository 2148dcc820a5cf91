//! Gradients of the kernels beside torch's: on the same inputs, neither the largest error nor the root of their mean
//! square may be above what `attn_testing::tolerance` allows of torch's. `ATTN_GRADIENTS=all` runs the longest calls
//! with several heads and at every level, too.

use attn_core::backward::Gradients;
use attn_core::half::{bf16, f16};
use attn_core::{Dtype, Layout, Outputs, Precision, View, ViewMut};
use attn_simd::backward::{self, Inputs};
use attn_simd::{KernelElement, Level, Workspace, forward_at};
use attn_testing::gradients::{Answer, Call, DIM};
use attn_testing::tolerance::{Eta, TORCH_LARGEST, TORCH_RMS, TORCH_RMS_FAST, TorchGradients, torch_gradients};

/// The errors of a call whose tensors have the type `T`, output and gradients too.
fn errors<T: KernelElement>(level: Level, precision: Precision, call: &Call, answer: &Answer) -> [Eta; 3] {
    let (shape, attn) = (&call.shape, call.attention().precision(precision));
    let (q_sizes, kv_sizes) = (shape.output(), [1, shape.kv_heads, shape.kv_len, DIM]);
    let narrow = |x: &Vec<f64>| x.iter().map(|&x| T::from_f64(x)).collect::<Vec<T>>();
    let [q, k, v, dy] = call.tensors.each_ref().map(narrow);
    let view = |x, sizes| View::new(x, Layout::Bhsd, sizes).unwrap();
    let (q, k, v, dy) = (view(&q, q_sizes), view(&k, kv_sizes), view(&v, kv_sizes), view(&dy, q_sizes));
    let (mut out, mut lse) = (vec![T::default(); shape.rows() * DIM], vec![0.0; shape.rows()]);
    let mut workspace = Workspace::new();
    let to = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, q_sizes).unwrap()).lse(&mut lse);
    forward_at(level, &attn, q, k, v, to, &mut workspace).unwrap();
    let [mut dq, mut dk, mut dv] = [q_sizes, kv_sizes, kv_sizes].map(|s| vec![T::default(); s.iter().product()]);
    let to = Gradients::new(
        ViewMut::new(&mut dq, Layout::Bhsd, q_sizes).unwrap(),
        ViewMut::new(&mut dk, Layout::Bhsd, kv_sizes).unwrap(),
        ViewMut::new(&mut dv, Layout::Bhsd, kv_sizes).unwrap(),
    );
    let inputs = Inputs { q, k, v, out: view(&out, q_sizes), lse: &lse, dy };
    backward::gradients_at(level, &attn, inputs, to, &mut workspace).unwrap();
    let [dq, dk, dv] = [dq, dk, dv].map(|x| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
    answer.eta([&dq, &dk, &dv])
}

#[test]
fn gradients_err_as_allowed_beside_torchs() {
    let every = std::env::var_os("ATTN_GRADIENTS").is_some();
    // Of the longest calls one head, at the best level: each takes seconds.
    let is_run = |row: &TorchGradients| match row.len {
        ..=32 => true,
        33..=1024 => !attn_testing::is_emulated(),
        _ => every || row.q_heads == row.kv_heads && !attn_testing::is_emulated(),
    };
    let mut last: Option<(Call, Answer)> = None;
    let (mut worst, mut failed) = ([[0.0f64; 2]; 2], Vec::new());
    for row in torch_gradients().filter(is_run) {
        let call = Call::new(&row);
        // f16 and bf16 have the same numbers.
        if last.as_ref().is_none_or(|(other, _)| *other != call) {
            let answer = call.answer();
            last = Some((call, answer));
        }
        let Some((call, answer)) = &last else { unreachable!("just set") };
        let best = Level::available().last().filter(|_| row.len > 1024 && !every);
        // The model multiplies bit by bit.
        let is_short = row.len <= 128 && !attn_testing::is_emulated();
        let model = Level::by_name("amx-model").ok().filter(|_| row.dtype == Dtype::Bf16 && is_short);
        let levels = Level::available().filter(|level| best.is_none_or(|best| best == *level));
        for level in levels.chain(model) {
            for precision in [Precision::Exact, Precision::Fast] {
                let errors = match row.dtype {
                    Dtype::F32 => errors::<f32>(level, precision, call, answer),
                    Dtype::F16 => errors::<f16>(level, precision, call, answer),
                    _ => errors::<bf16>(level, precision, call, answer),
                };
                for ((name, ours), torch) in ["dq", "dk", "dv"].into_iter().zip(errors).zip(row.eta) {
                    let rms = if precision == Precision::Fast { TORCH_RMS_FAST } else { TORCH_RMS };
                    let shares = [ours.largest / torch.largest / TORCH_LARGEST, ours.rms / torch.rms / rms];
                    let kind = usize::from(row.dtype != Dtype::F32);
                    worst[kind] = [worst[kind][0].max(shares[0]), worst[kind][1].max(shares[1])];
                    if !shares.iter().all(|&share| share <= 1.0) {
                        let name = (level.name(), precision, name);
                        failed.push(format!("{name:?} of {row:?}: {ours:?}, {shares:?} of what is allowed"));
                    }
                }
                // Only products of bf16 are rounded.
                if row.dtype != Dtype::Bf16 || !level.multiplies_bf16() {
                    break;
                }
            }
        }
    }
    eprintln!("f32 and halves: largest error and root mean square are {worst:?} of what is allowed");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
