"""Quantize weights to 4 or 8 bits, layer by layer, while they are loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from trainer_kit.core.display import plural
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
        bnb_4bit_use_double_quant: also quantize the maxima of blocks.
        bnb_4bit_compute_dtype: of matmuls with 4-bit weights: a dtype, ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        torch_dtype: of all other tensors; None: float16 with 8 bits, the compute dtype with 4 bits.
        skip_modules: names of modules that are not quantized; None: the last one, and those that share weights.
        keep_in_fp32_modules: names of modules that are not quantized, and stay in float32.

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
                "choose either 4-bit or 8-bit quantization",
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
                "llm_int8_threshold applies to 8-bit quantization only",
                fix="leave it out, or pass load_in_8bit=True",
            )
        self.bnb_4bit_compute_dtype = _resolve_dtype(
            "bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype
        )
        # The dtypes are the ones with which the matmuls of bitsandbytes return: int8 matmuls return float16, 4-bit
        # matmuls the compute dtype. Another dtype between the layers would cost a conversion per layer.
        if self.torch_dtype is not None:
            self.torch_dtype = _resolve_dtype("torch_dtype", self.torch_dtype)
        elif self.load_in_8bit:
            self.torch_dtype = torch.float16
        else:
            self.torch_dtype = self.bnb_4bit_compute_dtype

    @property
    def mode(self) -> str:
        """The precision's name for these options."""
        if self.load_in_8bit:
            return "int8"
        if self.bnb_4bit_use_double_quant:
            return f"{self.bnb_4bit_quant_type}-dq"
        return self.bnb_4bit_quant_type


def _resolve_dtype(option: str, value: torch.dtype | str) -> torch.dtype:
    dtype: object = value
    if isinstance(value, str):
        dtype = _DTYPES.get(value)
    if not isinstance(dtype, torch.dtype):
        raise PrecisionError(
            f"{option}={value!r} is not a dtype",
            fix='use "fp32", "fp16", "bf16" or a torch.dtype',
        )
    return dtype


def _refuse_empty_model(model: nn.Module) -> None:
    empty = [
        tied.slots[0].name
        for tied in find_tied(model)
        if tied.persistent and is_meta(tied.tensor)
    ]
    if empty:
        raise PrecisionError(
            "the model has no weights to quantize",
            found=f"{first_names(empty)} are on the meta device",
            fix="pass a checkpoint as weights_location",
        )


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

    Layers in host memory and on disk are quantized too. A checkpoint with quantized weights is loaded unchanged.

    Args:
        model: from `init_empty_weights`; or with its weights, which are then quantized in place.
        bnb_quantization_config: the options.
        weights_location: a checkpoint, as for `load_checkpoint_in_model`.
        device_map: as for `load_checkpoint_and_dispatch`; None: everything on the accelerator, or the CPU.
        no_split_module_classes: as for `infer_auto_device_map`.
        max_memory: as for `infer_auto_device_map`; quantized weights count with their quantized size.
        offload_folder: for weights that go to disk.
        offload_state_dict: without effect: a second copy is never made.

    Returns:
        ``model``, whose quantized weights are frozen.

    Raises:
        PrecisionError: bitsandbytes is not installed, or no layer can be quantized.
        CheckpointError, StrategyError: as from `load_checkpoint_and_dispatch`.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4))
        >>> config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32")
        >>> net = load_and_quantize_model(net, config, device_map={"": "cpu"})
        >>> net[0].weight.dtype, net[1].weight.dtype  # the last one stays
        (torch.uint8, torch.float32)
    """
    config = bnb_quantization_config
    if weights_location is None:
        _refuse_empty_model(model)
    # Opened before the model is changed: a missing or damaged checkpoint leaves the model as it was.
    weights = None
    if weights_location is not None:
        weights = open_weights(weights_location)
    unquantized_dtype = config.torch_dtype
    # `__post_init__` has resolved it.
    assert isinstance(unquantized_dtype, torch.dtype)
    layers = _quantize_layers(model, config, unquantized_dtype)
    model.__dict__.update(
        is_loaded_in_4bit=config.load_in_4bit, is_loaded_in_8bit=config.load_in_8bit
    )
    # The parts of a quantized layer (packed weights, scales) have dtypes that no conversion may touch, and with which
    # the device map must count them.
    exact = {}
    for name, layer in layers.items():
        for key, parameter in _quantized_parameters(layer).items():
            exact[f"{name}.{key}"] = parameter.dtype
    pick_float_dtype = pick_dtype(unquantized_dtype, config.keep_in_fp32_modules)
    if device_map is None:
        device_map = {"": "cpu"}
        if torch.accelerator.is_available():
            device_map = {"": 0}
    resolved_map = resolve_device_map(
        model,
        device_map,
        max_memory,
        no_split_module_classes,
        unquantized_dtype,
        special_dtypes=exact,
    )
    devices = check_device_map(model, resolved_map)

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        if name in exact:
            return exact[name]
        return pick_float_dtype(name, tensor)

    # The layers have quantized the model's weights already: only the others are converted here.
    if weights is None:
        for tied in find_tied(model):
            tied.tensor.data = tied.tensor.data.to(
                dtype_of(tied.slots[0].name, tied.tensor)
            )
    else:
        quantized = _QuantizedWeights(weights, layers, unquantized_dtype)
        load_weights(
            model,
            quantized,
            str(weights_location),
            devices,
            dtype_of,
            offload_folder=offload_folder,
        )
    return dispatch_model(model, resolved_map, offload_dir=offload_folder)


def _quantize_layers(
    model: nn.Module, config: BnbQuantizationConfig, dtype: torch.dtype
) -> dict[str, Any]:
    if config.skip_modules is None:
        skipped = _find_head(model)
    else:
        skipped = list(config.skip_modules)
    skipped += config.keep_in_fp32_modules or []
    linear = {
        name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear
    }
    # The dots make a key match whole components of a path: "head" must not match "header".
    stays = [
        name for name in linear if any(f".{key}." in f".{name}." for key in skipped)
    ]
    to_quantize = [
        layer for name, layer in linear.items() if name and name not in stays
    ]
    if not to_quantize:
        raise PrecisionError(
            "no layer of this model can be quantized",
            found=f"{plural(len(linear), 'linear layer')}, of which {len(stays)} are kept by name "
            f"({first_names(skipped)})",
            fix="name fewer layers in skip_modules; only nn.Linear is quantized, not for example Conv1D of GPT-2",
        )
    precision = BitsandbytesPrecision(
        config.mode,  # type: ignore[arg-type]
        config.bnb_4bit_compute_dtype,  # type: ignore[arg-type]
        base="32-true",
    )
    # In the dtype of the other tensors first, so that a model with its weights and one that loads them from a
    # checkpoint (`_QuantizedWeights`) are quantized from the same values.
    for linear_layer in to_quantize:
        linear_layer.weight.requires_grad_(False)
        linear_layer.weight.data = linear_layer.weight.data.to(dtype)
    precision.exchange(model, stays)
    quantized: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    }
    if config.load_in_8bit:
        for layer in quantized.values():
            layer.threshold = config.llm_int8_threshold
    return quantized


def _find_head(model: nn.Module) -> list[str]:
    """Return the modules to skip: the last one, which needs the highest accuracy, and those with tied weights."""
    shared = []
    for tied in find_tied(model):
        if len(tied.slots) > 1:
            shared += [slot.path for slot in tied.slots]
    # A model of transformers without a head (`AutoModel`) has no attribute of its `base_model_prefix`; its last child
    # is the stack of blocks, which is what should be quantized.
    prefix = getattr(model, "base_model_prefix", None)
    headless = isinstance(prefix, str) and not hasattr(model, prefix)
    children = [name for name, _ in model.named_children()]
    if children and (shared or not headless):
        shared.append(children[-1])
    return shared


def _quantized_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    parameters = dict(layer.named_parameters(recurse=False))
    parameters.pop("bias", None)
    return parameters


@final
class _QuantizedWeights(Lazy):
    """A checkpoint's weights in the format of quantized layers; each access quantizes the stored floats."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        layers: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._layers: dict[str, Any] = {}
        self._computed: dict[str, tuple[str, str]] = {}
        for layer_name, layer in layers.items():
            weight = f"{layer_name}.weight"
            # Already quantized weights are not floats, and are read unchanged.
            if weight in weights and tensor_like(weights, weight).is_floating_point():
                self._layers[layer_name] = layer
                for key in _quantized_parameters(layer):
                    self._computed[f"{layer_name}.{key}"] = (layer_name, key)
        # The parts of the layer that was computed last. Loading asks for all parts of a layer in a row, and one layer
        # is quantized once for them; keeping more would hold the quantized model a second time.
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def __contains__(self, name: object) -> bool:
        return name in self._computed or name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._weights), **self._computed})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._computed:
            return self._weights[name]
        layer, key = self._computed[name]
        last_layer, tensors = self._last
        if last_layer != layer:
            floats = self._weights[f"{layer}.weight"].to(self._dtype)
            tensors = self._layers[layer].quantize(floats)
            self._last = layer, tensors
        return tensors[key]

    def like(self, name: str) -> Tensor:
        """Return a tensor of the same shape and dtype."""
        if name not in self._computed:
            return tensor_like(self._weights, name)
        layer_name, key = self._computed[name]
        layer = self._layers[layer_name]
        quantized: Tensor = getattr(layer, key)
        if key != "weight":
            return quantized
        stored = tensor_like(self._weights, name)
        # Quantized weights are packed, so their shape says nothing about the layer: compare the stored shape here. A
        # weight of another shape belongs to another model: return it, so that loading reports the shapes.
        if list(stored.shape) != [layer.out_features, layer.in_features]:
            return stored
        return quantized

    def read(
        self, names: Iterable[str], device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return several tensors."""
        return {name: self[name].to(device) for name in names}

    def agree(self, one: str, other: str) -> bool:
        """Whether both stored names have equal content; quantized parts have no second stored name."""
        stored = one in self._weights and other in self._weights
        return not stored or have_equal_content(self._weights, one, other)
