"""`OnExceptionCheckpoint` and `Preemption`: leave a run with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.location import Location, absolute
from trainer_kit.core.protocols import ModuleLike, TrainerLike

__all__ = ["OnExceptionCheckpoint", "Preemption"]

_Source = str | os.PathLike[str] | signal.Signals


@final
class _Request:
    """A checkpoint with its own path."""

    weights_only = False

    def __init__(self, reason: str, path: Location) -> None:
        self.reason = reason
        self.path = path

    def saved(self, path: Location) -> None:
        """Nothing is recorded about it."""


@final
class OnExceptionCheckpoint(Callback):
    """Save a checkpoint when an exception ends the run, Ctrl-C included.

    It holds the state after the last complete step; ``fit(ckpt_path=...)`` continues from it. Nothing is saved after a
    loss that is not finite, and not with several ranks, since the others may have ended.

    Args:
        dirpath: the directory of the checkpoint, a path or a URL that fsspec knows.
        filename: its name; an existing one is replaced.

    Example:
        >>> OnExceptionCheckpoint("runs/mine").ckpt_path.name
        'on_exception'
    """

    def __init__(
        self, dirpath: str | os.PathLike[str], filename: str = "on_exception"
    ) -> None:
        if not filename or Path(filename).name != filename:
            raise ConfigurationError(
                "filename must name a single directory",
                found=repr(filename),
                fix="pass the parent folder as dirpath",
            )
        self.dirpath = dirpath
        self.filename = filename

    @property
    def ckpt_path(self) -> Location:
        """Where the checkpoint is written."""
        return absolute(self.dirpath) / self.filename

    def on_exception(
        self, trainer: TrainerLike, pl_module: ModuleLike, exception: BaseException
    ) -> None:
        if not trainer.sanity_checking:
            reason = f"{type(exception).__name__}: {exception}"
            trainer.request_checkpoint(reason, _Request(reason, self.ckpt_path))


_NO: Final = frozenset(("", "false", "none", "null", "0", "[]", "{}"))
"""Answers of a metadata service that mean that nothing is planned."""


@final
class Preemption(Callback):
    """Save a checkpoint and leave in order when the machine is about to be taken away.

    SIGTERM and SIGUSR1 do that in every run. This callback adds sources that a background thread of rank 0 looks at, so
    no step waits for them. When one of them fires, the process gets SIGTERM (SIGUSR1 from ``"slurm"``, which asks for
    the job to run again): all ranks agree on the step, save, and leave with exit code 128 + the signal's number.

    Args:
        sources: any of a signal (``signal.SIGUSR2``, ``"SIGUSR2"``; SIGTERM, SIGINT and SIGUSR1 keep their meaning of
            every run); ``"slurm"``: the time limit of the job, from
            ``SLURM_JOB_END_TIME``; a URL that starts with ``http``: it answers with something else than an error,
            nothing, ``FALSE``, ``NONE``, ``null`` or an empty list; anything else is the path of a file that appears.
        every: seconds between two looks.
        margin: seconds before the time limit of the job at which ``"slurm"`` fires.
        headers: of requests to a URL, such as ``{"Metadata-Flavor": "Google"}``.

    Raises:
        ConfigurationError: without a source, for an unknown signal, ``every`` that is not positive, and for
            ``"slurm"`` in a job that has no ``SLURM_JOB_END_TIME`` (outside of SLURM it never fires).

    Example:
        >>> leaving = Preemption(["slurm", "/run/preempted"], margin=300)
        >>> leaving.reason is None
        True
    """

    def __init__(
        self,
        sources: str
        | os.PathLike[str]
        | signal.Signals
        | Iterable[str | os.PathLike[str] | signal.Signals],
        every: float = 5.0,
        margin: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(sources, (str, os.PathLike, signal.Signals)):
            sources = [sources]
        self.sources: list[_Source] = list(sources)
        if not self.sources or every <= 0:
            raise ConfigurationError(
                "Preemption needs at least one source, and a positive interval in seconds",
                found=f"sources={self.sources}, every={every}",
                fix='Preemption("slurm"), Preemption("/run/preempted"), Preemption("http://…")',
            )
        self.every = every
        self.margin = margin
        self.headers = dict(headers or {})
        self._signals: list[signal.Signals] = []
        # Functions that return a reason to leave or None, each with the signal that the process gets then.
        self._checks: list[tuple[Callable[[], str | None], int]] = []
        for source in self.sources:
            self._add_source(source)
        # The handlers that the signals had before the fit.
        self._handlers_before: dict[signal.Signals, Any] = {}
        self._is_over = threading.Event()
        # Taken by the first source that fires.
        self._first_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.reason: str | None = None
        """What fired, or None."""

    def _add_source(self, source: _Source) -> None:
        number = _parse_signal(source)
        if number is not None:
            # Every run listens to these three.
            if number not in (signal.SIGTERM, signal.SIGINT, _USR1):
                self._signals.append(number)
        elif source == "slurm":
            end_time = _read_job_end_time()
            if end_time is not None:
                check = partial(self._check_time_limit, end_time)
                self._checks.append((check, _USR1))
        elif str(source).startswith(("http://", "https://")):
            check = partial(self._check_url, str(source))
            self._checks.append((check, signal.SIGTERM))
        elif not isinstance(source, signal.Signals):
            check = partial(_check_file, Path(source))
            self._checks.append((check, signal.SIGTERM))

    def __reduce__(self) -> tuple[Any, ...]:
        # Locks and threads cannot be pickled; a copy makes its own.
        public = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_")
        }
        arguments = (self.sources, self.every, self.margin, self.headers)
        return type(self), arguments, public

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self.reason = None
        self._first_lock = threading.Lock()

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        # Python allows handlers in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._signals:
            # None: a handler that Python did not install, and could not restore.
            if signal.getsignal(number) is not None:
                handler = signal.signal(number, self._on_signal)
                self._handlers_before[number] = handler

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        # From here on a signal saves first.
        if self._checks and trainer.is_global_zero:
            self._is_over.clear()
            self._thread = threading.Thread(
                target=self._watch,
                args=(trainer.print,),
                name="preemption",
                daemon=True,
            )
            self._thread.start()

    def teardown(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._is_over.set()
        # A thread that still waits for an answer sends nothing.
        self._first_lock.acquire(blocking=False)
        if self._thread is not None:
            self._thread.join(timeout=self.every)
            self._thread = None
        while self._handlers_before:
            number, handler = self._handlers_before.popitem()
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._is_first(signal.Signals(number).name):
            signal.raise_signal(signal.SIGTERM)

    def _is_first(self, reason: str) -> bool:
        """Note the first source that fires; a signal of the second would end the run without waiting for its save."""
        if not self._first_lock.acquire(blocking=False):
            return False
        self.reason = reason
        return True

    def _watch(self, print_line: Callable[..., None]) -> None:
        while True:
            for check, number in self._checks:
                reason = check()
                if reason is None:
                    continue
                if self._is_first(reason):
                    print_line(f"preemption: {reason}")
                    os.kill(os.getpid(), number)  # its handler runs in the main thread
                return
            if self._is_over.wait(self.every):
                return

    def _check_time_limit(self, end_time: float) -> str | None:
        seconds = end_time - time.time()
        if seconds > self.margin:
            return None
        return f"the time limit of the SLURM job is in {seconds:.0f} s"

    def _check_url(self, url: str) -> str | None:
        request = urllib.request.Request(url, headers=self.headers)
        timeout = min(self.every, 5.0)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                content = response.read(10_000)
        except (OSError, ValueError):
            # An HTTP error too: nothing is planned, or the service is not there.
            return None
        text = content.decode(errors="replace").strip()
        if text.lower() in _NO:
            return None
        # The query may hold a token.
        address, _, _ = url.partition("?")
        return f"{address} answers {text[:100]!r}"


def _check_file(path: Path) -> str | None:
    if not path.exists():
        return None
    return f"{path} exists"


_USR1: Final = getattr(signal, "SIGUSR1", signal.SIGTERM)


def _parse_signal(source: _Source) -> signal.Signals | None:
    if isinstance(source, signal.Signals):
        return source
    name = str(source)
    if not name.startswith("SIG") or not name.isupper():
        return None
    if name not in signal.Signals.__members__:
        raise ConfigurationError(
            "unknown signal",
            found=name,
            fix=did_you_mean(name, list(signal.Signals.__members__)),
        )
    return signal.Signals[name]


def _read_job_end_time() -> float | None:
    """When the SLURM job ends, in seconds since 1970; None outside of SLURM."""
    end_time = os.environ.get("SLURM_JOB_END_TIME", "")
    if end_time.isdigit():
        return float(end_time)
    if "SLURM_JOB_ID" in os.environ:
        raise ConfigurationError(
            "SLURM does not provide the end time of the job",
            found=f"SLURM_JOB_END_TIME={end_time!r}",
            fix="use sbatch --signal=USR1@120: every run listens to SIGUSR1",
        )
    return None
