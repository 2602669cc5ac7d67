"""Names: registered, lazy, and from installed packages."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from trainer_kit.core.errors import RegistryError
from trainer_kit.core.registry import LOGGERS, PRECISIONS, STRATEGIES, Registry


def install(
    root: Path,
    package: str,
    entries: str,
    source: str = "",
    group: str = "trainer_kit.engines",
) -> None:
    """Lay down a module and the metadata that an installer would write for it."""
    module = package.replace("-", "_")
    (root / f"{module}.py").write_text(source, encoding="utf-8")
    info = root / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{entries}\n", encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("plug_"):
            del sys.modules[name]
    importlib.invalidate_caches()


def test_objects_and_factories_come_back():
    registry = Registry("engine")
    registry.register("dict", OrderedDict)
    assert registry.get("dict") is OrderedDict


def test_the_decorator_returns_its_argument():
    registry = Registry("engine")

    @registry.register("mine")
    class Mine:
        pass

    assert registry.get("mine") is Mine
    assert Mine.__name__ == "Mine"


def test_a_string_is_imported_when_asked_for_and_once(site):
    (site / "plug_lazy.py").write_text(
        "class Outer:\n    class Inner:\n        pass\n", encoding="utf-8"
    )
    registry = Registry("engine")
    registry.register("lazy", "plug_lazy:Outer.Inner")
    assert "plug_lazy" not in sys.modules
    assert registry.get("lazy").__qualname__ == "Outer.Inner"
    assert registry.get("lazy") is registry.get("lazy")


@pytest.mark.parametrize("target", ["plug_missing:Name", "fractions:Fractoin"])
def test_a_string_that_cannot_be_imported_names_the_cause(target):
    registry = Registry("engine")
    registry.register("broken", target)
    with pytest.raises(
        RegistryError, match="engine 'broken' could not be imported"
    ) as caught:
        registry.get("broken")
    assert target in caught.value.found
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("target", ["fractions.Fraction", ":Fraction", "fractions:"])
def test_a_string_without_module_and_name_is_refused_at_once(target):
    with pytest.raises(RegistryError, match=r"package\.module:Name"):
        Registry("engine").register("broken", target)


def test_a_taken_name_is_refused_unless_overwritten():
    registry = Registry("engine")
    registry.register("x", OrderedDict)
    with pytest.raises(RegistryError, match="'x' is already registered") as caught:
        registry.register("x", "fractions:Fraction")
    assert "collections:OrderedDict" in caught.value.found
    with pytest.raises(RegistryError, match="is already registered"):
        registry.register("x")(dict)
    assert registry.get("x") is OrderedDict
    registry.register("x", dict, overwrite=True)
    assert registry.get("x") is dict


def test_objects_without_a_qualified_name_can_be_described_too():
    registry = Registry("engine")
    registry.register("x", functools.partial(dict, a=1))
    with pytest.raises(RegistryError, match="is already registered"):
        registry.register("x", functools.partial(dict, a=2))


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    registry = Registry("engine")
    registry.register("ddp", dict)
    registry.register("single", dict)
    with pytest.raises(RegistryError) as caught:
        registry.get("ddq")
    assert caught.value.problem == "no engine is called 'ddq'"
    assert caught.value.found == "the names are ddp, single"
    assert caught.value.fix == "did you mean 'ddp'?"


def test_an_empty_registry_is_named_in_the_error():
    with pytest.raises(RegistryError, match="no name is registered"):
        Registry("engine").get("x")


def test_entry_points_are_found_by_name_and_loaded_only_then(site):
    install(site, "plug-fine", "far = plug_fine:Far", "class Far:\n    pass\n")
    registry = Registry("engine")
    registry.register("near", dict)
    assert registry.get("near") is dict
    assert registry.names() == ["far", "near"]
    assert "plug_fine" not in sys.modules
    assert registry.get("far") is sys.modules["plug_fine"].Far
    assert registry.get("far") is registry.get("far")


def test_a_registered_name_comes_before_an_entry_point(site):
    install(
        site,
        "plug-shadow",
        "near = plug_shadow:Other",
        "raise ImportError('never imported')\n",
    )
    registry = Registry("engine")
    registry.register("near", dict)
    assert registry.get("near") is dict
    assert registry.names() == ["near"]


def test_a_broken_entry_point_is_named_only_when_asked_for(site):
    install(
        site,
        "plug-broken",
        "bad = plug_broken:Bad",
        "raise ImportError('libengine.so is missing')\n",
    )
    install(site, "plug-good", "good = plug_good:Good", "class Good:\n    pass\n")
    registry = Registry("engine")
    assert registry.get("good").__name__ == "Good"
    assert registry.names() == ["bad", "good"]
    with pytest.raises(
        RegistryError, match="could not be loaded from the package plug-broken"
    ) as caught:
        registry.get("bad")
    assert "libengine.so is missing" in caught.value.found
    with pytest.raises(RegistryError, match="'god'") as caught:
        registry.get("god")
    assert caught.value.fix == "did you mean 'good'?"


def test_two_packages_with_one_name_are_refused(site):
    install(site, "plug-one", "same = plug_one:A", "A = dict\n")
    install(site, "plug-two", "same = plug_two:A", "A = list\n")
    with pytest.raises(RegistryError, match="several packages") as caught:
        Registry("engine").get("same")
    assert caught.value.found == "plug-one (plug_one:A), plug-two (plug_two:A)"


def test_the_groups_of_the_kinds():
    assert [registry.group for registry in (STRATEGIES, PRECISIONS, LOGGERS)] == [
        "trainer_kit.strategies",
        "trainer_kit.precisions",
        "trainer_kit.loggers",
    ]


def test_a_users_entry_precedes_the_librarys_entry_regardless_of_order():
    registry = Registry("engine")
    registry.register("early", dict)
    for name in ("early", "late"):
        registry.supply(name, "fractions:Fraction")
    assert registry.get("early") is dict
    assert registry.names() == ["early", "late"]
    with pytest.raises(RegistryError, match="'late' is already registered"):
        registry.register("late", dict)
    registry.register("late", list, overwrite=True)
    assert registry.get("late") is list


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "registry", "name"),
    [
        ("trainer_kit.core.module", "READERS", "module"),
        ("trainer_kit.core.registry", "READERS", "module"),
        ("trainer_kit.build", "STRATEGIES", "ddp"),
        ("trainer_kit.precision.optimizers", "OPTIMIZERS", "adamw"),
    ],
)
def test_a_registry_is_filled_whichever_module_is_imported_first(first, registry, name):
    """No name depends on an attribute of the package that somebody has read before."""
    code = f"import {first}\nfrom trainer_kit.core.registry import {registry}\nprint({registry}.get({name!r}).__name__)"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_importing_a_module_fills_its_registries():
    """A call of ``supply`` inside a function would be a side effect that no import shows."""
    package = Path(__file__).resolve().parents[2] / "trainer_kit"
    hidden = [
        f"{path}:{call.lineno}"
        for path in package.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "supply"
    ]
    assert hidden == []
