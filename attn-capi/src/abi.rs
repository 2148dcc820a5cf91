//! The functions of `attn.h`.
//!
//! Each hands the caller's pointers to `raw`, which checks them; everything behind that is safe code. No panic leaves
//! through here, and no lock is held between calls.

#![allow(unsafe_code, reason = "the leaf: the functions that C calls")]

use core::ffi::{c_char, c_void};
use std::ffi::CString;
use std::sync::OnceLock;

use attn_simd::Level;

use crate::call;
use crate::error::{Error, guard, last};
use crate::merge;
use crate::options::attention;
use crate::plan::{AttnPlan, AttnWorkspace};
use crate::raw::{self, Copies};
use crate::tensor::{self, Extents};
use crate::types::{AttnCache, AttnOptions, AttnQueries, AttnShape, AttnStatus, AttnTensor};

/// Version of the library, "major.minor.patch". ATTN_VERSION is the header's.
#[unsafe(no_mangle)]
pub extern "C" fn attn_version() -> *const c_char {
    const VERSION: &core::ffi::CStr =
        match core::ffi::CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Names of the instruction-set levels that this machine has, weakest first, with a space between: "portable avx2
/// avx512". The last one runs unless ATTN_LEVEL in the environment or AttnOptions.level names another. Asks Linux for
/// the permission to use AMX tiles where there are any (see the top of attn.h).
#[unsafe(no_mangle)]
pub extern "C" fn attn_levels() -> *const c_char {
    static NAMES: OnceLock<CString> = OnceLock::new();
    let names = || {
        let names: Vec<_> = Level::available().map(Level::name).collect();
        CString::new(names.join(" ")).unwrap_or_default()
    };
    NAMES.get_or_init(names).as_ptr()
}

/// Writes to *name the level that runs where AttnOptions.level is null: a string that lives as long as the program.
/// Where ATTN_LEVEL in the environment names a level that is unknown (ATTN_STATUS_OPTION) or missing here
/// (ATTN_STATUS_UNSUPPORTED) it is refused, and *name stays as it is. Calls do not fail then: the best level runs, and
/// a line on stderr says so, once per process.
///
/// # Safety
/// name points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_level(name: *mut *const c_char) -> AttnStatus {
    static NAME: OnceLock<CString> = OnceLock::new();
    guard(|| {
        let level = Level::try_detect().map_err(Error::Level)?;
        let text = NAME.get_or_init(|| CString::new(level.name()).unwrap_or_default());
        // SAFETY: the caller vouches for the pointer to a pointer.
        unsafe { raw::store("name", name, text.as_ptr()) }
    })
}

/// What went wrong in the last call of this thread that failed, naming both sizes where two disagree; empty if none
/// has. The text changes with the next failure on the thread; the pointer stays good for as long as the thread lives.
#[unsafe(no_mangle)]
pub extern "C" fn attn_last_error() -> *const c_char {
    last()
}

/// Fills *tensor for a contiguous buffer of batch * heads * seq * dim elements.
///
/// dtype is an AttnDtype, layout an AttnLayout.
///
/// # Safety
/// tensor points to an AttnTensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_tensor_contiguous(
    tensor: *mut AttnTensor,
    data: *mut c_void,
    dtype: u32,
    layout: u32,
    batch: usize,
    heads: usize,
    seq: usize,
    dim: usize,
) -> AttnStatus {
    guard(|| {
        let shape = [batch, heads, seq, dim];
        let strides = tensor::layout(layout)?.strides(shape)?;
        tensor::dtype("dtype", dtype)?;
        // The strides have shown that the product fits.
        let len = if shape.contains(&0) { 0 } else { shape.into_iter().product() };
        let struct_size = size_of::<AttnTensor>();
        let value = AttnTensor { struct_size, data, len, shape, strides, offset: 0, dtype, reserved: 0 };
        // SAFETY: the caller vouches for the struct.
        unsafe { raw::store("tensor", tensor, value) }
    })
}

/// Computes attention. options may be null: the textbook formula on all threads.
///
/// q: [batch, q_heads, q_len, head_dim], k: [batch, kv_heads, kv_len, head_dim], v: [batch, kv_heads, kv_len,
/// value_dim], of one dtype out of f32, f16, bf16; out: [batch, q_heads, q_len, value_dim], of any of these. lse is
/// null (with lse_len 0) or takes the natural logarithm of each row's softmax denominator, [batch, q_heads, q_len]
/// without gaps.
///
/// Nothing is copied. Nothing is written unless all arguments are right. May be called from many threads at once. The
/// struct_size of each struct is checked before its other fields, by every function.
///
/// # Safety
/// Each pointer that is not null points to as many elements, or to as large a struct, as the argument says. Nobody
/// writes to the inputs or touches out and lse during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_forward(
    options: *const AttnOptions,
    q: *const AttnTensor,
    k: *const AttnTensor,
    v: *const AttnTensor,
    out: *const AttnTensor,
    lse: *mut f32,
    lse_len: usize,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers.
        let (asked, call) = unsafe {
            raw::measured([q, k, v, out])?;
            let asked = raw::asked(options, &mut extents, &copies)?;
            (asked, raw::call([q, k, v], out, lse, lse_len, &mut extents)?)
        };
        let nodes = asked.tables.nodes()?;
        let attn = attention(&asked.options, &asked.tables, &asked.masks, &nodes)?;
        let (shape, runner) = (call.shape()?, call::on_threads(asked.options.threads));
        call::run(attn, asked.callbacks, asked.level, shape, runner, call)
    })
}

/// Computes attention of the last tokens of a batch of sequences to a cache that holds their keys and values already:
/// decode steps and prefill chunks of any lengths in one call. options may be null. Always causal: the last query of a
/// sequence sees all its tokens, the one before all but the last.
///
/// q: [batch, q_heads, q_len, head_dim], or packed (see AttnQueries; queries may be null: all rows are), of any dtype
/// of f32, f16, bf16, which may differ from the cache's; out: as q, with value_dim, of any of these. lse as for
/// attn_forward().
///
/// To the options each sequence is a call of its own: its q_len queries, kv_len = its tokens in the cache, in ascending
/// order. Dropout is refused. A ring that has dropped tokens takes one query per sequence. A row's bits depend on
/// neither the threads, nor the kind of the cache, nor the other sequences, nor on how the stream was cut into calls.
///
/// # Safety
/// As for attn_forward; nobody writes to the cache during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_decode(
    options: *const AttnOptions,
    cache: *const AttnCache,
    q: *const AttnTensor,
    queries: *const AttnQueries,
    out: *const AttnTensor,
    lse: *mut f32,
    lse_len: usize,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers.
        let (asked, call) = unsafe {
            raw::measured_cache(cache)?;
            raw::measured([q, out])?;
            raw::measured([queries])?;
            let asked = raw::asked(options, &mut extents, &copies)?;
            (asked, raw::decode(cache, q, queries, out, (lse, lse_len), &mut extents)?)
        };
        let nodes = asked.tables.nodes()?;
        let attn = attention(&asked.options, &asked.tables, &asked.masks, &nodes)?;
        call::decode(attn, asked.callbacks, asked.level, call::on_threads(asked.options.threads), call)
    })
}

/// Appends tokens to every sequence of a cache, and adds their number to its lens: k_new [batch, kv_heads, n,
/// head_dim], v_new [batch, kv_heads, n, value_dim], of the cache's dtype. new_lens is null (with new_lens_len 0), or
/// says for each sequence how many of the n are its tokens; the others are padding (not for rings). Nothing is written
/// unless there is room for all: slots, or pages that no other sequence reads. A ring makes room by itself.
///
/// Whoever writes keys and values to their slots otherwise need not call this.
///
/// # Safety
/// As for attn_forward; nobody else touches the cache during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_append(
    cache: *const AttnCache,
    k_new: *const AttnTensor,
    v_new: *const AttnTensor,
    new_lens: *const usize,
    new_lens_len: usize,
) -> AttnStatus {
    // SAFETY: the caller vouches for all pointers.
    guard(|| unsafe {
        raw::measured_cache(cache)?;
        raw::measured([k_new, v_new])?;
        raw::append(cache, [k_new, v_new], (new_lens, new_lens_len))?.run()
    })
}

/// Joins attention over some keys with attention over others, both with the same queries: out and lse are those of
/// attn_forward() or attn_decode() on the first keys and become those on all, as if the call had been one. Both tensors
/// are f32 and joined in f32: each join rounds a number of the output some three times more, by 2^-24 of the larger
/// part each; the lse, itself rounded to f32, adds an error of 2^-24 of its size to the weight of a part.
/// (attn_plan_partial() keeps maximum and sum apart and has none of that.) The lses are [batch, heads, seq] without
/// gaps, lse_len each. Sinks count once: give them to one of the calls only.
///
/// # Safety
/// As for attn_forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_merge_states(
    out: *const AttnTensor,
    lse: *mut f32,
    other: *const AttnTensor,
    other_lse: *const f32,
    lse_len: usize,
) -> AttnStatus {
    guard(|| {
        // SAFETY: the caller vouches for all pointers.
        let (mut out, lse, other, other_lse) = unsafe {
            raw::measured([out, other])?;
            raw::states(out, lse, other, other_lse, lse_len)?
        };
        merge::merge(&mut out, lse, other, other_lse)
    })
}

/// Writes to text, which holds text_size bytes, what would run for these options (may be null), sizes and AttnDtype:
/// level, tile sizes, scratch. ATTN_EXPLAIN_SIZE bytes hold every text.
///
/// What does not fit is cut: the beginning is written, with a 0 at the end, the status is ATTN_STATUS_BOUNDS, and
/// attn_last_error() says how many bytes are needed. (The one case in which an error writes. With text_size 0, and
/// after any other error, nothing is written.)
///
/// # Safety
/// As for attn_forward; text points to text_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_explain(
    options: *const AttnOptions,
    shape: *const AttnShape,
    dtype: u32,
    text: *mut c_char,
    text_size: usize,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers.
        let (asked, shape) = unsafe {
            raw::measured([shape])?;
            (raw::asked(options, &mut extents, &copies)?, raw::shape(shape)?)
        };
        let nodes = asked.tables.nodes()?;
        let attn = attention(&asked.options, &asked.tables, &asked.masks, &nodes)?;
        let told = call::explain(attn, asked.callbacks, asked.level, shape, tensor::dtype("dtype", dtype)?)?;
        // SAFETY: the caller vouches for the text's bytes.
        unsafe { raw::write_text(text, text_size, &told) }
    })
}

/// Makes a plan: options (may be null) and sizes, checked once, and the choice of kernel.
///
/// Tables (lengths, starts, documents, tree, slopes, sinks) are copied. Tensors (keep, drop, blocks, dropout_keep,
/// bias), the functions and their user_data are not: they stay with the caller, must live as long as the plan is run,
/// and are read anew by each run. Destroy the plan with attn_plan_destroy().
///
/// # Safety
/// As for attn_forward; plan points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_create(
    options: *const AttnOptions,
    shape: *const AttnShape,
    plan: *mut *mut AttnPlan,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers.
        let (asked, shape) = unsafe {
            raw::measured([shape])?;
            (raw::asked(options, &mut extents, &copies)?, raw::shape(shape)?)
        };
        let raw::Asked { options, tables, described, masks, callbacks, level } = asked;
        let made = AttnPlan::new(options, &tables, (described, &masks), callbacks, level, shape)?;
        // SAFETY: the caller vouches for the pointer to a pointer.
        unsafe { raw::store_new("plan", plan, made) }
    })
}

/// Bytes of scratch that one thread needs to run the plan.
///
/// # Safety
/// plan came from attn_plan_create(); bytes points to a size_t.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_workspace_bytes(plan: *const AttnPlan, bytes: *mut usize) -> AttnStatus {
    // SAFETY: the caller vouches for both pointers.
    guard(|| unsafe { raw::store("bytes", bytes, raw::handle("plan", plan)?.workspace_bytes()) })
}

/// As attn_explain(), for a plan; a text that does not fit is cut likewise.
///
/// # Safety
/// plan came from attn_plan_create(); text points to text_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_explain(
    plan: *const AttnPlan,
    dtype: u32,
    text: *mut c_char,
    text_size: usize,
) -> AttnStatus {
    // SAFETY: the caller vouches for the plan, the tensors of its options and the text's bytes.
    guard(|| unsafe {
        let (plan, copies) = (raw::handle("plan", plan)?, Copies::default());
        let masks = plan.described.masks(&mut Extents::new(), &copies)?;
        raw::write_text(text, text_size, &plan.explain(&masks, tensor::dtype("dtype", dtype)?)?)
    })
}

/// Runs a plan on tensors of the sizes that it was made for; see attn_forward().
///
/// workspace may be null: then each thread uses scratch that this library keeps for it, and AttnOptions.threads says
/// how many there are. With a workspace there are as many threads as it was made for, or AttnOptions.threads if that is
/// fewer; with one thread nothing is allocated. A workspace serves one call at a time; a second one gets
/// ATTN_STATUS_BUSY.
///
/// # Safety
/// As for attn_forward; plan and workspace came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_run(
    plan: *const AttnPlan,
    workspace: *mut AttnWorkspace,
    q: *const AttnTensor,
    k: *const AttnTensor,
    v: *const AttnTensor,
    out: *const AttnTensor,
    lse: *mut f32,
    lse_len: usize,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers, and for the tensors of the plan's options.
        let (plan, workspace, masks, call) = unsafe {
            raw::measured([q, k, v, out])?;
            let plan = raw::handle("plan", plan)?;
            let workspace = if workspace.is_null() { None } else { Some(raw::handle("workspace", workspace)?) };
            let masks = plan.described.masks(&mut extents, &copies)?;
            (plan, workspace, masks, raw::call([q, k, v], out, lse, lse_len, &mut extents)?)
        };
        plan.run(&masks, workspace, call)
    })
}

/// Numbers in the rows that attn_plan_partial() writes: batch * q_heads * q_len * (2 + value_dim).
///
/// # Safety
/// plan came from attn_plan_create(); len points to a size_t.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_partial_len(plan: *const AttnPlan, len: *mut usize) -> AttnStatus {
    // SAFETY: the caller vouches for both pointers.
    guard(|| unsafe { raw::store("len", len, raw::handle("plan", plan)?.partial_len()?) })
}

/// Attends to some of the keys of a plan: what one of several processes or machines computes. k and v hold the keys
/// from first on, [batch, kv_heads, n, ...] with first + n <= kv_len (ATTN_STATUS_TABLE beyond); masks, biases and
/// positions mean what they mean for the whole. Leaves behind a row of max, sum and value_dim undivided sums for each
/// query, [batch, q_heads, q_len] of them, rows_len numbers in all. Rows may be sent as they are between machines of
/// one byte order, are joined by attn_merge_partials() in any order, and ended by attn_plan_finish(). k and v share a
/// dtype, q may have another.
///
/// Runs on the calling thread, with the first scratch of workspace, or with new one if that is null. Parts that begin
/// at multiples of 512 keys, joined as a tree of neighbours, give the bits of the whole call with
/// AttnOptions.reproducible.
///
/// # Safety
/// As for attn_plan_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_partial(
    plan: *const AttnPlan,
    workspace: *mut AttnWorkspace,
    first: usize,
    q: *const AttnTensor,
    k: *const AttnTensor,
    v: *const AttnTensor,
    rows: *mut f32,
    rows_len: usize,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers, and for the tensors of the plan's options.
        let (plan, workspace, masks, part) = unsafe {
            raw::measured([q, k, v])?;
            let plan = raw::handle("plan", plan)?;
            let workspace = if workspace.is_null() { None } else { Some(raw::handle("workspace", workspace)?) };
            let masks = plan.described.masks(&mut extents, &copies)?;
            (plan, workspace, masks, raw::part(first, [q, k, v], (rows, rows_len), &mut extents)?)
        };
        plan.partial(&masks, workspace, part)
    })
}

/// Joins rows over some keys with rows over others, in f32: rows become those over both. Both hold len numbers, rows of
/// 2 + value_dim each. A row that has seen nothing changes no bit of the other.
///
/// # Safety
/// rows and others point to len numbers each; nobody else touches rows during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_merge_partials(
    rows: *mut f32,
    others: *const f32,
    len: usize,
    value_dim: usize,
) -> AttnStatus {
    guard(|| {
        // SAFETY: the caller vouches for both pointers.
        let (rows, others) = unsafe { raw::parts(rows, others, len)? };
        Ok(attn_core::partial::merge(rows, others, value_dim)?)
    })
}

/// Ends a call whose parts have been joined: takes the sinks in, divides, and writes out and lse as attn_plan_run()
/// does.
///
/// # Safety
/// As for attn_plan_run; rows points to rows_len numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_finish(
    plan: *const AttnPlan,
    rows: *const f32,
    rows_len: usize,
    out: *const AttnTensor,
    lse: *mut f32,
    lse_len: usize,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers, and for the tensors of the plan's options.
        let (plan, masks, end) = unsafe {
            raw::measured([out])?;
            let plan = raw::handle("plan", plan)?;
            let masks = plan.described.masks(&mut extents, &copies)?;
            (plan, masks, raw::finish((rows, rows_len), out, (lse, lse_len), &mut extents)?)
        };
        plan.finish(&masks, end)
    })
}

/// Frees a plan; null is ignored.
///
/// # Safety
/// plan came from attn_plan_create(), was not destroyed before, and does not run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_destroy(plan: *mut AttnPlan) {
    // SAFETY: the caller vouches for the plan.
    guard(|| unsafe { raw::destroy(plan) });
}

/// Makes scratch for as many threads (0 for all), large enough for plan; plan may be null, then the first run makes it
/// large enough. It may serve other plans too. Destroy it with attn_workspace_destroy().
///
/// # Safety
/// plan is null or came from attn_plan_create(); workspace points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_workspace_create(
    plan: *const AttnPlan,
    threads: usize,
    workspace: *mut *mut AttnWorkspace,
) -> AttnStatus {
    // SAFETY: the caller vouches for both pointers.
    guard(|| unsafe {
        let plan = if plan.is_null() { None } else { Some(raw::handle("plan", plan)?) };
        raw::store_new("workspace", workspace, AttnWorkspace::new(plan, threads)?)
    })
}

/// Bytes that a workspace holds.
///
/// # Safety
/// workspace came from attn_workspace_create(); bytes points to a size_t.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_workspace_bytes(workspace: *const AttnWorkspace, bytes: *mut usize) -> AttnStatus {
    // SAFETY: the caller vouches for both pointers.
    guard(|| unsafe { raw::store("bytes", bytes, raw::handle("workspace", workspace)?.bytes()?) })
}

/// Frees a workspace; null is ignored.
///
/// # Safety
/// workspace came from attn_workspace_create(), was not destroyed before, and is not used by a call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_workspace_destroy(workspace: *mut AttnWorkspace) {
    // SAFETY: the caller vouches for the workspace.
    guard(|| unsafe { raw::destroy(workspace) });
}
