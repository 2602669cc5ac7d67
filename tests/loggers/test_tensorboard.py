"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

import shutil
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from tensorboard.summary.writer import event_file_writer
from torch import nn

import trainer_kit as tk
from trainer_kit.core.errors import LogError
from trainer_kit.loggers import TensorBoardLogger


def events(directory: str | Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def scalars(directory: str | Path) -> dict[str, list[tuple[int, float]]]:
    read = events(directory)
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def hparams(directory: str | Path) -> tuple[dict[str, object], list[str]]:
    from tensorboard.plugins.hparams import plugin_data_pb2

    shown, metrics = {}, []
    for tag, metadata in events(directory).summary_metadata.items():
        data = plugin_data_pb2.HParamsPluginData.FromString(
            metadata.plugin_data.content
        )
        if tag.endswith("session_start_info"):
            for name, value in data.session_start_info.hparams.items():
                shown[name] = getattr(value, value.WhichOneof("kind"))
        if tag.endswith("experiment"):
            metrics = [info.name.tag for info in data.experiment.metric_infos]
    return shown, metrics


@pytest.fixture
def make(tmp_path):
    before, made = set(threading.enumerate()), []

    def build(**kwargs):
        made.append(TensorBoardLogger(tmp_path, **kwargs))
        return made[-1]

    yield build
    for logger in made:
        logger.finalize("success")
    assert set(threading.enumerate()) == before


def test_scalars_come_back(make, tmp_path):
    logger = make(name="run", version=2, sub_dir="train", prefix="p")
    assert logger.log_dir == str(tmp_path / "run/version_2/train")
    logger.log_metrics({"loss": torch.tensor(0.5), "acc": 1}, 3)
    logger.log_metrics({"loss": 0.25}, 4)
    logger.log_metrics({"lr": 0.125})
    logger.save()
    assert scalars(logger.log_dir) == {
        "p-loss": [(3, 0.5), (4, 0.25)],
        "p-acc": [(3, 1.0)],
        "p-lr": [(4, 0.125)],
    }


@pytest.mark.parametrize("writers", [0, 9, 99])
def test_writing_continues_after_finalize(make, monkeypatch, writers):
    """The count of the process's writers is in the names of files, which TensorBoard reads in order."""
    counter = event_file_writer.AtomicCounter(writers)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)
    logger = make()
    logger.log_metrics({"loss": 0.5}, 0)
    first = logger.experiment
    logger.finalize("success")
    logger.finalize("success")
    logger.log_metrics({"loss": 0.25}, 1)
    assert logger.experiment is not first
    logger.finalize("success")
    assert scalars(logger.log_dir) == {"loss": [(0, 0.5), (1, 0.25)]}
    assert counter.get() == writers + 2
    assert logger.version == 0


def test_hyperparameters_are_shown_flat_with_a_placeholder(make):
    logger = make()
    logger.log_hyperparams(
        {
            "optim": {"lr": 0.5, "name": "sgd", "betas": (0.5, 0.25)},
            "deep": True,
            "seed": None,
        }
    )
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    shown, metrics = hparams(logger.log_dir)
    assert shown == {
        "optim/lr": 0.5,
        "optim/name": "sgd",
        "optim/betas": "[0.5, 0.25]",
        "deep": True,
        "seed": "None",
    }
    assert metrics == ["hp_metric"]
    assert scalars(logger.log_dir) == {"hp_metric": [(0, -1.0)], "loss": [(1, 1.0)]}


def test_only_the_owner_reads_event_files_with_hyperparameters(make):
    logger = make()
    logger.log_metrics({"loss": 1.0}, 1)
    [file] = Path(logger.log_dir).glob("events*")
    logger.log_hyperparams({"lr": 0.5})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert hparams(logger.log_dir) == ({"lr": 0.5}, ["hp_metric"])


def test_hyperparameters_that_a_full_disk_refused_are_written_later(make, monkeypatch):
    logger = make()
    usage = shutil.disk_usage(".")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        with pytest.raises(OSError, match="No space left"):
            logger.log_hyperparams({"lr": 0.5})
    logger.log_hyperparams({"lr": 0.5})
    logger.finalize("success")
    assert hparams(logger.log_dir) == ({"lr": 0.5}, ["hp_metric"])


def test_metrics_given_with_hyperparameters_take_the_place_of_the_placeholder(make):
    logger = make(prefix="p")
    logger.log_hyperparams({"lr": 0.5}, {"score": 0.75})
    logger.log_hyperparams({"lr": 0.5}, {"score": 0.75})
    logger.finalize("success")
    assert scalars(logger.log_dir) == {"p-score": [(0, 0.75)]}
    assert hparams(logger.log_dir) == ({"lr": 0.5}, ["p-score"])


def test_one_number_is_the_hp_metric(make):
    logger = make()
    logger.log_hyperparams({"lr": 0.5}, 0.75)
    logger.finalize("success")
    assert scalars(logger.log_dir) == {"hp_metric": [(0, 0.75)]}


def test_without_the_placeholder_hyperparameters_only_go_to_their_file(make):
    logger = make(default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.5})
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["hparams.json"]


def test_experiment_is_the_summary_writer(make):
    from torch.utils.tensorboard import SummaryWriter

    logger = make(max_queue=3)
    assert isinstance(logger.experiment, SummaryWriter)
    logger.experiment.add_text("note", "hello", 1)
    logger.experiment.add_histogram("weights", torch.arange(4.0), 1)
    logger.save()
    tags = events(logger.log_dir).Tags()
    assert (tags["tensors"], tags["histograms"]) == (["note/text_summary"], ["weights"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.example_input_array = torch.ones(4, 2)

    def forward(self, x):
        return self.layers(x)


def test_the_graph_is_written_and_the_module_is_as_before(make):
    net = Net()
    net.layers[1].eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes, state = [module.training for module in net.modules()], torch.get_rng_state()
    logger = make(log_graph=True)
    logger.log_graph(net)
    logger.finalize("success")
    read = events(logger.log_dir)
    assert read.Tags()["graph"]
    assert {"aten::linear", "aten::batch_norm"} <= {
        node.op for node in read.Graph().node
    }
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items()
    )


def test_no_graph_unless_asked_for(make):
    logger = make()
    logger.log_graph(Net())
    assert not Path(logger.log_dir).exists()


def test_a_graph_needs_an_example_input_and_a_module_that_takes_it(make):
    logger, net = make(log_graph=True), Net()
    with pytest.raises(LogError, match="cannot be traced"):
        logger.log_graph(net, torch.ones(4, 5))
    assert net.training
    net.example_input_array = None
    with pytest.raises(LogError, match="example_input_array is not set"):
        logger.log_graph(net)
    next(
        net.parameters()
    ).ds_id = 0  # as DeepSpeed marks what it divides: a forward would wait for the other ranks
    with pytest.raises(LogError, match="sharded over ranks"):
        logger.log_graph(net, torch.ones(4, 5))


class Slow(TensorBoardLogger):
    """Takes the first values late, as a slow disk does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.goes_on = threading.Event()
        self.taken = 0.0

    def log_metrics(self, metrics, step=None, at=None):
        assert self.goes_on.wait(60)
        self.taken = self.taken or time.time()
        super().log_metrics(metrics, step, at)


@pytest.mark.parametrize("steps", [3, 1200])
def test_event_times_are_those_of_the_steps(steps, tmp_path):
    """Also those of values that were read back from the journal, because more waited than memory holds."""
    logger = Slow(tmp_path)

    class Logs(tk.TrainModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            if batch_idx == steps - 1:
                logger.goes_on.set()
            loss = self.layer(batch).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    tk.Trainer(
        logger=logger,
        log_every_n_steps=1,
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    ).fit(Logs(), list(torch.ones(steps, 1, 1)))
    times = [event.wall_time for event in events(logger.log_dir).Scalars("loss")]
    assert len(times) == steps
    assert times == sorted(times)
    assert all(at <= logger.taken for at in times[: steps - 1])
