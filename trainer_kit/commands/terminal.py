"""Input of commands: paths, and questions as lists for arrow keys, or as numbered lists without a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

__all__ = ["FilePath", "OutputPath", "ask", "choose", "table"]

_KEY: Final = re.compile(r"\x1b[\[O][A-D]|.", re.DOTALL)
_UP: Final = ("\x1b[A", "\x1bOA", "k")
_DOWN: Final = ("\x1b[B", "\x1bOB", "j")


class FilePath(click.Path):
    """A local path; also expands ``~`` after an equals sign, as in ``--config_file=~/run.yaml``."""

    def convert(
        self,
        value: Any,
        parameter: click.Parameter | None,
        context: click.Context | None,
    ) -> Any:
        return super().convert(os.path.expanduser(value), parameter, context)


class OutputPath(FilePath):
    """A file that a command writes at its end: whether it can is checked before."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(
        self,
        value: Any,
        parameter: click.Parameter | None,
        context: click.Context | None,
    ) -> Any:
        path = super().convert(value, parameter, context)
        if not os.access(Path(path).absolute().parent, os.W_OK):
            self.fail(
                f"{Path(path).absolute().parent} is not a writable directory",
                parameter,
                context,
            )
        return path


def ask(question: str, default: Any, read: Callable[[str], Any]) -> Any:
    """Ask until the answer can be read.

    Args:
        question: without a colon.
        default: for an empty answer; None for no default.
        read: turns the answer into a value, or raises a ValueError with the reason.
    """

    def convert(text: Any) -> Any:
        try:
            return read(str(text).strip())
        except ValueError as error:
            raise click.UsageError(f"it {error}") from None

    return click.prompt(question, default=default, value_proc=convert)


def choose(question: str, choices: Sequence[tuple[str, str]], default: str) -> str:
    """Ask for one of several choices.

    Args:
        question: without a colon.
        choices: value and text of each.
        default: the value that is selected at first.

    Returns:
        The value.
    """
    selected = max(
        (number for number, (value, _) in enumerate(choices) if value == default),
        default=0,
    )
    if not _on_terminal():
        return choices[_ask_number(question, choices, selected)][0]
    with _keys() as keys:
        click.echo(f"{question}  (arrow keys, Return)")
        _draw(choices, selected)
        for key in keys:
            if key in ("\r", "\n"):
                break
            if key in _UP + _DOWN:
                step = 1 if key in _DOWN else -1
                selected = (selected + step) % len(choices)
            elif key.isdigit() and 0 < int(key) <= len(choices):
                selected = int(key) - 1
            click.echo(f"\x1b[{len(choices)}A", nl=False)
            _draw(choices, selected)
        click.echo(f"\x1b[{len(choices) + 1}A\x1b[J{question}: {choices[selected][1]}")
    return choices[selected][0]


def _draw(choices: Sequence[tuple[str, str]], selected: int) -> None:
    for number, (_, text) in enumerate(choices):
        click.echo(f"\x1b[2K{' ➔ ' if number == selected else '   '}{text}")


def _ask_number(
    question: str, choices: Sequence[tuple[str, str]], selected: int
) -> int:
    click.echo(question)
    for number, (_, text) in enumerate(choices, start=1):
        click.echo(f"  {number}  {text}")
    return (
        int(
            click.prompt(
                "number", type=click.IntRange(1, len(choices)), default=selected + 1
            )
        )
        - 1
    )


def _on_terminal() -> bool:
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        return False
    try:
        import termios  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """The pressed keys, without echo; earlier input is kept."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSANOW)
    try:
        yield _pressed(terminal)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _pressed(terminal: int) -> Iterator[str]:
    while True:
        typed = os.read(terminal, 64)
        if not typed:
            raise click.Abort
        for match in _KEY.finditer(typed.decode(errors="replace")):
            if match[0] == "\x04":
                raise click.Abort
            yield match[0]


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = map(str.ljust, row, widths)
        click.echo("  ".join(cells).rstrip())
