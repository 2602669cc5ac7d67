import math
import shutil
from datetime import timedelta

import pytest
import torch

from trainer_kit import Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.checkpoint.store import checkpoints, lookup
from trainer_kit.core.errors import ConfigurationError, DurationError, NonFiniteError
from trainer_kit.core.progress import Progress
from trainer_kit.testing import TinyModule


def on_disk(trainer):
    return [record.path.name for record in checkpoints(trainer.run_dir / "checkpoints")]


def asked_at(trainer):
    return [step for step, _, _ in trainer.requests]


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
def test_without_validation(make_trainer, options, steps):
    """Ten steps of two batches, ten samples and a hundred tokens each, in two epochs."""
    trainer = make_trainer(ModelCheckpoint(**options), batches=10).begin()
    for _ in range(2):
        for _ in range(5):
            trainer.step(batches=2, samples=10, tokens=100)
        trainer.end_epoch()
    trainer.call("on_train_end")
    assert asked_at(trainer) == steps


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
@pytest.mark.parametrize("length", [4, math.inf])
def test_with_two_validations_an_epoch(make_trainer, options, steps, length):
    trainer = make_trainer(ModelCheckpoint(**options), batches=length, val_batches=[1]).begin()
    for _ in range(2):
        for _ in range(2):
            trainer.step()
            trainer.step()
            trainer.validate(val_loss=1.0)
        trainer.end_epoch()
    assert asked_at(trainer) == steps


def test_time_is_measured_from_the_last_one(make_trainer, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("trainer_kit.callbacks.model_checkpoint.monotonic", lambda: now[0])
    trainer = make_trainer(ModelCheckpoint(train_time_interval="1min"), batches=100).begin()
    for _ in range(10):
        now[0] += 25
        trainer.step()
    assert asked_at(trainer) == [3, 6, 9]


def test_ranks_agree_about_time_at_steps_that_all_of_them_know(make_trainer, monkeypatch):
    monkeypatch.setattr("trainer_kit.callbacks.model_checkpoint.monotonic", lambda: 0.0)
    trainer = make_trainer(
        ModelCheckpoint(train_time_interval=60), batches=100, world_size=2, rank=1, log_every_n_steps=4
    ).begin()
    trainer.strategy.world.rows = [[1.0], [0.0]]  # rank 0's clock is ahead of this one's
    trainer.strategy.world.broadcast = lambda value: "named-by-rank-0"
    for _ in range(9):
        trainer.step()
    assert asked_at(trainer) == [4, 8]
    assert trainer.requests[0][2].path.name == "named-by-rank-0"


def test_one_checkpoint_for_a_step(make_trainer):
    trainer = make_trainer(ModelCheckpoint(every_n_train_steps=4, save_last=True), val_batches=[1]).begin()
    trainer.epoch(val={"val_loss": 1.0})
    trainer.call("on_train_end")
    assert asked_at(trainer) == [4]


def test_nothing_in_sanity_check_validate_or_fast_run(make_trainer):
    trainer = make_trainer(ModelCheckpoint(save_last=True, save_on_exception=True), val_batches=[1]).begin()
    trainer.sanity_checking = True
    trainer.validate(loss=1.0)
    trainer.call("on_exception", ValueError())
    trainer.sanity_checking = False
    trainer.begin(stage="validate")
    trainer.validate(loss=1.0)
    trainer.fast_dev_run = True
    trainer.begin()
    trainer.epoch(val={"loss": 1.0})
    trainer.call("on_train_end")
    assert trainer.requests == []


def test_no_step_no_checkpoint(make_trainer):
    trainer = make_trainer(ModelCheckpoint(save_last=True), val_batches=[1]).begin()
    trainer.validate(loss=1.0)
    trainer.call("on_train_end")
    assert trainer.requests == []


def test_at_an_exception(make_trainer):
    trainer = make_trainer(ModelCheckpoint(save_on_exception=True, monitor="loss"), world_size=2, batches=9).begin()
    trainer.step()
    trainer.strategy.world.heard.clear()
    trainer.call("on_exception", NonFiniteError("loss is NaN"))
    assert trainer.requests == []
    trainer.call("on_exception", ValueError("broken"))
    assert [(step, reason) for step, reason, _ in trainer.requests] == [(1, "ValueError: broken")]
    assert trainer.strategy.world.heard == [], "other ranks may be gone"
    quiet = make_trainer(ModelCheckpoint()).begin()
    quiet.step()
    quiet.call("on_exception", ValueError())
    assert quiet.requests == []


# -- the value -------------------------------------------------------------------------------------------------------


def test_a_step_with_a_validation_is_judged_by_it(make_trainer):
    """Due at the end of an epoch's last step: the value of that step counts, not of the validation before."""
    best = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(best, val_batches=[1]).begin()
    for value in (3.0, 2.0):
        trainer.epoch(val={"val_loss": value})
    assert [float(score) for score in best.best_k_models.values()] == [3.0, 2.0]


def test_a_validation_in_the_epoch_is_waited_for_where_the_trainer_says_so(make_trainer):
    best = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(best, batches=100, val_batches=[1], validation_due=True).begin()
    for value in (3.0, 2.0):
        trainer.step()
        trainer.step()
        assert len(trainer.requests) == len(best.best_k_models)
        trainer.validate(val_loss=value)
    assert [float(score) for score in best.best_k_models.values()] == [3.0, 2.0]
    assert asked_at(trainer) == [2, 4]


def test_a_value_that_is_not_there_yet_is_waited_for(make_trainer):
    best = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(best, batches=100, val_batches=[1]).begin()
    for _ in range(5):
        trainer.step()
    assert trainer.requests == []
    trainer.validate(val_loss=1.0)
    assert asked_at(trainer) == [5]
    trainer.step()
    assert asked_at(trainer) == [5, 6]


@pytest.mark.parametrize("length", [4, math.inf])
def test_values_of_the_training_epoch(make_trainer, length):
    best = ModelCheckpoint(monitor="train_loss", save_top_k=-1, filename="{train_loss:.1f}")
    trainer = make_trainer(best, batches=length, val_batches=[1]).begin()
    for value in (3.0, 2.0):
        trainer.epoch(val={"val_loss": 0.0}, train_loss=value)
    assert trainer.save() == ["train_loss=3.0", "train_loss=2.0"]
    assert float(best.best_model_score) == 2.0


def test_by_epochs_with_a_validation_every_second_one(make_trainer):
    best = ModelCheckpoint(monitor="val_loss", every_n_epochs=1, save_top_k=-1)
    trainer = make_trainer(best, val_batches=[1]).begin()
    for epoch in range(4):
        trainer.epoch(val={"val_loss": float(epoch)} if epoch % 2 else None)
    assert asked_at(trainer) == [8, 16]
    assert [float(score) for score in best.best_k_models.values()] == [1.0, 3.0]


@pytest.mark.parametrize("options", [{}, {"save_on_train_epoch_end": False}, {"every_n_epochs": 1}])
def test_a_value_that_nobody_logged(make_trainer, options):
    trainer = make_trainer(ModelCheckpoint(monitor="val_los", **options), val_batches=[1]).begin()
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint watches 'val_los'(.|\n)*did you mean 'val_loss'"):
        trainer.epoch(val={"val_loss": 1.0})


def test_a_run_never_ends_without_the_checkpoint_that_was_due(make_trainer):
    trainer = make_trainer(ModelCheckpoint(monitor="x", every_n_train_steps=2), batches=9, val_batches=[1]).begin()
    for _ in range(3):
        trainer.step()
    trainer.call("on_train_end")
    assert [(step, reason) for step, reason, _ in trainer.requests] == [(3, "training ended")]


def test_nan_is_the_worst(make_trainer):
    for mode, values in (("min", [2.0, math.nan, 1.0]), ("max", [1.0, math.nan, 2.0])):
        best = ModelCheckpoint(monitor="m", mode=mode, save_top_k=2, dirpath=f"nowhere/{mode}")
        trainer = make_trainer(best, val_batches=[1]).begin()
        trainer.epoch(val={"m": values[0]})
        trainer.epoch(val={"m": values[1]})
        assert math.isinf(best.kth_value)
        assert best.kth_best_model_path.endswith("step-00000008")
        assert math.isinf(best.current_score)
        trainer.epoch(val={"m": values[2]})
        assert [float(score) for score in best.best_k_models.values()] == [values[0], values[2]]


def test_rank_0_judges_and_names_for_all(make_trainer):
    best = ModelCheckpoint(monitor="loss", filename="{loss:.1f}")
    trainer = make_trainer(best, world_size=2, rank=1).begin()
    trainer.strategy.world.broadcast = lambda value: 0.25 if isinstance(value, float) else "loss=0.2"
    trainer.epoch(loss=9.0)
    assert float(best.best_model_score) == 0.25
    assert trainer.requests[0][2].path.name == "loss=0.2"


# -- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({"monitor": "m"}, ["step-00000004", "step-00000012"], 12),
        ({"monitor": "m", "mode": "max"}, ["step-00000004", "step-00000008"], 8),
        ({"monitor": "m", "save_top_k": 2}, ["step-00000012", "step-00000016"], 12),
        ({"monitor": "m", "save_top_k": 2, "save_last": True}, ["step-00000012", "step-00000016", "step-00000020"], 12),
        ({"monitor": "m", "save_last": "link"}, ["step-00000012", "step-00000020"], 12),
        ({"monitor": "m", "save_top_k": 0, "save_last": True}, ["step-00000016", "step-00000020"], None),
        ({}, ["step-00000016", "step-00000020"], 20),
        ({"save_top_k": -1}, [f"step-000000{step:02d}" for step in (4, 8, 12, 16, 20)], 20),
        ({"save_top_k": 0}, [], None),
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_retention_on_disk(make_trainer, options, kept, best, prompt):
    callback = ModelCheckpoint(**options)
    trainer = make_trainer(callback, val_batches=[1]).begin()
    for index, value in enumerate((3.0, 5.0, 1.0, 2.0, 4.0)):
        trainer.epoch(val={"m": value})
        if prompt or index % 2:
            trainer.save()
    trainer.save()
    assert on_disk(trainer) == kept
    expected = "" if best is None else str(trainer.run_dir / "checkpoints" / f"step-{best:08d}")
    assert callback.best_model_path == expected
    directory = trainer.run_dir / "checkpoints"
    if "monitor" in options:
        assert len(callback.best_k_models) == options.get("save_top_k", 1), "the spare is none of the best"
    if kept:
        assert str(lookup(directory, "last")) == callback.last_model_path
        assert read_checkpoint(callback.last_model_path)["progress"]["step"] == int(callback.last_model_path[-8:])
    if best is not None and "monitor" in options:
        assert str(lookup(directory, "best")) == expected
        assert float(callback.best_model_score) == (5.0 if options.get("mode") else 1.0)
        assert len(callback.best_k_models) == options.get("save_top_k", 1)


def test_nothing_is_deleted_before_its_successor_is_durable(make_trainer):
    trainer = make_trainer(ModelCheckpoint(every_n_train_steps=1), batches=9).begin()
    trainer.step()
    trainer.save()
    trainer.step()
    assert on_disk(trainer) == ["step-00000001"]
    trainer.save(write=False)  # this save fails
    assert on_disk(trainer) == ["step-00000001"]
    trainer.step()
    trainer.save()
    assert on_disk(trainer) == ["step-00000001", "step-00000003"]
    trainer.step()
    trainer.save()
    assert on_disk(trainer) == ["step-00000003", "step-00000004"]


def test_a_deletion_that_fails_does_not_end_the_run(make_trainer):
    callback = ModelCheckpoint(every_n_train_steps=1)
    trainer = make_trainer(callback, batches=9).begin()
    trainer.step()
    trainer.save()
    directory = trainer.run_dir / "checkpoints" / "step-00000001"
    (directory / "manifest.json").unlink()
    (directory / "notes.txt").write_text("mine")
    trainer.step()
    trainer.save()
    trainer.step()
    with pytest.warns(UserWarning, match="after saving .*step-00000003.*not a checkpoint of this library"):
        trainer.save()
    assert (directory / "notes.txt").read_text() == "mine"


def test_only_rank_0_touches_the_disk(make_trainer):
    trainer = make_trainer(ModelCheckpoint(every_n_train_steps=1), batches=9, world_size=2, rank=1).begin()
    directory = trainer.run_dir / "checkpoints"
    trainer.strategy.world.broadcast = lambda value: str(directory / f"step-{trainer.global_step:08d}")
    for _ in range(3):
        trainer.step()
        trainer.save()
    assert on_disk(trainer) == ["step-00000001", "step-00000002", "step-00000003"]


def test_what_was_there_before_is_neither_overwritten_nor_deleted(make_trainer, tmp_path):
    directory = tmp_path / "mine"
    for step in (4, 8):
        write_checkpoint(directory / f"step-{step:08d}", {"old": {"step": step}})
    callback = ModelCheckpoint(directory)
    trainer = make_trainer(callback).begin()
    for _ in range(3):
        trainer.epoch()
        trainer.save()
    assert {path.name for path in directory.iterdir()} == {
        "index.json",
        "step-00000004",
        "step-00000008",
        "step-00000008-v1",
        "step-00000012",
    }
    assert read_checkpoint(directory / "step-00000004") == {"old": {"step": 4}}


def test_one_name_for_all(make_trainer):
    """A template without fields: names rotate, so that no checkpoint is replaced in place."""
    callback = ModelCheckpoint(filename="best")
    trainer = make_trainer(callback).begin()
    names = []
    for _ in range(5):
        trainer.epoch()
        names += trainer.save()
        assert on_disk(trainer) == names[-2:]
    assert names == ["best", "best-v1", "best-v2", "best-v3", "best"]


def test_without_the_version_counter_it_is_replaced(make_trainer):
    callback = ModelCheckpoint(filename="best", enable_version_counter=False)
    trainer = make_trainer(callback).begin()
    for step in (4, 8, 12):
        trainer.epoch()
        assert trainer.save() == ["best"]
        assert read_checkpoint(callback.best_model_path)["progress"]["step"] == step


def test_two_callbacks_share_a_directory(make_trainer):
    best, every = ModelCheckpoint(monitor="m"), ModelCheckpoint(every_n_epochs=2, save_top_k=-1)
    trainer = make_trainer(best, every, val_batches=[1]).begin()
    for value in (5.0, 4.0, 3.0, 4.0):
        trainer.epoch(val={"m": value})
        trainer.save()
    assert on_disk(trainer) == ["step-00000008", "step-00000012", "step-00000016"]
    assert best.best_model_path.endswith("step-00000012")


def test_two_callbacks_of_which_one_saves_weights_alone_do_not_share(make_trainer):
    full, weights = ModelCheckpoint(), ModelCheckpoint(save_weights_only=True, every_n_epochs=1)
    trainer = make_trainer(full, weights).begin()
    trainer.epoch()
    assert [request.weights_only for _, _, request in trainer.requests] == [False, True]
    assert trainer.save() == ["step-00000004", "step-00000004-v1"]


# -- state -----------------------------------------------------------------------------------------------------------


def restart(make_trainer, state, progress, *, options, **fake):
    callback = ModelCheckpoint(**options)
    trainer = make_trainer(callback, **fake)
    trainer.progress.load_state_dict(progress)
    return callback, trainer.begin([state])


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "m", "save_top_k": 2},
        {"monitor": "m", "save_last": True},
        {"every_n_train_steps": 3, "monitor": "m"},
        {"every_n_train_steps": "7ba", "save_top_k": -1},
        {"every_n_epochs": 2},
        {"filename": "best"},
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_resumed_run_asks_for_the_same_checkpoints(make_trainer, tmp_path, options, prompt):
    values = [3.0, 5.0, 1.0, 2.0, 4.0, 0.5]
    whole = ModelCheckpoint(**options)
    reference = make_trainer(whole, val_batches=[1]).begin()
    callback = ModelCheckpoint(**options)
    trainer = make_trainer(callback, val_batches=[1]).begin()
    asked, names = [], []
    for index, value in enumerate(values):
        reference.epoch(val={"m": value})
        trainer.epoch(val={"m": value})
        names += [request.path.name for _, _, request in reference.requests]
        reference.save(write=False)
        state = callback.state_dict()
        if prompt or index == 3:
            asked += trainer.save()
        else:
            asked += [request.path.name for _, _, request in trainer.requests]
        assert state == callback.state_dict(), "it does not depend on when a save is done"
        if index == 3:
            callback, trainer = restart(
                make_trainer, state, reference.progress.state_dict(), options=options, val_batches=[1]
            )
    assert callback.last_model_path == whole.last_model_path
    assert callback.best_model_path == whole.best_model_path
    if prompt:
        assert asked == names


def test_the_state_is_plain_and_comes_back(make_trainer):
    options = {"monitor": "m", "save_top_k": 2}
    callback = ModelCheckpoint(**options)
    trainer = make_trainer(callback, val_batches=[1]).begin()
    for value in (3.0, math.nan, 1.0):
        trainer.epoch(val={"m": value})
        trainer.save()
    again, _ = restart(
        make_trainer, callback.state_dict(), trainer.progress.state_dict(), options=options, val_batches=[1]
    )
    assert again.state_dict() == callback.state_dict()
    assert again.best_model_path == callback.best_model_path
    assert torch.equal(again.best_model_score, torch.tensor(1.0, dtype=torch.float64))
    assert again.state_key == callback.state_key
    assert again.state_key != ModelCheckpoint(monitor="m", mode="max").state_key


def test_what_was_deleted_since_is_forgotten(make_trainer):
    """Going back behind a checkpoint whose successors had already deleted others."""
    options = {"monitor": "m", "save_top_k": 2}
    callback = ModelCheckpoint(**options)
    trainer = make_trainer(callback, val_batches=[1]).begin()
    for value in (3.0, 2.0):
        trainer.epoch(val={"m": value})
        trainer.save()
    state, progress = callback.state_dict(), trainer.progress.state_dict()
    trainer.epoch(val={"m": 1.0})
    trainer.save()
    assert on_disk(trainer) == ["step-00000008", "step-00000012"]
    again, resumed = restart(make_trainer, state, progress, options=options, val_batches=[1])
    assert [path[-8:] for path in again.best_k_models] == ["00000008"]
    resumed.epoch(val={"m": 1.0})
    assert resumed.save() == ["step-00000012"], "the same name again, although it is there"
    assert on_disk(resumed) == ["step-00000008", "step-00000012"]


def test_what_gave_way_at_the_last_checkpoint_is_deleted_after_a_restart(make_trainer):
    callback = ModelCheckpoint()
    trainer = make_trainer(callback).begin()
    for _ in range(2):
        trainer.epoch()
        trainer.save()
    trainer.epoch()
    state = callback.state_dict()
    ((_, _, request),) = trainer.requests
    write_checkpoint(request.path, {}, info={"step": 12})  # and killed before anything was deleted
    assert on_disk(trainer) == ["step-00000004", "step-00000008", "step-00000012"]
    _, resumed = restart(make_trainer, state, trainer.progress.state_dict(), options={})
    resumed.epoch()
    resumed.save()
    assert on_disk(resumed) == ["step-00000012", "step-00000016"]


def test_another_directory(make_trainer, tmp_path):
    old = ModelCheckpoint(tmp_path / "old", monitor="m")
    trainer = make_trainer(old, val_batches=[1]).begin()
    trainer.epoch(val={"m": 1.0})
    trainer.save()
    (tmp_path / "new" / "step-00000008").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"now writes to .*new, no longer to .*old"):
        new, resumed = restart(
            make_trainer,
            old.state_dict(),
            trainer.progress.state_dict(),
            options={"dirpath": tmp_path / "new", "monitor": "m"},
            val_batches=[1],
        )
    assert new.best_model_path == old.best_model_path
    assert new.best_model_score == 1.0
    resumed.epoch(val={"m": 2.0})
    assert new.last_model_path == str(tmp_path / "new" / "step-00000008-v1")  # that name was in use
    assert new.best_model_path == old.best_model_path  # of the whole run, whoever cut it
    resumed.epoch(val={"m": 0.5})
    assert new.best_model_path == new.last_model_path
    assert new.best_model_score == 0.5


def test_run_directories_that_change_with_every_sitting(tmp_path, make_trainer):
    states, progress = None, Progress()
    for version, value in enumerate([1.0, 3.0, 2.0]):
        callback = ModelCheckpoint(monitor="m")
        trainer = make_trainer(callback, val_batches=[1], run_dir=tmp_path / f"version_{version}", progress=progress)
        trainer.begin(states).epoch(val={"m": value})
        trainer.save()
        states, progress = [callback.state_dict()], trainer.progress
        assert callback.best_model_path == str(tmp_path / "version_0" / "checkpoints" / "step-00000004")
        assert callback.best_model_score == 1.0
    shutil.rmtree(tmp_path / "version_0")
    trainer.begin(states)
    assert callback.best_model_path == callback.last_model_path
    assert callback.best_model_score == 2.0


def test_a_second_fit_starts_anew(make_trainer):
    callback = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer(callback, batches=5).begin()
    trainer.epoch()
    trainer.save()
    trainer.progress.load_state_dict({"step": 0, "epoch": 0, "batch": 0})
    trainer.begin()
    trainer.epoch()
    assert asked_at(trainer) == [3]
    assert trainer.save() == ["step-00000003-v1"]


# -- the rest --------------------------------------------------------------------------------------------------------


def test_names(make_trainer, tmp_path):
    callback = ModelCheckpoint(tmp_path / "here", "{epoch}-{val_loss:.2f}", "val_loss", save_top_k=-1)
    trainer = make_trainer(callback, val_batches=[1]).begin()
    for value in (0.123, 0.456):
        trainer.epoch(val={"val_loss": value})
    assert trainer.save() == ["epoch=0-val_loss=0.12", "epoch=1-val_loss=0.46"]
    assert callback.best_model_path == str(tmp_path / "here" / "epoch=0-val_loss=0.12")
    assert callback.dirpath == str(tmp_path / "here")


def test_reasons(make_trainer):
    trainer = make_trainer(
        ModelCheckpoint(every_n_train_steps="3ba"), ModelCheckpoint(), ModelCheckpoint(save_last=True)
    )
    trainer.begin()
    trainer.epoch()
    trainer.step()
    trainer.call("on_train_end")
    assert [(step, reason) for step, reason, _ in trainer.requests] == [
        (3, "every 3ba"),
        (4, "epoch 0 ended"),
        (4, "epoch 0 ended"),
        (5, "training ended"),
    ]


def test_verbose(make_trainer):
    trainer = make_trainer(ModelCheckpoint(monitor="m", verbose=True), val_batches=[1]).begin()
    trainer.epoch(val={"m": 1.0})
    trainer.epoch(val={"m": 2.0})
    saved, rejected = trainer.printed
    assert saved.endswith("step-00000004 (epoch 0 ended, m = 1)")
    assert rejected == "no checkpoint of step 8: not among the best 1 (epoch 1 ended, m = 2)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "lowest"}, "mode"),
        ({"save_top_k": -2}, "save_top_k"),
        ({"save_top_k": 2}, "give monitor="),
        ({"every_n_train_steps": 2, "every_n_epochs": 1}, "only one interval"),
        ({"every_n_train_steps": 2, "train_time_interval": timedelta(1)}, "only one interval"),
        ({"every_n_train_steps": -1}, "zero or more"),
        ({"every_n_epochs": "often"}, "cannot be read"),
        ({"dirpath": "s4://bucket/run"}, "no storage is reached by s4://"),
        ({"filename": "a/{epoch}"}, "one directory"),
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
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(max_steps=8, callbacks=keeper, default_root_dir=tmp_path / "root", **options)
    trainer.fit(TinyModule(), [torch.ones(2, 32)] * 8)
    assert keeper.best_model_path == str(tmp_path / "step-00000008")
    second = TinyModule()
    trainer.fit(second, [torch.ones(2, 32)] * 8)
    steps = [record.step for record in checkpoints(tmp_path)]
    assert steps == [6, 8], "the newest, and the one before it"
    weights = read_checkpoint(keeper.best_model_path)["model"]
    assert all(torch.equal(weights[name], value) for name, value in second.state_dict().items())
