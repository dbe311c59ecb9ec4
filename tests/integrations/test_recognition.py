"""patch_model leaves norms that only look like ones it knows: those that differ in gradients, at other magnitudes or
other numbers of rows, that hold state, or whose tensors cannot be compared or read now."""

from __future__ import annotations

import sys

import afresh
import pytest
import torch
from torch import nn

import fusednorm

COLS = 24


def rms(x, eps):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Written(nn.Module):
    def __init__(self, cols=COLS):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(cols)), 1e-6

    def forward(self, x):
        return self.weight * (x * rms(x, self.eps))


class Detaching(Written):
    def forward(self, x):
        return self.weight * (x * rms(x.detach(), self.eps))


class DetachingWeight(Written):
    def forward(self, x):
        return self.weight.detach() * (x * rms(x, self.eps))


class WithoutGradients(Written):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Clamping(Written):
    def forward(self, x):
        return super().forward(x).clamp(-50, 50)


class ClampingInput(Written):
    def forward(self, x):
        return super().forward(x.clamp(-1e4, 1e4))


class WithATinyRstd(Written):
    def forward(self, x):
        return self.weight * (x * rms(x, self.eps).clamp(min=1e-3))


class TanhOfSmall(Written):
    def forward(self, x):
        return torch.where(x.abs() < 0.01, torch.zeros_like(x), super().forward(x))


class OfManyRows(Written):
    def forward(self, x):
        return super().forward(x) if x.numel() // x.shape[-1] < 16 else x * self.weight


class OfOneRow(Written):
    def forward(self, x):
        return super().forward(x) if x.dim() < 2 or x.shape[0] != 1 else x * self.weight


class OfFirstRows(nn.LayerNorm):
    def __init__(self, cols=COLS):
        super().__init__(cols)

    def forward(self, input):
        return super().forward(input) if len(input) < 16 else input * self.weight


class UnrecordedLayerNorm(nn.LayerNorm):
    def __init__(self, cols=COLS):
        super().__init__(cols)

    def forward(self, input):
        with torch.no_grad():
            return super().forward(input)


class Counting(Written):
    def __init__(self, cols=COLS):
        super().__init__(cols)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class CountingInAList(Counting):
    def __init__(self, cols=COLS):
        super().__init__(cols)
        self.log = []

    def forward(self, x):
        self.log.append(x.shape)
        return Written.forward(self, x)


class Scaled(Written):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class ScaledByATensor(Scaled):
    def __init__(self, cols=COLS):
        super().__init__(cols)
        self.scale = torch.ones(())


class Remembering(Written):
    def forward(self, x):
        self.last = x
        return super().forward(x)


class ScaledLayerNorm(nn.LayerNorm):
    def __init__(self, cols=COLS):
        super().__init__(cols)
        self.skip = 0

    def forward(self, input):
        return input if self.skip > 3 else super().forward(input)


LEFT = [
    (Detaching, "computes something else"),
    (DetachingWeight, "computes something else"),
    (WithoutGradients, "computes something else"),
    (Clamping, "something else for small or for large numbers"),
    (ClampingInput, "something else for small or for large numbers"),
    (WithATinyRstd, "something else for small or for large numbers"),
    (TanhOfSmall, "something else for small or for large numbers"),
    (OfManyRows, "something else for other numbers of rows"),
    (OfOneRow, "something else for other numbers of rows"),
    (OfFirstRows, "something else for other numbers of rows"),
    (UnrecordedLayerNorm, "computes something else"),
    (Counting, "changes its attribute calls"),
    (CountingInAList, "reads its attribute log"),
    (Scaled, "reads its attribute scale"),
    (ScaledByATensor, "reads its attribute scale"),
    (Remembering, "changes its attribute last"),
    (ScaledLayerNorm, "reads its attribute skip"),
]


def left(module: nn.Module) -> str:
    """The reason why the module is left. Asserts that it is, and that nothing in it changed."""
    before, attributes = type(module), dict(vars(module))
    patch = fusednorm.patch_model(nn.Sequential(module), classes=[type(module)])
    assert not patch.replaced and type(module) is before
    assert all(vars(module)[name] is value for name, value in attributes.items()) and len(vars(module)) == len(
        attributes
    )
    return patch.left[0].note


@pytest.mark.parametrize(("make", "reason"), LEFT, ids=[make.__name__ for make, _ in LEFT])
def test_what_differs_where_a_single_forward_does_not_show_it_is_left(make, reason):
    module = make()
    assert reason in left(module)
    assert getattr(module, "calls", 0) == 0 and not getattr(module, "log", [])


class OnePlusWeight(Written):
    def forward(self, x):
        return (1 + self.weight) * (x * rms(x, self.eps))


class TanhRMSNorm(Written):
    def forward(self, x):
        return self.weight * torch.tanh(x)


@pytest.mark.parametrize("make", [Written, OnePlusWeight, TanhRMSNorm])
@pytest.mark.parametrize("training", [True, False])
def test_a_norm_without_elements_is_left(make, training):
    assert "weight is empty" in left(make(0).train(training))


class Sizes(Written):
    """Reads sizes and settings, as norms do."""

    def __init__(self, cols=COLS):
        super().__init__(cols)
        self.hidden_size, self.normalized_shape, self.with_scale, self.kind = cols, (cols,), True, "rms"

    @property
    def shape(self):
        return self.normalized_shape

    def forward(self, x):
        assert self.kind == "rms" and x.shape[-1] == self.hidden_size == self.shape[0]
        return self._norm(x) * self.weight if self.with_scale else self._norm(x)

    def _norm(self, x):
        return x * rms(x, self.eps)


class IdleState(Written):
    """Holds what its forward does not read."""

    def __init__(self, cols=COLS):
        super().__init__(cols)
        self.name, self.position, self.cache = "a norm", 3, {"rows": [torch.ones(2)]}


@pytest.mark.parametrize("make", [Written, Sizes, IdleState])
@pytest.mark.parametrize("cols", [2, 24, 1000])
def test_sizes_settings_and_what_is_not_read_are_no_obstacle(make, cols):
    assert len(fusednorm.patch_model(make(cols)).replaced) == 1


def test_attributes_of_any_name_are_the_modules_own():
    class Named(Written):
        def forward(self, x):
            return super().forward(x) if self.formula == self.ranks == self.norm == "mine" else x

    module, x = Named(), torch.randn(2, COLS)
    module.formula = module.ranks = module.norm = module.ingredients = "mine"
    want = module(x)
    assert len(fusednorm.patch_model(module).replaced) == 1
    torch.testing.assert_close(module(x), want)


def test_modules_that_differ_in_an_attribute_are_each_tried():
    class SignedNorm(Written):
        def __init__(self, sign):
            super().__init__()
            self.negative = sign

        def forward(self, x):
            return -super().forward(x) if self.negative else super().forward(x)

    patch = fusednorm.patch_model(nn.Sequential(*(SignedNorm(each) for each in (False, True, False, True))))
    assert [norm.name for norm in patch.replaced] == ["0", "2"] and [norm.name for norm in patch.left] == ["1", "3"]


def test_partitioned_and_flattened_weights_are_left():
    partitioned, flattened = Written(), Written()
    partitioned.weight.ds_id = 0
    flattened.weight._fsdp_flattened = True
    assert "partitioned by DeepSpeed" in left(partitioned)
    assert "flattened by FSDP" in left(flattened)
    plain = Written()
    weight = plain._parameters.pop("weight")
    plain.__dict__["weight"] = weight.detach()
    assert "weight is a tensor that is no parameter" in left(plain)


# In a process of its own, because reading freed memory crashes.
READS_FREED_MEMORY = """
import sys, torch, fusednorm
sys.path[:0] = sys.argv[1:]
from test_recognition import COLS, Written
from torch import nn

class Reading(Written):
    def forward(self, x):
        for table in self.tables["nested"]:
            x = x + 0 * table
        return super().forward(x)

class FreedLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x + 0 * self.extra)

def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor

plain, parameter, nested, stock = Written(1 << 20), Written(1 << 20), Reading(1 << 20), FreedLayerNorm(1 << 20)
plain._parameters.pop("weight")
plain.__dict__["weight"] = freed(torch.ones(1 << 20))  # as FSDP with use_orig_params=False leaves it between forwards
freed(parameter.weight.data)
nested.tables = {"nested": [(), (freed(torch.ones(1 << 20)),)]}
nested.tables["nested"] = nested.tables["nested"][1]
stock.extra = freed(torch.ones(1 << 20))
patch = fusednorm.patch_model(nn.ModuleList([plain, parameter, nested, stock]), classes=[Written])
assert not patch.replaced, patch
assert [norm.note.partition(" was freed")[0] for norm in patch.left] == [
    "the memory of its " + name for name in ("weight", "weight", "nested", "extra")], patch
"""


def test_memory_that_was_freed_is_not_read():
    here = [str(path) for path in sys.path if path.endswith(("tests", "integrations"))]
    asked = afresh.run(READS_FREED_MEMORY, *here)
    assert asked.returncode == 0, asked.stderr


def test_a_trial_leaves_no_trace():
    module = Written()
    module.weight.grad = torch.ones(COLS)
    before = dict(vars(module))
    fusednorm.patch_model(module)
    assert torch.equal(module.weight.grad, torch.ones(COLS)) and vars(module).keys() == before.keys()


def test_stock_norms_need_no_trial_and_are_replaced_while_they_are_empty():
    norm = nn.LayerNorm(COLS)
    norm.weight = nn.Parameter(torch.empty(0))
    assert len(fusednorm.patch_model(norm).replaced) == 1
