"""Precisions of torch: whole models in one dtype, and autocast with or without loss scaling."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.devices import present_accelerator
from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.core.tensors import map_tensors
from trainer_kit.precision.cast import cast_module
from trainer_kit.precision.exceptions import (
    DTYPES,
    Exceptions,
    ModulePrecision,
    apply_exceptions,
    except_modules,
    excepted,
    refuse_ties,
)
from trainer_kit.precision.precision import EngineSteps, Precision

__all__ = [
    "NAMES",
    "MixedPrecision",
    "NativePrecision",
    "TruePrecision",
    "forget_layers",
    "has_gradients",
    "make_scaler",
    "native_precision",
    "note_layers",
    "refuse_layers",
]

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
"""Lightning's and Accelerate's words, each with the name of its precision."""
_BITS: Final = {dtype: bits for bits, dtype in DTYPES.items()}
_HALF: Final = {dtype: _BITS[dtype] for dtype in (torch.bfloat16, torch.float16)}
_Excepted: TypeAlias = "tuple[str, nn.Module, ModulePrecision]"
_LAYERS: Final = "_precision_of_layers"  # markers in the ``__dict__`` of a module
_CAST: Final = "_dtype_of_cast"


class NativePrecision(Precision):
    """What the two precisions of torch share.

    Args:
        exceptions: modules that compute in another dtype; see `Exceptions`.
        device_type: where the forward runs, as in ``torch.device.type``.
    """

    _engine: EngineSteps | None = None  # set where an engine steps

    def __init__(self, exceptions: Exceptions, device_type: str) -> None:
        self.exceptions = except_modules(exceptions)
        self.device_type = device_type

    def convert_module(self, module: nn.Module) -> None:
        """Cast parameters and buffers, in place, where this precision casts any."""
        refuse_layers(module, self.name)
        found = excepted(module, self.exceptions)
        self.convert_with(
            module,
            [
                (name, part, given or ModulePrecision(torch.float32))
                for name, part, given in found
            ],
        )

    @abstractmethod
    def convert_with(self, module: nn.Module, found: Sequence[_Excepted]) -> None:
        """As `convert_module`, with these exceptions."""

    def kept_modules(self, module: nn.Module) -> list[nn.Module]:
        """The exceptions."""
        return [part for _, part, _ in excepted(module, self.exceptions)]

    def hand_over(self, steps: EngineSteps, scales: bool) -> None:
        """Leave steps, and the scaling of losses, to an engine."""
        self.scales = scales
        self.skips = True
        self.scaler = None
        self._engine = steps


@final
class TruePrecision(NativePrecision):
    """Parameters, buffers, batches and layers built in ``configure_model`` all in one dtype; nothing is scaled.

    Args:
        dtype: float64, float32, bfloat16 or float16.
        exceptions: modules in another dtype (float32 where none is given): their parameters, their inputs, and their
            computation; see `Exceptions`.

    Raises:
        PrecisionError: for any other dtype.

    Example:
        >>> TruePrecision(torch.bfloat16).name
        'bf16-true'
    """

    def __init__(
        self, dtype: torch.dtype = torch.float32, exceptions: Exceptions = ()
    ) -> None:
        super().__init__(exceptions, "cpu")
        self.dtype = dtype
        self.name = f"{_bits(dtype, _BITS, 'TruePrecision')}-true"
        # float32 is torch's default: a module that mixes dtypes on purpose is left as it is.
        self.converts_batch = dtype is not torch.float32
        if dtype is torch.float64:
            self.refused_devices = {"mps": "the device has no float64"}

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a PrecisionError where this precision cannot run."""
        super().check(device, engine)
        self.device_type = device.type

    def convert_with(self, module: nn.Module, found: Sequence[_Excepted]) -> None:
        """Cast floating-point parameters and buffers, in place, but those of these exceptions."""
        names = [name for name, _, _ in found]
        refuse_ties(module, names)
        if not self.converts_batch:
            _refuse_cast(module, self.name)
        else:
            module.__dict__[_CAST] = self.dtype
            cast_module(module, self.dtype, [part for _, part, _ in found])
        for _, part, given in found:
            cast_module(part, given.dtype)
        # The layer after an exception expects the dtype of the rest.
        modules = [
            (part, given.dtype, given.output_dtype or self.dtype)
            for _, part, given in found
        ]
        apply_exceptions(module, modules, _DefaultDtype)

    def convert_batch(self, batch: Any) -> Any:
        """Cast the floating-point tensors of a batch."""
        return map_tensors(
            batch, lambda t: t.to(self.dtype) if t.is_floating_point() else t
        )

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """The default dtype, for tensors that a step makes; None for float32."""
        return _DefaultDtype(self.dtype) if self.converts_batch else None

    def init_context(self) -> AbstractContextManager[Any]:
        """Build layers in this dtype."""
        return _DefaultDtype(self.dtype) if self.converts_batch else nullcontext()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> bool:
        """Run ``step``; an engine reports whether it skipped the step."""
        step()
        return self._engine is None or not self._engine.skipped

    def state_dict(self) -> dict[str, Any]:
        """The loss scale of an engine; else empty."""
        return {} if self._engine is None else self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._engine is not None:
            self._engine.load_state_dict(state)


@final
class MixedPrecision(NativePrecision):
    """Autocast: float32 weights, and the forward in bfloat16 or float16 where that is safe.

    float16 gradients underflow, so ``torch.amp.GradScaler`` scales the loss: gradients are unscaled once for each
    optimizer, an optimizer whose gradients overflowed is not stepped, and the scale is adapted after all optimizers of
    the step. The scaler reads one flag on the host in each step.
    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; https://pytorch.org/docs/stable/amp.html.

    Args:
        dtype: bfloat16 or float16.
        device_type: where the forward runs, as in ``torch.device.type``; by default where the Trainer runs.
        scaler: your own GradScaler; only with float16.
        exceptions: modules that compute without autocast, in float32 or in the given dtype, or under autocast to the
            other half precision; see `Exceptions`.

    Raises:
        PrecisionError: for another dtype, or for a scaler with bfloat16.

    Example:
        >>> MixedPrecision(torch.bfloat16, "cpu").name
        'bf16-mixed'
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device_type: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        exceptions: Exceptions = (),
    ) -> None:
        if device_type is None:
            accelerator = present_accelerator()
            super().__init__(
                exceptions, "cpu" if accelerator is None else accelerator.type
            )
        else:
            super().__init__(exceptions, device_type)
        self.name = f"{_bits(dtype, _HALF, 'MixedPrecision')}-mixed"
        self.dtype = dtype
        self._any_device = device_type is None
        self._own_scaler = scaler is not None
        # An engine may gather weights in the dtype to which autocast would cast them (FSDP gathers them as they are
        # stored); sums over many ranks need the digits of float32.
        self.param_dtype = dtype
        self.reduce_dtype = torch.float32
        self.scales = self.skips = dtype is torch.float16
        if scaler is not None and not self.scales:
            raise PrecisionError(
                "bfloat16 needs no gradient scaler",
                fix='use "16-mixed", or leave the scaler out',
            )
        self.scaler = scaler or (make_scaler(self.device_type) if self.scales else None)
        # By the id of an optimizer:
        self._seen: dict[int, list[_SeenOptimizer]] = {}
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._left: set[int] = set()  # unscaled, and not stepped when the step ended
        self._looked = (
            False  # whether the scaler has read gradients since the scale was adapted
        )
        self._began = (
            False  # whether a loss was scaled, so that the scale is on the device
        )

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a PrecisionError where this precision cannot run."""
        super().check(device, engine)
        if device.type != self.device_type:
            if not self._any_device:
                raise PrecisionError(
                    "autocast is configured for a different device than the run uses",
                    found=f"device_type={self.device_type!r}, and the run is on {device.type!r}",
                    fix="leave device_type out, or use that device as accelerator",
                )
            self.device_type = device.type
            if self.scales and not self._own_scaler:
                self.scaler = make_scaler(device.type)

    def convert_with(self, module: nn.Module, found: Sequence[_Excepted]) -> None:
        """Cast the weights of exceptions in float64; all others keep their dtype."""
        refuse_ties(
            module, [name for name, _, given in found if given.dtype is torch.float64]
        )
        _refuse_cast(module, self.name)
        for _, part, given in found:
            if given.dtype is torch.float64:
                cast_module(part, torch.float64)
        apply_exceptions(
            module,
            [(part, given.dtype, given.output_dtype) for _, part, given in found],
            self._exception_context,
        )

    def _exception_context(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        half = dtype in (torch.float16, torch.bfloat16)
        return torch.autocast(
            self.device_type, dtype=dtype if half else self.dtype, enabled=half
        )

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Autocast."""
        return torch.autocast(self.device_type, dtype=self.dtype)

    @property
    def _is_over(self) -> bool:
        """Whether the previous step has ended without `end_step`: taken, or abandoned and its gradients dropped."""
        waiting = (self._unscaled | self._left) - self._stepped
        return self._looked and not any(
            has_gradients(self._seen[o][0].optimizer)
            for o in waiting
            if o in self._seen
        )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, which is adapted first if the previous step has ended (manual optimization)."""
        if self.scaler is None:
            return loss
        if self._is_over:
            self._adapt()
        self._began = True
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, once per step."""
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self._unscaled.add(id(optimizer))
            if has_gradients(optimizer):
                if (
                    not self._began
                ):  # this rank had no data yet, and got the other ranks' gradients
                    self._began = True
                    first = next(
                        p for group in optimizer.param_groups for p in group["params"]
                    )
                    self.scaler.scale(torch.zeros((), device=first.device))
                seen = self._seen.get(id(optimizer))
                if seen is None or seen[0].groups != len(
                    optimizer.param_groups
                ):  # new groups may be divided otherwise
                    _refuse_half_gradients(optimizer, self.name)
                    seen = self._seen[id(optimizer)] = _seen_optimizers(optimizer)
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
        whole = [
            self.scaler.step(one) is not None  # type: ignore[arg-type]
            for one in seen
            if has_gradients(one)
        ]
        if all(whole):
            step()
        return all(whole)

    def adapt_scale(self, optimizers: Sequence[Optimizer]) -> None:
        """Adapt the scale once the step has ended: gradients that wait for their step still have the old scale."""
        waiting = any(
            id(one) not in self._stepped and has_gradients(one) for one in optimizers
        )
        if self.scaler is not None and self._is_over and not waiting:
            self._adapt()

    def end_step(self) -> None:
        """Adapt the scale, if any optimizer was stepped."""
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
        """Drop the state of the unfinished step; the scale is not adapted."""
        if self._looked and self.scaler is not None:
            self.scaler.update(
                self.scaler.get_scale()
            )  # sync point: the run has failed
        self._forget()
        self._seen.clear()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters."""
        if self.scaler is not None and self._is_over:
            return _state_after_update(self.scaler)
        scaler = self._engine or self.scaler
        return {} if scaler is None else scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing to do without a scaler, or from a run without one."""
        self.abandon_step()  # unscaled gradients of the current state do not fit the restored scale
        scaler = self._engine or self.scaler
        if scaler is not None and state:
            scaler.load_state_dict(dict(state))


class _DefaultDtype:
    """`torch.set_default_dtype` as a context that is entered many times without an allocation."""

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


def native_precision(
    name: str, device_type: str | None = None
) -> MixedPrecision | TruePrecision:
    """Make the precision of a word in `NAMES`.

    Args:
        name: the word.
        device_type: where it will run; by default where the Trainer runs.

    Raises:
        PrecisionError: for an unknown word.
    """
    if name not in NAMES:
        raise PrecisionError(
            f"unknown precision {name!r}", fix=did_you_mean(name, NAMES)
        )
    bits, kind = NAMES[name].split("-")
    return (
        TruePrecision(DTYPES[bits])
        if kind == "true"
        else MixedPrecision(DTYPES[bits], device_type)
    )


# -- overflows ------------------------------------------------------------------------------------------------------


class _SeenOptimizer:
    """An optimizer for GradScaler whose ``step`` returns True, so that a skipped step is known without a further read.

    Args:
        optimizer: the user's.
        only: the parameters whose gradients GradScaler reads; None for all.

    Attributes:
        groups: the number of parameter groups when this was made.
    """

    def __init__(self, optimizer: Optimizer, only: set[Tensor] | None = None) -> None:
        self.optimizer = optimizer
        self.only = only
        self.groups = len(optimizer.param_groups)
        self.run: Callable[[], Any] = (
            optimizer.step if only is None else lambda: None
        )  # the step follows when all are read

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        if (only := self.only) is None:
            return groups
        return [
            {"params": [p for p in group["params"] if p in only]} for group in groups
        ]

    def step(self) -> bool:
        self.run()
        return True


def _refuse_half_gradients(optimizer: Optimizer, name: str) -> None:
    """Refuse float16 gradients, which a gradient scaler cannot unscale: they overflow and underflow themselves.

    Raises:
        PrecisionError: an optimizer trains weights in float16.
    """
    weights = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    half = [weight for weight in weights if weight.dtype is torch.float16]
    if half:
        raise PrecisionError(
            "weights in float16 cannot be trained with mixed precision, which needs float32 weights",
            found=f"{len(half)} of {len(weights)} parameters of {type(optimizer).__name__} in float16, under {name!r}",
            fix="build or load the model in float32 (from_pretrained(..., dtype=torch.float32), or model.float()), "
            'and freeze what stays in float16; or train in pure float16, precision="16-true"',
        )


def _seen_optimizers(optimizer: Optimizer) -> list[_SeenOptimizer]:
    """One for each way in which parameters are divided: torch reads gradients of one layout at a time."""
    kinds: dict[Any, set[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            whole = tuple(
                placement.is_replicate()
                for placement in getattr(parameter, "placements", ())
            )
            kinds.setdefault(
                (getattr(parameter, "device_mesh", None), whole), set()
            ).add(parameter)
    return [
        _SeenOptimizer(optimizer, kind if len(kinds) > 1 else None)
        for kind in kinds.values()
    ]


def has_gradients(optimizer: Optimizer | _SeenOptimizer) -> bool:
    """Whether any of its parameters has a gradient."""
    return any(
        p.grad is not None for group in optimizer.param_groups for p in group["params"]
    )


def make_scaler(device_type: str, **options: Any) -> torch.amp.GradScaler:
    """Make torch's gradient scaler without initialising the device.

    ``GradScaler("cuda")`` counts the devices through the runtime, after which a forked process cannot use them.

    Args:
        device_type: of the gradients.
        options: of ``torch.amp.GradScaler``.

    Example:
        >>> make_scaler("cuda", init_scale=8.0).is_enabled()
        True
    """
    made = torch.amp.GradScaler("cpu", **options)
    made._device = device_type
    return made


def _state_after_update(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """The state after the scale is adapted; the scaler keeps its own, as other optimizers may still step with it."""
    before = scaler.state_dict()
    per_optimizer = scaler._per_optimizer_states
    scaler.update()
    adapted = scaler.state_dict()
    scaler.load_state_dict(before)
    scaler._per_optimizer_states = per_optimizer
    return adapted


# -- marks of earlier conversions -----------------------------------------------------------------------------------


def note_layers(module: nn.Module, name: str, options: str) -> None:
    """Mark a module whose layers a precision has exchanged; the arguments are those of `refuse_layers`."""
    module.__dict__[_LAYERS] = (name, options)


def refuse_layers(module: nn.Module, name: str, options: str | None = None) -> None:
    """Refuse layers that another precision exchanged: they cannot be changed back.

    Args:
        module: the whole module.
        name: of the precision.
        options: what else decides which layers are exchanged, and for which; None: the precision exchanges none.

    Raises:
        PrecisionError: another precision, or one with other options, has exchanged layers.
    """
    for part in module.modules():
        was = part.__dict__.get(_LAYERS)
        if was is not None and was != (name, options):
            raise PrecisionError(
                "an earlier precision replaced layers of this module permanently",
                found=f"{was[0]!r}, and now {name!r}"
                + (" with other options" if was[0] == name else ""),
                fix="build the module again, and load its weights; or keep the earlier precision",
            )


def _refuse_cast(module: nn.Module, name: str) -> None:
    """Refuse weights that an earlier precision cast; weights that the user built in another dtype are left as they are.

    Args:
        module: the whole module.
        name: of a precision that casts nothing.

    Raises:
        PrecisionError: weights still have the dtype of the earlier precision.
    """
    for part in module.modules():
        dtype = part.__dict__.get(_CAST)
        if dtype is not None and any(
            parameter.dtype is dtype for parameter in part.parameters()
        ):
            raise PrecisionError(
                "an earlier precision cast the weights of this module permanently",
                found=f"{dtype}, and now {name!r}",
                fix="build the module again, and load its weights; or call module.float() first",
            )


def forget_layers(module: nn.Module) -> None:
    """Remove the marks of `note_layers`."""
    for part in module.modules():
        part.__dict__.pop(_LAYERS, None)
