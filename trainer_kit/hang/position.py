"""Find the position of a thread from its Python frames: phase, line of user code, collective."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, final

import torch

__all__ = ["COMPILERS", "OUTSIDE", "Position", "find_position", "user_line"]

# Frames hold the paths that were imported: links, such as that of an environment, stay as they are.
_HERE: Final = str(Path(__file__).absolute().parents[1])
_TORCH: Final = str(
    Path(torch.__file__).absolute().parent
)  # torch may be outside this environment's directories
_LIBRARIES: Final = (
    *(_HERE, _TORCH, "<frozen"),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)
OUTSIDE: Final = "your code"
"""The phase outside the code of this library and of torch's training."""
_BACKWARD: Final = "_engine_run_backward"
_GRADIENTS: Final = "backward's exchange of gradients"
_EXCHANGES: Final = (
    os.path.join(_TORCH, "distributed", ""),
    os.path.join(_TORCH, "nn", "parallel", "distributed.py"),
)
COMPILERS: Final = (
    os.path.join(_TORCH, "_dynamo", ""),
    os.path.join(_TORCH, "_inductor", ""),
)
"""Directories of compiler code."""
_FILES: Final = (
    # (part of the file's path, phase, whether it may take long)
    *((part, "compilation", True) for part in COMPILERS),
    (os.path.join(_HERE, "checkpoint", ""), "checkpoint", True),
    (os.path.join(_HERE, "state", "saving.py"), "checkpoint", True),
    (os.path.join(_HERE, "accelerator", "checkpoints.py"), "checkpoint", True),
    (os.path.join(_HERE, "step", "evaluate.py"), "validation", True),
    (os.path.join(_HERE, "step", "optimize.py"), "optimizer", False),
    (os.path.join(_HERE, "accelerator", "optimizer.py"), "optimizer", False),
    (os.path.join(_TORCH, "optim", ""), "optimizer", False),
    (os.path.join(_HERE, "data", ""), "data", False),
    (os.path.join(_HERE, "step", "accumulation_window.py"), "data", False),
    (os.path.join(_HERE, "accelerator", "loader.py"), "data", False),
    (os.path.join(_TORCH, "utils", "data", ""), "data", False),
    (os.path.join(_TORCH, "nn", "modules", "module.py"), "forward", False),
)
_STEPS: Final = {
    "training_step": "forward",
    "forward": "forward",
    _BACKWARD: "backward",
}
_DEBUGGERS: Final = ("bdb.py", "pdb.py")


@final
@dataclass(frozen=True)
class Position:
    """The position of the main thread.

    Attributes:
        phase: ``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"``, ``"validation"``, ``"checkpoint"``,
            ``"compilation"``, a hook such as ``"EarlyStopping.on_train_epoch_end"``, or ``"your code"``.
        place: the line of user code, and the function that it calls: ``"at train.py:30 in all_reduce"``.
        call: the current exchange with other ranks, "" for none.
        patient: whether this phase may take long.
        debugged: whether a debugger holds the thread.
        frames: the identity of the frames, which changes when the thread moves.
    """

    phase: str
    place: str
    call: str
    patient: bool
    debugged: bool
    frames: tuple[int, ...]


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def find_position(frame: FrameType | None) -> Position:
    """Return the position of a thread from its innermost frame."""
    frames = list(_outward(frame))
    phase, patient = _phase(frames)
    debugged = "pydevd" in sys.modules or any(
        f.f_code.co_filename.endswith(_DEBUGGERS) for f in frames
    )
    moves = tuple(hash((id(f), f.f_lasti)) for f in frames)
    return Position(phase, user_line(frame), _call(frames), patient, debugged, moves)


def user_line(frame: FrameType | None) -> str:
    """Return a thread's current line of user code, and the function that it calls."""
    does = ""
    for one in _outward(frame):
        if not one.f_code.co_filename.startswith(_LIBRARIES):
            inner = f" in {does}" if does else ""
            return (
                f"at {os.path.basename(one.f_code.co_filename)}:{one.f_lineno}{inner}"
            )
        does = one.f_code.co_name
    return f"in {does}" if does else "at its end"


def _phase(frames: list[FrameType]) -> tuple[str, bool]:
    inner: tuple[str, bool] | None = None
    for frame in frames:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        found = _hook(frame) if name.startswith("on_") else None
        if found is None and name in _STEPS:
            found = _STEPS[name], False
        if found is None:
            found = next(
                (
                    (phase, long)
                    for part, phase, long in _FILES
                    if file.startswith(part)
                ),
                None,
            )
        if found is not None and found[1]:
            return found  # a forward during validation may take long too
        inner = inner or found
    return inner or (OUTSIDE, True)


def _hook(frame: FrameType) -> tuple[str, bool] | None:
    names = frame.f_code.co_varnames
    owner = frame.f_locals.get(names[0]) if names else None
    return (
        None
        if owner is None or inspect.ismodule(owner)
        else (f"{type(owner).__name__}.{frame.f_code.co_name}", True)
    )


def _call(frames: list[FrameType]) -> str:
    if not frames:
        return ""
    if frames[0].f_code.co_name == _BACKWARD:
        return _GRADIENTS
    if not frames[0].f_code.co_filename.startswith(_EXCHANGES):
        return ""
    call = ""
    for frame in frames:
        if not frame.f_code.co_filename.startswith(_TORCH):
            break
        if (
            frame.f_code.co_filename.startswith(_EXCHANGES)
            and frame.f_code.co_name != "wrapper"
        ):
            call = frame.f_code.co_name
    return call
