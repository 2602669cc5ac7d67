"""The agents of several machines: they meet at an address of machine 0, and fail, restart and end together."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final, final

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import LaunchError
from trainer_kit.launch.failure import RankFailure
from trainer_kit.launch.signed import Signed, run_token
from trainer_kit.launch.startup_timeout import wait_for_master

__all__ = ["Machines", "PeerFailed", "interface_of", "meet_without_agent"]

_LOOPBACK: Final = "127.0.0.1"
_PERIOD: Final = 0.05
_HEARING: Final = 15.0
_STORE_TIME: Final = timedelta(seconds=60)


class PeerFailed(Exception):
    """Another machine has failed: the ranks of this one end too."""


@final
class Machines:
    """All machines of a run, seen from one of them.

    Machine 0 listens at ``address`` only, never on its other interfaces. One machine alone meets nobody.

    Args:
        count: number of machines.
        rank: this one among them, from 0.
        address: machine 0's name or address, as the others reach it.
        port: where the agents meet there; 0 for any, on one machine alone.
        timeout: seconds to wait for the others.

    Attributes:
        PATIENCE: seconds that a machine waits for the others by default.
        gone: the machines that did not tell how an attempt ended.

    Raises:
        LaunchError: for numbers that contradict each other.

    Example:
        >>> Machines().count
        1
    """

    PATIENCE: ClassVar = 600.0

    def __init__(
        self, count: int = 1, rank: int = 0, address: str = _LOOPBACK, port: int = 0, timeout: float = PATIENCE
    ) -> None:
        if not 0 <= rank < count:
            raise LaunchError(
                "this machine is none of them", found=f"machine_rank={rank}, num_machines={count}", fix="count from 0"
            )
        self.count, self.rank, self.address, self.port, self.timeout = count, rank, address, port, timeout
        self.gone: list[int] = []
        self._control: Any = None
        self._served: Any = None

    def meet(self, about: Mapping[str, Any]) -> None:
        """Wait until every machine is here.

        Args:
            about: what all must have been told alike.

        Raises:
            LaunchError: somebody does not come, comes twice, or was told something else.
        """
        if self.count == 1:
            return
        if self.rank == 0:
            self._control = Signed(_serve(self.address, self.port))
        else:
            self._until(self._can_connect, lambda: f"machine 0 at {self.address}:{self.port}")
            self._control = Signed(_join(self.address, self.port))
        if not self._control.first(f"places/{self.rank}"):
            raise LaunchError("two machines have the same place", found=f"machine_rank={self.rank} twice")
        self._control.set(f"here/{self.rank}", json.dumps(dict(about)))
        for other in range(self.count) if self.rank == 0 else (0,):
            self._until(
                lambda key=f"here/{other}": self._control.present(key),  # type: ignore[misc]
                lambda other=other: f"machine {other}, to come to {self.address}:{self.port}",  # type: ignore[misc]
            )
            theirs = json.loads(self._control.get(f"here/{other}"))
            differing = [name for name in about if theirs.get(name) != about[name]]
            if differing:
                raise LaunchError(
                    "the machines were not started alike",
                    found="; ".join(
                        f"{name}={about[name]} on machine {self.rank}, {theirs.get(name)} on machine {other}"
                        for name in differing
                    ),
                )

    def store(self, attempt: int) -> tuple[Any, int]:
        """The store in which the ranks of one attempt meet, and its port: a fresh one, as its keys are."""
        if self.rank == 0:
            self._served = _serve(self.address, self.port if self.count == 1 else 0)
            if self._control is not None:
                self._control.set(f"port/{attempt}", str(self._served.port))
            return self._served, self._served.port
        self._until(lambda: self._control.present(f"port/{attempt}"), lambda: "machine 0, to start its ranks")
        port = int(self._control.get(f"port/{attempt}"))
        return _join(self.address, port), port

    def check(self, attempt: int) -> None:
        """Look whether all goes well elsewhere.

        Raises:
            PeerFailed: it does not.
        """
        if self._control is None:
            return
        try:
            failed = self._control.holds(f"failed/{attempt}")
        except RuntimeError as error:
            raise PeerFailed("machine 0 is gone") from error
        if failed:
            self._control.set(f"ending/{attempt}/{self.rank}", "")
            raise PeerFailed

    def outcome(
        self, attempt: int, failures: Iterable[RankFailure], status: int, grace: float
    ) -> tuple[list[RankFailure], int]:
        """Tell how an attempt ended here, and learn how it ended everywhere.

        Args:
            attempt: the attempt.
            failures: of the ranks of this machine.
            status: the exit status of this machine's ranks; decides where no rank of any machine failed.
            grace: seconds in which machines must answer once one has failed.

        Returns:
            The failures of all ranks of all machines, and the largest status.
        """
        mine = list(failures)
        if self._control is None:
            return mine, status
        everyone, statuses = list(mine), [status]
        try:
            told = json.dumps({"status": status, "failures": [asdict(failure) for failure in mine]})
            self._control.set(f"told/{attempt}/{self.rank}", told)
            if status:
                self._control.set(f"failed/{attempt}", str(self.rank))
            for other in set(range(self.count)) - {self.rank}:
                if not self._told(attempt, other, grace):
                    statuses.append(1)
                    self.gone.append(other)
                    continue
                theirs = json.loads(self._control.get(f"told/{attempt}/{other}"))
                statuses.append(theirs["status"])
                everyone += [RankFailure(**failure) for failure in theirs["failures"]]
            self._control.set(f"heard/{attempt}/{self.rank}", "")
        except RuntimeError:
            statuses.append(1)
            self.gone.append(0)  # and with it what it knew
        return everyone, max(statuses)

    def _told(self, attempt: int, other: int, grace: float) -> bool:
        failed: float | None = None
        while not self._control.holds(f"told/{attempt}/{other}"):
            if failed is None and self._control.holds(f"failed/{attempt}"):
                failed = time.monotonic()
            waited = 0.0 if failed is None else time.monotonic() - failed
            # Whoever lives hears of a failure at once, and then may need its time to end its ranks.
            hears = waited <= _HEARING or self._control.holds(f"ending/{attempt}/{other}")
            if failed is not None and (waited > grace or not hears):
                return False
            time.sleep(_PERIOD)
        return True

    def leave(self, attempt: int, grace: float = 5.0) -> None:
        """Part. Machine 0 stays until the others have heard how it ended, at most ``grace`` seconds."""
        deadline = time.monotonic() + grace
        if self._control is not None and self.rank == 0:
            keys = [f"heard/{attempt}/{other}" for other in range(1, self.count)]
            while not all(map(self._control.holds, keys)) and time.monotonic() < deadline:
                time.sleep(_PERIOD)
        self._control = self._served = None

    def _can_connect(self) -> bool:
        try:
            socket.create_connection((self.address, self.port), timeout=2).close()
        except OSError:
            return False
        return True

    def _until(self, true: Callable[[], bool], whom: Callable[[], str]) -> None:
        begun, said = time.monotonic(), False
        while not true():
            waited = time.monotonic() - begun
            if waited > self.timeout:
                raise LaunchError(
                    "not all machines came",
                    found=f"waited {self.timeout:.0f} s for {whom()}",
                    fix="start every machine with the same address and port and its own machine_rank",
                )
            if waited > 5 and not said:
                said = True
                print(f"machine {self.rank} of {self.count} waits for {whom()}", file=sys.stderr, flush=True)
            time.sleep(_PERIOD)


def _serve(address: str, port: int) -> Any:
    """A store that listens at ``address`` and nowhere else."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LaunchError("the address of machine 0 is unknown", found=f"{address}: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise LaunchError(
                f"this machine cannot listen at {address}:{port}",
                found=error.strerror,
                fix="choose another --main_process_port"
                if taken
                else "give --main_process_ip an address of this machine, or --machine_rank the place of this one",
            ) from None
        listener.listen()
        bound = listener.getsockname()[1]
        return TCPStore(address, bound, None, True, _STORE_TIME, False, master_listen_fd=listener.detach())


def _join(address: str, port: int, timeout: timedelta = _STORE_TIME) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address, port, None, False, timeout, False)


def meet_without_agent(here: Environment, timeout: timedelta) -> Any:
    """The store in which ranks meet that SLURM, MPI or a script of the user's has started; None where an agent has one.

    Rank 0 listens at the master's address only, and gloo at its interface. Where that address belongs to a service in
    front of this machine, rank 0 listens at its own address on the way there.

    Args:
        here: this rank.
        timeout: how long to wait for rank 0.

    Raises:
        LaunchError: rank 0 finds no address to listen at, has not come, or has another run token.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    interface = interface_of(here.master_addr)
    # A host that knows its own name as a loopback address is known to the others as something else.
    if interface is not None and (here.num_nodes == 1 or interface != "lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if here.rank > 0:
        store = wait_for_master(partial(_join, here.master_addr, here.master_port), here, timeout)
        Signed(store).get("rank 0")
    else:
        store = _serve_as_master(here)
        Signed(store).set("rank 0", "")
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(hashlib.sha256(run_token()).hexdigest(), store) if run_token() else store


def _serve_as_master(here: Environment) -> Any:
    try:
        return _serve(here.master_addr, here.master_port)
    except LaunchError as error:
        own = None if _is_own(here.master_addr) else _own_towards(here.master_addr)
        if own is None:
            raise LaunchError(
                error.problem,
                found=error.found,
                fix="set MASTER_ADDR to an address of the machine of rank 0, and MASTER_PORT to a free port",
            ) from None
    print(
        f"rank 0 listens at {own}:{here.master_port}: MASTER_ADDR={here.master_addr} is no address of this machine",
        file=sys.stderr,
        flush=True,
    )
    return _serve(own, here.master_port)


def _is_own(address: str) -> bool:
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _own_towards(address: str) -> str | None:
    """This machine's own address on the way to another one; None where there is no way."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing, but chooses the way
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The network interface through which this machine reaches ``address``, or None where that cannot be told.

    Args:
        address: a name or an address.

    Example:
        >>> interface_of("127.0.0.1") in ("lo", None)
        True
    """
    if sys.platform != "linux":
        return None
    import fcntl

    own = _own_towards(address)
    if own is None:
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", os.fsencode(name)[:15])
                try:
                    found = fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]  # SIOCGIFADDR
                except OSError:
                    continue  # has no IPv4 address
                if socket.inet_ntoa(found) == own or (own.startswith("127.") and name == "lo"):
                    return name
    except OSError:
        return None
    return None
