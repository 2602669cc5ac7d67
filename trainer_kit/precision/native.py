"""Precisions of torch: whole models in one dtype, and autocast with or without loss scaling."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.devices import present_accelerator
from trainer_kit.core.display import plural
from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.core.tensors import map_tensors
from trainer_kit.core.types import Batch, Keywords, SavedState, StateDict
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
from trainer_kit.precision.torch_private import set_scaler_device, state_after_update

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
_ExceptedModule: TypeAlias = "tuple[str, nn.Module, ModulePrecision]"
# Marks in the ``__dict__`` of a module, where a copy of the module has them too, and a checkpoint has not.
_EXCHANGED_LAYERS_MARK: Final = "_precision_of_layers"
_CAST_MARK: Final = "_dtype_of_cast"


class NativePrecision(Precision):
    """What the two precisions of torch share.

    Args:
        exceptions: modules that compute in another dtype; see `Exceptions`.
        device_type: where the forward runs, as in ``torch.device.type``.
    """

    _engine: EngineSteps | None = None
    """The steps of an engine, where one steps by itself."""

    def __init__(self, exceptions: Exceptions, device_type: str) -> None:
        self.exceptions = except_modules(exceptions)
        self.device_type = device_type

    def convert_module(self, module: nn.Module) -> None:
        """Cast parameters and buffers, in place, where this precision casts any."""
        refuse_layers(module, self.name)
        default = ModulePrecision(torch.float32)
        exceptions = [
            (name, submodule, precision or default)
            for name, submodule, precision in excepted(module, self.exceptions)
        ]
        self.convert_with(module, exceptions)

    @abstractmethod
    def convert_with(
        self, module: nn.Module, exceptions: Sequence[_ExceptedModule]
    ) -> None:
        """As `convert_module`, with these exceptions.

        Args:
            module: the whole module, changed in place.
            exceptions: for each module in another dtype its name, itself and its precision.
        """

    def separately_gathered_modules(self, module: nn.Module) -> list[nn.Module]:
        """The exceptions."""
        return [submodule for _, submodule, _ in excepted(module, self.exceptions)]

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

    def convert_with(
        self, module: nn.Module, exceptions: Sequence[_ExceptedModule]
    ) -> None:
        """Cast floating-point parameters and buffers, in place, but those of these exceptions."""
        refuse_ties(module, [name for name, _, _ in exceptions])
        if not self.converts_batch:
            _refuse_cast(module, self.name)
        else:
            module.__dict__[_CAST_MARK] = self.dtype
            cast_module(
                module, self.dtype, [submodule for _, submodule, _ in exceptions]
            )
        modules = []
        for _, submodule, precision in exceptions:
            cast_module(submodule, precision.dtype)
            # The layer after an exception expects the dtype of the other layers.
            output_dtype = precision.output_dtype or self.dtype
            modules.append((submodule, precision.dtype, output_dtype))
        apply_exceptions(module, modules, _DefaultDtype)

    def convert_batch(self, batch: Batch) -> Batch:
        """Cast the floating-point tensors of a batch."""
        return map_tensors(batch, self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def forward_context(self) -> AbstractContextManager[object] | None:
        """The default dtype, for tensors that a step creates; None for float32."""
        if not self.converts_batch:
            return None
        return _DefaultDtype(self.dtype)

    def init_context(self) -> AbstractContextManager[object]:
        """Build layers in this dtype."""
        if not self.converts_batch:
            return nullcontext()
        return _DefaultDtype(self.dtype)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], object]) -> bool:
        """Run ``step``; an engine reports whether it skipped the step."""
        step()
        return self._engine is None or not self._engine.skipped

    def state_dict(self) -> StateDict:
        """The loss scale of an engine; else empty."""
        if self._engine is None:
            return {}
        return self._engine.state_dict()

    def load_state_dict(self, state: SavedState) -> None:
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
        self._follows_device = device_type is None
        if device_type is None:
            accelerator = present_accelerator()
            device_type = "cpu" if accelerator is None else accelerator.type
        super().__init__(exceptions, device_type)
        self.name = f"{_bits(dtype, _HALF, 'MixedPrecision')}-mixed"
        self.dtype = dtype
        self._is_users_scaler = scaler is not None
        # An engine may gather weights in the dtype to which autocast would cast them (FSDP gathers them as they are
        # stored); sums over many ranks need the digits of float32.
        self.param_dtype = dtype
        self.reduce_dtype = torch.float32
        self.scales = dtype is torch.float16
        self.skips = self.scales
        if scaler is not None and not self.scales:
            raise PrecisionError(
                "bfloat16 needs no gradient scaler",
                fix='use "16-mixed", or leave the scaler out',
            )
        self.scaler = scaler
        if self.scales and scaler is None:
            self.scaler = make_scaler(self.device_type)
        # By the id of an optimizer. The views stay from step to step, and keep the optimizer alive with its id.
        self._views: dict[int, list[_ScalerView]] = {}
        # The optimizers whose gradients were divided by the scale in this step, and those that were stepped.
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        # Those whose gradients were divided, but that had not stepped when the step ended: they may step later.
        self._unscaled_not_stepped: set[int] = set()
        # Whether the scaler has read gradients since the scale was adapted.
        self._has_read_gradients = False
        # Whether a loss was scaled, so that the scale is on the device.
        self._has_scaled_loss = False

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a PrecisionError where this precision cannot run."""
        super().check(device, engine)
        if device.type != self.device_type:
            if not self._follows_device:
                raise PrecisionError(
                    "autocast is configured for a different device than the run uses",
                    found=f"device_type={self.device_type!r}, and the run is on {device.type!r}",
                    fix="leave device_type out, or use that device as accelerator",
                )
            self.device_type = device.type
            if self.scales and not self._is_users_scaler:
                self.scaler = make_scaler(device.type)

    def convert_with(
        self, module: nn.Module, exceptions: Sequence[_ExceptedModule]
    ) -> None:
        """Cast the weights of exceptions in float64; all others keep their dtype."""
        in_float64 = {
            name: submodule
            for name, submodule, precision in exceptions
            if precision.dtype is torch.float64
        }
        refuse_ties(module, list(in_float64))
        _refuse_cast(module, self.name)
        for submodule in in_float64.values():
            cast_module(submodule, torch.float64)
        modules = [
            (submodule, precision.dtype, precision.output_dtype)
            for _, submodule, precision in exceptions
        ]
        apply_exceptions(module, modules, self._exception_context)

    def _exception_context(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Autocast to another half precision; in float32 and float64 none."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        autocast_dtype = dtype if is_half else self.dtype
        return torch.autocast(self.device_type, dtype=autocast_dtype, enabled=is_half)

    def forward_context(self) -> AbstractContextManager[object] | None:
        """Autocast."""
        return torch.autocast(self.device_type, dtype=self.dtype)

    @property
    def _previous_step_ended(self) -> bool:
        """Whether the previous step has ended without `end_step`: taken, or abandoned and its gradients dropped."""
        if not self._has_read_gradients:
            return False
        # Gradients that wait for a step still have the present scale.
        waiting = (self._unscaled | self._unscaled_not_stepped) - self._stepped
        return not any(
            has_gradients(self._views[key][0].optimizer)
            for key in waiting
            if key in self._views
        )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, which is adapted first if the previous step has ended (manual optimization)."""
        if self.scaler is None:
            return loss
        # Before this loss is scaled: all gradients of one step must have the same scale.
        if self._previous_step_ended:
            self._update_scale()
        self._has_scaled_loss = True
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, once per step."""
        if self.scaler is None or id(optimizer) in self._unscaled:
            return
        self._unscaled.add(id(optimizer))
        if not has_gradients(optimizer):
            return
        if not self._has_scaled_loss:
            # This rank had no data yet, and got the other ranks' gradients: the scale is not on the device.
            self._has_scaled_loss = True
            parameters = chain.from_iterable(
                g["params"] for g in optimizer.param_groups
            )
            device = next(parameters).device
            self.scaler.scale(torch.zeros((), device=device))
        views = self._views.get(id(optimizer))
        # New groups may be divided otherwise.
        if views is None or views[0].groups != len(optimizer.param_groups):
            _refuse_half_gradients(optimizer, self.name)
            views = _create_views(optimizer)
            self._views[id(optimizer)] = views
        # GradScaler refuses an optimizer without gradients.
        for view in views:
            if view.selected is None or has_gradients(view):
                self.scaler.unscale_(view)  # type: ignore[arg-type]  # all that it reads
                self._has_read_gradients = True

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], object]) -> bool:
        """Run ``step`` unless this optimizer's gradients overflowed."""
        if self.scaler is None or not has_gradients(optimizer):
            step()
            return self._engine is None or not self._engine.skipped
        # Clipping may have unscaled them already: a second division would make them too small.
        self.unscale_gradients(optimizer)
        self._stepped.add(id(optimizer))
        views = self._views[id(optimizer)]
        if len(views) == 1:
            views[0].set_step(step)
            return self.scaler.step(views[0]) is not None  # type: ignore[arg-type]  # as above
        # No view steps anything: the optimizer is stepped once, after all gradients have been read.
        is_finite = True
        for view in views:
            if has_gradients(view):
                result = self.scaler.step(view)  # type: ignore[arg-type]  # as above
                is_finite = is_finite and result is not None
        if is_finite:
            step()
        return is_finite

    def adapt_scale(self, optimizers: Sequence[Optimizer]) -> None:
        """Adapt the scale once the step has ended: gradients that wait for their step still have the old scale."""
        for optimizer in optimizers:
            if id(optimizer) not in self._stepped and has_gradients(optimizer):
                return
        if self.scaler is not None and self._previous_step_ended:
            self._update_scale()

    def end_step(self) -> None:
        """Adapt the scale, if any optimizer was stepped."""
        # Without a step there is nothing to adapt to, and GradScaler raises an error.
        if self._stepped:
            self._update_scale()
        self._unscaled_not_stepped |= self._unscaled
        self._unscaled.clear()

    def _update_scale(self) -> None:
        assert self.scaler is not None
        self.scaler.update()
        self._reset_step()

    def _reset_step(self) -> None:
        self._has_read_gradients = False
        self._stepped.clear()
        self._unscaled.clear()
        self._unscaled_not_stepped.clear()

    def abandon_step(self) -> None:
        """Drop the state of the unfinished step; the scale is not adapted."""
        # `update` with the present scale makes GradScaler forget which gradients it has read, without adapting.
        if self._has_read_gradients and self.scaler is not None:
            scale = self.scaler.get_scale()  # sync point: the run has failed
            self.scaler.update(scale)
        self._reset_step()
        self._views.clear()

    def state_dict(self) -> StateDict:
        """The scale and its counters."""
        # A checkpoint between two steps of manual optimization: a resumed run begins with the adapted scale.
        if self.scaler is not None and self._previous_step_ended:
            return state_after_update(self.scaler)
        scaler = self._engine or self.scaler
        if scaler is None:
            return {}
        return scaler.state_dict()

    def load_state_dict(self, state: SavedState) -> None:
        """Restore what `state_dict` returned; nothing to do without a scaler, or from a run without one."""
        # Unscaled gradients of the current state do not fit the restored scale.
        self.abandon_step()
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


def _bits(dtype: object, supported: Mapping[torch.dtype, str], class_name: str) -> str:
    """The number of bits in the name of a precision."""
    if isinstance(dtype, torch.dtype) and dtype in supported:
        return supported[dtype]
    fix = f"one of {', '.join(map(str, supported))}"
    if isinstance(dtype, str) and dtype in NAMES:
        fix = f"precision={dtype!r}, or {class_name} with {fix}"
    raise PrecisionError(f"{class_name} has no dtype {dtype!r}", fix=fix)


def native_precision(
    name: str, device_type: str | None = None
) -> MixedPrecision | TruePrecision:
    """Create the precision of a word in `NAMES`.

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
    if kind == "true":
        return TruePrecision(DTYPES[bits])
    return MixedPrecision(DTYPES[bits], device_type)


# -- overflows ------------------------------------------------------------------------------------------------------


class _ScalerView:
    """An optimizer for GradScaler whose ``step`` returns True, so that a skipped step is known without a further read.

    Args:
        optimizer: the user's.
        selected: the parameters whose gradients GradScaler reads; None for all.

    Attributes:
        groups: the number of parameter groups when this was created.
    """

    def __init__(
        self, optimizer: Optimizer, selected: set[Tensor] | None = None
    ) -> None:
        self.optimizer = optimizer
        self.selected = selected
        self.groups = len(optimizer.param_groups)
        self._step: Callable[[], object] | None = None

    def set_step(self, step: Callable[[], object]) -> None:
        """Set what `step` runs; by default nothing."""
        self._step = step

    @property
    def param_groups(self) -> list[Keywords]:
        groups = self.optimizer.param_groups
        selected = self.selected
        if selected is None:
            return groups
        return [
            {"params": [p for p in group["params"] if p in selected]}
            for group in groups
        ]

    def step(self) -> bool:
        if self._step is not None:
            self._step()
        return True


def _refuse_half_gradients(optimizer: Optimizer, name: str) -> None:
    """Refuse float16 gradients, which a gradient scaler cannot unscale: they overflow and underflow themselves.

    Raises:
        PrecisionError: an optimizer trains weights in float16.
    """
    weights: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        weights += [p for p in group["params"] if p.grad is not None]
    half = [weight for weight in weights if weight.dtype is torch.float16]
    if half:
        raise PrecisionError(
            "weights in float16 cannot be trained with mixed precision, which needs float32 weights",
            found=f"{len(half)} of {plural(len(weights), 'parameter')} of {type(optimizer).__name__} "
            f"in float16, under {name!r}",
            fix="build or load the model in float32 (from_pretrained(..., dtype=torch.float32), or model.float()), "
            'and freeze what stays in float16; or train in pure float16, precision="16-true"',
        )


def _create_views(optimizer: Optimizer) -> list[_ScalerView]:
    """One for each way in which parameters are sharded: torch reads gradients of one layout at a time."""
    layouts: dict[object, set[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh = getattr(parameter, "device_mesh", None)
            placements = getattr(parameter, "placements", ())
            is_replicated = tuple(p.is_replicate() for p in placements)
            layouts.setdefault((mesh, is_replicated), set()).add(parameter)
    if len(layouts) == 1:
        return [_ScalerView(optimizer)]
    return [_ScalerView(optimizer, parameters) for parameters in layouts.values()]


def has_gradients(optimizer: Optimizer | _ScalerView) -> bool:
    """Whether any of its parameters has a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def make_scaler(device_type: str, **options: Any) -> torch.amp.GradScaler:
    """Create torch's gradient scaler without initializing the device.

    ``GradScaler("cuda")`` counts the devices through the runtime, after which a forked process cannot use them.

    Args:
        device_type: of the gradients.
        options: of ``torch.amp.GradScaler``.

    Example:
        >>> make_scaler("cuda", init_scale=8.0).is_enabled()
        True
    """
    # The device is only read when a loss is scaled.
    scaler = torch.amp.GradScaler("cpu", **options)
    set_scaler_device(scaler, device_type)
    return scaler


# -- marks of earlier conversions -----------------------------------------------------------------------------------


def note_layers(module: nn.Module, name: str, options: str) -> None:
    """Mark a module whose layers a precision has exchanged; the arguments are those of `refuse_layers`."""
    module.__dict__[_EXCHANGED_LAYERS_MARK] = (name, options)


def refuse_layers(module: nn.Module, name: str, options: str | None = None) -> None:
    """Refuse layers that another precision exchanged: they cannot be changed back.

    Args:
        module: the whole module.
        name: of the precision.
        options: what else decides which layers are exchanged, and for which; None: the precision exchanges none.

    Raises:
        PrecisionError: another precision, or one with other options, has exchanged layers.
    """
    for submodule in module.modules():
        earlier = submodule.__dict__.get(_EXCHANGED_LAYERS_MARK)
        if earlier is None or earlier == (name, options):
            continue
        earlier_name, _ = earlier
        details = f"{earlier_name!r}, and now {name!r}"
        if earlier_name == name:
            details += " with other options"
        raise PrecisionError(
            "an earlier precision replaced layers of this module permanently",
            found=details,
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
    for submodule in module.modules():
        dtype = submodule.__dict__.get(_CAST_MARK)
        if dtype is None:
            continue
        # The mark stays after module.float(), which undoes the cast: the weights themselves decide.
        if any(parameter.dtype is dtype for parameter in submodule.parameters()):
            raise PrecisionError(
                "an earlier precision cast the weights of this module permanently",
                found=f"{dtype}, and now {name!r}",
                fix="build the module again, and load its weights; or call module.float() first",
            )


def forget_layers(module: nn.Module) -> None:
    """Remove the marks of `note_layers`."""
    for submodule in module.modules():
        submodule.__dict__.pop(_EXCHANGED_LAYERS_MARK, None)
