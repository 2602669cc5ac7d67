"""Composes an `Evaluation` from settings, a module and loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from lightning_utilities.core.overrides import is_overridden

from trainer_kit.core.module import TrainModule
from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.data import Feed
from trainer_kit.metrics.entry import Reduced
from trainer_kit.step.bus import Bus
from trainer_kit.step.evaluate import Evaluation
from trainer_kit.training.loaders import (
    agreed_length,
    evaluation_feeds,
    find_loaders,
    mover,
)
from trainer_kit.training.session import Session

__all__ = [
    "EvaluationLoaders",
    "compose_evaluation",
    "find_validation_loaders",
    "load_evaluation",
]


@final
@dataclass(frozen=True)
class EvaluationLoaders:
    """This rank's share of the loaders of an evaluation; see `Evaluation` for the attributes."""

    feeds: Sequence[Feed] = ()
    limits: Sequence[int | None] = ()
    expected: Sequence[int | None] = ()


def load_evaluation(
    trainer: Session, stage: str, loaders: Loaders
) -> EvaluationLoaders:
    """Split the loaders of an evaluation over the ranks."""
    trainer.keep_loaders(stage, loaders)
    data = trainer.strategy.data
    feeds, lengths = evaluation_feeds(
        loaders, stage, trainer.settings, data, trainer.data_seed
    )
    lengths = [agreed_length(length, data) for length in lengths]
    return EvaluationLoaders(
        feeds=feeds,
        limits=[length.limit for length in lengths],
        expected=[length.expected for length in lengths],
    )


def find_validation_loaders(
    trainer: Session,
    module: TrainModule,
    datamodule: DataModuleLike,
    val_loaders: Loaders | None,
) -> EvaluationLoaders:
    """The loaders of the validation inside a fit; empty if there are none, or none of them has a batch."""
    if trainer.settings.limits["val"] == 0:
        return EvaluationLoaders()
    if not is_overridden("validation_step", module, TrainModule):
        if val_loaders is not None:
            trainer.say(
                f"no validation: {type(module).__name__} has no validation_step for val_dataloaders"
            )
        return EvaluationLoaders()
    loaders = find_loaders("validate", val_loaders, module, datamodule)
    if loaders is None:
        return EvaluationLoaders()
    validation = load_evaluation(trainer, "validate", loaders)
    # Without a batch there is no validation, so no scheduler may wait for its values. An unknown length may have some.
    if all(batches == 0 for batches in validation.expected):
        return EvaluationLoaders()
    return validation


def compose_evaluation(
    trainer: Session,
    stage: str,
    module: TrainModule,
    datamodule: DataModuleLike,
    loaders: EvaluationLoaders,
    bus: Bus,
) -> Evaluation:
    """Compose a validation, a test or a prediction."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    # Predictions for shards of a sequence cannot be concatenated, so every rank predicts whole batches.
    whole_batches = stage == "predict" and strategy.losses.size > strategy.data.size
    move, _ = mover(module, datamodule, strategy, precision, whole_batches)

    def publish(reduced: Reduced, batch: int) -> None:
        # The batches of a sanity check leave no trace.
        values = reduced.logger
        if not values or trainer.sanity_checking or not trainer.is_global_zero:
            return
        trainer.logged_values.log_evaluation_batch(values, batch, trainer.state_verb)

    return Evaluation(
        stage=stage,
        module=module,
        feeds=loaders.feeds,
        limits=loaders.limits,
        expected=loaders.expected,
        bus=bus,
        metrics=trainer.metrics,
        precision=precision,
        strategy=strategy,
        move=move,
        whole_batches=whole_batches,
        inference_mode=_allows_inference_mode(trainer),
        publish=publish,
    )


def _allows_inference_mode(trainer: Session) -> bool:
    """Whether to evaluate under ``torch.inference_mode``.

    Inference tensors cannot be used in training, sent by gloo, sharded by FSDP, or traced by XLA.
    """
    if not trainer.settings.inference_mode or trainer.state_verb == "fit":
        return False
    strategy = trainer.strategy
    if strategy.world.size > 1 or strategy.sharded:
        return False
    return strategy.device.type != "xla"
