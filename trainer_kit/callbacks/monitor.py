"""The value a callback watches: where it is read, which of two is better, and when it is fresh."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import final

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.protocols import TrainerLike

__all__ = ["Monitor", "epoch_ends_here", "has_validation"]


@final
class Monitor:
    """A name in ``trainer.callback_metrics`` and its direction.

    Args:
        name: what was logged.
        mode: ``"min"`` or ``"max"``.
        owner: the callback's class name, for errors.

    Raises:
        ConfigurationError: for another mode.

    Example:
        >>> watched = Monitor("val_loss", "min", "EarlyStopping")
        >>> watched.better(0.1, 0.2), watched.better(float("nan"), 0.2), watched.worst
        (True, False, inf)
    """

    def __init__(self, name: str, mode: str, owner: str) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(
                f"{owner}(mode=) is a direction", found=repr(mode), fix=did_you_mean(str(mode), ("min", "max"))
            )
        self.name, self.mode, self.owner = name, mode, owner
        self.worst = float("inf") if mode == "min" else float("-inf")

    def better(self, value: float, than: float) -> bool:
        """Whether ``value`` is strictly better; NaN never is."""
        return value < than if self.mode == "min" else value > than

    def read(self, trainer: TrainerLike, counts: Mapping[str, int] = MappingProxyType({})) -> tuple[float | None, int]:
        """The value as rank 0 has it (None where it was not logged), and the step whose weights it describes.

        A collective with more than one process, and a sync point: call it where every rank does.

        Args:
            trainer: whose values are read.
            counts: values of the present step that need not be logged.
        """
        value = trainer.callback_metrics.get(self.name, counts.get(self.name))
        found = None if value is None else float(value), trainer.logged_at(self.name)
        # Values between two flushes are local to a rank; what is decided with them must not differ.
        if trainer.world_size > 1:
            found = trainer.strategy.world.broadcast(found)
        return found

    def missing(self, trainer: TrainerLike) -> ConfigurationError:
        """The error for a value that should have been logged by now."""
        known = sorted(trainer.callback_metrics)
        fix = did_you_mean(self.name, known) if known else f'call self.log("{self.name}", value) in a step'
        lacks = "val" in self.name and not has_validation(trainer)
        return ConfigurationError(
            f"{self.owner} watches {self.name!r}, which is not logged",
            found=f"logged so far: {', '.join(known) or 'nothing'}{'; there is no validation' if lacks else ''}",
            fix=f"define validation_step and val_dataloader, or: {fix}" if lacks else fix,
        )


def has_validation(trainer: TrainerLike) -> bool:
    """Whether this fit has validation batches at all."""
    return sum(trainer.num_val_batches) > 0


def epoch_ends_here(trainer: TrainerLike) -> bool:
    """Whether ``on_train_epoch_end`` follows at this same step, where all values of the epoch are reduced.

    An epoch of unknown length answers False.
    """
    return trainer.progress.epoch_batch >= trainer.num_training_batches
