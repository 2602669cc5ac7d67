"""A store in which machines of one run believe only each other."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any, Final, final

from trainer_kit.core.errors import LaunchError

__all__ = ["RUN_TOKEN", "Signed", "run_token"]

RUN_TOKEN: Final = "TRAINER_KIT_RUN_TOKEN"
"""Names the variable with the secret that the machines of a run share."""


def run_token() -> bytes:
    """The secret of this run; empty without one."""
    return os.environ.get(RUN_TOKEN, "").encode()


@final
class Signed:
    """Values of a store, each with a proof that its writer has the run's token.

    torch's store takes commands from every process that connects: a value without a proof is a stranger's, and has no
    effect.

    Args:
        store: torch's.
        token: by default the run's.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> ours = Signed(store, b"secret")
        >>> ours.set("failed", "1")
        >>> store.set("ending", "1")
        >>> ours.holds("failed"), ours.holds("ending"), ours.get("failed")
        (True, False, '1')
    """

    def __init__(self, store: Any, token: bytes | None = None) -> None:
        self._store, self._token = store, run_token() if token is None else token

    def set(self, key: str, text: str) -> None:
        """Write a value."""
        self._store.set(key, self._proof(key, text) + text)

    def first(self, key: str) -> bool:
        """Whether this is the first call for ``key``."""
        return bool(self._store.add(key, 1) == 1)

    def present(self, key: str) -> bool:
        """Whether there is a value, also a stranger's."""
        return bool(self._store.check([key]))

    def holds(self, key: str) -> bool:
        """Whether there is a value of this run."""
        return self.present(key) and self._read(key) is not None

    def get(self, key: str) -> str:
        """The value, once there is one.

        Raises:
            LaunchError: it is a stranger's.
        """
        text = self._read(key)
        if text is None:
            raise LaunchError(
                "the machines of a run share one token",
                found=f"{key} was written with another {RUN_TOKEN}, or without one",
                fix=f"export the same {RUN_TOKEN} on every machine, or give each run its own port",
            )
        return text

    def _read(self, key: str) -> str | None:
        raw = self._store.get(key).decode(errors="replace")
        proof, text = raw[:64], raw[64:]
        return text if hmac.compare_digest(proof.encode(), self._proof(key, text).encode()) else None

    def _proof(self, key: str, text: str) -> str:
        return hmac.new(self._token, f"{key}\0{text}".encode(), hashlib.sha256).hexdigest()
