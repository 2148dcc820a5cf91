"""Copies of a cache."""

import copy

import numpy as np
import pytest

import attn


@pytest.mark.parametrize("place", [dict(capacity=40), dict(window=8, sink_tokens=2), dict(pages=12, page_size=4)],
                         ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "q8_0"])
def test_a_copy_goes_its_own_way(place, dtype):
    """As for beams: each continues the same prompt."""
    tokens = np.random.default_rng(6).standard_normal((1, 2, 9, 32), dtype=np.float32)
    tokens = tokens.astype(np.float16) if dtype == "float16" else tokens
    cache = attn.Cache(1, 2, 32, dtype=dtype, **place)
    if dtype == "bfloat16":
        tokens = tokens.astype(pytest.importorskip("ml_dtypes").bfloat16)
    cache.append(tokens[:, :, :6], tokens[:, :, :6])
    want = cache.decode(tokens[:, :, 5:6])
    for other in (copy.copy(cache), copy.deepcopy(cache)):
        assert repr(other) == repr(cache) and other.free_pages == cache.free_pages
        np.testing.assert_array_equal(other.decode(tokens[:, :, 5:6]), want)
        other.append(tokens[:, :, 6:], tokens[:, :, 6:])
        assert (cache.lens, other.lens) == ([6], [9])
    np.testing.assert_array_equal(cache.decode(tokens[:, :, 5:6]), want)
