"""Triton's interpreter, as tools/interpreter.py and interpreting.py patch it, rounds as a GPU does, with this numpy."""

from __future__ import annotations

import pytest
import torch

from fusednorm.tools.interpreter import enable_interpreter

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def copy(src, dst, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < n).to(dst.dtype.element_ty), mask=offsets < n)


@triton.jit
def count_to(bound, out):
    steps = 0
    for _ in range(tl.load(bound) * 2):
        steps += 1
    tl.store(out, steps)


@pytest.mark.parametrize("source", [torch.float16, torch.float32, torch.float64])
def test_interpreted_casts_to_bfloat16_round_to_nearest_even(source):
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1.005859375, 1.99999, 0.0, 65504.0, float("inf"), float("nan"), 3e-5]
    x = torch.tensor(ties, dtype=source)
    out = torch.empty(len(ties), dtype=torch.bfloat16)
    copy[(1,)](x, out, len(ties), BLOCK=16)
    assert torch.equal(out.nan_to_num(nan=7.0), x.bfloat16().nan_to_num(nan=7.0))


def test_interpreted_loop_bound_may_come_from_memory():
    out = torch.zeros(1, dtype=torch.int32)
    count_to[(1,)](torch.tensor([21], dtype=torch.int32), out)
    assert out.item() == 42


def test_types_of_results_are_made_once():
    """Else tests take three times as long."""
    row, column = (tl.block_type(tl.float32, shape) for shape in ([1, 16], [16, 1]))
    assert tl.block_type(tl.float32, [1, 16]).shape is row.shape and row.shape != column.shape
    assert tl.block_type(tl.float16, [1, 16]).element_ty is tl.float16
    some, other = tl.tensor("some", row), tl.tensor("other", row)
    assert some.shape is other.shape and (some.handle, other.handle) == ("some", "other")


def test_interpreter_cannot_be_enabled_after_triton_was_imported(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="before triton is imported"):
        enable_interpreter()
