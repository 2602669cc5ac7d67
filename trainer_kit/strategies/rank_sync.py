"""What ranks share before they train: initial weights, and the state of random generators."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.state_names import state_name
from trainer_kit.strategies.state import part_of

__all__ = [
    "InitialWeights",
    "agree_on_rng",
    "built_once",
    "compare_models",
    "digest",
    "empty",
    "with_equal_rng",
]


@contextmanager
def built_once(group: Group) -> Iterator[None]:
    """Inside, rank 0 builds modules in host memory, the others on the meta device; random streams stay equal."""
    before = torch.get_rng_state()
    with torch.device("cpu" if group.rank == 0 else "meta"):
        yield
    began, ended = group.broadcast((before, torch.get_rng_state()))
    if began is before or torch.equal(
        before, began
    ):  # the others drew nothing: their next numbers would differ
        torch.set_rng_state(ended)


@final
class InitialWeights:
    """The weights of a module before it is divided, and their broadcast after that.

    Args:
        module: as the user built it; on ranks other than the first its tensors may be on the meta device.
        group: every rank of it makes the same calls.
        given: an earlier fit has placed all weights.
        resets: tensors that rank 0 has without values are left to `reset`.

    Raises:
        StrategyError: the first rank has no values either, or the ranks built different models.
    """

    def __init__(
        self, module: nn.Module, group: Group, given: bool = False, resets: bool = False
    ) -> None:
        self._group = group
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._whole: dict[str, Tensor] = {}
        self._names: dict[str, list[str]] = {}
        if given:
            return
        found: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        for name, tensor in _tensors(module):
            if hasattr(tensor, "placements"):
                continue
            self._names.setdefault(first.setdefault(id(tensor), name), []).append(name)
            if first[id(tensor)] == name:
                found[name] = tensor.detach()
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}
        compare_models(
            {name: f"{list(shape)} {dtype}" for name, (shape, dtype) in shapes.items()},
            group,
        )
        empty = group.broadcast(
            [name for name, tensor in found.items() if tensor.is_meta]
        )
        self._shapes = {
            name: shape for name, shape in shapes.items() if name not in empty
        }
        self._whole = (
            {name: found[name] for name in self._shapes} if group.rank == 0 else {}
        )
        for name in empty:
            del self._names[name]
        if empty and not resets:
            raise StrategyError(
                "the initial weights have no values",
                found=f"{', '.join(empty[:3])} on the meta device on rank 0",
                fix='build layers in configure_model without torch.device("meta")',
            )

    def reset(self, module: nn.Module) -> None:
        """Take values for layers that have no storage and were made since: rank 0 calls their ``reset_parameters``.

        It does so on whole tensors, however the layers are divided, so that the values are those of one process.

        Raises:
            StrategyError: a layer has no such method, or known layers have other names.
        """
        known = (
            {name for names in self._names.values() for name in names}
            if self._shapes
            else set()
        )
        first: dict[int, str] = {}
        for name, tensor in _tensors(module):
            if tensor.is_meta and name not in known:
                self._names.setdefault(first.setdefault(id(tensor), name), []).append(
                    name
                )
                self._shapes[first[id(tensor)]] = (tensor.shape, tensor.dtype)
        if not first:
            return
        gone = sorted(known - {name for name, _ in _tensors(module)})
        if gone:
            raise StrategyError(
                "configure_model renames or replaces layers whose values exist only on rank 0",
                found=f"{gone[0]} before, {next(iter(first.values()))} now",
                fix="rename them in __init__, or create them without init_module(empty_init=True)",
            )
        layers = {
            name: part
            for name, part in module.named_modules()
            if {*map(id, _own(part))} & first.keys()
        }
        calls = [
            getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
            for part in layers.values()
        ]
        lacking = [
            name for name, call in zip(layers, calls, strict=True) if not callable(call)
        ]
        if lacking:
            raise StrategyError(
                "layers on the meta device cannot initialise their weights",
                found=f"{', '.join(lacking[:3])} without reset_parameters",
                fix="define reset_parameters(self), or create these layers in __init__",
            )
        with built_once(self._group):
            if self._group.rank == 0:
                self._whole.update(_reset(list(layers.values()), calls, first))

    def hand_out(
        self, module: nn.Module, device: torch.device, parameters_on: torch.device
    ) -> None:
        """Fill the divided module on every rank; each rank keeps only its own parts.

        Args:
            module: the same one.
            device: where it computes.
            parameters_on: where the parts of its parameters are kept; whole ones are where it computes.

        A second call does nothing.
        """
        shapes, self._shapes = self._shapes, {}
        if not shapes:
            return
        if any(tensor.is_meta for _, tensor in _tensors(module)):
            # Unlike to_empty(), keep what submodules such as metrics store outside of buffers: it is not broadcast.
            with _kept_tied(module):
                apply: Any = module._apply
                apply(
                    lambda tensor: (
                        torch.empty_like(tensor, device=parameters_on)
                        if tensor.is_meta
                        else tensor
                    )
                )
        for parameter in module.parameters():
            # Whole parameters move in place: optimizers hold them, and some are tied.
            if not hasattr(parameter, "placements") and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(device)
        if (
            dist.is_initialized() and dist.get_backend(self._group.group) == "fake"
        ):  # weights have no values
            self._whole = {}
            return
        held = dict(_tensors(module))
        with torch.no_grad():
            for name, (shape, dtype) in shapes.items():
                whole = self._whole.pop(name).to(device) if self._whole else None
                if whole is None:
                    whole = torch.empty(shape, dtype=dtype, device=device)
                self._group.broadcast(whole)
                # Under each of its names: a stage of a pipeline may have a later name only.
                for own in {
                    id(held[known]): held[known]
                    for known in self._names[name]
                    if known in held
                }.values():
                    own.detach().copy_(part_of(whole, own))


def compare_models(
    mine: Mapping[str, str],
    group: Group,
    problem: str = "the ranks built different models",
    fix: str = "build the same model on every rank, regardless of the rank and its data",
) -> None:
    """Refuse, on every rank, models that differ from rank to rank; a collective call.

    Args:
        mine: of this rank's model: by the name of a tensor or a part, what has to be equal.
        group: the ranks that are compared.
        problem: of the error.
        fix: of the error.

    Raises:
        StrategyError: on every rank; it names the first difference.
    """
    if len({row[0] for row in group.agree([zlib.crc32(repr(mine).encode())])}) == 1:
        return
    first, *others = group.all_gather_object(mine)
    rank, theirs = next(
        (rank, one) for rank, one in enumerate(others, 1) if one != first
    )
    name = next(
        name for name in {**first, **theirs} if first.get(name) != theirs.get(name)
    )
    raise StrategyError(
        problem,
        found=f"{name}: {first.get(name, 'nothing')} on rank 0, {theirs.get(name, 'nothing')} on rank {rank}",
        fix=fix,
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By name, which a wrapper of a part, such as a compiled one, does not change."""
    for name, tensor in chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        yield state_name(name), tensor


def _own(part: nn.Module) -> list[Tensor]:
    return [
        tensor
        for tensor in (*part._parameters.values(), *part._buffers.values())
        if tensor is not None
    ]


def _reset(
    parts: Sequence[nn.Module], calls: Sequence[Any], names: dict[int, str]
) -> dict[str, Tensor]:
    """Call the methods while the parts have whole tensors in host memory; return these by name."""
    made: dict[int, Any] = {}
    before = [(tensors, dict(tensors)) for part in parts for tensors in _places(part)]
    try:
        for tensors, old in before:
            for key, tensor in old.items():
                if tensor is None or id(tensor) not in names:
                    continue
                if id(tensor) not in made:
                    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    made[id(tensor)] = (
                        nn.Parameter(whole, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else whole
                    )
                tensors[key] = made[id(tensor)]
        for call in calls:
            call()
        return {names[number]: tensor.detach() for number, tensor in made.items()}
    finally:
        for tensors, old in before:
            tensors.update(old)


def _places(part: nn.Module) -> list[dict[str, Any]]:
    return [part._parameters, part._buffers]


def empty(module: nn.Module) -> None:
    """Release the storage of all parameters and buffers in place; shared parameters remain shared."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for tensors in _places(part):
            for key, tensor in tensors.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    bare = torch.empty_like(tensor, device="meta")
                    made[id(tensor)] = (
                        nn.Parameter(bare, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else bare
                    )
                tensors[key] = made[id(tensor)]


@contextmanager
def _kept_tied(module: nn.Module) -> Iterator[None]:
    """Inside, shared parameters may be replaced; afterwards all their places have the first replacement."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            places.setdefault(id(parameter), []).append((part, key))
    yield
    for (part, key), *others in places.values():
        for other, its_key in others:
            if other._parameters[its_key] is not None:
                other._parameters[its_key] = part._parameters[key]


def agree_on_rng(groups: Iterable[Group], device: torch.device) -> None:
    """Give every rank of a group the generator states of its first rank. Equal states cost one exchanged number."""
    for group in groups:
        if (
            group.group is not None and dist.get_backend(group.group) == "fake"
        ):  # its ranks are all this one
            continue
        state = rng_state(device)
        if len({row[0] for row in group.agree([digest(state)])}) > 1:
            restore_rng(group.broadcast(state), device)


def with_equal_rng(
    call: Callable[..., Any], groups: Sequence[Group], device: torch.device
) -> Callable[..., Any]:
    """Return a step that equalizes generators first: hooks and loaders may have drawn numbers on one rank only."""

    def step(*arguments: Any) -> Any:
        agree_on_rng(groups, device)
        return call(*arguments)

    return step


def digest(state: dict[str, Any]) -> int:
    """A number for `rng_state`, the same in every process, that a float64 can hold.

    Example:
        >>> digest(rng_state()) == digest(rng_state())
        True
    """
    _, keys, *rest = state["numpy"]
    version, words, gauss = state["python"]
    # Numbers only: before Python 3.12 the hash of None is its address.
    numbers = (version, words, -1 if gauss is None else gauss, *rest)
    found = zlib.crc32(keys.tobytes(), hash(numbers) & 0xFFFFFFFF)
    for name in ("torch", "device"):
        one = state.get(name)
        if isinstance(one, Tensor):
            found = zlib.crc32(
                one.numpy().tobytes(), found
            )  # no sync point: generators' states are on the host
        elif one is not None:
            found = zlib.crc32(repr(one).encode(), found)
    return found
