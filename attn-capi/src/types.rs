//! The structs and constants of `attn.h`: plain data, laid out as C does.
//!
//! Each struct begins with its size. A caller with an older header passes a shorter struct: the missing fields count as
//! zero, and zero is always the default. So fields can be added at the end, and nothing else can change. Constants are
//! `uint32_t`, never Rust enums, because a C caller may pass any number.

use core::ffi::c_char;
use core::ffi::c_void;

/// The result of a function. attn_last_error() has the text for people.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttnStatus {
    /// Done.
    Ok = 0,
    /// A pointer is null, and must not be.
    NullPointer = 1,
    /// A struct_size is impossible, or a struct sets a field that this version does not know.
    StructSize = 2,
    /// A pointer is not aligned for its type.
    Misaligned = 3,
    /// Sizes disagree: of two tensors, of a table, in a broadcast; or q_heads is not a multiple of kv_heads.
    Shape = 4,
    /// A buffer is shorter than its shape and strides reach.
    Bounds = 5,
    /// A product of sizes does not fit in size_t.
    Overflow = 6,
    /// An output shares memory with an input, another output or itself.
    Overlap = 7,
    /// An option has a value that is not allowed.
    Option = 8,
    /// A table holds an index that is out of range or out of order, or a boolean tensor holds a byte above 1.
    Table = 9,
    /// Valid, but not supported here: a level that this machine lacks, a dtype that the kernels do not compute.
    Unsupported = 10,
    /// Another call uses the workspace.
    Busy = 11,
    /// The scratch cannot be allocated.
    OutOfMemory = 12,
    /// A bug in this library.
    Internal = 13,
}

/// The type of a tensor's elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttnDtype {
    /// float
    F32 = 1,
    /// IEEE half precision, as uint16_t bits
    F16 = 2,
    /// bfloat16, as uint16_t bits
    Bf16 = 3,
    /// double; for a bias only
    F64 = 4,
    /// One byte, 0 or 1; for masks
    Bool = 5,
    /// int8, times AttnCache.k_scales or v_scales; for caches
    I8 = 6,
    /// fp8 e4m3fn, times scales; for caches
    F8e4m3 = 7,
    /// fp8 e5m2, times scales; for caches
    F8e5m2 = 8,
    /// ggml's q8_0: blocks of 32 numbers in 34 bytes; for caches
    Q8_0 = 9,
    /// ggml's q4_0: blocks of 32 numbers in 18 bytes; for caches
    Q4_0 = 10,
}

impl AttnDtype {
    /// The number type that a number names.
    pub(crate) fn of(value: u32) -> Option<Self> {
        let plain = [Self::F32, Self::F16, Self::Bf16, Self::F64, Self::Bool];
        let packed = [Self::I8, Self::F8e4m3, Self::F8e5m2, Self::Q8_0, Self::Q4_0];
        plain.into_iter().chain(packed).find(|&dtype| dtype as u32 == value)
    }

    /// Its name in texts: as the constant ends.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F64 => "F64",
            Self::Bool => "BOOL",
            Self::I8 => "I8",
            Self::F8e4m3 => "F8E4M3",
            Self::F8e5m2 => "F8E5M2",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
        }
    }
}

/// The key position of query 0, for causal masks, windows and ALiBi.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttnAlign {
    /// Not used: no causal mask, no window.
    None = 0,
    /// At key 0.
    TopLeft = 1,
    /// At the key that puts the last query at the last key: decoding with a cache.
    BottomRight = 2,
    /// At the key in the field ..._offset, which may be negative.
    Offset = 3,
}

/// How exact a result must be if the hardware has a faster way.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttnPrecision {
    /// As exact as f32 arithmetic, whatever the number of keys. An f32 output is off by at most 2u(2 + S) of the sum of
    /// p|v| over the keys; by 6u(2 + S) if magnitudes are random; inputs that we chose to err stay within 12u(2 + S).
    /// lse is off by 4u(2 + S + |lse|). u is 2^-24; S is the largest (|scale| * sum of |q_d * k_d| +
    /// |bias| + |ALiBi|) / temperature of the row's visible keys, and no less than its sink. Half outputs are the exact
    /// result rounded once, but for about one element in a hundred that lies beside the middle of two.
    Exact = 0,
    /// Faster where the level multiplies bf16 (avx512bf16, amx), and for attn_decode() over int8 and q8_0; else the
    /// same as Exact. An f32 output is off by at most 2^-16(1 + S) of that sum; the root mean square error of half
    /// outputs is 1.4 times that of rounding, with a sink among the keys up to 1.7 times. lse is off by 2^-16(1 + S),
    /// from bf16 into bf16 by up to 2^-7. Over int8 and q8_0 on AVX-512, AVX2 and Arm with SDOT queries and weights are
    /// rounded to 16 bits if heads share keys: a score and lse are off by d = |scale| * max |q_d| * max sum |k_d| /
    /// 32639, an output by (e^2d - 1) of the sum of p|v|, and by an eighth of what storing the values in int8 costs.
    Fast = 1,
}

/// The order in which a contiguous tensor stores its axes, outermost first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttnLayout {
    /// [batch, heads, seq, dim]
    Bhsd = 0,
    /// [batch, seq, heads, dim]
    Bshd = 1,
    /// [seq, batch, heads, dim]
    Sbhd = 2,
}

/// For window_left and window_right: no limit on that side. cbindgen.toml writes it into the header: cbindgen leaves
/// out what is not a number.
pub const ATTN_UNBOUNDED: usize = usize::MAX;

/// Bytes that hold any text of attn_explain(), attn_plan_explain() and attn_explain_backward(), with its final 0.
pub const ATTN_EXPLAIN_SIZE: usize = 512;

/// A tensor in the caller's memory. Sizes and strides are in the order [batch, heads, seq, dim], whatever the order in
/// memory. Of the dtypes Q8_0 and Q4_0, shape counts numbers, whole blocks of 32 to a row, and len, strides and offset
/// count bytes; the blocks of a row are contiguous (the last stride is 1).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttnTensor {
    /// sizeof(AttnTensor)
    pub struct_size: usize,
    /// The buffer. Inputs are never written. May be null if len is 0.
    pub data: *mut c_void,
    /// Elements in the buffer. Nothing beyond them is read or written.
    pub len: usize,
    /// [batch, heads, seq, dim]; masks and biases: [batch, q_heads, q_len, kv_len], where 1 broadcasts.
    pub shape: [usize; 4],
    /// In elements. Inputs may have 0 and negative strides.
    pub strides: [isize; 4],
    /// Index in the buffer of the element [0, 0, 0, 0].
    pub offset: usize,
    /// An AttnDtype.
    pub dtype: u32,
    /// Zero.
    pub reserved: u32,
}

/// Sizes of a call. Query head h reads key/value head h / (q_heads / kv_heads).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttnShape {
    /// sizeof(AttnShape)
    pub struct_size: usize,
    /// Independent sequences.
    pub batch: usize,
    /// Heads of q and of the output.
    pub q_heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// Queries per head.
    pub q_len: usize,
    /// Keys per head.
    pub kv_len: usize,
    /// Size of a query and of a key.
    pub head_dim: usize,
    /// Size of a value.
    pub value_dim: usize,
}

/// How a cache lays out its tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttnCacheKind {
    /// k and v are [batch, kv_heads, capacity, dim]; `lens[b]` tokens fill the first slots of sequence b.
    Append = 0,
    /// k and v are [batch, kv_heads, at least sinks + window, dim]: the first tokens, and a ring of the last ones.
    /// `lens[b]` counts all tokens so far, with the dropped ones.
    Ring = 1,
    /// k and v are [pages, kv_heads, page_size, dim]; token t of sequence b is in its page t / page_size. Either
    /// block_table and lens say which pages a sequence has, or kv_indptr, kv_indices and kv_last_page_len do.
    Paged = 2,
}

/// Keys and values of a batch of sequences, in the caller's memory. Slots without a token are never read. A field that
/// belongs to another kind of cache must be zero (ATTN_STATUS_OPTION).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttnCache {
    /// sizeof(AttnCache)
    pub struct_size: usize,
    /// An AttnCacheKind.
    pub kind: u32,
    /// Zero.
    pub reserved: u32,
    /// Keys; f32, f16, bf16, or a dtype for caches.
    pub k: *const AttnTensor,
    /// Values, of the dtype of k. If one of them has a dtype for caches, the other has such a dtype too, f16 or bf16.
    pub v: *const AttnTensor,
    /// Tokens of each sequence: attn_decode() reads them, attn_cache_append() increases them. Write a smaller number to
    /// forget the last tokens (not in a ring that has dropped tokens). Null with kv_indptr.
    pub lens: *mut usize,
    /// Entries in lens: one per sequence.
    pub lens_len: usize,
    /// Rings: the first tokens, which are always kept.
    pub sinks: usize,
    /// Rings: the last tokens, which are kept; at least 1.
    pub window: usize,
    /// Pages: [batch, width], row by row; required without kv_indptr, and null with it. Entries after a sequence's last
    /// page are not read.
    pub block_table: *const i32,
    /// Entries in block_table: a multiple of lens_len.
    pub block_table_len: usize,
    /// Pages in compressed rows, as FlashInfer and SGLang have them, instead of block_table and lens (both null): the
    /// pages of sequence b are `kv_indices[i]` with `kv_indptr[b] <= i < kv_indptr[b + 1]`.
    pub kv_indptr: *const i32,
    /// Entries in kv_indptr: batch + 1.
    pub kv_indptr_len: usize,
    /// The pages of all sequences.
    pub kv_indices: *const i32,
    /// Entries in kv_indices: at least the last of kv_indptr.
    pub kv_indices_len: usize,
    /// Tokens in the last page of each sequence, from 1 to page_size; batch entries. The entry of a sequence without
    /// pages is not read. attn_cache_append() does not change it.
    pub kv_last_page_len: *const i32,
    /// Scales of keys in int8 or fp8, f32; null for others. A scale for each token of a head has the sizes of k but for
    /// the last, which is 1: attn_cache_append() chooses and writes it. Sizes that are 1 where those of k are not
    /// broadcast ([1, 1, 1, 1] or [1, kv_heads, 1, 1]), and are only read.
    pub k_scales: *const AttnTensor,
    /// The same of values.
    pub v_scales: *const AttnTensor,
}

/// Which rows of q are queries of which sequence. The queries of a sequence are its last tokens; the cache already
/// holds their keys. If both tables are null, each row of q, [batch, q_heads, q_len, head_dim], is a query.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttnQueries {
    /// sizeof(AttnQueries)
    pub struct_size: usize,
    /// Only the first `lens[b]` rows of sequence b are queries. The other rows have output 0 and lse -inf.
    pub lens: *const usize,
    /// Entries in lens: batch.
    pub lens_len: usize,
    /// q and out are [1, q_heads, total, dim], one sequence after the other: sequence b has the rows
    /// `cu[b] <= row < cu[b + 1]`.
    pub cu: *const usize,
    /// Entries in cu: batch + 1.
    pub cu_len: usize,
}

/// Where attn_backward() writes gradients: all are overwritten, not added to. dq, dk and dv share one dtype: f32, f16
/// or bf16. They may have any strides, but the memory from the first to the last element of one must not meet that of
/// another: dq, dk and dv side by side in each token of one buffer are ATTN_STATUS_OVERLAP.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttnGradients {
    /// sizeof(AttnGradients)
    pub struct_size: usize,
    /// The shape of q.
    pub dq: *const AttnTensor,
    /// The shape of k: summed over the query heads of a group.
    pub dk: *const AttnTensor,
    /// The shape of v: summed over the query heads of a group.
    pub dv: *const AttnTensor,
    /// One per query head, for AttnOptions.sinks: zeros if these are null. Null for none.
    pub dsinks: *mut f64,
    /// Entries in dsinks: q_heads.
    pub dsinks_len: usize,
    /// For AttnOptions.bias, f64: broadcasts to [batch, q_heads, q_len, kv_len], summed over the axes of size 1. Null
    /// for none.
    pub dbias: *const AttnTensor,
    /// The derivative of AttnOptions.score_mod by the score that it is given; must be set with score_mod, and null
    /// without. It gets the user_data of the options.
    pub score_mod_derivative: AttnScoreMod,
}

/// Changes a score. Several threads call it at once. A C++ exception that leaves it ends the process.
pub type AttnScoreMod = Option<
    extern "C-unwind" fn(
        score: f64,
        batch: usize,
        head: usize,
        query: usize,
        key: usize,
        user_data: *mut c_void,
    ) -> f64,
>;

/// Returns whether a key that the masks show stays visible (non-zero: yes). Several threads call it at once. A C++
/// exception that leaves it ends the process.
pub type AttnMaskMod =
    Option<extern "C-unwind" fn(batch: usize, head: usize, query: usize, key: usize, user_data: *mut c_void) -> i32>;

/// The options of a call: softmax(scale * q.k -> soft-cap -> bias -> mask) . v. All zeros is the textbook formula with
/// scale 1/sqrt(head_dim) and no mask. A key is visible if every mask shows it. A field that would have no effect must
/// be zero (ATTN_STATUS_OPTION): scale without has_scale, window_left without window (ATTN_UNBOUNDED is allowed too),
/// an offset without ATTN_ALIGN_OFFSET, block_q without blocks, dropout_seed without dropout_p or with dropout_keep,
/// user_data without a function.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttnOptions {
    /// sizeof(AttnOptions)
    pub struct_size: usize,
    /// The most threads to use; 0 for all. No bit of the result depends on it.
    pub threads: usize,
    /// The name of an instruction-set level (attn_levels()). Null for the best level of this machine, or the one in the
    /// environment variable ATTN_LEVEL.
    pub level: *const c_char,
    /// The factor of q.k, if has_scale is not 0; otherwise it is 1/sqrt(head_dim).
    pub scale: f64,
    /// c * tanh(s / c); 0 for none.
    pub softcap: f64,
    /// Divides the scores after bias, ALiBi and score_mod; 0 for none.
    pub temperature: f64,
    /// Whether scale is given.
    pub has_scale: u32,
    /// An AttnPrecision.
    pub precision: u32,

    /// An AttnAlign: query i sees keys j <= i + offset.
    pub causal: u32,
    /// An AttnAlign; ATTN_ALIGN_NONE is no window.
    pub window: u32,
    /// For ATTN_ALIGN_OFFSET; 0 with any other alignment.
    pub causal_offset: isize,
    /// For ATTN_ALIGN_OFFSET; 0 with any other alignment.
    pub window_offset: isize,
    /// Inclusive distance to the left, or ATTN_UNBOUNDED.
    pub window_left: usize,
    /// Inclusive distance to the right, or ATTN_UNBOUNDED.
    pub window_right: usize,

    /// An AttnAlign: prefix-LM. All queries see the keys of the prefix; the other keys are causal.
    pub prefix: u32,
    /// Zero.
    pub reserved: u32,
    /// For ATTN_ALIGN_OFFSET; 0 with any other alignment.
    pub prefix_offset: isize,
    /// Lengths of the prefix: one for all, or one per sequence.
    pub prefix_lens: *const usize,
    /// Entries in prefix_lens.
    pub prefix_lens_len: usize,

    /// Hides the keys from this index on (right padding): one for all, or one per sequence.
    pub kv_lens: *const usize,
    /// Entries in kv_lens.
    pub kv_lens_len: usize,
    /// Hides the keys before this index (left padding): one for all, or one per sequence.
    pub kv_starts: *const usize,
    /// Entries in kv_starts.
    pub kv_starts_len: usize,
    /// Queries from this index on see no key: one for all, or one per sequence.
    pub q_lens: *const usize,
    /// Entries in q_lens.
    pub q_lens_len: usize,

    /// Packed sequences, end to end: the first query of each document, then the end of the last one. Queries before the
    /// first and behind the last document see nothing: their output is 0.
    pub cu_q: *const usize,
    /// Documents + 1.
    pub cu_q_len: usize,
    /// The same for their keys.
    pub cu_k: *const usize,
    /// Documents + 1.
    pub cu_k_len: usize,
    /// An AttnAlign: causal inside each document.
    pub document_causal: u32,
    /// An AttnAlign: a window inside each document.
    pub document_window: u32,
    /// For ATTN_ALIGN_OFFSET; 0 with any other alignment.
    pub document_causal_offset: isize,
    /// For ATTN_ALIGN_OFFSET; 0 with any other alignment.
    pub document_window_offset: isize,
    /// Inclusive distance to the left, or ATTN_UNBOUNDED.
    pub document_window_left: usize,
    /// Inclusive distance to the right, or ATTN_UNBOUNDED.
    pub document_window_right: usize,

    /// Bools, [batch or 1, q_heads or 1, ceil(q_len / block_q), ceil(kv_len / block_k)]: 1 shows the block.
    pub blocks: *const AttnTensor,
    /// Queries per block; 0 without blocks.
    pub block_q: usize,
    /// Keys per block; 0 without blocks.
    pub block_k: usize,

    /// Draft tokens: the index of each query's parent, or -1 for a root. The last tree_len keys are the nodes.
    pub tree_parents: *const isize,
    /// Entries in tree_parents: q_len.
    pub tree_len: usize,

    /// Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 shows the key (torch's and ONNX's attn_mask).
    pub keep: *const AttnTensor,
    /// Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 hides the key (key_padding_mask).
    pub drop: *const AttnTensor,
    /// Added to the scores; f32, f16, bf16 or f64, broadcasts to [batch, q_heads, q_len, kv_len]. -inf hides the key.
    pub bias: *const AttnTensor,

    /// Adds -slope * distance; one slope per query head.
    pub alibi_slopes: *const f32,
    /// Entries in alibi_slopes: q_heads.
    pub alibi_slopes_len: usize,
    /// For ATTN_ALIGN_OFFSET; 0 with any other alignment.
    pub alibi_offset: isize,
    /// An AttnAlign; must be set if there are slopes.
    pub alibi: u32,

    /// Probability of dropping a weight after the softmax, 0 <= p < 1; kept weights are divided by 1 - p.
    pub dropout_p: f32,
    /// Seed of the random numbers; 0 without dropout_p, and with dropout_keep.
    pub dropout_seed: u64,
    /// Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 keeps the weight, which is divided by
    /// 1 - dropout_p: it stays as it is if that is 0.
    pub dropout_keep: *const AttnTensor,

    /// One more logit per query head, in the softmax's denominator only.
    pub sinks: *const f32,
    /// Entries in sinks: q_heads.
    pub sinks_len: usize,

    /// Changes each score after bias and ALiBi; null for none.
    pub score_mod: AttnScoreMod,
    /// Hides keys; null for none.
    pub mask_mod: AttnMaskMod,
    /// Passed to score_mod and mask_mod; null without both.
    pub user_data: *mut c_void,

    /// Non-zero: a row has the same bits for any number of queries and keys in the call, so a prompt may be computed at
    /// once, in parts or token by token. Slower for many queries. attn_decode() always has this property.
    pub reproducible: u32,
    /// Zero.
    pub reserved_too: u32,
}
