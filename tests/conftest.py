"""Two tiers: the CPU tier (default) interprets the Triton kernels, the GPU tier (-m gpu) runs them natively.

Some folders of the CPU tier run in processes of their own, which do not interpret (apart.py)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import apart
import pytest
import torch

from fusednorm.tools.interpreter import enable_interpreter

if find_spec("triton") is None:
    collect_ignore = [folder for folders in apart.FOLDERS for folder in folders]  # these tests compile kernels
CHOSEN = os.environ.get("TRITON_INTERPRET")
if not apart.serving:
    # The interpreter must be chosen before triton is imported, and a conftest.py below this one may do that. A process
    # that interprets cannot compile: other tests that compile start a process of their own, without this variable.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" in config.option.markexpr.replace("not gpu", ""):
        if CHOSEN is None:
            del os.environ["TRITON_INTERPRET"]
        return
    # Tensors are small: a second thread would mostly spin while it waits, and take processor time from others.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
    if not apart.serving:
        enable_interpreter()
        config.pluginmanager.register(apart.Processes())


@pytest.fixture(scope="session")
def workers():
    """Processes that can compile. They start once for all tests, because that takes seconds."""
    from compiling import worker_processes

    of_others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    with worker_processes(max(1, os.cpu_count() // of_others)) as pool:
        yield pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("GPU tests run natively: select them with -m gpu, without TRITON_INTERPRET")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
