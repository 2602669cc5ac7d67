"""``tk.cli``: the command line of a training script, from the signatures of its module, its data and the Trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.seed import seed_everything
from trainer_kit.core.types import DataModuleLike

if TYPE_CHECKING:
    from trainer_kit.core.protocols import ModuleLike, TrainerLike
    from trainer_kit.trainer import Trainer

__all__ = ["CliRun", "SaveConfigCallback", "cli"]


@final
@dataclass(frozen=True, kw_only=True)
class CliRun:
    """The objects and the result of a command line.

    Attributes:
        command: fit, validate, test or predict.
        trainer: as configured.
        module: as configured, and trained by ``fit``.
        datamodule: as configured; None if the module has the loaders.
        result: the return value of the command.
    """

    command: str
    trainer: Trainer
    module: Any
    datamodule: DataModuleLike
    result: Any


def cli(
    module: type[object] | None = None,
    data: type[object] | None = None,
    *,
    subclass_mode_model: bool = False,
    subclass_mode_data: bool = False,
    trainer_defaults: Mapping[str, object] | None = None,
    args: Sequence[str] | None = None,
) -> CliRun:
    """Make this script a command line with ``fit``, ``validate``, ``test`` and ``predict``, and run the given command.

    Options and keys are ``trainer.…``, ``model.…``, ``data.…`` (the constructors' arguments), ``seed_everything`` and
    ``ckpt_path``; ``--config FILE`` reads them from YAML, later options win, and ``--print_config`` prints them all. A
    class is chosen as ``class_path`` and ``init_args``. A wrong call prints one line and exits with code 2. Each run
    that writes logs or checkpoints saves its resolved configuration as ``config.yaml`` in its directory, readable only
    by its owner, with secrets masked.

    Args:
        module: the `TrainModule` class; None: any, chosen by ``--model``.
        data: the `DataModule` class; None: the module has the loaders.
        subclass_mode_model: ``--model`` chooses a subclass of ``module``.
        subclass_mode_data: ``--data`` chooses a subclass of ``data``.
        trainer_defaults: arguments of the Trainer in place of its own defaults; classes as dicts of ``class_path`` and
            ``init_args``.
        args: words in place of ``sys.argv[1:]``.

    Returns:
        The objects and the result. If it starts ranks, it returns only on the ranks.

    Raises:
        SystemExit: with 2 for a wrong call, with 0 after ``--help`` and ``--print_config``.

    Example:
        >>> from trainer_kit.testing import TinyModule
        >>> class Mine(TinyModule):
        ...     def train_dataloader(self):
        ...         return torch.randn(12, 4, 32).unbind()
        >>> import torch
        >>> ran = cli(Mine, args=["fit", "--model.lr=0.5", "--trainer.max_epochs=1", "--trainer.barebones=true"])
        >>> ran.command, ran.module.lr, ran.trainer.global_step
        ('fit', 0.5, 12)
    """
    from trainer_kit.commands.arguments import Arguments, use_optimizer
    from trainer_kit.core.module import TrainModule

    if args is None:
        args = sys.argv[1:]
    parsed = Arguments(
        module or TrainModule,
        data,
        choose_model=subclass_mode_model or module is None,
        choose_data=subclass_mode_data,
        trainer_defaults=trainer_defaults or {},
    ).parse(args)
    # Before the objects exist, so that weights and a random split of the data are the same on every rank.
    if parsed.seed is not None:
        seed_everything(parsed.seed)
    try:
        objects = parsed.instantiate()
        use_optimizer(objects["model"], parsed.values, objects["trainer"].print)
    except ConfigurationError as error:
        # From the Trainer or from constructors of the user.
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    trainer, datamodule = objects["trainer"], objects.get("data")
    # After the construction: as an argument it would not be added to the user's callbacks but replace them.
    trainer.set_callbacks(
        [*trainer.callbacks, SaveConfigCallback(parsed.parser, parsed.values)]
    )
    if parsed.checkpoint_line:
        trainer.say(parsed.checkpoint_line)
    run = getattr(trainer, parsed.command)
    result = run(
        objects["model"], datamodule=datamodule, **parsed.entry_point_arguments()
    )
    return CliRun(
        command=parsed.command,
        trainer=trainer,
        module=objects["model"],
        datamodule=datamodule,
        result=result,
    )


class SaveConfigCallback(Callback):
    """Writes the resolved configuration to the run's directory; a `LightningCLI` and `cli` add it.

    A run that writes neither logs nor checkpoints has no file. Secrets are masked, and only the owner can read it.
    Override `save_config` to put the configuration elsewhere as well.

    Args:
        parser: the command's parser.
        config: the parsed configuration.
        config_filename: the name of the file.
        overwrite: replace a file of this name; else the next is ``config-2.yaml``.
        multifile: refused: one file holds everything.
        save_to_log_dir: False: only `save_config` is called.

    Raises:
        ConfigurationError: for ``multifile=True``.
    """

    def __init__(
        self,
        parser: Any,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if multifile:
            raise ConfigurationError(
                "the configuration is always saved as one file",
                fix="leave multifile out",
            )
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        # A program may call several commands on one Trainer: the configuration is that of all of them.
        if self.already_saved or not trainer.is_global_zero:
            return
        # A run that leaves no file of its own shall leave no configuration either.
        writes = trainer.loggers or (
            stage == "fit" and trainer.checkpoint_callback is not None
        )
        if self.save_to_log_dir and writes and not trainer.fast_dev_run:
            import yaml

            # Dumped and read again: only the parser can write its values in the form that --config reads.
            text = self.parser.dump(self.config, skip_unset=False)
            plain = yaml.safe_load(text)
            # Only fit has this option: with its default in the file, no other command could read it.
            if not plain.get("load_weights_only"):
                plain.pop("load_weights_only", None)
            trainer.run_dir.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(
                mask_secrets(plain), sort_keys=False, allow_unicode=True
            )
            _write_new(trainer.run_dir / self.config_filename, text, self.overwrite)
        self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def save_config(
        self, trainer: TrainerLike, pl_module: ModuleLike, stage: str
    ) -> None:
        """Called once on rank 0, after the file is written; does nothing by default."""


def _write_new(first: Path, text: str, overwrite: bool) -> None:
    """Write a file; if another text has its name, under the first free one of ``NAME-2``, ``NAME-3``, ..."""
    number = 1
    path = first
    if overwrite:
        # And not opened for writing: a link would have its target overwritten, and a wide mode would stay.
        path.unlink(missing_ok=True)
    while True:
        try:
            # O_EXCL decides in one step between two runs that start in one directory; the mode is never wider than
            # the owner's, which a chmod after open() would allow for a moment.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            return
        except FileExistsError:
            # A resumed run with an unchanged configuration needs no second file.
            if path.is_file() and path.read_text(encoding="utf-8") == text:
                return
        number += 1
        path = first.with_stem(f"{first.stem}-{number}")
