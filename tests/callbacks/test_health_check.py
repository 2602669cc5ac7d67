"""`HealthCheck` in real fits: when it checks, what it prints, and that training is the same with and without it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import trainer_kit as tk
from tests.calls import python_calls, stop_the_clock_of_steps
from tests.parity.plain import (
    Batch,
    Classifier,
    assert_same,
    ddp,
    make_batches,
    make_net,
    train,
)
from trainer_kit.callbacks import HealthCheck, ModelCheckpoint
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.health import survey as surveys
from trainer_kit.health.survey import survey

QUIET = {
    "barebones": False,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
RUN = {**QUIET, "enable_checkpointing": False}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "_REPEATS", dict.fromkeys(surveys._REPEATS, 1))


class Watched(Classifier):
    """Keeps the gradients at each step, and the steps after which a survey ran."""

    def __init__(self) -> None:
        super().__init__(make_net(dropout=0.3))
        self.gradients: list[torch.Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.gradients.append(
            torch.cat(
                [p.grad.flatten() for p in self.parameters() if p.grad is not None]
            )
        )


def surveyed(
    monkeypatch: pytest.MonkeyPatch, trainer_of: list[tk.Trainer]
) -> list[int]:
    steps: list[int] = []

    def noted(*arguments: Any) -> Any:
        steps.append(trainer_of[0].progress.step)
        return survey(*arguments)

    monkeypatch.setattr("trainer_kit.callbacks.health_check.survey", noted)
    return steps


@pytest.mark.parametrize(
    ("every", "options", "expected"),
    [
        (None, {}, [0]),
        (4, {}, [0, 4, 8]),
        ("3ba", {}, [0, 3, 6, 9]),
        ("4ba", {"accumulate_grad_batches": 2}, [0, 2, 4]),
        ("3ba", {"accumulate_grad_batches": 2}, [0, 2, 3, 5]),
        ("12sp", {}, [0, 2, 4, 6, 8, 10]),
        ("1ep", {"max_epochs": 3}, [0, 11, 21]),
    ],
)
def test_it_checks_before_training_and_at_intervals(
    every: Any,
    options: dict[str, Any],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = tk.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "log_every_n_steps": 1,
            **RUN,
            **options,
        },
        callbacks=[HealthCheck(every)],
    )
    steps = surveyed(monkeypatch, [trainer])
    trainer.fit(Watched(), make_batches(10))
    assert steps == expected


def test_training_is_the_same_in_bits() -> None:
    with_it, without = Watched(), Watched()
    for module, callbacks in ((with_it, [HealthCheck(every=1)]), (without, [])):
        torch.manual_seed(3)
        train(module, make_batches(6), callbacks=callbacks, **RUN)
    assert_same(with_it, without)
    assert len(with_it.gradients) == 6
    assert all(
        torch.equal(a, b)
        for a, b in zip(with_it.gradients, without.gradients, strict=True)
    )


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_training_is_the_same_on_two_ranks_and_a_slow_one_is_named() -> None:
    modules = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if torch.distributed.get_rank() == 1:
            prepare = surveys._gemm

            def larger(device: torch.device) -> Any:
                work, amount = prepare(device)
                return lambda: [work() for _ in range(16)], amount

            monkeypatch.setattr(surveys, "_gemm", larger)
        for callbacks in ([HealthCheck(every="2ba")], []):
            torch.manual_seed(3)
            module = Watched()
            modules.append(module)
            trainer = ddp(module, make_batches(8), callbacks=callbacks, **RUN)
            if callbacks:
                made = callbacks[0].last
                assert made is not None
                assert any(
                    each.about == "GEMM" and each.text.startswith("rank 1 (")
                    for each in made.unusual
                )
                assert trainer.progress.step == 4
    assert_same(*modules)
    assert all(
        torch.equal(a, b)
        for a, b in zip(modules[0].gradients, modules[1].gradients, strict=True)
    )


def test_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_kit.health.survey._SLOW_DISK", 0.0)
    train(Watched(), make_batches(4), callbacks=[HealthCheck(every=4)], **RUN)
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("health check")
    ]
    assert [line.split(":")[0] for line in lines] == [
        "health check at step 0",
        "health check at step 4",
    ]
    assert lines[1].startswith("health check at step 4: 1 rank, GEMM ")
    assert lines[1].endswith(" s), nothing unusual")
    monkeypatch.setattr("trainer_kit.health.survey._SLOW_DISK", 1e15)
    train(Watched(), make_batches(4), callbacks=[HealthCheck()], **RUN)
    printed = capsys.readouterr().out
    assert "health check at step 0: disk: rank 0 (" in printed
    assert "  → use a faster directory" in printed
    assert "nothing unusual" not in printed


def test_steps_without_a_check_cost_no_python_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_the_clock_of_steps(monkeypatch)

    def calls(*callbacks: Any) -> int:
        counted = 0
        for steps, sign in (
            (60, 1),
            (20, -1),
        ):  # what a fit costs as a whole cancels out
            trainer = tk.Trainer(
                accelerator="cpu",
                devices=1,
                max_steps=steps,
                callbacks=list(callbacks),
                log_every_n_steps=1000,
                **RUN,
            )
            module = Classifier(make_net())
            counted += sign * python_calls(
                lambda made=trainer, net=module: made.fit(net, make_batches(60))
            )
        return counted

    calls()
    assert calls(HealthCheck(every=10_000)) == calls()


def test_a_resumed_run_checks_at_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=5)
    train(Watched(), make_batches(10), callbacks=[saving], max_steps=5, **QUIET)
    options: Any = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **RUN}
    trainer = tk.Trainer(callbacks=[HealthCheck(every=4)], **options)
    steps = surveyed(monkeypatch, [trainer])
    trainer.fit(Watched(), make_batches(10), ckpt_path=tmp_path / "step-00000005")
    assert steps == [5, 8]


def test_time_of_a_check_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])

    def slow(*arguments: Any) -> Any:
        ahead[0] += 1000
        return survey(*arguments)

    monkeypatch.setattr("trainer_kit.callbacks.health_check.survey", slow)
    monkeypatch.setattr("trainer_kit.training.settle.time", clock)
    trainer = train(
        Watched(), make_batches(10), callbacks=[HealthCheck(every=4)], **RUN
    )
    assert ahead == [3000]
    assert trainer.progress.seconds < 1000


@pytest.mark.parametrize("every", [0, "0ba", "0s", "0.5dur"])
def test_an_interval_can_be_counted_and_is_above_zero(every: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"interval of health checks.*\n.*every=.*\n.*500ba"
    ):
        HealthCheck(every)


def test_a_run_whose_checkpoints_go_to_a_url_measures_no_disk() -> None:
    pytest.importorskip("fsspec")
    check = HealthCheck()
    train(
        Watched(),
        make_batches(2),
        callbacks=[check],
        default_root_dir="memory://health",
        **RUN,
    )
    assert check.last is not None
    assert "disk" not in check.last.ranks[0].speeds
    assert json.dumps(dict(check.last.ranks[0].speeds))


def test_batch_norm_and_modes_stay() -> None:
    check = HealthCheck(every=1)
    module = Classifier(make_net(norm=True))
    train(module, make_batches(3), callbacks=[check], **RUN)
    assert isinstance(module.net[1], nn.BatchNorm1d)
    assert int(module.net[1].num_batches_tracked) == 3
    assert module.training
