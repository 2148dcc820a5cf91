"""`attn.Cache` against the formula in float64 over all tokens."""

import doctest

import numpy as np
import pytest

import attn
from reference import attention

DTYPES = {"float32": 4e-6, "float16": 3e-3}


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.fixture
def tensors():
    rng = np.random.default_rng(1)
    turned = lambda heads, dim: normal(rng, 2, 40, heads, dim).swapaxes(1, 2)
    return turned(8, 64), turned(2, 64), turned(2, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"scale": 0.2, "softcap": 4.0}, {"window": (6, 0)}, {"sinks": np.arange(8.0)},
                                     {"alibi": np.linspace(0, 1, 8)}])
def test_chunks_are_the_whole(tensors, dtype, options):
    q, k, v = (x.astype(dtype) for x in tensors)
    formula = {("slopes" if name == "alibi" else name): x for name, x in options.items()}
    want, want_lse = attention(q, k, v, causal=0, align=0, **formula)
    cache = attn.Cache(2, 2, 64, 32, capacity=40, dtype=dtype)
    at = 0
    for n, prefills in [(9, True), (3, False), (1, False), (1, True), (20, False), (6, True)]:
        part = slice(at, at + n)
        if prefills:
            out, lse = cache.prefill(q[:, :, part], k[:, :, part], v[:, :, part], return_lse=True, **options)
        else:
            cache.append(k[:, :, part], v[:, :, part])
            out, lse = cache.decode(q[:, :, part], return_lse=True, **options)
        assert out.dtype == q.dtype and lse.dtype == np.float32
        np.testing.assert_allclose(out, want[:, :, part], atol=DTYPES[dtype], rtol=DTYPES[dtype])
        np.testing.assert_allclose(lse, want_lse[:, :, part], atol=1e-5, rtol=1e-5)
        at += n
    assert cache.lens == [40, 40]
    with pytest.raises(ValueError):
        cache.append(k[:, :, :1], v[:, :, :1])
    with pytest.raises(ValueError, match="would have 41 tokens, the capacity is 40"):
        cache.prefill(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    assert cache.lens == [40, 40]


@pytest.mark.parametrize("sink_tokens", [0, 3])
def test_a_window_keeps_the_last_tokens(tensors, sink_tokens):
    q, k, v = tensors
    j, i = np.arange(40), np.arange(40)[:, None]
    seen = (j < sink_tokens) | (j > i - 7)
    want, want_lse = attention(q, k, v, causal=0, keep=seen)
    cache = attn.Cache(2, 2, 64, 32, window=7, sink_tokens=sink_tokens)
    assert cache.capacity == 7 + sink_tokens
    at = 0
    for n in (12, 1, 1, 5, 1, 20):
        part = slice(at, at + n)
        given = np.full((2, 8, n, 32), np.nan, np.float32)
        out, lse = cache.prefill(q[:, :, part], k[:, :, part], v[:, :, part], return_lse=True, out=given)
        assert out is given
        np.testing.assert_allclose(out, want[:, :, part], atol=4e-6)
        np.testing.assert_allclose(lse, want_lse[:, :, part], atol=1e-5, rtol=1e-5)
        at += n
    assert cache.lens == [40, 40]
    with pytest.raises(NotImplementedError, match="several queries over a ring cache"):
        cache.decode(q[:, :, :2])


def test_sequences_have_lengths_of_their_own(tensors):
    q, k, v = tensors
    cache = attn.Cache(2, 2, 64, 32, capacity=40)
    cache.append(k[:, :, :10], v[:, :, :10], counts=[10, 4])
    assert cache.lens == [10, 4]
    out = cache.decode(q[:, :, :3], q_lens=[3, 1])
    for b, n, length in [(0, 3, 10), (1, 1, 4)]:
        one = [x[b:b + 1] for x in (q, k, v)]
        want = attention(one[0][:, :, :n], one[1][:, :, :length], one[2][:, :, :length], causal=length - n)[0]
        np.testing.assert_allclose(out[b:b + 1, :, :n], want, atol=4e-6)
    assert (out[1, :, 1:] == 0).all()
    cache.truncate(0, 4)
    assert cache.lens == [4, 4]
    with pytest.raises(ValueError, match="length is 5, at most 4 is allowed"):
        cache.truncate(0, 5)


def test_queries_of_another_type(tensors):
    q, k, v = tensors
    cache = attn.Cache(2, 2, 64, 32, capacity=40, dtype="float16")
    cache.append(k.astype(np.float16), v.astype(np.float16))
    want = attention(q[:, :, :1], k.astype(np.float16), v.astype(np.float16))[0]
    np.testing.assert_allclose(cache.decode(q[:, :, :1]), want, atol=4e-6)


def quantised(x):
    """Numbers as int8 keeps them: the largest of a token has 127."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.rint(x / scale) * scale


def test_int8_is_the_formula_of_what_it_keeps(tensors):
    q, k, v = tensors
    cache = attn.Cache(2, 2, 64, 32, capacity=40, dtype="int8")
    assert cache.nbytes == 2 * 2 * 40 * (64 + 32 + 8) and cache.dtype == "int8"
    want, want_lse = attention(q, quantised(k), quantised(v), causal=0)
    out, lse = cache.prefill(q[:, :, :30], k[:, :, :30], v[:, :, :30], return_lse=True)
    np.testing.assert_allclose(out, want[:, :, :30], atol=1e-5)
    np.testing.assert_allclose(lse, want_lse[:, :, :30], atol=1e-5)
    cache.append(k[:, :, 30:], v[:, :, 30:], counts=[10, 5])
    out = cache.decode(q[:, :, 39:])
    np.testing.assert_allclose(out[:1], want[:1, :, 39:], atol=1e-5)
    one = attention(q[1:, :, 39:], quantised(k)[1:, :, :35], quantised(v)[1:, :, :35])[0]
    np.testing.assert_allclose(out[1:], one, atol=1e-5)
    for arguments, options, error, text in [
        ((k[:, :, :1], v[:, :, :1]), {}, ValueError, r"cached tokens\[0\] is 41, at most 40 is allowed"),
        ((k[:, :, :1], v[:, :, :1]), {"counts": [0, 2]}, ValueError, r"counts\[1\] is 2, at most 1"),
        ((k[:, :, :1], v[:, :, :2]), {"counts": [0, 1]}, ValueError, "new values against the cache and new keys"),
        ((k[:, :1, :1], v[:, :1, :1]), {}, ValueError, "new keys against the cache"),
        ((k.astype(np.float16), v), {}, TypeError, "key is float16, the cache is int8 and takes float32"),
    ]:
        with pytest.raises(error, match=text):
            cache.append(*arguments, **options)
        assert cache.lens == [40, 35]


REFUSED = [
    (dict(), ValueError, "capacity or window"),
    (dict(capacity=4, window=3), ValueError, "one of them is wanted"),
    (dict(window=0), ValueError, "window"),
    (dict(capacity=4, dtype="int4"), ValueError, "dtype is \"int4\""),
    (dict(window=4, dtype="int8"), NotImplementedError, "int8 in a cache with a window"),
    (dict(capacity=2**61), MemoryError, "cannot be allocated"),
    (dict(capacity=2**40), MemoryError, "cannot be allocated"),
    (dict(window=2**64 - 1, sink_tokens=1), ValueError, "too large"),
]


@pytest.mark.parametrize("options, error, text", REFUSED)
def test_a_cache_that_cannot_be(options, error, text):
    with pytest.raises(error, match=text):
        attn.Cache(2, 2, 64, 32, **options)


def test_refusals_append_nothing(tensors):
    q, k, v = (x[:, :, :3] for x in tensors)
    cache = attn.Cache(2, 2, 64, 32, capacity=40)
    ring = attn.Cache(2, 2, 64, 32, window=8)
    for arguments, options, error, text in [
        ((q, k, v), {"softcap": -1.0}, ValueError, "softcap"),
        ((q, k, v), {"causal": "top_left"}, TypeError, "unexpected keyword argument 'causal'"),
        ((q, k, v), {"dropout_p": 0.5}, TypeError, "unexpected keyword argument 'dropout_p'"),
        ((q, k, v), {"sinks": [0.0] * 7}, ValueError, "expected 8, found 7"),
        ((q, k, v), {"out": q[..., :32]}, ValueError, "out shares memory with query"),
        ((q, k, v), {"out": np.empty((2, 8, 3, 31), np.float32)}, ValueError, r"\[2, 8, 3, 32\] is wanted"),
        ((q[:, :, :2], k, v), {}, ValueError, "key has 3 tokens, query has 2"),
        ((q, k[:, :1], v), {}, ValueError, r"key has the shape \[2, 1, 3, 64\], \[2, 2, 3, 64\] is wanted"),
        ((q, k, v[..., :8]), {}, ValueError, r"value has the shape \[2, 2, 3, 8\]"),
        ((q[:1], k, v), {}, ValueError, "batch"),
        ((q[:, :3], k, v), {}, ValueError, "not a multiple of kv_heads"),
        ((q[..., :32], k, v), {}, ValueError, "head_dim"),
        ((q, k.astype(np.float16), v), {}, TypeError, "key is float16, the cache is float32"),
        ((q[0], k, v), {}, ValueError, "query has 3 axes"),
    ]:
        for one in (cache, ring):
            with pytest.raises(error, match=text):
                one.prefill(*arguments, **options)
            assert one.lens == [0, 0]
    with pytest.raises(ValueError):
        cache.decode(q)  # more queries than tokens


def test_examples_of_docstrings():
    for test in doctest.DocTestFinder().find(attn.Cache, "Cache"):
        assert doctest.DocTestRunner().run(test).failed == 0
    assert repr(attn.Cache(1, 2, 8, window=4)).startswith("attn.Cache(1, 2, 8, 8, window=4, sink_tokens=0")
