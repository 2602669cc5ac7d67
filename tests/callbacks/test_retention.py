import random

import pytest

from trainer_kit.callbacks.retention import Retention


def lower(a, b):
    return a < b


def higher(a, b):
    return a > b


def test_the_best_stay_and_the_worst_goes_once_its_successor_is_there():
    held = Retention(2, lower)
    deleted = []
    for path, score in [("a", 3.0), ("b", 1.0), ("c", 2.0)]:
        assert held.admits(score)
        held.ask(path, score)
        deleted += held.confirm(path)
    assert deleted == ["a"]
    assert (held.best, held.worst, held.kept) == ("b", "c", {"b": 1.0, "c": 2.0})
    assert not held.admits(2.0)
    assert held.admits(1.9)


def test_nothing_goes_before_the_successor_is_durable():
    held = Retention(1, lower)
    held.ask("a", 2.0)
    assert held.confirm("a") == []
    held.ask("b", 1.0)
    held.ask("c", 0.5)
    assert held.pending == ["b", "c"]
    assert held.displaced == {"a": ("c", 2.0), "b": ("c", 1.0)}
    assert held.spare == "b"
    assert held.confirm("b") == []
    assert held.confirm("c") == ["a"]


def test_a_save_that_failed_gives_its_place_back():
    held = Retention(2, lower)
    for path, score in [("a", 2.0), ("b", 3.0)]:
        held.ask(path, score)
        held.confirm(path)
    held.ask("c", 1.0)  # takes b's place, and is never confirmed
    held.ask("d", 1.5)  # takes a's place
    assert held.confirm("d") == [
        "b"
    ]  # a is back: with d it is the best of those that are there
    assert held.kept == {"d": 1.5, "a": 2.0}
    held.ask("e", 0.5)
    assert held.confirm("e") == ["a"]


def test_the_newest_stays_although_it_is_not_among_the_best():
    held = Retention(1, lower)
    held.ask("a", 1.0)
    assert held.confirm("a") == []
    held.ask("b", None)
    assert held.confirm("b") == []
    held.ask("c", None)
    assert held.confirm("c") == ["b"]
    assert (held.best, held.newest) == ("a", "c")


@pytest.mark.parametrize("keep", [-1, 0, 1, 3])
def test_kept_checkpoints_do_not_depend_on_when_saves_finish(keep):
    draw = random.Random(keep)
    prompt, tardy = Retention(keep, higher), Retention(keep, higher)
    disk, late = set(), []
    for index in range(60):
        score = draw.choice([0.1, 0.2, 0.3, draw.random()])
        assert prompt.admits(score) == tardy.admits(score)
        chosen = score if prompt.admits(score) else None
        path = f"step-{index}"
        for held in (prompt, tardy):
            held.ask(path, chosen)
        assert (prompt.kept, prompt.newest, prompt.yielding) == (
            tardy.kept,
            tardy.newest,
            tardy.yielding,
        )
        disk.add(path)
        disk.difference_update(prompt.confirm(path))
        assert path in disk, "the newest is never deleted"
        assert len(disk) >= min(2, index + 1)
        assert set(prompt.kept) <= disk
        late.append(path)
        if draw.random() < 0.5:
            for each in late:
                tardy.confirm(each)
            late.clear()
    assert disk == {*prompt.kept, prompt.newest, *filter(None, [prompt.spare])}
    assert len(disk) >= 2
    assert len(prompt.kept) == {-1: 60, 0: 0}.get(keep, keep)


def test_equal_scores_the_older_one_goes():
    held = Retention(2, lower)
    for path in ("a", "b"):
        held.ask(path, 1.0)
        held.confirm(path)
    assert (held.best, held.worst) == ("a", "a")
    assert not held.admits(1.0)


def test_asking_again_for_the_same_path_replaces_it():
    held = Retention(1, lower)
    for score in (3.0, 2.0, 1.0):
        held.ask("best", score)
    assert held.pending == ["best"]
    assert held.confirm("best") == []
    assert held.kept == {"best": 1.0}


def test_the_best_that_is_durable():
    held = Retention(1, lower)
    assert held.durable_best == ""
    held.ask("a", 2.0)
    assert held.durable_best == ""
    held.confirm("a")
    held.ask("b", 1.0)
    assert (held.best, held.durable_best) == ("b", "a")
    held.confirm("b")
    assert held.durable_best == "b"


def test_a_failed_save_gives_its_place_back_at_once():
    held = Retention(1, lower)
    held.ask("a", 0.5)
    held.confirm("a")
    held.ask("b", 0.4)
    held.fail("b")
    assert (held.best, held.newest, held.pending, held.displaced) == ("a", "a", [], {})
    assert held.admits(0.45), "what the failed one would have beaten is kept"
    held.ask("c", 0.45)
    assert (held.confirm("c"), held.spare) == ([], "a")
    held.ask("d", None)
    held.fail("d")
    assert (held.best, held.newest) == ("c", "c")
    held.fail("d")
    assert (held.kept, held.pending) == ({"c": 0.45}, [])


def test_a_failed_save_of_several_that_were_asked_for():
    held = Retention(1, lower)
    held.ask("a", 0.5)
    held.confirm("a")
    held.ask("b", 0.4)
    held.ask("c", 0.3)
    held.fail("b")
    assert (held.confirm("c"), held.spare) == ([], "a")
    assert (held.best, held.newest) == ("c", "c")


def test_saves_that_failed_one_after_the_other_leave_no_trace():
    held = Retention(1, lower)
    held.ask("a", 0.5)
    held.confirm("a")
    held.ask("b", 0.4)
    held.ask("c", 0.3)  # before the outcome of b is known
    held.fail("b")
    held.ask("d", 0.2)
    held.fail("c")
    held.fail("d")
    assert (held.kept, held.newest, held.pending, held.displaced) == (
        {"a": 0.5},
        "a",
        [],
        {},
    )
    assert held.admits(0.45)


@pytest.mark.parametrize("keep", [-1, 0, 1, 3])
def test_failed_saves_leave_the_state_of_the_others(keep):
    """Whichever fail, and whenever that becomes known: nothing of them stays, and nothing that was kept is gone."""
    draw = random.Random(keep)
    held, plain = Retention(keep, higher), Retention(keep, higher)
    disk, disk_of_plain, under_way = set(), set(), []
    for index in range(200):
        path, fails = f"step-{index}", draw.random() < 0.4
        score = draw.random() if draw.random() < 0.8 else None
        held.ask(path, score)
        if not fails:
            plain.ask(path, score)
            disk_of_plain.add(path)
            disk_of_plain.difference_update(plain.confirm(path))
        under_way.append((path, fails))
        while len(under_way) > 1 or (under_way and draw.random() < 0.5):
            done, failed = under_way.pop(0)
            if failed:
                held.fail(done)
                continue
            disk.add(done)
            disk.difference_update(held.confirm(done))
        assert {*held.kept, held.newest, held.spare} - {"", *held.pending} <= disk
        if not under_way:
            assert (held.kept, held.newest, held.spare) == (
                plain.kept,
                plain.newest,
                plain.spare,
            )
            assert disk == disk_of_plain


def test_a_score_that_becomes_known_after_the_save():
    for durable in (False, True):
        held = Retention(1, lower)
        held.ask("a", 0.5)
        held.confirm("a")
        held.ask("b", None)
        ready = held.confirm("b") if durable else []
        held.rate("b", 0.4)
        ready += [] if durable else held.confirm("b")
        assert (held.kept, held.newest, held.spare, ready) == ({"b": 0.4}, "b", "a", [])
        held.ask("c", 0.3)
        assert (held.confirm("c"), held.kept, held.spare) == (["a"], {"c": 0.3}, "b")


def test_a_failed_save_is_not_a_fallback_checkpoint():
    held = Retention(1, higher)
    for score, path in enumerate("ab"):
        held.ask(path, score)
        held.confirm(path)
    held.ask("c", 2.0)
    held.ask("d", 3.0)  # both were under way, and c never arrives
    assert held.confirm("d") == ["a"]
    assert (held.spare, held.kept) == ("b", {"d": 3.0})


def saved(held, path, finite=True):
    held.ask(path, float(path[1:]))
    if not finite:
        held.taint(path)
    return held.confirm(path)


def test_the_last_finite_one_stays_until_another_one_is_there():
    held = Retention(1, higher)
    assert saved(held, "s1") == saved(held, "s2") == []
    assert saved(held, "s3", finite=False) == ["s1"]
    assert saved(held, "s4", finite=False) == []
    assert saved(held, "s5", finite=False) == ["s3"]
    assert saved(held, "s6", finite=False) == ["s4"]
    assert {"s2", "s5", "s6"} <= {*held.displaced, *held.live}
    assert saved(held, "s7") == ["s2", "s5"]
    assert saved(held, "s8") == ["s6"]
    assert (held.spare, held.tainted) == ("s7", set())


def test_checkpoints_without_a_finite_value_do_not_accumulate():
    held, there = Retention(1, higher), set()
    for step in range(1, 9):
        there.add(f"s{step}")
        there.difference_update(saved(held, f"s{step}", finite=False))
    assert there == {"s7", "s8"}
