"""Running a model whose layers are on several devices, in the host's memory, or on disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.devices import present_accelerator
from trainer_kit.core.errors import CheckpointError, StrategyError, did_you_mean
from trainer_kit.core.tensors import move_to_device
from trainer_kit.inference.device_map import Device, accelerators, name_of, resolve_device
from trainer_kit.inference.lazy_weights import OnDisk, open_weights, write_weights
from trainer_kit.inference.offload_hooks import Call, Lock, OffloadedTensor, Root, Visit, is_meta, put

__all__ = [
    "Places",
    "Slot",
    "Source",
    "Spread",
    "Tied",
    "UserCpuOffloadHook",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "find_tied",
    "first_names",
    "join",
    "like",
    "note_sources",
    "sources_of",
    "spread",
]

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


@final
@dataclass(frozen=True)
class Slot:
    """One place of a module that a tensor is in.

    Attributes:
        path: the module's name.
        module: the module.
        key: the parameter or buffer.
    """

    path: str
    module: nn.Module
    key: str

    @property
    def name(self) -> str:
        """Of the tensor."""
        return f"{self.path}.{self.key}" if self.path else self.key


@final
@dataclass(frozen=True, eq=False)
class Tied:
    """A tensor and everywhere it is: one slot, or several that share it.

    Attributes:
        tensor: a parameter or buffer.
        slots: in the order of modules.
        persistent: whether a state_dict has it.
    """

    tensor: Tensor
    slots: list[Slot] = field(default_factory=list)
    persistent: bool = True

    @property
    def is_buffer(self) -> bool:
        """Whether it is no parameter."""
        return self.slots[0].key in self.slots[0].module._buffers


def find_tied(model: nn.Module) -> list[Tied]:
    """Every parameter and buffer once."""
    found: dict[int, Tied] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                persistent = key not in module._non_persistent_buffers_set
                tied = found.setdefault(id(tensor), Tied(tensor, [], persistent))
                tied.slots.append(Slot(path, module, key))
    return list(found.values())


def first_names(names: Collection[str]) -> str:
    """A few of many names, for a message.

    Example:
        >>> first_names(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, int | str]:
    """The map with devices as keys of maps are written.

    Raises:
        StrategyError: it is empty, or has no device for a tensor.
    """
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {slot.name for tied in find_tied(model) for slot in tied.slots}
    found = {name: name_of(device) for name, device in device_map.items()}
    places = Places(found, None)
    missing = [
        slot.name for tied in find_tied(model) if tied.persistent for slot in tied.slots if not places.covers(slot.name)
    ]
    unknown = [name for name in found if name not in known]
    hint = f"; {unknown[0]!r} is no module: {did_you_mean(unknown[0], known)}" if unknown else ""
    if missing or not found:
        raise StrategyError(
            f"the device map has no device for {first_names(missing) or 'anything'}",
            found=f"devices for {first_names(list(found)) or 'nothing'}",
            fix=f"name every module, or those that hold them, or '' for the rest{hint}",
        )
    if unknown:
        warnings.warn(f"the device map names what the model does not have: {first_names(unknown)}{hint}", stacklevel=4)
    return found


@final
class Places:
    """A device map, and the device that runs what is offloaded.

    Args:
        device_map: from `check_device_map`.
        main: where offloaded layers run; None: on the first accelerator of the map, or the CPU.
    """

    def __init__(self, device_map: Mapping[str, int | str], main: Device | None) -> None:
        self._map = dict(device_map)
        first: Sequence[int | str] = accelerators(self._map.values())
        self.main: int | str = name_of(main) if main is not None else first[0] if first else "cpu"

    def covers(self, name: str) -> bool:
        """Whether there is a device for it."""
        return any(key in self._map for key in _above(name))

    def of(self, name: str) -> int | str:
        """The device of a module or tensor: that of the smallest part of the model that is named and has it."""
        return next((self._map[key] for key in _above(name) if key in self._map), self.main)

    def is_away(self, name: str) -> bool:
        """Whether it is offloaded: on disk, or in the host's memory while an accelerator computes."""
        device = self.of(name)
        return device == "disk" or (device == "cpu" and self.main != "cpu")

    def runs_on(self, name: str) -> torch.device:
        """The device that computes with it."""
        return resolve_device(self.main if self.is_away(name) else self.of(name))


def _above(name: str) -> Iterator[str]:
    """The name, and those of the modules around it, the model last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, str]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put each part of a model where a device map says, so that it runs as if it were in one place.

    Inputs go to the device of the layer that needs them, outputs come back to where the model's input was. Weights in
    the host's memory or on disk come to an accelerator (or the CPU) while their layer runs. They are not trained: a
    backward through the model is refused, unless everything that is offloaded was frozen before. A model can be
    dispatched again with another map; ``{"": "cpu"}`` brings everything into the host's memory.

    Args:
        model: with its weights; or, for those that are named by one of the next arguments, on the ``meta`` device.
        device_map: by name of a module or tensor: a number, ``"cpu"``, ``"disk"``, or what torch calls a device.
        main_device: where offloaded layers run; None: on the first accelerator of the map, or the CPU.
        state_dict: weights by name, for tensors that have no content.
        offload_dir: where weights are written that go to disk; or where they are, as a checkpoint, and then they are
            read from there. What is written is removed when nobody needs it any more.
        offload_index: by name: ``{"safetensors_file": ..., "weight_name": ...}``.
        offload_buffers: buffers of offloaded layers are offloaded too; what a forward writes to them is lost.
        skip_keys: names of keyword arguments, and of a mapping's outputs, that are not moved, such as a cache.
        preload_module_classes: names of classes whose modules use weights of layers inside them without calling them.
        force_hooks: move inputs and outputs also where the map has a single device.

    Returns:
        ``model``; its ``hf_device_map`` is the map.

    Raises:
        StrategyError: the map leaves something out or names a device that is not here; a weight has no content and
            nobody says where it is; there is no directory for what goes to disk.

    Example:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).eval()
        >>> x = torch.ones(1, 2)
        >>> before = net(x)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = dispatch_model(net, {"0": "cpu", "1": "disk"}, offload_dir=directory)
        ...     net[1].weight.device.type, torch.equal(net(x), before)
        ('meta', True)
    """
    devices = check_device_map(model, device_map)
    several = len(set(devices.values())) > 1 or "disk" in devices.values()
    places = Places(devices, main_device)
    spread(
        model,
        places,
        _sources(model, state_dict, offload_index, offload_dir),
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        skip_keys=[skip_keys] if isinstance(skip_keys, str) else skip_keys or (),
        preload=preload_module_classes or (),
        device_map=devices,
        hooks=several or force_hooks or places.is_away(next(iter(devices))),
    )
    model.__dict__["hf_device_map"] = dict(device_map)
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all parameters in the host's memory, and bring each layer's to a device while it runs.

    Args:
        model: wherever it is.
        execution_device: that computes; None: where its first parameter is.
        offload_buffers: buffers too.
        state_dict: weights by name, for parameters that have no content.
        preload_module_classes: as for `dispatch_model`.

    Example:
        >>> net = cpu_offload(nn.Linear(2, 3), "meta")  # a stand-in for an accelerator
        >>> net(torch.ones(1, 2, device="meta")).device.type, net.weight.device.type
        ('meta', 'cpu')
    """
    return dispatch_model(
        model,
        {"": "cpu"},
        _computes(model, execution_device),
        state_dict=state_dict,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all parameters on disk, and bring each layer's to a device while it runs.

    Args:
        model: with its weights, which are written to ``offload_dir``; or on the ``meta`` device, and then
            ``offload_dir`` is a checkpoint, which is read in place.
        offload_dir: a directory.
        execution_device: that computes; None: where the first parameter is, or the CPU where it has no content.
        offload_buffers: buffers too.
        preload_module_classes: as for `dispatch_model`.

    Example:
        >>> import tempfile
        >>> net, x = nn.Linear(2, 3), torch.ones(1, 2)
        >>> before = net(x)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     torch.equal(disk_offload(net, directory)(x), before)
        True
    """
    return dispatch_model(
        model,
        {"": "disk"},
        _computes(model, execution_device),
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def _computes(model: nn.Module, device: Device | None) -> Device:
    if device is not None:
        return name_of(device)
    first = next(model.parameters(), None)
    return "cpu" if first is None or is_meta(first) else str(first.device)


def _sources(
    model: nn.Module,
    state_dict: Mapping[str, Tensor] | None,
    index: Mapping[str, Mapping[str, str]] | None,
    offload_dir: str | os.PathLike[str] | None,
) -> Source:
    """Where the weights of tensors without content are: in what was given, else where they were left before."""
    noted = sources_of(model)
    given = dict(state_dict or {})
    files: dict[str, OnDisk | dict[str, Tensor]] = {}
    empty = any(noted(slot.name) is None for t in find_tied(model) if is_meta(t.tensor) for slot in t.slots)
    folder: Mapping[str, Tensor] = {}
    if empty and offload_dir is not None and os.path.isdir(offload_dir):
        try:
            folder = open_weights(offload_dir)
        except CheckpointError:
            if any(name.endswith((".safetensors", ".json")) for name in os.listdir(offload_dir)):
                raise  # it is a checkpoint, and damaged

    def find(name: str) -> tuple[Mapping[str, Tensor], str] | None:
        if name in given:
            return given, name
        if index is not None and name in index:
            entry = index[name]
            if "safetensors_file" not in entry:
                raise StrategyError(
                    f"the offload_index has no safetensors_file for {name}",
                    found=str(dict(entry)),
                    fix="offload to safetensors files, or name the checkpoint as offload_dir",
                )
            file = entry["safetensors_file"]
            return files.setdefault(file, open_weights(file)), entry.get("weight_name", name)
        return noted(name) or ((folder, name) if name in folder else None)

    return find


@final
class UserCpuOffloadHook:
    """What `cpu_offload_with_hook` returns: ``offload()`` takes the model to the host's memory.

    Args:
        model: that is brought to a device when it is called.
        device: that device.
        before: the hook of the model that has to go first, or None.
    """

    def __init__(self, model: nn.Module, device: torch.device, before: UserCpuOffloadHook | None) -> None:
        self.model, self.device, self.before = model, device, before
        self._handle: Any = model.register_forward_pre_hook(self._arrive, with_kwargs=True)

    def _arrive(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.before is not None:
            self.before.offload()
        self.model.to(self.device)
        return move_to_device(args, self.device), move_to_device(kwargs, self.device)

    def offload(self) -> None:
        """Take the model to the host's memory."""
        self.model.to("cpu")

    def remove(self) -> None:
        """Leave the model where it is from now on."""
        self._handle.remove()


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Bring a whole model to a device when it is called, and leave it there until it is told to go.

    For pipelines of several models, each of which runs many times in a row.

    Args:
        model: it goes to the host's memory.
        execution_device: that computes; None: the accelerator, or the CPU where there is none.
        prev_module_hook: of the model that leaves when this one comes.

    Example:
        >>> first, hook = cpu_offload_with_hook(nn.Linear(2, 3), "cpu")
        >>> second, other = cpu_offload_with_hook(nn.Linear(3, 1), "cpu", prev_module_hook=hook)
        >>> second(first(torch.ones(1, 2))).shape
        torch.Size([1, 1])
        >>> other.offload()
    """
    if execution_device is None:
        here = present_accelerator()
        execution_device = "cpu" if here is None else 0
    hook = UserCpuOffloadHook(model, resolve_device(execution_device), prev_module_hook)
    hook.offload()
    return model, hook
