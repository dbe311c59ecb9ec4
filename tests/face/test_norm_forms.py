"""The forms: what comes before and after a norm. Each test runs for every form of the table, with both norms."""

from __future__ import annotations

import inspect

import numpy
import pytest
import torch
from norm_forms import (
    BF16,
    COLS,
    EPS,
    FACES,
    FP16,
    FP32,
    FP64,
    aligned,
    arguments_of,
    assert_errs_no_more_than_plain_code,
    composite,
    forms,
    gradients,
    leaves,
    run,
)

import fusednorm
from bench.written import COMBINE, finished, modulations_of, rows_of
from fusednorm.operands import FORM_OPS, Role

OPS = torch.ops.fusednorm
DTYPES = [(BF16,), (FP16, FP16), (BF16, FP32, FP32), (FP32, BF16, BF16), (BF16, FP64, FP32), (FP64,)]


def test_every_form_has_a_function_and_a_module():
    assert set(FACES) == {op.name for op in FORM_OPS}
    pairs = [pair for name, pair in FACES.items() if "wide_sum" not in name]  # add_layer_norm and add_rms_norm are
    public = {getattr(each, "func", each).__name__ for pair in pairs for each in pair}
    assert public <= set(fusednorm.__all__)


@forms
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_outputs_and_gradients_err_no_more_than_those_of_the_plain_code(op, dtypes, offset):
    given = leaves(op, *(dtypes if len(rows_of(op)) > 1 else dtypes[:1] + dtypes[2:]), shape=(40, 96))
    assert_errs_no_more_than_plain_code(op, given, offset)


@forms
def test_derivatives_of_two_orders_pass_the_checks_with_and_without_parameters(op):
    for absent in ((), ("bias",), ("weight", "bias")):
        given = {name: None if name in absent else each for name, each in leaves(op, shape=(2, 3, 4)).items()}
        present = [name for name, each in given.items() if each is not None]

        def of(*tensors, given=given, present=present):
            return run(op, given | dict(zip(present, tensors, strict=True)), weight_offset=1.0)

        tensors = [given[name] for name in present]
        torch.autograd.gradcheck(of, tensors, fast_mode=True)
        torch.autograd.gradgradcheck(of, tensors, fast_mode=True)


@forms
def test_transforms_and_forward_mode_agree_with_the_plain_code(op):
    given = leaves(op, shape=(2, 3, 4))
    names, tensors = list(given), [each.detach() for each in given.values()]
    ours, theirs = (
        lambda *each, which=which: which(op, dict(zip(names, each, strict=True)))[0] for which in (run, composite)
    )
    tangents = tuple(torch.ones_like(each) for each in tensors)
    for transform in (
        lambda f: torch.func.jvp(f, tuple(tensors), tangents)[1],
        lambda f: torch.func.jacrev(f, tuple(range(len(tensors))))(*tensors)[0],
        lambda f: torch.func.vmap(f, tuple(None if name in ("weight", "bias") else 0 for name in names))(*tensors),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


@forms
def test_the_op_is_registered_as_torch_demands(op):
    given = leaves(op, BF16, shape=(3, 8)) | {"bias": None}
    given |= {"normalized_shape": [8], "eps": EPS} | {"scale": given.get("scale", given.get("gate"))}
    arguments = tuple(given[slot.name] for slot in op.arguments if not slot.role.is_by_name)
    settings = {slot.name: FP32 for slot in op.inputs if slot.role is Role.DTYPE} | {"weight_offset": 1.0}
    torch.library.opcheck(getattr(OPS, op.name).default, arguments, settings)


@forms
def test_a_graph_with_any_number_of_rows_is_one_and_exports(op):
    torch._dynamo.reset()
    module = FACES[op.name][1](COLS, weight_offset=1.0).double()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        of = {name: each for name, each in leaves(op, shape=(rows, COLS)).items() if name in arguments_of(op)}
        got, want = compiled(**of), module(**of)
        torch.testing.assert_close(got, want)
        ours, theirs = (each if isinstance(each, tuple) else (each,) for each in (got, want))
        torch.testing.assert_close(gradients(ours, of), gradients(theirs, of))
    rows = torch.export.Dim("rows", min=2)
    shapes = {name: {0: rows} if each.shape[0] > 1 else None for name, each in of.items()}
    exported = torch.export.export(module, (), of, dynamic_shapes=shapes)
    assert any(op.name in str(node.target) for node in exported.graph.nodes)
    more = {name: torch.cat([each] * 2) if each.shape[0] > 1 else each for name, each in of.items()}
    torch.testing.assert_close(exported.module()(**more)[0][:7], want[0][:7])


@forms
def test_torch_jit_traces_the_op(op):
    given = {name: each.detach() for name, each in leaves(op).items()}
    traced = torch.jit.trace(lambda x: run(op, given | {"x": x}), given["x"], check_trace=False)
    assert f"fusednorm::{op.name}" in str(traced.graph)
    torch.testing.assert_close(traced(given["x"] + 1)[0], run(op, given | {"x": given["x"] + 1})[0])


SUMS = [op for op in FORM_OPS if op.form.combine == "add"]
sums = pytest.mark.parametrize("op", SUMS, ids=lambda op: op.name)


@sums
@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_either_gradient_may_be_absent_and_no_zeros_take_its_place(op, wants, monkeypatch):
    given, exact = leaves(op), leaves(op)
    outputs = run(op, given)
    for name in ("zeros_like", "zeros"):
        monkeypatch.setattr(torch, name, None)
    got, want = gradients(outputs, given, wants), gradients(composite(op, exact), exact, wants)
    assert [each is None for each in got] == [each is None for each in want]
    for ours, right in zip(got, want, strict=True):
        torch.testing.assert_close(ours, right)


@forms
def test_no_rows_and_frozen_tensors_are_no_exception(op):
    empty = leaves(op, FP32, shape=(0, 8))
    assert all(not each.any() for each in gradients(run(op, empty), empty))
    given = leaves(op, FP32)
    for name in (*rows_of(op), "weight"):
        given[name].requires_grad_(False)
    sum(each.sum() for each in run(op, given)).backward()
    assert given["bias"].grad is not None and given["weight"].grad is None


@sums
def test_gradients_of_the_summands_do_not_share_memory(op):
    given = leaves(op)
    sum(each.sum() for each in run(op, given)).backward()
    assert given["x"].grad.data_ptr() != given["residual"].grad.data_ptr()


@sums
def test_what_a_backward_keeps_is_the_sum_and_not_its_summands(op):
    given, kept = leaves(op), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.data_ptr()), lambda each: None):
        y, h = run(op, given)
    assert h.data_ptr() in kept and given["residual"].data_ptr() not in kept
    assert (given["x"].data_ptr() in kept) is ("gate" in modulations_of(op))  # whose gradient needs x


@pytest.mark.parametrize("op", [op for op in SUMS if op.slot("residual").optional], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_a_stream_may_begin_here_and_no_output_is_an_input(op, dtype):
    given = leaves(op, dtype) | {"residual": None}
    y, h = run(op, given)
    assert torch.equal(h, given["x"]) and h.data_ptr() != given["x"].data_ptr()
    assert torch.equal(y, run(op, leaves(op, dtype) | {"residual": torch.zeros_like(given["x"])})[0])


@sums
def test_the_stream_has_the_dtype_that_is_asked_and_the_norm_sees_the_sum_that_is_asked(op):
    given = leaves(op, BF16)
    wide = composite(op, {name: each.detach().float() for name, each in given.items()})[1]
    for dtype in (None, BF16, FP32):
        y, h = run(op, given, residual_dtype=dtype)
        assert h.dtype == (dtype or BF16) and torch.equal(h, wide.to(h.dtype))
        alone = {"x": h, "residual": None} | ({"gate": None} if "gate" in given else {})
        assert torch.equal(y, run(op, given | alone)[0].bfloat16())
    unrounded = run(op, given, normalize_rounded=False)[0]
    assert torch.equal(unrounded, run(op, given, residual_dtype=FP32)[0])
    assert not torch.equal(unrounded, run(op, given)[0])


@forms
def test_x_hat_is_rounded_where_it_is_asked_and_y_has_the_promoted_dtype(op):
    given = leaves(op, BF16) | {"bias": None}
    weight = given["weight"]
    form, rounds_u = op.form._replace(rounds_x_hat=True), op.form.finish == "gate"
    h = run(op, given)[1] if form.rows_out else COMBINE[form.combine](given["x"], form, given)
    x_hat = FACES[f"{op.norm}_norm_fwd_affine"][0](h, eps=EPS, normalized_shape=(COLS,)).bfloat16().float()
    wide = {name: each.float() for name, each in given.items() if each is not None}
    want = finished(x_hat, form, aligned(op, given if rounds_u else wide), BF16 if rounds_u else FP32)
    assert torch.equal(run(op, given, rounding="x_hat")[0], want.bfloat16())
    promoted = BF16 if rounds_u else FP32
    assert run(op, given | {"weight": weight.float()}, rounding="x_hat")[0].dtype == promoted


@forms
def test_modules_start_as_the_plain_norm_and_keep_parameters_alone(op):
    function, module = FACES[op.name]
    for offset in (0.0, 1.0):
        made = module(COLS, elementwise_affine=True, weight_offset=offset, bias=True, dtype=FP64)
        assert list(made.state_dict()) == ["weight", "bias"] and bool((made.weight == 1 - offset).all())
        of = {name: each for name, each in leaves(op).items() if name in arguments_of(op)}
        tensors = [of[name] for name in arguments_of(op)]
        torch.testing.assert_close(made(*tensors), function(**of, eps=made.eps, normalized_shape=(COLS,)))
        assert f"weight_offset={offset}" in repr(made)
    settings = [each for base in type(made).__mro__[:-2] for each in inspect.getfullargspec(base.__init__).kwonlyargs]
    assert not [name for name in settings if f"{name}=" not in repr(made)]
    assert [*module(COLS, elementwise_affine=False).parameters()] == []
    assert module(numpy.int64(COLS)).normalized_shape == (COLS,)


@forms
def test_wrong_operands_get_one_sentence(op):
    given = leaves(op)
    known = given.keys() | {"eps", "rounding"} | {"activation"} & {slot.name for slot in op.inputs}
    for changes, kind, text in (
        ({"x": [1.0]}, TypeError, f"^{op.name}: x must be a tensor, got list"),
        ({"weight": (COLS,), "bias": None}, TypeError, f"^{op.name}: weight must be a tensor, got tuple"),
        ({"weight": torch.ones(3)}, RuntimeError, f"^{op.name}: x must end in normalized_shape"),
        ({"eps": "small"}, TypeError, f"^{op.name}: eps must be a number, got 'small'"),
        ({"rounding": "twice"}, ValueError, f"^{op.name}: rounding must be one of once, x_hat.*, got 'twice'"),
        ({"activation": "relu"}, ValueError, f"^{op.name}: activation must be one of silu, sigmoid, got 'relu'"),
        ({"residual": given["x"][0]}, RuntimeError, f"^{op.name}: residual must have shape"),
        ({"gate": given["x"][0, :2]}, RuntimeError, f"^{op.name}: (gate|scale) must have shape"),
        ({"scale": given["x"][:2]}, RuntimeError, f"^{op.name}: scale must have shape .3 or 1, 5 or 1, 24., or"),
    ):
        if not changes.keys() <= known:
            continue  # an operand or a setting that the form has not
        with pytest.raises(kind, match=text):
            FACES[op.name][0](**({"eps": EPS} | given | changes))
