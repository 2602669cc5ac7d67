"""The environment of processes that are started for a measurement, as a launcher makes it."""

from __future__ import annotations

import os
import socket

__all__ = ["environment", "free_port"]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """One thread, no accelerator; a rank's words where there are several."""
    told = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if world > 1:
        rank_words = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
        }
        told |= {word: str(value) for word, value in rank_words.items()}
        told |= {
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        told |= {"TORCHELASTIC_RUN_ID": "bench"}
    return told


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
