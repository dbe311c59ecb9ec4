"""A second launch sums the partials of dw and db. The order of summing depends only on the numbers of columns and
partials."""

from __future__ import annotations

import pytest
import torch
from cases import FP32, make_case
from planning import make_problem, meta_call, num_ctas

from fusednorm import sm_margin
from fusednorm.host import gpus
from fusednorm.planner.choice import choose
from fusednorm.planner.device import A100, B200, H200
from fusednorm.planner.plan import VARIANTS
from fusednorm.tools.oracle import make_inputs


def finalizer(problem, rows, device, variant=None, left=0):
    """(number of partials, tile) of the launch that sums partials; None if the backward has no such launch."""
    from unittest import mock

    from fusednorm import force
    from fusednorm.host import launch

    with force(variant), mock.patch.object(gpus, "spec_of", lambda _: device.leaving(left)):
        last = launch.on_tensors(meta_call(problem, rows)).launches[-1]
    return (last.operands[4], last.tile) if last.kernel.__name__ == "finalize" else None


@pytest.mark.parametrize("cols, dtype", [(96, "bf16"), (1000, "fp32"), (4096, "bf16"), (65536, "bf16")])
def test_the_order_of_summing_depends_on_columns_and_partials_alone(cols, dtype):
    tiles = set()
    for norm in ("layer", "rms"):
        for rows in (1, 300, 16384):
            for device in (A100, H200, B200):
                for variant in VARIANTS[:-1]:
                    for left in (0, 16):
                        for wants_dx in (True, False):
                            problem = make_problem(norm, cols, dtype, wants_dx=wants_dx)
                            found = finalizer(problem, rows, device, variant, left)
                            tiles |= {(found[1].rows, found[1].cols)} if found else set()
    assert len(tiles) == 1


@pytest.mark.parametrize("left", [0, 16, 131])
@pytest.mark.parametrize("rows", [1, 100, 16384])
def test_it_is_told_how_many_partials_there_are(rows, left):
    for cols in (128, 4096, 5120):
        problem, spec = make_problem("layer", cols), H200.leaving(left)
        plan = choose(problem, rows, spec)
        assert finalizer(problem, rows, H200, left=left)[0] == plan.num_groups * num_ctas(plan, rows, cols, spec)


@pytest.mark.parametrize("rows, cols", [(16, 200), (200, 40)])
def test_a_margin_that_leaves_the_partials_their_number_leaves_the_bits_alone(rows, cols):
    from fusednorm.host import launch
    from fusednorm.operands import BackwardOperands
    from fusednorm.problem.calls import check_backward

    case = make_case("layer", (rows, cols), (FP32, FP32, FP32))
    inputs = make_inputs(case)
    rstd, mean = torch.rand(rows) + 0.5, torch.randn(rows)
    arguments = "layer", inputs.grad_out, inputs.x, (cols,), mean, rstd, inputs.weight, inputs.bias, (True,) * 3
    found = []
    for left in (0, 8, 50):
        with sm_margin(left):
            prepared = launch.on_tensors(check_backward(BackwardOperands(*arguments)))
            assert [each.kernel.__name__ for each in prepared.launches] == ["backward", "finalize"]
            for each in prepared.launches:
                each.run()
        found.append((prepared.launches[-1].operands[4], prepared.outputs))
    for partials, outputs in found[1:]:
        assert partials == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(outputs, found[0][1], strict=True))


@pytest.mark.parametrize("device, dependent", [(A100, False), (H200, True), (B200, True)], ids=["A100", "H200", "B200"])
def test_the_sums_are_placed_while_what_they_depend_on_ends_where_a_gpu_can(device, dependent):
    from unittest import mock

    from fusednorm.host import launch

    for norm, cols, changes in (("layer", 4096, {}), ("rms", 1000, {}), ("layer", 4096, {"wants_dx": False})):
        with mock.patch.object(gpus, "spec_of", lambda _: device):
            first, last = launch.on_tensors(meta_call(make_problem(norm, cols, **changes), 16384)).launches
        assert last.options.get("launch_pdl", False) == last.tile.dependent == dependent
        assert "launch_pdl" not in first.options  # the launch before it is not ours, and announces nothing
        if not changes and first.kernel.__module__.split(".")[-1] != "warp_specialized":
            assert first.tile.announces_end == dependent


def test_nothing_is_announced_where_nothing_is_summed(monkeypatch):
    from fusednorm.host import launch

    monkeypatch.setattr(gpus, "spec_of", lambda _: H200)
    for changes in ({"wants_dw": False, "wants_db": False}, {"cols": 250001}):
        problem = make_problem("layer", changes.pop("cols", 4096), **changes)
        for each in launch.on_tensors(meta_call(problem, 4096)).launches:
            assert not each.tile.announces_end and "launch_pdl" not in each.options


def test_both_sums_are_one_launch_of_a_cta_for_each_piece():
    from fusednorm.host import launch

    for cols, norm, sums in ((128, "layer", 2), (4096, "layer", 2), (4100, "rms", 1), (65536, "layer", 2)):
        launches = launch.on_tensors(meta_call(make_problem(norm, cols), 4096)).launches
        assert len(launches) == 2
        assert launches[1].grid == (sums * -(-cols // launches[1].tile.cols),)
