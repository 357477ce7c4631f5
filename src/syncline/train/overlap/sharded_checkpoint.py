"""The state of a sharded optimizer in checkpoints of ``torch.distributed.checkpoint``.

State with one number per element is a ``DTensor`` of shape ``(elements,)`` in even parts, which DCP
reshards for another number of ranks. Everything else is one tensor of bytes.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncline.errors import FileError
from syncline.train.engine.layout import even_part
from syncline.train.overlap.sharding import unpacked

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

REST = "rest"  # the key of the groups and of all state that is not one number per element


def as_dtensors(
    elements: Mapping[int, int], states: Mapping[int, Mapping[str, Any]], group: dist.ProcessGroup
) -> dict[str, dict[str, torch.Tensor]]:
    """Return states of even parts as DTensors, by number of the parameter; all ranks call.

    ``elements`` are the sizes of the whole parameters. ``states`` are of this rank's parts, in the
    order of the group's ranks. Values that are not one number per element are left out.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    whole_of = _whole_of(group)
    for number, state in states.items():
        whole = elements[number]
        start, stop = even_part(whole, group.size(), group.rank())
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == (stop - start,):
                found.setdefault(str(number), {})[name] = whole_of(value, whole)
    return found


def _whole_of(group: dist.ProcessGroup) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return a function that makes a DTensor of a given size from this rank's part."""
    # Slow to import, and for checkpoints only.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh_on = functools.cache(functools.partial(DeviceMesh.from_group, group))

    def whole_of(part: torch.Tensor, elements: int) -> torch.Tensor:
        shape, mesh = torch.Size([elements]), mesh_on(part.device.type)
        made: torch.Tensor = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,)
        )
        return made

    return whole_of


def load(
    checkpoint: str | os.PathLike[str] | StorageReader,
    key: str,
    elements: Mapping[int, int],
    devices: Mapping[int, torch.device],
    group: dist.ProcessGroup,
) -> tuple[dict[int, dict[str, torch.Tensor]], Any]:
    """Read what :func:`as_dtensors` returned for this rank, and the rest; all ranks call.

    ``key`` is where the optimizer was saved. ``elements`` and ``devices`` are by parameter number.

    Raises:
        FileError: there is no such state, or it is of other parameters.
    """
    # Slow to import, and for checkpoints only.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as read

    reader: StorageReader
    if isinstance(checkpoint, str | os.PathLike):
        reader = FileSystemReader(os.fspath(checkpoint))
    else:
        reader = checkpoint
    try:
        entries = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise FileError(f"{checkpoint}: no checkpoint can be read: {error}") from None
    whole_of = _whole_of(group)
    own = re.compile(re.escape(key) + r"\.state\.(\d+)\.(.+)")
    asked: dict[str, torch.Tensor] = {}
    places: dict[tuple[int, str], torch.Tensor] = {}
    for entry, kind in entries.items():
        found = own.fullmatch(entry)
        if found is None:
            continue
        number, name = int(found[1]), found[2]
        whole = elements.get(number, 0)
        if not isinstance(kind, TensorStorageMetadata) or tuple(kind.size) != (whole,):
            raise FileError(
                f"{checkpoint}: {entry} is not the state of the {whole} exchanged elements that "
                f"parameter {number} of this optimizer has; load it into the model and optimizer "
                "that were saved"
            )
        start, stop = even_part(whole, group.size(), group.rank())
        part = torch.empty(stop - start, dtype=kind.properties.dtype, device=devices[number])
        places[number, name] = part
        asked[entry] = whole_of(part, whole)
    rest = entries.get(f"{key}.{REST}")
    if not isinstance(rest, TensorStorageMetadata):
        raise FileError(
            f"{checkpoint}: it holds no sharded optimizer under {key!r}; save what "
            "model.sharded_state_dict(optimizer) returns, or name the key"
        )
    asked[f"{key}.{REST}"] = others = torch.empty(tuple(rest.size), dtype=torch.uint8)
    try:
        read(asked, storage_reader=reader, process_group=group)
    except CheckpointException as error:  # it names each rank's own error in many lines
        raise FileError(f"{checkpoint}: it cannot be loaded: {str(error).strip()}") from None
    states: dict[int, dict[str, torch.Tensor]] = {}
    for (number, name), part in places.items():
        if part.numel():
            states.setdefault(number, {})[name] = part
    return states, unpacked(others)
