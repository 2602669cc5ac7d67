"""The name of a checkpoint directory, from a template such as ``"{epoch}-{val_loss:.2f}"``."""

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
        self._insert = insert_names and template is not None
        self.template = _DEFAULT if template is None else template
        self._warned: set[str] = set()
        try:
            self._parts = list(self._read(self.template))
        except ValueError as error:
            raise ConfigurationError(
                "this checkpoint filename cannot be read",
                found=f"{self.template!r}: {error}",
                fix="{name} or {name:.2f}",
            ) from error
        literal = "".join(text for text, _, _ in self._parts)
        if "/" in literal or "\\" in literal or literal.startswith(".") or not self.template:
            raise ConfigurationError(
                "a checkpoint filename is the name of one directory",
                found=repr(self.template),
                fix="put the folder into dirpath=, and start with a letter or a field",
            )

    @staticmethod
    def _read(template: str) -> Iterator[tuple[str, str | None, str]]:
        for text, field, spec, conversion in Formatter().parse(template):
            if field == "" or conversion:
                raise ValueError("a field is a name and perhaps a format")
            if field is not None:
                format(1 if field in ("epoch", "step") or (spec or "").endswith("d") else 1.0, spec or "")
            yield text, field, spec or ""

    def __call__(self, values: Mapping[str, Any], equals: str = "=") -> str:
        """Fill in ``values`` (numbers or scalar tensors: a sync point). One that nobody logged is 0, with a warning."""
        written = []
        for text, field, spec in self._parts:
            written.append(text)
            if field is not None:
                written.append(self._field(field, spec, values, equals))
        return "".join(written)

    def _field(self, name: str, spec: str, values: Mapping[str, Any], equals: str) -> str:
        if name not in values and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"the checkpoint filename {self.template!r} uses {name!r}, which nobody logged, so it is 0; "
                + did_you_mean(name, values),
                stacklevel=2,
            )
        value = values.get(name, 0)
        number = value if isinstance(value, int) else float(value)
        if spec.endswith("d"):
            number, spec = (round(number), spec) if math.isfinite(number) else (number, "")
        shown = format(number, spec)
        return f"{name.replace('/', '_')}{equals}{shown}" if self._insert else shown
