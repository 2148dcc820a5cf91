/* Decoding over the ranks of an MPI job from C: each rank holds some keys, one all-gather brings the states together.
 *
 *     mpicc ranks.c $(pkg-config --cflags --libs attn) -lm && mpirun -n 4 ./a.out
 *
 * Every rank compares the result with a call of its own over all keys: bit for bit, because each shard has 1024
 * keys (it must be 512 times a power of two), and neighbours are merged in a tree.
 */
#include <attn.h>
#include <limits.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 2, Q_HEADS = 8, KV_HEADS = 2, Q_LEN = 3, KEYS_OF_A_RANK = 1024, DIM = 64, VALUE_DIM = 32 };

/* An error on one rank ends the job: the others would wait for its message. */
static void check(AttnStatus status) {
    if (status == ATTN_STATUS_OK) return;
    fprintf(stderr, "attn: status %d: %s\n", (int)status, attn_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static float *numbers(size_t count, unsigned seed) {
    float *x = malloc((count ? count : 1) * sizeof *x);
    if (!x) MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (1 << 22) - 2.0f;
    }
    return x;
}

/* The keys of one rank, of a tensor that holds those of all. */
static AttnTensor shard(const AttnTensor *all, size_t first) {
    AttnTensor part = *all;
    part.shape[2] = KEYS_OF_A_RANK;
    part.offset += first * (size_t)part.strides[2];
    return part;
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    size_t kv_len = (size_t)ranks * KEYS_OF_A_RANK, first = (size_t)rank * KEYS_OF_A_RANK;
    size_t heads = (size_t)BATCH * KV_HEADS * kv_len, rows = (size_t)BATCH * Q_HEADS * Q_LEN;

    /* Here every rank makes all keys, to compare; a program has only its shard. */
    float *q = numbers(rows * DIM, 1), *k = numbers(heads * DIM, 2), *v = numbers(heads * VALUE_DIM, 3);
    float *out = numbers(rows * VALUE_DIM, 4), *alone = numbers(rows * VALUE_DIM, 5);
    AttnTensor tq, tk, tv, to, ta;
    check(attn_tensor_contiguous(&tq, q, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, Q_HEADS, Q_LEN, DIM));
    check(attn_tensor_contiguous(&tk, k, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, KV_HEADS, kv_len, DIM));
    check(attn_tensor_contiguous(&tv, v, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, KV_HEADS, kv_len, VALUE_DIM));
    check(attn_tensor_contiguous(&to, out, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, Q_HEADS, Q_LEN, VALUE_DIM));
    check(attn_tensor_contiguous(&ta, alone, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, BATCH, Q_HEADS, Q_LEN, VALUE_DIM));

    /* A plan of the whole call: masks mean positions among all keys. */
    AttnOptions options = {.struct_size = sizeof options, .causal = ATTN_ALIGN_BOTTOM_RIGHT, .reproducible = 1};
    AttnShape shape = {sizeof shape, BATCH, Q_HEADS, KV_HEADS, Q_LEN, kv_len, DIM, VALUE_DIM};
    AttnPlan *plan;
    size_t len;
    check(attn_plan_create(&options, &shape, &plan));
    check(attn_plan_state_len(plan, &len));
    if (len > INT_MAX) MPI_Abort(MPI_COMM_WORLD, 1); /* counts of MPI are int: send in pieces */

    float *mine = numbers(len, 6), *all = numbers(len * (size_t)ranks, 7);
    AttnTensor my_k = shard(&tk, first), my_v = shard(&tv, first);
    check(attn_plan_state(plan, NULL, first, &tq, &my_k, &my_v, mine, len));
    MPI_Allgather(mine, (int)len, MPI_FLOAT, all, (int)len, MPI_FLOAT, MPI_COMM_WORLD);
    for (int span = 1; span < ranks; span *= 2)
        for (int at = 0; at + span < ranks; at += 2 * span)
            check(attn_merge_states(all + (size_t)at * len, all + (size_t)(at + span) * len, len, VALUE_DIM));
    check(attn_plan_finish(plan, all, len, &to, NULL, 0));

    check(attn_plan_run(plan, NULL, &tq, &tk, &tv, &ta, NULL, 0));
    int equal = memcmp(out, alone, rows * VALUE_DIM * sizeof *out) == 0, everywhere;
    MPI_Allreduce(&equal, &everywhere, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d ranks, %zu keys: bits %s those of one process\n", ranks, kv_len, everywhere ? "are" : "ARE NOT");

    attn_plan_destroy(plan);
    free(q), free(k), free(v), free(out), free(alone), free(mine), free(all);
    MPI_Finalize();
    return everywhere ? 0 : 1;
}
