//! Gradients over ranks against one process: every mask and option, all shardings, and what is refused.

use attn_core::backward::Gradients;
use attn_core::dropout::Dropout;
use attn_core::position::alibi::Alibi;
use attn_core::score::At;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnError, AttnShape, Layout, Mask, View, ViewMut};
use attn_mpi::{Cluster, Error, Sharding};
use attn_parallel::Runner;
use attn_simd::Level;
use attn_simd::backward::Inputs as Given;

use crate::calls::{Inputs, Tables, bools, numbers, rows_of, sizes};
use crate::compare::alone;
use crate::prefill::shardings;
use crate::tolerance;

pub(crate) fn run(cluster: Cluster) {
    // Grouped heads, values of another size than keys; cross-attention with more keys than queries.
    let self_attention = AttnShape::new([2, 4, 150, 16], [2, 2, 150, 16], [2, 2, 150, 24]).expect("good sizes");
    let cross = AttnShape::new([1, 6, 70, 20], [1, 2, 300, 20], [1, 2, 300, 8]).expect("good sizes");
    let cluster = cluster.message_bytes(1000); // several pieces of a message
    for shape in [self_attention, cross] {
        let (inputs, tables) = (Inputs::new(shape), Tables::new(shape));
        for (name, mask) in tables.masks() {
            everywhere(&cluster, name, &Attention::new().mask(mask), &inputs);
        }
        options(&cluster, &inputs);
    }
    // Blocks of queries and pieces of keys that are cut.
    if matches!(cluster.ranks(), 1 | 3) {
        let long = AttnShape::new([1, 1, 4200, 8], [1, 1, 8400, 8], [1, 1, 8400, 4]).expect("good sizes");
        let attn = Attention::new().mask(Mask::window(300, 40, Align::Offset(4000)));
        everywhere(&cluster, "long", &attn, &Inputs::new(long));
    }
    for shape in [[0, 9], [9, 0], [0, 0]].map(|[q_len, kv_len]| AttnShape { q_len, kv_len, ..cross }) {
        everywhere(&cluster, "nothing", &Attention::new().sinks(&[0.5; 6]), &Inputs::new(shape));
    }
    refused(&cluster);
}

/// Every other option.
fn options(cluster: &Cluster, inputs: &Inputs) {
    let AttnShape { q_heads, q_len, kv_len, .. } = inputs.shape;
    let base = || Attention::new().mask(Mask::causal(Align::BottomRight));
    let mut bias = numbers(7, q_heads * q_len * kv_len);
    bias.iter_mut().step_by(5).for_each(|x| *x = f32::NEG_INFINITY);
    let bias = View::new(&bias, Layout::Bhsd, [1, q_heads, q_len, kv_len]).expect("made for it");
    let slopes: Vec<f32> = (0..q_heads).map(|h| 0.5f32.powi(h as i32 + 4)).collect();
    let sinks = numbers(9, q_heads);
    let keep = bools(10, q_len * kv_len);
    let keep = View::broadcast(&keep, &[q_len, kv_len]).expect("made for it");
    everywhere(cluster, "bias", &base().bias(bias), inputs);
    everywhere(cluster, "alibi", &base().alibi(Alibi { slopes: &slopes, align: Align::BottomRight }), inputs);
    everywhere(cluster, "sinks", &base().sinks(&sinks), inputs);
    everywhere(cluster, "dropout", &base().dropout(Dropout::Keep { mask: keep, p: 0.3 }).sinks(&sinks), inputs);
    everywhere(cluster, "factors", &base().scale(0.3).softcap(20.0).temperature(0.7), inputs);
    let mods = base()
        .score_mod_with(
            |s, at: At| s * (1.0 + (at.query + at.head) as f64 * 1e-3),
            |_, at| 1.0 + (at.query + at.head) as f64 * 1e-3,
        )
        .mask_mod(|at| (at.query + at.key) % 3 != 0);
    everywhere(cluster, "mods", &mods, inputs);
}

/// Gradients of one call.
struct Found {
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    sinks: Vec<f64>,
}

/// A call in all shardings.
fn everywhere<M: Mods + Sync>(cluster: &Cluster, name: &str, attn: &Attention<'_, M>, inputs: &Inputs) {
    let (shape, ranks, me) = (inputs.shape, cluster.ranks(), cluster.rank());
    let forward = alone(attn, inputs, &inputs.v);
    let dy = numbers(11, forward.out.len());
    let [q, k, v] = inputs.views();
    let view = |x| View::new(x, Layout::Bhsd, shape.output()).expect("as large as the output");
    let given = Given { q, k, v, out: view(&forward.out), lse: &forward.lse, dy: view(&dy) };
    let want = gradients(sizes(&shape), shape.q_heads, |to| {
        Runner::new().level(Level::detect()).threads(1).backward(attn, given, to).expect("a good call");
    });
    for ((kind, queries), (_, keys)) in shardings(shape.q_len, ranks).into_iter().zip(shardings(shape.kv_len, ranks)) {
        let (of_queries, of_keys) = (queries.of(me), keys.of(me));
        let got = over_ranks(cluster, attn, &given, &queries, &keys).expect("a good call");
        let whole = |x, sizes| View::new(x, Layout::Bhsd, sizes).expect("whole");
        for (of, got, want, sizes, ranges) in [
            ("dq", &got.dq, &want.dq, q.sizes(), of_queries),
            ("dk", &got.dk, &want.dk, k.sizes(), of_keys),
            ("dv", &got.dv, &want.dv, v.sizes(), of_keys),
        ] {
            let what = format!("{name}, {kind}, {of} on rank {me} of {ranks}");
            near(&what, got, &rows_of(whole(want, sizes), ranges), want);
        }
        let sinks = |found: &Found| found.sinks.iter().map(|&x| x as f32).collect::<Vec<_>>();
        near(&format!("{name}, {kind}, sinks on rank {me}"), &sinks(&got), &sinks(&want), &sinks(&want));
    }
}

/// Whether gradients are those of one process but for rounding, each off by the table's bound from the exact ones.
fn near(what: &str, got: &[f32], want: &[f32], all: &[f32]) {
    let bound = 2.0 * tolerance::GRADIENT_F32 * all.iter().fold(1.0, |most, x| f64::max(most, f64::from(x.abs())));
    assert_eq!(got.len(), want.len(), "{what}");
    for (n, (&x, &y)) in got.iter().zip(want).enumerate() {
        assert!(f64::from((x - y).abs()) <= bound, "{what}: {x} for {y} at {n}, {bound:e} is allowed");
    }
}

/// Room for gradients of these sizes, of NaN, filled by a call.
fn gradients(sizes: [[usize; 4]; 3], heads: usize, call: impl FnOnce(Gradients<'_, f32>)) -> Found {
    let [mut dq, mut dk, mut dv] = sizes.map(|sizes| vec![f32::NAN; sizes.iter().product()]);
    let mut sinks = vec![f64::NAN; heads];
    let [q, k, v] = sizes;
    let to = |x, sizes| ViewMut::new(x, Layout::Bhsd, sizes).expect("made for it");
    call(Gradients::new(to(&mut dq, q), to(&mut dk, k), to(&mut dv, v)).sinks(&mut sinks));
    Found { dq, dk, dv, sinks }
}

/// The call over ranks: this rank's rows.
fn over_ranks<M: Mods + Sync>(
    cluster: &Cluster,
    attn: &Attention<'_, M>,
    whole: &Given<'_, f32, f32>,
    queries: &Sharding,
    keys: &Sharding,
) -> Result<Found, Error> {
    let (me, [batch, heads, all, _]) = (cluster.rank(), whole.q.sizes());
    let lse = View::new(whole.lse, Layout::Bhsd, [batch, heads, all, 1]).expect("as many as rows");
    let cut = |x: View<'_, f32>, sharding: &Sharding| {
        let [batch, heads, _, dim] = x.sizes();
        (rows_of(x, sharding.of(me)), [batch, heads, sharding.local_len(me), dim])
    };
    let (q, out, dy) = (cut(whole.q, queries), cut(whole.out, queries), cut(whole.dy, queries));
    let (k, v, lse) = (cut(whole.k, keys), cut(whole.v, keys), cut(lse, queries).0);
    let view = |(x, sizes)| View::new(x, Layout::Bhsd, sizes).expect("cut to it");
    let local = Given {
        q: view((&q.0, q.1)),
        k: view((&k.0, k.1)),
        v: view((&v.0, v.1)),
        out: view((&out.0, out.1)),
        lse: &lse,
        dy: view((&dy.0, dy.1)),
    };
    let mut result = Ok(());
    let found = gradients([q.1, k.1, v.1], heads, |to| {
        let report = cluster.backward(attn, queries, keys, local, to);
        if let Ok(report) = &report {
            as_predicted(cluster, whole, keys, report.traffic.sent);
        }
        result = report.map(|_| ());
    });
    // An error comes before any write.
    let all = [&found.dq, &found.dk, &found.dv].into_iter().flatten().all(|x| x.is_nan() == result.is_err());
    assert!(all && found.sinks.iter().all(|x| x.is_nan() == result.is_err()), "{result:?}");
    result.map(|()| found)
}

/// Where all ranks hold as many keys, each sends what the model says, and besides it the gradient of the sinks.
fn as_predicted(cluster: &Cluster, whole: &Given<'_, f32, f32>, keys: &Sharding, sent: usize) {
    let ranks = cluster.ranks();
    if (0..ranks).any(|rank| keys.local_len(rank) * ranks != keys.len()) {
        return;
    }
    let shape = AttnShape::new(whole.q.sizes(), whole.k.sizes(), whole.v.sizes()).expect("good sizes");
    let cost = cluster.explain_backward(&shape, [4, 4, 4]).ring;
    // An all-gather of one f64 for each head.
    let sinks = (ranks - 1) * shape.q_heads * 8;
    assert!(sent == cost.bytes as usize || sent == cost.bytes as usize + sinks, "{sent} bytes for {}", cost.bytes);
    assert!(cost.seconds >= 0.999 * cost.compute);
}

/// Calls that are an error on every rank, before any write; the next call is a call like any other.
fn refused(cluster: &Cluster) {
    let (me, ranks) = (cluster.rank(), cluster.ranks());
    let odd = me + 1 == ranks && ranks > 1;
    let inputs = Inputs::new(AttnShape::new([1, 2, 40, 8], [1, 1, 40, 8], [1, 1, 40, 8]).expect("good sizes"));
    let sharding = Sharding::even(40, ranks);
    let forward = alone(&Attention::new(), &inputs, &inputs.v);
    let [q, k, v] = inputs.views();
    let out = View::new(&forward.out, Layout::Bhsd, inputs.shape.output()).expect("as large as the output");
    let given = Given { q, k, v, out, lse: &forward.lse, dy: out };
    let good = Attention::new();

    let call = |attn: &Attention<'_>| over_ranks(cluster, attn, &given, &sharding, &sharding).map(|_| ());
    let unsupported = |result| assert!(matches!(result, Err(Error::Attn(AttnError::Unsupported { .. }))), "{result:?}");
    unsupported(call(&good.reproducible()));
    unsupported(call(&good.dropout(Dropout::Seeded { p: 0.5, seed: 1 })));
    let disagree = |what: &str, result: Result<(), Error>| match result {
        Err(Error::Disagree { what: found, rank, .. }) => assert_eq!((found, rank), (what, ranks - 1)),
        other => assert!(ranks == 1 && other.is_ok(), "{what}: {other:?}"),
    };
    disagree("the scale", call(&if odd { good.scale(0.3) } else { good }));
    disagree("the mask", call(&if odd { good.mask(Mask::causal(Align::TopLeft)) } else { good }));

    // A function without a derivative, and one whose derivative is missing at one position: its rank finds out while it
    // computes, and nobody waits for it.
    let unknown = good.score_mod(|s, _| 2.0 * s);
    unsupported(over_ranks(cluster, &unknown, &given, &sharding, &sharding).map(|_| ()));
    let late = good.with_mods(|()| MissingAt(39));
    match over_ranks(cluster, &late, &given, &sharding, &sharding).map(|_| ()) {
        Err(Error::Attn(AttnError::Unsupported { .. })) => assert_eq!(me + 1, ranks),
        Err(Error::Refused { rank }) => assert!(rank == ranks - 1 && me != rank),
        other => panic!("{other:?}"),
    }

    // Tensors that do not fit, on one rank.
    let n = sharding.local_len(me);
    let (x, lse) = (vec![0.5f32; 2 * n * 8], vec![0.5f32; 2 * n - usize::from(odd)]);
    let rows = View::new(&x, Layout::Bhsd, [1, 2, n, 8]).expect("made for it");
    let keys = View::new(&x[..n * 8], Layout::Bhsd, [1, 1, n, 8]).expect("made for it");
    let given = Given { q: rows, k: keys, v: keys, out: rows, lse: &lse, dy: rows };
    let mut result = None;
    let found = gradients([rows.sizes(), keys.sizes(), keys.sizes()], 2, |to| {
        result = Some(cluster.backward(&good, &sharding, &sharding, given, to));
    });
    match result.expect("it was called") {
        Err(Error::Attn(AttnError::Size { what: "lse against the rows", .. })) => assert!(odd),
        Err(Error::Refused { rank }) => assert!(!odd && rank == ranks - 1),
        other => assert!(ranks == 1 && other.is_ok(), "{other:?}"),
    }
    assert!(ranks == 1 || found.dq.iter().all(|x| x.is_nan()));
    call(&good).expect("nothing is wrong with it");
}

/// A score function whose derivative is not known for one query and one key.
#[derive(Clone, Copy, Debug)]
struct MissingAt(usize);

impl Mods for MissingAt {
    const SCORE_MOD: bool = true;
    const MASK_MOD: bool = false;
    fn score_mod(&self, score: f64, _: At) -> f64 {
        score
    }
    fn mask_mod(&self, _: At) -> bool {
        true
    }
    fn derivative(&self, _: f64, at: At) -> Option<f64> {
        ((at.query, at.key) != (self.0, self.0)).then_some(1.0)
    }
}
