"""Gradients as trainings take them: by checkpoints, under autocast, in compiled graphs with dropout, by torch.func."""

import pytest

torch = pytest.importorskip("torch")

import attn.torch
from torch.utils.checkpoint import checkpoint

F = torch.nn.functional


def inputs(*shape):
    torch.manual_seed(5)
    return [torch.randn(*shape, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, dict(dropout_p=0.5), dict(is_causal=True, sinks=[0.1, 0.2])], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_gives_the_same_gradients(reentrant, options):
    """It computes the call again for the gradients, with the same draws."""
    x = inputs(2, 2, 9, 8)
    call = lambda *x: attn.torch.sdpa(*x, **options)
    torch.manual_seed(1)
    want = torch.autograd.grad(call(*x).square().sum(), x)
    torch.manual_seed(1)
    checkpoint(call, *x, use_reentrant=reentrant).square().sum().backward()
    for tensor, gradient in zip(x, want):
        assert torch.equal(tensor.grad, gradient)


def test_a_checkpoint_of_the_operator():
    """As in a compiled graph: what it saved is unpacked once."""
    x = inputs(2, 2, 9, 8)
    out = checkpoint(lambda *x: torch.ops.attn.sdpa(*x)[0], *x, use_reentrant=False)
    want = torch.autograd.grad(attn.torch.sdpa(*x).sum(), x)
    for found, wanted in zip(torch.autograd.grad(out.sum(), x), want):
        assert torch.equal(found, wanted)


def test_dropout_in_one_graph_draws_anew():
    torch._dynamo.reset()
    x = inputs(2, 2, 9, 8)
    compiled = torch.compile(lambda *x: attn.torch.sdpa(*x, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = compiled(*x), compiled(*x)
    torch.manual_seed(1)
    assert torch.equal(first, compiled(*x)) and not torch.equal(first, second)
    # The gradients drop what the call dropped: they are those of the weights that are left.
    value = x[2]
    gradient, = torch.autograd.grad(first.sum(), value, retain_graph=True)
    torch.testing.assert_close((gradient * value).sum(), first.sum(), atol=1e-4, rtol=1e-4)


def test_autocast_casts_as_torch_does():
    """Rotary positions give float32 beside bfloat16."""
    q, k, v = inputs(2, 2, 9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = F.scaled_dot_product_attention(q, k, v.bfloat16())
        found = attn.torch.sdpa(q, k, v.bfloat16())
        with attn.torch.enabled() as calls:
            again = F.scaled_dot_product_attention(q, k, v.bfloat16())
        compiled = torch.compile(lambda q: attn.torch.sdpa(q, k, v), fullgraph=True, backend="aot_eager")(q)
        with pytest.raises(TypeError, match="query is float64"):  # which autocast leaves alone
            attn.torch.sdpa(q.double(), k.double(), v.double())
    assert calls.computed == 1 and found.dtype == want.dtype == torch.bfloat16
    assert torch.equal(found, again) and torch.equal(found, compiled)
    torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)
    found.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_functional_gradients():
    """torch.func's grad, over a batch too. Its transforms see the operator."""
    x = inputs(2, 2, 9, 8)
    loss = lambda q, k, v: attn.torch.sdpa(q, k, v, is_causal=True).square().sum()
    want = torch.autograd.grad(loss(*x), x)
    plain = [tensor.detach() for tensor in x]
    for found, wanted in zip(torch.func.grad(loss, (0, 1, 2))(*plain), want):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*plain), want):
        torch.testing.assert_close(found, wanted)  # of each sequence by itself, and the loss is their sum
    sums = torch.func.grad(lambda *x: torch.func.vmap(loss)(*x).sum(), (0, 1, 2))(*plain)
    for found, wanted in zip(sums, want):
        torch.testing.assert_close(found, wanted)
    mask = torch.zeros(9, 9)
    found = torch.func.grad(lambda mask: attn.torch.sdpa(*plain, mask, sinks=torch.zeros(2)).square().sum())(mask)
    learned = mask.requires_grad_()
    attn.torch.sdpa(*plain, learned, sinks=torch.zeros(2)).square().sum().backward()
    torch.testing.assert_close(found, learned.grad)


def test_tables_are_read_before_they_change():
    x = inputs(2, 2, 9, 8)
    lens = torch.tensor([3, 9])
    out = attn.torch.sdpa(*x, kv_lens=lens)
    lens.fill_(0)
    found = torch.autograd.grad(out.sum(), x)
    want = torch.autograd.grad(attn.torch.sdpa(*x, kv_lens=[3, 9]).sum(), x)
    for one, other in zip(found, want):
        assert torch.equal(one, other)
