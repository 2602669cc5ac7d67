"""A fake world leaves nothing behind that a real run, or the next fake rank, would take for its own."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer_kit.planning import fake_world as fake_world_module
from trainer_kit.planning.fake_mode import FastFakeMode
from trainer_kit.planning.fake_world import adapted
from trainer_kit.planning.memory_tracker import StepTracker
from trainer_kit.strategies.fake_world import fake_world


def start_of_a_sum(rank: int) -> int:
    """The first row of what this rank holds of a sum of two divided tensors."""
    with fake_world(2, rank):
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False)
        return (whole + whole).__create_chunk_list__()[0].offsets[0]


def test_each_fake_rank_has_its_own_part():
    assert [start_of_a_sum(rank) for rank in (0, 1)] == [0, 4]


def test_equal_entries_of_a_list_are_prepared_once(monkeypatch):
    """An optimizer of a fake world of 256 ranks took two thirds of a measurement, most of it for equal layers."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    plain, sizes = type(propagator).propagate_op_sharding_non_cached, []

    def counted(self, schema):
        sizes.append(len(schema.args_schema[0]))
        return plain(self, schema)

    def results():
        mode = FastFakeMode()
        with fake_world(4), adapted():
            mesh = init_device_mesh("cpu", (4,))
            shapes = [(8, 4), (6,), (8, 4), (3, 2)] * 10
            layouts = [Shard(0), Shard(0), Replicate(), Shard(1)] * 10
            with mode:
                tensors = [
                    DTensor.from_local(
                        torch.empty(shape), mesh, [layout], run_check=False
                    )
                    for shape, layout in zip(shapes, layouts, strict=True)
                ]
                made = torch._foreach_add(tensors, tensors, alpha=0.5)
                torch._foreach_addcdiv_(
                    made, tensors, tensors, [float(number) for number in range(40)]
                )
                norms = torch._foreach_norm(tensors)
            return [
                (one.shape, one.placements, one.to_local().shape)
                for one in (*made, *norms)
            ]

    expected = results()
    monkeypatch.setattr(type(propagator), "propagate_op_sharding_non_cached", counted)
    assert results() == expected
    assert sizes == [4, 40, 4], "each entry of the second has a number of its own"
    monkeypatch.setattr(
        fake_world_module, "_once_for_equal_entries", lambda propagate: propagate
    )
    assert results() == expected, "as torch does it"
    assert "propagate_op_sharding_non_cached" not in vars(propagator)


def test_waiting_for_a_collective_allocates_nothing():
    """The plan of a Llama on two tensor-parallel ranks counted its logits twice, a tenth of all memory."""
    mode = FastFakeMode()
    tracker = StepTracker(mode, lambda *_: None)
    with fake_world(2), adapted(), mode, tracker:
        whole = torch.empty(1000)
        summed = torch.ops._c10d_functional.all_reduce(
            whole, "sum", dist.group.WORLD.group_name
        )
        waited = torch.ops._c10d_functional.wait_tensor(summed)
    assert waited.untyped_storage()._cdata == summed.untyped_storage()._cdata
    assert sum(tracker.peak(0).values()) == 2 * 4 * 1000


def test_an_exchange_of_a_pipeline_holds_its_tensors():
    """The first stage of a pipeline holds one output longer than its backward needs it; the plan left it out."""
    plain = schedules._batch_p2p
    with fake_world(2), adapted():
        sent = torch.zeros(10)
        alive = weakref.ref(sent)
        works = schedules._batch_p2p([dist.P2POp(dist.isend, sent, 1)])
        del sent
        schedules._wait_batch_p2p(works)
        assert alive() is not None
        works.clear()
        assert alive() is None
    assert schedules._batch_p2p is plain
