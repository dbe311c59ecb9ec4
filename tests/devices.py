"""Which device the planner sees, and where launches go, where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from fusednorm.host import gpus
from fusednorm.planner import device
from fusednorm.planner.device import DeviceSpec


def named(name: str, sms: int | None = None) -> DeviceSpec:
    """A device by its name, with as many SMs as said."""
    spec = device.named(name)
    return replace(spec, sm_count=sms) if sms else spec


def planned_for(spec: DeviceSpec) -> contextlib.AbstractContextManager:
    """Inside, every tensor is planned for as if it were on this device."""
    return mock.patch.object(gpus, "spec_of", lambda tensor_device: spec)


@contextlib.contextmanager
def standing_in(spec: DeviceSpec, hand_over: Callable[..., None]) -> Iterator[None]:
    """Inside, tensors are planned for as if on this device, and launches go to `hand_over`, as `launcher.hand_over`
    gets them, with their outputs still to be filled."""
    from fusednorm.host import launcher

    with planned_for(spec), mock.patch.object(launcher, "hand_over", hand_over):
        yield
