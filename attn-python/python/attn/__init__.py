"""Exact attention on CPUs, on arrays where they lie.

    out = attn.sdpa(query, key, value, is_causal=True)

Arrays are of NumPy, torch, JAX or anything with DLPack or a buffer, in any strides; results are of the caller's
library.
"""

from ._attn import Cache, __version__, explain, levels, merge, rope, sdpa, sdpa_backward, weights
from ._heatmap import Heatmap, heatmap

__all__ = ["Cache", "Heatmap", "__version__", "explain", "heatmap", "levels", "merge", "rope", "sdpa", "sdpa_backward",
           "weights"]
