"""``tk.cli``: a training script's command line, made from the signatures of its module, its data and the Trainer."""

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

if TYPE_CHECKING:
    from trainer_kit.trainer import Trainer

__all__ = ["CliRun", "cli"]


@final
@dataclass(frozen=True, kw_only=True)
class CliRun:
    """What a command line made and did.

    Attributes:
        command: fit, validate, test or predict.
        trainer: as configured.
        module: as configured, and trained by ``fit``.
        datamodule: as configured; None where the module brings its loaders.
        result: what the verb returned.
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
    """Make this script a command line: ``fit``, ``validate``, ``test`` and ``predict``, then run what it was asked.

    Options and keys are ``trainer.…``, ``model.…``, ``data.…`` (the constructors' arguments), ``seed_everything`` and
    ``ckpt_path``; ``--config FILE`` takes them from YAML, later options win, and ``--print_config`` prints them all. A
    class is chosen as ``class_path`` and ``init_args``. A wrong call is one line and exit code 2. Each run that writes
    logs or checkpoints keeps its resolved configuration as ``config.yaml`` in its directory, readable by its owner
    alone, with secrets masked.

    Args:
        module: the `TrainModule` class; None: any, chosen by ``--model``.
        data: the `DataModule` class; None: the module brings its loaders.
        subclass_mode_model: ``--model`` chooses a subclass of ``module``.
        subclass_mode_data: ``--data`` chooses a subclass of ``data``.
        trainer_defaults: arguments of the Trainer in place of its own defaults; classes as dicts of ``class_path`` and
            ``init_args``.
        args: words in place of ``sys.argv[1:]``.

    Returns:
        What was made and done. Where ranks are started, it returns on the ranks alone.

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
    except ConfigurationError as error:  # of the Trainer or of the user's constructors: the call is wrong
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    trainer, datamodule = made["trainer"], made.get("data")
    trainer.set_callbacks([*trainer.callbacks, _SaveConfig(parsed.configuration())])
    verb = getattr(trainer, parsed.command)
    result = verb(made["model"], datamodule=datamodule, **parsed.verb_arguments())
    return CliRun(command=parsed.command, trainer=trainer, module=made["model"], datamodule=datamodule, result=result)


@final
class _SaveConfig(Callback):
    """Writes the resolved configuration to the run's directory, beside those that are there."""

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self.configuration = configuration

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        writes = trainer.loggers or (stage == "fit" and trainer.checkpoint_callback is not None)
        if not writes or trainer.settings.fast or not trainer.is_global_zero:
            return
        import yaml

        text = yaml.safe_dump(mask_secrets(self.configuration), sort_keys=False, allow_unicode=True)
        directory = Path(trainer.run_dir)
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
