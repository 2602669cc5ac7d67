"""Create models without memory, and load checkpoints into them one tensor at a time."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from trainer_kit.core.errors import CheckpointError, ConfigurationError, did_you_mean
from trainer_kit.core.state_names import state_name
from trainer_kit.core.torch_private import EXTRA_STATE
from trainer_kit.inference.device_map import (
    Device,
    resolve_device,
    resolve_device_map,
    resolve_dtype,
)
from trainer_kit.inference.dispatch import (
    Places,
    Tied,
    check_device_map,
    dispatch_model,
    find_tied,
    first_names,
    note_sources,
    parameter_like,
)
from trainer_kit.inference.lazy_weights import (
    Lazy,
    OnDisk,
    have_equal_content,
    open_weights,
    read_one,
    tensor_like,
    write_weights,
)
from trainer_kit.inference.offload_hooks import is_meta, put

__all__ = [
    "DtypeOf",
    "Entry",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_weights",
    "match_weights",
    "pick_dtype",
]

DtypeOf: TypeAlias = "Callable[[str, Tensor], torch.dtype]"
"""Returns the dtype in which a tensor is loaded, from its name and the model's tensor."""

_FILE: Final = 256 << 20
"""Bytes of weights that are in memory at once while they are written to `offload_folder`, and the size of a file."""


@final
@dataclass(frozen=True)
class Entry:
    """A tensor of a model, and its name in a checkpoint.

    Attributes:
        tied: the tensor of the model.
        name: its name in the checkpoint.
    """

    tied: Tied
    name: str


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Collection[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint, each tensor directly to its device in the device map.

    Memory never holds more than one tensor besides those that stay there. Tensors that the map has on disk are not
    loaded: safetensors and our checkpoints are read in place later, without a copy; if a file has changed by then, the
    forward that needs it raises an error. A model on several devices needs `dispatch_model` to run;
    `load_checkpoint_and_dispatch` does both.

    Args:
        model: real, or on the meta device. A shared weight is found under any of its names.
        checkpoint: a checkpoint of ours; a safetensors file, a directory of such files, or its index; a ``torch.save``
            file of a state_dict, which is read with ``weights_only=True``, or an index of such files.
        device_map: a device by name of a module. None: the current device of each tensor; for meta tensors the CPU.
        offload_folder: for weights that go to disk and are in no safetensors file.
        dtype: of all floating-point tensors; None: that of the model.
        offload_state_dict: without effect: loading never creates a second copy.
        offload_buffers: buffers of layers on disk stay on disk.
        keep_in_fp32_modules: names of modules whose weights are loaded as float32, whatever ``dtype`` is.
        offload_8bit_bnb: refused; use `load_and_quantize_model`.
        strict: refuse weights that are missing in the checkpoint or in the model.
        full_state_dict: False is refused; the tensors of the model must be whole.
        broadcast_from_rank0: True is refused.

    Raises:
        CheckpointError: before anything is loaded: the checkpoint is damaged, or has other shapes; it lacks the content
            of a meta tensor; it has two different tensors for a shared weight; or, with ``strict``, names differ.
        StrategyError: as from `dispatch_model`.

    Example:
        >>> import tempfile
        >>> from trainer_kit import init_empty_weights
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     torch.save(nn.Linear(2, 3).state_dict(), f"{directory}/weights.bin")
        ...     with init_empty_weights():
        ...         layer = nn.Linear(2, 3)
        ...     load_checkpoint_in_model(layer, f"{directory}/weights.bin", dtype="float16")
        >>> layer.weight.dtype, layer.weight.device.type
        (torch.float16, 'cpu')
    """
    _refuse(full_state_dict, broadcast_from_rank0, offload_8bit_bnb)
    devices = None
    if device_map is not None:
        devices = check_device_map(model, device_map)
    load_weights(
        model,
        open_weights(checkpoint),
        str(checkpoint),
        devices,
        pick_dtype(dtype, keep_in_fp32_modules),
        offload_folder=offload_folder,
        offload_buffers=offload_buffers,
        strict=strict,
    )


def load_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    checkpoint: str,
    devices: Mapping[str, int | str] | None,
    dtype_of: DtypeOf,
    *,
    offload_folder: str | os.PathLike[str] | None,
    offload_buffers: bool = False,
    strict: bool = False,
) -> None:
    """Like `load_checkpoint_in_model`, from opened weights.

    Args:
        model: the model to load into.
        weights: from `open_weights`, or made from these.
        checkpoint: the name of the checkpoint, for messages.
        devices: from `check_device_map`, or None.
        dtype_of: the dtype of each tensor.
        offload_folder: for weights that go to disk and cannot be read from the checkpoint again.
        offload_buffers: buffers of layers on disk stay on disk.
        strict: refuse different names.
    """
    placement = None
    if devices is not None:
        placement = Places(devices, None)
    # Both refusals come before the first tensor is loaded: after an error the model is unchanged.
    entries = match_weights(model, weights, checkpoint, strict)
    on_disk = []
    in_memory = []
    for entry in entries:
        if placement and _stays_on_disk(entry.tied, placement, offload_buffers):
            on_disk.append(entry)
        else:
            in_memory.append(entry)
    if on_disk and not isinstance(weights, OnDisk) and offload_folder is None:
        raise ConfigurationError(
            f"{first_names([entry.name for entry in on_disk])} go to disk, "
            "and cannot be read from the checkpoint again",
            found=f"{checkpoint}: no safetensors file, or its weights are quantized",
            fix="pass a directory for them as offload_folder",
        )
    for entry in in_memory:
        _load(entry, weights, placement, dtype_of)
    # Files that can be read again are left where they are. Other weights (of `torch.save` files, or quantized ones) are
    # computed and written group by group, so that memory never holds all of them.
    groups = [on_disk]
    if not isinstance(weights, OnDisk):
        groups = _group_by_size(on_disk)
    origins: dict[str, tuple[OnDisk, str]] = {}
    for group in groups:
        source = weights
        if not isinstance(source, OnDisk):
            source = write_weights(
                str(offload_folder),
                {entry.name: weights[entry.name] for entry in group},
            )
        for entry in group:
            _leave_on_disk(entry.tied, dtype_of)
            for slot in entry.tied.slots:
                origins[slot.name] = (source, entry.name)
    if origins:
        note_sources(model, origins)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model that may be larger than memory, and dispatch the model so that it runs.

    Args:
        model: usually from `init_empty_weights`.
        checkpoint: as for `load_checkpoint_in_model`.
        device_map: a device by name of a module; or ``"auto"``, ``"balanced"``, ``"balanced_low_0"`` or
            ``"sequential"``. None: the current device of each tensor; for meta tensors the CPU.
        max_memory: as for `infer_auto_device_map`.
        no_split_module_classes: as for `infer_auto_device_map`.
        offload_folder: for weights that go to disk and are in no safetensors file.
        offload_buffers: as for `dispatch_model`.
        dtype: of all floating-point tensors; None: that of the model.
        offload_state_dict: without effect: loading never creates a second copy.
        skip_keys: as for `dispatch_model`.
        preload_module_classes: as for `dispatch_model`.
        force_hooks: as for `dispatch_model`.
        strict: refuse weights that are missing in the checkpoint or in the model.
        full_state_dict: False is refused; the tensors of the model must be whole.
        broadcast_from_rank0: True is refused.

    Returns:
        ``model``; its ``hf_device_map`` is the device map.

    Raises:
        CheckpointError: as from `load_checkpoint_in_model`.
        StrategyError: as from `infer_auto_device_map` and `dispatch_model`.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> from trainer_kit import init_empty_weights
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_file(nn.Linear(2, 3).state_dict(), f"{directory}/model.safetensors")
        ...     with init_empty_weights():
        ...         layer = nn.Linear(2, 3)
        ...     _ = load_checkpoint_and_dispatch(layer, directory, device_map={"": "disk"})
        ...     layer(torch.ones(1, 2)).shape
        torch.Size([1, 3])
    """
    devices: dict[str, Device] | None = None
    # Resolved once, for the loading and for the dispatch: "auto" measures free memory, which loading changes.
    if device_map is not None:
        devices = resolve_device_map(
            model,
            device_map,
            max_memory,
            no_split_module_classes,
            dtype,
            offload_buffers,
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        devices,
        offload_folder,
        dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    # Without a map each tensor stays where it was, and the model runs without hooks.
    if devices is None:
        return model
    return dispatch_model(
        model,
        devices,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _refuse(
    full_state_dict: bool, broadcast_from_rank0: bool, offload_8bit_bnb: bool
) -> None:
    for name, requested, fix in (
        (
            "full_state_dict=False",
            not full_state_dict,
            "load a sharded model through an Accelerator or a Trainer",
        ),
        (
            "broadcast_from_rank0=True",
            broadcast_from_rank0,
            "load on every rank: files in the page cache are shared",
        ),
        ("offload_8bit_bnb=True", offload_8bit_bnb, "use load_and_quantize_model"),
    ):
        if requested:
            raise ConfigurationError(f"load_checkpoint_in_model has no {name}", fix=fix)


def pick_dtype(
    dtype: str | torch.dtype | None, keep_in_fp32_modules: Collection[str] | None = None
) -> DtypeOf:
    """Return a function that picks the dtype in which a tensor is loaded.

    Example:
        >>> pick = pick_dtype("bfloat16", ["norm"])
        >>> x = torch.zeros(1)
        >>> pick("norm.weight", x), pick("head.weight", x), pick("count", torch.tensor(1))
        (torch.float32, torch.bfloat16, torch.int64)
    """
    wanted: torch.dtype | None = None
    if dtype is not None:
        wanted = resolve_dtype(dtype)
    exact = set(keep_in_fp32_modules or ())

    def pick(name: str, tensor: Tensor) -> torch.dtype:
        # Indices and counters would lose values in a floating-point dtype.
        if not tensor.is_floating_point():
            return tensor.dtype
        # The last component is the parameter; the others are the modules that contain it.
        if exact.intersection(name.split(".")[:-1]):
            return torch.float32
        return wanted or tensor.dtype

    return pick


def match_weights(
    model: nn.Module, weights: Mapping[str, Tensor], checkpoint: object, strict: bool
) -> list[Entry]:
    """Return the tensors of a model that are in a checkpoint, in the model's order.

    Raises:
        CheckpointError: shapes differ; the content of a meta tensor is missing; with ``strict``, names differ; no name
            is equal; or two different tensors are stored for a shared weight.
    """
    tensors = find_tied(model)
    entries = []
    missing = []
    # Either side may be a compiled model, whose names have `_orig_mod.` in them: names are compared without it.
    stored = {state_name(name): name for name in weights}
    used: set[str] = set()
    for tied in tensors:
        # Checkpoints usually store a shared tensor once, and which of its names they use depends on the writer.
        plain_names = [state_name(slot.name) for slot in tied.slots]
        used.update(plain_names)
        names = [stored[name] for name in plain_names if name in stored]
        if names:
            entries.append(Entry(tied, names[0]))
        elif tied.persistent:
            missing.append(tied)
    unexpected = [
        name
        for name in weights
        if state_name(name) not in used and not name.endswith(EXTRA_STATE)
    ]
    _refuse_different_shapes(entries, weights, checkpoint)
    _refuse_different_copies(entries, weights, checkpoint)
    # Real tensors may stay as they were initialized, for example a new head; a meta tensor has nothing to stay with,
    # and a checkpoint without one equal name belongs to another model.
    lost = missing
    if entries and not strict:
        lost = [tied for tied in missing if is_meta(tied.tensor)]
    refused = bool(lost or (strict and unexpected))
    if refused:
        missing = lost
    names = [tied.slots[0].name for tied in missing]
    differences = []
    if names:
        differences.append(f"lacks {first_names(names)}")
    if unexpected:
        differences.append(
            f"has {first_names(unexpected)}, which the model does not have"
        )
    if refused:
        near = ""
        if names and unexpected:
            near = f" ({names[0]!r}: {did_you_mean(names[0], unexpected)})"
        raise CheckpointError(
            checkpoint,
            [*names, *unexpected][0],
            f"the checkpoint {', and '.join(differences)}",
            fix="build the model as it was when the checkpoint was saved; if it shares weights, tie them first: "
            f"model.tie_weights(){near}",
        )
    if differences:
        warnings.warn(
            f"{checkpoint} {', and '.join(differences)}; strict=True makes this an error",
            stacklevel=3,
        )
    return entries


def _refuse_different_shapes(
    entries: Iterable[Entry], weights: Mapping[str, Tensor], checkpoint: object
) -> None:
    """Compare shapes without reading (`tensor_like`), before anything is loaded."""
    for entry in entries:
        stored_shape = list(tensor_like(weights, entry.name).shape)
        wanted = list(entry.tied.tensor.shape)
        if stored_shape != wanted:
            reason = f"{stored_shape} in the checkpoint, and the model has {wanted}"
            raise CheckpointError(
                checkpoint,
                entry.name,
                reason,
                fix="build the model as it was when the checkpoint was saved",
            )


def _refuse_different_copies(
    entries: Iterable[Entry], weights: Mapping[str, Tensor], checkpoint: object
) -> None:
    """Refuse a checkpoint with two different tensors for one shared weight: one of them would be dropped silently."""
    for entry in entries:
        for other in dict.fromkeys(slot.name for slot in entry.tied.slots):
            if other == entry.name or other not in weights:
                continue
            if not have_equal_content(weights, entry.name, other):
                raise CheckpointError(
                    checkpoint,
                    other,
                    f"it differs from {entry.name!r}, but in the model both are one tensor",
                    fix="build the model without this tie (transformers: tie_word_embeddings=False), "
                    "or remove the unused tensor from the checkpoint",
                )


def _stays_on_disk(tied: Tied, places: Places, offload_buffers: bool) -> bool:
    # The same conditions as in `dispatch_model`: what it keeps on a device must be loaded here.
    stays = tied.is_buffer and not (offload_buffers and tied.persistent)
    return not stays and all(
        places.device_of(slot.name) == "disk" for slot in tied.slots
    )


def _load(
    entry: Entry,
    weights: Mapping[str, Tensor],
    places: Places | None,
    dtype_of: DtypeOf,
) -> None:
    tied = entry.tied
    dtype = dtype_of(tied.slots[0].name, tied.tensor)
    device = tied.tensor.device
    if is_meta(tied.tensor):
        device = torch.device("cpu")
    if places is not None:
        # Load to the first device that is not the disk; a later dispatch copies the tensor to the other devices.
        devices = [places.device_of(slot.name) for slot in tied.slots]
        in_memory = [device for device in devices if device != "disk"]
        device = resolve_device([*in_memory, "cpu"][0])
    # A tensor of a mapped file must not outlive the file: always copy it.
    content = read_one(weights, entry.name, device).to(
        device, dtype, copy=not isinstance(weights, Lazy)
    )
    # Keep the parameter object where possible: ties and optimizers hold it by identity. torch refuses to assign `data`
    # between the meta device and a real one.
    if is_meta(tied.tensor) == is_meta(content) and tied.tensor.dtype == content.dtype:
        tied.tensor.data = content
        return
    parameter = parameter_like(tied.tensor, content)
    for slot in tied.slots:
        put(slot.module, slot.key, parameter)


def _leave_on_disk(tied: Tied, dtype_of: DtypeOf) -> None:
    """Put a meta tensor, in the dtype of the forward, into the model for a tensor whose content stays on disk."""
    dtype = dtype_of(tied.slots[0].name, tied.tensor)
    empty = torch.empty(tied.tensor.shape, dtype=dtype, device="meta")
    parameter = parameter_like(tied.tensor, empty)
    for slot in tied.slots:
        put(slot.module, slot.key, parameter)


def _group_by_size(entries: list[Entry]) -> list[list[Entry]]:
    """Split weights into groups that are small enough for memory, each for one file."""
    groups: list[list[Entry]] = []
    # Full at the start, so that the first entry opens a group. A tensor larger than a file has a group of its own.
    filled = _FILE
    for entry in entries:
        size = entry.tied.tensor.nbytes
        if filled + size > _FILE:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    return groups


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Make the parameters of new modules on the meta device: with shapes and dtypes, and without memory.

    Shared parameters stay shared. Other threads are not affected.

    Args:
        include_buffers: buffers too. By default they are real: most are computed, and are in no checkpoint.

    Example:
        >>> with init_empty_weights():
        ...     layer = nn.Linear(20_000, 20_000)  # 1.6 GB
        >>> layer.weight.device.type, nn.Linear(2, 2).weight.device.type
        ('meta', 'cpu')
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool = False
) -> Iterator[None]:
    """Move the parameters of new modules to ``device``, each as soon as it is registered.

    Args:
        device: the device.
        include_buffers: buffers too; then all tensors are created on ``device`` directly.

    Example:
        >>> with init_on_device("meta", include_buffers=True):
        ...     norm = nn.BatchNorm1d(3)
        >>> norm.running_mean.device.type
        'meta'
    """
    device = torch.device(device)
    thread = threading.get_ident()
    # Keeps tensors that are registered twice (tied weights) shared. Weak: it must not hold the real tensors in memory,
    # which would defeat the purpose; by identity, because tensors compare element by element.
    moved: Any = WeakIdKeyDictionary()

    # torch annotates these hooks as returning nothing, although it registers the tensor that they return.
    def move(module: nn.Module, name: str, tensor: Tensor | None) -> Any:
        if tensor is None or tensor.device == device:
            return None
        # torch's hooks are global: other threads may create real modules meanwhile. A lazy parameter has no shape yet;
        # it would lose its class.
        if threading.get_ident() != thread or is_lazy(tensor):
            return None
        if tensor not in moved:
            moved[tensor] = parameter_like(tensor, tensor.detach().to(device))
        return moved[tensor]

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(move).remove)
        if include_buffers:
            stack.callback(register_module_buffer_registration_hook(move).remove)
            stack.enter_context(device)
        yield
