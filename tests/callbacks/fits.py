"""Real fits of a few batches, whose logged values a test writes down beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_kit import Trainer
from trainer_kit.callbacks import Callback
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
    """A real Trainer that records what callbacks request.

    Attributes:
        asked: (step, reason, request) of each checkpoint.
        stops: reasons.
        printed: lines of rank 0.
        lengths: the lengths of accumulation windows that callbacks set.
        logged: (step, values) of each ``log_metrics``.
    """

    def __init__(self, **options: Any) -> None:
        self.asked: list[tuple[int, str, Any]] = []
        self.stops: list[str] = []
        self.printed: list[str] = []
        self.lengths: list[int] = []
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
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

    def set_accumulation(
        self, batches: int, measure: Callable[[float, float], None] | None = None
    ) -> None:
        self.lengths.append(batches)
        super().set_accumulation(batches, measure)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if metrics:
            self.logged.append((step, dict(metrics)))
        super().log_metrics(metrics, step)

    @property
    def asked_at(self) -> list[int]:
        """The steps at which checkpoints were asked for."""
        return [step for step, _, _ in self.asked]

    @property
    def on_disk(self) -> list[str]:
        """Names of the checkpoints in the run's own directory."""
        return [
            record.path.name
            for record in checkpoints(Path(self.default_root_dir) / "checkpoints")
        ]


class Unsized:
    """Batches without a length."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Windows(Callback):
    """The number of micro-batches of each optimizer step: (epoch, micro-batches)."""

    def __init__(self) -> None:
        self.lengths: list[tuple[int, int]] = []
        self._batches = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._batches = trainer.progress.batch

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.lengths.append(
            (trainer.current_epoch, trainer.progress.batch - self._batches)
        )
        self._batches = trainer.progress.batch


class Timed(Scripted):
    """Each batch takes as many seconds of a test's clock as its kind of step says.

    Args:
        clock: lets seconds pass.
        seconds: by ``"train"``, ``"val"``, ``"test"``, ``"predict"``: for every batch, or one number for each.
        values: logged in each training step, with ``prog_bar=True``.
    """

    def __init__(
        self,
        clock: Callable[[float], None],
        values: dict[str, float] | None = None,
        **seconds: Any,
    ) -> None:
        super().__init__()
        self.pass_time, self.values = clock, values or {}
        self.seconds = {
            kind: iter(each) if isinstance(each, list) else each
            for kind, each in seconds.items()
        }

    def _take(self, kind: str) -> None:
        seconds = self.seconds.get(kind, 0)
        self.pass_time(next(seconds) if isinstance(seconds, Iterator) else seconds)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._take("train")
        for name, value in self.values.items():
            self.log(name, value, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(
        self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._take("val")

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._take("test")

    def predict_step(
        self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        self._take("predict")
        return batch


def trainer(*callbacks: Any, **options: Any) -> Noting:
    """A quiet one on the CPU that writes below the working directory."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False
        if not any(hasattr(one, "best_model_path") for one in callbacks)
        else None,
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
    made.fit(
        module,
        Unsized(loader) if unsized else loader,
        None if val is None else [BATCH],
        ckpt_path=ckpt_path,
    )
    return made
