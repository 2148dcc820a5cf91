//! `attn.heatmap`: the page of `attn-heatmap` from arrays.

use attn_core::half::{bf16, f16};
use attn_core::score::At;
use attn_core::{AttnShape, Bias, Layout, View};
use attn_heatmap::{Drop, Layer, Scene};
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyValueError};
use pyo3::prelude::*;

use crate::call::{Inputs, with_kind};
use crate::fold::Fold;
use crate::kind::Kind;
use crate::options::{Options, raised};
use crate::raw::{Plain, Tensor};
use crate::tensor::shape;

/// Numbers that a page may hold: more make it slower than a browser's users wait.
const NUMBERS: usize = 1 << 21;
/// Cells in a row or column that can be told apart.
const TOKENS: usize = 128;

/// The texts of a page.
pub(crate) struct Texts {
    pub(crate) title: Option<String>,
    pub(crate) note: Option<String>,
    pub(crate) tokens: Option<Vec<String>>,
    pub(crate) keys: Option<Vec<String>>,
}

/// The page of some layers, all under the same options.
pub(crate) fn page(py: Python<'_>, layers: &[Inputs<'_>], options: &mut Options, texts: Texts) -> PyResult<String> {
    let Some(first) = layers.first() else {
        return Err(PyValueError::new_err("query has no layers, at least one is wanted"));
    };
    let whole = first.shape()?;
    let (queries, keys) = (whole.q_len, whole.kv_len);
    for (name, count) in [("queries", queries), ("keys", keys)] {
        if count == 0 || count > TOKENS {
            return Err(PyValueError::new_err(format!("{count} {name}; 1 to {TOKENS} fit on a page")));
        }
    }
    let mut numbers = 0usize;
    for inputs in layers {
        let of = inputs.shape()?;
        if of.batch != 1 {
            let (batch, found) = (of.batch, shape(&inputs.q));
            let text = format!("query has the shape {found:?}, of {batch} sequences; a page shows one");
            return Err(PyValueError::new_err(text));
        }
        if (of.q_len, of.kv_len) != (queries, keys) {
            let (q_len, kv_len) = (of.q_len, of.kv_len);
            let text = format!("a layer has {q_len} queries and {kv_len} keys, the first one {queries} and {keys}");
            return Err(PyValueError::new_err(text));
        }
        if of.q_heads == 0 {
            return Err(PyValueError::new_err("query has 0 heads, at least 1 is wanted"));
        }
        let vectors = (queries + keys).saturating_mul(of.head_dim.saturating_add(of.value_dim));
        let cells = queries * keys * if options.has_dropout() { 3 } else { 2 };
        numbers = numbers.saturating_add(of.q_heads.saturating_mul(vectors.saturating_add(cells)));
    }
    if numbers > NUMBERS {
        let text = format!("the page would hold {numbers} numbers, at most {NUMBERS} are allowed: fewer heads, layers");
        return Err(PyValueError::new_err(text + " or tokens"));
    }
    options.fit(whole.q_heads, 1)?;
    let dropout = options.take_dropout().map(|(p, seed)| Drop { p, seed });
    let tokens = named("tokens", texts.tokens, queries)?;
    // Keys are the same tokens, unless they are others.
    let keys = match (texts.keys, keys == queries) {
        (None, true) => None,
        (given, _) => Some(named("key_tokens", given, keys)?),
    };
    let mut scene = Scene {
        title: texts.title.unwrap_or_else(|| tokens.join(" ")),
        note: texts.note.unwrap_or_default(),
        tokens,
        keys,
        masks: vec!["as given".into()],
        dropout,
        layers: Vec::new(),
    };
    for (at, inputs) in layers.iter().enumerate() {
        scene.layers.push(layer(py, format!("Layer {}", at + 1), inputs, options, dropout)?);
    }
    Ok(py.detach(|| scene.html()))
}

/// One layer, computed without the interpreter's lock.
fn layer(
    py: Python<'_>,
    name: String,
    inputs: &Inputs<'_>,
    options: &Options,
    dropout: Option<Drop>,
) -> PyResult<Layer> {
    let wide =
        with_kind!(inputs.q.kind, |T| [widened::<T>(&inputs.q)?, widened::<T>(&inputs.k)?, widened::<T>(&inputs.v)?]);
    let [q, k, v] = wide.each_ref().map(|(x, sizes)| View::new(x, Layout::Bhsd, *sizes).map_err(raised));
    let (q, k, v) = (q?, k?, v?);
    let (fold, bools) = (inputs.fold(&[])?, inputs.bools());
    let masks = inputs.masks(fold, &bools, 0)?;
    let attn = options.attention(0, 1, masks);
    let shape = inputs.shape()?;
    attn.check(&shape).map_err(raised)?;
    if let Some(bias) = &masks.bias {
        check_numbers(bias, &shape)?;
    }
    py.detach(|| Layer::new(name, [q, k, v], &[attn], dropout)).map_err(raised)
}

/// Refuses a mask that would make weights NaN. It fits the shape.
fn check_numbers(bias: &Bias<'_>, shape: &AttnShape) -> PyResult<()> {
    for head in 0..shape.q_heads {
        for query in 0..shape.q_len {
            for key in 0..shape.kv_len {
                let number = bias.at(At { batch: 0, head, query, key });
                if number.is_nan() || number == f64::INFINITY {
                    let text = format!("attn_mask is {number} for head {head}, query {query}, key {key}");
                    return Err(PyValueError::new_err(text + "; on a page numbers and -inf are allowed"));
                }
            }
        }
    }
    Ok(())
}

/// The numbers of a tensor of one sequence in float32, and their sizes.
fn widened<T: Plain + attn_core::Element<Compute = f32>>(tensor: &Tensor<'_>) -> PyResult<(Vec<f32>, [usize; 4])> {
    let view = Fold::ONE.view::<T>(tensor, 0)?;
    let sizes = view.sizes();
    let mut x = Vec::new();
    if x.try_reserve_exact(sizes.into_iter().product()).is_err() {
        return Err(PyMemoryError::new_err(format!("{} cannot be widened to float32", tensor.name)));
    }
    for head in 0..sizes[1] {
        for token in 0..sizes[2] {
            x.extend(view.row(0, head, token).iter().map(|x| x.widen()));
        }
    }
    if x.iter().any(|x: &f32| !x.is_finite()) {
        let text = format!("not supported: NaN or infinities in {}, on a page", tensor.name);
        return Err(PyNotImplementedError::new_err(text));
    }
    Ok((x, sizes))
}

/// As many tokens as there are rows: those given, or their numbers.
fn named(name: &str, given: Option<Vec<String>>, count: usize) -> PyResult<Vec<String>> {
    match given {
        Some(tokens) if tokens.len() != count => {
            Err(PyValueError::new_err(format!("{name} has {} texts, {count} are wanted", tokens.len())))
        }
        Some(tokens) => Ok(tokens),
        None => Ok((0..count).map(|n| n.to_string()).collect()),
    }
}
