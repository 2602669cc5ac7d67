"""Input of commands: paths, options, and questions as lists for arrow keys, or as numbered lists without a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

__all__ = ["FilePath", "OutputPath", "ask", "choose", "refuse_options", "table"]

# Arrow keys are sequences that begin with ESC [ or, in a terminal's application mode, with ESC O.
_KEY: Final = re.compile(r"\x1b[\[O][A-D]|.", re.DOTALL)
_UP: Final = ("\x1b[A", "\x1bOA", "k")
_DOWN: Final = ("\x1b[B", "\x1bOB", "j")


class FilePath(click.Path):
    """A local path; also expands ``~`` after an equals sign, as in ``--config_file=~/run.yaml``."""

    def convert(
        self,
        value: str | os.PathLike[str],
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
        value: str | os.PathLike[str],
        parameter: click.Parameter | None,
        context: click.Context | None,
    ) -> Any:
        path = super().convert(value, parameter, context)
        # click checks a file that exists; whether a new one can be created depends on its directory.
        directory = Path(path).absolute().parent
        # Before the work: a plan that takes minutes must not fail at its last line.
        if not os.access(directory, os.W_OK):
            self.fail(f"{directory} is not a writable directory", parameter, context)
        return path


def refuse_options(names: Collection[str], problem: str) -> None:
    """Raise `click.UsageError` if an option was passed that has no effect in this call.

    Args:
        names: of the command's parameters for these options.
        problem: the message; ``{}`` is replaced by the option.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name
        if name is None or name not in names:
            continue
        if context.get_parameter_source(name) != ParameterSource.DEFAULT:
            raise click.UsageError(problem.format(parameter.opts[0]))


def ask(question: str, default: str | None, read: Callable[[str], Any]) -> Any:
    """Ask until the answer can be read.

    Args:
        question: without a colon.
        default: for an empty answer; None for no default.
        read: turns the answer into a value, or raises a ValueError with the reason.
    """

    # click prints a UsageError and asks again; any other exception ends the command.
    def convert(text: object) -> object:
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
    # Pipes, notebooks and CI get a numbered list, which needs no control of the cursor.
    if not _on_terminal():
        return choices[_ask_number(question, choices, selected)][0]
    with _keys() as keys:
        click.echo(f"{question}  (arrow keys, Return)")
        _draw(choices, selected)
        for key in keys:
            if key in ("\r", "\n"):
                break
            if key in _UP:
                selected = (selected - 1) % len(choices)
            elif key in _DOWN:
                selected = (selected + 1) % len(choices)
            elif key.isdigit() and 0 < int(key) <= len(choices):
                selected = int(key) - 1
            # Move the cursor up to the first choice, and draw over the old list.
            click.echo(f"\x1b[{len(choices)}A", nl=False)
            _draw(choices, selected)
        # Leave one line of question and answer; \x1b[J clears the list below it.
        click.echo(f"\x1b[{len(choices) + 1}A\x1b[J{question}: {choices[selected][1]}")
    return choices[selected][0]


def _draw(choices: Sequence[tuple[str, str]], selected: int) -> None:
    for number, (_, text) in enumerate(choices):
        marker = "   "
        if number == selected:
            marker = " ➔ "
        # The new line may be shorter than the one below it.
        click.echo(f"\x1b[2K{marker}{text}")


def _ask_number(
    question: str, choices: Sequence[tuple[str, str]], selected: int
) -> int:
    click.echo(question)
    for number, (_, text) in enumerate(choices, start=1):
        click.echo(f"  {number}  {text}")
    numbers = click.IntRange(1, len(choices))
    return int(click.prompt("number", type=numbers, default=selected + 1)) - 1


def _on_terminal() -> bool:
    # Emacs and some CI systems show escape sequences as text.
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        return False
    # Windows has no termios.
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
    # TCSANOW, since setcbreak's default discards what was typed ahead.
    tty.setcbreak(terminal, termios.TCSANOW)
    try:
        yield _pressed(terminal)
    finally:
        # Also after Ctrl-C, or the shell would show no typed characters.
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _pressed(terminal: int) -> Iterator[str]:
    while True:
        # One read may return several keys, and always returns whole escape sequences.
        typed = os.read(terminal, 64)
        # The terminal is gone.
        if not typed:
            raise click.Abort
        for match in _KEY.finditer(typed.decode(errors="replace")):
            # Ctrl-D, which is an ordinary character without the terminal's line mode.
            if match[0] == "\x04":
                raise click.Abort
            yield match[0]


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = map(str.ljust, row, widths)
        click.echo("  ".join(cells).rstrip())
