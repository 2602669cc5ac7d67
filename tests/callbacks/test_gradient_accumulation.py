import json

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


class InTokens(CountsTokens):
    """In float64, with an optimizer that has a state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(32, 1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        return self.layer(batch.double()).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


RAMP = {0: 1, "300tok": 2, "900tok": 3}


def ramp_rows():
    """Micro-batches of 64, 96 or 128 tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2 + i % 3, 32, generator=generator) for i in range(12)]


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_a_ramp_by_tokens_trains_as_a_plain_loop_with_windows_of_these_lengths():
    module = InTokens()
    lengths, made = windows(
        GradientAccumulation(RAMP), ramp_rows(), module, max_epochs=1, max_steps=20
    )
    batches, tokens, expected = ramp_rows(), 0, []
    plain = InTokens()
    optimizer = plain.configure_optimizers()
    while batches:
        count = 1 if tokens < 300 else 2 if tokens < 900 else 3
        window, batches = batches[:count], batches[count:]
        total = sum(batch.numel() for batch in window)
        for batch in window:
            (plain.training_step(batch, 0) * batch.numel() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += total
        expected.append(len(window))
    assert (lengths, made.progress.tokens) == (expected, tokens)
    for weight, plain_weight in zip(weights(module), weights(plain), strict=True):
        torch.testing.assert_close(weight, plain_weight, rtol=1e-12, atol=1e-14)


def test_a_ramp_goes_on_exactly_after_a_resume_at_any_step(tmp_path):
    def run(**options):
        module = InTokens()
        lengths, made = windows(
            GradientAccumulation(RAMP), ramp_rows(), module, max_epochs=2, **options
        )
        return lengths, made, module

    expected, whole, module = run()
    assert sorted(set(expected)) == [1, 2, 3]
    for step in range(1, len(expected)):
        _, first, _ = run(max_steps=step)
        first.save_checkpoint(tmp_path / f"{step}")
        lengths, second, resumed = run(ckpt_path=tmp_path / f"{step}")
        assert lengths == expected[step:]
        assert second.progress.tokens == whole.progress.tokens
        for weight, other in zip(weights(module), weights(resumed), strict=True):
            assert torch.equal(weight, other)


def test_a_second_fit_begins_its_ramp_again():
    callback = GradientAccumulation({"4st": 2, 0: 3})
    for _ in range(2):
        assert windows(callback, of_sizes((16, 2)))[0] == [3, 3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("ramp", "lengths"),
    [
        ({"8sp": 2}, [1, 1, 2, 2, 2]),
        ({"2ba": 4}, [1, 1, 4, 2]),
        ({Duration.parse("1st"): 7}, [1, 7]),
    ],
)
def test_ramps_in_other_units(ramp, lengths):
    assert windows(GradientAccumulation(ramp), of_sizes((8, 4)))[0] == lengths


@pytest.mark.parametrize(
    "ramp",
    [
        {0: 1, 4: 2, "1e9tok": 4},
        {0: 1, "10st": 2, "1e9tok": 4},
        {"1e9tok": 0},
        {"1e9tok": 1.5},
        {"2h": 4},
        {"3ep": 4},
        {"many": 4},
    ],
)
def test_a_ramp_that_cannot_be_read_is_refused(ramp):
    with pytest.raises(ConfigurationError, match="a ramp maps one unit"):
        GradientAccumulation(ramp)


@pytest.mark.parametrize(
    ("ramp", "start"),
    [
        ({"0tok": 2, 0: 1}, "0 tok"),
        ({"1e3tok": 2, "1000tok": 3}, "1000 tok"),
        ({"4st": 2, Duration.parse("4st"): 3}, "4 st"),
    ],
)
def test_a_ramp_with_two_parts_at_one_start_is_refused(ramp, start):
    """The later entry replaced the earlier one."""
    with pytest.raises(ConfigurationError, match=f"two parts .* begin at {start}"):
        GradientAccumulation(ramp)


def test_a_ramp_in_tokens_needs_a_module_that_counts_them():
    with pytest.raises(ConfigurationError, match="the number of tokens is unknown"):
        windows(GradientAccumulation(RAMP), of_sizes((4, 2)))


@pytest.mark.parametrize(
    ("ramp", "same"),
    [
        ({"0": 1, "4tok": 4}, {0: 1, "4tok": 4}),
        ({"1st": 4, "0": 2}, {0: 2, "1st": 4}),
    ],
)
def test_the_zero_of_json_is_zero(ramp, same):
    """JSON has no other keys, so a file or the command line could not say it."""
    assert GradientAccumulation(ramp).ramp == GradientAccumulation(same).ramp


def test_a_ramp_from_json_sets_the_windows_of_a_trainer():
    ramp = json.loads('{"0": 2, "8sp": 1}')
    seen = Windows()
    made = trainer(seen, max_epochs=1, accumulate_grad_batches=ramp)
    made.fit(TinyModule(lr=0.001), of_sizes((8, 4)))
    assert [length for _, length in seen.lengths] == [2, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "ramp",
    [
        {0: 1, "0": 2, "4tok": 2},
        {"0": 1, "4": 2},
        {"0": 1, "4": 2, "1e9tok": 4},
        {"00": 1, "1e9tok": 4},
        {"-1": 2},
    ],
)
def test_other_texts_without_a_unit_are_no_start(ramp):
    with pytest.raises(ConfigurationError, match="a ramp maps one unit"):
        GradientAccumulation(ramp)
