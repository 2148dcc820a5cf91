"""Attention for Hugging Face's transformers.

    attn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attn")

Models on the CPU, in float32, float16 or bfloat16. Grouped heads, padding, sliding windows, soft-caps, sinks and caches
are computed as the library passes them; there is a gradient.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .torch import sdpa

__all__ = ["register"]


def register(name: str = "attn") -> None:
    """Makes `attn_implementation=name` known, with the boolean masks that the library makes for "sdpa".

    >>> import attn.transformers
    >>> attn.transformers.register()
    """
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, sdpa_mask)


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, softcap=None,
               s_aux=None, position_bias=None, **others):
    if others.get("output_attentions"):
        raise NotImplementedError('not supported: output_attentions; attn_implementation="eager" has them')
    # A window (others["sliding_window"]) is in the mask; the library leaves the mask out only if no key is too far.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # Without a mask one query sees all keys, and several are a prompt's first: they stand at the first keys.
    is_causal = bool(is_causal and attention_mask is None and query.shape[2] > 1)
    mask = attention_mask
    if position_bias is not None:
        mask = position_bias
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            mask = mask.masked_fill(~attention_mask, -torch.inf)
        elif attention_mask is not None:
            mask = mask + attention_mask
    out = sdpa(query, key, value, mask, dropout, is_causal, scaling, key.shape[1] != query.shape[1], softcap=softcap,
               sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None
