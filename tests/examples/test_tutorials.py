"""Every tutorial shows what its page says, and its page is made of the script that ran."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.examples.conftest import EXAMPLES, Run
from tests.examples.test_examples import number
from tests.programs import Programs
from trainer_kit.launch.processes import local_environment

ROOT = EXAMPLES.parent
GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_tutorials.py"))
PICTURES = runpy.run_path(str(ROOT / "docs" / "draw" / "tutorials.py"))
SIZES = [
    pytest.param(["--small"], marks=pytest.mark.slow),
    pytest.param([], marks=pytest.mark.long),
]


def curve(said: str, name: str) -> list[float]:
    """The logged values of the run whose report is named, in order; the report has them too."""
    (report,) = re.findall(r"curves: (\S+/report\.html)", said)
    assert f'"{name}"' in Path(report).read_text(encoding="utf-8")
    lines = (
        (Path(report).parent / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    )
    records = [json.loads(line) for line in lines]
    return [record[name] for record in records if name in record]


def picture(name: str) -> Image.Image:
    """A picture that a tutorial wrote; it shows more than one color."""
    image = Image.open(name).convert("L")
    low, high = image.getextrema()
    assert high - low > 100
    return image


@pytest.mark.parametrize("size", SIZES)
def test_the_text_classifier_learns_what_a_bag_of_words_cannot(
    size: list[str], run: Run
) -> None:
    said = run("tutorials/text_classifier", *size)
    assert (
        number(r"(\d+) reviews to train on", said)
        > 5 * number(r"(\d+) to validate", said)
        > 0
    )
    assert number(r"(\d+) to test; one: \('the ", said) > 0
    assert number(r"test accuracy ([\d.]+)", said) > (0.9 if size else 0.95)
    assert number(r"bag of words ([\d.]+)", said) < 0.6
    positive, negative = (
        number(rf"([\d.]+)  the music was never {word}", said)
        for word in ("tedious", "funny")
    )
    assert positive > 0.5 > negative
    assert len(curve(said, "val_acc")) >= 3


@pytest.mark.parametrize("size", SIZES)
def test_the_forecast_is_better_than_the_naive_one(size: list[str], run: Run) -> None:
    said = run("tutorials/time_series", *size)
    error, naive = (
        number(r"absolute error ([\d.]+)", said),
        number(r"naive forecast ([\d.]+)", said),
    )
    assert error < (0.95 if size else 0.9) * naive
    assert re.search(
        r"stopped after step \d+: val_mae_unseen = \S+ has not improved", said
    )
    assert len(curve(said, "val_mae")) == len(curve(said, "val_mae_unseen")) >= 5
    assert picture("forecast.png").width > 300


@pytest.mark.slow
def test_a_pretrained_network_needs_fewer_labels(run: Run) -> None:
    said = run("tutorials/transfer_learning")
    scratch, frozen, tuned = (
        number(rf"{name}: accuracy ([\d.]+) on 857 images", said)
        for name in ("from scratch", "frozen backbone", "fine-tuned")
    )
    assert frozen > scratch + 0.08
    assert tuned > scratch + 0.08


@pytest.mark.parametrize("size", SIZES)
def test_drawn_digits_are_recognized(size: list[str], run: Run) -> None:
    said = run("tutorials/diffusion", *size)
    assert number(r"recognized: ([\d.]+) of 200", said) > (0.8 if size else 0.95)
    losses = curve(said, "train_loss")
    assert losses[-1] < losses[0] / 2
    assert picture("diffusion.png").size == (12 * 10 * 4, 10 * 10 * 4)


@pytest.mark.slow
def test_the_policy_learns_to_balance_the_pole(run: Run) -> None:
    said = run("tutorials/reinforce")
    assert number(r"stands: (\d+) before", said) < 60
    assert number(r"(\d+) after training", said) > 150
    rewards = curve(said, "reward")
    assert rewards[0] < 40
    assert sum(rewards[-3:]) / 3 > 3 * rewards[0]


RESULT = re.compile(r"world size (\d): loss ([\d.]+), accuracy ([\d.]+)")
CLUSTER = EXAMPLES / "tutorials" / "notebook_to_cluster.py"
BARE = {
    name: value for name, value in os.environ.items() if not name.startswith("SLURM")
}


def result(said: str) -> tuple[int, float, float]:
    found = RESULT.findall(said)
    assert len(found) == 1, said
    return int(found[0][0]), float(found[0][1]), float(found[0][2])


@pytest.mark.slow
def test_the_cells_run_in_a_notebook(programs: Programs) -> None:
    """One after the other in one namespace, without a file."""
    code = [
        body
        for text, body in GENERATOR["cells"](CLUSTER.read_text(encoding="utf-8"))
        if not text
    ]
    assert len(code) == 2
    script = "import sys\nsys.argv[1:] = ['-f', 'kernel.json']\nspace = {'__name__': '__main__'}\n"
    script += f"for cell in {code!r}:\n    exec(compile(cell, 'cell', 'exec'), space)\n"
    ran = programs.run_code(script)
    assert ran.returncode == 0, ran.stderr
    assert result(ran.stdout)[0] == 1
    assert result(ran.stdout)[2] > 0.9
    accuracies = curve(ran.stdout, "val_acc")
    assert accuracies[-1] == pytest.approx(result(ran.stdout)[2], abs=1e-4)


def run_plainly(*flags: str, launcher: tuple[str, ...] = (), **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, str(CLUSTER), *flags],
        env={**BARE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert ran.returncode == 0, (
        f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    )
    return ran.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        ((), ("--devices", "2")),
        (("-m", "torch.distributed.run", "--nproc-per-node", "2"), ()),
        (("-m", "trainer_kit", "launch", "--cpu", "--num_processes", "2"), ()),
    ],
)
def test_two_processes_train_the_same_model(
    launcher: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    processes, loss, accuracy = result(
        run_plainly("--accelerator", "cpu", *flags, launcher=launcher)
    )
    assert processes == 2
    assert accuracy > 0.9
    # Dropout draws on each rank, so losses agree in distribution only.
    assert loss == pytest.approx(result(run_plainly("--root", "one"))[1], abs=0.05)


@pytest.mark.long
def test_the_tasks_of_a_job_find_each_other() -> None:
    """With the variables that srun sets for two tasks on one machine."""
    shared = {**BARE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    port = local_environment(2)["MASTER_PORT"]
    shared |= {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NNODES": "1",
    }
    shared |= {
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
    }
    shared |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(CLUSTER), "--accelerator", "cpu"],
            env={**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    said = [task.communicate(timeout=115)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert result(said[0])[0] == 2
    assert not RESULT.search(said[1])


@pytest.mark.long
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = result(run_plainly("--root", "whole", "--epochs", "20"))
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(CLUSTER),
        "--root",
        "parts",
        "--epochs",
        "20",
    ]
    environment = {**BARE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as killed:
        for _ in polls():
            if killed.poll() is not None or list(
                tmp_path.glob("parts/**/checkpoints/step-*")
            ):
                break
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, "it ended before it could be killed"
    said = run_plainly("--root", "parts", "--epochs", "20")
    assert re.search(r"resuming from step \d+", said)
    assert result(said) == whole


def polls(seconds: float = 100.0) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.005)


@pytest.mark.parametrize("name", GENERATOR["TUTORIALS"])
def test_its_page_is_current(name: str) -> None:
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    assert page.read_text(encoding="utf-8") == GENERATOR["render"](name), (
        "the script changed: run `make docs`"
    )


def test_every_tutorial_has_a_page_that_is_listed() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md")} - {
        "index"
    }
    assert pages == set(GENERATOR["TUTORIALS"])
    scripts = {
        script for _, scripts in GENERATOR["TUTORIALS"].values() for script in scripts
    }
    assert {
        f"examples/tutorials/{path.name}"
        for path in (EXAMPLES / "tutorials").glob("*.py")
    } <= scripts
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == pages


def test_every_picture_of_a_page_is_drawn_by_the_command() -> None:
    pages = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "docs" / "tutorials").glob("*.md")
    ]
    shown = set(re.findall(r"\]\(\.\./pictures/([^)]+\.png)\)", "\n".join(pages)))
    assert shown == set(PICTURES["PLOTS"].values())
    recipe = (
        (ROOT / "Makefile")
        .read_text(encoding="utf-8")
        .partition("\npictures:")[2]
        .partition("\n\n")[0]
    )
    assert set(re.findall(r"docs/draw/\w+\.py", recipe)) == {
        f"docs/draw/{x.name}" for x in (ROOT / "docs" / "draw").glob("*.py")
    }


@pytest.mark.long
@pytest.mark.parametrize("name", PICTURES["PLOTS"])
def test_the_command_keeps_what_the_script_wrote(name: str, tmp_path: Path) -> None:
    drawn = PICTURES["draw"](name, "--small", into=tmp_path)
    assert drawn == tmp_path / PICTURES["PLOTS"][name]
    checked_in = ROOT / "docs" / "pictures" / drawn.name
    assert picture(str(drawn)).size == picture(str(checked_in)).size


def test_cells_of_a_script() -> None:
    source = '"""Head."""\n\n# %% [markdown]\n# Text\n#\n#     code in it\n\n# %%\na = 1\n\n\n# %%\nb = 2  # %%\n'
    assert GENERATOR["cells"](source) == [
        (True, "Head."),
        (True, "Text\n\n    code in it"),
        (False, "a = 1"),
        (False, "b = 2  # %%"),
    ]
