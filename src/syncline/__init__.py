"""Fast synchronous data-parallel training on the network you have.

    import syncline

    model = syncline.DistributedDataParallel(model)      # was torch.nn.parallel's
    optimizer = model.overlap(optimizer)                 # the second line to change
    ...                                                  # train as before
    model.save_report("report")                          # what was measured, planned and gained

``Profile + Network -> Plan -> Timeline`` are plain data, without torch. Names that train or measure
import torch when they are first used.
"""

from __future__ import annotations

from syncline import torch_entry
from syncline.errors import (
    FileError,
    InternalError,
    MismatchError,
    PeerError,
    SynclineError,
    UserError,
)

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from syncline.plan.collective_costs import all_reduce_line
    from syncline.plan.cost import CostCurve
    from syncline.plan.network import Network
    from syncline.plan.plan import Message, Plan
    from syncline.plan.planners import PLANNERS, planner_named
    from syncline.plan.planners.auto import choose
    from syncline.plan.prediction import Comparison, Prediction
    from syncline.plan.profile import Gradient, Operation, Profile
    from syncline.plan.recipe import Recipe
    from syncline.plan.run import Run
    from syncline.plan.simulator.predict import predict
    from syncline.plan.timeline import Span, Timeline
    from syncline.train.ddp import DistributedDataParallel
    from syncline.train.measure.probe import probe
    from syncline.train.measure.profiler import profile

__version__ = "0.1.0"

__all__ = [
    "PLANNERS",
    "Comparison",
    "CostCurve",
    "DistributedDataParallel",
    "FileError",
    "Gradient",
    "InternalError",
    "Message",
    "MismatchError",
    "Network",
    "Operation",
    "PeerError",
    "Plan",
    "Prediction",
    "Profile",
    "Recipe",
    "Run",
    "Span",
    "SynclineError",
    "Timeline",
    "UserError",
    "all_reduce_line",
    "choose",
    "planner_named",
    "predict",
    "probe",
    "profile",
]

_LAZY = {
    "PLANNERS": "syncline.plan.planners",
    "Comparison": "syncline.plan.prediction",
    "CostCurve": "syncline.plan.cost",
    "DistributedDataParallel": "syncline.train.ddp",
    "Gradient": "syncline.plan.profile",
    "Message": "syncline.plan.plan",
    "Network": "syncline.plan.network",
    "Operation": "syncline.plan.profile",
    "Plan": "syncline.plan.plan",
    "Prediction": "syncline.plan.prediction",
    "Profile": "syncline.plan.profile",
    "Recipe": "syncline.plan.recipe",
    "Run": "syncline.plan.run",
    "Span": "syncline.plan.timeline",
    "Timeline": "syncline.plan.timeline",
    "all_reduce_line": "syncline.plan.collective_costs",
    "choose": "syncline.plan.planners.auto",
    "planner_named": "syncline.plan.planners",
    "predict": "syncline.plan.simulator.predict",
    "probe": "syncline.train.measure.probe",
    "profile": "syncline.train.measure.profiler",
}


def __getattr__(name: str) -> Any:
    """Import names when they are first used: most commands need few, and some need torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch_entry.load(_LAZY[name], f"syncline.{name}"), name)


# If torch is imported later, it finds the backend through the entry point "torch.backends".
torch_entry.autoload()


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
