"""Numbers in the documents that come from records: python -m bench.report writes and checks them.

A table stands between `<!-- bench: NAME -->` and `<!-- end -->`, where NAME is a key of TABLES. A sentence is a
template of SENTENCES: its words stand in the document once, with a number in the place of each {}.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path

from . import collectives, neighbours, tables
from .cases import NORMS
from .collectives import ratios, slowdowns
from .tables import means
from .zoo import page as zoo

ROOT = Path(__file__).parents[1]
NUMBER = r"-?\d+(?:\.\d+)?"

TABLES: dict[str, Callable[[], str]] = {
    "models": zoo.front,
    "speeds": tables.speeds,
    "beside NCCL": collectives.beside,
    "held SMs": tables.held_sms,
    "steps under FSDP2": collectives.sharded_steps,
}


def _wide(through_nvlink: bool, norm: str) -> tuple:
    return through_nvlink, norm, 16384, 4096


def _slow_links(norm: str) -> list[str]:
    """Means over the collectives through shared memory, without a margin and with one."""
    found = (slowdowns(_wide(False, norm), margin) for margin in (0, collectives.MARGIN))
    return [f"{statistics.fmean(each):.2f}" for each in found]


def _proof_us(norm: str, direction: str, rows: int, cols: int) -> float:
    cells = tables.proof(tables.measured_days())
    return cells.of(norm, direction, "bfloat16", (rows, cols))["fusednorm"]["median_us"]


def _two_norms_ms(direction: str) -> float:
    """Of a block of the model of docs/many-gpus.md, whose rows and columns are both 8192."""
    return 2 * _proof_us("rms", direction, 8192, 8192) / 1e3


def _seconds_of_first_call(state: str) -> float:
    (record,) = (each for each in tables.newest_day("first-call") if each["state"] == state)
    return record["forward_s"] + record["backward_s"]


def _cudnn_ahead(gpu: str) -> tuple[int, int]:
    return len(tables.shapes_ahead(gpu, "cudnn")), tables.num_cells("cudnn", gpu)


def _slower_with_triton_39() -> list[float]:
    """By how much the three forwards of RMSNorm that README counts take longer than with Triton 3.6."""
    found = (each for key, each in tables.release_ratios().items() if key[:2] == ("rms", "forward"))
    slow = [ratio - 1 for ratios in found for ratio in ratios.values() if ratio >= tables.SLOWER]
    if len(slow) != 3:
        raise ValueError(f"README.md: says that three forwards are slower with Triton 3.9, but {len(slow)} are")
    return slow


def _percent(values: list[float], digits: int = 0) -> tuple[str, str]:
    return tuple(f"{100 * value:.{digits}f}" for value in (min(values), max(values)))


def _times(values: list[float]) -> tuple[str, str]:
    return tuple(f"{value:.1f}" for value in (min(values), max(values)))


def _ratios(peer: str, digits: int = 2, **where) -> list[str]:
    return [f"{means(norm, peer, **where).ratio:.{digits}f}" for norm in NORMS]


# document -> (template, its numbers)
SENTENCES: dict[str, list[tuple[str, Callable[[], list | tuple]]]] = {
    "README.md": [
        ("a LayerNorm backward is {} times as fast as PyTorch's and {} times as fast as cuDNN's",
         lambda: [_ratios("aten", 1)[0], _ratios("cudnn")[0]]),
        ("It takes {} times as long as a kernel", lambda: [f"{means('layer', 'aten').ours:.2f}"]),
        ("makes a training step of transformers' own models {} to {} times as fast",
         lambda: [f"{ratio:.2f}" for ratio in zoo.gains()]),
        ("{} to {}% for a GPT-2 like one", lambda: _percent(tables.step_gains("gpt2", 2), 1)),
        ("{} to {}% for a Llama like one", lambda: _percent(tables.step_gains("llama", 2), 1)),
        ("in plain Python an op takes {} to {} times as long as PyTorch's",
         lambda: _times(tables.op_host_ratios(False))),
        ("{} to {} times in C++", lambda: _times(tables.op_host_ratios(True))),
        ("{} to {} times as long as alone", lambda: _times(
            [ratio for norm in NORMS for ratio in slowdowns(_wide(True, norm))])),
        ("PyTorch's then takes {} to {} times as long as ours",
         lambda: _times([ratio for norm in NORMS for ratio in ratios(_wide(True, norm), "aten")])),
        ("cuDNN takes {} and {} times as long as our backwards of LayerNorm and RMSNorm, QuACK {} and {},"
         " torch.compile {} and {}, Liger {} and {}",
         lambda: [ratio for peer in ("cudnn", "quack", "inductor", "liger") for ratio in _ratios(peer)]),
        ("Inductor's backwards take {} times as long, FLA's {}, Liger's {}",
         lambda: [f"{neighbours.backward_ratio(peer):.1f}" for peer in ("inductor", "fla", "liger")]),
        ("cuDNN is faster in {} of {} cells on an H200 and in {} of {} on an H100",
         lambda: [*_cudnn_ahead("H200"), *_cudnn_ahead("H100")]),
        ("forwards of RMSNorm are {} to {}% slower", lambda: _percent(_slower_with_triton_39())),
    ],
    "docs/peers.md": [
        ("faster than ours in {} of {} cells on an H200", lambda: _cudnn_ahead("H200")),
        ("in {} of {} on an H100", lambda: _cudnn_ahead("H100")),
        ("by up to {}%",
         lambda: _percent([each.by for gpu in tables.GPUS for each in tables.shapes_ahead(gpu, "cudnn")])[1:]),
        ("(LayerNorm {} times, RMSNorm {} times", lambda: _ratios("inductor")),
    ],
    "docs/many-gpus.md": [
        ("RMSNorm of 4096 columns loses at most {}% without a margin, and {}% with one",
         lambda: [_percent(tables.loss_beside_held("rms", margin=margin), 1)[1] for margin in (0, 32)]),
        ("Our medians are from {}% shorter to {}% longer than stock's",
         lambda: [f"{-100 * min(collectives.step_changes()):.1f}", f"{100 * max(collectives.step_changes()):.1f}"]),
        ("takes {} times as long beside the collective, and {} with a margin", lambda: _slow_links("rms")),
        ("Two LayerNorm backwards take {} and {} times as long", lambda: _slow_links("layer")),
        ("2 x {} ms = {} ms of the backward, {}%",
         lambda: [f"{_two_norms_ms('backward') / 2:.3f}", f"{_two_norms_ms('backward'):.2f}",
                  f"{_two_norms_ms('backward') / 0.70:.1f}"]),
        ("2 x {} ms = {} ms of the forward, {}%",
         lambda: [f"{_two_norms_ms('forward') / 2:.3f}", f"{_two_norms_ms('forward'):.2f}",
                  f"{_two_norms_ms('forward') / 0.35:.1f}"]),
    ],
    "docs/measuring.md": [
        ("takes {} s with nothing on disk, {} s with its kernels on disk, and {} ms after `warmup`",
         lambda: [f"{_seconds_of_first_call('cold'):.1f}", f"{_seconds_of_first_call('disk'):.1f}",
                  f"{1e3 * _seconds_of_first_call('warmup'):.0f}"]),
    ],
}  # fmt: skip


def renewed() -> dict[Path, str]:
    """The documents with the numbers of the records. Raises ValueError for a sentence or a table that has no place."""
    names = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {path: with_tables(with_numbers(path.read_text(), _sentences(path), path.name), path.name) for path in names}


def _sentences(path: Path) -> list[tuple[str, Callable[[], list | tuple]]]:
    return SENTENCES.get(str(path.relative_to(ROOT)), [])


def with_tables(text: str, name: str) -> str:
    def table(found: re.Match) -> str:
        if found[1] not in TABLES:
            raise ValueError(f"{name}: bench.documents has no table {found[1]!r}")
        return f"<!-- bench: {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- bench: (.+?) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def with_numbers(text: str, sentences: list[tuple[str, Callable[[], list | tuple]]], name: str) -> str:
    for template, numbers in sentences:
        words = r"\s+".join(re.escape(word) for word in template.split())
        pattern = "(" + words.replace(re.escape("{}"), f"){NUMBER}(") + ")"
        if len(re.findall(pattern, text)) != 1:
            raise ValueError(f"{name}: must say once {template!r}")
        found = re.search(pattern, text)
        values = [str(number) for number in numbers()]
        said = "".join(part for pair in zip(found.groups(), [*values, ""], strict=True) for part in pair)
        text = text[: found.start()] + said + text[found.end() :]
    return text
