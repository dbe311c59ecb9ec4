"""fusednorm.sm_margin leaves SMs to other kernels: how long it holds, in all threads, and how plans respect it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning import make_problem, meta_call, num_ctas

from fusednorm import explain, sm_margin
from fusednorm.host import gpus
from fusednorm.planner import candidates
from fusednorm.planner.choice import choose
from fusednorm.planner.device import A100, B200, H200, KNOWN
from fusednorm.settings import margin

META = torch.device("meta")  # the planner plans for meta tensors as on an H200


@pytest.fixture(autouse=True)
def no_margin_is_left_behind():
    yield
    assert margin.sms == 0
    sm_margin._entries.clear()


def sms() -> int:
    return gpus.spec_of(META).sm_count


def test_a_block_holds_until_it_ends_and_the_innermost_wins():
    with sm_margin(16):
        assert sms() == 116
        with sm_margin(0):
            assert sms() == 132
        with sm_margin(32):
            assert sms() == 100
        assert sms() == 116
    assert sms() == 132


def test_a_call_holds_until_the_next():
    sm_margin(16)
    assert sms() == 116
    sm_margin(8)
    assert sms() == 124
    with sm_margin(1):
        sm_margin(2)
        assert sms() == 130
    assert sms() == 124
    sm_margin(0)
    assert sms() == 132


def test_a_block_ends_when_an_exception_leaves_it():
    with pytest.raises(KeyError):
        with sm_margin(16):
            raise KeyError
    assert sms() == 132


def test_one_object_serves_several_blocks():
    sixteen = sm_margin(16)
    for _ in range(2):
        with sixteen, sixteen:
            assert sms() == 116
        assert sms() == 132


def test_other_threads_see_it():
    seen = []
    with sm_margin(16):
        thread = threading.Thread(target=lambda: seen.append(sms()))
        thread.start()
        thread.join()
    assert seen == [116]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_blocks_that_threads_leave_in_any_order_leave_nothing_behind(steps):
    open_blocks = []
    for enter, at in steps:
        if enter or not open_blocks:
            block = sm_margin(at)
            block.__enter__()
            open_blocks.append((block, at))
        else:
            open_blocks.pop(at % len(open_blocks))[0].__exit__()
        assert margin.sms == (open_blocks[-1][1] if open_blocks else 0)
    for block, _ in open_blocks:
        block.__exit__()
    assert margin.sms == 0 and not sm_margin._entries


@pytest.mark.parametrize(
    "n, error, message",
    [
        (-1, ValueError, "sm_margin: n must be 0 or more and at most 2147483647, got -1"),
        (2**31, ValueError, "sm_margin: n must be 0 or more and at most 2147483647, got 2147483648"),
        (1.5, TypeError, "sm_margin: n must be an int, got float"),
        (True, TypeError, "sm_margin: n must be an int, got bool"),
        (None, TypeError, "sm_margin: n must be an int, got NoneType"),
    ],
)
def test_what_is_no_count_is_refused_in_one_sentence(n, error, message):
    with pytest.raises(error) as raised:
        sm_margin(n)
    assert str(raised.value) == message
    assert margin.sms == 0 and not sm_margin._entries


@pytest.mark.parametrize("n", [132, 1000])
def test_a_margin_that_leaves_no_sm_is_refused_where_a_norm_is_planned(n):
    x = torch.empty(64, 4096, device="meta")
    with sm_margin(n), pytest.raises(ValueError) as raised:
        explain(x, (4096,), device=H200)
    assert str(raised.value) == f"sm_margin: n must leave at least one of the 132 SMs of H200, got {n}"


def test_it_is_refused_at_once_where_cuda_is_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    with pytest.raises(ValueError) as raised:
        sm_margin(132)
    assert str(raised.value) == "sm_margin: n must leave at least one of the 132 SMs of NVIDIA H200, got 132"
    with sm_margin(131):
        pass


@pytest.mark.parametrize("device", KNOWN, ids=lambda spec: spec.name)
@pytest.mark.parametrize("cols", [128, 1000, 4096, 12288, 65536, 262144])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_no_grid_that_walks_over_rows_is_larger_than_what_is_left(device, cols, norm):
    for left in (16, device.sm_count - 1):
        problem, spec = make_problem(norm, cols), device.leaving(left)
        plan = choose(problem, 1 << 20, spec)
        ctas = num_ctas(plan, 1 << 20, cols, spec)
        clusters = max(1, (device.sm_count - left) // plan.cluster)  # a plan keeps at least one cluster
        assert ctas <= plan.ctas_per_sm * clusters


@pytest.mark.parametrize("left, largest", [(0, 16), (1, 8), (8, 8), (9, 4), (32, 4), (33, 2), (131, 2)])
def test_clusters_find_a_place_in_the_groups_of_sms_that_are_left(left, largest):
    problem = make_problem("layer", 196608)
    assert candidates.cluster_sizes(make_problem(cols=65536), H200.leaving(left))[-1] == largest
    assert choose(problem, 2048, H200.leaving(left)).cluster <= largest
    assert choose(problem, 2048, H200).cluster == 16


def test_leaving_counts_from_the_whole_device():
    assert H200.leaving(16).leaving(8) == H200.leaving(8)
    assert H200.leaving(16).leaving(0) == H200
    assert A100.leaving(8).sm_count == 100 and B200.leaving(16).sm_count == 132


def test_explain_says_what_is_left_to_others():
    x = torch.empty(16384, 4096, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(4096, device="meta", dtype=torch.bfloat16)
    with sm_margin(16):
        found = explain(x, (4096,), weight, device=H200)
    assert "on each of 116 SMs; sm_margin leaves 16 to others" in str(found)
    assert found.as_dict()["sm_margin"] == 16
    assert "sm_margin" not in str(explain(x, (4096,), weight, device=H200))


def test_launches_are_planned_for_what_is_left():
    from fusednorm.host import launch

    call = meta_call(make_problem("layer", 4096), 16384)
    whole = launch.on_tensors(call).launches[0].grid[0]
    with sm_margin(16):
        left = launch.on_tensors(call).launches[0].grid[0]
    assert whole % 132 == 0 and left == whole // 132 * 116
