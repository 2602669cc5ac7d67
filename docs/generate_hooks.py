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

This page lists every hook, its arguments, and the state of the run when it is called. Callbacks are called before the
module, in the order `early`, `normal`, `late`, and within each of these in the order of the Trainer's list. Hooks
without an override have no overhead. A misspelled hook raises an error when its class is created. Any other unknown
`on_*` name, or a hook with wrong parameters, raises an error when an object of the class is passed to a Trainer.
[The design](design.md) shows the order of a whole run; `trainer.explain()` shows it for your run, with the objects
that override each hook.

![The loop, with every hook at its place](assets/loop.svg)
"""
ROLES = {
    "Callback": "Hooks for callbacks to override, called with positional arguments: `hook(trainer, pl_module, ...)`.",
    "ModuleHooks": "The same hooks on a `TrainModule`, without the leading `trainer, pl_module`.",
    "DataHooks": "Hooks that a `DataModule`, or a `TrainModule` with its own data, overrides.",
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
