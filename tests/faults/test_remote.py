"""Runs whose checkpoints are at a URL: exact resumes, storages that fail, processes that are killed in an upload."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.bucket import Bucket
from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.lock import owner_of
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.checkpoint.store import checkpoints, lookup
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import locate

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "objects").mkdir()
    Bucket.open_at(tmp_path / "objects")
    return Bucket


@pytest.fixture(autouse=True)
def memory():
    yield
    storage = fsspec.filesystem("memory")
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]


class Net(TrainModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.Dropout(0.4), nn.Linear(width, 1)
        )
        self.losses = []
        self.scores = iter([0.5, 0.4, 0.45, 0.3])

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.losses.append((self.global_step, loss.item().hex()))
        if batch_idx % 2:
            self.log("score", next(self.scores, 0.2), on_step=True, on_epoch=False)
        return loss

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def loader():
    torch.manual_seed(3)
    return DataLoader(torch.randn(26, 4), batch_size=4, shuffle=True)


def fit(dirpath, ckpt_path=None, callbacks=(), max_steps=14, **options):
    tk.seed_everything(11)
    keeper = ModelCheckpoint(
        dirpath, **{"every_n_train_steps": 1, "save_top_k": -1, **options}
    )
    trainer = Trainer(
        max_steps=max_steps,
        callbacks=[keeper, *callbacks],
        log_every_n_steps=1,
        **QUIET,
    )
    module = Net()
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer, keeper, module


def same(one, two):
    return all(
        torch.equal(a, b)
        for a, b in zip(
            one.state_dict().values(), two.state_dict().values(), strict=True
        )
    )


def test_a_resume_from_a_url_equals_the_uninterrupted_run():
    _, keeper, whole = fit("memory://team/run")
    assert [record.step for record in checkpoints("memory://team/run")] == list(
        range(1, 15)
    )
    assert (
        keeper.best_model_path
        == keeper.last_model_path
        == "memory://team/run/step-00000014"
    )
    for step in (13, 7, 1):
        _, _, resumed = fit(
            "memory://team/run", ckpt_path=f"memory://team/run/step-{step:08d}"
        )
        assert resumed.losses == whole.losses[step:]
        assert same(resumed, whole)
        assert [record.step for record in checkpoints("memory://team/run")] == list(
            range(1, 15)
        )


def test_last_at_a_url(capsys):
    fit("memory://team/run", max_steps=6, save_top_k=1)
    assert lookup("memory://team/run", "last") == locate(
        "memory://team/run/step-00000006"
    )
    trainer, _, resumed = fit("memory://team/run", ckpt_path="last", save_top_k=1)
    assert (
        "resuming from step 6 (memory://team/run/step-00000006)"
        in capsys.readouterr().out
    )
    assert [step for step, _ in resumed.losses] == list(range(6, 14))
    assert [record.step for record in checkpoints("memory://team/run")] == [13, 14]
    assert trainer.predict(resumed, [torch.ones(1, 4)], ckpt_path="best")[0].shape == (
        1,
        1,
    )
    loaded = Net.load_from_checkpoint("memory://team/run/step-00000014")
    assert same(loaded, resumed)
    assert owner_of("memory://team/run") is None


def test_the_root_directory_is_a_url(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"default_root_dir": "memory://team/root/", "max_epochs": 1, **QUIET}
    trainer = Trainer(**options)
    trainer.fit(Net(), loader())
    assert trainer.default_root_dir == "memory://team/root"
    assert [
        str(record.path) for record in checkpoints("memory://team/root/checkpoints")
    ] == ["memory://team/root/checkpoints/step-00000007"]
    trainer.save_checkpoint("memory://team/root/mine")
    assert read_checkpoint("memory://team/root/mine")["progress"]["step"] == 7
    Trainer(**{**options, "max_epochs": 2}).fit(Net(), loader(), ckpt_path="last")
    assert (
        "resuming from step 7 (memory://team/root/checkpoints/step-00000007)"
        in capsys.readouterr().out
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"], (
        "which run it is stays on this machine"
    )


def test_loggers_stay_on_this_machine_and_say_so(tmp_path):
    with pytest.raises(
        ConfigurationError, match="loggers write to local directories only"
    ) as caught:
        Trainer(default_root_dir="memory://team/root")
    assert 'logger=TensorBoardLogger("logs") or logger=False' in str(caught.value)
    logger = tk.loggers.CSVLogger(tmp_path / "logs")
    options = {**QUIET, "logger": logger}
    Trainer(
        default_root_dir="memory://team/root",
        max_epochs=1,
        log_every_n_steps=1,
        **options,
    ).fit(Net(), loader())
    assert len(checkpoints("memory://team/root/checkpoints")) == 1
    assert logger.path.exists()
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_file_url_is_a_local_directory(tmp_path):
    _, keeper, _ = fit(f"file://{tmp_path}/kept", max_steps=2)
    assert keeper.best_model_path == str(tmp_path / "kept" / "step-00000002")
    trainer = Trainer(default_root_dir=tmp_path.as_uri(), max_epochs=1)
    assert trainer.default_root_dir == str(tmp_path)
    assert trainer.loggers[0].save_dir == str(tmp_path)
    verify_checkpoint(f"file://{tmp_path}/kept/step-00000002")


def test_storage_without_write_access_is_refused_before_the_first_step(bucket):
    def refuse(operation, key):
        raise PermissionError("403 Forbidden")

    bucket.before = staticmethod(refuse)
    module = Net()
    with pytest.raises(
        CheckpointError, match="no checkpoint can be written here: 403 Forbidden"
    ):
        Trainer(max_epochs=1, callbacks=ModelCheckpoint("bucket://run"), **QUIET).fit(
            module, loader()
        )
    assert module.losses == []
    for make in (
        lambda: ModelCheckpoint("s4://run"),
        lambda: Trainer(default_root_dir="s4://run", **QUIET),
    ):
        with pytest.raises(
            ConfigurationError, match="s4:// is an unknown storage protocol"
        ):
            make()


def test_a_second_run_in_one_directory_is_refused(bucket):
    class Meets(Callback):
        def on_train_start(self, trainer, module):
            with pytest.raises(
                CheckpointError,
                match=rf"bucket://run: locked by pid {os.getpid()} on host",
            ):
                fit("bucket://run")

    fit("bucket://run", callbacks=[Meets()], max_steps=1)
    assert owner_of("bucket://run") is None
    fit("bucket://run", ckpt_path="last", max_steps=2)


def wait(trainer):
    """Until what is written behind the training thread is there, or not."""
    save = trainer.run.saver.save
    if save is not None and save.writing is not None:
        save.writing.wait()


def steps(directory="bucket://run"):
    return [record.step for record in checkpoints(directory)]


class Breaks(Callback):
    """The storage fails while these steps are saved, from the n-th operation, or the first on this file, on."""

    def __init__(self, bucket, failing, after=0, error=None, at=None):
        self.failing, self.count, self.now = failing, 0, False
        self.raised = False
        self.seen = {}

        def before(operation, key):
            if self.now and not key.endswith((".lock", "index.json")):
                self.count += 1 if at is None or at in key or self.count else 0
                if self.count > after:
                    self.raised = True
                    raise error or ConnectionError("reset by peer")

        bucket.before = staticmethod(before)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        wait(trainer)
        self.now = False
        self.seen[trainer.global_step] = steps()
        self.now, self.count = trainer.global_step + 1 in self.failing, 0

    def on_train_end(self, trainer, module):
        wait(trainer)
        self.now = False


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize(
    "error", [ConnectionError("reset by peer"), RuntimeError("reset by peer")]
)
def test_a_failed_upload_is_reported_and_training_continues(
    bucket, capsys, after, error
):
    breaks = Breaks(bucket, {3, 4, 5, 6}, after, error)
    trainer, keeper, _ = fit(
        "bucket://run",
        callbacks=[breaks],
        max_steps=8,
        every_n_train_steps=2,
        save_top_k=1,
    )
    assert trainer.global_step == 8
    lines = capsys.readouterr().out.splitlines()
    if not breaks.raised:
        pytest.skip(f"an upload has no operation {after}: it succeeded")
    named = "" if isinstance(error, OSError) else "RuntimeError: "
    for line, step in zip(lines, (4, 6), strict=True):
        assert re.fullmatch(
            rf"save of step {step} failed: bucket://run/step-{step:08d}: {named}reset by peer \(need [\d.]+ kB\); "
            rf"kept step 2; training continues, next try at step {step + 2}",
            line,
        )
    assert breaks.seen[7] == [2]
    assert steps() == [2, 8]
    verify_checkpoint(keeper.best_model_path)


def test_a_storage_that_is_out_of_reach_for_a_while(bucket, capsys):
    class Unplugs(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            wait(trainer)
            bucket.unreachable = trainer.global_step + 1 in (3, 4, 5)

    trainer, _, _ = fit(
        "bucket://run", callbacks=[Unplugs()], max_steps=7, save_top_k=1
    )
    assert trainer.global_step == 7
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        f"save of step {step} failed: bucket://run/step-{step:08d}: no route to host (need 0 B)"
        for step in (3, 4, 5)
    ]
    assert steps() == [6, 7]
    assert owner_of("bucket://run") is None


def test_a_failed_deletion_is_retried_later(bucket, recwarn, capsys):
    def before(operation, key):
        if (
            operation == "delete"
            and key == "run/step-00000002/manifest.json"
            and bucket.done[-1][0] != "delete"
        ):
            bucket.unreachable = True
            raise ConnectionError("reset by peer")

    class Replugs(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            wait(trainer)
            bucket.unreachable = False
            if trainer.global_step == 4:
                bucket.before = staticmethod(lambda operation, key: None)

    bucket.before = staticmethod(before)
    fit("bucket://run", callbacks=[Replugs()], max_steps=6, save_top_k=1)
    assert steps() == [5, 6]
    assert not recwarn.list
    assert "after saving bucket://run/step-00000004: " in capsys.readouterr().out


def test_files_of_a_failed_upload_are_deleted_at_the_next_start(bucket, capsys):
    fit(
        "bucket://run",
        callbacks=[Breaks(bucket, {3, 4}, at="state.json")],
        max_steps=6,
        every_n_train_steps=2,
    )
    assert steps() == [2, 6]
    left = [
        entry.name
        for entry in locate("bucket://run").iterdir()
        if entry.name.startswith(".")
    ]
    assert len(left) == 1
    assert (locate("bucket://run") / "step-00000004").is_dir()
    # As if that process had ended: its number, and when it began, are in the name.
    sign = bucket.directory / "run" / left[0]
    sign.rename(sign.with_name(re.sub(r"\.\d+-", ".4194399-", sign.name)))
    capsys.readouterr()
    fit("bucket://run", ckpt_path="last", max_steps=7, every_n_train_steps=2)
    assert (
        "discarded 1 incomplete save (step 4) in bucket://run"
        in capsys.readouterr().out
    )
    assert not (locate("bucket://run") / "step-00000004").exists()


def test_the_best_is_not_lost_to_one_that_was_never_written(bucket):
    breaks = Breaks(bucket, {3, 4})
    options = {
        "every_n_train_steps": 2,
        "save_top_k": 1,
        "monitor": "score",
        "max_steps": 6,
    }
    _, keeper, _ = fit("bucket://run", callbacks=[breaks], **options)
    assert breaks.seen[4] == [2]
    assert steps() == [2, 6], "0.45 beats 0.5; 0.4 was never there"
    assert keeper.best_model_score == pytest.approx(0.45)


def test_the_order_of_one_save_and_prune(bucket):
    fit("bucket://run", max_steps=3, save_top_k=1)
    names = [
        (operation, re.sub(r"\.\d+-\w+", "", key.removeprefix("run/")))
        for operation, key in bucket.done
    ]
    saved = names.index(("put", "step-00000003/manifest.json"))
    indexed = names.index(("put", "index.json"), saved)
    pruned = names.index(("delete", "step-00000001/manifest.json"))
    uploads = [
        place
        for place, (operation, key) in enumerate(names)
        if key.startswith("step-00000003/")
    ]
    deletions = [
        place
        for place, (operation, key) in enumerate(names)
        if operation == "delete" and "1/" in key
    ]
    assert max(uploads) == saved < indexed < pruned == min(deletions)


def test_a_flipped_byte_costs_one_interval(bucket, capsys):
    _, _, whole = fit("bucket://run")
    file = bucket.directory / "run" / "step-00000014" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    _, _, resumed = fit("bucket://run", ckpt_path="last", max_steps=14)
    said = capsys.readouterr().out
    assert (
        "checkpoint step-00000014 rejected: model.safetensors: damaged: checksum"
        in said
    )
    assert "falling back to step-00000013; it is now step-00000014.damaged" in said
    assert resumed.losses == whole.losses[13:]
    assert same(resumed, whole)
    assert steps() == list(range(1, 15))
    assert (
        bucket.directory / "run" / "step-00000014.damaged" / "model.safetensors"
    ).read_bytes() == data


@pytest.mark.world_size(2)
def test_two_ranks(tmp_path):
    Bucket.open_at(tmp_path / "objects")
    options = {
        "max_epochs": 1,
        "strategy": "ddp",
        "devices": 2,
        "enable_progress_bar": False,
        **QUIET,
    }
    for epochs in (1, 2):
        keeper = ModelCheckpoint("bucket://run", every_n_train_steps=1, save_top_k=1)
        trainer = Trainer(**{**options, "max_epochs": epochs}, callbacks=keeper)
        trainer.fit(Net(), loader(), ckpt_path="last")
    assert trainer.global_step == 8
    assert keeper.best_model_path == "bucket://run/step-00000008"
    assert steps() == [7, 8]
    verify_checkpoint("bucket://run/step-00000008")


SAVES = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from tests.bucket import Bucket
from trainer_kit.checkpoint.commit import clean_incomplete, remove_checkpoint, write_checkpoint
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.checkpoint.store import newest_verified
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.checkpoint.store import checkpoints, lookup, mark

def state(step):
    return {"model": {"w": torch.full((50,), float(step))}, "progress": {"step": step}}

def cycle(step, overwrite, report=None):
    seen = [record.step for record in checkpoints("bucket://run")]
    lock = DirectoryLock("bucket://run")
    clean_incomplete("bucket://run")
    if report is not None:
        newest, damaged = newest_verified("bucket://run")
        counted = [record.step for record in checkpoints("bucket://run")]
        found = {"newest": step_of(newest), "damaged": len(damaged), "seen": seen, "counted": counted}
        report.write_text(json.dumps(found))
    name = "only" if overwrite else f"step-{step}"
    path = write_checkpoint(f"bucket://run/{name}", state(step), info={"step": step}, overwrite=True)
    mark("bucket://run", last=path)
    for record in checkpoints("bucket://run")[:-2]:
        remove_checkpoint(record)
    lock.release()

def step_of(path):
    return read_checkpoint(path)["progress"]["step"]

def forked(act):
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

overwrite, torn = sys.argv[2] == "overwrite", sys.argv[3] == "torn"
results, point = [], 0
before = Path(sys.argv[1]) / "before"
before.mkdir()
Bucket.open_at(before)
for step in (1, 2):
    cycle(step, overwrite)
while True:
    point += 1
    directory = Path(sys.argv[1]) / str(point)
    shutil.copytree(before, directory)
    Bucket.open_at(directory, torn=torn)
    left = point
    def kill(operation, key):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    Bucket.before = staticmethod(kill)
    code = forked(lambda: cycle(3, overwrite))
    Bucket.before = staticmethod(lambda operation, key: None)
    report = directory / "report.json"
    again = forked(lambda: cycle(4, overwrite, report))
    files = sorted(str(file.relative_to(directory)) for file in (directory / "run").rglob("*") if file.is_file())
    results.append({
        **(json.loads(report.read_text()) if again == 0 else {}), "code": code, "again": again,
        "after": step_of(newest_verified("bucket://run")[0]), "last": str(lookup("bucket://run", "last")),
        "files": files,
    })
    if code == 0:
        break
print(json.dumps(results))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks and kills")
@pytest.mark.parametrize("torn", ["whole", "torn"])
@pytest.mark.parametrize("kind", ["new", "overwrite"])
def test_killed_before_every_operation_of_a_save_and_prune(
    tmp_path, programs, kind, torn
):
    done = programs.run_code(SAVES, str(tmp_path), kind, torn, timeout=100)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [result["code"] for result in results] == [-signal.SIGKILL] * (
        len(results) - 1
    ) + [0]
    assert len(results) > 12
    for result in results:
        assert result["again"] == 0, done.stderr
        assert result["damaged"] == 0
        assert result["after"] == 4
        all_there = [[2], [3]] if kind == "overwrite" else [[1, 2], [1, 2, 3], [2, 3]]
        assert result["counted"] in all_there
        assert result["seen"] in [
            *all_there,
            *([[]] if (kind, torn) == ("overwrite", "torn") else []),
        ]
        name = "only" if kind == "overwrite" else "step-4"
        assert result["last"] == f"bucket://run/{name}"
        places = {file.split("/")[1] for file in result["files"]}
        assert places == {
            "index.json",
            name,
            "only" if kind == "overwrite" else f"step-{result['counted'][-1]}",
        }
    newest = [result["newest"] for result in results]
    assert newest == sorted(newest)
    assert set(newest) == {2, 3}


RUNS = """
import json, os, random, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader
import trainer_kit as tk
from tests.bucket import Bucket
from trainer_kit.checkpoint.store import checkpoints

class Net(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        with open(steps, "a") as file:
            file.write(f"{self.global_step} {loss.item().hex()}\\n")
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)

def run(directory, point):
    global steps
    steps = directory / "steps"
    def kill(operation, key):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    global left
    left = point
    Bucket.open_at(directory, kill)
    tk.seed_everything(7)
    data = torch.randn(26, 4)
    keeper = tk.callbacks.ModelCheckpoint("bucket://kept", every_n_train_steps=1)
    trainer = tk.Trainer(max_epochs=3, accelerator="cpu", callbacks=keeper, logger=False,
        enable_progress_bar=False, enable_model_summary=False)
    module = Net()
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), ckpt_path="last")
    torch.save(module.state_dict(), directory / "weights.pt")

def forked(directory, point):
    pid = os.fork()
    if pid == 0:
        try:
            run(directory, point)
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

plain, killed = (Path(sys.argv[1]) / name for name in ("plain", "killed"))
plain.mkdir()
killed.mkdir()
draw = random.Random(5)
codes = [forked(plain, 10**9)]
codes += [forked(killed, draw.randrange(4, 90)) for _ in range(7)]
codes.append(forked(killed, 10**9))
Bucket.open_at(killed)
kept = killed / "kept"
print(json.dumps({
    "codes": codes, "counted": [record.step for record in checkpoints("bucket://kept")],
    "left": sorted({file.relative_to(kept).parts[0] for file in kept.rglob("*") if file.is_file()}),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks and kills")
def test_a_run_killed_in_uploads_ends_as_the_uninterrupted_one(tmp_path, programs):
    done = programs.run_code(RUNS, str(tmp_path), timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["codes"][0] == found["codes"][-1] == 0, done.stderr
    assert set(found["codes"]) == {0, -signal.SIGKILL}, done.stderr
    assert found["codes"].count(-signal.SIGKILL) >= 3
    assert found["counted"] == [20, 21]
    assert found["left"] == ["index.json", "step-00000020", "step-00000021"]
    plain, killed = (tmp_path / name for name in ("plain", "killed"))
    one, two = (
        torch.load(directory / "weights.pt", weights_only=True)
        for directory in (plain, killed)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    lines = (plain / "steps").read_text().splitlines()
    assert set((killed / "steps").read_text().splitlines()) == set(lines)
    assert len(lines) == 21
