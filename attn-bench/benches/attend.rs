//! Criterion benchmarks of the SIMD and parallel engines: to see what a change does to the speed of each kind of call.
//!
//! `cargo bench -p attn-bench` measures everything, `cargo bench -p attn-bench -- gqa` one group,
//! `-- --save-baseline NAME` and `-- --baseline NAME` compare two states of the sources, `-- --test` only runs each
//! once. Rates are in elements per second where an element is a FLOP. For shares of the machine's peak and other
//! libraries see `cargo xtask bench --kernels`.

use std::hint::black_box;
use std::time::Duration;

use attn_bench::case::{Case, Stored, Tensors};
use attn_bench::engine::{Engine, Runner, pool};
use attn_bench::kernels::{Inputs as KernelInputs, Kernel, What};
use attn_core::backward::Gradients;
use attn_core::half::{bf16, f16};
use attn_core::{Layout, Outputs, Precision, View, ViewMut};
use attn_simd::backward::Inputs;
use attn_simd::{KernelElement, Level};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Both engines on plain cases of f32.
fn group(c: &mut Criterion, name: &str, cases: &[Case]) {
    group_of::<f32>(c, name, cases);
}

/// Both engines on plain cases.
fn group_of<T: Stored>(c: &mut Criterion, name: &str, cases: &[Case]) {
    let pool = pool(0).expect("a thread pool");
    let mut group = c.benchmark_group(name);
    for case in cases {
        let Case { q_heads, kv_heads, q_len, kv_len, head_dim, .. } = case;
        let id = format!("h{q_heads}_{kv_heads}_q{q_len}_k{kv_len}_d{head_dim}");
        group.throughput(Throughput::Elements(case.flops() as u64));
        for engine in [Engine::Simd, Engine::Parallel] {
            let mut tensors = Tensors::<T>::new(*case, 1);
            let mut runner = Runner::new(Level::detect(), &pool);
            group.bench_function(BenchmarkId::new(engine.name(), &id), |b| {
                b.iter(|| {
                    let (q, k, v, out) = tensors.views().expect("views of whole tensors");
                    runner.run(engine, &case.attention(), black_box(q), black_box(k), black_box(v), out)
                });
            });
        }
    }
    group.finish();
}

/// `heads` heads of a square case.
fn square(heads: usize, n: usize, head_dim: usize) -> Case {
    Case { q_heads: heads, kv_heads: heads, ..Case::square(n, head_dim) }
}

fn causal(case: Case) -> Case {
    Case { causal: true, ..case }
}

fn prefill(c: &mut Criterion) {
    group(c, "prefill", &[square(4, 1024, 64), square(4, 1024, 128), square(1, 4096, 64)]);
}

fn causal_prefill(c: &mut Criterion) {
    group(c, "causal", &[square(4, 1024, 64), square(4, 1024, 128), square(1, 4096, 64)].map(causal));
}

/// The number types of half the size, beside the cases of f32 in `prefill`, `causal` and `short`.
fn halves(c: &mut Criterion) {
    let cases = [square(4, 1024, 64), square(4, 1024, 128), causal(square(4, 1024, 64)), square(12, 128, 64)];
    group_of::<f16>(c, "f16", &cases);
    group_of::<bf16>(c, "bf16", &cases);
}

fn gqa(c: &mut Criterion) {
    let grouped = |kv_heads| Case { q_heads: 8, kv_heads, ..Case::square(512, 128) };
    group(c, "gqa", &[grouped(8), grouped(2), grouped(1), causal(grouped(2))]);
}

fn short(c: &mut Criterion) {
    group(c, "short", &[1, 16, 64, 128, 256].map(|n| square(12, n, 64)));
}

fn odd(c: &mut Criterion) {
    let across = Case { q_heads: 3, kv_heads: 3, q_len: 1000, kv_len: 777, ..Case::square(0, 80) };
    let dims = [1, 40, 96, 192, 256].map(|head_dim| square(2, 513, head_dim));
    group(c, "odd", &[&dims[..], &[across]].concat());
}

/// What masks, biases and the like cost beside the plain call, on one thread.
fn masks(c: &mut Criterion) {
    let pool = pool(1).expect("a thread pool");
    let mut group = c.benchmark_group("masks");
    let all = [
        ("plain", What::Plain, false),
        ("causal", What::Plain, true),
        ("window", What::Window(128), true),
        ("keep", What::Keep, false),
        ("bias", What::Bias, false),
        ("alibi", What::Alibi, true),
        ("softcap", What::Softcap(30.0), false),
        ("dropout", What::Dropout(0.1), false),
        ("spread", What::Spread(60.0), false),
    ];
    for (name, what, causal) in all {
        let case = Case { causal, ..square(4, 1024, 64) };
        let kernel = Kernel::plain(name, case, what);
        let mut inputs: KernelInputs = kernel.inputs();
        let mut runner = Runner::new(Level::detect(), &pool);
        group.throughput(Throughput::Elements(kernel.flops() as u64));
        group.bench_function(name, |b| {
            b.iter(|| inputs.with(&kernel, |attn, (q, k, v, out)| runner.run(Engine::Simd, attn, q, k, v, out)));
        });
    }
    group.finish();
}

/// Backward calls of both engines, on plain cases.
fn gradients(c: &mut Criterion) {
    gradients_of::<f32>(c, "gradients", Precision::Exact);
    gradients_of::<bf16>(c, "gradients_bf16", Precision::Exact);
    gradients_of::<bf16>(c, "gradients_bf16_fast", Precision::Fast);
}

fn gradients_of<T: Stored + KernelElement>(c: &mut Criterion, name: &str, precision: Precision) {
    let pool = pool(0).expect("a thread pool");
    let mut group = c.benchmark_group(name);
    let grouped = Case { q_heads: 8, kv_heads: 2, ..Case::square(512, 128) };
    for (name, case) in [("plain", square(4, 512, 64)), ("causal", causal(square(4, 512, 64))), ("gqa", grouped)] {
        // As `cargo xtask bench --backward` counts: five products, two of them of the forward call.
        group.throughput(Throughput::Elements((2.5 * case.flops()) as u64));
        for engine in [Engine::Simd, Engine::Parallel] {
            let mut runner = Runner::new(Level::detect(), &pool);
            group.bench_function(BenchmarkId::new(engine.name(), name), |b| {
                let mut tensors = Tensors::<T>::new(case, 1);
                let sizes = [case.q_sizes(), case.kv_sizes(), case.kv_sizes()];
                let attn = case.attention().precision(precision);
                let mut lse = vec![0.0; case.batch * case.q_heads * case.q_len];
                let (q, k, v, out) = tensors.views().expect("views of whole tensors");
                runner.run(engine, &attn, q, k, v, Outputs::new(out).lse(&mut lse)).expect("a plain call");
                let [q, k, v, out] = [&tensors.q, &tensors.k, &tensors.v, &tensors.out];
                let view = |x, sizes| View::new(x, Layout::Bhsd, sizes).expect("a view of a whole tensor");
                let (q, k, v) = (view(q, sizes[0]), view(k, sizes[1]), view(v, sizes[2]));
                let out = view(out, sizes[0]);
                let mut to = sizes.map(|sizes| vec![T::ZERO; sizes.iter().product()]);
                b.iter(|| {
                    let [dq, dk, dv] = to.each_mut().map(Vec::as_mut_slice);
                    let whole = |x, sizes| ViewMut::new(x, Layout::Bhsd, sizes);
                    let to = Gradients::new(whole(dq, sizes[0])?, whole(dk, sizes[1])?, whole(dv, sizes[2])?);
                    runner.backward(engine, &attn, black_box(Inputs { q, k, v, out, lse: &lse, dy: out }), to)
                });
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = attend;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = prefill, causal_prefill, halves, gqa, masks, short, odd, gradients
}
criterion_main!(attend);
