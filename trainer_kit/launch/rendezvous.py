"""How the agents and the ranks meet: in a store of machine 0 that listens at one address."""

from __future__ import annotations

import uuid
from typing import final

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer_kit.launch.machines import Machines

__all__ = ["Rendezvous"]


@final
class Rendezvous(RendezvousHandler):
    """One attempt of all machines. Unlike torch's own it does not listen on every interface.

    Args:
        machines: which meet.
        attempt: how often they have met before.
    """

    def __init__(self, machines: Machines, attempt: int) -> None:
        self._machines, self._attempt = machines, attempt
        self._run_id = uuid.uuid4().hex if machines.count == 1 else f"attempt-{attempt}"

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the agent's store: rank 0 need not open one."""
        return True

    def get_backend(self) -> str:
        """The name of this way to meet."""
        return "trainer_kit"

    def next_rendezvous(self) -> RendezvousInfo:
        """Open or join the store."""
        store, port = self._machines.store(self._attempt)
        info = RendezvousStoreInfo(self._machines.address, port)
        return RendezvousInfo(PrefixStore(self._run_id, store), self._machines.rank, self._machines.count, info)

    def is_closed(self) -> bool:
        """Nobody closes it."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell anybody."""

    def num_nodes_waiting(self) -> int:
        """No other machine ever joins; torch's agent asks so often that this is where it hears of a failed one."""
        self._machines.check(self._attempt)
        return 0

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store goes with the attempt."""
        return True
