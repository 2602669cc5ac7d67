"""Plans of real modules: what is measured decides, and the lines of the best are those of a run that works."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit import Trainer
from trainer_kit.core.device_table import find_device
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import build_once
from trainer_kit.planning import planner, real_step
from trainer_kit.planning.measure import AUTOCAST_COPIES, measure
from trainer_kit.planning.planner import plan_fit
from trainer_kit.planning.records import Candidate
from trainer_kit.strategies import DDPStrategy, PostLocalSGD
from trainer_kit.training.auto_strategy import training_bytes


class Net(tk.TrainModule):
    def __init__(self, width=256, layers=4):
        super().__init__()
        sizes = (width, 4 * width)
        blocks = (
            nn.Sequential(nn.Linear(*sizes), nn.GELU(), nn.Linear(*sizes[::-1]))
            for _ in range(layers)
        )
        self.layers = nn.Sequential(*blocks)

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(samples=256, batch_size=64, width=256):
    return DataLoader(TensorDataset(torch.randn(samples, width)), batch_size=batch_size)


def trainer(**given):
    return Trainer(barebones=True, accelerator="cpu", devices=1, **given)


@pytest.mark.slow
def test_the_smallest_limit_chooses_between_copies_and_shards():
    module = Net()
    held = 16 * sum(parameter.numel() for parameter in module.parameters())
    options = {
        "world": 4,
        "device": "h100",
        "precisions": ["32-true"],
        "global_batch_size": 64,
    }
    large = trainer().plan(module, loader(), max_memory=4 * held, **options)
    assert {row.candidate.strategy for row in large.rows if row.estimate} == {
        "ddp",
        "fsdp",
    }
    small = trainer().plan(module, loader(), max_memory=held * 3 // 4, **options)
    assert {row.candidate.strategy for row in small.rows if row.estimate} == {"fsdp"}
    ddp = next(row for row in small.rows if row.candidate.strategy == "ddp")
    assert "of which weights, gradients and optimizer state are" in ddp.reason
    assert ddp.measured.peak >= held
    assert small.trainer_line(small.best()).startswith(
        'Trainer(strategy="fsdp", devices=4, precision="32-true", '
    )
    assert 'strategy="auto" takes ddp' in str(small), (
        "the whole device has room for copies"
    )


@pytest.mark.slow
def test_micro_batches_shrink_until_they_fit_and_the_line_keeps_the_samples():
    module = Net(width=64, layers=8)
    options = {"world": 1, "device": "h100", "precisions": ["32-true"]}
    wide = loader(1024, 512, width=64)
    whole = trainer().plan(module, wide, **options).best()
    assert (whole.candidate.micro_batch, whole.candidate.accumulate) == (512, 1)
    plan = trainer().plan(module, wide, max_memory=whole.measured.peak // 2, **options)
    plain = next(
        row
        for row in plan.rows
        if row.estimate and not row.candidate.activation_checkpointing
    )
    candidate = plain.candidate
    assert 1 < candidate.micro_batch < 512
    assert candidate.micro_batch * candidate.accumulate == 512
    assert plain.measured.peak <= whole.measured.peak // 2
    assert plain.measured.flops == whole.measured.flops, "a step has the same products"
    taken = eval(plan.trainer_line(plain), {"Trainer": lambda **given: given})
    run = trainer(
        max_steps=2,
        **{key: taken[key] for key in ("accumulate_grad_batches", "global_batch_size")},
    )
    run.fit(module, wide)
    assert run.train_batch_samples == candidate.micro_batch


@pytest.mark.slow
def test_activation_checkpointing_is_found_where_it_is_needed():
    module = Net(width=64, layers=16)
    options = {"world": 1, "device": "h100", "precisions": ["32-true"]}
    wide = loader(1024, 512, width=64)
    whole = trainer().plan(module, wide, **options).best()
    plan = trainer().plan(module, wide, max_memory=whole.measured.peak // 2, **options)
    saving = next(
        row
        for row in plan.rows
        if row.estimate and row.candidate.activation_checkpointing
    )
    plain = next(
        row
        for row in plan.rows
        if row.estimate and not row.candidate.activation_checkpointing
    )
    assert saving.candidate.micro_batch > plain.candidate.micro_batch
    assert saving.measured.flops > plain.measured.flops
    useful = [row.estimate.mfu * row.estimate.seconds for row in (saving, plain)]
    assert useful[0] == pytest.approx(useful[1]), (
        "recomputed products are no useful work"
    )
    assert "activation_checkpointing=True" in plan.trainer_line(saving)


def test_hybrid_shards_are_those_of_a_machine():
    plan = trainer().plan(
        Net(),
        loader(),
        world=16,
        device="h100",
        precisions=["32-true"],
        global_batch_size=64,
    )
    rows = {row.candidate.strategy: row for row in plan.rows}
    assert set(rows) == {"ddp", "fsdp", "hsdp8"}
    held = {word: row.measured.memory[0]["parameters"] for word, row in rows.items()}
    assert held["fsdp"] * 2 == pytest.approx(held["hsdp8"], rel=0.05)
    assert held["hsdp8"] * 8 == pytest.approx(held["ddp"], rel=0.05)
    assert {one.kind for one in rows["hsdp8"].measured.traffic} >= {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    }
    line = plan.trainer_line(rows["hsdp8"])
    assert (
        line
        == 'Trainer(strategy="hsdp", devices=8, num_nodes=2, precision="32-true", global_batch_size=64)'
    )


def test_what_the_strategy_of_a_trainer_does_beyond_the_plan_is_noted():
    def plan(strategy):
        own = Trainer(barebones=True, accelerator="cpu", devices=2, strategy=strategy)
        return own.plan(
            Net(),
            loader(),
            world=2,
            device="h100",
            strategies=["ddp", "fsdp"],
            precisions=["32-true"],
        )

    for strategy, says in [
        (DDPStrategy(ddp_comm_hook="powersgd"), "the communication hook"),
        (DDPStrategy(local_sgd=PostLocalSGD(period=4)), "local SGD"),
    ]:
        found = plan(strategy)
        noted = {
            row.candidate.strategy: says in " ".join(row.measured.notes)
            for row in found.rows
        }
        assert noted == {"ddp": True, "fsdp": False}
        assert says in " ".join(found.notes)
        assert any("options of this DDPStrategy" in note for note in found.notes)
    captured = {
        "strategy": DDPStrategy(ddp_comm_hook="bf16")
    }  # by a script, whose Trainer is made on one process
    found = plan_fit(
        trainer(),
        Net(),
        loader(),
        world=2,
        device="h100",
        strategies=["ddp"],
        arguments=captured,
    )
    assert "the communication hook" in " ".join(found.rows[0].measured.notes)
    plain = plan("ddp")
    assert not any(
        "hook" in note or "local SGD" in note or "options" in note
        for note in plain.notes
    )


def test_copies_of_autocast_are_noted():
    def notes(precision):
        return (
            trainer()
            .plan(Net(), loader(), world=4, device="h100", precisions=[precision])
            .notes
        )

    assert AUTOCAST_COPIES in notes("bf16-mixed")
    assert AUTOCAST_COPIES not in notes("bf16-true")


def test_a_plan_changes_neither_module_nor_random_numbers_nor_trainer():
    module, own, data = Net(), trainer(max_epochs=1), loader()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random = torch.random.get_rng_state()
    own.plan(module, data, world=2, device="h100", strategies=["fsdp"])
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in module.state_dict().items()
    )
    assert all(
        parameter.grad is None and type(parameter) is nn.Parameter
        for parameter in module.parameters()
    )
    assert own.global_step == 0
    assert not torch.distributed.is_initialized()
    own.fit(module, loader(samples=64))


def test_samples_of_a_step_come_from_the_trainer_the_loader_or_the_call():
    def samples(own, arguments=None, **given):
        return plan_fit(
            own,
            Net(),
            loader(),
            world=1,
            device="t4",
            precisions=("32-true",),
            arguments=arguments,
            **given,
        )

    assert samples(trainer()).question.global_batch == 64
    assert samples(trainer(accumulate_grad_batches=2)).question.global_batch == 128
    assert samples(trainer(global_batch_size=96)).question.global_batch == 96
    script = samples(trainer(), {"devices": "8", "num_nodes": 2})
    assert script.question.global_batch == 64 * 16
    assert "64 of the loader x 16 ranks x 1 accumulated" in str(script)
    assert samples(trainer(), {"devices": [0, 1]}).question.global_batch == 128
    assert "as devices='auto' gives no number" in " ".join(
        str(samples(trainer(), {"devices": "auto"})).split()
    )
    assert samples(trainer(), global_batch=32).question.global_batch == 32


def test_tokens_are_counted_where_the_loss_weight_counts_them():
    class Words(Net):
        def loss_weight(self, batch):
            return batch[0].numel()

    plan = trainer().plan(
        Words(), loader(), world=1, device="h100", precisions=["bf16-mixed"], price=3
    )
    row = plan.best()
    assert row.estimate.tokens_per_second == pytest.approx(
        256 * row.estimate.samples_per_second
    )
    assert row.estimate.cost == pytest.approx(
        3 / 3600 / row.estimate.tokens_per_second * 1e6
    )
    assert "256 tokens a sample" in str(plan)
    assert re.search("tokens/s +cost/1M", str(plan))


def test_precisions_are_the_trainers_and_the_mixed_one_of_the_device():
    def precisions(own, device, **given):
        options = {"world": 1, "device": device, "max_memory": 1, **given}
        return list(
            dict.fromkeys(
                row.candidate.precision
                for row in own.plan(Net(32, 2), loader(width=32), **options).rows
            )
        )

    assert precisions(trainer(), "h100") == ["32-true", "bf16-mixed"]
    assert precisions(trainer(), "t4") == ["32-true", "16-mixed"]
    assert precisions(trainer(precision="bf16-true"), "h100") == ["bf16-true"]
    assert precisions(trainer(), "h100", precisions=["bf16-true"]) == ["bf16-true"]


def test_a_datamodule_a_dict_of_loaders_and_this_machine():
    class Data(tk.DataModule):
        def setup(self, stage):
            self.ready = stage

        def train_dataloader(self):
            assert self.ready == "fit"
            return loader()

    plan = trainer().plan(Net(), Data(), world=1, device="cpu", precisions=["32-true"])
    assert plan.best().candidate.micro_batch == 64
    assert plan.question.device.bandwidth > 0.1
    assert "rates were measured here" in str(plan)

    class Both(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx) + super().training_step(
                batch["b"], batch_idx
            )

    both = trainer().plan(
        Both(),
        {"a": loader(), "b": loader()},
        world=1,
        device="h100",
        precisions=["32-true"],
    )
    assert both.best().measured.flops == pytest.approx(
        2 * plan.best().measured.flops, rel=0.01
    )


def test_a_plan_leaves_the_generators_of_loaders_where_they_are():
    """The first batch was drawn from them: a fit after a plan read other samples than one without."""
    draws = [torch.Generator().manual_seed(5) for _ in range(2)]
    data = TensorDataset(torch.randn(64, 32))
    loaders = {"a": DataLoader(data, 8, shuffle=True, generator=draws[0])}
    loaders["b"] = DataLoader(
        data, 8, sampler=torch.utils.data.RandomSampler(data, generator=draws[1])
    )

    class Both(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx) + super().training_step(
                batch["b"], batch_idx
            )

    before = [draw.get_state() for draw in draws]
    options = {"world": 1, "device": "h100", "precisions": ["32-true"]}
    assert trainer().plan(Both(32), loaders, **options).best() is not None
    assert all(
        torch.equal(draw.get_state(), state)
        for draw, state in zip(draws, before, strict=True)
    )


@pytest.mark.parametrize(
    "collate",
    [lambda items: torch.stack(items, 1), torch.cat],
    ids=["sequence first", "packed"],
)
def test_samples_are_counted_as_in_a_fit(collate):
    """The rows of the first tensor were taken: 20 and 160 samples, so that another run was planned."""
    items = [torch.randn(20, 256) for _ in range(16)]
    options = {
        "world": 2,
        "device": "cpu",
        "max_memory": "1GB",
        "precisions": ["32-true"],
        "strategies": ["ddp"],
    }
    plain = trainer().plan(Net(layers=1), DataLoader(items, batch_size=8), **options)
    loaded = DataLoader(items, batch_size=8, collate_fn=collate)
    plan = trainer().plan(Net(layers=1), loaded, **options)
    assert "global_batch_size=8)" in plan.trainer_line(plan.best())
    assert plan.best().candidate == plain.best().candidate
    assert plan.best().measured.memory == plain.best().measured.memory
    fit = trainer(max_epochs=1)
    fit.fit(Net(layers=1), loaded)
    assert (fit.progress.samples, fit.global_step) == (16, 2)


def test_a_tiny_step_takes_the_time_of_its_launches():
    """A speed of 1,971,743,760 samples a second was planned, with an MFU of 31 %."""
    row = (
        trainer()
        .plan(
            Net(width=8, layers=1),
            loader(width=8),
            world=1,
            device="h100",
            precisions=["32-true"],
        )
        .best()
    )
    operators = row.measured.operators
    assert 20 < operators < 200  # forward, loss, backward and SGD of two linear layers
    assert row.estimate.launching == pytest.approx(5e-6 * operators)
    assert row.estimate.launching > 10 * row.estimate.compute
    assert row.estimate.seconds >= row.estimate.launching
    assert row.estimate.mfu < 0.01


@pytest.mark.parametrize("stacked", [True, False])
def test_lists_of_a_tensor_for_each_sample_are_made_longer(stacked):
    """Their samples were counted by the first size of the first image: 3 channels."""

    class Detector(tk.TrainModule):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.head = nn.Linear(8, 4)

        def training_step(self, batch, batch_idx):
            images, targets = batch
            found = self.head(self.conv(torch.stack(tuple(images))).mean((2, 3)))
            assert len(found) == len(targets) == len(images)
            return sum(
                (one - target["boxes"].mean(0)).square().mean()
                for one, target in zip(found, targets, strict=True)
            )

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = [
        (torch.randn(3, 16, 16), {"boxes": torch.rand(2, 4), "name": "a"})
        for _ in range(8)
    ]

    def collate(samples):
        images, targets = zip(*samples, strict=True)
        return (torch.stack(images) if stacked else images), targets

    loaded = DataLoader(data, batch_size=8, collate_fn=collate)
    options = {
        "device": "h100",
        "strategies": ["ddp"],
        "precisions": ["32-true"],
        "global_batch_size": 64,
    }
    row = trainer().plan(Detector(), loaded, world=2, **options).best()
    assert row is not None
    assert (row.candidate.micro_batch, row.candidate.accumulate) == (32, 1)
    assert row.measured.flops >= 32 * 3 * 8 * 27 * 14 * 14
    plan = trainer().plan(
        Detector(), loaded, world=1, device="h100", precisions=["32-true"]
    )
    assert plan.question.global_batch == 8


def test_samples_that_the_ranks_cannot_divide_are_named():
    options = {
        "device": "h100",
        "strategies": ["ddp", "ddp"],
        "precisions": ["32-true"],
        "global_batch_size": 16,
    }
    plan = trainer().plan(Net(32), loader(width=32), world=[4, 3, 64], **options)
    assert len(plan.rows) == 3, "each word counts once"
    assert [note for note in plan.notes if "samples a step, and not" in note] == [
        "3 ranks have 15 samples a step, and not 16: every rank has the same number, at least 1",
        "64 ranks have 64 samples a step, and not 16: every rank has the same number, at least 1",
    ]


def test_wrong_calls_are_answered_in_words():
    for given, text in (
        ({"world": 0}, "a plan needs at least 1 rank"),
        ({"world": []}, "a plan needs at least 1 rank"),
        ({"world": 2, "device": "h900"}, "no known data sheet"),
        ({"world": 2, "max_memory": "much"}, "max_memory must be a number of bytes"),
        ({"world": 2, "price": -1}, "must not be negative"),
        ({"world": 2, "strategies": ["fsdp", "dpp"]}, "no strategy is called 'dpp'"),
        ({"world": 2, "precisions": ["bf16-mix"]}, "unknown precision 'bf16-mix'"),
        (
            {"world": 2, "global_batch_size": 0},
            "the global batch needs at least one sample",
        ),
    ):
        with pytest.raises(ConfigurationError, match=text):
            trainer().plan(Net(), loader(), **{"device": "h100", **given})
    with pytest.raises(ConfigurationError, match="needs training data"):
        trainer().plan(Net(), world=1, device="h100")
    with pytest.raises(ConfigurationError, match="has no batch"):
        trainer().plan(Net(), [], world=1, device="h100")


def test_progress_is_printed_for_long_searches_only(monkeypatch):
    lines = []
    options = {
        "world": 1,
        "device": "h100",
        "precisions": ("32-true",),
        "say": lines.append,
    }
    monkeypatch.setattr("trainer_kit.planning.planner._QUIET", 1e9)
    plan_fit(trainer(), Net(), loader(), **options)
    assert lines == []
    monkeypatch.setattr("trainer_kit.planning.planner._QUIET", -1)
    plan_fit(trainer(), Net(), loader(), **options)
    assert [line.partition(":")[0] for line in lines] == [
        "single_device, 32-true, 1 rank, micro-batch 64"
    ]


def plan_of(module, **given):
    options = {
        "world": 2,
        "device": "h100",
        "strategies": ["ddp"],
        "precisions": ["32-true"],
        **given,
    }
    return (
        options.pop("trainer", None) or trainer(),
        module,
        options.pop("loader", None) or loader(),
        options,
    )


def planned(module=None, **given):
    own, module, data, options = plan_of(
        Net(32, 2) if module is None else module, **given
    )
    return own.plan(module, data, **options)


def test_a_class_another_module_and_a_dataset_are_refused_before_the_search():
    with pytest.raises(
        ConfigurationError, match="this is a class, not a module object"
    ):
        planned(Net)
    with pytest.raises(
        ConfigurationError, match="this is not a TrainModule\n  found: Linear"
    ):
        planned(nn.Linear(2, 2))
    with pytest.raises(
        ConfigurationError,
        match=r"this is not a loader\n  found: TensorDataset\n  fix:   pass a Data",
    ):
        planned(loader=loader().dataset)


def test_a_plan_inside_a_fit_and_on_a_rank_is_refused(monkeypatch):
    """Each row said that it cannot be built; inside a fit the plan even called setup() of the running module."""

    class Planning(tk.Callback):
        def on_train_batch_end(self, trainer, module, *values):
            planned(trainer=trainer)

    run = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
    }
    with pytest.raises(
        ConfigurationError, match="needs an idle process\n  found: a running fit"
    ):
        Trainer(callbacks=[Planning()], **run).fit(Net(32, 2), loader(width=32))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(
            ConfigurationError,
            match="needs an idle process\n  found: a process group of 1 rank\n  fix:   plan",
        ):
            planned()
    finally:
        torch.distributed.destroy_process_group()


def test_errors_of_the_users_code_keep_their_class_and_name_what_the_plan_did():
    class Download(tk.DataModule):
        def prepare_data(self):
            raise OSError("no network")

        def train_dataloader(self):
            return loader()

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise KeyError("pixels")

    class Counts(Net):
        def loss_weight(self, batch):
            return batch["tokens"]

    for given, kind, doing in (
        (
            {"loader": Download()},
            OSError,
            "while the plan called prepare_data() and setup(), as a fit does",
        ),
        (
            {"loader": DataLoader(Broken())},
            KeyError,
            "while the plan read the first batch of the training data",
        ),
        (
            {"module": Counts(32, 2)},
            TypeError,
            "while loss_weight counted the tokens of the first batch",
        ),
    ):
        with pytest.raises(kind) as raised:
            planned(**given)
        assert doing in raised.value.__notes__


def test_setup_of_a_module_reads_the_datamodule():
    """`trainer.datamodule` was None there, so a module that counts its classes could not be planned or explained."""

    class Data(tk.DataModule):
        def setup(self, stage):
            self.classes = 7

        def train_dataloader(self):
            return loader(width=32)

    class Sized(Net):
        def setup(self, stage):
            self.head = nn.Linear(32, self.trainer.datamodule.classes)

    assert planned(Sized(32, 2), loader=Data()).best() is not None
    assert "layout" in str(trainer().explain(Sized(32, 2), datamodule=Data()))


def test_a_step_that_fails_is_noted_with_a_way_to_try_it(capfd):
    class Wrong(Net):
        def training_step(self, batch, batch_idx):
            return self.layers(batch[0][:, :5]).sum()

    found = planned(Wrong(32, 2))
    assert found.rows[0].reason.count("weights, gradients and optimizer state") == 1
    assert (
        "the rest is unknown: the step cannot run without data (RuntimeError in test_planner.py"
        in found.rows[0].reason
    )
    assert any("Trainer(fast_dev_run=True)" in note for note in found.notes)
    assert "Traceback" not in capfd.readouterr().err, (
        "torch logs one for each operator that fails"
    )


def test_a_missing_optimizer_is_answered_with_its_fix():
    class Without(tk.TrainModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).sum()

    assert (
        "Without has no optimizer: override configure_optimizers"
        in planned(Without()).rows[0].reason
    )


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_float16_with_a_gradient_scaler_is_measured(strategy):
    """The scaler reads whether gradients are finite: no plan for a T4 or a V100 ranked its mixed precision."""
    options = {
        "world": 1 if strategy == "single_device" else 2,
        "device": "t4",
        "strategies": [strategy],
    }
    rows = {
        row.candidate.precision: row
        for row in planned(Net(), precisions=["16-mixed", "32-true"], **options).rows
    }
    mixed, whole = rows["16-mixed"].measured, rows["32-true"].measured
    assert mixed.exact
    assert rows["16-mixed"].estimate is not None
    assert mixed.flops == whole.flops


def test_a_large_step_that_needs_data_is_calculated_in_true_precision(monkeypatch):
    """The weights of the copy could not be converted: the row named an internal error of torch."""

    class Reads(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * batch[0].sum().item()

    monkeypatch.setattr(real_step, "LARGEST", 0)
    held = 16 * sum(parameter.numel() for parameter in Net().parameters())
    row = planned(Reads(), precisions=["bf16-true"]).rows[0]
    assert row.measured.peak == pytest.approx(held // 2, rel=0.001)


class Tied(Net):
    def __init__(self):
        super().__init__(128, 3)
        self.layers[2][0].weight = self.layers[0][0].weight


class Frozen(Net):
    def __init__(self):
        super().__init__(128, 3)
        self.layers[0].requires_grad_(False)


class Buffered(Net):
    def __init__(self):
        super().__init__(128, 3)
        self.register_buffer("table", torch.zeros(400, 400))


class Late(Net):
    def __init__(self):
        tk.TrainModule.__init__(self)

    def configure_model(self):
        if not hasattr(self, "layers"):
            self.layers = Net(128, 3).layers


class Halves(Net):
    def __init__(self):
        super().__init__(128, 3)
        self.layers[0].to(torch.bfloat16)

    def training_step(self, batch, batch_idx):
        return (
            self.layers[1:](self.layers[0](batch[0].bfloat16()).float()).square().mean()
        )


class Plain(Net):
    def __init__(self):
        super().__init__(128, 3)


@pytest.mark.parametrize(
    ("module", "precision"),
    [
        (Plain, "32-true"),
        (Plain, "bf16-mixed"),
        (Plain, "16-mixed"),
        (Plain, "bf16-true"),
        (Plain, "64-true"),
        (Tied, "32-true"),
        (Frozen, "32-true"),
        (Frozen, "bf16-true"),
        (Buffered, "32-true"),
        (Halves, "32-true"),
        (Late, "32-true"),
    ],
)
def test_auto_decides_by_the_bytes_that_a_plan_measures(module, precision):
    """Buffers, and layers of configure_model in the line of the plan, were left out."""
    tried = Candidate(strategy="ddp", precision=precision, world=2, micro_batch=4)
    held = measure(module(), [torch.zeros(4, 128)], tried, trainer=trainer()).memory[0]
    state = held["parameters"] + held["gradients"] + held["optimizer"]
    built = module()
    build_once(built)
    assert training_bytes(built, precision, True) == pytest.approx(state, rel=1e-4)
    if precision != "64-true":  # no data sheet gives its rate
        plan = planned(module(), precisions=[precision], loader=loader(width=128))
        assert (
            f'strategy="auto" takes ddp: {in_units(training_bytes(built, precision, True))} '
            in str(plan)
        )


def test_a_choice_of_auto_that_differs_from_the_table_is_explained():
    def note(module, memory, **given):
        small = replace(find_device("h100"), memory=memory / 1e9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "find_device", lambda word: small)
            plan = planned(module, strategies=["ddp", "fsdp"], **given)
        return next(text for text in plan.notes if text.startswith('strategy="auto"'))

    class Simple(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    held = training_bytes(Net(), "32-true", True)
    assert note(Net(), 4 * held).endswith("GB") or note(Net(), 4 * held).endswith("MB")
    assert 'auto" takes ddp' in note(Net(), 1.3 * held)
    assert "On 2 ranks that does not fit: auto does not count activations" in note(
        Net(), 1.3 * held
    )
    assert "takes fsdp" in note(Simple(), 1.1 * held)
    assert "On 2 ranks ddp fits too: auto assumes Adam" in note(Simple(), 1.1 * held)
