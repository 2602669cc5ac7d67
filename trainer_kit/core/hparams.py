"""Hyperparameters: the arguments of a constructor, kept as data."""

from __future__ import annotations

import ast
import copy
import csv
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = [
    "HParams",
    "HParamsMixin",
    "classmethod_only",
    "construct",
    "constructor_arguments",
    "read_hparams",
]


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
            known = (
                ", ".join(self)
                or "none (self.save_hyperparameters() in __init__ collects its arguments)"
            )
            raise AttributeError(
                f"no hyperparameter {name!r}; there are: {known}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def constructor_arguments(
    owner: object, frame: FrameType, ignore: Iterable[str] = ()
) -> dict[str, Any]:
    """The arguments of the running constructors of ``owner``, from ``frame`` outwards.

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
        arguments = {
            name: info.locals[name] for name in info.args[1:] if name in info.locals
        }
        code = current.f_code
        for name in code.co_varnames[
            code.co_argcount : code.co_argcount + code.co_kwonlyargcount
        ]:
            arguments[name] = info.locals[name]
        if info.keywords is not None:
            arguments.update(info.locals.get(info.keywords, {}))
        found.update(
            arguments
        )  # an outer constructor belongs to the subclass: the user called it
        current = current.f_back
    skip = set(ignore)
    return {name: value for name, value in found.items() if name not in skip}


def construct(cls: type, hparams: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Make a module or datamodule from the hyperparameters of a checkpoint.

    Args:
        cls: its class; hyperparameters that its constructor does not take are ignored.
        hparams: the hyperparameters of the checkpoint.
        given: arguments that take precedence over them.

    Raises:
        ConfigurationError: the checkpoint has only the repr of an argument.
    """
    taken = {name: value for name, value in hparams.items() if _takes(cls, name)}
    missing = [
        name for name, value in taken.items() if _is_repr(value) and name not in given
    ]
    if missing:
        raise ConfigurationError(
            f"the checkpoint holds only the repr of these hyperparameters: {', '.join(missing)}",
            found=", ".join(f"{name}={hparams[name]['repr']}" for name in missing),
            fix=f"pass them: load_from_checkpoint(path, {', '.join(f'{name}=...' for name in missing)})",
        )
    needed = [
        one.name
        for one in inspect.signature(cls).parameters.values()
        if one.default is one.empty
        and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    absent = [name for name in needed if name not in taken and name not in given]
    if absent:
        raise ConfigurationError(
            f"the checkpoint has no value for these arguments of {cls.__name__}: {', '.join(absent)}",
            found=f"hyperparameters: {', '.join(map(str, hparams)) or 'none'}",
            fix=f"pass them: load_from_checkpoint(path, {', '.join(f'{name}=...' for name in absent)}); or call"
            " self.save_hyperparameters() in __init__, so that checkpoints hold them",
        )
    return cls(**{**taken, **given})


if TYPE_CHECKING:
    classmethod_only = classmethod
else:

    class classmethod_only(classmethod):
        """A classmethod that refuses a call on an object: the caller would take the object for the result."""

        def __get__(self, instance, owner=None):
            if instance is None:
                return super().__get__(instance, owner)
            name, kind = self.__func__.__name__, type(instance).__name__

            def refuse(*args, **kwargs):
                raise ConfigurationError(
                    f"{name} creates a new object, and does not change this one",
                    found=f"a call on an object of {kind}",
                    fix=f"call it on the class, and keep the result: {kind}.{name}(...)",
                )

            return refuse


def _is_repr(value: Any) -> bool:
    """Whether this is the repr of a hyperparameter that could not be stored."""
    return isinstance(value, dict) and value.keys() == {"repr"}


def _takes(cls: type, name: str) -> bool:
    parameters = inspect.signature(cls).parameters
    return name in parameters or any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    )


def read_hparams(path: Any) -> dict[str, Any]:
    """The hyperparameters in a file: YAML or JSON of plain values, or a CSV file of keys and values.

    Args:
        path: ends in ``.yaml``, ``.yml``, ``.json`` or ``.csv``, as the files that loggers write.

    Raises:
        ConfigurationError: the file is missing or has another format, or its YAML constructs objects.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "hparams_file cannot be read", found=f"{file}: {error}"
        ) from error
    found: Any
    if file.suffix.lower() == ".csv":
        found = {
            row[0]: _literal(row[1])
            for row in csv.reader(text.splitlines())
            if len(row) == 2
        }
        found.pop("key", None)  # the header
        return dict(found)
    import yaml

    from trainer_kit.core.yaml_guard import YamlProblem, guarded_root

    try:
        guarded_root(text)
        found = yaml.safe_load(text)
    except (YamlProblem, yaml.YAMLError) as error:
        raise ConfigurationError(
            "hparams_file must be YAML of plain values",
            found=f"{file}: {error}",
            fix="leave objects out of it, and pass them as keyword arguments",
        ) from error
    if not isinstance(found, Mapping):
        raise ConfigurationError(
            "hparams_file holds no mapping of names to values",
            found=f"{file}: a {type(found).__name__}",
        )
    return {str(name): value for name, value in found.items()}


def _literal(text: str) -> Any:
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


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
            ignore: names to leave out, also for the other classes of this object that save hyperparameters.
            frame: the constructor's frame, if it is not the caller's.
            logger: whether to log them.

        Raises:
            ConfigurationError: the constructor does not take a name, or the name is also ignored.
        """
        skip = {ignore} if isinstance(ignore, str) else set(ignore or ())
        ignored: set[str] = self.__dict__.setdefault("_hparams_ignored", set())
        ignored |= skip
        if len(names) == 1 and not isinstance(names[0], str):
            chosen = {
                key: value
                for key, value in _as_mapping(names[0]).items()
                if key not in skip
            }
            arguments = constructor_arguments(self, frame or _caller())
            holders = [key for key, value in arguments.items() if value is names[0]]
            self.__dict__["_hparams_name"] = next(iter(holders), None)
        else:
            self.__dict__["_hparams_name"] = None
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
        if names:  # named by the caller, whatever another class ignores
            ignored -= chosen.keys()
        chosen = {name: value for name, value in chosen.items() if name not in ignored}
        hparams = self.__dict__.setdefault("_hparams", HParams())
        initial = self.__dict__.setdefault("_hparams_initial", HParams())
        for name in ignored:  # the constructor of a base class may have saved it
            hparams.pop(name, None)
            initial.pop(name, None)
        hparams.update(chosen)
        initial.update({name: _kept(value) for name, value in chosen.items()})
        self.__dict__["_log_hparams"] = logger

    @property
    def hparams(self) -> HParams:
        """The hyperparameters kept by ``save_hyperparameters``."""
        kept: HParams = self.__dict__.setdefault("_hparams", HParams())
        return kept

    @property
    def hparams_name(self) -> str | None:
        """The constructor's argument whose content `hparams` holds; None if they are arguments themselves."""
        name: str | None = self.__dict__.get("_hparams_name")
        return name

    @property
    def hparams_initial(self) -> HParams:
        """A copy of what ``save_hyperparameters`` kept, without later changes of ``hparams``."""
        return HParams(
            {
                name: _kept(value)
                for name, value in self.__dict__.get("_hparams_initial", {}).items()
            }
        )


def _kept(value: Any) -> Any:
    """A copy of a container, which later changes do not affect; any other object itself."""
    with suppress(Exception):  # it may contain objects that cannot be copied
        return copy.deepcopy(value) if isinstance(value, (dict, list, set)) else value
    return value


def _caller() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    assert frame.f_back.f_back is not None
    return frame.f_back.f_back


def _as_mapping(values: Any) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else vars(values)
