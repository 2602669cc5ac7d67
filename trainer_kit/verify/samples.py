"""Compares which samples the ranks of a run read with those that one process reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, final

from torch import Tensor

from trainer_kit.core.display import plural
from trainer_kit.verify.compare import Finding, same_bits
from trainer_kit.verify.loaders import Division
from trainer_kit.verify.recorder import Micro, Record
from trainer_kit.verify.result import CheckList
from trainer_kit.verify.runs import Runs

__all__ = ["SampleChecks", "compare_order", "compare_samples"]

_FEW_SAMPLES: Final = 6
"""Shuffled orders of fewer samples may be equal by chance."""


@final
class SampleChecks:
    """Compares the samples of a run.

    Args:
        runs: performs the runs.
        checks: gets the results.
    """

    def __init__(self, runs: Runs, checks: CheckList) -> None:
        self._runs = runs
        self._checks = checks
        self._settings = runs.trainer.settings

    def compare(self, run: list[Record], division: Division, exact: Record) -> bool:
        """Compare the samples; returns whether the values that are computed from them can be compared.

        Args:
            run: the verified configuration.
            division: how it divides its data.
            exact: the plain loop in float64.
        """
        samplers: set[str] = set()
        for record in run:
            samplers.update(record.retargeted)
        for sampler in sorted(samplers):
            self._checks.remark(
                "samples",
                f"the script made {sampler}; each rank gets its own, as under a launcher",
            )
        if not self._compare_indices(run, division):
            return False
        reason = self._reason_against_training(run, division, exact)
        if reason is not None:
            self._checks.skip("training", reason)
            return False
        if not any(micro.batch for micro in _micro_batches(run)):
            self._checks.skip("data", "the batches are objects that show no tensors")
            return True
        finding = compare_samples(run, exact)
        return self._checks.add("data", finding, "the tensors of each batch are equal")

    def _compare_indices(self, run: list[Record], division: Division) -> bool:
        """Compare the dataset's indices; returns whether they are equal, or unknown."""
        plan = self._runs.order(division)
        # A stream, or a loader of another library, has no indices.
        ids = [micro.ids for micro in _micro_batches(run)]
        if plan is None or None in ids:
            self._checks.skip("samples", "the loader draws no indices of a dataset")
            return True
        finding = compare_order(run, plan, self._runs.steps)
        if not self._checks.add("samples", finding, "those of one process, none twice"):
            return False
        self._compare_epochs(division)
        return True

    def _compare_epochs(self, division: Division) -> None:
        """Compare the order of two epochs: a sampler that shuffles must know the epoch."""
        record = self._runs.epochs(division)
        first_order, second_order = record.orders
        if first_order is None or first_order != second_order:
            return
        # These orders are the same in each epoch by intent.
        if _is_sequential(first_order) or self._settings.overfit:
            return
        text = "the second epoch reads the samples in the order of the first"
        # A sampler that does not divide the data may repeat its order by intent; one that
        # does lacks its `set_epoch`.
        if not record.divides:
            self._checks.remark(
                "epochs", f"{text}: a sampler that shuffles needs set_epoch"
            )
            return
        finding = Finding(
            kind="samples",
            step=0,
            where="",
            text=text,
            hint="call set_epoch of the sampler in on_train_epoch_start, or let the Trainer shard the data",
        )
        self._checks.add("epochs", finding, "")

    def _reason_against_training(
        self, run: list[Record], division: Division, exact: Record
    ) -> str | None:
        """Why the training cannot be compared with the plain loop; None: it can."""
        if not self._reads_same_indices(run, exact):
            return "the loaders shard the data themselves: one process cannot read the shards of the ranks"
        if not exact.draws:
            return None
        # Random layers are compared only where the same generator draws the same numbers in
        # the same order: one rank for each micro-batch, and on the CPU.
        if len(run) > division.data_ranks:
            return "random layers draw different numbers where ranks share a sample: set dropout to 0 to compare"
        if self._runs.trainer.strategy.device.type != "cpu":
            return "random layers draw different numbers in float64 on this device: set dropout to 0 to compare"
        return None

    def _reads_same_indices(self, run: list[Record], exact: Record) -> bool:
        """Whether the plain loop reads the samples of each rank."""
        needs_indices = not self._settings.shard and exact.data_ranks > 1
        for record in run:
            for (step, index), micro in record.micros.items():
                key = step, index * record.data_ranks + record.data_rank
                if key not in exact.micros:
                    continue
                if micro.ids != exact.micros[key].ids:
                    return False
                # Without indices nothing shows whether the loader has given both the same
                # samples, unless the Trainer divides them.
                if micro.ids is None and needs_indices:
                    return False
        return True


def _micro_batches(run: list[Record]) -> list[Micro]:
    micro_batches: list[Micro] = []
    for record in run:
        micro_batches += record.micros.values()
    return micro_batches


def _is_sequential(order: list[int]) -> bool:
    """Whether the indices ascend, but for samples that fill the last batch."""
    if len(order) < _FEW_SAMPLES:
        return True
    # One descent: the first samples may come again, to fill the last batch.
    descents = sum(after < before for before, after in pairwise(order))
    return descents <= 1


def compare_order(
    run: Sequence[Record], plan: Sequence[int], steps: int
) -> Finding | None:
    """Compare the samples of each step with those that one process reads; each step may have them in any order.

    Args:
        run: one record for each rank.
        plan: the dataset's indices as one process reads them.
        steps: number of steps of the run.
    """
    # The position in the plan behind the samples of the steps so far.
    start = 0
    for step in range(steps):
        samples_by_batch = _samples_of_step(run, step)
        samples: list[int] = []
        for key in sorted(samples_by_batch):
            samples += samples_by_batch[key]
        stop = start + len(samples)
        expected = Counter(plan[start:stop])
        start = stop
        counts = Counter(samples)
        if not samples or expected == counts:
            continue
        # A sample that is read too often explains why others are missing.
        repeated = [
            sample
            for sample, count in counts.items()
            if count > 1 and expected[sample] <= 1
        ]
        if repeated:
            return _repeated_sample(repeated, samples_by_batch, counts, step)
        unexpected = [f"sample {sample}" for sample in counts - expected]
        return Finding(
            kind="samples",
            step=step,
            where=next(iter(unexpected), ""),
            text="a single process does not read it in this step",
            hint="the order of the data depends on the number of ranks",
        )
    return None


def _samples_of_step(
    run: Sequence[Record], step: int
) -> dict[tuple[int, int], list[int]]:
    """The dataset's indices by micro-batch and data rank."""
    samples: dict[tuple[int, int], list[int]] = {}
    for record in run:
        for (micro_step, index), micro in record.micros.items():
            if micro_step == step and micro.ids is not None:
                samples[index, record.data_rank] = micro.ids
    return samples


def _repeated_sample(
    repeated: Sequence[int],
    samples_by_batch: Mapping[tuple[int, int], list[int]],
    counts: Counter[int],
    step: int,
) -> Finding:
    """Name the first sample that is read several times, and the ranks that read it."""
    sample = repeated[0]
    data_ranks = {
        data_rank
        for (_, data_rank), samples in samples_by_batch.items()
        if sample in samples
    }
    names = ", ".join(map(str, sorted(data_ranks)))
    ranks = f"rank {names}"
    if len(data_ranks) > 1:
        ranks = f"ranks {names}"
    text = f"read {counts[sample]} times in this step, by {ranks}"
    if len(repeated) > 1:
        text += f", and {plural(len(repeated) - 1, 'other sample')}"
    return Finding(
        kind="samples",
        step=step,
        where=f"sample {sample}",
        text=text,
        hint="the sampler does not shard the data across ranks, or repeats samples",
    )


def compare_samples(run: Sequence[Record], exact: Record) -> Finding | None:
    """Compare the tensors of each batch with those that the plain loop reads."""
    micro_batches = []
    for record in run:
        for key, micro in record.micros.items():
            micro_batches.append((key, record.data_rank, record, micro))
    # In the order of training, so that the first difference is named.
    micro_batches.sort(key=lambda entry: entry[:2])
    for (step, index), data_rank, record, micro in micro_batches:
        plain = exact.micros.get((step, index * record.data_ranks + data_rank))
        # Other samples are the finding of `compare_order`; another structure of the batch
        # has no tensors to compare in pairs.
        if plain is None or plain.ids != micro.ids:
            continue
        if len(plain.batch) != len(micro.batch):
            continue
        for tensor, other in zip(micro.batch, plain.batch, strict=True):
            if tensor.shape == other.shape and not _has_same_bits(tensor, other):
                location = _differing_row(micro, tensor, other)
                return _other_contents(
                    record, exact, step, location or f"batch {index}"
                )
    return None


def _has_same_bits(tensor: Tensor, plain: Tensor) -> bool:
    """Whether two tensors are equal in the dtype of the first."""
    # The plain loop in float64 converts batches that the run has in a smaller dtype.
    return same_bits(tensor, plain.to(tensor.dtype))


def _differing_row(micro: Micro, tensor: Tensor, plain: Tensor) -> str:
    """The first sample whose row differs; empty where rows are not samples."""
    if micro.ids is None or not tensor.ndim or len(tensor) != len(micro.ids):
        return ""
    for row, sample in enumerate(micro.ids):
        if not _has_same_bits(tensor[row], plain[row]):
            return f"sample {sample}"
    return f"sample {micro.ids[0]}"


def _other_contents(record: Record, exact: Record, step: int, location: str) -> Finding:
    micro_batches = [*record.micros.values(), *exact.micros.values()]
    if any(micro.changed for micro in micro_batches):
        return Finding(
            kind="data",
            step=step,
            where=location,
            text="has different contents than in one process: training_step changes its batch in place",
            hint="change a copy: x = x + 1 or x.clone(), not x.add_(1); otherwise the dataset keeps the changed values",
        )
    return Finding(
        kind="data",
        step=step,
        where=location,
        text=f"has different contents on rank {record.data_rank} than in one process",
        hint="the dataset, an augmentation or collate_fn keeps state between samples",
    )
