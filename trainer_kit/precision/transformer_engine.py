"""fp8 by NVIDIA's Transformer Engine, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any, Final, final

import torch
from torch import nn

from trainer_kit.core.errors import PrecisionError
from trainer_kit.precision.converted import ConvertedPrecision, vendor_module
from trainer_kit.precision.exceptions import Exceptions, is_excepted
from trainer_kit.precision.native import NativePrecision

__all__ = ["TransformerEnginePrecision"]

_COLUMNS: Final = 16  # in_features are a multiple of it for its products
_ROWS: Final = 8  # and out_features of this
_NOT_NVIDIA: Final = ("cpu", "mps", "xpu", "xla")
_HISTORIES: Final = ("scaling_fwd", "scaling_bwd")


@final
class TransformerEnginePrecision(ConvertedPrecision):
    """Linear layers and layer norms are Transformer Engine's, and their products are in fp8.

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
    """

    def __init__(
        self,
        base: str | NativePrecision = "bf16-true",
        recipe: Any = None,
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
        self.recipe = _recipe(recipe)
        self._layers: dict[str, nn.Module] = {}
        self._root: nn.Module | None = None

    def check_vendor(self, device: torch.device) -> None:
        """Ask Transformer Engine."""
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
            PrecisionError: for linear layers whose sizes its products do not support.
        """
        engine = self.engine
        wanted: dict[str, Any] = {
            name: part
            for name, part in module.named_modules()
            if self.replace_layers
            and _exchangeable(part)
            and not is_excepted(name, exempt)
        }
        odd = [
            name
            for name, part in wanted.items()
            if isinstance(part, nn.Linear) and _odd(part)
        ]
        if odd:
            raise PrecisionError(
                f"Transformer Engine needs in_features in multiples of {_COLUMNS}, out_features of {_ROWS}",
                found=", ".join(
                    f"{n} ({wanted[n].in_features} to {wanted[n].out_features})"
                    for n in odd[:8]
                ),
                fix=f"pass exceptions={odd}, or use sizes that are",
            )
        for name, part in wanted.items():
            module.set_submodule(
                name,
                _linear(engine, part)
                if isinstance(part, nn.Linear)
                else _norm(engine, part),
            )
        self._root = module
        self._layers = {
            name: part
            for name, part in module.named_modules()
            if hasattr(part, "fp8_meta")
        }
        for layer in self._layers.values():
            if not layer.__dict__.get("_without_pickle"):
                layer.__dict__["_without_pickle"] = True
                layer.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]
                layer.register_load_state_dict_pre_hook(_leave_out_of_load)  # type: ignore[no-untyped-call]

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """The context of fp8 inside the native one."""
        return _Contexts(self)

    def enter(self) -> AbstractContextManager[Any]:
        """Transformer Engine's context; its name depends on the release."""
        enabled = self.evaluate or self._root is None or self._root.training
        if hasattr(self.engine, "autocast"):
            made = self.engine.autocast(enabled=enabled, recipe=self.recipe)
        else:
            made = self.engine.fp8_autocast(enabled=enabled, fp8_recipe=self.recipe)
        return made  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Scales and histories of maxima by layer, and the state of the native precision."""
        layers = {}
        for name, layer in self._layers.items():
            meta: Any = layer.fp8_meta
            kept = {
                key: meta[key]
                for key in _HISTORIES
                if hasattr(meta.get(key), "amax_history")
            }
            if kept:
                layers[name] = {
                    key: {
                        "scale": one.scale.clone(),
                        "amax_history": one.amax_history.clone(),
                    }
                    for key, one in kept.items()
                }
        return {"base": self.base.state_dict(), "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.base.load_state_dict(state.get("base", {}))
        for name, kept in state.get("layers", {}).items():
            layer: Any = self._layers[name]
            layer.fp8_meta["recipe"] = self.recipe
            layer.init_fp8_meta_tensors(self.recipe)
            for key, values in kept.items():
                own = layer.fp8_meta[key]
                own.scale.copy_(values["scale"])
                own.amax_history.resize_(values["amax_history"].shape).copy_(
                    values["amax_history"]
                )


@final
class _Contexts:
    """Transformer Engine's context inside the native one; each entry makes a new one."""

    def __init__(self, precision: TransformerEnginePrecision) -> None:
        self.precision = precision
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


def _recipe(given: Any) -> Any:
    if given is not None and not isinstance(given, Mapping):
        return given
    recipes = import_module("transformer_engine.common.recipe")
    options = dict(given or {})
    if isinstance(options.get("fp8_format"), str):
        options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
    return recipes.DelayedScaling(**options)


def _exchangeable(part: nn.Module) -> bool:
    """Whether Transformer Engine has such a layer; its layer norms have a weight and a bias."""
    return type(part) is nn.Linear or (
        type(part) is nn.LayerNorm and part.weight is not None and part.bias is not None
    )


def _odd(layer: nn.Linear) -> bool:
    return bool(layer.in_features % _COLUMNS or layer.out_features % _ROWS)


def _linear(engine: Any, layer: nn.Linear) -> Any:
    dtype = layer.weight.dtype
    made = engine.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=dtype,
    )
    made.weight = layer.weight
    if layer.bias is not None:
        made.bias = layer.bias
    return made.train(layer.training)


def _norm(engine: Any, layer: nn.LayerNorm) -> Any:
    made = engine.LayerNorm(
        layer.normalized_shape, eps=layer.eps, params_dtype=layer.weight.dtype
    )
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def _leave_out(
    layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    state.pop(f"{prefix}_extra_state", None)


def _leave_out_of_load(
    layer: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    *rest: Any,
) -> None:
    state[f"{prefix}_extra_state"] = (
        None  # the layer requires the key; None changes nothing
    )
