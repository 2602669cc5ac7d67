"""Find the position of a thread from its Python frames: phase, line of user code, collective."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, final

from trainer_kit.data.workers import EndsWithParent
from trainer_kit.hang.torch_private import (
    BACKWARD_FUNCTION,
    COMPILERS,
    TORCH,
    find_awaited_worker,
)

__all__ = [
    "OUTSIDE",
    "Position",
    "awaited_worker",
    "find_position",
    "user_line",
]

# Frames hold the paths that were imported: links, such as that of an environment, stay as they are.
_HERE: Final = str(Path(__file__).absolute().parents[1])
_ENVIRONMENT: Final = sysconfig.get_paths()
_LIBRARIES: Final = (
    _HERE,
    # torch may be outside of this environment's directories.
    TORCH,
    "<frozen",
    _ENVIRONMENT["stdlib"],
    _ENVIRONMENT["purelib"],
    _ENVIRONMENT["platlib"],
)
OUTSIDE: Final = "your code"
"""The phase outside the code of this library and of torch's training."""
_GRADIENTS: Final = "backward's gradient synchronization"
_EXCHANGES: Final = (
    os.path.join(TORCH, "distributed", ""),
    os.path.join(TORCH, "nn", "parallel", "distributed.py"),
)
_FILES: Final = (
    # The start of the file's path, the phase, and whether it may take long. The first row that fits decides.
    *((directory, "compilation", True) for directory in COMPILERS),
    (os.path.join(_HERE, "checkpoint", ""), "checkpoint", True),
    (os.path.join(_HERE, "state", "saving.py"), "checkpoint", True),
    (os.path.join(_HERE, "accelerator", "checkpoints.py"), "checkpoint", True),
    (os.path.join(_HERE, "step", "evaluate.py"), "validation", True),
    (os.path.join(_HERE, "step", "optimize.py"), "optimizer", False),
    (os.path.join(_HERE, "accelerator", "optimizer.py"), "optimizer", False),
    (os.path.join(TORCH, "optim", ""), "optimizer", False),
    (os.path.join(_HERE, "data", ""), "data", False),
    (os.path.join(_HERE, "step", "accumulation_window.py"), "data", False),
    (os.path.join(_HERE, "accelerator", "loader.py"), "data", False),
    (os.path.join(TORCH, "utils", "data", ""), "data", False),
    (os.path.join(TORCH, "nn", "modules", "module.py"), "forward", False),
)
_STEPS: Final = {
    "training_step": "forward",
    "forward": "forward",
    BACKWARD_FUNCTION: "backward",
}
_DEBUGGERS: Final = ("bdb.py", "pdb.py")


@final
@dataclass(frozen=True)
class Position:
    """The position of the main thread.

    Attributes:
        phase: ``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"``, ``"validation"``, ``"checkpoint"``,
            ``"compilation"``, a hook such as ``"EarlyStopping.on_train_epoch_end"``, or ``"your code"``.
        line: the line of user code, and the function that it calls: ``"at train.py:30 in all_reduce"``.
        call: the current exchange with other ranks, "" for none.
        patient: whether this phase may take long.
        debugged: whether a debugger holds the thread.
        frames: the identity of the frames, which changes when the thread moves.
    """

    phase: str
    line: str
    call: str
    patient: bool
    debugged: bool
    frames: tuple[int, ...]


def find_position(frames: list[FrameType]) -> Position:
    """Return the position of a thread from its frames, of which the innermost one is first."""
    phase, patient = _phase(frames)
    debugged = "pydevd" in sys.modules
    for caller in frames:
        debugged = debugged or caller.f_code.co_filename.endswith(_DEBUGGERS)
    identity = tuple(hash((id(caller), caller.f_lasti)) for caller in frames)
    return Position(
        phase, user_line(frames), _call(frames), patient, debugged, identity
    )


def user_line(frames: list[FrameType]) -> str:
    """Return a thread's current line of user code, and the function that it calls."""
    called = ""
    for caller in frames:
        path = caller.f_code.co_filename
        if not path.startswith(_LIBRARIES):
            line = f"at {os.path.basename(path)}:{caller.f_lineno}"
            if called:
                line += f" in {called}"
            return line
        called = caller.f_code.co_name
    if called:
        return f"in {called}"
    return "at its end"


def _phase(frames: list[FrameType]) -> tuple[str, bool]:
    innermost: tuple[str, bool] | None = None
    for frame in frames:
        phase = _phase_of_frame(frame)
        # The outer phase decides whether it may take long: a forward during validation may.
        if phase is not None and phase[1]:
            return phase
        innermost = innermost or phase
    return innermost or (OUTSIDE, True)


def _phase_of_frame(frame: FrameType) -> tuple[str, bool] | None:
    """Return the phase that a frame shows, and whether it may take long."""
    function = frame.f_code.co_name
    if function.startswith("on_"):
        hook = _hook(frame)
        if hook is not None:
            return hook, True
    if function in _STEPS:
        return _STEPS[function], False
    for path, phase, patient in _FILES:
        if frame.f_code.co_filename.startswith(path):
            return phase, patient
    return None


def _hook(frame: FrameType) -> str | None:
    """Return the name of the hook that a frame runs, with the class of its object."""
    names = frame.f_code.co_varnames
    if not names:
        return None
    # A hook is a method: a function of a user's that is called `on_...` has no object.
    owner = frame.f_locals.get(names[0])
    if owner is None or inspect.ismodule(owner):
        return None
    return f"{type(owner).__name__}.{frame.f_code.co_name}"


def _call(frames: list[FrameType]) -> str:
    """Return the exchange that a thread is in, "" for none: the outermost function of torch's exchanges."""
    if not frames:
        return ""
    # DDP exchanges gradients in threads of C++, for which backward waits in this function.
    if frames[0].f_code.co_name == BACKWARD_FUNCTION:
        return _GRADIENTS
    if not frames[0].f_code.co_filename.startswith(_EXCHANGES):
        return ""
    call = ""
    for frame in frames:
        path = frame.f_code.co_filename
        if not path.startswith(TORCH):
            break
        # `wrapper` is torch's decorator around each collective: it tells nothing.
        if path.startswith(_EXCHANGES) and frame.f_code.co_name != "wrapper":
            call = frame.f_code.co_name
    return call


def awaited_worker(frames: list[FrameType]) -> str:
    """Describe the data loader's worker for which a thread waits; "" if it waits for none."""
    awaited = find_awaited_worker(frames)
    if awaited is None:
        return ""
    worker, pid, init_function = awaited
    text = f"worker {worker} (pid {pid}) of the data loader"
    # Only loaders of this library's feed note the sample that a worker reads.
    if isinstance(init_function, EndsWithParent):
        text += init_function.reading(worker)
    return text
