"""`attn.merge` and `attn.rope`."""

import numpy as np
import pytest

import attn


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_parts_are_the_whole(lead):
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, *lead, 5, 8), normal(rng, *lead, 20, 8), normal(rng, *lead, 20, 6)
    keep = rng.random((5, 20)) < 0.7
    keep[2] = False
    keep[3, :7] = False  # a row that sees nothing in the first part
    parts = [attn.sdpa(q, k[..., at, :], v[..., at, :], keep[:, at], return_lse=True)
             for at in (slice(0, 7), slice(7, 8), slice(8, 20))]
    want, want_lse = attn.sdpa(q, k, v, keep, return_lse=True)
    out, lse = attn.merge(parts)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    swapped = [(x.swapaxes(-1, -2).copy().swapaxes(-1, -2), y[..., ::-1].copy()[..., ::-1]) for x, y in parts]
    np.testing.assert_array_equal(attn.merge(swapped)[0], out)
    one, _ = attn.merge(parts[:1])
    np.testing.assert_allclose(one, parts[0][0], atol=1e-7)


def test_merge_refuses():
    out, lse = attn.sdpa(*[np.ones((2, 3, 4), np.float32)] * 3, return_lse=True)
    for parts, error, text in [
        ([], ValueError, "parts is empty"),
        ([(out, lse[:, :2])], ValueError, r"lse has the shape \[2, 2\], \[2, 3\] is wanted"),
        ([(out, lse), (out[:1], lse[:1])], ValueError, r"out has the shape \[1, 3, 4\], \[2, 3, 4\] is wanted"),
        ([(out, lse), (out.astype(np.float16), lse)], TypeError,
         r"parts\[1\]: out is float16, that of parts\[0\] is float32"),
        ([(out, lse.astype(np.float64))], TypeError, "lse is float64"),
        ([(out.astype(np.float64), lse)], TypeError, r"parts\[0\]: out is float64"),
        ([(out, lse), out], TypeError, r"parts\[1\] is numpy.ndarray, \(out, lse\) is wanted"),
        ([(out,)], TypeError, r"parts\[0\] is tuple"),
        (3, TypeError, r"parts is int, a list of \(out, lse\) is wanted"),
    ]:
        with pytest.raises(error, match=text):
            attn.merge(parts)


def test_merge_takes_what_is_passed_on():
    out, lse = attn.sdpa(*[np.ones((2, 3, 4), np.float32)] * 3, return_lse=True)
    want = attn.merge([(out, lse), (out, lse)])
    for parts in ([[out, lse]] * 2, zip([out] * 2, [lse] * 2)):
        for found, wanted in zip(attn.merge(parts), want):
            np.testing.assert_array_equal(found, wanted)


def turned(x, positions, base, pairing, dim):
    """The formula in float64."""
    x, dims = x.astype(np.float64), np.arange(dim // 2)
    angle = np.asarray(positions, np.float64)[..., None] * base ** (-2.0 * dims / dim)
    a, b = (dims, dims + dim // 2) if pairing == "half" else (2 * dims, 2 * dims + 1)
    cos, sin = np.cos(angle), np.sin(angle)
    out = x.copy()
    out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    return out


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rope_is_the_formula(pairing):
    rng = np.random.default_rng(2)
    x = normal(rng, 2, 7, 3, 16).swapaxes(1, 2)
    each = rng.integers(0, 1000, (2, 7))
    for positions, wide in [(0, np.arange(7)), (5, np.arange(5, 12)), (np.arange(7)[::-1], np.arange(7)[::-1]),
                            (each, each[:, None]), (each.tolist(), each[:, None])]:
        for dim, base in [(16, 10000.0), (8, 500.0)]:
            want = turned(x, wide, base, pairing, dim)
            out = attn.rope(x, positions, base=base, pairing=pairing, rotary_dim=dim)
            np.testing.assert_allclose(out, want, atol=1e-6)
    same = x.copy()
    assert attn.rope(same, 3, pairing=pairing, out=same) is same
    np.testing.assert_array_equal(same, attn.rope(x, 3, pairing=pairing))
    np.testing.assert_array_equal(same, attn.rope(x, np.int64(3), pairing=pairing))
    five = np.stack([x, x])
    np.testing.assert_array_equal(attn.rope(five, 3, pairing=pairing)[1], same)


@pytest.mark.parametrize("positions", [7, "shared", "each"])
def test_rope_of_many_tokens_is_that_of_parts(positions):
    """Signals are looked for between parts of a long call."""
    rng, count, cut = np.random.default_rng(3), 1 << 17, 50000
    x, table = normal(rng, 2, 1, count, 64), rng.integers(0, 1000, (2, count))
    positions = {"shared": table[0], "each": table}.get(positions, positions)
    found = attn.rope(x, positions)
    first, rest = (7, 7 + cut) if isinstance(positions, int) else (positions[..., :cut], positions[..., cut:])
    np.testing.assert_array_equal(found[:, :, :cut], attn.rope(x[:, :, :cut], first))
    np.testing.assert_array_equal(found[:, :, cut:], attn.rope(x[:, :, cut:], rest))
    assert attn.rope(x, positions, out=x) is x
    np.testing.assert_array_equal(x, found)


def test_rope_refuses():
    x = np.ones((2, 3, 7, 16), np.float32)
    for arguments, options, error, text in [
        ((x,), {"pairing": "other"}, ValueError, "pairing is \"other\""),
        ((x,), {"rotary_dim": 5}, ValueError, "rotary_dim"),
        ((x,), {"rotary_dim": 18}, ValueError, "rotary_dim"),
        ((x, np.arange(6)), {}, ValueError, "positions against tokens: expected 7, found 6"),
        ((x, [[1, 2], [1]]), {}, ValueError, "rows of 2 and 1"),
        ((x, 0.5), {}, TypeError, "positions must be"),
        ((x, 10**30), {}, ValueError, "positions is 10{30}, at most 9223372036854775807"),
        ((x,), {"out": x[:, ::-1]}, ValueError, "out shares memory with x"),
        ((x,), {"out": x.astype(np.float16)}, TypeError, "out is float16, x is float32"),
        ((x.astype(np.float64),), {}, TypeError, "x is float64"),
    ]:
        with pytest.raises(error, match=text):
            attn.rope(*arguments, **options)
