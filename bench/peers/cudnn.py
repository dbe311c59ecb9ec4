"""cuDNN's norms through its graph API, which takes rows x cols as [N, C, 1, 1]; one graph for each direction."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fusednorm.tools.oracle import Outputs

from ..cases import BenchCase, BenchInputs
from . import packages

NAME = "cudnn"
ADDS_RESIDUAL = False


def missing() -> str | None:
    return packages.missing("cudnn", "nvidia-cudnn-frontend")


class Graph:
    """A cuDNN graph under construction, then built; `run` executes it on torch's current stream."""

    def __init__(self, handle: int):
        import cudnn

        self.cudnn, self.handle = cudnn, handle
        kinds = cudnn.data_type
        self.graph = cudnn.pygraph(handle=handle, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT)
        self.workspace: Tensor | None = None

    def tensor(self, name: str, shape: tuple[int, int], dtype: torch.dtype, by_value: bool = False):
        rows, cols = shape
        stride = [cols, 1, cols, cols]
        return self.graph.tensor(
            name=name, dim=[rows, cols, 1, 1], stride=stride, data_type=dtype, is_pass_by_value=by_value
        )

    def build(self, device: torch.device, **outputs: tuple) -> None:
        """Each output as (cuDNN's tensor, dtype)."""
        for tensor, dtype in outputs.values():
            tensor.set_output(True).set_data_type(dtype)
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        size = max(1, self.graph.get_workspace_size())
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def run(self, tensors: dict) -> None:
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(tensors, self.workspace, handle=self.handle)


@functools.cache
def _handle(device_index: int) -> int:
    import cudnn

    with torch.cuda.device(device_index):
        return cudnn.create_handle()


def prepare(case: BenchCase, inputs: BenchInputs):
    forward, backward = graphs(case, inputs)
    return lambda: forward(inputs), lambda ahead: backward(inputs, ahead)


def graphs(case: BenchCase, like: BenchInputs):
    """forward(inputs) and backward(inputs, ahead), for inputs of these dtypes."""
    handle = _handle(like.x.device.index)
    return _forward(case, like, handle), _backward(case, like, handle)


def _forward(case: BenchCase, like: BenchInputs, handle: int):
    x, weight, bias, rows, cols = like.x, like.weight, like.bias, case.rows, case.cols
    layer, graph = case.norm == "layer", Graph(handle)
    phase = graph.cudnn.norm_forward_phase.TRAINING
    eps_value = torch.full((1, 1, 1, 1), case.resolved_eps, dtype=torch.float32)
    x_node, scale = graph.tensor("x", (rows, cols), x.dtype), graph.tensor("scale", (1, cols), weight.dtype)
    shift = graph.tensor("bias", (1, cols), bias.dtype) if layer else None
    eps = graph.tensor("epsilon", (1, 1), torch.float32, by_value=True)
    operands = {"norm_forward_phase": phase, "input": x_node, "scale": scale, "epsilon": eps}
    if layer:
        y_node, mean_node, rstd_node = graph.graph.layernorm(**operands, bias=shift)
    else:
        (y_node, rstd_node), mean_node = graph.graph.rmsnorm(**operands), None
    outputs = {"y": (y_node, x.dtype), "rstd": (rstd_node, torch.float32)}
    if layer:
        outputs["mean"] = (mean_node, torch.float32)
    graph.build(x.device, **outputs)

    def forward(inputs: BenchInputs) -> Outputs:
        x = inputs.x
        y = torch.empty(case.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(case.stats_shape, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if layer else None
        tensors = {x_node: x.reshape(rows, cols), scale: inputs.weight, eps: eps_value, y_node: y, rstd_node: rstd}
        graph.run(tensors | ({shift: inputs.bias, mean_node: mean} if layer else {}))
        return Outputs(y, mean, rstd)

    return forward


def _backward(case: BenchCase, like: BenchInputs, handle: int):
    """cuDNN has no output mask: it computes a frozen parameter's gradient, too."""
    x, dy, weight, bias, rows, cols = like.x, like.grad_out, like.weight, like.bias, case.rows, case.cols
    layer, graph = case.norm == "layer", Graph(handle)
    dy_node, x_node = graph.tensor("dy", (rows, cols), dy.dtype), graph.tensor("x", (rows, cols), x.dtype)
    scale, rstd_node = graph.tensor("scale", (1, cols), weight.dtype), graph.tensor("rstd", (rows, 1), torch.float32)
    mean_node = graph.tensor("mean", (rows, 1), torch.float32) if layer else None
    operands = {"grad": dy_node, "input": x_node, "scale": scale, "inv_variance": rstd_node}
    if layer:
        dx_node, dw_node, db_node = graph.graph.layernorm_backward(**operands, mean=mean_node)
    else:
        dx_node, dw_node, db_node = graph.graph.rmsnorm_backward(**operands, has_dbias=False)
    outputs = {"dx": (dx_node, x.dtype), "dweight": (dw_node, weight.dtype)}
    if layer:
        outputs["dbias"] = (db_node, bias.dtype)
    graph.build(x.device, **outputs)

    def backward(inputs: BenchInputs, ahead: Outputs) -> Outputs:
        x, weight = inputs.x, inputs.weight
        dx, dw = torch.empty(case.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)
        db = torch.empty_like(inputs.bias) if layer else None
        flat = {dy_node: inputs.grad_out.reshape(rows, cols), x_node: x.reshape(rows, cols)}
        tensors = flat | {scale: weight, rstd_node: ahead.rstd, dx_node: dx, dw_node: dw}
        graph.run(tensors | ({mean_node: ahead.mean, db_node: db} if layer else {}))
        return Outputs(dx=dx, dweight=dw, dbias=db)

    return backward
