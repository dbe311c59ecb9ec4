"""Which device the planner sees, where there is none."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

from fusednorm import device
from fusednorm.device import DeviceSpec


def named(name: str, sms: int | None = None) -> DeviceSpec:
    """A device by its name, with as many SMs as said."""
    spec = device.named(name)
    return replace(spec, sm_count=sms) if sms else spec


def planned_for(spec: DeviceSpec) -> contextlib.AbstractContextManager:
    """Inside, every tensor is planned for as if it were on this device."""
    return mock.patch.object(DeviceSpec, "of", lambda tensor_device: spec)
