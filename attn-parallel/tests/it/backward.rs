//! Gradients on threads: the bits of one thread, whatever their number, and those of one call on one thread.

use std::panic::{AssertUnwindSafe, catch_unwind};

use attn_parallel::attn_core::Element;
use attn_parallel::attn_core::backward::Gradients;
use attn_parallel::attn_core::half::bf16;
use attn_parallel::attn_core::score_mod::Mods;
use attn_parallel::attn_simd::KernelElement;
use attn_parallel::attn_simd::backward::{self, Inputs};
use attn_parallel::{
    Align, Attention, AttnError, Layout, Level, Mask, Outputs, Precision, Runner, View, ViewMut, Workspace, forward,
};

const Q: [usize; 4] = [2, 4, 300, 40];
const K: [usize; 4] = [2, 2, 310, 40];

fn wave<T: Element>(sizes: [usize; 4], f: f64) -> Vec<T> {
    (0..sizes.iter().product::<usize>()).map(|n| T::from_f64((n as f64 * f).sin())).collect()
}

/// dq, dk, dv of a call, and the gradients of a bias that all heads share and of the sinks.
type All = ([Vec<f32>; 3], Vec<f64>);

/// Those of a call of f32.
fn gradients<M: Mods + Sync>(
    attn: &Attention<'_, M>,
    run: impl FnOnce(Inputs<'_, f32, f32>, Gradients<'_, f32>) -> Result<(), AttnError>,
) -> All {
    gradients_of(attn, run)
}

fn gradients_of<T: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    run: impl FnOnce(Inputs<'_, T, T>, Gradients<'_, f32>) -> Result<(), AttnError>,
) -> All {
    gradients_of_sizes(attn, [Q, K], run)
}

/// Those of tensors of other sizes.
fn gradients_of_sizes<T: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    [of_q, of_k]: [[usize; 4]; 2],
    run: impl FnOnce(Inputs<'_, T, T>, Gradients<'_, f32>) -> Result<(), AttnError>,
) -> All {
    let (q, k, v, dy) = (wave::<T>(of_q, 0.7), wave::<T>(of_k, 1.3), wave::<T>(of_k, 0.4), wave::<T>(of_q, 0.9));
    let view = |x, sizes| View::new(x, Layout::Bhsd, sizes).unwrap();
    let (q, k, v, dy) = (view(&q, of_q), view(&k, of_k), view(&v, of_k), view(&dy, of_q));
    let [batch, heads, q_len, _] = of_q;
    let (mut out, mut lse) = (wave::<T>(of_q, 0.0), vec![0.0; batch * heads * q_len]);
    forward(attn, q, k, v, Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, of_q).unwrap()).lse(&mut lse)).unwrap();
    let [mut dq, mut dk, mut dv] = [of_q, of_k, of_k].map(|sizes| vec![f32::NAN; sizes.iter().product()]);
    let mut options = vec![f64::NAN; q_len * of_k[2] + heads];
    let (dbias, dsinks) = options.split_at_mut(q_len * of_k[2]);
    let to = Gradients::new(
        ViewMut::new(&mut dq, Layout::Bhsd, of_q).unwrap(),
        ViewMut::new(&mut dk, Layout::Bhsd, of_k).unwrap(),
        ViewMut::new(&mut dv, Layout::Bhsd, of_k).unwrap(),
    )
    .bias(ViewMut::matrix(dbias, q_len, of_k[2]).unwrap())
    .sinks(dsinks);
    run(Inputs { q, k, v, out: View::new(&out, Layout::Bhsd, of_q).unwrap(), lse: &lse, dy }, to).unwrap();
    ([dq, dk, dv], options)
}

/// Many heads are computed and written one by one, unless a `score_mod` may turn out to have no derivative: the bits
/// are those of a `score_mod` that changes nothing. (`score_mod` sees scaled scores; a scale of 1/4 rounds none of
/// them.)
#[test]
fn many_heads_have_the_bits_of_heads_that_wait() {
    let sizes = [[3, 12, 70, 16], [3, 6, 77, 16]];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(16).build().unwrap();
    for level in Level::available() {
        let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
        let waiting = attn.score_mod_with(|score, _| score, |_, _| 1.0);
        let one = gradients_of_sizes::<f32, _>(&waiting, sizes, |inputs, to| {
            backward::gradients_at(level, &waiting, inputs, to, &mut Workspace::new())
        });
        assert!(one.0.iter().flatten().all(|x| x.is_finite()));
        for threads in [1, 2, 3, 7, 16] {
            let mut runner = Runner::new().level(level).threads(threads);
            let run =
                |inputs: Inputs<'_, _, _>, to: Gradients<'_, _>| pool.install(|| runner.backward(&attn, inputs, to));
            let many = gradients_of_sizes::<f32, _>(&attn, sizes, run);
            assert!(many == one, "{} on {threads} threads", level.name());
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let attn = Attention::new().mask(Mask::causal(Align::BottomRight)).sinks(&[0.5, -1.0, 2.0, 0.0]);
    on_any_threads::<f32>(&attn, Level::available());
    let multiply_bf16 = || Level::available().filter(|level| level.multiplies_bf16());
    on_any_threads::<bf16>(&attn, multiply_bf16().chain(Level::by_name("amx-model")));
    on_any_threads::<bf16>(&attn.precision(Precision::Fast), multiply_bf16().chain(Level::by_name("amx-model")));
}

fn on_any_threads<T: KernelElement>(attn: &Attention<'_>, levels: impl Iterator<Item = Level>) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(16).build().unwrap();
    for level in levels {
        let one = gradients_of::<T, _>(attn, |inputs, to| {
            backward::gradients_at(level, attn, inputs, to, &mut Workspace::new())
        });
        assert!(one.0.iter().flatten().all(|x| x.is_finite()) && one.1.iter().all(|x| x.is_finite()));
        for threads in 1..=16 {
            let mut runner = Runner::new().level(level).threads(threads);
            let many = gradients_of::<T, _>(attn, |inputs, to| pool.install(|| runner.backward(attn, inputs, to)));
            assert!(many == one, "{} on {threads} threads", level.name());
        }
        let mut kept = [const { Workspace::new() }; 2];
        let mut runner = Runner::new().level(level).workspaces(&mut kept);
        let given = gradients_of::<T, _>(attn, |inputs, to| pool.install(|| runner.backward(attn, inputs, to)));
        assert!(given == one, "{} in two workspaces", level.name());
    }
}

/// Threads add sums for each other: a part that fails, or panics, must not leave them waiting.
#[test]
fn a_part_that_ends_early_ends_the_call() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    for place in [(0, 0), (1, 150), (3, 299)] {
        let attn = Attention::new().score_mod_with(
            |s, _| s,
            move |_, at| {
                assert!((at.head, at.query) != place, "as it is meant to");
                1.0
            },
        );
        let ended = catch_unwind(AssertUnwindSafe(|| {
            gradients(&attn, |inputs, to| pool.install(|| Runner::new().threads(4).backward(&attn, inputs, to)))
        }));
        assert!(ended.is_err(), "{place:?}");
    }
    let attn = Attention::new().score_mod(|s, _| s);
    let (dq, _) = gradients(&attn, |inputs, to| {
        let ended = pool.install(|| Runner::new().threads(4).backward(&attn, inputs, to));
        assert!(matches!(ended, Err(AttnError::Unsupported { .. })), "{ended:?}");
        Ok(())
    });
    assert!(dq.iter().flatten().all(|x| x.is_nan()), "nothing has been written");
    // And the pool still works.
    let attn = Attention::new();
    gradients(&attn, |inputs, to| pool.install(|| Runner::new().threads(4).backward(&attn, inputs, to)));
}

/// Such a closure may take up the outer call's parts while it waits for its own call.
#[test]
fn a_derivative_may_attend_itself() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    let x = wave::<f32>([1, 8, 200, 64], 0.3);
    let x = View::new(&x, Layout::Bhsd, [1, 8, 200, 64]).unwrap();
    let plain = Attention::new().score_mod_with(|s, _| s, |_, _| 1.0);
    let nested = Attention::new().score_mod_with(
        |s, _| s,
        |_, at| {
            if at.key == 0 && at.query % 10 == 0 {
                let mut out = vec![0.0f32; 8 * 200 * 64];
                forward(&Attention::new(), x, x, x, ViewMut::new(&mut out, Layout::Bhsd, x.sizes()).unwrap()).unwrap();
            }
            1.0
        },
    );
    let one = gradients(&plain, |inputs, to| pool.install(|| Runner::new().backward(&plain, inputs, to)));
    let many = gradients(&nested, |inputs, to| pool.install(|| Runner::new().backward(&nested, inputs, to)));
    assert!(many == one);
}

#[test]
fn no_keys_and_no_channels() {
    for (q_sizes, kv_sizes) in
        [([2, 2, 5, 8], [2, 1, 0, 8]), ([1, 2, 5, 0], [1, 2, 3, 0]), ([1, 1, 0, 8], [1, 1, 3, 8])]
    {
        let len = |sizes: [usize; 4]| sizes.iter().product::<usize>();
        let (q, k, lse) = (
            wave::<f32>(q_sizes, 0.7),
            wave::<f32>(kv_sizes, 1.3),
            vec![f32::NEG_INFINITY; len(q_sizes) / q_sizes[3].max(1)],
        );
        let lse = if q_sizes[3] == 0 { vec![0.0; 10] } else { lse };
        let [mut dq, mut dk, mut dv] = [q_sizes, kv_sizes, kv_sizes].map(|sizes| vec![f32::NAN; len(sizes)]);
        let view = |x, sizes| View::new(x, Layout::Bhsd, sizes).unwrap();
        let to = Gradients::new(
            ViewMut::new(&mut dq, Layout::Bhsd, q_sizes).unwrap(),
            ViewMut::new(&mut dk, Layout::Bhsd, kv_sizes).unwrap(),
            ViewMut::new(&mut dv, Layout::Bhsd, kv_sizes).unwrap(),
        );
        let (q, k) = (view(&q, q_sizes), view(&k, kv_sizes));
        let inputs = Inputs { q, k, v: k, out: q, lse: &lse, dy: q };
        Runner::new().threads(4).backward(&Attention::new(), inputs, to).unwrap();
        assert!([dq, dk, dv].iter().flatten().all(|&x| x == 0.0), "{q_sizes:?} {kv_sizes:?}");
    }
}
