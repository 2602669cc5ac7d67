"""Real fits of a few batches, whose logged values a test writes down beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_kit import Trainer
from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.testing import TinyModule

BATCH = torch.ones(2, 32)


def each(name: str, *values: float | None) -> list[dict[str, float] | None]:
    """A script that logs one value after the other under one name; None: nothing is logged that time."""
    return [None if value is None else {name: value} for value in values]


class Scripted(TinyModule):
    """Logs the values that it was given: one dict a validation, one an epoch, one a training step.

    The sanity check logs nothing. Where a list is over, nothing is logged.
    """

    def __init__(
        self,
        val: Sequence[dict[str, float] | None] = (),
        epoch: Sequence[dict[str, float] | None] = (),
        train: Sequence[dict[str, float] | None] = (),
        tokens: int | None = None,
    ) -> None:
        super().__init__(lr=0.01)
        self.script = {"val": iter(val), "epoch": iter(epoch), "train": iter(train)}
        if tokens is not None:
            self.loss_weight = lambda batch: tokens

    def _say(self, kind: str) -> None:
        for name, value in (next(self.script[kind], None) or {}).items():
            self.log(name, value)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._say("train")
        return self(batch).pow(2).mean()

    def on_train_epoch_end(self) -> None:
        self._say("epoch")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self._say("val")


class Noting(Trainer):
    """Notes what callbacks ask of it.

    Attributes:
        asked: (step, reason, request) of each checkpoint.
        stops: reasons.
        printed: lines of rank 0.
    """

    def __init__(self, **options: Any) -> None:
        self.asked: list[tuple[int, str, Any]] = []
        self.stops: list[str] = []
        self.printed: list[str] = []
        super().__init__(**options)

    def request_checkpoint(self, reason: str, request: Any = None) -> None:
        self.asked.append((self.global_step, reason, request))
        super().request_checkpoint(reason, request)

    def stop(self, reason: str) -> None:
        self.stops.append(reason)
        super().stop(reason)

    def print(self, *values: Any, **options: Any) -> None:
        if self.is_global_zero:
            self.printed.append(" ".join(map(str, values)))

    @property
    def asked_at(self) -> list[int]:
        """The steps at which checkpoints were asked for."""
        return [step for step, _, _ in self.asked]

    @property
    def on_disk(self) -> list[str]:
        """Names of the checkpoints in the run's own directory."""
        return [record.path.name for record in checkpoints(Path(self.default_root_dir) / "checkpoints")]


class Unsized:
    """Batches without a length."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def trainer(*callbacks: Any, **options: Any) -> Noting:
    """A quiet one on the CPU that writes below the working directory."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False if not any(hasattr(one, "best_model_path") for one in callbacks) else None,
        "accelerator": "cpu",
        "devices": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": Path.cwd() / "run",
    }
    return Noting(callbacks=list(callbacks), **{**quiet, **options})


def fit(
    *callbacks: Any,
    batches: int = 4,
    epochs: int = 1,
    val: Sequence[dict[str, float] | None] | None = None,
    epoch: Sequence[dict[str, float] | None] = (),
    train: Sequence[dict[str, float] | None] = (),
    unsized: bool = False,
    batch: Tensor = BATCH,
    tokens: int | None = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Noting:
    """Fit ``epochs`` of ``batches``; with ``val`` there is a validation set of one batch.

    Returns:
        The trainer, which has noted what was asked of it.
    """
    made = trainer(*callbacks, max_epochs=epochs, **options)
    loader = [batch] * batches
    module = Scripted(val or (), epoch, train, tokens)
    made.fit(module, Unsized(loader) if unsized else loader, None if val is None else [BATCH], ckpt_path=ckpt_path)
    return made
