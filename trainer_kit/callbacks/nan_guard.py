"""`NaNGuard`: what a run does about a step whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike

__all__ = ["NaNGuard"]

_POLICIES: Final = ("raise", "skip", "rollback")


@final
class NaNGuard(Callback):
    """Find the step whose loss or gradient is NaN or infinite, and raise there, or train without that step.

    Without this callback such a loss ends the run with an error that names its step, batch and samples. With it, the
    run holds a copy of its state in memory. Once a loss is not finite, the steps since that copy are trained again,
    each with a look at its loss and gradients. So the error names the loss or the first bad parameter, and a policy can
    leave the step out: the result is that of a run that never saw its batches.

    A good step has no cost and no device synchronisation. A copy is taken between steps, at most once in 200 times the
    time that taking one needs, so it costs at most 0.5 % of the run. It needs memory of the size of a checkpoint on the
    host (for a sharded model on the device). Hooks and values of ``state_dict`` are called as for a checkpoint; the
    hooks of steps that are trained again are called again. Checkpoints that were written stay, but those with steps
    that ``"rollback"`` leaves out are written again.

    Args:
        policy: ``"raise"``; ``"skip"``: leave out the step, as if its batches were not in the data; ``"rollback"``:
            leave out ``n`` steps before it, too; if the run was killed before it found the bad step, those since its
            checkpoint at most. A step that is left out counts in ``global_step``; learning rate schedules do not
            advance in it.
        n: how many steps before the bad one ``"rollback"`` leaves out.
        max_skips: so many bad steps may be left out in one run; the next one is an error.

    Attributes:
        skipped_steps: the numbers of the bad steps that were left out.

    Raises:
        ConfigurationError: for another policy, a negative number, an engine that keeps the state to itself (DeepSpeed,
            Megatron, pipelines, local SGD), fp16 loss scaling, or a loader that can be read only once.

    Example:
        >>> from trainer_kit import Trainer
        >>> guard = NaNGuard("skip")
        >>> trainer = Trainer(max_epochs=1, callbacks=[guard], barebones=True)
        >>> guard.skipped_steps
        []
    """

    def __init__(
        self, policy: Literal["raise", "skip", "rollback"] = "raise", n: int | None = None, max_skips: int = 10
    ) -> None:
        if policy not in _POLICIES:
            raise ConfigurationError(
                "NaNGuard has no such policy", found=repr(policy), fix=did_you_mean(str(policy), _POLICIES)
            )
        if (n is not None) != (policy == "rollback") or (n or 0) < 0 or max_skips < 0:
            raise ConfigurationError(
                'n applies to policy="rollback" only: it is the number of steps to leave out before the bad one',
                found=f"policy={policy!r}, n={n}, max_skips={max_skips}",
                fix='NaNGuard("rollback", n=100), or NaNGuard("skip")',
            )
        self.policy, self.n, self.max_skips = policy, n or 0, max_skips
        self.skipped_steps: list[int] = []

    @property
    def non_finite(self) -> tuple[str, int, int, list[int]]:
        """What the loop asks: policy, steps before the bad one, limit, and the list that it fills."""
        return self.policy, self.n, self.max_skips, self.skipped_steps

    def setup(self, trainer: TrainerLike, module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            self.skipped_steps.clear()  # of another fit; a resumed fit restores its own after this

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": list(self.skipped_steps)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.skipped_steps[:] = state_dict["skipped_steps"]
