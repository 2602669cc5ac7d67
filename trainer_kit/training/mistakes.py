"""Notes on exceptions from steps and loaders: where they arose, and what a common one means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import TrainerKitError, add_note, printable
from trainer_kit.core.module import TrainModule

__all__ = ["note_mistakes"]

_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
_SECOND_BACKWARD: Final = "backward through the graph a second time"
_DEVICE: Final = "the Trainer moves the module and each batch to its device: leave out .cuda() and .to(...)"
_COLLATE: Final = (
    "the samples of a batch have different lengths: pass DataLoader(collate_fn=...) a function that pads them, such as"
    " DataCollatorWithPadding(tokenizer) of Transformers, or one that calls torch.nn.utils.rnn.pad_sequence"
)
_UNPACK: Final = "a step takes a batch as one argument: x, y = batch; lists become tensors in the loader's collate_fn"
_DTYPE: Final = (
    "weights are float32, data from NumPy or a table often float64 or integers: convert them with .float(),"
    ' or train with precision="64-true"'
)
_CLASSES: Final = "the loss takes class indices as integers: y.long()"
_SCALAR: Final = (
    "the loss, and a value that .item() reads, is one number: use its .mean()"
)
_MISTAKES: Final = (
    ("not compiled with CUDA", _DEVICE),
    ("no NVIDIA driver", _DEVICE),
    (
        "to be on the same device",
        f"{_DEVICE}; make new tensors with device=self.device",
    ),
    ("batch should be of equal size", _COLLATE),
    ("stack expects each tensor to be equal size", _COLLATE),
    ("must be Tensor, not list", _UNPACK),
    ("must be Tensor, not tuple", _UNPACK),
    ("mat1 and mat2 must have the same dtype", _DTYPE),
    ("expected target dtype to be Long", _CLASSES),
    ("expected scalar type Long", _CLASSES),
    ("elements cannot be converted to Scalar", _SCALAR),
    ("created only for scalar outputs", _SCALAR),
    (
        "TrainModule.log() missing 1 required",
        "self.log(name, value) takes one value, self.log_dict(values) a dict",
    ),
)
"""A phrase in the message of an exception from a step or a loader, and the note for it."""
_MAX_LENGTH: Final = 400
"""Characters of a description of a batch."""


def note_mistakes(error: BaseException, module: TrainModule) -> None:
    """Add a note to an exception from a step: the layer that failed and the shapes of the batch.

    Both are read from the traceback, so a step that succeeds has no overhead.

    Args:
        error: the exception; errors of this library and interrupts get no note.
        module: the module whose step ran.
    """
    if isinstance(error, TrainerKitError) or not isinstance(error, Exception):
        return
    # A batch or a layer that cannot be described must not hide the error itself.
    with suppress(Exception):
        frames = list(_frames(error.__traceback__))
        for index, frame in enumerate(frames):
            if _is_step(frame, module):
                add_note(error, _describe_step(frame, frames[index + 1 :], module))
                break
        text = str(error)
        if "is not iterable" in text and frames and _is_in_optimizer(frames[-1]):
            add_note(
                error,
                "an optimizer takes parameters, not their module: self.net.parameters(), with parentheses",
            )
        if _SECOND_BACKWARD in text:
            add_note(error, _explain_second_backward(module))
        for phrase, note in _MISTAKES:
            if phrase in text:
                add_note(error, note)
                break


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_step(frame: FrameType, module: object) -> bool:
    if frame.f_code.co_name not in _STEPS:
        return False
    # By the object: submodules may have methods of these names, which the Trainer does not call.
    names = frame.f_code.co_varnames
    return len(names) > 1 and frame.f_locals.get(names[0]) is module


def _is_in_optimizer(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), Optimizer)


def _describe_step(
    step: FrameType, inner_frames: list[FrameType], module: nn.Module
) -> str:
    """The step, the innermost layer that the exception passed through, and the shapes of the batch."""
    description = f"in {type(module).__name__}.{step.f_code.co_name}"
    # From the innermost frame outwards, to the first one that is a method of a named layer.
    names = {id(layer): name for name, layer in module.named_modules() if name}
    for frame in reversed(inner_frames):
        layer = frame.f_locals.get("self")
        if isinstance(layer, nn.Module) and id(layer) in names:
            settings = printable(layer.extra_repr(), 200)
            description += (
                f", module {names[id(layer)]!r}: {type(layer).__name__}({settings})"
            )
            break
    # self, batch, batch_idx, and local variables; Python keeps the order of the signature.
    _, batch, *other_names = step.f_code.co_varnames
    # The step may have deleted its batch.
    if batch not in step.f_locals:
        return description
    number = ""
    if step.f_code.co_argcount > 2:
        index = step.f_locals.get(other_names[0])
        if isinstance(index, int):
            number = f" {index}"
    shapes = printable(_describe_shapes(step.f_locals[batch]), _MAX_LENGTH)
    return f"{description}; batch{number}: {shapes}"


def _describe_shapes(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        items = [
            f"{name!r}: {_describe_shapes(item)}"
            for name, item in list(value.items())[:20]
        ]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        items = [_describe_shapes(item) for item in value[:10]]
        return f"{type(value).__name__} of {len(value)}: ({', '.join(items)})"
    return type(value).__name__


def _explain_second_backward(module: TrainModule) -> str:
    name = type(module).__name__
    cause = f"{name}.training_step calls backward on one loss more than once"
    if module.automatic_optimization:
        cause = (
            f"the Trainer calls backward on the loss that {name}.training_step returns: remove backward() from the"
            " step, or set self.automatic_optimization = False and call self.manual_backward(loss) once"
        )
    return f"{cause}; or the loss reaches back into the graph of an earlier batch: detach what the module keeps"
