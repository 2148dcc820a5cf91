//! Caches: their tensors, lengths and page tables, to be read by a decode call or written by an append.

#![allow(unsafe_code, reason = "the leaf: makes slices from pointers that a C caller vouches for")]

use attn_core::formats::{StoredRows, StoredRowsMut};
use attn_core::kv_cache::Queries;
use attn_core::{AttnError, View};
use attn_simd::Input;

use super::{copy, input, measured, outputs, table, table_mut, view, view_mut};
use crate::args::Decode;
use crate::cache::{Append, Appended, Fields, Place, Rows, Tokens};
use crate::error::{Error, Result};
use crate::tensor::{Extents, dtype, in_bytes, is_packed};
use crate::types::{AttnCache, AttnDtype, AttnQueries, AttnTensor};

/// The structs of a cache.
#[derive(Clone, Copy)]
struct Structs {
    cache: AttnCache,
    k: AttnTensor,
    v: AttnTensor,
    /// Scales of both.
    scales: [Option<AttnTensor>; 2],
}

impl Structs {
    /// Whether keys and values are read as bytes.
    fn is_stored(&self) -> Result<bool> {
        Ok(is_packed(dtype("cache k", self.k.dtype)?) || is_packed(dtype("cache v", self.v.dtype)?))
    }

    /// Refuses scales that nothing would read.
    fn check_plain(&self) -> Result<()> {
        let names = ["AttnCache.k_scales", "AttnCache.v_scales"];
        match names.into_iter().zip(self.scales).find(|(_, scales)| scales.is_some()) {
            Some((what, _)) => Err(Error::Idle { what, needs: "k and v must have dtypes for caches" }),
            None => Ok(()),
        }
    }
}

/// Copies the structs of a cache.
///
/// # Safety
/// Each pointer is null, or points to a struct of the size that it begins with.
unsafe fn structs(cache: *const AttnCache) -> Result<Structs> {
    if cache.is_null() {
        return Err(Error::Null("cache"));
    }
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let cache = copy(cache)?;
        let tensor = |what, from: *const AttnTensor| if from.is_null() { Err(Error::Null(what)) } else { copy(from) };
        let (k, v) = (tensor("cache k", cache.k)?, tensor("cache v", cache.v)?);
        if cache.reserved != 0 {
            return Err(Error::Unknown { what: "AttnCache.reserved", value: cache.reserved });
        }
        let scales = |from: *const AttnTensor| if from.is_null() { Ok(None) } else { copy(from).map(Some) };
        let scales = [scales(cache.k_scales)?, scales(cache.v_scales)?];
        Ok(Structs { cache, k, v, scales })
    }
}

/// Refuses impossible sizes of a cache's structs, and nothing else.
///
/// # Safety
/// As [`structs`].
pub(crate) unsafe fn measured_cache(cache: *const AttnCache) -> Result<()> {
    if cache.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let AttnCache { k, v, k_scales, v_scales, .. } = copy(cache)?;
        measured([k, v, k_scales, v_scales])
    }
}

/// Names of a cache's tensors, and of their scales.
const NAMES: [[&str; 2]; 2] = [["cache k", "cache k_scales"], ["cache v", "cache v_scales"]];

/// Keys or values in bytes, to be read.
///
/// # Safety
/// As [`decode`].
unsafe fn stored<'a>(
    [what, of_scales]: [&'static str; 2],
    tensor: &AttnTensor,
    scales: Option<&AttnTensor>,
    extents: &mut Extents,
) -> Result<(View<'a, u8>, StoredRows<'a>)> {
    let (bytes, format) = in_bytes(what, tensor)?;
    // SAFETY: the caller vouches for both; as many bytes as elements times their size.
    let (bytes, scales) = unsafe {
        let scales = match scales {
            Some(scales) => Some(singles(of_scales, scales, extents)?),
            None => None,
        };
        (view::<u8>(what, &bytes, extents)?, scales)
    };
    Ok((bytes, StoredRows::new(format, scales)?))
}

/// Scales that are read when tokens are written: those that are not one for each token of a head.
///
/// # Safety
/// As [`append`].
unsafe fn fixed_scales<'a>(
    what: &'static str,
    tensor: &AttnTensor,
    scales: Option<&AttnTensor>,
    extents: &mut Extents,
) -> Result<Option<View<'a, f32>>> {
    let [rows, heads, slots, _] = tensor.shape;
    match scales {
        // SAFETY: the caller vouches for them.
        Some(scales) if scales.shape != [rows, heads, slots, 1] => unsafe { singles(what, scales, extents).map(Some) },
        _ => Ok(None),
    }
}

/// Keys or values in bytes, to be written, and scales with them that are not `fixed`. Whatever is read has been noted
/// in `extents` before.
///
/// # Safety
/// As [`append`].
unsafe fn stored_mut<'a>(
    [what, of_scales]: [&'static str; 2],
    tensor: &AttnTensor,
    (scales, fixed): (Option<&AttnTensor>, Option<View<'a, f32>>),
    extents: &mut Extents,
) -> Result<StoredRowsMut<'a>> {
    let (bytes, format) = in_bytes(what, tensor)?;
    // SAFETY: the caller vouches for both.
    unsafe {
        let bytes = view_mut::<u8>(what, &bytes, extents)?;
        Ok(match (fixed, scales) {
            (Some(fixed), _) => StoredRowsMut::with_scales(format, bytes, fixed)?,
            (None, None) => StoredRowsMut::new(format, bytes)?,
            (None, Some(scales)) => {
                check_singles(of_scales, scales)?;
                StoredRowsMut::with_scales_per_token(format, bytes, view_mut::<f32>(of_scales, scales, extents)?)?
            }
        })
    }
}

/// A tensor of f32 to be read.
///
/// # Safety
/// As [`decode`].
unsafe fn singles<'a>(what: &'static str, tensor: &AttnTensor, extents: &mut Extents) -> Result<View<'a, f32>> {
    check_singles(what, tensor)?;
    // SAFETY: the caller vouches for it.
    unsafe { view::<f32>(what, tensor, extents) }
}

fn check_singles(what: &'static str, tensor: &AttnTensor) -> Result<()> {
    match dtype(what, tensor.dtype)? {
        AttnDtype::F32 => Ok(()),
        _ => Err(Error::Dtype { what, wanted: "F32", value: tensor.dtype }),
    }
}

/// Where a cache's tokens are in memory.
///
/// # Safety
/// The page tables point to as many entries as said, which nobody writes during `'a`.
unsafe fn place<'a>(cache: &AttnCache, extents: &mut Extents) -> Result<Place<'a>> {
    let AttnCache { kind, sinks, window, block_table, block_table_len, .. } = *cache;
    let AttnCache { kv_indptr, kv_indptr_len, kv_indices, kv_indices_len, kv_last_page_len, .. } = *cache;
    // SAFETY: the caller vouches for the tables.
    let (block_table, csr) = unsafe {
        let csr = [
            table("kv_indptr", kv_indptr, kv_indptr_len, extents)?,
            table("kv_indices", kv_indices, kv_indices_len, extents)?,
            table("kv_last_page_len", kv_last_page_len, kv_indptr_len.saturating_sub(1), extents)?,
        ];
        (table("block_table", block_table, block_table_len, extents)?, csr)
    };
    let csr = csr.iter().any(Option::is_some).then(|| csr.map(Option::unwrap_or_default));
    let has_lens = !cache.lens.is_null() || cache.lens_len > 0;
    Place::of(Fields { kind, sinks, window, block_table, csr, has_lens })
}

/// Reads the arguments of a decode call; `extents` already holds the memory behind its options.
///
/// # Safety
/// Each pointer is null, or points to as much as the struct or length beside it says, which nobody writes during `'a`;
/// nobody else touches the outputs.
pub(crate) unsafe fn decode<'a>(
    cache: *const AttnCache,
    q: *const AttnTensor,
    queries: *const AttnQueries,
    out: *const AttnTensor,
    (lse, lse_len): (*mut f32, usize),
    extents: &mut Extents,
) -> Result<Decode<'a>> {
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let structs = structs(cache)?;
        let Structs { cache, k, v, scales } = structs;
        let place = place(&cache, extents)?;
        let lens = table("lens", cache.lens.cast_const(), cache.lens_len, extents)?.unwrap_or_default();
        let q = input("q", q, extents)?;
        let rows = if structs.is_stored()? {
            let [k_scales, v_scales] = scales;
            Rows::Stored([
                stored(NAMES[0], &k, k_scales.as_ref(), extents)?,
                stored(NAMES[1], &v, v_scales.as_ref(), extents)?,
            ])
        } else {
            structs.check_plain()?;
            Rows::Plain([input("cache k", &raw const k, extents)?, input("cache v", &raw const v, extents)?])
        };
        let tokens = Tokens { rows, lens, place };
        let queries = if queries.is_null() {
            Queries::All
        } else {
            let AttnQueries { lens, lens_len, cu, cu_len, .. } = copy(queries)?;
            match (table("q_lens", lens, lens_len, extents)?, table("cu_q", cu, cu_len, extents)?) {
                (None, None) => Queries::All,
                (Some(lens), None) => Queries::First(lens),
                (None, Some(cu)) => Queries::Packed(cu),
                (Some(_), Some(_)) => {
                    return Err(AttnError::Option { name: "AttnQueries.lens", must: "null if cu is given" }.into());
                }
            }
        };
        let (out, lse) = outputs(out, lse, lse_len, extents)?;
        Ok(Decode { q, queries, tokens, out, lse })
    }
}

/// Reads the arguments of an append.
///
/// # Safety
/// As [`decode`]; nobody else touches the cache during `'a`.
pub(crate) unsafe fn append<'a>(
    cache: *const AttnCache,
    [k_new, v_new]: [*const AttnTensor; 2],
    (new_lens, new_lens_len): (*const usize, usize),
) -> Result<Appended<'a>> {
    let mut extents = Extents::new();
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let structs = structs(cache)?;
        let Structs { cache, k, v, scales } = structs;
        let new = [input("k_new", k_new, &mut extents)?, input("v_new", v_new, &mut extents)?];
        let new_lens = table("new_lens", new_lens, new_lens_len, &mut extents)?;
        let place = place(&cache, &mut extents)?;
        if structs.is_stored()? {
            let [k_scales, v_scales] = scales;
            let k_fixed = fixed_scales(NAMES[0][1], &k, k_scales.as_ref(), &mut extents)?;
            let v_fixed = fixed_scales(NAMES[1][1], &v, v_scales.as_ref(), &mut extents)?;
            let k = stored_mut(NAMES[0], &k, (k_scales.as_ref(), k_fixed), &mut extents)?;
            let rooms = [k, stored_mut(NAMES[1], &v, (v_scales.as_ref(), v_fixed), &mut extents)?];
            let lens = table_mut("lens", cache.lens, cache.lens_len, &mut extents)?.unwrap_or_default();
            return match new {
                [Input::F32(k), Input::F32(v)] => {
                    Ok(Appended::F32Stored(Append { rooms, lens, place, new: [k, v], new_lens }))
                }
                [Input::F16(k), Input::F16(v)] => {
                    Ok(Appended::F16Stored(Append { rooms, lens, place, new: [k, v], new_lens }))
                }
                [Input::Bf16(k), Input::Bf16(v)] => {
                    Ok(Appended::Bf16Stored(Append { rooms, lens, place, new: [k, v], new_lens }))
                }
                _ => Err(AttnError::Unsupported { what: "k_new and v_new with different dtypes" }.into()),
            };
        }
        structs.check_plain()?;
        // Borrows the cache and its lengths, the right type being known.
        macro_rules! of {
            ($Variant:ident, $new:expr) => {{
                let k = view_mut("cache k", &k, &mut extents)?;
                let rooms = [k, view_mut("cache v", &v, &mut extents)?];
                let lens = table_mut("lens", cache.lens, cache.lens_len, &mut extents)?.unwrap_or_default();
                Ok(Appended::$Variant(Append { rooms, lens, place, new: $new, new_lens }))
            }};
        }
        match (dtype("cache k", k.dtype)?, dtype("cache v", v.dtype)?, new) {
            (AttnDtype::F32, AttnDtype::F32, [Input::F32(k_new), Input::F32(v_new)]) => of!(F32, [k_new, v_new]),
            (AttnDtype::F16, AttnDtype::F16, [Input::F16(k_new), Input::F16(v_new)]) => of!(F16, [k_new, v_new]),
            (AttnDtype::Bf16, AttnDtype::Bf16, [Input::Bf16(k_new), Input::Bf16(v_new)]) => of!(Bf16, [k_new, v_new]),
            _ => Err(AttnError::Unsupported { what: "k, v, k_new and v_new with different dtypes" }.into()),
        }
    }
}
