"""Accelerate's functions for module tensors, hooks around a forward, and weights in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainer_kit.checkpoint.weights import read_weights
from trainer_kit.compat.accelerate_utilities import find_device, send_to_device
from trainer_kit.core.devices import present_accelerator
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.torch_private import (
    direct_buffers,
    direct_parameters,
    transient_buffers,
)
from trainer_kit.core.types import Batch, JsonObject, Keywords, SavedState, StateDict
from trainer_kit.inference.device_map import compute_module_sizes, resolve_dtype
from trainer_kit.inference.dispatch import find_tied, parameter_like, undo_dispatch
from trainer_kit.inference.offload_hooks import put

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "SequentialHook",
    "add_hook_to_module",
    "align_module_device",
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_max_layer_size",
    "has_offloaded_params",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "retie_parameters",
    "save_offload_index",
    "set_module_tensor_to_device",
]

# torch returns a handle for each registered hook. They are kept on the module itself, so that another call can remove
# them.
_HANDLES: Final = "_hf_hook_handles"
_NamedMembers: TypeAlias = list[tuple[str, nn.Module | Tensor]]


# -- tensors of modules ------------------------------------------------------------------------------------------------


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a module's parameters and buffers.

    Args:
        module: the module.
        include_buffers: include buffers.
        recurse: include submodules.
        remove_non_persistent: leave out buffers that are not in the state dict.

    Example:
        >>> [name for name, _ in named_module_tensors(nn.BatchNorm1d(2))]
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    for name, buffer in module.named_buffers(recurse=recurse):
        # Only the module that owns a buffer knows whether it is persistent.
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        if remove_non_persistent and key in transient_buffers(owner):
            continue
        yield name, buffer


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | Sequence[float] | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: object = None,
    tied_params_map: object = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer to a device, or replace its value.

    Args:
        module: the module that contains the tensor, directly or in a submodule.
        tensor_name: a name such as ``"layers.0.weight"``.
        device: the target device.
        value: the new value; None keeps the current one.
        dtype: the dtype of floating-point values; by default the tensor's.
        fp16_statistics: refused; `load_and_quantize_model` keeps the statistics.
        tied_params_map: accepted; tie parameters with `retie_parameters`.
        non_blocking: do not wait for copies to an accelerator.
        clear_cache: accepted; torch's allocator reuses freed memory.

    Raises:
        ConfigurationError: the tensor does not exist, has a different shape, or has no values.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> set_module_tensor_to_device(layer, "bias", "cpu", torch.tensor([3.0]))
        >>> layer.bias
        Parameter containing:
        tensor([3.], requires_grad=True)
    """
    if fp16_statistics is not None:
        raise ConfigurationError(
            "load_and_quantize_model creates 8-bit layers", found="fp16_statistics=..."
        )
    path, _, key = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise ConfigurationError(
            f"the module {path!r} does not exist", found=str(error)
        ) from error
    # The dicts and not getattr: an attribute of the same name may be a method or a submodule.
    current = direct_parameters(owner).get(key, direct_buffers(owner).get(key))
    if current is None:
        raise ConfigurationError(
            f"the module has no parameter or buffer {tensor_name!r}",
            found=type(module).__name__,
        )
    target = torch.device(device)
    tensor = current.detach()
    if value is not None:
        tensor = torch.as_tensor(value)
    if tensor.shape != current.shape:
        raise ConfigurationError(
            f"the value of {tensor_name} has a different shape",
            found=f"{list(tensor.shape)}, not {list(current.shape)}",
        )
    # torch would raise NotImplementedError here ("Cannot copy out of meta tensor") without naming the tensor.
    if tensor.device.type == "meta" and target.type != "meta":
        raise ConfigurationError(
            f"{tensor_name} has no values",
            found="the meta device",
            fix="pass value=...",
        )
    # Without a dtype a new value takes that of the old one. With one, integers and booleans keep theirs: a position in
    # bfloat16 would be another value.
    if value is not None and dtype is None:
        tensor = tensor.to(current.dtype)
    elif dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(resolve_dtype(dtype))
    tensor = tensor.to(target, non_blocking=non_blocking)
    moved = tensor.dtype != current.dtype or tensor.device != current.device
    # An unchanged parameter stays the same object, since an optimizer may hold it.
    if value is not None or moved:
        put(owner, key, parameter_like(current, tensor))


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """Return the groups of names that refer to the same parameter.

    Example:
        >>> model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        >>> model["b"].weight = model["a"].weight
        >>> find_tied_parameters(model)
        [['a.weight', 'b.weight']]
    """
    groups = []
    for tied in find_tied(model):
        # As in Accelerate, whose result lists parameters only; `find_tied` also finds buffers.
        if not tied.is_buffer and len(tied.slots) > 1:
            groups.append(sorted(slot.name for slot in tied.slots))
    return groups


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie the names of each group to the first parameter in it that has values.

    Args:
        model: the model.
        tied_params: what `find_tied_parameters` returned before the parameters were moved.
    """
    for names in tied_params:
        parameters = [model.get_parameter(name) for name in names]
        # Only one of the names may have been loaded, the others stay on the meta device.
        with_values = [p for p in parameters if p.device.type != "meta"]
        if not with_values:
            continue
        for name in names:
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, with_values[0])


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the config of a transformers model ties parameters."""
    config: Any = getattr(model, "config", None)
    embeddings: Any = getattr(model, "get_output_embeddings", None)
    if config is None or embeddings is None:
        return False
    # A model of several modalities has the setting in the configuration of its decoder.
    text_config = config
    if hasattr(config, "get_text_config"):
        text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "tie_word_embeddings", False) and embeddings() is not None:
        return True
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if is_encoder_decoder and getattr(config, "tie_encoder_decoder", False):
        return True
    # A module of transformers that ties weights in its own way has this method, whatever the configuration says.
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]],
    device_map: Mapping[str, int | str | torch.device],
) -> None:
    """Refuse a device map that splits a tied parameter across devices.

    Raises:
        ConfigurationError: names of one parameter are on several devices.
    """
    for names in tied_params:
        devices = {
            name: next(
                device_map[key] for key in _list_paths(name) if key in device_map
            )
            for name in names
        }
        if len(set(devices.values())) > 1:
            raise ConfigurationError(
                "the device map puts a tied parameter on several devices",
                found=str(devices),
                fix='use device_map="auto"',
            )


def _list_paths(name: str) -> Iterator[str]:
    """Yield a name, and the modules around it from the inside out."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str],
) -> tuple[int, list[str]]:
    """The size of the largest layer, and the names of the layers of that size.

    Args:
        modules: names and modules or tensors.
        module_sizes: what `compute_module_sizes` returns.
        no_split_module_classes: classes whose objects count as one layer.
    """
    sizes: dict[str, int] = {}
    queue = list(reversed(modules))
    while queue:
        path, module = queue.pop()
        children: list[tuple[str, nn.Module]] = []
        if isinstance(module, nn.Module):
            children = list(module.named_children())
        if not children or type(module).__name__ in no_split_module_classes:
            sizes[path] = module_sizes.get(path, 0)
            continue
        # The queue is popped from its end: reversed twice, layers are listed in the order of the model.
        for name, child in reversed(children):
            queue.append((f"{path}.{name}", child))
    largest = max(sizes.values(), default=0)
    if not largest:
        return 0, []
    return largest, [path for path, size in sizes.items() if size == largest]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """The size of a model in bytes; the size of its largest layer, with the names of the layers of that size.

    Example:
        >>> calculate_maximum_sizes(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
        (84, (64, ['0']))
    """
    sizes = compute_module_sizes(model)
    members: _NamedMembers = []
    # Tensors of the root itself are layers of their own: no child's size includes them.
    members.extend(model.named_parameters(recurse=False))
    members.extend(model.named_children())
    members.extend(model.named_buffers(recurse=False))
    undivided = getattr(model, "_no_split_modules", None)
    largest = get_max_layer_size(members, sizes, undivided or [])
    total = sizes[""]
    return total, largest


def load_state_dict(
    checkpoint_file: str | os.PathLike[str],
    device_map: Mapping[str, int | str | torch.device] | None = None,
) -> StateDict:
    """Load the weights in a file, each to its device.

    Args:
        checkpoint_file: a safetensors file, or a ``torch.save`` file of tensors.
        device_map: devices by module name; unnamed modules, and ``"disk"``, are loaded to the CPU.

    Raises:
        CheckpointError: the file is neither, or is damaged.
    """
    weights = read_weights(checkpoint_file)
    if not device_map:
        return weights
    # The innermost module that the map names decides.
    for name in weights:
        devices = (device_map[key] for key in _list_paths(name) if key in device_map)
        device = next(devices, "cpu")
        # Offloading to the disk reads the tensor from the CPU.
        if device == "disk":
            device = "cpu"
        weights[name] = weights[name].to(device)
    return weights


# -- hooks -------------------------------------------------------------------------------------------------------------


class ModelHook:
    """A hook with methods before and after a module's forward; `add_hook_to_module` attaches it.

    Attributes:
        no_grad: whether the forward runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached."""
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Called before the forward; returns the arguments to use."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward; returns the result to use."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed."""
        return module


class SequentialHook(ModelHook):
    """Runs several hooks, one after the other.

    Args:
        hooks: the hooks, in order.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        # The same order before and after the forward, as in Accelerate: hooks do not nest.
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(
    module: nn.Module, hook: ModelHook, append: bool = False
) -> nn.Module:
    """Attach a hook, which runs when the module is called; it replaces an earlier one.

    Args:
        module: the module; it is returned.
        hook: the hook; stored as ``module._hf_hook``.
        append: keep the earlier hook, which runs first.

    Example:
        >>> class Double(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return output * 2
        >>> layer = add_hook_to_module(nn.Identity(), Double())
        >>> layer(torch.ones(1)), remove_hook_from_module(layer)(torch.ones(1))
        (tensor([2.]), tensor([1.]))
    """
    earlier = module.__dict__.get("_hf_hook")
    if earlier is not None:
        remove_hook_from_module(module)
        if append:
            hook = SequentialHook(earlier, hook)
    # After the earlier hook is removed: its detach_hook restores weights, which this call may move or offload.
    module = hook.init_hook(module)
    grads: list[bool] = []

    # torch calls these; the module's own forward is not replaced, so that removing them leaves it as it was.
    def enter(called: nn.Module, args: Batch, kwargs: Keywords) -> Batch:
        # A stack, because a module may call itself.
        grads.append(torch.is_grad_enabled())
        # Before gradients are switched off: a hook may move parameters, and `leave` restores the mode if it raises.
        args, kwargs = hook.pre_forward(called, *args, **kwargs)
        torch.set_grad_enabled(grads[-1] and not hook.no_grad)
        return tuple(args), kwargs

    def leave(called: nn.Module, args: object, output: object) -> None:
        # always_call runs it after an exception too, also after one in `enter` of another hook.
        if grads:
            torch.set_grad_enabled(grads.pop())

    def change_output(called: nn.Module, args: object, output: Batch) -> Batch:
        return hook.post_forward(called, output)

    # Into __dict__: nn.Module.__setattr__ would register a hook that is itself a module as a submodule. transformers
    # reads this name.
    module.__dict__["_hf_hook"] = hook
    module.__dict__[_HANDLES] = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
        module.register_forward_hook(change_output),
    ]
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove what `add_hook_to_module` attached, and the hooks of `dispatch_model`.

    Args:
        module: the module; it is returned. Offloaded weights stay in host memory or on disk.
        recurse: include submodules.
    """
    hook = module.__dict__.pop("_hf_hook", None)
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    if hook is not None:
        hook.detach_hook(module)
    undo_dispatch(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Call `remove_hook_from_module` on a module and its submodules."""
    remove_hook_from_module(module, recurse=True)


class AlignDevicesHook(ModelHook):
    """Moves inputs and offloaded weights to the device on which a module computes.

    Args:
        execution_device: the device of the computation; None for the device of the inputs.
        offload: keep weights on that device only during the forward.
        io_same_device: return results on the device of the inputs.
        weights_map: the weights by name; by default they are kept in host memory.
        offload_buffers: offload buffers too.
        place_submodules: include the tensors of submodules.
        skip_keys: names of arguments and results that are not moved.
        tied_params_map: accepted; a tied weight is loaded for each of its modules.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: object = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}

    def _list_offloaded(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        # Non-persistent buffers stay on the execution device: a weights map read from a checkpoint does not have them.
        return list(
            named_module_tensors(
                module, self.offload_buffers, self.place_submodules, True
            )
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        tensors = list(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors}
        offloaded: dict[str, Tensor] = {}
        if self.offload:
            offloaded = dict(self._list_offloaded(module))
        # Copied before the loop below gives the tensors up: on the meta device they have no values.
        if self.offload and self.weights_map is None:
            self.weights_map = {
                name: tensor.detach().to("cpu") for name, tensor in offloaded.items()
            }
        for name, _ in tensors:
            if name in offloaded:
                set_module_tensor_to_device(module, name, "meta")
            elif self.execution_device is not None:
                set_module_tensor_to_device(module, name, self.execution_device)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:

        device = self.execution_device
        if device is None:
            device = find_device([args, kwargs])
        self.input_device = None
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        # A meta tensor is replaced by its value in each forward, so that device memory holds one module at a time.
        if self.offload and self.weights_map is not None:
            for name, _ in self._list_offloaded(module):
                set_module_tensor_to_device(
                    module, name, device or "cpu", self.weights_map[name]
                )
        if device is None:
            return args, kwargs
        kwargs = send_to_device(kwargs, device, skip_keys=self.skip_keys)
        return send_to_device(args, device), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            for name, _ in self._list_offloaded(module):
                set_module_tensor_to_device(module, name, "meta")
        if self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        weights = self.weights_map
        if not self.offload or weights is None:
            return module
        # Not those that were on the meta device from the beginning: the caller never had values for them.
        for name, device in self.original_devices.items():
            if name in weights and device.type != "meta":
                set_module_tensor_to_device(module, name, device, weights[name])
        return module


class _OffloadHook(Protocol):
    """What `cpu_offload_with_hook` returns beside a model."""

    def offload(self) -> None:
        """Move the model to host memory."""


class CpuOffload(ModelHook):
    """Keeps a whole model in host memory until it is called; `cpu_offload_with_hook` can move it back.

    Args:
        execution_device: the device of the computation; by default the accelerator.
        prev_module_hook: the hook of a model that is moved back to host memory when this one is called.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        prev_module_hook: _OffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        if execution_device is None:
            # Decided when the hook is made, as in Accelerate: importing the module must not touch a device.
            execution_device = present_accelerator() or "cpu"
        self.execution_device = torch.device(execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        # First the previous model leaves: a pipeline of models needs device memory for the largest one only.
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        kwargs = send_to_device(kwargs, self.execution_device)
        return send_to_device(args, self.execution_device), kwargs


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether an `AlignDevicesHook` keeps the weights of a module elsewhere."""
    hook = module.__dict__.get("_hf_hook")
    return isinstance(hook, AlignDevicesHook) and hook.offload


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: int | str | torch.device | None = None
) -> Iterator[None]:
    """Context in which the tensors of a module have values and are on a device.

    Args:
        module: the module; submodules are not moved.
        execution_device: the device; None for that of the module's hook, else where the tensors are.
    """
    hook = module.__dict__.get("_hf_hook")
    if isinstance(hook, AlignDevicesHook) and hook.offload:
        device_of_hook = hook.execution_device
        # `pre_forward` loads to the hook's device, and the hook belongs to the module: it gets its device back on exit.
        if execution_device is not None:
            hook.execution_device = execution_device
        hook.pre_forward(module)
        try:
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = device_of_hook
        return
    if execution_device is None:
        yield
        return
    # Parameters only, as in Accelerate: buffers stay where they are.
    parameters = module.named_parameters(recurse=False)
    devices = {name: parameter.device for name, parameter in parameters}
    for name in devices:
        set_module_tensor_to_device(module, name, execution_device)
    try:
        yield
    finally:
        for name, device in devices.items():
            set_module_tensor_to_device(module, name, device)


# -- weights in a folder -----------------------------------------------------------------------------------------------

# By size in bytes: the dtype under which NumPy writes and reads the bits of a dtype that it lacks.
_CARRIERS: Final = {1: torch.int8, 2: torch.int16}


def _is_unknown_to_numpy(dtype_name: str) -> bool:
    return dtype_name == "bfloat16" or dtype_name.startswith("float8_")


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: JsonObject | None = None,
) -> JsonObject | None:
    """Write a tensor to ``<weight_name>.dat``.

    Args:
        weight: a tensor on any device.
        weight_name: its name.
        offload_folder: the directory.
        index: receives its dtype and shape, for `save_offload_index`.

    Returns:
        The index.
    """
    dtype_name = str(weight.dtype).removeprefix("torch.")
    content = weight.detach().cpu()
    if _is_unknown_to_numpy(dtype_name):
        content = content.view(_CARRIERS[weight.itemsize])
    if index is not None:
        index[weight_name] = {"dtype": dtype_name, "shape": list(weight.shape)}
    file = Path(offload_folder) / f"{weight_name}.dat"
    content.contiguous().numpy().tofile(file)
    return index


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: JsonObject
) -> Tensor:
    """Read what `offload_weight` wrote.

    Args:
        weight_file: the file.
        weight_info: its dtype and shape, from the index.
    """
    dtype = resolve_dtype(weight_info["dtype"])
    carrier = dtype
    if _is_unknown_to_numpy(str(dtype).removeprefix("torch.")):
        carrier = _CARRIERS[dtype.itemsize]
    carrier_name = str(carrier).removeprefix("torch.")
    # The file has no header: dtype and shape are in the index only.
    content = torch.from_numpy(np.fromfile(weight_file, dtype=carrier_name))
    return content.view(dtype).reshape(weight_info["shape"])


def save_offload_index(
    index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Add an index to a folder's ``index.json``."""
    if not index:
        return
    file = Path(offload_folder) / "index.json"
    entries: JsonObject = {}
    # A model may be offloaded to one folder in several calls.
    if file.is_file():
        entries = json.loads(file.read_text(encoding="utf-8"))
    entries.update(index)
    file.write_text(json.dumps(entries, indent=2), encoding="utf-8")


def offload_state_dict(
    save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]
) -> None:
    """Write the tensors of a state dict and their index to a folder.

    Args:
        save_dir: the folder; created if missing.
        state_dict: the tensors.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: JsonObject = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weights(
    model: nn.Module,
    index: Mapping[str, Any] | None,
    offload_folder: str | os.PathLike[str],
) -> None:
    """Load the weights of an index into a model, on the CPU.

    Args:
        model: may be on the meta device.
        index: what `offload_weight` filled.
        offload_folder: where the files are.
    """
    for name, info in (index or {}).items():
        file = Path(offload_folder) / f"{name}.dat"
        weight = load_offloaded_weight(file, info)
        set_module_tensor_to_device(model, name, "cpu", weight)


def extract_submodules_state_dict(
    state_dict: SavedState, submodule_names: Sequence[str]
) -> StateDict:
    """Return the entries of a state dict that belong to the named modules.

    Example:
        >>> extract_submodules_state_dict({"a.weight": 1, "ab.weight": 2}, ["a"])
        {'a.weight': 1}
    """
    # With the dot: "a" must not select "ab.weight".
    prefixes = tuple(f"{module_name}." for module_name in submodule_names)
    return {
        name: value
        for name, value in state_dict.items()
        if name in submodule_names or name.startswith(prefixes)
    }


class PrefixedDataset(Mapping[str, Any]):
    """Reads another mapping with a prefix before each key.

    Args:
        dataset: the other mapping.
        prefix: the prefix.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (
            key.removeprefix(self.prefix)
            for key in self.dataset
            if key.startswith(self.prefix)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights by name: those of a state dict, and those of a folder, which are read on access.

    Args:
        state_dict: the weights in memory.
        save_folder: a folder that `offload_state_dict` wrote.
        index: an index of the folder or of safetensors files; by default the folder's own.
        device: the device of weights read from safetensors files.

    Raises:
        ConfigurationError: no argument is given.

    Example:
        >>> OffloadedWeightsLoader({"a": torch.ones(1)})["a"]
        tensor([1.])
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError(
                "no weights are given", fix="pass state_dict, save_folder or index"
            )
        self.state_dict = state_dict or {}
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            file = Path(save_folder) / "index.json"
            index = json.loads(file.read_text(encoding="utf-8"))
        self.index = index or {}
        self.device = device

    def __getitem__(self, key: str) -> Tensor:
        # Memory has priority: an entry of the folder may be older.
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        file = info.get("safetensors_file")
        if file is None:
            if self.save_folder is None:
                raise CheckpointError(
                    "the index", key, "names no file, and save_folder is not set"
                )
            return load_offloaded_weight(Path(self.save_folder) / f"{key}.dat", info)
        device = str(self.device or "cpu")
        # Opened for one tensor: the mapping of the file is released, which a dict of open files would keep.
        with safe_open(file, framework="pt", device=device) as weights:
            tensor: Tensor = weights.get_tensor(info.get("weight_name", key))
        if "dtype" not in info:
            return tensor
        return tensor.to(resolve_dtype(info["dtype"]))

    def __iter__(self) -> Iterator[str]:
        # As a dict: a weight that is both in memory and in the folder is listed once.
        return iter({**self.state_dict, **self.index})

    def __len__(self) -> int:
        return len({*self.state_dict, *self.index})
