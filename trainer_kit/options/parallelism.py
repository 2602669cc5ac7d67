"""Option records of Accelerate that describe a device mesh: the size of each axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

from trainer_kit.core.arguments import check_fields
from trainer_kit.core.configuration_sources import variable
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.core.types import Keywords
from trainer_kit.options.records import FullyShardedDataParallelPlugin
from trainer_kit.options.refusals import refused
from trainer_kit.strategies.mesh_layout import AXES
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    Attributes:
        enable_async_tp: accepted without effect: matmuls and communication do not overlap.

    Example:
        >>> config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(enable_async_tp=True))
        >>> config.tp_enabled
        True
    """

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism.

    Attributes:
        cp_comm_strategy: "allgather" or "alltoall", accepted without effect: where the axis size divides the number of
            heads, an all-to-all exchanges tokens for heads; elsewhere keys and values are gathered.

    Example:
        >>> config = ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig("alltoall"))
        >>> config.cp_enabled
        True
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        launched = _read_variable("cp_comm_strategy")
        strategy = self.cp_comm_strategy or launched or "allgather"
        if strategy not in ("allgather", "alltoall"):
            raise ConfigurationError(
                "unknown communication strategy for context parallelism",
                found=f"cp_comm_strategy={strategy!r}",
                fix='use "allgather" or "alltoall"',
            )
        self.cp_comm_strategy = strategy


@dataclass
class ParallelismConfig:
    """The size of each axis of the device mesh, for ``Accelerator(parallelism_config=...)``.

    The product of the sizes is the number of processes. A size defaults to the launcher's, then to 1; one size may be
    -1, and takes the processes that the others leave.

    Attributes:
        dp_replicate_size: replicas of all the axes below; their gradients are averaged.
        dp_shard_size: the ranks that shard parameters, gradients and optimizer states (FSDP).
        tp_size: the ranks that split each layer (tensor parallelism).
        cp_size: the ranks that split each sequence, inside `Accelerator.maybe_context_parallel`.
        pp_size: pipeline stages; `prepare` refuses more than 1, because a schedule needs the whole accumulation windows
            that only a Trainer has.
        cp_backend: "torch".
        sp_size: DeepSpeed's sequence parallelism, which is refused; use ``cp_size``.
        sp_backend: "deepspeed".
        tp_handler: accepted without effect.
        cp_handler: accepted without effect.
        sp_handler: accepted without effect.
        plan: how to split the model, in place of its ``configure_parallel`` or of a Hugging Face model's own plan.

    Example:
        >>> ParallelismConfig(dp_shard_size=2, tp_size=2).total_size
        4
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: object = None
    plan: ParallelPlan | None = None
    pp_size: int | None = None

    def __post_init__(self) -> None:
        # Before the types are checked: sizes of the launcher are texts.
        # "sp" is no axis of the mesh, but its size is read too: the launcher's must be refused and not ignored.
        for axis in (*AXES, "sp"):
            name = f"{axis}_size"
            size = getattr(self, name)
            size = _size(name, size)
            setattr(self, name, size)
        check_fields(self)
        if self.sp_size != 1:
            raise refused("sp_size", f"sp_size={self.sp_size}")
        launched = _read_variable("cp_backend")
        # The script's value first, then the launcher's, as for every other option.
        self.cp_backend = self.cp_backend or launched or "torch"
        if self.cp_backend != "torch":
            raise refused("cp_backend", repr(self.cp_backend))
        if self.tp_size != 1 and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_size != 1 and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def total_size(self) -> int:
        """The product of all sizes; -1 counts as 1."""
        # At most one size is -1, so that the sign is all that it changes.
        return abs(math.prod(self.sizes.values()))

    @property
    def data_parallel_size(self) -> int:
        """The number of processes that get different batches."""
        return abs(self.sizes["dp_replicate"] * self.sizes["dp_shard"])

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that get the same batch."""
        return abs(self.sizes["tp"] * self.sizes["cp"] * self.sizes["pp"])

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the model is replicated."""
        return self.dp_replicate_size != 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded."""
        return self.dp_shard_size != 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split (tensor parallelism)."""
        return self.tp_size != 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split (context parallelism)."""
        return self.cp_size != 1

    @property
    def sp_enabled(self) -> bool:
        """Always False."""
        return False

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes with a size other than 1."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_dim_names(self) -> list[str]:
        """The active axes along which batches differ."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The active axes along which batches are the same."""
        return self._active("tp", "cp", "pp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The active axes along which FSDP shards parameters."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The active axes over which losses are averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self.sizes[axis] != 1]

    def make_strategy(
        self, fsdp: FullyShardedDataParallelPlugin | None = None, **options: object
    ) -> Strategy:
        """Create the mesh strategy.

        Args:
            fsdp: options for sharding parameters along the data and context axes.
            options: further arguments of the strategy.
        """
        fsdp_options: Keywords = {}
        if fsdp is not None:
            fsdp_options = fsdp.arguments()
        # The mesh recomputes activations on every axis, with FSDP or without.
        recomputes = fsdp_options.pop("activation_checkpointing_policy", False)
        shards = any(
            self.sizes[axis] != 1 for axis in ("dp_replicate", "dp_shard", "cp")
        )
        # The FSDP options that change what a step computes or stores; `reshard_after_forward` and wrapping without FSDP
        # change nothing.
        # Without an axis that shards there is no FSDP, and the options would have no effect.
        for name in (
            "offload_activations",
            "cpu_offload",
            "mixed_precision",
            "ignored_modules",
        ):
            if fsdp_options.get(name) and not shards:
                raise refused(name, f"tp_size={self.tp_size} alone")
        fsdp_of_mesh = None
        if shards:
            fsdp_of_mesh = fsdp_options
        strategy: Strategy = STRATEGIES.get("mesh")(
            **self.sizes,
            plan=self.plan,
            activation_checkpointing_policy=recomputes,
            fsdp=fsdp_of_mesh,
            **options,
        )
        return strategy


@dataclass
class TorchTensorParallelPlugin:
    """Options of tensor parallelism alone, for ``Accelerator(torch_tp_plugin=...)``; other processes are replicas.

    Attributes:
        tp_size: the number of ranks that split each layer.
        torch_device_mesh: refused: the Accelerator creates the mesh.
        plan: as in `ParallelismConfig`.

    Example:
        >>> TorchTensorParallelPlugin(tp_size=2).as_config().active_mesh_dims
        ['dp_replicate', 'tp']
    """

    tp_size: int = 1
    torch_device_mesh: object = None
    plan: ParallelPlan | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.torch_device_mesh is not None:
            raise refused("torch_device_mesh", "torch_device_mesh=...")

    def as_config(self) -> ParallelismConfig:
        """The equivalent `ParallelismConfig`."""
        # dp_replicate=-1: the processes that the tensor axis leaves are replicas.
        return ParallelismConfig(-1, 1, self.tp_size, 1, plan=self.plan)


def _read_variable(name: str) -> str | None:
    setting = variable(f"parallelism_config_{name}")
    if setting is None:
        return None
    return str(setting.value)


def _size(name: str, argument: int | None) -> int:
    text: object = argument
    if argument is None:
        text = _read_variable(name) or 1
    # What is no whole number becomes 0, which is refused below together with the value that was passed.
    size = 0
    try:
        # A float would be rounded down by int() without a word.
        if isinstance(text, (Integral, str)):
            size = int(text)
    except ValueError:
        pass
    if size < 1 and size != -1:
        raise ConfigurationError(
            "a mesh axis needs at least 1 rank",
            found=f"{name}={text!r}",
            fix="pass 1 or more, or -1",
        )
    return size
