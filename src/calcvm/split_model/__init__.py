"""A network on several devices: each runs a part of its statements in its own memory, and values are copied between them.

`plan_devices` assigns statements to devices and predicts the cost; `SplitModel` runs the plan.
"""

from __future__ import annotations

from calcvm.split_model.model import SplitModel
from calcvm.split_model.plan import SplitPlan, plan_devices
from calcvm.split_model.processor import Processor

__all__ = ["Processor", "SplitModel", "SplitPlan", "plan_devices"]
