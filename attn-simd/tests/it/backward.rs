//! Gradients of the kernels against `attn_core::backward`, at every level: odd sizes, masks, options, layouts, hidden
//! NaN, refusals.

use attn_core::backward::{self as oracle, Gradients};
use attn_core::dropout::Dropout;
use attn_core::half::{bf16, f16};
use attn_core::mask::{BlockSparse, Documents};
use attn_core::position::alibi::Alibi;
use attn_core::score_mod::Mods;
use attn_core::{
    Align, Attention, AttnError, AttnShape, Element, Layout, Mask, Outputs, Precision, View, ViewMut, reference,
};
use attn_simd::backward::{self, Inputs};
use attn_simd::{KernelElement, Level, Workspace};
use attn_testing::numbers::Numbers;
use attn_testing::tolerance::{GRADIENT_BF16 as BF16, GRADIENT_F16 as F16, GRADIENT_F32 as F32};

/// Tensors of a call.
struct Case<T> {
    shape: AttnShape,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    dy: Vec<T>,
    /// Along which axes of the scores the gradient of a bias is wanted; it is summed over the others.
    bias: [bool; 4],
}

/// dq, dk, dv and the gradients of the sinks and of a bias.
type Five = [Vec<f64>; 5];

impl<T: KernelElement> Case<T> {
    fn new([batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim]: [usize; 7]) -> Self {
        let shape = AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        let mut numbers = Numbers::new(q_len as u64 * 31 + kv_len as u64);
        let mut take = |len: usize| numbers.take(len).into_iter().map(T::from_f64).collect();
        Self {
            shape,
            q: take(batch * q_heads * q_len * head_dim),
            k: take(batch * kv_heads * kv_len * head_dim),
            v: take(batch * kv_heads * kv_len * value_dim),
            dy: take(batch * q_heads * q_len * value_dim),
            bias: [true; 4],
        }
    }

    /// The same call, with the gradient of a bias of other sizes.
    fn bias(mut self, bias: [bool; 4]) -> Self {
        self.bias = bias;
        self
    }

    fn sizes(&self) -> [[usize; 4]; 3] {
        let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        [[batch, q_heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim], [batch, kv_heads, kv_len, value_dim]]
    }

    fn views(&self) -> [View<'_, T>; 4] {
        let [q, k, v] = self.sizes();
        let view = |data, sizes| View::new(data, Layout::Bhsd, sizes).unwrap();
        [view(&self.q, q), view(&self.k, k), view(&self.v, v), view(&self.dy, self.shape.output())]
    }

    /// Somewhere for gradients to go, where what was there before must not matter.
    fn into<O: Element>(&self, f: impl FnOnce(Gradients<'_, O>) -> Result<(), AttnError>) -> Result<Five, AttnError> {
        let sizes = self.sizes();
        let fresh = |sizes: [usize; 4]| vec![O::from_f64(f64::NAN); sizes.iter().product()];
        let [mut dq, mut dk, mut dv] = sizes.map(fresh);
        let mut sinks = vec![f64::NAN; self.shape.q_heads];
        let AttnShape { batch, q_heads, q_len, kv_len, .. } = self.shape;
        let mut bias_sizes = [batch, q_heads, q_len, kv_len];
        bias_sizes.iter_mut().zip(self.bias).filter(|(_, along)| !along).for_each(|(size, _)| *size = 1);
        let mut bias = vec![f64::NAN; bias_sizes.iter().product()];
        f(Gradients::new(
            ViewMut::new(&mut dq, Layout::Bhsd, sizes[0]).unwrap(),
            ViewMut::new(&mut dk, Layout::Bhsd, sizes[1]).unwrap(),
            ViewMut::new(&mut dv, Layout::Bhsd, sizes[2]).unwrap(),
        )
        .sinks(&mut sinks)
        .bias(ViewMut::new(&mut bias, Layout::Bhsd, bias_sizes).unwrap()))?;
        let wide = |x: Vec<O>| x.into_iter().map(|x| x.to_f64()).collect();
        Ok([wide(dq), wide(dk), wide(dv), sinks, bias])
    }

    fn want<M: Mods>(&self, attn: &Attention<'_, M>) -> Five {
        let [q, k, v, dy] = self.views();
        let mut scratch = vec![0.0; oracle::scratch_len(&self.shape).unwrap()];
        self.into::<f64>(|gradients| oracle::gradients(attn, q, k, v, dy, gradients, &mut scratch)).unwrap()
    }

    /// Output and lse of the reference.
    fn forward<M: Mods>(&self, attn: &Attention<'_, M>) -> (Vec<T>, Vec<f32>) {
        let [q, k, v, _] = self.views();
        let (mut out, mut lse) = (vec![T::default(); self.dy.len()], vec![0.0f32; self.shape.rows()]);
        let to = ViewMut::new(&mut out, Layout::Bhsd, self.shape.output()).unwrap();
        reference::forward(attn, q, k, v, Outputs::new(to).lse(&mut lse), &mut vec![0.0; self.shape.kv_len]).unwrap();
        (out, lse)
    }

    fn got<M: Mods + Sync>(&self, level: Level, attn: &Attention<'_, M>) -> Result<Five, AttnError> {
        self.got_as::<T, M>(level, attn)
    }

    /// Gradients of another type.
    fn got_as<O: Element, M: Mods + Sync>(&self, level: Level, attn: &Attention<'_, M>) -> Result<Five, AttnError> {
        let ([q, k, v, dy], (out, lse)) = (self.views(), self.forward(attn));
        let out = View::new(&out, Layout::Bhsd, self.shape.output()).unwrap();
        let inputs = Inputs { q, k, v, out, lse: &lse, dy };
        let mut workspace = Workspace::new();
        workspace.lines(300_000).fill(attn_simd::Line([f32::NAN; 16]));
        self.into::<O>(|gradients| backward::gradients_at(level, attn, inputs, gradients, &mut workspace))
    }

    fn check<M: Mods + Sync>(&self, name: &str, attn: &Attention<'_, M>, tolerance: f64) {
        let want = self.want(attn);
        for level in super::levels_and_model() {
            let got = self.got(level, attn).unwrap();
            for (n, what) in ["dq", "dk", "dv", "dsinks", "dbias"].into_iter().enumerate() {
                let most = want[n].iter().fold(1.0f64, |most, x| most.max(x.abs()));
                for (i, (got, want)) in got[n].iter().zip(&want[n]).enumerate() {
                    let off = (got - want).abs() / most;
                    let name = (name, self.shape, level.name(), what, i);
                    assert!(off <= tolerance || got.is_nan() && want.is_nan(), "{name:?}: {got}, not {want} ({off:e})");
                }
            }
        }
    }
}

const SIZES: [[usize; 7]; 9] = [
    [1, 1, 1, 1, 1, 1, 1],
    [2, 2, 1, 3, 5, 4, 3],
    [1, 4, 2, 17, 70, 16, 24],
    [1, 3, 1, 49, 64, 40, 33],
    [2, 2, 2, 100, 131, 64, 64],
    [1, 1, 1, 260, 130, 20, 65],
    [1, 2, 1, 5, 0, 4, 4],
    [1, 2, 2, 0, 5, 4, 4],
    [1, 1, 1, 7, 9, 0, 3],
];

/// All of them, but for the two that take longest where every instruction is emulated.
fn sizes() -> impl Iterator<Item = [usize; 7]> {
    SIZES.into_iter().filter(|[.., q_len, _, _, _]| *q_len < 100 || !attn_testing::is_emulated())
}

#[test]
fn plain_and_ranges_over_odd_sizes() {
    for sizes in sizes() {
        let case = Case::<f32>::new(sizes);
        case.check("plain", &Attention::new(), F32);
        for align in [Align::TopLeft, Align::BottomRight] {
            case.check("causal", &Attention::new().mask(Mask::causal(align)), F32);
            case.check("window", &Attention::new().mask(Mask::window(9, 3, align)), F32);
        }
        let lens: Vec<usize> = (0..sizes[0]).map(|n| sizes[4] * (n + 1) / (sizes[0] + 1)).collect();
        case.check("lens", &Attention::new().mask(Mask::kv_lens(&lens[..])), F32);
    }
}

#[test]
fn options_over_odd_sizes() {
    for sizes in sizes() {
        let [_, q_heads, _, q_len, kv_len, ..] = sizes;
        let case = Case::<f32>::new(sizes);
        let mut numbers = Numbers::new(5);
        let sinks: Vec<f32> = numbers.take(q_heads).into_iter().map(|x| x as f32).collect();
        let mut bias: Vec<f32> = numbers.take(q_heads * q_len * kv_len).into_iter().map(|x| x as f32).collect();
        bias.iter_mut().step_by(5).for_each(|x| *x = f32::NEG_INFINITY);
        let causal = || Attention::new().mask(Mask::causal(Align::BottomRight));
        case.check("sinks", &causal().sinks(&sinks), F32);
        // Rows that see nothing have no lse to compare with a sink that is none.
        let none: Vec<f32> = (0..q_heads).map(|n| if n == 0 { f32::NEG_INFINITY } else { sinks[n] }).collect();
        case.check("sinks, one of which is none", &causal().sinks(&none), F32);
        case.check("scale", &causal().scale(-0.3).temperature(0.7), F32);
        case.check("scale 0", &causal().scale(0.0), F32);
        case.check("soft-cap", &causal().softcap(0.5), F32);
        case.check("dropout", &causal().dropout(Dropout::Seeded { p: 0.3, seed: 7 }), F32);
        let slopes: Vec<f32> = (1..=q_heads).map(|n| 0.5 / n as f32).collect();
        case.check("alibi", &causal().alibi(Alibi { slopes: &slopes, align: Align::BottomRight }).softcap(1.0), F32);
        if kv_len > 0 && q_len > 0 {
            let view = View::new(&bias, Layout::Bhsd, [1, q_heads, q_len, kv_len]).unwrap();
            case.check("bias", &causal().bias(view).temperature(1.5).sinks(&sinks), F32);
        }
        let squared = Attention::new().score_mod_with(|s, at| 0.1 * s * s + at.key as f64 * 1e-3, |s, _| 0.2 * s);
        case.check("score_mod", &squared, F32);
        case.check(
            "score_mod, hidden",
            &squared.mask(Mask::causal(Align::BottomRight)).softcap(3.0).temperature(1.3),
            F32,
        );
        case.check("mask_mod", &Attention::new().mask_mod(|at| (at.query + at.key) % 3 != 1), F32);
    }
}

/// Summed over any axes, of heads that share keys, of rows that see nothing, of more keys than a piece holds.
#[test]
fn biases_of_any_sizes() {
    for sizes in [[2, 4, 2, 17, 20, 8, 12], [2, 2, 1, 101, 70, 8, 5], [1, 1, 1, 9, 600, 4, 4], [1, 2, 1, 1, 1, 3, 3]] {
        for axes in (0..16).step_by(if attn_testing::is_emulated() { 5 } else { 1 }) {
            let case = Case::<f32>::new(sizes).bias([0, 1, 2, 3].map(|n| axes >> n & 1 == 1));
            let causal = Attention::new().mask(Mask::causal(Align::BottomRight)).softcap(2.0).temperature(0.8);
            case.check("summed", &causal.dropout(Dropout::Seeded { p: 0.2, seed: 3 }), F32);
        }
    }
    for sizes in [[1, 1, 1, 0, 5, 4, 4], [1, 1, 1, 5, 0, 4, 4], [0, 1, 1, 5, 5, 4, 4]] {
        for axes in 0..16 {
            let case = Case::<f32>::new(sizes).bias([0, 1, 2, 3].map(|n| axes >> n & 1 == 1));
            case.check("empty", &Attention::new(), F32);
        }
    }
}

/// A score of a single key moves nothing, however steep `score_mod` is: 0 times ∞ would be NaN.
#[test]
fn a_derivative_beyond_f32_is_no_infinity() {
    let mut case = Case::<f32>::new([1; 7]);
    for tensor in [&mut case.q, &mut case.k, &mut case.v, &mut case.dy] {
        tensor.fill(1.0); // so that nothing is rounded
    }
    case.check("steep", &Attention::new().score_mod_with(|s, _| s, |_, _| 1e39), F32);
}

#[test]
fn tables_of_masks() {
    let case = Case::<f32>::new([1, 2, 1, 100, 131, 32, 16]);
    let documents = Documents::new(&[0, 30, 30, 90], &[0, 10, 70, 131]);
    case.check("documents", &Attention::new().mask(Mask::documents(documents)), F32);
    let keep: Vec<bool> = (0..2 * 4 * 5).map(|n| n % 3 != 1).collect();
    let blocks = View::new(&keep, Layout::Bhsd, [1, 2, 4, 5]).unwrap();
    let sparse = BlockSparse { blocks, block_q: 25, block_k: 27 };
    case.check("block-sparse", &Attention::new().mask(Mask::block_sparse(sparse)), F32);
}

#[test]
fn halves() {
    // The model multiplies bit by bit.
    let few = if attn_testing::is_emulated() { 4 } else { SIZES.len() };
    for sizes in SIZES.into_iter().take(few) {
        let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
        let case = Case::<bf16>::new(sizes);
        case.check("bf16", &causal, BF16);
        case.check("fast bf16", &causal.precision(Precision::Fast), BF16);
        let window = Attention::new().mask(Mask::window(9, 3, Align::TopLeft)).softcap(2.0);
        case.check("fast bf16 in a window", &window.precision(Precision::Fast), BF16);
        Case::<f16>::new(sizes).check("f16", &causal, F16);
    }
}

/// Modifications of scores and masks, where products are of bf16. One of them runs a call of its own, which leaves AMX
/// as that call needs it.
#[test]
fn modifications_of_bf16() {
    for sizes in [[1, 4, 2, 17, 70, 16, 24], [1, 3, 1, 49, 64, 40, 33]] {
        let case = Case::<bf16>::new(sizes);
        let squared = Attention::new().score_mod_with(|s, at| 0.1 * s * s + at.key as f64 * 1e-3, |s, _| 0.2 * s);
        case.check("score_mod", &squared, BF16);
        let hidden = squared.mask(Mask::causal(Align::BottomRight)).softcap(3.0).temperature(1.3);
        case.check("score_mod, hidden", &hidden, BF16);
        case.check("mask_mod", &Attention::new().mask_mod(|at| (at.query + at.key) % 3 != 1), BF16);
        let within = |key: usize| {
            if key % 16 == 5 {
                let x = [bf16::ONE; 20 * 8];
                let shape = AttnShape::new([1, 1, 20, 8], [1, 1, 20, 8], [1, 1, 20, 8]).unwrap();
                let x = View::new(&x, Layout::Bhsd, shape.output()).unwrap();
                let mut out = [bf16::ZERO; 20 * 8];
                let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap();
                let (attn, mut workspace) = (Attention::new(), Workspace::new());
                attn_simd::forward_at(Level::detect(), &attn, x, x, x, Outputs::new(to), &mut workspace).unwrap();
            }
        };
        if !attn_testing::is_emulated() {
            let calls = Attention::new().score_mod_with(
                |s, at| {
                    within(at.key);
                    0.5 * s
                },
                |_, _| 0.5,
            );
            case.check("score_mod that calls", &calls, BF16);
        }
    }
}

#[test]
fn strides_change_no_bit() {
    let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
    strides_of::<f32>(&attn);
    strides_of::<bf16>(&attn);
    strides_of::<bf16>(&attn.precision(Precision::Fast));
}

/// Tokens before heads, read and written in place: the bits of the same numbers in other strides.
fn strides_of<T: KernelElement>(attn: &Attention<'_>) {
    let case = Case::<T>::new([2, 4, 2, 37, 70, 24, 20]);
    let moved = |x: &[T], [batch, heads, seq, dim]: [usize; 4]| {
        let mut to = vec![T::default(); x.len()];
        for (n, x) in x.iter().enumerate() {
            let (channel, row, head, b) = (n % dim, n / dim % seq, n / dim / seq % heads, n / dim / seq / heads);
            assert!(b < batch);
            to[((b * seq + row) * heads + head) * dim + channel] = *x;
        }
        to
    };
    let ([qs, ks, vs], ys) = (case.sizes(), case.shape.output());
    let (out, lse) = case.forward(attn);
    let [q, k, v, dy, out] =
        [(&case.q, qs), (&case.k, ks), (&case.v, vs), (&case.dy, ys), (&out, ys)].map(|(x, sizes)| moved(x, sizes));
    let view = |x, sizes| View::new(x, Layout::Bshd, sizes).unwrap();
    for level in super::levels_and_model() {
        let want = case.got(level, attn).unwrap();
        let mut got = [qs, ks, vs].map(|sizes| vec![T::from_f64(f64::NAN); sizes.iter().product()]);
        let [dq, dk, dv] = &mut got;
        let to = Gradients::new(
            ViewMut::new(dq, Layout::Bshd, qs).unwrap(),
            ViewMut::new(dk, Layout::Bshd, ks).unwrap(),
            ViewMut::new(dv, Layout::Bshd, vs).unwrap(),
        );
        let inputs = Inputs {
            q: view(&q, qs),
            k: view(&k, ks),
            v: view(&v, vs),
            out: view(&out, ys),
            lse: &lse,
            dy: view(&dy, ys),
        };
        backward::gradients_at(level, attn, inputs, to, &mut Workspace::new()).unwrap();
        for ((got, want), sizes) in got.iter().zip(&want).zip([qs, ks, vs]) {
            let want: Vec<T> = want.iter().map(|&x| T::from_f64(x)).collect();
            assert!(*got == moved(&want, sizes), "{}", level.name());
        }
    }
}

#[test]
fn hidden_nan_changes_no_bit() {
    hidden_nan::<f32>(Precision::Exact);
    hidden_nan::<bf16>(Precision::Exact);
    hidden_nan::<bf16>(Precision::Fast);
}

/// Hidden keys and queries that see nothing may hold anything. The first key that is seen is the fifth, and the queries
/// that see one are an odd number.
fn hidden_nan<T: KernelElement>(precision: Precision) {
    let sizes = [1, 2, 1, 60, 150, 20, 24];
    let (lens, queries, starts) = ([77], [33], [5]);
    let mask = Mask::kv_lens(&lens[..]).and(Mask::q_lens(&queries[..])).and(Mask::kv_starts(&starts[..]));
    let attn = Attention::new().mask(mask).precision(precision);
    let clean = Case::<T>::new(sizes);
    let mut sick = Case::<T>::new(sizes);
    let [_, _, _, q_len, _, head_dim, value_dim] = sizes;
    for x in [f64::NAN, f64::INFINITY].map(T::from_f64) {
        for keys in [0..5, 77..150] {
            sick.k[keys.start * head_dim..keys.end * head_dim].fill(x);
            sick.v[keys.start * value_dim..keys.end * value_dim].fill(x);
        }
        for head in 0..2 {
            sick.q[(head * q_len + 33) * head_dim..][..27 * head_dim].fill(x);
            sick.dy[(head * q_len + 33) * value_dim..][..27 * value_dim].fill(x);
        }
        for level in super::levels_and_model() {
            let bits = |four: Five| four.map(|x| x.into_iter().map(f64::to_bits).collect::<Vec<_>>());
            let (clean, sick) = (clean.got(level, &attn).unwrap(), sick.got(level, &attn).unwrap());
            assert!(clean.iter().flatten().all(|x| x.is_finite()));
            assert_eq!(bits(clean), bits(sick), "{}", level.name());
        }
    }
}

#[test]
fn a_visible_nan_reaches_the_rows_that_see_it_and_no_others() {
    let mut case = Case::<f32>::new([1, 1, 1, 20, 90, 8, 8]);
    case.k[85 * 8 + 3] = f32::NAN; // seen by queries 15 and later
    case.check("NaN", &Attention::new().mask(Mask::causal(Align::BottomRight)), F32);
    let mut case = Case::<bf16>::new([1, 1, 1, 21, 90, 8, 8]);
    case.k[85 * 8 + 3] = bf16::NAN;
    case.dy[12 * 8 + 1] = bf16::NAN; // of a query that is not the last
    let fast = Attention::new().precision(Precision::Fast);
    case.check("NaN in pairs", &fast.mask(Mask::causal(Align::BottomRight)), BF16);
    // A key that all queries see with a score of −∞ weighs nothing. Its product with a lane without a query is NaN.
    let mut case = Case::<bf16>::new([1, 1, 1, 21, 40, 8, 8]);
    case.k[7 * 8 + 3] = bf16::NEG_INFINITY;
    case.q.iter_mut().skip(3).step_by(8).for_each(|x| *x = bf16::from_f64(x.to_f64().abs() + 0.1));
    case.check("an infinite key", &Attention::new(), BF16);
}

/// NaN in the rows of one query changes no bit of the rows of others: numbers that are beside one that is not finite
/// are rounded as if it were.
#[test]
fn a_visible_nan_changes_no_bit_of_other_rows() {
    let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
    let sizes = [1, 1, 1, 70, 80, 24, 16];
    let (clean, head_dim) = (Case::<bf16>::new(sizes), sizes[5]);
    for (precision, place) in [Precision::Exact, Precision::Fast].into_iter().flat_map(|p| [(p, 0), (p, 1)]) {
        let (attn, mut sick) = (attn.precision(precision), Case::<bf16>::new(sizes));
        match place {
            0 => sick.q[33 * head_dim + 3] = bf16::NAN,
            _ => sick.dy[33 * sizes[6] + 3] = bf16::NAN,
        }
        for level in super::levels_and_model() {
            let (clean, sick) = (clean.got(level, &attn).unwrap(), sick.got(level, &attn).unwrap());
            for (n, (clean, sick)) in clean[0].iter().zip(&sick[0]).enumerate() {
                if n / head_dim == 33 {
                    assert!(sick.is_nan(), "{}", level.name());
                } else {
                    assert_eq!(clean.to_bits(), sick.to_bits(), "{} {precision:?} {place} {n}", level.name());
                }
            }
        }
    }
    // The gradient of the first score is (1 + 2⁻⁸)/2, in the middle of two numbers of bf16.
    let mut clean = Case::<bf16>::new([1, 1, 1, 2, 2, 1, 2]);
    let set = |x: &mut [bf16], to: &[f64]| x.iter_mut().zip(to).for_each(|(x, to)| *x = bf16::from_f64(*to));
    set(&mut clean.q, &[0.0; 2]);
    set(&mut clean.k, &[1.0, 0.0]);
    set(&mut clean.v, &[1.0, 1.0, -1.0, -1.0]);
    set(&mut clean.dy, &[1.0, 1.0 / 256.0, 0.0, 0.0]);
    let fast = Attention::new().precision(Precision::Fast);
    for level in super::levels_and_model() {
        clean.q[1] = bf16::ZERO;
        let want = clean.got_as::<f32, _>(level, &fast).unwrap();
        clean.q[1] = bf16::NAN;
        let got = clean.got_as::<f32, _>(level, &fast).unwrap();
        assert_eq!(got[0][0], want[0][0], "{}", level.name());
    }
}

/// Channels of k, q and dy that AMX takes for 0, and others that are too large for it, are added in f32: no gradient
/// loses them. Each channel is compared by its own size.
#[test]
fn amx_loses_no_numbers_that_parts_cannot_hold() {
    let sizes = [1, 2, 1, 150, 100, 24, 24];
    let [_, _, _, _, _, head_dim, value_dim] = sizes;
    let mut case = Case::<bf16>::new(sizes);
    let scale = |x: &mut Vec<bf16>, dim: usize, channel: usize, power: i32| {
        for row in x.chunks_exact_mut(dim) {
            row[channel] = bf16::from_f64(row[channel].to_f64() * 2.0f64.powi(power));
        }
    };
    // A subnormal bfloat16 has few digits, but is a number as any other.
    scale(&mut case.k, head_dim, 1, -128);
    scale(&mut case.q, head_dim, 2, -128);
    scale(&mut case.k, head_dim, 3, 70);
    scale(&mut case.q, head_dim, 3, -72);
    scale(&mut case.dy, value_dim, 4, -128);
    case.dy[7 * value_dim + 5] = bf16::from_f64(1e-39);
    case.k[9 * head_dim + 6] = bf16::from_f64(-1e-39);
    let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
    let want = case.want(&attn);
    for level in attn_testing::levels(["amx-model", "amx"], Level::by_name) {
        let got = case.got_as::<f32, _>(level, &attn).unwrap();
        for (n, dim) in [head_dim, head_dim, value_dim].into_iter().enumerate() {
            for channel in 0..dim {
                let of = |x: &[f64]| x.iter().skip(channel).step_by(dim).copied().collect::<Vec<_>>();
                let (got, want) = (of(&got[n]), of(&want[n]));
                let most = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                for (row, (got, want)) in got.iter().zip(&want).enumerate() {
                    let off = (got - want).abs() / most;
                    let name = (level.name(), ["dq", "dk", "dv"][n], row, channel);
                    assert!(off <= BF16, "{name:?}: {got:e}, not {want:e} ({off:e})");
                }
            }
        }
    }
}

/// Blocks of 128 queries in parts of a head, heads of groups, and the gradient of a bias, which vectors compute.
#[test]
fn long_heads_on_amx() {
    if attn_testing::is_emulated() {
        return; // the model multiplies bit by bit
    }
    for sizes in [[1, 2, 1, 530, 200, 40, 33], [1, 1, 1, 1040, 70, 16, 16]] {
        let case = Case::<bf16>::new(sizes);
        for attn in [
            Attention::new().mask(Mask::causal(Align::BottomRight)),
            Attention::new().mask(Mask::window(40, 9, Align::TopLeft)).softcap(3.0),
            Attention::new().dropout(Dropout::Seeded { p: 0.3, seed: 7 }),
        ] {
            case.check("long", &attn, BF16);
            case.check("long and fast", &attn.precision(Precision::Fast), BF16);
        }
    }
}

/// The text names what runs: by types, precision and length.
#[test]
fn explanations_say_which_products_run() {
    use attn_core::Dtype::{Bf16, F32};
    let attn = Attention::new();
    let fast = attn.precision(Precision::Fast);
    let text = |level: &str, attn: &Attention<'_>, q_len, inputs, outputs| {
        let shape = AttnShape { q_len, ..Case::<f32>::new([1, 1, 1, 1, 80, 16, 16]).shape };
        let plan = backward::Plan::new(attn, shape, Level::by_name(level).unwrap()).unwrap();
        plan.explain(inputs, outputs).to_string()
    };
    for (level, attn, q_len, inputs, outputs, want) in [
        ("amx-model", &attn, 600, Bf16, Bf16, "amx-model-bf16-backward-q128"),
        ("amx-model", &attn, 600, Bf16, Bf16, "and 2 for each sum; Precision::Fast takes 1"),
        ("amx-model", &attn, 600, Bf16, F32, "and 3 for each sum"),
        ("amx-model", &attn, 600, Bf16, F32, "; gradients in f32"),
        ("amx-model", &fast, 600, Bf16, Bf16, "fast: bf16 on AMX, 1 product for q·k and dy·v each and 1 for"),
        ("amx-model", &attn, 600, F32, F32, "scratch on one thread; f32"),
        ("avx512bf16-model", &attn, 600, Bf16, Bf16, "exact: q·k and dy·v of bf16 by AVX512_BF16"),
        ("avx512bf16-model", &fast, 600, Bf16, Bf16, "fast: all products of bf16 by AVX512_BF16"),
        ("portable", &attn, 600, Bf16, Bf16, "portable-bf16-backward"),
        ("portable", &attn, 600, Bf16, Bf16, "computed in f32, widened tile by tile"),
        ("portable", &attn, 600, F32, F32, " parts of each key/value head, added up in order"),
        ("portable", &attn, 1, F32, F32, "one thread computes a key/value head and writes it"),
        #[cfg(target_arch = "aarch64")]
        ("dotprod", &attn, 600, F32, F32, "portable-f32-backward"),
    ] {
        if level == "dotprod" && Level::by_name(level).is_err() {
            continue; // a processor without SDOT
        }
        let text = text(level, attn, q_len, inputs, outputs);
        assert!(text.contains(want), "{text}: no {want:?}");
    }
}

#[test]
fn refusals_write_nothing() {
    let case = Case::<f32>::new([1, 1, 1, 3, 4, 2, 2]);
    let error = case.got(Level::detect(), &Attention::new().score_mod(|s, _| s)).unwrap_err();
    assert!(matches!(error, AttnError::Unsupported { .. }), "{error}");
    let [q, k, v, dy] = case.views();
    let (mut dq, mut dk, mut dv) = ([7.0f32; 6], [7.0f32; 8], [7.0f32; 8]);
    let mut bias = [7.0; 12];
    let lse = [0.0; 3];
    for (lse, columns) in [(&lse[..2], 4), (&lse[..], 3)] {
        let gradients = Gradients::new(
            ViewMut::matrix(&mut dq, 3, 2).unwrap(),
            ViewMut::matrix(&mut dk, 4, 2).unwrap(),
            ViewMut::matrix(&mut dv, 4, 2).unwrap(),
        );
        let gradients = gradients.bias(ViewMut::matrix(&mut bias, 3, columns).unwrap());
        let inputs = Inputs { q, k, v, out: dy, lse, dy };
        backward::gradients(&Attention::new(), inputs, gradients, &mut Workspace::new()).unwrap_err();
    }
    assert!(dq.iter().chain(&dk).chain(&dv).all(|&x| x == 7.0) && bias.iter().all(|&x| x == 7.0));
}
