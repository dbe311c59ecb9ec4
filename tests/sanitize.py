"""Runs every kernel, for every op, under compute-sanitizer's tools and Triton's ConSan, on a GPU.

    python -m tests.sanitize [--tools memcheck consan] [--ops layer_norm_bwd] [--minutes 8.5] [--out FILE]

Each tool runs the calls of each op in a process of its own, with a limit of time; one that dies starts anew behind the
call that killed it. First the calls run without a tool, which builds their kernels. FILE gets a JSON object: `clean`
says of each kernel and op by which tools it is clean, or else what was found; `results` has the calls, errors, seconds
and kernels of each process, the kernels that gave way to others, and the tool's first words. The next run with this
FILE leaves out what is complete in it. Exit code 1 if a tool has found an error or something is not complete. A tool
that is not installed is named in one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

import fusednorm
from fusednorm.heads import operands as heads
from fusednorm.operands import OPS, Role
from fusednorm.planner.plan import VARIANTS

from .fuzz.draw import Call
from .fuzz.others import COLUMN_SUM, OTHERS, OtherCall

ROOT = Path(__file__).parents[1]

COMPUTE_SANITIZER = ("memcheck", "initcheck", "synccheck", "racecheck")
PLAIN, CONSAN = "no tool", "consan"
# racecheck reports the shared word by which Triton's dispatch tells warps their partition.
TOOLS = ("memcheck", "initcheck", "synccheck", CONSAN)
# Several rows in registers, an odd width, a ring, a cluster, column tiles; more row tiles than CTAs where it is cheap.
SHAPES = ((700, 256), (400, 1000), (300, 4096), (40, 16384), (9, 40000))
BLOCK_ROWS = 128  # of ordered sums
SUMS = ((1, 400, 256), (9, 400, 256), (30, 300, 64), (2, 33, 70))  # tensors, rows, columns of column_sum
# Each allocation of torch then has its own bounds. ConSan is chosen by Triton's variable.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
MOST_DEATHS = 5  # of processes of an op
KERNEL = "kernel: "
GAVE_WAY = "gave way: "  # of a kernel that could not be built with the tool's instructions: another one ran
FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def calls_of(name: str) -> list[Call]:
    """The calls of an op: each variant at each shape; backwards also without dx, which other kernels run."""
    op = OPS[name]
    given: dict[str, Any] = {slot.name: op.default(slot) for slot in op.arguments}
    tensors = [slot.name for slot in op.arguments if slot.role.is_tensor]
    layouts = {slot.name: "[M]" if slot.role is Role.STATISTIC else "contiguous" for slot in op.arguments}

    def places(cols: int) -> dict[str, int]:
        return {"width": 2 * cols + 64, "x_at": 0, "gate_at": cols + 32}

    masks = [[True] * len(op.outputs)]
    if op.slot("output_mask"):
        masks.append([False, *masks[0][1:]])
    return [
        Call(
            op=name, shape=shape, normalized_ndim=1, dtypes=dict.fromkeys(tensors, torch.bfloat16),
            values=dict.fromkeys(tensors, "normal"), layouts=layouts,
            given=given | {"eps": 1e-5, "output_mask": mask} | (places(shape[1]) if "width" in given else {}),
            variant=variant, margin=0, mode="plain", seed=0,
        )
        for variant, shape, mask in itertools.product(VARIANTS[:-1], SHAPES, masks)
    ]  # fmt: skip


def calls_of_heads(name: str) -> list[OtherCall]:
    """Norms of q and k, with the rotation and without: rows at two levels and at one, all gradients and dx alone."""
    dtypes = dict.fromkeys(("x", "weight", "bias", "grad", "table", "out"), torch.bfloat16)
    given = {"eps": 1e-5, "layer": True} | ({"grouped": True} if name == heads.PACKED else {})
    masks = [(True,) * 6, (True, True, False, False, False, False)] if name != heads.FORWARD else [(True,) * 6]
    return [
        OtherCall(
            name, (4, 128, 6, cols), dtypes, "normal", "contiguous", given, kv_heads=2, rotary=rotary,
            half_table=False, heads_first=False, count=0, mask=mask[name == heads.PACKED :], margin=0, setting=None,
            mode="plain", seed=0,
        )
        for cols, rotary, mask in itertools.product((64, 96, 512), (0, 64), masks)
    ]  # fmt: skip


def settings() -> Iterator[contextlib.AbstractContextManager]:
    """In which each call runs: without any, and with sums in blocks, which are added up by a kernel of their own."""
    yield contextlib.nullcontext()
    yield fusednorm.batch_invariant(ordered_sums=BLOCK_ROWS)


def sums() -> list[tuple[list, bool]]:
    """The operands of column_sum, and whether it returns their total."""
    made = [[torch.randn(rows, cols) for _ in range(count)] for count, rows, cols in SUMS]
    return list(itertools.product(made, (False, True)))


def on_gpu(value: Any) -> Any:
    return tree_map(lambda each: each.cuda() if isinstance(each, torch.Tensor) else each, value)


def work(name: str, first: int) -> None:
    """The calls of an op from a number on, in this process. Prints each call's number before it runs."""
    import triton

    from fusednorm.host import fallback, launcher

    from .fuzz.check import run

    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))  # for ConSan
    todo: list = sums() if name == COLUMN_SUM else calls_of(name) if name in OPS else calls_of_heads(name)
    for number, call in list(enumerate(todo))[first:]:
        print(f"call {number} of {len(todo)}", flush=True)
        if isinstance(call, (Call, OtherCall)):
            arguments = on_gpu(call.arguments("cpu"))  # no kernel of ATen's is looked at
            for setting in settings():
                with setting:
                    run(call, arguments)
        else:
            fusednorm.column_sum(on_gpu(call[0]), total=call[1])
        torch.cuda.synchronize()
    kernels = {f"{each.kernel.__module__.rpartition('.')[2]}.{each.kernel.__name__}" for each in launcher._kept}
    print(*(f"{KERNEL}{kernel}" for kernel in sorted(kernels)), sep="\n")
    for failed in fallback.failures():
        print(f"{GAVE_WAY}{failed}")
    print("all calls ran")


def missing(tool: str) -> str | None:
    """Why a tool cannot run, in one sentence."""
    if tool == PLAIN:
        return None
    if tool in COMPUTE_SANITIZER:
        return (
            None if shutil.which("compute-sanitizer") else f"{tool} needs compute-sanitizer, which is not on the PATH."
        )
    from triton import knobs

    has = hasattr(knobs.compilation, "instrumentation_mode")
    return None if has else "consan needs a Triton with instrumentation modes (3.5 or later), which is not installed."


def sanitize(tool: str, name: str, limit: float) -> dict[str, Any]:
    """The result of a tool and an op. limit: seconds of a process."""
    found: dict[str, Any] = {"tool": tool, "op": name, "seconds": 0.0, "deaths": []}
    first, begun = 0, time.monotonic()
    while True:
        said, code, in_time = run_apart(tool, name, first, limit)
        part = summary(said, code, in_time)
        for key, value in part.items():
            found[key] = found[key] + value if key in ("calls", "errors", "said") and key in found else value
        found["seconds"] = round(time.monotonic() - begun)
        if part["complete"] or not part["calls"] or not in_time or len(found["deaths"]) == MOST_DEATHS:
            return found
        first += part["calls"]
        found["deaths"].append(f"call {first - 1}: code {code}")


def command_of(tool: str, name: str) -> list[str]:
    """Runs the calls of an op under a tool, from the repository's root."""
    variables = ENVIRONMENT | ({"TRITON_INSTRUMENTATION_MODE": CONSAN} if tool == CONSAN else {})
    prefix = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"] if tool in COMPUTE_SANITIZER else []
    settings = [f"{key}={value}" for key, value in variables.items()]
    return ["env", *settings, *prefix, sys.executable, "-m", "tests.sanitize", "--work", name]


def run_apart(tool: str, name: str, first: int, limit: float) -> tuple[str, int, bool]:
    """(what a process printed, its exit code, whether it ended in time)"""
    child = subprocess.Popen(
        [*command_of(tool, name), "--first", str(first)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, in_time = child.communicate(timeout=limit)[0], True
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        said, in_time = child.communicate()[0], False
    return said, child.returncode, in_time


def summary(said: str, code: int, in_time: bool) -> dict[str, Any]:
    counts = FOUND.findall(said)
    lines = [line for line in said.splitlines() if line.startswith("=========") or "rror" in line]

    def after(prefix: str) -> list[str]:
        return [line.removeprefix(prefix) for line in said.splitlines() if line.startswith(prefix)]

    return {
        "calls": len(re.findall(r"^call ", said, re.MULTILINE)),
        "complete": "all calls ran" in said,
        "errors": sum(int(a or b) for a, b in counts) if counts else int(code != 0),
        "in_time": in_time,
        "kernels": after(KERNEL),
        "gave_way": after(GAVE_WAY),
        "said": [] if code == 0 else lines[:20] or said.splitlines()[-5:],
    }


def is_clean(result: dict[str, Any]) -> bool:
    return result["complete"] and not result["errors"] and not result["deaths"]


def verdicts(results: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Of each op and each kernel, by tool. A kernel is clean if every op that runs it is."""
    found: dict[str, dict[str, str]] = {}
    for each in results:
        said = "clean" if is_clean(each) else f"{each['op']}: {each['errors']} errors, {len(each['deaths'])} deaths"
        for what in (each["op"], *[f"kernel {kernel}" for kernel in each["kernels"]]):
            of_tool = found.setdefault(what, {})
            if of_tool.get(each["tool"], "clean") == "clean":
                of_tool[each["tool"]] = said
    return dict(sorted(found.items()))


def sentence(results: list[dict[str, Any]]) -> str:
    """On all results."""
    tools, ops = ({each[what] for each in results} for what in ("tool", "op"))
    kernels, calls = {kernel for each in results for kernel in each["kernels"]}, sum(each["calls"] for each in results)
    said = f"{sum(map(is_clean, results))} of {len(results)} results are clean"
    return f"{said}, of {calls:,} calls of {len(ops)} ops and {len(kernels)} kernels by {', '.join(sorted(tools))}"


def main() -> int:
    tools, names = (*COMPUTE_SANITIZER, CONSAN), (*OPS, *OTHERS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=tools, default=TOOLS)
    parser.add_argument("--ops", nargs="+", choices=names, default=names)
    parser.add_argument("--limit", type=float, default=240, help="seconds for the calls of one op under one tool")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which the run stops")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "out/sanitize.json")
    parser.add_argument("--work", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.first)
        return 0
    end = time.monotonic() + 60 * options.minutes
    absent = {tool: why for tool in options.tools if (why := missing(tool))}
    print(*absent.values(), sep="\n")
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else []
    results = [each for each in results if each["complete"] and each["tool"] != PLAIN]  # builds are of this machine
    done = {(each["tool"], each["op"]) for each in results}
    jobs = [(tool, name) for tool in options.tools if tool not in absent for name in options.ops]
    jobs = [job for job in jobs if job not in done]
    ahead = [(PLAIN, name) for name in options.ops if any(job[1] == name and job[0] != CONSAN for job in jobs)]
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def result_of(job: tuple[str, str]) -> dict[str, Any] | None:
        left = end - time.monotonic()
        return sanitize(*job, min(options.limit, left)) if left > 0 else None

    with ThreadPoolExecutor(options.workers) as pool:
        for future in as_completed([pool.submit(result_of, job) for job in (*ahead, *jobs)]):
            result = future.result()
            if result is None:
                continue
            results.append(result)
            shown = {key: value for key, value in result.items() if not isinstance(value, list)}
            print(*(f"{key} {value}" for key, value in shown.items()), sep=", ", flush=True)
            kept = {"missing": absent, "clean": verdicts(results), "results": results}
            options.out.write_text(json.dumps(kept, indent=1))
    left = len(jobs) - sum((each["tool"], each["op"]) in jobs for each in results)
    for each in results:
        if not is_clean(each):
            print("again:", " ".join(command_of(each["tool"], each["op"])))
    print(f"{sentence(results)}; {left} have not begun: {options.out}")
    return left > 0 or not all(map(is_clean, results))


if __name__ == "__main__":
    sys.exit(main())
