"""`verify`: checks a configuration by comparing a few of its steps with a plain loop in one process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final, final

from trainer_kit import callbacks
from trainer_kit.core.arguments import check_type
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import SetsAccumulation
from trainer_kit.core.state_names import uncompiled
from trainer_kit.core.types import Keywords, Loaders
from trainer_kit.launch.processes import no_garbage_in_forks
from trainer_kit.precision.aliases import make_precision
from trainer_kit.precision.precision import Precision
from trainer_kit.training.check_module import check_module
from trainer_kit.training.session import Session
from trainer_kit.verify.batches import BatchChecks
from trainer_kit.verify.bits import BitChecks
from trainer_kit.verify.buffers import compare_buffers
from trainer_kit.verify.compare import Finding, Judge, same_bits
from trainer_kit.verify.loaders import Division
from trainer_kit.verify.operations import first_other
from trainer_kit.verify.precision import excessive_rounding, gradients_cancel
from trainer_kit.verify.recorder import Record
from trainer_kit.verify.references import RESEEDS, References, eps_of
from trainer_kit.verify.result import Check, CheckList, Verification
from trainer_kit.verify.runs import Runs, locked_directory
from trainer_kit.verify.samples import SampleChecks
from trainer_kit.verify.world import named

__all__ = ["Check", "Verification", "verify"]

_LOOP: Final = "our loop"
_HARMLESS: Final = (
    callbacks.ModelCheckpoint, callbacks.ModelSummary, callbacks.RichModelSummary, callbacks.TQDMProgressBar,
    callbacks.ProgressBar, callbacks.RichProgressBar, callbacks.LearningRateMonitor, callbacks.DeviceStatsMonitor,
    callbacks.ThroughputMonitor, callbacks.Timer, callbacks.OnExceptionCheckpoint, callbacks.Preemption,
)  # fmt: skip
"""Callbacks that change nothing in training."""
_COMPLETE: Final = ("tied", "buffers", "logged", "ranks")
"""Kinds of findings whose text names the cause: no module is searched."""
_SEPARATE: Final = ("loop", "layout", "precision")
"""Kinds of findings that leave the training of the run as it is."""


def verify(
    trainer: Session,
    module: TrainModule,
    loaders: Loaders = None,
    val_loaders: Loaders = None,
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
    ranks = f"{trainer.processes} process"
    if trainer.processes > 1:
        ranks += "es"
    strategy = trainer.strategy.name
    precision = trainer.precision_plugin.name
    configuration = f"strategy {strategy}, precision {precision}, {ranks}"
    result = Verification(configuration, steps)
    # Every run forks this process, and a torch store that a fork collects as garbage may
    # wait for a thread of this process.
    frozen: AbstractContextManager[object] = no_garbage_in_forks()
    if local:
        frozen = nullcontext()
    with frozen, locked_directory() as directory:
        runs = Runs(
            trainer, module, loaders, val_loaders, datamodule, steps, directory, local
        )
        runs.start()
        _Verifier(trainer, runs, result).run()
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
    reason = trainer.strategy.why_not_in_threads
    device = trainer.strategy.device.type
    if reason is None and device == "cpu":
        return
    configuration = f"strategy {trainer.strategy.name} on {device}"
    if reason:
        configuration += f": {reason}"
    raise ConfigurationError(
        "runs in this process take turns on the CPU, with a strategy of torch",
        found=configuration,
        fix='use processes as ranks: verify without local; accelerator="cpu" needs no other device',
    )


@final
class _Verifier:
    """Makes the comparisons in order, and fills the result.

    Args:
        trainer: the configuration that is verified.
        runs: performs the runs.
        result: gets the checks.
    """

    def __init__(self, trainer: Session, runs: Runs, result: Verification) -> None:
        self._trainer = trainer
        self._precision = trainer.precision_plugin
        self._runs = runs
        self._result = result
        self._checks = CheckList(result)
        self._references = References(runs, self._checks)

    def run(self) -> None:
        """Run all comparisons."""
        # The run comes first: only its records tell how it divides the data, which the
        # plain loop must repeat.
        run = self._runs.train(reseeds=RESEEDS)
        division = _division(run)
        exact = self._references.exact(division)
        # Whether steps draw random numbers is known once the plain loop has run.
        if exact.draws and run[0].compiled:
            self._checks.skip(
                "compile",
                "compiled random layers draw other numbers: everything runs without the compiler",
            )
            self._runs.run_without_compiler()
            run = self._runs.train(reseeds=RESEEDS)
            exact = self._references.exact(division)
        float32 = self._references.float32(division)
        name = self._precision.name
        rounded = float32
        if name != "32-true":
            rounded = self._runs.plain(self._precision, division)
        judge = Judge(exact, rounded, eps_of(name))
        self._check_loop(division, float32)
        self._checks.show_curve(judge.curve(run))
        # Runs that read other samples compute other values: comparing them as well would
        # only repeat that difference.
        samples = SampleChecks(self._runs, self._checks)
        if samples.compare(run, division, exact):
            self._check_values(run, division, judge, float32)
        BitChecks(self._runs, self._checks).compare(self._runs.validates)
        self._name_callbacks()

    def _check_values(
        self, run: list[Record], division: Division, judge: Judge, float32: Record
    ) -> None:
        """Compare everything that is computed from the samples."""
        self._check_training(judge, run, division)
        self._check_rounding(judge, float32)
        batches = BatchChecks(
            self._runs, self._references, self._checks, run, division, judge.exact
        )
        batches.compare_window()
        # Buffers come last: statistics that ranks exchange are judged by the run in one
        # process that `compare_world` makes.
        one_batch = batches.compare_world(float32)
        self._check_buffers(run, judge, one_batch)

    # -- the loop and the training -------------------------------------------------------------------------------

    def _check_loop(self, division: Division, float32: Record) -> None:
        """Compare our Trainer on one device with the plain loop, both in float32, with the batches of one process."""
        try:
            self._compare_loop(division, float32)
        except (KeyError, ValueError, RuntimeError) as error:
            self._references.skip_without_launcher(_LOOP, error)

    def _compare_loop(self, division: Division, float32: Record) -> None:
        single = replace(division, data_ranks=1, world=1, ranks=())
        if division != single:
            float32 = self._references.float32(single)
        # The Trainer may treat the rest of an epoch in its own way, which is no error.
        if not float32.even:
            self._checks.skip(
                _LOOP,
                "an accumulation window is incomplete, or an epoch ends within these steps",
            )
            return
        run = self._references.run_alone(_LOOP, {"alone": 0})
        if run is None:
            return
        if _same_weights(run[0], float32):
            text = "one device, float32: bit-identical to the plain loop"
            self._checks.add(_LOOP, None, text)
            return
        # Only now: where bits are equal the run in float64 is saved.
        exact = self._runs.plain(make_precision("64-true"), single)
        judge = Judge(exact, float32, eps_of("32-true"))
        finding = self._first_finding(judge, run)
        if finding is not None:
            precision = make_precision("32-true")
            options = {"alone": 0, "precision": precision}
            finding = self._locate(judge, single, finding, precision, options)
            finding = replace(finding, kind="loop", text=f"one device: {finding.text}")
        text = "one device, float32: equal to the plain loop up to rounding"
        self._checks.add(_LOOP, finding, text)

    def _check_training(
        self, judge: Judge, run: list[Record], division: Division
    ) -> None:
        """Compare the run with the plain loop."""
        finding = self._first_finding(judge, run)
        if finding is not None and finding.kind not in _COMPLETE:
            finding = self._locate(judge, division, finding, self._precision, {})
        text = f"losses, gradients, weights, logs: at most {judge.largest:.0%} of the allowed rounding"
        self._checks.add("training", finding, text)
        for scheduler in run[0].waiting:
            self._checks.remark(
                "schedulers", f"{scheduler}: without validation it does not advance"
            )
        norms = run[0].norms
        if norms and division.data_ranks > 1:
            text = f"{named(norms)}: each rank normalizes its own samples; sync_batchnorm=True those of all ranks"
            if run[0].own_buffers:
                text += "; each rank has its own running statistics, and checkpoints hold those of rank 0"
            self._checks.remark("batch norms", text)

    def _first_finding(self, judge: Judge, run: list[Record]) -> Finding | None:
        """The first difference, by step; in one step, by cause."""
        # In the order of computation: a wrong loss explains gradients, gradients explain
        # weights, and weights explain what the ranks hold.
        comparisons = (
            judge.losses,
            judge.gradients,
            judge.weights,
            judge.ranks,
            judge.logged,
        )
        for step in range(self._result.steps):
            findings = []
            for compare in comparisons:
                finding = compare(run, step)
                if finding is not None:
                    findings.append(finding)
            # Weights that are no longer tied change everything that is computed from them,
            # also what comes earlier in this order.
            for finding in findings:
                if finding.kind == "tied":
                    return finding
            if findings:
                return findings[0]
        return None

    def _locate(
        self,
        judge: Judge,
        division: Division,
        finding: Finding,
        precision: Precision,
        options: Keywords,
    ) -> Finding:
        """Run again with hooks on every module at the step of a difference, and name the first module that differs."""
        step = finding.step
        # One step only: the outputs of all modules are kept in memory.
        watched = frozenset({step})
        options = {"reseeds": RESEEDS, "watched": watched, **options}
        run = self._runs.train(**options)
        exact = self._runs.plain(make_precision("64-true"), division, watched)
        rounded = self._runs.plain(precision, division, watched)
        module_finding = Judge(exact, rounded, judge.eps).modules(run, step)
        if module_finding is None:
            return finding
        if module_finding.kind == "backward" and finding.hint:
            # A wrong factor, or exchange, shows in every gradient of an output.
            return finding
        module = module_finding.where
        text = module_finding.text
        if module_finding.kind == "forward":
            traced = self._runs.train(**options, traced=module)
            plain = self._runs.plain(precision, division, watched, module)
            operation = first_other(
                _operations(traced[0], step), _operations(plain, step)
            )
            if operation:
                text += f"; {operation}"
        hint = f"then {finding.kind}: {finding.text}"
        if finding.hint:
            hint += f"; {finding.hint}"
        return replace(module_finding, text=text, hint=hint)

    # -- rounding, buffers and callbacks -------------------------------------------------------------------------

    def _check_rounding(self, judge: Judge, float32: Record) -> None:
        """Compare the rounding of the plain loop with what the dtype explains."""
        name = self._precision.name
        # A student that starts as a copy of its teacher: every digit is a rounding error.
        if gradients_cancel(judge.exact):
            self._checks.skip(
                "rounding",
                "the gradients of step 0 cancel: no dtype has a correct digit",
            )
            return
        finding = excessive_rounding(
            judge.exact, judge.rounded, float32, eps_of(name), name
        )
        if finding is not None and judge.rounded is float32 and judge.exact.draws:
            self._checks.skip(
                "rounding", "random layers may draw different numbers in float64"
            )
            return
        text = f"{name}: the errors of the gradients are those of its dtype"
        self._checks.add("rounding", finding, text)

    def _check_buffers(
        self, run: list[Record], judge: Judge, one_batch: Record | None
    ) -> None:
        """Compare buffers and frozen parameters."""
        if not any(judge.exact.untrained.get(0, [])):
            return
        # Where weights differ, statistics of what they compute differ too.
        if any(finding.kind not in _SEPARATE for finding in self._checks.findings):
            self._checks.skip("buffers", "the training differs")
            return
        comparison = compare_buffers(run, judge, one_batch, self._result.steps)
        text = f"{comparison.compared} buffers and frozen parameters: those of the plain loop"
        self._checks.add("buffers", comparison.finding, text)
        if comparison.exchanged:
            names = named(comparison.exchanged)
            self._checks.skip(
                "buffers",
                f"{names}: ranks exchange values, and no process with all samples shows the result",
            )

    def _name_callbacks(self) -> None:
        """Name the callbacks that were left out and that may change training."""
        names = {
            type(callback).__name__
            for callback in self._trainer.callbacks
            if _may_change_training(callback)
        }
        if names:
            self._checks.skip(
                "callbacks",
                f"{', '.join(sorted(names))}: the compared runs have no callbacks",
            )


def _division(run: list[Record]) -> Division:
    """How a run divides its data."""
    first = run[0]
    # Ranks of a tensor or pipeline group share their data: the first represents all.
    first_ranks: dict[int, int] = {}
    for record in run:
        first_ranks.setdefault(record.data_rank, record.rank)
    ranks = [first_ranks[data_rank] for data_rank in range(first.data_ranks)]
    return Division(
        first.data_ranks,
        first.seed,
        RESEEDS,
        first.own_buffers,
        len(run),
        tuple(first.synced),
        tuple(ranks),
    )


def _same_weights(run: Record, plain: Record) -> bool:
    """Whether a run has the weights of the plain loop in every bit, after each step."""
    for step, weights in plain.weights.items():
        for name, value in weights.items():
            if not same_bits(run.weights[step][name], value):
                return False
    return True


def _may_change_training(callback: Callback) -> bool:
    """Whether a callback may change what is trained: not one that runs in the compared runs, or that only shows."""
    if isinstance(callback, SetsAccumulation):
        return False
    return type(callback) not in _HARMLESS


def _operations(record: Record, step: int) -> list[str]:
    """The operations of the traced module in the first micro-batch of a step."""
    micro = record.micros.get((step, 0))
    if micro is None:
        return []
    return micro.operations
