"""`verify` runs modules and loaders that read the Trainer, a launcher's environment or values of all ranks."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import trainer_kit as tk
from tests.verify import verified
from tests.verify.conftest import PROCESSES
from tests.verify.test_local import verify as verify_local
from tests.verify.test_verify import status, verify

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks")]


class Asks(verified.Classifier):
    """Reads the Trainer in ``setup`` and where its loader is made."""

    def setup(self, stage):
        self.share = self.trainer.world_size
        assert self.trainer.global_rank < self.share

    def train_dataloader(self):
        return verified.loader(size=8 // self.trainer.world_size)


class Data(tk.DataModule):
    def setup(self, stage):
        self.size = 8 // self.trainer.world_size

    def train_dataloader(self):
        return verified.loader(size=self.size)


@pytest.mark.parametrize(
    ("module", "datamodule"), [(Asks(), None), (verified.Classifier(), Data())]
)
def test_setup_and_loaders_that_read_the_trainer(module, datamodule):
    """It was refused: no Trainer was attached."""
    trainer = tk.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", logger=False, seed=1
    )
    found = trainer.verify(module, datamodule=datamodule, steps=2, local=True)
    assert found.ok, str(found)
    assert (
        status(found)["our loop"]
        == status(found)["training"]
        == status(found)["other world"]
        == "ok"
    )


class Sampled(verified.Classifier):
    def train_dataloader(self):
        world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        return verified.loader(
            shuffle=None,
            sampler=DistributedSampler(verified.data(), world, rank, seed=3),
        )


class Grouped(verified.Classifier):
    def train_dataloader(self):
        return verified.loader(
            shuffle=None, sampler=DistributedSampler(verified.data())
        )


@pytest.mark.parametrize("module", [Sampled, Grouped])
@pytest.mark.parametrize("divides", [True, False])
def test_a_distributed_sampler_that_the_module_makes(module, divides):
    """It was refused: the plain loop had neither the environment nor a process group."""
    found = verify_own(module(), use_distributed_sampler=divides)
    assert found.ok, str(found)
    assert (
        status(found)["samples"]
        == status(found)["data"]
        == status(found)["training"]
        == "ok"
    )
    assert status(found)["our loop"] == "not checked"


def verify_own(module, **options):
    torch.manual_seed(0)
    options = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "logger": False,
        "seed": 1,
        **options,
    }
    return tk.Trainer(**options).verify(module, steps=2)


def test_a_distributed_sampler_of_a_script_without_a_launcher():
    """It was refused: num_replicas is 1 where no launcher sets WORLD_SIZE."""
    world, rank = (
        int(os.environ.get("WORLD_SIZE", "1")),
        int(os.environ.get("RANK", "0")),
    )
    loader = verified.loader(
        shuffle=None, sampler=DistributedSampler(verified.data(), world, rank)
    )
    found = verify_local(verified.Classifier(), loader)
    assert found.ok, str(found)
    assert "a DistributedSampler for rank 0 of 1; each rank gets its own" in str(found)
    assert status(found)["training"] == "ok"


class Contrastive(verified.Classifier):
    """A loss over the pairs of all ranks."""

    def training_step(self, batch, batch_idx):
        features = F.normalize(self.net(batch[0]), dim=1)
        everyone = self.all_gather(features, sync_grads=True).flatten(
            0, -2 if self.trainer.world_size == 1 else 1
        )
        everyone = everyone.reshape(-1, features.shape[-1])
        return F.cross_entropy(everyone @ everyone.T / 0.1, torch.arange(len(everyone)))


def test_a_loss_over_the_pairs_of_all_ranks():
    """`all_gather(sync_grads=True)` was refused, by fit too; what was advised trains without the others' gradients."""
    found = verify_local(Contrastive())
    assert found.ok, str(found)
    assert status(found)["training"] == status(found)["other world"] == "ok"


class WithoutGradients(Contrastive):
    def all_gather(self, data, group=None, sync_grads=False):
        gathered = super().all_gather(
            data, group, sync_grads=self.trainer.world_size == 1
        )
        return (
            gathered
            if self.trainer.world_size == 1
            else data.new_zeros(()) * data.sum() + gathered
        )


def test_gathered_values_without_gradients_train_otherwise_than_one_process():
    first = verify_local(WithoutGradients()).first
    assert first is not None
    assert first.kind == "layout"


@pytest.mark.world_size(2)
def test_gathered_tensors_carry_gradients_to_every_rank():
    from trainer_kit.strategies.gathering import gather_with_gradients
    from trainer_kit.strategies.process_group import ProcessGroup

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = ProcessGroup(torch.device("cpu"))
    tensor = torch.full((3,), float(group.rank + 1), requires_grad=True)
    gathered = gather_with_gradients(tensor, group)
    assert gathered.tolist() == [[1.0] * 3, [2.0] * 3]
    (gathered[0].sum() * (group.rank + 1) + gathered[1].sum() * 10).backward()
    assert (
        tensor.grad.tolist() == [[3.0] * 3, [20.0] * 3][group.rank]
    )  # the sum of what both ranks send


class Randomized(verified.Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0.1 * random.random())


def test_random_numbers_of_python_in_each_fork():
    """Python seeds its generator again in each fork: two runs differed."""
    random.seed(5)
    found = verify(Randomized(), steps=2)
    assert found.ok, str(found)
    assert status(found)["other world"] == "not checked"  # it draws


def jittered(samples):
    x, y = torch.utils.data.default_collate(samples)
    return x + 0.1 * torch.randn_like(x), y


def test_a_random_collate_fn_is_no_dependence_on_other_samples():
    found = verify_local(
        verified.Classifier(),
        DataLoader(verified.data(), 4, shuffle=True, collate_fn=jittered),
    )
    assert found.ok, str(found)
    world = next(check for check in found.checks if check.name == "other world")
    assert (world.status, "a random collate_fn" in world.text) == ("not checked", True)


@PROCESSES
def test_compiled_dropout():
    """A compiled layer draws other numbers than the plain loop: it was accused."""
    module = verified.Classifier(dropout=0.3)
    module.net = torch.compile(module.net, backend="aot_eager")
    found = verify(module, steps=1, devices=1, strategy="auto")
    assert found.ok, str(found)


class Apart(verified.Classifier):
    """Rank 1 calls a collective that rank 0 does not call."""

    def training_step(self, batch, batch_idx):
        if verified.ranked() and dist.get_rank() == 1:
            dist.barrier()
        return super().training_step(batch, batch_idx)


class OnlyFirst(verified.Classifier):
    """Rank 0 waits for a value of the others at the end of a step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if verified.ranked() and dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "names"), [(Apart, ["barrier"]), (OnlyFirst, ["all_reduce"])]
)
@PROCESSES
def test_ranks_that_do_not_meet_are_named_within_seconds(module, names):
    """It ended after half an hour, without a name."""
    with pytest.raises(
        tk.RankError, match="do not call the same collectives"
    ) as caught:
        verify(module(), steps=2)
    assert "rank 0 waits in" in str(caught.value)
    assert "rank 1 waits in" in str(caught.value)
    assert all(name in str(caught.value) for name in names)
    assert "test_context.py" in str(caught.value)
