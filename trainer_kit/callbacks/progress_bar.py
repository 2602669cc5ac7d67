"""`TQDMProgressBar`: one line with the progress of the run, in place on a terminal, else as plain text."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, ClassVar, Final, Literal, Protocol, TextIO, final

from trainer_kit.core.display import bar_class
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike

__all__ = ["TQDMProgressBar"]

_TERMINAL_INTERVAL: Final = 0.1
_PLAIN_INTERVAL: Final = 10.0
# Layouts of the line; the first that fits is drawn. None is the default of tqdm, with the bar.
_OF_TOTAL: Final = (
    None,
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{desc}: {n_fmt}/{total_fmt}{postfix}",
)
_OF_UNKNOWN: Final = (None, "{desc}: {n_fmt} [{elapsed}{postfix}]", "{desc}: {n_fmt}{postfix}")


@dataclass
class _View:
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
        return (self.done - self.first) / max(monotonic() - self.began, 1e-9)


class _Line(Protocol):
    """Draws a `_View`."""

    due: float
    """When the next drawing is due, on the monotonic clock."""

    def show(self, view: _View) -> None:
        """Start to show ``view``."""

    def draw(self, view: _View, metrics: Mapping[str, Any]) -> None:
        """Draw the progress of ``view``."""

    def finish(self, view: _View, metrics: Mapping[str, Any]) -> None:
        """Draw the final state of ``view``."""

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        """Print above the line."""

    def close(self, leave: bool) -> None:
        """End the line; ``leave`` keeps its last state on the terminal."""


@final
class _TerminalLine:
    """One line, drawn in place.

    Args:
        bar: a tqdm bar that has not been drawn. Its ``bar_format``, if set, is kept.
    """

    def __init__(self, bar: Any) -> None:
        self.due = 0.0
        self._bar, self._format = bar, bar.bar_format
        self._bar.delay = 0.0  # its constructor would have drawn an empty line
        if measure := self._bar.dynamic_ncols:
            # Terminals without a size (in containers, recorders) report 0 by 0, and tqdm would draw nothing.
            self._bar.dynamic_ncols = lambda stream: _sized(*measure(stream))

    def show(self, view: _View) -> None:
        bar = self._bar
        bar.total, bar.initial, bar.desc = view.total, view.first, view.title
        self.draw(view, {})

    def draw(self, view: _View, metrics: Mapping[str, Any]) -> None:
        now, bar = monotonic(), self._bar
        self.due = now + _TERMINAL_INTERVAL
        bar.n, bar.last_print_t = view.done, bar._time()
        bar.start_t = bar.last_print_t - (now - view.began)
        self._fit(metrics)
        bar.refresh()

    def _fit(self, metrics: Mapping[str, Any]) -> None:
        """Choose the longest form of the line that fits the terminal: first the decoration is dropped, then values."""
        bar = self._bar
        if self._format is not None:
            bar.postfix = _shown(metrics)
            return
        bar.bar_format = None
        facts = bar.format_dict
        columns = facts["ncols"] or math.inf
        # Losses are the last values to be dropped.
        names = sorted(metrics, key=lambda name: "loss" not in name)
        texts = [_shown(metrics)]
        texts += [
            f"{_shown({name: metrics[name] for name in names[:count]})}, ..." for count in range(len(names))[:0:-1]
        ]
        layouts = _OF_TOTAL if bar.total and bar.n <= bar.total else _OF_UNKNOWN
        for layout, text in [*((layout, texts[0]) for layout in layouts), *((layouts[-1], text) for text in texts[1:])]:
            bar.bar_format, bar.postfix = layout, text
            drawn = bar.format_meter(**{**facts, "ncols": None, "bar_format": layout, "postfix": text})
            if len(drawn) <= columns:
                return
        shortest = _shown({name: metrics[name] for name in names[:1]}) or bar.desc
        bar.bar_format = shortest[: int(columns)].replace("{", "{{").replace("}", "}}")

    def finish(self, view: _View, metrics: Mapping[str, Any]) -> None:
        self.draw(view, metrics)

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        self._bar.write(text, end=end, file=file)

    def close(self, leave: bool) -> None:
        self._bar.leave = leave
        self._bar.close()


@final
class _PlainLine:
    """A line of text at most every ten seconds, and one whenever something is complete."""

    def __init__(self, file: TextIO) -> None:
        self.due = monotonic() + _PLAIN_INTERVAL
        self._file = file

    def show(self, view: _View) -> None:
        """There is nothing to print yet."""

    def draw(self, view: _View, metrics: Mapping[str, Any]) -> None:
        self.due = monotonic() + _PLAIN_INTERVAL
        total = "" if view.total is None else f"/{view.total}"
        values = _shown(metrics)
        line = f"{view.title}: {view.done}{total} batches, {view.rate:.4g}/s{', ' * bool(values)}{values}"
        print(line, file=self._file, flush=True)

    def finish(self, view: _View, metrics: Mapping[str, Any]) -> None:
        self.draw(view, metrics)

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        print(text, end=end, file=file)

    def close(self, leave: bool) -> None:
        """Nothing stays open."""


def _sized(columns: int | None, rows: int | None) -> tuple[int | None, int | None]:
    return 80 if columns == 0 else columns, 24 if rows == 0 else rows


def _shown(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_number(value)}" for name, value in metrics.items())


def _number(value: Any) -> str:
    if not isinstance(value, float) and hasattr(value, "item"):
        value = value.item()  # of `get_metrics`: sync point
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1e6 else f"{value:.3e}"


_TOTALS: Final = "read trainer.num_training_batches, num_val_batches, num_test_batches or num_predict_batches"
_DRAWS: Final = "override get_metrics, init_train_tqdm, init_validation_tqdm, ... or a hook, and call super()"


class TQDMProgressBar(Callback):
    """One line on stderr: epoch, batches, rate, and what was logged with ``prog_bar=True``.

    It is drawn at most ten times a second, so a step costs one addition and one read of the clock. Values are those of
    the last flush: nothing is read from the device. If stderr is not a terminal, plain lines are printed instead: one
    at the end of each epoch, and between them at most one every ten seconds. Only rank 0 draws.

    Args:
        refresh_rate: draw at most once in this many batches; 0 for never.
        process_position: lines to leave free above, for bars of other programs.
        leave: keep the finished line of each epoch.

    Raises:
        ConfigurationError: for a negative number; for a subclass that overrides a method that is never called.

    A subclass may override `get_metrics`, the descriptions, and ``init_train_tqdm``, ``init_validation_tqdm``, …,
    which make the bars.

    Example:
        >>> TQDMProgressBar(refresh_rate=0).is_enabled
        False
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "late"  # the last line of an epoch has the epoch's values
    BAR_FORMAT: str | None = None
    """tqdm's ``bar_format``; None fits the line to the terminal."""
    sanity_check_description: str = "Sanity check"
    validation_description: str = "Validation"
    test_description: str = "Test"
    predict_description: str = "Predict"
    never_called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("total_train_batches", "total_val_batches", "total_val_batches_current_dataloader"), _TOTALS),
        **dict.fromkeys(("total_test_batches_current_dataloader", "total_predict_batches_current_dataloader"), _TOTALS),
        **dict.fromkeys(("has_dataloader_changed", "reset_dataloader_idx_tracker", "refresh"), _DRAWS),
        **dict.fromkeys(("_should_update", "_update", "_init_progress", "_add_task", "configure_columns"), _DRAWS),
        "train_description": "the epoch is the description of training: override init_train_tqdm for the rest",
    }

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        if refresh_rate < 0 or process_position < 0:
            raise ConfigurationError(
                "a progress bar counts batches and lines from zero up",
                found=f"refresh_rate={refresh_rate}, process_position={process_position}",
            )
        self.refresh_rate, self.process_position, self.leave = refresh_rate, process_position, leave
        self._enabled = True
        self._shown = False  # enabled, on rank 0
        self._fitting = False
        self._line: _Line | None = None
        self._view = _View("", None, 0, 0, 0.0)
        self._aside: _View | None = None  # the epoch, while a validation has the line
        self._aside_line: _Line | None = None  # its line, while a validation has one of its own
        self._module: Any = None
        self._aside_since = 0.0
        self._done = self._drawn = 0
        self._next = math.inf

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is enabled."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_drawn(self) -> bool:
        """Whether a line is on the screen, which a plain ``print`` would tear."""
        return self._line is not None

    def enable(self) -> None:
        """Draw, from the next entry point on."""
        self._enabled = True

    def disable(self) -> None:
        """Draw nothing, from the next entry point on."""
        self._enabled = False

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """Like ``print``, above the line; on rank 0."""
        if self._line is not None:
            self._line.write(sep.join(map(str, values)), end, file)
        elif self._shown:
            builtins.print(*values, sep=sep, end=end, file=file)

    def get_metrics(self, trainer: TrainerLike, module: ModuleLike) -> Mapping[str, Any]:
        """The values to show, by name; called at most ten times a second."""
        return trainer.progress_bar_metrics

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
        options = {"position": self.process_position, "dynamic_ncols": True, "bar_format": self.BAR_FORMAT}
        return bar_class()(desc=description, file=sys.stderr, leave=True, delay=1e-9, unit="batch", **options)

    def setup(self, trainer: TrainerLike, module: ModuleLike, stage: str) -> None:
        self._module = module
        self._shown = self.is_enabled and trainer.is_global_zero
        self._fitting = stage == "fit"
        self._next = math.inf

    def teardown(self, trainer: TrainerLike, module: ModuleLike, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: TrainerLike, module: ModuleLike, exception: BaseException) -> None:
        self._close()

    def on_train_epoch_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        epoch, last = trainer.current_epoch, trainer.max_epochs
        title = f"Epoch {epoch}" if last is None or last < 0 else f"Epoch {epoch}/{last - 1}"
        self._show("train", title, [trainer.num_training_batches], trainer.progress.epoch_batch)

    def on_train_batch_end(
        self, trainer: TrainerLike, module: ModuleLike, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done += 1
        if monotonic() >= self._next:
            self._draw(trainer)

    def on_train_epoch_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if self._line is not None:
            self._finish(trainer)
            if self.leave:
                self._close()

    def on_train_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        self._close()

    def on_sanity_check_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        self._show("sanity", self.sanity_check_description, trainer.num_sanity_val_batches)

    def on_sanity_check_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        self._close(leave=False)

    def on_validation_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if trainer.sanity_checking:
            return
        if self._fitting:
            self._aside, self._aside_since = replace(self._view, done=self._done), monotonic()
        self._show("validation", self.validation_description, trainer.num_val_batches)

    def on_validation_batch_end(
        self,
        trainer: TrainerLike,
        module: ModuleLike,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._done += 1
        if monotonic() >= self._next:
            self._draw(trainer)

    def on_validation_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if trainer.sanity_checking:
            return
        if self._aside is None:
            self._end(trainer)
            return
        view, self._aside = self._aside, None
        view.began += monotonic() - self._aside_since
        self._done, self._view = view.done, view
        if self._aside_line is not None:
            assert self._line is not None
            self._line.close(leave=False)
            self._line, self._aside_line = self._aside_line, None
        if self._line is not None:
            self._line.show(view)
            self._next = self._line.due

    def on_test_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        self._show("test", self.test_description, trainer.num_test_batches)

    on_test_batch_end = on_validation_batch_end

    def on_test_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        self._end(trainer)

    def on_predict_start(self, trainer: TrainerLike, module: ModuleLike) -> None:
        self._show("predict", self.predict_description, trainer.num_predict_batches)

    on_predict_batch_end = on_validation_batch_end

    def on_predict_end(self, trainer: TrainerLike, module: ModuleLike) -> None:
        self._end(trainer)

    def _show(self, kind: str, title: str, batches: Iterable[int | float], done: int = 0) -> None:
        if not self._shown:
            return
        name = f"init_{kind}_tqdm"
        own = getattr(type(self), name) is not getattr(TQDMProgressBar, name)
        if self._line is None or (own and kind == "validation"):
            file = sys.stderr
            terminal = file.isatty()
            bar = getattr(self, name)() if own or terminal else None
            if bar is not None and kind != "train":
                title = (bar.desc or title).removesuffix(": ")
            if self._line is not None:
                self._aside_line = self._line
            self._line = _TerminalLine(bar) if terminal else _PlainLine(file)
            if bar is not None and not terminal:
                bar.close()
        total = sum(batches)
        self._done = self._drawn = done
        self._view = _View(title, int(total) if math.isfinite(total) else None, done, done, monotonic())
        self._line.show(self._view)
        self._next = self._line.due

    def _draw(self, trainer: TrainerLike) -> None:
        if self._line is not None and self._done - self._drawn >= self.refresh_rate:
            self._drawn = self._view.done = self._done
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
        self._aside = None
        lines, self._line, self._aside_line = (self._line, self._aside_line), None, None
        for line in filter(None, lines):
            line.close(leave)
