"""Options with Hugging Face Accelerate's names: plain records, read where the parts are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from trainer_kit.core.errors import ConfigurationError

__all__ = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "by_kind",
]


@dataclass
class KwargsHandler:
    """Options of one part, for ``Accelerator(kwargs_handlers=[...])``."""

    def to_kwargs(self) -> dict[str, Any]:
        """Those that differ from the defaults."""
        default = asdict(type(self)())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Of the autocast context: ``enabled=False`` turns it off inside ``accelerator.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Of ``torch.nn.parallel.DistributedDataParallel``; ``bucket_cap_mb`` in MiB.

    Attributes:
        comm_hook: "no", "fp16", "bf16" or "powersgd".
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: str = "no"
    comm_wrapper: str = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Of ``torch.amp.GradScaler``, for fp16."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Of ``torch.distributed.init_process_group``; the backend is by default torch's own choice for the device."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Of ``torch.profiler.profile``; with ``output_trace_dir`` each process writes a Chrome trace there."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclass
class DataLoaderConfiguration:
    """How loaders are divided among processes.

    Attributes:
        split_batches: the loader's batch size is that of all processes together, instead of each one's.
        dispatch_batches: the main process reads, and hands their parts to the others.
        even_batches: every process gets equally many samples: the last batch is filled up from the start of the data.
        use_seedable_sampler: accepted; the order is always a function of seed and epoch.
        data_seed: of the order; by default that of ``set_seed``, else drawn once.
        non_blocking: copies to an accelerator do not wait.
        use_stateful_dataloader: accepted; positions are always part of a saved state.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Where a project writes.

    Attributes:
        project_dir: the directory.
        logging_dir: that of trackers; by default ``project_dir``.
        automatic_checkpoint_naming: `save_state` without a path writes ``checkpoints/checkpoint_<iteration>``.
        total_limit: how many of those to keep.
        iteration: the number of the next one.
        save_on_each_node: accepted; the storage is one for all machines.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Write to ``project_dir``."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate.

    Attributes:
        num_steps: micro-batches of an optimizer step.
        adjust_scheduler: let schedulers count the calls inside a window.
        sync_with_dataloader: the last batch of a loader ends a window.
        sync_each_batch: exchange gradients at each batch: more traffic, less memory.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Of ``torch.compile``; ``backend="no"`` does not compile."""

    backend: str = "no"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None


def by_kind(handlers: Any) -> dict[type, Any]:
    """The handlers of a list, by class.

    Raises:
        ConfigurationError: one is no handler, or a kind is given twice.
    """
    found: dict[type, Any] = {}
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise ConfigurationError(
                "this is no kwargs handler", found=type(handler).__name__, fix="pass DistributedDataParallelKwargs(...)"
            )
        if type(handler) in found:
            raise ConfigurationError("a kwargs handler is given twice", found=type(handler).__name__)
        found[type(handler)] = handler
    return found
