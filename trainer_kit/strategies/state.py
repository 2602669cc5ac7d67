"""The state of modules and optimizers, whole or sharded over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.state_names import (
    load_module_weights,
    plain_state,
    state_name,
    without_wrappers,
)
from trainer_kit.core.types import Keywords, SavedState, StateDict
from trainer_kit.precision.converted import QuantizedLayer
from trainer_kit.precision.optimizers import (
    NEED_WHOLE_ROWS,
    from_plain_tensors,
    to_plain_tensors,
    why_not_shardable,
)
from trainer_kit.strategies.signatures import StepMethod

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "FlatShard",
    "GroupOptions",
    "ReplacedParameters",
    "States",
    "gather_flat",
    "load_module_parts",
    "load_optimizer_state",
    "optimizer_state",
    "placeholder_tensor",
    "refer_to_parameters",
    "refuse_unprepared",
    "refuse_unshardable",
    "shard_like",
    "shard_optimizer_state",
    "step_by_kind",
]


States: TypeAlias = Mapping[nn.Parameter, SavedState]
"""The optimizer state of each parameter, by its names in the optimizer."""
GroupOptions: TypeAlias = Sequence[Mapping[str, Any]]
"""The options of each parameter group of an optimizer."""


def optimizer_state(optimizer: Optimizer) -> tuple[list[list[nn.Parameter]], States]:
    """The parameters of each group, and the state of each parameter that has any."""
    states: dict[Any, SavedState] = {
        parameter: to_plain_tensors(state)
        for parameter, state in optimizer.state.items()
    }
    return [list(group["params"]) for group in optimizer.param_groups], states


def load_optimizer_state(
    optimizer: Optimizer, groups: GroupOptions, state: States
) -> None:
    """Put the options of each group and the state of each parameter back, in the dtypes that are given.

    Args:
        optimizer: through its own ``load_state_dict``; torch's moves state to the parameter's device, and would cast it
            to the parameter's dtype.
        groups: the options of each of its groups.
        state: of its parameters; one that is missing has none.
    """
    # A state dict of torch has parameters by their number over all groups.
    saved_states = {
        parameter: from_plain_tensors(values) for parameter, values in state.items()
    }
    state_by_number: dict[int, SavedState] = {}
    packed_groups: list[Keywords] = []
    number = 0
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        first = number
        for parameter in group["params"]:
            if parameter in saved_states:
                state_by_number[number] = saved_states[parameter]
            number += 1
        packed_groups.append({**options, "params": list(range(first, number))})
    # Through the optimizer's own method, which some override, and which also converts options.
    optimizer.load_state_dict({"state": state_by_number, "param_groups": packed_groups})
    for parameter, saved in saved_states.items():
        loaded = optimizer.state.get(parameter, {})
        for name, value in saved.items():
            if name in loaded:
                loaded[name] = _with_saved_dtype(value, loaded[name])


def _with_saved_dtype(saved: Any, loaded: Any) -> Any:
    """Return the loaded value; a tensor that ``load_state_dict`` has cast gets the saved dtype again."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        if saved.dtype == loaded.dtype:
            return loaded
        # torch casts floating-point state to the dtype of its parameter. A copy, because `saved` may be loaded again.
        return saved.detach().to(loaded.device, copy=True)
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        restored = dict(loaded)
        for key in loaded.keys() & saved.keys():
            restored[key] = _with_saved_dtype(saved[key], loaded[key])
        return restored
    is_sequence = isinstance(saved, (list, tuple)) and type(saved) is type(loaded)
    if is_sequence and len(saved) == len(loaded):
        return type(loaded)(map(_with_saved_dtype, saved, loaded))
    return loaded


def refer_to_parameters(
    module: nn.Module,
) -> dict[str, Callable[[], nn.Parameter | None]]:
    """Return references to a module's parameters by name, for `ReplacedParameters.record`; weak if torch allows."""

    def refer(parameter: nn.Parameter) -> Callable[[], nn.Parameter | None]:
        if type(parameter.data) is Tensor:
            return weakref.ref(parameter)
        # torch refuses to convert a subclass that has weak references.
        return lambda: parameter

    named = module.named_parameters(remove_duplicate=False)
    return {name: refer(parameter) for name, parameter in named}


@final
class ReplacedParameters:
    """Maps the parameters that a module had before sharding to its present ones."""

    def __init__(self) -> None:
        # By id, and only while the old parameter lives: ids are reused. The new parameter is found by its name: torch
        # refuses to convert parameters that have weak references.
        self._replacements: dict[int, _Replacement] = {}

    def record(
        self, before: Mapping[str, Callable[[], nn.Parameter | None]], module: nn.Module
    ) -> None:
        """Compare a module's parameters, by name, with what `refer_to_parameters` returned ``before``."""
        self._replacements = {
            key: replacement
            for key, replacement in self._replacements.items()
            if replacement.is_alive
        }
        for name, parameter in module.named_parameters():
            original = before[name]()
            if original is not None and parameter is not original:
                self._replacements[id(original)] = _Replacement(
                    weakref.ref(original), weakref.ref(module), name
                )

    def replace_in(self, optimizer: Optimizer) -> None:
        """Replace the parameters of an optimizer's groups by those that the module has now.

        Raises:
            StrategyError: the optimizer has stepped them already, or does not support sharded parameters.
        """
        is_sharded = False
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                replacement = self._find(parameter)
                if replacement is not None and parameter in optimizer.state:
                    raise StrategyError(
                        "the optimizer was used before its parameters were sharded",
                        fix="make the optimizer before its first step, or after prepare()",
                    )
                if replacement is not None:
                    group["params"][index] = replacement
                is_sharded = is_sharded or hasattr(group["params"][index], "placements")
        if is_sharded:
            refuse_unshardable(optimizer)

    def _find(self, original: nn.Parameter) -> nn.Parameter | None:
        """The parameter that has replaced ``original``; None if none has."""
        replacement = self._replacements.get(id(original))
        if replacement is None or replacement.original() is not original:
            return None
        module = replacement.module()
        return None if module is None else module.get_parameter(replacement.name)


@final
@dataclass(frozen=True)
class _Replacement:
    """A parameter before sharding, and the name under which its module has the shard."""

    original: weakref.ref[nn.Parameter]
    module: weakref.ref[nn.Module]
    name: str

    @property
    def is_alive(self) -> bool:
        return self.original() is not None and self.module() is not None


def refuse_unshardable(
    optimizer: Optimizer, refused_names: Collection[str] = NEED_WHOLE_ROWS
) -> None:
    """Refuse an optimizer that needs full parameters.

    Args:
        optimizer: as it will be stepped.
        refused_names: see `why_not_shardable`.

    Raises:
        StrategyError: with the reason.
    """
    reason = why_not_shardable(optimizer, refused_names)
    if reason is not None:
        raise StrategyError(
            f"{type(optimizer).__name__} does not support sharded parameters",
            found=reason,
            fix="train with DDP, or with an optimizer that updates each element by itself, such as torch's AdamW",
        )


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor as ``like`` is sharded, without communication.

    Args:
        full: the same on every rank.
        like: a ``DTensor`` of the same shape; for any other tensor ``full`` itself is returned.
    """
    placements = getattr(like, "placements", None)
    if placements is None or hasattr(full, "placements") or full.shape != like.shape:
        return full
    # Imported here: one process without a mesh does not need it.
    from torch.distributed.tensor import distribute_tensor

    mesh = getattr(like, "device_mesh", None)
    return distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)


def load_module_parts(module: nn.Module, state: SavedState, strict: bool) -> None:
    """``load_state_dict`` of full tensors or shards into a module whose parameters are sharded."""
    # Tensors with other shapes stay as they are: torch reports them.
    loaded = dict(without_wrappers(state))
    present = plain_state(module)
    for name, layer in module.named_modules():
        if not isinstance(layer, QuantizedLayer):
            continue
        prefix = ""
        if name:
            prefix = state_name(f"{name}.")
        layer.take_floats(loaded, prefix)
    for name in loaded.keys() & present.keys():
        loaded[name] = shard_like(loaded[name], present[name])
    load_module_weights(module, loaded, strict)


def shard_optimizer_state(state: States) -> dict[nn.Parameter, StateDict]:
    """Shard each tensor that has the shape of its parameter as the parameter is sharded."""
    shards: dict[nn.Parameter, StateDict] = {}
    for parameter, values in state.items():
        shards[parameter] = dict(values)
        for name, value in values.items():
            if isinstance(value, Tensor):
                shards[parameter][name] = shard_like(value, parameter)
    return shards


@final
@dataclass(frozen=True)
class FlatShard:
    """The contiguous elements of a parameter that this rank optimizes.

    Attributes:
        master: the tensor that the optimizer steps.
        master_start: the index of the first of these elements in the flattened master.
        parameter_start: the index of the first of these elements in the flattened parameter.
        length: the number of elements; 0 if other ranks have the whole parameter.
        is_sharded: whether other ranks have other elements.
    """

    master: Tensor
    master_start: int
    parameter_start: int
    length: int
    is_sharded: bool = True

    def view_in_master(self, tensor: Tensor) -> Tensor:
        """These elements of the master, or of a moment of it; a view."""
        return tensor.detach().view(-1).narrow(0, self.master_start, self.length)

    def view_in_parameter(self, tensor: Tensor) -> Tensor:
        """These elements of the full parameter, or of a full moment of it; a view if the tensor is contiguous."""
        return tensor.detach().reshape(-1).narrow(0, self.parameter_start, self.length)


def gather_flat(
    shard: FlatShard,
    shape: torch.Size,
    tensor: Tensor,
    keep: bool,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Gather the shards of all ranks into one tensor on the CPU; without ``keep``, return a placeholder of its shape.

    Args:
        shard: this rank's elements.
        shape: the shape of the full parameter.
        tensor: the master, or a moment of it.
        keep: whether this rank needs the values; every rank makes the call.
        group: the ranks that have the shards; all ranks by default.
    """
    if not shard.is_sharded and keep:
        return shard.view_in_master(tensor).view(shape).clone()
    if shard.is_sharded:
        gathered = torch.zeros(
            shape.numel(), dtype=tensor.dtype, device=_exchange_device(tensor)
        )
        shard.view_in_parameter(gathered).copy_(shard.view_in_master(tensor))
        # As integers: one rank's bits and zeros add up to exactly these bits, the sign of a zero included.
        bits = torch.int32 if gathered.element_size() == 4 else torch.int16
        dist.all_reduce(gathered.view(bits), group=group)
        if keep:
            return gathered.view(shape).cpu()  # sync point: a checkpoint
    return placeholder_tensor(shape, tensor.dtype)


def placeholder_tensor(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape with the memory of one element: every rank shows the shapes of a state."""
    return torch.zeros((), dtype=dtype).expand(shape)


def _exchange_device(tensor: Tensor) -> torch.device:
    """The device of collectives: NCCL has none for an offloaded master, which is in host memory."""
    if tensor.device.type == "cpu" and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device


def step_by_kind(optimizer: Optimizer, step: StepMethod) -> StepMethod:
    """Return the step, or one call of it for each kind of parameter where torch refuses a single call.

    An optimizer with ``foreach`` or ``fused`` handles many parameters in one call, which torch has for those of one
    mesh only. Such optimizers treat each parameter separately, so several calls equal one.

    Args:
        optimizer: with its parameters as they are by now.
        step: how it is stepped.
    """
    # Most optimizers need neither, and are stepped without a call in between.
    if not any(_is_multi_tensor(group) for group in optimizer.param_groups):
        return step
    if len(_parameters_by_mesh(optimizer)) < 2:
        return step

    def step_each_kind(*arguments: object, **options: object) -> object:
        all_parameters = [group["params"] for group in optimizer.param_groups]
        result = None
        try:
            # Looked up in each step: groups may be added.
            for kind in _parameters_by_mesh(optimizer).values():
                for group, parameters in zip(
                    optimizer.param_groups, all_parameters, strict=True
                ):
                    group["params"] = [p for p in parameters if p in kind]
                result = step(*arguments, **options)
        finally:
            # Also after an error: the optimizer must not lose the parameters of the other kinds.
            for group, parameters in zip(
                optimizer.param_groups, all_parameters, strict=True
            ):
                group["params"] = parameters
        return result

    return step_each_kind


def _is_multi_tensor(group: SavedState) -> bool:
    """Whether torch may step all parameters of a group in one call; with None it does so on an accelerator."""
    return (
        group.get("foreach", False) is not False
        or group.get("fused", False) is not False
    )


def refuse_unprepared(
    optimizer: Optimizer,
    step: StepMethod,
    prepared: Callable[[], Iterable[nn.Parameter]],
    engine: str,
) -> StepMethod:
    """Return the step, which first refuses trained parameters that the engine does not synchronize.

    The parameters are compared in the first step, and again when their number has changed.

    Args:
        optimizer: groups may be added to it.
        step: how it is stepped.
        prepared: returns the parameters whose gradients the engine synchronizes.
        engine: its name in the message.
    """
    # The number of parameters that were compared: comparing all of them in each step would be slow.
    checked = 0

    def run(*arguments: object, **options: object) -> object:
        nonlocal checked
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        if count != checked:
            _check_prepared(optimizer, set(prepared()), engine)
            checked = count
        return step(*arguments, **options)

    return run


def _check_prepared(
    optimizer: Optimizer, prepared: set[nn.Parameter], engine: str
) -> None:
    count = 0
    unprepared: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        count += len(group["params"])
        unprepared += [
            p for p in group["params"] if p not in prepared and p.requires_grad
        ]
    if unprepared:
        raise StrategyError(
            f"an optimizer steps parameters that were not prepared for {engine}: each rank would train a separate copy",
            found=f"{len(unprepared)} of the {plural(count, 'parameter')} of {type(optimizer).__name__}, the first of"
            f" shape {list(unprepared[0].shape)}",
            fix="create the layer before the model is prepared, as a part of it; or prepare the module that has it too",
        )


def _parameters_by_mesh(
    optimizer: Optimizer,
) -> dict[DeviceMesh | None, set[nn.Parameter]]:
    """The optimizer's parameters by the mesh that shards them; under None those that are not sharded."""
    parameters: dict[DeviceMesh | None, set[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh = getattr(parameter, "device_mesh", None)
            parameters.setdefault(mesh, set()).add(parameter)
    return parameters
