"""The instructions that compute, as patterns of whole opcodes: another modifier makes another opcode, unknown until it
is written here. Those that reach memory or other warps are in effects.py."""

from __future__ import annotations

import numpy as np

from . import arithmetic
from .ptx import BITS, Number, PtxError, Register
from .translate import instruction

INTEGER = r"([su](?:16|32|64))"
FLOAT = r"(f32|f64|f32x2)"
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "div": "divide",
}  # fmt: skip
COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip


@instruction(rf"(add|sub)\.{INTEGER}|(mul)\.lo\.{INTEGER}|(and|or|xor)\.(pred|b16|b32|b64)")
def _integers(t, operands, *groups):
    name, kind = (each for each in groups if each)
    t.call(BINARY[name], operands[0], kind, *(t.get(each, kind) for each in operands[1:]))


@instruction(rf"(add|sub|mul)(?:\.rn)?\.{FLOAT}|(div)\.(?:rn\.(f32|f64)|(?:full|approx)\.(f32))")
def _floats(t, operands, *groups):
    name, kind = (each for each in groups if each)
    t.call(BINARY[name], operands[0], kind, *(t.get(each, kind) for each in operands[1:]))


@instruction(rf"(min|max)\.(?:{INTEGER}|(f32|f64))")
def _extremes(t, operands, name, integer, real):
    kind = integer or real
    function = {"min": "minimum", "max": "maximum"}[name] if integer else {"min": "fmin", "max": "fmax"}[name]
    t.call(function, operands[0], kind, *(t.get(each, kind) for each in operands[1:]))


@instruction(r"(not|neg|abs)\.(pred|[bsf](?:16|32|64))")
def _unary(t, operands, name, kind):
    function = {"not": "invert", "neg": "negative", "abs": "absolute"}[name]
    t.call(function, operands[0], kind, t.get(operands[1], kind))


@instruction(r"(mul|mad)\.(wide|hi|lo)\.([su](?:32|64))")
def _wide(t, operands, name, part, kind):
    out, a, b = operands[0], t.get(operands[1], kind), t.get(operands[2], kind)
    wide = f"{kind[0]}{2 * BITS[kind]}"
    if part == "lo":
        t.set(out, kind, f"{a} * {b} + {t.get(operands[3], kind)}")
        return
    if BITS[kind] == 64 or (part, name) == ("hi", "mad"):
        raise ValueError
    product = f"multiply({a}, {b}, dtype='{'u' * (kind[0] == 'u')}int64')"
    if part == "hi":
        t.set(out, kind, f"{product} >> 32")
    else:
        t.set(out, wide, product if name == "mul" else f"{product} + {t.get(operands[3], wide)}")


@instruction(rf"fma\.rn\.{FLOAT}")
def _fma(t, operands, kind):
    function = "fma64" if kind == "f64" else "fma"
    t.call(function, operands[0], kind, *(t.get(each, kind) for each in operands[1:]))


@instruction(r"(div|rem)\.([su](?:32|64))")
def _integer_division(t, operands, name, kind):
    function = {"div": "divide_integers", "rem": "remainder"}[name]
    t.set(operands[0], kind, f"{function}({t.get(operands[1], kind)}, {t.get(operands[2], kind)})")


@instruction(r"(sqrt|rsqrt|rcp|ex2)\.(rn|approx)(\.ftz)?\.(f32|f64)")
def _roots(t, operands, name, rounding, ftz, kind):
    form = {"sqrt": "sqrt({})", "rsqrt": "1 / sqrt({})", "rcp": "1 / {}", "ex2": "exp2({})"}[name]
    x = t.get(operands[1], kind)
    t.set(operands[0], kind, f"flush({form.format(f'flush({x})')})" if ftz else form.format(x))


@instruction(r"(shl|shr)\.([bus](?:16|32|64))")
def _shift(t, operands, name, kind):
    # The amount has 32 bits, and as many as x's type take; more than these shift everything out, in numpy as well.
    amount = t.get(operands[2], "u32")
    bits = BITS[kind]
    if kind[0] == "s" or bits < 32:
        amount = f"{amount}.astype('{'int' if kind[0] == 's' else 'uint'}{bits}')"
    function = "left_shift" if name == "shl" else "right_shift"
    t.call(function, operands[0], kind, t.get(operands[1], kind), amount)


@instruction(r"bfe\.([su](?:32|64))")
def _bit_field(t, operands, kind):
    if not all(isinstance(each, Number) for each in operands[2:]):
        raise ValueError
    position, length = (int(each.text, 0) for each in operands[2:])
    if not 0 < length <= BITS[kind] - position:
        raise ValueError
    t.set(operands[0], kind, f"extract({t.get(operands[1], kind)}, {position}, {length})")


@instruction(r"prmt\.b32")
def _prmt(t, operands):
    t.set(operands[0], "b32", f"permute_bytes({', '.join(t.get(each, 'u32') for each in operands[1:])})")


@instruction(r"setp\.(\w\w|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?\.([busf](?:16|32|64))")
def _compare(t, operands, how, combine, kind):
    if not isinstance(operands[0], Register):  # a second predicate gets the opposite
        raise ValueError
    a, b = t.get(operands[1], kind), t.get(operands[2], kind)
    nan = f"(isnan({a}) | isnan({b}))"
    real = kind[0] == "f"
    if how in ("num", "nan"):
        result = nan if how == "nan" else f"~{nan}"
    else:
        unordered = real and len(how) == 3
        result = f"{COMPARE[how[:2]]}({a}, {b})"
        if not combine and not real:
            t.call(COMPARE[how], operands[0], "pred", a, b)
            return
        if unordered and how != "neu":
            result = f"({result} | {nan})"
        elif real and how == "ne":
            result = f"({result} & ~{nan})"
    if combine:
        sign = {"and": "&", "or": "|", "xor": "^"}[combine]
        result = f"{result} {sign} {t.get(operands[3], 'pred')}"
    t.set(operands[0], "pred", result)


@instruction(r"selp\.([busf](?:16|32|64))")
def _select(t, operands, kind):
    out, a, b, chosen = operands
    t.set(out, kind, f"where({t.get(chosen, 'pred')}, {t.get(a, kind)}, {t.get(b, kind)})")


@instruction(r"mov\.(pred|[busf](?:16|32|64))")
def _mov(t, operands, kind):
    out, source = operands
    half = {"b32": "b16", "b64": "b32"}.get(kind)
    if kind == "pred":
        t.set(out, kind, t.get(source, kind) if isinstance(source, Register) else str(source.text != "0"))
    elif isinstance(out, tuple):  # {low, high} = source
        for each, part in zip(out, ("low", "high"), strict=True):
            if each is not None:
                t.set(each, half, f"{t.file(f'{part}{BITS[kind]}')}[{source.row}]")
    elif isinstance(source, tuple):
        for each, part in zip(source, ("low", "high"), strict=True):
            target, value = f"{t.file(f'{part}{BITS[kind]}')}[{out.row}]", t.get(each, half)
            t.put(f"{target}[:] = {value}" if t.mask is None else f"copyto({target}, {value}, where={t.mask})")
    else:
        t.set(out, kind, t.get(source, kind))


@instruction(r"cvt\.(?:rn\.)?(bf16x2|f16x2)\.f32")
def _to_pairs(t, operands, to):
    out, high, low = operands
    function = "to_bf16" if to == "bf16x2" else "to_f16"
    for part, source in (("high", high), ("low", low)):
        target, value = f"{t.file(f'{part}32')}[{out.row}]", f"{function}({t.get(source, 'f32')})"
        t.put(f"{target}[:] = {value}" if t.mask is None else f"copyto({target}, {value}, where={t.mask})")


@instruction(r"cvt\.rn\.bf16\.(f32|f64)|cvt\.(f32|f64)\.bf16")
def _bf16(t, operands, narrowed, widened):
    if widened:
        t.set(operands[0], widened, _half(t, operands[1], "bf16"))
    else:
        t.set(operands[0], "u16", f"to_bf16({t.get(operands[1], narrowed)})")


def _half(t, operand, kind: str) -> str:
    return f"from_bf16({t.get(operand, 'u16')})" if kind == "bf16" else t.get(operand, kind)


@instruction(r"(add|sub|fma)\.rn\.f32\.(bf16|f16)")
def _mixed(t, operands, name, kind):
    """All operands but the last are of 16 bits; the sum is rounded once."""
    out, *halves, last = operands
    sources = [*(_half(t, each, kind) for each in halves), t.get(last, "f32")]
    t.set(out, "f32", f"{BINARY.get(name, name)}({', '.join(sources)})")


@instruction(r"cvt(\.rn)?\.([usf](?:8|16|32|64))\.([usf](?:8|16|32|64))")
def _convert(t, operands, rounds, to, source):
    narrows = to[0] == "f" and (source[0] != "f" or BITS[to] < BITS[source])
    if (to[0] != "f" and source[0] == "f") or bool(rounds) != narrows:
        raise ValueError
    value = t.get(operands[1], source)
    if operands[0].bits > BITS[to]:  # a narrow value in a wide register: its sign goes with it
        to, value = f"{to[0]}{operands[0].bits}", f"{value}.astype('{'u' * (to[0] == 'u')}int{BITS[to]}')"
    t.set(operands[0], to, value)


@instruction(r"cvta\.(?:param|to\.global|to\.shared)\.u64|cvta\.(?:global|shared)\.u64")
def _cvta(t, operands):
    t.set(operands[0], "u64", t.get(operands[1], "u64"))


@instruction(r"createpolicy\.fractional\.L2::evict_(?:last|first)\.b64")
def _policy(t, operands):
    t.set(operands[0], "b64", "0")


@instruction(r"shfl\.sync\.(bfly|idx|down|up)\.b32")
def _shuffle(t, operands, mode):
    out, *sources, _ = operands
    if not isinstance(out, Register):
        raise PtxError("shfl with a predicate")
    if t.mask:
        t.put(f"w.needs_all({t.mask}, 'shfl')")
    t.mask = None
    values, lane, clamp = sources
    if isinstance(lane, Number) and isinstance(clamp, Number):
        sources = arithmetic.sources(mode, *(np.full(32, int(each.text, 0)) for each in (lane, clamp)))
        t.set(out, "b32", f"{t.get(values, 'u32')}[{t.program.constant(sources)}]")
    else:
        t.set(out, "b32", f"shuffle({mode!r}, {', '.join(t.get(each, 'u32') for each in sources)})")
