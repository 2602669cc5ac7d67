"""The files of a project that moves: which are read, what each becomes, and what is reported of them."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, final

from tqdm import tqdm

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.migrate.names import Finding, bound_names, mentions
from trainer_kit.migrate.notebook import Notebook
from trainer_kit.migrate.project import Project
from trainer_kit.migrate.report import find_problems
from trainer_kit.migrate.setup import (
    command_findings,
    is_setup_file,
    setup_findings,
)
from trainer_kit.migrate.yaml import rewrite_yaml

__all__ = ["ProjectFiles", "read_project", "rewrite_files"]

_Item = TypeVar("_Item")
_Rewritten: TypeAlias = Iterator[tuple[Path, bytes | Finding]]
"""Each file with its new source, or with why it could not be read."""
_PYTHON: Final = ("", ".py", ".pyw", ".pyi")
_YAML: Final = (".yaml", ".yml")
# Installed packages are not the user's code.
_SKIPPED: Final = ("__pycache__", "node_modules", "site-packages")
_MANY_BYTES: Final = 2_000_000
"""The size of the sources that takes longer to rewrite than it takes to start processes that import this library."""


@final
@dataclass(frozen=True)
class ProjectFiles:
    """The files of a project.

    Attributes:
        contents: by path, the bytes of each file.
        notebooks: by path, the notebooks among them.
        project: what is known of their classes and names.
    """

    contents: Mapping[Path, bytes]
    notebooks: Mapping[Path, Notebook]
    project: Project = field(default_factory=Project)

    def findings(self) -> list[Finding]:
        """Everything that cannot be migrated; places in a notebook by cell, and by line within the cell."""
        notebooks = {str(path): notebook for path, notebook in self.notebooks.items()}
        findings = []
        for finding in find_problems(self.project):
            notebook = notebooks.get(finding.path)
            if notebook is not None:
                finding = _in_cell(finding, notebook)
            findings.append(finding)
        return findings


def read_project(path: Path) -> ProjectFiles:
    """Read the Python, YAML, notebook and set-up files at a path.

    Raises:
        ConfigurationError: ``path`` is a file of another kind.
    """
    paths = list(_files(path))
    # All at once: a class may have its base in any other file.
    contents = {file: file.read_bytes() for file in _progress(paths, "reading")}
    notebooks = {}
    for file, content in contents.items():
        if file.suffix == ".ipynb" and mentions(content.decode("utf-8", "replace")):
            try:
                notebooks[file] = Notebook(content)
            # In a directory a damaged notebook is left as it is; a path that names it wants an answer.
            except (ConfigurationError, UnicodeDecodeError):
                if path.is_file():
                    raise
    return ProjectFiles(contents, notebooks)


def rewrite_files(files: ProjectFiles) -> tuple[dict[Path, bytes], list[Finding]]:
    """Rewrite every file, and add what its code defines to the project.

    Returns:
        By path, the new bytes of the files that name one of the packages; and what could not be read, with the
        requirements and commands that the files name.
    """
    findings: list[Finding] = []
    contents: dict[Path, bytes] = {}
    sources: dict[Path, bytes] = {}
    for file, content in files.contents.items():
        # With replacements, because the text is only searched; a rewrite starts from the bytes.
        text = content.decode("utf-8", "replace")
        if is_setup_file(file) and mentions(text):
            findings += setup_findings(file, text)
        if file in files.notebooks:
            notebook = files.notebooks[file]
            sources[file] = notebook.source.encode("utf-8")
            findings += _notebook_findings(file, notebook)
        elif file.suffix in _YAML:
            files.project.add_yaml(str(file), text)
            contents[file] = content
            if mentions(text):
                contents[file] = rewrite_yaml(text).encode()
        elif _is_python(file):
            sources[file] = content
    # All files are added before one is rewritten: a class may have its base in another file.
    findings += _add_python(files.project, sources)
    for file, outcome in _rewritten(sources):
        if isinstance(outcome, Finding):
            findings.append(outcome)
        elif file in files.notebooks:
            contents[file] = files.notebooks[file].with_source(outcome.decode("utf-8"))
        else:
            contents[file] = outcome
    return contents, findings


def _add_python(project: Project, sources: dict[Path, bytes]) -> list[Finding]:
    """Add the sources to the project; take those out of ``sources`` that cannot be read or name no package.

    A file that names none of the packages is parsed only if it names a class that extends one of theirs.
    """
    findings = []
    texts = {
        file: content.decode("utf-8", "replace") for file, content in sources.items()
    }
    naming = {file for file, text in texts.items() if mentions(text)}
    selected = set(naming)
    # Each round finds subclasses, whose names may make further files interesting; it ends when there is no new name.
    while selected:
        # Sorted, so that findings have the same order on each machine.
        for file in sorted(selected):
            del texts[file]
            finding = _parse(project, file, sources[file])
            if finding is not None:
                findings.append(finding)
                naming.discard(file)
        names = project.new_subclasses()
        if not names:
            break
        pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
        selected = {file for file, text in texts.items() if pattern.search(text)}
    # Files that name no package may still define an attribute, by a mixin.
    project.add_text("\n".join(texts.values()))
    for file in set(sources) - naming:
        del sources[file]
    return findings


def _parse(project: Project, file: Path, source: bytes) -> Finding | None:
    try:
        # An invalid escape in the user's text warns, once for each time that the file is parsed.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source, str(file))
    except (SyntaxError, ValueError) as error:
        return _unread(file, error)
    project.add_python(str(file), tree, bound_names(tree))
    return None


def _rewritten(sources: Mapping[Path, bytes]) -> _Rewritten:
    """Yield the new source of each file, or why it could not be read; in processes if there is much to do."""
    # Above eight, importing torch in each process takes longer than it saves.
    processes = min(os.cpu_count() or 1, 8)
    items = list(sources.items())
    size = sum(len(source) for source in sources.values())
    if processes == 1 or size < _MANY_BYTES:
        results = map(_rewrite, items)
        yield from _by_file(sources, results)
        return
    # spawn, because torch is imported here: a fork of a process with its threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        outcomes = pool.map(_rewrite, items, chunksize=8)
        yield from _by_file(sources, outcomes)


def _by_file(
    sources: Mapping[Path, bytes], outcomes: Iterable[bytes | Finding]
) -> _Rewritten:
    return zip(sources, _progress(outcomes, "rewriting", len(sources)), strict=True)


def _rewrite(item: tuple[Path, bytes]) -> bytes | Finding:
    # Imported here: only files that are rewritten need libcst, which takes a while to import.
    from libcst import ParserSyntaxError

    from trainer_kit.migrate.rewrite import rewrite_python

    file, source = item
    # ast and libcst do not accept quite the same sources, so that either may fail.
    try:
        return rewrite_python(source, bound_names(ast.parse(source)))
    except (SyntaxError, ValueError, ParserSyntaxError) as error:
        return _unread(file, error)


def _unread(file: Path, error: Exception) -> Finding:
    line = None
    if isinstance(error, SyntaxError):
        line = error.lineno
    return Finding(str(file), line or 1, "source", f"not read: {error}")


def _notebook_findings(file: Path, notebook: Notebook) -> Iterator[Finding]:
    """Yield the cells that are not read, and the requirements and commands in lines of IPython."""
    for number, problem in notebook.unread.items():
        yield Finding(f"{file} cell {number}", 1, "source", problem)
    for line, command in notebook.commands:
        for finding in command_findings(str(file), line, command):
            yield _in_cell(finding, notebook)


def _in_cell(finding: Finding, notebook: Notebook) -> Finding:
    number, line = notebook.locate(finding.line)
    return replace(finding, path=f"{finding.path} cell {number}", line=line)


def _progress(
    items: Iterable[_Item], title: str, total: int | None = None
) -> Iterable[_Item]:
    # A log file would get a line for each refresh of the bar.
    if not sys.stderr.isatty():
        return items
    return tqdm(items, title, total, unit="file", delay=2, leave=False)


def _files(path: Path) -> Iterator[Path]:
    """The files at a path that are read, in order; nothing in hidden directories, and no link to a directory."""
    if path.is_file():
        if not _is_read(path):
            raise ConfigurationError(
                "this file is neither Python, YAML nor a notebook", found=str(path)
            )
        yield path
        return
    for directory, directories, names in os.walk(path):
        # In place: os.walk continues with what this list holds.
        directories[:] = sorted(
            name
            for name in directories
            if not name.startswith(".") and name not in _SKIPPED
        )
        for name in sorted(names):
            file = Path(directory, name)
            # Without a suffix a file is read only if the user names it: it may be anything.
            if (file.suffix and _is_read(file)) or is_setup_file(file):
                yield file


def _is_python(file: Path) -> bool:
    """Whether a file is Python by its suffix; without one, whether it is not a Makefile or the like."""
    return file.suffix in _PYTHON and (file.suffix != "" or not is_setup_file(file))


def _is_read(file: Path) -> bool:
    return file.suffix in (*_PYTHON, *_YAML, ".ipynb") or is_setup_file(file)
