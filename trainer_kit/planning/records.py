"""The values that planning hands over: a configuration that is tried, and what one step of it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

__all__ = ["CALCULATED", "CATEGORIES", "Candidate", "Measured", "Traffic"]

CATEGORIES: Final = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "temporary",
)
"""What memory is used for, in the order of tables and pictures."""
CALCULATED: Final = "only weights, gradients and optimizer state, calculated: "
"""The first words of the first note of a step that cannot run without data."""


@final
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration that is tried.

    Attributes:
        strategy: a word of ``Trainer(strategy=...)``, such as ``"ddp"``, ``"fsdp"``, ``"tp2"`` or
            ``"deepspeed_stage_2"``.
        precision: a word of ``Trainer(precision=...)``.
        world: the number of ranks.
        micro_batch: the number of samples of one rank in one micro-batch.
        accumulate: the number of micro-batches of one optimizer step.
        activation_checkpointing: whether repeated blocks compute their activations again in backward.
        offload: whether the optimizer's state is in host memory (and parameters, as the strategy does it).
    """

    strategy: str
    precision: str
    world: int
    micro_batch: int
    accumulate: int = 1
    activation_checkpointing: bool = False
    offload: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The collectives of one kind, over one axis, in one optimizer step of one rank.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"send"``, ``"all_to_all"`` or ``"broadcast"``.
        axis: the name of the mesh axis: ``"data"``, ``"tensor"``, ``"pipeline"``, ...
        count: the number of collectives.
        bytes: the payload of one rank, summed over ``count``.
    """

    kind: str
    axis: str
    count: int
    bytes: int


@final
@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one optimizer step of a configuration needs.

    Attributes:
        candidate: the configuration.
        memory: the bytes at the peak by category (see `CATEGORIES`; their sum is the peak), one mapping for each
            distinct role of a rank: the stages of a pipeline differ, other ranks do not.
        host: the bytes in host memory of one rank, where it offloads.
        traffic: the collectives.
        flops: floating-point operations of one rank, forward and backward.
        exact: whether memory is that of a real step on a CPU, but for what the notes say.
        notes: the assumptions, in words.
        operators: the operators of one rank that compute something, in forward, backward and the optimizer's step.
        ran: whether the step was run; False: weights, gradients and optimizer state are calculated, the rest is not.
        inexact: why a step that ran is not exact, one line for each reason.

    Example:
        >>> candidate = Candidate(strategy="single_device", precision="32-true", world=1, micro_batch=8)
        >>> memory = {"parameters": 40, "gradients": 40}
        >>> Measured(candidate=candidate, memory=(memory,), host=0, traffic=(), flops=0, exact=False, ran=False,
        ...          notes=()).peak
        80
    """

    candidate: Candidate
    memory: tuple[Mapping[str, int], ...]
    host: int
    traffic: tuple[Traffic, ...]
    flops: int
    exact: bool
    notes: tuple[str, ...]
    operators: int = 0
    ran: bool = True
    inexact: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The peak of the rank that needs most."""
        return max(sum(role.values()) for role in self.memory)
