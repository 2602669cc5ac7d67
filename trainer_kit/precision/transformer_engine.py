"""fp8 by NVIDIA's Transformer Engine, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any, Final, final

import torch
from torch import nn

from trainer_kit.core.errors import PrecisionError
from trainer_kit.core.torch_private import EXTRA_STATE
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.precision.converted import (
    ConvertedPrecision,
    VendorModule,
    vendor_module,
)
from trainer_kit.precision.exceptions import Exceptions, is_excepted
from trainer_kit.precision.native import NativePrecision

__all__ = ["TransformerEnginePrecision"]

# Its matmuls need in_features that are a multiple of the one, and out_features of the other.
_COLUMNS: Final = 16
_ROWS: Final = 8
_NOT_NVIDIA: Final = ("cpu", "mps", "xpu", "xla")
_HISTORIES: Final = ("scaling_fwd", "scaling_bwd")


@final
class TransformerEnginePrecision(ConvertedPrecision):
    """Linear layers and layer norms are Transformer Engine's, and their matmuls are in fp8.

    The recipe decides how scales are computed. Delayed scaling keeps a history of maxima in each layer, which the
    ``state_dict`` of this precision holds as plain tensors, in place of the pickle that Transformer Engine would put
    into the module's.
    Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/.

    Args:
        base: the precision of everything else, and of stored weights: Lightning's ``"bf16-true"``, ``"16-true"`` or
            Accelerate's ``"bf16-mixed"``.
        recipe: one of ``transformer_engine.common.recipe``, or the arguments of ``DelayedScaling``; None: its default.
        replace_layers: exchange ``nn.Linear`` and ``nn.LayerNorm``; False for a model with Transformer Engine's layers.
        evaluate: compute in fp8 in evaluation mode too.
        exceptions: modules whose layers stay; see `trainer_kit.precision.Exceptions`.

    Raises:
        PrecisionError: it is not installed, or the GPU has no fp8.

    Example:
        >>> from trainer_kit.core.errors import PrecisionError
        >>> try:
        ...     precision = TransformerEnginePrecision("bf16-mixed", {"fp8_format": "HYBRID"}, exceptions=["head"])
        ... except PrecisionError as error:  # without an NVIDIA GPU, or without the package
        ...     assert error.fix
    """

    def __init__(
        self,
        base: str | NativePrecision = "bf16-true",
        recipe: VendorModule = None,
        *,
        replace_layers: bool = True,
        evaluate: bool = True,
        exceptions: Exceptions = (),
    ) -> None:
        super().__init__("transformer-engine", base, exceptions)
        self.engine = vendor_module(
            "transformer_engine.pytorch",
            "this precision needs Transformer Engine",
            "pip install 'transformer-engine[pytorch]' on a machine with an NVIDIA GPU, or precision='fp8'",
        )
        self.refused_devices = dict.fromkeys(
            _NOT_NVIDIA, "Transformer Engine needs an NVIDIA GPU"
        )
        self.replace_layers = replace_layers
        self.evaluate = evaluate
        self.recipe = _make_recipe(recipe)
        self._layers: dict[str, nn.Module] = {}
        self._root: nn.Module | None = None

    def check_vendor(self, device: torch.device) -> None:
        """Ask Transformer Engine."""
        # The answer of some releases has the reason in it, of others it is a bool alone.
        answer = self.engine.is_fp8_available(return_reason=True)
        available, reason = answer if isinstance(answer, tuple) else (answer, "")
        if not available:
            raise PrecisionError(
                "Transformer Engine does not support fp8 on this GPU",
                found=str(reason),
                fix='use precision="bf16-mixed"',
            )

    def options(self) -> str:
        """Whether layers are exchanged."""
        return f"replace_layers={self.replace_layers}"

    def exchange(self, module: nn.Module, exempt: list[str]) -> None:
        """Exchange linear layers and layer norms for Transformer Engine's; parameters stay the same objects.

        Raises:
            PrecisionError: for linear layers whose sizes its matmuls do not support.
        """
        if self.replace_layers:
            self._replace(module, exempt)
        self._root = module
        self._layers = {
            name: layer
            for name, layer in module.named_modules()
            if hasattr(layer, "fp8_meta")
        }
        # A pickle in a checkpoint could run code when it is loaded, and torch's safe loading refuses it.
        for layer in self._layers.values():
            if layer.__dict__.get("_without_pickle"):
                continue
            layer.__dict__["_without_pickle"] = True
            layer.register_state_dict_post_hook(_drop_extra_state)  # type: ignore[no-untyped-call]  # torch's
            layer.register_load_state_dict_pre_hook(_add_extra_state)  # type: ignore[no-untyped-call]  # torch's

    def _replace(self, module: nn.Module, exempt: list[str]) -> None:
        layers: dict[str, nn.Module] = {
            name: layer
            for name, layer in module.named_modules()
            if _is_exchangeable(layer) and not is_excepted(name, exempt)
        }
        unsupported = {
            name: f"{name} ({layer.in_features} to {layer.out_features})"
            for name, layer in layers.items()
            if isinstance(layer, nn.Linear) and _has_unsupported_size(layer)
        }
        # All at once and before any layer is replaced: the module stays as it was, and one fix names every exception.
        if unsupported:
            raise PrecisionError(
                f"Transformer Engine needs in_features in multiples of {_COLUMNS}, out_features of {_ROWS}",
                found=", ".join(list(unsupported.values())[:8]),
                fix=f"pass exceptions={list(unsupported)}, or use sizes that are",
            )
        for name, layer in layers.items():
            if isinstance(layer, nn.Linear):
                replacement = _make_linear(self.engine, layer)
            elif isinstance(layer, nn.LayerNorm):
                replacement = _make_norm(self.engine, layer)
            module.set_submodule(name, replacement)

    def forward_context(self) -> AbstractContextManager[object] | None:
        """The context of fp8 inside the native one."""
        return _Fp8Context(self)

    def enter(self) -> AbstractContextManager[object]:
        """Transformer Engine's context; its name depends on the release."""
        # Looked up at each entry: `eval` and `train` switch the mode of the module between two batches.
        enabled = self.evaluate or self._root is None or self._root.training
        context: AbstractContextManager[object]
        if hasattr(self.engine, "autocast"):
            context = self.engine.autocast(enabled=enabled, recipe=self.recipe)
        else:
            context = self.engine.fp8_autocast(enabled=enabled, fp8_recipe=self.recipe)
        return context

    def state_dict(self) -> StateDict:
        """Scales and histories of maxima by layer, and the state of the native precision."""
        layers: dict[str, StateDict] = {}
        for name, layer in self._layers.items():
            meta: Any = layer.fp8_meta
            for key in _HISTORIES:
                scaling = meta.get(key)
                if hasattr(scaling, "amax_history"):
                    layers.setdefault(name, {})[key] = {
                        "scale": scaling.scale.clone(),
                        "amax_history": scaling.amax_history.clone(),
                    }
        return {"base": self.base.state_dict(), "layers": layers}

    def load_state_dict(self, state: SavedState) -> None:
        """Restore what `state_dict` returned."""
        self.base.load_state_dict(state.get("base", {}))
        for name, saved in state.get("layers", {}).items():
            layer: Any = self._layers[name]
            # The layer creates these tensors in its first forward, which a resumed run has not had.
            layer.fp8_meta["recipe"] = self.recipe
            layer.init_fp8_meta_tensors(self.recipe)
            for key, values in saved.items():
                scaling = layer.fp8_meta[key]
                scaling.scale.copy_(values["scale"])
                history = values["amax_history"]
                # The saved history is as long as the recipe of the earlier run says.
                scaling.amax_history.resize_(history.shape).copy_(history)


@final
class _Fp8Context:
    """Transformer Engine's context inside the native one; each entry makes a new one."""

    def __init__(self, precision: TransformerEnginePrecision) -> None:
        self.precision = precision
        # One for each entry: entries may be nested.
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        outer = self.precision.base.forward_context()
        if outer is not None:
            stack.enter_context(outer)
        stack.enter_context(self.precision.enter())
        self.stacks.append(stack)

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


def _make_recipe(recipe: VendorModule) -> VendorModule:
    """The recipe itself, or delayed scaling with the options of a mapping."""
    if recipe is not None and not isinstance(recipe, Mapping):
        return recipe
    recipes = import_module("transformer_engine.common.recipe")
    options = dict(recipe or {})
    if isinstance(options.get("fp8_format"), str):
        options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
    return recipes.DelayedScaling(**options)


def _is_exchangeable(layer: nn.Module) -> bool:
    """Whether Transformer Engine has such a layer; its layer norms have a weight and a bias."""
    if type(layer) is not nn.LayerNorm:
        return type(layer) is nn.Linear
    return layer.weight is not None and layer.bias is not None


def _has_unsupported_size(layer: nn.Linear) -> bool:
    return bool(layer.in_features % _COLUMNS or layer.out_features % _ROWS)


def _make_linear(engine: VendorModule, layer: nn.Linear) -> nn.Module:
    dtype = layer.weight.dtype
    replacement: nn.Module = engine.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=dtype,
    )
    replacement.weight = layer.weight
    if layer.bias is not None:
        replacement.bias = layer.bias
    replacement.train(layer.training)
    return replacement


def _make_norm(engine: VendorModule, layer: nn.LayerNorm) -> nn.Module:
    replacement: nn.Module = engine.LayerNorm(
        layer.normalized_shape, eps=layer.eps, params_dtype=layer.weight.dtype
    )
    replacement.weight = layer.weight
    replacement.bias = layer.bias
    replacement.train(layer.training)
    return replacement


def _drop_extra_state(
    layer: nn.Module, state: StateDict, prefix: str, metadata: object
) -> None:
    state.pop(f"{prefix}{EXTRA_STATE}", None)


def _add_extra_state(
    layer: nn.Module,
    state: StateDict,
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    *arguments: object,
) -> None:
    # The layer requires the key; None changes nothing.
    state[f"{prefix}{EXTRA_STATE}"] = None
