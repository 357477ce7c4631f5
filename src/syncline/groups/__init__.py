"""Groups of ranks that run collectives on the native engine."""

from __future__ import annotations

from syncline.groups.group import Group, Pending
from syncline.groups.rendezvous import Store

__all__ = ["Group", "Pending", "Store"]
