"""Puts a launch of fusednorm on the simulated GPU: compiles its kernel and turns its operands into parameters."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fusednorm.tools import compilation

from .gpu import Gpu
from .memory import TensorMap
from .ptx import Kernel, parse
from .translate import Program

FLOATS = {"fp32": (torch.float32, torch.int32), "fp64": (torch.float64, torch.int64)}
SCRATCH = 2  # the last parameters are pointers to Triton's own scratch memory, which the kernels do not use


@functools.lru_cache(64)
def program_of(ptx: str, without: frozenset[int] = frozenset()) -> Program:
    return Program(program_of(ptx).kernel if without else parse(ptx), without)


class Launched(NamedTuple):
    """A launch that was put on the simulated GPU."""

    name: str
    grid: tuple[int, int, int]  # in CTAs
    cluster: int
    dependent: bool
    build: str  # the hash of the compiled kernel
    kernel: Kernel


def enqueue(launch, arch: int, gpu: Gpu, without: dict[str, frozenset[int]]) -> Launched:
    """Queues one launch on tensors. `without` has the indices of instructions to leave out, by build."""
    compiled = compilation.compile_for(launch, arch)
    metadata = compiled.metadata
    program = program_of(compiled.asm["ptx"], without.get(compiled.hash, frozenset()))
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.keywords()
    described = iter(getattr(metadata, "tensordesc_meta", None) or [])
    signature = compiled.src.signature
    parameters = [each for name in signature for each in _parameters(signature[name], given.get(name), described, gpu)]
    if len(parameters) + SCRATCH != len(program.kernel.parameters):
        raise RuntimeError(f"{len(parameters)} operands for {len(program.kernel.parameters)} parameters")
    x, y, z = [*launch.grid, 1, 1][:3]
    grid, cluster, dependent = (x * metadata.num_ctas, y, z), metadata.num_ctas, bool(metadata.launch_pdl)
    gpu.launch(program, grid, cluster, metadata.shared, [*parameters, *[0] * SCRATCH], dependent=dependent)
    return Launched(metadata.name, grid, cluster, dependent, compiled.hash, program.kernel)


def _parameters(kind, value, described, gpu: Gpu) -> list:
    """The kernel parameters for one operand; `kind` is its type in Triton's signature."""
    if isinstance(kind, (tuple, list)):
        pairs = zip(kind, value, strict=True)
        return [each for part, given in pairs for each in _parameters(part, given, described, gpu)]
    if kind == "constexpr":
        return []
    if kind.startswith("tensordesc"):
        gpu.add_tensor(value.base)
        meta = next(described)
        strides = [meta["elem_size"] * each for each in value.strides[::-1]]
        box = tuple(meta["block_size"][::-1])
        shape = tuple(value.shape[::-1])
        tensor_map = TensorMap(value.base.data_ptr(), shape, tuple(strides), box, meta["swizzle"])
        return [tensor_map, *value.shape, *value.strides]
    if isinstance(value, Tensor):
        gpu.add_tensor(value)
        return [value.data_ptr()]
    if kind in FLOATS:
        real, bits = FLOATS[kind]
        return [int(torch.tensor(value, dtype=real).view(bits))]
    return [int(value)]
