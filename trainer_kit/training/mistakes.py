"""Notes on exceptions from steps and loaders: where they arose, and what a common one means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import TrainerKitError, add_note, printable

__all__ = ["note_mistakes"]

_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
_TWICE: Final = "backward through the graph a second time"
_ELSEWHERE: Final = (
    "the Trainer moves the module and each batch to its device: leave out .cuda() and .to(...)"
)
_UNEVEN: Final = (
    "the samples of a batch have different lengths: pass DataLoader(collate_fn=...) a function that pads them, such as"
    " DataCollatorWithPadding(tokenizer) of Transformers, or one that calls torch.nn.utils.rnn.pad_sequence"
)
_WHOLE: Final = "a step takes a batch as one argument: x, y = batch; lists become tensors in the loader's collate_fn"
_DOUBLE: Final = (
    "weights are float32, data from NumPy or a table often float64 or whole numbers: convert them with .float(),"
    ' or train with precision="64-true"'
)
_CLASSES: Final = "the loss takes the numbers of classes as whole numbers: y.long()"
_ONE: Final = "the loss, and a value that .item() reads, is one number: use its .mean()"
_MISTAKES: Final = (
    ("not compiled with CUDA", _ELSEWHERE),
    ("no NVIDIA driver", _ELSEWHERE),
    ("to be on the same device", f"{_ELSEWHERE}; make new tensors with device=self.device"),
    ("batch should be of equal size", _UNEVEN),
    ("stack expects each tensor to be equal size", _UNEVEN),
    ("must be Tensor, not list", _WHOLE),
    ("must be Tensor, not tuple", _WHOLE),
    ("mat1 and mat2 must have the same dtype", _DOUBLE),
    ("expected target dtype to be Long", _CLASSES),
    ("expected scalar type Long", _CLASSES),
    ("elements cannot be converted to Scalar", _ONE),
    ("created only for scalar outputs", _ONE),
    (
        "TrainModule.log() missing 1 required",
        "self.log(name, value) takes one value, self.log_dict(values) a dict",
    ),
)
"""Words of an exception from a step or a loader, and the note for them."""
_LONGEST: Final = 400  # characters of a description


def note_mistakes(error: BaseException, module: Any) -> None:
    """Add a note to an exception from a step: the layer that failed and the shapes of the batch.

    Both are read from the traceback, so a step that succeeds has no overhead.

    Args:
        error: the exception; errors of this library and interrupts get no note.
        module: the module whose step ran.
    """
    if isinstance(error, TrainerKitError) or not isinstance(error, Exception):
        return
    with suppress(Exception):  # a batch or a layer that cannot be described must not hide the error
        frames = list(_frames(error.__traceback__))
        at = next((i for i, frame in enumerate(frames) if _is_step(frame, module)), None)
        if at is not None:
            add_note(error, _described(frames[at], frames[at + 1 :], module))
        text = str(error)
        if (
            "is not iterable" in text
            and frames
            and isinstance(frames[-1].f_locals.get("self"), Optimizer)
        ):
            add_note(
                error,
                "an optimizer takes parameters, not their module: self.net.parameters(), with parentheses",
            )
        if _TWICE in text:
            add_note(error, _twice(module))
        for words, note in _MISTAKES:
            if words in text:
                add_note(error, note)
                break


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_step(frame: FrameType, module: Any) -> bool:
    names = frame.f_code.co_varnames
    return (
        frame.f_code.co_name in _STEPS and len(names) > 1 and frame.f_locals.get(names[0]) is module
    )


def _described(step: FrameType, inner: list[FrameType], module: nn.Module) -> str:
    names = {id(part): name for name, part in module.named_modules() if name}
    failed = [frame.f_locals.get("self") for frame in inner]
    layers = [part for part in failed if isinstance(part, nn.Module) and id(part) in names]
    where = f"in {type(module).__name__}.{step.f_code.co_name}"
    if layers:
        layer = layers[-1]
        where += f", module {names[id(layer)]!r}: {type(layer).__name__}({printable(layer.extra_repr(), 200)})"
    _, batch, *rest = (
        step.f_code.co_varnames
    )  # self, batch, batch_idx, and other locals of the step
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
