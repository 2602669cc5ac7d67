"""The state of modules and optimizers, for every strategy that leaves them as torch has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.precision.optimizers import from_parts, to_parts, why_not_divided

__all__ = [
    "Moved",
    "load_module_parts",
    "load_optimizer_state",
    "optimizer_parts",
    "optimizer_state",
    "parameters_of",
    "part_of",
    "refuse_whole",
]


def optimizer_state(
    optimizer: Optimizer,
) -> tuple[list[list[nn.Parameter]], Mapping[nn.Parameter, Mapping[str, Any]]]:
    """The parameters of each group, and the state of each parameter that has any."""
    states: Mapping[Any, Mapping[str, Any]] = {p: to_parts(state) for p, state in optimizer.state.items()}
    return [list(group["params"]) for group in optimizer.param_groups], states


def load_optimizer_state(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], state: Mapping[nn.Parameter, Mapping[str, Any]]
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
        numbered.update({i: given[p] for i, p in zip(numbers, group["params"], strict=True) if p in given})
        packed.append({**options, "params": list(numbers)})
        index = numbers.stop
    optimizer.load_state_dict({"state": numbered, "param_groups": packed})
    for parameter, own in given.items():
        kept = optimizer.state.get(parameter, {})
        kept.update({name: _in_dtype_of(value, kept[name]) for name, value in own.items() if name in kept})


def _in_dtype_of(given: Any, loaded: Any) -> Any:
    """What was loaded; a tensor that was cast, as it was given."""
    if isinstance(given, Tensor) and isinstance(loaded, Tensor):
        return loaded if given.dtype == loaded.dtype else given.detach().to(loaded.device, copy=True)
    if isinstance(given, Mapping) and isinstance(loaded, dict):
        return {key: _in_dtype_of(given[key], value) if key in given else value for key, value in loaded.items()}
    if isinstance(given, (list, tuple)) and type(given) is type(loaded) and len(given) == len(loaded):
        return type(loaded)(map(_in_dtype_of, given, loaded))
    return loaded


def parameters_of(module: nn.Module) -> dict[str, Callable[[], nn.Parameter | None]]:
    """A module's parameters by name, for `Moved.note`; they live no longer for it."""

    def refer(parameter: nn.Parameter) -> Callable[[], nn.Parameter | None]:
        if type(parameter.data) is Tensor:
            return weakref.ref(parameter)
        return lambda: parameter  # torch refuses to convert others while they are referred to weakly

    return {name: refer(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}


@final
class Moved:
    """Which parameters a module has in place of those that it had before it was divided."""

    def __init__(self) -> None:
        # By identity, and only as long as the one before lives: its number is another's afterwards. What it became is
        # found by its name: torch refuses to convert parameters that are referred to weakly.
        self._now: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Module], str]] = {}

    def note(self, before: Mapping[str, Callable[[], nn.Parameter | None]], module: nn.Module) -> None:
        """Compare a module's parameters, by name, with what `parameters_of` has returned ``before``."""
        self._now = {key: known for key, known in self._now.items() if None not in (known[0](), known[1]())}
        for name, now in module.named_parameters():
            if (was := before[name]()) is not None and now is not was:
                self._now[id(was)] = (weakref.ref(was), weakref.ref(module), name)

    def follow(self, optimizer: Optimizer) -> None:
        """Point an optimizer's groups at what became of its parameters.

        Raises:
            StrategyError: it has stepped them already, or does not work with parts.
        """
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                before, owner, name = self._now.get(id(parameter), (None, None, ""))
                module = None if owner is None else owner()
                if module is None or before is None or before() is not parameter:
                    continue
                if parameter in optimizer.state:
                    fix = "make the optimizer before its first step, or after prepare()"
                    raise StrategyError("an optimizer has stepped parameters that were divided since", fix=fix)
                group["params"][index] = module.get_parameter(name)
        divided = any(hasattr(p, "placements") for group in optimizer.param_groups for p in group["params"])
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
        raise StrategyError(f"{type(optimizer).__name__} cannot have divided parameters", found=reason, fix=fix)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of ``like``; nobody is asked.

    Args:
        whole: the same on every rank.
        like: a ``DTensor`` says how it is divided; for anything else it stays whole, as it does in another shape.
    """
    divided: Any = like
    placements = getattr(like, "placements", None)
    if placements is None or whole.shape != like.shape or hasattr(whole, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.detach(), divided.device_mesh, placements, src_data_rank=None)


def load_module_parts(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """``load_state_dict`` of whole tensors or parts into a module whose parameters are divided."""
    state, own = dict(state), module.state_dict()
    for name, layer in module.named_modules():
        if hasattr(layer, "take_floats"):  # what a layer quantises has its own shape, which is then divided
            layer.take_floats(state, f"{name}." if name else "")
    parts = {name: part_of(value, own[name]) if name in own else value for name, value in state.items()}
    module.load_state_dict(parts, strict=strict)


def optimizer_parts(state: Mapping[nn.Parameter, Mapping[str, Any]]) -> dict[nn.Parameter, dict[str, Any]]:
    """What is as large as its parameter divided as that is."""
    return {
        parameter: {
            name: part_of(value, parameter) if isinstance(value, Tensor) else value for name, value in own.items()
        }
        for parameter, own in state.items()
    }
