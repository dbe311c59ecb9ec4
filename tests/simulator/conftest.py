"""These tests compile kernels, and a process that interprets kernels cannot: tests/kernels/test_simulator.py runs the
tests in two processes of their own."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", help="n/m: every m-th test, from the n-th on")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tensors are small, and the other processor runs the other part


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--part").split("/"))
    items[:] = items[first::step]
