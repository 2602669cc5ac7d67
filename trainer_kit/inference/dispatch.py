"""Running a model whose layers are on several devices, in the host's memory, or on disk."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer_kit.core.devices import present_accelerator
from trainer_kit.core.errors import CheckpointError, StrategyError
from trainer_kit.core.move import move_to_device
from trainer_kit.inference.budget import Device, name_of, resolve_device
from trainer_kit.inference.checkpoints import OnDisk, open_weights
from trainer_kit.inference.offload_hooks import is_meta
from trainer_kit.inference.placement import Places, check_device_map, find_tied
from trainer_kit.inference.spread import Source, sources_of, spread

__all__ = ["UserCpuOffloadHook", "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model"]


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
