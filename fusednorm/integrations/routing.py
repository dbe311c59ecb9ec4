"""Decides which norms of a traced graph run this package's ops and which Inductor's code, and reports the decisions.

Decompositions decide by what they see: fake tensors, whose sizes may be symbols. What depends on a norm's neighbours is
decided when the graph is known (folding.py, forwards.py). Decisions depend on dtype, device and row length, never on
the number of rows, so that one graph serves any number.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import SymInt
from torch._inductor import decomposition
from torch._inductor.virtualized import V
from torch.fx import Node
from torch.fx.traceback import get_current_meta

from .. import reference
from ..forms import PLAIN
from ..host import gpus
from ..namespace import TORCH_OPS
from ..operands import BACKWARD, FORWARD, OPS, Op, as_op, operands_of, wanted_outputs
from ..ops import WITH_OPTIONAL_OUTPUTS
from ..planner import legality
from ..planner.norm_problem import NormProblem
from ..problem.validation import validate

aten, ours = torch.ops.aten, TORCH_OPS
DEVICE_TYPES = ("cuda",)
TORCH = str(Path(torch.__file__).parent)

# Forwards of rows with at least this many columns run our kernel, narrower ones Inductor's code, unless forwards.py
# decides on them. Inductor reads a row for its statistics and again to normalize it. In narrow rows the second read is
# cheap, and fusion with the neighbours saves more than our kernel would (bench/NOTES.md, "Compiled models").
WIDE_ROW = 40960  # columns
NARROW = f"fused with its neighbours, and rows have fewer than {WIDE_ROW} columns"


class Entry(NamedTuple):
    """A traced norm. `taken` says whether our kernel runs it. Sizes in `shape` may be symbols, as text. `place` is the
    module that computes it, without the numbers of layers, or the line of code outside of modules."""

    norm: str
    direction: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    device: str
    taken: bool
    reason: str
    form: str = ""
    place: str = ""

    def __str__(self) -> str:
        shape, dtype = "x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")
        runs = "fusednorm" if self.taken else "Inductor"
        norm = f"{self.norm}_norm{' ' * bool(self.form)}{self.form} {self.direction}"
        where = f"{self.device}{' in ' * bool(self.place)}{self.place}"
        return f"{norm} {shape} {dtype} on {where}: {runs} ({self.reason})"


class Report(dict[Entry, int]):
    """The traced norms, with the number of each kind. print() lists them."""

    def __str__(self) -> str:
        return "\n".join(f"{count} x {entry}" for entry, count in self.items()) or "no norm was traced"


_traced: Counter[Entry] = Counter()
_notes: ContextVar[list[tuple[str | None, Entry]] | None] = ContextVar("fusednorm_notes", default=None)
# Names of ops in source_fn_stack, with a number: of a norm by hand; of one that replaces more than a norm.
MARK, JOINED = "fusednorm, by hand ", "fusednorm, joined "


def report(*, clear: bool = False) -> Report:
    """The decision for each norm that this process traced for Inductor, with its reason. `clear` empties the record.

    A graph from a compile cache is not traced and not listed. The process that compiled it made its decisions.
    """
    result = Report(_traced)
    if clear:
        _traced.clear()
    return result


def note(op: Op, x: torch.Tensor, taken: bool, reason: str, meta: dict[str, Any], form: str = "") -> None:
    """Note the decision for a norm. meta is that of its node."""
    shape = tuple(str(size) if isinstance(size, SymInt) else size for size in x.shape)
    entry = Entry(op.norm, op.direction, shape, x.dtype, x.device.type, taken, reason, form, place_of(meta))
    _traced[entry] += 1
    if (notes := _notes.get()) is not None:
        notes.append((mark_of(meta), entry))


@contextlib.contextmanager
def noting() -> Iterator[Callable[[Container[str]], None]]:
    """Gives a function that takes back what was noted in the block, but why the norms with these marks were left."""
    notes: list[tuple[str | None, Entry]] = []

    def forget(but: Container[str]) -> None:
        _traced.subtract(entry for mark, entry in notes if mark not in but or entry.taken)
        for entry in [entry for entry, count in _traced.items() if not count]:
            del _traced[entry]

    token = _notes.set(notes)
    try:
        yield forget
    finally:
        _notes.reset(token)


def mark(op: Node, name: str) -> None:
    """Name an op of Dynamo's graph in its stack of sources."""
    op.meta["source_fn_stack"] = [*op.meta.get("source_fn_stack", ()), (name, op.target)]


def is_joined(mark: str | None) -> bool:
    return mark is not None and mark.startswith(JOINED)


def mark_of(meta: dict[str, Any]) -> str | None:
    """The mark of the op that rewriting.py made, of its node or of one of its backward."""
    return next(iter(marks_of(meta)), None)


def marks_of(meta: dict[str, Any]) -> list[str]:
    """The marks of the norms that a node computes."""
    stack = meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack") or ()
    return [name for name, _ in stack if name.startswith((MARK, JOINED))]


def place_of(meta: dict[str, Any]) -> str:
    """The place that a node of Dynamo or AOTAutograd comes from."""
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if modules:
        path = [*modules.values()][-1][0]
        path = re.sub(r"^L\['\w+'\](\[\d+\])?", "", path)
        path = re.sub(r"__dict__\['_modules'\]\['(\w+)'\]", r"\1", path).strip(".")  # of a class with __getattr__
        return re.sub(r"\b\d+\b", "*", path)
    lines = [line.strip() for line in (meta.get("stack_trace") or "").splitlines()]
    return next((line for line in reversed(lines) if line.startswith("File ") and TORCH not in line), "")


def form_of(op: Op, arguments: dict[str, Any]) -> str:
    """What the op's FormSpec says beside the plain norm's."""
    form = operands_of(op.name, (), arguments).form or PLAIN
    return ", ".join(f"{name}={value}" for name, value in form.changed.items())


def form_of_join(op: Op) -> str:
    return op.suffix.strip("_").replace("_", " ")


def why_inductor(op: Op, arguments: dict[str, Any]) -> str | None:
    """Why Inductor's code runs the norm; None if our op does. arguments are named as in our op's schema."""
    x, cols = arguments["x"], math.prod(arguments["normalized_shape"])
    if x.device.type not in DEVICE_TYPES:
        return f"x is on {x.device.type}"
    if V.aot_compilation:
        return "an AOTInductor package is to run without Python"
    try:
        validate(operands_of(op.name, (), arguments))
    except RuntimeError as error:
        return str(error)
    if any(not isinstance(size, SymInt) and size == 0 for size in x.shape):
        return "x has no elements"
    if op.direction == FORWARD and (isinstance(cols, SymInt) or cols < WIDE_ROW):  # a symbol: a width that varies
        return NARROW
    return _no_kernel(op, cols, x)


def waits(op: Op, arguments: dict[str, Any]) -> bool:
    """Whether the graph has to be known to decide on a forward."""
    cols, suffixes = math.prod(arguments["normalized_shape"]), ("", "_affine", "_of_sum")
    is_plain = op.direction == FORWARD and op.suffix in suffixes and isinstance(cols, int)
    return is_plain and why_inductor(op, arguments) == NARROW and not _no_kernel(op, cols, arguments["x"])


def op_of(node: Node) -> Op | None:
    """The op of ours, of the table of norms, that a node calls."""
    is_ours = getattr(node.target, "namespace", None) == ours.name
    return OPS.get(node.target._schema.name.partition("::")[2]) if is_ours else None


def _no_kernel(op: Op, cols: int | SymInt, x: torch.Tensor) -> str | None:
    if x.device.type != "cuda" or isinstance(cols, SymInt):
        return None
    problem = NormProblem(op.norm, op.direction, cols, x.dtype)
    broken = legality.broken_rule("multi_wave", problem, 1, gpus.spec_of(x.device))
    return f"our kernel {broken.reason}" if broken else None


# The decompositions. OfAten calls our op, which the tracer then decomposes by OfOurs. Both decide alike; OfAten notes a
# decision against our op, OfOurs one for it, or against a forward that the user's code calls. What waits is left.


@dataclass(frozen=True)
class Decomposition:
    """An op's entry in Inductor's table. `ours` is our op, `stock` is the decomposition of ATen's op and `before` the
    entry that this one replaces.
    """

    op: Op
    ours: Any
    stock: Callable
    before: Callable | None

    def __call__(self, *args, **kwargs):
        if is_tracing():
            return self.decompose(named_arguments(self.ours, args, kwargs))
        return self.before(*args, **kwargs) if self.before else NotImplemented

    def waits(self, arguments: dict[str, Any]) -> bool:
        return _forwards_wait.get() and waits(self.op, arguments)

    def note(self, x: torch.Tensor, taken: bool, reason: str, form: str = "") -> None:
        note(self.op, x, taken, reason, get_current_meta(), form)


class OfAten(Decomposition):
    def decompose(self, arguments: dict[str, Any]):
        why = None if self.waits(arguments) else why_inductor(self.op, arguments)
        if why:
            self.note(arguments["x"], False, why)
        return (self.stock if why else self.ours)(*arguments.values())


class OfOurs(Decomposition):
    """For our own ops. A call in the user's code stays as it is, except for a forward that Inductor does better. What
    was joined stays, too, and is noted already."""

    def decompose(self, arguments: dict[str, Any]):
        if is_joined(mark_of(get_current_meta())) or self.waits(arguments):
            return NotImplemented
        x, why = arguments["x"], why_inductor(self.op, arguments)
        if why and self.op.direction == FORWARD and x.device.type in DEVICE_TYPES:
            self.note(x, False, why, form_of(self.op, arguments))
            return self.stock(*arguments.values())
        if why or self.op.direction == FORWARD:
            reason = "as written" if why else REASONS[FORWARD]
            self.note(x, True, reason, form_of(self.op, arguments))  # a backward is noted when its graph is known
        wanted = wanted_outputs(operands_of(self.op.name, (), arguments))
        if V.aot_compilation and sum(wanted) < len(self.op.outputs):
            # Its schema allows None outputs. Without it AOTInductor fails an assertion.
            return getattr(ours, WITH_OPTIONAL_OUTPUTS[self.op.name])(*arguments.values())
        return NotImplemented  # the tracer keeps the op in the graph


def note_rms_norms_elsewhere(model: Any) -> None:
    """Note the RMSNorms of other devices' tensors in Dynamo's graph: torch decomposes these before it asks a table."""
    for node in getattr(getattr(model, "graph", None), "nodes", ()):
        if node.target is torch.rms_norm and node.args and "example_value" in node.args[0].meta:
            x, y = node.args[0].meta["example_value"], node.meta["example_value"]
            if x.device.type in DEVICE_TYPES:
                continue
            for op in OPS.values():
                if op.norm == "rms" and op.aten and (y.requires_grad or op.direction == FORWARD):
                    Decomposition(op, None, None, None).note(x, False, f"x is on {x.device.type}")


REASONS = {
    FORWARD: f"rows of {WIDE_ROW} columns and more are read once",
    BACKWARD: "dx and the sums over rows in one pass",
}


def named_arguments(op, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of the op by name, in the schema's order, defaults included."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in op._schema.arguments}


# All threads share Inductor's table of decompositions. _lock guards our changes to it. Where nothing is traced,
# our entries behave as the entries that they replace.

_lock = threading.RLock()
_forwards_wait: ContextVar[bool | None] = ContextVar("fusednorm_forwards_wait", default=None)  # None: no tracing


def is_tracing() -> bool:
    """Whether our decompositions are in force in this thread."""
    return _forwards_wait.get() is not None


@contextlib.contextmanager
def decompositions_replaced(forwards_wait: bool = False) -> Iterator[None]:
    """Put our decompositions into Inductor's table, for tracing in this thread. Other threads that enter wait.
    forwards_wait: forwards stay ops, so that forwards.py decides on them."""
    with _lock, _changed_table(_replacements(decomposition.decompositions)):
        token = _forwards_wait.set(forwards_wait)
        try:
            yield
        finally:
            _forwards_wait.reset(token)


@contextlib.contextmanager
def decompositions_restored() -> Iterator[None]:
    """Restore Inductor's own table while a traced graph is compiled: Inductor does not compile an op as it is if the
    table has a decomposition of it."""
    with _lock:
        mine = {op: d.before for op, d in decomposition.decompositions.items() if isinstance(d, Decomposition)}
        with _changed_table(mine):
            yield


def _replacements(table: dict[Any, Callable]) -> dict[Any, Decomposition]:
    replacements = {}
    for op in OPS.values():
        mine, stock = getattr(ours, op.name).default, as_op(op.name, reference.formula)
        if op.aten:
            atens = getattr(aten, op.aten).default
            stock = table[atens]
            if isinstance(stock, Decomposition):
                return {}
            replacements[atens] = OfAten(op, mine, stock, stock)
        if op.aten or op.direction == FORWARD:
            replacements[mine] = OfOurs(op, mine, stock, table.get(mine))
    return replacements


def written_out(backward: Any) -> Callable[..., tuple]:
    """What Inductor runs in place of an op of ours: of the op's arguments, in the schema's order."""
    op = OPS[backward._schema.name.partition("::")[2]]
    if not op.aten:
        return as_op(op.name, reference.formula)
    entry = decomposition.decompositions[getattr(aten, op.aten).default]
    return entry.stock if isinstance(entry, Decomposition) else entry


@contextlib.contextmanager
def _changed_table(changes: dict[Any, Callable | None]) -> Iterator[None]:
    before = {op: decomposition.decompositions.get(op) for op in changes}
    _write(changes)
    try:
        yield
    finally:
        _write(before)


def _write(changes: dict[Any, Callable | None]) -> None:
    for op, function in changes.items():
        if function is None:
            decomposition.decompositions.pop(op, None)
        else:
            decomposition.decompositions[op] = function
    decomposition.fast_random_decomps.cache_clear()  # this function caches a copy of the table
