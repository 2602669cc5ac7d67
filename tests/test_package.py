"""The package as it is published: metadata and extras agree with the source, archives are complete, a wheel works."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trainer_kit as tk

tomllib = pytest.importorskip(
    "tomllib", reason="pyproject.toml is read with Python 3.11's tomllib"
)
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trainer_kit"

# The distribution of an import name, where the two differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "_pytest": "pytest",
    "comet_ml": "comet-ml",
    "megatron": "megatron-core",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
# Packages of which a user may hand over objects; they are imported only then.
HANDED_OVER = {
    "pandas": "`History.to_pandas`, for who works with it already",
    "omegaconf": "hyperparameters and states that are OmegaConf containers",
    "typing-extensions": "torch requires it; only the type checker reads the import",
}
# Dependencies that our source does not import: what imports them.
INDIRECT = {
    "docstring-parser": "jsonargparse, for the help of options",
    "tensorboard": "torch.utils.tensorboard",
}


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def distribution(module: str) -> str:
    top = module.partition(".")[0]
    return canonicalize_name(DISTRIBUTIONS.get(top, top))


def imported(folder: Path) -> dict[str, set[str]]:
    """For each distribution: the files under ``folder`` that import it, inside of functions too."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).rpartition(".")[2] == "import_module"
            ):
                constants = [
                    one.value for one in node.args[:1] if isinstance(one, ast.Constant)
                ]
                modules = [name for name in constants if not name.startswith(".")]
            for module in modules:
                if module.partition(".")[0] not in {
                    *sys.stdlib_module_names,
                    "trainer_kit",
                    "tests",
                }:
                    found[distribution(module)].add(path.relative_to(folder).as_posix())
    return found


def test_every_import_is_declared() -> None:
    """A package that is imported and in no list works here, where everything is installed, and fails for a user."""
    core = names(project()["dependencies"])
    extras = {
        name: names(lines) for name, lines in project()["optional-dependencies"].items()
    }
    found = imported(PACKAGE)
    undeclared = (
        found.keys() - core - set().union(*extras.values()) - HANDED_OVER.keys()
    )
    assert not undeclared, {name: sorted(found[name]) for name in undeclared}
    assert core - found.keys() == set(INDIRECT), (
        "a dependency that the package does not import"
    )
    # Metrics are used by their methods, scikit-learn by examples; `all` and `dev` are lists of extras.
    used = found.keys() | {"scikit-learn", "torchmetrics", "trainer-kit"}
    assert not {name for name, needs in extras.items() if not needs & used}, (
        "extras whose packages nothing imports"
    )


def test_errors_name_extras_that_exist_and_versions_that_they_install() -> None:
    extras = project()["optional-dependencies"]
    declared = {
        canonicalize_name(need.name): str(need.specifier)
        for lines in extras.values()
        for need in map(Requirement, lines)
        if need.specifier
    }
    named, checked = set(), set()
    pages = [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        named |= {
            part.strip()
            for found in re.findall(r"trainer-kit\[([a-z, -]+)\]", text)
            for part in found.split(",")
        }
        for name, version in (
            re.findall(r"[\"']([a-z][a-z0-9_-]+)(>=[0-9.]+)[\"']", text)
            if path.suffix == ".py"
            else ()
        ):
            if canonicalize_name(name) in declared:
                assert declared[canonicalize_name(name)] == version, (
                    f"{path}: {name}{version}"
                )
                checked.add(name)
    assert named <= extras.keys(), named - extras.keys()
    assert {"wandb", "mlflow", "rich", "pyarrow"} <= checked


def test_metadata_has_one_version_and_names_each_python() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tk.__version__)
    assert "version" in project()["dynamic"]
    python = [
        line.rpartition(" ")[2]
        for line in project()["classifiers"]
        if ":: Python :: 3." in line
    ]
    assert python == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert project()["requires-python"] == ">=3.10"
    newest = re.search(
        r"^## \[(\d[^]]*)\]",
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert newest is None or newest[1] == tk.__version__


def test_the_citation_and_the_templates_are_valid() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == tk.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    if not folder.exists():
        pytest.skip("a source distribution has no dot files")
    for path in (folder / "bug.yml", folder / "feature.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys(), path
        assert all(
            {"type", "id", "attributes"} <= field.keys() for field in form["body"]
        ), path
        assert all(field["attributes"]["label"] for field in form["body"]), path


def test_the_source_is_that_of_python_3_10() -> None:
    """`make check` runs on one newer Python: its parser takes what 3.10 refuses."""
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        ast.parse(
            path.read_text(encoding="utf-8"),
            filename=str(path),
            feature_version=(3, 10),
        )


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_installs_what_its_script_imports() -> None:
    command = ["make", "--dry-run", "--always-make", "demo"]
    plan = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    installed = re.findall(r"-e \"\.\[([^]]+)\]\"", plan)
    assert installed == ["examples"], plan
    assert "examples/digits.py" in plan


def tracked() -> set[str]:
    """The files of a checkout that a source distribution has: all but dot files and the links."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return {
        name
        for name in listed
        if name and not name.startswith(".") and name not in {"callbacks", "strategies"}
    }


def build(source: Path, into: Path) -> tuple[Path, Path]:
    """Build a source distribution, and a wheel from what it unpacks to, with this environment's setuptools."""
    into.mkdir()
    code = "from setuptools import build_meta; build_meta.build_{kind}({into!r})"
    for kind in ("sdist", "wheel"):
        command = [sys.executable, "-c", code.format(kind=kind, into=str(into))]
        done = subprocess.run(
            command,
            cwd=source,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if kind == "sdist":
            (sdist,) = into.glob("*.tar.gz")
            with tarfile.open(sdist) as archive:
                archive.extractall(into.parent / "unpacked", filter="data")
            (source,) = (into.parent / "unpacked").iterdir()
    (wheel,) = into.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("archives")
    for name in tracked():
        target = root / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target, follow_symlinks=False)
    return build(root / "source", root / "built")


@pytest.mark.long
def test_a_source_distribution_is_the_whole_checkout(
    archives: tuple[Path, Path],
) -> None:
    with tarfile.open(archives[0]) as archive:
        inside = {
            member.name.partition("/")[2]
            for member in archive.getmembers()
            if member.isfile()
        }
    made = {"PKG-INFO", "setup.cfg"}
    assert {
        name for name in inside if not name.startswith("trainer_kit.egg-info/")
    } - made == tracked()


@pytest.mark.long
def test_a_wheel_is_the_package(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        inside = set(wheel.namelist())
        metadata = wheel.read(
            f"trainer_kit-{tk.__version__}.dist-info/METADATA"
        ).decode()
    assert {name for name in inside if ".dist-info/" not in name} == {
        name for name in tracked() if name.startswith("trainer_kit/")
    }
    assert f"\nVersion: {tk.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


@pytest.fixture(scope="module")
def installed(
    archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The wheel in an environment of its own, which finds the packages of this one behind it."""
    home = tmp_path_factory.mktemp("installed") / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=100
    )
    (site,) = home.glob("lib/python3*/site-packages")
    behind = [
        path
        for path in sys.path
        if Path(path).name in {"site-packages", "dist-packages"}
    ]
    (site / "behind.pth").write_text("\n".join(behind) + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "bin" / "python",
        "install",
        "--quiet",
        "--no-compile",
    ]
    done = subprocess.run(
        [*pip, "--no-index", "--no-deps", "--ignore-installed", archives[1]],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return home


def run(home: Path, *command: str, directory: Path) -> str:
    # Python's own variables would lead to this checkout.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [home / "bin" / command[0], *command[1:]],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_commands_of_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    assert (
        run(installed, "trainer-kit", "--version", directory=tmp_path)
        == f"trainer-kit, version {tk.__version__}\n"
    )
    assert "launch" in run(
        installed, "python", "-m", "trainer_kit", "--help", directory=tmp_path
    )


# `alone.py EXTRA SCRIPT [ARGUMENT...]` hides what `pip install "trainer-kit[EXTRA]"` does not install.
ALONE = textwrap.dedent(
    """
    import importlib.metadata as metadata, runpy, sys, warnings
    from importlib.machinery import PathFinder
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    warnings.simplefilter("error")
    installed, (extra, *sys.argv) = set(), sys.argv[1:]

    def collect(name, extra=""):
        if canonicalize_name(name) in installed:
            return
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            return  # such as torch's CUDA packages beside a CPU build
        installed.add(canonicalize_name(name))
        for need in map(Requirement, lines):
            if need.marker is None or any(need.marker.evaluate({"extra": one}) for one in ("", extra)):
                collect(need.name)

    collect("trainer-kit", extra)
    hidden = {
        module for module, owners in metadata.packages_distributions().items()
        if not any(canonicalize_name(owner) in installed for owner in owners)
    }
    assert {"transformers", "pytest", "mypy"} <= hidden and ("sklearn" in hidden) == (extra != "examples")

    class Visible:
        def find_spec(self, name, path=None, target=None):
            return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

    sys.meta_path[sys.meta_path.index(PathFinder)] = Visible()
    runpy.run_path(sys.argv[0], run_name="__main__")
    """
)


@pytest.mark.long
def test_an_installed_wheel_needs_only_its_dependencies(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import importlib, pkgutil, sys
            import torch
            import trainer_kit as tk
            from trainer_kit.testing import TinyModule

            without = []
            for module in pkgutil.walk_packages(tk.__path__, "trainer_kit."):
                if module.name != "trainer_kit.__main__":
                    try:
                        importlib.import_module(module.name)
                    except ModuleNotFoundError as error:
                        without.append((module.name, error.name))
            print(sorted(without))
            for name in tk.__all__:
                getattr(tk, name)
            trainer = tk.Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False)
            trainer.fit(TinyModule(), [torch.randn(4, 32)] * 2)
            print(tk.__file__)
            """
        )
    )
    lines = run(
        installed, "python", "alone.py", "", "script.py", directory=tmp_path
    ).splitlines()
    # Modules of one command and of a pytest plugin: their extras are `migrate` and `testing`.
    alone = [
        ("trainer_kit.migrate.rewrite", "libcst"),
        ("trainer_kit.testing.pytest_plugin", "pytest"),
    ]
    assert lines[0] == str(alone)
    assert lines[-1].startswith(str(installed)), "the module of the wheel"
    (report,) = tmp_path.glob("**/report.html")
    assert "uPlot" in report.read_text(encoding="utf-8"), (
        "the page and its library come with the wheel"
    )


@pytest.mark.long
def test_the_demo_needs_the_dependencies_and_scikit_learn(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    command = (
        "alone.py",
        "examples",
        str(ROOT / "examples" / "digits.py"),
        "--fast",
        "--accelerator",
        "cpu",
    )
    assert "test accuracy" in run(installed, "python", *command, directory=tmp_path)
