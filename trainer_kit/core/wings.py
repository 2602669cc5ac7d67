"""Rooms that an installation may leave out: what uses one asks first whether it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Final, final

from trainer_kit.core.errors import ConfigurationError

__all__ = ["LazyTable", "has_wing", "need_wing"]

_PACKAGE: Final = __name__.partition(".")[0]


def has_wing(name: str) -> bool:
    """Whether a room is installed, such as ``"compat"``; nothing is imported.

    Example:
        >>> has_wing("planning"), has_wing("basement")
        (True, False)
    """
    try:
        return find_spec(f"{_PACKAGE}.{name}") is not None
    except ModuleNotFoundError:
        return False


def need_wing(name: str, purpose: str) -> None:
    """Raise `ConfigurationError` if a room is not installed.

    Args:
        name: of the room.
        purpose: what needs it, such as ``"Trainer.plan"``.

    Example:
        >>> need_wing("basement", "Trainer.dig")
        Traceback (most recent call last):
        trainer_kit.core.errors.ConfigurationError: Trainer.dig needs trainer_kit.basement, which is not installed
          fix:   install all of trainer-kit: pip install --force-reinstall trainer-kit
    """
    if not has_wing(name):
        raise ConfigurationError(
            f"{purpose} needs {_PACKAGE}.{name}, which is not installed",
            fix="install all of trainer-kit: pip install --force-reinstall trainer-kit",
        )


@final
class LazyTable(Mapping[str, str]):
    """A table that is created when it is first read, which for a table of fixes is when an error is written.

    Args:
        make: returns the table.

    Example:
        >>> LazyTable(lambda: {"gpus": "devices"})["gpus"]
        'devices'
    """

    def __init__(self, make: Callable[[], Mapping[str, str]]) -> None:
        self._make = make

    @cached_property
    def _table(self) -> Mapping[str, str]:
        return self._make()

    def __getitem__(self, name: str) -> str:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)
