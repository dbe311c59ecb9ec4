"""The instructions that reach memory or other warps, as patterns of whole opcodes: each is a call of the warp's."""

from __future__ import annotations

from .ptx import BITS, Name, Number
from .translate import instruction

TYPE = r"([busf](?:8|16|32|64))"
VECTOR = r"(?:\.v[24])?"
HINTS = r"(?:\.(?:ca|cg|cs|lu|wb|wt))?(?:\.L1::\w+)?(?:\.L2::\w+)*"


def call(t, method: str, *arguments: str, lanes: str | None = None, site: bool = True) -> None:
    given = [*arguments, str(t.mask if lanes is None else lanes), *([str(t.site)] if site else [])]
    t.put(f"w.{method}({', '.join(given)})")


def wait(t, condition: str) -> None:
    """An instruction, alone in its block, that is tried again when something has come about."""
    t.put(f"return {t.program.block_at[t.site + 1]} if {condition} else {t.number}")


@instruction(rf"ld\.param\.{TYPE}")
def _load_parameter(t, operands, kind):
    out, where = operands
    if where.offset:
        raise ValueError
    if isinstance(where.base, Name):
        number = list(t.program.kernel.parameters).index(where.base.text)
        value = f"w.cta.grid.parameter_rows[{number}]"
    else:
        value = f"w.parameter({t.get(where.base, f'u{where.base.bits}')})"
    t.set(out, f"u{out.bits}", f"{value}.astype('uint{BITS[kind]}')")


@instruction(rf"ld\.(global|shared)(?:::cta)?{HINTS}{VECTOR}\.{TYPE}")
def _load(t, operands, space, kind):
    into = operands[0] if isinstance(operands[0], tuple) else operands[:1]
    if kind[0] == "s" and any(BITS[kind] != each.bits for each in into):
        raise ValueError
    registers = "(" + "".join(f"{t.get(each, f'u{each.bits}')}, " for each in into) + ")"
    call(t, f"load_{space}", registers, t.address(operands[1], 64 if space == "global" else 32), str(BITS[kind] // 8))


@instruction(rf"st\.(global|shared)(?:::cta)?{HINTS}{VECTOR}\.{TYPE}")
def _store(t, operands, space, kind):
    where, values = operands[0], operands[1] if isinstance(operands[1], tuple) else operands[1:2]
    sources = [t.get(each, f"u{max(BITS[kind], 16)}" if not isinstance(each, Number) else kind) for each in values]
    sources = [f"{each}.view('uint{max(BITS[kind], 16)}')" for each in sources]
    address = t.address(where, 64 if space == "global" else 32)
    call(t, f"store_{space}", f"({''.join(f'{each}, ' for each in sources)})", address, str(BITS[kind] // 8))


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(?:::cta)?\.b16")
def _load_matrices(t, operands, transposed):
    call(t, "load_matrices", t.vector(operands[0], "u32"), t.address(operands[1], 32), str(bool(transposed)))


@instruction(r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(?:::cta)?\.b16")
def _store_matrices(t, operands, transposed):
    call(t, "store_matrices", t.vector(operands[1], "u32"), t.address(operands[0], 32), str(bool(transposed)))


@instruction(rf"(atom|red)\.global\.(gpu|cta|sys)\.(relaxed|acquire|release|acq_rel)\.add\.{TYPE}")
def _atomic(t, operands, name, scope, order, kind):
    _add(t, operands, name, order, kind)


@instruction(rf"(atom|red)\.(relaxed|acquire|release|acq_rel)\.gpu\.global\.add\.{TYPE}")
def _atomic_in_order(t, operands, name, order, kind):
    _add(t, operands, name, order, kind)


def _add(t, operands, name, order, kind):
    into, where, value = operands if name == "atom" else (None, *operands)
    out = "None" if into is None else t.get(into, f"u{BITS[kind]}")
    call(t, "atomic_add", out, t.address(where, 64), t.get(value, f"u{BITS[kind]}"), repr(kind), repr(order))


@instruction(rf"ld\.(acquire|relaxed)\.gpu\.global\.{TYPE}")
def _load_atomic(t, operands, order, kind):
    registers = f"({t.get(operands[0], f'u{operands[0].bits}')},)"
    call(t, "load_atomic", registers, t.address(operands[1], 64), str(BITS[kind] // 8), repr(order))


# --- Barriers and fences ---


@instruction(r"bar\.sync|barrier\.sync|barrier\.cta\.sync")
def _bar(t, operands):
    number, *threads = (t.get(each, "u32") for each in operands)
    call(t, "bar", number, threads[0] if threads else "None", site=False)


@instruction(r"bar\.warp\.sync|setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32|nanosleep\.u32")
def _nothing(t, operands):
    """bar.warp.sync: lanes of a warp are one agent here. The others concern time and room only."""


@instruction(r"barrier\.cluster\.arrive(\.release|\.relaxed)?(?:\.aligned)?")
def _cluster_arrive(t, operands, order):
    call(t, "cluster_arrive", str(order == ".relaxed"), site=False)


@instruction(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?")
def _cluster_wait(t, operands):
    call(t, "cluster_wait", site=False)


@instruction(r"fence\.proxy\.async(?:\.shared::cta|\.shared::cluster)?")
def _fence_proxy(t, operands):
    call(t, "fence_proxy", site=False)


@instruction(r"fence\.mbarrier_init\.release\.cluster")
def _fence_inits(t, operands):
    call(t, "fence_inits", site=False)


@instruction(r"elect\.sync")
def _elect(t, operands):
    into, pred = operands[0]
    call(t, "elect", "None" if into is None else t.get(into, "u32"), t.get(pred, "pred"), site=False)


@instruction(r"griddepcontrol\.(wait|launch_dependents)")
def _dependent_grids(t, operands, what):
    if what == "wait":
        wait(t, f"w.grid_wait({t.mask})")
    else:
        call(t, "grid_trigger", site=False)


# --- Mbarriers and copies ---

SHARED = r"\.shared(?:::cta)?"


@instruction(rf"mbarrier\.init{SHARED}\.b64")
def _init(t, operands):
    call(t, "mbarrier_init", t.address(operands[0], 32), t.get(operands[1], "u32"))


@instruction(rf"mbarrier\.inval{SHARED}\.b64")
def _inval(t, operands):
    call(t, "mbarrier_inval", t.address(operands[0], 32))


@instruction(rf"mbarrier\.arrive(\.expect_tx)?{SHARED}\.b64")
def _arrive(t, operands, expects):
    _, where, *number = operands
    number = t.get(number[0] if number else Number("1"), "u32")
    one, none = t.get(Number("1"), "u32"), t.get(Number("0"), "u32")
    counts = f"{one}, {number}" if expects else f"{number}, {none}"
    call(t, "mbarrier_arrive", t.address(where, 32), counts)


@instruction(rf"mbarrier\.(?:try|test)_wait\.parity{SHARED}\.b64")
def _wait(t, operands):
    pred, where, parity = operands
    asked = f"{t.get(pred, 'pred')}, {t.address(where, 32)}, {t.get(parity, 'u32')}, {t.mask}, {t.site}"
    wait(t, f"w.mbarrier_wait({asked})")


@instruction(
    r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
    r"(?:\.L2::cache_hint)?"
)
def _tma(t, operands):
    target, source, barrier = operands[:3]
    if source.offset:
        raise ValueError
    coordinates = t.vector(source.coordinates, "s32")
    call(t, "tma", t.address(target, 32), t.get(source.base, "u64"), coordinates, t.address(barrier, 32))


@instruction(r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes\.b(32|64)")
def _st_async(t, operands, bits):
    where, value, barrier = operands
    call(t, "st_async", t.address(where, 32), t.get(value, f"u{bits}"), t.address(barrier, 32))


@instruction(r"mapa\.shared::cluster\.u32")
def _mapa(t, operands):
    out, address, rank = operands
    t.set(out, "u32", f"w.mapa({t.get(address, 'u32')}, {t.get(rank, 'u32')})")
