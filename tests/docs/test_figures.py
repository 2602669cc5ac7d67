"""A figure that several pages state has one source, docs/figures.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = json.loads((ROOT / "docs" / "figures.json").read_text())["figures"]


@pytest.mark.parametrize("figure", FIGURES, ids=[figure["name"] for figure in FIGURES])
def test_every_page_states_the_measured_figure(figure: dict) -> None:
    for page, template in figure["pages"].items():
        sentence = template.format(**figure["values"])
        assert sentence in " ".join((ROOT / page).read_text().split()), (
            f"{page} does not say: {sentence}"
        )


@pytest.mark.parametrize("figure", FIGURES, ids=[figure["name"] for figure in FIGURES])
def test_what_measures_a_figure_exists(figure: dict) -> None:
    source = figure["measured_by"].split()
    if source[0] == "make":
        assert f"\n{source[1]}:" in (ROOT / "Makefile").read_text()
    else:
        assert (ROOT / source[0]).is_file()


def test_the_comparison_states_the_measured_figures() -> None:
    calls = next(
        figure["values"]
        for figure in FIGURES
        if figure["name"].startswith("Python calls")
    )
    rows = (ROOT / "docs" / "compare.md").read_text().splitlines()
    starts = {
        library: f"| {library} "
        for library in ("Ignite", "Fabric", "Accelerate", "Lightning")
    }
    starts["ours"] = "| **trainer_kit, `Trainer`** "
    for library, start in starts.items():
        row = next(row for row in rows if row.startswith(start))
        assert int(row.split("|")[2].strip(" *")) == calls[library.lower()]
