"""Fast synchronous data-parallel training on the network you have.

    import syncline

    model = syncline.DistributedDataParallel(model)      # was torch.nn.parallel's
    optimizer = model.overlap(optimizer)                 # the second line to change
    ...                                                  # train as before
    model.save_report("report")                          # what was measured, planned and gained

``Profile + Network -> Plan -> Timeline`` are plain data that need no torch; whatever trains or
measures imports torch when it is first used.
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

    from syncline.measure.probe import probe
    from syncline.measure.profiler import profile
    from syncline.model.collective_costs import all_reduce_line
    from syncline.model.cost import CostCurve
    from syncline.model.network import Network
    from syncline.model.plan import Message, Plan
    from syncline.model.prediction import Comparison, Prediction
    from syncline.model.profile import Gradient, Operation, Profile
    from syncline.model.recipe import Recipe
    from syncline.model.run import Run
    from syncline.model.timeline import Span, Timeline
    from syncline.parallel.ddp import DistributedDataParallel
    from syncline.planners import PLANNERS, planner_named
    from syncline.planners.auto import choose
    from syncline.simulator.predict import predict

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
    "PLANNERS": "syncline.planners",
    "Comparison": "syncline.model.prediction",
    "CostCurve": "syncline.model.cost",
    "DistributedDataParallel": "syncline.parallel.ddp",
    "Gradient": "syncline.model.profile",
    "Message": "syncline.model.plan",
    "Network": "syncline.model.network",
    "Operation": "syncline.model.profile",
    "Plan": "syncline.model.plan",
    "Prediction": "syncline.model.prediction",
    "Profile": "syncline.model.profile",
    "Recipe": "syncline.model.recipe",
    "Run": "syncline.model.run",
    "Span": "syncline.model.timeline",
    "Timeline": "syncline.model.timeline",
    "all_reduce_line": "syncline.model.collective_costs",
    "choose": "syncline.planners.auto",
    "planner_named": "syncline.planners",
    "predict": "syncline.simulator.predict",
    "probe": "syncline.measure.probe",
    "profile": "syncline.measure.profiler",
}


def __getattr__(name: str) -> Any:
    """Import names when they are first used: most commands need few, and some need torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch_entry.load(_LAZY[name], f"syncline.{name}"), name)


# Where torch comes later, it finds the backend through its entry point "torch.backends".
torch_entry.autoload()


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
