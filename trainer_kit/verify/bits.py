"""Compares runs that must agree in every bit: a repeated run, a resumed run, and a run with validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from torch import Tensor

from trainer_kit.core.types import Keywords
from trainer_kit.verify.compare import Finding, same_bits
from trainer_kit.verify.recorder import Micro, Record, Watched
from trainer_kit.verify.result import CheckList
from trainer_kit.verify.runs import Runs
from trainer_kit.verify.state import differing_state
from trainer_kit.verify.world import named

__all__ = ["BitChecks"]

_TEXTS: Final = {
    "repeat": "two runs of the same configuration differ",
    "resume": "the resumed run differs from the one that was not interrupted",
    "validation": "training with validation after each step differs from training without it",
}
_HINTS: Final = {
    "repeat": "a nondeterministic kernel (try deterministic=True), or random state that no seed sets",
    "resume": "state that is missing from checkpoints: register it as a buffer, or save it in on_save_checkpoint",
    "validation": "validation changes state that training uses",
}


@final
class BitChecks:
    """Compares runs of the same configuration.

    Args:
        runs: performs the runs.
        checks: gets the results.
    """

    def __init__(self, runs: Runs, checks: CheckList) -> None:
        self._runs = runs
        self._checks = checks
        self._checkpoint = str(runs.directory / "saved")

    def compare(self, validates: bool) -> None:
        """Run the comparisons.

        Args:
            validates: whether there is a loader of validation.
        """
        middle = self._runs.steps // 2
        resumes = self._runs.steps > 1
        saves = None
        if resumes:
            saves = (middle - 1, self._checkpoint)
        # Without reseeds: what is checked here includes the run's own random numbers,
        # which a checkpoint must restore and a validation must not use.
        run = self._runs.train(saves=saves)
        repeated = self._runs.train()
        finding = self._finding("repeat", run, repeated, 0)
        self._checks.add("twice", finding, "a second run is bit-identical")
        if resumes:
            resumed = self._runs.train(resumes=self._checkpoint)
            finding = self._finding("resume", run, resumed, middle)
            text = f"from step {middle}: bit-identical to the uninterrupted run"
            self._checks.add("resume", finding, text)
        else:
            self._checks.skip("resume", "needs at least two steps")
        if validates:
            validated = self._runs.train(validates=True)
            finding = self._finding("validation", run, validated, 0)
            self._checks.add("validation", finding, "bit-identical after each step")
        else:
            self._checks.skip("validation", "no validation loader")

    def _finding(
        self, kind: str, run: list[Record], other: list[Record], start: int
    ) -> Finding | None:
        """The first bit that differs, from step ``start`` on."""
        step = _first_step(run, other, start, self._runs.steps)
        if step is None:
            return None
        # Both runs are made again: outputs of modules are recorded at the step that
        # differs only, because they take memory.
        options: Keywords = {"watched": frozenset({step})}
        watched_run = self._runs.train(**options)
        if kind == "resume":
            options["resumes"] = self._checkpoint
        if kind == "validation":
            options["validates"] = True
        watched_other = self._runs.train(**options)
        module, cause = _first_output(watched_run, watched_other, step)
        hint = _HINTS[kind]
        # Two equal runs hold equal state at the start: what differs later is a consequence.
        if kind != "repeat":
            state = differing_state(watched_run, watched_other, step)
            if state:
                hint += f"; it differs in {named(state)}"
                module = module or state[0]
        text = f"{_TEXTS[kind]}{cause}"
        return Finding(kind=kind, step=step, where=module, text=text, hint=hint)


def _first_step(
    run: list[Record], other_run: list[Record], start: int, steps: int
) -> int | None:
    """The first step at which batches, losses or weights differ."""
    for step in range(start, steps):
        for record, other in zip(run, other_run, strict=True):
            if not _same_micro_batches(record, other, step):
                return step
            if not _same_weights(record, other, step):
                return step
    return None


def _same_micro_batches(record: Record, other: Record, step: int) -> bool:
    for key, micro in record.micros.items():
        if key[0] != step:
            continue
        other_micro = other.micros.get(key)
        if other_micro is None or other_micro.ids != micro.ids:
            return False
        values = [*micro.batch, *micro.loss.values()]
        other_values = [*other_micro.batch, *other_micro.loss.values()]
        if not _all_same_bits(values, other_values):
            return False
    return True


def _same_weights(record: Record, other: Record, step: int) -> bool:
    other_weights = other.weights.get(step, {})
    for name, value in record.weights[step].items():
        if name not in other_weights or not same_bits(value, other_weights[name]):
            return False
    return True


def _all_same_bits(values: Sequence[Tensor], other_values: Sequence[Tensor]) -> bool:
    pairs = zip(values, other_values, strict=True)
    return all(same_bits(value, other) for value, other in pairs)


def _first_output(
    run: list[Record], other_run: list[Record], step: int
) -> tuple[str, str]:
    """The first module whose output is not bit-identical, and what else is known."""
    for record, other in zip(run, other_run, strict=True):
        for key, micro in sorted(record.micros.items()):
            other_micro = other.micros.get(key)
            if key[0] != step or other_micro is None:
                continue
            # The input first: other samples explain every output.
            if other_micro.ids != micro.ids:
                return "", ": they read different samples"
            if not _all_same_bits(micro.batch, other_micro.batch):
                return "", ": the same samples have different contents"
            module = _first_module(micro, other_micro)
            if module is not None:
                return module, ", first in the output of this module"
    return "", ""


def _first_module(micro: Micro, other_micro: Micro) -> str | None:
    watched: Watched | None = micro.watched
    other_watched: Watched | None = other_micro.watched
    if watched is None or other_watched is None:
        return None
    for key, output in watched.outputs.items():
        other_output = other_watched.outputs.get(key)
        if other_output is not None and not same_bits(output, other_output):
            return key[0]
    return None
