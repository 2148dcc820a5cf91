//! `sdpa_backward`, `sink_attention_backward`, `sdpa_dropout_backward`: the forward call and its gradients.

use attn_core::backward::{Gradients, gradients, scratch_len};
use attn_core::{AttnShape, Layout, ViewMut};

use super::attention::{Tables, attend, options};
use super::{Loaded, Produced, Stop, by_dtype, check_dtype};
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, Number};

pub(super) fn attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (q, k, v) = (loaded.input("q")?.view::<T>()?, loaded.input("k")?.view()?, loaded.input("v")?.view()?);
        let dy = loaded.input("dy")?.view::<T>()?;
        let tables = Tables::of(loaded, k.sizes()[2])?;
        let attn = options(loaded, &tables)?;
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        let mut produced = Produced::default();
        let (y, lse) = attend(engine, &attn, q, k, v, Layout::Bhsd)?;
        produced.put("y", &shape.output(), &y);
        produced.put("lse", &[shape.batch, shape.q_heads, shape.q_len], &lse);

        let buffer = |sizes: [usize; 4]| vec![T::Compute::default(); sizes.iter().product()];
        let (mut dq, mut dk, mut dv) = (buffer(q.sizes()), buffer(k.sizes()), buffer(v.sizes()));
        let mut dsinks = vec![0.0; shape.q_heads];
        let grads = Gradients::new(
            ViewMut::new(&mut dq, Layout::Bhsd, q.sizes())?,
            ViewMut::new(&mut dk, Layout::Bhsd, k.sizes())?,
            ViewMut::new(&mut dv, Layout::Bhsd, v.sizes())?,
        )
        .sinks(&mut dsinks);
        gradients(&attn, q, k, v, dy, grads, &mut vec![0.0; scratch_len(&shape)?])?;
        for (role, sizes, values) in [("dq", q.sizes(), &dq), ("dk", k.sizes(), &dk), ("dv", v.sizes(), &dv)] {
            produced.put(role, &sizes, values);
        }
        produced.put("dsinks", &[shape.q_heads], &dsinks);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}
