"""Lightning's ``Tqdm``: a bar whose numbers keep their width."""

from __future__ import annotations

from tqdm.auto import tqdm

__all__ = ["Tqdm"]

_WIDTH = 5


# types-tqdm has a generic class; tqdm's own cannot be subscripted.
class Tqdm(tqdm):  # type: ignore[type-arg]
    """tqdm's bar; floating point numbers are padded with zeros, so that the line does not jump.

    Example:
        >>> Tqdm.format_num(0.5), Tqdm.format_num(12), Tqdm.format_num("1.2")
        ('0.500', '12', '1.200')
    """

    @staticmethod
    def format_num(n: float | str) -> str:
        """Format a number; a float gets at least five characters."""
        text = n
        if not isinstance(text, str):
            text = str(tqdm.format_num(text))
        # Zeros after an exponent would change the value.
        if not isinstance(n, (float, str)) or "e" in text or not _is_number(text):
            return text
        if "." not in text and len(text) < _WIDTH:
            text += "."
        # Zeros after a number without a point would change it too.
        if "." not in text:
            return text
        return text.ljust(_WIDTH, "0")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
