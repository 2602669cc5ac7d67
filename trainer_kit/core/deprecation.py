"""Deprecations: the text, the version that removes the thing, and one warning for each."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import final

from lightning_utilities.core.rank_zero import rank_zero_only

from trainer_kit.core.errors import TrainerKitError

__all__ = ["Deprecation"]


@final
@dataclass(frozen=True, kw_only=True)
class Deprecation:
    """Something public that a later version removes; docs/stability.md has the rules.

    Write it as a constant beside the deprecated code, with literal versions, and call `warn` where the thing is used. A
    test reads the versions, and fails in the one that removes the thing.

    Args:
        what: the deprecated thing as users write it, such as ``Trainer(amp_level=...)``.
        since: the version that began to warn.
        gone_in: the version that removes it.
        fix: what to write instead.

    Example:
        >>> import warnings
        >>> old = Deprecation(what="fit(weights=...)", since="0.3.0", gone_in="0.5.0", fix="use ckpt_path=...")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     old.warn()
        ...     old.warn()  # one warning in a process
        >>> print(*[warning.message for warning in caught])
        fit(weights=...) is deprecated
          found: a use of it; 0.5.0 removes it, versions since 0.3.0 warn
          fix:   use ckpt_path=...
    """

    what: str
    since: str
    gone_in: str
    fix: str
    # A list, since the record is frozen; one entry after the warning.
    _warned: list[bool] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def warn(self, stacklevel: int = 2) -> None:
        """Warn once in a process, on rank 0.

        Args:
            stacklevel: whose line the warning names; 2: the caller of the function that calls this.
        """
        # None where no strategy has set it: a single process warns.
        rank = getattr(rank_zero_only, "rank", None)
        if self._warned or rank:
            return
        self._warned.append(True)
        problem = f"{self.what} is deprecated"
        usage = (
            f"a use of it; {self.gone_in} removes it, versions since {self.since} warn"
        )
        text = str(TrainerKitError(problem, found=usage, fix=self.fix))
        # FutureWarning: Python hides a DeprecationWarning unless the script itself triggers it.
        warnings.warn(text, FutureWarning, stacklevel + 1)
