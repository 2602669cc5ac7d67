"""Compose and run the steps of one candidate, as a rank of an imagined world."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.build import choose_precision
from trainer_kit.core.environment import Environment
from trainer_kit.core.tensors import tensors_of
from trainer_kit.core.types import Batch
from trainer_kit.planning.candidates import axes_of, strategy_for
from trainer_kit.planning.fake_mode import FastFakeMode
from trainer_kit.planning.fake_world import (
    FakeReplicas,
    Mail,
    adapted,
    fake_batch,
    fake_mail,
    fake_module,
    unpacked,
)
from trainer_kit.planning.kernel_memory import KernelMemory
from trainer_kit.planning.memory_tracker import Mark, StepMode, StepTracker
from trainer_kit.planning.optimizer_state import state_of
from trainer_kit.planning.records import CATEGORIES, Candidate, Traffic
from trainer_kit.planning.traffic import TrafficCounter
from trainer_kit.precision.precision import Precision
from trainer_kit.step.bus import Bus
from trainer_kit.step.run import Fit
from trainer_kit.step.window import Window
from trainer_kit.strategies.ddp import DDPStrategy
from trainer_kit.strategies.fake_world import fake_world
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.auto_strategy import build_module
from trainer_kit.training.compose import compose_fit
from trainer_kit.training.composition_options import CompositionOptions
from trainer_kit.training.session import Session
from trainer_kit.training.settings import Settings
from trainer_kit.training.settle import Settler
from trainer_kit.training.trial_session import trial_session

__all__ = ["FakeTensors", "OptimizerFailed", "Role", "StepTensors", "Trial"]

_WARM_UP: Final = 1
"""Steps before the measured one: the first makes the optimizer's state."""
_HOST: Final = ("parameters", "gradients", "optimizer")
"""What a strategy that offloads keeps in host memory."""


class OptimizerFailed(Exception):
    """An optimizer's step failed, after forward and backward ran; the cause is its error."""


class StepTensors(Protocol):
    """What a step runs on: copies of the module and of the batch, and the mode that they live in."""

    @property
    def mode(self) -> StepMode: ...
    def module(self, module: nn.Module) -> Any:
        """A copy of the module."""

    def batch(self, batch: Batch, samples: int, size: int | None) -> Batch:
        """A copy of the batch with this number of samples."""

    def running(self, batch: Batch) -> AbstractContextManager[None]:
        """What surrounds all steps."""

    def stepping(self) -> AbstractContextManager[None]:
        """What surrounds an optimizer's step."""

    def recording(self) -> AbstractContextManager[None]:
        """What surrounds everything that is done on one rank."""

    def begin(self) -> None:
        """Called where the measured step begins."""

    def whole(self, memory: dict[str, int]) -> dict[str, int]:
        """The memory of a rank, with what the tracker does not see; called after `recording`."""


@final
class FakeTensors:
    """Tensors without storage."""

    def __init__(self) -> None:
        self.mode = FastFakeMode()

    def module(self, module: nn.Module) -> Any:
        """A copy without values."""
        return fake_module(module, self.mode)

    def batch(self, batch: Batch, samples: int, size: int | None) -> Batch:
        """A batch without values."""
        return fake_batch(batch, samples, self.mode, size)

    def running(self, batch: Batch) -> AbstractContextManager[None]:
        """Models of transformers get no values in which to find packed sequences."""
        return unpacked(batch)

    def stepping(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def recording(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def begin(self) -> None:
        """Nothing."""

    def whole(self, memory: dict[str, int]) -> dict[str, int]:
        """The tracker sees everything."""
        return memory


@final
@dataclass(frozen=True, kw_only=True)
class Role:
    """What a step needs on one rank; see `Measured`."""

    memory: dict[str, int]
    host: int
    traffic: tuple[Traffic, ...]
    flops: int
    operators: int
    with_workspaces: frozenset[str]
    unknown: frozenset[str]
    inexact: tuple[str, ...]


@final
class Trial:
    """One candidate, with what its steps are run on.

    Args:
        module: the user's module, which is copied.
        batch: a batch of the loader.
        candidate: the configuration.
        trainer: gives its settings, or None.
        accelerator: where the run will be.
        size: the samples in ``batch``, or None.
        tensors: what the steps run on.
        optimizes: whether optimizers step; otherwise their state is calculated.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Batch,
        candidate: Candidate,
        trainer: Session | None,
        accelerator: str,
        size: int | None,
        tensors: StepTensors,
        optimizes: bool = True,
    ) -> None:
        self.module = module
        self.batch = batch
        self.candidate = candidate
        self.trainer = trainer
        self.accelerator = accelerator
        self.size = size
        self.tensors = tensors
        self.optimizes = optimizes

    def run(self) -> list[Role]:
        """Run the steps on a rank of each stage.

        Raises:
            OptimizerFailed: forward and backward ran, and the step of an optimizer did not.
        """
        world = self.candidate.world
        # A strategy that is not started yet: it knows the sizes of its axes without a process group.
        stages = strategy_for(self.candidate).places(world).get("pp", 1)
        # One rank of each stage: the others of a stage hold and send the same. A stage
        # learns the shapes of its inputs from the one before, which has run by then.
        box: Mail = {}
        return [self._role(stage * world // stages, box) for stage in range(stages)]

    def _role(self, rank: int, box: Mail) -> Role:
        """Run the steps on one rank."""
        candidate = self.candidate
        strategy = strategy_for(candidate)
        precision = choose_precision(candidate.precision, None, strategy)
        if isinstance(strategy, DDPStrategy):
            strategy = FakeReplicas(strategy)
        on_cpu = self.accelerator == "cpu"
        with (
            self.tensors.recording(),
            fake_world(candidate.world, rank),
            adapted(fused=on_cpu),
            fake_mail(box),
        ):
            strategy.start()
            counter = TrafficCounter(axes_of(strategy))
            # Of a real step the allocator records what kernels allocate; of the kernels of
            # an accelerator nothing is known here.
            kernels = None
            if on_cpu and isinstance(self.tensors, FakeTensors):
                kernels = KernelMemory()
            tracker = StepTracker(self.tensors.mode, counter.see, kernels)
            state = 0
            inexact: tuple[str, ...] = ()
            try:
                run = self._composed(strategy, precision)
                since = self._steps(run, tracker, counter)
                # Inside the world: a sharded parameter shows the size of its own part only there.
                if not self.optimizes:
                    state, inexact = state_of(run.stepper.configured.optimizers)
                # Hooks and references to the module: otherwise the copy would live until the garbage collector runs.
                run.runner.release()
                run.windows.release()
            finally:
                strategy.stop()
        # On a CPU host and device are the same memory.
        offloaded: tuple[str, ...] = ()
        if candidate.offload and not on_cpu:
            offloaded = _HOST
        memory = tracker.peak(since.events, left_out=offloaded)
        memory = self.tensors.whole(memory)
        host = 0
        if offloaded:
            # Two peaks: host and device need not hold most at the same time.
            on_device = set(CATEGORIES) - set(offloaded)
            on_host = tracker.peak(since.events, left_out=on_device)
            host = sum(on_host.values()) + state
        else:
            memory["optimizer"] += state
        unknown: frozenset[str] = frozenset()
        if kernels is not None:
            unknown = frozenset(kernels.unknown)
        return Role(
            memory=memory,
            host=host,
            traffic=counter.traffic(),
            flops=tracker.flops - since.flops,
            operators=tracker.operators - since.operators,
            with_workspaces=frozenset(tracker.with_workspaces),
            unknown=unknown,
            inexact=inexact,
        )

    def _steps(self, run: Fit, tracker: StepTracker, counter: TrafficCounter) -> Mark:
        """Run all steps; return the place in the tracker's record where the last one began."""
        optimizers: Sequence[Optimizer] = run.stepper.configured.optimizers
        # The tensors are on the CPU here, on which torch would step them one by one with less temporary memory.
        if self.accelerator != "cpu":
            _step_together(optimizers)
        state = [*run.module.parameters(), *run.module.buffers()]

        def note(parameter: Tensor) -> None:
            tracker.note(parameter.grad, "gradients")

        # A gradient is known as one as soon as it is complete, for the peak may be inside
        # of the backward.
        for parameter in run.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)
        tracker.note_state(state, optimizers)
        since = tracker.mark()
        tensors = self.tensors
        with tensors.running(self.batch), tensors.mode, tracker, tracker.resizes():
            tracker.calibrate()
            for index, window in enumerate(run.windows.epoch(run.progress)):
                if index == _WARM_UP:
                    since = tracker.mark()
                    counter.restart()
                    tensors.begin()
                # A batch is an input that backward needs, as activations are.
                tracker.note(list(tensors_of(window.batches)), "activations")
                run.forward_backward(window)
                # Before the step, which drops gradients, and after it, which makes state.
                tracker.note_state(state, optimizers)
                self._step(run, window, tracker)
                tracker.note_state(state, optimizers)
                run.progress.step += 1
        return since

    def _step(self, run: Fit, window: Window, tracker: StepTracker) -> None:
        """Step the optimizers, or only drop the gradients."""
        if not self.optimizes:
            # The gradients of the first step must not be there in the second.
            for optimizer in run.stepper.configured.optimizers:
                optimizer.zero_grad()
            return
        try:
            with tracker.stepping(), self.tensors.stepping():
                run.stepper.step(window)
        except Exception as error:
            # Of any class: code of an optimizer.
            raise OptimizerFailed from error

    def _composed(self, strategy: Strategy, precision: Precision) -> Fit:
        """The fit of a copy of the module, as `EntryPoint` composes it, without files, callbacks and validation."""
        module = self.tensors.module(self.module)
        batch = self.tensors.batch(self.batch, self.candidate.micro_batch, self.size)
        session = self._session(strategy, precision)
        session.running.begin("fit")
        session.show_module(module)
        session.metrics.attach(strategy, module)
        with self.tensors.mode:
            # `configure_model` may read the Trainer.
            module.trainer = session
            build_module(session, module, "fit")
            # Again, for submodules that `configure_model` has built.
            module.trainer = session
            module.train()
            # The same batch for all micro-batches: each step has the same shapes.
            loader = [batch] * (self.candidate.accumulate * (1 + _WARM_UP))
            session.training_loaders.use(loader)
            bus = Bus(session, module, [], None, session.metrics)
            run = compose_fit(session, module, None, loader, None, bus)
            session.begin_fit(run, Settler(run))
        # Weights by loss_weight would be read from tensors that have no values.
        run.windows.weigh_by_samples()
        return run

    def _session(self, strategy: Strategy, precision: Precision) -> Session:
        candidate, trainer = self.candidate, self.trainer
        recomputes = candidate.activation_checkpointing
        if trainer is not None:
            session = trial_session(
                trainer,
                _without_data(trainer.settings),
                strategy=strategy,
                precision=precision,
                options=replace(
                    trainer.options,
                    # torch.compile would trace fake tensors for minutes; what it saves is not in a plan.
                    compile_options=None,
                    compile_regional=False,
                    captures_steps=False,
                    recomputes=recomputes,
                ),
            )
        else:
            session = Session(
                settings=_without_data(Settings(max_epochs=1)),
                options=CompositionOptions(
                    # The only argument that composition reads from here.
                    arguments={"reload_dataloaders_every_n_epochs": 0},
                    recomputes=recomputes,
                    is_silent=True,
                ),
                environment=Environment(),
                strategy=strategy,
                sharded_alternative=None,
                precision=precision,
                loggers=[],
                root=".",
                seed=None,
                start=None,
                processes=candidate.world,
                resume=None,
            )
        session.set_accumulation(candidate.accumulate)
        return session


def _without_data(settings: Settings) -> Settings:
    """Settings for a list of equal batches: each rank reads all of them, and their weights are not read."""
    # All of the list is read, and nothing is validated: what the script limits does not change a step.
    limits: dict[str, int | float] = {**settings.limits, "train": 1.0, "val": 0}
    return replace(
        settings,
        shard=False,
        loss_weighting=False,
        global_batch_size=None,
        overfit=0,
        limits=limits,
    )


def _step_together(optimizers: Sequence[Optimizer]) -> None:
    """Choose what torch chooses on an accelerator: one operator for all tensors."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # None lets torch choose, by the device of the tensors, which is the CPU here.
            is_open = "foreach" in group and group["foreach"] is None
            # torch refuses both together.
            if is_open and not group.get("fused"):
                group["foreach"] = True
