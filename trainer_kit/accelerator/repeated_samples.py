"""Leave the results of repeated samples out of what a process contributes to `gather_for_metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
from torch import Tensor

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.tensors import children, map_leaves, sequence_like
from trainer_kit.core.types import Nested

__all__ = ["NOTHING", "drop_repeats", "refusal"]

_Results: TypeAlias = Nested
"""Values of one batch, in nested containers."""

_ARRAYS: Final = (Tensor, np.ndarray)
_NUMBERS: Final = (bool, int, float, complex, np.generic)
_TEXTS: Final = (str, bytes, bytearray)


class _Nothing:
    """The class of `NOTHING`; its copies from other processes are recognized by it."""


NOTHING: Final = _Nothing()
"""The contribution of a process whose samples are all repeats, where they cannot be cut."""


def drop_repeats(results: _Results, size: int, count: int) -> _Results:
    """Cut every leaf of the results of a batch to its first ``count`` samples.

    A list holds one entry per sample; a tuple, mapping or dataclass holds several such values (*fields*). A number is
    one value of the process, and stays.

    Args:
        results: what a process passes to `gather_for_metrics`; it does not change.
        size: the number of samples in the batch.
        count: the number of samples that are not repeated; they come first.

    Raises:
        ConfigurationError: a leaf does not have one entry per sample, or a list may hold samples or fields.

    Example:
        >>> drop_repeats((["a", "b", "c"], {"labels": [0, 1, 2]}), 3, 1)
        (['a'], {'labels': [0]})
    """
    if count == size:
        return results
    try:
        return _Cut(size, count).cut(results)
    except ConfigurationError:
        if count:
            raise
        # Everything in it is a repeat.
        return NOTHING


@final
class _Cut:
    """Cuts values of ``size`` samples to ``count``."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.count = count

    def cut(self, value: _Results) -> _Results:
        return map_leaves(
            value, self._cut_leaf, (*_ARRAYS, Sequence), self._cut_unknown
        )

    def _cut_leaf(self, leaf: _Results) -> _Results:
        if isinstance(leaf, _ARRAYS):
            return self._cut_array(leaf)
        if isinstance(leaf, _TEXTS):
            raise refusal(f"a {type(leaf).__name__}", self.size)
        if isinstance(leaf, tuple):
            holds_fields = self._is_tuple_of_fields(leaf)
        else:
            holds_fields = self._is_list_of_fields(leaf)
        if holds_fields:
            return sequence_like(leaf, [self.cut(item) for item in leaf])
        return sequence_like(leaf, list(leaf)[: self.count])

    def _cut_array(self, array: Tensor | np.ndarray[Any, Any]) -> _Results:
        if array.ndim and len(array) == self.size:
            return array[: self.count]
        is_one_value = array.ndim == 0 or len(array) == 1
        if is_one_value and self.size > 1:
            return array
        shape = tuple(array.shape)
        raise refusal(f"a {type(array).__name__} of shape {shape}", self.size)

    def _is_tuple_of_fields(self, items: tuple[object, ...]) -> bool:
        """Whether a tuple holds values of the whole batch, and not one entry per sample."""
        if self._is_named(items) or len(items) != self.size:
            return True
        return any(map(self._has_rows, items))

    def _is_list_of_fields(self, items: Sequence[object]) -> bool:
        """Whether a list holds values of the whole batch, and not one entry per sample."""
        rows = [self._has_rows(item) for item in items]
        if len(items) != self.size:
            if not any(rows):
                raise refusal(f"a {type(items).__name__} of {len(items)}", self.size)
            return True
        mixed = len({type(item) for item in items}) > 1
        if self.size > 1 and all(rows) and not mixed:
            raise ConfigurationError(
                "a list may hold samples, or values of the whole batch: the results of repeated samples are unknown",
                found=f"a {type(items).__name__} of {self.size}, each of {self.size} items, for "
                f"{plural(self.size, 'sample')}",
                fix="pass several values of a batch as a tuple or dict, gather_for_metrics((predictions, references)); "
                "pass one list per sample as numpy.array(lists, dtype=object)",
            )
        return mixed and any(rows)

    def _has_rows(self, value: object) -> bool:
        """Whether a value has one entry per sample."""
        if isinstance(value, _TEXTS):
            return False
        if isinstance(value, _ARRAYS):
            return value.ndim > 0 and len(value) == self.size
        if isinstance(value, Sequence) and not self._is_named(value):
            return len(value) == self.size
        return any(self._has_rows(child) for _, child in children(value))

    @staticmethod
    def _is_named(value: object) -> bool:
        return isinstance(value, tuple) and hasattr(value, "_fields")

    def _cut_unknown(self, value: _Results) -> _Results:
        if isinstance(value, _NUMBERS) and self.size > 1:
            return value
        if isinstance(value, Mapping):
            # Only an empty one comes here.
            return value
        # A table, for example.
        try:
            if len(value) == self.size:
                rows = value[: self.count]
                if len(rows) == self.count:
                    return rows
        except (TypeError, KeyError, IndexError):
            pass
        raise refusal(f"a {type(value).__name__}", self.size)


def refusal(found: str, size: int) -> ConfigurationError:
    """Return the error of a value from which repeated samples cannot be removed."""
    return ConfigurationError(
        "the last batch has repeated samples, and a value does not have one entry per sample",
        found=f"{found}, in a batch of {plural(size, 'sample')}",
        fix="pass one entry per sample to gather_for_metrics; use gather or gather_object for values of the process",
    )
