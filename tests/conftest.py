"""Two tiers: the CPU tier (default) interprets the Triton kernels, the GPU tier (-m gpu) runs them natively.

Some folders of the CPU tier run in processes of their own, which do not interpret (apart.py)."""

from __future__ import annotations

import gc
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import apart
import pytest
import torch
from interpreting import enable_fast_interpreter

if find_spec("triton") is None:
    collect_ignore = [folder for folders in apart.FOLDERS for folder in folders]  # these tests compile kernels
# Assertions of modules that tests import say what they compared, as those of tests do.
HELPERS = {path.stem for pattern in ("*.py", "face/*.py") for path in Path(__file__).parent.glob(pattern)}
pytest.register_assert_rewrite(*HELPERS - sys.modules.keys())
CHOSEN = os.environ.get("TRITON_INTERPRET")
if not apart.serving:
    # The interpreter must be chosen before triton is imported, and a conftest.py below this one may do that. A process
    # that interprets cannot compile: other tests that compile start a process of their own, without this variable.
    os.environ["TRITON_INTERPRET"] = "1"


def is_for_gpus(config: pytest.Config) -> bool:
    return "gpu" in config.option.markexpr.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    if is_for_gpus(config):
        if CHOSEN is None:
            del os.environ["TRITON_INTERPRET"]
        return
    # Tensors are small: a second thread would mostly spin while it waits, and take processor time from others.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
    if not apart.serving:
        enable_fast_interpreter()
        config.pluginmanager.register(apart.Processes())


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported and collected stays. To look there for garbage, and often, took 3% of a test's time, and 6% of a
    simulation's. On GPUs garbage may hold much memory."""
    if not is_for_gpus(session.config):
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session")
def workers():
    """Processes that can compile. They start once for all tests, because that takes seconds."""
    from compiling import num_processes, worker_processes

    with worker_processes(num_processes()) as pool:
        yield pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("GPU tests run natively: select them with -m gpu, without TRITON_INTERPRET")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
