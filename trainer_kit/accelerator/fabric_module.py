"""What ``Fabric.setup`` returns for a module: its attributes pass through, its methods run through the wrapper."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, Protocol, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.tensors import map_leaves
from trainer_kit.core.torch_private import CHILDREN
from trainer_kit.core.types import Function, Nested

__all__ = [
    "FabricModule",
    "is_wrapped",
    "prepared_module",
    "serve_module",
    "unwrap_objects",
]


class _FabricLike(Protocol):
    """What a `TrainModule` uses of the Fabric that runs it; the class itself is in a module that imports this one."""

    loggers: list[Any]

    @property
    def backward(self) -> Callable[..., None]: ...
    def log(self, name: str, value: object) -> None: ...


_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")


@final
class FabricModule(nn.Module):
    """A prepared module under the user's own names.

    Calling it, or one of its forward methods, synchronizes gradients and uses the precision. Other attributes are the
    user's module's, also when they are assigned. The steps of a `TrainModule` are forward methods;
    `mark_forward_method` adds others.

    Args:
        module: the user's module.
        prepared: what the Accelerator made of it: the module itself or torch's wrapper around it.
        in_precision: gives a method the precision of the forward.
    """

    def __init__(
        self,
        module: nn.Module,
        prepared: nn.Module,
        in_precision: Callable[[Function], Function],
    ) -> None:
        super().__init__()
        self._modules["module"] = module
        # In `__dict__` from here on, because `__setattr__` now sets attributes of the user's module.
        # ``nn.Module.__call__`` finds this entry before the method of the class. A bound method, not the module: it has
        # a ``__code__``, which torch.export reads.
        self.__dict__["forward"] = prepared.__call__
        # Not a submodule: every parameter would have two names.
        self.__dict__["_prepared"] = prepared
        self.__dict__["_in_precision"] = in_precision
        self.__dict__["_forward_methods"] = set[str]()
        if isinstance(module, TrainModule):
            for name in _STEPS:
                self.mark_forward_method(name)

    @property
    def _forward_module(self) -> nn.Module:
        """Lightning's name for the prepared module, which torch's ``Join`` needs."""
        prepared: nn.Module = self._prepared
        return prepared

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, which cannot compile the wrapper: it compiles the user's module."""
        module: nn.Module = self.module
        return module

    def mark_forward_method(self, method: str | Function) -> None:
        """Run a method as the forward is run: through the wrapper, in the precision.

        Args:
            method: the method of the user's module, or its name.

        Raises:
            ConfigurationError: the module has no such method.
        """
        name = method if isinstance(method, str) else method.__name__
        if name == "forward" or not callable(getattr(self.module, name, None)):
            raise ConfigurationError(
                "only a method of the module, other than forward, can be marked as a forward method",
                found=f"{name!r} of {type(self.module).__name__}",
            )
        module: Any = self.module
        # FSDP2 gathers parameters in hooks of the forward only. Not twice: torch would wrap the method again.
        if isinstance(module, FSDPModule) and name not in self._forward_methods:
            # torch mixes FSDPModule into the class, which its annotation does not show.
            register_fsdp_forward_method(module, name)  # type: ignore[arg-type]
        self._forward_methods.add(name)

    def __getattr__(self, name: str) -> Any:
        # Not `self.module`, which would call this method again.
        module = self.__dict__[CHILDREN]["module"]
        if name == "module":
            return module
        attribute = getattr(module, name)
        # Without a wrapper no gradients are synchronized, so every method may run layers.
        is_wrapped_module = self.__dict__["_prepared"] is not module
        if name in self.__dict__["_forward_methods"]:
            step = self.__dict__["_in_precision"](attribute)
            return self._through_wrapper(step) if is_wrapped_module else step
        is_method = getattr(attribute, "__self__", None) is module
        if is_wrapped_module and is_method:
            return self._refuse_gradients_in(attribute, name)
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get(CHILDREN, {}).get("module")
        # nn.Module's constructor sets its attributes before there is a module.
        if module is None:
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def _through_wrapper(self, step: Function) -> Function:
        """Call the wrapper with the step in the place of the module's forward."""

        @wraps(step)
        def call(*args: object, **kwargs: object) -> object:
            # A forward of the instance, such as one under a precision, comes back after the step.
            attributes = self.module.__dict__
            replaced = {}
            if "forward" in attributes:
                replaced["forward"] = attributes["forward"]

            def forward(*args: object, **kwargs: object) -> object:
                # The step may call the module itself.
                restore()
                return step(*args, **kwargs)

            def restore() -> None:
                attributes.pop("forward", None)
                attributes.update(replaced)

            # The wrapper calls the module's forward: in this way it calls the step, and prepares the gradient exchange
            # for it.
            attributes["forward"] = forward
            try:
                return self._prepared(*args, **kwargs)
            finally:
                # Also if the wrapper fails before it calls the forward.
                restore()

        return call

    def _refuse_gradients_in(self, method: Function, name: str) -> Function:
        """Refuse a method that computes gradients past the wrapper, which would not synchronize them."""

        def refuse(*_: object) -> None:
            # Here, in a layer: a method that runs no layer, or runs it under ``torch.no_grad()``, is allowed.
            if torch.is_grad_enabled():
                raise ConfigurationError(
                    "this method runs layers without the wrapper that synchronizes gradients",
                    found=f"{type(self.module).__name__}.{name}",
                    fix=f"call model.mark_forward_method({name!r}) after fabric.setup, or use torch.no_grad()",
                )

        @wraps(method)
        def call(*args: object, **kwargs: object) -> object:
            hooks = [
                submodule.register_forward_pre_hook(refuse)
                for submodule in self.module.modules()
            ]
            try:
                return method(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()

        return call

    def train(self, mode: bool = True) -> FabricModule:
        """Set the mode of the module and of its wrapper."""
        self._prepared.train(mode)
        # `__setattr__` would set the flag of the user's module only.
        self.__dict__["training"] = mode
        return self

    # Methods of ``nn.Module`` do not reach `__getattr__`; in this object they would find no parameters under the user's
    # names.
    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Register a buffer in the user's module."""
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        """Register a parameter in the user's module; the wrapper and the optimizer do not know it."""
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        """Add a module to the user's module; the wrapper and the optimizer do not know its parameters."""
        self.module.add_module(*args, **kwargs)

    register_module = add_module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module's."""
        return self.module.load_state_dict(*args, **kwargs)


def prepared_module(module: nn.Module) -> nn.Module:
    """Return what the Accelerator made of a module that `Fabric.setup` returned; return other modules unchanged."""
    if not isinstance(module, FabricModule):
        return module
    prepared: nn.Module = module._prepared
    return prepared


def is_wrapped(obj: object) -> bool:
    """Whether a Fabric has set up this module.

    Example:
        >>> from trainer_kit import Fabric
        >>> layer = nn.Linear(2, 1)
        >>> is_wrapped(layer), is_wrapped(Fabric(accelerator="cpu", devices=1).setup(layer))
        (False, True)
    """
    return isinstance(obj, FabricModule)


def unwrap_objects(collection: Nested) -> Nested:
    """Replace the modules that `Fabric.setup` returned by the user's own, in any nesting."""
    return map_leaves(collection, lambda module: module.module, FabricModule)


def serve_module(module: nn.Module, fabric: _FabricLike) -> None:
    """Let a `TrainModule` log, print and run backward through a Fabric."""
    if isinstance(module, TrainModule):
        # Not a Trainer, but it answers what a module asks its Trainer for.
        served: Any = _FabricAsTrainer(fabric)
        module.trainer = served


@final
class _FabricAsTrainer:
    """What a `TrainModule` asks its Trainer for, from a Fabric."""

    def __init__(self, fabric: _FabricLike) -> None:
        self.fabric = fabric
        # A module logs through `trainer.metrics`.
        self.metrics = self
        self.manual_backward = fabric.backward

    @property
    def logger(self) -> object:
        """The first logger, or None."""
        return self.fabric.loggers[0] if self.fabric.loggers else None

    def log(self, name: str, value: object, *options: object) -> None:
        """Log a value with every logger."""
        self.fabric.log(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self.fabric, name)
        except AttributeError:
            problem = ConfigurationError(
                f"trainer.{name} is not available: a Fabric runs this module",
                fix="pass the value to the method as an argument",
            )
            raise AttributeError(str(problem)) from None
