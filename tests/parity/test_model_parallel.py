"""Modules that divide themselves in `configure_model`, with torch's functions, train as whole ones do."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import adamw, case, make_net, sgd, train
from trainer_kit.callbacks import EMAWeightAveraging
from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies import ModelParallelStrategy

LIMITS: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "max_epochs": 2,
}


class Divided(tk.TrainModule):
    """A net of two layers; ``divide`` gets the module and the mesh in `configure_model`."""

    def __init__(
        self,
        divide: Callable[[Any, Any], Any] | None = None,
        seed: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.net, self.divide = make_net(seed, dropout).double(), divide
        self.optimizer: Callable[[nn.Module], Any] = sgd

    def configure_model(self) -> None:
        if self.divide is not None:
            self.divide(self, self.device_mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.net)


def tensor_parallel(module: Any, mesh: Any) -> None:
    plan = {"net.0": ColwiseParallel(), "net.3": RowwiseParallel()}
    parallelize_module(module, mesh["tensor_parallel"], plan)


def sharded(module: Any, mesh: Any) -> None:
    """As Lightning's example does: wrapped blocks are units, the net is the root, the module is not."""
    module.net[0] = checkpoint_wrapper(module.net[0])
    fully_shard(module.net[0], mesh=mesh["data_parallel"])
    fully_shard(module.net, mesh=mesh["data_parallel"])


def whole_module(module: Any, mesh: Any) -> None:
    fully_shard(module, mesh=mesh["data_parallel"])


def on_both_axes(module: Any, mesh: Any) -> None:
    """As Lightning's float8 example does: replicas over the first axis, shards over the second; then compiled."""
    fully_shard(module.net, mesh=mesh)
    module.net = torch.compile(module.net, backend="eager")


def both(module: Any, mesh: Any) -> None:
    tensor_parallel(module, mesh)
    whole_module(module, mesh)


def data(count: int, size: int) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(count)
    x, y = (
        torch.randn(count, 8, generator=draw).double(),
        torch.randint(4, (count,), generator=draw),
    )
    return DataLoader(TensorDataset(x, y), batch_size=size)


def weights(module: nn.Module) -> dict[str, Tensor]:
    whole = (
        (name, value.full_tensor() if isinstance(value, DTensor) else value)
        for name, value in state(module)
    )
    return {name: value.detach().clone() for name, value in whole}


def state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.state_dict().items()


def sizes_of(ranks: int) -> dict[str, int]:
    return {
        "data_parallel_size": ranks,
        "tensor_parallel_size": dist.get_world_size() // ranks,
    }


def compare(divide: Any, ranks: int, optimizer: Any = sgd) -> None:
    """Train, evaluate and predict on ``ranks`` data ranks and in this process alone, from other initial weights."""
    one, mine = Divided(), Divided(divide, seed=dist.get_rank())
    one.optimizer = mine.optimizer = optimizer
    alone = train(one, data(22, 4), data(6, 4), **LIMITS)
    how = {
        "strategy": ModelParallelStrategy(**sizes_of(ranks)),
        "devices": dist.get_world_size(),
    }
    together = train(mine, data(22, 4 // ranks), data(6, 4 // ranks), **LIMITS, **how)
    assert any(isinstance(p, DTensor) for p in mine.parameters())
    found = weights(mine)
    assert list(found) == list(one.state_dict())
    for name, value in one.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    for name in ("train_loss", "val_loss"):
        assert together.callback_metrics[name].item() == pytest.approx(
            alone.callback_metrics[name].item(), abs=1e-12
        )
    for name in ("step", "batch", "samples"):
        assert getattr(together.progress, name) == getattr(alone.progress, name), name
    predicted = together.predict(mine, data(6, 4 // ranks))
    assert {type(one) for one in predicted} == {Tensor}  # no collective is under way
    torch.testing.assert_close(
        torch.cat(predicted),
        torch.cat(alone.predict(one, data(6, 4))),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.slow
@pytest.mark.world_size(2, timeout=240)
def test_two_ranks_train_as_one() -> None:
    with case(axis="tensor"):
        compare(tensor_parallel, ranks=1)
    with case(axis="tensor", optimizer="adamw"):
        compare(
            tensor_parallel,
            ranks=1,
            optimizer=lambda net: torch.optim.AdamW(net.parameters(), foreach=True),
        )
    with case(axis="data"):
        compare(sharded, ranks=2)
    with case(axis="data", optimizer="adamw"):
        compare(whole_module, ranks=2, optimizer=adamw)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.world_size(4, timeout=240)
def test_four_ranks_on_two_axes_train_as_one() -> None:
    compare(both, ranks=2)
    compare(both, ranks=2, optimizer=adamw)


class MadeInside(Divided):
    """Its layers are made in `configure_model`, and set there."""

    def __init__(self, divide: Any = None, place: str = "cpu") -> None:
        super().__init__(divide)
        del self.net
        self.place = place

    def configure_model(self) -> None:
        with torch.device(self.place):
            self.net = make_net().double()
            if self.place == "cpu":
                torch.nn.init.constant_(self.net[3].bias, 0.5)
        super().configure_model()


class ByHand(Divided):
    """Optimizes by hand, and clips."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.3)
        optimizer.step()


class LossParallel(Divided):
    """As Lightning's example: logits stay divided over the classes until the loss, and in backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with loss_parallel():
            return F.cross_entropy(self.net(batch[0]), batch[1])

    def backward(self, *arguments: Any, **options: Any) -> None:
        with loss_parallel():
            super().backward(*arguments, **options)


def divided_logits(module: Any, mesh: Any) -> None:
    head = ColwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(module.net[3], mesh["tensor_parallel"], head)


def compiled(module: Any, mesh: Any) -> None:
    sharded(module, mesh)
    module.net = torch.compile(module.net, backend="eager")


def renamed(module: Any, mesh: Any) -> None:
    module.net = nn.Sequential(module.net)
    fully_shard(module.net, mesh=mesh["data_parallel"])


@pytest.mark.slow
@pytest.mark.world_size(2, timeout=240)
def test_where_weights_come_from() -> None:
    def fit(module: tk.TrainModule, ranks: int = 1, **options: Any) -> tk.Trainer:
        how = {"strategy": ModelParallelStrategy(**sizes_of(ranks)), "devices": 2}
        return train(module, data(22, 4 // ranks), **{**LIMITS, **how, **options})

    def same(mine: nn.Module, one: nn.Module) -> None:
        for name, value in weights(mine).items():
            plain = name.replace("_orig_mod.", "")
            torch.testing.assert_close(
                value, one.state_dict()[plain], rtol=0, atol=1e-12
            )

    one = Divided()
    train(one, data(22, 4), **LIMITS)
    with case(layers="without storage on rank 1"):
        with tk.Trainer(
            strategy=ModelParallelStrategy(),
            devices=2,
            accelerator="cpu",
            barebones=True,
        ).init_module(empty_init=True):
            module = Divided(tensor_parallel)
        assert [p.is_meta for p in module.parameters()] == [dist.get_rank() > 0] * 4
        fit(module)
        same(module, one)
    for divide in (compiled, renamed):
        with (
            case(divide=divide.__name__),
            tk.Trainer(
                strategy=ModelParallelStrategy(2, 1),
                devices=2,
                accelerator="cpu",
                barebones=True,
            ).init_module(empty_init=True),
        ):
            module = Divided(divide)
        if divide is compiled:
            fit(module, 2)
            same(module, one)
        else:
            with pytest.raises(
                StrategyError,
                match=r"found: net.0.bias before, net.0.0.weight now\n  fix:   rename",
            ):
                fit(module, 2)
    with case(layers="made in configure_model"):
        inside = MadeInside()
        train(inside, data(22, 4), **LIMITS)
        for divide, ranks in ((tensor_parallel, 1), (sharded, 2)):
            module = MadeInside(divide)
            trainer = fit(module, ranks)
            same(module, inside)
            trainer.fit_loop.max_epochs = 3  # a second fit does not divide it again
            trainer.fit(module, data(22, 4 // ranks))
    with case(layers="made in configure_model without storage"):
        drawn = Divided()
        torch.manual_seed(0)  # as `make_net`
        for layer in (drawn.net[0], drawn.net[3]):
            layer.reset_parameters()  # type: ignore[operator]
        train(drawn, data(22, 4), **LIMITS)
        for divide, ranks in ((tensor_parallel, 1), (sharded, 2), (on_both_axes, 1)):
            fit(module := MadeInside(divide, "meta"), ranks)
            same(module, drawn)
    with case(logits="divided"):
        module = LossParallel(divided_logits)
        fit(module)
        same(module, one)
    with case(numbers="bfloat16"):
        fit(module := Divided(sharded), 2, precision="bf16-true")
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.world_size(2, timeout=240)
def test_a_checkpoint_continues_here_and_on_one_rank() -> None:
    """The wrapped blocks of `sharded` have other names in ``named_parameters()`` than in checkpoints."""
    box = (
        [tempfile.mkdtemp(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))]
        if dist.get_rank() == 0
        else [""]
    )
    dist.broadcast_object_list(box)

    def fit(
        divide: Any, ranks: int = 1, path: str | None = None, **options: Any
    ) -> tuple[tk.Trainer, Divided]:
        module = Divided(divide, seed=0 if path is None else 5)
        module.optimizer = adamw
        # Averages and statistics of blocks have the names of checkpoints, too.
        options = {
            **options,
            "callbacks": [EMAWeightAveraging(decay=0.9, use_buffers=True)],
        }
        how: dict[str, Any] = {"strategy": "single_device", "devices": 1}
        if divide is not None:
            how = {"strategy": ModelParallelStrategy(**sizes_of(ranks)), "devices": 2}
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        trainer = tk.Trainer(accelerator="cpu", **{**quiet, **LIMITS, **how, **options})
        trainer.fit(module, data(22, 4 // ranks), ckpt_path=path)
        return trainer, module

    _, whole = fit(None)
    try:
        for divide, ranks in ((tensor_parallel, 1), (sharded, 2)):
            with case(divided=divide.__name__):
                path = f"{box[0]}/{divide.__name__}"
                fit(divide, ranks, max_epochs=1)[0].save_checkpoint(path)
                for _, again in (fit(divide, ranks, path), fit(None, 1, path)):
                    for name, value in weights(again).items():
                        torch.testing.assert_close(
                            value, whole.state_dict()[name], rtol=0, atol=1e-12
                        )
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])


def other_mesh(module: Any, mesh: Any) -> None:
    parallelize_module(
        module.net[0],
        init_device_mesh("cpu", (2,), mesh_dim_names=("mine",)),
        ColwiseParallel(),
    )


def bare(module: Any, mesh: Any) -> None:
    module.net.append(nn.ParameterList([torch.empty(2, device="meta")]))


def one_layer(module: Any, mesh: Any) -> None:
    fully_shard(module.net[0], mesh=mesh["data_parallel"])


@pytest.mark.slow
@pytest.mark.world_size(2, timeout=240)
def test_manual_optimization_steps_as_one_process() -> None:
    one = ByHand()
    train(one, data(22, 4), max_epochs=1)
    for divide, ranks in ((tensor_parallel, 1), (sharded, 2)):
        with case(divided=divide.__name__):
            how = {"strategy": ModelParallelStrategy(**sizes_of(ranks)), "devices": 2}
            train(
                module := ByHand(divide, seed=dist.get_rank()),
                data(22, 4 // ranks),
                max_epochs=1,
                **how,
            )
            for name, value in weights(module).items():
                torch.testing.assert_close(
                    value, one.state_dict()[name], rtol=0, atol=1e-12
                )


def another_unit_on_rank_one(module: Any, mesh: Any) -> None:
    if dist.get_rank() == 1:
        fully_shard(module.net[0], mesh=mesh["data_parallel"])
    whole_module(module, mesh)


def another_layer_on_rank_one(module: Any, mesh: Any) -> None:
    fully_shard(module.net[3 if dist.get_rank() else 0], mesh=mesh["data_parallel"])


@pytest.mark.slow
@pytest.mark.world_size(2, timeout=240)
def test_what_is_refused_before_the_first_step() -> None:
    class Undivided(tk.TrainModule):
        training_step = Divided.training_step
        configure_optimizers = Divided.configure_optimizers

    for module, ranks, message in (
        (
            Divided(one_layer),
            2,
            r"would differ between the 2 data ranks\n  found: net.3.weight, net.3.bias\n",
        ),
        (
            Divided(lambda *_: None),
            2,
            r"found: net.0.weight, net.0.bias, net.3.weight and 1 more\n",
        ),
        (
            Divided(other_mesh),
            1,
            r"a mesh that does not belong to this strategy\n  found: net.0.weight, net.0.bias\n",
        ),
        (
            MadeInside(bare, "meta"),
            1,
            r"cannot initialize their weights(.|\n)*net.4 without reset_parameters\n  fix:   define reset_",
        ),
        (
            Divided(another_unit_on_rank_one),
            2,
            r"in different ways\n  found: net.0: nothing on rank 0, a unit of",
        ),
        (
            Divided(another_layer_on_rank_one),
            2,
            r"in different ways\n  found: net.0: a unit .* on rank 0, nothing on",
        ),
        (ByHand(whole_module), 2, r"sharded as a whole\n  found: fully_shard\(self"),
        (
            Undivided(),
            1,
            r"found: Undivided has no configure_model\n  fix:   define it, and call parallelize_module",
        ),
    ):
        strategy = ModelParallelStrategy(**sizes_of(ranks))
        with pytest.raises(StrategyError, match=message):
            train(module, data(8, 4 // ranks), strategy=strategy, devices=2)


@pytest.mark.slow
@pytest.mark.world_size(2, timeout=240)
def test_explain_shows_what_a_rank_holds_and_sends() -> None:
    whole = sum(p.numel() for p in Divided().parameters()) * 8
    for divide, ranks, sent in (
        (tensor_parallel, 1, "activations of split layers: among 2 tensor ranks"),
        (whole_module, 2, "gradients: reduce-scatter over 2 data ranks"),
    ):
        strategy = ModelParallelStrategy(**sizes_of(ranks))
        trainer = train(
            module := Divided(divide),
            data(8, 4 // ranks),
            max_epochs=1,
            strategy=strategy,
            devices=2,
        )
        costs = strategy.costs(module, trainer.precision, 2)
        assert costs.parameters == costs.gradients
        assert whole / 2 <= costs.parameters <= whole / 2 + 64
        assert sent in "\n".join(costs.exchanges)
        before = strategy.costs(Divided(), trainer.precision, 2)
        assert before.parameters is None
        assert "known once a run has sharded" in before.layout


def test_sizes_are_checked_before_anything_starts() -> None:
    assert ModelParallelStrategy().places(4) == {
        "data_parallel": 1,
        "tensor_parallel": 4,
    }
    assert ModelParallelStrategy(data_parallel_size=2).places(4) == {
        "data_parallel": 2,
        "tensor_parallel": 2,
    }
    assert ModelParallelStrategy(tensor_parallel_size=1).places(4) == {
        "data_parallel": 4,
        "tensor_parallel": 1,
    }
    with pytest.raises(
        StrategyError,
        match=r"tensor_parallel_size=3, 4 processes\n  fix:   launch 6 processes",
    ):
        ModelParallelStrategy(2, 3).places(4)
    with pytest.raises(StrategyError, match="data_parallel_size=0"):
        ModelParallelStrategy(0)
    with pytest.raises(
        StrategyError, match=r"save_distributed_checkpoint=False\n  fix:   leave it out"
    ):
        ModelParallelStrategy(save_distributed_checkpoint=False)
    with pytest.raises(StrategyError, match="8 processes, or leave"):
        tk.Trainer(
            strategy=ModelParallelStrategy(2, 4),
            devices=2,
            accelerator="cpu",
            barebones=True,
        )


@pytest.mark.slow
@pytest.mark.world_size(1)
def test_one_process_divides_over_a_mesh_of_one() -> None:
    one, mine = Divided(), Divided(both)
    train(one, data(22, 4), **LIMITS)
    train(mine, data(22, 4), **LIMITS, strategy=ModelParallelStrategy())
    for name, value in weights(mine).items():
        torch.testing.assert_close(value, one.state_dict()[name], rtol=0, atol=1e-12)
