"""Weights & Biases."""

from __future__ import annotations

import multiprocessing
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Protocol, final

import torch

from trainer_kit.core.arguments import with_typed_arguments
from trainer_kit.core.copyable_lock import Lock
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import Location, RemotePath
from trainer_kit.core.types import JsonObject, Keywords, SavedState, StateDict
from trainer_kit.loggers.layout import (
    DEFAULT_NAME,
    params_dict,
    plain,
    with_lock,
)
from trainer_kit.loggers.media import DataFrame
from trainer_kit.loggers.uploads import CheckpointUploads

__all__ = ["WandbLogger", "WandbRun"]

_STEP: Final = "trainer/global_step"
# 255: what wandb itself reports for Ctrl-C
_EXIT_CODES: Final = {"success": 0, "failed": 1, "interrupted": 255}


class _Config(Protocol):
    def update(self, d: JsonObject, allow_val_change: bool) -> object: ...


class _Summary(Protocol):
    def update(self, d: dict[str, Any]) -> object: ...


class WandbRun(Protocol):
    """The part of ``wandb.Run`` that `WandbLogger` calls."""

    @property
    def id(self) -> str:
        """The id of the run."""

    @property
    def config(self) -> _Config:
        """The hyperparameters."""

    @property
    def summary(self) -> _Summary:
        """The values for comparing runs."""

    def define_metric(
        self,
        name: str,
        step_metric: str | None = None,
        *,
        step_sync: bool | None = None,
    ) -> object:
        """Choose the horizontal axis of a metric."""

    def log(self, data: dict[str, Any]) -> object:
        """Write numbers, and W&B's own objects of media."""

    def log_artifact(self, artifact_or_path: Any, *, aliases: list[str]) -> object:
        """Upload an artifact."""

    def finish(self, exit_code: int) -> object:
        """End the run; blocks until everything is sent."""


@final
class WandbLogger:
    """Log to Weights & Biases, or to local files with ``offline=True``.

    The run begins at the first write, and ``fit``, ``validate``, ``test`` and ``predict`` share it. It ends with the
    process, with ``wandb.finish()``, when another `WandbLogger` begins a run, or when an entry point fails. Logging
    after its end resumes it.

    Args:
        name: the run's display name.
        save_dir: where wandb keeps its files.
        version: the run's id; the same as ``id``. A run with that id is resumed.
        offline: write files for ``wandb sync`` instead of sending data.
        dir: the same as ``save_dir``.
        id: the run's id; by default a new one.
        anonymous: True lets wandb log without an account, where its version still can.
        project: None for the environment's ``WANDB_PROJECT``, else ``trainer_kit_logs``.
        log_model: upload checkpoints as artifacts: ``"all"`` when they are saved, True those that still exist at the
            end of a run that succeeded.
        experiment: a run to log to; the caller ends it.
        prefix: the start of metric names, followed by ``-``.
        checkpoint_name: the artifact's name; by default ``model-<id>``.
        **kwargs: for ``wandb.init``: ``entity``, ``group``, ``tags``, ….

    Raises:
        ConfigurationError: wandb is not installed.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.loggers import WandbLogger
        >>> logger = WandbLogger(project="digits", offline=True, tags=["baseline"])
        >>> trainer = Trainer(logger=logger, max_epochs=3)
        >>> logger.name, logger.version
        ('digits', None)
    """

    writes_alone: Final = True
    # the logger whose run is open between two entry points: a process has one such run
    _idle: ClassVar[WandbLogger | None] = None

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment: WandbRun | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        **kwargs: object,
    ) -> None:
        from lightning_utilities.core.imports import RequirementCache

        requirement = RequirementCache("wandb>=0.19")
        if not requirement:
            raise ConfigurationError(
                "WandbLogger needs wandb",
                found=str(requirement),
                fix="pip install 'trainer-kit[wandb]'",
            )
        if dir is not None:
            save_dir = dir
        self._init: Keywords = {
            "name": name,
            "dir": os.path.expanduser(save_dir),
            "id": version or id,
            "project": project or os.environ.get("WANDB_PROJECT", DEFAULT_NAME),
            "resume": "allow",
        }
        # Left out otherwise: WANDB_MODE and the version of wandb decide.
        if offline:
            self._init["mode"] = "offline"
        if anonymous:
            self._init["anonymous"] = "allow"
        self._init.update(kwargs)
        self._run = experiment
        # whether this logger began the run, and may end it
        self._owned = False
        self._checkpoint_name = checkpoint_name
        self._prefix = prefix
        self._uploads = CheckpointUploads(log_model)
        self.hparams: JsonObject = {}
        self.lock = Lock()

    @property
    def name(self) -> str:
        """The project."""
        return str(self._init["project"])

    @property
    def version(self) -> str | None:
        """The id of the run; None until a run without a given id has begun."""
        version: str | None = self._init["id"]
        if self._run is not None:
            version = self._run.id
        return version

    def state_dict(self) -> StateDict:
        """The run's id, once it has begun."""
        if self.version is None:
            return {}
        return {"id": self.version}

    def load_state_dict(self, state: SavedState) -> None:
        """Resume the run of ``state``, unless a run has begun here or an id was given.

        Args:
            state: what ``state_dict`` returned: ``{"id": the id of the run}``.

        Raises:
            ConfigurationError: the id has characters other than letters, digits, ``_``, ``.`` and ``-``.
        """
        if self.version is None:
            # It becomes part of a file's name.
            if not re.fullmatch(r"[\w.\-]+", str(state["id"])):
                raise ConfigurationError(
                    "the run to continue has an id that is not valid in W&B",
                    found=repr(state["id"]),
                    fix="pass id=",
                )
            self._init["id"] = state["id"]

    @property
    def save_dir(self) -> str:
        """Where wandb keeps its files, below a directory ``wandb``."""
        return str(self._init["dir"])

    @property
    def log_dir(self) -> None:
        """None: all runs share ``save_dir``. A Trainer makes a directory for its run below ``default_root_dir``."""

    @property
    @with_lock
    def experiment(self) -> Any:
        """The ``wandb.Run``; the first access begins it."""
        import wandb

        # Any: users call all methods of wandb's run, this logger only those of `WandbRun`.
        # wandb has another global run, or none: the user has finished this one. With "create_new" it is never global.
        is_current = wandb.run is self._run or self._init.get("reinit") == "create_new"
        if self._owned and not is_current:
            self._run = None
        if self._run is None:
            # Before the look at `wandb.run`: it would be the idle run, which belongs to another logger.
            if WandbLogger._idle is not None:
                WandbLogger._idle._end("success")
            self._run = self._begin()
        return self._run

    def _begin(self) -> WandbRun:
        """Begin or resume the run, or take the one that the user has in progress."""
        import wandb

        run: WandbRun | None = wandb.run
        self._owned = run is None
        if run is not None:
            warnings.warn(
                f"WandbLogger logs to the run that is in progress ({run.id}); "
                "call wandb.finish() first for a separate run",
                stacklevel=3,
            )
        else:
            # Otherwise wandb falls back to a temporary directory.
            os.makedirs(self._init["dir"], exist_ok=True)
            run = wandb.init(**self._init)
            # A later begin, after the end of this run, resumes it.
            self._init["id"] = run.id
        # Before the calls below, which may fail: the next attempt has this run, and does not take it for the user's.
        self._run = run
        # Values go against the optimizer step: wandb's own counter grows by one for each call of `log`.
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)
        # A run that begins again, or the user's own, does not have them yet.
        if self.hparams:
            run.config.update(self.hparams, allow_val_change=True)
        return run

    def log_metrics(
        self, metrics: Mapping[str, object], step: int | None = None
    ) -> None:
        """Log the values, against ``trainer/global_step``.

        W&B's own times (``_timestamp``, ``_runtime``) are those of this call. A Trainer makes it on a separate thread,
        later than the step; the run's journal has the times of the steps.

        Args:
            metrics: numbers and tensors of one element, or anything else that ``wandb.log`` takes.
            step: the step of the values.
        """
        start = f"{self._prefix}-" if self._prefix else ""
        values: dict[str, object] = {}
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            values[f"{start}{name}"] = value
        if not values:
            return
        if step is not None:
            values[_STEP] = step
        self._logging().log(values)

    def log_hyperparams(
        self, params: object, metrics: Mapping[str, object] | None = None
    ) -> None:
        """Add the hyperparameters to the run's config, and ``metrics`` to its summary.

        Args:
            params: a mapping, a Namespace or a dataclass.
            metrics: values for comparing runs.
        """
        new = plain(params_dict(params))
        self.hparams.update(new)
        if new:
            self._logging().config.update(new, allow_val_change=True)
        if metrics:
            self._logging().summary.update(dict(metrics))

    def after_save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Upload a checkpoint now, at the end, or not at all, depending on ``log_model``.

        Args:
            path: the checkpoint, a directory or a file.

        Raises:
            LogError: the checkpoint was deleted before the upload was complete.
        """
        self._uploads.saved(path, self._upload)

    def watch(
        self,
        model: torch.nn.Module,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Log histograms of gradients and parameters with ``wandb.Run.watch``.

        Args:
            model: the module whose parameters are watched.
            log: ``"gradients"``, ``"parameters"`` or ``"all"``; None logs no histograms.
            log_freq: batches between two histograms.
            log_graph: log the structure of the model too.
        """
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def unwatch(self, model: torch.nn.Module) -> None:
        """Remove the hooks of `watch`.

        Args:
            model: the module that was passed to `watch`.
        """
        self.experiment.unwatch(model)

    def log_table(
        self,
        key: str,
        columns: list[str | int] | None = None,
        data: list[list[object]] | None = None,
        dataframe: DataFrame | None = None,
        step: int | None = None,
    ) -> None:
        """Log a table, from ``columns`` and ``data`` or from a data frame.

        Args:
            key: the name of the table.
            columns: the names of the columns.
            data: the rows, each with one value per column: numbers, text, or W&B's objects of media.
            dataframe: a pandas data frame, in place of ``columns`` and ``data``, which are then ignored.
            step: the optimizer step of the values; None logs none.
        """
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log_metrics({key: table}, step)

    def log_text(
        self,
        key: str,
        columns: list[str | int] | None = None,
        data: list[list[object]] | None = None,
        dataframe: DataFrame | None = None,
        step: int | None = None,
    ) -> None:
        """Log text as a table; the same as `log_table`.

        Args:
            key: the name of the table.
            columns: the names of the columns.
            data: the rows, each with one value per column: numbers, text, or W&B's objects of media.
            dataframe: a pandas data frame, in place of ``columns`` and ``data``, which are then ignored.
            step: the optimizer step of the values; None logs none.
        """
        self.log_table(key, columns, data, dataframe, step)

    def log_image(
        self,
        key: str,
        images: Sequence[object],
        step: int | None = None,
        **kwargs: Sequence[object],
    ) -> None:
        """Log images.

        Args:
            key: the name of the images, which W&B shows together.
            images: tensors, arrays, PIL images or paths of files.
            step: the optimizer step of the values; None logs none.
            kwargs: options of ``wandb.Image``, each a list with one value per image: ``caption=["cat", "dog"]``.

        Raises:
            ConfigurationError: an option has another number of values than there are images.
        """
        self._log_media("Image", key, images, step, kwargs)

    def log_audio(
        self,
        key: str,
        audios: Sequence[object],
        step: int | None = None,
        **kwargs: Sequence[object],
    ) -> None:
        """Log audio clips.

        Args:
            key: the name of the clips, which W&B shows together.
            audios: arrays of samples, or paths of files.
            step: the optimizer step of the values; None logs none.
            kwargs: options of ``wandb.Audio``, each a list with one value per clip; arrays need ``sample_rate``, in Hz.

        Raises:
            ConfigurationError: an option has another number of values than there are clips.
        """
        self._log_media("Audio", key, audios, step, kwargs)

    def log_video(
        self,
        key: str,
        videos: Sequence[object],
        step: int | None = None,
        **kwargs: Sequence[object],
    ) -> None:
        """Log videos.

        Args:
            key: the name of the videos, which W&B shows together.
            videos: arrays of shape (frames, channels, height, width), or paths of files.
            step: the optimizer step of the values; None logs none.
            kwargs: options of ``wandb.Video``, each a list with one value per video; arrays need ``format``, such as
                ``"mp4"``; ``fps`` is frames per second.

        Raises:
            ConfigurationError: an option has another number of values than there are videos.
        """
        self._log_media("Video", key, videos, step, kwargs)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Declare an artifact as an input of the run.

        Args:
            artifact: its name with a version or an alias, such as ``"model:v3"`` or ``"entity/project/model:latest"``.
            artifact_type: the type it must have; None for any.

        Returns:
            The ``wandb.Artifact``; its ``download()`` fetches the files.
        """
        return self.experiment.use_artifact(artifact, type=artifact_type)

    def save(self) -> None:
        """Does nothing: wandb writes in a separate process."""

    def finalize(self, status: str) -> None:
        """Upload the checkpoints that ``log_model=True`` keeps; end the run if it began here and failed.

        After ``"success"`` the run stays open for the next entry point, and wandb ends it with the process.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``.
        """
        self._uploads.ended(status, self._upload)
        if self._run is not None and self._owned:
            # multiprocessing ends its processes without running the exit handlers that would end the run.
            if status == "success" and multiprocessing.parent_process() is None:
                WandbLogger._idle = self
            else:
                self._end(status)

    def __getstate__(self) -> StateDict:
        state = dict(vars(self))
        # A copy in another process resumes the run by its id: the connection to wandb does not travel.
        if self._owned:
            state["_run"] = None
        return state

    def _logging(self) -> WandbRun:
        """The run, marked as in use, so that another logger does not end it."""
        if WandbLogger._idle is self:
            WandbLogger._idle = None
        run: WandbRun = self.experiment
        return run

    def _end(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES.get(status, 1))
        self._run = None
        if WandbLogger._idle is self:
            WandbLogger._idle = None

    def _log_media(
        self,
        kind: str,
        key: str,
        items: Sequence[object],
        step: int | None,
        kwargs: Mapping[str, Sequence[object]],
    ) -> None:
        import wandb

        for name, values in kwargs.items():
            if len(values) != len(items):
                raise ConfigurationError(
                    f"{name} needs one value for each of the {len(items)} items",
                    found=plural(len(values), "value"),
                )
        make = getattr(wandb, kind)
        media = [
            make(item, **{name: values[i] for name, values in kwargs.items()})
            for i, item in enumerate(items)
        ]
        self.log_metrics({key: media}, step)

    def _upload(self, path: Location) -> None:
        import wandb

        run = self.experiment
        artifact = wandb.Artifact(
            self._checkpoint_name or f"model-{run.id}",
            type="model",
            metadata={"original_name": path.name},
        )
        if isinstance(path, RemotePath):
            # The files stay in remote storage; a checksum would download them.
            artifact.add_reference(str(path), name=path.name, checksum=False)
        elif path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        run.log_artifact(artifact, aliases=["latest"])


# It has no base class that would do this.
with_typed_arguments(WandbLogger)
