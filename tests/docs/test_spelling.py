"""Words are spelled as in the United States, in code, documentation and messages: a search finds each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {".css", ".html", ".js", ".json", ".md", ".py", ".pyi", ".toml", ".txt"}
# What takes an s before the ending: quantise, quantised, quantisation.
STEMS = """anonym apolog author canonical capital categor central character crystal custom digit discret emphas equal
    factor final general global harmon initial local material maxim memor minim modern normal optim organ parallel
    parametr penal priorit quant random real recogn regular serial special stabil standard summar symbol synchron token
    util vector visual"""
ENDINGS = "ation|ations|able|e|ed|er|ers|es|ing"
WORDS = """ageing analyse analysed analyser analysing armour artefact artefacts behaviour behavioural behaviours
    cancelled cancelling catalogue catalogued catalogues centre centred centres colour coloured colouring colours
    defence enrol favour favoured favourite favours flavour flavours fulfil fulfils grey honour honoured honours
    honouring judgement labelled labelling labour learnt licence licences manoeuvre metre metres millimetre modelled
    modelling neighbour neighbouring neighbours offence programme programmes rumour signalled signalling spelt
    totalled travelled travelling unlabelled vapour whilst"""
BRITISH = re.compile(
    rf"(?<![A-Za-z])(?:de|re|un|dis|pre)?(?:(?:{'|'.join(STEMS.split())})is(?:{ENDINGS})|{'|'.join(WORDS.split())})(?![a-z])",
    re.IGNORECASE,
)
# Names of other libraries, and files that others wrote, by the end of their path.
OTHERS = {
    "cancelled": "asyncio and concurrent.futures: Future.cancelled",
}
FOREIGN_FILES = ("report/vendor/",)


def texts() -> dict[str, str]:
    """The text of each file that is searched, by its path; of the changelog the newest section."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    for directory in ("trainer_kit", "docs", "examples"):
        files += [
            path for path in (ROOT / directory).rglob("*") if path.suffix in TEXTS
        ]
    found = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(files)
    }
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found["CHANGELOG.md"] = changes.split("\n## ")[1]
    return {
        name: text
        for name, text in found.items()
        if not any(part in name for part in FOREIGN_FILES)
    }


def british(line: str) -> list[str]:
    """The words of a line that are spelled otherwise, without names of others."""
    return [
        match.group()
        for match in BRITISH.finditer(line)
        if match.group() not in OTHERS
        or not re.search(rf"\.{match.group()}\(", line[match.start() - 1 :])
    ]


def test_words_are_spelled_as_in_the_united_states() -> None:
    places = [
        f"{name}:{number}: {', '.join(words)}"
        for name, text in texts().items()
        for number, line in enumerate(text.splitlines(), start=1)
        if (words := british(line))
    ]
    assert places == [], "\n".join(places)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("optimised kernels, de-serialisation", ["optimised", "serialisation"]),
        ("`_normalise_rows` in colour", ["normalise", "colour"]),
        ("parallelism is realistic, and a promise", []),
        ("future.cancelled() was cancelled", ["cancelled"]),
    ],
)
def test_the_search_finds_words_and_names(line: str, words: list[str]) -> None:
    assert british(line) == words
