"""Save and load all prepared objects, as committed directories like a Trainer's, and weights alone."""

from __future__ import annotations

import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.prepared import Prepared
from trainer_kit.accelerator.processes import Processes
from trainer_kit.accelerator.wrapping import unwrap
from trainer_kit.checkpoint.commit import (
    clean_incomplete,
    io_failure,
    remove_checkpoint,
    stage,
    write_checkpoint,
)
from trainer_kit.checkpoint.deepspeed import (
    DeepSpeedContent,
    DeepSpeedFiles,
    deepspeed_content,
    find_deepspeed,
)
from trainer_kit.checkpoint.files import tied_names
from trainer_kit.checkpoint.manifest import check_content, read_manifest
from trainer_kit.checkpoint.read import missing_checkpoint, read_checkpoint
from trainer_kit.checkpoint.store import checkpoints, newest_verified, similar
from trainer_kit.checkpoint.weights import export
from trainer_kit.compat.options import ProjectConfiguration
from trainer_kit.compat.refusals import refused
from trainer_kit.core.collective_errors import (
    fail_together,
    on_every_rank,
    on_rank_zero,
)
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import absolute
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.state_names import (
    load_module_weights,
    named_state,
    names_in,
    plain_state,
)
from trainer_kit.data.sources import has_state
from trainer_kit.precision.precision import Precision
from trainer_kit.state.collect import (
    describe_rank_change,
    rank_buffers,
    weights_to_write,
)
from trainer_kit.state.optimizer_states import (
    optimizer_state,
    owned_parameters,
    parameter_names,
    restore_optimizer,
    restore_scheduler,
)
from trainer_kit.state.resume import local_tensors
from trainer_kit.step.optimizers import OptimizerProxy
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Checkpoints", "write_object"]

_NUMBERED: Final = re.compile(r"checkpoint_(\d+)")
_NUMBER_IN_USE: Final = re.compile(r"checkpoint_(\d+)(?:\..*)?")
"""Also of a checkpoint that was set aside as damaged, or of files beside one."""


@final
class Checkpoints:
    """Writes and reads states and weights; all calls are collective.

    Args:
        processes: the processes of the run.
        strategy: collects and restores modules and optimizers.
        precision: saved in a state.
        accumulation: saved in a state.
        prepared: the models, optimizers, loaders and schedulers of a state.
        project: the configuration of the project's directories.

    Attributes:
        objects: the registered objects.
    """

    def __init__(
        self,
        processes: Processes,
        strategy: Strategy,
        precision: Precision,
        accumulation: Accumulation,
        prepared: Prepared,
        project: ProjectConfiguration,
    ) -> None:
        self.objects: list[Any] = []
        self._before_save: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._before_load: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._processes = processes
        self._strategy = strategy
        self._precision = precision
        self._accumulation = accumulation
        self._prepared = prepared
        self._project = project
        self._world = processes.world

    # -- the content of a state ------------------------------------------------------------------------------------

    def register(self, objects: Collection[Any]) -> None:
        """Include further objects in saved states, through ``state_dict`` and ``load_state_dict``.

        Raises:
            ConfigurationError: an object lacks these methods.
        """
        refused = [type(one).__name__ for one in objects if not has_state(one)]
        if refused:
            raise ConfigurationError(
                "a registered object needs state_dict() and load_state_dict()",
                found=", ".join(refused),
                fix="define both methods in its class, or register an object that has them",
            )
        self.objects.extend(objects)

    def register_save_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, directory)`` before each save."""
        handle = RemovableHandle(self._before_save)
        self._before_save[handle.id] = hook
        return handle

    def register_load_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, directory)`` before each load."""
        handle = RemovableHandle(self._before_load)
        self._before_load[handle.id] = hook
        return handle

    @property
    def _modules(self) -> list[nn.Module]:
        return [unwrap(model) for model in self._prepared.models]

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [one.optimizer for one in self._prepared.optimizers]

    def _collect(
        self, weights: Mapping[int, Mapping[str, Any]], version: str
    ) -> dict[str, Any]:
        """Collect a state; collective call. The result is equal on all processes, except for each process's buffers."""
        names = self._names()
        state: dict[str, Any] = {_part(i): dict(part) for i, part in weights.items()}
        state["optimizers"] = [
            optimizer_state(self._strategy, one, names) for one in self._optimizers
        ]
        state["precision"] = self._precision.state_dict()
        state["window"] = self._accumulation.state_dict()

        own: list[dict[str, Tensor]] = []

        def collect_here() -> tuple[dict[str, Any], list[Any], int, str]:
            state["schedulers"] = [
                dict(one.state_dict()) for one in self._prepared.schedulers
            ]
            state["objects"] = [dict(one.state_dict()) for one in self.objects]
            loaders = [loader.state_dict() for loader in self._prepared.loaders]
            own.extend(rank_buffers(self._strategy, module) for module in self._modules)
            return (
                rng_state(self._strategy.device),
                loaders,
                self._strategy.data.rank,
                version,
            )

        state["rng"], loaders, ranks, versions = map(
            list, zip(*on_every_rank(self._world, collect_here), strict=True)
        )
        state["data_ranks"] = ranks
        by_rank = dict(
            zip(reversed(ranks), reversed(loaders), strict=True)
        )  # the first rank of those with equal data
        state["loaders"] = [
            list(one)
            for one in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
        ]
        buffers = self._world.gather_object(own)
        if buffers is not None and any(
            any(theirs) for theirs in buffers
        ):  # None on all but the writing process
            state["buffers"] = buffers
        advances = [one.times for one in self._prepared.schedulers]
        state["progress"] = {
            "step": self._accumulation.step,
            "iteration": self._project.iteration,
            "scheduler_steps": advances,
            "models": len(self._prepared.models),
            "version": versions[0],  # the main process has the loggers
        }
        return state

    def _names(self) -> dict[int, str]:
        return {
            parameter: self._name(i, name)
            for i, module in enumerate(self._modules)
            for parameter, name in parameter_names(self._strategy, module).items()
        }

    def _name(self, model: int, name: str) -> str:
        """Return the name of a parameter that is unique among all models."""
        return f"{model}.{name}" if len(self._prepared.models) > 1 else name

    # -- states ----------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None,
        safe_serialization: bool,
        version: str,
    ) -> str:
        """Save all prepared and registered objects, and the random generators.

        Args:
            output_dir: the directory; None, or automatic naming: ``<project_dir>/checkpoints/checkpoint_<iteration>``.
            safe_serialization: False is refused: states contain no pickles.
            version: the directory of the run's logs below that of its project.

        Returns:
            The path.

        Raises:
            CheckpointError: a value cannot be saved (the message has its key), or the storage fails.
        """
        if not safe_serialization:
            raise refused("safe_serialization", "safe_serialization=False")
        if not self._accumulation.sync:
            self._processes.print(
                "save_state inside an accumulation window: the gradients so far are not saved; "
                "save where accelerator.sync_gradients is true"
            )
        automatic = self._project.automatic_checkpoint_naming
        path = self._next_path() if automatic or output_dir is None else output_dir
        target = self._agreed(path)
        modules = self._modules
        strategy = self._strategy
        held = fail_together(
            self._world, lambda: [strategy.module_state(module) for module in modules]
        )
        weights = [
            weights_to_write(strategy, *pair)
            for pair in zip(modules, held, strict=True)
        ]
        work = Path(on_rank_zero(self._world, lambda: str(_stage(target))))

        left = list(weights)

        def call_hooks() -> None:
            for hook in list(self._before_save.values()):
                hook(list(self._prepared.models), left, str(work))

        try:
            on_every_rank(self._world, call_hooks)
            self._write(
                target, self._collect(_weights_by_model(weights, left), version), work
            )
        except BaseException:
            if self._processes.is_main_process:
                shutil.rmtree(work, ignore_errors=True)
            raise
        self._project.iteration += 1
        return str(target)

    def _write(self, target: Path, state: dict[str, Any], work: Path) -> None:
        info = {
            "step": self._accumulation.step,
            "world_size": self._processes.num_processes,
            "iteration": self._project.iteration,
        }

        if self._strategy.sharded:
            from trainer_kit.checkpoint.sharded import (
                write_sharded,
            )  # importing torch's planner takes half a second

            write_sharded(
                target,
                state,
                info=info,
                group=self._world.side_group(),
                overwrite=True,
                staged=work,
            )

        def write() -> None:
            if not self._strategy.sharded:
                write_checkpoint(target, state, info=info, overwrite=True, staged=work)
            self._prune(target)

        on_rank_zero(self._world, write)

    def _read(self, path: Path) -> dict[str, Any]:
        """Read a state; of sharded tensors only this process's shards."""
        if not self._strategy.sharded:
            return fail_together(self._world, lambda: read_checkpoint(path))
        from trainer_kit.checkpoint.sharded import read_divided

        like: dict[str, Any] = {}
        elsewhere: dict[str, Collection[str]] = {}
        every = fail_together(
            self._world,
            lambda: [local_tensors(self._strategy, module) for module in self._modules],
        )
        for i, (held, absent) in enumerate(every):
            elsewhere = dict.fromkeys(
                ("model", "optimizers"), absent
            )  # such a strategy has one model
            for name, tensor in held.items():
                like[name] = like[f"{i}.{name}"] = tensor
        return read_divided(
            path, like, elsewhere=elsewhere, group=self._world.side_group()
        )

    def load_state(
        self, input_dir: str | os.PathLike[str] | None, load_options: Mapping[str, Any]
    ) -> str | None:
        """Restore a state of `save_state` or DeepSpeed; the same objects must be prepared in the same order.

        Args:
            input_dir: the directory; None: the project's newest intact checkpoint.
            load_options: arguments of the models' ``load_state_dict``: ``strict``, ``assign``.

        Returns:
            The directory of the run's logs below that of its project; None if the state does not say it.

        Raises:
            CheckpointError: the checkpoint is missing, is damaged, or does not match the prepared objects.
        """
        path = self._find(input_dir)
        if (
            theirs := fail_together(self._world, lambda: find_deepspeed(path))
        ) is not None:
            schedulers = [one.scheduler for one in self._prepared.schedulers]
            parts = (self._modules, self._optimizers, schedulers)
            steps = _load_deepspeed(
                path, theirs, self._strategy, *parts, self._processes.print
            )
            self._accumulation.place(steps * self._accumulation.steps)
            return None
        state = self._read(path)
        models = list(self._prepared.models)
        directory = path
        if self._before_load:
            directory = Path(
                on_rank_zero(self._world, lambda: str(_directory_of_hooks(path)))
            )

        def call_hooks() -> None:
            for hook in list(self._before_load.values()):
                hook(models, str(directory))
            self._refuse_others(path, state)

        def loaded(model: nn.Module) -> bool:
            return any(unwrap(model) is unwrap(left) for left in models)

        def load_models() -> None:
            for i, model in enumerate(self._prepared.models):
                if not loaded(model):
                    continue
                if _part(i) not in state:
                    raise _no_weights(path, i, unwrap(model))
                if "assign" in load_options and not (
                    self._strategy.sharded or self._strategy.owns_step
                ):
                    load_module_weights(
                        unwrap(model),
                        state[_part(i)],
                        **{"strict": True, **load_options},
                    )
                else:
                    strict = bool(load_options.get("strict", True))
                    self._strategy.load_module_state(
                        unwrap(model), state[_part(i)], strict
                    )

        fail_together(self._world, call_hooks)
        fail_together(self._world, load_models)
        owned = [
            owned_parameters(self._strategy, optimizer)
            for optimizer in self._optimizers
        ]
        fail_together(self._world, lambda: self._load_rest(state, owned))
        self._compare_schedulers(state["progress"].get("scheduler_steps"))
        named = _NUMBERED.fullmatch(path.name)
        self._project.iteration = (
            int(named[1]) if named else state["progress"]["iteration"]
        ) + 1
        differs = describe_rank_change(self._strategy, state)
        if differs is None:
            restore_rng(
                state["rng"][self._processes.process_index], self._strategy.device
            )
            kept = (
                state["buffers"][self._processes.process_index]
                if "buffers" in state
                else []
            )
            for model, buffers in zip(self._prepared.models, kept, strict=False):
                if loaded(model):
                    inner = unwrap(model)
                    inner.load_state_dict(names_in(inner, buffers), strict=False)
        else:
            self._processes.print(
                f"resuming {differs}: random layers draw different numbers"
            )
        version: str | None = state["progress"].get("version")
        return version

    def _load_rest(
        self, state: Mapping[str, Any], owned: list[list[list[nn.Parameter]]]
    ) -> None:
        prepared = self._prepared
        say = self._processes.print
        names = self._names()
        # A hook may have removed a model from the state.
        saved_models = [
            (i, state.get(_part(i), {})) for i in range(len(prepared.models))
        ]
        weights = {
            self._name(i, name): value
            for i, kept in saved_models
            for name, value in kept.items()
        }
        changed: dict[int, Mapping[str, Any]] = {}
        for optimizer, groups, saved in zip(
            self._optimizers, owned, state["optimizers"], strict=True
        ):
            changed[id(optimizer)] = restore_optimizer(
                self._strategy, optimizer, groups, saved, names, say, weights
            )
        for scheduler, saved in zip(
            prepared.schedulers, state["schedulers"], strict=True
        ):
            stepped = getattr(scheduler.scheduler, "optimizer", None)
            kept = changed.get(id(OptimizerProxy.unwrapped(stepped)), {})
            restore_scheduler(scheduler.scheduler, saved, "lr" in kept)
        self._precision.load_state_dict(state["precision"])
        self._accumulation.load_state_dict(
            state["window"], int(state["progress"]["step"])
        )
        for one, saved in zip(self.objects, state["objects"], strict=True):
            one.load_state_dict(saved)
        seeds = [loader.seed for loader in prepared.loaders]
        for loader, saved in zip(prepared.loaders, state["loaders"], strict=True):
            loader.load_states(saved)
            for line in loader.describe_changes(saved[0]):
                say(f"load_state: {line}")
        if prepared.data_seed is not None and seeds != [
            loader.seed for loader in prepared.loaders
        ]:
            say(
                f"load_state: the data keep the order of the state, not that of seed={prepared.data_seed}"
            )

    def _compare_schedulers(self, before: list[int] | None) -> None:
        """Warn if the number of scheduler steps per optimizer step differs from the saved run."""
        now = [one.times for one in self._prepared.schedulers]
        before = before or [1] * len(now)  # older states do not store it
        if before != now:
            self._processes.print(
                f"schedulers advanced {max(before)} times an optimizer step when this state was saved, and advance "
                f"{max(now)} times now, so they do not continue at the same place of their schedules; to resume on any "
                "number of processes, count optimizer steps: Accelerator(scheduler_steps_per_process=False)"
            )

    def _refuse_others(self, path: Path, state: Mapping[str, Any]) -> None:
        kinds: dict[str, list[Any]] = {
            "optimizers": self._prepared.optimizers,
            "schedulers": self._prepared.schedulers,
            "loaders": self._prepared.loaders,
            "objects": self.objects,
        }
        models = sum(name == "model" or name.startswith("model_") for name in state)
        if "models" in state["progress"]:  # a hook may have taken out weights
            models = state["progress"]["models"]
        counts = {"models": (models, len(self._prepared.models) if models else 0)}
        counts.update(
            {kind: (len(state.get(kind, ())), len(now)) for kind, now in kinds.items()}
        )
        wrong = [
            f"{kind}: {then} saved, {now} prepared"
            for kind, (then, now) in counts.items()
            if then != now
        ]
        if wrong:
            raise CheckpointError(
                path,
                None,
                "; ".join(wrong),
                fix="first prepare and register the same objects in the same order",
            )

    def _agreed(self, path: str | os.PathLike[str]) -> Path:
        """Return the main process's directory: a script may have made a temporary directory on each process."""
        return Path(on_rank_zero(self._world, lambda: str(_local_directory(path))))

    def _root(self, call: str, fix: str) -> Path:
        """Return the directory of the project's checkpoints."""
        if self._project.project_path is None:
            raise ConfigurationError(f"{call} needs a directory", fix=fix)
        return _local_directory(self._project.project_path) / "checkpoints"

    def _find(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            path = self._agreed(input_dir)
            fail_together(self._world, lambda: _check_exists(path))
            return path
        root = self._root(
            "load_state", "pass it, or the project's: Accelerator(project_dir=...)"
        )

        def newest_sound() -> str:
            newest, damaged = newest_verified(root)
            for bad, problem in damaged:
                self._processes.print(
                    f"checkpoint {bad.name} rejected: {problem.reason}; falling back to {newest and newest.name}"
                )
            if newest is None:
                raise missing_checkpoint(
                    root, "this directory contains no checkpoint that can be loaded"
                )
            return str(newest)

        return Path(on_rank_zero(self._world, newest_sound))

    def _next_path(self) -> Path:
        root = self._root(
            "save_state", "pass it, or let Accelerator(project_dir=...) name it"
        )

        def next_number() -> int:
            numbers = [
                int(match[1])
                for name in _entries(root)
                if (match := _NUMBER_IN_USE.fullmatch(name))
            ]
            return max([self._project.iteration, *(number + 1 for number in numbers)])

        self._project.iteration = on_rank_zero(self._world, next_number)
        return root / f"checkpoint_{self._project.iteration}"

    def _prune(self, newest: Path) -> None:
        """Delete the oldest checkpoints beyond the limit, except ``newest``; called when that one is durable."""
        limit = self._project.total_limit
        if limit is None or not self._project.automatic_checkpoint_naming:
            return
        paths = [record.path for record in checkpoints(newest.parent)]
        older = [
            path
            for path in paths
            if _NUMBERED.fullmatch(path.name) and path.name != newest.name
        ]
        for old in older[: max(0, len(older) + 1 - max(1, limit))]:
            remove_checkpoint(old)
            shutil.rmtree(_beside(Path(str(old))), ignore_errors=True)

    # -- weights alone ---------------------------------------------------------------------------------------------

    def get_state_dict(
        self, model: nn.Module, unwrapped: bool = True
    ) -> dict[str, Any]:
        """Return the full weights of a prepared model under the user's names.

        For sharded weights (FSDP, DeepSpeed, a mesh) this is a collective call: the main process gets the weights on
        the CPU, and the others get an empty dict, so a device never holds more than one full weight at a time.
        """
        inner = unwrap(model)
        own = inner if unwrapped else model
        if self._strategy.owns_step:
            whole = self._strategy.module_state(inner)
            return _on_cpu(whole) if self._processes.is_main_process else {}
        if not self._strategy.sharded:
            return plain_state(own)
        found = fail_together(self._world, lambda: self._strategy.module_state(own))
        everywhere = self._strategy.names_on_all_ranks()
        tied = tied_names(found)
        names = list(found)
        held = None
        if (
            everywhere is not None
        ):  # pipeline stages have different parameters, and share some
            shared = {**tied, **self._strategy.shared_names(own)}
            names = list(everywhere)
            several = self._world.all_gather_object((list(found), shared))
            held = [theirs for theirs, _ in several]
            tied = {name: kept for _, ties in several for name, kept in ties.items()}
        for name in names:
            value = found.pop(name, None)
            if name in tied:  # a tied tensor is gathered only under its first name
                if self._processes.is_main_process:
                    found[name] = found[tied[name]]
                continue
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            if held is not None:
                value = self._sent(
                    value,
                    next(rank for rank, theirs in enumerate(held) if name in theirs),
                )
            if self._processes.is_main_process:
                found[name] = (
                    value.cpu() if isinstance(value, Tensor) else value
                )  # sync point: a checkpoint
        return found

    def _sent(self, value: Any, source: int) -> Any:
        """Send the value of process ``source`` to the main process; collective call."""
        if source == 0:
            return value
        meta = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        meta = self._world.broadcast(meta, source)
        if not (isinstance(meta, tuple) and isinstance(meta[-1], torch.dtype)):
            return meta
        if self._processes.process_index != source:
            value = torch.empty(meta[0], dtype=meta[1], device=self._strategy.device)
        return self._world.broadcast(value.detach(), source)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str,
        safe_serialization: bool,
    ) -> None:
        """Write the weights in Hugging Face's layout: ``model.safetensors``, or shards and an index.

        A tied weight is written once, under its first name.

        Args:
            model: a prepared model, or any other.
            save_directory: the directory; its other files do not change.
            max_shard_size: the largest file size, in bytes or as ``"5GB"``.
            safe_serialization: False writes ``pytorch_model.bin``, a pickle.
        """
        collective = self._strategy.sharded or self._strategy.owns_step
        whole = (
            self.get_state_dict(model)
            if self._processes.is_main_process or collective
            else {}
        )

        def write() -> None:
            target = _local_directory(save_directory)
            if target.is_file():
                raise ConfigurationError(
                    "save_model needs a directory", found=str(target)
                )
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
            for old in set(target.glob("model*.safetensors*")) - {
                target / file.name for file in made
            }:
                old.unlink()  # last: until here one of the two is complete

        on_rank_zero(self._world, write)

    def save(
        self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool
    ) -> None:
        """Call ``torch.save`` on the main process; with ``safe_serialization`` write a dict of tensors as safetensors.

        An existing file is replaced when the new one is complete.

        Raises:
            ConfigurationError: ``safe_serialization`` with a value that is not a tensor.
        """
        if self._processes.is_main_process:
            write_object(obj, f, safe_serialization)


def write_object(obj: Any, f: str | os.PathLike[str], safe_serialization: bool) -> None:
    """Write an object on this process, like `Checkpoints.save`."""
    target = _local_directory(f)
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


def _weights_by_model(
    weights: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]]
) -> dict[int, Any]:
    """Return the weights that hooks have left, by the index of their model.

    Args:
        weights: those of each model.
        left: the list from which hooks have taken some, or in which they have replaced some.
    """
    if len(left) == len(weights):
        return dict(enumerate(left))
    indices = {id(part): index for index, part in enumerate(weights)}
    unknown = [part for part in left if id(part) not in indices]
    if unknown:
        raise ConfigurationError(
            "a hook of save_state replaced weights and took out others, so it is unknown which models they belong to",
            found=f"{len(left)} of {len(weights)} left, {len(unknown)} of them replaced",
            fix="change weights in place, or take out all and write them in the hook",
        )
    return {indices[id(part)]: part for part in left}


def _no_weights(path: Path, index: int, model: nn.Module) -> CheckpointError:
    return CheckpointError(
        path,
        None,
        f"it has no weights of model {index} ({type(model).__name__}): a hook took them out of the state",
        fix="load them in a hook of register_load_state_pre_hook, and take the model out there: models.remove(model)."
        " A hook that saves one of several models takes out its own weights: weights.pop(models.index(model))",
    )


def _part(index: int) -> str:
    """Return the name of a model in a state."""
    return "model" if index == 0 else f"model_{index}"


def _check_exists(path: Path) -> None:
    if not path.is_dir():
        reason = (
            "this is a file, not a directory of a state"
            if path.exists()
            else "this path contains no checkpoint"
        )
        raise missing_checkpoint(path, reason, fix=similar(path))


def _entries(root: Path) -> list[str]:
    return os.listdir(root) if root.is_dir() else []


def _beside(path: Path) -> Path:
    """Return the directory in which older versions stored the files of hooks."""
    return path.with_name(f"{path.name}.files")


def _stage(target: Path) -> Path:
    """Make the directory in which hooks write; it replaces an empty directory that the user made for the state."""
    try:
        if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
            target.rmdir()
        clean_incomplete(
            target.parent
        )  # left by processes that were killed during a save
    except OSError as error:
        raise io_failure(target, error, 0) from error
    return stage(target)


def _directory_of_hooks(path: Path) -> Path:
    """Verify the files that hooks wrote, and return their directory."""
    manifest = read_manifest(path)
    check_content(path, manifest, list(manifest.get("extra", ())))
    beside = _beside(path)
    return beside if "extra" not in manifest and beside.is_dir() else path


def _check_tensors(obj: Any) -> None:
    found = {"the object": obj} if not isinstance(obj, Mapping) else obj
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                "safetensors hold tensors by name",
                found=f"{name}: {type(value).__name__}",
                fix="save a dict of tensors, or leave safe_serialization out",
            )


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    moved: dict[int, Any] = {}  # a tied weight stays one tensor
    for value in state.values():
        if id(value) not in moved:
            moved[id(value)] = (
                value.cpu() if isinstance(value, Tensor) else value
            )  # sync point: a checkpoint
    return {name: moved[id(value)] for name, value in state.items()}


def _local_directory(path: str | os.PathLike[str]) -> Path:
    """Return a local directory; hooks write their files next to the state, which a URL does not support."""
    found = absolute(path)
    if not isinstance(found, Path):
        raise ConfigurationError(
            "an Accelerator saves to local directories only",
            found=str(found),
            fix="save to a local path; a Trainer can save checkpoints to a URL",
        )
    return found


def _load_deepspeed(
    path: Path,
    theirs: DeepSpeedFiles,
    strategy: Strategy,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    say: Callable[[str], None],
) -> int:
    """Load weights, optimizer moments and the schedule; every process calls this function, and reads its own shards.

    Args:
        path: the checkpoint's path, for errors.
        theirs: the opened files of the checkpoint.
        strategy: the strategy of this run.
        models: the user's models, without wrappers.
        optimizers: torch optimizers.
        schedulers: torch schedulers.
        say: prints a line for the user.

    Returns:
        The number of optimizer steps in the checkpoint.

    Raises:
        CheckpointError: the checkpoint does not match the prepared objects.
    """
    world: Group = strategy.world
    content: DeepSpeedContent = fail_together(world, lambda: deepspeed_content(theirs))
    prepared = [
        f"{len(several)} {what}"
        for several, what in ((models, "models"), (optimizers, "optimizers"))
    ]
    if len(models) != 1 or len(optimizers) > 1:
        raise CheckpointError(
            path,
            None,
            f"DeepSpeed saves one model and one optimizer, not {' and '.join(prepared)}",
        )
    _check_schedule(path, content.schedule, schedulers)

    (model,), weights = models, dict[str, Any]()
    owned = [owned_parameters(strategy, optimizer) for optimizer in optimizers]
    _, absent = fail_together(world, lambda: local_tensors(strategy, model))

    def fill() -> None:
        names = parameter_names(strategy, model)
        for optimizer, groups in zip(optimizers, owned, strict=True):
            called = [
                [names.get(id(parameter), "") for parameter in group]
                for group in groups
            ]
            _place(path, content, called)
            _restore(path, content, strategy, optimizer, groups, names, called, say)
        weights.update(
            {
                name: value
                for name, value in content.weights.items()
                if name not in absent
            }
        )
        for name, parameter in (
            named_state(model).items() if content.moments_by_position else ()
        ):
            weights[name] = weights[
                names[id(parameter)]
            ]  # a shared parameter has one master weight

    fail_together(world, fill)
    fail_together(
        world, lambda: strategy.load_module_state(model, weights, strict=True)
    )
    schedule = "its schedule, which advanced once a step, continues"
    if content.schedule is None or not schedulers:
        schedule = (
            "no schedule is saved or prepared: the learning rate is what it was then"
        )
        if schedulers:
            schedule = "no schedule is saved: load the state of yours by hand, or it starts from its beginning"
    else:
        schedulers[0].load_state_dict(dict(content.schedule))
    say(
        f"{path.name}, written by DeepSpeed: step {content.step}; {schedule}; random layers and loaders start from the "
        "beginning"
    )
    return content.step


def _check_schedule(
    path: Path, saved: Mapping[str, Any] | None, schedulers: Sequence[Any]
) -> None:
    if saved is None or not schedulers:
        return
    kind, own = type(schedulers[0]).__name__, schedulers[0].state_dict()
    if len(schedulers) > 1 or saved.keys() - own.keys():
        raise CheckpointError(
            path,
            "lr_scheduler",
            f"it is not the state of {kind if len(schedulers) == 1 else f'{len(schedulers)} schedulers'}:"
            f" it has {', '.join(sorted(saved))}",
            fix="prepare one scheduler, of the class that was saved",
        )


def _place(
    path: Path, content: DeepSpeedContent, called: Sequence[Sequence[str]]
) -> None:
    """Match optimizer states to parameters by order; for a checkpoint without ZeRO."""
    if not content.moments_by_position:
        return
    sizes, own = (
        [len(group) for group in content.moments_by_position],
        [len(group) for group in called],
    )
    if sizes != own:
        raise CheckpointError(
            path,
            "optimizer",
            f"groups of {sizes} parameters were saved, and groups of {own} are here",
        )
    for group, names in zip(content.moments_by_position, called, strict=True):
        for state, name in zip(group, names, strict=True):
            master = state.pop("master", None)
            content.moments[name] = state
            if master is not None:
                content.weights[name] = master


def _restore(
    path: Path,
    content: DeepSpeedContent,
    strategy: Strategy,
    optimizer: Any,
    own: Sequence[Sequence[nn.Parameter]],
    names: Mapping[int, str],
    called: Sequence[Sequence[str]],
    say: Callable[[str], None],
) -> None:
    missing = [
        name for group in called for name in group if name not in content.moments
    ]
    if not content.moments or "betas" not in optimizer.param_groups[0]:
        raise CheckpointError(
            path, "optimizer", f"it has moments of Adam, and {type(optimizer).__name__} is prepared"
            if content.moments else "it contains no moments",
            fix="load weights alone: model.load_state_dict(trainer_kit.checkpoint.read_weights(path)) before prepare",
        )  # fmt: skip
    if missing:
        say(
            f"{path.name} has no moments of {missing[0]}{', …' if missing[1:] else ''}: they begin at zero"
        )
    groups = [
        {k: v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    for group, rate in zip(groups, content.rates, strict=False):
        group["lr"] = rate
    saved = {"state": content.moments, "param_groups": groups}
    restore_optimizer(strategy, optimizer, own, saved, names, say, content.weights)
