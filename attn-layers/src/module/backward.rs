//! The backward pass of a module: forward again, back through join, attention (by the engine) and projections.

use attn_core::backward::Gradients;
use attn_core::element::Real;
use attn_core::engine::{AppendedGradients, Saved, add_appended, check_options};
use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Element, Layout, Result, View, ViewMut};

use super::engine::{GradientEngine, SavedHeads};
use super::gradients::{InputGradients, ModuleGradients};
use super::multi_head::Fused;
use super::outputs::check_rows;
use super::run::{Buffers, Layer, copy, lens, take, tensors, total};
use super::sources::Sources;
use crate::projection::{Linear, for_each_feature, input_gradient};

/// Lengths of the gradients of the appended key and value.
fn appended_lens(shape: &AttnShape) -> [usize; 2] {
    [shape.kv_heads * shape.head_dim, shape.kv_heads * shape.value_dim] // as long as weights that exist
}

impl<'a, T: Element> Layer<'a, T, Fused<'a, T>> {
    pub(super) fn backward_scratch_len<E: GradientEngine<T>>(&self, engine: &E, shape: &AttnShape) -> Result<usize> {
        let forward = total(&lens(shape)?)?;
        let [q, k, v, context, _] = lens(shape)?;
        // Both passes of the engine take their scratch from the same place.
        let engines = engine.gradients_scratch_len(shape)?.max(engine.scratch_len(shape)?);
        total(&[forward, q, k, v, context, total(&appended_lens(shape))?, engines])
    }

    pub(super) fn backward<E: GradientEngine<T>, G: Element, O: Element, M: Mods + Sync>(
        &self,
        engine: &mut E,
        attn: &Attention<'_, M>,
        x: &Sources<'_, T>,
        dy: View<'_, G>,
        gradients: ModuleGradients<'_, O>,
        mut scratch: &mut [E::Mid],
    ) -> Result<()> {
        let shape = self.shape_of(x)?;
        let problem = Problem::of_shape(attn, shape)?;
        self.appended.check(&problem)?;
        check_rows("dy against the module output", &shape, self.d_out(), dy.sizes())?;
        self.check_gradients(&shape, x, &gradients)?;
        let needed = self.backward_scratch_len(engine, &shape)?;
        AttnError::check_len("module backward scratch", needed, scratch.len())?;

        // Forward again.
        let mut buffers = Buffers::take(&mut scratch, &shape)?;
        let [dq, dk, dv, dcontext] = {
            let [q, k, v, context, _] = lens(&shape)?;
            [take(&mut scratch, q)?, take(&mut scratch, k)?, take(&mut scratch, v)?, take(&mut scratch, context)?]
        };
        let [dbias_k, dbias_v] = {
            let [k, v] = appended_lens(&shape);
            [take(&mut scratch, k)?, take(&mut scratch, v)?]
        };
        self.attend(engine, &problem, x, &mut buffers, scratch)?;
        let [q, k, v, context] = buffers.views(&shape)?;
        let [q_sizes, k_sizes, v_sizes, context_sizes] = tensors(&shape);
        // Back through the join. (The engine may still refuse: only scratch may be written before it.)
        self.back_through_join(dy, &mut ViewMut::new(dcontext, Layout::Bhsd, context_sizes)?)?;
        let dcontext = View::new(&*dcontext, Layout::Bhsd, context_sizes)?;

        // Back through the attention.
        let mut attention = Gradients::new(
            ViewMut::new(dq, Layout::Bhsd, q_sizes)?,
            ViewMut::new(dk, Layout::Bhsd, k_sizes)?,
            ViewMut::new(dv, Layout::Bhsd, v_sizes)?,
        );
        (attention.bias, attention.sinks) = (gradients.bias, gradients.sinks);
        let saved = SavedHeads { q, k, v, out: context, lse: buffers.lse, dy: dcontext };
        engine.gradients(attn, saved, attention, scratch)?;
        if self.appended.count() != 0 {
            let saved = Saved { out: context, lse: buffers.lse };
            let mut dq = ViewMut::new(dq, Layout::Bhsd, q_sizes)?;
            let to = AppendedGradients { k: &mut *dbias_k, v: &mut *dbias_v };
            add_appended(&problem, &self.appended, (q, dcontext), saved, &mut dq, to);
        }
        let dq = View::new(&*dq, Layout::Bhsd, q_sizes)?;
        let dk = View::new(&*dk, Layout::Bhsd, k_sizes)?;
        let dv = View::new(&*dv, Layout::Bhsd, v_sizes)?;

        // Back through the projections.
        if let Some(mut out) = gradients.out {
            out.write(context, dy);
        }
        for (to, x, d) in [(gradients.q, x.query, dq), (gradients.k, x.key, dk), (gradients.v, x.value, dv)] {
            if let Some(mut to) = to {
                to.write(x, d);
            }
        }
        if let Some((bias_k, bias_v)) = gradients.bias_kv {
            for (to, from) in bias_k.iter_mut().zip(&*dbias_k).chain(bias_v.iter_mut().zip(&*dbias_v)) {
                *to = O::from_f64(from.to_f64());
            }
        }
        let Fused { q: w_q, k: w_k, v: w_v, .. } = &self.projections;
        match gradients.inputs {
            None => Ok(()),
            Some(InputGradients::Same(mut dx)) => sum_into(&mut dx, &[(w_q, dq), (w_k, dk), (w_v, dv)]),
            Some(InputGradients::Cross { mut query, mut memory }) => {
                sum_into(&mut query, &[(w_q, dq)])?;
                sum_into(&mut memory, &[(w_k, dk), (w_v, dv)])
            }
            Some(InputGradients::Separate { mut query, mut key, mut value }) => {
                sum_into(&mut query, &[(w_q, dq)])?;
                sum_into(&mut key, &[(w_k, dk)])?;
                sum_into(&mut value, &[(w_v, dv)])
            }
        }
    }

    fn check_gradients<O: Element>(
        &self,
        shape: &AttnShape,
        x: &Sources<'_, T>,
        gradients: &ModuleGradients<'_, O>,
    ) -> Result<()> {
        if let Some(inputs) = &gradients.inputs {
            inputs.check(x)?;
        }
        let Fused { q, k, v, .. } = &self.projections;
        for (to, layer) in [(&gradients.q, q), (&gradients.k, k), (&gradients.v, v)] {
            if let Some(to) = to {
                to.check(layer)?;
            }
        }
        match (&gradients.out, &self.out) {
            (Some(to), Some(layer)) => to.check(layer)?,
            (Some(_), None) => {
                return Err(AttnError::Unsupported { what: "an output projection gradient of a module without one" });
            }
            (None, _) => {}
        }
        if let Some((bias_k, bias_v)) = &gradients.bias_kv {
            if self.appended.bias.is_none() {
                return Err(AttnError::Unsupported { what: "a bias_k gradient of a module without one" });
            }
            let [k, v] = appended_lens(shape);
            AttnError::check_size("gradient of bias_k", k, bias_k.len())?;
            AttnError::check_size("gradient of bias_v", v, bias_v.len())?;
        }
        check_options(shape, gradients.bias.as_ref(), gradients.sinks.as_deref())
    }

    /// `dcontext = dy·W_oᵀ`, or `dy` itself.
    fn back_through_join<G: Element, R: Real>(&self, dy: View<'_, G>, dcontext: &mut ViewMut<'_, R>) -> Result<()> {
        match &self.out {
            Some(out) => {
                let by_input = out.by_input()?;
                let [batch, ..] = dcontext.sizes();
                for b in 0..batch {
                    for_each_feature(dcontext.sizes(), |i, head, d, seq| {
                        dcontext.set(b, head, seq, d, R::of(input_gradient(by_input, dy, b, seq, i)));
                    });
                }
            }
            None => copy(dy, dcontext),
        }
        Ok(())
    }
}

/// `dx = Σ d·Wᵀ` over the uses of an input, summed in `f64` and rounded once.
fn sum_into<T: Element, R: Real, O: Element, const N: usize>(
    dx: &mut ViewMut<'_, O>,
    uses: &[(&Linear<'_, T>, View<'_, R>); N],
) -> Result<()> {
    let sizes = dx.sizes();
    let [batch, ..] = sizes;
    for b in 0..batch {
        for_each_feature(sizes, |i, head, d, seq| {
            let part = |(layer, dy): &(&Linear<'_, T>, View<'_, R>)| {
                layer.by_input().map_or(0.0, |by_input| input_gradient(by_input, *dy, b, seq, i))
            };
            dx.set(b, head, seq, d, O::from_f64(uses.iter().map(part).sum()));
        });
    }
    Ok(())
}
