"""What the profilers write of real fits."""

from __future__ import annotations

import json
import pstats
import sys
import time

import pytest
import torch

from tests.callbacks.fits import BATCH, fit, trainer
from trainer_kit.callbacks import (
    AdvancedProfiler,
    Callback,
    PyTorchProfiler,
    SimpleProfiler,
    profilers,
)
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule


class Sleeps(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(0.01)

    def on_train_epoch_end(self, trainer, module):
        time.sleep(0.02)


class Late(Sleeps):
    order = "late"


def test_a_table_of_parts_and_hooks():
    made = fit(Sleeps(), Late(), batches=4, epochs=2, profiler="simple")
    lines = made.printed[-1].splitlines()
    found = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    for owner in ("Sleeps", "Late"):
        calls, seconds, mean, _ = found[f"{owner}.on_train_batch_end"]
        assert int(calls) == 8
        assert float(seconds) >= 0.079
        assert float(mean) >= 9.9
        assert found[f"{owner}.on_train_epoch_end"][0] == "2"
    assert found["Scripted.on_train_epoch_end"][0] == "2", "hooks of the module too"
    parts = [
        float(found[name][0])
        for name in (
            "data",
            "forward",
            "backward",
            "communication",
            "step",
            "callbacks",
        )
    ]
    whole = next(
        float(line.split()[3]) for line in lines if line.startswith("all of training")
    )
    assert sum(parts) == pytest.approx(whole, abs=0.01)
    assert not any(name.startswith("SimpleProfiler") for name in found)


def test_it_changes_neither_results_nor_the_listeners_of_hooks(tmp_path):
    def trained(**options):
        torch.manual_seed(0)
        module = TinyModule()
        made = trainer(Sleeps(), max_epochs=1, **options)
        made.fit(
            module,
            list(torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(1))),
        )
        return module.layer.weight, str(made.explain(module))

    weight, listeners = trained()
    for profiler in (
        SimpleProfiler(tmp_path),
        AdvancedProfiler(tmp_path),
        PyTorchProfiler(tmp_path, row_limit=0),
    ):
        ours, explained = trained(profiler=profiler)
        assert torch.equal(ours, weight), type(profiler).__name__
        assert explained.count("Sleeps") == listeners.count("Sleeps") > 0
    assert (tmp_path / "profile-rank0.txt").read_text().startswith("part")


def test_functions(tmp_path):
    made = fit(
        batches=3,
        profiler=AdvancedProfiler(tmp_path, "functions", line_count_restriction=5),
    )
    stats = pstats.Stats(str(tmp_path / "functions-rank0.prof"))
    steps = [
        calls
        for (file, _, name), (calls, *_) in stats.stats.items()
        if name == "training_step"
    ]
    assert max(steps) == 3
    assert "function calls" in made.printed[-1]
    assert sys.getprofile() is None


def test_a_trace_with_the_parts_of_training(tmp_path):
    profiler = PyTorchProfiler(tmp_path, wait=1, warmup=1, active=2, row_limit=5)
    made = fit(Sleeps(), batches=8, profiler=profiler)
    events = json.loads((tmp_path / "profile-rank0.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    for part in ("data", "forward", "backward", "communication", "step", "callbacks"):
        assert 2 <= names.count(part) <= 4, part
    assert any(
        "aten::addmm" in str(name) or "aten::linear" in str(name) for name in names
    )
    assert "Self CPU" in made.printed[-2]
    assert "ui.perfetto.dev" in made.printed[-1]


def test_a_snapshot_of_memory_is_of_the_recorded_steps(tmp_path, monkeypatch):
    """Against stand-ins for torch's recorder, which needs CUDA (tests/gpu/test_training.py has the real one)."""
    calls, steps = [], []
    monkeypatch.setattr(profilers, "_HAS_SNAPSHOTS", "cpu")

    def record(enabled="all"):
        calls.append(("record", enabled, len(steps)))

    monkeypatch.setattr(profilers, "record_memory", record)
    monkeypatch.setattr(
        profilers,
        "save_memory_snapshot",
        lambda path: calls.append(("dump", path, len(steps))),
    )

    class Counts(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            steps.append(batch_idx)

    fit(
        Counts(),
        batches=8,
        profiler=PyTorchProfiler(
            tmp_path, wait=1, warmup=1, active=2, memory_snapshot=True
        ),
    )
    assert calls == [
        ("record", "all", 2),
        ("dump", str(tmp_path / "profile-rank0.pickle"), 4),
        ("record", None, 4),
    ]


def test_a_snapshot_of_memory_without_cuda_is_reported(tmp_path):
    made = fit(
        batches=8, profiler=PyTorchProfiler(tmp_path, row_limit=0, memory_snapshot=True)
    )
    assert (
        "memory_snapshot=True has no effect on cpu: torch records CUDA's memory"
        in made.printed
    )
    assert not list(tmp_path.glob("*.pickle"))


def test_a_run_that_ends_or_fails_while_it_is_recorded(tmp_path):
    fit(batches=3, profiler=PyTorchProfiler(tmp_path, row_limit=0))
    assert (tmp_path / "profile-rank0.json").stat().st_size > 0

    made = fit(batches=2, profiler=PyTorchProfiler(tmp_path / "none", wait=1, warmup=1))
    assert "training ended before step 3" in made.printed[-1]
    assert not (tmp_path / "none").exists()

    class Fails(Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step == 3:
                raise ValueError("stop here")

    for profiler in ("simple", "advanced", PyTorchProfiler(tmp_path / "failed")):
        with pytest.raises(ValueError, match="stop here"):
            fit(Fails(), batches=4, profiler=profiler)
        assert sys.getprofile() is None
    assert not torch.autograd._profiler_enabled()


def test_mistakes():
    with pytest.raises(ConfigurationError, match="active=0"):
        PyTorchProfiler(active=0)
    with pytest.raises(ConfigurationError, match="use wait=, warmup= and active="):
        PyTorchProfiler(schedule=None)
    with pytest.raises(ConfigurationError, match="a Chrome trace is always written"):
        PyTorchProfiler(export_to_chrome=False)
    with pytest.raises(ConfigurationError, match="did you mean 'record_shapes'"):
        PyTorchProfiler(record_shape=True)
    with pytest.raises(ConfigurationError, match="did you mean 'pytorch'"):
        trainer(profiler="pytorsh")
    with pytest.raises(ConfigurationError, match="a name or a callback"):
        trainer(profiler=BATCH)
