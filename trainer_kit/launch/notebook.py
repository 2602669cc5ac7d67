"""Ranks for notebooks and interactive sessions, where there is no program to run again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar, final

import torch

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import LaunchError
from trainer_kit.launch.processes import Ranks, local_environment

__all__ = ["run_forked"]

_Result = TypeVar("_Result")
_StartMethod = Literal["auto", "fork", "forkserver", "spawn"]


def run_forked(fn: Callable[[int], _Result], nproc: int, start_method: _StartMethod = "auto") -> _Result:
    """Run ``fn(rank)`` on ``nproc`` processes of this machine, with the rank environment set, and wait for them.

    Forked ranks see everything of this process, closures and notebook cells included, and compute with one thread:
    the OpenMP threads of this process do not survive a fork, and waiting for them would hang.

    Args:
        fn: called on every rank; what rank 0 returns must be picklable.
        nproc: number of ranks.
        start_method: ``auto`` forks. ``spawn`` and ``forkserver`` start afresh and need a picklable ``fn``.

    Returns:
        What rank 0 returned.

    Raises:
        LaunchError: when a fork cannot work because the accelerator is in use here, or ``fn`` cannot be pickled.
        RankError: when a rank died.
        BaseException: of the rank that failed first, with that rank's traceback as a note.

    Example:
        >>> factor = 20
        >>> run_forked(lambda rank: factor + rank, 2)
        20
    """
    here = Environment.detect()
    if here.launched:
        raise LaunchError("a rank does not start ranks", found=f"rank {here.rank} of {here.world_size} ({here.source})")
    if nproc < 1:
        raise LaunchError("at least one rank is needed", found=f"nproc={nproc}")
    method = "fork" if start_method == "auto" else start_method
    if method not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            f"this system cannot start processes by {method}", fix="put the code in a script: python train.py"
        )
    if method == "fork":
        _check_fork()
    else:
        _check_picklable(fn, method)
    with warnings.catch_warnings():
        # From 3.12 on Python warns of forking beside threads; what that endangers here is avoided above.
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        ranks = Ranks(
            multiprocessing.get_context(method), nproc, _Target(fn, method == "fork"), local_environment(nproc)
        )
    try:
        ranks.wait()
        return ranks.results()[0]  # type: ignore[no-any-return]
    finally:
        ranks.close()


@final
class _Target:
    """``fn`` in its process."""

    def __init__(self, fn: Callable[[int], Any], forked: bool) -> None:
        self.fn, self.forked = fn, forked

    def __call__(self, rank: int) -> Any:
        if self.forked:
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        result = self.fn(rank)
        return result if rank == 0 else None


def _check_fork() -> None:
    device = torch.accelerator.current_accelerator()
    if device is None:
        return
    initialised = getattr(torch.get_device_module(device), "is_initialized", None)
    if initialised is not None and initialised():
        raise LaunchError(
            "ranks cannot be forked any more",
            found=f"this process has used the {device.type} device, which does not survive a fork",
            fix="restart the notebook's kernel and start training before anything else touches the device",
        )


def _check_picklable(fn: Callable[[int], Any], method: str) -> None:
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise LaunchError(
            f"the function cannot be sent to a process started by {method}",
            found=f"{type(error).__name__}: {error}",
            fix='define it at the top of a module, or use start_method="fork"',
        ) from None
