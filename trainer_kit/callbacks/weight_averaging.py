"""Averages of the weights: `WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.optim.swa_utils import SWALR, get_ema_multi_avg_fn

from trainer_kit.callbacks.averages import (
    Averages,
    AvgFn,
    MultiAvgFn,
    reshard_modules,
)
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.torch_private import mark_stepped
from trainer_kit.core.types import SavedState, StateDict

__all__ = [
    "Averages",
    "EMAWeightAveraging",
    "StochasticWeightAveraging",
    "WeightAveraging",
]


class WeightAveraging(Callback):
    """Keep a running average of the weights: by default the mean of those after every optimizer step.

    Validation during ``fit`` runs on the averages, and after training the module holds them. The weights of a
    checkpoint (its ``state_dict``) are the averages, for deployment; ``current_model_state`` holds the weights that
    training continues from. A resumed run restores both exactly. Before the first average, this callback changes
    nothing.

    A sharded module (FSDP, tensor and pipeline parallel) has averages that are sharded in the same way: nothing is
    gathered, and a step costs one fused operation on the shards of a rank. Averages of 16-bit weights are kept in 32
    bits, because 16 bits would round the change of one step away.

    A parameter that is replaced during training (a submodule was replaced, a tie was cut) starts a new average, and a
    line reports it once; the other averages continue. The next update, validation or checkpoint finds the replacement.

    Override `should_update` to choose the steps.

    Args:
        device: where the averages are kept; None: where the weights are.
        use_buffers: average buffers (running statistics) as well; False leaves them as training has them.
        avg_fn: (average, weight, number averaged) to the new average, as for ``torch.optim.swa_utils.AveragedModel``.
        multi_avg_fn: the same for lists, in place.

    Raises:
        ConfigurationError: before the first step, for an engine that steps its own copies of the weights, and for a
            second callback that averages weights.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> class Late(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return step_idx is not None and step_idx >= 2
        >>> module, late = TinyModule(), Late()
        >>> trainer = Trainer(max_steps=4, barebones=True, callbacks=late)
        >>> trainer.fit(module, [torch.randn(8, 32)] * 4)  # the mean of the weights after steps 3 and 4
        >>> late.n_averaged
        2
    """

    # Validation hooks of other callbacks see the averages.
    order: ClassVar[Literal["early", "normal", "late"]] = "early"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError(
                "only one averaging function can be used",
                found="avg_fn and multi_avg_fn",
                fix="give one",
            )
        self.device: torch.device | None = None
        if device is not None:
            self.device = torch.device(device)
        self.use_buffers = use_buffers
        self._avg_fn = avg_fn
        self._multi_avg_fn = multi_avg_fn
        self._averages: Averages | None = None
        # What ends with the validation on the averages.
        self._validation_stack = ExitStack()
        self._is_fit = False

    def __getstate__(self) -> StateDict:
        # The averages belong to a fit, whose module a pickled Trainer does not keep either.
        return {
            **vars(self),
            "_averages": None,
            "_validation_stack": ExitStack(),
            "_is_fit": False,
        }

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        """Whether to update the averages: called after every optimizer step and after every complete epoch.

        Args:
            step_idx: the number of the step, from 0; None after an epoch.
            epoch_idx: the number of the epoch, from 0; None after a step.
        """
        return step_idx is not None

    @property
    def n_averaged(self) -> int:
        """The number of updates of the averages."""
        if self._averages is None:
            return 0
        return self._averages.count

    @property
    def lent_weights(self) -> Mapping[str, Tensor]:
        """By name, the live weights while the averages are swapped in."""
        if self._averages is None:
            return {}
        return self._averages.lent_weights()

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._is_fit = stage == "fit"
        if self._is_fit:
            # Those of another fit, maybe of another module; a resumed fit loads its averages later.
            self._averages = None
            _refuse_averaging(self, trainer, self.device)

    def on_load_checkpoint(
        self, trainer: TrainerLike, pl_module: ModuleLike, checkpoint: StateDict
    ) -> None:
        # Without optimizers only weights are loaded; in a checkpoint of this callback they are the averages.
        if not self._is_fit or "optimizer_states" not in checkpoint:
            return
        if "averaging_state" not in checkpoint:
            trainer.print(
                "weight averaging starts now: the checkpoint is from a run without it"
            )
            return
        self._averages = self._make_averages(trainer, pl_module)
        shared = trainer.strategy.shared_names(pl_module)
        missing = self._averages.load(
            checkpoint["averaging_state"], checkpoint["state_dict"], shared
        )
        if missing:
            trainer.print(
                "weight averaging starts now for "
                f"{plural(len(missing), 'weight that was', 'weights that were')} not averaged: {missing[0]}, ..."
            )

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self.should_update(step_idx=trainer.progress.step - 1):
            self._update(trainer, pl_module)

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        # A run that ends inside an epoch resumes there: the epoch must count once.
        if not trainer.epoch_is_whole:
            return
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update(trainer, pl_module)

    def _update(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if self._averages is None:
            self._averages = self._make_averages(trainer, module)
        self._averages.update()

    def _make_averages(self, trainer: TrainerLike, module: Any) -> Averages:
        return Averages(
            module,
            self.use_buffers,
            self.device,
            self._avg_fn,
            self._make_multi_avg_fn(),
            trainer.print,
        )

    def _make_multi_avg_fn(self) -> MultiAvgFn | None:
        return self._multi_avg_fn

    def on_validation_start(self, trainer: TrainerLike, pl_module: Any) -> None:
        if self._is_fit and self.n_averaged:
            assert self._averages is not None
            reshard_modules(pl_module)
            self._averages.put_in()
            # Every rank averages its own buffers; validation uses those of rank 0, as without averages.
            shared_buffers = trainer.strategy.shared_buffers(pl_module)
            self._validation_stack.enter_context(shared_buffers)

    def on_validation_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._is_fit:
            self._take_averages_out()

    def _take_averages_out(self) -> None:
        # First: what this restores are the buffers of the averages.
        self._validation_stack.close()
        if self._averages is not None:
            self._averages.take_out()

    def on_train_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._averages is not None:
            self._averages.put_in()

    def on_exception(
        self, trainer: TrainerLike, pl_module: ModuleLike, exception: BaseException
    ) -> None:
        if self._is_fit:
            self._take_averages_out()

    def on_save_checkpoint(
        self, trainer: TrainerLike, pl_module: Any, checkpoint: StateDict
    ) -> None:
        # Imported here: the checkpoint code is not needed at the start.
        from trainer_kit.state.collect import weights_to_write

        averages = self._averages
        holds_run = "optimizer_states" in checkpoint
        if averages is None or averages.count == 0:
            if holds_run:
                checkpoint["averaging_state"] = {"n_averaged": 0, "averages": {}}
            return
        averages.follow()
        weights = checkpoint["state_dict"]
        live_weights = averages.lent_weights()
        # If weights are lent, the averages are in the module, and may have been changed there.
        if not live_weights:
            averaged = averages.averaged()
            for name in averaged:
                if name in weights:
                    live_weights[name] = weights[name]
            checkpoint["state_dict"] = {**weights, **averaged}
        if not holds_run:
            return
        strategy = trainer.strategy
        checkpoint["current_model_state"] = weights_to_write(
            strategy, pl_module, live_weights
        )
        state = averages.state(beside=True)
        state["averages"] = weights_to_write(strategy, pl_module, state["averages"])
        checkpoint["averaging_state"] = state


def _refuse_averaging(
    callback: Callback, trainer: TrainerLike, device: torch.device | None = None
) -> None:
    """Raise before the first step if ``callback`` cannot average the weights of this run."""
    strategy = trainer.strategy
    name = type(callback).__name__
    if strategy.why_not_averaged is not None:
        raise ConfigurationError(
            f"{name} cannot average the weights of this engine",
            found=strategy.why_not_averaged,
            fix="train with DDP, FSDP or a mesh",
        )
    if strategy.per_rank_state:
        raise ConfigurationError(
            f"{name} needs equal weights on all ranks; with local SGD they differ until ranks average them",
            found="local SGD",
            fix="leave local_sgd out",
        )
    if device is not None and strategy.sharded and device.type != strategy.device.type:
        raise ConfigurationError(
            f"{name} keeps averages of sharded weights on the device of the weights",
            found=f"device={str(device)!r} and weights on {strategy.device}",
            fix="leave device out: each rank holds only its shard",
        )
    for other in trainer.callbacks:
        if other is not callback and isinstance(other, WeightAveraging):
            raise ConfigurationError(
                "two callbacks average the weights, but a checkpoint holds one average",
                found=f"{name} and {type(other).__name__}",
                fix="leave one of them out",
            )


@final
class EMAWeightAveraging(WeightAveraging):
    """Keep an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weight``.

    See `WeightAveraging` for what is evaluated, deployed and saved.

    Args:
        device: where the averages are kept; None: where the weights are.
        use_buffers: average buffers (running statistics) as well.
        decay: between 0 and 1.
        update_every_n_steps: optimizer steps, counted from the first of the run.
        update_starting_at_step: no update before this step (from 0); the first one copies the weights.
        update_starting_at_epoch: from this epoch (from 0) on also update after each epoch.

    Raises:
        ConfigurationError: for numbers out of range, and as for `WeightAveraging`.

    Example:
        >>> ema = EMAWeightAveraging(decay=0.99, update_every_n_steps=2, update_starting_at_step=3)
        >>> [step for step in range(8) if ema.should_update(step_idx=step)]
        [4, 6]
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0 or update_every_n_steps < 0:
            raise ConfigurationError(
                "an exponential moving average has a decay from 0 to 1, and an interval in steps",
                found=f"decay={decay}, update_every_n_steps={update_every_n_steps}",
            )
        super().__init__(device, use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        if step_idx is not None:
            if step_idx < (self.update_starting_at_step or 0):
                return False
            every = self.update_every_n_steps
            return every > 0 and step_idx % every == 0
        first_epoch = self.update_starting_at_epoch
        if epoch_idx is None or first_epoch is None:
            return False
        return epoch_idx >= first_epoch

    def _make_multi_avg_fn(self) -> MultiAvgFn:
        # Made for each fit: torch returns a closure, which cannot be pickled with the callback.
        average: MultiAvgFn = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return average


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
        **dict.fromkeys(
            ("avg_fn", "update_parameters"), "pass avg_fn= to the constructor"
        ),
        **dict.fromkeys(
            (
                "transfer_weights",
                "reset_batch_norm_and_save_state",
                "reset_momenta",
                "pl_module_contains_batch_norm",
            ),
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
        rates = _as_rates(swa_lrs)
        lacks_rates = not rates or min(rates) <= 0
        starts_in_range = swa_epoch_start >= 1
        if isinstance(swa_epoch_start, float):
            starts_in_range = 0 <= swa_epoch_start <= 1
        can_anneal = annealing_strategy in ("cos", "linear") and annealing_epochs >= 0
        if lacks_rates or not starts_in_range or not can_anneal:
            raise ConfigurationError(
                "stochastic weight averaging has positive learning rates, an epoch from 1 or a fraction of them, and "
                'anneals in 0 or more epochs by "cos" or "linear"',
                found=f"swa_lrs={swa_lrs}, swa_epoch_start={swa_epoch_start}, annealing_epochs={annealing_epochs}, "
                f"annealing_strategy={annealing_strategy!r}",
            )
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self._first_epoch = 0  # counted from 0 (`swa_epoch_start` counts from 1)
        self._anneals = False

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        return epoch_idx is not None and epoch_idx >= self._first_epoch

    def state_dict(self) -> StateDict:
        return {"anneals": self._anneals}

    def load_state_dict(self, state_dict: SavedState) -> None:
        self._anneals = bool(state_dict["anneals"])

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._anneals = False
        self._first_epoch = self._find_first_epoch(trainer.max_epochs)
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "stochastic weight averaging sets the learning rate, but in manual optimization the module does",
                fix="use WeightAveraging, and torch's SWALR in your training_step",
            )

    def _find_first_epoch(self, max_epochs: int | None) -> int:
        """The first epoch that is averaged, counted from 0."""
        if not isinstance(self.swa_epoch_start, float):
            return self.swa_epoch_start - 1
        if max_epochs is None or max_epochs == -1:
            raise ConfigurationError(
                "swa_epoch_start is a fraction of an unknown number of epochs",
                found=f"swa_epoch_start={self.swa_epoch_start}, max_epochs=-1",
                fix="give swa_epoch_start as the number of an epoch, or max_epochs",
            )
        return max(int(self.swa_epoch_start * max_epochs) - 1, 0)

    def on_load_checkpoint(
        self, trainer: TrainerLike, pl_module: ModuleLike, checkpoint: StateDict
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        # The states of callbacks are restored after this, so the flag is read from the checkpoint.
        states = checkpoint.get("callbacks", {})
        state = states.get(self.state_key, {})
        if not self._is_fit or not state.get("anneals"):
            return
        (optimizer,) = trainer.optimizers
        configured_rates = [group["lr"] for group in optimizer.param_groups]
        self._start_annealing(trainer)  # what is restored next is its state
        groups = optimizer.param_groups
        for group, rate in zip(groups, configured_rates, strict=True):
            group["lr"] = rate  # it is compared with what was configured then

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        rates = len(_as_rates(self.swa_lrs))
        if len(groups) != 1 or rates not in (1, groups[0]):
            raise ConfigurationError(
                "stochastic weight averaging sets the learning rates of one optimizer",
                found=f"{plural(len(groups), 'optimizer')} with {groups} parameter groups, {rates} learning rates",
                fix="use WeightAveraging for several optimizers; give one learning rate, or one for each group",
            )

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not self._anneals and trainer.current_epoch >= self._first_epoch:
            self._start_annealing(trainer)

    def _start_annealing(self, trainer: TrainerLike) -> None:
        from trainer_kit.step.optimizers import LRSchedulerConfig

        (optimizer,) = trainer.optimizers
        # SWALR takes one number for all groups, or a list with one for each.
        rates: Any = self.swa_lrs
        if not isinstance(rates, (int, float)):
            rates = list(rates)
        scheduler = SWALR(
            optimizer, rates, self.annealing_epochs, self.annealing_strategy
        )
        # The loop holds the step as it was before SWALR wrapped it, so torch would warn of an epoch without a step.
        mark_stepped(optimizer)
        config = LRSchedulerConfig(scheduler, optimizer=optimizer)
        trainer.lr_scheduler_configs[:] = [config]
        self._anneals = True


def _as_rates(rates: float | Sequence[float]) -> list[float]:
    if isinstance(rates, (int, float)):
        return [rates]
    return list(rates)
