"""python -m fusednorm doctor: says what this machine has, what works on it and what falls back."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import __version__
from ..host import building, fallback, gpus, native, torch_compat, triton_compat
from ..operands import NORMS
from ..planner import table
from ..planner.device import OLDEST_TRITON, DeviceSpec
from ..planner.legality import OLDEST_ARCH
from .oracle import Case, assert_outputs_close, fused, make_inputs

OLDEST_TORCH = (2, 11)
PROBES = tuple(
    Case(norm, (64, 1024), x_dtype=dtype, weight_dtype=dtype, bias_dtype=dtype if norm == "layer" else None)
    for norm in NORMS
    for dtype in (torch.bfloat16, torch.float32)
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. status is "ok", "note" (works, but in another way or slower) or "problem" (does not
    work)."""

    status: str
    subject: str
    text: str


def run(options: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if one of them is a problem, else 0."""
    findings = diagnose()
    for finding in findings:
        print(f"{finding.status:<8}{finding.subject:<12}{finding.text}")
    problems = sum(finding.status == "problem" for finding in findings)
    print(f"\nProblems: {problems}." if problems else "\nEverything this machine can run works.")
    return 1 if problems else 0


def diagnose() -> list[Finding]:
    """The findings of all checks. Checks are independent: a failure of one does not hide the others."""
    machine = check_versions, check_triton, check_device, check_tables, check_compiler, check_cache
    checks = (*machine, check_native, check_cpu_ops, check_cuda_ops, check_fallbacks)
    return [finding for check in checks for finding in _guarded(check)]


def _guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:
        return [Finding("problem", check.__name__.removeprefix("check_"), f"{type(error).__name__}: {error}")]


def check_versions() -> list[Finding]:
    old = version_of(torch.__version__) < OLDEST_TORCH
    needs = f", needs {'.'.join(map(str, OLDEST_TORCH))} or later" if old else ""
    return [
        Finding("ok", "fusednorm", f"{__version__}, from {Path(__file__).parent.parent}"),
        Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}"),
        Finding("problem" if old else "ok", "torch", f"{torch.__version__}{needs}"),
        *missing_names(),
    ]


def missing_names() -> list[Finding]:
    """A finding for private names of torch that the installed release lacks."""
    if not torch_compat.missing:
        return []
    text = f"without {', '.join(torch_compat.missing)}, which this release does not have: right, but calls take longer"
    return [Finding("note", "torch", text)]


def check_triton() -> list[Finding]:
    installed = triton_version()
    if installed is None:
        status = "problem" if torch.cuda.is_available() else "note"
        return [Finding(status, "triton", "not installed: CUDA tensors cannot run, CPU tensors do not need it")]
    if version_of(installed) < OLDEST_TRITON:
        return [Finding("problem", "triton", f"{installed}, needs {'.'.join(map(str, OLDEST_TRITON))} or later")]
    if triton_compat.installed() is not None and triton_compat.in_use() is None:
        return [Finding("note", "triton", f"{installed}: {what_is_launched()}")]
    return [Finding("ok", "triton", installed)]


def what_is_launched() -> str:
    names = ", ".join(f"{major}.{minor}" for major, minor in triton_compat.RELEASES)
    return (
        f"its launcher has not run with this package on a GPU (those of {names} have), so only kernels are kept that "
        "agree with what they would be passed. Triton launches the others itself: right, but each call takes "
        f"{triton_compat.CALL_US} us of host time"
    )


def check_device() -> list[Finding]:
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        return [Finding("note", "device", f"no CUDA GPU ({built}): CPU tensors only, through ATen's kernels")]
    return [describe_gpu(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]


def describe_gpu(properties) -> Finding:
    arch = 10 * properties.major + properties.minor
    size = f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
    text = f"{properties.name}, sm_{arch}, {size}"
    if arch < OLDEST_ARCH:
        return Finding("problem", "device", f"{text}: the kernels need sm_{OLDEST_ARCH} or later")
    return Finding("ok", "device", text)


def check_tables() -> list[Finding]:
    """Which table the planner uses for each GPU, and how old it is."""
    if not torch.cuda.is_available():
        return []
    names = dict.fromkeys(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return [describe_table(name, gpus.spec_of(torch.device("cuda", index))) for index, name in enumerate(names)]


def describe_table(name: str, spec: DeviceSpec) -> Finding:
    own, found = table.of_user(name), next(table.of_device(spec), None)
    if isinstance(own, str):
        return Finding("note", "plans", f"the shipped table is used, because {own}")
    if found is None:
        return Finding("note", "plans", f"no table of {name}: plans are predicted (python -m fusednorm tune makes one)")
    whose = "your table" if found is own else "the shipped table"
    days = {found.parsed(line)[-1] for widths in found.lines.values() for line in widths.values()} or {found.date}
    text = f"{whose} of {found.gpu}, {' to '.join(sorted({min(days), max(days)}))}, Triton {found.triton}"
    if found.skipped:
        return Finding("note", "plans", f"{text}; {found.skipped} of its lines are of another release and are skipped")
    faults = [] if found.gpu == name else [f"{name} has none of its own"]
    if tuple(map(int, found.triton.split(".")[:2])) != spec.triton:
        faults.append(f"Triton {'.'.join(map(str, spec.triton))} may make another plan the fastest")
    advice = ["python -m fusednorm tune measures anew"] if faults else []
    return Finding("note" if faults else "ok", "plans", "; ".join([text, *faults, *advice]))


def check_compiler() -> list[Finding]:
    """Check that Triton can compile its C launchers: one per kernel, with $CC, gcc or clang, against Python's
    headers."""
    status = "problem" if torch.cuda.is_available() else "note"
    named = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, named)), None)
    if compiler is None:
        text = f"no {' or '.join(named)}: Triton needs a C compiler to launch kernels on a GPU"
        return [Finding(status, "compiler", text)]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return [Finding(status, "compiler", f"{compiler}, but no {header}: Triton needs Python's headers on a GPU")]
    return [Finding("ok", "compiler", compiler)]


def check_cache() -> list[Finding]:
    if triton_version() is None:
        return []
    from triton import knobs

    folder = Path(knobs.cache.dir)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return [Finding("problem", "cache", f"{folder} is not writable: Triton cannot keep compiled kernels")]
    free = shutil.disk_usage(existing).free / 2**30
    text = f"{folder} for compiled kernels, {free:.1f} GiB free"
    return [Finding("ok" if free > 0.5 else "note", "cache", text)]


def check_native() -> list[Finding]:
    """Check the host side in C++, without which everything works but takes more host time."""
    if native.extension is not None:
        return [Finding("ok", "native", "built: ops repeat without Python")]
    text = f"no host side in C++ ({native.reason}): {building.WITHOUT_IT}. To build it, run: {building.COMMAND}"
    return [Finding("note", "native", text)]


def check_cpu_ops() -> list[Finding]:
    return [probe("cpu ops", "cpu", "right against float64 autograd, through ATen's kernels")]


def check_cuda_ops() -> list[Finding]:
    if not torch.cuda.is_available():
        text = "cannot run here; the Triton kernels can be interpreted (python -m fusednorm demo shows it)"
        return [Finding("note", "cuda ops", text)]
    return [probe("cuda ops", "cuda", "right against float64 autograd, through this package's Triton kernels")]


def check_fallbacks() -> list[Finding]:
    """The kernels that failed in the probes of the earlier checks."""
    return [Finding("note", "fallback", f"{failure}; another kernel or ATen's runs") for failure in fallback.failures()]


def probe(subject: str, device: str, text: str) -> Finding:
    """Run forward and backward of PROBES on `device`. Raises AssertionError if an output is wrong."""
    for case in PROBES:
        inputs = make_inputs(case, device)
        assert_outputs_close(fused(case, inputs), case, inputs)
    return Finding("ok", subject, text)


def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def version_of(text: str) -> tuple[int, int]:
    """(major, minor): 2.13.0+cpu is (2, 13)."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
