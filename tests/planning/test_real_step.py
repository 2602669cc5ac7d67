"""Steps that cannot run on tensors without values run for real; compared with the CPU allocator in a real fit."""

import copy
import random

import pytest
import torch
from torch import nn

from tests.planning.workloads import compared, made, stop_counting
from trainer_kit.inference.loading import init_empty_weights
from trainer_kit.planning import real_step
from trainer_kit.planning.measure import measure
from trainer_kit.planning.optimizer_state import state_of
from trainer_kit.planning.real_step import RealSteps, real_batch
from trainer_kit.planning.records import Candidate
from trainer_kit.testing import TinyModule, run_distributed


@pytest.fixture(scope="module", autouse=True)
def _counted():
    yield
    stop_counting()


def candidate(strategy="single_device", world=1, samples=8, **options):
    return Candidate(
        strategy=strategy,
        precision="32-true",
        world=world,
        micro_batch=samples,
        **options,
    )


def on_cpu(module, batch, tried, **options):
    return measure(module, batch, tried, accelerator="cpu", **options)


COMPILES = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
"""``torch.compile`` imports a part of torch that is deprecated."""


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "nonzero",
        "logs a value",
        "optimizer that reads",
        "adafactor",
        "mixtral",
        *[
            pytest.param(name, marks=pytest.mark.long)
            for name in ("torchao 8-bit", "torchao 4-bit")
        ],
    ],
)
def test_a_step_that_reads_values_is_that_of_a_real_fit(name):
    """It was given up: no activations, and Adam's state assumed."""
    found, traced = compared(name, candidate(samples=16))
    assert found.ran
    assert not found.exact
    assert abs(found.peak / traced - 1) < 0.05, (found, traced)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("name", ["nonzero", "logs a value", "optimizer that reads"])
def test_real_steps_of_two_ranks(name, strategy, world):
    found, traced = compared(name, candidate(strategy, world, samples=16))
    assert found.ran
    assert abs(found.peak / traced - 1) < 0.05, (found, traced)


@pytest.mark.slow
def test_other_sizes_are_on_the_line_through_two_real_steps():
    module, batch = made("nonzero", 8)
    runs = RealSteps(8)
    small, whole, large = (
        on_cpu(module, batch, candidate(samples=samples), real=runs)
        for samples in (2, 8, 64)
    )
    assert whole.flops > 0
    assert small.flops < whole.flops < large.flops
    assert small.peak < whole.peak < large.peak
    assert "with 4 and 8 samples; memory of other sizes is on the line" in str(
        large.inexact
    )
    _, traced = compared("nonzero", candidate(samples=64))
    assert abs(large.peak / traced - 1) < 0.05


class Normed(TinyModule):
    """A batch norm refuses half of a batch of two, and the step reads a value."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def training_step(self, batch, batch_idx):
        assert float(batch.sum()) == float(batch.sum())
        return super().training_step(self.norm(batch), batch_idx)


def test_a_batch_that_cannot_be_halved_is_in_proportion():
    found = on_cpu(Normed(), torch.ones(2, 32), candidate(samples=4))
    assert found.ran
    assert "with 2 samples; for other sizes, all but weights, gradients" in str(
        found.inexact
    )


class Reads(TinyModule):
    def training_step(self, batch, batch_idx):
        random.random()
        self.seen = torch.rand(1).item()
        return super().training_step(batch, batch_idx)


def test_the_module_its_buffers_and_the_generators_are_as_before():
    module, reads = Normed(), Reads()
    module.eval()
    before = copy.deepcopy(module.state_dict())
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    on_cpu(module, torch.ones(4, 32), candidate())
    assert on_cpu(reads, torch.ones(4, 32), candidate()).ran
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert not module.training
    assert all(
        torch.equal(value, before[key]) for key, value in module.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.zeros(2).sum() == 0  # no mode is active


def test_weights_that_a_plan_has_not_made_get_initial_ones():
    with init_empty_weights():
        module = Normed()
    found = on_cpu(module, torch.ones(4, 32), candidate())
    assert found.ran
    assert found.memory[0]["activations"] > 0
    assert module.norm.weight.is_meta


class Unknown(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad.abs().sum().item() >= 0
        return super().step(closure)


class Stepped(TinyModule):
    def configure_optimizers(self):
        return Unknown(self.parameters(), lr=0.1)


def test_a_large_model_keeps_its_measured_activations_where_only_the_optimizer_reads(
    monkeypatch,
):
    monkeypatch.setattr(real_step, "LARGEST", 0)
    size = 4 * sum(parameter.numel() for parameter in TinyModule().parameters())
    found = on_cpu(Stepped(), torch.zeros(8, 32), candidate())
    expected = on_cpu(TinyModule(), torch.zeros(8, 32), candidate())
    assert found.ran
    assert not found.exact
    assert found.flops == expected.flops
    assert 2 * size <= found.memory[0]["optimizer"] < 2 * size + 100
    assert "the state of Unknown is unknown, assumed Adam's" in found.inexact
    reading = on_cpu(Normed(), torch.ones(4, 32), candidate())
    assert not reading.ran, "a forward that reads values is calculated"


@pytest.mark.slow
def test_the_states_of_known_optimizers_are_those_of_a_real_step():
    transformers = pytest.importorskip("transformers.optimization")
    for beta1 in (None, 0.9):
        layer = nn.Linear(128, 256)
        layer(torch.ones(2, 128)).sum().backward()
        optimizer = transformers.Adafactor(
            layer.parameters(),
            lr=1e-3,
            relative_step=False,
            scale_parameter=False,
            beta1=beta1,
        )
        calculated, lines = state_of([optimizer])
        assert "calculated" in lines[0]
        optimizer.step()
        kept = 0
        for state in optimizer.state.values():
            kept += sum(
                part.nbytes for part in state.values() if isinstance(part, torch.Tensor)
            )
        assert calculated == kept


def states_of_torchao(name):
    """The bytes of an optimizer's state: calculated, and those of its tensors after a step."""
    import torchao.optim

    layer = nn.Linear(128, 256)
    layer(torch.ones(2, 128)).sum().backward()
    optimizer = getattr(torchao.optim, name)(layer.parameters(), lr=1e-3)
    calculated, _ = state_of([optimizer])
    optimizer.step()
    parts = 0
    for state in optimizer.state.values():
        for value in state.values():
            names = (
                value.__tensor_flatten__()[0]
                if hasattr(value, "__tensor_flatten__")
                else []
            )
            parts += (
                sum(getattr(value, part).nbytes for part in names)
                if names
                else value.nbytes
            )
    return calculated, parts


@COMPILES
@pytest.mark.long
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_the_states_of_torchao(name):
    pytest.importorskip("torchao.optim")
    # In a process of its own: its step compiles.
    ((calculated, parts),) = run_distributed(
        states_of_torchao, 1, name, process_group=False
    )
    assert abs(calculated / parts - 1) < 0.05


def test_batches_of_other_sizes_have_their_values():
    batch = {
        "x": torch.arange(6).reshape(3, 2),
        "names": ["a", "b", "c"],
        "scale": torch.ones(()),
    }
    more = real_batch(batch, 5, 3)
    assert more["x"][:, 0].tolist() == [0, 2, 4, 0, 2]
    assert more["names"] == ["a", "b", "c", "a", "b"]
    assert more["scale"] == 1
    same = real_batch(batch, 3, 3)
    assert torch.equal(same["x"], batch["x"])
    assert same["x"].data_ptr() != batch["x"].data_ptr(), "a step may change it"
    with pytest.raises(TypeError, match="share rows"):
        real_batch([torch.ones(7, 2)], 2, 3)
