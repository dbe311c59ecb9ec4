"""force: which variant of the kernels runs, for tests and experiments."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch

from ..planner.plan import VARIANTS

# The variants that the enclosing `with force(...)` blocks of this thread ask for, innermost last.
_asked: ContextVar[tuple[str | None, ...]] = ContextVar("fusednorm_force", default=())
_tell: Callable[[int], None] = int  # does nothing


class force:  # noqa: N801  reads as a function: with force("pipelined"): ...
    """with force(variant): run the forwards called in the block by that variant, and their backwards wherever they run.

    variant is "multi_wave", "async_copy", "pipelined", "warp_specialized" or "reference" (ATen's kernels); None gives
    the choice back to the planner. Raises ValueError for anything else. A forced variant runs even if the planner finds
    a fault with it. A variant that cannot run (see fusednorm.explain) is ignored, and the planner chooses. The block
    affects the calling thread only. A backward that torch.compile made ignores `force`, and a task that outlives the
    block in which it was started may do so.
    """

    def __init__(self, variant: str | None):
        if variant is not None and variant not in VARIANTS:
            raise ValueError(f"force: variant must be one of {', '.join(VARIANTS)} or None, got {variant!r}")
        self._variant = variant

    def __enter__(self) -> None:
        if not torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace context variables and would break the graph
            _tell(1)
            _asked.set((*_asked.get(), self._variant))

    def __exit__(self, *_: object) -> None:
        if not torch.compiler.is_dynamo_compiling():
            _asked.set(_asked.get()[:-1])
            _tell(-1)


asked_variants = _asked.get  # the whole tuple, outermost first; a builtin method, so that a call has no Python frame


def observe(observer: Callable[[int], None]) -> None:
    """From now on call observer(1) when a `force` block begins in any thread, and observer(-1) when it ends."""
    global _tell
    _tell = observer


def forced_variant() -> str | None:
    """The variant that the innermost `force` block of this thread asks for, or None. None while Dynamo traces."""
    if torch.compiler.is_dynamo_compiling():
        return None
    asked = _asked.get()
    return asked[-1] if asked else None
