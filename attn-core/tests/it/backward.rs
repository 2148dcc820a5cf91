//! Gradients of attention against differences of the reference, under every option; dead rows, refusals, layouts.

use attn_core::backward::{self, Gradients};
use attn_core::dropout::Dropout;
use attn_core::engine::{Inputs, Saved};
use attn_core::half::f16;
use attn_core::mask::Term;
use attn_core::mask::{Lengths, Window};
use attn_core::position::alibi::Alibi;
use attn_core::score::At;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnError, AttnShape, Element, Layout, Mask, View, ViewMut, reference};

use attn_testing::numbers::{DIFFERENCE, DIFFERENCE_F32, EXACT, Numbers, assert_close, differences, inner};

/// Sinks are `f32`, so that their step must be large.
const SINK_STEP: f32 = 1.0 / 512.0;

/// Tensors of one call, `[batch, heads, seq, dim]`.
struct Case {
    shape: AttnShape,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    dy: Vec<f64>,
    /// `[1, q_heads, 1, kv_len]`.
    bias: Vec<f64>,
    sinks: Vec<f32>,
}

impl Case {
    fn new(shape: AttnShape) -> Self {
        let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        let mut numbers = Numbers::new(11);
        Self {
            shape,
            q: numbers.take(batch * q_heads * q_len * head_dim),
            k: numbers.take(batch * kv_heads * kv_len * head_dim),
            v: numbers.take(batch * kv_heads * kv_len * value_dim),
            dy: numbers.take(batch * q_heads * q_len * value_dim),
            bias: numbers.take(q_heads * kv_len),
            sinks: numbers.take(q_heads).iter().map(|&x| (x * 64.0).round() as f32 / 64.0).collect(),
        }
    }

    fn sizes(&self) -> [[usize; 4]; 3] {
        let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        [[batch, q_heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim], [batch, kv_heads, kv_len, value_dim]]
    }

    fn view<'v>(&self, data: &'v [f64], which: usize) -> View<'v, f64> {
        View::new(data, Layout::Bhsd, self.sizes()[which]).unwrap()
    }

    fn bias_view<'v>(&self, bias: &'v [f64]) -> View<'v, f64> {
        View::new(bias, Layout::Bhsd, [1, self.shape.q_heads, 1, self.shape.kv_len]).unwrap()
    }

    fn loss<M: Mods>(&self, attn: &Attention<'_, M>, q: &[f64], k: &[f64], v: &[f64]) -> f64 {
        let mut y = vec![0.0; self.dy.len()];
        let out = ViewMut::new(&mut y, Layout::Bhsd, self.shape.output()).unwrap();
        let (q, k, v) = (self.view(q, 0), self.view(k, 1), self.view(v, 2));
        reference::forward(attn, q, k, v, out, &mut vec![0.0; self.shape.kv_len]).unwrap();
        inner(&y, &self.dy)
    }

    /// dq, dk, dv, dbias, dsinks.
    fn gradients<M: Mods>(&self, attn: &Attention<'_, M>) -> Result<[Vec<f64>; 5], AttnError> {
        // What was there before must not matter.
        let fresh = |len: usize| vec![f64::NAN; len];
        let (mut dq, mut dk, mut dv) = (fresh(self.q.len()), fresh(self.k.len()), fresh(self.v.len()));
        let (mut dbias, mut dsinks) = (fresh(self.bias.len()), fresh(self.sinks.len()));
        let [q, k, v] = self.sizes();
        let gradients = Gradients::new(
            ViewMut::new(&mut dq, Layout::Bhsd, q).unwrap(),
            ViewMut::new(&mut dk, Layout::Bhsd, k).unwrap(),
            ViewMut::new(&mut dv, Layout::Bhsd, v).unwrap(),
        )
        .bias(ViewMut::new(&mut dbias, Layout::Bhsd, [1, self.shape.q_heads, 1, self.shape.kv_len]).unwrap())
        .sinks(&mut dsinks);
        let dy = View::new(&self.dy, Layout::Bhsd, self.shape.output()).unwrap();
        let mut scratch = fresh(backward::scratch_len(&self.shape).unwrap());
        let (q, k, v) = (self.view(&self.q, 0), self.view(&self.k, 1), self.view(&self.v, 2));
        backward::gradients(attn, q, k, v, dy, gradients, &mut scratch)?;
        Ok([dq, dk, dv, dbias, dsinks])
    }

    /// Checks all gradients against differences. `options` makes the options from a bias and sinks, which it may
    /// ignore.
    fn check<M: Mods>(&self, name: &str, options: impl for<'x> Fn(View<'x, f64>, &'x [f32]) -> Attention<'x, M>) {
        let (q, k, v) = (&self.q[..], &self.k[..], &self.v[..]);
        let attn = options(self.bias_view(&self.bias), &self.sinks);
        let [dq, dk, dv, dbias, dsinks] = self.gradients(&attn).unwrap();
        assert_close(&format!("{name} dq"), &dq, &differences(q, |q| self.loss(&attn, q, k, v)), DIFFERENCE);
        assert_close(&format!("{name} dk"), &dk, &differences(k, |k| self.loss(&attn, q, k, v)), DIFFERENCE);
        assert_close(&format!("{name} dv"), &dv, &differences(v, |v| self.loss(&attn, q, k, v)), DIFFERENCE);
        if attn.get_bias().is_some() {
            let want = differences(&self.bias, |bias| self.loss(&options(self.bias_view(bias), &self.sinks), q, k, v));
            assert_close(&format!("{name} dbias"), &dbias, &want, DIFFERENCE);
        }
        let mut sinks = self.sinks.clone();
        let want: Vec<f64> = (0..sinks.len())
            .map(|n| {
                let mut at = |sink: f32| {
                    sinks[n] = sink;
                    self.loss(&options(self.bias_view(&self.bias), &sinks), q, k, v)
                };
                let (above, below) = (at(self.sinks[n] + SINK_STEP), at(self.sinks[n] - SINK_STEP));
                at(self.sinks[n]);
                (above - below) / f64::from(2.0 * SINK_STEP)
            })
            .collect();
        assert_close(&format!("{name} dsinks"), &dsinks, &want, DIFFERENCE_F32); // zeros where the options have none
    }
}

fn grouped() -> Case {
    Case::new(AttnShape::new([2, 4, 3, 3], [2, 2, 5, 3], [2, 2, 5, 2]).unwrap())
}

#[test]
fn every_option_has_the_gradient_of_its_differences() {
    let case = grouped();
    case.check("plain", |_, _| Attention::new());
    case.check("scale", |_, _| Attention::new().scale(-1.7));
    case.check("causal", |_, _| Attention::new().mask(Mask::causal(Align::BottomRight)));
    case.check("window and padding", |_, _| {
        let window = Window { left: Some(1), right: Some(2), align: Align::BottomRight };
        Attention::new().mask(Mask::term(Term::Window(window)).and(Mask::kv_lens(&[5, 2])).and(Mask::q_lens(&[2, 3])))
    });
    case.check("prefix", |_, _| Attention::new().mask(Mask::prefix_lm(Lengths::All(2), Align::TopLeft)));
    case.check("softcap", |_, _| Attention::new().scale(2.0).softcap(0.8));
    case.check("temperature", |_, _| Attention::new().temperature(0.4));
    case.check("bias", |bias, _| Attention::new().bias(bias));
    case.check("alibi", |_, _| {
        Attention::new().alibi(Alibi { slopes: &[0.5, 0.25, 0.125, 0.0625], align: Align::BottomRight })
    });
    case.check("sinks", |_, sinks| Attention::new().sinks(sinks));
    case.check("seeded dropout", |_, _| Attention::new().dropout(Dropout::Seeded { p: 0.4, seed: 5 }));
    case.check("closure", |_, _| Attention::new().score_mod_with(|s, _| s + 0.1 * s * s * s, |s, _| 1.0 + 0.3 * s * s));
    case.check("visibility", |_, _| {
        Attention::new().mask_mod(|at: At| !(at.query + at.key + at.head).is_multiple_of(3))
    });
}

#[test]
fn all_options_together_have_the_gradient_of_their_differences() {
    const KEEP: [bool; 15] =
        [true, false, true, true, true, true, true, false, true, true, false, true, true, true, true];
    grouped().check("all", |bias, sinks| {
        Attention::new()
            .scale(1.3)
            .softcap(2.0)
            .bias(bias)
            .alibi(Alibi { slopes: &[0.5, 0.25, 0.125, 0.0625], align: Align::TopLeft })
            .temperature(1.5)
            .sinks(sinks)
            .mask(Mask::causal(Align::BottomRight).and(Mask::kv_lens(&[4, 5])))
            .dropout(Dropout::Keep { mask: View::broadcast(&KEEP, &[3, 5]).unwrap(), p: 0.25 })
            .score_mod_with(|s, at: At| s * (1.0 + at.head as f64), |_, at: At| 1.0 + at.head as f64)
            .score_mod_with(|s, _| s.sin(), |s, _| s.cos())
    });
}

#[test]
fn rows_that_see_nothing_have_no_gradient() {
    // More queries than keys, aligned to the end: the first two rows see nothing.
    let mut case = Case::new(AttnShape::new([1, 1, 5, 2], [1, 1, 3, 2], [1, 1, 3, 2]).unwrap());
    case.check("dead rows", |_, sinks| Attention::new().mask(Mask::causal(Align::BottomRight)).sinks(sinks));
    let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
    let before = case.gradients(&attn).unwrap();
    assert!(before[0][..4].iter().all(|&x| x == 0.0));
    case.dy[..4].fill(f64::NAN); // what such a row is told has no way back
    case.q[..4].fill(f64::INFINITY);
    assert_eq!(case.gradients(&attn).unwrap(), before);

    // A bias of −∞ everywhere, and no key at all.
    let case = grouped();
    let nowhere = vec![f64::NEG_INFINITY; case.bias.len()];
    for part in case.gradients(&Attention::new().bias(case.bias_view(&nowhere))).unwrap() {
        assert!(part.iter().all(|&x| x == 0.0));
    }
    let empty = Case::new(AttnShape::new([1, 2, 3, 2], [1, 2, 0, 2], [1, 2, 0, 2]).unwrap());
    assert_eq!(empty.gradients(&Attention::new()).unwrap()[0], [0.0; 12]);
}

#[test]
fn hidden_keys_have_no_influence() {
    let mut case = grouped();
    let attn = Attention::new().mask(Mask::kv_lens(&[3, 3]));
    let before = case.gradients(&attn).unwrap();
    for (tensor, dim) in [(&mut case.k, 3), (&mut case.v, 2)] {
        for (n, row) in tensor.chunks_mut(dim).enumerate() {
            if n % 5 >= 3 {
                row.fill(f64::NAN);
            }
        }
    }
    assert_eq!(case.gradients(&attn).unwrap(), before);
}

#[test]
fn a_group_shares_the_gradient_of_its_keys() {
    // The same keys and values given once per query head: their gradients sum to those of the shared ones.
    let case = grouped();
    let mut repeated = Case::new(AttnShape::new([2, 4, 3, 3], [2, 4, 5, 3], [2, 4, 5, 2]).unwrap());
    let repeat = |x: &[f64], len: usize| -> Vec<f64> { x.chunks(len).flat_map(|head| [head, head].concat()).collect() };
    (repeated.q, repeated.dy) = (case.q.clone(), case.dy.clone());
    (repeated.k, repeated.v) = (repeat(&case.k, 15), repeat(&case.v, 10));
    let ([dq, dk, dv, ..], [dq_all, dk_all, dv_all, ..]) =
        (case.gradients(&Attention::new()).unwrap(), repeated.gradients(&Attention::new()).unwrap());
    let fold = |x: &[f64], len: usize| -> Vec<f64> {
        x.chunks(2 * len).flat_map(|two| (0..len).map(|n| two[n] + two[n + len]).collect::<Vec<_>>()).collect()
    };
    assert_close("dq", &dq, &dq_all, EXACT);
    assert_close("dk", &dk, &fold(&dk_all, 15), EXACT);
    assert_close("dv", &dv, &fold(&dv_all, 10), EXACT);
}

#[test]
fn a_closure_without_derivative_is_refused() {
    let case = grouped();
    assert!(matches!(
        case.gradients(&Attention::new().score_mod(|s, _| s)),
        Err(AttnError::Unsupported { what: "the gradient of a score function without a derivative" })
    ));
    // Where nothing is visible it is not needed.
    assert!(case.gradients(&Attention::new().score_mod(|s, _| s).mask(Mask::kv_lens(&[0, 0]))).is_ok());
}

#[test]
fn half_gradients_are_the_exact_ones_rounded_once() {
    let x: Vec<f16> = Numbers::new(3).take(4 * 8).into_iter().map(f16::from_f64).collect();
    let wide: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
    let mut narrow = [[f16::ZERO; 32]; 3];
    let mut exact = [[0.0f64; 32]; 3];
    {
        let [dq, dk, dv] = &mut narrow;
        let [dq, dk, dv] = [dq, dk, dv].map(|d| ViewMut::new(d, Layout::Bshd, [1, 2, 4, 4]).unwrap());
        let view = View::new(&x, Layout::Bshd, [1, 2, 4, 4]).unwrap();
        let gradients = Gradients::new(dq, dk, dv);
        backward::gradients(&Attention::new(), view, view, view, view, gradients, &mut [0.0; 36]).unwrap();
        let [dq, dk, dv] = &mut exact;
        let [dq, dk, dv] = [dq, dk, dv].map(|d| ViewMut::new(d, Layout::Bshd, [1, 2, 4, 4]).unwrap());
        let view = View::new(&wide, Layout::Bshd, [1, 2, 4, 4]).unwrap();
        let gradients = Gradients::new(dq, dk, dv);
        backward::gradients(&Attention::new(), view, view, view, view, gradients, &mut [0.0; 36]).unwrap();
    }
    for (narrow, exact) in narrow.iter().flatten().zip(exact.iter().flatten()) {
        assert_eq!(*narrow, <f16 as Element>::from_f64(*exact));
    }
}

/// A row that sees nothing but a sink has no gradient, whatever `dy` holds: from a saved output, too.
#[test]
fn a_row_that_sees_a_sink_alone_has_no_gradient() {
    let (x, dy, out) = ([0.5f32; 4], [f32::NAN, 1.0], [0.0f32; 2]);
    let (row, key) = (View::matrix(&x[..2], 1, 2).unwrap(), View::matrix(&x, 2, 2).unwrap());
    let (dy, out) = (View::matrix(&dy, 1, 2).unwrap(), View::matrix(&out, 1, 2).unwrap());
    let (sinks, lens) = ([0.5], [0]);
    let attn = Attention::new().sinks(&sinks).mask(Mask::kv_lens(&lens));
    for saved in [false, true] {
        let (mut by_q, mut by_kv, mut by_sinks) = ([7.0f32; 2], [[7.0f32; 4]; 2], [7.0]);
        let [dk, dv] = by_kv.each_mut().map(|to| ViewMut::matrix(to, 2, 2).unwrap());
        let to = Gradients::new(ViewMut::matrix(&mut by_q, 1, 2).unwrap(), dk, dv).sinks(&mut by_sinks);
        let scratch = &mut [0.0; 10];
        if saved {
            let (inputs, saved) = (Inputs { q: row, k: key, v: key, dy }, Saved { out, lse: &[0.5] });
            backward::gradients_saved(&attn, &inputs, saved, to, scratch).unwrap();
        } else {
            backward::gradients(&attn, row, key, key, dy, to, scratch).unwrap();
        }
        assert_eq!((by_q, by_kv, by_sinks), ([0.0; 2], [[0.0; 4]; 2], [0.0]), "saved: {saved}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_writing() {
    let x = [0.5f32; 12];
    let view = View::matrix(&x, 3, 4).unwrap();
    let mut out = [[7.0f32; 12]; 3];
    let mut sinks = [7.0f64; 2];
    let attempt =
        |out: &mut [[f32; 12]; 3], rows: [usize; 3], sinks: Option<&mut [f64]>, dy: View<'_, f32>, len: usize| {
            let [dq, dk, dv] = out;
            let mut gradients = Gradients::new(
                ViewMut::matrix(dq, rows[0], 4).unwrap(),
                ViewMut::matrix(dk, rows[1], 4).unwrap(),
                ViewMut::matrix(dv, rows[2], 4).unwrap(),
            );
            gradients.sinks = sinks;
            backward::gradients(&Attention::new(), view, view, view, dy, gradients, &mut vec![0.0; len])
        };
    let enough = 4 + 3 * 8;
    for rows in [[2, 3, 3], [3, 2, 3], [3, 3, 2]] {
        assert!(matches!(attempt(&mut out, rows, None, view, enough), Err(AttnError::Size { .. })));
    }
    assert!(attempt(&mut out, [3, 3, 3], Some(&mut sinks), view, enough).is_err());
    assert!(attempt(&mut out, [3, 3, 3], None, View::matrix(&x, 2, 4).unwrap(), enough).is_err());
    assert_eq!(
        attempt(&mut out, [3, 3, 3], None, view, enough - 1),
        Err(AttnError::TooShort { what: "backward scratch", needed: enough, found: enough - 1 })
    );
    assert_eq!((out, sinks), ([[7.0; 12]; 3], [7.0; 2]));
    attempt(&mut out, [3, 3, 3], None, view, enough).unwrap();
    assert!(out.iter().flatten().all(|&x| x != 7.0));
    let huge = AttnShape::new([1, 1, 0, usize::MAX], [1, 1, 3, usize::MAX], [1, 1, 3, 1]).unwrap();
    assert!(matches!(backward::scratch_len(&huge), Err(AttnError::Overflow { .. })));
}
