//! The functions of `attn.h`.
//!
//! Each function passes the caller's pointers to `raw`, which checks them; everything after that is safe code. No panic
//! leaves a function, and no lock is held between calls.

#![allow(unsafe_code, reason = "the leaf: the functions that C calls")]

use core::ffi::{c_char, c_void};
use std::ffi::CString;
use std::sync::OnceLock;

use attn_core::Attention;
use attn_simd::Level;

use crate::args::Callbacks;
use crate::backward;
use crate::call;
use crate::error::{Error, Result, guard, last};
use crate::merge;
use crate::options::attention;
use crate::plan::{AttnPlan, AttnWorkspace};
use crate::raw::{self, Copies};
use crate::tensor::{self, Extents};
use crate::types::{AttnCache, AttnGradients, AttnOptions, AttnQueries, AttnShape, AttnStatus, AttnTensor};

/// The version of the library, "major.minor.patch". ATTN_VERSION is the version of the header.
#[unsafe(no_mangle)]
pub extern "C" fn attn_version() -> *const c_char {
    const VERSION: &core::ffi::CStr =
        match core::ffi::CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// The names of the instruction-set levels of this machine, weakest first, separated by spaces: "portable avx2 avx512".
/// The last one runs, unless ATTN_LEVEL in the environment or AttnOptions.level names another. On a machine with AMX,
/// requests it from Linux (see the top of attn.h).
#[unsafe(no_mangle)]
pub extern "C" fn attn_levels() -> *const c_char {
    static NAMES: OnceLock<CString> = OnceLock::new();
    let names = || {
        let names: Vec<_> = Level::available().map(Level::name).collect();
        CString::new(names.join(" ")).unwrap_or_default()
    };
    NAMES.get_or_init(names).as_ptr()
}

/// Writes to *name the level that runs if AttnOptions.level is null: a string that lives as long as the program.
/// Returns an error if ATTN_LEVEL in the environment names a level that is unknown (ATTN_STATUS_OPTION) or that this
/// machine lacks (ATTN_STATUS_UNSUPPORTED); *name does not change then. Other calls do not fail for it: the best level
/// runs, and a line on stderr says so, once per process.
///
/// # Safety
/// name points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_level(name: *mut *const c_char) -> AttnStatus {
    static NAME: OnceLock<CString> = OnceLock::new();
    guard(|| {
        let level = Level::try_detect().map_err(|error| Error::Level { what: "ATTN_LEVEL", error })?;
        let text = NAME.get_or_init(|| CString::new(level.name()).unwrap_or_default());
        // SAFETY: the caller vouches for the pointer to a pointer.
        unsafe { raw::store("name", name, text.as_ptr()) }
    })
}

/// The text of this thread's last error; empty if no call has failed. It names both sizes if two disagree. The next
/// error on the thread changes the text; the pointer is valid as long as the thread lives.
#[unsafe(no_mangle)]
pub extern "C" fn attn_last_error() -> *const c_char {
    last()
}

/// Fills *tensor to describe a contiguous buffer of batch * heads * seq * dim elements.
///
/// dtype is an AttnDtype, layout an AttnLayout. Of Q8_0 and Q4_0, dim is a multiple of 32.
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
        let stored = [batch, heads, seq, tensor::row_len(tensor::dtype("dtype", dtype)?, dim)?];
        let strides = tensor::layout(layout)?.strides(stored)?;
        // The product fits, because the strides were computed from it.
        let len = if stored.contains(&0) { 0 } else { stored.into_iter().product() };
        let struct_size = size_of::<AttnTensor>();
        let value = AttnTensor { struct_size, data, len, shape, strides, offset: 0, dtype, reserved: 0 };
        // SAFETY: the caller vouches for the struct.
        unsafe { raw::store("tensor", tensor, value) }
    })
}

/// Computes attention. options may be null for the textbook formula on all threads.
///
/// q: [batch, q_heads, q_len, head_dim], k: [batch, kv_heads, kv_len, head_dim], v: [batch, kv_heads, kv_len,
/// value_dim], all three f32, f16 or bf16; out: [batch, q_heads, q_len, value_dim], f32, f16 or bf16. lse is null (with
/// lse_len 0) or receives the natural logarithm of each row's softmax denominator, contiguous [batch, q_heads, q_len].
///
/// Nothing is copied. Nothing is written unless all arguments are valid. Many threads may call it at once. Every
/// function checks the struct_size of each struct before its other fields.
///
/// # Safety
/// Each pointer is null or points to the stated number of elements, or to a struct of the stated size. During the call
/// nobody writes to the inputs, and nobody reads or writes out and lse.
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

/// Computes the gradients of attn_forward(): of q, k and v, of the sinks and of a bias, from out, lse and dout, the
/// gradient of the loss by out. options are those of the forward call (the same seed draws the same dropout); lse is
/// required.
///
/// q, k and v share a dtype, out and dout share one, and so do the gradients: each f32, f16 or bf16; sums are f32.
/// Memory grows with the lengths, not with their product. No bit depends on the threads. A row that sees no key has a
/// gradient of 0.
///
/// # Safety
/// As for attn_forward; during the call nobody reads or writes the gradients.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_backward(
    options: *const AttnOptions,
    q: *const AttnTensor,
    k: *const AttnTensor,
    v: *const AttnTensor,
    out: *const AttnTensor,
    lse: *const f32,
    lse_len: usize,
    dout: *const AttnTensor,
    gradients: *const AttnGradients,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers.
        let (asked, call) = unsafe {
            raw::measured([q, k, v, out, dout])?;
            raw::measured([gradients])?;
            let asked = raw::asked(options, &mut extents, &copies)?;
            (asked, raw::backward([q, k, v, out, dout], (lse, lse_len), gradients, &mut extents)?)
        };
        let nodes = asked.tables.nodes()?;
        let attn = attention(&asked.options, &asked.tables, &asked.masks, &nodes)?;
        let runner = call::on_threads(asked.options.threads).level(asked.level);
        backward::run(attn, asked.callbacks, runner, call)
    })
}

/// Computes attention of the last tokens of a batch of sequences to a cache that already holds their keys and values.
/// One call mixes decode steps and parts of prompts of any lengths. options may be null. Always causal: the last query
/// of a sequence sees all its tokens, the query before it sees all but the last. AttnOptions.causal may hide more.
///
/// q: [batch, q_heads, q_len, head_dim], or packed (see AttnQueries); f32, f16 or bf16, also if the cache has another
/// dtype. queries may be null: then every row is a query. out: the shape of q with value_dim in place of head_dim; f32,
/// f16 or bf16. lse as for attn_forward().
///
/// For the options, each sequence is a call of its own: its queries, and its tokens in the cache in ascending order as
/// kv_len keys. Dropout is refused. If a ring has dropped tokens of a sequence, this sequence may have one query. The
/// bits of a row do not depend on the threads, the kind of cache, the other sequences, or on how the tokens were
/// divided into calls.
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

/// Appends tokens to every sequence of a cache, and adds their number to its lens. k_new: [batch, kv_heads, n,
/// head_dim], v_new: [batch, kv_heads, n, value_dim], of the cache's dtype. new_lens is null (with new_lens_len 0), or
/// holds for each sequence how many of the n are its tokens; the rest is padding (not for rings). Nothing is written
/// unless all tokens have room: slots, or pages that no other sequence reads. A ring overwrites its oldest tokens.
///
/// With kv_indptr the tables count the new tokens already, as for FlashInfer's append_paged_kv_cache(): the new tokens
/// become the last ones of their sequences, and no length changes.
///
/// Optional: a program may write keys and values to the slots itself.
///
/// # Safety
/// As for attn_forward; nobody else reads or writes the cache during the call.
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

/// Merges attention of the same queries over two disjoint sets of keys. out and lse are results of attn_forward() or
/// attn_decode() over the first set, other and other_lse over the second; out and lse become the results over both.
///
/// Both tensors are f32. Each merge rounds an output about three times more, each time by 2^-24 of the larger part. The
/// lse is rounded to f32, which adds a relative error of 2^-24 times its size to the weight of a part.
/// (attn_plan_state() keeps maximum and sum apart and has neither error.) Each lse is contiguous [batch, heads, seq]
/// with lse_len numbers. Pass sinks to only one of the calls, because they count once.
///
/// # Safety
/// As for attn_forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_merge_outputs(
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
            raw::results(out, lse, other, other_lse, lse_len)?
        };
        merge::merge(&mut out, lse, other, other_lse)
    })
}

/// Describes the kernel that would run for these options (may be null), sizes and AttnDtype: level, tile sizes,
/// scratch. Writes the description to text, a buffer of text_size bytes; ATTN_EXPLAIN_SIZE bytes are always enough.
///
/// A longer text is cut: the buffer receives its beginning and a final 0, the status is ATTN_STATUS_BOUNDS, and
/// attn_last_error() has the number of bytes needed. (This is the only error that writes. With text_size 0 nothing is
/// written.)
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
        let dtype = tensor::dtype("dtype", dtype)?;
        // SAFETY: the caller vouches for all pointers.
        unsafe {
            explained(options, shape, (text, text_size), |attn, callbacks, level, shape| {
                call::explain(attn, callbacks, level, shape, dtype)
            })
        }
    })
}

/// Describes what attn_backward() would run for these options (may be null) and sizes: how the five products are
/// computed, how the work is cut, scratch. dtype is that of q, k, v, out and dout, gradients that of dq, dk and dv.
/// ATTN_EXPLAIN_SIZE bytes are always enough; a text that does not fit is cut as by attn_explain().
///
/// # Safety
/// As for attn_explain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_explain_backward(
    options: *const AttnOptions,
    shape: *const AttnShape,
    dtype: u32,
    gradients: u32,
    text: *mut c_char,
    text_size: usize,
) -> AttnStatus {
    guard(|| {
        let dtypes = [tensor::dtype("dtype", dtype)?, tensor::dtype("gradients", gradients)?];
        // SAFETY: the caller vouches for all pointers.
        unsafe {
            explained(options, shape, (text, text_size), |attn, callbacks, level, shape| {
                backward::explain(attn, callbacks, level, shape, dtypes)
            })
        }
    })
}

/// Writes what `explain` tells of options and sizes.
///
/// # Safety
/// As for attn_explain.
unsafe fn explained(
    options: *const AttnOptions,
    shape: *const AttnShape,
    (text, text_size): (*mut c_char, usize),
    explain: impl FnOnce(Attention<'_>, Option<Callbacks>, Level, attn_core::AttnShape) -> Result<String>,
) -> Result<()> {
    let (mut extents, copies) = (Extents::new(), Copies::default());
    // SAFETY: the caller vouches for all pointers.
    let (asked, shape) = unsafe {
        raw::measured([shape])?;
        (raw::asked(options, &mut extents, &copies)?, raw::shape(shape)?)
    };
    let nodes = asked.tables.nodes()?;
    let attn = attention(&asked.options, &asked.tables, &asked.masks, &nodes)?;
    let told = explain(attn, asked.callbacks, asked.level, shape)?;
    // SAFETY: the caller vouches for the text's bytes.
    unsafe { raw::write_text(text, text_size, &told) }
}

/// Creates a plan: checks options (may be null) and sizes once, and chooses the kernel.
///
/// Tables (lengths, starts, documents, tree, slopes, sinks) are copied. Tensors (keep, drop, blocks, dropout_keep,
/// bias), the functions and their user_data are not copied: each run reads them again, so they must live as long as the
/// plan is run. Destroy the plan with attn_plan_destroy().
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

/// As attn_explain(), for a plan. A longer text is cut in the same way.
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

/// Runs a plan on tensors of the plan's sizes; see attn_forward().
///
/// workspace may be null: then AttnOptions.threads is the number of threads, and each uses scratch that this library
/// keeps for it. With a workspace, the number of threads is that of the workspace, or AttnOptions.threads if that is
/// smaller; with one thread nothing is allocated. A workspace serves one call at a time; a second call returns
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

/// The length of the states that attn_plan_state() writes, in floats: batch * q_heads * q_len * (2 + value_dim).
///
/// # Safety
/// plan came from attn_plan_create(); len points to a size_t.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_state_len(plan: *const AttnPlan, len: *mut usize) -> AttnStatus {
    // SAFETY: the caller vouches for both pointers.
    guard(|| unsafe { raw::store("len", len, raw::handle("plan", plan)?.state_len()?) })
}

/// Attends to a part of a plan's keys, for example in one of several processes or machines. k and v hold n keys that
/// begin at key first: [batch, kv_heads, n, ...] with first + n <= kv_len (else ATTN_STATUS_TABLE). Masks, biases and
/// positions count from the first key of the whole. k and v share a dtype; q may have another.
///
/// Writes a state for each query to states, [batch, q_heads, q_len, 2 + value_dim]: the maximum, the sum, and value_dim
/// undivided sums; states_len floats in all. States may be sent between machines of the same byte order.
/// attn_merge_states() merges them in any order, and attn_plan_finish() makes the result of them.
///
/// Runs on the calling thread, in the first scratch of workspace, or in new scratch if workspace is null. If all
/// parts but the last have 512 times a power of two keys, and are merged as a tree of neighbours, the result has the
/// bits of the whole call with AttnOptions.reproducible.
///
/// # Safety
/// As for attn_plan_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_state(
    plan: *const AttnPlan,
    workspace: *mut AttnWorkspace,
    first: usize,
    q: *const AttnTensor,
    k: *const AttnTensor,
    v: *const AttnTensor,
    states: *mut f32,
    states_len: usize,
) -> AttnStatus {
    guard(|| {
        let (mut extents, copies) = (Extents::new(), Copies::default());
        // SAFETY: the caller vouches for all pointers, and for the tensors of the plan's options.
        let (plan, workspace, masks, part) = unsafe {
            raw::measured([q, k, v])?;
            let plan = raw::handle("plan", plan)?;
            let workspace = if workspace.is_null() { None } else { Some(raw::handle("workspace", workspace)?) };
            let masks = plan.described.masks(&mut extents, &copies)?;
            (plan, workspace, masks, raw::part(first, [q, k, v], (states, states_len), &mut extents)?)
        };
        plan.state(&masks, workspace, part)
    })
}

/// Merges states over disjoint sets of keys, in f32: states become the states over both sets. Both arrays hold len
/// floats, 2 + value_dim for each query. A state of a query that saw no key changes no bit of the other state.
/// Each merge rounds: one after the other, hundreds of states add up their rounding; merged in pairs, and these in
/// pairs, they hardly do.
///
/// # Safety
/// states and others point to len floats each; nobody else reads or writes states during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_merge_states(
    states: *mut f32,
    others: *const f32,
    len: usize,
    value_dim: usize,
) -> AttnStatus {
    guard(|| {
        // SAFETY: the caller vouches for both pointers.
        let (states, others) = unsafe { raw::states(states, others, len)? };
        Ok(attn_core::state::merge_states(states, others, value_dim)?)
    })
}

/// Makes the result of merged states: adds the sinks, divides, and writes out and lse as attn_plan_run() does.
///
/// # Safety
/// As for attn_plan_run; states points to states_len floats.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_finish(
    plan: *const AttnPlan,
    states: *const f32,
    states_len: usize,
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
            (plan, masks, raw::finish((states, states_len), out, (lse, lse_len), &mut extents)?)
        };
        plan.finish(&masks, end)
    })
}

/// Frees a plan; null is ignored.
///
/// # Safety
/// plan came from attn_plan_create(), was not destroyed before, and no call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_destroy(plan: *mut AttnPlan) {
    // SAFETY: the caller vouches for the plan.
    guard(|| unsafe { raw::destroy(plan) });
}

/// Creates a workspace: scratch for a number of threads (0 for all), large enough for plan. plan may be null: then the
/// first run allocates the scratch. A workspace may serve other plans too. Destroy it with attn_workspace_destroy().
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

/// The bytes that a workspace holds. ATTN_STATUS_BUSY if a call uses it.
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
/// workspace came from attn_workspace_create(), was not destroyed before, and no call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_workspace_destroy(workspace: *mut AttnWorkspace) {
    // SAFETY: the caller vouches for the workspace.
    guard(|| unsafe { raw::destroy(workspace) });
}
