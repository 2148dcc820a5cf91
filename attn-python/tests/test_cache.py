"""`attn.Cache` against the formula in float64 over all tokens."""

import doctest
import threading

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


def blocks_of_8_bits(x):
    """As ggml's q8_0 keeps them: 32 numbers share a scale of half precision."""
    rows = x.reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    kept = np.rint(rows / np.where(scale == 0, 1, scale))
    return (kept * scale.astype(np.float16).astype(np.float32)).reshape(x.shape)


def blocks_of_4_bits(x):
    """As ggml's q4_0 keeps them: the largest number of 32 becomes -8, in a scale of half precision."""
    rows = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.take_along_axis(rows, np.abs(rows).argmax(-1, keepdims=True), -1)
    scale = largest / np.float32(-8)
    kept = np.minimum(np.floor(rows * (1 / scale) + np.float32(8.5)), 15) - 8
    return (kept * scale.astype(np.float16).astype(np.float32)).reshape(x.shape)


def small_floats(mantissa, smallest, largest):
    """As fp8 keeps them, the largest of a token as the format's largest: spacing by exponent, ties to even."""
    def kept(x):
        scale = np.abs(x).max(-1, keepdims=True) / np.float32(largest)
        y = (x / scale).astype(np.float64)
        exponent = np.maximum(np.frexp(y)[1] - 1, smallest)
        step = 2.0 ** (exponent - mantissa)
        return np.clip(np.rint(y / step) * step, -largest, largest) * scale
    return kept


# What a format keeps of numbers, and the bytes of 64 of them with their scales.
FORMATS = {
    "int8": (quantised, 68), "q8_0": (blocks_of_8_bits, 68), "q4_0": (blocks_of_4_bits, 36),
    "float8_e4m3fn": (small_floats(3, -6, 448), 68), "float8_e5m2": (small_floats(2, -14, 57344), 68),
}
PLACES = [{"capacity": 40}, {"pages": 40, "page_size": 4}, {"pages": 10}, {"window": 40}]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_format_is_the_formula_of_what_it_keeps(tensors, dtype, place):
    q, k, v = tensors
    kept, row = FORMATS[dtype]
    cache = attn.Cache(2, 2, 64, 32, dtype=dtype, **place)
    slots = 2 * 2 * 40 if "pages" not in place else 2 * 160
    own_scale = 0 if dtype[0] == "q" else 4
    assert cache.nbytes == slots * (row + (row - own_scale) // 2 + own_scale) and cache.dtype == dtype
    out, lse = cache.prefill(q[:, :, :30], k[:, :, :30], v[:, :, :30], return_lse=True)
    cache.append(k[:, :, 30:39], v[:, :, 30:39])
    last = cache.prefill(q[:, :, 39:], k[:, :, 39:], v[:, :, 39:])
    whole = np.concatenate([out, last], axis=2)
    asked = np.r_[0:30, 39]
    want, want_lse = attention(q, kept(k), kept(v), causal=0)
    # A number on the edge between two may be rounded the other way: scores of float32 decide.
    close = np.isclose(whole, want[:, :, asked], atol=2e-5, rtol=2e-5)
    assert close.mean() > 0.99
    np.testing.assert_allclose(whole, want[:, :, asked], atol=5e-3)
    np.testing.assert_allclose(lse, want_lse[:, :, :30], atol=5e-3)
    steps = attn.Cache(2, 2, 64, 32, dtype=dtype, **place)
    steps.append(k[:, :, :25], v[:, :, :25])
    for token in range(25, 40):
        steps.append(k[:, :, token:token + 1], v[:, :, token:token + 1])
    np.testing.assert_array_equal(steps.decode(q[:, :, 39:]), last)


def test_a_format_encodes_all_floats(tensors):
    _, k, v = (x[:, :, :5] for x in tensors)
    for dtype in FORMATS:
        caches = [attn.Cache(2, 2, 64, 32, capacity=5, dtype=dtype) for _ in range(2)]
        halves = [x.astype(np.float16) for x in (k, v)]
        caches[0].append(*halves)
        caches[1].append(*(x.astype(np.float32) for x in halves))
        outs = [cache.decode(np.ones((2, 4, 1, 64), np.float32)) for cache in caches]
        np.testing.assert_array_equal(*outs)


def test_dtypes_are_taken_by_their_names():
    for dtype in (np.float16, np.dtype("float16"), "float16"):
        assert attn.Cache(1, 1, 8, capacity=1, dtype=dtype).dtype == "float16"
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert attn.Cache(1, 1, 8, capacity=1, dtype=ml_dtypes.float8_e4m3fn).dtype == "float8_e4m3fn"
    assert attn.Cache(1, 1, 8, capacity=1, dtype=ml_dtypes.bfloat16).dtype == "bfloat16"


def test_rows_of_int8(tensors):
    q, k, v = tensors
    cache = attn.Cache(2, 2, 64, 32, capacity=40, dtype="int8")
    want, _ = attention(q, quantised(k), quantised(v), causal=0)
    cache.append(k[:, :, :30], v[:, :, :30])
    cache.append(k[:, :, 30:], v[:, :, 30:], counts=[10, 5])
    out = cache.decode(q[:, :, 39:])
    np.testing.assert_allclose(out[:1], want[:1, :, 39:], atol=1e-5)
    one = attention(q[1:, :, 39:], quantised(k)[1:, :, :35], quantised(v)[1:, :, :35])[0]
    np.testing.assert_allclose(out[1:], one, atol=1e-5)


@pytest.mark.parametrize("place", PLACES[:3], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int8", "q8_0"])
def test_appends_that_are_refused(tensors, dtype, place):
    _, k, v = tensors
    cache = attn.Cache(2, 2, 64, 32, dtype=dtype, **place)
    cache.append(k[:, :, :30], v[:, :, :30], counts=[30, 25])
    free, many = cache.free_pages, np.repeat(k, 4, 2)
    for arguments, options, error, text in [
        ((many, many[..., :32]), {}, ValueError, "sequence 0 would have 190 tokens, the capacity is 40|pages"),
        ((k[:, :, :1], v[:, :, :1]), {"counts": [0, 2]}, ValueError, r"counts\[1\] is 2, at most 1"),
        ((k[:, :, :1], v[:, :, :1]), {"counts": [1]}, ValueError, "counts: expected 2, found 1"),
        ((k[:, :, :1], v[:, :, :2]), {"counts": [0, 1]}, ValueError, r"value has the shape \[2, 2, 2, 32\]"),
        ((k[:, :1, :1], v[:, :1, :1]), {}, ValueError, r"key has the shape \[2, 1, 1, 64\], \[2, 2, 1, 64\]"),
        ((k[:1, :, :1], v[:1, :, :1]), {}, ValueError, r"key has the shape \[1, 2, 1, 64\]"),
        ((k[..., :32], v), {}, ValueError, "key has the shape"),
        ((k.astype(np.float64), v), {}, TypeError, "key is float64, the cache is"),
        ((k[:, :, :1], v[:, :, :1].astype(np.float16)), {}, TypeError, "value is float16"),
        ((k[0], v[0]), {}, ValueError, "key has 3 axes"),
        ((k.tolist(), v), {}, TypeError, "key is list"),
    ]:
        with pytest.raises(error, match=text):
            cache.append(*arguments, **options)
        assert cache.lens == [30, 25] and cache.free_pages == free


def test_pages_are_taken_and_given_back(tensors):
    q, k, v = tensors
    cache = attn.Cache(2, 2, 64, 32, pages=12, page_size=4)
    assert (cache.capacity, cache.free_pages, cache.block_table) == (48, 12, [[], []])
    cache.append(k[:, :, :9], v[:, :, :9], counts=[9, 4])
    assert [len(row) for row in cache.block_table] == [3, 1] and cache.free_pages == 8
    cache.truncate(0, 5)
    assert [len(row) for row in cache.block_table] == [2, 1] and cache.free_pages == 9
    cache.append(k[:, :, 5:29], v[:, :, 5:29], counts=[24, 0])  # grows the table, over pages that were given back
    assert [len(row) for row in cache.block_table] == [8, 1] and cache.free_pages == 3
    pages = sum(cache.block_table, [])
    assert len(set(pages)) == len(pages) and set(pages) <= set(range(12))
    cache.append(k[:, :, 4:16], v[:, :, 4:16], counts=[0, 12])
    out = cache.decode(q[:, :, 28:29])
    for b, length in enumerate([29, 16]):
        want = attention(q[b:b + 1, :, 28:29], k[b:b + 1, :, :length], v[b:b + 1, :, :length])[0]
        np.testing.assert_allclose(out[b:b + 1], want, atol=4e-6)
    with pytest.raises(ValueError, match="the new tokens need 2 pages, 0 are free"):
        cache.prefill(q[:, :, :4], k[:, :, :4], v[:, :, :4])
    assert (cache.lens, cache.free_pages) == ([29, 16], 0)
    cache.truncate(0, 0)
    assert cache.free_pages == 8
    with pytest.raises(ValueError, match="softcap"):
        cache.prefill(q[:, :, :4], k[:, :, :4], v[:, :, :4], softcap=-1.0)
    assert (cache.lens, cache.free_pages) == ([0, 16], 8)  # pages of a refused call are free again
    assert repr(cache).startswith("attn.Cache(2, 2, 64, 32, pages=12, page_size=4, dtype=\"float32\")")


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "q8_0"])
def test_pages_are_slots(tensors, dtype, page_size):
    """The same bits, wherever the tokens are."""
    number = dtype if dtype.startswith("float") else "float32"
    q, k, v = (x.astype(number) for x in tensors)
    slots = attn.Cache(2, 2, 64, 32, capacity=40, dtype=dtype)
    pages = attn.Cache(2, 2, 64, 32, pages=80, page_size=page_size, dtype=dtype)
    at = 0
    for n in (7, 1, 13, 19):
        part = slice(at, at + n)
        outs = [cache.prefill(q[:, :, part], k[:, :, part], v[:, :, part]) for cache in (slots, pages)]
        np.testing.assert_array_equal(*outs)
        at += n


def test_nothing_is_valid():
    none = np.ones((2, 2, 0, 64), np.float32)
    for place in PLACES:
        for dtype in ("float32", *FORMATS):
            cache = attn.Cache(2, 2, 64, dtype=dtype, **place)
            cache.append(none, none)
            assert cache.prefill(none, none, none).shape == (2, 2, 0, 64)
            assert cache.lens == [0, 0]
            flat = attn.Cache(2, 2, 0, dtype=dtype, **place)
            flat.append(none[..., :0].repeat(3, 2), none[..., :0].repeat(3, 2))
            assert flat.prefill(*[np.ones((2, 2, 1, 0), np.float32)] * 3).shape == (2, 2, 1, 0)
            empty = attn.Cache(0, 2, 64, dtype=dtype, **place)
            assert empty.lens == [] and empty.prefill(none[:0], none[:0], none[:0]).shape == (0, 2, 0, 64)


def test_memory_is_taken_when_tokens_come():
    """A large cache does not end the process: the system gives zeros where tokens are written."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = attn.Cache(1, 8, 128, capacity=2**19, dtype="float16")
    x = np.ones((1, 8, 1, 128), np.float16)
    cache.append(x, x)
    assert cache.nbytes == 2**31 and cache.decode(x).shape == (1, 8, 1, 128)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB on Linux


def test_one_thread_writes():
    """A second writer is refused, whatever the interpreter; readers compute at the same time."""
    x = normal(np.random.default_rng(3), 1, 2, 1, 64)
    cache, errors = attn.Cache(1, 2, 64, pages=400, page_size=8), []

    def work():
        for _ in range(300):
            try:
                cache.append(x, x)
                cache.decode(x)
            except RuntimeError as error:  # "Already borrowed"
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all("borrowed" in str(error) for error in errors)
    assert 0 < cache.lens[0] <= 1200 and len(cache.block_table[0]) == -(-cache.lens[0] // 8)


REFUSED = [
    (dict(), ValueError, "capacity, window or pages"),
    (dict(capacity=4, window=3), ValueError, "one of capacity, window and pages is wanted"),
    (dict(window=0), ValueError, "window"),
    (dict(capacity=4, dtype="int4"), ValueError, "dtype is \"int4\""),
    (dict(capacity=4, sink_tokens=1), ValueError, "sink_tokens is given without window"),
    (dict(capacity=4, page_size=1), ValueError, "page_size is given without pages"),
    (dict(pages=4, page_size=0), ValueError, "page_size is 0, at least 1"),
    (dict(pages=2**40), ValueError, "pages is 1099511627776, at most 2147483647"),
    (dict(pages=4, window=4), ValueError, "one of capacity, window and pages is wanted"),
    (dict(capacity=4, dtype=np.float64), ValueError, "dtype is \"float64\""),
    (dict(capacity=4, dtype=7), ValueError, "dtype is \"7\""),
    (dict(batch=2**40, kv_heads=0, capacity=1), ValueError, "batch is 1099511627776, at most 16777216 is allowed"),
    (dict(batch=2**40, kv_heads=0, pages=1), ValueError, "batch is 1099511627776"),
    (dict(pages=4, page_size=2**60), MemoryError, "cannot be allocated"),
    (dict(capacity=-1), ValueError, "capacity is -1, at least 0 is allowed"),
    (dict(capacity=1.5), TypeError, "capacity is float, an integer is wanted"),
    (dict(batch="2", capacity=1), TypeError, "batch is str, an integer is wanted"),
    (dict(capacity=4, value_dim=40, dtype="q8_0"), ValueError, "value_dim is 40; a multiple of 32 is wanted for q8_0"),
    (dict(capacity=2**61), MemoryError, "cannot be allocated"),
    (dict(capacity=2**40), MemoryError, "cannot be allocated"),
    (dict(window=2**64 - 1, sink_tokens=1), ValueError, "window is 18446744073709551615, at most 9223372036854775807"),
]


@pytest.mark.parametrize("options, error, text", REFUSED)
def test_a_cache_that_cannot_be(options, error, text):
    with pytest.raises(error, match=text):
        attn.Cache(**{"batch": 2, "kv_heads": 2, "head_dim": 64, "value_dim": 32, **options})


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
    text = "query has 3 tokens for sequence 0, of which the cache has 0; their keys are appended before"
    with pytest.raises(ValueError, match=text):
        cache.decode(q)
    for arguments, error, text in [((2, 0), ValueError, "sequence is 2, below 2 is allowed"),
                                   ((-1, 0), ValueError, "sequence is -1, at least 0"),
                                   ((0, -1), ValueError, "length is -1, at least 0"),
                                   ((0, 1), ValueError, "length is 1, at most 0")]:
        with pytest.raises(error, match=text):
            cache.truncate(*arguments)


def test_examples_of_docstrings():
    for test in doctest.DocTestFinder().find(attn.Cache, "Cache"):
        assert doctest.DocTestRunner().run(test).failed == 0
    assert repr(attn.Cache(1, 2, 8, window=4)).startswith("attn.Cache(1, 2, 8, 8, window=4, sink_tokens=0")
