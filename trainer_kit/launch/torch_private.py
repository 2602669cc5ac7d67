"""The private name of torch that the launcher uses, checked with torch 2.13 and 2.14; no other module here has one."""

from __future__ import annotations

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

__all__ = ["skip_exit_barrier"]


def skip_exit_barrier(agent: LocalElasticAgent) -> None:
    """Let an agent end without a wait for those of other machines.

    torch has no option for it. Without this name its agent waits up to 300 s for a machine that has failed.
    """
    vars(agent)["_exit_barrier"] = lambda: None
