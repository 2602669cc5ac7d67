"""A logger that keeps nothing: `self.logger` where nothing may be written, so that code which uses it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

__all__ = ["DummyLogger"]

_FACTS: Final = {"name": "", "version": "", "log_dir": None, "save_dir": None, "root_dir": None}
"""What a logger says of where it writes."""


@final
class DummyLogger:
    """Takes every call and writes nothing.

    Args:
        like: the logger in whose place it stands, on a rank that does not write: it has its name, its version and its
            directories.

    Example:
        >>> logger = DummyLogger()
        >>> logger.log_metrics({"loss": 1.0}, step=3)
        >>> logger.experiment.add_figure("weights", None).whatever[0] is logger.experiment
        True
    """

    def __init__(self, like: Any = None) -> None:
        self.experiment = _Nothing()
        for fact, value in _FACTS.items():
            setattr(self, fact, getattr(like, fact, value))

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
