"""The resources of a compiled kernel: what cuobjdump and ptxas say of it, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

from fusednorm.host.launcher import Launch
from fusednorm.tools.compilation import compile_for

NO_SPILL_BYTES = 8  # so much stack does not count as a spill if no loop touches it
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Resources:
    """The resources of one compiled kernel: registers per thread, stack_bytes of spills per thread, shared_bytes of
    shared memory per CTA. stack_bytes is 0 if a thread only stores a word before its loops and loads it after them."""

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int


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
