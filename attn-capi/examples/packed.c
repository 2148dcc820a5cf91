/* A cache as llama.cpp stores it, keys in q8_0 and values in q4_0: tokens are encoded as they are appended, and
 * decoded as they are read. Compared with the formula written out over the numbers before.
 *
 *     cc packed.c $(pkg-config --cflags --libs attn) -lm && ./a.out
 */
#include <attn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* K_ROW, V_ROW: bytes of a key and of a value. */
enum { HEADS = 2, DIM = 64, TOKENS = 100, K_ROW = DIM / 32 * 34, V_ROW = DIM / 32 * 18 };

static void check(AttnStatus status) {
    if (status != ATTN_STATUS_OK) {
        fprintf(stderr, "attn: status %d: %s\n", (int)status, attn_last_error());
        exit(1);
    }
}

int main(void) {
    static float q[HEADS * DIM], k[HEADS * TOKENS * DIM], v[HEADS * TOKENS * DIM], out[HEADS * DIM];
    for (int n = 0; n < HEADS * DIM; n++) q[n] = (float)sin(n * 0.7);
    for (int n = 0; n < HEADS * TOKENS * DIM; n++) k[n] = (float)sin(n * 0.37), v[n] = (float)cos(n * 0.53);

    /* Sizes of a tensor of q8_0 or q4_0 count numbers; its strides and its length count bytes. */
    static uint8_t k_bytes[HEADS * TOKENS * K_ROW], v_bytes[HEADS * TOKENS * V_ROW];
    AttnTensor tk, tv, tq, k_new, v_new, to;
    check(attn_tensor_contiguous(&tk, k_bytes, ATTN_DTYPE_Q8_0, ATTN_LAYOUT_BHSD, 1, HEADS, TOKENS, DIM));
    check(attn_tensor_contiguous(&tv, v_bytes, ATTN_DTYPE_Q4_0, ATTN_LAYOUT_BHSD, 1, HEADS, TOKENS, DIM));
    size_t lens[1] = {0};
    AttnCache cache = {.struct_size = sizeof cache, .k = &tk, .v = &tv, .lens = lens, .lens_len = 1};

    check(attn_tensor_contiguous(&k_new, k, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, HEADS, TOKENS, DIM));
    check(attn_tensor_contiguous(&v_new, v, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, HEADS, TOKENS, DIM));
    check(attn_cache_append(&cache, &k_new, &v_new, NULL, 0));
    check(attn_tensor_contiguous(&tq, q, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, HEADS, 1, DIM));
    check(attn_tensor_contiguous(&to, out, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, HEADS, 1, DIM));
    check(attn_decode(NULL, &cache, &tq, NULL, &to, NULL, 0));

    double worst = 0;
    for (int h = 0; h < HEADS; h++) {
        double weight[TOKENS], sum = 0;
        for (int j = 0; j < TOKENS; j++) {
            double score = 0;
            for (int d = 0; d < DIM; d++) score += (double)q[h * DIM + d] * k[(h * TOKENS + j) * DIM + d];
            sum += weight[j] = exp(score / sqrt(DIM));
        }
        for (int d = 0; d < DIM; d++) {
            double want = 0;
            for (int j = 0; j < TOKENS; j++) want += weight[j] / sum * v[(h * TOKENS + j) * DIM + d];
            worst = fmax(worst, fabs(want - out[h * DIM + d]));
        }
    }
    printf("%zu tokens in %zu bytes instead of %zu: largest difference from the formula: %.1e\n", lens[0],
           sizeof k_bytes + sizeof v_bytes, sizeof k + sizeof v, worst);

    /* A row that is no whole number of blocks is refused. */
    AttnStatus status = attn_tensor_contiguous(&tk, k_bytes, ATTN_DTYPE_Q8_0, ATTN_LAYOUT_BHSD, 1, HEADS, TOKENS, 40);
    printf("status %d: %s\n", (int)status, attn_last_error());
    int fine = worst < 0.1 && status == ATTN_STATUS_SHAPE;
    printf("%s\n", fine ? "ok" : "WRONG");
    return !fine;
}
