"""Attention for torch: operators with gradients, that torch.compile keeps in one graph.

    out = attn.torch.sdpa(query, key, value, is_causal=True)   # torch's signature, and attn's options
    with attn.torch.enabled():                                 # models that call torch's function
        model(tokens)

The operators are torch.ops.attn.sdpa and torch.ops.attn.sdpa_backward. Tensors are on the CPU: float32, float16 or
bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _attn

__all__ = ["Calls", "enabled", "sdpa", "varlen_attn"]

# Arguments behind the tensors, with their defaults. None is keyword-only: torch's autograd would refuse tensors there.
_OPTIONS = ("Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, float? scale=None, "
            "bool enable_gqa=False, str? causal=None, int[]? window=None, float? softcap=None, "
            "float? temperature=None, Tensor? sinks=None, Tensor? alibi=None, Tensor? kv_lens=None, "
            "Tensor? q_lens=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? seed=None, "
            'str precision="exact", bool reproducible=False, int? threads=None')
_NAMES = tuple(option.split("=")[0].split()[1] for option in _OPTIONS.split(", "))
_MASK, _SINKS, _ALIBI = (_NAMES.index(name) for name in ("attn_mask", "sinks", "alibi"))

_library = torch.library.Library("attn", "DEF")
_library.define(f"sdpa(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define("sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
                f"{_OPTIONS}, bool return_dmask=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")


def _native(given: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """The operators' options as keywords of the native functions."""
    options = dict(zip((*_NAMES, "return_dmask"), given), **named)
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            options[name] = value.detach()
    causal, window = options.get("causal"), options.get("window")
    if causal is not None and causal.lstrip("-").isdigit():
        options["causal"] = int(causal)
    if window is not None:
        options["window"] = tuple(window)
    return options


def _forward(query, key, value, *given, **named):
    return _attn.sdpa(query.detach(), key.detach(), value.detach(), return_lse=True, **_native(given, named))


def _backward(grad_out, query, key, value, out, lse, *given, **named):
    tensors = (tensor.detach() for tensor in (grad_out, query, key, value, out, lse))
    options = _native(given, named)
    found = _attn.sdpa_backward(*tensors, **options)
    sinks, mask = options.get("sinks"), options.get("attn_mask")
    dsinks = query.new_empty(0) if sinks is None else torch.tensor(found[3], dtype=sinks.dtype)
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
    options = dict(zip((*_NAMES, "return_dmask"), given), **named)
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
    tensors, tables = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    needed = ctx.needs_input_grad[3:]  # without trailing arguments that had their defaults
    if any(needed[_ALIBI:_ALIBI + 1]):
        raise NotImplementedError("not supported: the gradient of alibi")
    given = list(ctx.given)
    for at, table in zip(ctx.tables, tables):
        given[at] = table
    by_mask = any(needed[_MASK:_MASK + 1])
    *found, sinks, mask = torch.ops.attn.sdpa_backward(grad_out, *tensors, *given, return_dmask=by_mask)
    of = {_SINKS: sinks, _MASK: mask}
    return *found, *(of.get(at) if needs else None for at, needs in enumerate(needed))


torch.library.register_autograd("attn::sdpa", _gradients, setup_context=_save, lib=_library)


def _refuse(*_):
    raise NotImplementedError("not supported: gradients of gradients")


# Without this torch would take them for zero.
torch.library.register_autograd("attn::sdpa_backward", _refuse, lib=_library)


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
         causal=None, window=None, softcap=None, temperature=None, sinks=None, alibi=None, kv_lens=None, q_lens=None,
         cu_seqlens_q=None, cu_seqlens_k=None, seed=None, precision="exact", reproducible=False, return_lse=False,
         threads=None):
    """Attention on tensors, with gradients by query, key, value, attn_mask and sinks.

    The signature is torch's, and the options are those of `attn.sdpa`.

    query: (..., q_heads, q_len, head_dim), any number of leading axes; the options' shapes are those of `attn.sdpa`.
    Tables (sinks, alibi, kv_lens, ...) are tensors or sequences. With dropout_p and without seed, torch's generator
    draws one. The lse, on request, has no gradient.

    >>> import torch, attn.torch
    >>> q = torch.ones(1, 8, 5, 64, requires_grad=True)
    >>> attn.torch.sdpa(q, q, q, is_causal=True).sum().backward()
    >>> tuple(q.grad.shape)
    (1, 8, 5, 64)
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and (
            causal is window is softcap is temperature is sinks is alibi is kv_lens is q_lens is cu_seqlens_q
            is cu_seqlens_k is seed is threads is None) and (
            dropout_p == 0.0 and precision == "exact" and not reproducible and not return_lse):
        if _is_plain(query, key, value) and (attn_mask is None or _is_plain(attn_mask)):
            return _attn.sdpa(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    if not compiling and forward_ad._current_level >= 0:
        for tensor in (query, key, value, attn_mask, sinks):
            if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError("not supported: tangents of forward-mode differentiation")
    if dropout_p > 0.0 and seed is None:
        seed = int(torch.randint(2**62, ()))
    if torch.is_grad_enabled() and isinstance(alibi, torch.Tensor) and alibi.requires_grad:
        raise NotImplementedError("not supported: the gradient of alibi")
    lead = query.shape[:-3]
    if len(lead) > 1:
        query, key, value = (_folded(name, tensor, lead) for name, tensor in
                             (("query", query), ("key", key), ("value", value)))
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, len(lead) - 1)
    out, lse = torch.ops.attn.sdpa(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, None if causal is None else str(causal),
        None if window is None else [-1 if side is None else side for side in window], softcap, temperature,
        *(_table(table) for table in (sinks, alibi, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k)), seed, precision,
        reproducible, threads)
    if len(lead) > 1:
        out, lse = out.unflatten(0, lead), lse.unflatten(0, lead)
    return (out, lse) if return_lse else out


# What may stand between a function and its tensors, and what says that it does.
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


def _is_plain(*tensors) -> bool:
    """Whether the operator would only call the kernels: its way through torch's dispatcher takes longer than a small
    call."""
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.requires_grad or not tensor.is_cpu or tensor.dim() > 4:
            return False
    return (_dispatch_modes() == 0 and _function_modes() == 0 and _transform() is None and _tracing() is None
            and forward_ad._current_level < 0)


def _folded(name: str, tensor: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    if tensor.shape[:-3] != lead:
        raise ValueError(f"{name} has the leading axes {list(tensor.shape[:-3])}, query {list(lead)}")
    return tensor.flatten(0, len(lead) - 1)


def _table(table):
    if table is None or isinstance(table, torch.Tensor):
        return table
    if isinstance(table, bool):
        raise TypeError("alibi is a bool; attn.torch takes the slopes")
    return torch.as_tensor(table)


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q=None, max_k=None, *, return_aux=None, scale=None,
                window_size=(-1, -1), enable_gqa=False):
    """Packed sequences of different lengths, with the arguments of `torch.nn.attention.varlen.varlen_attn`, on the CPU.

    query: (total_q, q_heads, head_dim); key, value: (total_k, kv_heads, ...); cu_seq_q, cu_seq_k: (sequences + 1,).
    window_size: (left, right), -1 is no bound; (-1, 0) is causal, the last query of each sequence at its last key.
    max_q and max_k are not needed. With return_aux.lse also the log-sum-exps, (q_heads, total_q).

    >>> import torch, attn.torch
    >>> q = torch.ones(7, 2, 8)
    >>> attn.torch.varlen_attn(q, q, q, torch.tensor([0, 3, 7]), torch.tensor([0, 3, 7]), window_size=(-1, 0)).shape
    torch.Size([7, 2, 8])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} has {tensor.dim()} axes, (tokens, heads, dim) are wanted")
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    out, lse = sdpa(query, key, value, scale=scale, enable_gqa=enable_gqa, window=tuple(window_size),
                    cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k, return_lse=True)
    out = out.transpose(0, 1)
    return (out, lse) if return_aux is not None and return_aux.lse else out


@dataclass
class Calls:
    """How many calls of torch's function `enabled` computed, and how many it passed on to torch."""

    computed: int = 0
    passed_on: int = 0


@contextlib.contextmanager
def enabled(strict: bool = False) -> Iterator[Calls]:
    """Replaces torch.nn.functional.scaled_dot_product_attention for the duration of a `with`, in the whole process.

    Calls that the kernels do not support go to torch's own function, or with strict are refused: other devices and
    types than the CPU's float32, float16 and bfloat16. The result counts both.
    Code that imported the function by its name before keeps torch's.

    >>> import torch, attn.torch
    >>> x = torch.ones(1, 2, 5, 8)
    >>> with attn.torch.enabled() as calls:
    ...     y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> calls.computed, calls.passed_on
    (1, 0)
    """
    own, calls = torch.nn.functional.scaled_dot_product_attention, Calls()

    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                     enable_gqa=False):
        given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if strict or _supported(query, key, value, attn_mask):
            calls.computed += 1
            return sdpa(*given)
        calls.passed_on += 1
        return own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield calls
    finally:
        torch.nn.functional.scaled_dot_product_attention = own


def _supported(query, key, value, mask) -> bool:
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    same = query.shape[:-3] == key.shape[:-3] == value.shape[:-3] and query.dim() == key.dim() == value.dim() >= 2
    return (same and all(x.device.type == "cpu" and x.layout is torch.strided for x in tensors)
            and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and query.dtype == key.dtype == value.dtype)
