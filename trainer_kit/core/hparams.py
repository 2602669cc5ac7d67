"""Hyperparameters: what a constructor was called with, kept as data."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = ["HParams", "HParamsMixin", "constructor_arguments"]


class HParams(dict[str, Any]):
    """A dict whose keys are attributes too.

    Example:
        >>> h = HParams(lr=0.1); h.lr, h["lr"]
        (0.1, 0.1)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def constructor_arguments(owner: object, frame: FrameType, ignore: Iterable[str] = ()) -> dict[str, Any]:
    """What the constructors of ``owner`` that are running in ``frame`` and around it were called with.

    Args:
        owner: the object under construction.
        frame: the frame of an ``__init__`` of ``owner``; subclasses' constructors around it are collected too.
        ignore: names to leave out.
    """
    found: dict[str, Any] = {}
    current: FrameType | None = frame
    while current is not None and current.f_code.co_name == "__init__":
        info = inspect.getargvalues(current)
        if not info.args or info.locals.get(info.args[0]) is not owner:
            break
        arguments = {name: info.locals[name] for name in info.args[1:] if name in info.locals}
        code = current.f_code
        for name in code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]:
            arguments[name] = info.locals[name]
        if info.keywords is not None:
            arguments.update(info.locals.get(info.keywords, {}))
        found.update(arguments)  # an outer constructor is the more derived one: what the user really passed
        current = current.f_back
    skip = set(ignore)
    return {name: value for name, value in found.items() if name not in skip}


class HParamsMixin:
    """``save_hyperparameters`` and ``hparams``, for modules and datamodules."""

    def save_hyperparameters(
        self,
        *names: str | Mapping[str, Any],
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the constructor's arguments in ``hparams``; they are logged and stored in checkpoints.

        Args:
            names: only these arguments, or one mapping of values to keep instead.
            ignore: names to leave out.
            frame: the constructor's frame, where it is not the caller's.
            logger: whether loggers get them.

        Raises:
            ConfigurationError: for a name that the constructor does not take, or that is ignored too.
        """
        skip = [ignore] if isinstance(ignore, str) else list(ignore or ())
        if len(names) == 1 and not isinstance(names[0], str):
            chosen = {key: value for key, value in _as_mapping(names[0]).items() if key not in skip}
        else:
            caller = frame or _caller()
            chosen = constructor_arguments(self, caller, skip)
            if names:
                for name in map(str, names):
                    if name not in chosen:
                        raise ConfigurationError(
                            f"save_hyperparameters: {type(self).__name__} is not constructed with {name!r}",
                            found=f"its arguments: {', '.join(chosen) or 'none'}",
                            fix=did_you_mean(name, chosen),
                        )
                chosen = {str(name): chosen[str(name)] for name in names}
        self.__dict__.setdefault("_hparams", HParams()).update(chosen)
        self.__dict__["_log_hparams"] = logger

    @property
    def hparams(self) -> HParams:
        """What ``save_hyperparameters`` kept."""
        kept: HParams = self.__dict__.setdefault("_hparams", HParams())
        return kept


def _caller() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    assert frame.f_back.f_back is not None
    return frame.f_back.f_back


def _as_mapping(values: Any) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else vars(values)
