"""Fixtures: a fake CUDA driver, and calls that the C++ host side already knows. tests/apart.py builds the host side and
runs these tests in a process of their own."""

from __future__ import annotations

import ctypes
import subprocess
from types import SimpleNamespace

import fake_gpu
import pytest
import torch
from cases import FP32, make_case
from devices import planned_for
from fake_gpu import CUDA_HEADER, DRIVER, STREAM, Gpu, launched, load, look
from norms import SHAPE, backward_of, forward_of, layer_norm

from fusednorm import autograd, reference
from fusednorm.host import launcher, native, prepared, torch_compat
from fusednorm.planner.device import H200
from fusednorm.tools.oracle import make_inputs


@pytest.fixture(scope="session", autouse=True)
def driver(tmp_path_factory):
    """Builds the fake driver, and registers the C++ ops for CPU tensors."""
    assert native.extension, f"these tests need the extension: {native.reason}"
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", f"-I{CUDA_HEADER}", folder / "driver.c", "-o", library]
    subprocess.run(command, check=True)
    native.extension.use_driver(str(library))
    derivatives = reference.statistics_gradients, autograd.differentiable_backward
    native.install("CPU", autograd.above_autograd, SimpleNamespace(launched=launched), *derivatives)
    return ctypes.CDLL(str(library))


@pytest.fixture(autouse=True)
def gpu(driver, monkeypatch):
    fake_gpu.GPU = simulated = Gpu(driver)

    monkeypatch.setattr(launcher, "load", load)
    monkeypatch.setattr(launcher, "hand_over", lambda launches: None)  # what Triton would launch, for a profiler
    monkeypatch.setattr(torch_compat, "current_device", lambda: -1)
    monkeypatch.setattr(torch_compat, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(torch_compat, "allocate", lambda *memory: torch.empty_strided(*memory[:2], dtype=memory[2]))
    monkeypatch.setattr(prepared, "run", look)
    prepared.forget()
    native.forget()
    with planned_for(H200):
        yield simulated
    assert simulated.failure is None, simulated.failure


@pytest.fixture
def known_calls(gpu):
    """(case, inputs) of a forward and a backward that the C++ host side repeats from now on."""
    case = make_case("layer", (4, 5, 40), (FP32, FP32, FP32))
    inputs = make_inputs(case)
    for op, arguments in (forward_of(case, inputs), backward_of(case, inputs)):
        op(*arguments)
        with gpu.repeating():
            op(*arguments)
    gpu.remembers = False
    return case, inputs


@pytest.fixture
def known_norm(gpu):
    """The inputs, of SHAPE, of a LayerNorm that the C++ host side repeats from now on."""
    inputs = make_inputs(make_case("layer", SHAPE, (FP32,) * 3))
    layer_norm(inputs)
    with gpu.repeating():
        layer_norm(inputs)
    return inputs
