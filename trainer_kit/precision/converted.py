"""The base of precisions that exchange layers for those of a vendor; a native precision computes the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import PrecisionError
from trainer_kit.core.types import Batch, SavedState, StateDict
from trainer_kit.precision.exceptions import (
    Exceptions,
    call_layers,
    except_modules,
    excepted,
)
from trainer_kit.precision.native import (
    NativePrecision,
    native_precision,
    note_layers,
    refuse_layers,
)
from trainer_kit.precision.precision import Precision

__all__ = [
    "ConvertedPrecision",
    "QuantizedLayer",
    "VendorModule",
    "refuse_shared",
    "vendor_module",
]


VendorModule: TypeAlias = Any
"""A module of a vendor, or an object of its: most vendors ship no types, and need not be installed."""


class ConvertedPrecision(Precision):
    """A native precision with some layers exchanged.

    Args:
        name: of the precision, by which engines refuse it.
        base: the precision of everything else, as a word or an object.
        exceptions: modules whose layers are not exchanged; see `Exceptions`.
    """

    def __init__(
        self, name: str, base: str | NativePrecision, exceptions: Exceptions
    ) -> None:
        self.name = name
        self.exceptions = except_modules(exceptions)
        if isinstance(base, str):
            base = native_precision(base)
        self.base = base
        self.converts_batch = self.base.converts_batch
        self.scales = self.base.scales
        self.skips = self.base.skips
        self.param_dtype = self.base.param_dtype
        self.reduce_dtype = self.base.reduce_dtype
        # The accelerator that `convert_module` checks.
        self._unchecked: torch.device | None = None

    def check_vendor(self, device: torch.device) -> None:
        """Raise a PrecisionError where the vendor's kernels do not run on this device. Default: they do.

        Args:
            device: the device of this rank.

        Raises:
            PrecisionError: with the reason.
        """

    @abstractmethod
    def options(self) -> str:
        """What decides, besides exceptions, which layers are exchanged, and for which."""

    @abstractmethod
    def exchange(self, module: nn.Module, exempt: list[str]) -> None:
        """Exchange layers in place, but those in modules named in ``exempt``.

        Args:
            module: the whole module.
            exempt: the names of the modules whose layers stay.
        """

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a PrecisionError where this precision cannot run."""
        super().check(device, engine)
        self.base.check(device, engine)
        # A check of an accelerator initializes it, and a process that made a Trainer may still fork its ranks.
        self._unchecked = None if device.type == "cpu" else torch.device(device.type)
        if self._unchecked is None:
            self.check_vendor(device)

    def convert_module(self, module: nn.Module) -> None:
        """Exchange layers, then cast the rest as the native precision does."""
        if self._unchecked is not None:
            self.check_vendor(self._unchecked)
            self._unchecked = None
        exceptions = list(excepted(module, self.exceptions))
        # What decides which layers are exchanged is compared with an earlier conversion as a text.
        options = f"{self.options()}, exceptions={self.exceptions}"
        # Refused before anything changes: a second precision would find no layer of the kind that it exchanges.
        refuse_layers(module, self.name, options)
        self.exchange(module, [name for name, _, _ in exceptions])
        note_layers(module, self.name, options)
        with_dtype = [
            (name, submodule, precision)
            for name, submodule, precision in exceptions
            if precision is not None
        ]
        self.base.convert_with(module, with_dtype)
        # torch's fast path would read the weights of exchanged layers, which may be quantized, past their forward.
        call_layers(module, lambda submodule: True)

    def separately_gathered_modules(self, module: nn.Module) -> list[nn.Module]:
        """Exceptions with another dtype, and layers that store quantized weights."""
        exceptions = excepted(module, self.exceptions)
        modules = [
            submodule for _, submodule, precision in exceptions if precision is not None
        ]
        modules += [
            layer for layer in module.modules() if isinstance(layer, QuantizedLayer)
        ]
        return modules

    def convert_batch(self, batch: Batch) -> Batch:
        """As the native precision does."""
        return self.base.convert_batch(batch)

    def forward_context(self) -> AbstractContextManager[object] | None:
        """As the native precision does."""
        return self.base.forward_context()

    def init_context(self) -> AbstractContextManager[object]:
        """As the native precision does."""
        return self.base.init_context()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """As the native precision does."""
        return self.base.scale_loss(loss)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """As the native precision does."""
        self.base.unscale_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], object]) -> bool:
        """As the native precision does."""
        return self.base.optimizer_step(optimizer, step)

    def end_step(self) -> None:
        """As the native precision does."""
        self.base.end_step()

    def abandon_step(self) -> None:
        """As the native precision does."""
        self.base.abandon_step()

    def state_dict(self) -> StateDict:
        """The state of the native precision; the layers' state is in the module's ``state_dict``."""
        return self.base.state_dict()

    def load_state_dict(self, state: SavedState) -> None:
        """Restore what `state_dict` returned."""
        self.base.load_state_dict(state)


@runtime_checkable
class QuantizedLayer(Protocol):
    """A layer whose parameters hold a quantized weight, in its own shape."""

    def take_floats(self, state: StateDict, prefix: str) -> None:
        """Quantize this layer's weight in a state, where that holds floats."""


def vendor_module(name: str, problem: str, fix: str) -> VendorModule:
    """Import a vendor's module.

    Raises:
        PrecisionError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise PrecisionError(problem, found=str(error), fix=fix) from error


def refuse_shared(
    module: nn.Module, layers: Mapping[str, nn.Module], name: str
) -> None:
    """Refuse to exchange layers whose weights another module shares: the two would be separated.

    Raises:
        PrecisionError: it names the weights.
    """
    # By id, with duplicates: `named_parameters` alone shows a shared weight under the first of its names only.
    owners: dict[int, list[str]] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        direct = submodule.named_parameters(recurse=False, remove_duplicate=False)
        for key, parameter in direct:
            owners.setdefault(id(parameter), []).append(prefix + key)
    for path, layer in layers.items():
        shared = owners.get(id(layer.weight), [])
        if len(shared) > 1:
            raise PrecisionError(
                f"{name} would split shared weights",
                found=" and ".join(shared),
                fix=f"exceptions=[{path!r}]",
            )
