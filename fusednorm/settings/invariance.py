"""batch_invariant: rows whose bits do not depend on the call that they are part of, and sums over them in order."""

from __future__ import annotations

import threading
from typing import Any

from . import margin
from .process_wide import Setting

# What is in force, as a number: one of these, or the rows of a block of ordered sums.
OFF, OF_ROWS = 0, -1
BLOCK_DIVISOR = 8  # a block of so many rows begins at a multiple of 16 bytes, whatever the width
MOST_BLOCK_ROWS = 2**30


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

    batch_invariant(ordered_sums=n) orders them, too: a batch then gives each float32 parameter the bits that its
    micro-batches of n rows (the last may have fewer) give, if their gradients are added up in float32 one after
    another. The sum is ((b0 + b1) + b2) + ..., where b0 is that of the first n rows, b1 that of the next n, and so on.
    A backward runs in so many pieces, ignores an sm_margin, and has one order on all GPUs of an architecture. A
    modulation that all rows share is such a parameter; rows that share one row of several must be in one micro-batch.
    A row of `qk_norm` is then a token with all its heads. `column_sum` adds up its rows likewise.

    on is a bool; ordered_sums is an int, a multiple of 8 up to 2^30, or None. Raises TypeError or ValueError for
    others. A backward raises RuntimeError if the rows that share a row of a modulation do not divide ordered_sums, or
    if a micro-batch of qk_norm would end within what an index of the first dim has.
    """

    def __init__(self, on: bool = True, *, ordered_sums: int | None = None):
        if not isinstance(on, bool):
            raise TypeError(f"batch_invariant: on must be a bool, got {type(on).__name__}")
        if ordered_sums is None:
            super().__init__(OF_ROWS if on else OFF)
            return
        if isinstance(ordered_sums, bool) or not isinstance(ordered_sums, int):
            rule = "ordered_sums must be an int, the rows of a micro-batch"
            raise TypeError(f"batch_invariant: {rule}, got {ordered_sums!r}")
        if not on or not 0 < ordered_sums <= MOST_BLOCK_ROWS or ordered_sums % BLOCK_DIVISOR:
            rule = f"ordered_sums must be a multiple of {BLOCK_DIVISOR} rows, at most {MOST_BLOCK_ROWS}, with on=True"
            raise ValueError(f"batch_invariant: {rule}, got {ordered_sums} with on={on}")
        super().__init__(ordered_sums)


class Switch:
    """What is in force, as a number: in the process, and in a thread that runs a backward. The C++ side has one with
    the same functions, which takes the place of this one where it was built."""

    def __init__(self) -> None:
        self._of_process = OFF
        self._thread = threading.local()

    def invariance(self) -> int:
        of_thread = getattr(self._thread, "invariance", None)
        return self._of_process if of_thread is None else of_thread

    def set_invariance(self, value: int) -> None:
        """For the process."""
        self._of_process = value

    def swap_invariance(self, value: int | None) -> int | None:
        """For this thread; None: as the process. Returns what it was."""
        before = getattr(self._thread, "invariance", None)
        self._thread.invariance = value
        return before


switch: Any = Switch()


def use(other: Any) -> None:
    """Keep the setting there from now on."""
    global switch
    other.set_invariance(switch.invariance())
    switch = other


def _change(value: int | None) -> None:
    switch.set_invariance(value or OFF)
    margin.renew()


batch_invariant.observe(_change)


class as_in_forward:  # noqa: N801  reads as a function
    """with as_in_forward(value): this thread's calls are batch-invariant as their forward was."""

    def __init__(self, value: int):
        self._value = value

    def __enter__(self) -> None:
        self._before = switch.swap_invariance(self._value)

    def __exit__(self, *_: object) -> None:
        switch.swap_invariance(self._before)
