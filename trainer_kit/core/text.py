"""Text of several lines as the result of a call."""

from __future__ import annotations

from typing import final

__all__ = ["Text"]


@final
class Text(str):
    """A string that an interactive session shows as its lines, and ``print`` prints once.

    Example:
        >>> Text("two\\nlines")
        two
        lines
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
