"""Run a training script up to its first ``trainer.fit``, and return what the script passes to it."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.errors import ConfigurationError, TrainerKitError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.types import Keywords, Loaders
from trainer_kit.inference.loading import init_empty_weights
from trainer_kit.launch.bootstrap import run_words
from trainer_kit.training.session import Session

__all__ = ["CapturedFit", "captured_fit", "failed_script"]

_HERE: Final = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "single_device",
    "precision": None,
    "logger": False,
}
"""Arguments of a captured Trainer, which must be made on a machine that has none of the script's devices."""


@final
@dataclass(frozen=True, kw_only=True)
class CapturedFit:
    """The arguments of a script's first ``trainer.fit``, which has not run.

    Attributes:
        trainer: the script's Trainer, but on one CPU process, in float32 and without loggers.
        arguments: the arguments that the script passed to this Trainer, objects included.
        module: the module.
        train_dataloaders: the loaders that were passed; None if the datamodule or the module has them.
        val_dataloaders: likewise.
        datamodule: the DataModule, or None.
    """

    trainer: Session
    arguments: Mapping[str, Any]
    module: TrainModule
    train_dataloaders: Loaders
    val_dataloaders: Loaders
    datamodule: DataModule | None


class _Reached(BaseException):
    """Unwinds the script; an ``except Exception`` of the script does not catch it."""


def captured_fit(
    script: str,
    arguments: Sequence[str] = (),
    *,
    trainer_class: type[Session],
    empty_weights: bool = False,
) -> CapturedFit:
    """Run a script as ``python script arguments`` does, and return the arguments of its first ``trainer.fit``.

    The fit does not run, nor does anything after it. ``sys.argv``, ``sys.path[0]`` and ``__main__`` stay those of the
    script, because workers of data loaders find its classes there: call this once in a process.

    Args:
        script: the path of the script, which needs no change.
        arguments: the script's own arguments.
        trainer_class: the class whose ``fit`` is captured, also in subclasses: `Trainer`.
        empty_weights: parameters of modules are made on the meta device, with shapes and dtypes and without memory.

    Raises:
        ConfigurationError: the script does not exist, fails or exits before a fit, or it calls no fit.

    Example:
        >>> import sys, tempfile
        >>> from trainer_kit import Trainer
        >>> main, words, place = sys.modules["__main__"], sys.argv, sys.path[0]
        >>> source = '''
        ... import sys, torch, trainer_kit as tk
        ... from trainer_kit.testing import TinyModule
        ... tk.Trainer(strategy="fsdp", devices=64).fit(TinyModule(), [torch.randn(int(sys.argv[1]), 32)])
        ... '''
        >>> with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        ...     _ = file.write(source), file.flush()
        ...     fit = captured_fit(file.name, ["4"], trainer_class=Trainer, empty_weights=True)
        >>> sys.modules["__main__"], sys.argv, sys.path[0] = main, words, place
        >>> fit.arguments, fit.train_dataloaders[0].shape
        ({'strategy': 'fsdp', 'devices': 64}, torch.Size([4, 32]))
        >>> {weight.device.type for weight in fit.module.parameters()}
        {'meta'}
    """
    if not Path(script).is_file():
        raise ConfigurationError(
            "the script does not exist",
            found=script,
            fix="pass the path of a Python file",
        )
    captured: list[CapturedFit] = []
    mains: list[ModuleType] = []
    ended = "it ran to its end"
    with ExitStack() as stack:
        stack.enter_context(_capturing(trainer_class, captured, mains))
        if empty_weights:
            stack.enter_context(init_empty_weights())
        try:
            run_words([script, *arguments])
        except _Reached:
            pass
        except SystemExit as error:
            ended = f"it exited with {error.code!r}"
        except Exception as error:
            # With a fit the script has caught _Reached, by a bare except, and failed for want of the results.
            if not captured:
                fix = "it reads weights before the fit: call trainer.plan(...) there instead of fit(...)"
                raise failed_script(
                    script, error, "before its Trainer.fit", fix * empty_weights
                ) from error
    if not captured:
        raise ConfigurationError(
            f"{script} calls no Trainer.fit",
            found=f"{ended}, with the arguments {' '.join(arguments) or '(none)'}",
            fix="pass the script's arguments after --; a custom training loop with an Accelerator cannot be captured",
        )
    # runpy has restored it, but classes of the script are pickled by the name __main__ for workers of loaders.
    sys.modules["__main__"] = mains[0]
    # The first: a script that catches the end of its fit may call another one.
    return captured[0]


@contextmanager
def _capturing(
    trainer_class: Any, captured: list[CapturedFit], mains: list[ModuleType]
) -> Iterator[None]:
    """Replace the constructor and ``fit`` of a Trainer: the first adapts its arguments, the second ends the script."""
    construct, fit = trainer_class.__init__, trainer_class.fit
    # By id, so that the script's Trainer gets no attribute from here. A Trainer with the id of one that is gone
    # overwrites its entry.
    arguments_by_call: dict[int, Keywords] = {}

    @wraps(construct)
    def record_arguments(self: Session, **arguments: object) -> None:
        construct(self, **{**arguments, **_HERE})
        arguments_by_call[id(self)] = arguments

    @wraps(fit)
    def capture(self: Session, *values: object, **named: object) -> None:
        bound = inspect.signature(fit).bind(self, *values, **named)
        bound.apply_defaults()
        passed = bound.arguments
        loaders, datamodule = passed["train_dataloaders"], passed["datamodule"]
        # fit(module, datamodule) is allowed, as in Lightning.
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        captured.append(
            CapturedFit(
                trainer=self,
                arguments=arguments_by_call.get(id(self), {}),
                module=passed["model"],
                train_dataloaders=loaders,
                val_dataloaders=passed["val_dataloaders"],
                datamodule=datamodule,
            )
        )
        mains.append(sys.modules["__main__"])
        raise _Reached

    trainer_class.__init__, trainer_class.fit = record_arguments, capture
    try:
        yield
    finally:
        trainer_class.__init__, trainer_class.fit = construct, fit


def failed_script(
    script: str, error: Exception, when: str, fix: str = ""
) -> ConfigurationError:
    """The error of a script that raised one, with the line of the script that was running.

    Args:
        script: its path.
        error: what it raised; the words of an error of this library stay as they are.
        when: what was tried.
        fix: what helps if the script runs by itself.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == Path(script).resolve()
    ]
    line = ""
    # An error of syntax has no frame of the script.
    if frames:
        line = f" (line {frames[-1].lineno})"
    if isinstance(error, TrainerKitError):
        return ConfigurationError(
            f"{script} failed {when}{line}: {error.problem}",
            found=error.found,
            fix=error.fix,
        )
    run = f"run it first: {Path(sys.executable).name} {script}"
    # A missing package or file, or wrong syntax, has nothing to do with how the script is run here.
    if fix and not isinstance(error, (ImportError, OSError, SyntaxError)):
        run = f"{run}; if it works, {fix}"
    return ConfigurationError(
        f"{script} failed {when}{line}",
        found=f"{type(error).__name__}: {error}",
        fix=run,
    )
