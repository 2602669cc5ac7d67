"""``trainer-kit migrate``: rewrite the imports of Lightning and Accelerate code, and report what will not move."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer_kit.commands.terminal import FilePath
from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.wings import need_wing

if TYPE_CHECKING:
    from trainer_kit.migrate.names import Finding
    from trainer_kit.migrate.project import Project

__all__ = ["migrate"]


@click.command("migrate")
@click.argument("path", type=FilePath(exists=True, path_type=Path))
@click.option(
    "--check",
    is_flag=True,
    help="Print no diff; exit with 1 if anything is to be rewritten or fixed.",
)
@click.option(
    "--write", is_flag=True, help="Write the files instead of printing the diff."
)
def migrate(path: Path, check: bool, write: bool) -> None:
    """Move the Lightning or Accelerate code at PATH to trainer_kit, and report what will not move.

    Imports, dotted names in strings, and names of classes in YAML are rewritten, also in notebooks; by default this is
    only printed, as a diff. Requirements and commands in scripts are reported. No code at PATH is run. Run it again
    after --write: what will not move is reported until it is changed, so that --check can run in CI.
    """
    need_wing("migrate", "trainer-kit migrate")
    if importlib.util.find_spec("libcst") is None:
        raise ConfigurationError(
            "imports are rewritten with libcst, which is not installed",
            fix="pip install 'trainer-kit[migrate]'",
        )
    from trainer_kit.migrate.files import read_project, rewrite_files

    files = read_project(path)
    contents, findings = rewrite_files(files)
    changed = {
        file: new for file, new in contents.items() if new != files.contents[file]
    }
    findings += files.findings()
    for file, new in changed.items():
        # A link keeps pointing to its file, and a script stays executable.
        if write:
            replace_file(file.resolve(), new, file.stat().st_mode & 0o7777)
        elif not check:
            _print_diff(file, files.contents[file], new)
    # A set: two names of one import statement may have the same finding on the same line.
    findings = sorted(
        set(findings), key=lambda finding: (finding.path, finding.line, finding.problem)
    )
    _print_findings(findings)
    _print_summary(len(files.contents), len(changed), write, files.project, findings)
    sys.exit(int(check and bool(changed or findings)))


def _print_diff(file: Path, old: bytes, new: bytes) -> None:
    before, after = (
        text.decode("utf-8", "replace").splitlines(keepends=True) for text in (old, new)
    )
    for line in difflib.unified_diff(before, after, f"a/{file}", f"b/{file}"):
        click.echo(line, nl=not line.endswith("\n"))


def _print_findings(findings: list[Finding]) -> None:
    # Findings of one file are next to each other, and a fix that several share is printed under the first of them.
    last = None
    for finding in findings:
        click.echo(f"{finding.path}:{finding.line}: {finding.problem}")
        if finding.fix is not None and (finding.path, finding.fix) != last:
            click.echo(f"    fix: {finding.fix}")
        last = finding.path, finding.fix


def _print_summary(
    read: int, changed: int, write: bool, project: Project, findings: list[Finding]
) -> None:
    kinds = Counter(finding.kind for finding in findings)
    total = plural(len(findings), "finding")
    if findings:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        total = f"{total}: {counts}"
    state = "to rewrite"
    if write:
        state = "rewritten"
    click.echo(
        f"{plural(read, 'file')} read, {changed} {state}; "
        f"{project.resolved} of {project.names} imported names exist here; {total}"
    )
    if changed and not write:
        click.echo("write the files: --write")
