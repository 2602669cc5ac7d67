"""The learning rate range test (Smith 2017, https://arxiv.org/abs/1506.01186): the loss at growing rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.module import TrainModule
from trainer_kit.core.notebook import html_table
from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.step.run import Fit
from trainer_kit.training.on_processes import on_processes
from trainer_kit.training.session import Session
from trainer_kit.tuner.trial import check_call, holders, run_trial

__all__ = ["LearningRates", "RangeTest", "attribute_of", "lr_find", "set_learning_rate"]

_ATTRIBUTES: Final = ("lr", "learning_rate")
_SMOOTHING: Final = 0.9
"""Of the running mean that the end of the test is decided by; the curve has a mean without a lag."""


@final
class LearningRates:
    """The curve of a range test.

    Args:
        rates: the learning rate of each step.
        losses: the loss of each step, before the update, over all micro-batches and ranks.
        mode: how the rates grow: ``"exponential"`` or ``"linear"``.

    Attributes:
        results: ``"lr"`` and the smoothed ``"loss"``, one number for each step.
        losses: the losses without smoothing.

    Example:
        >>> found = LearningRates([1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1], [4.0, 4.0, 3.0, 1.0, 0.8, 9.0])
        >>> found.suggestion(), sorted(found.suggestions())
        (0.001, ['halfway', 'minimum', 'steepest'])
    """

    def __init__(
        self, rates: Sequence[float], losses: Sequence[float], mode: str = "exponential"
    ) -> None:
        self.mode = mode
        self.losses = list(losses)
        self.results: dict[str, list[float]] = {
            "lr": list(rates),
            "loss": _smooth(self.losses),
        }

    def suggestions(self, skip_begin: int = 10, skip_end: int = 1) -> dict[str, float]:
        """Suggested learning rates by method; empty if the loss never falls.

        ``"steepest"``: where the loss falls fastest, before its lowest point; ``"minimum"``: a tenth of the rate with
        the lowest loss; ``"halfway"``: where the loss has fallen half of the way to its lowest point.

        Args:
            skip_begin: points at the start that do not count; at most a tenth of all points.
            skip_end: points at the end that do not count.
        """
        count = len(self.losses)
        considered = slice(min(skip_begin, count // 10), count - skip_end)
        rates = np.array(self.results["lr"][considered])
        losses = np.array(self.results["loss"][considered])
        # A gradient needs two neighbors.
        if len(losses) < 3:
            return {}
        lowest = int(losses.argmin())
        # A fall after the lowest point follows a loss that had grown too far.
        descent = losses[: lowest + 1]
        falls = descent.max() > descent.min()
        if not lowest or not falls:
            return {}
        middle = (descent.max() + descent.min()) / 2
        halfway = np.flatnonzero(descent >= middle)[-1]
        steepest = np.gradient(descent).argmin()
        return {
            "steepest": float(rates[steepest]),
            # At the lowest point itself the loss no longer falls.
            "minimum": float(rates[lowest] / 10),
            "halfway": float(rates[halfway]),
        }

    def suggestion(
        self, skip_begin: int = 10, skip_end: int = 1, method: str = "steepest"
    ) -> float | None:
        """One of `suggestions`; None if the loss never falls.

        Args:
            skip_begin: as for `suggestions`.
            skip_end: as for `suggestions`.
            method: ``"steepest"``, ``"minimum"`` or ``"halfway"``.
        """
        methods = ("steepest", "minimum", "halfway")
        if method not in methods:
            raise ConfigurationError(
                "unknown method of suggestion",
                found=f"method={method!r}",
                fix=did_you_mean(method, methods),
            )
        return self.suggestions(skip_begin, skip_end).get(method)

    def _repr_html_(self) -> str:
        return html_table("Suggested learning rates", self.suggestions().items())

    def needed(self) -> float:
        """`suggestion`, or an error if there is none.

        Raises:
            ConfigurationError: there is none.
        """
        rate = self.suggestion()
        if rate is None:
            raise ConfigurationError(
                "the loss does not decrease at any learning rate",
                found=f"{plural(len(self.losses), 'step')} with rates from {min(self.results['lr'], default=0):g} on",
                fix="use a wider range from min_lr to max_lr, or a larger num_training; update_attr=False"
                " returns the curve",
            )
        return rate

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the curve; ``plot().savefig("rates.png")`` writes an image.

        Args:
            suggest: mark the suggestions.
            show: open a window.
            ax: axes of matplotlib to draw into; by default those of a new figure.

        Returns:
            matplotlib's figure.

        Raises:
            ConfigurationError: without matplotlib.
        """
        from lightning_utilities.core.imports import RequirementCache

        requirement = RequirementCache("matplotlib>=3.8")
        if not requirement:
            raise ConfigurationError(
                "a plot needs matplotlib",
                found=str(requirement),
                fix="pip install 'trainer-kit[plot]'",
            )
        # Through pyplot, so that ``figure.show()`` works.
        from matplotlib import pyplot

        ax = ax or pyplot.figure().add_subplot()
        rates = self.results["lr"]
        losses = self.results["loss"]
        ax.plot(rates, self.losses, alpha=0.3, label="loss")
        ax.plot(rates, losses, label="smoothed")
        suggestions = {}
        if suggest:
            suggestions = self.suggestions()
        for name, rate in suggestions.items():
            loss = float(np.interp(rate, rates, losses))
            ax.plot(rate, loss, "o", label=f"{name}: {rate:.2g}")
        scale = "linear"
        if self.mode == "exponential":
            scale = "log"
        ax.set_xscale(scale)
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        ax.legend()
        if show:
            ax.figure.show()
        return ax.figure


def _smooth(losses: Sequence[float]) -> list[float]:
    """A weighted mean of the neighbors of each point, symmetric so that slopes keep their position."""
    if not losses:
        return []
    reach = max(1, len(losses) // 10)
    # A triangle: 1 at the point itself, 0 beyond ``reach``.
    offsets = np.arange(-reach, reach + 1)
    distances = np.abs(offsets)
    weights = 1.0 - distances / (reach + 1)
    # The first and last losses continue beyond the ends, so that the curve keeps its length.
    padded = np.pad(np.array(losses), reach, mode="edge")
    sums = np.convolve(padded, weights, "valid")
    means = sums / weights.sum()
    smoothed: list[float] = means.tolist()
    return smoothed


@final
class RangeTest:
    """Trains steps with a growing learning rate; see `lr_find`.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    def __init__(
        self,
        min_lr: float,
        max_lr: float,
        num_training: int,
        mode: str,
        early_stop_threshold: float | None,
    ) -> None:
        is_range = 0 < min_lr < max_lr and num_training >= 3
        if mode not in ("exponential", "linear") or not is_range:
            raise ConfigurationError(
                "a range test grows the learning rate from min_lr to max_lr in at least 3 steps",
                found=f"min_lr={min_lr}, max_lr={max_lr}, num_training={num_training}, mode={mode!r}",
                fix='pass values such as min_lr=1e-8, max_lr=1, num_training=100, mode="exponential" or "linear"',
            )
        rates = np.linspace(min_lr, max_lr, num_training)
        if mode == "exponential":
            rates = np.geomspace(min_lr, max_lr, num_training)
        self.mode = mode
        self.threshold = early_stop_threshold
        self.rates: list[float] = rates.tolist()

    def run(
        self,
        trainer: Session,
        module: TrainModule,
        loaders: Loaders,
        datamodule: DataModuleLike,
        is_set_up: bool = False,
    ) -> LearningRates:
        """Return the curve; the arguments are those of `run_trial`. Every rank must call it."""
        self.losses: list[float] = []
        self._mean = 0.0
        self._lowest = math.inf
        # Accumulation decides which batches a step has, and a split batch makes a step possible; other callbacks would
        # have effects.
        keeps = ("get_accumulate_grad_batches", "splits_batches")
        steps = len(self.rates)
        run_trial(
            trainer,
            module,
            loaders,
            datamodule,
            steps,
            self._watch,
            keeps=keeps,
            is_set_up=is_set_up,
        )
        return LearningRates(self.rates[: len(self.losses)], self.losses, self.mode)

    def _watch(self, run: Fit) -> Fit:
        optimizers = run.stepper.configured.optimizers
        if len(optimizers) != 1:
            raise ConfigurationError(
                "the learning rate is searched for one optimizer",
                found=f"configure_optimizers returned {len(optimizers)}",
                fix="search with a module that returns one of them",
            )
        if not run.runner.manual:
            # A module that steps its schedulers needs them; the rate is set after that.
            run.stepper.configured.schedulers.clear()
        groups = optimizers[0].param_groups
        # A scheduler that was configured has stored the rate of its start, and set another one.
        bases = [float(group.get("initial_lr", group["lr"])) for group in groups]
        ratios = [1.0] * len(bases)
        if bases[0]:
            ratios = [base / bases[0] for base in bases]

        def set_rates(optimizer: Optimizer) -> None:
            # The ratios that the user gave the groups stay; the first group gets the rate of the test.
            for group, ratio in zip(groups, ratios, strict=True):
                rate = self.rates[run.progress.step] * ratio
                # In place: the rate of a capturable optimizer is part of a graph.
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

        run.bus.add_listener("on_before_optimizer_step", set_rates)
        run.bus.add_listener("on_train_step_end", lambda: self._read_loss(run))
        return run

    def _read_loss(self, run: Fit) -> None:
        """Take the mean loss of the step over its micro-batches and all ranks: every rank gets the same number."""
        window = run.windows.window
        loss_sum = 0.0
        # By batch, which may have several losses.
        weights: dict[int, float] = {}
        # A loss that is not finite ends the test without an error.
        for loss, _, batch in run.runner.losses.take():
            weights[batch] = 1.0
            if run.windows.weighting:
                weights[batch] = float(window.weights[batch - window.first])
            loss_sum += float(loss) * weights[batch]
        rows = run.strategy.world.agree([loss_sum, sum(weights.values())])
        weight = sum(row[1] for row in rows)
        if not weight:
            raise ConfigurationError(
                "the loss of a step is unknown",
                found="training_step returned no loss, and did not call manual_backward",
                fix="return the loss, or search without such batches",
            )
        if not self._takes_loss(sum(row[0] for row in rows) / weight):
            # Every rank knows that this was the last step.
            run.schedule.set_limit("max_steps", run.progress.step)
            run.requests.wake()

    def _takes_loss(self, loss: float) -> bool:
        """Add the loss of a step to the curve; False if the test ends: it is not finite, or has grown too far."""
        if not math.isfinite(loss):
            return False
        self.losses.append(loss)
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
        # The mean of a few batches says little.
        if len(self.losses) <= len(self.rates) // 10:
            return True
        # The running mean began at 0: this is its bias, as in Adam.
        mean = self._mean / (1 - _SMOOTHING ** len(self.losses))
        self._lowest = min(self._lowest, mean)
        return self.threshold is None or mean <= self.threshold * self._lowest


def attribute_of(module: object, name: str = "") -> str:
    """The attribute of the module, or of its hyperparameters, that holds the learning rate.

    Args:
        module: the module to search.
        name: the attribute; empty for ``lr`` or ``learning_rate``.

    Raises:
        ConfigurationError: there is none.
    """
    candidates: tuple[str, ...] = _ATTRIBUTES
    if name:
        candidates = (name,)
    for candidate in candidates:
        if holders(candidate, module):
            return candidate
    raise ConfigurationError(
        f"{type(module).__name__} has no attribute for the learning rate",
        found=f"neither the module nor its hparams has {' or '.join(candidates)}",
        fix="set self.lr in __init__ and use it in configure_optimizers; or pass attr_name= or update_attr=False",
    )


def set_learning_rate(
    trainer: Session, module: object, rate: float, attr_name: str
) -> None:
    """Set the learning rate where `attribute_of` finds it."""
    name = attribute_of(module, attr_name)
    for holder in holders(name, module):
        setattr(holder, name, rate)
    trainer.say(f"learning rate: {name} = {rate:.3g}")


def lr_find(
    trainer: Session,
    model: TrainModule,
    train_dataloaders: Loaders = None,
    val_dataloaders: Loaders = None,
    dataloaders: Loaders = None,
    datamodule: DataModuleLike = None,
    method: str = "fit",
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    mode: str = "exponential",
    early_stop_threshold: float | None = 4.0,
    update_attr: bool = True,
    attr_name: str = "",
) -> LearningRates:
    """Train a copy of the module for some steps with a growing learning rate, and suggest one.

    Nothing but the attribute of the learning rate is changed: a later fit equals that of a script without this call.
    Gradient accumulation is active; other callbacks and schedulers are not. Several parameter groups keep the ratios of
    their rates. The test ends early if the loss grows too far or is not finite; at the end of the data it reads the
    next epoch. Every rank must call this, and gets the same result.

    Args:
        trainer: a `Trainer`.
        model: the module.
        train_dataloaders: as for ``fit``.
        val_dataloaders: not used.
        dataloaders: must be None.
        datamodule: as for ``fit``.
        method: ``"fit"``.
        min_lr: the rate of the first step.
        max_lr: the rate of the last step.
        num_training: the number of optimizer steps.
        mode: ``"exponential"`` or ``"linear"``.
        early_stop_threshold: end when the mean loss exceeds this multiple of its lowest value; None: never.
        update_attr: set the suggestion on the module.
        attr_name: the attribute of the module or its ``hparams``; by default ``lr`` or ``learning_rate``.

    Returns:
        The curve, with ``suggestion()``, ``suggestions()``, ``results`` and ``plot()``.

    Raises:
        ConfigurationError: for values that cannot work, several optimizers, an engine that steps by itself, a module
            that cannot be copied, and, with ``update_attr``, a missing attribute or a loss that never falls.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> trainer = Trainer(max_epochs=1, barebones=True, accelerator="cpu", devices=1)
        >>> data = [torch.randn(4, 32) for _ in range(8)]
        >>> found = lr_find(trainer, TinyModule(), data, num_training=30, update_attr=False)
        >>> found.results["lr"][0], trainer.global_step
        (1e-08, 0)
    """
    check_call(method, dataloaders)
    test = RangeTest(min_lr, max_lr, num_training, mode, early_stop_threshold)
    # Asked before the search: a missing attribute must not be an error after minutes of training.
    if update_attr:
        attribute_of(model, attr_name)
    curve: LearningRates = on_processes(
        trainer, lambda rank: test.run(trainer, model, train_dataloaders, datamodule)
    )
    if update_attr:
        set_learning_rate(trainer, model, curve.needed(), attr_name)
    return curve
