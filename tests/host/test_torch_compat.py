"""The package works with a torch that lacks the private names that it uses, which torch may drop at any time."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import afresh
import pytest
import torch

from fusednorm.host import torch_compat

ROOT = Path(__file__).parents[2]
NAMES = [
    "_C._dynamo.guards._empty_strided_cuda",
    "_C._cuda_getDevice",
    "_C._cuda_getCurrentRawStream",
    "autograd.forward_ad._current_level",
    "_C._are_functorch_transforms_active",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._len_torch_function_stack",
    "_C._len_torch_dispatch_stack",
    "_C._is_torch_function_mode_enabled",
    "_C._is_torch_function_enabled",
    "_C._push_on_torch_function_stack",
    "_C._pop_torch_function_stack",
    "_C._get_tracing_state",
    "_C._AutoDispatchBelowAutograd",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "autograd._profiler_enabled",
    "nn.modules.module._has_any_global_hook",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._autograd._record_function_with_args_enter",
    "_C._autograd._record_function_with_args_exit",
]

COMPILER = "torch._inductor.compile_fx"  # of torch; the names are lost after it has been imported
# After this code, `import torch` gives a module that lacks the names in sys.argv; torch's own modules keep them.
WITHOUT = """
import sys, types, torch, torch.nn.functional, torch._dynamo
real = torch

class Without(types.ModuleType):
    def __init__(self, real, name, missing):
        super().__init__(real.__name__)
        vars(self).update(real=real, name=name, missing=missing, __path__=getattr(real, "__path__", []))
    def __getattr__(self, at):
        name = f"{self.name}.{at}".lstrip(".")
        if name in self.missing:
            raise AttributeError(f"torch has no {name}")
        value = getattr(self.real, at)
        parents = any(each.startswith(f"{name}.") for each in self.missing)
        return Without(value, name, self.missing) if parents else value

sys.modules["torch"] = Without(torch, "", set(sys.argv[1:]))
"""

# Forward, backward, second derivatives, forward mode and transforms give what the stock norm gives.
USE = """
import torch, fusednorm
from torch.nn.functional import layer_norm
from fusednorm.host import torch_compat

assert type(torch).__name__ == "Without"
generator = real.Generator().manual_seed(0)
x, g = (real.randn(6, 16, generator=generator, dtype=real.float64) for _ in range(2))
w, b = (real.randn(16, generator=generator, dtype=real.float64) for _ in range(2))

def ours(x, w, b):
    return real.ops.fusednorm.layer_norm_fwd(x, [16], w, b, 1e-5)[0]

def stock(x, w, b):
    return layer_norm(x, [16], w, b, 1e-5)

def everything(norm):
    leaves = [each.clone().requires_grad_() for each in (x, w, b)]
    y = norm(*leaves)
    first = real.autograd.grad(y, leaves, g, create_graph=True)
    second = real.autograd.grad(first[0].square().sum() + first[1].square().sum(), leaves[:2])
    transformed = real.func.grad(lambda x: (norm(x, w, b) * g).sum())(x)
    batched = real.func.vmap(lambda x: norm(x, w, b))(x.view(2, 3, 16))
    _, tangent = real.func.jvp(lambda x: norm(x, w, b), (x,), (g,))
    with real.no_grad():
        plain = norm(x, w, b)
    return y, *first, *second, transformed, batched, tangent, plain

for a, b_ in zip(everything(ours), everything(stock), strict=True):
    real.testing.assert_close(a, b_)
sums = fusednorm.column_sum([x.requires_grad_()])
real.testing.assert_close(sums[0], x.sum(0))
sums[0].sum().backward()
real.testing.assert_close(x.grad, real.ones_like(x))
fusednorm.LayerNorm(16)(real.randn(2, 16)).sum().backward()
fusednorm.functional.rms_norm(real.randn(2, 16), [16])
with real.device("cpu"), real.overrides.BaseTorchFunctionMode():
    subclass = type("Subclass", (real.Tensor,), {})
    assert type(fusednorm.LayerNorm(16)(real.randn(2, 16).as_subclass(subclass))) is subclass

from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    fake = real.empty(4, 16, device="cuda")
    y, mean, rstd = real.ops.fusednorm.layer_norm_fwd(fake, [16], None, None, 1e-5)
    dx, *_ = real.ops.fusednorm.layer_norm_bwd(y, fake, [16], mean, rstd, None, None, [True, False, False])
    for each in (y, dx, *fusednorm.column_sum([fake])):
        assert each.is_cuda and not each.is_inference()
print("missing", *torch_compat.missing)
"""


def missing_in(*names: str) -> list[str]:
    """Runs USE with a torch that lacks these names. Returns the names that the package reports as missing."""
    asked = afresh.run(WITHOUT + USE, *names, after=COMPILER)
    assert asked.returncode == 0, asked.stderr[-2000:]
    return asked.stdout.split()[1:]


def on_a_gpu(name: str) -> bool:
    return "cuda" in name


# Without these two names the package always takes the formula instead of the ops, and looks up no other name.
FIRST_ASKED = {"autograd.forward_ad._current_level", "_C._are_functorch_transforms_active"}


@pytest.mark.parametrize("names", [NAMES, [n for n in NAMES if n not in FIRST_ASKED]], ids=["all", "all but two"])
def test_without_any_of_the_names_the_package_is_right(names):
    wanted = {f"torch.{name}" for name in names if torch.version.cuda or not on_a_gpu(name)}
    assert set(missing_in(*names)) == wanted


def test_a_parameter_is_found_in_a_module_without_private_names():
    module = SimpleNamespace(weight=torch.ones(3))
    assert torch_compat.parameter(module, "weight") is module.weight
    with pytest.raises(AttributeError, match="bias"):
        torch_compat.parameter(module, "bias")


def test_names_that_are_taken_from_torch_are_in_the_list_above():
    tree = ast.parse(Path(torch_compat.__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asked = {node.args[0].value for node in calls if getattr(node.func, "id", "") == "_private" and node.args}
    assert asked == set(NAMES)


@pytest.mark.parametrize("path", sorted((ROOT / "fusednorm").rglob("*.py")), ids=lambda path: path.name)
def test_nobody_else_takes_a_private_name_from_torch(path):
    """Exceptions: an integration may fail alone, and sharding.py reports the names it lacks in `missing`."""
    if path.name in ("torch_compat.py", "sharding.py") or path.parent.name == "integrations":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            # torch._check is documented with sizes that are known only at run time. torch._foreach_copy_ is documented
            # with the optimizers; the demo trains with it.
            public = "__version__", "__file__", "_check", "_foreach_copy_"
            assert not node.attr.startswith("_") or node.attr in public, node.attr
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not any(part.startswith("_") for name in names if "torch" in name for part in name.split("."))


# The names in torch that each integration needs. Without one, the integration raises an ImportError that names it, and
# the rest of the package works.
INTEGRATIONS = {
    "enable_eager": ["library.Library._destroy", "library.get_kernel"],
    "patch_model": ["utils._python_dispatch._disable_current_modes"],
    "enable_inductor": [
        "_C._functorch.get_unwrapped",
        "_C._functorch.is_functorch_wrapped_tensor",
        "_TorchCompileInductorWrapper",
        "_inductor.compile_fx.compile_fx",
        "_inductor.compile_fx.compile_fx_inner",
        "_inductor.config.joint_custom_post_pass",
        "_inductor.custom_graph_pass.CustomGraphPass",
        "_inductor.decomposition.decompositions",
        "_inductor.decomposition.fast_random_decomps",
        "_inductor.pattern_matcher.stable_topological_sort",
        "_inductor.virtualized.V",
        "compiler.config.cache_key_tag",
    ],
}
LOSE_ONE_AFTER_THE_OTHER = """
import importlib, os, sys, torch, fusednorm, torch._inductor.compile_fx
for pair in sys.argv[1:]:
    name, each = pair.split()
    if os.fork():
        assert os.wait()[1] == 0, pair
        continue
    path, _, at = f"torch.{each}".rpartition(".")
    owner = torch.library.Library if path == "torch.library.Library" else importlib.import_module(path)
    if "config" in path:
        del owner._config[at]
    else:
        delattr(owner, at)
    try:
        getattr(fusednorm, name)
    except ImportError as error:
        assert str(error).startswith(f"fusednorm.{name} does not know this torch") and at in str(error), error
    else:
        raise AssertionError("nobody missed it")
    fusednorm.LayerNorm(16)(torch.randn(2, 16)).sum().backward()
    os._exit(0)
"""


def test_an_integration_names_what_a_torch_does_not_have():
    pairs = [f"{name} {each}" for name, lost in INTEGRATIONS.items() for each in lost]
    asked = afresh.run(LOSE_ONE_AFTER_THE_OTHER, *pairs, after=COMPILER)
    assert asked.returncode == 0, asked.stderr[-2000:]


def test_of_a_torch_that_is_supported_nothing_is_missing():
    assert torch_compat.missing == []


def test_what_serves_on_a_gpu_asks_torch_by_its_public_names(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda.Stream, "cuda_stream", 7, raising=False)
    assert torch_compat._stream_by_public_names(3) == 7 and asked == [3]
    monkeypatch.setattr(torch, "empty_strided", lambda *shape, **named: (*shape, named))
    made = torch_compat._empty_by_public_names((2, 3), (3, 1), torch.float16)
    assert made == ((2, 3), (3, 1), {"dtype": torch.float16, "device": "cuda"})
