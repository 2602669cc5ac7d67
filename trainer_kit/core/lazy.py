"""Lazy imports: names imported at first use, module paths of other libraries, aliases of packages; lazy attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = [
    "NameLookup",
    "alias_package",
    "argument_rows",
    "find_names",
    "lazy_names",
    "locate_names",
    "other_names",
    "replaceable",
]

NameLookup: TypeAlias = Callable[[str], Any]
"""A module's ``__getattr__``: the object of a name, of any type."""

if TYPE_CHECKING:
    # Type checkers know the type of a property only under this name.
    replaceable = property
else:

    class replaceable(property):
        """A property in whose place a subclass or a callback of a user may set an attribute of the same name.

        Example:
            >>> class Run:
            ...     @replaceable
            ...     def history(self):
            ...         return "computed"
            >>> run = Run()
            >>> run.history
            'computed'
            >>> run.history = []
            >>> run.history
            []
        """

        def __get__(self, instance, owner=None):
            attributes = getattr(instance, "__dict__", {})
            if self.fget.__name__ in attributes:
                return attributes[self.fget.__name__]
            return super().__get__(instance, owner)

        def __set__(self, instance, value):
            instance.__dict__[self.fget.__name__] = value


class _Row(Protocol):
    """What a table has on an argument that is missing here, as `Replaced` does."""

    instead: str
    same: tuple[object, ...]


class _Table(Protocol):
    """A module of `find_names`."""

    LIBRARY: str
    PATHS: Mapping[str, Mapping[str, str]]
    ELSEWHERE: Mapping[str, str]
    ARGUMENTS: Mapping[str, Mapping[str, _Row]]


def locate_names(homes: Mapping[str, str]) -> dict[str, str]:
    """Where each name of a table is defined, as ``module:name``, sorted by name.

    Args:
        homes: for each module the names that it defines, separated by spaces; ``new=old`` gives ``old`` another name.

    Example:
        >>> locate_names({"core.module": "TrainModule LightningModule=TrainModule"})
        {'LightningModule': 'core.module:TrainModule', 'TrainModule': 'core.module:TrainModule'}
    """
    locations: dict[str, str] = {}
    for module, entries in homes.items():
        for entry in entries.split():
            name, _, original = entry.partition("=")
            locations[name] = f"{module}:{original or name}"
    return dict(sorted(locations.items()))


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[NameLookup, Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package whose names are imported at first use.

    The table is the only place where a public name is written by hand: ``__all__`` is its names, sorted, and
    ``docs/generate_stubs.py`` writes the ``__init__.pyi`` that type checkers read.

    Args:
        package: its ``__name__``.
        homes: the table, as in `locate_names`; ``".x.y"`` is the module ``x.y`` beside the package, and the names of
            the module ``""`` are modules of the package.

    Example:
        >>> find, names = lazy_names("urllib", {"parse": "urlparse split=urlsplit", "": "error"})
        >>> find("urlparse").__module__, find("split").__name__, find("error").__name__
        ('urllib.parse', 'urlsplit', 'urllib.error')
        >>> names()
        ['error', 'split', 'urlparse']
    """
    locations = locate_names(homes)
    otherwise = other_names(package)

    def find(name: str) -> Any:
        if name not in locations:
            return otherwise(name)
        module, _, attribute = locations[name].partition(":")
        value: object = import_module(f".{module or name}", package)
        if module:
            value = getattr(value, attribute)
        # Looked up once: Python calls this only for names that the package does not have yet.
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        return list(locations)

    return find, names


def find_names(package: str, tables: Sequence[str], former: str) -> None:
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
        former: a module like these, whose ``PATHS`` are those of the package's earlier versions. They can be imported,
            and no error suggests one.
    """
    finder = _OtherPaths(package, tables, former)
    _FINDERS[package] = finder
    # Last, since an existing module takes precedence over a path in a table.
    sys.meta_path.append(finder)


def other_names(module: str) -> NameLookup:
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
        # Python looks some names with underscores up in every module.
        if finder is None or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return finder.get(module, name)

    return find


def argument_rows(module: str, owners: Sequence[str]) -> Mapping[str, _Row]:
    """Look up the arguments of other libraries that are missing here, by name.

    Args:
        module: a module of the package whose tables are read.
        owners: names of classes, or of one method; the rows of an earlier one have priority.
    """
    finder = _FINDERS.get(module.partition(".")[0])
    rows: dict[str, _Row] = {}
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
    # First, since Python's own finder would load the files of the alias a second time.
    sys.meta_path.insert(0, _Alias(alias, package))


@final
class _Alias(MetaPathFinder, Loader):
    """Finds the modules of an alias: each is the module of the real package."""

    def __init__(self, alias: str, package: str) -> None:
        self._alias = alias
        self._package = package
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{self._alias}."):
            return ModuleSpec(fullname, self)
        return None

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

    def __init__(self, package: str, tables: Sequence[str], former: str) -> None:
        self._package = package
        self._names = tables
        self._former_name = former
        self._messages: dict[tuple[str, str], str] = {}

    @cached_property
    def _room(self) -> str:
        """The name of the package with the tables, which need not be installed."""
        room = self._former_name.partition(".")[0]
        return f"{self._package}.{room}"

    @cached_property
    def _is_installed(self) -> bool:
        try:
            return find_spec(self._room) is not None
        except ModuleNotFoundError:
            return False

    @cached_property
    def _tables(self) -> list[_Table]:
        tables: list[Any] = []
        if not self._is_installed:
            return tables
        for name in self._names:
            tables.append(import_module(f"{self._package}.{name}"))
        return tables

    @cached_property
    def _former_paths(self) -> Mapping[str, Mapping[str, str]]:
        if not self._is_installed:
            return {}
        paths: Mapping[str, Mapping[str, str]] = import_module(
            f"{self._package}.{self._former_name}"
        ).PATHS
        return paths

    @cached_property
    def paths(self) -> dict[str, dict[str, str]]:
        """The merged ``PATHS`` of all tables, and of the former paths."""
        merged: dict[str, dict[str, str]] = {}
        for paths in [*(table.PATHS for table in self._tables), self._former_paths]:
            for path, homes in paths.items():
                merged.setdefault(path, {}).update(homes)
        return merged

    def arguments(self, owner: str) -> dict[str, _Row]:
        """The rows of all tables for a class or method."""
        rows: dict[str, _Row] = {}
        for table in self._tables:
            rows.update(table.ARGUMENTS.get(owner, {}))
        return rows

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        module, _, name = fullname.rpartition(".")
        if fullname.partition(".")[0] != self._package or not module:
            return None
        # The room of the tables is not installed: to look into them would lead here again.
        if fullname == self._room:
            return None
        # As a package, for there may be paths below it.
        if self._relative(fullname) in self.paths:
            return ModuleSpec(fullname, self, is_package=True)
        # `importlib.util.find_spec` expects None for a module that does not exist.
        if not _imports():
            return None
        # `from module import name` calls this after `__getattr__`, whose message Python discards. It discards this one
        # too if the error names the module that is being imported.
        raise ModuleNotFoundError(self._missing(module, name), name=module)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        libraries = " and ".join(table.LIBRARY for table in self._tables)
        return _Names(spec.name, f"Names of {libraries}, and their homes.")

    def exec_module(self, module: ModuleType) -> None:
        homes = self._homes(module.__name__)
        names = [name for name in homes if not name.startswith("__")]
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
        # A submodule is an attribute before its first import too, as in the libraries whose names these are.
        submodule = f"{module}.{name}"
        if submodule in sys.modules or self._relative(submodule) in self.paths:
            return import_module(submodule)
        if _has_file(module, name):
            return import_module(submodule)
        raise AttributeError(self._missing(module, name))

    def _relative(self, module: str) -> str:
        """The path of a module without the name of the package."""
        return module[len(self._package) + 1 :]

    def _homes(self, module: str) -> dict[str, str]:
        return self.paths.get(self._relative(module), {})

    def _has(self, path: str, module: ModuleType, name: str) -> bool:
        """Whether the module at a path is a package directly below ours, with this public name."""
        if path.rpartition(".")[0] != self._package or "__path__" not in vars(module):
            return False
        return name in vars(module).get("__all__", ())

    def _packages_with(self, name: str) -> list[str]:
        """The packages from which a name can be imported, the best one first."""
        packages = []
        if name in dir(sys.modules[self._package]):
            packages.append(self._package)
        for path, module in sys.modules.items():
            if self._has(path, module, name):
                packages.append(path)
        for path, homes in self.paths.items():
            if name in homes and path not in self._former_paths:
                packages.append(f"{self._package}.{path}")
        return packages

    def _missing(self, module: str, name: str) -> str:
        # jsonargparse asks for a few names hundreds of times per command line, and discards the error.
        message = self._messages.get((module, name))
        if message is None:
            message = self._describe_missing(module, name)
            self._messages[module, name] = message
        return message

    def _describe_missing(self, module: str, name: str) -> str:
        problem = f"module {module!r} has no attribute {name!r}"
        path = self._relative(f"{module}.{name}")
        for table in self._tables:
            fix = table.ELSEWHERE.get(path) or table.ELSEWHERE.get(name)
            if fix:
                owner = f"a name of {table.LIBRARY}"
                return str(ConfigurationError(problem, found=owner, fix=fix))
        packages = self._packages_with(name)
        if packages:
            fix = f"from {packages[0]} import {name}"
            return str(ConfigurationError(problem, fix=fix))
        loaded = import_module(module)
        names = getattr(loaded, "__all__", None) or dir(loaded)
        fix = did_you_mean(name, names, f"dir({module}) lists its names")
        return str(ConfigurationError(problem, fix=fix))


def _has_file(package: str, name: str) -> bool:
    """Whether a package contains a module of this name; the search imports nothing."""
    directories = vars(sys.modules[package]).get("__path__")
    if directories is None:
        return False
    return PathFinder.find_spec(f"{package}.{name}", directories) is not None


def _imports() -> bool:
    """Whether an import calls the finder, and not a question such as `importlib.util.find_spec`, which expects None.

    The finder gets the same arguments in both cases; only the calling function of Python's import system differs.
    """
    search = sys._getframe(2)
    if search.f_globals.get("__name__") != "importlib._bootstrap":
        return False
    caller = search.f_back
    return caller is not None and caller.f_code.co_name == "_find_and_load_unlocked"


_FINDERS: dict[str, _OtherPaths] = {}


@final
class _Names(ModuleType):
    """A module from a table; it can be called if the table has a function for its path."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        finder = _FINDERS[self.__name__.partition(".")[0]]
        return finder.get(self.__name__, "__call__")(*args, **kwargs)
