"""force: which variant of the kernels runs, for tests and experiments."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch

from .plan import VARIANTS

# What the enclosing `with` statements of this thread ask for, innermost last.
_asked: ContextVar[tuple[str | None, ...]] = ContextVar("fusednorm_force", default=())
_observers: list[Callable[[int], None]] = []


class force:  # noqa: N801  reads as a function: with force("pipelined"): ...
    """with force(variant): run the forwards called inside, and their backwards wherever they run, by that variant.

    variant is "multi_wave", "pipelined", "warp_specialized" or "reference" (ATen's kernels); None gives the choice
    back to the planner. Raises ValueError for anything else. What the planner thinks bad is run all the same; what
    cannot run (see fusednorm.explain) runs as if it were not forced. Holds for the calling thread only; a backward
    that torch.compile made does not know of it.
    """

    def __init__(self, variant: str | None):
        if variant is not None and variant not in VARIANTS:
            raise ValueError(f"force: variant must be one of {', '.join(VARIANTS)} or None, got {variant!r}")
        self._variant = variant

    def __enter__(self) -> None:
        if not torch.compiler.is_dynamo_compiling():  # which knows no context variables, and would break the graph
            _tell(1)
            _asked.set((*_asked.get(), self._variant))

    def __exit__(self, *_) -> None:
        if not torch.compiler.is_dynamo_compiling():
            _asked.set(_asked.get()[:-1])
            _tell(-1)


asked_variants = _asked.get  # all that the enclosing `with` statements ask for, without a Python frame


def observe(observer: Callable[[int], None]) -> None:
    """Call observer(1) when a block of `force` begins, in any thread, and observer(-1) when it ends."""
    _observers.append(observer)


def _tell(change: int) -> None:
    for observer in _observers:
        observer(change)


def forced_variant() -> str | None:
    """What `force` asks for here and now."""
    if torch.compiler.is_dynamo_compiling():
        return None
    asked = _asked.get()
    return asked[-1] if asked else None
