"""A fake world leaves nothing behind that a real run, or the next fake rank, would take for its own."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import trainer_kit as tk
from tests.planning import verified
from trainer_kit.planning.fake_world import fake_world


def start_of_a_sum(rank: int) -> int:
    """The first row of what this rank holds of a sum of two divided tensors."""
    with fake_world(2, rank):
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False)
        return (whole + whole).__create_chunk_list__()[0].offsets[0]


def test_each_fake_rank_has_its_own_part():
    assert [start_of_a_sum(rank) for rank in (0, 1)] == [0, 4]


@pytest.mark.slow
def test_ranks_forked_after_a_plan_save_their_own_parts():
    trainer = tk.Trainer(strategy="fsdp", accelerator="cpu", devices=2, logger=False, seed=1)
    trainer.plan(verified.Classifier(), verified.loader(), world=2, strategies=["fsdp"])
    found = trainer.verify(verified.Classifier(), verified.loader(), steps=2)  # it saves and resumes
    assert found.ok, str(found)
