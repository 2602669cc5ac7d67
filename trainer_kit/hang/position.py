"""Find the position of a thread from its Python frames: phase, line of user code, collective."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import torch

from trainer_kit.data.workers import EndsWithParent

__all__ = [
    "COMPILERS",
    "OUTSIDE",
    "Position",
    "awaited_worker",
    "find_position",
    "user_line",
]

# Frames hold the paths that were imported: links, such as that of an environment, stay as they are.
_HERE: Final = str(Path(__file__).absolute().parents[1])
# torch may be outside of this environment's directories.
_TORCH: Final = str(Path(torch.__file__).absolute().parent)
_ENVIRONMENT: Final = sysconfig.get_paths()
_LIBRARIES: Final = (
    _HERE,
    _TORCH,
    "<frozen",
    _ENVIRONMENT["stdlib"],
    _ENVIRONMENT["purelib"],
    _ENVIRONMENT["platlib"],
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
    # (start of the file's path, phase, whether it may take long)
    *((directory, "compilation", True) for directory in COMPILERS),
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
            return f"{line} in {called}" if called else line
        called = caller.f_code.co_name
    return f"in {called}" if called else "at its end"


def _phase(frames: list[FrameType]) -> tuple[str, bool]:
    innermost: tuple[str, bool] | None = None
    for frame in frames:
        phase = _phase_of_frame(frame)
        if phase is not None and phase[1]:
            return phase  # a forward during validation may take long too
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
    owner = frame.f_locals.get(names[0]) if names else None
    if owner is None or inspect.ismodule(owner):
        return None
    return f"{type(owner).__name__}.{frame.f_code.co_name}"


def _call(frames: list[FrameType]) -> str:
    if not frames:
        return ""
    if frames[0].f_code.co_name == _BACKWARD:
        return _GRADIENTS
    if not frames[0].f_code.co_filename.startswith(_EXCHANGES):
        return ""
    call = ""
    for frame in frames:
        path = frame.f_code.co_filename
        if not path.startswith(_TORCH):
            break
        if path.startswith(_EXCHANGES) and frame.f_code.co_name != "wrapper":
            call = frame.f_code.co_name
    return call


def awaited_worker(frames: list[FrameType]) -> str:
    """Describe the data loader's worker for which a thread waits; "" if it waits for none."""
    for caller in frames:
        loader: Any = caller.f_locals.get("self")
        if type(loader).__name__ != "_MultiProcessingDataLoaderIter":
            continue
        if caller.f_code.co_name != "_try_get_data":
            continue
        worker = loader._task_info.get(loader._rcvd_idx, (None,))[0]
        if worker is None:
            return ""
        init = loader._worker_init_fn
        index = init.reading(worker) if isinstance(init, EndsWithParent) else ""
        pid = loader._workers[worker].pid
        return f"worker {worker} (pid {pid}) of the data loader{index}"
    return ""
