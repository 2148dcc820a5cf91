//! The functions of `attn.h` behind safe doors, over buffers that these tests own.

#![allow(unsafe_code, reason = "the leaf of these tests: calls what C calls")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use attn::types::{
    AttnCache, AttnCacheKind, AttnDtype, AttnGradients, AttnOptions, AttnQueries, AttnShape, AttnStatus, AttnTensor,
};
use attn::{AttnPlan, AttnWorkspace, abi};

/// All zeros but the size: the defaults.
pub(crate) fn options() -> AttnOptions {
    // SAFETY: numbers, raw pointers and optional functions, all of which may be zero.
    AttnOptions { struct_size: size_of::<AttnOptions>(), ..unsafe { core::mem::zeroed() } }
}

/// A contiguous tensor over `data`, `[batch, heads, seq, dim]`.
pub(crate) fn tensor<T>(data: &[T], dtype: AttnDtype, shape: [usize; 4]) -> AttnTensor {
    let [_, heads, seq, dim] = shape.map(|n| n as isize);
    AttnTensor {
        struct_size: size_of::<AttnTensor>(),
        data: data.as_ptr().cast_mut().cast::<c_void>(),
        len: data.len(),
        shape,
        strides: [heads.wrapping_mul(seq).wrapping_mul(dim), seq.wrapping_mul(dim), dim, 1],
        offset: 0,
        dtype: dtype as u32,
        reserved: 0,
    }
}

/// A tensor to write; made from an exclusive borrow, so that writing through it is allowed.
pub(crate) fn tensor_mut<T>(data: &mut [T], dtype: AttnDtype, shape: [usize; 4]) -> AttnTensor {
    AttnTensor { data: data.as_mut_ptr().cast::<c_void>(), ..tensor(data, dtype, shape) }
}

/// A tensor of floats.
pub(crate) fn floats(data: &[f32], shape: [usize; 4]) -> AttnTensor {
    tensor(data, AttnDtype::F32, shape)
}

/// Sizes of a call with as many key heads as query heads.
pub(crate) fn sizes([batch, heads, q_len, dim]: [usize; 4], kv_len: usize) -> AttnShape {
    AttnShape {
        struct_size: size_of::<AttnShape>(),
        batch,
        q_heads: heads,
        kv_heads: heads,
        q_len,
        kv_len,
        head_dim: dim,
        value_dim: dim,
    }
}

/// The arguments of a call; `None` is null.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<'a> {
    pub(crate) options: Option<&'a AttnOptions>,
    pub(crate) q: Option<&'a AttnTensor>,
    pub(crate) k: Option<&'a AttnTensor>,
    pub(crate) v: Option<&'a AttnTensor>,
    pub(crate) out: Option<&'a AttnTensor>,
    pub(crate) lse: (*mut f32, usize),
}

/// A pointer that C would pass.
fn pointer<T>(reference: Option<&T>) -> *const T {
    reference.map_or(ptr::null(), ptr::from_ref)
}

/// `attn_forward`.
pub(crate) fn forward(a: Arguments<'_>) -> AttnStatus {
    // SAFETY: each tensor was made from a buffer of its length, or its length is what the test is about and smaller.
    unsafe {
        abi::attn_forward(
            pointer(a.options),
            pointer(a.q),
            pointer(a.k),
            pointer(a.v),
            pointer(a.out),
            a.lse.0,
            a.lse.1,
        )
    }
}

/// What gradients are computed from.
pub(crate) struct Backward {
    pub(crate) options: AttnOptions,
    pub(crate) q: AttnTensor,
    pub(crate) k: AttnTensor,
    pub(crate) v: AttnTensor,
    pub(crate) out: AttnTensor,
    pub(crate) lse: (*const f32, usize),
    pub(crate) dout: AttnTensor,
}

/// Where they go.
pub(crate) fn gradients([dq, dk, dv]: [&AttnTensor; 3], dsinks: &mut [f64]) -> AttnGradients {
    let struct_size = size_of::<AttnGradients>();
    let (dbias, score_mod_derivative) = (ptr::null(), None);
    AttnGradients {
        struct_size,
        dq,
        dk,
        dv,
        dsinks: dsinks.as_mut_ptr(),
        dsinks_len: dsinks.len(),
        dbias,
        score_mod_derivative,
    }
}

/// `attn_backward`.
pub(crate) fn backward(a: &Backward, gradients: &AttnGradients) -> AttnStatus {
    // SAFETY: as for `forward`.
    unsafe { abi::attn_backward(&a.options, &a.q, &a.k, &a.v, &a.out, a.lse.0, a.lse.1, &a.dout, gradients) }
}

/// `attn_merge_outputs`; the lses have the length of the first one.
pub(crate) fn merge(out: &AttnTensor, lse: &mut [f32], other: &AttnTensor, other_lse: &[f32]) -> AttnStatus {
    assert!(other_lse.len() >= lse.len());
    // SAFETY: each tensor was made from a buffer of its length; the lses are as long as said.
    unsafe { abi::attn_merge_outputs(out, lse.as_mut_ptr(), other, other_lse.as_ptr(), lse.len()) }
}

/// A cache of plain slots over these tensors.
pub(crate) fn cache(k: &AttnTensor, v: &AttnTensor, lens: &mut [usize]) -> AttnCache {
    AttnCache {
        struct_size: size_of::<AttnCache>(),
        kind: AttnCacheKind::Append as u32,
        reserved: 0,
        k,
        v,
        lens: lens.as_mut_ptr(),
        lens_len: lens.len(),
        sinks: 0,
        window: 0,
        block_table: ptr::null(),
        block_table_len: 0,
        kv_indptr: ptr::null(),
        kv_indptr_len: 0,
        kv_indices: ptr::null(),
        kv_indices_len: 0,
        kv_last_page_len: ptr::null(),
        k_scales: ptr::null(),
        v_scales: ptr::null(),
    }
}

/// A tensor that a cache points to.
pub(crate) fn borrowed<'a>(from: *const AttnTensor) -> &'a AttnTensor {
    // SAFETY: the tests keep what their caches point to.
    unsafe { &*from }
}

/// The first rows of each sequence, or packed rows.
pub(crate) fn queries(first: &[usize], cu: &[usize]) -> AttnQueries {
    let table = |table: &[usize]| if table.is_empty() { ptr::null() } else { table.as_ptr() };
    AttnQueries {
        struct_size: size_of::<AttnQueries>(),
        lens: table(first),
        lens_len: first.len(),
        cu: table(cu),
        cu_len: cu.len(),
    }
}

/// `attn_decode`; q, out and lse are those of the arguments, and k and v are not looked at.
pub(crate) fn decode(cache: &AttnCache, queries: Option<&AttnQueries>, a: Arguments<'_>) -> AttnStatus {
    let Arguments { options, q, out, lse, .. } = a;
    // SAFETY: as in `forward`; the tensors and tables of the cache and the queries are alive, and as long as they say
    // or longer.
    unsafe { abi::attn_decode(pointer(options), cache, pointer(q), pointer(queries), pointer(out), lse.0, lse.1) }
}

/// `attn_cache_append`.
pub(crate) fn append(cache: &AttnCache, k: &AttnTensor, v: &AttnTensor, counts: Option<&[usize]>) -> AttnStatus {
    let (counts, len) = counts.map_or((ptr::null(), 0), |counts| (counts.as_ptr(), counts.len()));
    // SAFETY: as above; the cache's tensors were made from exclusive borrows.
    unsafe { abi::attn_cache_append(cache, k, v, counts, len) }
}

/// `attn_merge_states`.
pub(crate) fn merge_states(rows: &mut [f32], others: &[f32], value_dim: usize) -> AttnStatus {
    assert!(others.len() >= rows.len());
    // SAFETY: both are as long as said.
    unsafe { abi::attn_merge_states(rows.as_mut_ptr(), others.as_ptr(), rows.len(), value_dim) }
}

/// `attn_last_error`.
pub(crate) fn last_error() -> String {
    text(abi::attn_last_error())
}

/// A string of the library's.
pub(crate) fn text(from: *const c_char) -> String {
    // SAFETY: the library's strings end with 0 and live as long as the thread.
    unsafe { CStr::from_ptr(from) }.to_str().expect("UTF-8").to_owned()
}

/// `attn_explain`.
pub(crate) fn explain(options: &AttnOptions, shape: &AttnShape, dtype: u32, room: usize) -> (AttnStatus, String) {
    let mut bytes = vec![0x55 as c_char; room + 1];
    // SAFETY: the buffer holds `room` bytes and one more, which must stay as it is.
    let status = unsafe { abi::attn_explain(options, shape, dtype, bytes.as_mut_ptr(), room) };
    assert_eq!(bytes[room], 0x55, "written beyond the text's size");
    let told = if room == 0 || bytes[0] == 0x55 { String::new() } else { text(bytes.as_ptr()) };
    (status, told)
}

/// `attn_explain_backward`.
pub(crate) fn explain_backward(options: &AttnOptions, shape: &AttnShape, dtypes: [u32; 2]) -> (AttnStatus, String) {
    let mut bytes = [0x55 as c_char; attn::types::ATTN_EXPLAIN_SIZE];
    let (to, room) = (bytes.as_mut_ptr(), bytes.len());
    // SAFETY: the buffer holds as many bytes.
    let status = unsafe { abi::attn_explain_backward(options, shape, dtypes[0], dtypes[1], to, room) };
    (status, if bytes[0] == 0x55 { String::new() } else { text(bytes.as_ptr()) })
}

/// `attn_level`: the name, or nothing if none was written.
pub(crate) fn level() -> (AttnStatus, Option<String>) {
    let mut name = ptr::null();
    // SAFETY: the pointer is this function's own.
    let status = unsafe { abi::attn_level(&mut name) };
    (status, (!name.is_null()).then(|| text(name)))
}

/// `attn_tensor_contiguous`.
pub(crate) fn contiguous(dtype: u32, layout: u32, [b, h, s, d]: [usize; 4]) -> (AttnStatus, AttnTensor) {
    let mut tensor = floats(&[], [0; 4]);
    // SAFETY: the struct is this function's own.
    let status = unsafe { abi::attn_tensor_contiguous(&mut tensor, ptr::null_mut(), dtype, layout, b, h, s, d) };
    (status, tensor)
}

/// A plan, destroyed when it is dropped.
pub(crate) struct Plan(*mut AttnPlan);

// SAFETY: the header says that threads may run one plan at once.
unsafe impl Sync for Plan {}

impl Plan {
    pub(crate) fn new(options: &AttnOptions, shape: &AttnShape) -> Result<Self, AttnStatus> {
        let mut plan = ptr::null_mut();
        // SAFETY: options point to what the test owns.
        match unsafe { abi::attn_plan_create(options, shape, &mut plan) } {
            AttnStatus::Ok => Ok(Self(plan)),
            status => Err(status),
        }
    }

    pub(crate) fn run(&self, workspace: Option<&Workspace>, a: Arguments<'_>) -> AttnStatus {
        let workspace = workspace.map_or(ptr::null_mut(), |workspace| workspace.0);
        let (q, k, v, out) = (pointer(a.q), pointer(a.k), pointer(a.v), pointer(a.out));
        // SAFETY: as `forward`; plan and workspace are alive.
        unsafe { abi::attn_plan_run(self.0, workspace, q, k, v, out, a.lse.0, a.lse.1) }
    }

    pub(crate) fn state_len(&self) -> usize {
        let mut len = 0;
        // SAFETY: the plan is alive.
        assert_eq!(unsafe { abi::attn_plan_state_len(self.0, &mut len) }, AttnStatus::Ok);
        len
    }

    pub(crate) fn state(
        &self,
        workspace: Option<&Workspace>,
        first: usize,
        [q, k, v]: [&AttnTensor; 3],
        rows: &mut [f32],
    ) -> AttnStatus {
        let workspace = workspace.map_or(ptr::null_mut(), |workspace| workspace.0);
        // SAFETY: as `forward`; plan and workspace are alive.
        unsafe { abi::attn_plan_state(self.0, workspace, first, q, k, v, rows.as_mut_ptr(), rows.len()) }
    }

    pub(crate) fn finish(&self, rows: &[f32], out: &AttnTensor, lse: &mut [f32]) -> AttnStatus {
        // SAFETY: as `forward`; the plan is alive.
        unsafe { abi::attn_plan_finish(self.0, rows.as_ptr(), rows.len(), out, lse.as_mut_ptr(), lse.len()) }
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        let mut bytes = 0;
        // SAFETY: the plan is alive.
        assert_eq!(unsafe { abi::attn_plan_workspace_bytes(self.0, &mut bytes) }, AttnStatus::Ok);
        bytes
    }

    pub(crate) fn explain(&self) -> String {
        let mut bytes = [0 as c_char; attn::types::ATTN_EXPLAIN_SIZE];
        // SAFETY: the plan is alive, the buffer holds as many bytes as it says.
        let status = unsafe { abi::attn_plan_explain(self.0, AttnDtype::F32 as u32, bytes.as_mut_ptr(), bytes.len()) };
        assert_eq!(status, AttnStatus::Ok);
        text(bytes.as_ptr())
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { abi::attn_plan_destroy(self.0) };
    }
}

/// A workspace, destroyed when it is dropped.
pub(crate) struct Workspace(*mut AttnWorkspace);

// SAFETY: the header says that a second call at once is refused.
unsafe impl Sync for Workspace {}

impl Workspace {
    pub(crate) fn new(plan: Option<&Plan>, threads: usize) -> Result<Self, AttnStatus> {
        let mut workspace = ptr::null_mut();
        let plan = plan.map_or(ptr::null(), |plan| plan.0.cast_const());
        // SAFETY: the plan is alive.
        match unsafe { abi::attn_workspace_create(plan, threads, &mut workspace) } {
            AttnStatus::Ok => Ok(Self(workspace)),
            status => Err(status),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let mut bytes = 0;
        // SAFETY: the workspace is alive.
        assert_eq!(unsafe { abi::attn_workspace_bytes(self.0, &mut bytes) }, AttnStatus::Ok);
        bytes
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { abi::attn_workspace_destroy(self.0) };
    }
}

/// Every function that takes a pointer, with null in its place.
pub(crate) fn all_null() -> Vec<(&'static str, AttnStatus)> {
    fn none<T>() -> *mut T {
        ptr::null_mut()
    }
    let (shape, mut plan) = (sizes([1; 4], 1), none());
    // SAFETY: null is what these calls are about.
    unsafe {
        abi::attn_plan_destroy(none());
        abi::attn_workspace_destroy(none());
        vec![
            ("tensor", abi::attn_tensor_contiguous(none(), none(), 1, 0, 1, 1, 1, 1)),
            ("q", abi::attn_forward(none(), none(), none(), none(), none(), none(), 0)),
            ("AttnGradients", abi::attn_backward(none(), none(), none(), none(), none(), none(), 0, none(), none())),
            ("cache", abi::attn_decode(none(), none(), none(), none(), none(), none(), 0)),
            ("cache", abi::attn_cache_append(none(), none(), none(), none(), 0)),
            ("plan", abi::attn_plan_state_len(none(), none())),
            ("plan", abi::attn_plan_state(none(), none(), 0, none(), none(), none(), none(), 0)),
            ("plan", abi::attn_plan_finish(none(), none(), 0, none(), none(), 0)),
            ("states", abi::attn_merge_states(none(), [0.0; 3].as_ptr(), 3, 1)),
            ("other", abi::attn_merge_outputs(none(), none(), none(), none(), 0)),
            ("AttnShape", abi::attn_explain(none(), none(), 1, none(), 0)),
            ("text", abi::attn_explain(none(), &shape, 1, none(), 0)),
            ("AttnShape", abi::attn_explain_backward(none(), none(), 1, 1, none(), 0)),
            ("text", abi::attn_explain_backward(none(), &shape, 1, 1, none(), 0)),
            ("AttnShape", abi::attn_plan_create(none(), none(), &mut plan)),
            ("plan", abi::attn_plan_create(none(), &shape, none())),
            ("plan", abi::attn_plan_workspace_bytes(none(), none())),
            ("plan", abi::attn_plan_explain(none(), 1, none(), 0)),
            ("plan", abi::attn_plan_run(none(), none(), none(), none(), none(), none(), none(), 0)),
            ("workspace", abi::attn_workspace_create(none(), 1, none())),
            ("workspace", abi::attn_workspace_bytes(none(), none())),
            ("name", abi::attn_level(none())),
        ]
    }
}

/// A struct handed over at another size than its own: `bytes` are what lies in memory.
pub(crate) fn forward_with_options_of(bytes: &[usize], a: Arguments<'_>) -> AttnStatus {
    let options = bytes.as_ptr().cast::<AttnOptions>();
    // SAFETY: the first word says how many bytes there are, or something impossible.
    unsafe { abi::attn_forward(options, pointer(a.q), pointer(a.k), pointer(a.v), pointer(a.out), a.lse.0, a.lse.1) }
}

/// The words of a struct.
pub(crate) fn words(options: &AttnOptions) -> Vec<usize> {
    let count = size_of::<AttnOptions>() / size_of::<usize>();
    // SAFETY: made by `options`, so that every byte is set, padding too; a whole number of words.
    unsafe { std::slice::from_raw_parts(ptr::from_ref(options).cast::<usize>(), count) }.to_vec()
}

/// Forks; the child runs `f` and ends with its answer, which this gives. `None` if it takes more than half a minute.
#[cfg(all(unix, not(miri)))]
pub(crate) fn in_child(f: impl FnOnce() -> bool) -> Option<bool> {
    unsafe extern "C" {
        fn fork() -> i32;
        fn _exit(code: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, flags: i32) -> i32;
        fn kill(pid: i32, signal: i32) -> i32;
    }
    const WITHOUT_WAITING: i32 = 1;
    const KILL: i32 = 9;
    // SAFETY: the child calls nothing but `f` and leaves without running anything of its parent's.
    unsafe {
        let pid = fork();
        assert!(pid >= 0, "fork");
        if pid == 0 {
            let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(false);
            _exit(i32::from(!fine));
        }
        for _ in 0..300 {
            let mut status = 0;
            if waitpid(pid, &mut status, WITHOUT_WAITING) == pid {
                return Some(status == 0);
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        kill(pid, KILL);
        waitpid(pid, &mut 0, 0);
        None
    }
}

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, with a count beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How many times this thread allocates in `f`.
pub(crate) fn allocations(f: impl FnOnce()) -> usize {
    let before = COUNT.with(Cell::get);
    f();
    COUNT.with(Cell::get) - before
}
