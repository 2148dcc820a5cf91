"""Random calls: gradients by any of q, k, v, a mask and sinks are those that torch's autograd gives of the formula in
float64. All options that `attn.torch.sdpa` has but `precision` and `reproducible`, in any strides, of three types.

`ATTN_RANDOM_CALLS=10000 pytest …` makes more of them.
"""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attn
import attn.torch

CALLS = int(os.environ.get("ATTN_RANDOM_CALLS", 1000))


# Half a unit of the last place of each type.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def call(seed):
    """q, k, v, dy, mask or None, sinks or None; the options; and what they mean: the keys that each query sees, what
    ALiBi adds, a mask of bools or None."""
    rng = np.random.default_rng(seed)
    maybe = lambda share: rng.random() < share
    numbers = lambda *shape: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    dtype = rng.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])

    def some(*shape):
        """In one of three orders of memory, with gaps or without."""
        x = numbers(*shape).to(dtype)
        if maybe(0.3):
            x = torch.stack([x, x], -1)[..., 0]
        turn = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)][rng.integers(3)]
        back = sorted(range(4), key=turn.__getitem__)
        return x if maybe(0.3) else x.permute(turn).contiguous().permute(back)

    batch, kv_heads, group = rng.integers(1, [4, 4, 4]).tolist()
    rows, keys, dim, value_dim = rng.integers(1, [90, 130, 80, 80]).tolist()
    documents = maybe(0.2)
    batch = 1 if documents else batch
    heads = kv_heads * group
    q, k, v = some(batch, heads, rows, dim), some(batch, kv_heads, keys, dim), some(batch, kv_heads, keys, value_dim)
    options = {"enable_gqa": group > 1, "scale": rng.uniform(0.02, 0.4)}
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    seen = torch.ones(batch, 1, rows, keys, dtype=torch.bool)
    first, last = torch.zeros_like(i), torch.full_like(i, keys)  # the keys of each query's document
    from_row, rows_there = torch.zeros_like(i), torch.full_like(i, rows)
    if documents:
        count = int(rng.integers(1, 5))
        of_rows, of_keys = ([0, *np.sort(rng.integers(0, n + 1, count - 1)).tolist(), n] for n in (rows, keys))
        options.update(cu_seqlens_q=of_rows, cu_seqlens_k=of_keys)
        for n in range(count):
            here = slice(of_rows[n], of_rows[n + 1])
            first[here], last[here] = of_keys[n], of_keys[n + 1]
            from_row[here], rows_there[here] = of_rows[n], of_rows[n + 1] - of_rows[n]
        seen = seen & (j >= first) & (j < last)
    # Where a row is among the keys: aligned at the bottom right unless `causal` says something else.
    at = i - from_row + first + (last - first) - rows_there
    if maybe(0.4):
        options["causal"], at = [("top_left", i - from_row + first), ("bottom_right", at)][rng.integers(2)]
        if not documents and maybe(0.3):
            options["causal"], at = keys // 2, i + keys // 2
        seen = seen & (j <= at)
    if maybe(0.3):
        left, right = rng.integers(0, 40, 2).tolist()
        options["window"] = (left, right)
        seen = seen & (j >= at - left) & (j <= at + right)
    if not documents:
        if maybe(0.3):
            options["kv_lens"] = rng.integers(0, keys + 1, batch).tolist()
            seen = seen & (j < torch.tensor(options["kv_lens"])[:, None, None, None])
        if maybe(0.2):
            options["kv_starts"] = rng.integers(0, keys + 1, batch).tolist()
            seen = seen & (j >= torch.tensor(options["kv_starts"])[:, None, None, None])
        if maybe(0.3):
            options["q_lens"] = rng.integers(0, rows + 1, batch).tolist()
            seen = seen & (i < torch.tensor(options["q_lens"])[:, None, None, None])
    if maybe(0.3):
        options["softcap"] = rng.uniform(1, 20)
    if maybe(0.3):
        options["temperature"] = rng.uniform(0.5, 3)
    slopes = torch.zeros(heads)
    if not documents and maybe(0.3):
        slopes = numbers(heads).abs() / 16
        options["alibi"] = slopes
    added = -slopes.double()[:, None, None] * (at - j).abs()
    if maybe(0.3):
        options.update(dropout_p=float(np.float32(rng.uniform(0.1, 0.7))), seed=int(rng.integers(2**62)))
    mask, kept = None, None
    if maybe(0.6):
        mask = numbers(*(size if kept else 1 for size, kept in zip((batch, heads, rows, keys), rng.integers(0, 2, 4))))
        if maybe(0.4):
            mask, kept = None, mask < 0.8
            seen = seen & kept
    sinks = numbers(heads) * 2 if maybe(0.4) else None
    return [q, k, v, some(batch, heads, rows, value_dim), mask, sinks], options, (seen, added, kept)


def formula(q, k, v, mask, sinks, kept, options, seen, added):
    """Output, weights, the sinks' weights, and scores, in float64. `kept` is what dropout multiplies weights by."""
    group = q.shape[1] // k.shape[1]
    score = q @ k.repeat_interleave(group, 1).mT * options["scale"]
    if "softcap" in options:
        score = options["softcap"] * torch.tanh(score / options["softcap"])
    score = score + added
    if mask is not None:
        score = score + mask
    score = score / options.get("temperature", 1.0)
    score = torch.where(seen, score, -torch.inf)
    sink = torch.full((*score.shape[:3], 1), -torch.inf, dtype=torch.float64)
    if sinks is not None:
        sink = sinks[:, None, None].expand(sink.shape)
    all_of_row = torch.cat([score, sink], -1)
    nothing = (all_of_row == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(torch.where(nothing, 0.0, all_of_row), -1) * ~nothing
    own, sink = weights[..., :-1], weights[..., -1]
    return (own * kept) @ v.repeat_interleave(group, 1), own, sink, score


def summed(x, like):
    """Over the axes that were broadcast, or over the heads of a group."""
    if x.shape[1] != like.shape[1] and like.shape[1] > 1:
        x = x.unflatten(1, (like.shape[1], -1)).sum(2)
    return x.sum_to_size(like.shape)


def terms(q, k, v, dy, mask, sinks, weights, sink, kept, options):
    """The sums of the sizes of the terms of each gradient; those of an output are its weights times `|v|`."""
    group = q.shape[1] // k.shape[1]
    q, k_wide, v_wide, dy = (x.abs() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), dy))
    delta = (dy * ((weights * kept) @ v_wide)).sum(-1, keepdim=True)
    by_score = weights * (kept * (dy @ v_wide.mT) + delta) / options.get("temperature", 1.0)
    by_product = by_score * options["scale"]
    found = [by_product @ k_wide, summed(by_product.mT @ q, k), summed((weights * kept).mT @ dy, v)]
    if mask is not None:
        found.append(summed(by_score, mask))
    if sinks is not None:
        found.append((sink * delta[..., 0]).sum((0, 2)))
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("first", range(0, CALLS, 50))
def test_gradients_are_those_of_the_formula(first):
    for seed in range(first, min(first + 50, CALLS)):
        check(seed)


def check(seed):
    (q, k, v, dy, mask, sinks), options, (seen, added, bools) = call(seed)
    learned = [x.clone().requires_grad_() for x in (q, k, v, mask, sinks) if x is not None]
    given = iter(learned[3:])
    tensors = dict(attn_mask=bools if mask is None else next(given), sinks=None if sinks is None else next(given))
    attn.torch.sdpa(*learned[:3], **tensors, **options).backward(dy)

    kept = torch.ones(1)
    if "seed" in options:
        # Weights of a call whose scores are all equal: none underflows, so that each zero is a dropped one.
        zero = torch.zeros_like(q)
        drawn = {name: options[name] for name in ("enable_gqa", "dropout_p", "seed")}
        kept = (attn.weights(zero, k, v, **drawn) > 0).double() / (1 - options["dropout_p"])
    exact = [x.detach().double().requires_grad_() for x in learned]
    given = iter(exact[3:])
    more = [None if x is None else next(given) for x in (mask, sinks)]
    out, weights, sink, score = formula(*exact[:3], *more, kept, options, seen, added)
    out.backward(dy.double())

    with torch.no_grad():
        sizes = terms(*exact[:3], dy.double(), *more, weights, sink, kept, options)
        # The bound of a row's scores: the sizes of their terms.
        wide = exact[1].abs().repeat_interleave(q.shape[1] // k.shape[1], 1)
        largest = exact[0].abs() @ wide.mT * options["scale"] - added
        largest = (largest if mask is None else largest + more[0].abs()) / options.get("temperature", 1.0)
        bound = torch.where(score > -torch.inf, largest, 0).max().item()
        if sinks is not None:
            bound = max(bound, sinks.abs().max().item())
        eta = 6 * 2.0**-24 * (2 + bound)  # that of Precision::Exact for gradients
        # A half output is rounded, and so is a half gradient; f16 has no numbers between multiples of 2⁻²⁴.
        half = ROUNDING[q.dtype] if q.dtype != torch.float32 else 0.0
        least = 2.0**-20 if q.dtype == torch.float16 else 1e-30
        for name, x, y, size in zip(["q", "k", "v", "mask or sinks", "sinks"], learned, exact, sizes):
            off = ((x.grad.double() - y.grad).abs() - (eta + half) * size - half * y.grad.abs()).max().item()
            assert off <= least, f"seed {seed}: the gradient by {name} is off by {off} more, {options}"
