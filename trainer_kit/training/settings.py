"""The Trainer's loop arguments, validated once."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Final, NamedTuple

import torch

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError, DurationError, did_you_mean
from trainer_kit.core.progress import Duration, DurationLike
from trainer_kit.core.protocols import SetsAccumulation

__all__ = ["Settings", "check_switches", "make_settings", "plain_arguments"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The loop's limits, intervals and switches; see `trainer_kit.Trainer` for their meaning.

    The defaults are what a Trainer without arguments has. ``max_epochs`` is None if no number of epochs ends the run;
    ``endless`` is True if it was given as -1.
    """

    max_epochs: int | None = 1000
    max_steps: int | None = None
    max_duration: Duration | None = None
    min_epochs: int = 0
    min_steps: int = 0
    limits: dict[str, int | float] = field(
        default_factory=lambda: dict.fromkeys(("train", "val", "test", "predict"), 1.0)
    )
    validate_every: int | float | Duration = 1.0
    validate_epochs: int | None = 1
    sanity_steps: int = 2
    log_every: int = 50
    clip: tuple[float, str] | None = None
    inference_mode: bool = True
    shard: bool = True
    loss_weighting: bool = True
    global_batch_size: int | None = None
    overfit: int | float = 0
    fast: int = 0
    endless: bool = False
    reproducible: bool = False

    def with_limit(self, name: str, value: int | None) -> Settings:
        """A copy with another limit in epochs or steps.

        Args:
            name: ``max_epochs`` or ``max_steps``.
            value: at least -1; -1 and None mean no limit.

        Raises:
            ConfigurationError: the value is no limit.
        """
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= -1):
            raise ConfigurationError(
                f"{name} must be an integer ≥ -1",
                found=f"fit_loop.{name} = {value!r}",
                fix="pass -1 for no limit",
            )
        number = value
        if value == -1:
            number = None
        if name == "max_epochs":
            return replace(self, max_epochs=number, endless=value == -1)
        return replace(self, max_steps=number)

    def train_limit(self) -> int | float:
        """The limit of a training epoch: a number of batches, or a fraction."""
        return self.overfit or self.limits["train"]

    def steps(
        self, batches: float, accumulation: int, counting: SetsAccumulation | None
    ) -> int | float:
        """The number of optimizer steps of a whole fit; infinite if no limit is known.

        Args:
            batches: micro-batches of an epoch; infinite if the number is unknown.
            accumulation: micro-batches of a step.
            counting: decides the micro-batches of a step for each epoch; None: they stay the same.
        """

        limits: list[float] = []
        if self.max_steps is not None:
            limits.append(self.max_steps)
        duration = self.max_duration
        if duration is not None and duration.unit == "st":
            limits.append(duration.value)
        elif duration is not None and duration.unit == "ba":
            limits.append(_steps_of_batches(duration.value, batches, accumulation))
        if self.max_epochs is not None:
            limits.append(
                _steps_of_epochs(self.max_epochs, batches, accumulation, counting)
            )
        return min(limits, default=math.inf)


def _window_count(batches: float, accumulation: int) -> float:
    """The number of accumulation windows of so many micro-batches; the last one may be short."""
    if batches == math.inf:
        return batches
    return math.ceil(batches / accumulation)


def _steps_of_batches(limit: float, epoch_batches: float, accumulation: int) -> float:
    """The optimizer steps of ``limit`` micro-batches: each epoch ends its last window early."""
    # Windows do not reach over the end of an epoch, so every epoch is rounded up by itself.
    if not 0 < epoch_batches < math.inf:
        return _window_count(limit, accumulation)
    epochs, last_batches = divmod(limit, epoch_batches)
    steps_per_epoch = _window_count(epoch_batches, accumulation)
    return _window_count(last_batches, accumulation) + int(epochs) * steps_per_epoch


def _steps_of_epochs(
    epochs: int,
    epoch_batches: float,
    accumulation: int,
    counting: SetsAccumulation | None,
) -> float:
    if not epochs:
        return 0
    if counting is None or epoch_batches in (0, math.inf):
        return _window_count(epoch_batches, accumulation) * epochs
    lengths = map(counting.get_accumulate_grad_batches, range(epochs))
    return sum(math.ceil(epoch_batches / length) for length in lengths)


def make_settings(
    *,
    fast_dev_run: bool | int,
    max_epochs: int | None,
    max_steps: int,
    max_duration: DurationLike | None,
    max_time: Any,
    min_epochs: int | None,
    min_steps: int | None,
    limits: dict[str, int | float | None],
    val_check_interval: DurationLike | None,
    check_val_every_n_epoch: DurationLike | None,
    num_sanity_val_steps: int | None,
    log_every_n_steps: DurationLike | None,
    clip_val: float | None,
    clip_algorithm: str | None,
    overfit_batches: int | float,
    **switches: Any,
) -> Settings:
    """Validate every argument; `ConfigurationError` names the invalid one."""
    # True is one batch; of another type than int and bool, `_check_minimum` names it.
    fast = fast_dev_run
    if isinstance(fast_dev_run, bool):
        fast = int(fast_dev_run)
    # Before the minimums are checked: a duration such as "10st" is a number of steps here.
    log_every = _in_unit("log_every_n_steps", log_every_n_steps)
    val_epochs = _in_unit("check_val_every_n_epoch", check_val_every_n_epoch)
    for name, value, minimum in (
        ("fast_dev_run", fast, 0),
        ("max_epochs", max_epochs, -1),
        ("max_steps", max_steps, -1),
        ("min_epochs", min_epochs, 0),
        ("min_steps", min_steps, 0),
        ("log_every_n_steps", log_every, 0),
        ("check_val_every_n_epoch", val_epochs, 1),
        ("num_sanity_val_steps", num_sanity_val_steps, -1),
        ("global_batch_size", switches["global_batch_size"], 1),
    ):
        _check_minimum(name, value, minimum)
    checked_limits = {
        name: _fraction(f"limit_{name}_batches", 1.0 if limit is None else limit)
        for name, limit in limits.items()
    }
    epochs, duration = _length(
        max_epochs, max_duration, bounded=max_steps >= 0 or max_time is not None
    )
    # A quick try of everything overrides what would make it long, or skip a part; the arguments are checked all the
    # same.
    if fast:
        epochs, max_steps, duration = 1, fast, None
        checked_limits = dict.fromkeys(checked_limits, fast)
    every = _interval(
        1.0 if val_check_interval is None else val_check_interval,
        across_epochs=val_epochs is None,
    )
    sanity_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
    return Settings(
        max_epochs=epochs,
        max_steps=None if max_steps < 0 else max_steps,
        max_duration=duration,
        min_epochs=min_epochs or 0,
        min_steps=min_steps or 0,
        limits=checked_limits,
        validate_every=1.0 if fast else every,
        validate_epochs=1 if fast else val_epochs,
        sanity_steps=0 if fast else sanity_steps,
        log_every=50 if log_every is None else log_every,
        clip=_clip(clip_val, clip_algorithm),
        overfit=0 if fast else _fraction("overfit_batches", overfit_batches),
        fast=fast,
        endless=max_epochs == -1,
        **switches,
    )


def check_switches(
    deterministic: object,
    compile: object,
    seed: object,
    num_nodes: object,
    on_unsaveable: object,
) -> None:
    """Validate the arguments that the loop does not use itself."""
    if on_unsaveable not in ("raise", "drop"):
        raise ConfigurationError(
            'on_unsaveable is "raise" or "drop"',
            found=f"on_unsaveable={on_unsaveable!r}",
            fix='"raise" refuses what cannot be saved before the first step; "drop" leaves it out of checkpoints',
        )
    _check_minimum("seed", seed, 0)
    _check_minimum("num_nodes", num_nodes, 1)
    if deterministic not in (None, False, True, "warn"):
        raise ConfigurationError(
            "deterministic is True, False or 'warn'", found=repr(deterministic)
        )
    if not isinstance(compile, (bool, Mapping)) and compile != "step":
        raise ConfigurationError(
            'compile must be True, False, "step" or arguments of torch.compile',
            found=repr(compile),
            fix='pass a dict, such as {"mode": "reduce-overhead"}',
        )
    if isinstance(compile, Mapping):
        _check_compile(
            {name: value for name, value in compile.items() if name != "regional"}
        )


def _check_compile(options: Mapping[str, Any]) -> None:
    parameters = [
        name for name in inspect.signature(torch.compile).parameters if name != "model"
    ]
    unknown = [name for name in options if name not in parameters]
    if unknown:
        raise ConfigurationError(
            "compile holds arguments of torch.compile",
            found=f"compile={dict(options)!r}",
            fix=did_you_mean(str(unknown[0]), [*parameters, "regional"]),
        )
    if not options:
        return
    try:
        # Importing a backend may warn about unrelated things.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # It only builds the wrapper: a wrong backend, mode or option is an error before the first batch.
            torch.compile(lambda: None, **options)
    # Of many classes, by backend.
    except Exception as error:
        raise ConfigurationError(
            "torch.compile rejects these arguments",
            found=f"compile={dict(options)!r}: {str(error).strip().splitlines()[0]}",
            fix="see torch.compile; compile=True uses its defaults",
        ) from error


class _OneUnit(NamedTuple):
    """What an interval of one unit counts.

    Attributes:
        unit: of `Duration`.
        reason: what it counts, and why nothing else.
        fix: a right value.
    """

    unit: str
    reason: str
    fix: str


_INTERVALS_OF_ONE_UNIT: Final = {
    "log_every_n_steps": _OneUnit(
        "st",
        "optimizer steps (st) only: logged values are written after whole steps",
        'pass a number of steps, such as 50 or "50st"',
    ),
    "check_val_every_n_epoch": _OneUnit(
        "ep",
        "epochs (ep) only: val_check_interval is the one that takes batches, steps, samples, tokens and time",
        'pass a number of epochs, such as 1 or "1ep", or for example val_check_interval="500ba"',
    ),
}


def _in_unit(name: str, value: Any) -> Any:
    """The number of a duration in the unit of the argument; any other value is returned unchanged."""
    if not isinstance(value, (str, Duration)):
        return value
    length = Duration.parse(value)
    interval = _INTERVALS_OF_ONE_UNIT[name]
    if length.unit != interval.unit:
        raise ConfigurationError(
            f"{name} takes {interval.reason}",
            found=f"{name}={str(value)!r}",
            fix=interval.fix,
        )
    return int(length.value)


def _length(
    max_epochs: int | None, max_duration: DurationLike | None, bounded: bool
) -> tuple[int | None, Duration | None]:
    """The limit in epochs, and the one in another unit; 1000 epochs if neither limit is set."""
    duration: Duration | None = None
    if max_duration is not None:
        duration = Duration.parse(max_duration)
    # A fraction of the run has no meaning for its length.
    if duration is not None and duration.unit == "dur":
        raise ConfigurationError(
            "max_duration is the whole run, not a fraction of it", found=str(duration)
        )
    # A duration in epochs is the limit in epochs; of two such limits the smaller one counts.
    if duration is not None and duration.unit == "ep":
        epochs = int(duration.value)
        if max_epochs is not None and max_epochs != -1:
            epochs = min(epochs, max_epochs)
        return epochs, None
    # Lightning's default.
    if max_epochs is None and duration is None and not bounded:
        return 1000, None
    if max_epochs == -1:
        return None, duration
    return max_epochs, duration


def _clip(value: float | None, algorithm: str | None) -> tuple[float, str] | None:
    if value is not None and not _is_clip_value(value):
        raise ConfigurationError(
            "gradient_clip_val must be a number ≥ 0", found=repr(value)
        )
    if algorithm not in (None, "norm", "value"):
        raise ConfigurationError(
            "unknown gradient_clip_algorithm",
            found=repr(algorithm),
            fix="use norm or value",
        )
    # 0 clips nothing, as in Lightning.
    if not value:
        return None
    return value, algorithm or "norm"


def _is_clip_value(value: object) -> bool:
    return isinstance(value, (int, float)) and value >= 0 and math.isfinite(value)


def _check_minimum(name: str, value: object, minimum: int) -> None:
    if value is None and name not in ("max_steps", "num_nodes"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        fix = None
        if isinstance(value, str):
            fix = _suggest_number(name, value)
        raise ConfigurationError(
            f"{name} must be an integer ≥ {minimum}", found=repr(value), fix=fix
        )


_COUNTS: Final = {
    "fast_dev_run": (
        "ba",
        "batches, the unit that every stage has: validation and test count no steps, samples or tokens",
    ),
    "min_epochs": ("ep", "epochs"),
    "min_steps": ("st", "optimizer steps"),
    "num_sanity_val_steps": ("ba", "validation batches"),
    "global_batch_size": ("sp", "samples"),
}
"""The unit of each argument that is a number, and what it counts."""


def _suggest_number(name: str, value: str) -> str | None:
    """The fix to suggest for a string that holds a number or a duration."""
    if value.strip().lstrip("-").isdecimal():
        return f"{name}={value.strip()}"
    try:
        length = Duration.parse(value)
    except DurationError:
        return None
    if name in ("max_epochs", "max_steps"):
        return f"max_duration={value!r}"
    if name not in _COUNTS:
        return None
    unit, counted = _COUNTS[name]
    # A number of another unit is another length.
    if length.unit != unit:
        return f"pass a number of {counted}"
    return f"{name}={int(length.value)}"


def _fraction(name: str, value: object) -> int | float:
    # True is an int to Python; as a limit it is a mistake.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    # 1 is one batch, and 1.0 all of them.
    if isinstance(value, float) and 0.0 <= value <= 1.0:
        return value
    raise ConfigurationError(
        f"{name} must be a number of batches or a fraction",
        found=repr(value),
        fix="pass an int ≥ 0, or a float from 0.0 to 1.0",
    )


def _interval(value: DurationLike, across_epochs: bool) -> int | float | Duration:
    if isinstance(value, (str, Duration, timedelta, Mapping)):
        interval = Duration.parse(value)
        if interval.value <= 0 or interval.unit in ("ep", "dur"):
            raise ConfigurationError(
                "val_check_interval must be above zero, and not in epochs or parts of the run",
                found=str(interval),
                fix="use batches, steps, samples or time",
            )
        return interval
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value > 0 or (isinstance(value, float) and value > 1.0):
        raise ConfigurationError(
            "val_check_interval is a number of batches or a fraction of the epoch",
            found=repr(value),
        )
    if across_epochs and isinstance(value, float):
        raise ConfigurationError(
            "validation across epochs needs an interval in batches",
            found=f"val_check_interval={value}, check_val_every_n_epoch=None",
            fix="pass val_check_interval as an int or a duration such as '500ba'",
        )
    return value


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A constructor's arguments as plain data: objects by name, secrets masked.

    Args:
        arguments: the arguments by name; ``self`` is left out.

    Example:
        >>> plain_arguments({"max_epochs": 3, "plugins": object(), "logger": "s3://me:pw@host"})
        {'max_epochs': 3, 'plugins': 'object', 'logger': 's3://me:***@host'}
    """
    plain = {
        name: _plain(value)
        for name, value in arguments.items()
        if name not in ("self", "__class__")
    }
    masked: dict[str, Any] = mask_secrets(plain)
    return masked


def _plain(value: object) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (Sequence, ValuesView)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, map(_plain, value)))
    # The default repr of functions and objects contains their address, but equal states must give equal bytes.
    for name in ("__qualname__", "state_key"):
        if hasattr(value, name):
            return str(getattr(value, name))
    text = str(value)
    if text == object.__repr__(value):
        return type(value).__qualname__
    return text
