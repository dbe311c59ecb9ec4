"""column_sum on CPU and meta tensors: values, errors, derivatives and torch's opcheck. Triton's interpreter runs its
portable kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import BF16, FP16, FP32, FP64, guarded_buffers
from column_sums import Sums, assert_sums_close
from torch.testing import assert_close

import fusednorm
from fusednorm import batch_invariant
from fusednorm.columns import plan as column_plan
from fusednorm.columns.plan import MAX_TENSORS, Choice, choose, portable_plans
from fusednorm.columns.problem import check_column_sum
from fusednorm.host import gpus
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner.device import A100, H200, RTX_5090

OP = torch.ops.fusednorm.column_sum


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("count", [1, 2, 57])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64], ids=str)
def test_sums_are_those_of_float64(dtype, count, total):
    inputs = Sums(300, 40, count, dtype).inputs()
    got = fusednorm.column_sum(inputs, total=total)
    assert [(s.dtype, s.shape) for s in got] == [(dtype, (40,))] * (1 if total else count)
    assert_sums_close(got, inputs, total)


@pytest.mark.parametrize("dtype, out_dtype", [(BF16, FP32), (FP32, FP16), (FP16, BF16), (FP32, FP64), (FP64, FP32)])
def test_result_has_the_dtype_asked_for_and_is_rounded_once(dtype, out_dtype):
    inputs = Sums(3000, 8, 2, dtype).inputs()
    got = fusednorm.column_sum(inputs, dtype=out_dtype)
    assert {s.dtype for s in got} == {out_dtype}
    assert_sums_close(got, inputs)


@pytest.mark.parametrize("shape", [(5,), (0, 4), (3, 0), (2, 0, 4), (1, 1), (2, 3, 4, 5)], ids=str)
def test_all_dims_but_the_last_are_summed(shape):
    x = torch.randn(shape)
    rows = x.reshape(math.prod(shape[:-1]), shape[-1])
    assert_close(fusednorm.column_sum([x])[0], rows.sum(0))
    assert_close(fusednorm.column_sum([x, x], total=True)[0], 2 * rows.sum(0))


@pytest.mark.parametrize("total", [False, True])
def test_more_tensors_than_one_launch_takes(total):
    inputs = Sums(6, 5, 2 * MAX_TENSORS + 3, BF16).inputs()
    assert_sums_close(fusednorm.column_sum(inputs, total=total), inputs, total)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_ordered_sums_are_those_of_micro_batches_added_up(dtype, total):
    tensors = [each.view(-1, 3, 40) for each in Sums(63, 40, 2, dtype).inputs()]
    strided = [torch.stack([each, each], 1)[:, 0] for each in tensors]
    with kernels_on("cpu"), batch_invariant(ordered_sums=24):
        whole = fusednorm.column_sum(strided, total=total, dtype=FP32)
        parts = zip(*(each.split(8) for each in tensors), strict=True)
        first, *rest = (fusednorm.column_sum(part, total=total, dtype=FP32) for part in parts)
    for each in rest:
        first = [a + b for a, b in zip(first, each, strict=True)]
    assert all(map(torch.equal, whole, first))
    assert_sums_close(whole, tensors, total)


def test_the_rows_of_a_block_and_the_architecture_choose_the_splits_of_ordered_sums(monkeypatch):
    asked, choose = [], column_plan.choose
    monkeypatch.setattr(column_plan, "choose", lambda *given: (asked.append(given[1:3]), choose(*given))[1])
    with kernels_on("cpu"), batch_invariant(ordered_sums=16):
        for sms in (3, 50):
            monkeypatch.setattr(gpus, "spec_of", lambda device, sms=sms: replace(A100, sm_count=sms))
            fusednorm.column_sum([torch.ones(40, 8)])
    assert asked[:3] == asked[3:] and [rows for rows, _ in asked[:3]] == [16, 16, 8]


def test_explain_says_that_ordered_sums_run_block_by_block():
    with batch_invariant(ordered_sums=1024):
        said = fusednorm.explain_column_sum([torch.empty(4000, 4096, device="meta")], device=H200)
    assert "runs for 4 blocks of up to 1024 rows in turn" in str(said)
    assert said.choice == choose(said.problem, 1024, said.device)


def test_autograd_does_not_record_what_needs_no_gradient():
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        assert not fusednorm.column_sum([x])[0].requires_grad
    with torch.inference_mode():
        assert fusednorm.column_sum([x])[0].is_inference()


ERRORS = {
    "inputs must hold at least one tensor, got none": ([],),
    r"inputs\[0\] must have at least one dimension, got shape \(\)": ([torch.tensor(1.0)],),
    r"inputs\[0\] must have dtype float16, .*, got torch.int32": ([torch.ones(2, dtype=torch.int32)],),
    r"inputs\[1\] must have shape \(2,\) as inputs\[0\] has, got \(3,\)": ([torch.ones(2), torch.ones(3)],),
    r"inputs\[1\] must have dtype torch.float32 .*, got torch.float16": ([torch.ones(2), torch.ones(2).half()],),
    r"inputs\[1\] must have device cpu .*, got meta": ([torch.ones(2), torch.ones(2, device="meta")],),
    "dtype must be float16, .*, got torch.int64": ([torch.ones(2)], torch.int64),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_bad_arguments_are_refused_in_one_sentence(message, requires_grad):
    tensors, *dtype = ERRORS[message]
    inputs = [t.clone().requires_grad_(requires_grad and t.is_floating_point()) for t in tensors]
    with pytest.raises(RuntimeError, match=f"^column_sum: {message}$"):
        fusednorm.column_sum(inputs, dtype=dtype[0] if dtype else None)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.ones(3, 4), "inputs must be a sequence of tensors, got Tensor"),
        ([torch.ones(3, 4), None], r"inputs\[1\] must be a tensor, got NoneType"),
    ],
)
def test_what_is_no_sequence_of_tensors_is_refused_in_one_sentence(inputs, message):
    with pytest.raises(TypeError, match=f"^column_sum: {message}$"):
        fusednorm.column_sum(inputs)


def test_a_tensor_whose_memory_was_freed_is_refused():
    x = torch.randn(3, 4)
    x.untyped_storage().resize_(0)
    with kernels_on("cpu"), pytest.raises(RuntimeError, match="column_sum: all tensors must have memory, got one of"):
        fusednorm.column_sum([torch.randn(3, 4), x])


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_opcheck(dtype, requires_grad, total):
    inputs = [torch.randn(2, 3, 8, dtype=dtype).transpose(0, 1).requires_grad_(requires_grad) for _ in range(3)]
    for out_dtype in (None, FP32):
        torch.library.opcheck(OP.default, (inputs,), {"total": total, "dtype": out_dtype})


@pytest.mark.parametrize("total", [False, True])
def test_derivatives_of_first_and_second_order_are_right(total):
    def sums(*inputs):
        return tuple(fusednorm.column_sum(inputs, total=total))

    inputs = [torch.randn(2, 3, 4, dtype=FP64, requires_grad=needs) for needs in (True, False, True)]
    assert torch.autograd.gradcheck(sums, inputs)
    assert torch.autograd.gradgradcheck(sums, inputs)


def test_gradient_has_the_dtype_of_the_input_and_only_where_one_is_needed():
    inputs = [torch.randn(3, 4, dtype=BF16, requires_grad=needs) for needs in (True, False, True)]
    first, _, _ = fusednorm.column_sum(inputs, dtype=FP32)
    first.backward(torch.arange(4.0))
    assert [x.grad is None for x in inputs] == [False, True, True]
    assert inputs[0].grad.dtype == BF16
    assert torch.equal(inputs[0].grad, torch.arange(4.0).expand(3, 4).bfloat16())


def test_a_backward_that_sums_columns_takes_a_batch_of_gradients():
    class TimesItsSum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * fusednorm.column_sum([grad])[0]

    x, grads = torch.randn(3, 4, requires_grad=True), torch.randn(6, 3, 4)
    (got,) = torch.autograd.grad(TimesItsSum.apply(x), x, grads, is_grads_batched=True)
    assert_close(got, grads * grads.sum(1, keepdim=True))


def test_torch_func_looks_into_the_sums():
    a, b = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    first, second = torch.func.vmap(lambda a, b: fusednorm.column_sum([a, b]))(a, b)
    assert_close(first, a.sum(1))
    assert_close(second, b.sum(1))
    grad = torch.func.grad(lambda x: fusednorm.column_sum([x])[0].square().sum())(a[0])
    assert_close(grad, 2 * a[0].sum(0).expand(3, 4))


def test_one_compiled_graph_serves_every_row_count():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def both(x, y):
        return fusednorm.column_sum([x, y]) + fusednorm.column_sum([x, y], total=True)

    for rows in (2, 3, 17, 100):
        inputs = torch.randn(rows, 8), torch.randn(rows, 8)
        *each, total = both(*inputs)
        assert_sums_close(each, inputs)
        assert_sums_close([total], inputs, total=True)
    assert len(graphs) == 1


def test_compiled_backward_is_the_eager_one():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x):
        return fusednorm.column_sum([x])[0].square().sum()

    x = torch.randn(6, 4, requires_grad=True)
    loss(x).backward()
    assert_close(x.grad, 2 * x.detach().sum(0).expand(6, 4))


def test_explanation_says_what_runs_and_why_not_tma():
    def text(*shape, count=1, device=H200, **options):
        inputs = [torch.empty(shape, dtype=BF16, device="meta")] * count
        return str(fusednorm.explain_column_sum(inputs, device=device, **options))

    assert "RingSum" in text(16384, 16384) and "shared memory" in text(16384, 16384)
    assert "not by TMA: it needs compute capability 9.0" in text(16384, 16384, device=A100)
    assert "multiples of 16 bytes" in text(16384, 1001)
    assert "float64" in text(16384, 16384, dtype=FP64)
    assert "has no room in shared memory" in text(4096, 1024, count=64, total=True, device=RTX_5090)
    assert "second launch" in text(65536, 256)
    assert "ATen" in str(fusednorm.explain_column_sum([torch.ones(2, 2)]))


def test_explanation_names_the_inputs_that_are_copied():
    packed = torch.randn(4, 6, 8).transpose(0, 1)  # no single stride leads from each row to the next
    text = str(fusednorm.explain_column_sum([torch.randn(6, 4, 8), packed, packed], device=H200))
    assert "inputs 1, 2 are copied first" in text


# (sum, number of splits) for the portable kernel in the interpreter. The finalizer runs if there are several splits.
INTERPRETED = [
    (Sums(300, 200, 1, FP32), 1),
    (Sums(300, 200, 1, FP32), 3),
    (Sums(70, 130, 3, BF16, out_dtype=FP32), 2),
    (Sums(70, 130, 3, BF16, total=True), 2),
    (Sums(33, 1, 2, FP16), 1),
    (Sums(5, 7, 2, FP64, total=True), 3),
    (Sums(1, 9, 1, FP32, out_dtype=FP64), 1),
    (Sums(300, 9, 1, FP32, out_dtype=FP64), 1),
]


@pytest.mark.parametrize("sums, splits", INTERPRETED, ids=str)
def test_portable_kernel_sums_every_row_once_whatever_the_tile(sums, splits):
    pytest.importorskip("triton")
    from fusednorm.columns import launch as launch_columns

    inputs = sums.inputs()
    call = check_column_sum(inputs, sums.total, sums.out_dtype)
    for plan in portable_plans(call.problem, A100):
        with guarded_buffers() as buffers:
            got = launch_columns.run(call, Choice(plan, splits))
        assert len(buffers) == len(got) + (splits > 1)
        assert_sums_close(got, inputs, sums.total)


@pytest.mark.parametrize("count", [1, 3])
def test_portable_kernel_reads_rows_in_place(count):
    pytest.importorskip("triton")
    from fusednorm.columns import launch as launch_columns

    storage = torch.full((40, 3 * 24), float("nan"))
    inputs = [storage[::2, 24 * i : 24 * i + 20] for i in range(count)]
    for x in inputs:
        x.copy_(torch.randn(20, 20))
    call = check_column_sum(inputs, False, None)
    assert all(view.tensor.data_ptr() == x.data_ptr() for view, x in zip(call.views, inputs, strict=True))
    assert_sums_close(launch_columns.column_sum(call), inputs)


def test_a_total_of_more_tensors_than_one_launch_takes_is_rounded_once():
    inputs = [torch.zeros(1, 4, dtype=BF16) for _ in range(MAX_TENSORS + 1)]
    inputs[0].fill_(256), inputs[1].fill_(1), inputs[-1].fill_(-256)  # 257 is no bfloat16
    assert torch.equal(fusednorm.column_sum(inputs, total=True)[0], torch.ones(4, dtype=BF16))


def test_portable_kernel_reads_each_tensor_at_its_own_stride():
    pytest.importorskip("triton")
    from fusednorm.columns import launch as launch_columns

    inputs = [torch.randn(20, 24 * n)[:, :20] for n in (1, 2, 3)]
    assert_sums_close(launch_columns.column_sum(check_column_sum(inputs, False, None)), inputs)


def test_one_tensor_that_is_not_aligned_keeps_all_from_tma():
    aligned, unaligned = torch.randn(20, 24)[:, :20], torch.randn(20, 25)[:, 1:21]
    assert check_column_sum([aligned, aligned], False, None).problem.tma_aligned
    assert not check_column_sum([aligned, unaligned], False, None).problem.tma_aligned
