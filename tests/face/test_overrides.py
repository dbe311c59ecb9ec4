"""What overrides torch's functions (tensor subclasses, torch function modes) sees torch's own layer_norm and rms_norm
where ours stand in for them. Where it only calls what it is given, our kernels still run."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from op_log import OpLog
from torch import Tensor, nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

import fusednorm
from fusednorm import force, functional
from fusednorm.host.kernel_devices import kernels_on

COLS = 8
X = torch.linspace(-1, 2, 3 * COLS).reshape(3, COLS)
STOCK = {"layer": F.layer_norm, "rms": F.rms_norm}


def replaced(module: nn.Module) -> nn.Module:
    assert fusednorm.patch_model(module).replaced
    return module


STAND_INS = {
    "functional": {
        "layer": lambda x: functional.layer_norm(x, (COLS,)),
        "rms": lambda x: functional.rms_norm(x, (COLS,)),
    },
    "module": {"layer": fusednorm.LayerNorm(COLS), "rms": fusednorm.RMSNorm(COLS)},
    "patched": {"layer": replaced(nn.LayerNorm(COLS)), "rms": replaced(nn.RMSNorm(COLS))},
}
norms = pytest.mark.parametrize("norm", STOCK)
stand_ins = pytest.mark.parametrize("kind", STAND_INS)


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    with kernels_on("cpu"), force("reference"):
        yield


def ours_in(log: OpLog) -> list[str]:
    return [name for name in log.names if name.startswith("fusednorm")]


class Counts(TorchFunctionMode):
    """Counts torch's norms, and calls what it is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in STOCK.values():
            self.seen.append(function)
        return function(*args, **(kwargs or {}))


class WithATable(Tensor):
    """Replaces the functions that its table knows."""

    TABLE = dict.fromkeys((F.layer_norm, F.rms_norm), lambda *args, **kwargs: "from the table")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in cls.TABLE:
            return cls.TABLE[function](*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


class Plain(Tensor):
    """Hands every call on, as Tensor's own __torch_function__ does."""


class Wraps(Tensor):
    """Calls what it is given with the tensors inside."""

    @staticmethod
    def __new__(cls, inside):
        made = Tensor._make_subclass(cls, inside)
        made.inside = inside
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*(each.inside if isinstance(each, cls) else each for each in args), **(kwargs or {}))


class Declines(Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


@stand_ins
@norms
def test_a_mode_sees_torchs_function_once_and_what_it_calls_runs_our_op(norm, kind):
    norm_of, want = STAND_INS[kind][norm], STOCK[norm](X, (COLS,))
    with Counts() as outer, Counts() as inner, OpLog() as log:
        y = norm_of(X)
    assert outer.seen == inner.seen == [STOCK[norm]]
    assert ours_in(log) == [f"fusednorm.{norm}_norm_fwd.default"]
    torch.testing.assert_close(y, want)


@stand_ins
@norms
def test_a_subclass_with_a_table_finds_torchs_function_in_it(norm, kind):
    assert STAND_INS[kind][norm](X.as_subclass(WithATable)) == "from the table"
    with Counts() as mode, torch.device("cpu"):
        assert STAND_INS[kind][norm](X.as_subclass(WithATable)) == "from the table"
    assert mode.seen == [STOCK[norm]]


@stand_ins
@norms
@pytest.mark.parametrize("active", [None, Counts, BaseTorchFunctionMode, lambda: torch.device("cpu")])
@pytest.mark.parametrize("look", [Tensor, Plain, Wraps])
def test_what_only_calls_what_it_is_given_reaches_our_op(norm, kind, active, look):
    x = Wraps(X) if look is Wraps else X.as_subclass(look)
    modes = torch._C._len_torch_function_stack()
    with OpLog() as log:
        if active is None:
            y = STAND_INS[kind][norm](x)
        else:
            with active():
                y = STAND_INS[kind][norm](x)
    assert ours_in(log) == [f"fusednorm.{norm}_norm_fwd.default"]
    assert type(y) is (Tensor if look is Wraps else look)
    assert torch._C._len_torch_function_stack() == modes
    torch.testing.assert_close(y.as_subclass(Tensor), STOCK[norm](X, (COLS,)))


@norms
def test_the_default_device_does_not_hide_our_op(norm):
    torch.set_default_device("cpu")
    try:
        with OpLog() as log:
            STAND_INS["module"][norm](X)
        assert ours_in(log) == [f"fusednorm.{norm}_norm_fwd.default"]
        assert type(torch.overrides._get_current_function_mode()).__name__ == "DeviceContext"
    finally:
        torch.set_default_device(None)


@stand_ins
@pytest.mark.parametrize("batch", [(3,), (3, 2)])
def test_expanded_weights_get_the_gradients_of_each_sample(kind, batch):
    def grads(module):
        module = module().to(torch.float64)
        x = torch.randn(*batch, COLS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        call_for_per_sample_grads(module, batch_size=batch[0])(x).square().sum().backward()
        return [parameter.grad_sample for parameter in module.parameters()]

    ours = {"patched": lambda: replaced(nn.LayerNorm(COLS))}.get(kind, lambda: fusednorm.LayerNorm(COLS))
    for got, want in zip(grads(ours), grads(lambda: nn.LayerNorm(COLS)), strict=True):
        assert got.shape == (batch[0], COLS)
        torch.testing.assert_close(got, want)


class WrittenRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(COLS)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def test_a_replaced_norm_written_by_hand_leaves_weights_with_overrides_to_its_own_forward():
    module, multiplied = replaced(WrittenRMSNorm()), []

    class Weight(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            multiplied.append(function is Tensor.mul)
            return super().__torch_function__(function, types, args, kwargs or {})

    weight = torch.ones(COLS).as_subclass(Weight)
    y = torch.func.functional_call(module, {"weight": weight}, (X,))
    assert True in multiplied and type(y) is Weight


@norms
def test_norms_inside_an_override_end(norm):
    class Compares(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is STOCK[norm]:
                with torch.device("cpu"):
                    torch.testing.assert_close(STAND_INS["functional"][norm](args[0]), result)
                    torch.testing.assert_close(STOCK[norm](args[0], (COLS,)), result)
                self.compared = True
            return result

    with Compares() as mode:
        STAND_INS["functional"][norm](X)
    assert mode.compared and not torch._C._len_torch_function_stack()


@norms
def test_an_error_leaves_the_modes_as_they_were(norm):
    with Counts() as outer, torch.device("cpu"), Counts() as inner:
        before = torch.overrides._get_current_function_mode_stack()
        with pytest.raises(RuntimeError, match=f"{norm}_norm_fwd: "):
            getattr(functional, f"{norm}_norm")(X, (COLS + 1,))
        with pytest.raises(TypeError, match=f"no implementation found for 'torch.nn.functional.{norm}_norm'"):
            STAND_INS["functional"][norm](X.as_subclass(Declines))
        assert torch.overrides._get_current_function_mode_stack() == before
    assert len(inner.seen) == len(outer.seen) == 2


@norms
def test_a_mode_of_one_thread_is_not_seen_in_another(norm):
    entered, left = threading.Event(), threading.Event()

    class Waits(Counts):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            entered.set()
            left.wait(60)
            return super().__torch_function__(function, types, args, kwargs)

    logs = []

    def waits():
        with kernels_on("cpu"), force("reference"), OpLog() as log, Waits():
            STAND_INS["module"][norm](X)
        logs.append(ours_in(log))

    thread = threading.Thread(target=waits)
    thread.start()
    assert entered.wait(60)
    stack = torch._C._len_torch_function_stack()
    STOCK[norm](X, (COLS,))
    left.set()
    thread.join()
    assert stack == 0 and logs == [[f"fusednorm.{norm}_norm_fwd.default"]]


class Names(TorchFunctionMode):
    """Notes the names of norms: to modes, torch.compile shows F.rms_norm as torch.rms_norm."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen += [function.__name__] if "norm" in function.__name__ else []
        return function(*args, **(kwargs or {}))


@stand_ins
@norms
@pytest.mark.parametrize("look", [Tensor, Plain])
def test_compiled_calls_show_torchs_function_and_hold_one_op(norm, kind, look):
    graphs = []

    def backend(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return module

    torch._dynamo.reset()
    if look is Plain and norm == "rms" and kind == "functional" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 does not trace its own F.rms_norm of a subclass without a weight")
    with Names() as mode, torch.device("cpu"):
        y = torch.compile(STAND_INS[kind][norm], fullgraph=True, backend=backend)(X.as_subclass(look))
    assert mode.seen == [f"{norm}_norm"] and type(y) is look
    assert [name for name in graphs[0] if "norm_fwd" in name] == [f"fusednorm.{norm}_norm_fwd.default"]
