"""sanitize.py reaches every kernel, and reads what the tools say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")
from compiling import worker_processes  # noqa: E402
from devices import named  # noqa: E402

from fusednorm.heads.operands import OPS as HEAD_OPS  # noqa: E402
from fusednorm.host import launch  # noqa: E402
from fusednorm.operands import OPS  # noqa: E402
from tests import sanitize  # noqa: E402

PACKAGE = Path(launch.__file__).parents[1]


def kernels_of(op: str) -> set[str]:
    """The kernels that an H200 launches for the op's calls."""
    launches = [sanitize.launches_of(op, call, named("H200")) for call in sanitize.all_calls(op)]
    return {each.kernel.__name__ for of_call in launches for each in of_call}


def test_every_kernel_of_the_norms_is_run():
    launch_of = re.compile(r"(?:Launch\(|_launch\(call, |_in_clusters\(plan, call, )\s*\w+\.(\w+)")
    written = {name for path in (PACKAGE / "host").glob("*.py") for name in launch_of.findall(path.read_text())}
    names = [name for name in OPS if "layer" in name]
    assert len(written) > 5 and set.union(*map(kernels_of, names)) == written


def test_every_kernel_of_the_norms_of_heads_is_run():
    assert set.union(*map(kernels_of, HEAD_OPS)) == {"forward", "backward", "finalize_several"}


def answers() -> tuple[bool, bool, float]:
    """Whether the first calls have all kernels of each op, and the chosen ones all builds; which share is chosen."""
    from fusednorm.tools import compilation

    spec, names = named("H200"), ("rms_norm_bwd", "rms_norm_bwd_residual", "head_norm_bwd")
    parts = sanitize.choose(names, spec)
    launches = {name: [sanitize.launches_of(name, call, spec) for call in sanitize.all_calls(name)] for name in names}

    def told(of: Callable, name: str, *some: str) -> set:
        numbers = [number for part in some for number in parts[part].calls.get(name, ())]
        return {of(each) for number in numbers or range(len(launches[name])) for each in launches[name][number]}

    def key(each) -> str:
        return compilation.build_key(each, spec.arch)

    first = all(told(sanitize.kernel_name, name, sanitize.FIRST) == told(sanitize.kernel_name, name) for name in names)
    built = {key(launches[name][number][at]) for part in parts.values() for name, number, at in part.builds}
    run = set.union(*[told(key, name, sanitize.FIRST, sanitize.REST) for name in names])
    everything = set.union(*[told(key, name) for name in names])
    chosen = [len(numbers) for part in parts.values() for numbers in part.calls.values()]
    return first, built == run == everything, sum(chosen) / sum(map(len, launches.values()))


def test_chosen_calls_have_all_builds_and_the_first_ones_all_kernels():
    with worker_processes(1) as workers:
        first, built, share = workers.submit(answers).result()
    assert first and built and share < 0.8


def test_errors_of_the_tools_are_counted():
    found = sanitize.summary("call 0 of 2\n========= Invalid read\n========= ERROR SUMMARY: 3 errors\n", 9, True)
    assert found["errors"] == 3 and not found["complete"] and found["said"][0] == "========= Invalid read"
    assert sanitize.summary("call 0\nall calls ran\n========= ERROR SUMMARY: 0 errors\n", 0, True)["errors"] == 0
    assert sanitize.summary("CUDA error: device-side assert triggered", 1, True)["errors"] == 1


def test_a_process_that_dies_starts_anew_behind_the_call_that_killed_it(monkeypatch):
    begun = []

    def dies_in_its_second_call(tool, name, numbers, limit):
        begun.append(numbers)
        if len(numbers) == 3:
            return "call 0 of 3\ncall 1 of 3\nSegmentation fault", -11, True
        return "call 2 of 3\nkernel: ring.forward\nall calls ran\n========= ERROR SUMMARY: 0 errors\n", 0, True

    monkeypatch.setattr(sanitize, "run_apart", dies_in_its_second_call)
    found = sanitize.sanitize("memcheck", "layer_norm_fwd", sanitize.FIRST, [0, 4, 7], 1)
    assert (begun, found["calls"], found["deaths"]) == ([[0, 4, 7], [7]], 3, ["call 4: code -11"])
    assert found["complete"] and not sanitize.is_clean(found)
    clean = found | {"op": "rms_norm_fwd", "deaths": [], "errors": 0}
    told = sanitize.verdicts([clean, found, clean | {"tool": "synccheck"}])
    assert told["rms_norm_fwd"] == {"memcheck": "clean", "synccheck": "clean"}
    assert told["kernel ring.forward"] == {"memcheck": "layer_norm_fwd: 1 errors, 1 deaths", "synccheck": "clean"}
    said = "1 of 2 results are clean, of 6 calls of 2 ops and 1 kernels by memcheck"
    assert sanitize.sentence([clean, found]) == said
