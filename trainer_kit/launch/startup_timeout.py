"""Who waits for processes that have not come says so, and which they are."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, LaunchError

__all__ = ["named_while_connecting", "patience", "wait_for_all", "wait_for_master"]

_PATIENCE: Final = 30.0
_COUNT, _ALL, _ALIVE = "trainer_kit/come", "trainer_kit/all", "trainer_kit/alive"


def patience() -> float:
    """After how many seconds in one place a process says that it waits: ``TRAINER_KIT_PATIENCE``.

    Raises:
        ConfigurationError: it is no number of seconds.
    """
    said = os.environ.get("TRAINER_KIT_PATIENCE", "")
    try:
        seconds = float(said or _PATIENCE)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigurationError(
            "TRAINER_KIT_PATIENCE is a number of seconds", found=repr(said), fix="TRAINER_KIT_PATIENCE=30"
        )
    return max(seconds, 0.1)


def wait_for_master(join: Callable[[timedelta], Any], here: Environment, timeout: timedelta) -> Any:
    """The store of rank 0, once that has come.

    Args:
        join: connects to it, and raises a RuntimeError where nobody has listened for so long.
        here: this rank.
        timeout: how long to wait in all.

    Raises:
        LaunchError: it has not come.
    """
    where = f"rank 0 at {here.master_addr}:{here.master_port}"
    one_of_a_machine = here.local_rank == min(1, here.local_world_size - 1)
    store = _waited(join, lambda: where, lambda: one_of_a_machine, timeout)
    store.set_timeout(timeout)
    return store


def wait_for_all(store: Any, here: Environment, timeout: timedelta) -> None:
    """Return when every rank has called this.

    Args:
        store: torch's, in which they meet.
        here: this rank.
        timeout: how long to wait in all.

    Raises:
        LaunchError: some have not come.
    """
    size = here.world_size
    store.set(f"{_COUNT}/{here.rank}", "")
    if store.add(_COUNT, 1) >= size:
        store.set(_ALL, "")

    def come(left: timedelta) -> bool:
        ends, pause = time.monotonic() + left.total_seconds(), 0.001
        while not store.check([_ALL]):  # its wait() prints a warning of C++'s when the time is over
            if time.monotonic() > ends:
                raise TimeoutError
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return True

    def missing() -> str:
        return _named([rank for rank in range(size) if not store.check([f"{_COUNT}/{rank}"])], size)

    def first() -> bool:
        return not any(store.check([f"{_COUNT}/{rank}"]) for rank in range(here.rank))

    _waited(come, missing, first, timeout)


@contextmanager
def named_while_connecting(store: Any, here: Environment) -> Iterator[None]:
    """Inside, where C++ waits for every rank's connections, a thread says now and then which ranks are gone.

    Args:
        store: in which they have met; it is left to the caller, who is blocked in it.
        here: this rank.
    """
    if not hasattr(store, "clone"):  # older torch
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_name_gone, args=(store.clone(), here, over, patience()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _name_gone(store: Any, here: Environment, over: threading.Event, each: float) -> None:
    began = time.monotonic()
    while not over.wait(each):
        try:
            store.set(f"{_ALIVE}/{here.rank}", "")
            if over.wait(min(1.0, each)):  # the others came here at the same moment
                return
            alive = [rank for rank in range(here.world_size) if store.check([f"{_ALIVE}/{rank}"])]
        except RuntimeError:  # it has gone with its process
            return
        gone = sorted({*range(here.world_size)} - {*alive})
        if gone and here.rank == alive[0]:
            waited = time.monotonic() - began
            print(
                f"waiting for {_named(gone, here.world_size)} to connect for {waited:.0f} s",
                file=sys.stderr,
                flush=True,
            )


def _named(ranks: list[int], size: int) -> str:
    listed = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {listed} of {size}" if len(ranks) == 1 else f"ranks {listed} of {size}"


def _waited(
    come: Callable[[timedelta], Any], missing: Callable[[], str], speaks: Callable[[], bool], timeout: timedelta
) -> Any:
    """What ``come`` returns; who is missing is said now and then, by one that ``speaks`` for several."""
    began, each = time.monotonic(), patience()
    ends = began + timeout.total_seconds()
    while True:
        now = time.monotonic()
        last = ends - now <= each
        try:
            return come(timedelta(seconds=max(0.01, ends - now) if last else each))
        except (TimeoutError, RuntimeError) as error:  # torch's DistStoreError and DistNetworkError
            waited = time.monotonic() - began
            if time.monotonic() - now < 0.5 * min(each, ends - now):
                raise  # not because of the time
            if last:
                raise LaunchError(
                    "not every process has come",
                    found=f"after {waited:.0f} s without {missing()}",
                    fix="look at what they said, and at how many were started; timeout= of the strategy is how long",
                ) from error
        if speaks():
            print(f"waiting for {missing()}: not there after {waited:.0f} s", file=sys.stderr, flush=True)
