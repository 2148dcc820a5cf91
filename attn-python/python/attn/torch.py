"""Attention for torch: operators with gradients, that torch.compile keeps in one graph.

    out = attn.torch.sdpa(query, key, value, is_causal=True)   # torch's signature, and attn's options
    with attn.torch.enabled():                                 # models that call torch's function
        model(tokens)

The operators are torch.ops.attn.sdpa and torch.ops.attn.sdpa_backward. Tensors are on the CPU: float32, float16 or
bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from . import _attn, _operators, _recorded

__all__ = ["Calls", "enabled", "sdpa", "varlen_attn"]


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
         causal=None, window=None, softcap=None, temperature=None, sinks=None, alibi=None, kv_lens=None, kv_starts=None,
         q_lens=None, cu_seqlens_q=None, cu_seqlens_k=None, seed=None, precision="exact", reproducible=False,
         return_lse=False, threads=None):
    """Attention on tensors, with gradients by query, key, value, attn_mask and sinks.

    The signature is torch's, and the options are those of `attn.sdpa` but block_mask, out and level.

    query: (..., q_heads, q_len, head_dim), any number of leading axes; the options' shapes are those of `attn.sdpa`.
    Tables (sinks, alibi, kv_lens, ...) are tensors or sequences. With dropout_p and without seed, torch's generator
    draws one. The lse, on request, has no gradient. Under torch.autocast query, key and value are cast, as by torch.

    >>> import torch, attn.torch
    >>> q = torch.ones(1, 8, 5, 64, requires_grad=True)
    >>> attn.torch.sdpa(q, q, q, is_causal=True).sum().backward()
    >>> tuple(q.grad.shape)
    (1, 8, 5, 64)
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = _cast(query), _cast(key), _cast(value)
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not (causal is window is softcap is temperature is alibi is kv_lens is kv_starts is q_lens is cu_seqlens_q
            is cu_seqlens_k is seed is threads is None and dropout_p == 0.0 and precision == "exact"
            and not reproducible):
        named = dict(causal=causal, window=window, softcap=softcap, temperature=temperature, alibi=alibi,
                     kv_lens=kv_lens, kv_starts=kv_starts, q_lens=q_lens, cu_seqlens_q=cu_seqlens_q,
                     cu_seqlens_k=cu_seqlens_k, seed=seed, threads=threads, dropout_p=dropout_p, precision=precision,
                     reproducible=reproducible)
        options.update((name, option) for name, option in named.items() if option is not None)
        for name, option in (("alibi", alibi), ("softcap", softcap), ("temperature", temperature)):
            _refuse_gradient(name, option)
        if isinstance(alibi, bool):
            options["alibi"] = _slopes(query.shape[-3] if query.dim() > 2 else 1) if alibi else None
        if dropout_p > 0.0 and seed is None:
            options["seed"] = torch.randint(2**62, ())
    if isinstance(scale, torch.Tensor):
        _refuse_gradient("scale", scale)
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        each = any(isinstance(sink, torch.Tensor) for sink in sinks)
        sinks = torch.stack([torch.as_tensor(sink) for sink in sinks]) if each else torch.as_tensor(sinks)
    lead = query.shape[:-3]
    if len(lead) > 1:
        query, key, value = (_folded(name, tensor, lead) for name, tensor in
                             (("query", query), ("key", key), ("value", value)))
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, len(lead) - 1)
    out, lse = _computed(query, key, value, attn_mask, sinks, options, return_lse)
    if len(lead) > 1:
        out, lse = out.unflatten(0, lead), lse if lse is None else lse.unflatten(0, lead)
    return (out, lse) if return_lse else out


def _computed(query, key, value, mask, sinks, options, return_lse):
    """Out, and lse or None, by the shortest way on which all that look at the call see it."""
    tensors = (query, key, value, mask, sinks)
    if torch.compiler.is_compiling():
        return _called(*tensors, options)
    if not all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in tensors):
        name, tensor = next((name, x) for name, x in zip(("query", "key", "value", "attn_mask"), tensors)
                            if not isinstance(x, torch.Tensor))
        raise TypeError(f"{name} is {type(tensor).__name__}, a tensor of torch is wanted")
    if forward_ad._current_level >= 0:
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError("not supported: tangents of forward-mode differentiation")
    if _recorded.is_seen():
        return _called(*tensors, options)
    if _recorded.transform() is not None:
        return (_recorded.Transformed.apply if _recorded.differentiates() else _called)(*tensors, options)
    if not _recorded.is_plain(tensors):
        return _called(*tensors, options)
    for name, option in options.items():
        if isinstance(option, torch.Tensor):
            options[name] = option.tolist()  # a copy: the tensor may be overwritten before the gradients
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _recorded.Attention.apply(*tensors, options)
    found = _attn.sdpa(query, key, value, mask, sinks=sinks, return_lse=return_lse, **options)
    return found if return_lse else (found, None)


def _refuse_gradient(name: str, option) -> None:
    """Refuses a tensor that would silently not be trained."""
    if isinstance(option, torch.Tensor) and option.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"not supported: the gradient of {name}")


def _called(query, key, value, mask, sinks, options):
    """Out and lse by the operator."""
    return torch.ops.attn.sdpa(query, key, value, *_operators.given(dict(options, attn_mask=mask, sinks=sinks)))


def _folded(name: str, tensor: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    if tensor.shape[:-3] != lead:
        raise ValueError(f"{name} has the leading axes {list(tensor.shape[:-3])}, query {list(lead)}")
    return tensor.flatten(0, len(lead) - 1)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """As autocast does it: all floats but double."""
    if (isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.is_floating_point()
            and tensor.dtype != torch.float64):
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


def _slopes(heads: int) -> list[float]:
    """The published slopes of ALiBi, as `attn.sdpa` has them: in Python, because torch.compile follows it here."""
    whole = 1 << (max(heads, 1).bit_length() - 1)
    series = lambda n: [2.0 ** (-8.0 * (head + 1) / n) for head in range(n)]
    return (series(whole) + series(2 * whole)[::2])[:heads]


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
    types than the CPU's float32, float16 and bfloat16, and a dropout_p of 1. The result counts both.
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
        if strict or dropout_p < 1.0 and _supported(query, key, value, attn_mask):
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
    types = {x.dtype for x in tensors[:3]}
    cast = torch.is_autocast_enabled("cpu")  # makes one type of all
    return (same and all(x.device.type == "cpu" and x.layout is torch.strided for x in tensors)
            and types <= {torch.float32, torch.float16, torch.bfloat16} and (cast or len(types) == 1))
