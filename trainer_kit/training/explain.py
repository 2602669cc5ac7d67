"""``trainer.explain()``: the composed run, and the loop with every hook and its listeners, in order."""

from __future__ import annotations

import math
from typing import Any

from lightning_utilities.core.overrides import is_overridden

from trainer_kit.core.costs import cost_lines
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.display import Svg, Text
from trainer_kit.core.hooks import DataHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import LimitsTime
from trainer_kit.data.feed import Feed
from trainer_kit.step.bus import Bus
from trainer_kit.step.optimizers import configure_optimizers
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.compose import check_module, choose_by_memory
from trainer_kit.training.loaders import find_loaders, training_feed
from trainer_kit.training.mesh_picture import mesh_picture
from trainer_kit.training.session import Session

__all__ = ["draw", "explain", "explain_running", "prepare", "show_results"]

_LOOP = """\
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


def _loop_lines(bus: Bus, facts: dict[str, str], validates: bool) -> list[str]:
    """The lines of the loop: each hook that has listeners, and the other steps with what happens in them.

    Args:
        bus: the bus with the listeners.
        facts: by name, the text for each step that is not a hook.
        validates: whether the run validates.
    """
    lines = []
    for line in _LOOP.splitlines():
        name = line.strip()
        if ("validation" in name or "sanity" in name) and not validates:
            continue
        if name in Bus.__annotations__:
            listeners = bus.listeners(name)
            if listeners:
                lines.append(f"{line.replace('_late', ' (values reduced)'):<34} {', '.join(listeners)}")
        elif name in facts:
            lines.append(f"{line:<34} {facts[name]}")
    return lines


def explain(trainer: Session, module: Any, loaders: Any, datamodule: Any) -> Text:
    """See `Trainer.explain`."""
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders
    strategy, why, size = _strategy(trainer, module, datamodule)
    lines = _header(trainer, strategy, size)
    if trainer.progress.step and not trainer.state_verb:
        lines.append(
            f"begins       at step 0, with new optimizers (the last fit ended at step {trainer.progress.step})"
        )
    if why:
        lines.append(f"auto         {why}")
    if module is not None:
        found = find_loaders("fit", loaders, module, datamodule)
        if found is not None:
            ranks: Any = _Ranks(size)
            feed, limit = training_feed(found, trainer.settings, ranks, trainer.data_seed, _window(trainer))
            lines += _data_lines(trainer, feed, limit, size)
        bus = Bus(trainer, module, trainer.callbacks, datamodule, trainer.metrics)
        lines += [*_cost_lines(trainer, strategy, module, size), "", *_loop(trainer, module, bus)]
    return Text("\n".join(lines))


def draw(trainer: Session, module: Any, loaders: Any, datamodule: Any) -> Svg:
    """See ``format="svg"`` of `Trainer.explain`."""
    if isinstance(loaders, DataModule):
        datamodule = loaders
    strategy, _, size = _strategy(trainer, module, datamodule)
    facts = [] if module is None else _cost_lines(trainer, strategy, module, size)
    return mesh_picture(
        f"{size} process{'' if size == 1 else 'es'}: {strategy.describe()}",
        strategy.places(size),
        size,
        [" ".join(line.removeprefix("layout ").split()) for line in facts],
    )


def _strategy(trainer: Session, module: Any, datamodule: Any) -> tuple[Strategy, str, int]:
    """The strategy of a fit, the reason where ``"auto"`` chooses another one, and the number of ranks."""
    strategy, why = trainer.strategy, ""
    if module is not None:
        check_module(module, "fit")
        prepare(trainer, module, datamodule)
        if trainer.sharded_alternative is not None and any(True for _ in module.parameters()):
            strategy, why = choose_by_memory(trainer, module, "fit")
    return strategy, why, max(trainer.world_size, trainer.processes)


def explain_running(trainer: Session, module: Any) -> Text:
    """`explain` for a fit that is already composed: this prepares and loads nothing.

    Args:
        trainer: the Trainer that runs the fit.
        module: its module.
    """
    size = max(trainer.world_size, trainer.processes)
    lines = _header(trainer, trainer.strategy, size)
    run = trainer.run
    if run is not None:
        limit = None if trainer.num_training_batches == math.inf else int(trainer.num_training_batches)
        lines += _data_lines(trainer, run.windows.feed, limit, size)
        lines += [*_cost_lines(trainer, trainer.strategy, module, size), "", *_loop(trainer, module, run.bus)]
    return Text("\n".join(lines))


def _header(trainer: Session, strategy: Strategy, size: int) -> list[str]:
    return [
        f"strategy     {strategy.describe()}",
        f"processes    {size} ({trainer.environment.source}{'' if trainer.start is None else ', will be started'})",
        f"precision    {trainer.precision_plugin.name}",
        f"chosen by    {', '.join(f'{name}: {chosen.origin}' for name, chosen in trainer.origins.items())}",
        f"loggers      {', '.join(type(logger).__name__ for logger in trainer.loggers) or 'none'}",
        f"callbacks    {', '.join(type(callback).__name__ for callback in trainer.callbacks) or 'none'}",
        f"ends         {_limits(trainer)}",
    ]


def _loop(trainer: Session, module: Any, bus: Bus) -> list[str]:
    validates = is_overridden("validation_step", module, TrainModule) and trainer.settings.limits["val"] != 0
    return _loop_lines(bus, _facts(trainer, module), validates)


def prepare(trainer: Session, module: Any, datamodule: Any) -> None:
    """Call ``prepare_data`` and ``setup``, as `fit` does before it gets the loaders."""
    owners = [owner for owner in (datamodule, module) if owner is not None]
    for owner in owners:
        owner.trainer = trainer
        if is_overridden("prepare_data", owner, DataHooks) and trainer.local_rank == 0:
            owner.prepare_data()
    for owner in owners:
        if is_overridden("setup", owner, DataHooks):
            owner.setup("fit")


def _limits(trainer: Session) -> str:
    settings = trainer.settings
    timers = [callback.time_remaining() for callback in trainer.callbacks if isinstance(callback, LimitsTime)]
    parts = []
    if settings.max_epochs is not None:
        parts.append(f"{settings.max_epochs} epochs")
    if settings.max_steps is not None:
        parts.append(f"{settings.max_steps} steps")
    if settings.max_duration is not None:
        parts.append(str(settings.max_duration))
    parts += [f"{seconds:g}s" for seconds in timers if seconds is not None]
    return "after " + ", or after ".join(parts) if parts else "when it is stopped"


class _Ranks:
    """A data group seen from rank 0, for ranks that are not started yet."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size


def _data_lines(trainer: Session, feed: Feed, limit: int | None, size: int) -> list[str]:
    window = _window(trainer)
    per_rank = feed.per_rank_batch_size
    known = "unknown" if per_rank is None else f"{per_rank} a rank, {per_rank * size * window} an optimizer step"
    steps = "unknown" if limit is None else f"{-(-limit // window)} ({limit} batches in windows of {window})"
    return [f"data         {feed.describe()}", f"batch        {known}", f"steps/epoch  {steps}"]


def _window(trainer: Session) -> int:
    """Micro-batches of the first optimizer step."""
    counting = trainer.accumulation_callback
    return 1 if counting is None else counting.get_accumulate_grad_batches(0)


def _cost_lines(trainer: Session, strategy: Strategy, module: Any, size: int) -> list[str]:
    """Memory and communication of a rank for the module as it is now; an earlier fit may have sharded it."""
    if next(module.parameters(), None) is None:
        return ["layout       known when configure_model has built the layers"]
    costs = strategy.costs(module, trainer.precision_plugin, size)
    if costs is None:
        return [f"layout       not known: {type(strategy).__name__} declares no costs"]
    optimizers = trainer.optimizers if trainer.module is module else None
    note = []
    if trainer.state_verb:
        optimizers = optimizers or None
    elif not optimizers and is_overridden("configure_optimizers", module, TrainModule):
        try:
            optimizers = configure_optimizers(module).optimizers
        except Exception as error:  # it may need a running fit, for example for the number of steps
            optimizers, problem = None, str(error).partition("\n")[0]
            note = [f"             (configure_optimizers needs a running fit: {type(error).__name__}: {problem})"]
    return [*cost_lines(costs, optimizers), *note]


def _facts(trainer: Session, module: Any) -> dict[str, str]:
    name = type(module).__name__
    clip = trainer.settings.clip
    return {
        "training_step": f"{name}.training_step under {trainer.precision_plugin.name}",
        "backward": "manual" if not module.automatic_optimization else f"{name}.backward",
        "clip gradients": "none" if clip is None else f"by {clip[1]} to {clip[0]}",
        "optimizer_step": "manual" if not module.automatic_optimization else "each optimizer of configure_optimizers",
        "lr_scheduler_step": "schedulers with interval='step'",
        "validation_step": f"{name}.validation_step",
    }


def show_results(trainer: Session, stage: str, results: list[dict[str, float]]) -> None:
    """Print logged values, a line each."""
    values = {name: value for part in results for name, value in part.items()}
    if not values:
        return
    width = max(map(len, values))
    trainer.print("\n".join([f"{stage}:", *(f"  {name:<{width}}  {value:.6g}" for name, value in values.items())]))
