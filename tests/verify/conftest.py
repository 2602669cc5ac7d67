"""Most verdicts are the same whether ranks are threads or processes: `make test` runs threads, `make test-all` both."""

from __future__ import annotations

import pytest

LOCAL = {"local": True}
"""The word of `verify` with which the tests of this folder run: whether ranks are threads of this process."""


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.long)],
    ids=["threads", "processes"],
)
def ranks(request, monkeypatch):
    """Let `verify` of these tests run its ranks as threads, and once more as processes."""
    monkeypatch.setitem(LOCAL, "local", request.param)


PROCESSES = pytest.mark.parametrize("ranks", [False], ids=["processes"], indirect=True)
"""For what threads cannot show, and for one test of each stage, so that real processes are run in `make test` too."""
