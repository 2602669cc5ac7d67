"""Rounding that a dtype does not explain: gradients of the plain loop in the precision of the run, against float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from trainer_kit.core.display import plural
from trainer_kit.verify.compare import Finding, percent
from trainer_kit.verify.recorder import Record

__all__ = ["Rounding", "excessive_rounding", "gradients_cancel", "measure_rounding"]

_SINGLE_EPS: Final = torch.finfo(torch.float32).eps
_FACTOR: Final = 30.0
"""How many times the rounding that float32 predicts an error of a gradient may be."""
_SCALE: Final = 6.0
"""How many times the dtype's eps a gradient may be too long or too short as a whole."""
_FLOAT32: Final = 1e-3
"""The eps that is assumed for float32: its error may be far above its own, and a matmul may use TF32."""
_SMALL: Final = 1e-3
"""Parameters whose gradient is shorter than this part of the longest one are not judged: their terms cancel."""

_CANCELED: Final = 1e-9
"""Gradients that change the loss by less than this part of it, for a change of the weights by their own length."""


@final
@dataclass(frozen=True)
class Rounding:
    """The error of one gradient.

    Attributes:
        name: the name of the parameter.
        error: relative to the exact gradient.
        scale: the length of the gradient along the exact one, which is 1.
        residual: what is left beside that direction, relative to the exact gradient.
        predicted: the relative error that the float32 loop predicts for this dtype.
    """

    name: str
    error: float
    scale: float
    residual: float
    predicted: float


def measure_rounding(
    exact: Mapping[str, Tensor],
    rounded: Mapping[str, Tensor],
    single: Mapping[str, Tensor],
    eps: float,
) -> list[Rounding]:
    """The error of each gradient that is not small, in the order of the parameters."""
    norms = {name: _norm(value) for name, value in exact.items()}
    longest = max(norms.values(), default=0.0)
    errors = []
    for name, value in exact.items():
        norm = norms[name]
        if name not in rounded or name not in single:
            continue
        # One element has no direction beside that of the exact gradient.
        if norm <= _SMALL * longest or value.numel() < 2:
            continue
        gradient = value.double().flatten()
        rounded_gradient = rounded[name].double().flatten()
        single_gradient = single[name].double().flatten()
        # The projection on the exact gradient, and how much this model amplifies rounding
        # as float32 shows it.
        scale = float(rounded_gradient @ gradient) / norm**2
        condition = _norm(single_gradient - gradient) / norm / _SINGLE_EPS
        errors.append(
            Rounding(
                name=name,
                error=_norm(rounded_gradient - gradient) / norm,
                scale=scale,
                residual=_norm(rounded_gradient - scale * gradient) / norm,
                predicted=eps * max(1.0, condition),
            )
        )
    return errors


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


def gradients_cancel(exact: Record) -> bool:
    """Whether the exact gradients of the first step are no more than rounding errors of terms that cancel.

    A student that starts as a copy of its teacher has such gradients: in no dtype do they have a correct digit.
    """
    largest_loss = 0.0
    for (step, _), micro in exact.micros.items():
        if step == 0:
            for value in micro.loss.values():
                largest_loss = max(largest_loss, float(value.abs().sum()))
    # To first order, a change of the weights by their own length changes the loss by at
    # most this product.
    largest_change = 0.0
    for name, gradient in exact.gradients[0].items():
        weight = exact.weights[0].get(name)
        if weight is None:
            return False
        largest_change = max(largest_change, _norm(weight) * _norm(gradient))
    return largest_change < _CANCELED * largest_loss


def excessive_rounding(
    exact: Record, rounded: Record, single: Record, eps: float, precision: str
) -> Finding | None:
    """Name the gradient whose error in the precision of the run is far above what its dtype explains.

    The plain loop computes with the same wrong code, so a comparison with it shows nothing.

    Args:
        exact: the plain loop in float64.
        rounded: the plain loop in the precision of the run.
        single: the plain loop in float32.
        eps: the rounding unit of the precision's dtype.
        precision: the name of the precision.
    """
    # Nothing more exact than float64 measures its error.
    if precision == "64-true":
        return None
    predictor = single
    if rounded is single:
        # Nothing predicts the error of float32: the condition is 0 then, and the assumed
        # eps alone is the prediction.
        predictor = exact
        eps = _FLOAT32
    errors = measure_rounding(
        exact.gradients[0], rounded.gradients[0], predictor.gradients[0], eps
    )
    excessive = [rounding for rounding in errors if _is_excessive(rounding, eps)]
    if not excessive:
        return None
    # Backward reaches the last parameter first; the others may have its error.
    last = excessive[-1]
    text = f"in {precision} the gradient is {last.scale:.3g} times that of float64 and differs by {percent(last.error)}"
    if len(excessive) > 1:
        text += f", and those of {plural(len(excessive) - 1, 'more parameter')}"
    text += f"; rounding explains {percent(last.predicted)}"
    hint = "the plain loop has the same error: look for a backward or an operation that is wrong in this dtype only"
    return Finding(kind="precision", step=0, where=last.name, text=text, hint=hint)


def _is_excessive(rounding: Rounding, eps: float) -> bool:
    if rounding.error > _FACTOR * rounding.predicted:
        return True
    # A gradient that is too long as a whole is no rounding, even where its error is small.
    bias = abs(rounding.scale - 1)
    explained = max(_SCALE * eps, _SCALE * rounding.predicted / 2)
    return bias > max(explained, 2 * rounding.residual)
