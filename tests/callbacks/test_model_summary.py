import contextlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import trainer_kit as tk
from tests.strategies.pipelines import Writer, stages, texts, words
from trainer_kit.callbacks import ModelSummary
from trainer_kit.callbacks.model_summary import summarize
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule


class Net(nn.Module):
    def __init__(self, example=None):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 16, bias=False)
        )
        self.head = nn.Linear(16, 2)
        self.scale = nn.Parameter(torch.ones(3))
        self.example_input_array = example

    def forward(self, x):
        return self.head(self.body(x))


def test_rows_and_totals():
    net = Net()
    net.head.requires_grad_(False)
    net.body[1].eval()
    table = summarize(net)
    assert [(row.name, row.type, row.params, row.training) for row in table.rows] == [
        ("body", "Sequential", 8 * 16 + 16 + 16 * 16, True),
        ("head", "Linear", 34, True),
    ]
    assert (table.trainable, table.frozen, table.total, table.loose) == (
        403,
        34,
        437,
        3,
    )
    assert table.megabytes == 437 * 4 / 1e6
    assert (table.train_modules, table.eval_modules) == (4, 1)
    assert str(table).splitlines() == [
        "Name         | Type       | Params | Mode",
        "------------------------------------------",
        "body         | Sequential | 400    | train",
        "head         | Linear     | 34     | train",
        "other params |            | 3      |",
        "------------------------------------------",
        "403       trainable params",
        "34        non-trainable params",
        "437       total params",
        "0.002     MB of parameters",
        "4         modules in train mode",
        "1         modules in eval mode",
    ]


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (0, []),
        (1, ["body", "head"]),
        (2, ["body", "body.0", "body.1", "body.2", "head"]),
        (-1, ["body", "body.0", "body.1", "body.2", "head"]),
    ],
)
def test_depth(depth, names):
    table = summarize(Net(), depth)
    assert [row.name for row in table.rows] == names
    assert table.total == 437


def test_sizes_are_those_of_the_real_dtypes():
    net = nn.Sequential(
        nn.Linear(10, 10, bias=False).double(),
        nn.Linear(10, 10, bias=False).to(torch.bfloat16),
    )
    assert summarize(net).megabytes == (100 * 8 + 100 * 2) / 1e6


def test_shared_parameters_count_once():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    table = summarize(net)
    assert [row.params for row in table.rows] == [16, 16]
    assert (table.total, table.loose) == (16, 0)


def test_on_the_meta_device():
    with torch.device("meta"):
        net = Net(example=torch.zeros(5, 8))
    table = summarize(net)
    assert (table.total, table.rows[0].out_size) == (437, [5, 16])
    assert table.flops == 2 * 5 * (8 * 16 + 16 * 16 + 16 * 2)


def test_layers_that_are_not_initialized_yet():
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    net.example_input_array = torch.zeros(1, 3)
    table = summarize(net)
    assert [row.params for row in table.rows] == [None, 10]
    assert table.total == 10
    assert "no sizes: some layers are not initialized yet" in str(table)
    assert net[0].has_uninitialized_params(), "looking initializes nothing"
    del net.example_input_array
    assert "some parameters are not initialized yet" in str(summarize(net))


@pytest.mark.parametrize(
    "example", [torch.zeros(5, 8), (torch.zeros(5, 8),), {"x": torch.zeros(5, 8)}]
)
def test_sizes_and_flops_of_an_example(example):
    net = Net(example=example)
    net.body[1].eval()
    modes = {name: module.training for name, module in net.named_modules()}
    random = torch.get_rng_state()
    table = summarize(net, -1)
    first, last = 2 * 5 * 8 * 16, 2 * 5 * 16 * 2
    assert [(row.name, row.flops, row.in_size, row.out_size) for row in table.rows] == [
        ("body", first + 2 * 5 * 16 * 16, [5, 8], [5, 16]),
        ("body.0", first, [5, 8], [5, 16]),
        ("body.1", 0, [5, 16], [5, 16]),
        ("body.2", 2 * 5 * 16 * 16, [5, 16], [5, 16]),
        ("head", last, [5, 16], [5, 2]),
    ]
    assert table.flops == first + 2 * 5 * 16 * 16 + last
    assert "FLOPs in a forward" in str(table)
    assert {name: module.training for name, module in net.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_several_inputs_and_outputs_and_unused_layers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = nn.Bilinear(2, 3, 4)
            self.rnn = nn.GRU(4, 5, batch_first=True)
            self.unused = nn.Linear(2, 2)
            self.example_input_array = (torch.zeros(6, 2), torch.zeros(6, 3))

        def forward(self, a, b):
            return self.rnn(self.pair(a, b)[None])

    rows = {row.name: row for row in summarize(Two()).rows}
    assert rows["pair"].in_size == [[6, 2], [6, 3]]
    assert rows["rnn"].out_size == [[1, 6, 5], [1, 1, 5]]
    assert rows["unused"].in_size is None


def test_a_forward_that_fails_is_a_note():
    net = Net(example=torch.zeros(5, 9))
    net.body[1].eval()
    table = summarize(net)
    assert table.flops is None
    assert "no sizes: forward(example_input_array) raised RuntimeError" in str(table)
    assert net.training
    assert not net.body[1].training
    assert not any(module._forward_hooks for module in net.modules())


def test_numbers_are_short():
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Linear(1000, 1000),
            nn.Linear(60000, 60000),
            nn.Linear(9, 111, bias=False),
        )
    lines = str(summarize(net)).splitlines()
    assert [line.split(" | ")[2].strip() for line in lines[2:5]] == [
        "1 M",
        "3.6 B",
        "999",
    ]


class Summarized(TinyModule):
    """`Net`, as a module that trains; it notes under which precision its forwards run."""

    def __init__(self):
        super().__init__()
        self.layer = Net()
        self.example_input_array = torch.zeros(5, 8)
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return super().forward(x)


@pytest.mark.parametrize(
    ("precision", "seen"),
    [("64-true", (torch.float64, False)), ("bf16-mixed", (torch.float32, True))],
)
def test_the_callback(capsys, precision, seen):
    module = Summarized()
    fitted = {
        "max_steps": 1,
        "barebones": True,
        "accelerator": "cpu",
        "precision": precision,
    }
    tk.Trainer(**fitted, callbacks=ModelSummary(max_depth=2)).fit(
        module, [torch.zeros(4, 8)]
    )
    assert module.seen[0] == seen
    printed = capsys.readouterr().err
    convert = torch.Tensor.double if precision == "64-true" else None
    assert printed.startswith(f"{summarize(module, 2, convert=convert)}\n")
    assert "[5, 16]" in printed
    tk.Trainer(**fitted, callbacks=ModelSummary(max_depth=0)).fit(
        Summarized(), [torch.zeros(4, 8)]
    )
    assert capsys.readouterr().err == ""


def test_it_shows_the_memory_and_traffic_of_a_rank(capsys):
    module = TinyModule()
    trainer = tk.Trainer(
        accelerator="cpu", max_steps=1, barebones=True, callbacks=ModelSummary()
    )
    trainer.fit(module, [torch.zeros(4, 32)])
    size = sum(4 * parameter.numel() for parameter in module.parameters())
    told = capsys.readouterr().err
    assert (
        f"per rank     {size} B of parameters, {size} B of gradients, 0 B of optimizer state"
        in told
    )
    assert "one process, nothing sharded" in told


def test_a_sharded_module_is_not_run():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].weight.device_mesh = SimpleNamespace()
    net.example_input_array = torch.zeros(1, 2)
    assert "would need every rank" in str(summarize(net))


@pytest.mark.parametrize("depth", [-2, 1.5, True, "all"])
def test_bad_depth(depth):
    with pytest.raises(ConfigurationError, match="max_depth"):
        ModelSummary(max_depth=depth)


def test_flop_counter_is_not_imported_without_an_example():
    assert "torch.utils.flop_counter" not in summarize.__globals__
    assert sys.modules["trainer_kit.callbacks.model_summary"]


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_stages_of_a_pipeline_are_one_module():
    """Rank 0 prints the module of all ranks; tied weights, of which two stages have a copy, count once."""
    shown = io.StringIO()
    trainer = tk.Trainer(
        max_steps=1,
        strategy=stages(),
        devices=2,
        accumulate_grad_batches=2,
        callbacks=[ModelSummary(-1)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    with contextlib.redirect_stderr(shown):
        trainer.fit(Writer(words(tied="ends")), texts((4, 4)))
    expected = str(summarize(Writer(words(tied="ends")), -1))
    assert (expected in shown.getvalue()) == (trainer.global_rank == 0), (
        shown.getvalue()
    )
