"""``@pytest.mark.world_size``: bodies run on ranks, and what happens there is reported here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer_kit.core.errors import LaunchError

SUITE = """
import os, warnings
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2)

def test_one_rank_fails():
    share = 10 + dist.get_rank()
    assert share == 10

def test_skipped():
    pytest.skip("not here")

def test_does_not_raise():
    with pytest.raises(ValueError):
        pass

def test_warns():
    warnings.warn("mind the gap")

def test_passes():
    assert dist.get_world_size() == 2

def test_fixture_cannot_travel(capsys):
    pass

@pytest.mark.world_size("two")
def test_wrong_mark():
    pass

@pytest.mark.world_size(2, timeout=2)
def test_hangs():
    if dist.get_rank() == 0:
        import time
        time.sleep(100)
"""


@dataclass
class Setting:
    """Of this module: a rank can only unpickle it with this file loaded under its name."""

    factor: int


@pytest.fixture(params=[2, 3])
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("start", [1.0, 5.0])
def test_fixtures_and_parameters_reach_the_ranks(
    tmp_path: Path, setting: Setting, start: float
) -> None:
    assert Path.cwd() == tmp_path
    value = torch.tensor(start * setting.factor)
    dist.all_reduce(value)
    assert value.item() == 2 * start * setting.factor
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


class TestInAClass:
    @pytest.mark.world_size(3)
    def test_runs_too(self) -> None:
        assert (self.shift() + dist.get_rank(), dist.get_world_size()) == (
            1 + int(os.environ["RANK"]),
            3,
        )

    def shift(self) -> int:
        return 1


@pytest.mark.world_size(2, process_group=False)
def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    assert os.environ["WORLD_SIZE"] == "2"


@pytest.mark.world_size(2)
@pytest.mark.xfail(raises=LaunchError, strict=True)
def test_errors_keep_their_type() -> None:
    raise LaunchError("of a rank", fix="none")


def test_reports(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(
        'pytest_plugins = ["trainer_kit.testing.pytest_plugin"]\n'
    )
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-W",
            "error",
            "-p",
            "no:cacheprovider",
            "test_suite.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    told = ran.stdout
    assert "6 failed, 1 passed, 1 skipped" in told, told + ran.stderr
    assert "rank 1 of 2 failed" in told
    assert "assert 11 == 10" in told
    assert "not here" in told
    assert "DID NOT RAISE" in told
    assert "UserWarning: mind the gap" in told
    assert "the fixture 'capsys' cannot be sent to the ranks" in told
    assert "the mark needs the number of ranks" in told
    assert "1 of 2 ranks did not finish within 2 s" in told
    assert "time.sleep(100)" in told or "in test_hangs" in told
