"""The plain loops, and the runs in one process, that `verify` compares a configuration with."""

from __future__ import annotations

from typing import Final, final

import torch

from trainer_kit.core.errors import ConfigurationError, TrainerKitError
from trainer_kit.core.types import Keywords
from trainer_kit.precision.aliases import make_precision
from trainer_kit.verify.compare import Judge
from trainer_kit.verify.loaders import Division
from trainer_kit.verify.recorder import Record
from trainer_kit.verify.result import CheckList
from trainer_kit.verify.runs import Runs

__all__ = ["RESEEDS", "References", "eps_of"]

RESEEDS: Final = 20_26
"""The seed of random layers in runs that are compared with a plain loop."""
_DTYPES: Final = {
    "64": torch.float64,
    "32": torch.float32,
    "bf16": torch.bfloat16,
    "16": torch.float16,
}
"""The dtype by the first characters of a precision's name."""
_NOTHING_WATCHED: Final[frozenset[int]] = frozenset()


def eps_of(precision: str) -> float:
    """The rounding unit of a precision's dtype.

    Example:
        >>> eps_of("bf16-mixed")
        0.0078125
    """
    for prefix, dtype in _DTYPES.items():
        if precision.startswith(prefix):
            return torch.finfo(dtype).eps
    return torch.finfo(torch.bfloat16).eps


@final
class References:
    """Performs the runs that the verified configuration is compared with.

    Args:
        runs: performs all runs.
        checks: gets the checks that are skipped because they need a launcher.
    """

    def __init__(self, runs: Runs, checks: CheckList) -> None:
        self._runs = runs
        self._checks = checks

    def exact(self, division: Division) -> Record:
        """The plain loop in float64.

        Raises:
            ConfigurationError: the module does not run in it.
        """
        try:
            return self._runs.plain(make_precision("64-true"), division)
        except TrainerKitError:
            raise
        except Exception as error:
            # The module has run in the Trainer's precision, so float64 or the plain loop
            # is the cause: a second run tells which of them.
            self._check_float32(division)
            raise ConfigurationError(
                "the module does not run in float64, which verify needs to measure rounding errors",
                found=_first_line(error),
                fix="cast to self.dtype or to the dtype of another tensor, not to a fixed one",
            ) from error

    def _check_float32(self, division: Division) -> None:
        """Raise where the plain loop does not run in float32 either: then its dtype is not the cause."""
        try:
            self.float32(division)
        except TrainerKitError:
            raise
        except Exception as error:
            raise ConfigurationError(
                "the module does not run in the plain loop of verify: one process, without a process group",
                found=_first_line(error),
                fix="call torch.distributed only if torch.distributed.is_initialized()",
            ) from error

    def float32(
        self, division: Division, watched: frozenset[int] = _NOTHING_WATCHED
    ) -> Record:
        """The plain loop in float32."""
        return self._runs.plain(make_precision("32-true"), division, watched)

    def judge_float32(
        self, division: Division, watched: frozenset[int] = _NOTHING_WATCHED
    ) -> Judge:
        """A judge of runs in float32.

        Args:
            division: how the plain loops read the data.
            watched: steps whose module outputs are recorded.
        """
        exact = self._runs.plain(make_precision("64-true"), division, watched)
        rounded = self.float32(division, watched)
        return Judge(exact, rounded, eps_of("32-true"))

    def run_alone(self, name: str, options: Keywords) -> list[Record] | None:
        """The configuration in one process and in float32; None, and a skipped check, where it needs a launcher.

        Args:
            name: the name of the check.
            options: arguments of `Runs.train`.
        """
        try:
            return self._runs.train(
                reseeds=RESEEDS, precision=make_precision("32-true"), **options
            )
        except (KeyError, ValueError, RuntimeError) as error:
            # A missing environment variable is a KeyError, a missing process group one of
            # the others.
            self.skip_without_launcher(name, error)
            return None

    def skip_without_launcher(self, name: str, error: Exception) -> None:
        """Skip a check whose run needs a launcher; raises other errors again."""
        if not self._runs.needs_launcher(error):
            raise error
        line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self._checks.skip(name, f"setup or the loaders need a launcher: {line}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
