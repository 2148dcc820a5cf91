"""The short way of `attn.torch.sdpa`: taken where nothing would see the operator, and nowhere else."""

import pytest

torch = pytest.importorskip("torch")

import attn.torch


def plain_calls(monkeypatch):
    """The operator's kernel, and a list of its calls: a call of the kernels that is not in it took the short way."""
    calls, own = [], torch.ops.attn.sdpa
    monkeypatch.setattr(torch.ops.attn, "sdpa", lambda *given: (calls.append(1), own(*given))[1])
    return calls


def test_a_plain_call_takes_the_short_way(monkeypatch):
    calls, x = plain_calls(monkeypatch), torch.randn(1, 2, 5, 8)
    attn.torch.sdpa(x, x, x, torch.ones(5, 5, dtype=torch.bool), scale=0.3)
    with torch.inference_mode():
        attn.torch.sdpa(x, x, x)
    assert not calls
    for options in (dict(softcap=3.0), dict(return_lse=True), dict(dropout_p=0.5), dict(sinks=torch.zeros(2))):
        attn.torch.sdpa(x, x, x, **options)
    attn.torch.sdpa(x, torch.nn.Parameter(x), x).sum().backward()
    attn.torch.sdpa(x, x, x, torch.zeros(5, 5, requires_grad=True)).sum().backward()
    assert not calls
    attn.torch.sdpa(x.as_subclass(type("Derived", (torch.Tensor,), {})), x, x)
    assert calls


def test_modes_and_transforms_see_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(1, 2, 5, 8)
    with Record():
        attn.torch.sdpa(x, x, x)
    assert "attn.sdpa.default" in seen
    graph = make_fx(lambda x: attn.torch.sdpa(x, x, x))(x)
    assert any("attn.sdpa" in str(node.target) for node in graph.graph.nodes)
    assert attn.torch.sdpa(x.to("meta"), x.to("meta"), x.to("meta")).is_meta
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):  # not a result without a tangent
            attn.torch.sdpa(dual, x, x)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: attn.torch.sdpa(x, x, x), (x,), (x,))
    two = torch.stack([x, 2 * x])
    found = torch.func.vmap(lambda x: attn.torch.sdpa(x, x, x))(two)  # torch warns that it calls once for each
    assert torch.equal(found, torch.stack([attn.torch.sdpa(x, x, x) for x in two]))
