"""Ports for tests."""

from __future__ import annotations

import os
import socket
from itertools import count

_FIRST, _COUNT = 10_000, 4_000
"""Below the ports that systems give to sockets without one, and below those that runs derive from a SLURM job."""
_HELD: list[socket.socket] = []
_NEXT = count(os.getpid() * 37)


def free_port() -> int:
    """Return a port of the loopback interface that no program uses, and no other call of any test process returns.

    A program that starts later can listen at it: this process holds only the UDP port of that number, until it ends.
    """
    for number in _NEXT:
        port = _FIRST + number % _COUNT
        held = socket.socket(type=socket.SOCK_DGRAM)
        try:
            held.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        _HELD.append(held)
        return port
    raise AssertionError("count() has no end")
