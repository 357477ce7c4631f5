"""The planners that others choose from or are compared with."""

from __future__ import annotations

from syncline.plan.planners.base import Planner
from syncline.plan.planners.bytescheduler import ByteScheduler
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.dear import Dear
from syncline.plan.planners.horovod import Buckets, Horovod
from syncline.plan.planners.merge import Merge
from syncline.plan.planners.mgwfbp import MgWfbp
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.pace import Pace
from syncline.plan.planners.tictac import TicTac
from syncline.plan.planners.wfbp import Single, Wfbp

CANDIDATES: tuple[Planner, ...] = (Wfbp(), Single(), Ddp(), Buckets(), MgWfbp(), Merge())
"""``auto`` can choose these in any training: their messages can be buckets of DDP's reducer."""

SCHEDULERS: tuple[Planner, ...] = (Horovod(), Dear(), TicTac(), P3(), ByteScheduler(), Pace())
"""Their plans need Syncline's engine: they let the forward pass wait for single gradients, split
tensors, send them in another order, decouple all-reduces, or delay messages."""

PUBLISHED: tuple[Planner, ...] = CANDIDATES + SCHEDULERS
"""Every planner with its default settings, except ``overlap`` and ``auto``, which use them."""
