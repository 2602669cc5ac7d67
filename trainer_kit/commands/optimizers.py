"""``--optimizer`` and ``--lr_scheduler`` of a training script: classes that are named in place of code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import jsonargparse
from lightning_utilities.core.overrides import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule

__all__ = ["KINDS", "add_optimizer_arguments", "use_optimizer"]

KINDS: Final[Mapping[str, type[Any]]] = {"optimizer": Optimizer, "lr_scheduler": LRScheduler}
"""What each option names a subclass of."""


def add_optimizer_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Give a parser the options, all of them optional."""
    # They are made once the module's weights are where they train: not with the other classes.
    later: dict[str, Any] = {"instantiate": False, "fail_untyped": False}
    parser.add_subclass_arguments(Optimizer, "optimizer", skip={"params"}, **later)
    parser.add_subclass_arguments(LRScheduler, "lr_scheduler", skip={"optimizer"}, **later)
    parser.add_argument(
        "--lr_scheduler_interval", type=Literal["epoch", "step"], default="epoch", help="when the scheduler advances"
    )
    parser.add_argument(
        "--lr_scheduler_monitor", type=str | None, default=None, help="the logged value that ReduceLROnPlateau looks at"
    )


def use_optimizer(module: Any, values: Any, say: Callable[[str], None]) -> None:
    """Have a module configured with the optimizer and the scheduler that were named, if any.

    Args:
        module: its own ``configure_optimizers`` is not asked then.
        values: as parsed.
        say: prints a line.

    Raises:
        ConfigurationError: for a scheduler without what it needs.
    """
    optimizer, scheduler = values.optimizer, values.lr_scheduler
    interval, monitor = values.lr_scheduler_interval, values.lr_scheduler_monitor
    if optimizer is None:
        if scheduler is not None:
            raise ConfigurationError("--lr_scheduler needs --optimizer", fix="name the optimizer whose rate it sets")
        return
    plateau = scheduler is not None and issubclass(_class(scheduler), ReduceLROnPlateau)
    if plateau and monitor is None:
        raise ConfigurationError("ReduceLROnPlateau needs --lr_scheduler_monitor", fix="name a value that is logged")
    if is_overridden("configure_optimizers", module, TrainModule):
        say(f"--optimizer counts: {type(module).__name__}.configure_optimizers is not asked")

    def configure_optimizers() -> Any:
        made = _class(optimizer)(module.parameters(), **_arguments(optimizer))
        if scheduler is None:
            return made
        config = {"scheduler": _class(scheduler)(made, **_arguments(scheduler)), "interval": interval}
        return {"optimizer": made, "lr_scheduler": {**config, "monitor": monitor} if plateau else config}

    module.configure_optimizers = configure_optimizers


def _class(named: Any) -> Any:
    path, _, name = named.class_path.rpartition(".")
    return getattr(importlib.import_module(path), name)


def _arguments(named: Any) -> dict[str, Any]:
    return dict(named.init_args.as_dict()) if "init_args" in named else {}
