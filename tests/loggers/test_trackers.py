"""Every experiment tracker, in processes of their own: what it wrote is read back.

Where a tracker's package is not installed, a stand-in of `tracker_stand_ins` records the calls, or writes the files
that the tracker would write; its functions have the published signatures, and
`test_the_stand_ins_have_the_signatures` compares them where the package is there.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from trainer_kit.build import choose_loggers
from trainer_kit.core.errors import ConfigurationError, LogError
from trainer_kit.loggers.layout import flatten
from trainer_kit.loggers.media import picture

pytestmark = pytest.mark.timeout(
    700
)  # a fixture runs two programs, of 300 seconds at most each
HERE = Path(__file__).parent
STAND_INS = HERE / "tracker_stand_ins"
WORDS = ["mlflow", "comet_ml", "clearml", "trackio", "swanlab", "dvclive", "aim"]
RECORDED = {
    "comet_ml",
    "clearml",
    "trackio",
    "swanlab",
    "aim",
}  # by their stand-ins; the others write their files
CLASSES = {
    "mlflow": "MLFlowLogger",
    "comet_ml": "CometLogger",
    "clearml": "ClearMLLogger",
    "trackio": "TrackioLogger",
    "swanlab": "SwanLabLogger",
    "dvclive": "DVCLiveLogger",
    "aim": "AimLogger",
}
REAL = {word for word in WORDS if importlib.util.find_spec(word) is not None}


def stood_in(words: Any) -> list[Any]:
    """Those that are not installed; if there are none, a case that says so."""
    hidden = pytest.mark.skip(
        reason="all these packages are installed, and hide their stand-ins"
    )
    return sorted(set(words) - REAL) or [pytest.param("", marks=hidden)]


def size(file: Any) -> tuple[int, int]:
    """Of a picture: width and height."""
    with Image.open(file) as image:
        return image.size


@dataclass
class Found:
    """What a tracker holds: values in the order they were written, everything else by name."""

    runs: list[str] = field(default_factory=list)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    images: list[tuple[int, int]] = field(default_factory=list)
    texts: str = ""
    files: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    ended: int = 0

    def add(self, name: str, step: int, value: float) -> None:
        self.metrics.setdefault(name, []).append((step, value))

    def keep(self, root: Path) -> None:
        """Every file below ``root``."""
        for file in sorted(root.rglob("*")):
            if file.suffix in (".png", ".jpeg"):
                self.images.append(size(file))
            elif file.is_file() and file.suffix not in (".safetensors", ".zip"):
                self.files[file.relative_to(root).as_posix()] = file.read_text(
                    errors="replace"
                )


def from_events(root: Path) -> Found:
    found = Found()
    for event in map(
        json.loads, (root / "tracker_calls.jsonl").read_text().splitlines()
    ):
        kind = event["kind"]
        if kind == "begin":
            found.runs.append(event["run"])
            assert event["project"] in ("project", None)  # Aim names it once
            assert event["name"] in ("first", "train", "made-up-0", None)
        elif kind == "metric":
            found.add(event["name"], event["step"], event["value"])
        elif kind == "params":
            found.params.update(flatten(event["params"]))
        elif kind == "image":
            found.images.append(tuple(event["size"]))
            assert event["step"] == 6
        elif kind == "text":
            found.texts += event["text"]
        elif kind == "file" and isinstance(event["content"], dict):
            found.files.update(
                {
                    f"{event['name']}/{name}": text
                    for name, text in event["content"].items()
                }
            )
        elif kind == "file":
            found.files[event["name"]] = event["content"]
        elif kind == "other":
            found.others[event["name"]] = event["value"]
        elif kind == "end":
            found.ended += 1
        else:
            found.others[kind] = event
    root = root / "logs" / "project" / str(found.runs[0])
    if root.exists():
        found.keep(root)
    return found


def from_mlflow(root: Path) -> Found:
    found, database = Found(), sqlite3.connect(root / "logs" / "mlflow.db")
    for id, name, status in database.execute("SELECT run_uuid, name, status FROM runs"):
        found.runs.append(id)
        assert name == "first"
        found.others["status"] = {
            "FINISHED": "success",
            "FAILED": "failed",
            "KILLED": "interrupted",
        }[status]
    for key, step, value in database.execute(
        "SELECT key, step, value FROM metrics ORDER BY rowid"
    ):
        found.add(key, step, value)
    texts = dict(database.execute("SELECT key, value FROM params"))
    found.params = {
        **texts,
        "lr": float(texts["lr"]),
        "optim/betas": ast.literal_eval(texts["optim/betas"]),
    }
    assert ("kind", "tiny") in list(database.execute("SELECT key, value FROM tags"))
    database.close()
    found.keep(root / "logs" / "mlartifacts" / found.runs[0] / "artifacts")
    found.texts = found.files["text/note/00000006.txt"]
    return found


def from_dvclive(root: Path) -> Found:
    found, live = Found(["first"]), root / "logs" / "dvclive"
    for file in (live / "plots" / "metrics").rglob("*.tsv"):
        header, *lines = file.read_text().splitlines()
        assert header.split("\t") == ["step", file.stem]
        for line in lines:
            step, value = line.split("\t")
            found.add(
                file.relative_to(live / "plots" / "metrics").with_suffix("").as_posix(),
                int(step),
                float(value),
            )
    found.params = flatten(yaml.safe_load((live / "params.yaml").read_text()))
    found.keep(live / "artifacts")
    found.images = [size(file) for file in (live / "plots" / "images").rglob("*.png")]
    found.texts = found.files["text/note/00000006.txt"]
    return found


def from_comet(root: Path) -> Found:
    found = Found()
    for archive in sorted(
        (root / "logs").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns
    ):
        with zipfile.ZipFile(archive) as content:
            found.runs.append(json.loads(content.read("experiment.json"))["offline_id"])
            for message in map(
                json.loads, content.read("messages.json").decode().splitlines()
            ):
                payload = message["payload"]
                if message["type"] == "metric_msg" and not payload["metric"][
                    "metricName"
                ].startswith("sys."):
                    metric = payload["metric"]
                    found.add(
                        metric["metricName"], metric["step"], metric["metricValue"]
                    )
                elif message["type"] == "parameter_msg":
                    one = payload.get("param") or payload["params"]  # a list
                    if one["source"] == "manual":
                        found.params[one["paramName"].replace("|", "/")] = one[
                            "paramValue"
                        ]
                elif message["type"] == "file_upload":
                    more, path = payload["additional_params"], payload["file_path"]
                    if payload["upload_type"] == "visualization":
                        with content.open(path) as file:
                            found.images.append(size(file))
                    elif payload["upload_type"] == "text-sample":
                        found.texts += content.read(path).decode()
                    elif payload["upload_type"] == "asset":
                        found.files[more["fileName"]] = content.read(path).decode(
                            errors="replace"
                        )
    found.ended = len(found.runs)
    return found


def from_clearml(root: Path) -> Found:
    found = Found()
    for folder in sorted(
        (root / "cache" / "offline").glob("offline-*/"),
        key=lambda path: path.stat().st_mtime_ns,
    ):
        if not folder.is_dir():
            continue
        task = json.loads((folder / "task.json").read_text())
        found.runs.append(task["id"])
        assert (task["project_name"], task["name"]) == ("project", "first")
        for name, one in task["hyperparams"]["General"].items():
            value = one["value"]
            found.params[name] = (
                json.loads(value) if one["type"] in ("list", "float") else value
            )
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            for event in json.loads(line):
                if event["type"] == "training_stats_scalar" and not event[
                    "metric"
                ].startswith(":"):
                    title, series = event["metric"], event["variant"]
                    found.add(
                        series if title == series else f"{title}/{series}",
                        event["iter"],
                        event["value"],
                    )
                elif event["type"] == "plot":
                    found.others[
                        "histogram" if event["metric"] == "weights" else "table"
                    ] = event
        found.keep(folder / "data")
        found.texts += (folder / "log.jsonl").read_text()
        found.ended += Path(f"{folder}.zip").exists()
    found.runs.sort(key=lambda id: id == found.params["continues"], reverse=True)
    return found


def from_trackio(root: Path) -> Found:
    found, database = Found(), sqlite3.connect(root / "trackio" / "project.db")
    for name, config in database.execute("SELECT run_name, config FROM configs"):
        found.runs.append(name)
        found.params.update(
            flatten(
                {k: v for k, v in json.loads(config).items() if not k.startswith("_")}
            )
        )
    for step, metrics in database.execute(
        "SELECT step, metrics FROM metrics ORDER BY rowid"
    ):
        for name, value in json.loads(metrics).items():
            if isinstance(value, (int, float)):
                found.add(name, step, value)
            elif value["_type"] == "trackio.markdown":
                found.texts += value["_value"]
            else:
                found.others[value["_type"].removeprefix("trackio.")] = value
    database.close()
    found.images = [size(file) for file in (root / "trackio" / "media").rglob("*.png")]
    found.files = {
        str(file): file.read_text(errors="replace")
        for file in (root / "trackio").rglob("*")
        if file.is_file()
    }
    return found


READERS: dict[str, Callable[[Path], Found]] = {
    "mlflow": from_mlflow,
    "comet_ml": from_comet,
    "clearml": from_clearml,
    "trackio": from_trackio,
    "dvclive": from_dvclive,
}


@dataclass
class Run:
    """What the two programs left behind."""

    word: str
    root: Path
    real: bool
    version: str
    resumed: str
    found: Found

    @property
    def recorded(self) -> bool:
        return not self.real and self.word in RECORDED


def variables(real: bool, root: Path) -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COMET_", "CLEARML_", "MLFLOW_"))
    }
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    places = {
        "HOME": str(root),
        "TRACKIO_DIR": str(root / "trackio"),
        "CLEARML_CACHE_DIR": str(root / "cache"),
    }
    return {
        **clean,
        **nowhere,
        **places,
        "HF_HUB_OFFLINE": "1",
        "STAND_INS": "" if real else str(STAND_INS),
    }


def ran(programs, word: str, phase: str, root: Path, real: bool) -> None:
    before = os.getcwd()
    os.chdir(root)
    try:
        done = programs.run(
            HERE / "tracked_run.py",
            word,
            phase,
            environment=variables(real, root),
            timeout=300,
        )
    finally:
        os.chdir(before)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(word, marks=pytest.mark.long if word in REAL else pytest.mark.slow)
        for word in WORDS
    ],
)
def run(request, programs, tmp_path_factory) -> Run:
    word = request.param
    root, real = tmp_path_factory.mktemp(word), word in REAL
    if real and word not in READERS:
        pytest.skip(
            f"only {word}'s own program reads its files: its stand-in is tested where it is not installed"
        )
    ran(programs, word, "first", root, real)
    ran(programs, word, "resumed", root, real)
    found = READERS[word](root) if real or word not in RECORDED else from_events(root)
    versions = [(root / f"{phase}-0.txt").read_text() for phase in ("first", "resumed")]
    return Run(word, root, real, *versions, found)


def test_fit_validate_and_test_write_one_run_and_keep_each_others_values(run):
    metrics = run.found.metrics
    assert metrics["train/at"] == [(step, step - 1.0) for step in range(1, 10)]
    assert metrics["val/score"] == [(3, 13.0), (6, 16.0), (6, 16.0), (9, 19.0)]
    assert metrics["test/score"] == [(6, 26.0)]
    assert metrics["shared"] == [(3, 1.0), (6, 1.0), (6, 1.0), (6, 2.0), (9, 1.0)]
    assert len(metrics["train_loss"]) == 9
    continues = run.found.params.get("continues")
    if run.word in ("clearml", "swanlab"):  # they cannot continue an offline run
        assert set(run.found.runs) == {run.version, run.resumed}
        assert continues == run.version != run.resumed
    else:
        assert set(run.found.runs) == {run.version} == {run.resumed}
        assert continues is None


def test_no_process_of_the_tracker_outlives_its_work(run):
    # ClearML's default is to fork its reporter while it starts other programs: some of those starts then never return.
    for phase in ("first", "resumed"):
        assert (run.root / f"{phase}-children.txt").read_text() == ""


def test_hyperparameters_are_nested_plain_and_masked(run):
    params = {
        name.removeprefix("General/"): value
        for name, value in run.found.params.items()
        if name != "continues"
    }
    betas = params.pop("optim/betas")
    assert (
        json.loads(betas.replace("'", '"')) if isinstance(betas, str) else betas
    ) == [
        0.5,
        "Infinity",
    ]
    assert params == {"lr": 0.25, "optim/name": "sgd", "api_key": "***"}
    assert "hidden" not in "".join(
        path.read_text(errors="replace") for path in run.root.rglob("*.jsonl")
    )


def test_media_are_read_back_from_each_tracker(run):
    found, native = run.found, run.found.others
    assert sorted(found.images) == [(6, 2), (8, 4), (8, 4), (8, 4)]
    assert "a sentence" in found.texts
    histogram = found.files.get("histograms/weights/00000006.json")
    if histogram is not None:
        assert json.loads(histogram) == {
            "step": 6,
            "counts": [1, 2],
            "edges": [0.0, 0.5, 1.0],
        }
    elif run.recorded:
        assert native["histogram"].get("counts", [1, 2]) == [1, 2]
        assert native["histogram"].get("values", [0.0, 1.0, 1.0]) == [0.0, 1.0, 1.0]
    table = found.files.get("tables/answers/00000006.csv")
    if table is not None:
        assert table == "id,text\n1,yes\n2,no\n"
    elif run.recorded:
        assert native["table"]["rows"] == [["id", "text"], [1, "yes"], [2, "no"]]
    else:
        assert "table" in native


def test_files_and_checkpoints_are_kept(run):
    files = {name.replace("/", "-"): text for name, text in run.found.files.items()}
    if run.word in ("trackio", "clearml") and run.real:  # they have names of their own
        assert {"kept", "inside"} <= set(files.values()) or run.word == "clearml"
        return
    assert (files["things-renamed.txt"], files["folder-inside.txt"]) == (
        "kept",
        "inside",
    )
    kept = {
        name.split("-step-")[1][:8]
        for name in files
        if name.startswith("checkpoints-step-")
    }
    assert kept == {"00000003", "00000006", "00000009"} or run.word in (
        "aim",
        "swanlab",
    )
    assert kept >= {"00000003", "00000006"}


def test_a_run_that_succeeded_is_ended(run):
    assert run.found.others.get("status", "success") == "success"
    if run.recorded or run.word in ("comet_ml", "clearml"):
        assert run.found.ended == len(run.found.runs)


# -- without programs --------------------------------------------------------------------------------------------------


@pytest.fixture(params=stood_in(WORDS))
def missing(request, monkeypatch):
    return request.param


def test_a_missing_package_is_answered_with_the_line_for_pip(missing):
    extra = "comet" if missing == "comet_ml" else missing
    with pytest.raises(
        ConfigurationError, match=f"{CLASSES[missing]} needs {missing}"
    ) as caught:
        choose_loggers(missing, "root")
    assert caught.value.fix == f"pip install 'trainer-kit[{extra}]'"


def test_trackers_given_by_name_write_to_the_root_directory():
    pytest.importorskip("wandb")
    (logger,) = choose_loggers("wandb", "root")
    assert (logger.save_dir, logger._init["name"]) == ("root", None)


def test_neptune_has_ended():
    with pytest.raises(ImportError, match="Neptune ended its service"):
        from trainer_kit.loggers import NeptuneLogger  # noqa: F401


RANKS = """
import os, sys
sys.path.insert(0, os.environ["STAND_INS"])
import torch
import trainer_kit as tk
from trainer_kit.testing import TinyModule
from trainer_kit.loggers import CometLogger

class Model(TinyModule):
    def training_step(self, batch, batch_idx):
        self.log("at", float(self.global_step))
        self.logger.log_text("note", f"rank {self.trainer.global_rank}")
        return super().training_step(batch, batch_idx)

logger = CometLogger(project="project", online=False)
trainer = tk.Trainer(max_epochs=1, logger=logger, log_every_n_steps=1, strategy="ddp", devices=2, accelerator="cpu",
                     enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer.fit(Model(), [torch.randn(2, 32) for _ in range(4)])
"""


@pytest.mark.slow
def test_only_rank_zero_writes(programs, tmp_path, monkeypatch):
    if "comet_ml" in REAL:
        pytest.skip("the installed package hides the stand-in that this test reads")
    monkeypatch.setenv("STAND_INS", str(STAND_INS))
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    for done in programs.run_ranks(2, script):
        assert done.returncode == 0, done.stdout + done.stderr
    events = [
        json.loads(line)
        for line in (tmp_path / "tracker_calls.jsonl").read_text().splitlines()
    ]
    assert [event["run"] for event in events if event["kind"] == "begin"] == [
        events[0]["run"]
    ]
    assert [
        (event["step"], event["value"]) for event in events if event.get("name") == "at"
    ] == [
        (1, 0.0),
        (2, 1.0),
    ]
    assert {event["text"] for event in events if event["kind"] == "text"} == {"rank 0"}


ENDS = """
import os, sys
sys.path.insert(0, os.environ["STAND_INS"])
from trainer_kit.loggers import CometLogger, MLFlowLogger, SwanLabLogger

first, second = CometLogger(online=False, project="project"), CometLogger(online=False, project="project")
first.log_metrics({"a": 1.0}, 0)
first.finalize("success")
first.log_metrics({"a": 2.0}, 1)  # the run is still open
first.finalize("success")
second.log_metrics({"a": 3.0}, 0)  # ends the first, which waits for a next entry point
first.log_metrics({"a": 4.0}, 2)  # continues it: the second is in use, and stays open
second.finalize("failed")
first.finalize("interrupted")

given = SwanLabLogger(run=__import__("swanlab").Run("mine"))
given.log_metrics({"b": 1.0}, 0)
given.finalize("failed")
"""


@pytest.mark.slow
def test_when_runs_end(programs, tmp_path, monkeypatch):
    if {"comet_ml", "swanlab"} & REAL:
        pytest.skip("the installed package hides the stand-in that this test reads")
    monkeypatch.setenv("STAND_INS", str(STAND_INS))
    done = programs.run_code(ENDS)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [
        json.loads(line)
        for line in (tmp_path / "tracker_calls.jsonl").read_text().splitlines()
    ]
    first, second = dict.fromkeys(event["run"] for event in events[:-1])
    short = {first: "first", second: "second", "mine": "mine"}
    seen = [
        (short[event["run"]], event["kind"], event.get("value")) for event in events
    ]
    assert seen == [
        ("first", "begin", None),
        ("first", "metric", 1.0),
        ("first", "metric", 2.0),
        ("first", "other", "success"),
        ("first", "end", None),
        ("second", "begin", None),
        ("second", "metric", 3.0),
        ("first", "begin", None),
        ("first", "metric", 4.0),
        ("second", "other", "failed"),
        ("second", "end", None),
        ("first", "other", "interrupted"),
        ("first", "end", None),
        ("mine", "metric", 1.0),
    ]


ACCELERATOR = """
import os, sys
sys.path.insert(0, os.environ["STAND_INS"])
import numpy as np
import torch
from trainer_kit import Accelerator

word = sys.argv[1]
options = {"comet_ml": {"online": False}, "clearml": {"offline": True}, "swanlab": {"mode": "offline"}}.get(word, {})
accelerator = Accelerator(cpu=True, log_with=word, project_dir="logs")
config = {"lr": 0.25, "optim": {"name": "sgd", "betas": [0.5]}}
accelerator.init_trackers("project", config=config, init_kwargs={word: options})
for step in range(3):
    accelerator.log({"loss": torch.tensor(1.0 / (step + 1)), "nested": {"at": step}}, step=step)
accelerator.log({"note": "text"}, step=3)
tracker = accelerator.get_tracker(word)
tracker.log_images({"pictures": np.zeros((2, 4, 8, 3), np.uint8)}, step=6)
assert accelerator.get_tracker(word, unwrap=True) is tracker.logger.experiment
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize("word", stood_in(RECORDED | {"dvclive"}))
def test_the_trackers_of_an_accelerator_are_the_same(
    programs, tmp_path, monkeypatch, word
):
    monkeypatch.setenv("STAND_INS", str(STAND_INS))
    script = tmp_path / "accelerator.py"
    script.write_text(ACCELERATOR)
    done = programs.run(script, word)
    assert done.returncode == 0, done.stdout + done.stderr
    if word == "dvclive":
        (tsv,) = (tmp_path / "logs").rglob("loss.tsv")
        assert [line.split("\t")[1] for line in tsv.read_text().splitlines()[1:]] == [
            "1.0",
            "0.5",
            str(float(torch.tensor(1 / 3))),
        ]
        return
    found = from_events(tmp_path)
    assert found.metrics["loss"] == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    assert found.metrics["nested/at"] == [(0, 0), (1, 1), (2, 2)]
    assert found.images == [(8, 4), (8, 4)]
    assert "text" in found.texts
    params = {
        name.removeprefix("General/"): value for name, value in found.params.items()
    }
    assert params == {"lr": 0.25, "optim/name": "sgd", "optim/betas": [0.5]}


@pytest.mark.long
@pytest.mark.parametrize("word", sorted(REAL))
def test_the_stand_ins_have_the_signatures(word):
    """In programs: a package that is imported here would leave its threads and hooks behind."""
    code = f"""
import importlib, inspect, json
module = importlib.import_module({word!r})
answer = {{}}
def note(name, function):
    try:
        answer[name] = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        pass
for name in dir(module):
    one = getattr(module, name)
    if inspect.isclass(one):
        note(name, one.__init__)
        for method, function in inspect.getmembers(one, callable):
            note(f"{{name}}.{{method}}", function)
    elif callable(one):
        note(name, one)
print("ANSWER" + json.dumps(answer))
"""
    answers = []
    for paths in ([], [str(STAND_INS)]):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
        line = next(
            line for line in done.stdout.splitlines() if line.startswith("ANSWER")
        )
        answers.append(json.loads(line.removeprefix("ANSWER")))
    real, stand_in = answers
    compared, made_by_the_tracker = (
        0,
        {"Logger", "Task", "CometExperiment"} | ({"Run"} if word != "aim" else set()),
    )
    for name, parameters in stand_in.items():
        if name in real and name not in made_by_the_tracker and "._" not in name:
            assert parameters == [one for one in real[name] if one in parameters], name
            compared += 1
    assert compared


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        (torch.tensor([[[1.0]], [[0.5]], [[0.0]]]), (255, 128, 0)),
        (torch.tensor([[[200]], [[100]], [[0]]], dtype=torch.uint8), (200, 100, 0)),
        (torch.full((1, 1, 1), 0.25, dtype=torch.bfloat16), 64),
        (torch.tensor([[True]]), 255),
        (np.array([[[1.0, float("nan"), 2.0]]]), (255, 0, 255)),
        (np.full((1, 1), 7, np.int64), 7),
        (Image.new("RGB", (1, 1), (1, 2, 3)), (1, 2, 3)),
    ],
)
def test_pictures_of_every_kind(image, pixel):
    made = picture(image)
    assert made.size == (1, 1)
    assert made.getpixel((0, 0)) == pixel


def test_objects_that_are_not_images_are_refused(tmp_path):
    Image.new("L", (3, 2)).save(tmp_path / "a.png")
    assert picture(tmp_path / "a.png").size == (3, 2)
    for wrong in (
        torch.zeros(2, 3, 3, 3),
        torch.zeros(5, 4, 4),
        np.array("x"),
        None,
        np.zeros((2, 2), complex),
    ):
        with pytest.raises(LogError, match="expected an image"):
            picture(wrong)


def test_the_loggers_have_the_arguments_of_their_frameworks():
    from trainer_kit import loggers

    named = {
        "MLFlowLogger": "experiment_name run_name tracking_uri tags save_dir log_model prefix "
        "artifact_location run_id synchronous",
        "CometLogger": "api_key workspace project experiment_key mode online prefix",
        "DVCLiveLogger": "run_name prefix log_model experiment",
        "AimLogger": "repo experiment train_metric_prefix val_metric_prefix test_metric_prefix run_name run_hash",
        "SwanLabLogger": "project workspace experiment_name log_dir mode save_dir id",
    }
    for name, arguments in named.items():
        own = list(inspect.signature(getattr(loggers, name)).parameters)
        assert own[: len(arguments.split())] == arguments.split()
