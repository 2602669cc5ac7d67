"""Which run is it: records, keys, and what `resume="auto"` takes up."""

from __future__ import annotations

import json
import os
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import trainer_kit as tk
from trainer_kit.callbacks import EarlyStopping, ModelCheckpoint
from trainer_kit.checkpoint.read import read_info
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.loggers import CSVLogger, JSONLLogger
from trainer_kit.state import runs
from trainer_kit.state.records import read_records
from trainer_kit.testing import TinyModule

BATCHES = [torch.full((2, 32), value) for value in (0.1, 0.2, 0.3, 0.4)]
QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
}


class Breaks(tk.Callback):
    """Fails before step ``at`` is trained."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.at:
            raise RuntimeError("broken")


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Each call is a start of the same script; its fits are counted from 0."""

    def start(arguments=(), environ=None):
        execution = runs._Execution()
        execution.note = lambda record: execution.records.update({record.id: record})
        execution.pid = os.getpid()
        monkeypatch.setattr(runs, "_EXECUTION", execution)
        monkeypatch.setattr(runs, "script", lambda: str(tmp_path / "train.py"))
        monkeypatch.setattr(runs, "arguments", lambda: list(arguments))
        monkeypatch.setattr(runs, "launches", lambda: dict(environ or {}))
        return execution

    return start


def fit(broken=None, resume="auto", logger="csv", epochs=2, ckpt_path=None, **options):
    callbacks = [ModelCheckpoint(every_n_train_steps=3), *options.pop("callbacks", [])]
    if broken is not None:
        callbacks.append(Breaks(broken))
    trainer = tk.Trainer(
        max_epochs=epochs,
        resume=resume,
        logger=logger,
        callbacks=callbacks,
        log_every_n_steps=1,
        **{**QUIET, **options},
    )
    module = TinyModule()
    if broken is None:
        trainer.fit(module, BATCHES, ckpt_path=ckpt_path)
    else:
        with pytest.raises(RuntimeError, match="broken"):
            trainer.fit(module, BATCHES, ckpt_path=ckpt_path)
    return trainer


def record(directory):
    (found,) = read_records(Path(directory) / "run.json")
    return found


def test_a_fit_leaves_a_record(tmp_path, script):
    script(["--lr", "0.1"])
    trainer = fit(resume=None, seed=5)
    found = record(trainer.log_dir)
    assert (found.status, found.step, found.stopped, found.ended) == (
        "finished",
        8,
        None,
        False,
    )
    assert (found.root, found.script) == (str(tmp_path), str(tmp_path / "train.py"))
    assert (found.fit, found.name) == (0, "trainer_kit_logs")
    assert found.from_here[found.script] == "../../train.py"
    assert (found.args, found.seed, found.number) == (["--lr", "0.1"], 5, 1)
    assert found.loggers == [{"name": "trainer_kit_logs", "version": 0}]
    assert found.checkpoints == [f"{trainer.log_dir}/checkpoints"]
    assert found.libraries["torch"] == torch.__version__
    assert read_info(trainer.checkpoint_callback.best_model_path)["run"] == found.id
    file = Path(trainer.log_dir, "run.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["format"] == "trainer_kit.runs"


def test_a_run_without_checkpoints_leaves_no_files(tmp_path, script):
    script()
    fit(resume=None, enable_checkpointing=None, fast_dev_run=True)
    trainer = tk.Trainer(
        max_epochs=1, enable_checkpointing=False, logger=False, **QUIET
    )
    trainer.fit(TinyModule(), BATCHES)
    assert os.listdir(tmp_path) == []


def test_a_failed_run_continues_from_its_checkpoint(tmp_path, script, capsys):
    script()
    first = fit(broken=5)
    assert record(first.log_dir).status == "failed"
    line = f'resume="auto": no unfinished run of train.py in {tmp_path}: starting a new run\n'
    assert capsys.readouterr().out == line
    script()
    again = fit()
    said = f"resuming from step 3 (verified) of run {os.path.abspath(first.log_dir)}\n"
    assert capsys.readouterr().out == said
    assert again.log_dir == os.path.abspath(first.log_dir)
    assert (again.global_step, record(again.log_dir).status) == (8, "finished")
    rows = Path(again.log_dir, "metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, 9))


def test_without_the_word_a_new_run_starts(script, capsys):
    script()
    fit(broken=5, resume=None)
    script()
    assert Path(fit(resume=None).log_dir).name == "version_1"
    assert capsys.readouterr().out == ""


def test_an_unfinished_run_continues_although_a_later_one_has_finished(script):
    script()
    first = fit(broken=5)
    execution = script()
    fit(resume=None)
    execution.mark_ended()
    script()
    assert fit().log_dir == os.path.abspath(first.log_dir)


def test_a_run_of_the_library_is_found_by_a_later_word(script):
    script()
    first = fit(broken=5, resume=None)
    script()
    assert fit().log_dir == os.path.abspath(first.log_dir)


@pytest.mark.parametrize(
    "other", [{"default_root_dir": "elsewhere"}, {"logger": "jsonl"}, {"logger": False}]
)
def test_another_root_or_logger_is_another_run(script, capsys, other, tmp_path):
    script()
    fit(broken=5, logger=CSVLogger(tmp_path / "logs", name="one"))
    script()
    fit(**({"logger": CSVLogger(tmp_path / "logs", name="one")} | other))
    assert capsys.readouterr().out.count("starting a new run") == 2


def test_changed_arguments_are_reported(script, capsys):
    script(["--lr", "0.1"])
    first = fit(broken=5)
    script(["--lr", "0.2"])
    fit()
    assert capsys.readouterr().out.splitlines()[1] == (
        f"resuming from step 3 (verified) of run {os.path.abspath(first.log_dir)}; it was started with: --lr 0.1"
    )


def test_a_finished_fit_of_an_unfinished_script_is_loaded(script, capsys):
    script()
    first = fit()
    fit(broken=5)
    capsys.readouterr()
    execution = script()
    loaded = fit()
    assert (loaded.global_step, loaded.log_dir) == (8, os.path.abspath(first.log_dir))
    assert loaded.checkpoint_callback.best_model_path == os.path.abspath(
        first.checkpoint_callback.best_model_path
    )
    where = Path(os.path.abspath(first.log_dir))
    # The last checkpoint is not of the last step: what lies between is trained again.
    assert (
        capsys.readouterr().out
        == f"resuming from step 6 (verified) of run {where}, which has finished\n"
    )
    second = fit()
    assert (second.log_dir, second.global_step) == (
        str(where.with_name("version_1")),
        8,
    )
    execution.mark_ended()
    assert [record(where.with_name(f"version_{n}")).ended for n in (0, 1)] == [
        True,
        True,
    ]
    script()
    assert Path(fit().log_dir).name == "version_2"


def test_a_script_that_died_while_it_recorded_its_end_is_loaded(script, monkeypatch):
    execution = script()
    fit(), fit()
    write, calls = runs.write_record, []
    monkeypatch.setattr(
        runs, "write_record", lambda record: calls or calls.append(write(record))
    )
    execution.mark_ended()
    monkeypatch.setattr(runs, "write_record", write)
    assert [record(Path("trainer_kit_logs", f"version_{n}")).ended for n in (0, 1)] == [
        False,
        True,
    ]
    script()
    assert [Path(fit().log_dir).name for _ in range(2)] == ["version_0", "version_1"]


def test_a_run_stopped_by_a_request_does_not_continue(script, capsys):
    class Stops(tk.Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step == 6:
                trainer.stop("enough")

    script()
    fit(callbacks=[Stops()])
    script()
    capsys.readouterr()
    again = fit()  # nobody would stop this one
    assert again.global_step == 6
    assert "stopped after step 6: enough" in capsys.readouterr().out


def test_early_stopping_is_not_asked_twice(script):
    class Worse(TinyModule):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float(self.trainer.current_epoch))

    def run():
        keeper = ModelCheckpoint(monitor="val_loss", save_last=True)
        trainer = tk.Trainer(
            max_epochs=9,
            resume="auto",
            logger="csv",
            callbacks=[keeper, EarlyStopping("val_loss", patience=2)],
            **QUIET,
        )
        trainer.fit(Worse(), BATCHES, BATCHES)
        return trainer

    script()
    assert run().global_step == 12
    script()
    assert run().global_step == 12


def test_a_larger_limit_trains_on_while_the_script_is_not_over(script):
    script()
    fit(epochs=2)
    script()
    assert fit(epochs=3).global_step == 12


def test_the_order_of_the_data_is_that_of_the_run(script):
    script()
    first = fit(broken=2)  # before its first checkpoint
    script()
    again = fit()
    assert again.data_seed == first.data_seed
    assert again.log_dir == os.path.abspath(first.log_dir)


def test_a_seed_that_torch_drew_from_64_bits_is_kept_in_the_record(script, capsys):
    torch.manual_seed(-3)  # as in a process that seeds nothing: 2**64 - 3
    script()
    first = fit(broken=5)
    torch.manual_seed(-5)
    script()
    assert fit().data_seed == first.data_seed
    assert "resuming from step 3 (verified)" in capsys.readouterr().out


def test_a_restart_resumes_the_run_that_it_restarts(script, capsys):
    job = {"slurm 71": False}
    script(["--lr", "1"], job)
    first = fit(broken=5, resume=None)
    script(["--lr", "2"], job)  # the job's script starts it twice
    second = fit(broken=5, resume=None)
    script(["--lr", "1"], {"slurm 70": False})
    fit(broken=5, resume=None)
    again = {"slurm 71": True}
    capsys.readouterr()
    script(["--lr", "1"], again)
    assert fit(resume=None).log_dir == os.path.abspath(first.log_dir)
    script(["--lr", "2"], again)
    assert fit(resume=None).log_dir == os.path.abspath(second.log_dir)
    assert capsys.readouterr().out.count("resuming from step 3 (verified)") == 2
    script(["--lr", "3"], again)
    assert Path(fit(resume=None).log_dir).name == "version_3"


def test_a_checkpoint_that_is_given_counts_until_the_run_has_its_own(script, tmp_path):
    script()
    trained = fit(resume=None, default_root_dir=tmp_path / "before")
    path = Path(trained.log_dir, "checkpoints", "step-00000006")
    script()
    fit(broken=7, ckpt_path=path)
    script()
    assert fit(ckpt_path=path).global_step == 8
    script()
    fit(broken=8, epochs=3, ckpt_path=path)
    (path / "state.json").write_text("damaged")
    script()
    with pytest.raises(CheckpointError, match=r"state\.json"):
        fit(epochs=3, ckpt_path=path)


def test_fits_that_share_a_directory_do_not_take_each_others_checkpoints(
    script, tmp_path, capsys
):
    script()
    fit(logger=False)
    fit(logger=False, broken=2)
    assert len(read_records(tmp_path / "run.json")) == 2
    script()
    assert fit(logger=False).global_step == 8
    assert "resuming from step 6 (verified)" in capsys.readouterr().out
    fit(logger=False)
    assert (
        f"run {tmp_path} has no checkpoint yet: starting it from the beginning"
        in capsys.readouterr().out
    )


def test_two_fits_of_one_trainer(script, capsys):
    def both(broken):
        keeper = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
        trainer = tk.Trainer(
            max_epochs=2, resume="auto", logger="csv", callbacks=[keeper], **QUIET
        )
        trainer.fit(TinyModule(), BATCHES)
        trainer.set_callbacks([*trainer.callback_list.configured, Breaks(broken)])
        trainer.fit(TinyModule(), BATCHES)

    script()
    with pytest.raises(RuntimeError, match="broken"):
        both(broken=5)
    script()
    capsys.readouterr()
    both(broken=None)
    said = capsys.readouterr().out
    assert "resuming from step 8 (verified)" in said
    assert "resuming from step 4 (verified)" in said


def test_weights_alone_are_not_resumed(script, capsys):
    def run(broken):
        return fit(
            broken,
            callbacks=[
                ModelCheckpoint(
                    "weights", every_n_train_steps=1, save_weights_only=True
                )
            ],
        )

    script()
    run(broken=5)
    script()
    run(broken=None)
    assert "resuming from step 3 (verified)" in capsys.readouterr().out


def test_an_evaluation_before_the_fit_writes_to_the_run(script):
    script()
    first = fit(broken=5)
    script()
    trainer = tk.Trainer(
        resume="auto",
        max_epochs=2,
        logger="csv",
        callbacks=[ModelCheckpoint()],
        **QUIET,
    )
    trainer.test(TinyModule(), BATCHES, verbose=False)
    assert trainer.log_dir == os.path.abspath(first.log_dir)
    trainer.fit(TinyModule(), BATCHES)
    assert (trainer.log_dir, trainer.global_step) == (os.path.abspath(first.log_dir), 8)
    assert os.listdir("trainer_kit_logs") == ["version_0"]


def test_a_directory_that_moved_with_the_loggers_version(script):
    """A path made of the logger's next version is another one at the next start: the checkpoints are found."""
    script()
    first, second = CSVLogger("logs"), CSVLogger("logs")
    options = {"max_epochs": 2, "resume": "auto", **QUIET}
    keeper = ModelCheckpoint(Path(first.log_dir, "mine"), every_n_train_steps=2)
    trainer = tk.Trainer(logger=first, callbacks=[keeper, Breaks(5)], **options)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(TinyModule(), BATCHES)
    script()
    trainer = tk.Trainer(
        logger=second,
        callbacks=[
            ModelCheckpoint(Path(second.log_dir, "mine"), every_n_train_steps=2)
        ],
        **options,
    )
    with pytest.warns(UserWarning, match="ModelCheckpoint now writes to"):
        trainer.fit(TinyModule(), BATCHES)
    assert (trainer.global_step, trainer.log_dir) == (8, first.log_dir)


def test_a_damaged_checkpoint_is_skipped(script, capsys):
    script()
    first = fit(
        broken=7,
        callbacks=[ModelCheckpoint("all", every_n_train_steps=1, save_top_k=-1)],
    )
    (Path(first.log_dir, "checkpoints", "step-00000006") / "state.json").write_text(
        "{}"
    )
    (Path("all", "step-00000007") / "state.json").write_text("{}")
    script()
    fit(callbacks=[ModelCheckpoint("all", every_n_train_steps=1, save_top_k=-1)])
    said = capsys.readouterr().out
    assert "checkpoint step-00000007 rejected: state.json" in said
    assert "resuming from step 6 (verified)" in said


def test_a_file_of_another_owner_is_not_replaced(script, tmp_path, capsys):
    script()
    (tmp_path / "run.json").write_text('{"mine": 1}')
    fit(logger=False)
    assert (tmp_path / "run.json").read_text() == '{"mine": 1}'
    assert (
        f"{tmp_path / 'run.json'} was not written by trainer_kit"
        in capsys.readouterr().out
    )


def edited(file, change):
    """A record whose entries were changed by hand; without a checksum, as older versions wrote it."""
    content = json.loads(file.read_text())
    del content["checksum"]
    if change is None:
        content["runs"] = ["?", 3, None, {}]
    elif "key" in change:
        del content["runs"][0]["root"]
    else:
        content["runs"][0].update(change)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [{"status": 3}, {"checkpoints": "x"}, {"number": None}, {"key": None}, None],
    ids=["status", "checkpoints", "number", "key", "all"],
)
def test_a_malformed_record_next_to_checkpoints_is_refused(script, change):
    script()
    trainer = fit(broken=5)
    file = Path(trainer.log_dir, "run.json")
    edited(file, change)
    assert read_records(file) is None
    script()
    with pytest.raises(
        ConfigurationError, match="holds an entry that is not a record of a run"
    ):
        fit()


def _truncate(file):
    file.write_bytes(file.read_bytes()[:300])


def _edit(file):
    file.write_text(
        file.read_text()
        .replace('"failed"', '"finished"')
        .replace('"ended": false', '"ended": true')
    )


def _newer(file):
    file.write_text(file.read_text().replace('"version": 1,', '"version": 2,', 1))


def _empty(file):
    file.write_bytes(b"")


DAMAGE = {
    _truncate: "run.json damaged JSON",
    _edit: "run.json was edited or damaged: its checksum does not match",
    _newer: "run.json has format version 2; this trainer_kit reads 1",
    _empty: "run.json is empty",
    Path.unlink: "no run.json knows their run",
}


@pytest.mark.parametrize("logger", ["csv", False])
@pytest.mark.parametrize(
    ("damage", "words"), DAMAGE.items(), ids=[damage.__name__ for damage in DAMAGE]
)
def test_starting_next_to_checkpoints_of_a_lost_record_is_reported(
    script, tmp_path, capsys, logger, damage, words
):
    script()
    first = fit(broken=5, logger=logger)
    damage(first.run_dir / "run.json")
    names = sorted(map(str, tmp_path.rglob("*")))
    script()
    with pytest.raises(ConfigurationError) as caught:
        fit(logger=logger)
    assert sorted(map(str, tmp_path.rglob("*"))) == names, (
        "nothing was written, and nothing taken away"
    )
    newest = first.run_dir / "checkpoints" / "step-00000003"
    assert words in str(caught.value)
    assert (
        f"the newest checkpoint there is of step 3\n  fix:   to continue from it, call fit(..., ckpt_path='{newest}')"
        in (str(caught.value))
    )
    script()
    again = fit(logger=logger, ckpt_path=newest)  # the way that the error names
    assert again.global_step == 8
    script()
    with (
        pytest.raises(ConfigurationError)
        if damage is _newer or logger
        else nullcontext()
    ):
        fit(logger=logger)


def test_a_lost_record_does_not_hide_an_intact_unfinished_run(script):
    script()
    fit(broken=5)
    execution = script()
    second = fit(resume=None, broken=7)
    del execution
    _truncate(second.run_dir / "run.json")
    script()
    with pytest.raises(
        ConfigurationError, match=r"version_1/run\.json damaged JSON(.|\n)*of step 6"
    ):
        fit()


def test_a_lost_record_of_a_directory_that_other_runs_share(script, tmp_path):
    """An older record lists the directory, but not the run that wrote the newest checkpoint in it."""
    execution = script()
    fit(
        resume=None,
        callbacks=[ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1)],
    )
    execution.mark_ended()
    script()
    second = fit(
        broken=5, callbacks=[ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1)]
    )
    shutil.rmtree(second.run_dir / "checkpoints")
    _truncate(second.run_dir / "run.json")
    script()
    with pytest.raises(ConfigurationError, match=r"checkpoints in .*/kept belong to"):
        fit(callbacks=[ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1)])


def test_a_lost_record_without_checkpoints_costs_nothing(script, capsys):
    script()
    first = fit(broken=2, logger=False)
    _truncate(first.run_dir / "run.json")
    script()
    assert fit(logger=False).global_step == 8
    assert (first.run_dir / "run.json.damaged").exists()
    assert record(first.run_dir).status == "finished"


@pytest.mark.parametrize("damage", [_truncate, _edit])
def test_a_restart_next_to_a_lost_record_does_not_start_from_the_beginning(
    script, damage
):
    script((), {"slurm 71": False})
    first = fit(broken=5, resume=None)
    damage(first.run_dir / "run.json")
    script((), {"slurm 71": True})
    with pytest.raises(ConfigurationError, match=r"version_0/run\.json"):
        fit(resume=None)


@pytest.mark.parametrize("old_record", [False, True])
@pytest.mark.parametrize("logger", ["csv", False])
def test_a_run_that_was_moved_with_its_script_is_continued(
    script, monkeypatch, tmp_path, capsys, logger, old_record
):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "train.py").touch()
    script()
    monkeypatch.setattr(runs, "script", lambda: str(tmp_path / "old" / "train.py"))
    options = {
        "logger": logger,
        "callbacks": [EarlyStopping("train_loss", patience=99)],
    }
    first = fit(broken=7, default_root_dir=tmp_path / "old", **options)
    if old_record:
        edited(first.run_dir / "run.json", {"from_here": {}})
    os.rename(tmp_path / "old", tmp_path / "new")
    script()
    monkeypatch.setattr(runs, "script", lambda: str(tmp_path / "new" / "train.py"))
    capsys.readouterr()
    if old_record:
        with pytest.raises(
            ConfigurationError, match=r"old/train\.py, which no longer exists"
        ):
            fit(default_root_dir=tmp_path / "new", **options)
        return
    again = fit(default_root_dir=tmp_path / "new", **options)
    assert "resuming from step 6 (verified)" in capsys.readouterr().out
    assert again.global_step == 8
    keeper = again.checkpoint_callback
    kept = Path(str(again.run_dir).replace("/old/", "/new/"), "checkpoints")
    assert keeper.best_model_path == str(kept / "step-00000006")
    assert not (tmp_path / "old").exists()


def test_a_run_below_a_symbolic_link_is_continued(
    script, monkeypatch, tmp_path, capsys
):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    script()
    first = fit(broken=7, default_root_dir=tmp_path / "disk")
    script()
    monkeypatch.setattr(
        runs, "script", lambda: str(tmp_path / "link" / ".." / "train.py")
    )
    again = fit(default_root_dir=tmp_path / "link", epochs=3)
    assert "resuming from step 6 (verified)" in capsys.readouterr().out
    assert os.path.samefile(again.run_dir, first.run_dir)
    assert sorted(os.listdir(first.run_dir / "checkpoints"))[-2:] == [
        "step-00000009",
        "step-00000012",
    ]
    assert "step-00000006" not in os.listdir(first.run_dir / "checkpoints"), (
        "they are still its own to delete"
    )


def test_a_moved_run_and_a_moved_script_are_refused(script, monkeypatch, tmp_path):
    """Neither is where it was, nor at the same place relative to the other."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "train.py").touch()
    script()
    monkeypatch.setattr(runs, "script", lambda: str(tmp_path / "old" / "train.py"))
    fit(broken=5, default_root_dir=tmp_path / "runs")
    (tmp_path / "old" / "train.py").unlink()
    script()
    monkeypatch.setattr(runs, "script", lambda: str(tmp_path / "new" / "train.py"))
    with pytest.raises(
        ConfigurationError,
        match=r"whose script was .*old/train\.py, which no longer exists",
    ):
        fit(default_root_dir=tmp_path / "runs")


OUTSIDE = ["../../../../OUT", "a/../../../OUT", "/tmp/OUT", ["x"], None]


@pytest.mark.parametrize("version", OUTSIDE, ids=str)
def test_a_record_does_not_lead_a_logger_outside_of_its_directory(
    script, tmp_path, version
):
    script()
    first = fit(broken=5, default_root_dir=tmp_path / "a" / "b")
    file = first.run_dir / "run.json"
    edited(file, {"loggers": [{"name": "trainer_kit_logs", "version": version}]})
    script()
    with pytest.raises(
        ConfigurationError, match="the run to continue has its logs outside of"
    ):
        fit(default_root_dir=tmp_path / "a" / "b")
    assert not list(tmp_path.rglob("OUT*"))
    assert not os.path.exists("/tmp/OUT")


def test_a_record_does_not_lead_to_checkpoints_outside_of_its_root(
    script, tmp_path, capsys
):
    """Nothing is locked, cleaned or written there; the run is continued from its own directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script()
    first = fit(broken=5, default_root_dir=tmp_path / "root")
    edited(
        first.run_dir / "run.json",
        {"checkpoints": [str(elsewhere), str(first.run_dir / "checkpoints")]},
    )
    script()
    locks = []
    lock = runs.DirectoryLock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            runs, "DirectoryLock", lambda place: locks.append(str(place)) or lock(place)
        )
        again = fit(default_root_dir=tmp_path / "root")
    assert "resuming from step 3 (verified)" in capsys.readouterr().out
    assert locks == [str(first.run_dir / "checkpoints")]
    assert os.listdir(elsewhere) == []
    assert again.global_step == 8


def test_checkpoints_of_the_run_outside_of_its_root_are_found(script, tmp_path, capsys):
    """The script now names another directory; the record knows the one before."""
    script()
    keeper = ModelCheckpoint(tmp_path / "first", every_n_train_steps=1)
    options = {
        "default_root_dir": tmp_path / "root",
        "max_epochs": 2,
        "resume": "auto",
        "logger": False,
        **QUIET,
    }
    trainer = tk.Trainer(callbacks=[keeper, Breaks(5)], **options)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(TinyModule(), BATCHES)
    script()
    with pytest.warns(UserWarning, match="now writes to"):
        tk.Trainer(
            callbacks=[ModelCheckpoint(tmp_path / "second", every_n_train_steps=1)],
            **options,
        ).fit(TinyModule(), BATCHES)
    assert "resuming from step 5 (verified)" in capsys.readouterr().out


def test_a_record_that_cannot_be_written_is_an_error_before_the_first_step(
    script, tmp_path
):
    script()
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(
        CheckpointError, match=r"run\.json: could not be written: Not a directory"
    ):
        tk.Trainer(
            logger=JSONLLogger("logs"), callbacks=ModelCheckpoint("kept"), **QUIET
        ).fit(TinyModule(), BATCHES)


def test_an_interactive_session_continues_the_newest_run(tmp_path):
    """As in a notebook, here under pytest: there is no script whose fits could be counted."""
    first = fit(broken=5)
    assert (record(first.log_dir).script, record(first.log_dir).fit) == ("", 0)
    assert fit().log_dir == os.path.abspath(first.log_dir)
    assert record(first.log_dir).ended, "no script will end"
    assert Path(fit().log_dir).name == "version_1"


@pytest.mark.world_size(2)
def test_several_ranks_continue_the_same_run(tmp_path):
    options = {
        "max_epochs": 2,
        "resume": "auto",
        "logger": "csv",
        "strategy": "ddp",
        "default_root_dir": tmp_path,
    }
    seeds = []
    for broken in (3, None):
        trainer = tk.Trainer(
            callbacks=[ModelCheckpoint(every_n_train_steps=2), Breaks(broken)],
            **{**QUIET, **options},
        )
        try:
            trainer.fit(TinyModule(), BATCHES)
        except RuntimeError:
            assert broken
        seeds.append(trainer.data_seed)
        trainer.strategy.world.barrier()
    assert trainer.run_dir == tmp_path / "trainer_kit_logs" / "version_0"
    assert trainer.global_step == 4
    assert seeds == [seeds[0]] * 2 == trainer.strategy.world.all_gather_object(seeds)[0]
    assert trainer.files.continued.id == trainer.files.record.id
