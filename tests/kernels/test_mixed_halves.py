"""Compiled kernels that read bfloat16 numbers and store float16 ones compute in float32 between."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cases import FP16
from compiling import DEVICES
from planning import make_problem, make_sum, meta_call

from fusednorm.forms import FormSpec
from fusednorm.planner.norm_problem import NormProblem

ROUNDED = FormSpec(rounds_x_hat=True)
MIXED = {
    "sums": replace(make_sum("rms", 2048), rows_out=(FP16,)),
    "long sums that stay wide": replace(make_sum("layer", 262144, rounds_sum=False), rows_out=(FP16,)),
    "long sums": replace(make_sum("layer", 262144), rows_out=(FP16,)),
    "rounded x_hat": make_problem("rms", 2048, "fp16", "bf16", direction="forward", form=ROUNDED),
    "rounded x_hat plus a residual": make_sum("rms", 2048, "fp16", "bf16", finish="add", rounds_x_hat=True),
}


def halves(problem: NormProblem, variant: str) -> list[str]:
    """The operations in float16 of the kernel."""
    from fusednorm import force
    from fusednorm.host import fallback, launch
    from fusednorm.tools import compilation

    call, device = meta_call(problem), DEVICES[90]
    with force(variant):
        program = launch.program_of(call, fallback.choose(call.problem, call.rows, device), device)
    code = compilation.compile_for(program.launches[0], device.arch).asm["ptx"]
    return re.findall(r"\b(?:add|sub|mul|fma)\.[\w.]*f16\w*", code)


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined"])
@pytest.mark.parametrize("problem", MIXED.values(), ids=MIXED)
def test_bfloat16_numbers_are_not_computed_with_in_float16(workers, problem, variant):
    assert workers.submit(halves, problem, variant).result() == []
