"""`TrainerReport`: the report of what a Trainer runs."""

from __future__ import annotations

import inspect
import secrets
import time
from types import TracebackType
from typing import Any, final

from trainer_kit.core.types import Function, JsonObject
from trainer_kit.loggers.layout import flatten, params_dict, plain
from trainer_kit.report.pulse import process_start
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
        self._called = time.time()
        self._report: RunReport | None = None
        # notes before `begin`: the directory of the run is not chosen yet
        self._early: list[tuple[str, str]] = []
        self._outer_note: Function = trainer.note

    def __enter__(self) -> TrainerReport:
        self._trainer.report_events(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        trainer = self._trainer
        trainer.report_events(self._outer_note)
        if self._stage == "fit" and trainer.run is not None:
            trainer.run.account.stop()
        if self._report is None or not trainer.is_global_zero:
            return
        exits = isinstance(error, (KeyboardInterrupt, SystemExit))
        if exits or trainer.requests.signal:
            status = "interrupted"
            if error is None:
                status = "finished"
            # The sender of a signal kills the process soon, SLURM after 30 seconds.
            self._report.end(status, None, seconds=5.0)
        elif error is None:
            self._report.end("finished")
        else:
            self._report.end("failed", error)

    def begin(self, module: Any) -> None:
        """Record the start and the configuration of an entry point whose parts are composed."""
        trainer = self._trainer
        # A run without loggers has no journal, and leaves no files.
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
            if self._stage == "fit" and trainer.run is not None:
                self._report.keep_account(trainer.run.account, self._begun())

    def _begun(self) -> float:
        """When this start of the fit began: with its process, if that serves a script's first fit alone."""
        record = self._trainer.files.record
        # Code that is typed in may have waited for hours.
        if record is None or record.fit or not record.script:
            return self._called
        return min(self._called, process_start())

    def _note(self, kind: str, text: str, stacks: str = "") -> None:
        # On any rank: the watchdog of the rank that hangs may be on another one than rank 0.
        if kind == "hang":
            if self._report is not None:
                self._report.end_by_hang(text, stacks)
        elif self._report is None:
            self._early.append((kind, text))
        elif self._trainer.is_global_zero:
            self._report.note(kind, text)

    def _facts(self, module: Any) -> JsonObject:
        trainer = self._trainer
        record = trainer.files.record
        facts: JsonObject = {"title": type(module).__name__}
        if self._stage != "fit":
            return facts
        try:
            explained = str(explain_running(trainer, module))
        except Exception as error:
            # A strategy of the user may not answer while it runs.
            explained = f"not available: {type(error).__name__}: {error}"
        # Without a record this fit still needs a key that no other fit of the directory has.
        key = secrets.token_hex(8)
        if record is not None:
            key = record.id
        facts["run"] = key
        facts["configuration"] = _configuration(trainer, module)
        facts["explain"] = explained
        return facts


def _configuration(trainer: Session, module: Any) -> list[list[object]]:
    """Return section, name, value and origin of each value; values from the user come first."""
    parameters = inspect.signature(type(trainer).__init__).parameters.values()
    signature_defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }
    # In the same plain form as the recorded arguments, so that they can be compared.
    defaults = plain_arguments(signature_defaults)
    rows: list[list[object]] = []
    for name, value in trainer.arguments.items():
        setting = trainer.origins.get(name)
        if setting is not None and setting.origin not in ("argument", "default"):
            rows.append(["Trainer", name, plain(setting.value), setting.origin])
        elif value == defaults.get(name):
            rows.append(["Trainer", name, value, "default"])
        else:
            rows.append(["Trainer", name, value, "argument"])
    # False sorts before True: what the user chose comes first.
    rows.sort(key=lambda row: row[3] == "default")
    seed = "the run or the script"
    if trainer.seed is not None:
        seed = "argument"
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
