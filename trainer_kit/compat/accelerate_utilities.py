"""Functions of Accelerate's ``utils`` for nested tensors, files and the environment."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import reduce, wraps
from typing import Any, Final, TypeVar

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer_kit.checkpoint.files import in_bytes
from trainer_kit.compat.torch_private import OptimizedModule
from trainer_kit.core.devices import present_accelerator
from trainer_kit.core.environment import (
    Environment,
    patch_environment,
    preserved_variables,
)
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.tensors import (
    is_tensor,
    map_leaves,
    map_tensors,
    move_to_device,
    require_tensor,
    tensors_of,
    to_float32,
)
from trainer_kit.core.torch_private import direct_submodules, has_compiled_call
from trainer_kit.core.types import Function, JsonObject, Nested, SavedState, StateDict
from trainer_kit.launch.options import several_on

__all__ = [
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_MODEL_NAME",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "TORCH_DYNAMO_MODES",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "BaseEnum",
    "CPUInformation",
    "CannotPadNestedTensorWarning",
    "ComputeEnvironment",
    "CustomDtype",
    "DynamoBackend",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
    "TensorInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "clear_environment",
    "concatenate",
    "convert_bytes",
    "convert_dict_to_env_variables",
    "convert_file_size_to_int",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "disable_fsdp_ram_efficient_loading",
    "dtype_byte_size",
    "enable_fsdp_ram_efficient_loading",
    "find_batch_size",
    "find_device",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_data_structure",
    "get_free_port",
    "get_gpu_info",
    "get_grad_scaler",
    "get_int_from_env",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "get_shape",
    "has_compiled_regions",
    "honor_type",
    "id_tensor_storage",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_compiled_module",
    "is_namedtuple",
    "is_peft_model",
    "is_port_in_use",
    "is_tensor_information",
    "listify",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "pad_input_tensors",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "recursive_getattr",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
    "str_to_bool",
]

_F = TypeVar("_F", bound=Function)

# Names of the files that Accelerate writes.
SCALER_NAME: Final = "scaler.pt"
MODEL_NAME: Final = "pytorch_model"
SAFE_MODEL_NAME: Final = "model"
RNG_STATE_NAME: Final = "random_states"
OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"
WEIGHTS_NAME: Final = "pytorch_model.bin"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME: Final = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME: Final = "model.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = "model.safetensors.index.json"
FSDP_MODEL_NAME: Final = "pytorch_model_fsdp"
# Values in its configuration files.
FSDP_SHARDING_STRATEGY: Final = [
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
]
FSDP_AUTO_WRAP_POLICY: Final = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH: Final = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE: Final = [
    "FULL_STATE_DICT",
    "LOCAL_STATE_DICT",
    "SHARDED_STATE_DICT",
]
TORCH_DYNAMO_MODES: Final = ["default", "reduce-overhead", "max-autotune"]
TORCH_DISTRIBUTED_OPERATION_TYPES: Final = [
    *(
        "DEEPSPEED",
        "MULTI_GPU",
        "FSDP",
        "MEGATRON_LM",
        "TP",
        "MULTI_NPU",
        "MULTI_MLU",
        "MULTI_SDAA",
        "MULTI_MUSA",
    ),
    *("MULTI_XPU", "MULTI_CPU", "MULTI_HPU", "MULTI_NEURON"),
]


class BaseEnum(Enum):
    """An enumeration that prints as its value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """All values, as texts."""
        return list(map(str, cls))


def _make_enumeration(name: str, text: str, mixin: type | None = None) -> Any:
    """Make an enumeration; ``text`` has names, or ``NAME=value``; members are of the type ``mixin`` too."""
    members: dict[str, str] = {}
    for entry in text.split():
        key, _, value = entry.partition("=")
        members[key] = value or key
    # Called with a name and members, an enumeration makes a class; a checker expects a value.
    enumeration: Function = BaseEnum
    if mixin is None:
        return enumeration(name, members, module=__name__)
    return enumeration(name, members, module=__name__, type=mixin)


ComputeEnvironment = _make_enumeration(
    "ComputeEnvironment", "LOCAL_MACHINE AMAZON_SAGEMAKER", str
)
CustomDtype = _make_enumeration("CustomDtype", "FP8=fp8 INT4=int4 INT2=int2", str)
DynamoBackend = _make_enumeration(
    "DynamoBackend",
    "NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT "
    "AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON",
    str,
)
PrecisionType = _make_enumeration(
    "PrecisionType", "NO=no FP8=fp8 FP16=fp16 BF16=bf16", str
)
RNGType = _make_enumeration(
    "RNGType",
    "TORCH=torch CUDA=cuda MLU=mlu SDAA=sdaa MUSA=musa NPU=npu XLA=xla XPU=xpu HPU=hpu NEURON=neuron "
    "GENERATOR=generator",
)
SageMakerDistributedType = _make_enumeration(
    "SageMakerDistributedType", "NO DATA_PARALLEL MODEL_PARALLEL", str
)


# -- nested tensors ----------------------------------------------------------------------------------------------------


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class CannotPadNestedTensorWarning(UserWarning):
    """For warning filters only: `pad_across_processes` refuses torch's nested tensors."""


def is_tensor_information(tensor_info: object) -> bool:
    """Whether an object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Whether an object is a namedtuple.

    Example:
        >>> from collections import namedtuple
        >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
        (True, False)
    """
    # By attributes: collections.namedtuple and typing.NamedTuple have no common base beside tuple.
    return (
        isinstance(data, tuple)
        and hasattr(data, "_fields")
        and hasattr(data, "_asdict")
    )


def honor_type(obj: Nested, generator: Iterable[Nested]) -> Nested:
    """Make a list, tuple or namedtuple of ``obj``'s type from an iterable."""
    # The constructor of a namedtuple takes its fields as arguments, that of a list or tuple one iterable.
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


class _LeafType(type):
    """A metaclass for the classes of leaves that a user's function recognizes."""

    test: Callable[[object], bool]

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.test(instance)


def recursively_apply(
    func: Function,
    data: Nested,
    *args: object,
    test_type: Callable[[object], bool] = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: object,
) -> Nested:
    """Call ``func`` on every tensor in nested lists, tuples and mappings; their types are kept.

    Args:
        func: called with each tensor, ``args`` and ``kwargs``.
        data: the nested data.
        args: further arguments.
        test_type: returns whether an object counts as a tensor.
        error_on_other_type: refuse anything else, instead of returning it as it is.
        kwargs: further arguments.

    Raises:
        ConfigurationError: with ``error_on_other_type``, the data contain anything else.

    Example:
        >>> recursively_apply(torch.add, {"x": [torch.tensor(1), "a"]}, 2)
        {'x': [tensor(3), 'a']}
    """
    # `map_leaves` finds leaves by isinstance, which a class with this metaclass answers by the user's function.
    leaf_type: type = Tensor
    if test_type is not is_tensor:
        leaf_type = _LeafType("Leaf", (), {"test": staticmethod(test_type)})
    check = None
    if error_on_other_type:
        check = require_tensor
    return map_leaves(data, lambda leaf: func(leaf, *args, **kwargs), leaf_type, check)


def send_to_device(
    tensor: Nested,
    device: Any,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Nested:
    """Move all tensors of a batch to ``device``.

    Args:
        tensor: any nested data; tensors and other objects with ``.to(device)`` are moved.
        device: the target device; a number is the index of an accelerator.
        non_blocking: do not wait for copies to an accelerator.
        skip_keys: keys of mappings whose values are not moved.

    Example:
        >>> moved = send_to_device({"x": torch.ones(1), "y": torch.ones(1)}, "meta", skip_keys="y")
        >>> moved["x"].device.type, moved["y"].device.type
        ('meta', 'cpu')
    """
    if not skip_keys or not isinstance(tensor, (Mapping, list, tuple)):
        # Also the leaves of the recursion below: there is nothing to skip in them.
        return move_to_device(tensor, device, non_blocking)
    if not isinstance(tensor, Mapping):
        values = [send_to_device(v, device, non_blocking, skip_keys) for v in tensor]
        return honor_type(tensor, values)
    if isinstance(skip_keys, str):
        skip_keys = [skip_keys]
    moved = {}
    for key, value in tensor.items():
        if key not in skip_keys:
            value = send_to_device(value, device, non_blocking, skip_keys)
        moved[key] = value
    # The mappings of batches, such as UserDict and BatchEncoding, are made from one mapping.
    return type(tensor)(moved)  # type: ignore[call-arg]


def get_data_structure(data: Nested) -> Nested:
    """Replace each tensor in nested data by a `TensorInformation`."""
    return recursively_apply(lambda t: TensorInformation(t.shape, t.dtype), data)


def get_shape(data: Nested) -> Nested:
    """Replace each tensor in nested data by its shape, a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Nested) -> Nested:
    """Replace each `TensorInformation` in nested data by an uninitialized tensor."""

    def make_tensor(information: TensorInformation) -> Tensor:
        return torch.empty(*information.shape, dtype=information.dtype)

    return recursively_apply(
        make_tensor, data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Nested) -> int:
    """The first size of the first tensor.

    Raises:
        ConfigurationError: the first element is not a tensor.
    """
    value = data
    while isinstance(value, (Mapping, list, tuple)) and value:
        if isinstance(value, Mapping):
            value = value.values()
        value = next(iter(value))
    # A tensor without dimensions has no samples.
    if isinstance(value, Tensor) and value.ndim:
        return value.shape[0]
    raise ConfigurationError(
        "the first value of a batch must be a tensor with one entry per sample",
        found=repr(value)[:80],
    )


def ignorant_find_batch_size(data: Nested) -> int | None:
    """`find_batch_size`, or None."""
    try:
        return find_batch_size(data)
    except ConfigurationError:
        return None


def find_device(data: Nested) -> torch.device | None:
    """The device of the first tensor."""
    return next((tensor.device for tensor in tensors_of(data)), None)


def listify(data: Nested) -> Nested:
    """Replace each tensor in nested data by a list of numbers."""
    # Sync point: the caller asks for Python numbers.
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: Nested,
    tensor_slice: object,
    process_index: object = None,
    num_processes: object = None,
) -> Nested:
    """Replace each tensor in nested data by ``tensor[tensor_slice]``.

    Example:
        >>> slice_tensors([torch.arange(4)], slice(1, 3))
        [tensor([1, 2])]
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Nested], dim: int = 0) -> Nested:
    """Concatenate the tensors of nested data that have the same structure.

    Raises:
        ConfigurationError: the data contain something other than tensors.

    Example:
        >>> concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(1)}])
        {'x': tensor([1., 0.])}
    """
    first = data[0]
    if isinstance(first, (list, tuple)):
        columns = zip(*data, strict=True)
        return honor_type(first, (concatenate(column, dim) for column in columns))
    if isinstance(first, Mapping):
        joined = {}
        for key in first:
            joined[key] = concatenate([mapping[key] for mapping in data], dim)
        # As in `send_to_device`: made from one mapping.
        return type(first)(joined)  # type: ignore[call-arg]
    if not isinstance(first, Tensor):
        raise ConfigurationError(
            "concatenate takes tensors", found=type(first).__name__
        )
    return torch.cat(list(data), dim)


def pad_input_tensors(
    tensor: Nested, batch_size: int, num_processes: int, dim: int = 0
) -> Nested:
    """Append zeros to each tensor, so that its length along ``dim`` is a multiple of ``num_processes``.

    Args:
        tensor: nested data; each tensor is ``batch_size`` long along ``dim``.
        batch_size: the length of each tensor.
        num_processes: number of processes that share the batch.
        dim: the dimension along which the batch is divided.

    Example:
        >>> pad_input_tensors(torch.ones(3), 3, 2)
        tensor([1., 1., 1., 0.])
    """

    def pad(batch: Tensor) -> Tensor:
        shape = list(batch.shape)
        # The remainder of a negative number is the distance to the next multiple.
        shape[dim] = -batch_size % num_processes
        zeros = batch.new_zeros(shape)
        return torch.cat([batch, zeros], dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def convert_to_fp32(tensor: Nested) -> Nested:
    """Convert float16 and bfloat16 tensors in nested data to float32."""
    return map_tensors(tensor, to_float32)


def convert_outputs_to_fp32(model_forward: _F) -> _F:
    """Decorator: the forward's float16 and bfloat16 outputs are converted to float32.

    Example:
        >>> convert_outputs_to_fp32(lambda x: {"y": x.half()})(torch.ones(1))
        {'y': tensor([1.])}
    """

    @wraps(model_forward)
    def forward(*args: object, **kwargs: object) -> Nested:
        return convert_to_fp32(model_forward(*args, **kwargs))

    # wraps keeps the signature, which a checker cannot know.
    return forward  # type: ignore[return-value]


# -- numbers, names and files ------------------------------------------------------------------------------------------


def convert_bytes(size: float) -> str:
    """Format a number of bytes with a unit.

    Example:
        >>> convert_bytes(2048), convert_bytes(3 * 1024**4)
        ('2.0 KB', '3.0 TB')
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        # The label of 1024 bytes is "KB", as in Accelerate, whose output programs parse.
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Parse a number of bytes such as ``"5GB"`` or ``"1GiB"``; a lowercase b (``"8Gb"``) means bits.

    Raises:
        ConfigurationError: the text is not a size.

    Example:
        >>> convert_file_size_to_int("1GiB"), convert_file_size_to_int("8Kb")
        (1073741824, 1000)
    """
    count = in_bytes(size, "a file size")
    # `in_bytes` reads either letter as bytes.
    if str(size).endswith("b"):
        return count // 8
    return count


def dtype_byte_size(dtype: Any) -> float:
    """The size of one element in bytes.

    Example:
        >>> dtype_byte_size(torch.float16), dtype_byte_size(torch.bool), dtype_byte_size(CustomDtype.INT4)
        (2, 0.125, 0.5)
    """
    if isinstance(dtype, CustomDtype):
        return {"fp8": 1, "int4": 0.5, "int2": 0.25}[dtype.value]
    # As Accelerate counts it; torch stores a bool in a byte.
    if dtype is torch.bool:
        return 0.125
    size: int = dtype.itemsize
    return size


def get_pretty_name(obj: Any) -> str:
    """The name of a function or class, or of an object's class."""
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = type(obj)
    return str(getattr(obj, "__qualname__", None) or obj.__name__)


def merge_dicts(source: JsonObject, destination: JsonObject) -> JsonObject:
    """Merge ``source`` into ``destination``, including nested dicts.

    Example:
        >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3})
        {'a': {'y': 2, 'x': 1}, 'b': 3}
    """
    for key, value in source.items():
        if isinstance(value, dict):
            value = merge_dicts(value, destination.get(key, {}))
        destination[key] = value
    return destination


def recursive_getattr(obj: object, attr: str) -> Any:
    """``obj.a.b`` for ``"a.b"``."""
    return reduce(getattr, attr.split("."), obj)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether a process on this machine listens on a port, by default 29500."""
    if port is None:
        port = 29500
    # A connection and no bind: a bind fails also for a port that is still in TIME_WAIT, without a listener.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        return client.connect_ex(("localhost", int(port))) == 0


def get_free_port() -> int:
    """Find a port on which no process on this machine listens."""
    # Another process may take the port before the caller does: port 0 lets the system choose one at the bind itself.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


def check_os_kernel() -> None:
    """Warn of a Linux kernel older than 5.5, on which processes may hang."""
    release = re.match(r"\d+\.\d+(\.\d+)?", platform.release())
    if platform.system() != "Linux" or release is None:
        return
    if Version(release[0]) < Version("5.5.0"):
        warnings.warn(
            f"processes may hang on Linux {release[0]}; 5.5 or newer is recommended",
            stacklevel=2,
        )


def load(
    f: torch.types.FileLike,
    map_location: torch.serialization.MAP_LOCATION = None,
    **kwargs: Any,
) -> Nested:
    """``torch.load`` for tensors and plain data; ``weights_only=False`` reads pickles from a source that you trust."""
    # torch's default of `weights_only` can be turned off by an environment variable (TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD).
    return torch.load(f, map_location, **{"weights_only": True, **kwargs})


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """An identifier that two tensors have in common if they share memory."""
    # The size too: on the meta device every pointer is 0.
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def clean_state_dict_for_safetensors(state_dict: SavedState) -> StateDict:
    """The tensors of a state dict, made contiguous; shared memory appears once, under its first name.

    Example:
        >>> weight = torch.ones(2)
        >>> clean_state_dict_for_safetensors({"a": weight, "b": weight})
        {'a': tensor([1., 1.])}
    """
    # safetensors refuses tensors that share memory, such as tied weights.
    storages: set[tuple[torch.device, int, int]] = set()
    tensors: StateDict = {}
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            storage = id_tensor_storage(value)
            if storage in storages:
                continue
            storages.add(storage)
            value = value.contiguous()
        tensors[name] = value
    return tensors


# -- the environment ---------------------------------------------------------------------------------------------------


_YES: Final = ("y", "yes", "t", "true", "on", "1")
_NO: Final = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for "yes", "true", "on", "1", …, 0 for "no", "false", "off", "0", …; with ``to_bool`` True and False.

    Raises:
        ConfigurationError: the text is neither.
    """
    is_yes = value.lower() in _YES
    if not is_yes and value.lower() not in _NO:
        raise ConfigurationError(
            "expected a boolean", found=repr(value), fix="write true or false"
        )
    if to_bool:
        return is_yes
    return int(is_yes)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """The first of these environment variables that holds a number of at least 0."""
    for key in env_keys:
        # -1 is the customary LOCAL_RANK of a process that no launcher has started; scripts set it themselves.
        value = int(os.environ.get(key, -1))
        if value >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether an environment variable is set to a true value."""
    return str_to_bool(os.environ.get(key, str(default))) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of an environment variable."""
    return os.environ.get(key, default)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """The modules among these that are already imported."""
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Format variables as lines ``KEY=value``, and warn of each that is left out: a shell would interpret it.

    Example:
        >>> convert_dict_to_env_variables({"A": "1", "B": "2"})
        ['A=1\\n', 'B=2\\n']
    """
    lines = []
    for key, value in current_env.items():
        # The lines are written into a shell's environment file, where these characters would end or redirect a command.
        is_safe = not set(";\n<> ") & set(key + value)
        if key and value and is_safe:
            lines.append(f"{key}={value}\n")
            continue
        warnings.warn(
            f"the environment variable {key!r} is left out: its name or value is empty, or has a space, a newline or"
            " one of ; < >",
            stacklevel=2,
        )
    return lines


@contextmanager
def clear_environment() -> Iterator[None]:
    """Context without environment variables."""
    with preserved_variables():
        os.environ.clear()
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorator for a test or a test class: afterwards restores the ``ACCELERATE_...`` variables."""
    if isinstance(func_or_cls, type):
        for name, member in vars(func_or_cls).copy().items():
            if name.startswith("test") and callable(member):
                # Each test by itself: one test's variables must not reach the next one.
                setattr(func_or_cls, name, purge_accelerate_environment(member))
        return func_or_cls

    @wraps(func_or_cls)
    def call(*args: object, **kwargs: object) -> object:
        previous = _read_accelerate_variables()
        try:
            return func_or_cls(*args, **kwargs)
        finally:
            # Variables that the test has added go too.
            for key in _read_accelerate_variables():
                del os.environ[key]
            os.environ.update(previous)

    return call


def _read_accelerate_variables() -> dict[str, str]:
    variables = os.environ.items()
    return {key: value for key, value in variables if key.startswith("ACCELERATE_")}


def enable_fsdp_ram_efficient_loading() -> None:
    """Tell transformers that only the main process reads the weights of a model; the others get them by `prepare`.

    Sets ``ACCELERATE_USE_FSDP`` too, unless it is set: transformers reads both.
    """
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Tell transformers that every process reads the weights of a model."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


@dataclass
class CPUInformation:
    """The rank and sizes of this process, as its launcher set them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Read the rank and sizes that the launcher set for this process."""
    launched = Environment.detect()
    return CPUInformation(
        launched.rank,
        launched.world_size,
        launched.local_rank,
        launched.local_world_size,
    )


def get_current_device_type() -> tuple[str, str]:
    """The accelerator type of this machine ("cuda" if none), and Accelerate's name for several of them."""
    device = present_accelerator()
    device_type = "cuda"
    if device is not None:
        device_type = device.type
    return device_type, several_on(device_type)


def get_gpu_info() -> tuple[list[str], int]:
    """The names of this machine's CUDA devices, and how many there are."""
    names = [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    return names, len(names)


def check_cuda_fp8_capability() -> bool:
    """Whether the current CUDA device computes in fp8 (Ada, Hopper and newer)."""
    # Compute capability 8.9 is Ada, 9.0 Hopper.
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def check_cuda_p2p_ib_support() -> bool:
    """Whether this machine's GPUs can exchange data directly; the RTX 4000 series cannot."""
    # Accelerate also accepts them with NVIDIA's driver 550.40.07 or newer. torch does not know the driver's version.
    names, count = get_gpu_info()
    return count < 2 or not any("RTX 40" in name for name in names)


# -- models ------------------------------------------------------------------------------------------------------------


def is_compiled_module(module: nn.Module) -> bool:
    """Whether a module is the result of ``torch.compile``."""
    return isinstance(module, OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether a submodule is the result of ``torch.compile`` or was compiled in place."""
    # As in Accelerate, a module without submodules has no regions, even if it is compiled.
    # torch.compile returns an OptimizedModule; module.compile() compiles in place and sets only this attribute.
    return any(
        isinstance(submodule, OptimizedModule) or has_compiled_call(submodule)
        for submodule in module.modules()
        if submodule is not module or direct_submodules(submodule)
    )


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is sharded among processes (a DTensor)."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """The number of processes among which transformers split a model's layers."""
    model_config = getattr(model, "config", None)
    config = getattr(model_config, "distributed_config", None)
    # Transformers 4 sets it on the model. Version 5 leaves None there and records it in the configuration.
    tp_size: int | None = getattr(model, "tp_size", None)
    if tp_size is not None:
        return tp_size
    if isinstance(config, dict):
        return config.get("tp_size")
    return getattr(config, "tp_size", None)


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[Any]:
    """All modules of a model, the model last; with ``return_fqns``, pairs of name and module."""
    ordered: list[tuple[str, nn.Module]] = []
    queue: list[tuple[str, nn.Module]] = [("", model)]
    while queue:
        path, module = queue.pop()
        ordered.append((path, module))
        for name, child in module.named_children():
            # The model's own name is empty.
            if path:
                name = f"{path}.{name}"
            queue.append((name, child))
    # A module was appended before all of its children.
    ordered.reverse()
    if return_fqns:
        return ordered
    return [module for _, module in ordered]


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model comes from the ``peft`` library."""
    # A model of peft cannot exist before peft is imported, which takes seconds.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(
        getattr(model, "module", model), peft.PeftModel
    )


def get_grad_scaler(
    distributed_type: object = None, **kwargs: Any
) -> torch.amp.GradScaler:
    """A gradient scaler for this machine's accelerator."""
    return torch.amp.GradScaler(get_current_device_type()[0], **kwargs)
