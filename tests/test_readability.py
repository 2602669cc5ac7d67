"""Each room stays as readable as it is: names, density, and values stored on the objects of others."""

from __future__ import annotations

import json

import pytest

from tests.readability import CEILINGS, count_room, list_rooms

LIMITS = {
    "tokens a line": 7.8,
    "densest function": 14.0,
    "vague names, %": 1.0,
    "vague functions": 3.0,
    "conditionals": 20.0,
    "chained": 0.0,
    "tuples": 1.0,
    "nested loops": 2.0,
    "stored outside": 8.0,
    "Any": 60.0,
}
"""Of a new room, which has no ceilings yet; per thousand lines where no unit is said."""
ROOMS = list_rooms()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_reads_as_well_as_before(room):
    """What to do: `python tests/readability.py --worst 40` names the places; `--write` lowers ceilings."""
    counts = count_room(ROOMS[room])
    ceilings = json.loads(CEILINGS.read_text()).get(room, LIMITS)
    exceeded = {
        title: (round(value, 1), ceilings[title])
        for title, value in counts.rates().items()
        if round(value, 1) > ceilings[title]
    }
    assert exceeded == {}, "\n".join([*counts.vague_names, *counts.stored_outside])


def test_no_ceiling_is_left_of_a_room_that_is_gone():
    assert set(json.loads(CEILINGS.read_text())) <= set(ROOMS)
