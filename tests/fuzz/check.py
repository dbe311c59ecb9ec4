"""One call: what it returns, and what is wrong with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import fusednorm
from fusednorm.host import fallback
from fusednorm.operands import OPS

from .draw import Call
from .wide import FP32, FP64, Said, Wide, passes, to_wide

FACTOR = 1.5  # between what the passes miss, all together, and the bound
MOST_ROWS_OF_ATEN = 65536  # beyond them ATen's LayerNorm may write elsewhere


class Finding(NamedTuple):
    """What one output says. excess: the largest error as a multiple of its bound; not above 1 where it is right."""

    output: str
    excess: float
    atens: float | None
    text: str = ""


def run(call: Call, arguments: dict[str, Any]) -> Said:
    """The op's outputs, in the call's mode. Raises AssertionError unless all threads get the same bits."""
    on_gpu = tensors_of(arguments)[0].is_cuda

    def once() -> Said:
        return call.run(arguments)

    def on_a_stream() -> Said:
        if not on_gpu:
            return once()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = once()
        stream.synchronize()
        return outputs

    margin = fusednorm.sm_margin(call.margin) if on_gpu else contextlib.nullcontext()
    with margin, under(call.setting):
        if call.mode != "threads" or not on_gpu:  # the interpreter runs in one thread
            return on_a_stream() if call.mode == "stream" else once()
        results = _in_threads(on_a_stream, 3)
    for other in results[1:]:
        assert_same_bits(other, results[0], "another thread")
    return results[0]


def under(setting: int | None) -> contextlib.AbstractContextManager:
    if setting is None:
        return contextlib.nullcontext()
    return fusednorm.batch_invariant(ordered_sums=setting if setting > 0 else None)


def tensors_of(arguments: dict[str, Any]) -> list[Tensor]:
    return [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]


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
    return tuple(each.inner if isinstance(each, Wide) else each for each in call.formula(wide))


def check(call: Call, device: str, runner: Callable[[Call, dict], Said] = run) -> list[Finding]:
    """The findings of each output. Raises AssertionError for a fault that is not one of numbers."""
    arguments = call.arguments(device)
    tensors = tensors_of(arguments)
    before = [memory(each).clone() for each in tensors]
    freed = [torch.full_like(each, float("nan")) for each in tensors]  # fresh memory holds NaN
    del freed
    got = runner(call, arguments)
    assert_same_bits(runner(call, arguments), got, "a second call")
    for tensor, kept in zip(tensors, before, strict=True):
        assert torch.equal(memory(tensor), kept), "the call wrote into its operands, or beside them"
    del before
    if device == "cuda":
        failed, _ = fallback.failures(), fallback.forget()
        assert not failed, "; ".join(map(str, failed))
    judges: list[Judge | None] = []
    for outputs in passes(lambda: formula(call, arguments), call.seed, device):
        if not judges:
            judges = [given and Judge(*given) for given in _paired(call, got, outputs)]
        else:
            for judge, other in zip(judges, outputs, strict=True):
                if judge is not None:
                    judge.add(other)
    atens = (atens_outputs(call, arguments) if device == "cuda" else None) or [None] * len(judges)
    return [judge.finding(theirs) for judge, theirs in zip(judges, atens, strict=True) if judge is not None]


def _paired(call: Call, got: Said, exact: Said) -> list[tuple[str, Tensor, Tensor] | None]:
    """Each output's name, what the call returned and what is exact; None for an output that says nothing."""
    pairs: list[tuple[str, Tensor, Tensor] | None] = []
    for name, ours, want in zip(call.names, got, exact, strict=True):
        assert (ours is None) == (want is None), f"{name} is {ours}, its formula is {want}"
        pairs.append(None if ours is None or call.says_nothing(name) else (name, ours, want))
    return pairs


class Judge:
    """One output against the passes of its formula.

    Where the passes are finite numbers, the output is near them. Where they leave the dtype's range, it is of a kind
    that one of them has: a number, NaN, inf or -inf. Where they disagree on that (rstd of denormal numbers with eps 0
    is beyond float32), inf and NaN are as good as each other, as they are in ATen."""

    def __init__(self, name: str, got: Tensor, exact: Tensor):
        assert got.shape == exact.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
        assert got.is_contiguous(), f"{name} has strides {got.stride()}"
        self.name, self.got, self.exact = name, got, exact
        self.missed = torch.zeros_like(exact)  # by all passes together
        self.seen = self.kinds(exact)

    def kinds(self, wide: Tensor) -> Tensor:
        return kinds(wide.to(self.got.dtype))

    def add(self, other: Tensor) -> None:
        self.missed += (other - self.exact).abs()
        self.seen |= self.kinds(other)

    def finding(self, atens: Tensor | None) -> Finding:
        got, exact = self.got, self.exact
        if not got.numel():
            return Finding(self.name, 0.0, None)
        info, finite = torch.finfo(got.dtype), self.seen == NUMBER
        least = max(info.smallest_normal * info.eps, torch.finfo(FP64 if got.dtype == FP64 else FP32).smallest_normal)
        bound = torch.where(finite, exact.abs() * (info.eps / 2) + FACTOR * self.missed, 0.0) + least
        disagree = (self.seen & NUMBER != 0) & ~finite
        allowed = torch.where(disagree, self.seen | NOT_A_NUMBER, self.seen)

        def excess_of(value: Tensor) -> Tensor:
            error = torch.where(finite, (value.double() - exact).abs() / bound, 0.0)
            return torch.where(kinds(value) & allowed != 0, error.nan_to_num(nan=torch.inf), torch.inf)

        excess = excess_of(got)
        worst = int(excess.flatten().argmax())
        text = (
            f"{int((excess > 1).sum())} of {excess.numel()} elements, worst at {worst}: got "
            f"{got.flatten()[worst]:.9g}, want {exact.flatten()[worst]:.9g}, bound {bound.flatten()[worst]:.3g}"
        )
        theirs = None if atens is None else excess_of(atens.reshape(got.shape)).amax().item()
        return Finding(self.name, excess.amax().item(), theirs, text)


NUMBER, NOT_A_NUMBER = 1, 2 + 4 + 8  # kinds, as bits


def kinds(tensor: Tensor) -> Tensor:
    """The kind of each element: a number, NaN, inf or -inf."""
    kind = 1 + tensor.isnan().to(torch.uint8)
    return torch.where(tensor.isinf(), torch.where(tensor > 0, 4, 8).to(torch.uint8), kind)


def atens_outputs(call: Call, arguments: dict[str, Any]) -> Said | None:
    """By ATen's op of the same arguments, if there is one and it takes these."""
    if call.op not in OPS:
        return None
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
