"""Norms with their surroundings in models on which automatic choices of schedules have failed, under enable_eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, FP32
from eager import watched_kernels
from hf_models import norm
from torch import Tensor

import fusednorm
from fusednorm.tools.oracle import STOCK_FACTOR

pytestmark = pytest.mark.gpu


# Each function takes leaves of the shapes that GRAPHS gives for it, and returns outputs to differentiate.
def reshaped_twice(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """y has two users: its gradient is a sum of two reshaped gradients."""
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return y.reshape(-1, x.shape[-1]), y.reshape(*x.shape[:-1], -1, 128)


def three_column_sums(x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """A bias is added before the norm: its gradient is a third sum over rows, beside dw and db."""
    return (F.layer_norm(x + addend, x.shape[-1:], weight, bias, 1e-5),)


def permuted_residual(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """x is stored heads first; its gradient has a second part, in the same strides."""
    heads_last = x.transpose(1, 2)
    return F.rms_norm(heads_last, x.shape[-1:], weight, 1e-6), heads_last


def shared_input(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Two norms of one input."""
    return tuple(F.layer_norm(x, x.shape[-1:], *parameters[i : i + 2], 1e-5) for i in (0, 2))


def scaled_with_residual(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """1 + weight, a residual, and a scale without dims."""
    return (F.rms_norm(x * scale, x.shape[-1:], 1 + weight, 1e-6) + x,)


GRAPHS: list[tuple[Callable, list[tuple[int, ...]], int]] = [  # graph, shapes of its leaves, its norms
    (reshaped_twice, [(1, 4096, 3072), (3072,)], 1),
    (three_column_sums, [(147456, 128), (128,), (128,), (128,)], 1),
    (permuted_residual, [(4, 16, 1024, 128), (128,)], 1),
    (permuted_residual, [(14, 8, 2048, 256), (256,)], 1),
    (shared_input, [(1, 16384, 2560), (2560,), (2560,), (2560,), (2560,)], 2),
    (scaled_with_residual, [(1, 4096, 3072), (3072,), ()], 1),
]


def gradients(graph: Callable, leaves: list[Tensor], draws: int) -> dict[str, list[Tensor]]:
    """Outputs and gradients by name; a list of gradients for `draws` random gradients of the outputs."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outputs = graph(*leaves)
    found = {f"output {i}": [y.detach()] for i, y in enumerate(outputs)}
    torch.manual_seed(1)
    for _ in range(draws):
        grads = [torch.randn(y.shape, device=y.device).to(BF16).to(y.dtype) for y in outputs]
        for i, grad in enumerate(torch.autograd.grad(outputs, leaves, grads, retain_graph=True)):
            found.setdefault(f"gradient {i}", []).append(grad)
    return found


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("graph", "shapes", "norm_count"), GRAPHS, ids=[graph.__name__ for graph, *_ in GRAPHS])
def test_graph_is_as_exact_as_with_atens_norms(graph, shapes, norm_count, dtype):
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    draws = 12 if () in shapes else 1  # the gradient of a scalar is one number: one error would be luck
    exact, stock = gradients(graph, [leaf.double() for leaf in leaves], draws), gradients(graph, leaves, draws)
    with watched_kernels() as calls, fusednorm.enable_eager():
        ours = gradients(graph, leaves, draws)
    assert len(calls.taken) == len(calls.all) == (1 + draws) * norm_count
    for name, want in exact.items():
        far, stock_far = (norm([a - b for a, b in zip(each[name], want, strict=True)]) for each in (ours, stock))
        assert far <= STOCK_FACTOR * stock_far + torch.finfo(dtype).eps / 2 * norm(want), name
