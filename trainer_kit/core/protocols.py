"""What modules, callbacks, strategies, precisions and loggers look like from outside.

The rooms type against these, so that an arrow never has to point upward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.location import Location
from trainer_kit.core.progress import Progress

__all__ = [
    "CheckpointRequest",
    "Group",
    "Logger",
    "MicroSteps",
    "ModuleLike",
    "Precision",
    "Strategy",
    "TrainerLike",
]


@runtime_checkable
class Logger(Protocol):
    """Anything that can be handed metrics. Only this one method is needed.

    Optional, called where they exist: ``log_hyperparams(params: dict)``, ``after_save_checkpoint(path)``,
    ``save()``, ``finalize(status: "success" | "failed" | "interrupted")``, and the attributes ``name``, ``version``
    and ``log_dir``. Only rank 0 calls them. With ``writes_alone = True`` modules and callbacks, too, reach it on rank 0
    alone: on the others they are handed what takes every call and writes nothing.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take values that are already reduced and on the host."""


class MicroSteps(Protocol):
    """The micro-batches of one window, as the engine hands them to a strategy: order is all that a strategy decides."""

    count: int
    first: int
    """The first one's number in its epoch."""
    started: int
    """How many optimizer steps were completed when the window began."""
    batch: Any
    earlier: Any
    """The last batch before those that this rank does not have."""
    outputs: Any
    contributed: bool

    def begin(self, index: int) -> None:
        """Move the batch and call ``on_train_batch_start``."""

    def forward(self, index: int) -> Any | None:
        """Run the user's step; returns the loss as backward wants it, or None where there is nothing to add."""

    def backward(self, index: int, loss: Any) -> None:
        """Backward, with its hooks."""

    def end(self, index: int) -> None:
        """Count the batch; ``on_train_batch_end``, except for the last, whose comes after the optimizer step."""

    def turn_to(self, index: int, batch: Any, outputs: Any = None) -> None:
        """Go back to a micro-batch that has begun, for strategies that have several under way."""

    def rehearse(self, batch: Any, index: int) -> Any:
        """Run the user's step on a batch, unheard and unlogged."""

    @property
    def hears_backward(self) -> bool:
        """Whether anybody listens to ``on_before_backward`` or ``on_after_backward``."""

    def start_gradients(self) -> None:
        """Drop the gradients of the window before, for strategies that run backward themselves."""


class Group(Protocol):
    """Processes that talk to each other. Every rank of the group must make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks, in place; ``op`` is sum, mean, min or max."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack over the ranks: shape (size, *tensor.shape)."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """One small picklable value from every rank, in rank order."""

    def gather_object(self, value: Any) -> list[Any] | None:
        """One picklable value from every rank, in rank order, on the first; None on the others."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """A tensor (in place), or one small picklable value, from rank ``source``."""

    def barrier(self) -> None:
        """Wait for every rank."""

    def agree(self, values: list[float]) -> list[list[float]]:
        """A few numbers of every rank, one row a rank, on a CPU group: no device is synchronised."""

    def apart(self, anew: bool = False) -> Any:
        """torch's group of the same processes that takes CPU tensors and that training does not use.

        For what goes on beside training; every process makes the first call at the same time. None for one process.
        ``anew``, on every process: another group, for in this one somebody was not heard of in time.
        """


class Strategy(Protocol):
    """Where tensors live and who talks to whom. It has no hooks and knows no Trainer.

    Optional, called where it exists: ``configure(**facts)``, for an engine with a configuration of its own: what the
    run says about it (``precision`` before the module is built; ``batch_size``, ``accumulation`` and ``clip`` before
    it is prepared), to fill it in and to refuse what contradicts it. It may return a line for the user.
    ``costs(module, precision, ranks) -> Costs`` for ``explain()`` and the summary: what this rank holds of a module and
    sends in a step, before the module is prepared and after; ``ranks``: of the world, which may not be there yet.
    ``own_state``, where ranks hold the same names with other values: the context in which `module_state` and
    `optimizer_state` are this rank's, not what stands for all; a checkpoint keeps both. ``held_elsewhere(module) ->
    names`` of `module_state` and of parameters that only other ranks have: this one does not read them from a
    checkpoint. ``shared_names(module) -> {name: name}`` of parameters here to those that checkpoints have for them,
    because another rank holds the same parameter under that one. ``finish(module)``: training ended by itself.

    Optional, for loops of the user's own: ``complete_gradients(optimizer) -> list[Tensor]``, by every rank behind the
    last backward of a window: exchanges what is left, and returns gradients where the engine keeps them. ``owns_step``:
    it steps parameters of its own; weights are whole only in `module_state`. ``end_batch()``: a batch outside windows.
    """

    name: str
    device: torch.device
    world: Group
    """All processes."""
    data: Group
    """The processes among which a global batch is divided; the others of one place in it get the same batches."""
    losses: Group
    """The data ranks, and those that each compute a part of the same batch: over all of them losses are weighed."""
    reports: Group
    """The processes whose logged values make one: the data ranks, and those that compute the same batches together."""
    reporter: int
    """The rank of the world whose values count for this one's batches: its own, but where only another one has them."""
    sharded: bool
    """Whether a rank's own state is only a part of it: checkpoints are then written by all ranks together."""
    shard_batch: Callable[[Any], Any] | None
    """What this rank computes of a batch of its data rank, once it is on the device; None: all of it."""
    lockstep: bool
    """Whether a forward, too, needs every data rank: what a rank does not have is then run with weight 0, unheard."""

    @property
    def gradient_divisor(self) -> int:
        """By what this engine's own reduction divides the sum of the ranks' gradients."""

    def start(self) -> None:
        """Join the process group, or make one."""

    def stop(self) -> None:
        """Let go of what `prepare_module` made."""

    def init_context(self) -> AbstractContextManager[Any]:
        """The context in which ``configure_model`` builds: on the device, or without storage until it is sharded."""

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move a module to where it runs, for evaluation alone."""

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """Move, shard and wrap for training; ``manual``: the user says when backward runs."""

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Move, shard and wrap a module of a loop of the user's own; returns what is called and trained there."""

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Point parameter groups at what `prepare_module` made of the parameters."""

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """How this method of the module is called in training: through the wrapper, where there is one.

        ``several``: each micro-batch has several backward passes (named losses).
        """

    def bind_evaluation(self, method: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
        """How this method of the module is called in validation, test and prediction.

        ``whole``: batches have not been through ``shard_batch``; only where ranks compute parts of them.
        """

    def bind_backward(self, backward: Callable[..., None] | None) -> Callable[..., None] | None:
        """How backward runs; ``backward`` is the user's own, None stands for ``loss.backward``."""

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """How this optimizer is stepped."""

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's ``state_dict`` under the names that it has without any engine; every rank must call it."""

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Put `module_state` of any strategy back, as ``load_state_dict`` does."""

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], Mapping[nn.Parameter, Mapping[str, Any]]]:
        """The parameters of each group as the module has them, and the state of each; every rank must call it."""

    def load_optimizer_state(
        self,
        optimizer: Optimizer,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> None:
        """Put the options of each group and the state of each parameter back, as ``load_state_dict`` does."""

    def forward_backward(self, micro: MicroSteps) -> None:
        """All micro-batches of a window: order, sync context and the backward calls."""

    def arm(self, loss: Tensor) -> None:
        """Manual optimization: the next backward, of ``loss``, synchronises."""

    def clip_gradients(
        self, parameters: Sequence[nn.Parameter], value: float, algorithm: str, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip unscaled gradients, over all shards, by norm, which it returns as it was, or by value."""

    @property
    def own_buffers(self) -> bool:
        """Whether a data rank's buffers (running statistics) stay its own from one step to the next."""

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, every data rank has the buffers of data rank 0; afterwards its own again."""

    def describe(self) -> str:
        """One line for ``explain()``."""


class Precision(Protocol):
    """In what dtype each computation runs.

    Optional: ``check(device: torch.device, engine: str)``, called where the parts of a run are put together, which
    raises a `PrecisionError` where it cannot run; and ``kept_modules(module) -> list[nn.Module]``: those whose
    parameters an engine that gathers weights takes as they are stored, each apart from the others, whatever
    ``param_dtype`` says (exceptions in another dtype, and quantised weights). ``hand_over(stepper, scales)``, called by
    an engine that steps by itself, with what says whether it skipped the last step, and whether it scales losses;
    ``skips: bool``, whether ``optimizer_step`` may leave a step out: where it is missing, what ``scales`` says.
    """

    name: str
    param_dtype: torch.dtype | None
    """In what dtype an engine may gather weights for a forward; None: as they are stored, which FSDP always does."""
    reduce_dtype: torch.dtype | None
    """In what dtype such an engine adds up the gradients of several ranks; None: that of the gradients."""

    def convert_module(self, module: nn.Module) -> None:
        """Cast parameters and buffers, in place."""

    def convert_batch(self, batch: Any) -> Any:
        """Cast the floating-point tensors of a batch; used only where ``converts_batch`` is true."""

    converts_batch: bool

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """The context of a forward, entered again and again; None when there is none to enter."""

    def init_context(self) -> AbstractContextManager[Any]:
        """The context in which ``configure_model`` builds layers."""

    scales: bool
    """Whether losses are scaled, and the four methods below do anything."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What backward is called on."""

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Undo the scale, in place, once a step."""

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> bool:
        """Run ``step`` unless gradients overflowed; returns whether it ran."""

    def end_step(self) -> None:
        """Every optimizer of the step has been stepped."""

    def abandon_step(self) -> None:
        """An exception ended the step; the next one starts anew."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class CheckpointRequest(Protocol):
    """What a callback asks of the loop: one checkpoint of the step it is in, after everything of that step.

    Optional: ``failed(path)``, called in place of ``saved`` where the storage failed and training goes on;
    ``next_try: str``, when the callback will ask again, for the line that says so; and ``committed(path)``, called on
    rank 0 the moment the checkpoint is durable, in the thread that wrote it: there files may be touched, and nothing
    that training uses. It may return a line for the user. ``not_finite()`` is called there just before, where the saved
    weights are NaN or infinite: nothing with finite ones should give way to them.
    """

    reason: str
    path: Location
    weights_only: bool

    def saved(self, path: Location) -> None:
        """The checkpoint exists, durably. Called between two steps, soon after it does, on every rank."""


class ModuleLike(Protocol):
    """A ``TrainModule`` as callbacks see it: an ``nn.Module`` with ``log``, ``hparams`` and the rest."""

    def log(self, name: str, value: Any, **kwargs: Any) -> None: ...
    def parameters(self, recurse: bool = True) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...


class TrainerLike(Protocol):
    """A ``Trainer`` as modules and callbacks see it."""

    progress: Progress
    strategy: Any
    precision_plugin: Any
    default_root_dir: str
    should_stop: bool
    sanity_checking: bool
    log_every_n_steps: int
    max_epochs: int | None
    max_steps: int

    @property
    def current_epoch(self) -> int: ...
    @property
    def epoch_is_whole(self) -> bool:
        """In ``on_train_epoch_end``: whether the epoch is over; a run that ends inside of it goes on there."""

    @property
    def global_step(self) -> int: ...
    @property
    def callbacks(self) -> list[Any]: ...
    @property
    def loggers(self) -> list[Any]: ...
    @property
    def optimizers(self) -> list[Optimizer]: ...
    @property
    def lr_scheduler_configs(self) -> list[Any]: ...
    @property
    def callback_metrics(self) -> dict[str, Tensor]: ...
    def logged_at(self, name: str) -> int:
        """The step whose weights the latest value of ``name`` describes: an earlier one for its validation or epoch."""

    @property
    def progress_bar_metrics(self) -> dict[str, float]: ...
    @property
    def logged_metrics(self) -> dict[str, Tensor]: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def num_training_batches(self) -> int | float: ...
    @property
    def num_val_batches(self) -> list[int | float]: ...
    @property
    def num_sanity_val_batches(self) -> list[int | float]: ...
    @property
    def num_test_batches(self) -> list[int | float]: ...
    @property
    def num_predict_batches(self) -> list[int | float]: ...
    @property
    def fast_dev_run(self) -> bool | int: ...
    @property
    def validation_due(self) -> bool:
        """Whether validation follows at this step; requests of other ranks are not known before they agree."""

    @property
    def estimated_stepping_batches(self) -> int | float: ...
    @property
    def log_dir(self) -> str | None: ...
    @property
    def run_dir(self) -> Path:
        """Where this run writes on this machine; the same on every rank."""

    @property
    def checkpoint_dir(self) -> Location:
        """Where checkpoints go that nobody gave a directory; a URL where the root directory is one."""

    def stop(self, reason: str) -> None: ...
    def withdraw_stop(self, reason: str) -> None: ...
    def request_checkpoint(self, reason: str, request: CheckpointRequest | None = None) -> None: ...
    def request_validation(self, reason: str) -> None: ...
    @property
    def train_batch_samples(self) -> int | None:
        """Samples of one micro-batch over all ranks, where they are known beforehand."""

    def set_accumulation(self, batches: int) -> None:
        """From the next window on: this many micro-batches an optimizer step."""

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0, without tearing the progress bar."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Hand values to every logger at once (rank 0); tensors are read here: a sync point."""
