"""Measure what a step of a configuration needs: the real module, strategy and loop, on tensors without storage."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_kit.build import choose_precision
from trainer_kit.core.costs import optimizer_bytes, shard_bytes
from trainer_kit.core.display import plural
from trainer_kit.core.errors import TrainerKitError
from trainer_kit.core.module import build_once
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.state_names import uncompiled
from trainer_kit.data.sizes import batch_size_of
from trainer_kit.planning.candidates import model_parallel, strategy_for
from trainer_kit.planning.fake_mode import FastFakeMode
from trainer_kit.planning.fake_world import adapted, fake_module
from trainer_kit.planning.real_step import RealSteps
from trainer_kit.planning.records import (
    CALCULATED,
    CATEGORIES,
    Candidate,
    Measured,
    Traffic,
)
from trainer_kit.planning.trial import (
    FakeTensors,
    OptimizerFailed,
    Role,
    StepTensors,
    Trial,
)
from trainer_kit.precision.precision import Precision
from trainer_kit.step.optimizers import configure_optimizers
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.check_module import check_module
from trainer_kit.training.session import Session

__all__ = ["AUTOCAST_COPIES", "measure"]

# "<" begins the name of code without a file, such as "<string>" of a dataclass.
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
"""A note on a cost that users can avoid (docs/decisions/precision.md#0155)."""
_ADAM_STATES: Final = 2
"""The states of Adam, where the optimizer is not known."""
_READ: Final = frozenset({"attention_mask", "position_ids"})
"""Parts of a batch from whose values models of transformers choose whether they make a mask."""


def measure(
    module: nn.Module,
    batch: object,
    candidate: Candidate,
    *,
    trainer: Session | None = None,
    accelerator: str = "cuda",
    size: int | None = None,
    real: RealSteps | None = None,
) -> Measured:
    """Run two optimizer steps of a configuration on tensors without storage, and measure the second.

    The module is copied without its values, so no weights are allocated. Its ``configure_model``, ``training_step`` and
    ``configure_optimizers``, the real strategy and the real loop run in a fake world of ranks; callbacks do not
    run. The module, its hooks, the random generators and the process are as before when it returns.

    Args:
        module: a TrainModule, which no fit has sharded; its parameters may be on the meta device.
        batch: one batch of the loader, of any size: each tensor whose first dimension is the batch's gets the
            candidate's.
        candidate: the configuration.
        trainer: gives the module its settings, such as gradient clipping; None: those of ``Trainer()``.
        accelerator: where the run will be. torch's optimizers step all tensors together on an accelerator, and one
            after the other on a ``"cpu"``. What is offloaded to host memory stays in that of a ``"cpu"``.
        size: the samples in ``batch``; None: the rows of its first tensor.
        real: keeps the steps that ran for real, for other candidates of the same module and batch.

    Returns:
        What the step needs. A step that reads values runs for real, on the CPU, if its weights are small enough; if
        only an optimizer does, its state is calculated. ``exact`` is then False, and `Measured.inexact` says why, as
        where a real step has other kernels. ``ran`` is False, and a note says why, where the step cannot run at all:
        weights, gradients and optimizer state are then calculated.

    Raises:
        TrainerKitError: the candidate cannot be built: sizes that do not divide, a precision that the engine refuses,
            no block to recompute, or this process is a rank already.

    Example:
        >>> import torch
        >>> from trainer_kit.testing import TinyModule
        >>> candidate = Candidate(strategy="fsdp", precision="32-true", world=4, micro_batch=8)
        >>> measured = measure(TinyModule(), torch.zeros(2, 32), candidate, accelerator="cpu")
        >>> whole = 4 * sum(parameter.numel() for parameter in TinyModule().parameters())
        >>> measured.exact, measured.memory[0]["parameters"] < whole
        (True, True)
    """
    module = uncompiled(module)
    check_module(module, "fit")
    strategy = strategy_for(candidate)
    precision = choose_precision(candidate.precision, None, strategy)
    # The module's own code may draw: configure_model initializes weights.
    with preserved_rng(strategy.device):
        if strategy.engine not in _RUN:
            reason = f"{strategy.name} cannot run without data"
            return _calculated(module, candidate, strategy, precision, reason)
        run = partial(
            _run, module, batch, trainer=trainer, accelerator=accelerator, size=size
        )
        try:
            return run(candidate, FakeTensors())
        # A candidate that cannot be built is an answer, and running it on real tensors would fail in the same way.
        except TrainerKitError:
            raise
        except Exception as error:
            # Of any class: user code, and parts of torch that need values.
            failure = error
        # Kept by the caller: two real steps serve every micro-batch of a strategy.
        real_steps = real or RealSteps(size or batch_size_of(batch))
        return _measure_otherwise(
            module, candidate, precision, run, real_steps, failure
        )


def _measure_otherwise(
    module: nn.Module,
    candidate: Candidate,
    precision: Precision,
    run: Callable[..., Measured],
    real_steps: RealSteps,
    failure: Exception,
) -> Measured:
    """Measure a step that failed on fake tensors: on real ones, without its optimizer, or calculate its state.

    Args:
        module: the module.
        candidate: the configuration.
        precision: its precision.
        run: runs the steps of a candidate on tensors.
        real_steps: measures on real tensors.
        failure: why the step does not run on fake tensors.
    """
    reason = f"the step cannot run without data ({_described(failure)})"
    # Larger modules would need minutes and the memory of their weights on this machine.
    if RealSteps.can_hold(module):
        try:
            measured = real_steps.measure(candidate, run)
        except Exception as error:
            # Of any class: user code.
            reason += f", nor with it ({_described(error)})"
        else:
            return _with_inexact(measured, reason)
    if isinstance(failure, OptimizerFailed):
        # Forward and backward have run on these tensors once already.
        # Then the calculation below is what is left, with the first reason.
        with suppress(Exception):
            measured = run(candidate, FakeTensors(), optimizes=False)
            return _with_inexact(measured, reason)
    strategy = strategy_for(candidate)
    return _calculated(module, candidate, strategy, precision, reason)


def _with_inexact(measured: Measured, reason: str) -> Measured:
    """Add a reason why a step that ran is not exact."""
    inexact = (reason, *measured.inexact)
    return replace(
        measured, exact=False, notes=(reason, *measured.notes), inexact=inexact
    )


def _described(error: Exception) -> str:
    """The class, the line and the first line of the text of an error."""
    cause: BaseException | None = error
    if isinstance(error, OptimizerFailed):
        cause = error.__cause__
    assert isinstance(cause, Exception)
    name = type(cause).__name__
    text = str(cause).partition("\n")[0]
    return f"{name}{_line_of(cause)}: {text}"


def _run(
    module: nn.Module,
    batch: object,
    candidate: Candidate,
    tensors: StepTensors,
    *,
    trainer: Session | None,
    accelerator: str,
    size: int | None,
    optimizes: bool = True,
) -> Measured:
    """Run the steps of a candidate."""
    trial = Trial(
        module, batch, candidate, trainer, accelerator, size, tensors, optimizes
    )
    roles = trial.run()
    with_workspaces = frozenset().union(*(role.with_workspaces for role in roles))
    notes = _notes(batch, candidate, accelerator, with_workspaces)
    inexact = _inexact(module, accelerator, roles)
    if len(roles) > 1:
        notes.append(
            "traffic and operations are those of the pipeline stage with the most"
        )
    return Measured(
        candidate=candidate,
        memory=tuple(role.memory for role in roles),
        # The largest of the ranks: each rank of a pipeline has its own host memory.
        host=max(role.host for role in roles),
        traffic=max((role.traffic for role in roles), key=_bytes_sent),
        flops=max(role.flops for role in roles),
        operators=max(role.operators for role in roles),
        exact=not inexact,
        notes=(*notes, *inexact),
        inexact=tuple(inexact),
    )


def _bytes_sent(collectives: Sequence[Traffic]) -> int:
    return sum(traffic.bytes for traffic in collectives)


def _line_of(error: Exception) -> str:
    """The last line outside of installed packages, which is the user's."""
    # From the inside out: an error of the user's line is raised deep inside of torch.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_PACKAGES):
            return f" in {Path(frame.filename).name}, line {frame.lineno}"
    return ""


def _inexact(module: nn.Module, accelerator: str, roles: Sequence[Role]) -> list[str]:
    """Why the memory of a step on fake tensors is not that of a real one: the operators, and what is not known."""
    lines: dict[str, None] = {}
    unknown: set[str] = set()
    for role in roles:
        lines |= dict.fromkeys(role.inexact)
        unknown |= role.unknown
    reasons = list(lines)
    if unknown:
        names = ", ".join(sorted(unknown))
        reasons.append(f"what the CPU kernels of {names} allocate is unknown")
    if accelerator == "cpu":
        return reasons
    # Only a CPU's kernel is known here (oneDNN); cuDNN saves a reserve space of its own layout.
    recurrent = {
        type(layer).__name__
        for layer in module.modules()
        if isinstance(layer, nn.RNNBase)
    }
    if recurrent:
        reasons.append(
            f"{', '.join(sorted(recurrent))}: measured as plain operators; the fused kernel of {accelerator} "
            "saves other tensors for backward"
        )
    return reasons


def _notes(
    batch: object,
    candidate: Candidate,
    accelerator: str,
    with_workspaces: Collection[str],
) -> list[str]:
    """What is not in the memory of a step, and what users can change."""
    if accelerator == "cpu":
        notes = ["not counted: fragmentation, and the memory of libraries"]
    else:
        notes = _accelerator_notes(accelerator, with_workspaces)
    strategy = strategy_for(candidate)
    sizes = strategy.places(candidate.world)
    shards = sizes.get("dp_shard", 1) * sizes.get("cp", 1)
    gathers = strategy.engine == "fsdp" or shards > 1
    if gathers:
        precision = choose_precision(candidate.precision, None, strategy)
        if precision.param_dtype is not None:
            notes.append(AUTOCAST_COPIES)
    # A model of transformers cannot exist before the package is imported.
    if "transformers" in sys.modules and isinstance(batch, Mapping):
        names = ", ".join(sorted(_READ & batch.keys()))
        if names:
            notes.append(
                f"models of transformers read {names}: measured as padded or packed, even a mask of ones"
            )
    if candidate.offload and accelerator == "cpu":
        notes.append(
            "on a CPU, host and device memory are the same: offload saves nothing"
        )
    elif candidate.offload:
        notes.append(
            "not counted: copies between host and device memory, of one unit at a time"
        )
    return notes


def _accelerator_notes(accelerator: str, with_workspaces: Collection[str]) -> list[str]:
    notes = [
        "not counted: fragmentation, the workspace of kernels, and the memory of libraries"
    ]
    if with_workspaces:
        names = ", ".join(sorted(with_workspaces))
        notes.append(
            f"{names}: {accelerator}'s library chooses its workspace when it runs"
        )
    notes.append(
        f"operators are those of a CPU; kernels of {accelerator} may save other tensors for backward"
    )
    return notes


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
    # Built without values: the layers of configure_model count too.
    mode = FastFakeMode()
    copied = fake_module(module, mode)
    with adapted(), mode, precision.init_context():
        build_once(copied)
        precision.convert_module(copied)
    notes = [f"{CALCULATED}{reason}"]
    costs = strategy.costs(copied, precision, candidate.world)
    state: int | None = None
    if costs is None or costs.parameters is None or costs.gradients is None:
        ranks = model_parallel(strategy, candidate.world)
        trained = [
            parameter for parameter in copied.parameters() if parameter.requires_grad
        ]
        weights = shard_bytes(copied.parameters()) // ranks
        gradients = shard_bytes(trained) // ranks
        if costs is None:
            notes.append(
                f"{type(strategy).__name__} declares no costs: a rank is assumed to hold everything"
            )
        else:
            notes.append(
                f"each of {plural(ranks, 'rank')} is assumed to hold an equal part of the model"
            )
    else:
        weights = costs.parameters
        gradients = costs.gradients
        optimizers: list[Optimizer] = []
        # Of any class: user code, which may need a running fit.
        with suppress(Exception), mode:
            optimizers = configure_optimizers(copied).optimizers
        if optimizers:
            state = optimizer_bytes(optimizers, costs)
    if state is None:
        state = _ADAM_STATES * gradients
        notes.append("the optimizer is assumed to be Adam")
    # Master weights in float32, which mixed-precision engines keep beside the 16-bit ones.
    if costs is not None:
        state += costs.masters
    memory = {
        "parameters": weights + shard_bytes(copied.buffers()),
        "gradients": gradients,
        "optimizer": state,
    }
    host = 0
    for category in _offloaded(candidate):
        host += memory.pop(category)
    return Measured(
        candidate=candidate,
        memory=({category: memory.get(category, 0) for category in CATEGORIES},),
        host=host,
        traffic=(),
        flops=0,
        exact=False,
        ran=False,
        notes=tuple(notes),
    )


def _offloaded(candidate: Candidate) -> tuple[str, ...]:
    """The categories of memory that are on the host."""
    # DeepSpeed's word offloads parameters too, which only stage 3 can.
    if candidate.strategy.endswith("stage_3_offload"):
        return "optimizer", "parameters"
    if candidate.offload or candidate.strategy.endswith("offload"):
        return ("optimizer",)
    return ()
