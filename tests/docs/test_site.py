"""The site: every page is in its navigation, every link resolves, and the reference has every public option."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import yaml

import trainer_kit as tk

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
REFERENCE = runpy.run_path(str(DOCS / "generate_reference.py"))
LINK = re.compile(r"(?<!`)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)


class Loader(yaml.SafeLoader):
    """`mkdocs.yml` without what its tags make: they are calls and variables of the site's own environment."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
Loader.add_multi_constructor(
    "tag:yaml.org,2002:python/", lambda loader, suffix, node: None
)


def entries(tree: Any) -> Iterator[str]:
    """The pages of the navigation."""
    for each in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(each, str):
            yield each
        else:
            yield from entries(each)


def test_every_page_is_in_the_navigation() -> None:
    listed = [
        *entries(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)["nav"])
    ]
    assert len(listed) == len(set(listed))
    assert {page.relative_to(DOCS).as_posix() for page in PAGES} == set(listed)


def test_icons_are_those_that_mkdocs_material_has_too() -> None:
    """`make site-material` stops at an icon of Zensical's other sets."""
    settings = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    icons = [each["toggle"]["icon"] for each in settings["theme"]["palette"]]
    assert len(icons) == 3
    assert all(icon.startswith("material/") for icon in icons)


def prose(path: Path) -> str:
    """A page without its blocks of code and comments."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


@cache
def anchors(path: Path) -> set[str]:
    """What ``#...`` may name on a page: its headings, as GitHub and the site spell them, and its API entries' names."""
    found = set(re.findall(r'(?:id|name)="([^"]+)"|\{ *#([\w-]+) *\}', prose(path)))
    found = {name for pair in found for name in pair if name}
    for heading in re.findall(r"^#+ +(.+?) *(?:\{[^}]*\})?$", prose(path), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", unescape(heading))
        found.add(re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-"))
    return found


def is_there(page: Path, name: str) -> bool:
    if name in anchors(page):
        return True
    for directive in REFERENCE["DIRECTIVE"].findall(page.read_text(encoding="utf-8")):
        if name == directive or name.startswith(f"{directive}."):
            found = REFERENCE["resolve"](directive)
            return all(
                hasattr(found, part)
                for part in name.removeprefix(directive).split(".")[1:2]
            )
    return False


OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize(
    "page", [*PAGES, *OUTSIDE], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_and_anchors_resolve(page: Path) -> None:
    """A page of the site links to pages of the site: what lies beside `docs` in a checkout is not there."""
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        inside = page in OUTSIDE or (file.is_relative_to(DOCS) and file.is_file())
        if not file.exists() or not inside or (anchor and not is_there(file, anchor)):
            broken.append(target)
    assert not broken


SOURCES = [
    *(
        path
        for room in ("trainer_kit", "tests")
        for path in (ROOT / room).rglob("*.py")
    ),
    *(ROOT / name for name in (".ci/run", "CHANGELOG.md", "Makefile", "SECURITY.md")),
    ROOT / "pyproject.toml",
]


def test_decisions_that_sources_name_exist() -> None:
    """A comment names a decision as ``docs/decisions/step.md#0003``."""
    named = [
        (path, page, anchor)
        for path in SOURCES
        for page, anchor in re.findall(
            r"docs/decisions/([\w.-]+)(?:#(\d+))?", path.read_text(encoding="utf-8")
        )
    ]
    broken = [
        f"{path.relative_to(ROOT)}: {page}#{anchor}"
        for path, page, anchor in named
        if not (DOCS / "decisions" / page).is_file()
        or anchor not in anchors(DOCS / "decisions" / page)
    ]
    assert named
    assert not broken


PLACE = re.compile(r"`([\w/-]+(?:/|\.(?:py|md)))(?::(\w+))?`")


def missing_places(text: str) -> list[str]:
    """Which files of ``room/file.py`` and names of ``room/file.py:Name`` are neither below a root of the house."""
    missing = []
    for place, name in PLACE.findall(text):
        roots = (ROOT, ROOT / "trainer_kit", ROOT / "tests")
        files = [root / place for root in roots if (root / place).exists()]
        names = [file for file in files if not name or defines(file, name)]
        if not names:
            missing.append(f"{place}:{name}")
    return missing


def defines(file: Path, name: str) -> bool:
    pattern = rf"^(?:class|def) {name}\b"
    return re.search(pattern, file.read_text(encoding="utf-8"), re.M) is not None


def test_the_house_page_leads_to_files_that_exist() -> None:
    text = (DOCS / "house.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| ", text, re.M)) > 40
    assert not missing_places(text)
    assert missing_places("`core/nowhere.py` and `trainer.py:Nobody`") == [
        "core/nowhere.py:",
        "trainer.py:Nobody",
    ]


@pytest.mark.parametrize("page", sorted((DOCS / "decisions").glob("*.md")))
def test_decisions_name_files_that_exist(page: Path) -> None:
    missing = missing_places(page.read_text(encoding="utf-8"))
    # Directories are also those of users.
    assert not [place for place in missing if not place.endswith("/:")]


def public() -> dict[str, Any]:
    """Every public name that is not a room, by the name that a user types."""
    rooms = {
        "callbacks": tk.callbacks,
        "loggers": tk.loggers,
        "precision": tk.precision,
        "strategies": tk.strategies,
    }
    rooms |= {"tuner": tk.tuner}
    found = {
        f"trainer_kit.{name}": getattr(tk, name)
        for name in tk.__all__
        if not inspect.ismodule(getattr(tk, name))
    }
    return found | {
        f"trainer_kit.{room}.{name}": getattr(module, name)
        for room, module in rooms.items()
        for name in module.__all__
    }


def test_the_reference_has_every_public_name_once() -> None:
    named = [name for _, name in REFERENCE["directives"]()]
    assert len(named) == len(set(named))
    described = {id(REFERENCE["resolve"](name)) for name in named}
    assert not [name for name, value in public().items() if id(value) not in described]


def options(cls: type) -> set[str]:
    """The names that a call of the class may pass."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name
        for name, each in inspect.signature(cls).parameters.items()
        if each.kind not in kinds
    }


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in public().items()
        if inspect.isclass(value) and "__init__" in vars(value)
    ],
)
def test_every_argument_of_a_class_is_described(name: str) -> None:
    """mkdocstrings makes the tables of arguments of these descriptions."""
    cls = public()[name]
    words = docstring_parser.parse(inspect.getdoc(cls) or "").params
    assert options(cls) <= {word.arg_name for word in words}


@pytest.mark.parametrize("page", sorted(REFERENCE["WRITTEN"]))
def test_pages_of_tables_are_current(page: str) -> None:
    """Every command with its options, and every key of a configuration file."""
    written = (DOCS / "reference" / page).read_text(encoding="utf-8")
    assert written == REFERENCE["WRITTEN"][page](), "the code changed: run `make docs`"


@pytest.mark.parametrize(
    "cls",
    [
        tk.callbacks.ModelCheckpoint,
        tk.callbacks.EarlyStopping,
        tk.strategies.DDPStrategy,
        tk.strategies.FSDPStrategy,
    ],
)
def test_every_option_of_the_most_used_classes_is_in_a_guide(cls: type) -> None:
    """As code, on a page that names the class: a reader of the guides meets each option where it is of use."""
    pages = [
        page.read_text(encoding="utf-8")
        for room in ("guide", "howto")
        for page in (DOCS / room).glob("*.md")
    ]
    code = " ".join(
        part
        for text in pages
        if cls.__name__ in text
        for part in re.findall("```.*?```|`[^`\n]+`", text, re.S)
    )
    asked = options(cls) - {"device"}  # the Trainer sets it
    assert not {name for name in asked if not re.search(rf"\b{name}\b", code)}


def keys_of_tables(page: str) -> set[str]:
    """What stands in the first column of a page's tables; keys of a section are listed under its heading."""
    text = (DOCS / "reference" / page).read_text(encoding="utf-8")
    return {
        name
        for cell in re.findall(r"^\| (`[^|]+`) \|", text, re.M)
        for name in re.findall("`([^`]+)`", cell)
    }


def test_every_key_of_a_scripts_file_is_in_its_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What `--print_config` prints is the whole file, with every key."""
    calls = {
        "tk.cli": lambda words: tk.cli(args=words),
        "LightningCLI": lambda words: tk.LightningCLI(args=words),
    }
    listed = keys_of_tables("script-files.md")
    for name, call in calls.items():
        for command in ("fit", "validate", "test", "predict"):
            with pytest.raises(SystemExit):
                call(
                    [
                        command,
                        "--model=trainer_kit.testing.TinyModule",
                        "--print_config",
                    ]
                )
            found = yaml.safe_load(capsys.readouterr().out)
            keys = {*found, *found.pop("trainer")} - {"trainer"}
            assert len(keys) > 50, name
            assert keys <= listed, name


def test_every_key_of_a_launch_file_is_in_its_table(tmp_path: Path) -> None:
    """The files that Accelerate writes, and every spelling that the launcher reads."""
    from click.testing import CliRunner

    from trainer_kit.commands.main import main
    from trainer_kit.launch.options import SECTIONS, TOP

    listed = keys_of_tables("configuration.md")
    for options in (TOP, *SECTIONS.values()):
        for option in options.values():
            assert {option.name, *option.aliases} <= listed
    headings = set(
        re.findall(
            r"^## `(\w+)`$",
            (DOCS / "reference" / "configuration.md").read_text("utf-8"),
            re.M,
        )
    )
    assert headings == set(SECTIONS)
    file = tmp_path / "default.yaml"
    done = CliRunner().invoke(main, ["config", "default", "--config_file", str(file)])
    assert done.exit_code == 0, done.output
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert found
    assert found.keys() <= listed | headings


def test_every_key_of_a_file_has_a_text() -> None:
    tables = (REFERENCE["TOP"], *REFERENCE["SECTIONS"].values())
    options = [option for table in tables for option in table.values()]
    texts = [REFERENCE["_text"](option) for option in options]
    assert all(len(text) > 3 for text in texts), texts
    assert REFERENCE["_TEXTS"].keys() <= {
        option.name for option in options if not option.help and not option.ignored
    } | {"gradient_accumulation_steps"}


def test_every_described_argument_has_its_default_in_the_signature() -> None:
    """The site takes defaults from signatures: an argument that arrives through ``**`` would look required."""
    unseen = {}
    for name, value in public().items():
        if inspect.isclass(value) and "__init__" in vars(value):
            parsed = docstring_parser.parse(inspect.getdoc(value) or "")
            taken = inspect.signature(value).parameters
            words = {
                word.arg_name.lstrip("*")
                for word in parsed.params
                if word.args[0] == "param"
            }
            if words - taken.keys():
                unseen[name] = words - taken.keys()
    assert not unseen


def test_every_argument_of_a_public_function_is_described() -> None:
    missing = {}
    for _, name in REFERENCE["directives"]():
        value = REFERENCE["resolve"](name)
        if inspect.isfunction(value):
            words = {
                word.arg_name.lstrip("*")
                for word in docstring_parser.parse(inspect.getdoc(value) or "").params
            }
            if lacking := inspect.signature(value).parameters.keys() - words:
                missing[name] = lacking
    assert not missing


@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("generate_decisions.py", "decisions/index.md"),
        ("generate_troubleshooting.py", "../trainer_kit/commands/troubleshooting.md"),
        ("generate_loop.py", "assets/loop.svg"),
        ("draw/mesh.py", "pictures/mesh.svg"),
        ("draw/curves.py", "pictures/curves.svg"),
    ],
)
def test_lists_and_pictures_are_current(script: str, page: str) -> None:
    rendered = runpy.run_path(str(DOCS / script))["render"]()
    assert (DOCS / page).read_text(encoding="utf-8") == rendered, (
        "run `make docs pictures`"
    )


def test_the_curves_are_those_of_every_strategy() -> None:
    """Real runs of examples/lm.py, whose losses tests/examples/test_lm.py compares again."""
    curves = runpy.run_path(str(DOCS / "draw" / "curves.py"))
    losses = json.loads(
        (DOCS / "pictures" / "curves.json").read_text(encoding="utf-8")
    )["losses"]
    assert list(losses) == list(curves["RANKS"])
    assert len(losses) == 16
    for name, values in losses.items():
        assert [int(step) for step in values] == [*range(1, curves["STEPS"] + 1)]
        assert curves["difference"](values, losses["auto"]) < 1e-5, (
            name
        )  # as README.md says


def test_the_picture_of_the_loop_has_every_hook() -> None:
    loop = runpy.run_path(str(DOCS / "generate_loop.py"))
    drawn = {name for _, column in loop["OTHERS"] for name in loop["names"](column)}
    hooks = {name for name in vars(tk.Callback) if name.startswith("on_")} | {
        "setup",
        "teardown",
    }
    elsewhere = {
        name for name in hooks if re.match("on_(test|predict)_", name)
    }  # drawn as those of validation
    assert hooks - elsewhere <= drawn
    assert {
        name.replace("_test_", "_validation_").replace("_predict_", "_validation_")
        for name in elsewhere
    } <= drawn


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_site_builds_without_a_warning(built_site: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(built_site.parent, site)
    # Pages name nothing outside of their version's directory, so a copy is a second version.
    shutil.copytree(site / "0.9", site / "0.10")
    subprocess.run(
        [sys.executable, DOCS / "finish_site.py", site], check=True, timeout=60
    )
    assert 'url=0.10/"' in (site / "index.html").read_text(encoding="utf-8")
    versions = yaml.safe_load((site / "versions.json").read_text(encoding="utf-8"))
    assert [(each["version"], each["aliases"]) for each in versions] == [
        ("0.10", ["latest"]),
        ("0.9", []),
    ]
    text = (site / "0.10/reference/trainer/index.html").read_text(encoding="utf-8")
    assert 'id="trainer_kit.Trainer.fit"' in text
    for argument in inspect.signature(tk.Trainer).parameters:
        assert f"<code>{argument}</code>" in text
    loaded = re.compile(
        r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"'
    )
    for page in (site / "0.10").glob("**/*.html"):
        assert 'rel="canonical"' not in page.read_text(encoding="utf-8"), page
        assert not loaded.findall(page.read_text(encoding="utf-8")), (
            f"{page} loads from another host"
        )
    assert (site / "0.10/search.json").stat().st_size > 100_000
    # Two versions stand side by side, and the theme on each page finds the list of them beside its own directory.
    for version in ("0.9", "0.10"):
        text = (site / version / "index.html").read_text(encoding="utf-8")
        assert json.loads(
            re.search(r'<script id="__config"[^>]*>(.*?)</script>', text)[1]
        )["version"] == {"provider": "mike"}
    assert not list(site.glob("*/requirements*.txt"))
    assert not list(site.glob("**/*.py"))
