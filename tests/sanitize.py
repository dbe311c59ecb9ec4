"""Runs every kernel, for every op, under compute-sanitizer's tools and Triton's ConSan, on a GPU.

    python -m tests.sanitize [--tools memcheck consan] [--ops layer_norm_bwd] [--minutes 8.5] [--out FILE]

The first calls of each op launch each of its kernels once. Those under all tools come first, then the calls that need
other builds; a call without any is left out. All processes build ahead what the calls need, but for ConSan, whose
builds are others. Each tool runs the calls of each op in a process of its own, with a limit of time; one that dies
starts anew behind the call that killed it. FILE gets a JSON object: `clean` says of each kernel and op by which tools
it is clean, or else what was found; `results` has the calls, errors, seconds and kernels of each process, the kernels
that gave way to others, and the tool's first words. The next run with this FILE leaves out what is complete in it. Exit
code 1 if a tool has found an error or something is not complete. A tool that is not installed is named in one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._pytree import tree_map

import fusednorm
from fusednorm.heads import operands as heads
from fusednorm.operands import OPS, Role, operands_of
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.plan import VARIANTS, ReferencePlan
from fusednorm.problem.calls import check

from .fuzz import draw
from .fuzz.draw import Call
from .fuzz.others import COLUMN_SUM, OTHERS, OtherCall

ROOT = Path(__file__).parents[1]

COMPUTE_SANITIZER = ("memcheck", "initcheck", "synccheck", "racecheck")
CONSAN = "consan"
# racecheck reports the shared word by which Triton's dispatch tells warps their partition.
TOOLS = ("memcheck", "initcheck", "synccheck", CONSAN)
# Several rows in registers, an odd width, a ring, a cluster, column tiles; more row tiles than CTAs where it is cheap.
SHAPES = ((700, 256), (400, 1000), (300, 4096), (40, 16384), (9, 40000))
BLOCK_ROWS = 128  # of ordered sums
SUMS = ((1, 400, 256), (9, 400, 256), (30, 300, 64), (2, 33, 70))  # tensors, rows, columns of column_sum
# Each allocation of torch then has its own bounds. ConSan is chosen by Triton's variable.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
MOST_SECONDS = 240  # of building ahead for a part
FIRST, REST = "first", "rest"  # parts of an op's calls
MOST_DEATHS = 5  # of processes of an op
KERNEL = "kernel: "
GAVE_WAY = "gave way: "  # of a kernel that could not be built with the tool's instructions: another one ran
FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def calls_of(name: str) -> list[Call]:
    """The calls of an op: each variant at each shape; backwards also without dx, which other kernels run, and forwards
    that may round steps also with this."""
    op = OPS[name]
    given: dict[str, Any] = {slot.name: op.default(slot) for slot in op.arguments}
    tensors = [slot for slot in op.arguments if slot.role.is_tensor]
    dtypes = {slot.name: torch.int32 if slot.role is Role.INDEX else torch.bfloat16 for slot in tensors}
    layouts = {slot.name: "[M]" if slot.role is Role.STATISTIC else "contiguous" for slot in op.arguments}

    def places(cols: int) -> dict[str, int]:
        return {"width": 2 * cols + 64, "x_at": 0, "gate_at": cols + 32}

    masks = [[True] * len(op.outputs)]
    if op.slot("output_mask"):
        masks.append([False, *masks[0][1:]])
    rounds = [{}, {"rounds_steps": True}][: 1 + (op.slot("rounds_steps") is not None)]
    return [
        Call(
            op=name, shape=shape, normalized_ndim=1, dtypes=dtypes, values=dict.fromkeys(dtypes, "normal"),
            layouts=layouts,
            given=given | steps | {"eps": 1e-5, "output_mask": mask} | (places(shape[1]) if "width" in given else {}),
            variant=variant, margin=0, mode="plain", seed=0,
        )
        for steps, variant, shape, mask in itertools.product(rounds, VARIANTS[:-1], SHAPES, masks)
    ]  # fmt: skip


def calls_of_heads(name: str) -> list[OtherCall]:
    """Norms of q and k, of each head or of all, with the rotation and without: rows at two levels and at one, all
    gradients and dx alone."""
    dtypes = dict.fromkeys(("x", "weight", "bias", "grad", "table", "out"), torch.bfloat16)
    given = {"eps": 1e-5, "layer": True} | ({"grouped": True} if name == heads.PACKED else {})
    masks = [(True,) * 6, (True, True, False, False, False, False)] if name != heads.FORWARD else [(True,) * 6]
    of_all = (False, True) if name != heads.PACKED else (False,)
    return [
        OtherCall(
            name, (4, 128, 6, cols), dtypes, "normal", "contiguous", given, kv_heads=2, rotary=rotary,
            half_table=False, heads_first=False, whole=whole, count=0, mask=mask[name == heads.PACKED :], margin=0,
            setting=None, mode="plain", seed=0,
        )
        for whole, cols, rotary, mask in itertools.product(of_all, (64, 96, 512), (0, 64), masks)
    ]  # fmt: skip


def settings() -> Iterator[contextlib.AbstractContextManager]:
    """In which each call runs: without any, and with sums in blocks, which are added up by a kernel of their own."""
    yield contextlib.nullcontext()
    yield fusednorm.batch_invariant(ordered_sums=BLOCK_ROWS)


def sums() -> list[tuple[list, bool]]:
    """The operands of column_sum, and whether it returns their total."""
    made = [[torch.randn(rows, cols) for _ in range(count)] for count, rows, cols in SUMS]
    return list(itertools.product(made, (False, True)))


@functools.cache
def all_calls(name: str) -> list:
    if name == COLUMN_SUM:
        return sums()
    return calls_of(name) if name in OPS else calls_of_heads(name)


def launches_of(name: str, call: Call | OtherCall, spec: DeviceSpec) -> list:
    """What a call launches on a GPU; of norms in all settings."""
    from fusednorm.heads import call as head_call
    from fusednorm.heads import launch as head_launch
    from fusednorm.heads.plan import plans_of
    from fusednorm.host import fallback, launch

    if name not in OPS:
        operands = operands_of(name, (), call.arguments("cpu"))
        return [*head_launch.program_of(operands, plans_of(head_call.calls_of(operands), spec), spec).launches]
    with mock.patch.object(draw, "fill", without_memory):
        operands, found = operands_of(name, (), moved(call.arguments("cpu"), "meta")), []
    for setting in settings():
        with setting, fusednorm.force(call.variant):
            checked = check(operands)
            choice = fallback.choose(checked.problem, checked.block_rows or checked.rows, spec)
            if not isinstance(choice.plan, ReferencePlan):
                found += launch.program_of(checked, choice, spec).launches
    return found


def without_memory(shape: tuple[int, ...], kind: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Chosen(NamedTuple):
    """Of one part: the numbers of the calls by op, and the builds that no call before them needs."""

    calls: dict[str, list[int]]
    builds: list[tuple[str, int, int]]  # op, call, launch


def choose(names: Sequence[str], spec: DeviceSpec) -> dict[str, Chosen]:
    """The calls of each part that are worth running."""
    from fusednorm.tools import compilation

    parts, built = {part: Chosen({}, []) for part in (FIRST, REST)}, set()
    for name in names:
        kernels: set[str] = set()
        for number, call in enumerate(all_calls(name)):
            launches = [] if name == COLUMN_SUM else launches_of(name, call, spec)
            keys = {compilation.build_key(each, spec.arch): at for at, each in enumerate(launches)}
            of_call = {kernel_name(each) for each in launches}
            new = keys.keys() - built
            if new or of_call - kernels or name == COLUMN_SUM:
                part = parts[REST if of_call and of_call <= kernels else FIRST]
                part.calls.setdefault(name, []).append(number)
                part.builds.extend((name, number, keys[key]) for key in new)
            kernels |= of_call
            built |= new
    return parts


def build(name: str, number: int, at: int, spec: DeviceSpec) -> None:
    """Compiles one launch of a call into Triton's cache on disk."""
    from fusednorm.tools import compilation

    torch.set_num_threads(1)
    compilation.compile_for(launches_of(name, all_calls(name)[number], spec)[at], spec.arch)


def kernel_name(launch: Any) -> str:
    return f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"


def moved(value: Any, device: str) -> Any:
    return tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, value)


def work(name: str, numbers: Sequence[int]) -> None:
    """Some calls of an op, in this process. Prints each call's number before it runs."""
    import triton

    from fusednorm.host import fallback, launcher

    from .fuzz.check import run

    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))  # for ConSan
    for number in numbers:
        call = all_calls(name)[number]
        print(f"call {number} of {name}", flush=True)
        if isinstance(call, (Call, OtherCall)):
            arguments = moved(call.arguments("cpu"), "cuda")  # no kernel of ATen's is looked at
            for setting in settings():
                with setting:
                    run(call, arguments)
        else:
            fusednorm.column_sum(moved(call[0], "cuda"), total=call[1])
        torch.cuda.synchronize()
    print(*(f"{KERNEL}{kernel}" for kernel in sorted({kernel_name(each) for each in launcher._kept})), sep="\n")
    for failed in fallback.failures():
        print(f"{GAVE_WAY}{failed}")
    print("all calls ran")


def missing(tool: str) -> str | None:
    """Why a tool cannot run, in one sentence."""
    if tool in COMPUTE_SANITIZER:
        return (
            None if shutil.which("compute-sanitizer") else f"{tool} needs compute-sanitizer, which is not on the PATH."
        )
    from triton import knobs

    has = hasattr(knobs.compilation, "instrumentation_mode")
    return None if has else "consan needs a Triton with instrumentation modes (3.5 or later), which is not installed."


def sanitize(tool: str, name: str, part: str, numbers: list[int], limit: float) -> dict[str, Any]:
    """The result of a tool and these calls of an op. limit: seconds of a process."""
    found: dict[str, Any] = {"tool": tool, "op": name, "part": part, "numbers": numbers, "seconds": 0.0, "deaths": []}
    begun = time.monotonic()
    while True:
        said, code, in_time = run_apart(tool, name, numbers, limit)
        of_it = summary(said, code, in_time)
        for key, value in of_it.items():
            found[key] = found[key] + value if key in ("calls", "errors", "said") and key in found else value
        found["seconds"] = round(time.monotonic() - begun)
        if of_it["complete"] or not of_it["calls"] or not in_time or len(found["deaths"]) == MOST_DEATHS:
            return found
        found["deaths"].append(f"call {numbers[of_it['calls'] - 1]}: code {code}")
        numbers = numbers[of_it["calls"] :]


def command_of(tool: str, name: str, numbers: Sequence[int]) -> list[str]:
    """Runs calls of an op under a tool, from the repository's root."""
    variables = ENVIRONMENT | ({"TRITON_INSTRUMENTATION_MODE": CONSAN} if tool == CONSAN else {})
    prefix = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"] if tool in COMPUTE_SANITIZER else []
    settings = [f"{key}={value}" for key, value in variables.items()]
    which = ["--work", name, "--calls", *map(str, numbers)]
    return ["env", *settings, *prefix, sys.executable, "-m", "tests.sanitize", *which]


def run_apart(tool: str, name: str, numbers: Sequence[int], limit: float) -> tuple[str, int, bool]:
    """(what a process printed, its exit code, whether it ended in time)"""
    child = subprocess.Popen(
        command_of(tool, name, numbers), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
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


def build_ahead(builds: list[tuple[str, int, int]], spec: DeviceSpec, end: float, workers: int) -> None:
    """Compiles by so many processes. The calls tell what cannot be built."""
    begun, context = time.monotonic(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        futures = [pool.submit(build, *each, spec) for each in builds]
        done, left = wait(futures, max(0.0, min(end - begun, MOST_SECONDS)))
        pool.shutdown(cancel_futures=True)
    print(f"{len(done)} of {len(done) + len(left)} builds, {time.monotonic() - begun:.0f} s", flush=True)


def main() -> int:
    tools, names = (*COMPUTE_SANITIZER, CONSAN), (*OPS, *OTHERS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=tools, default=TOOLS)
    parser.add_argument("--ops", nargs="+", metavar="OP", choices=names, default=names, help="default: all")
    parser.add_argument("--limit", type=float, default=240, help="seconds for the calls of one op under one tool")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which the run stops")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "out/sanitize.json")
    parser.add_argument("--work", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.calls)
        return 0
    end = time.monotonic() + 60 * options.minutes
    absent = {tool: why for tool in options.tools if (why := missing(tool))}
    print(*absent.values(), sep="\n")
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else []
    results = [each for each in results if each["complete"] and "part" in each]
    done = {(each["tool"], each["op"], each["part"]) for each in results}
    from fusednorm.host import gpus

    spec = gpus.spec_of(torch.device("cuda"))
    parts, jobs = choose(names, spec), []
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def result_of(job: tuple[str, str, str]) -> dict[str, Any] | None:
        tool, name, part = job
        left = end - time.monotonic()
        return sanitize(*job, parts[part].calls[name], min(options.limit, left)) if left > 0 else None

    for part, chosen in parts.items():
        of_part = [(tool, name, part) for tool in options.tools if tool not in absent for name in options.ops]
        of_part = [job for job in of_part if job not in done and job[1] in chosen.calls]
        jobs += of_part
        needed = {name for tool, name, _ in of_part if tool != CONSAN}
        if needed and time.monotonic() < end:
            build_ahead([each for each in chosen.builds if each[0] in needed], spec, end, options.workers)
        with ThreadPoolExecutor(options.workers) as pool:
            for future in as_completed([pool.submit(result_of, job) for job in of_part]):
                result = future.result()
                if result is None:
                    continue
                results.append(result)
                shown = {key: value for key, value in result.items() if not isinstance(value, list)}
                print(*(f"{key} {value}" for key, value in shown.items()), sep=", ", flush=True)
                kept = {"missing": absent, "clean": verdicts(results), "results": results}
                options.out.write_text(json.dumps(kept, indent=1))
    left = len(jobs) - sum((each["tool"], each["op"], each["part"]) in jobs for each in results)
    for each in results:
        if not is_clean(each):
            print("again:", " ".join(command_of(each["tool"], each["op"], each["numbers"])))
    print(f"{sentence(results)}; {left} have not begun: {options.out}")
    return left > 0 or not all(map(is_clean, results))


if __name__ == "__main__":
    sys.exit(main())
