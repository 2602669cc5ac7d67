"""`OnExceptionCheckpoint` and `Preemption`: leave a run with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.location import Location, absolute
from trainer_kit.core.protocols import ModuleLike, TrainerLike

__all__ = ["OnExceptionCheckpoint", "Preemption"]


@final
class _Request:
    """A checkpoint with its own path."""

    weights_only = False

    def __init__(self, reason: str, path: Location) -> None:
        self.reason, self.path = reason, path

    def saved(self, path: Location) -> None:
        """Nothing is kept about it."""


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
        self.dirpath, self.filename = dirpath, filename

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
        one = isinstance(sources, (str, os.PathLike, signal.Signals))
        self.sources: list[Any] = [sources] if one else list(sources)  # type: ignore[arg-type]
        if not self.sources or every <= 0:
            raise ConfigurationError(
                "Preemption needs at least one source, and a positive interval in seconds",
                found=f"sources={self.sources}, every={every}",
                fix='Preemption("slurm"), Preemption("/run/preempted"), Preemption("http://…")',
            )
        self.every, self.margin, self.headers = every, margin, dict(headers or {})
        known = (signal.SIGTERM, signal.SIGINT, _USR1)  # every run listens to them
        self._signals = [
            found
            for found in map(_signal, self.sources)
            if found is not None and found not in known
        ]
        self._looks = [
            look for look in map(self._look, self.sources) if look is not None
        ]
        self._before: dict[signal.Signals, Any] = {}
        self._over, self._fired = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self.reason: str | None = None
        """What fired, or None."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Locks and threads cannot be pickled; a copy makes its own.
        public = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_")
        }
        return type(self), (self.sources, self.every, self.margin, self.headers), public

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self.reason, self._fired = None, threading.Lock()

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        for number in (
            self._signals
            if threading.current_thread() is threading.main_thread()
            else ()
        ):
            if signal.getsignal(number) is not None:  # it could not be put back
                self._before[number] = signal.signal(number, self._on_signal)

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._looks and trainer.is_global_zero:  # from here on a signal saves first
            self._over.clear()
            self._thread = threading.Thread(
                target=self._watch,
                args=(trainer.print,),
                name="preemption",
                daemon=True,
            )
            self._thread.start()

    def teardown(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._over.set()
        self._fired.acquire(
            blocking=False
        )  # a thread that still waits for an answer sends nothing
        if self._thread is not None:
            self._thread.join(timeout=self.every)
            self._thread = None
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._is_first(signal.Signals(number).name):
            signal.raise_signal(signal.SIGTERM)

    def _is_first(self, reason: str) -> bool:
        """Note the first source that fires; a signal of the second would end the run without waiting for its save."""
        if not self._fired.acquire(blocking=False):
            return False
        self.reason = reason
        return True

    def _watch(self, say: Callable[..., None]) -> None:
        while True:
            for look, number in self._looks:
                reason = look()
                if reason is None:
                    continue
                if self._is_first(reason):
                    say(f"preemption: {reason}")
                    os.kill(os.getpid(), number)  # its handler runs in the main thread
                return
            if self._over.wait(self.every):
                return

    def _look(self, source: Any) -> tuple[Callable[[], str | None], int] | None:
        if _signal(source) is not None:
            return None
        if source == "slurm":
            end = _end_of_job()
            return None if end is None else (lambda: self._near(end), _USR1)
        if str(source).startswith(("http://", "https://")):
            return (lambda: self._answer(str(source))), signal.SIGTERM
        path = Path(source)
        return (lambda: f"{path} exists" if path.exists() else None), signal.SIGTERM

    def _near(self, end: float) -> str | None:
        left = end - time.time()
        return (
            f"the time limit of the SLURM job is in {left:.0f} s"
            if left <= self.margin
            else None
        )

    def _answer(self, url: str) -> str | None:
        request = urllib.request.Request(url, headers=self.headers)
        try:
            with urllib.request.urlopen(
                request, timeout=min(self.every, 5.0)
            ) as answer:
                text = answer.read(10_000).decode(errors="replace").strip()
        except (
            OSError,
            ValueError,
        ):  # an HTTP error too: nothing is planned, or the service is not there
            return None
        return (
            None
            if text.lower() in _NO
            else f"{url.partition('?')[0]} answers {text[:100]!r}"
        )


_USR1: Final = getattr(signal, "SIGUSR1", signal.SIGTERM)


def _signal(source: Any) -> signal.Signals | None:
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


def _end_of_job() -> float | None:
    """When the SLURM job ends, in seconds since 1970; None outside of SLURM."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if "SLURM_JOB_ID" in os.environ and not end.isdigit():
        raise ConfigurationError(
            "SLURM does not provide the end time of the job",
            found=f"SLURM_JOB_END_TIME={end!r}",
            fix="use sbatch --signal=USR1@120: every run listens to SIGUSR1",
        )
    return float(end) if end.isdigit() else None
