"""One call: what it returns, and what is wrong with it."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import fusednorm
from fusednorm.dtypes import accumulation_dtype
from fusednorm.host import fallback, native, prepared
from fusednorm.operands import BY_INDEX, OPS, Role

from .draw import TABLE_ROWS, Call
from .wide import FP32, FP64, Said, Wide, passes, to_wide

TRIALS = 8  # further sets of passes for an output beyond its bound: errors of one set may cancel each other in a sum
MOST_OF_ATENS = 2.0  # that an error beyond its bound may be a multiple of
FACTOR = 1.5  # between what the passes miss, all together, and the bound
MOST_ROWS_OF_ATEN = 65536  # beyond them ATen's LayerNorm may write elsewhere
PHASES = "operands", "launches and builds", "float64"
PYTHON, CPP, KEPT = "Python", "C++", "C++, by a program of an earlier call"  # hosts

_variant: list[str | None] = [None]  # that kept programs are of, if C++ may have some: it does not know what is forced


class Finding(NamedTuple):
    """What one output says. excess: the largest error as a multiple of its bound; not above 1 where it is right."""

    output: str
    excess: float
    atens: float | None
    text: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the error is beyond its bound, and beyond ATen's on the same input."""
        atens = self.atens if self.atens and math.isfinite(self.atens) else 0.0
        return self.excess > max(1.0, MOST_OF_ATENS * atens)


class Checked(NamedTuple):
    """What is known of a call. hosts: those that have launched it; seconds: of this process, by PHASES."""

    findings: list[Finding]
    hosts: list[str]
    seconds: dict[str, float]


def run(call: Call, arguments: dict[str, Any], in_cpp: bool = False) -> Said:
    """The op's outputs, in the call's mode: by the host in Python, or else by that in C++ if it takes the call. Raises
    AssertionError unless all threads get the same bits."""
    on_gpu = tensors_of(arguments)[0].is_cuda

    def once() -> Said:
        with contextlib.nullcontext() if in_cpp else fusednorm.force(call.variant):  # which pauses C++, whatever it is
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
    planned = planned_by(call.variant) if in_cpp else contextlib.nullcontext()
    with planned, margin, under(call.setting):
        if call.mode != "threads" or not on_gpu:  # the interpreter runs in one thread
            return on_a_stream() if call.mode == "stream" else once()
        results = _in_threads(on_a_stream, 3)
    differences = Differences()
    for other in results[1:]:
        differences.of(other, results[0], "another thread")
    differences.check()
    return results[0]


def planned_by(variant: str | None) -> contextlib.AbstractContextManager:
    """In which the planner takes a variant, in all threads, and C++ keeps the programs: `force` would pause it."""
    if _variant[0] != variant:
        prepared.forget()
        native.forget()
        _variant[0] = variant
    return mock.patch.object(fallback, "forced_variant", lambda: variant)


def run_in_cpp(call: Call, arguments: dict[str, Any], got: Said, differences: Differences) -> list[str]:
    """Runs the call twice where the host in C++ may take it: the first of its kind leaves a program. Which did. ATen's
    norms, which run where there is none, may add up a copy of a row in another order."""
    hosts, found, before = [], [], native.repeats()
    for host in (KEPT, CPP):
        found.append((run(call, arguments, in_cpp=True), host))
        if native.repeats() > before and CPP not in hosts:
            hosts += [CPP] if host == CPP else [CPP, KEPT]
    for outputs, host in found if hosts else ():
        differences.of(outputs, got, host)
    return hosts


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


class Differences:
    """What must be the same, and is compared at once: a process that asks for one number waits for all others' work."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, str]] = []

    def of(self, got: Said, want: Said, host: str) -> None:
        for at, (a, b) in enumerate(zip(got, want, strict=True)):
            assert (a is None) == (b is None), f"output {at} is None in one call, but not in {host}"
            if a is not None:
                assert a.shape == b.shape and a.dtype == b.dtype, f"output {at} is another tensor in {host}"
                self.add(bits(a) != bits(b), f"output {at} has other bits in {host}")

    def add(self, differs: Tensor, text: str) -> None:
        self.found.append((differs.any(), text))

    def check(self) -> None:
        found = torch.stack([each for each, _ in self.found]).tolist() if self.found else []
        differences = [text for (_, text), differs in zip(self.found, found, strict=True) if differs]
        assert not differences, "; ".join(differences)


def formula(call: Call, arguments: dict[str, Any]) -> tuple[Wide | None, ...]:
    """The op's formula on wide tensors."""
    if "row_index" in arguments:
        return _formula_by_index(call, arguments)
    wide = tree_map(
        lambda each: to_wide(each) if isinstance(each, Tensor) and each.is_floating_point() else each, arguments
    )
    return tuple(call.formula(wide))


def _formula_by_index(call: Call, arguments: dict[str, Any]) -> tuple[Wide | None, ...]:
    """The reference of the op without an index, on gathered rows. The gradients of a table's row are added up."""
    op, index, shape = call.op.removesuffix(BY_INDEX), arguments["row_index"].long(), arguments["x"].shape
    tables = {slot.name: arguments[slot.name] for slot in OPS[op].arguments if slot.role is Role.MODULATION}
    rows = {name: each[index].reshape(shape) for name, each in tables.items() if each is not None}
    acc = accumulation_dtype(*(arguments[name].dtype for name in ("x", "branch") if arguments.get(name) is not None))
    if call.is_backward:  # not rounded before the sum
        rows = {name: each.to(torch.promote_types(each.dtype, acc)) for name, each in rows.items()}
    given = {name: each for name, each in arguments.items() if name != "row_index"} | rows
    found = list(formula(replace(call, op=op), given))
    members = [(index.flatten() == number).nonzero()[:, 0] for number in range(TABLE_ROWS)]
    for at, output in enumerate(OPS[op].outputs):
        if output.role is Role.MODULATION and found[at] is not None:
            table = tables[output.like]
            of_rows = found[at].to(acc).reshape(index.numel(), call.cols)
            sums = [of_rows.index_select(0, of_number).sum(0) for of_number in members]
            sums += [of_rows[:0].sum(0)] * (len(table) - TABLE_ROWS)
            found[at] = torch.stack(sums).to(table.dtype).reshape(table.shape)
    return tuple(found)


def check(call: Call, device: str, runner: Callable[[Call, dict], Said] = run) -> Checked:
    """The findings of each output. Raises AssertionError for a fault that is not one of numbers."""
    times = [time.monotonic()]
    arguments = call.arguments(device)
    tensors, differences, hosts = tensors_of(arguments), Differences(), [PYTHON]
    before = [memory(each).clone() for each in tensors]
    freed = [torch.full_like(each, float("nan")) for each in tensors if each.is_floating_point()]
    del freed  # fresh memory holds NaN
    times.append(time.monotonic())
    got = runner(call, arguments)
    differences.of(runner(call, arguments), got, "a second call")
    if device == "cuda" and native.extension:
        hosts += run_in_cpp(call, arguments, got, differences)
    for tensor, kept in zip(tensors, before, strict=True):
        differences.add(memory(tensor) != kept, "the call wrote into its operands, or beside them")
    differences.check()
    times.append(time.monotonic())
    del before, differences
    if device == "cuda":
        failed, _ = fallback.failures(), fallback.forget()
        assert not failed, "; ".join(map(str, failed))
    judges = judged(call, arguments, got, call.seed, device)
    atens = (atens_outputs(call, arguments) if device == "cuda" else None) or [None] * len(judges)
    found = findings(judges, atens)
    for seed in range(call.seed + 1, call.seed + 1 + TRIALS):
        if not any(each.is_fault for each in found):
            break
        for judge, other in zip(judges, judged(call, arguments, got, seed, device), strict=True):
            if judge is not None:
                judge.widen(other)
        found = findings(judges, atens)
    times.append(time.monotonic())
    seconds = {name: end - begin for name, (begin, end) in zip(PHASES, itertools.pairwise(times), strict=True)}
    return Checked(found, hosts, seconds)


def judged(call: Call, arguments: dict[str, Any], got: Said, seed: int, device: str) -> list[Judge | None]:
    """A judge for each output that says something, of passes whose errors have the signs of this seed."""
    judges: list[Judge | None] = []
    for outputs in passes(lambda: formula(call, arguments), seed, device):
        if not judges:
            judges = [given and Judge(*given, call.is_backward) for given in _paired(call, got, outputs)]
        else:
            for judge, others in zip(judges, outputs, strict=True):
                if judge is not None:
                    judge.add(others)
    return judges


def findings(judges: list[Judge | None], atens: Sequence[Tensor | None]) -> list[Finding]:
    """Of each judge, and of ATen's output where there is one."""
    judged = [each for each in zip(judges, atens, strict=True) if each[0] is not None]
    bounds = [judge.bound() for judge, _ in judged]
    excesses = [judge.excess(judge.got, bound) for (judge, _), bound in zip(judged, bounds, strict=True)]
    largest = [_largest(each) for each in excesses]
    for (judge, aten), bound in zip(judged, bounds, strict=True):
        if aten is not None:
            largest.append(_largest(judge.excess(aten.reshape(judge.got.shape), bound)))
    numbers = torch.stack(largest).tolist() if largest else []
    theirs = iter(numbers[len(judged) :])
    found = []
    for (judge, aten), most, excess, bound in zip(judged, numbers[: len(judged)], excesses, bounds, strict=True):
        text = judge.worst(excess, bound) if most > 1 else ""
        found.append(Finding(judge.name, most, None if aten is None else next(theirs), text))
    return found


def _largest(excess: Tensor) -> Tensor:
    return excess.amax() if excess.numel() else excess.new_zeros(())


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
    that one of them has: a number, NaN, inf or -inf; any number lies between inf and -inf. Where they disagree on that
    (rstd of denormal numbers with eps 0 is beyond float32), inf and NaN are as good as each other, as they are in ATen.
    So they are where inf - inf depends on the order of a sum: in a gradient, and in a mean, to which the mean of the
    deviations from it is added, or from that of some elements."""

    def __init__(self, name: str, got: Tensor, exact: Tensor, is_gradient: bool):
        assert got.shape == exact.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
        assert got.is_contiguous(), f"{name} has strides {got.stride()}"
        self.name, self.got, self.exact = name, got, exact
        self.subtracts_infinities = is_gradient or name == "mean"
        self.missed = torch.zeros_like(exact)  # by all passes together
        self.seen = kinds(exact.to(got.dtype))

    def add(self, others: Tensor) -> None:
        """Outputs of several passes, [passes, *shape]."""
        self.missed += (others - self.exact).abs().sum(0)
        for each in kinds(others.to(self.got.dtype)):
            self.seen |= each

    def widen(self, other: Judge) -> None:
        """By another set of passes."""
        self.missed = torch.maximum(self.missed, other.missed)
        self.seen |= other.seen

    def bound(self) -> Tensor:
        got, exact = self.got, self.exact
        info = torch.finfo(got.dtype)
        least = max(info.smallest_normal * info.eps, torch.finfo(FP64 if got.dtype == FP64 else FP32).smallest_normal)
        near = exact.abs() * (info.eps / 2) + FACTOR * self.missed
        return torch.where(self.seen == NUMBER, near, 0.0) + least

    def excess(self, value: Tensor, bound: Tensor) -> Tensor:
        """Of each element, as a multiple of its bound."""
        finite = self.seen == NUMBER
        disagree = (self.seen & NUMBER != 0) & ~finite
        if self.subtracts_infinities:
            disagree |= self.seen & NOT_A_NUMBER != 0
        allowed = torch.where(disagree, self.seen | NOT_A_NUMBER, self.seen)
        allowed = torch.where(self.seen & INFINITE == INFINITE, allowed | NUMBER, allowed)
        error = torch.where(finite, (value.double() - self.exact).abs() / bound, 0.0)
        return torch.where(kinds(value) & allowed != 0, error.nan_to_num(nan=torch.inf), torch.inf)

    def worst(self, excess: Tensor, bound: Tensor) -> str:
        worst = int(excess.flatten().argmax())
        got, want, bound = (each.flatten()[worst].item() for each in (self.got, self.exact, bound))
        wrong = f"{int((excess > 1).sum())} of {excess.numel()} elements"
        return f"{wrong}, worst at {worst}: got {got:.9g}, want {want:.9g}, bound {bound:.3g}"


NUMBER, NOT_A_NUMBER, INFINITE = 1, 2 + 4 + 8, 4 + 8  # kinds, as bits


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
