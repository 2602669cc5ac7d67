"""Programs with the calls of Accelerate's examples end with the same weights under Accelerate and after the move.

The examples themselves (``examples/by_feature``) are not in Accelerate's wheel; docs/migrate/accelerate.md has a
table of a run of all of them. This program is ours, and makes the same calls, one function for each example.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from trainer_kit.commands.main import main

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(450),
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None,
        reason="needs the package accelerate",
    ),
]

PROGRAM = '''
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    find_executable_batch_size,
    set_seed,
)

warnings.simplefilter("ignore")
torch.set_num_threads(1)
DATA = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3)


def parts(accelerator, samples=48, batch_size=4):
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 24)
    data = torch.utils.data.Subset(DATA, range(samples))
    order = torch.Generator().manual_seed(3)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, generator=order)
    evaluation = DataLoader(data, batch_size=10)
    return accelerator.prepare(model, optimizer, loader, evaluation, scheduler)


def train(accelerator, model, optimizer, loader, scheduler, sync=None):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if sync is not None:
                sync.step()


def evaluate(accelerator, model, loader):
    model.eval()
    found = []
    for x, y in loader:
        with torch.no_grad():
            found.append(accelerator.gather_for_metrics((model(x).argmax(-1), y)))
    guesses, targets = (torch.cat(column) for column in zip(*found))
    assert len(targets) == len(loader.dataset)
    return (guesses == targets).float().mean()


def run(accelerator, epochs=2, **options):
    model, optimizer, loader, evaluation, scheduler = parts(accelerator, **options)
    for epoch in range(epochs):
        train(accelerator, model, optimizer, loader, scheduler)
        evaluate(accelerator, model, evaluation)
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(model)


def gradient_accumulation():
    return run(Accelerator(cpu=True, gradient_accumulation_steps=2))


def gradient_accumulation_for_autoregressive_models():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, _, _ = parts(accelerator)
    batches = list(loader)
    for first in range(0, len(batches), 2):
        window = batches[first : first + 2]
        count = accelerator.gather(torch.tensor([sum(int((y > 0).sum()) for _, y in window)])).sum().item()
        for x, y in window:
            with accelerator.accumulate(model):
                losses = nn.functional.cross_entropy(model(x), y, reduction="none") * (y > 0)
                accelerator.backward(losses.sum() * 2 * accelerator.num_processes / count)
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def multi_process_metrics():
    return run(Accelerator(cpu=True))


def cross_validation():
    accelerator = Accelerator(cpu=True)
    folds = [run(accelerator, samples=samples, epochs=1) for samples in (16, 32)]
    accelerator.free_memory()
    return nn.ModuleList(folds)


def checkpointing():
    project = ProjectConfiguration("states", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer, loader, _, scheduler = parts(accelerator)
    train(accelerator, model, optimizer, loader, scheduler)
    accelerator.save_state()
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state("states/checkpoints/checkpoint_0")
    train(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 2), scheduler)
    return accelerator.unwrap_model(model)


def ddp_comm_hook():
    options = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return run(Accelerator(cpu=True, kwargs_handlers=[options]))


def early_stopping():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _, scheduler = parts(accelerator)
    for epoch in range(5):
        train(accelerator, model, optimizer, loader, scheduler)
        if epoch == 1 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    assert epoch == 1
    return accelerator.unwrap_model(model)


def local_sgd():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _, scheduler = parts(accelerator)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as sync:
        train(accelerator, model, optimizer, loader, scheduler, sync)
    return accelerator.unwrap_model(model)


def memory():
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=8)
    def loop(batch_size):
        accelerator.free_memory()
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")
        return run(accelerator, batch_size=batch_size)

    return loop()


def profiler():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"])])
    with accelerator.profile() as profile:
        model = run(accelerator, epochs=1)
    assert profile.key_averages()
    return model


def split_batches():
    config = DataLoaderConfiguration(split_batches=True)
    return run(Accelerator(cpu=True, dataloader_config=config))


def tracking():
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="logs")
    accelerator.init_trackers("example", config={"lr": 0.01})
    model = run(accelerator)
    accelerator.log({"accuracy": 0.5}, step=1)
    accelerator.end_training()
    return model


def short_windows():
    """Windows of two batches, of four samples each; the last batch or the last window is short."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.utils.data.Subset(DATA, range(int(sys.argv[2]))), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


FEATURES = (
    gradient_accumulation,
    gradient_accumulation_for_autoregressive_models,
    multi_process_metrics,
    cross_validation,
    checkpointing,
    ddp_comm_hook,
    early_stopping,
    local_sgd,
    memory,
    profiler,
    split_batches,
    tracking,
)
if __name__ == "__main__":
    features = FEATURES if len(sys.argv) == 2 else (short_windows,)
    weights = {feature.__name__: feature().state_dict() for feature in features}
    if Accelerator(cpu=True).is_main_process:
        torch.save(weights, sys.argv[1])
'''


def ended(
    programs: Any, place: Path, moved: bool, count: int, *words: str, own: bool = False
) -> dict[str, dict[str, torch.Tensor]]:
    """The end weights of each function of the program, before or after the move; with our own rule for windows."""
    place.mkdir()
    os.chdir(place)  # programs write here; the test's `monkeypatch` goes back
    script = place / "program.py"
    script.write_text(PROGRAM, "utf-8")
    if moved:
        result = CliRunner().invoke(main, ["migrate", str(script), "--write"])
        assert result.output.count("keeps Accelerate's division") == 3
        assert "3 findings" in result.output
        text = script.read_text("utf-8")
        assert "accelerate" not in text
        script.write_text(
            text.replace(", fixed_divisor=True", "") if own else text, "utf-8"
        )
    given = (script, str(place / "end.pt"), *words)
    runs = (
        programs.run_ranks(count, *given, timeout=200)
        if count > 1
        else [programs.run(*given, timeout=200)]
    )
    for one in runs:
        assert one.returncode == 0, one.stdout[-2000:] + one.stderr[-4000:]
    found: dict[str, dict[str, torch.Tensor]] = torch.load(place / "end.pt")
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_moved_script_trains_to_the_weights_of_accelerate(
    count: int, programs: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = (
        ended(programs, tmp_path / str(moved), moved, count) for moved in (False, True)
    )
    assert len(theirs) == 12
    for feature, weights in theirs.items():
        torch.testing.assert_close(
            ours[feature], weights, rtol=0, atol=1e-7, msg=feature
        )


@pytest.mark.parametrize("samples", [20, 14])
def test_the_last_window_is_that_of_accelerate_or_a_mean_over_its_samples(
    samples: int, programs: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """20 samples: the last window has one batch. 14: the last of its two batches has two samples of four."""
    monkeypatch.chdir(tmp_path)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))[:samples]
    y = (torch.arange(48) % 3)[:samples]

    def plain(mean_of_samples: bool) -> torch.nn.Linear:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for start in range(0, samples, 8):
            window = [
                (x[at : at + 4], y[at : at + 4])
                for at in range(start, min(start + 8, samples), 4)
            ]
            total = sum(len(targets) for _, targets in window)
            for inputs, targets in window:
                share = len(targets) / total if mean_of_samples else 1 / 2
                (
                    torch.nn.functional.cross_entropy(model(inputs), targets) * share
                ).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    for moved, own in ((False, False), (True, False), (True, True)):
        place = tmp_path / f"{moved} {own}"
        weights = ended(programs, place, moved, 1, str(samples), own=own)[
            "short_windows"
        ]
        torch.testing.assert_close(
            weights, dict(plain(own).state_dict()), rtol=0, atol=1e-7
        )
        assert not torch.allclose(
            weights["weight"], plain(not own).weight, rtol=0, atol=1e-5
        )
