"""QuACK's norms, one kernel for both, called below the wrappers that take float32 weights only."""

from __future__ import annotations

import importlib
import itertools

import torch

from fusednorm.testing import Outputs

from ..cases import BenchCase, BenchInputs
from ..timing import time_interleaved
from . import packages

NAME = "quack"
ADDS_RESIDUAL = True
TUNING_ROUNDS = 10
TUNING_CLUSTERS = (1, 2)  # times the cluster of its own choice


def missing() -> str | None:
    return packages.missing("quack", "quack-kernels") or packages.missing("cutlass", "'nvidia-cutlass-dsl[cu13]'")


def prepare(case: BenchCase, inputs: BenchInputs, tuned: bool = False):
    """By its own choice of configuration; tuned: the fastest of several, on several grids, found here and now."""
    module = importlib.import_module("quack.rmsnorm")  # the package gives this name to a function, too
    forward = _forward(module, case, inputs)
    if not tuned:
        grid = module.get_sm_count(case.cols, inputs.x.device)
        return forward, _backward(case, inputs, grid, module._rmsnorm_bwd)
    return forward, _fastest(module, case, inputs, forward())


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
    """As its own wrappers do: partial sums of each CTA, then torch's sum over them; and for a residual of another dtype
    than x the sum in that one, too."""
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


def _fastest(module, case: BenchCase, inputs: BenchInputs, ahead: Outputs):
    """The best configuration on its own grid, then the best grid for it."""
    sms = torch.cuda.get_device_properties(inputs.x.device).multi_processor_count
    own_grid = module.get_sm_count(case.cols, inputs.x.device)
    on_own_grid = {
        config: _backward(case, inputs, own_grid, _configured(module, config)) for config in _configs(module, case)
    }
    best = _quickest(on_own_grid, ahead)
    kernel, grids = _configured(module, best), (own_grid, sms, 2 * sms)
    on_grids = {grid: _backward(case, inputs, grid, kernel) for grid in grids}
    return on_grids[_quickest(on_grids, ahead)]


def _quickest(backwards: dict, ahead: Outputs):
    """The key of the fastest; what does not compile or fit is not the fastest."""
    calls = {}
    for key, backward in backwards.items():
        try:
            backward(ahead)
        except Exception:
            continue
        calls[key] = lambda backward=backward: backward(ahead)
    if not calls:
        raise RuntimeError("none of its configurations runs")
    times = time_interleaved(calls, TUNING_ROUNDS)
    return min(times, key=lambda key: times[key].median)


def _configs(module, case: BenchCase) -> list:
    """Its own choice, and what stands near it: the other CTA size, the copy engine, reloading, and a wider cluster."""
    from quack.rmsnorm_config import RmsNormBwdConfig

    bits = 8 * case.x_dtype.itemsize
    own = RmsNormBwdConfig.from_analytical_heuristic(case.cols, bits, bits)
    near = [own]
    knobs = itertools.product((128, 256), (False, True), (None, "smem"), TUNING_CLUSTERS)
    for threads, use_tma, reload_wdy, factor in knobs:
        cluster = own.cluster_n * factor
        if threads * cluster <= case.cols and cluster <= 16 and case.cols >= 1024:
            near.append(RmsNormBwdConfig(threads, threads, cluster, reload_wdy, None, use_tma))
    return list(dict.fromkeys(near))


def _configured(module, config):
    """The op of its default path, with the configuration given."""

    def kernel(x, weight, dy, rstd, dx, dw, db, residual, own, sm_count, mean, is_layernorm):
        module.rmsnorm_bwd_tuned.fn(
            x, weight, dy, rstd, dx, dw, db, residual, own, sm_count=sm_count, mean=mean, is_layernorm=is_layernorm,
            has_dw_partial=dw is not None, has_db_partial=db is not None, config=config,
        )  # fmt: skip

    return kernel
