"""``trainer-kit migrate``: rewrite the imports of Lightning and Accelerate code, and report what will not move."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer_kit.commands.migrate_names import Finding, bound_names, mentions
from trainer_kit.commands.terminal import FilePath
from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.commands.migrate_report import Project

__all__ = ["migrate"]


@click.command("migrate")
@click.argument("path", type=FilePath(exists=True, path_type=Path))
@click.option("--check", is_flag=True, help="Print no diff; leave with 1 where something is to be rewritten or found.")
@click.option("--write", is_flag=True, help="Write the files instead of printing the diff.")
def migrate(path: Path, check: bool, write: bool) -> None:
    """Move the Lightning or Accelerate code at PATH to trainer_kit, and report what will not move.

    Imports, dotted names in strings, and `_target_` and `class_path` in YAML are rewritten; by default this is only
    printed, as a diff. No code at PATH is run.
    """
    if importlib.util.find_spec("libcst") is None:
        raise ConfigurationError(
            "imports are rewritten with libcst, which is not installed", fix="pip install 'trainer-kit[migrate]'"
        )
    from trainer_kit.commands.migrate_report import Project

    files = {file: file.read_bytes() for file in _files(path)}
    findings: list[Finding] = []
    project = Project()
    changed: dict[Path, bytes] = {}
    for file, source in files.items():
        try:
            changed[file] = _rewritten(file, source, project)
        except (SyntaxError, ValueError) as error:
            findings.append(Finding(str(file), getattr(error, "lineno", None) or 1, "source", f"not read: {error}"))
    changed = {file: new for file, new in changed.items() if new != files[file]}
    findings += project.findings()
    for file, new in changed.items():
        if write:
            replace_file(file.resolve(), new, file.stat().st_mode & 0o7777)
        elif not check:
            _print_diff(file, files[file], new)
    findings = sorted(set(findings), key=lambda one: (one.path, one.line, one.problem))
    _print_findings(findings)
    _print_summary(len(files), len(changed), write, project, findings)
    sys.exit(1 if check and (changed or findings) else 0)


def _files(path: Path) -> Iterator[Path]:
    """The Python and YAML files at a path, in order; nothing in hidden directories, and no link to a directory."""
    if path.is_file():
        if path.suffix not in ("", ".py", ".pyw", ".pyi", ".yaml", ".yml"):
            raise ConfigurationError(
                "this file is neither Python nor YAML",
                found=str(path),
                fix="run jupyter nbconvert --to script, and pass the .py file" if path.suffix == ".ipynb" else None,
            )
        yield path
        return
    for directory, inside, names in os.walk(path):
        inside[:] = sorted(name for name in inside if not name.startswith(".") and name != "__pycache__")
        yield from (Path(directory, name) for name in sorted(names) if name.endswith((".py", ".yaml", ".yml")))


def _rewritten(file: Path, source: bytes, project: Project) -> bytes:
    """Rewrite a file's source, and add the file to the project."""
    from libcst import ParserSyntaxError

    from trainer_kit.commands.migrate_rewrite import rewrite_python, rewrite_yaml

    if file.suffix in (".yaml", ".yml"):
        text = source.decode()
        if not mentions(text):
            return source
        project.add_yaml(str(file), text)
        return rewrite_yaml(text).encode()
    tree = ast.parse(source, str(file))
    bound = bound_names(tree)
    project.add_python(str(file), tree, bound)
    if not mentions(source.decode("utf-8", "replace")):
        return source
    try:
        return rewrite_python(source, bound)
    except ParserSyntaxError as error:
        raise SyntaxError(error.message) from error


def _print_diff(file: Path, old: bytes, new: bytes) -> None:
    before, after = (text.decode("utf-8", "replace").splitlines(keepends=True) for text in (old, new))
    for line in difflib.unified_diff(before, after, f"a/{file}", f"b/{file}"):
        click.echo(line, nl=not line.endswith("\n"))


def _print_findings(findings: list[Finding]) -> None:
    last = None
    for finding in findings:
        click.echo(f"{finding.path}:{finding.line}: {finding.problem}")
        if finding.fix is not None and (finding.path, finding.fix) != last:
            click.echo(f"    fix: {finding.fix}")
        last = finding.path, finding.fix


def _print_summary(read: int, changed: int, write: bool, project: Project, findings: list[Finding]) -> None:
    kinds = Counter(finding.kind for finding in findings)
    click.echo(
        f"{read} files read, {changed} {'rewritten' if write else 'to rewrite'}; "
        f"{project.resolved} of {project.names} imported names exist here; "
        f"{len(findings)} findings"
        + (f": {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}" if kinds else "")
    )
    if changed and not write:
        click.echo("write the files: --write")
