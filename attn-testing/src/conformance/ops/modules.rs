//! `self_attention`, `multihead_concat`, `multihead_fused` and the backward forms of the first and last.

use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Outputs, Result, View, ViewMut};
use attn_layers::module::{
    self, ConcatHeads, InputGradients, LayerOutputs, ModuleGradients, MultiHeadAttention, SelfAttention,
};
use attn_layers::{Linear, LinearGradients};

use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, Number};

/// Runs modules on an engine of the tests.
pub(super) struct On<'e, E>(pub(super) &'e E);

impl<T, E> module::Engine<T> for On<'_, E>
where
    T: Number,
    T::Compute: Number,
    E: Engine,
{
    type Mid = T::Compute;

    fn scratch_len(&self, _: &AttnShape) -> Result<usize> {
        Ok(0)
    }

    fn attend<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        [q, k, v]: [View<'_, T::Compute>; 3],
        outputs: Outputs<'_, T::Compute>,
        _: &mut [T::Compute],
    ) -> Result<()> {
        self.0.forward(attn, q, k, v, outputs)
    }
}

/// Causal top-left if the case says so, and its scale.
fn options<'a>(loaded: Loaded<'_>) -> core::result::Result<Attention<'a>, Stop> {
    let mut attn = Attention::new();
    if loaded.case.flag("causal")? {
        attn = attn.mask(Mask::causal(Align::TopLeft));
    }
    if let Some(scale) = loaded.case.number("scale")? {
        attn = attn.scale(scale);
    }
    Ok(attn)
}

/// `x·w + b` of two inputs, the bias if there is one.
fn linear<'t, T: Number + Stored>(loaded: Loaded<'t>, w: &str, b: &str) -> core::result::Result<Linear<'t, T>, Stop> {
    let weight = loaded.input(w)?;
    let [d_in, d_out] = weight.sizes()?;
    let layer = Linear::new(weight.values()?, d_in, d_out)?;
    match loaded.optional(b)? {
        Some(bias) => Ok(layer.bias(bias.values()?)?),
        None => Ok(layer),
    }
}

/// The input `[batch, seq, features]` as a view.
fn sequence<'t, T: Number + Stored>(loaded: Loaded<'t>, role: &str) -> core::result::Result<View<'t, T>, Stop> {
    let tensor = loaded.input(role)?;
    let [batch, seq, features] = tensor.sizes()?;
    Ok(View::new(tensor.values()?, Layout::Bhsd, [batch, 1, seq, features])?)
}

type Answer = core::result::Result<Produced, Stop>;

pub(super) fn self_attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Answer {
    fn run<E: Engine, T>(engine: &E, loaded: Loaded<'_>) -> Answer
    where
        T: Number + Stored,
        T::Compute: Number,
    {
        let layer = SelfAttention::new(
            linear::<T>(loaded, "w_q", "b_q")?,
            linear(loaded, "w_k", "b_k")?,
            linear(loaded, "w_v", "b_v")?,
        )?
        .output(linear(loaded, "w_o", "b_o")?)?;
        let (x, attn) = (sequence::<T>(loaded, "x")?, options(loaded)?);
        let [batch, _, seq, _] = x.sizes();
        let mut y = vec![T::default(); batch * seq * layer.d_out()];
        let mut weights = vec![T::Compute::default(); batch * seq * seq];
        let out = ViewMut::new(&mut y, Layout::Bhsd, [batch, 1, seq, layer.d_out()])?;
        let outputs = LayerOutputs::new(out).weights(&mut weights);
        if engine.is_exact() {
            let mut scratch = vec![0.0; layer.scratch_len(&module::Reference, batch, seq)?];
            layer.forward(&mut module::Reference, &attn, x, outputs, &mut scratch)?;
        } else {
            let mut scratch = vec![T::Compute::default(); layer.scratch_len(&On(engine), batch, seq)?];
            layer.forward(&mut On(engine), &attn, x, outputs, &mut scratch)?;
        }
        let mut produced = Produced::default();
        produced.put("y", &[batch, seq, layer.d_out()], &y);
        produced.put("weights", &[batch, seq, seq], &weights);
        if loaded.case.op.ends_with("backward") {
            let mha = layer.as_multi_head()?;
            gradients(&mut produced, loaded, &mha, &attn, x)?;
        }
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// `d_x`, `d_w_…`, `d_b_…` of a self-attending module.
fn gradients<T: Number + Stored>(
    produced: &mut Produced,
    loaded: Loaded<'_>,
    layer: &MultiHeadAttention<'_, T>,
    attn: &Attention<'_>,
    x: View<'_, T>,
) -> core::result::Result<(), Stop> {
    let (dy, [batch, _, seq, features]) = (sequence::<T>(loaded, "dy")?, x.sizes());
    let mut dx = vec![0.0f64; batch * seq * features];
    let mut weights = Vec::new();
    for part in ["q", "k", "v", "o"] {
        let [d_in, d_out] = loaded.input(&format!("w_{part}"))?.sizes()?;
        weights.push((part, [d_in, d_out], vec![0.0f64; d_in * d_out], vec![0.0f64; d_out]));
    }
    let mut wanted = ModuleGradients::new();
    wanted = wanted.inputs(InputGradients::Same(ViewMut::new(&mut dx, Layout::Bhsd, x.sizes())?));
    for (part, [d_in, d_out], dw, db) in &mut weights {
        let slot = LinearGradients::new(dw, *d_in, *d_out)?.bias(db);
        wanted = match *part {
            "q" => wanted.q(slot),
            "k" => wanted.k(slot),
            "v" => wanted.v(slot),
            _ => wanted.out(slot),
        };
    }
    let mut scratch = vec![0.0; layer.backward_scratch_len(&module::Reference, batch, seq, seq)?];
    layer.backward(&mut module::Reference, attn, x, dy, wanted, &mut scratch)?;
    produced.put("d_x", &[batch, seq, features], &dx);
    for (part, shape, dw, db) in &weights {
        produced.put(&format!("d_w_{part}"), shape, dw);
        produced.put(&format!("d_b_{part}"), &shape[1..], db);
    }
    Ok(())
}

pub(super) fn concat<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Answer {
    fn run<E: Engine, T>(engine: &E, loaded: Loaded<'_>) -> Answer
    where
        T: Number + Stored,
        T::Compute: Number,
    {
        /// One head of a stack of weights and biases.
        fn one<'t, T: Number + Stored>(
            loaded: Loaded<'t>,
            [w, b]: [&str; 2],
            head: usize,
        ) -> core::result::Result<Linear<'t, T>, Stop> {
            let weight = loaded.input(w)?;
            let [_, d_in, d_out] = weight.sizes()?;
            let layer = Linear::new(&weight.values()?[head * d_in * d_out..][..d_in * d_out], d_in, d_out)?;
            match loaded.optional(b)? {
                Some(bias) => Ok(layer.bias(&bias.values()?[head * d_out..][..d_out])?),
                None => Ok(layer),
            }
        }
        let mut heads = Vec::new();
        for head in 0..loaded.case.required_size("num_heads")? {
            heads.push(SelfAttention::new(
                one::<T>(loaded, ["w_q", "b_q"], head)?,
                one(loaded, ["w_k", "b_k"], head)?,
                one(loaded, ["w_v", "b_v"], head)?,
            )?);
        }
        let layer = ConcatHeads::new(&heads)?;
        let (x, attn) = (sequence::<T>(loaded, "x")?, options(loaded)?);
        let [batch, _, seq, _] = x.sizes();
        let mut y = vec![T::default(); batch * seq * layer.d_out()];
        let out = ViewMut::new(&mut y, Layout::Bhsd, [batch, 1, seq, layer.d_out()])?;
        if engine.is_exact() {
            let mut scratch = vec![0.0; layer.scratch_len(&module::Reference, batch, seq)?];
            layer.forward(&mut module::Reference, &attn, x, out, &mut scratch)?;
        } else {
            let mut scratch = vec![T::Compute::default(); layer.scratch_len(&On(engine), batch, seq)?];
            layer.forward(&mut On(engine), &attn, x, out, &mut scratch)?;
        }
        let mut produced = Produced::default();
        produced.put("y", &[batch, seq, layer.d_out()], &y);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

pub(super) fn fused<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Answer {
    fn run<E: Engine, T>(engine: &E, loaded: Loaded<'_>) -> Answer
    where
        T: Number + Stored,
        T::Compute: Number,
    {
        let (q_heads, kv_heads) = (loaded.case.required_size("num_heads")?, loaded.case.required_size("num_kv_heads")?);
        let q = linear::<T>(loaded, "w_q", "b_q")?;
        let width = q.d_out();
        let layer = MultiHeadAttention::new(
            q_heads,
            kv_heads,
            q,
            linear(loaded, "w_k", "b_k")?,
            linear(loaded, "w_v", "b_v")?,
        )?
        .output(linear(loaded, "w_o", "b_o")?)?;
        let (x, attn) = (sequence::<T>(loaded, "x")?, options(loaded)?);
        let [batch, _, seq, _] = x.sizes();
        let (mut y, mut context) =
            (vec![T::default(); batch * seq * layer.d_out()], vec![T::default(); batch * seq * width]);
        let out = ViewMut::new(&mut y, Layout::Bhsd, [batch, 1, seq, layer.d_out()])?;
        let outputs = LayerOutputs::new(out).context(ViewMut::new(&mut context, Layout::Bhsd, [batch, 1, seq, width])?);
        if engine.is_exact() {
            let mut scratch = vec![0.0; layer.scratch_len(&module::Reference, batch, seq, seq)?];
            layer.forward(&mut module::Reference, &attn, x, outputs, &mut scratch)?;
        } else {
            let mut scratch = vec![T::Compute::default(); layer.scratch_len(&On(engine), batch, seq, seq)?];
            layer.forward(&mut On(engine), &attn, x, outputs, &mut scratch)?;
        }
        let mut produced = Produced::default();
        produced.put("y", &[batch, seq, layer.d_out()], &y);
        produced.put("context", &[batch, seq, width], &context);
        if loaded.case.op.ends_with("backward") {
            gradients(&mut produced, loaded, &layer, &attn, x)?;
        }
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}
