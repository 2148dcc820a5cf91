"""`attn.sdpa` and its relatives on NumPy arrays, against the formula in float64."""

import array
import doctest
import inspect
import threading

import numpy as np
import pytest

import attn
from attn import _attn
from reference import attention


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def case(seed):
    """A random call: arrays, our options, and the formula's."""
    rng = np.random.default_rng(seed)
    batch, kv_heads, group = (int(rng.integers(1, n)) for n in (3, 3, 4))
    q_len, kv_len = (int(rng.choice([1, 2, 17, 33, 64, 100])) for _ in range(2))
    dim, value_dim = (int(rng.choice([1, 8, 20, 64])) for _ in range(2))
    q = normal(rng, batch, q_len, kv_heads * group, dim).swapaxes(1, 2)  # strided
    k = normal(rng, batch, kv_heads, kv_len * 2, dim)[:, :, ::2]
    v = normal(rng, batch, kv_heads, kv_len, value_dim)[:, :, ::-1]
    options, formula = {"enable_gqa": True}, {}
    offset = {"top_left": 0, "bottom_right": kv_len - q_len, 3: 3}
    causal = rng.choice(np.array([None, "top_left", "bottom_right", 3], object))
    align = offset["bottom_right" if causal is None else causal]
    formula["align"] = align
    if causal is not None:
        options["causal"], formula["causal"] = causal, align
    if rng.random() < 0.3:
        options["window"] = formula["window"] = (int(rng.integers(0, 30)), int(rng.integers(0, 30)))
    if rng.random() < 0.3:
        options["scale"] = formula["scale"] = 0.3
    if rng.random() < 0.3:
        options["softcap"] = formula["softcap"] = 2.0
    if rng.random() < 0.3:
        options["sinks"] = formula["sinks"] = normal(rng, kv_heads * group)
    if rng.random() < 0.3:
        options["alibi"] = formula["slopes"] = np.abs(normal(rng, kv_heads * group))
    if rng.random() < 0.3:
        options["kv_lens"] = formula["kv_lens"] = rng.integers(0, kv_len + 1, batch)
    shape = [(kv_len,), (q_len, kv_len), (kv_heads * group, q_len, 1), (batch, 1, q_len, kv_len)][seed % 4]
    mask = rng.random()
    if mask < 0.3:
        options["attn_mask"] = formula["keep"] = rng.random(shape) < 0.7
    elif mask < 0.6:
        options["attn_mask"] = formula["bias"] = normal(rng, *shape)
    if rng.random() < 0.3:
        options["kv_starts"] = starts = rng.integers(0, kv_len + 1, batch)
        keep_also(formula, np.arange(kv_len) >= starts[:, None, None, None])
    if rng.random() < 0.3:
        rows, keys = (int(rng.integers(1, 40)) for _ in range(2))
        lead = [(), (kv_heads * group,), (batch, 1)][seed % 3]
        blocks = rng.random((*lead, -(-q_len // rows), -(-kv_len // keys))) < 0.6
        options["block_mask"] = (blocks, rows, keys)
        whole = np.repeat(np.repeat(blocks, rows, axis=-2)[..., :q_len, :], keys, axis=-1)[..., :kv_len]
        keep_also(formula, whole)
    return (q, k, v), options, formula


def keep_also(formula, keep):
    formula["keep"] = formula.get("keep", True) & keep


def rounding(q, k, v, scale):
    """What attn-core promises of "exact", for the largest row and value: 6u(2 + S)·|v|."""
    q, k = np.abs(q), np.repeat(np.abs(k), q.shape[1] // k.shape[1], axis=1)
    largest = (q @ k.swapaxes(2, 3)).max() * (q.shape[3] ** -0.5 if scale is None else scale)
    return 6 * 2.0 ** -24 * (2 + largest) * max(1, np.abs(v).max())


@pytest.mark.parametrize("seed", range(120))
def test_random_calls_are_the_formula(seed):
    (q, k, v), options, formula = case(seed)
    out, lse = attn.sdpa(q, k, v, return_lse=True, **options)
    want, want_lse = attention(q, k, v, **formula)
    assert type(out) is np.ndarray and out.dtype == np.float32 and lse.dtype == np.float32
    bound = rounding(q, k, v, options.get("scale"))
    np.testing.assert_allclose(out, want, atol=bound, rtol=0)
    np.testing.assert_allclose(lse, want_lse, atol=bound, rtol=1e-6)
    halves = attn.sdpa(*(x.astype(np.float16) for x in (q, k, v)), **options)
    assert halves.dtype == np.float16
    np.testing.assert_allclose(halves, want, atol=1e-2, rtol=1e-2)
    given = np.full(want.shape[:1] + (want.shape[2], want.shape[1], want.shape[3]), np.nan, np.float32).swapaxes(1, 2)
    assert attn.sdpa(q, k, v, out=given, threads=1, **options) is given
    np.testing.assert_array_equal(given, out)


def test_every_level_computes():
    (q, k, v), options, formula = case(5)
    for level in attn.levels():
        out = attn.sdpa(q, k, v, level=level, **options)
        np.testing.assert_allclose(out, attention(q, k, v, **formula)[0], atol=6e-6, rtol=1e-5)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (1, 2, 3), (2, 1, 3), (0, 2, 3), (2, 0, 3)])
def test_leading_axes_are_a_batch(lead):
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, *lead, 7, 8), normal(rng, *lead, 9, 8), normal(rng, *lead, 9, 5)
    flat = lambda x: x.reshape(-1 if x.size else 0, 1, *x.shape[-2:])
    for mask in [None, normal(rng, 7, 9), rng.random((*lead, 7, 9)) < 0.5, rng.random((*lead[-1:], 1, 9)) < 0.5]:
        whole = None if mask is None else np.broadcast_to(mask, (*lead, 7, 9)).reshape(-1 if q.size else 0, 1, 7, 9)
        options = {} if mask is None else {"keep" if mask.dtype == bool else "bias": whole}
        want, want_lse = attention(flat(q), flat(k), flat(v), **options)
        out, lse = attn.sdpa(q, k, v, mask, return_lse=True)
        assert out.shape == (*lead, 7, 5) and lse.shape == (*lead, 7)
        np.testing.assert_allclose(out, want.reshape(out.shape), atol=4e-6)
        np.testing.assert_allclose(lse, want_lse.reshape(lse.shape), atol=4e-6)


@pytest.mark.parametrize("mask_lead", [(2, 3), (2, 1), (1, 3), (1, 1)])
def test_five_axes_need_no_common_stride(mask_lead):
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, 3, 2, 4, n, 8).swapaxes(0, 1) for n in (7, 9, 9))
    mask = rng.random((*mask_lead, 1, 7, 9)) < 0.7
    lens = [9, 1, 2, 3, 0, 5]
    out, lse = attn.sdpa(q, k, v, mask, kv_lens=lens, return_lse=True)
    dense = lambda x: x.reshape(6, *x.shape[2:])
    want, want_lse = attention(*map(dense, (q, k, v)), kv_lens=lens,
                               keep=dense(np.broadcast_to(mask, (2, 3, 1, 7, 9))))
    np.testing.assert_allclose(dense(out), want, atol=4e-6)
    np.testing.assert_allclose(dense(lse), want_lse, atol=4e-6)
    blocks = (mask[..., ::7, ::9], 7, 9)
    one, whole = (attn.sdpa(q, k, v, **{name: x}) for name, x in
                  (('block_mask', blocks), ('attn_mask', np.broadcast_to(blocks[0], mask.shape))))
    np.testing.assert_allclose(one, whole, atol=1e-6)
    weights = attn.weights(q, k, v, mask, kv_lens=lens)
    np.testing.assert_allclose(weights @ v, out, atol=4e-6)
    grad = normal(rng, *out.shape)
    for ours, theirs in zip(attn.sdpa_backward(grad, q, k, v, out, lse, mask, kv_lens=lens),
                            attn.sdpa_backward(*map(dense, (grad, q, k, v, out, lse)),
                                               dense(np.broadcast_to(mask, (2, 3, 1, 7, 9))), kv_lens=lens)):
        np.testing.assert_array_equal(dense(ours), theirs)


def test_packed_sequences_stay_apart():
    rng = np.random.default_rng(3)
    q, k, v = normal(rng, 1, 2, 10, 8), normal(rng, 1, 2, 12, 8), normal(rng, 1, 2, 12, 8)
    out = attn.sdpa(q, k, v, cu_seqlens_q=np.array([0, 4, 10]), cu_seqlens_k=[0, 5, 12], causal="bottom_right",
                    window=(3, None))
    for (a, b), (c, d) in [((0, 4), (0, 5)), ((4, 10), (5, 12))]:
        one = attn.sdpa(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal="bottom_right", window=(3, -1))
        np.testing.assert_allclose(out[:, :, a:b], one, atol=2e-6)


def test_dropout_follows_its_seed():
    x = normal(np.random.default_rng(4), 1, 2, 50, 16)
    one, again, other = (attn.sdpa(x, x, x, dropout_p=0.5, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    weights = attn.weights(x, x, x, dropout_p=0.5, seed=1)
    assert 0.4 < (weights == 0).mean() < 0.6
    np.testing.assert_allclose(weights @ x, one, atol=4e-6, rtol=4e-6)


def test_dropout_does_not_depend_on_strides():
    """Five axes that do not fold are several calls, which would drop the same weights."""
    x = normal(np.random.default_rng(4), 3, 2, 2, 7, 8)
    turned = x.swapaxes(0, 1).copy().swapaxes(0, 1)
    out, lse = attn.sdpa(x, x, x, dropout_p=0.5, seed=1, return_lse=True)
    assert (out[0] != out[1]).any()
    for call in (lambda: attn.sdpa(turned, turned, turned, dropout_p=0.5, seed=1),
                 lambda: attn.sdpa_backward(out, turned, turned, turned, out, lse, dropout_p=0.5, seed=1)):
        with pytest.raises(NotImplementedError, match="leading axes whose strides do not make one"):
            call()


def test_other_producers_are_read():
    rng = np.random.default_rng(5)
    x = normal(rng, 3, 4, 8)
    want = attn.sdpa(x, x, x)

    class Exporter:
        """Knows DLPack's method alone, without versions."""
        def __dlpack__(self):
            return x.__dlpack__()

    np.testing.assert_array_equal(attn.sdpa(Exporter(), Exporter(), x), want)
    np.testing.assert_array_equal(attn.sdpa(memoryview(x), memoryview(x), memoryview(x)), want)
    frozen = x.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(attn.sdpa(frozen, frozen, frozen), want)
    flat = memoryview(array.array("f", x.ravel())).cast("B").cast("f", x.shape)
    np.testing.assert_array_equal(attn.sdpa(flat, flat, flat), want)


def test_bfloat16_of_ml_dtypes():
    bf16 = pytest.importorskip("ml_dtypes").bfloat16
    x = normal(np.random.default_rng(8), 2, 9, 16).astype(bf16)
    wide = x.astype(np.float32)
    mask = normal(np.random.default_rng(9), 9, 9).astype(bf16)
    given = np.empty_like(x)
    assert attn.sdpa(x, x, x, mask, out=given) is given
    want = attn.sdpa(wide, wide, wide, mask.astype(np.float32))
    np.testing.assert_allclose(given.astype(np.float32), want, atol=2e-2)
    assert attn.sdpa(x, x, x, mask).dtype == bf16


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    x = normal(np.random.default_rng(8), 2, 9, 16)
    ours = jax.numpy.asarray(x)
    out, lse = attn.sdpa(ours, ours, ours, return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_array_equal(out, attn.sdpa(x, x, x))
    halves = ours.astype(jax.numpy.bfloat16)
    assert attn.sdpa(halves, halves, halves).dtype == jax.numpy.bfloat16
    for call in (lambda: attn.sdpa(ours, ours, ours, out=ours), lambda: attn.rope(ours, out=ours)):
        with pytest.raises(TypeError, match="out must be an array of NumPy"):
            call()  # its arrays never change
    cache = attn.Cache(1, 2, 16, capacity=9)
    assert isinstance(cache.prefill(ours[None], ours[None], ours[None]), jax.Array)


def test_bytes_of_a_boolean_mask_may_be_anything():
    x = normal(np.random.default_rng(6), 1, 2, 4)
    bytes_ = np.array([[0, 2], [255, 1]], np.uint8).view(bool)
    want = attn.sdpa(x, x, x, np.array([[False, True], [True, True]]))
    np.testing.assert_array_equal(attn.sdpa(x, x, x, bytes_), want)


def test_backward_is_the_difference_quotient():
    rng = np.random.default_rng(7)
    q, k, v = (normal(rng, 2, 4, 9, 8) for _ in range(3))
    k, v, sinks = k[:, :2], v[:, :2], normal(rng, 4)
    options = dict(enable_gqa=True, causal="top_left", softcap=3.0, attn_mask=normal(rng, 9, 9))
    out, lse = attn.sdpa(q, k, v, return_lse=True, sinks=sinks, **options)
    grad = normal(rng, *out.shape)
    gradients = attn.sdpa_backward(grad, q, k, v, out, lse, sinks=sinks, return_dmask=True, **options)

    def loss(q, k, v, sinks, mask):
        return (attention(q, k, v, causal=0, softcap=3.0, bias=mask, sinks=sinks)[0] * grad).sum()

    inputs = [x.astype(np.float64) for x in (q, k, v, sinks, options["attn_mask"])]
    assert len(gradients) == len(inputs)
    assert type(gradients[3]) is np.ndarray and gradients[3].shape == (4,) and gradients[3].dtype == np.float32
    strided = np.stack([lse, lse], -1)[..., 1]
    again = attn.sdpa_backward(grad, q, k, v, out, strided, sinks=sinks, return_dmask=True, **options)
    assert all((x == y).all() for x, y in zip(gradients, again, strict=True))
    for at, (x, gradient) in enumerate(zip(inputs, gradients)):
        way, step = rng.standard_normal(x.shape), 1e-5
        ends = [loss(*(y + sign * step * way if n == at else y for n, y in enumerate(inputs))) for sign in (1, -1)]
        assert abs((ends[0] - ends[1]) / (2 * step) - (np.asarray(gradient) * way).sum()) < 1e-3


def test_the_gradient_of_a_mask_is_asked_for_with_one():
    x = normal(np.random.default_rng(8), 2, 5, 4)
    out, lse = attn.sdpa(x, x, x, return_lse=True)
    for mask in (None, np.ones((5, 5), bool)):
        with pytest.raises(TypeError, match="return_dmask: attn_mask must be given, and of numbers"):
            attn.sdpa_backward(x, x, x, x, out, lse, mask, return_dmask=True)


def test_threads_call_at_once():
    (q, k, v), options, _ = case(11)
    want, found = attn.sdpa(q, k, v, **options), [None] * 8

    def work(n):
        for _ in range(50):
            found[n] = attn.sdpa(q, k, v, **options)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for out in found:
        np.testing.assert_array_equal(out, want)


def test_integers_of_numpy_and_lists():
    x = normal(np.random.default_rng(1), 1, 2, 5, 8)
    same = np.testing.assert_array_equal
    same(attn.sdpa(x, x, x, causal=np.int64(1), threads=np.int32(1)), attn.sdpa(x, x, x, causal=1))
    same(attn.sdpa(x, x, x, window=[2, None]), attn.sdpa(x, x, x, window=(2, None)))
    # A training hands its seed to the evaluation, too.
    same(attn.sdpa(x, x, x, dropout_p=0.0, seed=3), attn.sdpa(x, x, x))


X = np.ones((1, 4, 5, 8), np.float32)
REFUSED = [
    ((X, X[..., :4], X), {}, ValueError, "k head_dim against q head_dim: expected 8, found 4"),
    ((X, X, X[:, :, :3]), {}, ValueError, "v kv_len against k kv_len: expected 5, found 3"),
    ((X, X[:, :2], X[:, :2]), {}, ValueError, "query has 4 heads, key has 2"),
    ((X, X[:, :3], X[:, :3]), {"enable_gqa": True}, ValueError, "q_heads is 4, which is not a multiple"),
    ((X, X[0], X[0]), {}, ValueError, "key has 3 axes, query has 4"),
    ((np.repeat(X, 2, 0), X, X), {}, ValueError, r"key has the shape \[1, 4, 5, 8\], query \[2, 4, 5, 8\]"),
    ((X.astype(np.float64),) * 3, {}, TypeError, "query is float64; float32, float16 and bfloat16"),
    ((X, X.astype(np.float16), X), {}, TypeError, "key is float16, query is float32"),
    ((X.astype(np.int32),) * 3, {}, TypeError, "query is int32"),
    ((X.tolist(), X, X), {}, TypeError, "query is list"),
    ((X[0, 0, 0],) * 3, {}, ValueError, "query has 1 axes, 2 to 5"),
    ((X[None, None],) * 3, {}, ValueError, "query has 6 axes, at most 5"),
    ((np.ma.masked_array(X), X, X), {}, TypeError, "whose mask would be lost"),
    ((X.astype(">f4"),) * 3, {}, ValueError, "query: "),
    ((X, X, X, np.ones((5, 4), bool)), {}, ValueError,
     r"attn_mask has the shape \[5, 4\], which does not broadcast to \[1, 4, 5, 5\]"),
    ((X, X, X, np.ones((5, 5), np.int64)), {}, TypeError,
     "attn_mask is int64; bool, float64, float32, float16 and bfloat16 are supported"),
    ((X, X, X), {"causal": True}, TypeError, "causal is bool; .* or an offset is wanted"),
    ((X, X, X), {"causal": "middle"}, ValueError, "causal is \"middle\"; \"top_left\""),
    ((X, X, X), {"causal": "top_left", "is_causal": True}, ValueError, "both given"),
    ((X, X, X), {"window": 3}, TypeError, "window is 3"),
    ((X, X, X), {"window": (-2, 0)}, ValueError, "at least -1"),
    ((X, X, X), {"softcap": -1.0}, ValueError, "softcap must be finite and above 0"),
    ((X, X, X), {"scale": float("nan")}, ValueError, "scale must be"),
    ((X, X, X), {"sinks": [0.0] * 3}, ValueError, "sinks against q_heads: expected 4, found 3"),
    ((X, X, X), {"sinks": X}, TypeError, "sinks must be numbers along one axis"),
    ((X, X, X), {"alibi": [0.5]}, ValueError, "alibi slopes against q_heads: expected 4, found 1"),
    ((X, X, X), {"kv_lens": [6]}, ValueError, r"kv_lens\[0\] is 6, at most 5 is allowed"),
    ((X, X, X), {"kv_lens": [-1]}, ValueError, r"kv_lens\[0\] is -1, at least 0 is allowed"),
    ((X, X, X), {"kv_lens": [1, 2]}, ValueError, "kv_lens: expected 1, found 2"),
    ((X, X, X), {"kv_lens": [1.5]}, TypeError, "kv_lens must be integers"),
    ((X, X, X), {"cu_seqlens_q": [0, 5]}, ValueError, "given together"),
    ((X, X, X), {"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 6]}, ValueError, "at most 5"),
    ((X, X, X), {"dropout_p": 0.1}, ValueError, "without seed"),
    ((X, X, X), {"dropout_p": 1.5, "seed": 1}, ValueError, "dropout_p is 1.5, at least 0 and below 1 is allowed"),
    ((X, X, X), {"dropout_p": -0.5}, ValueError, "dropout_p is -0.5"),
    ((X, X, X), {"dropout_p": 0.5, "seed": -1}, ValueError, "seed is -1, 0 to"),
    ((X, X, X), {"dropout_p": 0.5, "seed": 0.5}, TypeError, "seed is float, an integer is wanted"),
    ((X, X, X), {"softcap": "a"}, TypeError, "softcap is str, a number is wanted"),
    ((X, X, X), {"return_lse": None}, TypeError, "return_lse is NoneType, a bool is wanted"),
    ((X, X, X), {"reproducible": 1}, TypeError, "reproducible is int, a bool is wanted"),
    ((X, X, X), {"level": 5}, TypeError, "level is int, a str is wanted"),
    ((X, X, X), {"threads": "a"}, TypeError, "threads is str, an integer is wanted"),
    ((X, X, X), {"causal": 10**30}, ValueError, "causal is 10{30}, at most"),
    ((X.astype(np.complex64), X, X), {}, TypeError, "query is complex64; float32, float16 and bfloat16 are supported"),
    ((X, X, X), {"precision": "best"}, ValueError, "precision is"),
    ((X, X, X), {"threads": 0}, ValueError, "threads is 0"),
    ((X, X, X), {"level": "sse9"}, ValueError, "level"),
    ((X, X, X), {"score_mod": X}, TypeError, "unexpected keyword argument 'score_mod'"),
    ((X, X, X), {"block_mask": X}, TypeError, "block_mask must be"),
    ((X, X, X), {"block_mask": (np.ones((5, 5), bool), 2, 1)}, ValueError, "block mask: axis 2 has size 5"),
    ((X, X, X), {"block_mask": (np.ones((5, 5), bool), 0, 1)}, ValueError, "block size must be at least 1"),
    ((X, X, X), {"block_mask": (np.ones((5, 5)), 1, 1)}, TypeError, "block_mask is float64, bool is wanted"),
    ((X, X, X), {"kv_starts": [6]}, ValueError, r"kv_starts\[0\] is 6"),
    ((X, X, X), {"out": X}, ValueError, "out shares memory with query"),
    ((X, X, X), {"out": np.empty((1, 4, 5, 7), np.float32)}, ValueError, r"out has the shape \[1, 4, 5, 7\]"),
    ((X, X, X), {"out": np.broadcast_to(np.float32(0), X.shape)}, ValueError, "out"),
    ((X, X, X), {"out": np.lib.stride_tricks.as_strided(X.copy(), X.shape, (0, 0, 0, 4))}, ValueError, "share memory"),
    ((X, X, X), {"out": X.astype(np.float64)}, TypeError, "out is float64"),
    ((X, X, X), {"out": memoryview(X.copy())}, TypeError, "out must be an array of NumPy"),
]


@pytest.mark.parametrize("arrays, options, error, text", REFUSED)
def test_refusals_say_why(arrays, options, error, text):
    with pytest.raises(error, match=text):
        attn.sdpa(*arrays, **options)
    if not {"out", "return_lse"} & options.keys():
        with pytest.raises(error, match=text):
            attn.explain(*arrays, **options)


def test_explain_of_gradients():
    assert "backward" in attn.explain(X, X, X, gradients=True)
    assert "backward" not in attn.explain(X, X, X, gradients=False)
    with pytest.raises(TypeError, match="gradients"):
        attn.explain(X, X, X, gradients="yes")


def test_refusals_write_nothing():
    out = np.full_like(X, 7)
    five = np.full((2, 3, 4, 5, 8), 1, np.float32).swapaxes(0, 1)
    for arrays, to, options in [((X, X, X), out, {"softcap": -1.0}), ((X, X, X), out, {"kv_lens": [6]}),
                                ((five,) * 3, np.full_like(five, 7), {"kv_lens": [1, 1, 1, 1, 1, 6]})]:
        with pytest.raises(ValueError):
            attn.sdpa(*arrays, out=to, **options)
        assert (to == 7).all()


def test_backward_refuses():
    out, lse = attn.sdpa(X, X, X, return_lse=True)
    for arguments, error, text in [
        ((out[..., :4], X, X, X, out, lse), ValueError, r"grad_out has the shape \[1, 4, 5, 4\]"),
        ((out, X, X, X, out, lse[..., :3]), ValueError, r"lse has the shape \[1, 4, 3\]"),
        ((out, X, X, X, out, lse.astype(np.float64)), TypeError, "lse is float64"),
        ((out, X, X, X, out.astype(np.float16), lse), TypeError, "out is float16"),
    ]:
        with pytest.raises(error, match=text):
            attn.sdpa_backward(*arguments)


def test_examples_of_docstrings():
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for name in attn.__all__:
        tests = finder.find(getattr(attn, name), name) if callable(getattr(attn, name)) else []
        assert not tests or any(test.examples for test in tests), f"{name} has no example"
        for test in tests:
            assert runner.run(test).failed == 0


def test_signatures_are_shown():
    names = list(inspect.signature(attn.sdpa).parameters)
    assert names[:8] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert {"window", "sinks", "out"} <= set(names)
    assert _attn.__version__ == attn.__version__
