"""What every other room stands on: errors, the hook specification, progress, the module. Imports nothing of ours."""

import os

from lightning_utilities.core.rank_zero import rank_zero_only

# lightning-utilities raises an error when it prints before the rank is known; a started strategy sets the real rank.
if getattr(rank_zero_only, "rank", None) is None:
    rank_zero_only.rank = int(os.environ.get("RANK", "0") or 0)  # type: ignore[attr-defined]
