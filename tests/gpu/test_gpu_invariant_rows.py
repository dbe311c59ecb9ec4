"""batch_invariant on a GPU: a row's outputs and gradients have the same bits in every call, by either host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import head_norms
import pytest
import torch
from cases import BF16, FP16, FP32, row_strided, unaligned
from head_norms import HeadCase
from torch import Tensor

import fusednorm
from fusednorm import batch_invariant, force, sm_margin

pytestmark = pytest.mark.gpu

HOSTS = {"C++": contextlib.nullcontext, "Python": lambda: force(None)}
WIDTHS = [(64, BF16), (128, FP16), (256, FP32), (768, BF16), (1000, BF16), (1040, FP32), (1987, BF16), (2048, FP32),
          (4096, BF16), (5120, FP32), (8192, FP16), (12288, BF16), (16384, FP32), (33001, BF16),
          (65536, BF16)]  # fmt: skip
LAYOUTS = [lambda rows: rows, row_strided, unaligned]
PARTS = [slice(0, 1), slice(1700, 1701), slice(3, 700), torch.tensor([1999, 0, 17, 17, 1024])]
ROWS = 2000


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def both_ways(norm: Callable, rows: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of the rows. The last of these is that of the first output."""
    *given, grad = rows
    leaves = [each.detach().requires_grad_() for each in (*given, *parameters)]
    outputs = norm(*leaves)
    outputs = [*outputs] if isinstance(outputs, tuple) else [outputs]
    return outputs + list(torch.autograd.grad(outputs[0], leaves[: len(given)], grad))


def assert_rows_are_their_own(norm, rows: list[Tensor], parameters: list[Tensor], host: str) -> None:
    with batch_invariant(), HOSTS[host]():
        whole = both_ways(norm, rows, parameters)
        for at, part in enumerate(PARTS):
            layout = LAYOUTS[at % len(LAYOUTS)]
            with sm_margin(40 * (at % 2)):
                for _ in range(2):  # C++ runs the second call of a kind
                    found = both_ways(norm, [layout(each[part]) for each in rows], parameters)
            for got, want in zip(found, whole, strict=True):
                assert torch.equal(got, want[part]), f"part {at}: {int((got != want[part]).sum())} elements differ"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    "name, cols, dtype", [("rms_norm" if at % 2 else "layer_norm", *each) for at, each in enumerate(WIDTHS)], ids=str
)
def test_plain_norms(name, cols, dtype, host):
    rows, parameters = [draw(ROWS, cols, dtype=dtype, seed=at) for at in range(2)], [draw(cols, seed=7)]
    function = getattr(fusednorm.functional, name)
    parameters += [draw(cols, seed=8)] * (name == "layer_norm")
    assert_rows_are_their_own(lambda x, *of: function(x, (cols,), *of), rows, parameters, host)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("cols", [128, 1040, 4096])
def test_forms(cols, host):
    rows, weight = [draw(ROWS, cols, dtype=BF16, seed=at) for at in range(3)], [draw(cols, seed=7)]
    assert_rows_are_their_own(fusednorm.add_rms_norm, rows, weight, host)
    assert_rows_are_their_own(fusednorm.rms_norm_gated, rows, weight, host)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("cols", [1152, 1040])
def test_a_sample_alone_has_the_bits_that_it_has_among_others(cols, host):
    """And rows with a modulation each have the outputs of rows that share it; their dx may be of another kernel."""
    x = draw(4, 300, cols, dtype=BF16)
    scale, shift = (draw(4, 1, cols, dtype=BF16, seed=at) for at in (1, 2))
    rows = [x, scale, shift, draw(4, 300, cols, dtype=BF16, seed=3)]
    with batch_invariant(), HOSTS[host]():
        for _ in range(2):
            whole = both_ways(fusednorm.ada_layer_norm, rows, [])
            alone = both_ways(fusednorm.ada_layer_norm, [each[2:3] for each in rows], [])
            each_own = [rows[0], *[each.expand_as(x).contiguous() for each in rows[1:3]], rows[3]]
            of_rows = both_ways(fusednorm.ada_layer_norm, each_own, [])
        assert torch.equal(alone[0], whole[0][2:3]) and torch.equal(alone[1], whole[1][2:3])
        assert torch.equal(of_rows[0], whole[0])


HEADS = [
    HeadCase(cols=128, heads=32, kv_heads=8, tokens=600, dtype=BF16, rotary=128, table_dims="BS"),
    HeadCase(cols=64, heads=12, kv_heads=12, tokens=333, dtype=FP16, norm="layer", heads_first=True, rotary=64),
    HeadCase(cols=80, heads=5, kv_heads=1, tokens=100, dtype=FP32, rotary=40, interleaved=True),
    HeadCase(cols=72, heads=4, kv_heads=2, tokens=77, dtype=BF16, rotary=36, half_table=True),
]


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_norms_of_heads(case, monkeypatch):
    head_norms.without_formulas(monkeypatch)
    given, tables = case.tensors("cuda"), case.tables("cuda")
    weights = {name: each for name, each in given.items() if name not in "qk"}
    leaves, grads = [given["q"], given["k"]], [torch.randn_like(given[name]) for name in "qk"]
    at = slice(1, 2), slice(-2, None), slice(-2, None)  # the last heads of the last tokens
    some = tuple(each[-2:] if each.dim() == 2 else each[1:, -2:] for each in tables)
    with batch_invariant():
        for _ in range(2):
            whole = case.run(given, rotary=tables)
            whole = *whole, *torch.autograd.grad(whole, leaves, grads)
            part = [unaligned(each.detach()[at]).requires_grad_() for each in leaves]
            with sm_margin(40):
                found = case.run({"q": part[0], "k": part[1]} | weights, rotary=some)
                found = *found, *torch.autograd.grad(found, part, [each[at] for each in grads])
            assert all(torch.equal(got, want[at]) for got, want in zip(found, whole, strict=True))


@pytest.mark.parametrize("case", HEADS[:3], ids=str)
def test_ordered_sums_of_norms_of_heads(case, monkeypatch):
    """Three micro-batches of two samples, the last of one."""
    head_norms.without_formulas(monkeypatch)
    case = HeadCase(**{**vars(case), "batch": 5, "weight_dtype": FP32, "tokens": 8 * (case.tokens // 8)})
    given, tables = case.tensors("cuda"), case.tables("cuda")
    grads, names = [torch.randn_like(given[name]) for name in "qk"], [name for name in given if name not in "qk"]

    def sums(some: slice) -> list[Tensor]:
        part = {name: (each[some] if name in "qk" else each).detach().clone() for name, each in given.items()}
        part = {name: each.requires_grad_() for name, each in part.items()}
        of_some = tuple(each[some] if each.dim() == 3 else each for each in tables)
        got = case.run(part, rotary=of_some)
        return torch.autograd.grad(got, [part[name] for name in names], [each[some] for each in grads])

    with batch_invariant(ordered_sums=2 * case.tokens):
        with sm_margin(32):
            whole = sums(slice(0, 5))
        first, *rest = (sums(slice(start, start + 2)) for start in range(0, 5, 2))
    for each in rest:
        first = [a + b for a, b in zip(first, each, strict=True)]
    assert all(map(torch.equal, whole, first))


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("cols, dtype", [(128, BF16), (1000, FP32), (4096, BF16), (8192, FP16)], ids=str)
def test_ordered_column_sums(cols, dtype, total):
    tensors = [draw(3 * 512 + 77, cols, dtype=dtype, seed=at) for at in range(2)]
    with batch_invariant(ordered_sums=512):
        with sm_margin(32):
            whole = fusednorm.column_sum(tensors, total=total, dtype=FP32)
        parts = zip(*(each.split(512) for each in tensors), strict=True)
        first, *rest = (fusednorm.column_sum([*part], total=total, dtype=FP32) for part in parts)
    for each in rest:
        first = [a + b for a, b in zip(first, each, strict=True)]
    assert all(map(torch.equal, whole, first))
