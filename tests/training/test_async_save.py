"""Checkpoints are written behind the training thread: what they hold, when they are there, and who waits for them."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint import store
from trainer_kit.checkpoint.background import Background, HostBuffers
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.checkpoint.store import checkpoints, lookup
from trainer_kit.core.errors import CheckpointError, RankError
from trainer_kit.state import saving
from trainer_kit.state.runs import RunFiles
from trainer_kit.testing import run_distributed

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
BATCHES = [torch.ones(2, 8) * i for i in range(1, 9)]


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Storage:
    """Lets files be synced only while it is open, and fail with ``error``."""

    def __init__(self, monkeypatch):
        self.open, self.error, real = threading.Event(), None, os.fsync
        self.threads = set()
        self.open.set()

        def fsync(descriptor):
            self.threads.add(threading.current_thread().name)
            assert self.open.wait(60)
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)


class At(Callback):
    """Calls ``act(trainer)`` after the steps that are named."""

    order = "late"

    def __init__(self, **acts):
        self.acts = {int(name.removeprefix("step")): act for name, act in acts.items()}

    def on_train_step_end(self, trainer, module):
        if trainer.global_step in self.acts:
            self.acts[trainer.global_step](trainer)


def fit(directory, *callbacks, module=None, **options):
    keeper = ModelCheckpoint(
        directory, every_n_train_steps=options.pop("every", 2), save_top_k=-1
    )
    options = {"max_epochs": 1, **QUIET, **options}
    trainer = Trainer(callbacks=[keeper, *callbacks], **options)
    trainer.fit(module or Net(), BATCHES)
    return trainer


@pytest.fixture
def storage(monkeypatch):
    made = Storage(monkeypatch)
    yield made
    made.open.set()


def test_training_continues_while_a_checkpoint_is_written(tmp_path, storage):
    seen = {}

    def look(trainer):
        seen[trainer.global_step] = [record.step for record in checkpoints(tmp_path)]
        storage.open.set()

    fit(tmp_path, At(step1=lambda trainer: storage.open.clear(), step3=look), every=2)
    assert seen == {3: []}, (
        "a step was trained although the checkpoint of the one before is not there yet"
    )
    assert [record.step for record in checkpoints(tmp_path)] == [2, 4, 6, 8]
    assert "checkpoint" in storage.threads


def test_without_it_training_waits(tmp_path, storage):
    seen = {}

    def look(trainer):
        seen[trainer.global_step] = [record.step for record in checkpoints(tmp_path)]

    fit(tmp_path, At(step3=look, step5=look), async_save=False)
    assert seen == {3: [2], 5: [2, 4]}


@pytest.mark.parametrize("behind", [True, False])
def test_it_holds_the_step_that_it_was_asked_for(tmp_path, storage, behind):
    """Optimizers change weights in place, and on a CPU a state aliases them."""
    after = {}

    class Remembers(Callback):
        def on_train_step_end(self, trainer, module):
            optimizer = trainer.optimizers[0].state[module.layer.weight]
            after[trainer.global_step] = (
                module.layer.weight.detach().clone(),
                optimizer["exp_avg"].clone(),
            )

    slow = At(
        step1=lambda trainer: storage.open.clear(),
        step3=lambda trainer: storage.open.set(),
    )
    fit(tmp_path, Remembers(), *([slow] if behind else []), async_save=behind)
    for record in checkpoints(tmp_path):
        state = read_checkpoint(record)
        weight, average = after[record.step]
        assert torch.equal(state["model"]["layer.weight"], weight)
        assert torch.equal(
            state["optimizer_states"][0]["state"]["layer.weight"]["exp_avg"], average
        )
        assert state["progress"]["step"] == record.step


def test_a_save_that_is_due_waits_for_the_one_under_way(tmp_path, storage):
    order = []

    def opens(trainer):
        threading.Timer(0.3, lambda: (order.append("open"), storage.open.set())).start()

    fit(
        tmp_path,
        At(
            step1=lambda trainer: storage.open.clear(),
            step4=opens,
            step5=lambda trainer: order.append("step 5"),
        ),
    )
    assert order == ["open", "step 5"]
    assert [record.step for record in checkpoints(tmp_path)] == [2, 4, 6, 8]


def test_a_failed_save_is_reported_at_the_next_step(tmp_path, storage, capsys):
    def fails(trainer):
        storage.error = errno.EIO

    def works(trainer):
        trainer.run.saver.save.writing.wait()
        storage.error = None

    said = {}

    def listen(trainer):
        said[trainer.global_step] = capsys.readouterr().out

    fit(tmp_path, At(step1=fails, step3=works, step4=listen))
    assert "save of step 2 failed: " in said[4]
    assert "Input/output error" in said[4]
    assert "training continues, next try at step" in said[4]
    assert [record.step for record in checkpoints(tmp_path)] == [4, 6, 8]


def test_the_end_of_training_waits(tmp_path, storage):
    found = {}

    class Ends(Callback):
        def on_train_end(self, trainer, module):
            found.update(
                {
                    record.step: verify_checkpoint(record)
                    for record in checkpoints(tmp_path)
                }
            )

    def opens(trainer):
        threading.Timer(0.3, storage.open.set).start()

    fit(tmp_path, At(step7=lambda trainer: storage.open.clear(), step8=opens), Ends())
    assert sorted(found) == [2, 4, 6, 8]


def test_an_exception_does_not_cost_the_save_under_way(tmp_path, storage):
    timer = threading.Timer(0.3, storage.open.set)

    def raises(trainer):
        timer.start()
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        fit(tmp_path, At(step1=lambda trainer: storage.open.clear(), step3=raises))
    assert [record.step for record in checkpoints(tmp_path)] == [2]
    timer.join()
    assert not [
        thread for thread in threading.enumerate() if thread.name == "checkpoint"
    ]


def test_a_checkpoint_saved_by_hand_is_durable_at_once(tmp_path, storage):
    def saves(trainer):
        trainer.save_checkpoint(tmp_path / "mine")
        assert verify_checkpoint(tmp_path / "mine")
        assert lookup(tmp_path, "last").name == "step-00000002", (
            "what was under way is there too"
        )

    fit(tmp_path, At(step3=saves))


def test_a_long_wait_and_a_slow_storage_are_reported(
    tmp_path, storage, capsys, monkeypatch
):
    monkeypatch.setattr(saving, "_SLOW", 0.05)
    monkeypatch.setattr(saving, "_PATIENCE", 0.3)

    def opens(trainer):
        time.sleep(0.2)
        monkeypatch.setattr(
            saving, "_SLOW", 60.0
        )  # the saves after this one are not slow
        threading.Timer(0.6, storage.open.set).start()

    fit(tmp_path, At(step1=lambda trainer: storage.open.clear(), step4=opens))
    said = capsys.readouterr().out
    assert (
        f"save of step 2 has taken 0 s ({tmp_path}/step-00000002); training continues"
        in said
    )
    assert "waiting for the save of step 2" in said
    assert "step 4" not in said


def test_a_slow_storage_that_training_waits_for_is_reported(
    tmp_path, storage, capsys, monkeypatch
):
    monkeypatch.setattr(saving, "_SLOW", 0.3)
    monkeypatch.setattr(saving, "_PATIENCE", 0.05)

    def opens(trainer):
        storage.open.clear()
        threading.Timer(0.6, storage.open.set).start()

    fit(tmp_path, At(step8=opens), every=8)
    assert (
        f"save of step 8 has taken 0 s ({tmp_path}/step-00000008); training waits for it"
        in capsys.readouterr().out
    )


def test_the_memory_of_a_save_serves_the_next_one(tmp_path):
    held = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step in (4, 6):
                copies = trainer.run.saver.buffers[False]._previous
                held.append(
                    {
                        name: copy.data_ptr()
                        for name, copy in copies.items()
                        if copy.numel()
                    }
                )

    fit(tmp_path, Looks())
    assert held[0] == held[1]
    assert any(name.startswith("model.") for name in held[0])
    assert any(name.startswith("optimizer_states.") for name in held[0])


def test_buffers_follow_shapes_and_drop_removed_values():
    buffers = HostBuffers()
    first = buffers.copy("a", torch.ones(2))
    buffers.copy("b", torch.ones(2))
    buffers.end()
    assert buffers.copy("a", torch.ones(3)) is not first
    buffers.end()
    assert set(buffers._previous) == {"a"}
    assert buffers.copy("a", torch.ones(3, 2).T[0]).is_contiguous()


def test_every_accelerator_that_was_copied_from_is_waited_for(monkeypatch):
    class Buffer:
        def copy_(self, tensor, non_blocking):
            assert non_blocking
            return self

    waited = []
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory, **options: Buffer())
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    buffers = HostBuffers()
    for number in (1, 0, 1):
        there = SimpleNamespace(
            device=torch.device("cuda", number), shape=(), dtype=torch.float32
        )
        buffers.copy(f"w{len(buffers._current)}", there)
    buffers.end()
    buffers.end()
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


def test_waiting_for_a_save_raises_the_error_of_its_thread():
    def fails():
        raise KeyError("inside")

    told = []
    background = Background(fails, done=lambda: told.append(True))
    with pytest.raises(KeyError, match="inside"):
        background.result()
    assert told == [True]


@pytest.mark.parametrize("when", ["in a step", "while it waits for the storage"])
def test_a_second_signal_waits_for_no_storage(tmp_path, monkeypatch, capsys, when):
    stalled, real = threading.Event(), os.fsync

    def fsync(descriptor):
        if threading.current_thread().name == "checkpoint":
            assert stalled.wait(60)
        real(descriptor)

    def ask(trainer):
        signal.raise_signal(signal.SIGTERM)
        if when == "in a step":
            signal.raise_signal(signal.SIGTERM)
        else:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, At(step4=ask), every=2)
    assert caught.value.code == 143
    [writing] = [
        thread for thread in threading.enumerate() if thread.name == "checkpoint"
    ]
    assert writing.daemon, "a process does not wait for it either"
    assert checkpoints(tmp_path) == []
    stalled.set()
    writing.join()
    assert not (tmp_path / "index.json").exists(), (
        "nobody was told of it, so nothing gives way to it"
    )
    assert "saved step" not in capsys.readouterr().out


def test_a_save_has_ended_when_it_wakes_a_waiting_thread():
    looked = threading.Event()
    background = Background(lambda: 3, done=looked.wait)
    assert background.wait(10)
    looked.set()
    assert background.result() == 3


def test_a_refused_save_is_raised_once_and_the_rescue_is_written(tmp_path):
    """Of two that failed at one step: what no disk would hold ends the run, what its storage could not does not."""

    class Request:
        reason, weights_only = "test", False

        def __init__(self, path):
            self.path = path

        def saved(self, path):
            raise AssertionError(f"{path} is not there")

    def ask(trainer):
        (tmp_path / "file").write_text("")
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "notes.txt").write_text("")
        for name in ("file/below", "theirs"):
            trainer.request_checkpoint("test", Request(tmp_path / name))

    keeper = ModelCheckpoint(
        tmp_path / "kept", every_n_train_steps=100, save_on_exception=True
    )
    trainer = Trainer(max_epochs=1, callbacks=[keeper, At(step2=ask)], **QUIET)
    with pytest.raises(
        CheckpointError, match="theirs: not a checkpoint of this library"
    ) as caught:
        trainer.fit(Net(), BATCHES)
    assert getattr(caught.value, "__notes__", []) == []
    [rescued] = checkpoints(tmp_path / "kept")
    assert rescued.step == trainer.global_step > 2


def test_an_error_on_rank_0_is_raised_on_every_rank(tmp_path):
    run_distributed(fit_with_failures, 2, str(tmp_path), timeout=60)


def fit_with_failures(directory):
    def failing(error):
        def fails(*given, **options):
            raise error

        return fails

    memory, thread = (
        MemoryError("no host memory"),
        RuntimeError("can't start new thread"),
    )
    for place, name, error, elsewhere in (
        (
            saving,
            "take_snapshot",
            memory,
            RankError("rank 0: MemoryError: no host memory"),
        ),
        (
            saving,
            "Background",
            thread,
            RankError("rank 0: RuntimeError: can't start new thread"),
        ),
        (
            RunFiles,
            "choose_run",
            ValueError("of a logger"),
            RankError("rank 0: ValueError: of a logger"),
        ),
        (
            store,
            "entries",
            CheckpointError("there", None, "gone"),
            CheckpointError("there", None, "gone"),
        ),
    ):
        expected = error if os.environ["RANK"] == "0" else elsewhere
        with pytest.MonkeyPatch.context() as patch:
            if os.environ["RANK"] == "0":
                patch.setattr(place, name, failing(error))
            with pytest.raises(
                type(expected), match=re.escape(str(expected).splitlines()[0])
            ):
                fit(Path(directory) / name, strategy="ddp", devices=2)
    assert threading.active_count() == 1, (
        "nor is a slow save told of one that never began"
    )


@pytest.mark.world_size(2)
def test_every_rank_is_notified_at_the_same_step(tmp_path):
    told = []

    class Request:
        reason, weights_only = "test", False

        def __init__(self, path):
            self.path = path

        def saved(self, path):
            told.append((trainer.global_step, path.name))

    class Asks(Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step % 3 == 0:
                trainer.request_checkpoint(
                    "test", Request(tmp_path / str(trainer.global_step))
                )

    trainer = Trainer(
        max_epochs=1,
        callbacks=[Asks()],
        strategy="ddp",
        devices=2,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(Net(), BATCHES * 4)
    everyone = trainer.strategy.world.all_gather_object(told)
    assert everyone[0] == everyone[1]
    assert [name for _, name in told] == ["3", "6", "9", "12", "15"]
    for name in ("3", "6", "9", "12", "15"):
        verify_checkpoint(tmp_path / name)
