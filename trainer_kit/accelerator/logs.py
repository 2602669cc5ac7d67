"""Python logging in runs of several processes."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any, final

from torch import distributed as dist

from trainer_kit.core.environment import Environment

__all__ = ["RankLogger", "get_logger"]


@final
class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger that writes on the main process only; see `get_logger`."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: set[str] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, like ``logging.Logger.log``.

        Args:
            level: a level of `logging`.
            msg: the message.
            args: arguments for the message's placeholders.
            kwargs: options of `logging`; ``main_process_only=False``: every process writes; ``in_order=True``: all
                processes write one after the other, in a collective call.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        # Records name the line of the caller, and not this file.
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        environment = Environment.detect()
        message, options = self.process(str(msg), kwargs)
        if not in_order:
            if not main_process_only or environment.rank == 0:
                self.logger.log(level, message, *args, **options)
            return
        for rank in range(environment.world_size):
            if rank == environment.rank:
                self.logger.log(level, message, *args, **options)
            # On all processes, also those that have written: each turn ends for all at once.
            if dist.is_initialized():
                dist.barrier()

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning once for each set of arguments."""
        key = repr((args, kwargs))
        if key in self._warned:
            return
        self._warned.add(key)
        self.warning(*args, **{"stacklevel": 3, **kwargs})

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message unchanged."""
        return msg, kwargs


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a logger that writes on the main process only, unless a call passes ``main_process_only=False``.

    Args:
        name: a name for ``logging.getLogger``.
        log_level: a level such as ``"INFO"``; by default the value of ``ACCELERATE_LOG_LEVEL``.

    Example:
        >>> get_logger(__name__).warning("printed once", main_process_only=True)
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return RankLogger(logger)
