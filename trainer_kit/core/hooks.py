"""The hook specification: which hooks exist, what they are given, when they are called.

`Callback` is what people subclass; `ModuleHooks` and `DataHooks` hold the same moments as seen by a module and by a
datamodule. Bodies are empty but for modes: the bus calls only overridden hooks. The order is DESIGN's loop, and
``tests/training/test_hook_order.py`` holds it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from lightning_utilities.core.rank_zero import rank_zero_only

from trainer_kit.core.lazy import other_names
from trainer_kit.core.signatures import check_names
from trainer_kit.core.tensors import move_to_device

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.optim import Optimizer

    from trainer_kit.core.location import Location
    from trainer_kit.core.protocols import ModuleLike, TrainerLike

# lightning-utilities raises an error when a user's function runs under `rank_zero_only` before the rank is known; a
# started strategy sets the real rank.
if getattr(rank_zero_only, "rank", None) is None:
    rank_zero_only.rank = int(os.environ.get("RANK", "0") or 0)  # type: ignore[attr-defined]

__all__ = ["Callback", "DataHooks", "ModuleHooks", "forget_modes", "keep_modes", "restore_modes"]

__getattr__ = other_names(__name__)


class Callback:
    """Something that happens around the loop.

    Subclass it and override the hooks you need; hooks that are not overridden cost nothing. Every hook is called by
    position as ``hook(trainer, module, ...)``. A misspelt hook fails when the class is created; every other unknown
    ``on_*`` name, and wrong parameters, when a Trainer is given an object of the class.

    Attributes:
        order: ``"early"``, ``"normal"`` or ``"late"``; within one, the order of the list given to the Trainer.

    Example:
        >>> class PrintEpoch(Callback):
        ...     def on_train_epoch_end(self, trainer, module):
        ...         print("epoch", trainer.current_epoch, "done")
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "normal"
    duplicate_key_fix: ClassVar[str] = "override state_key so that it tells them apart"
    """What to do about two of this class with one `state_key`."""
    never_called: ClassVar[Mapping[str, str]] = {}
    """Names that Lightning's class calls and this one does not: by name, what to do instead."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_names(cls, Callback)

    @property
    def state_key(self) -> str:
        """Under which name this callback's state is kept; unique among the callbacks of a run."""
        return type(self).__qualname__

    def _generate_state_key(self, **arguments: Any) -> str:
        """A `state_key` of the class name and these arguments; Lightning's documentation uses it."""
        return f"{type(self).__qualname__}{arguments!r}"

    @property
    def lent_weights(self) -> Mapping[str, Tensor]:
        """By name, the live weights of the module that this callback has swapped out, for example for averages."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """What must survive a restart: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""

    def wrap_hook(self, hook: str, owner: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of one callback's or module's hook; for profilers. Called before an entry point runs.

        Args:
            hook: its name, such as ``on_train_batch_end``.
            owner: the class that overrides it.
            call: the hook; what is returned takes the same arguments and returns its result.
        """
        return call

    def setup(self, trainer: TrainerLike, module: ModuleLike, stage: str) -> None:
        """The first call of an entry point, on every process. ``stage`` is fit, validate, test or predict."""

    def teardown(self, trainer: TrainerLike, module: ModuleLike, stage: str) -> None:
        """The last call of an entry point, also after an exception."""

    def on_fit_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Everything is built, moved, wrapped and restored."""

    def on_fit_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After ``on_train_end``; the strategy is still up."""

    def on_sanity_check_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the sanity-check validation that precedes training."""

    def on_sanity_check_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After them; random state and metrics are as before."""

    def on_train_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the first epoch of this sitting."""

    def on_train_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After the last batch of an epoch; what is logged here belongs to the epoch.

        Callbacks with ``order = "late"`` are called once the epoch's values are reduced.
        """

    def on_train_batch_start(self, trainer: TrainerLike, module: ModuleLike, batch: Any, batch_idx: int) -> int | None:
        """Before ``training_step``, for each micro-batch, on the device. -1 from every rank ends the epoch."""

    def on_train_batch_end(
        self, trainer: TrainerLike, module: ModuleLike, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a micro-batch; for the last of a window after the optimizer step, gradients still there.

        ``outputs`` is ``{"loss": detached loss, ...}``, or None for a skipped batch.
        """

    def on_train_step_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After an optimizer step, once a window (ours)."""

    def on_before_zero_grad(self, trainer: TrainerLike, module: ModuleLike, optimizer: Optimizer) -> None:
        """Before gradients are dropped, once a window, before its first backward."""

    def on_before_backward(self, trainer: TrainerLike, module: ModuleLike, loss: Tensor) -> None:
        """Before each backward; ``loss`` is weighted and scaled, as backward will see it."""

    def on_after_backward(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After each backward; gradients may still be scaled and unsynchronised."""

    def on_before_optimizer_step(self, trainer: TrainerLike, module: ModuleLike, optimizer: Optimizer) -> None:
        """Gradients are complete, unscaled and synchronised, not yet clipped."""

    def on_validation_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the first validation loader; modules are in evaluation mode."""

    def on_validation_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After validation; reduced values stand in ``callback_metrics``."""

    def on_validation_epoch_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After the last validation batch; what is logged here belongs to the epoch."""

    def on_validation_batch_start(
        self, trainer: TrainerLike, module: ModuleLike, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each ``validation_step``."""

    def on_validation_batch_end(
        self,
        trainer: TrainerLike,
        module: ModuleLike,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each ``validation_step``, with what it returned."""

    def on_test_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the first test loader; modules are in evaluation mode."""

    def on_test_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After test; reduced values stand in ``callback_metrics``."""

    def on_test_epoch_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After the last test batch; what is logged here belongs to the epoch."""

    def on_test_batch_start(
        self, trainer: TrainerLike, module: ModuleLike, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each ``test_step``."""

    def on_test_batch_end(
        self,
        trainer: TrainerLike,
        module: ModuleLike,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each ``test_step``, with what it returned."""

    def on_predict_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the first predict loader; modules are in evaluation mode."""

    def on_predict_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After prediction."""

    def on_predict_epoch_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Before the first predict batch."""

    def on_predict_epoch_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """After the last batch."""

    def on_predict_batch_start(
        self, trainer: TrainerLike, module: ModuleLike, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each ``predict_step``."""

    def on_predict_batch_end(
        self,
        trainer: TrainerLike,
        module: ModuleLike,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each ``predict_step``, with what it returned."""

    def on_exception(self, trainer: TrainerLike, module: ModuleLike, exception: BaseException) -> None:
        """An exception is on its way to the caller; it will arrive unchanged."""

    def on_save_checkpoint(self, trainer: TrainerLike, module: ModuleLike, checkpoint: dict[str, Any]) -> None:
        """The state is about to be written; keys may be added."""

    def on_load_checkpoint(self, trainer: TrainerLike, module: ModuleLike, checkpoint: dict[str, Any]) -> None:
        """A state, or weights alone, is about to be restored: with all that ``on_save_checkpoint`` added."""

    def on_checkpoint_committed(self, trainer: TrainerLike, module: ModuleLike, path: Location) -> None:
        """A checkpoint of this run exists, durably. Called between two steps, soon after it does, on every rank (ours).

        ``path`` is a ``Path``, or a location with the same methods where checkpoints go to a URL; the next save may
        delete it. Nothing is called for a save that failed.
        """


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
        """Everything is built, moved, wrapped and restored."""

    def on_fit_end(self) -> None:
        """After ``on_train_end``; the strategy is still up."""

    def on_train_start(self) -> None:
        """Before the first epoch of this sitting."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self) -> None:
        """After the last batch of an epoch; what is logged here belongs to the epoch.

        Callbacks with ``order = "late"`` are called once the epoch's values are reduced.
        """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before ``training_step``, for each micro-batch, on the device. -1 from every rank ends the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch; for the last of a window after the optimizer step, gradients still there.

        ``outputs`` is ``{"loss": detached loss, ...}``, or None for a skipped batch.
        """

    def on_train_step_end(self) -> None:
        """After an optimizer step, once a window (ours)."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before gradients are dropped, once a window, before its first backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before each backward; ``loss`` is weighted and scaled, as backward will see it."""

    def on_after_backward(self) -> None:
        """After each backward; gradients may still be scaled and unsynchronised."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients are complete, unscaled and synchronised, not yet clipped."""

    def on_validation_start(self) -> None:
        """Before the first validation loader; modules are in evaluation mode."""

    def on_validation_end(self) -> None:
        """After validation; reduced values stand in ``callback_metrics``."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch; what is logged here belongs to the epoch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each ``validation_step``."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each ``validation_step``, with what it returned."""

    def on_test_start(self) -> None:
        """Before the first test loader; modules are in evaluation mode."""

    def on_test_end(self) -> None:
        """After test; reduced values stand in ``callback_metrics``."""

    def on_test_epoch_start(self) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """After the last test batch; what is logged here belongs to the epoch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each ``test_step``."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each ``test_step``, with what it returned."""

    def on_predict_start(self) -> None:
        """Before the first predict loader; modules are in evaluation mode."""

    def on_predict_end(self) -> None:
        """After prediction."""

    def on_predict_epoch_start(self) -> None:
        """Before the first predict batch."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each ``predict_step``."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each ``predict_step``, with what it returned."""

    def on_exception(self, exception: BaseException) -> None:
        """An exception is on its way to the caller; it will arrive unchanged."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The state is about to be written; keys may be added."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A state, or weights alone, is about to be restored: with all that ``on_save_checkpoint`` added."""

    def on_checkpoint_committed(self, path: Location) -> None:
        """A checkpoint of this run exists, durably. Called between two steps, soon after it does, on every rank (ours).

        ``path`` is a ``Path``, or a location with the same methods where checkpoints go to a URL; the next save may
        delete it. Nothing is called for a save that failed.
        """

    def on_validation_model_zero_grad(self) -> None:
        """Before validation inside fit: gradients may be dropped here; by default they stay until the next step."""

    def on_validation_model_eval(self) -> None:
        """Put the module into evaluation mode; overriding replaces the default."""
        cast(Any, self).eval()

    def on_validation_model_train(self) -> None:
        """Put the module back into the modes it had; overriding replaces the default."""
        restore_modes(self)

    def on_test_model_eval(self) -> None:
        """Put the module into evaluation mode; overriding replaces the default."""
        cast(Any, self).eval()

    def on_test_model_train(self) -> None:
        """Put the module back into the modes it had; overriding replaces the default."""
        restore_modes(self)

    def on_predict_model_eval(self) -> None:
        """Put the module into evaluation mode; overriding replaces the default."""
        cast(Any, self).eval()

    def on_predict_model_train(self) -> None:
        """Put the module back into the modes it had; overriding replaces the default."""
        restore_modes(self)


class DataHooks:
    """What a datamodule, and a module that brings its own data, may override."""

    def on_exception(self, exception: BaseException) -> None:
        """An exception is on its way to the caller; it will arrive unchanged."""

    def prepare_data(self) -> None:
        """Download, unpack: called in one process per node, before ``setup``. Set no state here."""

    def setup(self, stage: str) -> None:
        """Build datasets, on every process; ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Undo ``setup``; always called, also after an exception."""

    def train_dataloader(self) -> Any:
        """A loader, or any pytree of loaders."""
        raise _undefined(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        """A loader, or a list of loaders."""
        raise _undefined(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        """A loader, or a list of loaders."""
        raise _undefined(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        """A loader, or a list of loaders."""
        raise _undefined(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host, before it moves."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: device, dataloader_idx: int) -> Any:
        """Move a batch; overriding replaces the default, which moves every tensor in any nesting."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch


def _undefined(owner: Any, name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(owner).__name__} has no {name}: define {name}(self), without a call of super().{name}()"
    )


def keep_modes(module: Any) -> None:
    """Remember which mode each submodule is in."""
    module.__dict__["_modes"] = [(part, part.training) for part in module.modules()]


def restore_modes(module: Any) -> None:
    """Put each submodule back into the mode that `keep_modes` saw."""
    for part, training in module.__dict__.get("_modes", ()):
        # nn.Module's own attribute write is 20 times slower, and train() would wake what the user froze.
        part.__dict__["training"] = training


def forget_modes(module: Any) -> None:
    """The evaluation is over."""
    module.__dict__.pop("_modes", None)
