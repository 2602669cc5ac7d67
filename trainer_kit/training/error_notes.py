"""What a failed step worked on, as a note on the user's exception."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final

from torch import Tensor, nn

from trainer_kit.core.errors import TrainerKitError, add_note, printable

__all__ = ["note_batch"]

_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
_TWICE: Final = "backward through the graph a second time"
_LONGEST: Final = 400  # characters of a description


def note_batch(error: BaseException, module: Any) -> None:
    """Attach the layer that failed and the shapes of the batch to an exception from a step.

    Everything is read from the traceback: a step that does not fail pays nothing.

    Args:
        error: the exception on its way to the user; errors of this library and interrupts stay as they are.
        module: the module that ran.
    """
    if isinstance(error, TrainerKitError) or not isinstance(error, Exception):
        return
    with suppress(Exception):  # a batch or a layer of the user's that cannot be described must not hide the error
        frames = list(_frames(error.__traceback__))
        at = next((i for i, frame in enumerate(frames) if _is_step(frame, module)), None)
        if at is not None:
            add_note(error, _described(frames[at], frames[at + 1 :], module))
        if _TWICE in str(error):
            add_note(error, _twice(module))


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_step(frame: FrameType, module: Any) -> bool:
    names = frame.f_code.co_varnames
    return frame.f_code.co_name in _STEPS and len(names) > 1 and frame.f_locals.get(names[0]) is module


def _described(step: FrameType, inner: list[FrameType], module: nn.Module) -> str:
    names = {id(part): name for name, part in module.named_modules() if name}
    failed = [frame.f_locals.get("self") for frame in inner]
    layers = [part for part in failed if isinstance(part, nn.Module) and id(part) in names]
    where = f"in {type(module).__name__}.{step.f_code.co_name}"
    if layers:
        layer = layers[-1]
        where += f", module {names[id(layer)]!r}: {type(layer).__name__}({printable(layer.extra_repr(), 200)})"
    _, batch, *rest = step.f_code.co_varnames  # self, batch, batch_idx, and what else the step names
    index = step.f_locals.get(rest[0]) if step.f_code.co_argcount > 2 else None
    number = f" {index}" if isinstance(index, int) else ""
    if batch not in step.f_locals:  # deleted
        return where
    return f"{where}; batch{number}: {printable(_shapes(step.f_locals[batch]), _LONGEST)}"


def _shapes(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_shapes(part)}' for name, part in list(value.items())[:20])}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}: ({', '.join(map(_shapes, value[:10]))})"
    return type(value).__name__


def _twice(module: Any) -> str:
    name = type(module).__name__
    own = (
        f"the Trainer calls backward on the loss that {name}.training_step returns: remove backward() from the step, or"
        " set self.automatic_optimization = False and call self.manual_backward(loss) once"
        if module.automatic_optimization
        else f"{name}.training_step calls backward on one loss more than once"
    )
    return f"{own}; or the loss reaches back into the graph of an earlier batch: detach what the module keeps"
