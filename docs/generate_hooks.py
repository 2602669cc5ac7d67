"""Writes docs/hooks.md from `trainer_kit/core/hooks.py`, for ``make docs``; a test holds that the page is current."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

from trainer_kit.core import hooks

PAGE = Path(__file__).with_name("hooks.md")
HEAD = """\
# Hooks

<!-- Written by docs/generate_hooks.py from trainer_kit/core/hooks.py; edit that, then `make docs`. -->

Every hook there is, what it is given, and what holds when it is called. A callback is called before the module, and
callbacks in the order `early`, `normal`, `late`, within one in the order of the Trainer's list. Hooks without
an override cost nothing. A misspelled hook fails when its class is created;
any other unknown `on_*` name, or a hook that cannot take its arguments, when a Trainer is given an object of the class.
The order of a whole run is in [the design](design.md); `trainer.explain()` has it for a composed run, with the
objects that override each hook.

![The loop, with every hook at its place](assets/loop.svg)
"""
ROLES = {
    "Callback": "What callbacks override; each hook is called by position as `hook(trainer, pl_module, ...)`.",
    "ModuleHooks": "The same moments on a `TrainModule`, without the leading `trainer, pl_module`.",
    "DataHooks": "What a `DataModule`, and a `TrainModule` that brings its own data, overrides.",
}


def methods(cls: type) -> list[ast.FunctionDef]:
    """The hooks of a specification class, in the order of its source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    functions = (node for node in body.body if isinstance(node, ast.FunctionDef))
    return [node for node in functions if not node.name.startswith("_")]


def signature(function: ast.FunctionDef) -> str:
    """``name(parameters)`` without annotations and without self; a property's name alone."""
    if any(
        ast.unparse(decorator) == "property" for decorator in function.decorator_list
    ):
        return function.name
    arguments = [*function.args.posonlyargs, *function.args.args][1:]
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + list(
        function.args.defaults
    )
    shown = [
        a.arg if d is None else f"{a.arg}={ast.unparse(d)}"
        for a, d in zip(arguments, defaults, strict=True)
    ]
    return f"{function.name}({', '.join(shown)})"


def prose(function: ast.FunctionDef) -> str:
    """The docstring on one line of a table, without its sections: the reference has the arguments."""
    docstring = ast.get_docstring(function) or ""
    text = re.split(r"\n\n(?:Args|Returns):\n", docstring)[0]
    return " ".join(text.replace("``", "`").replace("|", r"\|").split())


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, role in ROLES.items():
        rows = [
            f"| `{signature(function)}` | {prose(function)} |"
            for function in methods(getattr(hooks, name))
        ]
        parts.append(
            "\n".join(
                [
                    f"## {name}\n",
                    f"{role}\n",
                    "| hook | when, and what holds |",
                    "|---|---|",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(
        f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}"
    )
