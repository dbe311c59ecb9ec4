"""What a step launches, by torch.profiler: kernels by kind, the ops that launched them, and their bytes."""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# Kernels by what their op or their own name contains; the first that matches. The rest is element-wise work and norms,
# the part that forms of ours could take over.
KINDS = {
    "products": ("gemm", "aten::mm", "aten::addmm", "aten::bmm", "grouped_mm", "nvjet", "cutlass", "convolution"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "softmax"),
    "optimizer": ("adam", "multi_tensor"),
    "norms": ("norm", "fusednorm", "reduce_column"),
}
COMPILED, REST = "compiled", "element-wise"
MOST = 40  # rows of a record
BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "long": 8, "int": 4, "bool": 1,
         "unsigned char": 1}  # fmt: skip


def profile_step(step: Callable[[], object]) -> dict:
    """`kinds`: launches, us and MB by kind. `launches`: the kernels of norms and element-wise work, the longest first,
    each with the op that launched it, its tensors' shapes, and MB in all (its largest tensor once more, as the output).
    The bytes of compiled kernels are not known."""
    step()
    return summary(traced(step))


def traced(run: Callable[[], object]) -> list[dict]:
    """The events of a run, in Chrome's format."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, record_shapes=True) as found:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def on_device(events: list[dict]) -> list[dict]:
    """Kernels, copies and fills, in order of time."""
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(found, key=lambda event: event["ts"])


def summary(events: list[dict]) -> dict:
    """Of a trace in Chrome's format."""
    ops = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "External id" in e["args"]}
    rows: dict[tuple, dict] = defaultdict(lambda: {"count": 0, "us": 0.0, "mb": 0.0})
    kinds: dict[str, dict] = defaultdict(lambda: {"count": 0, "us": 0.0, "mb": 0.0})
    for event in on_device(events):
        op = ops.get(event["args"].get("External id"))
        name, kind = op["name"] if op else "", kind_of(event["name"], op["name"] if op else "")
        moved = bytes_of(op["args"]) / 1e6 if op else 0.0
        key = kind, name, _short(event["name"]), shapes_of(op["args"]) if op else ""
        for total in (rows[key], kinds[kind]):
            total["count"] += 1
            total["us"] = round(total["us"] + event["dur"], 3)
            total["mb"] = round(total["mb"] + moved, 3)
    wanted = [
        {"kind": kind, "op": op, "kernel": kernel, "shapes": shapes} | total
        for (kind, op, kernel, shapes), total in rows.items()
        if kind in ("norms", COMPILED, REST)
    ]
    return {"kinds": dict(kinds), "launches": sorted(wanted, key=lambda row: -row["us"])[:MOST]}


def kind_of(kernel: str, op: str) -> str:
    if kernel.startswith("triton_"):  # Inductor's, named after the ops that it fused
        return COMPILED
    text = f"{op} {kernel}".lower()
    return next((kind for kind, marks in KINDS.items() if any(mark in text for mark in marks)), REST)


def bytes_of(arguments: dict) -> float:
    """Of an op's tensors, and of an output as large as the largest of them."""
    sizes = [
        math.prod(shape) * BYTES.get(kind, 0)
        for shape, kind in zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False)
        if isinstance(shape, list) and all(isinstance(each, int) for each in shape) and kind in BYTES
    ]
    return sum(sizes) + max(sizes, default=0)


def shapes_of(arguments: dict) -> str:
    found = zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False)
    return ", ".join(
        f"{kind.removeprefix('c10::')}[{'x'.join(map(str, shape))}]" for shape, kind in found if shape and kind in BYTES
    )


def _short(kernel: str) -> str:
    """A kernel's name without its template's arguments, but with its functor's name."""
    plain = kernel.removeprefix("void ").split("<")[0].split("(")[0].rsplit("::", 1)[-1]
    functor = next((part for part in kernel.replace("<", "::").split("::") if part.endswith("Functor")), "")
    return f"{plain} {functor}".strip()
