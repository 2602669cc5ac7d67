"""In what dtype each computation runs."""

from trainer_kit.precision.native import MixedPrecision, TruePrecision, make_precision

__all__ = ["MixedPrecision", "TruePrecision", "make_precision"]
