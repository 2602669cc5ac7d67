"""``tk.cli``: the command line of a training script, from the signatures of its module, its data and the Trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.seed import seed_everything

if TYPE_CHECKING:
    from trainer_kit.core.protocols import ModuleLike, TrainerLike
    from trainer_kit.trainer import Trainer

__all__ = ["CliRun", "cli"]


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
    datamodule: Any
    result: Any


def cli(
    module: type[Any] | None = None,
    data: type[Any] | None = None,
    *,
    subclass_mode_model: bool = False,
    subclass_mode_data: bool = False,
    trainer_defaults: Mapping[str, Any] | None = None,
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
    from trainer_kit.commands.arguments import Arguments
    from trainer_kit.core.module import TrainModule

    words = sys.argv[1:] if args is None else list(args)
    parsed = Arguments(
        module or TrainModule,
        data,
        choose_model=subclass_mode_model or module is None,
        choose_data=subclass_mode_data,
        trainer_defaults=trainer_defaults or {},
    ).parse(words)
    if parsed.seed is not None:
        seed_everything(parsed.seed)
    try:
        made = parsed.instantiate()
    except ConfigurationError as error:  # from the Trainer or from constructors of the user
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    trainer, datamodule = made["trainer"], made.get("data")
    trainer.set_callbacks([*trainer.callbacks, _SaveConfig(parsed.configuration(), partial(_writes, trainer))])
    run = getattr(trainer, parsed.command)
    result = run(made["model"], datamodule=datamodule, **parsed.entry_point_arguments())
    return CliRun(command=parsed.command, trainer=trainer, module=made["model"], datamodule=datamodule, result=result)


def _writes(trainer: Trainer, stage: str) -> bool:
    """Whether the run writes logs or checkpoints, with the callbacks that the module adds."""
    saves = stage == "fit" and trainer.checkpoint_callback is not None
    return bool(trainer.loggers or saves) and not trainer.settings.fast


@final
class _SaveConfig(Callback):
    """Writes the resolved configuration to the run's directory, without replacing another one."""

    def __init__(self, configuration: Mapping[str, Any], writes: Callable[[str], bool]) -> None:
        self.configuration = configuration
        self.writes = writes

    def setup(self, trainer: TrainerLike, module: ModuleLike, stage: str) -> None:
        if not trainer.is_global_zero or not self.writes(stage):
            return
        import yaml

        text = yaml.safe_dump(mask_secrets(self.configuration), sort_keys=False, allow_unicode=True)
        directory = trainer.run_dir
        directory.mkdir(parents=True, exist_ok=True)
        _keep(directory, text)


def _keep(directory: Path, text: str) -> None:
    number = 1
    while True:
        path = directory / ("config.yaml" if number == 1 else f"config-{number}.yaml")
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            return
        except FileExistsError:
            if path.is_file() and path.read_text(encoding="utf-8") == text:
                return
        number += 1
