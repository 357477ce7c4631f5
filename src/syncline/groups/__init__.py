"""Groups of ranks that run collectives on the native engine."""

from __future__ import annotations

from syncline.groups.choices import Choice, Choices
from syncline.groups.elements import Elements
from syncline.groups.group import Group, Pending, Transport
from syncline.groups.notes import Store
from syncline.groups.shared_buffers import SharedBuffer

__all__ = [
    "Choice",
    "Choices",
    "Elements",
    "Group",
    "Pending",
    "SharedBuffer",
    "Store",
    "Transport",
]
