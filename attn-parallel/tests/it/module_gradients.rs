//! Gradients of modules by `Kernels`: those of the reference in f64, with appended keys, a bias and a `score_mod`.

use attn_layers::module::{
    GradientEngine, InputGradients, ModuleGradients, MultiHeadAttention, Reference, SelfAttention, Sources,
};
use attn_layers::{Linear, LinearGradients};
use attn_parallel::attn_core::dropout::Dropout;
use attn_parallel::attn_core::element::Real;
use attn_parallel::attn_core::half::bf16;
use attn_parallel::attn_core::score_mod::Mods;
use attn_parallel::{Align, Attention, AttnError, Element, Kernels, Layout, Level, Mask, View, ViewMut};
use attn_testing::numbers::{Numbers, assert_close};
use attn_testing::tolerance::GRADIENT_F32;

const BATCH: usize = 2;
const LEN: usize = 70;
const WIDTH: usize = 12;
const Q_HEADS: usize = 4;

/// Numbers of a module: x, dy; the weights of q, k, v, join; the appended key and value.
struct Tensors<T> {
    x: Vec<T>,
    dy: Vec<T>,
    w: [Vec<T>; 4],
    appended: [Vec<T>; 2],
}

/// Sizes of the weights: four query heads of 6, two key/value heads of 6 and 5.
const WEIGHTS: [[usize; 2]; 4] = [[WIDTH, 24], [WIDTH, 12], [WIDTH, 10], [20, WIDTH]];

impl<T: Element> Tensors<T> {
    fn new() -> Self {
        let mut numbers = Numbers::new(4);
        let mut take = |n| numbers.take(n).into_iter().map(T::from_f64).collect::<Vec<T>>();
        let (x, dy) = (take(BATCH * LEN * WIDTH), take(BATCH * LEN * WIDTH));
        Self { x, dy, w: WEIGHTS.map(|[d_in, d_out]| take(d_in * d_out)), appended: [take(12), take(10)] }
    }

    /// Every gradient, one after the other.
    fn gradients<E: GradientEngine<T>, M: Mods + Sync>(
        &self,
        engine: &mut E,
        attn: &Attention<'_, M>,
        more: bool,
    ) -> Result<Vec<Vec<f64>>, AttnError> {
        let layer = |n: usize| Linear::new(&self.w[n], WEIGHTS[n][0], WEIGHTS[n][1]);
        let mut mha = MultiHeadAttention::new(Q_HEADS, 2, layer(0)?, layer(1)?, layer(2)?)?.output(layer(3)?)?;
        if more {
            mha = mha.bias_kv(&self.appended[0], &self.appended[1])?.zero_attn();
        }
        let sizes = [BATCH, 1, LEN, WIDTH];
        let mut dx = vec![f64::NAN; self.x.len()];
        let mut dw = WEIGHTS.map(|[d_in, d_out]| vec![f64::NAN; d_in * d_out]);
        let (mut by_key, mut by_value) = (vec![f64::NAN; 12], vec![f64::NAN; 10]);
        let (mut by_bias, mut by_sinks) = (vec![f64::NAN; LEN], vec![f64::NAN; Q_HEADS]);
        {
            let mut slots = dw.iter_mut().zip(WEIGHTS).map(|(w, [d_in, d_out])| LinearGradients::new(w, d_in, d_out));
            let mut slot = || slots.next().expect("four weights");
            let mut gradients = ModuleGradients::new()
                .inputs(InputGradients::Same(ViewMut::new(&mut dx, Layout::Bhsd, sizes)?))
                .q(slot()?)
                .k(slot()?)
                .v(slot()?)
                .out(slot()?);
            if more {
                gradients = gradients.bias_kv(&mut by_key, &mut by_value);
            }
            if attn.get_bias().is_some() {
                gradients = gradients.score_bias(ViewMut::matrix(&mut by_bias, 1, LEN)?);
            }
            if attn.get_sinks().is_some() {
                gradients = gradients.sinks(&mut by_sinks);
            }
            let (x, dy) = (View::new(&self.x, Layout::Bhsd, sizes)?, View::new(&self.dy, Layout::Bhsd, sizes)?);
            let needed = mha.backward_scratch_len(engine, BATCH, LEN, LEN)?;
            let mut scratch = vec![E::Mid::of(f64::NAN); needed];
            mha.backward(engine, attn, Sources::same(x), dy, gradients, &mut scratch)?;
        }
        let mut all = vec![dx];
        all.extend(dw);
        all.extend([by_key, by_value, by_bias, by_sinks]);
        all.retain(|part| !part.iter().all(|x| x.is_nan())); // nobody wanted these
        Ok(all)
    }
}

/// The kernels' against the reference's, at every level.
fn compare<T: Element<Compute = f32>, M: Mods + Sync>(what: &str, attn: &Attention<'_, M>, more: bool) {
    let tensors = Tensors::<T>::new();
    let want = tensors.gradients(&mut Reference, attn, more).unwrap();
    for level in Level::available() {
        let found = tensors.gradients(&mut Kernels { level }, attn, more).unwrap();
        assert_eq!(found.len(), want.len());
        for (n, (found, want)) in found.iter().zip(&want).enumerate() {
            assert_close(&format!("{what}, {}, gradient {n}", level.name()), found, want, GRADIENT_F32);
        }
    }
}

#[test]
fn kernels_give_the_gradients_of_the_reference() {
    let causal = || Attention::new().mask(Mask::causal(Align::TopLeft));
    for more in [false, true] {
        compare::<f32, _>("causal", &causal(), more);
        compare::<bf16, _>("bf16", &causal(), more);
        let lens = Attention::new().mask(Mask::kv_lens(&[70, 0])).softcap(2.0).temperature(0.7);
        compare::<f32, _>("a sequence of no keys", &lens, more);
        compare::<f32, _>("dropout", &causal().dropout(Dropout::Seeded { p: 0.3, seed: 5 }), more);
        compare::<f32, _>("sinks", &causal().sinks(&[0.5, -1.0, 2.0, 0.0]), more);
    }
}

#[test]
fn a_bias_has_a_gradient_and_a_score_mod_is_gone_back_through() {
    let bias: Vec<f32> = (0..LEN).map(|n| (n as f32).sin()).collect();
    for more in [false, true] {
        let biased = Attention::new().bias(View::matrix(&bias, 1, LEN).unwrap());
        compare::<f32, _>("bias", &biased, more);
        let modded = Attention::new().score_mod_with(|s, _| s + 0.1 * s * s, |s, _| 1.0 + 0.2 * s);
        compare::<f32, _>("score_mod", &modded, more);
    }
}

#[test]
fn what_has_no_gradient_is_refused_before_writing() {
    let (w, x) = ([0.5f32; 4], [1.0f32; 6]);
    let layer = Linear::new(&w, 2, 2).unwrap();
    let layer = SelfAttention::new(layer, layer, layer).unwrap();
    let x = View::matrix(&x, 3, 2).unwrap();
    let mut dw = [7.0f32; 4];
    let mut engine = Kernels::default();
    let mut scratch = vec![0.0; layer.backward_scratch_len(&engine, 1, 3).unwrap()];
    let mut run = |scratch: &mut [f32]| {
        let to = ModuleGradients::new().v(LinearGradients::new(&mut dw, 2, 2).unwrap());
        layer.backward(&mut engine, &Attention::new().score_mod(|s, _| s), x, x, to, scratch)
    };
    assert!(matches!(run(&mut scratch), Err(AttnError::Unsupported { .. })));
    assert!(matches!(run(&mut scratch[1..]), Err(AttnError::TooShort { .. })));
    assert_eq!(dw, [7.0; 4]);
}
