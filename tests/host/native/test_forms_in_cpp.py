"""Forms and their autograd nodes run in the C++ host side, from functions, modules and models that were patched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from norm_forms import BF16, COLS, EPS, FACES, FP32, arguments_of, composite, gradients, leaves, run
from norms import Wrapped
from op_log import OpLog
from test_derivatives import FunctionLog, autocast_of_cuda
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import fusednorm
from bench.written import of_op, rows_of
from fusednorm.host import native
from fusednorm.operands import FORM_OPS

OPS = torch.ops.fusednorm
SHAPE = 6, COLS
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
# Of the modulated norms one of each form: LayerNorms of a sum, and RMSNorms.
SOME = [op for op in FORM_OPS if not op.form.modulate or (op.norm == "layer") is bool(op.form.combine)]
forms = pytest.mark.parametrize("op", SOME, ids=lambda op: op.name)
sums = pytest.mark.parametrize("op", [op for op in SOME if op.form.combine == "add"], ids=lambda op: op.name)
BEGINNINGS = [op for op in SOME if op.form.combine == "add" and op.slot("residual").optional]
starts = pytest.mark.parametrize("op", BEGINNINGS, ids=lambda op: op.name)


def float32(op, seed=0):
    return leaves(op, FP32, shape=SHAPE, seed=seed)


def in_float64(op, given, offset=0.0):
    """(outputs, leaves) of the form as models write it."""
    exact = {name: each if each is None else each.detach().double().requires_grad_() for name, each in given.items()}
    return composite(op, exact, offset), exact


def node_of(outputs):
    return outputs[0].grad_fn.name()


@forms
@pytest.mark.parametrize("absent", [(), ("bias",), ("weight", "bias")], ids=str)
def test_outputs_and_gradients_are_right_by_python_and_when_repeated(op, absent, gpu):
    for seed in range(2):
        given = float32(op, seed) | dict.fromkeys(absent)
        with gpu.repeating(2) if seed else gpu.going_to_python("forward", "backward"):
            outputs = run(op, given, weight_offset=1.0)
            got = gradients(outputs, given)
        assert node_of(outputs) == "NormBackward"
        wanted, exact = in_float64(op, given, 1.0)
        for ours, right in zip((*outputs, *got), (*wanted, *gradients(wanted, exact)), strict=True):
            assert_close(ours, right.float(), **TOLERANCE)


@forms
def test_the_ops_have_the_node_too_with_statistics_that_are_differentiable(op, gpu):
    given = leaves(op, shape=(2, 3, 4))
    names = [name for name, each in given.items() if each is not None]

    def outputs(*tensors):
        by_name = dict(zip(names, tensors, strict=True))
        return getattr(OPS, op.name)(normalized_shape=[4], eps=EPS, weight_offset=1.0, **of_op(op, by_name))

    tensors = [given[name] for name in names]
    found, before = outputs(*tensors), native.repeats()
    assert node_of(found) == "NormBackward" and all(each.grad_fn == found[0].grad_fn for each in found)
    # The first call goes to Python and later calls to C++: the results may differ by rounding.
    assert gradcheck(outputs, tensors, nondet_tol=1e-12, fast_mode=True)
    assert gradgradcheck(outputs, tensors, nondet_tol=1e-12, fast_mode=True)
    assert native.repeats() > before


@forms
def test_second_derivatives_are_those_of_the_formula(op, gpu):
    for absent in ((), ("weight", "bias")):
        given = leaves(op, shape=(2, 3, 4)) | dict.fromkeys(absent)
        names = [name for name, each in given.items() if each is not None]

        def of(*tensors, given=given, names=names):
            return run(op, given | dict(zip(names, tensors, strict=True)), weight_offset=1.0)

        tensors = [given[name] for name in names]
        of(*tensors)
        with gpu.repeating():
            assert node_of(of(*tensors)) == "NormBackward"
        assert gradcheck(of, tensors, nondet_tol=1e-12, fast_mode=True)
        assert gradgradcheck(of, tensors, nondet_tol=1e-12, fast_mode=True)


@forms
def test_each_gradient_has_its_tensors_dtype_and_was_rounded_once(op, gpu):
    wide = "residual" in rows_of(op)
    for seed in range(2):
        given = leaves(op, *(BF16, FP32, FP32) if wide else (BF16, FP32), shape=SHAPE, seed=seed)
        with gpu.repeating(2) if seed else gpu.going_to_python("forward", "backward"):
            outputs = run(op, given)
            got = gradients(outputs, given)
        wanted, exact = in_float64(op, given)
        for each, ours, right in zip(given.values(), got, gradients(wanted, exact), strict=True):
            assert ours.dtype == each.dtype
            assert_close(ours.double(), right, atol=2e-2, rtol=2e-2)  # dy is rounded to bfloat16
    if op.form.combine == "add":  # in bfloat16 the residual's gradient would have eight bits
        assert not torch.equal(got[1], got[1].bfloat16().float())


@sums
def test_an_absent_gradient_costs_nothing_and_the_streams_alone_is_passed_on(op, gpu):
    for wants, calls in (((True, True), 2), ((True, False), 2), ((False, True), 1)):
        for repeated in (False, True):
            given, launched = float32(op), len(gpu.launched)
            outputs = run(op, given)
            if repeated:
                before = native.repeats()
            got = gradients(outputs, given, wants)
            if repeated:
                assert native.repeats() - before == calls - 1
        assert len(gpu.launched) - launched > 0
        wanted, exact = in_float64(op, given)
        for ours, right in zip(got, gradients(wanted, exact, wants), strict=True):
            assert (ours is None) == (right is None)
            if ours is not None:
                assert_close(ours, right.float(), **TOLERANCE)


@starts
def test_a_stream_may_begin_here(op, gpu):
    for seed in range(2):
        given = float32(op, seed) | {"residual": None}
        with gpu.repeating(2) if seed else gpu.going_to_python("forward", "backward"):
            outputs = run(op, given)
            got = gradients(outputs, given)
        wanted, exact = in_float64(op, given)
        for ours, right in zip((*outputs, *got), (*wanted, *gradients(wanted, exact)), strict=True):
            assert_close(ours, right.float(), **TOLERANCE)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_residual_that_alone_wants_a_gradient_gets_that_of_y_and_nothing_runs(norm, gpu):
    op = next(op for op in FORM_OPS if op.norm == norm and op.form.finish == "add")
    given = {name: each.requires_grad_(name == "residual") for name, each in float32(op).items()}
    run(op, given)
    with gpu.repeating():
        (y,) = run(op, given)
        dy = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, [given["residual"]], dy)
    assert torch.equal(got, dy)


@forms
def test_a_node_keeps_what_its_backward_reads(op, gpu):
    given, kept = float32(op), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.data_ptr()) or each, lambda each: each):
        outputs = run(op, given)
    read = [each for name, each in given.items() if name not in ("x", "residual")]
    read += [outputs[1]] if op.form.rows_out else []
    read += [] if op.form.rows_out and "gate" not in given else [given["x"]]
    assert {each.data_ptr() for each in read} <= set(kept)
    assert len(kept) == len(read) + (2 if op.norm == "layer" else 1)  # and the statistics


@sums
def test_a_sum_that_was_changed_is_noticed_and_its_node_is_freed(op, gpu):
    import gc
    import weakref

    given = float32(op)
    y, total = run(op, given)
    kept = weakref.ref(given["weight"])
    with torch.no_grad():
        total.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del y, total, given
    gc.collect()
    assert kept() is None


@sums
def test_gradients_of_the_summands_do_not_share_memory(op, gpu):
    for _ in range(2):
        given = float32(op)
        sum(each.sum() for each in run(op, given)).backward()
        assert given["x"].grad.data_ptr() != given["residual"].grad.data_ptr()


@forms
def test_compiled_autograd_traces_the_backward(op, gpu):
    given = float32(op)
    wanted, exact = in_float64(op, given, 1.0)
    sum(each.sin().sum() for each in wanted).backward()
    loss = sum(each.sin().sum() for each in run(op, given, weight_offset=1.0))
    counters = torch._dynamo.utils.counters["compiled_autograd"]
    captures = counters["captures"]
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="eager")()
    assert counters["captures"] > captures
    for name, each in given.items():
        assert_close(each.grad, exact[name].grad.float(), **TOLERANCE)


@forms
@pytest.mark.parametrize("rounding", ["once", "x_hat"])
def test_modules_run_without_python_under_autocast_too_and_keep_their_dtypes(op, rounding, gpu):
    module = FACES[op.name][1](COLS, weight_offset=1.0, rounding=rounding)
    given = float32(op)
    rows = [given[name] for name in arguments_of(op)]
    want = module(*rows)
    with gpu.repeating(), autocast_of_cuda():
        got = module(*rows)
    assert_close(got, want)


LOOKERS = [FunctionLog, OpLog, lambda: fusednorm.force("multi_wave"), torch.inference_mode]


@forms
@pytest.mark.parametrize("look", LOOKERS, ids=["functions", "ops", "force", "inference"])
def test_modules_leave_a_form_to_python_where_somebody_looks_on(op, look, gpu, monkeypatch):
    given, answers, ask = float32(op), [], native.y_of
    want = run(op, given)
    monkeypatch.setattr(native, "y_of", lambda *arguments: answers.append(ask(*arguments)) or answers[-1])
    with look():
        got = run(op, given)
    assert answers == [None]
    assert_close(got, want)


@forms
def test_python_runs_a_form_of_a_subclass_or_inside_a_transform(op, gpu):
    given = {name: each.detach() for name, each in float32(op).items()}
    want, names = run(op, given), rows_of(op)
    Wrapped.ops.clear()
    got = run(op, given | {name: Wrapped(given[name]) for name in names})
    assert Wrapped.ops == [f"fusednorm.{op.name}.default"]
    assert_close(tuple(each.inner for each in got), want)
    mapped = torch.func.vmap(lambda *rows: run(op, given | dict(zip(names, rows, strict=True))))
    assert_close(mapped(*[given[name][None] for name in names]), tuple(each[None] for each in want))


@forms
def test_wrong_operands_get_pythons_sentence(op, gpu):
    given = float32(op)
    for changes, text in (
        ({"weight": torch.ones(3)}, "x must end in normalized_shape"),
        ({"eps": "small"}, "eps must be a"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=f"^{op.name}: {text}"):
            FACES[op.name][0](**({"eps": EPS} | given | changes))
    module = FACES[op.name][1](COLS)
    module.rounding = "twice"
    known = "once, x_hat, steps" if op.form.modulate else "once, x_hat"
    with pytest.raises(ValueError, match=f"^{op.name}: rounding must be one of {known}, got 'twice'"):
        module(*[given[name] for name in arguments_of(op)])


class LlamaRMSNorm(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.randn(COLS, dtype=dtype)), EPS

    def scaled(self, x):
        return self.weight * x

    def forward(self, hidden_states):
        dtype, x = hidden_states.dtype, hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.scaled(x.to(dtype))


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_norm_of_a_patched_model_runs_without_python(kind, dtype, gpu):
    module = kind(dtype)
    x = torch.randn(2, 3, COLS, dtype=dtype, requires_grad=True)
    y = module(x)
    y.sum().backward()
    want = y, x.grad, module.weight.grad
    with fusednorm.patch_model(module) as patch:
        assert len(patch.replaced) == 1
        for repeated in (False, True):
            x.grad = module.weight.grad = None
            with gpu.repeating(2) if repeated else gpu.going_to_python("forward", "backward"):
                y = module(x)
                y.sum().backward()
            assert node_of([y]) == "NormBackward"
    tolerance = TOLERANCE if dtype == FP32 else {"atol": 2e-2, "rtol": 2e-2}
    assert_close((y, x.grad, module.weight.grad), want, **tolerance)


def frames_of(run) -> int:
    package, found = str(Path(fusednorm.__file__).parent), []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(each.startswith(package) for each in found)


@forms
def test_a_modules_forward_and_backward_enter_few_more_frames_than_the_plain_modules(op, gpu):
    plain = {"layer": fusednorm.LayerNorm, "rms": fusednorm.RMSNorm}[op.norm](COLS)
    rows, found, gpu.computes = [float32(op)[name] for name in arguments_of(op)], [], False
    for module, given in ((plain, rows[:1]), (FACES[op.name][1](COLS), rows)):

        def step(module=module, given=given):
            y = module(*given)
            (y[0] if isinstance(y, tuple) else y).sum().backward()

        step()
        with gpu.repeating(2):
            found.append(frames_of(step))
    assert found[0] <= 5 and found[1] <= found[0] + 3, found


@pytest.mark.parametrize("cols", [COLS, 1024], ids=["multi_wave", "rings"])
@pytest.mark.parametrize("name", ["layer_norm_fwd_of_gated", "rms_norm_fwd_times_gate"])
def test_groups_of_columns_are_right_by_python_and_when_repeated(name, cols, gpu):
    op = next(each for each in FORM_OPS if each.name == name)
    for seed in range(2):
        given = leaves(op, FP32, shape=(600, cols), seed=seed)
        exact = {each: tensor.detach().double().requires_grad_() for each, tensor in given.items()}
        with gpu.repeating(2) if seed else gpu.going_to_python("forward", "backward"):
            outputs = run(op, given, group_size=cols // 2)
            got = gradients(outputs, given)
        assert node_of(outputs) == "NormBackward"
        halves = zip(*(each.chunk(2, -1) for each in exact.values()), strict=True)
        halves = [dict(zip(exact, each, strict=True)) for each in halves]
        wanted = (torch.cat([composite(op, half)[0] for half in halves], -1),)
        for ours, right in zip((*outputs, *got), (*wanted, *gradients(wanted, exact)), strict=True):
            assert_close(ours, right.float(), atol=1e-3, rtol=1e-3)
