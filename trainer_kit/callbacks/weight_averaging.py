"""Averages of the weights, which are evaluated and deployed in place of those that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer_kit.callbacks.averages import Averages, AvgFn, MultiAvgFn, divide_again
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike

__all__ = ["EMAWeightAveraging", "WeightAveraging", "refuse_averaging"]


class WeightAveraging(Callback):
    """Keep a running average of the weights: by default the mean of those after every optimizer step.

    Validation during ``fit`` runs on the averages, and after training the module has them. The weights of a checkpoint
    (its ``state_dict``) are the averages, for deployment; ``current_model_state`` holds those that training goes on
    from, and a resumed run has both, in all bits. Before the first average everything is as without this callback.

    A module that is divided (FSDP, tensor and pipeline parallel) has averages that are divided alike: nothing is
    gathered, and a step costs one fused operation on what a rank holds. Averages of 16-bit weights are kept in 32 bits,
    which can hold what one step adds.

    A parameter that the module has anew while it is trained (a submodule that was replaced, a tie that was cut) begins
    an average of its own, which a line says once; the others go on. That is seen by the next update, validation or
    checkpoint, by comparing the parameters themselves.

    Override `should_update` to choose the steps.

    Args:
        device: where the averages are kept; None: where the weights are.
        use_buffers: average buffers (running statistics) as well; False leaves them as training has them.
        avg_fn: (average, weight, number averaged) to the new average, as for ``torch.optim.swa_utils.AveragedModel``.
        multi_avg_fn: the same for lists, in place.

    Raises:
        ConfigurationError: before the first step, for an engine that steps copies of its own of the weights, and for a
            second callback that averages them.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> class Late(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return step_idx is not None and step_idx >= 2
        >>> module, late = TinyModule(), Late()
        >>> trainer = Trainer(max_steps=4, barebones=True, callbacks=late)
        >>> trainer.fit(module, [torch.randn(8, 32)] * 4)  # the mean of what steps 3 and 4 left
        >>> late.n_averaged
        2
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "early"  # the others' hooks of a validation see the averages

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError("weights are averaged in one way", found="avg_fn and multi_avg_fn", fix="give one")
        self.device = None if device is None else torch.device(device)
        self.use_buffers, self._avg_fn, self._multi_avg_fn = use_buffers, avg_fn, multi_avg_fn
        self._averages: Averages | None = None
        self._lending = ExitStack()
        self._fits = False

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether weights are averaged in now: asked after every optimizer step and after every whole epoch.

        Args:
            step_idx: the number of the step, from 0; None after an epoch.
            epoch_idx: the number of the epoch, from 0; None after a step.
        """
        return step_idx is not None

    @property
    def n_averaged(self) -> int:
        """How many weights are averaged."""
        return 0 if self._averages is None else self._averages.count

    @property
    def lent_weights(self) -> Mapping[str, Tensor]:
        """By name, what training goes on from, while the module has the averages in its place."""
        return {} if self._averages is None else self._averages.own_weights()

    def setup(self, trainer: TrainerLike, module: ModuleLike, stage: str) -> None:
        self._fits = stage == "fit"
        if self._fits:
            self._averages = None
            refuse_averaging(self, trainer, self.device)

    def on_load_checkpoint(self, trainer: TrainerLike, module: ModuleLike, checkpoint: dict[str, Any]) -> None:
        if not self._fits or "optimizer_states" not in checkpoint:
            return  # weights alone: of a checkpoint of this callback they are the averages
        if "averaging_state" not in checkpoint:
            trainer.print("weight averaging begins here: the checkpoint is of a run without it")
            return
        self._averages = self._made(trainer, module)
        shared = trainer.strategy.shared_names(module)
        new = self._averages.load(checkpoint["averaging_state"], checkpoint["state_dict"], shared)
        if new:
            trainer.print(f"weight averaging begins here for {len(new)} weights that were not averaged: {new[0]}, ...")

    def on_train_step_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if self.should_update(step_idx=trainer.progress.step - 1):
            self._update(trainer, module)

    def on_train_epoch_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        # A run that ends inside of an epoch goes on there when it is resumed: the epoch is averaged in once.
        if trainer.epoch_is_whole and self.should_update(epoch_idx=trainer.current_epoch):
            self._update(trainer, module)

    def _update(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if self._averages is None:
            self._averages = self._made(trainer, module)
        self._averages.update()

    def _made(self, trainer: TrainerLike, module: Any) -> Averages:
        return Averages(module, self.use_buffers, self.device, self._avg_fn, self._multi_avg_fn, trainer.print)

    def on_validation_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if self._fits and self.n_averaged:
            assert self._averages is not None
            divide_again(module)
            self._averages.put_in()
            # Each rank has averaged buffers of its own; the first one's count, as they do without averages.
            self._lending.enter_context(trainer.strategy.shared_buffers(module))

    def on_validation_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if self._fits:
            self._take_out()

    def _take_out(self) -> None:
        self._lending.close()
        if self._averages is not None:
            self._averages.take_out()

    def on_train_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if self._averages is not None:
            self._averages.put_in()

    def on_exception(self, trainer: TrainerLike, module: ModuleLike, exception: BaseException) -> None:
        if self._fits:
            self._take_out()

    def on_save_checkpoint(self, trainer: TrainerLike, module: ModuleLike, checkpoint: dict[str, Any]) -> None:
        from trainer_kit.state.collect import without_own_buffers  # it reads checkpoints: nobody needs that to begin

        averages = self._averages
        if averages is None or averages.count == 0:
            if "optimizer_states" in checkpoint:
                checkpoint["averaging_state"] = {"n_averaged": 0, "averages": {}}
            return
        averages.follow()
        weights, mine = checkpoint["state_dict"], averages.own_weights()
        averaged = averages.averaged()
        if not mine:  # else the module has the averages, and maybe what was made of them
            mine = {name: weights[name] for name in averaged if name in weights}
            checkpoint["state_dict"] = {**weights, **averaged}
        if "optimizer_states" in checkpoint:
            state = averages.state(beside=True)
            checkpoint["current_model_state"] = without_own_buffers(trainer.strategy, module, mine)  # type: ignore[arg-type]
            state["averages"] = without_own_buffers(trainer.strategy, module, state["averages"])  # type: ignore[arg-type]
            checkpoint["averaging_state"] = state


def refuse_averaging(callback: Callback, trainer: TrainerLike, device: torch.device | None = None) -> None:
    """Refuse, before the first step, what a callback that averages weights cannot do.

    Args:
        callback: that averages.
        trainer: whose strategy trains the weights.
        device: where averages are to be kept.

    Raises:
        ConfigurationError: saying why.
    """
    strategy = trainer.strategy
    name = type(callback).__name__
    why = strategy.why_not_averaged
    if why is not None:
        raise ConfigurationError(
            f"{name} cannot average the weights of this engine", found=why, fix="train with DDP, FSDP or a mesh"
        )
    if strategy.per_rank_state:
        raise ConfigurationError(
            f"{name} averages the weights of a step, and between two exchanges each rank has its own",
            found="local SGD",
            fix="leave local_sgd out",
        )
    if device is not None and strategy.sharded and device.type != strategy.device.type:
        raise ConfigurationError(
            f"{name} keeps averages of divided weights where these are",
            found=f"device={str(device)!r} and weights on {strategy.device}",
            fix="leave device out: each rank has its part only",
        )
    others = [one for one in trainer.callbacks if one is not callback and hasattr(one, "lent_weights")]
    if others:
        raise ConfigurationError(
            "two callbacks average the weights, and a checkpoint has one average",
            found=f"{name} and {type(others[0]).__name__}",
            fix="leave one of them out",
        )


@final
class EMAWeightAveraging(WeightAveraging):
    """An exponential moving average of the weights: ``average = decay * average + (1 - decay) * weight``.

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
        average: MultiAvgFn = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        super().__init__(device, use_buffers, multi_avg_fn=average)
        self.decay, self.update_every_n_steps = decay, update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            start = self.update_starting_at_step or 0
            return step_idx >= start and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        first = self.update_starting_at_epoch
        return epoch_idx is not None and first is not None and epoch_idx >= first
