"""``trainer-kit``: all commands, and how they print errors."""

from __future__ import annotations

import sys
from typing import final

import click

from trainer_kit.commands.checkpoint import checkpoint, merge_weights
from trainer_kit.commands.config import config
from trainer_kit.commands.doctor import doctor, env
from trainer_kit.commands.estimate_memory import estimate_memory
from trainer_kit.commands.evaluate import evaluate
from trainer_kit.commands.launch import explain, launch
from trainer_kit.commands.migrate import migrate
from trainer_kit.commands.plan import plan
from trainer_kit.commands.report import report
from trainer_kit.commands.to_fsdp2 import to_fsdp2
from trainer_kit.commands.tpu_config import tpu_config
from trainer_kit.commands.trial import trial
from trainer_kit.commands.verify import verify
from trainer_kit.core.errors import ConfigurationError, TrainerKitError

__all__ = ["main"]


@final
class _Commands(click.Group):
    """Exits with 2 for a wrong call and with 1 for other errors of this library, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        # click prints its own exceptions without a traceback, and has an exit code for each class of them.
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from error
        except TrainerKitError as error:
            raise click.ClickException(str(error)) from error


@click.version_option(
    sys.modules[__name__.partition(".")[0]].__version__, prog_name="trainer-kit"
)
@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Start runs of trainer_kit, and manage their files."""


# None of these modules imports torch before its command runs, so that --help takes no seconds.
for _command in (
    checkpoint,
    config,
    doctor,
    env,
    estimate_memory,
    evaluate,
    explain,
    launch,
    merge_weights,
    migrate,
    plan,
    report,
    to_fsdp2,
    tpu_config,
    trial,
    verify,
):
    main.add_command(_command)
