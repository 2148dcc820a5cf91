"""Ring attention from Python: NumPy arrays of a sharded sequence, over a communicator of mpi4py.

    pip install ./attn-python mpi4py
    RAYON_NUM_THREADS=1 mpirun -n 4 python -m mpi4py attn-mpi/examples/ring.py [tokens]

-m mpi4py ends the job if one rank raises an exception: the others would wait for it.
Each rank holds the queries, keys and values of some positions. Keys and values travel round the ring while a rank
computes with those that it holds; attn.merge joins the parts. A causal mask means positions in the whole sequence.
"""

import sys

import attn
import numpy as np
from mpi4py import MPI


def bounds(length, ranks):
    """Where the shards begin, and the end of the last: lengths that differ by at most one."""
    return [rank * length // ranks for rank in range(ranks + 1)]


def ring_attention(comm, q, k, v, starts):
    """Causal attention over the sequence that the ranks of comm hold together.

    q: (batch, q_heads, n, head_dim), k: (batch, kv_heads, n, head_dim), v: (batch, kv_heads, n, value_dim), float32,
    the positions starts[rank]..starts[rank + 1]. Returns (out, lse) of this rank's queries.
    """
    rank, ranks = comm.Get_rank(), comm.Get_size()
    first, n = starts[rank], starts[rank + 1] - starts[rank]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[2] != n:
            raise ValueError(f"{name} has {x.shape[2]} positions, the shard has {n}")
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    held = [np.ascontiguousarray(k), np.ascontiguousarray(v)]
    parts = []
    for step in range(ranks):
        owner, after = (rank - step) % ranks, (rank - step - 1) % ranks
        requests, arriving = [], []
        if step + 1 < ranks:
            length = starts[after + 1] - starts[after]
            for tag, x in enumerate(held):
                arriving.append(np.empty((*x.shape[:2], length, x.shape[3]), x.dtype))
                requests += [comm.Isend(x, right, tag), comm.Irecv(arriving[-1], left, tag)]
        # The position of this rank's first query among these keys.
        position = first - starts[owner]
        if n and held[0].shape[2] and position + n > 0:
            parts.append(attn.sdpa(q, *held, enable_gqa=True, causal=position, return_lse=True))
        MPI.Request.Waitall(requests)
        held = arriving
    if not parts:  # a rank without queries
        shape = (*q.shape[:3], v.shape[3])
        return np.zeros(shape, np.float32), np.full(shape[:3], -np.inf, np.float32)
    return attn.merge(parts)


def main(comm, length=1000):
    rank, starts = comm.Get_rank(), bounds(length, comm.Get_size())
    random = np.random.default_rng(0)  # the same numbers on every rank
    q, k, v = (random.standard_normal((1, heads, length, 64), np.float32) for heads in (8, 2, 2))
    mine = slice(starts[rank], starts[rank + 1])
    out, _ = ring_attention(comm, q[:, :, mine], k[:, :, mine], v[:, :, mine], starts)
    whole = attn.sdpa(q, k, v, enable_gqa=True, is_causal=True)[:, :, mine]
    error = comm.allreduce(float(np.abs(out - whole).max(initial=0.0)), MPI.MAX)
    if rank == 0:
        print(f"{comm.Get_size()} ranks, {length} tokens: largest difference from one process {error:.1e}")
    return error < 1e-5


if __name__ == "__main__":
    # Any communicator does: a duplicate keeps these messages from meeting the program's own.
    comm = MPI.COMM_WORLD.Dup()
    good = main(comm, int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    comm.Free()
    sys.exit(0 if good else 1)
