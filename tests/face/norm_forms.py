"""The forms as tests call them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fusednorm
from bench.written import FUNCTIONS, SETTINGS, as_written, modulations_of, rows_of
from fusednorm.operands import FORM_OPS, Op
from fusednorm.problem.rows import spread

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
COLS, EPS = 24, 1e-3
def module_of(function: str) -> str:
    """The name of a function's module."""
    parts = function.replace("layer_norm", "LayerNorm").replace("rms_norm", "RMSNorm").split("_")
    return "".join(part[0].upper() + part[1:] for part in parts)


class WideLayerNorm(fusednorm.AddLayerNorm):
    form = "of_wide_sum"  # for a residual of any dtype


class WideRMSNorm(fusednorm.AddRMSNorm):
    form = "of_wide_sum"


def of_wide_sum(
    norm, x, residual, weight=None, bias=None, eps=1e-5, residual_dtype=None, *, normalized_shape=None,
    weight_offset=0.0, rounding="once", normalize_rounded=True,
):  # fmt: skip
    op = f"{norm}_norm_fwd_of_{'sum' if residual is None else 'wide_sum'}"
    settings = normalized_shape, weight_offset, rounding, (normalize_rounded, residual_dtype)
    return fusednorm.functional.of_form(op, x, (residual,), weight, bias, eps, *settings)


FACES = {}  # the function and the module of each form
for _form, _function in FUNCTIONS.items():
    for _norm in ("layer", "rms"):
        _name, _settings = _function.format(f"{_norm}_norm"), SETTINGS.get(_form, {})
        _faces = getattr(fusednorm, _name), getattr(fusednorm, module_of(_name))
        FACES[f"{_norm}_norm_fwd_{_form}"] = tuple(partial(each, **_settings) if _settings else each for each in _faces)
for _norm, _module in (("layer", WideLayerNorm), ("rms", WideRMSNorm)):
    FACES[f"{_norm}_norm_fwd_of_wide_sum"] = partial(of_wide_sum, _norm), _module

forms = pytest.mark.parametrize("op", FORM_OPS, ids=lambda op: op.name)


def arguments_of(op: Op) -> list[str]:
    """The tensors beside weight and bias, in the order in which a module takes them."""
    order = "x", "scale", "shift", "residual", "gate"
    return sorted((*rows_of(op), *modulations_of(op)), key=order.index)


def leaves(op: Op, *dtypes: torch.dtype, shape=(3, 5, COLS), seed=0, device="cpu") -> dict[str, Tensor]:
    """x, a residual or a gate if the form has one, weight and bias, and modulations: the scale has a row for each
    sample, the shift one for each token, and the gate one for all tokens if x has but one batch dim."""
    generator = torch.Generator(device).manual_seed(seed)
    modulations = {"scale": (*shape[:1], shape[-1]), "shift": shape, "gate": (*shape[:-2], 1, shape[-1])}
    names = [*rows_of(op), "weight", "bias", *modulations_of(op)]
    dtypes = dtypes or (FP64,) * len(names)
    made = {}
    for name, dtype in zip(names, (*dtypes, *[dtypes[-1]] * len(names)), strict=False):
        size = shape if name in rows_of(op) else modulations.get(name, shape[-1:])
        drawn = torch.randn(size, generator=generator, device=device, dtype=FP64)
        made[name] = (drawn + 0.5).to(dtype).requires_grad_()
    return made


def run(op: Op, given: dict[str, Tensor | None], **settings: Any) -> tuple[Tensor, ...]:
    outputs = FACES[op.name][0](**given, eps=EPS, **settings)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def aligned(op: Op, given: dict[str, Any]) -> dict[str, Any]:
    """With modulations that broadcast."""
    return given | {name: spread(given[name], given["x"].dim(), 1) for name in modulations_of(op)}


def composite(op: Op, given: dict[str, Tensor | None], offset: float = 0.0) -> tuple[Tensor, ...]:
    """As models write it, in the dtypes of the tensors."""
    return as_written(op.norm, op.form._replace(weight_offset=offset), aligned(op, given), EPS)


def gradients(outputs: tuple[Tensor, ...], given: dict[str, Tensor], wants: tuple[bool, ...] = (True, True)):
    used = [each for each, want in zip(outputs, wants, strict=False) if want]
    ramps = [torch.linspace(-1, 1, each.numel(), device=each.device) for each in used]
    grads = [ramp.reshape(each.shape).to(each.dtype) for ramp, each in zip(ramps, used, strict=True)]
    return torch.autograd.grad(used, [each for each in given.values() if each is not None], grads, allow_unused=True)


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.detach().double() - exact.detach().double()).square().mean().sqrt())


def assert_errs_no_more_than_plain_code(op: Op, given: dict[str, Tensor], offset: float) -> None:
    """Outputs and gradients, against float64."""
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    want, plain, got = composite(op, exact, offset), composite(op, given, offset), run(op, given, weight_offset=offset)
    assert [each.dtype for each in got[1:]] == [each.dtype for each in plain[1:]]
    assert got[0].dtype == (plain[0].dtype if op.form.finish else given["x"].dtype)
    wide = any(each.dtype == FP64 for name, each in given.items() if name in rows_of(op))
    accumulated = 4 * torch.finfo(FP64 if wide else FP32).eps  # sums in another order
    grads = gradients(got, given), gradients(plain, given), gradients(want, exact)
    terms = [0.0] * len(got) + [given["x"].numel() / each.numel() for each in given.values()]  # of a sum over rows
    pairs = (*zip(got, plain, want, strict=True), *zip(*grads, strict=True))
    for (ours, theirs, right), count in zip(pairs, terms, strict=True):
        # Terms of about 1 that cancel err as what they add up to on the way does.
        size = max(float(right.detach().abs().amax()), math.sqrt(count) if count > 1 else 0.0)
        least = max(torch.finfo(ours.dtype).eps * 1e-2, accumulated) * size
        assert error(ours, right) <= 1.1 * error(theirs, right) + least
    assert [each.dtype for each in grads[0]] == [each.dtype for each in given.values()]
