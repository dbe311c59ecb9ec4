"""Device specs: the constants of known GPUs, and the properties that torch reads from the driver."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planning import make_problem, num_ctas

from fusednorm.host.gpus import from_properties, named
from fusednorm.planner.choice import choose
from fusednorm.planner.device import A100, B200, H200, KNOWN, RTX_5090

MANY_ROWS = 16384


def test_constants_are_told_apart_by_whatever_spelling():
    assert named("rtx_5090") is named("RTX5090") is RTX_5090
    with pytest.raises(ValueError, match="^device must be one of A100, .*, got 'V100'$"):
        named("V100")


@pytest.mark.parametrize(
    "name, spec",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
    ],
)
def test_constants_are_found_by_the_names_that_torch_gives(name, spec):
    if spec:
        assert named(name).name == spec
    else:
        with pytest.raises(ValueError, match="^device must be one of A100"):
            named(name)


def properties_of(spec, name, sm_count):
    return SimpleNamespace(
        name=name,
        major=spec.arch // 10,
        minor=spec.arch % 10,
        multi_processor_count=sm_count,
        shared_memory_per_block_optin=spec.smem_per_block_bytes,
        shared_memory_per_multiprocessor=spec.smem_per_sm_bytes,
        regs_per_multiprocessor=spec.registers_per_sm,
        max_threads_per_multi_processor=spec.max_threads_per_sm,
    )


@pytest.mark.parametrize("spec", KNOWN, ids=lambda spec: spec.name)
def test_a_whole_gpu_is_the_constant_of_its_name(spec):
    found = from_properties(properties_of(spec, f"NVIDIA {spec.name} 80GB", spec.sm_count))
    assert found == replace(spec, name=f"NVIDIA {spec.name} 80GB")


@pytest.mark.parametrize("spec", KNOWN, ids=lambda spec: spec.name)
def test_bytes_in_flight_are_bandwidth_times_latency_where_more_than_was_measured_is_needed(spec):
    of_a_microsecond = 0.917 * spec.bandwidth_gb_s * 1e3 / spec.sm_count  # an H200's share of its bandwidth
    assert spec.bytes_in_flight_per_sm == pytest.approx(max(32 * 1024, of_a_microsecond), rel=0.03)


def test_a_partition_of_a_gpu_has_its_share():
    part = from_properties(properties_of(H200, "NVIDIA H200 MIG 2g.35gb", 33))
    assert part.sm_count == 33 and part.bandwidth_gb_s == H200.bandwidth_gb_s / 4
    assert from_properties(properties_of(B200, "B200", 37)).bytes_in_flight_per_sm == 49 * 1024
    plan = choose(make_problem(), MANY_ROWS, part)
    assert num_ctas(plan, MANY_ROWS, 4096, part) <= plan.ctas_per_sm * 33


def test_a_partition_has_its_own_thresholds():
    part = from_properties(properties_of(B200, "NVIDIA B200 MIG 2g.45gb", 37))
    assert choose(make_problem(), 16 * 37, part).variant == "multi_wave"
    assert choose(make_problem(), 16 * 37 + 1, part).variant == "warp_specialized"


def test_an_unknown_gpu_is_planned_for_by_its_resources():
    unknown = from_properties(properties_of(replace(A100, arch=87), "Orin", 16))
    assert choose(make_problem(), MANY_ROWS, unknown).variant == "multi_wave"
