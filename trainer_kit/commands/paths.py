"""Paths on a command line."""

from __future__ import annotations

import os
from typing import Any

import click

__all__ = ["FilePath"]


class FilePath(click.Path):
    """A path of this machine; ``~`` is expanded where the shell leaves it alone, as in ``--config_file=~/run.yaml``."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        return super().convert(os.path.expanduser(value), parameter, context)
