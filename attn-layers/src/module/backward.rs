//! The backward pass of a module: forward again in double precision, back through join, attention and projections.

use attn_core::backward::{self, Gradients};
use attn_core::engine::{AppendedGradients, Inputs, accumulate_all, check_derivatives, check_options};
use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Element, Layout, Result, View, ViewMut, reference};

use super::engine::Reference;
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
    pub(super) fn backward_scratch_len(&self, shape: &AttnShape) -> Result<usize> {
        let forward = total(&lens(shape)?)?;
        let [q, k, v, context, _] = lens(shape)?;
        // The reference engine's row of scores is taken from the same place as the backward sweep's scratch.
        let sweep = backward::scratch_len(shape)?.max(reference::scratch_len(shape));
        total(&[forward, q, k, v, context, total(&appended_lens(shape))?, sweep])
    }

    pub(super) fn backward<G: Element, O: Element, M: Mods + Sync>(
        &self,
        attn: &Attention<'_, M>,
        x: &Sources<'_, T>,
        dy: View<'_, G>,
        gradients: ModuleGradients<'_, O>,
        mut scratch: &mut [f64],
    ) -> Result<()> {
        let shape = self.shape_of(x)?;
        let problem = Problem::of_shape(attn, shape)?;
        self.appended.check(&problem)?;
        check_rows("dy against the module output", &shape, self.d_out(), dy.sizes())?;
        self.check_gradients(&shape, x, &gradients)?;
        AttnError::check_len("module backward scratch", self.backward_scratch_len(&shape)?, scratch.len())?;

        // Forward again, in double precision.
        let mut buffers = Buffers::take(&mut scratch, &shape)?;
        let [dq, dk, dv, dcontext] = {
            let [q, k, v, context, _] = lens(&shape)?;
            [take(&mut scratch, q)?, take(&mut scratch, k)?, take(&mut scratch, v)?, take(&mut scratch, context)?]
        };
        let [dbias_k, dbias_v] = {
            let [k, v] = appended_lens(&shape);
            [take(&mut scratch, k)?, take(&mut scratch, v)?]
        };
        self.attend(&mut Reference, &problem, x, &mut buffers, scratch)?;
        let [q, k, v, context] = buffers.views(&shape)?;
        let [q_sizes, k_sizes, v_sizes, context_sizes] = tensors(&shape);
        // Back through the join. (`check_derivatives` has still to come: only scratch may be written before it.)
        self.back_through_join(dy, &mut ViewMut::new(dcontext, Layout::Bhsd, context_sizes)?)?;
        let dcontext = View::new(&*dcontext, Layout::Bhsd, context_sizes)?;
        let inputs = Inputs { q, k, v, dy: dcontext, appended: self.appended };
        check_derivatives(&problem, &inputs)?;

        // Back through the attention.
        let mut attention = Gradients::new(
            ViewMut::new(dq, Layout::Bhsd, q_sizes)?,
            ViewMut::new(dk, Layout::Bhsd, k_sizes)?,
            ViewMut::new(dv, Layout::Bhsd, v_sizes)?,
        );
        (attention.bias, attention.sinks) = (gradients.bias, gradients.sinks);
        let appended = AppendedGradients { k: &mut *dbias_k, v: &mut *dbias_v };
        accumulate_all(&problem, &inputs, &mut attention, Some(appended), scratch);
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
                *to = O::from_f64(*from);
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
    fn back_through_join<G: Element>(&self, dy: View<'_, G>, dcontext: &mut ViewMut<'_, f64>) -> Result<()> {
        match &self.out {
            Some(out) => {
                let by_input = out.by_input()?;
                let [batch, ..] = dcontext.sizes();
                for b in 0..batch {
                    for_each_feature(dcontext.sizes(), |i, head, d, seq| {
                        dcontext.set(b, head, seq, d, input_gradient(by_input, dy, b, seq, i));
                    });
                }
            }
            None => copy(dy, dcontext),
        }
        Ok(())
    }
}

/// `dx = Σ d·Wᵀ` over the uses of an input, summed in `f64` and rounded once.
fn sum_into<T: Element, O: Element, const N: usize>(
    dx: &mut ViewMut<'_, O>,
    uses: &[(&Linear<'_, T>, View<'_, f64>); N],
) -> Result<()> {
    let sizes = dx.sizes();
    let [batch, ..] = sizes;
    for b in 0..batch {
        for_each_feature(sizes, |i, head, d, seq| {
            let part = |(layer, dy): &(&Linear<'_, T>, View<'_, f64>)| {
                layer.by_input().map_or(0.0, |by_input| input_gradient(by_input, *dy, b, seq, i))
            };
            dx.set(b, head, seq, d, O::from_f64(uses.iter().map(part).sum()));
        });
    }
    Ok(())
}
