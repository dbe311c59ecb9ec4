"""batch_invariant: rows whose bits do not depend on the call that they are part of."""

from __future__ import annotations

import threading
from typing import Any

from . import margin
from .process_wide import Setting


class batch_invariant(Setting):  # noqa: N801  reads as a function: batch_invariant(True)
    """batch_invariant(): from now on, in every thread of the process, y, the statistics and dx of a row have bits that
    depend on the row's own numbers, the number of columns, the dtypes, the form and the GPU's architecture alone.

    The number of rows, a row's place among them, the other rows, strides, alignment, an sm_margin and the number of SMs
    change nothing. A tensor that is not contiguous, or does not start at a multiple of 16 bytes, is copied first.
    `with batch_invariant(): ...` ends with the block; of nested blocks the innermost applies. batch_invariant(False)
    ends it. A backward does as its forward did, wherever it runs. A captured CUDA graph keeps what it was captured
    with. Under `enable_eager` a backward, and in a graph of torch.compile every call, does as the setting says when it
    runs. Norms that Inductor compiles itself, and calls that no kernel of ours takes, have the order of others.

    dweight and dbias are sums over all rows: their order is fixed for a number of rows, a GPU and a margin, as always.
    `qk_norm` and `column_sum` are not covered.
    Raises TypeError if on is no bool.
    """

    def __init__(self, on: bool = True):
        if not isinstance(on, bool):
            raise TypeError(f"batch_invariant: on must be a bool, got {type(on).__name__}")
        super().__init__(on)


class Switch:
    """Whether rows are batch-invariant: in the process, and in a thread that runs a backward. The C++ side has one with
    the same functions, which takes the place of this one where it was built."""

    def __init__(self) -> None:
        self._of_process = False
        self._thread = threading.local()

    def is_invariant(self) -> bool:
        of_thread = getattr(self._thread, "on", None)
        return self._of_process if of_thread is None else of_thread

    def set_invariant(self, on: bool) -> None:
        """For the process."""
        self._of_process = on

    def swap_invariant(self, on: bool | None) -> bool | None:
        """For this thread; None: as the process. Returns what it was."""
        before = getattr(self._thread, "on", None)
        self._thread.on = on
        return before


switch: Any = Switch()


def use(other: Any) -> None:
    """Keep the setting there from now on."""
    global switch
    other.set_invariant(switch.is_invariant())
    switch = other


def _change(on: bool | None) -> None:
    switch.set_invariant(bool(on))
    margin.renew()


batch_invariant.observe(_change)


class as_in_forward:  # noqa: N801  reads as a function
    """with as_in_forward(on): this thread's calls are batch-invariant as their forward was."""

    def __init__(self, on: bool):
        self._on = on

    def __enter__(self) -> None:
        self._before = switch.swap_invariant(self._on)

    def __exit__(self, *_: object) -> None:
        switch.swap_invariant(self._before)
