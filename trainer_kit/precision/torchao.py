"""torchao: matmuls in float8, and quantization-aware training."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, final

import torch
from torch import nn

from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.precision.converted import (
    ConvertedPrecision,
    VendorModule,
    vendor_module,
)
from trainer_kit.precision.exceptions import Exceptions, is_excepted
from trainer_kit.precision.native import NativePrecision, forget_layers
from trainer_kit.precision.torch_private import scaled_matmul

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

__all__ = ["Float8Precision", "QATPrecision"]

_INSTALL: Final = "pip install 'trainer-kit[torchao]'"
_MULTIPLE: Final = 16
"""Both sizes of a weight are multiples of it for fp8 matmuls."""


@final
class Float8Precision(ConvertedPrecision):
    """Linear layers multiply in float8, everything else computes in ``base``; weights are stored as they are.

    Inputs, weights and gradients get new scales in each step, so they have no state to save. All linear layers are
    exchanged (not subclasses of ``nn.Linear``) but exceptions, often the first and the last.
    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; https://github.com/pytorch/ao.

    Args:
        recipe: one scale for each tensor or for each row, as torchao names them.
        base: ``"bf16-mixed"``, ``"bf16-true"`` or ``"32-true"``, or an object.
        ends: whether the first and the last linear layer are exchanged too, in the order of ``named_modules``.
        module_filter: called with each linear layer and its name; returns whether to exchange it.
        emulate: compute the same results in the dtype of the inputs, on a device without float8 matmuls.
        config: torchao's configuration, in place of ``recipe``.
        exceptions: modules whose linear layers stay; see `trainer_kit.precision.Exceptions`.

    Raises:
        PrecisionError: torchao is not installed, or knows no such recipe.

    Example:
        >>> Float8Precision("rowwise", exceptions=["head"]).name
        'fp8'
    """

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        base: str | NativePrecision = "bf16-mixed",
        *,
        ends: bool = True,
        module_filter: Callable[[nn.Module, str], bool] | None = None,
        emulate: bool = False,
        config: Float8LinearConfig | None = None,
        exceptions: Exceptions = (),
    ) -> None:
        super().__init__("fp8", base, exceptions)
        self.ends = ends
        self.module_filter = module_filter
        self.config = config or _float8_config(recipe)
        if emulate:
            self.config = replace(self.config, emulate=True)

    def check_vendor(self, device: torch.device) -> None:
        """Try one matmul: each release of torch adds devices, and offers no list of them."""
        if self.config.enable_fsdp_float8_all_gather:
            raise PrecisionError(
                "FSDP's all-gather in float8 is not supported",
                found="enable_fsdp_float8_all_gather: torchao replaces the parameters, so an existing optimizer"
                " does not step them, and a checkpoint cannot hold them",
                fix="leave it out: weights are gathered in the dtype in which they are stored",
            )
        if self.config.emulate:
            return
        # The smallest matmul that the kernels accept.
        matrix = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
        scale = torch.ones((), device=device)
        try:
            scaled_matmul(
                matrix,
                matrix.t(),
                scale_a=scale,
                scale_b=scale,
                out_dtype=torch.bfloat16,
            )
        except (RuntimeError, NotImplementedError) as error:
            raise PrecisionError(
                f"a device of type {device.type!r} here does not support float8 matmuls",
                found=str(error).splitlines()[0],
                fix='use precision="bf16-mixed"; or Float8Precision(emulate=True), which is slower, with the'
                " same results",
            ) from error

    def options(self) -> str:
        """The configuration, and which layers are exchanged."""
        return f"{self.config}, ends={self.ends}, {getattr(self.module_filter, '__qualname__', '')}"

    def exchange(self, module: nn.Module, exempt: list[str]) -> None:
        """Exchange linear layers for torchao's; parameters stay the same objects.

        Raises:
            PrecisionError: for weights whose sizes fp8 matmuls do not support.
        """
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        if isinstance(module, nn.Linear):
            raise PrecisionError(
                "a module that is a single linear layer cannot be replaced",
                fix="wrap it in a module",
            )
        # Subclasses have another forward, and torch's attention never calls its linear layer.
        linear: dict[str, nn.Linear] = {
            name: layer
            for name, layer in module.named_modules()
            if type(layer) in (nn.Linear, Float8Linear)
        }
        names = list(linear)
        if not self.ends:
            names = names[1:-1]
        selected = {
            name
            for name in names
            # A layer of an earlier run stays.
            if not isinstance(linear[name], Float8Linear)
            and not is_excepted(name, exempt)
            and self._is_selected(linear[name], name)
        }
        unsupported = {
            name: f"{name} ({linear[name].out_features}×{linear[name].in_features})"
            for name in sorted(selected)
            if _has_unsupported_size(linear[name])
        }
        if unsupported:
            raise PrecisionError(
                f"float8 matmuls need weight sizes that are multiples of {_MULTIPLE}",
                found=", ".join(list(unsupported.values())[:8]),
                fix=f"pass exceptions={list(unsupported)}, or use sizes that are",
            )
        convert_to_float8_training(
            module,
            config=self.config,
            module_filter_fn=lambda _, name: name in selected,
        )

    def _is_selected(self, layer: nn.Module, name: str) -> bool:
        return self.module_filter is None or self.module_filter(layer, name)


def _has_unsupported_size(layer: nn.Linear) -> bool:
    return bool(layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)


@final
class QATPrecision(ConvertedPrecision):
    """Linear layers compute as if their weights were quantized, so that training adapts the weights to it.

    Weights keep their names and dtype, so checkpoints are those of the plain model. `export` returns the quantized
    model, at the end or at any time before.
    Source: Jacob et al., CVPR 2018; https://github.com/pytorch/ao/tree/main/torchao/quantization/qat.

    Args:
        config: of the later quantization, as torchao's ``quantize_`` takes it; None: 8-bit inputs and 4-bit weights in
            groups of 32.
        base: the precision of everything else: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, or an object.
        exceptions: modules whose layers are not quantized; see `trainer_kit.precision.Exceptions`.

    Raises:
        PrecisionError: torchao is not installed.

    Example:
        >>> precision = QATPrecision()
        >>> net = nn.Sequential(nn.Linear(32, 4))
        >>> precision.convert_module(net)
        >>> type(net[0]).__name__, type(precision.export(net)[0]).__name__
        ('FakeQuantizedLinear', 'Linear')
    """

    def __init__(
        self,
        config: VendorModule = None,
        base: str | NativePrecision = "32-true",
        *,
        exceptions: Exceptions = (),
    ) -> None:
        super().__init__("qat", base, exceptions)
        if config is None:
            config = _default_qat_config()
        self.config = config

    def options(self) -> str:
        """The configuration, without the addresses of objects in it."""
        return re.sub(r" at 0x\w+", "", repr(self.config))

    def exchange(self, module: nn.Module, exempt: list[str]) -> None:
        """Exchange linear layers for torchao's fake-quantized layers; parameters stay the same objects.

        Raises:
            PrecisionError: torchao failed to convert this model.
        """
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        selected = {
            name
            for name, layer in module.named_modules()
            if type(layer) is nn.Linear and name and not is_excepted(name, exempt)
        }
        # torchao asserts what a configuration requires of a layer, such as sizes that its groups divide.
        try:
            quantize_(
                module,
                QATConfig(self.config, step="prepare"),
                filter_fn=lambda _, name: name in selected,
            )
        except (AssertionError, ValueError) as error:
            raise PrecisionError(
                "torchao failed to convert this model",
                found=str(error),
                fix="use another config, or list layers in exceptions=[...]",
            ) from error

    def export(self, module: nn.Module) -> nn.Module:
        """Return a quantized copy; ``module`` can be trained further.

        Args:
            module: prepared by this precision, on one device (not sharded).
        """
        from torchao.quantization import quantize_
        from torchao.quantization.qat import FakeQuantizedLinear, QATConfig

        # The Trainer is not a part of the model, and a copy of it would copy the whole run.
        trainer = module.__dict__.pop("_trainer", None)
        try:
            quantized = copy.deepcopy(module)
        finally:
            if trainer is not None:
                module.__dict__["_trainer"] = trainer
        # The copy has no layers of this precision any more.
        forget_layers(quantized)
        quantize_(
            quantized,
            QATConfig(self.config, step="convert"),
            filter_fn=lambda layer, _: isinstance(layer, FakeQuantizedLinear),
        )
        return quantized.eval()


def _default_qat_config() -> VendorModule:
    ao = vendor_module(
        "torchao.quantization", "quantization-aware training needs torchao", _INSTALL
    )
    int4 = torch.int4  # type: ignore[attr-defined]
    return ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=int4, weight_granularity=ao.granularity.PerGroup(32)
    )


def _float8_config(recipe: str) -> VendorModule:
    ao = vendor_module("torchao.float8", "fp8 training needs torchao", _INSTALL)
    recipes = [name.value for name in ao.config.Float8LinearRecipeName]
    if recipe not in recipes:
        raise PrecisionError(
            f"torchao has no fp8 recipe {recipe!r}", fix=did_you_mean(recipe, recipes)
        )
    return ao.Float8LinearConfig.from_recipe_name(recipe)
