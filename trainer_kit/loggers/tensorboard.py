"""Event files for TensorBoard."""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch

from trainer_kit.core.errors import LogError
from trainer_kit.core.parallel import is_divided
from trainer_kit.core.tensors import map_tensors
from trainer_kit.core.types import Batch, StateDict
from trainer_kit.loggers.layout import (
    DEFAULT_NAME,
    DirectoryLogger,
    LoggedValues,
    flatten,
    numbers,
    plain,
    with_lock,
)
from trainer_kit.loggers.modes import preserved_modes

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLogger"]

_ROOM: Final = 16384
"""Bytes that must be free for a call."""
_Shown: TypeAlias = bool | int | float | str
"""A hyperparameter as the HPARAMS tab takes it."""


@final
class TensorBoardLogger(DirectoryLogger):
    """Write event files, and ``hparams.json``, to ``save_dir/name/version[/sub_dir]``.

    Pictures, text and histograms go through ``experiment``, the ``SummaryWriter``.

    Args:
        save_dir: the directory of all experiments, for ``tensorboard --logdir``.
        name: the experiment; empty for ``save_dir`` itself.
        version: an int, a name, empty for no version directory, or None for the next free number.
        log_graph: whether ``log_graph`` writes the module's graph.
        default_hp_metric: show hyperparameters logged without metrics, with ``hp_metric = -1``.
        prefix: the start of metric names, followed by ``-``.
        sub_dir: a directory below the version's, to write to.
        **kwargs: for the ``SummaryWriter``: ``max_queue``, ``flush_secs``, ``purge_step``, ``filename_suffix``.

    Example:
        >>> TensorBoardLogger("logs", name="mnist", version=3).log_dir
        'logs/mnist/version_3'
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, sub_dir)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._prefix = prefix
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None
        self._step = 0
        # The hyperparameters and metrics of the HPARAMS tab that were written last: every entry point logs them again.
        self._shown: tuple[dict[str, _Shown], LoggedValues] | None = None

    @property
    @with_lock
    def experiment(self) -> SummaryWriter:
        """The ``SummaryWriter``; the first access makes the directory and the event file."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            directory = self._directory()
            # TensorBoard reads files by name; within one second that is not the order in which they were created.
            while any(directory.glob(f"events.out.tfevents.{int(time.time()):010}.*")):
                time.sleep(0.01)
            self._writer = SummaryWriter(str(directory), **self._kwargs)
        return self._writer

    @with_lock
    def log_metrics(
        self,
        metrics: LoggedValues,
        step: int | None = None,
        at: float | None = None,
    ) -> None:
        """Write the values as scalars.

        Args:
            metrics: numbers, or tensors of one element.
            step: the step of the values; None for that of the previous call.
            at: when the values were logged, in seconds since 1970; None for now. A Trainer writes them later than the
                step, on a separate thread.

        Raises:
            LogError: a value is not one number.
        """
        if step is not None:
            self._step = step
        values = numbers(metrics, self._prefix)
        if values:
            with self._written():
                for name, value in values.items():
                    self.experiment.add_scalar(name, value, self._step, walltime=at)

    @with_lock
    def log_hyperparams(
        self, params: object, metrics: LoggedValues | float | None = None
    ) -> None:
        """Write the hyperparameters to ``hparams.json`` and, with ``metrics``, for the HPARAMS tab.

        Only the owner can read the files that hold them (mode 0600).

        Args:
            params: a mapping, a Namespace or a dataclass; nested names are joined by ``/``.
            metrics: values for comparing runs, or one number, called ``hp_metric``; they are logged at step 0.
        """
        self._record_hparams(params)
        if metrics is None and self._default_hp_metric:
            metrics = -1
        if metrics is None or not self.hparams:
            return
        values: LoggedValues
        if isinstance(metrics, Mapping):
            values = metrics
        else:
            values = {"hp_metric": metrics}
        shown = {name: _shown(value) for name, value in flatten(self.hparams).items()}
        if (shown, values) == self._shown:
            return
        from torch.utils.tensorboard.summary import hparams

        scalars = numbers(values, self._prefix)
        with self._written():
            for name, value in scalars.items():
                self.experiment.add_scalar(name, value, 0)
            # The writer creates its file with the umask's permissions: restrict them before hyperparameters are in it.
            for file in Path(self.log_dir).glob(
                f"events.out.tfevents.*.{os.getpid()}.*"
            ):
                # Some file systems have no permissions.
                with suppress(OSError):
                    file.chmod(0o600)
            # `SummaryWriter.add_hparams` would open a second event file in a directory of its own.
            writer = self.experiment._get_file_writer()  # type: ignore[no-untyped-call]
            for summary in hparams(shown, scalars):  # type: ignore[no-untyped-call]
                writer.add_summary(summary)
        self._shown = (shown, dict(values))

    def log_graph(self, model: torch.nn.Module, input_array: Batch = None) -> None:
        """Write the graph of ``model``, traced in evaluation mode; does nothing unless ``log_graph=True`` was given.

        The model's modes and buffers and the random state do not change.

        Args:
            model: the module.
            input_array: the arguments of its ``forward``, a tensor or a tuple; None for ``model.example_input_array``.

        Raises:
            LogError: the example input is missing, or the module cannot be traced.
        """
        if not self._log_graph:
            return
        example = input_array
        if example is None:
            example = getattr(model, "example_input_array", None)
        if example is None:
            raise LogError(
                "the graph needs an example input of the module",
                found=f"log_graph=True, and {type(model).__name__}.example_input_array is not set",
                fix="set self.example_input_array in the module, or log_graph=False",
            )
        if is_divided(model):
            raise LogError(
                f"the graph of {type(model).__name__} cannot be traced",
                found="its weights are sharded over ranks, so a forward on this rank alone would wait for the others",
                fix="pass log_graph=False",
            )
        device = next(
            (tensor.device for tensor in model.parameters()), torch.device("cpu")
        )
        example = map_tensors(example, lambda tensor: tensor.to(device))
        # Before the model is in evaluation mode: a disk that blocks must not leave it there.
        writer = self.experiment
        try:
            with _without_side_effects(model, device):
                writer.add_graph(model, example)
        except Exception as error:
            raise LogError(
                f"the graph of {type(model).__name__} cannot be traced",
                found=f"{type(error).__name__}: {error}",
                fix="pass log_graph=False",
            ) from error

    @with_lock
    def save(self) -> None:
        """Write the buffered values."""
        # Without a writer nothing is buffered, and a save must not make the first file.
        if self._writer is not None:
            with self._written():
                pass

    @with_lock
    def finalize(self, status: str) -> None:
        """Close the event file; a later call opens a new one.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``; no difference here.
        """
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()

    def __getstate__(self) -> StateDict:
        # The writer has a thread, which does not travel to the process of a copy.
        return {**vars(self), "_writer": None}

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Flush on exit, so that a write error is raised for the values that it affects.

        On an error the writer's thread prints a traceback and ends, so free disk space is checked first; the next call
        after an error opens a new event file.
        """
        try:
            directory = self._directory()
            if shutil.disk_usage(directory).free < _ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
            yield
            if self._writer is not None:
                self._writer.flush()
        except OSError:
            writer = self._writer
            self._writer = None
            with suppress(OSError):
                if writer is not None:
                    writer.close()
            raise


@contextmanager
def _without_side_effects(
    model: torch.nn.Module, device: torch.device
) -> Iterator[None]:
    """Evaluation mode without gradients; on exit the random state and each module's mode are as before."""
    devices = []
    # `fork_rng` takes no CPU device: it always forks the CPU's generator, beside those of the devices.
    device_type = "cuda"
    if device.type != "cpu":
        devices = [device]
        device_type = device.type
    with (
        torch.random.fork_rng(devices, device_type=device_type),
        warnings.catch_warnings(),
        preserved_modes(model),
        torch.no_grad(),
    ):
        # The tracer is deprecated, and has no successor that writes TensorBoard's format.
        warnings.simplefilter("ignore")
        model.eval()
        yield


def _shown(value: object) -> _Shown:
    # A plain number or text first: `plain` writes NaN as text, and the tab takes it as a number.
    if isinstance(value, (bool, int, float, str)):
        return value
    simple = plain(value)
    if isinstance(simple, (bool, int, float, str)):
        return simple
    return str(simple)
