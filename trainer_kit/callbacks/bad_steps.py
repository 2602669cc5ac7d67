"""`NaNGuard`, `SpikeDetection`: what a run does about a loss or gradient that is not finite, or far off."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, final

import torch
from torch import Tensor

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, TrainerKitError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.types import SavedState, StateDict

__all__ = ["NaNGuard", "SpikeDetection"]

_ACTIONS: Final = ("raise", "stop", "warn")


@final
class SpikeDetection(Callback):
    """Compare the loss of each step, over all ranks, with the mean of the steps before.

    A spike is a loss that is worse than the running mean by ``rtol`` times it, and by ``atol`` where that is given.
    Losses are kept on the device and read together with logged values, so a step waits for nothing and a spike is
    reported at the next logging step, with its own step. A spike does not enter the mean. With several ranks a
    checkpoint holds rank 0's losses of the steps that are not judged yet.

    Args:
        mode: ``"min"`` when a lower loss is better, else ``"max"``.
        window: steps in the running mean.
        warmup: steps of the run that are not judged.
        atol: a spike is also worse by at least this; None: ``rtol`` alone decides.
        rtol: a spike is worse by this multiple of the mean's size.
        exclude_batches_path: a directory or ``.json`` file, for the batches of each spike and of the step before it:
            a list of their ``batch_idx``, in ``skip_batches.json``. None writes none.
        action: ``"raise"`` an error; ``"stop"``: request a stop, with a checkpoint where the run keeps any; ``"warn"``:
            print a line.

    Attributes:
        spikes: the steps with a spike, and their losses.
        bad_batches: the ``batch_idx`` of the batches of each spike and of the step before it.

    Raises:
        ConfigurationError: for another mode or action, and for a window below 1.
        TrainerKitError: in a step with a spike, for ``action="raise"``.

    Example:
        >>> SpikeDetection(window=20, warmup=100, action="warn").spikes
        {}
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        *,
        action: Literal["raise", "stop", "warn"] = "raise",
    ) -> None:
        _check_choice("mode", mode, ("min", "max"))
        _check_choice("action", action, _ACTIONS)
        if window < 1:
            raise ConfigurationError(
                "the running mean needs a window of at least one step",
                found=f"window={window}",
            )
        if warmup < 0 or not rtol >= 0 or (atol is not None and not atol >= 0):
            raise ConfigurationError(
                "warmup, atol and rtol must be ≥ 0",
                found=f"warmup={warmup}, atol={atol}, rtol={rtol}",
            )
        self.mode = mode
        self.window = window
        self.warmup = warmup
        self.atol = atol
        self.rtol = rtol
        self.action = action
        self.exclude_batches_path = exclude_batches_path
        self._reset()

    def _reset(self) -> None:
        self.spikes: dict[int, float] = {}
        self.bad_batches: list[int] = []
        # The losses on the device of the steps that are not judged yet, with their steps.
        self._pending: list[tuple[int, Tensor]] = []
        # The losses of the micro-batches of this step.
        self._step_losses: list[Tensor] = []
        # The losses that the running mean is computed from.
        self._recent: deque[float] = deque(maxlen=self.window)
        self._judged = 0
        # The `batch_idx` of this step, and by step of this epoch those that are not judged yet.
        self._indices: list[int] = []
        self._batches: dict[int, list[int]] = {}

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            # Forget another fit; a resumed fit restores its state after this.
            self._reset()

    def state_dict(self) -> StateDict:
        """Losses that are not judged yet are read here: a sync point of a checkpoint."""
        # sync point: a checkpoint
        pending = [[step, float(loss)] for step, loss in self._pending]
        return {
            "recent": list(self._recent),
            "judged": self._judged,
            "spikes": dict(self.spikes),
            "kept": pending,
            "bad_batches": list(self.bad_batches),
            "batches": dict(self._batches),
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        self._recent = deque(state_dict["recent"], maxlen=self.window)
        self._judged = state_dict["judged"]
        self.spikes = dict(state_dict["spikes"])
        self._pending = []
        for step, loss in state_dict["kept"]:
            self._pending.append((step, torch.tensor(loss)))
        # These belong to a step that `NaNGuard` left unfinished.
        self._step_losses.clear()
        self._indices.clear()
        # Checkpoints of earlier versions hold no batches.
        self.bad_batches = list(state_dict.get("bad_batches", ()))
        self._batches = dict(state_dict.get("batches", {}))

    def on_train_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        self._indices.append(batch_idx)
        if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            self._step_losses.append(outputs["loss"])

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        step = trainer.global_step
        self._pending += [(step, loss) for loss in self._step_losses]
        self._step_losses.clear()
        self._batches[step] = self._indices
        self._indices = []
        # Without logging every 50 steps: otherwise the losses would gather on the device until the epoch ends.
        if step % (trainer.log_every_n_steps or 50) == 0:
            self._judge_steps(trainer)

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._judge_steps(trainer)
        self._batches.clear()

    def _judge_steps(self, trainer: TrainerLike) -> None:
        for step, loss in self._read_step_losses(trainer):
            # Every run looks for these, and `NaNGuard` may train without them.
            if not math.isfinite(loss):
                continue
            self._judged += 1
            mean = loss
            if self._recent:
                mean = sum(self._recent) / len(self._recent)
            # The first steps enter the mean, however far off they are.
            if self._judged > self.warmup and self._is_spike(loss, mean):
                self._report_spike(trainer, step, loss, mean)
            else:
                self._recent.append(loss)
        # The batches of the last step stay: a spike of the next one reports them, too.
        last_step = trainer.global_step
        last_batches = self._batches.get(last_step)
        self._batches = {}
        if last_batches is not None:
            self._batches[last_step] = last_batches

    def _is_spike(self, loss: float, mean: float) -> bool:
        excess = loss - mean
        if self.mode == "max":
            excess = -excess
        is_far_off = excess > self.rtol * abs(mean)
        if self.atol is not None:
            is_far_off = is_far_off and excess > self.atol
        return is_far_off

    def _read_step_losses(self, trainer: TrainerLike) -> list[tuple[int, float]]:
        """Read the mean loss of each step over its micro-batches and all ranks, equal on every rank."""
        losses = self._read_pending()
        last_step = trainer.global_step
        first_step = min((step for step, _ in losses), default=last_step)
        world = trainer.strategy.world
        # Ranks may hold losses of different steps; all of them count from the earliest.
        first_step = int(min(row[0] for row in world.agree([first_step])))
        sums = [0.0] * (last_step - first_step + 1)
        counts = [0.0] * len(sums)
        for step, loss in losses:
            sums[step - first_step] += loss
            counts[step - first_step] += 1
        # Sums and counts, not means: ranks may have different numbers of micro-batches in a step.
        rows = world.agree(sums + counts)
        totals = [sum(column) for column in zip(*rows, strict=True)]
        pairs = zip(totals[: len(sums)], totals[len(sums) :], strict=True)
        means = []
        for step, (total, count) in enumerate(pairs, start=first_step):
            if count:
                means.append((step, total / count))
        return means

    def _read_pending(self) -> list[tuple[int, float]]:
        """Read this rank's losses that are not judged yet, each with its step."""
        pending = self._pending
        self._pending = []
        if not pending:
            return []
        steps = [step for step, _ in pending]
        scalars = [loss.reshape(()).float() for _, loss in pending]
        # sync point: one for all steps since the last judgment
        losses = torch.stack(scalars).tolist()
        return list(zip(steps, losses, strict=True))

    def _report_spike(
        self, trainer: TrainerLike, step: int, loss: float, mean: float
    ) -> None:
        self.spikes[step] = loss
        # The step before, too: its update may be what made this loss jump.
        self.bad_batches += self._batches.get(step - 1, ())
        self.bad_batches += self._batches.get(step, ())
        if self.exclude_batches_path is not None and trainer.is_global_zero:
            self._write_batches(Path(self.exclude_batches_path))
        problem = f"the loss jumped to {loss:.6g} at step {step}"
        comparison = (
            f"the mean of the {plural(len(self._recent), 'step')} before is {mean:.6g}"
        )
        if self.action == "raise":
            raise TrainerKitError(
                problem,
                found=comparison,
                fix="lower the learning rate, clip gradients, or inspect the batches of this step",
            )
        if self.action == "stop":
            trainer.request_checkpoint(problem)
            trainer.stop(f"{problem}; {comparison}")
        else:
            trainer.print(f"{problem}; {comparison}")

    def _write_batches(self, path: Path) -> None:
        if path.suffix != ".json":
            path = path / "skip_batches.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(self.bad_batches, indent=4)
        replace_file(path, content.encode())


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f"SpikeDetection(mode=, action=) has no such {name}",
            found=repr(value),
            fix=did_you_mean(value, choices),
        )


_POLICIES: Final = ("raise", "skip", "rollback")


@final
class NaNGuard(Callback):
    """Find the step whose loss or gradient is NaN or infinite, and raise there, or train without that step.

    Without this callback such a loss ends the run with an error that names its step, batch and samples. With it, the
    run holds a copy of its state in memory. Once a loss is not finite, the steps since that copy are trained again,
    each with a look at its loss and gradients. So the error names the loss or the first bad parameter, and a policy can
    leave the step out: the result is that of a run that never saw its batches.

    A good step has no cost and no device synchronization. A copy is taken between steps, at most once in 200 times the
    time that taking one needs, so it costs at most 0.5 % of the run. It needs memory of the size of a checkpoint on the
    host (for a sharded model on the device). Hooks and values of ``state_dict`` are called as for a checkpoint; the
    hooks of steps that are trained again are called again. Steps that are left out or trained again leave no trace in
    metric objects of the module and of callbacks, in logged values, and in public attributes of the module that are
    numbers, lists, dicts or sets. Checkpoints that were written stay, but those with steps
    that ``"rollback"`` leaves out are written again.

    Args:
        policy: ``"raise"``; ``"skip"``: leave out the step, as if its batches were not in the data; ``"rollback"``:
            leave out ``n`` steps before it, too; if the run was killed before it found the bad step, those since its
            checkpoint at most. A step that is left out counts in ``global_step``; its samples and tokens are not
            counted, and learning rate schedules do not advance in it.
        n: how many steps before the bad one ``"rollback"`` leaves out.
        max_skips: so many bad steps may be left out in one run; the next one is an error.

    Attributes:
        skipped_steps: the numbers of the bad steps that were left out.

    Raises:
        ConfigurationError: for another policy, a negative number, an engine that keeps the state to itself (DeepSpeed,
            Megatron, pipelines, local SGD), fp16 loss scaling, or a loader that can be read only once.

    Example:
        >>> from trainer_kit import Trainer
        >>> guard = NaNGuard("skip")
        >>> trainer = Trainer(max_epochs=1, callbacks=[guard], barebones=True)
        >>> guard.skipped_steps
        []
    """

    def __init__(
        self,
        policy: Literal["raise", "skip", "rollback"] = "raise",
        n: int | None = None,
        max_skips: int = 10,
    ) -> None:
        if policy not in _POLICIES:
            raise ConfigurationError(
                "NaNGuard has no such policy",
                found=repr(policy),
                fix=did_you_mean(str(policy), _POLICIES),
            )
        if (n is not None) != (policy == "rollback") or (n or 0) < 0 or max_skips < 0:
            raise ConfigurationError(
                'n applies to policy="rollback" only: it is the number of steps to leave out before the bad one',
                found=f"policy={policy!r}, n={n}, max_skips={max_skips}",
                fix='NaNGuard("rollback", n=100), or NaNGuard("skip")',
            )
        self.policy = policy
        self.n = n or 0
        self.max_skips = max_skips
        self.skipped_steps: list[int] = []

    @property
    def non_finite(self) -> tuple[str, int, int, list[int]]:
        """The policy, the steps before the bad one, the limit, and the list that the loop fills."""
        return self.policy, self.n, self.max_skips, self.skipped_steps

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            # These belong to another fit; a resumed fit restores its steps after this.
            self.skipped_steps.clear()

    def state_dict(self) -> StateDict:
        return {"skipped_steps": list(self.skipped_steps)}

    def load_state_dict(self, state_dict: SavedState) -> None:
        self.skipped_steps[:] = state_dict["skipped_steps"]
