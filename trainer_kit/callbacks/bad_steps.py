"""`NaNGuard`, `SpikeDetection`: what a run does about a loss or gradient that is not finite, or far off."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from torch import Tensor

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import ConfigurationError, TrainerKitError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike

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
        for name, value, known in (
            ("mode", mode, ("min", "max")),
            ("action", action, _ACTIONS),
        ):
            if value not in known:
                raise ConfigurationError(
                    f"SpikeDetection(mode=, action=) has no such {name}",
                    found=repr(value),
                    fix=did_you_mean(value, known),
                )
        if window < 1:
            raise ConfigurationError(
                "the running mean needs a window of at least one step",
                found=f"window={window}",
            )
        if warmup < 0 or not rtol >= 0 or (atol is not None and not atol >= 0):
            raise ConfigurationError(
                "warmup, atol and rtol are 0 or more",
                found=f"warmup={warmup}, atol={atol}, rtol={rtol}",
            )
        self.mode, self.window, self.warmup, self.atol, self.rtol = (
            mode,
            window,
            warmup,
            atol,
            rtol,
        )
        self.action, self.exclude_batches_path = action, exclude_batches_path
        self._begin()

    def _begin(self) -> None:
        self.spikes: dict[int, float] = {}
        self._kept: list[tuple[int, Tensor]] = []
        self._window: list[Tensor] = []
        self._recent: deque[float] = deque(maxlen=self.window)
        self._judged = 0
        self.bad_batches: list[int] = []
        self._indices: list[int] = []
        self._batches: dict[
            int, list[int]
        ] = {}  # by step of this epoch, which are not judged yet

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            self._begin()  # forget another fit; a resumed fit restores its state after this

    def state_dict(self) -> dict[str, Any]:
        """Losses that are not judged yet are read here: a sync point of a checkpoint."""
        kept = [
            [step, float(loss)] for step, loss in self._kept
        ]  # sync point: a checkpoint
        return {
            "recent": list(self._recent),
            "judged": self._judged,
            "spikes": dict(self.spikes),
            "kept": kept,
            "bad_batches": list(self.bad_batches),
            "batches": dict(self._batches),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._recent = deque(state_dict["recent"], maxlen=self.window)
        self._judged, self.spikes = state_dict["judged"], dict(state_dict["spikes"])
        self._kept = [(step, torch.tensor(loss)) for step, loss in state_dict["kept"]]
        self._window.clear()  # of a step that `NaNGuard` has left
        self._indices.clear()
        self.bad_batches = list(state_dict.get("bad_batches", ()))
        self._batches = dict(state_dict.get("batches", {}))

    def on_train_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._indices.append(batch_idx)
        if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            self._window.append(outputs["loss"])

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._kept += [(trainer.global_step, loss) for loss in self._window]
        self._window.clear()
        self._batches[trainer.global_step] = self._indices
        self._indices = []
        if trainer.global_step % (trainer.log_every_n_steps or 50) == 0:
            self._judge(trainer)

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._judge(trainer)
        self._batches.clear()

    def _judge(self, trainer: TrainerLike) -> None:
        for step, loss in self._losses(trainer):
            if not math.isfinite(loss):
                continue  # every run looks for these, and `NaNGuard` may train without them
            self._judged += 1
            mean = sum(self._recent) / len(self._recent) if self._recent else loss
            worse = loss - mean if self.mode == "min" else mean - loss
            spike = worse > self.rtol * abs(mean) and (
                self.atol is None or worse > self.atol
            )
            if spike and self._judged > self.warmup:
                self._act(trainer, step, loss, mean)
            else:
                self._recent.append(loss)
        last = trainer.global_step
        self._batches = {last: self._batches[last]} if last in self._batches else {}

    def _losses(self, trainer: TrainerLike) -> list[tuple[int, float]]:
        """The mean loss of each step over its micro-batches and all ranks, equal on every rank."""
        kept, self._kept = self._kept, []
        last = trainer.global_step
        values = (
            torch.stack([loss.reshape(()).float() for _, loss in kept]).tolist()
            if kept
            else []
        )  # sync point
        own = [(step, value) for (step, _), value in zip(kept, values, strict=True)]
        first = min((step for step, _ in own), default=last)
        world = trainer.strategy.world
        first = int(min(row[0] for row in world.agree([first])))
        sums = [0.0] * (2 * (last - first + 1))
        for step, value in own:
            sums[2 * (step - first)] += value
            sums[2 * (step - first) + 1] += 1
        totals = [sum(column) for column in zip(*world.agree(sums), strict=True)]
        pairs = zip(totals[::2], totals[1::2], strict=True)
        return [
            (first + i, total / count)
            for i, (total, count) in enumerate(pairs)
            if count
        ]

    def _act(self, trainer: TrainerLike, step: int, loss: float, mean: float) -> None:
        self.spikes[step] = loss
        self.bad_batches += [
            *self._batches.get(step - 1, ()),
            *self._batches.get(step, ()),
        ]
        if self.exclude_batches_path is not None and trainer.is_global_zero:
            self._write_batches(Path(self.exclude_batches_path))
        problem = f"the loss jumped to {loss:.6g} at step {step}"
        found = f"the mean of the {len(self._recent)} steps before is {mean:.6g}"
        if self.action == "raise":
            raise TrainerKitError(
                problem,
                found=found,
                fix="lower the learning rate, clip gradients, or inspect the batches of this step",
            )
        if self.action == "stop":
            trainer.request_checkpoint(problem)
            trainer.stop(f"{problem}; {found}")
        else:
            trainer.print(f"{problem}; {found}")

    def _write_batches(self, path: Path) -> None:
        file = path if path.suffix == ".json" else path / "skip_batches.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(self.bad_batches, indent=4).encode())


_POLICIES: Final = ("raise", "skip", "rollback")


@final
class NaNGuard(Callback):
    """Find the step whose loss or gradient is NaN or infinite, and raise there, or train without that step.

    Without this callback such a loss ends the run with an error that names its step, batch and samples. With it, the
    run holds a copy of its state in memory. Once a loss is not finite, the steps since that copy are trained again,
    each with a look at its loss and gradients. So the error names the loss or the first bad parameter, and a policy can
    leave the step out: the result is that of a run that never saw its batches.

    A good step has no cost and no device synchronisation. A copy is taken between steps, at most once in 200 times the
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
        self.policy, self.n, self.max_skips = policy, n or 0, max_skips
        self.skipped_steps: list[int] = []

    @property
    def non_finite(self) -> tuple[str, int, int, list[int]]:
        """What the loop asks: policy, steps before the bad one, limit, and the list that it fills."""
        return self.policy, self.n, self.max_skips, self.skipped_steps

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            self.skipped_steps.clear()  # of another fit; a resumed fit restores its own after this

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": list(self.skipped_steps)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.skipped_steps[:] = state_dict["skipped_steps"]
