"""The GPU tests use names that exist. No other test without a GPU would notice one that is gone."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
FILES = [*sorted((TESTS / "gpu").glob("*.py")), TESTS / "eager.py", TESTS / "cases.py", TESTS / "compiling.py"]
PATCHES = ("setattr", "object")  # monkeypatch.setattr(of, name, ...), mock.patch.object(of, name, ...)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the GPU tests import Triton")


def imported_names(tree: ast.AST) -> dict[str, Any]:
    """What `from fusednorm... import name` gives, wherever it is written."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusednorm"):
            for each in node.names:
                found[each.asname or each.name] = imported(node.module, each.name)
    return found


def imported(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def uses_of_modules(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[ModuleType, str]]:
    """(module, name in it): module.name, and the names that are patched."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in PATCHES and len(node.args) > 1:
            of, name = node.args[0], getattr(node.args[1], "value", None)
        else:
            continue
        module = names.get(getattr(of, "id", ""))
        if inspect.ismodule(module) and isinstance(name, str):
            yield module, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_that_gpu_tests_use_exist(file):
    tree = ast.parse(file.read_text())
    missing = [f"{module.__name__}.{name}" for module, name in uses_of_modules(tree, imported_names(tree))
               if not hasattr(module, name)]  # fmt: skip
    assert not missing
