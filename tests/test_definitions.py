"""Each thing that is added to the library is defined once: the files that name a sample of each kind, and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trainer_kit"
STATES_OF_RANKS = {
    "state/rank_states.py": "the definition",
    "state/collect.py": "the state of a Trainer",
    "accelerator/checkpoints.py": "the state of an Accelerator",
}
PLACES = {
    "get_balanced_memory": {
        "inference/device_map.py": "the definition",
        "__init__.py": "the table of public names",
        "__init__.pyi": "written from the table",
        "compat/accelerate_names.py": "the names of Accelerate",
    },
    "BackboneFinetuning": {
        "callbacks/finetuning.py": "the definition",
        "callbacks/__init__.py": "the table of public names",
        "callbacks/__init__.pyi": "written from the table",
    },
    "TrackioLogger": {
        "loggers/trackio.py": "the definition",
        "loggers/table.py": "the table of loggers",
        "loggers/__init__.pyi": "written from the table",
    },
    "trackio": {
        "loggers/trackio.py": "the definition",
        "loggers/table.py": "the table of loggers",
        "loggers/__init__.pyi": "written from the table",
        "accelerator/trackers.py": "the enum of Accelerate, whose members type checkers know",
    },
    "on_before_zero_grad": {
        "core/hooks.py": "the definition, for callbacks and for modules",
        "step/optimize.py": "the call",
        "training/explain.py": "the loop as explain() prints it",
        "verify/reference.py": "the call of the loop that verify compares with",
    },
    "on_test_epoch_start": {
        "core/hooks.py": "the definition; the call makes the name from the verb",
    },
    "enable_autolog_hparams": {
        "trainer.py": "the definition: an argument of the Trainer",
        "training/session.py": "its attribute",
        "training/entry_points.py": "its use",
    },
    "optimizer_kernel": {
        "trainer.py": "the definition: an argument of the Trainer",
        "training/composition_options.py": "its attribute",
        "training/compose.py": "its use",
        "step/optimizer_kernels.py": "what it chooses, and the check of its value",
        "training/explain.py": "the line that explain() prints",
    },
    "collect_rank_states": STATES_OF_RANKS,
    "restore_rank_rng": STATES_OF_RANKS,
    "restore_rank_buffers": STATES_OF_RANKS,
}
"""By name, the files of the package that may name it, each with the reason."""


def files_with(name: str) -> set[str]:
    """The files of the package in which a name stands as a word, in code, a list, or prose."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    files = set()
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]:
        if word.search(path.read_text(encoding="utf-8")):
            files.add(path.relative_to(PACKAGE).as_posix())
    return files


@pytest.mark.parametrize("name", sorted(PLACES))
def test_a_name_stands_where_it_is_defined(name: str) -> None:
    """What to do: derive the list from the definition; or give the reason why the name stands in one more file."""
    assert files_with(name) == set(PLACES[name])
