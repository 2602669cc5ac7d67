"""`trainer.explain()`: the composed run in text, and the loop with who listens."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from torch.utils.data import DataLoader

import trainer_kit as tk
from trainer_kit import Callback, DataModule, Trainer, TrainModule
from trainer_kit.callbacks import GradientAccumulation
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.strategies import FSDPStrategy, MeshStrategy
from trainer_kit.training.mesh_picture import mesh_picture


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def on_train_start(self): ...

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validates(Net):
    def validation_step(self, batch, batch_idx): ...


class First(Callback):
    def on_train_start(self, trainer, module): ...
    def on_validation_end(self, trainer, module): ...


class Second(First):
    order = "late"

    def on_train_epoch_end(self, trainer, module): ...


def loader(count=20, batch_size=2):
    return DataLoader(torch.zeros(count, 1), batch_size=batch_size)


def trainer(**options):
    return Trainer(accelerator="cpu", **{"barebones": True, "max_epochs": 2, **options})


def lines(text):
    return {
        line.split()[0]: " ".join(line.split()[1:])
        for line in text.splitlines()
        if line.strip()
    }


def test_it_returns_the_parts_and_shows_them_once(capsys):
    text = trainer(precision="bf16-mixed").explain()
    assert capsys.readouterr().out == "", "print(trainer.explain()) shows it once"
    assert repr(text) == str(text), "an interactive session shows lines"
    found = lines(text)
    assert found["processes"].startswith("1 ")
    assert found["precision"] == "bf16-mixed"
    assert (found["loggers"], found["callbacks"], found["ends"]) == (
        "none",
        "none",
        "after 2 epochs",
    )
    assert "cpu" in found["strategy"]


def window(chosen):
    counting = chosen.accumulation_callback
    return 1 if counting is None else counting.get_accumulate_grad_batches(0)


def test_it_shows_the_source_of_options(monkeypatch):
    found = lines(trainer(precision="bf16-mixed").explain())
    assert (
        found["chosen"]
        == "by accelerator: argument, precision: argument, accumulate_grad_batches: default"
    )
    monkeypatch.setenv("TRAINER_KIT_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("TRAINER_KIT_ORIGINS", '{"mixed_precision": "config.yaml:3"}')
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    chosen = trainer()
    assert window(chosen) == 4
    found = lines(chosen.explain())
    assert found["precision"] == "bf16-mixed"
    assert "precision: config.yaml:3" in found["chosen"]
    assert "environment ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in found["chosen"]
    # An argument counts before all of that, a callback too.
    assert window(trainer(precision="16-mixed", accumulate_grad_batches=1)) == 1
    assert window(trainer(callbacks=GradientAccumulation(3))) == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ConfigurationError, match="an integer"):
        trainer()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": -1}, "when it is stopped"),
        ({"max_epochs": None}, "after 1000 epochs"),
        ({"max_steps": 7}, "after 2 epochs, or after 7 steps"),
        ({"max_epochs": None, "max_duration": "100sp"}, "after 100sp"),
        ({"max_epochs": None, "max_time": "00:01:00:00"}, "after 3600s"),
    ],
)
def test_it_shows_the_end_of_the_run(options, expected):
    assert lines(trainer(**options).explain())["ends"] == expected


def test_it_shows_batches_and_steps_of_an_epoch():
    found = lines(trainer(accumulate_grad_batches=4).explain(Net(), loader()))
    assert found["batch"] == "2 a rank, 8 an optimizer step"
    assert found["steps/epoch"].startswith("3 (10 batches in windows of 4)")
    assert "DataLoader over Tensor, in order" in found["data"]


def test_limits_count():
    assert lines(trainer(limit_train_batches=5).explain(Net(), loader()))[
        "steps/epoch"
    ].startswith("5 ")


def test_unknown_numbers_are_named_as_unknown():
    found = lines(trainer().explain(Net(), (batch for batch in loader())))
    assert (found["batch"], found["steps/epoch"]) == ("unknown", "unknown")


def test_several_processes_are_counted_before_they_are_started():
    found = lines(trainer(devices=2, strategy="ddp").explain(Net(), loader()))
    assert found["processes"].startswith("2 ")
    assert "will be started" in found["processes"]
    assert found["batch"] == "2 a rank, 4 an optimizer step"
    assert found["steps/epoch"].startswith("5 ")


def test_the_loop_lists_listeners_in_order():
    text = trainer(callbacks=[Second(), First()]).explain(Validates(), loader())
    found = lines(text)
    assert found["on_train_start"] == "First, Second, Validates"
    assert found["on_validation_end"] == "First, Second"
    assert found["on_train_epoch_end"].endswith("Second")
    assert (
        text.index("on_train_start")
        < text.index("training_step")
        < text.index("on_validation_end")
    )


def test_hooks_without_listeners_are_left_out():
    text = trainer().explain(Net(), loader())
    assert "on_train_start" in text
    assert "on_train_end" not in text


def test_validation_is_shown_if_the_module_has_a_validation_step():
    assert "validation_step" not in trainer().explain(Net(), loader())
    assert "validation_step" in trainer().explain(Validates(), loader())
    assert "validation_step" in trainer().explain(
        type("Heir", (Validates,), {})(), loader()
    )
    assert "validation_step" not in trainer(limit_val_batches=0).explain(
        Validates(), loader()
    )


def test_it_shows_clipping_and_the_owner_of_the_step():
    found = trainer(gradient_clip_val=0.5).explain(Net(), loader())
    assert "by norm to 0.5" in found
    module = Net()
    module.automatic_optimization = False
    assert trainer().explain(module, loader()).count("manual") == 2


def test_it_shows_the_memory_and_traffic_of_a_rank():
    module = Net()
    text = trainer(devices=2, accumulate_grad_batches=4).explain(module, loader())
    assert (
        "per rank     8 B of parameters, 8 B of gradients, 0 B of optimizer state"
        in text
    )
    assert "per step     gradients: all-reduce over 2 ranks" in text
    text = trainer(devices=2, strategy="fsdp", accumulate_grad_batches=4).explain(
        module, loader()
    )
    assert "all-gather over 2 ranks for each forward" in text
    built = type(
        "Built", (Net,), {"__init__": lambda self: tk.TrainModule.__init__(self)}
    )()
    assert "known when configure_model has built" in trainer().explain(built, loader())


def test_an_optimizer_that_needs_a_running_fit_does_not_fail_explain():
    class Cycles(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [
                torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            ]

    text = trainer(devices=2).explain(Cycles(), loader())
    assert "8 B of gradients; known only during the run: optimizer state" in text
    assert "(configure_optimizers needs a running fit: " in text


def test_a_datamodule_is_set_up_first():
    class Data(DataModule):
        def setup(self, stage):
            self.data = loader()

        def train_dataloader(self):
            return self.data

    for given in ({"datamodule": Data()}, {"train_dataloaders": Data()}):
        assert lines(trainer().explain(Net(), **given))["steps/epoch"].startswith("10 ")


def test_a_run_that_cannot_start_is_refused():
    with pytest.raises(ConfigurationError, match="not a TrainModule"):
        trainer().explain(torch.nn.Linear(1, 1))


def test_explaining_runs_nothing():
    module = Net()
    made = trainer()
    made.explain(module, loader())
    assert made.global_step == 0
    made.fit(module, loader())
    assert made.global_step == 20


def test_what_is_not_known_before_a_module_is_divided_is_not_given_as_a_number():
    """The state of an optimizer is that of the parameters of this rank."""
    text = trainer(strategy=MeshStrategy(tp=2, dp_shard=1), devices=2).explain(Net())
    assert (
        "per rank     known only during the run: parameters and gradients and optimizer state"
        in text
    )


# -- format="svg" --------------------------------------------------------------------------------------------------


def placed(picture):
    """By rank: where its box begins, its color, and its samples."""
    found = {}

    def walk(element, x, y):
        found_x, found_y = re.findall(
            r"translate\((\S+) (\S+)\)", element.get("transform", "translate(0 0)")
        )[0]
        x, y = x + float(found_x), y + float(found_y)
        texts = [child.text for child in element if child.tag.endswith("text")]
        if texts and texts[0].startswith("rank "):
            color = next(
                child.get("class") for child in element if child.tag.endswith("rect")
            )
            assert int(texts[0][5:]) not in found
            found[int(texts[0][5:])] = (x, y, color, texts[1])
        for child in element:
            walk(child, x, y)

    walk(ElementTree.fromstring(picture), 0.0, 0.0)
    return found


def test_a_picture_has_each_rank_at_its_place_on_the_mesh():
    strategy = MeshStrategy(pp=2, dp_shard=2, tp=2)
    picture = trainer(strategy=strategy, devices=8).explain(format="svg")
    found = placed(picture)
    assert sorted(found) == list(range(8))
    ranks = torch.arange(8).view(
        2, 2, 2
    )  # as torch's init_device_mesh orders pp, dp_shard and tp
    x, y = (
        torch.tensor(
            [[[found[int(r)][i] for r in row] for row in stage] for stage in ranks]
        )
        for i in (0, 1)
    )
    assert (x[:, :, 1] - x[:, :, 0]).unique().numel() == 1, "tp: from left to right"
    assert (y[:, 1] - y[:, 0]).unique().numel() == 1, "dp_shard: downwards"
    assert (x[1] - x[0]).unique().numel() == 1, "pp: a frame each"
    assert (x[:, :, 1] > x[:, :, 0]).all()
    assert (y[:, 1] > y[:, 0]).all()
    assert (y[0] == y[1]).all()
    assert x[1].min() > x[0].max()
    for index, samples in enumerate(("samples 1 of 2", "samples 2 of 2")):
        assert {found[int(rank)][2:] for rank in ranks[:, index].flatten()} == {
            (f"c{index}", samples)
        }
    for words in (
        "pp=2 × dp_shard=2 × tp=2",
        "prefers-color-scheme:dark",
        'aria-label="8 ranks',
        ">pp 1<",
        ">tp 0<",
    ):
        assert words in picture


@pytest.mark.parametrize(
    ("strategy", "ranks", "axis", "samples"),
    [
        ("auto", 1, None, "all samples"),
        ("ddp", 2, "dp_replicate", "samples 1 of 2"),
        ("fsdp", 4, "dp_shard", "samples 1 of 4"),
        (
            FSDPStrategy(device_mesh=(2, 2), sharding_strategy="HYBRID_SHARD"),
            4,
            "dp_replicate",
            "samples 1 of 4",
        ),
        ("tp", 2, "tp", "all samples"),
    ],
)
def test_every_engine_has_a_picture(strategy, ranks, axis, samples):
    picture = trainer(strategy=strategy, devices=ranks).explain(format="svg")
    found = placed(picture)
    assert len(found) == ranks
    assert found[0][3] == samples
    assert axis is None or f">{axis} 1<" in picture


def test_a_picture_with_a_module_says_what_a_rank_holds_and_sends():
    picture = trainer(strategy="ddp", devices=2).explain(Net(), loader(), format="svg")
    assert "per rank 8 B of parameters" in picture
    assert "gradients: all-reduce over 2 ranks" in picture
    assert picture._repr_svg_() == str(picture), "a notebook shows it"


def test_a_long_axis_is_cut_and_text_is_escaped():
    picture = mesh_picture("<title> & more", {"dp_shard": 12, "tp": 2}, 24)
    found = placed(picture)
    assert len(found) == 8 * 2
    assert max(found) == 15
    assert "the first 8 places of an axis are drawn" in picture
    assert "dp_shard = 12" in picture


def test_another_format_is_refused():
    with pytest.raises(
        ConfigurationError, match='explain returns "text" or "svg"'
    ) as caught:
        trainer().explain(format="svgg")
    assert "svg" in str(caught.value).partition("fix:")[2]
