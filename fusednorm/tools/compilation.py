"""Compiles a program's launch for any architecture without a GPU, and reads the resources of the compiled kernel.

A launch need not be bound to tensors, because a build depends only on dtypes, alignment, integers that the kernel is
specialized for and compile-time constants. No other file calls the private functions by which Triton's JIT makes a
build.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import create_function_from_signature

from ..host.launcher import Launch

WARP_SIZE = 32
NO_SPILL_BYTES = 8  # so much stack does not count as a spill if no loop touches it
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class UnknownTriton(RuntimeError):
    """The installed Triton's JIT lacks a name that this file uses, or takes other arguments."""


@dataclass(frozen=True)
class Resources:
    """The resources of one compiled kernel: registers per thread, stack_bytes of spills per thread, shared_bytes of
    shared memory per CTA. stack_bytes is 0 if a thread only stores a word before its loops and loads it after them."""

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_for(launch: Launch, arch: int):
    """Triton's compiled kernel of `launch` for compute capability arch / 10 (90 is sm_90)."""
    source, target, options = _source(launch, arch)
    return triton.compile(source, target=target, options=options.__dict__)


def is_built(launch: Launch, arch: int) -> bool:
    """Whether the build is in Triton's on-disk cache."""
    source, target, options = _source(launch, arch)
    backend = make_backend(target)
    options = backend.parse_options({**options.__dict__, **source.parse_options()})
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    name = f"{source.name[:150]}.json"
    return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {})


def build_key(launch: Launch, arch: int) -> str:
    """A key that two launches share if and only if one build serves both."""
    source, _, options = _source(launch, arch)
    return f"{source.hash()}-{options.hash()}"


def _source(launch: Launch, arch: int):
    """(source, target, options) of the build, derived from the arguments as Triton's launch does. Raises
    UnknownTriton."""
    try:
        return _as_tritons_launch(launch, arch)
    except (AttributeError, TypeError) as error:
        raise UnknownTriton(f"Triton {triton.__version__} compiles in another way than is known: {error}") from error


def _as_tritons_launch(launch: Launch, arch: int):
    target = GPUTarget("cuda", arch, WARP_SIZE)
    backend = make_backend(target)
    kernel = launch.kernel
    keywords = launch.keywords()
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **keywords)
    options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return source_type(kernel, signature, constants, attributes), target, options


def resources(launch: Launch, arch: int) -> Resources:
    """The resources of the kernel of `launch`, compiled for `arch`."""
    compiled = compile_for(launch, arch)
    used = dict(re.findall(r"(REG|STACK):(\d+)", dump(compiled, "--dump-resource-usage")))
    stack_bytes = int(used["STACK"])
    if stack_bytes and not _spills(compiled, arch):
        stack_bytes = 0  # for sm_120 the assembler sometimes clears 8 bytes of stack that nothing ever loads
    if 0 < stack_bytes <= NO_SPILL_BYTES and not spills_in_loops(dump(compiled, "-sass")):
        stack_bytes = 0
    return Resources(compiled.metadata.name, int(used["REG"]), stack_bytes, compiled.metadata.shared)


def dump(compiled, option: str) -> str:
    """The output of cuobjdump with `option` for the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run([CUOBJDUMP, option, cubin.name], capture_output=True, text=True, check=True).stdout


def spills_in_loops(sass: str) -> bool:
    """Whether code between a backward branch and its target touches the stack. True also if the code has no loop."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?) *;", sass)]
    branches = [(at, int(to, 16)) for at, text in code for to in re.findall(r"\bBRA\b.*\b0x([0-9a-f]+)", text)]
    loops = [(to, at) for at, to in branches if to < at]
    touched = [at for at, text in code if re.search(r"\b(STL|LDL)\b", text)]
    return not loops or any(first <= at <= last for at in touched for first, last in loops)


def _spills(compiled, arch: int) -> bool:
    """Whether ptxas reports spills. Its report is not kept with the binary, so ptxas runs again."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        target = f"--gpu-name={sm_arch_from_capability(arch)}"
        command = [get_ptxas(arch).path, "-v", target, ptx.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return " 0 bytes spill stores, 0 bytes spill loads" not in report
