"""-1 from ``on_train_batch_start``: an epoch is left by all ranks, or the run ends with an error that names them."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

from trainer_kit.core.errors import RankError
from trainer_kit.core.protocols import Group
from trainer_kit.step.bus import Bus

__all__ = ["answers", "exit_agreement"]


def exit_agreement(bus: Bus, world: Group) -> Callable[[bool, bool], bool] | None:
    """How ranks agree on leaving an epoch: called for each micro-batch with whether this one leaves, and has a batch.

    None where nobody can: one process, or hooks that return nothing on any rank.

    Raises:
        RankError: by what is returned, when some of those that have a batch leave.
    """
    # The first of a hook's listeners notes that it is called.
    if world.size == 1 or not any(row[0] for row in world.agree([any(map(answers, bus.on_train_batch_start[1:]))])):
        return None

    def together(leaves: bool, has_batch: bool) -> bool:
        rows = world.agree([leaves, has_batch])
        leaving = [rank for rank, (leaves_too, has) in enumerate(rows) if leaves_too and has]
        staying = [rank for rank, (leaves_too, has) in enumerate(rows) if has and not leaves_too]
        if leaving and staying:
            raise RankError(
                "on_train_batch_start returned -1 on some ranks only",
                found=f"on rank {', '.join(map(str, leaving))}, and not on rank {', '.join(map(str, staying))}",
                fix="decide by what all ranks share: a step, or a value that was logged with sync_dist=True",
            )
        return bool(leaving)

    return together


def answers(listener: Any) -> bool:
    """Whether a function may return anything but None, as far as its code tells.

    Example:
        >>> answers(lambda: -1), answers(lambda: None)
        (True, False)
    """
    while hasattr(listener, "func"):
        listener = listener.func
    code = getattr(getattr(listener, "__func__", listener), "__code__", None)
    if code is None:
        return True
    nothing = False  # is on top of the stack, wherever one comes from
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_VALUE" and (step.is_jump_target or not nothing):
            return True
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return True
        nothing = step.opname == "LOAD_CONST" and step.argval is None
    return False
