"""Change and unwrap models for a custom training loop: precision, the strategy's wrapper, ``torch.compile``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import CodeType
from typing import Any, Final, final

import torch
from torch import nn

from trainer_kit.accelerator.fabric_module import FabricModule
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.state_names import uncompiled
from trainer_kit.core.tensors import map_tensors, to_float32
from trainer_kit.core.types import Function, Keywords
from trainer_kit.options.records import AutocastKwargs, TorchDynamoPlugin
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.adaptive_ddp import AdaptiveDDP
from trainer_kit.strategies.strategy import EngineModule

__all__ = [
    "apply_precision",
    "compile_options",
    "compiled",
    "in_precision",
    "remove_precision",
    "spans_devices",
    "uncompiled",
    "under_precision",
    "unwrap",
    "with_exchange",
    "without_exchange",
]


_WRAPPERS: Final = (
    nn.parallel.DistributedDataParallel,
    nn.DataParallel,
    EngineModule,
    FabricModule,
)


@final
class _Forward:
    """A model's forward under autocast; its outputs are converted to float32, which losses need."""

    def __init__(self, forward: Function, precision: Precision) -> None:
        self.forward = forward
        self.precision = precision

    @property
    def __wrapped__(self) -> Function:
        """Gives this object the signature of the model's forward."""
        # A generate of transformers passes masks and positions only to a forward that names them.
        return self.forward

    @property
    def __code__(self) -> CodeType:
        """Read by torch.export."""
        return self.forward.__code__

    @property
    def __globals__(self) -> dict[str, object]:
        """Read by torch.jit.script, which compiles the code of the class and would leave out the precision.

        Raises:
            AttributeError: always, with what to do instead.
        """
        problem = ConfigurationError(
            "torch.jit.script cannot compile a model that is prepared with a precision",
            found=f"precision {self.precision.name!r}",
            fix="script the model before it is prepared, or accelerator.unwrap_model(model, keep_fp32_wrapper=False),"
            " and call the result in torch.autocast",
        )
        # Code that inspects functions expects this class of a function without the attribute.
        raise AttributeError(str(problem))

    def __deepcopy__(self, memo: dict[int, object]) -> _Forward:
        return _Forward(copy.deepcopy(self.forward, memo), self.precision)

    def __call__(self, *arguments: object, **options: object) -> object:
        context = self.precision.forward_context()
        assert context is not None
        if self.precision.converts_batch:
            arguments = self.precision.convert_batch(arguments)
            options = self.precision.convert_batch(options)
        with context:
            outputs = self.forward(*arguments, **options)
        return map_tensors(outputs, to_float32)


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Make ``model(...)`` compute in the precision; a second call has no effect."""
    if precision.forward_context() is None or _has_precision(model):
        return
    # Set on the instance, so that other models of the class do not change. A shallow copy (``copy.copy``) of the model
    # shares this forward, as it shares the parameters; a deep copy has its own.
    model.__dict__["forward"] = under_precision(model.forward, precision)


def _has_precision(model: nn.Module) -> bool:
    return isinstance(model.__dict__.get("forward"), _Forward)


def under_precision(method: Function, precision: Precision) -> Function:
    """Return a method of a model that computes in the precision."""
    if precision.forward_context() is None:
        return method
    return _Forward(method, precision)


@contextmanager
def in_precision(
    precision: Precision, options: AutocastKwargs | None, device: torch.device
) -> Iterator[None]:
    """Apply a precision to the computations of a block; ``options`` change its autocast, if it has one."""
    context = precision.forward_context()
    if options is not None and isinstance(context, torch.autocast):
        context = torch.autocast(
            device.type,
            context.fast_dtype,
            enabled=options.enabled,
            cache_enabled=options.cache_enabled,
        )
    with context or nullcontext():
        yield


def unwrap(model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
    """Return the user's model from inside the wrappers of `prepare` and ``torch.compile``.

    Args:
        model: a prepared model, or any other.
        keep_fp32_wrapper: False also removes the precision from the model's forward.
    """
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
            continue
        inner = uncompiled(model)
        if inner is model:
            break
        model = inner
    if not keep_fp32_wrapper:
        remove_precision(model)
    return model


def remove_precision(model: nn.Module) -> None:
    """Give a model the forward back that it had before `apply_precision`: of its class, or of the instance."""
    forward = model.__dict__.get("forward")
    if not isinstance(forward, _Forward):
        return
    del model.__dict__["forward"]
    if model.forward != forward.forward:
        model.__dict__["forward"] = forward.forward


@contextmanager
def without_exchange(*models: nn.Module) -> Iterator[None]:
    """Skip the gradient exchange for every backward in the context; the next backward outside exchanges them."""
    with ExitStack() as stack:
        for model in map(uncompiled, models):
            if isinstance(model, nn.parallel.DistributedDataParallel):
                stack.enter_context(model.no_sync())
            elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2
                sharded: Any = model
                sharded.set_requires_gradient_sync(False)
                stack.callback(sharded.set_requires_gradient_sync, True)
        yield


@contextmanager
def with_exchange(model: nn.Module) -> Iterator[None]:
    """Exchange gradients in the next backward of the context, even if its forward ran under `without_exchange`."""
    model = uncompiled(model)
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        yield
        return
    requires_backward = model.require_backward_grad_sync
    requires_forward = model.require_forward_param_sync
    model.require_backward_grad_sync = True
    model.require_forward_param_sync = True
    if isinstance(model, AdaptiveDDP):
        model.follow_trained()
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync = requires_backward
        model.require_forward_param_sync = requires_forward


def spans_devices(model: nn.Module) -> bool:
    """Whether `dispatch_model` placed the layers of a model on several devices."""
    for module in model.modules():
        device_map = getattr(module, "hf_device_map", None)
        if device_map is not None and len(set(device_map.values())) > 1:
            return True
    return False


def compiled(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Return the model compiled with the plugin's options."""
    options = compile_options(plugin)
    try:
        compiled_model: Any = torch.compile(model, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            "torch.compile rejects these options",
            found=f"{options}: {error}",
            fix='use dynamo_backend="inductor"',
        ) from error
    # torch's overloads return a callable for a module with options.
    return compiled_model  # type: ignore[no-any-return]


def compile_options(plugin: TorchDynamoPlugin) -> Keywords:
    """Return the plugin's options as arguments of ``torch.compile``."""
    return {
        "backend": plugin.backend.lower(),
        "mode": plugin.mode,
        "fullgraph": plugin.fullgraph,
        "dynamic": plugin.dynamic,
        "options": None if plugin.options is None else dict(plugin.options),
        "disable": plugin.disable,
    }
