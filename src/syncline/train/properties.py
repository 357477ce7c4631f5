"""Properties of modules that raise their own errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from syncline.errors import InternalError

Class = TypeVar("Class", bound=type[Any])


def with_own_errors(cls: Class) -> Class:
    """Make the properties of a module class raise their own errors.

    If a property raises an AttributeError, Python next calls ``nn.Module.__getattr__``, which
    reports that there is no such attribute.
    """
    for name, member in list(vars(cls).items()):
        if isinstance(member, property):
            assert member.fget is not None
            setattr(cls, name, property(_told(member.fget), member.fset, member.fdel))
    return cls


def _told(getter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(getter)
    def get(self: Any) -> Any:
        try:
            return getter(self)
        except AttributeError as error:
            raise InternalError(f"{getter.__name__} cannot be read: {error}") from error

    return get
