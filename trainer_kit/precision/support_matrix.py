"""Which precision runs where: one table, held against every run before its first step.

The page docs/guide/precision.md shows it, and a test compares the two.
"""

from __future__ import annotations

from typing import Final

from trainer_kit.core.errors import PrecisionError

__all__ = ["DEVICES", "ENGINES", "RUNS", "TESTED", "UNTESTED", "check_runs"]

TESTED: Final = "yes"
"""Held against a plain loop by the tests, on a CPU."""
UNTESTED: Final = "not tested"
"""It is let through, and no test of ours has seen it there: for want of the device, or of the engine."""

ENGINES: Final = ("single", "ddp", "fsdp", "mesh", "deepspeed", "xla", "megatron")
"""The families of strategies; those of others are not in the table, and know for themselves."""

_OWN_DTYPES = "this engine keeps weights in float32 at most"
_OWN_LAYERS = "the engine casts and partitions weights in its own way, which exchanged layers do not survive"
_SPLIT = "layers that were exchanged cannot be split by a mesh"
_COMPILED = "XLA compiles no kernels of this vendor"
_FLOAT16 = "bfloat16 is the half precision of XLA devices, float16 is not"


def _row(fsdp: str, mesh: str, deepspeed: str, xla: str, megatron: str, here: str = TESTED) -> dict[str, str]:
    return dict(zip(ENGINES, (here, here, fsdp, mesh, deepspeed, xla, megatron), strict=True))


_EXCHANGED = (_SPLIT, _OWN_LAYERS, _COMPILED, _OWN_LAYERS)
RUNS: Final[dict[str, dict[str, str]]] = {
    "64-true": _row(TESTED, TESTED, _OWN_DTYPES, TESTED, _OWN_DTYPES),
    "32-true": _row(TESTED, TESTED, TESTED, TESTED, UNTESTED),
    "bf16-true": _row(TESTED, TESTED, TESTED, TESTED, UNTESTED),
    "16-true": _row(TESTED, TESTED, UNTESTED, _FLOAT16, UNTESTED),
    "bf16-mixed": _row(TESTED, TESTED, TESTED, TESTED, UNTESTED),
    "16-mixed": _row(TESTED, TESTED, UNTESTED, _FLOAT16, UNTESTED),
    "fp8": _row(TESTED, *_EXCHANGED),
    "transformer-engine": _row(UNTESTED, *_EXCHANGED, here=UNTESTED),
    **{name: _row(TESTED, *_EXCHANGED) for name in ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training", "qat")},
}
"""By precision and engine: `TESTED`, `UNTESTED`, or why it is refused."""

_NO_FLOAT64 = "the device has no float64"
_NVIDIA = "Transformer Engine needs an NVIDIA GPU"
_BITSANDBYTES = "bitsandbytes has no kernels for it"
DEVICES: Final[dict[str, dict[str, str]]] = {
    "64-true": {"mps": _NO_FLOAT64},
    "transformer-engine": {"cpu": _NVIDIA, "mps": _NVIDIA, "xpu": _NVIDIA, "xla": _NVIDIA},
    **{mode: {"mps": _BITSANDBYTES} for mode in ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")},
}
"""By precision and device type, why it is refused there; fp8, and DeepSpeed's float16, are tried out instead."""


def check_runs(precision: str, device: str, engine: str) -> None:
    """Look the combination up.

    Args:
        precision: a key of `RUNS`.
        device: as in ``torch.device.type``.
        engine: one of `ENGINES`, as a strategy declares it; any other passes.

    Raises:
        PrecisionError: where the table says no.

    Example:
        >>> check_runs("bf16-mixed", "cpu", "ddp")
        >>> check_runs("nf4", "cpu", "deepspeed")
        Traceback (most recent call last):
        trainer_kit.core.errors.PrecisionError: precision 'nf4' does not run on deepspeed
          found: the engine casts and partitions weights in its own way, which exchanged layers do not survive
          fix:   it runs on single, ddp, fsdp
    """
    row = RUNS[precision]
    answer = row.get(engine, TESTED)
    if answer not in (TESTED, UNTESTED):
        runs = ", ".join(one for one in ENGINES if row[one] in (TESTED, UNTESTED) and one != engine)
        raise PrecisionError(
            f"precision {precision!r} does not run on {engine}", found=answer, fix=f"it runs on {runs}"
        )
    if device in DEVICES.get(precision, {}):
        raise PrecisionError(
            f"precision {precision!r} does not run on a device of type {device!r}",
            found=DEVICES[precision][device],
            fix='use "bf16-mixed"',
        )
