"""Registries of plug-ins: names that a user may write instead of an object.

Each kind has a `Registry`. A name maps to an object, to a ``"package.module:Name"`` string that is imported at the
first lookup, or to an entry point of an installed package, for example in its ``pyproject.toml``::

    [project.entry-points."trainer_kit.strategies"]
    my-engine = "my_package.strategy:MyStrategy"

Registered names take precedence: entry points are searched only for names that are not registered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final, overload

from trainer_kit.core.errors import RegistryError, did_you_mean
from trainer_kit.core.types import Function

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["LOGGERS", "OPTIMIZERS", "PRECISIONS", "READERS", "STRATEGIES", "Registry"]

_Target = TypeVar("_Target")
_RegistryTarget: TypeAlias = Any
"""A class or factory of any kind, or the string from which it is imported."""


@final
class Registry:
    """The names of one kind of plug-in.

    Args:
        kind: the kind of plug-in, in the singular, for messages; the entry point group is
            ``trainer_kit.<kinds>``.

    Example:
        >>> colors = Registry("color")
        >>> colors.register("ratio", "fractions:Fraction")
        >>> @colors.register("red")
        ... def make_red():
        ...     return "#f00"
        >>> colors.get("red")(), colors.get("ratio").__name__, colors.names()
        ('#f00', 'Fraction', ['ratio', 'red'])
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        kinds = f"{kind}s"
        if kind.endswith("y"):
            kinds = f"{kind[:-1]}ies"
        self.group = f"trainer_kit.{kinds}"
        self._targets: dict[str, _RegistryTarget] = {}
        # The library's defaults, apart from the targets: names that users register take precedence.
        self._defaults: dict[str, str] = {}

    @overload
    def register(
        self, name: str, target: None = None, *, overwrite: bool = False
    ) -> Callable[[_Target], _Target]: ...
    @overload
    def register(
        self, name: str, target: Function | str, *, overwrite: bool = False
    ) -> None: ...
    def register(
        self, name: str, target: _RegistryTarget = None, *, overwrite: bool = False
    ) -> Callable[[_Target], _Target] | None:
        """Register ``target`` under a name; without a target, return a decorator that does.

        Args:
            name: the word users write.
            target: a class, a factory, or ``"package.module:Name"``, imported at the first lookup.
            overwrite: whether to replace an existing target.

        Raises:
            RegistryError: the name is taken, or the string is not of this form.
        """
        if target is None:

            def decorate(decorated: _Target) -> _Target:
                self._add(name, decorated, overwrite)
                return decorated

            return decorate
        self._add(name, target, overwrite)
        return None

    def supply(self, name: str, target: str) -> None:
        """Set the default target of a name; a target that a user registers, earlier or later, takes precedence."""
        self._defaults[name] = target

    def get(self, name: str) -> _RegistryTarget:
        """The target of ``name``, imported on first use.

        Raises:
            RegistryError: the name is not registered, two packages register it, or its import failed.
        """
        if name not in self._targets:
            # A registered name takes precedence, then the library's, then a package's: an installed package cannot
            # replace a word of the library.
            if name in self._defaults:
                self._targets[name] = self._defaults[name]
            else:
                self._targets[name] = self._load_entry_point(name)
        target = self._targets[name]
        if isinstance(target, str):
            target = self._import(name, target)
            # Once per process: the class itself replaces its address.
            self._targets[name] = target
        return target

    def names(self) -> list[str]:
        """All names, sorted: registered ones and those of installed packages, without importing them."""
        # Slow to import, and most processes never look.
        from importlib.metadata import entry_points

        installed = [entry.name for entry in entry_points(group=self.group)]
        return sorted({*self._targets, *self._defaults, *installed})

    def _add(self, name: str, target: _RegistryTarget, overwrite: bool) -> None:
        if isinstance(target, str) and not all(target.partition(":")):
            raise RegistryError(
                f"{self.kind} {name!r} cannot be imported from this string",
                found=repr(target),
                fix='write "package.module:Name"',
            )
        registered = self._targets.get(name, self._defaults.get(name))
        if registered is not None and not overwrite:
            raise RegistryError(
                f"the {self.kind} name {name!r} is already registered",
                found=f"{_describe(registered)}, then {_describe(target)}",
                fix="choose another name, or pass overwrite=True",
            )
        self._targets[name] = target

    def _import(self, name: str, target: str) -> object:
        module, _, attribute = target.partition(":")
        try:
            imported: object = importlib.import_module(module)
            for member in attribute.split("."):
                imported = getattr(imported, member)
        except Exception as error:
            # Whatever a package's import raises.
            raise RegistryError(
                f"{self.kind} {name!r} could not be imported",
                found=f"{target}: {type(error).__name__}: {error}",
            ) from error
        return imported

    def _load_entry_point(self, name: str) -> object:
        from importlib.metadata import entry_points

        # By value and package: a package that is installed twice on the path is one.
        entries = {}
        for entry in entry_points(group=self.group, name=name):
            entries[entry.value, _package(entry)] = entry
        if not entries:
            raise self._unregistered(name)
        if len(entries) > 1:
            packages = sorted(f"{package} ({value})" for value, package in entries)
            raise RegistryError(
                f"several packages register a {self.kind} called {name!r}",
                found=", ".join(packages),
                fix="uninstall all but one, or pass the object itself",
            )
        ((_, package), entry) = entries.popitem()
        try:
            return entry.load()
        except Exception as error:
            raise RegistryError(
                f"{self.kind} {name!r} could not be loaded from the package {package}",
                found=f"{entry.value}: {type(error).__name__}: {error}",
                fix=f"repair or uninstall {package}",
            ) from error

    def _unregistered(self, name: str) -> RegistryError:
        names = self.names()
        problem = f"no {self.kind} is called {name!r}"
        if not names:
            return RegistryError(problem, found="no name is registered")
        return RegistryError(
            problem,
            found=f"the names are {', '.join(names)}",
            fix=did_you_mean(name, names),
        )


def _package(entry: EntryPoint) -> str:
    if entry.dist is not None:
        return entry.dist.name
    return entry.value.partition(".")[0]


def _describe(target: object) -> str:
    if hasattr(target, "__qualname__"):
        return f"{target.__module__}:{target.__qualname__}"
    return repr(target)


STRATEGIES = Registry("strategy")
PRECISIONS = Registry("precision")
LOGGERS = Registry("logger")
READERS = Registry("reader")
OPTIMIZERS = Registry("optimizer")
