"""Settings of the whole process, such as sm_margin and batch_invariant."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

_lock = threading.RLock()


class Setting:
    """Base of settings with a value. An object is in force, in every thread, until the next one; `with` it, until the
    block ends. Of nested blocks the innermost applies."""

    _entries: ClassVar[list[Setting]]  # the last is in force; it hides the others until it ends
    _observers: ClassVar[list[Callable[[Any], None]]]

    def __init_subclass__(cls) -> None:
        cls._entries, cls._observers = [], []

    def __init__(self, value: Any):
        self._value = value
        self._blocks = 0  # `with` blocks of this object that are open
        with _lock:
            # The next object replaces one that was set without a block. If the next one opens a block, the replaced one
            # must return when the block ends: __enter__ puts it back beneath.
            entries = self._entries
            self._replaced = entries.pop() if entries and not entries[-1]._blocks else None
            entries.append(self)
            self._tell()

    def __enter__(self) -> None:
        with _lock:
            self._blocks += 1
            if self not in self._entries:
                self._entries.append(self)
            if self._replaced:
                self._entries.insert(self._entries.index(self), self._replaced)
                self._replaced = None
            self._tell()

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._blocks -= 1
            if not self._blocks:
                if self._entries[-1] is not self and not self._entries[-1]._blocks:  # set by a plain call in the block
                    self._entries.pop()
                self._entries.remove(self)
            self._tell()

    @classmethod
    def observe(cls, observer: Callable[[Any], None]) -> None:
        """Call observer(value) with the value in force, None if there is none: now, and after every change."""
        cls._observers.append(observer)
        observer(cls._in_force())

    @classmethod
    def _in_force(cls) -> Any:
        return cls._entries[-1]._value if cls._entries else None

    @classmethod
    def _tell(cls) -> None:
        for observer in cls._observers:
            observer(cls._in_force())
