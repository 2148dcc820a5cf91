/* attn.h: exact attention on CPUs, for C and C++.
 *
 * Written by cbindgen from attn-capi/src; do not edit (ATTN_WRITE_HEADER=1 cargo test -p attn-capi --test it header).
 *
 * Set struct_size of each struct to its sizeof, everything else to zero, then what you want. Functions return an
 * AttnStatus; attn_last_error() says what is wrong. No pointer is followed beyond the length beside it. Nothing is
 * copied but tables.
 *
 * Environment: ATTN_LEVEL=avx2 holds a program to one level (attn_levels() lists them). A level that cannot run is
 * ignored, and a line on stderr says so; attn_level() makes an error of it.
 *
 * AMX: Linux lets a process use AMX tiles only after it has asked. Where the machine has tiles, attn_levels(),
 * attn_level() and the first call without AttnOptions.level ask, once per process. From then on Linux refuses small
 * alternate signal stacks to every thread of the process: sigaltstack() fails with ENOMEM below
 * getauxval(AT_MINSIGSTKSZ). 2048 to 11264 bytes are too few, 16384 enough. If a thread has such a stack already, Linux
 * refuses the permission, and avx512 runs. A program that needs small signal stacks never asks: it sets
 * ATTN_LEVEL=avx512 and does not call attn_levels(), or gives AttnOptions.level = "avx512" to every call. */

#ifndef ATTN_H
#define ATTN_H

#include <stddef.h>
#include <stdint.h>
#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 1
#define ATTN_VERSION_PATCH 0
#define ATTN_VERSION "0.1.0"



// Bytes that hold every text of attn_explain() and attn_plan_explain(), with its closing 0.
#define ATTN_EXPLAIN_SIZE 512

// What a function reports. Text for people is in attn_last_error().
typedef enum AttnStatus {
  // Done.
  ATTN_STATUS_OK = 0,
  // A pointer is null that must not be.
  ATTN_STATUS_NULL_POINTER = 1,
  // A struct's size is impossible, or its tail holds something that this version does not know.
  ATTN_STATUS_STRUCT_SIZE = 2,
  // A pointer is not aligned for what it points to.
  ATTN_STATUS_MISALIGNED = 3,
  // Sizes disagree: between tensors, of a table, in a broadcast, heads that do not divide into groups.
  ATTN_STATUS_SHAPE = 4,
  // A buffer is shorter than its shape and strides reach.
  ATTN_STATUS_BOUNDS = 5,
  // A product of sizes does not fit in size_t.
  ATTN_STATUS_OVERFLOW = 6,
  // An output shares memory with an input, another output or itself.
  ATTN_STATUS_OVERLAP = 7,
  // An option has a value without meaning.
  ATTN_STATUS_OPTION = 8,
  // A table holds an index that is out of range or out of order, or a boolean tensor a byte above 1.
  ATTN_STATUS_TABLE = 9,
  // Valid, but not possible here: a level that this machine lacks, a number type that the kernels do not compute.
  ATTN_STATUS_UNSUPPORTED = 10,
  // The workspace is being used by another thread.
  ATTN_STATUS_BUSY = 11,
  // There is not as much memory as the scratch needs.
  ATTN_STATUS_OUT_OF_MEMORY = 12,
  // A bug in this library.
  ATTN_STATUS_INTERNAL = 13,
} AttnStatus;

// What a tensor's elements are.
typedef enum AttnDtype {
  // float
  ATTN_DTYPE_F32 = 1,
  // IEEE half precision, as uint16_t bits
  ATTN_DTYPE_F16 = 2,
  // bfloat16, as uint16_t bits
  ATTN_DTYPE_BF16 = 3,
  // double; for a bias only
  ATTN_DTYPE_F64 = 4,
  // One byte, 0 or 1; for masks
  ATTN_DTYPE_BOOL = 5,
} AttnDtype;

// Where query 0 stands among the keys, for causal masks, windows and ALiBi.
typedef enum AttnAlign {
  // Not used: no causal mask, no window.
  ATTN_ALIGN_NONE = 0,
  // At key 0.
  ATTN_ALIGN_TOP_LEFT = 1,
  // So that the last query stands at the last key: decoding with a cache.
  ATTN_ALIGN_BOTTOM_RIGHT = 2,
  // At the key that the field ..._offset names; may be negative.
  ATTN_ALIGN_OFFSET = 3,
} AttnAlign;

// The order in which a contiguous tensor stores its axes, outermost first.
typedef enum AttnLayout {
  // [batch, heads, seq, dim]
  ATTN_LAYOUT_BHSD = 0,
  // [batch, seq, heads, dim]
  ATTN_LAYOUT_BSHD = 1,
  // [seq, batch, heads, dim]
  ATTN_LAYOUT_SBHD = 2,
} AttnLayout;

// How exact a result has to be where the hardware offers something faster.
typedef enum AttnPrecision {
  // As exact as f32 arithmetic; halves rounded once.
  ATTN_PRECISION_EXACT = 0,
  // Within the bound that the documentation states.
  ATTN_PRECISION_FAST = 1,
} AttnPrecision;

// How a cache lays out its tokens.
typedef enum AttnCacheKind {
  // k and v are [batch, kv_heads, capacity, dim]; `lens[b]` tokens fill the first slots of sequence b.
  ATTN_CACHE_KIND_APPEND = 0,
  // k and v are [batch, kv_heads, at least sinks + window, dim]: the first tokens, and a ring of the last ones.
  // `lens[b]` counts all tokens that have come.
  ATTN_CACHE_KIND_RING = 1,
  // k and v are [pages, kv_heads, page_size, dim]; token t of sequence b lies in page block_table[b, t / page_size].
  ATTN_CACHE_KIND_PAGED = 2,
} AttnCacheKind;

// Options and sizes, checked once. Never changes; any number of threads may run one plan at once, each with a
// workspace of its own.
typedef struct AttnPlan AttnPlan;

// Scratch for the threads of one call at a time. Belongs to no plan: it grows to what a plan needs.
typedef struct AttnWorkspace AttnWorkspace;

// A tensor in the caller's memory. Sizes and strides are of [batch, heads, seq, dim], whatever the order in memory.
typedef struct AttnTensor {
  // sizeof(AttnTensor)
  size_t struct_size;
  // The buffer. Inputs are only read. May be null if len is 0.
  void *data;
  // Elements from data on that may be touched; nothing beyond ever is.
  size_t len;
  // [batch, heads, seq, dim]; masks and biases: [batch, q_heads, q_len, kv_len], where 1 broadcasts.
  size_t shape[4];
  // In elements; 0 and negative ones are allowed for inputs.
  ptrdiff_t strides[4];
  // Index, from data on, of the element [0, 0, 0, 0].
  size_t offset;
  // An AttnDtype.
  uint32_t dtype;
  // Zero.
  uint32_t reserved;
} AttnTensor;

// Changes a score; called from several threads at once. A C++ exception that leaves it ends the process.
typedef double (*AttnMapScore)(double score, size_t batch, size_t head, size_t query, size_t key, void *user_data);

// Says whether a key that the masks show stays visible (non-zero: yes); called from several threads at once. A C++
// exception that leaves it ends the process.
typedef int32_t (*AttnVisibleIf)(size_t batch, size_t head, size_t query, size_t key, void *user_data);

// What to compute: softmax(scale * q.k -> soft-cap -> bias -> mask) . v. All zeros is the textbook formula with scale
// 1/sqrt(head_dim) and nothing masked. A key is visible when every mask shows it. A field that nothing would read is
// refused (ATTN_STATUS_OPTION): scale without has_scale, window_left without window (0 and
// ATTN_UNBOUNDED say nothing), an offset without
// ATTN_ALIGN_OFFSET, block_q without blocks, dropout_seed without dropout_p or beside dropout_keep, user_data without
// a function.
typedef struct AttnOptions {
  // sizeof(AttnOptions)
  size_t struct_size;
  // Threads to use at most; 0 for all. No bit of the result depends on it.
  size_t threads;
  // Forces an instruction-set level by its name (attn_levels()); null for the best of this machine, or the one that
  // ATTN_LEVEL in the environment names.
  const char *level;
  // Multiplies q.k, if has_scale is not 0; otherwise 1/sqrt(head_dim).
  double scale;
  // c * tanh(s / c); 0 for none.
  double softcap;
  // Divides the finished scores; 0 for none.
  double temperature;
  // Whether scale is given.
  uint32_t has_scale;
  // An AttnPrecision.
  uint32_t precision;
  // An AttnAlign: query i sees keys j <= i + offset.
  uint32_t causal;
  // An AttnAlign; ATTN_ALIGN_NONE is no window.
  uint32_t window;
  // For ATTN_ALIGN_OFFSET; 0 with any other alignment.
  ptrdiff_t causal_offset;
  // For ATTN_ALIGN_OFFSET; 0 with any other alignment.
  ptrdiff_t window_offset;
  // Inclusive distance to the left, or ATTN_UNBOUNDED.
  size_t window_left;
  // Inclusive distance to the right, or ATTN_UNBOUNDED.
  size_t window_right;
  // An AttnAlign: prefix-LM; keys below the prefix are visible to all, the others causally.
  uint32_t prefix;
  // Zero.
  uint32_t reserved;
  // For ATTN_ALIGN_OFFSET; 0 with any other alignment.
  ptrdiff_t prefix_offset;
  // Lengths of the prefix: one for all, or one per sequence.
  const size_t *prefix_lens;
  // Entries in prefix_lens.
  size_t prefix_lens_len;
  // Keys from here on are hidden (right padding): one for all, or one per sequence.
  const size_t *kv_lens;
  // Entries in kv_lens.
  size_t kv_lens_len;
  // Keys before this are hidden (left padding): one for all, or one per sequence.
  const size_t *kv_starts;
  // Entries in kv_starts.
  size_t kv_starts_len;
  // Queries from here on see nothing: one for all, or one per sequence.
  const size_t *q_lens;
  // Entries in q_lens.
  size_t q_lens_len;
  // Packed sequences, end to end: where the queries of each document begin, and where the last one's end.
  const size_t *cu_q;
  // Documents + 1.
  size_t cu_q_len;
  // The same for their keys.
  const size_t *cu_k;
  // Documents + 1.
  size_t cu_k_len;
  // An AttnAlign: causal inside each document.
  uint32_t document_causal;
  // An AttnAlign: a window inside each document.
  uint32_t document_window;
  // For ATTN_ALIGN_OFFSET; 0 with any other alignment.
  ptrdiff_t document_causal_offset;
  // For ATTN_ALIGN_OFFSET; 0 with any other alignment.
  ptrdiff_t document_window_offset;
  // Inclusive distance to the left, or ATTN_UNBOUNDED.
  size_t document_window_left;
  // Inclusive distance to the right, or ATTN_UNBOUNDED.
  size_t document_window_right;
  // Bools, [batch or 1, q_heads or 1, ceil(q_len / block_q), ceil(kv_len / block_k)]: 1 shows the block.
  const struct AttnTensor *blocks;
  // Queries per block; 0 without blocks.
  size_t block_q;
  // Keys per block; 0 without blocks.
  size_t block_k;
  // Draft tokens: for each query its parent's index, or -1 for a root; the last tree_len keys are the nodes.
  const ptrdiff_t *tree_parents;
  // Entries in tree_parents: q_len.
  size_t tree_len;
  // Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 shows the key (torch's and ONNX's attn_mask).
  const struct AttnTensor *keep;
  // Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 hides the key (key_padding_mask).
  const struct AttnTensor *drop;
  // Added to the scores; f32, f16, bf16 or f64, broadcasts to [batch, q_heads, q_len, kv_len]. -inf hides the key.
  const struct AttnTensor *bias;
  // Adds -slope * distance; one slope per query head.
  const float *alibi_slopes;
  // Entries in alibi_slopes: q_heads.
  size_t alibi_slopes_len;
  // For ATTN_ALIGN_OFFSET; 0 with any other alignment.
  ptrdiff_t alibi_offset;
  // An AttnAlign; needed where there are slopes.
  uint32_t alibi;
  // Probability of dropping a weight after the softmax, 0 <= p < 1; kept weights are divided by 1 - p.
  float dropout_p;
  // Seed of the draws; 0 without dropout_p, and beside dropout_keep, which says what is kept.
  uint64_t dropout_seed;
  // Bools that broadcast to [batch, q_heads, q_len, kv_len]: 1 keeps the weight.
  const struct AttnTensor *dropout_keep;
  // One more logit per query head, in the softmax's denominator only.
  const float *sinks;
  // Entries in sinks: q_heads.
  size_t sinks_len;
  // Changes each score, after bias and ALiBi; null for none.
  AttnMapScore map_score;
  // Hides keys; null for none.
  AttnVisibleIf visible_if;
  // Handed to map_score and visible_if; null without both.
  void *user_data;
  // Not 0: a row's bits do not depend on the number of queries and keys of the call, so that a prompt may come at
  // once, in chunks or token by token; slower for many queries. attn_decode() is always so.
  uint32_t reproducible;
  // Zero.
  uint32_t reserved_too;
} AttnOptions;

// Keys and values of a batch of sequences, in the caller's memory. Slots that hold no token are never read. A field of
// another kind of cache than kind names is refused (ATTN_STATUS_OPTION).
typedef struct AttnCache {
  // sizeof(AttnCache)
  size_t struct_size;
  // An AttnCacheKind.
  uint32_t kind;
  // Zero.
  uint32_t reserved;
  // Keys; f32, f16 or bf16.
  const struct AttnTensor *k;
  // Values, of the dtype of k.
  const struct AttnTensor *v;
  // Tokens of each sequence: attn_decode() reads them, attn_cache_append() adds to them. To forget the last tokens,
  // write a smaller number (but not to a ring that has dropped any).
  size_t *lens;
  // Entries in lens: sequences.
  size_t lens_len;
  // Rings: tokens that are kept from the beginning.
  size_t sinks;
  // Rings: tokens that are kept from the end, at least 1.
  size_t window;
  // Pages: [batch, width], row by row; entries behind a sequence's last page are not looked at.
  const int32_t *block_table;
  // Entries in block_table: a multiple of lens_len.
  size_t block_table_len;
} AttnCache;

// Which rows of q are queries of which sequence. The queries of a sequence are its last tokens, whose keys the cache
// holds already. With both tables null each row of q, [batch, q_heads, q_len, head_dim], is a query.
typedef struct AttnQueries {
  // sizeof(AttnQueries)
  size_t struct_size;
  // Only the first `lens[b]` rows of sequence b are queries; the outputs of the others are 0, their lse -inf.
  const size_t *lens;
  // Entries in lens: batch.
  size_t lens_len;
  // q and out are [1, q_heads, total, dim], sequences one after the other: sequence b is at
  // `cu[b] <= row < cu[b + 1]`.
  const size_t *cu;
  // Entries in cu: batch + 1.
  size_t cu_len;
} AttnQueries;

// Sizes of a call. Query head h reads key/value head h / (q_heads / kv_heads).
typedef struct AttnShape {
  // sizeof(AttnShape)
  size_t struct_size;
  // Independent sequences.
  size_t batch;
  // Heads of q and of the output.
  size_t q_heads;
  // Heads of k and v.
  size_t kv_heads;
  // Queries per head.
  size_t q_len;
  // Keys per head.
  size_t kv_len;
  // Size of a query and of a key.
  size_t head_dim;
  // Size of a value.
  size_t value_dim;
} AttnShape;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Version of the library, "major.minor.patch". ATTN_VERSION is the header's.
const char *attn_version(void);

// Names of the instruction-set levels that this machine has, weakest first, with a space between: "portable avx2
// avx512". The last one runs unless ATTN_LEVEL in the environment or AttnOptions.level names another. Asks Linux for
// the permission to use AMX tiles where there are any (see the top of attn.h).
const char *attn_levels(void);

// Writes to *name the level that runs where AttnOptions.level is null: a string that lives as long as the program.
// Where ATTN_LEVEL in the environment names a level that is unknown (ATTN_STATUS_OPTION) or missing here
// (ATTN_STATUS_UNSUPPORTED) it is refused, and *name stays as it is. Calls do not fail then: the best level runs, and
// a line on stderr says so, once per process.
//
// The caller vouches for this:
// name points to a pointer.
enum AttnStatus attn_level(const char **name);

// What went wrong in the last call of this thread that failed, naming both sizes where two disagree; empty if none
// has. The text changes with the next failure on the thread; the pointer stays good for as long as the thread lives.
const char *attn_last_error(void);

// Fills *tensor for a contiguous buffer of batch * heads * seq * dim elements.
//
// dtype is an AttnDtype, layout an AttnLayout.
//
// The caller vouches for this:
// tensor points to an AttnTensor.
enum AttnStatus attn_tensor_contiguous(struct AttnTensor *tensor,
                                       void *data,
                                       uint32_t dtype,
                                       uint32_t layout,
                                       size_t batch,
                                       size_t heads,
                                       size_t seq,
                                       size_t dim);

// Computes attention. options may be null: the textbook formula on all threads.
//
// q: [batch, q_heads, q_len, head_dim], k: [batch, kv_heads, kv_len, head_dim], v: [batch, kv_heads, kv_len,
// value_dim], of one dtype out of f32, f16, bf16; out: [batch, q_heads, q_len, value_dim], of any of these. lse is
// null (with lse_len 0) or takes the natural logarithm of each row's softmax denominator, [batch, q_heads, q_len]
// without gaps.
//
// Nothing is copied. Nothing is written unless all arguments are right. May be called from many threads at once. The
// struct_size of each struct is checked before its other fields, by every function.
//
// The caller vouches for this:
// Each pointer that is not null points to as many elements, or to as large a struct, as the argument says. Nobody
// writes to the inputs or touches out and lse during the call.
enum AttnStatus attn_forward(const struct AttnOptions *options,
                             const struct AttnTensor *q,
                             const struct AttnTensor *k,
                             const struct AttnTensor *v,
                             const struct AttnTensor *out,
                             float *lse,
                             size_t lse_len);

// Computes attention of the last tokens of a batch of sequences to a cache that holds their keys and values already:
// decode steps and prefill chunks of any lengths in one call. options may be null. Always causal: the last query of a
// sequence sees all its tokens, the one before all but the last.
//
// q: [batch, q_heads, q_len, head_dim], or packed (see AttnQueries; queries may be null: all rows are), of any dtype
// of f32, f16, bf16, which may differ from the cache's; out: as q, with value_dim, of any of these. lse as for
// attn_forward().
//
// To the options each sequence is a call of its own: its q_len queries, kv_len = its tokens in the cache, in ascending
// order. Dropout is refused. A ring that has dropped tokens takes one query per sequence. A row's bits depend on
// neither the threads, nor the kind of the cache, nor the other sequences, nor on how the stream was cut into calls.
//
// The caller vouches for this:
// As for attn_forward; nobody writes to the cache during the call.
enum AttnStatus attn_decode(const struct AttnOptions *options,
                            const struct AttnCache *cache,
                            const struct AttnTensor *q,
                            const struct AttnQueries *queries,
                            const struct AttnTensor *out,
                            float *lse,
                            size_t lse_len);

// Appends tokens to every sequence of a cache, and adds their number to its lens: k_new [batch, kv_heads, n,
// head_dim], v_new [batch, kv_heads, n, value_dim], of the cache's dtype. new_lens is null (with new_lens_len 0), or
// says for each sequence how many of the n are its tokens; the others are padding (not for rings). Nothing is written
// unless there is room for all: slots, or pages that no other sequence reads. A ring makes room by itself.
//
// Whoever writes keys and values to their slots otherwise need not call this.
//
// The caller vouches for this:
// As for attn_forward; nobody else touches the cache during the call.
enum AttnStatus attn_cache_append(const struct AttnCache *cache,
                                  const struct AttnTensor *k_new,
                                  const struct AttnTensor *v_new,
                                  const size_t *new_lens,
                                  size_t new_lens_len);

// Joins attention over some keys with attention over others, both with the same queries: out and lse are those of
// attn_forward() or attn_decode() on the first keys and become those on all, as if the call had been one. Both tensors
// are f32 and joined in f32: each join rounds a number of the output some three times more, by 2^-24 of the larger
// part each; the lse, itself rounded to f32, adds an error of 2^-24 of its size to the weight of a part.
// (attn_plan_partial() keeps maximum and sum apart and has none of that.) The lses are [batch, heads, seq] without
// gaps, lse_len each. Sinks count once: give them to one of the calls only.
//
// The caller vouches for this:
// As for attn_forward.
enum AttnStatus attn_merge_states(const struct AttnTensor *out,
                                  float *lse,
                                  const struct AttnTensor *other,
                                  const float *other_lse,
                                  size_t lse_len);

// Writes to text, which holds text_size bytes, what would run for these options (may be null), sizes and AttnDtype:
// level, tile sizes, scratch. ATTN_EXPLAIN_SIZE bytes hold every text.
//
// What does not fit is cut: the beginning is written, with a 0 at the end, the status is ATTN_STATUS_BOUNDS, and
// attn_last_error() says how many bytes are needed. (The one case in which an error writes. With text_size 0, and
// after any other error, nothing is written.)
//
// The caller vouches for this:
// As for attn_forward; text points to text_size bytes.
enum AttnStatus attn_explain(const struct AttnOptions *options,
                             const struct AttnShape *shape,
                             uint32_t dtype,
                             char *text,
                             size_t text_size);

// Makes a plan: options (may be null) and sizes, checked once, and the choice of kernel.
//
// Tables (lengths, starts, documents, tree, slopes, sinks) are copied. Tensors (keep, drop, blocks, dropout_keep,
// bias), the functions and their user_data are not: they stay with the caller, must live as long as the plan is run,
// and are read anew by each run. Destroy the plan with attn_plan_destroy().
//
// The caller vouches for this:
// As for attn_forward; plan points to a pointer.
enum AttnStatus attn_plan_create(const struct AttnOptions *options,
                                 const struct AttnShape *shape,
                                 struct AttnPlan **plan);

// Bytes of scratch that one thread needs to run the plan.
//
// The caller vouches for this:
// plan came from attn_plan_create(); bytes points to a size_t.
enum AttnStatus attn_plan_workspace_bytes(const struct AttnPlan *plan, size_t *bytes);

// As attn_explain(), for a plan; a text that does not fit is cut likewise.
//
// The caller vouches for this:
// plan came from attn_plan_create(); text points to text_size bytes.
enum AttnStatus attn_plan_explain(const struct AttnPlan *plan, uint32_t dtype, char *text, size_t text_size);

// Runs a plan on tensors of the sizes that it was made for; see attn_forward().
//
// workspace may be null: then each thread uses scratch that this library keeps for it, and AttnOptions.threads says
// how many there are. With a workspace there are as many threads as it was made for, or AttnOptions.threads if that is
// fewer; with one thread nothing is allocated. A workspace serves one call at a time; a second one gets
// ATTN_STATUS_BUSY.
//
// The caller vouches for this:
// As for attn_forward; plan and workspace came from this library.
enum AttnStatus attn_plan_run(const struct AttnPlan *plan,
                              struct AttnWorkspace *workspace,
                              const struct AttnTensor *q,
                              const struct AttnTensor *k,
                              const struct AttnTensor *v,
                              const struct AttnTensor *out,
                              float *lse,
                              size_t lse_len);

// Numbers in the rows that attn_plan_partial() writes: batch * q_heads * q_len * (2 + value_dim).
//
// The caller vouches for this:
// plan came from attn_plan_create(); len points to a size_t.
enum AttnStatus attn_plan_partial_len(const struct AttnPlan *plan, size_t *len);

// Attends to some of the keys of a plan: what one of several processes or machines computes. k and v hold the keys
// from first on, [batch, kv_heads, n, ...] with first + n <= kv_len (ATTN_STATUS_TABLE beyond); masks, biases and
// positions mean what they mean for the whole. Leaves behind a row of max, sum and value_dim undivided sums for each
// query, [batch, q_heads, q_len] of them, rows_len numbers in all. Rows may be sent as they are between machines of
// one byte order, are joined by attn_merge_partials() in any order, and ended by attn_plan_finish(). k and v share a
// dtype, q may have another.
//
// Runs on the calling thread, with the first scratch of workspace, or with new one if that is null. Parts that begin
// at multiples of 512 keys, joined as a tree of neighbours, give the bits of the whole call with
// AttnOptions.reproducible.
//
// The caller vouches for this:
// As for attn_plan_run.
enum AttnStatus attn_plan_partial(const struct AttnPlan *plan,
                                  struct AttnWorkspace *workspace,
                                  size_t first,
                                  const struct AttnTensor *q,
                                  const struct AttnTensor *k,
                                  const struct AttnTensor *v,
                                  float *rows,
                                  size_t rows_len);

// Joins rows over some keys with rows over others, in f32: rows become those over both. Both hold len numbers, rows of
// 2 + value_dim each. A row that has seen nothing changes no bit of the other.
//
// The caller vouches for this:
// rows and others point to len numbers each; nobody else touches rows during the call.
enum AttnStatus attn_merge_partials(float *rows, const float *others, size_t len, size_t value_dim);

// Ends a call whose parts have been joined: takes the sinks in, divides, and writes out and lse as attn_plan_run()
// does.
//
// The caller vouches for this:
// As for attn_plan_run; rows points to rows_len numbers.
enum AttnStatus attn_plan_finish(const struct AttnPlan *plan,
                                 const float *rows,
                                 size_t rows_len,
                                 const struct AttnTensor *out,
                                 float *lse,
                                 size_t lse_len);

// Frees a plan; null is ignored.
//
// The caller vouches for this:
// plan came from attn_plan_create(), was not destroyed before, and does not run.
void attn_plan_destroy(struct AttnPlan *plan);

// Makes scratch for as many threads (0 for all), large enough for plan; plan may be null, then the first run makes it
// large enough. It may serve other plans too. Destroy it with attn_workspace_destroy().
//
// The caller vouches for this:
// plan is null or came from attn_plan_create(); workspace points to a pointer.
enum AttnStatus attn_workspace_create(const struct AttnPlan *plan, size_t threads, struct AttnWorkspace **workspace);

// Bytes that a workspace holds.
//
// The caller vouches for this:
// workspace came from attn_workspace_create(); bytes points to a size_t.
enum AttnStatus attn_workspace_bytes(const struct AttnWorkspace *workspace, size_t *bytes);

// Frees a workspace; null is ignored.
//
// The caller vouches for this:
// workspace came from attn_workspace_create(), was not destroyed before, and is not used by a call.
void attn_workspace_destroy(struct AttnWorkspace *workspace);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* ATTN_H */
