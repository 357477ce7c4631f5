"""The planners that others choose from or are compared with."""

from __future__ import annotations

from syncline.planners.base import Planner
from syncline.planners.bytescheduler import ByteScheduler
from syncline.planners.ddp import Ddp
from syncline.planners.dear import Dear
from syncline.planners.horovod import Buckets, Horovod
from syncline.planners.merge import Merge
from syncline.planners.mgwfbp import MgWfbp
from syncline.planners.p3 import P3
from syncline.planners.pace import Pace
from syncline.planners.tictac import TicTac
from syncline.planners.wfbp import Single, Wfbp

CANDIDATES: tuple[Planner, ...] = (Wfbp(), Single(), Ddp(), Buckets(), MgWfbp(), Merge())
"""What ``auto`` chooses from in any training: their messages are the buckets of DDP's reducer."""

SCHEDULERS: tuple[Planner, ...] = (Horovod(), Dear(), TicTac(), P3(), ByteScheduler(), Pace())
"""Their plans are run by an engine of our own: they let the forward pass wait for each gradient by
itself, split tensors, send them in another order or in halves, or hold messages back."""

PUBLISHED: tuple[Planner, ...] = CANDIDATES + SCHEDULERS
"""Every planner with its default settings, except those that compare the others."""
