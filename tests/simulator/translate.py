"""PTX to Python: each basic block becomes a function over one warp.

A register is a row of 32 numpy elements; f32[5] is row 5 of the 32-bit registers seen as floats. A block ends where
warps synchronise, too, so that others can go on there. Its function takes the warp and the lanes that execute it (None
for all) and returns what comes next: a block's number, EXIT, or (lanes that jump, their block, block of the others).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from . import arithmetic
from .ptx import BITS, Address, Instruction, Kernel, Name, Number, PtxError, Register

EXIT = -1
SHARED_BASE = 1024  # of addresses in shared memory: so much is the system's
PARAMETER_BASE, PARAMETER_PAGE = 0x7F00_0000, 4096  # of addresses of parameters, a page each
ENDS_BLOCK = re.compile(
    r"(bra|brx|ret|exit|bar\.sync|barrier|red|atom|cp\.async|mbarrier\.arrive|st\.async|griddepcontrol)\b"
)
WAITS = re.compile(r"(mbarrier\.(try|test)_wait|ld\.(acquire|relaxed|volatile)|griddepcontrol\.wait)\b")

INSTRUCTIONS: list[tuple[re.Pattern, Callable]] = []


def instruction(pattern: str):
    """Registers a function(translator, operands, *groups) that emits the instructions whose whole opcode matches."""
    return lambda emit: INSTRUCTIONS.append((re.compile(pattern), emit)) or emit


@functools.cache
def _emitter(opcode: str) -> tuple[Callable, tuple[str, ...]] | None:
    for pattern, emit in INSTRUCTIONS:
        if found := pattern.fullmatch(opcode):
            return emit, found.groups()
    return None


class Program:
    """A kernel's blocks as Python. What `without` names (indices into its code) is left out, a wait as if it were over;
    so tests see what each barrier is for."""

    def __init__(self, kernel: Kernel, without: frozenset[int] = frozenset()):
        self.kernel, self.without = kernel, without
        self.constants: list[np.ndarray] = []
        self._known_constants: dict[tuple, int] = {}
        self.dynamic_base = SHARED_BASE + -(-kernel.shared_bytes // 16) * 16  # as global_smem is aligned
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
        """The function of a block, for a part of the lanes or for all."""
        found = self._functions.get((number, masked))
        if found is None:
            found = self._functions[number, masked] = _Block(self, number, masked).compiled()
        return found[0]

    def instruction_at(self, number: int, masked: bool, line: int) -> Instruction:
        """The instruction that a line of a block's Python stands for."""
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
            return SHARED_BASE + self.kernel.shared[name]
        if name in self.kernel.parameters:
            return PARAMETER_BASE + PARAMETER_PAGE * list(self.kernel.parameters).index(name)
        raise PtxError(f"unknown name {name}")


class _Block:
    """Emits one block; what the functions of INSTRUCTIONS are given."""

    def __init__(self, program: Program, number: int, masked: bool):
        self.program, self.number, self.masked = program, number, masked
        self.mask: str | None = None  # the lanes of the instruction that is emitted
        self.site = 0  # its index
        self.lines: list[str] = []
        self.sites: list[int] = []
        self.files: set[str] = set()  # lists of registers that are used

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
        scope = {"k": self.program.constants, **arithmetic.FUNCTIONS}
        exec(compile(source, f"<{self.program.kernel.name}>", "exec"), scope)
        return scope["block"], [start, start, *self.sites]

    def put(self, line: str) -> None:
        self.lines.append(line)
        self.sites.append(self.site)

    def _emit(self, each: Instruction) -> None:
        if self.site in self.program.without:
            if WAITS.match(each.opcode) and each.opcode.startswith("mbarrier"):
                self.mask = "m" if self.masked else None
                self.set(each.operands[0], "pred", "True")
            return
        found = _emitter(each.opcode)
        if found is None:
            raise PtxError(f"{self.program.kernel.name}: unknown instruction {each.text!r} ({each.place})")
        self.mask = "m" if self.masked else None
        if each.guard is not None and not each.opcode.startswith("bra"):
            self.put(f"q = {self._guard(each)}")
            self.mask = "q"
        emit, groups = found
        try:
            emit(self, each.operands, *groups)
        except (IndexError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PtxError(f"{self.program.kernel.name}: {each.text!r} has operands of no known form") from error

    def _guard(self, each: Instruction) -> str:
        taken = f"{'~' if each.negated else ''}{self.get(each.guard, 'pred')}"
        return f"{taken} & m" if self.masked else taken

    # --- Operands ---

    def file(self, name: str) -> str:
        self.files.add(name)
        return name

    def get(self, operand, kind: str) -> str:
        """A source operand as 32 values of a PTX type."""
        numpy_kind = arithmetic.numpy_kind(kind)
        if isinstance(operand, Register):
            if kind == "pred":
                return f"{self.file('pred')}[{operand.row}]"
            if kind == "f32x2":
                return f"{self.file('f32x2')}[{operand.row}]"
            if BITS[kind] == operand.bits:
                return f"{self.file(numpy_kind)}[{operand.row}]"
            if BITS[kind] < operand.bits:  # the low part of a wider register
                return f"{self.file(f'u{operand.bits}')}[{operand.row}].astype('{arithmetic.DTYPES[numpy_kind]}')"
        if isinstance(operand, Number):
            return self.program.constant(np.full(32, arithmetic.number(operand.text, kind)))
        if isinstance(operand, Name):
            if operand.text.startswith("%"):
                return f"w.special[{operand.text!r}]"
            address = self.program.address_of(operand.text)
            return self.program.constant(np.full(32, address, arithmetic.DTYPES[numpy_kind]))
        raise PtxError(f"operand {operand} as {kind}")

    def set(self, register: Register, kind: str, values: str) -> None:
        """register = values, in the lanes that execute."""
        if kind != "pred" and kind != "f32x2" and BITS[kind] != register.bits:
            raise PtxError(f"a {kind} for a register of {register.bits} bits")
        target = self.get(register, kind)
        if self.mask is None:
            self.put(f"{target}[:] = {values}")
        else:
            mask = f"{self.mask}.repeat(2)" if kind == "f32x2" else self.mask
            self.put(f"copyto({target}, {values}, 'unsafe', {mask})")

    def call(self, function: str, register: Register, kind: str, *sources: str) -> None:
        """The same by a numpy function, which writes where it computes."""
        if kind == "f32x2" and self.mask is not None:
            self.set(register, kind, f"{function}({', '.join(sources)})")
            return
        where = "" if self.mask is None else f", where={self.mask}"
        self.put(f"{function}({', '.join(sources)}, {self.get(register, kind)}{where})")

    def address(self, operand: Address, bits: int) -> str:
        return f"{self.get(operand.base, f'u{bits}')}, {operand.offset}"

    def vector(self, operand, kind: str) -> str:
        parts = operand if isinstance(operand, tuple) else (operand,)
        return f"({''.join(self.get(each, kind) + ', ' for each in parts)})"

    def label(self, name: str) -> int:
        return self.program.block_at[self.program.kernel.labels[name]]


# --- Control flow ---


@instruction(r"bra(?:\.uni)?")
def _bra(t, operands):
    each = t.program.kernel.code[t.site]
    target, after = t.label(operands[0].text), t.program.block_at[t.site + 1]
    if each.guard is None:
        t.put(f"return {target}")
        return
    t.put(f"q = {t._guard(each)}")
    t.put(f"if not q.any(): return {after}")
    t.put(f"if {'(q == m)' if t.masked else 'q'}.all(): return {target}")
    t.put(f"return q.copy(), {target}, {after}")


@instruction(r"brx\.idx")
def _brx(t, operands):
    targets = [t.label(name) for name in t.program.kernel.tables[operands[1].text]]
    t.put(f"return {targets}[w.uniform({t.get(operands[0], 'u32')}, m)]")


@instruction(r"ret|exit")
def _ret(t, operands):
    each = t.program.kernel.code[t.site]
    t.put(f"return {EXIT}" if each.guard is None else f"return q, {EXIT}, {t.program.block_at[t.site + 1]}")
