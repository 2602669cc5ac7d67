"""Estimate what a run needs before it starts."""

from trainer_kit.planning.memory import MemoryEstimate, describe_module, estimate_memory

__all__ = ["MemoryEstimate", "describe_module", "estimate_memory"]
