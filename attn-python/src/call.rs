//! One call from Python: tensors read, sizes checked, outputs made, the interpreter's lock released.

use std::borrow::Cow;

use attn_core::half::{bf16, f16};
use attn_core::mask::BlockSparse;
use attn_core::{AttnShape, Outputs};
use attn_simd::{KernelElement, Plan};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::fold::Fold;
use crate::interrupt;
use crate::kind::Kind;
use crate::numbers::Blocks;
use crate::options::{Masks, Options, raised};
use crate::pool::Work;
use crate::raw::{AXES, Out, Plain, Tensor};
use crate::tensor::{Library, count_write, empty, empty_as, handed, library, read, shape};

/// The number types that the kernels compute in, each with a piece of code.
macro_rules! with_kind {
    ($kind:expr, |$t:ident| $body:expr) => {
        match $kind {
            Kind::F32 => {
                type $t = f32;
                $body
            }
            Kind::F16 => {
                type $t = f16;
                $body
            }
            _ => {
                type $t = bf16;
                $body
            }
        }
    };
}
pub(crate) use with_kind;

/// q, k, v and the mask.
pub(crate) struct Inputs<'py> {
    pub(crate) q: Tensor<'py>,
    pub(crate) k: Tensor<'py>,
    pub(crate) v: Tensor<'py>,
    pub(crate) mask: Option<Tensor<'py>>,
    /// Blocks that are seen, and the queries and keys of one.
    blocks: Option<(Tensor<'py>, usize, usize)>,
}

/// The booleans of mask and blocks.
pub(crate) type Bools<'a> = [Option<Cow<'a, [bool]>>; 2];

impl<'py> Inputs<'py> {
    /// Reads them, and refuses types and axes that do not fit together.
    pub(crate) fn read(
        query: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        attn_mask: Option<&Bound<'py, PyAny>>,
        enable_gqa: bool,
        blocks: Option<&Blocks>,
    ) -> PyResult<Self> {
        let (q, k, v) = (read("query", query)?, read("key", key)?, read("value", value)?);
        if !matches!(q.kind, Kind::F32 | Kind::F16 | Kind::Bf16) {
            let kind = q.kind.name();
            let text = format!("query is {kind}; float32, float16 and bfloat16 are supported");
            return Err(PyTypeError::new_err(text));
        }
        if q.axes < 2 {
            return Err(PyValueError::new_err(format!("query has {} axes, 2 to {AXES} are allowed", q.axes)));
        }
        for other in [&k, &v] {
            same_kind(&q, other)?;
            if other.axes != q.axes {
                let text = format!("{} has {} axes, query has {}", other.name, other.axes, q.axes);
                return Err(PyValueError::new_err(text));
            }
            if other.sizes[..2] != q.sizes[..2] {
                return Err(PyValueError::new_err(format!(
                    "{} has the shape {:?}, query {:?}: the batch must be the same",
                    other.name,
                    shape(other),
                    shape(&q)
                )));
            }
        }
        let (q_heads, kv_heads) = (q.sizes[2], k.sizes[2]);
        if q_heads != kv_heads && !enable_gqa {
            return Err(PyValueError::new_err(format!(
                "query has {q_heads} heads, key has {kv_heads}; with enable_gqa=True query heads share those of key"
            )));
        }
        let mask = attn_mask.map(|mask| read("attn_mask", mask)).transpose()?;
        let read_blocks = |(blocks, rows, keys): &Blocks| -> PyResult<_> {
            let blocks = read("block_mask", blocks.bind(query.py()))?;
            if blocks.kind != Kind::Bool {
                return Err(PyTypeError::new_err(format!("block_mask is {}, bool is wanted", blocks.kind.name())));
            }
            Ok((blocks, *rows, *keys))
        };
        let blocks = blocks.map(read_blocks).transpose()?;
        for mask in mask.iter().chain(blocks.iter().map(|(blocks, ..)| blocks)) {
            if mask.axes > q.axes.max(4) {
                let text = format!("{} has {} axes, query has {}", mask.name, mask.axes, q.axes);
                return Err(PyValueError::new_err(text));
            }
        }
        let this = Self { q, k, v, mask, blocks };
        this.check_mask()?;
        Ok(this)
    }

    /// Refuses a mask that does not broadcast to the scores. One of blocks is checked by the engines.
    fn check_mask(&self) -> PyResult<()> {
        let Some(mask) = &self.mask else { return Ok(()) };
        let ([a, b, heads, queries, _], keys) = (self.q.sizes, self.k.sizes[3]);
        let fits = |(&found, wanted): (&usize, usize)| found == 1 || found == wanted;
        if mask.sizes.iter().zip([a, b, heads, queries, keys]).all(fits) {
            return Ok(());
        }
        let (found, wanted) = (shape(mask), self.sizes(&[queries, keys]));
        Err(PyValueError::new_err(format!("attn_mask has the shape {found:?}, which does not broadcast to {wanted:?}")))
    }

    /// How the leading axes fold, of these tensors and `others`.
    pub(crate) fn fold<'a>(&'a self, others: &[&'a Tensor<'py>]) -> PyResult<Fold> {
        let mut all: [&Tensor<'py>; 8] = [&self.q; 8];
        all[1] = &self.k;
        all[2] = &self.v;
        for (to, from) in all[3..].iter_mut().zip(others) {
            *to = from;
        }
        Fold::of(&all, self.mask.iter().chain(self.blocks.iter().map(|(blocks, ..)| blocks)))
    }

    /// The sizes of the whole, with all leading axes in the batch.
    pub(crate) fn shape(&self) -> PyResult<AttnShape> {
        let [a, b, ..] = self.q.sizes; // as of the others
        let batch = a.checked_mul(b).ok_or_else(|| PyValueError::new_err("query: the size overflows"))?;
        let sizes = |tensor: &Tensor<'_>| {
            let [.., h, s, d] = tensor.sizes;
            [batch, h, s, d]
        };
        AttnShape::new(sizes(&self.q), sizes(&self.k), sizes(&self.v)).map_err(raised)
    }

    /// Sizes of an output with these last axes.
    pub(crate) fn sizes(&self, last: &[usize]) -> Vec<usize> {
        let lead = &shape(&self.q)[..self.q.axes - 2];
        lead.iter().chain(last).copied().collect()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Tensor<'py>> {
        let blocks = self.blocks.iter().map(|(blocks, ..)| blocks);
        [&self.q, &self.k, &self.v].into_iter().chain(&self.mask).chain(blocks)
    }

    /// The booleans of the masks.
    pub(crate) fn bools(&self) -> Bools<'_> {
        [self.mask.as_ref().and_then(Tensor::bools), self.blocks.as_ref().and_then(|(blocks, ..)| blocks.bools())]
    }

    /// The masks of one call.
    pub(crate) fn masks<'a>(&'a self, fold: Fold, bools: &'a Bools<'_>, call: usize) -> PyResult<Masks<'a>> {
        let mut masks = Masks::default();
        match (&self.mask, &bools[0]) {
            (None, _) => {}
            (Some(mask), Some(bools)) => masks.keep = Some(fold.bools(mask, bools, call)?),
            (Some(mask), None) => {
                masks.bias = Some(match mask.kind {
                    Kind::F64 => fold.view::<f64>(mask, call)?.into(),
                    Kind::F32 => fold.view::<f32>(mask, call)?.into(),
                    Kind::F16 => fold.view::<f16>(mask, call)?.into(),
                    _ => fold.view::<bf16>(mask, call)?.into(),
                });
            }
        }
        if let (Some((blocks, block_q, block_k)), Some(bools)) = (&self.blocks, &bools[1]) {
            let blocks = fold.bools(blocks, bools, call)?;
            masks.blocks = Some(BlockSparse { blocks, block_q: *block_q, block_k: *block_k });
        }
        Ok(masks)
    }
}

/// Refuses a tensor of another type than a first one's.
pub(crate) fn same_kind(q: &Tensor<'_>, other: &Tensor<'_>) -> PyResult<()> {
    if other.kind == q.kind {
        return Ok(());
    }
    let (name, found, wanted) = (other.name, other.kind.name(), q.kind.name());
    Err(PyTypeError::new_err(format!("{name} is {found}, {} is {wanted}", q.name)))
}

/// Where a forward call writes.
struct Targets<'py> {
    out: Out<'py>,
    lse: Option<Out<'py>>,
    weights: Option<Out<'py>>,
}

/// A forward call: the output, and on request lse and weights, as objects.
pub(crate) fn forward<'py>(
    query: &Bound<'py, PyAny>,
    inputs: &Inputs<'py>,
    options: &mut Options,
    out: Option<&Bound<'py, PyAny>>,
    [return_lse, return_weights]: [bool; 2],
) -> PyResult<[Option<Bound<'py, PyAny>>; 3]> {
    let py = query.py();
    let whole = inputs.shape()?;
    options.fit(whole.q_heads, whole.batch)?;
    let out_sizes = inputs.sizes(&[whole.q_len, whole.value_dim]);
    let target = match out {
        Some(out) => {
            if library(out) == Library::Other {
                return Err(PyTypeError::new_err("out must be an array of NumPy or a tensor of torch"));
            }
            out.clone()
        }
        None => empty_as(query, &inputs.q, &out_sizes)?,
    };
    let written = read("out", &target)?;
    if shape(&written) != out_sizes {
        let text = format!("out has the shape {:?}, {out_sizes:?} is wanted", shape(&written));
        return Err(PyValueError::new_err(text));
    }
    if !matches!(written.kind, Kind::F32 | Kind::F16 | Kind::Bf16) {
        let text = format!("out is {}; float32, float16 and bfloat16 are supported", written.kind.name());
        return Err(PyTypeError::new_err(text));
    }
    let fold = inputs.fold(&[&written])?;
    options.check_fold(fold)?;
    let others: Vec<_> = inputs.all().collect();
    let out_tensor = Out::new(written, &others)?;
    let single = |wanted: bool, name, last: &[usize]| -> PyResult<_> {
        if !wanted {
            return Ok((None, None));
        }
        let object = empty(query, Kind::F32, true, &inputs.sizes(last))?;
        let tensor = Out::new(read(name, &object)?, &[])?;
        Ok((Some(object), Some(tensor)))
    };
    let (lse_object, lse) = single(return_lse, "lse", &[whole.q_len])?;
    let (weights_object, weights) = single(return_weights, "weights", &[whole.q_len, whole.kv_len])?;
    let mut to = Targets { out: out_tensor, lse, weights };
    let written = to.out.tensor().kind;
    with_kind!(inputs.q.kind, |T| with_kind!(written, |O| run::<T, O>(py, inputs, options, fold, &mut to)))?;
    let handed = |object: Option<_>| object.map(|object| handed(query, object)).transpose();
    let target = if out.is_some() {
        count_write(&target)?;
        Some(target)
    } else {
        handed(Some(target))?
    };
    Ok([target, handed(lse_object)?, handed(weights_object)?])
}

/// How much more time than a forward call its weights take, which are computed one by one.
const WEIGHTS: f64 = 16.0;

/// The next part of a contiguous buffer.
fn next<'a>(rest: &mut Option<&'a mut [f32]>, len: usize) -> PyResult<Option<&'a mut [f32]>> {
    let Some(all) = rest.take() else { return Ok(None) };
    let too_short = || PyValueError::new_err("lse and weights must be contiguous float32");
    let (part, others) = all.split_at_mut_checked(len).ok_or_else(too_short)?;
    *rest = Some(others);
    Ok(Some(part))
}

/// Computes all calls, without the interpreter's lock.
fn run<T: KernelElement + Plain, O: KernelElement + Plain>(
    py: Python<'_>,
    inputs: &Inputs<'_>,
    options: &Options,
    fold: Fold,
    to: &mut Targets<'_>,
) -> PyResult<()> {
    let bools = inputs.bools();
    let mut lse = to.lse.as_mut().and_then(Out::slice_mut::<f32>);
    let mut weights = to.weights.as_mut().and_then(Out::slice_mut::<f32>);
    // Every call is checked before the first one writes; a single one checks itself.
    for dry in if fold.calls == 1 { &[false][..] } else { &[true, false] } {
        for call in 0..fold.calls {
            let (q, k, v) =
                (fold.view::<T>(&inputs.q, call)?, fold.view::<T>(&inputs.k, call)?, fold.view::<T>(&inputs.v, call)?);
            let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes()).map_err(raised)?;
            let attn = options.attention(call * shape.batch, shape.batch, inputs.masks(fold, &bools, call)?);
            let plan = Plan::new(&attn, shape, options.level()).map_err(raised)?;
            let mut outputs = Outputs::new(fold.view_mut::<O>(&mut to.out, call)?);
            if *dry {
                continue;
            }
            outputs.lse = next(&mut lse, shape.rows())?;
            let mut work = Work::of(&shape, size_of::<T>());
            if weights.is_some() {
                outputs.weights = next(&mut weights, shape.weights_len().map_err(raised)?)?;
                work = work.times(WEIGHTS);
            }
            if call > 0 {
                py.check_signals()?;
            }
            interrupt::run(py, work, |stop| options.runner(work, stop).forward_planned(&plan, q, k, v, outputs))?;
        }
    }
    Ok(())
}
