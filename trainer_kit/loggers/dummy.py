"""A logger that keeps nothing: what ``self.logger`` is during ``fast_dev_run``, so that code which uses it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

__all__ = ["DummyLogger"]


@final
class DummyLogger:
    """Takes every call and writes nothing.

    Example:
        >>> logger = DummyLogger()
        >>> logger.log_metrics({"loss": 1.0}, step=3)
        >>> logger.experiment.add_figure("weights", None).whatever[0] is logger.experiment
        True
    """

    name = ""
    version = ""
    log_dir = None

    def __init__(self) -> None:
        self.experiment = _Nothing()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Nothing is kept."""

    def log_hyperparams(self, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Nothing is kept."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["experiment"]


class _Nothing:
    """Whatever is asked of a backend, it answers with itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing is kept."""
