"""Tensors of torch: `attn.sdpa` on them, and `attn.torch`'s operators, gradients and `enabled`."""

import doctest
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attn
import attn.torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

F = torch.nn.functional
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def qkv(dtype=torch.float32, *, heads=4, kv_heads=4, q_len=9, kv_len=13, batch=(2,), seed=1):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    return (normal(*batch, heads, q_len, 16), normal(*batch, kv_heads, kv_len, 16), normal(*batch, kv_heads, kv_len, 8))


def exactly(q, k, v, mask=None, **options):
    """torch's function in float64."""
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, **options)


def near(ours, exact, sum_of=1):
    """sum_of: how many numbers of about 1 are added up. Their errors of about 4e-7 have no common sign."""
    assert type(ours) is torch.Tensor and ours.shape == exact.shape
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.double(), exact, atol=max(tolerance, 4e-7 * sum_of ** 0.5), rtol=tolerance)


# The common rows of docs/migrating.md in each number type; test_migrating.py has all rows.

@pytest.mark.parametrize("function", [attn.sdpa, attn.torch.sdpa])
@pytest.mark.parametrize("dtype", TOLERANCE)
class TestMigrating:
    def test_tensors(self, function, dtype):
        q, k, v = qkv(dtype)
        near(function(q, k, v), exactly(q, k, v))
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(function(*turned), function(q, k, v))

    def test_boolean_mask(self, function, dtype):
        q, k, v = qkv(dtype)
        mask = torch.rand(9, 13, generator=torch.Generator().manual_seed(2)) < 0.7
        near(function(q, k, v, mask), exactly(q, k, v, mask))
        near(function(q, k, v, attn_mask=mask.expand(2, 1, 9, 13)), exactly(q, k, v, mask))

    @pytest.mark.parametrize("mask_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_additive_mask(self, function, dtype, mask_dtype):
        q, k, v = qkv(dtype)
        mask = torch.randn(4, 1, 13, generator=torch.Generator().manual_seed(2)).to(mask_dtype)
        mask[2, 0, 4] = -torch.inf
        near(function(q, k, v, mask), exactly(q, k, v, mask))

    def test_is_causal_is_top_left(self, function, dtype):
        q, k, v = qkv(dtype)
        near(function(q, k, v, is_causal=True), exactly(q, k, v, is_causal=True))

    def test_causal_biases(self, function, dtype):
        q, k, v = qkv(dtype)
        for bias, causal in [(causal_lower_right, "bottom_right"), (causal_upper_left, "top_left")]:
            exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), bias(9, 13))
            near(function(q, k, v, causal=causal), exact)

    def test_scale(self, function, dtype):
        q, k, v = qkv(dtype)
        near(function(q, k, v, scale=0.5), exactly(q, k, v, scale=0.5))

    def test_grouped_heads(self, function, dtype):
        q, k, v = qkv(dtype, heads=6, kv_heads=2)
        near(function(q, k, v, enable_gqa=True), exactly(q, k, v, enable_gqa=True))
        with pytest.raises(ValueError, match="query has 6 heads, key has 2"):
            function(q, k, v)

    @pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
    def test_leading_axes(self, function, dtype, batch):
        q, k, v = qkv(dtype, batch=batch)
        near(function(q, k, v, is_causal=True), exactly(q, k, v, is_causal=True))

    def test_lse(self, function, dtype):
        q, k, v = qkv(dtype)
        _, lse = function(q, k, v, return_lse=True)
        want = (q.double() @ k.double().mT / 4).logsumexp(-1)
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), want, atol=1e-5, rtol=1e-5)

    def test_threads_change_no_bit(self, function, dtype):
        q, k, v = qkv(dtype, q_len=200, kv_len=300)
        assert torch.equal(function(q, k, v, threads=1), function(q, k, v))


def test_more_leading_axes():
    q, k, v = qkv(batch=(2, 1, 2, 3))
    mask = torch.rand(2, 1, 1, 3, 1, 9, 13) < 0.8
    near(attn.torch.sdpa(q, k, v, mask), exactly(q, k, v, mask))


def test_double_is_refused():
    q, k, v = (x.double() for x in qkv())
    with pytest.raises(TypeError, match="query is float64"):
        attn.sdpa(q, k, v)


def test_gradients_are_not_lost():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="query requires grad"):
        attn.sdpa(q.requires_grad_(), k, v)
    alibi = torch.zeros(q.shape[1], requires_grad=True)
    with pytest.raises(NotImplementedError, match="the gradient of alibi"):
        attn.torch.sdpa(q, k, v, alibi=alibi, is_causal=True)
    for name in ("scale", "softcap", "temperature"):
        learned = {name: torch.tensor(0.5, requires_grad=True)}
        with pytest.raises(NotImplementedError, match=f"the gradient of {name}"):
            attn.torch.sdpa(q, k, v, **learned)
        with pytest.raises(ValueError, match=f"{name} requires grad"):
            attn.sdpa(q.detach(), k, v, **learned)
        with torch.no_grad():
            assert torch.equal(attn.torch.sdpa(q, k, v, **learned), attn.sdpa(q, k, v, **{name: 0.5}))
    sinks = [torch.tensor(0.1 * head, requires_grad=True) for head in range(q.shape[1])]
    attn.torch.sdpa(q, k, v, sinks=sinks).sum().backward()
    one = torch.tensor([float(sink) for sink in sinks], requires_grad=True)
    attn.torch.sdpa(q, k, v, sinks=one).sum().backward()
    assert torch.equal(torch.stack([sink.grad for sink in sinks]), one.grad) and one.grad.abs().max() > 0
    with torch.no_grad():  # none are recorded, so none are lost
        assert torch.equal(attn.sdpa(q, k, v), attn.sdpa(q.detach(), k, v))


def test_a_write_is_counted():
    """Autograd sees that a tensor that it had saved was overwritten by out=."""
    x = torch.randn(1, 2, 3, 4)
    weight = torch.ones(1, 2, 3, 4, requires_grad=True)
    for write in (lambda saved: attn.sdpa(x, x, x, out=saved), lambda saved: attn.rope(saved, out=saved)):
        saved = torch.zeros(1, 2, 3, 4)
        loss = (saved * weight).sum()
        assert write(saved) is saved
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        attn.sdpa(x, x, x, out=torch.zeros(1, 2, 3, 4))


@pytest.mark.parametrize("sizes", [(9, 13), (1, 13), (9, 1), (4, 9, 13), (2, 1, 9, 13), (2, 4, 1, 13), (1, 1, 1, 1)])
def test_a_learned_mask_has_torchs_gradient(sizes):
    q, k, v = qkv(batch=(2,))
    masks = [torch.linspace(-1, 1, math.prod(sizes)).reshape(sizes).requires_grad_() for _ in range(2)]
    attn.torch.sdpa(q, k, v, masks[0]).square().sum().backward()
    exactly(q, k, v, masks[1]).square().sum().backward()
    near(masks[0].grad, masks[1].grad.double(), sum_of=2 * 4 * 9 * 13 // math.prod(sizes))


def test_a_learned_mask_over_more_leading_axes():
    q, k, v = qkv(batch=(2, 3))
    heads = q.shape[-3]
    masks = [torch.linspace(-1, 1, 3 * heads * 9 * 13).reshape(3, heads, 9, 13).requires_grad_() for _ in range(2)]
    attn.torch.sdpa(q, k, v, masks[0]).square().sum().backward()
    exactly(q, k, v, masks[1]).square().sum().backward()
    near(masks[0].grad, masks[1].grad.double())


def test_gradients_of_gradients_are_refused():
    x = qkv(kv_len=9)[0].requires_grad_()
    gradient, = torch.autograd.grad(attn.torch.sdpa(x, x, x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        gradient.sum().backward()


def test_tensors_without_memory_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(2, 3, 4)
    for tensor in (FakeTensorMode().from_tensor(x), x.to("meta"), x.to_sparse()):
        with pytest.raises(ValueError, match="query"):
            attn.sdpa(tensor, tensor, tensor)


def test_negative_bit_is_refused():
    x = torch.randn(2, 3, 4, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    with pytest.raises(ValueError, match="negative bit"):
        attn.sdpa(x, x, x)


def test_mixed_libraries():
    q, k, v = qkv()
    assert type(attn.sdpa(q.numpy(), k, v)) is np.ndarray
    out = torch.empty(2, 4, 9, 8)
    assert attn.sdpa(q, k.numpy(), v, out=out) is out
    near(out, exactly(q, k, v))


CASES = [
    {}, {"is_causal": True}, {"attn_mask": torch.rand(9, 13) < 0.8}, {"attn_mask": torch.randn(9, 13)},
    {"causal": "bottom_right", "window": [4, -1]}, {"softcap": 3.0}, {"sinks": torch.randn(4)},
    {"kv_lens": torch.tensor([13, 5])}, {"alibi": torch.rand(4)}, {"dropout_p": 0.3, "seed": 5},
]


def scores(q, k, v, *, is_causal=False, attn_mask=None, causal=None, window=None, softcap=None, sinks=None,
           kv_lens=None, alibi=None):
    """Attention by torch's own operations, in the type of q: what gradients are compared with."""
    s = q @ k.mT / q.shape[-1] ** 0.5
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    last = i + k.shape[-2] - q.shape[-2]
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if alibi is not None:
        s = s - alibi[:, None, None] * (last - j).abs()
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(j > i, -torch.inf)
    if causal is not None:
        s = s.masked_fill(j > last, -torch.inf)
    if window is not None:
        s = s.masked_fill(j < last - window[0], -torch.inf)
    if kv_lens is not None:
        s = s.masked_fill(j >= kv_lens[:, None, None, None], -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    p = s.softmax(-1)
    return (p if sinks is None else p[..., :-1]) @ v


@pytest.mark.parametrize("options", CASES[:-1])
def test_gradients_are_torchs(options):
    inputs = [x.requires_grad_() for x in qkv()]
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = options["sinks"].clone().requires_grad_()
        inputs.append(options["sinks"])
    out = attn.torch.sdpa(*inputs[:3], **options)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    options = {name: x.double() if isinstance(x, torch.Tensor) and x.dtype.is_floating_point else x
               for name, x in options.items()}
    if "sinks" in options:
        options["sinks"] = doubles[3]
    exact = scores(*doubles[:3], **options)
    near(out.detach(), exact.detach())
    for ours, theirs in zip(found, torch.autograd.grad(exact, doubles, grad.double())):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


def test_opcheck_of_a_learned_mask():
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.rand(4, 1, 13).requires_grad_()
    torch.library.opcheck(torch.ops.attn.sdpa.default, (q, k, v, mask))
    plain = [x.detach() for x in (q, k, v, mask)]
    out, lse = torch.ops.attn.sdpa(*plain)
    given = (torch.ones_like(out), *plain[:3], out, lse, plain[3])
    torch.library.opcheck(torch.ops.attn.sdpa_backward.default, given, {"return_dmask": True})


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_opcheck(dtype, options):
    q, k, v = (x.requires_grad_() for x in qkv(dtype))
    given = attn._operators.given(options)
    torch.library.opcheck(torch.ops.attn.sdpa.default, (q, k, v, *given))
    plain = [x.detach() for x in (q, k, v)]
    out, lse = torch.ops.attn.sdpa(*plain, *given)
    torch.library.opcheck(torch.ops.attn.sdpa_backward.default, (torch.ones_like(out), *plain, out, lse, *given))


@pytest.mark.parametrize("options", CASES)
def test_compile_keeps_one_graph(options):
    torch._dynamo.reset()

    def loss(q, k, v):
        return (attn.torch.sdpa(q * 2, k, v, **options) ** 2).sum()

    inputs = [x.requires_grad_() for x in qkv()]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want, found = (torch.autograd.grad(f(*inputs), inputs) for f in (loss, compiled))
    for a, b in zip(want, found):
        torch.testing.assert_close(a, b)


def test_what_is_not_a_tensor_is_refused():
    x = torch.ones(1, 2, 3, 4)
    for arguments, text in [((x.numpy(), x, x), "query is ndarray"), ((x, x, [1.0]), "value is list"),
                            ((x, x, x, [[True]]), "attn_mask is list")]:
        with pytest.raises(TypeError, match=text + ", a tensor of torch is wanted"):
            attn.torch.sdpa(*arguments)


def test_options_are_those_of_the_native_function():
    q, k, v = qkv(heads=6, kv_heads=6)
    for options in (dict(alibi=True), dict(alibi=False), dict(kv_starts=[2, 0]), dict(window=[3, None]),
                    dict(causal=3), dict(softcap=2.0, sinks=[0.5] * 6), dict(dropout_p=0.5, seed=2**64 - 1)):
        want, recorded = attn.sdpa(q, k, v, **options), q.clone().requires_grad_()
        assert torch.equal(attn.torch.sdpa(q, k, v, **options), want)
        assert torch.equal(attn.torch.sdpa(recorded, k, v, **options), want)
        torch._dynamo.reset()
        compiled = torch.compile(lambda q: attn.torch.sdpa(q, k, v, **options), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q), want)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 5)])
def test_varlen_is_one_call_for_each_sequence(window):
    torch.manual_seed(4)
    q, k, v = torch.randn(17, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 8)
    q.requires_grad_()
    bounds = torch.tensor([0, 5, 5, 17], dtype=torch.int32), torch.tensor([0, 8, 9, 20], dtype=torch.int32)
    aux = type("AuxRequest", (), {"lse": True})()
    out, lse = attn.torch.varlen_attn(q, k, v, *bounds, 12, 11, window_size=window, enable_gqa=True, return_aux=aux)
    assert out.shape == (17, 4, 8) and lse.shape == (4, 17)
    for (a, b), (c, d) in zip(zip(bounds[0], bounds[0][1:]), zip(bounds[1], bounds[1][1:])):
        if a == b:
            continue
        i, j = torch.arange(b - a)[:, None] + (d - c) - (b - a), torch.arange(d - c)
        left, right = (10**6 if side < 0 else side for side in window)
        seen = (j >= i - left) & (j <= i + right)
        one = [x[at].transpose(0, 1).double() for x, at in ((q, slice(a, b)), (k, slice(c, d)), (v, slice(c, d)))]
        exact = F.scaled_dot_product_attention(*one, seen, enable_gqa=True).transpose(0, 1)
        # A query before the first key sees nothing, and its row is 0.
        exact = torch.where(seen.any(1)[:, None, None], exact, 0)
        near(out[a:b], exact)
    out.sum().backward()
    assert q.grad.shape == q.shape
    with pytest.raises(ValueError, match="query has 4 axes"):
        attn.torch.varlen_attn(q[None], k, v, *bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
                                   torch.float8_e5m2, "int8", "q8_0"], ids=str)
def test_a_cache_of_tensors(dtype):
    """Tokens of bfloat16 go into every format; a cache of numbers takes its own type."""
    number = dtype if dtype in TOLERANCE else torch.bfloat16
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, heads, 20, 32, generator=generator).to(number) for heads in (4, 2, 2))
    cache = attn.Cache(1, 2, 32, pages=2, dtype=dtype)
    assert cache.dtype == str(dtype).removeprefix("torch.")
    out = cache.prefill(q, k, v)
    assert out.dtype == number
    atol = 0.3 if "float8" in cache.dtype else 0.05
    exact = exactly(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out.double(), exact, atol=atol, rtol=0)
    with pytest.raises(TypeError, match="key is float64"):
        cache.append(k.double(), v.double())
    with pytest.raises(ValueError, match="key requires grad"):
        cache.append(k.clone().requires_grad_(), v)


def test_dropout_is_torchs_to_seed():
    x = qkv(kv_len=9)[0]
    torch.manual_seed(1)
    one, other = (attn.torch.sdpa(x, x, x, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(one, attn.torch.sdpa(x, x, x, dropout_p=0.5)) and not torch.equal(one, other)


def test_enabled_replaces_and_restores():
    own = F.scaled_dot_product_attention
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)
    want = layer(x, x, x, need_weights=False)[0]
    with attn.torch.enabled(strict=True) as calls:
        found = layer(x, x, x, need_weights=False)[0]
    assert calls.computed == 1 and F.scaled_dot_product_attention is own
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    q, k, v = (x.double() for x in qkv())
    with attn.torch.enabled() as calls:
        F.scaled_dot_product_attention(q, k, v)
    assert (calls.computed, calls.passed_on) == (0, 1)
    with pytest.raises(TypeError), attn.torch.enabled(strict=True):
        F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is own
    x = torch.ones(1, 2, 3, 4)
    with attn.torch.enabled() as calls:
        assert not F.scaled_dot_product_attention(x, x, x, dropout_p=1.0).any()
    assert (calls.computed, calls.passed_on) == (0, 1)


def test_a_model_learns_the_same():
    """Ten steps of a small encoder, with torch's attention and with ours: the losses are the same."""
    def losses():
        torch.manual_seed(3)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        step, x, y = torch.optim.AdamW(layer.parameters(), 1e-2), torch.randn(4, 12, 32), torch.randn(4, 12, 32)
        found = []
        for _ in range(10):
            loss = F.mse_loss(layer(x), y)
            step.zero_grad()
            loss.backward()
            step.step()
            found.append(loss.item())
        return found

    want = losses()
    with attn.torch.enabled(strict=True) as calls:
        found = losses()
    assert calls.computed == 10 and found[-1] < found[0]
    np.testing.assert_allclose(found, want, rtol=1e-4)


def test_examples_of_docstrings():
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for name in ("sdpa", "enabled", "varlen_attn"):
        for test in finder.find(getattr(attn.torch, name), name):
            assert test.examples and runner.run(test).failed == 0
