"""The code cells of a Jupyter notebook as one Python source, and back."""

from __future__ import annotations

import ast
import json
import re
from typing import Final, final

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.types import JsonObject

__all__ = ["Notebook"]

# Comments, which the rewrite keeps: they mark where a cell begins and what was a line of IPython.
_CELL: Final = "#%% cell "
_MAGIC: Final = "pass  #%% magic "
_MAGIC_LINE: Final = re.compile(
    r"(?P<indent>\s*)(?P<text>[%!?].*|[^#'\"]*\?{1,2}\s*|[\w, ]+=\s*[%!].*)"
)
"""A line of IPython: ``%matplotlib inline``, ``!pip install x``, ``object?``, ``files = !ls``."""
_HIDDEN: Final = re.compile(rf"(?P<indent>\s*){re.escape(_MAGIC)}(?P<text>.*)")
_PYTHON_MAGICS: Final = ("%%capture", "%%time", "%%timeit", "%%prun")
"""Cell magics that run the rest of the cell as Python."""


@final
class Notebook:
    """A notebook whose Python can be read and rewritten as one module.

    Names that an earlier cell imports are visible in later ones, as in a module. Lines of IPython are replaced by a
    statement without effect; cells in another language, and cells that are not valid Python, are left out.

    Args:
        content: the bytes of the ``.ipynb`` file.

    Attributes:
        source: the Python of all its code cells.
        commands: the lines of IPython, each with its line in ``source``.
        unread: by cell number from 1, why a code cell is left out.

    Raises:
        ConfigurationError: the file is not a notebook of format 4.

    Example:
        >>> cells = [{"cell_type": "code", "source": ["%pylab\\n", "import lightning as L"]}]
        >>> notebook = Notebook(json.dumps({"nbformat": 4, "cells": cells}).encode())
        >>> print(notebook.source)
        #%% cell 1
        pass  #%% magic %pylab
        import lightning as L
        >>> notebook.locate(3)
        (1, 2)
    """

    def __init__(self, content: bytes) -> None:
        text = content.decode("utf-8")
        try:
            self._document: JsonObject = json.loads(text)
            cells: list[JsonObject] = self._document["cells"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                "this is not a notebook of format 4", found=str(error)
            ) from error
        # json.dumps must write the file as its editor did, or the diff would show every line.
        indent = re.search(r"\n( +)\"", text)
        self._indent = None
        if indent is not None:
            self._indent = len(indent[1])
        self._final_newline = "\n" * text.endswith("\n")
        self._ascii = text.isascii()
        self._cells: dict[int, JsonObject] = {}
        self._starts: dict[int, int] = {}
        self.unread: dict[int, str] = {}
        self.commands: list[tuple[int, str]] = []
        lines: list[str] = []
        # Numbered as a reader counts code cells; the prompt's number depends on the order of execution.
        code_cells = (cell for cell in cells if cell.get("cell_type") == "code")
        for number, cell in enumerate(code_cells, 1):
            body = self._python_of(number, cell)
            if body is None:
                continue
            lines.append(f"{_CELL}{number}")
            self._cells[number] = cell
            self._starts[number] = len(lines)
            for line in body:
                hidden = _HIDDEN.fullmatch(line)
                if hidden is not None:
                    self.commands.append((len(lines) + 1, hidden["text"]))
                lines.append(line)
        self.source = "\n".join(lines)

    def _python_of(self, number: int, cell: JsonObject) -> list[str] | None:
        """The lines of a cell with IPython hidden; None for a cell that is empty or left out."""
        lines = _text_of(cell).split("\n")
        first = lines[0].strip()
        # %%bash and the like: the cell is in another language.
        if first.startswith("%%") and not first.startswith(_PYTHON_MAGICS):
            return None
        if not any(line.strip() for line in lines):
            return None
        body = "\n".join(lines)
        # A valid cell has no IPython, also where a text looks like it.
        if not _parses(body):
            lines = [_hide(line) for line in lines]
            body = "\n".join(lines)
        try:
            ast.parse(body)
        except SyntaxError as error:
            self.unread[number] = (
                f"not read: {error.msg} (line {error.lineno} of the cell)"
            )
            return None
        return lines

    def locate(self, line: int) -> tuple[int, int]:
        """The number of the code cell that holds a line of ``source``, and the line within the cell; both from 1."""
        number = max(
            (cell for cell, start in self._starts.items() if start < line), default=1
        )
        return number, max(1, line - self._starts.get(number, 0))

    def with_source(self, source: str) -> bytes:
        """The notebook's file with rewritten code; outputs, metadata and formatting are kept.

        Args:
            source: ``self.source`` after a rewrite; the comments that separate cells must still be there.
        """
        bodies: dict[int, list[str]] = {}
        # Lines that the rewrite has added before the first cell.
        heading: list[str] = []
        current = heading
        for line in source.split("\n"):
            if line.startswith(_CELL):
                current = bodies.setdefault(int(line.removeprefix(_CELL)), [])
                current += heading
                heading = []
            else:
                # The text after the marker is the line of IPython, which the rewrite has not touched: it is a comment.
                hidden = _HIDDEN.fullmatch(line)
                if hidden is not None:
                    line = hidden["indent"] + hidden["text"]
                current.append(line)
        for number, body in bodies.items():
            _store(self._cells[number], "\n".join(body))
        text = json.dumps(self._document, indent=self._indent, ensure_ascii=self._ascii)
        return (text + self._final_newline).encode("utf-8")


def _text_of(cell: JsonObject) -> str:
    # The format allows a text or a list of lines with their line ends; join() of a text is the text.
    return "".join(cell.get("source", ""))


def _store(cell: JsonObject, text: str) -> None:
    # An unchanged cell keeps its division into lines.
    if text == _text_of(cell):
        return
    if isinstance(cell["source"], str):
        cell["source"] = text
    else:
        cell["source"] = text.splitlines(keepends=True)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _hide(line: str) -> str:
    magic = _MAGIC_LINE.fullmatch(line)
    if magic is None:
        return line
    # A statement, not only a comment: the line may be the whole body of an `if`.
    return f"{magic['indent']}{_MAGIC}{magic['text']}"
