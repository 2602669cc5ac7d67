"""The interfaces of modules, callbacks, the Trainer, loggers and process groups.

Packages use these types, so that none imports a package of a higher level. The interfaces of strategies and precisions
are abstract classes: `trainer_kit.strategies.strategy` and `trainer_kit.precision.precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.location import Location
from trainer_kit.core.progress import Duration, Progress
from trainer_kit.core.types import (
    Batch,
    DataModuleLike,
    Loaders,
    LoggerLike,
    MetricValue,
    Nested,
    StepOutput,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "MANY_RANKS",
    "ActsAtIntervals",
    "AdaptsCallback",
    "CallbackLike",
    "CheckpointRequest",
    "DoublesParts",
    "DrawsProgress",
    "Group",
    "LeavesOutSteps",
    "LimitsTime",
    "Logger",
    "MicroSteps",
    "ModuleLike",
    "PrecisionLike",
    "ReplaysSteps",
    "SetsAccumulation",
    "SplitsBatches",
    "StopsEarly",
    "StrategyLike",
    "TrainerLike",
]

_T = TypeVar("_T")
# Classes of packages above this one, which it must not import. Callbacks and modules use all of their members, so a
# protocol here would repeat the whole class.
StrategyLike: TypeAlias = Any
PrecisionLike: TypeAlias = Any
CallbackLike: TypeAlias = Any


# Protocols that are found by ``isinstance`` among the user's objects are runtime_checkable. At run time only the names
# of the members count, so each has one that no other kind of object has.
@runtime_checkable
class Logger(Protocol):
    """A destination of metrics. Only ``log_metrics`` is required.

    Optional methods: ``log_hyperparams(params: dict)``, ``after_save_checkpoint(path)``, ``save()`` and
    ``finalize(status: "success" | "failed" | "interrupted")``; optional attributes: ``name``, ``version`` and
    ``log_dir``. Only rank 0 calls the methods, on a thread of this logger: an error or a delay there does not affect
    training (`trainer_kit.loggers.delivery`). With ``writes_alone = True``, modules and callbacks on other ranks get a
    `DummyLogger` in its place. If the third parameter of ``log_metrics`` is called ``at``, it is when the values were
    logged, in seconds since 1970.

    Example:
        >>> class PrintLogger:
        ...     def log_metrics(self, metrics, step):
        ...         print(step, metrics)
        >>> isinstance(PrintLogger(), Logger)
        True
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log values that are already reduced and on the host.

        Args:
            metrics: the values by name, as Python floats.
            step: completed optimizer steps when the values were logged; the x-axis of a chart.
        """


class MicroSteps(Protocol):
    """The micro-batches of one window, as the loop passes them to a strategy, which decides only their order."""

    count: int
    first: int
    """The index of the first one in its epoch."""
    started: int
    """The number of optimizer steps completed before this window."""
    batch: Batch
    earlier: Batch
    """The last batch of this rank before its padding batches."""
    outputs: StepOutput
    contributed: bool

    def begin(self, index: int) -> None:
        """Move the batch and call ``on_train_batch_start``."""

    def forward(self, index: int) -> Tensor | None:
        """Run the user's step; returns the weighted and scaled loss, or None if the step returned none."""

    def backward(self, index: int, loss: Tensor) -> None:
        """Run backward, with its hooks."""

    def end(self, index: int) -> None:
        """Count the batch; call ``on_train_batch_end``, except for the last: its hook follows the optimizer step."""

    def note_contribution(self) -> None:
        """Note that the window adds a gradient, for strategies that run the step or backward themselves."""

    def turn_to(self, index: int, batch: Batch, outputs: StepOutput = None) -> None:
        """Make a micro-batch that has begun the current one, for strategies that interleave several."""

    def dry_run(self, batch: Batch, index: int) -> StepOutput:
        """Run the user's step on a batch without hooks and without logging."""

    @property
    def has_backward_hooks(self) -> bool:
        """Whether any callback or the module overrides ``on_before_backward`` or ``on_after_backward``."""

    def start_gradients(self) -> None:
        """Clear the gradients of the previous window, for strategies that run backward themselves."""


MANY_RANKS: Final = 64
"""From this size of a group on, rank 0 collects the numbers of all ranks and sends them down a tree.

gloo gathers around a ring, whose messages grow with the square of the ranks, and whose time with their number. On few
ranks the ring is one exchange instead of two.
"""


class Group(Protocol):
    """A group of processes. Every rank of the group must make the same calls in the same order."""

    rank: int
    size: int

    @property
    def group(self) -> ProcessGroup | None:
        """The torch process group; None for one process, or if another library exchanges the tensors."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks, in place; ``op`` is sum, mean, min or max."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack over the ranks: shape (size, *tensor.shape)."""

    def all_gather_object(self, value: _T) -> list[_T]:
        """Gather one small picklable value from every rank, in rank order."""

    def gather_object(self, value: _T) -> list[_T] | None:
        """Gather one picklable value from every rank on rank 0, in rank order; None on the others."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Broadcast a tensor (in place), or one small picklable value, from rank ``source``."""

    def barrier(self) -> None:
        """Wait for every rank."""

    def agree(self, values: list[float]) -> list[list[float]]:
        """Gather a few numbers of every rank, one row per rank, on a CPU group, so that no device is synchronized."""

    def side_group(self, recreate: bool = False) -> ProcessGroup | None:
        """A torch group of the same processes for CPU tensors, used for control traffic and never by training.

        The first call is collective. None for one process.
        ``recreate``: create a new group after a timeout; a collective call.
        """


class CheckpointRequest(Protocol):
    """A callback's request for one checkpoint of the current step, saved after everything else of that step.

    Every rank must make it at the same step and in the same order: a request with a path is saved there without asking
    the other ranks, so what leads to it may not be known to one rank alone. Rank 0's ``path`` and ``weights_only``
    count. A rank that makes one alone waits for the others forever, or where ranks agree, gets a `RankError`. A request
    of `request_checkpoint` without a ``CheckpointRequest`` may come from one rank: it waits until all know of it.

    Optional: ``failed(path)`` is called in place of ``saved`` if the storage failed and training continues.
    ``next_try: str`` is the time of the callback's next request, for that message. ``committed(path)`` is called on
    rank 0 as soon as the checkpoint is durable, in the thread that wrote it: it may change files, but nothing that
    training uses, and may return a line for the user. ``not_finite()`` is called before it if saved weights are NaN or
    infinite: such a checkpoint should not replace one with finite weights.
    """

    reason: str
    path: Location
    weights_only: bool

    def saved(self, path: Location) -> None:
        """Called on every rank with rank 0's path, between two steps, soon after the checkpoint is durable."""


@runtime_checkable
class SetsAccumulation(Protocol):
    """A callback that sets the micro-batches per window, such as `GradientAccumulation`; the first one is used."""

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """The number of micro-batches per window in this epoch."""


@runtime_checkable
class StopsEarly(Protocol):
    """A callback such as `EarlyStopping`, which the Trainer shows as ``early_stopping_callback``."""

    stopped_epoch: int


@runtime_checkable
class AdaptsCallback(Protocol):
    """A callback that wraps one of Lightning's classes; the Trainer shows the wrapped one."""

    callback: Any
    extended_names: tuple[str, ...]
    """The names of Lightning's classes that it extends, of those by which a Trainer looks for callbacks."""


@runtime_checkable
class DrawsProgress(Protocol):
    """A progress bar: `print` writes above a line that is on the screen."""

    refresh_rate: int

    @property
    def is_drawn(self) -> bool:
        """Whether a line is on the screen."""

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print without tearing the line."""


@runtime_checkable
class LimitsTime(Protocol):
    """A callback that ends the run after some time."""

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds until the limit; None without one."""


@runtime_checkable
class SplitsBatches(Protocol):
    """A callback that makes the loop repeat a step with split batches if memory ran out, such as `AutoMicroBatch`."""

    parts: int
    """The number of parts of each batch."""

    @property
    def splits_batches(self) -> bool: ...


@runtime_checkable
class DoublesParts(SplitsBatches, Protocol):
    """What the loop needs of such a callback; one without the method, as of version 0.2.0, is refused."""

    def double_parts(self) -> None:
        """Split each batch into twice as many parts from here on."""


@runtime_checkable
class ReplaysSteps(Protocol):
    """A callback that makes the loop run steps twice and compare them, such as `ReplayCheck`."""

    @property
    def replays_every(self) -> int:
        """Optimizer steps from one comparison to the next."""


@runtime_checkable
class ActsAtIntervals(Protocol):
    """A callback that the loop calls between two steps, such as `HealthCheck`; no other step calls it."""

    @property
    def acts_every(self) -> Duration | None:
        """From one call to the next; None: never."""

    def act(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Called on every rank, at the same step."""


@runtime_checkable
class LeavesOutSteps(Protocol):
    """A callback that makes the loop rewind before a step with a non-finite loss, such as `NaNGuard`."""

    @property
    def non_finite(self) -> tuple[str, int, int, list[int]]:
        """Policy, steps to rewind before the bad step, limit, and the list that the loop fills with skipped steps."""


class ModuleLike(Protocol):
    """A ``TrainModule`` as callbacks see it: an ``nn.Module`` with ``log``, ``hparams`` and so on."""

    @property
    def log(self) -> Callable[..., None]:
        """``log(name, value, **options)``, as in a `TrainModule`."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    # A module has whatever attributes its author gave it.
    def __getattr__(self, name: str) -> Any: ...


class TrainerLike(Protocol):
    """A ``Trainer`` as modules and callbacks see it: its state, and the calls that change a run."""

    # An attribute, since users assign it.
    should_stop: bool
    datamodule: DataModuleLike
    train_dataloader: Loaders
    val_dataloaders: Loaders
    test_dataloaders: Loaders
    predict_dataloaders: Loaders

    @property
    def progress(self) -> Progress: ...
    def seconds_of_run(self) -> dict[str, float]:
        """Where the time of the fit went so far, over all its restarts: seconds by part."""

    @property
    def strategy(self) -> StrategyLike: ...
    @property
    def precision_plugin(self) -> PrecisionLike: ...
    @property
    def default_root_dir(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def sanity_checking(self) -> bool: ...
    @property
    def training(self) -> bool: ...
    @property
    def evaluating(self) -> bool: ...
    @property
    def validating(self) -> bool: ...
    @property
    def testing(self) -> bool: ...
    @property
    def predicting(self) -> bool: ...
    @property
    def is_last_batch(self) -> bool: ...
    @property
    def log_every_n_steps(self) -> int: ...
    @property
    def max_epochs(self) -> int | None: ...
    @property
    def min_epochs(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def min_steps(self) -> int: ...
    @property
    def gradient_clip_val(self) -> float | None: ...
    @property
    def gradient_clip_algorithm(self) -> str | None: ...
    @property
    def accumulate_grad_batches(self) -> int: ...
    @property
    def current_epoch(self) -> int: ...
    @property
    def epoch_is_whole(self) -> bool:
        """In ``on_train_epoch_end``: whether the epoch is complete; False if the run ends inside it."""

    @property
    def global_step(self) -> int: ...
    @property
    def callbacks(self) -> list[CallbackLike]: ...
    @property
    def checkpoint_callback(self) -> CallbackLike: ...
    @property
    def early_stopping_callback(self) -> CallbackLike: ...
    @property
    def loggers(self) -> list[LoggerLike]: ...
    @property
    def logger(self) -> LoggerLike: ...
    @property
    def lightning_module(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def optimizers(self) -> list[Optimizer]: ...
    @property
    def manual_optimizers(self) -> list[Any]: ...
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
    def local_rank(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_devices(self) -> int: ...
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
    def reload_dataloaders_every_n_epochs(self) -> int: ...
    @property
    def fast_dev_run(self) -> bool | int: ...
    @property
    def validation_due(self) -> bool:
        """Whether validation runs at this step; requests of other ranks are unknown until the ranks agree."""

    @property
    def estimated_stepping_batches(self) -> int | float: ...
    @property
    def log_dir(self) -> str: ...
    @property
    def run_dir(self) -> Path:
        """Where this run writes on this machine; the same on every rank."""

    @property
    def checkpoint_dir(self) -> Location:
        """The default directory of checkpoints; a URL if the root directory is a URL."""

    @property
    def predict_batch_indices(self) -> list[Any] | None:
        """In prediction, the indices in the dataset of the samples of this rank's batch; None if they are unknown."""

    def stop(self, reason: str) -> None: ...
    def withdraw_stop(self, reason: str) -> None: ...
    def request_checkpoint(
        self, reason: str, request: CheckpointRequest | None = None
    ) -> None:
        """Request a checkpoint of this step; with a ``request``, on every rank."""

    def request_validation(self, reason: str) -> None: ...
    @property
    def train_batch_samples(self) -> int | None:
        """Samples of one micro-batch over all ranks; None if they are not known in advance."""

    def set_accumulation(
        self, batches: int, measure: Callable[[float, float], None] | None = None
    ) -> None:
        """Accumulate this many micro-batches per optimizer step, from the next window on.

        ``measure`` is called with the samples and the weight of the next micro-batch, and sets the number.
        """

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0, without tearing the progress bar."""

    def log_metrics(
        self, metrics: Mapping[str, MetricValue], step: int | None = None
    ) -> None:
        """Send values to every logger, on rank 0; this reads tensors, which is a sync point."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None: ...
    def clip_gradients(
        self, optimizer: Optimizer, value: float | None, algorithm: str | None
    ) -> None: ...
    def all_gather(self, data: Nested, sync_grads: bool = False) -> Nested:
        """Stack tensors in ``data`` over the data ranks. Every rank must call it."""

    def save_checkpoint(
        self, filepath: str | PathLike[str], weights_only: bool = False
    ) -> None:
        """Write a checkpoint directory now. Every rank must call it."""
