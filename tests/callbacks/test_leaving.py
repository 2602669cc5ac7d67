"""Leaving a run with a checkpoint: exceptions, preemption, and the hook that says that a checkpoint is durable."""

from __future__ import annotations

import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from tests.callbacks import fits
from tests.parity.plain import (
    QUIET,
    Classifier,
    assert_same,
    make_batches,
    make_net,
    sgd,
    train,
)
from trainer_kit.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Preemption
from trainer_kit.checkpoint import verify_checkpoint
from trainer_kit.core.errors import ConfigurationError


class At(tk.Callback):
    """Does something after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def fail() -> None:
    raise KeyError("wrong")


def test_an_exception_leaves_a_checkpoint_to_continue_from(tmp_path: Path) -> None:
    whole, part = (
        Classifier(make_net(dropout=0.3), sgd),
        Classifier(make_net(dropout=0.3), sgd),
    )
    options = {**QUIET, "enable_checkpointing": False, "max_epochs": 2}
    torch.manual_seed(1)
    train(whole, make_batches(4), **options)
    saving = OnExceptionCheckpoint(tmp_path)
    torch.manual_seed(1)
    with pytest.raises(KeyError, match="wrong"):
        train(part, make_batches(4), callbacks=[saving, At(3, fail)], **options)
    trainer = tk.Trainer(
        accelerator="cpu", devices=1, **{**options, "barebones": False}
    )
    trainer.fit(part, make_batches(4), ckpt_path=str(saving.ckpt_path))
    assert_same(part, whole)
    with pytest.raises(ConfigurationError, match="a single directory"):
        OnExceptionCheckpoint(tmp_path, "a/b")


class Committed(tk.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_checkpoint_committed(self, trainer: Any, module: Any, path: Any) -> None:
        verify_checkpoint(path)
        self.seen.append((path.name, trainer.global_step))


@pytest.mark.parametrize("background", [True, False])
def test_a_hook_is_called_when_a_checkpoint_is_durable(
    tmp_path: Path, background: bool
) -> None:
    class Module(Classifier):
        def on_checkpoint_committed(self, path: Any) -> None:
            names.append(path.name)

    names: list[str] = []
    hook, saving = (
        Committed(),
        ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1),
    )
    train(
        Module(make_net()),
        make_batches(6),
        callbacks=[hook, saving],
        async_save=background,
        **QUIET,
    )
    assert (
        [name for name, _ in hook.seen]
        == names
        == [f"step-{step:08d}" for step in (2, 4, 6)]
    )
    assert all(step >= int(name[-2:]) for name, step in hook.seen)


def run(
    preemption: Preemption, tmp_path: Path, act: Any = lambda: None, code: int = 143
) -> int:
    """Trains until the preemption ends it; returns the step of the checkpoint."""

    def slow() -> None:
        time.sleep(0.02)

    class Slow(tk.Callback):
        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            slow()

    module, saving = (
        Classifier(make_net(), sgd),
        ModelCheckpoint(tmp_path / "run", every_n_epochs=1),
    )
    callbacks = [saving, preemption, At(2, act), Slow()]
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR2)
    with pytest.raises(SystemExit) as left:
        train(module, make_batches(2000), callbacks=callbacks, **QUIET)
    assert left.value.code == code
    assert (
        signal.getsignal(signal.SIGTERM),
        signal.getsignal(signal.SIGUSR2),
    ) == before
    assert not [
        thread for thread in threading.enumerate() if thread.name == "preemption"
    ]
    (path,) = (tmp_path / "run").glob("step-*")
    verify_checkpoint(path)
    return int(path.name.removeprefix("step-"))


def test_a_file_that_appears(tmp_path: Path) -> None:
    preemption = Preemption(tmp_path / "now", every=0.05)
    assert 2 <= run(preemption, tmp_path, (tmp_path / "now").touch) < 1000
    assert preemption.reason == f"{tmp_path / 'now'} exists"


@pytest.mark.parametrize("source", [signal.SIGUSR2, "SIGUSR2"])
def test_a_signal(tmp_path: Path, source: Any) -> None:
    preemption = Preemption(source)
    assert run(preemption, tmp_path, lambda: signal.raise_signal(signal.SIGUSR2)) == 2
    assert preemption.reason == "SIGUSR2"


def test_the_second_source_of_the_same_event_does_not_end_the_save(
    tmp_path: Path,
) -> None:
    preemption = Preemption([signal.SIGUSR2, tmp_path / "now"], every=0.05)

    def both() -> None:
        signal.raise_signal(signal.SIGUSR2)
        (tmp_path / "now").touch()
        while any(
            thread.name == "preemption" for thread in threading.enumerate()
        ):  # until it has seen the file
            time.sleep(0.01)

    assert run(preemption, tmp_path, both) == 2
    assert preemption.reason == "SIGUSR2"


def test_a_signal_that_every_run_listens_to(tmp_path: Path) -> None:
    """A source of its own for SIGTERM called itself without end, where no step was running."""

    class Early(tk.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        train(
            Classifier(make_net(), sgd),
            make_batches(4),
            callbacks=[Preemption(["SIGTERM"]), Early()],
            **QUIET,
        )
    assert ended.value.code == 128 + signal.SIGTERM


def test_the_time_limit_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 60)))
    preemption = Preemption(["slurm"], every=0.05, margin=90)
    assert run(preemption, tmp_path, code=128 + signal.SIGUSR1) >= 1
    assert "time limit" in str(preemption.reason)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(ConfigurationError, match="does not provide the end time"):
        Preemption("slurm")


def test_an_answer_of_a_metadata_service(tmp_path: Path) -> None:
    answers = {"text": "FALSE", "asked": 0, "flavor": None}

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers["asked"] += 1
            answers["flavor"] = self.headers["Metadata-Flavor"]
            self.send_response(404 if answers["asked"] == 1 else 200)
            self.end_headers()
            self.wfile.write(answers["text"].encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Service) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}/preempted?token=secret"
        preemption = Preemption(url, every=0.05, headers={"Metadata-Flavor": "Google"})

        def later() -> None:
            deadline = time.monotonic() + 20
            while answers["asked"] < 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            answers["text"] = "TRUE"

        assert run(preemption, tmp_path, later) >= 2
        server.shutdown()
        serving.join()
    assert answers["flavor"] == "Google"
    assert "answers 'TRUE'" in str(preemption.reason)
    assert "secret" not in str(preemption.reason)


def test_sources_that_cannot_be() -> None:
    for wrong in ([], ["SIGNOPE"]):
        with pytest.raises(ConfigurationError):
            Preemption(wrong)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_several_ranks_say_that_nothing_is_saved(tmp_path: Path) -> None:
    trainer = fits.trainer(
        OnExceptionCheckpoint(tmp_path), At(2, fail), devices=2, max_epochs=1
    )
    with pytest.raises(KeyError, match="wrong"):
        trainer.fit(Classifier(make_net(), sgd), make_batches(8))
    assert (
        any(
            "no checkpoint is saved for this exception" in line
            for line in trainer.printed
        )
        == trainer.is_global_zero
    )
    assert list(tmp_path.glob("on_exception*")) == []
