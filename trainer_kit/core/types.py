"""Names of the types that several packages share: what users pass in, and what the library passes on unread.

``Any`` stands behind most names: a batch or a state has the structure that its author chose. The name says which of
them a value is, and one place says what may be done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

__all__ = [
    "Batch",
    "DataModuleLike",
    "Function",
    "HyperParameters",
    "JsonObject",
    "Keywords",
    "LRSchedulerLike",
    "Loaders",
    "LoggerLike",
    "MetricValue",
    "Nested",
    "ParamGroup",
    "SavedState",
    "StateDict",
    "Stateful",
    "StepOutput",
]

StateDict: TypeAlias = dict[str, Any]
"""What a ``state_dict`` method returns: plain data, tensors and further such dictionaries, by name."""
SavedState: TypeAlias = Mapping[str, Any]
"""A state that is only read: of a checkpoint, or before it is written."""
HyperParameters: TypeAlias = Mapping[str, Any]
"""Hyperparameters by name; values are any objects, of which loggers and checkpoints write what they can."""
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, as ``json.loads`` returns it: keys are strings, values are plain data."""
Keywords: TypeAlias = dict[str, Any]
"""Keyword arguments by name, for a function that is called with ``**keywords``."""
ParamGroup: TypeAlias = Mapping[str, Any]
"""An entry of an optimizer's ``param_groups``: its parameters under ``"params"``, and its options by name."""
Function: TypeAlias = Callable[..., Any]
"""A function whose parameters are unknown here, such as a method of the user's that is wrapped or inspected."""
Batch: TypeAlias = Any
"""What a loader yields, in the structure of the user's collate function; `trainer_kit.core.tensors` walks it."""
StepOutput: TypeAlias = Any
"""What a step method of the user returns: a loss, a dict with ``"loss"``, any value of an evaluation, or None."""
Nested: TypeAlias = Any
"""A tensor or other leaf, or mappings, sequences and dataclasses of such values, as `map_leaves` walks them."""
Loaders: TypeAlias = Any
"""A loader of the user, or loaders in nested lists and dicts, as `Trainer.fit` takes them; any iterable is a loader."""
MetricValue: TypeAlias = Any
"""What ``log`` takes: a number, a tensor of one element, or a metric object with ``compute()``."""
LoggerLike: TypeAlias = Any
"""A logger of this library or another, or a user's; `trainer_kit.core.protocols.Logger` has what is required."""
DataModuleLike: TypeAlias = Any
"""A `DataModule`, or an object with some methods of `DataHooks`; the library calls those that exist. None: not used."""


class Stateful(Protocol):
    """An object whose state is saved in checkpoints."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> object: ...


class LRSchedulerLike(Stateful, Protocol):
    """A scheduler of learning rates: of torch, of a library or of the user; ``step`` may take a metric or an epoch."""

    def step(self, *args: Any, **kwargs: Any) -> object: ...
