"""The python blocks of README.md and of the guide run as they stand; generated pages are current.

Each block is a script in a process of its own, in an empty directory, with warnings as errors. A comment on
the line before the block changes that: ``<!-- continues -->`` appends it to the script of the block before it, and
``<!-- not run: reason -->`` leaves it out.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.programs import Programs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *(
            page
            for page in ROOT.glob("docs/**/*.md")
            if page.parent.name != "decisions"
        ),
    ]
)
BLOCK = re.compile(
    r"(?:<!-- *(continues|not run: *\S[^>]*?) *-->\s*\n)?^```python[^\n]*\n(.*?)^```",
    re.M | re.S,
)


def scripts(text: str) -> list[tuple[int, str]]:
    """The scripts of a page: the line of each one's first block, and its source."""
    found: list[tuple[int, str]] = []
    for match in BLOCK.finditer(text):
        mark, source = match.groups()
        if mark == "continues":
            line, before = found.pop()
            found.append((line, before + source))
        elif mark is None:
            found.append((text.count("\n", 0, match.start(2)) + 1, source))
    return found


LONG = (
    "check_strategy(",
    '"nf4"',
    "Float8Precision(",
    "transformers",
    "torchmetrics",
    "Averaging(",
    "FSDPStrategy(",
    "devices=2,",
)  # several ranks, or a library to import for seconds
CASES = [
    pytest.param(
        source,
        id=f"{page.relative_to(ROOT).as_posix()}:{line}",
        marks=[pytest.mark.slow] if any(word in source for word in LONG) else [],
    )
    for page in PAGES
    for line, source in scripts(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("source", CASES)
def test_page_scripts_run(source: str, tmp_path: Path, programs: Programs) -> None:
    script = tmp_path / "script.py"
    script.write_text(source, encoding="utf-8")
    ran = programs.run(script, anew="devices=" in source)
    assert ran.returncode == 0, (
        f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    )


def test_blocks_join_and_stay_out() -> None:
    text = (
        "```python\na = 1\n```\n\n<!-- continues -->\n```python\nb = a\n```\n"
        "<!-- not run: needs two machines -->\n```python\nc\n```\n```bash\nd\n```\n```python\ne = 2\n```\n"
    )
    assert scripts(text) == [(2, "a = 1\nb = a\n"), (17, "e = 2\n")]


def test_hook_page_is_current() -> None:
    page = ROOT / "docs" / "hooks.md"
    rendered = runpy.run_path(str(ROOT / "docs" / "generate_hooks.py"))["render"]()
    assert page.read_text(encoding="utf-8") == rendered, (
        "the hook specification changed: run `make docs`"
    )


def test_decisions_are_whole() -> None:
    """A section says what was decided, why, and what was rejected; its number is its anchor, and is used once."""
    decisions = runpy.run_path(str(ROOT / "docs" / "generate_decisions.py"))
    folder = ROOT / "docs" / "decisions"
    names = {page.stem for page in folder.glob("*.md")}
    assert names == {*decisions["PAGES"], "index"}
    numbers = [*decisions["DROPPED"]]
    for name in decisions["PAGES"]:
        text = (folder / f"{name}.md").read_text(encoding="utf-8")
        for section in re.split(r"^## ", text, flags=re.M)[1:]:
            heading = section.splitlines()[0]
            match = decisions["HEADING"].match(f"## {heading}")
            assert match, f"{name}.md: {heading}"
            number, _, anchor = match.groups()
            assert anchor == f"{int(number):04}", heading
            numbers.append(int(number))
            for part in ("**Context.**", "**Decision.**", "**Rejected.**"):
                assert f"\n{part}" in section, f"{name}.md: {number} lacks {part}"
    assert len(numbers) == len(set(numbers))


def test_the_learn_pages_tell_of_one_model() -> None:
    """A reader saves it on the first page, and sees nothing else on the others."""
    first, *others = [
        scripts((ROOT / "docs" / "learn" / f"{name}.md").read_text(encoding="utf-8"))[
            0
        ][1]
        for name in (
            "first-run",
            "real-training",
            "several-devices",
            "big-models",
            "clusters",
        )
    ]
    model = first[: first.index("tk.seed_everything")]
    assert "class LanguageModel" in model
    for other in others:
        assert other.startswith(model.rstrip())
