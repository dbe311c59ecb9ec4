"""Shared by tests, bench and demo: cases, inputs, the float64 oracle, ATen's own results, and the tolerances.

The oracle is autograd through `torch.nn.functional` in float64, never a second copy of a formula. Each output must meet
two bounds:

* As a whole: its relative L2 error is at most 1.5 times that of ATen's own kernel on the same input, plus half an ulp
  of the output's dtype.
* Element by element: its error is at most half an ulp of the output's dtype plus `ACC_ULPS` ulps of the accumulation
  dtype. The latter ulps are relative to the sum of the magnitudes of the element's terms. This bound catches a single
  wrong row, column or element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dtypes import DTYPE_NAMES
from ..namespace import TORCH_OPS

STOCK_FACTOR = 1.5  # limit of an output's relative L2 error, as a multiple of that of ATen's kernel
# Limit of an element's error, in ulps of the accumulation dtype. It is several times the error of a sound fp32
# computation (bench/NOTES.md, "Simulator and sanitizer").
ACC_ULPS = 16

_DTYPE_NAMES = {**DTYPE_NAMES, None: "none"}


@dataclass(frozen=True)
class Case:
    """One problem. norm is "layer" or "rms". A parameter is absent if its dtype is None; grad_dtype None means x_dtype.

    The trailing `normalized_ndim` dims of `shape` are one row. eps None is the machine epsilon of the accumulation
    dtype.
    """

    norm: str
    shape: tuple[int, ...]
    normalized_ndim: int = 1
    x_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    eps: float | None = 1e-5

    def __str__(self) -> str:
        dims = "x".join(map(str, self.shape))
        parts = [self.norm, dims, _DTYPE_NAMES[self.x_dtype], f"w_{_DTYPE_NAMES[self.weight_dtype]}"]
        if self.norm == "layer":
            parts.append(f"b_{_DTYPE_NAMES[self.bias_dtype]}")
        if self.grad_dtype not in (None, self.x_dtype):
            parts.append(f"dy_{_DTYPE_NAMES[self.grad_dtype]}")
        if self.normalized_ndim != 1:
            parts.append(f"last{self.normalized_ndim}")
        if self.eps != 1e-5:
            parts.append(f"eps_{self.eps}")
        return "-".join(parts)

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.normalized_ndim :]

    @property
    def stats_shape(self) -> tuple[int, ...]:
        return self.shape[: len(self.shape) - self.normalized_ndim] + (1,) * self.normalized_ndim

    @property
    def cols(self) -> int:
        return math.prod(self.normalized_shape)

    @property
    def rows(self) -> int:
        return math.prod(self.stats_shape)

    @property
    def acc_dtype(self) -> torch.dtype:
        return torch.float64 if self.x_dtype == torch.float64 else torch.float32

    @property
    def resolved_eps(self) -> float:
        return torch.finfo(self.acc_dtype).eps if self.eps is None else self.eps


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case. The results of `exact` and `stock` are cached here, so that each is computed once."""

    x: Tensor
    grad_out: Tensor
    weight: Tensor | None
    bias: Tensor | None
    _known: dict[tuple[str, Case], Outputs] = field(default_factory=dict, init=False, repr=False)

    def remember(self, kind: str, case: Case, outputs: Outputs) -> None:
        """Make `outputs` the cached result of "exact" or "stock" (`kind`)."""
        self._known[kind, case] = outputs

    def forget(self) -> None:
        """Drop the cached results."""
        self._known.clear()


@dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of the forward and backward of one case. None is an absent output or one not to be compared."""

    y: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    dx: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Random contiguous inputs. x has mean 0.5 and deviation 1.5, so that a kernel that does not centre it fails."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...], mean: float, std: float, dtype: torch.dtype | None) -> Tensor | None:
        if dtype is None:
            return None
        draw_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=generator, device=device, dtype=draw_dtype).mul_(std).add_(mean).to(dtype)

    return Inputs(
        x=normal(case.shape, 0.5, 1.5, case.x_dtype),
        grad_out=normal(case.shape, 0.0, 1.0, case.grad_dtype or case.x_dtype),
        weight=normal(case.normalized_shape, 1.0, 0.5, case.weight_dtype),
        bias=normal(case.normalized_shape, 0.0, 0.5, case.bias_dtype),
    )


def fused(case: Case, inputs: Inputs) -> Outputs:
    """This package's ops, forward and backward."""
    ops, shape = TORCH_OPS, case.normalized_shape
    if case.norm == "layer":
        y, mean, rstd = ops.layer_norm_fwd(inputs.x, shape, inputs.weight, inputs.bias, case.resolved_eps)
        mask = [True, inputs.weight is not None, inputs.bias is not None]
        grads = ops.layer_norm_bwd(inputs.grad_out, inputs.x, shape, mean, rstd, inputs.weight, inputs.bias, mask)
        return Outputs(y, mean, rstd, *grads)
    y, rstd = ops.rms_norm_fwd(inputs.x, shape, inputs.weight, case.eps)
    mask = [True, inputs.weight is not None]
    return Outputs(y, None, rstd, *ops.rms_norm_bwd(inputs.grad_out, inputs.x, shape, rstd, inputs.weight, mask))


def exact(case: Case, inputs: Inputs) -> Outputs:
    """The oracle: float64 autograd of torch.nn.functional on the upcast inputs, on the inputs' device."""
    return _remember("exact", case, inputs, lambda: _autograd(case, inputs, torch.float64))


def stock(case: Case, inputs: Inputs) -> Outputs:
    """ATen's own kernels on the same input with fp32 statistics, rounded to the output dtypes.

    The operands are upcast to the accumulation dtype if the kernels do not take their mix of dtypes, and always on the
    CPU. There ATen's backward accumulates dweight and dbias of a 16-bit x in 16 bits, whatever the parameters' dtype,
    with errors up to half of an element's value.
    """
    return _remember("stock", case, inputs, lambda: _stock(case, inputs))


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64, or ||got - want|| if want is all zero."""
    want = want.double()
    error, norm = torch.linalg.vector_norm(got.double() - want).item(), torch.linalg.vector_norm(want).item()
    return error / norm if norm else error


def assert_outputs_close(got: Outputs, case: Case, inputs: Inputs) -> None:
    """Assert dtype, shape, contiguity and both bounds of the module's docstring for each output that `got` has."""
    want, aten = exact(case, inputs), stock(case, inputs)
    dtypes = {"mean": case.acc_dtype, "rstd": case.acc_dtype, "dweight": case.weight_dtype, "dbias": case.bias_dtype}
    magnitudes = _term_magnitudes(case, inputs, want)
    for name in (f.name for f in fields(Outputs)):
        output, reference = getattr(got, name), getattr(want, name)
        if output is None:
            continue
        label = f"{case}: {name}"
        if reference is None:  # no assert statements here: python -O leaves them out
            raise AssertionError(f"{label} must be None")
        dtype, shape = dtypes.get(name, case.x_dtype), tuple(reference.shape)
        if output.dtype != dtype:
            raise AssertionError(f"{label} must be {dtype}, got {output.dtype}")
        if output.shape != shape:
            raise AssertionError(f"{label} must be {shape}, got {tuple(output.shape)}")
        if not output.is_contiguous():
            raise AssertionError(f"{label} must be contiguous, got strides {output.stride()}")
        compared = _finite_parts(label, output, reference, getattr(aten, name), magnitudes[name])
        _assert_elements_close(label, *compared, dtype, case.acc_dtype)
        _assert_whole_close(label, *compared, dtype, case.acc_dtype)


def _remember(kind: str, case: Case, inputs: Inputs, compute) -> Outputs:
    if (kind, case) not in inputs._known:
        inputs._known[kind, case] = compute()
    return inputs._known[kind, case]


def _autograd(case: Case, inputs: Inputs, dtype: torch.dtype) -> Outputs:
    """Autograd of torch.nn.functional on operands cast to dtype, with the statistics by torch's own reductions."""
    params = {"weight": inputs.weight, "bias": inputs.bias}
    leaves = {"input": inputs.x} | {name: tensor for name, tensor in params.items() if tensor is not None}
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in leaves.items()}
    function = F.layer_norm if case.norm == "layer" else F.rms_norm
    with torch.enable_grad():
        y = function(normalized_shape=case.normalized_shape, eps=case.resolved_eps, **leaves)
        grads = torch.autograd.grad(y, list(leaves.values()), inputs.grad_out.detach().to(dtype))
    grads = dict(zip(leaves, grads, strict=True))
    x, dims = leaves["input"].detach(), tuple(range(-case.normalized_ndim, 0))
    if case.norm == "layer":
        mean = x.mean(dims, keepdim=True)
        x = x - mean  # two passes: over a long row the one pass of x.var() is too inexact
    else:
        mean = None
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + case.resolved_eps)
    return Outputs(y.detach(), mean, rstd, grads["input"], grads.get("weight"), grads.get("bias"))


def _stock(case: Case, inputs: Inputs) -> Outputs:
    dtypes = {inputs.x.dtype, inputs.grad_out.dtype} | {t.dtype for t in (inputs.weight, inputs.bias) if t is not None}
    runs_as_it_is = inputs.x.device.type != "cpu" and len(dtypes) == 1
    dtype = case.x_dtype if runs_as_it_is else case.acc_dtype
    if case.norm == "rms" and inputs.x.device.type == "cpu":
        outputs = _autograd(case, inputs, dtype)
    else:
        outputs = _aten(case, inputs, dtype)
    return Outputs(
        _cast(outputs.y, case.x_dtype),
        outputs.mean,
        outputs.rstd,
        _cast(outputs.dx, case.x_dtype),
        _cast(outputs.dweight, case.weight_dtype),
        _cast(outputs.dbias, case.bias_dtype),
    )


def _aten(case: Case, inputs: Inputs, dtype: torch.dtype) -> Outputs:
    shape, aten = case.normalized_shape, torch.ops.aten
    x, grad_out, weight, bias = (_cast(t, dtype) for t in (inputs.x, inputs.grad_out, inputs.weight, inputs.bias))
    if case.norm == "rms":
        y, rstd = aten._fused_rms_norm(x, shape, weight, case.resolved_eps)
        mask = [True, weight is not None]
        return Outputs(y, None, rstd, *aten._fused_rms_norm_backward(grad_out, x, shape, rstd, weight, mask))
    y, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, case.resolved_eps)
    mask = [True, weight is not None, bias is not None]
    return Outputs(y, mean, rstd, *aten.native_layer_norm_backward(grad_out, x, shape, mean, rstd, weight, bias, mask))


def _cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None or dtype is None else tensor.detach().to(dtype)


def _term_magnitudes(case: Case, inputs: Inputs, want: Outputs) -> dict[str, Tensor]:
    """Per output, the sum of the magnitudes of each element's terms. Its rounding error is measured against this sum.

    Centring is the ill-conditioned step. One ulp of the mean shifts a whole row of x_hat by `shift` = mean|x| * rstd
    ulps. The shift enters y, dx and dweight linearly. It enters the variance only squared, because deviations from the
    mean sum to zero.
    """
    rows, cols = case.rows, case.cols
    x, dy = (t.detach().double().reshape(rows, cols) for t in (inputs.x, inputs.grad_out))
    rstd, dy = want.rstd.reshape(rows, 1), dy.abs()
    if case.norm == "layer":
        mean_terms = x.abs().mean(1, keepdim=True)
        x = x - want.mean.reshape(rows, 1)
    else:
        mean_terms = torch.zeros_like(rstd)
    shift = mean_terms * rstd
    x_hat = x.mul(rstd).abs_()
    wdy = dy if inputs.weight is None else dy * inputs.weight.detach().double().abs().reshape(1, cols)
    dx = wdy + (1 + shift * x_hat) * wdy.mean(1, keepdim=True) + (shift + x_hat) * (wdy * x_hat).mean(1, keepdim=True)
    x_hat += shift
    y = x_hat if inputs.weight is None else x_hat * inputs.weight.detach().double().abs().reshape(1, cols)
    if inputs.bias is not None:
        y = y + inputs.bias.detach().double().abs().reshape(1, cols)
    terms = {
        "y": y,
        "mean": mean_terms,
        "rstd": rstd * (1 + ACC_ULPS * torch.finfo(case.acc_dtype).eps * shift.square()),
        "dx": dx * rstd,
        "dweight": (dy * x_hat).sum(0),
        "dbias": dy.sum(0),
    }
    return {name: t.reshape(getattr(want, name).shape) for name, t in terms.items() if getattr(want, name) is not None}


def _finite_parts(label: str, got: Tensor, want: Tensor, aten: Tensor, magnitude: Tensor) -> tuple[Tensor, ...]:
    """All four in float64, with zero where the oracle is not finite. There `got` must be the same nan or infinity."""
    got, aten, finite = got.detach().double(), aten.double(), want.isfinite()
    same = torch.where(finite, got.isfinite(), (got == want) | (got.isnan() & want.isnan()))
    if not same.all():
        raise AssertionError(f"{label} and the oracle are not finite in different places: {_worst(~same, got, want)}")
    return tuple(torch.where(finite, t, 0.0) for t in (got, want, aten, magnitude))


def _assert_elements_close(label, got: Tensor, want: Tensor, aten: Tensor, magnitude: Tensor, dtype, acc_dtype) -> None:
    info = torch.finfo(dtype)
    bound = want.abs() * (info.eps / 2) + magnitude * (ACC_ULPS * torch.finfo(acc_dtype).eps)
    excess = (got - want).abs_() / bound.clamp_(min=info.smallest_normal * info.eps)
    if (excess > 1).any():
        raise AssertionError(f"{label} has an element beyond its bound: {_worst(excess, got, want)}")


def _assert_whole_close(label, got: Tensor, want: Tensor, aten: Tensor, magnitude: Tensor, dtype, acc_dtype) -> None:
    if not want.numel():
        return
    norm = torch.linalg.vector_norm
    error, aten_error, size = norm(got - want).item(), norm(aten - want).item(), norm(want).item()
    limit = STOCK_FACTOR * aten_error + size * torch.finfo(dtype).eps / 2
    # If few elements dominate, ATen's error may be small by luck: allow half an ulp of the largest element's terms.
    limit += magnitude.max().item() * torch.finfo(acc_dtype).eps / 2
    # The oracle is exact only to float64. Its error matters for float64 inputs and where the exact answer is zero.
    limit += norm(magnitude).item() * torch.finfo(torch.float64).eps * ACC_ULPS
    if not error <= limit:  # nan fails
        raise AssertionError(f"{label} has L2 error {error:.3e}, limit {limit:.3e}, ATen's own {aten_error:.3e}")


def _worst(badness: Tensor, got: Tensor, want: Tensor) -> str:
    flat = int(badness.flatten().double().nan_to_num(nan=math.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), badness.shape))
    values = f"got {got.flatten()[flat]:.9g}, want {want.flatten()[flat]:.9g}"
    return f"{int((badness >= 1).sum())} of {badness.numel()}, worst at {index}: {values}"
