"""A recipe is repeated only for tensors that are like those it was made for, and never under modes or transforms."""

from __future__ import annotations

import pytest
import torch
from op_log import OpLog
from torch.nn import Parameter

from fusednorm.host import likeness, torch_compat

X, WEIGHT = torch.randn(4, 8), Parameter(torch.randn(8))


@pytest.fixture(params=[likeness.make_guard, likeness.in_cpp, likeness.in_python], ids=lambda made: made.__name__)
def made(request):
    return request.param


@pytest.fixture
def is_alike(made):
    return made([X, WEIGHT])


def test_other_values_at_other_addresses_are_alike(is_alike):
    assert is_alike(torch.zeros(4, 8), Parameter(torch.zeros(8)))
    assert is_alike(torch.zeros(5, 8)[1:], WEIGHT)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(5, 8),
        torch.randn(2, 2, 8),
        torch.randn(4, 16)[:, :8],
        torch.randn(8, 4).t(),
        torch.randn(4, 8, dtype=torch.float64),
        torch.randn(4, 8, device="meta"),
        torch.randn(4, 8, requires_grad=True),
        torch._neg_view(torch.randn(4, 8)),
        torch.randn(4, 8).to_sparse(),
        Parameter(torch.randn(4, 8)),
        None,
    ],
    ids=lambda x: "None" if x is None else f"{type(x).__name__} {tuple(x.shape)} {x.dtype} {x.device} {x.layout}",
)
def test_another_look_is_not_alike(is_alike, x):
    assert not is_alike(x, WEIGHT)


def test_subclasses_are_not_alike(is_alike):
    class Subclass(torch.Tensor):
        pass

    assert not is_alike(X.as_subclass(Subclass), WEIGHT)


def test_one_tensor_in_two_places_is_not_alike(made):
    assert made([X, X.clone()])(X, X.clone())
    assert not made([X, X.clone()])(X, X)


def test_nothing_is_alike_under_a_dispatch_mode(is_alike):
    with OpLog():
        assert not is_alike(X, WEIGHT)
    assert is_alike(X, WEIGHT)


def test_nothing_is_alike_inside_a_transform_and_its_tensors_never_are(is_alike):
    seen = []

    def function(x):
        seen.append(x)
        assert not is_alike(x, WEIGHT) and not is_alike(X, WEIGHT)
        return x.sum()

    torch.func.grad(function)(X)
    torch.func.vmap(function)(torch.randn(3, 4, 8))
    assert len(seen) == 2 and not any(is_alike(leaked, WEIGHT) for leaked in seen)


def test_nothing_is_alike_while_a_trace_is_written(is_alike):
    def function(x):
        assert not is_alike(X, WEIGHT)
        return x + 1

    torch.jit.trace(function, X, check_trace=False)


def test_below_autograd_only_what_was_seen_there_is_alike(made, is_alike):
    with torch._C._AutoDispatchBelowAutograd():
        assert not is_alike(X, WEIGHT)
        assert made([X, WEIGHT])(X, WEIGHT)


@pytest.mark.parametrize("guards", [None, lambda *tensors: None], ids=["none", "others"])
def test_a_torch_without_such_guards_is_served_in_python(guards, monkeypatch):
    monkeypatch.setattr(torch_compat, "TensorGuards", guards)
    is_alike = likeness.make_guard([X, WEIGHT])
    assert is_alike(X.clone(), WEIGHT) and not is_alike(X.double(), WEIGHT)
