"""`ModelSummary`: the submodules and parameters of a module, as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer_kit.core.costs import cost_lines
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.parallel import is_divided
from trainer_kit.core.protocols import TrainerLike
from trainer_kit.core.tensors import map_tensors
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.pipeline_stages import StandIn

__all__ = ["ModelSummary", "ModelSummaryTable", "SummaryRow", "summarize"]


@final
@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """One submodule.

    Attributes:
        name: as in ``named_modules``.
        type: class name.
        params: number of parameters, shared tensors counted once; None if some are not initialised yet.
        training: whether it is in training mode.
        flops: of one forward of the example, or None.
        in_size: shapes of its inputs in that forward, or None.
        out_size: of its outputs.
    """

    name: str
    type: str
    params: int | None
    training: bool
    flops: int | None = None
    in_size: Any = None
    out_size: Any = None


@final
@dataclass(frozen=True, kw_only=True)
class ModelSummaryTable:
    """The result of `summarize`; ``str()`` of it is the table.

    Attributes:
        rows: one for each submodule down to the depth asked for.
        trainable: number of parameters with gradients; parameters shared between modules count once.
        frozen: number of parameters without gradients.
        loose: number of parameters outside the rows.
        megabytes: size of all parameters in their own dtypes, in 10⁶ bytes.
        train_modules: submodules in training mode.
        eval_modules: submodules in evaluation mode.
        flops: of one forward of the example, or None.
        note: the reason for missing sizes, or None.
    """

    rows: Sequence[SummaryRow]
    trainable: int
    frozen: int
    loose: int
    megabytes: float
    train_modules: int
    eval_modules: int
    flops: int | None = None
    note: str | None = None

    @property
    def total(self) -> int:
        """All parameters."""
        return self.trainable + self.frozen

    def __str__(self) -> str:
        return "\n".join([*(self._table() if self.rows else []), *self.totals()])

    def totals(self) -> list[str]:
        """The lines below the table."""
        totals = [
            (_short(self.trainable), "trainable params"),
            (_short(self.frozen), "non-trainable params"),
            (_short(self.total), "total params"),
            (f"{self.megabytes:,.3f}", "MB of parameters"),
            (str(self.train_modules), "modules in train mode"),
            (str(self.eval_modules), "modules in eval mode"),
        ]
        if self.flops is not None:
            totals.append((_short(self.flops), "FLOPs in a forward"))
        lines = [f"{number:<10}{what}" for number, what in totals]
        return lines if self.note is None else [*lines, self.note]

    def cells(self) -> list[list[str]]:
        """The names of the columns, and a list of texts for each row."""
        sized = any(row.in_size is not None for row in self.rows)
        head = [
            "Name",
            "Type",
            "Params",
            "Mode",
            *(["FLOPs", "In sizes", "Out sizes"] if sized else []),
        ]
        cells = [head]
        for row in self.rows:
            mode = "train" if row.training else "eval"
            params = "?" if row.params is None else _short(row.params)
            sizes = [
                "?" if row.flops is None else _short(row.flops),
                _sizes(row.in_size),
                _sizes(row.out_size),
            ]
            cells.append([row.name, row.type, params, mode, *(sizes if sized else [])])
        if self.loose:
            cells.append(
                [
                    "other params",
                    "",
                    _short(self.loose),
                    "",
                    *([""] * 3 if sized else []),
                ]
            )
        return cells

    def _table(self) -> list[str]:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            " | ".join(
                cell.ljust(width) for cell, width in zip(line, widths, strict=True)
            )
            for line in cells
        ]
        rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
        return [lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:]), rule]


class ModelSummary(Callback):
    """Print the table of the module when fitting starts, on rank 0, to stderr.

    Args:
        max_depth: levels of submodules; -1 for all, 0 prints nothing.

    Raises:
        ConfigurationError: for another number.

    Example:
        >>> ModelSummary(max_depth=2).max_depth
        2
    """

    never_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("summarize", "_summary"),
        "override show(table, costs), or write a callback whose on_fit_start prints another summary",
    )

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = _depth(max_depth)

    def on_fit_start(self, trainer: TrainerLike, pl_module: Any) -> None:
        strategy = trainer.strategy
        staged = strategy.names_on_all_ranks() is not None
        held = (
            _of_all_ranks(pl_module, strategy)
            if staged and self.max_depth != 0
            else None
        )
        if trainer.is_global_zero and self.max_depth != 0:
            plugin = trainer.precision_plugin
            context = plugin.forward_context() if plugin is not None else None
            convert = (
                plugin.convert_batch
                if plugin is not None and plugin.converts_batch
                else None
            )
            if held is None:
                table = summarize(
                    pl_module, self.max_depth, context=context, convert=convert
                )
            else:
                note = "no sizes: a forward would need every stage of the pipeline"
                example = pl_module.example_input_array
                table = _table(
                    pl_module,
                    self.max_depth,
                    held,
                    _Seen(note=None if example is None else note),
                )
            costs = trainer.strategy.costs(pl_module, plugin, trainer.world_size)
            self.show(
                table, [] if costs is None else cost_lines(costs, trainer.optimizers)
            )

    def show(self, table: ModelSummaryTable, costs: Sequence[str]) -> None:
        """Write the summary; called on rank 0.

        Args:
            table: ``str()`` of it is its text.
            costs: lines that say what a rank holds and sends.
        """
        sys.stderr.write("\n".join([str(table), *costs, ""]))


def summarize(
    module: nn.Module,
    max_depth: int = 1,
    *,
    context: AbstractContextManager[Any] | None = None,
    convert: Callable[[Any], Any] | None = None,
) -> ModelSummaryTable:
    """Summarize a module; it may be on the meta device, lazy or sharded.

    If ``module.example_input_array`` is set, and the module is neither lazy nor sharded, the module runs once in
    evaluation mode without gradients for sizes and FLOPs (``torch.utils.flop_counter``); modes and random state are
    restored.

    Args:
        module: the module to summarize.
        max_depth: levels of submodules; -1 for all, 0 for the totals alone.
        context: the precision's forward context.
        convert: casts the example.

    Raises:
        ConfigurationError: for another depth.

    Example:
        >>> print(summarize(nn.Sequential(nn.Linear(4, 2), nn.ReLU())))
        Name | Type   | Params | Mode
        ------------------------------
        0    | Linear | 10     | train
        1    | ReLU   | 0      | train
        ------------------------------
        10        trainable params
        0         non-trainable params
        10        total params
        0.000     MB of parameters
        2         modules in train mode
        0         modules in eval mode
    """
    depth, seen = _depth(max_depth), _Seen()
    example = getattr(module, "example_input_array", None)
    if example is not None:
        watched = [
            each
            for name, each in module.named_modules()
            if name and _is_shown(name, depth)
        ]
        seen = _run(module, watched, example, context or nullcontext(), convert)
    return _table(module, depth, _Held.of(module), seen)


def _is_shown(name: str, depth: int) -> bool:
    return depth == -1 or name.count(".") < depth


@final
@dataclass(frozen=True)
class _Held:
    """The part of a module on one rank.

    Attributes:
        modules: type and training mode by name; None if the module is on another pipeline stage.
        parameters: by every name: the first name, size (None: not initialised), requires_grad, bytes.
    """

    modules: dict[str, tuple[str, bool] | None]
    parameters: dict[str, tuple[str, int | None, bool, int]]

    @staticmethod
    def of(module: nn.Module, shared: Mapping[str, str] | None = None) -> _Held:
        """Read ``module``; ``shared``: the first name of parameters that several stages hold copies of."""
        first: dict[int, str] = {}
        parameters: dict[str, tuple[str, int | None, bool, int]] = {}
        for name, one in module.named_parameters(remove_duplicate=False):
            key = first.setdefault(id(one), (shared or {}).get(name, name))
            size = None if is_lazy(one) else _numel(one)
            parameters[name] = (
                key,
                size,
                one.requires_grad,
                0 if size is None else size * one.element_size(),
            )
        modules = {
            name: None
            if isinstance(each, StandIn)
            else (type(each).__name__, each.training)
            for name, each in module.named_modules()
            if name
        }
        return _Held(modules, parameters)

    def below(self, name: str) -> dict[str, int | None]:
        """Sizes of the parameters of a submodule, each once."""
        return {
            key: size
            for full, (key, size, _, _) in self.parameters.items()
            if full.startswith(f"{name}.")
        }


def _of_all_ranks(module: nn.Module, strategy: Strategy) -> _Held:
    """The complete module, whose stages are on several ranks; collective."""
    parts: list[_Held] = strategy.world.all_gather_object(
        _Held.of(module, strategy.shared_names(module))
    )
    modules: dict[str, tuple[str, bool] | None] = {}
    for name, what in parts[0].modules.items():
        owner = (
            parts[0]
            if what
            else next((part for part in parts if part.modules.get(name)), parts[0])
        )
        inside = [
            n
            for n in owner.modules
            if n == name or (what is None and n.startswith(f"{name}."))
        ]
        modules.update((n, owner.modules[n]) for n in inside if owner.modules[n])
    return _Held(
        modules,
        {
            name: one
            for part in reversed(parts)
            for name, one in part.parameters.items()
        },
    )


def _table(
    module: nn.Module, depth: int, held: _Held, seen: _Seen
) -> ModelSummaryTable:
    objects = dict(module.named_modules())
    below = {name: what for name, what in held.modules.items() if what is not None}
    rows, shown = [], set[str]()
    for name, (kind, training) in below.items():
        if _is_shown(name, depth):
            sizes = held.below(name)
            shown |= sizes.keys()
            rows.append(
                SummaryRow(
                    name=name,
                    type=kind,
                    params=None
                    if None in sizes.values()
                    else sum(size or 0 for size in sizes.values()),
                    training=training,
                    flops=None
                    if seen.flops is None
                    else seen.flops.get(f"{type(module).__name__}.{name}", 0),
                    in_size=seen.inputs.get(objects[name]) if name in objects else None,
                    out_size=seen.outputs.get(objects[name])
                    if name in objects
                    else None,
                )
            )
    once = {one[0]: one for one in held.parameters.values()}
    known = [
        (key, size, trains, volume)
        for key, size, trains, volume in once.values()
        if size is not None
    ]
    in_training = sum(training for _, training in below.values())
    return ModelSummaryTable(
        rows=rows,
        trainable=sum(size for _, size, trains, _ in known if trains),
        frozen=sum(size for _, size, trains, _ in known if not trains),
        loose=sum(size for key, size, _, _ in known if rows and key not in shown),
        megabytes=sum(volume for *_, volume in known) / 1e6,
        train_modules=in_training,
        eval_modules=len(below) - in_training,
        flops=None if seen.flops is None else seen.flops.get("Global", 0),
        note=seen.note
        or (
            "some parameters are not initialised yet"
            if len(known) < len(once)
            else None
        ),
    )


@dataclass
class _Seen:
    """Sizes and FLOPs from a forward of the example."""

    flops: dict[str, int] | None = None
    inputs: dict[nn.Module, Any] = field(default_factory=dict)
    outputs: dict[nn.Module, Any] = field(default_factory=dict)
    note: str | None = None


def _run(
    module: nn.Module,
    watched: Iterable[nn.Module],
    example: Any,
    context: AbstractContextManager[Any],
    convert: Callable[[Any], Any] | None,
) -> _Seen:
    parameters = list(module.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        return _Seen(note="no sizes: some layers are not initialised yet")
    if is_divided(module):
        return _Seen(
            note="no sizes: the module is sharded, and a forward would need every rank"
        )
    from torch.utils.flop_counter import FlopCounterMode

    device = parameters[0].device if parameters else torch.device("cpu")
    seen, modes = _Seen(), [(each, each.training) for each in module.modules()]

    def look(
        each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        given = (*args, *kwargs.values())
        seen.inputs.setdefault(each, _shape(given[0] if len(given) == 1 else given))
        seen.outputs.setdefault(each, _shape(output))

    handles = [each.register_forward_hook(look, with_kwargs=True) for each in watched]
    counter = FlopCounterMode(display=False)
    cuda = [device] if device.type == "cuda" else []
    try:
        example = map_tensors(example, lambda tensor: tensor.to(device))
        example = example if convert is None else convert(example)
        for each, _ in modes:
            each.training = False
        with torch.random.fork_rng(cuda), torch.no_grad(), context, counter:
            if isinstance(example, Mapping):
                module(**example)
            elif isinstance(example, (list, tuple)):
                module(*example)
            else:
                module(example)
    except Exception as error:  # a failed summary must not end a run
        return _Seen(
            note=f"no sizes: forward(example_input_array) raised {type(error).__name__}: {error}"
        )
    finally:
        for handle in handles:
            handle.remove()
        for each, training in modes:
            each.training = training
    seen.flops = {
        name: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()
    }
    return seen


def _depth(max_depth: int) -> int:
    if type(max_depth) is not int or max_depth < -1:
        raise ConfigurationError(
            "max_depth must be a number of levels",
            found=repr(max_depth),
            fix="use -1 for all levels",
        )
    return max_depth


def _numel(parameter: Any) -> int:
    """The full size: DeepSpeed stage 3 leaves an empty tensor in place of the parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, (list, tuple)):
        return [_shape(each) for each in value]
    return "?"


def _sizes(shape: Any) -> str:
    return "?" if shape is None else str(shape)


def _short(number: int) -> str:
    """12 → '12', 12345 → '12.3 K'."""
    size, unit = float(number), 0
    while size >= 999.5 and unit < 5:
        size, unit = size / 1000, unit + 1
    return str(number) if unit == 0 else f"{size:.3g} {' KMBTP'[unit]}"
