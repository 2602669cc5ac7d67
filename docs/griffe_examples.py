"""Reads the sections ``Example:`` of our docstrings as griffe's ``Examples:``; only `make site` imports this."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension


class ExampleSections(Extension):
    """Griffe knows the plural alone, and would show an example as a quotation."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )
