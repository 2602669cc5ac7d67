"""The errors of this library: each states the problem, what was found, and the fix.

```
TrainerKitError
├── ConfigurationError (also a ValueError)   a wrong call, raised before the first step
│   ├── DurationError                        an interval that cannot be read
│   ├── HookError                            an unknown hook, or one with the wrong parameters
│   ├── StrategyError                        devices, processes and layout do not fit together
│   ├── PrecisionError                       this dtype cannot run here
│   ├── DataError                            loaders, samplers, batch sizes
│   └── RegistryError                        a name that is not registered
├── LogError                                 a logged value or name that cannot be used
├── CheckpointError(file, key, reason)       bytes on disk that are damaged, foreign or cannot be written
│   └── MissingCheckpointError               no checkpoint is there (also a FileNotFoundError and a ValueError)
├── NonFiniteError                           the loss became NaN or infinite
├── RankError                                ranks that disagree, or a rank that failed
└── LaunchError                              processes that could not be started or supervised
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trainer_kit.core.display import mask_text

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DurationError",
    "HookError",
    "LaunchError",
    "LogError",
    "MissingCheckpointError",
    "NonFiniteError",
    "PrecisionError",
    "RankError",
    "RegistryError",
    "StrategyError",
    "TrainerKitError",
    "add_note",
    "did_you_mean",
    "printable",
]


class TrainerKitError(Exception):
    """Base of every error of this library.

    Args:
        problem: one sentence that states the problem.
        found: what the library found (the value, where it came from).
        fix: what to do about it.

    Attributes:
        see: the section of the troubleshooting page about errors of this class, which ``trainer-kit explain`` prints.

    Example:
        >>> print(TrainerKitError("the mesh has 4 places", found="8 processes", fix="launch 4 processes"))
        the mesh has 4 places
          found: 8 processes
          fix:   launch 4 processes
    """

    see: str | None = None

    def __init__(
        self, problem: str, *, found: str | None = None, fix: str | None = None
    ) -> None:
        # The text may contain a URL with a password.
        problem = mask_text(problem)
        if found is not None:
            found = mask_text(found)
        if fix is not None:
            fix = mask_text(fix)
        self.problem = problem
        self.found = found
        self.fix = fix
        lines = [problem]
        if found is not None:
            lines.append(f"  found: {found}")
        if fix is not None:
            lines.append(f"  fix:   {fix}")
        if self.see is not None:
            lines.append(f"  see:   {self.see}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes: rebuild from the state, since constructors of subclasses differ.
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(cls: type[TrainerKitError], args: tuple[object, ...]) -> TrainerKitError:
    # Without the constructor; pickle restores the attributes.
    error = cls.__new__(cls)
    error.args = args
    return error


class ConfigurationError(TrainerKitError, ValueError):
    """A wrong call or a combination that cannot work.

    Example:
        >>> from trainer_kit import Trainer
        >>> try:
        ...     Trainer(gradient_clip_val=-1)
        ... except ConfigurationError as error:
        ...     print(error)
        gradient_clip_val must be a number ≥ 0
          found: -1
    """


class DurationError(ConfigurationError):
    """An interval that cannot be read.

    Example:
        >>> from trainer_kit import Duration
        >>> try:
        ...     Duration.parse("3 epochs")
        ... except DurationError as error:
        ...     print(error)
        units of a duration are abbreviated
          found: '3 epochs'
          fix:   write "3ep"
    """


class HookError(ConfigurationError):
    """An unknown hook, or a hook with the wrong parameters.

    Example:
        >>> from trainer_kit import Callback
        >>> try:
        ...     class Log(Callback):
        ...         def on_train_epoch_ends(self, trainer, pl_module):
        ...             print(trainer.current_epoch)
        ... except HookError as error:
        ...     print(error.problem, error.fix, sep="; ")
        Log.on_train_epoch_ends is not a hook and would never be called; did you mean 'on_train_epoch_end'?
    """


class StrategyError(ConfigurationError):
    """Devices, processes and layout do not fit together.

    Example:
        >>> from trainer_kit.strategies import FSDPStrategy
        >>> try:
        ...     FSDPStrategy(sharding_strategy="x")
        ... except StrategyError as error:
        ...     print(error.problem, error.found, sep=": ")
        unknown sharding strategy: 'x'
    """


class PrecisionError(ConfigurationError):
    """This dtype cannot run here.

    Example:
        >>> from trainer_kit import Trainer
        >>> try:
        ...     Trainer(precision="bf17")
        ... except PrecisionError as error:
        ...     print(error)
        unknown precision 'bf17'
          fix:   did you mean 'bf16'?
    """


class DataError(ConfigurationError):
    """Loaders, samplers and batch sizes that do not fit together.

    Example:
        >>> from trainer_kit.data import CombinedLoader
        >>> try:
        ...     CombinedLoader({"a": [1], "b": [2]}, mode="x")
        ... except DataError as error:
        ...     print(error)
        unknown mode of CombinedLoader
          found: mode='x'
          fix:   use one of: max_size, max_size_cycle, min_size, sequential
    """


class RegistryError(ConfigurationError):
    """A name that is not registered.

    Example:
        >>> from trainer_kit import Trainer
        >>> try:
        ...     Trainer(strategy="ddq")
        ... except RegistryError as error:
        ...     print(error.problem, error.fix, sep="; ")
        no strategy is called 'ddq'; did you mean 'ddp'?
    """


class LogError(TrainerKitError):
    """A logged value or name that cannot be used.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> class Net(TinyModule):
        ...     def training_step(self, batch, batch_idx):
        ...         self.log("outputs", self(batch))
        ...         return self(batch).mean()
        >>> trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        ...                   enable_model_summary=False, accelerator="cpu", devices=1)
        >>> try:
        ...     trainer.fit(Net(), [torch.randn(4, 32)])
        ... except LogError as error:
        ...     print(error)
        'outputs' is not a single number
          found: shape (4, 2)
          fix:   log its .mean()
    """


class CheckpointError(TrainerKitError):
    """A checkpoint that is damaged, foreign, or cannot be written.

    Args:
        file: the affected file.
        key: the affected entry of the file, or None for the whole file.
        reason: what is wrong with it.
        found: what was found, where there is no key.
        fix: what to do about it.

    Example:
        >>> print(CheckpointError("runs/step-3/model.safetensors", "layer.weight", "the checksum differs"))
        runs/step-3/model.safetensors: the checksum differs
          found: key 'layer.weight'
          see:   troubleshooting#a-checkpoint-does-not-load
    """

    see = "troubleshooting#a-checkpoint-does-not-load"

    def __init__(
        self,
        file: object,
        key: str | None,
        reason: str,
        *,
        found: str | None = None,
        fix: str | None = None,
    ) -> None:
        # Text from a file may contain control characters for the terminal, and may be of any length.
        self.file = printable(str(file), keep="\n")
        # The name as it is in the file; the message has only the start of a long one.
        self.key = key
        self.reason = printable(reason, keep="\n")
        if key is not None:
            found = f"key {key[:200]!r}"
        if found is not None:
            found = printable(found, keep="\n")
        if fix is not None:
            fix = printable(fix, keep="\n")
        super().__init__(f"{self.file}: {self.reason}", found=found, fix=fix)


class MissingCheckpointError(CheckpointError, FileNotFoundError, ValueError):
    """A checkpoint that does not exist; the message says what exists there.

    Programs for Lightning and Accelerate catch a ``FileNotFoundError`` or a ``ValueError`` here, so it is both.

    Args:
        path: the checkpoint that was asked for: a path, or a word such as ``"last"``.
        reason: what is missing.
        found: what exists there.
        fix: what to do about it.

    Example:
        >>> error = MissingCheckpointError("runs/nope", "does not exist", found="runs has step-3")
        >>> print(error)
        runs/nope: does not exist
          found: runs has step-3
          see:   troubleshooting#a-checkpoint-does-not-load
        >>> isinstance(error, FileNotFoundError), isinstance(error, ValueError)
        (True, True)
    """

    def __init__(
        self,
        path: object,
        reason: str,
        *,
        found: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(path, None, reason, found=found, fix=fix)


class NonFiniteError(TrainerKitError):
    """The loss became NaN or infinite.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        ...                   enable_model_summary=False, accelerator="cpu", devices=1)
        >>> try:
        ...     trainer.fit(TinyModule(), [torch.full((4, 32), torch.nan)])
        ... except NonFiniteError as error:
        ...     print(error.problem, error.found, sep=": ")
        the loss is not finite at step 1: nan in batch 0 of epoch 0
    """

    see = "troubleshooting#the-loss-is-nan"


class RankError(TrainerKitError):
    """Ranks that disagree, or a rank that failed.

    Args:
        problem: one sentence that states the problem.
        found: what each rank did.
        fix: what to do about it.
        disagree: whether the ranks disagree, which the troubleshooting page is about; False: a rank has failed.

    Example:
        >>> print(RankError("rank 1: KeyError: 'x'", disagree=False))
        rank 1: KeyError: 'x'
    """

    see: str | None = "troubleshooting#ranks-disagree"

    def __init__(
        self,
        problem: str,
        *,
        found: str | None = None,
        fix: str | None = None,
        disagree: bool = True,
    ) -> None:
        if not disagree:
            self.see = None
        super().__init__(problem, found=found, fix=fix)


class LaunchError(TrainerKitError, RuntimeError):
    """Processes that could not be started or supervised.

    Example:
        >>> print(LaunchError("rank 1 did not start", found="exit code 1", fix="read its output above"))
        rank 1 did not start
          found: exit code 1
          fix:   read its output above
    """


def printable(text: str, most: int = 1000, keep: str = "") -> str:
    """Escape control characters in untrusted text, and shorten it, so that a terminal can show it.

    Args:
        text: any text.
        most: the maximum number of characters.
        keep: control characters that are not escaped, such as line ends.

    Example:
        >>> printable("a\\x1b[2Jb\\n")
        'a\\\\x1b[2Jb\\\\n'
    """
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    characters = []
    for character in text:
        # Escape sequences could move the cursor, or change what the terminal has shown before.
        if not character.isprintable() and character not in keep:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def did_you_mean(
    name: object, known: Iterable[str], otherwise: str | None = None
) -> str:
    """The fix for a misspelled name: the closest known name, else ``otherwise``, else a list of all names.

    Example:
        >>> did_you_mean("ddq", ["ddp", "single"])
        "did you mean 'ddp'?"
    """
    # Sorted, so that the message is the same for every order of a set.
    options = sorted(known)
    name = str(name)
    near = difflib.get_close_matches(name, options, n=3)
    # The first letter is rarely misspelled.
    likely = [option for option in near if option[:1] == name[:1]]
    if near:
        closest = (likely or near)[0]
        return f"did you mean {closest!r}?"
    if otherwise is not None:
        return otherwise
    return f"use one of: {', '.join(options)}"


def add_note(error: BaseException, note: str) -> None:
    """Attach a note to an exception (Python 3.10 has no ``add_note``)."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        vars(error).setdefault("__notes__", []).append(note)
