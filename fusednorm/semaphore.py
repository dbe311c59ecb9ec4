"""The semaphores in device memory at which the CTAs of a cooperative launch meet (kernels/grid.py).

One serves launches that cannot run at the same time: those of one stream, or one launch of one captured graph. It is
zero at first and leaves every launch as the next one needs it.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

HANDED_OUT = 4096  # before new ones are needed: to launches in all captured graphs, and to streams
SIZE = 128  # int32 in each: the words of kernels/grid.py, on cache lines of their own


class Semaphores:
    """Those of one device."""

    def __init__(self, device: int):
        self._device = torch.device("cuda", device)
        self._free: list[Tensor] = []
        self._by_stream: dict[int, Tensor] = {}
        self.addresses: dict[int, int] = {}  # by stream; for launches of no captured graph, which needs its own

    def next(self, stream: int) -> Tensor | None:
        """Where the one for a launch on `stream` begins, the device's current one; None if a graph is being captured
        for which none is left."""
        if torch.cuda.is_current_stream_capturing():
            return self._free.pop() if self._free else None
        first = self._by_stream.get(stream)
        if first is None:
            if len(self._free) < HANDED_OUT // 2:
                # On a thread of its own, because an allocation belongs to the memory pool of its thread's CUDA graph
                # if there is one, and this one outlives it.
                provider = threading.Thread(target=self._provide)
                provider.start()
                provider.join()
            first = self._by_stream[stream] = self._free.pop()
            self.addresses[stream] = first.data_ptr()
        return first

    def _provide(self) -> None:
        words = torch.zeros(HANDED_OUT, SIZE, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)  # other streams use them too
        self._free.extend(words[:, 0].unbind())


@functools.cache
def of_device(device: int) -> Semaphores:
    return Semaphores(device)
