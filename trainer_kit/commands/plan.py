"""``trainer-kit plan``: which strategy, whether it fits, and how fast it would be."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path

import click

from trainer_kit.commands.terminal import OutputPath
from trainer_kit.core.wings import need_wing

__all__ = ["plan"]


def _numbers(
    context: click.Context, option: click.Parameter, text: str
) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"numbers of ranks, such as 8,64, and not {text!r}"
        ) from None


@click.command("plan")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--world", required=True, callback=_numbers, help="Numbers of ranks: 8,64,512."
)
@click.option(
    "--device",
    help="h200, h100, a100-80, ..., or cpu: this machine. By default this machine's accelerator.",
)
@click.option(
    "--max-memory",
    help="Memory that a rank may use: 60GB. By default nine tenths of the device's.",
)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    help="Only this one; repeat the option for several.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    help="By default the script's, and mixed precision.",
)
@click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    help="Samples per optimizer step. By default the script's.",
)
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    help="Price of a device per hour; adds the cost.",
)
@click.option(
    "--efficiency",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.5,
    show_default=True,
    help="Assumed share of peak FLOP/s for matmuls.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--html", type=OutputPath(), help="Write a page with a bar for each rank."
)
def plan(
    script: str,
    arguments: tuple[str, ...],
    world: tuple[int, ...],
    device: str | None,
    max_memory: str | None,
    strategies: tuple[str, ...],
    precisions: tuple[str, ...],
    global_batch: int | None,
    price: float | None,
    efficiency: float,
    as_json: bool,
    html: Path | None,
) -> None:
    """Find the configurations of SCRIPT that fit into memory, without the devices, and print how to start the best one.

    SCRIPT runs up to its first fit, with the ARGUMENTS after "--" and without memory for weights. Steps of its module
    then run on tensors without storage, under each strategy. Exits with 1 if nothing fits.
    """
    need_wing("planning", "trainer-kit plan")
    from trainer_kit.checkpoint.files import in_bytes
    from trainer_kit.commands.script import captured_fit, failed_script
    from trainer_kit.core.device_table import find_device
    from trainer_kit.core.errors import TrainerKitError
    from trainer_kit.planning.estimate import Assumptions
    from trainer_kit.planning.planner import plan_fit
    from trainer_kit.trainer import Trainer

    # Wrong words are errors before the script runs, which may take minutes.
    if device not in (None, "cpu"):
        find_device(device)
    limit = None
    if max_memory is not None:
        limit = in_bytes(max_memory, "--max-memory")
    # The script's output is not part of the result.
    with contextlib.redirect_stdout(sys.stderr):
        fit = captured_fit(script, arguments, trainer_class=Trainer, empty_weights=True)
        try:
            fit_plan = plan_fit(
                fit.trainer,
                fit.module,
                fit.train_dataloaders,
                fit.datamodule,
                world=world,
                device=device,
                max_memory=limit,
                strategies=strategies,
                precisions=precisions,
                global_batch=global_batch,
                assumptions=Assumptions(price=price, efficiency=efficiency),
                arguments=fit.arguments,
                script=shlex.join([script, *arguments]),
                say=lambda text: click.echo(text, err=True),
            )
        except TrainerKitError:
            raise
        # An error of the script's data or hooks; the last note says which configuration was tried.
        except Exception as error:
            raise failed_script(
                script, error, *getattr(error, "__notes__", ["in the plan"])[-1:]
            ) from error
    if html is not None:
        fit_plan.to_html(html)
        click.echo(f"wrote {html}", err=True)
    text = str(fit_plan)
    if as_json:
        text = fit_plan.to_json()
    click.echo(text)
    if fit_plan.best() is None:
        sys.exit(1)
