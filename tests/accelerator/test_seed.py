"""The order of prepared loaders: which seed decides it, and that a state brings it back in another process."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, DataLoaderConfiguration, seed_everything, set_seed
from trainer_kit.core import seed as seeds

N = 12
RESUME = Path(__file__).parent / "guides" / "seeded_resume.py"


@pytest.fixture(autouse=True)
def _unseeded(monkeypatch):
    monkeypatch.setattr(seeds, "_last_seed", None)
    with seeds.preserved_rng():
        yield


def loader(**options):
    return DataLoader(
        TensorDataset(torch.arange(N)), batch_size=2, **{"shuffle": True, **options}
    )


def read(data):
    return [int(i) for batch in data for i in batch[0]]


def order(accelerator):
    return read(accelerator.prepare(loader()))


@pytest.mark.parametrize("seed_with", [set_seed, seed_everything, torch.manual_seed])
def test_a_seed_that_is_set_after_the_accelerator_counts(seed_with):
    expected = order(Accelerator(cpu=True, seed=7))
    accelerator = Accelerator(cpu=True)
    seed_with(7)
    assert order(accelerator) == expected
    accelerator = Accelerator(cpu=True)
    seed_with(8)
    assert order(accelerator) != expected


def test_arguments_override_the_scripts_seed():
    expected = order(Accelerator(cpu=True, seed=7))
    configured = DataLoaderConfiguration(data_seed=7)
    for accelerator in (
        Accelerator(
            cpu=True, seed=7, dataloader_config=DataLoaderConfiguration(data_seed=9)
        ),
        Accelerator(cpu=True, dataloader_config=configured),
    ):
        set_seed(8)
        assert order(accelerator) == expected


@pytest.mark.world_size(2)
@pytest.mark.parametrize("seed_with", ["set_seed", "torch"])
def test_processes_that_seed_themselves_differently_share_an_order(seed_with):
    accelerator = Accelerator(cpu=True)
    if seed_with == "set_seed":
        set_seed(7, device_specific=True)
    else:
        torch.manual_seed(7 + accelerator.process_index)
    data = accelerator.prepare(loader())
    found = [accelerator.gather(batch).tolist() for (batch,) in data]
    assert sorted(itertools.chain(*found)) == list(range(N))
    alone = Accelerator(cpu=True, seed=7).prepare(loader())
    assert found == [accelerator.gather(batch).tolist() for (batch,) in alone]


@pytest.mark.parametrize(
    ("processes", "workers", "seed_with"),
    [
        (1, 0, "nothing"),
        (1, 2, "set_seed"),
        (1, 0, "torch"),
        (2, 0, "set_seed"),
        (2, 2, "nothing"),
    ],
)
@pytest.mark.slow
def test_another_process_resumes_with_the_same_samples(
    processes, workers, seed_with, tmp_path, programs
):
    def run(*words):
        given = (RESUME, seed_with, str(workers), *words)
        ran = (
            programs.run_ranks(processes, *given)
            if processes > 1
            else [programs.run(*given)]
        )
        assert [one.returncode for one in ran] == [0] * processes, ran[0].stderr
        return json.loads(ran[0].stdout.splitlines()[-1])

    whole = run()
    for epoch in ("0", "1", "2"):
        for name in (epoch, f"eval {epoch}"):
            assert sorted(itertools.chain(*whole["seen"][name])) == list(range(23))
    assert whole["seen"]["0"] != whole["seen"]["1"]
    inside = next(
        path.name for path in tmp_path.iterdir() if path.name.startswith("step_")
    )
    for name, skipped in ((inside, 2), ("epoch_1", None)):
        resumed = run(name)
        assert resumed["weights"] == whole["weights"]
        assert resumed["seen"]["2"] == whole["seen"]["2"]
        assert resumed["seen"]["eval 2"] == whole["seen"]["eval 2"]
        if skipped is not None:
            assert resumed["seen"]["1"] == whole["seen"]["1"][skipped:]


def test_a_loaded_state_overrides_another_seed_and_reports_it(tmp_path, capsys):
    accelerator = Accelerator(cpu=True, seed=7)
    data = accelerator.prepare(loader())
    whole = read(data)
    data.set_epoch(0)
    for _ in data:
        accelerator.save_state(tmp_path / "state")
        break
    for seed, said in ((7, ""), (8, "not that of seed=8"), (None, "")):
        accelerator = Accelerator(cpu=True, seed=seed)
        data = accelerator.prepare(loader())
        capsys.readouterr()
        accelerator.load_state(tmp_path / "state")
        assert read(data) == whole[2:]
        assert said in capsys.readouterr().out
        assert bool(said) is (seed == 8)


def test_each_loader_has_its_own_order_after_a_resume_too(tmp_path):
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    first = accelerator.prepare(loader())
    set_seed(2)
    second = accelerator.prepare(loader())
    accelerator.save_state(tmp_path / "state")
    orders = [read(first), read(second)]
    assert orders[0] != orders[1]
    accelerator = Accelerator(cpu=True)
    both = accelerator.prepare(loader(), loader())
    accelerator.load_state(tmp_path / "state")
    assert [read(one) for one in both] == orders


@pytest.mark.parametrize("when", ["between epochs", "after loading"])
def test_uneven_inputs_keep_the_state_of_the_generator(when, tmp_path):
    """``join_uneven_inputs(even_batches=False)`` reads the loader in another way, and from the same place."""

    def made():
        accelerator = Accelerator(cpu=True)
        generator = torch.Generator().manual_seed(5)
        return accelerator, accelerator.prepare(loader(generator=generator))

    _, data = made()
    epochs = [read(data) for _ in range(3)]
    accelerator, data = made()
    read(data)
    if when == "between epochs":
        data.set_even(False)
        data.set_even(True)
    accelerator.save_state(tmp_path / "state")
    accelerator, data = made()
    accelerator.load_state(tmp_path / "state")
    if when == "after loading":
        data.set_even(False)
    assert [read(data), read(data)] == epochs[1:]
