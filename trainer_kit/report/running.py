"""`RunReport`: records the events of a run, and writes its ``report.html`` while it runs and when it ends."""

from __future__ import annotations

import inspect
import secrets
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, final

from trainer_kit.checkpoint.read import read_info, step_of
from trainer_kit.core.location import is_url
from trainer_kit.launch.program import arguments, script
from trainer_kit.loggers.layout import flatten, params_dict, plain
from trainer_kit.report.collect import JOURNAL, RunDirectory
from trainer_kit.report.environment import describe_environment
from trainer_kit.report.events import append_event
from trainer_kit.report.page import REPORT, write_report
from trainer_kit.training.explain import explain_running
from trainer_kit.training.session import Session
from trainer_kit.training.settings import plain_arguments

__all__ = ["RunReport"]

_FIRST = 30.0  # seconds until the first page of a fit
_EVERY: Final = 120.0  # and between two
_SHARE: Final = 0.02  # of the time, at most, goes into pages
_MOST_LINES: Final = 1000  # of warnings and notes of one fit
_LONGEST: Final = 20_000  # characters of a traceback


@final
class RunReport:
    """Writes ``events.jsonl`` and ``report.html`` into the directory of each run that has a logger, on rank 0.

    The page is written when the entry point has ended, after its loggers, also by an exception; of a fit every two
    minutes too, by a thread that pauses between a thousand lines of the journal. No error of it ends a run: it is
    printed once.

    Args:
        trainer: that runs the entry point in the ``with`` block.
        stage: fit, validate or test.
    """

    def __init__(self, trainer: Session, stage: str) -> None:
        self._trainer, self._stage = trainer, stage
        self._run: RunDirectory | None = None
        self._waiting: list[tuple[str, str]] = []
        self._lines = 0
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._outer_note: Callable[[str, str], Any] = trainer.note
        self._outer_show: Any = None

    def __enter__(self) -> RunReport:
        self._trainer.note = self.note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._trainer.note = self._outer_note
        if self._run is not None:
            self._end(self._run, error)

    def begin(self, module: Any) -> None:
        """Record the start and the configuration of an entry point whose parts are composed."""
        trainer = self._trainer
        if not trainer.files.loggers or not trainer.is_global_zero:
            return
        self._run = RunDirectory(trainer.files.directory)
        try:
            self._append("start", **self._facts(module))
        except Exception as error:
            self._failed(error)
        for kind, text in self._waiting:
            self.note(kind, text)
        # Python documents that showwarning may be replaced; the one before still shows each warning.
        self._outer_show, warnings.showwarning = warnings.showwarning, self._show_warning
        if self._stage == "fit":
            self._thread = threading.Thread(target=self._write_now_and_then, name="trainer_kit report", daemon=True)
            self._thread.start()

    def note(self, kind: str, text: str) -> None:
        """Record a line about the run; before the entry point has begun, it is kept until then.

        Args:
            kind: note, warning, or checkpoint, whose text is a path.
            text: the line.
        """
        if self._run is None:
            self._waiting.append((kind, text))
            return
        self._lines += 1
        if self._lines > _MOST_LINES:
            return
        step = self._trainer.progress.step
        try:
            if kind == "checkpoint" and not is_url(text):
                step = step_of(read_info(text)) or step  # it was saved in the background
            self._append(kind, step=step, text=text)
        except Exception as error:
            self._failed(error)

    def _append(self, kind: str, step: int | None = None, **facts: Any) -> None:
        assert self._run is not None
        append_event(self._run.directory, kind, self._trainer.progress.step if step is None else step, **facts)

    def _facts(self, module: Any) -> dict[str, Any]:
        trainer, files = self._trainer, self._trainer.files
        journal = files.directory / JOURNAL
        facts: dict[str, Any] = {"stage": self._stage, "title": type(module).__name__}
        if self._stage != "fit":
            return facts
        try:
            explained = str(explain_running(trainer, module))
        except Exception as error:  # a strategy of the user may not answer while it runs
            explained = f"not available: {type(error).__name__}: {error}"
        return {
            **facts,
            "run": secrets.token_hex(8) if files.record is None else files.record.id,
            "journal": journal.stat().st_size if journal.exists() else 0,
            "place": f"{trainer.world_size} process{'es' * (trainer.world_size > 1)} on {socket.gethostname()}",
            "configuration": _configuration(trainer, module),
            "explain": explained,
            "environment": [
                ["script", script() or "typed in"],
                ["arguments", " ".join(arguments())],
                *map(list, describe_environment()),
            ],
        }

    def _show_warning(self, message: Any, category: Any, *rest: Any, **options: Any) -> None:
        self.note("warning", f"{category.__name__}: {message}")
        self._outer_show(message, category, *rest, **options)

    def _end(self, run: RunDirectory, error: BaseException | None) -> None:
        if warnings.showwarning == self._show_warning:
            warnings.showwarning = self._outer_show
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit)) or self._trainer.requests.signal
        status = "finished" if error is None else "interrupted" if interrupted else "failed"
        try:
            exception = None if error is None or interrupted else _described(error)
            self._append("end", stage=self._stage, status=status, exception=exception)
            run.read(pause=_limit(5.0 if interrupted else 60.0))
            write_report(run.directory / REPORT, [run])
        except Exception as problem:
            self._failed(problem)
        if self._problem:
            self._trainer.print(f"{run.directory / REPORT} could not be written: {self._problem}")

    def _write_now_and_then(self) -> None:
        """The thread: training never waits for it, and it takes at most a small share of the interpreter."""
        run, wait = self._run, _FIRST
        assert run is not None
        while not self._stop.wait(wait):
            began = time.thread_time()
            try:
                run.read(pause=lambda: self._stop.wait(0.05))
                write_report(run.directory / REPORT, [run])
            except Exception as error:
                self._failed(error)
            wait = max(_EVERY, (time.thread_time() - began) / _SHARE)

    def _failed(self, error: Exception) -> None:
        self._problem = self._problem or f"{type(error).__name__}: {error}"


def _limit(seconds: float) -> Callable[[], None]:
    """A process that was asked to leave does not stay for a long journal."""
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the journal is not read within {seconds:g} s: `trainer-kit report` reads all of it")

    return check


def _configuration(trainer: Session, module: Any) -> list[list[Any]]:
    """Section, name, value and origin of each value; what the user gave comes first."""
    parameters = inspect.signature(type(trainer).__init__).parameters.values()
    defaults = plain_arguments({each.name: each.default for each in parameters if each.default is not each.empty})
    rows: list[list[Any]] = []
    for name, value in trainer.arguments.items():
        chosen = trainer.origins.get(name)
        if chosen is None or chosen.origin in ("argument", "default"):
            rows.append(["Trainer", name, value, "default" if value == defaults.get(name) else "argument"])
        else:
            rows.append(["Trainer", name, plain(chosen.value), chosen.origin])
    rows.sort(key=lambda row: row[3] == "default")
    seed = "argument" if trainer.seed is not None else "the run or the script"
    facts = [("seed of the data's order", trainer.data_seed, seed), ("processes", trainer.world_size, "")]
    rows += [["Run", *fact] for fact in facts]
    for owner in (module, trainer.datamodule):
        if owner is not None:
            values = flatten(plain(params_dict(dict(owner.hparams))))
            rows += [[type(owner).__name__, name, value, "save_hyperparameters"] for name, value in values.items()]
    return rows


def _described(error: BaseException) -> dict[str, str]:
    headline = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"headline": headline, "text": text[-_LONGEST:]}
