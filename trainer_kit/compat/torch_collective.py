"""Lightning's collectives, for programs whose processes have different roles and that create their own groups."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.strategies.process_group import join_world

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CollectibleGroup", "Collective", "RedOpType", "ReduceOp", "TorchCollective"]

CollectibleGroup: TypeAlias = dist.ProcessGroup
ReduceOp = dist.ReduceOp
RedOpType = dist.ReduceOp.RedOpType


class Collective:
    """A group of processes that an object owns from `create_group` to `teardown`.

    Example:
        >>> Collective().group
        Traceback (most recent call last):
        trainer_kit.core.errors.ConfigurationError: this Collective has no group
          fix:   collective.create_group(ranks=[...])
    """

    def __init__(self) -> None:
        self._group: CollectibleGroup | None = None

    @property
    def group(self) -> CollectibleGroup:
        """The group.

        Raises:
            ConfigurationError: there is none yet.
        """
        if self._group is None:
            raise ConfigurationError(
                f"this {type(self).__name__} has no group",
                fix="collective.create_group(ranks=[...])",
            )
        return self._group


class TorchCollective(Collective):
    """The collectives of ``torch.distributed`` on a group of its own, under the names of Lightning's Fabric.

    ``src`` and ``dst`` are ranks of the world, as for torch. Once `setup` has joined the world, the hang watchdog of an
    `Accelerator` does not run: it does not know which process waits for which.

    Example:
        >>> TorchCollective.is_available()
        True
    """

    manages_default_group: ClassVar[bool] = False
    """Whether `setup` has joined the world in this process."""

    # -- groups --------------------------------------------------------------------------------------------------

    def setup(
        self,
        main_address: str | None = None,
        main_port: str | int | None = None,
        **options: object,
    ) -> TorchCollective:
        """Join the world, unless this process has joined it already.

        Args:
            main_address: the address of the rendezvous, if the environment does not set it.
            main_port: likewise.
            options: arguments of ``torch.distributed.init_process_group``, such as ``backend`` and ``timeout``.
        """
        if not self.is_initialized():
            # torch reads the address from the environment, and so does `join_world`.
            with _set_missing_variables(
                MASTER_ADDR=main_address, MASTER_PORT=main_port
            ):
                self.init_group(**options)
            # On the class: the world is of the process, whichever object joined it.
            TorchCollective.manages_default_group = True
        return self

    def create_group(self, **options: object) -> TorchCollective:
        """Make the group of this object; every process of the world makes this call.

        Args:
            options: arguments of ``torch.distributed.new_group``, such as ``ranks``; none: all processes.

        Raises:
            ConfigurationError: the object has a group already.
        """
        if self._group is not None:
            raise ConfigurationError(
                f"this {type(self).__name__} has a group already",
                fix="call teardown() first",
            )
        self._group = self.new_group(**options)
        return self

    def teardown(self) -> TorchCollective:
        """Leave the group of this object."""
        # The property raises where there is no group: a second teardown is a mistake of the program.
        self.destroy_group(self.group)
        self._group = None
        return self

    @classmethod
    def is_available(cls) -> bool:
        """Whether this torch has collectives."""
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether this process has joined the world."""
        return dist.is_initialized()

    @classmethod
    def init_group(cls, **options: Any) -> None:
        """Join the world, see `setup`."""
        # `join_world` takes only these two arguments, torch also the others.
        if not options.keys() <= {"backend", "timeout"}:
            dist.init_process_group(**options)
            return
        # Under gloo the process needs no accelerator.
        accelerator = "auto"
        if options.get("backend") == "gloo":
            accelerator = "cpu"
        device = pick_device(accelerator, Environment.detect().local_rank)
        join_world(device, **options)

    @classmethod
    def new_group(cls, **options: Any) -> CollectibleGroup:
        """Make a group that no object owns, for example for ``DDPStrategy(process_group=...)``."""
        group: CollectibleGroup = dist.new_group(**options)
        return group

    @classmethod
    def destroy_group(cls, group: CollectibleGroup) -> None:
        """Leave a group, if this process is in it."""
        # A process outside of the group has a number in its place.
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)

    @property
    def rank(self) -> int:
        """The rank of this process in the group; -1 outside of it."""
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """The number of processes in the group; -1 outside of it."""
        return dist.get_world_size(self.group)

    # -- tensors -------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Overwrite a tensor with that of one rank."""
        dist.broadcast(tensor, src, group=self.group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: object = "sum") -> Tensor:
        """Reduce a tensor in place, on every rank."""
        dist.all_reduce(tensor, _find_operation(op), group=self.group)
        return tensor

    def reduce(self, tensor: Tensor, dst: int, op: object = "sum") -> Tensor:
        """Reduce a tensor in place, on one rank."""
        dist.reduce(tensor, dst, _find_operation(op), group=self.group)
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Overwrite a list with the tensors of all ranks."""
        dist.all_gather(tensor_list, tensor, group=self.group)
        return tensor_list

    def gather(
        self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0
    ) -> list[Tensor]:
        """As `all_gather`, on one rank; the others pass an empty list."""
        dist.gather(tensor, gather_list or None, dst, group=self.group)
        return gather_list

    def scatter(
        self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0
    ) -> Tensor:
        """Overwrite a tensor with this rank's one of a list of one rank; the others pass an empty list."""
        dist.scatter(tensor, scatter_list or None, src, group=self.group)
        return tensor

    def reduce_scatter(
        self, output: Tensor, input_list: list[Tensor], op: object = "sum"
    ) -> Tensor:
        """Reduce lists, and overwrite a tensor with this rank's item."""
        dist.reduce_scatter(output, input_list, _find_operation(op), group=self.group)
        return output

    def all_to_all(
        self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]
    ) -> list[Tensor]:
        """Send one tensor of a list to each rank."""
        dist.all_to_all(output_tensor_list, input_tensor_list, group=self.group)
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to one rank."""
        dist.send(tensor, dst, group=self.group, tag=tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Receive a tensor from one rank, or from any."""
        dist.recv(tensor, src, group=self.group, tag=tag)
        return tensor

    # -- objects -------------------------------------------------------------------------------------------------

    def all_gather_object(self, object_list: list[Any], obj: object) -> list[Any]:
        """Overwrite a list with the objects of all ranks."""
        dist.all_gather_object(object_list, obj, group=self.group)
        return object_list

    def broadcast_object_list(
        self, object_list: list[Any], src: int, device: torch.device | None = None
    ) -> list[Any]:
        """Overwrite a list with that of one rank."""
        dist.broadcast_object_list(object_list, src, group=self.group, device=device)
        return object_list

    def gather_object(
        self, obj: object, object_gather_list: list[Any], dst: int = 0
    ) -> list[Any]:
        """As `all_gather_object`, on one rank; the others pass an empty list."""
        dist.gather_object(obj, object_gather_list or None, dst, group=self.group)
        return object_gather_list

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any],
        src: int = 0,
    ) -> list[Any]:
        """Overwrite the first item of a list with this rank's object of a list of one rank."""
        dist.scatter_object_list(
            scatter_object_output_list, scatter_object_input_list, src, group=self.group
        )
        return scatter_object_output_list

    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Wait for every rank of the group; a process outside of it does not wait."""
        # A process outside of the group holds torch's NON_GROUP_MEMBER instead.
        if isinstance(self.group, dist.ProcessGroup):
            dist.barrier(group=self.group, device_ids=device_ids)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """As `barrier`, with an error that names the ranks that did not come in time; gloo only."""
        dist.monitored_barrier(
            group=self.group, timeout=timeout, wait_all_ranks=wait_all_ranks
        )


def _find_operation(op: object) -> Any:
    """Return torch's reduction for a word such as ``"sum"`` or ``"avg"``."""
    if not isinstance(op, str):
        return op
    operations = [name.lower() for name in RedOpType.__members__]
    if op.lower() not in operations:
        raise ConfigurationError(
            f"unknown reduction {op!r}",
            fix=did_you_mean(op, operations, otherwise=", ".join(operations)),
        )
    return getattr(ReduceOp, op.upper())


@contextmanager
def _set_missing_variables(**variables: object) -> Iterator[None]:
    """Set environment variables that have no value; remove them afterwards."""
    # The launcher's variables have priority; these must not reach processes that are started later.
    missing = {
        name: str(value)
        for name, value in variables.items()
        if value is not None and name not in os.environ
    }
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
