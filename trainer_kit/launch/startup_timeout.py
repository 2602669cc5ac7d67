"""The rendezvous of ranks without an agent; a rank that waits for others names the missing ranks."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, Final

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, LaunchError
from trainer_kit.launch.machines import (
    SignedStore,
    interface_of,
    join_store,
    local_address_towards,
    run_token,
    serve_store,
)

__all__ = ["meet_without_agent", "named_while_connecting", "patience", "wait_for_all"]

_PATIENCE: Final = 30.0
_COUNT: Final = "trainer_kit/come"
"""A key of the store: how many ranks have come; with ``/R`` behind it, that rank R has."""
_ALL: Final = "trainer_kit/all"
"""A key of the store that the last rank sets."""
_ALIVE: Final = "trainer_kit/alive"
"""With ``/R`` behind it a key of the store: rank R still waits for the others."""
_Store = Any
"""torch's store, whose classes it does not export."""
_SHOWN_RANKS: Final = 16
"""Ranks that a line names."""


def patience() -> float:
    """The seconds of waiting after which a process prints a message: ``TRAINER_KIT_PATIENCE``.

    Raises:
        ConfigurationError: the variable is not a number of seconds.
    """
    text = os.environ.get("TRAINER_KIT_PATIENCE", "")
    try:
        seconds = float(text or _PATIENCE)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigurationError(
            "TRAINER_KIT_PATIENCE must be a number of seconds",
            found=repr(text),
            fix="set TRAINER_KIT_PATIENCE=30",
        )
    return max(seconds, 0.1)


def meet_without_agent(here: Environment, timeout: timedelta) -> Any:
    """The store of ranks that SLURM, MPI or a user's script has started; None if an agent serves one.

    Rank 0 listens only at the master's address, and gloo only at its interface. If that address belongs to a service
    that forwards to this machine, rank 0 listens at its own address on the route there.

    Args:
        here: this rank.
        timeout: how long to wait for rank 0.

    Raises:
        LaunchError: rank 0 finds no address to listen at, has not joined, or has another run token.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    interface = interface_of(here.master_addr)
    # If this host resolves its own name to a loopback address, the other hosts know it by another address.
    if interface is not None and (here.num_nodes == 1 or interface != "lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if here.rank > 0:
        missing = f"rank 0 at {here.master_addr}:{here.master_port}"
        # One rank of a machine prints: the second one, since the first of machine 0 is the one that is missing.
        one_of_a_machine = here.local_rank == min(1, here.local_world_size - 1)
        join = partial(join_store, here.master_addr, here.master_port)
        store = _await(join, lambda: missing, lambda: one_of_a_machine, timeout)
        store.set_timeout(timeout)
        SignedStore(store).get("rank 0")
    else:
        store = _serve_as_master(here)
        SignedStore(store).set("rank 0", "")
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not export it to type checkers

    # Behind a prefix that strangers do not know, they cannot write the keys of this run.
    token = run_token()
    if not token:
        return store
    return PrefixStore(hashlib.sha256(token).hexdigest(), store)


def _serve_as_master(here: Environment) -> Any:
    try:
        return serve_store(here.master_addr, here.master_port)
    except LaunchError as error:
        listen_address = None
        # At an address of this machine the port is taken, and the other ranks connect to no other one.
        if not _is_local(here.master_addr):
            listen_address = local_address_towards(here.master_addr)
        if listen_address is None:
            raise LaunchError(
                error.problem,
                found=error.found,
                fix="set MASTER_ADDR to an address of the machine of rank 0, and MASTER_PORT to a free port",
            ) from None
    print(
        f"rank 0 listens at {listen_address}:{here.master_port}: "
        f"MASTER_ADDR={here.master_addr} is not an address of this machine",
        file=sys.stderr,
        flush=True,
    )
    return serve_store(listen_address, here.master_port)


def _is_local(address: str) -> bool:
    try:
        candidates = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        family, _, _, _, socket_address = candidates[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(socket_address)
    except OSError:
        return False
    return True


def wait_for_all(store: _Store, here: Environment, timeout: timedelta) -> None:
    """Return when every rank has called this.

    Args:
        store: torch's, shared by all ranks.
        here: this rank.
        timeout: how long to wait in all.

    Raises:
        LaunchError: some ranks have not joined.
    """
    size = here.world_size
    # Its own key first: once the count is complete, no rank may be named as missing.
    store.set(f"{_COUNT}/{here.rank}", "")
    if store.add(_COUNT, 1) >= size:
        store.set(_ALL, "")

    def wait(remaining: timedelta) -> None:
        deadline = time.monotonic() + remaining.total_seconds()
        pause = 0.001
        # Not by the store's wait(), which prints a C++ warning at the timeout.
        while not store.check([_ALL]):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def missing() -> str:
        ranks = islice(_absent_ranks(store, _COUNT, range(size)), _SHOWN_RANKS)
        return _named(list(ranks), size - store.add(_COUNT, 0), size)

    # Of the ranks that wait, one prints for all.
    def first() -> bool:
        return not any(store.check([f"{_COUNT}/{rank}"]) for rank in range(here.rank))

    _await(wait, missing, first, timeout)


@contextmanager
def named_while_connecting(store: _Store, here: Environment) -> Iterator[None]:
    """While C++ code connects the ranks, a thread prints at intervals which ranks are gone.

    Args:
        store: shared by all ranks; the thread uses a clone, as the caller's thread is blocked in this one.
        here: this rank.
    """
    over = threading.Event()
    thread = threading.Thread(
        target=_name_gone, args=(store.clone(), here, over, patience()), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _name_gone(
    store: _Store, here: Environment, over: threading.Event, interval: float
) -> None:
    began = time.monotonic()
    while not over.wait(interval):
        try:
            store.set(f"{_ALIVE}/{here.rank}", "")
            # The other ranks reach this point at about the same moment: give them time to set their keys.
            if over.wait(min(1.0, interval)):
                return
            # The first one prints, and only it looks for all of them: usually one question for any other rank.
            if any(_is_alive(store, rank) for rank in range(here.rank)):
                continue
            ranks = range(here.world_size)
            missing_ranks = list(_absent_ranks(store, _ALIVE, ranks))
        except RuntimeError:
            # The process that served the store is gone, and the caller's connection breaks too.
            return
        if missing_ranks:
            waited = time.monotonic() - began
            missing = _named(missing_ranks, len(missing_ranks), here.world_size)
            print(
                f"waiting for {missing} to connect for {waited:.0f} s",
                file=sys.stderr,
                flush=True,
            )


def _is_alive(store: _Store, rank: int) -> bool:
    return bool(store.check([f"{_ALIVE}/{rank}"]))


def _absent_ranks(store: _Store, key: str, ranks: range) -> Iterator[int]:
    """Those of the ranks that have not set their key, by halves: most ranks are there, and every rank may ask this."""
    if store.check([f"{key}/{rank}" for rank in ranks]):
        return
    if len(ranks) == 1:
        yield ranks[0]
        return
    middle = len(ranks) // 2
    yield from _absent_ranks(store, key, ranks[:middle])
    yield from _absent_ranks(store, key, ranks[middle:])


def _named(ranks: list[int], count: int, size: int) -> str:
    """The first ranks of ``count``, of ``size`` in all."""
    listed = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    if count > _SHOWN_RANKS:
        listed += f" and {count - _SHOWN_RANKS} more"
    if count == 1:
        return f"rank {listed} of {size}"
    return f"ranks {listed} of {size}"


def _await(
    wait: Callable[[timedelta], Any],
    missing: Callable[[], str],
    prints: Callable[[], bool],
    timeout: timedelta,
) -> Any:
    """The result of ``wait``; meanwhile the rank for which ``prints`` is true prints at intervals who is missing."""
    began, interval = time.monotonic(), patience()
    ends = began + timeout.total_seconds()
    while True:
        now = time.monotonic()
        last = ends - now <= interval
        seconds = interval
        if last:
            # Also at the limit itself one short look is left.
            seconds = max(0.01, ends - now)
        try:
            return wait(timedelta(seconds=seconds))
        # torch's DistStoreError and DistNetworkError are RuntimeErrors.
        except (TimeoutError, RuntimeError) as error:
            waited = time.monotonic() - began
            # It came long before the limit of this wait, so it is no timeout.
            if time.monotonic() - now < 0.5 * min(interval, ends - now):
                raise
            if last:
                raise LaunchError(
                    "not every process has connected",
                    found=f"after {waited:.0f} s without {missing()}",
                    fix="check their output and how many were started; timeout= of the strategy sets the limit",
                ) from error
        if prints():
            print(
                f"waiting for {missing()}: not there after {waited:.0f} s",
                file=sys.stderr,
                flush=True,
            )
