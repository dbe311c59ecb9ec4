"""Norms with a gate by groups of columns, and of columns of one tensor, on a GPU."""

from __future__ import annotations

import pytest
import torch
from norm_forms import BF16, FP32, composite, error, gradients, leaves, run

import fusednorm
from bench.written import rows_of
from fusednorm.operands import FORM_OPS

pytestmark = pytest.mark.gpu
gated = pytest.mark.parametrize("op", [op for op in FORM_OPS if "gate" in rows_of(op)], ids=lambda op: op.name)
SHAPES = [(4096, 8192, 1024), (333, 1536, 64), (100, 1000, 125), (64, 32768, 16384), (3, 131072, 65536), (1, 256, 128)]
CASES = [  # (shape, variant, dtypes of a LayerNorm and an RMSNorm), in turn
    (shape, variant, (BF16, FP32)[:: 1 if (at + which) % 2 else -1])
    for at, shape in enumerate(SHAPES)
    for which, variant in enumerate((None, "multi_wave", "async_copy", "pipelined"))
]


def by_group(op, given, size):
    """The composite of each group by itself."""
    groups = zip(*(each.split(size, -1) for each in given.values()), strict=True)
    return (torch.cat([composite(op, dict(zip(given, each, strict=True)))[0] for each in groups], -1),)


@gated
@pytest.mark.parametrize("shape, variant, dtypes", CASES, ids=str)
def test_groups_err_no_more_than_plain_code(op, shape, variant, dtypes):
    *sizes, size = shape
    given = leaves(op, dtypes[op.norm == "rms"], shape=tuple(sizes), device="cuda")
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    with fusednorm.force(variant):
        got = run(op, given, group_size=size)
        grads = gradients(got, given)
    plain, want = by_group(op, given, size), by_group(op, exact, size)
    pairs = zip((*got, *grads), (*plain, *gradients(plain, given)), (*want, *gradients(want, exact)), strict=True)
    for ours, theirs, right in pairs:
        least = (torch.finfo(ours.dtype).eps * 0.01 + 2e-6 * sizes[0] ** 0.5) * float(right.detach().abs().amax())
        if ours.dim() == 1:  # a sum of as many terms as there are rows, which cancel
            least += 2 * torch.finfo(torch.float32).eps * sizes[0]
        assert error(ours, right) <= 1.1 * error(theirs, right) + least


@gated
def test_a_gate_inside_a_projection_gives_the_bits_of_contiguous_rows_again_and_again(op):
    given = leaves(op, BF16, shape=(6, 512, 2048), device="cuda")
    want = run(op, given, group_size=256)
    wanted = gradients(want, given)
    packed = torch.cat([given["gate"].detach()] * 3, -1)
    inside = given | {"gate": packed[..., 2048:4096].requires_grad_()}
    for _ in range(2):
        got = run(op, inside, group_size=256)
        for ours, right in zip((*got, *gradients(got, inside)), (*want, *wanted), strict=True):
            assert torch.equal(ours, right)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("shape", [(4096, 4096, 10240), (9000, 128, 384), (100, 77, 400), (16, 65536, 131072)], ids=str)
def test_columns_of_one_tensor_give_the_bits_of_slices_again_and_again(norm, after, shape):
    rows, cols, width = shape
    packed = torch.randn(rows, width, device="cuda", dtype=BF16, requires_grad=True)
    weight, bias = (torch.randn(cols, device="cuda", requires_grad=True) for _ in range(2))
    x, gate = (width - cols, width), (0, cols)
    settings = {"norm_before_gate": after, "weight_offset": 1.0}
    for _ in range(2):
        outputs = getattr(fusednorm, f"{norm}_norm_gated_packed")(packed, x, gate, weight, bias, 1e-5, **settings)
        slices = packed[..., slice(*x)], packed[..., slice(*gate)]
        want = getattr(fusednorm, f"{norm}_norm_gated")(*slices, weight, bias, 1e-5, **settings)
        assert torch.equal(outputs[0], want)
        others = [packed[..., cols : x[0]]] if x[0] > cols else []
        grads = [torch.randn_like(each) for each in outputs]
        ours = torch.autograd.grad(outputs, (packed, weight, bias), grads)
        right = torch.autograd.grad((want, *others), (packed, weight, bias), grads)
        assert all(map(torch.equal, ours, right))
