"""The order of the data follows the seed that the script has chosen when a fit begins."""

from __future__ import annotations

import random
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainer_kit as tk
from trainer_kit.core import seed as seeds

N = 12


class Ids(tk.TrainModule):
    """Keeps the samples that it was given."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        self.seen += batch[0].long().flatten().tolist()
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.seen += batch[0].long().flatten().tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader():
    return DataLoader(
        TensorDataset(torch.arange(float(N)).unsqueeze(1)), batch_size=2, shuffle=True
    )


def make(**options):
    return tk.Trainer(**{"max_epochs": 1, "barebones": True, **options})


def order(trainer, verb="fit"):
    module = Ids()
    getattr(trainer, verb)(module, loader())
    return module.seen


@pytest.fixture(autouse=True)
def _unseeded(monkeypatch):
    monkeypatch.setattr(seeds, "_last_seed", None)
    with seeds.preserved_rng():
        yield


@pytest.mark.parametrize(
    "seed_with", [tk.seed_everything, tk.set_seed, torch.manual_seed]
)
@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_a_seed_that_is_set_after_the_trainer_counts(seed_with, verb):
    expected = order(make(seed=7), verb)
    trainer = make()
    seed_with(7)
    assert order(trainer, verb) == expected
    trainer = make()
    seed_with(8)
    assert order(trainer, verb) != expected


def test_each_fit_reads_the_seed_again():
    trainer = make()
    expected = {seed: order(make(seed=seed)) for seed in (7, 8)}
    for seed in (7, 8, 7):
        tk.seed_everything(seed)
        assert order(trainer) == expected[seed]


def test_seed_everything_overrides_torchs_seed():
    expected = order(make(seed=7))
    tk.seed_everything(7)
    torch.manual_seed(8)
    assert order(make()) == expected


@pytest.mark.world_size(2)
def test_ranks_that_seed_torch_differently_share_the_order_of_rank_0():
    rank = torch.distributed.get_rank()
    torch.manual_seed(7)
    expected = order(make(strategy="ddp", seed=7))
    trainer = make(strategy="ddp")
    torch.manual_seed(7 + rank)
    mine = order(trainer)
    assert mine == expected
    both = [None, None]
    torch.distributed.all_gather_object(both, mine)
    assert sorted(both[0] + both[1]) == list(range(N))


class Shuffles(IterableDataset):
    def __init__(self, how):
        self.how = how

    def __iter__(self):
        order = list(range(N)) if self.how == "random" else torch.randperm(N).tolist()
        if self.how == "random":
            random.shuffle(order)
        for i in order:
            yield torch.tensor([float(i)])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("how", ["random", "torch"])
def test_a_stream_that_shuffles_itself_is_one_stream_on_all_ranks(how):
    """Each rank reads all of it and keeps its batches: in two orders samples would come twice, and others never."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    module = Ids()
    make(strategy="ddp", max_epochs=2).fit(
        module, DataLoader(Shuffles(how), batch_size=2, collate_fn=wrapped)
    )
    both = [None, None]
    torch.distributed.all_gather_object(both, module.seen)
    epochs = [
        both[0][at : at + N // 2] + both[1][at : at + N // 2] for at in (0, N // 2)
    ]
    assert [sorted(seen) for seen in epochs] == [list(range(N))] * 2
    assert epochs[0] != epochs[1]


def wrapped(samples):
    return [torch.stack(samples)]


@pytest.mark.long
def test_ranks_that_the_trainer_starts_take_the_seed_of_the_script(tmp_path, programs):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        from torch.utils.data import DataLoader
        import trainer_kit as tk
        from trainer_kit.testing import TinyModule

        class Keeps(TinyModule):
            seen = []

            def training_step(self, batch, batch_idx):
                self.seen.append(batch[0, 0])
                return super().training_step(batch, batch_idx)

        trainer = tk.Trainer(max_epochs=1, barebones=True, devices=2, accelerator="cpu")
        torch.manual_seed(7)
        module = Keeps()
        trainer.fit(module, DataLoader(torch.arange(4.0)[:, None].expand(4, 32), shuffle=True))
        seen = [int(x) for part in trainer.strategy.data.all_gather_object(module.seen) for x in part]
        print("order", trainer.data_seed, sorted(seen), flush=True)
        """)
    )
    ran = programs.run(script, anew=True)
    assert ran.returncode == 0, ran.stderr
    found = {line for line in ran.stdout.splitlines() if line.startswith("order")}
    assert found == {"order 7 [0, 1, 2, 3]"}


def test_a_resumed_epoch_in_another_order_is_named(tmp_path, capsys):
    quiet = {
        "barebones": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    first = make(
        seed=7, max_epochs=-1, max_steps=2, enable_checkpointing=False, **quiet
    )
    order(first)
    first.save_checkpoint(tmp_path / "state")
    for seed, named in ((7, False), (8, True)):
        capsys.readouterr()
        trainer = make(seed=seed, enable_checkpointing=False, **quiet)
        trainer.fit(Ids(), loader(), ckpt_path=tmp_path / "state")
        assert ("Trainer(seed=8)" in capsys.readouterr().out) is named
