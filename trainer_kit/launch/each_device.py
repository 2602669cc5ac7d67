"""``python -m trainer_kit.launch.each_device script ...``: run the script in one process per torch_xla device."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer_kit.core.configuration_sources import variable
from trainer_kit.core.display import plural
from trainer_kit.core.errors import LaunchError
from trainer_kit.launch.bootstrap import run_words

__all__ = ["main"]


def main(words: Sequence[str]) -> None:
    """Start the processes, and wait for them.

    Args:
        words: a script, or ``-m`` and a module, and its arguments.
    """
    import torch_xla

    torch_xla.launch(_run, args=(list(words),))


def _run(index: int, words: list[str]) -> None:
    """Run the script, in a process that torch_xla has started."""
    import torch_xla.runtime as xr

    wanted = variable("num_processes")
    if wanted is not None and int(wanted.value) != xr.world_size():
        raise LaunchError(
            "torch_xla starts a process for each device",
            found=f"{plural(xr.world_size(), 'device')}, num_processes={wanted.value} ({wanted.origin})",
            fix=f"set num_processes: {xr.world_size()}, or 1 for one process that drives all of them",
        )
    # Code in the script may read the variables that other launchers set.
    variables = {
        "RANK": xr.global_ordinal(),
        "WORLD_SIZE": xr.world_size(),
        "LOCAL_RANK": xr.local_ordinal(),
        "LOCAL_WORLD_SIZE": xr.local_process_count(),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    run_words(words)


if __name__ == "__main__":
    main(sys.argv[1:])
