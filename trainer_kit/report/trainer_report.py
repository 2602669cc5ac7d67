"""`TrainerReport`: the report of what a Trainer runs."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from trainer_kit.loggers.layout import flatten, params_dict, plain
from trainer_kit.report.running import RunReport
from trainer_kit.training.explain import explain_running
from trainer_kit.training.session import Session
from trainer_kit.training.settings import plain_arguments

__all__ = ["TrainerReport"]


@final
class TrainerReport:
    """Write a `RunReport` of an entry point in this context, on rank 0, if the Trainer has a logger.

    Args:
        trainer: that runs the entry point in the ``with`` block.
        stage: fit, validate or test.
    """

    def __init__(self, trainer: Session, stage: str) -> None:
        self._trainer = trainer
        self._stage = stage
        self._report: RunReport | None = None
        self._early: list[tuple[str, str]] = []
        self._outer_note: Callable[..., Any] = trainer.note

    def __enter__(self) -> TrainerReport:
        self._trainer.note = self._note
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        trainer = self._trainer
        trainer.note = self._outer_note
        if self._report is None or not trainer.is_global_zero:
            return
        interrupted = (
            isinstance(error, (KeyboardInterrupt, SystemExit))
            or trainer.requests.signal
        )
        if interrupted:
            status = "finished" if error is None else "interrupted"
            self._report.end(status, None, seconds=5.0)
        elif error is None:
            self._report.end("finished")
        else:
            self._report.end("failed", error)

    def begin(self, module: Any) -> None:
        """Record the start and the configuration of an entry point whose parts are composed."""
        trainer = self._trainer
        if not trainer.files.loggers:
            return
        # `print` is looked up at each call: a script may replace it.
        self._report = RunReport(
            trainer.files.directory,
            lambda: trainer.progress.step,
            lambda line: trainer.print(line),
        )
        if trainer.is_global_zero:
            self._report.begin(self._stage, self._facts(module), trainer.world_size)
            for kind, text in self._early:
                self._report.note(kind, text)

    def _note(self, kind: str, text: str, stacks: str = "") -> None:
        if kind == "hang":
            if self._report is not None:
                self._report.end_by_hang(text, stacks)
        elif self._report is None:
            self._early.append((kind, text))
        elif self._trainer.is_global_zero:
            self._report.note(kind, text)

    def _facts(self, module: Any) -> dict[str, Any]:
        trainer = self._trainer
        record = trainer.files.record
        facts: dict[str, Any] = {"title": type(module).__name__}
        if self._stage != "fit":
            return facts
        try:
            explained = str(explain_running(trainer, module))
        except (
            Exception
        ) as error:  # a strategy of the user may not answer while it runs
            explained = f"not available: {type(error).__name__}: {error}"
        key = secrets.token_hex(8) if record is None else record.id
        return {
            **facts,
            "run": key,
            "configuration": _configuration(trainer, module),
            "explain": explained,
        }


def _configuration(trainer: Session, module: Any) -> list[list[object]]:
    """Return section, name, value and origin of each value; values from the user come first."""
    parameters = inspect.signature(type(trainer).__init__).parameters.values()
    defaults = plain_arguments(
        {
            each.name: each.default
            for each in parameters
            if each.default is not each.empty
        }
    )
    rows: list[list[object]] = []
    for name, value in trainer.arguments.items():
        setting = trainer.origins.get(name)
        if setting is not None and setting.origin not in ("argument", "default"):
            rows.append(["Trainer", name, plain(setting.value), setting.origin])
        elif value == defaults.get(name):
            rows.append(["Trainer", name, value, "default"])
        else:
            rows.append(["Trainer", name, value, "argument"])
    rows.sort(key=lambda row: row[3] == "default")
    seed = "argument" if trainer.seed is not None else "the run or the script"
    rows.append(["Run", "seed of the data's order", trainer.data_seed, seed])
    rows.append(["Run", "processes", trainer.world_size, ""])
    for owner in (module, trainer.datamodule):
        if owner is None:
            continue
        section = type(owner).__name__
        values = flatten(plain(params_dict(dict(owner.hparams))))
        for name, value in values.items():
            rows.append([section, name, value, "save_hyperparameters"])
    return rows
