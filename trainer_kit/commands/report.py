"""``trainer-kit report``: one page over the curves, values and configurations of runs."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer_kit.commands.terminal import FilePath, refuse_options
from trainer_kit.core.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.report.collect import RunDirectory

__all__ = ["report"]


@click.command("report")
@click.argument(
    "runs",
    metavar="RUN...",
    type=FilePath(exists=True, file_okay=False, path_type=Path),
    nargs=-1,
)
@click.option(
    "--output",
    "-o",
    type=FilePath(dir_okay=False, path_type=Path),
    help="By default report.html.",
)
@click.option("--open", "opens", is_flag=True, help="Show the page in a browser.")
@click.option(
    "--watch",
    is_flag=True,
    help="Write it every few seconds until the runs have ended, or Ctrl-C.",
)
@click.option(
    "--every",
    type=click.FloatRange(min=1),
    default=10,
    show_default=True,
    help="Seconds, with --watch.",
)
@click.option(
    "--goodput",
    is_flag=True,
    help="Print where the time of each run went, over all its restarts, and write no page.",
)
def report(
    runs: tuple[Path, ...],
    output: Path | None,
    opens: bool,
    watch: bool,
    every: float,
    goodput: bool,
) -> None:
    """Write one page about the runs in the directories RUN.

    Of one run the page is its own report.html, of several it is report.html here. A directory of runs counts as all of
    them.
    """
    from trainer_kit.report.collect import RunDirectory, find_runs
    from trainer_kit.report.page import REPORT, write_report

    if goodput:
        options = ["output", "opens", "watch", "every"]
        refuse_options(options, "--goodput prints, and writes no page: leave {} out")
    elif not watch:
        refuse_options(["every"], "{} needs --watch")
    directories = [RunDirectory(directory) for directory in find_runs(runs or [Path()])]
    if goodput:
        for run in directories:
            run.read_events()
            _print_goodput(run)
        return
    target = output
    if target is None:
        home = Path()
        # The page of a single run replaces the one that its own end writes.
        if len(directories) == 1:
            home = directories[0].directory
        target = home / REPORT
    is_first = True
    while True:
        for run in directories:
            run.read()
        finished = not watch or all(run.finished for run in directories)
        # The last page must not reload itself: nothing writes it again.
        refresh = 0
        if not finished:
            refresh = max(1, round(every))
        try:
            write_report(target, directories, refresh=refresh)
        except OSError as error:
            fix = "name another file: --output"
            raise ConfigurationError(
                f"{target} could not be written", found=str(error), fix=fix
            ) from error
        if is_first:
            click.echo(target)
            if opens:
                webbrowser.open(target.resolve().as_uri())
        if finished:
            return
        is_first = False
        time.sleep(every)


def _print_goodput(run: RunDirectory) -> None:
    from trainer_kit.report.goodput import goodput_table

    for name, goodput in zip(run.names(), run.goodputs(), strict=True):
        if goodput is None:
            click.echo(
                f"{name}: no account of time (a fit with a logger records one; a custom training loop does not)"
            )
        else:
            click.echo(goodput_table(name, goodput))
