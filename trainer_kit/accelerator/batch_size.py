"""Find the largest batch size that fits into memory, and release memory."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import final

import torch

from trainer_kit.core.devices import ran_out_of_memory
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.types import Function

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory"]


@final
class _NoBatchSizeError(ConfigurationError, RuntimeError):
    """No batch size of `find_executable_batch_size` fits; a RuntimeError, which Accelerate scripts catch."""


def release_memory(*objects: object) -> list[None]:
    """Collect garbage and empty the accelerator's cache.

    Args:
        objects: assign the result to the names that still refer to them.

    Returns:
        None for each object.

    Example:
        >>> model, optimizer = torch.nn.Linear(2, 2), None
        >>> model, optimizer = release_memory(model, optimizer)
        >>> model is None
        True
    """
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Empty the accelerator's cache, after collecting garbage if asked to.

    Example:
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def find_executable_batch_size(
    function: Function | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    keep_global_batch: bool = False,
) -> Function:
    """Decorator: call ``function(batch_size, ...)`` again with half of it whenever memory runs out.

    Args:
        function: its first parameter is the batch size.
        starting_batch_size: the first batch size to try.
        reduce_batch_size_fn: returns the next batch size to try, in place of half the last one.
        keep_global_batch: call ``function(batch_size, accumulation_steps, ...)``, whose product stays
            ``starting_batch_size``, so that training does not depend on the memory size.

    Raises:
        RuntimeError: no batch size is left to try.
        ConfigurationError: the function takes no batch size.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=16)
        ... def train(batch_size):
        ...     if batch_size > 4:
        ...         raise RuntimeError("CUDA out of memory.")
        ...     return batch_size
        >>> train()
        4
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            keep_global_batch=keep_global_batch,
        )
    supplied = 2 if keep_global_batch else 1
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def search(*arguments: object, **options: object) -> object:
        if len(names) < len(arguments) + supplied:
            raise ConfigurationError(
                f"{function.__name__} receives its batch size from this search",
                found=f"{len(arguments)} arguments for the parameters {', '.join(names)}",
                fix=f"call {function.__name__}({', '.join(names[supplied:])})",
            )
        size = starting_batch_size
        while size > 0:
            # The last attempt's tensors: its exception, which refers to them, is no longer referenced here.
            release_memory()
            sizes = [size]
            if keep_global_batch:
                sizes.append(starting_batch_size // size)
            try:
                return function(*sizes, *arguments, **options)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
            size = size // 2 if reduce_batch_size_fn is None else reduce_batch_size_fn()
            # Down to a divisor, so that batch size and accumulation steps have exactly the product that was asked for.
            while keep_global_batch and size > 0 and starting_batch_size % size:
                size -= 1
        raise _NoBatchSizeError(
            "no executable batch size was found",
            found=f"down from {starting_batch_size} to 0",
        )

    return search
