"""`attn.heatmap`: the numbers on the page, the frame for notebooks, and refusals."""

import html
import json
import re

import numpy as np
import pytest

import attn


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def scene(page):
    """The data of a page."""
    return json.loads(re.search(r'<script id="scene" type="application/json">(.*?)</script>', page.html, re.S)[1])


def array(rows):
    return np.array([[np.nan if x is None else x for x in row] for row in rows])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": normal(6, 6) < 0.7}, {"softcap": 2.0},
                                     {"sinks": np.ones(4)}, {"window": (2, 0)}, {"alibi": True}], ids=str)
def test_the_page_has_the_weights(dtype, options):
    sizes = (4, 6, 8), (2, 6, 8), (2, 6, 5)
    q, k, v = (normal(*size, seed=seed).astype(dtype) for seed, size in enumerate(sizes))
    page = attn.heatmap(q, k, v, enable_gqa=True, **options)
    data = scene(page)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    weights, out = (f(*wide, enable_gqa=True, **options) for f in (attn.weights, attn.sdpa))
    assert data["tokens"] == list("012345") and "keys" not in data and len(data["layers"][0]["heads"]) == 4
    for at, head in enumerate(data["layers"][0]["heads"]):
        view, = head["views"]
        np.testing.assert_allclose(np.nan_to_num(array(view["before"])), weights[at], atol=2e-6)
        np.testing.assert_allclose(view["out"], out[at], atol=2e-6)
        np.testing.assert_allclose(head["k"], wide[1][at // 2], atol=2e-6)


def test_hidden_keys_are_none():
    x = normal(1, 3, 4)
    view = scene(attn.heatmap(x, x, x, is_causal=True))["layers"][0]["heads"][0]["views"][0]
    assert [[cell is None for cell in row] for row in view["before"]] == [[j > i for j in range(3)] for i in range(3)]
    assert view["scores"][0][1:] == [None, None]


def test_dropout_is_shown_before_and_after():
    x = normal(2, 6, 8)
    data = scene(attn.heatmap(x, x, x, dropout_p=0.5, seed=3))
    weights = attn.weights(x, x, x, dropout_p=0.5, seed=3)
    for at, head in enumerate(data["layers"][0]["heads"]):
        np.testing.assert_allclose(array(head["views"][0]["after"]), weights[at], atol=2e-6)
        assert (array(head["views"][0]["before"]) > 0).all()
    assert data["dropout"] == {"p": 0.5, "seed": "3"}


def test_layers_keys_and_texts():
    q, k = [normal(1, 2, 3, 8)] * 2, [normal(1, 2, 5, 8)] * 2
    page = attn.heatmap(q, k, k, tokens=["<b>", "</script>", "ü"], key_tokens=list("abcde"), title="t", note="n")
    data = scene(page)
    assert [layer["name"] for layer in data["layers"]] == ["Layer 1", "Layer 2"]
    assert (data["tokens"], data["keys"]) == (["<b>", "</script>", "ü"], list("abcde"))
    assert (data["title"], data["note"]) == ("t", "n")
    assert scene(attn.heatmap(q, k, k))["keys"] == list("01234")


def test_a_seed_of_64_bits():
    """A page's numbers have 53 bits."""
    x = normal(1, 3, 8)
    assert scene(attn.heatmap(x, x, x, dropout_p=0.5, seed=2**64 - 1))["dropout"]["seed"] == "18446744073709551615"


def test_a_mask_that_hides():
    x, mask = normal(1, 3, 8), np.triu(np.full((3, 3), -np.inf), 1)
    assert attn.heatmap(x, x, x, mask).html != attn.heatmap(x, x, x).html


def test_arrays_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(normal(2, 6, 8))
    want = attn.heatmap(x.numpy(), x.numpy(), x.numpy(), is_causal=True).html
    assert attn.heatmap(x, x, x, is_causal=True).html == want
    turned = x.mT.contiguous().mT
    assert attn.heatmap(turned, turned, turned, is_causal=True).html == want
    halves = x.bfloat16()
    assert len(scene(attn.heatmap(halves, halves, halves))["layers"][0]["heads"]) == 2


def test_a_notebook_shows_it(tmp_path):
    x = normal(2, 3, 4)
    page = attn.heatmap(x, x, x, tokens=['"', "<i>", "&amp;"])
    frame = page._repr_html_()
    assert frame.startswith("<iframe srcdoc=\"") and 'sandbox="allow-scripts"' in frame
    inside = re.search(r'srcdoc="([^"]*)"', frame)[1]
    assert html.unescape(inside) == page.html
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    assert isinstance(page, attn.Heatmap) and "save(path)" in repr(page)


X = normal(2, 3, 4)


@pytest.mark.parametrize("arrays, options, error, text", [
    ((X, X, X), {"tokens": ["a"]}, ValueError, "tokens has 1 texts, 3 are wanted"),
    ((X, X, X), {"tokens": ["\ud800"] * 3}, (TypeError, ValueError), ""),
    ((X, X, X), {"key_tokens": ["a"]}, ValueError, "key_tokens has 1 texts, 3 are wanted"),
    ((X, [X], X), {}, TypeError, "lists of layers together"),
    (([X], [X], [X, X]), {}, ValueError, "query has 1 layers, key 1, value 2"),
    (([], [], []), {}, ValueError, "at least one is wanted"),
    (([X, X[:, :2]],) * 3, {}, ValueError, "a layer has 2 queries and 2 keys, the first one 3 and 3"),
    ((np.stack([X, X]),) * 3, {}, ValueError, r"query has the shape \[2, 2, 3, 4\], of 2 sequences; a page shows one"),
    ((X[:, :0], X[:, :0], X[:, :0]), {}, ValueError, "0 queries; 1 to 128 fit"),
    ((X[:0], X[:0], X[:0]), {}, ValueError, "0 heads"),
    ((normal(1, 129, 2),) * 3, {}, ValueError, "129 queries; 1 to 128 fit on a page"),
    ((normal(64, 128, 2),) * 3, {}, ValueError, "the page would hold 2162688 numbers, at most 2097152"),
    ((np.broadcast_to(np.float32(1), (1, 3, 2**40)),) * 3, {}, ValueError, "the page would hold"),
    ((X, X, X), {"attn_mask": np.diag([0, np.nan, 0])}, ValueError, "attn_mask is NaN for head 0, query 1, key 1"),
    ((X, X, X), {"attn_mask": np.full((3, 1), np.inf, np.float32)}, ValueError, "attn_mask is inf for head 0, query 0"),
    ((X * np.inf, X, X), {}, NotImplementedError, "NaN or infinities in query"),
    ((X, X, X), {"threads": 1}, TypeError, r"heatmap\(\) got an unexpected keyword argument 'threads'"),
    ((X, X, X), {"softcap": -1.0}, ValueError, "softcap"),
    ((X, X, X), {"dropout_p": 1.5, "seed": 1}, ValueError, "dropout"),
    ((X, X, X), {"attn_mask": np.ones((5, 2, 3, 3), bool)}, ValueError, "does not broadcast"),
    ((X.astype(np.float64),) * 3, {}, TypeError, "query is float64"),
])
def test_refusals(arrays, options, error, text):
    with pytest.raises(error, match=text or "."):
        attn.heatmap(*arrays, **options)
