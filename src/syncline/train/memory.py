"""``Memory``: the findings of earlier starts of the same training, in a folder of the user's.

Only rank 0 reads and writes it. If a file cannot be used for any reason, training measures as if
there were none, and a warning says why.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from syncline.errors import FileError
from syncline.plan.document import Document
from syncline.plan.files import release, user_cache, write_atomically
from syncline.plan.recipe import Recipe
from syncline.train.log import logger
from syncline.train.stages import Findings, Settings
from syncline.train.wrapped import Wrapped

MOST_KEPT = 100  # this many files are kept; the oldest are removed


class Remembered(Document, frozen=True, kw_only=True):
    """The findings of a training."""

    KIND: ClassVar[str] = "remembered"
    VERSION: ClassVar[int] = 1

    key: str
    findings: Findings


class Memory:
    """Findings of earlier starts, in a folder; None: the user's cache."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._path: Path | None = None
        """This training's file; None until :meth:`recall`, or if nothing is to be kept."""
        self._kept: Findings | None = None

    def recall(self, job: Wrapped, settings: Settings, batch: int | None) -> Findings | None:
        """Return the saved findings of a training, if any; call before :meth:`keep`."""
        folder = user_cache("syncline", "plans") if self._folder is None else self._folder
        # A plan that was given or is not checked is no measured decision. With a recipe the first
        # steps are to be dense, as measuring makes them.
        decides = settings.check and settings.plan is None
        if folder is None or not decides or isinstance(settings.compression, Recipe):
            return None
        key = _key(job, settings, batch)
        path = self._path = folder / f"{key}.json"
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
                raise FileError(f"{path}: is no file of this user")
            remembered = Remembered.load(path)
            if remembered.key != key:
                raise FileError(f"{path}: is of another training")
        except FileNotFoundError:
            return None
        except (FileError, OSError) as error:
            logger.warning("the saved plan is not used: %s", error)
            return None
        found = remembered.findings
        fits = found.baseline is not None and (found.plan is None or found.planned is not None)
        if found.plan is not None:
            fits &= found.plan.difference(job.tensors(), dist.get_world_size(job.group)) is None
            fits &= not found.plan.is_sparse and found.plan.wire in (None, settings.wire)
        self._kept = found
        return found if fits else None

    def keep(self, findings: Findings) -> None:
        """Save the decision for this training, unless it is the one that was recalled."""
        kept, path = self._kept, self._path
        same = kept is not None and (kept.plan, kept.planned) == (findings.plan, findings.planned)
        if path is None or same or findings.baseline is None or findings.decision == "undecided":
            return
        self._kept = findings
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = Remembered(key=path.stem, findings=findings).to_json()
            write_atomically(path, text, regular=True)
            old = sorted(path.parent.glob("*.json"), key=lambda p: p.lstat().st_mtime_ns)
            for each in old[:-MOST_KEPT]:
                each.unlink(missing_ok=True)
        except (FileError, OSError) as error:
            logger.warning("the plan is not saved for the next start: %s", error)


def _key(job: Wrapped, settings: Settings, batch: int | None) -> str:
    """Return a hash of everything that a decision depends on, as rank 0 sees it."""
    text = "\0".join(f"{name}={value}" for name, value in _items(job, settings, batch))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _items(job: Wrapped, settings: Settings, batch: int | None) -> Iterator[tuple[str, object]]:
    yield "release", release()
    yield "torch", torch.__version__
    yield "model", type(job.module).__name__
    for tensor in job.tensors():
        yield tensor.name, (tensor.elements, tensor.dtype)
    yield "batch", batch
    yield "ranks", dist.get_process_group_ranks(job.group)
    yield "host", socket.gethostname()
    yield "backend", dist.get_backend(job.group)
    device = job.device
    yield "device", torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    yield "threads", torch.get_num_threads()
    yield "deferring", job.deferring.can_defer
    if job.sharding is not None:
        yield "sharded", True
    yield "settings", settings
