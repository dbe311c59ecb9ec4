"""Compares calls of our public functions with torch's own: a fuzzer. A call is written as an expression.

    python tests/face/public_face.py --cases 20000                               # 20000 random calls
    python tests/face/public_face.py "gpu: rms_norm(rand((3, 8), half), (8,))"   # one call, as a failure prints it

A call must give torch's answer, raise an error of torch's type, or raise one sentence of ours. No internal error may
show. The expression is evaluated with our functions, with torch's, and with torch's in float64. After the prefix
"gpu: ", our functions call the ops as they do for CUDA tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import formulas
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm
from fusednorm import force, functional
from fusednorm.dtypes import FLOAT_DTYPES
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner.device import KNOWN
from fusednorm.problem.outputs import resolve_eps
from fusednorm.tools.interpreter import enable_interpreter

OPS, ATEN = torch.ops.fusednorm, torch.ops.aten
DTYPES = {
    "half": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "int32": torch.int32, "flag": torch.bool, "complex64": torch.complex64, "fp8": torch.float8_e4m3fn,
}  # fmt: skip
OURS_ALONE = ("explain", "explain_column_sum", "patch_model", "warmup")
# Our errors: one line that names the function, the rule, and the value it got.
NAMES = "layer_norm|rms_norm|column_sum|explain|patch_model|warmup"
SENTENCE = re.compile(rf"^({NAMES})\w*: [^\n]+(, got |, where )[^\n]*$")
SCHEMA = re.compile(r"^fusednorm::\w+\(\) Expected a value of type '.*' for argument '\w+'")  # torch's, for any op
SM_COUNTS = sorted({device.sm_count for device in KNOWN})
INTERNAL = re.compile("internal|data pointer|storage|no attribute|dummy base|an issue|assert|not iterable", re.I)


class Subclass(Tensor):
    pass


class Outcome(NamedTuple):
    values: list[Tensor | None] | None  # outputs, and gradients of all leaves that require one
    error: Exception | None = None


def check(call: str) -> None:
    """Raises AssertionError unless the call keeps the promise at the top of this module."""
    on_gpu, expression = call.startswith("gpu: "), call.removeprefix("gpu: ")
    with contextlib.ExitStack() as stack:
        if on_gpu:
            stack.enter_context(kernels_on("cpu"))
            stack.enter_context(force("reference"))
        got, again = outcome(expression, OURS), outcome(expression, OURS)
    assert type(got.error) is type(again.error), f"first {got.error!r}, then {again.error!r}"
    want = outcome(expression, STOCK)
    if got.error is not None:
        assert_error(got.error, want.error)
    elif not expression.startswith(OURS_ALONE):
        exact = outcome(expression, EXACT)
        assert exact.error is None, f"gives an answer where there is none: {exact.error!r}"
        for value, second in zip(got.values, again.values, strict=True):
            assert value is second is None or value.is_meta or torch.equal(value.nan_to_num(), second.nan_to_num())
        narrow = re.search(r"\b(half|bf16|fp32)\b", expression) is not None
        assert_values(got.values, want.values, exact.values, torch.float32 if narrow else torch.float64)


def assert_error(error: Exception, stock: Exception | None) -> None:
    text = str(error)
    if isinstance(error, (RuntimeError, TypeError, ValueError)) and (SENTENCE.match(text) or SCHEMA.match(text)):
        return
    assert type(error) is type(stock), f"raises {error!r}, stock {stock!r}"
    assert not INTERNAL.search(text) or INTERNAL.search(str(stock)), f"raises {error!r}, stock {stock!r}"


def assert_values(got: list, stock: list | None, exact: list, computed_in: torch.dtype) -> None:
    """The values equal torch's, or are near the exact ones; shapes and dtypes are torch's (statistics may be wider)."""
    assert len(got) == len(exact)
    for i, (value, want) in enumerate(zip(got, exact, strict=True)):
        assert (value is None) == (want is None), f"value {i} is {value}, must be {want}"
        if value is None:
            continue
        assert value.shape == want.shape, f"value {i} has shape {value.shape}, must be {want.shape}"
        theirs = stock[i] if stock is not None and i < len(stock) else None
        assert theirs is None or theirs.dtype in (value.dtype, torch.float16, torch.bfloat16), f"{value.dtype} of {i}"
        if value.is_meta or not value.numel() or (theirs is not None and torch.equal(value, theirs)):
            continue
        size = want.abs().nan_to_num(posinf=0).max().item()
        # The second term: a constant row has rstd 316 for the smallest eps, and rounding errors grow with it.
        atol = 4 * torch.finfo(value.dtype).eps * (1 + size) + 1e4 * torch.finfo(computed_in).eps
        told = f"value {i}: {{}}".format
        torch.testing.assert_close(value.to(want.dtype), want, rtol=0, atol=atol, equal_nan=True, msg=told)


def outcome(expression: str, functions: dict) -> Outcome:
    leaves: list[Tensor] = []
    seeds = itertools.count()

    def rand(shape, dtype=torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(next(seeds))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def leaf(tensor: Tensor) -> Tensor:
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    names = {**MAKERS, **DTYPES, **functions, "rand": rand, "leaf": leaf}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            returned = eval(expression, names)
            if expression.startswith(OURS_ALONE):
                str(returned)
                return Outcome([])
            outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
            # No gradients of column_sum: which of its sums require grad may differ between ours and torch's.
            recorded = [] if expression.startswith("column_sum") else [t for t in outputs if t is not None]
            grads = []
            if leaves and recorded and recorded[0].requires_grad:
                y = recorded[0]
                for grad in (torch.ones_like(y), _alternating(y)):  # of one sign, as a mean's, and of both
                    grads += torch.autograd.grad(y, leaves, grad, retain_graph=True, allow_unused=True)
            flat = [part for each in (*outputs, *grads) for part in parts(each)]
            return Outcome([None if each is None else each.detach() for each in flat])
    except Exception as error:
        return Outcome(None, error)


def _alternating(y: Tensor) -> Tensor:
    """A gradient like y: 1, -2, 3, -1, 2, -3 and so on."""
    if y.is_nested:
        return torch.ones_like(y)
    at = torch.arange(y.numel(), device=y.device).reshape(y.shape)
    return ((at % 3 + 1) * (1 - 2 * (at % 2))).to(y.dtype)


def parts(tensor: Tensor | None) -> list[Tensor | None]:
    return list(tensor.unbind()) if isinstance(tensor, Tensor) and tensor.is_nested else [tensor]


# Makers of unusual operands: the same numbers in another layout, or something that is no strided tensor.
def pad(tensor: Tensor) -> Tensor:
    """The same numbers in a wider buffer, from its second column on."""
    wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 3)) if tensor.dim() else tensor.new_zeros(3)
    view = wide[..., 1 : 1 + tensor.shape[-1]] if tensor.dim() else wide[1]
    return view.copy_(tensor)


def turn(tensor: Tensor) -> Tensor:
    """The same numbers with the dims in reverse order in memory."""
    dims = tuple(range(tensor.dim()))[::-1]
    return tensor.permute(dims).contiguous().permute(dims)


def level(tensor: Tensor) -> Tensor:
    """Each row's first number in all of its columns."""
    return tensor[..., :1].expand_as(tensor).clone() if tensor.dim() else tensor


def onesign(tensor: Tensor) -> Tensor:
    return tensor.abs() if tensor.dtype in FLOAT_DTYPES else tensor


def none_of(tensor: Tensor) -> Tensor:
    """A tensor without elements, as what a process may hold of a sharded parameter."""
    return tensor.new_empty(0)


def freed(tensor: Tensor) -> Tensor:
    """The tensor, without its memory. Nothing may read it."""
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(tensor: Tensor) -> Tensor:
    return torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)


def neg(tensor: Tensor) -> Tensor:
    return torch._neg_view(tensor.neg())


def sub(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Subclass)


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


MAKERS = {
    "pad": pad, "turn": turn, "nested": nested,
    "neg": neg, "sub": sub, "level": level, "onesign": onesign, "meta": meta, "param": nn.Parameter,
    "sparse": Tensor.to_sparse, "numpy": Tensor.numpy, "listed": Tensor.tolist, "torch": torch, "np": np,
    "as_is": lambda tensor: tensor, "none_of": none_of, "freed": freed,
}  # fmt: skip


def module(kind: type, *, wide: bool = False):
    """A function that builds kind(...), sets its parameters to other values than ones and zeros, and calls it with x.
    With `wide`, module and x are in float64."""

    def run(x, *args, **options):
        built = kind(*args, **options)
        for i, parameter in enumerate(built.parameters()):
            parameter.data.copy_(torch.linspace(0.5, 1.5 + i, parameter.numel()).reshape(parameter.shape))
        if wide and kind is nn.RMSNorm and built.eps is None:
            built.eps = resolve_eps(None, x.dtype)
        return built.double()(x.double()) if wide else built(x)

    return run


FORMULAS = {
    "rms": lambda weight, x, rstd: weight * (x * rstd(x)),
    "one_plus": lambda weight, x, rstd: (1 + weight) * (x * rstd(x)),
    "detached": lambda weight, x, rstd: weight * (x * rstd(x.detach())),
    "tanh": lambda weight, x, rstd: weight * torch.tanh(x),
    "clamped": lambda weight, x, rstd: (weight * (x * rstd(x))).clamp(-3, 3),
    "of_few_rows": lambda weight, x, rstd: weight * (x * rstd(x)) * (1 if x.numel() < 16 * x.shape[-1] else 2),
}


class Written(nn.Module):
    """A norm written by hand, or what looks like one."""

    def __init__(self, formula: str, weight: Tensor):
        super().__init__()
        self.formula, self.weight, self.eps = formula, nn.Parameter(weight), 1e-5

    def forward(self, x):
        rstd = lambda x: torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)  # noqa: E731
        return FORMULAS[self.formula](self.weight, x, rstd)


def written(x, formula: str, state: Callable, weight: Tensor, *, patch: bool = False):
    """What a module returns that gets its weight back after it was in a state, while it might have been patched."""
    built = Written(formula, state(weight.detach().clone()))
    if patch:
        fusednorm.patch_model(built)
    built._parameters["weight"] = weight
    return built(x)


def rms_backward(grad_out, x, shape, rstd, weight=None, mask=(True, True)):
    raise RuntimeError("ATen has no such kernel for CPU tensors")


OURS = {
    "layer_norm": functional.layer_norm,
    "rms_norm": functional.rms_norm,
    "LayerNorm": module(fusednorm.LayerNorm),
    "RMSNorm": module(fusednorm.RMSNorm),
    "LayerNormFunction": lambda *args: fusednorm.LayerNormFunction.apply(*args),
    "RMSNormFunction": lambda *args: fusednorm.RMSNormFunction.apply(*args),
    "layer_norm_fwd": OPS.layer_norm_fwd,
    "rms_norm_fwd": OPS.rms_norm_fwd,
    "layer_norm_bwd": OPS.layer_norm_bwd,
    "rms_norm_bwd": OPS.rms_norm_bwd,
    "layer_norm_bwd_residual": OPS.layer_norm_bwd_residual,
    "rms_norm_bwd_residual": OPS.rms_norm_bwd_residual,
    "column_sum": fusednorm.column_sum,
    "written": partial(written, patch=True),
    **{name: getattr(fusednorm, name) for name in OURS_ALONE},
}
STOCK = {
    "layer_norm": F.layer_norm,
    "rms_norm": F.rms_norm,
    "LayerNorm": module(nn.LayerNorm),
    "RMSNorm": module(nn.RMSNorm),
    "LayerNormFunction": ATEN.native_layer_norm,
    "RMSNormFunction": ATEN._fused_rms_norm,
    "layer_norm_fwd": ATEN.native_layer_norm,
    "rms_norm_fwd": ATEN._fused_rms_norm,
    "layer_norm_bwd": ATEN.native_layer_norm_backward,
    "layer_norm_bwd_residual": lambda *args, **more: ATEN.native_layer_norm_backward(*args[:7], args[8]),
    "rms_norm_bwd": rms_backward,
    "rms_norm_bwd_residual": rms_backward,
    "column_sum": lambda inputs, **more: column_sum(inputs, **more),
    "written": written,
    **{name: lambda *args, **more: None for name in OURS_ALONE},
}


def widened(function):
    """The function with all float tensors among its arguments converted to float64."""

    def wide(value):
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            return [wide(each) for each in value]
        if isinstance(value, tuple):  # a shape: torch's ops take True as 1
            return tuple(int(size) if isinstance(size, bool) else size for size in value)
        return value.double() if isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES else value

    def run(*args, **options):
        return function(*map(wide, args), **{name: wide(value) for name, value in options.items()})

    return run


def rms(x, shape, weight=None, eps=None):
    return widened(formulas.rms_norm)(x, shape, weight, resolve_eps(eps, x.dtype))


def column_sum(inputs, *, total=False, dtype=None):
    sums = [each.sum(tuple(range(each.dim() - 1))) if each.dim() > 1 else each for each in inputs]
    sums = [sum(sums[1:], sums[0])] if total else sums
    return [each if dtype is None else each.to(dtype) for each in sums]


def layer_backward(grad_out, x, shape, mean, rstd, weight=None, bias=None, mask=(True, True, True)):
    return formulas.norm_backward(grad_out, x, shape, mean, rstd, weight, bias, mask)


def layer_backward_residual(
    grad_out, x, shape, mean, rstd, weight=None, bias=None, residual=None, mask=(True,) * 3, dx_dtype=None
):
    return formulas.norm_backward(grad_out, x, shape, mean, rstd, weight, bias, mask, residual)


def rms_backward_formula(grad_out, x, shape, rstd, weight=None, mask=(True, True)):
    return formulas.norm_backward(grad_out, x, shape, None, rstd, weight, None, (*mask, False))[:2]


def rms_backward_residual(
    grad_out, x, shape, rstd, weight=None, bias=None, residual=None, mask=(True,) * 3, dx_dtype=None
):
    return formulas.norm_backward(grad_out, x, shape, None, rstd, weight, bias, mask, residual)


EXACT = {
    "layer_norm": widened(lambda x, shape, w=None, b=None, eps=1e-5: F.layer_norm(x, shape, w, b, eps)),
    "rms_norm": lambda *args: rms(*args)[0],
    "LayerNorm": module(nn.LayerNorm, wide=True),
    "RMSNorm": module(nn.RMSNorm, wide=True),
    "LayerNormFunction": widened(lambda x, s, w=None, b=None, e=1e-5: formulas.layer_norm(x, s, w, b, e)),
    "RMSNormFunction": rms,
    "layer_norm_fwd": widened(lambda x, s, w=None, b=None, e=1e-5: formulas.layer_norm(x, s, w, b, e)),
    "rms_norm_fwd": rms,
    "layer_norm_bwd": widened(layer_backward),
    "layer_norm_bwd_residual": widened(layer_backward_residual),
    "rms_norm_bwd": widened(rms_backward_formula),
    "rms_norm_bwd_residual": widened(rms_backward_residual),
    "written": widened(written),
    "column_sum": widened(lambda inputs, *, total=False, dtype=None: column_sum(inputs, total=total)),
}


def calls():
    """A hypothesis strategy of calls: half are right, the others may have one or two strange arguments."""
    from hypothesis import strategies as st

    floats = st.sampled_from(["half", "bf16", "fp32", "fp32", "fp64"])
    dtypes = floats | floats | floats | st.sampled_from([*DTYPES])
    looks = st.sampled_from(["", "", "pad", "turn", "leaf", "leaf", "param", "neg", "sub", "meta", "sparse", "nested",
                             "numpy", "listed"])  # fmt: skip
    usual_looks = st.sampled_from(["", "", "", "pad", "turn", "leaf", "param", "level", "onesign"])
    junk = st.sampled_from(["None", "3", "1.5", "'x'", "[1.0]", "True", "()", "torch.float32", "[None]", "object()"])
    sizes = st.sampled_from([0, 1, 2, 3, 5, 8, 16])
    # The planner's choices change where the rows fill the SMs once more.
    border_rows = st.builds(lambda sms, waves, by: waves * sms + by, st.sampled_from(SM_COUNTS), st.integers(1, 4),
                            st.integers(-1, 1))  # fmt: skip

    @st.composite
    def tensor(draw, shape: list[int], wild: bool):
        if wild and draw(st.booleans()):
            return draw(junk)
        if wild and draw(st.booleans()):
            shape = draw(st.lists(sizes, max_size=4))
        made = f"rand({tuple(shape)}, {draw(dtypes if wild else floats)})"
        look = draw(looks if wild else usual_looks)
        return f"{look}({made})" if look else made

    @st.composite
    def call(draw):
        norm = draw(st.sampled_from(["layer", "rms"]))
        row = draw(st.lists(sizes.filter(bool), min_size=1, max_size=2))
        batch = [draw(border_rows)] if draw(st.integers(0, 7)) == 0 else draw(st.lists(sizes, max_size=2))
        wild = draw(st.sets(st.integers(0, 7), max_size=2)) if draw(st.booleans()) else set()
        everything, rows = [*batch, *row], [torch.Size(batch).numel()]

        def one(position: int, shape: list[int], optional: bool = False) -> str:
            if optional and draw(st.booleans()):
                return "None"
            return draw(tensor(shape, position in wild))

        x, weight, bias = one(0, everything), one(1, row, True), one(2, row, True)
        shape = draw(st.sampled_from(["{0}", "{0}", "{1}", "torch.Size({0})"])).format(tuple(row), row)
        if 3 in wild:
            shape = draw(junk | st.sampled_from(["8", "(8.0,)", "(True,)", "(np.int64(8),)", "(torch.tensor(8),)"]))
        eps = draw(st.sampled_from(["1e-5", "1e-3", "1.0"]))
        if 4 in wild:
            eps = draw(junk | st.sampled_from(["1", "np.float32(1e-3)", "torch.tensor(1e-3)"]))
        parameters = [weight, bias] if norm == "layer" else [weight]
        kind = draw(st.sampled_from(["function"] * 4 + ["module"] * 2 + ["fwd", "Function"] * 2 + ["bwd"] * 3
                                    + ["bwd_residual", "column_sum", "explain", "rest", "written"]))  # fmt: skip
        if kind in ("function", "fwd", "Function"):
            name = {"function": f"{norm}_norm", "fwd": f"{norm}_norm_fwd"}.get(kind)
            name = name or {"layer": "LayerNormFunction", "rms": "RMSNormFunction"}[norm]
            written = f"{name}({', '.join([x, shape, *parameters, eps])})"
        elif kind == "module":
            options = f", eps={eps}" * draw(st.booleans()) + ", elementwise_affine=False" * draw(st.booleans())
            options += f", dtype={draw(floats)}" * draw(st.booleans())
            written = f"{'LayerNorm' if norm == 'layer' else 'RMSNorm'}({x}, {tuple(row)}{options})"
        elif kind in ("bwd", "bwd_residual"):
            statistics = [one(5, rows), one(6, rows)] if norm == "layer" else [one(5, rows)]
            parameters = [weight, bias] if kind == "bwd_residual" else parameters
            mask = [draw(st.booleans()) for _ in range(1 + len(parameters))]
            residual = [one(7, everything, True)] if kind == "bwd_residual" else []
            operands = [one(7, everything), x, shape, *statistics, *parameters, *residual, str(mask)]
            written = f"{norm}_norm_{kind}({', '.join(operands)})"
        elif kind == "column_sum":
            count = draw(st.integers(0, 3))
            inputs = [one(at, everything) for at in range(count)] if 4 in wild else [one(0, everything)] * count
            options = ", total=True" * draw(st.booleans()) + f", dtype={draw(dtypes)}" * draw(st.booleans())
            name = draw(st.sampled_from(["column_sum", "column_sum", "explain_column_sum"]))
            written = f"{name}([{', '.join(inputs)}]{options})"
        elif kind == "written":
            formula = draw(st.sampled_from([*FORMULAS]))
            state = draw(st.sampled_from(["as_is", "as_is", "none_of", "freed"]))
            dtype = draw(floats)  # of both: a promoted result is rounded to x's dtype first
            x, weight = (f"leaf(rand({tuple(each)}, {dtype}))" for each in ([*batch, row[-1]], row[-1:]))
            written = f"written({x}, {formula!r}, {state}, {weight})"
        elif kind == "explain":
            direction = draw(st.sampled_from(["forward", "backward", "up"]))
            written = f"explain({x}, {shape}, {weight}, {bias}, norm={norm!r}, direction={direction!r})"
        else:
            name = draw(st.sampled_from([repr(norm), repr(norm), draw(junk)]))
            warmup = f"warmup({name}, {draw(junk | st.just('8'))}, {draw(dtypes | junk)})"
            written = draw(st.sampled_from([f"patch_model({draw(junk)})", warmup]))
        return "gpu: " * draw(st.booleans()) + written

    return call()


def fuzz(cases: int) -> int:
    from hypothesis import HealthCheck, Phase, given, settings
    from tqdm import tqdm

    with tqdm(total=cases, unit="call") as bar:
        phases, unchecked = [Phase.generate, Phase.shrink], list(HealthCheck)

        @settings(max_examples=cases, deadline=None, database=None, report_multiple_bugs=False, phases=phases,
                  suppress_health_check=unchecked)  # fmt: skip
        @given(calls())
        def try_all(call):
            bar.update(bar.n < cases)
            try:
                check(call)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{reproduction(call)}") from None

        try:
            try_all()
        except AssertionError as error:
            bar.close()
            print(error, file=sys.stderr)
            return 1
    return 0


def reproduction(call: str) -> str:
    return f"python tests/face/public_face.py {shlex.quote(call)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calls", nargs="*", help="expressions to try (default: drawn ones)")
    parser.add_argument("--cases", type=int, default=20_000, help="how many to draw (default: %(default)s)")
    options = parser.parse_args()
    enable_interpreter()  # "gpu: column_sum(...)" runs its kernel in the interpreter
    for call in options.calls:
        check(call)
        print(f"right: {call}")
    return 0 if options.calls else fuzz(options.cases)


if __name__ == "__main__":
    sys.exit(main())
