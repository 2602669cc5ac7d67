"""The tables of the migration pages are complete, what they name exists, and the command writes their scripts."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import trainer_kit as tk
from tests.docs.test_pages import BLOCK
from trainer_kit.commands.main import main

PAGES = Path(__file__).resolve().parents[2] / "docs" / "migrate"


def rows(page: str, title: str) -> list[tuple[str, str]]:
    """What stands left and right in the table whose head begins with ``title``."""
    table = re.search(
        rf"^\| {re.escape(title)}.*\n\|-.*\n((?:\|.*\n)+)",
        (PAGES / page).read_text("utf-8"),
        re.M,
    )
    assert table, title
    return [
        tuple(cell.strip() for cell in line.strip("|\n").split(" | "))
        for line in table[1].splitlines()
    ]  # type: ignore[misc]


@pytest.mark.slow
def test_every_argument_and_hook_of_transformers_has_its_line() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    for title, names in {
        "`TrainingArguments`": [
            field.name for field in dataclasses.fields(TrainingArguments)
        ],
        "`transformers.Trainer(...)`": [
            *inspect.signature(Trainer.__init__).parameters
        ][1:],
        "`TrainerCallback`": [
            name for name in vars(TrainerCallback) if name.startswith("on_")
        ],
    }.items():
        listed = [
            name
            for left, _ in rows("transformers.md", title)
            for name in re.findall(r"`(\w+)`", left)
        ]
        assert sorted(listed) == sorted(names)


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_names_in_the_tables_exist(page: str) -> None:
    """Each ``Trainer(x=...)``, ``DDPStrategy(x=)`` and hook in a right-hand column."""
    text = (PAGES / page).read_text("utf-8")
    cells = [
        line.strip("|").rsplit(" | ", 1)[1]
        for line in text.splitlines()
        if re.match(r"\| [^*].* \| .* \|$", line)
    ]
    homes = (tk, tk.callbacks, tk.strategies, tk.loggers)
    checked = 0
    for cell in cells:
        for name, arguments in re.findall(r"`(?:tk\.)?([A-Z]\w+)\(([^`]*)\)`", cell):
            home = next((home for home in homes if hasattr(home, name)), None)
            if home is None:
                assert name == "DataLoader", f"{name} is not here"
                continue
            source = re.sub(r"=(?=[,)])", "=0", f"f({arguments})")
            call = ast.parse(source, mode="eval").body
            assert isinstance(call, ast.Call)
            known = inspect.signature(getattr(home, name)).parameters
            unknown = {keyword.arg for keyword in call.keywords} - {*known}
            assert not unknown, f"{name} has no {unknown}"
            checked += 1
        for hook in re.findall(r"`(on_\w+|setup|configure_\w+)`", cell):
            assert hasattr(tk.Callback, hook) or hasattr(tk.TrainModule, hook), hook
            checked += 1
    assert checked


@pytest.mark.slow
@pytest.mark.parametrize("page", ["lightning.md", "accelerate.md"])
def test_the_command_turns_the_first_script_into_the_second(
    page: str, tmp_path: Path
) -> None:
    """The second, and the plain loop beside it, are run with the other scripts of the pages."""
    (mark, before), (_, after), *_ = BLOCK.findall((PAGES / page).read_text("utf-8"))
    assert mark.startswith("not run")
    script = tmp_path / "train.py"
    script.write_text(before)
    moved = CliRunner().invoke(main, ["migrate", str(script), "--write"])
    assert moved.exit_code == 0, moved.output
    findings = (
        "; 1 finding: 1 weights" if page == "accelerate.md" else "; 0 findings"
    )  # how windows are divided
    assert moved.output.splitlines()[-1].endswith(findings), moved.output
    # The page is formatted, and a rewritten line may have become too long.
    options = ["--config", str(PAGES.parents[1] / "pyproject.toml")]
    ruff = [sys.executable, "-m", "ruff", "format", "-q", *options, str(script)]
    subprocess.run(ruff, check=True, timeout=100)
    assert script.read_text() == after
