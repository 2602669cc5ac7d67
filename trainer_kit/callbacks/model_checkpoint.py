"""`ModelCheckpoint`: when to request a checkpoint, and which checkpoints to keep."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from time import monotonic
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor

from trainer_kit.callbacks.checkpoint_files import CheckpointFiles
from trainer_kit.callbacks.checkpoint_name import CheckpointName
from trainer_kit.callbacks.conditions import (
    Monitor,
    check_validation,
    epoch_ends_here,
    following,
    has_validation,
    in_run,
    the_only,
)
from trainer_kit.callbacks.retention import Retention
from trainer_kit.core.errors import ConfigurationError, NonFiniteError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.location import absolute, is_url, locate
from trainer_kit.core.progress import Duration, DurationLike
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import leave_out
from trainer_kit.core.tensors import are_finite
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.step.schedule import check_tokens

__all__ = ["ModelCheckpoint"]


_DECIDES: Final = "set monitor=, mode=, save_top_k= and the interval; or call trainer.request_checkpoint in a callback"
_SAVED: Final = "define after_save_checkpoint(path) in a logger: it is called once a checkpoint exists"
_NAMES: Final = (
    "set filename= and enable_version_counter=, or override format_checkpoint_name"
)


class ModelCheckpoint(Callback):
    """Request checkpoints, and keep the best and the newest of them.

    A checkpoint is a directory. The loop writes it once its step is complete. A checkpoint is deleted only after its
    replacement is durable; the newest checkpoint, and checkpoints that this callback did not request, are never
    deleted. At least two are kept: if the best is also the newest, the last replaced one stays as a fallback, in case
    the newest is damaged. Once weights are NaN or infinite, the last checkpoint with finite weights is kept too.

    The intervals take an int of their unit or a duration (``"500ba"``, ``"2ep"``, ``"30min"``), act at the first end
    of a step at or after each multiple, and exclude each other. Without an interval there is a checkpoint after every
    validation, or after every epoch in a fit without validation.

    Args:
        dirpath: the directory, a path or a URL that fsspec knows; default ``checkpoints`` in the run's directory.
        filename: a template for the directories' names, such as ``"{epoch}-{val_loss:.2f}"``; default
            ``step-00001200``. Fields are ``epoch``, ``step`` and the logged names.
        monitor: a logged value by which checkpoints are compared, or ``"step"`` or ``"epoch"``. None: the newest is
            the best. A checkpoint is compared by the value of the same step: if a checkpoint is due at a step without a
            new value (no validation ran there), it is written at the next step that has one.
        verbose: print each request, and each checkpoint that is not among the best.
        save_last: True or ``"link"``: every due checkpoint is written, even if it is not among the best or
            ``monitor`` has no value, and the run ends with a checkpoint.
        save_top_k: how many to keep: -1 for all, 0 for none.
        save_on_exception: request a checkpoint when an exception ends the run.
        save_weights_only: leave out everything but the model.
        mode: ``"min"`` when lower is better, else ``"max"``. NaN is the worst.
        auto_insert_metric_name: ``{epoch}`` in ``filename`` becomes ``epoch=3`` instead of ``3``.
        every_n_train_steps: optimizer steps between checkpoints; 0 for never.
        train_time_interval: time between checkpoints: seconds, or a ``timedelta``.
        every_n_epochs: epochs between checkpoints; 0 for never.
        save_on_train_epoch_end: True: at the end of training epochs; False: after validation; None: after validation
            if there is any, else at the end of epochs.
        enable_version_counter: append ``-v1``, … to a name in use; False overwrites.
        also: ``"lightning"``: after each checkpoint, write a file beside it that ``torch.load(weights_only=True)`` and
            Lightning read, named ``f"{best_model_path}.ckpt"``, and delete it with the checkpoint. The writer thread
            reads the whole checkpoint into host memory for it. Objects become plain data in it.

    Raises:
        ConfigurationError: for arguments that do not fit together, for a URL without an installed file system, and if
            ``monitor`` was not logged in time.

    Example:
        >>> best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.2f}", save_top_k=2)
        >>> best.best_model_path, best.best_model_score
        ('', None)
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "late"
    duplicate_key_fix: ClassVar[str] = (
        "give them another monitor=, mode=, filename= or interval (every_n_train_steps=, every_n_epochs=,"
        " train_time_interval=), or override state_key in a subclass"
    )

    # The reference's 15 arguments in its order, so that scripts which pass them move over unchanged.
    CHECKPOINT_JOIN_CHAR: str = "-"
    """Before the version counter of a name in use."""
    CHECKPOINT_EQUALS_CHAR: str = "="
    """Between a field's name and its value."""
    CHECKPOINT_NAME_LAST: str = "last"
    """A second name, besides ``last``, of the newest checkpoint in the index of the directory; no template."""
    STARTING_VERSION: int = 1
    """The first number of the version counter."""
    never_called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                "check_monitor_top_k",
                "_save_topk_checkpoint",
                "_save_monitor_checkpoint",
            ),
            _DECIDES,
        ),
        **dict.fromkeys(
            (
                "_update_best_and_save",
                "_save_none_monitor_checkpoint",
                "_monitor_candidates",
            ),
            _DECIDES,
        ),
        **dict.fromkeys(
            ("_should_skip_saving_checkpoint", "_should_save_on_train_epoch_end"),
            _DECIDES,
        ),
        **dict.fromkeys(
            (
                "_save_checkpoint",
                "_save_last_checkpoint",
                "_link_checkpoint",
                "to_yaml",
            ),
            _SAVED,
        ),
        **dict.fromkeys(
            ("_remove_checkpoint", "_should_remove_checkpoint"),
            "keep all of them with save_top_k=-1",
        ),
        **dict.fromkeys(
            ("_format_checkpoint_name", "_get_metric_interpolated_filepath_name"),
            _NAMES,
        ),
        **dict.fromkeys(("file_exists", "_find_last_checkpoints"), _NAMES),
        "FILE_EXTENSION": "a checkpoint is a directory: put what its name is to end with into filename=",
    }

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: DurationLike | None = None,
        train_time_interval: timedelta | DurationLike | None = None,
        every_n_epochs: DurationLike | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        also: Literal["lightning"] | None = None,
    ) -> None:
        # Made even without a name: it checks `mode`.
        watched = Monitor(monitor or "", mode, "ModelCheckpoint")
        _check_save_top_k(save_top_k, monitor)
        _check_also(also)
        self.filename = filename
        self.monitor = monitor
        self.mode = mode
        self.verbose = verbose
        self.auto_insert_metric_name = auto_insert_metric_name
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.also = also
        self._monitor: Monitor | None = None
        is_better: Callable[[float, float], bool] = _is_later
        if monitor is not None:
            self._monitor = watched
            is_better = watched.better
        intervals = (every_n_train_steps, train_time_interval, every_n_epochs)
        # Unlike an interval of 0, which means never.
        self._has_no_interval = all(interval is None for interval in intervals)
        self._every = the_only(
            every_n_train_steps=(every_n_train_steps, "st"),
            train_time_interval=(train_time_interval, "s"),
            every_n_epochs=(every_n_epochs, "ep"),
        )
        self._timed = self._every is not None and self._every.unit == "s"
        self._by_epoch = self._every is not None and self._every.unit == "ep"
        if self._every is None or self._by_epoch:
            # The bus skips hooks of the base class, so a step costs nothing without an interval in steps.
            leave_out(self, "on_train_step_end", ModelCheckpoint)
        self._files = CheckpointFiles(
            None if dirpath is None else str(absolute(dirpath)),
            CheckpointName(filename, auto_insert_metric_name),
            Retention(save_top_k, is_better),
            weights_only=save_weights_only,
            versions=enable_version_counter,
            ranked=monitor is not None,
            also_lightning=also == "lightning",
        )
        self._score: float | None = None
        # The next count of steps (batches, …) and of epochs at which a checkpoint is due.
        self._counter = "step"
        self._next = math.inf
        self._next_epoch = math.inf
        # The time of the last checkpoint that an interval of time requested, and the steps between two looks.
        self._clock = 0.0
        self._poll = 1
        self._validated_step = 0
        # Due, but `monitor` has no value of that step yet.
        self._waiting = False
        self._active = False
        self._restored = False
        self._restored_files = False

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """The path of a checkpoint; an override chooses the names, which must be directly in ``dirpath``.

        Args:
            metrics: logged values by name, with ``epoch`` and ``step``.
            filename: another template.
            ver: the version counter, for a name in use.
            prefix: the start of the name.

        Example:
            >>> ModelCheckpoint(filename="{epoch}-{acc:.2f}").format_checkpoint_name({"epoch": 3, "acc": 0.5}, ver=1)
            'epoch=3-acc=0.50-v1'
        """
        template = self._files.name
        if filename is not None:
            template = CheckpointName(filename, self.auto_insert_metric_name)
        name_fields = [template(metrics, self.CHECKPOINT_EQUALS_CHAR)]
        if prefix:
            name_fields.insert(0, prefix)
        if ver is not None:
            name_fields.append(f"v{ver}")
        name = self.CHECKPOINT_JOIN_CHAR.join(name_fields)
        if self.dirpath is None:
            return name
        return str(locate(self.dirpath) / name)

    @property
    def dirpath(self) -> str | None:
        """The absolute directory, or its URL; None before the directory of the run is known."""
        return self._files.dirpath

    @property
    def best_model_path(self) -> str:
        """The best requested checkpoint, or ""; without ``monitor`` the newest."""
        return self._files.best[0]

    @property
    def best_model_score(self) -> Tensor | None:
        """The value of ``monitor`` for the best checkpoint, a scalar on the CPU."""
        _, score = self._files.best
        if self._monitor is None or score is None:
            return None
        return _scalar(score)

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """Path → value of ``monitor``, for the kept checkpoints; empty without ``monitor``."""
        if self._monitor is None:
            return {}
        scores = self._files.retention.kept
        return {path: _scalar(score) for path, score in scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """The kept checkpoint that is replaced next, or "" while there is room."""
        if self._monitor is None:
            return ""
        return self._files.retention.worst

    @property
    def kth_value(self) -> Tensor:
        """The value of ``monitor`` that the next checkpoint must improve on."""
        worst = math.inf if self.mode == "min" else -math.inf
        return self.best_k_models.get(self.kth_best_model_path, _scalar(worst))

    @property
    def current_score(self) -> Tensor | None:
        """The value of ``monitor`` when a checkpoint was last due."""
        if self._score is None:
            return None
        return _scalar(self._score)

    @property
    def last_model_path(self) -> str:
        """The newest requested checkpoint, or ""."""
        return self._files.retention.newest

    @property
    def state_key(self) -> str:
        identity = f"monitor={self.monitor!r}, mode={self.mode!r}, every={self._every}, filename={self.filename!r}"
        return f"ModelCheckpoint({identity})"

    def state_dict(self) -> StateDict:
        # The next look of an interval of time is no state: each process has a clock of its own.
        next_count = None
        if not self._timed:
            next_count = _none_for_infinity(self._next)
        return {
            **self._files.state_dict(),
            "current_score": self._score,
            "waiting": self._waiting,
            "validated_step": self._validated_step,
            "next": next_count,
            "next_epoch": _none_for_infinity(self._next_epoch),
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        self._restored_files = self._files.load_state_dict(state_dict)
        if self._restored_files:
            self._score = state_dict["current_score"]
        self._waiting = state_dict["waiting"]
        self._validated_step = state_dict["validated_step"]
        self._next = _infinity_for_none(state_dict["next"])
        self._next_epoch = _infinity_for_none(state_dict["next_epoch"])
        self._restored = True

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._active = stage == "fit" and not trainer.fast_dev_run
        siblings = []
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback is not self:
                siblings.append(callback._files)
        # Read here, not in the constructor: a subclass or a user may set them until now.
        alias = None
        if self.CHECKPOINT_NAME_LAST != "last":
            alias = CheckpointName(
                self.CHECKPOINT_NAME_LAST, self.auto_insert_metric_name
            )
        self._files.open(
            trainer,
            siblings,
            describe_next_try=self._describe_next_try,
            make_path=self.format_checkpoint_name,
            first_version=self.STARTING_VERSION,
            alias=alias,
        )
        if self.also is None or self.dirpath is None:
            return
        if is_url(self.dirpath):
            raise ConfigurationError(
                'ModelCheckpoint(also="lightning") writes to local directories only',
                found=self.dirpath,
                fix="pass a local dirpath=, or run trainer-kit checkpoint export on a copy",
            )

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not self._active:
            self._next = math.inf
            return
        only_after = None
        acts_after_epochs = self._has_no_interval or self._by_epoch
        if self.save_on_train_epoch_end is False and acts_after_epochs:
            if not self.save_last:
                only_after = "save_on_train_epoch_end=False"
        check_validation(trainer, "ModelCheckpoint", self.monitor, only_after)
        restored = self._restored
        restored_files = restored and self._restored_files
        self._restored = False
        if restored_files and not _is_finite(trainer, pl_module):
            # Its own state was saved before its weights were checked.
            self._files.retention.taint(self.last_model_path)
        self._files.start(trainer, restored_files)
        if not restored:
            self._next = math.inf
            self._next_epoch = math.inf
            self._waiting = False
            self._validated_step = 0
        if self._every is not None:
            check_tokens("interval", self._every, pl_module)
            self._schedule_first(trainer, in_run(self._every, trainer))

    def _schedule_first(self, trainer: TrainerLike, every: Duration) -> None:
        """Set the count at which the first checkpoint of this fit is due, unless a restored state has it."""
        progress = trainer.progress
        if self._timed:
            # Clocks differ: ranks compare them only at steps that all ranks know.
            self._poll = 1
            if trainer.world_size > 1:
                self._poll = trainer.log_every_n_steps or 50
            self._next = following(progress.step, self._poll)
            return
        if self._by_epoch:
            if math.isinf(self._next_epoch):
                self._next_epoch = following(progress.epoch, every.value)
            return
        self._counter = every.counter
        if math.isinf(self._next):
            self._next = following(getattr(progress, self._counter), every.value)

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._clock = monotonic()

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if getattr(trainer.progress, self._counter) >= self._next:
            self._end_interval(trainer)

    def _end_interval(self, trainer: TrainerLike) -> None:
        assert self._every is not None
        progress = trainer.progress
        if self._timed:
            self._next = following(progress.step, self._poll)
            if not self._is_time_over(trainer, self._every.value):
                return
            self._clock = monotonic()
        else:
            every = in_run(self._every, trainer)
            self._next = following(getattr(progress, self._counter), every.value)
        self._waiting = True
        # If a validation or the end of the epoch follows at this step, it logs the value to compare by.
        if self._monitor is not None:
            if trainer.validation_due or epoch_ends_here(trainer):
                return
        self._request_if_rated(trainer, f"every {self._every}")

    def _is_time_over(self, trainer: TrainerLike, seconds: float) -> bool:
        is_over = monotonic() - self._clock >= seconds
        if trainer.world_size == 1:
            return is_over
        # The first rank decides for all: a request is collective.
        rows = trainer.strategy.world.agree([float(is_over)])
        return any(row[0] for row in rows)

    def on_validation_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not self._active:
            return
        if trainer.sanity_checking:
            if self._monitor is not None:
                self._monitor.warn_unlogged(trainer)
            return
        self._validated_step = trainer.global_step
        if self._is_due_after_validation(trainer):
            self._waiting = True
        if not self._waiting:
            return
        # At the last step of an epoch, on_train_epoch_end follows at the same step and has all values.
        is_final = self.save_on_train_epoch_end is False
        if is_final or not epoch_ends_here(trainer):
            self._request_if_rated(trainer, "validation ended", is_final=is_final)

    def _is_due_after_validation(self, trainer: TrainerLike) -> bool:
        if self._has_no_interval:
            return self.save_on_train_epoch_end is not True
        return self.save_on_train_epoch_end is False and self._is_epoch_due(trainer)

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not self._active:
            return
        validates = has_validation(trainer)
        acts_here = self.save_on_train_epoch_end
        if acts_here is None:
            acts_here = not validates
        if self._has_no_interval and acts_here:
            self._waiting = True
        if self.save_on_train_epoch_end is not False and self._is_epoch_due(trainer):
            self._waiting = True
        if self._waiting:
            # With a validation still to come, `monitor` may be logged there.
            is_final = not validates or self._validated_step > 0
            reason = f"epoch {trainer.current_epoch} ended"
            self._request_if_rated(trainer, reason, is_final=is_final)

    def _is_epoch_due(self, trainer: TrainerLike) -> bool:
        """Whether a checkpoint is due after this epoch; if so, schedule the next one."""
        finished_epochs = trainer.current_epoch + 1
        if finished_epochs < self._next_epoch:
            return False
        assert self._every is not None
        self._next_epoch = following(finished_epochs, self._every.value)
        return True

    def on_train_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        is_wanted = self._active and (self._waiting or self.save_last)
        if is_wanted and trainer.global_step != self._files.asked_step:
            self._files.ask(trainer, "training ended", self._score_of_step(trainer))
        self._waiting = False

    def _score_of_step(self, trainer: TrainerLike) -> float | None:
        """The score of a request outside of the interval: a value of ``monitor`` would be older than this step."""
        if self._monitor is not None:
            return None
        return float(trainer.global_step)

    def on_exception(
        self, trainer: TrainerLike, pl_module: ModuleLike, exception: BaseException
    ) -> None:
        if not self.save_on_exception or not self._active or trainer.sanity_checking:
            return
        # Weights with NaN are worth no checkpoint.
        if isinstance(exception, NonFiniteError):
            return
        if trainer.global_step == self._files.asked_step:
            return
        reason = f"{type(exception).__name__}: {exception}"
        score = self._score_of_step(trainer)
        # Other ranks may have exited: no collective.
        self._files.ask(trainer, reason, score, together=False)

    def _describe_next_try(self) -> str:
        if self._timed:
            return f"the first step after {self._every}"
        if not math.isinf(self._next):
            return f"{self._counter} {int(self._next)}"
        if not math.isinf(self._next_epoch):
            return f"epoch {int(self._next_epoch)}"
        return "the next validation"

    def _request_if_rated(
        self, trainer: TrainerLike, reason: str, is_final: bool = False
    ) -> None:
        """Request a checkpoint if ``monitor`` has a value of this step; otherwise it stays due.

        Args:
            trainer: the Trainer of the fit.
            reason: why it is due.
            is_final: ``monitor`` must have been logged by now: raise if it was not.
        """
        step = trainer.global_step
        files = self._files
        score = self._read_score(trainer, is_final)
        self._waiting = score is None
        is_admitted = score is not None and files.retention.admits(score)
        if step == files.asked_step:
            # One checkpoint a step; the value may have been logged after its request.
            if score is not None and is_admitted:
                files.rate(score)
            return
        details = reason
        if self._monitor is not None and score is not None:
            details = f"{reason}, {self.monitor} = {score:.6g}"
        if is_admitted or self.save_last:
            # `last` does not compete with the best.
            request_score = score if is_admitted else None
            path = files.ask(trainer, reason, request_score)
            message = f"checkpoint {path} ({details})"
        elif score is None:
            return
        else:
            message = f"no checkpoint of step {step}: not among the best {self.save_top_k} ({details})"
        if self.verbose and trainer.is_global_zero:
            trainer.print(message)

    def _read_score(self, trainer: TrainerLike, is_final: bool) -> float | None:
        """The score of this step, or None if ``monitor`` has no value of it yet."""
        step = trainer.global_step
        if self._monitor is None:
            return float(step)
        counts = {"epoch": trainer.current_epoch, "step": step}
        value, logged_at = self._monitor.read(trainer, counts)
        if value is None and is_final:
            raise self._monitor.missing(trainer)
        if value is None or logged_at != step:
            return None
        if math.isnan(value):
            value = self._monitor.worst
        self._score = value
        return value


def _is_finite(trainer: TrainerLike, module: ModuleLike) -> bool:
    """Whether all parameters are finite, on all ranks; the answer is the same on every rank."""
    is_finite = are_finite(module.parameters())
    world = trainer.strategy.world
    if world.size == 1:
        return is_finite
    return all(row[0] for row in world.agree([is_finite]))


def _none_for_infinity(count: float) -> float | None:
    # JSON has no infinity.
    if math.isinf(count):
        return None
    return count


def _infinity_for_none(count: float | None) -> float:
    if count is None:
        return math.inf
    return count


def _check_save_top_k(save_top_k: int, monitor: str | None) -> None:
    needs_monitor = save_top_k > 1
    if save_top_k >= -1 and (monitor is not None or not needs_monitor):
        return
    fix = None
    if needs_monitor:
        fix = "pass the name of the logged value to compare as monitor="
    raise ConfigurationError(
        "save_top_k must be -1 (all), 0 (none) or the number of best checkpoints to keep",
        found=f"save_top_k={save_top_k}, monitor={monitor!r}",
        fix=fix,
    )


def _check_also(also: object) -> None:
    if also not in (None, "lightning"):
        raise ConfigurationError(
            'also= is "lightning" or None',
            found=f"also={also!r}",
            fix="see tk.checkpoint.export for other formats",
        )


def _is_later(score: float, than: float) -> bool:
    """Compare steps: without ``monitor`` the newest is the best."""
    return score > than


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
