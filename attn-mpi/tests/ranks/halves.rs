//! Tensors of f16 and bf16 over ranks against one process: prefill in both ways, decode, gradients.

use attn_core::backward::Gradients;
use attn_core::half::{bf16, f16};
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Outputs, View, ViewMut};
use attn_mpi::{Cluster, Method, ShardedCache, Sharding};
use attn_parallel::Runner;
use attn_simd::backward::Inputs as Given;
use attn_simd::{KernelElement, Level};
use bytemuck::Pod;

use crate::calls::{Inputs, numbers};
use crate::compare::score_bound;
use crate::prefill::shardings;
use crate::tolerance;

pub(crate) fn run(cluster: Cluster) {
    let cluster = of::<f16>(cluster, tolerance::GRADIENT_F16);
    of::<bf16>(cluster, tolerance::GRADIENT_BF16);
}

/// Whole tensors of a type, and their shape.
struct Halves<T> {
    shape: AttnShape,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
}

/// What the gradients of one process are computed from.
struct Forward<T> {
    out: Vec<T>,
    lse: Vec<f32>,
    dy: Vec<T>,
}

fn view<T: Copy>(x: &[T], sizes: [usize; 4]) -> View<'_, T> {
    View::new(x, Layout::Bhsd, sizes).expect("made for it")
}

fn to<T: Copy>(x: &mut [T], sizes: [usize; 4]) -> ViewMut<'_, T> {
    ViewMut::new(x, Layout::Bhsd, sizes).expect("made for it")
}

/// This rank's positions of `[pairs, len, dim]`.
fn cut<T: Copy>(x: &[T], sharding: &Sharding, rank: usize, dim: usize) -> Vec<T> {
    let rows = |pair: &[T]| -> Vec<T> {
        sharding.of(rank).iter().flat_map(|range| pair[range.start * dim..range.end * dim].to_vec()).collect()
    };
    x.chunks_exact(sharding.len() * dim).flat_map(rows).collect()
}

fn of<T: KernelElement + Pod>(mut cluster: Cluster, gradient: f64) -> Cluster {
    let shape = AttnShape::new([2, 8, 130, 32], [2, 4, 700, 32], [2, 4, 700, 16]).expect("good sizes");
    let of = |x: &[f32]| x.iter().map(|&x| T::from_f64(f64::from(x))).collect::<Vec<T>>();
    let exact = Inputs::new(shape);
    let inputs = Halves { shape, q: of(&exact.q), k: of(&exact.k), v: of(&exact.v) };
    // Rounding moves scores by less than the tenth that is added.
    let s = 1.1 * score_bound(&exact, attn_core::score::default_scale(shape.head_dim));
    let sizes: Vec<T> = inputs.v.iter().map(|x| T::from_f64(x.to_f64().abs())).collect();
    let attn = Attention::new().mask(Mask::window(200, 30, Align::BottomRight));
    let (ranks, me, dim) = (cluster.ranks(), cluster.rank(), shape.value_dim);
    for attn in [attn, attn.reproducible()] {
        let (want, lse) = alone(&attn, &inputs, &inputs.v);
        let size = alone(&attn, &inputs, &sizes).0;
        for ((kind, queries), (_, keys)) in shardings(130, ranks).into_iter().zip(shardings(700, ranks)) {
            for method in [Method::Ring, Method::Heads] {
                if method == Method::Heads && ranks > shape.kv_heads {
                    continue;
                }
                cluster = cluster.method(method);
                let got = prefill(&cluster, &attn, &inputs, &queries, &keys);
                let (want, lse) = (cut(&want, &queries, me, dim), cut(&lse, &queries, me, 1));
                let what = format!("{}, {kind}, {method:?}, rank {me} of {ranks}", T::DTYPE.name());
                if attn.is_reproducible() {
                    assert!(bytemuck::cast_slice::<T, u8>(&got.0) == bytemuck::cast_slice::<T, u8>(&want), "{what}");
                    assert!(got.1.iter().zip(&lse).all(|(x, y)| x.to_bits() == y.to_bits()), "lse of {what}");
                } else {
                    near(&what, &got.0, &want, &cut(&size, &queries, me, dim), s);
                }
            }
            if attn.is_reproducible() {
                decode(&cluster, &inputs, &keys, kind);
            }
        }
    }
    gradients(&cluster, &attn, &inputs, gradient);
    cluster
}

/// Output and lse of one process.
fn alone<T: KernelElement, M: Mods + Sync>(attn: &Attention<'_, M>, x: &Halves<T>, v: &[T]) -> (Vec<T>, Vec<f32>) {
    let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = x.shape;
    let (mut out, mut lse) = (vec![T::from_f64(0.0); x.shape.rows() * value_dim], vec![0.0; x.shape.rows()]);
    let k = view(&x.k, [batch, kv_heads, kv_len, head_dim]);
    let (q, v) = (view(&x.q, [batch, q_heads, q_len, head_dim]), view(v, [batch, kv_heads, kv_len, value_dim]));
    let outputs = Outputs::new(to(&mut out, x.shape.output())).lse(&mut lse);
    Runner::new().level(Level::detect()).threads(1).forward(attn, q, k, v, outputs).expect("a good call");
    (out, lse)
}

/// Output and lse over ranks: this rank's rows.
fn prefill<T: KernelElement + Pod>(
    cluster: &Cluster,
    attn: &Attention<'_>,
    x: &Halves<T>,
    queries: &Sharding,
    keys: &Sharding,
) -> (Vec<T>, Vec<f32>) {
    let AttnShape { batch, q_heads, kv_heads, head_dim, value_dim, .. } = x.shape;
    let me = cluster.rank();
    let (n, m) = (queries.local_len(me), keys.local_len(me));
    let (q, k) = (cut(&x.q, queries, me, head_dim), cut(&x.k, keys, me, head_dim));
    let v = cut(&x.v, keys, me, value_dim);
    let rows = batch * q_heads * n;
    let (mut out, mut lse) = (vec![T::from_f64(f64::NAN); rows * value_dim], vec![f32::NAN; rows]);
    let outputs = Outputs::new(to(&mut out, [batch, q_heads, n, value_dim])).lse(&mut lse);
    let (k, v) = (view(&k, [batch, kv_heads, m, head_dim]), view(&v, [batch, kv_heads, m, value_dim]));
    let q = view(&q, [batch, q_heads, n, head_dim]);
    cluster.prefill(attn, queries, keys, q, k, v, outputs).expect("a good call");
    (out, lse)
}

/// A step over a cache of these shards has the bits of one process.
fn decode<T: KernelElement + Pod>(cluster: &Cluster, x: &Halves<T>, keys: &Sharding, kind: &str) {
    let AttnShape { batch, q_heads, kv_heads, kv_len, head_dim, value_dim, .. } = x.shape;
    let (me, attn) = (cluster.rank(), Attention::new().reproducible());
    let step = Halves {
        shape: AttnShape { q_len: 1, ..x.shape },
        q: x.q.chunks_exact(x.shape.q_len * head_dim).flat_map(|pair| pair[..head_dim].to_vec()).collect(),
        k: x.k.clone(),
        v: x.v.clone(),
    };
    let (want, _) = alone(&attn, &step, &step.v);
    let (k, v, m) = (cut(&x.k, keys, me, head_dim), cut(&x.v, keys, me, value_dim), keys.local_len(me));
    let (k, v) = (view(&k, [batch, kv_heads, m, head_dim]), view(&v, [batch, kv_heads, m, value_dim]));
    let cache = ShardedCache::of_shards(cluster, keys, k, v, 512).expect("good shards");
    assert_eq!(cache.len(), kv_len);
    let mut got = vec![T::from_f64(f64::NAN); want.len()];
    let q = view(&step.q, [batch, q_heads, 1, head_dim]);
    cluster.decode(&attn, q, &cache, to(&mut got, step.shape.output())).expect("a good step");
    assert!(bytemuck::cast_slice::<T, u8>(&got) == bytemuck::cast_slice::<T, u8>(&want), "decode, {kind}, rank {me}");
}

/// Each is off by its engine's error and one rounding; weights of half tensors may have 16 bits.
fn near<T: KernelElement>(what: &str, got: &[T], want: &[T], size: &[T], s: f64) {
    let eta = tolerance::TWICE.bound(attn_core::Dtype::F32, s) + tolerance::WEIGHTS_OF_TWO_PARTS;
    assert_eq!(got.len(), want.len(), "{what}");
    for (n, ((x, y), size)) in got.iter().zip(want).zip(size).enumerate() {
        let (x, y) = (x.to_f64(), y.to_f64());
        // The sizes are rounded too.
        let bound = 1.01 * eta * size.to_f64() + 2.0 * tolerance::rounding::<T>(x.abs().max(y.abs()));
        assert!((x - y).abs() <= bound, "{what}: {x} for {y} at {n}, {bound:e} is allowed");
    }
}

/// A backward call of one process, or of a rank.
type Backward<'c, T> = &'c mut dyn FnMut(Given<'_, T, T>, Gradients<'_, T>);

/// Gradients in the type of the inputs.
fn gradients<T: KernelElement + Pod>(cluster: &Cluster, attn: &Attention<'_>, x: &Halves<T>, tolerance: f64) {
    let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = x.shape;
    let (out, lse) = alone(attn, x, &x.v);
    let dy = numbers(11, out.len()).into_iter().map(|x| T::from_f64(f64::from(x))).collect();
    let forward = Forward { out, lse, dy };
    let (ranks, me) = (cluster.ranks(), cluster.rank());
    let run = |q: &Sharding, k: &Sharding, rank: usize, call: Backward<'_, T>| {
        let (n, m) = (q.local_len(rank), k.local_len(rank));
        let sizes = [[batch, q_heads, n, head_dim], [batch, kv_heads, m, head_dim], [batch, kv_heads, m, value_dim]];
        let output = [batch, q_heads, n, value_dim];
        let given = [cut(&x.q, q, rank, head_dim), cut(&x.k, k, rank, head_dim), cut(&x.v, k, rank, value_dim)];
        let [out, dy] = [&forward.out, &forward.dy].map(|x| cut(x, q, rank, value_dim));
        let lse = cut(&forward.lse, q, rank, 1);
        let mut found = sizes.map(|sizes| vec![T::from_f64(f64::NAN); sizes.iter().product()]);
        let [dq, dk, dv] = &mut found;
        let gradients = Gradients::new(to(dq, sizes[0]), to(dk, sizes[1]), to(dv, sizes[2]));
        let [q, k, v] = [0, 1, 2].map(|n: usize| view(&given[n], sizes[n]));
        call(Given { q, k, v, out: view(&out, output), lse: &lse, dy: view(&dy, output) }, gradients);
        found
    };
    let whole = [q_len, kv_len].map(|len| Sharding::even(len, 1));
    let want = run(&whole[0], &whole[1], 0, &mut |given, to| {
        Runner::new().level(Level::detect()).threads(1).backward(attn, given, to).expect("a good call");
    });
    for ((kind, queries), (_, keys)) in shardings(q_len, ranks).into_iter().zip(shardings(kv_len, ranks)) {
        let got = run(&queries, &keys, me, &mut |given, to| {
            cluster.backward(attn, &queries, &keys, given, to).expect("a good call");
        });
        let places = [(&queries, head_dim), (&keys, head_dim), (&keys, value_dim)];
        for (n, (sharding, dim)) in places.into_iter().enumerate() {
            let largest = want[n].iter().fold(1.0, |most, x| f64::max(most, x.to_f64().abs()));
            for (x, y) in got[n].iter().zip(&cut(&want[n], sharding, me, dim)) {
                let (x, y) = (x.to_f64(), y.to_f64());
                let what = format!("gradient {n}, {kind}, rank {me} of {ranks}");
                assert!((x - y).abs() <= 2.0 * tolerance * largest, "{what}: {x} for {y}");
            }
        }
    }
}
