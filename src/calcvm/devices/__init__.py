"""A network on several devices: each runs a part of its statements in its own memory, and values are copied between them.

`plan_devices` assigns statements to devices and predicts the cost; `SplitModel` runs the plan.
"""

from __future__ import annotations

from calcvm.devices.model import SplitModel
from calcvm.devices.plan import SplitPlan, plan_devices
from calcvm.devices.processor import Processor

__all__ = ["Processor", "SplitModel", "SplitPlan", "plan_devices"]
