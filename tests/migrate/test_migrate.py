"""`trainer-kit migrate`: what it rewrites, that the result trains, and what it reports of code that will not move."""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from trainer_kit.commands.main import main

SCRIPT = """
import torch
import lightning as L
import lightning.pytorch as pl   # two names of one package
from lightning import Trainer, pytorch as again
from lightning.pytorch.callbacks import (
    Callback,  # a comment that stays
    EarlyStopping,
)


class Count(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.seen += len(batch[0])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.seen = 0
        self.layer = torch.nn.Linear( 3,1 )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
module = Net()
data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
trainer = L.pytorch.Trainer(max_epochs=3, callbacks=[Count(), EarlyStopping("loss")], barebones=False,
                            logger=False, enable_checkpointing=False, accelerator="cpu", devices=1,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
assert again.Trainer is pl.Trainer is L.Trainer is Trainer
"""


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["migrate", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def report_of(text: str, tmp_path: Path, name: str = "code.py") -> list[str]:
    """The lines of the report on one file, ``LINE: problem`` and fixes, without the summary."""
    file = tmp_path / name
    file.write_text(text)
    _, output = call(file, "--check")
    lines = output.splitlines()
    *found, _summary = lines[:-1] if lines[-1].startswith("write the files") else lines
    return [line.partition(f"{name}:")[2] or line.strip() for line in found]


def migrated(text: str, tmp_path: Path) -> str:
    """A file's text after ``--write``, which finds nothing more to rewrite or to report."""
    file = tmp_path / "code.py"
    file.write_text(text)
    call(file, "--write")
    assert call(file, "--check")[0] == 0
    return file.read_text()


@pytest.mark.slow
def test_a_script_trains_after_the_move(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, output = call(tmp_path)
    assert code == 0
    assert "-import lightning as L\n" in output
    assert "+import trainer_kit as L\n" in output
    assert script.read_text() == SCRIPT
    assert call(tmp_path, "--check")[0] == 1

    code, output = call(tmp_path, "--write")
    assert (code, output) == (
        0,
        "1 file read, 1 rewritten; 6 of 6 imported names exist here; 0 findings\n",
    )
    moved = script.read_text()
    assert "lightning" not in moved
    kept = [
        line
        for line in SCRIPT.splitlines()
        if "lightning" not in line and "L.pytorch" not in line
    ]
    assert [line for line in moved.splitlines() if line in kept] == kept
    assert "trainer = L.Trainer(max_epochs=3, " in moved

    module = runpy.run_path(str(script))["module"]
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    x, y = torch.randn(32, 3), torch.randn(32, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for start in [*range(0, 32, 8)] * 3:
        optimizer.zero_grad()
        nn.functional.mse_loss(
            layer(x[start : start + 8]), y[start : start + 8]
        ).backward()
        optimizer.step()
    assert module.seen == 96
    assert torch.equal(module.layer.weight, layer.weight)
    assert call(tmp_path, "--check")[0] == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import pytorch_lightning\npytorch_lightning.Trainer()",
            "import trainer_kit\ntrainer_kit.Trainer()",
        ),
        (
            "import lightning.pytorch\nx = lightning.pytorch.Trainer",
            "import trainer_kit\nx = trainer_kit.Trainer",
        ),
        (
            "import lightning.pytorch.callbacks as c, os",
            "import trainer_kit.callbacks as c, os",
        ),
        ("from lightning import pytorch", "import trainer_kit as pytorch"),
        ("from lightning import pytorch as pl", "import trainer_kit as pl"),
        (
            "from lightning import pytorch as pl, Trainer",
            "from trainer_kit import pytorch as pl, Trainer",
        ),
        (
            "from pytorch_lightning.callbacks import *",
            "from trainer_kit.callbacks import *",
        ),
        (
            "from accelerate import Accelerator as A",
            "from trainer_kit import Accelerator as A",
        ),
        (
            "import accelerate\nf(accelerate=1)\nx.accelerate",
            "import trainer_kit\nf(accelerate=1)\nx.accelerate",
        ),
        ("patch('pytorch_lightning.Trainer.fit')", "patch('trainer_kit.Trainer.fit')"),
        (
            "'lightning.pytorch.nothing.like.this'",
            "'lightning.pytorch.nothing.like.this'",
        ),
        (
            "from lightning_utilities import core",
            "from lightning_utilities import core",
        ),
        (
            "from .lightning import x\nimport mylightning",
            "from .lightning import x\nimport mylightning",
        ),
        (
            "try:\n import accelerate\nexcept ImportError:\n accelerate = None\naccelerate and accelerate.go()",
            "try:\n import trainer_kit\nexcept ImportError:\n trainer_kit = None\ntrainer_kit and trainer_kit.go()",
        ),
        (
            "import accelerate\ndef f(accelerate, *, g=accelerate):\n return accelerate.go()",
            "import trainer_kit\ndef f(accelerate, *, g=trainer_kit):\n return accelerate.go()",
        ),
        (
            "def f():\n import accelerate\n accelerate.go()\ndef g():\n accelerate = 1\n return accelerate",
            "def f():\n import trainer_kit\n trainer_kit.go()\ndef g():\n accelerate = 1\n return accelerate",
        ),
        (
            "import accelerate\nclass A:\n accelerate = 3\n def f(self): accelerate.go(accelerate=self.accelerate)",
            "import trainer_kit\nclass A:\n accelerate = 3\n def f(self): trainer_kit.go(accelerate=self.accelerate)",
        ),
        (
            "def g():\n import accelerate\ndef accelerate(): pass\naccelerate()",
            "def g():\n import trainer_kit\ndef accelerate(): pass\naccelerate()",
        ),
        (
            "import lightning as L\ndef f(L): return L.pytorch, L.fabric\nL.pytorch.go(), L().pytorch, L[0].fabric",
            "import trainer_kit as L\ndef f(L): return L.pytorch, L.fabric\nL.go(), L().pytorch, L[0].fabric",
        ),
        ("try:\r\n\timport lightning as L\r\nexcept ImportError:\r\n\tL=None", None),
    ],
)
def test_python_that_is_rewritten(
    before: str, after: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "code.py"
    file.write_bytes(before.encode())
    call(file, "--write")
    assert file.read_bytes().decode() == (
        before.replace("lightning", "trainer_kit") if after is None else after
    )


def test_a_file_keeps_its_coding_and_mode(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_bytes(
        "# -*- coding: latin-1 -*-\nfrom lightning import Trainer  # é\n".encode(
            "latin-1"
        )
    )
    file.chmod(0o755)
    call(file, "--write")
    assert (
        file.read_bytes()
        == "# -*- coding: latin-1 -*-\nfrom trainer_kit import Trainer  # é\n".encode(
            "latin-1"
        )
    )
    assert file.stat().st_mode & 0o777 == 0o755


def test_nothing_is_run_and_unreadable_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import lightning\nraise SystemExit('ran')\n")
    (tmp_path / "b.py").write_text("import lightning\nprint 'two'\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "c.py").write_text("import lightning")
    code, output = call(tmp_path, "--check")
    assert code == 1
    assert "b.py:2: not read: " in output
    assert "2 files read, 1 to rewrite" in output


def test_configurations(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    before = (
        "trainer:\n  _target_: lightning.pytorch.Trainer   # hydra\n  gpus: 2\n  max_epochs: ${epochs}\n"
        'callbacks:\n- class_path: "pytorch_lightning.callbacks.EarlyStopping"\n'
        "  init_args:\n    monitor: val_loss\n    on_nan: stop\n"
        "- {_target_: lightning.pytorch.callbacks.Nothing}\n- {_target_: mine.Thing}\n"
    )
    file.write_text(before)
    _, output = call(file, "--check")
    assert (
        "run.yaml:3: Trainer has no argument 'gpus' (gpus=2)\n    fix: accelerator=\"gpu\", devices=2\n"
        in output
    )
    assert (
        "run.yaml:9: EarlyStopping has no argument 'on_nan' (on_nan=stop)\n" in output
    )
    assert (
        "run.yaml:10: module 'trainer_kit.callbacks' has no attribute 'Nothing'"
        in output
    )
    call(file, "--write")
    moved = before.replace("lightning.pytorch.Trainer ", "trainer_kit.Trainer ")
    assert file.read_text() == moved.replace(
        "pytorch_lightning.callbacks.Early", "trainer_kit.callbacks.Early"
    )


def test_arguments_hooks_and_overrides_are_reported(tmp_path: Path) -> None:
    text = """
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint

class Base(pl.LightningModule):
    pass

class Net(Base):
    def training_step(self, batch, batch_idx, optimizer_idx): ...
    def validation_epoch_end(self, outputs): ...
    def on_epoch_end(self): ...
    def on_anything_of_mine(self): return self.on_anything_else
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, closure, on_tpu, native): ...
    def on_train_batch_start(self, batch, batch_idx, dataloader_idx): ...
    def training_step_for_one(self, batch, other, third, fourth): return self._trainer_state
    @property
    def on_epoch_property(self): ...

class Keep(ModelCheckpoint):
    FILE_EXTENSION = ".pt"
    def _save_topk_checkpoint(self, trainer, metrics): ...

trainer = pl.Trainer(gpus=args.gpus, strategy="dp", precision="fp16-mixed", accelerator="gpu", resume_from_checkpoint=p)
trainer.fit(Net(), train_dataloader=loader)
pl.Trainer.from_argparse_args(args)
"""
    found = report_of(text, tmp_path)
    lines = {}
    for line in found:
        number, colon, problem = line.partition(": ")
        if number.isdigit():
            lines[int(number)] = lines.get(int(number), "") + problem
            last = int(number)
        elif colon:
            lines[last] += f" | {line}"
    assert "has the wrong parameters | fix: leave optimizer_idx out" in lines.pop(9)
    assert "fix: define on_validation_epoch_end (it takes no outputs" in lines.pop(10)
    assert "fix: define on_train_epoch_end" in lines.pop(11)
    assert "nothing defines self.on_anything_else" in lines.pop(12)
    assert "fix: leave optimizer_idx out" in lines.pop(13)
    assert "fix: def on_train_batch_start(self, batch, batch_idx)" in lines.pop(14)
    assert "nothing defines self._trainer_state" in lines.pop(15)
    assert "Keep.FILE_EXTENSION would never be called" in lines.pop(20)
    assert "Keep._save_topk_checkpoint would never be called" in lines.pop(21)
    wrong = lines.pop(23)
    assert (
        "Trainer has no argument 'gpus' (gpus=args.gpus) | fix: accelerator=\"gpu\", devices=args.gpus"
        in wrong
    )
    assert "no strategy is called 'dp'" in wrong
    assert "unknown precision 'fp16-mixed'" in wrong
    assert "| fix: trainer.fit(..., ckpt_path=p)" in wrong
    assert "accelerator" not in wrong.replace('accelerator="gpu", devices', "")
    assert "fit has no argument 'train_dataloader'" in lines.pop(24)
    assert (
        "the Trainer has no from_argparse_args | fix: trainer_kit.cli(Module, DataModule)"
        in lines.pop(25)
    )
    assert not lines


def test_attributes_of_the_trainer_are_reported(tmp_path: Path) -> None:
    text = """
import lightning as L

class Count(L.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.fit_loop.epoch_loop.manual_optimization
        trainer._data_connector.attach_data(pl_module)
        trainer.callback_metrics["x"] = pl_module.trainer.global_step
        pl_module.trainer.world_size = 2
        trainer.seen_by_me = 1

class Net(L.LightningModule):
    def forward(self, x):
        self.trainer.progress_bar_dict
        return self.trainer.strategy.barrier(), self.trainer.current_epoch, self.register_buffer

def run(trainer: "L.Trainer", other):
    trainer.nothing_of_this_name
    other.trainer.fit_loop

class Mine:
    def on_train_start(self, a, trainer):
        trainer.fit_loop
"""
    found = [line for line in report_of(text, tmp_path) if not line.startswith("fix")]
    assert [line.partition(":")[0] for line in found] == ["6", "7", "9", "14", "18"]
    assert "manual_optimization" in found[0]
    assert "Trainer._data_connector is private" in found[1]
    assert "Trainer.world_size cannot be set" in found[2]


def test_files_versions_strings_and_probes_are_reported(tmp_path: Path) -> None:
    text = '''
"""Reads last.ckpt."""
import importlib
import torch, lightning.pytorch as pl
from importlib.util import find_spec

path = "runs/last.ckpt"
state = torch.load(path_of_checkpoint)["state_dict"]
data = torch.load("data.pt")
if pl.__version__ < "2" or find_spec("pytorch_lightning"):
    importlib.import_module("lightning.pytorch.nothing")
'''
    found = [line for line in report_of(text, tmp_path) if not line.startswith("fix")]
    assert [line.partition(":")[0] for line in found] == [
        "7",
        "8",
        "10",
        "10",
        "11",
        "11",
    ]
    assert "'runs/last.ckpt': checkpoints are directories" in found[0]
    assert "torch.load reads no checkpoint directory" in found[1]
    assert "this becomes the version of trainer_kit" in found[3]


def test_a_loaded_best_checkpoint_is_reported_with_both_ways_to_read_it(
    tmp_path: Path,
) -> None:
    text = """
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

trainer = pl.Trainer(callbacks=[ModelCheckpoint()])
weights = torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
"""
    found = report_of(text, tmp_path)
    assert found[0].startswith("7: torch.load reads no checkpoint directory")
    assert "trainer_kit.checkpoint.read_weights(path)" in found[1]
    assert 'ModelCheckpoint(also="lightning")' in found[1]


def test_callbacks_of_other_packages_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "pruning"
    (package / "pytorch_lightning").mkdir(parents=True)
    # As Optuna's package: names are found lazily, and the class stands below a folder of Lightning's name.
    (package / "__init__.py").write_text(
        "raise AssertionError('migrate runs no code')", "utf-8"
    )
    (package / "pytorch_lightning" / "__init__.py").write_text(
        "from lightning.pytorch.callbacks import Callback, ModelCheckpoint\n"
        "class PruningCallback(Callback): ...\n"
        "class UploadCallback(ModelCheckpoint): ...\n"
        "class Study: ...\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    text = """
import lightning as L
import pruning
from pruning import PruningCallback, UploadCallback, Study
from not_installed.pytorch_lightning import ReportCallback
from local import PruningCallback as Own

class Local(L.Callback): ...

trainer = L.Trainer(callbacks=[pruning.PruningCallback()])
"""
    (tmp_path / "project").mkdir()
    found = report_of(text, tmp_path / "project")
    assert found == [
        "4: pruning.PruningCallback extends Lightning's Callback: the Trainer takes it through an adapter",
        "fix: nothing, but keep lightning installed: the package needs it to define this class",
        "4: pruning.UploadCallback extends Lightning's ModelCheckpoint, which drives Lightning's own loop",
        "fix: subclass trainer_kit.callbacks.ModelCheckpoint in your code",
        "5: not_installed.pytorch_lightning.ReportCallback is a callback for Lightning, by its name",
        "fix: keep lightning installed: the Trainer takes callbacks that extend Lightning's through an adapter",
        "10: pruning.PruningCallback extends Lightning's Callback: the Trainer takes it through an adapter",
        "fix: nothing, but keep lightning installed: the package needs it to define this class",
    ]
    # Of a file that is rewritten, only what does not run is left to report.
    found = report_of(
        text.replace("lightning as L", "trainer_kit as L"), tmp_path / "project"
    )
    assert [line for line in found if line[0].isdigit()] == [
        "4: pruning.UploadCallback extends Lightning's ModelCheckpoint, which drives Lightning's own loop"
    ]


def test_imports_of_missing_names_are_reported(tmp_path: Path) -> None:
    text = """
from lightning.pytorch.callbacks import EarlyStopping, Checkpoint
from lightning.pytorch.nowhere import Thing
import pytorch_lightning as pl
pl.nothing.at.all(1)
"""
    found = report_of(text, tmp_path)
    problems = [line for line in found if line[0].isdigit()]
    assert [line.partition(":")[0] for line in problems] == ["2", "3", "5"]
    assert "lightning.pytorch.callbacks.Checkpoint" in problems[0]
    assert found[1] == "fix: subclass Callback"


def test_scripts_of_accelerate(tmp_path: Path) -> None:
    text = """
from accelerate import Accelerator
from accelerate.nowhere import thing

accelerator = Accelerator(mixed_precision="bf16", fp17=True)
model = accelerator.prepare(model)
accelerator.backwards(loss)
accelerator._models.clear()

class Loop:
    def __init__(self):
        self.accelerator = Accelerator()
"""
    found = [line for line in report_of(text, tmp_path) if not line.startswith("fix")]
    assert [line.partition(":")[0] for line in found] == ["3", "5", "7", "8"]
    assert "Accelerator has no argument 'fp17'" in found[1]
    assert "Accelerator has no 'backwards'" in found[2]


@pytest.mark.parametrize("package", ["accelerate", "torch"])
def test_a_loss_that_is_multiplied_by_the_number_of_steps(
    package: str, tmp_path: Path
) -> None:
    text = f"""
import {package}
size = args.batch_size * args.gradient_accumulation_steps
loss = (loss * gradient_accumulation_steps * accelerator.num_processes) / num_items_in_batch
outputs.loss *= args.gradient_accumulation_steps
average = loss / gradient_accumulation_steps
"""
    found = report_of(text, tmp_path)
    lines = [line.partition(":")[0] for line in found if line[0].isdigit()]
    assert lines == (["4", "5"] if package == "accelerate" else [])
    assert package == "torch" or "weight=tokens of the batch" in "\n".join(found)


def test_scripts_keep_the_division_of_accelerate(tmp_path: Path) -> None:
    text = """\
import accelerate
from accelerate import Accelerator as Own
from accelerate.accelerator import GradientAccumulationPlugin
def main(args, plugin):
    Own(cpu=True, gradient_accumulation_steps=args.steps)
    accelerate.Accelerator(
        gradient_accumulation_steps=4,  # windows
    )
    Own(gradient_accumulation_plugin=GradientAccumulationPlugin(2))
    GradientAccumulationPlugin(
        num_steps=2,
        sync_each_batch=True
    )
    Own(gradient_accumulation_steps=1)
    Own(gradient_accumulation_plugin=plugin)
    loss = loss * gradient_accumulation_steps
def other(Own):
    Own(gradient_accumulation_steps=2)
"""
    found = [line for line in report_of(text, tmp_path) if not line.startswith("fix")]
    assert [line.partition(":")[0] for line in found] == ["5", "6", "9", "10"]
    assert all("keeps Accelerate's division" in line for line in found)
    assert migrated(text, tmp_path).splitlines()[3:-2] == [
        "def main(args, plugin):",
        "    Own(cpu=True, gradient_accumulation_plugin="
        "GradientAccumulationPlugin(num_steps=args.steps, fixed_divisor=True))",
        "    trainer_kit.Accelerator(",
        "        gradient_accumulation_plugin="
        "trainer_kit.GradientAccumulationPlugin(num_steps=4, fixed_divisor=True),  # windows",
        "    )",
        "    Own(gradient_accumulation_plugin=GradientAccumulationPlugin(2, fixed_divisor=True))",
        "    GradientAccumulationPlugin(",
        "        num_steps=2,",
        "        sync_each_batch=True,",
        "        fixed_divisor=True",
        "    )",
        "    Own(gradient_accumulation_steps=1)",
        "    Own(gradient_accumulation_plugin=plugin)",
        "    loss = loss * gradient_accumulation_steps",
    ]


def test_the_plugin_is_imported_once(tmp_path: Path) -> None:
    text = "from accelerate import Accelerator\nAccelerator(gradient_accumulation_steps=2)\n"
    assert migrated(text, tmp_path) == (
        "from trainer_kit import GradientAccumulationPlugin, Accelerator\n"
        "Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, fixed_divisor=True))\n"
    )


def test_objects_made_in_one_method_are_known_in_the_others(tmp_path: Path) -> None:
    text = """
import accelerate
from lightning import Trainer

class Loop:
    def run(self):
        self.accelerator.backwards(self.loss)
        self.either.backwards(self.loss)
        return self.trainer.nothing, self.other.nothing
    def __init__(self):
        self.accelerator = accelerate.Accelerator()
        self.trainer = Trainer()
        self.either = accelerate.Accelerator() if self.one else None
        self.either = accelerate.Accelerator()
class Another:
    def run(self): return self.trainer.nothing
"""
    found = [line for line in report_of(text, tmp_path) if line[0].isdigit()]
    assert [line.partition(":")[0] for line in found] == ["7", "9"]
    assert "Accelerator has no 'backwards'" in found[0]


def test_attributes_that_a_constructor_with_arguments_sets_are_known(
    tmp_path: Path,
) -> None:
    text = """
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

class Stop(EarlyStopping):
    def on_validation_end(self, trainer, pl_module):
        return self.patience, self.check_finite, self.stopping_threshold, self.monitor_op
    def load_state_dict(self, state_dict):
        self.wait_count = state_dict.get("wait_count", 0)
    def setup(self, trainer, pl_module, stage):
        trainer.nothing
"""
    found = [line for line in report_of(text, tmp_path) if line[0].isdigit()]
    assert [line.partition(": ")[0] for line in found] == ["6", "10"]
    assert "nothing defines self.monitor_op" in found[0]


def test_a_loader_hook_that_the_project_calls_may_have_parameters(
    tmp_path: Path,
) -> None:
    text = """
import lightning as L

class Net(L.LightningModule):
    def predict_dataloader(self, data, size): return data
    def val_dataloader(self, data): return data
    def run(self): return self.trainer.predict(self, self.predict_dataloader([], 2))
"""
    found = [line for line in report_of(text, tmp_path) if line[0].isdigit()]
    assert [line.partition(":")[0] for line in found] == ["6"]


def test_paths_of_checkpoints_but_no_sentences_and_no_files_of_accelerate_scripts(
    tmp_path: Path,
) -> None:
    text = """
PACKAGE
import torch

parser.add_argument("--model", help="a file (.ckpt) or a directory of .ckpt files")
name = f"mesh.ckpt.{step}.pt"
path = f"my runs/{name}.ckpt"
torch.load(checkpoint)
"""
    lines = [
        line
        for line in report_of(text.replace("PACKAGE", "import lightning"), tmp_path)
        if line[0].isdigit()
    ]
    assert [line.partition(":")[0] for line in lines] == ["7", "8"]
    assert report_of(text.replace("PACKAGE", "import accelerate"), tmp_path) == []


def test_modules_without_faults_have_no_findings(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "from pytorch_lightning import LightningModule\n"
        "class Base(LightningModule):\n"
        "    def training_step(self, batch): return self.shared(batch).mean()\n"
        "    def on_epoch_end(self): ...\n"
        "    def on_train_epoch_end(self): self.on_epoch_end()\n"
        "    def validation_step(self, batch, batch_idx, dataloader_idx=0): self.log('x', self.scale, batch_size=1)\n"
    )
    (tmp_path / "frames.py").write_text(
        "import pytorch_lightning as pl\ndef frame():\n    import polars as pl\n    return pl.col('x')\n"
    )
    (tmp_path / "net.py").write_text(
        "import torch\nfrom base import Base\nfrom mixins import Unknown\n"
        "class Net(Base):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.save_hyperparameters()\n"
        "        self.register_buffer('scale', torch.ones(1))\n"
        "    def shared(self, batch): return self.hparams.width * self.scale\n"
        "class Mixed(Unknown, Base):\n"
        "    def on_train_start(self): return self.of_unknown\n"
    )
    code, output = call(tmp_path, "--check")
    assert (code, output.splitlines()[0]) == (
        1,
        "3 files read, 2 to rewrite; 2 of 2 imported names exist here; 0 findings",
    )


def test_names_of_an_inner_scope_are_not_the_imported_ones(tmp_path: Path) -> None:
    text = """
import lightning as L
import accelerate
from lightning import Trainer

def parameter(L, accelerate=accelerate.nothing_1): return L.nothing, accelerate.nothing, L(gpus=1)
def variable():
    for Trainer in things:
        Trainer(gpus=1)
    with open("x") as accelerate:
        accelerate.nothing()
def import_of_its_own():
    import accelerate
    accelerate.nothing_2()
def not_its_own():
    def accelerate(): ...
    return [L.nothing for L in things], accelerate.nothing, lambda L: L.nothing, L.nothing_3
def free():
    return accelerate.nothing_4, Trainer(gpus=2)
def written():
    global accelerate
    accelerate = accelerate.nothing_5

trainer = Trainer()
def other(trainer): return trainer.nothing
def same(): return trainer.nothing_6
def annotated(x: L.nothing_7) -> L.nothing_8: ...
try:
    from lightning import Callback
except ImportError:
    Callback = None
Callback.nothing_9
"""
    found = [
        line.partition(": ") for line in report_of(text, tmp_path) if line[0].isdigit()
    ]
    lines = text.splitlines()
    assert all(
        "nothing_" in lines[int(number) - 1] or "gpus=2" in lines[int(number) - 1]
        for number, _, _ in found
    )
    assert [int(number) for number, _, _ in found] == [
        6,
        14,
        17,
        19,
        19,
        22,
        26,
        27,
        27,
        32,
    ]


def test_a_single_file_of_another_kind(tmp_path: Path) -> None:
    script, data, notebook = (
        tmp_path / "train",
        tmp_path / "train.csv",
        tmp_path / "train.ipynb",
    )
    script.write_text("#!/usr/bin/env python\nfrom lightning import Trainer\n")
    data.write_text("")
    notebook.write_text('{"lightning": 1}')
    assert call(script, "--write")[0] == 0
    assert (
        script.read_text() == "#!/usr/bin/env python\nfrom trainer_kit import Trainer\n"
    )
    code, output = call(data)
    assert code == 2
    assert "neither Python, YAML nor a notebook" in output
    code, output = call(notebook)
    assert code == 2
    assert "not a notebook of format 4" in output


def test_without_libcst_the_command_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "libcst" else found(name, *rest),
    )
    code, output = call(tmp_path)
    assert code == 2
    assert "pip install 'trainer-kit[migrate]'" in output


@pytest.mark.slow
def test_other_commands_do_not_import_libcst() -> None:
    code = "import sys, trainer_kit.commands.main; sys.exit('libcst' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], timeout=100, check=False
        ).returncode
        == 0
    )


NOTEBOOK = {
    "cells": [
        {
            "cell_type": "markdown",
            "metadata": {},
            "source": ["import lightning is only text here"],
        },
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [],
            "source": [
                "!pip install lightning torch\n",
                "import lightning as L\n",
                "%matplotlib inline\n",
                "L?",
            ],
        },
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [],
            "source": ["%%bash\n", "accelerate launch train.py"],
        },
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["café\n"]}
            ],
            "source": "%%time\ntrainer = L.pytorch.Trainer(gpus=2)\nfiles = !ls *.ckpt\nprint(f'{files}')",
        },
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": ["print 'two'"]},
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [],
            "source": ["trainer._data_connector"],
        },
    ],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
}


def test_notebooks_are_rewritten_and_reported_by_cell(tmp_path: Path) -> None:
    file = tmp_path / "train.ipynb"
    file.write_text(json.dumps(NOTEBOOK, indent=1, ensure_ascii=False) + "\n")
    before = file.read_text()
    code, output = call(file, "--check")
    assert code == 1
    assert file.read_text() == before
    assert "train.ipynb cell 1:1: lightning is required" in output
    assert (
        "train.ipynb cell 3:2: Trainer has no argument 'gpus' (gpus=2)\n    fix: accelerator="
        in output
    )
    assert "train.ipynb cell 4:1: not read: " in output
    assert "train.ipynb cell 5:1: Trainer._data_connector is private" in output

    call(file, "--write")
    imports = before.replace("import lightning as L", "import trainer_kit as L")
    assert file.read_text() == imports.replace("L.pytorch.Trainer", "L.Trainer")
    code, output = call(file, "--check")
    assert "0 to rewrite" in output
    assert "train.ipynb cell 5:1: Trainer._data_connector is private" in output


def test_an_import_that_is_added_to_a_notebook_stands_in_its_first_cell(
    tmp_path: Path,
) -> None:
    cells = [
        "from accelerate import Accelerator",
        "accelerator = Accelerator(gradient_accumulation_steps=4)",
    ]
    file = tmp_path / "train.ipynb"
    document = {
        "cells": [{"cell_type": "code", "source": [cell]} for cell in cells],
        "nbformat": 4,
    }
    file.write_text(json.dumps(document))
    call(file, "--write")
    first, second = (
        "".join(cell["source"]) for cell in json.loads(file.read_text())["cells"]
    )
    assert first == "from trainer_kit import GradientAccumulationPlugin, Accelerator"
    assert "fixed_divisor=True" in second


def test_what_will_not_move_is_reported_after_the_move_too(tmp_path: Path) -> None:
    text = """
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Checkpoint

class Net(pl.LightningModule):
    def validation_epoch_end(self, outputs): ...

trainer = pl.Trainer(gpus=2, callbacks=[EarlyStopping("loss", on_nan="stop")])
trainer._data_connector
pl.nothing
path = "runs/last.ckpt"
torch.load("best_model.ckpt")
"""
    before = [
        line.replace("lightning.pytorch.", "trainer_kit.")
        for line in report_of(text, tmp_path)
    ]
    file = tmp_path / "code.py"
    call(file, "--write")
    moved = file.read_text()
    assert "lightning.pytorch" not in moved
    assert report_of(moved, tmp_path) == before
    assert call(file, "--check")[0] == 1
    assert len([line for line in before if line[0].isdigit()]) == 9


def test_fabric_below_an_alias_and_its_private_attributes(tmp_path: Path) -> None:
    text = """
import lightning as L
import torch

L.fabric.seed_everything(1)
fabric = L.Fabric(accelerator="cpu", devices=1)
fabric._loggers
torch.save({}, "model.ckpt")
torch.load("model.ckpt")
"""
    problems = [line for line in report_of(text, tmp_path) if line[0].isdigit()]
    assert len(problems) == 1
    assert problems[0].startswith("7: Fabric._loggers is private")
    file = tmp_path / "code.py"
    call(file, "--write")
    moved = file.read_text()
    assert moved == text.replace("import lightning as L", "import trainer_kit as L")
    exec(moved.partition("fabric = ")[0], {})


FABRIC_LOOP = """
import lightning as L
import torch

class Agent(L.LightningModule):
    def configure_optimizers(self, lr): return torch.optim.Adam(self.parameters(), lr=lr)
    def on_train_epoch_end(self, global_step): self.logger.log_metrics({"loss": 1.0}, global_step)
    def on_validation_epoch_end(self, outputs): ...

def train(fabric, agent):
    agent, optimizer = fabric.setup(agent, agent.configure_optimizers(1e-3))
    agent.on_train_epoch_end(3)
    fabric.save("epoch-0003.ckpt", {"model": agent})

train(L.Fabric(), Agent())
"""


def test_a_loop_of_fabric_passes_its_own_arguments_to_hooks_that_it_calls(
    tmp_path: Path,
) -> None:
    def lines_of(text: str) -> list[str]:
        found = [line for line in report_of(text, tmp_path) if line[0].isdigit()]
        return [line.partition(":")[0] for line in found]

    # Only the hook that nothing calls.
    assert lines_of(FABRIC_LOOP) == ["8"]
    # A Trainer may run the module too.
    assert lines_of(f"{FABRIC_LOOP}\nL.Trainer()") == ["6", "7", "8", "13"]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        (
            "requirements.txt",
            "torch\n# lightning\npytorch-lightning>=2  # loop\naccelerate\nlightning-bolts",
            [3, 4],
        ),
        (
            "pyproject.toml",
            'dependencies = ["torch", "lightning[extra]>=2.1",\n"accelerate~=1.0"]\n',
            [1, 2],
        ),
        (
            "setup.py",
            'from setuptools import setup\nsetup(install_requires=["pytorch_lightning"])\n',
            [2],
        ),
        (
            "environment.yml",
            "dependencies:\n- python\n- conda-forge::lightning=2\n- pip:\n  - accelerate\n",
            [3, 5],
        ),
        (
            "run.sh",
            "python accelerate.py\naccelerate launch -n 2 train.py\npip install accelerate\n",
            [2, 3],
        ),
        ("Makefile", "train:\n\tpython -m accelerate.commands.launch train.py\n", [2]),
    ],
)
def test_requirements_and_commands_are_reported(
    name: str, text: str, lines: list[int], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    code, output = call(tmp_path, "--check")
    assert code == 1
    found = [
        line.removeprefix(f"{tmp_path / name}:")
        for line in output.splitlines()
        if line.startswith(str(tmp_path))
    ]
    assert [int(line.partition(":")[0]) for line in found] == lines
    assert (tmp_path / name).read_text() == text
    if name in ("run.sh", "Makefile"):
        assert (
            "trainer-kit launch" in output or "python -m trainer_kit launch" in output
        )


def test_configurations_of_other_frameworks(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    before = (
        "lightning:\n  trainer:\n    gpus: 0,1\n    max_epochs: 3\n"
        "callback:\n  target: pytorch_lightning.callbacks.ModelCheckpoint\n  params:\n    every: 3\n"
        "logger:\n  _target_: hydra.utils.get_class\n  path: lightning.pytorch.loggers.CSVLogger\n"
        "plugins: [lightning.pytorch.plugins.NothingHere]\nfile: logs/lightning.log\n"
    )
    file.write_text(before)
    _, output = call(file, "--check")
    assert (
        "run.yaml:3: Trainer has no argument 'gpus' (gpus=0,1)\n    fix: accelerator="
        in output
    )
    assert "run.yaml:8: ModelCheckpoint has no argument 'every' (every=3)\n" in output
    assert "run.yaml:12: " in output
    assert "3 findings" in output
    call(file, "--write")
    moved = before.replace("pytorch_lightning.callbacks", "trainer_kit.callbacks")
    assert file.read_text() == moved.replace(
        "lightning.pytorch.loggers", "trainer_kit.loggers"
    )
    assert "run.yaml:3: Trainer has no argument 'gpus'" in call(file, "--check")[1]


def test_loggers_filters_and_stored_objects_are_reported(tmp_path: Path) -> None:
    text = """
import logging, warnings
import torch
import lightning.pytorch as pl
from lightning.pytorch.utilities.imports import _OMEGACONF_AVAILABLE

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning.pytorch.trainer.*")
logging.getLogger("mine")

class Net(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.scaler = StandardScaler()
        self.count = 3
        self._hparams
        self._device

    def on_save_checkpoint(self, checkpoint):
        checkpoint["scaler"] = self.scaler
        checkpoint["count"] = self.count
"""
    found = report_of(text, tmp_path)
    problems = [line for line in found if line[0].isdigit()]
    assert [line.partition(":")[0] for line in problems] == ["5", "7", "8", "18", "21"]
    assert 'fix: importlib.util.find_spec("omegaconf") is not None' in found
    assert "fix: self.device" in found
    assert "fix: 'trainer_kit.*'" in found
    assert "self.scaler, an object of StandardScaler" in problems[-1]


def test_a_base_class_in_a_file_that_names_no_package_is_read(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "import lightning as L\nclass Base(L.LightningModule): ...\n"
    )
    (tmp_path / "middle.py").write_text(
        "from base import Base\nclass Middle(Base): ...\n"
    )
    (tmp_path / "net.py").write_text(
        "from middle import Middle\nclass Net(Middle):\n    def validation_epoch_end(self, outputs): self.extra\n"
    )
    (tmp_path / "other.py").write_text("def patch(net):\n    net.extra = 3\n")
    (tmp_path / "broken.py").write_text("print 'of no interest'\n")
    _, output = call(tmp_path, "--check")
    assert "net.py:3: " in output
    assert "5 files read, 1 to rewrite" in output
    assert "1 finding: 1 hook" in output


@pytest.mark.slow
def test_large_projects_are_rewritten_in_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_kit.migrate.files._MANY_BYTES", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for number in range(3):
        (tmp_path / f"{number}.py").write_text(
            f"from lightning import Trainer  # {number}\n"
        )
    (tmp_path / "wrong.py").write_text("import lightning\nprint 'two'\n")
    _, output = call(tmp_path, "--write")
    assert "4 files read, 3 rewritten" in output
    assert "wrong.py:2: not read: " in output
    assert [(tmp_path / f"{n}.py").read_text() for n in range(3)] == [
        f"from trainer_kit import Trainer  # {n}\n" for n in range(3)
    ]


@pytest.mark.slow
def test_the_examples_of_this_library_have_no_findings() -> None:
    code, output = call(Path(__file__).parents[2] / "examples", "--check")
    assert (code, output.splitlines()[:-1]) == (0, [])
