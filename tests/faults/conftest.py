from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.supervised import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all of a file; in the end nobody that was left behind by a killed process may still be there."""
    made = Server(tmp_path_factory.mktemp("server"))
    try:
        yield made
        left = made.ask("name orphans")
        assert not left, "\n\n".join(left)
    finally:
        made.close()
