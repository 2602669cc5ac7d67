"""The weights of a prepared model, whole, and as other libraries load them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_kit.accelerator.loop import Loop
from trainer_kit.checkpoint.files import tied_names
from trainer_kit.checkpoint.weights import export
from trainer_kit.core.collective_errors import fail_together, on_rank_zero
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import absolute

__all__ = ["Weights", "local_directory"]


class Weights(Loop):
    """What `Accelerator` hands out and writes of a model, to be used without it."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The weights of a prepared model, whole, by the user's names.

        Where they are divided (FSDP, DeepSpeed, a mesh) every process calls it, and the main process gets them, on the
        CPU; the others get an empty dict: a device never holds more than one whole weight at a time.
        """
        own = self.unwrap_model(model) if unwrap else model
        if self._owns_step:
            whole = self.strategy.module_state(self.unwrap_model(model))
            return _on_cpu(whole) if self.is_main_process else {}
        if not self.strategy.sharded:
            return dict(own.state_dict())
        found = fail_together(self.world, lambda: self.strategy.module_state(own))
        everywhere, tied = self.strategy.names_on_all_ranks(), tied_names(found)
        names, held = list(found), None
        if everywhere is not None:  # stages have other parameters, and share some
            shared = {**tied, **self.strategy.shared_names(own)}
            names, several = list(everywhere), self.world.all_gather_object((list(found), shared))
            held = [theirs for theirs, _ in several]
            tied = {name: kept for _, ties in several for name, kept in ties.items()}
        for name in names:
            value = found.pop(name, None)
            if name in tied:  # the same tensor, which was gathered under its first name
                if self.is_main_process:
                    found[name] = found[tied[name]]
                continue
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            if held is not None:
                value = self._handed_over(value, next(rank for rank, theirs in enumerate(held) if name in theirs))
            if self.is_main_process:
                found[name] = value.cpu() if isinstance(value, torch.Tensor) else value  # sync point: a checkpoint
        return found

    def _handed_over(self, value: Any, source: int) -> Any:
        """What process ``source`` has, for the main process; every process calls it."""
        if source == 0:
            return value
        has = isinstance(value, torch.Tensor)
        told = self.world.broadcast((tuple(value.shape), value.dtype) if has else value, source)
        if not (isinstance(told, tuple) and isinstance(told[-1], torch.dtype)):
            return told
        mine = value if self.process_index == source else torch.empty(told[0], dtype=told[1], device=self.device)
        return self.world.broadcast(mine.detach(), source)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as Hugging Face libraries load them: ``model.safetensors``, or shards and an index.

        A tied weight is written once, under its first name.

        Args:
            model: prepared or not.
            save_directory: other files in it are left alone.
            max_shard_size: of a file, in bytes or as ``"5GB"``.
            safe_serialization: False writes ``pytorch_model.bin``, a pickle.
        """
        together = self.strategy.sharded or self._owns_step
        whole = self.get_state_dict(model) if self.is_main_process or together else {}

        def write() -> None:
            target = local_directory(save_directory)
            if target.is_file():
                raise ConfigurationError("save_model needs a directory", found=str(target))
            work = target / ".model.tmp"
            shutil.rmtree(work, ignore_errors=True)
            weights = {name: value.detach() for name, value in whole.items()}
            if safe_serialization:
                export(weights, work, "huggingface", max_shard_size=max_shard_size)
            else:
                export(weights, work / "pytorch_model.bin", "torch")
            made = sorted(work.iterdir(), key=lambda file: file.suffix == ".json")
            for file in made:
                os.replace(file, target / file.name)
            work.rmdir()
            for old in set(target.glob("model*.safetensors*")) - {target / file.name for file in made}:
                old.unlink()  # last: until here one of the two is whole

        on_rank_zero(self.world, write)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """``torch.save`` on the main process; with ``safe_serialization`` a dict of tensors as safetensors.

        A file that is there is replaced when the new one is whole.

        Raises:
            ConfigurationError: ``safe_serialization``, and something is no tensor.
        """
        if not self.is_main_process:
            return
        target = local_directory(f)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            if safe_serialization:
                _check_tensors(obj)
                export(obj, part, "safetensors")
            else:
                torch.save(obj, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def _check_tensors(obj: Any) -> None:
    found = {"the object": obj} if not isinstance(obj, Mapping) else obj
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                "safetensors hold tensors by name",
                found=f"{name}: {type(value).__name__}",
                fix="save a dict of tensors, or leave safe_serialization out",
            )


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    moved: dict[int, Any] = {}  # a tied weight stays one tensor
    for value in state.values():
        if id(value) not in moved:
            moved[id(value)] = value.cpu() if isinstance(value, torch.Tensor) else value  # sync point: a checkpoint
    return {name: moved[id(value)] for name, value in state.items()}


def local_directory(path: str | os.PathLike[str]) -> Path:
    """A directory of this machine; hooks write beside a state, which they cannot at a URL."""
    found = absolute(path)
    if not isinstance(found, Path):
        raise ConfigurationError(
            "an Accelerator saves to a directory of this machine",
            found=str(found),
            fix="save to a local path; a Trainer's checkpoints may stand at a URL",
        )
    return found
