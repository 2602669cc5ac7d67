"""Collect the full weights of a prepared model, and write them, or any object, as files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer_kit.accelerator.processes import Processes
from trainer_kit.accelerator.state_directories import local_directory
from trainer_kit.accelerator.wrapping import unwrap
from trainer_kit.checkpoint.files import tied_names
from trainer_kit.checkpoint.weights import export
from trainer_kit.core.collective_errors import fail_together, on_rank_zero
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.state_names import plain_state
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.strategies.strategy import Strategy

__all__ = ["ModelWeights", "write_object"]

_Path = str | os.PathLike[str]


@final
class ModelWeights:
    """Collects and writes full weights.

    Args:
        processes: the processes of the run.
        strategy: the strategy that has wrapped the models.
    """

    def __init__(self, processes: Processes, strategy: Strategy) -> None:
        self._processes = processes
        self._strategy = strategy
        self._world = processes.world

    def collect(self, model: nn.Module, unwrapped: bool = True) -> StateDict:
        """Return the full weights of a prepared model under the user's names.

        For sharded weights (FSDP, DeepSpeed, a mesh) this is a collective call: the main process gets the weights on
        the CPU, and the others get an empty dict, so a device never holds more than one full weight at a time.
        """
        user_model = unwrap(model)
        if self._strategy.owns_step:
            weights = self._strategy.module_state(user_model)
            return _on_cpu(weights) if self._processes.is_main_process else {}
        owner = user_model if unwrapped else model
        if not self._strategy.sharded:
            return plain_state(owner)
        return self._gather(owner)

    def write(
        self,
        model: nn.Module,
        save_directory: _Path,
        max_shard_size: int | str,
        safe_serialization: bool,
    ) -> None:
        """See `Accelerator.save_model`."""
        weights: StateDict = {}
        # Sharded weights need every process; whole ones are read where they are written.
        is_collective = self._strategy.sharded or self._strategy.owns_step
        if is_collective or self._processes.is_main_process:
            weights = self.collect(model)

        def write() -> None:
            target = local_directory(save_directory)
            if target.is_file():
                raise ConfigurationError(
                    "save_model needs a directory", found=str(target)
                )
            # In the target: moves then stay in one file system. A save that was killed leaves it, and the next one
            # deletes it.
            work = target / ".model.tmp"
            shutil.rmtree(work, ignore_errors=True)
            detached = {name: value.detach() for name, value in weights.items()}
            if safe_serialization:
                export(detached, work, "huggingface", max_shard_size=max_shard_size)
            else:
                export(detached, work / "pytorch_model.bin", "torch")
            _replace_model_files(work, target)

        on_rank_zero(self._world, write)

    def _gather(self, owner: nn.Module) -> StateDict:
        """Gather sharded weights on the main process, one at a time; collective call."""
        is_main_process = self._processes.is_main_process
        weights = fail_together(self._world, lambda: self._strategy.module_state(owner))
        tied = tied_names(weights)
        names: Collection[str] = list(weights)
        holders: dict[str, int] | None = None
        names_on_all_ranks = self._strategy.names_on_all_ranks()
        if names_on_all_ranks is not None:
            # Pipeline stages have different parameters, and share some.
            names = list(names_on_all_ranks)
            tied.update(self._strategy.shared_names(owner))
            rows = self._world.all_gather_object((list(weights), tied))
            holders, tied = _merge_stages(rows)
        # Every process has the same names in the same order, because `full_tensor` and the broadcasts are collective.
        for name in names:
            value = weights.pop(name, None)
            if name in tied:
                # A tied tensor is gathered only under its first name.
                if is_main_process:
                    weights[name] = weights[tied[name]]
                continue
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            if holders is not None:
                value = self._send_to_main(value, holders[name])
            if is_main_process:
                weights[name] = _to_cpu(value)
        return weights

    def _send_to_main(self, value: Any, source: int) -> object:
        """Send the value of process ``source`` to the main process; collective call."""
        if source == 0:
            return value
        # First the shape: the other processes allocate memory for it.
        header = value
        if isinstance(value, Tensor):
            header = (tuple(value.shape), value.dtype)
        header = self._world.broadcast(header, source)
        is_tensor = isinstance(header, tuple) and isinstance(header[-1], torch.dtype)
        if not is_tensor:
            return header
        shape, dtype = header
        if self._processes.process_index != source:
            value = torch.empty(shape, dtype=dtype, device=self._strategy.device)
        return self._world.broadcast(value.detach(), source)


def write_object(obj: object, f: _Path, safe_serialization: bool) -> None:
    """Write an object on this process, like ``Accelerator.save``."""
    target = local_directory(f)
    # With the process id, because processes of several machines may write to one shared file system.
    incomplete = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if safe_serialization:
            export(_checked_tensors(obj), incomplete, "safetensors")
        else:
            torch.save(obj, incomplete)
        os.replace(incomplete, target)
    finally:
        incomplete.unlink(missing_ok=True)


def _merge_stages(
    rows: list[tuple[list[str], dict[str, str]]],
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the first process that holds each name, and the tied names of all processes.

    Args:
        rows: the names and the tied names of each process.
    """
    holders: dict[str, int] = {}
    tied: dict[str, str] = {}
    for rank, (names, ties) in enumerate(rows):
        for name in names:
            holders.setdefault(name, rank)
        tied.update(ties)
    return holders, tied


def _replace_model_files(work: Path, target: Path) -> None:
    """Move the files of ``work`` into the directory ``target``, and delete those of an earlier save."""
    files = list(work.iterdir())
    # The index comes last: it must not name shards that are not there yet.
    files.sort(key=lambda file: file.suffix == ".json")
    current = set()
    for file in files:
        destination = target / file.name
        os.replace(file, destination)
        current.add(destination)
    work.rmdir()
    # Earlier files go last: until here one of the two saves is complete.
    earlier_files = set(target.glob("model*.safetensors*")) - current
    for file in earlier_files:
        file.unlink()


def _checked_tensors(obj: object) -> Mapping[str, Tensor]:
    entries: SavedState = {"the object": obj}
    if isinstance(obj, Mapping):
        entries = obj
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                "safetensors hold tensors by name",
                found=f"{name}: {type(value).__name__}",
                fix="save a dict of tensors, or leave safe_serialization out",
            )
    return entries


def _on_cpu(state: SavedState) -> StateDict:
    # By id: a tied weight stays one tensor.
    copies: dict[int, object] = {}
    for value in state.values():
        if id(value) not in copies:
            copies[id(value)] = _to_cpu(value)
    return {name: copies[id(value)] for name, value in state.items()}


def _to_cpu(value: object) -> object:
    # Sync point: a checkpoint.
    return value.cpu() if isinstance(value, Tensor) else value
