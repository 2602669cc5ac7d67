"""The agents of several machines: they rendezvous at an address of machine 0, and fail, restart and end together.

They talk by keys of one control store on machine 0: ``places/R`` (counts the machines that claim rank R), ``here/R``
(R has come, with its options), ``port/A`` (where the ranks of attempt A meet), ``failed/A`` (a machine has failed),
``ending/A/R`` (R has seen it and ends its ranks), ``outcome/A/R`` (how A ended on R), ``received/A/R`` (R has read all
outcomes). Every key of an attempt has its number, so none of an earlier attempt is taken for one of the next.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar, Final, final

from trainer_kit.core.errors import LaunchError
from trainer_kit.launch.failure import RankFailure

__all__ = [
    "RUN_TOKEN", "Machines", "PeerFailed", "SignedStore", "interface_of", "join_store", "local_address_towards",
    "run_token", "serve_store",
]  # fmt: skip

RUN_TOKEN: Final = "TRAINER_KIT_RUN_TOKEN"
"""The variable with the secret that the machines of a run share."""

_LOOPBACK: Final = "127.0.0.1"
_PERIOD: Final = 0.05
"""Seconds between two looks at a key."""
_REPLY_TIME: Final = 15.0
"""Seconds within which a living machine confirms that it has seen a failure."""
_STORE_TIME: Final = timedelta(seconds=60)
"""How long a call of a store waits."""
_GET_ADDRESS: Final = 0x8915
"""Linux's SIOCGIFADDR: the IPv4 address of a network interface."""


class PeerFailed(Exception):
    """Another machine has failed: the ranks of this one end too."""


@final
class Machines:
    """All machines of a run, seen from one of them.

    Machine 0 listens at ``address`` only, never on its other interfaces. A single machine opens no control store.

    Args:
        count: number of machines.
        rank: the number of this machine, from 0.
        address: machine 0's name or address, as the others reach it.
        port: the port at that address; a single machine may pass 0 for any free port.
        timeout: seconds to wait for the others.

    Attributes:
        PATIENCE: the default of ``timeout``.
        gone: the machines that did not report how an attempt ended.

    Raises:
        LaunchError: the numbers contradict each other.

    Example:
        >>> Machines().count
        1
    """

    PATIENCE: ClassVar = 600.0

    def __init__(
        self,
        count: int = 1,
        rank: int = 0,
        address: str = _LOOPBACK,
        port: int = 0,
        timeout: float = PATIENCE,
    ) -> None:
        if not 0 <= rank < count:
            raise LaunchError(
                "the rank of this machine is out of range",
                found=f"machine_rank={rank}, num_machines={count}",
                fix="count machines from 0",
            )
        self.count = count
        self.rank = rank
        self.address = address
        self.port = port
        self.timeout = timeout
        self.gone: list[int] = []
        self._control: SignedStore | None = None
        self._served: Any = None

    def meet(self, about: Mapping[str, Any]) -> None:
        """Wait until every machine has called this.

        Args:
            about: values that must be equal on all machines.

        Raises:
            LaunchError: a machine does not join, joins twice, or has other values.
        """
        if self.count == 1:
            return
        if self.rank == 0:
            control = SignedStore(serve_store(self.address, self.port))
        else:
            self._wait_until(
                self._can_connect, f"machine 0 at {self.address}:{self.port}"
            )
            control = SignedStore(join_store(self.address, self.port))
        # Two machines with one rank would both serve its ranks, and the run would hang.
        if not control.first(f"places/{self.rank}"):
            raise LaunchError(
                "two machines have the same rank",
                found=f"machine_rank={self.rank} twice",
            )
        control.set(f"here/{self.rank}", json.dumps(dict(about)))
        self._control = control
        # Machine 0 compares all; each other one compares itself with machine 0, so that both sides name the error.
        peers: Iterable[int] = (0,)
        if self.rank == 0:
            peers = range(self.count)
        for other in peers:
            key = f"here/{other}"
            self._wait_until(
                lambda key=key: control.present(key),  # type: ignore[misc]
                f"machine {other}, to come to {self.address}:{self.port}",
            )
            peer_options = json.loads(control.get(key))
            differing = [
                name for name in about if peer_options.get(name) != about[name]
            ]
            if differing:
                raise LaunchError(
                    "the machines were started with different options",
                    found="; ".join(
                        f"{name}={about[name]} on machine {self.rank}, {peer_options.get(name)} on machine {other}"
                        for name in differing
                    ),
                )

    def store(self, attempt: int) -> tuple[Any, int]:
        """The store of the ranks of one attempt, and its port; every attempt has a new store."""
        control = self._control
        key = f"port/{attempt}"
        if self.rank == 0 or control is None:
            port = self.port
            # The control store listens at that port, and tells the others this one's.
            if control is not None:
                port = 0
            self._served = serve_store(self.address, port)
            if control is not None:
                control.set(key, str(self._served.port))
            return self._served, self._served.port
        self._wait_until(lambda: control.present(key), "machine 0, to start its ranks")
        port = int(control.get(key))
        return join_store(self.address, port), port

    def check(self, attempt: int) -> None:
        """Look for a failure of another machine.

        Raises:
            PeerFailed: a machine has failed, or machine 0 is gone.
        """
        if self._control is None:
            return
        try:
            failed = self._control.holds(f"failed/{attempt}")
        except RuntimeError as error:
            raise PeerFailed("machine 0 is gone") from error
        if failed:
            # The others then give this machine the time that its ranks need to end.
            self._control.set(f"ending/{attempt}/{self.rank}", "")
            raise PeerFailed

    def outcome(
        self, attempt: int, failures: Iterable[RankFailure], status: int, grace: float
    ) -> tuple[list[RankFailure], int]:
        """Report how an attempt ended on this machine, and collect how it ended on all others.

        Args:
            attempt: the attempt.
            failures: of the ranks of this machine.
            status: the exit status of this machine's ranks; used when no rank failed on any machine.
            grace: seconds in which machines must report after one has failed.

        Returns:
            The failures of all ranks of all machines, and the largest status.
        """
        collected = list(failures)
        statuses = [status]
        control = self._control
        if control is None:
            return collected, status
        try:
            report = {
                "status": status,
                "failures": [asdict(failure) for failure in collected],
            }
            # Before `failed`: a machine that sees that key finds the report.
            control.set(f"outcome/{attempt}/{self.rank}", json.dumps(report))
            if status:
                control.set(f"failed/{attempt}", str(self.rank))
            for other in set(range(self.count)) - {self.rank}:
                if not self._wait_for_report(control, attempt, other, grace):
                    statuses.append(1)
                    self.gone.append(other)
                    continue
                peer_report = json.loads(control.get(f"outcome/{attempt}/{other}"))
                statuses.append(peer_report["status"])
                collected += [
                    RankFailure(**failure) for failure in peer_report["failures"]
                ]
            control.set(f"received/{attempt}/{self.rank}", "")
        except RuntimeError:
            # Machine 0 serves the store: without it, it is gone.
            statuses.append(1)
            self.gone.append(0)
        return collected, max(statuses)

    def _wait_for_report(
        self, control: SignedStore, attempt: int, other: int, grace: float
    ) -> bool:
        # Monotonic seconds of the first look that saw a failure. Without one there is no limit: ranks may train on.
        failed: float | None = None
        while not control.holds(f"outcome/{attempt}/{other}"):
            if failed is None and control.holds(f"failed/{attempt}"):
                failed = time.monotonic()
            waited = 0.0
            if failed is not None:
                waited = time.monotonic() - failed
            # A living machine confirms a failure at once, and then may need all of `grace` to end its ranks.
            alive = waited <= _REPLY_TIME or control.holds(f"ending/{attempt}/{other}")
            if failed is not None and (waited > grace or not alive):
                return False
            time.sleep(_PERIOD)
        return True

    def leave(self, attempt: int, grace: float = 5.0) -> None:
        """Close the stores; machine 0 first waits until the others have read its report, at most ``grace`` seconds."""
        # The store ends with this process, and with it what the others have not read yet.
        deadline = time.monotonic() + grace
        if self._control is not None and self.rank == 0:
            keys = [f"received/{attempt}/{other}" for other in range(1, self.count)]
            while not all(map(self._control.holds, keys)):
                if time.monotonic() >= deadline:
                    break
                time.sleep(_PERIOD)
        self._control = None
        self._served = None

    def _can_connect(self) -> bool:
        try:
            socket.create_connection((self.address, self.port), timeout=2).close()
        except OSError:
            return False
        return True

    def _wait_until(self, condition: Callable[[], bool], awaited: str) -> None:
        begun = time.monotonic()
        announced = False
        while not condition():
            waited = time.monotonic() - begun
            if waited > self.timeout:
                raise LaunchError(
                    "not all machines have connected",
                    found=f"waited {self.timeout:.0f} s for {awaited}",
                    fix="start every machine with the same address and port and its own machine_rank",
                )
            if waited > 5 and not announced:
                announced = True
                print(
                    f"machine {self.rank} of {self.count} waits for {awaited}",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_PERIOD)


def run_token() -> bytes:
    """The secret of this run; empty without one."""
    return os.environ.get(RUN_TOKEN, "").encode()


@final
class SignedStore:
    """A store whose values are signed with the run's token.

    torch's store accepts commands from every process that connects; values without a valid signature are ignored.

    Args:
        store: torch's store.
        token: the key of the signatures; by default the run's token.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> signed = SignedStore(store, b"secret")
        >>> signed.set("failed", "1")
        >>> store.set("ending", "1")
        >>> signed.holds("failed"), signed.holds("ending"), signed.get("failed")
        (True, False, '1')
    """

    def __init__(self, store: Any, token: bytes | None = None) -> None:
        self._store = store
        if token is None:
            token = run_token()
        self._token = token

    def set(self, key: str, text: str) -> None:
        """Write a value."""
        self._store.set(key, self._proof(key, text) + text)

    def first(self, key: str) -> bool:
        """Whether this is the first call for ``key``."""
        return bool(self._store.add(key, 1) == 1)

    def present(self, key: str) -> bool:
        """Whether there is a value, signed or not."""
        return bool(self._store.check([key]))

    def holds(self, key: str) -> bool:
        """Whether there is a value with a valid signature."""
        return self.present(key) and self._read(key) is not None

    def get(self, key: str) -> str:
        """The value; waits until there is one.

        Raises:
            LaunchError: the value has no valid signature.
        """
        text = self._read(key)
        if text is None:
            raise LaunchError(
                "the machines of a run share one token",
                found=f"{key} was written with another {RUN_TOKEN}, or without one",
                fix=f"export the same {RUN_TOKEN} on every machine, or use another port for each run",
            )
        return text

    def _read(self, key: str) -> str | None:
        raw: str = self._store.get(key).decode(errors="replace")
        proof = raw[:64]
        text = raw[64:]
        expected = self._proof(key, text)
        # In constant time: the time of a comparison must not show how much of a proof is right.
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            return None
        return text

    def _proof(self, key: str, text: str) -> str:
        # Over the key too: a signed value must have no effect under another key.
        return hmac.new(
            self._token, f"{key}\0{text}".encode(), hashlib.sha256
        ).hexdigest()


def serve_store(address: str, port: int) -> Any:
    """A store that listens at ``address`` and on no other interface.

    Raises:
        LaunchError: the address is unknown, or this machine cannot listen there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not export it to type checkers

    try:
        family, _, _, _, socket_address = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise LaunchError(
            "the address of machine 0 is unknown", found=f"{address}: {error.strerror}"
        ) from None
    # torch's store would listen on every interface, so it gets a socket that is bound to one address already.
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # A restart must not wait until the system has forgotten the connections of the run before.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(socket_address)
        except OSError as error:
            fix = "pass an address of this machine as --main_process_ip, or the rank of this machine as --machine_rank"
            if error.errno == errno.EADDRINUSE:
                fix = "choose another --main_process_port"
            raise LaunchError(
                f"this machine cannot listen at {address}:{port}",
                found=error.strerror,
                fix=fix,
            ) from None
        listener.listen()
        bound = listener.getsockname()[1]
        return TCPStore(
            address,
            bound,
            None,
            True,
            _STORE_TIME,
            False,
            master_listen_fd=listener.detach(),
        )


def join_store(address: str, port: int, timeout: timedelta = _STORE_TIME) -> Any:
    """A client of the store that another process serves."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not export it to type checkers

    return TCPStore(address, port, None, False, timeout, False)


def local_address_towards(address: str) -> str | None:
    """This machine's own address on the route to another one; None without a route."""
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(
            address, 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            # Sends nothing, but selects the route.
            probe.connect(socket_address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The network interface through which this machine reaches ``address``, or None if it cannot be determined.

    Args:
        address: a name or an address.

    Example:
        >>> interface_of("127.0.0.1") in ("lo", None)
        True
    """
    if sys.platform != "linux":
        return None
    import fcntl

    own_address = local_address_towards(address)
    if own_address is None:
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", os.fsencode(name)[:15])
                try:
                    reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
                except OSError:
                    # It has no IPv4 address.
                    continue
                # Behind the name and the family of the address.
                address_bytes = reply[20:24]
                # The loopback interface has all of 127.0.0.0/8, and names one of them.
                if socket.inet_ntoa(address_bytes) == own_address or (
                    own_address.startswith("127.") and name == "lo"
                ):
                    return name
    except OSError:
        return None
    return None
