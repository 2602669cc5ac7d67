"""The tables of the migration pages are complete, and what they name exists."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import trainer_kit as tk

PAGES = Path(__file__).resolve().parents[2] / "docs" / "migrate"


def rows(page: str, title: str) -> list[tuple[str, str]]:
    """What stands left and right in the table whose head begins with ``title``."""
    table = re.search(rf"^\| {re.escape(title)}.*\n\|-.*\n((?:\|.*\n)+)", (PAGES / page).read_text("utf-8"), re.M)
    assert table, title
    return [tuple(cell.strip() for cell in line.strip("|\n").split(" | ")) for line in table[1].splitlines()]  # type: ignore[misc]


@pytest.mark.slow
def test_every_argument_and_hook_of_transformers_has_its_line() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    for title, names in {
        "`TrainingArguments`": [field.name for field in dataclasses.fields(TrainingArguments)],
        "`transformers.Trainer(...)`": [*inspect.signature(Trainer.__init__).parameters][1:],
        "`TrainerCallback`": [name for name in vars(TrainerCallback) if name.startswith("on_")],
    }.items():
        listed = [name for left, _ in rows("transformers.md", title) for name in re.findall(r"`(\w+)`", left)]
        assert sorted(listed) == sorted(names)


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_what_the_tables_name_here_exists(page: str) -> None:
    """Each ``Trainer(x=...)``, ``DDPStrategy(x=)`` and hook in a right-hand column."""
    text = (PAGES / page).read_text("utf-8")
    cells = [
        line.strip("|").rsplit(" | ", 1)[1] for line in text.splitlines() if re.match(r"\| [^*].* \| .* \|$", line)
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
