"""Names of the types of torch's operators, and of what they are called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["Arguments", "Operator", "Options", "Result"]

Operator: TypeAlias = Any
"""An operator of torch (``torch._ops.OpOverload``), whose attributes are private and differ between releases."""

Arguments: TypeAlias = Sequence[Any]
"""The positional arguments of an operator: tensors, numbers, and lists of them."""

Options: TypeAlias = Mapping[str, Any]
"""The keyword arguments of an operator, by name."""

Result: TypeAlias = Any
"""What an operator returns: a tensor, a tuple or list of tensors, a number, or None."""
