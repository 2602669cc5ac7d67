"""How the ranks leave an epoch together where ``on_train_batch_start`` returned -1."""

from __future__ import annotations

from typing import final

from trainer_kit.core.errors import RankError
from trainer_kit.core.protocols import Group
from trainer_kit.step.bus import Bus

__all__ = ["EarlyEpochExit", "ExitAgreement", "exit_agreement"]


class EarlyEpochExit(Exception):
    """``on_train_batch_start`` returned -1: Lightning's way to leave an epoch."""


@final
class ExitAgreement:
    """The agreement of several ranks on leaving an epoch; every rank calls it once for each micro-batch.

    Args:
        world: the ranks.

    Attributes:
        rounds: how many times it was called.
    """

    def __init__(self, world: Group) -> None:
        self._world = world
        self.rounds = 0

    def __call__(self, leaves: bool, has_batch: bool) -> bool:
        """Whether all ranks leave the epoch.

        Args:
            leaves: whether this rank leaves.
            has_batch: whether it has a batch: otherwise it does what the others do.

        Raises:
            RankError: only some of the ranks with a batch leave.
        """
        # Counted, because a rank that ran out of memory inside a window owes the others the rounds that are left.
        self.rounds += 1
        rows = self._world.agree([leaves, has_batch])
        leaving: list[int] = []
        staying: list[int] = []
        for rank, (rank_leaves, rank_has_batch) in enumerate(rows):
            if rank_has_batch:
                ranks = leaving if rank_leaves else staying
                ranks.append(rank)
        # A rank that stays would wait for the others in its next collective.
        if leaving and staying:
            raise RankError(
                "on_train_batch_start returned -1 on some ranks only",
                found=f"on rank {', '.join(map(str, leaving))}, and not on rank {', '.join(map(str, staying))}",
                fix="decide by a value that is the same on all ranks: a step, or a value logged with sync_dist=True",
            )
        return bool(leaving)

    def catch_up(self, rounds: int) -> None:
        """Agree with the other ranks, for micro-batches that this rank did not run, until ``rounds`` are complete.

        Raises:
            EarlyEpochExit: the others leave.
        """
        while self.rounds < rounds:
            if self(False, False):
                raise EarlyEpochExit


def exit_agreement(bus: Bus, world: Group) -> ExitAgreement | None:
    """The agreement of this run; None with one rank, or where no rank overrides ``on_train_batch_start``.

    Every rank must call it.
    """
    if world.size == 1:
        return None
    # Any rank's hook is enough: the others must answer its votes.
    listens = world.agree([bool(bus.on_train_batch_start)])
    if not any(row[0] for row in listens):
        return None
    return ExitAgreement(world)
