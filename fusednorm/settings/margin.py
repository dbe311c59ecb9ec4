"""sm_margin: the number of SMs that our kernels leave free for other kernels, such as NCCL's."""

from __future__ import annotations

import torch

from ..planner.device import check_that_one_is_left
from .process_wide import Setting


class Sms(int):
    """A number of SMs. Every change of what plans depend on makes a new object, so `is` tells whether there was one."""


sms = Sms(0)  # the margin now in force, in every thread

MOST_SMS = 2**31 - 1  # what C++ and CUDA can count


class sm_margin(Setting):  # noqa: N801  reads as a function: sm_margin(16)
    """sm_margin(n): plan as for a GPU with n SMs fewer, from now on, in every thread of the process.

    `with sm_margin(n): ...` ends with the block; of nested blocks the innermost applies. Kernels that run beside ours,
    such as NCCL's, then find n SMs free. Kernels whose CTAs have only a few row tiles each ignore the margin: these end
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
        super().__init__(n)


def renew(n: int | None = None) -> None:
    """Make a new object of the margin: of n SMs, or of as many as before if something else has changed."""
    global sms
    sms = Sms(sms if n is None else n)


sm_margin.observe(lambda n: renew(n or 0))
