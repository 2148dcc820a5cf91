/* What a call costs before it computes anything: one query against one key, dim 1, in nanoseconds of this thread's time.
 *
 *     cc -O2 overhead.c $(pkg-config --cflags --libs attn) && ./a.out
 */
#define _POSIX_C_SOURCE 200809L
#include <attn.h>
#include <stdio.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(void) {
    enum { CALLS = 100000, ROUNDS = 7 };
    float x = 1, out = 0;
    AttnTensor in, to;
    attn_tensor_contiguous(&in, &x, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, 1, 1, 1);
    attn_tensor_contiguous(&to, &out, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, 1, 1, 1);
    AttnOptions options = {.struct_size = sizeof options, .causal = ATTN_ALIGN_BOTTOM_RIGHT, .softcap = 30};
    AttnShape shape = {sizeof shape, 1, 1, 1, 1, 1, 1, 1};
    AttnPlan *plan;
    AttnWorkspace *workspace;
    if (attn_plan_create(NULL, &shape, &plan) || attn_workspace_create(plan, 1, &workspace)) return 1;
    double best[3] = {1e9, 1e9, 1e9};
    for (int round = 0; round < ROUNDS; round++) {
        double start[4];
        int status = 0;
        start[0] = now();
        for (int i = 0; i < CALLS; i++) status |= attn_forward(NULL, &in, &in, &in, &to, NULL, 0);
        start[1] = now();
        for (int i = 0; i < CALLS; i++) status |= attn_forward(&options, &in, &in, &in, &to, NULL, 0);
        start[2] = now();
        for (int i = 0; i < CALLS; i++) status |= attn_plan_run(plan, workspace, &in, &in, &in, &to, NULL, 0);
        start[3] = now();
        if (status) return 1;
        for (int n = 0; n < 3; n++) {
            double each = (start[n + 1] - start[n]) / CALLS;
            if (each < best[n]) best[n] = each;
        }
    }
    printf("attn_forward %.0f ns, with options %.0f ns, attn_plan_run %.0f ns a call\n", best[0], best[1], best[2]);
    attn_workspace_destroy(workspace);
    attn_plan_destroy(plan);
    return 0;
}
