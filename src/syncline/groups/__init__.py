"""Groups of ranks that run collectives on the native engine."""

from __future__ import annotations

from syncline.groups.choice import Choice
from syncline.groups.elements import Elements
from syncline.groups.group import Group, Pending
from syncline.groups.rendezvous import Store

__all__ = ["Choice", "Elements", "Group", "Pending", "Store"]
