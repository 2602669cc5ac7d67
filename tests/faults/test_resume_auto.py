"""The same command again and again: with ``resume="auto"`` it ends as the run that nobody disturbed."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults.supervised import Server
from tests.faults.test_kills import assert_same, said
from trainer_kit.loggers.journal import read_journal
from trainer_kit.state.records import read_records

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="orphans are adopted by prctl"
)

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import trainer_kit as tk

class Net(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

tk.seed_everything(7)
data = TensorDataset(torch.randn(26, 8), torch.arange(26) % 3)
for number in range(int(sys.argv[2])):
    module = Net()
    trainer = tk.Trainer(
        max_epochs=2, accelerator="cpu", devices=int(sys.argv[1]), log_every_n_steps=1, resume="auto",
        logger=["csv", "tensorboard"], enable_progress_bar=False, enable_model_summary=False,
        callbacks=tk.callbacks.ModelCheckpoint(every_n_train_steps=2, save_last=True),
    )
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True, num_workers=2))
    if trainer.is_global_zero:
        bits = {name: tensor.flatten().tolist() for name, tensor in module.state_dict().items()}
        best = trainer.checkpoint_callback.best_model_path
        with open(f"weights-{number}", "w") as file:
            print(bits, trainer.global_step, trainer.log_dir, best, file=file)
"""
if "KILLS" in os.environ:
    KILLS = [
        pytest.param(
            int(os.environ["KILLS"]) // 10, marks=pytest.mark.timeout(0), id="soak"
        )
    ]
    MOMENTS = [pytest.param(1, marks=pytest.mark.timeout(0), id="soak")]
else:
    KILLS, MOMENTS = [2], [17]


def scalars(directory: Path) -> dict[str, dict[int, set[float]]]:
    """What TensorBoard shows: by name and step, every different value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    found: dict[str, dict[int, set[float]]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(name, {}).setdefault(event.step, set()).add(event.value)
    return found


def outcome(root: Path) -> dict[str, Any]:
    """Everything that two executions must agree in, read back from disk."""
    runs, names = {}, {}
    for directory in sorted((root / "trainer_kit_logs").iterdir()):
        # A process that was killed between making its directory and recording it leaves an empty one.
        if not (directory / "run.json").exists():
            assert [
                path.name for path in directory.rglob("[!.]*") if not path.is_dir()
            ] == []
            continue
        (record,) = json.loads((directory / "run.json").read_text())["runs"]
        journal = [
            {k: v for k, v in line.items() if k != "time"}
            for line in read_journal(directory / "journal.jsonl")
        ]
        with open(directory / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == sorted(
            {int(row["step"]) for row in rows}
        ), "each step once"
        names[directory.name] = f"fit {len(runs)}"
        assert [one["version"] for one in record["loggers"]] == [
            int(directory.name.removeprefix("version_"))
        ] * 2
        runs[f"fit {len(runs)}"] = {
            "record": {
                name: record[name]
                for name in ("status", "ended", "step", "fit", "seed", "args")
            },
            "files": sorted(os.listdir(directory / "checkpoints")),
            "left": [name for name in os.listdir(directory) if name.startswith(".")],
            "rows": rows,
            "journal": sorted({json.dumps(line, sort_keys=True) for line in journal}),
            "scalars": scalars(directory),
        }
    weights = {
        file.name: file.read_text().replace(str(root), "")
        for file in sorted(root.glob("weights-*"))
    }
    for name, fit in names.items():
        weights = {file: text.replace(name, fit) for file, text in weights.items()}
    return {"runs": runs, "weights": weights}


@pytest.fixture(scope="module")
def undisturbed(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, int], tuple[Any, float]]:
    """By the numbers of ranks and fits: how the script ends that nobody kills, and how many seconds it takes."""

    @cache
    def run(ranks: int, fits: int) -> tuple[Any, float]:
        directory = tmp_path_factory.mktemp("undisturbed") / "run"
        answer = server.run(directory, SCRIPT, ranks, (str(fits),))
        assert answer["ended"] == [0] * ranks, said(directory)
        whole = outcome(directory)
        assert list(whole["runs"]) == [f"fit {number}" for number in range(fits)]
        assert len(whole["weights"]) == fits
        steps = {1: 14, 2: 8}[ranks]
        for run in whole["runs"].values():
            assert (
                run["record"]["status"],
                run["record"]["ended"],
                run["record"]["step"],
            ) == (
                "finished",
                True,
                steps,
            )
            assert {int(row["step"]) for row in run["rows"]} == set(range(1, steps + 1))
        return whole, answer["seconds"]

    return run


def attempt(
    server: Server, directory: Path, ranks: int, fits: int, **kill: Any
) -> bool:
    """Start the script once more. Whether it was killed before it was over."""
    ended = server.run(directory, SCRIPT, ranks, (str(fits),), **kill)["ended"]
    if (
        "hung" in ended
    ):  # killed before it came: who waits for it says so, and the launcher would end it
        missing = f"waiting for rank {kill['victim']}"
        assert missing in (directory / f"said-{ended.index('hung')}").read_text(), said(
            directory
        )
    if ranks == 1:
        assert ended[0] in (0, -signal.SIGKILL), said(directory)
    return not is_over(directory)  # a process that is killed on its way out was over


def is_over(directory: Path) -> bool:
    """Whether the script has told that it came to its end; it tells it of its first fit last."""
    found = [
        read_records(file) or []
        for file in directory.glob("trainer_kit_logs/*/run.json")
    ]
    return any(
        record.ended for records in found for record in records if record.fit == 0
    )


@pytest.mark.parametrize(
    "aimed", [False, True], ids=["at any time", "at a file operation"]
)
@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_ends_as_the_uninterrupted_one(
    server: Server,
    undisturbed: Any,
    tmp_path: Path,
    ranks: int,
    kills: int,
    aimed: bool,
) -> None:
    whole, seconds = undisturbed(ranks, 2)
    draw = random.Random(f"{ranks} {kills} {aimed}")
    directory, number, killed = tmp_path / "killed", 1, 0
    within = str(directory / "trainer_kit_logs")
    while killed < kills:
        # Killed again and again until one ends; then another one begins.
        shutil.rmtree(directory, ignore_errors=True)
        while True:
            kill: dict[str, Any] = {
                "victim": draw.randrange(ranks),
                "delay": draw.uniform(0.0, seconds),
            }
            if aimed:  # only rank 0 writes
                kill = {"point": draw.randint(1, 250), "within": within}
            was_killed = attempt(
                server, directory, ranks, 2, **(kill if killed < kills else {})
            )
            killed += was_killed
            if not was_killed:
                break
        assert_same(outcome(directory), whole, f"execution {number}\n{said(directory)}")
        number += 1


@pytest.mark.parametrize("every", MOMENTS)
def test_every_moment_around_the_record_of_a_run(
    server: Server, undisturbed: Any, tmp_path: Path, every: int
) -> None:
    whole, _ = undisturbed(1, 2)
    directory = tmp_path / "killed"
    for point in range(1, 1000, every):
        killed = attempt(server, directory, 1, 2, point=point, within="run.json")
        if killed:
            assert not attempt(server, directory, 1, 2)
        assert_same(outcome(directory), whole, f"point {point}\n{said(directory)}")
        shutil.rmtree(directory)
        if not killed:
            break
    assert point > 10, (
        "two records, each written at the beginning and at the end, and once more at the script's end"
    )


def test_killed_in_either_of_two_fits(
    server: Server, undisturbed: Any, tmp_path: Path
) -> None:
    """The first one is not trained again: its final state is loaded."""
    whole, _ = undisturbed(1, 2)
    directory = tmp_path / "killed"
    root = directory / "trainer_kit_logs"
    # In the first fit, in the second before its first checkpoint, and in the second behind one.
    for within, point in [
        ("version_0/checkpoints", 40),
        ("version_1/checkpoints", 15),
        ("version_1/checkpoints", 60),
    ]:
        assert attempt(server, directory, 1, 2, point=point, within=within), said(
            directory
        )
    assert not attempt(server, directory, 1, 2)
    lines = said(directory).splitlines()
    finished = f"resuming from step 14 (verified) of run {root / 'version_0'}, which has finished"
    assert (
        lines[0]
        == f'resume="auto": no unfinished run of script.py in {directory}: starting a new run'
    )
    assert lines.count(finished) == 2, lines
    assert lines.count("nothing to train: max_epochs=2 reached") == 2
    begun = (
        f"run {root / 'version_1'} has no checkpoint yet: starting it from the beginning; "
        "discarded 1 incomplete save "
    )
    assert any(line.startswith(begun) for line in lines), lines
    assert lines[-1].startswith("resuming from step "), lines
    assert f"(verified) of run {root / 'version_1'}" in lines[-1]
    assert_same(outcome(directory), whole)


def test_once_the_script_is_over_a_new_run_starts(
    server: Server, tmp_path: Path
) -> None:
    directory = tmp_path / "again"
    for number in (1, 2):
        assert server.run(directory, SCRIPT, 1, ("1",))["ended"] == [0], said(directory)
        assert len(os.listdir(directory / "trainer_kit_logs")) == number
    assert said(directory).count("starting a new run") == 2
