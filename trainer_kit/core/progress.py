"""How far a run is: counts of *completed* things, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Progress"]


@dataclass(slots=True)
class Progress:
    """Completed epochs, batches, optimizer steps, samples and tokens of a fit.

    Attributes:
        epoch: epochs finished. Within epoch e (counted from 0) this is e.
        batch: micro-batches trained on, as the loader of this rank yields them.
        step: turns of the loop: one optimizer step each (in manual optimization: one batch each).
        samples: samples trained on, over all ranks.
        tokens: tokens trained on, over all ranks, where a ``GradientAccumulation`` or ``max_duration`` in tokens asks.
        epoch_batch: micro-batches finished in the running epoch.
        seconds: seconds spent training, over all sittings.

    Example:
        >>> p = Progress(epoch=1, step=20)
        >>> q = Progress(); q.load_state_dict(p.state_dict()); q == p
        True
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0
    epoch_batch: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, int | float]:
        """All counts, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Take over the counts of ``state``; a count that an older state lacks stays as it is.

        Raises:
            ValueError: for what is no count.
        """
        for field in fields(self):
            value = state.get(field.name, 0)
            known = (int, float) if field.name == "seconds" else (int,)
            if type(value) not in known or not 0 <= value < 2**63:
                raise ValueError(f"{field.name}={value!r} is no count")
        for field in fields(self):
            if field.name in state:
                setattr(self, field.name, state[field.name])
