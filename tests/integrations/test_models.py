"""patch_model: the norms that it replaces, the norms that it leaves, the results of replaced norms, and what does not
change in a model."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from graphs import RecordingBackend
from op_log import OpLog
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusednorm

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
COLS = 24


# Norms as models write them.
class PlainRMSNorm(nn.Module):
    """Rounds x_hat to x's dtype, and then multiplies by the weight."""

    def __init__(self, cols=COLS, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(dtype)


class CenteredRMSNorm(nn.Module):
    """Multiplies by 1 + weight in float32, and rounds once."""

    def __init__(self, cols=COLS, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(cols))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class RootLayerNorm(nn.Module):
    """RMSNorm in a class named LayerNorm. Rounds x_hat to the dtype of a 16-bit weight."""

    def __init__(self, cols=COLS, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        scale = torch.rsqrt(hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        hidden_states = hidden_states * scale
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class WrittenOutLayerNorm(nn.Module):
    def __init__(self, cols=COLS, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(cols)), nn.Parameter(torch.zeros(cols))
        self.epsilon = eps

    def forward(self, input):
        wide = input.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (self.weight.float() * wide + self.bias.float()).to(input.dtype)


class UnweightedRMSNorm(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class NamedLayerNorm(nn.LayerNorm):
    """A subclass that inherits the forward of torch.nn.LayerNorm."""

    def __init__(self, cols=COLS):
        super().__init__(cols)


class Scale(PlainRMSNorm):
    """A norm whose class name does not say that it is one."""


class WideningLayerNorm(nn.LayerNorm):
    """Calls F.layer_norm in float32, also under autocast, and casts the result to the input's dtype."""

    def __init__(self, cols=COLS):
        super().__init__(cols)

    def forward(self, input):
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).type_as(input)


class WideningPlainLayerNorm(nn.LayerNorm):
    """Without a weight, as diffusers' Wan has it before modulations."""

    def __init__(self, cols=COLS):
        super().__init__(cols, elementwise_affine=False)

    def forward(self, input):
        return F.layer_norm(input.float(), self.normalized_shape, eps=self.eps).to(input.dtype)


class HandingOnRMSNorm(nn.RMSNorm):
    def __init__(self, cols=COLS):
        super().__init__((2, cols // 2))

    def forward(self, x):
        return super().forward(x)


LAYER_NORMS = [WrittenOutLayerNorm, WideningLayerNorm, WideningPlainLayerNorm]
BY_HAND = [PlainRMSNorm, CenteredRMSNorm, RootLayerNorm, UnweightedRMSNorm, Scale, *LAYER_NORMS]


def stock_layer_norm():
    return nn.LayerNorm(COLS)


def stock_rms_norm():
    return nn.RMSNorm(COLS)


STOCK = [stock_layer_norm, stock_rms_norm, NamedLayerNorm]
by_hand = pytest.mark.parametrize("make", BY_HAND)
every_kind = pytest.mark.parametrize("make", [*BY_HAND, *STOCK])


def made(make, dtype=FP32):
    torch.manual_seed(0)
    module = make().to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def outputs_and_grads(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    grad = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], grad)]


@every_kind
def test_replaced_norm_computes_what_it_did(make):
    module, x = made(make), torch.randn(3, 5, COLS) + 1
    before = type(module).__name__
    want = outputs_and_grads(module, x)
    patch = fusednorm.patch_model(module)
    assert [(norm.name, norm.class_name) for norm in patch.replaced] == [("", before)] and not patch.left
    for got, wanted in zip(outputs_and_grads(module, x), want, strict=True):
        torch.testing.assert_close(got, wanted)


@by_hand
def test_norm_by_hand_runs_our_ops(make):
    module = made(make)
    fusednorm.patch_model(module)
    with OpLog() as log:
        outputs_and_grads(module, torch.randn(3, COLS))
    norm = "layer" if make in LAYER_NORMS else "rms"
    ours = [name for name in log.names if name.startswith("fusednorm")]
    assert ours == [f"fusednorm.{norm}_norm_fwd_affine.default", f"fusednorm.{norm}_norm_bwd_residual.default"]


@by_hand
@pytest.mark.parametrize("x_dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("weight_dtype", [FP32, FP16, BF16], ids=str)
def test_dtypes_are_those_of_the_norms_own_forward(make, x_dtype, weight_dtype):
    module, x = made(make, weight_dtype), torch.randn(3, COLS).to(x_dtype)
    want = outputs_and_grads(module, x)
    exact = outputs_and_grads(copy.deepcopy(module).double(), x.double())
    fusednorm.patch_model(module)
    got = outputs_and_grads(module, x)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for ours, theirs, right in zip(got, want, exact, strict=True):
        size, eps = right.norm(), max(torch.finfo(dtype).eps for dtype in (x_dtype, weight_dtype, theirs.dtype))
        assert (ours.double() - right).norm() <= 1.5 * (theirs.double() - right).norm() + 2 * eps * size


@by_hand
def test_autocast_does_not_enter_a_norm_by_hand(make):
    module, x = made(make), torch.randn(3, COLS)

    def dtypes():
        with torch.autocast("cpu", BF16):
            return module(x).dtype, module(x.bfloat16()).dtype

    want = dtypes()
    fusednorm.patch_model(module)
    assert dtypes() == want


def test_one_plus_weight_is_summed_in_float32():
    module, x = made(CenteredRMSNorm, BF16), torch.randn(64, COLS)
    with torch.no_grad():
        module.weight.fill_(2.0**-10)  # in bfloat16, 1 + weight would be 1
    want = module(x)
    fusednorm.patch_model(module)
    torch.testing.assert_close(module(x), want, rtol=1e-5, atol=0)


@every_kind
def test_everything_but_the_class_stays(make):
    model = nn.Sequential(nn.Linear(COLS, COLS), made(make))
    module, before = model[1], type(model[1])
    parameters, state = list(model.named_parameters()), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    module.register_forward_hook(lambda *_: seen.append("forward"))
    fusednorm.patch_model(model)
    assert model[1] is module and isinstance(module, before)
    now = list(model.named_parameters())
    assert [name for name, _ in now] == [name for name, _ in parameters]
    assert all(a is b for (_, a), (_, b) in zip(now, parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    model(torch.randn(2, COLS)).square().sum().backward()
    optimizer.step()
    assert seen == ["forward"]
    assert all(not torch.equal(value, state[name]) for name, value in model.named_parameters())


@every_kind
def test_restore_gives_the_own_forward_back_and_keeps_what_was_trained(make):
    module, x = made(make), torch.randn(3, COLS)
    before = type(module)
    patch = fusednorm.patch_model(module)
    assert type(module) is not before
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    patch.restore()
    patch.restore()
    assert type(module) is before
    fresh = made(make)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1)
    assert torch.equal(module(x), fresh(x))


@every_kind
def test_copies_and_pickles_of_a_replaced_norm_are_replaced_and_independent(make):
    module, x = made(make), torch.randn(3, COLS)
    fusednorm.patch_model(module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)):
        assert type(twin) is type(module)
        assert torch.equal(twin(x), module(x))
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}


@every_kind
def test_compiled_graphs_hold_our_ops(make):
    module, x = made(make), torch.randn(3, COLS)
    want = outputs_and_grads(module, x)
    fusednorm.patch_model(module)
    torch._dynamo.reset()
    backend = RecordingBackend()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for got, wanted in zip(outputs_and_grads(compiled, x), want, strict=True):
        torch.testing.assert_close(got, wanted)
    norm = "layer" if make in LAYER_NORMS else "rms"
    for graph, op in zip(backend.graphs, ("fwd_affine", "bwd_residual"), strict=True):
        assert (f"fusednorm.{norm}_norm_{op}.default" in graph) == (make in BY_HAND)  # torch's norms call ATen on a CPU


def test_a_norm_used_twice_is_replaced_once():
    norm = nn.LayerNorm(COLS)
    patch = fusednorm.patch_model(nn.ModuleDict({"a": norm, "b": norm}))
    assert [each.name for each in patch.replaced] == ["a"]


def test_patching_twice_leaves_what_is_replaced_and_restores_by_turns():
    model = nn.Sequential(nn.LayerNorm(COLS), PlainRMSNorm())
    first = fusednorm.patch_model(model)
    second = fusednorm.patch_model(model)
    assert not second.replaced
    assert {each.note for each in second.left} == {"runs this package's kernels already"}
    second.restore()
    assert isinstance(model[0], fusednorm.LayerNorm)
    first.restore()
    assert [type(module) for module in model] == [nn.LayerNorm, PlainRMSNorm]


def test_the_callers_name_for_the_tensor_is_taken():
    module, x = PlainRMSNorm(), torch.randn(3, COLS)
    want = module(hidden_states=x)
    fusednorm.patch_model(module)
    torch.testing.assert_close(module(hidden_states=x), want)


@by_hand
def test_arguments_that_the_forward_lacks_are_errors(make):
    module, x = made(make), torch.randn(3, COLS)
    fusednorm.patch_model(module)
    for args, kwargs in (((x, x), {}), ((x,), {"other": x})):
        with pytest.raises(TypeError, match="forward"):
            module(*args, **kwargs)


@by_hand
def test_what_a_norm_lacks_is_not_asked_for(make, monkeypatch):
    """Module.__getattr__, which raises for it, takes a fifth of a forward's host time."""
    module, asked = made(make), []
    fusednorm.patch_model(module)
    monkeypatch.setattr(torch.nn.Module, "__getattr__", lambda self, name: asked.append(name))
    module(torch.randn(3, COLS))
    assert not asked


def test_eps_is_read_on_each_call():
    module, x = PlainRMSNorm(), torch.randn(3, COLS)
    fusednorm.patch_model(module)
    module.variance_epsilon = 10.0
    assert module(x).square().mean() < 0.2


def test_what_our_ops_do_not_take_runs_the_own_forward():
    on_meta, as_int = made(PlainRMSNorm).to("meta"), made(UnweightedRMSNorm)
    x = torch.arange(2 * COLS).reshape(2, COLS)
    want = as_int(x)
    fusednorm.patch_model(nn.ModuleList([on_meta, as_int]))
    assert torch.equal(as_int(x), want) and want.dtype == x.dtype
    with OpLog() as log:
        assert on_meta(torch.empty(2, COLS, device="meta")).shape == (2, COLS)
    assert "aten.rsqrt.default" in log.names


def test_the_random_state_is_not_touched():
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    fusednorm.patch_model(PlainRMSNorm())
    assert torch.equal(torch.rand(1), want)


class UncopyableRMSNorm(PlainRMSNorm):
    def __new__(cls, *args):
        if not args:
            raise TypeError("needs its arguments, as the classes of FSDP do")
        return super().__new__(cls)


def test_modes_and_default_devices_and_dtypes_do_not_disturb_the_trial():
    model = nn.ModuleList([PlainRMSNorm(), UncopyableRMSNorm(COLS), CenteredRMSNorm().to("meta")])
    with FakeTensorMode():
        model.append(WrittenOutLayerNorm())
        assert len(fusednorm.patch_model(model).replaced) == 4
    model = nn.ModuleList([PlainRMSNorm()])
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", BF16):
            assert len(fusednorm.patch_model(model).replaced) == 1
    finally:
        torch.set_default_dtype(before)


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states)


class RMSNormOfThree(PlainRMSNorm):
    def forward(self, hidden_states, gate, residual=None):
        return super().forward(hidden_states) * torch.nn.functional.silu(gate)


class LazyRMSNorm(nn.modules.lazy.LazyModuleMixin, PlainRMSNorm):
    def __init__(self):
        super().__init__()
        self.weight = nn.parameter.UninitializedParameter()


class BuiltInNorm(PlainRMSNorm):
    forward = torch.relu


class ScaledRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class NoisyRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * (2 if self.training else 1)


class EpsOutsideRMSNorm(PlainRMSNorm):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class WideRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).double().to(FP32 if hidden_states.dtype == FP32 else FP64)


class CallingLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps).clone()


class OtherEpsLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, 2 * self.eps)


class ChannelsRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class CountingRMSNorm(PlainRMSNorm):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))


class EpslessLayerNorm(PlainRMSNorm):
    def __init__(self):
        super().__init__()
        del self.variance_epsilon


class TableRMSNorm(PlainRMSNorm):
    def __init__(self):
        super().__init__((2, COLS))


class NormFactory(nn.Module):
    def forward(self, x):
        return x


def replaced_forward():
    module = nn.LayerNorm(COLS)
    module.forward = lambda x: x
    return module


def parametrized():
    return nn.utils.parametrizations.spectral_norm(nn.RMSNorm((COLS, 2)))


class ScalarRMSNorm(PlainRMSNorm):
    def __init__(self):
        super().__init__((1,))


class EvaluatingLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input) if self.training else input * self.weight


class GroupedRMSNorm(UnweightedRMSNorm):
    def forward(self, x):
        return super().forward(x.unflatten(-1, (-1, 16))).flatten(-2)


class ChannelsFirstLayerNorm(nn.LayerNorm):
    """Normalizes the second of four dims."""

    def forward(self, input):
        if input.dim() == 4:
            return super().forward(input.movedim(1, -1)).movedim(-1, 1)
        return super().forward(input)


class ChannelsFirstRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states):
        if hidden_states.dim() == 4:
            return super().forward(hidden_states.movedim(1, -1)).movedim(-1, 1)
        return super().forward(hidden_states)


class FlatteningRMSNorm(UnweightedRMSNorm):
    def forward(self, x):
        return super().forward(x.flatten(2)).view_as(x)


LEFT = [
    (GatedRMSNorm, "computes something else"),
    (RMSNormOfThree, "takes more than the tensor and a gate"),
    (ScaledRMSNorm, "computes something else"),
    (NoisyRMSNorm, "computes something else"),
    (EpsOutsideRMSNorm, "computes something else"),
    (WideRMSNorm, "a dtype that follows from neither"),
    (lambda: CallingLayerNorm(COLS), "calls torch's own norm"),
    (lambda: OtherEpsLayerNorm(COLS), "computes something else"),
    (ChannelsRMSNorm, "failed on a small CPU tensor"),
    (ScalarRMSNorm, "a parameter of one element"),
    (lambda: EvaluatingLayerNorm(COLS), "computes something else"),
    (GroupedRMSNorm, "computes something else"),
    (lambda: ChannelsFirstLayerNorm(COLS), "calls torch's own norm"),
    (LazyRMSNorm, "its parameters at its first call"),
    (BuiltInNorm, "no function of Python"),
    (CountingRMSNorm, "parameters or buffers besides"),
    (EpslessLayerNorm, "no eps that we know of"),
    (TableRMSNorm, "normalizes more than one dim"),
    (NormFactory, "no eps that we know of"),
    (lambda: nn.BatchNorm1d(COLS), "another module of torch.nn"),
    (lambda: fusednorm.RMSNorm(COLS), "already"),
    (replaced_forward, "replaced on the instance"),
    (parametrized, "modules inside"),
]


@pytest.mark.parametrize(("make", "reason"), LEFT, ids=[reason.replace(" ", "_") for _, reason in LEFT])
def test_what_is_not_recognized_is_left_and_says_why(make, reason):
    model = nn.ModuleDict({"norm": make()})
    before = type(model["norm"])
    patch = fusednorm.patch_model(model)
    assert type(model["norm"]) is before and not patch.replaced
    left = [each for each in patch.left if each.name == "norm"]
    assert len(left) == 1 and reason in left[0].note
    assert f"1 x {before.__name__}, {left[0].note}: norm" in str(patch)


def test_a_subclass_that_hands_on_is_what_torch_has():
    model = nn.Sequential(made(HandingOnRMSNorm))
    x = torch.randn(3, 2, COLS // 2)
    want = model(x)
    patch = fusednorm.patch_model(model)
    assert [each.note for each in patch.replaced] == ["as torch.nn.RMSNorm"]
    assert isinstance(model[0], fusednorm.RMSNorm) and torch.equal(model(x), want)


def test_printed_norms_are_grouped_by_class_and_reason():
    model = nn.Sequential(*(PlainRMSNorm() for _ in range(5)), nn.LayerNorm(COLS), NoisyRMSNorm(), NoisyRMSNorm())
    assert str(fusednorm.patch_model(model)).splitlines() == [
        "replaced 6",
        "  5 x PlainRMSNorm, RMSNorm, written by hand: 0, 1, 2 and 2 more",
        "  1 x LayerNorm, as torch.nn.LayerNorm: 5",
        "left 2",
        "  2 x NoisyRMSNorm, its forward computes something else: 6, 7",
    ]


class Offset(nn.Module):
    eps = 1e-5

    def forward(self, x):
        return x + self.eps


def test_what_calls_itself_no_norm_is_listed_where_it_was_asked_for():
    model = nn.Sequential(Offset())
    assert not fusednorm.patch_model(model).left
    (left,) = fusednorm.patch_model(model, classes=[Offset]).left
    assert fusednorm.patch_model(model, classes=Offset).left == [left]
    assert left == ("0", "Offset", "its forward computes something else")
    for wrong, said in ((model, "Offset"), (3, "3")):
        with pytest.raises(TypeError, match=f"classes must be classes of modules, got {said}"):
            fusednorm.patch_model(model, classes=wrong)


def test_a_block_restores_at_its_end():
    model = nn.Sequential(PlainRMSNorm())
    with fusednorm.patch_model(model) as patch:
        assert type(model[0]) is not PlainRMSNorm and len(patch.replaced) == 1
    assert type(model[0]) is PlainRMSNorm


def test_a_module_with_a_parametrization_is_restored_when_that_is_gone():
    module = made(PlainRMSNorm)
    with fusednorm.patch_model(module) as patch:
        nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert type(module) is not PlainRMSNorm
    patch.restore()
    assert type(module) is PlainRMSNorm


@every_kind
def test_who_kept_a_replaced_forward_runs_the_own_one_after_restore(make):
    module, x = made(make), torch.randn(3, COLS)
    want = module(x)
    with fusednorm.patch_model(module):
        replaced = module.forward
        module.forward = lambda x: replaced(x)
        assert torch.allclose(module(x), want, atol=1e-6)
    assert torch.equal(module(x), want)


def test_a_register_of_classes_does_not_learn_of_those_made_at_run_time():
    registered = {}

    class Registered(nn.Module):
        def __init_subclass__(cls, *, name):
            registered[name] = cls

    class RegisteredRMSNorm(Registered, PlainRMSNorm, name="rms"):
        pass

    class RegisteredLayerNorm(Registered, nn.LayerNorm, name="layer"):
        pass

    model = nn.Sequential(RegisteredRMSNorm(), RegisteredLayerNorm(COLS))
    assert len(fusednorm.patch_model(model).replaced) == 2
    assert registered == {"rms": RegisteredRMSNorm, "layer": RegisteredLayerNorm}


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_class_whose_forward_is_compiled_is_tried_as_it_is_written(fullgraph):
    class CompiledRMSNorm(PlainRMSNorm):
        forward = torch.compile(PlainRMSNorm.forward, backend="eager", fullgraph=fullgraph)

    module, x = made(CompiledRMSNorm), torch.randn(3, COLS)
    with fusednorm.patch_model(module) as patch:
        assert len(patch.replaced) == 1, patch
        y = module(x)
    torch.testing.assert_close(y, module(x))


def test_a_scripted_norm_is_left():
    model = nn.Sequential(torch.jit.freeze(torch.jit.script(nn.LayerNorm(COLS).eval())))
    assert not fusednorm.patch_model(model).replaced


def test_a_class_that_forbids_assignments_is_no_obstacle():
    class FrozenRMSNorm(PlainRMSNorm):
        def __setattr__(self, name, value):
            if "frozen" in vars(self):
                raise AttributeError(name)
            super().__setattr__(name, value)

    module = FrozenRMSNorm()
    module.frozen = True
    with fusednorm.patch_model(module) as patch:
        assert len(patch.replaced) == 1
    assert type(module) is FrozenRMSNorm


@pytest.mark.parametrize("make", [ChannelsFirstRMSNorm, FlatteningRMSNorm])
def test_x_of_a_rank_for_which_the_module_computes_something_else_runs_the_own_forward(make):
    norm, image, text = made(make), torch.randn(2, COLS, 4, COLS), torch.randn(2, 3, COLS)
    want = norm(image), norm(text)
    fusednorm.patch_model(nn.Sequential(norm))
    torch.testing.assert_close((norm(image), norm(text)), want)
    with OpLog() as log:
        norm(image), norm(text)
    assert log.names.count("fusednorm.rms_norm_fwd_affine.default") == 1


def test_x_of_another_width_than_a_norm_without_a_weight_is_of_runs_the_own_forward():
    class GroupedLayerNorm(WideningPlainLayerNorm):
        def forward(self, input):
            return super().forward(input.unflatten(-1, (-1, COLS))).flatten(-2)

    norm, groups = made(GroupedLayerNorm), torch.randn(3, 2 * COLS)
    want = norm(groups)
    assert len(fusednorm.patch_model(norm).replaced) == 1
    assert torch.equal(norm(groups), want)


# RootLayerNorm branches on the weight's dtype, which fx cannot trace.
@pytest.mark.parametrize("make", [each for each in [*BY_HAND, *STOCK] if each is not RootLayerNorm])
def test_a_patched_model_can_be_traced_by_fx(make):
    model, x = nn.Sequential(made(make)), torch.randn(3, COLS)
    fusednorm.patch_model(model)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_models_without_norms_and_what_is_no_norm_are_not_listed():
    patch = fusednorm.patch_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    assert not patch.replaced and not patch.left
    assert str(patch) == "replaced 0\nleft 0"


class DoubledWeightLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return F.layer_norm(input, self.normalized_shape, 2 * self.weight, self.bias, self.eps)


class DoublingLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(2 * input)


@pytest.mark.parametrize("make", [DoubledWeightLayerNorm, DoublingLayerNorm])
def test_a_subclass_that_hands_on_something_else_is_left(make):
    (left,) = fusednorm.patch_model(nn.Sequential(make(COLS))).left
    assert left.note == "its forward computes something else"


def test_a_norm_by_hand_keeps_its_own_forward_for_subclasses_of_tensors():
    module = made(PlainRMSNorm)
    fusednorm.patch_model(module)
    with OpLog() as log:
        module(torch.randn(3, COLS).as_subclass(type("Subclass", (torch.Tensor,), {})))
    assert "aten.rsqrt.default" in log.names
