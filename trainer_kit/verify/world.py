"""What depends on the other samples of a batch: one process with the batches of all ranks as one differs there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor

from trainer_kit.verify.compare import Finding, Judge, same_bits
from trainer_kit.verify.norms import Shares, rows_of_shares
from trainer_kit.verify.recorder import Micro, OutputKey, Record

__all__ = ["depends", "named", "same_samples", "shares_of"]

_IGNORED: Final = -100
"""The class that torch's and transformers' losses leave out of their mean."""


def shares_of(run: Sequence[Record]) -> Shares:
    """The samples of each rank, ranks that share samples once."""
    # The indices of each data rank, by micro-batch.
    samples: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for record in run:
        for key, micro in record.micros.items():
            if micro.ids is not None:
                samples[key].setdefault(record.data_rank, micro.ids)
    shares: Shares = {}
    for key, rank_samples in samples.items():
        shares[key] = [rank_samples[data_rank] for data_rank in sorted(rank_samples)]
    return shares


def same_samples(alone: Record, exact: Record, shares: Shares, step: int) -> bool:
    """Whether one process has the tensors of the ranks as the rows of its batches.

    Args:
        alone: the run in one process.
        exact: the plain loop, which has a batch for each rank.
        shares: the samples of each rank.
        step: the step that is compared.
    """
    for index, micro, rows in _divided_batches(alone, shares, step):
        for data_rank, share in enumerate(rows):
            plain = exact.micros.get((step, index * len(rows) + data_rank))
            if plain is not None and not _has_rows(micro, share, plain):
                return False
    return True


def _divided_batches(
    alone: Record, shares: Shares, step: int
) -> Iterator[tuple[int, Micro, list[Tensor]]]:
    """The micro-batches of a step: index, record, and the rows that each rank has, where they are known."""
    for micro_step, index in sorted(alone.micros):
        micro = alone.micros[micro_step, index]
        if micro_step != step or micro.ids is None:
            continue
        rows = rows_of_shares(micro.ids, shares.get((step, index), []))
        if rows is not None:
            yield index, micro, rows


def _has_rows(micro: Micro, share: Tensor, plain: Micro) -> bool:
    """Whether these rows of a batch are the batch of the plain loop."""
    samples = len(micro.ids or ())
    for tensor, other in zip(micro.batch, plain.batch, strict=False):
        # A tensor without a row for each sample, such as a mask of positions.
        if not tensor.ndim or len(tensor) != samples:
            continue
        rows = tensor[share]
        # A batch that is padded to its longest sample has other lengths.
        if rows.shape != other.shape:
            return False
        if not same_bits(rows, other.to(rows.dtype)):
            return False
    return True


def depends(alone: Record, judge: Judge, shares: Shares, step: int) -> Finding:
    """Name what depends on the other samples of a batch: the first module, or else the loss.

    Args:
        alone: the run in one process, with the outputs of modules at this step.
        judge: compares with plain loops, which have these outputs too.
        shares: the samples of each rank.
        step: the first step that differs.
    """
    for index, micro, rows in _divided_batches(alone, shares, step):
        module = _dependent_module(micro, judge, rows, (step, index))
        if module is not None:
            return Finding(
                kind="layout",
                step=step,
                where=module,
                text="the output for a sample depends on the other samples of its batch",
                hint="each rank computes it from its own samples only",
            )
    losses = _losses(alone, judge.exact, step)
    return Finding(
        kind="layout",
        step=step,
        where="",
        text=f"the loss of one batch is not the mean of the losses of the ranks{losses}",
        hint=_hint(alone),
    )


def _dependent_module(
    micro: Micro, judge: Judge, rows: Sequence[Tensor], batch: tuple[int, int]
) -> str | None:
    """The first module whose output for a rank's rows is not that of a batch of these rows."""
    if micro.watched is None:
        return None
    step, index = batch
    samples = sum(map(len, rows))
    for key, output in micro.watched.outputs.items():
        # Only rows of samples can be assigned to ranks.
        if not output.ndim or len(output) != samples:
            continue
        for data_rank, share in enumerate(rows):
            plain = step, index * len(rows) + data_rank
            exact = _output(judge.exact, plain, key)
            rounded = _output(judge.rounded, plain, key)
            if exact is None or rounded is None:
                continue
            value = output[share]
            if exact.shape == value.shape and judge.excess(value, exact, rounded) > 1:
                return key[0]
    return None


def _output(record: Record, batch: tuple[int, int], key: OutputKey) -> Tensor | None:
    micro = record.micros.get(batch)
    if micro is None or micro.watched is None:
        return None
    return micro.watched.outputs.get(key)


def _losses(alone: Record, exact: Record, step: int) -> str:
    """The first loss of one process and those of the ranks, as the end of a sentence; empty: not known."""
    micro = alone.micros.get((step, 0))
    if micro is None or not micro.loss:
        return ""
    name, loss = next(iter(micro.loss.items()))
    losses: list[str] = []
    for (micro_step, index), plain in exact.micros.items():
        if micro_step != step or index >= exact.data_ranks:
            continue
        if name not in plain.loss:
            return ""
        losses.append(f"{float(plain.loss[name]):.6g}")
    return f": {float(loss):.6g} in one process, {', '.join(losses)} on them"


def _hint(alone: Record) -> str:
    hint = "a mean over tokens needs loss_weight, which returns their number"
    # A batch with ignored targets makes the mean over tokens the likely cause.
    for micro in alone.micros.values():
        if any(bool((value == _IGNORED).any()) for value in micro.batch):
            return hint
    return (
        "a loss over pairs of samples needs those of all ranks: "
        f"torch.distributed.nn.functional.all_gather; {hint}"
    )


def named(names: Sequence[str], limit: int = 3) -> str:
    """The first names, and how many more.

    Example:
        >>> named(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text
