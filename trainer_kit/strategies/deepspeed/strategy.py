"""ZeRO with DeepSpeed: the data ranks shard optimizer state, gradients and parameters; the engine steps."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Final, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.arguments import check_timeout
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.costs import Costs
from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.core.state_names import plain_state
from trainer_kit.core.types import JsonObject, SavedState, StateDict
from trainer_kit.precision.optimizers import NEED_MATRICES
from trainer_kit.precision.precision import EXCHANGING, Precision
from trainer_kit.strategies.deepspeed.config import (
    RunFacts,
    Sections,
    fill_config,
    read_config,
    with_arguments,
)
from trainer_kit.strategies.deepspeed.engine import (
    Engine,
    EngineScaler,
    OpenWindow,
    begin_window,
    check_float16,
    destroy_engine,
    finish_window,
    import_deepspeed,
    local_rank,
    partitioning,
    quiet,
    release_module,
    round_partitions,
    take_step,
)
from trainer_kit.strategies.deepspeed.state import (
    deepspeed_costs,
    find_flat_shards,
    load_module,
    load_optimizer,
    module_state,
    optimizer_states,
)
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    borrowed_buffers,
    broadcast_buffers,
    join_world,
)
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import (
    FlatShard,
    GroupOptions,
    States,
    load_optimizer_state,
    optimizer_state,
    refuse_unshardable,
)
from trainer_kit.strategies.strategy import EngineModule, Strategy

__all__ = ["DeepSpeedStrategy"]


_REFUSED_LAYERS: Final = "the engine casts and partitions weights in its own way, which exchanged layers do not survive"

_REQUIRES_GRAD: Final = attrgetter("requires_grad")


@final
class DeepSpeedStrategy(Strategy):
    """DeepSpeed's ZeRO (Rajbhandari et al., SC 2020; https://www.deepspeed.ai).

    The engine runs backward, averages gradients, clips and steps; the loop controls accumulation windows, loss weights,
    hooks and checkpoints. A checkpoint holds full tensors in full precision under the module's own names, so a run can
    resume from it under any other strategy, stage and number of ranks.

    Args:
        device: the device of this rank; the Trainer sets it.
        stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters. Default: the JSON's, or 2.
        offload_optimizer: keep and step master weights and moments in host memory.
        offload_parameters: keep parameters in host memory; stage 3 only.
        config: DeepSpeed's JSON, as a path or a dict. ``"auto"`` takes the run's value: batch sizes, accumulation,
            clipping, precision; sizes of buckets follow the model's ``config.hidden_size``. The optimizer and the
            scheduler that it names are built where the script builds none.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; by default torch's choice for the device.
        timeout: the limit for one collective.

    Raises:
        StrategyError: DeepSpeed is not installed, or the JSON and the arguments contradict each other.

    Example:
        >>> DeepSpeedStrategy(stage=3, offload_optimizer=True).describe()
        'DeepSpeed ZeRO stage 3 on cpu, optimizer on the host'
    """

    name = "deepspeed"
    engine = "deepspeed"
    refused_precisions: ClassVar[Mapping[str, str]] = {
        "64-true": "this engine keeps weights in float32 at most",
        **dict.fromkeys(EXCHANGING, _REFUSED_LAYERS),
    }
    lockstep = True
    owns_step = True
    keeps_gradients = True
    completes_gradients = True
    own_buffers = True
    why_not_averaged = "DeepSpeed steps flat copies of the weights"
    why_not_again = "DeepSpeed steps copies of the parameters"
    why_not_in_threads = (
        "DeepSpeed keeps its groups in variables of its modules, one set for a process"
    )

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        stage: int | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise StrategyError(
                "DeepSpeed is not installed", fix='pip install "trainer-kit[deepspeed]"'
            )
        self.device = torch.device(device)
        self._set_config(
            with_arguments(
                read_config(config), stage, offload_optimizer, offload_parameters
            )
        )
        check_timeout(timeout, "DeepSpeedStrategy")
        self.backend = process_group_backend
        self.timeout = timeout
        self._facts = RunFacts()
        self._step = _Step(nn.Module())
        self._engine: Engine = None
        self._scaler = EngineScaler()
        self._optimizer: Optimizer | None = None
        self._groups: list[list[nn.Parameter]] = []
        # For each parameter in the groups whether it was trained when the engine was made.
        self._was_trained: list[bool] = []
        self._flat_shards: dict[nn.Parameter, FlatShard] = {}
        self._clip = 0.0
        self._config_clip = 0.0
        # Whether there are gradients that have not been stepped.
        self._has_unfinished_window = False
        # The window of a custom training loop; None under a Trainer, which knows its last micro-batch.
        self._window: OpenWindow | None = None

    def _set_config(self, config: JsonObject) -> None:
        self.config = config
        self.sections = Sections(config)
        self.stage: int = config["zero_optimization"]["stage"]
        # Reduced after the last backward, not in it: at the boundary only its gradients would leave the device.
        self._reduces_after_backward = self.stage >= 2 and self._offloads(
            "offload_optimizer"
        )

    def use(self, config: JsonObject) -> None:
        """Replace the JSON by another one that is as complete as ``self.config``.

        Args:
            config: DeepSpeed's configuration as a dict, without ``"auto"`` where ``self.config`` has a value.

        Raises:
            StrategyError: a model was prepared with the current one.
        """
        if self._window is not None:
            raise StrategyError(
                "a model was prepared with another DeepSpeed plugin",
                found=self.describe(),
                fix="a second Accelerator for a second model",
            )
        self._set_config(config)

    def _offloads(self, key: str) -> bool:
        section = self.config["zero_optimization"].get(key) or {}
        return bool(section.get("device", "none") != "none")

    @property
    def gradient_divisor(self) -> int:
        """The engine averages over the ranks, unless its JSON asks for a sum."""
        if self.config.get("gradient_allreduce_op") == "sum":
            return 1
        return self.world.size

    def start(self) -> None:
        """Join the process group, or create one, also for a single process."""
        self.world: ProcessGroup = join_world(
            self.device, self.backend, self.timeout, alone=True
        )
        self.data = self.losses = self.reports = self.world
        self.reporter = self.world.rank

    def configure(self, **facts: Any) -> None:
        """Take the run's values for the JSON, by the fields of `RunFacts`; contradictions are raised here."""
        self._facts = replace(self._facts, world=self.world.size, **facts)
        fill_config(self.config, self._facts)
        if self._facts.precision.startswith("16-"):
            check_float16(self.device)

    def stop(self) -> None:
        """Destroy the engine. A Trainer's at stage 3 stays: without it the sharded module could not be run."""
        if self._engine is not None and (self.stage < 3 or self._window is not None):
            destroy_engine(self._engine)
            self._engine = None
            self._step = _Step(nn.Module())
        if self._window is not None:
            self._window = None
            self._optimizer = None
            self._flat_shards = {}
            self._step = _Step(nn.Module())

    def init_context(self) -> AbstractContextManager[object]:
        """On the device; stage 3 shards every layer as soon as it is built."""
        if self.stage < 3:
            return torch.device(self.device)
        # Random initialization differs between dtypes: mixed precision starts from values in float32.
        full = self._facts.precision.endswith("mixed")
        return partitioning(self.device, fill_config(self.config, self._facts), full)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move the module, and give every rank rank 0's weights; a sharded module gets an engine to run through."""
        # The engine of an earlier fit still holds the module.
        if self._engine is not None and self._step.module is module:
            return
        if self._release(module):
            self._step = _Step(module)
            self._initialize(None)
        else:
            module.to(self.device)
            for parameter in module.parameters():
                self.world.broadcast(parameter.data)
        broadcast_buffers(module, self.world)

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Refuse what the engine cannot do; the engine itself is created when the optimizer is known, too."""
        _check_module(module, manual)
        self.configure(precision=precision.name, hidden_size=_hidden_size(module))
        precision.hand_over(self._scaler, precision.name.startswith("16-"))
        self._engine = None
        self._optimizer = None
        self._flat_shards = {}
        self._step = _Step(module)
        if not self._release(module):
            module.to(self.device)
        broadcast_buffers(module, self.world)

    def _release(self, module: nn.Module) -> bool:
        """Take the module over from an earlier run; returns whether its parameters are sharded."""
        partitioned = _is_partitioned(module)
        if partitioned and self.stage < 3:
            raise StrategyError(
                "an earlier run partitioned the parameters of this module with another stage",
                found=f"stage 3, and now stage {self.stage}",
                fix="build the module again, and load its checkpoint",
            )
        release_module(module)
        return partitioned

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Prepare the one module that is trained; modules without trained parameters are only moved."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module.to(self.device)
        if self._window is not None:
            raise StrategyError(
                "DeepSpeed trains one model",
                found=f"{type(self._step.module).__name__}, and now {type(module).__name__}",
                fix="call prepare_model(model, evaluation_mode=True) for a model that is not trained, or use"
                " another Accelerator",
            )
        if self.gradient_divisor != self.world.size:
            raise StrategyError(
                "an Accelerator always averages gradients",
                found='gradient_allreduce_op is "sum"',
                fix="remove it from DeepSpeed's JSON",
            )
        self.prepare_module(module, False, precision)
        self._window = OpenWindow()
        self._step.__dict__["forward"] = module
        return EngineModule(module, self._run)

    def _run(self, *arguments: object, **options: object) -> object:
        """Call the engine where gradients are needed, else the module; the engine exists once the optimizer does."""
        if self._engine is None and _is_partitioned(self._step):
            self._initialize(None)
        if torch.is_grad_enabled() and self._optimizer is not None:
            return self._call(self._engine, *arguments, **options)
        return self._call(self._step, *arguments, **options)

    def _call(
        self, target: StepMethod, *arguments: object, **options: object
    ) -> object:
        if self.world.size > 1:
            return target(*arguments, **options)
        # A single process has no launcher that sets it.
        with local_rank():
            return target(*arguments, **options)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Create the engine of module and optimizer; it puts its flat masters into the optimizer's groups."""
        self._check_optimizer(optimizer)
        # The engine steps flat masters, of which each rank has a part; without ZeRO each parameter is whole.
        refused_names: Sequence[str] = ()
        if self.stage > 0:
            refused_names = NEED_MATRICES
        refuse_unshardable(optimizer, refused_names)
        # Copied now: `initialize` replaces the parameters of the optimizer's groups by its masters.
        groups = [list(group["params"]) for group in optimizer.param_groups]
        self._groups = [group for group in groups if group]
        self._optimizer = optimizer
        self._initialize(optimizer)
        # The user's code and schedulers hold the optimizer that was passed.
        if getattr(self._engine.optimizer, "optimizer", optimizer) is not optimizer:
            raise StrategyError(
                "DeepSpeed replaces this optimizer with a different one",
                found=type(optimizer).__name__,
            )
        self._flat_shards = find_flat_shards(self._engine.optimizer)
        self._was_trained = list(map(_REQUIRES_GRAD, chain.from_iterable(self._groups)))
        if optimizer.state:
            self._undo_trial_step(optimizer)
        # On the user's object, which the user's code and schedulers call: the engine drops gradients in its step, and
        # needs those of offloaded masters until then; it divides the groups once.
        drop: Callable[..., None] = _ignore_zero_grad
        if self._window is not None:
            drop = self._window.drop
        optimizer.zero_grad = drop  # type: ignore[method-assign]  # see above
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign]  # see above

    def _undo_trial_step(self, optimizer: Optimizer) -> None:
        """Undo the step that the engine tries without ZeRO: it counts, and decays weights."""
        optimizer.state.clear()
        for parameter, shard in self._flat_shards.items():
            master = shard.view_in_master(shard.master)
            master.copy_(shard.view_in_parameter(parameter))

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse a second optimizer, one of another model, one that has been stepped, and one with an empty group."""
        if self._optimizer is not None:
            raise StrategyError(
                "DeepSpeed steps one optimizer",
                fix="use one optimizer, with a parameter group for each part",
            )
        stepped: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            stepped += group["params"]
        if not any(parameter.requires_grad for parameter in stepped):
            raise StrategyError(
                "all parameters of this optimizer are frozen: DeepSpeed trains those that are trained when it begins",
                found=type(optimizer).__name__,
                fix="unfreeze parameters before the model and its optimizer are prepared",
            )
        if set(self._step.parameters()).isdisjoint(stepped):
            raise StrategyError(
                "none of this optimizer's parameters belong to the model that DeepSpeed trains",
                found=type(optimizer).__name__,
                fix="prepare both together: model, optimizer = accelerator.prepare(model, optimizer)",
            )
        # DeepSpeed creates the state again in its own layout: moments of earlier steps would be lost.
        if optimizer.state:
            raise StrategyError(
                "this optimizer has been stepped already",
                found=type(optimizer).__name__,
            )
        groups = optimizer.param_groups
        empty = [index for index, group in enumerate(groups) if not group["params"]]
        has_scheduler = any("initial_lr" in group for group in groups)
        if empty and has_scheduler:
            raise StrategyError(
                "DeepSpeed drops parameter groups without parameters, but a scheduler has a learning rate for"
                " each group",
                found=f"group {empty[0]} of {len(groups)} of {type(optimizer).__name__} has none",
                fix='create the optimizer without this group: [group for group in groups if group["params"]]',
            )

    def _initialize(self, optimizer: Optimizer | None) -> None:
        deepspeed = import_deepspeed(self.device)
        config = fill_config(self.config, self._facts)
        self._config_clip = config["gradient_clipping"]
        self._clip = self._config_clip
        with quiet(), local_rank():
            round_partitions(self._step, config)
            self._engine, *_ = deepspeed.initialize(
                model=self._step, optimizer=optimizer, config=config
            )
        self._scaler.follow(self._engine)

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """Call the method through the engine, which gathers parameters for it at stage 3."""
        if several:
            raise StrategyError(
                "DeepSpeed runs one backward per micro-batch",
                fix="return one loss and one optimizer, or use DDP",
            )
        return self._call_with(method, lambda: self._engine)

    def bind_evaluation(self, method: StepMethod, whole: bool = False) -> StepMethod:
        """Call the method through the module for which the engine gathers parameters; below stage 3 directly."""
        if self._engine is None or self.stage < 3:
            return method
        return self._call_with(method, lambda: self._step)

    def _call_with(
        self, method: StepMethod, find_target: Callable[[], Any]
    ) -> StepMethod:
        """Return a call of the engine or the module, whose forward is the method."""

        def run(*args: Any) -> Any:
            self._step.__dict__["forward"] = method
            return self._call(find_target(), *args)

        return run

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """The engine's backward."""
        if backward is not None:
            raise StrategyError(
                "DeepSpeed's engine runs backward", found="backward is overridden"
            )
        if self._window is None:
            return self._backward
        return self._backward_raw

    def _backward(self, loss: Tensor) -> None:
        # Each loss is weighted already.
        self._engine.backward(self._scaler.scale(loss), scale_wrt_gas=False)

    def _backward_raw(self, loss: Tensor, retain_graph: bool = False) -> None:
        if self._optimizer is None or self._window is None:
            raise StrategyError(
                "DeepSpeed's engine, which runs backward, is created when model and optimizer are prepared",
                fix="prepare both together: model, optimizer = accelerator.prepare(model, optimizer)",
            )
        self._window.backward(self._engine, self._scaler.scale(loss), retain_graph)

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """The engine's step, which clips."""
        return self._take_step

    def _check_trained(self) -> None:
        """Refuse parameters that were frozen or unfrozen since the engine put the trained ones into flat masters."""
        parameters = list(chain.from_iterable(self._groups))
        trained = list(map(_REQUIRES_GRAD, parameters))
        if trained == self._was_trained or not self._flat_shards:
            return
        pairs = zip(trained, self._was_trained, strict=True)
        changed = parameters[
            next(
                i
                for i, (is_trained, was_trained) in enumerate(pairs)
                if is_trained != was_trained
            )
        ]
        action = "frozen"
        effect = "still move it, by momentum and weight decay"
        if changed.requires_grad:
            action = "unfrozen"
            effect = "not train it"
        named = self._step.module.named_parameters()
        name = next((name for name, p in named if p is changed), "a parameter")
        raise StrategyError(
            f"a parameter was {action} after the optimizer was prepared: DeepSpeed would {effect}",
            found=f"{name} at stage {self.stage}",
            fix="freeze and unfreeze before the optimizer is prepared, and train a layer later with its own"
            " parameter group whose lr is 0 until then; or use DDP or FSDP",
        )

    def _take_step(self, closure: Any = None) -> Any:
        window = self._window
        self._check_trained()
        self._scaler.skipped = False
        loss = None
        if window is not None:
            if closure is not None:
                loss = closure()
            if not window.begun:
                return loss
            window.complete(self._engine)
            window.end()
        self._scaler.skipped = not take_step(self._engine, self._clip)
        # `clip_gradients` holds for one step.
        self._clip = self._config_clip
        self._has_unfinished_window = False
        return loss

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run one micro-batch after the other; the engine reduces gradients with the last one of the window."""
        if self._engine is None:
            raise StrategyError(
                "DeepSpeed needs an optimizer",
                fix="return an optimizer from configure_optimizers",
            )
        engine = self._engine
        last = micro.count - 1
        reduces_later = self._reduces_after_backward
        begin_window(engine, self._has_unfinished_window)
        for index in range(micro.count):
            micro.begin(index)
            is_boundary = index == last and not reduces_later
            engine.set_gradient_accumulation_boundary(is_boundary)
            loss = micro.forward(index)
            if loss is not None:
                self._has_unfinished_window = True
                micro.backward(index, loss)
            if index == last and self._has_unfinished_window:
                # The last backward has not reduced: it was not at a boundary, or there was none.
                if reduces_later or loss is None:
                    finish_window(engine)
            micro.end(index)

    def clip_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        value: float,
        algorithm: str,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Set the norm to which the engine clips all gradients in its step."""
        if algorithm != "norm" or norm_type != 2:
            raise StrategyError(
                "DeepSpeed clips by the 2-norm only",
                found=f"{algorithm!r}, p={norm_type:g}",
                fix='use algorithm="norm" without norm_type',
            )
        self._clip = value
        if self._window is None:
            return None
        # The engine clips what it steps, so a norm of fewer parameters would be another one.
        missing = set(chain.from_iterable(self._groups)).difference(parameters)
        if missing:
            raise StrategyError(
                "DeepSpeed clips all gradients together",
                found=f"{len(missing)} of the parameters that the optimizer steps are left out",
                fix="call clip_grad_norm_(model.parameters(), ...)",
            )
        return self._window.norm(self._engine, self.world)

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """The gradients that the engine steps, averaged over the ranks; called in custom training loops."""
        if self._window is None:
            return []
        return self._window.gradients(self._engine)

    def module_state(self, module: nn.Module) -> StateDict:
        """Whole weights in full precision, on rank 0; the other ranks have their shapes."""
        # Errors are raised on all ranks before the ranks exchange anything.
        local_state = fail_together(self.world, lambda: plain_state(module))
        return module_state(
            self._flat_shards, module, local_state, self.world.rank == 0
        )

    def load_module_state(
        self, module: nn.Module, state: SavedState, strict: bool
    ) -> None:
        """Restore this rank's pieces."""
        load_module(self._flat_shards, module, state, strict, self.world)

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], States]:
        """Whole moments of the module's own parameters, on rank 0; the other ranks have their shapes."""
        if not self._flat_shards:
            return optimizer_state(optimizer)
        return self._groups, optimizer_states(
            self._flat_shards, optimizer, self.world.rank == 0
        )

    def load_optimizer_state(
        self, optimizer: Optimizer, groups: GroupOptions, state: States
    ) -> None:
        """Restore this rank's pieces."""
        if not self._flat_shards:
            load_optimizer_state(optimizer, groups, state)
            return
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
        load_optimizer(self._flat_shards, optimizer, state)

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, running statistics are those of rank 0, as in its checkpoints."""
        return borrowed_buffers(module, self.world)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """What the stage holds and sends."""
        return deepspeed_costs(self.stage, module, ranks, precision.name, self._groups)

    def describe(self) -> str:
        """One line for ``explain()``."""
        line = f"DeepSpeed ZeRO stage {self.stage}"
        if self.started:
            line += f" over {plural(self.world.size, 'rank')}"
        line += f" on {self.device.type}"
        keys = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
        offloaded = [subject for subject, key in keys.items() if self._offloads(key)]
        if offloaded:
            line += f", {' and '.join(offloaded)} on the host"
        return line


@final
class _Step(nn.Module):
    """The module that the engine wraps: it holds the user's, and its ``forward`` is the method that is called next."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _check_module(module: nn.Module, manual: bool) -> None:
    """Refuse a module that steps its optimizers itself."""
    if manual:
        raise StrategyError(
            "DeepSpeed's engine runs the optimizer step, so manual optimization is not supported",
            fix="set automatic_optimization = True, or use another strategy",
        )
    if isinstance(module, TrainModule) and is_overridden(
        "optimizer_step", module, TrainModule
    ):
        raise StrategyError(
            "DeepSpeed's engine runs the optimizer step",
            found=f"{type(module).__name__}.optimizer_step",
            fix="remove this hook",
        )


def _refuse_group(param_group: Any) -> None:
    """Refuse a later group (replaces ``add_param_group``)."""
    raise StrategyError(
        "DeepSpeed partitions parameters once: a group that is added later would not be trained",
        found="add_param_group",
        fix="put all parameters into the optimizer from the start, later ones with lr=0; or use DDP or FSDP",
    )


def _ignore_zero_grad(set_to_none: bool = True) -> None:
    """Replaces ``zero_grad``: the engine drops gradients in its step."""


def _is_partitioned(module: nn.Module) -> bool:
    """Whether stage 3 has sharded the parameters over the ranks."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def _hidden_size(module: nn.Module) -> int | None:
    """The size in the first ``config.hidden_size`` of the module, as Hugging Face's models have it."""
    for submodule in module.modules():
        config = getattr(submodule, "config", None)
        size = getattr(config, "hidden_size", None)
        sizes = getattr(config, "hidden_sizes", None)
        if size is None and isinstance(sizes, (list, tuple)):
            size = max(sizes)
        if isinstance(size, int):
            return size
    return None
