import math
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.callbacks.fits import BATCH, Scripted, each, fit, trainer
from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.checkpoint.store import checkpoints, lookup
from trainer_kit.core.errors import (
    CheckpointError,
    ConfigurationError,
    DurationError,
    NonFiniteError,
)
from trainer_kit.testing import TinyModule


def scores(keeper):
    return [float(score) for score in keeper.best_k_models.values()]


def steps_of(paths):
    return [int(path[-8:]) for path in paths]


# -- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_n_train_steps": 3}, [3, 6, 9]),
        ({"every_n_train_steps": "3st"}, [3, 6, 9]),
        ({"every_n_train_steps": "4ba"}, [2, 4, 6, 8, 10]),
        ({"every_n_train_steps": "5ba"}, [3, 5, 8, 10]),
        ({"every_n_train_steps": "40sp"}, [4, 8]),
        ({"every_n_train_steps": "300tok"}, [3, 6, 9]),
        ({"every_n_train_steps": "0.05dur"}, [5, 10]),
        ({"every_n_epochs": 1}, [5, 10]),
        ({"every_n_epochs": "2ep"}, [10]),
        ({"every_n_epochs": "3st"}, [3, 6, 9]),
        ({}, [5, 10]),
        ({"every_n_train_steps": 0}, []),
        ({"every_n_epochs": 0}, []),
        ({"save_top_k": 0, "every_n_train_steps": 3}, []),
        ({"train_time_interval": timedelta(0)}, list(range(1, 11))),
        ({"train_time_interval": timedelta(hours=1)}, []),
        ({"train_time_interval": "30min"}, []),
    ],
)
def test_without_validation(options, steps):
    """Ten steps of two batches, ten samples and a hundred tokens each, in two epochs of a hundred."""
    run = {
        "batches": 10,
        "epochs": 100,
        "max_steps": 10,
        "batch": torch.ones(5, 32),
        "tokens": 50,
    }
    if options.get("every_n_train_steps") == "0.05dur":
        run.update(
            epochs=20, max_steps=-1, limit_train_batches=10
        )  # of a hundred steps
    done = fit(ModelCheckpoint(**options), accumulate_grad_batches=2, **run)
    assert [step for step in done.asked_at if step <= 10] == steps


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [2, 4, 6, 8]),
        ({"save_on_train_epoch_end": False}, [2, 4, 6, 8]),
        ({"save_on_train_epoch_end": True}, [4, 8]),
        ({"every_n_epochs": 2}, [8]),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, [4, 8]),
        ({"every_n_epochs": 2, "save_on_train_epoch_end": False}, [6]),
        ({"every_n_train_steps": 3}, [3, 6]),
    ],
)
@pytest.mark.parametrize("unsized", [False, True])
def test_with_two_validations_an_epoch(options, steps, unsized):
    done = fit(
        ModelCheckpoint(**options),
        epochs=2,
        val=each("m", 1.0),
        val_check_interval=2,
        unsized=unsized,
    )
    assert done.asked_at == steps


class Clock(Callback):
    """Makes each step take so long."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds = 1000.0, seconds
        monkeypatch.setattr(
            "trainer_kit.callbacks.model_checkpoint.monotonic", lambda: self.now
        )

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.now += self.seconds


def test_time_is_measured_from_the_last_one(monkeypatch):
    done = fit(
        ModelCheckpoint(train_time_interval="1min"), Clock(monkeypatch, 25), batches=10
    )
    assert done.asked_at == [3, 6, 9]


@pytest.mark.slow
@pytest.mark.world_size(2, process_group=False)
def test_ranks_agree_about_time_at_steps_that_all_of_them_know(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        # Rank 1's clock stands still.
        clock = Clock(patch, 0 if int(os.environ["RANK"]) else 25)
        keeper = ModelCheckpoint(
            tmp_path / "kept", train_time_interval=60, save_top_k=-1
        )
        done = fit(
            keeper, clock, batches=18, log_every_n_steps=4, devices=2, strategy="ddp"
        )
    assert done.asked_at == [4, 8]
    assert [request.path.name for _, _, request in done.asked] == [
        "step-00000004",
        "step-00000008",
    ]


def test_one_checkpoint_for_a_step():
    done = fit(
        ModelCheckpoint(every_n_train_steps=4, save_last=True), val=each("m", 1.0)
    )
    assert done.asked_at == [4]


def test_nothing_in_sanity_check_validate_or_fast_run():
    keeper = ModelCheckpoint(save_last=True, save_on_exception=True)
    quick = fit(keeper, val=each("m", 1.0), fast_dev_run=True)
    made = trainer(keeper, num_sanity_val_steps=1)
    made.validate(Scripted(each("m", 1.0)), [BATCH])

    class Breaks(Scripted):
        def validation_step(self, batch, batch_idx):
            raise ValueError("in the sanity check")

    with pytest.raises(ValueError, match="in the sanity check"):
        made.fit(Breaks(), [BATCH], [BATCH])
    assert (quick.asked, made.asked) == ([], [])


def test_no_step_no_checkpoint():
    assert (
        fit(ModelCheckpoint(save_last=True), val=each("m", 1.0), epochs=0).asked == []
    )


class Raises(Callback):
    def __init__(self, error, step):
        self.error, self.step = error, step

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.step:
            raise self.error


@pytest.mark.parametrize(
    ("error", "options", "asked"),
    [
        (
            ValueError("broken"),
            {"save_on_exception": True, "monitor": "loss"},
            [(1, "ValueError: broken")],
        ),
        (NonFiniteError("loss is NaN"), {"save_on_exception": True}, []),
        (ValueError("broken"), {}, []),
    ],
)
def test_at_an_exception(error, options, asked):
    made = trainer(ModelCheckpoint(**options), Raises(error, 1))
    with pytest.raises(type(error)):
        made.fit(Scripted(), [BATCH] * 9)
    assert [(step, reason) for step, reason, _ in made.asked] == asked


@pytest.mark.world_size(2, process_group=False)
def test_at_an_exception_of_one_rank_no_other_is_asked(tmp_path):
    error = Raises(ValueError("broken"), 1 if int(os.environ["RANK"]) == 0 else 10**9)
    made = trainer(
        ModelCheckpoint(tmp_path / "kept", save_on_exception=True),
        error,
        devices=2,
        strategy="ddp",
    )
    with pytest.raises(Exception) as caught:  # noqa: PT011 - rank 1 hears of it in words of its own
        made.fit(Scripted(), [BATCH] * 400)
    if int(os.environ["RANK"]) == 0:
        assert str(caught.value) == "broken"
        assert [(step, reason) for step, reason, _ in made.asked] == [
            (1, "ValueError: broken")
        ]


# -- the value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "kept"), [(1, [8]), (2, [8, 12]), (-1, [4, 8, 12])])
def test_an_interval_that_meets_a_validation_is_scored_by_it(keep, kept):
    keeper = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4, save_top_k=keep)
    fit(
        keeper,
        batches=100,
        max_steps=12,
        val_check_interval=4,
        val=each("val_loss", 5.0, 1.0, 3.0),
    )
    assert steps_of(keeper.best_k_models) == kept
    assert scores(keeper) == [{4: 5.0, 8: 1.0, 12: 3.0}[step] for step in kept]
    assert keeper.best_model_path.endswith("step-00000008")
    assert Path(keeper.best_model_path).is_dir()


@pytest.mark.parametrize("asks", [{}, {"save_last": True}])
@pytest.mark.parametrize("unsized", [False, True])
def test_a_validation_at_the_end_of_an_epoch_scores_the_interval_that_meets_it(
    asks, unsized
):
    keeper = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, **asks)
    fit(keeper, epochs=3, unsized=unsized, val=each("val_loss", 5.0, 1.0, 3.0))
    assert (steps_of(keeper.best_k_models), scores(keeper)) == ([8], [1.0])
    assert Path(keeper.best_model_path).is_dir()


class Validates(Callback):
    """Asks for validation at these steps."""

    def __init__(self, *steps):
        self.steps = steps

    def on_train_step_end(self, trainer, module):
        if trainer.global_step in self.steps:
            trainer.request_validation("asked for")


@pytest.mark.parametrize("asks", [{}, {"save_last": True}])
def test_a_validation_that_is_asked_for_scores_the_checkpoint_of_its_step(asks):
    keeper = ModelCheckpoint(
        monitor="val_loss", every_n_train_steps=2, filename="{step}-{val_loss}", **asks
    )
    fit(
        keeper,
        Validates(2, 4, 6),
        batches=7,
        val=each("val_loss", 5.0, 1.0, 3.0),
        check_val_every_n_epoch=9,
    )
    assert (list(map(os.path.basename, keeper.best_k_models)), scores(keeper)) == (
        ["step=4-val_loss=1.0"],
        [1.0],
    )


@pytest.mark.world_size(2, process_group=False)
def test_two_ranks_score_a_checkpoint_by_the_validation_of_its_step(tmp_path):
    """One in the schedule, and one that is asked for, of which a rank knows before the other."""
    keeper = ModelCheckpoint(
        tmp_path / "kept", monitor="val_loss", every_n_train_steps=25, save_last=True
    )
    asks = [Validates(50)] if int(os.environ["RANK"]) else []
    options = {"devices": 2, "strategy": "ddp", "val_check_interval": 75}
    done = fit(
        keeper,
        *asks,
        batches=300,
        max_steps=100,
        val=each("val_loss", 1.0, 5.0),
        **options,
    )
    assert done.asked_at == [25, 50, 75, 100]
    assert (steps_of(keeper.best_k_models), scores(keeper)) == ([50], [1.0])
    assert Path(keeper.best_model_path).is_dir()


def test_an_interval_between_two_validations_waits_for_the_next():
    """A score that is not its own would let it beat others, or be beaten, for what it is not."""
    keeper = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4, save_top_k=-1)
    done = fit(
        keeper,
        batches=100,
        max_steps=20,
        val_check_interval=6,
        val=each("val_loss", 5.0, 1.0, 3.0),
    )
    assert done.asked_at == [6, 12, 18, 20]
    assert (steps_of(keeper.best_k_models), scores(keeper)) == (
        [6, 12, 18],
        [5.0, 1.0, 3.0],
    )


def test_save_last_keeps_the_newest_between_two_validations():
    keeper = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4, save_last=True)
    done = fit(
        keeper,
        batches=100,
        max_steps=20,
        val_check_interval=6,
        val=each("val_loss", 5.0, 1.0, 3.0),
    )
    assert done.asked_at == [4, 6, 8, 12, 16, 18, 20]
    assert (steps_of(keeper.best_k_models), scores(keeper)) == ([12], [1.0])
    assert done.on_disk == ["step-00000012", "step-00000020"]


def test_a_value_of_the_last_epoch_is_not_the_value_of_a_step_in_this_one():
    keeper = ModelCheckpoint(
        monitor="acc", mode="max", every_n_train_steps=3, save_top_k=-1
    )
    done = fit(keeper, epochs=3, epoch=each("acc", 0.1, 0.9, 0.5))
    assert done.asked_at == [4, 8, 12]
    assert scores(keeper) == pytest.approx([0.1, 0.9, 0.5])


def test_a_value_that_is_logged_in_steps_is_the_value_of_each_step():
    keeper = ModelCheckpoint(monitor="loss", every_n_train_steps=2, save_top_k=-1)
    done = fit(
        keeper,
        train=each("loss", 8.0, 7.0, 6.0, None, 4.0, 3.0),
        batches=6,
        log_every_n_steps=50,
    )
    assert done.asked_at == [2, 4, 6]
    assert scores(keeper) == [7.0, 6.0, 3.0]


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_the_counts_need_not_be_logged(name):
    keeper = ModelCheckpoint(monitor=name, mode="max", every_n_epochs=1, save_top_k=2)
    fit(keeper, epochs=3, val=each("m", 1.0, 1.0, 1.0))
    assert (steps_of(keeper.best_k_models), scores(keeper)) == (
        [8, 12],
        [8.0, 12.0] if name == "step" else [1.0, 2.0],
    )
    assert keeper.best_model_path.endswith("step-00000012")


def test_a_logged_value_of_that_name_comes_first():
    keeper = ModelCheckpoint(monitor="epoch", mode="max", save_top_k=-1)
    fit(keeper, epochs=2, val=each("epoch", 10.0, 20.0))
    assert scores(keeper) == [10.0, 20.0]


def test_the_first_value_is_waited_for():
    keeper = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, save_top_k=-1)
    done = fit(
        keeper,
        batches=100,
        max_steps=7,
        val_check_interval=5,
        val=each("val_loss", 1.0),
    )
    assert done.asked_at == [5, 7]
    assert (steps_of(keeper.best_k_models), scores(keeper)) == ([5], [1.0])


@pytest.mark.parametrize("unsized", [False, True])
def test_values_of_the_training_epoch(unsized):
    keeper = ModelCheckpoint(
        monitor="train_loss", save_top_k=-1, filename="{train_loss:.1f}"
    )
    values = {"val": each("val_loss", 0.0, 0.0), "epoch": each("train_loss", 3.0, 2.0)}
    done = fit(keeper, epochs=2, unsized=unsized, **values)
    assert done.on_disk == ["train_loss=3.0", "train_loss=2.0"]
    assert float(keeper.best_model_score) == 2.0


def test_values_of_every_training_epoch_with_a_validation_every_second_one():
    keeper = ModelCheckpoint(monitor="train_loss", every_n_epochs=1, save_top_k=-1)
    epoch = each("train_loss", 3.0, 2.0, 4.0, 1.0)
    done = fit(
        keeper,
        epochs=4,
        epoch=epoch,
        val=each("val_loss", 0.0),
        check_val_every_n_epoch=2,
    )
    assert done.asked_at == [4, 8, 12, 16]
    assert scores(keeper) == [3.0, 2.0, 4.0, 1.0]


@pytest.mark.parametrize("where", [None, True])
def test_by_epochs_with_a_validation_every_second_one(where):
    keeper = ModelCheckpoint(
        monitor="val_loss",
        every_n_epochs=1,
        save_top_k=-1,
        save_on_train_epoch_end=where,
    )
    done = fit(
        keeper, epochs=4, val=each("val_loss", 1.0, 3.0), check_val_every_n_epoch=2
    )
    assert done.asked_at == [8, 16]
    assert scores(keeper) == [1.0, 3.0]


@pytest.mark.parametrize(
    "options", [{}, {"save_on_train_epoch_end": False}, {"every_n_epochs": 1}]
)
def test_a_value_that_is_never_logged(options):
    with pytest.raises(
        ConfigurationError,
        match=r"ModelCheckpoint monitors 'val_los'(.|\n)*did you mean 'val_loss'",
    ):
        fit(ModelCheckpoint(monitor="val_los", **options), val=each("val_loss", 1.0))


def test_a_run_never_ends_without_the_checkpoint_that_was_due():
    options = {"val": each("m", 1.0), "check_val_every_n_epoch": 5}
    done = fit(
        ModelCheckpoint(monitor="x", every_n_train_steps=2),
        batches=9,
        max_steps=3,
        **options,
    )
    assert [(step, reason) for step, reason, _ in done.asked] == [(3, "training ended")]


@pytest.mark.parametrize(
    ("mode", "values"), [("min", [2.0, math.nan, 1.0]), ("max", [1.0, math.nan, 2.0])]
)
def test_nan_is_the_worst(mode, values):
    keeper = ModelCheckpoint(monitor="m", mode=mode, save_top_k=2)
    fit(keeper, epochs=2, val=each("m", *values[:2]))
    assert math.isinf(keeper.kth_value)
    assert keeper.kth_best_model_path.endswith("step-00000008")
    assert math.isinf(keeper.current_score)
    fit(
        keeper := ModelCheckpoint(monitor="m", mode=mode, save_top_k=2),
        epochs=3,
        val=each("m", *values),
    )
    assert scores(keeper) == [values[0], values[2]]


@pytest.mark.world_size(2, process_group=False)
def test_rank_0_judges_and_names_for_all(tmp_path):
    """The value is each rank's own: it is logged without being reduced."""

    class Own(Scripted):
        def training_step(self, batch, batch_idx):
            self.log("loss", 0.25 + self.global_rank, sync_dist=False)
            return self(batch).pow(2).mean()

    keeper = ModelCheckpoint(
        tmp_path / "kept", monitor="loss", filename="{loss:.2f}", every_n_train_steps=2
    )
    made = trainer(keeper, devices=2, strategy="ddp", max_steps=2)
    made.fit(Own(), [BATCH] * 9)
    assert float(keeper.best_model_score) == 0.25
    assert made.asked[0][2].path.name == "loss=0.25"


# -- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({"monitor": "m"}, [4, 12], 12),
        ({"monitor": "m", "mode": "max"}, [4, 8], 8),
        ({"monitor": "m", "save_top_k": 2}, [12, 16], 12),
        ({"monitor": "m", "save_top_k": 2, "save_last": True}, [12, 16, 20], 12),
        ({"monitor": "m", "save_last": "link"}, [12, 20], 12),
        ({"monitor": "m", "save_top_k": 0, "save_last": True}, [16, 20], None),
        ({}, [16, 20], 20),
        ({"save_top_k": -1}, [4, 8, 12, 16, 20], 20),
        ({"save_top_k": 0}, [], None),
    ],
)
@pytest.mark.parametrize("async_save", [True, False])
def test_kept_checkpoints(options, kept, best, async_save):
    keeper = ModelCheckpoint(**options)
    done = fit(
        keeper, epochs=5, val=each("m", 3.0, 5.0, 1.0, 2.0, 4.0), async_save=async_save
    )
    directory = Path(keeper.dirpath)
    assert done.on_disk == [f"step-{step:08d}" for step in kept]
    expected = "" if best is None else str(directory / f"step-{best:08d}")
    assert keeper.best_model_path == expected
    if kept:
        assert str(lookup(directory, "last")) == keeper.last_model_path
        assert read_checkpoint(keeper.last_model_path)["progress"]["step"] == int(
            keeper.last_model_path[-8:]
        )
    if "monitor" in options:
        assert len(keeper.best_k_models) == options.get("save_top_k", 1), (
            "the spare is none of the best"
        )
    if best is not None and "monitor" in options:
        assert str(lookup(directory, "best")) == expected
        assert float(keeper.best_model_score) == (5.0 if options.get("mode") else 1.0)


class DeletesBest(Callback):
    """Deletes the best checkpoint, as a user may do in the middle of a run."""

    def on_validation_end(self, trainer, module):
        if trainer.global_step == 8:
            shutil.rmtree(trainer.checkpoint_callback.best_model_path)


def test_a_best_checkpoint_that_a_user_deleted_keeps_no_other_from_its_name(capsys):
    keeper = ModelCheckpoint(monitor="m", save_top_k=1, save_last=True)
    done = fit(
        DeletesBest(),
        keeper,
        epochs=4,
        val=each("m", 1.0, 2.0, 3.0, 4.0),
        async_save=False,
    )
    directory = Path(keeper.dirpath)
    assert done.on_disk == ["step-00000016"]
    assert lookup(directory, "last") == directory / "step-00000016"
    assert lookup(directory, "best") is None
    assert "after saving" not in capsys.readouterr().out


class Disk(Callback):
    """Names on disk while each step begins, once what is being written is there."""

    def __init__(self, directory):
        self.directory, self.seen = Path(directory), {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        save = trainer.run.saver.save
        if save is not None and save.writing is not None:
            save.writing.wait()
        self.seen[trainer.global_step] = steps_of(
            record.path.name for record in checkpoints(self.directory)
        )


def test_nothing_is_deleted_before_its_successor_is_durable(tmp_path):
    disk = Disk(tmp_path)
    fit(ModelCheckpoint(tmp_path, every_n_train_steps=1), disk, batches=5)
    assert disk.seen == {0: [], 1: [1], 2: [1, 2], 3: [2, 3], 4: [3, 4]}


class Spoils(Callback):
    """Makes the checkpoint of the first step something that is not ours to delete."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            trainer.run.saver.save.writing.wait()
            directory = Path(trainer.default_root_dir) / "checkpoints" / "step-00000001"
            (directory / "manifest.json").unlink()
            (directory / "notes.txt").write_text("mine")


def test_a_deletion_that_fails_does_not_end_the_run():
    done = fit(ModelCheckpoint(every_n_train_steps=1), Spoils(), batches=4)
    assert done.global_step == 4
    assert "step-00000001" in os.listdir("run/checkpoints")
    assert Path("run/checkpoints/step-00000001/notes.txt").read_text() == "mine"
    found = [
        line for line in done.printed if "not a checkpoint of this library" in line
    ]
    assert found[0].startswith("after saving ")


def test_existing_checkpoints_are_neither_overwritten_nor_deleted(tmp_path):
    directory = tmp_path / "mine"
    for step in (4, 8):
        write_checkpoint(directory / f"step-{step:08d}", {"old": {"step": step}})
    fit(ModelCheckpoint(directory), epochs=3)
    assert {
        path.name
        for path in directory.iterdir()
        if not path.name.startswith((".", "run"))
    } == {
        "index.json",
        "step-00000004",
        "step-00000008",
        "step-00000008-v1",
        "step-00000012",
    }
    assert read_checkpoint(directory / "step-00000004") == {"old": {"step": 4}}


def test_one_name_for_all():
    """A template without fields: names rotate, so that no checkpoint is replaced in place."""
    done = fit(ModelCheckpoint(filename="best"), epochs=5)
    names = [request.path.name for _, _, request in done.asked]
    assert names == ["best", "best-v1", "best-v2", "best-v3", "best"]
    assert sorted(done.on_disk) == ["best", "best-v3"]


def test_without_the_version_counter_it_is_replaced():
    keeper = ModelCheckpoint(filename="best", enable_version_counter=False)
    done = fit(keeper, epochs=3)
    assert done.on_disk == ["best"]
    assert read_checkpoint(keeper.best_model_path)["progress"]["step"] == 12


def test_two_callbacks_share_a_directory():
    best, every = (
        ModelCheckpoint(monitor="m"),
        ModelCheckpoint(every_n_epochs=2, save_top_k=-1),
    )
    done = fit(best, every, epochs=4, val=each("m", 5.0, 4.0, 3.0, 4.0))
    assert done.on_disk == ["step-00000008", "step-00000012", "step-00000016"]
    assert best.best_model_path.endswith("step-00000012")


def test_two_callbacks_of_which_one_saves_weights_alone_do_not_share():
    full, weights = (
        ModelCheckpoint(),
        ModelCheckpoint(save_weights_only=True, every_n_epochs=1),
    )
    done = fit(full, weights)
    assert [request.weights_only for _, _, request in done.asked] == [False, True]
    assert done.on_disk == ["step-00000004", "step-00000004-v1"]


# -- state -----------------------------------------------------------------------------------------------------------

VALUES = [3.0, 5.0, 1.0, 2.0, 4.0, 0.5]


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "m", "save_top_k": 2},
        {"monitor": "m", "save_last": True},
        {"every_n_train_steps": 3, "monitor": "m"},
        {"every_n_train_steps": 3, "monitor": "m", "save_last": True},
        {"every_n_train_steps": "7ba", "save_top_k": -1},
        {"every_n_epochs": 2},
        {"filename": "best"},
    ],
)
@pytest.mark.parametrize("stop", [14, 16])
def test_a_resumed_run_asks_for_the_same_checkpoints(tmp_path, options, stop):
    """Six epochs of four steps, in one go, and interrupted after ``stop`` steps."""
    whole = ModelCheckpoint(**options)
    reference = fit(
        whole, epochs=6, val=each("m", *VALUES), default_root_dir=tmp_path / "whole"
    )
    first, second = ModelCheckpoint(**options), ModelCheckpoint(**options)

    class Stops(Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step == stop:
                trainer.request_checkpoint("cut")
            if trainer.global_step == stop + 1:
                raise KeyboardInterrupt

    cut = trainer(first, Stops(), max_epochs=6, default_root_dir=tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        cut.fit(Scripted(each("m", *VALUES)), [BATCH] * 4, [BATCH])
    after = trainer(second, max_epochs=6, default_root_dir=tmp_path / "cut")
    after.fit(
        Scripted(each("m", *VALUES[stop // 4 :])),
        [BATCH] * 4,
        [BATCH],
        ckpt_path=tmp_path / "cut" / "checkpoints" / f"step-{stop:08d}",
    )
    names = [(step, request.path.name) for step, _, request in reference.asked]
    found = [
        (step, request.path.name)
        for step, _, request in (*cut.asked, *after.asked)
        if request is not None
    ]
    assert found == names
    for attribute in ("best_model_path", "last_model_path"):
        assert os.path.basename(getattr(second, attribute)) == os.path.basename(
            getattr(whole, attribute)
        )
    assert list(map(os.path.basename, second.best_k_models)) == list(
        map(os.path.basename, whole.best_k_models)
    )


def test_the_state_comes_back():
    options = {"monitor": "m", "save_top_k": 2}
    keeper, again = ModelCheckpoint(**options), ModelCheckpoint(**options)
    fit(keeper, epochs=3, val=each("m", 3.0, math.nan, 1.0))
    fit(
        again, epochs=3, val=each("m"), ckpt_path=keeper.last_model_path
    )  # nothing is left to train
    assert again.state_dict() == keeper.state_dict()
    assert again.best_model_path == keeper.best_model_path
    assert torch.equal(again.best_model_score, torch.tensor(1.0, dtype=torch.float64))
    assert again.state_key == keeper.state_key
    assert again.state_key != ModelCheckpoint(monitor="m", mode="max").state_key


def test_deleted_checkpoints_are_forgotten():
    """Going back behind a checkpoint whose successors had already deleted others."""
    options = {"monitor": "m", "save_top_k": 2}
    fit(ModelCheckpoint(**options), epochs=3, val=each("m", 3.0, 2.0, 1.0))
    again = ModelCheckpoint(**options)
    done = fit(
        again, epochs=3, val=each("m", 1.0), ckpt_path="run/checkpoints/step-00000008"
    )
    assert [request.path.name for _, _, request in done.asked] == ["step-00000012"], (
        "the same name again"
    )
    assert done.on_disk == ["step-00000008", "step-00000012"]
    assert (steps_of(again.best_k_models), scores(again)) == ([8, 12], [2.0, 1.0])


def test_a_restart_deletes_checkpoints_that_the_last_save_replaced():
    """As after a kill between the commit of the third checkpoint and the deletion of the first."""
    done = fit(ModelCheckpoint(), epochs=2)
    shutil.copytree("run/checkpoints/step-00000004", "saved")
    fit(ModelCheckpoint(), epochs=3, ckpt_path="last")
    assert done.on_disk == ["step-00000008", "step-00000012"]
    shutil.copytree("saved", "run/checkpoints/step-00000004")
    fit(ModelCheckpoint(), epochs=4, ckpt_path="last")
    assert done.on_disk == ["step-00000012", "step-00000016"]


def test_another_directory(tmp_path):
    old = ModelCheckpoint(tmp_path / "old", monitor="m")
    fit(old, val=each("m", 1.0))
    (tmp_path / "new" / "step-00000008").mkdir(parents=True)
    new = ModelCheckpoint(tmp_path / "new", monitor="m")

    class Looks(Callback):
        def on_train_epoch_end(self, trainer, module):
            self.seen = (new.best_model_path, float(new.best_model_score))

    looks = Looks()
    with pytest.warns(UserWarning, match=r"now writes to .*new, no longer to .*old"):
        fit(
            new, looks, epochs=3, val=each("m", 2.0, 0.5), ckpt_path=old.last_model_path
        )
    assert looks.seen == (old.best_model_path, 1.0), (
        "the best of the whole run, in whichever directory it is"
    )
    assert "step-00000008-v1" in os.listdir(tmp_path / "new"), "that name was in use"
    assert (
        new.best_model_path
        == new.last_model_path
        == str(tmp_path / "new" / "step-00000012")
    )
    assert new.best_model_score == 0.5


def test_run_directories_that_change_with_every_run(tmp_path):
    ckpt_path = None
    for version, value in enumerate([1.0, 3.0, 2.0]):
        keeper = ModelCheckpoint(monitor="m")
        root = tmp_path / f"version_{version}"
        fit(
            keeper,
            epochs=version + 1,
            val=each("m", value),
            default_root_dir=root,
            ckpt_path=ckpt_path,
        )
        ckpt_path = keeper.last_model_path
        assert keeper.best_model_path == str(
            tmp_path / "version_0" / "checkpoints" / "step-00000004"
        )
        assert keeper.best_model_score == 1.0
    shutil.rmtree(tmp_path / "version_0")
    fit(keeper, epochs=3, val=each("m"), default_root_dir=root, ckpt_path=ckpt_path)
    assert keeper.best_model_path == keeper.last_model_path
    assert keeper.best_model_score == 2.0


# -- the rest --------------------------------------------------------------------------------------------------------


def test_names(tmp_path):
    keeper = ModelCheckpoint(
        tmp_path / "here", "{epoch}-{val_loss:.2f}", "val_loss", save_top_k=-1
    )
    fit(keeper, epochs=2, val=each("val_loss", 0.123, 0.456))
    names = [record.path.name for record in checkpoints(tmp_path / "here")]
    assert names == ["epoch=0-val_loss=0.12", "epoch=1-val_loss=0.46"]
    assert keeper.best_model_path == str(tmp_path / "here" / "epoch=0-val_loss=0.12")
    assert keeper.dirpath == str(tmp_path / "here")


def test_reasons():
    keepers = (
        ModelCheckpoint(every_n_train_steps="3ba"),
        ModelCheckpoint(),
        ModelCheckpoint(every_n_epochs=9, save_last=True),
    )
    done = fit(*keepers, epochs=2, max_steps=5)
    assert [(step, reason) for step, reason, _ in done.asked] == [
        (3, "every 3ba"),
        (4, "epoch 0 ended"),
        (5, "epoch 1 ended"),
        (5, "training ended"),
    ]


def test_verbose():
    done = fit(
        ModelCheckpoint(monitor="m", verbose=True), epochs=2, val=each("m", 1.0, 2.0)
    )
    saved, rejected = done.printed
    assert saved.endswith("step-00000004 (epoch 0 ended, m = 1)")
    assert (
        rejected
        == "no checkpoint of step 8: not among the best 1 (epoch 1 ended, m = 2)"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "lowest"}, "mode"),
        ({"save_top_k": -2}, "save_top_k"),
        ({"save_top_k": 2}, "as monitor="),
        ({"every_n_train_steps": 2, "every_n_epochs": 1}, "takes one interval only"),
        (
            {"every_n_train_steps": 2, "train_time_interval": timedelta(1)},
            "takes one interval only",
        ),
        ({"every_n_train_steps": -1}, "zero or more"),
        ({"every_n_epochs": "often"}, "cannot be read"),
        ({"dirpath": "s4://bucket/run"}, "s4:// is an unknown storage protocol"),
        ({"filename": "a/{epoch}"}, "a single directory"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ModelCheckpoint(**options)


def test_a_bad_interval_is_a_duration_error():
    with pytest.raises(DurationError):
        ModelCheckpoint(every_n_train_steps=2.5)


def test_a_second_fit_keeps_its_own_newest(tmp_path):
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = Trainer(
        max_steps=8, callbacks=keeper, default_root_dir=tmp_path / "root", **options
    )
    trainer.fit(TinyModule(), [torch.ones(2, 32)] * 8)
    assert keeper.best_model_path == str(tmp_path / "step-00000008")
    second = TinyModule()
    trainer.fit(second, [torch.ones(2, 32)] * 8)
    steps = [record.step for record in checkpoints(tmp_path)]
    assert steps == [6, 8], "the newest, and the one before it"
    weights = read_checkpoint(keeper.best_model_path)["model"]
    assert all(
        torch.equal(weights[name], value) for name, value in second.state_dict().items()
    )


def test_the_error_for_two_equal_callbacks_names_the_argument_to_change():
    with pytest.raises(
        ConfigurationError,
        match=r"two callbacks have the same state(.|\n)*another monitor=, mode=, filename=",
    ):
        trainer(ModelCheckpoint("a"), ModelCheckpoint("b"))


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("run/checkpoints/last.ckpt", 'pass "last": it is a name in the index'),
        ("elsewhere/best-v1.ckpt", 'pass "best": it is a name in the index'),
        (
            "run/checkpoints/step-00000005",
            "did you mean run/checkpoints/step-00000004?",
        ),
        (
            "step-00000004.ckpt",
            "pass .*/run/checkpoints/step-00000004: a checkpoint is a directory",
        ),
        ("unlike", 'pass "last", or one of: .*/run/checkpoints/step-00000004\n  see: '),
    ],
)
def test_a_missing_path_lists_the_existing_checkpoints(path, fix):
    fit(ModelCheckpoint())
    os.mkdir("unrelated")
    with pytest.raises(
        CheckpointError, match=rf"does not exist\n  found: .*\n  fix:   {fix}"
    ) as error:
        fit(ModelCheckpoint(), epochs=2, ckpt_path=path)
    assert isinstance(error.value, FileNotFoundError)
    assert isinstance(error.value, ValueError)
    assert (
        f"{Path('run/checkpoints').absolute()} has step-00000004" in error.value.found
    )
