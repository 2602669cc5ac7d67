"""Scripts in the form that Accelerate's own guides teach, as real processes: only the import is another.

What they print was the same under Accelerate itself on one process, and on two but for where this library is meant to
differ: local steps are optimizer steps, and dropout is resumed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer_kit import set_seed
from trainer_kit.checkpoint import verify_checkpoint

pytestmark = pytest.mark.slow  # programs are started

GUIDES = Path(__file__).parent / "guides"


ALL = [
    "quicktour",
    "accumulation",
    "accumulation_of_tokens",
    "tracking",
    "local_sgd",
    "big_batch",
    "execution",
]


def run(programs, processes, script, *words):
    """What the first of the processes printed."""
    ran = (
        programs.run_ranks(processes, script, *words)
        if processes > 1
        else [programs.run(script, *words)]
    )
    for process in ran:
        assert process.returncode == 0, process.stdout + process.stderr
    return ran[0].stdout


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def guides(request, tmp_path_factory, programs):
    """Every guide, one after the other in the same processes: (number of processes, directory, what each printed)."""
    directory = tmp_path_factory.mktemp("guides")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        said = run(programs, request.param, GUIDES / "all.py", *ALL)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return request.param, directory, dict(zip(ALL, lines, strict=True))


def test_quicktour(guides):
    processes, _, said = guides
    found = said["quicktour"]
    set_seed(0)
    x = torch.randn(45, 6)
    y = (x.sum(1) > 0).long()
    model = nn.Linear(6, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, step_size=5, gamma=0.5)
    # On two processes the last batch, of five samples, is filled up from the start.
    order = list(range(45)) + ([0, 1, 2] if processes == 2 else [])
    for _ in range(2):
        for start in range(0, 45, 8):
            at = order[start : start + 8]
            sgd.zero_grad()
            nn.functional.cross_entropy(model(x[at]), y[at]).backward()
            sgd.step()
            for _ in range(processes):
                schedule.step()
    torch.testing.assert_close(
        torch.tensor(found["weights"]), model.weight.detach().flatten()
    )
    assert found["right"] == int((model(x).argmax(1) == y).sum())
    assert found["seen"] == 45
    assert found["rate"] == schedule.get_last_lr()[0]


def test_gradient_accumulation(guides):
    found = guides[2]["accumulation"]
    assert found == {
        "with": pytest.approx(2.04),
        "without": pytest.approx(2.04),
        "syncs": [False] * 3 + [True],
    }


def test_accumulation_over_samples_of_different_lengths(guides):
    processes, _, said = guides
    found = said["accumulation_of_tokens"]
    assert found["tokens"] == {1: 36, 2: 136}[processes]
    assert found["with"] == pytest.approx(found["without"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_checkpointing(processes, tmp_path, programs):
    """Another process goes on from the middle of an epoch, and ends as the first did, to the bit."""
    script = GUIDES / "checkpointing.py"
    whole = run(programs, processes, script, "run")
    names = sorted(
        path.name for path in (tmp_path / "project" / "checkpoints").iterdir()
    )
    assert names == ["checkpoint_0", "checkpoint_1"]
    for name in names:
        verify_checkpoint(tmp_path / "project" / "checkpoints" / name)
    assert run(programs, processes, script, "resume") == whole
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_tracking(guides):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    processes, directory, said = guides
    found = said["tracking"]
    steps = {1: 8, 2: 4}[processes]
    assert found == {"steps": steps, "mine": "mine"}
    config, *lines = [
        json.loads(line)
        for line in (directory / "some_run_name.jsonl").read_text().splitlines()
    ]
    assert config["config"]["loss_function"] == "MSELoss()"
    assert [line["step"] for line in lines] == list(range(steps))
    files = list((directory / "example_project").glob("events.out.tfevents.*"))
    assert len(files) == 1, "one process writes"
    events = EventAccumulator(str(directory / "example_project"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("training_loss")]
    assert shown == [
        (line["step"], pytest.approx(line["training_loss"])) for line in lines
    ]
    assert "note/text_summary" in events.Tags()["tensors"]


def local_sgd(processes):
    """By hand: each process trains its own copy on its own batches, and after two steps they are averaged."""
    set_seed(0)
    x, y = torch.randn(64, 3), torch.randn(64, 1)
    torch.manual_seed(0)
    torch.randn(64, 3), torch.randn(64, 1)
    first = nn.Linear(3, 1)
    models = [nn.Linear(3, 1) for _ in range(processes)]
    for model in models:
        model.load_state_dict(first.state_dict())
    every, micro = 2, 4 * processes
    windows = 64 // (2 * micro)
    for window in range(windows):
        for rank, model in enumerate(models):
            model.zero_grad()
            for i in range(2):
                start = (2 * window + i) * micro + rank * 4
                (
                    nn.functional.mse_loss(
                        model(x[start : start + 4]), y[start : start + 4]
                    )
                    / 2
                ).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        if (window + 1) % every == 0 or window + 1 == windows:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
    return models[0].weight.detach().flatten().tolist()


def test_local_sgd(guides):
    processes, _, said = guides
    found = said["local_sgd"]
    assert found["spread"] == 0
    assert found["weights"] == pytest.approx(local_sgd(processes), rel=1e-5)


def test_big_batch_search(guides):
    """Each try starts anew, also where memory ran out in the middle of a window."""
    processes, _, said = guides
    found = said["big_batch"]
    assert found["tried"] == {1: [16, 8, 4], 2: [8, 4]}[processes]
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    set_seed(0)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in x.split(16):
        sgd.zero_grad()
        nn.functional.mse_loss(model(batch), torch.ones(16, 1)).backward()
        sgd.step()
    assert found["weights"] == pytest.approx(
        model.weight.detach().flatten().tolist(), rel=1e-5
    )


def test_deferring_execution(guides):
    processes, _, said = guides
    found = said["execution"]
    mine = {1: 3, 2: 2}[processes]
    assert found["said"] == [True, "main", "first", True, False, mine]
    assert found["reduced"] == [1.0 * processes, 2.0 * processes]
    assert found["only_last"] == ("last" if processes == 1 else None)
