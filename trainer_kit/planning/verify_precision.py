"""Rounding that a dtype does not explain: gradients of the plain loop in the precision of the run, against float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from trainer_kit.planning.verify_compare import Finding, percent
from trainer_kit.planning.verify_recorder import Record

__all__ = ["Rounding", "excessive_rounding", "measure_rounding"]

_SINGLE_EPS: Final = torch.finfo(torch.float32).eps
_FACTOR: Final = 30.0
"""How many times the rounding that float32 predicts an error of a gradient may be."""
_SCALE: Final = 6.0
"""How many times the dtype's eps a gradient may be too long or too short as a whole."""
_FLOAT32: Final = 1e-3
"""The eps that is assumed for float32: its error may be far above its own, and a matmul may use TF32."""
_SMALL: Final = 1e-3
"""Parameters whose gradient is shorter than this part of the longest one are not judged: their terms cancel."""


@final
@dataclass(frozen=True)
class Rounding:
    """The error of one gradient.

    Attributes:
        name: of the parameter.
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
    norms = {name: float(torch.linalg.vector_norm(value.double())) for name, value in exact.items()}
    longest = max(norms.values(), default=0.0)
    errors = []
    for name, value in exact.items():
        if (
            name not in rounded
            or name not in single
            or norms[name] <= _SMALL * longest
            or value.numel() < 2
        ):
            continue
        true, low, plain = (
            tensor.double().flatten() for tensor in (value, rounded[name], single[name])
        )
        scale = float(low @ true) / norms[name] ** 2
        error = float(torch.linalg.vector_norm(low - true)) / norms[name]
        residual = float(torch.linalg.vector_norm(low - scale * true)) / norms[name]
        condition = float(torch.linalg.vector_norm(plain - true)) / norms[name] / _SINGLE_EPS
        errors.append(Rounding(name, error, scale, residual, eps * max(1.0, condition)))
    return errors


def excessive_rounding(
    exact: Record, rounded: Record, single: Record, eps: float, precision: str
) -> Finding | None:
    """Name the gradient whose error in the precision of the run is far above what its dtype explains.

    The plain loop computes with the same wrong code, so a comparison with it shows nothing.

    Args:
        exact: the plain loop in float64.
        rounded: in the precision of the run.
        single: in float32.
        eps: of the precision's dtype.
        precision: its name.
    """
    if precision == "64-true":
        return None
    predictor = single
    if rounded is single:  # nothing predicts the error of float32
        predictor, eps = exact, _FLOAT32
    errors = measure_rounding(exact.gradients[0], rounded.gradients[0], predictor.gradients[0], eps)
    wrong = [one for one in errors if _is_excessive(one, eps)]
    if not wrong:
        return None
    last = wrong[-1]  # backward reaches it first
    others = f", and those of {len(wrong) - 1} more parameters" if len(wrong) > 1 else ""
    text = (
        f"in {precision} the gradient is {last.scale:.3g} times that of float64 and differs by {percent(last.error)}"
        f"{others}; rounding explains {percent(last.predicted)}"
    )
    hint = "the plain loop has the same error: look for a backward or an operation that is wrong in this dtype only"
    return Finding(kind="precision", step=0, where=last.name, text=text, hint=hint)


def _is_excessive(rounding: Rounding, eps: float) -> bool:
    if rounding.error > _FACTOR * rounding.predicted:
        return True
    bias = abs(rounding.scale - 1)
    return bias > max(_SCALE * eps, _SCALE * rounding.predicted / 2, 2 * rounding.residual)
