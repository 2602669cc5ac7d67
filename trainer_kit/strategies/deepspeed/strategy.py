"""ZeRO by DeepSpeed: optimizer state, gradients and parameters divided among the data ranks; the engine steps."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.collective_errors import together
from trainer_kit.core.costs import Costs
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.fields import check_timeout
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.deepspeed.config import RunFacts, filled, read_config, with_arguments
from trainer_kit.strategies.deepspeed.costs import deepspeed_costs
from trainer_kit.strategies.deepspeed.gradients import OpenWindow, Windows, take_step
from trainer_kit.strategies.deepspeed.library import (
    check_float16,
    deepspeed_of,
    dividing,
    let_go,
    local_rank,
    quiet,
    release,
    round_parts,
)
from trainer_kit.strategies.deepspeed.module import (
    Step,
    check_clipped,
    check_module,
    check_optimizer,
    check_raw,
    hidden_size,
    nothing,
    refuse_group,
)
from trainer_kit.strategies.deepspeed.scaler import EngineScaler
from trainer_kit.strategies.deepspeed.sections import Sections
from trainer_kit.strategies.deepspeed.state import (
    find_pieces,
    load_module,
    load_optimizer,
    module_state,
    optimizer_states,
)
from trainer_kit.strategies.engine_module import EngineModule
from trainer_kit.strategies.flat_shards import Piece
from trainer_kit.strategies.process_group import ProcessGroup, borrowed_buffers, broadcast_buffers, join_world
from trainer_kit.strategies.state import load_optimizer_state, optimizer_state, refuse_whole
from trainer_kit.strategies.strategy import Strategy

__all__ = ["DeepSpeedStrategy"]


@final
class DeepSpeedStrategy(Strategy):
    """DeepSpeed's ZeRO (Rajbhandari et al., SC 2020; https://www.deepspeed.ai).

    The engine runs backward, averages gradients, clips and steps; windows, weights, hooks and checkpoints are ours.
    A checkpoint holds whole tensors in full precision by the module's own names, so that it loads into any other
    strategy, stage and number of ranks, and continues there.

    Args:
        device: where this rank computes; the Trainer fills it in.
        stage: 0 divides nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too. The JSON's by default,
            or 2.
        offload_optimizer: masters and moments live, and are stepped, in the host's memory.
        offload_parameters: parameters wait in the host's memory; stage 3 only.
        config: DeepSpeed's JSON, as a path or a dict. ``"auto"`` stands for what the run says: batch sizes,
            accumulation, clipping, precision; sizes of buckets follow the model's ``config.hidden_size``. Its
            optimizer and scheduler are made where the script makes none.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; by default torch's choice for the device.
        timeout: how long a collective may take.

    Raises:
        StrategyError: DeepSpeed is not installed, or the JSON and the arguments contradict each other.

    Example:
        >>> DeepSpeedStrategy(stage=3, offload_optimizer=True).describe()
        'DeepSpeed ZeRO stage 3 on cpu, optimizer on the host'
    """

    name = "deepspeed"
    engine = "deepspeed"
    lockstep = True
    owns_step = keeps_gradients = completes_gradients = own_buffers = True
    why_not_averaged = "DeepSpeed steps flat copies of its own of the weights"
    why_not_again = "DeepSpeed steps parameters of its own"

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
            raise StrategyError("DeepSpeed is not installed", fix='pip install "trainer-kit[deepspeed]"')
        self.device = torch.device(device)
        self._take(with_arguments(read_config(config), stage, offload_optimizer, offload_parameters))
        check_timeout(timeout, "DeepSpeedStrategy")
        self.backend, self.timeout = process_group_backend, timeout
        self._facts, self._step = RunFacts(), Step(nn.Module())
        self._engine: Any = None
        self._scaler = EngineScaler()
        self._optimizer: Optimizer | None = None
        self._groups: list[list[nn.Parameter]] = []
        self._pieces: dict[nn.Parameter, Piece] = {}
        self._clip = self._own_clip = 0.0
        self._windows = Windows()
        self._window: OpenWindow | None = None  # in a loop of the user's own

    def _take(self, config: dict[str, Any]) -> None:
        self.config, self.sections = config, Sections(config)
        self.stage: int = config["zero_optimization"]["stage"]
        # Offloaded gradients leave the device at the boundary, and only those of its backward would.
        self._finishes_late = self.stage >= 2 and self._offloads("offload_optimizer")

    def use(self, config: dict[str, Any]) -> None:
        """Another JSON from now on, as ``self.config`` has it.

        Raises:
            StrategyError: a model was prepared with the one before.
        """
        if self._window is not None:
            fix = "a second Accelerator for a second model"
            raise StrategyError("a model was prepared with another DeepSpeed plugin", found=self.describe(), fix=fix)
        self._take(config)

    def _offloads(self, key: str) -> bool:
        section = self.config["zero_optimization"].get(key) or {}
        return bool(section.get("device", "none") != "none")

    @property
    def gradient_divisor(self) -> int:
        """The engine averages over the ranks, unless its JSON tells it to sum."""
        return 1 if self.config.get("gradient_allreduce_op") == "sum" else self.world.size

    def start(self) -> None:
        """Join the process group, or make one; a process alone makes one of its own."""
        self.world: ProcessGroup = join_world(self.device, self.backend, self.timeout, alone=True)
        self.data = self.losses = self.reports = self.world
        self.reporter = self.world.rank

    def configure(self, **facts: Any) -> None:
        """What the run says, for the JSON: fields of `RunFacts`. Contradictions are raised here."""
        self._facts = replace(self._facts, world=self.world.size, **facts)
        filled(self.config, self._facts)
        if self._facts.precision.startswith("16-"):
            check_float16(self.device)

    def stop(self) -> None:
        """The engine lets go of the module; at stage 3 nobody else could run it, so there it stays."""
        if self._engine is not None and (self.stage < 3 or self._window is not None):
            self._let_go()
        if self._window is not None:
            self._window, self._optimizer, self._pieces, self._step = None, None, {}, Step(nn.Module())

    def _let_go(self) -> None:
        let_go(self._engine)
        self._engine, self._step = None, Step(nn.Module())

    def init_context(self) -> AbstractContextManager[Any]:
        """On the device; at stage 3 every layer is divided as soon as it is made."""
        if self.stage < 3:
            return torch.device(self.device)
        whole = self._facts.precision.endswith("mixed")  # in another dtype other numbers are drawn
        return dividing(self.device, filled(self.config, self._facts), whole)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move the module, and give every rank rank 0's weights; one that is divided runs through its engine."""
        if self._engine is not None and self._step.module is module:
            return
        if self._release(module):
            self._step = Step(module)
            self._initialize(None)
        else:
            module.to(self.device)
            for parameter in module.parameters():
                self.world.broadcast(parameter.data)
        broadcast_buffers(module, self.world)

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """Check what the engine cannot do; it takes the module over when the optimizer is known, too."""
        check_module(module, manual)
        self.configure(precision=precision.name, hidden_size=hidden_size(module))
        precision.hand_over(self._scaler, precision.name.startswith("16-"))
        self._engine = self._optimizer = None
        self._pieces, self._step = {}, Step(module)
        if not self._release(module):
            module.to(self.device)
        broadcast_buffers(module, self.world)

    def _release(self, module: nn.Module) -> bool:
        """Take the module over from an earlier run; returns whether its parameters are divided."""
        divided = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
        if divided and self.stage < 3:
            raise StrategyError(
                "an earlier run divided the parameters of this module",
                found=f"stage 3, and now stage {self.stage}",
                fix="make the module anew, and load its checkpoint",
            )
        release(module)
        return divided

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """One module that is trained; others are moved."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module.to(self.device)
        check_raw(module, None if self._window is None else self._step.module, self.gradient_divisor, self.world.size)
        self.prepare_module(module, False, precision)
        self._window = OpenWindow()
        self._step.__dict__["forward"] = module
        return EngineModule(module, self._run)

    def _run(self, *arguments: Any, **options: Any) -> Any:
        """Through the engine where gradients are wanted; the engine exists once the optimizer does."""
        if self._engine is None and any(hasattr(parameter, "ds_id") for parameter in self._step.parameters()):
            self._initialize(None)
        trains = torch.is_grad_enabled() and self._optimizer is not None
        return self._call(self._engine if trains else self._step, *arguments, **options)

    def _call(self, target: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.world.size > 1:
            return target(*arguments, **options)
        with local_rank():
            return target(*arguments, **options)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Module and optimizer go to the engine, which puts flat masters of its own into the optimizer's groups."""
        check_optimizer(optimizer, self._optimizer, self._step)
        refuse_whole(optimizer)  # the engine steps flat masters, of which each rank has a part
        self._groups = [list(group["params"]) for group in optimizer.param_groups if group["params"]]
        self._optimizer = optimizer
        self._initialize(optimizer)
        if getattr(self._engine.optimizer, "optimizer", optimizer) is not optimizer:
            raise StrategyError(
                "DeepSpeed makes an optimizer of its own in place of this one", found=type(optimizer).__name__
            )
        self._pieces = find_pieces(self._engine.optimizer)
        if optimizer.state:  # below ZeRO the engine tries a step, which counts and decays weights
            optimizer.state.clear()
            for parameter, piece in self._pieces.items():
                piece.of(piece.master).copy_(piece.in_whole(parameter))
        # The engine needs the gradients of offloaded masters.
        optimizer.zero_grad = nothing if self._window is None else self._window.drop  # type: ignore[method-assign]
        optimizer.add_param_group = refuse_group  # type: ignore[method-assign]

    def _initialize(self, optimizer: Optimizer | None) -> None:
        deepspeed = deepspeed_of(self.device)
        config = filled(self.config, self._facts)
        self._own_clip = self._clip = config["gradient_clipping"]
        with quiet(), local_rank():
            round_parts(self._step, config)
            self._engine, *_ = deepspeed.initialize(model=self._step, optimizer=optimizer, config=config)
        self._scaler.follow(self._engine)

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """Through the engine, which gathers parameters for it at stage 3."""
        if several:
            raise StrategyError(
                "DeepSpeed runs one backward a micro-batch", fix="return one loss and one optimizer, or use DDP"
            )
        return self._through(method, lambda: self._engine)

    def bind_evaluation(self, method: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
        """Through the module that the engine gathers parameters for; the method itself below stage 3."""
        if self._engine is None or self.stage < 3:
            return method
        return self._through(method, lambda: self._step)

    def _through(self, method: Callable[..., Any], find: Callable[[], Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._step.__dict__["forward"] = method
            return self._call(find(), *args)

        return run

    def bind_backward(self, backward: Callable[..., None] | None) -> Callable[..., None] | None:
        """The engine's."""
        if backward is not None:
            raise StrategyError("DeepSpeed's engine runs backward by itself", found="backward is overridden")
        return self._backward if self._window is None else self._backward_alone

    def _backward(self, loss: Tensor) -> None:
        self._engine.backward(self._scaler.scale(loss), scale_wrt_gas=False)  # each loss is weighed already

    def _backward_alone(self, loss: Tensor, retain_graph: bool = False) -> None:
        if self._optimizer is None or self._window is None:
            raise StrategyError(
                "DeepSpeed's engine, which runs backward, is made when model and optimizer are known",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )
        self._window.backward(self._engine, self._scaler.scale(loss), retain_graph)

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """The engine's, which clips."""
        return self._take_step

    def _take_step(self, closure: Any = None) -> Any:
        engine, window, self._scaler.skipped = self._engine, self._window, False
        found = closure() if closure is not None and window is not None else None
        if window is not None:
            if not window.begun:
                return found
            window.complete(engine)
            window.over()
        self._scaler.skipped = not take_step(engine, self._clip)
        self._clip, self._windows.unfinished = self._own_clip, False
        return found

    def forward_backward(self, micro: MicroSteps) -> None:
        """One micro-batch after the other; the engine is told which one is the last of the window."""
        if self._engine is None:
            raise StrategyError("DeepSpeed has nothing to step", fix="return an optimizer from configure_optimizers")
        self._windows.run(self._engine, micro, self._finishes_late)

    def clip_gradients(
        self, parameters: Sequence[nn.Parameter], value: float, algorithm: str, norm_type: float = 2.0
    ) -> Tensor | None:
        """The engine clips all gradients in its step, by norm."""
        if algorithm != "norm" or norm_type != 2:
            problem, found = "DeepSpeed clips by norm only, and by the 2-norm only", f"{algorithm!r}, p={norm_type:g}"
            raise StrategyError(problem, found=found, fix='algorithm="norm", without norm_type')
        self._clip = value
        if self._window is None:
            return None
        check_clipped(parameters, self._groups)
        return self._window.norm(self._engine, self.world)

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """In a loop of the user's own: what the engine steps, averaged over the ranks."""
        return [] if self._window is None else self._window.parts(self._engine)

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Whole weights in full precision, on rank 0; the other ranks have their shapes."""
        own = together(self.world, lambda: dict(module.state_dict()))  # ahead of what ranks exchange
        return module_state(self._pieces, module, own, self.world.rank == 0)

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Each rank takes its pieces."""
        load_module(self._pieces, module, state, strict, self.world)

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], Mapping[nn.Parameter, Mapping[str, Any]]]:
        """Whole moments of the module's own parameters, on rank 0; the other ranks have their shapes."""
        if not self._pieces:
            return optimizer_state(optimizer)
        return self._groups, optimizer_states(self._pieces, optimizer, self.world.rank == 0)

    def load_optimizer_state(
        self,
        optimizer: Optimizer,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> None:
        """Each rank takes its pieces."""
        if not self._pieces:
            load_optimizer_state(optimizer, groups, state)
            return
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
        load_optimizer(self._pieces, optimizer, state)

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, running statistics are those of rank 0, as in its checkpoints."""
        return borrowed_buffers(module, self.world)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """By the stage."""
        return deepspeed_costs(self.stage, module, ranks, precision.name, self._groups)

    def describe(self) -> str:
        """One line for ``explain()``."""
        size = f" over {self.world.size} ranks" if self.started else ""
        keys = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
        hosted = [word for word, key in keys.items() if self._offloads(key)]
        there = f", {' and '.join(hosted)} on the host" if hosted else ""
        return f"DeepSpeed ZeRO stage {self.stage}{size} on {self.device.type}{there}"
