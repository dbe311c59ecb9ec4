"""How the GPU tests call the ops: in guarded_buffers(), which show reads and writes of the wrong memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import guarded_buffers
from torch import Tensor

from fusednorm.tools.oracle import Case, Inputs, Outputs, assert_outputs_close, fused, make_inputs

GIB = 1 << 30
MOST_SECONDS = 60  # that a test waits for memory


def run(case: Case, inputs: Inputs) -> Outputs:
    """The outputs of the forward and backward ops."""
    with guarded_buffers() as buffers:
        outputs = fused(case, inputs)
    assert buffers, "the ops took their buffers from elsewhere"
    return outputs


def run_backward(case: Case, inputs: Inputs, mean: Tensor | None, rstd: Tensor, mask=(True, True, True)) -> Outputs:
    ops, shape, weight, bias = torch.ops.fusednorm, case.normalized_shape, inputs.weight, inputs.bias
    with guarded_buffers():
        if case.norm == "layer":
            grads = ops.layer_norm_bwd(inputs.grad_out, inputs.x, shape, mean, rstd, weight, bias, list(mask))
        else:
            grads = ops.rms_norm_bwd(inputs.grad_out, inputs.x, shape, rstd, weight, list(mask[:2]))
    return Outputs(None, None, None, *grads)


def fill_with_nan(parts: tuple[Tensor | None, ...]) -> None:
    for part in parts:
        if part is not None:
            part.view(torch.uint8).fill_(255)


def assert_case_is_right(case: Case, inputs: Inputs | None = None) -> None:
    inputs = inputs or make_inputs(case, "cuda")
    assert_outputs_close(run(case, inputs), case, inputs)


def assert_same_bits(got: Outputs, want: Outputs, names=("y", "mean", "rstd", "dx", "dweight", "dbias")) -> None:
    for name in names:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} elements differ"


def skip_unless_memory(gib: float) -> None:
    torch.cuda.empty_cache()
    if (free := wait_for_memory(gib)) < gib:
        pytest.skip(f"needs {gib:.0f} GiB of GPU memory, {free:.0f} are free")


def wait_for_memory(gib: float) -> float:
    """Waits until so much memory is free, if other processes of xdist may hold it. Returns the free GiB."""
    end = time.monotonic() + MOST_SECONDS * ("PYTEST_XDIST_WORKER" in os.environ)
    while True:
        free, total = (size / GIB for size in torch.cuda.mem_get_info())
        if free >= gib or gib > total or time.monotonic() > end:
            return free
        time.sleep(0.1)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, a call that waits for the GPU raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(function: Callable) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of what the function launches, and what it returned. A first call has built the kernels before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


def overwrite(inputs: Inputs, fresh: Inputs) -> None:
    """Copies x, the gradient and the parameters from `fresh`."""
    for name in ("x", "grad_out", "weight", "bias"):
        if getattr(inputs, name) is not None:
            getattr(inputs, name).copy_(getattr(fresh, name))
