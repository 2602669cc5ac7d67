"""Precisions that torch brings: whole models in one dtype, and autocast with or without loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.devices import present_accelerator
from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.precision.conversion_markers import note_cast, refuse_cast, refuse_layers
from trainer_kit.precision.exceptions import (
    DTYPES,
    Exceptions,
    ModulePrecision,
    apply_exceptions,
    except_modules,
    excepted,
    is_excepted,
    refuse_ties,
)
from trainer_kit.precision.overflow import (
    EngineSteps,
    SeenOptimizer,
    has_gradients,
    make_scaler,
    seen_optimizers,
    state_of_next,
)
from trainer_kit.precision.precision import Precision
from trainer_kit.precision.support_matrix import check_runs

__all__ = ["NAMES", "MixedPrecision", "TruePrecision", "native_precision"]

NAMES: Final = {
    "64-true": "64-true",
    "64": "64-true",
    "32-true": "32-true",
    "32": "32-true",
    "no": "32-true",
    "bf16-true": "bf16-true",
    "16-true": "16-true",
    "bf16-mixed": "bf16-mixed",
    "bf16": "bf16-mixed",
    "16-mixed": "16-mixed",
    "16": "16-mixed",
    "fp16": "16-mixed",
}
"""Lightning's words, Accelerate's words, and what they mean."""
_BITS: Final = {dtype: bits for bits, dtype in DTYPES.items()}
_HALF: Final = {dtype: _BITS[dtype] for dtype in (torch.bfloat16, torch.float16)}
_Excepted: TypeAlias = "tuple[str, nn.Module, ModulePrecision]"


@final
class TruePrecision(Precision):
    """Parameters, buffers, batches and layers made in ``configure_model`` all in one dtype; nothing is scaled.

    Args:
        dtype: float64, float32, bfloat16 or float16.
        exceptions: modules in another dtype (float32 where none is given): their parameters, what goes into them, and
            their computation; see `Exceptions`.

    Raises:
        PrecisionError: for a dtype that is none.

    Example:
        >>> TruePrecision(torch.bfloat16).name
        'bf16-true'
    """

    _engine: EngineSteps | None = None  # which steps by itself

    def __init__(self, dtype: torch.dtype = torch.float32, exceptions: Exceptions = ()) -> None:
        self.dtype, self.name, self.device_type = dtype, f"{_bits(dtype, _BITS, 'TruePrecision')}-true", "cpu"
        self.exceptions = except_modules(exceptions)
        # float32 is what torch makes by itself: a module that mixes dtypes on purpose is then left alone.
        self.converts_batch = dtype is not torch.float32

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a PrecisionError where this cannot run; called before anything else."""
        check_runs(self.name, device.type, engine)
        self.device_type = device.type

    def convert_module(self, module: nn.Module) -> None:
        """Cast floating-point parameters and buffers, in place."""
        refuse_layers(module, self.name)
        self.convert_with(module, _in_float32(module, self.exceptions))

    def convert_with(self, module: nn.Module, found: Sequence[_Excepted]) -> None:
        """As `convert_module`, with these exceptions."""
        names = [name for name, _, _ in found]
        refuse_ties(module, names)
        if not self.converts_batch:
            refuse_cast(module, self.name)
        else:
            note_cast(module, self.dtype)
            for name, part in module.named_modules():
                if not is_excepted(name, names):
                    part._apply(lambda t: t.to(self.dtype) if t.is_floating_point() else t, recurse=False)
        for _, part, given in found:
            part.to(given.dtype)
        # What follows an exception expects the dtype of everything else.
        modules = [(part, given.dtype, given.output_dtype or self.dtype) for _, part, given in found]
        apply_exceptions(module, modules, _DefaultDtype)

    def kept_modules(self, module: nn.Module) -> list[nn.Module]:
        """The exceptions."""
        return [part for _, part, _ in excepted(module, self.exceptions)]

    def convert_batch(self, batch: Any) -> Any:
        """Cast the floating-point tensors of a batch."""
        return apply_to_collection(batch, Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """The default dtype, for tensors that a step makes; none is needed for float32."""
        return _DefaultDtype(self.dtype) if self.converts_batch else None

    def init_context(self) -> AbstractContextManager[Any]:
        """Layers are made in this dtype at once."""
        return _DefaultDtype(self.dtype) if self.converts_batch else nullcontext()

    def hand_over(self, steps: EngineSteps, scales: bool) -> None:
        """An engine steps by itself, and scales losses or not."""
        self.scales, self.skips, self._engine = scales, True, steps

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss itself."""
        return loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Nothing is scaled."""

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> bool:
        """Run ``step``."""
        step()
        return self._engine is None or not self._engine.skipped

    def end_step(self) -> None:
        """Nothing to update."""

    def abandon_step(self) -> None:
        """Nothing was begun."""

    def state_dict(self) -> dict[str, Any]:
        """An engine's scale; else nothing to keep."""
        return {} if self._engine is None else self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        if self._engine is not None:
            self._engine.load_state_dict(state)


@final
class MixedPrecision(Precision):
    """Autocast: float32 weights, and the forward in bfloat16 or float16 where that is safe.

    float16 gradients underflow, so the loss is scaled by ``torch.amp.GradScaler``: gradients are unscaled once for
    each optimizer, an optimizer whose gradients overflowed is not stepped, and the scale is adapted once all
    optimizers of the step are through. The scaler reads one flag on the host each step; that is its nature.
    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; https://pytorch.org/docs/stable/amp.html.

    Args:
        dtype: bfloat16 or float16.
        device_type: where the forward runs, as in ``torch.device.type``; by default where the Trainer runs.
        scaler: a GradScaler of your own; only with float16.
        exceptions: modules that compute without autocast, in float32 or the dtype that is given, or under autocast to
            the other half precision; see `Exceptions`.

    Raises:
        PrecisionError: for another dtype, or for a scaler with bfloat16.

    Example:
        >>> MixedPrecision(torch.bfloat16, "cpu").name
        'bf16-mixed'
    """

    _engine: EngineSteps | None = None  # which steps by itself

    def __init__(
        self,
        dtype: torch.dtype,
        device_type: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        exceptions: Exceptions = (),
    ) -> None:
        self.name = f"{_bits(dtype, _HALF, 'MixedPrecision')}-mixed"
        self.dtype, self.exceptions = dtype, except_modules(exceptions)
        self._anywhere, self.device_type = device_type is None, device_type or _device_type()
        self._own_scaler = scaler is not None
        # What autocast would cast weights to, for engines that gather them so (FSDP gathers them as they are stored);
        # sums over many ranks need float32's digits.
        self.param_dtype, self.reduce_dtype = dtype, torch.float32
        self.scales = self.skips = dtype is torch.float16
        if scaler is not None and not self.scales:
            raise PrecisionError("bfloat16 needs no gradient scaler", fix='use "16-mixed", or leave the scaler out')
        self.scaler = scaler or (make_scaler(self.device_type) if self.scales else None)
        self._seen: dict[int, list[SeenOptimizer]] = {}
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._left: set[int] = set()  # unscaled, and not stepped when their turn ended
        self._looked = False  # at gradients, since the scale has adapted
        self._began = False  # the scaler exists on the device once a loss was scaled

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a PrecisionError where this cannot run; called before anything else."""
        check_runs(self.name, device.type, engine)
        if device.type != self.device_type:
            if not self._anywhere:
                raise PrecisionError(
                    "autocast was asked for on another device than the run's",
                    found=f"device_type={self.device_type!r}, and the run is on {device.type!r}",
                    fix="leave device_type out, or choose the accelerator of that name",
                )
            self.device_type = device.type
            if self.scales and not self._own_scaler:
                self.scaler = make_scaler(device.type)

    def convert_module(self, module: nn.Module) -> None:
        """Weights stay as they are, but those of exceptions in float64."""
        refuse_layers(module, self.name)
        self.convert_with(module, _in_float32(module, self.exceptions))

    def convert_with(self, module: nn.Module, found: Sequence[_Excepted]) -> None:
        """As `convert_module`, with these exceptions."""
        refuse_ties(module, [name for name, _, given in found if given.dtype is torch.float64])
        refuse_cast(module, self.name)
        for _, part, given in found:
            if given.dtype is torch.float64:
                part.to(torch.float64)
        apply_exceptions(module, [(part, given.dtype, given.output_dtype) for _, part, given in found], self._inside)

    def _inside(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        half = dtype in (torch.float16, torch.bfloat16)
        return torch.autocast(self.device_type, dtype=dtype if half else self.dtype, enabled=half)

    def kept_modules(self, module: nn.Module) -> list[nn.Module]:
        """The exceptions."""
        return [part for _, part, _ in excepted(module, self.exceptions)]

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Autocast."""
        return torch.autocast(self.device_type, dtype=self.dtype)

    def hand_over(self, steps: EngineSteps, scales: bool) -> None:
        """An engine steps by itself, and scales losses or not."""
        self.scales, self.skips, self.scaler, self._engine = scales, True, None, steps

    @property
    def _is_over(self) -> bool:
        """Whether a step is, and nobody has said so; one that was not taken is, once its gradients are gone."""
        waiting = (self._unscaled | self._left) - self._stepped
        return self._looked and not any(has_gradients(self._seen[o][0].optimizer) for o in waiting if o in self._seen)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale; the scale adapts first if a step of this turn is over (manual mode)."""
        if self.scaler is None:
            return loss
        if self._is_over:
            self._adapt()
        self._began = True
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Undo the scale on this optimizer's gradients, once a step."""
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self._unscaled.add(id(optimizer))
            if has_gradients(optimizer):
                if not self._began:  # this rank had no data yet: its gradients are those of the others
                    self._began = True
                    first = next(p for group in optimizer.param_groups for p in group["params"])
                    self.scaler.scale(torch.zeros((), device=first.device))
                seen = self._seen.get(id(optimizer))
                if seen is None or seen[0].groups != len(optimizer.param_groups):  # further ones may be of other kinds
                    seen = self._seen[id(optimizer)] = seen_optimizers(optimizer)
                for one in seen:
                    if one.only is None or has_gradients(one):
                        self.scaler.unscale_(one)  # type: ignore[arg-type]
                        self._looked = True

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> bool:
        """Run ``step`` unless this optimizer's gradients overflowed."""
        if self.scaler is None or not has_gradients(optimizer):
            step()
            return self._engine is None or not self._engine.skipped
        self.unscale_gradients(optimizer)
        self._stepped.add(id(optimizer))
        seen = self._seen[id(optimizer)]
        if len(seen) == 1:
            seen[0].run = step
            return self.scaler.step(seen[0]) is not None  # type: ignore[arg-type]
        whole = [self.scaler.step(one) is not None for one in seen if has_gradients(one)]  # type: ignore[arg-type]
        if all(whole):
            step()
        return all(whole)

    def adapt_scale(self, optimizers: Sequence[Optimizer]) -> None:
        """Adapt it as soon as a step is over: gradients that have not been stepped still have the old scale."""
        waiting = any(id(one) not in self._stepped and has_gradients(one) for one in optimizers)
        if self.scaler is not None and self._is_over and not waiting:
            self._adapt()

    def end_step(self) -> None:
        """Adapt the scale."""
        if self._stepped:
            self._adapt()
        self._left |= self._unscaled
        self._unscaled.clear()

    def _adapt(self) -> None:
        self.scaler.update()  # type: ignore[union-attr]
        self._forget()

    def _forget(self) -> None:
        self._looked = False
        for known in (self._stepped, self._unscaled, self._left):
            known.clear()

    def abandon_step(self) -> None:
        """Forget what was unscaled and not stepped; the scale stays what it is."""
        if self._looked and self.scaler is not None:
            self.scaler.update(self.scaler.get_scale())  # sync point: the run has failed
        self._forget()
        self._seen.clear()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters."""
        if self.scaler is not None and self._is_over:
            return state_of_next(self.scaler)
        scaler = self._engine or self.scaler
        return {} if scaler is None else scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned; nothing without a scaler, or from a run without one."""
        self.abandon_step()  # of what was there before: it says nothing of the scale that comes
        scaler = self._engine or self.scaler
        if scaler is not None and state:
            scaler.load_state_dict(dict(state))


class _DefaultDtype:
    """`torch.set_default_dtype` as a context that can be entered again and again without an allocation."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self.before)


def _bits(dtype: Any, known: Mapping[torch.dtype, str], what: str) -> str:
    if isinstance(dtype, torch.dtype) and dtype in known:
        return known[dtype]
    fix = f"one of {', '.join(str(one) for one in known)}"
    if isinstance(dtype, str) and dtype in NAMES:
        fix = f"precision={dtype!r}, or {what} with {fix}"
    raise PrecisionError(f"{what} has no dtype {dtype!r}", fix=fix)


def _device_type() -> str:
    device = present_accelerator()
    return "cpu" if device is None else device.type


def _in_float32(module: nn.Module, exceptions: Mapping[str, ModulePrecision | None]) -> list[_Excepted]:
    found = excepted(module, exceptions)
    return [(name, part, given or ModulePrecision(torch.float32)) for name, part, given in found]


def native_precision(name: str, device_type: str | None = None) -> MixedPrecision | TruePrecision:
    """The precision behind a word of `NAMES`.

    Args:
        name: the word.
        device_type: where it will run; by default where the Trainer runs.

    Raises:
        PrecisionError: for an unknown word.
    """
    if name not in NAMES:
        raise PrecisionError(f"unknown precision {name!r}", fix=did_you_mean(name, NAMES))
    bits, kind = NAMES[name].split("-")
    return TruePrecision(DTYPES[bits]) if kind == "true" else MixedPrecision(DTYPES[bits], device_type)
