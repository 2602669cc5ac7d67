"""Documented module paths of earlier versions of this library, and where each of their names is defined now."""

from __future__ import annotations

from typing import Final

__all__ = ["PATHS"]

PATHS: Final = {
    "planning.verify": {
        "Check": "verify.result:Check",
        "Verification": "verify.result:Verification",
        "verify": "verify.verify:verify",
    },
    "planning.verify_compare": {
        "Finding": "verify.compare:Finding",
        "Point": "verify.compare:Point",
    },
}
"""By former path and name: the module and the name now."""
