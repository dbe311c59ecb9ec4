"""sanitize.py reaches every kernel, and reads what the tools say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from devices import named  # noqa: E402

from fusednorm.heads import launch as head_launch  # noqa: E402
from fusednorm.heads.call import calls_of  # noqa: E402
from fusednorm.heads.operands import OPS as HEAD_OPS  # noqa: E402
from fusednorm.heads.plan import plans_of  # noqa: E402
from fusednorm.host import fallback, launch  # noqa: E402
from fusednorm.operands import FORWARD, OPS, operands_of  # noqa: E402
from fusednorm.planner.plan import ReferencePlan  # noqa: E402
from fusednorm.problem.calls import check_backward, check_forward  # noqa: E402
from fusednorm.settings.forcing import force  # noqa: E402
from tests import sanitize  # noqa: E402
from tests.fuzz import draw  # noqa: E402

PACKAGE = Path(launch.__file__).parents[1]


def kernels_of(op: str) -> set[str]:
    """The kernels that an H200 launches for the op's calls."""
    spec, found = named("H200"), set()
    for call in sanitize.calls_of(op):
        operands = operands_of(op, (), call.arguments("cpu"))
        for setting in sanitize.settings():
            with setting, force(call.variant):
                checked = check_forward(operands) if operands.direction == FORWARD else check_backward(operands)
                choice = fallback.choose(checked.problem, checked.block_rows or checked.rows, spec)
                if not isinstance(choice.plan, ReferencePlan):
                    found |= {each.kernel.__name__ for each in launch.program_of(checked, choice, spec).launches}
    return found


def zeros(shape, kind, dtype, generator):
    return torch.zeros(shape, dtype=dtype)


def test_every_kernel_of_the_norms_is_run(monkeypatch):
    monkeypatch.setattr(draw, "fill", zeros)
    launch_of = re.compile(r"(?:Launch\(|_launch\(call, |_in_clusters\(plan, call, )\s*\w+\.(\w+)")
    written = {name for path in (PACKAGE / "host").glob("*.py") for name in launch_of.findall(path.read_text())}
    assert len(written) > 5 and set.union(*[kernels_of(name) for name in OPS if "layer" in name]) == written


def test_every_kernel_of_the_norms_of_heads_is_run():
    spec, found = named("H200"), set()
    for name in HEAD_OPS:
        for call in sanitize.calls_of_heads(name):
            given = operands_of(name, (), call.arguments("cpu"))
            planned = plans_of(calls_of(given), spec)
            found |= {each.kernel.__name__ for each in head_launch.program_of(given, planned, spec).launches}
    assert found == {"forward", "backward", "finalize_several"}


def test_errors_of_the_tools_are_counted():
    found = sanitize.summary("call 0 of 2\n========= Invalid read\n========= ERROR SUMMARY: 3 errors\n", 9, True)
    assert found["errors"] == 3 and not found["complete"] and found["said"][0] == "========= Invalid read"
    assert sanitize.summary("call 0\nall calls ran\n========= ERROR SUMMARY: 0 errors\n", 0, True)["errors"] == 0
    assert sanitize.summary("CUDA error: device-side assert triggered", 1, True)["errors"] == 1


def test_a_process_that_dies_starts_anew_behind_the_call_that_killed_it(monkeypatch):
    begun = []

    def dies_in_its_second_call(tool, name, first, limit):
        begun.append(first)
        if first == 0:
            return "call 0 of 3\ncall 1 of 3\nSegmentation fault", -11, True
        return "call 2 of 3\nkernel: ring.forward\nall calls ran\n========= ERROR SUMMARY: 0 errors\n", 0, True

    monkeypatch.setattr(sanitize, "run_apart", dies_in_its_second_call)
    found = sanitize.sanitize("memcheck", "layer_norm_fwd", 1)
    assert (begun, found["calls"], found["deaths"]) == ([0, 2], 3, ["call 1: code -11"])
    assert found["complete"] and not sanitize.is_clean(found)
    clean = found | {"op": "rms_norm_fwd", "deaths": [], "errors": 0}
    told = sanitize.verdicts([clean, found, clean | {"tool": "synccheck"}])
    assert told["rms_norm_fwd"] == {"memcheck": "clean", "synccheck": "clean"}
    assert told["kernel ring.forward"] == {"memcheck": "layer_norm_fwd: 1 errors, 1 deaths", "synccheck": "clean"}
    said = "1 of 2 results are clean, of 6 calls of 2 ops and 1 kernels by memcheck"
    assert sanitize.sentence([clean, found]) == said
