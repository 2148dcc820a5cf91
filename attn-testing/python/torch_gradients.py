"""How far torch's gradients of attention are from f64: writes the table that `tolerance/torch_gradients.rs` reads.

    python3 attn-testing/python/torch_gradients.py > attn-testing/src/tolerance/torch_gradients.txt

The inputs are those of `attn_testing::gradients`: numbers of SplitMix64 by the same seeds, so that the kernels are
measured on the same calls. The measure is eta: an error divided by the sum of the sizes of what a gradient adds up.
"""

import platform
import sys

import numpy as np
import torch

LENGTHS, GROUPS, DIM = [32, 128, 512, 1024, 4096], [1, 2], 64
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def numbers(seed, shape, coarse):
    """`gradients::Call::new`'s: of variance 1, and for halves multiples of 1/64, which all types hold."""
    count = np.arange(1, np.prod(shape) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + count * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    x = ((x >> np.uint64(11)).astype(np.float64) / float(1 << 52) - 1.0) * 1.7320508
    x = np.floor(x * 64.0 + 0.5) / 64.0 if coarse else x.astype(np.float32)
    return torch.from_numpy(x.astype(np.float64)).reshape(shape)


def exact(q, k, v, dy, causal):
    """Gradients in f64 and the sizes of their terms, a head at a time."""
    heads, n, dim = q.shape
    group, scale = heads // k.shape[0], dim**-0.5
    found = [torch.zeros_like(x) for x in (q, k, v, q, k, v)]
    dq, dk, dv, dq_size, dk_size, dv_size = found
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1) if causal else None
    for head in range(heads):
        kv = head // group
        scores = q[head] @ k[kv].T * scale
        if causal:
            scores.masked_fill_(hidden, -torch.inf)
        p = torch.softmax(scores, dim=-1)
        out = p @ v[kv]
        delta = (dy[head] * out).sum(-1, keepdim=True)
        ds = p * (dy[head] @ v[kv].T - delta) * scale
        size = p * (dy[head].abs() @ v[kv].abs().T + (dy[head] * out).abs().sum(-1, keepdim=True)) * scale
        dq[head], dq_size[head] = ds @ k[kv], size @ k[kv].abs()
        dk[kv] += ds.T @ q[head]
        dk_size[kv] += size.T @ q[head].abs()
        dv[kv] += p.T @ dy[head]
        dv_size[kv] += p.T @ dy[head].abs()
    return found[:3], found[3:]


def by_torch(tensors, dtype, causal):
    q, k, v, dy = [x.to(dtype)[None] for x in tensors]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=grouped)
    return [x[0].double() for x in torch.autograd.grad(out, leaves, dy)]


def main():
    torch.set_num_threads(1)
    print(f"# torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {platform.machine()};")
    print("# python3 attn-testing/python/torch_gradients.py > attn-testing/src/tolerance/torch_gradients.txt")
    print("# type len causal q_heads kv_heads; of dq, dk, dv: the largest eta, and the root of the mean of its square")
    for n in LENGTHS:
        for causal in (0, 1):
            for group in GROUPS:
                # Short calls have many heads: one key that few queries see would be most of the mean of one head.
                kv_heads = max(1, 1024 // n)
                q_heads = kv_heads * group
                answers = {}
                for name, dtype in DTYPES.items():
                    coarse = name != "f32"
                    sizes = [q_heads, kv_heads, kv_heads, q_heads]
                    tensors = [numbers(1000 * i + n, (heads, n, DIM), coarse) for i, heads in enumerate(sizes)]
                    if coarse not in answers:
                        answers[coarse] = exact(*tensors, causal)
                    want, terms = answers[coarse]
                    cells = []
                    for found, want, size in zip(by_torch(tensors, dtype, bool(causal)), want, terms):
                        eta = (found - want).abs() / (size + 1e-30)  # of a number 0, no term is left
                        cells += [f"{eta.max():.3e}", f"{eta.square().mean().sqrt():.3e}"]
                    print(name, n, causal, q_heads, kv_heads, *cells)
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
