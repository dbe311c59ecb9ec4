"""Before the first GPU test, the kernels of all collected cases are compiled in parallel, because one process would
take minutes. Where xdist runs several processes, each compiles what it runs."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import wait

import pytest
import torch
from calls import wait_for_memory
from compiling import ALL_OUTPUTS, compile_case, worker_processes

from fusednorm.host import fallback, gpus

LARGE_TEST_GIB = 20  # a backward of 4099x65536 with its float64 reference
IN_COMPANY = "PYTEST_XDIST_WORKER" in os.environ  # of xdist's other processes
MOST_KEPT = (1 if IN_COMPANY else 32) << 30  # bytes that a process may keep for its next test

if IN_COMPANY:  # else each process would start as many compilers as there are processors
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_in_parallel(request):
    """Fills Triton's on-disk cache for all tests with a parameter `case` (and perhaps `mask`, `layout`, `variant`), by
    worker processes."""
    if IN_COMPANY or not torch.cuda.is_available():
        return
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    jobs = dict.fromkeys(
        (p["case"], p.get("mask", ALL_OUTPUTS), p.get("layout"), p.get("variant"))
        for p in parameters
        if hasattr(p.get("case"), "normalized_shape")  # else a case of another kind, which its own tests compile
    )
    device = gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
    with worker_processes() as pool:
        futures = [pool.submit(compile_case, case, device, *how) for case, *how in jobs]
        wait(futures)
    failures = [future.exception() for future in futures if future.exception()]
    if failures:  # the tests compile again, and fail if the kernel is at fault
        warnings.warn(f"{len(failures)} of {len(jobs)} cases did not compile ahead: {failures[0]!r}", stacklevel=1)


@pytest.fixture(autouse=True)
def memory_is_shared():
    """A test gives back what it used. Where xdist runs several processes, it waits for the memory that most need."""
    if IN_COMPANY and torch.cuda.is_available():
        wait_for_memory(LARGE_TEST_GIB)
    yield
    if torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def every_kernel_is_built():
    """Results would be right without a kernel: ATen's runs in place of one that cannot be built."""
    yield
    failures = fallback.failures()
    fallback.forget()
    assert not failures, "\n".join(map(str, failures))


@pytest.fixture
def sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@pytest.fixture
def builds_of_kernels(monkeypatch) -> list[str]:
    """The list of the kernels, by name, that Triton builds or takes from its on-disk cache during the test."""
    from triton import knobs

    names: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **build: names.append(build["fn"].name))
    return names
