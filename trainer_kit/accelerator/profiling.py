"""Profile a part of a custom training loop with ``torch.profiler``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_kit.options.records import ProfileKwargs

if TYPE_CHECKING:
    from torch.profiler import profile

__all__ = ["profiling"]


@contextmanager
def profiling(handler: ProfileKwargs, rank: int) -> Iterator[profile]:
    """Run a ``torch.profiler.profile``; with ``output_trace_dir`` write the trace of this process there.

    Args:
        handler: the options of the profile.
        rank: the number in the name of the trace.
    """
    # Here, because the import takes time that only scripts with a profile should spend.
    from torch import profiler

    with profiler.profile(
        activities=handler.torch_activities(),
        schedule=handler.torch_schedule(),
        on_trace_ready=handler.on_trace_ready,
        record_shapes=handler.record_shapes,
        profile_memory=handler.profile_memory,
        with_stack=handler.with_stack,
        with_flops=handler.with_flops,
        with_modules=handler.with_modules,
    ) as profile:
        yield profile
    # After an error there is no trace: the block may have ended in the middle of a recorded step.
    if handler.output_trace_dir is None:
        return
    directory = Path(os.path.expanduser(handler.output_trace_dir))
    directory.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(directory / f"profile_{rank}.json"))
