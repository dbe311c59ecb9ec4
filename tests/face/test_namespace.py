"""A copy of the package under another name works beside it, with its own ops, autograd and compilation."""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fusednorm
from fusednorm.__main__ import main
from fusednorm.tools import hub, warm

NAME = "_a_copy_of_fusednorm"


def load(name: str, folder: Path):
    """Imports a package from a folder, as Hugging Face's `kernels` imports a build."""
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    assert main(["hub", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def copy(repository):
    return load(NAME, repository / "build" / "torch-cuda")


def test_ops_of_the_copy_are_its_own(copy):
    theirs, ours = getattr(torch.ops, NAME), torch.ops.fusednorm
    assert copy.namespace.NAMESPACE == NAME and fusednorm.namespace.NAMESPACE == "fusednorm"
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    for op in fusednorm.ops.OPS:
        assert getattr(theirs, op).default is not getattr(ours, op).default
    assert torch.equal(theirs.rms_norm_fwd(x, [8], weight)[0], ours.rms_norm_fwd(x, [8], weight)[0])
    assert theirs.column_sum([x])[0].requires_grad


def test_copy_imports_nothing_of_the_package_by_its_name(repository):
    build = repository / "build" / "torch-cuda"
    absolute = "from fusednorm", "import fusednorm", "torch.ops.fusednorm("
    lines = [(path.name, line) for path in build.rglob("*.py") for line in path.read_text().splitlines()]
    assert not [each for each in lines if each[1].lstrip().startswith(absolute)]


def test_the_command_says_what_it_wrote_and_the_folder_explains_itself(tmp_path, capsys):
    assert main(["hub", str(tmp_path)]) == 0
    said, page = capsys.readouterr().out, (tmp_path / "README.md").read_text()
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert said.startswith(f"Wrote {len(files)} files to {tmp_path}; its README.md says")
    assert said.splitlines()[-1] in page
    assert not [each.name for each in tmp_path.iterdir() if each.name != "README.md" and f"`{each.name}" not in page]


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text("Mine.")
    for folder in (tmp_path, page):
        assert main(["hub", str(folder)]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert [*tmp_path.iterdir()] == [page] and page.read_text() == "Mine."


def test_repository_holds_the_package_twice_and_what_it_says_of_itself(repository, tmp_path):
    build, source = repository / "build" / "torch-cuda", repository / "torch-ext" / "fusednorm"
    metadata = json.loads((build / "metadata.json").read_text())
    held = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert held == metadata["digest"]["files"].keys()
    data = {f"planner/data/{each.name}" for each in (hub.PACKAGE / "planner" / "data").iterdir()}
    assert {"__init__.py", "layers.py", "kernels/rowmath.py", "host/launch.py", *data} <= held
    assert metadata["id"].startswith("_fusednorm_cuda_") and metadata["id"].isidentifier()
    again = hub._metadata(build)
    assert again == metadata, "the same files have the same id"
    another = shutil.copytree(build, tmp_path / "another")
    (another / "margin.py").write_text("# another\n")
    assert hub._metadata(another)["id"] != metadata["id"]


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm", "RMSNormZeroCentered"])
def test_layers_are_stateless_and_compute_their_norm(norm):
    layer = getattr(fusednorm.layers, norm)
    added = {name for name in dir(layer) if not hasattr(torch.nn.Module, name)}
    assert added == {"can_torch_compile", "has_backward"} and layer.__init__ is torch.nn.Module.__init__
    module = torch.nn.LayerNorm(8, eps=1e-3) if norm == "LayerNorm" else torch.nn.RMSNorm(8, eps=1e-3)
    torch.nn.init.normal_(module.weight)
    module.variance_epsilon = module.eps
    x = torch.randn(3, 8)
    expected = module(x)
    if norm == "RMSNormZeroCentered":
        module.weight.data -= 1
    torch.testing.assert_close(layer.forward(module, x), expected)
    mixed = layer.forward(module, x.bfloat16())
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), expected, atol=0.05, rtol=0.02)


def test_worker_of_warmup_imports_the_package_from_its_file_and_under_its_name(repository, copy, monkeypatch):
    """A build from the Hub is on no import path. A worker that imports by name would find another package, or none."""
    assert copy.tools.warm.PACKAGE == NAME and warm.PACKAGE == "fusednorm"
    file = str(repository / "build" / "torch-cuda" / "__init__.py")
    monkeypatch.setattr(sys, "argv", ["-c", "_in_a_worker", file, "_compile"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps(([], 90)))))
    exec(warm.WORKER, {})
    assert sys.modules["_in_a_worker"].tools.warm.PACKAGE == "_in_a_worker"


def test_a_layer_norm_layer_adds_its_bias():
    module = torch.nn.LayerNorm(8)
    torch.nn.init.normal_(module.bias)
    x = torch.randn(3, 8)
    torch.testing.assert_close(fusednorm.layers.LayerNorm.forward(module, x), module(x))
