"""Weights of linear layers in 4 or 8 bits, by bitsandbytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Literal, final

import torch
from torch import Tensor, nn

from trainer_kit.core.display import plural
from trainer_kit.core.errors import PrecisionError
from trainer_kit.core.torch_private import apply_of_base
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.precision.converted import (
    ConvertedPrecision,
    VendorModule,
    refuse_shared,
)
from trainer_kit.precision.exceptions import Exceptions, except_modules, is_excepted
from trainer_kit.precision.native import NativePrecision
from trainer_kit.precision.torch_private import load_from_state_dict

__all__ = ["BitsandbytesPrecision"]

_BLOCK: Final = 64
"""The number of weights that share a maximum; bitsandbytes' default, as the next."""
_NESTED_BLOCK: Final = 256
"""The number of maxima that share one."""
_OUTLIER: Final = 6.0
"""Inputs beyond this are multiplied in float16; Dettmers et al., LLM.int8(), 2022."""


@final
class BitsandbytesPrecision(ConvertedPrecision):
    """Frozen linear layers store 4 or 8 bits per weight; trained layers (adapters) are not changed.

    With ``"int8-training"`` the weights of trained layers stay floats, and each matmul quantizes them. Quantized
    weights are frozen parameters, stored as plain tensors: checkpoints hold them exactly, and a checkpoint of floats is
    quantized layer by layer while it is loaded.
    Source: Dettmers et al., QLoRA, NeurIPS 2023; https://huggingface.co/docs/bitsandbytes.

    Args:
        mode: ``"nf4"``, ``"fp4"``, either with ``"-dq"`` (the maxima of blocks are quantized too), ``"int8"`` or
            ``"int8-training"``.
        dtype: of the matmuls with 4-bit weights; None: the dtype of their inputs.
        ignore_modules: names of modules whose layers stay, as in Lightning; added to ``exceptions``.
        base: the precision of everything else: ``"bf16-mixed"``, ``"bf16-true"``, ``"32-true"``, or an object.
        exceptions: modules whose layers stay; see `trainer_kit.precision.Exceptions`.

    Raises:
        PrecisionError: bitsandbytes is not installed, or has no such mode.

    Example:
        >>> precision = BitsandbytesPrecision("nf4", base="32-true")
        >>> net = nn.Sequential(nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 4))
        >>> precision.convert_module(net)
        >>> {name: tuple(value.shape) for name, value in net.state_dict().items()}
        {'0.weight': (1024, 1), '0.bias': (32,), '0.nf4_absmax': (32,), '1.weight': (4, 32), '1.bias': (4,)}
    """

    def __init__(
        self,
        mode: Literal[
            "nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"
        ] = "nf4",
        dtype: torch.dtype | None = None,
        ignore_modules: Exceptions = (),
        *,
        base: str | NativePrecision = "bf16-mixed",
        exceptions: Exceptions = (),
    ) -> None:
        if mode not in _MODES:
            raise PrecisionError(
                f"bitsandbytes has no mode {mode!r}",
                fix=f"use one of: {', '.join(_MODES)}",
            )
        super().__init__(mode, base, exceptions)
        self.exceptions = {**except_modules(ignore_modules), **self.exceptions}
        # A missing library is an error here, before the run starts its ranks.
        _import()
        self.refused_devices = {"mps": "bitsandbytes has no kernels for it"}
        self.mode = mode
        self.dtype = dtype

    def options(self) -> str:
        """The dtype of matmuls."""
        return f"dtype={self.dtype}"

    def exchange(self, module: nn.Module, exempt: list[str]) -> None:
        """Quantize frozen linear layers in place, one after the other.

        Raises:
            PrecisionError: there is nothing to quantize, or a weight is shared.
        """
        trains = self.mode == "int8-training"
        linear = {
            name: layer
            for name, layer in module.named_modules()
            if type(layer) is nn.Linear and name and not is_excepted(name, exempt)
        }
        selected = {
            name: layer
            for name, layer in linear.items()
            if layer.weight.requires_grad == trains
        }
        if not selected and not _has_exchanged_layers(module):
            raise self._nothing_to_quantize(list(linear))
        refuse_shared(module, selected, f"precision {self.mode!r}")
        # One layer after the other: the model in floats and the quantized one need not fit beside each other.
        for name, layer in selected.items():
            module.set_submodule(name, _MODES[self.mode](layer, self.dtype))

    def _nothing_to_quantize(self, linear: list[str]) -> PrecisionError:
        kind = "frozen"
        fix = "freeze the base, module.requires_grad_(False), before adding adapters"
        if self.mode == "int8-training":
            kind = "trainable"
            fix = "train some"
        layers = plural(len(linear), "linear layer")
        if linear:
            layers += f", such as {linear[0]!r}"
        return PrecisionError(
            f"precision {self.mode!r} found no layer to quantize: no linear layer is {kind}",
            found=layers,
            fix=fix,
        )


def _has_exchanged_layers(module: nn.Module) -> bool:
    exchanged = (_QuantizedLinear, _QuantizingLinear)
    return any(isinstance(submodule, exchanged) for submodule in module.modules())


class _QuantizedLinear(nn.Linear, ABC):
    """A frozen linear layer whose parameters are its quantized weight.

    Parameters, not buffers: engines then move, broadcast once, shard and gather them like any others.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(
            layer.in_features, layer.out_features, bias=False, device="meta"
        )
        self.bias = layer.bias
        self.train(layer.training)
        weight = layer.weight.detach()
        is_meta = weight.is_meta
        # Of the weights of another rank only the shapes matter, which bitsandbytes computes with values alone.
        if is_meta:
            weight = torch.zeros(weight.shape, dtype=weight.dtype)
        for name, tensor in self.quantize(weight).items():
            if is_meta:
                tensor = tensor.to("meta")
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @property
    @abstractmethod
    def mode(self) -> str:
        """The mode of `BitsandbytesPrecision` that stores weights like this layer."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantize a weight of floats, (out_features, in_features), to parameters by name, ``weight`` first."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to(dtype)` casts the bias only: quantized weights and scales keep their dtype.
        def apply_without_cast(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if tensor is self.bias or changed.dtype == tensor.dtype:
                return changed
            return tensor.to(changed.device)

        apply_of_base(self, apply_without_cast, recurse)
        return self

    def take_floats(self, state: StateDict, prefix: str) -> None:
        """Quantize this layer's weight in a state, where that holds floats."""
        weight = state.get(f"{prefix}weight")
        if weight is not None and weight.is_floating_point():
            # A sharded weight comes from a checkpoint that is read in shards; then every rank calls this.
            if hasattr(weight, "full_tensor"):
                weight = weight.full_tensor()
            tensors = self.quantize(weight.to(self.weight.device))
            state.update((prefix + name, tensor) for name, tensor in tensors.items())

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, *arguments: object
    ) -> None:
        self.take_floats(state_dict, prefix)
        saved = _saved_mode(state_dict, prefix)
        if saved not in (None, self.mode):
            raise PrecisionError(
                "the checkpoint was quantized with another mode",
                found=f"{prefix}weight: {saved!r}, and this module has {self.mode!r}",
                fix=f"use precision={saved!r}, or a checkpoint of floats",
            )
        load_from_state_dict(self, state_dict, prefix, *arguments)


@final
class _Linear4bit(_QuantizedLinear):
    kind: str
    nested: bool
    compute: torch.dtype | None
    stored: torch.dtype
    nested_offset: Tensor
    code: Tensor
    code2: Tensor | None

    def __init__(
        self, layer: nn.Linear, dtype: torch.dtype | None, kind: str, nested: bool
    ) -> None:
        # Ahead of the base's constructor, which calls `quantize`; in __dict__, because nn.Module is not set up yet.
        self.__dict__.update(
            kind=kind,
            nested=nested,
            compute=dtype,
            stored=layer.weight.dtype,
            code=None,
            code2=None,
        )
        super().__init__(layer)

    @property
    def mode(self) -> str:
        return f"{self.kind}-dq" if self.nested else self.kind

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        packed, state = _import().functional.quantize_4bit(
            weight.contiguous(),
            blocksize=_BLOCK,
            compress_statistics=self.nested,
            quant_type=self.kind,
        )
        # The table of the 16 values is the same for all layers of a kind, so checkpoints need not hold it.
        self.__dict__.update(code=state.code)
        # The name tells nf4 from fp4, which have the same shapes.
        tensors = {"weight": packed, f"{self.kind}_absmax": state.absmax}
        if self.nested:
            self.__dict__.update(code2=state.state2.code)
            tensors["nested_absmax"] = state.state2.absmax
            tensors["nested_offset"] = state.offset.reshape(1)
        return tensors

    def forward(self, input: Tensor) -> Tensor:
        # The state is created again for each matmul: engines may have gathered or replaced the parameters since.
        bnb = _import()
        self._move_codes(self.weight.device)
        nested_state = None
        offset = None
        if self.nested:
            nested_state = bnb.functional.QuantState(
                self.nested_absmax,
                code=self.code2,
                blocksize=_NESTED_BLOCK,
                dtype=torch.float32,
            )
            offset = self.nested_offset.reshape(())
        state = bnb.functional.QuantState(
            getattr(self, f"{self.kind}_absmax"),
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.code,
            blocksize=_BLOCK,
            quant_type=self.kind,
            dtype=self.stored,
            offset=offset,
            state2=nested_state,
        )
        dtype = self.compute or input.dtype
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = bias.to(dtype)
        output: Tensor = bnb.matmul_4bit(
            input.to(dtype), self.weight, bias=bias, quant_state=state
        )
        return output.to(input.dtype)

    def _move_codes(self, device: torch.device) -> None:
        """Move the tables of values, which are no buffers, so that checkpoints do not hold them."""
        if self.code.device == device:
            return
        self.__dict__["code"] = self.code.to(device)
        if self.code2 is not None:
            self.__dict__["code2"] = self.code2.to(device)


@final
class _Linear8bit(_QuantizedLinear):
    threshold: float = _OUTLIER

    def __init__(self, layer: nn.Linear, dtype: torch.dtype | None) -> None:
        super().__init__(layer)

    @property
    def mode(self) -> str:
        return "int8"

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        rows, scales, _ = _import().functional.int8_vectorwise_quant(
            weight.contiguous().to(torch.float16)
        )
        return {"weight": rows, "scales": scales}

    def forward(self, input: Tensor) -> Tensor:
        return _multiply(
            self,
            input,
            CB=self.weight,
            SCB=self.scales,
            has_fp16_weights=False,
            threshold=self.threshold,
        )


@final
class _QuantizingLinear(nn.Linear):
    """A trained linear layer that multiplies in 8 bits."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype | None) -> None:
        super().__init__(
            layer.in_features, layer.out_features, bias=False, device="meta"
        )
        self.weight = layer.weight
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return _multiply(self, input, has_fp16_weights=True, threshold=_OUTLIER)


def _multiply(layer: nn.Linear, input: Tensor, **options: object) -> Tensor:
    bnb = _import()
    # A new state for each matmul: an old one would keep the weights of the window's first micro-batch.
    state = bnb.MatmulLtState()
    state.is_training = layer.training
    for name, value in options.items():
        setattr(state, name, value)
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        # bitsandbytes multiplies under autocast, but its backward runs outside: both must have the same dtype.
        input = input.to(torch.get_autocast_dtype(device_type))
    bias: Tensor | None = layer.bias
    if bias is not None:
        bias = bias.to(input.dtype)
    # bitsandbytes computes gradients of weights for two dimensions only.
    flat = input.reshape(-1, input.shape[-1])
    output: Tensor = bnb.matmul(flat, layer.weight, bias=bias, state=state)
    return output.reshape(*input.shape[:-1], layer.out_features)


def _import() -> VendorModule:
    try:
        import bitsandbytes
    except ImportError as error:
        raise PrecisionError(
            "4-bit and 8-bit weights need bitsandbytes",
            found=str(error),
            fix="pip install 'trainer-kit[bitsandbytes]'",
        ) from error
    return bitsandbytes


def _saved_mode(state: SavedState, prefix: str) -> str | None:
    """The mode of a layer's weight in a state; None: it is missing, or of floats."""
    if f"{prefix}scales" in state:
        return "int8"
    for kind in ("nf4", "fp4"):
        if f"{prefix}{kind}_absmax" in state:
            is_nested = f"{prefix}nested_absmax" in state
            return f"{kind}-dq" if is_nested else kind
    return None


def _linear_4bit_maker(
    kind: str, nested: bool
) -> Callable[[nn.Linear, torch.dtype | None], nn.Module]:
    return lambda layer, dtype: _Linear4bit(layer, dtype, kind, nested)


_MODES: Final[dict[str, Callable[[nn.Linear, torch.dtype | None], nn.Module]]] = {
    "nf4": _linear_4bit_maker("nf4", False),
    "nf4-dq": _linear_4bit_maker("nf4", True),
    "fp4": _linear_4bit_maker("fp4", False),
    "fp4-dq": _linear_4bit_maker("fp4", True),
    "int8": _Linear8bit,
    "int8-training": _QuantizingLinear,
}
