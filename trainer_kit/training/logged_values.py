"""Sends logged values to the loggers, each with its step and the counts of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, final

from trainer_kit.core.progress import Progress
from trainer_kit.state.runs import RunFiles

__all__ = ["LoggedMetrics", "LoggedValues"]

# Tensors of one element, and numbers of any library.
LoggedMetrics: TypeAlias = Mapping[str, Any]


@final
class LoggedValues:
    """Queues values for the loggers of a run; only rank 0 may call it.

    Args:
        progress: the counts of the last fit.
        files: has the loggers' queues.
    """

    def __init__(self, progress: Progress, files: RunFiles) -> None:
        self._progress = progress
        self._files = files

    def log(self, metrics: LoggedMetrics, step: int | None, stage: str) -> None:
        """Queue values of training.

        Args:
            metrics: the values; one named ``step`` is the step of the others, as in Lightning.
            step: their step; None: the last one.
            stage: the running entry point; empty between entry points.
        """
        progress = self._progress
        values = _read_values(metrics)
        # Values of another step may belong to another epoch.
        if "step" not in values and step in (None, progress.step):
            values.setdefault("epoch", self._epoch_of_step(stage))
        if step is None:
            step = progress.step
        logged_step = int(values.pop("step", step))
        counts = {}
        if progress.samples:
            counts["samples"] = progress.samples
        if progress.tokens:
            counts["tokens"] = progress.tokens
        self._deliver(values, logged_step, counts, stage)

    def log_evaluation_batch(
        self, metrics: LoggedMetrics, number: int, stage: str
    ) -> None:
        """Queue the values of an evaluation batch; its number is their axis, on which no count of training belongs."""
        values = _read_values(metrics)
        batch = int(values.pop("step", number))
        self._deliver(values, batch, {}, stage)

    def _deliver(
        self,
        values: Mapping[str, float],
        step: int,
        counts: Mapping[str, int],
        stage: str,
    ) -> None:
        self._files.deliveries.log(values, step, counts)
        if not stage:
            # Between entry points none will end and close the queues.
            self._files.deliveries.close(None)

    def _epoch_of_step(self, stage: str) -> int:
        """In a fit, the epoch in which the last step was taken, also after that epoch was counted."""
        progress = self._progress
        # Hooks of the end of an epoch log after it was counted, values of the epoch that has ended.
        is_counted = (
            progress.step > 0 and progress.epoch > 0 and not progress.epoch_batch
        )
        return progress.epoch - (stage == "fit" and is_counted)


def _read_values(metrics: LoggedMetrics) -> dict[str, float]:
    """The values as numbers."""
    # sync point: only for tensors
    return {name: float(value) for name, value in metrics.items()}  # sync point
