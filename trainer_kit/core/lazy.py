"""Lazy imports: names imported at first use, module paths of other libraries, and aliases of packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = ["alias_package", "argument_rows", "find_names", "lazy_names", "other_names"]


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package whose names are imported at first use.

    Args:
        package: its ``__name__``.
        homes: for each name, its module in the package; ``".x.y"`` is the module ``x.y`` beside the package.

    Example:
        >>> find, names = lazy_names("urllib", {"urlparse": "parse"})
        >>> find("urlparse").__module__, "urlparse" in names()
        ('urllib.parse', True)
    """
    otherwise = other_names(package)

    def find(name: str) -> Any:
        return (
            getattr(import_module(f".{homes[name]}", package), name)
            if name in homes
            else otherwise(name)
        )

    def names() -> list[str]:
        return list(getattr(import_module(package), "__all__", homes))

    return find, names


def find_names(package: str, tables: Sequence[str]) -> None:
    """Make module paths and names of other libraries importable from a package.

    Each table is a module with four constants. ``LIBRARY`` names the library. ``PATHS`` maps each module path to its
    names and where they are defined: ``{"utilities.types": {"STEP_OUTPUT": "compat.types:STEP_OUTPUT"}}``, all relative
    to the package. ``ELSEWHERE`` maps each missing name, ``"Fabric"`` or with its path ``"cli.Fabric"``, to what to use
    instead. ``ARGUMENTS`` does the same for arguments, see `argument_rows`. An existing module takes precedence over a
    path in a table; with `other_names` it has the names of that path too. Modules are attributes of their packages,
    imported or not: ``package.callbacks.early_stopping``. A path with an entry ``__call__`` is a module that can be
    called like that function.

    Args:
        package: its ``__name__``.
        tables: modules in it, such as ``"compat.lightning_names"``; they are imported when a lookup fails.
    """
    _FINDERS[package] = finder = _OtherPaths(package, tables)
    sys.meta_path.append(finder)


def other_names(module: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module: resolves names of other libraries, and suggests a fix for unknown ones.

    Args:
        module: its ``__name__``.

    Example:
        >>> other_names("trainer_kit.core")("LightningModule").__name__
        'TrainModule'
        >>> other_names("trainer_kit.callbacks")("EarlyStoping")
        Traceback (most recent call last):
        AttributeError: module 'trainer_kit.callbacks' has no attribute 'EarlyStoping'
          fix:   did you mean 'EarlyStopping'?
    """

    def find(name: str) -> Any:
        finder = _FINDERS.get(module.partition(".")[0])
        if finder is None or name.startswith(
            "__"
        ):  # Python looks some of these up in every module
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return finder.get(module, name)

    return find


def argument_rows(module: str, owners: Sequence[str]) -> Mapping[str, Any]:
    """Look up the arguments of other libraries that are missing here, by name.

    Args:
        module: a module of the package whose tables are read.
        owners: names of classes, or of one method; the rows of an earlier one have priority.
    """
    finder = _FINDERS.get(module.partition(".")[0])
    rows: dict[str, Any] = {}
    if finder is None:
        return rows
    for owner in owners:
        rows = {**finder.arguments(owner), **rows}
    return rows


def alias_package(alias: str, package: str) -> None:
    """Make ``alias`` another name of ``package`` and its modules.

    A package imported under two names exists twice, and ``isinstance`` fails between the copies. The alias calls this
    before any other import; imports under its name then return the modules of ``package``.

    Args:
        alias: the ``__name__`` under which the package is being imported.
        package: its real name.
    """
    sys.modules[alias] = import_module(package)
    sys.meta_path.insert(0, _Alias(alias, package))


@final
class _Alias(MetaPathFinder, Loader):
    """Finds the modules of an alias: each is the module of the real package."""

    def __init__(self, alias: str, package: str) -> None:
        self._alias, self._package = alias, package
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return (
            ModuleSpec(fullname, self)
            if fullname.startswith(f"{self._alias}.")
            else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._package + spec.name[len(self._alias) :])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's spec by the alias's: restore it.
        alias = module.__spec__
        assert alias is not None
        module.__spec__ = self._specs.pop(alias.name)


@final
class _OtherPaths(MetaPathFinder, Loader):
    """Finds the modules in the tables of `find_names`; its errors for unknown modules suggest a fix."""

    def __init__(self, package: str, tables: Sequence[str]) -> None:
        self._package, self._names = package, tables

    @cached_property
    def _tables(self) -> list[Any]:
        return [import_module(f"{self._package}.{name}") for name in self._names]

    @cached_property
    def paths(self) -> dict[str, dict[str, str]]:
        """The merged ``PATHS`` of all tables."""
        merged: dict[str, dict[str, str]] = {}
        for table in self._tables:
            for path, homes in table.PATHS.items():
                merged.setdefault(path, {}).update(homes)
        return merged

    def arguments(self, owner: str) -> dict[str, Any]:
        """The rows of all tables for a class or method."""
        rows: dict[str, Any] = {}
        for table in self._tables:
            rows.update(table.ARGUMENTS.get(owner, {}))
        return rows

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module, _, name = fullname.rpartition(".")
        if fullname.partition(".")[0] != self._package or not module:
            return None
        if fullname[len(self._package) + 1 :] in self.paths:
            return ModuleSpec(fullname, self, is_package=True)
        if not _imports():
            return None
        # `from module import name` calls this after `__getattr__`, whose message Python discards. It discards this one
        # too if the error names the module that is being imported.
        raise ModuleNotFoundError(self._missing(module, name), name=module)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(
            spec.name,
            f"Names of {' and '.join(table.LIBRARY for table in self._tables)}, and their homes.",
        )

    def exec_module(self, module: ModuleType) -> None:
        names = [
            name for name in self._homes(module.__name__) if not name.startswith("__")
        ]
        vars(module).update(
            __getattr__=other_names(module.__name__),
            __all__=names,
            __dir__=lambda: names,
        )

    def get(self, module: str, name: str) -> Any:
        """Look up a name of a module: an entry of a table, or a submodule.

        Raises:
            AttributeError: there is none; the message suggests a fix.
        """
        home = self._homes(module).get(name)
        if home is not None:
            path, _, attribute = home.partition(":")
            return getattr(import_module(f"{self._package}.{path}"), attribute)
        below = f"{module}.{name}"
        if (
            below in sys.modules
            or below[len(self._package) + 1 :] in self.paths
            or _has_file(module, name)
        ):
            return import_module(below)
        raise AttributeError(self._missing(module, name))

    def _homes(self, module: str) -> dict[str, str]:
        return self.paths.get(module[len(self._package) + 1 :], {})

    def _has(self, room: str, found: Any, name: str) -> bool:
        """Whether a package directly below ours has this public name."""
        below = room.rpartition(".")[0] == self._package and "__path__" in vars(found)
        return below and name in vars(found).get("__all__", ())

    def _missing(self, module: str, name: str) -> str:
        problem = f"module {module!r} has no attribute {name!r}"
        path = f"{module}.{name}"[len(self._package) + 1 :]
        for table in self._tables:
            fix = table.ELSEWHERE.get(path) or table.ELSEWHERE.get(name)
            if fix:
                return str(
                    ConfigurationError(
                        problem, found=f"a name of {table.LIBRARY}", fix=fix
                    )
                )
        there = [self._package] if name in dir(sys.modules[self._package]) else []
        there += [
            room for room, found in sys.modules.items() if self._has(room, found, name)
        ]
        there += [
            f"{self._package}.{path}"
            for path, homes in self.paths.items()
            if name in homes
        ]
        if there:
            return str(
                ConfigurationError(problem, fix=f"from {there[0]} import {name}")
            )
        here = import_module(module)
        known = getattr(here, "__all__", None) or dir(here)
        return str(
            ConfigurationError(
                problem, fix=did_you_mean(name, known, f"dir({module}) lists its names")
            )
        )


def _has_file(package: str, name: str) -> bool:
    """Whether a package contains a module of this name; the search imports nothing."""
    directories = vars(sys.modules[package]).get("__path__")
    return (
        directories is not None
        and PathFinder.find_spec(f"{package}.{name}", directories) is not None
    )


def _imports() -> bool:
    """Whether an import calls the finder, and not a question such as `importlib.util.find_spec`, which expects None.

    The finder gets the same arguments in both cases; only the calling function of Python's import system differs.
    """
    search = sys._getframe(2)
    if (
        search.f_globals.get("__name__") != "importlib._bootstrap"
        or search.f_back is None
    ):
        return False
    return search.f_back.f_code.co_name == "_find_and_load_unlocked"


_FINDERS: dict[str, _OtherPaths] = {}


@final
class _Names(ModuleType):
    """A module from a table; it can be called if the table has a function for its path."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        finder = _FINDERS[self.__name__.partition(".")[0]]
        return finder.get(self.__name__, "__call__")(*args, **kwargs)
