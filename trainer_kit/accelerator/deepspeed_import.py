"""Load a DeepSpeed checkpoint into the prepared objects of an `Accelerator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainer_kit.checkpoint.deepspeed import DeepSpeedContent, DeepSpeedFiles, deepspeed_content
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.protocols import Group
from trainer_kit.state.optimizer_states import owned_parameters, parameter_names, restore_optimizer
from trainer_kit.state.resume import held_of
from trainer_kit.strategies.strategy import Strategy

__all__ = ["load_deepspeed"]


def load_deepspeed(
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
    prepared = [f"{len(several)} {what}" for several, what in ((models, "models"), (optimizers, "optimizers"))]
    if len(models) != 1 or len(optimizers) > 1:
        raise CheckpointError(path, None, f"DeepSpeed saves one model and one optimizer, not {' and '.join(prepared)}")
    _check_schedule(path, content.schedule, schedulers)

    (model,), weights = models, dict[str, Any]()
    owned = [owned_parameters(strategy, optimizer) for optimizer in optimizers]
    _, absent = fail_together(world, lambda: held_of(strategy, model))

    def fill() -> None:
        names = parameter_names(strategy, model)
        for optimizer, groups in zip(optimizers, owned, strict=True):
            called = [[names.get(id(parameter), "") for parameter in group] for group in groups]
            _place(path, content, called)
            _restore(path, content, strategy, optimizer, groups, names, called, say)
        weights.update({name: value for name, value in content.weights.items() if name not in absent})
        for name, parameter in model.named_parameters(remove_duplicate=False) if content.placed else ():
            weights[name] = weights[names[id(parameter)]]  # a shared parameter has one master weight

    fail_together(world, fill)
    fail_together(world, lambda: strategy.load_module_state(model, weights, strict=True))
    schedule = "its schedule, which advanced once a step, continues"
    if content.schedule is None or not schedulers:
        schedule = "no schedule is saved or prepared: the learning rate is what it was then"
        if schedulers:
            schedule = "no schedule is saved: load the state of yours by hand, or it starts from its beginning"
    else:
        schedulers[0].load_state_dict(dict(content.schedule))
    say(
        f"{path.name}, written by DeepSpeed: step {content.step}; {schedule}; random layers and loaders start from the "
        "beginning"
    )
    return content.step


def _check_schedule(path: Path, saved: Mapping[str, Any] | None, schedulers: Sequence[Any]) -> None:
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


def _place(path: Path, content: DeepSpeedContent, called: Sequence[Sequence[str]]) -> None:
    """Match optimizer states to parameters by order; for a checkpoint without ZeRO."""
    if not content.placed:
        return
    sizes, own = [len(group) for group in content.placed], [len(group) for group in called]
    if sizes != own:
        raise CheckpointError(
            path, "optimizer", f"groups of {sizes} parameters were saved, and groups of {own} are here"
        )
    for group, names in zip(content.placed, called, strict=True):
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
    missing = [name for group in called for name in group if name not in content.moments]
    if not content.moments or "betas" not in optimizer.param_groups[0]:
        raise CheckpointError(
            path, "optimizer", f"it has moments of Adam, and {type(optimizer).__name__} is prepared"
            if content.moments else "it contains no moments",
            fix="load weights alone: model.load_state_dict(trainer_kit.checkpoint.read_weights(path)) before prepare",
        )  # fmt: skip
    if missing:
        say(f"{path.name} has no moments of {missing[0]}{', …' if missing[1:] else ''}: they begin at zero")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for group, rate in zip(groups, content.rates, strict=False):
        group["lr"] = rate
    saved = {"state": content.moments, "param_groups": groups}
    restore_optimizer(strategy, optimizer, own, saved, names, say, content.weights)
