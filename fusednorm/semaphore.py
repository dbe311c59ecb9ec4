"""The words of device memory at which the CTAs of a cooperative launch meet (kernels/grid.py).

A word serves launches that cannot run at the same time: those of one stream, or one launch of one captured graph. It is
zero at first and leaves every launch as the next one needs it.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

WORDS = 4096  # handed out before new ones are needed: launches in all captured graphs, and streams
SPACING = 32  # int32 from word to word: a cache line each


class Semaphores:
    """Those of one device."""

    def __init__(self, device: int):
        self._device = torch.device("cuda", device)
        self._free: list[Tensor] = []
        self._by_stream: dict[int, Tensor] = {}
        self._addresses: dict[int, int] = {}

    def next(self, stream: int) -> Tensor | None:
        """The word for a launch on `stream`, the device's current one; None if a graph is being captured for which
        none is left."""
        if torch.cuda.is_current_stream_capturing():
            return self._free.pop() if self._free else None
        word = self._by_stream.get(stream)
        if word is None:
            if len(self._free) < WORDS // 2:
                # On a thread of its own, because an allocation belongs to the memory pool of its thread's CUDA graph
                # if there is one, and this one outlives it.
                provider = threading.Thread(target=self._provide)
                provider.start()
                provider.join()
            word = self._by_stream[stream] = self._free.pop()
            self._addresses[stream] = word.data_ptr()
        return word

    def address(self, stream: int) -> int | None:
        """That of the word of a stream which has one; None while a graph is being captured, which needs its own."""
        return None if torch.cuda.is_current_stream_capturing() else self._addresses.get(stream)

    def _provide(self) -> None:
        words = torch.zeros(WORDS, SPACING, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)  # other streams use them too
        self._free.extend(words[:, 0].unbind())


@functools.cache
def of_device(device: int) -> Semaphores:
    return Semaphores(device)
