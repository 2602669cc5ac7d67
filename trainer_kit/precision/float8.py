"""fp8 matrix products in training, by torchao."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, final

import torch
from torch import nn

from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.precision.converted import ConvertedPrecision
from trainer_kit.precision.exceptions import Exceptions, is_excepted
from trainer_kit.precision.native import MixedPrecision, TruePrecision

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

__all__ = ["Float8Precision"]

_MULTIPLE: Final = 16  # what fp8 matrix products ask of both sizes of a weight


@final
class Float8Precision(ConvertedPrecision):
    """Linear layers multiply in float8, everything else computes in ``base``; weights are stored as they are.

    Inputs, weights and gradients are scaled anew in each step, so there is no state to keep. All linear layers are
    exchanged (not subclasses of ``nn.Linear``): what should not be, often the first and the last, is an exception.
    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; https://github.com/pytorch/ao.

    Args:
        recipe: one scale for a tensor, or one for each row, as torchao names them.
        base: ``"bf16-mixed"``, ``"bf16-true"`` or ``"32-true"``, or an object.
        ends: whether the first and the last linear layer are exchanged too, in the order of ``named_modules``.
        module_filter: called with each linear layer and its name; says whether it is exchanged.
        emulate: compute what float8 would give in the dtype of the inputs, on a device that has no float8 product.
        config: a configuration of torchao's own, in place of ``recipe``.
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
        base: str | MixedPrecision | TruePrecision = "bf16-mixed",
        *,
        ends: bool = True,
        module_filter: Callable[[nn.Module, str], bool] | None = None,
        emulate: bool = False,
        config: Float8LinearConfig | None = None,
        exceptions: Exceptions = (),
    ) -> None:
        super().__init__("fp8", base, exceptions)
        self.ends, self.module_filter = ends, module_filter
        self.config: Any = _config(recipe) if config is None else config
        if emulate:
            self.config = replace(self.config, emulate=True)

    def check_vendor(self, device: torch.device) -> None:
        """Try one product: which devices have it changes with each release of torch."""
        if self.config.enable_fsdp_float8_all_gather:
            raise PrecisionError(
                "weights that FSDP gathers in float8 are not trained here",
                found="enable_fsdp_float8_all_gather: torchao puts other parameters in their place, which an optimizer"
                " that exists does not step and a checkpoint cannot hold",
                fix="leave it out: weights are gathered as they are stored",
            )
        if self.config.emulate:
            return
        sixteen = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        try:
            torch._scaled_mm(sixteen, sixteen.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        except (RuntimeError, NotImplementedError) as error:
            raise PrecisionError(
                f"a device of type {device.type!r} here has no float8 matrix product",
                found=str(error).splitlines()[0],
                fix='precision="bf16-mixed"; or Float8Precision(emulate=True), which is slower and gives its results',
            ) from error

    def options(self) -> str:
        """The configuration, and which layers."""
        return f"{self.config}, ends={self.ends}, {getattr(self.module_filter, '__qualname__', '')}"

    def exchange(self, module: nn.Module, exempt: list[str]) -> None:
        """Linear layers for torchao's; parameters stay the same objects.

        Raises:
            PrecisionError: for weights whose sizes fp8 products do not take.
        """
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        if isinstance(module, nn.Linear):
            raise PrecisionError("a module that is one linear layer cannot be exchanged", fix="put it into another one")
        # Subclasses have a forward of their own, and the one in torch's attention is never called.
        linear: dict[str, Any] = {
            name: part for name, part in module.named_modules() if type(part) in (nn.Linear, Float8Linear)
        }
        inner = list(linear) if self.ends else list(linear)[1:-1]
        wanted = {
            name
            for name in inner
            if not is_excepted(name, exempt)
            and not isinstance(linear[name], Float8Linear)
            and (self.module_filter is None or self.module_filter(linear[name], name))
        }
        odd = [f"{n} ({linear[n].out_features}×{linear[n].in_features})" for n in sorted(wanted) if _odd(linear[n])]
        if odd:
            raise PrecisionError(
                f"float8 products take weights whose sizes are multiples of {_MULTIPLE}",
                found=", ".join(odd[:8]),
                fix=f"exceptions={[one.split(' ')[0] for one in odd]}, or sizes that are",
            )
        convert_to_float8_training(module, config=self.config, module_filter_fn=lambda _, name: name in wanted)

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """That of everything else."""
        return self.base.forward_context()


def _odd(layer: nn.Linear) -> bool:
    return bool(layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)


def _config(recipe: str) -> Any:
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.config import Float8LinearRecipeName
    except ImportError as error:
        raise PrecisionError(
            "fp8 training needs torchao", found=str(error), fix="pip install 'trainer-kit[torchao]'"
        ) from error
    known = [name.value for name in Float8LinearRecipeName]
    if recipe not in known:
        raise PrecisionError(f"torchao knows no fp8 recipe {recipe!r}", fix=did_you_mean(recipe, known))
    return Float8LinearConfig.from_recipe_name(recipe)
