"""How much Python a call runs, in frames. Unlike host time, frames are counted alike on every machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from cases import BF16, FP32, make_case
from head_norms import HeadCase, gradients

import fusednorm
from fusednorm.host import gpus, prepared, torch_compat
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.host.program import Map
from fusednorm.planner.device import H200
from fusednorm.tools.oracle import make_inputs

OPS = torch.ops.fusednorm
MOST_OF_A_FIRST_CALL, MOST_OF_A_REPEATED_CALL = 275, 20
MOST_OF_HEADS, MOST_OF_HEADS_AND_THEIR_GRADIENTS, MOST_OF_A_MODULATED_NORM = 30, 58, 26
PACKAGE = str(Path(fusednorm.__file__).parent)
NOTHING = "".format  # takes any arguments, and has no frame


@pytest.fixture(autouse=True)
def cpu_tensors_stand_in_for_those_of_an_h200(monkeypatch):
    """All kernels are loaded once they were asked for. Their launches do nothing."""
    from fusednorm.host import launcher

    class Build(launcher.Build):
        head, packs_operands, launch = ("head",) * 9, True, NOTHING

        def __init__(self, maps: int):
            self.encoders = [NOTHING] * maps

    builds: dict[tuple, Build] = {}

    def load(launch, device):
        key = launcher.build_key(launch, device)
        if key not in builds:
            builds[key] = Build(sum(isinstance(each, Map) for each in launch.arguments()))
        return builds[key]

    monkeypatch.setattr(launcher, "_load", load)
    monkeypatch.setattr(launcher, "JITFunction", object)
    monkeypatch.setattr(launcher, "_unspecialized", {})
    monkeypatch.setattr(launcher, "_what_no_build_depends_on", lambda kernel: frozenset())
    monkeypatch.setattr(gpus, "spec_of", lambda device: H200)
    monkeypatch.setattr(torch_compat, "allocate", lambda *memory: torch.empty_strided(*memory[:2], dtype=memory[2]))
    monkeypatch.setattr(torch_compat, "current_device", int("-1").__int__)
    monkeypatch.setattr(torch_compat, "raw_stream", abs)
    prepared.forget()
    with kernels_on("cpu"):
        yield
    prepared.forget()


def frames_of(run) -> int:
    """How many frames of the package's functions, and of what Python generates for its classes, `run` enters."""
    files = []
    sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(file.startswith((PACKAGE, "<string>")) for file in files)


def values_of(run) -> set[str]:
    """The names of the package's types of which `run` makes a value."""
    names: set[str] = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename == "<string>":
            made = frame.f_locals.get("_cls") or type(frame.f_locals.get("self"))
            names.update({made.__name__} if made.__module__.startswith("fusednorm") else ())

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def calls(norm: str, cols: int = 4096) -> dict:
    """The ops, as functions without arguments."""
    inputs = make_inputs(make_case(norm, (64, cols), (BF16, FP32, BF16)))
    mean, rstd, shape = torch.randn(64), torch.rand(64), (cols,)
    if norm == "layer":
        backward = inputs.grad_out, inputs.x, shape, mean, rstd, inputs.weight, inputs.bias
        return {
            "forward": lambda: OPS.layer_norm_fwd(inputs.x, shape, inputs.weight, inputs.bias),
            "backward": lambda: OPS.layer_norm_bwd(*backward),
        }
    backward = inputs.grad_out, inputs.x, shape, rstd, inputs.weight
    return {
        "forward": lambda: OPS.rms_norm_fwd(inputs.x, shape, inputs.weight),
        "backward": lambda: OPS.rms_norm_bwd(*backward),
    }


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("cols", [4096, 1000, 65536])
def test_a_first_call_is_short_once_its_plan_and_builds_are_known_and_a_repeated_one_shorter(norm, direction, cols):
    run = calls(norm, cols)[direction]
    run()
    prepared.forget()
    first, repeated = frames_of(run), frames_of(run)
    assert repeated <= MOST_OF_A_REPEATED_CALL, repeated
    assert 3 * repeated < first <= MOST_OF_A_FIRST_CALL, first


def test_a_repeated_norm_that_is_modulated_is_short_and_looks_at_no_layout():
    x, (scale, shift) = torch.randn(2, 32, 4096, dtype=BF16), torch.randn(2, 2, 1, 4096, dtype=BF16)
    run = lambda: fusednorm.ada_rms_norm(x, scale, shift)  # noqa: E731
    run()
    assert frames_of(run) <= MOST_OF_A_MODULATED_NORM


def test_a_repeated_norm_of_heads_is_short():
    case = HeadCase(dtype=BF16, rotary=16)
    given, rotary = {name: each.detach() for name, each in case.tensors().items()}, case.tables()
    run = lambda: case.run(given, rotary=rotary)  # noqa: E731
    run()
    assert frames_of(run) <= MOST_OF_HEADS


def test_so_is_its_backward():
    case = HeadCase(dtype=BF16, rotary=16)
    given, rotary = case.tensors(), case.tables()
    run = lambda: gradients(case.run(given, rotary=rotary), given)  # noqa: E731
    run()
    assert frames_of(run) <= MOST_OF_HEADS_AND_THEIR_GRADIENTS


def test_the_values_of_a_backward_are_those_that_the_documents_list():
    text = (Path(__file__).parents[2] / "docs" / "how-it-is-built.md").read_text()
    rows = re.findall(r"^\| (.*?`.*?) \| ", text.partition("These 24 values")[2].partition("## The kernels")[0], re.M)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    made = set()
    for cols in (4096, 1000, 65536):
        run = calls("layer", cols)["backward"]
        run()  # the planner makes values of its own
        prepared.forget()
        made |= values_of(run)
    assert len(rows) == 24 and made <= listed


def test_a_repeated_column_sum_is_launched_without_tritons_launcher():
    from fusednorm.host import launcher

    inputs = [torch.randn(20000, 4096) for _ in range(3)]
    OPS.column_sum(inputs)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "run", "hand_over"):
            patch.setattr(launcher, name, lambda *_, name=name: asked.append(name))
        OPS.column_sum(inputs)
    assert not asked
