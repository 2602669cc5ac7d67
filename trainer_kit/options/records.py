"""Option records with Hugging Face Accelerate's names. The code that builds each part reads its record."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from numbers import Integral
from typing import Any, ClassVar, Final

from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, schedule

from trainer_kit.core.arguments import (
    as_list,
    check_fields,
    check_timeout,
    positive,
    word_of,
)
from trainer_kit.core.configuration_sources import variable
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.core.types import Keywords
from trainer_kit.options.refusals import refused
from trainer_kit.strategies.ddp import check_comm_hook
from trainer_kit.strategies.launcher_options import FSDP_KEYS, fsdp_from_launcher
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "by_kind",
    "check_arguments",
    "check_kind",
    "micro_batches",
]


@dataclass
class KwargsHandler:
    """Base class of the option records for ``Accelerator(kwargs_handlers=[...])``.

    Raises:
        ConfigurationError: the type of a value does not match its annotation.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> Keywords:
        """All options, copied."""
        # Copied, because callers change the result before they pass it on, and a record may hold a dict of the user.
        return deepcopy(vars(self))

    def to_kwargs(self) -> Keywords:
        """The options that differ from their defaults."""
        # to_dict of the class, which may leave out fields that torch does not know.
        # Against a fresh record and not the class: a field with default_factory has no value on the class.
        default = type(self)().to_dict()
        return {
            name: value
            for name, value in self.to_dict().items()
            if value != default[name]
        }


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of autocast.

    Attributes:
        enabled: False turns it off inside ``accelerator.autocast``.
        cache_enabled: keep the casted weights within one autocast; None: torch's default.

    Example:
        >>> AutocastKwargs(cache_enabled=False).to_kwargs()
        {'cache_enabled': False}
    """

    enabled: bool = True
    cache_enabled: bool | None = None


class DDPCommunicationHookType(str, Enum):
    """Communication hooks of DDP, with Accelerate's names; the plain strings work too.

    Example:
        >>> DDPCommunicationHookType.POWER_SGD == "power_sgd"
        True
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


# The words of `DDPStrategy`; NO has no entry, and means no hook.
_HOOKS: Final = {
    DDPCommunicationHookType.FP16: "fp16",
    DDPCommunicationHookType.BF16: "bf16",
    DDPCommunicationHookType.POWER_SGD: "powersgd",
    DDPCommunicationHookType.BATCHED_POWER_SGD: "batched_powersgd",
}


def _hook_type(hook: str | Enum) -> DDPCommunicationHookType:
    # Lightning spells it without the underscore.
    text = word_of(hook).lower().replace("powersgd", "power_sgd")
    try:
        return DDPCommunicationHookType(text)
    except ValueError:
        names = [member.value for member in DDPCommunicationHookType]
        fix = did_you_mean(text, names)
        # `from None`: the ValueError of the enum would show its class and not what to write.
        raise ConfigurationError(
            "unknown communication hook", found=repr(hook), fix=fix
        ) from None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel``.

    Attributes:
        dim: accepted without effect: each process has its own batch, and nothing is scattered.
        broadcast_buffers: copy rank 0's buffers to all ranks at each synchronization.
        bucket_cap_mb: the size of a bucket of gradients, in MiB.
        find_unused_parameters: support steps that do not use every parameter.
        check_reduction: accepted without effect, as in torch.
        gradient_as_bucket_view: keep gradients inside the communication buckets: less memory, no copy.
        static_graph: the autograd graph never changes, which allows more overlap.
        comm_hook: a `DDPCommunicationHookType`, or its string.
        comm_wrapper: the same; "fp16" or "bf16" casts the gradients before ``comm_hook`` gets them.
        comm_state_option: arguments of torch's ``PowerSGDState``.

    Raises:
        ConfigurationError: a value of the wrong type, a bucket size that is not positive, or an unknown hook.

    Example:
        >>> DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="bf16").to_kwargs()
        {'find_unused_parameters': True}
        >>> DistributedDataParallelKwargs(comm_hook="bf16").exchange()["ddp_comm_hook"]
        'bf16'
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: str | Enum = "no"
    comm_wrapper: str | Enum = "no"
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "bucket_cap_mb")
        # For its errors: a wrong hook is refused here, not when the strategy starts on every rank.
        self.exchange()

    def to_dict(self) -> Keywords:
        """Torch's own options, copied."""
        return {
            name: value
            for name, value in super().to_dict().items()
            # DistributedDataParallel has no such arguments: hooks are registered after it is built.
            if not name.startswith("comm_")
        }

    def arguments(self) -> Keywords:
        """The arguments of `DDPStrategy`."""
        names = (
            "broadcast_buffers",
            "bucket_cap_mb",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
        )
        return {**{name: getattr(self, name) for name in names}, **self.exchange()}

    def exchange(self) -> Keywords:
        """The communication hook, as arguments of `DDPStrategy`."""
        hook = _HOOKS.get(_hook_type(self.comm_hook))
        wrapper = _HOOKS.get(_hook_type(self.comm_wrapper))
        # An empty dict is Accelerate's default, and no state.
        state = self.comm_state_option or None
        check_comm_hook(hook, state, wrapper)
        return {
            "ddp_comm_hook": hook,
            "ddp_comm_wrapper": wrapper,
            "ddp_comm_state": state,
        }


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler``, used with fp16.

    Attributes:
        init_scale: the first scale of the loss.
        growth_factor: multiplies the scale after ``growth_interval`` steps without an overflow.
        backoff_factor: multiplies the scale after a step that overflowed, which is skipped.
        growth_interval: steps without an overflow before the scale grows.
        enabled: False scales nothing.

    Raises:
        ConfigurationError: a value that cannot work.

    Example:
        >>> GradScalerKwargs(init_scale=1024.0, growth_interval=500).to_kwargs()
        {'init_scale': 1024.0, 'growth_interval': 500}
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # A factor of 0 or a scale that never shrinks would skip every step, without an error from torch.
        positive(self, "init_scale", "growth_interval", "backoff_factor")
        if not self.growth_factor > 1 or not self.backoff_factor < 1:
            raise ConfigurationError(
                "growth_factor must be above 1, and backoff_factor below 1",
                found=f"growth_factor={self.growth_factor}, backoff_factor={self.backoff_factor}",
                fix="use values such as growth_factor=2.0, backoff_factor=0.5",
            )


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of ``torch.distributed.init_process_group``.

    Attributes:
        backend: by default torch's choice for the device.
        init_method: "env://": the environment variables of the launcher give the address.
        timeout: the limit for one collective.

    Raises:
        ConfigurationError: another init method, or a timeout that is not a positive timedelta.

    Example:
        >>> InitProcessGroupKwargs(backend="gloo", timeout=timedelta(minutes=5)).to_kwargs()
        {'backend': 'gloo', 'timeout': datetime.timedelta(seconds=300)}
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout is not None:
            check_timeout(self.timeout, "InitProcessGroupKwargs")
        # The launcher's variables are read in many places; an address given here would contradict them.
        if self.init_method not in (None, "env://"):
            raise refused("init_method", f"init_method={self.init_method!r}")


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile``.

    Attributes:
        activities: "cpu", "cuda", "xpu", …; by default all that this machine has.
        schedule_option: arguments of ``torch.profiler.schedule``.
        on_trace_ready: called with the profiler when a trace is complete.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations.
        with_stack: record file and line of each operation.
        with_flops: estimate the floating-point operations of matmuls and convolutions.
        with_modules: record the module hierarchy of operations.
        output_trace_dir: where each process writes a Chrome trace.

    Raises:
        ConfigurationError: a value of the wrong type, an unknown activity, or a schedule that torch refuses.

    Example:
        >>> record = ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 3})
        >>> record.torch_activities()
        [<ProfilerActivity.CPU: 0>]
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., object] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # For their errors.
        self.torch_activities()
        self.torch_schedule()

    def torch_activities(self) -> list[ProfilerActivity] | None:
        """The activities as torch's profiler takes them; None for all that this machine has."""
        members = ProfilerActivity.__members__.items()
        activities = {name.lower(): member for name, member in members}
        for name in self.activities or ():
            if name.lower() not in activities:
                raise ConfigurationError(
                    "unknown profiler activity",
                    found=f"activities={self.activities!r}",
                    fix=f"{did_you_mean(name.lower(), activities)}; known: {', '.join(activities)}",
                )
        # None for an empty list: torch's profiler ends in an AssertionError ("No valid profiler activities found")
        # there.
        return [activities[name.lower()] for name in self.activities or ()] or None

    def torch_schedule(self) -> Callable[[int], ProfilerAction] | None:
        """The schedule of the profiler; None to record every step."""
        if not self.schedule_option:
            return None
        try:
            return schedule(**self.schedule_option)
        # torch.profiler.schedule checks its numbers with assert.
        except (TypeError, AssertionError) as error:
            raise ConfigurationError(
                "invalid profiler schedule",
                found=f"schedule_option={dict(self.schedule_option)}: {error}",
                fix='write {"wait": 1, "warmup": 1, "active": 3}; "repeat" and "skip_first" are optional',
            ) from error


@dataclass
class DataLoaderConfiguration:
    """How data are sharded over processes.

    Attributes:
        split_batches: the loader's batch size counts the samples of all processes together, not of each one.
        dispatch_batches: the main process reads the batches and sends each other process its part. This is the default
            for an ``IterableDataset``; with False every process reads all batches.
        even_batches: give every process the same number of samples, by filling up the last batch with samples from the
            start of the data.
        use_seedable_sampler: accepted without effect: the order is always a function of seed and epoch.
        data_seed: the seed of the order; by default the seed that the main process last gave to ``set_seed`` or
            ``torch.manual_seed`` before the loader is prepared.
        non_blocking: copy batches to an accelerator asynchronously.
        use_stateful_dataloader: accepted without effect: a saved state always has the positions of the loaders.

    Example:
        >>> DataLoaderConfiguration(split_batches=True, data_seed=7)
        DataLoaderConfiguration(split_batches=True, ..., data_seed=7, ...)
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class ProjectConfiguration:
    """Where a project writes.

    Attributes:
        project_dir: the directory.
        logging_dir: the directory of trackers; by default ``project_dir``.
        automatic_checkpoint_naming: `save_state` without a path writes ``checkpoints/checkpoint_<iteration>``.
        total_limit: how many of these checkpoints to keep.
        iteration: the number of the next checkpoint.
        save_on_each_node: accepted without effect: all machines share one storage.

    Example:
        >>> record = ProjectConfiguration("runs", automatic_checkpoint_naming=True, total_limit=2)
        >>> record.project_path, record.logging_path
        ('runs', 'runs')
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        positive(self, "total_limit")
        self.set_directories(self.project_dir)

    def set_directories(
        self, project_dir: str | os.PathLike[str] | None = None
    ) -> None:
        """Write to ``project_dir``.

        Args:
            project_dir: the directory of checkpoints, and of trackers if ``logging_dir`` was never set; None: no
                directory.
        """
        self.project_dir = project_dir
        # Only once, as in Accelerate: a later project_dir does not move the trackers.
        if self.logging_dir is None:
            self.logging_dir = project_dir

    @property
    def project_path(self) -> str | None:
        """``project_dir`` with ``~`` expanded."""
        if self.project_dir is None:
            return None
        # Expanded where it is read, so that the field keeps what the user wrote.
        return os.path.expanduser(self.project_dir)

    @property
    def logging_path(self) -> str | None:
        """``logging_dir`` with ``~`` expanded."""
        if self.logging_dir is None:
            return None
        return os.path.expanduser(self.logging_dir)


_FSDP1_OPTIONS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "fsdp_version": (("2",), "this is FSDP2; leave it out"),
    "backward_prefetch": (
        (),
        "FSDP2 gathers the next unit ahead by itself; leave it out",
    ),
    "forward_prefetch": (
        ("False",),
        "FSDP2 gathers the next unit ahead by itself; leave it out",
    ),
    "limit_all_gathers": (
        ("True",),
        "FSDP2 frees what it gathered without waiting for the host; leave it out",
    ),
    "use_orig_params": (
        ("True",),
        "parameters keep their names and objects; leave it out",
    ),
    "param_init_fn": (
        (),
        "modules on the meta device are initialized by their reset_parameters; define that",
    ),
    "sync_module_states": (
        ("True",),
        "all ranks start with rank 0's weights; load the same weights, or leave it out",
    ),
    "state_dict_config": (
        (),
        "save_state writes shards, save_model whole weights; leave it out",
    ),
    "optim_state_dict_config": (
        (),
        "save_state writes shards, and any strategy loads them; leave it out",
    ),
}
"""For each option without effect, the values that FSDP2 always uses, and what to do instead."""


@dataclass(kw_only=True)
class FullyShardedDataParallelPlugin:
    """Options of FSDP, for ``Accelerator(fsdp_plugin=...)``; the launcher's values are the defaults.

    FSDP2 does not need some options of FSDP1, which are accepted without effect. If one asks for a behavior that FSDP2
    does not have, a warning names it and its replacement.

    Attributes:
        fsdp_version: accepted without effect: this is FSDP2.
        sharding_strategy: "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2".
        reshard_after_forward: as in torch's ``fully_shard``; or a sharding strategy, as in FSDP version 1.
        mixed_precision_policy: torch's ``MixedPrecisionPolicy``.
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap", or a callable.
        cpu_offload: keep shards, gradients and optimizer states in host memory.
        ignored_modules: modules that are not sharded, or a regular expression of their names.
        transformer_cls_names_to_wrap: the classes of the FSDP units.
        min_num_params: the minimum size of a unit, for "size_based_wrap".
        activation_checkpointing: recompute the activations of the units in backward.
        activation_checkpointing_offload: keep the inputs of these units in host memory until backward.
        backward_prefetch: accepted without effect.
        forward_prefetch: accepted without effect.
        limit_all_gathers: accepted without effect.
        use_orig_params: accepted without effect: parameters keep their names and objects.
        param_init_fn: accepted without effect.
        sync_module_states: accepted without effect: all ranks start with rank 0's weights.
        cpu_ram_efficient_loading: accepted without effect.
        state_dict_type: accepted without effect: a checkpoint loads under any strategy.
        state_dict_config: accepted without effect.
        optim_state_dict_config: accepted without effect.

    Example:
        >>> plugin = FullyShardedDataParallelPlugin(
        ...     sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy="size_based_wrap", min_num_params=1_000_000)
        >>> plugin.arguments()
        {'sharding_strategy': 'SHARD_GRAD_OP', 'auto_wrap_policy': 1000000}
    """

    serves_alone: ClassVar[bool] = False
    """Whether a single process uses this record."""

    fsdp_version: int | None = None
    # `object`, where enums and records of torch's FSDP1 and their names are taken too; `arguments` reads both.
    sharding_strategy: object = None
    reshard_after_forward: object = None
    backward_prefetch: object = None
    mixed_precision_policy: object = None
    auto_wrap_policy: object = None
    cpu_offload: object = None
    ignored_modules: object = None
    state_dict_type: object = None
    state_dict_config: object = None
    optim_state_dict_config: object = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    param_init_fn: object = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None
    activation_checkpointing_offload: bool | None = None

    def __post_init__(self) -> None:
        # A warning and no error for the rest: scripts written for FSDP1 set these options and run well without them.
        check_fields(self)
        for name, (accepted, reason) in _FSDP1_OPTIONS.items():
            value = getattr(self, name)
            # As text, because a launcher's values are texts and torch's are enums.
            if value is not None and str(value) not in accepted:
                warnings.warn(
                    f"FullyShardedDataParallelPlugin({name}={value!r}) has no effect: {reason}",
                    stacklevel=3,
                )

    def make_strategy(self, **options: object) -> Strategy:
        """Create the `FSDPStrategy` of these options.

        Args:
            options: further arguments of the strategy, such as ``device``.
        """
        strategy: Strategy = STRATEGIES.get("fsdp")(**self.arguments(), **options)
        return strategy

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Accepted: the units of a model are found when it is prepared.

        Args:
            model: not used.
        """

    def arguments(self) -> Keywords:
        """The arguments of `FSDPStrategy`."""
        engine = variable("distributed_type")
        launched = engine is not None and engine.value == "FSDP"
        settings: dict[str, str] = {}
        for name in FSDP_KEYS:
            setting = variable(name)
            # The variables count only if the launcher has chosen FSDP.
            if launched and setting is not None:
                settings[name] = str(setting.value)
        arguments: Keywords = fsdp_from_launcher(settings)
        if self.cpu_offload is not None:
            arguments["cpu_offload"] = bool(self.cpu_offload)
        sharding = self.sharding_strategy
        # FSDP1's plugin of Accelerate takes a sharding strategy under this name; FSDP2's takes a switch or a size.
        if not isinstance(self.reshard_after_forward, (bool, int, type(None))):
            sharding = self.reshard_after_forward
        elif self.reshard_after_forward is not None:
            arguments["reshard_after_forward"] = self.reshard_after_forward
        if sharding is not None:
            # An enum of FSDP1 has the name; the text of a member would be "ShardingStrategy.FULL_SHARD".
            arguments["sharding_strategy"] = str(getattr(sharding, "name", sharding))
        if self.activation_checkpointing is not None:
            arguments["activation_checkpointing_policy"] = bool(
                self.activation_checkpointing
            )
        if self.activation_checkpointing_offload is not None:
            arguments["offload_activations"] = self.activation_checkpointing_offload
        if self.mixed_precision_policy is not None:
            arguments["mixed_precision"] = self.mixed_precision_policy
        if self.ignored_modules is not None:
            arguments["ignored_modules"] = self.ignored_modules
        policy = self.auto_wrap_policy
        # An explicit policy has priority over the classes, which the launcher may have set for another script.
        policy_name = str(policy).lower()
        if callable(policy):
            arguments["auto_wrap_policy"] = policy
        elif policy_name == "no_wrap":
            # No classes: the model is one unit.
            arguments["auto_wrap_policy"] = []
        elif policy_name == "size_based_wrap":
            # torch's own default of size_based_auto_wrap_policy.
            arguments["auto_wrap_policy"] = self.min_num_params or 100_000_000
        elif self.transformer_cls_names_to_wrap:
            arguments["auto_wrap_policy"] = list(self.transformer_cls_names_to_wrap)
        return arguments


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation.

    Attributes:
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: let schedulers count the calls inside a window.
        sync_with_dataloader: end a window at the last batch of a loader.
        sync_each_batch: synchronize gradients after each batch: more traffic, less memory.
        fixed_divisor: divide each loss by ``num_steps`` and correct nothing, as Accelerate does: for losses that the
            script multiplies by ``num_steps`` and divides by the tokens of the whole window. False: the gradient is
            the mean over the samples of the window.

    Example:
        >>> GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False).to_kwargs()
        {'num_steps': 4, 'sync_with_dataloader': False}
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    fixed_divisor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        micro_batches(self.num_steps, "GradientAccumulationPlugin(num_steps=...)")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of ``torch.compile``.

    Attributes:
        backend: torch's name of a backend; ``"no"`` does not compile.
        mode: as in ``torch.compile``, such as ``"reduce-overhead"``.
        fullgraph: raise where the graph breaks.
        dynamic: compile for changing shapes; None: torch decides.
        options: options of the backend.
        disable: do nothing.
        use_regional_compilation: compile each repeated block once, instead of the whole model.

    Example:
        >>> TorchDynamoPlugin(backend="INDUCTOR", mode="reduce-overhead").to_kwargs()
        {'backend': 'inductor', 'mode': 'reduce-overhead'}
    """

    backend: str = "no"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def to_kwargs(self) -> Keywords:
        """The options of ``torch.compile`` that differ from the defaults."""
        options = super().to_kwargs()
        # torch.compile has no such argument.
        options.pop("use_regional_compilation", None)
        # Accelerate's enum has the names in capitals, torch looks them up in lower case.
        if "backend" in options:
            options["backend"] = self.backend.lower()
        return options


def micro_batches(steps: object, owner: str) -> int:
    """Check and return a number of micro-batches per optimizer step.

    Raises:
        ConfigurationError: unless it is an integer of at least 1.
    """
    # Integral, for numpy's integers from a sweep. A float is refused: 2.5 micro-batches cannot be counted.
    if not isinstance(steps, Integral) or steps < 1:
        raise ConfigurationError(
            "a step needs at least one micro-batch",
            found=f"{steps!r} for {owner}",
            fix="pass 1 or more",
        )
    return int(steps)


def check_kind(name: str, value: object, kind: type) -> None:
    """Check that an argument is an option record of this class.

    Args:
        name: the name of the argument.
        value: the value that the user gave.
        kind: the class of the record.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{name} takes a {kind.__name__}",
            found=f"{name}={value!r}",
            fix=f"pass {kind.__name__}(...)",
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the types of an `Accelerator`'s arguments; None passes.

    Args:
        arguments: the arguments by name.
    """
    # Here and not at the first use, which may be inside `prepare` after the processes have joined.
    for name, kind in _RECORDS.items():
        value = arguments[name]
        if value is not None:
            check_kind(name, value, kind)
            # A field may have been set after the record was made.
            check_fields(value)
    for name in _SWITCHES:
        value = arguments[name]
        if value not in (None, True, False):
            raise ConfigurationError(
                f"{name} is True or False", found=f"{name}={value!r}"
            )
    seed = arguments["seed"]
    # torch.manual_seed also takes negative numbers, numpy's generators do not.
    if not isinstance(seed, Integral | None) or (seed or 0) < 0:
        raise ConfigurationError("seed must be an integer ≥ 0", found=f"seed={seed!r}")


_RECORDS: Final = {
    "dataloader_config": DataLoaderConfiguration,
    "project_config": ProjectConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "dynamo_plugin": TorchDynamoPlugin,
}
_SWITCHES: Final = (
    "device_placement",
    "split_batches",
    "cpu",
    "step_scheduler_with_optimizer",
    "scheduler_steps_per_process",
    "debug",
)


def by_kind(handlers: object) -> dict[type, Any]:
    """The handlers in a list, by class.

    Raises:
        ConfigurationError: an entry is not a handler, or a class occurs twice.
    """
    by_class: dict[type, Any] = {}
    for handler in as_list(handlers, KwargsHandler):
        if not isinstance(handler, KwargsHandler):
            description = type(handler).__name__
            # The class itself, without its parentheses.
            if isinstance(handler, type):
                description = repr(handler)
            raise ConfigurationError(
                "expected a kwargs handler",
                found=description,
                fix="pass DistributedDataParallelKwargs(...)",
            )
        # A field may have been set after the record was made.
        handler.__post_init__()
        # As in Accelerate, where the second one of a class would replace the first.
        if type(handler) in by_class:
            raise ConfigurationError(
                "two kwargs handlers have the same class", found=type(handler).__name__
            )
        by_class[type(handler)] = handler
    return by_class
