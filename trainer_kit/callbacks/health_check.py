"""`HealthCheck`: measures every rank before training, and at intervals, and names ranks that differ from the others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, final

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.progress import Duration, DurationLike
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.health.machine import check_disk, check_shared_memory, make_findings
from trainer_kit.health.survey import Survey, survey
from trainer_kit.step.schedule import check_tokens

__all__ = ["HealthCheck"]


@final
class HealthCheck(Callback):
    """Measure every rank before training and every so often, and print which ones are unlike the others.

    Each rank measures a matmul (GEMM), copies in memory, an all-reduce, and its link to two other ranks;
    the first rank of each machine also the disk of the run, and room on the disk and in ``/dev/shm``. Clocks and
    versions are compared. A check prints one line if all is well; otherwise a line for each rank that is slow or
    differs, with its host, device, and part of the median of the ranks: below 0.7 for devices, 0.5 for CPUs and links.
    A rank that looks slow is measured three times before it is named. See ``trainer-kit doctor``.

    Training is not changed: a check leaves random state, weights and gradients alone. It takes about a second, which
    is not counted as time of training, and on an accelerator up to 0.6 GB of memory, which torch keeps for later use;
    without that much free memory it says so. No step calls it in which no check is due.

    Args:
        every: from one check to the next, such as ``"500ba"`` or ``"1h"``; a number counts optimizer steps; None: only
            before training. Intervals other than steps and batches end at the next step at which ranks agree.

    Attributes:
        last: the `Survey` of the last check, or None.

    Raises:
        ConfigurationError: ``every`` is not above 0, or a fraction of the run.

    Example:
        >>> HealthCheck(every="500ba").acts_every
        Duration('500ba')
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "early"

    def __init__(self, every: DurationLike | None = None) -> None:
        self.every: Duration | None = None
        if every is not None:
            self.every = Duration.parse(every, "st")
            if self.every.value <= 0 or self.every.unit == "dur":
                raise ConfigurationError(
                    "the interval of health checks must be a count or a duration above 0",
                    found=f"every={every!r}",
                    fix='pass every="500ba", or every=None to check only before training',
                )
        self.acts_every = self.every
        self.last: Survey | None = None

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            # An interval in tokens never comes in a run whose module counts none.
            check_tokens("every", self.every, pl_module)
            self.last = None

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.act(trainer, pl_module)

    def act(self, trainer: TrainerLike, module: ModuleLike) -> None:
        """Check now, and print the result. Every rank must call it.

        Args:
            trainer: the running Trainer; its strategy has the group of ranks to compare, its ``checkpoint_dir`` the
                disk.
            module: the trained module, which is not read.
        """
        directory = _existing_directory(trainer)
        # Once on each machine: its ranks share memory and disks.
        findings = []
        if trainer.local_rank == 0:
            checks = {"/dev/shm": check_shared_memory}
            if directory is not None:
                checks["disk"] = partial(check_disk, directory)
            for finding in make_findings(checks):
                if finding.level != "OK":
                    findings.append(finding)
        strategy = trainer.strategy
        # Of the whole world, not of a data group: a slow rank slows all of them.
        result = survey(strategy.world, strategy.device, directory, findings)
        self.last = result
        prefix = f"health check at step {trainer.progress.step}"
        if not result.unusual:
            trainer.print(f"{prefix}: {result.describe()}, nothing unusual")
        for finding in result.unusual:
            trainer.print(f"{prefix}: {finding.about}: {finding.text}")
            trainer.print(f"  → {finding.fix}")


def _existing_directory(trainer: TrainerLike) -> Path | None:
    """The nearest directory above the checkpoints that exists; None where they go to a URL."""
    directory = trainer.checkpoint_dir
    if not isinstance(directory, Path):
        return None
    # Before the first checkpoint its directory does not exist, but the disk below it is measured.
    for candidate in (directory, *directory.absolute().parents):
        if candidate.is_dir():
            return candidate
    return None
