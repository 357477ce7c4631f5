"""Groups of ranks that run collectives on the native engine."""

from syncline.comm.groups.choices import Choice, Choices
from syncline.comm.groups.elements import Elements
from syncline.comm.groups.group import Group, Pending, Transport
from syncline.comm.groups.notes import Store

__all__ = ["Choice", "Choices", "Elements", "Group", "Pending", "Store", "Transport"]
