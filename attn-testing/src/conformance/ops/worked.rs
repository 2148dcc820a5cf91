//! `worked_example`: one head, every intermediate value.

use attn_core::{Align, Attention, Element, Layout, Mask, View, ViewMut};
use attn_layers::{Linear, steps};

use super::attention::{attend, weights};
use crate::conformance::Tensor;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, Number};

pub(super) fn example<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// `x·w`, both matrices.
fn project<T: Number + Stored>(x: &Tensor, w: &Tensor) -> Result<([usize; 2], Vec<T>), Stop> {
    let ([rows, _], [d_in, d_out]) = (x.sizes()?, w.sizes()?);
    let mut y = vec![T::default(); rows * d_out];
    let layer = Linear::new(w.values::<T>()?, d_in, d_out)?;
    layer.forward(View::matrix(x.values::<T>()?, rows, d_in)?, &mut ViewMut::matrix(&mut y, rows, d_out)?)?;
    Ok(([rows, d_out], y))
}

fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    let x = loaded.input("x")?;
    let mut produced = Produced::default();
    let mut projected = Vec::new();
    for (role, weight) in [("q", "w_q"), ("k", "w_k"), ("v", "w_v")] {
        let (shape, values) = project::<T>(x, loaded.input(weight)?)?;
        produced.put(role, &shape, &values);
        projected.push((shape, values));
    }
    let [(q_shape, q), (k_shape, k), (v_shape, v)] = projected.as_slice() else {
        return Err(Stop::Fail("three projections".to_owned()));
    };
    let (q, k, v) = (
        View::matrix(q, q_shape[0], q_shape[1])?,
        View::matrix(k, k_shape[0], k_shape[1])?,
        View::matrix(v, v_shape[0], v_shape[1])?,
    );
    let tokens = q_shape[0];
    let square = [tokens, tokens];

    let plain = match loaded.case.number("scale")? {
        Some(scale) => Attention::new().scale(scale),
        None => Attention::new(),
    };
    let mut scores = vec![T::Compute::default(); tokens * tokens];
    steps::scores(q, k, &mut ViewMut::matrix(&mut scores, tokens, tokens)?)?;
    produced.put("scores", &square, &scores);
    steps::scaled_scores(&plain, q, k, &mut ViewMut::matrix(&mut scores, tokens, tokens)?)?;
    produced.put("scaled_scores", &square, &scores);

    for (prefix, attn) in [("", plain), ("causal_", plain.mask(Mask::causal(Align::TopLeft)))] {
        let (context, lse) = attend(engine, &attn, q, k, v, Layout::Bhsd)?;
        let mut rows = vec![T::Compute::from_f64(-12345.0); tokens * tokens];
        weights(engine, &attn, q, k, v, &lse, &mut rows)?;
        produced.put(&format!("{prefix}weights"), &square, &rows);
        produced.put(&format!("{prefix}context"), v_shape, &context);
    }
    Ok(produced)
}
