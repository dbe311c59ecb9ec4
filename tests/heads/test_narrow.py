"""The kernels of qk_norm in Triton's interpreter, against float64 autograd. Buffers hold NaN at first, with margins of
NaN around them (see guarded_buffers): stray reads and writes fail."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import head_norms
import pytest
import torch
from cases import guarded_buffers
from head_norms import BF16, CASES, FP16, FP32, FP64, HeadCase, assert_errs_no_more_than_plain_code, gradients
from torch import Tensor
from torch.testing import assert_close

import fusednorm
from fusednorm.heads import plan as head_plan
from fusednorm.heads.call import rows_of
from fusednorm.heads.problem import Packing
from fusednorm.host import gpus, launcher, native, prepared
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.host.program import Address
from fusednorm.planner import limits
from fusednorm.planner.device import A100

pytest.importorskip("triton")
SMALL_GPU = replace(A100, sm_count=1)


@pytest.fixture(autouse=True)
def kernels_for_a_small_gpu(monkeypatch):
    """Few CTAs, so that each walks over several row tiles; no formula in place of a kernel."""
    monkeypatch.setattr(gpus, "spec_of", lambda device: SMALL_GPU)
    monkeypatch.setattr(limits, "head_warps", {"forward": (1,), "backward": (1,)})
    head_norms.without_formulas(monkeypatch)
    head_plan.choose.cache_clear()
    with kernels_on("cpu"), guarded_buffers():
        yield
    head_plan.choose.cache_clear()


@pytest.mark.parametrize("dtypes", [(FP64, FP64), (BF16, FP32), (FP32, FP16)], ids=str)
@pytest.mark.parametrize("case", CASES + head_norms.WHOLE, ids=str)
def test_outputs_and_gradients_match_float64_autograd(case, dtypes):
    tokens = 23 if FP64 in dtypes else 7  # the dtype does not change which CTA has which rows
    case = replace(case, dtype=dtypes[0], weight_dtype=dtypes[1], tokens=tokens)
    given = case.tensors()
    assert_errs_no_more_than_plain_code(case, given, case.run(given))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_what_is_no_row_leaves_no_nan_in_sums_if_eps_is_0(norm):
    case = HeadCase(norm=norm, batch=1, tokens=3)  # 12 and 6 rows, fewer than tiles have
    given = case.tensors()
    got, want = (gradients(case.run(given, eps=eps), given) for eps in (0.0, 1e-300))
    assert_close(got, want)


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16])
def test_rows_of_equal_elements_become_the_bias_and_equal_gradients_leave_none(dtype):
    case = HeadCase(norm="layer", cols=48, dtype=dtype, tokens=9)
    given = case.tensors()
    for name in "qk":
        element = 100 + 30 * given[name].detach()[..., :1]
        given[name] = element.expand(given[name].shape).contiguous().requires_grad_()
        given[f"{name}_weight"] = torch.full((case.cols,), 3.0, dtype=dtype, requires_grad=True)
    outputs = case.run(given)
    for name, y in zip("qk", outputs, strict=True):
        assert torch.equal(y, given[f"{name}_bias"].expand(y.shape))
    for grad in torch.autograd.grad(outputs, [given["q"], given["k"]], [torch.full_like(y, 0.375) for y in outputs]):
        assert not grad.any()


def slices(case: HeadCase, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Slices of one buffer."""
    qkv = torch.cat([given["q"], given["k"], given["k"]], 2).flatten(2)
    return dict(zip("qk", Packing(case.heads, case.kv_heads).split(qkv), strict=False))


LAYOUTS = {
    "slices of one buffer": slices,
    "halves of rows": lambda _, given: {
        name: torch.cat([given[name]] * 2, -1)[..., : given[name].shape[-1]] for name in "qk"
    },
    "heads first in memory": lambda _, given: {
        name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qk"
    },
    "columns apart": lambda _, given: {name: given[name].mT.contiguous().mT for name in "qk"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_any_layout_give_the_bits_of_contiguous_rows(layout):
    case = HeadCase(dtype=BF16, rotary=8, table_dims="BS", tokens=7)
    given = case.tensors()
    want = case.run(given)
    laid = given | {name: each.detach().requires_grad_() for name, each in LAYOUTS[layout](case, given).items()}
    assert not all(each.is_contiguous() for each in laid.values())
    got = case.run(laid)
    assert all(map(torch.equal, got, want))
    turned = [each.detach().mT.contiguous().mT for each in want]
    grads = [torch.autograd.grad(outputs, list(of.values()), turned) for outputs, of in ((got, laid), (want, given))]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("in_force", [nullcontext, fusednorm.batch_invariant])
def test_weights_of_all_heads_may_be_slices_of_wider_rows(in_force):
    """Kernels read them as one row, which no padding interrupts."""
    case = HeadCase(cols=40, rotary=8, dtype=FP32, whole=True)
    given = case.tensors()
    shaped = {name: given[f"{name}_weight"].detach().unflatten(0, (-1, case.cols)) for name in "qk"}
    halves = {f"{name}_weight": torch.cat([each] * 2, -1)[:, : case.cols] for name, each in shaped.items()}
    laid = given | {name: each.requires_grad_() for name, each in halves.items()}
    with in_force():
        got, want = (case.run(each) for each in (laid, given))
        grads = [gradients(outputs, of) for outputs, of in ((got, laid), (want, given))]
    assert all(map(torch.equal, got, want))
    assert all(torch.equal(one.flatten(), same.flatten()) for one, same in zip(*grads, strict=True))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "case", [HeadCase(rotary=16, tokens=9), HeadCase(norm="layer", cols=24, interleaved=True, rotary=8)]
)
def test_the_gradient_of_a_packed_tensor_is_written_in_place(case, grouped):
    given, packing = case.tensors(), Packing(case.heads, case.kv_heads, grouped)
    parameters = {name: each for name, each in given.items() if name not in ("q", "k")}
    width = (case.heads + 2 * case.kv_heads) * case.cols
    qkv = torch.randn(case.batch, case.tokens, width, dtype=FP64).requires_grad_()
    got = fusednorm.qk_norm_packed(
        qkv, case.heads, case.kv_heads, rotary=case.tables(), grouped=grouped, **parameters, **case.settings
    )
    q, k, v = (each.flatten(-3, -2) if grouped else each for each in packing.split(qkv))
    want = *case.composite({"q": q, "k": k} | parameters), v
    leaves = {"qkv": qkv, **parameters}
    assert_close(got, want)
    assert_close(gradients(got, leaves), gradients(want, leaves))


def test_tensors_that_are_not_alike_take_a_launch_each():
    case = HeadCase(dtype=FP32, norm="layer", rotary=8)
    given = case.tensors()
    given["k_weight"] = given["k_weight"].detach().bfloat16().requires_grad_()
    assert_errs_no_more_than_plain_code(case, given, case.run(given))


@pytest.mark.parametrize("names", [["q"], ["k_weight"], ["q_bias"], ["q", "k", "k_bias"], ["q_weight", "k_weight"]])
def test_only_the_gradients_that_are_wanted_are_computed(names):
    case = HeadCase(norm="layer", rotary=8, norm_first=False)
    given = case.tensors()
    some = {name: each.detach().requires_grad_(name in names) for name, each in given.items()}
    of = {name: each for name, each in given.items() if name in names}
    want = gradients(case.composite(given), of)
    assert_close(gradients(case.run(some), {name: some[name] for name in of}), want)


def test_the_same_input_gives_the_same_bits_and_rows_do_not_depend_on_others():
    case = HeadCase(dtype=BF16, rotary=16, tokens=40)
    given = case.tensors()
    first = case.run(given)
    again = case.run(given)
    assert all(map(torch.equal, (*first, *gradients(first, given)), (*again, *gradients(again, given))))
    tables = tuple(each[:7] for each in case.tables())
    few = case.run(given | {name: given[name][:, :7] for name in "qk"}, rotary=tables)
    assert all(map(torch.equal, few, [each[:, :7] for each in first]))


def test_levels_of_rows_are_as_few_as_all_tensors_allow():
    x = torch.empty(2, 3, 4, 8)
    table = torch.empty(3, 1, 8).expand(2, 3, 4, 8)
    assert rows_of((2, 3, 4), x) == ((), ((8,),))
    assert rows_of((2, 3, 4), x, table) == ((3, 4), ((96, 32, 8), (0, 8, 0)))
    assert rows_of((2, 3, 4), x, x.transpose(0, 1).contiguous().transpose(0, 1)) == ((3, 4), ((96, 32, 8), (32, 64, 8)))
    assert rows_of((1, 1), torch.empty(1, 1, 8)) == ((), ((8,),))
    assert rows_of((2,) * 5, torch.empty(2, 2, 2, 2, 2, 8), torch.empty(2, 1, 2, 1, 2, 8).expand(*(2,) * 5, 8)) is None


def test_rows_at_five_strides_are_computed_all_the_same(monkeypatch):
    """By the formula, where a table's rows cannot be read in place."""
    monkeypatch.undo()
    x, table = torch.randn(2, 2, 2, 2, 2, 8), torch.randn(2, 1, 2, 1, 2, 8)
    qkv, packed_table = torch.randn(2, 2, 2, 8 * 8), torch.randn(2, 1, 2, 8)

    def both():
        separate = fusednorm.qk_norm(x, x, rotary=(table, table))
        packed = fusednorm.qk_norm_packed(qkv.requires_grad_(), 4, 2, grouped=True, rotary=(packed_table,) * 2)
        return *separate, *packed, *torch.autograd.grad(packed, qkv, [each.detach() for each in packed])

    want = both()
    with kernels_on("cpu"):
        assert_close(both(), want)


def test_a_backward_of_which_nothing_is_wanted_returns_nothing(monkeypatch):
    monkeypatch.undo()
    both, none = [torch.randn(3, 8), torch.randn(2, 8)], [None, None]
    with kernels_on("cpu"):
        assert torch.ops.fusednorm.head_norm_bwd(both, both, none, none, None, None, None, [False] * 6) == []


class Repeats:
    """In place of loaded programs: their calls' addresses, those of the first call of a kind apart."""

    def __init__(self):
        self.programs, self.later = [], []

    def run(self, program, tensors, shape, rows):
        self.programs.append(program)
        return self.outputs(program), SimpleNamespace(
            program=program, rows=rows, launch=lambda addresses: self.launch(program, addresses)
        )

    def launch(self, program, addresses):
        self.later.append(addresses)
        return self.outputs(program)

    @staticmethod
    def outputs(program):
        return tuple(each and torch.empty(each.shape, dtype=each.dtype) for each in program.outputs)


@pytest.fixture
def seen(monkeypatch):
    repeats = Repeats()
    monkeypatch.setattr(launcher, "run", repeats.run)
    prepared.forget()
    yield repeats
    prepared.forget()


@pytest.mark.parametrize("extension", [native.extension, None], ids=["C++", "Python"])
def test_a_call_that_has_run_before_launches_with_its_own_addresses(extension, seen, monkeypatch):
    monkeypatch.setattr(native, "extension", extension)
    case = HeadCase(dtype=BF16, rotary=8)
    given, others, rotary = case.tensors(), case.tensors(seed=1), case.tables()
    for of in (given, others):
        outputs = case.run(of, rotary=rotary)
        grads = [torch.ones_like(each) for each in outputs]
        torch.autograd.grad(outputs, list(of.values()), grads)
    assert len(seen.programs) == len(seen.later) == 2, "the second forward and backward are repeats"
    operands = *others.values(), *rotary
    q, k, q_weight, k_weight, cos, sin = (each.data_ptr() for each in operands)
    assert seen.later[0] == [q, k, q_weight, k_weight, 0, 0, cos, sin]
    assert seen.later[1] == [*(each.data_ptr() for each in grads), *seen.later[0]]


def test_a_tensor_of_which_no_gradient_is_wanted_has_no_launch(seen):
    case = HeadCase(dtype=BF16)
    given = {name: each.detach().requires_grad_(name == "k") for name, each in case.tensors().items()}
    outputs = case.run(given)
    torch.autograd.grad(outputs, given["k"], [torch.ones_like(each) for each in outputs])
    (backward,) = seen.programs[1].launches
    rows = case.batch * case.tokens * case.kv_heads
    assert (2 * rows + 1,) in backward.operands, "the rows of k alone"


def test_the_parts_of_a_packed_gradient_are_addressed_by_their_offsets(seen):
    packed = torch.randn(2, 5, 8 * 16, dtype=BF16, requires_grad=True)
    for _ in range(2):
        got = fusednorm.qk_norm_packed(packed, 4, 2, eps=1e-3)
        grads = [torch.ones_like(each) for each in got]
        (grad,) = torch.autograd.grad(got, packed, grads)
    assert grad.shape == packed.shape
    assert seen.later[1] == [*(each.data_ptr() for each in grads), packed.data_ptr(), 0, 0, 0, 0, 0, 0]
    row = 16 * BF16.itemsize
    (backward,) = seen.programs[1].launches
    addresses = [of for of in backward.operands if type(of) is tuple and isinstance(of[0], Address)]
    places = [[(each.index, each.offset) for each in of] for of in addresses]
    assert places == [[(3, 0), (3, 4 * row)], [(0, 0), (1, 0)], [(10, 0), (10, 4 * row)], [(2, 0), (10, 6 * row)]]


@pytest.mark.parametrize(
    "change",
    [
        lambda given, more: given.update(q=given["q"].transpose(1, 2).contiguous().transpose(1, 2)),
        lambda given, more: given.update({name: given[name].float() for name in ("q_weight", "k_weight")}),
        lambda given, more: given.update(k=given["k"].repeat(1, 2, 1, 1)[:, :5]),
        lambda given, more: given.update(q_weight=None, k_weight=None),
        lambda given, more: more.update(eps=1e-2),
        lambda given, more: more.update(norm_first=False),
        lambda given, more: more.update(weight_offset=1.0),
        lambda given, more: more.update(rotary=tuple(each[:, :8] for each in more["rotary"]), rotary_dim=8),
    ],
)
def test_a_call_of_another_kind_is_no_repeat(change, seen):
    case = HeadCase(dtype=BF16, rotary=16)
    given = {name: each.detach() for name, each in case.tensors().items()}
    more = {"rotary": case.tables()}
    case.run(given, **more)
    change(given, more)
    case.run(given, **more)
    assert not seen.later
    with pytest.raises(RuntimeError, match="cos must not require grad"):
        case.run(given, **more | {"rotary": tuple(each.clone().requires_grad_() for each in more["rotary"])})
    with fusednorm.sm_margin(0):
        case.run(given, **more)
    assert len(seen.later) == 1
