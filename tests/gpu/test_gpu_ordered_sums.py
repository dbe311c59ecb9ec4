"""batch_invariant(ordered_sums=n) on a GPU: a batch gives parameters the bits of its micro-batches, by either host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from cases import BF16, FP32

import fusednorm
from fusednorm import batch_invariant, force, sm_margin

pytestmark = pytest.mark.gpu

HOSTS = {"C++": contextlib.nullcontext, "Python": lambda: force(None)}
BLOCK = 512
WIDTHS = [(256, BF16), (1024, BF16), (1040, FP32), (1987, BF16), (2048, FP32), (4096, BF16), (8192, FP32),
          (12288, BF16), (33001, BF16)]  # fmt: skip


def draw(*shape, dtype=FP32, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def gradients(norm: Callable, rows: list[torch.Tensor], parameters: list[torch.Tensor], pieces: list[int]):
    """Those of the parameters, accumulated over pieces of the rows, and those of rows."""
    leaves, of_rows = [each.clone().requires_grad_() for each in parameters], []
    for parts in zip(*(each.split(pieces) for each in rows), strict=True):
        *given, grad = (each.clone().requires_grad_() for each in parts)
        y = norm(*given, *leaves)
        y.backward(grad.detach())
        of_rows.append([each.grad for each in given])
    return [each.grad for each in leaves] + [torch.cat(each) for each in zip(*of_rows, strict=True)]


def assert_same(norm, rows, parameters, pieces, host, block=BLOCK):
    """Twice: C++ runs the second call of a kind."""
    with batch_invariant(ordered_sums=block), HOSTS[host]():
        for _ in range(2):
            whole = gradients(norm, rows, parameters, [len(rows[0])])
            accumulated = gradients(norm, rows, parameters, pieces)
            with sm_margin(32):
                beside = gradients(norm, rows, parameters, [len(rows[0])])
            assert all(torch.equal(*pair) for pair in zip(whole, accumulated, strict=True))
            assert all(torch.equal(*pair) for pair in zip(whole, beside, strict=True))
    with force("reference"):
        for got, want in zip(whole, gradients(norm, rows, parameters, [len(rows[0])]), strict=True):
            assert (got.double() - want.double()).norm() <= 0.01 * want.double().norm()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("cols, dtype", WIDTHS, ids=str)
def test_layer_norm(cols, dtype, host):
    rows = [draw(3 * BLOCK + 77, cols, dtype=dtype, seed=at) for at in range(2)]
    norm = lambda x, *parameters: fusednorm.functional.layer_norm(x, (cols,), *parameters)  # noqa: E731
    assert_same(norm, rows, [draw(cols, seed=7), draw(cols, seed=8)], [BLOCK] * 3 + [77], host)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("cols, dtype", WIDTHS, ids=str)
def test_rms_norm_whose_first_piece_has_several_blocks(cols, dtype, host):
    rows = [draw(4 * BLOCK, cols, dtype=dtype, seed=at) for at in range(2)]
    norm = lambda x, weight: fusednorm.functional.rms_norm(x, (cols,), weight)  # noqa: E731
    assert_same(norm, rows, [draw(cols, seed=7)], [2 * BLOCK, BLOCK, BLOCK], host)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("first", [True, False])
def test_gated_norms(first, group_size, host):
    rows = [draw(2 * BLOCK + 9, 2048, dtype=BF16, seed=at) for at in range(3)]

    def norm(x, gate, weight):
        return fusednorm.rms_norm_gated(x, gate, weight, norm_before_gate=first, group_size=group_size)

    assert_same(norm, rows, [draw(2048, seed=7)], [BLOCK, BLOCK, 9], host)


@pytest.mark.parametrize("host", HOSTS)
def test_gated_norms_of_columns_of_one_tensor(host):
    rows = [draw(2 * BLOCK + 9, 2 * 1024 + 64, dtype=BF16), draw(2 * BLOCK + 9, 1024, dtype=BF16, seed=1)]
    norm = lambda x, weight: fusednorm.rms_norm_gated_packed(x, (64, 1088), (1088, 2112), weight)[0]  # noqa: E731
    assert_same(norm, rows, [draw(1024, seed=7)], [BLOCK, BLOCK, 9], host)


@pytest.mark.parametrize("host", HOSTS)
def test_sums_and_residuals(host):
    rows = [draw(2 * BLOCK + 9, 3072, dtype=BF16, seed=at) for at in range(3)]
    parameters = [draw(3072, seed=7), draw(3072, seed=8)]
    assert_same(lambda *given: sum(fusednorm.add_layer_norm(*given)), rows, parameters, [BLOCK, BLOCK, 9], host)
    assert_same(fusednorm.layer_norm_add, rows, parameters, [BLOCK, BLOCK, 9], host)


@pytest.mark.parametrize("host", HOSTS)
def test_modulated_norms(host):
    rows = [draw(8, 256, 1152, dtype=BF16), draw(8, 1152, seed=1), draw(8, 256, 1152, dtype=BF16, seed=2)]

    def norm(x, scale, shift, weight):
        return fusednorm.ada_layer_norm(x, scale, shift, weight=weight)

    assert_same(norm, rows, [draw(1152, seed=7), draw(1152, seed=8)], [2] * 4, host)
