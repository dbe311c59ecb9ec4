"""The launcher: which properties of a launch decide the build of its kernel, and where launches happen."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planning import make_problem, meta_call

from fusednorm.planner.plan import PipelinedPlan


def test_errors_of_a_launch_reach_the_caller(monkeypatch):
    from fusednorm.host import launch, launcher

    def run(launches):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(launcher, "hand_over", run)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch.backward(meta_call(make_problem("layer", 4096), 64))


def test_launches_are_handed_over_in_one_place():
    package = Path(__file__).parents[2] / "fusednorm"
    callers = {path.name for path in package.rglob("*.py") if re.search(r"\blaunch\.(load|run)\(\)", path.read_text())}
    assert callers == {"launcher.py"}


def prepared_launch(rows=64, cols=4096, **changes):
    from fusednorm.host import launch
    from fusednorm.planner import heuristics
    from fusednorm.planner.device import H200

    call = meta_call(make_problem("layer", cols, **changes), rows)
    plan = heuristics.choose(call.problem, rows, H200)
    return plan, launch.prepare_backward(call, plan)[0][0]


def test_the_row_count_is_no_part_of_what_a_build_depends_on():
    from fusednorm.host import launcher

    (plan, few), (_, many) = prepared_launch(64), prepared_launch(65)
    assert isinstance(plan, PipelinedPlan)
    assert launcher._key_and_values(few, 0)[0] == launcher._key_and_values(many, 0)[0]


@pytest.mark.parametrize(
    "changes", [{"cols": 8192}, {"dtype": "fp16"}, {"weight": "fp32"}, {"wants_db": False}], ids=str
)
def test_what_a_build_depends_on_is(changes):
    from fusednorm.host import launcher

    launches = [prepared_launch()[1], prepared_launch(**changes)[1]]
    one, other = (launcher._key_and_values(each, 0)[0] for each in launches)
    assert one != other


def test_a_build_depends_on_its_options():
    from fusednorm.host import launcher

    _, launch = prepared_launch()
    key = launcher._key_and_values(launch, 0)[0]
    launch.options = launch.options | {"maxnreg": 64}
    assert launcher._key_and_values(launch, 0)[0] != key


class Kernel:
    params = [SimpleNamespace(do_not_specialize=False, annotation_type="")]


@pytest.mark.parametrize("offset", [0, 1])
def test_a_build_depends_on_whether_pointers_are_aligned(offset):
    from fusednorm.host import launcher

    tensor = torch.zeros(64)
    tensor = tensor[(-tensor.data_ptr() // 4) % 4 + offset :]
    launch = SimpleNamespace(kernel=Kernel(), norm=None, tile=None, options={}, operands=(tensor,))
    key, values = launcher._key_and_values(launch, 0)
    assert key[-1] is (offset == 0)
    assert values == [tensor.data_ptr()]


def test_a_build_depends_on_every_dtype_on_norm_and_tile_and_on_the_device():
    from fusednorm.host import launcher

    kernel = Kernel()
    kernel.params = 2 * Kernel.params

    def key(dtype=torch.float32, described=torch.float32, norm="norm", tile="tile", device=0):
        descriptor = launcher.TileDescriptor(SimpleNamespace(tensor=torch.zeros(64, dtype=described)), 1, 64, None)
        operands = torch.zeros(64, dtype=dtype), descriptor
        launch = SimpleNamespace(kernel=kernel, norm=norm, tile=tile, options={}, operands=operands)
        return launcher._key_and_values(launch, device)[0]

    assert key() == key()
    for change in (
        {"dtype": torch.bfloat16}, {"described": torch.bfloat16}, {"norm": "other"}, {"tile": "other"}, {"device": 1}
    ):  # fmt: skip
        assert key(**change) != key(), change
