"""What precisions share that exchange layers for those of a vendor and leave everything else to torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import PrecisionError
from trainer_kit.precision.conversion_markers import note_layers, refuse_layers
from trainer_kit.precision.exceptions import Exceptions, ModulePrecision, call_layers, except_modules, excepted
from trainer_kit.precision.native import MixedPrecision, TruePrecision, native_precision
from trainer_kit.precision.precision import Precision
from trainer_kit.precision.support_matrix import check_runs

__all__ = ["ConvertedPrecision", "refuse_shared"]


class ConvertedPrecision(Precision):
    """A native precision with some layers exchanged.

    Args:
        name: the word for it.
        base: a word or an object: what everything else computes in.
        exceptions: modules that are not exchanged; see `Exceptions`.

    Attributes:
        stored: kinds of layers whose parameters are no weights in a dtype, but what they were quantised to.
    """

    stored: tuple[type[nn.Module], ...] = ()

    def __init__(self, name: str, base: str | MixedPrecision | TruePrecision, exceptions: Exceptions) -> None:
        self.name = name
        self.exceptions = except_modules(exceptions)
        self.base = native_precision(base) if isinstance(base, str) else base
        self.converts_batch, self.scales = self.base.converts_batch, self.base.scales
        self.skips = self.base.skips
        self.param_dtype, self.reduce_dtype = self.base.param_dtype, self.base.reduce_dtype
        self.device = torch.device(self.base.device_type)
        self._asked = True  # until a run says where it is

    @abstractmethod
    def check_vendor(self, device: torch.device) -> None:
        """Raise a PrecisionError where this device cannot do it; an accelerator is asked by the ranks alone."""

    def options(self) -> str:
        """What decides, beside exceptions, on which layers are exchanged, and for what."""
        return ""

    @abstractmethod
    def exchange(self, module: nn.Module, exempt: list[str]) -> None:
        """Exchange layers in place; those in modules named in ``exempt`` stay."""

    @abstractmethod
    def forward_context(self) -> AbstractContextManager[Any] | None:
        """The context of a forward."""

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a PrecisionError where this cannot run; called before anything else."""
        check_runs(self.name, device.type, engine)
        self.device = device
        self.base.check(device, engine)
        self._asked = device.type == "cpu"
        if self._asked:
            self.check_vendor(device)
        # Whoever asks an accelerator initialises it: a process that made a Trainer may still fork its ranks.

    def convert_module(self, module: nn.Module) -> None:
        """Exchange layers, then cast the rest as the native precision does."""
        if not self._asked:
            self._asked = True
            self.check_vendor(torch.device(self.device.type))
        found = list(excepted(module, self.exceptions))
        options = f"{self.options()}, exceptions={self.exceptions}"
        refuse_layers(module, self.name, options)
        self.exchange(module, [name for name, _, _ in found])
        note_layers(module, self.name, options)
        self.base.convert_with(
            module,
            [(name, part, given) for name, part, given in found if isinstance(given, ModulePrecision)],
        )
        call_layers(module, lambda part: True)

    def kept_modules(self, module: nn.Module) -> list[nn.Module]:
        """Exceptions with a dtype of their own, and layers that store something else than weights."""
        own = [part for _, part, given in excepted(module, self.exceptions) if given is not None]
        return own + [part for part in module.modules() if isinstance(part, self.stored)]

    def convert_batch(self, batch: Any) -> Any:
        """As the native precision does."""
        return self.base.convert_batch(batch)

    def init_context(self) -> AbstractContextManager[Any]:
        """As the native precision does."""
        return self.base.init_context()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """As the native precision does."""
        return self.base.scale_loss(loss)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """As the native precision does."""
        self.base.unscale_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> bool:
        """As the native precision does."""
        return self.base.optimizer_step(optimizer, step)

    def end_step(self) -> None:
        """As the native precision does."""
        self.base.end_step()

    def abandon_step(self) -> None:
        """As the native precision does."""
        self.base.abandon_step()

    def state_dict(self) -> dict[str, Any]:
        """That of the native precision: what layers learn is in the module's."""
        return self.base.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.base.load_state_dict(state)


def refuse_shared(module: nn.Module, layers: Mapping[str, nn.Module], name: str) -> None:
    """Layers whose weights another module has too would come apart when they are exchanged.

    Raises:
        PrecisionError: naming them.
    """
    owners: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    for path, layer in layers.items():
        shared = owners.get(id(layer.weight), [])
        if len(shared) > 1:
            raise PrecisionError(
                f"{name} would separate weights that are shared",
                found=" and ".join(shared),
                fix=f"exceptions=[{path!r}]",
            )
