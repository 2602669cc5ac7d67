"""Hyperparameters: the arguments of a constructor, kept as data."""

from __future__ import annotations

import ast
import copy
import csv
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.types import HyperParameters, Keywords

__all__ = [
    "HParams",
    "HParamsMixin",
    "classmethod_only",
    "construct",
    "constructor_arguments",
    "read_hparams",
]


_Built = TypeVar("_Built")


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
            # AttributeError, which ``hasattr`` and ``copy`` expect.
            names = ", ".join(self)
            if not names:
                names = "none (self.save_hyperparameters() in __init__ collects its arguments)"
            raise AttributeError(
                f"no hyperparameter {name!r}; there are: {names}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def constructor_arguments(
    owner: object, frame: FrameType, ignore: Iterable[str] = ()
) -> Keywords:
    """The arguments of the running constructors of ``owner``, from ``frame`` outwards.

    Args:
        owner: the object under construction.
        frame: the frame of an ``__init__`` of ``owner``; subclasses' constructors around it are collected too.
        ignore: names to leave out.
    """
    collected: Keywords = {}
    current: FrameType | None = frame
    while current is not None and current.f_code.co_name == "__init__":
        info = inspect.getargvalues(current)
        # The constructor of another object, which builds this one as a part of itself.
        if not info.args or info.locals.get(info.args[0]) is not owner:
            break
        # An outer constructor belongs to the subclass, which the user called: its values replace those of inner ones.
        for name in info.args[1:]:
            # The constructor may have deleted it.
            if name in info.locals:
                collected[name] = info.locals[name]
        # `getargvalues` does not list keyword-only arguments; in the code object they follow the positional ones.
        code = current.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        keyword_only = code.co_varnames[code.co_argcount : count]
        for name in keyword_only:
            collected[name] = info.locals[name]
        if info.keywords is not None:
            collected.update(info.locals.get(info.keywords, {}))
        current = current.f_back
    skip = set(ignore)
    return {name: value for name, value in collected.items() if name not in skip}


def construct(
    cls: type[_Built], hparams: HyperParameters, arguments: Mapping[str, object]
) -> _Built:
    """Create a module or datamodule from the hyperparameters of a checkpoint.

    Args:
        cls: its class; hyperparameters that its constructor does not take are ignored.
        hparams: the hyperparameters of the checkpoint.
        arguments: of the caller, which take precedence over them.

    Raises:
        ConfigurationError: the checkpoint has only the repr of an argument.
    """
    accepted = {name: value for name, value in hparams.items() if _takes(cls, name)}
    # A checkpoint has the repr of a value that it could not store: the constructor must not get it for the value.
    reprs = [name for name in accepted if _is_repr(accepted[name])]
    reprs = [name for name in reprs if name not in arguments]
    if reprs:
        raise ConfigurationError(
            f"the checkpoint holds only the repr of these hyperparameters: {', '.join(reprs)}",
            found=", ".join(f"{name}={hparams[name]['repr']}" for name in reprs),
            fix=f"pass them: {_example_call(reprs)}",
        )
    values = {**accepted, **arguments}
    absent = [name for name in _required(cls) if name not in values]
    if absent:
        raise ConfigurationError(
            f"the checkpoint has no value for these arguments of {cls.__name__}: {', '.join(absent)}",
            found=f"hyperparameters: {', '.join(map(str, hparams)) or 'none'}",
            fix=f"pass them: {_example_call(absent)}; or call"
            " self.save_hyperparameters() in __init__, so that checkpoints hold them",
        )
    return cls(**values)


def _example_call(names: Iterable[str]) -> str:
    arguments = ", ".join(f"{name}=..." for name in names)
    return f"load_from_checkpoint(path, {arguments})"


def _required(cls: type) -> list[str]:
    """The arguments of a constructor that have a name and no default."""
    names = []
    for name, parameter in inspect.signature(cls).parameters.items():
        named = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if parameter.default is parameter.empty and parameter.kind in named:
            names.append(name)
    return names


# Type checkers know the signatures behind ``classmethod``, and none behind a subclass of it.
if TYPE_CHECKING:
    classmethod_only = classmethod
else:

    class classmethod_only(classmethod):
        """A classmethod that refuses a call on an object: the caller would take the object for the result."""

        def __get__(self, instance, owner=None):
            if instance is None:
                return super().__get__(instance, owner)
            name = self.__func__.__name__
            kind = type(instance).__name__

            def refuse(*args, **kwargs):
                raise ConfigurationError(
                    f"{name} creates a new object, and does not change this one",
                    found=f"a call on an object of {kind}",
                    fix=f"call it on the class, and keep the result: {kind}.{name}(...)",
                )

            return refuse


def _is_repr(value: object) -> bool:
    """Whether this is the repr of a hyperparameter that could not be stored."""
    return isinstance(value, dict) and value.keys() == {"repr"}


def _takes(cls: type, name: str) -> bool:
    parameters = inspect.signature(cls).parameters
    if name in parameters:
        return True
    # ``**kwargs`` takes any name.
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def read_hparams(path: str | PathLike[str]) -> dict[str, object]:
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
    if file.suffix.lower() == ".csv":
        rows = [row for row in csv.reader(text.splitlines()) if len(row) == 2]
        hparams = {key: _literal(value) for key, value in rows}
        # The header of the table.
        hparams.pop("key", None)
        return hparams
    import yaml

    from trainer_kit.core.yaml_guard import YamlProblem, guarded_root

    try:
        # First: a few nested aliases may expand to more values than memory holds.
        guarded_root(text)
        content: object = yaml.safe_load(text)
    except (YamlProblem, yaml.YAMLError) as error:
        raise ConfigurationError(
            "hparams_file must be YAML of plain values",
            found=f"{file}: {error}",
            fix="leave objects out of it, and pass them as keyword arguments",
        ) from error
    if not isinstance(content, Mapping):
        raise ConfigurationError(
            "hparams_file holds no mapping of names to values",
            found=f"{file}: a {type(content).__name__}",
        )
    return {str(name): value for name, value in content.items()}


def _literal(text: str) -> object:
    """The value of a cell: a number, a list and so on as Python writes it, else the text itself."""
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


class HParamsMixin:
    """``save_hyperparameters`` and ``hparams``, for modules and datamodules."""

    def save_hyperparameters(
        self,
        *names: str | HyperParameters,
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
        skip = set(ignore or ())
        if isinstance(ignore, str):
            skip = {ignore}
        ignored: set[str] = self.__dict__.setdefault("_hparams_ignored", set())
        ignored |= skip
        constructor = frame or _caller()
        holder: str | None = None
        if len(names) == 1 and not isinstance(names[0], str):
            values = dict(_as_mapping(names[0]))
            for name in skip:
                values.pop(name, None)
            # The checkpoint records which argument held them, so that a load passes the mapping under that name.
            arguments = constructor_arguments(self, constructor)
            holders = [key for key, value in arguments.items() if value is names[0]]
            holder = next(iter(holders), None)
        else:
            values = constructor_arguments(self, constructor, skip)
            if names:
                values = _select(type(self), values, list(map(str, names)))
        self.__dict__["_hparams_name"] = holder
        # Named by the caller, whatever another class ignores.
        if names:
            ignored -= values.keys()
        values = {name: value for name, value in values.items() if name not in ignored}
        hparams = self.__dict__.setdefault("_hparams", HParams())
        initial = self.__dict__.setdefault("_hparams_initial", HParams())
        # The constructor of a base class may have saved them.
        for name in ignored:
            hparams.pop(name, None)
            initial.pop(name, None)
        # Copies in the second one: later changes of a list in ``hparams`` do not reach it.
        hparams.update(values)
        initial.update({name: _snapshot(value) for name, value in values.items()})
        self.__dict__["_log_hparams"] = logger

    @property
    def hparams(self) -> HParams:
        """The hyperparameters kept by ``save_hyperparameters``."""
        hparams: HParams = self.__dict__.setdefault("_hparams", HParams())
        return hparams

    @property
    def hparams_name(self) -> str | None:
        """The constructor's argument whose content `hparams` holds; None if they are arguments themselves."""
        name: str | None = self.__dict__.get("_hparams_name")
        return name

    @property
    def hparams_initial(self) -> HParams:
        """A copy of what ``save_hyperparameters`` kept, without later changes of ``hparams``."""
        initial = self.__dict__.get("_hparams_initial", {})
        return HParams({name: _snapshot(value) for name, value in initial.items()})


def _select(
    cls: type, arguments: Mapping[str, object], names: list[str]
) -> dict[str, object]:
    """The arguments of these names, each of which the constructor must take."""
    for name in names:
        if name not in arguments:
            raise ConfigurationError(
                f"save_hyperparameters: {cls.__name__} is not constructed with {name!r}",
                found=f"its arguments: {', '.join(arguments) or 'none'}",
                fix=did_you_mean(name, arguments),
            )
    return {name: arguments[name] for name in names}


def _snapshot(value: object) -> object:
    """A copy of a container, which later changes do not affect; any other object itself."""
    if not isinstance(value, (dict, list, set)):
        return value
    # It may contain objects that cannot be copied.
    with suppress(Exception):
        return copy.deepcopy(value)
    return value


def _caller() -> FrameType:
    """The frame that called the caller of this function."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    assert frame.f_back.f_back is not None
    return frame.f_back.f_back


def _as_mapping(values: object) -> HyperParameters:
    """A mapping itself, or the attributes of a namespace, such as that of ``argparse``."""
    if isinstance(values, Mapping):
        return values
    return vars(values)
