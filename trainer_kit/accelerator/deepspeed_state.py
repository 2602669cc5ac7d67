"""Load DeepSpeed's checkpoints into prepared models, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.checkpoint.deepspeed import (
    DeepSpeedContent,
    DeepSpeedFiles,
    deepspeed_content,
)
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.display import plural
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.state_names import named_state
from trainer_kit.core.types import LRSchedulerLike, SavedState
from trainer_kit.state.optimizer_states import (
    owned_parameters,
    parameter_names,
    restore_optimizer,
)
from trainer_kit.state.resume import local_tensors
from trainer_kit.strategies.strategy import Strategy

__all__ = ["DeepSpeedState"]

_Groups = Sequence[Sequence[nn.Parameter]]
_NamesByGroup = Sequence[Sequence[str]]
_Say = Callable[[str], None]


@final
class DeepSpeedState:
    """A checkpoint of DeepSpeed that prepared objects resume from; every process reads its own shards.

    Args:
        path: the checkpoint's path, for errors.
        files: the files of the checkpoint.
        strategy: the strategy of this run.
        say: prints a line for the user.
    """

    def __init__(
        self, path: Path, files: DeepSpeedFiles, strategy: Strategy, say: _Say
    ) -> None:
        self._path = path
        self._files = files
        self._strategy = strategy
        self._say = say

    def load(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRSchedulerLike],
    ) -> int:
        """Load weights, optimizer moments and the schedule; collective call.

        Args:
            models: the user's models, without wrappers.
            optimizers: torch optimizers.
            schedulers: torch schedulers.

        Returns:
            The number of optimizer steps in the checkpoint.

        Raises:
            CheckpointError: the checkpoint does not match the prepared objects.
        """
        strategy = self._strategy
        # What each process does alone is wrapped in `fail_together`, or one error would leave the others in a
        # collective.
        world = strategy.world
        content = fail_together(world, lambda: deepspeed_content(self._files))
        if len(models) != 1 or len(optimizers) > 1:
            raise CheckpointError(
                self._path,
                None,
                "DeepSpeed saves one model and one optimizer, not "
                f"{len(models)} models and {plural(len(optimizers), 'optimizer')}",
            )
        # Before anything is loaded, so that a refused checkpoint leaves the objects unchanged.
        _check_schedule(self._path, content.schedule, schedulers)
        model = models[0]
        # Collective calls, so not in `restore_optimizers`, which may fail on one process alone.
        groups = [owned_parameters(strategy, optimizer) for optimizer in optimizers]
        _, absent = fail_together(world, lambda: local_tensors(strategy, model))

        def restore_optimizers() -> dict[str, Tensor]:
            names = parameter_names(strategy, model)
            for optimizer, optimizer_groups in zip(optimizers, groups, strict=True):
                self._restore_optimizer(content, optimizer, optimizer_groups, names)
            return _weights_to_load(content, model, absent, names)

        weights = fail_together(world, restore_optimizers)
        fail_together(
            world, lambda: strategy.load_module_state(model, weights, strict=True)
        )
        schedule = _load_schedule(content, schedulers)
        self._say(
            f"{self._path.name}, written by DeepSpeed: step {content.step}; {schedule}; random layers and loaders "
            "start from the beginning"
        )
        return content.step

    def _restore_optimizer(
        self,
        content: DeepSpeedContent,
        optimizer: Optimizer,
        groups: _Groups,
        names: Mapping[int, str],
    ) -> None:
        group_names = [
            [names.get(id(parameter), "") for parameter in group] for group in groups
        ]
        _name_moments(self._path, content, group_names)
        self._check_moments(content, optimizer)
        self._report_missing(content, group_names)
        option_groups = []
        for group in optimizer.param_groups:
            options = dict(group)
            del options["params"]
            option_groups.append(options)
        # Only the learning rates of DeepSpeed's groups are read; other options are those of the prepared optimizer.
        for options, rate in zip(option_groups, content.rates, strict=False):
            options["lr"] = rate
        saved = {"state": content.moments, "param_groups": option_groups}
        restore_optimizer(
            self._strategy, optimizer, groups, saved, names, self._say, content.weights
        )

    def _check_moments(self, content: DeepSpeedContent, optimizer: Optimizer) -> None:
        reason = "it contains no moments"
        if content.moments:
            # Only optimizers of Adam's kind have two moments under DeepSpeed's names.
            if "betas" in optimizer.param_groups[0]:
                return
            kind = type(optimizer).__name__
            reason = f"it has moments of Adam, and {kind} is prepared"
        raise CheckpointError(
            self._path,
            "optimizer",
            reason,
            fix="load only weights: model.load_state_dict(trainer_kit.checkpoint.read_weights(path)) before prepare",
        )

    def _report_missing(
        self, content: DeepSpeedContent, group_names: _NamesByGroup
    ) -> None:
        missing = []
        for names in group_names:
            missing += [name for name in names if name not in content.moments]
        if missing:
            suffix = ", …" if len(missing) > 1 else ""
            self._say(
                f"{self._path.name} has no moments of {missing[0]}{suffix}: they start at zero"
            )


def _weights_to_load(
    content: DeepSpeedContent,
    model: nn.Module,
    absent: Collection[str],
    names: Mapping[int, str],
) -> dict[str, Tensor]:
    """Return the weights of this process.

    Args:
        content: the checkpoint.
        model: the user's model.
        absent: names of weights that only other processes hold.
        names: the names of parameters by id.
    """
    weights = {
        name: value for name, value in content.weights.items() if name not in absent
    }
    if content.moments_by_position:
        # A shared parameter has one master weight, under its first name.
        for name, parameter in named_state(model).items():
            weights[name] = weights[names[id(parameter)]]
    return weights


def _load_schedule(
    content: DeepSpeedContent, schedulers: Sequence[LRSchedulerLike]
) -> str:
    """Load the schedule, and describe what it does from here on."""
    if not schedulers:
        return "no schedule is saved or prepared: the learning rate is what it was then"
    if content.schedule is None:
        return "no schedule is saved: load the state of yours by hand, or it starts from its beginning"
    schedulers[0].load_state_dict(dict(content.schedule))
    return "its schedule, which advanced once a step, continues"


def _check_schedule(
    path: Path, saved: SavedState | None, schedulers: Sequence[LRSchedulerLike]
) -> None:
    if saved is None or not schedulers:
        return
    # More keys in the scheduler are allowed: a newer torch adds some, and their defaults apply.
    if len(schedulers) == 1 and not saved.keys() - schedulers[0].state_dict().keys():
        return
    prepared = f"{len(schedulers)} schedulers"
    if len(schedulers) == 1:
        prepared = type(schedulers[0]).__name__
    raise CheckpointError(
        path,
        "lr_scheduler",
        f"it is not the state of {prepared}: it has {', '.join(sorted(saved))}",
        fix="prepare one scheduler, of the class that was saved",
    )


def _name_moments(
    path: Path, content: DeepSpeedContent, group_names: _NamesByGroup
) -> None:
    """Match optimizer states to parameters by order; for a checkpoint without ZeRO."""
    if not content.moments_by_position:
        return
    saved_sizes = [len(group) for group in content.moments_by_position]
    sizes = [len(names) for names in group_names]
    if saved_sizes != sizes:
        raise CheckpointError(
            path,
            "optimizer",
            f"groups of {saved_sizes} parameters were saved, and groups of {sizes} are here",
        )
    for states, names in zip(content.moments_by_position, group_names, strict=True):
        for state, name in zip(states, names, strict=True):
            master = state.pop("master", None)
            content.moments[name] = state
            # The master weights in float32 are more exact than the half-precision weights in the file.
            if master is not None:
                content.weights[name] = master
