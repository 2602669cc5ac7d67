"""``trainer.explain()``: the composed run, and the loop with every hook and its listeners, in order."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from math import prod
from typing import Any, Final

from lightning_utilities.core.overrides import is_overridden

from trainer_kit.core.costs import cost_lines
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.display import Svg, Text
from trainer_kit.core.hooks import DataHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import LimitsTime
from trainer_kit.core.state_names import uncompiled
from trainer_kit.data.feed import Feed
from trainer_kit.step.bus import Bus
from trainer_kit.step.optimizers import configure_optimizers
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.compose import check_datamodule, check_module, choose_by_memory
from trainer_kit.training.loaders import find_loaders, training_feed
from trainer_kit.training.session import Session

__all__ = ["draw", "explain", "explain_running", "mesh_picture", "prepare", "show_results"]

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
                lines.append(
                    f"{line.replace('_late', ' (values reduced)'):<34} {', '.join(listeners)}"
                )
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
            feed, length = training_feed(
                found, trainer.settings, ranks, trainer.data_seed, _window(trainer)
            )
            lines += _data_lines(trainer, feed, length.expected, size)
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


def _strategy(trainer: Session, module: TrainModule, datamodule: Any) -> tuple[Strategy, str, int]:
    """The strategy of a fit, the reason where ``"auto"`` chooses another one, and the number of ranks."""
    strategy, why = trainer.strategy, ""
    if module is not None:
        module = uncompiled(module)
        check_module(module, "fit")
        prepare(trainer, module, datamodule)
        if trainer.sharded_alternative is not None and any(True for _ in module.parameters()):
            strategy, why = choose_by_memory(trainer, module, "fit")
    return strategy, why, max(trainer.world_size, trainer.processes)


def explain_running(trainer: Session, module: TrainModule) -> Text:
    """`explain` for a fit that is already composed: this prepares and loads nothing.

    Args:
        trainer: the Trainer that runs the fit.
        module: its module.
    """
    size = max(trainer.world_size, trainer.processes)
    lines = _header(trainer, trainer.strategy, size)
    run = trainer.run
    if run is not None:
        limit = (
            None if trainer.num_training_batches == math.inf else int(trainer.num_training_batches)
        )
        lines += _data_lines(trainer, run.windows.feed, limit, size)
        lines += [
            *_cost_lines(trainer, trainer.strategy, module, size),
            "",
            *_loop(trainer, module, run.bus),
        ]
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


def _loop(trainer: Session, module: TrainModule, bus: Bus) -> list[str]:
    validates = (
        is_overridden("validation_step", module, TrainModule)
        and trainer.settings.limits["val"] != 0
    )
    return _loop_lines(bus, _facts(trainer, module), validates)


def prepare(trainer: Session, module: TrainModule, datamodule: Any) -> None:
    """Call ``prepare_data`` and ``setup``, as `fit` does before it gets the loaders."""
    check_datamodule(datamodule)
    owners = [owner for owner in (datamodule, module) if owner is not None]
    trainer.datamodule = datamodule  # hooks of the module read its data
    for owner in owners:
        owner.trainer = trainer
        if is_overridden("prepare_data", owner, DataHooks) and trainer.local_rank == 0:
            owner.prepare_data()
    for owner in owners:
        if is_overridden("setup", owner, DataHooks):
            owner.setup("fit")


def _limits(trainer: Session) -> str:
    settings = trainer.settings
    timers = [
        callback.time_remaining()
        for callback in trainer.callbacks
        if isinstance(callback, LimitsTime)
    ]
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
    known = (
        "unknown"
        if per_rank is None
        else f"{per_rank} a rank, {per_rank * size * window} an optimizer step"
    )
    steps = (
        "unknown"
        if limit is None
        else f"{-(-limit // window)} ({limit} batches in windows of {window})"
    )
    return [f"data         {feed.describe()}", f"batch        {known}", f"steps/epoch  {steps}"]


def _window(trainer: Session) -> int:
    """Micro-batches of the first optimizer step."""
    counting = trainer.accumulation_callback
    return 1 if counting is None else counting.get_accumulate_grad_batches(0)


def _cost_lines(trainer: Session, strategy: Strategy, module: TrainModule, size: int) -> list[str]:
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
            note = [
                f"             (configure_optimizers needs a running fit: {type(error).__name__}: {problem})"
            ]
    return [*cost_lines(costs, optimizers), *note]


def _facts(trainer: Session, module: TrainModule) -> dict[str, str]:
    name = type(module).__name__
    clip = trainer.settings.clip
    return {
        "training_step": f"{name}.training_step under {trainer.precision_plugin.name}",
        "backward": "manual" if not module.automatic_optimization else f"{name}.backward",
        "clip gradients": "none" if clip is None else f"by {clip[1]} to {clip[0]}",
        "optimizer_step": "manual"
        if not module.automatic_optimization
        else "each optimizer of configure_optimizers",
        "lr_scheduler_step": "schedulers with interval='step'",
        "validation_step": f"{name}.validation_step",
    }


def show_results(trainer: Session, stage: str, results: list[dict[str, float]]) -> None:
    """Print logged values, a line each."""
    values = {name: value for part in results for name, value in part.items()}
    if not values:
        return
    width = max(map(len, values))
    trainer.print(
        "\n".join(
            [f"{stage}:", *(f"  {name:<{width}}  {value:.6g}" for name, value in values.items())]
        )
    )


_SHOWN: Final = 8
_CELL, _ROW, _GAP, _PAD, _LINE, _LETTER = 104, 46, 6, 12, 18, 6.9
_DATA: Final = ("dp_replicate", "dp_shard", "data", "ranks")
"""The axes along which ranks have different samples."""
_ROLES: Final = {
    "pp": "other blocks of the model at each place",
    "dp_replicate": "a replica of the weights and other samples at each place",
    "dp_shard": "a shard of the weights and other samples at each place",
    "cp": "another part of every sequence at each place",
    "tp": "another part of every divided layer at each place",
    "data": "other samples at each place",
    "tensor": "another part of every layer at each place",
    "ranks": "other samples at each place",
}
_HUES: Final = (225, 30, 150, 330, 185, 60, 275, 100)
_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#1b1f24}.b{font-weight:600}.s{font-size:12px;fill:#57606a}"
    ".back{fill:#fff}.panel{fill:none;stroke:#8c959f;stroke-opacity:.6}"
    + "".join(f".c{i}{{fill:hsl({hue},75%,90%)}}" for i, hue in enumerate(_HUES))
    + "@media (prefers-color-scheme:dark){text{fill:#e6e8ee}.s{fill:#a5adbb}.back{fill:#14161f}"
    + "".join(f".c{i}{{fill:hsl({hue},40%,27%)}}" for i, hue in enumerate(_HUES))
    + "}"
)


def mesh_picture(
    title: str, places: Mapping[str, int], ranks: int, facts: Sequence[str] = ()
) -> Svg:
    """Draw each rank at its place: the innermost axis from left to right, the next one downwards, others as frames.

    Ranks of one colour have the same samples. Of an axis with more than eight places the first eight are drawn.

    Args:
        title: the line above the picture.
        places: the size of each axis from outermost to innermost; empty: one axis with all ranks.
        ranks: the number of all ranks.
        facts: lines below the picture.

    Example:
        >>> picture = mesh_picture("mesh", {"pp": 2, "dp_shard": 2, "tp": 2}, 8)
        >>> picture.count("rank "), picture.startswith("<svg")
        (8, True)
    """
    axes = [(name, size) for name, size in (places or {"ranks": ranks}).items() if size > 1] or [
        ("ranks", 1)
    ]
    width, height, drawn = _block(axes, {}, axes)
    roles = [
        f"{name} = {size}: {_ROLES.get(name, 'another rank at each place')}"
        for name, size in axes
        if size > 1
    ]
    if any(size > _SHOWN for _, size in axes):
        roles.append(f"the first {_SHOWN} places of an axis are drawn")
    roles += ["equal colours: the same samples"] if ranks > 1 else []
    width = max(width, 420.0, len(title) * _LETTER * 1.08)
    letters = int(width / _LETTER)
    below = [
        part
        for line in [*roles, *facts]
        for part in textwrap.wrap(line, letters, subsequent_indent="   ")
    ]
    whole = width + 2 * _PAD, height + 4 * _PAD + _LINE * (len(below) + 1)
    text = "".join(
        f'<text class="s" x="{_PAD}" y="{3 * _PAD + _LINE + height + _LINE * (n + 0.6):g}" xml:space="preserve">'
        f"{escape(line)}</text>\n"
        for n, line in enumerate(below)
    )
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]:g} {whole[1]:g}" width="{whole[0]:g}"'
        f' role="img" aria-label="{escape(f"{ranks} ranks: {title}")}">\n<style>{_STYLE}</style>\n'
        f'<rect class="back" width="100%" height="100%" rx="8"/>\n'
        f'<text class="b" x="{_PAD}" y="{_PAD + 14}">{escape(title)}</text>\n'
        f"{_moved(_PAD, 2 * _PAD + _LINE, drawn)}{text}</svg>\n"
    )


def _block(
    axes: Sequence[tuple[str, int]], at: Mapping[str, int], every: Sequence[tuple[str, int]]
) -> tuple[float, float, str]:
    """The width, height and elements of the ranks at the position ``at`` on the axes that are not in ``axes``."""
    if len(axes) <= 2:
        return _grid(axes, at, every)
    (name, size), *inner = axes
    right, bottom, drawn = 0.0, 0.0, ""
    for place in range(min(size, _SHOWN)):
        width, height, block = _block(inner, {**at, name: place}, every)
        frame = f'<rect class="panel" width="{width + 2 * _PAD:g}" height="{height + 2 * _PAD + _LINE:g}" rx="8"/>\n'
        label = f'<text class="s" x="{_PAD}" y="{_PAD + 10}">{escape(name)} {place}</text>\n'
        drawn += _moved(right, 0, frame + label + _moved(_PAD, _PAD + _LINE, block))
        right, bottom = right + width + 2 * _PAD + _GAP, height + 2 * _PAD + _LINE
    return right - _GAP, bottom, drawn


def _grid(
    axes: Sequence[tuple[str, int]], at: Mapping[str, int], every: Sequence[tuple[str, int]]
) -> tuple[float, float, str]:
    """The ranks of two axes, one below the other, with their labels; of one axis in one line."""
    (across, columns), (down, rows) = axes[-1], axes[0] if len(axes) == 2 else ("", 1)
    columns, rows = min(columns, _SHOWN), min(rows, _SHOWN)
    left = len(f"{down} {rows}") * _LETTER + _GAP if down else 0.0
    drawn = ""
    for column in range(columns if across != "ranks" else 0):
        x = left + column * (_CELL + _GAP) + _GAP
        drawn += f'<text class="s" x="{x:g}" y="11">{escape(across)} {column}</text>\n'
    for row in range(rows):
        y = _LINE + row * (_ROW + _GAP)
        drawn += f'<text class="s" x="0" y="{y + 27}">{escape(down)} {row}</text>\n' if down else ""
        for column in range(columns):
            place = {**at, **({down: row} if down else {}), across: column}
            drawn += _moved(left + column * (_CELL + _GAP), y, _cell(place, every))
    return left + columns * (_CELL + _GAP) - _GAP, _LINE + rows * (_ROW + _GAP) - _GAP, drawn


def _cell(place: Mapping[str, int], every: Sequence[tuple[str, int]]) -> str:
    """One rank: its number, and which part of the global batch it has."""
    sizes = [size for _, size in every]
    rank = sum(place[name] * prod(sizes[i + 1 :]) for i, (name, _) in enumerate(every))
    data = [(name, size) for name, size in every if name in _DATA]
    part = sum(
        place[name] * prod(size for _, size in data[i + 1 :]) for i, (name, _) in enumerate(data)
    )
    parts = prod(size for _, size in data)
    samples = f"samples {part + 1} of {parts}" if parts > 1 else "all samples"
    return (
        f'<rect class="c{part % len(_HUES)}" width="{_CELL}" height="{_ROW}" rx="6"/>'
        f'<text class="b" x="10" y="20">rank {rank}</text><text class="s" x="10" y="37">{samples}</text>\n'
    )


def _moved(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x:g} {y:g})">\n{drawn}</g>\n'
