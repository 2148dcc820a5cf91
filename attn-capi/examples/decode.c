/* Generating text from C: two sequences of different lengths in one cache of pages. A prompt in chunks, then token by token, each
 * step one call for the whole batch; compared with the formula written out.
 *
 *     cc decode.c $(pkg-config --cflags --libs attn) -lm && ./a.out
 */
#include <attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 2, Q_HEADS = 4, KV_HEADS = 2, DIM = 32, TOKENS = 60, PAGE = 16, PAGES = 8, WIDTH = 4, CHUNK = 25 };

static void check(AttnStatus status) {
    if (status != ATTN_STATUS_OK) {
        fprintf(stderr, "attn: status %d: %s\n", (int)status, attn_last_error());
        exit(1);
    }
}

/* What a model would compute for a token: its query, key or value (kind 0, 1, 2), one number. */
static float number(int kind, int sequence, int head, int token, int d) {
    return (float)(1.5 * sin(kind * 11.0 + sequence * 7.0 + head * 3.0 + token * 1.7 + d * 0.9));
}

/* [BATCH, heads, count, DIM]: tokens from start[b] on. */
static void fill(float *x, int kind, int heads, const size_t *start, int count) {
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < count; t++)
                for (int d = 0; d < DIM; d++)
                    x[((b * heads + h) * count + t) * DIM + d] = number(kind, b, h, (int)start[b] + t, d);
}

/* The row of a token by the textbook: softmax over all tokens up to it. */
static double difference(const float *row, int b, int h, int token) {
    double weight[TOKENS], sum = 0, worst = 0;
    int kv_head = h / (Q_HEADS / KV_HEADS);
    for (int j = 0; j <= token; j++) {
        double score = 0;
        for (int d = 0; d < DIM; d++) score += (double)number(0, b, h, token, d) * number(1, b, kv_head, j, d);
        sum += weight[j] = exp(score / sqrt(DIM));
    }
    for (int d = 0; d < DIM; d++) {
        double want = 0;
        for (int j = 0; j <= token; j++) want += weight[j] / sum * number(2, b, kv_head, j, d);
        worst = fmax(worst, fabs(want - row[d]));
    }
    return worst;
}

int main(void) {
    /* Pages of keys and of values, [PAGES, PAGE, KV_HEADS, DIM] as vLLM lays them out, and whose they are. Nothing is in them yet. */
    static float k_pages[PAGES * PAGE * KV_HEADS * DIM], v_pages[PAGES * PAGE * KV_HEADS * DIM];
    static float q[BATCH * Q_HEADS * CHUNK * DIM], k[BATCH * KV_HEADS * CHUNK * DIM], v[BATCH * KV_HEADS * CHUNK * DIM],
        out[BATCH * Q_HEADS * CHUNK * DIM];
    memset(k_pages, 0xFF, sizeof k_pages), memset(v_pages, 0xFF, sizeof v_pages); /* NaN: what holds no token is never read */
    const int32_t table[BATCH * WIDTH] = {5, 0, 7, 2, 1, 6, 3, 4};
    size_t lens[BATCH] = {0, 0};
    AttnTensor tk, tv;
    check(attn_tensor_contiguous(&tk, k_pages, ATTN_DTYPE_F32, ATTN_LAYOUT_BSHD, PAGES, KV_HEADS, PAGE, DIM));
    check(attn_tensor_contiguous(&tv, v_pages, ATTN_DTYPE_F32, ATTN_LAYOUT_BSHD, PAGES, KV_HEADS, PAGE, DIM));
    AttnCache cache = {.struct_size = sizeof cache, .kind = ATTN_CACHE_KIND_PAGED, .k = &tk, .v = &tv, .lens = lens,
                       .lens_len = BATCH, .block_table = table, .block_table_len = BATCH * WIDTH};

    double worst = 0;
    int calls = 0;
    while (lens[0] < TOKENS) {
        /* The first sequence takes its prompt in chunks of 25 tokens, then one by one; the second one by one from the start. */
        size_t start[BATCH] = {lens[0], lens[1]}, counts[BATCH] = {lens[0] < 2 * CHUNK ? CHUNK : 1, 1};
        size_t n = counts[0];
        fill(q, 0, Q_HEADS, start, (int)n), fill(k, 1, KV_HEADS, start, (int)n), fill(v, 2, KV_HEADS, start, (int)n);
        AttnTensor tq, k_new, v_new, to;
        check(attn_tensor_contiguous(&tq, q, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, Q_HEADS, n, DIM));
        check(attn_tensor_contiguous(&k_new, k, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, KV_HEADS, n, DIM));
        check(attn_tensor_contiguous(&v_new, v, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, KV_HEADS, n, DIM));
        check(attn_tensor_contiguous(&to, out, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, Q_HEADS, n, DIM));
        check(attn_cache_append(&cache, &k_new, &v_new, counts, BATCH)); /* adds the counts to lens */
        AttnQueries queries = {.struct_size = sizeof queries, .lens = counts, .lens_len = BATCH};
        check(attn_decode(NULL, &cache, &tq, &queries, &to, NULL, 0));
        calls++;
        for (int b = 0; b < BATCH; b++)
            for (int h = 0; h < Q_HEADS; h++)
                for (size_t t = 0; t < counts[b]; t++) {
                    const float *row = out + ((size_t)(b * Q_HEADS + h) * n + t) * DIM;
                    worst = fmax(worst, difference(row, b, h, (int)(start[b] + t)));
                }
    }
    printf("%d calls, %zu and %zu tokens: largest difference from the formula: %.1e\n", calls, lens[0], lens[1], worst);

    /* A page that another sequence reads is not written. */
    const int32_t shared[BATCH * WIDTH] = {5, 0, 7, 2, 5, 0, 7, 2};
    cache.block_table = shared;
    AttnTensor one;
    check(attn_tensor_contiguous(&one, k, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, KV_HEADS, 1, DIM));
    AttnStatus status = attn_cache_append(&cache, &one, &one, NULL, 0);
    printf("status %d: %s\n", (int)status, attn_last_error());
    int fine = worst < 1e-5 && status == ATTN_STATUS_OVERLAP;
    printf("%s\n", fine ? "ok" : "WRONG");
    return !fine;
}
