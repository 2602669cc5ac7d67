"""Aim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, final

from trainer_kit.loggers.run_logger import RunLogger

__all__ = ["AimLogger"]


@final
class AimLogger(RunLogger):
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
    """

    requires, module, extra = "aim>=3.17", "aim", "aim"

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
        run: Any = None,
        **kwargs: Any,
    ) -> None:
        id = run_hash if run is None else run.hash
        super().__init__(
            name=experiment,
            save_dir=save_dir,
            id=id,
            prefix=prefix,
            log_model=log_model,
            run=run,
        )
        self._repo, self._run_name = repo, run_name
        prefixes = {
            "train": train_metric_prefix,
            "val": val_metric_prefix,
            "test": test_metric_prefix,
        }
        self._subsets = {subset: start for subset, start in prefixes.items() if start}
        self._options = {
            "system_tracking_interval": None,
            "log_system_params": False,
            "capture_terminal_logs": False,
            **kwargs,
        }

    def _begin(self, id: str | None) -> tuple[Any, str]:
        from aim import Run

        if self._repo is None:
            os.makedirs(self._save_dir, exist_ok=True)
        options = {
            "repo": self._save_dir if self._repo is None else self._repo,
            **self._options,
        }
        run = (
            Run(experiment=self._name, **options)
            if id is None
            else Run(id, force_resume=True, **options)
        )
        if self._run_name is not None:
            run.name = self._run_name
        return run, str(run.hash)

    def _end(self, run: Any, status: str) -> None:
        run.set("status", status, strict=False)
        run.close()

    def _write_metrics(self, run: Any, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            subset, start = next(
                (
                    (s, start)
                    for s, start in self._subsets.items()
                    if name.startswith(start)
                ),
                ("", ""),
            )
            context = {"subset": subset} if subset else {}
            run.track(
                value, name=name[len(start) :] or name, step=step, context=context
            )

    def _write_params(self, run: Any, params: Mapping[str, Any]) -> None:
        for name, value in params.items():
            run.set(("hparams", name), value, strict=False)

    def _write_image(
        self, run: Any, key: str, image: Any, step: int, index: int, caption: str | None
    ) -> None:
        from aim import Image

        run.track(
            Image(image, caption=caption or ""),
            name=f"{key}/{index}" if index else key,
            step=step,
        )

    def _write_text(self, run: Any, key: str, text: str, step: int) -> None:
        from aim import Text

        run.track(Text(text), name=key, step=step)

    def _write_histogram(
        self, run: Any, key: str, values: Any, bins: int, step: int
    ) -> None:
        from aim import Distribution

        run.track(Distribution(values, bin_count=bins), name=key, step=step)
