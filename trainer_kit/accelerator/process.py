"""Which of several processes this is, and what only some of them do."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.launch.options import several_on

__all__ = ["DistributedType", "Processes", "made_together"]

_F = TypeVar("_F", bound=Callable[..., Any])


class DistributedType(str, Enum):
    """What kind of processes work together, by Hugging Face Accelerate's words.

    Example:
        >>> DistributedType.NO == "NO"
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_XPU = "MULTI_XPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_NEURON = "MULTI_NEURON"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"


def made_together(method: _F) -> _F:
    """Decorator of what every process calls: who waits in it for long says so."""

    @functools.wraps(method)
    def call(self: Processes, *arguments: Any, **options: Any) -> Any:
        with self._together(None, method.__name__):
            return method(self, *arguments, **options)

    return call  # type: ignore[return-value]


class Processes(ABC):
    """Identity and turn-taking, for `PartialState` and `Accelerator`."""

    environment: Environment
    initialized, fork_launched, is_fsdp2 = True, False, False
    deepspeed_plugin: Any = None
    fsdp_plugin = megatron_lm_plugin = torch_tp_plugin = None
    deepspeed_plugins: Mapping[str, Any] = MappingProxyType({})

    @property
    @abstractmethod
    def world(self) -> Group:
        """All processes; joined when this is first asked for."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where this process computes."""

    def __repr__(self) -> str:
        """What Accelerate prints of its state."""
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type!s}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @property
    def num_processes(self) -> int:
        """How many processes work together."""
        return self.environment.world_size

    @property
    def process_index(self) -> int:
        """This process among all, from 0."""
        return self.environment.rank

    @property
    def local_process_index(self) -> int:
        """This process among those of its machine, from 0."""
        return self.environment.local_rank if self.num_processes > 1 else 0

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """What kind of processes work together."""
        if not self.use_distributed:
            return DistributedType.NO
        return DistributedType(several_on(self.device.type))

    @property
    def backend(self) -> str | None:
        """What processes talk through: "gloo", "nccl", …; None for one alone."""
        if not self.use_distributed:
            return None
        return str(dist.get_backend()) if dist.is_initialized() else self.device.type

    @property
    def default_device(self) -> torch.device:
        """Where this process computes."""
        return self.device

    def set_device(self) -> None:
        """Nothing: the device was chosen when the process began."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave a group of processes; by default all of them."""
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here."""
        with self._together(None, "wait_for_everyone"):
            self.world.barrier()

    def _together(self, data: Any, call: str) -> AbstractContextManager[None]:
        """Around a call that all processes make."""
        return nullcontext()

    def print(self, *values: Any, **options: Any) -> None:
        """Print once on each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    def _tell(self, text: str) -> None:
        """Print on every process."""
        print(f"[process {self.process_index}] {text}", flush=True)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Inside, the main process goes first and all others follow."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Inside, the first process of each machine goes first and the others follow."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, mine: bool) -> Iterator[None]:
        if not mine:
            self.world.barrier()
        try:
            yield
        finally:
            if mine:  # also after an exception: the others wait
                self.world.barrier()

    def on_main_process(self, function: _F) -> _F:
        """Decorator: only the main process calls ``function``; the others get None."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: _F) -> _F:
        """Decorator: only the first process of each machine calls ``function``."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: _F) -> _F:
        """Decorator: only the last process calls ``function``."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: _F | None = None, process_index: int | None = None) -> Any:
        """Decorator: only process ``process_index`` calls ``function``."""
        if function is None:
            return lambda found: self.on_process(found, process_index)
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: _F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: only process ``local_process_index`` of each machine calls ``function``."""
        if function is None:
            return lambda found: self.on_local_process(found, local_process_index)
        return self._only(function, lambda: self.local_process_index == local_process_index)

    def _only(self, function: _F, here: Callable[[], bool]) -> _F:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options) if here() else None

        return call  # type: ignore[return-value]

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of a list, a tuple, a tensor, or a dict of them; the earlier ones get one more.

        Args:
            inputs: is divided; the members of a dict are equally long.
            apply_padding: repeat the last element so that every process gets equally many.

        Raises:
            ConfigurationError: the members of a dict differ in length.
        """
        length = len(inputs)
        if isinstance(inputs, dict):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigurationError("what is divided together must be equally long", found=f"lengths {lengths}")
            length = next(iter(lengths.values()), 0)
        each, more = divmod(length, self.num_processes)
        start = self.process_index * each + min(self.process_index, more)
        stop = start + each + (self.process_index < more)
        whole = each + (more > 0)

        def part(values: Any) -> Any:
            mine = values[start:stop]
            missing = whole - (stop - start)
            if not apply_padding or not missing or not length:
                return mine
            if isinstance(values, Tensor):
                return torch.cat([mine, *[values[-1:]] * missing])
            return type(mine)([*mine, *[values[-1]] * missing])

        yield {key: part(value) for key, value in inputs.items()} if isinstance(inputs, dict) else part(inputs)
