"""Trackers for a loop of the user's own: the loggers of a Trainer, by Accelerate's calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from trainer_kit.accelerator.saving import Saving
from trainer_kit.accelerator.trackers import Absent, GeneralTracker, LoggerTracker
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.registry import LOGGERS

__all__ = ["Tracking"]

_IN_DIRECTORY: Final = ("tensorboard", "csv", "jsonl")


class Tracking(Saving):
    """What `Accelerator` logs."""

    log_with: list[Any]
    trackers: list[Any]

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
        options = {_word(name): dict(given) for name, given in (init_kwargs or {}).items()}
        rank_zero_only.rank = self.process_index  # type: ignore[attr-defined]
        self.trackers.clear()
        for one in self.log_with:
            tracker = self._make(one, project_name, options.get(str(getattr(one, "name", one)), {}))
            self.trackers.append(tracker)
            if self._mine(tracker):
                tracker.start()
                if config is not None:
                    tracker.store_init_configuration(dict(config))

    def _mine(self, tracker: GeneralTracker) -> bool:
        return self.is_main_process or not tracker.main_process_only

    def _make(self, one: Any, project: str, options: dict[str, Any]) -> GeneralTracker:
        if not isinstance(one, str):
            name = getattr(one, "name", None)
            made = one if isinstance(one, GeneralTracker) else LoggerTracker(str(name or type(one).__name__), one)
            complete = isinstance(name, str) and (hasattr(type(one), "tracker") or "tracker" in vars(one))
            if made is one and self._mine(made) and not complete:
                raise ConfigurationError(
                    "a tracker has a name and a tracker", found=f"{type(one).__name__} without one of them"
                )
            return made if self._mine(made) else Absent(made.name)
        kind = LOGGERS.get(one)
        custom = isinstance(kind, type) and issubclass(kind, GeneralTracker)
        if not self.is_main_process and (not custom or kind.main_process_only):
            return Absent(one)
        if custom:
            directory = (self._directory(one),) if kind.requires_logging_directory else ()
            made = kind(project, *directory, **options)
            assert isinstance(made, GeneralTracker)
            return made
        if one == "wandb":
            return LoggerTracker(one, kind(**{"project": project, "save_dir": self.logging_dir or ".", **options}))
        if one in _IN_DIRECTORY:
            return LoggerTracker(one, kind(self._directory(one), **{"name": project, "version": "", **options}))
        return LoggerTracker(one, kind(**options))

    def _directory(self, word: str) -> str:
        if self.logging_dir is None:
            raise ConfigurationError(
                f"{word} needs a directory",
                fix="Accelerator(project_dir=...), or ProjectConfiguration(logging_dir=...)",
            )
        return self.logging_dir

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Hand values to every tracker, on the main process.

        Args:
            values: by name; a tensor of one element is read here, which waits for the device.
            step: what they belong to; by default one more than the last.
            log_kwargs: by the tracker's name, options of its ``log``.
        """
        given = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        for tracker in self.trackers:
            if self._mine(tracker):
                tracker.log(dict(given), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; ``unwrap``: what it writes through (W&B's run, TensorBoard's writer).

        On the other processes it does nothing, whatever it is asked.

        Raises:
            ConfigurationError: there is none of this name.
        """
        for tracker in self.trackers:
            if tracker.name == _word(name):
                return tracker.tracker if unwrap and not isinstance(tracker, Absent) else tracker
        raise ConfigurationError(
            f"there is no tracker {name!r}",
            found=", ".join(tracker.name for tracker in self.trackers) or "none is started",
            fix=f"Accelerator(log_with={name!r}), and init_trackers(...) first",
        )

    def end_training(self) -> None:
        """Close every tracker, and wait for everyone."""
        for tracker in self.trackers:
            if self._mine(tracker):
                tracker.finish()
        self.wait_for_everyone()


def _word(name: Any) -> str:
    return str(getattr(name, "value", name))
