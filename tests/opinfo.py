"""PyTorch's own samples for the norms (its OpInfos): arguments as its test suite tries them, wrong ones included."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import fusednorm
from bench.written import FUNCTIONS, SETTINGS, modulations_of, rows_of
from fusednorm.dtypes import accumulation_dtype
from fusednorm.operands import OPS

OPEN = 40.0  # a gate whose sigmoid is 1
NAMES = ("nn.functional.layer_norm", "native_layer_norm", "nn.functional.rms_norm")
FUNCTIONALS = {
    "nn.functional.layer_norm": fusednorm.functional.layer_norm,
    "native_layer_norm": torch.ops.fusednorm.layer_norm_fwd,
    "nn.functional.rms_norm": fusednorm.functional.rms_norm,
}


def of_form(form: str) -> Callable:
    """Its function, given operands that make it the plain norm."""

    def function(norm: str, x: Tensor, normalized_shape: tuple[int, ...], **more) -> Tensor:
        op = OPS[f"{norm}_fwd_{form}"]
        dtype = wider(x) if form == "of_wide_sum" else x.dtype
        more |= SETTINGS.get(form, {}) | ({"activation": "sigmoid"} if op.form.activates else {})
        for name in rows_of(op)[1:]:
            more[name] = torch.full_like(x, OPEN if name == "gate" else 0.0, dtype=dtype)
        for name in modulations_of(op):
            more[name] = x.new_full(normalized_shape, float(name == "gate"))
        outputs = getattr(fusednorm, FUNCTIONS[form].format(norm))(x, normalized_shape=normalized_shape, **more)
        return (outputs[0] if op.form.rows_out else outputs).to(x.dtype)

    return function


def wider(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize == 2 else torch.float64


def gated(norm: str, x: Tensor, before: bool, normalized_shape, packed: bool = False, **more) -> Tensor:
    """The norm of the first of two groups of columns, whose gate is open."""
    cols = math.prod(normalized_shape)
    rows = pad(x.reshape(*x.shape[: x.dim() - len(normalized_shape)], cols), (0, cols))
    more = {name: pad(each.flatten(), (0, cols)) if isinstance(each, Tensor) else each for name, each in more.items()}
    more |= {"activation": "sigmoid", "norm_before_gate": before, "group_size": cols}
    if packed:
        columns = pad(rows, (2 * cols, 0), value=OPEN), (2 * cols, 4 * cols), (0, 2 * cols)
        y, *_ = getattr(fusednorm, f"{norm}_gated_packed")(*columns, **more)
    else:
        y = getattr(fusednorm, f"{norm}_gated")(rows, torch.full_like(rows, OPEN), **more)
    return y[..., :cols].reshape(x.shape).contiguous()


def of_a_head(
    norm: str, x: Tensor, normalized_shape, weight=None, bias=None, eps: float | None = None, packed: bool = False,
    heads: int = 1,
) -> Tensor:  # fmt: skip
    """The norm of q as qk_norm has it, where every row is the one head of a token, or its heads that are normalized
    together, with a rotation by 0 if they have a pair of columns; k has as many."""
    cols = math.prod(normalized_shape)
    heads = heads if cols % heads == 0 and (weight is not None or bias is not None) else 1
    q = x.reshape(x.numel() // cols if cols else 0, 1, heads, cols // heads)
    weight, bias = (each if each is None else each.flatten() for each in (weight, bias))
    more = {"q_bias": bias, "norm": norm.removesuffix("_norm")}
    if packed:
        y, *_ = fusednorm.qk_norm_packed(pad(q, (0, 2 * cols)).flatten(1, 2), 1, 1, weight, None, eps, **more)
    else:
        turned = cols // heads // 2 * 2 if heads > 1 else 0
        more["rotary"] = (x.new_ones(1, turned), x.new_zeros(1, turned)) if turned else None
        y, _ = fusednorm.qk_norm(q, torch.zeros_like(q), weight, None, eps, **more)
    return y.reshape(x.shape)


FORMS = {form: of_form(form) for form in FUNCTIONS} | {  # and other norms that are the plain one of such operands
    "of a head": of_a_head,
    "of a head, packed": functools.partial(of_a_head, packed=True),
    "of all heads": functools.partial(of_a_head, heads=2),
    "of a narrower sum": lambda norm, x, **more: getattr(fusednorm, f"add_{norm}")(
        x, torch.zeros_like(x, dtype=torch.bfloat16), residual_dtype=x.dtype, **more
    )[0].to(x.dtype),
    "times a gate, in groups": functools.partial(gated, before=True),
    "of a gated row, in groups": functools.partial(gated, before=False),
    "times a gate, packed": functools.partial(gated, before=True, packed=True),
    "of a gated row, packed": functools.partial(gated, before=False, packed=True),
    "of a column sum": lambda norm, x, **more: getattr(fusednorm, f"affine_{norm}")(
        fusednorm.column_sum([torch.stack([x, torch.zeros_like(x)]).flatten(1)])[0].view(x.shape), **more
    ),
}


def as_form(form: str, name: str) -> Callable:
    """The form with the signature of torch's function."""
    norm = name.rpartition(".")[2].removeprefix("native_")

    def function(x, normalized_shape, *args, **kwargs):
        names = ("weight", "bias", "eps") if norm == "layer_norm" else ("weight", "eps")
        given = dict(zip(names, args, strict=False)) | kwargs
        return FORMS[form](norm, x, normalized_shape=tuple(normalized_shape), **given)

    return function


MODULES = {"nn.LayerNorm": fusednorm.LayerNorm, "nn.RMSNorm": fusednorm.RMSNorm}


@functools.cache
def _all_op_infos() -> dict:
    from torch.testing._internal.common_methods_invocations import op_db

    # Importing torch's test code forbids the whole process to set backend flags: allow it again.
    torch.backends.__allow_nonbracketed_mutation_flag = True
    return {op.name: op for op in op_db}


def op_info(name: str):
    """The OpInfo of an op; skips where torch's test code cannot be imported."""
    _skip_without_torchs_tests()
    return _all_op_infos()[name]


def _skip_without_torchs_tests() -> None:
    pytest.importorskip("expecttest", reason="torch's own samples need the package expecttest")


def samples(name: str, device: str) -> list[tuple[torch.dtype, object]]:
    """(dtype, sample) for each dtype that the op takes on the device; the same numbers on each call."""
    torch.manual_seed(0)
    op = op_info(name)
    dtypes = sorted(op.supported_dtypes(device), key=str)
    return [(dtype, s) for dtype in dtypes for s in op.sample_inputs(device, dtype, requires_grad=True)]


@functools.cache
def answered_samples(name: str, device: str) -> list[tuple[object, dict, dict]]:
    """(sample, what torch's function returns, what it returns in float64) for each dtype that is real."""
    function = op_info(name).op
    real = [sample for dtype, sample in samples(name, device) if not dtype.is_complex]
    return [(sample, run(function, sample), run(function, in_float64(sample))) for sample in real]


@functools.cache
def finite_samples(name: str, device: str) -> list:
    """The float64 samples whose results can be differentiated numerically: not those with a negative eps."""
    found = [sample for dtype, sample in samples(name, device) if dtype == torch.float64]
    return [each for each in found if run(op_info(name).op, each)["y"].isfinite().all()]


def module_samples(name: str, device: str) -> list[tuple[torch.nn.Module, object]]:
    """(module, sample) for each of ModuleInfo's inputs and dtypes. The sample's parameters are the module's."""
    _skip_without_torchs_tests()
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.opinfo.core import SampleInput

    torch.manual_seed(0)
    info = next((each for each in module_db if each.name == name), None)
    if info is None:
        pytest.skip(f"this torch has no samples of {name}")
    found = []
    for dtype in info.dtypes:
        for each in info.module_inputs_func(info, device, dtype, requires_grad=True, training=True):
            given = each.constructor_input
            module = info.module_cls(*given.args, **given.kwargs).to(device, dtype)
            parameters = [getattr(module, kind) for kind in ("weight", "bias") if hasattr(module, kind)]
            args = (module.normalized_shape, *parameters, module.eps)
            found.append((module, SampleInput(each.forward_input.args[0], args=args)))
    return found


def wrong_samples(name: str, device: str) -> list:
    op = op_info(name)
    return [] if op.error_inputs_func is None else list(op.error_inputs(device))


def in_float64(sample):
    """The same sample in float64: its results are the reference for the other dtypes."""

    def widen(value):
        return value.detach().double().requires_grad_() if isinstance(value, Tensor) else value

    return sample.transform(widen)


def run(function, sample) -> dict[str, Tensor | None]:
    """What a norm returns for a sample, and the gradients of its operands."""
    operands = [value for value in (sample.input, *sample.args) if isinstance(value, Tensor)]
    outputs = function(sample.input, *sample.args, **sample.kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    y = outputs[0]
    grad = torch.arange(y.numel(), device=y.device).remainder(9).sub(4).div(4)  # exact in every dtype
    grads = torch.autograd.grad(y, operands, grad.reshape(y.shape).to(y.dtype), allow_unused=True)
    named = dict(zip(("y", "mean", "rstd"), outputs, strict=False))
    named |= {f"gradient of operand {i}": grad for i, grad in enumerate(grads)}
    return {name: None if t is None else t.detach() for name, t in named.items()}


def assert_right(got: dict, exact: dict, stock: dict, sample) -> None:
    """`got` is near `exact`, and has the shapes, strides and dtypes of `stock`.

    The bound grows with the largest element and the largest rstd, which multiplies the rounding errors of x and dy.
    """
    assert got.keys() == stock.keys()
    rstd = _largest_rstd(sample)
    for name, value in got.items():
        assert (value is None) == (stock[name] is None), name
        if value is None:
            continue
        want, kind = exact[name], accumulation_dtype(sample.input.dtype)
        # Nothing is laid out in an empty tensor: its strides differ between ATen's own kernels.
        laid_out, wanted = [(tuple(t.shape), t.stride() if t.numel() else None) for t in (value, stock[name])]
        assert laid_out == wanted, f"{name} of {sample.summary()}, strides of x {sample.input.stride()}"
        # ATen's CPU kernel, unlike CUDA's and ours, returns 16-bit statistics for 16-bit x.
        assert value.dtype == stock[name].dtype or (name in ("mean", "rstd") and value.dtype == kind), name
        size = want.nan_to_num().abs().max().item() if want.numel() else 0.0
        atol = 2 * torch.finfo(value.dtype).eps * size + 320 * torch.finfo(kind).eps * (1 + rstd)
        told = f"{name}: {{}}".format
        torch.testing.assert_close(value.double(), want, rtol=0, atol=atol, equal_nan=True, msg=told)


def _largest_rstd(sample) -> float:
    if not sample.input.numel():
        return 0.0
    eps = sample.kwargs.get("eps") or next((a for a in sample.args if isinstance(a, float)), 1e-5)
    x, dims = sample.input.detach().double(), tuple(range(-len(sample.args[0]), 0))
    centered = x - x.mean(dims, keepdim=True)
    return max(torch.rsqrt(t.square().mean(dims) + eps).nan_to_num().max().item() for t in (x, centered))


class OnTorchsSamples:
    """Tests for the files that inherit them. Each file names its device and its ways: contexts in which torch's
    function, or else the one that replaces it, runs our kernels."""

    device: str
    names: tuple[str, ...] = NAMES  # whose samples are tried
    ways: dict[str, Callable[[], contextlib.AbstractContextManager]]  # "override" runs torch's function

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "way" in metafunc.fixturenames:
            metafunc.parametrize("way", self.ways)
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.names)

    def function(self, way: str, name: str) -> Callable:
        if way in FORMS:
            return as_form(way, name)
        return op_info(name).op if way == "override" else FUNCTIONALS[name]

    def test_derivatives_of_both_orders_are_those_of_the_function(self, name, way):
        tried = [sample for sample in finite_samples(name, self.device) if sample.input.numel()]
        assert tried
        for sample in tried:
            places = [at for at, value in enumerate(sample.args) if isinstance(value, Tensor)]
            leaves = [sample.input, *[sample.args[at] for at in places]]

            def y(x, *parameters, places=places, sample=sample):
                args = list(sample.args)
                for at, parameter in zip(places, parameters, strict=True):
                    args[at] = parameter
                outputs = self.function(way, name)(x, *args, **sample.kwargs)
                return outputs[0] if isinstance(outputs, tuple) else outputs

            with self.ways[way]():
                assert torch.autograd.gradcheck(y, leaves, fast_mode=True)
                # ATen's second derivative for a bias without a weight misses dbias's part (docs/numerics.md).
                if way != "override" or len(places) != 1 or places[0] != 2:
                    assert torch.autograd.gradgradcheck(y, leaves, fast_mode=True)

    def test_transforms_are_those_of_torchs_function(self, name, way):
        """functorch's checks of an op: vmap against a loop, vjp and jvp, alone and under vmap."""

        def everything(function, sample) -> list[Tensor]:
            def y(x):
                outputs = function(x, *sample.args, **sample.kwargs)
                return outputs[0] if isinstance(outputs, tuple) else outputs

            x = sample.input.detach()
            batch, tangent = torch.stack([x, 2 * x + 1, -x]), torch.linspace(-1, 1, x.numel()).to(x).view_as(x)
            loop = torch.stack([y(each) for each in batch])
            torch.testing.assert_close(torch.func.vmap(y)(batch), loop)
            torch.testing.assert_close(torch.func.vmap(y, in_dims=1)(batch.movedim(0, 1)), loop)

            def derivatives(each):
                value, pull = torch.func.vjp(y, each)
                return value, *pull(tangent), *torch.func.jvp(y, (each,), (tangent,))

            return [loop, *derivatives(x), *torch.func.vmap(derivatives)(batch)]

        tried = [
            sample.transform(lambda value: value.detach() if isinstance(value, Tensor) else value)
            for sample in finite_samples(name, self.device)
        ]
        wanted = [everything(op_info(name).op, sample) for sample in tried]
        with self.ways[way]():
            got = [everything(self.function(way, name), sample) for sample in tried]
        torch.testing.assert_close(got, wanted)

    @pytest.mark.parametrize("module", MODULES)
    def test_modules_on_their_own_samples_come_out_right(self, module, way):
        stock_function = getattr(torch.nn.functional, {"nn.LayerNorm": "layer_norm", "nn.RMSNorm": "rms_norm"}[module])
        tried = module_samples(module, self.device)
        assert tried

        def results(modules) -> list[dict]:
            return [run(lambda x, *_, to=to: to(x), sample) for to, (_, sample) in zip(modules, tried, strict=True)]

        stocks = results([stock for stock, _ in tried])
        with self.ways[way]():
            got = results([stock if way == "override" else as_ours(module, stock) for stock, _ in tried])
        for ours, theirs, (_, sample) in zip(got, stocks, tried, strict=True):
            assert_right(ours, run(stock_function, in_float64(sample)), theirs, sample)


class FormsOnTorchsSamples(OnTorchsSamples):
    """The same for functions that are no norm of torch's, but equal one for some operands."""

    names = NAMES[1:]  # native_layer_norm has the samples of layer_norm, and more
    ways = dict.fromkeys(FORMS, contextlib.nullcontext)
    test_modules_on_their_own_samples_come_out_right = None  # forms have modules of another signature

    def test_samples_come_out_right(self, name, way):
        for sample, stock, exact in answered_samples(name, self.device):
            got = run(self.function(way, name), sample)  # without statistics
            assert_right(got, exact, {key: stock[key] for key in got}, sample)


def as_ours(name: str, stock: torch.nn.Module) -> torch.nn.Module:
    """Our module with the same parameters."""
    module = MODULES[name](stock.normalized_shape, stock.eps, elementwise_affine=stock.elementwise_affine)
    for kind, parameter in stock.named_parameters():
        setattr(module, kind, parameter)
    if getattr(stock, "bias", None) is None and name == "nn.LayerNorm":
        module.bias = None
    return module
