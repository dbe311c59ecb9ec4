"""Translates PTX to Python: each basic block becomes a function that one warp executes.

A register is a row of 32 numpy elements, one for each lane: f32[5] is row 5 of the 32-bit registers, viewed as floats.
A block also ends where warps synchronize, because another warp may run there. A block's function takes the warp and the
mask of the lanes that execute it (None for all). It returns what comes next: the number of a block, EXIT, or the tuple
(mask of the lanes that jump, their block, the block of the others).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from . import arithmetic
from .ptx import BITS, Instruction, Kernel, Name, Number, PtxError, Register

EXIT = -1
PARAMETER_BASE, PARAMETER_PAGE = 0x7F00_0000, 4096  # made-up addresses of parameters: one page for each
ENDS_BLOCK = re.compile(
    r"(bra|brx|ret|exit|bar\.sync|barrier|red|atom|cp\.async|mbarrier\.arrive|st\.async|griddepcontrol)\b"
)
WAITS = re.compile(
    r"(mbarrier\.(try|test)_wait|cp\.async\.wait_group|barrier\.cluster\.wait|ld\.(acquire|relaxed)"
    r"|griddepcontrol\.wait)\b"
)
ALL = slice(None)  # as an index: all lanes
SCOPE = {**vars(np), **vars(arithmetic), "ALL": ALL}  # the names that a block's function can use
# Of the lanes q. numpy's any() and all() take fifty times as long for 32 elements.
SOMEBODY, NOBODY = "1 in q.tobytes()", "1 not in q.tobytes()"
UNSIGNED = {1: "pred", 16: "u16", 32: "u32", 64: "u64"}

INSTRUCTIONS: list[tuple[re.Pattern, Callable]] = []


def instruction(pattern: str):
    """Registers a function(block, operands, *groups) that emits Python for the instructions whose whole opcode matches
    the pattern. An opcode with any other modifier is unknown, which is an error."""
    return lambda emit: INSTRUCTIONS.append((re.compile(pattern), emit)) or emit


def effect(pattern: str, operands: str = "", waits: bool = False):
    """Registers a method(lanes, site, *groups, *operands) of Warp as the effect of instructions. `lanes` is an index
    for numpy; `site` is the instruction's number.

    `operands` says what the method gets for each operand of the instruction; a "?" marks operands that may be missing:
    "=" the registers to fill; "[]" an address; "[map]" the address of a tensor map, and the coordinates; "u32" (or
    another type) values, "*u32" a vector of them; "-" nothing; "_" nothing, for an operand that must be PTX's sink.
    If the instruction `waits`, the method returns whether the wait is over. Until it is, the warp tries again whenever
    it is woken.
    """

    def register(method: Callable) -> Callable:
        def emit(t, given, *groups):
            forms = operands.format(*groups).split()
            if not sum("?" not in form for form in forms) <= len(given) <= len(forms):
                raise ValueError
            arguments = [t.lanes, str(t.site), *map(repr, groups)]
            for form, operand in zip(forms, given, strict=False):
                arguments += t.arguments(form.rstrip("?"), operand)
            call = f"w.{method.__name__}({', '.join(arguments)})"
            if waits:
                nobody = f"{NOBODY} or " * t.guarded
                t.put(f"return {t.program.block_at[t.site + 1]} if {nobody}{call} else {t.number}")
            else:
                t.put(f"{SOMEBODY} and " * t.guarded + call)

        instruction(pattern)(emit)
        return method

    return register


@functools.cache
def _emitter(opcode: str) -> tuple[Callable, tuple[str, ...]] | None:
    for pattern, emit in INSTRUCTIONS:
        if found := pattern.fullmatch(opcode):
            return emit, found.groups()
    return None


class Program:
    """A kernel's blocks as Python.

    `without` has indices into the kernel's code of instructions to leave out; a wait that is left out counts as over.
    With it, tests show that each barrier is needed.
    """

    def __init__(self, kernel: Kernel, without: frozenset[int] = frozenset()):
        self.kernel, self.without = kernel, without
        self.constants: list[np.ndarray] = []
        self._known_constants: dict[tuple, int] = {}
        self.dynamic_base = -(-kernel.shared_bytes // 16) * 16  # dynamic shared memory follows the static variables
        self.idle_warps: list = []
        starts = {0, *kernel.labels.values()}
        for at, each in enumerate(kernel.code):
            if WAITS.match(each.opcode):
                starts |= {at, at + 1}
            elif ENDS_BLOCK.match(each.opcode):
                starts.add(at + 1)
        starts = sorted(at for at in starts if at < len(kernel.code))
        self.blocks = list(zip(starts, [*starts[1:], len(kernel.code)], strict=True))
        self.block_at = {start: number for number, (start, _) in enumerate(self.blocks)} | {len(kernel.code): EXIT}
        self._functions: dict[tuple[int, bool], tuple[Callable, list[int]]] = {}

    def block(self, number: int, masked: bool) -> Callable:
        """The function of a block; `masked` is false if all lanes execute it."""
        found = self._functions.get((number, masked))
        if found is None:
            found = self._functions[number, masked] = _Block(self, number, masked).compiled()
        return found[0]

    def instruction_at(self, number: int, masked: bool, line: int) -> Instruction:
        """The instruction from which a line of a block's Python was emitted."""
        lines = self._functions[number, masked][1]
        return self.kernel.code[lines[min(line, len(lines)) - 1]]

    def constant(self, array: np.ndarray) -> str:
        key = array.dtype.str, array.tobytes()
        if key not in self._known_constants:
            array.flags.writeable = False
            self._known_constants[key] = len(self.constants)
            self.constants.append(array)
        return f"k[{self._known_constants[key]}]"

    def address_of(self, name: str) -> int:
        if name == "global_smem":
            return self.dynamic_base
        if name in self.kernel.shared:
            return self.kernel.shared[name]
        if name in self.kernel.parameters:
            return PARAMETER_BASE + PARAMETER_PAGE * self.kernel.parameters.index(name)
        raise PtxError(f"unknown name {name}")


class _Block:
    """Emits the Python of one block. The functions in INSTRUCTIONS get it as their first argument."""

    def __init__(self, program: Program, number: int, masked: bool):
        self.program, self.number, self.masked = program, number, masked
        self.guarded, self.site = False, 0  # of the instruction that is being emitted
        self.lines: list[str] = []
        self.sites: list[int] = []
        self.files: set[str] = set()  # names of the lists of registers that the block uses

    @property
    def mask(self) -> str | None:
        """The expression for the mask of the lanes that execute the instruction: None for all."""
        return "q" if self.guarded else "m" if self.masked else None

    @property
    def lanes(self) -> str:
        """The expression for these lanes as an index."""
        return self.mask or "ALL"

    def compiled(self) -> tuple[Callable, list[int]]:
        start, end = self.program.blocks[self.number]
        for self.site in range(start, end):
            self._emit(self.program.kernel.code[self.site])
        if not self.lines or not self.lines[-1].startswith("return"):
            self.put(f"return {self.program.block_at[end]}")
        names = sorted(self.files)
        head = [f"def block(w, m, k=k):  # {self.program.kernel.name}, {start} to {end}"]
        head.append(f" {', '.join(names)} = {', '.join(f'w.{each}' for each in names)}" if names else " pass")
        source = "\n".join([*head, *(f" {line}" for line in self.lines)])
        scope = {**SCOPE, "k": self.program.constants}
        exec(compile(source, f"<{self.program.kernel.name}>", "exec"), scope)
        return scope["block"], [start, start, *self.sites]

    def put(self, line: str) -> None:
        self.lines.append(line)
        self.sites.append(self.site)

    def _emit(self, each: Instruction) -> None:
        self.guarded = False
        if self.site in self.program.without:
            if each.opcode.startswith("mbarrier") and WAITS.match(each.opcode):
                self.set(each.operands[0], "pred", "True")
            return
        found = _emitter(each.opcode)
        if found is None:
            raise PtxError(f"{self.program.kernel.name}: unknown instruction {each.text!r} ({each.place})")
        if each.guard is not None:
            taken = f"{'~' if each.negated else ''}{self.get(each.guard, 'pred')}"
            self.put(f"q = {taken} & m" if self.masked else f"q = {taken}")
            self.guarded = True
        emit, groups = found
        try:
            emit(self, each.operands, *groups)
        except (IndexError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PtxError(f"{self.program.kernel.name}: {each.text!r} has operands of no known form") from error

    # --- Operands ---

    def _file(self, name: str, row: int) -> str:
        self.files.add(name)
        return f"{name}[{row}]"

    def get(self, operand, kind: str) -> str:
        """The expression for a source operand: 32 values of a PTX type."""
        if kind == "bf16":
            return f"from_bf16({self.get(operand, 'u16')})"
        numpy_kind = arithmetic.numpy_kind(kind)
        if isinstance(operand, Register):
            if operand.part:
                half = self._file(f"{operand.part}{2 * operand.bits}", operand.row)
                return f"{half}.view('float16')" if kind == "f16" else half
            if BITS[kind] == operand.bits:
                return self._file(numpy_kind, operand.row)
            if BITS[kind] < operand.bits:  # the low part of a wider register
                wide = self._file(UNSIGNED[operand.bits], operand.row)
                return f"{wide}.astype('{arithmetic.DTYPES[numpy_kind]}')"
        if isinstance(operand, Number):
            return self.program.constant(np.full(32, arithmetic.number(operand.text, kind)))
        if isinstance(operand, Name):
            if operand.text.startswith("%"):
                return f"w.special({operand.text!r})"
            address = self.program.address_of(operand.text)
            return self.program.constant(np.full(32, address, arithmetic.DTYPES[numpy_kind]))
        raise PtxError(f"operand {operand} as {kind}")

    def set(self, register: Register, kind: str, values: str) -> None:
        """Emits register = values, in the lanes that execute."""
        if kind == "bf16":
            kind, values = "u16", f"to_bf16({values})"
        if BITS[kind] != register.bits:
            raise PtxError(f"a {kind} for a register of {register.bits} bits")
        target = self.get(register, kind)
        if self.mask is None:
            self.put(f"{target}[:] = {values}")
        else:
            mask = f"{self.mask}.repeat(2)" if kind == "f32x2" else self.mask
            self.put(f"copyto({target}, {values}, 'unsafe', {mask})")

    def compute(self, function: str, register: Register, kind: str, *sources: str) -> None:
        """Emits register = function(sources). A numpy ufunc writes into the register itself."""
        given = ", ".join(sources)
        if not isinstance(SCOPE[function], np.ufunc) or kind in ("bf16", "f32x2"):
            self.set(register, kind, f"{function}({given})")
            return
        where = f", where={self.mask}" if self.mask else ""
        self.put(f"{function}({given}, {self.get(register, kind)}{where})")

    def arguments(self, form: str, operand) -> list[str]:
        """The expressions that a method of Warp gets for an operand of this form: see `effect`."""
        if form in ("_", "-"):
            if form == "_" and operand is not None:
                raise ValueError
            return []
        if form == "[]":
            base = self.get(operand.base, f"s{getattr(operand.base, 'bits', 64)}")
            return [f"{base} + {operand.offset}" if operand.offset else base]
        if form == "[map]":
            if operand.offset:
                raise ValueError
            return [self.get(operand.base, "s64"), self._vector(operand.coordinates, lambda each: "s32")]
        if form == "=":
            return [self._vector(operand, lambda each: UNSIGNED[each.bits])]
        return [self._vector(operand, lambda each: form[1:]) if form[0] == "*" else self.get(operand, form)]

    def _vector(self, operand, kind_of: Callable) -> str:
        parts = operand if isinstance(operand, tuple) else (operand,)
        return f"({''.join(f'{None if each is None else self.get(each, kind_of(each))}, ' for each in parts)})"

    def label(self, name: str) -> int:
        return self.program.block_at[self.program.kernel.labels[name]]


# --- Control flow ---


@instruction(r"bra(?:\.uni)?|ret|exit")
def _jump(t, operands):
    target = t.label(operands[0].text) if operands else EXIT
    if not t.guarded:
        t.put(f"return {target}")
        return
    after = t.program.block_at[t.site + 1]
    t.put(f"if {NOBODY}: return {after}")
    t.put(f"if 0 not in {'(q == m)' if t.masked else 'q'}.tobytes(): return {target}")
    t.put(f"return q.copy(), {target}, {after}")


@instruction(r"brx\.idx")
def _brx(t, operands):
    targets = [t.label(name) for name in t.program.kernel.tables[operands[1].text]]
    t.put(f"return {targets}[w.uniform({t.lanes}, {t.get(operands[0], 'u32')})]")
