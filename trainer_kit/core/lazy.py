"""Packages whose modules are imported when one of their names is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package: what nobody asks for costs nothing.

    Args:
        package: its ``__name__``.
        homes: by name the module in it; ``".x.y"`` is the module ``x.y`` beside it.

    Example:
        >>> find, names = lazy_names("urllib", {"urlparse": "parse"})
        >>> find("urlparse").__module__, "urlparse" in names()
        ('urllib.parse', True)
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{homes[name]}", package), name)

    def names() -> list[str]:
        return list(getattr(import_module(package), "__all__", homes))

    return find, names
