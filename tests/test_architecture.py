"""Who may import whom. Walks the source, so an import inside a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE, KERNELS = ROOT / "fusednorm", ROOT / "kernels"

PLANNER = {
    "heuristics", "few_rows", "candidates", "preference", "tile_share", "forcing", "legality", "budget",
    "plan", "problem", "device", "margin",
}  # fmt: skip
MAY_IMPORT = {
    "__init__": {
        "functional",
        "autograd",
        "modules",
        "explanation",
        "forcing",
        "margin",
        "warm",
        "column_ops",
        "column_explanation",
    },
    "modules": {"functional"},
    "functional": {"autograd", "kernel_devices", "problem", "torch_compat"},
    "autograd": {
        "formulas", "forcing", "kernel_devices", "native", "ops", "problem", "recipe", "reference",
        "sharding", "torch_compat",
    },  # fmt: skip
    "sharding": set(),
    "formulas": {"problem", "reference"},
    "kernel_devices": set(),
    "ops": {"kernel_devices", "launch", "native", "problem", "recipe", "reference"},
    "native": {"_native", "forcing", "margin", "recipe"},
    "_native": set(),  # csrc/native.cpp, where it was built
    "recipe": {"forcing", "launch", "launcher", "likeness", "margin", "problem", "straight_line"},
    "straight_line": {"launcher", "margin", "problem", "torch_compat"},
    "likeness": {"torch_compat"},
    "torch_compat": set(),
    "triton_compat": set(),
    "reference": {"problem"},
    "launch": PLANNER | {"fallback", "kernels", "launcher", "reference", "triton_compat"},
    "launcher": {"fallback", "kernels", "problem", "torch_compat", "triton_compat"},
    "fallback": PLANNER,
    "heuristics": PLANNER - {"heuristics"},
    "few_rows": {"candidates", "preference", "tile_share", "legality", "budget", "plan", "problem", "device"},
    "candidates": {"preference", "tile_share", "budget", "plan", "problem", "device"},
    "preference": {"tile_share", "budget", "plan", "problem", "device"},
    "tile_share": {"budget", "plan", "problem"},
    "forcing": {"plan"},
    "legality": {"plan", "problem", "device"},
    "budget": {"plan", "problem", "device"},
    "plan": {"problem", "device"},
    "problem": set(),
    "device": {"margin", "triton_compat"},
    "margin": set(),
    # column_sum, in layers of its own:
    "column_ops": {
        "launch_columns", "column_plan", "column_problem", "column_reference", "kernel_devices", "ops", "sharding",
        "torch_compat",
    },  # fmt: skip
    "launch_columns": {
        "fallback", "kernels", "launcher", "column_plan", "column_problem", "column_reference", "problem", "device",
    },  # fmt: skip
    "column_explanation": {"column_plan", "column_problem", "device", "fallback", "kernel_devices"},
    "column_reference": {"column_problem"},
    "column_plan": {"budget", "legality", "column_problem", "device"},
    "column_problem": {"problem"},
    # Beside the path of a call:
    "integrations": {"__init__", "fallback", "ops", "autograd", "functional", "modules", "forcing", "recipe", *PLANNER},
    "compilation": PLANNER | {"launch"},
    "warm": PLANNER | {"launch", "launcher", "compilation", "fallback"},
    "cost": {"plan", "problem", "device"},
    "explanation": PLANNER | {"cost", "fallback", "kernel_devices"},
    "plan_cli": PLANNER | {"explanation", "console"},
    "testing": set(),
    "console": set(),
    "interpreter": set(),
    "demo": {"__init__", "console", "interpreter", "launch", "modules", "problem", "testing"},
    "doctor": {"__init__", "fallback", "native", "testing", "torch_compat", "triton_compat"},
    "__main__": {"demo", "doctor", "plan_cli"},
}
# At their top; interpreter, doctor and triton_compat do when asked.
IMPORT_TRITON = {"launch", "launch_columns", "launcher", "compilation"}


def modules_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(path: Path, nodes) -> Iterator[str]:
    """Dotted names that `nodes` of the module at `path` import; its own package's are relative to fusednorm."""
    depth = len(path.relative_to(ROOT).parts) - 1
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(ROOT).parts[: depth - node.level + 1]) if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def everywhere(path: Path) -> Iterator[str]:
    return imports(path, ast.walk(ast.parse(path.read_text())))


def own_name(path: Path) -> str:
    """The layer of a file: integrations/ is one, every other file of the package is its own."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layers_imported(path: Path) -> set[str]:
    known = set(MAY_IMPORT) | {"kernels"}
    ours = [name.split(".") for name in everywhere(path) if name.split(".")[0] == "fusednorm"]
    layers = {name[1] for name in ours if len(name) > 1 and name[1] in known}
    # `from . import __version__` and the like: a name that is no module comes from the package itself.
    package = {"__init__"} if any(len(name) > 1 and name[1] not in known for name in ours) else set()
    return (layers | package) - {own_name(path)}


@pytest.mark.parametrize("path", modules_of(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_the_layers_below_it(path):
    layer = own_name(path)
    assert layer in MAY_IMPORT, f"say in MAY_IMPORT what {layer} may import"
    assert layers_imported(path) <= MAY_IMPORT[layer]


def test_layers_have_no_cycle():
    done: set[str] = {"kernels"}
    while ready := {layer for layer, below in MAY_IMPORT.items() if layer not in done and below <= done}:
        done |= ready
    # The commands and integrations use the package as its users do, through __init__.
    assert set(MAY_IMPORT) <= done


@pytest.mark.parametrize("path", modules_of(KERNELS), ids=lambda path: path.name)
def test_kernels_import_triton_and_each_other_only(path):
    assert {name.split(".")[0] for name in everywhere(path)} <= {"triton", "kernels"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", modules_of(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_triton_and_inductor_are_imported_only_where_they_belong(path):
    layer, top = own_name(path), set(imports(path, ast.parse(path.read_text()).body))
    if layer not in IMPORT_TRITON:
        assert not {name for name in top if name.split(".")[0] == "triton"}
    if layer != "integrations":
        tree = ast.walk(ast.parse(path.read_text()))
        attributes = {node.attr for node in tree if isinstance(node, ast.Attribute)}
        inductor = {name for name in everywhere(path) if name.startswith(("torch._inductor", "torch._dynamo"))}
        assert not inductor and not attributes & {"_inductor", "_dynamo"}


def test_import_brings_no_triton_and_no_dtensor_and_starts_no_cuda():
    code = """
import sys, torch, fusednorm
print("triton" in sys.modules, "torch.distributed.tensor" in sys.modules, torch.cuda.is_initialized())
"""
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert asked.stdout.split() == ["False", "False", "False"]


def test_package_works_without_its_integrations():
    code = """
import sys
sys.modules["fusednorm.integrations"] = None  # importing it fails
import torch, fusednorm
print(fusednorm.LayerNorm(8)(torch.randn(2, 8)).shape, "enable_eager" in dir(fusednorm))
try:
    fusednorm.enable_eager
except ImportError:
    print("missing")
"""
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert asked.stdout.splitlines() == ["torch.Size([2, 8]) True", "missing"]


def test_imports_are_seen_at_every_depth(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "fusednorm" / "integrations" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .. import ops\nfrom . import y\ndef f():\n    from ..kernels.a import b\nimport fusednorm.c")
    assert {"fusednorm.ops", "fusednorm.integrations.y", "fusednorm.kernels.a", "fusednorm.c"} <= set(everywhere(path))
