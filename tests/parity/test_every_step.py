"""From every checkpoint of a run of 14 steps a new run goes on, and does in every bit what the first one did."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

import trainer_kit as tk
from tests.parity.plain import assert_same, case, make_net, same_state
from trainer_kit.loggers import CSVLogger, read_journal
from trainer_kit.precision.native import MixedPrecision
from trainer_kit.strategies import DDPStrategy
from trainer_kit.testing import run_distributed

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata

STEPS = 14
Batch = tuple[Tensor, Tensor, Tensor]


class Augmented(Dataset[Batch]):
    """What a sample looks like is drawn each time it is read, from all three generators."""

    def __init__(self, count: int = 23) -> None:
        draw = torch.Generator().manual_seed(5)
        self.x, self.y = (
            torch.randn(count, 8, generator=draw),
            torch.randint(4, (count,), generator=draw),
        )

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Batch:
        return (
            self.x[index] + 0.1 * torch.randn(8) * random.random() * np.random.rand(),
            self.y[index],
            index,
        )


class Learner(tk.TrainModule):
    """Dropout, batch norm and values of every kind; remembers what it was given and what came out."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net, self.options = make_net(dropout=0.3, norm=True), options
        self.seen: list[tuple[int, list[int], float]] = []

    def remember(self, batch: Batch, *losses: Tensor) -> None:
        self.seen += [
            (self.global_step, batch[2].tolist(), loss.item()) for loss in losses
        ]

    def on_train_epoch_start(self) -> None:
        self.log("drawn", torch.rand(()), reduce_fx="sum")

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.remember(batch, loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("sum", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        if self.options.get("functions", True):
            self.log("range", loss, on_step=False, on_epoch=True, reduce_fx=spread)
        if batch_idx == 1:
            self.log("once", loss, on_step=False, on_epoch=True, reduce_fx="min")
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log(
            "val_loss",
            F.cross_entropy(self.net(batch[0]), batch[1]) + 0.1 * torch.rand(()),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def spread(values: Tensor) -> Tensor:
    return values.max() - values.min()


class Scheduled(Learner):
    """One scheduler watches a metric, one goes by steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        watching = lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.05
        )
        warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9)
        watches = {"scheduler": watching, "monitor": "val_loss"}
        return [optimizer], [watches, {"scheduler": warmup, "interval": "step"}]


class Named(Learner):
    """Two optimizers, each with a loss of its own."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        hidden = self.net[:-1](batch[0])
        first, second = (
            F.cross_entropy(self.net[-1](hidden), batch[1]),
            hidden.square().mean(),
        )
        self.remember(batch, first, second)
        self.log_dict({"first": first, "second": second}, on_step=True, on_epoch=True)
        return {"head": first, "body": second}

    def configure_optimizers(self) -> Any:
        head, body = self.net[-1].parameters(), self.net[:-1].parameters()
        return {
            "head": torch.optim.Adam(head, lr=0.02),
            "body": torch.optim.SGD(body, lr=0.05, momentum=0.9),
        }


class Manual(Learner):
    """Steps its two optimizers itself, one of them on every other batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        head, body = self.optimizers()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.remember(batch, loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        for optimizer in (head, body):
            optimizer.zero_grad()
        self.manual_backward(loss)
        head.step()
        if batch_idx % 2:
            body.step()

    def configure_optimizers(self) -> Any:
        head, body = self.net[-1].parameters(), self.net[:-1].parameters()
        return [
            torch.optim.Adam(head, lr=0.02),
            torch.optim.SGD(body, lr=0.05, momentum=0.9),
        ]


class Counting(Learner):
    """Logs torchmetrics' objects, one of them fed and never logged inside the epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        scores = {"acc": MulticlassAccuracy(4), "recall": MulticlassRecall(4)}
        self.scores, self.mean, self.aside = (
            MetricCollection(scores),
            MeanMetric(),
            MeanMetric(),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.remember(batch, loss)
        self.aside.update(loss.detach())
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.scores.update(logits, batch[1])
        if batch_idx < 2:
            for name, metric in self.scores.items():
                self.log(name, metric, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("aside", self.aside.compute())
        self.aside.reset()


class Average(tk.Callback):
    """An average of the weights that the run validates nobody with: tensors in a callback's state."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        for name, value in module.named_parameters():
            before = self.average.setdefault(name, value.detach().clone())
            before.lerp_(value.detach(), 0.2)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Any) -> None:
        self.average = {name: value.clone() for name, value in state["average"].items()}


class Overflows(tk.Callback):
    """Makes sure that some steps overflow and some do not."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if trainer.progress.step == STEPS:
            assert trainer.precision_plugin.scaler.get_scale() < 2.0**30


def own_buffers() -> Any:
    return DDPStrategy(broadcast_buffers=False) if dist.is_initialized() else "auto"


def overflowing() -> MixedPrecision:
    return MixedPrecision(
        torch.float16,
        "cpu",
        torch.amp.GradScaler("cpu", init_scale=2.0**36, growth_interval=4),
    )


class Restless(tk.Callback):
    """Draws wherever a run begins, and logs."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        torch.rand(3), random.random(), np.random.rand()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        torch.rand(5), random.random(), np.random.rand()


class Watcher(tk.Callback):
    """What had been logged and seen when each checkpoint was taken, and the values as a run finds them."""

    order = "late"

    def __init__(self) -> None:
        self.taken: dict[int, tuple[int, int]] = {}
        self.values: dict[int, dict[str, float]] = {}
        self.rates: dict[int, list[float]] = {}
        self.state: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        trainer.files.deliveries.wait()  # the journal is written by a thread
        lines = (
            list(read_journal(trainer.files.journal.path))
            if trainer.is_global_zero
            else []
        )
        self.taken[trainer.global_step] = len(lines), len(module.seen)
        self.values[trainer.global_step] = known(trainer)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.values.setdefault(trainer.global_step, known(trainer))

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.rates[trainer.global_step] = [
            g["lr"] for o in trainer.optimizers for g in o.param_groups
        ]


def known(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def shuffled() -> Any:
    return DataLoader(Augmented(), batch_size=3, shuffle=True)


def by_workers() -> Any:
    return DataLoader(
        Augmented(47), batch_size=3, shuffle=True, num_workers=2
    )  # more data: starting them takes time


def own_generator() -> Any:
    data = Augmented()
    return DataLoader(
        data,
        batch_size=3,
        sampler=RandomSampler(data, generator=torch.Generator().manual_seed(11)),
    )


def stateful() -> Any:
    return StatefulDataLoader(
        Augmented(),
        batch_size=3,
        shuffle=True,
        generator=torch.Generator().manual_seed(11),
    )


class Rolling(IterableDataset[Batch]):
    """A shuffle buffer over a stream that never begins anew: each epoch goes on where the one before ended."""

    def __init__(self) -> None:
        self.data, self.at, self.left, self.drawn = Augmented(), 0, 0, random.Random(4)
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        self.left = self.left or 21
        while self.left:
            self.left -= 1
            while len(self.buffer) < 6:
                self.buffer.append(self.at % len(self.data))
                self.at += 1
            yield self.data[self.buffer.pop(self.drawn.randrange(6))]

    def state_dict(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "left": self.left,
            "buffer": list(self.buffer),
            "drawn": self.drawn.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, internal, gauss = state["drawn"]
        self.at, self.left, self.buffer = (
            state["at"],
            state["left"],
            list(state["buffer"]),
        )
        self.drawn.setstate((version, tuple(internal), gauss))


def rolling() -> Any:
    return DataLoader(Rolling(), batch_size=3)


@dataclass
class Variant:
    """A run: its module, its data, the Trainer's arguments, and further callbacks."""

    module: Callable[..., Any] = Learner
    data: Callable[[], Any] = shuffled
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], Any], ...] = ()
    validates: bool = False


VARIANTS: dict[str, Variant] = {
    "shuffle and dropout": Variant(),
    "hooks that draw": Variant(callbacks=(Restless,), validates=True),
    "accumulation 2": Variant(options={"accumulate_grad_batches": 2}),
    "accumulation with a ragged window": Variant(
        options={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    ),
    "validation each epoch": Variant(validates=True),
    "validation inside the epoch": Variant(
        validates=True, options={"val_check_interval": 2}
    ),
    "rarely logged": Variant(validates=True, options={"log_every_n_steps": 5}),
    "scheduler on a metric": Variant(Scheduled, validates=True),
    "two named optimizers": Variant(Named, options={"gradient_clip_val": 0.5}),
    "manual optimization": Variant(Manual),
    "average of the weights": Variant(callbacks=(Average,)),
    "16-mixed that overflows": Variant(
        options={"plugins": overflowing}, callbacks=(Overflows,)
    ),
    "metric objects": Variant(
        Counting, validates=True, options={"val_check_interval": 3}
    ),
    "buffers of each rank": Variant(validates=True, options={"strategy": own_buffers}),
    "a sampler's own generator": Variant(data=own_generator),
    "a stateful loader": Variant(data=stateful),
    "a rolling stream": Variant(
        partial(Learner, functions=False), data=rolling
    ),  # its end is found by reading
    "two workers": Variant(data=by_workers),
}


def disturb() -> None:
    """Every global generator stands where nothing in a run has put it."""
    random.seed(), np.random.seed(), torch.seed()


def fit(
    name: str, directory: Path, keep: bool = False, ckpt: Path | None = None
) -> tuple[Any, Any, Watcher]:
    """A run of this variant, with everything made anew as in a new process."""
    variant, world = (
        VARIANTS[name],
        dist.get_world_size() if dist.is_initialized() else 1,
    )
    disturb()
    module, watcher = variant.module(), Watcher()
    if ckpt is not None:
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    else:
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
    keeper = tk.callbacks.ModelCheckpoint(
        directory / "kept", every_n_train_steps=1, save_top_k=-1
    )
    rates = [] if isinstance(module, Manual) else [tk.callbacks.LearningRateMonitor()]
    trainer = tk.Trainer(
        accelerator="cpu",
        devices=world,
        max_steps=STEPS,
        seed=None if ckpt else 7,
        callbacks=[
            *(make() for make in variant.callbacks),
            *rates,
            watcher,
            *([keeper] if keep else []),
        ],
        logger=CSVLogger(directory / "logs", name="", version=""),
        enable_checkpointing=keep,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            "log_every_n_steps": 1,
            "strategy": "ddp" if world > 1 else "auto",
            **{
                name: value() if callable(value) else value
                for name, value in variant.options.items()
            },
        },
    )
    val = DataLoader(Augmented(7), batch_size=4) if variant.validates else None
    trainer.fit(module, variant.data(), val, ckpt_path=ckpt)
    watcher.state = trainer.run.collect(False)
    return trainer, module, watcher


def journal(trainer: Any) -> list[dict[str, Any]]:
    if not trainer.is_global_zero:
        return []
    return [
        {k: v for k, v in line.items() if k != "time"}
        for line in read_journal(trainer.files.journal.path)
    ]


def resume_everywhere(name: str, root: str) -> None:
    directory = Path(root)
    trainer, module, watcher = fit(name, directory / "whole", keep=True)
    steps = sorted(watcher.taken)
    assert steps == list(range(1, STEPS + 1))
    whole = journal(trainer)
    for step in steps[:-1]:
        ckpt = directory / "whole" / "kept" / f"step-{step:08d}"
        with case(variant=name, step=step):
            again, module2, watcher2 = fit(name, directory / f"from-{step}", ckpt=ckpt)
            lines, batches = watcher.taken[step]
            assert module2.seen == module.seen[batches:]
            same_state(
                watcher2.values[step], watcher.values[step], "callback_metrics as found"
            )
            same_state(
                watcher2.rates,
                {at: rate for at, rate in watcher.rates.items() if at > step},
                "rates",
            )
            assert_same(module2, module)
            same_state(plain_state(watcher2.state), plain_state(watcher.state))
            same_state(known(again), known(trainer), "callback_metrics at the end")
            assert journal(again) == whole[lines:]


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """Everything that a checkpoint of the end would hold, but for time, places and the one who keeps checkpoints."""
    kept = {
        key: value
        for key, value in state["callbacks"].items()
        if not key.startswith("ModelCheckpoint")
    }
    same = {
        key: value
        for key, value in state.items()
        if key not in ("configuration", "loggers")
    }
    return {**same, "callbacks": kept, "progress": {**state["progress"], "seconds": 0}}


SLOW = {"two workers"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in VARIANTS
    ],
)
def test_one_process(tmp_path: Path, name: str) -> None:
    resume_everywhere(name, str(tmp_path))


QUICK_ON_RANKS = {"accumulation with a ragged window"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK_ON_RANKS else [pytest.mark.slow])
        for name in VARIANTS
    ],
)
def test_two_ranks(tmp_path: Path, name: str) -> None:
    run_distributed(resume_everywhere, 2, name, str(tmp_path), timeout=240)
