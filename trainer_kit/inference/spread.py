"""A model whose tensors go to their places, and the hooks that bring them to where they are used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import StrategyError
from trainer_kit.inference.budget import resolve_device
from trainer_kit.inference.checkpoints import OnDisk, write_weights
from trainer_kit.inference.offload_hooks import Call, Lock, OffloadedTensor, Root, Visit, is_meta, put
from trainer_kit.inference.placement import Places, Slot, Tied, find_tied, first_names

__all__ = ["Source", "Spread", "join", "like", "note_sources", "sources_of", "spread"]

Source: TypeAlias = "Callable[[str], tuple[Mapping[str, Tensor], str] | None]"
"""From the name of a tensor without content: weights that have it, and its name there; None where nobody has it."""

_KEPT: Final = "_spread"
_NOTED: Final = "_weights_on_disk"
_PRELOADED: Final = ("MultiheadAttention", "TransformerEncoderLayer")
"""They use weights of layers inside them without calling these."""


@final
class Spread:
    """What `spread` did to a model, so that it can be taken back.

    Args:
        offloaded: with the slots of each tensor.
        root: of the model.
    """

    def __init__(self, offloaded: list[tuple[OffloadedTensor, list[Slot]]], root: Root) -> None:
        self.offloaded, self.root = offloaded, root
        self.handles: list[Any] = []
        self.guarded: list[nn.Module] = []
        self.called: list[nn.Module] = []

    def guard(self, module: nn.Module) -> None:
        """Refuse that a module is moved or cast."""
        if "_apply" not in module.__dict__:  # it may have two names
            module.__dict__["_apply"] = self.root.refuse_move
            self.guarded.append(module)

    def hook(self, module: nn.Module, visit: Visit | Root) -> None:
        """Call ``visit`` around the module's forward, and around hooks that it has: they, too, use its weights."""
        self.handles.append(module.register_forward_pre_hook(visit.arrive, prepend=True, with_kwargs=True))
        self.handles.append(module.register_forward_hook(visit.leave, always_call=True))
        call = module.__dict__.get("_call_impl")
        if not isinstance(call, Call):
            call = module.__dict__["_call_impl"] = Call(module)
            self.called.append(module)
        call.visits.append(visit)


@final
class _StateHook:
    """The weights of one module that are on disk, for its ``state_dict``."""

    def __init__(self, tensors: Mapping[str, OffloadedTensor]) -> None:
        self._tensors = dict(tensors)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key, tensor in self._tensors.items():
            if f"{prefix}{key}" in state and tensor.rests_in(module, key):
                state[f"{prefix}{key}"] = tensor.content(torch.device("cpu"))


def like(old: Tensor, content: Tensor) -> Tensor:
    """A parameter or buffer as ``old`` is one, with other content."""
    if not isinstance(old, nn.Parameter):
        return content
    made = type(old)(content, requires_grad=old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made


def join(model: nn.Module) -> None:
    """Take back what `spread` did: hooks go, and weights in the host's memory stay. What is on disk stays there."""
    kept: Spread | None = model.__dict__.pop(_KEPT, None)
    model.__dict__.pop(_NOTED, None)
    if kept is not None:
        for handle in kept.handles:
            handle.remove()
        for module in kept.guarded:
            del module.__dict__["_apply"]
        for module in kept.called:
            del module.__dict__["_call_impl"]


def note_sources(model: nn.Module, found: Mapping[str, tuple[Mapping[str, Tensor], str]]) -> None:
    """Remember with a model where weights are that it has without content, until it is spread."""
    model.__dict__[_NOTED] = dict(found)


def sources_of(model: nn.Module) -> Source:
    """Where the weights are that `note_sources` named, or an earlier `spread` left on disk."""
    kept: Spread | None = model.__dict__.get(_KEPT)
    found: dict[str, tuple[Mapping[str, Tensor], str]] = {
        slot.name: (tensor.source, tensor.name)
        for tensor, slots in (kept.offloaded if kept else [])
        if tensor.source is not None
        for slot in slots
    }
    found |= model.__dict__.get(_NOTED, {})
    return found.get


def spread(
    model: nn.Module,
    places: Places,
    source: Source,
    *,
    offload_dir: Any,
    offload_buffers: bool,
    skip_keys: Collection[str],
    preload: Collection[str],
    device_map: Mapping[str, int | str],
    hooks: bool = True,
) -> None:
    """Move everything to its place; nothing is moved where something cannot be done.

    Args:
        model: real, or on the ``meta`` device.
        places: of its tensors.
        source: of those without content.
        offload_dir: for what goes to disk and is in no file yet.
        offload_buffers: with the layers that have them.
        skip_keys: arguments and outputs that are not moved.
        preload: names of classes whose modules get the weights of all inside them at once.
        device_map: what ``places`` was made from.
        hooks: False: everything is on one device, and nobody has to be brought anywhere.

    Raises:
        StrategyError: a tensor has no content and nobody knows where it is, a device is not here, or there is no
            directory for what goes to disk.
    """
    found = find_tied(model)
    known = {id(tied): _locate(tied, source) for tied in found}
    resident = {id(tied): _residents(tied, places, offload_buffers) for tied in found}
    away = {id(tied): _away(tied, resident[id(tied)]) for tied in found}
    computing = {resolve_device(places.main), *(places.runs_on(name) for name in device_map)}
    _check_content(found, known, resident, away)
    to_disk = [tied for tied in found if away[id(tied)] and not is_meta(tied.tensor) and _belongs_on_disk(tied, places)]
    written = _write(to_disk, offload_dir)
    join(model)
    offloaded = []
    for tied in found:
        origin = known[id(tied)]
        if resident[id(tied)]:
            _settle(tied, resident[id(tied)], origin)
        if away[id(tied)]:
            tensor = _offload(tied, places, origin, written)
            for slot in away[id(tied)]:
                put(slot.module, slot.key, tensor.rest)
            offloaded.append((tensor, away[id(tied)]))
    if hooks:
        preloaded = {*preload, *_PRELOADED}
        _attach(model, places, offloaded, skip_keys, preloaded, device_map, several=len(computing) > 1)


def _locate(tied: Tied, source: Source) -> tuple[Mapping[str, Tensor], str] | None:
    if not is_meta(tied.tensor):
        return None
    return next((origin for slot in tied.slots if (origin := source(slot.name)) is not None), None)


def _residents(tied: Tied, places: Places, offload_buffers: bool) -> dict[torch.device, list[Slot]]:
    """The slots whose tensor stays on a device, by device; a copy on a device serves all that run there."""
    stays = tied.is_buffer and not (offload_buffers and tied.persistent)
    found: dict[torch.device, list[Slot]] = {}
    for slot in tied.slots:
        if stays or not places.is_away(slot.name):
            found.setdefault(places.runs_on(slot.name), []).append(slot)
    for slot in tied.slots:
        device = places.runs_on(slot.name)
        if device in found and slot not in found[device]:
            found[device].append(slot)
    return found


def _away(tied: Tied, resident: Mapping[torch.device, list[Slot]]) -> list[Slot]:
    settled = {slot.name for slots in resident.values() for slot in slots}
    return [slot for slot in tied.slots if slot.name not in settled]


def _belongs_on_disk(tied: Tied, places: Places) -> bool:
    """Not where another module has the same weights in memory."""
    return all(places.of(slot.name) == "disk" for slot in tied.slots)


def _check_content(
    found: Iterable[Tied],
    known: Mapping[int, Any],
    resident: Mapping[int, Mapping[torch.device, Any]],
    away: Mapping[int, list[Slot]],
) -> None:
    lost = [
        tied.slots[0].name
        for tied in found
        if is_meta(tied.tensor)
        and known[id(tied)] is None
        and (away[id(tied)] or any(device.type != "meta" for device in resident[id(tied)]))
    ]
    if lost:
        raise StrategyError(
            f"{first_names(lost)} have no values: they are on the meta device",
            found="no file that has them was named",
            fix="use load_checkpoint_and_dispatch, or give the directory of a checkpoint as offload_dir",
        )
    for tied in found:
        origin = known[id(tied)]
        if origin is not None:
            weights, name = origin
            shape = (weights.like(name) if isinstance(weights, OnDisk) else weights[name]).shape
            if shape != tied.tensor.shape:
                raise StrategyError(
                    f"{tied.slots[0].name} is stored with another shape",
                    found=f"{list(shape)}, and the model has {list(tied.tensor.shape)}",
                    fix="name the checkpoint of this model",
                )


def _write(to_disk: list[Tied], offload_dir: Any) -> OnDisk | None:
    if not to_disk:
        return None
    if offload_dir is None:
        raise StrategyError(
            f"{first_names([tied.slots[0].name for tied in to_disk])} go to disk, and there is no directory for them",
            fix="pass offload_dir (offload_folder where a checkpoint is loaded)",
        )
    return write_weights(offload_dir, {tied.slots[0].name: tied.tensor.detach() for tied in to_disk})


def _settle(
    tied: Tied, devices: Mapping[torch.device, list[Slot]], origin: tuple[Mapping[str, Tensor], str] | None
) -> None:
    """Put the tensor on devices; the parameter stays the same object where it can."""
    content = tied.tensor.detach()
    for index, (device, slots) in enumerate(devices.items()):
        if origin is not None and device.type != "meta":
            weights, name = origin
            read = weights.read([name], device)[name] if isinstance(weights, OnDisk) else weights[name]
            content = read.to(tied.tensor.dtype)
        moved = content.to(device)
        if index == 0 and is_meta(tied.tensor) == is_meta(moved):
            tied.tensor.data = moved
            made = tied.tensor
        else:
            made = like(tied.tensor, moved)
        for slot in slots:
            put(slot.module, slot.key, made)


def _offload(
    tied: Tied, places: Places, origin: tuple[Mapping[str, Tensor], str] | None, written: OnDisk | None
) -> OffloadedTensor:
    tensor, name = tied.tensor, tied.slots[0].name
    if not _belongs_on_disk(tied, places):
        if origin is not None:
            weights, name = origin
            tensor = like(tensor, weights[name].to(device="cpu", dtype=tensor.dtype))
        elif tensor.device.type != "cpu":
            tensor = like(tensor, tensor.detach().to("cpu"))
        return OffloadedTensor(tensor, None, name, tensor.requires_grad)
    files: Any = written
    if origin is not None:
        files, name = origin
    elif is_meta(tensor):
        raise AssertionError(name)  # _check_content has refused it
    rest = tensor if is_meta(tensor) else like(tensor, tensor.detach().to("meta"))
    return OffloadedTensor(rest, files, name, tensor.requires_grad)


def _attach(
    model: nn.Module,
    places: Places,
    offloaded: list[tuple[OffloadedTensor, list[Slot]]],
    skip: Collection[str],
    preload: Collection[str],
    device_map: Mapping[str, int | str],
    several: bool,
) -> None:
    where = ", ".join(
        f"{first_names([name or 'everything' for name, there in device_map.items() if there == device])} on {device}"
        for device in dict.fromkeys(device_map.values())
    )
    root, lock = Root([tensor for tensor, _ in offloaded], where, skip), Lock()
    kept = Spread(offloaded, root)
    by_module: dict[str, list[tuple[nn.Module, str, OffloadedTensor]]] = {}
    for tensor, slots in offloaded:
        for slot in slots:
            by_module.setdefault(_loader(model, slot.path, preload), []).append((slot.module, slot.key, tensor))
    modules = dict(model.named_modules(remove_duplicate=False))
    visited = {"", *by_module, *(name for name in device_map if several and name in modules)}
    for name in sorted(visited, key=lambda name: name.count(".")):
        device = _device_of(name, modules[name], places)
        kept.hook(modules[name], Visit(name, device, by_module.get(name, []), skip, lock))
    kept.hook(model, root)  # the last one comes first: inputs are where the caller has them
    kept.guard(model)
    for name in {slot.path for _, slots in offloaded for slot in slots} - {""}:
        kept.guard(modules[name])
    _guard_states(kept, offloaded)
    model.__dict__[_KEPT] = kept


def _loader(model: nn.Module, path: str, preload: Collection[str]) -> str:
    """The module with whose forward the tensors of one come: itself, or one around it that takes all at once."""
    parts = path.split(".") if path else []
    for count in range(len(parts) + 1):
        name = ".".join(parts[:count])
        if type(model.get_submodule(name)).__name__ in preload:
            return name
    return path


def _device_of(name: str, module: nn.Module, places: Places) -> torch.device:
    if not name:
        return resolve_device(places.main)
    own = [*module._parameters, *module._buffers]
    return places.runs_on(f"{name}.{own[0]}" if own else name)


def _guard_states(kept: Spread, offloaded: list[tuple[OffloadedTensor, list[Slot]]]) -> None:
    on_disk: dict[int, tuple[nn.Module, dict[str, OffloadedTensor]]] = {}
    for tensor, slots in offloaded:
        for slot in slots if tensor.source is not None else ():
            on_disk.setdefault(id(slot.module), (slot.module, {}))[1][slot.key] = tensor
    for module, tensors in on_disk.values():
        hooked: Any = module  # these two are not typed
        kept.handles.append(hooked.register_state_dict_post_hook(_StateHook(tensors)))
        kept.handles.append(hooked.register_load_state_dict_pre_hook(kept.root.refuse_loading))
