"""Stand-ins for a GPU: the device that the planner sees, and the function that gets the launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from fusednorm.host import gpus
from fusednorm.planner.device import DeviceSpec


def named(name: str, sms: int | None = None) -> DeviceSpec:
    """A device by its name; with `sms` SMs instead of its own number if given."""
    spec = gpus.named(name)
    return replace(spec, sm_count=sms) if sms else spec


def planned_for(spec: DeviceSpec) -> contextlib.AbstractContextManager:
    """Inside, the planner plans for every tensor as if it were on this device."""
    return mock.patch.object(gpus, "spec_of", lambda tensor_device: spec)


@contextlib.contextmanager
def standing_in(spec: DeviceSpec, hand_over: Callable[..., None]) -> Iterator[None]:
    """Inside, the planner plans as for this device, no kernel is loaded, and `hand_over` gets what Triton would have to
    launch: the argument of `launcher.hand_over`.

    Nothing runs: the outputs of the launches are allocated but not filled.
    """
    from fusednorm.host import launcher

    with planned_for(spec), mock.patch.multiple(launcher, load=lambda launches, device: None, hand_over=hand_over):
        yield
