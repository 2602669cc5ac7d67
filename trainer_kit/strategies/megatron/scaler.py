"""The loss scale of Megatron's optimizer in float16: whether it skipped, and its state as GradScaler has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

__all__ = ["MegatronScaler"]


@final
class MegatronScaler:
    """Of one optimizer of Megatron's after another.

    Attributes:
        skipped: whether the last step was left out because gradients overflowed.
    """

    def __init__(self) -> None:
        self.skipped = False
        self._numbers: Any = None

    def follow(self, stepper: Any) -> None:
        """From now on the numbers are those of this optimizer."""
        self.skipped, self._numbers = False, getattr(stepper, "grad_scaler", None)

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters under GradScaler's keys, for any other engine, and Megatron's own counter."""
        scaler = self._numbers
        if scaler is None:
            return {}
        return {
            "scale": float(scaler.scale),  # sync point: a checkpoint
            "growth_factor": 2.0,  # as Megatron makes it; a user cannot say otherwise
            "backoff_factor": 0.5,
            "growth_interval": scaler.growth_interval,
            "_growth_tracker": scaler._growth_tracker,
            "megatron": {"hysteresis_tracker": scaler._hysteresis_tracker},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state_dict`, or a GradScaler's.

        Args:
            state: empty where nothing was scaled.
        """
        scaler = self._numbers
        if scaler is None or not state:
            return
        own = state.get("megatron", {"hysteresis_tracker": scaler.hysteresis})
        tracker = int(state["_growth_tracker"]) % int(scaler.growth_interval)
        scaler.load_state_dict({"scale": torch.tensor([state["scale"]]), "growth_tracker": tracker, **own})
