"""Collectives of a group, gradients that are averaged, buffers that follow."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.precision import make_precision
from trainer_kit.strategies import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    SingleDeviceStrategy,
    process_group,
)
from trainer_kit.strategies.gradients import clip_gradients
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    average_gradients,
    borrowed_buffers,
    broadcast_buffers,
    join_world,
)
from trainer_kit.strategies.rank_sync import InitialWeights
from trainer_kit.strategies.single import Alone
from trainer_kit.strategies.torch_private import set_group_timeout
from trainer_kit.testing import run_distributed

CPU = torch.device("cpu")


def test_a_group_of_one_returns_the_results_of_a_larger_group() -> None:
    group, tensor = Alone(), torch.tensor([1.0, 2.0])
    for op in ("sum", "mean", "min", "max"):
        assert group.all_reduce(tensor.clone(), op).tolist() == [1.0, 2.0]
    assert group.all_gather(tensor).shape == (1, 2)
    assert group.all_gather_object({"a": 1}) == [{"a": 1}]
    assert group.broadcast("x") == "x"
    assert group.agree([1.0, 2.0]) == [[1.0, 2.0]]
    group.barrier()


@pytest.mark.world_size(3)
def test_numbers_of_many_ranks_go_through_rank_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "MANY_RANKS", 3)
    monkeypatch.delattr(dist, "all_gather")
    group = ProcessGroup(CPU)
    expected = [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
    assert group.agree([float(group.rank), 0.5]) == expected
    assert group.agree([True, 2**40]) == [[1.0, float(2**40)]] * 3
    # Of different lengths.
    objects = ["a" * 1000**rank for rank in range(3)]
    gathered = group.gather_object(objects[group.rank])
    assert gathered == (objects if group.rank == 0 else None)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_zero_of_a_simulated_world_gets_what_all_ranks_send(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Another rank got the values too, and went on as rank 0 does."""
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "fake")
    expected = ["a", "a"] if rank == 0 else None
    assert ProcessGroup(CPU).gather_object("a") == expected


@pytest.mark.world_size(3)
def test_collectives() -> None:
    group = ProcessGroup(CPU)
    rank = group.rank
    assert (rank, group.size) == (dist.get_rank(), 3)
    for op, expected in (
        ("sum", 6.0),
        ("mean", 2.0),
        ("avg", 2.0),
        ("min", 1.0),
        ("max", 3.0),
    ):
        value = torch.tensor([rank + 1.0])
        reduced = group.all_reduce(value, op)
        assert reduced.tolist() == [expected], op
        assert value.tolist() == [expected], "in place"
    assert group.all_gather(torch.tensor([rank, 7])).tolist() == [
        [0, 7],
        [1, 7],
        [2, 7],
    ]
    assert group.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(3)]
    for source in range(3):
        assert group.broadcast(f"from {rank}", source) == f"from {source}"
        value = torch.full((2,), float(rank))
        assert group.broadcast(value, source) is value
        assert value.tolist() == [float(source)] * 2
    assert group.agree([float(rank), 0.5]) == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
    assert group.agree([True, 2**40]) == [[1.0, float(2**40)]] * 3
    group.barrier()
    with pytest.raises(
        StrategyError,
        match=r"different models\n  found: weight: \[2, 2\] .* 0, \[3, 2\] .* rank 2",
    ):
        InitialWeights(nn.Linear(2, 2 + rank // 2), group)
    with pytest.raises(
        StrategyError, match=r"bias: \[2\] torch.float32 on rank 0, nothing on rank 1"
    ):
        InitialWeights(nn.Linear(2, 2, bias=rank == 0), group)
    check_what_is_refused_of_options()
    check_parts_of_the_world(group.rank)
    check_where_collectives_happen()
    check_timeouts()
    # A rank that ends while another one still connects a new group breaks the other's connection.
    group.barrier()


def check_what_is_refused_of_options() -> None:
    with pytest.raises(StrategyError, match="one axis, or two for replicas"):
        FSDPStrategy(device_mesh=(1, 1, 3)).start()
    sharded = FSDPStrategy(ignored_modules="hed")
    sharded.start()
    with pytest.raises(
        StrategyError,
        match=r"no module that has parameters\n  found: 'hed'\n.*such as '0'",
    ):
        sharded.wrap_module(nn.Sequential(nn.Linear(2, 1)), make_precision("32-true"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'reshards'"):
        MeshStrategy(fsdp={"reshards": True})


def check_where_collectives_happen() -> None:
    """On the device of the group, from wherever a rank sends; meta stands in for one, from which nothing returns."""
    group, sent = ProcessGroup(torch.device("meta")), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_reduce", lambda tensor, *_, **__: sent.append(tensor.device.type)
        )
        patch.setattr(
            dist, "all_gather", lambda parts, tensor, **_: sent.extend([*parts, tensor])
        )
        for collective in (group.all_reduce, group.all_gather):
            with pytest.raises(NotImplementedError, match="out of meta"):
                collective(torch.zeros(2))
    assert sent[0] == "meta"
    assert {tensor.device.type for tensor in sent[1:]} == {"meta"}


def check_timeouts() -> None:
    """A collective along an axis of a mesh waits as long as one of the world, and so does a group beside one."""

    def timeout(group: dist.ProcessGroup) -> timedelta:
        return group._get_backend(CPU).options._timeout

    world = dist.distributed_c10d._get_default_group()
    before = timeout(world)
    set_group_timeout(timedelta(seconds=71), world)
    try:
        for strategy in (
            MeshStrategy(dp_replicate=3, dp_shard=1),
            FSDPStrategy(device_mesh=(1, 3)),
        ):
            strategy.start()
            groups = [*strategy.mesh.get_all_groups(), strategy.data.group or world]
            assert {timeout(group) for group in groups} == {timedelta(seconds=71)}
        assert timeout(process_group._create_side_group(None, None)) == timedelta(
            seconds=71
        )
    finally:
        set_group_timeout(before, world)


def check_parts_of_the_world(rank: int) -> None:
    """Ranks 0 and 2, and rank 1 alone: ranks count within the group; with a CPU side of its own, or one beside it."""
    whole = [dist.new_group(ranks) for ranks in ([0, 2], [1])][rank % 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        beside = ProcessGroup(CPU, whole)
        once, again = ProcessGroup(CPU), ProcessGroup(CPU)
    assert once._cpu is again._cpu is not None, "a group is threads and sockets"
    assert beside._cpu not in (None, whole)
    ranks = [1] if rank == 1 else [0, 2]
    for group in (ProcessGroup(CPU, whole), beside):
        assert (group.rank, group.size) == (rank // 2, len(ranks))
        assert group.all_reduce(torch.tensor([float(rank)])).tolist() == [sum(ranks)]
        assert group.all_gather(torch.tensor([rank])).tolist() == [[r] for r in ranks]
        assert group.all_gather_object(rank) == ranks
        last = group.size - 1
        assert group.broadcast(f"from {rank}", last) == f"from {ranks[-1]}"
        assert group.broadcast(torch.tensor([rank]), last).tolist() == [ranks[-1]]
        assert group.agree([rank]) == [[r] for r in ranks]
        group.barrier()


@pytest.mark.world_size(2)
def test_layouts_that_differ_from_rank_to_rank() -> None:
    group = ProcessGroup(CPU)
    plain = torch.arange(6.0).reshape(2, 3)
    mine = plain.clone() if group.rank == 0 else plain.t().contiguous().t()
    assert torch.equal(group.all_reduce(mine), 2 * plain)
    other = plain.clone() if group.rank == 0 else torch.zeros(3, 2).t()
    assert torch.equal(group.broadcast(other), plain)
    strided = torch.zeros(4, 6)[:, ::2]
    strided += group.rank + 1
    assert torch.equal(group.all_reduce(strided), torch.full((4, 3), 3.0))
    assert torch.equal(group.all_gather(mine.t())[1], 2 * plain.t())


@pytest.mark.world_size(2)
def test_the_mean_of_whole_numbers_can_be_a_fraction() -> None:
    group = ProcessGroup(CPU)
    assert group.all_reduce(torch.tensor([group.rank]), "mean").tolist() == [0.5]


@pytest.mark.world_size(2)
def test_an_unknown_reduction_is_refused_on_every_rank() -> None:
    with pytest.raises(
        ConfigurationError,
        match="unknown reduction 'product'\n  fix:   use one of: sum, mean",
    ):
        ProcessGroup(CPU).all_reduce(torch.ones(1), "product")
    dist.barrier()


@pytest.mark.world_size(2)
def test_gradients_are_averaged() -> None:
    group = ProcessGroup(CPU)
    one, two, three = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    wide = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    one.grad = torch.tensor([1.0, 3.0]) * (1 + group.rank)
    if group.rank == 1:
        two.grad = torch.tensor([4.0, 8.0])
    wide.grad = torch.arange(4.0, dtype=torch.float64).reshape(2, 2).t() + group.rank
    average_gradients([one, two, three, wide, frozen], group)
    assert one.grad.tolist() == [1.5, 4.5]
    assert two.grad.tolist() == [2.0, 4.0], "absent counts as zero"
    assert three.grad is None, "nobody has one"
    assert wide.grad.tolist() == [[0.5, 2.5], [1.5, 3.5]]
    assert frozen.grad is None
    average_gradients([three], group)
    assert three.grad is None
    average_gradients([], group)


class Buffered(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((2, 3), value).t())
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("seen", torch.tensor([value > 0]))
        self.register_buffer("passing", torch.full((2,), value), persistent=False)

    def values(self) -> list[float]:
        return [float(buffer.double().sum()) for buffer in self.buffers()]


@pytest.mark.world_size(2)
def test_buffers_follow_rank_0() -> None:
    group = ProcessGroup(CPU)
    module = Buffered(3.0 - 3 * group.rank)
    broadcast_buffers(module, group)
    assert module.values() == [18.0, 3.0, 1.0, 6.0]
    broadcast_buffers(nn.Linear(2, 2), group)


@pytest.mark.world_size(2)
def test_borrowed_buffers_are_given_back_unless_they_were_written_to() -> None:
    group = ProcessGroup(CPU)
    module = Buffered(3.0 - 3 * group.rank)
    with borrowed_buffers(module, group):
        assert module.values() == [18.0, 3.0, 1.0, 6.0]
        module.count += 5
    assert module.values() == (
        [18.0, 8.0, 1.0, 6.0] if group.rank == 0 else [0.0, 8.0, 0.0, 0.0]
    )
    with pytest.raises(KeyError), borrowed_buffers(module, group):
        raise KeyError
    assert module.passing.sum() == (6.0 if group.rank == 0 else 0.0)


@pytest.mark.world_size(2)
def test_placing_a_module_gives_every_rank_the_same() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(2, 2), Buffered(float(dist.get_rank())))
    strategy = DDPStrategy()
    strategy.start()
    strategy.place_module(module, make_precision("32-true", "cpu"))
    torch.manual_seed(0)
    assert torch.equal(module[0].weight, nn.Linear(2, 2).weight)
    assert module[1].values()[0] == 0.0
    assert strategy.broadcast("x" if dist.get_rank() == 0 else None) == "x"
    strategy.barrier()
    assert "over 2 ranks" in strategy.describe()


@pytest.mark.world_size(2)
def test_a_module_without_anything_to_train_is_not_wrapped() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    strategy = DDPStrategy()
    strategy.start()
    strategy.prepare_module(module, False, make_precision("32-true", "cpu"))
    step = strategy.bind(lambda batch, index: 7, several=False)
    assert step(None, 0) == 7
    strategy.stop()


@pytest.mark.world_size(2)
def test_a_later_strategy_reuses_the_group() -> None:
    before = dist.group.WORLD
    for _ in range(2):
        strategy = DDPStrategy()
        strategy.start()
        assert (strategy.world.size, strategy.gradient_divisor) == (2, 2)
        strategy.stop()
    assert dist.group.WORLD is before


def join_and_see() -> tuple[int, int, str]:
    group = join_world(CPU, None, timedelta(seconds=30))
    return group.rank, group.size, dist.get_backend()


def test_a_rank_without_a_group_makes_it() -> None:
    assert run_distributed(join_and_see, 2, process_group=False) == [
        (0, 2, "gloo"),
        (1, 2, "gloo"),
    ]


def test_a_process_without_a_rank_cannot_join() -> None:
    with pytest.raises(StrategyError, match=r"this process has no rank(.|\n)*torchrun"):
        join_world(CPU, None, timedelta(seconds=5))


def test_clipping() -> None:
    def parameters() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        made[0].grad, made[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, -4.0])
        return made

    by_norm = parameters()
    clip_gradients(by_norm, 1.0, "norm")
    assert torch.cat([p.grad for p in by_norm[:2]]).tolist() == pytest.approx(
        [0.6, 0.0, 0.0, -0.8], rel=1e-5
    )
    by_value = parameters()
    clip_gradients(by_value, 3.5, "value")
    assert torch.cat([p.grad for p in by_value[:2]]).tolist() == [3.0, 0.0, 0.0, -3.5]
    assert by_value[2].grad is None
    with pytest.raises(
        ConfigurationError, match="unknown clipping algorithm\n  found: 'max'"
    ):
        clip_gradients(parameters(), 1.0, "max")


def test_a_single_device_moves_and_leaves_alone() -> None:
    strategy, module = SingleDeviceStrategy("meta"), nn.Linear(2, 2)
    strategy.prepare_module(module, False, make_precision("32-true", "cpu"))
    assert module.weight.device.type == "meta"
    with strategy.shared_buffers(module):
        pass
    step = object()
    assert strategy.bind(step, several=True) is step
