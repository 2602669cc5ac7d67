"""The reference lists what users call first, nothing internal, and for every argument its default."""

from __future__ import annotations

import inspect
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainer_kit as tk
from tests.docs.test_reference_gaps import (
    described_arguments,
    members_of,
    parameters,
    shown_methods,
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "reference"
REFERENCE = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))

# Per class with a list of members: its page, and what a reader looks for first.
FIRST = {
    "Trainer": ("trainer", ["fit", "validate", "test", "predict"]),
    "TrainModule": (
        "modules",
        ["training_step", "validation_step", "test_step", "predict_step"],
    ),
    "DataModule": ("modules", ["train_dataloader", "val_dataloader"]),
    "Callback": ("modules", ["setup", "teardown", "on_fit_start"]),
    "Accelerator": ("accelerator", ["prepare", "backward", "accumulate"]),
}
# What other rooms of the library call, and further names of what is listed.
INTERNAL = {
    "Trainer": """accumulation_callback adapt_callbacks add_argparse_args become_rank begin_evaluation begin_fit
        clip_gradients count_batches distributed_sampler_kwargs enable_validation end_continuation evaluation
        forget_steps_read former_methods from_argparse_args keep_loaders load_train lr_schedulers manual_backward
        manual_optimizers model position read_accumulation report_events reset run say scaler set_callbacks set_limit
        show_datamodule show_module state_verb train_batch_samples use_settings use_strategy""",
    "TrainModule": """CHECKPOINT_HYPER_PARAMS_KEY CHECKPOINT_HYPER_PARAMS_NAME CHECKPOINT_HYPER_PARAMS_TYPE
        hparams_name nested_train_modules""",
    "DataModule": """CHECKPOINT_HYPER_PARAMS_KEY CHECKPOINT_HYPER_PARAMS_NAME CHECKPOINT_HYPER_PARAMS_TYPE
        hparams_name trainer""",
    "Callback": "duplicate_key_fix never_called",
    "Accelerator": """delayed_fp8_autocast fp8_recipe_handler has_lomo_optimizer initialized log_with
        msamp_recipe_handler scheduler_steps_per_process trackers use_seedable_sampler use_stateful_dataloader""",
}


def listed(name: str) -> list[str]:
    """The members in the options of the directive of a class, in their order on the page."""
    page, _ = FIRST[name]
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    block = re.search(rf"^::: trainer_kit\.{name}\n((?:    .*\n)+)", text, re.M)
    assert block is not None
    members: list[str] = yaml.safe_load(block[1])["options"]["members"]
    return members


@pytest.mark.parametrize("name", FIRST)
def test_what_users_call_comes_first(name: str) -> None:
    members = listed(name)
    _, first = FIRST[name]
    assert members[: len(first)] == first
    assert len(members) == len(set(members))


@pytest.mark.parametrize("name", FIRST)
def test_a_member_is_listed_or_internal(name: str) -> None:
    """A new method is put in its place in the reference, or named as internal."""
    cls = getattr(tk, name)
    public = {
        member
        for base in cls.__mro__
        if base.__module__.startswith("trainer_kit")
        for member in vars(base)
        if not member.startswith("_")
    }
    arguments = inspect.signature(cls).parameters.keys()
    members = set(listed(name))
    assert public - members - arguments == set(INTERNAL[name].split()) - arguments
    assert members <= public


class Tables(HTMLParser):
    """The tables of arguments and attributes of a page: rows of texts, below the name of their class or function."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = ""
        self.rows: list[tuple[str, list[str], list[str]]] = []
        self.heads: list[str] = []
        self._cells: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        identifier = names.get("id") or ""
        if tag in ("h2", "h3") and identifier.startswith("trainer_kit."):
            self.owner = identifier
        if tag == "thead":
            self.heads = []
        if tag == "tr":
            self._cells = []
        if tag in ("td", "th") and self._cells is not None:
            self._cells.append("")

    def handle_data(self, data: str) -> None:
        if self._cells:
            self._cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag != "tr" or self._cells is None:
            return
        cells = [cell.strip() for cell in self._cells]
        if not self.heads:
            self.heads = cells
        elif self.heads[:3] == ["Name", "Type", "Description"]:
            self.rows.append((self.owner, self.heads, cells))
        self._cells = None


def has_default(owner: str, name: str) -> bool:
    """Whether the name is an argument of the class or function ``owner`` that may be left out."""
    value: Any = REFERENCE["resolve"](owner)
    parameter = inspect.signature(value).parameters.get(name)
    return parameter is not None and parameter.default is not parameter.empty


def described() -> set[tuple[str, str]]:
    """Every method that the reference shows, with each argument that it or a base class describes."""
    arguments = set()
    for page, name in REFERENCE["directives"]():
        cls = REFERENCE["resolve"](name)
        # Another name of a class or method is shown as such, without arguments.
        if not inspect.isclass(cls) or cls.__name__ != name.rpartition(".")[2]:
            continue
        for member in shown_methods(cls, members_of(page, name)):
            method = getattr(cls, member)
            if method.__doc__ is not None and method.__name__ == member:
                names = {*parameters(method)} & described_arguments(cls, member)
                arguments |= {(f"{name}.{member}", argument) for argument in names}
    return arguments


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_built_pages(built_site: Path) -> None:
    """The order of members, each argument with its default, and where each class and function is defined."""
    rows = []
    for page in (built_site / "reference").glob("*/index.html"):
        text = page.read_text(encoding="utf-8")
        tables = Tables()
        tables.feed(text)
        rows += tables.rows
        # A list of members has no other effect than this order.
        for name, (room, _) in FIRST.items():
            if room == page.parent.name:
                found = re.findall(rf'id="trainer_kit\.{name}\.(\w+)"', text)
                assert found == [each for each in listed(name) if each in found]
                assert len(found) > len(listed(name)) - 2
    assert len(rows) > 900
    assert described() <= {(owner, cells[0].lstrip("*")) for owner, _, cells in rows}
    lacking = []
    for owner, heads, cells in rows:
        default = dict(zip(heads, cells, strict=True)).get("Default")
        if default == "" or (default is None and has_default(owner, cells[0])):
            lacking.append((owner, cells[0]))
    assert not lacking
    text = (built_site / "reference/trainer/index.html").read_text(encoding="utf-8")
    sources = re.findall(r'class="doc-source".*?<code>([^<]+)</code>', text)
    for source in sources:
        path, _, line = source.partition(":")
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        assert re.match(r"\s*(@|class |def )", lines[int(line) - 1]), source
    assert len(sources) > 20
