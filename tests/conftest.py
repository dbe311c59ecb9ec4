"""Two tiers: the CPU tier (default) interprets the Triton kernels, the GPU tier (-m gpu) runs them natively."""

from __future__ import annotations

import os

import pytest
import torch

from fusednorm.tools.interpreter import enable_interpreter

LONGEST = {"test_simulator", "test_native", "test_distributed"}
# host/test_native.py and kernels/test_simulator.py run these folders, in processes of their own.
collect_ignore = ["host/native", "kernels/simulated", "simulator"]


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter must be chosen before triton is imported. A process that interprets cannot compile: tests that
    # compile start a process of their own, without TRITON_INTERPRET.
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        enable_interpreter()
        # Tensors are small: a second thread would mostly spin while it waits, and take processor time from others.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few long tests come first: where tests run in parallel, the short ones fill the time beside them."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)  # a stable sort


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("GPU tests run natively: select them with -m gpu, without TRITON_INTERPRET")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
