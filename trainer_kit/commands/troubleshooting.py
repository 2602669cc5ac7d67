"""The troubleshooting page, by section, for ``trainer-kit explain``: it is read where there is no network."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Final

from trainer_kit.core import errors

__all__ = ["find_section"]

_PAGE: Final = Path(__file__).with_suffix(".md")
# Errors of torch that the run adds a note to.
_OF_TORCH: Final = {"OutOfMemoryError": "cuda-out-of-memory"}


def find_section(word: str | None) -> str | None:
    """The section of the page about an error, with its heading; None if there is no such section.

    An error class of this library that has no section is described by its docstring.

    Args:
        word: the name of an error class, such as ``"NonFiniteError"``, alone or as a traceback prints it, or what its
            message names: ``"troubleshooting#the-loss-is-nan"``.

    Example:
        >>> find_section("NonFiniteError").splitlines()[0]
        'The loss is NaN'
    """
    if word is None:
        return None
    # A traceback prints the class with its module.
    class_name = word.rpartition(".")[2]
    name = _OF_TORCH.get(class_name, word)
    error = vars(errors).get(class_name)
    description = None
    if isinstance(error, type) and issubclass(error, errors.TrainerKitError):
        name = error.see or name
        description = f"{class_name}\n\n{inspect.getdoc(error)}"
    anchor = name.removeprefix("troubleshooting#")
    _, *sections = re.split(r"^## ", _PAGE.read_text(encoding="utf-8"), flags=re.M)
    for section in sections:
        heading, _, _ = section.partition("\n")
        if _anchor(heading) == anchor:
            return section.strip()
    return description


def _anchor(heading: str) -> str:
    """The anchor of a heading on the site."""
    letters = re.sub(r"[^\w\- ]", "", heading.lower())
    return letters.strip().replace(" ", "-")
