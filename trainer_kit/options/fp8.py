"""Accelerate's options for fp8."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from trainer_kit.core.configuration_sources import is_true, variable
from trainer_kit.core.errors import ConfigurationError, PrecisionError, did_you_mean
from trainer_kit.core.types import Keywords
from trainer_kit.launch.options import SECTIONS
from trainer_kit.options.records import KwargsHandler
from trainer_kit.precision.precision import Precision

__all__ = [
    "AORecipeKwargs",
    "FP8Recipe",
    "FP8RecipeKwargs",
    "MSAMPRecipeKwargs",
    "TERecipeKwargs",
    "launched_precision",
    "launched_recipe",
]


class FP8Recipe(KwargsHandler, ABC):
    """Base class of the recipes: each names the fp8 library and its options."""

    @abstractmethod
    def make_precision(self) -> Precision:
        """The precision of this recipe."""


@dataclass
class AORecipeKwargs(FP8Recipe):
    """fp8 with torchao.

    Attributes:
        config: a ``torchao.float8.Float8LinearConfig``; the default has one scale per tensor.
        module_filter_func: called with a linear layer and its name; returns whether to replace the layer. By default
            all linear layers but the first and the last are replaced.
        pad_inner_dim: pad batches whose number of rows is not a multiple of 16; weight sizes must be multiples of 16.
        enable_fsdp_float8_all_gather: True is refused: it replaces the weights by objects that cannot be saved.

    Example:
        >>> AORecipeKwargs(module_filter_func=lambda layer, name: name != "head", pad_inner_dim=True).to_kwargs().keys()
        dict_keys(['module_filter_func', 'pad_inner_dim'])
    """

    config: object = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def make_precision(self) -> Precision:
        """Under autocast to bfloat16."""
        from trainer_kit.precision.torchao import Float8Precision

        precision = Float8Precision(
            config=self.config,
            module_filter=self.module_filter_func,
            # A filter of the user decides about the first and the last layer too.
            ends=self.module_filter_func is not None,
        )
        names = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
        values = {name: getattr(self, name) for name in names}
        # None leaves the value of `config`, which the user may have set there.
        changes = {name: v for name, v in values.items() if v is not None}
        # torchao's configuration is frozen.
        if changes:
            precision.config = replace(precision.config, **changes)
        return precision


@dataclass
class TERecipeKwargs(FP8Recipe):
    """fp8 with Transformer Engine and its ``DelayedScaling``.

    Attributes:
        use_autocast_during_eval: compute in fp8 in evaluation mode too.
        margin: margin of the scales, in powers of two.
        interval: accepted without effect: Transformer Engine updates the scales in each step.
        fp8_format: ``"HYBRID"`` or ``"E4M3"``.
        amax_history_len: the number of steps whose maxima are kept.
        amax_compute_algo: ``"max"`` or ``"most_recent"``.
        override_linear_precision: accepted if all are False.
        use_mxfp8_block_scaling: use ``MXFP8BlockScaling`` instead of delayed scaling.

    Example:
        >>> TERecipeKwargs(fp8_format="E4M3", amax_history_len=16).to_kwargs()
        {'fp8_format': 'E4M3', 'amax_history_len': 16}
    """

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False

    def make_precision(self) -> Precision:
        """Under autocast to bfloat16."""
        from trainer_kit.precision.transformer_engine import TransformerEnginePrecision

        if any(self.override_linear_precision):
            raise PrecisionError(
                "Transformer Engine no longer supports matmuls in higher precision",
                found=f"override_linear_precision={self.override_linear_precision}",
                fix="leave it out",
            )
        # A dict means DelayedScaling, so that the record needs no Transformer Engine.
        recipe: object = {
            "margin": self.margin,
            "fp8_format": self.fp8_format,
            "amax_history_len": self.amax_history_len,
            "amax_compute_algo": self.amax_compute_algo,
        }
        if self.use_mxfp8_block_scaling:
            from transformer_engine.common.recipe import MXFP8BlockScaling

            recipe = MXFP8BlockScaling()
        return TransformerEnginePrecision(
            "bf16-mixed", recipe, evaluate=self.use_autocast_during_eval
        )


@dataclass
class MSAMPRecipeKwargs(FP8Recipe):
    """fp8 with MS-AMP. It is refused: MS-AMP is no longer maintained, and no package registry has it.

    Attributes:
        opt_level: ``"O1"`` or ``"O2"``.

    Example:
        >>> from trainer_kit import PrecisionError
        >>> try:
        ...     MSAMPRecipeKwargs().make_precision()
        ... except PrecisionError as error:
        ...     print(error.fix)
        use AORecipeKwargs() or TERecipeKwargs(); for 8-bit optimizer states, tk.optimizer('adamw8bit', ...)
    """

    opt_level: Literal["O1", "O2"] = "O2"

    def make_precision(self) -> Precision:
        """Refuse.

        Raises:
            PrecisionError: always.
        """
        raise PrecisionError(
            "MS-AMP is no longer maintained, and needs outdated releases of CUDA and torch",
            found=f"MSAMPRecipeKwargs(opt_level={self.opt_level!r})",
            fix="use AORecipeKwargs() or TERecipeKwargs(); for 8-bit optimizer states, tk.optimizer('adamw8bit', ...)",
        )


_BACKENDS: Mapping[str, type[FP8Recipe]] = {
    "TE": TERecipeKwargs,
    "AO": AORecipeKwargs,
    "MSAMP": MSAMPRecipeKwargs,
}


def FP8RecipeKwargs(backend: str | None = None, **options: object) -> FP8Recipe:
    """The recipe of a backend: "TE" (by default), "AO" or "MSAMP", with its options.

    Raises:
        ConfigurationError: another backend.

    Example:
        >>> FP8RecipeKwargs("TE", margin=1)
        TERecipeKwargs(use_autocast_during_eval=False, margin=1, interval=1, fp8_format='HYBRID', ...)
    """
    name = (backend or "TE").upper()
    if name not in _BACKENDS:
        raise ConfigurationError(
            "unknown fp8 backend",
            found=repr(backend),
            fix=did_you_mean(name, _BACKENDS),
        )
    return _BACKENDS[name](**options)


def launched_recipe() -> FP8Recipe | None:
    """The recipe in the launcher's ``fp8_config`` or in environment variables; None if there is none.

    Raises:
        ConfigurationError: an option has an invalid value.

    Example:
        >>> print(launched_recipe())
        None
    """
    options: Keywords = {}
    for name, option in SECTIONS["fp8_config"].items():
        setting = variable(name)
        if setting is None:
            continue
        # Values of the launcher are texts: each option knows how its own is written.
        try:
            value = option.value(str(setting.value))
        except ValueError as error:
            raise ConfigurationError(
                f"{setting.origin}: {name} {error}", found=repr(setting.value)
            ) from None
        # The only field of a record that has the section's prefix in its own name.
        if name != "fp8_format":
            name = name.removeprefix("fp8_")
        options[name] = value
    if not options:
        return None
    # Accelerate writes the tuple as a text: "(False, False, False)".
    if "override_linear_precision" in options:
        switches = re.findall(r"\w+", options["override_linear_precision"])
        # Words, not literal_eval: the text may also come from a YAML file, as "[false, false, false]".
        options["override_linear_precision"] = tuple(
            is_true(switch) for switch in switches
        )
    recipe = _BACKENDS[options.pop("backend", "AO")]
    # The launcher's section has the options of every backend.
    names = {field.name for field in fields(recipe)}
    return recipe(**{name: value for name, value in options.items() if name in names})


def launched_precision(precision: Any) -> Any:
    """For ``"fp8"``, the precision of the launcher's recipe, if it has one; other values are returned unchanged."""
    if not isinstance(precision, str) or precision.lower() != "fp8":
        return precision
    recipe = launched_recipe()
    if recipe is None:
        return precision
    return recipe.make_precision()
