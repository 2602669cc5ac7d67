"""Predictions on disk, each with the index of its sample: `BasePredictionWriter` and `PredictionWriter`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
import torch
from torch import Tensor

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.errors import ConfigurationError, DataError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.location import is_url
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.tensors import map_tensors
from trainer_kit.core.types import Batch, StepOutput

__all__ = ["BasePredictionWriter", "PredictionWriter"]

_INTERVALS: Final = ("batch", "epoch", "batch_and_epoch")
_Columns = dict[str, Any]
"""By name, a value for each sample: an array, or a list where values are not numbers."""


class BasePredictionWriter(Callback):
    """Write predictions after each batch, or all of them at the end.

    Override `write_on_batch_end`, `write_on_epoch_end`, or both. Each rank calls them with its own batches. Pass
    ``return_predictions=False`` to ``predict`` to keep nothing else in memory.

    Args:
        write_interval: ``"batch"``, ``"epoch"`` or ``"batch_and_epoch"``.

    Raises:
        ConfigurationError: for another word.

    Example:
        >>> class Save(BasePredictionWriter):
        ...     def write_on_batch_end(
        ...         self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
        ...     ):
        ...         torch.save((batch_indices, prediction), f"{trainer.global_rank}-{batch_idx}.pt")
        >>> Save("batch").interval
        'batch'
    """

    def __init__(
        self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch"
    ) -> None:
        if write_interval not in _INTERVALS:
            raise ConfigurationError(
                "unknown write_interval: predictions are written after batches, at the end, or both",
                found=f"write_interval={write_interval!r}",
                fix=did_you_mean(str(write_interval), _INTERVALS),
            )
        self.interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[Any] | None]] = []

    def write_on_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: Any,
        prediction: StepOutput,
        batch_indices: Sequence[Any] | None,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write what one ``predict_step`` returned.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            prediction: what ``predict_step`` returned.
            batch_indices: the index in the dataset of each sample of the batch; None where the loader draws none.
            batch: what the step was given.
            batch_idx: its number in this loader on this rank.
            dataloader_idx: the number of the loader.
        """
        raise NotImplementedError(
            f"{type(self).__name__} writes batches and does not override write_on_batch_end"
        )

    def write_on_epoch_end(
        self,
        trainer: TrainerLike,
        pl_module: Any,
        predictions: Sequence[StepOutput],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write everything that this rank predicted.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            predictions: what ``predict_step`` returned for each batch, on the CPU; of several loaders a list for each.
            batch_indices: for each loader, and each batch, the indices in the dataset; None where they are unknown.
        """
        raise NotImplementedError(
            f"{type(self).__name__} writes at the end and does not override write_on_epoch_end"
        )

    def on_predict_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._predictions = [[] for _ in trainer.num_predict_batches]
        self._indices = [[] for _ in trainer.num_predict_batches]

    def on_predict_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        indices = trainer.predict_batch_indices
        if self.interval != "epoch":
            self.write_on_batch_end(
                trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx
            )
        if self.interval != "batch":
            self._predictions[dataloader_idx].append(_on_host(outputs))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self.interval == "batch":
            return
        predictions: list[Any] = self._predictions
        indices = self._indices
        # Not needed after this: predictions may be large.
        self._predictions = []
        self._indices = []
        if len(predictions) == 1:
            predictions = predictions[0]
        self.write_on_epoch_end(trainer, pl_module, predictions, indices)


@final
class PredictionWriter(BasePredictionWriter):
    """Write predictions with the index of each sample in its dataset: one file, or one for each batch.

    ``"epoch"`` writes ``predictions.parquet`` (of several loaders ``predictions-0.parquet``, …): rank 0 gathers what
    all ranks predicted, each sample once, sorted by index. ``"batch"`` writes ``predictions-0-rank0-00000.parquet``
    (loader, rank, batch); nothing is gathered. Each file is complete or not there.

    ``predict_step`` returns a tensor, or a dict or tuple of tensors, whose first dim is the batch; a dict may also have
    lists of other values, such as texts, one for each sample. A file has the columns ``index`` and ``prediction``, or
    ``index`` and the names of the dict. Where the loader draws no indices (a stream), ``index`` counts the samples in
    the order of the data in ``"epoch"`` files, and those of the rank in ``"batch"`` files.

    Args:
        output_dir: the directory on this machine, made if it is not there.
        write_interval: ``"epoch"`` or ``"batch"``.
        format: ``"parquet"`` (needs pyarrow; tensors of more dims become lists), ``"npy"`` (a file for each column) or
            ``"safetensors"`` (numbers only).

    Raises:
        ConfigurationError: for another word, a URL, and without pyarrow.
        DataError: while predicting, where a value has no entry for each sample, or no place in the format.

    Example:
        >>> PredictionWriter("predictions", format="npy").interval
        'epoch'
    """

    def __init__(
        self,
        output_dir: str | Path,
        write_interval: Literal["epoch", "batch"] = "epoch",
        format: Literal["parquet", "npy", "safetensors"] = "parquet",
    ) -> None:
        super().__init__(write_interval)
        if format not in _WRITERS:
            raise ConfigurationError(
                "PredictionWriter does not support this format",
                found=repr(format),
                fix=did_you_mean(str(format), _WRITERS),
            )
        if is_url(output_dir):
            raise ConfigurationError(
                "PredictionWriter writes to local directories only",
                found=f"output_dir={output_dir}",
                fix="mount the storage, or copy the files in a subclass of BasePredictionWriter",
            )
        if format == "parquet":
            _require_pyarrow()
        self.output_dir = Path(output_dir)
        self.format = format
        self._write = _WRITERS[format]
        # By loader, samples of batches without indices.
        self._sample_counts: dict[int, int] = {}

    @property
    def state_key(self) -> str:
        return f"PredictionWriter({self.output_dir})"

    def on_predict_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        super().on_predict_start(trainer, pl_module)
        # The counts of an earlier `predict` would shift the indices.
        self._sample_counts = {}
        self.output_dir.mkdir(parents=True, exist_ok=True)

    def write_on_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: Any,
        prediction: StepOutput,
        batch_indices: Sequence[Any] | None,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        # Another rank computes the same batch, as one of a tensor-parallel group.
        if trainer.global_rank != trainer.strategy.reporter:
            return
        columns = _columns(_on_host(prediction), batch_indices)
        if "index" not in columns:
            first = self._sample_counts.get(dataloader_idx, 0)
            next_index = first + _count_rows(columns)
            self._sample_counts[dataloader_idx] = next_index
            columns = {"index": np.arange(first, next_index), **columns}
        name = f"predictions-{dataloader_idx}-rank{trainer.global_rank}-{batch_idx:05d}"
        self._write(self.output_dir, name, columns)

    def write_on_epoch_end(
        self,
        trainer: TrainerLike,
        pl_module: Any,
        predictions: Sequence[StepOutput],
        batch_indices: Sequence[Any],
    ) -> None:
        strategy = trainer.strategy
        # `predict` with one loader passes its list of batches without a list around it, as in Lightning.
        has_several = len(batch_indices) > 1
        loaders = predictions if has_several else [predictions]
        # A rank whose predictions do not fit must not leave the others in the gathering.
        batches_by_loader = fail_together(
            strategy.world, lambda: _columns_by_loader(loaders, batch_indices)
        )
        for number, batches in enumerate(batches_by_loader):
            # One loader at a time: rank 0 needs memory for the largest, not for all.
            batches_by_rank = strategy.data.gather_object(batches)
            if not trainer.is_global_zero or batches_by_rank is None:
                continue
            ordered = _interleave(batches_by_rank)
            if ordered:
                name = f"predictions-{number}" if has_several else "predictions"
                self._write(self.output_dir, name, _join(ordered))


def _columns_by_loader(
    loaders: Sequence[Any], batch_indices: Sequence[Any]
) -> list[list[_Columns]]:
    columns = []
    for predictions, indices in zip(loaders, batch_indices, strict=True):
        columns.append(list(map(_columns, predictions, indices)))
    return columns


def _interleave(batches_by_rank: Sequence[Sequence[_Columns]]) -> list[_Columns]:
    """Order batches as the data is: a global batch is the ranks' blocks one after the other."""
    ordered = []
    # A rank may have fewer batches than others.
    for blocks in zip_longest(*batches_by_rank):
        ordered += [block for block in blocks if block is not None]
    return ordered


def _on_host(value: Any) -> Any:
    # sync point: leaves the device. On it, the predictions of an epoch would fill its memory.
    return map_tensors(value, lambda tensor: tensor.detach().cpu())


def _columns(prediction: StepOutput, indices: Sequence[Any] | None) -> _Columns:
    """The columns of one batch."""
    if isinstance(prediction, Mapping):
        items = list(prediction.items())
    elif isinstance(prediction, tuple):
        items = list(enumerate(prediction))
    else:
        items = [("prediction", prediction)]
    columns: _Columns = {}
    if indices is not None:
        columns["index"] = _as_array(list(indices))
    for name, value in items:
        columns[str(name)] = _as_array(value)
    counts = {name: _length(value) for name, value in columns.items()}
    # Rows of a table: without the check, values would be written beside the indices of other samples.
    if None in counts.values() or len(set(counts.values())) > 1:
        texts = []
        for name, count in counts.items():
            size = "a single value" if count is None else count
            texts.append(f"{name}: {size}")
        raise DataError(
            "a prediction must have one entry for each sample of its batch",
            found=", ".join(texts),
            fix="return tensors whose first dim is the batch from predict_step, or subclass BasePredictionWriter",
        )
    return columns


def _length(value: Any) -> int | None:
    """Number of entries; None for a single value."""
    if np.ndim(value) or isinstance(value, list):
        return len(value)
    return None


def _as_array(value: Any) -> Any:
    """A NumPy array of numbers, else the value."""
    if isinstance(value, Tensor):
        # NumPy has no bfloat16.
        if value.dtype is torch.bfloat16:
            value = value.float()
        # No sync point: it is on the host.
        return value.numpy()
    if not isinstance(value, list) or not value:
        return value
    if all(isinstance(entry, (bool, int, float)) for entry in value):
        return np.asarray(value)
    return value


def _count_rows(columns: _Columns) -> int:
    return len(next(iter(columns.values())))


def _join(batches: Sequence[_Columns]) -> _Columns:
    """Join the rows of all batches, sorted by index."""
    columns: _Columns = {}
    for name in batches[0]:
        values = [batch[name] for batch in batches]
        if all(isinstance(value, np.ndarray) for value in values):
            columns[name] = np.concatenate(values)
        else:
            columns[name] = list(chain.from_iterable(values))
    if "index" not in columns:
        return {"index": np.arange(_count_rows(columns)), **columns}
    # The keys of a dataset that is a mapping have no order.
    if not isinstance(columns["index"], np.ndarray):
        return columns
    # Stable: samples that a sampler repeats keep the order in which they were predicted.
    order = np.argsort(columns["index"], kind="stable")
    return {name: _reorder(values, order) for name, values in columns.items()}


def _reorder(values: Any, order: Any) -> Any:
    if isinstance(values, np.ndarray):
        return values[order]
    return [values[position] for position in order]


def _write_parquet(directory: Path, name: str, columns: _Columns) -> None:
    import pyarrow
    import pyarrow.parquet

    arrays = {}
    for column, value in columns.items():
        # pyarrow takes arrays of one dim only; lists may be nested.
        if isinstance(value, np.ndarray) and value.ndim > 1:
            value = value.tolist()
        arrays[column] = pyarrow.array(value)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), buffer)
    replace_file(directory / f"{name}.parquet", buffer.getvalue())


def _write_npy(directory: Path, name: str, columns: _Columns) -> None:
    for column, value in columns.items():
        buffer = io.BytesIO()
        # A pickle in a file of data could run code when it is loaded.
        np.save(buffer, np.asarray(value), allow_pickle=False)
        replace_file(directory / f"{name}.{column}.npy", buffer.getvalue())


def _write_safetensors(directory: Path, name: str, columns: _Columns) -> None:
    from safetensors.numpy import save

    for column, value in columns.items():
        if not isinstance(value, np.ndarray):
            content = "nothing"
            if len(value):
                content = type(value[0]).__name__
            raise DataError(
                "safetensors holds numbers only",
                found=f"{column}: {content}",
                fix='use format="parquet"',
            )
    arrays = {column: np.ascontiguousarray(value) for column, value in columns.items()}
    replace_file(directory / f"{name}.safetensors", save(arrays))


_WRITERS: Final[Mapping[str, Callable[[Path, str, _Columns], None]]] = {
    "parquet": _write_parquet,
    "npy": _write_npy,
    "safetensors": _write_safetensors,
}


def _require_pyarrow() -> None:
    from lightning_utilities.core.imports import RequirementCache

    requirement = RequirementCache("pyarrow>=15")
    if not requirement:
        raise ConfigurationError(
            'PredictionWriter(format="parquet") needs pyarrow',
            found=str(requirement),
            fix='pip install \'trainer-kit[parquet]\', or use format="npy" or format="safetensors"',
        )
