"""Python's logging among several processes."""

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
        """As ``logging.Logger.log``.

        Args:
            level: of `logging`.
            msg: the message.
            args: go into the message.
            kwargs: of `logging`, and ``main_process_only`` (True), ``in_order``: False and False, every process
                writes as it comes; ``in_order=True``: one after the other, and every process calls it.
        """
        only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        here = Environment.detect()
        message, options = self.process(str(msg), kwargs)
        if not in_order:
            if not only or here.rank == 0:
                self.logger.log(level, message, *args, **options)
            return
        for rank in range(here.world_size):
            if rank == here.rank:
                self.logger.log(level, message, *args, **options)
            if dist.is_initialized():
                dist.barrier()

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """``warning``, once for the same arguments."""
        if (key := repr((args, kwargs))) not in self._warned:
            self._warned.add(key)
            self.warning(*args, **{"stacklevel": 3, **kwargs})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message as it is."""
        return msg, kwargs


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """``logging.getLogger(name)`` that writes once, on the main process, unless ``main_process_only=False`` is passed.

    Args:
        name: as in `logging`.
        log_level: ``"INFO"`` and so on; by default what ``ACCELERATE_LOG_LEVEL`` says.

    Example:
        >>> get_logger(__name__).warning("printed once", main_process_only=True)
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return RankLogger(logger)
