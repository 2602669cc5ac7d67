"""Training ends where a loss is NaN or infinite, and no checkpoint is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor

from trainer_kit.core.errors import NonFiniteError
from trainer_kit.core.finite import are_finite
from trainer_kit.step.run import Fit

__all__ = ["check_finite", "finite_weights"]

_OVERFLOWS: Final = 20
"""Steps without one finite loss that gradient scaling is given."""


def check_finite(run: Fit) -> None:
    """Look at the losses since the last look, on every rank at once; the run ends where one is NaN or infinite."""
    first, step, world = run.finite + 1, run.progress.step, run.strategy.world
    if step == run.finite or (run.precision.scales and step - run.finite < _OVERFLOWS):
        return  # overflowed steps in a row are skipped, and the scale finds its way: too early to judge
    run.finite = step
    finite = run.micro.is_finite()
    if world.size > 1:
        finite = all(row[0] for row in world.agree([finite]))
    if not finite:
        raise NonFiniteError(
            f"the loss is not finite between steps {first} and {run.progress.step}",
            found=f"NaN or infinity in what training_step returned; the last loss is {run.micro.loss}",
            fix="lower the learning rate, clip gradients, or look for the step with detect_anomaly=True",
        )


def finite_weights(weights: Mapping[str, Tensor], names: Iterable[str]) -> bool:
    """Whether what a checkpoint holds of the parameters ``names`` is finite; buffers may hold infinities on purpose."""
    return are_finite(weights[name] for name in names if name in weights)
