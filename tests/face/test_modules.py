"""fusednorm.LayerNorm and RMSNorm replace torch.nn's: same parameters, state dicts, copies and training."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from op_log import OpLog
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

import fusednorm

PAIRS = [(fusednorm.LayerNorm, torch.nn.LayerNorm), (fusednorm.RMSNorm, torch.nn.RMSNorm)]
pairs = pytest.mark.parametrize(("ours", "stock"), PAIRS, ids=["LayerNorm", "RMSNorm"])
modules = pytest.mark.parametrize("module", [ours for ours, _ in PAIRS])
ARGUMENTS = [
    ((8,), {}),
    (([3, 8], 1e-3), {"dtype": torch.float64}),
    (((8,),), {"elementwise_affine": False}),
    ((8,), {"eps": 1.0, "dtype": torch.bfloat16}),
]


def randomize(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize(("args", "kwargs"), ARGUMENTS)
@pairs
def test_module_is_stock_in_parameters_repr_and_output(ours, stock, args, kwargs):
    got, want = ours(*args, **kwargs), randomize(stock(*args, **kwargs))
    assert isinstance(got, stock)
    assert repr(got) == repr(want)
    got.load_state_dict(want.state_dict())
    want.load_state_dict(got.state_dict())
    x = torch.randn(2, 3, 8, dtype=kwargs.get("dtype"))
    assert torch.equal(got(x), want(x))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_honours_the_bias_flag(bias):
    got, want = (module(8, bias=bias) for module in PAIRS[0])
    assert (got.bias is None) is not bias
    assert list(got.state_dict()) == list(want.state_dict())
    assert got(torch.ones(2, 8)).shape == (2, 8)


@modules
def test_copies_and_pickles_are_equal_and_independent(module):
    original = randomize(module(8))
    x = torch.randn(2, 8)
    buffer = io.BytesIO()
    torch.save(original, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for duplicate in (copy.deepcopy(original), pickle.loads(pickle.dumps(original)), loaded):
        assert type(duplicate) is module
        assert torch.equal(duplicate(x), original(x))
        assert duplicate.weight.data_ptr() != original.weight.data_ptr()


@modules
def test_module_built_on_meta_materializes_and_resets(module):
    built = module(8, device="meta")
    assert built(torch.empty(2, 8, device="meta")).shape == (2, 8)
    built = built.to_empty(device="cpu")
    torch.nn.init.normal_(built.weight)
    built.reset_parameters()
    assert torch.equal(built.weight, torch.ones(8))
    assert getattr(built, "bias", None) is None or torch.equal(built.bias, torch.zeros(8))


@modules
def test_module_gives_cuda_tensors_to_the_op(module):
    with FakeTensorMode(), torch.no_grad():
        built, x = module(8, device="cuda"), torch.empty(3, 8, dtype=torch.bfloat16, device="cuda")
        with OpLog() as log:
            built(x)
    op = "layer_norm_fwd" if module is fusednorm.LayerNorm else "rms_norm_fwd"
    assert log.names == [f"fusednorm.{op}.default"]


@pairs
def test_a_model_trains_to_the_same_weights_as_with_stock(ours, stock):
    def train(norm):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), norm(16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            loss = (model(torch.randn(4, 8)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model.state_dict()

    got, want = train(ours), train(stock)
    assert all(torch.equal(got[name], want[name]) for name in want)


@modules
def test_module_compiles_without_a_graph_break(module):
    built = randomize(module(8))
    x = torch.randn(2, 8)
    torch.testing.assert_close(torch.compile(built, fullgraph=True, backend="aot_eager")(x), built(x))


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def with_a_parametrization(built):
    parametrize.register_parametrization(built, "weight", Doubled())


def with_a_plain_tensor(built):
    """What packages do that compute or shard a weight, such as torch.nn.utils.prune and FSDP1."""
    doubled = 2 * built._parameters.pop("weight")
    built.weight = doubled


@pytest.mark.parametrize("change", [with_a_parametrization, with_a_plain_tensor])
@modules
def test_module_takes_what_is_in_the_place_of_its_weight(module, change):
    built, x = randomize(module(8)), torch.randn(2, 8)
    doubled = copy.deepcopy(built)
    with torch.no_grad():
        doubled.weight *= 2
    change(built)
    torch.testing.assert_close(built(x), doubled(x))


@modules
def test_module_works_under_functional_call_and_vmap(module):
    built = randomize(module(8))
    stacked = {name: torch.stack([p, 2 * p]) for name, p in built.named_parameters()}
    x = torch.randn(3, 8)
    got = torch.func.vmap(lambda p: torch.func.functional_call(built, p, (x,)))(stacked)
    want = torch.stack(
        [torch.func.functional_call(built, {n: p[i] for n, p in stacked.items()}, (x,)) for i in range(2)]
    )
    torch.testing.assert_close(got, want)


def test_layer_norm_takes_a_plain_tensor_in_the_place_of_its_bias():
    built, x = randomize(fusednorm.LayerNorm(8)), torch.randn(2, 8)
    y = built(x)
    built.bias = 2 * built._parameters.pop("bias")
    torch.testing.assert_close(built(x), y + built.bias / 2)
