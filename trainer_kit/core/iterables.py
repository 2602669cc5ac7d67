"""Arguments that take one thing or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["as_list"]


def as_list(given: Any, *single: type) -> list[Any]:
    """The elements of an argument that takes one thing or any iterable of them; none for None and False.

    Args:
        given: the argument.
        single: classes whose objects are one thing, although they may be iterable. Strings and mappings are one thing.

    Example:
        >>> as_list(None), as_list(3), as_list("ab"), as_list({"a": 1, "b": 2}.values())
        ([], [3], ['ab'], [1, 2])
    """
    if given is None or given is False:
        return []
    if isinstance(given, (str, bytes, Mapping, *single)) or not isinstance(given, Iterable):
        return [given]
    return list(given)
