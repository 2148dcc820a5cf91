//! `wide_attention` and what `attention_backward` adds: values that are a part of the keys, tensors stored in other
//! orders, gradients that repeat.

use attn_core::kv_cache::CacheView;
use attn_core::{Align, Layout, Outputs, View, ViewMut};
use serde_json::Value;

use super::attention::{Tables, attend, causal, options};
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, Number};

/// An input of rank 4 as a view of the sizes `[batch, heads, seq, dim]`, in whatever order `layouts` says it is stored.
pub(super) fn stored<'t, T: Stored>(loaded: Loaded<'t>, role: &str) -> Result<View<'t, T>, Stop> {
    let tensor = loaded.input(role)?;
    let layouts = loaded.case.object("layouts")?;
    match layouts.and_then(|layouts| layouts.get(role)).filter(|word| !word.is_null()).map(Value::as_str) {
        None | Some(Some("bhsd")) => tensor.view(),
        Some(Some("bshd")) => {
            let [batch, seq, heads, dim] = tensor.sizes()?;
            Ok(View::new(tensor.values()?, Layout::Bshd, [batch, heads, seq, dim])?)
        }
        Some(Some("bhds")) => {
            let [batch, heads, dim, seq] = tensor.sizes()?;
            let [_, head, row, _] = Layout::Bhsd.strides([batch, heads, dim, seq])?;
            Ok(View::strided(tensor.values()?, [batch, heads, seq, dim], [head * heads as isize, head, 1, row], 0)?)
        }
        Some(other) => Err(Stop::Fail(format!("layout {other:?} of {role} is not understood"))),
    }
}

/// The values: an input of their own, or the first `v_dim` dims of the keys, read in place.
pub(super) fn values<'t, T: Stored>(loaded: Loaded<'t>, k: View<'t, T>) -> Result<View<'t, T>, Stop> {
    match (loaded.case.inputs.contains_key("v"), loaded.case.size("v_dim")?) {
        (true, None) => stored(loaded, "v"),
        (false, Some(value_dim)) => {
            let [batch, heads, seq, head_dim] = k.sizes();
            if value_dim > head_dim {
                return Err(Stop::Fail(format!("v_dim {value_dim} of keys of {head_dim}")));
            }
            Ok(View::strided(k.data(), [batch, heads, seq, value_dim], k.strides(), k.offset())?)
        }
        (true, Some(_)) => Err(Stop::Fail("both v and v_dim".to_owned())),
        (false, None) => Err(Stop::Fail("input v is missing".to_owned())),
    }
}

/// A tensor repeated (stride 0) along the axes where it has one element and `to` has more.
pub(super) fn repeated<T: Copy>(x: View<'_, T>, to: [usize; 4]) -> Result<View<'_, T>, Stop> {
    let (mut sizes, mut strides) = (x.sizes(), x.strides());
    for axis in 0..4 {
        if sizes[axis] == 1 && to[axis] > 1 {
            (sizes[axis], strides[axis]) = (to[axis], 0);
        }
    }
    Ok(View::strided(x.data(), sizes, strides, x.offset())?)
}

/// One call; from engines that read caches a second answer, a step over the same rows as a cache.
pub(super) fn attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (q, k) = (loaded.input("q")?.view::<T>()?, loaded.input("k")?.view()?);
        let v = values(loaded, k)?;
        let tables = Tables::of(loaded, k.sizes()[2])?;
        let attn = options(loaded, &tables)?;
        let ([batch, heads, q_len, _], [_, _, kv_len, value_dim]) = (q.sizes(), v.sizes());
        let (sizes, rows) = ([batch, heads, q_len, value_dim], [batch, heads, q_len]);
        let mut produced = Produced::default();
        let (y, lse) = attend(engine, &attn, q, k, v, Layout::Bhsd)?;
        produced.put("y", &sizes, &y);
        produced.put("lse", &rows, &lse);
        let step = causal(loaded.case)? == Some(Align::BottomRight) && q_len <= kv_len;
        if engine.reads_caches() && step {
            let mut y = vec![T::from_f64(-12345.0); sizes.iter().product()];
            let mut lse = vec![T::Compute::default(); rows.iter().product()];
            let outputs = Outputs::new(ViewMut::new(&mut y, Layout::Bhsd, sizes)?).lse(&mut lse);
            engine.step(&attn, q, CacheView::of_tensors(k, v)?, outputs)?;
            produced.put("y", &sizes, &y);
            produced.put("lse", &rows, &lse);
        }
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}
