"""`LearningRateMonitor`: logs learning rates, momentum and weight decay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, final

import torch
from torch.optim import Optimizer

from trainer_kit.callbacks.conditions import following
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import leave_out

__all__ = ["LearningRateMonitor"]


@final
class LearningRateMonitor(Callback):
    """Log the learning rate of each parameter group.

    The value at step n is the one after n completed steps, which step n + 1 uses. Names are ``lr-Adam``; for several
    groups ``lr-Adam/pg1`` (or the ``"name"`` of the group); for a second Adam ``lr-Adam-1``; the ``name`` of a
    scheduler replaces ``lr-Adam``. ``-momentum`` and ``-weight_decay`` are appended for these values.

    ``trainer.callback_metrics`` holds the values too, so that they can be monitored.

    Args:
        logging_interval: ``"step"`` (steps at which the trainer logs), ``"epoch"`` (at its start), or None for the
            ``interval`` of each scheduler.
        log_momentum: log momentum, or Adam's first beta.
        log_weight_decay: log weight decay.

    Attributes:
        lrs: name → learning rates logged in this run.

    Raises:
        ConfigurationError: for another interval; at the start of training, for two groups with the same name.

    Example:
        >>> LearningRateMonitor(logging_interval="step").logging_interval
        'step'
    """

    never_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("_extract_stats", "_remap_keys", "_find_names_from_schedulers", "_add_prefix", "_add_suffix"),
        "write a callback that reads trainer.lr_scheduler_configs and calls trainer.log_metrics",
    )

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigurationError(
                "LearningRateMonitor logs at steps or epochs",
                found=f"logging_interval={logging_interval!r}",
                fix="use 'step', 'epoch' or None",
            )
        self.logging_interval = logging_interval
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self._next: int | float = math.inf
        if logging_interval == "epoch":
            # The bus leaves out a hook that is the base class's own: steps pay only for what looks at them.
            leave_out(self, "on_train_step_end", LearningRateMonitor)

    def on_train_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        self.lrs = {name: [] for _, name, _ in self._groups(trainer, None)}
        every = trainer.log_every_n_steps
        if self.logging_interval != "epoch" and every:
            step = trainer.progress.step
            self._next = following(step, every)
            if step == 0:
                self._log(trainer, "step")
        else:
            self._next = math.inf

    def on_train_step_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        step = trainer.progress.step
        if step >= self._next:
            self._next = following(step, trainer.log_every_n_steps)
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        # A run that resumes inside an epoch has logged the rate of the epoch already.
        if self.logging_interval != "step" and not trainer.progress.epoch_batch:
            self._log(trainer, "epoch")

    def _log(self, trainer: TrainerLike, interval: str) -> None:
        values: dict[str, float] = {}
        for group, name, uses_betas in self._groups(trainer, interval if self.logging_interval is None else None):
            rate = float(group["lr"])  # sync point where it is a tensor
            self.lrs.setdefault(name, []).append(rate)
            values[name] = rate
            if self.log_momentum:
                momentum = group["betas"][0] if uses_betas else group.get("momentum", 0.0)
                values[f"{name}-momentum"] = float(momentum)
            if self.log_weight_decay:
                values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        if values:
            trainer.log_metrics(values, step=trainer.global_step)
            # On every rank: a callback that monitors a rate needs it on all ranks.
            trainer.callback_metrics.update((name, torch.tensor(value)) for name, value in values.items())

    @staticmethod
    def _groups(trainer: TrainerLike, interval: str | None) -> Iterator[tuple[dict[str, Any], str, bool]]:
        """Each parameter group with its name; with ``interval``, without those of other intervals."""
        seen: Counter[str] = Counter()
        scheduled: list[Optimizer] = []
        chosen: list[tuple[Optimizer, str, bool]] = []
        for config in trainer.lr_scheduler_configs:
            optimizer = getattr(config.scheduler, "optimizer", None)
            if optimizer is None:  # a scheduler needs only `step`; `optimizer` is optional
                continue
            scheduled.append(optimizer)
            base = config.name if config.name is not None else f"lr-{type(optimizer).__name__}"
            chosen.append((optimizer, base, interval in (None, config.interval)))
        rest = (each for each in trainer.optimizers if not any(each is other for other in scheduled))
        chosen += [(optimizer, f"lr-{type(optimizer).__name__}", True) for optimizer in rest]
        for optimizer, base, wanted in chosen:
            name = base if seen[base] == 0 else f"{base}-{seen[base]}"
            seen[base] += 1
            if wanted:
                for group, suffix in zip(optimizer.param_groups, _suffixes(optimizer, name), strict=True):
                    yield group, name + suffix, "betas" in group


def _suffixes(optimizer: Optimizer, name: str) -> list[str]:
    groups = optimizer.param_groups
    names = [group.get("name", f"pg{index}" if len(groups) > 1 else "") for index, group in enumerate(groups, start=1)]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"two parameter groups of {name} have the same name",
            found=", ".join(names),
            fix='give them different names: "name"',
        )
    return [f"/{each}" if each else "" for each in names]
