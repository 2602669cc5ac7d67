"""``trainer-kit verify``: compare a script's training in a configuration with a plain loop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Final, NoReturn

import click

from trainer_kit.commands.terminal import FilePath, OutputPath, refuse_options
from trainer_kit.core.display import plural
from trainer_kit.core.errors import TrainerKitError
from trainer_kit.core.types import Keywords
from trainer_kit.core.wings import need_wing

__all__ = ["verify"]


@click.command("verify")
@click.argument("script", type=FilePath(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--strategy", help="A value of Trainer(strategy=); by default the script's."
)
@click.option(
    "--precision", help="A value of Trainer(precision=); by default the script's."
)
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    help="Ranks on this machine; by default the script's.",
)
@click.option(
    "--accelerator", help="A value of Trainer(accelerator=); by default the script's."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Optimizer steps of each run.",
)
@click.option(
    "--local",
    is_flag=True,
    help="All ranks in this process, as threads that take turns: for breakpoint().",
)
@click.option(
    "--data",
    is_flag=True,
    help="Check the training loaders in place of the training: resumes, workers, ranks.",
)
@click.option(
    "--batches",
    type=click.IntRange(min=2),
    default=32,
    show_default=True,
    help="With --data: batches of an epoch that are read.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--html", type=OutputPath(), help="Write a page with the difference by step."
)
def verify(
    script: str,
    arguments: tuple[str, ...],
    strategy: str | None,
    precision: str | None,
    devices: int | None,
    accelerator: str | None,
    steps: int,
    local: bool,
    data: bool,
    batches: int,
    as_json: bool,
    html: Path | None,
) -> None:
    """Compare the training of SCRIPT in a configuration with a plain PyTorch loop, and name what differs.

    The script runs unchanged up to its first Trainer.fit; put its own ARGUMENTS after --. With --data its training
    loaders are interrupted and resumed, on 1 and on --devices ranks (2 by default), and one line for each check says
    whether the batches are the same and every sample comes once. Exits with 0 where nothing differs, with 1 where
    something does, and with 2 where it could not be checked.
    """
    need_wing("verify", "trainer-kit verify")
    if not data:
        refuse_options(["batches"], "{} needs --data")
    else:
        refuse_options(_TRAINING_ONLY, "--data reads loaders only: leave {} out")
        _verify_data(script, arguments, devices or 2, batches, as_json)
    from trainer_kit.commands.script import captured_fit
    from trainer_kit.trainer import Trainer
    from trainer_kit.verify.page import write_page

    options: Keywords = {
        "strategy": strategy,
        "precision": precision,
        "devices": devices,
        "accelerator": accelerator,
    }
    overrides = {name: value for name, value in options.items() if value is not None}
    try:
        # The script's output is not part of the result.
        with contextlib.redirect_stdout(sys.stderr):
            fit = captured_fit(script, arguments, trainer_class=Trainer)
            # Steps of a comparison must not appear in the logs of the script's runs, nor continue one of them.
            disabled = {"logger": False, "num_nodes": 1, "resume": None}
            trainer = Trainer(**{**fit.arguments, **overrides, **disabled})
            comparison = trainer.verify(
                fit.module,
                fit.train_dataloaders,
                fit.val_dataloaders,
                fit.datamodule,
                steps=steps,
                local=local,
            )
        if html is not None:
            write_page(html, comparison)
    except TrainerKitError as error:
        _exit_unchecked(str(error))
    # An error of the script's own code, in any of the runs.
    except Exception as error:
        _exit_unchecked(f"{type(error).__name__}: {error}{_describe_place(error)}")
    text = str(comparison)
    if as_json:
        text = json.dumps(comparison.to_dict(), indent=2, allow_nan=False)
    click.echo(text)
    if html is not None and not as_json:
        click.echo(html)
    sys.exit(comparison.exit_code)


_TRAINING_ONLY: Final = (
    "strategy",
    "precision",
    "accelerator",
    "steps",
    "local",
    "html",
)


def _verify_data(
    script: str,
    arguments: tuple[str, ...],
    ranks: int,
    batches: int,
    as_json: bool,
) -> NoReturn:
    """Check the training loaders of a script, print the verdicts, and exit."""
    from trainer_kit.commands.script import captured_fit
    from trainer_kit.testing.loaders import check_feeds
    from trainer_kit.trainer import Trainer
    from trainer_kit.verify.training_data import TrainingData

    try:
        with contextlib.redirect_stdout(sys.stderr):
            fit = captured_fit(script, arguments, trainer_class=Trainer)
            data = TrainingData(
                fit.trainer, fit.module, fit.train_dataloaders, fit.datamodule
            )
            limit = data.limit(batches)
            report = check_feeds(
                data.open_feed,
                workers=data.workers,
                ranks=sorted({1, ranks}),
                limit=limit,
                seed=fit.trainer.data_seed,
            )
            if not data.uses_workers:
                report = report.with_workers_as_advice()
            title = f"data: {data.describe()}"
    except TrainerKitError as error:
        _exit_unchecked(str(error))
    except Exception as error:
        _exit_unchecked(f"{type(error).__name__}: {error}{_describe_place(error)}")
    if limit is not None:
        title += f"; the first {plural(limit, 'batch')} of each epoch"
    text = f"{title}\n{report}"
    if as_json:
        text = json.dumps({"data": title, **report.to_dict()}, indent=2)
    click.echo(text)
    sys.exit(report.exit_code)


def _describe_place(error: BaseException) -> str:
    """The line of the user's code that raised; a rank's traceback is a note of its error."""
    lines = [
        *traceback.format_tb(error.__traceback__),
        *getattr(error, "__notes__", []),
    ]
    # Frames are read from text, because the notes of other ranks have no traceback objects.
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', "".join(lines))
    library_paths = (
        str(Path(__file__).parents[1]),
        f"{os.sep}site-packages{os.sep}",
        sysconfig.get_path("stdlib"),
        "<",
    )
    user_frames = [
        frame
        for frame in frames
        if not any(library_path in frame[0] for library_path in library_paths)
    ]
    if not user_frames:
        return ""
    return "\n  found: {}, line {}, in {}".format(*user_frames[-1])


def _exit_unchecked(reason: str) -> NoReturn:
    click.echo(f"could not check: {reason}", err=True)
    sys.exit(2)
