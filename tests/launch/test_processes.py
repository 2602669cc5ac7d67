"""What the start of ranks leaves in the process that starts them."""

import gc

import pytest

from trainer_kit.launch.processes import no_garbage_in_forks


@pytest.fixture
def frozen():
    """How many objects are frozen; at the end they are again."""
    before = gc.get_freeze_count()
    yield gc.get_freeze_count
    gc.unfreeze()
    gc.collect()
    if before:
        gc.freeze()


def test_what_a_program_froze_stays_frozen(frozen):
    gc.freeze()
    before = frozen()
    with no_garbage_in_forks():
        pass
    assert frozen() >= before > 0


def test_objects_are_thawed_once_after_several_forks(frozen):
    gc.unfreeze()
    with no_garbage_in_forks():
        with no_garbage_in_forks():
            pass
        assert frozen() > 0
    assert frozen() == 0
