"""What a DeepSpeed engine skipped, and its loss scale in float16, whose state is kept as GradScaler has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from torch import Tensor

__all__ = ["EngineScaler"]

_OWN: Final = ("cur_iter", "last_overflow_iter", "cur_hysteresis")


@final
class EngineScaler:
    """Of one engine after another; what the last one had stays when it is gone, for a checkpoint after the run.

    Attributes:
        skipped: whether the last step was left out because gradients were not finite.
    """

    def __init__(self) -> None:
        self.skipped = False
        self._numbers: Any = None
        self._scales = False  # whether the loss is scaled here

    def follow(self, engine: Any) -> None:
        """From now on the numbers are those of this engine."""
        self.skipped, self._numbers = False, None
        if engine.fp16_enabled():
            self._numbers = getattr(engine.optimizer, "loss_scaler", None)
        self._scales = self._numbers is None and engine.fp16_enabled()
        if self._scales:  # without ZeRO the engine divides gradients by the scale, and leaves out to multiply the loss
            self._numbers = getattr(engine.optimizer, "loss_scale_config", None)

    def scale(self, loss: Tensor) -> Tensor:
        """What the engine's backward is called on."""
        return loss.float() * self._numbers.cur_scale if self._scales else loss

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters under GradScaler's keys, for any other engine, and the engine's own counters."""
        scaler = self._numbers
        if scaler is None:
            return {}
        window, since = int(getattr(scaler, "scale_window", None) or 2000), _since(scaler)
        return {
            "scale": float(scaler.cur_scale),  # no sync point: a number of the host's
            "growth_factor": 2.0,  # the engine knows no other
            "backoff_factor": 0.5,
            "growth_interval": window,
            # After an overflow the engine waits for one step more than the window.
            "_growth_tracker": max(since - 1, 0) % window,
            "deepspeed": {key: getattr(scaler, key) for key in _OWN if getattr(scaler, key, None) is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state_dict`, or a GradScaler's; a scale that the JSON fixes stays, as does how long it waits.

        Args:
            state: empty where nothing was scaled.
        """
        scaler = self._numbers
        if scaler is None or not state or _since(scaler) < 0:
            return
        scaler.cur_scale = float(state["scale"])  # no sync point: as above
        own = state.get("deepspeed", {})
        if "last_overflow_iter" in own:
            for key in _OWN:
                if key in own and hasattr(scaler, key):
                    setattr(scaler, key, own[key])
        else:
            # As many steps without an overflow as let it grow when the other would have.
            scaler.last_overflow_iter = -1
            scaler.cur_iter = int(state["_growth_tracker"]) + 1


def _since(scaler: Any) -> int:
    """Steps since the last overflow; -1 where the scale is fixed."""
    last = getattr(scaler, "last_overflow_iter", None)
    return -1 if last is None else scaler.cur_iter - last - 1
