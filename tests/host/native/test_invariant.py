"""The C++ host side under batch_invariant: programs of their own, packed operands, backwards as their forwards."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP32, make_case, row_strided, unaligned
from norms import assert_right, backward_of, forward_of
from test_repeats import assert_launched_as_by_itself, operands_of

from fusednorm import batch_invariant, functional
from fusednorm.tools.oracle import make_inputs

CASE = make_case("layer", (5, 2048), (BF16,) * 3)  # of few rows, for which there is another plan
IN_BLOCKS = [make_case(norm, (20, cols), (BF16, FP32, BF16)) for norm, cols in (("layer", 256), ("rms", 100))]


def builds_of(gpu, call) -> list:
    """What a call launches that C++ repeats."""
    call()
    gpu.launched.clear()
    with gpu.repeating():
        call()
    return [each.build for each in gpu.launched]


@pytest.mark.parametrize("direction", [forward_of, backward_of])
def test_programs_are_kept_apart_by_the_setting(direction, gpu):
    op, arguments = direction(CASE, make_inputs(CASE))
    free = builds_of(gpu, lambda: op(*arguments))
    with batch_invariant():
        own = builds_of(gpu, lambda: op(*arguments))
    assert own != free
    gpu.launched.clear()
    with gpu.repeating():
        op(*arguments)
    assert [each.build for each in gpu.launched] == free


@pytest.mark.parametrize("layout", [row_strided, unaligned, lambda rows: aligned_by_one(rows)])
def test_rows_that_are_not_packed_are_copied_without_python(layout, gpu):
    inputs = make_inputs(CASE)
    op, arguments = forward_of(CASE, inputs, x=layout(inputs.x))
    with batch_invariant():
        found = builds_of(gpu, lambda: op(*arguments))
        assert found == builds_of(gpu, lambda: forward_of(CASE, inputs)[0](*forward_of(CASE, inputs)[1]))
        gpu.launched.clear()
        with gpu.repeating():
            op(*arguments)
        (launched,) = gpu.launched
        outputs = op(*arguments)
    addresses = [value.address if hasattr(value, "address") else value for value in launched.parameters.values()]
    assert arguments[0].data_ptr() not in addresses
    assert_right(CASE, inputs, outputs)


def aligned_by_one(tensor):
    """Contiguous, one element behind an address that is a multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


def test_a_parameter_that_is_not_aligned_goes_to_python_and_is_copied(gpu):
    inputs = make_inputs(CASE)
    op, arguments = forward_of(CASE, inputs, weight=aligned_by_one(inputs.weight))
    with batch_invariant():
        for _ in range(2):
            with gpu.going_to_python("forward"):
                outputs = op(*arguments)
    assert_right(CASE, inputs, outputs)


def test_a_backward_after_the_block_does_as_its_forward_did(gpu):
    inputs = make_inputs(CASE)
    x = inputs.x.clone().requires_grad_()

    def train(of_forward: bool, of_backward: bool):
        with batch_invariant(of_forward):
            y = functional.layer_norm(x, (2048,), inputs.weight, inputs.bias)
        gpu.launched.clear()
        with batch_invariant(of_backward):
            torch.autograd.grad(y, x, inputs.grad_out)
        return [each.build for each in gpu.launched] or ["in Python"]

    free, own = (train(on, on) and train(on, on) for on in (False, True))
    assert free != own
    with gpu.repeating(4):
        assert train(True, False) == own and train(False, True) == free


@pytest.mark.parametrize("case", IN_BLOCKS, ids=str)
def test_blocks_of_rows_run_in_cpp_one_after_another_and_are_added_up(case, gpu):
    inputs = make_inputs(case)
    op, arguments = backward_of(case, inputs)
    with batch_invariant(ordered_sums=8):
        op(*arguments)
        gpu.launched.clear()
        with gpu.repeating():
            outputs = op(*arguments)
        assert [each.build.name for each in gpu.launched] == [*["backward", "finalize"] * 3, "add_blocks"]
        assert_launched_as_by_itself(operands_of(case, arguments), outputs, gpu.launched)
    assert_right(case, inputs, outputs, (True, True, True))


def test_more_blocks_are_no_other_program_and_fewer_rows_are_one(gpu):
    launched = []
    with batch_invariant(ordered_sums=8):
        for rows, times in ((20, 2), (39, 1), (8, 2), (3, 1)):
            case = make_case("layer", (rows, 256), (BF16, FP32, BF16))
            op, arguments = backward_of(case, make_inputs(case))
            for _ in range(times - 1):
                op(*arguments)
            gpu.launched.clear()
            with gpu.repeating():
                op(*arguments)
            launched.append(len(gpu.launched))
    assert launched == [7, 11, 2, 2]


@pytest.mark.parametrize("other", [{}, {"ordered_sums": 16}], ids=str)
def test_programs_are_kept_apart_by_the_rows_of_a_block(other, gpu):
    op, arguments = backward_of(IN_BLOCKS[0], make_inputs(IN_BLOCKS[0]))
    with batch_invariant(ordered_sums=8):
        blocks = builds_of(gpu, lambda: op(*arguments))
    with batch_invariant(**other):
        assert builds_of(gpu, lambda: op(*arguments)) != blocks
    with batch_invariant(ordered_sums=8):
        gpu.launched.clear()
        with gpu.repeating():
            op(*arguments)
    assert [each.build for each in gpu.launched] == blocks
