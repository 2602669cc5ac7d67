"""Lightning's ``.ckpt`` files: imported and continued, and exported for Lightning.

The files are made here in the layout that Lightning 2.5 writes. Files of the real library were imported, and exports
read by it, when this was written: the counts below are those files'.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint import export, import_lightning, read_checkpoint
from trainer_kit.commands.main import main
from trainer_kit.core.errors import CheckpointError

BATCHES, EPOCHS = 6, 3


class Net(tk.LightningModule):
    def __init__(self, width=8, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


def loader():
    points = torch.randn(4 * BATCHES, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=4)


def counted(total, current=None, **more):
    """Lightning's counters: four numbers, or one for all."""
    names = ("ready", "started", "processed", "completed")
    of = {
        key: dict(zip(names, v if isinstance(v, tuple) else (v,) * 4, strict=True))
        for key, v in (
            ("total", total),
            ("current", total if current is None else current),
        )
    }
    return {**of, **more}


def lightning_file(path, moment, steps):
    """Train in a plain loop, and save in the middle as Lightning does at this moment; returns the losses afterwards."""
    torch.manual_seed(0)
    module = Net()
    (optimizer,), (schedule,) = module.configure_optimizers()
    epoch, batch = divmod(steps, BATCHES)
    for step in range(steps):
        _step(module, optimizer, schedule, step)
    at_end = batch == 0
    begun = epoch if at_end else epoch + 1
    epochs = {  # ready, started, processed, completed
        "batch end": (begun, begun, begun - 1, begun - 1),
        "validation end": (begun, begun, begun - 1, begun - 1),
        "epoch end": (begun, begun, begun, begun - 1),
        "after fit": (begun, begun, begun, begun),
    }[moment]
    late = 1 if moment == "batch end" else 0
    now = BATCHES if at_end else batch
    content = {
        "epoch": epochs[2],
        "global_step": steps,
        "pytorch-lightning_version": "2.5.5",
        "state_dict": module.state_dict(),
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": steps - late},
                "epoch_loop.batch_progress": counted(
                    (steps, steps, steps, steps - late),
                    (now, now, now, now - late),
                    is_last_batch=at_end,
                ),
                "epoch_loop.automatic_optimization.state_dict": {},
                "epoch_loop.automatic_optimization.optim_progress": {
                    "optimizer": {
                        "step": counted(steps, now),
                        "zero_grad": counted(steps, now),
                    }
                },
                "epoch_loop.manual_optimization.state_dict": {},
                "epoch_loop.manual_optimization.optim_step_progress": counted(0),
                "epoch_progress": counted(epochs),
            },
            "validate_loop": {},
        },
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {
                "best_model_path": "/elsewhere/best.ckpt"
            }
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 8, "lr": 0.1},
    }
    torch.save(content, path)
    return [
        _step(module, optimizer, schedule, step)
        for step in range(steps, BATCHES * EPOCHS)
    ]


def _step(module, optimizer, schedule, step):
    batch = list(loader())[step % BATCHES]
    optimizer.zero_grad()
    loss = module.training_step(batch, step)
    loss.backward()
    optimizer.step()
    if (step + 1) % BATCHES == 0:
        schedule.step()
    return loss.item()


def trainer(**options):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return tk.Trainer(
        **{
            "max_epochs": EPOCHS,
            "enable_checkpointing": False,
            "accelerator": "cpu",
            **quiet,
            **options,
        }
    )


def call(*arguments):
    done = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("moment", "steps"),
    [
        ("batch end", 8),
        ("batch end", 12),
        ("validation end", 6),
        ("epoch end", 12),
        ("after fit", 12),
    ],
)
def test_a_run_continues_from_an_imported_file(tmp_path, moment, steps):
    expected = lightning_file(tmp_path / "last.ckpt", moment, steps)
    code, printed = call("import", tmp_path / "last.ckpt")
    path, epoch = tmp_path / "last", steps // BATCHES
    assert (code, printed) == (
        0,
        f'{path}: step {steps}, epoch {epoch}; fit(ckpt_path="{path}")\n'
        "not imported: the state of ModelCheckpoint{'monitor': None}\n",
    )
    module, run = Net(), trainer()
    run.fit(module, loader(), ckpt_path=path)
    assert module.losses == expected
    assert (run.global_step, run.current_epoch) == (BATCHES * EPOCHS, EPOCHS)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**EPOCHS)
    assert call("verify", path) == (0, f"{path}: ok\n")


def test_manual_optimization_counts_batches(tmp_path):
    lightning_file(tmp_path / "x.ckpt", "after fit", 12)
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    loop = content["loops"]["fit_loop"]
    loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"] = (
        counted(0)
    )
    loop["epoch_loop.manual_optimization.optim_step_progress"] = counted(24)
    torch.save({**content, "global_step": 24}, tmp_path / "x.ckpt")
    progress = read_checkpoint(import_lightning(tmp_path / "x.ckpt"))["progress"]
    assert progress == {"epoch": 2, "batch": 12, "step": 12, "epoch_batch": 0}


def test_checkpoints_with_only_weights_and_with_user_entries_are_imported(tmp_path):
    module = Net(width=4)
    content = {
        "epoch": 3,
        "global_step": 9,
        "pytorch-lightning_version": "2.1.0",
        "state_dict": module.state_dict(),
    }
    named = {
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 4},
        "vocabulary": ["a", "b"],
    }
    torch.save({**content, **named}, tmp_path / "w.ckpt")
    path = import_lightning(tmp_path / "w.ckpt", tmp_path / "deep" / "w")
    back = Net.load_from_checkpoint(path)
    assert back.hparams.width == 4
    assert all(
        torch.equal(value, module.state_dict()[name])
        for name, value in back.state_dict().items()
    )
    assert read_checkpoint(path)["vocabulary"] == ["a", "b"]
    with pytest.raises(
        CheckpointError,
        match=r"(?s)holds only weights, and cannot be resumed.*load_weights_only=True",
    ):
        trainer().fit(Net(width=4), loader(), ckpt_path=path)


def test_one_mapping_as_the_only_argument(tmp_path):
    class Configured(tk.LightningModule):
        def __init__(self, conf):
            super().__init__()
            self.layer = nn.Linear(conf["width"], 1)

    content = {
        "pytorch-lightning_version": "2.5.0",
        "state_dict": Configured({"width": 5}).state_dict(),
    }
    named = {"hparams_name": "conf", "hyper_parameters": {"width": 5}}
    torch.save({**content, **named}, tmp_path / "c.ckpt")
    for path in (tmp_path / "c.ckpt", import_lightning(tmp_path / "c.ckpt")):
        assert Configured.load_from_checkpoint(path).layer.in_features == 5


class Custom:
    pass


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"hyper_parameters": {"net": Custom()}},
            r"(?s)it holds \S+\.Custom, and a class could run code.*fix: .*plain",
        ),
        (
            {"hyper_parameters": {"root": Path("x")}},
            r"it holds pathlib\.\w+, and a class could run code",
        ),
        (
            {"pytorch-lightning_version": None},
            r"(?s)not a checkpoint of Lightning.*fix: .*read_weights",
        ),
        (
            {"loops": None},
            r"(?s)does not contain the progress of a Lightning 2 run.*fix: .*upgrade_checkpoint",
        ),
    ],
)
def test_unsupported_files_are_refused(tmp_path, change, match):
    lightning_file(tmp_path / "x.ckpt", "after fit", 6)
    content = {**torch.load(tmp_path / "x.ckpt", weights_only=True), **change}
    torch.save(
        {name: value for name, value in content.items() if value is not None},
        tmp_path / "x.ckpt",
    )
    code, printed = call("import", tmp_path / "x.ckpt")
    assert code == 1
    with pytest.raises(CheckpointError, match=match):
        import_lightning(tmp_path / "x.ckpt")
    assert "x.ckpt" in printed
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"]


def test_other_parameters_than_the_files(tmp_path):
    lightning_file(tmp_path / "x.ckpt", "after fit", 6)

    class Head(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.net[2].parameters(), lr=0.1)
            return [optimizer], [StepLR(optimizer, 1)]

    with pytest.raises(
        CheckpointError, match=r"groups of \[4\], and the optimizer of \[2\] parameters"
    ):
        trainer().fit(Head(), loader(), ckpt_path=import_lightning(tmp_path / "x.ckpt"))


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_parameters_that_are_divided_among_ranks_need_names():
    with tempfile.TemporaryDirectory() as directory:
        lightning_file(Path(directory) / "x.ckpt", "after fit", 6)
        path = import_lightning(Path(directory) / "x.ckpt")
        with pytest.raises(
            CheckpointError, match=r'(?s)fsdp shards them over ranks.*strategy="ddp"'
        ):
            trainer(strategy="fsdp", devices=2).fit(Net(), loader(), ckpt_path=path)


# -- export --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=4, save_top_k=-1)
    module = Net()
    trainer(enable_checkpointing=True, callbacks=keeper).fit(module, loader())
    return tk.checkpoints(tmp_path / "kept"), module


@pytest.mark.parametrize(("index", "epoch", "batch"), [(0, 0, 4), (2, 2, 0)])
def test_an_export_has_the_entries_that_lightning_reads(
    kept, tmp_path, index, epoch, batch
):
    record = kept[0][index]
    assert call("export", "--lightning", record.path, tmp_path / "x.ckpt") == (
        0,
        f"{tmp_path / 'x.ckpt'}\n",
    )
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    state = read_checkpoint(record.path)
    assert (content["epoch"], content["global_step"]) == (epoch, record.step)
    assert content["pytorch-lightning_version"].startswith("2.")
    assert (content["hparams_name"], content["hyper_parameters"]) == (
        "kwargs",
        {"width": 8, "lr": 0.1},
    )
    fresh = Net(**content["hyper_parameters"])
    fresh.load_state_dict(content["state_dict"])
    (optimizer,), (schedule,) = fresh.configure_optimizers()
    optimizer.load_state_dict(content["optimizer_states"][0])
    schedule.load_state_dict(content["lr_schedulers"][0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**epoch)
    for name, parameter in fresh.named_parameters():
        held = state["optimizer_states"][0]["state"][name]
        assert all(
            torch.equal(held[key], value)
            for key, value in optimizer.state[parameter].items()
        )
    loop = content["loops"]["fit_loop"]
    begun = epoch + (batch > 0)
    assert loop["epoch_progress"] == counted((begun, begun, epoch, epoch))
    assert loop["epoch_loop.batch_progress"] == counted(
        record.step, batch, is_last_batch=batch == 0
    )
    steps = [
        _step(fresh, optimizer, schedule, step)
        for step in range(record.step, BATCHES * EPOCHS)
    ]
    assert steps == kept[1].losses[record.step :]


def test_there_and_back(kept, tmp_path):
    record, module = kept[0][0], kept[1]
    back = import_lightning(export(record.path, tmp_path / "x.ckpt", "lightning"))
    again = Net()
    trainer().fit(again, loader(), ckpt_path=back)
    assert again.losses == module.losses[record.step :]


def test_exports_of_weights_and_of_values_that_become_plain(kept, tmp_path):
    weights = kept[1].state_dict()
    content = torch.load(
        export(weights, tmp_path / "w.ckpt", "lightning"), weights_only=True
    )
    assert content["state_dict"].keys() == weights.keys()
    assert "optimizer_states" not in content
    state = {
        "model": dict(weights),
        "hyper_parameters": {"root": Path("x"), "secret": {"repr": "'***'"}},
    }
    path = tk.checkpoint.write_checkpoint(tmp_path / "odd", state)
    content = torch.load(
        export(path, tmp_path / "odd.ckpt", "lightning"), weights_only=True
    )
    assert content["hyper_parameters"] == {"root": "x"}
    path = tk.checkpoint.write_checkpoint(
        tmp_path / "masked", {**state, "hyper_parameters": {"key": {"repr": "***"}}}
    )
    assert (
        torch.load(export(path, tmp_path / "m.ckpt", "lightning"), weights_only=True)[
            "hyper_parameters"
        ]
        == {}
    )


# -- names that Lightning's users write ----------------------------------------------------------------------------


def test_paths_of_files_name_the_directory(kept, tmp_path):
    last = kept[0][-1].path
    with pytest.raises(
        CheckpointError,
        match=rf"(?s)does not exist.*pass {last}: a checkpoint is a directory",
    ):
        Net.load_from_checkpoint(f"{last}.ckpt")
    with pytest.raises(
        CheckpointError,
        match=rf'(?s)does not exist.*pass {last}: "last" is a name in the index',
    ):
        Net.load_from_checkpoint(tmp_path / "kept" / "last.ckpt")
    with pytest.raises(
        CheckpointError,
        match=rf"(?s)does not exist.*pass {last}: a checkpoint is a directory",
    ):
        trainer().fit(Net(), loader(), ckpt_path=f"{last}.ckpt")
    with pytest.raises(
        CheckpointError,
        match=r'(?s)does not exist.*pass "last": it is a name in the index',
    ):
        trainer().fit(Net(), loader(), ckpt_path=tmp_path / "kept" / "last.ckpt")


def test_a_fit_from_a_lightning_file_explains_how_to_import_it(tmp_path):
    lightning_file(tmp_path / "last.ckpt", "after fit", 6)
    fix = rf'trainer-kit checkpoint import {tmp_path}/last\.ckpt, and ckpt_path="{tmp_path}/last"'
    with pytest.raises(
        CheckpointError, match=rf"(?s)pass a checkpoint directory.*{fix}"
    ):
        trainer().fit(Net(), loader(), ckpt_path=tmp_path / "last.ckpt")
    start = Net.load_from_checkpoint(tmp_path / "last.ckpt")
    module = Net()
    trainer(max_epochs=1).fit(
        module, loader(), ckpt_path=tmp_path / "last.ckpt", load_weights_only=True
    )
    first = next(iter(loader()))
    assert (
        module.losses[0] == nn.functional.mse_loss(start.net(first[0]), first[1]).item()
    )
