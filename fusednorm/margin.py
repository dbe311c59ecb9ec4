"""sm_margin: how many SMs of a GPU the kernels leave to others, such as NCCL's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .planner.device import check_that_one_is_left

sms = 0  # what holds now, in every thread

_entries: list[sm_margin] = []  # the calls that have not been undone, the latest last
_lock = threading.RLock()
_observers: list[Callable[[int], None]] = []


class sm_margin:  # noqa: N801  reads as a function: sm_margin(16)
    """sm_margin(n): plan as for a GPU that has n SMs fewer, from now on, in every thread of the process.

    `with sm_margin(n): ...` plans so until the block ends; of nested blocks the innermost holds. Kernels that run
    beside ours, such as NCCL's, then find n SMs free. Kernels whose CTAs have one row tile each end too soon to be in
    anybody's way and take whatever is free. What torch.cuda.graph has captured keeps the margin that it was captured
    with.

    n is an int of 0 or more that leaves at least one SM. Raises TypeError or ValueError for anything else: at once
    where CUDA is in use already, else when the first norm is planned.
    """

    def __init__(self, n: int):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"sm_margin: n must be an int, got {type(n).__name__}")
        if n < 0:
            raise ValueError(f"sm_margin: n must be 0 or more, got {n}")
        if torch.cuda.is_initialized():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            check_that_one_is_left(n, properties.name, properties.multi_processor_count)
        self._sms = n
        self._blocks = 0  # that have been entered and not left
        with _lock:
            # What was set without a block holds until something else is; a block will put it back.
            self._replaced = _entries.pop() if _entries and not _entries[-1]._blocks else None
            _entries.append(self)
            _tell()

    def __enter__(self) -> None:
        with _lock:
            self._blocks += 1
            if self not in _entries:
                _entries.append(self)
            if self._replaced:
                _entries.insert(_entries.index(self), self._replaced)
                self._replaced = None
            _tell()

    def __exit__(self, *_) -> None:
        with _lock:
            self._blocks -= 1
            if not self._blocks:
                if _entries[-1] is not self and not _entries[-1]._blocks:  # was set within the block
                    _entries.pop()
                _entries.remove(self)
            _tell()


def observe(observer: Callable[[int], None]) -> None:
    """Call observer(n) now and whenever another margin begins to hold."""
    _observers.append(observer)
    observer(sms)


def _tell() -> None:
    global sms
    sms = _entries[-1]._sms if _entries else 0
    for observer in _observers:
        observer(sms)
