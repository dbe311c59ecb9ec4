"""Which parts of the package may import which. The tests walk the source, so imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import afresh
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, KERNELS = ROOT / "fusednorm", ROOT / "kernels"

# A room is a folder of the package, or a file at its root. The order is from the public names down:
MAY_IMPORT = {
    "__init__": {
        *("autograd", "columns", "functional", "heads", "layers", "modules", "nodes", "settings", "tools"),
    },
    "modules": {"forms", "functional", "host"},
    "layers": {"functional", "host"},
    "nodes": {"autograd", "forms", "functional", "host", "operands", "problem"},
    "functional": {"autograd", "dtypes", "forms", "host", "operands"},
    "autograd": {
        *("dtypes", "host", "namespace", "operands", "ops", "problem", "reference", "settings"),
        "sharding",
    },
    "columns": {
        *("dtypes", "host", "kernels", "namespace", "operands", "ops", "planner", "problem", "settings", "sharding"),
    },
    "heads": {
        *("autograd", "dtypes", "forms", "functional", "host", "kernels", "operands", "planner", "problem"),
        *("reference", "settings", "sharding"),
    },
    "dtypes": set(),
    "forms": set(),
    "operands": {"forms"},
    "sharding": {"namespace", "operands"},
    "namespace": set(),
    "ops": {"host", "namespace", "operands", "problem", "reference"},
    "host": {"dtypes", "kernels", "namespace", "operands", "planner", "problem", "settings"},
    "reference": {"dtypes", "forms", "operands", "problem"},
    "problem": {"dtypes", "forms", "operands", "planner", "settings"},
    "settings": {"planner"},
    "planner": {"dtypes", "forms"},
    # Rooms beside the path from a public function to a kernel:
    "integrations": {
        *("__init__", "autograd", "dtypes", "forms", "functional", "heads", "host", "modules", "namespace", "operands"),
        *("ops", "planner", "problem", "reference"),
    },
    "tools": {
        *("__init__", "dtypes", "forms", "functional", "heads", "host", "namespace", "operands", "ops", "planner"),
        *("problem", "settings"),
    },
    "__main__": {"__init__", "tools"},
}
AT_THE_ROOT = 15  # files at most: a listing of the package's folder fits on one screen
# Modules that import Triton at their top. The others import it inside a function, or never.
IMPORT_TRITON = {"columns.launch", "heads.launch", "tools.compilation", "host.launcher", "host.schedules"}
IMPORT_TRITON |= {"host.segments", "host.sums"}


def modules_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(path: Path, nodes) -> Iterator[str]:
    """Absolute dotted names that `nodes` of the module at `path` import. Relative imports are resolved."""
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
    """Names that the module at `path` imports anywhere, except in `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    return imports(path, ast.walk(tree))


def name_of(path: Path) -> str:
    """The dotted name of a module within the package, such as host.launch."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def modules_imported(path: Path) -> set[str]:
    """Modules of the package, such as host.launch, that the module at `path` imports. A name that fusednorm itself
    defines, as in `from . import __version__`, counts as an import of __init__."""
    known = {name_of(each) for each in modules_of(PACKAGE)}
    found = set()
    for name in everywhere(path):
        parts = name.split(".")
        if parts[0] != "fusednorm" or len(parts) == 1:
            continue
        if parts[1] == "kernels":
            found.add("kernels")
            continue
        names = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
        module = next((each for each in names if each in known), None)
        if module:
            found.add(module)
        elif not (PACKAGE / parts[1]).is_dir():
            found.add("__init__")
    return found - {name_of(path)}


def room_of(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("path", modules_of(PACKAGE), ids=name_of)
def test_module_imports_only_from_the_rooms_below_its_own(path):
    room = room_of(name_of(path))
    assert room in MAY_IMPORT, f"say in MAY_IMPORT what {room} may import"
    assert {room_of(name) for name in modules_imported(path)} - {room} <= MAY_IMPORT[room]


def test_every_arrow_that_is_allowed_is_there():
    pairs = {(name_of(path), name) for path in modules_of(PACKAGE) for name in modules_imported(path)}
    found = {(room_of(one), room_of(other)) for one, other in pairs}
    assert {(room, other) for room, below in MAY_IMPORT.items() for other in below} <= found


def test_arrows_between_rooms_go_one_way():
    done: set[str] = {"kernels"}
    while ready := {room for room, below in MAY_IMPORT.items() if room not in done and below <= done}:
        done |= ready
    # The commands and integrations use the package as its users do, through __init__.
    assert set(MAY_IMPORT) - {"__init__", "__main__", "integrations", "tools"} <= done


@pytest.mark.parametrize("room", ["columns", "heads", "host", "nodes", "planner", "problem", "settings", "tools"])
def test_arrows_within_a_room_go_one_way(room):
    below = {name_of(path): modules_imported(path) for path in modules_of(PACKAGE / room)}
    done: set[str] = set()
    while ready := {name for name, wanted in below.items() if name not in done and wanted & set(below) <= done}:
        done |= ready
    assert done == set(below)


def test_what_a_newcomer_sees_first_is_one_screen():
    assert len(list(PACKAGE.glob("*.py"))) <= AT_THE_ROOT


def test_planner_asks_no_gpu_no_clock_no_environment_and_no_thread():
    for path in modules_of(PACKAGE / "planner"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assert not {"contextvars", "os", "threading", "time"} & {name.split(".")[0] for name in imports(path, nodes)}
        assert "cuda" not in {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("path", modules_of(KERNELS), ids=lambda path: path.name)
def test_kernels_import_triton_and_each_other_only(path):
    assert {name.split(".")[0] for name in everywhere(path)} <= {"triton", "kernels"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", modules_of(KERNELS), ids=lambda path: path.name)
def test_types_that_kernels_fix_for_their_arguments_reach_triton(path):
    """Postponed evaluation would turn the type "i64" into a string in a string, which Triton ignores."""
    tree = ast.parse(path.read_text())
    types = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg)]
    fixed = [each.value for each in types if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    assert not fixed or "__future__.annotations" not in imports(path, ast.walk(tree))


@pytest.mark.parametrize("path", modules_of(PACKAGE), ids=name_of)
def test_triton_and_inductor_are_imported_only_where_they_belong(path):
    name, top = name_of(path), set(imports(path, ast.parse(path.read_text()).body))
    if name not in IMPORT_TRITON:
        assert not {each for each in top if each.split(".")[0] == "triton"}
    if room_of(name) != "integrations":
        tree = ast.walk(ast.parse(path.read_text()))
        attributes = {node.attr for node in tree if isinstance(node, ast.Attribute)}
        inductor = {each for each in everywhere(path) if each.startswith(("torch._inductor", "torch._dynamo"))}
        assert not inductor and not attributes & {"_inductor", "_dynamo"}


def test_import_brings_no_triton_and_no_dtensor_and_starts_no_cuda():
    code = """
import sys, torch, fusednorm
print("triton" in sys.modules, "torch.distributed.tensor" in sys.modules, torch.cuda.is_initialized())
print("fusednorm.integrations" in sys.modules, fusednorm.integrations.inductor.report().__class__.__name__)
"""
    asked = afresh.run(code)
    assert asked.stdout.split() == ["False", "False", "False", "False", "Report"], asked.stderr


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
    asked = afresh.run(code)
    assert asked.stdout.splitlines() == ["torch.Size([2, 8]) True", "missing"], asked.stderr


def test_imports_are_seen_at_every_depth(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "fusednorm" / "integrations" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .. import ops\nfrom . import y\ndef f():\n    from ..kernels.a import b\nimport fusednorm.c")
    assert {"fusednorm.ops", "fusednorm.integrations.y", "fusednorm.kernels.a", "fusednorm.c"} <= set(everywhere(path))


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them as modules without a package."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
