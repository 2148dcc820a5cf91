//! Modules: fused against list, layouts, masks in torch's terms, appended positions, weights, refusals.

use attn_core::dropout::Dropout;
use attn_core::element::Real;
use attn_core::half::bf16;
use attn_core::position::alibi::Alibi;
use attn_core::score_mod::Mods;
use attn_core::{
    Align, Attention, AttnError, AttnShape, Element, Layout, Mask, Outputs, Result, View, ViewMut, reference,
};
use attn_layers::Linear;
use attn_layers::module::{
    CausalAttention, ConcatHeads, Engine, LayerOutputs, MultiHeadAttention, Reference, SelfAttention, Sources,
    Streaming,
};

use attn_testing::numbers::{EXACT, Numbers, assert_close};

/// Scratch that fails loudly where a module reads what it has not written.
pub(crate) fn scratch<R: Real>(len: usize) -> Vec<R> {
    vec![R::of(f64::NAN); len]
}

/// `[batch, 1, seq, d]`, batch first.
pub(crate) fn tokens(data: &[f64], batch: usize, seq: usize) -> View<'_, f64> {
    View::new(data, Layout::Bhsd, [batch, 1, seq, data.len() / (batch * seq)]).unwrap()
}

/// Columns `from..from + len` of a row-major matrix.
fn columns(w: &[f64], d_out: usize, from: usize, len: usize) -> Vec<f64> {
    w.chunks(d_out).flat_map(|row| row[from..from + len].to_vec()).collect()
}

/// Weights of a multi-head module in the `x·W` convention, with biases.
pub(crate) struct Weights {
    pub(crate) d_in: [usize; 3],
    pub(crate) heads: [usize; 2],
    pub(crate) dims: [usize; 2],
    pub(crate) d_out: usize,
    pub(crate) w: [Vec<f64>; 4],
    pub(crate) b: [Vec<f64>; 4],
}

impl Weights {
    pub(crate) fn new(d_in: [usize; 3], heads: [usize; 2], dims: [usize; 2], d_out: usize) -> Self {
        let mut numbers = Numbers::new(21);
        let out = [heads[0] * dims[0], heads[1] * dims[0], heads[1] * dims[1], d_out];
        let ins = [d_in[0], d_in[1], d_in[2], heads[0] * dims[1]];
        let w = std::array::from_fn(|n| numbers.take(ins[n] * out[n]));
        let b = std::array::from_fn(|n| numbers.take(out[n]));
        Self { d_in, heads, dims, d_out, w, b }
    }

    pub(crate) fn layer(&self, n: usize) -> Linear<'_, f64> {
        let d_out = self.b[n].len();
        Linear::new(&self.w[n], self.w[n].len() / d_out, d_out).unwrap().bias(&self.b[n]).unwrap()
    }

    /// Without output projection.
    pub(crate) fn heads_only(&self) -> MultiHeadAttention<'_, f64> {
        let [q_heads, kv_heads] = self.heads;
        MultiHeadAttention::new(q_heads, kv_heads, self.layer(0), self.layer(1), self.layer(2)).unwrap()
    }

    pub(crate) fn module(&self) -> MultiHeadAttention<'_, f64> {
        self.heads_only().output(self.layer(3)).unwrap()
    }
}

pub(crate) fn run<E: Engine<f64>, M: Mods + Sync>(
    mha: &MultiHeadAttention<'_, f64>,
    engine: &mut E,
    attn: &Attention<'_, M>,
    inputs: Sources<'_, f64>,
) -> Vec<f64> {
    let ([batch, _, q_len, _], [_, _, kv_len, _]) = (inputs.query.sizes(), inputs.key.sizes());
    let mut y = vec![f64::NAN; batch * q_len * mha.d_out()];
    let mut room = scratch(mha.scratch_len(engine, batch, q_len, kv_len).unwrap());
    let out = ViewMut::new(&mut y, Layout::Bhsd, [batch, 1, q_len, mha.d_out()]).unwrap();
    mha.forward(engine, attn, inputs, out, &mut room).unwrap();
    y
}

/// The weights of each head.
fn weights_of<M: Mods + Sync>(
    mha: &MultiHeadAttention<'_, f64>,
    attn: &Attention<'_, M>,
    inputs: Sources<'_, f64>,
    average: bool,
) -> Vec<f64> {
    let ([batch, _, q_len, _], [_, _, kv_len, _]) = (inputs.query.sizes(), inputs.key.sizes());
    let mut y = vec![0.0; batch * q_len * mha.d_out()];
    let heads = if average { 1 } else { mha.q_heads() };
    let mut weights = vec![f64::NAN; batch * heads * q_len * (kv_len + mha.appended())];
    let mut room = scratch(mha.scratch_len(&Streaming, batch, q_len, kv_len).unwrap());
    let out = LayerOutputs::new(ViewMut::new(&mut y, Layout::Bhsd, [batch, 1, q_len, mha.d_out()]).unwrap());
    let out = if average { out.average_weights(&mut weights) } else { out.weights(&mut weights) };
    mha.forward(&mut Streaming, attn, inputs, out, &mut room).unwrap();
    weights
}

#[test]
fn fused_heads_equal_the_list_of_heads() {
    let (batch, seq, d, heads, d_k, d_v) = (2, 5, 6, 3, 4, 2);
    let weights = Weights::new([d; 3], [heads; 2], [d_k, d_v], 1);
    let x = Numbers::new(1).take(batch * seq * d);
    let x = tokens(&x, batch, seq);
    let layers: Vec<Linear<'_, f64>> = (0..3).map(|n| weights.layer(n)).collect();
    let head = |h: usize| {
        let part = |n: usize, dim: usize| layers[n].outputs(h * dim..(h + 1) * dim).unwrap();
        SelfAttention::new(part(0, d_k), part(1, d_k), part(2, d_v)).unwrap()
    };
    let list: Vec<SelfAttention<'_, f64>> = (0..heads).map(head).collect();
    let list = ConcatHeads::new(&list).unwrap();
    let per_head: Vec<bool> = (0..heads * seq * seq).map(|n| n % 4 != 1).collect();
    let options = [
        Attention::new(),
        Attention::new().mask(Mask::causal(Align::TopLeft)).softcap(2.0),
        Attention::new().mask(Mask::keep(View::broadcast(&per_head, &[heads, seq, seq]).unwrap())),
        Attention::new().alibi(Alibi { slopes: &[0.5, 0.25, 0.125], align: Align::TopLeft }).sinks(&[0.0, 1.0, -1.0]),
        Attention::new().dropout(Dropout::Seeded { p: 0.5, seed: 9 }),
    ];
    for (n, attn) in options.iter().enumerate() {
        let fused = run(&weights.heads_only(), &mut Reference, attn, Sources::same(x));
        let streamed = run(&weights.heads_only(), &mut Streaming, attn, Sources::same(x));
        let mut y = vec![f64::NAN; batch * seq * heads * d_v];
        let mut room = scratch(list.scratch_len(&Reference, batch, seq).unwrap());
        let out = ViewMut::new(&mut y, Layout::Bhsd, [batch, 1, seq, heads * d_v]).unwrap();
        list.forward(&mut Reference, attn, x, out, &mut room).unwrap();
        assert_eq!(y, fused, "options {n}"); // the same sums in the same order
        assert_close("streaming", &streamed, &fused, EXACT);
    }
    // And each head is what it is alone.
    let fused = run(&weights.heads_only(), &mut Reference, &Attention::new(), Sources::same(x));
    for h in 0..heads {
        let mut y = vec![f64::NAN; batch * seq * d_v];
        let mut room = scratch(head(h).scratch_len(&Reference, batch, seq).unwrap());
        let out = ViewMut::new(&mut y, Layout::Bhsd, [batch, 1, seq, d_v]).unwrap();
        head(h).forward(&mut Reference, &Attention::new(), x, out, &mut room).unwrap();
        assert_eq!(y, columns(&fused, heads * d_v, h * d_v, d_v), "head {h}");
    }
}

#[test]
fn a_module_is_its_steps() {
    // Projections, the reference engine and the join called one by one; keys and values of other widths, grouped heads.
    let weights = Weights::new([5, 4, 3], [4, 2], [2, 3], 6);
    let mut numbers = Numbers::new(2);
    let (query, key, value) = (numbers.take(2 * 3 * 5), numbers.take(2 * 4 * 4), numbers.take(2 * 4 * 3));
    let inputs = Sources::new(tokens(&query, 2, 3), tokens(&key, 2, 4), tokens(&value, 2, 4));
    let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
    let (mut q, mut k, mut v) = (vec![0.0; 2 * 3 * 8], vec![0.0; 2 * 4 * 4], vec![0.0; 2 * 4 * 6]);
    let sizes = [[2, 4, 3, 2], [2, 2, 4, 2], [2, 2, 4, 3]];
    for (n, (x, to)) in [(inputs.query, &mut q), (inputs.key, &mut k), (inputs.value, &mut v)].into_iter().enumerate() {
        weights.layer(n).forward(x, &mut ViewMut::new(to, Layout::Bshd, sizes[n]).unwrap()).unwrap();
    }
    let mut context = vec![0.0; 2 * 3 * 12];
    reference::forward(
        &attn,
        View::new(&q, Layout::Bshd, sizes[0]).unwrap(),
        View::new(&k, Layout::Bshd, sizes[1]).unwrap(),
        View::new(&v, Layout::Bshd, sizes[2]).unwrap(),
        ViewMut::new(&mut context, Layout::Bshd, [2, 4, 3, 3]).unwrap(),
        &mut [0.0; 4],
    )
    .unwrap();
    let mut want = vec![0.0; 2 * 3 * 6];
    let out = &mut ViewMut::new(&mut want, Layout::Bhsd, [2, 1, 3, 6]).unwrap();
    weights.layer(3).forward(tokens(&context, 2, 3), out).unwrap();
    assert_close("y", &run(&weights.module(), &mut Reference, &attn, inputs), &want, EXACT);
    assert_close("heads", &run(&weights.heads_only(), &mut Reference, &attn, inputs), &context, EXACT);

    // The context can be had beside the result.
    let mha = weights.module();
    let (mut y, mut beside) = (vec![0.0; want.len()], vec![0.0; context.len()]);
    let outputs = LayerOutputs::new(ViewMut::new(&mut y, Layout::Bhsd, [2, 1, 3, 6]).unwrap())
        .context(ViewMut::new(&mut beside, Layout::Bshd, [2, 4, 3, 3]).unwrap());
    let mut room = scratch(mha.scratch_len(&Reference, 2, 3, 4).unwrap());
    mha.forward(&mut Reference, &attn, inputs, outputs, &mut room).unwrap();
    assert_close("context", &beside, &context, EXACT);
    assert_close("y", &y, &want, EXACT);
}

#[test]
fn layouts_are_views() {
    let (batch, seq, d) = (2, 3, 4);
    let weights = Weights::new([d; 3], [2; 2], [2, 2], d);
    let mha = weights.module();
    let x = Numbers::new(3).take(batch * seq * d);
    let want = run(&mha, &mut Reference, &Attention::new(), Sources::same(tokens(&x, batch, seq)));
    let swap = |x: &[f64], outer: usize, inner: usize| -> Vec<f64> {
        (0..inner).flat_map(|i| (0..outer).flat_map(move |o| x[(o * inner + i) * d..][..d].to_vec())).collect()
    };
    let first = swap(&x, batch, seq);
    let mut y = vec![0.0; x.len()];
    let mut room = scratch(mha.scratch_len(&Reference, batch, seq, seq).unwrap());
    let sizes = [batch, 1, seq, d];
    let view = View::new(&first, Layout::Sbhd, sizes).unwrap();
    let out = ViewMut::new(&mut y, Layout::Sbhd, sizes).unwrap();
    mha.forward(&mut Reference, &Attention::new(), view, out, &mut room).unwrap();
    assert_eq!(swap(&y, seq, batch), want);
    let mut y = vec![0.0; seq * d];
    let (view, out) = (View::matrix(&x[seq * d..], seq, d).unwrap(), ViewMut::matrix(&mut y, seq, d).unwrap());
    mha.forward(&mut Reference, &Attention::new(), view, out, &mut room).unwrap();
    assert_eq!(y, want[seq * d..]); // a batch of one, and no trace of the batch
}

#[test]
fn torch_masks_are_views_too() {
    let (batch, heads, len) = (2, 2, 4);
    let weights = Weights::new([4; 3], [heads; 2], [2, 2], 4);
    let mha = weights.module();
    let x = Numbers::new(4).take(batch * len * 4);
    let inputs = Sources::same(tokens(&x, batch, len));
    let padding = [false, false, false, true, false, false, true, true]; // [batch, len], true = blocked
    let blocked: Vec<bool> = (0..batch * heads * len * len).map(|n| n % len > n / len % len || n % 7 == 6).collect();
    let both = Mask::drop(View::new(&padding, Layout::Bhsd, [batch, 1, 1, len]).unwrap())
        .and(Mask::drop(View::new(&blocked, Layout::Bhsd, [batch, heads, len, len]).unwrap()));
    let keep: Vec<bool> =
        (0..blocked.len()).map(|n| !blocked[n] && !padding[n / (heads * len * len) * len + n % len]).collect();
    let one = Mask::keep(View::new(&keep, Layout::Bhsd, [batch, heads, len, len]).unwrap());
    let additive: Vec<f64> = keep.iter().map(|&keep| if keep { 0.0 } else { f64::NEG_INFINITY }).collect();
    let bias = View::new(&additive, Layout::Bhsd, [batch, heads, len, len]).unwrap();
    let want = run(&mha, &mut Reference, &Attention::new().mask(one), inputs);
    assert_eq!(run(&mha, &mut Reference, &Attention::new().mask(both), inputs), want);
    assert_eq!(run(&mha, &mut Reference, &Attention::new().bias(bias), inputs), want);
    let per_head = weights_of(&mha, &Attention::new().mask(both), inputs, false);
    for (n, (&w, keep)) in per_head.iter().zip(keep).enumerate() {
        assert_eq!(w > 0.0, keep, "weight {n}");
    }
    let average = weights_of(&mha, &Attention::new().mask(both), inputs, true);
    let rows = len * len;
    let mean: Vec<f64> = (0..batch * rows)
        .map(|n| (n / rows, n % rows))
        .map(|(b, n)| (0..heads).map(|h| per_head[(b * heads + h) * rows + n]).sum::<f64>() / heads as f64)
        .collect();
    assert_close("average", &average, &mean, EXACT);
}

#[test]
fn packed_weights_are_torchs_rows() {
    let (embed, heads) = (4, 2);
    let mut numbers = Numbers::new(5);
    let (w, b, x) = (numbers.take(3 * embed * embed), numbers.take(3 * embed), numbers.take(3 * embed));
    let packed = MultiHeadAttention::packed(embed, heads, &w, Some(&b)).unwrap();
    let layer = |n: usize| {
        let layer = Linear::transposed(&w[n * 16..(n + 1) * 16], embed, embed).unwrap();
        layer.bias(&b[n * embed..(n + 1) * embed]).unwrap()
    };
    let separate = MultiHeadAttention::new(heads, heads, layer(0), layer(1), layer(2)).unwrap();
    let inputs = Sources::same(tokens(&x, 1, 3));
    let want = run(&separate, &mut Reference, &Attention::new(), inputs);
    assert_eq!(run(&packed, &mut Reference, &Attention::new(), inputs), want);
    let unbiased = MultiHeadAttention::packed(embed, heads, &w, None).unwrap();
    assert_ne!(run(&unbiased, &mut Reference, &Attention::new(), inputs), want);
}

/// Keys and values with the appended ones behind them, as torch concatenates them.
#[test]
fn appended_positions_are_further_keys_that_no_mask_reaches() {
    let (batch, len, heads, dims) = (2, 3, [4, 2], [2, 3]);
    let weights = Weights::new([4; 3], heads, dims, 5);
    let mut numbers = Numbers::new(6);
    let (x, bias_k, bias_v) = (numbers.take(batch * len * 4), numbers.take(4), numbers.take(6));
    let inputs = Sources::same(tokens(&x, batch, len));
    // One query of the second sequence sees no given key at all.
    let keep: Vec<bool> = (0..batch * len * len).map(|n| n / len != 4 && n % 4 != 1).collect();
    let keep_all: Vec<bool> = keep.chunks(len).flat_map(|row| [row, &[true, true]].concat()).collect();
    let options = || Attention::new().scale(0.9).softcap(1.5).temperature(0.7).sinks(&[0.5, -0.5, 0.0, 1.0]);
    let masked = options().mask(Mask::keep(View::new(&keep, Layout::Bhsd, [batch, 1, len, len]).unwrap()));
    let all = options().mask(Mask::keep(View::new(&keep_all, Layout::Bhsd, [batch, 1, len, len + 2]).unwrap()));

    let project = |n: usize, head_count: usize, dim: usize, more: &[f64]| -> Vec<f64> {
        let mut heads = vec![0.0; batch * head_count * len * dim];
        let mut to = ViewMut::new(&mut heads, Layout::Bhsd, [batch, head_count, len, dim]).unwrap();
        weights.layer(n).forward(inputs.query, &mut to).unwrap();
        if more.is_empty() {
            return heads;
        }
        let with = |(n, head): (usize, &[f64])| [head, &more[n % head_count * dim..][..dim], &vec![0.0; dim]].concat();
        heads.chunks(len * dim).enumerate().flat_map(with).collect()
    };
    let (q, k, v) = (project(0, 4, 2, &[]), project(1, 2, 2, &bias_k), project(2, 2, 3, &bias_v));
    let shape = AttnShape::new([batch, 4, len, 2], [batch, 2, len + 2, 2], [batch, 2, len + 2, 3]).unwrap();
    let mut context = vec![0.0; batch * len * 12];
    let mut want_weights = vec![0.0; shape.weights_len().unwrap()];
    reference::forward(
        &all,
        View::new(&q, Layout::Bhsd, [batch, 4, len, 2]).unwrap(),
        View::new(&k, Layout::Bhsd, [batch, 2, len + 2, 2]).unwrap(),
        View::new(&v, Layout::Bhsd, [batch, 2, len + 2, 3]).unwrap(),
        Outputs::new(ViewMut::new(&mut context, Layout::Bshd, [batch, 4, len, 3]).unwrap()).weights(&mut want_weights),
        &mut [0.0; 5],
    )
    .unwrap();

    let mha = weights.heads_only().bias_kv(&bias_k, &bias_v).unwrap().zero_attn();
    assert_eq!(mha.appended(), 2);
    assert_close("reference", &run(&mha, &mut Reference, &masked, inputs), &context, EXACT);
    assert_close("streaming", &run(&mha, &mut Streaming, &masked, inputs), &context, EXACT);
    assert_close("weights", &weights_of(&mha, &masked, inputs, false), &want_weights, EXACT);
    assert!(matches!(
        mha.forward(
            &mut Reference,
            &Attention::new().dropout(Dropout::Keep { mask: View::broadcast(&[true], &[1]).unwrap(), p: 0.5 }),
            inputs,
            ViewMut::new(&mut context, Layout::Bhsd, [batch, 1, len, 12]).unwrap(),
            &mut scratch(1000),
        ),
        Err(AttnError::Unsupported { .. })
    ));
}

#[test]
fn causal_attention_is_masked_and_drops_in_training() {
    let (seq, d) = (4, 3);
    let weights = Weights::new([d; 3], [1; 2], [2, 2], 1);
    let head = SelfAttention::new(weights.layer(0), weights.layer(1), weights.layer(2)).unwrap();
    let x = Numbers::new(7).take(seq * d);
    let x = View::matrix(&x, seq, d).unwrap();
    let weights_with = |layer: &CausalAttention<'_, f64>| {
        let (mut y, mut w) = (vec![0.0; seq * 2], vec![0.0; seq * seq]);
        let out = LayerOutputs::new(ViewMut::matrix(&mut y, seq, 2).unwrap()).weights(&mut w);
        layer.forward(&mut Reference, x, out, &mut scratch(layer.scratch_len(&Reference, 1, seq).unwrap())).unwrap();
        w
    };
    let plain = CausalAttention::new(head);
    let kept = weights_with(&plain);
    for (row, w) in kept.chunks(seq).enumerate() {
        assert!(w[..=row].iter().all(|&w| w > 0.0) && w[row + 1..].iter().all(|&w| w == 0.0));
        assert!((w.iter().sum::<f64>() - 1.0).abs() < EXACT);
    }
    let dropped = weights_with(&plain.dropout(Dropout::Seeded { p: 0.5, seed: 3 }));
    assert!(dropped.iter().zip(&kept).all(|(d, k)| *d == 0.0 || (d - 2.0 * k).abs() < EXACT));
    assert!(dropped.iter().zip(&kept).any(|(d, k)| *d == 0.0 && *k > 0.0));
    assert!(dropped.iter().any(|&d| d > 0.0));
    let padded = weights_with(&plain.mask(Mask::padding(&[2])));
    assert!(padded[2 * seq..].iter().all(|&w| w == 0.0) && padded[..2 * seq] == kept[..2 * seq]);
}

#[test]
fn halves_run_on_both_engines() {
    let mut numbers = Numbers::new(8);
    let narrow = |x: Vec<f64>| -> Vec<bf16> { x.into_iter().map(<bf16 as Element>::from_f64).collect() };
    let (w, x) = (narrow(numbers.take(3 * 64)), narrow(numbers.take(5 * 8)));
    let mha = MultiHeadAttention::packed(8, 2, &w, None).unwrap();
    let mut y = [[bf16::ZERO; 40]; 2];
    let [exact, streamed] = &mut y;
    let x = View::matrix(&x, 5, 8).unwrap();
    let out = ViewMut::matrix(exact, 5, 8).unwrap();
    let mut room = scratch(mha.scratch_len(&Reference, 1, 5, 5).unwrap());
    mha.forward(&mut Reference, &Attention::new(), x, out, &mut room).unwrap();
    let out = ViewMut::matrix(streamed, 5, 8).unwrap();
    let mut room = scratch::<f32>(mha.scratch_len(&Streaming, 1, 5, 5).unwrap());
    mha.forward(&mut Streaming, &Attention::new(), x, out, &mut room).unwrap();
    for (exact, streamed) in exact.iter().zip(streamed) {
        // f32 in between, rounded once at the end: at most a neighbour.
        assert!((exact.to_f64() - streamed.to_f64()).abs() <= exact.to_f64().abs() / 128.0);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_writing() {
    let weights = Weights::new([4; 3], [2; 2], [2, 2], 4);
    let (layer, out) = (|n| weights.layer(n), weights.layer(3));
    assert!(matches!(
        MultiHeadAttention::new(3, 2, layer(0), layer(1), layer(2)),
        Err(AttnError::Heads { q_heads: 3, kv_heads: 2 })
    ));
    assert!(matches!(MultiHeadAttention::new(3, 3, layer(0), layer(1), layer(2)), Err(AttnError::Size { .. })));
    assert!(matches!(MultiHeadAttention::new(2, 1, layer(0), layer(1), layer(2)), Err(AttnError::Size { .. })));
    assert!(weights.heads_only().output(out.outputs(0..1).unwrap()).is_ok());
    assert!(weights.heads_only().output(Linear::new(&[0.0; 3], 3, 1).unwrap()).is_err());
    assert!(weights.heads_only().bias_kv(&[0.0; 4], &[0.0; 3]).is_err());
    assert!(MultiHeadAttention::packed(4, 2, &[0.0f32; 47], None).is_err());
    assert!(MultiHeadAttention::packed(usize::MAX / 2, 2, &[0.0f32; 48], None).is_err());
    assert!(matches!(
        ConcatHeads::new(&[SelfAttention::new(layer(0), layer(1), layer(2)).unwrap().output(out).unwrap()]),
        Err(AttnError::Unsupported { .. })
    ));

    let mha = weights.module();
    let x = [0.5f64; 12];
    let good = View::matrix(&x, 3, 4).unwrap();
    let (mut y, mut w) = (vec![7.0f64; 12], vec![7.0f64; 18]);
    let enough = mha.scratch_len(&Reference, 1, 3, 3).unwrap();
    let forward = |inputs: Sources<'_, f64>, y: &mut [f64], w: &mut [f64], rows: usize, len: usize| -> Result<()> {
        let outputs = LayerOutputs::new(ViewMut::matrix(y, rows, 4).unwrap()).weights(w);
        mha.forward(&mut Reference, &Attention::new(), inputs, outputs, &mut vec![0.0; len])
    };
    let narrow = View::matrix(&x, 4, 3).unwrap();
    let short = View::matrix(&x, 2, 4).unwrap();
    for inputs in [
        Sources::new(narrow, good, good),
        Sources::new(good, narrow, good),
        Sources::new(good, good, short),
        Sources::cross(good, tokens(&x[..8], 2, 1)),
    ] {
        assert!(matches!(forward(inputs, &mut y, &mut w, 3, enough), Err(AttnError::Size { .. })));
    }
    assert!(forward(Sources::same(good), &mut y, &mut w, 2, enough).is_err());
    assert!(forward(Sources::same(good), &mut y, &mut w[..17], 3, enough).is_err());
    assert_eq!(
        forward(Sources::same(good), &mut y, &mut w, 3, enough - 1),
        Err(AttnError::TooShort { what: "module scratch", needed: enough, found: enough - 1 })
    );
    assert_eq!((&y[..], &w[..]), (&[7.0; 12][..], &[7.0; 18][..]));
    forward(Sources::same(good), &mut y, &mut w, 3, enough).unwrap();
}

#[test]
fn empty_sizes_are_valid() {
    let weights = Weights::new([4; 3], [2; 2], [2, 2], 4);
    let mha = weights.module();
    let x = [0.5f64; 8];
    let none: [f64; 0] = [];
    let (full, empty) = (View::matrix(&x, 2, 4).unwrap(), View::matrix(&none, 0, 4).unwrap());
    // No key: the context is zero, what remains is the bias of the join.
    let y = run(&mha, &mut Reference, &Attention::new(), Sources::cross(full, empty));
    assert_eq!(y, [&weights.b[3][..], &weights.b[3][..]].concat());
    // No key but the appended one: its value.
    let (bias_k, bias_v) = ([1.0; 4], [1.0, 2.0, 3.0, 4.0]);
    let appended = weights.heads_only().bias_kv(&bias_k, &bias_v).unwrap();
    let y = run(&appended, &mut Streaming, &Attention::new(), Sources::cross(full, empty));
    assert_close("value", &y, &[bias_v, bias_v].concat(), EXACT);
    assert_eq!(run(&mha, &mut Streaming, &Attention::new(), Sources::cross(empty, full)), none);
    let heads: [SelfAttention<'_, f64>; 0] = [];
    assert_eq!(ConcatHeads::new(&heads).unwrap().d_out(), 0);
}
