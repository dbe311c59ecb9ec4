"""sm_margin: the number of SMs that our kernels leave free for other kernels, such as NCCL's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .planner.device import check_that_one_is_left


class Sms(int):
    """A number of SMs. Every change of the margin makes a new object, so `is` tells whether it has changed since."""


sms = Sms(0)  # the margin now in force, in every thread

MOST_SMS = 2**31 - 1  # what C++ and CUDA can count

_entries: list[sm_margin] = []  # the last is in force; it hides the others until it ends
_lock = threading.RLock()
_observers: list[Callable[[int], None]] = []


class sm_margin:  # noqa: N801  reads as a function: sm_margin(16)
    """sm_margin(n): plan as for a GPU with n SMs fewer, from now on, in every thread of the process.

    `with sm_margin(n): ...` ends with the block; of nested blocks the innermost applies. Kernels that run beside ours,
    such as NCCL's, then find n SMs free. Kernels whose CTAs have one row tile each ignore the margin: their CTAs end
    too soon to block other kernels. A captured CUDA graph keeps the margin that it was captured with.

    n is an int, 0 or more, that leaves at least one SM. Raises TypeError if n is no int and ValueError if n is out of
    range. An n that leaves no SM raises at once if CUDA is initialized, else when the first norm is planned.
    """

    def __init__(self, n: int):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"sm_margin: n must be an int, got {type(n).__name__}")
        if not 0 <= n <= MOST_SMS:
            raise ValueError(f"sm_margin: n must be 0 or more and at most {MOST_SMS}, got {n}")
        if torch.cuda.is_initialized():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            check_that_one_is_left(n, properties.name, properties.multi_processor_count)
        self._sms = n
        self._blocks = 0  # `with` blocks of this margin that are open
        with _lock:
            # The next margin replaces one that was set without a block. If the next one opens a block, the replaced
            # margin must return when the block ends: __enter__ puts it back beneath.
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

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._blocks -= 1
            if not self._blocks:
                if _entries[-1] is not self and not _entries[-1]._blocks:  # set by a plain call within the block
                    _entries.pop()
                _entries.remove(self)
            _tell()


def observe(observer: Callable[[int], None]) -> None:
    """Call observer(n) with the margin in force: now, and after every change."""
    _observers.append(observer)
    observer(sms)


def _tell() -> None:
    global sms
    sms = Sms(_entries[-1]._sms if _entries else 0)
    for observer in _observers:
        observer(sms)
