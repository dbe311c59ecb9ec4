"""Kernels written by hand in PTX, to test what fusednorm's kernels do not do, such as races."""

from __future__ import annotations

import torch
from torch import Tensor

from .gpu import Gpu
from .launching import program_of
from .memory import TensorMap
from .translate import Program

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 global_smem[];
.visible .entry small({parameters})
.reqntid {threads}
{{
.reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<32>; .reg .f32 %f<16>; .reg .b64 %d<32>;
"""


def program(body: str, parameters: int, threads: int = 32, maps: int = 0) -> Program:
    """The kernel with this body. Its parameters are `maps` tensor maps, named small_param_0 ..., and then `parameters`
    pointers or numbers, which the body finds in %d0, %d1 ...

    Errors give line n of the body as small.py:n.
    """
    declared = [f".param .align 64 .b8 small_param_{n}[128]" for n in range(maps)]
    declared += [f".param .u64 small_param_{n}" for n in range(maps, maps + parameters)]
    loads = "".join(f"ld.param.b64 %d{n}, [small_param_{maps + n}];\n" for n in range(parameters))
    lines = [f"\t.loc 1 {n} 0 // small.py:{n}:0\n{line}" for n, line in enumerate(body.splitlines())]
    head = HEAD.format(parameters=", ".join(declared), threads=threads)
    text = f"{head}{loads}{chr(10).join(lines)}\nret;\n}}\n"
    return program_of(text)


def launch(gpu: Gpu, kernel: Program, *values: Tensor | int | TensorMap, ctas=1, cluster=1, **how) -> None:
    for each in values:
        if isinstance(each, Tensor):
            gpu.add_tensor(each)
    given = [each.data_ptr() if isinstance(each, Tensor) else each for each in values]
    gpu.launch(kernel, (ctas, 1, 1), cluster, 4096, given, **how)


def run(body: str, *values, threads: int = 32, ctas: int = 1, cluster: int = 1, seed: int = 0, **how) -> Gpu:
    """Runs one kernel on a new Gpu, to its end."""
    gpu = Gpu(seed, **how)
    maps = sum(isinstance(each, TensorMap) for each in values)
    launch(gpu, program(body, len(values) - maps, threads, maps), *values, ctas=ctas, cluster=cluster)
    gpu.synchronize()
    return gpu


def nans(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def tensor_map(gpu: Gpu, tensor: Tensor, box: tuple[int, int], swizzle: int = 0) -> TensorMap:
    """A tensor map of a [rows, cols] tensor; `box` is (rows, columns), too."""
    gpu.add_tensor(tensor)
    itemsize, (rows, cols) = tensor.element_size(), tensor.shape
    return TensorMap(tensor.data_ptr(), (cols, rows), (itemsize, itemsize * tensor.stride(0)), box[::-1], swizzle)
