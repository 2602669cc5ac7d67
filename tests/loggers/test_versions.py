"""Runs that start at one time write into directories of their own."""

from __future__ import annotations

import os
from pathlib import Path

from tests.programs import Programs
from trainer_kit.loggers import CSVLogger, TensorBoardLogger
from trainer_kit.loggers.layout import claim_versions

FITS = """
import os, sys, time
from pathlib import Path
import torch
import trainer_kit as tk
from trainer_kit.loggers import CSVLogger, JSONLLogger
from trainer_kit.testing import TinyModule

root, name = Path(sys.argv[1]), os.environ["NAME"]
loggers = [CSVLogger(root / "logs"), JSONLLogger(root / "logs")]
trainer = tk.Trainer(
    logger=loggers, max_steps=2, accelerator="cpu", devices=1, log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
)
assert trainer.log_dir  # the version is chosen
(root / f"ready-{name}").touch()
while len(list(root.glob("ready-*"))) < 2:
    time.sleep(0.01)
trainer.fit(TinyModule(), list(torch.ones(4, 2, 32)))
print(*(logger.log_dir for logger in loggers))
"""

CLAIMS = """
import os, sys, time
from pathlib import Path
from trainer_kit.accelerator.run_directory import claim_version

root, name = Path(sys.argv[1]), os.environ["NAME"]
(root / f"ready-{name}").touch()
while len(list(root.glob("ready-*"))) < 3:
    pass
print(*(claim_version(root / f"project-{i}") for i in range(30)), sep=";")
"""


def run_together(programs: Programs, script: str, count: int, root: Path) -> list[str]:
    """The last line of each of several processes that wait for each other."""
    (root / "script.py").write_text(script)
    environments = [{**os.environ, "NAME": str(i)} for i in range(count)]
    ended = programs.run_together(environments, "script.py", str(root))
    assert [process.returncode for process in ended] == [0] * count, ended
    return [process.stdout.strip().splitlines()[-1] for process in ended]


def test_two_fits_that_have_chosen_the_same_version(
    tmp_path: Path, programs: Programs
) -> None:
    lines = run_together(programs, FITS, 2, tmp_path)
    directories = [line.split() for line in lines]
    assert [len(set(pair)) for pair in directories] == [1, 1]  # loggers stay together
    assert sorted(Path(first).name for first, _ in directories) == [
        "version_0",
        "version_1",
    ]
    for first, _ in directories:
        rows = (Path(first) / "metrics.csv").read_text().splitlines()
        assert len(rows) == 3
        assert len(list(Path(first).glob("run.json"))) == 1


def test_accelerators_that_start_at_one_time(
    tmp_path: Path, programs: Programs
) -> None:
    lines = run_together(programs, CLAIMS, 3, tmp_path)
    rows = [line.split(";") for line in lines]
    for claimed in zip(*rows, strict=True):
        assert sorted(claimed) == ["", "version_1", "version_2"]


def test_a_version_that_was_given_or_continued_is_kept(tmp_path: Path) -> None:
    (tmp_path / "lightning_logs" / "version_3").mkdir(parents=True)
    given = CSVLogger(tmp_path, "lightning_logs", version=3)
    continued = CSVLogger(tmp_path, "lightning_logs")
    continued.load_state_dict({"name": "lightning_logs", "version": 3})
    assert claim_versions([given, continued]) == []
    assert (given.version, continued.version) == (3, 3)


def test_loggers_of_one_experiment_move_together(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, "x"), TensorBoardLogger(tmp_path, "x")]
    assert [logger.version for logger in loggers] == [0, 0]
    (tmp_path / "x" / "version_0").mkdir(parents=True)
    [line] = claim_versions(loggers)
    assert "another run has taken version_0" in line
    assert [logger.version for logger in loggers] == [1, 1]
    assert claim_versions(loggers) == []
