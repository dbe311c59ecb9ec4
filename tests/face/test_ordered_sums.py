"""batch_invariant(ordered_sums=n): gradients of parameters have the bits of micro-batches of n rows. Triton's
interpreter runs the portable kernels here; tests/kernels/simulated/test_blocks_of_rows.py runs compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from cases import BF16, FP16, FP32, FP64
from devices import planned_for
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import fusednorm
from fusednorm import batch_invariant
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner import limits
from fusednorm.planner.device import A100, H100
from fusednorm.settings import invariance


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch):
    monkeypatch.setattr(limits, "sort", [*limits.sort[:3], 3])  # CTAs: the interpreter runs one after another
    yield
    assert invariance.switch.invariance() == invariance.OFF


def test_what_is_no_number_of_rows_is_refused_in_one_sentence():
    rule = "^batch_invariant: ordered_sums must be"
    for wrong in (True, 8.0, "8"):
        with pytest.raises(TypeError, match=f"{rule} an int, the rows of a micro-batch, got {wrong!r}$"):
            batch_invariant(ordered_sums=wrong)
    for wrong in (0, -8, 100, 2**31):
        with pytest.raises(ValueError, match=f"{rule} a multiple of 8 rows, at most 1073741824, with on=True, got"):
            batch_invariant(ordered_sums=wrong)
    with pytest.raises(ValueError, match="got 8 with on=False"):
        batch_invariant(False, ordered_sums=8)


def test_the_innermost_block_says_how_many_rows():
    with batch_invariant(ordered_sums=16):
        assert invariance.switch.invariance() == 16
        with batch_invariant(ordered_sums=24):
            assert invariance.switch.invariance() == 24
        with batch_invariant():
            assert invariance.switch.invariance() == invariance.OF_ROWS
        assert invariance.switch.invariance() == 16


def test_explain_says_in_how_many_blocks_a_backward_runs():
    x, weight = torch.empty(100, 4096, device="meta"), torch.empty(4096, device="meta")
    with batch_invariant(ordered_sums=16):
        said = fusednorm.explain(x, (4096,), weight, device=H100)
        of_block = fusednorm.explain(x[:16], (4096,), weight, device=H100)
    assert "runs for 7 blocks of up to 16 rows in turn: ordered_sums" in str(said)
    assert said.plan == of_block.plan and not of_block.notes


# --- Bits ---


def draw(*shape, dtype=FP32, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + shape[-1]), dtype=FP64).to(dtype)


def layer_norm(x, weight, bias):
    return fusednorm.functional.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x, weight):
    return fusednorm.functional.rms_norm(x, x.shape[-1:], weight)


def gated_by_group(x, gate, weight, bias):
    return fusednorm.layer_norm_gated(x, gate, weight, bias, group_size=x.shape[-1] // 2)


def gate_first(x, gate, weight):
    return fusednorm.rms_norm_gated(x, gate, weight, norm_before_gate=False)


def packed(packed, weight):
    cols = weight.shape[0]
    return fusednorm.rms_norm_gated_packed(packed, (8, 8 + cols), (8 + cols, 8 + 2 * cols), weight)


def modulated(x, residual, scale, gate, shift, weight, bias):
    return fusednorm.ada_layer_norm(x, scale, shift, residual=residual, gate=gate, weight=weight, bias=bias)


def of_tables(x, weight, scale, other_scale, shift, other_shift):
    tables = torch.stack([scale, other_scale]), torch.stack([shift, other_shift])
    return fusednorm.ada_rms_norm(x, *tables, index=(x[..., 0] > 0).long(), weight=weight)


@dataclass(frozen=True)
class Norm:
    """A norm, the names of its tensors with rows, of those with a row for each sample, and of its parameters."""

    call: Callable
    rows: tuple[str, ...] = ("x",)
    samples: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ("weight", "bias")
    width: Callable[[int], int] = lambda cols: cols  # of tensors with rows

    def train(self, batch, cols: int, pieces: list[int], sms: int, dtype=FP32) -> list[torch.Tensor]:
        """The gradients of the parameters, accumulated over pieces of a batch, of so many of its first dim each, and
        those of rows and samples. batch: rows, or samples and their rows."""
        of_rows = [draw(*batch, self.width(cols), dtype=dtype, seed=at) for at, _ in enumerate(self.rows)]
        of_samples = [draw(batch[0], cols, dtype=dtype, seed=10 + at) for at, _ in enumerate(self.samples)]
        parameters = {name: draw(cols, seed=20 + at).requires_grad_() for at, name in enumerate(self.parameters)}
        by_piece, names = [], (*self.rows, *self.samples)
        parts = zip(*(each.split(pieces) for each in (*of_rows, *of_samples)), strict=True)
        with kernels_on("cpu"), planned_for(replace(A100, sm_count=sms)):
            for nth, part in enumerate(parts):
                leaves = [each.clone().requires_grad_() for each in part]
                outputs = self.call(**dict(zip(names, leaves, strict=True)), **parameters)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                start = sum(pieces[:nth])
                grads = [draw(*batch, each.shape[-1], dtype=dtype, seed=30 + at) for at, each in enumerate(outputs)]
                torch.autograd.backward(outputs, [each[start : start + pieces[nth]] for each in grads])
                by_piece.append([each.grad for each in leaves])
        of_pieces = [torch.cat(each) for each in zip(*by_piece, strict=True)]
        return [each.grad for each in parameters.values()] + of_pieces


NORMS = {
    "layer": Norm(layer_norm),
    "rms": Norm(rms_norm, parameters=("weight",)),
    "sum": Norm(fusednorm.add_layer_norm, ("x", "residual")),
    "plus_residual": Norm(fusednorm.rms_norm_add, ("x", "residual"), parameters=("weight",)),
    "gated_by_group": Norm(gated_by_group, ("x", "gate")),
    "gate_first": Norm(gate_first, ("x", "gate"), parameters=("weight",)),
    "of_tables": Norm(of_tables, parameters=("weight", "scale", "other_scale", "shift", "other_shift")),
    "packed": Norm(packed, ("packed",), parameters=("weight",), width=lambda cols: 2 * cols + 24),
}
MODULATED = Norm(modulated, ("x", "residual"), ("scale", "gate"), ("shift", "weight", "bias"))
UNWEIGHTED = Norm(fusednorm.ada_rms_norm, ("x",), ("scale", "shift"), ())  # no sum is over all rows
SCALED = Norm(modulated, ("x", "residual"), ("shift", "gate"), ("scale", "weight", "bias"))


def cut(whole: int, into: int) -> list[int]:
    """As pieces of `into`. The last piece may be smaller."""
    return [into] * (whole // into) + [whole % into] * (whole % into > 0)


def all_equal(some, others) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(some, others, strict=True)]


# Examples take long: too long to shrink one.
bits = settings(deadline=None, max_examples=3, phases=[Phase.explicit, Phase.generate])


@pytest.mark.parametrize("name", NORMS)
@bits
@given(st.integers(1, 3), st.integers(1, 50), st.sampled_from([8, 24, 72]), st.sampled_from([FP32, BF16, FP16]))
@example(1, 37, 24, FP32)  # of five blocks
def test_a_batch_has_the_bits_of_its_micro_batches(name, eighths, rows, cols, dtype):
    block = 8 * eighths
    with batch_invariant(ordered_sums=block):
        whole = NORMS[name].train((rows,), cols, [rows], sms=1 + rows % 16, dtype=dtype)
        accumulated = NORMS[name].train((rows,), cols, cut(rows, block), sms=16, dtype=dtype)
    assert all(all_equal(whole, accumulated))


@pytest.mark.parametrize("norm", [MODULATED, SCALED, UNWEIGHTED], ids=["of_samples", "scale_of_all", "unweighted"])
@bits
@given(st.integers(1, 3), st.integers(1, 6), st.sampled_from([1, 4, 8]), st.sampled_from([FP32, BF16]))
def test_so_has_a_batch_of_samples_that_share_modulations(norm, of_block, samples, rows, dtype):
    with batch_invariant(ordered_sums=8 * of_block):
        whole = norm.train((samples, rows), 24, [samples], sms=3, dtype=dtype)
        accumulated = norm.train((samples, rows), 24, cut(samples, 8 * of_block // rows), sms=16, dtype=dtype)
    assert all(all_equal(whole, accumulated))


def test_without_it_the_sums_have_other_bits():
    """Else the tests above would show nothing."""
    with batch_invariant():
        whole, pieces = (NORMS["layer"].train((40,), 40, cut(40, size), sms=7) for size in (40, 16))
    assert all_equal(whole, pieces) == [False, False, True]


def test_rows_that_share_a_modulation_are_in_one_block_or_it_says_so():
    rule = "the rows that share a modulation must divide ordered_sums of batch_invariant, got 5 rows and 8$"
    with batch_invariant(ordered_sums=8), pytest.raises(RuntimeError, match=rule):
        MODULATED.train((3, 5), 24, [3], sms=3)
