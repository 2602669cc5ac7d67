"""`StochasticWeightAveraging`: the mean of the weights that the last epochs end with, at a learning rate of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, final

import torch
from torch.optim.swa_utils import SWALR

from trainer_kit.callbacks.averages import AvgFn
from trainer_kit.callbacks.weight_averaging import WeightAveraging
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import ModuleLike, TrainerLike

__all__ = ["StochasticWeightAveraging"]


@final
class StochasticWeightAveraging(WeightAveraging):
    """Stochastic weight averaging (Izmailov et al., UAI 2018; https://arxiv.org/abs/1803.05407).

    From the start of epoch ``swa_epoch_start`` torch's ``SWALR`` sets the learning rate, in place of the module's
    schedulers, and the weights at the end of each epoch from this one on are averaged. The rates are Lightning's: the
    first such epoch keeps the rate that it found, and each epoch's end anneals it further. See
    `WeightAveraging` for what is evaluated, deployed and saved. Running statistics are averaged, too;
    ``torch.optim.swa_utils.update_bn`` after training computes them from data.

    Args:
        swa_lrs: the learning rate: one for all parameter groups, or one for each.
        swa_epoch_start: the first epoch that is averaged: its number, counted from 1, or the fraction of ``max_epochs``
            that gives this number, rounded down.
        annealing_epochs: epochs from the old rate to the new one: 0, and the first epoch has the new rate; 2, and the
            third has it.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: (average, weight, number averaged) to the new average; None for the mean.
        device: where the average is kept; None: where the weights are.

    Raises:
        ConfigurationError: before the first step, for arguments out of range, for a fraction without ``max_epochs``,
            for manual optimization, and for more than one optimizer.

    Example:
        >>> StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.75).n_averaged
        0
    """

    never_called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("avg_fn", "update_parameters"), "pass avg_fn= to the constructor"),
        **dict.fromkeys(
            ("transfer_weights", "reset_batch_norm_and_save_state", "reset_momenta", "pl_module_contains_batch_norm"),
            "call torch.optim.swa_utils.update_bn after training for running statistics",
        ),
    }

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AvgFn | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(device, avg_fn=avg_fn)
        rates = [swa_lrs] if isinstance(swa_lrs, (int, float)) else list(swa_lrs)
        fraction = isinstance(swa_epoch_start, float)
        in_range = 0 <= swa_epoch_start <= 1 if fraction else swa_epoch_start >= 1
        known = annealing_strategy in ("cos", "linear") and annealing_epochs >= 0
        if not rates or min(rates) <= 0 or not in_range or not known:
            raise ConfigurationError(
                "stochastic weight averaging has positive learning rates, an epoch from 1 or a fraction of them, and "
                'anneals in 0 or more epochs by "cos" or "linear"',
                found=f"swa_lrs={swa_lrs}, swa_epoch_start={swa_epoch_start}, annealing_epochs={annealing_epochs}, "
                f"annealing_strategy={annealing_strategy!r}",
            )
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = annealing_epochs, annealing_strategy
        self._first = 0  # epoch, counted from 0 (`swa_epoch_start` counts from 1)
        self._anneals = False

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= self._first

    def state_dict(self) -> dict[str, Any]:
        return {"anneals": self._anneals}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._anneals = bool(state_dict["anneals"])

    def setup(self, trainer: TrainerLike, module: ModuleLike, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage != "fit":
            return
        self._anneals = False
        if isinstance(self.swa_epoch_start, float):
            if trainer.max_epochs in (None, -1):
                raise ConfigurationError(
                    "swa_epoch_start is a fraction of an unknown number of epochs",
                    found=f"swa_epoch_start={self.swa_epoch_start}, max_epochs=-1",
                    fix="give swa_epoch_start as the number of an epoch, or max_epochs",
                )
            self._first = max(int(self.swa_epoch_start * trainer.max_epochs) - 1, 0)
        else:
            self._first = self.swa_epoch_start - 1
        if not module.automatic_optimization:
            raise ConfigurationError(
                "stochastic weight averaging sets the learning rate, which manual optimization does by itself",
                fix="use WeightAveraging, and torch's SWALR in your training_step",
            )

    def on_load_checkpoint(self, trainer: TrainerLike, module: ModuleLike, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, module, checkpoint)
        if self._fits and checkpoint.get("callbacks", {}).get(self.state_key, {}).get("anneals"):
            (optimizer,) = trainer.optimizers
            configured = [group["lr"] for group in optimizer.param_groups]
            self._anneal(trainer)  # what is restored next is its state
            for group, rate in zip(optimizer.param_groups, configured, strict=True):
                group["lr"] = rate  # it is compared with what was configured then

    def on_fit_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        rates = 1 if isinstance(self.swa_lrs, (int, float)) else len(self.swa_lrs)
        if len(groups) != 1 or rates not in (1, groups[0]):
            raise ConfigurationError(
                "stochastic weight averaging sets the learning rates of one optimizer",
                found=f"{len(groups)} optimizers with {groups} parameter groups, {rates} learning rates",
                fix="use WeightAveraging for several optimizers; give one learning rate, or one for each group",
            )

    def on_train_epoch_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if not self._anneals and trainer.current_epoch >= self._first:
            self._anneal(trainer)

    def _anneal(self, trainer: TrainerLike) -> None:
        from trainer_kit.step.optimize import LRSchedulerConfig

        (optimizer,) = trainer.optimizers
        rates: Any = self.swa_lrs if isinstance(self.swa_lrs, (int, float)) else list(self.swa_lrs)
        scheduler = SWALR(optimizer, rates, self.annealing_epochs, self.annealing_strategy)
        # The loop holds the step as it was before SWALR wrapped it, so torch would warn of an epoch without a step.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        trainer.lr_scheduler_configs[:] = [LRSchedulerConfig(scheduler, optimizer=optimizer)]
        self._anneals = True
