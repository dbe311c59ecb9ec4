"""The pass over Inductor's graphs: which additions and casts it folds into backward ops, and which it leaves alone."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16, FP32, FP64
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx
from tracing import calls

from fusednorm.integrations.folding import FoldIntoNorms, appended_to, fold

OPS, ROWS, COLS = torch.ops.fusednorm, 6, 32
CAST = torch.ops.prims.convert_element_type.default


def folded(function, *inputs):
    """The function's graph after the pass, and the ops that the pass made. Compares graph and function."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    count = fold(graph.graph)
    graph.graph.lint()
    graph.recompile()
    rounded = {"rtol": 2e-2, "atol": 2e-2}  # after the pass, fewer results are rounded to 16 bits
    tolerance = rounded if any(t.dtype in (BF16, FP16) for t in inputs) else {}
    for got, want in zip(graph(*inputs), function(*inputs), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, **tolerance)
    ops = [*calls(graph, "fusednorm.layer_norm_bwd_residual"), *calls(graph, "fusednorm.rms_norm_bwd_residual")]
    assert len(ops) == count
    return graph, ops


def inputs_of(graph):
    return graph.graph.find_nodes(op="placeholder")


def operands(dtype=FP32, parameter_dtype=FP32):
    torch.manual_seed(0)
    x, dy = torch.randn(ROWS, COLS).to(dtype), torch.randn(ROWS, COLS).to(dtype)
    mean, rstd = x.float().mean(1), x.float().var(1, correction=0).add(1e-5).rsqrt()
    return dy, x, mean, rstd, torch.randn(COLS).to(parameter_dtype), torch.randn(COLS).to(parameter_dtype)


def layer_norm_bwd(dy, x, mean, rstd, weight, bias, mask=(True, True, True)):
    return OPS.layer_norm_bwd(dy, x, [COLS], mean, rstd, weight, bias, list(mask))


def residual(dtype=FP32):
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dx_first", [True, False])
def test_residual_gradient_is_added_by_the_op(dx_first):
    def function(other, *operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return (dx + other if dx_first else other + dx), dw, db

    graph, (node,) = folded(function, residual(), *operands())
    assert node.args[7] is inputs_of(graph)[0] and node.kwargs == {"dx_dtype": FP32}
    assert not calls(graph, "aten.add.Tensor")


def test_rms_norm_folds_alike():
    def function(other, dy, x, mean, rstd, weight, bias):
        dx, dw = OPS.rms_norm_bwd(dy.float(), x, [COLS], rstd, weight)
        return (other + dx.to(BF16)), dw

    graph, (node,) = folded(function, residual(BF16), *operands(BF16))
    assert node.args[6] is inputs_of(graph)[0] and node.kwargs == {"dx_dtype": BF16}
    assert not calls(graph, "aten.add.Tensor") and not calls(graph, "prims.convert_element_type")


def test_a_residual_that_is_computed_later_moves_the_op_behind_it():
    def function(other, *operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return dx + other.exp(), dw, db

    graph, (node,) = folded(function, residual(), *operands())
    assert str(node.args[7].target) == "aten.exp.default"


def test_a_residual_that_needs_the_ops_other_gradients_is_left_alone():
    def function(*operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return dx + dw.expand(ROWS, COLS), dw, db

    graph, ops = folded(function, *operands())
    assert not ops and calls(graph, "aten.add.Tensor")


def test_only_one_residual_is_added():
    def function(other, *operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return dx + other + other.exp(), dw, db

    graph, (node,) = folded(function, residual(), *operands())
    assert len(calls(graph, "aten.add.Tensor")) == 1


LEFT_ALONE = {
    "dx is used twice": lambda dx, other: (dx + other) * dx,
    "dx is added to itself": lambda dx, other: dx + dx,
    "the other one is scaled": lambda dx, other: torch.add(dx, other, alpha=2),
    "the other one is a number": lambda dx, other: dx + 1,
    "the other one is broadcast": lambda dx, other: dx + other[0],
    "the sum is broadcast": lambda dx, other: dx + other.expand(2, ROWS, COLS),
    "the sum is float64": lambda dx, other: dx + other.double(),
    "the other one is of integers": lambda dx, other: dx + other.long(),
    "dx becomes float64": lambda dx, other: CAST(dx, FP64),
}


@pytest.mark.parametrize("use", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_other_uses_of_dx_are_left_alone(use):
    def function(other, *operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return use(dx, other), dw, db

    assert not folded(function, residual(), *operands())[1]


def test_dx_is_rounded_once_to_the_dtype_of_its_last_cast():
    def function(other, *operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return CAST(CAST(dx, FP32) + other, BF16), dw, db

    graph, (node,) = folded(function, residual(), *operands(BF16))
    assert node.args[7] is not None and node.kwargs == {"dx_dtype": BF16}
    assert not calls(graph, "prims.convert_element_type")


def test_a_sum_in_a_wider_dtype_gives_that_dtype():
    def function(other, *operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return dx + other, dw, db

    _, (node,) = folded(function, residual(FP32), *operands(BF16))
    assert node.kwargs == {"dx_dtype": FP32}


def test_a_rounding_that_is_taken_back_stays():
    def function(*operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return CAST(CAST(dx, BF16), FP32), dw, db

    graph, (node,) = folded(function, *operands())
    assert node.kwargs == {"dx_dtype": BF16}
    assert [cast.args[1] for cast in calls(graph, "prims.convert_element_type")] == [FP32]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_widened_inputs_are_read_as_they_were(dtype):
    def function(dy, x, mean, rstd, weight, bias):
        return layer_norm_bwd(CAST(dy, FP32), CAST(x, FP32), mean, rstd, weight, bias)

    graph, (node,) = folded(function, *operands(dtype))
    assert list(node.args[:2]) == inputs_of(graph)[:2]
    assert node.kwargs == {"dx_dtype": FP32}, "that of x as the op had it"
    assert not calls(graph, "prims.convert_element_type")


@pytest.mark.parametrize("wide", [FP64, BF16], ids=str)
def test_inputs_that_are_rounded_or_made_float64_are_left_alone(wide):
    def function(dy, x, mean, rstd, weight, bias):
        return layer_norm_bwd(CAST(dy, wide), CAST(x, wide), mean, rstd, weight, bias)

    assert not folded(function, *operands(FP32))[1]


def test_widened_parameters_are_read_as_they_were_if_their_gradients_are_rounded_back():
    def function(dy, x, mean, rstd, weight, bias):
        dx, dw, db = layer_norm_bwd(dy, x, mean, rstd, CAST(weight, FP32), CAST(bias, FP32))
        return dx, CAST(dw, BF16), CAST(db, BF16)

    graph, (node,) = folded(function, *operands(BF16, BF16))
    assert list(node.args[5:7]) == inputs_of(graph)[4:]
    assert not calls(graph, "prims.convert_element_type")


def test_widened_parameters_whose_gradients_stay_wide_are_left_alone():
    def function(dy, x, mean, rstd, weight, bias):
        return layer_norm_bwd(dy, x, mean, rstd, CAST(weight, FP32), CAST(bias, FP32))

    assert not folded(function, *operands(BF16, BF16))[1]


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True), (False, True, False)], ids=str)
def test_masks_are_kept(mask):
    def function(dy, x, mean, rstd, weight, bias):
        return layer_norm_bwd(CAST(dy, FP32), x, mean, rstd, weight, bias, mask)

    _, (node,) = folded(function, *operands(BF16))
    assert tuple(node.args[8]) == mask


def test_an_output_that_is_taken_twice_is_left_alone():
    def function(other, *operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return dx + other, dw, db

    graph = make_fx(function, tracing_mode="fake")(residual(), *operands())
    (op,) = calls(graph, "fusednorm.layer_norm_bwd")
    dx = next(iter(op.users))
    with graph.graph.inserting_after(dx):
        again = graph.graph.call_function(dx.target, dx.args)
    again.meta = dict(dx.meta)
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ((*output.args[0], again),)
    assert fold(graph.graph) == 0


def test_folding_again_changes_nothing():
    def function(other, *operands):
        dx, dw, db = layer_norm_bwd(*operands)
        return dx + other, dw, db

    graph, _ = folded(function, residual(), *operands())
    code = graph.code
    assert fold(graph.graph) == 0 and graph.code == code


def test_graphs_without_a_norm_are_left_as_they_are():
    graph = make_fx(lambda x: (x + x).exp(), tracing_mode="fake")(torch.ones(3))
    code = graph.code
    assert fold(graph.graph) == 0 and graph.code == code


# Together with a pass that the user set


class Theirs(CustomGraphPass):
    def __init__(self, uuid: str | None) -> None:
        self.seen, self._uuid = [], uuid

    def __call__(self, graph) -> None:
        self.seen.append(graph)

    def uuid(self):
        return self._uuid


def test_a_pass_that_was_there_runs_first_and_is_part_of_the_identity():
    alone, theirs = appended_to(None), Theirs("theirs")
    chained = appended_to(theirs)
    graph = torch.fx.Graph()
    chained(graph)
    assert theirs.seen == [graph]
    assert alone.uuid() and chained.uuid() == ("theirs", alone.uuid())
    assert appended_to(chained) is chained, "ours runs once"


@pytest.mark.parametrize("unknown", [Theirs(None), lambda graph: None], ids=["without uuid", "function"])
def test_a_pass_without_identity_keeps_graphs_out_of_the_cache(unknown):
    assert appended_to(unknown).uuid() is None


def test_a_list_of_passes_gets_ours_at_its_end():
    theirs = Theirs("theirs")
    passes = appended_to([theirs])
    assert passes[0] is theirs and isinstance(passes[1], FoldIntoNorms) and appended_to(passes) is passes


@pytest.mark.parametrize(
    "use", [lambda dw: (CAST(dw, BF16), dw), lambda dw: (CAST(dw, FP16),)], ids=["wide too", "as another"]
)
def test_widened_parameters_whose_gradients_are_not_only_rounded_back_are_left_alone(use):
    def function(dy, x, mean, rstd, weight, bias):
        dx, dw, db = layer_norm_bwd(dy, x, mean, rstd, CAST(weight, FP32), CAST(bias, FP32))
        return dx, *use(dw), db

    assert not folded(function, *operands(BF16, BF16))[1]


def test_16_bit_inputs_that_are_made_float64_are_left_alone():
    def function(dy, x, mean, rstd, weight, bias):
        return layer_norm_bwd(CAST(dy, FP64), CAST(x, FP64), mean, rstd, weight, bias)

    assert not folded(function, *operands(BF16))[1]


@pytest.mark.parametrize("widens", [False, True])
def test_a_number_that_is_added_to_the_weight_is_the_ops_offset(widens):
    def function(dy, x, mean, rstd, weight, bias):
        dx, dw = OPS.rms_norm_bwd(dy, x, [COLS], rstd, (CAST(weight, FP32) if widens else weight) + 1)
        return dx, CAST(dw, BF16) if widens else dw

    graph, (node,) = folded(function, *operands(BF16, BF16))
    assert node.args[4] is inputs_of(graph)[4] and node.kwargs["weight_offset"] == 1.0
    assert not calls(graph, "aten.add.Tensor") and not calls(graph, "prims.convert_element_type")


def test_a_product_with_the_weight_and_a_sum_of_two_tensors_are_no_offset():
    def function(dy, x, mean, rstd, weight, bias):
        dx, dw = OPS.rms_norm_bwd(dy, x, [COLS], rstd, weight + bias)
        other, _ = OPS.rms_norm_bwd(dy, x, [COLS], rstd, weight * 2)
        return dx, dw, other, torch.add(bias, weight, alpha=2)

    _, ops = folded(function, *operands())
    assert not ops
