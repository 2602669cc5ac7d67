"""One class by whichever door: the package, its links in a checkout, text files in their place, an archive."""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import trainer_kit as tk

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("callbacks", "strategies")

SCRIPT = textwrap.dedent(
    """
    import sys

    if {first}:
        import trainer_kit
    import callbacks, strategies
    import callbacks.early_stopping as early_stopping
    from callbacks import EarlyStopping, ModelCheckpoint
    from strategies import SingleDeviceStrategy
    from strategies.transforms.blocks import Compile

    import torch
    import trainer_kit as tk
    import trainer_kit.strategies.transforms.blocks
    from trainer_kit.testing import TinyModule

    assert callbacks is tk.callbacks and strategies is tk.strategies
    assert ModelCheckpoint is tk.callbacks.ModelCheckpoint
    assert early_stopping.EarlyStopping is EarlyStopping is tk.callbacks.EarlyStopping
    assert early_stopping.__spec__.name == early_stopping.__name__ == "trainer_kit.callbacks.early_stopping"
    assert Compile is trainer_kit.strategies.transforms.blocks.Compile
    copies = [name for name, module in sys.modules.items()
              if name.split(".")[0] in ("callbacks", "strategies") and module.__name__ == name]
    assert not copies, copies
    kept = ModelCheckpoint("kept", every_n_train_steps=1)
    trainer = tk.Trainer(max_epochs=1, strategy=SingleDeviceStrategy(), logger=False, callbacks=[kept],
                         enable_progress_bar=False, enable_model_summary=False)
    assert trainer.checkpoint_callbacks == [kept]
    trainer.fit(TinyModule(), [torch.randn(4, 32)] * 2)
    print("kept", kept.best_model_path.split("/")[-1], tk.__file__)
    """
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git has of the package and its links."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(
        ROOT / "trainer_kit",
        root / "trainer_kit",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        *(f"{room}.py" for room in ROOMS),
    ):
        shutil.copy(ROOT / name, root)
    for room in ROOMS:  # made here: a source distribution has no links
        (root / room).symlink_to(Path("trainer_kit", room))
    return root


def run(code, path, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(script)]
    return subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def check(path, tmp_path, package_first=False):
    done = run(SCRIPT.format(first=package_first), path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f" {path}" in done.stdout.splitlines()[-1], "the package of this checkout"


@pytest.mark.slow
def test_through_the_links(checkout, tmp_path):
    check(checkout, tmp_path)


@pytest.mark.slow
def test_imports_work_with_links_checked_out_as_text_files(checkout, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(checkout, plain, symlinks=True)
    for room in ROOMS:
        target = os.readlink(plain / room)
        (plain / room).unlink()
        (plain / room).write_text(target)
    check(plain, tmp_path, package_first=True)


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_clone_without_links(tmp_path):
    """What git itself writes where it may not make links, as on Windows by default."""
    clone = tmp_path / "clone"
    command = [
        "git",
        "-c",
        "core.symlinks=false",
        "clone",
        "--quiet",
        "--depth",
        "1",
        ROOT.as_uri(),
        str(clone),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    for room in ROOMS:
        assert (clone / room).read_text() == f"trainer_kit/{room}", "git tracks a link"
        assert not (clone / room).is_symlink()
    check(clone, tmp_path)


@pytest.mark.slow
def test_from_a_zip(checkout, tmp_path):
    """Archivers follow links: the archive has each room twice."""
    archive = tmp_path / "checkout.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for directory, _, files in os.walk(checkout, followlinks=True):
            for file in files:
                made.write(
                    Path(directory, file), Path(directory, file).relative_to(checkout)
                )
    check(archive, tmp_path)


@pytest.mark.slow
def test_a_wheel_has_one_door(checkout, tmp_path):
    wheels = tmp_path / "wheels"
    build = (
        f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    )
    source = tmp_path / "source"
    shutil.copytree(checkout, source, symlinks=True)
    subprocess.run(
        [sys.executable, "-c", build],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=100,
    )
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as made:
        assert {name.split("/")[0] for name in made.namelist()} == {
            "trainer_kit",
            f"trainer_kit-{tk.__version__}.dist-info",
        }
    code = """
        from trainer_kit.callbacks import ModelCheckpoint
        import trainer_kit as tk
        assert ModelCheckpoint is tk.callbacks.ModelCheckpoint
        print(tk.__file__)
    """
    done = run(textwrap.dedent(code), wheel, tmp_path)
    assert done.stdout.startswith(str(wheel)), done.stderr
