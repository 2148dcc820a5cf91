/* attn.h: exact attention on CPUs, for C and C++.
 *
 * Written by cbindgen from attn-capi/src; do not edit (ATTN_WRITE_HEADER=1 cargo test -p attn-capi --test it header).
 *
 * Set struct_size of each struct to its sizeof, set all other fields to zero, then set the fields that you need.
 * Functions return an AttnStatus; attn_last_error() has the text of an error. No pointer is followed beyond its length.
 * Only tables are copied.
 *
 * Environment: ATTN_LEVEL=avx2 restricts a program to one level: portable, dotprod (on Arm), avx2, avx512, avx512bf16
 * or amx, written exactly so. A level that cannot run, or another name, is ignored: the best level runs, and a line on
 * stderr says so; attn_level() returns it as an error.
 *
 * AMX: Linux lets a process use AMX only after a request. On a machine with AMX, attn_levels(), attn_level() and the
 * first call without AttnOptions.level make this request, once per process. From then on Linux refuses small alternate
 * signal stacks to every thread of the process: sigaltstack() fails with ENOMEM below getauxval(AT_MINSIGSTKSZ). 2048
 * to 11264 bytes are too small, 16384 are enough. If a thread already has a small stack, Linux refuses the request, and
 * avx512 runs. A program that needs small signal stacks must not make the request: set ATTN_LEVEL=avx512bf16 (avx512
 * on a processor without it; a name that cannot run does make it) and do not call attn_levels(), or set
 * AttnOptions.level to that name in every call. */

#ifndef ATTN_H
#define ATTN_H

#include <stddef.h>
#include <stdint.h>
#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 1
#define ATTN_VERSION_PATCH 0
#define ATTN_VERSION "0.1.0"

/* For window_left and window_right: no limit on that side. */
#define ATTN_UNBOUNDED ((size_t)-1)

/* What a struct starts as: its size, and zero for all else. An initialiser: AttnOptions options = ATTN_OPTIONS_INIT;
 * in C it is no value to be assigned later. C++ takes them from C++11 on. */
#ifdef __cplusplus
#define ATTN_INIT_(Type) ([] { Type init = Type(); init.struct_size = sizeof(Type); return init; }())
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 199901L
#define ATTN_INIT_(Type) {.struct_size = sizeof(Type)}
#else
#define ATTN_INIT_(Type) {sizeof(Type)}
#endif
#define ATTN_TENSOR_INIT ATTN_INIT_(AttnTensor)
#define ATTN_OPTIONS_INIT ATTN_INIT_(AttnOptions)
#define ATTN_CACHE_INIT ATTN_INIT_(AttnCache)
#define ATTN_QUERIES_INIT ATTN_INIT_(AttnQueries)
#define ATTN_SHAPE_INIT ATTN_INIT_(AttnShape)
#define ATTN_GRADIENTS_INIT ATTN_INIT_(AttnGradients)



/* Bytes that hold any text of attn_explain(), attn_plan_explain() and attn_explain_backward(), with its final 0. */
#define ATTN_EXPLAIN_SIZE 512

/* The result of a function. attn_last_error() has the text for people. */
typedef enum AttnStatus {
  /* Done. */
  ATTN_STATUS_OK = 0,
  /* A pointer is null, and must not be. */
  ATTN_STATUS_NULL_POINTER = 1,
  /* A struct_size is impossible, or a struct sets a field that this version does not know. */
  ATTN_STATUS_STRUCT_SIZE = 2,
  /* A pointer is not aligned for its type. */
  ATTN_STATUS_MISALIGNED = 3,
  /* Sizes disagree: of two tensors, of a table, in a broadcast; or q_heads is not a multiple of kv_heads. */
  ATTN_STATUS_SHAPE = 4,
  /* A buffer is shorter than its shape and strides reach. */
  ATTN_STATUS_BOUNDS = 5,
  /* A product of sizes does not fit in size_t. */
  ATTN_STATUS_OVERFLOW = 6,
  /* An output shares memory with an input, another output or itself. */
  ATTN_STATUS_OVERLAP = 7,
  /* An option has a value that is not allowed. */
  ATTN_STATUS_OPTION = 8,
  /* A table holds an index that is out of range or out of order, or a boolean tensor holds a byte above 1. */
  ATTN_STATUS_TABLE = 9,
  /* Valid, but not supported here: a level that this machine lacks, a dtype that the kernels do not compute. */
  ATTN_STATUS_UNSUPPORTED = 10,
  /* Another call uses the workspace. */
  ATTN_STATUS_BUSY = 11,
  /* The scratch cannot be allocated. */
  ATTN_STATUS_OUT_OF_MEMORY = 12,
  /* A bug in this library. */
  ATTN_STATUS_INTERNAL = 13
} AttnStatus;

/* The type of a tensor's elements. */
typedef enum AttnDtype {
  /* float */
  ATTN_DTYPE_F32 = 1,
  /* IEEE half precision, as uint16_t bits */
  ATTN_DTYPE_F16 = 2,
  /* bfloat16, as uint16_t bits */
  ATTN_DTYPE_BF16 = 3,
  /* double; for a bias only */
  ATTN_DTYPE_F64 = 4,
  /* One byte, 0 or 1; for masks */
  ATTN_DTYPE_BOOL = 5,
  /* int8, times AttnCache.k_scales or v_scales; for caches */
  ATTN_DTYPE_I8 = 6,
  /* fp8 e4m3fn, times scales; for caches */
  ATTN_DTYPE_F8E4M3 = 7,
  /* fp8 e5m2, times scales; for caches */
  ATTN_DTYPE_F8E5M2 = 8,
  /* ggml's q8_0: blocks of 32 numbers in 34 bytes; for caches */
  ATTN_DTYPE_Q8_0 = 9,
  /* ggml's q4_0: blocks of 32 numbers in 18 bytes; for caches */
  ATTN_DTYPE_Q4_0 = 10
} AttnDtype;

/* The key position of query 0, for causal masks, windows and ALiBi. */
typedef enum AttnAlign {
  /* Not used: no causal mask, no window. */
  ATTN_ALIGN_NONE = 0,
  /* At key 0. */
  ATTN_ALIGN_TOP_LEFT = 1,
  /* At the key that puts the last query at the last key: decoding with a cache. */
  ATTN_ALIGN_BOTTOM_RIGHT = 2,
  /* At the key in the field ..._offset, which may be negative. */
  ATTN_ALIGN_OFFSET = 3
} AttnAlign;

/* The order in which a contiguous tensor stores its axes, outermost first. */
typedef enum AttnLayout {
  /* [batch, heads, seq, dim] */
  ATTN_LAYOUT_BHSD = 0,
  /* [batch, seq, heads, dim] */
  ATTN_LAYOUT_BSHD = 1,
  /* [seq, batch, heads, dim] */
  ATTN_LAYOUT_SBHD = 2
} AttnLayout;

/* How exact a result must be if the hardware has a faster way. */
typedef enum AttnPrecision {
  /* As exact as f32 arithmetic, whatever the number of keys. An f32 output is off by at most 2u(2 + S) of the sum of
   * p|v| over the keys; by 6u(2 + S) if magnitudes are random; inputs that we chose to err stay within 12u(2 + S).
   * lse is off by 4u(2 + S + |lse|). u is 2^-24; S is the largest (|scale| * sum of |q_d * k_d| +
   * |bias| + |ALiBi|) / temperature of the row's visible keys, and no less than its sink. Half outputs are the exact
   * result rounded once, but for about one element in a hundred that lies beside the middle of two. */
  ATTN_PRECISION_EXACT = 0,
  /* Faster where the level multiplies bf16 (avx512bf16, amx), and for attn_decode() over int8 and q8_0; else the
   * same as Exact. An f32 output is off by at most 2^-16(1 + S) of that sum; the root mean square error of half
   * outputs is 1.4 times that of rounding, with a sink among the keys up to 1.7 times. lse is off by 2^-16(1 + S),
   * from bf16 into bf16 by up to 2^-7. Over int8 and q8_0 on AVX-512, AVX2 and Arm with SDOT queries and weights are
   * rounded to 16 bits if heads share keys: a score and lse are off by d = |scale| * max |q_d| * max sum |k_d| /
   * 32639, an output by (e^2d - 1) of the sum of p|v|, and by an eighth of what storing the values in int8 costs. */
  ATTN_PRECISION_FAST = 1
} AttnPrecision;

/* How a cache lays out its tokens. */
typedef enum AttnCacheKind {
  /* k and v are [batch, kv_heads, capacity, dim]; `lens[b]` tokens fill the first slots of sequence b. */
  ATTN_CACHE_KIND_APPEND = 0,
  /* k and v are [batch, kv_heads, at least sinks + window, dim]: the first tokens, and a ring of the last ones.
   * `lens[b]` counts all tokens so far, with the dropped ones. */
  ATTN_CACHE_KIND_RING = 1,
  /* k and v are [pages, kv_heads, page_size, dim]; token t of sequence b is in its page t / page_size. Either
   * block_table and lens say which pages a sequence has, or kv_indptr, kv_indices and kv_last_page_len do. */
  ATTN_CACHE_KIND_PAGED = 2
} AttnCacheKind;

/* Options and sizes, checked once. Never changes; any number of threads may run one plan at once, each with a
 * workspace of its own. */
typedef struct AttnPlan AttnPlan;

/* Scratch for the threads of one call at a time. It belongs to no plan, and grows to the size that a plan needs. */
typedef struct AttnWorkspace AttnWorkspace;

/* A tensor in the caller's memory. Sizes and strides are in the order [batch, heads, seq, dim], whatever the order in
 * memory. Of the dtypes Q8_0 and Q4_0, shape counts numbers, whole blocks of 32 to a row, and len, strides and offset
 * count bytes; the blocks of a row are contiguous (the last stride is 1). */
typedef struct AttnTensor {
  /* sizeof(AttnTensor) */
  size_t struct_size;
  /* The buffer. Inputs are never written. May be null if len is 0. */
  void *data;
  /* Elements in the buffer. Nothing beyond them is read or written. */
  size_t len;
  /* [batch, heads, seq, dim]; masks and biases: [batch, q_heads, q_len, kv_len], where 1 broadcasts. */
  size_t shape[4];
  /* In elements. Inputs may have 0 and negative strides. */
  ptrdiff_t strides[4];
  /* Index in the buffer of the element [0, 0, 0, 0]. */
  size_t offset;
  /* An AttnDtype. */
  uint32_t dtype;
  /* Zero. */
  uint32_t reserved;
} AttnTensor;

/* Changes a score. Several threads call it at once. A C++ exception that leaves it ends the process. */
typedef double (*AttnScoreMod)(double score, size_t batch, size_t head, size_t query, size_t key, void *user_data);

/* Returns whether a key that the masks show stays visible (non-zero: yes). Several threads call it at once. A C++
 * exception that leaves it ends the process. */
typedef int32_t (*AttnMaskMod)(size_t batch, size_t head, size_t query, size_t key, void *user_data);

/* The options of a call: softmax(scale * q.k -> soft-cap -> bias -> mask) . v. All zeros is the textbook formula with
 * scale 1/sqrt(head_dim) and no mask. A key is visible if every mask shows it. A field that would have no effect must
 * be zero (ATTN_STATUS_OPTION): scale without has_scale, window_left without window (ATTN_UNBOUNDED is allowed too),
 * an offset without ATTN_ALIGN_OFFSET, block_q without blocks, dropout_seed without dropout_p or with dropout_keep,
 * user_data without a function. */
typedef struct AttnOptions {
  /* sizeof(AttnOptions) */
  size_t struct_size;
  /* The most threads to use; 0 for all. No bit of the result depends on it. */
  size_t threads;
  /* The name of an instruction-set level (attn_levels()). Null for the best level of this machine, or the one in the
   * environment variable ATTN_LEVEL. */
  const char *level;
  /* The factor of q.k, if has_scale is not 0; otherwise it is 1/sqrt(head_dim). */
  double scale;
  /* c * tanh(s / c); 0 for none. */
  double softcap;
  /* Divides the scores after bias, ALiBi and score_mod; 0 for none. */
  double temperature;
  /* Whether scale is given. */
  uint32_t has_scale;
  /* An AttnPrecision. */
  uint32_t precision;
  /* An AttnAlign: query i sees keys j <= i + offset. */
  uint32_t causal;
  /* An AttnAlign; ATTN_ALIGN_NONE is no window. */
  uint32_t window;
  /* For ATTN_ALIGN_OFFSET; 0 with any other alignment. */
  ptrdiff_t causal_offset;
  /* For ATTN_ALIGN_OFFSET; 0 with any other alignment. */
  ptrdiff_t window_offset;
  /* Inclusive distance to the left, or ATTN_UNBOUNDED. */
  size_t window_left;
  /* Inclusive distance to the right, or ATTN_UNBOUNDED. */
  size_t window_right;
  /* An AttnAlign: prefix-LM. All queries see the keys of the prefix; the other keys are causal. */
  uint32_t prefix;
  /* Zero. */
  uint32_t reserved;
  /* For ATTN_ALIGN_OFFSET; 0 with any other alignment. */
  ptrdiff_t prefix_offset;
  /* Lengths of the prefix: one for all, or one per sequence. */
  const size_t *prefix_lens;
  /* Entries in prefix_lens. */
  size_t prefix_lens_len;
  /* Hides the keys from this index on (right padding): one for all, or one per sequence. */
  const size_t *kv_lens;
  /* Entries in kv_lens. */
  size_t kv_lens_len;
  /* Hides the keys before this index (left padding): one for all, or one per sequence. */
  const size_t *kv_starts;
  /* Entries in kv_starts. */
  size_t kv_starts_len;
  /* Queries from this index on see no key: one for all, or one per sequence. */
  const size_t *q_lens;
  /* Entries in q_lens. */
  size_t q_lens_len;
  /* Packed sequences, end to end: the first query of each document, then the end of the last one. Queries before the
   * first and behind the last document see nothing: their output is 0. */
  const size_t *cu_q;
  /* Documents + 1. */
  size_t cu_q_len;
  /* The same for their keys. */
  const size_t *cu_k;
  /* Documents + 1. */
  size_t cu_k_len;
  /* An AttnAlign: causal inside each document. */
  uint32_t document_causal;
  /* An AttnAlign: a window inside each document. */
  uint32_t document_window;
  /* For ATTN_ALIGN_OFFSET; 0 with any other alignment. */
  ptrdiff_t document_causal_offset;
  /* For ATTN_ALIGN_OFFSET; 0 with any other alignment. */
  ptrdiff_t document_window_offset;
  /* Inclusive distance to the left, or ATTN_UNBOUNDED. */
  size_t document_window_left;
  /* Inclusive distance to the right, or ATTN_UNBOUNDED. */
  size_t document_window_right;
  /* Bools, [batch or 1, q_heads or 1, ceil(q_len / block_q), ceil(kv_len / block_k)]: 1 shows the block. */
  const struct AttnTensor *blocks;
  /* Queries per block; 0 without blocks. */
  size_t block_q;
  /* Keys per block; 0 without blocks. */
  size_t block_k;
  /* Draft tokens: the index of each query's parent, or -1 for a root. The last tree_len keys are the nodes. */
  const ptrdiff_t *tree_parents;
  /* Entries in tree_parents: q_len. */
  size_t tree_len;
  /* Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 shows the key (torch's and ONNX's attn_mask). */
  const struct AttnTensor *keep;
  /* Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 hides the key (key_padding_mask). */
  const struct AttnTensor *drop;
  /* Added to the scores; f32, f16, bf16 or f64, broadcasts to [batch, q_heads, q_len, kv_len]. -inf hides the key. */
  const struct AttnTensor *bias;
  /* Adds -slope * distance; one slope per query head. */
  const float *alibi_slopes;
  /* Entries in alibi_slopes: q_heads. */
  size_t alibi_slopes_len;
  /* For ATTN_ALIGN_OFFSET; 0 with any other alignment. */
  ptrdiff_t alibi_offset;
  /* An AttnAlign; must be set if there are slopes. */
  uint32_t alibi;
  /* Probability of dropping a weight after the softmax, 0 <= p < 1; kept weights are divided by 1 - p. */
  float dropout_p;
  /* Seed of the random numbers; 0 without dropout_p, and with dropout_keep. */
  uint64_t dropout_seed;
  /* Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 keeps the weight, which is divided by
   * 1 - dropout_p: it stays as it is if that is 0. */
  const struct AttnTensor *dropout_keep;
  /* One more logit per query head, in the softmax's denominator only. */
  const float *sinks;
  /* Entries in sinks: q_heads. */
  size_t sinks_len;
  /* Changes each score after bias and ALiBi; null for none. */
  AttnScoreMod score_mod;
  /* Hides keys; null for none. */
  AttnMaskMod mask_mod;
  /* Passed to score_mod and mask_mod; null without both. */
  void *user_data;
  /* Non-zero: a row has the same bits for any number of queries and keys in the call, so a prompt may be computed at
   * once, in parts or token by token. Slower for many queries. attn_decode() always has this property. */
  uint32_t reproducible;
  /* Zero. */
  uint32_t reserved_too;
} AttnOptions;

/* Where attn_backward() writes gradients: all are overwritten, not added to. dq, dk and dv share one dtype: f32, f16
 * or bf16. They may have any strides, but the memory from the first to the last element of one must not meet that of
 * another: dq, dk and dv side by side in each token of one buffer are ATTN_STATUS_OVERLAP. */
typedef struct AttnGradients {
  /* sizeof(AttnGradients) */
  size_t struct_size;
  /* The shape of q. */
  const struct AttnTensor *dq;
  /* The shape of k: summed over the query heads of a group. */
  const struct AttnTensor *dk;
  /* The shape of v: summed over the query heads of a group. */
  const struct AttnTensor *dv;
  /* One per query head, for AttnOptions.sinks: zeros if these are null. Null for none. */
  double *dsinks;
  /* Entries in dsinks: q_heads. */
  size_t dsinks_len;
  /* For AttnOptions.bias, f64: broadcasts to [batch, q_heads, q_len, kv_len], summed over the axes of size 1. Null
   * for none. */
  const struct AttnTensor *dbias;
  /* The derivative of AttnOptions.score_mod by the score that it is given; must be set with score_mod, and null
   * without. It gets the user_data of the options. */
  AttnScoreMod score_mod_derivative;
} AttnGradients;

/* Keys and values of a batch of sequences, in the caller's memory. Slots without a token are never read. A field that
 * belongs to another kind of cache must be zero (ATTN_STATUS_OPTION). */
typedef struct AttnCache {
  /* sizeof(AttnCache) */
  size_t struct_size;
  /* An AttnCacheKind. */
  uint32_t kind;
  /* Zero. */
  uint32_t reserved;
  /* Keys; f32, f16, bf16, or a dtype for caches. */
  const struct AttnTensor *k;
  /* Values, of the dtype of k. If one of them has a dtype for caches, the other has such a dtype too, f16 or bf16. */
  const struct AttnTensor *v;
  /* Tokens of each sequence: attn_decode() reads them, attn_cache_append() increases them. Write a smaller number to
   * forget the last tokens (not in a ring that has dropped tokens). Null with kv_indptr. */
  size_t *lens;
  /* Entries in lens: one per sequence. */
  size_t lens_len;
  /* Rings: the first tokens, which are always kept. */
  size_t sinks;
  /* Rings: the last tokens, which are kept; at least 1. */
  size_t window;
  /* Pages: [batch, width], row by row; required without kv_indptr, and null with it. Entries after a sequence's last
   * page are not read. */
  const int32_t *block_table;
  /* Entries in block_table: a multiple of lens_len. */
  size_t block_table_len;
  /* Pages in compressed rows, as FlashInfer and SGLang have them, instead of block_table and lens (both null): the
   * pages of sequence b are `kv_indices[i]` with `kv_indptr[b] <= i < kv_indptr[b + 1]`. */
  const int32_t *kv_indptr;
  /* Entries in kv_indptr: batch + 1. */
  size_t kv_indptr_len;
  /* The pages of all sequences. */
  const int32_t *kv_indices;
  /* Entries in kv_indices: at least the last of kv_indptr. */
  size_t kv_indices_len;
  /* Tokens in the last page of each sequence, from 1 to page_size; batch entries. The entry of a sequence without
   * pages is not read. attn_cache_append() does not change it. */
  const int32_t *kv_last_page_len;
  /* Scales of keys in int8 or fp8, f32; null for others. A scale for each token of a head has the sizes of k but for
   * the last, which is 1: attn_cache_append() chooses and writes it. Sizes that are 1 where those of k are not
   * broadcast ([1, 1, 1, 1] or [1, kv_heads, 1, 1]), and are only read. */
  const struct AttnTensor *k_scales;
  /* The same of values. */
  const struct AttnTensor *v_scales;
} AttnCache;

/* Which rows of q are queries of which sequence. The queries of a sequence are its last tokens; the cache already
 * holds their keys. If both tables are null, each row of q, [batch, q_heads, q_len, head_dim], is a query. */
typedef struct AttnQueries {
  /* sizeof(AttnQueries) */
  size_t struct_size;
  /* Only the first `lens[b]` rows of sequence b are queries. The other rows have output 0 and lse -inf. */
  const size_t *lens;
  /* Entries in lens: batch. */
  size_t lens_len;
  /* q and out are [1, q_heads, total, dim], one sequence after the other: sequence b has the rows
   * `cu[b] <= row < cu[b + 1]`. */
  const size_t *cu;
  /* Entries in cu: batch + 1. */
  size_t cu_len;
} AttnQueries;

/* Sizes of a call. Query head h reads key/value head h / (q_heads / kv_heads). */
typedef struct AttnShape {
  /* sizeof(AttnShape) */
  size_t struct_size;
  /* Independent sequences. */
  size_t batch;
  /* Heads of q and of the output. */
  size_t q_heads;
  /* Heads of k and v. */
  size_t kv_heads;
  /* Queries per head. */
  size_t q_len;
  /* Keys per head. */
  size_t kv_len;
  /* Size of a query and of a key. */
  size_t head_dim;
  /* Size of a value. */
  size_t value_dim;
} AttnShape;

#ifdef __cplusplus
extern "C" {
#endif /* __cplusplus */

/* The version of the library, "major.minor.patch". ATTN_VERSION is the version of the header. */
const char *attn_version(void);

/* The names of the instruction-set levels of this machine, weakest first, separated by spaces: "portable avx2 avx512".
 * The last one runs, unless ATTN_LEVEL in the environment or AttnOptions.level names another. On a machine with AMX,
 * requests it from Linux (see the top of attn.h). */
const char *attn_levels(void);

/* Writes to *name the level that runs if AttnOptions.level is null: a string that lives as long as the program.
 * Returns an error if ATTN_LEVEL in the environment names a level that is unknown (ATTN_STATUS_OPTION) or that this
 * machine lacks (ATTN_STATUS_UNSUPPORTED); *name does not change then. Other calls do not fail for it: the best level
 * runs, and a line on stderr says so, once per process.
 *
 * The caller vouches for this:
 * name points to a pointer. */
enum AttnStatus attn_level(const char **name);

/* The text of this thread's last error; empty if no call has failed. It names both sizes if two disagree. The next
 * error on the thread changes the text; the pointer is valid as long as the thread lives. */
const char *attn_last_error(void);

/* Fills *tensor to describe a contiguous buffer of batch * heads * seq * dim elements.
 *
 * dtype is an AttnDtype, layout an AttnLayout. Of Q8_0 and Q4_0, dim is a multiple of 32.
 *
 * The caller vouches for this:
 * tensor points to an AttnTensor. */
enum AttnStatus attn_tensor_contiguous(struct AttnTensor *tensor,
                                       void *data,
                                       uint32_t dtype,
                                       uint32_t layout,
                                       size_t batch,
                                       size_t heads,
                                       size_t seq,
                                       size_t dim);

/* Computes attention. options may be null for the textbook formula on all threads.
 *
 * q: [batch, q_heads, q_len, head_dim], k: [batch, kv_heads, kv_len, head_dim], v: [batch, kv_heads, kv_len,
 * value_dim], all three f32, f16 or bf16; out: [batch, q_heads, q_len, value_dim], f32, f16 or bf16. lse is null (with
 * lse_len 0) or receives the natural logarithm of each row's softmax denominator, contiguous [batch, q_heads, q_len].
 *
 * Nothing is copied. Nothing is written unless all arguments are valid. Many threads may call it at once. Every
 * function checks the struct_size of each struct before its other fields.
 *
 * The caller vouches for this:
 * Each pointer is null or points to the stated number of elements, or to a struct of the stated size. During the call
 * nobody writes to the inputs, and nobody reads or writes out and lse. */
enum AttnStatus attn_forward(const struct AttnOptions *options,
                             const struct AttnTensor *q,
                             const struct AttnTensor *k,
                             const struct AttnTensor *v,
                             const struct AttnTensor *out,
                             float *lse,
                             size_t lse_len);

/* Computes the gradients of attn_forward(): of q, k and v, of the sinks and of a bias, from out, lse and dout, the
 * gradient of the loss by out. options are those of the forward call (the same seed draws the same dropout); lse is
 * required.
 *
 * q, k and v share a dtype, out and dout share one, and so do the gradients: each f32, f16 or bf16; sums are f32.
 * Memory grows with the lengths, not with their product. No bit depends on the threads. A row that sees no key has a
 * gradient of 0.
 *
 * The caller vouches for this:
 * As for attn_forward; during the call nobody reads or writes the gradients. */
enum AttnStatus attn_backward(const struct AttnOptions *options,
                              const struct AttnTensor *q,
                              const struct AttnTensor *k,
                              const struct AttnTensor *v,
                              const struct AttnTensor *out,
                              const float *lse,
                              size_t lse_len,
                              const struct AttnTensor *dout,
                              const struct AttnGradients *gradients);

/* Computes attention of the last tokens of a batch of sequences to a cache that already holds their keys and values.
 * One call mixes decode steps and parts of prompts of any lengths. options may be null. Always causal: the last query
 * of a sequence sees all its tokens, the query before it sees all but the last. AttnOptions.causal may hide more.
 *
 * q: [batch, q_heads, q_len, head_dim], or packed (see AttnQueries); f32, f16 or bf16, also if the cache has another
 * dtype. queries may be null: then every row is a query. out: the shape of q with value_dim in place of head_dim; f32,
 * f16 or bf16. lse as for attn_forward().
 *
 * For the options, each sequence is a call of its own: its queries, and its tokens in the cache in ascending order as
 * kv_len keys. Dropout is refused. If a ring has dropped tokens of a sequence, this sequence may have one query. The
 * bits of a row do not depend on the threads, the kind of cache, the other sequences, or on how the tokens were
 * divided into calls.
 *
 * The caller vouches for this:
 * As for attn_forward; nobody writes to the cache during the call. */
enum AttnStatus attn_decode(const struct AttnOptions *options,
                            const struct AttnCache *cache,
                            const struct AttnTensor *q,
                            const struct AttnQueries *queries,
                            const struct AttnTensor *out,
                            float *lse,
                            size_t lse_len);

/* Appends tokens to every sequence of a cache, and adds their number to its lens. k_new: [batch, kv_heads, n,
 * head_dim], v_new: [batch, kv_heads, n, value_dim], of the cache's dtype. new_lens is null (with new_lens_len 0), or
 * holds for each sequence how many of the n are its tokens; the rest is padding (not for rings). Nothing is written
 * unless all tokens have room: slots, or pages that no other sequence reads. A ring overwrites its oldest tokens.
 *
 * With kv_indptr the tables count the new tokens already, as for FlashInfer's append_paged_kv_cache(): the new tokens
 * become the last ones of their sequences, and no length changes.
 *
 * Optional: a program may write keys and values to the slots itself.
 *
 * The caller vouches for this:
 * As for attn_forward; nobody else reads or writes the cache during the call. */
enum AttnStatus attn_cache_append(const struct AttnCache *cache,
                                  const struct AttnTensor *k_new,
                                  const struct AttnTensor *v_new,
                                  const size_t *new_lens,
                                  size_t new_lens_len);

/* Merges attention of the same queries over two disjoint sets of keys. out and lse are results of attn_forward() or
 * attn_decode() over the first set, other and other_lse over the second; out and lse become the results over both.
 *
 * Both tensors are f32. Each merge rounds an output about three times more, each time by 2^-24 of the larger part. The
 * lse is rounded to f32, which adds a relative error of 2^-24 times its size to the weight of a part.
 * (attn_plan_state() keeps maximum and sum apart and has neither error.) Each lse is contiguous [batch, heads, seq]
 * with lse_len numbers. Pass sinks to only one of the calls, because they count once.
 *
 * The caller vouches for this:
 * As for attn_forward. */
enum AttnStatus attn_merge_outputs(const struct AttnTensor *out,
                                   float *lse,
                                   const struct AttnTensor *other,
                                   const float *other_lse,
                                   size_t lse_len);

/* Describes the kernel that would run for these options (may be null), sizes and AttnDtype: level, tile sizes,
 * scratch. Writes the description to text, a buffer of text_size bytes; ATTN_EXPLAIN_SIZE bytes are always enough.
 *
 * A longer text is cut: the buffer receives its beginning and a final 0, the status is ATTN_STATUS_BOUNDS, and
 * attn_last_error() has the number of bytes needed. (This is the only error that writes. With text_size 0 nothing is
 * written.)
 *
 * The caller vouches for this:
 * As for attn_forward; text points to text_size bytes. */
enum AttnStatus attn_explain(const struct AttnOptions *options,
                             const struct AttnShape *shape,
                             uint32_t dtype,
                             char *text,
                             size_t text_size);

/* Describes what attn_backward() would run for these options (may be null) and sizes: how the five products are
 * computed, how the work is cut, scratch. dtype is that of q, k, v, out and dout, gradients that of dq, dk and dv.
 * ATTN_EXPLAIN_SIZE bytes are always enough; a text that does not fit is cut as by attn_explain().
 *
 * The caller vouches for this:
 * As for attn_explain. */
enum AttnStatus attn_explain_backward(const struct AttnOptions *options,
                                      const struct AttnShape *shape,
                                      uint32_t dtype,
                                      uint32_t gradients,
                                      char *text,
                                      size_t text_size);

/* Creates a plan: checks options (may be null) and sizes once, and chooses the kernel.
 *
 * Tables (lengths, starts, documents, tree, slopes, sinks) are copied. Tensors (keep, drop, blocks, dropout_keep,
 * bias), the functions and their user_data are not copied: each run reads them again, so they must live as long as the
 * plan is run. Destroy the plan with attn_plan_destroy().
 *
 * The caller vouches for this:
 * As for attn_forward; plan points to a pointer. */
enum AttnStatus attn_plan_create(const struct AttnOptions *options,
                                 const struct AttnShape *shape,
                                 struct AttnPlan **plan);

/* Bytes of scratch that one thread needs to run the plan.
 *
 * The caller vouches for this:
 * plan came from attn_plan_create(); bytes points to a size_t. */
enum AttnStatus attn_plan_workspace_bytes(const struct AttnPlan *plan, size_t *bytes);

/* As attn_explain(), for a plan. A longer text is cut in the same way.
 *
 * The caller vouches for this:
 * plan came from attn_plan_create(); text points to text_size bytes. */
enum AttnStatus attn_plan_explain(const struct AttnPlan *plan, uint32_t dtype, char *text, size_t text_size);

/* Runs a plan on tensors of the plan's sizes; see attn_forward().
 *
 * workspace may be null: then AttnOptions.threads is the number of threads, and each uses scratch that this library
 * keeps for it. With a workspace, the number of threads is that of the workspace, or AttnOptions.threads if that is
 * smaller; with one thread nothing is allocated. A workspace serves one call at a time; a second call returns
 * ATTN_STATUS_BUSY.
 *
 * The caller vouches for this:
 * As for attn_forward; plan and workspace came from this library. */
enum AttnStatus attn_plan_run(const struct AttnPlan *plan,
                              struct AttnWorkspace *workspace,
                              const struct AttnTensor *q,
                              const struct AttnTensor *k,
                              const struct AttnTensor *v,
                              const struct AttnTensor *out,
                              float *lse,
                              size_t lse_len);

/* The length of the states that attn_plan_state() writes, in floats: batch * q_heads * q_len * (2 + value_dim).
 *
 * The caller vouches for this:
 * plan came from attn_plan_create(); len points to a size_t. */
enum AttnStatus attn_plan_state_len(const struct AttnPlan *plan, size_t *len);

/* Attends to a part of a plan's keys, for example in one of several processes or machines. k and v hold n keys that
 * begin at key first: [batch, kv_heads, n, ...] with first + n <= kv_len (else ATTN_STATUS_TABLE). Masks, biases and
 * positions count from the first key of the whole. k and v share a dtype; q may have another.
 *
 * Writes a state for each query to states, [batch, q_heads, q_len, 2 + value_dim]: the maximum, the sum, and value_dim
 * undivided sums; states_len floats in all. States may be sent between machines of the same byte order.
 * attn_merge_states() merges them in any order, and attn_plan_finish() makes the result of them.
 *
 * Runs on the calling thread, in the first scratch of workspace, or in new scratch if workspace is null. If all
 * parts but the last have 512 times a power of two keys, and are merged as a tree of neighbours, the result has the
 * bits of the whole call with AttnOptions.reproducible.
 *
 * The caller vouches for this:
 * As for attn_plan_run. */
enum AttnStatus attn_plan_state(const struct AttnPlan *plan,
                                struct AttnWorkspace *workspace,
                                size_t first,
                                const struct AttnTensor *q,
                                const struct AttnTensor *k,
                                const struct AttnTensor *v,
                                float *states,
                                size_t states_len);

/* Merges states over disjoint sets of keys, in f32: states become the states over both sets. Both arrays hold len
 * floats, 2 + value_dim for each query. A state of a query that saw no key changes no bit of the other state.
 * Each merge rounds: one after the other, hundreds of states add up their rounding; merged in pairs, and these in
 * pairs, they hardly do.
 *
 * The caller vouches for this:
 * states and others point to len floats each; nobody else reads or writes states during the call. */
enum AttnStatus attn_merge_states(float *states, const float *others, size_t len, size_t value_dim);

/* Makes the result of merged states: adds the sinks, divides, and writes out and lse as attn_plan_run() does.
 *
 * The caller vouches for this:
 * As for attn_plan_run; states points to states_len floats. */
enum AttnStatus attn_plan_finish(const struct AttnPlan *plan,
                                 const float *states,
                                 size_t states_len,
                                 const struct AttnTensor *out,
                                 float *lse,
                                 size_t lse_len);

/* Frees a plan; null is ignored.
 *
 * The caller vouches for this:
 * plan came from attn_plan_create(), was not destroyed before, and no call uses it. */
void attn_plan_destroy(struct AttnPlan *plan);

/* Creates a workspace: scratch for a number of threads (0 for all), large enough for plan. plan may be null: then the
 * first run allocates the scratch. A workspace may serve other plans too. Destroy it with attn_workspace_destroy().
 *
 * The caller vouches for this:
 * plan is null or came from attn_plan_create(); workspace points to a pointer. */
enum AttnStatus attn_workspace_create(const struct AttnPlan *plan, size_t threads, struct AttnWorkspace **workspace);

/* The bytes that a workspace holds. ATTN_STATUS_BUSY if a call uses it.
 *
 * The caller vouches for this:
 * workspace came from attn_workspace_create(); bytes points to a size_t. */
enum AttnStatus attn_workspace_bytes(const struct AttnWorkspace *workspace, size_t *bytes);

/* Frees a workspace; null is ignored.
 *
 * The caller vouches for this:
 * workspace came from attn_workspace_create(), was not destroyed before, and no call uses it. */
void attn_workspace_destroy(struct AttnWorkspace *workspace);

#ifdef __cplusplus
}  /* extern "C" */
#endif  /* __cplusplus */

#endif  /* ATTN_H */
