"""How the agent and the ranks of one machine meet: on a free port of the loopback interface."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

__all__ = ["LoopbackRendezvous"]


@final
class LoopbackRendezvous(RendezvousHandler):
    """One agent, one store. Unlike torch's own, it listens to this machine only, and no port can be taken meanwhile.

    Args:
        run_id: names the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the agent's store: rank 0 need not open one."""
        return True

    def get_backend(self) -> str:
        """The name of this way to meet."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store."""
        if self._store is None:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1", port, 1, True, timedelta(seconds=60), master_listen_fd=listener.detach()
            )
        info = RendezvousStoreInfo("127.0.0.1", self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, info)

    def is_closed(self) -> bool:
        """Nobody closes it."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell anybody."""

    def num_nodes_waiting(self) -> int:
        """No other machine ever joins."""
        return 0

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let go of the store."""
        self._store = None
        return True
