"""`lr_find` and `LearningRateFinder`: the curve, and that nothing but the learning rate is changed."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.tuner.searched import (
    Net,
    Samples,
    Stream,
    files,
    generators,
    left_behind,
    trainer,
)
from trainer_kit.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.tuner import LearningRates, Tuner, lr_find

LOADERS: dict[str, Any] = {
    "own": lambda: None,
    "shuffled": lambda: DataLoader(Samples(), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(
        Samples(), 4, shuffle=True, generator=torch.Generator().manual_seed(9)
    ),
    "stream": lambda: DataLoader(Stream(Samples()), batch_size=4),
}


def fitted(
    lr: float, loader: str, before: Any = None, *callbacks: Any, **options: Any
) -> dict[str, Any]:
    """What a fit leaves behind; ``before`` is called with trainer, module and loader, before it."""
    tk.seed_everything(11)
    module, data, made = Net(lr), LOADERS[loader](), trainer(*callbacks, **options)
    if before is not None:
        was = generators(), files(Path.cwd())
        before(made, module, data)
        assert (generators(), files(Path.cwd())) == was
        assert module.seen == []
        assert made.global_step == 0
    made.fit(module, data)
    return left_behind(made, module, data)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_fit_after_a_search_is_the_fit_at_that_rate(loader: str) -> None:
    rates = []

    def search(made: Any, module: Any, data: Any) -> None:
        rates.append(lr_find(made, module, data, num_training=30).suggestion())
        assert module.lr == rates[0] != 1e-3

    after = fitted(1e-3, loader, search)
    assert after == fitted(rates[0], loader)
    assert rates[0] is not None


@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}, {"max_steps": 5}],
)
def test_with_arguments_of_the_trainer(options: dict[str, Any]) -> None:
    def search(made: Any, module: Any, data: Any) -> None:
        found = Tuner(made).lr_find(
            module, datamodule=None, num_training=40, update_attr=False
        )
        assert (
            len(found.results["lr"]) == len(found.results["loss"]) == 40
        )  # more than an epoch

    assert fitted(1e-3, "own", search, **options) == fitted(1e-3, "own", **options)


def test_loggers_checkpoints_and_callbacks_take_no_part() -> None:
    seen: list[int] = []

    class Counting(tk.Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            seen.append(1)

    def search(made: Any, module: Any, data: Any) -> None:
        module.configure_callbacks = lambda: [EarlyStopping("nothing")]
        lr_find(made, module, data, num_training=10, update_attr=False)
        del module.configure_callbacks
        assert not seen

    parts = Counting(), ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    fitted(
        1e-3,
        "own",
        search,
        *parts,
        logger="csv",
        enable_checkpointing=True,
        max_steps=4,
    )
    steps = [
        record.step for record in checkpoints(next(Path.cwd().rglob("checkpoints")))
    ]
    assert steps == [2, 4]


class Once:
    """Ends the third step that it is in, once; not copied with the module."""

    def __init__(self, end: Any) -> None:
        self.end, self.steps = end, 0

    def __deepcopy__(self, memo: Any) -> Once:
        return self

    def __call__(self, module: Any, batch: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            self.end()


def _raise() -> None:
    raise ValueError("user code")


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (_raise, ValueError),
        (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    ],
)
def test_an_end_in_the_middle_leaves_no_trace(
    end: Any, kind: type[BaseException]
) -> None:
    def search(made: Any, module: Any, data: Any) -> None:
        module.in_step = Once(end)
        with pytest.raises(kind):
            lr_find(made, module, data, num_training=10)
        module.in_step = None
        assert module.lr == 1e-3

    assert fitted(1e-3, "generator", search) == fitted(1e-3, "generator")


def test_the_callback_searches_before_the_first_step_and_not_in_a_resumed_fit() -> None:
    def run(
        *callbacks: Any, lr: float, steps: int, path: Any = None
    ) -> tuple[float, dict[str, Any]]:
        tk.seed_everything(11)
        module = Net(lr)
        made = trainer(*callbacks, ModelCheckpoint("kept", every_n_train_steps=3, save_top_k=-1), max_steps=steps,
                       enable_checkpointing=True)  # fmt: skip
        made.fit(module, ckpt_path=path)
        return module.lr, left_behind(made, module)

    finder = LearningRateFinder(num_training_steps=30)
    rate, whole = run(finder, lr=1e-3, steps=9)
    assert finder.optimal_lr is not None
    assert rate == finder.optimal_lr.suggestion() != 1e-3
    assert whole == run(lr=rate, steps=9)[1]
    third = next(
        record.path for record in checkpoints(Path("kept")) if record.step == 3
    )
    again = LearningRateFinder(num_training_steps=30)
    resumed_rate, resumed = run(again, lr=1e-3, steps=9, path=third)
    assert (resumed_rate, again.optimal_lr) == (rate, None)
    assert {**resumed, "seen": []} == {**whole, "seen": []}


def test_the_rates_of_groups_keep_their_ratio_and_schedulers_do_not_count() -> None:
    rates: list[list[float]] = []

    class Groups(Net):
        def configure_optimizers(self) -> Any:
            first, last = self.layers[0], self.layers[-1]
            groups = [
                {"params": first.parameters()},
                {"params": last.parameters(), "lr": self.lr / 10},
            ]
            optimizer = torch.optim.SGD(groups, lr=self.lr)
            optimizer.register_step_post_hook(
                lambda one, *_: rates.append([g["lr"] for g in one.param_groups])
            )
            warm = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, [self.lr, self.lr / 10], total_steps=3
            )
            return [optimizer], [{"scheduler": warm, "interval": "step"}]

    found = lr_find(
        trainer(), Groups(), min_lr=1e-6, max_lr=1e-2, num_training=5, update_attr=False
    )
    assert found.results["lr"] == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    assert [pair[0] for pair in rates] == found.results["lr"]
    assert [pair[1] for pair in rates] == pytest.approx(
        [rate / 10 for rate in found.results["lr"]]
    )


def test_it_ends_when_the_loss_grows_and_averages_a_window() -> None:
    class Exploding(tk.testing.TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return (self(batch) - 1).pow(2).sum()

    data = [torch.full((2, 32), 0.5), torch.full((4, 32), 1.0)] * 3
    found = lr_find(
        trainer(),
        Exploding(),
        data,
        min_lr=1e-5,
        max_lr=10,
        num_training=60,
        update_attr=False,
    )
    assert 20 < len(found.losses) < 50
    assert all(map(torch.isfinite, torch.tensor(found.losses)))
    module = Exploding()
    first = (
        (module(data[0]) - 1).pow(2).sum().item(),
        (module(data[1]) - 1).pow(2).sum().item(),
    )
    both = lr_find(
        trainer(accumulate_grad_batches=2),
        module,
        data,
        num_training=3,
        update_attr=False,
    )
    assert both.losses[0] == pytest.approx((2 * first[0] + 4 * first[1]) / 6)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_two_ranks_agree_with_one_process() -> None:
    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Linear(8, 1)

    def search(**options: Any) -> list[float]:
        found = lr_find(trainer(**options), Plain(), DataLoader(torch.utils.data.TensorDataset(x, y), size),
                        num_training=20, update_attr=False)  # fmt: skip
        return [*found.results["loss"], found.suggestion() or 0.0]

    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    size = 5
    for more in ({}, {"accumulate_grad_batches": 2}):
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, search(strategy="ddp", devices=2, **more))
        assert everyone[0] == everyone[1]
        size = 10
        assert everyone[0] == pytest.approx(
            search(strategy="single_device", **more), rel=1e-4
        )
        size = 5


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_fit_of_two_ranks_after_a_search_is_the_same() -> None:
    def run(search: bool, strategy: str) -> dict[str, Any]:
        tk.seed_everything(7)
        module, made = Net(1e-2), trainer(strategy=strategy, devices=2, max_steps=6)
        if search:
            lr_find(made, module, num_training=8, update_attr=False)
        made.fit(module)
        return left_behind(made, module)

    assert run(True, "ddp") == run(False, "ddp")
    assert run(True, "fsdp") == run(False, "fsdp")


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_callback_in_a_sharded_fit_and_its_resume() -> None:
    def run(path: Any = None) -> tuple[float, bool, dict[str, Any]]:
        tk.seed_everything(5)
        module, finder = Net(), LearningRateFinder(num_training_steps=20)
        keep = ModelCheckpoint("kept", every_n_train_steps=2, save_top_k=-1)
        options = {
            "strategy": "fsdp",
            "devices": 2,
            "max_steps": 4,
            "enable_checkpointing": True,
        }
        made = trainer(finder, keep, **options)
        made.fit(module, ckpt_path=path)
        return (
            module.lr,
            finder.optimal_lr is None,
            {**left_behind(made, module), "seen": []},
        )

    rate, resumed, whole = run()
    assert not resumed
    assert run("kept/step-00000002") == (rate, True, whole)


def test_suggestions() -> None:
    rates = [10 ** (k / 10 - 6) for k in range(60)]
    losses = [
        4 - 3 / (1 + 10 ** (-(k - 30) / 5)) + (0.4 * (k - 45) if k > 45 else 0)
        for k in range(60)
    ]
    found = LearningRates(rates, losses)
    near = found.suggestions()
    assert 5e-4 < near["steepest"] < 2e-3
    assert near["minimum"] == pytest.approx(10 ** (42 / 10 - 7), rel=0.7)
    assert 1e-5 < near["halfway"] < 3e-3
    assert found.suggestion(method="halfway") == near["halfway"]
    assert LearningRates(rates, [1.0] * 60, "linear").suggestion() is None
    with pytest.raises(tk.ConfigurationError, match="did you mean 'halfway'"):
        found.suggestion(method="halfwy")


def test_the_plot_needs_matplotlib() -> None:
    found = LearningRates([1e-3, 1e-2, 0.1, 1.0], [4.0, 3.0, 2.0, 3.0])
    if find_spec("matplotlib") is None:
        with pytest.raises(tk.ConfigurationError, match=r"trainer-kit\[plot\]"):
            found.plot()
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found.plot(suggest=True).savefig("rates.png")
    pyplot.close("all")
    assert Path("rates.png").read_bytes().startswith(b"\x89PNG")


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = (
            self.optimizers(),
            torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]),
        )
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()


def test_manual_optimization() -> None:
    assert (
        len(lr_find(trainer(), Manual(), num_training=12, update_attr=False).losses)
        == 12
    )


def test_fits_without_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    finder = LearningRateFinder()
    trainer(finder, fast_dev_run=True).fit(Net())
    assert finder.optimal_lr is None
    assert "fast_dev_run: LearningRateFinder not run" in capsys.readouterr().out
    made = trainer()
    made.fit(Net())
    made.save_checkpoint("weights", weights_only=True)
    with pytest.raises(tk.ConfigurationError, match="with weights other than"):
        trainer(finder).fit(Net(), ckpt_path="weights", load_weights_only=True)
    made.save_checkpoint("whole")
    trainer(finder, max_epochs=3).fit(Net(), ckpt_path="whole")
    assert finder.optimal_lr is None
    assert "does not search" in capsys.readouterr().out


class Named(Net):
    def configure_optimizers(self) -> Any:
        parts = {"first": self.layers[0], "last": self.layers[-1]}
        return {
            name: torch.optim.SGD(part.parameters(), lr=self.lr)
            for name, part in parts.items()
        }


def test_mistakes() -> None:
    module = Net()
    for message, options in {
        "no attribute for the learning rate": {"attr_name": "rate"},
        "grows the learning rate": {"min_lr": 0},
        "training steps only": {"method": "validate"},
    }.items():
        with pytest.raises(tk.ConfigurationError, match=message):
            lr_find(trainer(), module, **options)
    with pytest.raises(tk.DataError, match="cannot be copied"):
        lr_find(trainer(), module, (batch for batch in [1]), num_training=4)
    with pytest.raises(tk.ConfigurationError, match="for one optimizer"):
        lr_find(trainer(), Named())
    module.graph = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(tk.ConfigurationError, match="a copy of the module"):
        lr_find(trainer(), module)
    del module.graph
    constant = [(torch.zeros(4, 8), torch.zeros(4, 1))]
    module.layers = torch.nn.Linear(8, 1, bias=False)
    with pytest.raises(
        tk.ConfigurationError, match="the loss does not decrease at any learning rate"
    ):
        lr_find(trainer(), module, constant, num_training=20)
    assert module.lr == 1e-3
