"""Eager calls with gradients: an autograd.Function around the kernels.

The operators of `_operators` do the same, but torch's dispatcher takes a hundred microseconds for a call of theirs and
its gradient. And torch.func differentiates a Function, and no operator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import _attn, _operators

# What may stand between a function and its tensors, and what says that it does.
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_tracing = torch._C._get_tracing_state
transform = torch._C._functorch.peek_interpreter_stack
_TRANSFORMS = torch._C._functorch.TransformType
_CLASSES = (torch.Tensor, torch.nn.Parameter)


def is_seen() -> bool:
    """Whether a mode or a tracer looks at calls: it shall see the operator."""
    return _dispatch_modes() != 0 or _function_modes() != 0 or _tracing() is not None


def is_plain(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether they are tensors that the kernels read."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _CLASSES or not tensor.is_cpu):
            return False
    return True


def differentiates() -> bool:
    """Whether torch.func differentiates the call, perhaps of a batch: it needs a Function."""
    level = transform()
    return level is not None and level.key() in (_TRANSFORMS.Grad, _TRANSFORMS.Vmap)


def _save(ctx, tensors, output, options):
    ctx.options = options
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _gradients(ctx, grad_out, _):
    query, key, value, out, lse, mask, sinks = ctx.saved_tensors  # once: a checkpoint unpacks them once
    _, _, _, by_mask, by_sinks, _ = ctx.needs_input_grad
    tensors = (grad_out, query, key, value, out, lse)
    if (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_seen() or transform() is not None
            or not is_plain((grad_out,))):
        # With create_graph, gradients of the gradients must be refused.
        *found, dsinks, dmask = Gradients.apply(*tensors, mask, sinks, by_mask, ctx.options)
        return *found, dmask if by_mask else None, dsinks if by_sinks else None, None
    found = _attn.sdpa_backward(*tensors, mask, sinks=sinks, return_dmask=by_mask, **ctx.options)
    return (*found[:3], found[-1].to(mask.dtype) if by_mask else None,
            found[3].to(sinks.dtype) if by_sinks else None, None)


class Attention(torch.autograd.Function):
    """Out and lse, with gradients by query, key, value, mask and sinks. options: keywords of the native function."""

    @staticmethod
    def forward(ctx, query, key, value, mask, sinks, options):
        output = _attn.sdpa(query, key, value, mask, sinks=sinks, return_lse=True, **options)
        _save(ctx, (query, key, value, mask, sinks), output, options)
        return output

    backward = staticmethod(_gradients)


class Transformed(torch.autograd.Function):
    """The same in the form that torch.func takes, whose calls are slower."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, mask, sinks, options):
        return torch.ops.attn.sdpa(query, key, value, *_operators.given(dict(options, attn_mask=mask, sinks=sinks)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs[:5], output, inputs[5])

    backward = staticmethod(_gradients)


class Gradients(torch.autograd.Function):
    """The gradients, which have none themselves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_out, query, key, value, out, lse, mask, sinks, by_mask, options):
        given = _operators.given(dict(options, attn_mask=mask, sinks=sinks))
        return torch.ops.attn.sdpa_backward(grad_out, query, key, value, out, lse, *given, return_dmask=by_mask)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_operators.refuse)
