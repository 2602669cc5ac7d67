"""Debug mode: processes compare the collective that they are about to make, and say who makes another, or none."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch import distributed as dist

from trainer_kit.accelerator.collectives import each_tensor
from trainer_kit.core.errors import RankError
from trainer_kit.core.protocols import Group

__all__ = ["meet"]

_HERE: Final = str(Path(__file__).resolve().parents[1])
_WAIT: Final = 60.0  # seconds


def meet(group: Group, data: Any, call: str) -> None:
    """Wait until every process is about to make the same call; what differs would hang it, or mix values up.

    Processes leave their call in the store through which they found each other, so a process that does something else
    meanwhile disturbs nothing. ``TRAINER_KIT_DEBUG_TIMEOUT`` is how many seconds others are waited for (60).

    Args:
        group: the processes.
        data: what is exchanged: the shapes and dtypes of its tensors are compared.
        call: its name.

    Raises:
        RankError: naming who has what, and who does not come.
    """
    shapes: list[str] = []
    if data is not None:
        each_tensor(data, lambda tensor: shapes.append(f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")))
    mine = {"call": f"{call}({', '.join(shapes)})", "at": _where()}
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"trainer_kit/calls/{group.rank}", 1)
    store.set(f"trainer_kit/call/{number}/{group.rank}", json.dumps(mine))
    store.set(f"trainer_kit/last/{group.rank}", json.dumps(mine))
    wait = timedelta(seconds=float(os.environ.get("TRAINER_KIT_DEBUG_TIMEOUT", _WAIT)))
    everyone: list[dict[str, str] | None] = []
    for rank in range(group.size):
        key = f"trainer_kit/call/{number}/{rank}"
        try:
            store.wait([key], wait)
        except RuntimeError:
            everyone.append(None)
            wait = timedelta(seconds=1)
        else:
            everyone.append(json.loads(store.get(key)))
    if all(found is not None and found["call"] == mine["call"] for found in everyone):
        return
    lines = [f"process {rank}: {_shown(found, store, rank)}" for rank, found in enumerate(everyone)]
    raise RankError(
        f"the processes do not make the same call: {call}",
        found="; ".join(lines),
        fix="call it on every process, outside of `if accelerator.is_main_process`, with tensors of one shape and "
        "dtype (pad_across_processes makes lengths equal)",
    )


def _shown(found: dict[str, str] | None, store: Any, rank: int) -> str:
    if found is not None:
        return f"{found['call']} at {found['at']}"
    last = f"trainer_kit/last/{rank}"
    if not store.check([last]):
        return "has made no call"
    before = json.loads(store.get(last))
    return f"has not come; its last call was {before['call']} at {before['at']}"


def _where() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_HERE) or "contextlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
