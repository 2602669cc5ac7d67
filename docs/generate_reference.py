"""Writes the pages of docs/reference that are tables of the code, for ``make docs``.

``index.md`` has every public name, ``commands.md`` every command and option, ``configuration.md`` every key of the
files of ``trainer-kit launch``, ``script-files.md`` every key of the files of ``tk.cli``. The other pages are
directives for mkdocstrings, which reads the docstrings when the site is built.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import click

from trainer_kit import callbacks, loggers
from trainer_kit.commands.arguments import Arguments
from trainer_kit.commands.main import main
from trainer_kit.core import lazy
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import Duration
from trainer_kit.launch.options import SECTIONS, TOP, Option, positive

PAGES = Path(__file__).with_name("reference")
DIRECTIVE: Final = re.compile(r"^::: (trainer_kit\.[\w.]+)$", re.M)
MARK: Final = "<!-- Written by docs/generate_reference.py; `make docs` writes it again. -->"


def directives() -> Iterator[tuple[Path, str]]:
    """The name of every mkdocstrings directive, with its page."""
    for page in sorted(PAGES.glob("*.md")):
        for name in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            yield page, name


def resolve(name: str) -> Any:
    """The object of a dotted name."""
    value: Any = importlib.import_module("trainer_kit")
    for attribute in name.split(".")[1:]:
        if not hasattr(value, attribute):
            importlib.import_module(f"{value.__name__}.{attribute}")
        value = getattr(value, attribute)
    if isinstance(value, lazy._Names):  # `trainer_kit.cli`, after Lightning's module of that path was imported
        value = lazy._FINDERS["trainer_kit"].get(value.__name__, "__call__")
    return value


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", r"\|").split())


def index() -> str:
    """Every public name, what it is, and where it is described."""
    rows = []
    for page, name in sorted(directives(), key=lambda each: each[1].rpartition(".")[2].lower()):
        lines = (inspect.getdoc(resolve(name)) or "").partition("\n\n")[0]
        short = name.removeprefix("trainer_kit.")
        rows.append(f"| [`{short}`]({page.name}#{name}) | {_cell(lines)} |")
    pages = []
    for page in sorted(PAGES.glob("*.md")):
        if page.name != "index.md":
            title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            pages.append(f"- [{title}]({page.name})")
    return "\n".join(
        [
            "# Reference",
            "",
            MARK,
            "",
            "To look a name up, find it in this table or search for it. Every argument and method is described at its",
            "class; [hooks](../hooks.md) are listed with their place in the loop.",
            "",
            *pages,
            "",
            "## Every public name",
            "",
            "`import trainer_kit as tk`; a name below is an attribute of `tk`.",
            "",
            "| name | what it is |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _context(command: click.Command, **options: Any) -> click.Context:
    """With the names of the help option: click keeps the option that a command's first context makes."""
    return click.Context(command, help_option_names=main.context_settings["help_option_names"], **options)


def all_commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """A command and its subcommands, depth first, with what a user types."""
    path = (*path, command.name or "")
    yield " ".join(path), command
    if isinstance(command, click.Group):
        for name in command.list_commands(_context(command)):
            found = command.get_command(_context(command), name)
            assert found is not None
            yield from all_commands(found, path)


def _usage(typed: str, command: click.Command) -> str:
    pieces = command.collect_usage_pieces(_context(command, info_name=typed))
    return " ".join([typed, *pieces])


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    kind = "" if option.is_flag or option.count else option.make_metavar(click.Context(click.Command("x")))
    default = option.default if isinstance(option.default, (str, int, float)) and not option.is_flag else ""
    return f"| {names} | {_cell(kind)} | {f'`{default}`' if default != '' else ''} | {_cell(option.help or '')} |"


def commands() -> str:
    """Every command with its options."""
    main.name = "trainer-kit"
    parts = [
        "# Commands\n",
        MARK + "\n",
        "To start a run or to look after its files from a shell, use `trainer-kit`, or `python -m trainer_kit`."
        " [The command line](../guide/command-line.md) shows each command at work.\n",
    ]
    for typed, command in all_commands(main):
        parts += [f"## `{typed}`\n", f"```text\n{_usage(typed, command)}\n```\n"]
        parts.append(inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\f", "") + "\n")
        shown = [each for each in command.params if isinstance(each, click.Option)]
        listed = [each for each in shown if not each.hidden]
        if listed:
            rows = [_option(option) for option in listed]
            parts.append("\n".join(["| option | value | default | what it does |", "|---|---|---|---|", *rows, ""]))
        if len(listed) < len(shown):
            text = "Every key of [a configuration file](configuration.md) that has a flag there is an option too."
            parts.append(text + "\n")
    return "\n".join(parts)


_KINDS: Final[dict[Callable[[str], Any], str]] = {str: "text", positive: "a whole number, 1 or more"}


def _kind(option: Option) -> str:
    if option.words:
        return ", ".join(f"`{word}`" for word in option.words)
    if option.free:
        return "a mapping or a list"
    if option.switch or option.read.__name__ == "_boolean":
        return "`true`, `false`"
    kind = _KINDS.get(option.read, "a whole number" if option.whole else "a number")
    if option.read.__name__ == "_streams":
        kind = "0 to 3, or `RANK:NUMBER`"
    if option.read.__name__ == "convert":
        kind = "a number, `auto` or `none`"
    return f"a list of {kind}" if option.many else kind


def _key(option: Option) -> str:
    flags = (f"--{option.name}",) if option.flags is None else option.flags
    names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
    note = f"no effect: {option.ignored}" if option.ignored else option.help
    return f"| {names} | {', '.join(f'`{flag}`' for flag in flags)} | {_cell(_kind(option))} | {_cell(note)} |"


def configuration() -> str:
    """Every key of a configuration file."""
    head = ["| key | flag | value | |", "|---|---|---|---|"]
    parts = [
        "# Keys of configuration files\n",
        MARK + "\n",
        "To start a script as a file says, pass the file to `trainer-kit launch --config_file FILE`, or write the"
        " default file with `trainer-kit config`. Keys are Accelerate's, so its files work unchanged; a key without a"
        " text here means what it means there. [The command line](../guide/command-line.md#configuration-files) says"
        " which file is read, and what counts before what.\n",
        "The files of a script's own command line, of `tk.cli` and `LightningCLI`, have"
        " [other keys](script-files.md).\n",
        "## Top level\n",
        "The keys from `ec2_instance_type` on describe"
        " [a job on SageMaker](../guide/command-line.md#a-job-on-sagemaker). `commands` and `command_file` are for"
        " [`trainer-kit tpu-config`](../guide/command-line.md#trainer-kit-tpu-config-the-command-for-a-tpu-pod).\n",
        "\n".join([*head, *(_key(option) for option in TOP.values()), ""]),
    ]
    for section, options in SECTIONS.items():
        parts += [f"## `{section}`\n", "\n".join([*head, *(_key(option) for option in options.values()), ""])]
    return "\n".join(parts)


# What a value of a type is in a file; the members of a union are listed one after the other.
_VALUES: Final = {
    bool: "`true`, `false`",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "`null`",
    Any: "text, a number, a list or a mapping",
    Mapping: "a mapping",
    Collection: "a list",
    timedelta: "",  # as text
    Callable: "",  # in code only
    type: "",
}


def _values(kind: Any) -> list[str]:
    if kind in _VALUES:
        return [_VALUES[kind]] if _VALUES[kind] else []
    origin, members = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [f"`{word}`" for word in members]
    if origin is None:
        return [] if kind in (Duration, os.PathLike) else ["`class_path` and `init_args`"]
    if isinstance(origin, type) and origin in _VALUES:
        return _values(origin)
    if isinstance(origin, type) and issubclass(origin, Collection):
        return _values(Collection)
    if origin is os.PathLike:
        return []
    words = dict.fromkeys(word for member in members for word in _values(member))
    return [*(word for word in words if word != "`null`"), *(["`null`"] if "`null`" in words else [])]


def script_keys() -> dict[str, tuple[Any, list[str]]]:
    """Every key of a file for ``tk.cli``: the option of the parser, and the commands that have it."""
    made = Arguments(TrainModule, DataModule, choose_model=True, choose_data=True, trainer_defaults={})
    found: dict[str, tuple[Any, list[str]]] = {}
    for command, parser in made._parsers.items():
        for action in parser._actions:
            # Those without a type are --help, --config and --print_config, which no file has, and `trainer`, a section.
            if getattr(action, "_typehint", None) is not None and not action.dest.endswith(".help"):
                found.setdefault(action.dest, (action, []))[1].append(command)
    return found


def script_files() -> str:
    """Every key of a configuration file of a script."""
    head = ["| key | value | default | |", "|---|---|---|---|"]
    texts = {
        "model": "Arguments of your module; with `subclass_mode_model=True` the class too.",
        "data": "Arguments of your datamodule; with `subclass_mode_data=True` the class too.",
        "optimizer": "The optimizer of all parameters, if the module has no `configure_optimizers`.",
        "lr_scheduler": "The scheduler of that optimizer.",
    }
    rows: dict[bool, list[str]] = {True: [], False: []}
    for key, (action, commands) in script_keys().items():
        text = texts.get(key, action.help)
        if len(commands) == 1:
            text = f"{text}; for `{commands[0]}` only"
        default = "" if action.default is None else f"`{json.dumps(action.default)}`"
        values = ", ".join(_values(action._typehint)) if key not in ("model", "data") else "a mapping"
        rows[key.startswith("trainer.")].append(
            f"| `{key.removeprefix('trainer.')}` | {_cell(values)} | {default} | {_cell(text)} |"
        )
    names = {
        room.__name__.rpartition(".")[2]: ", ".join(f"`{name}`" for name in room.__all__ if _is_chosen(room, name))
        for room in (callbacks, loggers)
    }
    return "\n".join(
        [
            "# Keys of a script's files\n",
            MARK + "\n",
            "To set the arguments of a script in a YAML file, pass it to a script with `tk.cli` or `LightningCLI`:"
            " `python train.py fit --config FILE`. Each key is an option too: `--trainer.max_epochs=3`."
            " [A command line for your script](../guide/cli.md) shows both; the files of `trainer-kit launch` have"
            " [other keys](configuration.md).\n",
            "## Top level\n",
            "\n".join([*head, *rows[False], ""]),
            "Under `model` and `data` the keys are the arguments of your classes. A chosen class is a mapping:"
            " `class_path` names it, `init_args` has its arguments. `LightningCLI` has the keys that"
            " `add_arguments_to_parser` adds, too.\n",
            "## `trainer`\n",
            "The arguments of the [`Trainer`](trainer.md).\n",
            "\n".join([*head, *rows[True], ""]),
            "## Classes by their names\n",
            f"As items of `trainer.callbacks` these need no module in `class_path`: {names['callbacks']}.\n",
            f"As `trainer.logger`, with `trainer_kit.loggers.` before the name: {names['loggers']}.\n",
        ]
    )


def _is_chosen(room: Any, name: str) -> bool:
    """Whether a name of a package is a class to be made, not one to be extended."""
    value = getattr(room, name)
    return inspect.isclass(value) and not name.startswith("Base") and value not in (callbacks.Callback, loggers.Logger)


WRITTEN: Final = {
    "commands.md": commands,
    "configuration.md": configuration,
    "index.md": index,
    "script-files.md": script_files,
}

if __name__ == "__main__":
    for name, render in WRITTEN.items():
        (PAGES / name).write_text(render(), encoding="utf-8")
        print(f"wrote docs/reference/{name}")
