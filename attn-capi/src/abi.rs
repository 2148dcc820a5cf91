//! The functions of `attn.h`.
//!
//! Each hands the caller's pointers to `raw`, which checks them; everything behind that is safe code. No panic leaves through
//! here, and no lock is held between calls.

#![allow(unsafe_code, reason = "the leaf: the functions that C calls")]

use core::ffi::{c_char, c_void};
use std::ffi::CString;
use std::sync::OnceLock;

use attn_simd::Level;

use crate::call::{self, Scratch};
use crate::error::{guard, last};
use crate::merge;
use crate::options::attention;
use crate::plan::{AttnPlan, AttnWorkspace};
use crate::raw;
use crate::tensor::{self, Extents};
use crate::types::{AttnOptions, AttnShape, AttnStatus, AttnTensor};

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

/// Names of the instruction-set levels that this machine has, weakest first, with a space between: "portable avx2 avx512".
/// The last one runs unless ATTN_LEVEL in the environment or AttnOptions.level names another.
#[unsafe(no_mangle)]
pub extern "C" fn attn_levels() -> *const c_char {
    static NAMES: OnceLock<CString> = OnceLock::new();
    let names = || {
        let names: Vec<_> = Level::available().map(Level::name).collect();
        CString::new(names.join(" ")).unwrap_or_default()
    };
    NAMES.get_or_init(names).as_ptr()
}

/// What went wrong in the last call of this thread that failed, naming both sizes where two disagree; empty if none has. The
/// text changes with the next failure on the thread; the pointer stays good for as long as the thread lives.
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
        let len = if shape.contains(&0) { 0 } else { shape.into_iter().product() }; // the strides have shown that it fits
        let struct_size = size_of::<AttnTensor>();
        let value = AttnTensor { struct_size, data, len, shape, strides, offset: 0, dtype, reserved: 0 };
        // SAFETY: the caller vouches for the struct.
        unsafe { raw::store("tensor", tensor, value) }
    })
}

/// Computes attention. options may be null: the textbook formula on all threads.
///
/// q: [batch, q_heads, q_len, head_dim], k: [batch, kv_heads, kv_len, head_dim], v: [batch, kv_heads, kv_len, value_dim], of
/// one dtype out of f32, f16, bf16; out: [batch, q_heads, q_len, value_dim], of any of these. lse is null (with lse_len 0) or
/// takes the natural logarithm of each row's softmax denominator, [batch, q_heads, q_len] without gaps.
///
/// Nothing is copied. Nothing is written unless all arguments are right. May be called from many threads at once.
///
/// # Safety
/// Each pointer that is not null points to as many elements, or to as large a struct, as the argument says. Nobody writes to
/// the inputs or touches out and lse during the call.
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
        let mut extents = Extents::new();
        // SAFETY: the caller vouches for all pointers.
        let (asked, call) = unsafe {
            let asked = raw::asked(options, &mut extents)?;
            (asked, raw::call([q, k, v], out, lse, lse_len, &mut extents)?)
        };
        let nodes = asked.tables.nodes()?;
        let attn = attention(&asked.options, &asked.tables, &asked.masks, &nodes)?;
        let (shape, scratch) = (call.shape()?, Scratch::OfThreads(asked.options.threads));
        call::run(attn, asked.callbacks, asked.level, shape, scratch, call)
    })
}

/// Joins attention over some keys with attention over others, both with the same queries: out and lse are those of
/// attn_forward() on the first keys and become those on all, as if the call had been one. Both tensors are f32; the lses are
/// [batch, heads, seq] without gaps, lse_len each. Sinks count once: give them to one of the calls only.
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
        let (mut out, lse, other, other_lse) = unsafe { raw::states(out, lse, other, other_lse, lse_len)? };
        merge::merge(&mut out, lse, other, other_lse)
    })
}

/// Writes to text, which holds text_size bytes, what would run for these options (may be null), sizes and AttnDtype: level,
/// tile sizes, scratch.
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
        let mut extents = Extents::new();
        // SAFETY: the caller vouches for all pointers.
        let (asked, shape) = unsafe { (raw::asked(options, &mut extents)?, raw::shape(shape)?) };
        let nodes = asked.tables.nodes()?;
        let attn = attention(&asked.options, &asked.tables, &asked.masks, &nodes)?;
        let told = call::explain(attn, asked.callbacks, asked.level, shape, tensor::dtype("dtype", dtype)?)?;
        // SAFETY: the caller vouches for the text's bytes.
        unsafe { raw::write_text(text, text_size, &told) }
    })
}

/// Makes a plan: options (may be null) and sizes, checked once, and the choice of kernel.
///
/// Tables (lengths, starts, documents, tree, slopes, sinks) are copied. Tensors (keep, drop, blocks, dropout_keep, bias), the
/// functions and their user_data are not: they stay with the caller, must live as long as the plan is run, and are read anew
/// by each run. Destroy the plan with attn_plan_destroy().
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
        let mut extents = Extents::new();
        // SAFETY: the caller vouches for all pointers.
        let (asked, shape) = unsafe { (raw::asked(options, &mut extents)?, raw::shape(shape)?) };
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

/// As attn_explain(), for a plan.
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
        let plan = raw::handle("plan", plan)?;
        let masks = plan.described.masks(&mut Extents::new())?;
        raw::write_text(text, text_size, &plan.explain(&masks, tensor::dtype("dtype", dtype)?)?)
    })
}

/// Runs a plan on tensors of the sizes that it was made for; see attn_forward().
///
/// workspace may be null: then each thread uses scratch that this library keeps for it, and AttnOptions.threads says how many
/// there are. With a workspace there are as many threads as it was made for, or AttnOptions.threads if that is fewer; with one
/// thread nothing is allocated. A workspace serves one call at a time; a second one gets ATTN_STATUS_BUSY.
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
        let mut extents = Extents::new();
        // SAFETY: the caller vouches for all pointers, and for the tensors of the plan's options.
        let (plan, workspace, masks, call) = unsafe {
            let plan = raw::handle("plan", plan)?;
            let workspace = if workspace.is_null() { None } else { Some(raw::handle("workspace", workspace)?) };
            let masks = plan.described.masks(&mut extents)?;
            (plan, workspace, masks, raw::call([q, k, v], out, lse, lse_len, &mut extents)?)
        };
        plan.run(&masks, workspace, call)
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

/// Makes scratch for as many threads (0 for all), large enough for plan; plan may be null, then the first run makes it large
/// enough. It may serve other plans too. Destroy it with attn_workspace_destroy().
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
