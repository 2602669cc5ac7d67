"""Names that are imported when they are first asked for, module paths of other libraries, second names of packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = ["alias_package", "find_names", "lazy_names", "other_names"]


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package whose names are imported when they are first used.

    Args:
        package: its ``__name__``.
        homes: by name the module in it; ``".x.y"`` is the module ``x.y`` beside it.

    Example:
        >>> find, names = lazy_names("urllib", {"urlparse": "parse"})
        >>> find("urlparse").__module__, "urlparse" in names()
        ('urllib.parse', True)
    """
    otherwise = other_names(package)

    def find(name: str) -> Any:
        return getattr(import_module(f".{homes[name]}", package), name) if name in homes else otherwise(name)

    def names() -> list[str]:
        return list(getattr(import_module(package), "__all__", homes))

    return find, names


def find_names(package: str, tables: Sequence[str]) -> None:
    """Let the module paths and names of other libraries be imported from a package.

    Each table is a module with three constants. ``LIBRARY`` names the library. ``PATHS`` has, by module path in it, the
    names there and their homes: ``{"utilities.types": {"STEP_OUTPUT": "compat.types:STEP_OUTPUT"}}``, all relative to
    the package. ``ELSEWHERE`` has the names that are missing here, with what to use instead: ``"Fabric"``, or with its
    path, ``"cli.Fabric"``. A module that exists comes before one in a table; `other_names` gives it the names of its
    path. A path at which the package has a function lists the function as ``__call__``: the module is called like it.

    Args:
        package: its ``__name__``.
        tables: modules in it, such as ``"compat.lightning_names"``; they are imported when a lookup fails.
    """
    _FINDERS[package] = finder = _OtherPaths(package, tables)
    sys.meta_path.append(finder)


def other_names(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that may have names of other libraries, or is asked for those that it lacks.

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
        if finder is None or name.startswith("__"):  # Python asks every module for some of these
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return finder.get(module, name)

    return find


def alias_package(alias: str, package: str) -> None:
    """Make ``alias`` another name of ``package`` and its modules.

    A package that is imported under two names exists twice, and ``isinstance`` fails between the two copies. The
    importing module calls this first: what is imported by its name afterwards is ``package`` itself.

    Args:
        alias: the ``__name__`` under which the package is being imported.
        package: its real name.
    """
    sys.modules[alias] = import_module(package)
    sys.meta_path.insert(0, _Alias(alias, package))


@final
class _Alias(MetaPathFinder, Loader):
    """Finds the modules of an alias: each is the package's own."""

    def __init__(self, alias: str, package: str) -> None:
        self._alias, self._package = alias, package
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(f"{self._alias}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._package + spec.name[len(self._alias) :])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has given the module the alias's spec: put its own back.
        alias = module.__spec__
        assert alias is not None
        module.__spec__ = self._specs.pop(alias.name)


@final
class _OtherPaths(MetaPathFinder, Loader):
    """Finds the modules of the tables of `find_names`, and answers for those that exist nowhere."""

    def __init__(self, package: str, tables: Sequence[str]) -> None:
        self._package, self._names = package, tables

    @cached_property
    def _tables(self) -> list[Any]:
        return [import_module(f"{self._package}.{name}") for name in self._names]

    @cached_property
    def paths(self) -> dict[str, dict[str, str]]:
        """By module path the homes of its names, of all tables."""
        merged: dict[str, dict[str, str]] = {}
        for table in self._tables:
            for path, homes in table.PATHS.items():
                merged.setdefault(path, {}).update(homes)
        return merged

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        module, _, name = fullname.rpartition(".")
        if fullname.partition(".")[0] != self._package or not module:
            return None
        if fullname[len(self._package) + 1 :] in self.paths:
            return ModuleSpec(fullname, self, is_package=True)
        # `from module import name` comes here after `__getattr__`, whose text Python drops. It drops this one as well
        # if the error has the name of the module that is being imported.
        raise ModuleNotFoundError(self._missing(module, name), name=module)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name, f"Names of {' and '.join(table.LIBRARY for table in self._tables)}, and their homes.")

    def exec_module(self, module: ModuleType) -> None:
        names = [name for name in self._homes(module.__name__) if not name.startswith("__")]
        vars(module).update(__getattr__=other_names(module.__name__), __all__=names, __dir__=lambda: names)

    def get(self, module: str, name: str) -> Any:
        """A name of a module: by its home, or the module below it.

        Raises:
            AttributeError: there is none, with what to use.
        """
        home = self._homes(module).get(name)
        if home is not None:
            path, _, attribute = home.partition(":")
            return getattr(import_module(f"{self._package}.{path}"), attribute)
        below = f"{module}.{name}"
        if below in sys.modules or below[len(self._package) + 1 :] in self.paths:
            return import_module(below)
        raise AttributeError(self._missing(module, name))

    def _homes(self, module: str) -> dict[str, str]:
        return self.paths.get(module[len(self._package) + 1 :], {})

    def _missing(self, module: str, name: str) -> str:
        problem = f"module {module!r} has no attribute {name!r}"
        path = f"{module}.{name}"[len(self._package) + 1 :]
        for table in self._tables:
            fix = table.ELSEWHERE.get(path) or table.ELSEWHERE.get(name)
            if fix:
                return str(ConfigurationError(problem, found=f"a name of {table.LIBRARY}", fix=fix))
        there = [self._package] if name in dir(sys.modules[self._package]) else []
        there += [f"{self._package}.{path}" for path, homes in self.paths.items() if name in homes]
        if there:
            return str(ConfigurationError(problem, fix=f"from {there[0]} import {name}"))
        here = import_module(module)
        known = getattr(here, "__all__", None) or dir(here)
        return str(ConfigurationError(problem, fix=did_you_mean(name, known, f"dir({module}) lists its names")))


_FINDERS: dict[str, _OtherPaths] = {}


@final
class _Names(ModuleType):
    """A module of a table; where the package has a function of its name, it is called like the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        finder = _FINDERS[self.__name__.partition(".")[0]]
        return finder.get(self.__name__, "__call__")(*args, **kwargs)
