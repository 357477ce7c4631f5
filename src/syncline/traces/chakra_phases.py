"""Which phase of the iteration the nodes of a foreign Chakra trace belong to."""

from __future__ import annotations

import re
from collections.abc import Sequence

from syncline.model.profile import Phase
from syncline.traces.chakra_nodes import Node, NodeType

__all__ = ["phases_of"]

_BACKWARD = re.compile(r"backward|autograd::engine|_BWD(_|$)|wgrad|dgrad", re.IGNORECASE)
_UPDATE = re.compile(r"optimizer|_foreach_|_fused_|multi_tensor_apply|\bsgd\b|adam", re.IGNORECASE)
_DATA = re.compile(r"dataloader|data_?load", re.IGNORECASE)
_COPY = "Memcpy HtoD"


def phases_of(
    nodes: Sequence[Node], *, launched_by: Sequence[int | None], last_ready: int
) -> list[Phase]:
    """Infer the phase of each operation.

    What runs before the first backward operation is forward, from there until the last gradient is
    ready backward, and after that unpacking (``finalize``), or update where its name says so.
    Backward is what is named so, what runs on a thread of the autograd engine (one on which only
    backward operations are named, other than the first thread), and what such an operation
    launches. Before the first backward operation, reading and copying of the batch are told by name
    and by type.

    Args:
        nodes: the operations in the order in which they run.
        launched_by: for each the index of the operation on the CPU that launched it, if any.
        last_ready: index of the operation that makes the last gradient ready.
    """
    threads = _autograd_threads(nodes)
    backward = [
        bool(_BACKWARD.search(node.name)) or node.attributes.get("tid") in threads for node in nodes
    ]
    updating = [bool(_UPDATE.search(node.name)) for node in nodes]
    for index, launcher in enumerate(launched_by):
        if launcher is not None and launcher < index:
            backward[index] = backward[index] or backward[launcher]
            updating[index] = updating[index] or updating[launcher]
    first_backward = next((i for i, yes in enumerate(backward) if yes), len(nodes))
    computing = False
    phases: list[Phase] = []
    for index, node in enumerate(nodes):
        if index > last_ready:
            phases.append("update" if updating[index] else "finalize")
        elif index >= first_backward:
            phases.append("backward")
        elif node.type == NodeType.STORAGE or _DATA.search(node.name):
            phases.append("data")
        elif node.name.startswith(_COPY) or (node.type == NodeType.MEM_LOAD and not computing):
            phases.append("copy")
        else:
            phases.append("forward")
            computing = True
    return phases


def _autograd_threads(nodes: Sequence[Node]) -> set[object]:
    """Return the threads, other than the first, on which operations are named backward."""
    first: object = None
    found: set[object] = set()
    for node in nodes:
        thread = node.attributes.get("tid")
        if thread is None or not node.attributes.get("is_cpu_op"):
            continue
        if first is None:
            first = thread
        elif thread != first and _BACKWARD.search(node.name):
            found.add(thread)
    return found
