"""The fuzzer's calls run in C++ by programs that are kept, forced variants among them."""

from __future__ import annotations

import pytest
import torch

from fusednorm.host import native
from tests.fuzz.check import CPP, KEPT, Differences, run, run_in_cpp
from tests.fuzz.draw import Call


@pytest.mark.parametrize("variant", [None, "multi_wave", "pipelined"])
def test_a_call_is_counted_for_cpp_and_the_next_one_finds_its_program(gpu, variant):
    call = Call(
        op="layer_norm_fwd", shape=(6, 64), normalized_ndim=1,
        dtypes={"x": torch.float32, "weight": torch.float32, "bias": None},
        values={"x": "normal", "weight": "parameter"}, layouts={"x": "contiguous", "weight": "contiguous"},
        given={"eps": 1e-5}, variant=variant, margin=0, mode="plain", seed=0,
    )  # fmt: skip
    arguments, found = call.arguments("cpu"), []
    for _ in range(2):
        differences = Differences()
        found.append(run_in_cpp(call, arguments, run(call, arguments), differences))
        differences.check()
    assert found == [[CPP], [CPP, KEPT]]
    kernel = {None: None, "multi_wave": "multiwave", "pipelined": "pipelined"}[variant]
    assert kernel is None or kernel in gpu.launched[-1].build.compiled.src.fn.__module__
    before = native.repeats()
    run(call, arguments)
    assert native.repeats() == before
