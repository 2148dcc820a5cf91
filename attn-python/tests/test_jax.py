"""Arrays of JAX, and `attn.jax` inside of jit, grad and vmap, against the formula in JAX's own operations."""

import doctest

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp

import attn
import attn.jax


def qkv(*lead, heads=4, kv_heads=2, q_len=9, kv_len=13, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    return (normal(*lead, heads, q_len, 16), normal(*lead, kv_heads, kv_len, 16), normal(*lead, kv_heads, kv_len, 8))


def formula(q, k, v, mask=None, is_causal=False, softcap=None):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    score = q @ k.mT / q.shape[-1] ** 0.5
    if softcap is not None:
        score = softcap * jnp.tanh(score / softcap)
    if mask is not None:
        score = jnp.where(mask, score, -jnp.inf) if mask.dtype == bool else score + mask
    if is_causal:
        score = jnp.where(jnp.arange(k.shape[-2]) <= jnp.arange(q.shape[-2])[:, None], score, -jnp.inf)
    return jax.nn.softmax(score, axis=-1) @ v


MASKS = {"none": None, "bool": np.random.default_rng(2).random((9, 13)) < 0.8,
         "rows": np.random.default_rng(2).standard_normal((9, 13), np.float32),
         "heads": np.random.default_rng(2).standard_normal((4, 1, 13), np.float32)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_jit_and_grad(lead, options, mask):
    q, k, v = qkv(*lead)
    if MASKS[mask] is not None and MASKS[mask].dtype == bool:
        MASKS[mask][:, 0] = True  # no row without a key, whose softmax is NaN in JAX
    given = [] if MASKS[mask] is None else [jnp.asarray(MASKS[mask])]
    ours = jax.jit(lambda *x: attn.jax.sdpa(*x, enable_gqa=True, **options))
    np.testing.assert_allclose(ours(q, k, v, *given), formula(q, k, v, *given, **options), atol=4e-6, rtol=4e-6)
    by = tuple(range(3 if mask in ("none", "bool") else 4))
    loss = lambda f: jax.jit(jax.grad(lambda *x: jnp.square(f(*x)).sum(), by))(q, k, v, *given)
    for found, want in zip(loss(ours), loss(lambda *x: formula(*x, **options))):
        assert found.shape == want.shape and found.dtype == want.dtype
        np.testing.assert_allclose(found, want, atol=4e-5, rtol=4e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_vmap_adds_an_axis(mask):
    q, k, v = qkv(5, 2)
    given = [] if MASKS[mask] is None else [jnp.asarray(MASKS[mask])]
    over = (0, 0, 0, *([None] if given else []))
    call = lambda *x: attn.jax.sdpa(*x, enable_gqa=True)
    np.testing.assert_array_equal(jax.vmap(call, over)(q, k, v, *given), call(q, k, v, *given))
    twice = jax.vmap(jax.vmap(call, over), over)
    np.testing.assert_array_equal(jax.jit(twice)(q, k, v, *given), call(q, k, v, *given))
    shared = jax.vmap(call, (0, None, None, *([None] if given else [])))(q, k[0], v[0], *given)
    np.testing.assert_array_equal(shared[3], call(q[3], k[0], v[0], *given))


def test_vmap_keeps_what_an_axis_means():
    """One head stays one head, and lengths those of the batch."""
    q, k, v = qkv(5, heads=1, kv_heads=1)
    flat = lambda q, k, v: attn.jax.sdpa(q, k, v, alibi=True, sinks=[0.5])
    looped = jnp.stack([flat(q[n, 0], k[n, 0], v[n, 0]) for n in range(5)])
    np.testing.assert_array_equal(jax.vmap(flat)(q[:, 0], k[:, 0], v[:, 0]), looped)
    q, k, v = qkv(5, 2)
    lens = lambda q, k, v: attn.jax.sdpa(q, k, v, enable_gqa=True, kv_lens=[3, 13])
    looped = jnp.stack([lens(q[n], k[n], v[n]) for n in range(5)])
    np.testing.assert_array_equal(jax.vmap(lens)(q, k, v), looped)
    gradient = lambda f: jax.grad(lambda q: f(q).sum())(q)
    both = gradient(lambda q: jax.vmap(lens)(q, k, v)), gradient(lambda q: jnp.stack([lens(*x) for x in zip(q, k, v)]))
    np.testing.assert_array_equal(*both)


def test_bfloat16():
    q, k, v = qkv(2, dtype=jnp.bfloat16)
    out = jax.jit(lambda *x: attn.jax.sdpa(*x, enable_gqa=True))(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), formula(q, k, v), atol=2e-2, rtol=2e-2)
    gradient = jax.grad(lambda x: attn.jax.sdpa(x, k, v, enable_gqa=True).astype(jnp.float32).sum())(q)
    assert gradient.dtype == jnp.bfloat16


def test_large_arrays_do_not_wait_for_each_other():
    x = jnp.ones((1, 8, 2048, 64))
    step = jax.jit(lambda x: attn.jax.sdpa(x, x, x, is_causal=True) @ jnp.eye(64))
    for _ in range(3):
        x = step(x)
    np.testing.assert_allclose(x, 1, atol=1e-5)


def test_options_are_constants():
    q, k, v = qkv(2)
    options = dict(enable_gqa=True, sinks=jnp.zeros(4), kv_lens=np.array([13, 5]), window=(4, None),
                   block_mask=(np.ones((1, 1), bool), 9, 13))
    found = jax.jit(lambda *x: attn.jax.sdpa(*x, **options))(q, k, v)
    np.testing.assert_array_equal(found, attn.sdpa(q, k, v, **options))
    with pytest.raises(TypeError, match="sinks is traced"):
        jax.jit(lambda s: attn.jax.sdpa(q, k, v, sinks=s, enable_gqa=True))(jnp.zeros(4))
    for name in ("out", "return_lse", "level"):
        with pytest.raises(TypeError, match="unexpected keyword"):
            attn.jax.sdpa(q, k, v, **{name: None})
    with pytest.raises(ValueError, match="query has 4 axes, value 3"):
        attn.jax.sdpa(q, k, v[0])
    with pytest.raises(Exception, match="query has 4 heads, key has 2"):
        jax.block_until_ready(attn.jax.sdpa(q, k, v))


def test_traced_arrays_are_refused_outside_of_attn_jax():
    q, k, v = qkv(2)
    with pytest.raises((TypeError, ValueError), match="query"):
        jax.jit(lambda *x: attn.sdpa(*x, enable_gqa=True))(q, k, v)


def test_arrays_go_in_and_out_without_a_copy():
    """The result has the memory that the kernel wrote, unless JAX wants another alignment."""
    x = jnp.asarray(np.random.default_rng(8).standard_normal((2, 9, 16), np.float32))
    out, lse = attn.sdpa(x, x, x, return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_array_equal(out, attn.sdpa(*[np.asarray(x)] * 3))
    gradients = attn.sdpa_backward(out, x, x, x, out, lse)
    assert all(isinstance(gradient, jax.Array) for gradient in gradients)
    assert isinstance(attn.weights(x, x, x), jax.Array) and isinstance(attn.rope(x), jax.Array)


def test_examples_of_docstrings():
    for test in doctest.DocTestFinder().find(attn.jax.sdpa, "sdpa"):
        assert test.examples and doctest.DocTestRunner().run(test).failed == 0
