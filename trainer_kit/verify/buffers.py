"""Buffers and frozen parameters of the ranks in `verify`, compared with those of the plain loop."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from trainer_kit.verify.compare import Finding, Judge, percent, same_bits
from trainer_kit.verify.recorder import Record

__all__ = ["BufferCheck", "changes_untrained", "compare_buffers"]

_SLACK: Final = 10.0
"""How many times the measured rounding error two runs may differ from each other."""


@final
@dataclass(frozen=True)
class BufferCheck:
    """The result of the comparison.

    Attributes:
        finding: the first difference; None: none.
        compared: number of compared names.
        exchanged: names whose values come from all ranks, where no process with all samples shows what they should be.
    """

    finding: Finding | None
    compared: int
    exchanged: tuple[str, ...] = ()


def compare_buffers(
    run: Sequence[Record], judge: Judge, one_batch: Record | None, steps: int
) -> BufferCheck:
    """Compare what no optimizer trains: with the rank's own in the plain loop, or with one process over all samples.

    A module may exchange a statistic among the ranks itself. Then it has the value of one process that reads the
    samples of all ranks as one batch.

    Args:
        run: one record for each rank.
        judge: compares with the plain loop.
        one_batch: one process with the batches of all ranks as one; None: not comparable.
        steps: number of steps of the run.
    """
    compared: set[str] = set()
    exchanged: list[str] = []
    for step in range(steps):
        for name, value, exact, rounded in _values(run[0], judge, step):
            compared.add(name)
            # A buffer that differs at one step starts the next one from another value: it
            # is judged no more.
            if name in exchanged or _equal(value, exact, rounded, judge):
                continue
            expected = None
            if one_batch is not None:
                expected = one_batch.weights.get(step, {}).get(name)
            if expected is None:
                exchanged.append(name)
            elif not _near(value, expected, exact, rounded):
                finding = _changed(name, value, exact, step, len(run))
                return BufferCheck(finding, len(compared))
        for record in run[1:]:
            unmoved = _unmoved(run[0], record, judge, step)
            if unmoved is not None:
                finding = Finding(
                    kind="buffers",
                    step=step,
                    where=unmoved,
                    text=f"rank {record.rank} does not change it, and rank 0 does",
                    hint="every rank must update it, or none may read it; checkpoints contain rank 0's",
                )
                return BufferCheck(finding, len(compared))
    return BufferCheck(None, len(compared), tuple(exchanged))


def _values(
    record: Record, judge: Judge, step: int
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """The name of each untrained tensor of a rank, its value, and those of the plain loop."""
    exact = judge.exact.untrained.get(step, [])
    rounded = judge.rounded.untrained.get(step, [])
    # Nothing is recorded for a step that the plain loop has not reached.
    if record.data_rank >= min(len(exact), len(rounded)):
        return
    values = record.local.get(step, {})
    rounded_values = rounded[record.data_rank]
    for name, exact_value in exact[record.data_rank].items():
        if name not in values or name not in rounded_values:
            continue
        if values[name].shape == exact_value.shape:
            yield name, values[name], exact_value, rounded_values[name]


def _equal(value: Tensor, exact: Tensor, rounded: Tensor, judge: Judge) -> bool:
    # Counters and masks have no rounding.
    if not value.is_floating_point():
        return same_bits(value, rounded.to(value.dtype))
    eps = torch.finfo(value.dtype).eps
    return judge.excess(value, exact, rounded, eps) <= 1


def _near(value: Tensor, other: Tensor, exact: Tensor, rounded: Tensor) -> bool:
    """Whether two runs have the same value, up to the rounding that the plain loop shows for it."""
    if value.shape != other.shape:
        return False
    if not value.is_floating_point():
        return same_bits(value, other.to(value.dtype))
    measured = _distance(rounded, exact)
    # The measured error may be 0 by chance, or because the plain loop leaves the value as
    # it is.
    last_place = torch.finfo(value.dtype).eps * _norm(other)
    allowed = _SLACK * max(measured, _SLACK * last_place)
    return _distance(value, other) <= allowed


def _distance(value: Tensor, other: Tensor) -> float:
    return _norm(value.double() - other.double())


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


def _changed(name: str, value: Tensor, exact: Tensor, step: int, ranks: int) -> Finding:
    difference = _distance(value, exact) / (_norm(exact) or 1.0)
    text = f"differs by {percent(difference)} from that of one rank in the plain loop"
    hint = ""
    if ranks > 1:
        text += ", and from that of one process with the samples of all ranks"
        hint = "a statistic that ranks sum and should average, or an update that depends on the rank"
    return Finding(kind="buffers", step=step, where=name, text=text, hint=hint)


def _unmoved(first: Record, record: Record, judge: Judge, step: int) -> str | None:
    """The first name that rank 0 changes in this step, and another rank does not, although the plain loop does."""
    plain = judge.exact.untrained
    if record.data_rank >= len(plain.get(step, [])):
        return None
    first_before = first.local.get(step - 1, {})
    first_after = first.local.get(step, {})
    before = record.local.get(step - 1, {})
    for name, value in record.local.get(step, {}).items():
        if name not in first_before or name not in first_after:
            continue
        # Trained parameters are compared elsewhere.
        if name not in plain[step][0]:
            continue
        if same_bits(first_before[name], first_after[name]):
            continue
        if same_bits(value, first_after[name]):
            continue
        # The rank has the old value of rank 0, which is sent before each step, or its own.
        unmoved = same_bits(value, first_before[name])
        if name in before:
            unmoved = unmoved or same_bits(value, before[name])
        if unmoved and _moves(plain, record.data_rank, name, step):
            return name
    return None


def _moves(
    plain: dict[int, list[dict[str, Tensor]]], data_rank: int, name: str, step: int
) -> bool:
    """Whether the plain loop changes the value of a data rank in this step."""
    before = plain.get(step - 1)
    if before is None or name not in before[data_rank]:
        return False
    return not same_bits(before[data_rank][name], plain[step][data_rank][name])


def changes_untrained(
    exact: Record, step: int, module: str = "", without: Collection[str] = ()
) -> bool:
    """Whether the plain loop changes buffers or frozen parameters in a step.

    Args:
        exact: the plain loop.
        step: the step of the run.
        module: only those inside it; empty: all.
        without: names of modules that are left out.
    """
    prefix = ""
    if module:
        prefix = f"{module}."
    values_before = exact.untrained.get(step - 1, [])
    values_after = exact.untrained.get(step, [])
    for before, after in zip(values_before, values_after, strict=False):
        for name, value in after.items():
            if not name.startswith(prefix) or name not in before:
                continue
            if name.rpartition(".")[0] in without:
                continue
            if not same_bits(value, before[name]):
                return True
    return False
