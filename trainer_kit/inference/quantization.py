"""Quantise weights to 4 or 8 bits, layer by layer, while they are loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import PrecisionError
from trainer_kit.inference.device_map import Device, resolve_device_map
from trainer_kit.inference.dispatch import (
    check_device_map,
    dispatch_model,
    find_tied,
    first_names,
)
from trainer_kit.inference.lazy_weights import (
    Lazy,
    have_equal_content,
    open_weights,
    tensor_like,
)
from trainer_kit.inference.loading import load_weights, pick_dtype
from trainer_kit.inference.offload_hooks import is_meta
from trainer_kit.precision.bitsandbytes import BitsandbytesPrecision
from trainer_kit.precision.converted import QuantizedLayer

__all__ = ["BnbQuantizationConfig", "load_and_quantize_model"]

_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@final
@dataclass
class BnbQuantizationConfig:
    """The options of `load_and_quantize_model`.

    Attributes:
        load_in_8bit: int8, with outliers of inputs multiplied in float16.
        llm_int8_threshold: inputs beyond this value are outliers.
        load_in_4bit: 4 bits per weight.
        bnb_4bit_quant_type: ``"fp4"`` or ``"nf4"``.
        bnb_4bit_use_double_quant: also quantise the maxima of blocks.
        bnb_4bit_compute_dtype: of products with 4-bit weights: a dtype, ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        torch_dtype: of all other tensors; None: float16 with 8 bits, the compute dtype with 4 bits.
        skip_modules: names of modules that are not quantised; None: the last one, and those that share weights.
        keep_in_fp32_modules: names of modules that are not quantised, and stay in float32.

    Raises:
        PrecisionError: not exactly one of 4 and 8 bits, or an invalid option.

    Example:
        >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16").mode
        'nf4'
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: torch.dtype | str = "fp16"
    torch_dtype: torch.dtype | str | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.load_in_4bit == self.load_in_8bit:
            raise PrecisionError(
                "choose either 4-bit or 8-bit quantisation",
                found=f"load_in_4bit={self.load_in_4bit}, load_in_8bit={self.load_in_8bit}",
                fix="pass one of the two as True",
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise PrecisionError(
                f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not a 4-bit type",
                fix='use "nf4" or "fp4"',
            )
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            raise PrecisionError(
                "llm_int8_threshold applies to 8-bit quantisation only",
                fix="leave it out, or pass load_in_8bit=True",
            )
        self.bnb_4bit_compute_dtype = _dtype(
            "bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype
        )
        rest = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = (
            rest
            if self.torch_dtype is None
            else _dtype("torch_dtype", self.torch_dtype)
        )

    @property
    def mode(self) -> str:
        """The precision's name for these options."""
        if self.load_in_8bit:
            return "int8"
        return (
            f"{self.bnb_4bit_quant_type}-dq"
            if self.bnb_4bit_use_double_quant
            else self.bnb_4bit_quant_type
        )


def _dtype(name: str, given: torch.dtype | str) -> torch.dtype:
    found = _DTYPES.get(given) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise PrecisionError(
            f"{name}={given!r} is not a dtype",
            fix='use "fp32", "fp16", "bf16" or a torch.dtype',
        )
    return found


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Replace linear layers by those of bitsandbytes, and load weights into them, one layer at a time.

    Layers in host memory and on disk are quantised too. A checkpoint with quantised weights is loaded unchanged.

    Args:
        model: from `init_empty_weights`; or with its weights, which are then quantised in place.
        bnb_quantization_config: the options.
        weights_location: a checkpoint, as for `load_checkpoint_in_model`.
        device_map: as for `load_checkpoint_and_dispatch`; None: everything on the accelerator, or the CPU.
        no_split_module_classes: as for `infer_auto_device_map`.
        max_memory: as for `infer_auto_device_map`; quantised weights count with their quantised size.
        offload_folder: for weights that go to disk.
        offload_state_dict: without effect: a second copy is never made.

    Returns:
        ``model``, whose quantised weights are frozen.

    Raises:
        PrecisionError: bitsandbytes is not installed, or no layer can be quantised.
        CheckpointError, StrategyError: as from `load_checkpoint_and_dispatch`.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4))
        >>> config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32")
        >>> net = load_and_quantize_model(net, config, device_map={"": "cpu"})
        >>> net[0].weight.dtype, net[1].weight.dtype  # the last one stays
        (torch.uint8, torch.float32)
    """
    config = bnb_quantization_config
    empty = [
        tied.slots[0].name
        for tied in find_tied(model)
        if tied.persistent and is_meta(tied.tensor)
    ]
    if weights_location is None and empty:
        raise PrecisionError(
            "the model has no weights to quantise",
            found=f"{first_names(empty)} are on the meta device",
            fix="pass a checkpoint as weights_location",
        )
    weights = None if weights_location is None else open_weights(weights_location)
    rest = config.torch_dtype
    assert isinstance(rest, torch.dtype)
    layers = _exchange(model, config, rest)
    model.__dict__.update(
        is_loaded_in_4bit=config.load_in_4bit, is_loaded_in_8bit=config.load_in_8bit
    )
    exact = {
        f"{name}.{key}": p.dtype
        for name, layer in layers.items()
        for key, p in _parts(layer).items()
    }
    floats = pick_dtype(rest, config.keep_in_fp32_modules)
    if device_map is None:
        device_map = {"": 0 if torch.accelerator.is_available() else "cpu"}
    given = resolve_device_map(
        model,
        device_map,
        max_memory,
        no_split_module_classes,
        rest,
        special_dtypes=exact,
    )
    devices = check_device_map(model, given)

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        return exact[name] if name in exact else floats(name, tensor)

    if weights is None:
        for tied in find_tied(model):
            tied.tensor.data = tied.tensor.data.to(
                dtype_of(tied.slots[0].name, tied.tensor)
            )
    else:
        quantised = _Quantised(weights, layers, rest)
        load_weights(
            model,
            quantised,
            str(weights_location),
            devices,
            dtype_of,
            offload_folder=offload_folder,
        )
    return dispatch_model(model, given, offload_dir=offload_folder)


def _exchange(
    model: nn.Module, config: BnbQuantizationConfig, rest: torch.dtype
) -> dict[str, Any]:
    kept = [*(_head(model) if config.skip_modules is None else config.skip_modules)]
    kept += config.keep_in_fp32_modules or []
    linear = {
        name: part for name, part in model.named_modules() if type(part) is nn.Linear
    }
    stays = [name for name in linear if any(f".{key}." in f".{name}." for key in kept)]
    wanted = {name: part for name, part in linear.items() if name and name not in stays}
    if not wanted:
        raise PrecisionError(
            "no layer of this model can be quantised",
            found=f"{len(linear)} linear layers, of which {len(stays)} are kept by name ({first_names(kept)})",
            fix="name fewer layers in skip_modules; only nn.Linear is quantised, not for example Conv1D of GPT-2",
        )
    precision = BitsandbytesPrecision(
        config.mode,  # type: ignore[arg-type]
        config.bnb_4bit_compute_dtype,  # type: ignore[arg-type]
        base="32-true",
    )
    for part in wanted.values():
        part.weight.requires_grad_(False)
        part.weight.data = part.weight.data.to(rest)
    precision.exchange(model, stays)
    found: dict[str, Any] = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, QuantizedLayer)
    }
    for layer in found.values() if config.load_in_8bit else ():
        layer.threshold = config.llm_int8_threshold
    return found


def _head(model: nn.Module) -> list[str]:
    """Return the modules to skip: the last one, which needs the highest accuracy, and those with tied weights."""
    shared = [
        slot.path
        for tied in find_tied(model)
        if len(tied.slots) > 1
        for slot in tied.slots
    ]
    prefix = getattr(model, "base_model_prefix", None)
    headless = isinstance(prefix, str) and not hasattr(model, prefix)
    children = [name for name, _ in model.named_children()]
    return (
        shared if (headless and not shared) or not children else [*shared, children[-1]]
    )


def _parts(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {key: p for key, p in layer.named_parameters(recurse=False) if key != "bias"}


@final
class _Quantised(Lazy):
    """A checkpoint's weights in the format of quantised layers; each access quantises the stored floats."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        layers: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        like = {
            name: tensor_like(weights, name)
            for name in (f"{layer}.weight" for layer in layers)
            if name in weights
        }
        self._layers = {
            n: layer for n, layer in layers.items() if f"{n}.weight" in like
        }
        self._layers = {
            n: one
            for n, one in self._layers.items()
            if like[f"{n}.weight"].is_floating_point()
        }
        self._made = {
            f"{n}.{key}": (n, key)
            for n, one in self._layers.items()
            for key in _parts(one)
        }
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def __contains__(self, name: object) -> bool:
        return name in self._made or name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._weights), **self._made})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            return self._weights[name]
        layer, key = self._made[name]
        if self._last[0] != layer:
            floats = self._weights[f"{layer}.weight"].to(self._dtype)
            self._last = layer, self._layers[layer].quantize(floats)
        return self._last[1][key]

    def like(self, name: str) -> Tensor:
        """Return a tensor of the same shape and dtype."""
        if name in self._made:
            layer, key = self._made[name]
            held: Tensor = getattr(self._layers[layer], key)
            wanted = [self._layers[layer].out_features, self._layers[layer].in_features]
            # A weight of another shape belongs to another model: return it, so that loading reports the shapes.
            if (
                key != "weight"
                or list(tensor_like(self._weights, name).shape) == wanted
            ):
                return held
        return tensor_like(self._weights, name)

    def read(
        self, names: Iterable[str], device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return several tensors."""
        return {name: self[name].to(device) for name in names}

    def agree(self, one: str, other: str) -> bool:
        """Whether both stored names have equal content; quantised parts have no second stored name."""
        stored = one in self._weights and other in self._weights
        return not stored or have_equal_content(self._weights, one, other)
