"""Whether weights are finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

__all__ = ["are_finite"]

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether none holds a NaN or an infinity; of a ``DTensor`` only this rank's part is looked at.

    Args:
        tensors: of any device. Those that are not of a common floating dtype are left out.

    Example:
        >>> are_finite([torch.ones(2), torch.tensor([7])]), are_finite([torch.tensor([1.0, float("nan")])])
        (True, False)
    """
    for tensor in tensors:
        part = tensor.detach()
        if hasattr(part, "to_local"):
            part = part.to_local()
        if not part.numel() or part.dtype not in _FLOATS:
            continue
        # Their smallest and largest, for NaN comes through and nothing as large as the weights is made.
        if not all(bool(end.isfinite()) for end in torch.aminmax(part)):  # sync point: a save, or a resumed run begins
            return False
    return True
