"""One call: what it returns, and what is wrong with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import fusednorm
from fusednorm import reference
from fusednorm.host import fallback
from fusednorm.operands import OPS, Role, op_outputs, operands_of

from .draw import Call
from .wide import FP32, FP64, Wide, noise, to_wide

RUNS = 5  # with random errors
FACTOR = 1.5  # between the largest scatter of the runs and the bound
MOST_ROWS_OF_ATEN = 65536  # beyond them ATen's LayerNorm may write elsewhere
Said = tuple[Tensor | None, ...]


class Finding(NamedTuple):
    """What one output says. excess: the largest error as a multiple of its bound; not above 1 where it is right."""

    output: str
    excess: float
    atens: float | None
    text: str = ""


def run(call: Call, arguments: dict[str, Any]) -> Said:
    """The op's outputs, in the call's mode. Raises AssertionError unless all threads get the same bits."""
    op = getattr(torch.ops.fusednorm, call.op)
    on_gpu = arguments["x"].is_cuda

    def once() -> Said:
        with fusednorm.force(call.variant):
            outputs = op(**arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def on_a_stream() -> Said:
        if not on_gpu:
            return once()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = once()
        stream.synchronize()
        return outputs

    with fusednorm.sm_margin(call.margin) if on_gpu else contextlib.nullcontext():
        if call.mode != "threads" or not on_gpu:  # the interpreter runs in one thread
            return on_a_stream() if call.mode == "stream" else once()
        results = _in_threads(on_a_stream, 3)
    for other in results[1:]:
        assert_same_bits(other, results[0], "another thread")
    return results[0]


def _in_threads(function: Callable[[], Said], count: int) -> list[Said]:
    results: list[Any] = [None] * count

    def work(at: int) -> None:
        try:
            results[at] = function()
        except Exception as error:
            results[at] = error

    threads = [threading.Thread(target=work, args=(at,)) for at in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in results:
        if isinstance(each, Exception):
            raise each
    return results


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def memory(tensor: Tensor) -> Tensor:
    """All bytes of the storage, margins of a layout included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def assert_same_bits(got: Said, want: Said, of: str) -> None:
    for at, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), f"output {at} is None in one call, but not in {of}"
        assert a is None or torch.equal(bits(a), bits(b)), f"output {at} has other bits in {of}"


def formula(call: Call, arguments: dict[str, Any]) -> Said:
    """The op's formula on wide tensors."""
    wide = tree_map(lambda each: to_wide(each) if isinstance(each, Tensor) else each, arguments)
    outputs = op_outputs(call.op, reference.formula(operands_of(call.op, (), wide)))
    return tuple(each.inner if isinstance(each, Wide) else each for each in outputs)


def check(call: Call, device: str, runner: Callable[[Call, dict], Said] = run) -> list[Finding]:
    """The findings of each output. Raises AssertionError for a fault that is not one of numbers."""
    arguments = call.arguments(device)
    tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
    before = [memory(each).clone() for each in tensors]
    freed = [torch.full_like(each, float("nan")) for each in tensors]  # fresh memory holds NaN
    del freed
    got = runner(call, arguments)
    assert_same_bits(runner(call, arguments), got, "a second call")
    for tensor, kept in zip(tensors, before, strict=True):
        assert torch.equal(memory(tensor), kept), "the call wrote into its operands, or beside them"
    if device == "cuda":
        failed, _ = fallback.failures(), fallback.forget()
        assert not failed, "; ".join(map(str, failed))
    exact = formula(call, arguments)
    scattered = []
    for seed in range(RUNS):
        with noise(seed, device):
            scattered.append(formula(call, arguments))
    atens = atens_outputs(call, arguments) if device == "cuda" else None
    findings = []
    for at, output in enumerate(OPS[call.op].outputs):
        assert (got[at] is None) == (exact[at] is None), f"{output.name} is {got[at]}, its formula is {exact[at]}"
        if got[at] is not None and not (output.role is Role.STATISTIC and 0 in call.normalized_shape):  # of no columns
            rows = len(call.shape) - call.normalized_ndim if got[at].shape == torch.Size(call.shape) else 0
            findings.append(compare(
                output.name, got[at], exact[at], [each[at] for each in scattered], atens and atens[at], rows,
            ))  # fmt: skip
    return findings


def compare(name: str, got: Tensor, exact: Tensor, scattered: list[Tensor], atens: Tensor | None, rows: int) -> Finding:
    """rows: the number of dims before a row, if the output has rows; else 0."""
    assert got.shape == exact.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    assert got.is_contiguous(), f"{name} has strides {got.stride()}"
    if not got.numel():
        return Finding(name, 0.0, None)
    info, rounded = torch.finfo(got.dtype), [each.to(got.dtype).double() for each in (exact, *scattered)]
    finite = torch.stack([each.isfinite() for each in rounded]).all(0)
    scatter = torch.stack([(each - exact).abs() for each in scattered]).amax(0)
    scatter = torch.where(finite, scatter, 0.0)
    if rows:  # what all elements of a row share scatters little in some of them, by chance
        dims = tuple(range(rows, scatter.dim()))
        scatter = scatter.maximum(scatter.square().mean(dims, keepdim=True).sqrt() / 2)
    size = torch.where(finite, exact.abs(), 0.0)
    least = max(info.smallest_normal * info.eps, torch.finfo(FP64 if got.dtype == FP64 else FP32).smallest_normal)
    bound = size * (info.eps / 2) + FACTOR * scatter + least

    def excess_of(value: Tensor) -> Tensor:
        wide = value.double()
        of_numbers = torch.where(finite, (wide - exact).abs() / bound, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        known = torch.stack([_same_kind(wide, each) for each in rounded]).any(0)
        return torch.where(finite | known, of_numbers, torch.inf)

    excess = excess_of(got)
    worst = int(excess.flatten().argmax())
    text = (
        f"{int((excess > 1).sum())} of {excess.numel()} elements, worst at {worst}: got {got.flatten()[worst]:.9g}, "
        f"want {exact.flatten()[worst]:.9g}, bound {bound.flatten()[worst]:.3g}"
    )
    theirs = None if atens is None else excess_of(atens.reshape(got.shape)).amax().item()
    return Finding(name, excess.amax().item(), theirs, text)


def _same_kind(a: Tensor, b: Tensor) -> Tensor:
    """Whether both are finite, NaN, or the same infinity."""
    return torch.where(a.isfinite(), b.isfinite(), (a == b) | (a.isnan() & b.isnan()))


def atens_outputs(call: Call, arguments: dict[str, Any]) -> Said | None:
    """By ATen's op of the same arguments, if there is one and it takes these."""
    op = OPS[call.op]
    tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
    statistics = {FP32, call.dtypes["x"]}
    if op.aten is None or call.rows > MOST_ROWS_OF_ATEN or {each.dtype for each in tensors} - statistics:
        return None
    packed = [each.contiguous() if isinstance(each, Tensor) else each for each in arguments.values()]
    try:
        outputs = getattr(torch.ops.aten, op.aten)(*packed)
    except RuntimeError:
        return None
    return tuple(outputs) if len(outputs) == len(op.outputs) else None
