"""Quantisation-aware training, by torchao."""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn

from trainer_kit.core.errors import PrecisionError
from trainer_kit.precision.conversion_markers import forget
from trainer_kit.precision.converted import ConvertedPrecision
from trainer_kit.precision.exceptions import Exceptions, is_excepted
from trainer_kit.precision.native import MixedPrecision, TruePrecision

__all__ = ["QATPrecision"]


@final
class QATPrecision(ConvertedPrecision):
    """Linear layers compute as if they were quantised, with weights that are not: they learn to be.

    Weights keep their names and dtype, so checkpoints are those of the model without it. `export` makes the model that
    is really quantised, at the end or at any time before.
    Source: Jacob et al., CVPR 2018; https://github.com/pytorch/ao/tree/main/torchao/quantization/qat.

    Args:
        config: how the model will be quantised, as torchao's ``quantize_`` takes it; None: 8-bit inputs and 4-bit
            weights in groups of 32.
        base: what everything else computes in: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, or an object.
        exceptions: modules whose layers are not to be quantised; see `trainer_kit.precision.Exceptions`.

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
        config: Any = None,
        base: str | MixedPrecision | TruePrecision = "32-true",
        *,
        exceptions: Exceptions = (),
    ) -> None:
        super().__init__("qat", base, exceptions)
        self.config = _config() if config is None else config

    def check_vendor(self, device: torch.device) -> None:
        """What is pretended needs no kernels."""

    def options(self) -> str:
        """The configuration; objects in it that only say where they are in memory do not count."""
        return re.sub(r" at 0x\w+", "", repr(self.config))

    def exchange(self, module: nn.Module, exempt: list[str]) -> None:
        """Linear layers for those that pretend; parameters stay the same objects.

        Raises:
            PrecisionError: torchao cannot do it with this model.
        """
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        wanted = {n for n, p in module.named_modules() if type(p) is nn.Linear and n and not is_excepted(n, exempt)}
        try:
            quantize_(module, QATConfig(self.config, step="prepare"), filter_fn=lambda _, name: name in wanted)
        except (AssertionError, ValueError) as error:
            raise PrecisionError(
                "torchao cannot prepare this model", found=str(error), fix="another config, or exceptions=[...]"
            ) from error

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """That of everything else."""
        return self.base.forward_context()

    def export(self, module: nn.Module) -> nn.Module:
        """A copy that is really quantised; ``module`` can be trained further.

        Args:
            module: prepared by this precision, on one device (not sharded).
        """
        from torchao.quantization import quantize_
        from torchao.quantization.qat import FakeQuantizedLinear, QATConfig

        trainer = module.__dict__.pop("_trainer", None)  # what runs the module is not a part of the model
        try:
            made = copy.deepcopy(module)
        finally:
            if trainer is not None:
                module.__dict__["_trainer"] = trainer
        forget(made)
        kinds = (FakeQuantizedLinear,)
        quantize_(made, QATConfig(self.config, step="convert"), filter_fn=lambda part, _: isinstance(part, kinds))
        return made.eval()


def _config() -> Any:
    try:
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig
        from torchao.quantization.granularity import PerGroup
    except ImportError as error:
        raise PrecisionError(
            "quantisation-aware training needs torchao", found=str(error), fix="pip install 'trainer-kit[torchao]'"
        ) from error
    int4 = torch.int4  # type: ignore[attr-defined]
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=PerGroup(32))
