"""Places outside of Python code that name Lightning or Accelerate: requirements, and commands in scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from trainer_kit.migrate.names import Finding

__all__ = ["command_findings", "is_setup_file", "setup_findings"]

_DISTRIBUTION: Final = (
    r"(?:pytorch[-_]lightning|lightning[-_]fabric|lightning|accelerate)"
)
_REQUIREMENTS: Final = re.compile(
    r"(.*requirements?.*|constraints.*)\.(txt|in)|pyproject\.toml|setup\.(py|cfg)|Pipfile|(environment|conda|env).*\.ya?ml"
)
_SCRIPTS: Final = re.compile(
    r".*\.(sh|bash|zsh|fish|slurm|sbatch|bat|ps1|mk)|Makefile|Dockerfile.*|.*\.Dockerfile"
)
# A name between quotes, at a line's begin, or after a list's dash (conda's with a channel); not `lightning-utilities`.
_REQUIREMENT: Final = re.compile(
    rf"""(?:^\s*|^\s*-\s*(?:[\w-]+::)?|["'])(?P<name>{_DISTRIBUTION})(?:\[[^\]]*\])?(?=\s*(?:[<>=~!;,"'#]|@\s|$))"""
)
_INSTALL: Final = re.compile(
    rf"\b(?:pip3?|uv|conda|mamba|poetry)\b.*\b(?:install|add)\b.*?[\s\"'](?P<name>{_DISTRIBUTION})(?![\w.-])"
)
# With a subcommand: "accelerate" alone is a word, and a directory.
_COMMAND: Final = re.compile(
    r"(?<![\w./-])(?P<command>accelerate|lightning|fabric)\s+"
    r"(?P<verb>launch|config|env|test|estimate-memory|merge-weights|tpu-config|to-fsdp2|run)(?![\w-])"
)
_MODULE: Final = re.compile(
    r"-m\s+(?P<module>accelerate\.commands\.(?:launch|accelerate_cli))\b"
)


def is_setup_file(path: PurePath) -> bool:
    """Whether a file lists requirements or holds shell commands, by its name."""
    return (
        _REQUIREMENTS.fullmatch(path.name) is not None
        or _SCRIPTS.fullmatch(path.name) is not None
    )


def setup_findings(path: PurePath, text: str) -> Iterator[Finding]:
    """Yield the requirements and commands of the packages in a file that `is_setup_file` accepts.

    Example:
        >>> for finding in setup_findings(PurePath("requirements.txt"), "torch\\nlightning>=2.1\\n"):
        ...     print(finding.line, finding.problem)
        2 lightning is required
    """
    # A shell script has lines that look like requirements, such as a word in quotes.
    lists_requirements = _REQUIREMENTS.fullmatch(path.name) is not None
    for number, line in enumerate(text.splitlines(), 1):
        # The patterns below look at one line: what a comment says of a package is no requirement.
        code = line.partition("#")[0]
        if lists_requirements:
            requirement = _REQUIREMENT.search(code)
            if requirement is not None:
                yield _requirement(path, number, requirement["name"])
        yield from command_findings(str(path), number, code)


def command_findings(path: str, number: int, line: str) -> Iterator[Finding]:
    """Yield what a line of a shell script names: packages that it installs, and commands that it runs."""
    install = _INSTALL.search(line)
    if install is not None:
        yield _requirement(path, number, install["name"])
    for command in _COMMAND.finditer(line):
        name = f"{command['command']} {command['verb']}"
        verb = command["verb"]
        # `fabric run` is Lightning's launcher.
        if verb == "run":
            verb = "launch"
        yield Finding(
            str(path),
            number,
            "command",
            f"{name} is a command of the other library",
            f"trainer-kit {verb}",
        )
    for module in _MODULE.finditer(line):
        problem = f"{module['module']} is a module of the other library"
        yield Finding(
            str(path), number, "command", problem, "python -m trainer_kit launch"
        )


def _requirement(path: object, number: int, name: str) -> Finding:
    fix = f"add trainer-kit, and remove {name} when no import of it is left"
    return Finding(str(path), number, "requirement", f"{name} is required", fix)
