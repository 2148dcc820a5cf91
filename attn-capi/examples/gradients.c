/* Gradients from C: the forward call keeps the log-sum-exp, the backward call turns the gradient of the loss by the
 * output into gradients of q, k and v. Each is compared with what the loss does when one number moves.
 *
 *     cc gradients.c $(pkg-config --cflags --libs attn) -lm && ./a.out
 */
#include <attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 1, HEADS = 4, KV_HEADS = 2, LEN = 50, DIM = 32 };
enum { Q = BATCH * HEADS * LEN * DIM, KV = BATCH * KV_HEADS * LEN * DIM, ROWS = BATCH * HEADS * LEN };

static float q[Q], k[KV], v[KV], out[Q], lse[ROWS], dout[Q], dq[Q], dk[KV], dv[KV];
static AttnTensor tq, tk, tv, to, tdout, tdq, tdk, tdv;
static AttnOptions options = {.struct_size = sizeof options, .causal = ATTN_ALIGN_BOTTOM_RIGHT, .softcap = 20};

static void check(AttnStatus status) {
    if (status != ATTN_STATUS_OK) {
        fprintf(stderr, "attn: status %d: %s\n", (int)status, attn_last_error());
        exit(1);
    }
}

static AttnTensor painted(float *x, int heads, unsigned seed) {
    AttnTensor tensor;
    for (int i = 0; i < BATCH * heads * LEN * DIM; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (1 << 22) - 2.0f;
    }
    check(attn_tensor_contiguous(&tensor, x, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, (size_t)heads, LEN, DIM));
    return tensor;
}

/* The loss: the sum of out times fixed numbers, which are its gradient by out. */
static double loss(void) {
    double sum = 0;
    check(attn_forward(&options, &tq, &tk, &tv, &to, lse, ROWS));
    for (int i = 0; i < Q; i++) sum += (double)out[i] * dout[i];
    return sum;
}

/* How far a gradient is from the slope of the loss, at a few places. */
static double difference(float *x, const float *gradient, int count) {
    double worst = 0;
    for (int i = 7; i < count; i += count / 9) {
        float before = x[i], step = 0.01f;
        double up, down;
        x[i] = before + step;
        up = loss();
        x[i] = before - step;
        down = loss();
        x[i] = before;
        worst = fmax(worst, fabs((up - down) / (2 * step) - gradient[i]));
    }
    return worst;
}

int main(void) {
    tq = painted(q, HEADS, 1), tk = painted(k, KV_HEADS, 2), tv = painted(v, KV_HEADS, 3);
    to = painted(out, HEADS, 4), tdout = painted(dout, HEADS, 5);
    tdq = painted(dq, HEADS, 6), tdk = painted(dk, KV_HEADS, 7), tdv = painted(dv, KV_HEADS, 8);

    printf("loss %.3f\n", loss());
    AttnGradients gradients = {.struct_size = sizeof gradients, .dq = &tdq, .dk = &tdk, .dv = &tdv};
    check(attn_backward(&options, &tq, &tk, &tv, &to, lse, ROWS, &tdout, &gradients));
    double worst = fmax(fmax(difference(q, dq, Q), difference(k, dk, KV)), difference(v, dv, KV));
    printf("largest difference from the slope of the loss: %.1e\n", worst);

    /* Without the log-sum-exp of the forward call there is no way back. */
    AttnStatus status = attn_backward(&options, &tq, &tk, &tv, &to, NULL, 0, &tdout, &gradients);
    printf("status %d: %s\n", (int)status, attn_last_error());
    int fine = worst < 2e-3 && status == ATTN_STATUS_NULL_POINTER;
    printf("%s\n", fine ? "ok" : "WRONG");
    return !fine;
}
