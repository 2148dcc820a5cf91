//! `sdpa`, `sdpa_varlen`, `sink_attention`, `block_sparse`, `sdpa_dropout`: one attention call each.

use attn_core::dropout::Dropout;
use attn_core::mask::{BlockSparse, Documents, Lengths, Term, Window};
use attn_core::position::alibi::Alibi;
use attn_core::score_mod::Mods;
use attn_core::weights::RowAt;
use attn_core::{Align, Attention, Bias, Element, Layout, Mask, Outputs, View, ViewMut};
use serde_json::Value;

use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::conformance::{Case, Data, Tensor};
use crate::engine::{Engine, Number};

/// Tables of a case in the types that the library borrows.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    kv_lens: Option<Vec<usize>>,
    /// The logits as given, and as `f32`.
    sinks: Option<Vec<f32>>,
    slopes: Option<Vec<f32>>,
}

impl Tables {
    pub(crate) fn of(loaded: Loaded<'_>, kv_len: usize) -> Result<Self, Stop> {
        let singles = |role: &str| -> Result<Option<Vec<f32>>, Stop> {
            Ok(loaded.optional(role)?.map(|t| t.to_f64().iter().map(|&x| x as f32).collect()))
        };
        let kv_lens = match loaded.optional("kv_lens")? {
            Some(lens) => Some(lens.integers()?.iter().map(|&n| usize::try_from(n).unwrap_or(0).min(kv_len)).collect()),
            None => None,
        };
        Ok(Self { kv_lens, sinks: singles("sinks")?, slopes: singles("alibi_slopes")? })
    }
}

/// `none`, `top_left`, `bottom_right`.
pub(crate) fn causal(case: &Case) -> Result<Option<Align>, Stop> {
    match case.word("causal")? {
        None | Some("none") => Ok(None),
        Some(word) => align(word).map(Some),
    }
}

fn align(word: &str) -> Result<Align, Stop> {
    match word {
        "top_left" => Ok(Align::TopLeft),
        "bottom_right" => Ok(Align::BottomRight),
        other => Err(Stop::Fail(format!("alignment {other} is not understood"))),
    }
}

fn window(case: &Case) -> Result<Option<Window>, Stop> {
    let Some(object) = case.object("window")? else {
        return Ok(None);
    };
    let side = |name: &str| match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) => Ok(Some(n)),
            None => Err(Stop::Fail(format!("window {name} = {value} is not understood"))),
        },
    };
    let align = align(object.get("align").and_then(Value::as_str).unwrap_or("top_left"))?;
    Ok(Some(Window { left: side("left")?, right: side("right")?, align }))
}

/// A float mask as a bias, a bool mask (`true` = attend) as a mask.
pub(crate) fn with_mask<'t, M: Mods>(
    attn: Attention<'t, M>,
    tensor: &'t Tensor,
    mask: Mask<'t>,
) -> Result<Attention<'t, M>, Stop> {
    Ok(match &tensor.data {
        Data::Bool(_) => attn.mask(mask.and(Mask::keep(tensor.broadcast()?))),
        Data::F64(_) => attn.mask(mask).bias(Bias::F64(tensor.broadcast()?)),
        Data::F32(_) => attn.mask(mask).bias(Bias::F32(tensor.broadcast()?)),
        Data::F16(_) => attn.mask(mask).bias(Bias::F16(tensor.broadcast()?)),
        Data::Bf16(_) => attn.mask(mask).bias(Bias::Bf16(tensor.broadcast()?)),
        _ => return Err(Stop::Fail("a mask of integers".to_owned())),
    })
}

/// The options that a case of this family states.
pub(crate) fn options<'t>(loaded: Loaded<'t>, tables: &'t Tables) -> Result<Attention<'t>, Stop> {
    let case = loaded.case;
    let mut attn = Attention::new();
    if let Some(scale) = case.number("scale")? {
        attn = attn.scale(scale);
    }
    if let Some(cap) = case.number("softcap")? {
        attn = attn.softcap(cap);
    }
    let mut mask = Mask::none();
    let causal = causal(case)?;
    if let Some(align) = causal {
        mask = mask.and(Mask::causal(align));
    }
    if let Some(window) = window(case)? {
        mask = mask.and(Mask::term(Term::Window(window)));
    }
    if let Some(lens) = &tables.kv_lens {
        mask = mask.and(Mask::term(Term::KvLens(Lengths::PerBatch(lens))));
    }
    if let Some(slopes) = &tables.slopes {
        let align = if causal == Some(Align::BottomRight) { Align::BottomRight } else { Align::TopLeft };
        attn = attn.alibi(Alibi { slopes, align });
    }
    if let Some(sinks) = &tables.sinks {
        attn = attn.sinks(sinks);
    }
    if let Some(blocks) = loaded.optional("block_mask")? {
        let blocks = View::broadcast(blocks.values()?, &blocks.shape)?;
        let (block_q, block_k) = (case.required_size("block_q")?, case.required_size("block_k")?);
        mask = mask.and(Mask::block_sparse(BlockSparse { blocks, block_q, block_k }));
    }
    if let Some(keep) = loaded.optional("keep_mask")? {
        let p = case.number("dropout_p")?.unwrap_or(0.0) as f32;
        attn = attn.dropout(Dropout::Keep { mask: keep.broadcast()?, p });
    }
    match loaded.optional("mask")? {
        Some(tensor) => with_mask(attn, tensor, mask),
        None => Ok(attn.mask(mask)),
    }
}

/// q, k, v of rank 4 and the options of the case.
pub(super) fn dense<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (q, k, v) = (loaded.input("q")?.view::<T>()?, loaded.input("k")?.view()?, loaded.input("v")?.view()?);
        let tables = Tables::of(loaded, k.sizes()[2])?;
        let attn = options(loaded, &tables)?;
        let mut produced = Produced::default();
        let (out, lse) = attend(engine, &attn, q, k, v, Layout::Bhsd)?;
        let ([batch, heads, q_len, _], [.., value_dim]) = (q.sizes(), v.sizes());
        produced.put("y", &[batch, heads, q_len, value_dim], &out);
        produced.put("lse", &[batch, heads, q_len], &lse);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// Runs the engine into fresh buffers: the output in a layout, and the lse.
pub(crate) fn attend<E: Engine, T: Number, M: Mods + Sync>(
    engine: &E,
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    layout: Layout,
) -> Result<(Vec<T>, Vec<T::Compute>), Stop> {
    let ([batch, heads, q_len, _], [.., value_dim]) = (q.sizes(), v.sizes());
    let sizes = [batch, heads, q_len, value_dim];
    let rows = batch * heads * q_len;
    // Painted with a value that no case expects: elements that an engine forgets show.
    let mut out = vec![T::from_f64(-12345.0); rows * value_dim];
    let mut lse = vec![T::Compute::from_f64(-12345.0); rows];
    engine.forward(attn, q, k, v, Outputs::new(ViewMut::new(&mut out, layout, sizes)?).lse(&mut lse))?;
    Ok((out, lse))
}

/// The weights `[batch, q_heads, q_len, kv_len]`: the engine's own if it gives them, else recomputed from its lse.
pub(crate) fn weights<E: Engine, T: Number, M: Mods + Sync>(
    engine: &E,
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    lse: &[T::Compute],
    weights: &mut [T::Compute],
) -> Result<(), Stop> {
    let ([batch, heads, q_len, _], [_, _, kv_len, value_dim]) = (q.sizes(), v.sizes());
    if engine.gives_weights() {
        let sizes = [batch, heads, q_len, value_dim];
        let mut out = vec![T::default(); sizes.iter().product()];
        let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, sizes)?).weights(weights);
        return Ok(engine.forward(attn, q, k, v, outputs)?);
    }
    for (n, part) in weights.chunks_exact_mut((q_len * kv_len).max(1)).enumerate() {
        let at = RowAt { batch: n / heads.max(1), head: n % heads.max(1), query: 0 };
        attn_core::weights::head(attn, q, k, at, lse, part)?;
    }
    Ok(())
}

/// Packed documents, `[tokens, heads, dim]`.
pub(super) fn varlen<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn packed<T: Stored>(tensor: &Tensor) -> Result<View<'_, T>, Stop> {
        let [tokens, heads, dim] = tensor.sizes()?;
        Ok(View::new(tensor.values()?, Layout::Bshd, [1, heads, tokens, dim])?)
    }
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (q, k, v) =
            (packed::<T>(loaded.input("q")?)?, packed(loaded.input("k")?)?, packed::<T>(loaded.input("v")?)?);
        let bounds = |role: &str| -> Result<Vec<usize>, Stop> {
            let all = loaded.input(role)?.integers()?;
            all.iter().map(|&n| usize::try_from(n).map_err(|_| Stop::Fail(format!("{role} holds {n}")))).collect()
        };
        let (cu_q, cu_k) = (bounds("cu_seqlens_q")?, bounds("cu_seqlens_k")?);
        let mut documents = Documents::new(&cu_q, &cu_k);
        if let Some(align) = causal(loaded.case)? {
            documents = documents.causal(align);
        }
        let mut attn = Attention::new().mask(Mask::documents(documents));
        if let Some(scale) = loaded.case.number("scale")? {
            attn = attn.scale(scale);
        }
        let (out, lse) = attend(engine, &attn, q, k, v, Layout::Bshd)?;
        let ([_, heads, tokens, _], [.., value_dim]) = (q.sizes(), v.sizes());
        let mut produced = Produced::default();
        produced.put("y", &[tokens, heads, value_dim], &out);
        produced.put("lse", &[heads, tokens], &lse);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}
