"""The state of modules and optimizers, whole or divided over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.state_names import (
    load_module_weights,
    plain_state,
    state_name,
    without_wrappers,
)
from trainer_kit.precision.converted import QuantizedLayer
from trainer_kit.precision.optimizers import from_parts, to_parts, why_not_divided

__all__ = [
    "GroupOptions",
    "Moved",
    "Piece",
    "States",
    "load_module_parts",
    "load_optimizer_state",
    "optimizer_parts",
    "optimizer_state",
    "parameters_of",
    "part_of",
    "refuse_unprepared",
    "refuse_whole",
    "step_by_kind",
    "unkept",
    "whole_of",
]


States: TypeAlias = Mapping[nn.Parameter, Mapping[str, Any]]
"""The optimizer state of each parameter, by its names in the optimizer."""
GroupOptions: TypeAlias = Sequence[Mapping[str, Any]]
"""The options of each parameter group of an optimizer."""


def optimizer_state(optimizer: Optimizer) -> tuple[list[list[nn.Parameter]], States]:
    """The parameters of each group, and the state of each parameter that has any."""
    states: dict[Any, Mapping[str, Any]] = {
        p: to_parts(state) for p, state in optimizer.state.items()
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
    given = {parameter: from_parts(own) for parameter, own in state.items()}
    numbered: dict[int, Any] = {}
    packed, index = [], 0
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        numbers = range(index, index + len(group["params"]))
        numbered.update(
            {
                i: given[p]
                for i, p in zip(numbers, group["params"], strict=True)
                if p in given
            }
        )
        packed.append({**options, "params": list(numbers)})
        index = numbers.stop
    optimizer.load_state_dict({"state": numbered, "param_groups": packed})
    for parameter, own in given.items():
        kept = optimizer.state.get(parameter, {})
        kept.update(
            {
                name: _in_dtype_of(value, kept[name])
                for name, value in own.items()
                if name in kept
            }
        )


def _in_dtype_of(given: Any, loaded: Any) -> Any:
    """Return the loaded value; a tensor that ``load_state_dict`` has cast keeps the given dtype."""
    if isinstance(given, Tensor) and isinstance(loaded, Tensor):
        return (
            loaded
            if given.dtype == loaded.dtype
            else given.detach().to(loaded.device, copy=True)
        )
    if isinstance(given, Mapping) and isinstance(loaded, dict):
        return {
            key: _in_dtype_of(given[key], value) if key in given else value
            for key, value in loaded.items()
        }
    if (
        isinstance(given, (list, tuple))
        and type(given) is type(loaded)
        and len(given) == len(loaded)
    ):
        return type(loaded)(map(_in_dtype_of, given, loaded))
    return loaded


def parameters_of(module: nn.Module) -> dict[str, Callable[[], nn.Parameter | None]]:
    """Return a module's parameters by name, for `Moved.note`, through weak references where torch allows them."""

    def refer(parameter: nn.Parameter) -> Callable[[], nn.Parameter | None]:
        if type(parameter.data) is Tensor:
            return weakref.ref(parameter)
        return lambda: (
            parameter
        )  # torch refuses to convert a subclass that has weak references

    return {
        name: refer(parameter)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


@final
class Moved:
    """Maps the parameters that a module had before sharding to its present ones."""

    def __init__(self) -> None:
        # By id, and only while the old parameter lives: ids are reused. The new parameter is found by its name: torch
        # refuses to convert parameters that have weak references.
        self._now: dict[
            int, tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Module], str]
        ] = {}

    def note(
        self, before: Mapping[str, Callable[[], nn.Parameter | None]], module: nn.Module
    ) -> None:
        """Compare a module's parameters, by name, with what `parameters_of` has returned ``before``."""
        self._now = {
            key: known
            for key, known in self._now.items()
            if None not in (known[0](), known[1]())
        }
        for name, now in module.named_parameters():
            if (was := before[name]()) is not None and now is not was:
                self._now[id(was)] = (weakref.ref(was), weakref.ref(module), name)

    def follow(self, optimizer: Optimizer) -> None:
        """Replace the parameters of an optimizer's groups by those that the module has now.

        Raises:
            StrategyError: the optimizer has stepped them already, or does not work with parts.
        """
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                before, owner, name = self._now.get(id(parameter), (None, None, ""))
                module = None if owner is None else owner()
                if module is None or before is None or before() is not parameter:
                    continue
                if parameter in optimizer.state:
                    fix = "make the optimizer before its first step, or after prepare()"
                    raise StrategyError(
                        "the optimizer was used before its parameters were sharded",
                        fix=fix,
                    )
                group["params"][index] = module.get_parameter(name)
        divided = any(
            hasattr(p, "placements")
            for group in optimizer.param_groups
            for p in group["params"]
        )
        if divided:
            refuse_whole(optimizer)


def refuse_whole(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs whole parameters.

    Raises:
        StrategyError: saying why it does.
    """
    reason = why_not_divided(optimizer)
    if reason is not None:
        fix = "train with DDP, or with an optimizer of torch"
        raise StrategyError(
            f"{type(optimizer).__name__} does not support sharded parameters",
            found=reason,
            fix=fix,
        )


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds of ``like``, without communication.

    Args:
        whole: the same on every rank.
        like: a ``DTensor`` says how it is divided; for anything else it stays whole, as it does in another shape.
    """
    divided: Any = like
    placements = getattr(like, "placements", None)
    if placements is None or whole.shape != like.shape or hasattr(whole, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        whole.detach(), divided.device_mesh, placements, src_data_rank=None
    )


def load_module_parts(
    module: nn.Module, state: Mapping[str, Any], strict: bool
) -> None:
    """``load_state_dict`` of whole tensors or parts into a module whose parameters are divided."""
    state, own = dict(without_wrappers(state)), plain_state(module)
    for name, layer in module.named_modules():
        if isinstance(layer, QuantizedLayer):
            layer.take_floats(state, state_name(f"{name}.") if name else "")
    parts = {
        name: part_of(value, own[name]) if name in own else value
        for name, value in state.items()
    }
    load_module_weights(module, parts, strict)


def optimizer_parts(state: States) -> dict[nn.Parameter, dict[str, Any]]:
    """Divide the state that has the shape of its parameter as the parameter is divided."""
    return {
        parameter: {
            name: part_of(value, parameter) if isinstance(value, Tensor) else value
            for name, value in own.items()
        }
        for parameter, own in state.items()
    }


@final
@dataclass(frozen=True)
class Piece:
    """Where this rank has its piece of a parameter.

    Attributes:
        master: what the optimizer steps.
        start: the first element in it.
        first: the first element in the parameter.
        count: how many; 0 where other ranks have all of it.
        divided: whether other ranks have other pieces.
    """

    master: Tensor
    start: int
    first: int
    count: int
    divided: bool = True

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of the master, or of a moment of it; a view."""
        return tensor.detach().view(-1).narrow(0, self.start, self.count)

    def in_whole(self, tensor: Tensor) -> Tensor:
        """The same elements of the whole parameter, or of a whole moment of it; a view where it is contiguous."""
        return tensor.detach().reshape(-1).narrow(0, self.first, self.count)


def whole_of(
    piece: Piece,
    shape: torch.Size,
    tensor: Tensor,
    keep: bool,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The pieces of all ranks as one tensor, on the CPU; zeros that take no memory where it is not kept.

    Args:
        piece: this rank's.
        shape: of the whole parameter.
        tensor: the master, or a moment of it.
        keep: whether this rank needs the values; every rank calls it.
        group: those that have the pieces; all ranks by default.
    """
    if not piece.divided:
        return (
            piece.of(tensor).view(shape).clone()
            if keep
            else unkept(shape, tensor.dtype)
        )
    whole = torch.zeros(
        shape.numel(), dtype=tensor.dtype, device=_exchange_device(tensor)
    )
    piece.in_whole(whole).copy_(piece.of(tensor))
    # As integers: one rank's bits and zeros add up to exactly these bits, the sign of a zero included.
    dist.all_reduce(
        whole.view(torch.int32 if whole.element_size() == 4 else torch.int16),
        group=group,
    )
    if not keep:
        return unkept(shape, tensor.dtype)
    return whole.view(shape).cpu()  # sync point: a checkpoint


def unkept(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape with the memory of one element: every rank shows the shapes of a state."""
    return torch.zeros((), dtype=dtype).expand(shape)


def _exchange_device(tensor: Tensor) -> torch.device:
    """Where collectives run: an offloaded master is on the host."""
    if tensor.device.type == "cpu" and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device


def step_by_kind(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step, or one call of it for each kind of parameter where torch refuses a single call.

    An optimizer with ``foreach`` or ``fused`` handles many parameters in one call, which torch has for those of one
    mesh only. Such optimizers treat each parameter separately, so several calls equal one.

    Args:
        optimizer: with its parameters as they are by now.
        step: how it is stepped.
    """
    # With None torch chooses: foreach on an accelerator.
    if all(
        group.get(way, False) is False
        for group in optimizer.param_groups
        for way in ("foreach", "fused")
    ):
        return step
    if len(_kinds(optimizer)) < 2:
        return step

    def each(*arguments: Any, **options: Any) -> Any:
        whole = [group["params"] for group in optimizer.param_groups]
        result = None
        try:
            for kind in _kinds(optimizer).values():  # in each step: groups may be added
                for group, parameters in zip(
                    optimizer.param_groups, whole, strict=True
                ):
                    group["params"] = [p for p in parameters if p in kind]
                result = step(*arguments, **options)
        finally:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters
        return result

    return each


def refuse_unprepared(
    optimizer: Optimizer,
    step: Callable[..., Any],
    prepared: Callable[[], Iterable[nn.Parameter]],
    engine: str,
) -> Callable[..., Any]:
    """Return the step, which first refuses trained parameters that the engine does not synchronize.

    The parameters are compared in the first step, and again when their number has changed.

    Args:
        optimizer: groups may be added to it.
        step: how it is stepped.
        prepared: returns the parameters whose gradients the engine synchronizes.
        engine: its name in the message.
    """
    checked = 0

    def run(*arguments: Any, **options: Any) -> Any:
        nonlocal checked
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        if count != checked:
            _compare(optimizer, set(prepared()), engine)
            checked = count
        return step(*arguments, **options)

    return run


def _compare(optimizer: Optimizer, prepared: set[nn.Parameter], engine: str) -> None:
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    others = [p for p in parameters if p not in prepared and p.requires_grad]
    if others:
        raise StrategyError(
            f"an optimizer steps parameters that were not prepared for {engine}: each rank would train its own",
            found=f"{len(others)} of the {len(parameters)} parameters of {type(optimizer).__name__}, the first of"
            f" shape {list(others[0].shape)}",
            fix="create the layer before the model is prepared, as a part of it; or prepare the module that has it too",
        )


def _kinds(optimizer: Optimizer) -> dict[Any, set[nn.Parameter]]:
    kinds: dict[Any, set[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kinds.setdefault(getattr(parameter, "device_mesh", None), set()).add(
                parameter
            )
    return kinds
