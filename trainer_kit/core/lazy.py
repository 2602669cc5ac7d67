"""Packages whose modules are imported when one of their names is first asked for, and second names of packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

__all__ = ["alias_package", "lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str], elsewhere: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package whose names are imported when they are first used.

    Args:
        package: its ``__name__``.
        homes: by name the module in it; ``".x.y"`` is the module ``x.y`` beside it.
        elsewhere: names that another library has and this package does not, with what to use instead. Asking for one
            is an ImportError: ``from package import name`` would drop the text of an AttributeError.

    Example:
        >>> find, names = lazy_names("urllib", {"urlparse": "parse"})
        >>> find("urlparse").__module__, "urlparse" in names()
        ('urllib.parse', True)
    """

    def find(name: str) -> Any:
        if name in (elsewhere or {}):
            raise ImportError(f"{package} has no {name}: {(elsewhere or {})[name]}", name=package)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{homes[name]}", package), name)

    def names() -> list[str]:
        return list(getattr(import_module(package), "__all__", homes))

    return find, names


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
