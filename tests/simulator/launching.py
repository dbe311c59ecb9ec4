"""A launch of fusednorm's on the simulated GPU: its kernel compiled, its operands as the kernel's parameters."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fusednorm import compilation

from .gpu import Gpu
from .memory import TensorMap
from .ptx import Kernel, parse
from .translate import Program

FLOATS = {"fp32": torch.float32, "f32": torch.float32, "fp64": torch.float64, "f64": torch.float64}
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
SCRATCH = 2  # last parameters, for memory of Triton's own


@functools.lru_cache(64)
def kernel_of(digest: str, ptx: str) -> Kernel:
    return parse(ptx)


@functools.lru_cache(64)
def program_of(digest: str, ptx: str, without: frozenset[int] = frozenset()) -> Program:
    return Program(kernel_of(digest, ptx), without)


class Launched(NamedTuple):
    """What has been launched."""

    name: str
    grid: tuple[int, int, int]  # in CTAs
    cluster: int
    dependent: bool
    build: str
    kernel: Kernel


def enqueue(launch, arch: int, gpu: Gpu, without: dict[str, frozenset[int]]) -> Launched:
    """Launch one Launch or ColumnLaunch. `without` has the instructions to leave out, by build."""
    compiled = compilation.compile_for(launch, arch)
    metadata, text = compiled.metadata, compiled.asm["ptx"]
    program = program_of(compiled.hash, text, without.get(compiled.hash, frozenset()))
    parameters = _parameters(launch, compiled, gpu)
    declared = program.kernel.parameters
    if len(parameters) + SCRATCH != len(declared):
        raise RuntimeError(f"{len(parameters)} operands for {len(declared)} parameters of {metadata.name}")
    x, y, z = [*launch.grid, 1, 1][:3]
    grid, cluster, dependent = (x * metadata.num_ctas, y, z), metadata.num_ctas, bool(metadata.launch_pdl)
    gpu.launch(program, grid, cluster, metadata.shared, [*parameters, *[0] * SCRATCH], dependent=dependent)
    return Launched(metadata.name, grid, cluster, dependent, compiled.hash, program.kernel)


def _parameters(launch, compiled, gpu: Gpu) -> list:
    names = launch.kernel.arg_names
    given = dict(zip(names, launch.args, strict=False)) | launch.keywords()
    described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    found = []
    for name, kind in compiled.src.signature.items():
        _add(found, kind, given.get(name), described, gpu)
    return found


def _add(found: list, kind, value, described, gpu: Gpu) -> None:
    if isinstance(kind, (tuple, list)):
        for each, part in zip(kind, value, strict=True):
            _add(found, each, part, described, gpu)
    elif kind.startswith("tensordesc"):
        found += [_tensor_map(value, next(described), gpu), *value.shape, *value.strides]
    elif isinstance(value, Tensor):
        add_tensor(gpu, value)
        found.append(value.data_ptr())
    elif kind in FLOATS:
        found.append(int(torch.tensor(value, dtype=FLOATS[kind]).view(BITS[FLOATS[kind]])))
    elif kind != "constexpr":
        found.append(int(value))


def _tensor_map(descriptor, meta: dict, gpu: Gpu) -> TensorMap:
    add_tensor(gpu, descriptor.base)
    itemsize = meta["elem_size"]
    strides = (itemsize, *(itemsize * each for each in descriptor.strides[-2::-1]))
    box = tuple(meta["block_size"][::-1])
    return TensorMap(descriptor.base.data_ptr(), tuple(descriptor.shape[::-1]), strides, box, meta["swizzle"])


def add_tensor(gpu: Gpu, tensor: Tensor) -> None:
    """Let the GPU know of a tensor's memory."""
    memory = tensor.untyped_storage()
    name = f"a tensor of shape {tuple(tensor.shape)}"
    gpu.memory.add(memory.data_ptr(), memory.nbytes(), memory, name, gpu.ledger, min(tensor.element_size(), 4))
