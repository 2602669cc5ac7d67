"""Run a model whose layers are on several devices, in host memory, or on disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer_kit.core.copyable_lock import Lock
from trainer_kit.core.devices import present_accelerator
from trainer_kit.core.errors import CheckpointError, StrategyError, did_you_mean
from trainer_kit.core.tensors import move_to_device
from trainer_kit.core.torch_private import (
    CALL,
    MOVE,
    direct_buffers,
    direct_parameters,
    transient_buffers,
)
from trainer_kit.inference.device_map import (
    Device,
    accelerators,
    join_names,
    name_of,
    resolve_device,
)
from trainer_kit.inference.lazy_weights import (
    OnDisk,
    open_weights,
    read_one,
    tensor_like,
    write_weights,
)
from trainer_kit.inference.offload_hooks import (
    Call,
    LayerHooks,
    ModelHooks,
    OffloadedTensor,
    is_meta,
    put,
)

__all__ = [
    "Dispatched",
    "Places",
    "Slot",
    "Tied",
    "UserCpuOffloadHook",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "find_tied",
    "first_names",
    "note_sources",
    "parameter_like",
    "undo_dispatch",
]

_Origin: TypeAlias = "tuple[Mapping[str, Tensor], str]"
"""The weights that hold a tensor's content, and its name in them."""
_Source: TypeAlias = "Callable[[str], _Origin | None]"
"""Returns the origin of a meta tensor by its name in the model; None if it is unknown."""

# Both are entries of the model's `__dict__`, set there directly: `nn.Module.__setattr__` would register what they hold,
# and `copy.deepcopy` of a model takes them along.
_DISPATCHED: Final = "_dispatched"
_NOTED: Final = "_weights_on_disk"
_PRELOADED: Final = ("MultiheadAttention", "TransformerEncoderLayer")
"""These classes use weights of their layers without calling the layers."""


@final
class Dispatched:
    """The changes that `dispatch_model` has made to a model, which `undo_dispatch` removes.

    Args:
        offloaded: offloaded tensors with their slots.
        hooks: of the model.
    """

    def __init__(
        self, offloaded: list[tuple[OffloadedTensor, list[Slot]]], hooks: ModelHooks
    ) -> None:
        self.offloaded = offloaded
        self.hooks = hooks
        self.handles: list[RemovableHandle] = []
        self.guarded: list[nn.Module] = []
        self.called: list[nn.Module] = []

    def guard(self, module: nn.Module) -> None:
        """Make calls that would move or cast a module raise an error."""
        # `to`, `cuda`, `half` and the moves of engines all go through `_apply`. A module with two names is visited
        # twice, and must be in the list of guarded modules once.
        if MOVE not in module.__dict__:
            module.__dict__[MOVE] = self.hooks.refuse_move
            self.guarded.append(module)

    def hook(self, module: nn.Module, hooks: LayerHooks | ModelHooks) -> None:
        """Register hooks around the module's forward and around its own hooks, which use its weights too."""
        self.handles.append(
            module.register_forward_pre_hook(
                hooks.before, prepend=True, with_kwargs=True
            )
        )
        # Without `always_call` a failed forward (out of memory, for example) would leave its weights on the device.
        self.handles.append(module.register_forward_hook(hooks.after, always_call=True))
        call = module.__dict__.get(CALL)
        if not isinstance(call, Call):
            call = module.__dict__[CALL] = Call(module)
            self.called.append(module)
        call.hooks.append(hooks)


def _read_state(
    tensors: Mapping[str, OffloadedTensor],
    module: nn.Module,
    state: dict[str, object],
    prefix: str,
    metadata: object,
) -> None:
    """A ``state_dict`` hook that reads the weights of one module from disk."""
    for key, tensor in tensors.items():
        name = f"{prefix}{key}"
        # A parameter that the user replaced after the dispatch has its own values, which are in the state already.
        if name in state and tensor.rests_in(module, key):
            state[name] = tensor.content(torch.device("cpu"))


def parameter_like(old: Tensor, content: Tensor) -> Tensor:
    """Return ``content`` as a parameter with the class and attributes of ``old``; a buffer's content is unchanged."""
    if not isinstance(old, nn.Parameter):
        return content
    # The class and the attributes matter: bitsandbytes keeps its quantization state in both.
    parameter = type(old)(content, requires_grad=old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def undo_dispatch(model: nn.Module) -> None:
    """Remove all hooks of an earlier `dispatch_model`; weights stay in host memory or on disk."""
    dispatched: Dispatched | None = model.__dict__.pop(_DISPATCHED, None)
    model.__dict__.pop(_NOTED, None)
    if dispatched is None:
        return
    for handle in dispatched.handles:
        handle.remove()
    for module in dispatched.guarded:
        del module.__dict__[MOVE]
    for module in dispatched.called:
        del module.__dict__[CALL]


def note_sources(model: nn.Module, origins: Mapping[str, _Origin]) -> None:
    """Record the origins of a model's meta tensors, for `dispatch_model`."""
    model.__dict__[_NOTED] = dict(origins)


def _recorded_origins(model: nn.Module) -> _Source:
    """Return the origins that `note_sources` recorded, or an earlier `dispatch_model` left on disk."""
    dispatched: Dispatched | None = model.__dict__.get(_DISPATCHED)
    origins: dict[str, _Origin] = {}
    if dispatched is not None:
        for tensor, slots in dispatched.offloaded:
            if tensor.source is not None:
                for slot in slots:
                    origins[slot.name] = (tensor.source, tensor.name)
    # What was loaded last wins: `note_sources` may follow an earlier dispatch.
    origins |= model.__dict__.get(_NOTED, {})
    return origins.get


@final
@dataclass(frozen=True, eq=False)
class _Move:
    """The plan for one tensor.

    Attributes:
        tied: the tensor.
        origin: of its content, if it is a meta tensor.
        resident: the slots whose tensor stays on a device, by device.
        away: the slots whose tensor is offloaded.
    """

    tied: Tied
    origin: _Origin | None
    resident: Mapping[torch.device, list[Slot]]
    away: list[Slot]


def _plan_move(
    tied: Tied, places: Places, source: _Source, offload_buffers: bool
) -> _Move:
    origin = None
    # A tensor with content is its own origin. The files of a meta tensor may know it by any of its names.
    if is_meta(tied.tensor):
        origins = (source(slot.name) for slot in tied.slots)
        origin = next(filter(None, origins), None)
    resident = _find_resident_slots(tied, places, offload_buffers)
    resident_names: set[str] = set()
    for slots in resident.values():
        resident_names.update(slot.name for slot in slots)
    offloaded = [slot for slot in tied.slots if slot.name not in resident_names]
    return _Move(tied, origin, resident, offloaded)


def _move_all(
    model: nn.Module,
    moves: list[_Move],
    places: Places,
    offload_dir: str | os.PathLike[str] | None,
) -> list[tuple[OffloadedTensor, list[Slot]]]:
    """Move all tensors to their places, and return the offloaded tensors with their slots.

    If a check fails, no tensor has moved.

    Raises:
        StrategyError: the source of a meta tensor is unknown, or a directory for tensors that go to disk is missing.
    """
    # What can fail comes first: the check, then the file. After an error the model still runs as it did before.
    _check_content(moves)
    to_disk = []
    for move in moves:
        has_content = not is_meta(move.tied.tensor)
        if move.away and has_content and _belongs_on_disk(move.tied, places):
            to_disk.append(move.tied)
    written = _write(to_disk, offload_dir)
    # The hooks of an earlier dispatch would bring weights to the earlier devices. They are removed only now because
    # the moves were planned from the origins that they know (`_recorded_origins`).
    undo_dispatch(model)
    offloaded = []
    for move in moves:
        if move.resident:
            _move_to_devices(move)
        if move.away:
            tensor = _offload(move, places, written)
            for slot in move.away:
                put(slot.module, slot.key, tensor.rest)
            offloaded.append((tensor, move.away))
    return offloaded


def _find_resident_slots(
    tied: Tied, places: Places, offload_buffers: bool
) -> dict[torch.device, list[Slot]]:
    """Return the slots whose tensor stays on a device, by device; all slots that run on a device share one copy."""
    # A buffer that no state_dict contains cannot be read from a checkpoint, and buffers that a forward updates lose
    # the update when they are offloaded: therefore buffers stay unless the caller asks otherwise.
    stays = tied.is_buffer and not (offload_buffers and tied.persistent)
    resident: dict[torch.device, list[Slot]] = {}
    for slot in tied.slots:
        if stays or not places.is_away(slot.name):
            device = places.runs_on(slot.name)
            resident.setdefault(device, []).append(slot)
    # Offloaded slots use a copy that is on their device anyway: nothing has to be transferred for them.
    for slot in tied.slots:
        device = places.runs_on(slot.name)
        if device in resident and slot not in resident[device]:
            resident[device].append(slot)
    return resident


def _belongs_on_disk(tied: Tied, places: Places) -> bool:
    """Whether the map has all slots on disk, so that no module has the same weights in memory."""
    return all(places.device_of(slot.name) == "disk" for slot in tied.slots)


def _check_content(moves: list[_Move]) -> None:
    # A meta tensor without an origin may stay meta (a test of placement, or a stand-in for an accelerator); anywhere
    # else it would have arbitrary values.
    lost = [
        move.tied.slots[0].name
        for move in moves
        if is_meta(move.tied.tensor)
        and move.origin is None
        and (move.away or any(device.type != "meta" for device in move.resident))
    ]
    if lost:
        raise StrategyError(
            f"{first_names(lost)} have no values: they are on the meta device",
            found="no file with their values",
            fix="use load_checkpoint_and_dispatch, or give the directory of a checkpoint as offload_dir",
        )
    for move in moves:
        if move.origin is not None:
            shape = tensor_like(*move.origin).shape
            wanted = move.tied.tensor.shape
            if shape != wanted:
                raise StrategyError(
                    f"{move.tied.slots[0].name} is stored with another shape",
                    found=f"{list(shape)}, and the model has {list(wanted)}",
                    fix="name the checkpoint of this model",
                )


def _write(
    to_disk: list[Tied], offload_dir: str | os.PathLike[str] | None
) -> OnDisk | None:
    if not to_disk:
        return None
    if offload_dir is None:
        raise StrategyError(
            f"{first_names([tied.slots[0].name for tied in to_disk])} go to disk, but no directory is given",
            fix="pass offload_dir (offload_folder where a checkpoint is loaded)",
        )
    return write_weights(
        offload_dir, {tied.slots[0].name: tied.tensor.detach() for tied in to_disk}
    )


def _move_to_devices(move: _Move) -> None:
    """Put a tensor on its devices; the parameter stays the same object if possible."""
    tensor = move.tied.tensor
    content = tensor.detach()
    for index, (device, slots) in enumerate(move.resident.items()):
        if move.origin is not None and device.type != "meta":
            content = read_one(*move.origin, device).to(tensor.dtype)
        moved = content.to(device)
        # An optimizer that was created before holds the parameter by identity, so the first device keeps the object.
        # torch refuses to assign `data` between the meta device and a real one.
        if index == 0 and is_meta(tensor) == is_meta(moved):
            tensor.data = moved
            resident = tensor
        else:
            resident = parameter_like(tensor, moved)
        for slot in slots:
            put(slot.module, slot.key, resident)


def _offload(move: _Move, places: Places, written: OnDisk | None) -> OffloadedTensor:
    """Return the record of a tensor that its layers borrow; in host memory, or in files and on the meta device."""
    tensor = move.tied.tensor
    name = move.tied.slots[0].name
    if not _belongs_on_disk(move.tied, places):
        if move.origin is not None:
            weights, name = move.origin
            content = weights[name].to(device="cpu", dtype=tensor.dtype)
            tensor = parameter_like(tensor, content)
        elif tensor.device.type != "cpu":
            tensor = parameter_like(tensor, tensor.detach().to("cpu"))
        return OffloadedTensor(tensor, None, name, tensor.requires_grad)
    files: Any = written
    # A meta tensor is read in place, from the file where it is already: a checkpoint is never copied to offload_dir.
    if move.origin is not None:
        files, name = move.origin
    if not is_meta(tensor):
        tensor = parameter_like(tensor, tensor.detach().to("meta"))
    return OffloadedTensor(tensor, files, name, tensor.requires_grad)


def _attach(
    model: nn.Module,
    places: Places,
    offloaded: list[tuple[OffloadedTensor, list[Slot]]],
    skip: Collection[str],
    preload: Collection[str],
    device_map: Mapping[str, int | str],
    several: bool,
) -> None:
    description = _describe_device_map(device_map)
    hooks = ModelHooks([tensor for tensor, _ in offloaded], description, skip)
    # One lock for all layers: a tensor that several of them share has one count of borrowers.
    lock = Lock()
    dispatched = Dispatched(offloaded, hooks)
    by_module: dict[str, list[tuple[nn.Module, str, OffloadedTensor]]] = {}
    for tensor, slots in offloaded:
        for slot in slots:
            loader = _find_loader(model, slot.path, preload)
            entry = (slot.module, slot.key, tensor)
            by_module.setdefault(loader, []).append(entry)
    modules = dict(model.named_modules(remove_duplicate=False))
    hooked = {"", *by_module}
    # Layers that keep their weights need hooks only where inputs may come from another device.
    if several:
        hooked.update(name for name in device_map if name in modules)
    for name in sorted(hooked, key=lambda name: name.count(".")):
        device = _computing_device(name, modules[name], places)
        layer_hooks = LayerHooks(name, device, by_module.get(name, []), skip, lock)
        dispatched.hook(modules[name], layer_hooks)
    # Registered last, so that it runs first: it must see the inputs on the caller's device to return outputs there.
    dispatched.hook(model, hooks)
    dispatched.guard(model)
    for _, slots in offloaded:
        for slot in slots:
            dispatched.guard(modules[slot.path])
    _guard_states(dispatched, offloaded)
    model.__dict__[_DISPATCHED] = dispatched


def _describe_device_map(device_map: Mapping[str, int | str]) -> str:
    names_on: dict[int | str, list[str]] = {}
    for name, device in device_map.items():
        names_on.setdefault(device, []).append(name or "everything")
    return ", ".join(
        f"{first_names(names)} on {device}" for device, names in names_on.items()
    )


def _find_loader(model: nn.Module, path: str, preload: Collection[str]) -> str:
    """Return the name of the module whose forward loads the tensors of ``path``: itself, or a preloaded parent."""
    # `"".split(".")` is not empty: the path of the model itself has no parts.
    parts = path.split(".")
    if not path:
        parts = []
    # From the outside in: with nested preloaded classes, the outermost forward is the first to use the weights.
    for count in range(len(parts) + 1):
        name = ".".join(parts[:count])
        if type(model.get_submodule(name)).__name__ in preload:
            return name
    return path


def _computing_device(name: str, module: nn.Module, places: Places) -> torch.device:
    if not name:
        return resolve_device(places.main)
    keys = [*direct_parameters(module), *direct_buffers(module)]
    # A map may name the tensors of a split module only, and not the module.
    if keys:
        return places.runs_on(join_names(name, keys[0]))
    return places.runs_on(name)


def _guard_states(
    dispatched: Dispatched, offloaded: list[tuple[OffloadedTensor, list[Slot]]]
) -> None:
    """Make ``state_dict`` read weights from disk, and ``load_state_dict`` refuse them; host memory needs neither."""
    # Grouped by module, by id: a module may be visited under several names, and must get each hook once.
    on_disk: dict[int, tuple[nn.Module, dict[str, OffloadedTensor]]] = {}
    for tensor, slots in offloaded:
        if tensor.source is None:
            continue
        for slot in slots:
            _, by_key = on_disk.setdefault(id(slot.module), (slot.module, {}))
            by_key[slot.key] = tensor
    for module, tensors in on_disk.values():
        # torch does not type these two methods.
        hooked: Any = module
        dispatched.handles.append(
            hooked.register_state_dict_post_hook(partial(_read_state, tensors))
        )
        dispatched.handles.append(
            hooked.register_load_state_dict_pre_hook(dispatched.hooks.refuse_loading)
        )


@final
@dataclass(frozen=True)
class Slot:
    """One position of a tensor in a module.

    Attributes:
        path: the module's name in the model.
        module: the module.
        key: the name of the parameter or buffer in the module.
    """

    path: str
    module: nn.Module
    key: str

    @property
    def name(self) -> str:
        """The tensor's name in the model."""
        return join_names(self.path, self.key)


@final
@dataclass(frozen=True, eq=False)
class Tied:
    """A tensor and its slots; several slots share a tied tensor.

    Attributes:
        tensor: a parameter or buffer.
        slots: in the order of modules.
        persistent: whether a state_dict contains it.
    """

    tensor: Tensor
    slots: list[Slot] = field(default_factory=list)
    persistent: bool = True

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer, not a parameter."""
        return self.slots[0].key in direct_buffers(self.slots[0].module)


def find_tied(model: nn.Module) -> list[Tied]:
    """Return every parameter and buffer once."""
    by_id: dict[int, Tied] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        tensors = [*direct_parameters(module).items(), *direct_buffers(module).items()]
        transient = transient_buffers(module)
        for key, tensor in tensors:
            if tensor is None:
                continue
            new = Tied(tensor, [], persistent=key not in transient)
            tied = by_id.setdefault(id(tensor), new)
            tied.slots.append(Slot(path, module, key))
    return list(by_id.values())


def first_names(names: Collection[str]) -> str:
    """Shorten a list of names for a message.

    Example:
        >>> first_names(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    shown = sorted(names)[:3]
    omitted = len(names) - len(shown)
    text = ", ".join(shown)
    if omitted:
        return f"{text} and {omitted} more"
    return text


def check_device_map(
    model: nn.Module, device_map: Mapping[str, Device]
) -> dict[str, int | str]:
    """Return the device map with normalized devices (see `name_of`).

    Raises:
        StrategyError: the map is empty, or has no device for a tensor.
    """
    model_names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    devices = {name: name_of(device) for name, device in device_map.items()}
    placement = Places(devices, None)
    missing = []
    for tied in find_tied(model):
        names = [slot.name for slot in tied.slots]
        model_names.update(names)
        # Buffers that no state_dict contains are often computed in the constructor and absent from a map that was
        # made from a checkpoint: they are on the main device.
        if tied.persistent:
            missing += [name for name in names if not placement.covers(name)]
    unknown = [name for name in devices if name not in model_names]
    hint = ""
    if unknown:
        suggestion = did_you_mean(unknown[0], model_names)
        hint = f"; {unknown[0]!r} is not a module: {suggestion}"
    if missing or not devices:
        raise StrategyError(
            f"the device map has no device for {first_names(missing) or 'anything'}",
            found=f"devices for {first_names(list(devices)) or 'nothing'}",
            fix=f"list every module or one of its parents, or '' for the rest{hint}",
        )
    if unknown:
        warnings.warn(
            f"the device map has names that are not in the model: {first_names(unknown)}{hint}",
            stacklevel=4,
        )
    return devices


@final
class Places:
    """A device map, and the device that runs offloaded layers.

    Args:
        device_map: from `check_device_map`.
        main: the device that runs offloaded layers; None: the first accelerator of the map, or the CPU.
    """

    def __init__(
        self, device_map: Mapping[str, int | str], main: Device | None
    ) -> None:
        self._map = dict(device_map)
        used: Sequence[int | str] = accelerators(self._map.values())
        self.main: int | str = "cpu"
        if main is not None:
            self.main = name_of(main)
        elif used:
            self.main = used[0]

    def covers(self, name: str) -> bool:
        """Whether the map has a device for a module or tensor."""
        return any(key in self._map for key in _above(name))

    def device_of(self, name: str) -> int | str:
        """Return the device of a module or tensor: that of the innermost module in the map that contains it."""
        return next(
            (self._map[key] for key in _above(name) if key in self._map), self.main
        )

    def is_away(self, name: str) -> bool:
        """Whether a module or tensor is offloaded: on disk, or in host memory while an accelerator computes."""
        device = self.device_of(name)
        return device == "disk" or (device == "cpu" and self.main != "cpu")

    def runs_on(self, name: str) -> torch.device:
        """Return the device that computes with a module or tensor."""
        if self.is_away(name):
            return resolve_device(self.main)
        return resolve_device(self.device_of(name))


def _above(name: str) -> Iterator[str]:
    """Yield a name and the names of its parent modules, innermost first; ``""`` is the model."""
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
    """Move each part of a model to the device of a device map; the model then runs like a model on one device.

    Inputs are moved to the device of the layer that uses them, and outputs to the device of the model's input. Weights
    in host memory or on disk are copied to an accelerator (or the CPU) while their layer runs. They cannot be trained:
    a backward through the model is refused, unless all offloaded weights were frozen before. A model can be dispatched
    again with another map; ``{"": "cpu"}`` moves everything into host memory.

    Args:
        model: with its weights; or on the meta device, with weights from one of the next arguments.
        device_map: by name of a module or tensor: a number, ``"cpu"``, ``"disk"``, or torch's name of a device.
        main_device: the device that runs offloaded layers; None: the first accelerator of the map, or the CPU.
        state_dict: weights by name, for meta tensors.
        offload_dir: the directory for weights that go to disk; or a checkpoint, which is read in place. A written file
            is deleted when no model uses it.
        offload_index: by name: ``{"safetensors_file": ..., "weight_name": ...}``.
        offload_buffers: offload the buffers of offloaded layers too; updates of them in a forward are lost.
        skip_keys: names of keyword arguments and of outputs in a mapping, such as a cache, that are not moved.
        preload_module_classes: names of classes whose modules use the weights of their layers without calling them.
        force_hooks: move inputs and outputs even if the map has a single device.

    Returns:
        ``model``; its ``hf_device_map`` is the map.

    Raises:
        StrategyError: the map does not cover the model or names an absent device; a meta tensor has no known content;
            or a directory for weights that go to disk is missing.

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
    placement = Places(devices, main_device)
    source = _sources(model, state_dict, offload_index, offload_dir)
    moves = [
        _plan_move(tied, placement, source, offload_buffers)
        for tied in find_tied(model)
    ]
    # Resolved before anything moves: a map with an absent device raises while the model is still intact.
    computing = {
        resolve_device(placement.main),
        *(placement.runs_on(name) for name in devices),
    }
    offloaded = _move_all(model, moves, placement, offload_dir)
    # With everything on one device that computes, the model runs without hooks, at no cost.
    if several or force_hooks or placement.is_away(next(iter(devices))):
        skip = skip_keys or ()
        if isinstance(skip, str):
            skip = [skip]
        preloaded = {*(preload_module_classes or ()), *_PRELOADED}
        _attach(
            model,
            placement,
            offloaded,
            skip,
            preloaded,
            devices,
            several=len(computing) > 1,
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
    """Keep all parameters in host memory, and copy those of each layer to a device while it runs.

    Args:
        model: on any device.
        execution_device: the computing device; None: that of the first parameter.
        offload_buffers: offload buffers too.
        state_dict: weights by name, for meta tensors.
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
    """Keep all parameters on disk, and read those of each layer to a device while it runs.

    Args:
        model: with its weights, which are written to ``offload_dir``; or on the meta device: then ``offload_dir`` is a
            checkpoint, which is read in place.
        offload_dir: a directory.
        execution_device: the computing device; None: that of the first parameter, or the CPU for a meta tensor.
        offload_buffers: offload buffers too.
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
    if first is None or is_meta(first):
        return "cpu"
    return str(first.device)


def _sources(
    model: nn.Module,
    state_dict: Mapping[str, Tensor] | None,
    index: Mapping[str, Mapping[str, str]] | None,
    offload_dir: str | os.PathLike[str] | None,
) -> _Source:
    """Return the origins of meta tensors: given weights, else files of an earlier dispatch, else ``offload_dir``."""
    recorded = _recorded_origins(model)
    caller_weights = dict(state_dict or {})
    files: dict[str, OnDisk | dict[str, Tensor]] = {}
    without_origin = False
    for tied in find_tied(model):
        if is_meta(tied.tensor):
            origins = [recorded(slot.name) for slot in tied.slots]
            without_origin = without_origin or None in origins
    folder: Mapping[str, Tensor] = {}
    # The directory has two uses: a checkpoint to read in place, or an empty target for what goes to disk. It is opened
    # only where a tensor lacks content, so that files of other models in a target directory are not looked at.
    if without_origin and offload_dir is not None and os.path.isdir(offload_dir):
        try:
            folder = open_weights(offload_dir)
        except CheckpointError:
            # Files of weights that cannot be opened are a damaged checkpoint; no such files are a target directory.
            if any(
                name.endswith((".safetensors", ".json"))
                for name in os.listdir(offload_dir)
            ):
                raise

    def find(name: str) -> _Origin | None:
        if name in caller_weights:
            return caller_weights, name
        if index is not None and name in index:
            entry = index[name]
            if "safetensors_file" not in entry:
                raise StrategyError(
                    f"the offload_index has no safetensors_file for {name}",
                    found=str(dict(entry)),
                    fix="offload to safetensors files, or name the checkpoint as offload_dir",
                )
            file = entry["safetensors_file"]
            weights = files.setdefault(file, open_weights(file))
            return weights, entry.get("weight_name", name)
        origin = recorded(name)
        if origin is None and name in folder:
            origin = (folder, name)
        return origin

    return find


@final
class UserCpuOffloadHook:
    """The hook of `cpu_offload_with_hook`; ``offload()`` moves the model to host memory.

    Args:
        model: the model; a call moves it to ``device``.
        device: the computing device.
        previous: the hook of the model to offload first, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        previous: UserCpuOffloadHook | None,
    ) -> None:
        self.model = model
        self.device = device
        self.previous = previous
        self._handle: RemovableHandle = model.register_forward_pre_hook(
            self._before, with_kwargs=True
        )

    def _before(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        # The previous model leaves first: the device may not have room for both.
        if self.previous is not None:
            self.previous.offload()
        self.model.to(self.device)
        return move_to_device(args, self.device), move_to_device(kwargs, self.device)

    def offload(self) -> None:
        """Move the model to host memory."""
        self.model.to("cpu")

    def remove(self) -> None:
        """Remove the hook; the model stays on its current device."""
        self._handle.remove()


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Move a whole model to a device when it is called, and keep it there until its hook offloads it.

    This is for pipelines of several models, each of which runs many times in a row.

    Args:
        model: it is moved to host memory.
        execution_device: the computing device; None: the accelerator, or the CPU if there is none.
        prev_module_hook: the hook of the model that is offloaded when this model is called.

    Example:
        >>> first, hook = cpu_offload_with_hook(nn.Linear(2, 3), "cpu")
        >>> second, other = cpu_offload_with_hook(nn.Linear(3, 1), "cpu", prev_module_hook=hook)
        >>> second(first(torch.ones(1, 2))).shape
        torch.Size([1, 1])
        >>> other.offload()
    """
    if execution_device is None:
        execution_device = "cpu"
        if present_accelerator() is not None:
            execution_device = 0
    hook = UserCpuOffloadHook(model, resolve_device(execution_device), prev_module_hook)
    hook.offload()
    return model, hook
