"""Lightning's `TorchCollective`, and `Fabric` on a part of the processes, as its decoupled example uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import trainer_kit as tk
from trainer_kit.commands.main import main
from trainer_kit.compat.torch_collective import Collective, TorchCollective
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.strategies import DDPStrategy

PROGRAM = '''
import sys
import warnings

import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from lightning.fabric import Fabric
from lightning.fabric.plugins.collectives import TorchCollective
from lightning.fabric.plugins.collectives.collective import CollectibleGroup
from lightning.fabric.strategies import DDPStrategy

warnings.simplefilter("ignore")
torch.set_num_threads(1)
X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
PARTS = X[:12], X[12:]  # three batches for the first trainer, two for the second


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def player(world: TorchCollective, first: TorchCollective) -> None:
    """Send the data, and receive weights: what two trainers do to them, in one process."""
    fabric = Fabric(accelerator="cpu")
    assert fabric.world_size == 3
    world.scatter_object_list([None], [None, *PARTS], src=0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 12, 4):
        optimizer.zero_grad()
        for part in PARTS:
            if start < len(part):
                (model(part[start : start + 4]).square().mean() / 2).backward()
        optimizer.step()
    found = torch.empty_like(nn.utils.parameters_to_vector(model.parameters()))
    first.broadcast(found, src=1)
    torch.testing.assert_close(found, nn.utils.parameters_to_vector(model.parameters()).detach())


def trainer(world: TorchCollective, first: TorchCollective, group: CollectibleGroup) -> None:
    fabric = Fabric(strategy=DDPStrategy(process_group=group), accelerator="cpu")
    assert (fabric.world_size, fabric.global_rank) == (2, world.rank - 1)
    data = [None]
    world.scatter_object_list(data, [None] * 3, src=0)
    model = net()
    with torch.no_grad():
        model[0].weight.mul_(world.rank)  # those of the first trainer count
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    with Join([model._forward_module]):
        for batch in data[0].split(4):
            optimizer.zero_grad()
            fabric.backward(model(batch).square().mean())
            optimizer.step()
    if world.rank == 1:
        first.broadcast(nn.utils.parameters_to_vector(model.parameters()).detach(), src=1)
    fabric.save("weights", {"model": model})
    fabric.accelerator.save_state("state")
    other = fabric.setup(net())
    fabric.load("weights", {"model": other})
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters()))
    for hook in ("fp16", "powersgd"):
        strategy = DDPStrategy(process_group=group, ddp_comm_hook=hook)
        hooked = Fabric(strategy=strategy, accelerator="cpu").setup(net())
        hooked(torch.full((2, 3), float(world.rank))).sum().backward()
        sums = fabric.all_gather(hooked.module[0].bias.grad)
        assert torch.equal(sums[0], sums[1])


world, first = TorchCollective(), TorchCollective()
world.setup(backend="gloo")
world.create_group()
first.create_group(ranks=[0, 1])
group = world.new_group(ranks=[1, 2])
player(world, first) if world.rank == 0 else trainer(world, first, group)
world.barrier()  # rank 0 serves the store of all
print("passed")
'''


@pytest.mark.slow
def test_one_process_plays_and_two_train(
    tmp_path: Path, programs: Any, monkeypatch: Any
) -> None:
    """The trainers have unequal numbers of batches; torch's ``Join`` lets the one that is done take part."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, "utf-8")
    result = CliRunner().invoke(main, ["migrate", str(script), "--write"])
    assert "0 findings" in result.output
    for one in programs.run_ranks(3, script, timeout=100):
        assert one.returncode == 0, one.stdout[-2000:] + one.stderr[-4000:]
        assert one.stdout.endswith("passed\n")
    assert {"weights", "state"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.world_size(3, timeout=120)
def test_each_call_does_what_torch_does() -> None:
    rank = dist.get_rank()
    world = TorchCollective().setup().create_group()
    assert (world.rank, world.world_size) == (rank, 3)
    mine = torch.tensor([float(rank)])
    assert world.all_reduce(mine.clone()).item() == 3
    assert world.all_reduce(mine.clone(), "max").item() == 2
    assert world.reduce(mine.clone(), 1, dist.ReduceOp.SUM).item() == 3 or rank != 1
    assert world.broadcast(mine.clone(), src=2).item() == 2
    rows = [torch.empty(1) for _ in range(3)]
    assert torch.cat(world.all_gather(rows, mine)).tolist() == [0, 1, 2]
    assert len(
        world.gather(mine, [torch.empty(1) for _ in range(3)] if rank == 0 else [])
    ) == (3 if rank == 0 else 0)
    parts = [torch.tensor([10.0 + i]) for i in range(3)] if rank == 0 else []
    assert world.scatter(torch.empty(1), parts).item() == 10 + rank
    if rank < 2:
        sent = (
            world.recv(torch.empty(1), src=0) if rank else world.send(mine + 5, dst=1)
        )
        assert rank == 0 or sent.item() == 5
    assert world.all_gather_object([None] * 3, {"rank": rank})[2] == {"rank": 2}
    assert world.broadcast_object_list([rank], src=1) == [1]
    assert world.gather_object(rank, [None] * 3 if rank == 0 else []) == (
        [0, 1, 2] if rank == 0 else []
    )
    assert world.scatter_object_list([None], ["a", "b", "c"], src=0) == ["abc"[rank]]
    two = TorchCollective().create_group(ranks=[0, 1])
    assert (two.rank, two.world_size) == ((rank, 2) if rank < 2 else (-1, -1))
    two.barrier()
    world.monitored_barrier()
    if rank == 2:
        with pytest.raises(StrategyError, match="not in the process group that trains"):
            tk.Fabric(accelerator="cpu", strategy=DDPStrategy(process_group=two.group))
    with pytest.raises(ConfigurationError, match="has a group already"):
        two.create_group()
    two.teardown()
    with pytest.raises(
        ConfigurationError, match=r"has no group\n  fix:   collective.create_group"
    ):
        _ = two.group
    with pytest.raises(ConfigurationError, match="did you mean 'max'"):
        world.all_reduce(mine, "maxx")
    with pytest.raises(
        StrategyError,
        match=r"a Trainer trains on all processes\n  found: DDPStrategy\(process_group",
    ):
        tk.Trainer(
            accelerator="cpu",
            devices=3,
            strategy=DDPStrategy(process_group=world.group),
            barebones=True,
        )
    assert isinstance(world, Collective)


def test_a_group_that_is_none() -> None:
    with pytest.raises(
        StrategyError, match=r"found: 'gloo'\n  fix:   torch.distributed.new_group"
    ):
        DDPStrategy(process_group="gloo")  # type: ignore[arg-type]


def test_paths_of_lightning() -> None:
    from trainer_kit.fabric.plugins.collectives import TorchCollective as one
    from trainer_kit.fabric.plugins.collectives.collective import CollectibleGroup
    from trainer_kit.fabric.plugins.collectives.torch_collective import (
        TorchCollective as two,
    )
    from trainer_kit.fabric.utilities.types import ReduceOp

    assert one is two is TorchCollective
    assert CollectibleGroup is dist.ProcessGroup
    assert ReduceOp is dist.ReduceOp
