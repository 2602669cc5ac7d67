"""Averages of weights: what torch's own gives, used for validation and deployment, and gone on with in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import trainer_kit as tk
from tests.parity.plain import Classifier, make_batches, make_net
from trainer_kit.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule
from trainer_kit.testing.conformance import assert_same

DECAY = 0.8


class Norms(Classifier):
    """Batch norm and dropout; remembers the weights that it was validated with."""

    def __init__(self, dropout: float = 0.3, norm: bool = True) -> None:
        super().__init__(make_net(dropout=dropout, norm=norm))
        self.net[0].register_parameter("tied", self.net[0].weight)
        self.validated: list[dict[str, torch.Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(copied(self))
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


def copied(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train(module: tk.TrainModule, callbacks: Any, **options: Any) -> tk.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    options = {
        "max_epochs": 3,
        "accumulate_grad_batches": 2,
        "num_sanity_val_steps": 0,
        **quiet,
        **options,
    }
    start = options.pop("ckpt_path", None)
    torch.manual_seed(11)
    trainer = tk.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, **options)
    trainer.fit(module, make_batches(7), make_batches(2), ckpt_path=start)
    return trainer


class Beside(tk.Callback):
    """torch's average of the same weights, kept by hand."""

    def __init__(
        self, module: nn.Module, steps: Any, epochs: Any, **options: Any
    ) -> None:
        self.average = AveragedModel(module, use_buffers=True, **options)
        self.steps, self.epochs = steps, epochs
        self.own: list[dict[str, torch.Tensor]] = []

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.own.append(copied(module))
        if trainer.global_step - 1 in self.steps:
            self.average.update_parameters(module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch in self.epochs:
            self.average.update_parameters(module)

    def floats(self) -> dict[str, torch.Tensor]:
        return {
            n: v.clone()
            for n, v in self.average.module.state_dict().items()
            if v.is_floating_point()
        }

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.average.n_averaged:
            shown = {
                n: v for n, v in module.validated[-1].items() if v.is_floating_point()
            }
            assert_same(
                shown, self.floats(), 1e-6 if len(self.steps) > 2 else 0.0
            )  # torch has two ways to a mean
        elif self.steps:
            assert_same(module.validated[-1], self.own[-1], 0.0)
        assert_same(copied(module), self.own[-1], 0.0)  # its own again


@pytest.mark.slow
def test_as_torch_averages(tmp_path: Path) -> None:
    plain = Norms()
    train(plain, ModelCheckpoint(tmp_path / "plain"))
    for number, (callback, steps, epochs, options) in enumerate(
        (
            (
                EMAWeightAveraging(
                    decay=DECAY,
                    update_every_n_steps=3,
                    update_starting_at_step=4,
                    update_starting_at_epoch=1,
                ),
                (6, 9),
                (1, 2),
                {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
            ),
            (WeightAveraging(), range(12), (), {}),
            (
                WeightAveraging("cpu", avg_fn=get_ema_avg_fn(0.5)),
                range(12),
                (),
                {"avg_fn": get_ema_avg_fn(0.5)},
            ),
        )
    ):
        module = Norms()
        beside = Beside(module, steps, epochs, **options)
        keeper = ModelCheckpoint(
            tmp_path / str(number), every_n_train_steps=1, save_top_k=-1
        )
        trainer = train(module, [beside, callback, keeper], val_check_interval=4)
        assert_same(beside.own[-1], copied(plain), 0.0)  # training is as without
        assert callback.n_averaged == int(beside.average.n_averaged)
        found = copied(module)
        assert_same(
            {n: v for n, v in found.items() if v.is_floating_point()},
            beside.floats(),
            1e-6,
        )
        assert int(found["net.1.num_batches_tracked"]) == 21  # whole numbers are copied
        state = read_checkpoint(keeper.last_model_path)
        assert_same(state["model"], found, 0.0)
        assert_same(
            {**state["model"], **state["current_model_state"]}, beside.own[-1], 0.0
        )
        early = read_checkpoint(tmp_path / str(number) / "step-00000001")
        assert ("current_model_state" in early) is (0 in steps)
        beside.own.append(found)
        trainer.validate(module, make_batches(2), verbose=False)
        assert_same(copied(module), found, 0.0)  # evaluation by itself moves nothing


def resumable(root: Path) -> list[Any]:
    keeper = ModelCheckpoint(root, every_n_train_steps=1, save_top_k=-1, save_last=True)
    return [
        EMAWeightAveraging(
            decay=DECAY, update_every_n_steps=2, update_starting_at_epoch=0
        ),
        keeper,
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ModelCheckpoint now writes to")
def test_a_run_resumed_at_any_step_has_the_same_averages(tmp_path: Path) -> None:
    module = Norms()
    options: dict[str, Any] = {"val_check_interval": 4, "default_root_dir": tmp_path}
    callbacks = resumable(tmp_path / "all")
    train(module, callbacks, **options)
    paths = sorted((tmp_path / "all").glob("step-*"))
    assert len(paths) == 12
    expected = read_checkpoint(paths[-1])
    ends = [str(path) for path in paths[:-1]]
    for steps in (
        5,
        7,
    ):  # a run that ended inside of an epoch, and one that is saved once more when it is over
        short = Norms()
        early = train(
            short, resumable(tmp_path / f"to-{steps}"), max_steps=steps, **options
        )
        early.save_checkpoint(tmp_path / f"after-{steps}")
        ends += [
            str(tmp_path / f"to-{steps}" / f"step-{steps:08d}"),
            str(tmp_path / f"after-{steps}"),
        ]
    for path in ends:
        again = Norms()
        keepers = resumable(tmp_path / "again")
        train(again, keepers, ckpt_path=path, **options)
        found = read_checkpoint(keepers[1].last_model_path)
        for part in ("model", "current_model_state"):
            assert_same(found[part], expected[part], 0.0)
        assert found["averaging_state"] == expected["averaging_state"], path
        assert_same(copied(again), copied(module), 0.0)
    # Without the callback it goes on from what was trained, not from the averages.
    alone = Norms()
    train(alone, ModelCheckpoint(tmp_path / "alone"), ckpt_path=ends[4], **options)
    assert_same(
        copied(alone), {**expected["model"], **expected["current_model_state"]}, 0.0
    )
    # And with it from a run that had none, which it says.
    anew = EMAWeightAveraging(decay=DECAY)
    train(
        Norms(),
        anew,
        ckpt_path=str(next((tmp_path / "alone").glob("step-*"))),
        max_epochs=4,
        **options,
    )
    assert anew.n_averaged == 6  # steps 11 to 16


class Regrown(Norms):
    """The second epoch begins with another head, and each step with another tensor for a buffer."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.register_buffer("turns", torch.zeros(1))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            (group,), old, new = (
                self.optimizers().param_groups,
                self.net[-1],
                nn.Linear(16, 4),
            )
            now = dict(zip(old.parameters(), new.parameters(), strict=True))
            group["params"] = [
                now.get(parameter, parameter) for parameter in group["params"]
            ]
            self.net[-1] = new

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()  # of those that it has by now

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.turns = self.turns + 1
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ModelCheckpoint now writes to")
def test_a_replaced_average_starts_from_scratch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def mean(own: list[Any], name: str) -> torch.Tensor:
        return torch.stack([one[name] for one in own]).mean(0)

    def ema(own: list[Any], name: str) -> torch.Tensor:
        average = own[0][name].clone()
        for one in own[1:]:
            average.lerp_(one[name], 1 - DECAY)
        return average

    for number, (callback, expected) in enumerate(
        ((WeightAveraging, mean), (lambda: EMAWeightAveraging(decay=DECAY), ema))
    ):
        module = Regrown()
        beside = Beside(module, (), ())
        keeper = ModelCheckpoint(
            tmp_path / str(number), every_n_train_steps=1, save_top_k=-1
        )
        averaging = callback()
        train(module, [averaging, beside, keeper], val_check_interval=4)
        assert capsys.readouterr().out.count("the averages of 2 weights restart") == 1
        found = copied(module)
        for name in (
            "net.0.weight",
            "net.1.running_mean",
            "turns",
            "net.4.weight",
            "net.4.bias",
        ):
            own = beside.own[4:] if name.startswith("net.4") else beside.own
            torch.testing.assert_close(
                found[name], expected(own, name), rtol=0, atol=1e-6
            )
        first_since = module.validated[2]["net.4.weight"]  # each validates two batches
        torch.testing.assert_close(
            first_since, expected(beside.own[4:6], "net.4.weight"), rtol=0, atol=1e-6
        )
        last = read_checkpoint(keeper.last_model_path)
        assert_same(last["model"], found, 0.0)
        assert_same(
            {**last["model"], **last["current_model_state"]}, beside.own[-1], 0.0
        )
        again, resumed = Regrown(), callback()
        train(
            again,
            resumed,
            val_check_interval=4,
            ckpt_path=str(tmp_path / str(number) / "step-00000009"),
        )
        assert_same(copied(again), found, 0.0)


def test_after_an_exception_the_module_has_its_own_weights(tmp_path: Path) -> None:
    class Fails(Norms):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if len(self.validated) == 3:
                raise RuntimeError("in validation")

    module, ema = Fails(), EMAWeightAveraging(decay=DECAY)
    beside = Beside(module, (), ())
    keeper = ModelCheckpoint(tmp_path / "kept", save_on_exception=True, save_top_k=-1)
    with pytest.raises(RuntimeError, match="in validation"):
        train(module, [ema, beside, keeper])
    assert_same(copied(module), beside.own[-1], 0.0)
    assert not torch.equal(module.validated[-1]["net.0.weight"], module.net[0].weight)
    state = read_checkpoint(keeper.last_model_path)
    assert_same({**state["model"], **state["current_model_state"]}, beside.own[-1], 0.0)
    assert_same(state["model"], module.validated[-1], 0.0)

    # Also where it comes while they change places.
    averages = ema._averages
    assert averages is not None
    copy_, calls = torch.Tensor.copy_, 0

    def interrupted(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (3, 6):
            raise KeyboardInterrupt
        return copy_(self, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupted)
        for step in (averages.put_in, averages.take_out):
            with pytest.raises(KeyboardInterrupt):
                step()
        averages.take_out()
    assert_same(copied(module), beside.own[-1], 0.0)


@pytest.mark.slow
def test_sixteen_bits_are_averaged_in_thirty_two(tmp_path: Path) -> None:
    module = Norms(dropout=0.0, norm=False)
    ema, keeper = (
        EMAWeightAveraging(decay=0.999),
        ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1),
    )
    train(module, [ema, keeper], precision="bf16-true", max_steps=6)
    states = [read_checkpoint(path) for path in sorted(tmp_path.glob("step-*"))]
    exact = states[0]["current_model_state"]["net.0.weight"].float()
    for state in states[1:]:
        exact.lerp_(state["current_model_state"]["net.0.weight"].float(), 1 - 0.999)
    kept = states[-1]["averaging_state"]["averages"]["net.0.weight"]
    torch.testing.assert_close(kept, exact, rtol=0, atol=0)
    assert not torch.equal(
        kept, states[0]["current_model_state"]["net.0.weight"].float()
    )  # too small for bf16
    assert torch.equal(states[-1]["model"]["net.0.weight"], kept.bfloat16())
    again = EMAWeightAveraging(decay=0.999)
    other = Norms(dropout=0.0, norm=False)
    train(
        other,
        again,
        precision="bf16-true",
        max_steps=6,
        ckpt_path=sorted(map(str, tmp_path.glob("step-*")))[2],
    )
    assert again._averages is not None
    assert torch.equal(
        again._averages.state(beside=False)["averages"]["net.0.weight"], kept
    )


@pytest.mark.slow
def test_weights_alone_are_the_averages(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, save_weights_only=True, every_n_train_steps=4)
    module = Norms()
    train(module, [EMAWeightAveraging(decay=DECAY, use_buffers=False), keeper])
    state = read_checkpoint(keeper.last_model_path)
    assert "current_model_state" not in state
    assert_same(state["model"], copied(module), 0.0)


class Stepped(Norms):
    """A scheduler that counts steps, and the learning rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ModelCheckpoint now writes to")
def test_stochastic_weight_averaging_is_the_mean_of_the_epochs_that_it_names(
    tmp_path: Path,
) -> None:
    def callbacks(path: Path, **options: Any) -> list[Any]:
        keeper = ModelCheckpoint(
            path, every_n_train_steps=1, save_top_k=-1, save_last=True
        )
        return [
            StochasticWeightAveraging(
                **{"swa_lrs": 0.01, "annealing_epochs": 2, **options}
            ),
            keeper,
        ]

    options: dict[str, Any] = {
        "max_epochs": 5,
        "accumulate_grad_batches": 7,
        "default_root_dir": tmp_path,
    }
    for number, start in enumerate((3, 0.6)):  # the third of five epochs
        swa, keeper = callbacks(tmp_path / str(number), swa_epoch_start=start)
        module = Stepped()
        beside = Beside(module, (), ())
        train(module, [swa, keeper, beside], **options)
        assert swa.n_averaged == 3
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                mean = torch.stack([own[name] for own in beside.own[2:]]).mean(0)
                torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-7)
        # Annealed from what the scheduler had left, which then no longer counts.
        assert module.rates[::7] == pytest.approx([0.1, 0.1, 0.1, 0.055, 0.01])
    expected = read_checkpoint(keeper.last_model_path)
    for step in (1, 2, 3, 4):
        again = Stepped()
        resumed = callbacks(tmp_path / "again", swa_epoch_start=start)
        train(
            again,
            resumed,
            ckpt_path=str(tmp_path / "1" / f"step-{step:08d}"),
            **options,
        )
        found = read_checkpoint(resumed[1].last_model_path)
        for part in ("model", "current_model_state"):
            assert_same(found[part], expected[part], 0.0)
        assert again.rates == module.rates[7 * step :]
        assert found["lr_schedulers"] == expected["lr_schedulers"]
    at_once = Stepped()
    train(
        at_once,
        callbacks(tmp_path / "at-once", annealing_epochs=0, swa_epoch_start=2),
        **options,
    )
    assert at_once.rates[::7] == [0.1, 0.01, 0.01, 0.01, 0.01]
    again = Stepped()
    resumed = callbacks(
        tmp_path / "again-at-once", annealing_epochs=0, swa_epoch_start=2
    )
    train(
        again, resumed, ckpt_path=str(tmp_path / "at-once" / "step-00000003"), **options
    )
    assert again.rates == [0.01] * 14
    assert_same(copied(again), copied(at_once), 0.0)


@pytest.mark.parametrize(
    ("start", "annealing", "rates"),
    [
        # What Lightning 2.6 trains these epochs with.
        (3, 0, [0.1, 0.1, 0.02, 0.02, 0.02, 0.02]),
        (3, 2, [0.1, 0.1, 0.1, 0.06, 0.02, 0.02]),
        (0.5, 0, [0.1, 0.1, 0.02, 0.02, 0.02, 0.02]),
        (0.5, 2, [0.1, 0.1, 0.1, 0.06, 0.02, 0.02]),
        (0.1, 1, [0.1, 0.02, 0.02, 0.02, 0.02, 0.02]),
    ],
)
def test_the_learning_rate_of_each_epoch_is_that_of_lightning(
    start: Any, annealing: int, rates: list[float]
) -> None:
    seen = []

    class Rates(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    swa = StochasticWeightAveraging(0.02, start, annealing, "linear")
    trainer = tk.Trainer(
        max_epochs=6,
        callbacks=[swa],
        enable_checkpointing=False,
        logger=False,
        accelerator="cpu",
    )
    trainer.fit(Rates(), [torch.ones(2, 32)])
    assert seen == pytest.approx(rates)


def test_arguments() -> None:
    for wrong in (
        {"swa_lrs": 0},
        {"swa_lrs": 0.1, "swa_epoch_start": 0},
        {"swa_lrs": 0.1, "swa_epoch_start": 1.5},
    ):
        with pytest.raises(ConfigurationError, match="positive learning rates"):
            StochasticWeightAveraging(**wrong)
    quiet: dict[str, Any] = {"enable_checkpointing": False}
    with pytest.raises(
        ConfigurationError,
        match=r"1 optimizer with \[1\] parameter groups, 2 learning rates",
    ):
        train(Norms(), StochasticWeightAveraging([0.1, 0.2]), **quiet)
    with pytest.raises(
        ConfigurationError, match="a fraction of an unknown number of epochs"
    ):
        train(
            Norms(), StochasticWeightAveraging(0.1), max_epochs=-1, max_steps=2, **quiet
        )
    with pytest.raises(ConfigurationError, match="only one averaging function"):
        WeightAveraging(avg_fn=get_ema_avg_fn(), multi_avg_fn=get_ema_multi_avg_fn())
    with pytest.raises(ConfigurationError, match=r"decay=1\.5"):
        EMAWeightAveraging(decay=1.5)
    with pytest.raises(ConfigurationError, match="two callbacks average"):
        train(
            Norms(),
            [WeightAveraging(), EMAWeightAveraging()],
            enable_checkpointing=False,
        )
