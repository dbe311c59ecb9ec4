"""Parses the PTX of one kernel: its parameters, its static shared memory, and a flat list of its instructions.

Registers and labels of inner scopes, which come from inline PTX, get unique names: the list needs no scopes.
"""

from __future__ import annotations

import re
from collections import ChainMap
from dataclasses import dataclass, field
from typing import NamedTuple

BITS = {"pred": 1, "bf16": 16, "f16x2": 32, "f32x2": 64} | {
    f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64) if (kind, bits) != ("f", 8)
}


class PtxError(Exception):
    """The PTX has something that the simulator does not know."""


@dataclass(frozen=True, slots=True)
class Register:
    bits: int  # 1 is a predicate
    row: int  # its number among the registers of this width
    part: str = ""  # "low" or "high" for half of a register that is twice as wide


@dataclass(frozen=True, slots=True)
class Number:
    text: str


@dataclass(frozen=True, slots=True)
class Name:
    """A label, parameter, shared variable or special register (%tid.x)."""

    text: str


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset], or [base, {coordinates}] for a tensor map."""

    base: Register | Number | Name
    offset: int = 0
    coordinates: tuple = ()


class Instruction(NamedTuple):
    opcode: str
    operands: tuple  # a vector is a tuple; the sink "_" is None
    guard: Register | None
    negated: bool
    place: str  # source lines in kernels/, innermost first: "ring.py:178:39 @[ warp_specialized.py:98:80 ]"
    text: str


@dataclass
class Kernel:
    name: str = ""
    threads: int = 0
    parameters: list[str] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)  # offsets of the variables in static shared memory, by name
    shared_bytes: int = 0
    registers: dict[int, int] = field(default_factory=lambda: {1: 0, 16: 0, 32: 0, 64: 0})  # how many, by width
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index into code
    tables: dict[str, list[str]] = field(default_factory=dict)  # the targets of brx.idx, by the table's label


def parse(text: str) -> Kernel:
    """The one kernel in a PTX module. Raises PtxError."""
    text = re.sub(r"^\s*\.loc\b[^/\n]*(?://\s*([^\n;]*))?$", lambda m: f".loc {m[1] or ''};", text, flags=re.M)
    text = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.S))
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, flags=re.S)
    if entry is None or re.search(r"\.func\b", text):
        raise PtxError("wanted one entry and no functions")
    kernel = Kernel(entry[1], int(re.search(r"\.reqntid\s+(\d+)", entry[3])[1]))
    kernel.parameters = re.findall(r"([\w$]+)(?:\[\d+\])?\s*(?:,|$)", entry[2].strip())
    _Body(kernel).read(text, entry.end())
    return kernel


class _Body:
    """Reads statements, each with its scope: what names stand for. The key "%r<>" of a scope holds the width of the
    registers %r0, %r1, ... that `.reg .b32 %r<9>` declares."""

    STATEMENT = re.compile(r"\s*(?:([{}])|([\w$%]+)\s*:(?!:)|([^;{]*(?:\{[^}]*\}[^;{]*)*);)")

    def __init__(self, kernel: Kernel):
        self.kernel, self.labels = kernel, 0
        self.statements: list[tuple[str, ChainMap, str]] = []

    def read(self, text: str, at: int) -> None:
        scope, place, here = ChainMap(), "", []
        while scope is not None:
            found = self.STATEMENT.match(text, at)
            if found is None:
                raise PtxError(f"no statement: {text[at : at + 80]!r}")
            at, (brace, label, statement) = found.end(), found.groups()
            if brace:
                scope = scope.new_child() if brace == "{" else scope.parents if len(scope.maps) > 1 else None
            elif label:
                self.labels += 1
                scope[label] = Name(f"{label}@{self.labels}")
                here.append(scope[label].text)
            elif statement.startswith(".loc"):
                place = statement[5:].strip()
            elif statement.startswith(".branchtargets"):
                self.kernel.tables[here.pop()] = [(each.strip(), scope) for each in statement[14:].split(",")]
            elif statement.startswith("."):
                self._declare(" ".join(statement.split()), scope)
            else:
                self.kernel.labels.update(dict.fromkeys(here, len(self.statements)))
                here.clear()
                self.statements.append((" ".join(statement.split()), scope, place))
        self.kernel.labels.update(dict.fromkeys(here, len(self.statements)))
        for name, targets in self.kernel.tables.items():  # now that all labels are known
            self.kernel.tables[name] = [self._named(label, scope).text for label, scope in targets]
        self.kernel.code = [self._instruction(*each) for each in self.statements]

    def _declare(self, statement: str, scope: ChainMap) -> None:
        if found := re.fullmatch(r"\.reg \.(\w+) (.*)", statement):
            for name in map(str.strip, found[2].split(",")):
                if counted := re.fullmatch(r"(.*)<\d+>", name):
                    scope[f"{counted[1]}<>"] = BITS[found[1]]
                else:
                    scope[name] = self._register(BITS[found[1]])
        elif found := re.fullmatch(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", statement):
            align, name, size = int(found[1]), found[2], int(found[3])
            scope[name] = Name(f"{name}@{len(self.kernel.shared)}")
            offset = -(-self.kernel.shared_bytes // align) * align
            self.kernel.shared[scope[name].text] = offset
            self.kernel.shared_bytes = offset + size
        elif not re.fullmatch(r'\.pragma "(?:nounroll|used_bytes_mask \w+)"', statement):  # hints to the assembler
            raise PtxError(f"declaration: {statement}")

    def _register(self, bits: int) -> Register:
        bits = max(bits, 16) if bits > 1 else 1
        self.kernel.registers[bits] += 1
        return Register(bits, self.kernel.registers[bits] - 1)

    def _instruction(self, text: str, scope: ChainMap, place: str) -> Instruction:
        guarded = re.fullmatch(r"(?:@(!?)([%\w$]+) )?(\S+) ?(.*)", text)
        guard = self._named(guarded[2], scope) if guarded[2] else None
        operands = tuple(self._operand(each, scope) for each in _split(guarded[4]))
        return Instruction(guarded[3], operands, guard, bool(guarded[1]), place, text)

    def _operand(self, text: str, scope: ChainMap):
        if text == "_":
            return None
        if text.startswith("{"):
            return tuple(self._operand(each, scope) for each in _split(text[1:-1]))
        if text.startswith("["):
            base, *coordinates = _split(text[1:-1])
            found = re.fullmatch(r"(.+?)\s*\+\s*(-?\d+)", base)
            base, offset = (found[1], int(found[2])) if found else (base, 0)
            return Address(self._operand(base, scope), offset, *(self._operand(each, scope) for each in coordinates))
        if "|" in text:
            return tuple(self._operand(each, scope) for each in text.split("|"))
        if re.match(r"-?\d", text):
            return Number(text)
        return self._named(text, scope)

    def _named(self, text: str, scope: ChainMap) -> Register | Name:
        counted = re.fullmatch(r"(.*?)\d+", text)
        for names in scope.maps:
            if counted and text not in names and f"{counted[1]}<>" in names:
                names[text] = self._register(names[f"{counted[1]}<>"])
            if text in names:
                return names[text]
        return Name(text)


def _split(text: str) -> list[str]:
    """The parts of the text between the commas that are outside of brackets."""
    return [each.strip() for each in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", text) if each.strip()]
