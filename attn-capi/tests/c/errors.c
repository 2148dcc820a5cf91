/* Every kind of wrong argument, and right ones over buffers that are exactly as long as they must be: run under AddressSanitizer
 * and Valgrind, which see any access beyond them (`cargo xtask capi`). Prints what went wrong; exit code 0 if nothing did. */
#include <attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int cases, wrong;

/* A call: two sequences, two query heads over one key head, 3 queries, 5 keys, dim 4; each buffer is a block of its own. */
typedef struct {
    AttnTensor q, k, v, out;
    AttnOptions options;
    const AttnOptions *given;
    float *lse;
    size_t lse_len;
    void *blocks[12];
    int count;
} Call;

static void *block(Call *call, size_t bytes) {
    unsigned char *data = malloc(bytes ? bytes : 1);
    if (!data) exit(2);
    call->blocks[call->count++] = data;
    return data;
}

static AttnTensor floats(Call *call, size_t b, size_t h, size_t s, size_t d) {
    AttnTensor tensor;
    float *data = block(call, b * h * s * d * sizeof *data);
    for (size_t i = 0; i < b * h * s * d; i++) data[i] = (float)sin((double)i);
    if (attn_tensor_contiguous(&tensor, data, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, b, h, s, d) != ATTN_STATUS_OK) exit(2);
    return tensor;
}

static Call fresh(size_t b, size_t q_heads, size_t kv_heads, size_t q_len, size_t kv_len, size_t dim) {
    Call call;
    memset(&call, 0, sizeof call);
    call.q = floats(&call, b, q_heads, q_len, dim);
    call.k = floats(&call, b, kv_heads, kv_len, dim);
    call.v = floats(&call, b, kv_heads, kv_len, dim);
    call.out = floats(&call, b, q_heads, q_len, dim);
    call.lse_len = b * q_heads * q_len;
    call.lse = block(&call, call.lse_len * sizeof *call.lse);
    call.options.struct_size = sizeof call.options;
    call.options.threads = 1;
    return call;
}

static void finish(Call *call, const char *name, AttnStatus want) {
    AttnStatus status =
        attn_forward(call->given ? call->given : &call->options, &call->q, &call->k, &call->v, &call->out, call->lse, call->lse_len);
    cases++;
    if (status != want || (status != ATTN_STATUS_OK && !*attn_last_error())) {
        printf("%s: status %d, wanted %d: %s\n", name, (int)status, (int)want, attn_last_error());
        wrong++;
    }
    for (int i = 0; i < call->count; i++) free(call->blocks[i]);
}

/* One case: a good call, broken by the statement. */
#define CASE(name, want, ...)                      \
    do {                                           \
        Call c = fresh(2, 2, 1, 3, 5, 4);          \
        __VA_ARGS__;                               \
        finish(&c, name, want);                    \
    } while (0)

static double plus(double score, size_t b, size_t h, size_t i, size_t j, void *data) {
    (void)b, (void)h;
    return score + *(double *)data * (double)(i + j);
}

static void errors(void) {
    CASE("right", ATTN_STATUS_OK, (void)c);
    CASE("null data", ATTN_STATUS_NULL_POINTER, c.v.data = NULL);
    CASE("null lse", ATTN_STATUS_NULL_POINTER, c.lse = NULL);
    CASE("short q", ATTN_STATUS_BOUNDS, c.q.len--);
    CASE("short out", ATTN_STATUS_BOUNDS, c.out.len--);
    CASE("stride beyond", ATTN_STATUS_BOUNDS, c.k.strides[2] = 5);
    CASE("negative stride", ATTN_STATUS_BOUNDS, c.k.strides[2] = -4);
    CASE("negative stride with offset", ATTN_STATUS_OK, c.k.strides[2] = -4; c.k.offset = 16);
    CASE("zero strides", ATTN_STATUS_OK, memset(c.k.strides, 0, sizeof c.k.strides); c.k.len = 1);
    CASE("zero stride in out", ATTN_STATUS_OVERLAP, c.out.strides[1] = 0);
    CASE("offset beyond", ATTN_STATUS_BOUNDS, c.q.offset = 1);
    CASE("huge offset", ATTN_STATUS_OVERFLOW, c.q.offset = SIZE_MAX; c.q.len = SIZE_MAX);
    CASE("huge sizes", ATTN_STATUS_OVERFLOW, for (int i = 0; i < 4; i++) c.q.shape[i] = SIZE_MAX);
    CASE("huge strides", ATTN_STATUS_BOUNDS, c.q.strides[0] = PTRDIFF_MAX);
    CASE("lowest stride", ATTN_STATUS_BOUNDS, c.q.strides[0] = PTRDIFF_MIN);
    CASE("huge len", ATTN_STATUS_OVERFLOW, c.q.len = SIZE_MAX);
    CASE("huge lse", ATTN_STATUS_OVERFLOW, c.lse_len = SIZE_MAX / 2);
    CASE("short lse", ATTN_STATUS_SHAPE, c.lse_len--);
    CASE("misaligned", ATTN_STATUS_MISALIGNED, c.k.data = (char *)c.k.data + 2; c.k.len--; c.k.shape[2] = 4);
    CASE("misaligned out", ATTN_STATUS_MISALIGNED, c.out.data = (char *)c.out.data + 1; c.out.len--; c.out.shape[0] = 1);
    CASE("out is q", ATTN_STATUS_OVERLAP, c.out = c.q);
    CASE("out meets v", ATTN_STATUS_OVERLAP, c.v = c.k = c.out; c.k.shape[1] = c.v.shape[1] = 1);
    CASE("lse in out", ATTN_STATUS_OVERLAP, c.lse = c.out.data);
    CASE("heads", ATTN_STATUS_SHAPE, c.k.shape[1] = c.v.shape[1] = 0);
    CASE("dim", ATTN_STATUS_SHAPE, c.k.shape[3] = 3);
    CASE("dtype", ATTN_STATUS_OPTION, c.q.dtype = 77);
    CASE("mixed dtypes", ATTN_STATUS_UNSUPPORTED, c.q.dtype = ATTN_DTYPE_BF16);
    CASE("struct size", ATTN_STATUS_STRUCT_SIZE, c.q.struct_size = 3);
    CASE("no struct size", ATTN_STATUS_STRUCT_SIZE, c.options.struct_size = 0);
    CASE("alignment", ATTN_STATUS_OPTION, c.options.causal = 9);
    CASE("NaN", ATTN_STATUS_OPTION, c.options.softcap = NAN);
    CASE("scale without its flag", ATTN_STATUS_OPTION, c.options.scale = 0.5);
    CASE("window without alignment", ATTN_STATUS_OPTION, c.options.window_left = 2);
    CASE("offset beside another alignment", ATTN_STATUS_OPTION, c.options.causal = ATTN_ALIGN_TOP_LEFT; c.options.causal_offset = 3);
    CASE("block size without blocks", ATTN_STATUS_OPTION, c.options.block_k = 3);
    CASE("seed without dropout", ATTN_STATUS_OPTION, c.options.dropout_seed = 5);
    CASE("data without a function", ATTN_STATUS_OPTION, c.options.user_data = &c);
    CASE("struct size and an option", ATTN_STATUS_STRUCT_SIZE, c.v.struct_size = 3; c.options.scale = 0.5);
    CASE("no level", ATTN_STATUS_OPTION, c.options.level = "mmx");
    CASE("no table", ATTN_STATUS_NULL_POINTER, c.options.kv_lens_len = 2);
    CASE("table", ATTN_STATUS_TABLE, size_t *lens = block(&c, 2 * sizeof *lens); lens[0] = 5; lens[1] = 6;
         c.options.kv_lens = lens; c.options.kv_lens_len = 2);
    CASE("short table", ATTN_STATUS_SHAPE, size_t *lens = block(&c, 3 * sizeof *lens); memset(lens, 0, 3 * sizeof *lens);
         c.options.kv_lens = lens; c.options.kv_lens_len = 3);
    CASE("tree", ATTN_STATUS_TABLE, ptrdiff_t *up = block(&c, 3 * sizeof *up); up[0] = -1; up[1] = 2; up[2] = -7;
         c.options.tree_parents = up; c.options.tree_len = 3);
    CASE("no bool", ATTN_STATUS_TABLE, AttnTensor mask = c.q; mask.dtype = ATTN_DTYPE_BOOL; mask.len *= 4;
         mask.shape[0] = 1; mask.shape[1] = 1; mask.shape[2] = 3; mask.shape[3] = 5; c.options.keep = &mask);
    CASE("bias that does not broadcast", ATTN_STATUS_SHAPE, AttnTensor bias = c.q; c.options.bias = &bias);
    CASE("empty", ATTN_STATUS_OK, c.q.shape[2] = 0; c.out.shape[2] = 0; c.lse_len = 0; c.q.data = c.out.data = NULL; c.q.len = 0);
    CASE("no keys", ATTN_STATUS_OK, c.k.shape[2] = c.v.shape[2] = 0; c.k.len = c.v.len = 0);
    /* A struct of a newer header, in a block of exactly its size: its tail must be zero. */
    for (int tail = 0; tail < 2; tail++) {
        Call c = fresh(2, 2, 1, 3, 5, 4);
        unsigned char *newer = block(&c, sizeof(AttnOptions) + 8);
        memcpy(newer, &c.options, sizeof(AttnOptions));
        memset(newer + sizeof(AttnOptions), tail, 8);
        ((AttnOptions *)newer)->struct_size = sizeof(AttnOptions) + 8;
        c.given = (AttnOptions *)newer;
        finish(&c, "newer struct", tail ? ATTN_STATUS_STRUCT_SIZE : ATTN_STATUS_OK);
    }
    /* One of an older header, which ended behind its first field. */
    Call c = fresh(2, 2, 1, 3, 5, 4);
    size_t *older = block(&c, sizeof *older);
    *older = sizeof *older;
    c.given = (AttnOptions *)older;
    finish(&c, "older struct", ATTN_STATUS_OK);
    cases++;
    if (attn_forward(NULL, NULL, NULL, NULL, NULL, NULL, 0) != ATTN_STATUS_NULL_POINTER) wrong++;
}

/* Sizes around the edges of vectors and tiles, on one thread and on all, with masks that read tables and tensors. */
static void sizes(void) {
    const size_t lens[] = {1, 7, 16, 17, 49, 65}, dims[] = {1, 8, 33, 64};
    for (size_t n = 0; n < sizeof lens / sizeof *lens; n++)
        for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
            for (size_t kind = 0; kind < 5; kind++) {
                size_t q_len = lens[n], kv_len = lens[(n + d) % (sizeof lens / sizeof *lens)];
                Call c = fresh(2, 4, 2, q_len, kv_len, dims[d]);
                AttnTensor mask;
                double factor = 0.01;
                c.options.threads = kind % 3;
                c.options.causal = (uint32_t)(kind % 3);
                if (kind == 1 || kind == 2) {
                    unsigned char *keep = block(&c, q_len * kv_len);
                    for (size_t i = 0; i < q_len * kv_len; i++) keep[i] = i % 3 != 0;
                    attn_tensor_contiguous(&mask, keep, ATTN_DTYPE_BOOL, ATTN_LAYOUT_BHSD, 1, 1, q_len, kv_len);
                    *(kind == 1 ? &c.options.keep : &c.options.drop) = &mask;
                } else if (kind == 3) {
                    mask = floats(&c, 1, 1, q_len, kv_len);
                    c.options.bias = &mask;
                } else if (kind == 4) {
                    c.options.score_mod = plus;
                    c.options.user_data = &factor;
                }
                finish(&c, "sizes", ATTN_STATUS_OK);
            }
}

/* Plans and workspaces: made, run twice, destroyed. */
static void plans(void) {
    Call c = fresh(2, 2, 1, 30, 50, 24);
    size_t *lens = block(&c, 2 * sizeof *lens), bytes = 0;
    lens[0] = 50, lens[1] = 20;
    c.options.kv_lens = lens, c.options.kv_lens_len = 2;
    AttnShape shape = {sizeof shape, 2, 2, 1, 30, 50, 24, 24};
    AttnPlan *plan = NULL;
    AttnWorkspace *workspace = NULL;
    char text[8];
    cases++;
    if (attn_plan_create(&c.options, &shape, &plan) || attn_workspace_create(plan, 1, &workspace)
        || attn_plan_workspace_bytes(plan, &bytes) || !bytes
        || attn_plan_explain(plan, ATTN_DTYPE_F32, text, sizeof text) != ATTN_STATUS_BOUNDS
        || attn_plan_run(plan, workspace, &c.q, &c.k, &c.v, &c.out, c.lse, c.lse_len)
        || attn_plan_run(plan, NULL, &c.q, &c.k, &c.v, &c.out, NULL, 0)
        || attn_plan_run(plan, workspace, &c.q, &c.v, &c.k, &c.q, NULL, 0) != ATTN_STATUS_OVERLAP) {
        printf("plans: %s\n", attn_last_error());
        wrong++;
    }
    attn_workspace_destroy(workspace);
    attn_plan_destroy(plan);
    attn_plan_destroy(NULL);
    finish(&c, "the call of the plan", ATTN_STATUS_OK);
    shape.head_dim = SIZE_MAX;
    cases++;
    if (attn_plan_create(NULL, &shape, &plan) != ATTN_STATUS_OVERFLOW) wrong++;
}

/* One expectation that is not about attn_forward(). */
static void expect(const char *name, AttnStatus status, AttnStatus want) {
    cases++;
    if (status != want || (want != ATTN_STATUS_OK && !*attn_last_error())) {
        printf("%s: status %d, wanted %d: %s\n", name, (int)status, (int)want, attn_last_error());
        wrong++;
    }
}

/* A cache of two sequences, one key head, dim 4: slots that hold no token are memory that nobody has written. */
typedef struct {
    AttnTensor k, v, q, out, k_new, v_new;
    AttnCache cache;
    AttnQueries queries;
    float *lse;
    size_t lse_len;
    int32_t *table;
    Call owner;
} Decoding;

enum { SLOTS = 8, STEP = 3 };

static void decoding(Decoding *d, AttnCacheKind kind) {
    memset(d, 0, sizeof *d);
    size_t first = kind == ATTN_CACHE_KIND_PAGED ? 4 : 2, slots = kind == ATTN_CACHE_KIND_PAGED ? SLOTS / 2 : SLOTS;
    for (int i = 0; i < 2; i++) {
        float *data = block(&d->owner, first * slots * 4 * sizeof *data);
        attn_tensor_contiguous(i ? &d->v : &d->k, data, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, first, 1, slots, 4);
    }
    size_t *lens = block(&d->owner, 2 * sizeof *lens);
    lens[0] = lens[1] = 0;
    d->k_new = floats(&d->owner, 2, 1, STEP, 4), d->v_new = floats(&d->owner, 2, 1, STEP, 4);
    d->q = floats(&d->owner, 2, 2, STEP, 4);
    d->out = floats(&d->owner, 2, 2, STEP, 4);
    d->lse_len = 2 * 2 * STEP;
    d->lse = block(&d->owner, d->lse_len * sizeof *d->lse);
    AttnCache cache = {.struct_size = sizeof cache, .kind = kind, .k = &d->k, .v = &d->v, .lens = lens, .lens_len = 2};
    if (kind == ATTN_CACHE_KIND_RING) cache.sinks = 1, cache.window = SLOTS - 1;
    if (kind == ATTN_CACHE_KIND_PAGED) {
        int32_t *table = d->table = block(&d->owner, 4 * sizeof *table);
        table[0] = 3, table[1] = 0, table[2] = 1, table[3] = -1;
        cache.block_table = table, cache.block_table_len = 4;
    }
    d->cache = cache;
    d->queries.struct_size = sizeof d->queries;
}

static AttnStatus decode(Decoding *d) {
    return attn_decode(NULL, &d->cache, &d->q, &d->queries, &d->out, d->lse, d->lse_len);
}

static AttnStatus append(Decoding *d) { return attn_cache_append(&d->cache, &d->k_new, &d->v_new, NULL, 0); }

/* One case: a cache with three tokens of each sequence, broken by the statement. */
#define DECODE(name, kind, want, ...)                          \
    do {                                                       \
        Decoding d;                                            \
        decoding(&d, kind);                                    \
        expect("append for " name, append(&d), ATTN_STATUS_OK); \
        __VA_ARGS__;                                           \
        expect(name, decode(&d), want);                        \
        for (int i = 0; i < d.owner.count; i++) free(d.owner.blocks[i]); \
    } while (0)

static void caches(void) {
    const AttnCacheKind slots = ATTN_CACHE_KIND_APPEND, ring = ATTN_CACHE_KIND_RING, paged = ATTN_CACHE_KIND_PAGED;
    size_t one[2] = {1, 0}, many[2] = {4, 0}, packed[3] = {0, 1, 3}, down[3] = {0, 2, 1};
    DECODE("slots", slots, ATTN_STATUS_OK, (void)d);
    DECODE("a ring", ring, ATTN_STATUS_OK, (void)d);
    DECODE("pages", paged, ATTN_STATUS_OK, (void)d);
    DECODE("a ring that turns", ring, ATTN_STATUS_UNSUPPORTED, for (int i = 0; i < 4; i++) append(&d));
    DECODE("few queries", slots, ATTN_STATUS_OK, d.queries.lens = one; d.queries.lens_len = 2);
    DECODE("packed", slots, ATTN_STATUS_OK, d.queries.cu = packed; d.queries.cu_len = 3; d.q.shape[0] = d.out.shape[0] = 1; d.lse_len = 6);
    DECODE("too many queries", slots, ATTN_STATUS_TABLE, d.queries.lens = many; d.queries.lens_len = 2);
    DECODE("cu that falls", slots, ATTN_STATUS_TABLE, d.queries.cu = down; d.queries.cu_len = 3; d.q.shape[0] = d.out.shape[0] = 1; d.lse_len = 6);
    DECODE("both", slots, ATTN_STATUS_OPTION, d.queries.cu = packed; d.queries.cu_len = 3; d.queries.lens = one; d.queries.lens_len = 2);
    DECODE("tokens beyond the slots", slots, ATTN_STATUS_TABLE, d.cache.lens[1] = SLOTS + 1);
    DECODE("tokens without end", slots, ATTN_STATUS_TABLE, d.cache.lens[1] = SIZE_MAX);
    DECODE("fewer tokens than queries", slots, ATTN_STATUS_TABLE, d.cache.lens[0] = STEP - 1);
    DECODE("short k", slots, ATTN_STATUS_BOUNDS, d.k.len--);
    DECODE("null v", slots, ATTN_STATUS_NULL_POINTER, d.v.data = NULL);
    DECODE("no v", slots, ATTN_STATUS_NULL_POINTER, d.cache.v = NULL);
    DECODE("no lens", slots, ATTN_STATUS_NULL_POINTER, d.cache.lens = NULL);
    DECODE("kind", slots, ATTN_STATUS_OPTION, d.cache.kind = 9);
    DECODE("window of another kind", slots, ATTN_STATUS_OPTION, d.cache.window = 1);
    DECODE("pages of another kind", ring, ATTN_STATUS_OPTION, int32_t none; d.cache.block_table = &none);
    DECODE("no window", ring, ATTN_STATUS_OPTION, d.cache.window = 0);
    DECODE("endless window", ring, ATTN_STATUS_OVERFLOW, d.cache.window = SIZE_MAX);
    DECODE("wide ring", ring, ATTN_STATUS_BOUNDS, d.cache.window = SLOTS);
    DECODE("no page", paged, ATTN_STATUS_TABLE, d.table[0] = 4);
    DECODE("negative page", paged, ATTN_STATUS_TABLE, d.table[0] = -1);
    DECODE("short table", paged, ATTN_STATUS_TABLE, d.cache.block_table_len = 0);
    DECODE("huge table", paged, ATTN_STATUS_OVERFLOW, d.cache.block_table_len = SIZE_MAX);
    /* The same pages in compressed rows: five tokens in two pages, and three in one. */
    int32_t indptr[3] = {0, 2, 3}, indices[3] = {3, 0, 1}, last[2] = {1, 3};
#define CSR (d.cache.block_table = NULL, d.cache.block_table_len = 0, d.cache.lens = NULL, d.cache.lens_len = 0, \
             d.cache.kv_indptr = indptr, d.cache.kv_indptr_len = 3, d.cache.kv_indices = indices,                \
             d.cache.kv_indices_len = 3, d.cache.kv_last_page_len = last)
    DECODE("compressed pages", paged, ATTN_STATUS_OK, CSR; expect("append to compressed pages", append(&d), ATTN_STATUS_OK));
    DECODE("both page tables", paged, ATTN_STATUS_OPTION, const int32_t *table = d.cache.block_table; CSR; d.cache.block_table = table);
    DECODE("compressed pages of slots", slots, ATTN_STATUS_OPTION, CSR);
    DECODE("indptr beyond the indices", paged, ATTN_STATUS_TABLE, CSR; d.cache.kv_indices_len = 2);
    DECODE("no last page", paged, ATTN_STATUS_NULL_POINTER, CSR; d.cache.kv_last_page_len = NULL);
    DECODE("huge indptr", paged, ATTN_STATUS_OVERFLOW, CSR; d.cache.kv_indptr_len = SIZE_MAX);
    DECODE("struct size", slots, ATTN_STATUS_STRUCT_SIZE, d.cache.struct_size = 2);
    DECODE("out in the cache", slots, ATTN_STATUS_OVERLAP, d.out.data = d.k.data);
    DECODE("other dtypes", slots, ATTN_STATUS_UNSUPPORTED, d.v.dtype = ATTN_DTYPE_F16);
    /* Appending: refused before anything is written or counted. */
    DECODE("full", slots, ATTN_STATUS_OK, append(&d); expect("append to a full cache", append(&d), ATTN_STATUS_TABLE));
    DECODE("no page to write", paged, ATTN_STATUS_OK, expect("append without a page", append(&d), ATTN_STATUS_TABLE));
    DECODE("k is v", slots, ATTN_STATUS_OK, AttnTensor v = d.v; d.v = d.k; expect("k is v", append(&d), ATTN_STATUS_OVERLAP); d.v = v);
    DECODE("k_new in k", slots, ATTN_STATUS_OK, d.k_new.data = d.k.data; expect("k_new in k", append(&d), ATTN_STATUS_OVERLAP));
    DECODE("lens in v", slots, ATTN_STATUS_OK, size_t *lens = d.cache.lens; d.cache.lens = d.v.data; expect("lens in v", append(&d), ATTN_STATUS_OVERLAP); d.cache.lens = lens);
    DECODE("new dtype", slots, ATTN_STATUS_OK, d.k_new.dtype = ATTN_DTYPE_BF16; expect("new dtype", append(&d), ATTN_STATUS_UNSUPPORTED));
    DECODE("counts", slots, ATTN_STATUS_OK, expect("counts", attn_cache_append(&d.cache, &d.k_new, &d.v_new, many, 2), ATTN_STATUS_TABLE));
    DECODE("short counts", slots, ATTN_STATUS_OK, expect("short counts", attn_cache_append(&d.cache, &d.k_new, &d.v_new, one, 1), ATTN_STATUS_SHAPE));
}

/* Results over parts of the keys, and texts. */
static void parts(void) {
    Call c = fresh(1, 2, 1, 3, 6, 4), other = fresh(1, 2, 1, 3, 6, 4);
    expect("first", attn_forward(NULL, &c.q, &c.k, &c.v, &c.out, c.lse, c.lse_len), ATTN_STATUS_OK);
    expect("second", attn_forward(NULL, &other.q, &other.k, &other.v, &other.out, other.lse, other.lse_len), ATTN_STATUS_OK);
    expect("merge", attn_merge_outputs(&c.out, c.lse, &other.out, other.lse, c.lse_len), ATTN_STATUS_OK);
    expect("merge with itself", attn_merge_outputs(&c.out, c.lse, &c.out, other.lse, c.lse_len), ATTN_STATUS_OVERLAP);
    expect("one lse", attn_merge_outputs(&c.out, c.lse, &other.out, c.lse, c.lse_len), ATTN_STATUS_OVERLAP);
    expect("no lse", attn_merge_outputs(&c.out, NULL, &other.out, other.lse, c.lse_len), ATTN_STATUS_NULL_POINTER);
    expect("short lse", attn_merge_outputs(&c.out, c.lse, &other.out, other.lse, c.lse_len - 1), ATTN_STATUS_SHAPE);
    expect("huge lse", attn_merge_outputs(&c.out, c.lse, &other.out, other.lse, SIZE_MAX), ATTN_STATUS_OVERFLOW);
    other.out.len--;
    expect("short other", attn_merge_outputs(&c.out, c.lse, &other.out, other.lse, c.lse_len), ATTN_STATUS_BOUNDS);
    other.out.len++;

    AttnShape shape = {sizeof shape, 1, 2, 1, 3, 6, 4, 4};
    AttnPlan *plan = NULL;
    size_t len = 0;
    expect("plan", attn_plan_create(NULL, &shape, &plan), ATTN_STATUS_OK);
    expect("len", attn_plan_state_len(plan, &len), ATTN_STATUS_OK);
    float *rows = block(&c, len * sizeof *rows), *others = block(&other, len * sizeof *others);
    AttnTensor k = c.k;
    k.shape[2] = 4;
    expect("part", attn_plan_state(plan, NULL, 0, &c.q, &k, &k, rows, len), ATTN_STATUS_OK);
    k.shape[2] = 2;
    expect("other part", attn_plan_state(plan, NULL, 4, &c.q, &k, &k, others, len), ATTN_STATUS_OK);
    expect("part beyond the keys", attn_plan_state(plan, NULL, 5, &c.q, &k, &k, others, len), ATTN_STATUS_TABLE);
    expect("part without end", attn_plan_state(plan, NULL, SIZE_MAX, &c.q, &k, &k, others, len), ATTN_STATUS_OVERFLOW);
    expect("short rows", attn_plan_state(plan, NULL, 0, &c.q, &k, &k, others, len - 1), ATTN_STATUS_SHAPE);
    expect("rows in q", attn_plan_state(plan, NULL, 0, &c.q, &k, &k, c.q.data, len), ATTN_STATUS_OVERLAP);
    expect("join", attn_merge_states(rows, others, len, 4), ATTN_STATUS_OK);
    expect("join rows with themselves", attn_merge_states(rows, rows, len, 4), ATTN_STATUS_OVERLAP);
    expect("join half a row", attn_merge_states(rows, others, len - 1, 4), ATTN_STATUS_SHAPE);
    expect("join rows without end", attn_merge_states(rows, others, len, SIZE_MAX), ATTN_STATUS_OVERFLOW);
    expect("end", attn_plan_finish(plan, rows, len, &c.out, c.lse, c.lse_len), ATTN_STATUS_OK);
    expect("end with short rows", attn_plan_finish(plan, rows, len - 1, &c.out, c.lse, c.lse_len), ATTN_STATUS_SHAPE);
    expect("end in the rows", attn_plan_finish(plan, rows, len, &c.out, rows, c.lse_len), ATTN_STATUS_OVERLAP);
    attn_plan_destroy(plan);

    char *text = block(&c, 16), whole[ATTN_EXPLAIN_SIZE];
    expect("explain", attn_explain(NULL, &shape, ATTN_DTYPE_F32, text, 16), ATTN_STATUS_BOUNDS);
    expect("the level", attn_level(&(const char *){NULL}), ATTN_STATUS_OK);
    expect("no place for the level", attn_level(NULL), ATTN_STATUS_NULL_POINTER);
    expect("explain in no room", attn_explain(NULL, &shape, ATTN_DTYPE_F32, text, 0), ATTN_STATUS_BOUNDS);
    expect("explain to null", attn_explain(NULL, &shape, ATTN_DTYPE_F32, NULL, 16), ATTN_STATUS_NULL_POINTER);
    expect("explain gradients in f32 and bf16",
           attn_explain_backward(NULL, &shape, ATTN_DTYPE_BF16, ATTN_DTYPE_F32, whole, sizeof whole), ATTN_STATUS_OK);
    expect("explain gradients",
           attn_explain_backward(NULL, &shape, ATTN_DTYPE_F32, ATTN_DTYPE_F32, text, 16), ATTN_STATUS_BOUNDS);
    expect("explain gradients of int8",
           attn_explain_backward(NULL, &shape, ATTN_DTYPE_F32, ATTN_DTYPE_I8, text, 16), ATTN_STATUS_OPTION);
    expect("explain bools", attn_explain(NULL, &shape, ATTN_DTYPE_BOOL, text, 16), ATTN_STATUS_OPTION);
    shape.kv_heads = 0;
    expect("explain heads", attn_explain(NULL, &shape, ATTN_DTYPE_F32, text, 16), ATTN_STATUS_SHAPE);
    for (int i = 0; i < c.count; i++) free(c.blocks[i]);
    for (int i = 0; i < other.count; i++) free(other.blocks[i]);
}

int main(void) {
    errors();
    sizes();
    plans();
    caches();
    parts();
    printf("%d cases, %d wrong\n", cases, wrong);
    return wrong != 0;
}
