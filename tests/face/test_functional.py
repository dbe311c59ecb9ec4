"""fusednorm.functional calls torch.nn.functional for CPU tensors and our ops for CUDA tensors.

No GPU is needed: fake tensors on "cuda" carry their device, shape and dtype through the dispatcher.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from op_log import OpLog
from torch._subclasses.fake_tensor import FakeTensorMode

from fusednorm import functional

NAMES = ("layer_norm", "rms_norm")
names = pytest.mark.parametrize("name", NAMES)


def ops_of(function, *args):
    """(what the function returns, names of the ops that it ran)."""
    with OpLog() as log:
        result = function(*args)
    return result, log.names


@pytest.fixture
def cuda_autocast():
    """CUDA autocast without a GPU: torch.autocast("cuda") would switch itself off."""
    was_enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", was_enabled)


@names
def test_signature_is_that_of_torch_nn_functional(name):
    ours, stock = (inspect.signature(getattr(module, name)).parameters.values() for module in (functional, F))
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in stock]


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_tensors_run_exactly_what_stock_runs(name, dtype):
    x, weight = torch.randn(3, 8, dtype=dtype, requires_grad=True), torch.randn(8, dtype=dtype, requires_grad=True)

    def forward_and_backward(module):
        y = getattr(module, name)(x, (8,), weight)
        return y, *torch.autograd.grad(y.square().sum(), (x, weight))

    (got, ours), (want, stock) = (ops_of(forward_and_backward, module) for module in (functional, F))
    assert ours == stock
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_cpu_tensors_keep_what_only_stock_takes():
    x = torch.randn(3, 8, dtype=torch.complex64)
    assert torch.equal(functional.rms_norm(x, (8,)), F.rms_norm(x, (8,)))
    with pytest.raises(RuntimeError, match="Given normalized_shape"):
        functional.layer_norm(x.real, (7,))


@names
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16])
def test_cuda_tensors_run_one_op_and_keep_their_dtype(name, weight_dtype):
    with FakeTensorMode():
        x = torch.empty(3, 4, 8, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
        weight = None if weight_dtype is None else torch.empty(8, dtype=weight_dtype, device="cuda")
        y, ops = ops_of(getattr(functional, name), x, (8,), weight)
    assert ops == [f"fusednorm.{name}_fwd.default"]
    assert (y.device.type, y.dtype, y.shape, y.is_contiguous()) == ("cuda", torch.bfloat16, (4, 3, 8), True)


@names
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_autocast_gives_the_dtype_that_stock_gives(name, x_dtype, weight_dtype, cuda_autocast):
    with FakeTensorMode():
        x = torch.empty(3, 8, dtype=x_dtype, device="cuda")
        weight = None if weight_dtype is None else torch.empty(8, dtype=weight_dtype, device="cuda")
        (got, ours), (want, _) = (ops_of(getattr(module, name), x, (8,), weight) for module in (functional, F))
    assert got.dtype == want.dtype
    assert f"fusednorm.{name}_fwd.default" in ours


def test_autocast_leaves_the_op_alone(cuda_autocast):
    with FakeTensorMode():
        x = torch.empty(3, 8, dtype=torch.bfloat16, device="cuda")
        assert torch.ops.fusednorm.layer_norm_fwd(x, [8])[0].dtype == torch.bfloat16
        assert torch.ops.fusednorm.rms_norm_fwd(x, [8])[0].dtype == torch.bfloat16


@names
def test_cuda_tensors_get_the_errors_of_the_op(name):
    with FakeTensorMode():
        x = torch.empty(3, 8, device="cuda")
        with pytest.raises(RuntimeError, match=f"{name}_fwd: weight must be on cuda:0 as x is, got cpu"):
            getattr(functional, name)(x, (8,), torch.empty(8))
        with pytest.raises(RuntimeError, match=f"{name}_fwd: x must be float16, .*, got torch.int64"):
            getattr(functional, name)(x.long(), (8,))
