"""Start several processes from a notebook or a REPL."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from trainer_kit.core.environment import available_devices, patch_environment
from trainer_kit.core.errors import ConfigurationError, LaunchError
from trainer_kit.core.types import Function
from trainer_kit.launch import run_forked
from trainer_kit.launch.failure import RankFailure

__all__ = ["debug_launcher", "notebook_launcher"]

_T = TypeVar("_T")

_ELASTIC_OPTIONS: Final = {
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_conf",
    "rdzv_id",
    "monitor_interval",
    "log_line_prefix_template",
}


def notebook_launcher(
    function: Function,
    args: Sequence[object] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    max_restarts: int = 0,
    **elastic: object,
) -> Any:
    """Call ``function(*args)`` on several forked processes of this machine, from a notebook or a REPL.

    Args:
        function: the function that each process calls.
        args: its arguments.
        num_processes: by default one per device.
        mixed_precision: "no", "fp16" or "bf16", for Accelerators in ``function`` without a ``mixed_precision``.
        use_port: accepted; a free port is chosen.
        master_addr: accepted.
        node_rank: accepted.
        num_nodes: only 1: use ``torchrun`` for several machines.
        max_restarts: how often all processes are restarted after one of them failed; a single process is not restarted.
        elastic: Accelerate's other options (``rdzv_backend``, ``rdzv_endpoint``, ``rdzv_conf``, ``rdzv_id``,
            ``monitor_interval``, ``log_line_prefix_template``): accepted.

    Returns:
        The return value of the main process.

    Raises:
        ConfigurationError: ``num_nodes`` is not 1, or ``max_restarts`` is negative.
        TypeError: an option is unknown.
        LaunchError: processes cannot be forked here: an accelerator is in use, bitsandbytes was imported, or this
            process is in a process group.
        ChildFailedError: a process failed. The exception is also of the class that the process raised, with its text
            and traceback.

    Example:
        >>> from trainer_kit import Accelerator, notebook_launcher
        >>> def train(lr):
        ...     accelerator = Accelerator(cpu=True)
        ...     return f"lr {lr}, process {accelerator.process_index} of {accelerator.num_processes}"
        >>> notebook_launcher(train, args=(0.1,), num_processes=1)
        'lr 0.1, process 0 of 1'
    """
    unknown = elastic.keys() - _ELASTIC_OPTIONS
    if unknown:
        raise TypeError(
            f"notebook_launcher got an unexpected argument {min(unknown)!r}"
        )
    if max_restarts < 0:
        raise ConfigurationError(
            "max_restarts must be 0 or more", found=f"max_restarts={max_restarts}"
        )
    if num_nodes != 1:
        raise ConfigurationError(
            "a notebook starts processes on its own machine only",
            found=f"num_nodes={num_nodes}",
            fix="move the code into a script, and start it with torchrun on each machine",
        )
    processes = num_processes or available_devices("auto")
    name = getattr(function, "__qualname__", type(function).__name__)

    def as_child_failure(
        error: BaseException, failures: Sequence[RankFailure]
    ) -> BaseException:
        return _as_child_failure(error, failures, name)

    def run() -> object:
        return run_forked(
            lambda rank: function(*args), processes, failed=as_child_failure
        )

    environment = {}
    if mixed_precision != "no":
        environment["TRAINER_KIT_MIXED_PRECISION"] = str(mixed_precision)
    if processes > 1:
        # Accelerate's name: its PartialState and programs for notebooks read it.
        environment["FORK_LAUNCHED"] = "1"
    with patch_environment(**environment):
        # One process runs in the notebook itself, where it may use a device afterwards.
        if processes > 1:
            _check_imports()
            return _run_with_restarts(run, max_restarts)
        if max_restarts:
            warnings.warn(
                f"max_restarts={max_restarts}: one process runs in the notebook itself, and is not started again",
                stacklevel=2,
            )
        return function(*args)


def _check_imports() -> None:
    if "bitsandbytes" in sys.modules:
        raise LaunchError(
            "processes cannot be forked after an import that uses the device",
            found="bitsandbytes was imported in this process",
            fix="restart the notebook's kernel. Please keep these imports inside the function that is launched",
        )


def _as_child_failure(
    error: BaseException, failures: Sequence[RankFailure], name: str
) -> BaseException:
    """Make an exception of a process an instance of torch's class, too, for code that catches what Accelerate raises.

    Args:
        error: the exception of the process that failed first.
        failures: how the processes ended.
        name: the function that they called.

    Returns:
        The exception; ``error`` itself where Python cannot combine the classes.
    """
    # KeyboardInterrupt and SystemExit keep their class: code that catches Exception must not catch them.
    if not isinstance(error, Exception) or isinstance(error, ChildFailedError):
        return error
    process_failures = {each.rank: _process_failure(each) for each in failures}
    # A user's class decides how it is made, and may fail in any way.
    try:
        combined = _combine_classes(error)
    except Exception:
        return error
    vars(combined).update(vars(error), name=name, failures=process_failures)
    return combined if str(combined) == str(error) else error


def _process_failure(failure: RankFailure) -> ProcessFailure:
    process_failure = ProcessFailure(
        failure.rank, failure.pid, failure.exit_code or 1, error_file="<N/A>"
    )
    process_failure.message = failure.cause
    process_failure.timestamp = int(failure.time_ns // 1_000_000_000)
    return process_failure


def _combine_classes(error: Exception) -> Exception:
    """Return a copy of an exception that is of torch's class too."""
    kind = type(error)
    arguments: Any = error.args
    if isinstance(error, OSError):
        # Its args have no file name.
        arguments = error.__reduce__()[1]
    namespace = {"__module__": kind.__module__}
    combined_class: Any = type(kind.__name__, (kind, ChildFailedError), namespace)
    combined: Exception = combined_class.__new__(combined_class, *arguments)
    if kind.__module__ == "builtins":
        # SyntaxError and others keep what they show outside of their attributes.
        kind.__init__(combined, *arguments)
    return combined


def _run_with_restarts(run: Callable[[], _T], restarts: int) -> _T:
    for restart in range(1, restarts + 1):
        try:
            return run()
        except LaunchError:
            # Nothing was started.
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            action = f"starting all processes again (restart {restart} of {restarts})"
            warnings.warn(f"{type(error).__name__}: {reason}; {action}", stacklevel=3)
    return run()


def debug_launcher(
    function: Function, args: Sequence[object] = (), num_processes: int = 2
) -> None:
    """Call ``function(*args)`` on several processes of this machine, on the CPU.

    Args:
        function: its result is discarded.
        args: its positional arguments. Processes are forked, so neither has to be picklable.
        num_processes: the number of processes.

    Raises:
        LaunchError: processes cannot be forked here: an accelerator is in use, or this process is in a process group.
        RankError: a process died.
        BaseException: of the process that failed first, with its traceback as a note.

    Example:
        >>> import torch
        >>> from trainer_kit import Accelerator, debug_launcher
        >>> def check():
        ...     accelerator = Accelerator()
        ...     ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
        ...     assert ranks.tolist() == [0, 1]
        >>> debug_launcher(check, num_processes=2)
    """

    def run(rank: int) -> None:
        function(*args)

    with patch_environment(TRAINER_KIT_USE_CPU="1", FORK_LAUNCHED="1"):
        run_forked(run, num_processes)
