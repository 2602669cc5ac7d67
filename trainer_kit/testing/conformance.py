"""`check_strategy`: compares the training of a strategy with that of one process; for ours and for third-party ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit.core.display import plural
from trainer_kit.core.errors import add_note
from trainer_kit.core.module import TrainModule
from trainer_kit.core.types import Batch, Keywords, SavedState, StepOutput
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.testing.distributed import run_distributed
from trainer_kit.trainer import Trainer

__all__ = [
    "CHECKS",
    "Classifier",
    "Net",
    "assert_same",
    "check_strategy",
    "continues",
    "fit",
    "run_checks",
    "whole",
]

_StrategyFactory: TypeAlias = Callable[[], Strategy | str]
"""Called on each rank, once for each Trainer."""
_ModuleFactory: TypeAlias = Callable[[], TrainModule]

# Odd, so that no power of two hides a wrong division.
_PER_RANK: Final = 3
"""Samples of a batch on each rank."""
_TOLERANCES: Final = {
    "64-true": 1e-10,
    "32-true": 2e-6,
    "bf16-mixed": 5e-3,
    "bf16-true": 2e-2,
    "16-true": 5e-3,
}
"""By precision: the relative and absolute difference that another order of sums may cause."""


def check_strategy(
    strategy: _StrategyFactory,
    world_size: int = 2,
    *,
    only: Iterable[str] | None = None,
    precision: str = "64-true",
    timeout: float = 120.0,
) -> None:
    """Train small models with a strategy on gloo ranks of this machine, and compare with one process.

    Args:
        strategy: a class, or a function at the top level of a module, that creates the strategy.
        world_size: number of ranks.
        only: names of `CHECKS`; by default all of them.
        precision: ``"64-true"``, which shows the smallest differences; ``"32-true"`` for an engine without it;
            ``"bf16-mixed"``, ``"bf16-true"``, ``"16-true"`` show wrong casts.
        timeout: seconds for all of them together.

    Raises:
        AssertionError: with the name of the check, and the difference.

    Example:
        >>> from trainer_kit.strategies import DDPStrategy
        >>> check_strategy(DDPStrategy, only=["accumulation_and_clipping"])
    """
    run_distributed(run_checks, world_size, strategy, only, precision, timeout=timeout)


def run_checks(
    strategy: _StrategyFactory,
    only: Iterable[str] | None = None,
    precision: str = "64-true",
) -> None:
    """Run the checks on ranks that exist already; collective."""
    if only is None:
        only = CHECKS
    for name in only:
        try:
            CHECKS[name](strategy, precision)
        # BaseException: a rank that exits must show its check too.
        except BaseException as error:
            add_note(error, f"check: {name}")
            raise


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        output: Tensor = self.down(hidden)
        return x + output


class Net(nn.Module):
    """Blocks between two layers; the width of 7 is not divisible by any number of ranks."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([_Block(width) for _ in range(2)])
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, 4) for (n, 8)."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.last(x)
        return logits


class Classifier(TrainModule):
    """A classification task of 8 features and 4 classes."""

    def configure_model(self) -> None:
        """Build the layers in the context of the strategy."""
        self.net = Net()

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        """The mean cross entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """SGD: its steps are linear in the gradients, so every difference shows."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class _TwoNets(TrainModule):
    """Two nets with one optimizer each; the second learns from the output of the first."""

    def configure_model(self) -> None:
        self.left = Net()
        self.right = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        output = self.left(batch[0])
        return {
            "left": F.cross_entropy(self.right(output), batch[1]),
            # By its target this loss reaches the first net too, whose optimizer must not get that gradient.
            "right": F.mse_loss(self.right(output.detach()), output),
        }

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        return self.losses(batch)

    def configure_optimizers(self) -> Any:
        return {
            name: torch.optim.SGD(getattr(self, name).parameters(), lr=0.1)
            for name in ("left", "right")
        }


class _ByHand(_TwoNets):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for name, optimizer in zip(("left", "right"), self.optimizers(), strict=True):
            optimizer.zero_grad()
            output = self.left(batch[0])
            if name == "left":
                loss = F.cross_entropy(self.right(output), batch[1])
            else:
                loss = F.mse_loss(self.right(output.detach()), torch.ones_like(output))
            self.manual_backward(loss)
            optimizer.step()

    # As a list: `self.optimizers()` returns them in this order.
    def configure_optimizers(self) -> Any:
        return list(super().configure_optimizers().values())


class _Frozen(Classifier):
    def configure_model(self) -> None:
        super().configure_model()
        self.net.first.requires_grad_(False)
        self.net.blocks[0].requires_grad_(False)


class _Weighed(Classifier):
    """A mean over tokens: the label of a sample sets its number of tokens."""

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        # Unequal on the ranks, so that a mean of means differs from the mean over all tokens.
        tokens = 1 + batch[1]
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return (losses * tokens).sum() / tokens.sum()

    def loss_weight(self, batch: Batch) -> Tensor:
        tokens: Tensor = 1 + batch[1]
        return tokens.sum()


class _Evaluated(Classifier):
    counted = 0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.counted += len(batch[0])
        output = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(output, batch[1]))
        self.log("val_accuracy", (output.argmax(-1) == batch[1]).double().mean())

    def predict_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        output: Tensor = self.net(batch[0])
        # So that predictions of one loader in place of another one show.
        return output + dataloader_idx


def _samples(count: int) -> TensorDataset:
    # From a generator of their own: the samples do not depend on what the run before has drawn.
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 8, generator=draw),
        torch.randint(4, (count,), generator=draw),
    )


class _Adaptive(Classifier):
    """The result depends on the state of an optimizer and a scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(
    strategy: Strategy | str,
    make: _ModuleFactory,
    count: int,
    size: int,
    devices: int,
    *,
    ckpt_path: str | None = None,
    save: str | None = None,
    **options: Any,
) -> tuple[Trainer, dict[str, Tensor]]:
    """Run one fit; returns the trainer and the complete final weights on every rank.

    Args:
        strategy: as the Trainer takes it.
        make: the module.
        count: number of samples.
        size: batch size of the loader.
        devices: as the Trainer takes it.
        ckpt_path: the checkpoint to resume from.
        save: the path of a checkpoint to write at the end.
        options: arguments of the Trainer.
    """
    # The same initial weights under each strategy, also where `configure_model` builds them later.
    torch.manual_seed(7)
    module = make()
    settings = {
        "max_epochs": 2,
        "barebones": True,
        "precision": "64-true",
        "seed": 0,
        **options,
    }
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, **settings)
    _silence(trainer)
    loader = DataLoader(_samples(count), batch_size=size)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    weights = whole(trainer.strategy.module_state(module))
    # Over the world, because the stages of a pipeline are not in one data group.
    everyone = trainer.strategy.world.all_gather_object(weights)
    # The complete state may be on rank 0 alone, which writes it.
    if not trainer.strategy.sharded:
        return trainer, everyone[0]
    # Each stage of a pipeline has a part of the names.
    for rank_weights in everyone:
        weights = {**rank_weights, **weights}
    return trainer, weights


def _silence(trainer: Trainer) -> None:
    """Let a Trainer print nothing: a check makes dozens of them."""
    # In __dict__, where it hides the method.
    vars(trainer)["print"] = lambda *values, **options: None


def continues(
    strategies: Mapping[str, _StrategyFactory],
    directory: str,
    found: Iterable[str] = (),
    precision: str = "64-true",
    about: str = "",
) -> None:
    """Save half of a training under each strategy, resume it under each other one, and compare with one full training.

    Args:
        strategies: by name, for this number of ranks; ``"one"`` is one process.
        directory: on storage that all ranks share.
        found: names of existing checkpoints, from other numbers of ranks.
        precision: the precision of the Trainers.
        about: skip pairs in which neither name starts with this.
    """
    world = torch.distributed.get_world_size()
    # Half of the epoch: 3 of its 6 steps. The 12 samples of a step divide by 2, 3, 4 and 6 ranks.
    options: Keywords = {
        "max_steps": 3,
        "max_epochs": 1,
        "global_batch_size": 12,
        "precision": precision,
    }
    for name, strategy in strategies.items():
        alone = name == "one"
        devices = world
        if alone:
            devices = 1
        # One process trains on rank 0, while the others wait at the barrier.
        if not alone or torch.distributed.get_rank() == 0:
            path = f"{directory}/{name}"
            fit(
                strategy(),
                _Adaptive,
                count=72,
                size=12,
                devices=devices,
                save=path,
                **options,
            )
        torch.distributed.barrier()
    options["max_steps"] = 6
    # On every rank, so that each can compare without another exchange.
    _, expected = fit("auto", _Adaptive, 72, 12, 1, **options)
    for reader, strategy in strategies.items():
        for writer in [*strategies, *found]:
            # It would compare one process with itself.
            if reader == writer == "one":
                continue
            if not (reader.startswith(about) or writer.startswith(about)):
                continue
            path = f"{directory}/{writer}"
            devices = world
            if reader == "one":
                devices = 1
            try:
                _, weights = fit(
                    strategy(),
                    _Adaptive,
                    count=72,
                    size=12,
                    devices=devices,
                    ckpt_path=path,
                    **options,
                )
                assert_same(weights, expected, _TOLERANCES[precision])
            except BaseException as error:
                add_note(error, f"saved by {writer}, read by {reader}")
                raise


def whole(state: SavedState) -> dict[str, Tensor]:
    """The complete state of a module, without shards; collective."""
    tensors = {}
    for name, value in state.items():
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        # A copy, which a later step does not change.
        tensors[name] = value.detach().clone()
    return tensors


def assert_same(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float = 1e-10,
) -> None:
    """Assert equal names, and values that are equal up to the order of sums in float64."""
    # The message lists only the names that differ.
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=partial("{}: {}".format, name),
        )


def _compare(
    strategy: _StrategyFactory,
    precision: str,
    make: _ModuleFactory,
    counts: Iterable[int],
    **options: Any,
) -> None:
    """Compare fits of ``counts`` samples on these ranks with fits in one process."""
    world = torch.distributed.get_world_size()
    options["precision"] = precision
    for count in counts:
        try:
            trainer, state = fit(strategy(), make, count, _PER_RANK, world, **options)
            # A strategy that ignores the ranks would pass every comparison below.
            assert trainer.world_size == world, (
                "the strategy does not train on all ranks"
            )
            # A batch of one process is the batches of all data ranks together: the steps have the same samples.
            alone, expected = fit(
                "auto",
                make,
                count,
                _PER_RANK * trainer.strategy.data.size,
                1,
                **options,
            )
            assert_same(state, expected, _TOLERANCES[precision])
            assert trainer.global_step == alone.global_step
            # Equal weights do not show a padding batch that was counted.
            assert trainer.progress.samples == alone.progress.samples
        except BaseException as error:
            add_note(error, f"with {plural(count, 'sample')}")
            raise


def _accumulation_and_clipping(strategy: _StrategyFactory, precision: str) -> None:
    # The norm that is clipped is that of the whole gradient, over all shards and after all micro-batches.
    limits: Keywords = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    _compare(strategy, precision, Classifier, [72], **limits)


def _clipping_by_value(strategy: _StrategyFactory, precision: str) -> None:
    # Small enough that most gradients are clipped.
    _compare(
        strategy,
        precision,
        Classifier,
        [24],
        gradient_clip_val=0.01,
        gradient_clip_algorithm="value",
    )


def _uneven_ranks(strategy: _StrategyFactory, precision: str) -> None:
    """Short last batches, ranks without samples in them, and ranks that never have a sample."""
    _compare(
        strategy,
        precision,
        Classifier,
        [25, 19, 38],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    _compare(strategy, precision, Classifier, [1])


def _uneven_named_losses(strategy: _StrategyFactory, precision: str) -> None:
    _compare(strategy, precision, _TwoNets, [19])


def _uneven_by_hand(strategy: _StrategyFactory, precision: str) -> None:
    # Every backward exchanges gradients, so a rank without samples must call each of them.
    _compare(strategy, precision, _ByHand, [19, 1])


def _token_weights(strategy: _StrategyFactory, precision: str) -> None:
    _compare(strategy, precision, _Weighed, [24, 19], accumulate_grad_batches=2)


def _evaluation(strategy: _StrategyFactory, precision: str) -> None:
    """Each sample counts once, and predictions are in order, during ``fit`` and alone."""
    world = torch.distributed.get_world_size()
    tolerance = _TOLERANCES[precision]
    for count in (26, 19, 1):
        results: list[list[Any]] = []
        # One process gets the batches of all ranks at once: the size grows after the first Trainer.
        size = _PER_RANK
        group = None
        for trainer_strategy, devices in ((strategy(), world), ("auto", 1)):
            torch.manual_seed(7)
            module = _Evaluated()
            predictor = _Evaluated()
            settings: Keywords = {
                "barebones": True,
                "precision": precision,
                "seed": 0,
                "accelerator": "cpu",
            }
            trainer = Trainer(
                devices=devices, strategy=trainer_strategy, max_epochs=2, **settings
            )
            _silence(trainer)
            loader = DataLoader(_samples(count), batch_size=size)
            trainer.fit(module, DataLoader(_samples(24), batch_size=size), loader)
            values = [
                dict(trainer.validate(module, loader, verbose=False)[0]),
                module.counted,
            ]
            torch.manual_seed(7)
            predictions = trainer.predict(predictor, [loader, loader])
            assert predictions is not None
            values += [torch.cat(list(batches)) for batches in predictions]
            results.append(values)
            # Ranks that share a batch count as one.
            if group is None:
                group = trainer.strategy.data
                size *= group.size
        metrics, counted, *predicted = results[0]
        expected_metrics, alone, *expected = results[1]
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            difference = abs(metrics[name] - value)
            # A metric is a mean of means over batches, with more rounding than a weight.
            assert difference < 10 * tolerance, (metrics, expected_metrics)
        assert group is not None
        total = group.all_reduce(torch.tensor(counted))
        assert int(total) == alone, "a padding batch was counted"
        assert_same(dict(enumerate(predicted)), dict(enumerate(expected)), tolerance)  # type: ignore[arg-type]


def _frozen_parts(strategy: _StrategyFactory, precision: str) -> None:
    # An engine that exchanges gradients in buckets must not wait for those of frozen parameters.
    _compare(strategy, precision, _Frozen, [24], accumulate_grad_batches=2)


def _named_losses(strategy: _StrategyFactory, precision: str) -> None:
    # One forward and two backward passes, each into the parameters of its own optimizer alone.
    _compare(
        strategy,
        precision,
        _TwoNets,
        [48],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )


def _manual_optimization(strategy: _StrategyFactory, precision: str) -> None:
    # Two forward and two backward passes in a batch, each followed by a step of another optimizer.
    _compare(strategy, precision, _ByHand, [24])


def _checkpoints(strategy: _StrategyFactory, precision: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        # Every rank has made a directory; that of rank 0 is used.
        shared = [directory]
        torch.distributed.broadcast_object_list(shared, 0)
        strategies = {"one": lambda: "auto", "it": strategy}
        continues(strategies, shared[0], precision=precision)
        torch.distributed.barrier()


CHECKS: Final[dict[str, Callable[[_StrategyFactory, str], None]]] = {
    "accumulation_and_clipping": _accumulation_and_clipping,
    "clipping_by_value": _clipping_by_value,
    "frozen_parts": _frozen_parts,
    "named_losses": _named_losses,
    "manual_optimization": _manual_optimization,
    "uneven_ranks": _uneven_ranks,
    "uneven_named_losses": _uneven_named_losses,
    "uneven_by_hand": _uneven_by_hand,
    "token_weights": _token_weights,
    "evaluation": _evaluation,
    "checkpoints": _checkpoints,
}
"""The checks by name; each is called on every rank with the factory of the strategy, and the precision."""
