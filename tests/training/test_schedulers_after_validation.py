"""A scheduler that monitors a value and counts steps reads the values of its step: it advances after the validation."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from tests.training.tiny import Tiny
from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import OnExceptionCheckpoint
from trainer_kit.checkpoint.read import read_checkpoint

OPTIONS = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}


class Plateau(ReduceLROnPlateau):
    def __init__(self, optimizer) -> None:
        super().__init__(optimizer)
        self.read: list[float] = []

    def step(self, metrics, *arguments):
        self.read.append(float(metrics))
        super().step(metrics, *arguments)


class Net(Tiny):
    """Its validation logs the step."""

    def __init__(self, *frequencies: int, **options: object) -> None:
        super().__init__()
        self.frequencies, self.options = frequencies, options
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.plateaus = [Plateau(self.optimizer) for _ in frequencies]

    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.trainer.global_step))

    def configure_optimizers(self):
        common = {"monitor": "val", "interval": "step", "strict": False, **self.options}
        pairs = zip(self.plateaus, self.frequencies, strict=True)
        return [self.optimizer], [
            {"scheduler": plateau, "frequency": n, **common} for plateau, n in pairs
        ]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(4, 2))


def known() -> DataLoader:
    return DataLoader(torch.ones(4, 2))


def unknown() -> DataLoader:
    return DataLoader(Stream(), batch_size=1)


@pytest.mark.parametrize("loader", [known, unknown])
@pytest.mark.parametrize(
    ("frequency", "options", "steps"),
    [
        (2, {"val_check_interval": 2}, [2, 4, 6, 8]),
        (4, {"val_check_interval": 2}, [4, 8]),
        (4, {}, [4, 8]),
        (1, {"val_check_interval": 2, "accumulate_grad_batches": 2}, [1, 2, 3, 4]),
    ],
)
def test_it_reads_the_validation_of_its_own_step(loader, frequency, options, steps):
    module = Net(frequency)
    Trainer(max_epochs=2, num_sanity_val_steps=0, **options, **OPTIONS).fit(
        module, loader(), known()
    )
    assert module.plateaus[0].read == steps


def test_a_strict_one_needs_no_value_before_the_first_validation():
    module = Net(2, strict=True)
    Trainer(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0, **OPTIONS).fit(
        module, known(), known()
    )
    assert module.plateaus[0].read == [2, 4]


@pytest.mark.world_size(2)
def test_schedulers_of_two_ranks_read_the_validation_of_their_step():
    module = Net(2, 1)
    options = {
        **OPTIONS,
        "devices": 2,
        "val_check_interval": 1,
        "num_sanity_val_steps": 0,
    }
    Trainer(max_epochs=1, **options).fit(module, DataLoader(torch.ones(4, 2)), known())
    assert [plateau.read for plateau in module.plateaus] == [[2], [1, 2]]


def test_a_value_of_training_is_that_of_the_step():
    class Training(Net):
        def training_step(self, batch, batch_idx):
            self.log("now", float(batch_idx))
            return super().training_step(batch, batch_idx)

    module = Training(1, monitor="now")
    Trainer(max_epochs=1, **OPTIONS).fit(module, unknown(), known())
    assert module.plateaus[0].read == [0, 1, 2, 3]


def test_an_own_step_of_schedulers_gets_the_value_and_the_step():
    class Own(Net):
        def __init__(self) -> None:
            super().__init__(2)
            self.given: list[tuple[int, float]] = []

        def lr_scheduler_step(self, scheduler, metric):
            self.given.append((self.trainer.global_step, float(metric)))

    module = Own()
    Trainer(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0, **OPTIONS).fit(
        module, known(), known()
    )
    assert module.given == [(2, 2.0), (4, 4.0)]


@pytest.mark.parametrize("hook", ["on_train_step_end", "on_validation_end"])
def test_a_run_resumed_from_between_a_step_and_its_scheduler_advances_it(
    hook, tmp_path
):
    class Saves(Callback):
        def save(self, trainer, module):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "between")

    setattr(Saves, hook, Saves.save)
    options = {"val_check_interval": 2, "num_sanity_val_steps": 0, **OPTIONS}
    first = Net(2)
    Trainer(max_epochs=1, callbacks=Saves(), **options).fit(first, known(), known())
    assert first.plateaus[0].read == [2, 4]
    module = Net(2)
    Trainer(max_epochs=1, **options).fit(
        module, known(), known(), ckpt_path=str(tmp_path / "between")
    )
    assert [read for read in module.plateaus[0].read if read] == [2, 4]


@pytest.mark.parametrize("windows", [1, 2])
def test_a_scheduler_that_counts_steps_sees_the_new_step(windows):
    """As in Lightning: the step is counted before ``lr_scheduler_step``."""

    class Sees(Tiny):
        def __init__(self):
            super().__init__()
            self.seen = []

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

        def lr_scheduler_step(self, scheduler, metric):
            self.seen.append((self.trainer.global_step, self.current_epoch))
            super().lr_scheduler_step(scheduler, metric)

    module = Sees()
    trainer = Trainer(**OPTIONS, max_epochs=2, accumulate_grad_batches=windows)
    trainer.fit(module, DataLoader(torch.ones(8, 2), batch_size=2))
    each = 4 // windows
    assert module.seen == [(i + 1, i // each) for i in range(2 * each)]


class RaisesAtThird(Plateau):
    def step(self, metrics, *arguments):
        super().step(metrics, *arguments)
        if len(self.read) == 3:
            raise RuntimeError("no more")


class LeavesOut(Callback):
    """The step during which the scheduler above raises is one that is left out."""

    def on_train_start(self, trainer, module):
        trainer.running.fit.windows.leave_out([4])


def test_a_state_taken_inside_a_left_out_step_counts_the_samples_trained_on(tmp_path):
    module = Net(1, strict=False)
    module.plateaus = [RaisesAtThird(module.optimizer)]
    module.validation_step = lambda batch, batch_idx: None
    module.training_step = lambda batch, batch_idx: _logged_loss(module, batch)
    callbacks = [LeavesOut(), OnExceptionCheckpoint(tmp_path)]
    trainer = Trainer(
        max_epochs=1, num_sanity_val_steps=0, callbacks=callbacks, **OPTIONS
    )
    with pytest.raises(RuntimeError, match="no more"):
        trainer.fit(module, unknown(), known())
    progress = read_checkpoint(tmp_path / "on_exception")["progress"]
    assert (progress["step"], progress["batch"], progress["samples"]) == (3, 3, 3)


def _logged_loss(module, batch):
    module.log("val", float(module.trainer.global_step))
    return module.layer(batch).pow(2).mean()
