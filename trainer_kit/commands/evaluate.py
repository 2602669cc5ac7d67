"""``trainer-kit evaluate``: validate the checkpoints of a run in another process, on another device."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import click

from trainer_kit.commands.terminal import FilePath, refuse_options
from trainer_kit.core.display import MASK, plural
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import locate
from trainer_kit.core.types import Keywords

if TYPE_CHECKING:
    from trainer_kit.checkpoint.store import CheckpointRecord
    from trainer_kit.loggers.journal import JSONLLogger
    from trainer_kit.state.records import RunRecord
    from trainer_kit.training.session import Session

__all__ = ["evaluate"]

_COMMIT: Final = "commit"
"""The count in a line of the journal that names the evaluated checkpoint: the number of its commit."""
_LOCK: Final = "evaluation"
"""The directory in a run's directory whose lock one evaluating process holds."""
_LATER_FIT: Final = "a later fit has begun"
_DELETED: Final = "deleted before"
_REPLACED: Final = "replaced before"
_FAILED: Final = "failed"


@click.command("evaluate")
@click.argument(
    "run",
    metavar="RUN",
    type=FilePath(exists=True, file_okay=False, path_type=Path),
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--follow",
    is_flag=True,
    help="Wait for further checkpoints until the fit has finished.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="Where to evaluate: auto, cpu, cuda, cuda:1, ...",
)
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=5,
    show_default=True,
    help="Seconds between two looks for checkpoints, with --follow.",
)
def evaluate(
    run: Path, arguments: tuple[str, ...], follow: bool, device: str, every: float
) -> None:
    """Validate each checkpoint of the run in the directory RUN, and write the values to its journal.

    The script of the run is executed up to its first Trainer.fit, with the arguments of the run, or those after --. A
    checkpoint that the journal has values of is not evaluated again. Exits with 1 if one could not be evaluated.
    """
    from trainer_kit.checkpoint.lock import DirectoryLock

    if not follow:
        refuse_options(["every"], "{} needs --follow")
    lock = DirectoryLock(run / _LOCK)
    try:
        # The script's own output is not that of this command.
        with contextlib.redirect_stdout(sys.stderr):
            evaluator = _open_evaluator(run, arguments, device)
        while True:
            # Before the checkpoints: those of a fit that has ended are all there.
            ending = evaluator.end_of_fit()
            # Looked for again after each evaluation, during which the run may have deleted or replaced some.
            while checkpoint := next(evaluator.pending(), None):
                click.echo(evaluator.evaluate(checkpoint))
            if ending or not follow:
                break
            time.sleep(every)
    finally:
        lock.release()
        # That of a process that was killed is left to the next one.
        with contextlib.suppress(OSError):
            (run / _LOCK).rmdir()
    if ending == _LATER_FIT:
        click.echo(f"{ending}: its checkpoints are not evaluated")
    click.echo(
        f"{plural(len(evaluator.commits), 'checkpoint')} evaluated in {run}{evaluator.describe_skipped()}"
    )
    if _FAILED in evaluator.skipped.values():
        sys.exit(1)


@final
class _LoadedCommit:
    """The number of the commit whose weights the Trainer has loaded last; None if its manifest does not show it."""

    def __init__(self) -> None:
        self.number: int | None = None

    def expect(self, number: int | None) -> None:
        """Set the number of the commit that is to be loaded: a validation without batches calls no hook."""
        self.number = number

    def read(self, trainer: Session, module: object) -> None:
        """Read the number after the load: the hook ``on_validation_start``."""
        from trainer_kit.checkpoint.manifest import commit_number

        path = trainer.ckpt_path
        # Every validation of this command loads a checkpoint.
        assert path is not None
        self.number = commit_number(locate(path))


@final
@dataclass(frozen=True)
class _Evaluator:
    """Evaluates the checkpoints of one fit.

    Attributes:
        run: its directory.
        opened: the record of the fit when the script was executed; later fits may pass another module.
        trainer: of the script, on this device.
        fit: what the script passes to `validate`: the module, its loaders and its datamodule.
        journal: of the run.
        commits: the numbers of the checkpoints that the journal has values of.
        skipped: those of the others that need no evaluation any more, and why.
        loaded: what the Trainer has loaded.
    """

    run: Path
    opened: RunRecord
    trainer: Session
    fit: Any
    journal: JSONLLogger
    commits: set[int]
    skipped: dict[int, str]
    loaded: _LoadedCommit

    def end_of_fit(self) -> str:
        """Why the fit has no further checkpoints; "" while it may have some."""
        newest = _newest_record(self.run)
        if newest.id != self.opened.id:
            return _LATER_FIT
        if newest.status == "finished":
            return "finished"
        return ""

    def pending(self) -> Iterator[CheckpointRecord]:
        """The checkpoints without values, the oldest one first."""
        from trainer_kit.checkpoint.store import checkpoints

        for directory in self._record().checkpoint_directories:
            for checkpoint in checkpoints(directory):
                # Several runs may save to one directory.
                is_of_fit = checkpoint.info.get("run", "") in ("", self.opened.id)
                number = _commit(checkpoint)
                is_done = number in self.commits or number in self.skipped
                if is_of_fit and not is_done:
                    yield checkpoint

    def _record(self) -> RunRecord:
        """The present record of the fit: a restart may save elsewhere."""
        for record in _read_records(self.run):
            if record.id == self.opened.id:
                return record
        # A later attempt at the same fit has replaced it.
        return self.opened

    def evaluate(self, checkpoint: CheckpointRecord) -> str:
        """Evaluate one checkpoint, and write its values to the journal; returns a line about it."""
        from trainer_kit.checkpoint.manifest import commit_number

        number = _commit(checkpoint)
        name = f"step {checkpoint.step}"
        # What is read between two equal numbers is of one commit; after the load nothing more is read.
        before = commit_number(checkpoint.path)
        self.loaded.expect(before)
        try:
            step = _read_step(checkpoint)
            counts = _read_counts(checkpoint)
            self._validate(checkpoint)
        except (CheckpointError, OSError) as error:
            if not checkpoint.path.exists():
                self.skipped[number] = _DELETED
                return f"{name}: deleted by the run before it was evaluated"
            self.skipped[number] = _FAILED
            reason = str(error) or type(error).__name__
            return f"{name}: not evaluated: {reason.splitlines()[0]}"
        if self.loaded.number != before:
            self.skipped[number] = _REPLACED
            return f"{name}: replaced by the run before it was evaluated"
        values = dict(self.trainer.metrics.logged)
        # Of this process, which has trained no epoch.
        values.pop("epoch", None)
        # One line, written at once: a process that is killed has written all of it or nothing.
        self.journal.log_metrics(values, step, {**counts, _COMMIT: number})
        self.commits.add(number)
        texts = [f"{metric} {value:.6g}" for metric, value in values.items()]
        return f"{name}: {', '.join(texts) or 'no values'}"

    def _validate(self, checkpoint: CheckpointRecord) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.trainer.validate(  # type: ignore[attr-defined]  # the script's class of Trainer
                self.fit.module,
                self.fit.val_dataloaders,
                ckpt_path=checkpoint.path,
                verbose=False,
                datamodule=self.fit.datamodule,
            )

    def describe_skipped(self) -> str:
        """How many checkpoints have no values, by reason; "" if all have some."""
        counts = Counter(self.skipped.values())
        return "".join(f", {count} {reason}" for reason, count in counts.items())


def _open_evaluator(run: Path, arguments: tuple[str, ...], device: str) -> _Evaluator:
    from trainer_kit.commands.script import captured_fit
    from trainer_kit.loggers.journal import JSONLLogger
    from trainer_kit.trainer import Trainer

    record = _newest_record(run)
    if not record.script or record.fit:
        raise ConfigurationError(
            "the script of this run cannot be executed up to its fit",
            found=f"fit {record.fit + 1} of {record.script or 'code that was typed in'}",
            fix="trainer.validate(module, loader, ckpt_path=...) evaluates one checkpoint",
        )
    if not arguments and any(MASK in argument for argument in record.args):
        raise ConfigurationError(
            "the record of this run masks arguments that look like secrets",
            found=" ".join(record.args),
            fix=f"pass all of them: trainer-kit evaluate {run} -- ARGUMENTS",
        )
    fit = captured_fit(record.script, arguments or record.args, trainer_class=Trainer)
    # One process, which leaves no files and continues nothing.
    options: Keywords = {
        "logger": False,
        "num_nodes": 1,
        "resume": None,
        "strategy": "auto",
        **_device_arguments(device),
    }
    # A run that leaves its validation to this command has none of its own.
    if fit.arguments.get("limit_val_batches") == 0:
        options["limit_val_batches"] = 1.0
    trainer = Trainer(**{**fit.arguments, **options})
    loaded = _LoadedCommit()
    trainer.on("validation_start")(loaded.read)
    journal = JSONLLogger(run, "", "")
    commits = _evaluated_commits(journal)
    return _Evaluator(run, record, trainer, fit, journal, commits, {}, loaded)


def _newest_record(run: Path) -> RunRecord:
    return max(_read_records(run), key=lambda record: record.number)


def _read_records(run: Path) -> list[RunRecord]:
    from trainer_kit.state.records import RUN, read_records

    records = read_records(run / RUN)
    if not records:
        raise ConfigurationError(
            f"{run} is not the directory of a run that keeps checkpoints",
            found=f"no record in {run / RUN}",
            fix="name the directory that a Trainer prints as its log_dir",
        )
    return records


def _device_arguments(device: str) -> Keywords:
    accelerator, _, index = device.partition(":")
    if not index:
        return {"accelerator": accelerator, "devices": 1}
    if not index.isdecimal():
        raise ConfigurationError(
            "a device is named by its kind and its number",
            found=f"--device {device}",
            fix="for example --device cuda:1",
        )
    return {"accelerator": accelerator, "devices": [int(index)]}


def _evaluated_commits(journal: JSONLLogger) -> set[int]:
    """The checkpoints that the journal has values of."""
    from trainer_kit.loggers.journal import read_journal

    if not journal.path.exists():
        return set()
    commits = set()
    for line in read_journal(journal.path):
        counts = line.get("counts")
        if isinstance(counts, dict) and _COMMIT in counts:
            commits.add(counts[_COMMIT])
    return commits


def _commit(checkpoint: CheckpointRecord) -> int:
    """The number of its commit: a step that is trained again has another one."""
    from trainer_kit.checkpoint.manifest import commit_number

    number = commit_number(checkpoint.path)
    # A checkpoint of an earlier version has none.
    if number is None:
        return round(checkpoint.created.timestamp() * 1e6)
    return number


def _read_step(checkpoint: CheckpointRecord) -> int | None:
    from trainer_kit.checkpoint.read import read_info, step_of

    return step_of(read_info(checkpoint.path))


def _read_counts(checkpoint: CheckpointRecord) -> Mapping[str, int]:
    """The samples and tokens that the checkpoint was trained on."""
    from trainer_kit.checkpoint.read import read_parts, resolve_checkpoint

    resolved = resolve_checkpoint(checkpoint.path)
    # A checkpoint of weights alone has no counts.
    if "progress" not in resolved.parts:
        return {}
    parts = read_parts(resolved, ["progress"])
    progress = parts["progress"]
    counts = {}
    for name in ("samples", "tokens"):
        count = int(progress.get(name, 0))
        # Nothing has counted them.
        if count:
            counts[name] = count
    return counts
