"""PyTorch's own samples for the norms (its OpInfos): arguments as its test suite tries them, wrong ones included."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from fusednorm.planner.norm_problem import accumulation_dtype

NAMES = ("nn.functional.layer_norm", "native_layer_norm", "nn.functional.rms_norm")


@functools.cache
def _all_op_infos() -> dict:
    from torch.testing._internal.common_methods_invocations import op_db

    # Importing torch's test code forbids the whole process to set backend flags: allow it again.
    torch.backends.__allow_nonbracketed_mutation_flag = True
    return {op.name: op for op in op_db}


def op_info(name: str):
    """The OpInfo of an op; skips where torch's test code cannot be imported."""
    pytest.importorskip("expecttest", reason="torch's own samples need the package expecttest")
    return _all_op_infos()[name]


def samples(name: str, device: str) -> list[tuple[torch.dtype, object]]:
    """(dtype, sample) for each dtype that the op takes on the device; the same numbers on each call."""
    torch.manual_seed(0)
    op = op_info(name)
    dtypes = sorted(op.supported_dtypes(device), key=str)
    return [(dtype, s) for dtype in dtypes for s in op.sample_inputs(device, dtype, requires_grad=True)]


def wrong_samples(name: str, device: str) -> list:
    op = op_info(name)
    return [] if op.error_inputs_func is None else list(op.error_inputs(device))


def in_float64(sample):
    """The same sample in float64: its results are the reference for the other dtypes."""

    def widen(value):
        return value.detach().double().requires_grad_() if isinstance(value, Tensor) else value

    return sample.transform(widen)


def run(function, sample) -> dict[str, Tensor | None]:
    """What a norm returns for a sample, and the gradients of its operands."""
    operands = [value for value in (sample.input, *sample.args) if isinstance(value, Tensor)]
    outputs = function(sample.input, *sample.args, **sample.kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    y = outputs[0]
    grad = torch.arange(y.numel(), device=y.device).remainder(9).sub(4).div(4)  # exact in every dtype
    grads = torch.autograd.grad(y, operands, grad.reshape(y.shape).to(y.dtype), allow_unused=True)
    named = dict(zip(("y", "mean", "rstd"), outputs, strict=False))
    named |= {f"gradient of operand {i}": grad for i, grad in enumerate(grads)}
    return {name: None if t is None else t.detach() for name, t in named.items()}


def assert_right(got: dict, exact: dict, stock: dict, sample) -> None:
    """`got` is near `exact`, and has the shapes, strides and dtypes of `stock`.

    The bound grows with the largest element and the largest rstd, which multiplies the rounding errors of x and dy.
    """
    assert got.keys() == stock.keys()
    rstd = _largest_rstd(sample)
    for name, value in got.items():
        assert (value is None) == (stock[name] is None), name
        if value is None:
            continue
        want, kind = exact[name], accumulation_dtype(sample.input.dtype)
        assert value.shape == stock[name].shape and value.stride() == stock[name].stride(), name
        # ATen's CPU kernel, unlike CUDA's and ours, returns 16-bit statistics for 16-bit x.
        assert value.dtype == stock[name].dtype or (name in ("mean", "rstd") and value.dtype == kind), name
        size = want.nan_to_num().abs().max().item() if want.numel() else 0.0
        atol = 2 * torch.finfo(value.dtype).eps * size + 320 * torch.finfo(kind).eps * (1 + rstd)
        told = f"{name}: {{}}".format
        torch.testing.assert_close(value.double(), want, rtol=0, atol=atol, equal_nan=True, msg=told)


def _largest_rstd(sample) -> float:
    if not sample.input.numel():
        return 0.0
    eps = sample.kwargs.get("eps") or next((a for a in sample.args if isinstance(a, float)), 1e-5)
    x, dims = sample.input.detach().double(), tuple(range(-len(sample.args[0]), 0))
    centered = x - x.mean(dims, keepdim=True)
    return max(torch.rsqrt(t.square().mean(dims) + eps).nan_to_num().max().item() for t in (x, centered))
