"""Every row for torch in docs/migrating.md as a test, and random calls against torch in float64.

`ATTN_RANDOM_CALLS=5000 pytest …` makes more of the latter.
"""

import os
import pathlib
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attn
import attn.torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

F = torch.nn.functional
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"
CALLS = int(os.environ.get("ATTN_RANDOM_CALLS", 1000))


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exactly(q, k, v, mask=None, **options):
    """torch's function in float64."""
    if isinstance(mask, torch.Tensor) and mask.dtype != torch.bool and type(mask) is torch.Tensor:
        mask = mask.double()
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, **options)


def near(ours, exact, tolerance=4e-6):
    assert type(ours) is torch.Tensor
    torch.testing.assert_close(ours.detach().double(), exact.detach(), atol=tolerance, rtol=tolerance)


Q, K, V = normal(2, 4, 9, 16), normal(2, 4, 13, 16, seed=2), normal(2, 4, 13, 8, seed=3)
BOTH = (attn.sdpa, attn.torch.sdpa)


def tensors():
    for dtype, tolerance in [(torch.float32, 4e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]:
        given = [x.transpose(1, 2).contiguous().transpose(1, 2).to(dtype) for x in (Q, K, V)]
        for function in BOTH:
            assert function(*given).dtype == dtype
            near(function(*given), exactly(*given), tolerance)


def boolean_mask():
    mask = normal(9, 13) < 0.5
    for function in BOTH:
        near(function(Q, K, V, attn_mask=mask), exactly(Q, K, V, mask))


def added_mask():
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        mask = normal(4, 1, 13).to(dtype)
        for function in BOTH:
            near(function(Q, K, V, attn_mask=mask), exactly(Q, K, V, mask))


def is_causal():
    for function in BOTH:
        near(function(Q, K, V, is_causal=True), exactly(Q, K, V, is_causal=True))


def lower_right():
    for function in BOTH:
        near(function(Q, K, V, causal="bottom_right"), exactly(Q, K, V, causal_lower_right(9, 13)))


def upper_left():
    for function in BOTH:
        near(function(Q, K, V, causal="top_left"), exactly(Q, K, V, causal_upper_left(9, 13)))


def scale():
    for function in BOTH:
        near(function(Q, K, V), exactly(Q, K, V, scale=16 ** -0.5))
        near(function(Q, K, V, scale=0.3), exactly(Q, K, V, scale=0.3))


def dropout():
    """The numbers are not torch's, their distribution is: the mean of many draws is the output without dropout."""
    with pytest.raises(ValueError, match="without seed"):
        attn.sdpa(Q, K, V, dropout_p=0.3)
    draws = torch.stack([attn.sdpa(Q, K, V, dropout_p=0.3, seed=seed) for seed in range(800)])
    error = draws.mean(0) - attn.sdpa(Q, K, V)
    assert (error.abs() < 6 * draws.std(0) / 800 ** 0.5 + 1e-6).all()
    assert attn.torch.sdpa(Q, K, V, dropout_p=0.3).shape == (2, 4, 9, 8)


def grouped_heads():
    k, v = K[:, :2], V[:, :2]
    for function in BOTH:
        near(function(Q, k, v, enable_gqa=True), exactly(Q, k, v, enable_gqa=True))


def leading_axes():
    for lead in [(), (3,), (2, 3)]:
        q, k, v = normal(*lead, 9, 16), normal(*lead, 13, 16, seed=2), normal(*lead, 13, 8, seed=3)
        for function in BOTH:
            near(function(q, k, v), exactly(q, k, v))
    q, k, v = (x.expand(2, 3, 5, *x.shape[1:]) for x in (Q[:1], K[:1], V[:1]))
    near(attn.torch.sdpa(q, k, v), exactly(q, k, v))
    with pytest.raises(ValueError, match="query has 6 axes, at most 5"):
        attn.sdpa(q, k, v)


def double():
    for function in BOTH:
        with pytest.raises(TypeError, match="query is float64"):
            function(Q.double(), K.double(), V.double())
    with attn.torch.enabled() as calls:
        F.scaled_dot_product_attention(Q.double(), K.double(), V.double())
    assert calls.passed_on == 1  # torch computes it


def levels():
    for level in attn.levels():
        near(attn.sdpa(Q, K, V, level=level), exactly(Q, K, V), 8e-6)
        assert attn.explain(Q, K, V, level=level)[:4] == level[:4]


def gradients():
    ours, theirs = ([x.clone().requires_grad_() for x in (Q, K, V, normal(9, 13))] for _ in range(2))
    attn.torch.sdpa(*ours).square().sum().backward()
    exactly(*theirs).square().sum().backward()
    for x, y in zip(ours, theirs):
        near(x.grad, y.grad.double(), 4e-5)


def threads():
    q = normal(1, 4, 300, 64)
    assert torch.equal(attn.sdpa(q, q, q, threads=1), attn.sdpa(q, q, q))


def module(**options):
    torch.manual_seed(5)
    return torch.nn.MultiheadAttention(32, 4, batch_first=True, **options)


def same_layer(layer, *arguments, dtype=torch.float32, **options):
    """A layer of torch with its own attention and with ours."""
    want = layer(*arguments, need_weights=False, **options)[0]
    with attn.torch.enabled(strict=True) as calls:
        found = layer(*arguments, need_weights=False, **options)[0]
    assert calls.computed == 1
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


X = normal(2, 9, 32)


def in_proj():
    same_layer(module(), X, X, X)


def padding():
    same_layer(module(), X, X, X, key_padding_mask=torch.arange(9) >= torch.tensor([[9], [5]]))


def hiding_mask():
    hidden = normal(9, 9) > 0.5
    hidden[:, 0] = False
    same_layer(module(), X, X, X, attn_mask=hidden)


def averaged_weights():
    layer = module()
    _, want = layer(X, X, X)
    q, k, v = F.linear(X, layer.in_proj_weight, layer.in_proj_bias).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    weights = attn.weights(q.detach(), k.detach(), v.detach())
    torch.testing.assert_close(weights.mean(1), want.detach(), atol=1e-6, rtol=1e-5)


def sequence_first():
    layer = torch.nn.MultiheadAttention(32, 4)
    same_layer(layer, *[X.transpose(0, 1)] * 3)


def layer_sizes():
    layer = module()
    assert (layer.embed_dim, layer.num_heads) == (32, 4)
    same_layer(layer, X, X, X)


def layer_causal():
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9)
    same_layer(module(), X, X, X, attn_mask=mask, is_causal=True)


def bias_kv():
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        same_layer(module(**options), X, X, X)


def other_dims():
    same_layer(module(kdim=20, vdim=24), X, normal(2, 7, 20), normal(2, 7, 24))


def packed():
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    q = normal(9, 4, 16)
    out = attn.torch.varlen_attn(q, q, q, bounds, bounds, 5, 5, window_size=(-1, 0))
    for a, b in ((0, 4), (4, 9)):
        one = q[a:b].transpose(0, 1)
        near(out[a:b].transpose(0, 1), exactly(one, one, one, is_causal=True))


def largest_lengths():
    bounds, q = torch.tensor([0, 4, 9]), normal(9, 4, 16)
    assert torch.equal(attn.torch.varlen_attn(q, q, q, bounds, bounds),
                       attn.torch.varlen_attn(q, q, q, bounds, bounds, 5, 5))


def score_mod():
    with pytest.raises(TypeError, match="unexpected keyword argument 'score_mod'"):
        attn.sdpa(Q, K, V, score_mod=lambda score, *_: score)  # for Rust and C: it is compiled in


def block_mask():
    blocks = normal(3, 4) < 0.7
    whole = blocks.repeat_interleave(3, 0).repeat_interleave(4, 1)[:9, :13]
    near(attn.sdpa(Q, K, V, block_mask=(blocks, 3, 4)), exactly(Q, K, V, whole))


def logsumexp():
    for function in BOTH:
        _, lse = function(Q, K, V, return_lse=True)
        near(lse, (Q.double() @ K.double().mT / 4).logsumexp(-1), 1e-5)


def ranks():
    """As attn-mpi/examples/ring.py, whose ranks hold keys 0..5, 5..6 and 6..13; the query at 0 sees no key of some."""
    q = normal(2, 4, 13, 16)
    parts = []
    for start, end in [(0, 5), (5, 6), (6, 13)]:
        keys = slice(start, end)
        parts.append(attn.sdpa(q, K[:, :, keys], V[:, :, keys], causal=-start, return_lse=True))
    near(attn.merge(parts)[0], exactly(q, K, V, is_causal=True))


ROWS = {
    "torch.distributed.tensor.experimental.context_parallel": ranks,
    "query, key, value": tensors, "attn_mask, bool (True attends)": boolean_mask,
    "attn_mask, float (added)": added_mask,
    "is_causal=True": is_causal, "attn.bias.causal_lower_right": lower_right, "attn.bias.causal_upper_left": upper_left,
    "scale=None": scale, "dropout_p": dropout, "enable_gqa=True": grouped_heads,
    "leading axes of any number": leading_axes, "double": double, "torch.nn.attention.sdpa_kernel(…)": levels,
    "gradients": gradients, "torch.set_num_threads": threads,
    "in_proj_weight, in_proj_bias, out_proj": in_proj, "key_padding_mask (True hides)": padding,
    "attn_mask, bool (True hides: not as in SDPA!)": hiding_mask,
    "need_weights, average_attn_weights": averaged_weights, "batch_first=False": sequence_first,
    "embed_dim, num_heads": layer_sizes, "dropout, is_causal": layer_causal, "add_bias_kv, add_zero_attn": bias_kv,
    "kdim, vdim, weights that are not packed": other_dims,
    "varlen_attn(…, cu_seq_q, cu_seq_k, …)": packed, "max_q, max_k": largest_lengths,
    "flex_attention(score_mod)": score_mod, "flex_attention(block_mask), mask_mod": block_mask,
    "scale, enable_gqa": grouped_heads, "return_lse=True": logsumexp,
}


def rows_of_the_page():
    section = PAGE.read_text().split("## PyTorch")[1].split("\n## ")[0]
    lines = [line.replace("\\|", "/") for line in section.splitlines() if line.startswith("| ")]
    first = [line.split("|")[1].strip().replace("`", "") for line in lines]
    return [row for row in first if row not in ("torch", "torch.nn.MultiheadAttention", "torch.nn.attention")]


def test_the_page_has_no_row_without_a_test():
    assert sorted(rows_of_the_page()) == sorted(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row(row):
    ROWS[row]()


def random_call(seed):
    """Tensors and options of torch's function, with strides, types and sizes as they come."""
    rng = np.random.default_rng(seed)
    pick = lambda *of: of[int(rng.integers(len(of)))]
    maybe = lambda p: rng.random() < p
    dtype = pick(torch.float32, torch.float32, torch.float16, torch.bfloat16)
    lead, kv_heads, group = pick((), (1,), (3,), (2, 2)), pick(1, 2, 3), pick(1, 1, 2, 4)
    q_len, kv_len = pick(1, 1, 2, 5, 16, 33, 65, 130), pick(1, 3, 16, 64, 65, 200)
    dim, value_dim = pick(1, 3, 8, 32, 64, 80), pick(1, 8, 32, 65)

    def tensor(heads, length, dim):
        x = torch.from_numpy(rng.standard_normal((*lead, heads, length, dim), np.float32)).to(dtype)
        way = rng.integers(4)
        if way == 1:
            x = x.mT.contiguous().mT
        elif way == 2:
            x = x.transpose(-2, -3).contiguous().transpose(-2, -3)
        elif way == 3:
            x = torch.cat([x, x], -1)[..., ::2].clone() if dim == 1 else torch.stack([x, x], -1)[..., 0]
        return x

    q, k, v = tensor(kv_heads * group, q_len, dim), tensor(kv_heads, kv_len, dim), tensor(kv_heads, kv_len, value_dim)
    options = {"enable_gqa": True} if group > 1 else {}
    if maybe(0.3):
        options["scale"] = float(rng.uniform(0.01, 1))
    if maybe(0.3):
        options["is_causal"] = True
    elif maybe(0.6):
        heads = pick((), (1,), (kv_heads * group,))
        shape = (*heads, pick(1, q_len), kv_len)
        mask = torch.from_numpy(rng.standard_normal(shape, np.float32))
        options["attn_mask"] = mask < 0.8 if maybe(0.5) else mask.to(pick(dtype, torch.float32, torch.float64))
    return (q, k, v), options


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("first", range(0, CALLS, 50))
def test_random_calls_are_torchs_in_float64(first):
    for seed in range(first, min(first + 50, CALLS)):
        (q, k, v), options = random_call(seed)
        wide = {name: x.double() if isinstance(x, torch.Tensor) and x.dtype != torch.bool else x
                for name, x in options.items()}
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **wide)
        want = want.nan_to_num()  # rows that see nothing are 0 here
        for function in BOTH:
            found = function(q, k, v, **options)
            assert found.dtype == q.dtype and found.shape == want.shape
            # attn-core's promise of "exact", 6u(2 + S)·|v|, and the rounding of the output to its type.
            scale = options.get("scale", q.shape[-1] ** -0.5)
            group = q.shape[-3] // k.shape[-3]
            largest = (q.double().abs() @ k.double().abs().repeat_interleave(group, -3).mT).max() * scale
            mask = options.get("attn_mask")
            if mask is not None and mask.dtype != torch.bool:
                largest = largest + mask.abs().max()
            half = {torch.float32: 0, torch.float16: 2.0 ** -11, torch.bfloat16: 2.0 ** -8}[q.dtype]
            bound = (6 * 2.0 ** -24 * (2 + largest) + half) * max(1, v.abs().max())
            worst = (found.double() - want).abs().max()
            assert worst <= bound, f"seed {seed}: {worst} > {bound} in {function.__name__}, {options}"


def flash(q, k, v, scale, **options):
    """torch's flash kernel, by channels of 0."""
    q, k, wide = (F.pad(x, (0, max(q.shape[-1], v.shape[-1]) - x.shape[-1])) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, wide, scale=scale, **options)[..., :v.shape[-1]]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("first", range(0, CALLS, 50))
def test_random_gradients_err_as_torchs_do(first):
    """Against float64: a largest error of at most four times that of torch's float32 and 2⁻¹⁸ of the largest number,
    and in the middle of fifty calls a smaller root of the mean square. A gradient that is 0 by cancellation shows
    rounding alone, and is left out. Without a mask torch runs its flash kernel, which recomputes weights from the
    log-sum-exp as we do; it wants dims that are equal."""
    ratios = []
    for seed in range(first, min(first + 50, CALLS)):
        rng = np.random.default_rng(seed)
        some = lambda *shape: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        batch, kv_heads, group = rng.integers(1, [3, 4, 4]).tolist()
        rows, keys, dim, value_dim = rng.integers(1, [90, 130, 80, 80]).tolist()
        heads = kv_heads * group
        q, k = some(batch, heads, rows, dim), some(batch, kv_heads, keys, dim)
        v = some(batch, kv_heads, keys, value_dim) + 3 * rng.integers(0, 2)
        dy = some(batch, heads, rows, value_dim)
        options = dict(scale=[dim ** -0.5, 0.3, 1.0][rng.integers(3)], enable_gqa=True, is_causal=bool(rng.integers(2)))
        mask = None
        if not options["is_causal"] and rng.integers(2):
            mask = some(*(size if keep else 1 for size, keep in zip((batch, heads, rows, keys), rng.integers(0, 2, 4))))

        def gradients(function, dtype):
            given = [x.to(dtype).clone().requires_grad_() for x in (q, k, v, *([] if mask is None else [mask]))]
            function(*given, **options).backward(dy.to(dtype))
            return [x.grad.double() for x in given]

        exact = gradients(F.scaled_dot_product_attention, torch.float64)
        theirs = gradients(F.scaled_dot_product_attention if mask is not None else flash, torch.float32)
        for x, y, want in zip(gradients(attn.torch.sdpa, torch.float32), theirs, exact):
            size = want.abs().max().item()
            if size > 1e-6:
                (ours, rms), (worst, their_rms) = (((g - want).abs().max(), (g - want).norm()) for g in (x, y))
                assert ours <= 4 * worst + 2.0**-18 * size, seed
                ratios.append((rms / their_rms).item())
    assert np.nanmedian(ratios) < 1  # where both are exact there is none
