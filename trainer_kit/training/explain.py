"""``trainer.explain()``: the composed run, and the loop with every hook and its listeners, in order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from lightning_utilities.core.overrides import is_overridden

from trainer_kit.core.costs import cost_lines
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.display import Svg, Text, plural
from trainer_kit.core.hooks import DataHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import LimitsTime
from trainer_kit.core.state_names import uncompiled
from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.data.feed import Feed
from trainer_kit.step.bus import Bus
from trainer_kit.step.optimizers import configure_optimizers
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.auto_strategy import choose_by_memory
from trainer_kit.training.check_module import check_datamodule, check_module
from trainer_kit.training.compose_capture import reason_against_capture
from trainer_kit.training.loaders import (
    find_loaders,
    training_feed,
)
from trainer_kit.training.mesh_picture import mesh_picture
from trainer_kit.training.session import Session

__all__ = ["draw", "explain", "explain_running", "prepare", "show_results"]

_LOOP: Final = """\
on_fit_start
on_sanity_check_start
on_sanity_check_end
on_train_start
  on_train_epoch_start
    on_train_batch_start
    training_step
    on_before_zero_grad
    on_before_backward
    backward
    on_after_backward
      on_before_optimizer_step
      clip gradients
      optimizer_step
      lr_scheduler_step
    on_train_batch_end
    on_train_step_end
    on_validation_start
    on_validation_epoch_start
      on_validation_batch_start
      validation_step
      on_validation_batch_end
    on_validation_epoch_end
    on_validation_end
  on_train_epoch_end
  on_train_epoch_end_late
  on_save_checkpoint
on_train_end
on_fit_end
on_exception
"""


def _loop_lines(bus: Bus, descriptions: dict[str, str], validates: bool) -> list[str]:
    """The lines of the loop: each hook that has listeners, and the other steps with what happens in them.

    Args:
        bus: the bus with the listeners.
        descriptions: by name, the text for each step that is not a hook.
        validates: whether the run validates.
    """
    lines = []
    # A hook without listeners is left out: it costs a run nothing.
    for line in _LOOP.splitlines():
        name = line.strip()
        if ("validation" in name or "sanity" in name) and not validates:
            continue
        if name in Bus.names():
            listeners = bus.listeners(name)
            label = line.replace("_late", " (values reduced)")
            if listeners:
                lines.append(f"{label:<34} {', '.join(listeners)}")
        elif name in descriptions:
            lines.append(f"{line:<34} {descriptions[name]}")
    return lines


def explain(
    trainer: Session, module: Any, loaders: Loaders | None, datamodule: DataModuleLike
) -> Text:
    """See `Trainer.explain`."""
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders
    strategy, reason, size = _strategy_of_fit(trainer, module, datamodule)
    lines = _header_lines(trainer, strategy, size)
    if trainer.progress.step and not trainer.state_verb:
        lines.append(
            f"begins       at step 0, with new optimizers (the last fit ended at step {trainer.progress.step})"
        )
    if reason:
        lines.append(f"auto         {reason}")
    if module is not None:
        lines += _training_lines(trainer, module, loaders, datamodule, size)
        lines += _cost_lines(trainer, strategy, module, size)
        bus = Bus(trainer, module, trainer.callbacks, datamodule, trainer.metrics)
        lines += ["", *_loop_of_fit(trainer, module, bus)]
    return Text("\n".join(lines))


def _training_lines(
    trainer: Session,
    module: TrainModule,
    loaders: Loaders | None,
    datamodule: DataModuleLike,
    size: int,
) -> list[str]:
    """The lines on training data; none without a loader."""
    train_loaders = find_loaders("fit", loaders, module, datamodule)
    if train_loaders is None:
        return []
    ranks: Any = _Ranks(size)
    feed, length = training_feed(
        train_loaders,
        trainer.settings,
        ranks,
        trainer.data_seed,
        _window_length(trainer),
    )
    return _data_lines(trainer, feed, length.expected, size)


def draw(
    trainer: Session, module: Any, loaders: Loaders | None, datamodule: DataModuleLike
) -> Svg:
    """See ``format="svg"`` of `Trainer.explain`."""
    if isinstance(loaders, DataModule):
        datamodule = loaders
    strategy, _, size = _strategy_of_fit(trainer, module, datamodule)
    costs: list[str] = []
    if module is not None:
        costs = _cost_lines(trainer, strategy, module, size)
    processes = plural(size, "process")
    return mesh_picture(
        f"{processes}: {strategy.describe()}",
        strategy.places(size),
        size,
        [" ".join(line.removeprefix("layout ").split()) for line in costs],
    )


def _strategy_of_fit(
    trainer: Session, module: TrainModule, datamodule: DataModuleLike
) -> tuple[Strategy, str, int]:
    """The strategy of a fit, the reason where ``"auto"`` chooses another one, and the number of ranks."""
    size = _rank_count(trainer)
    if module is None:
        return trainer.strategy, "", size
    module = uncompiled(module)
    check_module(module, "fit")
    prepare(trainer, module, datamodule)
    # Before `configure_model` has built the layers, the memory that they need is unknown.
    if trainer.sharded_alternative is None or next(module.parameters(), None) is None:
        return trainer.strategy, "", size
    strategy, reason = choose_by_memory(trainer, module, "fit")
    return strategy, reason, size


def _rank_count(trainer: Session) -> int:
    """The number of ranks, also before they are started."""
    return max(trainer.world_size, trainer.processes)


def explain_running(trainer: Session, module: TrainModule) -> Text:
    """`explain` for a fit that is already composed: this prepares and loads nothing.

    Args:
        trainer: the Trainer that runs the fit.
        module: its module.
    """
    size = _rank_count(trainer)
    lines = _header_lines(trainer, trainer.strategy, size)
    run = trainer.run
    if run is not None:
        batches = trainer.num_training_batches
        limit = None
        if batches != math.inf:
            limit = int(batches)
        lines += _data_lines(trainer, run.windows.feed, limit, size)
        lines += _cost_lines(trainer, trainer.strategy, module, size)
        lines += ["", *_loop_of_fit(trainer, module, run.bus)]
    return Text("\n".join(lines))


def _header_lines(trainer: Session, strategy: Strategy, size: int) -> list[str]:
    processes = f"{size} ({trainer.environment.source})"
    if trainer.start is not None:
        processes = f"{size} ({trainer.environment.source}, will be started)"
    origins = [f"{name}: {choice.origin}" for name, choice in trainer.origins.items()]
    return [
        f"strategy     {strategy.describe()}",
        f"processes    {processes}",
        f"precision    {trainer.precision_plugin.name}",
        f"chosen by    {', '.join(origins)}",
        f"loggers      {_class_names(trainer.loggers)}",
        f"callbacks    {_class_names(trainer.callbacks)}",
        f"ends         {_describe_limits(trainer)}",
    ]


def _class_names(objects: Iterable[object]) -> str:
    return ", ".join(type(item).__name__ for item in objects) or "none"


def _loop_of_fit(trainer: Session, module: TrainModule, bus: Bus) -> list[str]:
    has_step = is_overridden("validation_step", module, TrainModule)
    validates = has_step and trainer.settings.limits["val"] != 0
    return _loop_lines(bus, _step_descriptions(trainer, module), validates)


def prepare(trainer: Session, module: TrainModule, datamodule: DataModuleLike) -> None:
    """Call ``prepare_data`` and ``setup``, as `fit` does before it gets the loaders."""
    check_datamodule(datamodule)
    owners = [owner for owner in (datamodule, module) if owner is not None]
    # Hooks of the module read its data.
    trainer.show_datamodule(datamodule)
    for owner in owners:
        owner.trainer = trainer
        if is_overridden("prepare_data", owner, DataHooks) and trainer.local_rank == 0:
            owner.prepare_data()
    for owner in owners:
        if is_overridden("setup", owner, DataHooks):
            owner.setup("fit")


def _describe_limits(trainer: Session) -> str:
    settings = trainer.settings
    limits = []
    if settings.max_epochs is not None:
        limits.append(plural(settings.max_epochs, "epoch"))
    if settings.max_steps is not None:
        limits.append(plural(settings.max_steps, "step"))
    if settings.max_duration is not None:
        limits.append(str(settings.max_duration))
    for callback in trainer.callbacks:
        if not isinstance(callback, LimitsTime):
            continue
        seconds = callback.time_remaining()
        if seconds is not None:
            limits.append(f"{seconds:g}s")
    if not limits:
        return "when it is stopped"
    return "after " + ", or after ".join(limits)


class _Ranks:
    """A data group seen from rank 0, for ranks that are not started yet."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size


def _data_lines(
    trainer: Session, feed: Feed, limit: int | None, size: int
) -> list[str]:
    window = _window_length(trainer)
    per_rank = feed.per_rank_batch_size
    samples = "unknown"
    if per_rank is not None:
        samples = f"{per_rank} a rank, {per_rank * size * window} an optimizer step"
    steps = "unknown"
    if limit is not None:
        steps = f"{math.ceil(limit / window)} ({plural(limit, 'batch')} in windows of {window})"
    return [
        f"data         {feed.describe()}",
        f"batch        {samples}",
        f"steps/epoch  {steps}",
    ]


def _window_length(trainer: Session) -> int:
    """Micro-batches of the first optimizer step."""
    counting = trainer.accumulation_callback
    if counting is None:
        return 1
    return counting.get_accumulate_grad_batches(0)


def _cost_lines(
    trainer: Session, strategy: Strategy, module: TrainModule, size: int
) -> list[str]:
    """Memory and communication of a rank for the module as it is now; an earlier fit may have sharded it."""
    if next(module.parameters(), None) is None:
        return ["layout       known when configure_model has built the layers"]
    costs = strategy.costs(module, trainer.precision_plugin, size)
    if costs is None:
        return [f"layout       not known: {type(strategy).__name__} declares no costs"]
    # Those of the last fit, if it was of this module.
    optimizers = None
    if trainer.module is module:
        optimizers = trainer.optimizers
    if trainer.state_verb:
        return cost_lines(costs, optimizers or None)
    if optimizers or not is_overridden("configure_optimizers", module, TrainModule):
        return cost_lines(costs, optimizers)
    try:
        optimizers = configure_optimizers(module).optimizers
    # Of any class: it may need a running fit, for example for the number of steps.
    except Exception as error:
        problem = str(error).partition("\n")[0]
        note = f"             (configure_optimizers needs a running fit: {type(error).__name__}: {problem})"
        return [*cost_lines(costs, None), note]
    return cost_lines(costs, optimizers)


def _step_descriptions(trainer: Session, module: TrainModule) -> dict[str, str]:
    """What happens in each step of the loop that is not a hook, by its name in `_LOOP`."""
    name = type(module).__name__
    clipping = "none"
    if trainer.settings.clip is not None:
        value, algorithm = trainer.settings.clip
        clipping = f"by {algorithm} to {value}"
    backward, optimizer_step = "manual", "manual"
    if module.automatic_optimization:
        backward = f"{name}.backward"
        optimizer_step = "each optimizer of configure_optimizers"
        kernel = trainer.options.optimizer_kernel
        if kernel is not None:
            optimizer_step += f", kernel {kernel}"
    step = f"{name}.training_step under {trainer.precision_plugin.name}"
    if trainer.options.captures_steps:
        step += f", {_describe_capture(trainer, module)}"
    return {
        "training_step": step,
        "backward": backward,
        "clip gradients": clipping,
        "optimizer_step": optimizer_step,
        "lr_scheduler_step": "schedulers with interval='step'",
        "validation_step": f"{name}.validation_step",
    }


def _describe_capture(trainer: Session, module: TrainModule) -> str:
    """What is captured of the steps of a fit, or why nothing is."""
    run = trainer.run
    if run is not None and run.module is module and run.captured is not None:
        return run.captured.describe()
    reason = reason_against_capture(trainer, module)
    if reason is not None:
        return f"not captured: {reason}"
    return "captured at the second batch of each shape"


def show_results(trainer: Session, stage: str, results: list[dict[str, float]]) -> None:
    """Print logged values, a line each."""
    values: dict[str, float] = {}
    for loader_values in results:
        values.update(loader_values)
    if not values:
        return
    width = max(map(len, values))
    lines = [f"  {name:<{width}}  {value:.6g}" for name, value in values.items()]
    trainer.print("\n".join([f"{stage}:", *lines]))
