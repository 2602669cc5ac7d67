"""When a callback acts, and the logged value that it watches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import final

from trainer_kit.core.errors import ConfigurationError, DurationError, did_you_mean
from trainer_kit.core.progress import Duration, DurationLike
from trainer_kit.core.protocols import TrainerLike
from trainer_kit.core.states import names_validation

__all__ = [
    "Monitor",
    "check_validation",
    "epoch_ends_here",
    "following",
    "has_validation",
    "in_run",
    "the_only",
]


def following(count: int | float, every: int | float) -> int | float:
    """The first multiple of ``every`` above ``count``.

    Example:
        >>> following(99, 100), following(100, 100), following(102, 100)
        (100, 200, 200)
    """
    return (count // every + 1) * every


def in_run(every: Duration, trainer: TrainerLike) -> Duration:
    """``every`` in a unit that ``progress`` counts: a fraction of the run becomes optimizer steps.

    Raises:
        DurationError: for a fraction of a run without an end.
    """
    if every.unit != "dur":
        return every
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total):
        raise DurationError(
            f"{every} is a fraction of a run whose length is unknown",
            fix='set max_steps or max_epochs with a sized loader, or count in another unit ("500ba")',
        )
    return Duration(max(1, round(every.value * total)), "st")


def the_only(**given: tuple[DurationLike | None, str]) -> Duration | None:
    """The only given interval; ``given`` has, by argument name, the value and the unit of a bare number.

    Zero means never; for a time it means every step.

    Raises:
        ConfigurationError: more than one interval is given.

    Example:
        >>> the_only(every_n_steps=(100, "st"), every_n_epochs=(None, "ep"))
        Duration('100st')
    """
    intervals: dict[str, Duration] = {}
    for name, (value, unit) in given.items():
        if value is None:
            continue
        every = Duration.parse(value, unit)
        # 0 steps or epochs switch the argument off, as in Lightning; 0 seconds mean every step.
        if every.value > 0 or every.unit == "s":
            intervals[name] = every
    if len(intervals) > 1:
        arguments = [f"{name}={every}" for name, every in intervals.items()]
        raise ConfigurationError(
            "a callback takes one interval only",
            found=", ".join(arguments),
            fix="use one callback for each interval",
        )
    return next(iter(intervals.values()), None)


@final
class Monitor:
    """A name in ``trainer.callback_metrics`` and its direction.

    Args:
        name: the logged name.
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
                f"{owner}(mode=) must be 'min' or 'max'",
                found=repr(mode),
                fix=did_you_mean(str(mode), ("min", "max")),
            )
        self.name = name
        self.mode = mode
        self.owner = owner
        self.worst = math.inf if mode == "min" else -math.inf

    def better(self, value: float, than: float) -> bool:
        """Whether ``value`` is strictly better; NaN never is."""
        # Strictly: a value that stays the same counts as no improvement. A comparison with NaN is False.
        if self.mode == "min":
            return value < than
        return value > than

    def read(
        self, trainer: TrainerLike, counts: Mapping[str, int] = MappingProxyType({})
    ) -> tuple[float | None, int]:
        """The value on rank 0 (None if it was not logged), and the step whose weights it describes.

        Collective, and a sync point: every rank must call it.

        Args:
            trainer: the Trainer that has the values.
            counts: values of the current step that need not be logged.
        """
        logged = trainer.callback_metrics.get(self.name, counts.get(self.name))
        # The conversion reads a tensor of the device: the sync point of this method.
        value = None
        if logged is not None:
            value = float(logged)
        reading = value, trainer.logged_at(self.name)
        # Between two flushes a value is local to its rank; all ranks must decide by the same value.
        if trainer.world_size > 1:
            reading = trainer.strategy.world.broadcast(reading)
        return reading

    def warn_unlogged(self, trainer: TrainerLike) -> None:
        """Warn, in a sanity check, if validation logs no value of this name; no error, for training may log it."""
        logged_names = sorted(trainer.callback_metrics)
        if self.name in logged_names or not names_validation(self.name):
            return
        names = ", ".join(logged_names) or "nothing"
        trainer.print(
            f"{self.owner} monitors {self.name!r}, and the sanity check's validation logged {names}: if nothing"
            " else logs it, the first check of this value raises an error"
        )

    def missing(self, trainer: TrainerLike) -> ConfigurationError:
        """The error for a value that was not logged in time."""
        logged_names = sorted(trainer.callback_metrics)
        if logged_names:
            observation = f"logged so far: {', '.join(logged_names)}"
            fix = did_you_mean(self.name, logged_names)
        else:
            observation = "logged so far: nothing"
            fix = f'call self.log("{self.name}", value) in a step'
        # A name such as `val_loss` is usually logged in validation.
        if names_validation(self.name) and not has_validation(trainer):
            observation += "; this fit has no validation"
            fix = f"define validation_step and val_dataloader, or: {fix}"
        return ConfigurationError(
            f"{self.owner} monitors {self.name!r}, but no value of this name is logged",
            found=observation,
            fix=fix,
        )


def has_validation(trainer: TrainerLike) -> bool:
    """Whether this fit has validation batches at all."""
    return sum(trainer.num_val_batches) > 0


def check_validation(
    trainer: TrainerLike, owner: str, monitor: str | None, only_after: str | None
) -> None:
    """Answer, before the first step, a callback that waits for the validation of a fit that has none.

    A training step or another callback may log a value of any name, so a name alone is a reason for a line only.

    Args:
        trainer: the Trainer of the fit.
        owner: the callback's class name.
        monitor: the logged value that the callback watches, or None.
        only_after: the argument by which the callback acts after validation only, or None.

    Raises:
        ConfigurationError: ``only_after`` is given, so the callback would never act.
    """
    # With loaders that are made again, later epochs may validate.
    if has_validation(trainer) or trainer.reload_dataloaders_every_n_epochs:
        return
    fix = "define validation_step, and pass a validation loader"
    if only_after is not None:
        raise ConfigurationError(
            f"{owner} acts after validation only, and this fit has no validation",
            found=f"{owner}({only_after})",
            fix=f"{fix}; or leave {only_after.partition('=')[0]}= out",
        )
    # A line only: another callback may log a value with such a name in training.
    if monitor is not None and names_validation(monitor):
        trainer.print(
            f"{owner} monitors {monitor!r}, and this fit has no validation: {fix}, or log it in training, or the first"
            " epoch ends with an error"
        )


def epoch_ends_here(trainer: TrainerLike) -> bool:
    """Whether ``on_train_epoch_end``, before which the values of the epoch are reduced, follows at this step.

    An epoch of unknown length answers False.
    """
    # Equal, not at least: beyond it, the length was only a hint.
    return trainer.progress.epoch_batch == trainer.num_training_batches
