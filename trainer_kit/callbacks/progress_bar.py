"""`ProgressBar`, the base of progress bars, and `TQDMProgressBar`: one line in place on a terminal, else plain text."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Final, Literal, Protocol, TextIO, final

from trainer_kit.core.display import bar_class, plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.notebook import in_notebook, message_stream, widget_bar_class
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.types import StateDict

__all__ = [
    "Line",
    "PlainLine",
    "ProgressBar",
    "TQDMProgressBar",
    "TerminalLine",
    "View",
    "new_bar",
    "shown_values",
]

_TERMINAL_INTERVAL: Final = 0.1
_PLAIN_INTERVAL: Final = 10.0
_NOTEBOOK_COLUMNS: Final = 100
# Layouts of the line; the first that fits is drawn. None is the default of tqdm, with the bar.
_LAYOUTS_WITH_TOTAL: Final = (
    None,
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{desc}: {n_fmt}/{total_fmt}{postfix}",
)
_LAYOUTS_WITHOUT_TOTAL: Final = (
    None,
    "{desc}: {n_fmt} [{elapsed}{postfix}]",
    "{desc}: {n_fmt}{postfix}",
)


@dataclass
class View:
    """The content of the line.

    Attributes:
        title: such as ``Epoch 3``.
        total: number of batches, or None if it is unknown.
        first: batches completed before the line was shown.
        done: batches completed so far.
        began: when the line was shown, on the monotonic clock, plus the time that validation took.
    """

    title: str
    total: int | None
    first: int
    done: int
    began: float

    @property
    def rate(self) -> float:
        """Batches a second."""
        seconds = max(monotonic() - self.began, 1e-9)
        return (self.done - self.first) / seconds

    def leave_out(self, seconds: float) -> None:
        """Leave ``seconds`` of validation out of the rate."""
        self.began += seconds


class Line(Protocol):
    """Draws a `View`."""

    due: float
    """When the next drawing is due, on the monotonic clock."""

    def show(self, view: View) -> None:
        """Start to show ``view``."""

    def draw(self, view: View, metrics: Mapping[str, object]) -> None:
        """Draw the progress of ``view``."""

    def finish(self, view: View, metrics: Mapping[str, object]) -> None:
        """Draw the final state of ``view``."""

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        """Print above the line."""

    def close(self, leave: bool) -> None:
        """End the line; ``leave`` keeps its last state on the terminal."""


@final
class TerminalLine:
    """One line, drawn in place on a terminal or in the output of a notebook's cell.

    Args:
        bar: a tqdm bar that has not been drawn. Its ``bar_format``, if set, is kept.
    """

    def __init__(self, bar: Any) -> None:
        self.due = 0.0
        self._bar = bar
        self._user_format = bar.bar_format
        # With a delay the constructor drew nothing; from now on every call draws.
        bar.delay = 0.0
        measure = bar.dynamic_ncols
        if measure:
            # Terminals without a size (in containers, recorders) report 0 by 0, and tqdm would draw nothing.
            bar.dynamic_ncols = lambda stream: _default_size(*measure(stream))

    def show(self, view: View) -> None:
        tqdm_bar = self._bar
        if hasattr(tqdm_bar, "container"):
            # The widget of a user's bar has a maximum and a width of its own.
            tqdm_bar.reset(total=view.total)
        tqdm_bar.total = view.total
        tqdm_bar.initial = view.first
        tqdm_bar.desc = view.title
        self.draw(view, {})

    def draw(self, view: View, metrics: Mapping[str, object]) -> None:
        bar = self._bar
        drawn_at = monotonic()
        self.due = drawn_at + _TERMINAL_INTERVAL
        bar.n = view.done
        # tqdm has a clock of its own.
        bar.last_print_t = bar._time()
        bar.start_t = bar.last_print_t - (drawn_at - view.began)
        if self._user_format is not None:
            bar.postfix = shown_values(metrics)
        else:
            self._choose_layout(metrics)
        bar.refresh()

    def _choose_layout(self, metrics: Mapping[str, object]) -> None:
        """Choose the longest form of the line that fits the terminal: first the decoration is dropped, then values."""
        bar = self._bar
        bar.bar_format = None
        fields = bar.format_dict
        columns = fields["ncols"] or math.inf
        # tqdm would cut the line instead of returning its length.
        fields["ncols"] = None
        # A run that goes on beyond its total shows none.
        has_total = bar.total and bar.n <= bar.total
        layouts: Sequence[str | None] = _LAYOUTS_WITHOUT_TOTAL
        if has_total:
            layouts = _LAYOUTS_WITH_TOTAL
        for layout, text in _candidates(layouts, metrics):
            bar.bar_format = layout
            bar.postfix = text
            fields["bar_format"] = layout
            fields["postfix"] = text
            if len(bar.format_meter(**fields)) <= columns:
                return
        # Not even the last layout fits: the beginning of the first value, or of the title.
        first_metric = {name: metrics[name] for name in _sort_names(metrics)[:1]}
        shortest = shown_values(first_metric) or bar.desc
        # As the layout itself, so braces of a name are no fields.
        text = shortest[: int(columns)]
        bar.bar_format = text.replace("{", "{{").replace("}", "}}")

    def finish(self, view: View, metrics: Mapping[str, object]) -> None:
        self.draw(view, metrics)

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        self._bar.write(text, end=end, file=file)

    def close(self, leave: bool) -> None:
        self._bar.leave = leave
        self._bar.close()


def _candidates(
    layouts: Sequence[str | None], metrics: Mapping[str, object]
) -> Iterator[tuple[str | None, str]]:
    """Yield layouts of the line and its values, the longest first."""
    text = shown_values(metrics)
    for layout in layouts:
        yield layout, text
    names = _sort_names(metrics)
    for count in reversed(range(1, len(names))):
        shown_metrics = {name: metrics[name] for name in names[:count]}
        yield layouts[-1], f"{shown_values(shown_metrics)}, ..."


def _sort_names(metrics: Mapping[str, object]) -> list[str]:
    """Sort names so that losses, which are the last values to be dropped, come first."""
    return sorted(metrics, key=lambda name: "loss" not in name)


@final
class PlainLine:
    """A line of text at most every ten seconds, and one whenever something is complete."""

    def __init__(self, file: TextIO) -> None:
        # The first line after ten seconds: a short epoch prints only its last line.
        self.due = monotonic() + _PLAIN_INTERVAL
        self._file = file

    def show(self, view: View) -> None:
        """There is nothing to print yet."""

    def draw(self, view: View, metrics: Mapping[str, object]) -> None:
        self.due = monotonic() + _PLAIN_INTERVAL
        count = str(view.done)
        if view.total is not None:
            count += f"/{view.total}"
        line = f"{view.title}: {count} batches, {view.rate:.4g}/s"
        values = shown_values(metrics)
        if values:
            line += f", {values}"
        # Flushed: the output is a file or a pipe, which someone follows.
        print(line, file=self._file, flush=True)

    def finish(self, view: View, metrics: Mapping[str, object]) -> None:
        self.draw(view, metrics)

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        print(text, end=end, file=file)

    def close(self, leave: bool) -> None:
        """Nothing stays open."""


def _default_size(
    columns: int | None, rows: int | None
) -> tuple[int | None, int | None]:
    """Replace zeros by the size of a usual terminal; None stays unknown."""
    if columns == 0:
        columns = 80
    if rows == 0:
        rows = 24
    return columns, rows


def shown_values(
    metrics: Mapping[str, object], delimiter: str = ", ", digits: str = ".3g"
) -> str:
    """``name=value`` for each metric.

    Example:
        >>> shown_values({"loss": 0.12345, "note": "warm", "tokens": 3e9})
        'loss=0.123, note=warm, tokens=3.000e+09'
    """
    texts = []
    for name, value in metrics.items():
        texts.append(f"{name}={_format_value(value, digits)}")
    return delimiter.join(texts)


def _format_value(value: object, digits: str) -> str:
    # A user's `get_metrics` may return tensors.
    if not isinstance(value, float) and hasattr(value, "item"):
        # sync point: only of a user's own `get_metrics`
        value = value.item()
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e6:
        return f"{value:.3e}"
    return f"{value:{digits}}"


_DRAWS: Final = (
    "override get_metrics, a description, a total, or a hook, and call super()"
)
_TOTALS: Final = "override total_val_batches, total_test_batches or total_predict_batches: one line shows all loaders"


class ProgressBar(Callback):
    """The base of progress bars: follows a run, and draws nothing. `TQDMProgressBar` and `RichProgressBar` draw.

    Subclass it and override hooks to draw by yourself, as in the example; the Trainer then adds no other bar. What
    has no underscore may be overridden, also in a subclass of a bar that draws: such a bar draws on rank 0, at most ten
    times a second, and a step costs one addition and one read of the clock.

    When a fit ends, a bar that is enabled prints a summary through ``trainer.print``: steps, where the time went, the
    best checkpoint of each `ModelCheckpoint` with its value, the directory of the logs, and the report.

    Example:
        >>> class Percent(ProgressBar):
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %")
    """

    # The last line of an epoch has the epoch's values.
    order: ClassVar[Literal["early", "normal", "late"]] = "late"
    refresh_rate: int = 1
    """Batches between two drawings, at least; 0 for none."""
    leave: bool = False
    """Whether the finished line of each epoch stays."""
    sanity_check_description: str = "Sanity check"
    validation_description: str = "Validation"
    test_description: str = "Test"
    predict_description: str = "Predict"
    never_called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                "total_val_batches_current_dataloader",
                "total_test_batches_current_dataloader",
            ),
            _TOTALS,
        ),
        "total_predict_batches_current_dataloader": _TOTALS,
        **dict.fromkeys(
            ("has_dataloader_changed", "reset_dataloader_idx_tracker", "refresh"),
            _DRAWS,
        ),
        **dict.fromkeys(
            ("_should_update", "_update", "_init_progress", "_add_task"), _DRAWS
        ),
    }

    def __init__(self) -> None:
        self._enabled = True
        # Whether it draws: enabled, on rank 0.
        self._is_drawing = False
        self._is_fit = False
        self._line: Line | None = None
        self._view = View("", None, 0, 0, 0.0)
        # The epoch while a validation has the line, and its line if the validation has a separate one.
        self._epoch_view: View | None = None
        self._epoch_line: Line | None = None
        self._validation_start = 0.0
        # Whether validation inside fit has a separate line.
        self._has_validation_line = False
        self._trainer: TrainerLike | None = None
        self._module: Any = None
        # Batches that are complete, and that the line shows.
        self._done = 0
        self._drawn = 0
        # When the next drawing is due, on the monotonic clock.
        self._next = math.inf
        self._times = _Times()

    @property
    def trainer(self) -> TrainerLike:
        """The Trainer of the running, or last, entry point.

        Raises:
            ConfigurationError: before the first one.
        """
        if self._trainer is None:
            raise ConfigurationError(
                "the progress bar has no Trainer yet", fix="read it in or after setup"
            )
        return self._trainer

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is enabled."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether the bar is not enabled."""
        return not self.is_enabled

    @property
    def is_drawn(self) -> bool:
        """Whether a line is on the screen, which a plain ``print`` would tear."""
        return self._line is not None

    @property
    def train_description(self) -> str:
        """The title of training; read at the start of each epoch."""
        title = f"Epoch {self.trainer.current_epoch}"
        epochs = self.trainer.max_epochs
        if epochs is None or epochs < 0:
            return title
        return f"{title}/{epochs - 1}"

    @property
    def total_train_batches(self) -> int | float:
        """Batches of the epoch on this rank; infinite if they are not known."""
        return self.trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """Batches of all validation loaders; in the sanity check, those that it reads."""
        if self.trainer.sanity_checking:
            return sum(self.trainer.num_sanity_val_batches)
        return sum(self.trainer.num_val_batches)

    @property
    def total_test_batches(self) -> int | float:
        """Batches of all test loaders."""
        return sum(self.trainer.num_test_batches)

    @property
    def total_predict_batches(self) -> int | float:
        """Batches of all predict loaders."""
        return sum(self.trainer.num_predict_batches)

    def enable(self) -> None:
        """Draw, from the next entry point on."""
        self._enabled = True

    def disable(self) -> None:
        """Draw nothing, from the next entry point on."""
        self._enabled = False

    def print(
        self,
        *values: object,
        sep: str = " ",
        end: str = "\n",
        file: TextIO | None = None,
    ) -> None:
        """Print as ``print`` does, above the bar; only on rank 0, and not while the bar is disabled.

        Args:
            values: the objects to print.
            sep: the text between two of them.
            end: the text after the last one.
            file: where to print; None for standard output.
        """
        if self._line is not None:
            text = sep.join(str(value) for value in values)
            self._line.write(text, end, file)
        elif self._is_drawing:
            builtins.print(*values, sep=sep, end=end, file=file)

    def get_metrics(
        self, trainer: TrainerLike, pl_module: ModuleLike
    ) -> Mapping[str, Any]:
        """The values to show, by name; called at most ten times a second.

        By default those logged with ``prog_bar=True``. An override may return numbers, text and tensors of one element,
        which are then read from the device.

        Args:
            trainer: the running Trainer.
            pl_module: the module that it runs.
        """
        return trainer.progress_bar_metrics

    def _open_line(self, kind: str, title: str) -> tuple[Line | None, str]:
        """Open a line for sanity, train, validation, test or predict; return it and its title. None draws nothing."""
        return None, title

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._trainer = trainer
        self._module = pl_module
        # Decided here: `enable` and `disable` act from the next entry point on, so that no line is left open.
        self._is_drawing = self.is_enabled and trainer.is_global_zero
        self._is_fit = stage == "fit"
        self._next = math.inf
        self._times = _Times(began=monotonic())

    def teardown(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._close()

    def on_exception(
        self, trainer: TrainerLike, pl_module: ModuleLike, exception: BaseException
    ) -> None:
        self._close()

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._times.start_training(trainer.global_step)

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._is_drawing:
            title = self.train_description
            done = trainer.progress.epoch_batch
            self._show("train", title, self.total_train_batches, done)

    def on_train_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        # All that a step pays: one addition and one read of the clock. `_next` is infinite where nothing is drawn.
        self._done += 1
        if monotonic() >= self._next:
            self._draw(trainer)

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._line is not None:
            self._finish(trainer)
            if self.leave:
                self._close()

    def on_train_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._close()

    def on_fit_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._is_drawing and not trainer.fast_dev_run:
            for line in _summarize_fit(trainer, self._times):
                trainer.print(line)

    def on_sanity_check_start(
        self, trainer: TrainerLike, pl_module: ModuleLike
    ) -> None:
        self._show("sanity", self.sanity_check_description, self.total_val_batches)

    def on_sanity_check_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._close(leave=False)

    def on_validation_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if trainer.sanity_checking:
            return
        # The epoch continues after the validation with its own counts and start.
        if self._is_fit:
            self._epoch_view = replace(self._view, done=self._done)
            self._validation_start = monotonic()
        self._show("validation", self.validation_description, self.total_val_batches)

    def on_validation_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._done += 1
        if monotonic() >= self._next:
            self._draw(trainer)

    def on_validation_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if trainer.sanity_checking:
            return
        view = self._epoch_view
        if view is None:
            self._end(trainer)
            return
        # Back to the epoch, on its line.
        self._epoch_view = None
        seconds = monotonic() - self._validation_start
        # Otherwise the rate of the epoch would drop with each validation inside it.
        view.leave_out(seconds)
        self._times.add_validation(seconds)
        self._view = view
        self._done = view.done
        if self._epoch_line is not None:
            assert self._line is not None
            self._line.close(leave=False)
            self._line = self._epoch_line
            self._epoch_line = None
        if self._line is not None:
            self._line.show(view)
            self._next = self._line.due

    def on_test_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._show("test", self.test_description, self.total_test_batches)

    on_test_batch_end = on_validation_batch_end

    def on_test_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._end(trainer)

    def on_predict_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._show("predict", self.predict_description, self.total_predict_batches)

    on_predict_batch_end = on_validation_batch_end

    def on_predict_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._end(trainer)

    def _show(self, kind: str, title: str, total: int | float, done: int = 0) -> None:
        self._done = done
        self._drawn = done
        if not self._is_drawing:
            return
        needs_line = self._has_validation_line and kind == "validation"
        if self._line is None or needs_line:
            line, title = self._open_line(kind, title)
            if line is None:
                return
            self._epoch_line = self._line
            self._line = line
        total_batches = None
        if math.isfinite(total):
            total_batches = int(total)
        self._view = View(title, total_batches, done, done, monotonic())
        self._line.show(self._view)
        self._next = self._line.due

    def _draw(self, trainer: TrainerLike) -> None:
        # The clock allows a drawing; the user's `refresh_rate` may ask for fewer.
        if self._line is None or self._done - self._drawn < self.refresh_rate:
            return
        self._drawn = self._done
        self._view.done = self._done
        self._line.draw(self._view, self.get_metrics(trainer, self._module))
        self._next = self._line.due

    def _finish(self, trainer: TrainerLike) -> None:
        if self._line is not None:
            self._view.done = self._done
            self._line.finish(self._view, self.get_metrics(trainer, self._module))
            self._next = self._line.due

    def _end(self, trainer: TrainerLike) -> None:
        self._finish(trainer)
        self._close()

    def _close(self, leave: bool = True) -> None:
        self._next = math.inf
        self._epoch_view = None
        lines = (self._line, self._epoch_line)
        # Before they are closed: an interrupt in between must not close them twice.
        self._line = None
        self._epoch_line = None
        for line in lines:
            if line is not None:
                line.close(leave)


@dataclass
class _Times:
    """When a fit began, on the monotonic clock, and how its time passed, in seconds.

    Attributes:
        began: when it was set up.
        trained: when training began.
        validation: seconds of validation since then.
        from_step: the step at which training began.
    """

    began: float = 0.0
    trained: float = 0.0
    validation: float = 0.0
    from_step: int = 0

    def start_training(self, step: int) -> None:
        """Note that training begins at ``step``."""
        self.trained = monotonic()
        self.from_step = step

    def add_validation(self, seconds: float) -> None:
        """Count ``seconds`` as validation."""
        self.validation += seconds


def _summarize_fit(trainer: TrainerLike, times: _Times) -> list[str]:
    """Describe a fit that has ended, in at most ten lines."""
    from trainer_kit.state.records import REPORT

    steps = trainer.global_step - times.from_step
    ended = monotonic()
    line = f"fit: {plural(steps, 'step')} to step {trainer.global_step} in {ended - times.began:.1f} s"
    split = _format_time_split(trainer, times, ended)
    if split:
        line += f" = {split}"
    lines = [line]
    lines += _describe_checkpoints(trainer)
    if trainer.loggers:
        lines.append(f"logs: {trainer.log_dir}")
        lines.append(f"report: {Path(trainer.log_dir) / REPORT}")
    # A first program often logs nothing, and its author wonders where the loss is.
    if steps and not trainer.callback_metrics:
        lines.append(
            'nothing was logged: self.log("loss", loss, prog_bar=True) in training_step shows the loss'
        )
    return lines


def _format_time_split(trainer: TrainerLike, times: _Times, ended: float) -> str:
    """Where the time of a fit went; a `ThroughputMonitor` knows more, and all restarts."""
    # Imported here: most runs have none.
    from trainer_kit.callbacks.monitors import ThroughputMonitor

    seconds_by_section = {"setup": times.trained - times.began}
    split = {
        "training": ended - times.trained - times.validation,
        "validation": times.validation,
    }
    for callback in trainer.callbacks:
        if isinstance(callback, ThroughputMonitor):
            split = callback.time_split()
    seconds_by_section |= split
    texts = []
    for name, seconds in seconds_by_section.items():
        # Less would be shown as 0.0 s.
        if seconds >= 0.05:
            texts.append(f"{name} {seconds:.1f} s")
    return " + ".join(texts)


def _describe_checkpoints(trainer: TrainerLike) -> list[str]:
    from trainer_kit.state.runs import keep_checkpoints

    lines = []
    for callback in keep_checkpoints(trainer.callbacks)[:6]:
        path = callback.best_model_path
        if not path:
            continue
        score = callback.best_model_score
        label = "newest"
        if score is not None:
            # No sync point: the score is on the CPU.
            label = f"best {callback.monitor}={float(score):.6g}"
        lines.append(f"checkpoint: {label}: {path}")
    return lines


def _drawn_bar(progress_bar: TQDMProgressBar, kind: str) -> Any:
    """tqdm's bar of an entry point; inside a fit, validation has one where ``init_validation_tqdm`` is overridden."""
    if kind in progress_bar._bars:
        return progress_bar._bars[kind]
    prefix = kind
    if kind == "validation":
        prefix = "val"
    raise ConfigurationError(
        f"{type(progress_bar).__name__} has drawn no {prefix}_progress_bar",
        found="no such entry point, or output that is not a terminal, where lines are printed",
        fix=f"override init_{kind}_tqdm, which creates it; in a fit, train_progress_bar shows validation",
    )


def new_bar(description: str, position: int = 0, **options: Any) -> Any:
    """A bar of tqdm that has not been drawn: one line, or in a notebook a widget, where those can be shown.

    Args:
        description: its title.
        position: lines to leave free above it.
        options: further arguments of tqdm.
    """
    # A delay: the constructor draws nothing.
    options |= {"desc": description, "leave": True, "delay": 1e-9, "unit": "batch"}
    options["position"] = position
    if in_notebook():
        # tqdm would measure the terminal in which the notebook's server was started.
        options["ncols"] = _NOTEBOOK_COLUMNS
    else:
        options["dynamic_ncols"] = True
    widget_bar = widget_bar_class()
    if widget_bar is not None:
        # A widget is as wide as its text; made without a total it would be narrow for ever.
        options |= {"ncols": None, "total": 1}
        return widget_bar(**options)
    return bar_class()(file=message_stream(), **options)


class TQDMProgressBar(ProgressBar):
    """One line on stderr: epoch, batches, rate, and what was logged with ``prog_bar=True``.

    It is drawn at most ten times a second, so a step costs one addition and one read of the clock. Values are those of
    the last flush: nothing is read from the device. If stderr is not a terminal, plain lines are printed instead: one
    at the end of each epoch, and between them at most one every ten seconds. Only rank 0 draws.

    In a notebook it is one bar of ``tqdm.notebook`` in the output of the cell, for all epochs, where ``tqdm.auto``
    would choose one: it needs ipywidgets. Without ipywidgets, and in forked processes, it is one line of text on
    standard output.

    Args:
        refresh_rate: draw at most once in this many batches; 0 for never.
        process_position: lines to leave free above, for bars of other programs.
        leave: keep the finished line of each epoch.

    Raises:
        ConfigurationError: for a negative number; for a subclass that overrides a method that is never called.

    A subclass may override what `ProgressBar` has, and ``init_train_tqdm``, ``init_validation_tqdm``, …, which make the
    bars.

    Example:
        >>> TQDMProgressBar(refresh_rate=0).is_enabled
        False
    """

    BAR_FORMAT: str | None = None
    """tqdm's ``bar_format``; None fits the line to the terminal."""

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False
    ) -> None:
        if refresh_rate < 0 or process_position < 0:
            raise ConfigurationError(
                "refresh_rate and process_position must be ≥ 0",
                found=f"refresh_rate={refresh_rate}, process_position={process_position}",
            )
        self.refresh_rate = refresh_rate
        self.process_position = process_position
        self.leave = leave
        super().__init__()
        self._bars: dict[str, Any] = {}
        self._has_validation_line = self._overrides("init_validation_tqdm")

    def init_sanity_tqdm(self) -> Any:
        """The bar of the sanity check; its description is shown."""
        return self._new_bar(self.sanity_check_description)

    def init_train_tqdm(self) -> Any:
        """The bar of training; its description becomes the epoch."""
        return self._new_bar("")

    def init_validation_tqdm(self) -> Any:
        """The bar of validation. Inside ``fit`` validation shares the line of training, unless this is overridden."""
        return self._new_bar(self.validation_description)

    def init_test_tqdm(self) -> Any:
        """The bar of a test; its description is shown."""
        return self._new_bar(self.test_description)

    def init_predict_tqdm(self) -> Any:
        """The bar of a prediction; its description is shown."""
        return self._new_bar(self.predict_description)

    def _new_bar(self, description: str) -> Any:
        return new_bar(
            description, position=self.process_position, bar_format=self.BAR_FORMAT
        )

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(TQDMProgressBar, name)

    def _open_line(self, kind: str, title: str) -> tuple[Line | None, str]:
        file = message_stream()
        is_in_place = file.isatty() or in_notebook()
        method = f"init_{kind}_tqdm"
        bar = None
        # For a file only a user's bar is made, for its description.
        if is_in_place or self._overrides(method):
            make_bar = getattr(self, method)
            bar = make_bar()
        if bar is None:
            return PlainLine(file), title
        if kind != "train":
            title = (bar.desc or title).removesuffix(": ")
        self._bars[kind] = bar
        if is_in_place:
            return TerminalLine(bar), title
        # Its description was read; the bar itself would write control characters to a file.
        bar.close()
        return PlainLine(file), title

    def __getstate__(self) -> StateDict:
        """Leave out the bars, which belong to this process."""
        return {**self.__dict__, "_bars": {}}

    train_progress_bar = property(partial(_drawn_bar, kind="train"))
    val_progress_bar = property(partial(_drawn_bar, kind="validation"))
    test_progress_bar = property(partial(_drawn_bar, kind="test"))
    predict_progress_bar = property(partial(_drawn_bar, kind="predict"))
