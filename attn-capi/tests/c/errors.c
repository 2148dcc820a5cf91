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
    void *blocks[8];
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
                    c.options.map_score = plus;
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

int main(void) {
    errors();
    sizes();
    plans();
    printf("%d cases, %d wrong\n", cases, wrong);
    return wrong != 0;
}
