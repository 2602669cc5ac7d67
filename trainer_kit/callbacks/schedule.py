"""Multiples of a duration: when the next one is, whatever the size of the steps in between."""

from __future__ import annotations

import math

from trainer_kit.core.errors import ConfigurationError, DurationError
from trainer_kit.core.progress import Duration, DurationLike
from trainer_kit.core.protocols import TrainerLike

__all__ = ["following", "in_run", "the_only"]


def following(count: int | float, every: int | float) -> int | float:
    """The first multiple of ``every`` above ``count``.

    Example:
        >>> following(99, 100), following(100, 100), following(102, 100)
        (100, 200, 200)
    """
    return (count // every + 1) * every


def in_run(every: Duration, trainer: TrainerLike) -> Duration:
    """``every`` in a unit that is counted: a fraction of the run becomes optimizer steps.

    Raises:
        DurationError: for a fraction of a run without an end.
    """
    if every.unit != "dur":
        return every
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total):
        raise DurationError(
            f"{every} is a fraction of a run whose length is not known",
            fix='set max_steps or max_epochs with a sized loader, or count in another unit ("500ba")',
        )
    return Duration(max(1, round(every.value * total)), "st")


def the_only(**given: tuple[DurationLike | None, str]) -> Duration | None:
    """The one interval that was given: by argument name its value and the unit of a bare number.

    Zero means never, except for a time, where it means at every step.

    Raises:
        ConfigurationError: for several.

    Example:
        >>> the_only(every_n_steps=(100, "st"), every_n_epochs=(None, "ep"))
        Duration('100st')
    """
    intervals = {name: Duration.parse(value, unit) for name, (value, unit) in given.items() if value is not None}
    found = {name: every for name, every in intervals.items() if every.value > 0 or every.unit == "s"}
    if len(found) > 1:
        raise ConfigurationError(
            "only one interval at a time",
            found=", ".join(f"{name}={every}" for name, every in found.items()),
            fix="use one callback for each",
        )
    return next(iter(found.values()), None)
