"""The contract of a strategy: where tensors live, and which processes exchange what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.arguments import with_typed_arguments
from trainer_kit.core.costs import Costs
from trainer_kit.core.errors import PrecisionError, StrategyError
from trainer_kit.core.notebook import html_arguments
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.core.protocols import Group, MicroSteps
from trainer_kit.core.state_names import plain_state
from trainer_kit.core.types import Batch, Function, SavedState, StateDict
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.gradients import clip_gradients
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import (
    GroupOptions,
    States,
    load_module_parts,
    load_optimizer_state,
    optimizer_state,
    shard_optimizer_state,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["EngineModule", "Strategy"]


_INSTEAD: Final = {
    "checkpoint_io": "checkpoints are directories written in the background; callbacks see them in on_save_checkpoint",
    "connect": "trainer.fit(module) gives the module to the strategy",
    "lightning_module": "trainer.lightning_module",
    "local_rank": "trainer.local_rank",
    "lr_scheduler_configs": "trainer.lr_scheduler_configs",
    "model": "trainer.lightning_module; the wrapper is bound once, and not an attribute",
    "precision_plugin": "trainer.precision_plugin",
}
"""What has the attributes of Lightning's strategies that are not here."""


class Strategy(ABC):
    """Where tensors live, and which processes exchange what. It has no hooks and does not know the Trainer.

    Subclass it once, and override what your engine does differently from one process on one device: that is what every
    default does, so that each is true for an engine that changes nothing. What the loop must know in advance is an
    attribute here (`sharded`, `lockstep`, `owns_step`, …), declared by the engine; the loop never compares names.

    Args:
        device: the device of this rank; a registered word creates the strategy with it.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.strategies import SingleDeviceStrategy
        >>> trainer = Trainer(strategy=SingleDeviceStrategy("cpu"), logger=False)
        >>> isinstance(trainer.strategy, Strategy), trainer.strategy.device
        (True, device(type='cpu'))
    """

    never_called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("training_step", "validation_step", "test_step", "predict_step"),
            "override bind",
        ),
        **dict.fromkeys(
            ("setup_environment", "setup", "teardown"),
            "override start, prepare_module or stop",
        ),
        **dict.fromkeys(
            ("model_to_device", "configure_ddp", "determine_ddp_device_ids"),
            "override prepare_module",
        ),
        **dict.fromkeys(
            ("optimizer_step", "backward", "pre_backward"),
            "override bind_step or bind_backward",
        ),
        **dict.fromkeys(
            ("lightning_module_state_dict", "save_checkpoint", "load_checkpoint"),
            "override module_state",
        ),
        **dict.fromkeys(
            ("reduce", "all_gather", "process_dataloader", "setup_optimizers"),
            "write a callback instead",
        ),
    }
    """Methods of Lightning's strategies that a subclass of a shipped one cannot override: by name, the way out."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        with_typed_arguments(cls)

    # -- what it is ----------------------------------------------------------------------------------------------

    name: str
    """For messages and the run's records; nothing is decided by it."""
    engine: str = ""
    """Its family, by which docs/guide/precision.md and Accelerate's ``DistributedType`` list it; empty: none."""
    refused_precisions: ClassVar[Mapping[str, str]] = {}
    """The precisions that this engine cannot run: by name, why."""
    sharded: bool = False
    """Whether a rank's state is only a part of the whole: all ranks then write a checkpoint together."""
    values_on_rank_zero: bool = False
    """Whether the weights of a module need values on rank 0 only, from where every rank gets its part."""
    lockstep: bool = False
    """Whether a forward needs every data rank: a rank without a batch then runs an earlier one with weight 0."""
    owns_step: bool = False
    """Whether the engine steps its own parameters: weights are whole only in `module_state`."""
    per_rank_state: bool = False
    """Whether ranks hold different values under the same names between two exchanges; see `own_state`."""
    completes_gradients: bool = False
    """Whether a custom training loop's gradients are complete only after `complete_gradients`, which all ranks call."""
    needs_processes: bool = False
    """Whether it does nothing for one process alone, where `SingleDeviceStrategy` then takes its place."""
    spans_world: bool = True
    """Whether all launched ranks train together; False: in a custom training loop, the others have other tasks."""
    finds_devices: bool = False
    """Whether `start` finds the device itself, because torch does not show it as an accelerator."""
    why_not_averaged: str | None = None
    """Why callbacks cannot average the weights of this engine; None: they can."""
    keeps_gradients: bool = False
    """Whether the engine takes gradients off the parameters, and steps copies of them in its own dtype."""
    why_not_recomputed: str | None = None
    """Why torch cannot compute a block's activations again in backward under this engine; None: it can."""
    why_not_captured: str | None = (
        "its forward and backward exchange data between ranks"
    )
    """Why forward and backward cannot run as a captured graph; None: nothing but the module runs in them."""
    why_not_again: str | None = None
    """Why an optimizer cannot compute the loss again inside its step; None: it can."""
    why_not_in_threads: str | None = None
    """Why ranks cannot be threads of one process that take turns; None: they can, on the CPU."""
    sections: Any = None
    """The optimizer and scheduler that the engine's own configuration names; None: it names none."""

    # -- topology ------------------------------------------------------------------------------------------------

    device: torch.device
    """Where this rank computes; the Trainer sets it before `start`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def _repr_html_(self) -> str:
        return html_arguments(self)

    def use_device(self, device: torch.device) -> None:
        """Compute on this device; called before `start`.

        Args:
            device: the device of this rank.
        """
        self.device = device

    world: Group
    """All processes; set by `start`, as the three that follow."""
    data: Group
    """The processes over which a global batch is split; the others of one place in it get the same batches."""
    losses: Group
    """The data ranks, and those that each compute a part of the same batch: the sum of weights is over all of them."""
    reports: Group
    """The processes whose logged values are reduced: the data ranks, and those that compute a batch together."""
    reporter: int = 0
    """The rank of the world whose logged values count for this rank's batches; usually its own."""
    mesh: DeviceMesh | None = None
    """torch's mesh of the processes, where the strategy makes one."""
    plan: ParallelPlan | None = None
    """How a mesh is to split the module, where the user gave it to the strategy."""

    @abstractmethod
    def start(self) -> None:
        """Join the process group, or create one, and set `world`, `data`, `losses`, `reports` and `reporter`."""

    def stop(self) -> None:
        """Release what `prepare_module` made. Default: nothing to do."""

    @property
    def started(self) -> bool:
        """Whether `start` has run, so that `world` is known."""
        return "world" in self.__dict__

    def places(self, processes: int) -> Mapping[str, int]:
        """The size of each axis for this number of processes; called before any process is started.

        Args:
            processes: the number of processes over all nodes.

        Returns:
            The sizes by the names of the axes; empty for a strategy without a mesh.

        Raises:
            StrategyError: the sizes do not fit this number of processes.
        """
        return {}

    @property
    def root_device(self) -> torch.device:
        """The device, by Lightning's name."""
        return self.device

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank (Lightning's ``trainer.strategy.barrier()``).

        Args:
            name: accepted for compatibility with Lightning; not used.
        """
        self.world.barrier()

    def broadcast(self, value: object, src: int = 0) -> Any:
        """The value of rank ``src``, on every rank (Lightning's ``trainer.strategy.broadcast(value)``).

        Args:
            value: a tensor, which is overwritten in place on the other ranks, or one small picklable value.
            src: the rank whose value it is, over all nodes.
        """
        return self.world.broadcast(value, src)

    def reduce(
        self, tensor: Tensor | float, group: object = None, reduce_op: str = "mean"
    ) -> Tensor:
        """The mean, sum, min or max of a tensor over all ranks (Lightning's ``trainer.strategy.reduce(tensor)``).

        Args:
            tensor: of one shape on every rank, or a number; it stays as it is.
            group: refused: the reduction is over all ranks.
            reduce_op: ``"mean"``, ``"avg"``, ``"sum"``, ``"min"`` or ``"max"``.
        """
        if group is not None:
            raise StrategyError(
                "reduce always uses all ranks", found="a group", fix="leave group out"
            )
        op = str(reduce_op).lower()
        if op == "avg":
            op = "mean"
        if op not in ("mean", "sum", "min", "max"):
            raise StrategyError(
                "unknown reduction",
                found=f"reduce_op={reduce_op!r}",
                fix="use mean, sum, min or max",
            )
        value = torch.as_tensor(tensor, device=self.device)
        # all_reduce works in place, and the mean of integers is no integer.
        if op == "mean" and not value.is_floating_point():
            value = value.float()
        else:
            value = value.clone()
        if self.world.size == 1:
            return value
        return self.world.all_reduce(value, op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether the ranks decide so together; every rank must call it (Lightning's name).

        Args:
            decision: of this rank.
            all: True if every rank has to decide so; False if one is enough.
        """
        vote = 1.0 if decision else 0.0
        votes = sum(row[0] for row in self.world.agree([vote]))
        return votes == self.world.size if all else votes > 0

    @property
    def global_rank(self) -> int:
        """This process's rank (Lightning's name)."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of processes (Lightning's name)."""
        return self.world.size

    @property
    def num_processes(self) -> int:
        """The number of processes (Lightning's name)."""
        return self.world.size

    @property
    def optimizers(self) -> NoReturn:
        """Not here: the Trainer has them."""
        raise AttributeError(
            "a strategy does not hold the optimizers: trainer.optimizers reads and replaces them"
        )

    @optimizers.setter
    def optimizers(self, optimizers: object) -> NoReturn:
        raise StrategyError(
            "a strategy does not hold the optimizers",
            fix="assign trainer.optimizers = [...]",
        )

    if not TYPE_CHECKING:  # a checker knows all attributes

        def __getattr__(self, name: str) -> Any:
            # A property of the class that raised an AttributeError raises its own again.
            if name.startswith("__") or name in dir(type(self)):
                return object.__getattribute__(self, name)
            fix = _INSTEAD.get(name)
            if name in Strategy.__annotations__:
                fix = "it is known once a run has started"
            problem = f"{type(self).__name__} has no attribute {name!r}"
            raise AttributeError(str(StrategyError(problem, fix=fix)))

    def configure(self, **facts: Any) -> str | None:
        """Take what the run knows, to complete the engine's own configuration and to refuse contradictions.

        Args:
            facts: ``precision`` before the module is built; ``batch_size``, ``accumulation`` and ``clip`` before it is
                prepared.

        Returns:
            A line to print, or None.
        """
        return None

    def check_precision(self, precision: Precision) -> None:
        """Raise a `PrecisionError` where this engine, or its device, cannot run a precision.

        Args:
            precision: the precision of the run.

        Raises:
            PrecisionError: with the reason, and a precision that runs here.
        """
        reason = self.refused_precisions.get(precision.name)
        if reason is not None:
            raise PrecisionError(
                f"precision {precision.name!r} does not run on {self.engine}",
                found=reason,
                fix='use single, ddp or fsdp; or precision="bf16-mixed", which runs on every engine',
            )
        precision.check(self.device, self.engine)

    @abstractmethod
    def describe(self) -> str:
        """One line for ``explain()``."""

    def costs(
        self, module: nn.Module, precision: Precision, ranks: int
    ) -> Costs | None:
        """What this rank holds of a module and sends in a step. Default: None, not known.

        Args:
            module: before or after it is prepared.
            precision: of the run.
            ranks: of the world, which may not have started.
        """
        return None

    # -- the module and its optimizers ---------------------------------------------------------------------------

    def init_context(self) -> AbstractContextManager[object]:
        """The context in which ``configure_model`` builds layers. Default: on the device."""
        return torch.device(self.device)

    def building(self, module: nn.Module) -> AbstractContextManager[object]:
        """The context in which ``configure_model`` of this module runs. Default: `init_context`.

        Args:
            module: the module that is about to build its layers.
        """
        return self.init_context()

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move a module to where it runs, for evaluation alone.

        Args:
            module: the module, changed in place.
            precision: the precision of the run, which has already converted the module.
        """
        module.to(self.device)

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Move, shard and wrap a module for training.

        Args:
            module: the module, changed in place.
            manual: whether the user's code calls backward (manual optimization).
            precision: the precision of the run, which has already converted the module.
        """
        self.place_module(module, precision)

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Move, shard and wrap a module of a custom training loop; returns what that loop calls.

        Args:
            module: the user's module.
            precision: the precision of the Accelerator, which has already converted the module.
        """
        self.prepare_module(module, False, precision)
        return module

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Point parameter groups at what `prepare_module` made of the parameters. Default: the same objects.

        Args:
            optimizer: an optimizer of the module's original parameters, changed in place.
        """

    def finish(self, module: nn.Module) -> None:
        """Called once after the last step of a fit that was not interrupted. Default: nothing to do.

        Args:
            module: the trained module.
        """

    # -- steps ---------------------------------------------------------------------------------------------------

    shard_batch: Callable[[Batch], Batch] | None = None
    """Takes this rank's part of its data rank's batch, once that is on the device; None: the whole batch."""
    end_batch: Callable[[], None] | None = None
    """Called after each batch of a custom training loop; None: nothing is."""

    @property
    def gradient_divisor(self) -> int:
        """By what this engine's own reduction divides the sum of the ranks' gradients: 1 for a sum."""
        return 1

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """How a step method of the module is called in training: through the wrapper, where there is one.

        Args:
            method: the bound ``training_step``, or what calls it.
            several: whether each micro-batch has several backward passes (named losses).

        Returns:
            A callable with the same arguments and result.
        """
        return method

    def bind_evaluation(self, method: StepMethod, whole: bool = False) -> StepMethod:
        """How a step method of the module is called in validation, test and prediction.

        Args:
            method: the bound step, such as ``validation_step``, or what calls it.
            whole: whether batches have not been through `shard_batch`.

        Returns:
            A callable with the same arguments and result.
        """
        return method

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """How backward runs.

        Args:
            backward: the module's override of ``backward``; None: ``loss.backward``.

        Returns:
            A callable with the loss and the options of ``Tensor.backward``; None: ``loss.backward``.
        """
        return backward

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """How this optimizer is stepped.

        Args:
            optimizer: an optimizer that `prepare_optimizer` got.

        Returns:
            A callable like ``optimizer.step``, with an optional closure.
        """
        return optimizer.step

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run forward and backward for every micro-batch of one accumulation window.

        The engine decides the order of micro-batches and when gradients are reduced. Call ``begin``, ``forward``,
        ``backward`` (where there is a loss) and ``end`` once for each index. Default: one after the other.

        Args:
            micro: the micro-batches of the window, with the calls that run them.
        """
        for index in range(micro.count):
            micro.begin(index)
            loss = micro.forward(index)
            if loss is not None:
                micro.backward(index, loss)
            micro.end(index)

    def without_exchange(self) -> Callable[[], AbstractContextManager[object]] | None:
        """The context in which forward and backward exchange nothing, so that a rank may repeat a window alone.

        Default: None, a rank cannot. Else `exchange_gradients` is called once after each window, by every rank.
        """
        return None

    def exchange_gradients(self) -> None:
        """Average over the ranks the gradients that were computed in `without_exchange`. Default: nothing to do."""

    def arm(self, loss: Tensor) -> None:
        """Called in manual optimization before the backward of ``loss``, which is to reduce gradients.

        Args:
            loss: a tensor of one element with its graph, weighted and scaled.
        """

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Finish the reduction after the last backward of a custom training loop's window; every rank must call it.

        Args:
            optimizer: the optimizer that is about to step.

        Returns:
            The gradients that the engine keeps for this optimizer. Called only where `completes_gradients` is true.
        """
        return []

    def clip_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        value: float,
        algorithm: str,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Clip unscaled gradients over all ranks: by ``"norm"``, whose value before is returned, or by ``"value"``.

        Args:
            parameters: the parameters whose gradients are clipped, in place; those without a gradient are skipped.
            value: the largest total norm, or the largest absolute value of an element.
            algorithm: ``"norm"`` or ``"value"``.
            norm_type: the p of the norm; ``inf`` for the largest absolute value.

        Returns:
            The total norm before clipping, a tensor of one element on the device; None when clipping by value.

        Raises:
            ConfigurationError: the algorithm is unknown.
        """
        return clip_gradients(parameters, value, algorithm, norm_type)

    # -- state ---------------------------------------------------------------------------------------------------

    def module_state(self, module: nn.Module) -> StateDict:
        """The module's ``state_dict`` under the names that it has without any engine; every rank must call it.

        Args:
            module: a module that was placed, prepared or wrapped.

        Returns:
            Tensors by name: whole ones, or this rank's parts where `sharded` is true.
        """
        return plain_state(module)

    def load_module_state(
        self, module: nn.Module, state: SavedState, strict: bool
    ) -> None:
        """Restore the `module_state` of any strategy, as ``load_state_dict`` does, from whole tensors or parts.

        Args:
            module: a module that was placed, prepared or wrapped, changed in place.
            state: tensors by the names of `module_state`.
            strict: whether the names must match exactly.
        """
        load_module_parts(module, state, strict)

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], States]:
        """The module's own parameters in each group, and the state of each; every rank must call it.

        Args:
            optimizer: an optimizer that `prepare_optimizer` got.
        """
        return optimizer_state(optimizer)

    def load_optimizer_state(
        self, optimizer: Optimizer, groups: GroupOptions, state: States
    ) -> None:
        """Restore the options of each group and the state of each parameter, from whole tensors or parts.

        Args:
            optimizer: an optimizer that `prepare_optimizer` got, changed in place.
            groups: the options of each of its groups, in their order, without parameters.
            state: by parameter, its state by the optimizer's names; a parameter that is missing has none.
        """
        load_optimizer_state(optimizer, groups, shard_optimizer_state(state))

    def own_state(self) -> AbstractContextManager[object]:
        """Inside, `module_state` and `optimizer_state` are this rank's own; used where `per_rank_state` is true."""
        return nullcontext()

    def held_elsewhere(self, module: nn.Module) -> Collection[str]:
        """Names of `module_state` that only other ranks hold: this rank does not read them from a checkpoint.

        Args:
            module: a module that was placed, prepared or wrapped.
        """
        return ()

    def names_on_all_ranks(self) -> Sequence[str] | None:
        """All names of the trained module's state, in its order; None where every rank has all of them."""
        return None

    def shared_names(self, module: nn.Module) -> Mapping[str, str]:
        """The name in checkpoints of each parameter that another rank holds under another name.

        Args:
            module: a module that was placed, prepared or wrapped.
        """
        return {}

    @property
    def own_buffers(self) -> bool:
        """Whether a data rank's buffers (running statistics) stay its own from one step to the next."""
        return False

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, every data rank has the buffers of data rank 0; afterwards its own again.

        Args:
            module: the module of the run.
        """
        return nullcontext()


@final
class EngineModule(nn.Module):
    """The user's module, whose call goes through an engine; everything else is the module's own.

    Args:
        module: the user's.
        run: takes what the module is called with.
    """

    def __init__(self, module: nn.Module, run: Function) -> None:
        super().__init__()
        self.module = module
        self.__dict__["forward"] = run

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
