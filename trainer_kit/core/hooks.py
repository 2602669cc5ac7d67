"""The hook specification: which hooks exist, their arguments, when they are called, and what holds there.

Users subclass `Callback`; `ModuleHooks` and `DataHooks` are the hooks of modules and datamodules. The bus calls only
overridden hooks, so their bodies are empty, except those that set training and evaluation mode.
``tests/training/test_hook_order.py`` checks the order, which docs/design.md describes.

A hook is added here, twice if modules have it too, and called where it happens. The bus, `HOOK_FACTS`, the hooks of
`LambdaCallback`, the adapters of other libraries and docs/hooks.md read the methods.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    cast,
    final,
)

from lightning_utilities.core.rank_zero import rank_zero_only

from trainer_kit.core.arguments import with_typed_arguments
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.lazy import other_names
from trainer_kit.core.notebook import html_arguments
from trainer_kit.core.protocols import ModuleLike
from trainer_kit.core.signatures import check_names
from trainer_kit.core.tensors import move_to_device
from trainer_kit.core.types import (
    Batch,
    Function,
    Loaders,
    MetricValue,
    SavedState,
    StateDict,
    StepOutput,
)

if TYPE_CHECKING:
    from torch import Tensor, device, nn
    from torch.optim import Optimizer

    from trainer_kit.core.location import Location

    # Any, so that an override may be annotated with Trainer and TrainModule, which are above this room, or with the
    # protocols TrainerLike and ModuleLike, as ours are.
    AnyTrainer: TypeAlias = Any
    AnyModule: TypeAlias = Any

# lightning-utilities raises an error when a user's function runs under `rank_zero_only` before the rank is known; a
# started strategy sets the real rank.
if getattr(rank_zero_only, "rank", None) is None:
    _text = os.environ.get("RANK", "")
    # `Environment.detect` refuses a rank that is not a number; an import does not.
    _rank = 0
    if _text.isdecimal():
        _rank = int(_text)
    # lightning-utilities keeps the rank on its function.
    rank_zero_only.rank = _rank  # type: ignore[attr-defined]

__all__ = [
    "HOOK_FACTS",
    "RUNNING_MODULE",
    "Callback",
    "DataHooks",
    "HookFacts",
    "ModuleHooks",
    "forget_modes",
    "hooks_where",
    "keep_modes",
    "restore_modes",
]

RUNNING_MODULE: Final[ContextVar[ModuleLike | None]] = ContextVar(
    "RUNNING_MODULE", default=None
)
"""The module of the running entry point, which records the values of `Callback.log`."""

__getattr__ = other_names(__name__)


@final
@dataclass(frozen=True, kw_only=True)
class HookFacts:
    """What holds in a hook, for the parts of the library that treat hooks by their kind.

    Attributes:
        logs: what a value that is logged in it belongs to: an epoch, a batch, or nothing, as it cannot be logged.
        counts: the unit of a bare number as the interval of a function at this hook: batches, epochs or steps; None:
            the interval needs a unit.
        leads: whether it runs before the first of what it counts is completed, so that it sees a count of zero.
        inside: whether Lightning's counts take it for a part of a training batch, or of an epoch.
    """

    logs: Literal["epoch", "batch", "never"] = "epoch"
    counts: Literal["ba", "ep", "st"] | None = None
    leads: bool = False
    inside: Literal["", "epoch", "batch"] = ""


_SPECIAL: Final[dict[str, HookFacts]] = {}
_Hook = TypeVar("_Hook", bound=Function)


def _facts(
    logs: Literal["epoch", "batch", "never"] = "epoch",
    counts: Literal["ba", "ep", "st"] | None = None,
    leads: bool = False,
    inside: Literal["", "epoch", "batch"] = "",
) -> Callable[[_Hook], _Hook]:
    """Decorator of a hook of `Callback` that differs from a hook of evaluation: records its facts."""

    def record(hook: _Hook) -> _Hook:
        _SPECIAL[hook.__name__] = HookFacts(
            logs=logs, counts=counts, leads=leads, inside=inside
        )
        return hook

    return record


class Callback:
    """Base class of callbacks: its hooks are called at fixed points of the loop.

    Subclass it and override the hooks you need; hooks that are not overridden cost nothing. Every hook is called with
    positional arguments, as ``hook(trainer, pl_module, ...)``, so an override may use other parameter names. A
    misspelled hook is an error when the class is created; any other unknown ``on_*`` name, and wrong parameters, when
    an object of the class is passed to a Trainer.

    Attributes:
        order: ``"early"``, ``"normal"`` or ``"late"``; callbacks of the same order run as listed in the Trainer.

    Example:
        >>> class PrintEpoch(Callback):
        ...     def on_train_epoch_end(self, trainer, pl_module):
        ...         print("epoch", trainer.current_epoch, "done")
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "normal"
    duplicate_key_fix: ClassVar[str] = "override state_key so that it tells them apart"
    """The fix to suggest if two callbacks of this class have the same `state_key`."""
    never_called: ClassVar[Mapping[str, str]] = {}
    """Methods that Lightning's class calls and this one does not, each with what to do instead."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Only names that look misspelled: a package may define callbacks that no Trainer gets (`check_hooks`).
        check_names(cls, Callback)
        with_typed_arguments(cls)

    def _repr_html_(self) -> str:
        return html_arguments(self)

    @property
    def state_key(self) -> str:
        """The name of this callback's state in checkpoints; unique among the callbacks of a run."""
        return type(self).__qualname__

    def _generate_state_key(self, **arguments: object) -> str:
        """Build a `state_key` from the class name and these arguments, as Lightning's documentation does."""
        return f"{type(self).__qualname__}{arguments!r}"

    @property
    def lent_weights(self) -> Mapping[str, Tensor]:
        """By name, the live weights of the module that this callback has swapped out, for example for averages."""
        return {}

    def state_dict(self) -> SavedState:
        """The state to save in checkpoints: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what ``state_dict`` returned.

        Args:
            state_dict: the state as plain data and tensors; not called if the checkpoint has none for this `state_key`.
        """

    def log(self, name: str, value: MetricValue, *args: Any, **kwargs: Any) -> None:
        """Record a value, as ``pl_module.log`` does in the same hook.

        Args:
            name: the metric's name.
            value: a number, a tensor of one element, or a metric object with ``compute()``.
            args: further options of `TrainModule.log`, in its order.
            kwargs: the same options by name, such as ``on_epoch=True``.

        Raises:
            LogError: values cannot be logged in this hook, or the options contradict it.
            ConfigurationError: no entry point of a Trainer is running.

        Example:
            >>> import torch
            >>> from trainer_kit import Trainer
            >>> from trainer_kit.testing import TinyModule
            >>> class Count(Callback):
            ...     def on_train_epoch_end(self, trainer, pl_module):
            ...         self.log("batches", trainer.num_training_batches)
            >>> trainer = Trainer(max_epochs=1, callbacks=[Count()], logger=False, enable_checkpointing=False,
            ...                   enable_progress_bar=False, enable_model_summary=False)
            >>> trainer.fit(TinyModule(), [torch.randn(4, 32)] * 3)
            >>> float(trainer.callback_metrics["batches"])
            3.0
        """
        self._running_module(f"log({name!r})").log(name, value, *args, **kwargs)

    def log_dict(
        self, dictionary: Mapping[str, MetricValue], *args: Any, **kwargs: Any
    ) -> None:
        """Call `log` for each entry, with the same options.

        Args:
            dictionary: values by name, each as `log` takes it.
            args: further options of `TrainModule.log`, in its order.
            kwargs: the same options by name, such as ``on_epoch=True``.

        Raises:
            LogError: as `log`.
            ConfigurationError: no entry point of a Trainer is running.
        """
        self._running_module("log_dict").log_dict(dictionary, *args, **kwargs)

    def _running_module(self, call: str) -> ModuleLike:
        module = RUNNING_MODULE.get()
        if module is None:
            raise ConfigurationError(
                f"{type(self).__name__}.{call} outside of a Trainer: the value would be discarded",
                fix="call it inside a hook",
            )
        return module

    def wrap_hook(self, hook: str, owner: str, call: Function) -> Function:
        """Replace a hook of a callback or module, for example to profile it. Called before an entry point runs.

        Args:
            hook: the name of the hook, such as ``on_train_batch_end``.
            owner: the class that overrides it.
            call: the hook; the returned function must take the same arguments and return its result.
        """
        return call

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str, /) -> None:
        """The first call of an entry point, on every process. ``stage`` is fit, validate, test or predict.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            stage: the entry point: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(
        self, trainer: AnyTrainer, pl_module: AnyModule, stage: str, /
    ) -> None:
        """The last call of an entry point, also after an exception.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            stage: the entry point: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    @_facts(logs="never")
    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """At the start of a fit: modules and optimizers are created, placed, wrapped and restored.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_fit_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After ``on_train_end``; the strategy is still running.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_sanity_check_start(
        self, trainer: AnyTrainer, pl_module: AnyModule, /
    ) -> None:
        """Before the sanity-check validation that precedes training.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_sanity_check_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After the sanity check; random state and metrics are as before it.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(leads=True)
    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """Before the first epoch of a fit, and again when a resumed fit starts.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After the last epoch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(counts="ep", leads=True, inside="epoch")
    def on_train_epoch_start(
        self, trainer: AnyTrainer, pl_module: AnyModule, /
    ) -> None:
        """Before the first batch of an epoch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(counts="ep", inside="epoch")
    def on_train_epoch_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After the last batch of an epoch; values logged here belong to the epoch.

        Callbacks with ``order = "late"`` are called after the values of the epoch are reduced.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="batch", counts="ba", leads=True, inside="epoch")
    def on_train_batch_start(
        self, trainer: AnyTrainer, pl_module: AnyModule, batch: Batch, batch_idx: int, /
    ) -> int | None:
        """Before ``training_step``, for each micro-batch, on the device. If every rank returns -1, the epoch ends.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            batch: this rank's micro-batch, on the device.
            batch_idx: its index in the epoch, from 0, counted on this rank.
        """

    @_facts(logs="batch", counts="ba", inside="epoch")
    def on_train_batch_end(
        self,
        trainer: AnyTrainer,
        pl_module: AnyModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        /,
    ) -> None:
        """After a micro-batch; for the last of a window after the optimizer step, with the gradients still present.

        ``outputs`` is ``{"loss": detached loss, ...}``, or None for a skipped batch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            outputs: what ``training_step`` returned, as a dict: ``"loss"`` is detached, without weight and loss scale.
            batch: this rank's micro-batch, on the device.
            batch_idx: its index in the epoch, from 0, counted on this rank.
        """

    @_facts(logs="batch", counts="st")
    def on_train_step_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After each optimizer step, once per window (not in Lightning).

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="batch", counts="st", leads=True, inside="batch")
    def on_before_zero_grad(
        self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer, /
    ) -> None:
        """Before gradients are cleared: once per window, before its first backward.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            optimizer: the optimizer whose gradients are about to be cleared.
        """

    @_facts(logs="batch", counts="ba", leads=True, inside="batch")
    def on_before_backward(
        self, trainer: AnyTrainer, pl_module: AnyModule, loss: Tensor, /
    ) -> None:
        """Before each backward; ``loss`` is weighted and scaled, as backward will see it.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            loss: a tensor of one element, with its graph.
        """

    @_facts(logs="batch", counts="ba", leads=True, inside="batch")
    def on_after_backward(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After each backward; gradients may still be scaled and unsynchronized.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="batch", counts="st", leads=True, inside="batch")
    def on_before_optimizer_step(
        self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer, /
    ) -> None:
        """Before an optimizer step: gradients are complete, unscaled and synchronized, but not clipped.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            optimizer: the optimizer that is about to step.
        """

    def on_validation_start(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """Before the first validation loader; modules are in evaluation mode.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_validation_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After validation; reduced values are in ``callback_metrics``.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    def on_validation_epoch_start(
        self, trainer: AnyTrainer, pl_module: AnyModule, /
    ) -> None:
        """Before the first validation batch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    def on_validation_epoch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, /
    ) -> None:
        """After the last validation batch; values logged here belong to the epoch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    def on_validation_batch_start(
        self,
        trainer: AnyTrainer,
        pl_module: AnyModule,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
        /,
    ) -> None:
        """Before each ``validation_step``.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_validation_batch_end(
        self,
        trainer: AnyTrainer,
        pl_module: AnyModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
        /,
    ) -> None:
        """After each ``validation_step``, with what it returned.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            outputs: what ``validation_step`` returned, unchanged.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_test_start(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """Before the first test loader; modules are in evaluation mode.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_test_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After test; reduced values are in ``callback_metrics``.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    def on_test_epoch_start(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """Before the first test batch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    def on_test_epoch_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After the last test batch; values logged here belong to the epoch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    def on_test_batch_start(
        self,
        trainer: AnyTrainer,
        pl_module: AnyModule,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
        /,
    ) -> None:
        """Before each ``test_step``.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_test_batch_end(
        self,
        trainer: AnyTrainer,
        pl_module: AnyModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
        /,
    ) -> None:
        """After each ``test_step``, with what it returned.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            outputs: what ``test_step`` returned, unchanged.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    @_facts(logs="never")
    def on_predict_start(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """Before the first predict loader; modules are in evaluation mode.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_predict_end(self, trainer: AnyTrainer, pl_module: AnyModule, /) -> None:
        """After prediction.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_predict_epoch_start(
        self, trainer: AnyTrainer, pl_module: AnyModule, /
    ) -> None:
        """Before the first predict batch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_predict_epoch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, /
    ) -> None:
        """After the last batch.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
        """

    @_facts(logs="never")
    def on_predict_batch_start(
        self,
        trainer: AnyTrainer,
        pl_module: AnyModule,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
        /,
    ) -> None:
        """Before each ``predict_step``.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    @_facts(logs="never")
    def on_predict_batch_end(
        self,
        trainer: AnyTrainer,
        pl_module: AnyModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
        /,
    ) -> None:
        """After each ``predict_step``, with what it returned.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            outputs: what ``predict_step`` returned, unchanged.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    @_facts(logs="never")
    def on_exception(
        self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException, /
    ) -> None:
        """After an exception, which is then raised to the caller unchanged.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            exception: what was raised, of any class, ``KeyboardInterrupt`` included.
        """

    @_facts(logs="never")
    def on_save_checkpoint(
        self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: StateDict, /
    ) -> None:
        """Before the state is written; the hook may add keys.

        Called also for a state that stays in memory (with ``NaNGuard``): files belong in ``on_checkpoint_committed``.
        Of a state that is written, only rank 0 has ``rng``, ``data_ranks``, ``loaders``, ``metrics`` and ``buffers``.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            checkpoint: the state by key, to change in place; added values are plain data or tensors.
        """

    @_facts(logs="never")
    def on_load_checkpoint(
        self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: StateDict, /
    ) -> None:
        """Before a state, or weights alone, is restored; it has the keys that ``on_save_checkpoint`` added.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            checkpoint: the state by key, before any of it is restored.
        """

    def on_checkpoint_committed(
        self, trainer: AnyTrainer, pl_module: AnyModule, path: Location, /
    ) -> None:
        """After a checkpoint of this run is durable: between two steps, on every rank (not in Lightning).

        ``path`` is a ``Path``, or a location with the same methods if checkpoints go to a URL; the next save may
        delete it. Not called for a save that failed.

        Args:
            trainer: the Trainer that runs the entry point.
            pl_module: the module that was passed to it.
            path: the checkpoint directory.
        """


# For a type checker the hooks' parameters are positional, so that overrides may use other names. In a run their names
# work too: a Lightning program may call `super().on_train_start(trainer=trainer, pl_module=pl_module)`.
for _hook in vars(Callback).values():
    if isinstance(_hook, FunctionType):
        _hook.__code__ = _hook.__code__.replace(co_posonlyargcount=0)


HOOK_FACTS: Final = {
    name: _SPECIAL.get(name, HookFacts())
    for name in vars(Callback)
    if name.startswith("on_")
}
"""The hooks that a bus calls, in the order of the specification, each with its facts."""


def hooks_where(**facts: object) -> frozenset[str]:
    """The hooks that have all of these facts.

    Args:
        facts: values of `HookFacts` by the names of its fields.

    Raises:
        TypeError: a name is not one of the fields of `HookFacts`.

    Example:
        >>> sorted(hooks_where(counts="ep", leads=True))
        ['on_train_epoch_start']
    """
    unknown = facts.keys() - vars(HookFacts())
    if unknown:
        raise TypeError(f"HookFacts has no {', '.join(sorted(unknown))}")
    hooks = set()
    for name, hook_facts in HOOK_FACTS.items():
        if facts.items() <= vars(hook_facts).items():
            hooks.add(name)
    return frozenset(hooks)


class ModuleHooks:
    """The same moments as a module sees them: without the leading ``trainer, module``.

    Example:
        >>> class Net(ModuleHooks):
        ...     def on_train_start(self): print("go")
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_names(cls, ModuleHooks, DataHooks)

    def on_fit_start(self) -> None:
        """At the start of a fit: modules and optimizers are created, placed, wrapped and restored."""

    def on_fit_end(self) -> None:
        """After ``on_train_end``; the strategy is still running."""

    def on_train_start(self) -> None:
        """Before the first epoch of a fit, and again when a resumed fit starts."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self) -> None:
        """After the last batch of an epoch; values logged here belong to the epoch.

        Callbacks with ``order = "late"`` are called after the values of the epoch are reduced.
        """

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        """Before ``training_step``, for each micro-batch, on the device. If every rank returns -1, the epoch ends.

        Args:
            batch: this rank's micro-batch, on the device.
            batch_idx: its index in the epoch, from 0, counted on this rank.
        """

    def on_train_batch_end(
        self, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """After a micro-batch; for the last of a window after the optimizer step, with the gradients still present.

        ``outputs`` is ``{"loss": detached loss, ...}``, or None for a skipped batch.

        Args:
            outputs: what ``training_step`` returned, as a dict: ``"loss"`` is detached, without weight and loss scale.
            batch: this rank's micro-batch, on the device.
            batch_idx: its index in the epoch, from 0, counted on this rank.
        """

    def on_train_step_end(self) -> None:
        """After each optimizer step, once per window (not in Lightning)."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before gradients are cleared: once per window, before its first backward.

        Args:
            optimizer: the optimizer whose gradients are about to be cleared.
        """

    def on_before_backward(self, loss: Tensor) -> None:
        """Before each backward; ``loss`` is weighted and scaled, as backward will see it.

        Args:
            loss: a tensor of one element, with its graph.
        """

    def on_after_backward(self) -> None:
        """After each backward; gradients may still be scaled and unsynchronized."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before an optimizer step: gradients are complete, unscaled and synchronized, but not clipped.

        Args:
            optimizer: the optimizer that is about to step.
        """

    def on_validation_start(self) -> None:
        """Before the first validation loader; modules are in evaluation mode."""

    def on_validation_end(self) -> None:
        """After validation; reduced values are in ``callback_metrics``."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch; values logged here belong to the epoch."""

    def on_validation_batch_start(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each ``validation_step``.

        Args:
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_validation_batch_end(
        self, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After each ``validation_step``, with what it returned.

        Args:
            outputs: what ``validation_step`` returned, unchanged.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_test_start(self) -> None:
        """Before the first test loader; modules are in evaluation mode."""

    def on_test_end(self) -> None:
        """After test; reduced values are in ``callback_metrics``."""

    def on_test_epoch_start(self) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """After the last test batch; values logged here belong to the epoch."""

    def on_test_batch_start(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each ``test_step``.

        Args:
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_test_batch_end(
        self, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After each ``test_step``, with what it returned.

        Args:
            outputs: what ``test_step`` returned, unchanged.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_predict_start(self) -> None:
        """Before the first predict loader; modules are in evaluation mode."""

    def on_predict_end(self) -> None:
        """After prediction."""

    def on_predict_epoch_start(self) -> None:
        """Before the first predict batch."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch."""

    def on_predict_batch_start(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each ``predict_step``.

        Args:
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_predict_batch_end(
        self, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After each ``predict_step``, with what it returned.

        Args:
            outputs: what ``predict_step`` returned, unchanged.
            batch: this rank's batch, on the device.
            batch_idx: its index in its loader, from 0.
            dataloader_idx: the index of the loader, from 0.
        """

    def on_exception(self, exception: BaseException) -> None:
        """After an exception, which is then raised to the caller unchanged.

        Args:
            exception: what was raised, of any class, ``KeyboardInterrupt`` included.
        """

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        """Before the state is written; the hook may add keys.

        Called also for a state that stays in memory (with ``NaNGuard``): files belong in ``on_checkpoint_committed``.
        Of a state that is written, only rank 0 has ``rng``, ``data_ranks``, ``loaders``, ``metrics`` and ``buffers``.

        Args:
            checkpoint: the state by key, to change in place; added values are plain data or tensors.
        """

    def on_load_checkpoint(self, checkpoint: StateDict) -> None:
        """Before a state, or weights alone, is restored; it has the keys that ``on_save_checkpoint`` added.

        Args:
            checkpoint: the state by key, before any of it is restored.
        """

    def on_checkpoint_committed(self, path: Location) -> None:
        """After a checkpoint of this run is durable: between two steps, on every rank (not in Lightning).

        ``path`` is a ``Path``, or a location with the same methods if checkpoints go to a URL; the next save may
        delete it. Not called for a save that failed.

        Args:
            path: the checkpoint directory.
        """

    def on_validation_model_zero_grad(self) -> None:
        """Before validation inside fit: gradients may be cleared here; by default they are kept until the next step."""

    def on_validation_model_eval(self) -> None:
        """Put the module into evaluation mode; an override replaces this default."""
        cast(Any, self).eval()

    def on_validation_model_train(self) -> None:
        """Restore the modes of the module and its submodules; an override replaces this default."""
        restore_modes(self)

    def on_test_model_eval(self) -> None:
        """Put the module into evaluation mode; an override replaces this default."""
        cast(Any, self).eval()

    def on_test_model_train(self) -> None:
        """Restore the modes of the module and its submodules; an override replaces this default."""
        restore_modes(self)

    def on_predict_model_eval(self) -> None:
        """Put the module into evaluation mode; an override replaces this default."""
        cast(Any, self).eval()

    def on_predict_model_train(self) -> None:
        """Restore the modes of the module and its submodules; an override replaces this default."""
        restore_modes(self)


class DataHooks:
    """The hooks for data: of a datamodule, or of a module that has its own loaders."""

    def on_exception(self, exception: BaseException) -> None:
        """After an exception, which is then raised to the caller unchanged.

        Args:
            exception: what was raised, of any class, ``KeyboardInterrupt`` included.
        """

    def prepare_data(self) -> None:
        """Download and unpack data, in one process per node, before ``setup``. Do not set state here."""

    def setup(self, stage: str) -> None:
        """Build datasets, on every process; ``stage`` is fit, validate, test or predict.

        Args:
            stage: the entry point: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, stage: str) -> None:
        """Undo ``setup``; called also after an exception.

        Args:
            stage: the entry point: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def train_dataloader(self) -> Loaders:
        """A loader, or any pytree of loaders."""
        raise _undefined(self, "train_dataloader")

    def val_dataloader(self) -> Loaders:
        """A loader, or a list of loaders."""
        raise _undefined(self, "val_dataloader")

    def test_dataloader(self) -> Loaders:
        """A loader, or a list of loaders."""
        raise _undefined(self, "test_dataloader")

    def predict_dataloader(self) -> Loaders:
        """A loader, or a list of loaders."""
        raise _undefined(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Change a batch on the host, before it moves.

        Args:
            batch: what the loader yields, on the host.
            dataloader_idx: the index of its loader, from 0; in training always 0.

        Returns:
            The batch to move.
        """
        return batch

    def transfer_batch_to_device(
        self, batch: Batch, device: device, dataloader_idx: int
    ) -> Batch:
        """Move a batch; an override replaces the default, which moves every tensor in any nesting.

        Args:
            batch: what the loader yields, or ``on_before_batch_transfer`` returned.
            device: the device of this rank.
            dataloader_idx: the index of its loader, from 0; in training always 0.

        Returns:
            The batch on the device.
        """
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Change a batch on the device.

        Args:
            batch: the whole batch on the device, in the dtype of the precision.
            dataloader_idx: the index of its loader, from 0; in training always 0.

        Returns:
            The batch that the step gets.
        """
        return batch


def _undefined(owner: object, name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(owner).__name__} has no {name}: define {name}(self), without a call of super().{name}()"
    )


def keep_modes(module: nn.Module) -> None:
    """Record whether each submodule is in training or evaluation mode.

    Args:
        module: the module; its submodules are recorded, too.
    """
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.__dict__["_modes"] = modes


def restore_modes(module: object) -> None:
    """Restore the mode of each submodule that `keep_modes` recorded.

    Args:
        module: one that `keep_modes` got; without a record nothing happens.
    """
    for submodule, training in module.__dict__.get("_modes", ()):
        # nn.Module.__setattr__ is 20 times slower, and train() would also change modules that were in eval mode.
        submodule.__dict__["training"] = training


def forget_modes(module: object) -> None:
    """Discard the record of `keep_modes`.

    Args:
        module: one that `keep_modes` got.
    """
    module.__dict__.pop("_modes", None)
