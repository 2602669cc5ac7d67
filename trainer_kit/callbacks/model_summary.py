"""`ModelSummary`: the submodules and parameters of a module, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer_kit.core.costs import cost_lines
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.notebook import message_stream
from trainer_kit.core.parallel import is_divided
from trainer_kit.core.protocols import TrainerLike
from trainer_kit.core.tensors import map_tensors
from trainer_kit.core.types import Batch, StepOutput
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
        params: number of parameters, shared tensors counted once; None if some are not initialized yet.
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
    in_size: object = None
    out_size: object = None


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
        lines = self.totals()
        if self.rows:
            lines = self._table_lines() + lines
        return "\n".join(lines)

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
        lines = [f"{number:<10}{label}" for number, label in totals]
        if self.note is not None:
            lines.append(self.note)
        return lines

    def cells(self) -> list[list[str]]:
        """The names of the columns, and a list of texts for each row."""
        cells = [["Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes"]]
        for row in self.rows:
            mode = "train" if row.training else "eval"
            params = _short_or_unknown(row.params)
            flops = _short_or_unknown(row.flops)
            in_size = _text_or_unknown(row.in_size)
            out_size = _text_or_unknown(row.out_size)
            cells.append([row.name, row.type, params, mode, flops, in_size, out_size])
        if self.loose:
            cells.append(["other params", "", _short(self.loose), "", "", "", ""])
        # Without a forward of the example the last three columns have nothing to show.
        if all(row.in_size is None for row in self.rows):
            cells = [line[:4] for line in cells]
        return cells

    def _table_lines(self) -> list[str]:
        cells = self.cells()
        columns = zip(*cells, strict=True)
        widths = [max(len(cell) for cell in column) for column in columns]
        lines = []
        for texts in cells:
            padded = [
                text.ljust(width) for text, width in zip(texts, widths, strict=True)
            ]
            lines.append(" | ".join(padded).rstrip())
        rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
        return [lines[0], rule, *lines[1:], rule]


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
        self.max_depth = _check_depth(max_depth)

    def on_fit_start(self, trainer: TrainerLike, pl_module: Any) -> None:
        if self.max_depth == 0:
            return
        strategy = trainer.strategy
        contents = None
        # Stages of a pipeline are on several ranks: reading the module is collective.
        if strategy.names_on_all_ranks() is not None:
            contents = _read_all_stages(pl_module, strategy)
        # After the collective reading: a rank that returned before it would let the others wait.
        if not trainer.is_global_zero:
            return
        plugin = trainer.precision_plugin
        if contents is None:
            table = self._summarize(pl_module, plugin)
        else:
            note = None
            if pl_module.example_input_array is not None:
                note = "no sizes: a forward would need every stage of the pipeline"
            forward = _ForwardResult(note=note)
            table = _build_table(pl_module, self.max_depth, contents, forward)
        costs = strategy.costs(pl_module, plugin, trainer.world_size)
        lines: list[str] = []
        if costs is not None:
            lines = cost_lines(costs, trainer.optimizers)
        self.show(table, lines)

    def _summarize(self, module: nn.Module, plugin: Any) -> ModelSummaryTable:
        """Summarize with the precision of the run, so that the example has its dtype."""
        if plugin is None:
            return summarize(module, self.max_depth)
        convert = None
        if plugin.converts_batch:
            convert = plugin.convert_batch
        context = plugin.forward_context()
        return summarize(module, self.max_depth, context=context, convert=convert)

    def show(self, table: ModelSummaryTable, costs: Sequence[str]) -> None:
        """Write the summary; called on rank 0.

        Args:
            table: ``str()`` of it is its text.
            costs: lines that say what a rank holds and sends.
        """
        # Not standard output of a program, which belongs to what the program prints.
        message_stream().write("\n".join([str(table), *costs, ""]))


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
    depth = _check_depth(max_depth)
    forward = _ForwardResult()
    example = getattr(module, "example_input_array", None)
    if example is not None:
        watched = []
        for name, submodule in module.named_modules():
            # Hooks only on the rows that are shown: each costs a call in the forward.
            if name and _is_shown(name, depth):
                watched.append(submodule)
        context = context or nullcontext()
        forward = _run_example(module, watched, example, context, convert)
    return _build_table(module, depth, _Contents.read(module), forward)


def _is_shown(name: str, depth: int) -> bool:
    return depth == -1 or name.count(".") < depth


@final
@dataclass(frozen=True)
class _Module:
    """A submodule on this rank."""

    type: str
    training: bool


@final
@dataclass(frozen=True)
class _Parameter:
    """One name of a parameter.

    Attributes:
        key: the first name of this parameter; shared parameters have several names.
        size: number of elements; None if it is not initialized yet.
        requires_grad: whether it is trained.
        size_in_bytes: in its own dtype.
    """

    key: str
    size: int | None
    requires_grad: bool
    size_in_bytes: int


@final
@dataclass(frozen=True)
class _Contents:
    """What one rank holds of a module.

    Attributes:
        modules: submodules by name; None if the submodule is on another pipeline stage.
        parameters: by every name.
    """

    modules: dict[str, _Module | None]
    parameters: dict[str, _Parameter]

    @staticmethod
    def read(module: nn.Module, shared: Mapping[str, str] | None = None) -> _Contents:
        """Read ``module``; ``shared``: the first name of parameters that several stages hold copies of."""
        shared = shared or {}
        # With duplicates: a shared weight belongs to the row of each module that has it, and counts once in the sum.
        keys: dict[int, str] = {}
        parameters = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            key = keys.setdefault(id(parameter), shared.get(name, name))
            # A lazy parameter has no shape before the first forward.
            size = None
            size_in_bytes = 0
            if not is_lazy(parameter):
                size = _numel(parameter)
                size_in_bytes = size * parameter.element_size()
            parameters[name] = _Parameter(
                key, size, parameter.requires_grad, size_in_bytes
            )
        modules: dict[str, _Module | None] = {}
        for name, submodule in module.named_modules():
            if not name:
                continue
            modules[name] = None
            if not isinstance(submodule, StandIn):
                modules[name] = _Module(type(submodule).__name__, submodule.training)
        return _Contents(modules, parameters)

    def sizes_inside(self, name: str) -> dict[str, int | None]:
        """Sizes of the parameters of a submodule, each once, by key."""
        sizes = {}
        for full_name, parameter in self.parameters.items():
            if full_name.startswith(f"{name}."):
                sizes[parameter.key] = parameter.size
        return sizes


def _read_all_stages(module: nn.Module, strategy: Strategy) -> _Contents:
    """Read the complete module, whose stages are on several ranks; collective."""
    contents = _Contents.read(module, strategy.shared_names(module))
    stages: list[_Contents] = strategy.world.all_gather_object(contents)
    first_stage = stages[0]
    modules: dict[str, _Module | None] = {}
    for name, submodule in first_stage.modules.items():
        if submodule is not None:
            modules[name] = submodule
            continue
        # A stand-in has no submodules: those of the stage that holds the real one belong here.
        for stage in stages:
            if stage.modules.get(name) is not None:
                modules.update(_modules_inside(stage, name))
                break
    parameters = {}
    # In reverse, so that the first rank that holds a name describes it.
    for stage in reversed(stages):
        parameters.update(stage.parameters)
    return _Contents(modules, parameters)


def _modules_inside(stage: _Contents, name: str) -> dict[str, _Module | None]:
    """The submodule and all its submodules that are on this stage."""
    modules: dict[str, _Module | None] = {}
    for inner_name, submodule in stage.modules.items():
        is_inside = inner_name == name or inner_name.startswith(f"{name}.")
        if is_inside and submodule is not None:
            modules[inner_name] = submodule
    return modules


def _build_table(
    module: nn.Module, depth: int, contents: _Contents, forward: _ForwardResult
) -> ModelSummaryTable:
    submodules = contents.modules.items()
    modules = {name: submodule for name, submodule in submodules if submodule}
    live_modules = dict(module.named_modules())
    rows = []
    shown_keys: set[str] = set()
    for name, submodule in modules.items():
        if not _is_shown(name, depth):
            continue
        sizes = contents.sizes_inside(name)
        shown_keys |= sizes.keys()
        in_size, out_size = forward.sizes(live_modules.get(name))
        rows.append(
            SummaryRow(
                name=name,
                type=submodule.type,
                params=_sum_or_unknown(sizes.values()),
                training=submodule.training,
                flops=forward.flops_inside(f"{type(module).__name__}.{name}"),
                in_size=in_size,
                out_size=out_size,
            )
        )
    # Shared parameters count once.
    parameters = {
        parameter.key: parameter for parameter in contents.parameters.values()
    }
    counts = _count_parameters(parameters.values(), shown_keys)
    sizes_of_all = [parameter.size for parameter in parameters.values()]
    note = forward.note
    if note is None and None in sizes_of_all:
        note = "some parameters are not initialized yet"
    train_modules = sum(submodule.training for submodule in modules.values())
    return ModelSummaryTable(
        rows=rows,
        trainable=counts["trainable"],
        frozen=counts["frozen"],
        # Without rows, for the totals alone, nothing is outside of them.
        loose=counts["loose"] if rows else 0,
        megabytes=counts["bytes"] / 1e6,
        train_modules=train_modules,
        eval_modules=len(modules) - train_modules,
        flops=forward.flops_inside("Global"),
        note=note,
    )


def _count_parameters(
    parameters: Iterable[_Parameter], shown_keys: set[str]
) -> Counter[str]:
    """Count the elements of initialized parameters; ``loose`` are those outside ``shown_keys``."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        if parameter.size is None:
            continue
        kind = "trainable" if parameter.requires_grad else "frozen"
        counts[kind] += parameter.size
        counts["bytes"] += parameter.size_in_bytes
        if parameter.key not in shown_keys:
            counts["loose"] += parameter.size
    return counts


def _sum_or_unknown(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


@final
@dataclass
class _ForwardResult:
    """Sizes and FLOPs from a forward of the example.

    Attributes:
        flops: by the name that `FlopCounterMode` gives a module; None without a forward.
        inputs: shapes of the inputs of each module.
        outputs: of its outputs.
        note: the reason for missing sizes, or None.
    """

    flops: dict[str, int] | None = None
    inputs: dict[nn.Module, object] = field(default_factory=dict)
    outputs: dict[nn.Module, object] = field(default_factory=dict)
    note: str | None = None

    def sizes(self, module: nn.Module | None) -> tuple[object, object]:
        """Shapes of inputs and outputs; None if the module did not run, or is on another rank."""
        if module is None:
            return None, None
        return self.inputs.get(module), self.outputs.get(module)

    def flops_inside(self, name: str) -> int | None:
        """FLOPs of a module; 0 if the counter names none."""
        if self.flops is None:
            return None
        return self.flops.get(name, 0)

    def record(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: StepOutput,
    ) -> None:
        """Record the shapes of the first call of a module; a forward hook."""
        shapes = [_shape(argument) for argument in (*args, *kwargs.values())]
        in_size: object = shapes
        if len(shapes) == 1:
            in_size = shapes[0]
        # `setdefault`: a module that is called several times, as in a recurrence, keeps its first shapes.
        self.inputs.setdefault(module, in_size)
        self.outputs.setdefault(module, _shape(output))

    def record_flops(self, counts: Mapping[str, Mapping[Any, int]]) -> None:
        """Record the FLOPs of each module, given by operator."""
        self.flops = {}
        for name, flops_by_operator in counts.items():
            self.flops[name] = sum(flops_by_operator.values())


def _run_example(
    module: nn.Module,
    watched: Iterable[nn.Module],
    example: Batch,
    context: AbstractContextManager[Any],
    convert: Callable[[Any], Any] | None,
) -> _ForwardResult:
    parameters = list(module.parameters())
    # Running a lazy layer would initialize it: before the strategy and the user's own code have their turn.
    if any(is_lazy(parameter) for parameter in parameters):
        return _ForwardResult(note="no sizes: some layers are not initialized yet")
    if is_divided(module):
        return _ForwardResult(
            note="no sizes: the module is sharded, and a forward would need every rank"
        )
    # Imported here: it costs time, and a module without an example does not need it.
    from torch.utils.flop_counter import FlopCounterMode

    device = torch.device("cpu")
    if parameters:
        device = parameters[0].device
    # A list, also an empty one: None would save the random state of every GPU.
    cuda_devices = []
    if device.type == "cuda":
        cuda_devices.append(device)
    result = _ForwardResult()
    handles = []
    for submodule in watched:
        handle = submodule.register_forward_hook(result.record, with_kwargs=True)
        handles.append(handle)
    counter = FlopCounterMode(display=False)
    try:
        example = map_tensors(example, lambda tensor: tensor.to(device))
        if convert is not None:
            example = convert(example)
        # The example draws random numbers and runs layers, and the run must not notice.
        random_state = torch.random.fork_rng(cuda_devices)
        with _evaluation_mode(module), random_state, torch.no_grad(), context, counter:
            _call_with(module, example)
    except Exception as error:
        # A summary that fails must not end a run.
        return _ForwardResult(
            note=f"no sizes: forward(example_input_array) raised {type(error).__name__}: {error}"
        )
    finally:
        for handle in handles:
            handle.remove()
    result.record_flops(counter.get_flop_counts())
    return result


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode without calling ``eval``, which a module may override; restore each module's mode."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        for submodule, _ in modes:
            submodule.training = False
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def _call_with(module: nn.Module, example: Batch) -> None:
    if isinstance(example, Mapping):
        module(**example)
    elif isinstance(example, (list, tuple)):
        module(*example)
    else:
        module(example)


def _check_depth(max_depth: int) -> int:
    # By type: True is an int, too.
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


def _shape(value: object) -> object:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, (list, tuple)):
        return [_shape(item) for item in value]
    return "?"


def _text_or_unknown(shape: object) -> str:
    return "?" if shape is None else str(shape)


def _short_or_unknown(number: int | None) -> str:
    return "?" if number is None else _short(number)


def _short(number: int) -> str:
    """12 → '12', 12345 → '12.3 K'."""
    size = float(number)
    unit = 0
    # From 999.5 on, three digits would round to 1000.
    while size >= 999.5 and unit < 5:
        size /= 1000
        unit += 1
    if unit == 0:
        return str(number)
    return f"{size:.3g} {' KMBTP'[unit]}"
