"""What this room reads of torch's private state, over real process groups."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from trainer_kit.hang.torch_private import ranks_of_groups


@pytest.mark.world_size(2)
def test_groups_without_this_rank_are_left_out() -> None:
    """Torch lists such a group by a number: the watchdog of a pipeline ended with an AttributeError there."""
    group = dist.new_group([0])
    ranks = list(ranks_of_groups().values())
    assert [0, 1] in ranks
    assert ([0] in ranks) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
