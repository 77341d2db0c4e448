"""A network on several devices: each runs a part of its statements in memory of its own, and values are copied between them.

`plan_devices` says who runs what, and what that takes; `SplitModel` does it.
"""

from __future__ import annotations

from calcvm.devices.model import SplitModel
from calcvm.devices.plan import SplitPlan, plan_devices
from calcvm.devices.processor import Processor

__all__ = ["Processor", "SplitModel", "SplitPlan", "plan_devices"]
