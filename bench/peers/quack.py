"""QuACK's norms, one kernel for both, called below the wrappers that take float32 weights only."""

from __future__ import annotations

import importlib

import torch

from fusednorm.tools.oracle import Outputs

from ..cases import BenchCase, BenchInputs
from . import packages

NAME = "quack"
ADDS_RESIDUAL = True


def missing() -> str | None:
    return packages.missing("quack", "quack-kernels") or packages.missing("cutlass", "'nvidia-cutlass-dsl[cu13]'")


def prepare(case: BenchCase, inputs: BenchInputs):
    """By the configuration and the grid that QuACK chooses itself."""
    module = importlib.import_module("quack.rmsnorm")  # `from quack import rmsnorm` gives a function of that name
    grid = module.get_sm_count(case.cols, inputs.x.device)
    return _forward(module, case, inputs), _backward(case, inputs, grid, module._rmsnorm_bwd)


def _forward(module, case: BenchCase, inputs: BenchInputs):
    x, layer = inputs.x, case.norm == "layer"

    def forward() -> Outputs:
        flat = x.reshape(case.rows, case.cols)
        y = torch.empty_like(flat)
        rstd = torch.empty(case.rows, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if layer else None
        module._rmsnorm_fwd(flat, inputs.weight, y, inputs.bias, rstd, mean, None, None, case.resolved_eps, layer)
        stats = (None if t is None else t.reshape(case.stats_shape) for t in (mean, rstd))
        return Outputs(y.reshape(case.shape), *stats)

    return forward


def _backward(case: BenchCase, inputs: BenchInputs, grid: int, kernel):
    """As QuACK's own wrappers call it: partial sums of each CTA, then torch's sum over them. Where the residual's dtype
    is not x's, the kernel also writes the sum of both gradients in the residual's dtype."""
    layer = case.norm == "layer"
    _, wants_dw, wants_db = case.output_mask

    def backward(ahead: Outputs) -> Outputs:
        x, dy = (t.reshape(case.rows, case.cols) for t in (inputs.x, inputs.grad_out))
        dx = torch.empty_like(x)
        dw, db = (
            torch.empty(grid, case.cols, dtype=torch.float32, device=x.device) if wanted else None
            for wanted in (wants_dw, wants_db)
        )
        mean = ahead.mean.reshape(-1) if layer else None
        residual = None if inputs.residual_grad is None else inputs.residual_grad.reshape(case.rows, case.cols)
        own = torch.empty_like(residual) if residual is not None and residual.dtype != x.dtype else None
        kernel(
            x, inputs.weight, dy, ahead.rstd.reshape(-1), dx, dw, db, residual, own,
            sm_count=grid, mean=mean, is_layernorm=layer,
        )  # fmt: skip
        dw = dw.sum(dim=0).to(inputs.weight.dtype) if wants_dw else None
        db = db.sum(dim=0).to(inputs.bias.dtype) if wants_db else None
        return Outputs(dx=dx.reshape(case.shape), dweight=dw, dbias=db)

    return backward
