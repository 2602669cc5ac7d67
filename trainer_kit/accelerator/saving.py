"""Saving and loading everything that was prepared, as the same committed directories that a Trainer writes."""

from __future__ import annotations

import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer_kit.accelerator.deepspeed_import import load_deepspeed
from trainer_kit.accelerator.process import made_together
from trainer_kit.accelerator.weights import Weights, local_directory
from trainer_kit.accelerator.wrapping import unwrap
from trainer_kit.checkpoint.commit import clean_incomplete, io_failure, remove_checkpoint, stage, write_checkpoint
from trainer_kit.checkpoint.deepspeed import find_deepspeed
from trainer_kit.checkpoint.manifest import check_content, read_manifest
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.checkpoint.store import checkpoints, newest_verified
from trainer_kit.compat.options import ProjectConfiguration
from trainer_kit.core.collective_errors import fail_together, on_every_rank, on_rank_zero
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.state.collect import own_buffers, ranks_differ, without_own_buffers
from trainer_kit.state.optimizer_states import (
    optimizer_state,
    owned_parameters,
    parameter_names,
    restore_optimizer,
    restore_scheduler,
)
from trainer_kit.state.resume import held_of

__all__ = ["Saving"]

_NUMBERED: Final = re.compile(r"checkpoint_(\d+)")


class Saving(Weights):
    """What `Accelerator` writes and reads."""

    project_configuration: ProjectConfiguration
    step: int
    _objects: list[Any]
    _before_save: OrderedDict[int, Callable[..., None]]
    _before_load: OrderedDict[int, Callable[..., None]]

    @property
    def project_dir(self) -> str | None:
        """Where the project writes."""
        given = self.project_configuration.project_dir
        return None if given is None else os.path.expanduser(given)

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        given = self.project_configuration.logging_dir
        return None if given is None else os.path.expanduser(given)

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    # -- what belongs to a state -----------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep further objects in saved states, by ``state_dict`` and ``load_state_dict``.

        Their states hold plain data, tensors and arrays; anything else is refused at save time, naming the key.

        Raises:
            ConfigurationError: an object has no such methods.
        """
        refused = [
            type(one).__name__
            for one in objects
            if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)))
        ]
        if refused:
            raise ConfigurationError(
                "what is saved with the state needs state_dict() and load_state_dict()",
                found=", ".join(refused),
                fix="give its class both, or keep it in an object that has them",
            )
        self._objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, directory)`` ahead of each save.

        ``weights`` holds a state dict for each model; what the hook takes out of it is not saved. What the hook writes
        into ``directory`` becomes part of the checkpoint: it is a work directory until the state is complete, and gets
        the checkpoint's name then.
        """
        handle = RemovableHandle(self._before_save)
        self._before_save[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, directory)`` ahead of each load; a model that it takes out of the list is not loaded.

        ``directory`` is the checkpoint; the files that hooks wrote into it have been verified.
        """
        handle = RemovableHandle(self._before_load)
        self._before_load[handle.id] = hook
        return handle

    def _collect(self, weights: list[dict[str, Any]]) -> dict[str, Any]:
        """Every process calls it; the same result everywhere, but for what belongs to a process."""
        names = self._names()
        modules = [unwrap(model) for model in self._models]
        state: dict[str, Any] = {"model" if i == 0 else f"model_{i}": part for i, part in enumerate(weights)}
        state["optimizers"] = [optimizer_state(self.strategy, one.optimizer, names) for one in self._optimizers]
        state["precision"] = self.precision.state_dict()
        state["window"] = self.window.state_dict()

        own: list[dict[str, Tensor]] = []

        def ask() -> tuple[dict[str, Any], list[Any], int]:
            state["schedulers"] = [dict(one.state_dict()) for one in self._schedulers]
            state["objects"] = [dict(one.state_dict()) for one in self._objects]
            loaders = [loader.state_dict() for loader in self._dataloaders]
            own.extend(own_buffers(self.strategy, module) for module in modules)
            return rng_state(self.device), loaders, self.strategy.data.rank

        state["rng"], loaders, ranks = map(list, zip(*on_every_rank(self.world, ask), strict=True))
        state["data_ranks"] = ranks
        by_rank = dict(zip(reversed(ranks), reversed(loaders), strict=True))  # of those that read the same, the first
        state["loaders"] = [list(one) for one in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]
        buffers = self.world.gather_object(own)
        if buffers is not None and any(any(theirs) for theirs in buffers):  # who writes them has them
            state["buffers"] = buffers
        advances = [one.times for one in self._schedulers]
        state["progress"] = {"step": self.step, "iteration": self.save_iteration, "scheduler_steps": advances}
        return state

    def _names(self) -> dict[int, str]:
        several = len(self._models) > 1
        return {
            parameter: f"{i}.{name}" if several else name
            for i, model in enumerate(self._models)
            for parameter, name in parameter_names(self.strategy, unwrap(model)).items()
        }

    # -- states ----------------------------------------------------------------------------------------------------

    @made_together
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedulers, loaders, generators and registered objects; every process calls it.

        The directory is complete or absent, at every instant; one that is there is replaced.

        Args:
            output_dir: where; without it, and with automatic naming,
                ``<project_dir>/checkpoints/checkpoint_<iteration>``.
            safe_serialization: False is refused: nothing is pickled.
            save_model_func_kwargs: accepted for Accelerate's sake.

        Returns:
            The path.

        Raises:
            CheckpointError: a value that cannot be saved, by key, or a storage that fails.
        """
        if not safe_serialization:
            raise ConfigurationError("states are saved without pickle", found="safe_serialization=False")
        if not self.window.sync:
            self.print(
                "save_state inside an accumulation window: the gradients so far are not saved; "
                "save where accelerator.sync_gradients is true"
            )
        automatic = self.project_configuration.automatic_checkpoint_naming
        path = self._next_path() if automatic or output_dir is None else output_dir
        target = local_directory(path)
        modules = [unwrap(model) for model in self._models]
        strategy = self.strategy
        held = fail_together(self.world, lambda: [strategy.module_state(module) for module in modules])
        weights = [without_own_buffers(strategy, *pair) for pair in zip(modules, held, strict=True)]
        work = Path(on_rank_zero(self.world, lambda: str(_stage(target))))

        def call_hooks() -> None:
            for hook in list(self._before_save.values()):
                hook(self._models, weights, str(work))

        try:
            on_every_rank(self.world, call_hooks)
            self._write(target, self._collect(weights), work)
        except BaseException:
            if self.is_main_process:
                shutil.rmtree(work, ignore_errors=True)
            raise
        self.project_configuration.iteration += 1
        return str(target)

    def _write(self, target: Path, state: dict[str, Any], work: Path) -> None:
        info = {"step": self.step, "world_size": self.num_processes, "iteration": self.save_iteration}

        def alone() -> None:
            write_checkpoint(target, state, info=info, overwrite=True, staged=work)
            self._prune(target)

        if not self.strategy.sharded:
            on_rank_zero(self.world, alone)
            return
        from trainer_kit.checkpoint.sharded import write_sharded  # torch's planner: half a second

        write_sharded(target, state, info=info, group=self.world.side_group(), overwrite=True, staged=work)
        on_rank_zero(self.world, lambda: self._prune(target))

    def _read(self, path: Path) -> dict[str, Any]:
        """The state; of divided tensors this process's parts."""

        def read() -> dict[str, Any]:
            return {} if self.strategy.sharded else read_checkpoint(path)

        state = fail_together(self.world, read)
        if not self.strategy.sharded:
            return state
        from trainer_kit.checkpoint.sharded import read_divided

        like: dict[str, Any] = {}
        elsewhere: dict[str, Collection[str]] = {}
        every = fail_together(self.world, lambda: [held_of(self.strategy, unwrap(model)) for model in self._models])
        for i, (held, absent) in enumerate(every):
            elsewhere = dict.fromkeys(("model", "optimizers"), absent)  # of one model, where there are any
            for name, tensor in held.items():
                like[name] = like[f"{i}.{name}"] = tensor
        return read_divided(path, like, elsewhere=elsewhere, group=self.world.side_group())

    @made_together
    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Any = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go on where `save_state` was called: prepare everything first, in the same order; every process calls it.

        Of a directory that DeepSpeed wrote (without ZeRO, or what ``ds_to_universal`` made) weights, moments and the
        schedule are taken; random numbers, the place in the data and a loss scale are not in it.

        Args:
            input_dir: what `save_state` or DeepSpeed wrote; by default the project's newest one that is whole.
            load_kwargs: accepted for Accelerate's sake.
            load_model_func_kwargs: of ``load_state_dict`` of the models: ``strict``, ``assign``.

        Raises:
            CheckpointError: there is none, it is damaged, or does not fit what was prepared.
        """
        path = self._find(input_dir)
        if (theirs := fail_together(self.world, lambda: find_deepspeed(path))) is not None:
            models, optimizers = [unwrap(model) for model in self._models], [one.optimizer for one in self._optimizers]
            schedulers = [one.scheduler for one in self._schedulers]
            self.step = load_deepspeed(path, theirs, self.strategy, models, optimizers, schedulers, self.print)
            return
        state = self._read(path)
        models, directory = list(self._models), path
        if self._before_load:
            directory = Path(on_rank_zero(self.world, lambda: str(_directory_of_hooks(path))))

        def hear() -> None:
            for hook in list(self._before_load.values()):
                hook(models, str(directory))
            self._refuse_others(path, state)

        def fill() -> None:
            for i, model in enumerate(self._models):
                if not any(model is left for left in models):
                    continue
                saved, own = state["model" if i == 0 else f"model_{i}"], unwrap(model)
                if "assign" in load_model_func_kwargs and not (self.strategy.sharded or self._owns_step):
                    own.load_state_dict(saved, **load_model_func_kwargs)
                else:
                    self.strategy.load_module_state(own, saved, bool(load_model_func_kwargs.get("strict", True)))

        fail_together(self.world, hear)
        fail_together(self.world, fill)
        own = [owned_parameters(self.strategy, one.optimizer) for one in self._optimizers]
        fail_together(self.world, lambda: self._fill_the_rest(state, own))
        self.step = state["progress"]["step"]
        self._compare_schedulers(state["progress"].get("scheduler_steps"))
        named = _NUMBERED.fullmatch(path.name)
        self.project_configuration.iteration = (int(named[1]) if named else state["progress"]["iteration"]) + 1
        differs = ranks_differ(self.strategy, state)
        if differs is None:
            restore_rng(state["rng"][self.process_index], self.device)
            kept = state["buffers"][self.process_index] if "buffers" in state else []
            for model, buffers in zip(self._models, kept, strict=False):
                if any(model is left for left in models):
                    unwrap(model).load_state_dict(buffers, strict=False)
        else:
            self.print(f"resuming {differs}: random layers draw other numbers")

    def _fill_the_rest(self, state: Mapping[str, Any], own: list[list[list[nn.Parameter]]]) -> None:
        names, changed = self._names(), dict[int, Mapping[str, Any]]()
        weights: dict[str, Any] = {}
        for i in range(len(self._models)):
            kept = state.get("model" if i == 0 else f"model_{i}", {})  # a hook may have taken it out
            weights.update({f"{i}.{name}" if len(self._models) > 1 else name: value for name, value in kept.items()})
        for one, groups, saved in zip(self._optimizers, own, state["optimizers"], strict=True):
            raw = one.optimizer
            changed[id(raw)] = restore_optimizer(self.strategy, raw, groups, saved, names, self.print, weights)
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            stepped = getattr(scheduler.scheduler, "optimizer", None)
            kept = changed.get(id(getattr(stepped, "optimizer", stepped)), {})
            restore_scheduler(scheduler.scheduler, saved, "lr" in kept)
        self.precision.load_state_dict(state["precision"])
        self.window.load_state_dict(state["window"])
        for one, saved in zip(self._objects, state["objects"], strict=True):
            one.load_state_dict(saved)
        seeds = [loader.seed for loader in self._dataloaders]
        for loader, saved in zip(self._dataloaders, state["loaders"], strict=True):
            loader.load_states(saved)
        if self.data_seed is not None and seeds != [loader.seed for loader in self._dataloaders]:
            self.print(f"load_state: the data keep the order of the state, not that of seed={self.data_seed}")

    def _compare_schedulers(self, before: list[int] | None) -> None:
        """A schedule that counts two advances a step is not where one that counts four would be."""
        now = [one.times for one in self._schedulers]
        before = before or [1] * len(now)  # so did the versions that did not write it down
        if before != now:
            self.print(
                f"schedulers advanced {max(before)} times an optimizer step when this state was saved, and advance "
                f"{max(now)} times now, so they do not continue at the same place of their schedules; to resume on any "
                "number of processes, count optimizer steps: Accelerator(scheduler_steps_per_process=False)"
            )

    def _refuse_others(self, path: Path, state: Mapping[str, Any]) -> None:
        kinds: dict[str, list[Any]] = {
            "optimizers": self._optimizers,
            "schedulers": self._schedulers,
            "loaders": self._dataloaders,
            "objects": self._objects,
        }
        models = sum(name == "model" or name.startswith("model_") for name in state)
        counts = {"models": (models, len(self._models) if models else 0)}
        counts.update({kind: (len(state.get(kind, ())), len(now)) for kind, now in kinds.items()})
        wrong = [f"{kind}: {then} saved, {now} prepared" for kind, (then, now) in counts.items() if then != now]
        if wrong:
            raise CheckpointError(
                path, None, "; ".join(wrong), fix="prepare and register the same things, in the same order, first"
            )

    def _find(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return local_directory(input_dir)
        if self.project_dir is None:
            raise ConfigurationError(
                "load_state needs a directory", fix="pass it, or the project's: Accelerator(project_dir=...)"
            )
        root = local_directory(self.project_dir) / "checkpoints"

        def newest_sound() -> str | None:
            newest, damaged = newest_verified(root)
            for bad, problem in damaged:
                self.print(
                    f"checkpoint {bad.name} rejected: {problem.reason}; falling back to {newest and newest.name}"
                )
            return None if newest is None else str(newest)

        found = on_rank_zero(self.world, newest_sound)
        if found is None:
            raise CheckpointError(root, None, "there is no checkpoint here that can be loaded")
        return Path(found)

    def _next_path(self) -> Path:
        if self.project_dir is None:
            raise ConfigurationError(
                "save_state needs a directory", fix="pass it, or let Accelerator(project_dir=...) name it"
            )
        root = local_directory(self.project_dir) / "checkpoints"

        def free() -> int:
            taken = [int(found[1]) for name in _entries(root) if (found := _NUMBERED.fullmatch(name))]
            return max(taken) + 1 if self.save_iteration in taken else self.save_iteration  # an earlier run's stays

        self.project_configuration.iteration = on_rank_zero(self.world, free)
        return root / f"checkpoint_{self.save_iteration}"

    def _prune(self, newest: Path) -> None:
        """Delete what is over the limit, the oldest first, now that the newest is durable."""
        limit = self.project_configuration.total_limit
        if limit is None or not self.project_configuration.automatic_checkpoint_naming:
            return
        numbered = [
            (int(found[1]), record.path)
            for record in checkpoints(newest.parent)
            if (found := _NUMBERED.fullmatch(record.path.name))
        ]
        for _, old in sorted(numbered)[: max(0, len(numbered) - max(1, limit))]:
            remove_checkpoint(old)
            shutil.rmtree(_beside(Path(str(old))), ignore_errors=True)


def _beside(path: Path) -> Path:
    """Where hooks wrote before their files were part of a checkpoint."""
    return path.with_name(f"{path.name}.files")


def _entries(root: Path) -> list[str]:
    return os.listdir(root) if root.is_dir() else []


def _stage(target: Path) -> Path:
    """Where hooks write; an empty directory that the user made for the state is one to write to."""
    try:
        if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
            target.rmdir()
        clean_incomplete(target.parent)  # what processes that were killed in a save left
    except OSError as error:
        raise io_failure(target, error, 0) from error
    return stage(target)


def _directory_of_hooks(path: Path) -> Path:
    """What hooks that load are given, once the files of those that saved are verified."""
    manifest = read_manifest(path)
    check_content(path, manifest, list(manifest.get("extra", ())))
    beside = _beside(path)
    return beside if "extra" not in manifest and beside.is_dir() else path
