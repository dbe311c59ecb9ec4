from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OpLog(TorchDispatchMode):
    """Records the ops that reach their kernels while it is active, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls.append((str(op), args))
        return op(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """The computing ops: without detach, which autograd uses to hand out saved tensors, and device queries."""
        return [name for name, _ in self.calls if name not in ("aten.detach.default", "prim.device.default")]
