"""Save and load all prepared objects, as committed directories like a Trainer's."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import final

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.deepspeed_state import DeepSpeedState
from trainer_kit.accelerator.prepared import Prepared
from trainer_kit.accelerator.processes import Processes
from trainer_kit.accelerator.state_directories import (
    StateDirectories,
    stage_state,
    verified_hook_directory,
)
from trainer_kit.accelerator.wrapping import unwrap
from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.deepspeed import DeepSpeedFiles, find_deepspeed
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.collective_errors import (
    fail_together,
    on_rank_zero,
)
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.state_names import load_module_weights
from trainer_kit.core.types import Keywords, Stateful
from trainer_kit.data.sources import has_state
from trainer_kit.options.records import ProjectConfiguration
from trainer_kit.options.refusals import refused
from trainer_kit.precision.precision import Precision
from trainer_kit.state.collect import (
    SavedState,
    State,
    weights_to_write,
)
from trainer_kit.state.optimizer_states import (
    optimizer_state,
    owned_parameters,
    parameter_names,
    restore_optimizers,
    restore_scheduler,
)
from trainer_kit.state.rank_states import (
    by_rank,
    collect_rank_states,
    describe_rank_change,
    restore_rank_buffers,
    restore_rank_rng,
)
from trainer_kit.state.resume import local_tensors
from trainer_kit.step.optimizers import OptimizerProxy
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Checkpoints"]


@final
class Checkpoints:
    """Writes and reads states; all calls are collective.

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
        self.objects: list[Stateful] = []
        # An OrderedDict: torch's handle refers to it weakly, which a plain dict does not allow.
        self._before_save: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._before_load: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._directories = StateDirectories(processes, project)
        self._processes = processes
        self._strategy = strategy
        self._precision = precision
        self._accumulation = accumulation
        self._prepared = prepared
        self._world = processes.world

    # -- the content of a state ------------------------------------------------------------------------------------

    def register(self, objects: Collection[Stateful]) -> None:
        """Include further objects in saved states, through ``state_dict`` and ``load_state_dict``.

        Raises:
            ConfigurationError: an object lacks these methods.
        """
        # Before any object is added: a refused call registers none of its objects.
        stateless = [type(obj).__name__ for obj in objects if not has_state(obj)]
        if stateless:
            raise ConfigurationError(
                "a registered object needs state_dict() and load_state_dict()",
                found=", ".join(stateless),
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
        return [wrapper.optimizer for wrapper in self._prepared.optimizers]

    @property
    def _scheduler_times(self) -> list[int]:
        """How often an optimizer step advances each scheduler."""
        return [scheduler.times for scheduler in self._prepared.schedulers]

    def _collect(self, weights: Mapping[int, SavedState], version: str) -> State:
        """Collect a state; collective call. The result is equal on all processes, except for each process's buffers.

        Only on the main process does it have ``rng``, ``data_ranks``, ``loaders`` and ``buffers``, of all processes.

        Args:
            weights: the weights to save, by the index of their model.
            version: the directory of the run's logs below that of its project.
        """
        state: State = {}
        for index, model_weights in weights.items():
            state[_model_key(index)] = dict(model_weights)
        names = self._parameter_names()
        # Outside of `collect_of_rank`: this is a collective call, which a process that fails there would not make.
        state["optimizers"] = [
            optimizer_state(self._strategy, optimizer, names)
            for optimizer in self._optimizers
        ]
        state["precision"] = self._precision.state_dict()
        state["window"] = self._accumulation.state_dict()

        # All calls of the user's `state_dict` methods, of which any may fail on one process alone.
        def collect_content() -> list[State]:
            state["schedulers"] = _state_dicts(self._prepared.schedulers)
            state["objects"] = _state_dicts(self.objects)
            return _state_dicts(self._prepared.loaders)

        ranks = collect_rank_states(
            self._world, self._strategy, self._modules, collect_content
        )
        # The main process writes what the processes have of their own.
        if ranks is not None:
            state["rng"] = ranks.rng
            state["data_ranks"] = ranks.data_ranks
            # For each loader its states by data rank: processes with equal data have equal loaders.
            loaders = by_rank(list(zip(ranks.data_ranks, ranks.contents, strict=True)))
            state["loaders"] = [list(states) for states in zip(*loaders, strict=True)]
            if ranks.buffers is not None:
                state["buffers"] = ranks.buffers
        state["progress"] = {
            "step": self._accumulation.step,
            "iteration": self._directories.iteration,
            "scheduler_steps": self._scheduler_times,
            # Not the number of weights in the state: a hook may take weights out.
            "models": len(self._prepared.models),
            # The main process has the loggers, and writes this.
            "version": version,
        }
        return state

    def _parameter_names(self) -> dict[int, str]:
        """Return the names of all models' parameters by id."""
        names = {}
        for index, module in enumerate(self._modules):
            module_names = parameter_names(self._strategy, module)
            for parameter_id, name in module_names.items():
                names[parameter_id] = self._unique_name(index, name)
        return names

    def _unique_name(self, model: int, name: str) -> str:
        """Return the name of a parameter that is unique among all models."""
        return f"{model}.{name}" if len(self._prepared.models) > 1 else name

    # -- save ------------------------------------------------------------------------------------------------------

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
        target = self._directories.target(output_dir)
        # Before a directory is made, so that a failure here leaves nothing on disk.
        weights = self._collect_weights()
        work = Path(on_rank_zero(self._world, lambda: str(stage_state(target))))
        # A copy: hooks remove entries, and only the full list says which models the others belong to.
        weights_after_hooks = list(weights)

        def call_hooks() -> None:
            # Copies: a hook may remove itself, and its changes to the list of models do not reach the prepared ones.
            for hook in list(self._before_save.values()):
                hook(list(self._prepared.models), weights_after_hooks, str(work))

        try:
            fail_together(self._world, call_hooks)
            weights_by_model = _weights_by_model(weights, weights_after_hooks)
            self._write(target, self._collect(weights_by_model, version), work)
        # Also for KeyboardInterrupt: otherwise the incomplete directory stays until the next save.
        except BaseException:
            if self._processes.is_main_process:
                shutil.rmtree(work, ignore_errors=True)
            raise
        # Not before: after a save that failed, the next one gets its number.
        self._directories.count_save()
        return str(target)

    def _collect_weights(self) -> list[State]:
        """Return what this process may write of each model; collective call."""
        strategy = self._strategy
        modules = self._modules
        states = fail_together(
            self._world, lambda: [strategy.module_state(module) for module in modules]
        )
        return [
            weights_to_write(strategy, module, state)
            for module, state in zip(modules, states, strict=True)
        ]

    def _write(self, target: Path, state: State, work: Path) -> None:
        info = {
            "step": self._accumulation.step,
            "world_size": self._processes.num_processes,
            "iteration": self._directories.iteration,
        }
        # Every process writes its shards, so this is a collective call; whole tensors are written by the main process
        # alone.
        if self._strategy.sharded:
            # Here, because importing torch's planner takes half a second.
            from trainer_kit.checkpoint.sharded import write_sharded

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
            self._directories.prune(target)

        on_rank_zero(self._world, write)

    # -- load ------------------------------------------------------------------------------------------------------

    def load_state(
        self, input_dir: str | os.PathLike[str] | None, load_options: Keywords
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
        path = self._directories.source(input_dir)
        deepspeed_files = fail_together(self._world, lambda: find_deepspeed(path))
        if deepspeed_files is not None:
            self._load_deepspeed(path, deepspeed_files)
            return None
        state = self._read(path)
        # Hooks take models that they load themselves out of this list.
        models = list(self._prepared.models)
        self._call_load_hooks(path, models, state)
        modules_to_load = {id(unwrap(model)) for model in models}

        def load_models() -> None:
            for index, module in enumerate(self._modules):
                if id(module) in modules_to_load:
                    self._load_model(path, index, module, state, load_options)

        fail_together(self._world, load_models)
        # Not in `_load_other_objects`: collective calls may not run in a function that can fail on one process alone.
        owned = [
            owned_parameters(self._strategy, optimizer)
            for optimizer in self._optimizers
        ]
        fail_together(self._world, lambda: self._load_other_objects(state, owned))
        progress = state["progress"]
        self._compare_schedulers(progress.get("scheduler_steps"))
        self._directories.continue_after(path, progress["iteration"])
        # Last, because the user's objects may draw random numbers while they load.
        self._restore_rank_state(state, modules_to_load)
        version: str | None = progress.get("version")
        return version

    def _load_deepspeed(self, path: Path, files: DeepSpeedFiles) -> None:
        say = self._processes.print
        schedulers = [wrapper.scheduler for wrapper in self._prepared.schedulers]
        saved = DeepSpeedState(path, files, self._strategy, say)
        # DeepSpeed counts optimizer steps, the window counts micro-batches.
        steps = saved.load(self._modules, self._optimizers, schedulers)
        self._accumulation.place(steps * self._accumulation.steps)

    def _read(self, path: Path) -> State:
        """Read a state; of sharded tensors only this process's shards."""
        if not self._strategy.sharded:
            return fail_together(self._world, lambda: read_checkpoint(path))
        # Here, because importing torch's planner takes half a second.
        from trainer_kit.checkpoint.sharded import read_divided

        like: State = {}
        like_by_part: dict[str, State] = {}
        elsewhere: dict[str, Collection[str]] = {}
        tensors_by_model = fail_together(
            self._world,
            lambda: [local_tensors(self._strategy, module) for module in self._modules],
        )
        for index, (tensors, absent) in enumerate(tensors_by_model):
            # A strategy under which other processes hold whole tensors has one model.
            elsewhere = {"model": absent, "optimizers": absent}
            # Weights are stored by the names in their model, and models may have the same ones.
            like_by_part[_model_key(index)] = tensors
            for name, tensor in tensors.items():
                # Moments have the names of `_unique_name`, which are prefixed if there are several models.
                like[name] = tensor
                like[f"{index}.{name}"] = tensor
        return read_divided(
            path,
            like,
            like_by_part=like_by_part,
            elsewhere=elsewhere,
            group=self._world.side_group(),
        )

    def _call_load_hooks(
        self, path: Path, models: list[nn.Module], state: SavedState
    ) -> None:
        directory = path
        # Only for hooks, because it reads every byte of the files that hooks wrote.
        if self._before_load:
            directory = Path(
                on_rank_zero(self._world, lambda: str(verified_hook_directory(path)))
            )

        def call_hooks() -> None:
            for hook in list(self._before_load.values()):
                hook(models, str(directory))
            self._compare_counts(path, state)

        fail_together(self._world, call_hooks)

    def _load_model(
        self,
        path: Path,
        index: int,
        module: nn.Module,
        state: SavedState,
        load_options: Keywords,
    ) -> None:
        key = _model_key(index)
        if key not in state:
            raise _missing_weights(path, index, module)
        # Sharded tensors and those of an engine cannot be replaced by others.
        can_assign = not self._strategy.sharded and not self._strategy.owns_step
        if can_assign and "assign" in load_options:
            load_module_weights(module, state[key], **{"strict": True, **load_options})
            return
        strict = bool(load_options.get("strict", True))
        self._strategy.load_module_state(module, state[key], strict)

    def _restore_rank_state(
        self, state: SavedState, modules_to_load: Collection[int]
    ) -> None:
        """Restore generators and buffers of this process, if the state has the same processes.

        Args:
            state: the state.
            modules_to_load: the ids of the modules that hooks have not loaded.
        """
        # Every process makes this call before any of them returns: it compares their data ranks.
        rank_change = describe_rank_change(self._strategy, state)
        restore_rank_rng(self._strategy, state, rank_change, self._processes.print)
        if rank_change is not None or "buffers" not in state:
            return
        modules: list[nn.Module] = []
        buffers: list[SavedState] = []
        saved = state["buffers"][self._processes.process_index]
        for module, module_buffers in zip(self._modules, saved, strict=False):
            if id(module) in modules_to_load:
                modules.append(module)
                buffers.append(module_buffers)
        restore_rank_buffers(modules, buffers)

    def _load_other_objects(
        self, state: SavedState, owned: Sequence[list[list[nn.Parameter]]]
    ) -> None:
        """Load everything but models.

        Args:
            state: the state.
            owned: the parameters of each optimizer's groups.
        """
        # Optimizers first: they report which learning rates were set by the user since, and schedulers keep those.
        reconfigured = self._load_optimizers(state, owned)
        self._load_schedulers(state, reconfigured)
        self._precision.load_state_dict(state["precision"])
        step = int(state["progress"]["step"])
        self._accumulation.load_state_dict(state["window"], step)
        for obj, saved in zip(self.objects, state["objects"], strict=True):
            obj.load_state_dict(saved)
        self._load_loaders(state)

    def _load_optimizers(
        self, state: SavedState, owned: Sequence[list[list[nn.Parameter]]]
    ) -> dict[int, State]:
        """Load optimizers, and return the options of each that keep their newly configured values, by its id."""
        say = self._processes.print
        names = self._parameter_names()
        weights = {}
        for index in range(len(self._prepared.models)):
            # A hook may have removed a model from the state.
            saved_weights = state.get(_model_key(index), {})
            for name, value in saved_weights.items():
                weights[self._unique_name(index, name)] = value
        return restore_optimizers(
            self._strategy,
            self._optimizers,
            owned,
            state["optimizers"],
            names,
            say,
            weights,
        )

    def _load_schedulers(
        self, state: SavedState, reconfigured: Mapping[int, SavedState]
    ) -> None:
        wrappers = self._prepared.schedulers
        for wrapper, saved in zip(wrappers, state["schedulers"], strict=True):
            scheduler = wrapper.scheduler
            optimizer = getattr(scheduler, "optimizer", None)
            # A scheduler may have been created from the prepared optimizer, and options are listed for the user's.
            user_optimizer = OptimizerProxy.unwrapped(optimizer)
            options = reconfigured.get(id(user_optimizer), {})
            keeps_rates = "lr" in options
            restore_scheduler(scheduler, saved, keeps_rates)

    def _load_loaders(self, state: SavedState) -> None:
        say = self._processes.print
        loaders = self._prepared.loaders
        # Before loading, which replaces them by the seeds of the state.
        seeds = [loader.seed for loader in loaders]
        for loader, saved in zip(loaders, state["loaders"], strict=True):
            loader.load_states(saved)
            for line in loader.describe_changes(saved[0]):
                say(f"load_state: {line}")
        data_seed = self._prepared.data_seed
        if data_seed is None or seeds == [loader.seed for loader in loaders]:
            return
        say(
            f"load_state: the data keep the order of the state, not that of seed={data_seed}"
        )

    def _compare_schedulers(self, saved_times: list[int] | None) -> None:
        """Warn if the number of scheduler steps per optimizer step differs from the saved run."""
        times = self._scheduler_times
        # Older states do not store it.
        saved_times = saved_times or [1] * len(times)
        if saved_times == times:
            return
        self._processes.print(
            f"schedulers advanced {max(saved_times)} times an optimizer step when this state was saved, and advance "
            f"{max(times)} times now, so they do not continue at the same place of their schedules; to resume on any "
            "number of processes, count optimizer steps: Accelerator(scheduler_steps_per_process=False)"
        )

    def _compare_counts(self, path: Path, state: SavedState) -> None:
        """Refuse a state of other objects.

        Raises:
            CheckpointError: the state has another number of models, optimizers, schedulers, loaders or objects.
        """
        saved_models = sum(
            name == "model" or name.startswith("model_") for name in state
        )
        if "models" in state["progress"]:
            # A hook may have taken out weights.
            saved_models = state["progress"]["models"]
        prepared_models = 0
        # A state without any weights: hooks have written all of them.
        if saved_models:
            prepared_models = len(self._prepared.models)
        rows = [("models", saved_models, prepared_models)]
        prepared: dict[str, Sequence[object]] = {
            "optimizers": self._prepared.optimizers,
            "schedulers": self._prepared.schedulers,
            "loaders": self._prepared.loaders,
            "objects": self.objects,
        }
        for kind, objects in prepared.items():
            rows.append((kind, len(state.get(kind, ())), len(objects)))
        differences = [
            f"{kind}: {saved} saved, {count} prepared"
            for kind, saved, count in rows
            if saved != count
        ]
        if differences:
            raise CheckpointError(
                path,
                None,
                "; ".join(differences),
                fix="first prepare and register the same objects in the same order",
            )


def _state_dicts(objects: Sequence[Stateful]) -> list[State]:
    return [dict(obj.state_dict()) for obj in objects]


def _weights_by_model(
    weights: Sequence[SavedState], weights_after_hooks: Sequence[SavedState]
) -> dict[int, SavedState]:
    """Return the weights that hooks have left, by the index of their model.

    Args:
        weights: those of each model.
        weights_after_hooks: the list from which hooks have taken some, or in which they have replaced some.
    """
    # With no entry removed, a replaced one is still at the index of its model.
    if len(weights_after_hooks) == len(weights):
        return dict(enumerate(weights_after_hooks))
    # By id, because dicts of tensors cannot be compared for equality.
    indices = {id(entry): index for index, entry in enumerate(weights)}
    replaced = [entry for entry in weights_after_hooks if id(entry) not in indices]
    if replaced:
        raise ConfigurationError(
            "a hook of save_state replaced and removed weights, so it is unknown which models they belong to",
            found=f"{len(weights_after_hooks)} of {len(weights)} left, {len(replaced)} of them replaced",
            fix="change weights in place, or remove all of them and write them in the hook",
        )
    return {indices[id(entry)]: entry for entry in weights_after_hooks}


def _missing_weights(path: Path, index: int, model: nn.Module) -> CheckpointError:
    return CheckpointError(
        path,
        None,
        f"it has no weights of model {index} ({type(model).__name__}): a hook removed them from the state",
        fix="load them in a hook of register_load_state_pre_hook, and remove the model there: models.remove(model)."
        " A hook that saves one of several models takes out its own weights: weights.pop(models.index(model))",
    )


def _model_key(index: int) -> str:
    """Return the key of a model's weights in a state."""
    return "model" if index == 0 else f"model_{index}"
