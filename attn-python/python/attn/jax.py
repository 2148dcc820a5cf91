"""Attention for JAX: inside of `jax.jit`, with `jax.grad` and `jax.vmap`.

    out = attn.jax.sdpa(query, key, value, is_causal=True)

XLA calls the kernels back on the host (`jax.pure_callback`): a call costs some tens of microseconds more than
`attn.sdpa`, which takes JAX's arrays outside of `jit`. Arrays are of the CPU: float32, float16 or bfloat16.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _attn

__all__ = ["sdpa"]


def sdpa(query: Any, key: Any, value: Any, attn_mask: Any | None = None, is_causal: bool = False,
         scale: float | None = None, enable_gqa: bool = False, **options: Any) -> jax.Array:
    """Attention, with gradients by query, key, value and a mask of numbers.

    query: (..., q_heads, q_len, head_dim), any number of leading axes; key and value as for `attn.sdpa`. attn_mask
    broadcasts to (..., q_heads, q_len, kv_len). The options are those of `attn.sdpa` but out, return_lse and level.
    They are constants of the compiled program: numbers, texts and sequences, no traced arrays. Under vmap, seeded
    dropout draws for the whole batch, not for each call anew.

    >>> import jax, jax.numpy as jnp, attn.jax
    >>> x = jnp.ones((2, 5, 8))
    >>> loss = lambda q, k, v: attn.jax.sdpa(q, k, v, is_causal=True).sum()
    >>> [gradient.shape for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(x, x, x)]
    [(2, 5, 8), (2, 5, 8), (2, 5, 8)]
    """
    for name in ("out", "return_lse", "level"):
        if name in options:
            raise TypeError(f"sdpa() got an unexpected keyword argument '{name}'")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if query.ndim < 2 or value.ndim != query.ndim:
        raise ValueError(f"query has {query.ndim} axes, value {value.ndim}; at least 2, and as many, are wanted")
    flat = query.ndim == 2
    if flat:
        # One head. Else an axis of vmap would be taken for that of the heads.
        query, key, value = query[None], key[None], value[None]
    if attn_mask is not None:
        attn_mask = jnp.asarray(attn_mask)
        # As many axes as query's, so that vmap adds one in front of all.
        attn_mask = attn_mask.reshape((1,) * (query.ndim - attn_mask.ndim) + attn_mask.shape)
    options = dict(options, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    out = _sdpa(query, key, value, attn_mask, tuple((name, _constant(name, x)) for name, x in options.items()))
    return out[0] if flat else out


def _constant(name: str, x: Any) -> Any:
    """An option in a form that XLA's cache of programs can compare."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced; options are constants of the compiled program")
    if isinstance(x, (jax.Array, np.ndarray)):
        x = np.asarray(x)
        return _constant(name, x.tolist()) if x.ndim < 2 else _Table(x)
    return tuple(_constant(name, y) for y in x) if isinstance(x, (list, tuple)) else x


class _Table:
    """An array that is equal to itself."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


def _options(constants: tuple, batch: int) -> dict[str, Any]:
    open_table = lambda x: x.array if isinstance(x, _Table) else x
    options = {name: tuple(map(open_table, x)) if isinstance(x, tuple) else open_table(x) for name, x in constants}
    # Lengths are those of the batch before vmap, which adds axes in front.
    for name in ("kv_lens", "kv_starts", "q_lens"):
        lens = options.get(name)
        if isinstance(lens, tuple) and lens and batch % len(lens) == 0:
            options[name] = lens * (batch // len(lens))
    return options


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sdpa(query, key, value, mask, constants):
    return _forward(query, key, value, mask, constants)[0]


def _forward(query, key, value, mask, constants):
    results = (jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype),
               jax.ShapeDtypeStruct(query.shape[:-1], np.float32))

    def call(query, key, value, *mask):
        lead = query.shape[:-3]
        arrays = [_folded(x, lead) for x in (query, key, value, *mask)]
        out, lse = _attn.sdpa(*arrays, return_lse=True, **_options(constants, math.prod(lead)))
        return out.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(query.shape[:-1])

    return jax.pure_callback(call, results, query, key, value, *_given(mask), vmap_method="broadcast_all")


def _save(query, key, value, mask, constants):
    out, lse = _forward(query, key, value, mask, constants)
    return out, (query, key, value, mask, out, lse)


def _gradients(constants, saved, grad_out):
    query, key, value, mask, out, lse = saved
    by_mask = mask is not None and jnp.issubdtype(mask.dtype, jnp.floating)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    results = (*map(like, (query, key, value)), *([like(mask)] if by_mask else []))

    def call(grad_out, query, key, value, out, lse, *mask):
        lead = query.shape[:-3]
        arrays = [_folded(x, lead) for x in (grad_out, query, key, value, out)]
        rows = np.ascontiguousarray(lse).reshape(arrays[1].shape[:-1])
        masks = [_folded(x, lead) for x in mask]
        found = _attn.sdpa_backward(*arrays, rows, *masks, return_dmask=by_mask,
                                     **_options(constants, math.prod(lead)))
        shaped = [x.reshape(y.shape) for x, y in zip(found, (query, key, value))]
        if by_mask:
            gradient = found[-1] if len(lead) <= 2 else _summed(found[-1], lead, mask[0].shape)
            shaped.append(gradient.astype(mask[0].dtype).reshape(mask[0].shape))
        return tuple(shaped)

    found = jax.pure_callback(call, results, grad_out, query, key, value, out, lse, *_given(mask),
                              vmap_method="broadcast_all")
    if mask is None:
        return *found, None
    return found if by_mask else (*found, np.zeros(mask.shape, jax.dtypes.float0))


def _given(mask):
    return () if mask is None else (mask,)


def _folded(x, lead: tuple[int, ...]) -> np.ndarray:
    """The array with its leading axes as one, if there are more than two; those of a mask are made query's first."""
    x = np.asarray(x)
    if len(lead) <= 2:
        return x
    last = x.shape[len(lead):]
    return np.broadcast_to(x, (*lead, *last)).reshape(math.prod(lead), *last)


def _summed(gradient: np.ndarray, lead: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of a mask before its leading axes were made query's."""
    gradient = gradient.reshape(*lead, *gradient.shape[1:])
    axes = tuple(axis for axis, size in enumerate(lead) if shape[axis] == 1 and size != 1)
    return gradient.sum(axes, keepdims=True)


_sdpa.defvjp(_save, _gradients)
