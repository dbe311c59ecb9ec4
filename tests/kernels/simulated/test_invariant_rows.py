"""Under batch_invariant, compiled kernels give a row the same bits in every call that it is part of."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from cases import BF16, FP16, FP32, packed_slice, row_strided, unaligned
from head_norms import HeadCase
from simulator.host import simulated

from fusednorm import batch_invariant

OPS = torch.ops.fusednorm


class Rows(NamedTuple):
    """A norm of `rows` rows, of which another call has only `some`, in another order, layout and number of SMs."""

    norm: str
    cols: int
    dtype: torch.dtype
    device: str = "H200"
    rows: int = 7
    some: tuple[int, ...] = (5, 2, 3)
    sms: tuple[int, int] = (2, 1)  # at least twice the largest cluster


FORWARDS = [
    Rows("layer", 200, BF16),
    Rows("rms", 1000, FP32, rows=60, some=(*range(31, 48), 3)),
    Rows("layer", 1032, BF16),  # the last chunk of a row is a tail
    Rows("rms", 1987, FP16),  # an odd length
    Rows("layer", 12288, FP32, rows=3, some=(2,), sms=(16, 8)),  # a cluster
    Rows("layer", 33001, BF16, rows=2, some=(1,)),  # column tiles
    Rows("layer", 768, BF16, "A100"),
    Rows("layer", 4096, BF16, "B200", rows=3, some=(2, 0)),
]
BACKWARDS = [  # of float32, whose last bits 16-bit outputs would hide
    Rows("layer", 200, FP32, rows=60, some=(*range(31, 48), 3)),
    Rows("rms", 1000, FP32),
    Rows("layer", 1032, FP32),
    Rows("rms", 1987, FP16),
    Rows("rms", 12288, FP32, rows=3, some=(2,), sms=(16, 8)),
    Rows("layer", 768, FP32, "A100"),
    Rows("layer", 200, BF16, "B200", rows=60, some=(*range(31, 48), 3)),
    Rows("rms", 5120, FP32, rows=3, some=(2,), sms=(16, 8)),  # dy * weight must not become part of a multiply-add
]
LAYOUTS = (row_strided, unaligned, lambda rows: packed_slice(rows[:, None])[:, 0])


def numbers(shape, dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).to(dtype)


def assert_same_rows(whole, part, some) -> None:
    for got, want in zip(part, whole, strict=True):
        got, want = (each.flatten(0, -2).contiguous() for each in (got, want))
        assert torch.equal(got.view(torch.uint8), want[list(some)].view(torch.uint8))


@pytest.mark.parametrize("case", FORWARDS, ids=str)
def test_y_and_the_statistics_of_a_row(case):
    x, weight = numbers((case.rows, case.cols), case.dtype), numbers((case.cols,), case.dtype)

    def normalize(rows, sms):
        with batch_invariant(), simulated(case.device, sms) as simulation:
            op, more = (OPS.layer_norm_fwd, [weight]) if case.norm == "layer" else (OPS.rms_norm_fwd, [])
            outputs = op(rows, (case.cols,), weight, *more, 1e-5)
        assert simulation.launched
        return outputs

    whole = normalize(x, case.sms[0])
    layout = LAYOUTS[case.cols % len(LAYOUTS)]
    assert_same_rows(whole, normalize(layout(x[list(case.some)]), case.sms[1]), case.some)


@pytest.mark.parametrize("case", BACKWARDS, ids=str)
def test_dx_of_a_row_whatever_else_is_wanted(case):
    x, weight = numbers((case.rows, case.cols), case.dtype), numbers((case.cols,), case.dtype)
    grad = numbers((2, case.rows, case.cols), case.dtype)[1]
    statistics = [x.float().mean(1), x.float().square().mean(1).rsqrt()][case.norm == "rms" :]

    def differentiate(rows, sms, mask, layout=lambda tensor: tensor):
        given = layout(grad[rows]), layout(x[rows]), (case.cols,), *[each[rows] for each in statistics], weight
        with batch_invariant(), simulated(case.device, sms) as simulation:
            if case.norm == "layer":
                dx, *_ = OPS.layer_norm_bwd(*given, weight, mask)
            else:
                dx, *_ = OPS.rms_norm_bwd(*given, mask[:2])
        assert simulation.launched
        return (dx,)

    whole = differentiate(list(range(case.rows)), case.sms[0], (True, True, True))
    layout = LAYOUTS[case.cols % len(LAYOUTS)]
    part = differentiate(list(case.some), case.sms[1], (True, False, False), layout)
    assert_same_rows(whole, part, case.some)


def test_norms_of_heads():
    """One head of one token, in rows one element off, has the bits that it has among all."""
    case = HeadCase(cols=80, heads=2, kv_heads=1, tokens=3, dtype=FP32, rotary=40, norm="layer")
    given, grads = case.tensors(), []
    with batch_invariant(), simulated("H200", 2) as simulation:
        whole = case.run(given)
        grads = [torch.randn_like(each) for each in whole]
        of_whole = torch.autograd.grad(whole, [given["q"], given["k"]], grads)
    some = {name: each.detach() for name, each in given.items()}
    for name in "qk":
        some[name] = unaligned(some[name][1:, -1:, -1:]).requires_grad_()
    tables = tuple(each[-1:] for each in case.tables())
    with batch_invariant(), simulated("H200", 1) as other:
        part = case.run(some, rotary=tables)
        of_part = torch.autograd.grad(part, [some["q"], some["k"]], [each[1:, -1:, -1:] for each in grads])
    assert simulation.launched and other.launched
    for got, want in zip((*part, *of_part), (*whole, *of_whole), strict=True):
        assert torch.equal(got, want[1:, -1:, -1:])


def test_without_it_a_row_depends_on_the_number_of_rows():
    """Else the tests above would show nothing. Of one width a table may name plans that add up a row alike."""
    differ = []
    for cols in (768, 1024, 2048):
        x, weight, found = numbers((100, cols), FP32), numbers((cols,), FP32), []
        for rows in (100, 3):
            with simulated("H200", 2):
                found.append(OPS.layer_norm_fwd(x[:rows], (cols,), weight, None, 1e-5)[2][:3])
        differ.append(not torch.equal(*found))
    assert any(differ)
