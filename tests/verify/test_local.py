"""`verify(local=True)`: ranks are threads of this process. Verdicts and values are those of processes."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import trainer_kit as tk
from tests.verify import verified
from tests.verify.test_healthy import MODELS, PAIRS
from trainer_kit.precision.aliases import make_precision
from trainer_kit.strategies import DDPStrategy
from trainer_kit.verify.compare import same_bits
from trainer_kit.verify.loaders import Division
from trainer_kit.verify.runs import Runs

pytestmark = pytest.mark.slow


verify = partial(verified.verify, steps=2, local=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_healthy_configuration_passes_every_check(strategy):
    module = verified.Classifier(dropout=0.2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = verify(
        module,
        val=verified.loader(8),
        strategy=strategy,
        accumulate_grad_batches=2,
        steps=3,
    )
    assert found.ok, str(found)
    skipped = [check.name for check in found.checks if check.status != "ok"]
    assert skipped == ["accumulation", "other world"], str(found)  # dropout
    assert all(
        same_bits(value, before[name]) for name, value in module.state_dict().items()
    )


@pytest.mark.long
@pytest.mark.parametrize(("model", "strategy", "precision", "options"), PAIRS)
def test_no_false_alarm(model, strategy, precision, options):
    torch.manual_seed(0)
    found = verify(
        MODELS[model](), strategy=strategy, precision=precision, steps=3, **options
    )
    assert found.ok, str(found)
    assert {check.name for check in found.checks if check.status == "ok"} >= {
        "our loop",
        "samples",
        "data",
        "training",
    }


FAULTS = {
    "eps": (
        verified.Classifier,
        {"strategy": verified.OtherEps()},
        ("forward", "net.1"),
    ),
    "no all-reduce": (
        verified.Classifier,
        {"strategy": verified.NoExchange()},
        ("gradients", "net.0.weight"),
    ),
    "wrong factor": (
        verified.Classifier,
        {"strategy": verified.WrongDivisor(), "accumulate_grad_batches": 3},
        ("gradients", "net.0.weight"),
    ),
    "buffer": (
        verified.RunningMean,
        {"strategy": DDPStrategy(broadcast_buffers=False)},
        ("buffers", "net.2.1.mean"),
    ),
    "averaged twice": (verified.AveragedTwice, {}, ("loss", "")),
    "untied": (
        verified.Tied,
        {"strategy": verified.Untied()},
        ("tied", "embed.weight and head.weight"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    module, options, expected = FAULTS[fault]
    first = verify(module(), **options).first
    assert first is not None
    assert (first.step, first.kind, first.where) == (0, *expected)


def test_a_sampler_that_repeats():
    loader = verified.loader(sampler=verified.Repeating(), shuffle=None)
    first = verify(verified.Classifier(), loader, use_distributed_sampler=False).first
    assert (first.kind, first.step, first.where) == ("samples", 0, "sample 0")


def test_an_augmentation_with_state_counts_in_each_copy():
    first = verify(
        verified.Classifier(),
        torch.utils.data.DataLoader(verified.Counting(), batch_size=4),
    ).first
    assert (first.kind, first.step) == ("data", 0)


@pytest.mark.parametrize(
    ("strategy", "model"),
    [("ddp", "dropout"), ("fsdp", "dropout"), ("tp", "divided"), ("pp", "mlp")],
)
def test_every_value_is_that_of_processes_in_bits(strategy, model, tmp_path):
    found = []
    for local in (False, True):
        torch.manual_seed(0)
        trainer = tk.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, logger=False, seed=1
        )
        directory = tmp_path / str(local)
        directory.mkdir()
        runs = Runs(
            trainer, MODELS[model](), verified.loader(), None, None, 3, directory, local
        )
        runs.start()
        records = runs.train()
        plain = runs.plain(
            make_precision("32-true"),
            Division(records[0].data_ranks, records[0].seed, 5),
        )
        found.append([*records, plain])
    for one, other in zip(*found, strict=True):
        assert values(one).keys() == values(other).keys()
        assert values(one)
        for key, value in values(one).items():
            assert same_bits(value, values(other)[key]), key


def values(record):
    """Every tensor of a record, by a name."""
    return {
        (kind, step, name): value
        for kind in ("gradients", "weights", "local")
        for step, found in getattr(record, kind).items()
        for name, value in found.items()
    } | {
        (at, name): value
        for at, micro in record.micros.items()
        for name, value in micro.loss.items()
    }


def test_what_cannot_be_copied_is_refused():
    module = verified.Classifier()
    module.lock = threading.Lock()
    with pytest.raises(tk.ConfigurationError, match="one cannot be copied") as caught:
        verify(module)
    assert "verify without local" in str(caught.value)


def test_an_engine_with_one_set_of_groups_for_a_process_is_refused():
    class Global(DDPStrategy):
        why_not_in_threads = "it keeps its groups in variables of a module"

    with pytest.raises(tk.ConfigurationError, match="take turns on the CPU") as caught:
        verify(verified.Classifier(), strategy=Global())
    assert "it keeps its groups in variables of a module" in str(caught.value)


@pytest.mark.slow
def test_a_watched_run_compiles_no_blocks(tmp_path):
    """Hooks on modules record outputs, which they can do only where Python calls each module."""

    class Blocks(verified.Classifier):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(self.net, Block(), Block())

    class Block(torch.nn.Module):
        def forward(self, x):
            return x * 2

    trainer = tk.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        seed=1,
        compile={"backend": "eager", "regional": True},
    )
    runs = Runs(trainer, Blocks(), verified.loader(), None, None, 1, tmp_path)
    runs.start()
    assert runs.train(reseeds=5)[0].compiled
    watched = runs.train(reseeds=5, watched=frozenset({0}))[0]
    assert not watched.compiled
    assert len(watched.micros[0, 0].watched.outputs) > 2
