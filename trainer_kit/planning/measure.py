"""Measure what a step of a configuration needs: the real module, strategy and loop, on tensors without storage."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.fake_collectives import (
    CollectiveOp,
    collective_ops,
    sync_ops,
)
from torch.optim import Optimizer

from trainer_kit.build import choose_precision
from trainer_kit.core.costs import optimizer_bytes, part_bytes
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import TrainerKitError
from trainer_kit.core.module import build_once
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.state_names import uncompiled
from trainer_kit.core.tensors import tensors_of
from trainer_kit.planning.candidates import axes_of, model_parallel, strategy_for
from trainer_kit.planning.fake_mode import FastFakeMode
from trainer_kit.planning.fake_world import (
    FakeReplicas,
    adapted,
    fake_batch,
    fake_mail,
    fake_module,
    fake_world,
    unpacked,
)
from trainer_kit.planning.kernel_memory import KernelMemory
from trainer_kit.planning.memory_tracker import Mark, StepTracker
from trainer_kit.planning.records import (
    CALCULATED,
    CATEGORIES,
    Candidate,
    Measured,
    Traffic,
)
from trainer_kit.precision.precision import Precision
from trainer_kit.step.bus import Bus
from trainer_kit.step.optimizers import configure_optimizers
from trainer_kit.step.run import Fit
from trainer_kit.strategies.ddp import DDPStrategy
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.auto_strategy import build_module
from trainer_kit.training.check_module import check_module
from trainer_kit.training.compose import compose_fit
from trainer_kit.training.session import Running, Session
from trainer_kit.training.settings import Settings, make_settings
from trainer_kit.training.settle import Settler

__all__ = ["AUTOCAST_COPIES", "TrafficCounter", "measure"]

_WARM_UP: Final = 1
"""Steps before the measured one: the first makes the optimizer's state."""
_HOST: Final = ("parameters", "gradients", "optimizer")
"""What a strategy that offloads keeps in host memory."""
_PACKAGES: Final = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parents[1]),
    "<",
)
_RUN: Final = frozenset({"single", "ddp", "fsdp", "mesh"})
"""The engines whose step can be run without data."""
AUTOCAST_COPIES: Final = (
    "FSDP under autocast: each rank holds unsharded 16-bit copies of weights from forward to backward; "
    "FSDPStrategy(mixed_precision=MixedPrecisionPolicy(param_dtype=...)) avoids them"
)
"""A note on a cost that users can avoid (docs/decisions/0155)."""
_READ: Final = frozenset({"attention_mask", "position_ids"})
"""Parts of a batch from whose values models of transformers choose whether they make a mask."""


def measure(
    module: nn.Module,
    batch: Any,
    candidate: Candidate,
    *,
    trainer: Session | None = None,
    accelerator: str = "cuda",
    size: int | None = None,
) -> Measured:
    """Run two optimizer steps of a configuration on tensors without storage, and measure the second.

    The module is copied without its values, so no weights are allocated. Its ``configure_model``, ``training_step`` and
    ``configure_optimizers``, the real strategy and the real loop run in a fake world of ranks; callbacks do not
    run. The module, its hooks, the random generators and the process are as before when it returns.

    Args:
        module: a TrainModule, which no fit has divided; its parameters may be on the meta device.
        batch: one batch of the loader, of any size: each tensor whose first dimension is the batch's gets the
            candidate's.
        candidate: the configuration.
        trainer: gives the module its settings, such as gradient clipping; None: those of ``Trainer()``.
        accelerator: where the run will be. torch's optimizers step all tensors together on an accelerator, and one
            after the other on a ``"cpu"``. What is offloaded to host memory stays in that of a ``"cpu"``.
        size: the samples in ``batch``; None: the rows of its first tensor.

    Returns:
        What the step needs. ``exact`` is False, and `Measured.inexact` says why, where a real step has other kernels.
        ``ran`` is False, and a note says why, where the step cannot run: weights, gradients and optimizer state are
        then calculated.

    Raises:
        TrainerKitError: the candidate cannot be built: sizes that do not divide, a precision that the engine refuses,
            no block to recompute, or this process is a rank already.

    Example:
        >>> import torch
        >>> from trainer_kit.testing import TinyModule
        >>> tried = Candidate(strategy="fsdp", precision="32-true", world=4, micro_batch=8)
        >>> found = measure(TinyModule(), torch.zeros(2, 32), tried, accelerator="cpu")
        >>> found.exact, found.memory[0]["parameters"] < 4 * sum(p.numel() for p in TinyModule().parameters())
        (True, True)
    """
    module = uncompiled(module)
    check_module(module, "fit")
    strategy = strategy_for(candidate)
    precision = choose_precision(candidate.precision, None, strategy)
    with preserved_rng(strategy.device):
        if strategy.engine not in _RUN:
            return _calculated(
                module,
                candidate,
                strategy,
                precision,
                f"{strategy.name} cannot run without data",
            )
        try:
            return _Trial(module, batch, candidate, trainer, accelerator, size).run()
        except TrainerKitError:
            raise
        except (
            Exception
        ) as error:  # of any class: user code, and parts of torch that need data
            text, place = str(error).partition("\n")[0], _line_of(error)
            reason = f"the step cannot run without data ({type(error).__name__}{place}: {text})"
            return _calculated(
                module, candidate, strategy_for(candidate), precision, reason
            )


def _line_of(error: Exception) -> str:
    """The last line outside of installed packages, which is the user's."""
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if not one.filename.startswith(_PACKAGES)
    ]
    return (
        f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        if frames
        else ""
    )


@final
@dataclass(frozen=True, kw_only=True)
class _Role:
    """What a step needs on one rank; see `Measured`."""

    memory: dict[str, int]
    host: int
    traffic: tuple[Traffic, ...]
    flops: int
    operators: int
    with_workspaces: frozenset[str]


@final
class _Trial:
    """One candidate, with what its steps are run on."""

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        candidate: Candidate,
        trainer: Session | None,
        accelerator: str,
        size: int | None,
    ) -> None:
        self.module, self.batch, self.candidate = module, batch, candidate
        self.trainer, self.accelerator, self.size = trainer, accelerator, size
        self.mode = FastFakeMode()
        self.kernels = KernelMemory() if accelerator == "cpu" else None

    def run(self) -> Measured:
        """Run the steps on a rank of each stage."""
        candidate = self.candidate
        stages = strategy_for(candidate).places(candidate.world).get("pp", 1)
        box: dict[int, list[Any]] = {}
        roles = [
            self._role(stage * candidate.world // stages, box)
            for stage in range(stages)
        ]
        with_workspaces = frozenset().union(*(role.with_workspaces for role in roles))
        notes = _notes(self.batch, candidate, self.accelerator, with_workspaces)
        inexact = _inexact(self.module, self.accelerator, roles, self.kernels)
        if stages > 1:
            notes += (
                "of the stages, traffic and operations are those of the one that has most",
            )
        return Measured(
            candidate=candidate,
            memory=tuple(role.memory for role in roles),
            host=max(role.host for role in roles),
            traffic=max(
                (role.traffic for role in roles),
                key=lambda sent: sum(one.bytes for one in sent),
            ),
            flops=max(role.flops for role in roles),
            operators=max(role.operators for role in roles),
            exact=not inexact,
            notes=(*notes, *inexact),
            inexact=inexact,
        )

    def _role(self, rank: int, box: dict[int, list[Any]]) -> _Role:
        """Run the steps on one rank."""
        candidate = self.candidate
        strategy = strategy_for(candidate)
        precision = choose_precision(candidate.precision, None, strategy)
        if isinstance(strategy, DDPStrategy):
            strategy = FakeReplicas(strategy)
        on_cpu = self.accelerator == "cpu"
        with fake_world(candidate.world, rank), adapted(fused=on_cpu), fake_mail(box):
            strategy.start()
            counter = TrafficCounter(axes_of(strategy))
            tracker = StepTracker(self.mode, counter.see, self.kernels)
            try:
                run = self._composed(strategy, precision)
                since = self._steps(run, tracker, counter)
                run.runner.release()
                run.windows.release()
            finally:
                strategy.stop()
        host = (
            _HOST if candidate.offload and self.accelerator != "cpu" else ()
        )  # on a CPU it is the same memory
        on_host = (
            tracker.peak(since.events, left_out=set(CATEGORIES) - set(host))
            if host
            else {}
        )
        return _Role(
            memory=tracker.peak(since.events, left_out=host),
            host=sum(on_host.values()),
            traffic=counter.traffic(),
            flops=tracker.flops - since.flops,
            operators=tracker.operators - since.operators,
            with_workspaces=frozenset(tracker.with_workspaces),
        )

    def _steps(self, run: Fit, tracker: StepTracker, counter: TrafficCounter) -> Mark:
        """Run all steps; return the place in the tracker's record where the last one began."""
        optimizers: Sequence[Optimizer] = run.stepper.configured.optimizers
        if self.accelerator != "cpu":
            _step_together(optimizers)
        held = [*run.module.parameters(), *run.module.buffers()]

        def note(parameter: Tensor) -> None:
            tracker.note(parameter.grad, "gradients")

        for parameter in run.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)
        tracker.note_state(held, optimizers)
        since = tracker.mark()
        with unpacked(self.batch), self.mode, tracker, tracker.resizes():
            tracker.calibrate()
            for index, window in enumerate(run.windows.epoch(run.progress)):
                if index == _WARM_UP:
                    since = tracker.mark()
                    counter.restart()
                tracker.note(list(tensors_of(window.batches)), "activations")
                run.forward_backward(window)
                tracker.note_state(held, optimizers)
                with tracker.stepping():
                    run.stepper.step(window)
                tracker.note_state(held, optimizers)
                run.progress.step += 1
        return since

    def _composed(self, strategy: Strategy, precision: Precision) -> Fit:
        """The fit of a copy of the module, as `EntryPoint` composes it, without files, callbacks and validation."""
        module = fake_module(self.module, self.mode)
        batch = fake_batch(self.batch, self.candidate.micro_batch, self.mode, self.size)
        session = self._session(strategy, precision)
        session.state_verb, session.module = "fit", module
        session.metrics.attach(strategy, module)
        with self.mode:
            module.trainer = session
            build_module(session, module, "fit")
            module.trainer = session  # again, for submodules that configure_model built
            module.train()
            session.train_dataloader = loader = [batch] * (
                self.candidate.accumulate * (1 + _WARM_UP)
            )
            bus = Bus(session, module, [], None, session.metrics)
            run = compose_fit(session, module, None, loader, None, bus)
            session.set_running(Running(run, Settler(run)))
        run.windows.weigh_by_samples()
        return run

    def _session(self, strategy: Strategy, precision: Precision) -> Session:
        candidate, trainer = self.candidate, self.trainer
        if trainer is not None:
            session = trainer.for_trial(
                _without_data(trainer.settings), strategy=strategy, precision=precision
            )
        else:
            session = Session(
                settings=_without_data(_defaults()),
                environment=Environment(),
                strategy=strategy,
                precision=precision,
                loggers=[],
                root=".",
                seed=None,
                start=None,
                processes=candidate.world,
                resume=None,
            )
            session.arguments, session.origins = (
                {"reload_dataloaders_every_n_epochs": 0},
                {},
            )
            session.switches = {}
            session.async_save = session.barebones = session.fast_dev_run = False
        (
            session.sharded_alternative,
            session.compile_options,
            session.compile_regional,
        ) = (
            None,
            None,
            False,
        )
        session.recomputes, session.accumulation = (
            candidate.activation_checkpointing,
            candidate.accumulate,
        )
        session.is_silent = True
        return session


def _defaults() -> Settings:
    return make_settings(
        fast_dev_run=False,
        max_epochs=1,
        max_steps=-1,
        max_duration=None,
        max_time=None,
        min_epochs=None,
        min_steps=None,
        limits=dict.fromkeys(("train", "val", "test", "predict")),
        val_check_interval=None,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=None,
        log_every_n_steps=None,
        clip_val=None,
        clip_algorithm=None,
        overfit_batches=0,
        inference_mode=True,
        shard=False,
        loss_weighting=False,
        global_batch_size=None,
    )


def _without_data(settings: Settings) -> Settings:
    """Settings for a list of equal batches: each rank reads all of them, and their weights are not read."""
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
    for group in (
        group for optimizer in optimizers for group in optimizer.param_groups
    ):
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _inexact(
    module: nn.Module,
    accelerator: str,
    roles: Sequence[_Role],
    kernels: KernelMemory | None,
) -> tuple[str, ...]:
    """Why the memory of a step on fake tensors is not that of a real one: the operators, and what is not known."""
    found: list[str] = []
    unknown = sorted(kernels.unknown) if kernels is not None else []
    if unknown:
        found.append(
            f"what the CPU's kernels of {', '.join(unknown)} allocate could not be found"
        )
    if accelerator == "cpu":
        return tuple(found)
    recurrent = {
        type(part).__name__ for part in module.modules() if isinstance(part, nn.RNNBase)
    }
    if recurrent:
        found.append(
            f"{', '.join(sorted(recurrent))}: measured as plain operators; the fused kernel of {accelerator} "
            "saves other tensors for backward"
        )
    return tuple(found)


def _notes(
    batch: Any, candidate: Candidate, accelerator: str, with_workspaces: Collection[str]
) -> tuple[str, ...]:
    if accelerator == "cpu":
        notes = ["fragmentation and the memory of libraries are not in it"]
    else:
        notes = [
            "fragmentation, the workspace of kernels and the memory of libraries are not in it"
        ]
        if with_workspaces:
            names = ", ".join(sorted(with_workspaces))
            notes.append(
                f"{names}: {accelerator}'s library chooses its workspace when it runs"
            )
        notes.append(
            f"operators are those of a CPU; kernels of {accelerator} may save other tensors for backward"
        )
    strategy = strategy_for(candidate)
    sizes = strategy.places(candidate.world)
    gathers = (
        strategy.engine == "fsdp" or sizes.get("dp_shard", 1) * sizes.get("cp", 1) > 1
    )
    if (
        gathers
        and choose_precision(candidate.precision, None, strategy).param_dtype
        is not None
    ):
        notes.append(AUTOCAST_COPIES)
    if (
        "transformers" in sys.modules
        and isinstance(batch, Mapping)
        and not _READ.isdisjoint(batch)
    ):
        found = ", ".join(sorted(_READ & batch.keys()))
        notes.append(
            f"models of transformers read {found}: measured as padded or packed, even a mask of ones"
        )
    if candidate.offload and accelerator == "cpu":
        notes.append("host memory is the device's on a CPU: offload saves nothing")
    elif candidate.offload:
        notes.append(
            "copies between host and device memory, of one unit at a time, are not in it"
        )
    return tuple(notes)


_KINDS: Final = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "send": ("send",),
    "receive": ("recv",),
}
"""For each kind, what the names of torch's operators contain."""
_UNCOUNTED: Final = "receive"
"""Its bytes are those that another rank sends."""


@final
class TrafficCounter:
    """Counts the collectives of a step, by kind and mesh axis, with torch's list of collectives, which is private.

    The bytes of a collective are those of the whole tensor: what an all-gather returns, a reduce-scatter or an
    all-reduce takes, a send sends (the convention of nccl-tests).

    Args:
        axes: the name of the axis by the ranks of its group; other groups are named ``"world"``.
    """

    def __init__(self, axes: Mapping[tuple[int, ...], str]) -> None:
        self.axes = axes
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def see(self, func: Any, args: Any, out: Any) -> None:
        """Count an operator, if it is a collective."""
        if func not in collective_ops or func in sync_ops:
            return
        ranks = tuple(
            dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        )
        if len(ranks) > 1:
            self.add(
                _kind(str(func)),
                ranks,
                CollectiveOp.get_comm_tensor_size(func, out, args, {}),
            )

    def add(self, kind: str, ranks: tuple[int, ...], size: int, count: int = 1) -> None:
        """Count collectives over these ranks."""
        if kind != _UNCOUNTED:
            key = kind, self.axes.get(ranks, "world")
            self._counts[key] += count
            self._bytes[key] += size

    def restart(self) -> None:
        """Forget what was counted."""
        self._counts.clear()
        self._bytes.clear()

    def traffic(self) -> tuple[Traffic, ...]:
        """What was counted, the most bytes first."""
        found = [
            Traffic(kind=kind, axis=axis, count=count, bytes=self._bytes[kind, axis])
            for (kind, axis), count in self._counts.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.bytes, one.kind, one.axis)))


def _kind(operator: str) -> str:
    for kind, names in _KINDS.items():
        if any(name in operator for name in names):
            return kind
    return operator.partition(".")[2].partition(".")[0].strip("_")


_ADAM: Final = 2
"""The states of Adam, where the optimizer is not known."""


def _calculated(
    module: nn.Module,
    candidate: Candidate,
    strategy: Strategy,
    precision: Precision,
    reason: str,
) -> Measured:
    """Calculate what a rank holds between two steps, for a step that cannot run without data.

    Everything comes from what the strategy declares.

    Args:
        module: the module; a copy without values is built.
        candidate: the configuration.
        strategy: its strategy, which need not have started.
        precision: its precision.
        reason: why the step is not run.
    """
    mode = FastFakeMode()
    copied = fake_module(module, mode)
    with adapted(), mode, precision.init_context():
        build_once(copied)
        precision.convert_module(copied)
    notes = [f"{CALCULATED}{reason}"]
    trained = [
        parameter for parameter in copied.parameters() if parameter.requires_grad
    ]
    parts = model_parallel(strategy, candidate.world)
    costs = strategy.costs(copied, precision, candidate.world)
    weights, gradients = (
        part_bytes(copied.parameters()) // parts,
        part_bytes(trained) // parts,
    )
    state: int | None = None
    if costs is None:
        notes.append(
            f"{type(strategy).__name__} declares no costs: a rank is taken to hold everything"
        )
    elif costs.parameters is not None and costs.gradients is not None:
        weights, gradients = costs.parameters, costs.gradients
        optimizers: list[Any] = []
        with suppress(Exception), mode:  # user code; it may need a running fit
            optimizers = configure_optimizers(copied).optimizers
        state = optimizer_bytes(optimizers, costs) if optimizers else None
    else:
        notes.append(
            f"each of {parts} ranks is taken to hold an equal part of the model"
        )
    if state is None:
        state = _ADAM * gradients
        notes.append("the optimizer is taken to be Adam")
    masters = 0 if costs is None else costs.masters
    buffers = part_bytes(copied.buffers())
    held = {
        "parameters": weights + buffers,
        "gradients": gradients,
        "optimizer": state + masters,
    }
    on_host = (
        {"optimizer", "parameters"}
        if candidate.strategy.endswith("stage_3_offload")
        else {"optimizer"}
    )
    away = (
        on_host
        if candidate.offload or candidate.strategy.endswith("offload")
        else set()
    )
    return Measured(
        candidate=candidate,
        memory=(
            {
                category: 0 if category in away else held.get(category, 0)
                for category in CATEGORIES
            },
        ),
        host=sum(held[category] for category in away),
        traffic=(),
        flops=0,
        exact=False,
        ran=False,
        notes=tuple(notes),
    )
