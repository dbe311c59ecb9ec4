"""Timing: CUDA-graph replays with a cold L2, and host time of eager calls; candidates always take turns.

Clocks and temperature drift over a run. Every round times each candidate once, and each round starts with another
candidate, so that all of them see the same drift. The ratio of two candidates of one run is therefore more reliable
than either time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from fusednorm.tools.tune import FLUSH_BYTES

WARMUP_CALLS = 3  # compilation and allocation must not happen during capture, nor while a call is timed
HOST_CALLS = 100  # calls between two readings of the host's clock; the GPU's queue holds more

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Times of one candidate over all rounds, in one unit; low and high are the 10th and 90th percentile."""

    median: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(times: Sequence[float]) -> Times:
        ordered = sorted(times)
        last = len(ordered) - 1
        return Times(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))

    @property
    def spread(self) -> float:
        """Width of the middle 80%, relative to the median."""
        return (self.high - self.low) / self.median


def rotations(items: Sequence[T], rounds: int) -> Iterator[list[T]]:
    """`rounds` orders of the same items: each starts one item later than the order before."""
    for start in range(rounds):
        shift = start % len(items)
        yield [*items[shift:], *items[:shift]]


class CapturedCall:
    """A CUDA graph of one call. It keeps the call, because tensors that the call holds, such as the statistics that a
    backward reads, must live as long as the graph. What the call allocates stays in the graph's own pool."""

    def __init__(self, call: Callable[[], object], stream: torch.cuda.Stream | None = None):
        self._call, self._graph = call, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            call()

    def replay(self) -> None:
        self._graph.replay()


def capture(call: Callable[[], object]) -> CapturedCall:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    return CapturedCall(call, side)  # autograd runs a backward on the stream of its forward, which must be captured


class ColdL2:
    """Fills L2 with clean lines that nobody needs. Dirty lines would cost the next kernel time to write back."""

    def __init__(self) -> None:
        self._written = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._read = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")

    def flush(self) -> None:
        self._written.zero_()
        torch.sum(self._read, dim=0, out=self._sum)


def time_interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Times of each call on the current CUDA device: graph replays, L2 flushed before each, in rotating order."""
    return time_graphs({name: capture(call) for name, call in calls.items()}, rounds)


def time_graphs(graphs: dict[str, CapturedCall], rounds: int) -> dict[str, Times]:
    """`time_interleaved` for calls that are captured already."""
    return time_calls({name: graph.replay for name, graph in graphs.items()}, rounds)


def time_calls(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """`time_interleaved` without capture. Where a call launches many kernels, the GPU may wait for the host.

    The flush keeps the GPU busy while the host enqueues the first ones, so that their launch is not part of the time.
    """
    cold = ColdL2()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for order in rotations(list(calls), rounds + 1):
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cold.flush()
            start.record()
            calls[name]()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    # The first round warms them up.
    return {name: Times.of([1e3 * s.elapsed_time(e) for s, e in pairs[1:]]) for name, pairs in events.items()}


def host_times(
    calls: dict[T, Callable[[], object]], rounds: int, synchronize: Callable[[], object] = torch.cuda.synchronize
) -> dict[T, Times]:
    """Microseconds of host time of each eager call: HOST_CALLS of one candidate in a row, candidates in rotating order.
    A call is over when its kernels are enqueued; nothing is waited for in between."""
    for call in calls.values():
        for _ in range(WARMUP_CALLS):
            call()
    taken: dict[T, list[float]] = {name: [] for name in calls}
    for order in rotations(list(calls), rounds):
        for name in order:
            call = calls[name]
            synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            taken[name].append(1e6 * (time.perf_counter() - start) / HOST_CALLS)
            synchronize()
    return {name: Times.of(microseconds) for name, microseconds in taken.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """Memory that one call allocates: its outputs and its workspace."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
