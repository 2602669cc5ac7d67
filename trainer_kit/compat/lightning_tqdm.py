"""Lightning's ``Tqdm``: a bar whose numbers keep their width."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

__all__ = ["Tqdm"]

_WIDTH = 5


class Tqdm(tqdm):  # type: ignore[type-arg]
    """tqdm's bar; floating point numbers are padded with zeros, so that the line does not jump.

    Example:
        >>> Tqdm.format_num(0.5), Tqdm.format_num(12), Tqdm.format_num("1.2")
        ('0.500', '12', '1.200')
    """

    @staticmethod
    def format_num(n: Any) -> str:
        """A number as text; of a float at least five characters."""
        text = n if isinstance(n, str) else str(tqdm.format_num(n))
        if not isinstance(n, (float, str)) or "e" in text or not _is_number(text):
            return text
        if "." not in text and len(text) < _WIDTH:
            text += "."
        return text.ljust(_WIDTH, "0") if "." in text else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
