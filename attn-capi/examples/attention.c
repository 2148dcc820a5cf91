/* Attention from C: eight query heads over two key/value heads, causal, on all threads; compared with the formula written out.
 *
 *     cc attention.c $(pkg-config --cflags --libs attn) -lm && ./a.out
 */
#include <attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, Q_HEADS = 8, KV_HEADS = 2, Q_LEN = 100, KV_LEN = 130, DIM = 64 };

static void check(AttnStatus status) {
    if (status != ATTN_STATUS_OK) {
        fprintf(stderr, "attn: status %d: %s\n", (int)status, attn_last_error());
        exit(1);
    }
}

static float *painted(size_t count, unsigned seed) {
    float *x = malloc(count * sizeof *x);
    if (!x) exit(1);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (1 << 22) - 2.0f;
    }
    return x;
}

/* One output row by the textbook: softmax over the keys up to the query's position, the last query being at the last key. */
static void naive(const float *q, const float *k, const float *v, int query, double out[DIM]) {
    int visible = query + KV_LEN - Q_LEN + 1;
    double weight[KV_LEN], most = -INFINITY, sum = 0;
    for (int j = 0; j < visible; j++) {
        double score = 0;
        for (int d = 0; d < DIM; d++) score += (double)q[d] * k[j * DIM + d];
        weight[j] = score / sqrt(DIM);
        most = fmax(most, weight[j]);
    }
    for (int j = 0; j < visible; j++) sum += weight[j] = exp(weight[j] - most);
    for (int d = 0; d < DIM; d++) {
        out[d] = 0;
        for (int j = 0; j < visible; j++) out[d] += weight[j] / sum * v[j * DIM + d];
    }
}

int main(void) {
    printf("attn %s, levels: %s\n", attn_version(), attn_levels());
    size_t q_count = (size_t)BATCH * Q_HEADS * Q_LEN * DIM, kv_count = (size_t)BATCH * KV_HEADS * KV_LEN * DIM;
    float *q = painted(q_count, 1), *k = painted(kv_count, 2), *v = painted(kv_count, 3), *out = painted(q_count, 4);

    AttnTensor tq, tk, tv, to;
    check(attn_tensor_contiguous(&tq, q, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, Q_HEADS, Q_LEN, DIM));
    check(attn_tensor_contiguous(&tk, k, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, KV_HEADS, KV_LEN, DIM));
    check(attn_tensor_contiguous(&tv, v, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, KV_HEADS, KV_LEN, DIM));
    check(attn_tensor_contiguous(&to, out, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, Q_HEADS, Q_LEN, DIM));
    AttnOptions options = {.struct_size = sizeof options, .causal = ATTN_ALIGN_BOTTOM_RIGHT};
    check(attn_forward(&options, &tq, &tk, &tv, &to, NULL, 0));

    double worst = 0;
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < Q_HEADS; h++)
            for (int i = 0; i < Q_LEN; i++) {
                size_t row = ((size_t)b * Q_HEADS + h) * Q_LEN + i;
                size_t head = ((size_t)b * KV_HEADS + h / (Q_HEADS / KV_HEADS)) * KV_LEN * DIM;
                double want[DIM];
                naive(q + row * DIM, k + head, v + head, i, want);
                for (int d = 0; d < DIM; d++) worst = fmax(worst, fabs(want[d] - out[row * DIM + d]));
            }
    printf("largest difference from the formula: %.1e\n", worst);

    /* The same through a plan, which checks once, and a workspace, which makes every further call free of allocations. */
    AttnShape shape = {sizeof shape, BATCH, Q_HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, DIM};
    AttnPlan *plan;
    AttnWorkspace *workspace;
    char text[ATTN_EXPLAIN_SIZE];
    check(attn_plan_create(&options, &shape, &plan));
    check(attn_workspace_create(plan, 0, &workspace));
    check(attn_plan_explain(plan, ATTN_DTYPE_F32, text, sizeof text));
    printf("%s\n", text);
    float *again = painted(q_count, 5), lse[BATCH * Q_HEADS * Q_LEN];
    to.data = again;
    check(attn_plan_run(plan, workspace, &tq, &tk, &tv, &to, lse, sizeof lse / sizeof *lse));
    for (size_t i = 0; i < q_count; i++)
        if (again[i] != out[i]) worst = 1;
    attn_workspace_destroy(workspace);
    attn_plan_destroy(plan);

    /* What does not fit is told, and nothing is written. */
    tk.shape[3] = 32;
    AttnStatus status = attn_forward(NULL, &tq, &tk, &tv, &to, NULL, 0);
    printf("status %d: %s\n", (int)status, attn_last_error());
    int fine = worst < 1e-5 && status == ATTN_STATUS_SHAPE;
    printf("%s\n", fine ? "ok" : "WRONG");
    free(q), free(k), free(v), free(out), free(again);
    return !fine;
}
