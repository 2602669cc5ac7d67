"""What a precision did to a module and the next one cannot undo: layers that were exchanged, weights that were cast."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from trainer_kit.core.errors import PrecisionError

__all__ = ["forget", "note_cast", "note_layers", "refuse_cast", "refuse_layers"]

_LAYERS: Final = "_precision_of_layers"
_CAST: Final = "_dtype_of_cast"


def note_layers(module: nn.Module, name: str, options: str) -> None:
    """Note for which precision layers were exchanged; the arguments are those of `refuse_layers`."""
    module.__dict__[_LAYERS] = (name, options)


def refuse_layers(module: nn.Module, name: str, options: str | None = None) -> None:
    """Refuse layers that another precision exchanged.

    Args:
        module: all of it.
        name: of the precision.
        options: what else decides on which layers are exchanged, and for what; None: it exchanges none.

    Raises:
        PrecisionError: an earlier one exchanged layers, which this one would leave as they are.
    """
    for part in module.modules():
        was = part.__dict__.get(_LAYERS)
        if was is not None and was != (name, options):
            raise PrecisionError(
                "an earlier precision exchanged layers of this module, and they stay",
                found=f"{was[0]!r}, and now {name!r}" + (" with other options" if was[0] == name else ""),
                fix="make the module anew, and load its weights; or keep the precision that it has",
            )


def note_cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Note that weights are cast to this dtype."""
    module.__dict__[_CAST] = dtype


def refuse_cast(module: nn.Module, name: str) -> None:
    """Refuse weights that an earlier precision cast; what the user made in another dtype is left alone.

    Args:
        module: all of it.
        name: of a precision that casts nothing.

    Raises:
        PrecisionError: weights are in the dtype of the earlier one still.
    """
    for part in module.modules():
        dtype = part.__dict__.get(_CAST)
        if dtype is not None and any(parameter.dtype is dtype for parameter in part.parameters()):
            raise PrecisionError(
                "an earlier precision cast the weights of this module, and they stay so",
                found=f"{dtype}, and now {name!r}",
                fix="make the module anew, and load its weights; or module.float() before",
            )


def forget(module: nn.Module) -> None:
    """Its layers are its own again."""
    for part in module.modules():
        part.__dict__.pop(_LAYERS, None)
