"""`run_distributed`: a function on several gloo ranks, whose processes fork from a server that has torch loaded."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, final

from trainer_kit.core.display import plural
from trainer_kit.core.errors import LaunchError, RankError
from trainer_kit.core.torch_private import COMPILER
from trainer_kit.core.types import Function
from trainer_kit.launch.processes import Ranks, local_environment

__all__ = ["run_distributed"]

_Result = TypeVar("_Result")
_WarningFilter: TypeAlias = tuple[Any, ...]
"""The arguments of ``warnings.filterwarnings``."""

# Imported once by the server, from which each rank forks: a rank then starts in milliseconds and not in seconds.
_PRELOAD: Final = [
    "torch",
    "numpy",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    # DistributedDataParallel imports it.
    COMPILER,
    "torch.utils.data",
    "trainer_kit.strategies.ddp",
    "trainer_kit.testing.distributed",
    "trainer_kit.trainer",
]
_PRELOAD_WHERE_USED: Final = (
    "pytest",
    "torch.utils.tensorboard",
    "torchdata.stateful_dataloader",
    "torchmetrics",
)
"""The server loads these if this process has loaded them: the functions on the ranks may need them too."""
_START_TIME: Final = 60.0
"""Seconds that the ranks have to start: on a busy machine, importing and meeting takes longer than a short timeout."""
# A signal with no other use.
# SIGUSR1 and SIGUSR2 belong to SLURM's preemption and to the user; macOS has no real-time signals.
_DUMP: Final[int] = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
_RANK_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def run_distributed(
    fn: Callable[..., _Result],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    process_group: bool = True,
    **kwargs: Any,
) -> list[_Result]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` gloo ranks of this machine, and wait for all of them.

    Every rank is a new process with one compute thread, the environment variables of torchrun, and the environment,
    working directory and warning filters of this process (warnings that are errors here are errors there). All ranks
    have exited when this returns.

    Args:
        fn: a function at the top level of a module.
        world_size: number of ranks.
        args: picklable arguments of ``fn``.
        timeout: seconds after which the run fails, counted from when all ranks call ``fn``. To start they have 60 more.
        process_group: initialize the gloo process group before ``fn`` is called.
        kwargs: picklable arguments of ``fn``.

    Returns:
        The results in rank order.

    Raises:
        BaseException: of the rank that failed first, with that rank's traceback as a note.
        RankError: a rank died, or ranks did not finish in time; then with the stacks of all unfinished ranks.
        LaunchError: when ``fn`` or an argument cannot be pickled.

    Example:
        >>> import operator
        >>> run_distributed(operator.add, 2, 20, 1)
        [21, 21]
    """
    if world_size < 1:
        raise LaunchError(
            "at least one rank is needed", found=f"world_size={world_size}"
        )
    # forkserver: the ranks fork from a clean server process without threads.
    context = multiprocessing.get_context("forkserver")
    preloaded = list(_PRELOAD)
    for name in _PRELOAD_WHERE_USED:
        if name in sys.modules:
            preloaded.append(name)
    context.set_forkserver_preload(preloaded)
    # This process may be a rank itself; those that it starts are ranks of another world.
    environ = dict(os.environ)
    for name in _RANK_VARIABLES:
        environ.pop(name, None)
    with tempfile.TemporaryDirectory(
        prefix="trainer_kit-", ignore_cleanup_errors=True
    ) as directory:
        call = _Call(
            directory=directory,
            # As bytes, so that a rank unpickles it after it has set the environment, directory and filters.
            call=_pickled(fn, args, kwargs),
            process_group=process_group,
            timeout=timeout,
            environ=environ,
            working_directory=os.getcwd(),
            filters=[_filter(entry) for entry in warnings.filters],
        )
        ranks = Ranks(context, world_size, call, local_environment(world_size))
        try:
            _wait_for_calls(ranks, Path(directory))
            # A failed rank's own error says more than that the others still wait for it.
            if not ranks.wait(timeout) and not ranks.failures:
                raise RankError(
                    f"{len(ranks.running)} of {plural(world_size, 'rank')} did not finish within {timeout:g} s",
                    found=_stacks(ranks.running, Path(directory)),
                    disagree=False,
                )
            return ranks.results()
        # Also after Ctrl-C: no rank outlives the test.
        finally:
            ranks.close()


def _wait_for_calls(ranks: Ranks, directory: Path) -> None:
    """Return when all ranks call the function, when one has failed, or when the time to start is over."""
    marks = [directory / f"called-{rank}" for rank in range(ranks.nproc)]
    deadline = time.monotonic() + _START_TIME
    while time.monotonic() < deadline:
        # Short, since each test of several ranks waits here.
        all_done = ranks.wait(timeout=0.02)
        if all_done or ranks.failures or all(mark.exists() for mark in marks):
            return


def _pickled(
    fn: Function, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bytes:
    try:
        # Here and not by multiprocessing, whose error would name a thread of its own.
        return pickle.dumps((fn, args, dict(kwargs)))
    except Exception as error:
        raise LaunchError(
            "the function and its arguments must be picklable",
            found=f"{type(error).__name__}: {error}",
            fix="define the function at the top of a module, and pass plain values",
        ) from None


def _filter(entry: tuple[Any, ...]) -> _WarningFilter:
    """An entry of ``warnings.filters`` as arguments of ``warnings.filterwarnings``."""
    action, message, category, module, line = entry
    return action, _pattern(message), category, _pattern(module), line


def _pattern(text: str | re.Pattern[str] | None) -> str:
    """The pattern of a filter: Python holds it compiled, as text, or as None for any."""
    if text is None:
        return ""
    if isinstance(text, str):
        return text
    return text.pattern


@final
@dataclass
class _Call:
    """The call in the process of a rank."""

    directory: str
    call: bytes
    process_group: bool
    timeout: float
    environ: dict[str, str]
    working_directory: str
    filters: list[_WarningFilter]

    def __call__(self, rank: int) -> object:
        # The server's environment is that of its start; only what the launcher has set for this rank is kept of it.
        variables = {}
        for name in (*_RANK_VARIABLES, "GLOO_SOCKET_IFNAME"):
            if name in os.environ:
                variables[name] = os.environ[name]
        os.environ.clear()
        os.environ.update({**self.environ, **variables})
        os.chdir(self.working_directory)
        # After the environment: torch and OpenMP read some variables at their import.
        import torch

        # Keep the garbage collector from touching, and so copying, the pages of the server.
        gc.freeze()
        # As torchrun does: ranks that each use all cores are slower together.
        torch.set_num_threads(1)
        # Loader workers start as in a normal process, not from the forkserver, which would import everything again.
        multiprocessing.set_start_method(None, force=True)
        with (
            open(Path(self.directory, f"stack-{rank}"), "w", encoding="utf-8") as stack,
            warnings.catch_warnings(),
        ):
            faulthandler.register(_DUMP, stack, all_threads=True)
            warnings.resetwarnings()
            # Each filter is inserted before the previous one.
            for entry in reversed(self.filters):
                warnings.filterwarnings(*entry)
            try:
                if self.process_group:
                    self._join(rank)
                fn, args, kwargs = pickle.loads(self.call)
                # From here on the time of the test counts, and not that of its start.
                Path(self.directory, f"called-{rank}").touch()
                return fn(*args, **kwargs)
            finally:
                # Before the file is closed: its descriptor may be used again.
                faulthandler.unregister(_DUMP)
                _leave()

    def _join(self, rank: int) -> None:
        import torch.distributed as dist

        path = str(Path(self.directory, "store"))
        # A file needs no free port. torch exports the class only where it is built with distributed.
        store = dist.FileStore(path, int(os.environ["WORLD_SIZE"]))  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            # The launching process ends a collective that waits longer than `timeout`, and shows every stack.
            timeout=timedelta(seconds=max(self.timeout, _START_TIME)),
        )
        # A rank whose function calls no collective could leave while another one still connects to it.
        dist.barrier()


def _leave() -> None:
    import torch.distributed as dist

    # During an exception the other ranks may wait in a collective: the exit of this process ends their wait.
    if dist.is_initialized() and sys.exc_info()[0] is None:
        dist.destroy_process_group()


def _stacks(running: Mapping[int, int], directory: Path) -> str:
    """The stacks of each running rank, dumped by its fault handler."""
    # All first, so that the stacks are of the same moment.
    for pid in running.values():
        os.kill(pid, _DUMP)
    deadline = time.monotonic() + 2.0
    files = {rank: directory / f"stack-{rank}" for rank in running}

    def complete(path: Path) -> bool:
        if not path.exists():
            return False
        return "most recent call first" in path.read_text(encoding="utf-8")

    while time.monotonic() < deadline and not all(map(complete, files.values())):
        time.sleep(0.05)
    # Let the last lines of a stack arrive.
    time.sleep(0.05)
    stacks = []
    for rank, path in files.items():
        name = f"rank {rank} (pid {running[rank]})"
        if complete(path):
            text = path.read_text(encoding="utf-8").rstrip()
            stacks.append(f"{name}:\n{text}")
        else:
            stacks.append(f"{name} does not answer")
    return "\n".join(stacks)
