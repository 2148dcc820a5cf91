"""Trains the model of `cargo xtask demo train` by torch: the same first weights, the same pieces of text, AdamW.

    python train_torch.py BEGINNING.safetensors LOSSES.safetensors STEPS

The sizes are those of src/train/model.rs, the optimiser's constants those of src/train/optimiser.rs.
"""

import sys
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 4, 2, 32, 1e-5


def rope_tables(context):
    inverse = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def logits(w, ids, cos, sin):
    batch, seq = ids.shape
    norm = lambda x, name: F.rms_norm(x, (x.shape[-1],), w[name], EPS)
    x = F.embedding(ids, w["words"])
    for n in range(LAYERS):
        y = norm(x, f"{n}.norm")
        heads = lambda name, count: F.linear(y, w[f"{n}.{name}"]).view(batch, seq, count, HEAD_DIM).transpose(1, 2)
        q, k = rotate(heads("q", Q_HEADS), cos, sin), rotate(heads("k", KV_HEADS), cos, sin)
        a = F.scaled_dot_product_attention(q, k, heads("v", KV_HEADS), is_causal=True, enable_gqa=True)
        x = x + F.linear(a.transpose(1, 2).reshape(batch, seq, -1), w[f"{n}.out"])
        y = norm(x, f"{n}.inner_norm")
        x = x + F.linear(F.silu(F.linear(y, w[f"{n}.gate"])) * F.linear(y, w[f"{n}.up"]), w[f"{n}.down"])
    return F.linear(norm(x, "norm"), w["words"])


def main():
    beginning, out, steps = load_file(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    w = {name[len("weight."):]: x.requires_grad_() for name, x in beginning.items() if name.startswith("weight.")}
    ids, starts = beginning["ids"].long(), beginning["starts"].long()
    context = int(beginning["context"][0])
    cos, sin = rope_tables(context)
    optimiser = torch.optim.AdamW(w.values(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    losses, times = [], []
    for step in range(min(steps, len(starts))):
        begin = time.perf_counter()
        at = starts[step][:, None] + torch.arange(context)
        loss = F.cross_entropy(logits(w, ids[at], cos, sin).flatten(0, 1), ids[at + 1].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
        print(f"\rtorch: step {step + 1} of {steps}, loss {losses[-1]:.4f}", end="", file=sys.stderr)
    print(file=sys.stderr)
    save_file({"losses": torch.tensor(losses), "times": torch.tensor(times)}, out)


if __name__ == "__main__":
    main()
