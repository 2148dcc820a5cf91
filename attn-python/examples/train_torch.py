"""Trains a small language model twice, with torch's attention and with ours, from the same seed:

    python attn-python/examples/train_torch.py --picture training.svg

It reads a licence letter by letter. The two losses of each step are printed side by side, with the seconds that each
training took; --picture draws both curves and their difference (needs matplotlib).
"""

import argparse
import contextlib
import pathlib
import time

import torch
import torch.nn.functional as F

import attn.torch

TEXT = (pathlib.Path(__file__).parents[1] / "LICENSE-APACHE").read_bytes()
CONTEXT, BATCH, DIM, HEADS, LAYERS = 64, 16, 64, 4, 2


class Block(torch.nn.Module):
    """One layer of a decoder: causal attention, then a perceptron."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(DIM, 4 * DIM), torch.nn.GELU(), torch.nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # torch's function, which `attn.torch.enabled` replaces.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    """Letters in, logits of the next letter out."""

    def __init__(self):
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(256, DIM), torch.nn.Embedding(CONTEXT, DIM)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.logits = torch.nn.Linear(DIM, 256)

    def forward(self, letters):
        return self.logits(self.blocks(self.letters(letters) + self.places.weight))


def train(steps: int, ours: bool) -> tuple[list[float], float]:
    """The loss before each step, and the seconds of all steps."""
    torch.manual_seed(1)
    model, text = Model(), torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    optimiser, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    start = time.perf_counter()
    with attn.torch.enabled(strict=True) if ours else contextlib.nullcontext() as calls:
        for _ in range(steps):
            at = torch.randint(len(text) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
            letters = text[at]
            loss = F.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert not ours or (calls.computed, calls.passed_on) == (LAYERS * steps, 0)
    return losses, time.perf_counter() - start


def draw(theirs: list[float], ours: list[float], path: str) -> None:
    """Both curves, and below their difference."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attn", "savefig.facecolor": "white"})
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 4.6), sharex=True, height_ratios=(3, 1),
                                         layout="constrained")
    top.plot(theirs, color="#c8ccd0", linewidth=5, label="torch's attention")
    top.plot(ours, color="#0b6e99", linewidth=1.4, label="attn")
    top.set_ylabel("loss, nats a letter")
    top.set_ylim(bottom=0)
    top.legend(frameon=False)
    bottom.plot([abs(a - b) for a, b in zip(theirs, ours)], color="#0b6e99", linewidth=1)
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]) if path.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--picture", help="draw the curves to this file, .svg or .png")
    arguments = parser.parse_args()
    (theirs, their_seconds), (ours, our_seconds) = (train(arguments.steps, ours) for ours in (False, True))
    print("| step | torch | attn | difference |\n|---|---|---|---|")
    for step in range(0, arguments.steps, max(1, arguments.steps // 10)):
        a, b = theirs[step], ours[step]
        print(f"| {step} | {a:.5f} | {b:.5f} | {abs(a - b):.1e} |")
    worst = max(abs(a - b) for a, b in zip(theirs, ours))
    print(f"\nlargest difference of {arguments.steps} steps: {worst:.1e}; "
          f"torch {their_seconds:.1f} s, attn {our_seconds:.1f} s")
    if arguments.picture:
        draw(theirs, ours, arguments.picture)


if __name__ == "__main__":
    main()
