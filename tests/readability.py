"""Counts how readable the package is: names that say nothing, dense lines, values stored on the objects of others.

``python tests/readability.py`` prints the table of rooms, ``--worst 40`` the places, and ``--write`` lowers
the ceilings that `test_readability.py` holds; it never raises one.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainer_kit"
CEILINGS = Path(__file__).with_name("readability.json")

VAGUE_NAMES = frozenset(
    [
        "found",
        "made",
        "own",
        "mine",
        "given",
        "one",
        "kept",
        "known",
        "whole",
        "there",
        "then",
        "chosen",
        "others",
        "held",
        "again",
        "wrong",
        "asked",
        "part",
        "place",
        "places",
        "theirs",
        "ours",
        "left",
        "end",
        "what",
        "of",
        "at",
        "where",
        "why",
        "how",
        "word",
        "words",
        "here",
        "such",
        "those",
        "both",
        "none",
        "rest",
        "gone",
        "taken",
        "told",
        "said",
        "more",
        "less",
        "most",
        "least",
        "it",
        "thing",
        "beside",
        "apart",
        "about",
        "anew",
    ]
)
"""Names of variables that say how a value came here, whose it is or that it is one, instead of what it is."""
VAGUE_FUNCTION = re.compile(
    r"_?(of|at|how|what|where|found|made|held|own|one|given|kept|unite|listen|act|here|there|which|whose)(_|$)"
)
_NO_CODE = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
_MIN_LINES = 8
"""Functions with fewer lines are not judged by their density."""


@dataclass
class Counts:
    """What was counted in one room.

    Attributes:
        lines: of code, without docstrings, comments and blank lines.
        tokens: on these lines.
        comments: lines with a comment.
        bindings: of local names.
        vague_names: the places of those in `VAGUE_NAMES`.
        vague_functions: the places of functions named so.
        conditionals: conditional expressions.
        chained: conditional expressions inside of others.
        tuples: the places of assignments of three or more values in one statement.
        nested_loops: comprehensions over two loops.
        stored_outside: the places where an attribute is stored on another object than ``self``.
        anys: uses of ``Any``.
        densities: tokens a line and the place of each function of eight lines or more.
    """

    lines: int = 0
    tokens: int = 0
    comments: int = 0
    bindings: int = 0
    vague_names: list[str] = field(default_factory=list)
    vague_functions: list[str] = field(default_factory=list)
    conditionals: int = 0
    chained: list[str] = field(default_factory=list)
    tuples: list[str] = field(default_factory=list)
    nested_loops: int = 0
    stored_outside: list[str] = field(default_factory=list)
    anys: int = 0
    densities: list[tuple[float, str]] = field(default_factory=list)

    def rates(self) -> dict[str, float]:
        """The figures that have a ceiling; where no unit is said, per thousand lines."""
        thousands = max(self.lines, 1) / 1000
        return {
            "tokens a line": self.tokens / max(self.lines, 1),
            "densest function": max(
                (density for density, _ in self.densities), default=0.0
            ),
            "vague names, %": 100 * len(self.vague_names) / max(self.bindings, 1),
            "vague functions": float(len(self.vague_functions)),
            "conditionals": self.conditionals / thousands,
            "chained": float(len(self.chained)),
            "tuples": len(self.tuples) / thousands,
            "nested loops": self.nested_loops / thousands,
            "stored outside": len(self.stored_outside) / thousands,
            "Any": self.anys / thousands,
        }


def count_tokens(source: str, tree: ast.Module) -> tuple[dict[int, int], int, int]:
    """Count tokens by line of code, lines with a comment, and uses of ``Any``."""
    docstring_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstring_lines.update(
                    range(node.lineno, (node.end_lineno or node.lineno) + 1)
                )
    tokens_of_line: dict[int, int] = {}
    comments = anys = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.type not in _NO_CODE and token.start[0] not in docstring_lines:
            for line in range(token.start[0], token.end[0] + 1):
                tokens_of_line.setdefault(line, 0)
            if token.type in _COUNTED:
                tokens_of_line[token.start[0]] += 1
            anys += token.string == "Any"
    return tokens_of_line, comments, anys


def count_file(path: Path, counts: Counts) -> None:
    """Add the counts of one file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    tokens_of_line, comments, anys = count_tokens(source, tree)
    counts.lines += len(tokens_of_line)
    counts.tokens += sum(tokens_of_line.values())
    counts.comments += comments
    counts.anys += anys
    file = path.relative_to(ROOT).as_posix()
    for node in ast.walk(tree):
        place = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts.bindings += 1
            if node.id in VAGUE_NAMES:
                counts.vague_names.append(f"{place} {node.id}")
        elif isinstance(node, ast.IfExp):
            counts.conditionals += 1
            if isinstance(node.orelse, ast.IfExp) or isinstance(node.body, ast.IfExp):
                counts.chained.append(place)
        elif isinstance(
            node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        ):
            counts.nested_loops += len(node.generators) > 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if len(node.targets[0].elts) >= 3 and isinstance(node.value, ast.Tuple):
                counts.tuples.append(place)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls"):
                counts.stored_outside.append(f"{place} {owner}.{node.attr}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if VAGUE_FUNCTION.match(node.name):
                counts.vague_functions.append(f"{place} {node.name}")
            lines = [
                tokens_of_line[line]
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if line in tokens_of_line
            ]
            if len(lines) >= _MIN_LINES:
                counts.densities.append(
                    (sum(lines) / len(lines), f"{place} {node.name}")
                )


def list_rooms() -> dict[str, list[Path]]:
    """The files of every room of the package; modules beside them are the room ``(top)``."""
    rooms: dict[str, list[Path]] = {}
    # A stub has the imports of its package, which stood in the package itself when the ceilings were first set.
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        parts = path.relative_to(PACKAGE).parts
        if "vendor" in parts:
            continue
        room = parts[0] if len(parts) > 1 else "(top)"
        rooms.setdefault(room, []).append(path)
    return rooms


def count_room(files: Iterable[Path]) -> Counts:
    """Count the files of one room."""
    counts = Counts()
    for path in files:
        count_file(path, counts)
    return counts


def worst_places(rooms: dict[str, Counts], number: int) -> Iterator[str]:
    """Yield the densest functions and the places of each other kind, at most ``number`` of a kind."""
    densities = [entry for counts in rooms.values() for entry in counts.densities]
    yield "densest functions"
    for density, place in sorted(densities, reverse=True)[:number]:
        yield f"  {density:5.1f} {place}"
    for title in (
        "vague_names",
        "vague_functions",
        "chained",
        "tuples",
        "stored_outside",
    ):
        yield title.replace("_", " ")
        places = [
            place for counts in rooms.values() for place in getattr(counts, title)
        ]
        for place in places[:number]:
            yield f"  {place}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--worst", type=int, default=0, help="name so many places of each kind"
    )
    parser.add_argument("--write", action="store_true", help="lower the ceilings")
    arguments = parser.parse_args()
    rooms = {room: count_room(files) for room, files in list_rooms().items()}
    titles = list(Counts().rates())
    print(f"{'':14}{'lines':>8}" + "".join(f"{title[:11]:>12}" for title in titles))
    for room, counts in sorted(rooms.items(), key=lambda item: -item[1].lines):
        figures = "".join(f"{value:12.1f}" for value in counts.rates().values())
        print(f"{room:14}{counts.lines:8}{figures}")
    for line in worst_places(rooms, arguments.worst) if arguments.worst else ():
        print(line)
    if arguments.write:
        previous = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
        ceilings = {}
        for room, counts in sorted(rooms.items()):
            limits = previous.get(room, {})
            ceilings[room] = {
                title: round(min(value + 0.05, limits.get(title, value + 0.05)), 1)
                for title, value in counts.rates().items()
            }
        CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n")


if __name__ == "__main__":
    main()
