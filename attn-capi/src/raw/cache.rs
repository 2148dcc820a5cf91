//! Caches: their tensors, lengths and page tables, to be read by a decode call or written by an append.

#![allow(unsafe_code, reason = "the leaf: makes slices from pointers that a C caller vouches for")]

use attn_core::AttnError;
use attn_core::kv_cache::Queries;
use attn_simd::Input;

use super::{copy, input, measured, outputs, table, table_mut, view_mut};
use crate::args::Decode;
use crate::cache::{Append, Appended, Fields, Place, Tokens};
use crate::error::{Error, Result};
use crate::tensor::{Extents, dtype};
use crate::types::{AttnCache, AttnDtype, AttnQueries, AttnTensor};

/// The structs of a cache.
#[derive(Clone, Copy)]
struct Structs {
    cache: AttnCache,
    k: AttnTensor,
    v: AttnTensor,
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
        Ok(Structs { cache, k, v })
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
        let AttnCache { k, v, .. } = copy(cache)?;
        measured([k, v])
    }
}

/// Where a cache's tokens lie.
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

/// Reads the arguments of a decode call; what its options point to has been noted in `extents` before.
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
        let Structs { cache, k, v } = structs(cache)?;
        let place = place(&cache, extents)?;
        let lens = table("lens", cache.lens.cast_const(), cache.lens_len, extents)?.unwrap_or_default();
        let q = input("q", q, extents)?;
        let tokens = Tokens {
            k: input("cache k", &raw const k, extents)?,
            v: input("cache v", &raw const v, extents)?,
            lens,
            place,
        };
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
        let Structs { cache, k, v } = structs(cache)?;
        let new = [input("k_new", k_new, &mut extents)?, input("v_new", v_new, &mut extents)?];
        let new_lens = table("new_lens", new_lens, new_lens_len, &mut extents)?;
        let place = place(&cache, &mut extents)?;
        // Borrows the cache and its lengths, the right type being known.
        macro_rules! of {
            ($Variant:ident, $new:expr) => {{
                let k = view_mut("cache k", &k, &mut extents)?;
                let v = view_mut("cache v", &v, &mut extents)?;
                let lens = table_mut("lens", cache.lens, cache.lens_len, &mut extents)?.unwrap_or_default();
                Ok(Appended::$Variant(Append { k, v, lens, place, new: $new, new_lens }))
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
