"""`verify`: checks a configuration by comparing a few of its steps with a plain loop in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, final

import torch

from trainer_kit import callbacks
from trainer_kit.core.arguments import check_type
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, TrainerKitError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import SetsAccumulation
from trainer_kit.core.state_names import uncompiled
from trainer_kit.launch.processes import no_garbage_in_forks
from trainer_kit.planning.verify_buffers import changes_untrained, compare_buffers
from trainer_kit.planning.verify_compare import (
    Finding,
    Judge,
    Point,
    compare_order,
    compare_samples,
    relative_difference,
    same_bits,
)
from trainer_kit.planning.verify_loaders import Division
from trainer_kit.planning.verify_norms import Shares
from trainer_kit.planning.verify_operations import first_other
from trainer_kit.planning.verify_precision import excessive_rounding, gradients_cancel
from trainer_kit.planning.verify_recorder import Record
from trainer_kit.planning.verify_runs import Runs, locked_directory
from trainer_kit.planning.verify_state import differing_state
from trainer_kit.planning.verify_world import depends, named, same_samples, shares_of
from trainer_kit.precision.aliases import make_precision
from trainer_kit.precision.precision import Precision
from trainer_kit.training.check_module import check_module
from trainer_kit.training.session import Session

__all__ = ["Check", "Verification", "verify"]

_EPS: Final = {
    "64": torch.float64,
    "32": torch.float32,
    "bf16": torch.bfloat16,
    "16": torch.float16,
}
_RESEEDS: Final = 20_26
_SLIGHT: Final = 0.01
"""Relative differences that a layer which changes with each forward explains, such as a spectral norm."""
_FEW: Final = 6
"""Shuffled orders of fewer samples may be equal by chance."""
_SHOWS: Final = (
    callbacks.ModelCheckpoint, callbacks.ModelSummary, callbacks.RichModelSummary, callbacks.TQDMProgressBar,
    callbacks.ProgressBar, callbacks.RichProgressBar, callbacks.LearningRateMonitor, callbacks.DeviceStatsMonitor,
    callbacks.ThroughputMonitor, callbacks.Timer, callbacks.OnExceptionCheckpoint, callbacks.Preemption,
)  # fmt: skip
"""Callbacks that change nothing in training."""
_RANK_OF_KIND: Final = {
    "samples": 0,
    "data": 0,
    "repeat": 1,
    "loop": 3,
    "layout": 3,
    "precision": 3,
}
"""What explains the differences that follow comes first; a check that only repeats another one comes last."""


@final
@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared.
        status: ``"ok"``, ``"differs"``, ``"note"`` (a difference that is usually intended) or ``"not checked"``.
        text: the result, or why it was not checked.
    """

    name: str
    status: str
    text: str


@final
@dataclass
class Verification:
    """The result of `Trainer.verify`.

    Attributes:
        configuration: strategy, precision and ranks, in words.
        steps: optimizer steps of each run.
        checks: every comparison, in order.
        findings: differences that rounding does not explain; the first one is the first in training.
        curve: the difference of the weights, step by step.
    """

    configuration: str
    steps: int
    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    curve: list[Point] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The difference that explains the others, and, of several, the first one in training: step and module."""
        return min(
            self.findings,
            key=lambda finding: _RANK_OF_KIND.get(finding.kind, 2),
            default=None,
        )

    @property
    def unchecked(self) -> list[Check]:
        """What was not checked."""
        return [check for check in self.checks if check.status == "not checked"]

    @property
    def exit_code(self) -> int:
        """0 where nothing differs, else 1."""
        return 0 if self.ok else 1

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {
            "configuration": self.configuration,
            "steps": self.steps,
            "ok": self.ok,
            "checks": [vars(check) for check in self.checks],
            "findings": [vars(finding) for finding in self.findings],
            "curve": [
                {
                    "step": point.step,
                    "difference": _finite(point.difference),
                    "allowed": _finite(point.allowed),
                }
                for point in self.curve
            ],
        }

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        head = f"verify: {self.configuration}, {self.steps} steps against a plain loop"
        lines = [
            f"{check.status:12}{check.name:{width}}  {check.text}"
            for check in self.checks
        ]
        end = f"first difference: {self.first}"
        if self.ok:
            end = "all equal, as far as checked"
            skipped = [check for check in self.checks if check.name == "callbacks"]
            end += "".join(
                f"; not checked: callbacks ({check.text.partition(':')[0]})"
                for check in skipped
            )
        return "\n".join([head, *lines, end])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def verify(
    trainer: Session,
    module: TrainModule,
    loaders: Any = None,
    val_loaders: Any = None,
    datamodule: DataModule | None = None,
    *,
    steps: int = 4,
    local: bool = False,
) -> Verification:
    """See `Trainer.verify`."""
    module = uncompiled(module)
    check_module(module, "fit")
    _refuse(trainer, steps)
    if local:
        _refuse_threads(trainer)
    ranks = f"{trainer.processes} process" + ("es" if trainer.processes > 1 else "")
    configuration = f"strategy {trainer.strategy.name}, precision {trainer.precision_plugin.name}, {ranks}"
    result = Verification(configuration, steps)
    frozen = nullcontext() if local else no_garbage_in_forks()  # it forks many times
    with frozen, locked_directory() as directory:
        runs = Runs(
            trainer, module, loaders, val_loaders, datamodule, steps, directory, local
        )
        runs.start()
        _Verifier(trainer, runs, result).run(runs.validates)
    return result


def _refuse(trainer: Session, steps: int) -> None:
    check_type("Trainer.verify", "steps", steps, int)
    if steps < 1:
        raise ConfigurationError(
            "verify runs at least one step",
            found=f"steps={steps}",
            fix="pass a number such as steps=4",
        )
    if Environment.detect().launched:
        raise ConfigurationError(
            "verify starts the ranks itself",
            found="a process that a launcher started",
            fix="call it in a plain process: python train.py",
        )


def _refuse_threads(trainer: Session) -> None:
    why = trainer.strategy.why_not_in_threads
    device = trainer.strategy.device.type
    if why is not None or device != "cpu":
        raise ConfigurationError(
            "runs in this process take turns on the CPU, with a strategy of torch",
            found=f"strategy {trainer.strategy.name} on {device}"
            + (f": {why}" if why else ""),
            fix='let ranks be processes: verify without local; accelerator="cpu" needs no other device',
        )


@final
class _Verifier:
    """Runs the comparisons in order, and fills the result."""

    def __init__(self, trainer: Session, runs: Runs, result: Verification) -> None:
        self.trainer, self.runs, self.result = trainer, runs, result
        self.judge: Judge

    def note(self, name: str, found: Finding | None, text: str) -> bool:
        """Add a check; returns whether nothing differs."""
        if found is not None:
            self.result.findings.append(found)
        at = (
            ""
            if found is None
            else f"step {found.step}" + (f", {found.where}" if found.where else "")
        )
        self.result.checks.append(
            Check(name, "ok" if found is None else "differs", at or text)
        )
        return found is None

    def skip(self, name: str, why: str) -> None:
        """Add a check that was not made."""
        self.result.checks.append(Check(name, "not checked", why))

    def run(self, validates: bool) -> None:
        """Make all comparisons."""
        chosen = self.runs.chosen(reseeds=_RESEEDS)
        division = _division(chosen)
        exact = self._exact(division)
        if exact.draws and chosen[0].compiled:
            self.skip(
                "compile",
                "compiled random layers draw other numbers: everything runs without the compiler",
            )
            self.runs.run_without_compiler()
            chosen, exact = self.runs.chosen(reseeds=_RESEEDS), self._exact(division)
        single = self.runs.plain(make_precision("32-true"), division)
        name = self.trainer.precision_plugin.name
        rounded = (
            single
            if name == "32-true"
            else self.runs.plain(self.trainer.precision_plugin, division)
        )
        judge = self.judge = Judge(exact, rounded, _eps(name))
        self.loop(division, single)
        self.result.curve = judge.curve(chosen)
        if self.order(chosen, division):
            self.training(judge, chosen, division)
            self.precision(judge, single)
            self.window(chosen, division, exact)
            whole_batch = self.world(chosen, division, exact, single)
            self.buffers(chosen, judge, whole_batch)
        self.bits(validates)
        self.callbacks()

    def precision(self, judge: Judge, single: Record) -> None:
        """Compare the rounding of the plain loop with what the dtype explains."""
        name = self.trainer.precision_plugin.name
        if gradients_cancel(judge.exact):
            self.skip(
                "rounding",
                "the gradients of step 0 cancel: no dtype has a correct digit",
            )
            return
        finding = excessive_rounding(
            judge.exact, judge.rounded, single, _eps(name), name
        )
        if finding is not None and judge.rounded is single and judge.exact.draws:
            self.skip("rounding", "random layers may draw different numbers in float64")
            return
        self.note(
            "rounding",
            finding,
            f"{name}: the errors of the gradients are those of its dtype",
        )

    def buffers(
        self, chosen: list[Record], judge: Judge, whole_batch: Record | None
    ) -> None:
        """Compare buffers and frozen parameters."""
        if not any(values for values in judge.exact.untrained.get(0, [])):
            return
        if any(
            finding.kind not in ("loop", "layout", "precision")
            for finding in self.result.findings
        ):
            self.skip("buffers", "the training differs")
            return
        check = compare_buffers(chosen, judge, whole_batch, self.result.steps)
        self.note(
            "buffers",
            check.finding,
            f"{check.compared} buffers and frozen parameters: those of the plain loop",
        )
        if check.exchanged:
            names = named(check.exchanged)
            self.skip(
                "buffers",
                f"{names}: ranks exchange values, and no process with all samples shows the result",
            )

    def callbacks(self) -> None:
        """Name the callbacks that were left out and that may change training."""
        names = sorted(
            {
                type(callback).__name__
                for callback in self.trainer.callbacks
                if _may_change(callback)
            }
        )
        if names:
            self.skip(
                "callbacks", f"{', '.join(names)}: the compared runs have no callbacks"
            )

    def order(self, chosen: list[Record], division: Division) -> bool:
        """Compare the samples; returns whether the values that are computed from them can be compared."""
        for sampler in sorted(
            {line for record in chosen for line in record.retargeted}
        ):
            text = f"the script made {sampler}; each rank gets its own, as under a launcher"
            self.result.checks.append(Check("samples", "note", text))
        plan = self.runs.order(division)
        if plan is None or any(
            micro.ids is None for record in chosen for micro in record.micros.values()
        ):
            self.skip("samples", "the loader draws no indices of a dataset")
        elif not self.note(
            "samples",
            compare_order(chosen, plan, self.result.steps),
            "those of one process, none twice",
        ):
            return False
        else:
            self.epochs(division)
        exact = self.judge.exact
        device = self.trainer.strategy.device.type
        why = (
            "the loaders divide the data themselves: one process cannot read the shares of the ranks"
            if not self._same_ids(chosen, exact)
            else "random layers draw different numbers where ranks share a sample: set dropout to 0 to compare"
            if exact.draws and len(chosen) > division.places
            else "random layers draw different numbers in float64 on this device: set dropout to 0 to compare"
            if exact.draws and device != "cpu"
            else None
        )
        if why is not None:
            self.skip("training", why)
            return False
        if not any(
            micro.batch for record in chosen for micro in record.micros.values()
        ):
            self.skip("data", "the batches are objects that show no tensors")
            return True
        return self.note(
            "data",
            compare_samples(chosen, exact),
            "the tensors of each batch are equal",
        )

    def _same_ids(self, chosen: list[Record], exact: Record) -> bool:
        """Whether the plain loop reads the samples of each rank."""
        pairs = [
            (micro.ids, exact.micros[at, index * record.places + record.place].ids)
            for record in chosen
            for (at, index), micro in record.micros.items()
            if (at, index * record.places + record.place) in exact.micros
        ]
        unknown = not self.trainer.settings.shard and exact.places > 1
        return all(
            ids == others and (ids is not None or not unknown) for ids, others in pairs
        )

    def epochs(self, division: Division) -> None:
        """Compare the order of two epochs: a sampler that shuffles must know the epoch."""
        record = self.runs.epochs(division)
        first, second = record.orders
        if (
            first is None
            or first != second
            or _is_sequential(first)
            or self.trainer.settings.overfit
        ):
            return
        text = "the second epoch reads the samples in the order of the first"
        hint = "call set_epoch of the sampler in on_train_epoch_start, or let the Trainer divide the data"
        if record.divides:
            self.note(
                "epochs",
                Finding(kind="samples", step=0, where="", text=text, hint=hint),
                "",
            )
        else:
            self.result.checks.append(
                Check(
                    "epochs", "note", f"{text}: a sampler that shuffles needs set_epoch"
                )
            )

    def _exact(self, division: Division) -> Record:
        """The plain loop in float64."""
        try:
            return self.runs.plain(make_precision("64-true"), division)
        except TrainerKitError:
            raise
        except Exception as error:  # it has run in the Trainer's precision
            self._check_plain(division)
            raise ConfigurationError(
                "the module does not run in float64, which verify needs to measure rounding errors",
                found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                fix="cast to self.dtype or to the dtype of another tensor, not to a fixed one",
            ) from error

    def _check_plain(self, division: Division) -> None:
        """Raise where the plain loop does not run in float32 either: then its dtype is not the cause."""
        try:
            self.runs.plain(make_precision("32-true"), division)
        except TrainerKitError:
            raise
        except Exception as error:
            raise ConfigurationError(
                "the module does not run in the plain loop of verify: one process, without a process group",
                found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                fix="call torch.distributed only if torch.distributed.is_initialized()",
            ) from error

    def loop(self, division: Division, single: Record) -> None:
        """Compare our Trainer on one device with the plain loop, both in float32, with the batches of one process."""
        try:
            self._loop(division, single)
        except (KeyError, ValueError, RuntimeError) as error:
            if not self.runs.needs_launcher(error):
                raise
            self._skip_launcher("our loop", error)

    def _loop(self, division: Division, single: Record) -> None:
        name, alone = "our loop", replace(division, places=1, world=1, ranks=())
        if division != alone:
            single = self.runs.plain(make_precision("32-true"), alone)
        if not single.even:
            self.skip(
                name,
                "an accumulation window is incomplete, or an epoch ends within these steps",
            )
            return
        run = self._alone(name, {"alone": 0})
        if run is None:
            return
        equal = all(
            same_bits(run[0].weights[step][key], value)
            for step, weights in single.weights.items()
            for key, value in weights.items()
        )
        text = "one device, float32: equal to the plain loop " + (
            "in bits" if equal else "up to rounding"
        )
        if equal:
            self.note(name, None, text)
            return
        judge = Judge(
            self.runs.plain(make_precision("64-true"), alone), single, _eps("32-true")
        )
        finding = self._first(judge, run)
        if finding is not None:
            options = {"alone": 0, "precision": make_precision("32-true")}
            finding = self._locate(
                judge, alone, finding, make_precision("32-true"), **options
            )
            finding = replace(finding, kind="loop", text=f"one device: {finding.text}")
        self.note(name, finding, text)

    def _alone(self, name: str, options: dict[str, Any]) -> list[Record] | None:
        """One process in float32; None, and a check that says why, where the loaders need the ranks of a launcher."""
        try:
            return self.runs.chosen(
                reseeds=_RESEEDS, precision=make_precision("32-true"), **options
            )
        except (KeyError, ValueError, RuntimeError) as error:
            if not self.runs.needs_launcher(error):
                raise
            self._skip_launcher(name, error)
            return None

    def _skip_launcher(self, name: str, error: Exception) -> None:
        line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self.skip(name, f"setup or the loaders need a launcher: {line}")

    def training(self, judge: Judge, chosen: list[Record], division: Division) -> None:
        """Compare the chosen configuration with the plain loop."""
        found = self._first(judge, chosen)
        if found is not None and found.kind not in (
            "tied",
            "buffers",
            "logged",
            "ranks",
        ):
            found = self._locate(judge, division, found, self.trainer.precision_plugin)
        text = f"losses, gradients, weights, logs: at most {judge.largest:.0%} of the allowed rounding"
        self.note("training", found, text)
        for waits in chosen[0].waiting:
            self.result.checks.append(
                Check(
                    "schedulers",
                    "note",
                    f"{waits}: without validation it does not advance",
                )
            )
        norms = chosen[0].norms
        if norms and division.places > 1:
            text = f"{named(norms)}: each rank normalises its own samples; sync_batchnorm=True those of all ranks"
            if chosen[0].own_buffers:
                text += "; each rank has its own running statistics, and checkpoints hold those of rank 0"
            self.result.checks.append(Check("batch norms", "note", text))

    def _first(self, judge: Judge, run: list[Record]) -> Finding | None:
        """The first difference, by step; in one step, by cause."""
        for step in range(self.result.steps):
            comparisons: list[Callable[[list[Record], int], Finding | None]] = [
                judge.losses,
                judge.gradients,
                judge.weights,
                judge.ranks,
                judge.logged,
            ]
            found = [
                each
                for compare in comparisons
                if (each := compare(run, step)) is not None
            ]
            tied = [each for each in found if each.kind == "tied"]
            if found:
                return (tied or found)[0]
        return None

    def _locate(
        self,
        judge: Judge,
        division: Division,
        found: Finding,
        precision: Precision,
        **options: Any,
    ) -> Finding:
        """Run again with hooks on every module at the step of a difference, and name the first module that differs."""
        watched = frozenset({found.step})
        options = {"reseeds": _RESEEDS, "watched": watched, **options}
        run = self.runs.chosen(**options)
        exact = self.runs.plain(make_precision("64-true"), division, watched)
        rounded = self.runs.plain(precision, division, watched)
        module = Judge(exact, rounded, judge.eps).modules(run, found.step)
        explained = module is not None and module.kind == "backward" and found.hint
        if (
            module is None or explained
        ):  # a wrong factor, or exchange, shows in every gradient of an output
            return found
        text = module.text
        if module.kind == "forward":
            mine = self.runs.chosen(**options, traced=module.where)
            other = self.runs.plain(precision, division, watched, module.where)
            operation = first_other(
                _operations(mine[0], found.step), _operations(other, found.step)
            )
            text += f"; {operation}" if operation else ""
        hint = f"then {found.kind}: {found.text}" + (
            f"; {found.hint}" if found.hint else ""
        )
        return Finding(
            kind=module.kind, step=found.step, where=module.where, text=text, hint=hint
        )

    def window(self, chosen: list[Record], division: Division, exact: Record) -> None:
        """Compare the gradient of the first accumulation window with that of one batch of all its samples."""
        name = "accumulation"
        micro_batches = [index for step, index in chosen[0].micros if step == 0]
        if len(micro_batches) < 2:
            return
        why = self._why_not_whole(chosen, exact)
        if why is None and not self.runs.module.automatic_optimization:
            why = "manual optimization"
        if why is not None:
            self.skip(name, why)
            return
        first = replace(division, counts_windows=True)
        judge = Judge(
            self.runs.plain(make_precision("64-true"), first),
            self.runs.plain(make_precision("32-true"), first),
            _eps("32-true"),
        )
        steps = self._comparable_windows(chosen[0], judge.exact)
        by_batch = shares_of(chosen)
        shares = {
            (step, 0): [
                share
                for index in sorted(micro_batches)
                for share in by_batch[step, index]
            ]
            for step in steps
        }
        samples = sum(map(len, shares[0, 0]))
        options: dict[str, Any] = {
            "alone": samples,
            "one_batch": True,
            "shares": shares if chosen[0].norms else None,
        }
        run = self._alone(name, options)
        if run is None:
            return
        if not all(same_samples(run[0], judge.exact, shares, step) for step in steps):
            self.skip(
                name,
                "a sample has other contents in a larger batch: a random collate_fn, or padding",
            )
            return
        finding = next(
            (
                each
                for step in steps
                if (each := judge.gradients(run, step)) is not None
            ),
            None,
        )
        if finding is not None:
            finding = self._of_window(
                finding, first, options, shares, len(micro_batches)
            )
            if finding is None:
                self.skip(
                    name, "layers change with each forward, which one batch calls once"
                )
                return
        self.note(
            name,
            finding,
            f"one batch of the {samples} samples of a window: the same gradient",
        )

    def _comparable_windows(self, run: Record, exact: Record) -> range:
        """The steps whose windows one batch can replace: the first only, where the module counts batches."""
        changes = any(
            changes_untrained(exact, step, without=run.norms)
            or run.attributes.get(step) != run.attributes.get(0)
            for step in range(self.result.steps)
        )
        return range(1 if changes else self.result.steps)

    def _of_window(
        self,
        found: Finding,
        division: Division,
        options: dict[str, Any],
        shares: Shares,
        batches: int,
    ) -> Finding | None:
        """What makes a window differ from one batch; None where a layer changes with each forward."""
        step = found.step
        watched = frozenset({step})
        options = {
            **options,
            "reseeds": _RESEEDS,
            "precision": make_precision("32-true"),
            "watched": watched,
        }
        run = self.runs.chosen(**options)
        exact, single = (
            self.runs.plain(make_precision(word), division, watched)
            for word in ("64-true", "32-true")
        )
        cause = depends(run[0], Judge(exact, single, _eps("32-true")), shares, step)
        if cause.where:
            return None if changes_untrained(exact, step, cause.where) else cause
        far = max(
            relative_difference(run[0].gradients[step], exact.gradients[step]).values(),
            default=0.0,
        )
        if far < _SLIGHT and changes_untrained(exact, step, without=run[0].norms):
            return None
        text = f"a window of {batches} batches trains otherwise than one batch of its samples"
        return Finding(
            kind="layout",
            step=step,
            where="",
            text=f"{text}: {found.where}, {found.text}",
            hint="a mean over tokens needs loss_weight, which returns their number",
        )

    def _why_not_whole(self, chosen: list[Record], exact: Record) -> str | None:
        """Why one process cannot have the samples of a step as one batch; None: it can."""
        read = [
            micro.ids
            for record in chosen
            for at, micro in record.micros.items()
            if at[0] == 0
        ]
        reasons = (
            (exact.draws, "random layers draw different numbers on each rank"),
            (
                not exact.even,
                "an accumulation window is incomplete, or an epoch ends within these steps",
            ),
            (
                any(ids is None for ids in read) or not self.trainer.settings.shard,
                "the size of a batch is not known",
            ),
            (
                chosen[0].own_batches,
                "the loader makes its batches itself: one process cannot read them as one",
            ),
        )
        return next((text for applies, text in reasons if applies), None)

    def world(
        self, chosen: list[Record], division: Division, exact: Record, single: Record
    ) -> Record | None:
        """Compare with one process that trains on the batches of all ranks as one batch; returns its record.

        In float32: a kernel may sum a larger batch in a different order, which changes low-precision results.
        """
        name = "other world"
        why = (
            "the run has only one process"
            if len(chosen) == 1
            else self._why_not_whole(chosen, exact)
        )
        if why is not None:
            self.skip(name, why)
            return None
        shares = shares_of(chosen)
        samples = sum(
            len(share) for at, each in shares.items() if at[0] == 0 for share in each
        )
        options: dict[str, Any] = {
            "alone": samples,
            "shares": shares if chosen[0].norms else None,
        }
        run = self._alone(name, options)
        if run is None:
            return None
        if whole := sorted(run[0].whole):
            self.skip(
                name,
                f"the input of {named(whole)} does not have the batch as its first dimension",
            )
            return None
        if not all(
            same_samples(run[0], exact, shares, step)
            for step in range(self.result.steps)
        ):
            self.skip(
                name,
                "a sample has other contents in a larger batch: a random collate_fn, or padding",
            )
            return None
        judge = Judge(exact, single, _eps("32-true"))
        finding = self._other_world(run, judge)
        text = f"one process, float32, {samples} samples a step: the same weights"
        if finding is None:
            self.note(
                name,
                None,
                text
                + (
                    ", with batch norms divided as on the ranks"
                    if chosen[0].norms
                    else ""
                ),
            )
            return run[0]
        if finding.kind == "weights":
            text = (
                "the gradients agree, the weights do not: "
                "the optimizer or its schedule depends on the number of ranks"
            )
            self.result.checks.append(Check(name, "note", text))
            return run[0]
        watched = frozenset({finding.step})
        options |= {"precision": make_precision("32-true"), "reseeds": _RESEEDS}
        again = self.runs.chosen(**options, watched=watched)
        plain = [
            self.runs.plain(make_precision(word), division, watched)
            for word in ("64-true", "32-true")
        ]
        self.note(
            name,
            depends(
                again[0], Judge(plain[0], plain[1], judge.eps), shares, finding.step
            ),
            text,
        )
        return run[0]

    def _other_world(self, run: list[Record], judge: Judge) -> Finding | None:
        for step in range(self.result.steps):
            for compare in (judge.gradients, judge.trained):
                finding = compare(run, step)
                if finding is not None:
                    return finding
        return None

    def bits(self, validates: bool) -> None:
        """Compare runs that must agree in every bit: a repeated run, a resumed run, and a run with validation."""
        steps = self.result.steps
        saved = (steps // 2 - 1, str(self.runs.directory / "saved"))
        resumes = steps > 1
        whole = self.runs.chosen(saves=saved if resumes else None)
        again = self.runs.chosen()
        self.note(
            "twice",
            self._bits(whole, again, "repeat", 0),
            "a second run is equal in bits",
        )
        if resumes:
            resumed = self.runs.chosen(resumes=saved[1])
            found = self._bits(whole, resumed, "resume", steps // 2)
            self.note(
                "resume",
                found,
                f"from step {steps // 2}: equal in bits to the run that was not interrupted",
            )
        else:
            self.skip("resume", "needs at least two steps")
        if validates:
            validated = self.runs.chosen(validates=True)
            self.note(
                "validation",
                self._bits(whole, validated, "validation", 0),
                "after each step: equal in bits",
            )
        else:
            self.skip("validation", "no validation loader")

    def _bits(
        self, one: list[Record], other: list[Record], kind: str, start: int
    ) -> Finding | None:
        """The first bit that differs, from step ``start`` on."""
        step = _first_bit(one, other, start, self.result.steps)
        if step is None:
            return None
        watched = frozenset({step})
        texts = {
            "repeat": "two runs of the same configuration differ",
            "resume": "the resumed run differs from the one that was not interrupted",
            "validation": "training with validation after each step differs from training without it",
        }
        everything: dict[str, dict[str, Any]] = {
            "repeat": {},
            "resume": {"resumes": str(self.runs.directory / "saved")},
            "validation": {"validates": True},
        }
        options = everything[kind]
        run, others = (
            self.runs.chosen(watched=watched),
            self.runs.chosen(watched=watched, **options),
        )
        where, what = _first_output(run, others, step)
        state = [] if kind == "repeat" else differing_state(run, others, step)
        if state and not where:
            where = state[0]
        hints = {
            "repeat": "a nondeterministic kernel (try deterministic=True), or random state that no seed sets",
            "resume": "state that no checkpoint holds: register it as a buffer, or save it in on_save_checkpoint",
            "validation": "validation changes state that training uses",
        }
        hint = f"{hints[kind]}; it differs in {named(state)}" if state else hints[kind]
        return Finding(
            kind=kind, step=step, where=where, text=f"{texts[kind]}{what}", hint=hint
        )


def _division(run: list[Record]) -> Division:
    """How a run divides its data."""
    first = run[0]
    ranks = tuple(
        next(record.rank for record in run if record.place == place)
        for place in range(first.places)
    )
    return Division(
        first.places,
        first.seed,
        _RESEEDS,
        first.own_buffers,
        len(run),
        tuple(first.synced),
        ranks,
    )


def _is_sequential(order: list[int]) -> bool:
    """Whether the indices ascend, but for samples that fill the last batch."""
    return (
        len(order) < _FEW
        or sum(after < before for before, after in pairwise(order)) <= 1
    )


def _may_change(callback: Callback) -> bool:
    """Whether a callback may change what is trained: not one that runs in the compared runs, or that only shows."""
    return type(callback) not in _SHOWS and not isinstance(callback, SetsAccumulation)


def _operations(record: Record, step: int) -> list[str]:
    """The operations of the traced module in the first micro-batch of a step."""
    return record.micros[step, 0].operations if (step, 0) in record.micros else []


def _eps(precision: str) -> float:
    word = next((key for key in _EPS if precision.startswith(key)), "bf16")
    return torch.finfo(_EPS[word]).eps


def _first_bit(
    one: list[Record], other: list[Record], start: int, steps: int
) -> int | None:
    for step in range(start, steps):
        for mine, theirs in zip(one, other, strict=True):
            for at, micro in mine.micros.items():
                if at[0] != step:
                    continue
                pair = theirs.micros.get(at)
                if pair is None or pair.ids != micro.ids:
                    return step
                values = zip(
                    [*micro.batch, *micro.loss.values()],
                    [*pair.batch, *pair.loss.values()],
                    strict=True,
                )
                if not all(same_bits(a, b) for a, b in values):
                    return step
            held, found = mine.weights[step], theirs.weights.get(step, {})
            if any(
                name not in found or not same_bits(value, found[name])
                for name, value in held.items()
            ):
                return step
    return None


def _first_output(one: list[Record], other: list[Record], step: int) -> tuple[str, str]:
    """The first module whose output differs in bits, and what else is known."""
    for mine, theirs in zip(one, other, strict=True):
        for at, micro in sorted(mine.micros.items()):
            pair = theirs.micros.get(at)
            if at[0] != step or pair is None:
                continue
            if pair.ids != micro.ids:
                return "", ": they read different samples"
            if not all(
                same_bits(a, b) for a, b in zip(micro.batch, pair.batch, strict=True)
            ):
                return "", ": the same samples have different contents"
            if micro.watched is None or pair.watched is None:
                continue
            for key, value in micro.watched.outputs.items():
                if key in pair.watched.outputs and not same_bits(
                    value, pair.watched.outputs[key]
                ):
                    return key[0], ", first in the output of this module"
    return "", ""
