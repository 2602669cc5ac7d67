"""What the start of ranks leaves in the process that starts them."""

import gc
import os
import signal

import pytest

from trainer_kit.launch import processes
from trainer_kit.launch.processes import no_garbage_in_forks, run_beside


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


def test_functions_run_at_the_same_time_and_the_first_one_here(monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 3)
    where = run_beside([os.getpid] * 4)
    assert where[0] == where[3] == os.getpid(), "three cores: the fourth follows here"
    assert len(set(where)) == 3


def test_what_fails_in_a_fork_is_called_here(monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 3)
    parent = os.getpid()

    def killed():
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return "here"

    assert run_beside([str, killed, lambda: lambda: 2])[1] == "here"
    with pytest.raises(ValueError, match="wrong"):
        run_beside([str, lambda: int("wrong")])


def test_on_one_core_all_functions_run_here(monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 1)
    assert run_beside([os.getpid] * 3) == [os.getpid()] * 3
