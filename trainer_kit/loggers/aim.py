"""Aim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, final

from trainer_kit.loggers.layout import Json
from trainer_kit.loggers.media import Values, numbered_key
from trainer_kit.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["AimLogger", "AimRun"]


class AimRun(Protocol):
    """The part of ``aim.Run`` that `AimLogger` calls."""

    name: str | None

    @property
    def hash(self) -> str:
        """The id of the run."""

    def set(self, key: str | tuple[str, str], val: Json, strict: bool) -> object:
        """Store a value; with ``strict`` only types that Aim knows."""

    def track(
        self,
        value: object,
        name: str,
        step: int,
        *,
        context: Mapping[str, str] | None = None,
    ) -> object:
        """Add a value to a sequence."""

    def close(self) -> object:
        """Write everything and end the run."""


@final
class AimLogger(RunLogger[AimRun]):
    """Log to an Aim repository.

    Args:
        repo: its path or URL; None for ``save_dir``.
        experiment: the group of runs; None for ``trainer_kit_logs``.
        train_metric_prefix: metrics with this prefix are tracked without it, in the context ``subset: train``;
            None or empty for no such context.
        val_metric_prefix: likewise, ``subset: val``.
        test_metric_prefix: likewise, ``subset: test``.
        run_name: the run's name; None lets Aim choose one.
        run_hash: the hash of a run to continue.
        save_dir: where the repository and other local files are.
        prefix: the start of metric names, followed by ``-``.
        log_model: copy checkpoints: ``"all"`` when they are saved, True those that still exist at the end.
        run: an ``aim.Run`` to log to; the caller closes it.
        **kwargs: for ``aim.Run``: ``system_tracking_interval``, in seconds, ``log_system_params``, which records
            environment variables with their secrets, ``capture_terminal_logs``. All three are off by default.

    Raises:
        ConfigurationError: aim is not installed.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.loggers import AimLogger
        >>> logger = AimLogger(experiment="digits", run_name="baseline", train_metric_prefix="train/")
        >>> trainer = Trainer(logger=logger, max_epochs=3)
        >>> logger.name, logger.version
        ('digits', None)
    """

    requires = "aim>=3.17"
    module = "aim"
    extra = "aim"

    def __init__(
        self,
        repo: str | None = None,
        experiment: str | None = None,
        train_metric_prefix: str | None = "train_",
        val_metric_prefix: str | None = "val_",
        test_metric_prefix: str | None = "test_",
        run_name: str | None = None,
        run_hash: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        run: AimRun | None = None,
        **kwargs: object,
    ) -> None:
        id = run_hash
        if run is not None:
            id = run.hash
        super().__init__(
            name=experiment,
            save_dir=save_dir,
            id=id,
            prefix=prefix,
            log_model=log_model,
            run=run,
        )
        self._repo = repo
        self._run_name = run_name
        prefixes = {
            "train": train_metric_prefix,
            "val": val_metric_prefix,
            "test": test_metric_prefix,
        }
        # Every name starts with an empty prefix: such a subset would take all metrics.
        self._subsets = {subset: start for subset, start in prefixes.items() if start}
        # Off unless asked for: they start a thread, record secrets of the environment, and copy the terminal.
        self._options = {
            "system_tracking_interval": None,
            "log_system_params": False,
            "capture_terminal_logs": False,
            **kwargs,
        }

    def _begin(self, id: str | None) -> tuple[AimRun, str]:
        from aim import Run

        repo = self._repo
        if repo is None:
            repo = self._save_dir
            os.makedirs(repo, exist_ok=True)
        options = {"repo": repo, **self._options}
        run: AimRun
        if id is None:
            run = Run(experiment=self._name, **options)
        else:
            # Forced: Aim refuses a run that is still locked because its process was killed.
            run = Run(id, force_resume=True, **options)
        if self._run_name is not None:
            run.name = self._run_name
        return run, str(run.hash)

    def _end(self, run: AimRun, status: str) -> None:
        run.set("status", status, strict=False)
        run.close()

    def _write_metrics(
        self, run: AimRun, values: Mapping[str, float], step: int
    ) -> None:
        for name, value in values.items():
            short_name, context = self._split_subset(name)
            run.track(value, name=short_name, step=step, context=context)

    def _split_subset(self, name: str) -> tuple[str, dict[str, str]]:
        """The name without the prefix of its subset, and Aim's context of that subset."""
        for subset, start in self._subsets.items():
            if name.startswith(start):
                # A metric whose whole name is the prefix keeps it: the rest would be empty.
                return name.removeprefix(start) or name, {"subset": subset}
        return name, {}

    def _write_params(self, run: AimRun, params: Mapping[str, Json]) -> None:
        # One by one: setting the whole dict would drop hyperparameters of earlier calls.
        for name, value in params.items():
            run.set(("hparams", name), value, strict=False)

    def _write_image(
        self,
        run: AimRun,
        key: str,
        image: Image,
        step: int,
        index: int,
        caption: str | None,
    ) -> None:
        import aim

        picture = aim.Image(image, caption=caption or "")
        run.track(picture, name=numbered_key(key, index), step=step)

    def _write_text(self, run: AimRun, key: str, text: str, step: int) -> None:
        from aim import Text

        run.track(Text(text), name=key, step=step)

    def _write_histogram(
        self, run: AimRun, key: str, values: Values, bins: int, step: int
    ) -> None:
        from aim import Distribution

        run.track(Distribution(values, bin_count=bins), name=key, step=step)
