"""Traces one ``training_step`` and its backward, and makes one flat function of the operators that they run.

A replay calls kernels, and neither modules nor autograd. Everything in a graph but tensors is a constant, so what the
trace can see of a step that would not repeat itself is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer_kit.core.module import TrainModule
from trainer_kit.core.torch_private import storage_key, version_of
from trainer_kit.core.types import Function, Keywords, StepOutput
from trainer_kit.step.batch_kinds import CaptureRefused
from trainer_kit.step.module_state import state_tensors
from trainer_kit.step.torch_private import (
    below_autograd,
    is_operator,
    kernel_of,
    reads_lengths,
    trace_operators,
)
from trainer_kit.strategies.signatures import StepMethod

__all__ = ["StepGraph", "has_layout_of", "trace_step"]

_Record: TypeAlias = Callable[..., None]
# A log call: name, value that is no tensor, and options.
_Log: TypeAlias = tuple[str, object, tuple[object, ...]]
_CONSTANTS: Final = (int, float, bool, str, type(None))
"""Values that a step may return or log besides tensors."""
_MASKS: Final = (torch.bool, torch.uint8)
_SPLITS: Final = frozenset({torch.tensor_split, Tensor.tensor_split})
_READS: Final = frozenset(
    {
        Tensor.numpy,
        Tensor.tolist,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.data.__set__,  # type: ignore[attr-defined]  # of a descriptor
        Tensor.backward,
    }
)
"""Ways from a tensor past the operators: a graph would not have what follows from them."""


@final
@dataclass(frozen=True)
class StepGraph:
    """One captured micro-step.

    Attributes:
        run: takes the tensors of a batch and the gradient of the loss; returns the loss, the gradients of
            ``parameters``, the logged tensors, and the tensors of ``returned``.
        parameters: those that have a gradient.
        logs: the calls of ``log``, in their order.
        returned: the keys of the mapping that the step returns, each with its constant, with None for the loss, or with
            a mark for any other tensor; None for a step that returns the loss alone.
        unit: the gradient of a loss without a factor.
        operators: how many a replay runs.
    """

    run: Callable[..., tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]]
    parameters: list[nn.Parameter]
    logs: list[_Log]
    returned: dict[str, object] | None
    unit: Tensor
    operators: int

    def record_logs(self, record: _Record, tensors: Sequence[Tensor]) -> None:
        """Log what the step logs."""
        remaining = iter(tensors)
        for name, value, options in self.logs:
            if value is _TENSOR:
                value = next(remaining)
            record(name, value, *options)

    def output_of(self, loss: Tensor, tensors: Sequence[Tensor]) -> StepOutput:
        """What the step returns."""
        if self.returned is None:
            return loss
        remaining = iter(tensors)
        output: dict[str, object] = {}
        for name, value in self.returned.items():
            if value is _TENSOR:
                value = next(remaining)
            output[name] = value
        output["loss"] = loss
        return output


_TENSOR: Final = object()
"""The mark of a value that each replay computes."""


def trace_step(
    module: TrainModule,
    step: StepMethod,
    batch: object,
    tensors: list[Tensor],
    gradient: Tensor,
    forward_context: AbstractContextManager[object] | None,
) -> StepGraph:
    """Run a step and its backward once; returns the graph of what they do.

    Buffers and random generators change as in a step, gradients in ``.grad`` do not.

    Args:
        module: whose step it is.
        step: takes a batch and its index.
        batch: the step may change its containers.
        tensors: of the batch.
        gradient: of the loss.
        forward_context: in which the step runs, without its backward.

    Raises:
        CaptureRefused: the graph would not do what the step does.
    """
    parameters = list(module.parameters())
    state = state_tensors(module)
    if any(tensor.requires_grad for tensor in state):
        raise CaptureRefused(
            "a tensor that needs a gradient is an attribute, and no parameter"
        )
    fixed = [*parameters, *state]
    trace = _Trace(module, step, batch, parameters, gradient, forward_context)
    versions = [version_of(parameter) for parameter in parameters]
    graph = trace_operators(trace, [*fixed, *tensors, gradient])
    if versions != [version_of(parameter) for parameter in parameters]:
        raise CaptureRefused("training_step changes a parameter")
    trace.check_logs()
    if reads_lengths(graph):
        raise CaptureRefused("training_step packs sequences")
    _check_constants(graph)
    _simplify(graph)
    run = _write_function(graph, fixed, trace.counts())
    operators = sum(node.op == "call_function" for node in graph.nodes)
    return StepGraph(
        run, trace.stepped, trace.logs, trace.returned, gradient, operators
    )


@final
class _Trace:
    """The call that is traced: forward, loss and backward of one micro-batch."""

    def __init__(
        self,
        module: TrainModule,
        step: StepMethod,
        batch: object,
        parameters: list[nn.Parameter],
        gradient: Tensor,
        forward_context: AbstractContextManager[object] | None,
    ) -> None:
        self._module = module
        self._step = step
        self._batch = batch
        self._parameters = parameters
        self._gradient = gradient
        self._forward_context = forward_context or nullcontext()
        self.stepped: list[nn.Parameter] = []
        self.logs: list[_Log] = []
        self.returned: dict[str, object] | None = None
        self._logged: list[Tensor] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._outputs: list[Tensor] = []

    def check_logs(self) -> None:
        """Refuse a step that changes a tensor after it was logged: a replay reads values when it is over."""
        if any(version_of(value) != version for value, version in self._versions):
            raise CaptureRefused("training_step changes a tensor that it has logged")

    def counts(self) -> tuple[int, int, int]:
        """How many gradients, logged tensors and returned tensors the graph has."""
        return len(self.stepped), len(self._logged), len(self._outputs)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The tensors of a replay: the loss, gradients, logged and returned ones."""
        recorder = _Recorder(self._log)
        with (
            recorder.in_place_of_trainer(self._module),
            _Reads(),
            self._forward_context,
        ):
            output = self._step(self._batch, _UnusedIndex())
        if recorder.refusal is not None:
            raise recorder.refusal
        loss = self._take_output(output)
        trained = [
            parameter for parameter in self._parameters if parameter.requires_grad
        ]
        gradients = torch.autograd.grad(
            loss,
            trained,
            self._gradient,
            allow_unused=True,
        )
        outputs = [loss.detach()]
        storages = {storage_key(tensor.untyped_storage()) for tensor in (*inputs, loss)}
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is None:
                continue
            self.stepped.append(parameter)
            outputs.append(_unshared(gradient, parameter, storages))
        return [*outputs, *self._logged, *self._outputs]

    def _log(self, name: str, value: object, *options: object) -> None:
        if isinstance(value, Tensor):
            self._logged.append(value.detach())
            self._versions.append((value, version_of(value)))
            value = _TENSOR
        elif not isinstance(value, _CONSTANTS):
            raise CaptureRefused(f"training_step logs a {type(value).__name__}")
        self.logs.append((name, value, options))

    def _take_output(self, output: object) -> Tensor:
        """The loss; what else the step returns is noted."""
        if isinstance(output, Tensor):
            return output
        if type(output) is not dict or not isinstance(output.get("loss"), Tensor):
            raise CaptureRefused(f"training_step returns a {type(output).__name__}")
        self.returned = {}
        for name, value in output.items():
            self.returned[name] = value
            if name == "loss":
                continue
            if isinstance(value, Tensor):
                self._outputs.append(value.detach())
                self.returned[name] = _TENSOR
            elif not isinstance(value, _CONSTANTS):
                raise CaptureRefused(
                    f"training_step returns a {type(value).__name__} under {name!r}"
                )
        loss: Tensor = output["loss"]
        self.returned["loss"] = None
        return loss


def _unshared(gradient: Tensor, parameter: Tensor, storages: set[int]) -> Tensor:
    """A gradient in memory of its own, laid out as its parameter, as autograd stores it."""
    if gradient.is_sparse:
        raise CaptureRefused("a gradient is sparse")
    storage = storage_key(gradient.untyped_storage())
    if not has_layout_of(gradient, parameter) or storage in storages:
        with torch.no_grad():
            gradient = torch.empty_like(parameter).copy_(gradient)
        storage = storage_key(gradient.untyped_storage())
    storages.add(storage)
    return gradient


def has_layout_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are laid out alike; the stride of a dimension of one element has no meaning."""
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(
        stride == other_stride for size, stride, other_stride in strides if size > 1
    )


# -- what a step must not read -------------------------------------------------------------------------------------


@final
class _Recorder:
    """The Trainer that a step sees while it is traced: it takes logged values, and refuses everything else."""

    def __init__(self, log: _Record) -> None:
        self._log = log
        self.refusal: CaptureRefused | None = None

    @property
    def metrics(self) -> _Recorder:
        """Where `TrainModule.log` records."""
        return self

    def log(self, name: str, value: object, *options: object) -> None:
        """Record a logged value."""
        self._log(name, value, *options)

    def __getattr__(self, name: str) -> NoReturn:
        # Remembered too: the step may catch it.
        self.refusal = CaptureRefused(f"training_step reads {name} of the Trainer")
        raise self.refusal

    @contextmanager
    def in_place_of_trainer(self, module: TrainModule) -> Iterator[None]:
        """Inside, the module has this in the place of its Trainer."""
        entries = [vars(nested) for nested in module.nested_train_modules()]
        trainers = [entry["_trainer"] for entry in entries]
        for entry in entries:
            entry["_trainer"] = self
        try:
            yield
        finally:
            for entry, trainer in zip(entries, trainers, strict=True):
                entry["_trainer"] = trainer


def _refuse_index(*arguments: object) -> NoReturn:
    raise CaptureRefused("training_step uses batch_idx")


_USES: Final = """add radd sub rsub mul rmul mod rmod floordiv truediv divmod pow neg and or lt le gt ge eq ne hash bool
    int index float str repr format getattr"""
_UnusedIndex: Final = type(
    "_UnusedIndex", (), {f"__{name}__": _refuse_index for name in _USES.split()}
)
"""The class of the index of a batch for a step that does not use it: each use of an instance is refused."""


@final
class _Reads(TorchFunctionMode):
    """Refuses what takes values out of tensors past the operators."""

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Called for each function of torch."""
        if func in _READS:
            raise CaptureRefused(f"training_step calls {func.__name__} of a tensor")
        if func in _SPLITS and any(isinstance(arg, Tensor) for arg in args[1:]):
            raise CaptureRefused("training_step splits a tensor where another says")
        return func(*args, **(kwargs or {}))


# -- the graph -----------------------------------------------------------------------------------------------------


def _check_constants(graph: torch.fx.Graph) -> None:
    """Refuse operators whose result has another shape with other values, and tensors that come from elsewhere."""
    lifts = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
    for node in graph.nodes:
        if node.op == "get_attr":
            # A number in the text of the step, as a tensor.
            if all(user.target in lifts for user in node.users):
                continue
            raise CaptureRefused(
                "training_step uses a tensor that is neither in the batch nor an attribute of a module"
            )
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not is_operator(node.target):
            raise CaptureRefused(f"no graph can hold {node.target}")
        if _has_shape_of_data(node.target, node.args):
            raise CaptureRefused(
                f"the shape of the result of {node.target} depends on values"
            )


def _has_shape_of_data(operator: Any, arguments: Sequence[Any]) -> bool:
    """Whether the result has another shape where tensors have other values."""
    if torch.Tag.dynamic_output_shape not in operator.tags:
        return False
    if operator is not torch.ops.aten.index.Tensor:
        return True
    # With integers the shape is that of the indices; a mask selects as many elements as are true.
    indices = [index for index in arguments[1] if index is not None]
    return any(index.meta["val"].dtype in _MASKS for index in indices)


def _simplify(graph: torch.fx.Graph) -> None:
    """Take out what changes no value: copies without a graph, and a transpose of a transpose."""
    transpose = torch.ops.aten.t.default
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            (source,) = node.args
        elif node.target is transpose and node.args[0].target is transpose:
            (source,) = node.args[0].args
        else:
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    # A transpose that only another one has used.
    for node in list(graph.nodes):
        if node.target is transpose and not node.users:
            graph.erase_node(node)


def _write_function(
    graph: torch.fx.Graph,
    fixed: Sequence[Tensor],
    parts: Sequence[int],
) -> Function:
    """A Python function of the tensors of a batch and the gradient of the loss, which runs the graph.

    torch's own function of a graph looks each operator up in each call, and goes through Python to reach it.

    Args:
        graph: its first inputs are ``fixed``.
        fixed: tensors that are the same in each call.
        parts: how many gradients, logged and returned tensors follow the loss.
    """
    writer = _Writer()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(inputs, fixed, strict=False):
        writer.name_constant(node, tensor)
    arguments = [writer.name_value(node) for node in inputs[len(fixed) :]]
    lines = []
    for node in graph.nodes:
        if node.op == "get_attr":
            writer.name_constant(node, getattr(graph.owning_module, node.target))
        elif node.op == "output":
            lines.append(f"return {writer.write_results(node.args[0], parts)}")
        elif node.op == "call_function":
            lines.append(writer.write_call(node))
    body = "\n        ".join(lines)
    text = f"def run({', '.join(arguments)}):\n    with below_autograd():\n        {body}\n"
    namespace: Keywords = {"below_autograd": below_autograd, **writer.constants}
    exec(compile(text, "<captured step>", "exec"), namespace)
    function: Function = namespace["run"]
    return function


@final
class _Writer:
    """Writes the nodes of a graph as lines of Python.

    Attributes:
        constants: what the lines name besides their own values.
    """

    def __init__(self) -> None:
        self.constants: dict[str, object] = {}
        self._names: dict[torch.fx.Node, str] = {}

    def name_value(self, node: torch.fx.Node) -> str:
        """A name for what the node computes."""
        self._names[node] = f"v{len(self._names)}"
        return self._names[node]

    def name_constant(self, node: torch.fx.Node, tensor: Tensor) -> None:
        """Let the node stand for a tensor that is the same in each call."""
        self._names[node] = self._constant(tensor)

    def write_call(self, node: torch.fx.Node) -> str:
        """The line that computes a node, and drops what no later one needs."""
        arguments = [self._write(argument) for argument in node.args]
        arguments += [
            f"{name}={self._write(value)}" for name, value in node.kwargs.items()
        ]
        function = self._constant(kernel_of(node.target))
        line = f"{self.name_value(node)} = {function}({', '.join(arguments)})"
        for source in node.all_input_nodes:
            name = self._names[source]
            if _last_user(source) is node and name not in self.constants:
                line += f"; {name} = None"
        return line

    def write_results(
        self, nodes: Sequence[torch.fx.Node], parts: Sequence[int]
    ) -> str:
        """The loss, and a list for each part of the remaining nodes."""
        names = [self._write(node) for node in nodes]
        texts = [names[0]]
        start = 1
        for length in parts:
            texts.append(f"[{', '.join(names[start : start + length])}]")
            start += length
        return ", ".join(texts)

    def _constant(self, value: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _write(self, value: object) -> str:
        if isinstance(value, torch.fx.Node):
            return self._names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._write, value))}]"
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        # Floats too: not all of them have a text in Python.
        return self._constant(value)


def _last_user(node: torch.fx.Node) -> torch.fx.Node:
    """The last node that needs the value of a node."""
    return max(node.users)
