"""Buffers and frozen parameters of the ranks in `verify`, compared with those of the plain loop."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from trainer_kit.planning.verify_compare import Finding, Judge, percent, same_bits
from trainer_kit.planning.verify_recorder import Record

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
    run: Sequence[Record], judge: Judge, whole_batch: Record | None, steps: int
) -> BufferCheck:
    """Compare what no optimizer trains: with the rank's own in the plain loop, or with one process over all samples.

    A module may exchange a statistic among the ranks itself. Then it has the value of one process that reads the
    samples of all ranks as one batch.

    Args:
        run: one record for each rank.
        judge: of the plain loop.
        whole_batch: one process with the batches of all ranks as one; None: not comparable.
        steps: of the run.
    """
    compared: set[str] = set()
    exchanged: list[str] = []
    for step in range(steps):
        for name, value, exact, rounded in _values(run[0], judge, step):
            compared.add(name)
            if _equal(value, exact, rounded, judge) or name in exchanged:
                continue
            others = (
                None
                if whole_batch is None
                else whole_batch.weights.get(step, {}).get(name)
            )
            if others is None:
                exchanged.append(name)
                continue
            if _near(value, others, exact, rounded):
                continue
            return BufferCheck(
                _changed(name, value, exact, step, len(run)), len(compared)
            )
        for record in run[1:]:
            still = _unmoved(run[0], record, judge, step)
            if still is not None:
                text = f"rank {record.rank} does not change it, and rank 0 does"
                hint = "every rank must update it, or none reads it; checkpoints hold that of rank 0"
                finding = Finding(
                    kind="buffers", step=step, where=still, text=text, hint=hint
                )
                return BufferCheck(finding, len(compared))
    return BufferCheck(None, len(compared), tuple(exchanged))


def _values(
    record: Record, judge: Judge, step: int
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """The name of each untrained tensor of a rank, its value, and those of the plain loop."""
    exact, rounded = (
        judge.exact.untrained.get(step, []),
        judge.rounded.untrained.get(step, []),
    )
    if record.place >= min(len(exact), len(rounded)):
        return
    for name, value in exact[record.place].items():
        local = record.local.get(step, {}).get(name)
        other = rounded[record.place].get(name)
        if local is not None and other is not None and local.shape == value.shape:
            yield name, local, value, other


def _equal(value: Tensor, exact: Tensor, rounded: Tensor, judge: Judge) -> bool:
    if not value.is_floating_point():
        return same_bits(value, rounded.to(value.dtype))
    return judge.excess(value, exact, rounded, torch.finfo(value.dtype).eps) <= 1


def _near(value: Tensor, other: Tensor, exact: Tensor, rounded: Tensor) -> bool:
    """Whether two runs have the same value, up to the rounding that the plain loop shows for it."""
    if value.shape != other.shape:
        return False
    if not value.is_floating_point():
        return same_bits(value, other.to(value.dtype))
    far = float(torch.linalg.vector_norm(value.double() - other.double()))
    size = float(torch.linalg.vector_norm(other.double()))
    measured = float(torch.linalg.vector_norm(rounded.double() - exact.double()))
    return far <= _SLACK * max(measured, _SLACK * torch.finfo(value.dtype).eps * size)


def _changed(name: str, value: Tensor, exact: Tensor, step: int, ranks: int) -> Finding:
    distance = float(torch.linalg.vector_norm(value.double() - exact.double()))
    size = float(torch.linalg.vector_norm(exact.double()))
    text = f"differs by {percent(distance / (size or 1.0))} from that of one rank in the plain loop"
    hint = ""
    if ranks > 1:
        text += ", and from that of one process with the samples of all ranks"
        hint = "a statistic that ranks sum and should average, or an update that depends on the rank"
    return Finding(kind="buffers", step=step, where=name, text=text, hint=hint)


def _unmoved(first: Record, record: Record, judge: Judge, step: int) -> str | None:
    """The first name that rank 0 changes in this step, and another rank does not, although the plain loop does."""
    before, after = first.local.get(step - 1, {}), first.local.get(step, {})
    plain = judge.exact.untrained
    for name, value in record.local.get(step, {}).items():
        if (
            name not in before
            or name not in after
            or name not in plain.get(step, [{}])[0]
        ):
            continue
        moved = not same_bits(before[name], after[name])
        if not moved or same_bits(value, after[name]):
            continue
        earlier = record.local.get(step - 1, {}).get(name)
        still = same_bits(value, before[name]) or (
            earlier is not None and same_bits(value, earlier)
        )
        places = plain.get(step, [])
        if (
            still
            and record.place < len(places)
            and _moves(plain, record.place, name, step)
        ):
            return name
    return None


def _moves(
    plain: dict[int, list[dict[str, Tensor]]], place: int, name: str, step: int
) -> bool:
    """Whether the plain loop changes the value of a place in this step."""
    earlier = plain.get(step - 1)
    if earlier is None:
        return False
    start = earlier[place].get(name)
    return start is not None and not same_bits(start, plain[step][place][name])


def changes_untrained(
    exact: Record, step: int, module: str = "", without: Collection[str] = ()
) -> bool:
    """Whether the plain loop changes buffers or frozen parameters in a step.

    Args:
        exact: the plain loop.
        step: of the run.
        module: only those inside it; empty: all.
        without: modules that are left out.
    """
    before, after = exact.untrained.get(step - 1, []), exact.untrained.get(step, [])
    return any(
        name.startswith(f"{module}." if module else "")
        and name.rpartition(".")[0] not in without
        and name in start
        and not same_bits(value, start[name])
        for start, end in zip(before, after, strict=False)
        for name, value in end.items()
    )
