"""Tables of norms and what stands around them: the forms, q and k, and what torch.compile makes of norms."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fusednorm.tools.oracle import STOCK_FACTOR

from .records import by_day
from .tables import NAMES, Ahead, microseconds, records_of, source, table
from .zoo.models import MODELS

TITLES = {name: model.title for name, model in MODELS.items()}
FORM_WAYS = ("forward", "backward", "both")
SAMPLES = 4  # of a modulated form, if its row names no other number
PEERS = ("inductor", "liger", "fla")
FORM_CANDIDATES = {"ours": "ours", "plain": "the norm alone", **{name: NAMES[name] for name in PEERS}}
HEAD_PEERS = ("cudnn", "unsloth", "inductor")
HEAD_CANDIDATES = {"ours": "ours", "norms": "our norms, apart", **{name: NAMES[name] for name in HEAD_PEERS}}


def forms(gpu: str) -> str:
    """Times over the floor of each form and shape: forward, backward, and both if they were not timed before these."""
    found: dict[tuple, dict[tuple, dict]] = {}
    for r in records_of("forms", gpu):
        if r.get("median_us"):
            found.setdefault(form_case(r), {})[r["candidate"], r["direction"]] = r
    lines = []
    for case, records in sorted(found.items(), key=lambda item: item[0][0]):
        line = [*case]
        for name in FORM_CANDIDATES:
            times = [records[name, way] for way in FORM_WAYS if (name, way) in records]
            if len(times) == len(FORM_WAYS) and times[-1]["date"] < max(each["date"] for each in times):
                times.pop()
            line.append(", ".join(f"{each['times_floor']:.2f}" for each in times))
        lines.append(line)
    return table(["norm and form", "rows x cols", *FORM_CANDIDATES.values()], lines)


def backward_ratio(peer: str) -> float:
    """The geometric mean of a peer's backwards with gates or modulations over ours."""
    found: dict[tuple, dict[str, float]] = {}
    for r in records_of("forms"):
        is_one = "gate" in r["form"] or r["form"].endswith("modulated")
        if is_one and r["direction"] == "backward" and r.get("median_us"):
            found.setdefault(form_case(r), {})[r["candidate"]] = r["times_floor"]
    both = (each for each in found.values() if {peer, "ours"} <= each.keys())
    return statistics.geometric_mean(each[peer] / each["ours"] for each in both)


def heads(gpu: str) -> str:
    """Times over the floor of each case of bench.heads: forward, backward and both."""
    found: dict[tuple, dict[str, dict[str, str]]] = {}
    for r in records_of("heads", gpu):
        if r.get("median_us") and r["candidate"] in HEAD_CANDIDATES:
            of_candidate = found.setdefault(head_case(r), {}).setdefault(r["candidate"], {})
            of_candidate[r["direction"]] = f"{r['times_floor']:.2f}"
    names = [name for name in HEAD_CANDIDATES if any(name in each for each in found.values())]
    lines = [
        [*case, *(", ".join(each[name].get(way, "") for way in FORM_WAYS) if name in each else "" for name in names)]
        for case, each in found.items()
    ]
    return table(["norm", "tokens x heads x columns", *(HEAD_CANDIDATES[name] for name in names)], lines)


def form_case(r: dict) -> tuple[str, str]:
    """What the record is of: the form and the shape."""
    return f"{NAMES[r['norm']]} {r['form']}{variant(r)}", f"{r['rows']}x{r['cols']}"


def head_case(r: dict) -> tuple[str, str]:
    kind = "packed, " if r["packed"] else "of all heads, " if r.get("whole") else ""
    kind += "frozen, " if r.get("frozen") else ""
    first = " first" if r.get("first") == "rotary" else ""
    shape = f"{r['tokens']} x {r['heads']}+{r['kv_heads']} x {r['cols']}"
    return f"{NAMES[r['norm']]}, {kind}rotary {r['rotary']}{first}", shape


def peers_ahead(gpu: str) -> Iterator[Ahead]:
    """How far peers are ahead in forms and in norms of q and k, over the floors of their runs. A peer whose error is
    larger than ours may be is left out."""
    for tool, case_of, peers in (("forms", form_case, PEERS), ("heads", head_case, ("cudnn", "inductor"))):
        found: dict[tuple, dict[str, dict]] = {}
        for r in records_of(tool, gpu):
            if r.get("median_us") and (r["candidate"] == "ours" or r.get("error_over_written", 0.0) <= STOCK_FACTOR):
                found.setdefault((r["direction"], *case_of(r)), {})[r["candidate"]] = r
        for (direction, title, shape), each in found.items():
            for peer in (name for name in peers if {name, "ours"} <= each.keys()):
                theirs, ours = each[peer], each["ours"]
                by, where = ours["times_floor"] / theirs["times_floor"] - 1, f"{title}, {direction} {shape}"
                yield Ahead(gpu, tool, where, peer, theirs["median_us"], ours["median_us"], by)


def variant(record: dict) -> str:
    """What sets a case apart from that of the same name: ", in groups of 1024", for example."""
    wider = (name for name in ("residual", "modulation") if record.get(f"{name}_dtype", record["x_dtype"]) == "float32")
    groups = f", in groups of {record['group_size']}" if record.get("group_size") else ""
    groups += ", packed" if record.get("packed") else ""
    groups += f", tables of {record['table']} rows" if record.get("table") else ""
    groups += f", {record['rounding']} rounded" if record.get("rounding") else ""
    if "modulated" in record["form"] and (samples := record.get("samples", SAMPLES)) != SAMPLES:
        groups += ", each row its own" if samples == record["rows"] else f", {samples} sample{'s' * (samples > 1)}"
    groups += "" if record["x_dtype"] == "bfloat16" else f", {record['x_dtype']}"
    return groups + "".join(f", {name} in float32" for name in wider if record["x_dtype"] != "float32")


def sources(tool: str, gpu: str) -> list[str]:
    """A line for each day of the tool's records."""
    return [source(tool, records, gpu) for records in by_day(records_of(tool, gpu)).values()]


def compiled_cases(gpu: str) -> dict[str, tuple[dict, dict, dict]]:
    """The newest times of each case of bench.graphs: its title -> stock, ours, our forms in eager calls or {}."""
    found: dict[tuple, dict[str, dict]] = {}
    for each in records_of("graphs", gpu):
        if "median_us" in each:
            found.setdefault((each["case"], each["date"]), {})[each["way"]] = each
    # What is now one way was several: with norms written by hand until 2026-11-27, with these joins until the 28th.
    names = "all", "written", "modulated", "gated", "ours"
    timed = {
        case: (ways.get("stock"), next((ways[name] for name in names if name in ways), None), ways.get("forms", {}))
        for (case, _), ways in found.items()
    }
    return {TITLES.get(case, case): times for case, times in timed.items() if all(times[:2])}


def compiled(gpu: str) -> str:
    """Forward and backward by stock Inductor and under enable_inductor(), who runs the backwards of the norms, and the
    time of an eager call of the one function of ours that computes the case."""
    lines = []
    for case, (stock, ours, forms) in compiled_cases(gpu).items():
        backwards = [(int(line.split(" x ")[0]), line) for line in ours["norms"] if " backward " in line]
        taken = sum(count for count, line in backwards if ": fusednorm (" in line)
        times = (microseconds(each["median_us"]) for each in (stock, ours))
        total = sum(count for count, _ in backwards)
        plain = "" if ours.get("graph", True) else ", not captured"
        eager = microseconds(forms["median_us"]) if forms else ""
        lines.append([case + plain, *times, f"{ours['times_stock']:.3f}", f"{taken} of {total}", eager])
    header = ["case", "stock, us", "enable_inductor, us", "ratio", "backwards by our ops", "our forms in eager, us"]
    return table(header, lines)
