"""The operators torch.ops.attn.sdpa and sdpa_backward: schemas, kernels, fake kernels and gradients.

They are what compilers, modes and exporters see. `_recorded` has the way of eager calls, `torch` the public functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _attn

# Arguments behind the tensors, with their defaults. None is keyword-only: torch's autograd would refuse tensors there.
# The seed is a tensor, so that a graph can draw it anew in each run.
_OPTIONS = ("Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, float? scale=None, "
            "bool enable_gqa=False, str? causal=None, int[]? window=None, float? softcap=None, "
            "float? temperature=None, Tensor? sinks=None, Tensor? alibi=None, Tensor? kv_lens=None, "
            "Tensor? kv_starts=None, Tensor? q_lens=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
            'Tensor? seed=None, str precision="exact", bool reproducible=False, int? threads=None')
NAMES = tuple(option.split("=")[0].split()[1] for option in _OPTIONS.split(", "))
_MASK, _SINKS, _ALIBI = (NAMES.index(name) for name in ("attn_mask", "sinks", "alibi"))
_DEFAULTS = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False, "precision": "exact", "reproducible": False}
_TABLES = ("sinks", "alibi", "kv_lens", "kv_starts", "q_lens", "cu_seqlens_q", "cu_seqlens_k")

_library = torch.library.Library("attn", "DEF")
_library.define(f"sdpa(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define("sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
                f"{_OPTIONS}, bool return_dmask=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")


def given(options: dict[str, Any]) -> list[Any]:
    """Keywords of the native functions as the operators' arguments behind the first three tensors."""
    options = dict(_DEFAULTS, **options)
    causal, window, seed = options.get("causal"), options.get("window"), options.get("seed")
    if causal is not None:
        options["causal"] = str(causal)
    if window is not None:
        options["window"] = [-1 if side is None else side for side in window]
    if seed is not None and not isinstance(seed, torch.Tensor):
        options["seed"] = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    for name in _TABLES:
        table = options.get(name)
        if table is not None and not isinstance(table, torch.Tensor):
            options[name] = torch.as_tensor(table)
    return [options.get(name) for name in NAMES]


def _native(given: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """The operators' arguments as keywords of the native functions."""
    options = dict(zip((*NAMES, "return_dmask"), given), **named)
    causal, window, seed = options.get("causal"), options.get("window"), options.get("seed")
    if causal is not None and causal.lstrip("-").isdigit():
        options["causal"] = int(causal)
    if window is not None:
        options["window"] = tuple(window)
    if seed is not None:
        options["seed"] = int(seed) % 2**64
    return options


def _forward(query, key, value, *given, **named):
    with torch.no_grad():  # torch calls a kernel below autograd with tensors that require grad
        return _attn.sdpa(query, key, value, return_lse=True, **_native(given, named))


def _backward(grad_out, query, key, value, out, lse, *given, **named):
    options = _native(given, named)
    with torch.no_grad():
        found = _attn.sdpa_backward(grad_out, query, key, value, out, lse, **options)
    sinks, mask = options.get("sinks"), options.get("attn_mask")
    dsinks = query.new_empty(0) if sinks is None else found[3].to(sinks.dtype)
    dmask = found[-1].to(mask.dtype) if options.get("return_dmask") else query.new_empty(0)
    return *found[:3], dsinks, dmask


_library.impl("sdpa", _forward, "CPU")
_library.impl("sdpa_backward", _backward, "CPU")


@torch.library.register_fake("attn::sdpa", lib=_library)
def _(query, key, value, *_, **__):
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("attn::sdpa_backward", lib=_library)
def _(grad_out, query, key, value, out, lse, *given, **named):
    options = dict(zip((*NAMES, "return_dmask"), given), **named)
    sinks, mask = options.get("sinks"), options.get("attn_mask")
    dsinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    dmask = mask.new_empty(mask.shape) if options.get("return_dmask") else query.new_empty(0)
    return *(tensor.new_empty(tensor.shape) for tensor in (query, key, value)), dsinks, dmask


def _save(ctx, inputs, output):
    query, key, value, *given = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.given = [None if isinstance(x, torch.Tensor) else x for x in given]
    ctx.tables = [at for at, x in enumerate(given) if isinstance(x, torch.Tensor)]
    ctx.save_for_backward(query, key, value, out, lse, *(given[at] for at in ctx.tables))


def _gradients(ctx, grad_out, _):
    query, key, value, out, lse, *tables = ctx.saved_tensors  # once: a checkpoint unpacks them once
    needed = ctx.needs_input_grad[3:]  # without trailing arguments that had their defaults
    if any(needed[_ALIBI:_ALIBI + 1]):
        raise NotImplementedError("not supported: the gradient of alibi")
    given = list(ctx.given)
    for at, table in zip(ctx.tables, tables):
        given[at] = table
    by_mask = any(needed[_MASK:_MASK + 1])
    *found, sinks, mask = torch.ops.attn.sdpa_backward(grad_out, query, key, value, out, lse, *given,
                                                       return_dmask=by_mask)
    of = {_SINKS: sinks, _MASK: mask}
    return *found, *(of.get(at) if needs else None for at, needs in enumerate(needed))


torch.library.register_autograd("attn::sdpa", _gradients, setup_context=_save, lib=_library)


def refuse(*_):
    raise NotImplementedError("not supported: gradients of gradients")


# Without this torch would take them for zero.
torch.library.register_autograd("attn::sdpa_backward", refuse, lib=_library)
