"""The instructions that only compute, as patterns of whole opcodes. An opcode with a modifier that no pattern has is
unknown, which is an error. Instructions that reach memory or other warps are methods of Warp, marked with @effect."""

from __future__ import annotations

import functools

import numpy as np

from . import arithmetic
from .ptx import BITS, Number, PtxError, Register
from .translate import instruction

INTEGER, LONG, REAL = r"[su](?:16|32|64)", r"[su](?:32|64)", "f32|f64|f32x2"

# (function in numpy or arithmetic, opcodes, types of the operands). K is the type that a group of the pattern has
# matched, W the integer type of twice its width.
FUNCTIONS = [
    ("add", rf"add\.({INTEGER})|add(?:\.rn)?\.({REAL})", "K K K"),
    ("add", r"add(?:\.rn)?\.(bf16|f16)", "K K K"),  # in float32, rounded once more, which is exact (2 * 11 + 2 bits)
    ("odd_fma", r"fma\.rn\.(bf16|f16)", "K K K K"),
    ("subtract", rf"sub\.({INTEGER})|sub(?:\.rn)?\.({REAL})", "K K K"),
    ("multiply", rf"mul\.lo\.({INTEGER})|mul(?:\.rn)?\.({REAL})", "K K K"),
    ("divide", r"div\.rn\.(f32|f64)", "K K K"),
    ("multiply_by_inverse", r"div\.(?:full|approx)\.(f32)", "K K K"),
    ("divide_integers", rf"div\.({LONG})", "K K K"),
    ("multiply_high", r"mul\.hi\.([su]32)", "K K K"),
    ("multiply_add", rf"mad\.lo\.({LONG})", "K K K K"),
    ("multiply_wide", r"mul\.wide\.([su](?:16|32))", "W K K"),
    ("multiply_wide", r"mad\.wide\.([su]32)", "W K K W"),
    ("fma", r"fma\.rn\.(f32|f32x2)", "K K K K"),
    ("multiply_add", r"fma\.rn\.(f64)", "K K K K"),
    ("add", r"add\.rn\.f32\.(bf16|f16)", "f32 K f32"),  # K widens exactly, so these round once
    ("subtract", r"sub\.rn\.f32\.(bf16|f16)", "f32 K f32"),
    ("fma", r"fma\.rn\.f32\.(bf16|f16)", "f32 K K f32"),
    ("minimum", rf"min\.({INTEGER})", "K K K"),
    ("maximum", rf"max\.({INTEGER})", "K K K"),
    ("fmin", r"min\.(f32|f64)", "K K K"),
    ("fmax", r"max\.(f32|f64)", "K K K"),
    ("bitwise_and", r"and\.(pred|b16|b32|b64)", "K K K"),
    ("bitwise_or", r"or\.(pred|b16|b32|b64)", "K K K"),
    ("bitwise_xor", r"xor\.(pred|b16|b32|b64)", "K K K"),
    ("invert", r"not\.(pred|b16|b32|b64)", "K K"),
    ("negative", r"neg\.([sf](?:16|32|64))", "K K"),
    ("absolute", r"abs\.([sf](?:16|32|64))", "K K"),
    ("sqrt", r"sqrt\.(?:rn|approx)\.(f32|f64)", "K K"),
    ("sqrt_ftz", r"sqrt\.(?:rn|approx)\.ftz\.(f32)", "K K"),
    ("rsqrt_ftz", r"rsqrt\.approx\.ftz\.(f32)", "K K"),
    ("exp2", r"ex2\.approx\.(f32)", "K K"),
    ("exp2_ftz", r"ex2\.approx\.ftz\.(f32)", "K K"),
    ("shift_left", r"shl\.(b16|b32|b64)", "K K u32"),
    ("shift_right", r"shr\.([bus](?:16|32|64))", "K K u32"),
    ("extract", rf"bfe\.({LONG})", "K K u32 u32"),
    ("count_ones", r"popc\.(b32|b64)", "u32 K"),
    ("permute", r"prmt\.(b32)", "K K K K"),
    ("select", r"selp\.([busf](?:16|32|64))", "K K K pred"),
    ("shared_of_rank", r"mapa\.shared::cluster\.(u32)", "K K K"),
    ("positive", r"cvt\.rn\.(bf16)\.f32", "K f32"),
    ("positive", r"cvt\.rn\.(bf16)\.f64", "K f64"),
    ("positive", r"cvt\.(f32|f64)\.bf16", "K bf16"),
    ("positive", r"cvta\.(?:param|to\.global|to\.shared|global|shared)\.(u64)", "K K"),
]


def _compute(function, types, t, operands, *groups):
    (kind,) = filter(None, groups)
    out, *kinds = types.replace("K", kind).replace("W", f"{kind[0]}{2 * BITS[kind]}").split()
    sources = (t.get(each, kind) for each, kind in zip(operands[1:], kinds, strict=True))
    t.compute(function, operands[0], out, *sources)


for function, pattern, types in FUNCTIONS:
    instruction(pattern)(functools.partial(_compute, function, types))


@instruction(r"setp\.(\w\w|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?\.([busf](?:16|32|64))")
def _compare(t, operands, how, combine, kind):
    a, b = t.get(operands[1], kind), t.get(operands[2], kind)
    if kind[0] != "f" and not combine:
        t.compute(arithmetic.COMPARE[how], operands[0], "pred", a, b)
        return
    combined = f" {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[combine]} " if combine else ""
    combined += t.get(operands[3], "pred") if combine else ""
    t.set(operands[0], "pred", f"compare({how!r}, {a}, {b}){combined}")


def _halves(register: Register) -> list[Register]:
    return [Register(register.bits // 2, register.row, part) for part in ("low", "high")]


@instruction(r"mov\.(pred|[busf](?:16|32|64))")
def _mov(t, operands, kind):
    out, source = operands
    if kind == "pred" and isinstance(source, Number):
        t.set(out, kind, str(source.text != "0"))
    elif isinstance(out, tuple) or isinstance(source, tuple):  # packs two halves into a register, or unpacks it
        outs, parts = (each if isinstance(each, tuple) else _halves(each) for each in operands)
        for each, part in zip(outs, parts, strict=True):
            if each is not None:
                t.set(each, f"b{each.bits}", t.get(part, f"b{each.bits}"))
    else:
        t.set(out, kind, t.get(source, kind))


@instruction(r"cvt\.rn\.(bf16|f16)x2\.f32")
def _to_pairs(t, operands, to):
    for each, source in zip(_halves(operands[0])[::-1], operands[1:], strict=True):
        t.set(each, "u16", f"to_{to}({t.get(source, 'f32')})")


@instruction(r"(add|fma)(?:\.rn)?\.(bf16|f16)x2")
def _compute_pairs(t, operands, function, kind):
    function = {"fma": "odd_fma"}.get(function, function)
    for each, *sources in zip(*map(_halves, operands), strict=True):
        t.set(each, kind, f"{function}({', '.join(t.get(source, kind) for source in sources)})")


@instruction(r"cvt(\.rn)?\.([usf](?:8|16|32|64))\.([usf](?:8|16|32|64))")
def _convert(t, operands, rounds, to, source):
    narrows = to[0] == "f" and (source[0] != "f" or BITS[to] < BITS[source])
    if (to[0] != "f" and source[0] == "f") or bool(rounds) != narrows:
        raise ValueError
    value = t.get(operands[1], source)
    if operands[0].bits > BITS[to]:  # a narrow value in a wider register is extended, with its sign if it has one
        to, value = f"{to[0]}{operands[0].bits}", f"{value}.astype('{'u' * (to[0] == 'u')}int{BITS[to]}')"
    t.set(operands[0], to, value)


@instruction(r"createpolicy\.fractional\.L2::evict_(?:last|first)\.b64")
def _policy(t, operands):
    t.set(operands[0], "b64", "0")


@instruction(r"shfl\.sync\.(bfly|idx|down|up)\.b32")
def _shuffle(t, operands, mode):
    out, *sources, _ = operands
    if not isinstance(out, Register):
        raise PtxError("shfl with a predicate")
    if t.mask:
        t.put(f"w.needs_all({t.lanes}, 'shfl')")
    values, lane, clamp = sources
    if isinstance(lane, Number) and isinstance(clamp, Number):
        known = arithmetic.sources(mode, *(np.full(32, int(each.text, 0)) for each in (lane, clamp)))
        t.set(out, "b32", f"{t.get(values, 'u32')}[{t.program.constant(known)}]")
    else:
        t.set(out, "b32", f"shuffle({mode!r}, {', '.join(t.get(each, 'u32') for each in sources)})")


@instruction(r"redux\.sync\.(add|min|max)\.([su]32)")
def _reduction(t, operands, how, kind):
    out, values, _ = operands
    if t.mask:
        t.put(f"w.needs_all({t.lanes}, 'redux')")
    t.set(out, kind, f"reduced({how!r}, {t.get(values, kind)})")


@instruction(r"bar\.warp\.sync|setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32|nanosleep\.u32")
def _nothing(t, operands):
    """Instructions without an effect here: bar.warp.sync, because a warp's lanes are one agent (see races.py), and
    instructions that change only the number of registers or the time."""
