"""warmup_qk_norm and warmup_qk_norm_packed: compile and load what qk_norm and qk_norm_packed launch, as warmup does for
the norms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..heads import functional
from ..heads.call import both_ways, calls_of, in_place, with_tensors
from ..heads.plan import HeadPlan, Planned, plans_of
from ..heads.problem import heads_of, validate
from ..host import gpus
from ..host.fallback import BuildFailed
from ..operands import Operands, op_arguments, operands_of
from ..planner.device import DeviceSpec
from ..planner.plan import ReferencePlan
from . import warm


class Build(NamedTuple):
    """One kernel launch of an op on tensors without memory. `plans` are those of its calls, and `index` is the launch's
    position."""

    op: str
    arguments: tuple
    named: dict[str, Any]
    plans: tuple[HeadPlan, ...]
    index: int

    def launch(self, device: DeviceSpec):
        from ..heads.launch import program_of

        operands = operands_of(self.op, self.arguments, self.named)
        planned = list(zip(calls_of(operands), self.plans, strict=True))
        return program_of(operands, planned, device).launches[self.index]


def warmup_qk_norm(
    q: Tensor,
    k: Tensor,
    *arguments: Any,
    device: torch.device | str | None = None,
    processes: int | None = None,
    **named: Any,
) -> int:
    """Compile and load the kernels of fusednorm.qk_norm with these arguments, so that no later call with tensors that
    lie alike compiles. If D is a multiple of 16, all numbers of tokens but 1 have the same kernels.

    Only shapes, strides, dtypes and requires_grad are read, so the tensors may be on the "meta" device. If any requires
    grad, the kernels of its gradient are among those. Gradients of outputs are taken to be contiguous. `device` and
    `processes` are those of fusednorm.warmup; device is by default the tensors' own, or for those on "meta" the current
    GPU if there is one, else the CPU. Returns the number of kernels, 0 where none of these runs: on a CPU, and of
    weights of all heads without a rotation, which are those of fusednorm.warmup(..., form="affine").

    Raises qk_norm's errors, and RuntimeError as fusednorm.warmup does.
    """
    return _warmed("warmup_qk_norm", functional.operands(q, k, *arguments, **named), device, processes)


def warmup_qk_norm_packed(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    *arguments: Any,
    device: torch.device | str | None = None,
    processes: int | None = None,
    **named: Any,
) -> int:
    """Compile and load the kernels of fusednorm.qk_norm_packed with these arguments, as warmup_qk_norm does."""
    op = "warmup_qk_norm_packed"
    operands, packing = functional.packed_operands(op, qkv, heads, kv_heads, *arguments, **named)
    return _warmed(op, operands, device, processes, qkv, packing)


def _warmed(op: str, operands: Operands, device: Any, processes: int | None, *packed: Any) -> int:
    """`packed` is (qkv, packing) if q and k are parts of a packed tensor."""
    heads = heads_of(operands)
    validate(op, heads, may_span=not packed)
    if not packed and heads.are_rows:
        return 0
    device = warm.checked_device(op, device or (None if operands.x.is_meta else operands.x.device))
    if device.type == "cpu":
        return 0
    spec = gpus.spec_of(device)
    planned = [each for way in both_ways(operands, *packed) for each in _planned(way, spec)]
    launches = [pair for each in planned for pair in _launches(*each, spec)]
    count = warm.build_ahead(launches, spec, processes, device.type == "cuda")
    if device.type == "cuda":
        with torch.cuda.device(device):
            for each in planned:
                _load(*each, spec, device.index)
    return count


def _planned(way: Operands, spec: DeviceSpec) -> list[tuple[Operands, Planned]]:
    """The call, readable in place and without memory, and its plans; nothing if ATen's kernels run, or if no tensor
    whose gradient it computes requires grad."""
    if hasattr(way, "output_mask"):
        wanted = [getattr(way, output.like) for output in way.outputs]
        way = way._replace(output_mask=tuple([each is not None and each.requires_grad for each in wanted]))
        if not any(way.output_mask):
            return []
    readable, _ = in_place(with_tensors(way, [each if each is None else _without_memory(each) for each in way.tensors]))
    planned = plans_of(calls_of(readable), spec)
    return [] if any(isinstance(plan, ReferencePlan) for _, plan in planned) else [(readable, planned)]


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _launches(operands: Operands, planned: Planned, spec: DeviceSpec) -> warm.Launches:
    from ..heads.launch import program_of

    plans, launches = tuple([plan for _, plan in planned]), program_of(operands, planned, spec).launches
    described = operands.op, *op_arguments(operands), plans
    return [(Build(*described, index), launch) for index, launch in enumerate(launches)]


def _load(operands: Operands, planned: Planned, spec: DeviceSpec, device: int) -> None:
    from ..heads.launch import give_way, program_of
    from ..host import launcher

    try:
        launcher.load(program_of(operands, planned, spec).launches, device)
    except BuildFailed as failed:
        give_way(planned, spec, failed)
