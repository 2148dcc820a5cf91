//! Attention calls with their gradients: `sdpa_backward`, `sink_attention_backward`, `sdpa_dropout_backward`,
//! `attention_backward`, `wide_attention_backward`.

use attn_core::backward::{Gradients, gradients, scratch_len};
use attn_core::{AttnShape, Element, Layout, View, ViewMut};

use super::attention::{Tables, attend, options};
use super::wide::{repeated, stored, values};
use crate::conformance::Data;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, GradientCall, Number};

pub(super) fn attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (q, k) = (stored::<T>(loaded, "q")?, stored(loaded, "k")?);
        let v = values(loaded, k)?;
        let tables = Tables::of(loaded, k.sizes()[2])?;
        let attn = options(loaded, &tables)?;
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        let dy = repeated(stored::<T>(loaded, "dy")?, shape.output())?;
        let mut produced = Produced::default();
        let (y, lse) = attend(engine, &attn, q, k, v, Layout::Bhsd)?;
        produced.put("y", &shape.output(), &y);
        produced.put("lse", &[shape.batch, shape.q_heads, shape.q_len], &lse);

        let buffer = |sizes: [usize; 4]| vec![T::Compute::from_f64(-12345.0); sizes.iter().product()];
        let (mut dq, mut dk, mut dv) = (buffer(q.sizes()), buffer(k.sizes()), buffer(v.sizes()));
        let mut dsinks = vec![0.0; shape.q_heads];
        let mut grads = Gradients::new(
            ViewMut::new(&mut dq, Layout::Bhsd, q.sizes())?,
            ViewMut::new(&mut dk, Layout::Bhsd, k.sizes())?,
            ViewMut::new(&mut dv, Layout::Bhsd, v.sizes())?,
        )
        .sinks(&mut dsinks);
        // A mask of floats is a bias and has a gradient of its own shape; one of bools has none.
        let bias = loaded.optional("mask")?.filter(|mask| !matches!(mask.data, Data::Bool(_)));
        let mut dmask = vec![-12345.0; bias.map_or(0, |mask| mask.len())];
        if let Some(mask) = bias {
            let sizes = View::broadcast(&dmask, &mask.shape)?.sizes();
            grads = grads.bias(ViewMut::new(&mut dmask, Layout::Bhsd, sizes)?);
        }
        if engine.gives_gradients() {
            let out = View::new(&y, Layout::Bhsd, shape.output())?;
            T::call_gradients(engine, GradientCall { attn: &attn, q, k, v, out, lse: &lse, dy, gradients: grads })?;
        } else {
            gradients(&attn, q, k, v, dy, grads, &mut vec![0.0; scratch_len(&shape)?])?;
        }

        if loaded.case.inputs.contains_key("v") {
            produced.put("dv", &v.sizes(), &dv);
        } else if shape.value_dim > 0 {
            // k was given twice, as keys and as values: its gradient is the sum of the two arguments'.
            for (dk, dv) in dk.chunks_mut(shape.head_dim).zip(dv.chunks(shape.value_dim)) {
                dk.iter_mut().zip(dv).for_each(|(dk, dv)| *dk += *dv);
            }
        }
        produced.put("dq", &q.sizes(), &dq);
        produced.put("dk", &k.sizes(), &dk);
        produced.put("dsinks", &[shape.q_heads], &dsinks);
        if let Some(mask) = bias {
            produced.put("dmask", &mask.shape, &dmask);
        }
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}
