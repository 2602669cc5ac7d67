"""What ranks share before they train: initial weights, and the state of random generators."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.state_names import state_name
from trainer_kit.core.torch_private import (
    apply_to_tensors,
    direct_buffers,
    direct_parameters,
)
from trainer_kit.core.types import SavedState
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import shard_like
from trainer_kit.strategies.torch_private import find_reset

__all__ = [
    "InitialWeights",
    "agree_on_rng",
    "build_on_rank_zero",
    "compare_models",
    "digest",
    "release_storage",
    "with_equal_rng",
]


_TensorDict: TypeAlias = dict[str, Any]
"""The direct parameters or buffers of a layer, as `direct_parameters` returns them; some are None."""


@contextmanager
def build_on_rank_zero(group: Group) -> Iterator[None]:
    """Inside, rank 0 builds modules in host memory, the others on the meta device; random streams stay equal."""
    before = torch.get_rng_state()
    with torch.device("cpu" if group.rank == 0 else "meta"):
        yield
    before_on_zero, after_on_zero = group.broadcast((before, torch.get_rng_state()))
    # The other ranks drew nothing: with equal streams before, their next numbers would differ.
    if before_on_zero is before or torch.equal(before, before_on_zero):
        torch.set_rng_state(after_on_zero)


@final
class InitialWeights:
    """The weights of a module before it is sharded, and their broadcast after that.

    Args:
        module: as the user built it; on ranks other than the first its tensors may be on the meta device.
        group: every rank of it makes the same calls.
        placed: an earlier fit has placed all weights.
        resets: tensors that rank 0 has without values are left to `reset`.

    Raises:
        StrategyError: the first rank has no values either, or the ranks built different models.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        placed: bool = False,
        resets: bool = False,
    ) -> None:
        self._group = group
        # Each tensor once, by the first of its names.
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._values: dict[str, Tensor] = {}
        self._names: dict[str, list[str]] = {}
        if placed:
            return
        tensors: dict[str, Tensor] = {}
        first_names: dict[int, str] = {}
        for name, tensor in _named_tensors(module):
            if hasattr(tensor, "placements"):
                continue
            first_name = first_names.setdefault(id(tensor), name)
            self._names.setdefault(first_name, []).append(name)
            if first_name == name:
                tensors[name] = tensor.detach()
        # Before anything is sent: a broadcast between different shapes hangs, or mixes weights up.
        texts = {name: f"{list(t.shape)} {t.dtype}" for name, t in tensors.items()}
        compare_models(texts, group)
        without_values = group.broadcast(
            [name for name, t in tensors.items() if t.is_meta]
        )
        for name in without_values:
            del self._names[name]
        if without_values and not resets:
            raise StrategyError(
                "the initial weights have no values",
                found=f"{', '.join(without_values[:3])} on the meta device on rank 0",
                fix='build layers in configure_model without torch.device("meta")',
            )
        for name in self._names:
            self._shapes[name] = (tensors[name].shape, tensors[name].dtype)
            if group.rank == 0:
                self._values[name] = tensors[name]

    def reset(self, module: nn.Module) -> None:
        """Take values for layers without storage that were created since: rank 0 calls their ``reset_parameters``.

        It does so on full tensors, however the layers are sharded, so that the values are those of one process.

        Raises:
            StrategyError: a layer has no such method, or layers with values have other names now.
        """
        names_with_values: set[str] = set()
        if self._shapes:
            names_with_values.update(*self._names.values())
        first_names: dict[int, str] = {}
        for name, tensor in _named_tensors(module):
            if tensor.is_meta and name not in names_with_values:
                first_name = first_names.setdefault(id(tensor), name)
                self._names.setdefault(first_name, []).append(name)
                self._shapes[first_name] = (tensor.shape, tensor.dtype)
        if not first_names:
            return
        missing = sorted(
            names_with_values - {name for name, _ in _named_tensors(module)}
        )
        if missing:
            raise StrategyError(
                "configure_model renames or replaces layers whose values exist only on rank 0",
                found=f"{missing[0]} before, {next(iter(first_names.values()))} now",
                fix="rename them in __init__, or create them without init_module(empty_init=True)",
            )
        layers = {
            name: layer
            for name, layer in module.named_modules()
            if any(id(tensor) in first_names for tensor in _direct_tensors(layer))
        }
        reset_methods = [find_reset(layer) for layer in layers.values()]
        without_reset = [
            name
            for name, reset in zip(layers, reset_methods, strict=True)
            if not callable(reset)
        ]
        if without_reset:
            raise StrategyError(
                "layers on the meta device cannot initialize their weights",
                found=f"{', '.join(without_reset[:3])} without reset_parameters",
                fix="define reset_parameters(self), or create these layers in __init__",
            )
        # The other ranks draw no numbers; their generators follow those of rank 0.
        with build_on_rank_zero(self._group):
            if self._group.rank == 0:
                values = _compute_initial_values(
                    layers.values(), reset_methods, first_names
                )
                self._values.update(values)

    def distribute(
        self, module: nn.Module, device: torch.device, parameters_on: torch.device
    ) -> None:
        """Fill the sharded module on every rank; each rank keeps only its own parts. A second call does nothing.

        Args:
            module: the module, after it was sharded.
            device: where it computes.
            parameters_on: where shards of its parameters are kept; full parameters are on ``device``.
        """
        # Emptied first, so that a second call does nothing: values are gone after the first.
        shapes = self._shapes
        self._shapes = {}
        if not shapes:
            return
        _allocate(module, parameters_on)
        _move_full_tensors(module, device)
        if dist.is_initialized() and dist.get_backend(self._group.group) == "fake":
            self._values = {}  # weights have no values in a fake world
            return
        targets = dict(_named_tensors(module))
        with torch.no_grad():
            for name, (shape, dtype) in shapes.items():
                # Only rank 0 has values; each is released once it is sent.
                if self._values:
                    values = self._values.pop(name).to(device)
                else:
                    values = torch.empty(shape, dtype=dtype, device=device)
                self._group.broadcast(values)
                # Under each of its names: a stage of a pipeline may have a later name only.
                filled: set[int] = set()
                for alias in self._names[name]:
                    target = targets.get(alias)
                    if target is not None and id(target) not in filled:
                        filled.add(id(target))
                        target.detach().copy_(shard_like(values, target))


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Give tensors on the meta device storage, without values."""
    if not any(tensor.is_meta for _, tensor in _named_tensors(module)):
        return

    def allocate(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    # Unlike to_empty(), keep what submodules such as metrics store outside of buffers: it is not broadcast.
    with _preserving_ties(module):
        apply_to_tensors(module, allocate)


def _move_full_tensors(module: nn.Module, device: torch.device) -> None:
    """Move buffers and unsharded parameters; parameters in place, because optimizers hold them and some are tied."""
    for parameter in module.parameters():
        if not hasattr(parameter, "placements") and parameter.device != device:
            parameter.data = parameter.data.to(device)
    for layer in module.modules():
        buffers = direct_buffers(layer)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = buffer.to(device)


def compare_models(
    description: Mapping[str, str],
    group: Group,
    problem: str = "the ranks built different models",
    fix: str = "build the same model on every rank, regardless of the rank and its data",
) -> None:
    """Refuse, on every rank, models that differ from rank to rank; a collective call.

    Args:
        description: what has to be equal of this rank's model, by the name of a tensor or module.
        group: the ranks that are compared.
        problem: of the error.
        fix: of the error.

    Raises:
        StrategyError: on every rank; it names the first difference.
    """
    # A number first: descriptions of large models are exchanged only if they differ.
    checksum = zlib.crc32(repr(description).encode())
    if len({row[0] for row in group.agree([checksum])}) == 1:
        return
    descriptions = group.all_gather_object(description)
    first = descriptions[0]
    rank = next(rank for rank, other in enumerate(descriptions) if other != first)
    other = descriptions[rank]
    name = next(
        name for name in {**first, **other} if first.get(name) != other.get(name)
    )
    raise StrategyError(
        problem,
        found=f"{name}: {first.get(name, 'nothing')} on rank 0, {other.get(name, 'nothing')} on rank {rank}",
        fix=fix,
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, by names without the prefixes of wrappers such as compiled modules."""
    for name, tensor in chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        yield state_name(name), tensor


def _direct_tensors(layer: nn.Module) -> list[Tensor]:
    tensors = (*direct_parameters(layer).values(), *direct_buffers(layer).values())
    return [tensor for tensor in tensors if tensor is not None]


def _compute_initial_values(
    layers: Iterable[nn.Module],
    reset_methods: Iterable[Callable[[], object]],
    names: dict[int, str],
) -> dict[str, Tensor]:
    """Call the methods while the layers have full tensors in host memory; return these by name."""
    # By the id of the tensor that each replaces: layers that share one fill the same full tensor.
    full_tensors: dict[int, Tensor] = {}
    originals: list[tuple[_TensorDict, _TensorDict]] = []
    for layer in layers:
        originals += [(tensors, dict(tensors)) for tensors in _tensor_dicts(layer)]
    try:
        for tensors, before in originals:
            for key, tensor in before.items():
                if tensor is None or id(tensor) not in names:
                    continue
                if id(tensor) not in full_tensors:
                    full = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    full_tensors[id(tensor)] = _as_parameter(full, tensor)
                tensors[key] = full_tensors[id(tensor)]
        for reset in reset_methods:
            reset()
        return {names[key]: tensor.detach() for key, tensor in full_tensors.items()}
    finally:
        for tensors, before in originals:
            tensors.update(before)


def _as_parameter(tensor: Tensor, original: Tensor) -> Tensor:
    """The tensor as a parameter if the original is one."""
    if isinstance(original, nn.Parameter):
        return nn.Parameter(tensor, original.requires_grad)
    return tensor


def _tensor_dicts(layer: nn.Module) -> list[_TensorDict]:
    return [direct_parameters(layer), direct_buffers(layer)]


def release_storage(module: nn.Module) -> None:
    """Release the storage of all parameters and buffers in place; shared parameters remain shared."""
    replacements: dict[int, Tensor] = {}
    for layer in module.modules():
        for tensors in _tensor_dicts(layer):
            for key, tensor in tensors.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in replacements:
                    bare = torch.empty_like(tensor, device="meta")
                    replacements[id(tensor)] = _as_parameter(bare, tensor)
                tensors[key] = replacements[id(tensor)]


@contextmanager
def _preserving_ties(module: nn.Module) -> Iterator[None]:
    """Inside, shared parameters may be replaced; afterwards all layers that share one have its first replacement."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for layer in module.modules():
        for key, parameter in direct_parameters(layer).items():
            owner = (layer, key)
            owners.setdefault(id(parameter), []).append(owner)
    yield
    for sharing in owners.values():
        layer, key = sharing[0]
        first = direct_parameters(layer)[key]
        for layer, key in sharing[1:]:
            # A layer without a bias has None in its place.
            parameters = direct_parameters(layer)
            if parameters[key] is not None:
                parameters[key] = first


def agree_on_rng(groups: Iterable[Group], device: torch.device) -> None:
    """Give every rank of a group the generator states of its first rank. Equal states cost one exchanged number."""
    for group in groups:
        if group.group is not None and dist.get_backend(group.group) == "fake":
            continue  # its ranks are all this one
        state = rng_state(device)
        # Only states that differ are sent, some kilobytes each: this runs before every step.
        digests = {row[0] for row in group.agree([digest(state)])}
        if len(digests) > 1:
            restore_rng(group.broadcast(state), device)


def with_equal_rng(
    call: StepMethod, groups: Sequence[Group], device: torch.device
) -> StepMethod:
    """Return a step that equalizes generators first: hooks and loaders may have drawn numbers on one rank only."""

    def step(*arguments: object) -> object:
        agree_on_rng(groups, device)
        return call(*arguments)

    return step


def digest(state: SavedState) -> int:
    """A number for `rng_state`, the same in every process, that a float64 can hold.

    Example:
        >>> digest(rng_state()) == digest(rng_state())
        True
    """
    _, numpy_keys, *numpy_position = state["numpy"]
    version, python_keys, gauss = state["python"]
    if gauss is None:  # before Python 3.12 the hash of None is its address
        gauss = -1
    numbers = (version, python_keys, gauss, *numpy_position)
    checksum = zlib.crc32(numpy_keys.tobytes(), hash(numbers) & 0xFFFFFFFF)
    for name in ("torch", "device"):
        generator_state = state.get(name)
        if isinstance(generator_state, Tensor):
            content = generator_state.numpy().tobytes()  # no sync point: on the host
            checksum = zlib.crc32(content, checksum)
        elif generator_state is not None:
            checksum = zlib.crc32(repr(generator_state).encode(), checksum)
    return checksum
