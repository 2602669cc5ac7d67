"""Trackers for a loop of the user's own: the loggers of a Trainer, by Accelerate's calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.registry import LOGGERS
from trainer_kit.raw.saving import Saving

__all__ = ["GeneralTracker", "Tracking"]

_IN_DIRECTORY = ("tensorboard", "csv", "jsonl")


class GeneralTracker(ABC):
    """A tracker of the user's own, as scripts for Hugging Face Accelerate define it.

    Attributes:
        name: by which it is asked for.
        requires_logging_directory: whether ``logging_dir`` must be given.
    """

    name: str = ""
    requires_logging_directory: bool = False

    @property
    @abstractmethod
    def tracker(self) -> Any:
        """What it writes through."""

    def start(self) -> None:
        """Called once, on the main process."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The hyperparameters of the run."""

    @abstractmethod
    def log(self, values: dict[str, Any], step: int | None, **options: Any) -> None:
        """Values of a step."""

    def finish(self) -> None:
        """The run is over."""


class Tracking(Saving):
    """What `Accelerator` logs."""

    log_with: list[Any]
    trackers: list[Any]
    _logged: int

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start what ``log_with`` names; every process calls it, the main one logs.

        Args:
            project_name: W&B's project; for trackers that write files, a directory below ``logging_dir``.
            config: hyperparameters.
            init_kwargs: by the tracker's name, what it is made with.
        """
        options = {name: dict(given) for name, given in (init_kwargs or {}).items()}
        rank_zero_only.rank = self.process_index  # type: ignore[attr-defined]
        for one in self.log_with:
            tracker = self._make(one, project_name, options.get(str(getattr(one, "name", one)), {}))
            self.trackers.append(tracker)
            if not self.is_main_process:
                continue
            if isinstance(tracker, GeneralTracker):
                tracker.start()
                if config is not None:
                    tracker.store_init_configuration(config)
            elif config is not None and hasattr(tracker, "log_hyperparams"):
                tracker.log_hyperparams(config)

    def _make(self, one: Any, project: str, options: dict[str, Any]) -> Any:
        if not isinstance(one, str):
            return one
        if one == "wandb":
            return LOGGERS.get(one)(project=project, save_dir=self.logging_dir or ".", **options)
        if one in _IN_DIRECTORY:
            if self.logging_dir is None:
                raise ConfigurationError(
                    f"{one} needs a directory",
                    fix="Accelerator(project_dir=...), or ProjectConfiguration(logging_dir=...)",
                )
            return LOGGERS.get(one)(self.logging_dir, name=project, **{"version": "", **options})
        return LOGGERS.get(one)(**options)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Hand values to every tracker, on the main process.

        Args:
            values: by name; a tensor of one element is read here, which waits for the device.
            step: what they belong to; by default one more than the last.
            log_kwargs: by the tracker's name, options for trackers of the user's own.
        """
        self._logged = self._logged + 1 if step is None else step
        if not self.is_main_process:
            return
        for tracker in self.trackers:
            if isinstance(tracker, GeneralTracker):
                tracker.log(dict(values), step, **(log_kwargs or {}).get(tracker.name, {}))
            else:
                tracker.log_metrics(_numbers(values), self._logged)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; ``unwrap``: what it writes through (W&B's run, TensorBoard's writer).

        Raises:
            ConfigurationError: there is none of this name.
        """
        known = {
            str(getattr(one, "name", one)): tracker for one, tracker in zip(self.log_with, self.trackers, strict=False)
        }
        if name not in known:
            raise ConfigurationError(
                f"there is no tracker {name!r}",
                found=", ".join(known) or "none is started",
                fix=f"Accelerator(log_with={name!r}), and init_trackers(...) first",
            )
        tracker = known[name]
        if not unwrap:
            return tracker
        return tracker.tracker if isinstance(tracker, GeneralTracker) else getattr(tracker, "experiment", tracker)

    def end_training(self) -> None:
        """Close every tracker, and wait for everyone."""
        if self.is_main_process:
            for tracker in self.trackers:
                end = getattr(tracker, "finish", None) or getattr(tracker, "finalize", None)
                if isinstance(tracker, GeneralTracker):
                    tracker.finish()
                elif end is not None:
                    tracker.finalize("success")
        self.world.barrier()


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() == 1:
                found[name] = float(value)  # sync point: the user logs now
        elif isinstance(value, (int, float)):
            found[name] = float(value)
        elif hasattr(value, "item"):
            found[name] = float(value.item())  # sync point: a NumPy scalar, on the host
    return found
