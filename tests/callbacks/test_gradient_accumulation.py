import pytest
import torch
from torch.utils.data import DataLoader

from tests.callbacks.fits import BATCH, Windows, fit, trainer
from trainer_kit.callbacks import GradientAccumulation, GradientAccumulationScheduler
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.progress import Duration
from trainer_kit.testing import TinyModule


class CountsTokens(TinyModule):
    def loss_weight(self, batch):
        return float(batch.numel())


def windows(callback, loader, module=None, ckpt_path=None, **options):
    """The lengths of the accumulation windows of a fit, and its trainer."""
    seen = Windows()
    made = trainer(callback, seen, **{"max_epochs": 1, **options})
    made.fit(module or TinyModule(lr=0.001), loader, ckpt_path=ckpt_path)
    return [length for _, length in seen.lengths], made


def of_sizes(*counts_and_sizes):
    return [
        torch.ones(size, 32) for count, size in counts_and_sizes for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("scheduling", "lengths"),
    [
        (1, [1, 1]),
        (4, [4, 4, 4]),
        ({0: 1, 2: 3, 4: 2}, [1, 1, 3, 3, 2, 2]),
        ({1: 5}, [1, 5, 5]),
    ],
)
def test_by_epoch(scheduling, lengths):
    seen = Windows()
    fit(GradientAccumulation(scheduling), seen, batches=6, epochs=len(lengths))
    first = dict(reversed(seen.lengths))
    assert [first[epoch] for epoch in range(len(lengths))] == lengths


def test_in_the_middle_of_a_schedule(tmp_path):
    """A resumed run begins with the length of its epoch."""
    scheduling = {0: 1, 3: 7}
    fit(GradientAccumulation(scheduling), batches=7, epochs=3).save_checkpoint(
        tmp_path / "three"
    )
    seen = Windows()
    resumed = fit(
        GradientAccumulation(scheduling),
        seen,
        batches=7,
        epochs=4,
        ckpt_path=tmp_path / "three",
    )
    assert set(resumed.lengths) == {7}
    assert seen.lengths == [(3, 7)]


def test_the_users_schedule_is_left_alone():
    mine = {2: 3}
    callback = GradientAccumulation(mine)
    assert mine == {2: 3}
    assert (callback.scheduling, callback.epochs) == ({2: 3, 0: 1}, [0, 2])
    assert callback.going_to_accumulate_grad_batches()
    assert not GradientAccumulation(1).going_to_accumulate_grad_batches()


def test_the_references_name():
    assert isinstance(
        GradientAccumulationScheduler(scheduling={0: 1, 4: 2}), GradientAccumulation
    )


def test_a_target_in_samples():
    callback = GradientAccumulation("100sp")
    assert callback.get_accumulate_grad_batches(0) == 1
    lengths, _ = windows(callback, of_sizes((6, 32), (14, 10)))
    # 96 is nearer than 128; the first window of batches of 10 still has the length of those of 32.
    assert lengths == [3, 3, 3, 10, 1]


def test_a_target_before_the_first_window():
    loader = DataLoader(torch.ones(64, 32), batch_size=4)
    lengths, made = windows(GradientAccumulation(Duration.parse("32sp")), loader)
    assert (lengths, set(made.lengths)) == ([8, 8], {8})


def test_a_target_in_tokens():
    lengths, _ = windows(
        GradientAccumulation("200tok"),
        of_sizes((3, 2), (5, 100)),
        CountsTokens(lr=0.001),
    )
    assert lengths == [3, 3, 1, 1]  # never less than one


def test_a_short_window_or_a_last_batch_changes_nothing():
    loader = DataLoader(
        torch.ones(8 * 16 + 2, 32), batch_size=16
    )  # one batch of two samples is left
    lengths, made = windows(GradientAccumulation("64sp"), loader, max_epochs=2)
    assert lengths == [4, 4, 1] * 2
    assert set(made.lengths) == {4}


def test_the_state_survives_a_restart(tmp_path):
    loader = of_sizes((5, 20), (40, 10))
    lengths, first = windows(GradientAccumulation("100sp"), loader, max_steps=1)
    assert lengths == [5]
    first.save_checkpoint(tmp_path / "one")
    after = GradientAccumulation("100sp")
    lengths, second = windows(after, loader, max_steps=3, ckpt_path=tmp_path / "one")
    assert (lengths, second.lengths[0]) == ([5, 10], 5)
    assert after.state_dict() == {"per_batch": 10.0}
    assert GradientAccumulation(4).state_dict() == {}


@pytest.mark.parametrize(
    "scheduling",
    [
        0,
        -1,
        True,
        2.0,
        {},
        {-1: 2},
        {0: 0},
        {0: 1.5},
        {"0": 1},
        {True: 2},
        "4ba",
        "0sp",
        "2ep",
        None,
    ],
)
def test_bad_schedules(scheduling):
    with pytest.raises(ConfigurationError):
        GradientAccumulation(scheduling)


def test_not_in_manual_optimization():
    class Manual(TinyModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self(batch).sum())
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ConfigurationError, match="manual optimization"):
        windows(GradientAccumulation(2), [BATCH], Manual())
    assert windows(GradientAccumulation(1), [BATCH], Manual())[0] == [1]


def test_a_target_in_tokens_without_loss_weight():
    with pytest.raises(ConfigurationError, match="has no loss_weight"):
        fit(GradientAccumulation("1e6tok"))
