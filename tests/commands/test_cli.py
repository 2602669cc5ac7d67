"""`tk.cli`: training scripts as real processes, configured by options and files."""

from __future__ import annotations

import json
import os
import stat
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import trainer_kit as tk
from trainer_kit.testing import TinyModule

pytestmark = pytest.mark.slow  # programs are started

SCRIPT = '''
import json
import os
import sys
import torch
from torch.utils.data import DataLoader
import trainer_kit as tk
from trainer_kit.commands.arguments import Arguments
from trainer_kit.testing import TinyModule


class Data(tk.DataModule):
    def __init__(self, batch_size: int = 4, api_key: str = "") -> None:
        super().__init__()
        self.batch_size, self.api_key = batch_size, api_key

    def loader(self):
        return DataLoader(torch.ones(16, 32), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class Wide(TinyModule):
    """A module of another shape."""

    def __init__(self, width: int = 3, **kwargs) -> None:
        super().__init__(**kwargs)
        self.width = width


def run(words):
    mode = {"subclass_mode_model": True} if "CHOOSE" in os.environ else {}
    ran = tk.cli(TinyModule, Data, trainer_defaults={"enable_progress_bar": False}, args=words, **mode)
    found = {
        "command": ran.command,
        "step": ran.trainer.global_step,
        "epochs": ran.trainer.settings.max_epochs,
        "world": ran.trainer.world_size,
        "callbacks": [type(callback).__name__ for callback in ran.trainer.callbacks],
        "loggers": [type(logger).__name__ for logger in ran.trainer.loggers],
        "module": type(ran.module).__name__,
        "lr": ran.module.lr,
        "optimizers": [[type(one).__name__, one.defaults["lr"]] for one in ran.trainer.optimizers],
        "schedulers": [
            [type(one.scheduler).__name__, one.interval, one.monitor] for one in ran.trainer.lr_scheduler_configs
        ],
        "width": getattr(ran.module, "width", None),
        "key": ran.datamodule.api_key,
        "weight": ran.module.layer.weight.sum().item(),
        "directory": str(ran.trainer.run_dir),
        "result": ran.result if ran.command != "predict" else [list(part.shape) for part in ran.result],
    }
    if ran.trainer.is_global_zero:
        print("FOUND", json.dumps(found))


def each_line(act):
    for line in sys.stdin:
        try:
            act(json.loads(line))
        except SystemExit as leaving:
            print("LEFT", leaving.code, file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["each"]:
        each_line(run)
    elif sys.argv[1:2] == ["read"]:
        # The options of all commands are found once for all lines, which takes most of the time of a line.
        choose = "CHOOSE" in os.environ
        each_line(Arguments(TinyModule, Data, choose_model=choose, choose_data=False, trainer_defaults={}).parse)
    else:
        run(None)
'''
QUIET = ["--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]


@pytest.fixture
def script(tmp_path, programs):
    (tmp_path / "train.py").write_text(SCRIPT)

    def call(*words, choose=False, lines="", anew=False):
        environment = {**os.environ, "CHOOSE": "1"} if choose else os.environ
        return programs.run(
            "train.py",
            *map(str, words),
            environment=environment,
            given=lines,
            anew=anew,
        )

    return call


def found(done):
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def several(script, cases, **options):
    """What several command lines of one process did."""
    lines = "".join(f"{json.dumps([str(word) for word in words])}\n" for words in cases)
    done = script("each", lines=lines, **options)
    ran = [
        json.loads(line[6:])
        for line in done.stdout.splitlines()
        if line.startswith("FOUND ")
    ]
    assert (done.returncode, len(ran)) == (0, len(cases)), done.stderr
    return ran


def refusals(script, cases, mode="read", **options):
    """What each command line is answered with; none may leave with anything but 2.

    With the mode ``each``, objects are made as well: what their constructors refuse is not seen by reading alone.
    """
    done = script(
        mode, lines="".join(f"{json.dumps(words)}\n" for words in cases), **options
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    parts = done.stderr.split("LEFT ")
    assert [part.split("\n")[0] for part in parts[1:]] == ["2"] * len(cases)
    return [part.removeprefix("2\n").strip() for part in parts[:-1]]


@pytest.mark.slow
def test_options_are_saved_in_a_configuration_file(script, tmp_path):
    options = [
        "--trainer.max_epochs=2",
        "--data.batch_size=8",
        "--model.lr=0.25",
        "--seed_everything=5",
    ]
    callbacks = [
        "--trainer.callbacks+=LearningRateMonitor",
        "--trainer.callbacks+=EarlyStopping",
    ]
    more = [
        "--trainer.callbacks.monitor=val_loss",
        "--trainer.logger=csv",
        "--data.api_key=hush",
    ]
    first = found(script("fit", *QUIET, *options, *callbacks, *more))
    assert (first["step"], first["epochs"], first["lr"], first["key"]) == (
        4,
        2,
        0.25,
        "hush",
    )
    assert {"LearningRateMonitor", "EarlyStopping"} <= set(first["callbacks"])

    kept = Path(first["directory"]) / "config.yaml"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "hush" not in kept.read_text()
    configuration = yaml.safe_load(kept.read_text())
    assert configuration["trainer"]["max_epochs"] == 2
    assert configuration["model"] == {"lr": 0.25}
    assert configuration["data"] == {"batch_size": 8, "api_key": "***"}
    assert configuration["seed_everything"] == 5

    checkpoint = tk.checkpoints(Path(first["directory"]) / "checkpoints")[-1].path
    test = [
        "test",
        "--config",
        kept,
        "--ckpt_path",
        checkpoint,
        "--trainer.logger=false",
    ]
    again, tested = several(script, [["fit", "--config", kept], test])
    assert again["directory"] != first["directory"]
    assert {**again, "directory": "", "key": ""} == {
        **first,
        "directory": "",
        "key": "",
    }

    assert tested["command"] == "test"
    assert tested["weight"] == first["weight"]
    assert tested["result"][0]["test_loss"] > 0


@pytest.mark.slow
def test_print_config_prints_an_equivalent_file(script, tmp_path):
    options = [
        "--trainer.max_steps=3",
        "--trainer.logger=false",
        "--trainer.callbacks=Timer",
        "--model.lr=0.5",
    ]
    printed = script("fit", *QUIET, *options, "--print_config")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "mine.yaml").write_text(printed.stdout)
    file, fewer = "--config=mine.yaml", "--trainer.max_steps=1"
    once, twice, *rest = several(
        script,
        [
            ["fit", *QUIET, *options],
            ["fit", file],
            ["fit", file, fewer],
            ["fit", fewer, file],
        ],
    )
    assert once == twice
    assert once["step"] == 3
    assert [one["step"] for one in rest] == [
        1,
        3,
    ]  # the later word wins, in either direction


def test_a_subclass_by_class_path(script, tmp_path):
    ways = {
        "bare.yaml": {
            "model": {"class_path": "Wide", "init_args": {"width": 7, "lr": 0.5}}
        },
        "full.yaml": {
            "model": {
                "class_path": "__main__.Wide",
                "init_args": {"width": 7, "lr": 0.5},
            }
        },
    }
    for name, content in ways.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
    rest = [*QUIET, "--trainer.fast_dev_run=true"]
    option = ["fit", "--model=Wide", "--model.width=7", "--model.lr=0.5", *rest]
    *by_file, by_option = several(
        script,
        [*(["fit", "--config", name, *rest] for name in ways), option],
        choose=True,
    )
    assert by_file == [by_option] * 2
    assert (by_option["module"], by_option["width"], by_option["lr"]) == (
        "Wide",
        7,
        0.5,
    )
    assert not (tmp_path / "config.yaml").exists()  # fast_dev_run writes nothing


@pytest.mark.slow
def test_parts_by_class_path_and_every_verb(script, tmp_path):
    (tmp_path / "parts.yaml").write_text(
        yaml.safe_dump(
            {
                "trainer": {
                    "strategy": {
                        "class_path": "trainer_kit.strategies.SingleDeviceStrategy",
                        "init_args": {"device": "cpu"},
                    },
                    "precision": "bf16-mixed",
                    "logger": [
                        {
                            "class_path": "trainer_kit.loggers.CSVLogger",
                            "init_args": {"save_dir": "logs"},
                        }
                    ],
                    "enable_checkpointing": False,
                    "enable_model_summary": False,
                    "max_epochs": 1,
                }
            }
        )
    )
    cases = [
        [verb, "--config=parts.yaml"] for verb in ("fit", "validate", "test", "predict")
    ]
    ran = several(script, cases)
    assert [one["command"] for one in ran] == ["fit", "validate", "test", "predict"]
    assert all(one["loggers"] == ["CSVLogger"] for one in ran)
    assert list(ran[1]["result"][0]) == ["val_loss"]
    assert ran[3]["result"] == [[4, 2]] * 4


@pytest.mark.long
def test_two_processes_from_a_file_write_one_configuration(script, tmp_path):
    (tmp_path / "two.yaml").write_text(
        "trainer: {devices: 2, accelerator: cpu, max_epochs: 1, logger: csv}\n"
    )
    ran = found(
        script(
            "fit",
            "--config=two.yaml",
            "--trainer.enable_model_summary=false",
            anew=True,
        )
    )
    assert (ran["world"], ran["step"]) == (2, 2)
    assert [path.name for path in tmp_path.rglob("config*.yaml")] == ["config.yaml"]
    assert Path(ran["directory"], "config.yaml").is_file()


@pytest.mark.slow
def test_existing_files_are_never_replaced(script, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "trainer: {max_steps: 2, logger: false, enable_model_summary: false}\n"
    )
    before = (tmp_path / "config.yaml").read_bytes()
    cases = [["fit", "--config=config.yaml", *QUIET]] * 2 + [
        ["fit", "--config=config.yaml", "--model.lr=1", *QUIET]
    ]
    several(script, cases)
    assert (tmp_path / "config.yaml").read_bytes() == before
    # The same configuration twice is one file.
    assert sorted(path.name for path in tmp_path.glob("*.yaml")) == [
        "config-2.yaml",
        "config-3.yaml",
        "config.yaml",
    ]


OPTION = {
    "--trainer.max_epoch=3": "max_epoch: unknown option, did you mean '--trainer.max_epochs'?",
    "--trainer.max_epochs=a": "max_epochs: expected int or null, found a",
    "--trainer.barebones=maybe": "barebones: expected bool, found maybe",
    "--trainer.callbacks=EarlyStoping": "callbacks: no class is called 'EarlyStoping', did you mean 'EarlyStopping'?",
    "--trainer.callbacks=Earliest": "callbacks: no class is called 'Earliest'; write package.module.Class",
    "--trainer.callbacks=EarlyStopping": "callbacks: trainer_kit.callbacks.EarlyStopping needs monitor",
    "--trainer.callbacks=torch.nn.Linear": "callbacks: torch.nn.Linear is not a subclass of Callback",
    '--trainer.callbacks={"class_path":"Timer","init_args":{"duraton":1}}': "callbacks: trainer_kit.callbacks.Timer "
    "does not take 'duraton', did you mean 'duration'?",
}
WRONG = [
    *(
        (["fit", option], f"train.py fit: --trainer.{said}")
        for option, said in OPTION.items()
    ),
    (["fit", "--model.lr=x"], "train.py fit: --model.lr: expected float, found x"),
    (["fit", "--model.lr"], "train.py fit: --model.lr: expected one argument"),
    (
        ["fit", "--seed_everything=x"],
        "train.py fit: --seed_everything: expected int or bool, found x",
    ),
    (["fit", "3"], "train.py fit: 3: unexpected"),
    (
        ["--config=a.yaml", "fit"],
        "train.py fit: --config: options go after the command: fit, validate, test, predict",
    ),
    (["fi"], "train.py: fi: unknown command, did you mean 'fit'?"),
    ([], "train.py: a command is missing: fit, validate, test, predict; see --help"),
]


def test_a_wrong_call_is_one_line(script):
    assert refusals(script, [words for words, _ in WRONG]) == [
        line for _, line in WRONG
    ]


def test_an_error_of_the_trainer_prints_no_traceback(script):
    cases = [
        ["fit", "--trainer.logger=cvs"],
        ["fit", "--trainer.precision=3"],
        ["fit", "--trainer.strategy=dpd"],
    ]
    said = refusals(script, cases, mode="each")
    assert [text.splitlines()[0] for text in said] == [
        "no logger is called 'cvs'",
        "unknown precision '3'",
        "no strategy is called 'dpd'",
    ]
    assert ["did you mean 'csv'?" in said[0], "did you mean 'ddp'?" in said[2]] == [
        True,
        True,
    ]


def test_a_wrong_choice_of_a_class_is_one_line(script):
    cases = {
        (): "required",
        ("--model=Wid",): "no class is called 'Wid', did you mean 'Wide'?",
        (
            "--model=Wide",
            "--model.wdth=3",
        ): "__main__.Wide does not take 'wdth', did you mean 'width'?",
        ("--model=Wide", "--model.width=x"): "width: expected int, found x",
        (
            "--model=no.such.Class",
        ): "no.such.Class cannot be imported: No module named 'no'",
        ("--model=torch.nn.Linear",): "torch.nn.Linear is not a subclass of TinyModule",
    }
    said = refusals(script, [["fit", *options] for options in cases], choose=True)
    assert said == [f"train.py fit: --model: {line}" for line in cases.values()]


FLAT = "[&a [" + ", ".join("1" * 9) + "]"
for _old, _new in pairwise("abcdefg"):
    FLAT += f", &{_new} [" + ", ".join([f"*{_old}"] * 9) + "]"
FLAT += "]"
BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 9)
)
STOPPING = "trainer:\n  callbacks:\n  - class_path: EarlyStopping\n"
FILES = {
    "trainer:\n  max_epoch: 3\n": ":2: trainer.max_epoch: unknown key, did you mean 'trainer.max_epochs'?",
    "trainr:\n  max_epochs: 3\n": ":1: trainr: unknown key, did you mean 'trainer'?",
    "data:\n\n  batch_size: x\n": ":3: data.batch_size: expected int, found x",
    STOPPING + "    init_args: {monitor: a,\n      patiense: 3}\n": ":5: "
    "trainer.callbacks: trainer_kit.callbacks.EarlyStopping does not take 'patiense', did you mean 'patience'?",
    STOPPING + "    init_args:\n      monitor: a\n      patience: x\n": ":6: "
    "trainer.callbacks: patience: expected int, found x",
    "trainer:\n  max_epochs: [1\n": ":3: this is not YAML: expected ',' or ']', but got '<stream end>'",
    "trainer:\n  max_epochs: 1\n  max_epochs: 2\n": ":3: max_epochs: given twice",
    "trainer:\n  max_epochs: !!python/object/apply:os.mkdir [made]\n": ":2: "
    "!!python/object/apply:os.mkdir: this tag is not supported; choose a class with class_path",
    "- 1\n": ":1: the top level must map keys to values",
    "data: " + "[" * 60 + "]" * 60 + "\n": ":1: nested deeper than 50 levels",
    BOMB: ":4: more than 2000 values, aliases written out",
    '"\\UFFFFFFFF": 1\n': ":1: this is not YAML: cannot be read: Python int too large to convert to C int",
    "optimzer: {}\n": ":1: optimzer: unknown key, did you mean 'optimizer'?",
    "trainer:\n  max_epoch: {a: {}}\n": ":2: trainer.max_epoch: unknown key, did you mean 'trainer.max_epochs'?",
    STOPPING + "    init_args:\n      monitor: a\n      patiense: {}\n": ":6: "
    "trainer.callbacks: EarlyStopping does not take 'patiense', did you mean 'patience'?",
    "#" * 1_000_001: ": larger than 1000 kB, the limit for a configuration file",
}


def test_a_wrong_file_is_one_line_with_its_place(script, tmp_path):
    for number, content in enumerate(FILES):
        (tmp_path / f"{number}.yaml").write_text(content)
    cases = [["fit", f"--config={number}.yaml"] for number in range(len(FILES))]
    said = refusals(script, [*cases, ["fit", "--config", "none.yaml"]])
    assert said[:-1] == [
        f"{number}.yaml{line}" for number, line in enumerate(FILES.values())
    ]
    assert said[-1] == "none.yaml: the file does not exist"
    assert not (tmp_path / "made").exists()


class Loose(TinyModule):
    """A module with an argument of any kind, and one that is a mapping."""

    def __init__(
        self, part: Any = None, names: dict[str, Any] | None = None, lr: float = 0.1
    ) -> None:
        super().__init__(lr)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--model.names={a: " + FLAT + "}"],
            "--model.names: more than 2000 values, aliases written out",
        ),
        (
            ["--model.part", FLAT],
            "--model.part: more than 2000 values, aliases written out",
        ),
        (["--model.lr", "[" * 3000], "--model.lr: nested deeper than 50 levels"),
        (
            ["--model.part={class_path: pathlib.Path, init_args: {}}"],
            "--model.part: 'part' of Loose has no type, so no class is made for it; annotate it with one",
        ),
        (
            [
                "--trainer.callbacks={class_path: EarlyStopping, init_args: {monitor: a, patiense: {}}}"
            ],
            "--trainer.callbacks: EarlyStopping does not take 'patiense', did you mean 'patience'?",
        ),
    ],
)
def test_values_that_would_do_harm_or_nothing_are_refused(
    words, said, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as caught:
        tk.cli(Loose, args=["fit", *words])
    assert (caught.value.code, capsys.readouterr().err) == (
        2,
        f"train.py fit: {said}\n",
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{mod: default}", "did you mean 'mode'?"),
        ("{backend: nonsense}", "Invalid backend: 'nonsense'"),
    ],
)
def test_wrong_arguments_of_compile_are_reported_before_anything_runs(
    options, said, capsys
):
    with pytest.raises(SystemExit) as caught:
        tk.cli(
            Loose,
            args=["fit", f"--trainer.compile={options}", "--trainer.barebones=true"],
        )
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "seconds"), [("false", float("inf")), ("90", 90.0), ("5min", 300.0)]
)
def test_a_file_sets_every_form_of_the_hang_timeout(value, seconds, tmp_path):
    """A value that the documentation names, as YAML reads it: `false` is no text."""

    class Loaded(TinyModule):
        def train_dataloader(self):
            return [torch.ones(2, 32)]

    (tmp_path / "run.yaml").write_text(
        f"trainer: {{hang_timeout: {value}, barebones: true, max_epochs: 1, accelerator: cpu}}"
    )
    assert (
        tk.cli(
            Loaded, args=["fit", f"--config={tmp_path}/run.yaml"]
        ).trainer.hang_timeout
        == seconds
    )


MUTATE = r"""
import contextlib, io, random, sys, time
sys.argv = ["train.py"]
from train import Data, TinyModule
from trainer_kit.commands.arguments import Arguments

arguments = Arguments(TinyModule, Data, choose_model=False, choose_data=False, trainer_defaults={})
base = open("base.yaml").read()
draw = random.Random(3)
pieces = ["[", "]", "{", "}", "!!python/name:os.system", "&a", "*a", "<<: *a", ": ", "- ", "\t", "\n", "\0", "\x1b[31m"]
pieces += ["~", "'", "|", "%", "@", "---", "? ", "!foo ", "1e999", "2026-01-01"]
pieces += ["class_path: os.system", "init_args: {cmd: ls}"]
refused = 0
for turn in range(300):
    text = base
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, length = draw.randrange(len(text)), draw.randrange(1, 30)
        kind = draw.randrange(3)
        piece = ["", draw.choice(pieces), text[length:][:40]][kind]
        text = text[:at] + piece + text[at + (length if kind == 0 else 0):]
    with open("mutated.yaml", "w") as file:
        file.write(text)
    said, began = io.StringIO(), time.process_time()  # of the processor: others may keep it busy
    try:
        with contextlib.redirect_stderr(said):
            parsed = arguments.parse(["fit", "--config=mutated.yaml"])
            parsed.parser.dump(parsed.values, skip_unset=False)
    except SystemExit as leaving:
        line = said.getvalue()
        refused += 1
        assert (leaving.code, line.count("\n"), line[:-1].isprintable()) == (2, 1, True), (text, line)
        assert line.startswith("mutated.yaml"), (text, line)
        assert len(line) < 600, line
    assert time.process_time() - began < 1, text
print("refused", refused)
"""


@pytest.mark.long
def test_mutated_files_are_read_or_refused_in_a_line(script, tmp_path, programs):
    (tmp_path / "mutate.py").write_text(MUTATE)
    listing = script("fit", "--print_config").stdout
    part = "callbacks:\n  - class_path: EarlyStopping\n    init_args:\n      monitor: val_loss\n      patience: 3\n"
    (tmp_path / "base.yaml").write_text(listing.replace("callbacks: null\n", part))
    done = programs.run("mutate.py")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 100


def test_a_value_under_a_secret_name_is_not_shown(script, tmp_path):
    text = (
        (tmp_path / "train.py")
        .read_text()
        .replace('api_key: str = ""', "api_key: int = 0")
    )
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "key.yaml").write_text("data: {api_key: hunter2}\n")
    said = refusals(
        script, [["fit", "--data.api_key=hunter2"], ["fit", "--config=key.yaml"]]
    )
    assert said == [
        "train.py fit: --data.api_key: expected int, found ***",
        "key.yaml:1: data.api_key: expected int, found ***",
    ]


def test_a_wrong_call_leaves_with_2_and_help_with_0(script):
    wrong = script("fit", "--trainer.max_epoch=3")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    (listed, helped) = script("--help"), script("fit", "--help")
    assert listed.returncode == 0
    assert len(listed.stdout.splitlines()) < 25
    assert "One linear layer with every step and no data" in listed.stdout
    assert "Example" not in listed.stdout
    assert helped.returncode == 0
    assert "--trainer.max_epochs" in helped.stdout
    assert "default 1000 if no other limit is set" in " ".join(helped.stdout.split())
    assert "--model.lr" in helped.stdout


def test_the_users_own_mistake_keeps_its_traceback(script, tmp_path):
    text = (
        (tmp_path / "train.py")
        .read_text()
        .replace("self.batch_size, self.api_key =", "1 / 0 #")
    )
    (tmp_path / "train.py").write_text(text)
    done = script("fit")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_the_optimizer_and_the_scheduler_are_named_in_place_of_code(script, tmp_path):
    """Options, a file as Lightning's command line writes it, and what a run leaves behind."""
    (tmp_path / "named.yaml").write_text(
        "optimizer:\n  class_path: torch.optim.SGD\n  init_args: {lr: 0.25, momentum: 0.5}\n"
        "lr_scheduler:\n  class_path: ReduceLROnPlateau\n  init_args: {patience: 1}\nlr_scheduler_monitor: val_loss\n"
    )
    quiet = ["fit", *QUIET, "--trainer.max_epochs=1"]
    scheduled = [
        "--lr_scheduler=StepLR",
        "--lr_scheduler.step_size=1",
        "--lr_scheduler_interval=step",
    ]
    options = [
        "--trainer.logger=csv",
        "--optimizer",
        "AdamW",
        "--optimizer.lr=0.5",
        *scheduled,
    ]
    cases = [[*quiet, *options], [*quiet, "--config=named.yaml"], quiet]
    one, file, own = several(script, cases)
    assert (one["optimizers"], one["schedulers"]) == (
        [["AdamW", 0.5]],
        [["StepLR", "step", None]],
    )
    assert file["optimizers"] == [["SGD", 0.25]]
    assert file["schedulers"] == [["ReduceLROnPlateau", "epoch", "val_loss"]]
    assert (own["optimizers"], own["schedulers"]) == ([["SGD", own["lr"]]], [])
    left = [f"--config={one['directory']}/config.yaml", "--trainer.logger=false"]
    again, _ = several(script, [["fit", *left], ["test", *left]])
    assert all(
        again[name] == one[name] for name in ("optimizers", "schedulers", "weight")
    )
    assert (
        "--optimizer is used: TinyModule.configure_optimizers is not called"
        in script(*quiet, *options).stdout
    )

    wrong = {
        "--optimizer=AdamX": "train.py fit: --optimizer: no class is called 'AdamX', did you mean 'Adam'?",
        "--optimizer=SGD --optimizer.lrr=1": "does not take 'lrr', did you mean 'lr'?",
        "--optimizer=SGD --lr_scheduler=StepLR": "StepLR needs step_size",
        "--lr_scheduler=StepLR --lr_scheduler.step_size=1": "--lr_scheduler needs --optimizer",
        "--optimizer=SGD --lr_scheduler=ReduceLROnPlateau": "ReduceLROnPlateau needs --lr_scheduler_monitor",
    }
    for said, expected in zip(
        refusals(script, [[*quiet, *words.split()] for words in wrong], mode="each"),
        wrong.values(),
        strict=True,
    ):
        assert expected in said


class Keeps(TinyModule):
    def configure_callbacks(self) -> Any:
        return [tk.callbacks.ModelCheckpoint()]

    def train_dataloader(self) -> Any:
        return [torch.ones(2, 32)]


def test_a_checkpoint_callback_of_the_module_counts_for_the_configuration(
    tmp_path: Path,
) -> None:
    quiet = [
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
    ]
    tk.cli(
        Keeps,
        args=["fit", "--trainer.max_steps=1", "--trainer.accelerator=cpu", *quiet],
    )
    assert [path.name for path in tmp_path.rglob("config*.yaml")] == ["config.yaml"]
