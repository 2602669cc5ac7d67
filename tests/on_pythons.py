"""Tests the wheel in environments of its own: ``make test-pythons``, ``make test-oldest`` and ``make test-nightly``.

Builds a source distribution and, from what it unpacks to, the wheel. For each Python: installs the wheel, prints its
version, imports every module, fits a module in an empty directory, and runs the quick tests of the source distribution
against the installed package. ``--oldest`` installs the lowest versions that pyproject.toml allows; otherwise
constraints.txt holds, from the Python on that it is made for. ``--newest`` leaves torch out of it: the newest release
that pip finds runs the tests of all that uses its private names, slow ones too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/core",
    "tests/data",
    "tests/strategies/test_optimizer_step.py",
    "tests/test_trainer.py",
    "tests/test_trainer_arguments.py",
]
# Tests of what the modules `torch_private` are for; those of other libraries skip.
PRIVATE = [
    "tests/test_torch_private.py",
    "tests/accelerator/test_accelerator.py",
    "tests/callbacks/test_weight_averaging.py",
    "tests/checkpoint/test_codec.py",
    "tests/core",
    "tests/data",
    "tests/hang/test_torch_private.py",
    "tests/inference/test_dispatch.py",
    "tests/parity/test_ddp.py",
    "tests/planning/test_fake_mode.py",
    "tests/planning/test_fake_world.py",
    "tests/planning/test_real_step.py",
    "tests/strategies/test_fsdp.py",
    "tests/strategies/test_groups.py",
    "tests/strategies/test_mesh.py",
    "tests/strategies/test_optimizer_step.py",
    "tests/strategies/test_pipeline.py",
    "tests/test_trainer.py",
    "tests/verify/test_local_ranks.py",
    "tests/verify/test_operations.py",
]
# torch says so of Python 3.13.0 when it compiles.
QUICK = ["-m", "not slow", "-W", "ignore:Guards may run slower:RuntimeWarning"]
NIGHTLY = ["-m", "not long"]
# With torch 2.9: its remark on a function that it will replace, and tests of what is exact with a newer torch only.
REMARK = ("-W", "ignore:Please use the new API settings:UserWarning")
OLD = [
    *REMARK,
    *(
        "-p",
        "torch.distributed.nn.jit.instantiator",
    ),  # adds a directory to sys.path: not inside a test
    # counts Python calls, torch's with ours
    *(
        "--deselect",
        "tests/data/test_sources.py::TestLists::test_one_process_iterates_the_list_itself",
    ),
]
NEEDED = ["numpy", "pytest", "pytest-timeout", "scikit-learn"]
# Plans of its models are among the tests of private names.
NEEDED_NIGHTLY = ["transformers"]
# Installed with torch by its CUDA builds; a CPU does without.
CUDA = re.compile(r"^Requires-Dist: (nvidia-|cuda-|triton).*\n", re.M)
# Modules that need an extra.
EXTRAS = {"trainer_kit.migrate.rewrite": "libcst"}
ALONE = f"""
import importlib, pkgutil, sys, tempfile
import torch
import trainer_kit as tk
from trainer_kit.testing import TinyModule

without = {{}}
for module in pkgutil.walk_packages(tk.__path__, "trainer_kit."):
    if module.name != "trainer_kit.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            without[module.name] = error.name
assert without == {EXTRAS!r}, without
for name in tk.__all__:
    getattr(tk, name)
assert tk.__file__.startswith(sys.prefix), tk.__file__
module = TinyModule()
before = module.layer.weight.detach().clone()
tk.Trainer(max_epochs=1, accelerator="cpu", devices=1).fit(module, [torch.randn(4, 32)] * 4)
assert not torch.equal(before, module.layer.weight)
plan = tk.Trainer(accelerator="cpu", devices=1).plan(module, [torch.zeros(4, 32)], world=[1, 8], device="h200")
assert all(row.estimate for row in plan.rows), plan
assert tk.Trainer(accelerator="cpu", devices=1).verify(TinyModule(), [torch.randn(4, 32)] * 4).ok
"""


def call(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a command; Python's own variables would lead to the checkout."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=inherited | environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def build(work: Path) -> tuple[Path, Path]:
    """The unpacked source distribution without its package, and the wheel made of it."""
    code = "from setuptools import build_meta; build_meta.build_{kind}({into!r})"
    call(sys.executable, "-c", code.format(kind="sdist", into=str(work)))
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    source = archive.with_name(archive.name.removesuffix(".tar.gz"))
    call(sys.executable, "-c", code.format(kind="wheel", into=str(work)), cwd=source)
    (wheel,) = work.glob("*.whl")
    shutil.rmtree(source / "trainer_kit")
    return source, wheel


def lowest() -> list[str]:
    """The lowest version of each dependency, and of the example's scikit-learn."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    lines = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
    found = []
    for need in map(
        Requirement, [*lines, *project["optional-dependencies"]["testing"]]
    ):
        (bound,) = need.specifier
        assert bound.operator == ">=", need
        found.append(f"{need.name}=={bound.version}")
    return found


def install(python: str, home: Path, wheel: Path, versions: str) -> Path:
    """Make an environment with the wheel; torch without the libraries of CUDA, which a CPU never calls.

    Args:
        python: the interpreter.
        home: the directory of the environment.
        wheel: of this package.
        versions: ``"pinned"``, ``"oldest"`` or ``"newest"``.
    """
    oldest = versions == "oldest"
    call(python, "-m", "venv", "--clear", home)
    own = home / "bin" / "python"
    version = call(
        own, "-c", "import sys; print(sys.version_info[:2] >= (3, 11))"
    ).strip()
    pinned = (
        lowest()
        if oldest
        else (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    )
    (torch,) = [line for line in pinned if line.startswith("torch==")]
    if not oldest and version != "True":
        pinned = [torch]
    if versions == "newest":
        pinned.remove(torch)
        torch = "torch"
    constraints = home / "constraints.txt"
    constraints.write_text("\n".join(pinned) + "\n", encoding="utf-8")
    call(own, "-m", "pip", "install", "--no-compile", "--no-deps", torch)
    (site,) = home.glob("lib/python3*/site-packages")
    call(sys.executable, ROOT / "tests" / "xla" / "stub_libraries.py", site)
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    metadata.write_text(
        CUDA.sub("", metadata.read_text(encoding="utf-8")), encoding="utf-8"
    )
    needed = list(NEEDED)
    if versions == "newest":
        needed += NEEDED_NIGHTLY
    call(own, "-m", "pip", "install", "--no-compile", "-c", constraints, wheel, *needed)
    return own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--oldest",
        action="store_true",
        help="the lowest versions that pyproject.toml allows",
    )
    parser.add_argument(
        "--newest",
        action="store_true",
        help="the newest torch that pip finds, and the tests of its private names",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the environments, 2 GB each"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".venv-pythons", help="where they are made"
    )
    parser.add_argument(
        "pythons",
        nargs="+",
        help="names or paths of interpreters; one that is not found is skipped",
    )
    options = parser.parse_args()
    versions = "pinned"
    if options.oldest:
        versions = "oldest"
    if options.newest:
        versions = "newest"
    tests = [*QUICK, *TESTS]
    if options.oldest:
        tests += OLD
    if options.newest:
        tests = [*NIGHTLY, *PRIVATE]
    found = {name: path for name in options.pythons if (path := shutil.which(name))}
    for name in options.pythons:
        if name not in found:
            print(f"{name}: not found, not tested", flush=True)
    if not found:
        sys.exit("no Python to test on")
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    source, wheel = build(options.work.resolve())
    for name, path in found.items():
        home = options.work.resolve() / Path(name).name
        own = install(path, home, wheel, versions)
        (home / "empty").mkdir()
        shown = call(
            own.with_name("trainer-kit"), "--version", cwd=home / "empty"
        ).strip()
        call(
            own,
            "-W",
            "error",
            *(REMARK if options.oldest else ()),
            "-c",
            ALONE,
            cwd=home / "empty",
            OMP_NUM_THREADS="1",
        )
        tested = call(
            own, "-m", "pytest", "-q", *tests, cwd=source, OMP_NUM_THREADS="1"
        )
        versions = call(
            own,
            "-c",
            "import sys, torch; print(sys.version.split()[0], 'torch', torch.__version__)",
        )
        print(
            f"{name}: {shown}; Python {versions.strip()}; {tested.splitlines()[-1]}",
            flush=True,
        )
        if not options.keep:
            shutil.rmtree(home)
    if not options.keep:
        shutil.rmtree(options.work)


if __name__ == "__main__":
    main()
