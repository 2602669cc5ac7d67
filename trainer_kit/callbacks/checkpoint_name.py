"""The names of checkpoints, made from a template and logged values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any, Final, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = ["CheckpointName"]

_DEFAULT: Final = "step-{step:08d}"


@final
class CheckpointName:
    """A template of ``{value}`` and ``{value:format}`` fields, read once.

    Args:
        template: None for ``step-00001200``.
        insert_names: write ``{epoch}`` as ``epoch=3``.

    Raises:
        ConfigurationError: for a template that cannot be read, or that is more than one directory.

    Example:
        >>> CheckpointName("{epoch}-{val/loss:.2f}")({"epoch": 3, "val/loss": 0.1234})
        'epoch=3-val_loss=0.12'
        >>> CheckpointName(None)({"step": 1200})
        'step-00001200'
    """

    def __init__(self, template: str | None, insert_names: bool = True) -> None:
        if template is None:
            template = _DEFAULT
            insert_names = False
        self.template = template
        self._insert_names = insert_names
        self._warned: set[str] = set()
        try:
            self._fields = list(_read_fields(template))
        except ValueError as error:
            raise ConfigurationError(
                "this checkpoint filename is not a valid template",
                found=f"{self.template!r}: {error}",
                fix="{name} or {name:.2f}",
            ) from error
        # Separators in a field are replaced, so only the text between fields can name a folder.
        literal = "".join(text for text, _, _ in self._fields)
        has_separator = "/" in literal or "\\" in literal
        if has_separator or literal.startswith(".") or not self.template:
            raise ConfigurationError(
                "a checkpoint filename must name a single directory",
                found=repr(self.template),
                fix="pass the parent folder as dirpath=, and start the filename with a letter or a field",
            )

    def __call__(self, values: Mapping[str, Any], equals: str = "=") -> str:
        """Fill in ``values`` (numbers or scalar tensors: a sync point). A missing value is 0, with a warning."""
        texts = []
        for text, field, spec in self._fields:
            texts.append(text)
            if field is not None:
                texts.append(self._format_field(field, spec, values, equals))
        return "".join(texts)

    def _format_field(
        self, name: str, spec: str, values: Mapping[str, Any], equals: str
    ) -> str:
        # Each name once: a template is filled in for every checkpoint.
        if name not in values and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"the checkpoint filename {self.template!r} uses {name!r}, which was not logged, so it is 0; "
                + did_you_mean(name, values),
                stacklevel=2,
            )
        number = values.get(name, 0)
        if not isinstance(number, int):
            number = float(number)
        if spec.endswith("d"):
            # Format "d" takes neither a float nor NaN.
            if math.isfinite(number):
                number = round(number)
            else:
                spec = ""
        text = format(number, spec)
        if not self._insert_names:
            return text
        return f"{name.replace('/', '_')}{equals}{text}"


def _read_fields(template: str) -> Iterator[tuple[str, str | None, str]]:
    """Yield the text before each field, the name of the field, and its format.

    Raises:
        ValueError: the template or a format cannot be read.
    """
    for text, field, spec, conversion in Formatter().parse(template):
        spec = spec or ""
        if field == "" or conversion:
            raise ValueError("a field is a name with an optional format")
        if field is not None:
            example: float = 1.0
            if field in ("epoch", "step") or spec.endswith("d"):
                example = 1
            # An invalid format raises here, before the first checkpoint.
            format(example, spec)
        yield text, field, spec
