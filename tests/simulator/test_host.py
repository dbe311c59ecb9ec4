"""Inside simulated(), calls on CPU tensors take the same path through the host side as on the device."""

from __future__ import annotations

import afresh
import pytest
import torch

import fusednorm
from fusednorm.host import gpus
from fusednorm.planner.device import B200
from simulator import simulated


def parameters(cols: int) -> tuple[torch.Tensor, torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    ours, stock = fusednorm.LayerNorm(cols), torch.nn.LayerNorm(cols)
    with torch.no_grad():
        ours.weight.normal_(1, 0.5)
        ours.bias.normal_()
    stock.load_state_dict(ours.state_dict())
    return torch.randn(6, cols), ours, stock


def test_a_module_and_its_gradients_are_the_kernels():
    x, ours, stock = parameters(136)
    grads = []
    for module in (ours, stock):
        leaf = x.clone().requires_grad_()
        if module is ours:
            with simulated("H200", sms=2) as simulation:
                module(leaf).square().sum().backward()
        else:
            module(leaf).square().sum().backward()
        grads.append((leaf.grad, module.weight.grad, module.bias.grad))
    assert [each.name for each in simulation.launched] == ["forward", "backward", "finalize"]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_planner_sees_the_device_that_is_named():
    with simulated("B200", sms=3) as simulation:
        assert gpus.spec_of(torch.device("cpu")).sm_count == 3
    assert (simulation.spec.arch, simulation.spec.name) == (100, "B200")
    with simulated(B200) as simulation:
        assert simulation.spec is B200


def test_nothing_stays_simulated():
    x, ours, stock = parameters(64)
    with simulated("H200", sms=2) as simulation:
        ours(x)
    count = len(simulation.launched)
    torch.testing.assert_close(ours(x), stock(x), rtol=0, atol=0)
    assert len(simulation.launched) == count == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_empty_batch_launches_nothing():
    with simulated("H200", sms=2) as simulation:
        assert fusednorm.LayerNorm(64)(torch.randn(0, 64)).shape == (0, 64)
    assert simulation.launched == []


def test_column_sums_of_no_float_that_kernels_take_are_an_error_as_everywhere():
    with simulated("H200", sms=2), pytest.raises(RuntimeError, match="column_sum"):
        fusednorm.column_sum([torch.ones(3, 8, dtype=torch.int32)])


def test_the_command_draws_a_picture_and_writes_a_trace(tmp_path):
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "out.png", tmp_path / "out.txt"
    options = "--variant warp_specialized --rows 3 --cols 200 --dx-only --picture".split()
    done = afresh.run_module("tests.simulator", *options, picture, "--trace", trace)
    assert done.returncode == 0 and "as the oracle's" in done.stdout, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = trace.read_text().splitlines()
    for said in ("sum_chunk", "starts a TMA copy", "has waited since", "of mbarrier"):
        assert any(said in line for line in lines), said
