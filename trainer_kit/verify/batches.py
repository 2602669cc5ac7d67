"""Compares a run with one process that trains on the samples of a step, or of a window, as one batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, final

from trainer_kit.core.display import plural
from trainer_kit.core.types import Keywords
from trainer_kit.precision.aliases import make_precision
from trainer_kit.verify.buffers import changes_untrained
from trainer_kit.verify.compare import Finding, Judge, relative_difference
from trainer_kit.verify.loaders import Division
from trainer_kit.verify.norms import Shares
from trainer_kit.verify.recorder import Record
from trainer_kit.verify.references import RESEEDS, References, eps_of
from trainer_kit.verify.result import CheckList
from trainer_kit.verify.runs import Runs
from trainer_kit.verify.world import depends, named, same_samples, shares_of

__all__ = ["BatchChecks"]

_WINDOW: Final = "accumulation"
_WORLD: Final = "other world"
_SLIGHT: Final = 0.01
"""Relative differences that a layer which changes with each forward explains, such as a spectral norm."""
_OTHER_CONTENTS: Final = (
    "a sample has different contents in a larger batch: a random collate_fn, or padding"
)


@final
class BatchChecks:
    """Compares a run with one process that has its samples as one batch.

    Args:
        runs: performs the runs.
        references: performs the runs in one process.
        checks: gets the results.
        run: the verified configuration.
        division: how it divides its data.
        exact: the plain loop in float64.
    """

    def __init__(
        self,
        runs: Runs,
        references: References,
        checks: CheckList,
        run: list[Record],
        division: Division,
        exact: Record,
    ) -> None:
        self._runs = runs
        self._references = references
        self._checks = checks
        self._run = run
        self._division = division
        self._exact = exact
        self._steps = runs.steps

    def compare_window(self) -> None:
        """Compare the gradient of the first accumulation window with that of one batch of all its samples."""
        indices = sorted(index for step, index in self._run[0].micros if step == 0)
        # Without accumulation there is no window to replace.
        if len(indices) < 2:
            return
        reason = self._reason_against_one_batch()
        if reason is None and not self._runs.module.automatic_optimization:
            reason = "manual optimization"
        if reason is not None:
            self._checks.skip(_WINDOW, reason)
            return
        # One batch replaces a window: a module that uses the number of its batch must see
        # the same numbers in the plain loop.
        division = replace(self._division, counts_windows=True)
        judge = self._references.judge_float32(division)
        steps = self._comparable_windows(judge.exact)
        shares = _window_shares(self._run, steps, indices)
        samples = sum(map(len, shares[0, 0]))
        options: Keywords = {
            "alone": samples,
            "one_batch": True,
            "shares": self._shares_of_norms(shares),
        }
        alone = self._references.run_alone(_WINDOW, options)
        if alone is None:
            return
        if not all(same_samples(alone[0], judge.exact, shares, step) for step in steps):
            self._checks.skip(_WINDOW, _OTHER_CONTENTS)
            return
        finding = _first_gradient(judge, alone, steps)
        if finding is not None:
            finding = self._explain_window(
                finding, division, options, shares, len(indices)
            )
            if finding is None:
                self._checks.skip(
                    _WINDOW,
                    "layers change with each forward, which one batch calls once",
                )
                return
        text = f"one batch of the {plural(samples, 'sample')} of a window: the same gradient"
        self._checks.add(_WINDOW, finding, text)

    def _comparable_windows(self, exact: Record) -> range:
        """The steps whose windows one batch can replace: the first only, where the module counts batches."""
        record = self._run[0]
        # A buffer or an attribute that each batch changes has other values after one batch
        # than after a window, so later steps start from different states.
        for step in range(self._steps):
            if changes_untrained(exact, step, without=record.norms):
                return range(1)
            if record.attributes.get(step) != record.attributes.get(0):
                return range(1)
        return range(self._steps)

    def _shares_of_norms(self, shares: Shares) -> Shares | None:
        """The parts of a batch that batch norms normalize by themselves; None without batch norms."""
        if not self._run[0].norms:
            return None
        return shares

    def _explain_window(
        self,
        finding: Finding,
        division: Division,
        options: Keywords,
        shares: Shares,
        batches: int,
    ) -> Finding | None:
        """What makes a window differ from one batch; None where a layer changes with each forward."""
        step = finding.step
        alone = self._run_watched(step, options)
        judge = self._references.judge_float32(division, frozenset({step}))
        exact = judge.exact
        cause = depends(alone, judge, shares, step)
        if cause.where:
            # A layer that updates its state in each forward, such as a spectral norm, does
            # so once for one batch and several times in a window: no fault of the user.
            if changes_untrained(exact, step, cause.where):
                return None
            return cause
        differences = relative_difference(alone.gradients[step], exact.gradients[step])
        largest = max(differences.values(), default=0.0)
        if largest < _SLIGHT and changes_untrained(exact, step, without=alone.norms):
            return None
        text = f"a window of {plural(batches, 'batch')} trains differently from one batch of its samples"
        return Finding(
            kind="layout",
            step=step,
            where="",
            text=f"{text}: {finding.where}, {finding.text}",
            hint="a mean over tokens needs loss_weight, which returns their number",
        )

    def _run_watched(self, step: int, options: Keywords) -> Record:
        """The run in one process again, with the outputs of modules at a step."""
        records = self._runs.train(
            reseeds=RESEEDS,
            precision=make_precision("32-true"),
            watched=frozenset({step}),
            **options,
        )
        return records[0]

    def _reason_against_one_batch(self) -> str | None:
        """Why one process cannot have the samples of a step as one batch; None: it can."""
        # Masks of dropout differ between one batch and its parts.
        if self._exact.draws:
            return "random layers draw different numbers on each rank"
        if not self._exact.even:
            return "an accumulation window is incomplete, or an epoch ends within these steps"
        if not self._runs.trainer.settings.shard or not self._has_indices():
            return "the size of a batch is not known"
        if self._run[0].own_batches:
            return "the loader makes its batches itself: one process cannot read them as one"
        return None

    def _has_indices(self) -> bool:
        """Whether the samples of the first step are known."""
        for record in self._run:
            for (step, _), micro in record.micros.items():
                if step == 0 and micro.ids is None:
                    return False
        return True

    def compare_world(self, rounded: Record) -> Record | None:
        """Compare with one process that trains on the batches of all ranks as one batch; returns its record.

        In float32: a kernel may sum a larger batch in a different order, which changes low-precision results.

        Args:
            rounded: the plain loop in float32.
        """
        if len(self._run) == 1:
            reason: str | None = "the run has only one process"
        else:
            reason = self._reason_against_one_batch()
        if reason is not None:
            self._checks.skip(_WORLD, reason)
            return None
        shares = shares_of(self._run)
        samples = _samples_of_step(shares, 0)
        options: Keywords = {
            "alone": samples,
            "shares": self._shares_of_norms(shares),
        }
        alone = self._references.run_alone(_WORLD, options)
        if alone is None:
            return None
        # Batch norms over other rows than those of a rank explain any difference.
        undivided = sorted(alone[0].whole)
        if undivided:
            self._checks.skip(
                _WORLD,
                f"the input of {named(undivided)} does not have the batch as its first dimension",
            )
            return None
        for step in range(self._steps):
            # Padding to the longest sample, for example, depends on the batch.
            if not same_samples(alone[0], self._exact, shares, step):
                self._checks.skip(_WORLD, _OTHER_CONTENTS)
                return None
        judge = Judge(self._exact, rounded, eps_of("32-true"))
        finding = self._first_difference(alone, judge)
        self._add_world(finding, samples, shares, options)
        return alone[0]

    def _add_world(
        self,
        finding: Finding | None,
        samples: int,
        shares: Shares,
        options: Keywords,
    ) -> None:
        """Add the result of `compare_world`, with the module that depends on the other samples of a batch."""
        text = f"one process, float32, {plural(samples, 'sample')} a step: the same weights"
        if finding is None:
            if self._run[0].norms:
                text += ", with batch norms split as on the ranks"
            self._checks.add(_WORLD, None, text)
            return
        if finding.kind == "weights":
            self._checks.remark(
                _WORLD,
                "the gradients agree, the weights do not: "
                "the optimizer or its schedule depends on the number of ranks",
            )
            return
        step = finding.step
        alone = self._run_watched(step, options)
        judge = self._references.judge_float32(self._division, frozenset({step}))
        self._checks.add(_WORLD, depends(alone, judge, shares, step), text)

    def _first_difference(self, alone: list[Record], judge: Judge) -> Finding | None:
        for step in range(self._steps):
            # Gradients first: only where they agree do weights accuse the optimizer.
            finding = judge.gradients(alone, step)
            if finding is None:
                finding = judge.trained(alone, step)
            if finding is not None:
                return finding
        return None


def _window_shares(run: list[Record], steps: range, indices: list[int]) -> Shares:
    """The samples of each batch of a window, by step, as the parts of one batch."""
    shares_by_batch = shares_of(run)
    shares: Shares = {}
    for step in steps:
        shares[step, 0] = []
        for index in indices:
            shares[step, 0] += shares_by_batch[step, index]
    return shares


def _samples_of_step(shares: Shares, step: int) -> int:
    samples = 0
    for key, parts in shares.items():
        if key[0] == step:
            samples += sum(map(len, parts))
    return samples


def _first_gradient(judge: Judge, run: list[Record], steps: range) -> Finding | None:
    for step in steps:
        finding = judge.gradients(run, step)
        if finding is not None:
            return finding
    return None
