"""`Fabric`: the loops of Lightning's documentation, with another import, against loops by hand."""

from __future__ import annotations

import csv
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit import Fabric
from trainer_kit.accelerator.fabric import _default_count
from trainer_kit.loggers import CSVLogger
from trainer_kit.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def points(count=24):
    drawn = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn, drawn.sum(1, keepdim=True))


def by_hand(epochs=2, batch_size=4, every=1, clip=None):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for index, (inputs, targets) in enumerate(DataLoader(points(), batch_size)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            if (index + 1) % every == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return model


def assert_equal(model, expected, **tolerance):
    torch.testing.assert_close(
        dict(model.state_dict()),
        dict(expected.state_dict()),
        **(tolerance or {"rtol": 0, "atol": 0}),
    )


def test_the_loop_of_the_documentation():
    fabric = Fabric(accelerator="cpu", devices=1, strategy="auto")
    fabric.launch()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    dataloader = fabric.setup_dataloaders(DataLoader(points(), batch_size=4))
    model.train()
    for _ in range(2):
        for inputs, targets in dataloader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
    assert_equal(model, by_hand())


def test_accumulation_and_clipping():
    fabric = Fabric(accelerator="cpu")
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))
    train, val = fabric.setup_dataloaders(
        DataLoader(points(), 4), DataLoader(points(8), 4)
    )
    for _ in range(2):
        for index, (inputs, targets) in enumerate(train):
            is_accumulating = (index + 1) % 2 != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            if not is_accumulating:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                assert norm > 0
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(model, by_hand(every=2, clip=0.5))
    assert sum(len(inputs) for inputs, _ in val) == 8


def test_gradients_that_are_not_finite_or_clipped_in_two_ways():
    fabric = Fabric(accelerator="cpu")
    model, optimizer = (
        fabric.setup(net(), torch.optim.SGD(net().parameters(), lr=0.1))[0],
        None,
    )
    fabric.backward(model(torch.full((1, 3), float("nan"))).sum())
    with pytest.raises(tk.NonFiniteError, match="error_if_nonfinite=False"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert not torch.isfinite(
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    )
    with pytest.raises(tk.ConfigurationError, match="by value or by norm"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0, max_norm=1.0)
    assert fabric.clip_gradients(model, optimizer, clip_val=1.0) is None


def test_precision_sets_the_dtype_and_device_of_new_layers():
    fabric = Fabric(accelerator="cpu", precision="bf16-true")
    with fabric.init_module():
        layer = nn.Linear(3, 1)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.bfloat16, "cpu")
    mixed = Fabric(accelerator="cpu", precision="bf16-mixed")
    model = mixed.setup(nn.Linear(3, 1))
    with mixed.autocast():
        assert torch.mm(torch.ones(1, 3), torch.ones(3, 1)).dtype == torch.bfloat16
    assert model.weight.dtype == torch.float32


def test_saving_and_loading(tmp_path):
    def prepared():
        fabric = Fabric(accelerator="cpu")
        model = net()
        return fabric, *fabric.setup(
            model, torch.optim.Adam(model.parameters(), lr=0.01)
        )

    def step(fabric, model, optimizer):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()

    fabric, model, optimizer = prepared()
    step(fabric, model, optimizer)
    state = {"model": model, "optimizer": optimizer, "iteration": 1, "extra": [1, 2]}
    fabric.save(tmp_path / "checkpoint.ckpt", state)
    step(fabric, model, optimizer)
    other, loaded, stepper = prepared()
    held = {"model": loaded, "optimizer": stepper, "iteration": 0}
    assert other.load(tmp_path / "checkpoint.ckpt", held) == {"extra": [1, 2]}
    assert held["iteration"] == 1
    step(other, loaded, stepper)
    assert_equal(loaded, model)
    assert (
        tk.checkpoint.read_weights(tmp_path / "checkpoint.ckpt").keys()
        == model.state_dict().keys()
    )
    with pytest.raises(tk.CheckpointError, match="strict=False"):
        other.load(tmp_path / "checkpoint.ckpt", {"scheduler": None})
    assert (
        other.load(
            tmp_path / "checkpoint.ckpt", {"scheduler": None}, strict=False
        ).keys()
        == state.keys()
    )
    fabric.save(
        tmp_path / "some",
        {"model": model},
        filter={"model": lambda name, value: name.startswith("0.")},
    )
    assert fabric.load(tmp_path / "some")["model"].keys() == {"0.weight", "0.bias"}


class Counting(torch.optim.SGD):
    """Has state of its own, as optimizers of other packages do."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]
        super().load_state_dict(
            {name: value for name, value in state_dict.items() if name != "steps"}
        )


def test_an_optimizer_with_its_own_state(tmp_path):
    fabric = Fabric(accelerator="cpu")
    model, other = net(), net()
    model, optimizer = fabric.setup(model, Counting(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    fabric.save(tmp_path / "saved", {"optimizer": optimizer})
    _, loaded = fabric.setup(other, Counting(other.parameters(), lr=0.1))
    fabric.load(tmp_path / "saved", {"optimizer": loaded})
    assert loaded.optimizer.steps == 1


def test_files_of_lightning(tmp_path):
    expected = by_hand(epochs=1)
    torch.save(
        {"model": expected.state_dict(), "iteration": 6}, tmp_path / "fabric.ckpt"
    )
    torch.save(expected.state_dict(), tmp_path / "raw.pt")
    fabric = Fabric(accelerator="cpu")
    first, second = fabric.setup(net()), fabric.setup(net())
    assert fabric.load(tmp_path / "fabric.ckpt", {"model": first}) == {"iteration": 6}
    fabric.load_raw(tmp_path / "raw.pt", second)
    assert_equal(first, expected)
    assert_equal(second, expected)


def test_callbacks_and_loggers(tmp_path, capsys):
    class Counting:
        count = 0

        def on_train_epoch_end(self, results):
            self.count += results

    callback, logger = Counting(), CSVLogger(tmp_path)
    fabric = Fabric(accelerator="cpu", callbacks=callback, loggers=logger)
    fabric.call("on_train_epoch_end", results=3)
    fabric.call("on_nothing")
    fabric.log("loss", torch.tensor(0.5), step=1)
    fabric.log_dict({"loss": 0.25, "rate": 0.1}, step=2)
    logger.finalize("success")
    rows = list(
        csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    )
    assert callback.count == 3
    assert fabric.logger is logger
    assert [row["loss"] for row in rows] == ["0.5", "0.25"]
    fabric.print("printed")
    assert capsys.readouterr().out.endswith("printed\n")


def test_one_process():
    fabric = Fabric(accelerator="cpu")
    assert (
        fabric.global_rank,
        fabric.local_rank,
        fabric.node_rank,
        fabric.world_size,
    ) == (
        0,
        0,
        0,
        1,
    )
    assert (fabric.is_global_zero, fabric.device) == (True, torch.device("cpu"))
    assert fabric.launch(lambda one, two: (one is fabric, two), 2) == (True, 2)
    assert fabric.seed_everything(3) == 3
    assert torch.equal(fabric.all_gather(torch.ones(2)), torch.ones(2))
    assert fabric.all_reduce(torch.tensor(2.0), reduce_op="sum") == 2
    assert fabric.broadcast({"a": 1}) == {"a": 1}
    fabric.barrier()
    with fabric.rank_zero_first():
        assert fabric.to_device({"x": torch.ones(1)})["x"].device.type == "cpu"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"num_nodes": 2, "devices": 2},
            r"(?s)devices=2 on 2 nodes, 1 process.*launch --num_processes 4",
        ),
        ({"strategy": "dp"}, r"(?s)'dp'.*did you mean"),
        ({"precision": "32-true", "plugins": object()}, "set twice"),
        ({"devices": "0,1"}, r"(?s)devices='0,1'.*CUDA_VISIBLE_DEVICES"),
        ({"devices": [1]}, r"(?s)devices=\[1\].*CUDA_VISIBLE_DEVICES"),
        ({"devices": "two"}, "devices='two'"),
        ({"accelerator": "bogus"}, "no such device"),
    ],
)
def test_unsupported_options_are_refused(options, match):
    with pytest.raises(tk.ConfigurationError, match=match):
        Fabric(**{"accelerator": "cpu", **options})


@pytest.mark.parametrize("devices", ["1", "-1", -1, 1, [0], "auto"])
def test_numbers_of_devices(devices):
    assert Fabric(accelerator="cpu", devices=devices).world_size == 1


def test_auto_counts_the_accelerators_of_the_machine():
    """As Lightning's: ``devices="auto"`` and -1 are all devices, and one process on the CPU."""
    assert _default_count("cpu", "auto", 8) == 1
    assert _default_count("auto", "auto", 0) == 1
    assert (
        _default_count("gpu", "ddp", 8)
        == _default_count("auto", FSDPStrategy(), 8)
        == 8
    )
    assert _default_count("auto", SingleDeviceStrategy("cpu"), 8) == 1


def test_processes_that_are_not_started_are_named():
    fabric = Fabric(accelerator="cpu", devices=2)
    assert fabric.world_size == 2
    for use in (
        lambda: fabric.setup(net()),
        lambda: fabric.setup_dataloaders([1]),
        fabric.barrier,
    ):
        with pytest.raises(
            tk.ConfigurationError,
            match=r"(?s)not started yet.*call fabric\.launch\(\) first",
        ):
            use()


def test_attributes_of_lightnings_fabric():
    fabric = Fabric(
        accelerator=tk.accelerators.CPUAccelerator(),
        devices=1,
        loggers=CSVLogger(tempfile.mkdtemp()),
    )
    assert fabric.loggers == [fabric.logger]
    with pytest.raises(AttributeError, match=r"(?s)'_loggers'.*fix:   fabric\.loggers"):
        _ = fabric._loggers
    with pytest.raises(AttributeError, match="did you mean 'all_gather'"):
        _ = fabric.all_gathr
    assert not hasattr(fabric, "nothing_of_the_kind")
    with fabric.init_tensor():
        assert torch.ones(1).device == fabric.device
    with pytest.raises(
        tk.ConfigurationError, match=r"(?s)CheckpointIO.*on_checkpoint_committed"
    ):
        Fabric(plugins=tk.plugins.io.TorchCheckpointIO())


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.LSTM(2, 2),
    ],
)
@pytest.mark.parametrize("face", [Fabric, tk.Trainer])
def test_layers_without_values_draw_no_random_numbers(face, layer):
    options = {"logger": False, "barebones": True} if face is tk.Trainer else {}
    owner = face(accelerator="cpu", devices=1, precision="bf16-true", **options)
    state = torch.get_rng_state()
    with owner.init_module(empty_init=True):
        built = layer()
    assert torch.equal(state, torch.get_rng_state())
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}
    with owner.init_module():
        layer()
    assert not torch.equal(state, torch.get_rng_state())


def test_a_value_called_step_is_the_step_of_its_row(tmp_path):
    fabric = Fabric(
        accelerator="cpu", devices=1, loggers=tk.fabric.loggers.CSVLogger(tmp_path)
    )
    fabric.log_dict({"loss": torch.tensor(1.5), "step": 3, "epoch": 0}, step=3)
    fabric.log_dict({"loss": 2.5, "step": 7})
    fabric.logger.save()
    with open(fabric.logger.path) as file:
        assert [(row["step"], row["loss"]) for row in csv.DictReader(file)] == [
            ("3", "1.5"),
            ("7", "2.5"),
        ]


_LAUNCHED = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from trainer_kit import Fabric
from trainer_kit.accelerator.fabric import _default_count

fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])

def train(fabric, rate=0.1):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=rate))
    data = torch.arange(16.0).reshape(8, 2)
    sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank, shuffle=False)
    own = fabric.setup_dataloaders(DataLoader(data, 2, sampler=sampler), use_distributed_sampler=False)
    for batch in fabric.setup_dataloaders(DataLoader(data, 2)):
        fabric.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    read = [batch[:, 0].tolist() for batch in own]
    last = fabric.broadcast(fabric.global_rank, src=1)
    if fabric.is_global_zero:
        print("RESULT", fabric.world_size, read, last, [round(x, 4) for x in model.weight[0].tolist()], flush=True)
    return fabric.global_rank, fabric.world_size

if sys.argv[1] == "ddp":
    fabric.launch()
    train(fabric)
else:
    print("RETURNED", fabric.launch(train, rate=0.1), flush=True)
"""


@pytest.mark.slow
def test_launch_starts_the_processes(tmp_path, programs):
    """In a plain script, `launch` runs the script again in each process, or forks it for a function."""
    lines = {}
    for strategy in ("ddp", "ddp_spawn"):
        script = tmp_path / "train.py"
        script.write_text(_LAUNCHED)
        run = programs.run(script, strategy, anew=strategy == "ddp")
        assert run.returncode == 0, run.stderr
        lines[strategy] = [
            line
            for line in run.stdout.splitlines()
            if line.startswith(("RESULT", "RETURNED"))
        ]
    assert lines["ddp"] == lines["ddp_spawn"][:1]
    assert lines["ddp"][0].startswith("RESULT 2 [[0.0, 4.0], [8.0, 12.0]] 1 [")
    assert lines["ddp_spawn"][1:] == ["RETURNED (0, 2)"]


def test_save_takes_a_filter(tmp_path):
    fabric = Fabric(accelerator="cpu")
    with pytest.raises(
        tk.ConfigurationError, match=r"(?s)filter= names \['modle'\].*'model'"
    ):
        fabric.save(
            tmp_path / "some",
            {"model": net()},
            filter={"modle": lambda name, value: False},
        )
    assert not (tmp_path / "some").exists()


class Named(tk.LightningModule):
    """A module whose steps and methods use layers without its forward."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        self.layers = net()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def loss(self, batch):
        return self.training_step(batch, 0) * self.scale / 2.0

    def ends(self):
        return self.scale

    def forward(self, inputs):
        return self.layers(inputs)


def trained(fabric, call, epochs=2, batch_size=4):
    module = Named()
    model, optimizer = fabric.setup(
        module, torch.optim.Adam(module.parameters(), lr=0.01)
    )
    if call == "loss":
        model.mark_forward_method("loss")
    for _ in range(epochs):
        for batch in fabric.setup_dataloaders(DataLoader(points(), batch_size)):
            optimizer.zero_grad()
            fabric.backward(
                model.loss(batch) if call == "loss" else model.training_step(batch, 0)
            )
            optimizer.step()
    return model


def test_attributes_and_methods_of_a_prepared_module(tmp_path):
    logger = CSVLogger(tmp_path)
    fabric = Fabric(accelerator="cpu", loggers=logger)
    model = trained(fabric, "training_step")
    assert_equal(model.module.layers, by_hand())
    assert isinstance(model.module, Named)
    assert model.layers is model.module.layers
    model.scale = 3.0
    assert (model.module.scale, model.ends()) == (3.0, 3.0)
    model.seen = 1
    assert model.module.seen == 1
    assert model.state_dict().keys() == model.module.state_dict().keys()
    model.eval()
    assert (model.training, model.module.training, model.layers.training) == (
        False,
        False,
        False,
    )
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018
    assert model.logger is logger
    model.print("through the fabric")
    with pytest.raises(
        AttributeError,
        match=r"(?s)trainer\.datamodule is not available: a Fabric runs.*argument",
    ):
        model.trainer.datamodule  # noqa: B018
    logger.finalize("success")
    rows = list(
        csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    )
    assert float(rows[-1]["loss"]) > 0
    for wrong in ("forward", "scale", "nothing"):
        with pytest.raises(tk.ConfigurationError, match=f"{wrong!r} of Named"):
            model.mark_forward_method(wrong)
    again = fabric.setup_module(model)
    assert again.module is model.module


def test_what_is_registered_is_the_users_modules():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)

    plain = Plain()
    model = Fabric(accelerator="cpu").setup_module(plain)
    model.register_buffer("mean", torch.ones(2))
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.add_module("head", nn.Linear(2, 1))
    model.register_module("tail", nn.Linear(1, 1))
    assert set(dict(plain.named_buffers())) == {"mean", "hidden"}
    assert {"mean", "scale", "head.weight", "tail.weight"} <= set(plain.state_dict())
    assert "hidden" not in plain.state_dict()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.mean is plain.mean
    assert list(model._modules) == ["module"]


def test_forward_methods_use_the_precision():
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    model = fabric.setup(Named())
    seen = []
    model.layers[0].register_forward_hook(
        lambda layer, inputs, output: seen.append(output.dtype)
    )
    loss = model.training_step(points()[:4], 0)
    model.ends()
    assert seen == [torch.bfloat16]
    assert loss.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("call", ["training_step", "loss"])
def test_methods_synchronize_gradients(strategy, call):
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    model = trained(fabric, call, batch_size=2)
    weights = fabric.accelerator.get_state_dict(model.module)
    assert model.ends() == 2.0
    if fabric.is_global_zero:
        expected = {
            f"layers.{name}": value for name, value in by_hand().state_dict().items()
        }
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_method_past_the_wrapper_is_refused():
    fabric = Fabric(accelerator="cpu", strategy="ddp")
    model = fabric.setup(Named())
    with pytest.raises(
        tk.ConfigurationError,
        match=r"(?s)Named\.loss.*model\.mark_forward_method\('loss'\)",
    ):
        model.loss(points()[:4])
    with torch.no_grad():
        assert model.loss(points()[:4]) > 0
    model.mark_forward_method(model.loss)
    fabric.backward(model.loss(points()[:4]))
    assert model.layers[0].weight.grad is not None


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_two_processes():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    model = net()
    model, optimizer = fabric.setup(
        model, torch.optim.Adam(model.parameters(), lr=0.01)
    )
    loader = fabric.setup_dataloaders(DataLoader(points(), batch_size=2))
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
    assert_equal(
        fabric.accelerator.unwrap_model(model), by_hand(), rtol=1e-5, atol=1e-6
    )
    rank = fabric.global_rank
    assert fabric.all_gather(torch.tensor([rank, rank])).tolist() == [[0, 0], [1, 1]]
    assert fabric.all_gather({"x": rank})["x"].tolist() == [0, 1]
    assert fabric.all_reduce(torch.tensor(float(rank))) == 0.5
    assert fabric.broadcast(rank) == 0
    everyone, alone = (
        dist.new_group([0, 1]),
        [dist.new_group([each]) for each in (0, 1)],
    )
    numbers = torch.tensor([rank, 2.0], requires_grad=True)
    assert fabric.all_gather(numbers, group=everyone).tolist() == [[0, 2], [1, 2]]
    assert fabric.all_gather({"x": rank}, group=alone[rank])["x"].tolist() == [rank]
    assert fabric.all_reduce(torch.tensor(rank), group=everyone) == 0.5
    assert fabric.all_reduce(rank, group=everyone, reduce_op="max") == 1
    assert fabric.all_reduce(numbers, group=alone[rank], reduce_op="sum").tolist() == [
        rank,
        2,
    ]
    fabric.all_gather(numbers, group=everyone, sync_grads=True).sum().backward()
    assert numbers.grad.tolist() == [2, 2]
    with pytest.raises(tk.ConfigurationError, match="that this process is in"):
        fabric.all_gather(numbers, group=alone[1 - rank])
    with pytest.raises(tk.ConfigurationError, match="unknown reduction 'product'"):
        fabric.all_reduce(numbers, group=everyone, reduce_op="product")
    with tempfile.TemporaryDirectory() as directory:
        path = fabric.broadcast(directory)
        fabric.save(Path(path, "two"), {"model": model, "step": 5})
        other = fabric.setup(net())
        assert fabric.load(Path(path, "two"), {"model": other}) == {"step": 5}
        assert_equal(
            fabric.accelerator.unwrap_model(other),
            fabric.accelerator.unwrap_model(model),
        )
        fabric.barrier()


def tensor_parallel(model, mesh):
    return parallelize_module(
        model, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


def sharded(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])


@pytest.mark.slow
@pytest.mark.world_size(2, timeout=120)
def test_strategy_objects_train_and_save_divided_objects_whole():
    """A file that one strategy has saved after an epoch is continued by each."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    half, whole = by_hand(epochs=1), by_hand(epochs=2)
    made = {
        "fsdp": (2, FSDPStrategy),
        "tensor": (4, lambda: ModelParallelStrategy(parallelize_fn=tensor_parallel)),
        "data": (2, lambda: ModelParallelStrategy(2, 1, parallelize_fn=sharded)),
        "ddp": (2, DDPStrategy),
    }

    def run(strategy, batch_size, start=None):
        fabric = Fabric(accelerator="cpu", strategy=strategy())
        with fabric.init_module():
            layers = net()
        model = fabric.setup(layers)
        optimizer = fabric.setup_optimizers(
            torch.optim.Adam(model.parameters(), lr=0.01)
        )
        loader = fabric.setup_dataloaders(DataLoader(points(), batch_size))
        if start is not None:
            fabric.load(start, {"model": model, "optimizer": optimizer})
        for inputs, targets in loader:
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        weights = fabric.accelerator.get_state_dict(model.module)
        return fabric, {"model": model, "optimizer": optimizer}, weights

    for name, (size, strategy) in made.items():
        fabric, state, weights = run(strategy, size)
        fabric.save(f"{box[0]}/{name}", state)
        if fabric.is_global_zero:
            torch.testing.assert_close(
                weights, dict(half.state_dict()), rtol=0, atol=1e-6
            )
    for start, (name, (size, strategy)) in zip(
        ["data", "fsdp", "ddp", "tensor"], made.items(), strict=True
    ):
        fabric, _, weights = run(strategy, size, f"{box[0]}/{start}")
        if fabric.is_global_zero:
            torch.testing.assert_close(
                weights, dict(whole.state_dict()), rtol=0, atol=1e-6, msg=name
            )
    fabric = Fabric(accelerator="cpu", strategy="fsdp")
    first = fabric.setup(net())
    optimizer = fabric.setup_optimizers(torch.optim.Adam(list(first.parameters())[:2]))
    with pytest.raises(
        tk.ConfigurationError,
        match=r"has \[4\] parameters in its groups, and this one \[2\]",
    ):
        fabric.load(f"{box[0]}/ddp", {"optimizer": optimizer})
    fabric.barrier()
    if fabric.is_global_zero:
        shutil.rmtree(box[0])


def test_an_engine_is_given_once():
    with pytest.raises(
        tk.ConfigurationError,
        match=r"set twice\n  found: strategy= and ParallelismConfig",
    ):
        tk.Accelerator(
            cpu=True,
            strategy=DDPStrategy(),
            parallelism_config=tk.ParallelismConfig(tp_size=1),
        )
    with pytest.raises(tk.ConfigurationError, match="strategy"):
        tk.Accelerator(cpu=True, strategy=3)
    assert (
        Fabric(accelerator="cpu", strategy=DDPStrategy()).strategy.name
        == "single_device"
    )
