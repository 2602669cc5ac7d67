"""Accelerate's ``is_..._available`` functions: which packages and devices this machine has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial, wraps
from importlib.metadata import version
from typing import Final, TypeVar

import torch
from packaging.version import Version

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.types import Function
from trainer_kit.loggers.table import service_packages

__all__ = [
    "compare_versions",
    "deepspeed_required",
    "is_bnb_available",
    "is_habana_gaudi1",
    "is_torch_version",
    "is_torch_xla_available",
    "is_transformer_engine_mxfp8_available",
    "probe",
    "torchao_required",
]

_Decorated = TypeVar("_Decorated", bound=Function)

_PACKAGES: Final = {
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "amdsmi": "amdsmi",
    "bitsandbytes_multi_backend": "bitsandbytes",
    "boto3": "boto3",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "fp8": "torchao transformer_engine",
    "import_timer": "import_timer",
    "matplotlib": "matplotlib",
    "megatron_lm": "megatron",
    "numpy": "numpy",
    "pandas": "pandas",
    "peft": "peft",
    "pynvml": "pynvml",
    "pytest": "pytest",
    "rich": "rich",
    "sagemaker": "sagemaker",
    "schedulefree": "schedulefree",
    "tensorboard": "tensorboard tensorboardX",
    "timm": "timm",
    "torchao": "torchao",
    "torchdata": "torchdata",
    "torchdata_stateful_dataloader": "torchdata",
    "torchvision": "torchvision",
    "tqdm": "tqdm",
    "transformer_engine": "transformer_engine",
    "transformers": "transformers",
    "triton": "triton",
    **{package: package for package in service_packages()},
}
"""For each word in ``is_<feature>_available``, the modules of which one must be installed."""


def _has_device(name: str) -> bool:
    # Builds of torch for such a device, or a package that extends torch, add the module.
    return hasattr(torch, name) and bool(getattr(torch, name).is_available())


_DEVICES: Final[dict[str, Callable[[], bool]]] = {
    # Functions, not answers: importing this module must not start a device.
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "rocm": lambda: torch.version.hip is not None and torch.cuda.is_available(),
    "xccl": torch.distributed.distributed_c10d.is_xccl_available,
    "torch_distributed": torch.distributed.is_available,
    # As in Accelerate: whether float16 is slow on a device is not what a script asks.
    "fp16": lambda: True,
    "bf16": lambda: not torch.cuda.is_available() or torch.cuda.is_bf16_supported(),
    **{
        name: partial(_has_device, name)
        for name in ("hpu", "mlu", "musa", "neuron", "npu", "sdaa", "xpu")
    },
}
_ALWAYS: Final = {"lomo": False, "msamp": False, "pippy": True, "weights_only": True}
"""Answers that do not depend on the machine: LOMO and MS-AMP are refused; pipelines and safe loading exist."""


def probe(feature: str) -> Callable[..., bool]:
    """Make the function ``is_<feature>_available``.

    Args:
        feature: a key of one of the three tables of this module.

    Example:
        >>> probe("numpy")(), probe("msamp")()
        (True, False)
    """

    # Some of Accelerate's functions take options, such as min_version; the answer here does not depend on them.
    def is_available(*_: object, **__: object) -> bool:
        if feature in _ALWAYS:
            return _ALWAYS[feature]
        if feature in _DEVICES:
            return _DEVICES[feature]()
        # By find_spec: importing some of these packages takes seconds.
        return any(
            importlib.util.find_spec(name) is not None
            for name in _PACKAGES[feature].split()
        )

    is_available.__name__ = f"is_{feature}_available"
    is_available.__qualname__ = is_available.__name__
    is_available.__doc__ = f"Whether {feature} can be used here; options of Accelerate's function are accepted."
    return is_available


def __getattr__(name: str) -> Function:
    # Made on access: a program asks for few of the features in the tables.
    feature = name.removeprefix("is_").removesuffix("_available")
    is_listed = feature in _PACKAGES or feature in _DEVICES or feature in _ALWAYS
    if is_listed and name == f"is_{feature}_available":
        function = probe(feature)
        globals()[name] = function
        return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compare_versions(
    library_or_version: str | Version, operation: str, requirement_version: str
) -> bool:
    """Whether the version of an installed library, or a version, compares with another one.

    Args:
        library_or_version: the name of a package, or a version.
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        requirement_version: the version to compare with.

    Raises:
        ConfigurationError: another operation.

    Example:
        >>> compare_versions("torch", ">=", "2.0"), compare_versions(Version("1.2"), "==", "1.2.0")
        (True, True)
    """
    version_to_check = library_or_version
    if isinstance(version_to_check, str):
        # An uninstalled package raises PackageNotFoundError, as in Accelerate.
        version_to_check = Version(version(version_to_check))
    requirement = Version(requirement_version)
    results = {
        "<": version_to_check < requirement,
        "<=": version_to_check <= requirement,
        "==": version_to_check == requirement,
        "!=": version_to_check != requirement,
        ">=": version_to_check >= requirement,
        ">": version_to_check > requirement,
    }
    if operation not in results:
        raise ConfigurationError(
            f"unknown comparison {operation!r}",
            fix=f"use one of: {', '.join(results)}",
        )
    return results[operation]


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version compares with another one, without a suffix such as ``+cpu``.

    Example:
        >>> is_torch_version(">=", "2.0")
        True
    """
    # A version with a local suffix is newer than the same without: "2.13.0+cpu" == "2.13.0" would be False.
    return compare_versions(
        Version(Version(torch.__version__).base_version), operation, version
    )


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, at least in a version."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return False
    if min_version is None:
        return True
    return compare_versions("bitsandbytes", ">=", min_version)


def is_habana_gaudi1() -> bool:
    """False: no strategy runs on Gaudi."""
    return False


def is_torch_xla_available(
    check_is_tpu: bool = False, check_is_gpu: bool = False
) -> bool:
    """Whether torch_xla is installed and, on request, computes on a TPU or a GPU."""
    if importlib.util.find_spec("torch_xla") is None:
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    device_types = ["GPU", "CUDA"]
    if check_is_tpu:
        device_types = ["TPU"]
    # Asking for the type starts the runtime, so it is asked for on request only.
    runtime = importlib.import_module("torch_xla.runtime")
    return runtime.device_type() in device_types


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is installed and this GPU computes in MXFP8."""
    if not probe("transformer_engine")():
        return False
    fp8 = importlib.import_module("transformer_engine.pytorch.fp8")
    is_supported, _reason = fp8.check_mxfp8_support()
    return bool(is_supported)


def _required(feature: str, function: _Decorated) -> _Decorated:
    # At the call and not at the decoration, so that a module that uses the decorator can be imported without it.
    @wraps(function)
    def call(*arguments: object, **options: object) -> object:
        if not probe(feature)():
            raise ImportError(
                f"{function.__name__} needs {feature}: pip install {feature}"
            )
        return function(*arguments, **options)

    # wraps keeps the signature, which a checker cannot know.
    return call  # type: ignore[return-value]


def deepspeed_required(func: _Decorated) -> _Decorated:
    """Decorator: a call raises an ImportError if DeepSpeed is not installed."""
    return _required("deepspeed", func)


def torchao_required(func: _Decorated) -> _Decorated:
    """Decorator: a call raises an ImportError if torchao is not installed."""
    return _required("torchao", func)
