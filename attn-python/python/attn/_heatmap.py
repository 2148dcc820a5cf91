"""Attention weights as a page to click through, which a notebook shows inline."""

from __future__ import annotations

from . import _attn

TYPE_CHECKING = False  # checkers of types take it for true; an import of `typing` takes as long as all the others
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Any

__all__ = ["Heatmap", "heatmap"]


class Heatmap:
    """A page of `attn.heatmap`: the value of a cell of a notebook is shown there, `save` writes a file.

    html: the page, which needs no other file. height: of the frame in a notebook, in pixels.

    >>> import attn
    >>> attn.Heatmap("<!doctype html>", height=400)._repr_html_()[-50:]
    'style="width:100%;height:400px;border:0"></iframe>'
    """

    def __init__(self, html: str, height: int = 760) -> None:
        self.html = html
        self.height = height

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page to a file, for any browser."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html)

    def _repr_html_(self) -> str:
        from html import escape

        # A frame keeps the page's style and script apart from the notebook's.
        return (f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" title="Attention weights" '
                f'style="width:100%;height:{self.height}px;border:0"></iframe>')

    def __repr__(self) -> str:
        return f"attn.Heatmap of {len(self.html)} bytes; a notebook shows it, save(path) writes it"


def heatmap(query: Any, key: Any, value: Any, attn_mask: Any | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
            tokens: Sequence[str] | None = None, key_tokens: Sequence[str] | None = None, title: str | None = None,
            note: str | None = None, **options: Any) -> Heatmap:
    """A page with heat maps of all heads, and for each token its scores, weights and vectors.

    query: (q_heads, q_len, head_dim) of one sequence, or a list of such arrays: one for each layer of a model. key and
    value as for `sdpa`, in lists of the same length then. attn_mask and options are those of `weights` but threads,
    level, precision and reproducible, for all layers; with dropout_p the page shows weights before and after it.

    tokens: a text for each query, and for each key if there are no key_tokens. Without them tokens are numbered.
    title, note: above the map. At most 128 queries and keys; a page of many heads takes megabytes.

    >>> import attn, numpy as np
    >>> x = np.eye(3, 8, dtype=np.float32)[None]
    >>> page = attn.heatmap(x, x, x, is_causal=True, tokens=["the", "cat", "sat"])
    >>> page.html.startswith("<!doctype html>")
    True
    """
    lists = [isinstance(x, (list, tuple)) for x in (query, key, value)]
    if any(lists) and not all(lists):
        raise TypeError("query, key and value are lists of layers together, or arrays")
    if all(lists) and not len(query) == len(key) == len(value):
        raise ValueError(f"query has {len(query)} layers, key {len(key)}, value {len(value)}")
    layers = list(zip(query, key, value)) if all(lists) else [(query, key, value)]
    texts = [title, note, *(None if x is None else [str(text) for text in x] for x in (tokens, key_tokens))]
    return Heatmap(_attn.heatmap_page(layers, texts, attn_mask, dropout_p, is_causal, scale, enable_gqa, **options))
