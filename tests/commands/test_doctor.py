"""`trainer-kit doctor`: each line, provoked where a test can."""

from __future__ import annotations

import importlib
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from click.testing import CliRunner

from tests.ports import free_port
from trainer_kit.commands.main import main
from trainer_kit.health import survey

command = importlib.import_module("trainer_kit.commands.doctor")


@pytest.fixture
def doctor(monkeypatch, tmp_path):
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "RANK",
        "WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # whatever else runs here

    def call(directory=tmp_path):
        result = CliRunner().invoke(main, ["doctor", "--directory", str(directory)])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.output
        )
        return result.exit_code, result.output

    return call


def test_every_check_prints_a_line(doctor):
    code, said = doctor()
    assert code == (1 if "\nfix" in said else 0)
    for about in (
        "python",
        "torch",
        "cores",
        "ranks",
        "backends",
        "network",
        "ports",
        "disk",
        "open files",
        "clock",
    ):
        assert any(line[8:].startswith(about) for line in said.splitlines()), about
    assert f"{torch.__version__}" in said
    assert said.splitlines()[-1].startswith(
        f"{sum(line[:1] != ' ' for line in said.splitlines()) - 1} checks: "
    )


def test_variables_with_invalid_values_are_reported(doctor, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere9")
    monkeypatch.setenv("MASTER_ADDR", "host.invalid")
    monkeypatch.setenv("MASTER_PORT", "22x")
    code, said = doctor()
    assert code == 1
    for line in (
        "the rank environment lacks WORLD_SIZE: RANK=3",
        "GLOO_SOCKET_IFNAME=nowhere9 names no interface",
        "host.invalid does not resolve",
        "MASTER_PORT=22x is not a port",
    ):
        (found,) = [each for each in said.splitlines() if line in each]
        assert found.startswith("fix ")
    assert "→ unset GLOO_SOCKET_IFNAME" in said


def test_a_port_that_is_taken(doctor, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        code, said = doctor()
    assert code == 1
    assert "cannot be used: Address already in use" in said


def test_few_open_files(doctor):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        code, said = doctor()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code == 1
    assert "fix     open files" in said
    assert "→ ulimit -n" in said


def test_a_directory_that_takes_no_files(doctor):
    code, said = doctor("/proc")
    assert code == 1
    assert "/proc cannot be written to" in said
    assert "clock" in said  # a check that fails does not end the others


def test_a_device_that_torch_does_not_see(doctor, monkeypatch, tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("torch sees an accelerator")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 550.54.14\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code, said = doctor()
    assert code == 1
    assert "an NVIDIA device (driver 550.54.14), and torch" in said


def test_versions_are_those_that_the_package_asks_for(doctor, monkeypatch, tmp_path):
    info = tmp_path / "trainer_kit-0.1.0.dist-info"
    info.mkdir()
    needs = ["torch>=99", "numpy", "no-such-package>=2", 'rich>=999; extra == "rich"']
    lines = [
        "Metadata-Version: 2.1",
        "Name: trainer-kit",
        "Version: 0.1.0",
        *(f"Requires-Dist: {n}" for n in needs),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, said = doctor()
    assert code == 1
    assert f"torch {torch.__version__}, where >=99 is supported" in said
    assert "→ pip install 'no-such-package>=2'" in said
    assert "numpy" not in said
    assert "rich" not in said


def test_a_clock_that_was_never_set(doctor, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    code, said = doctor()
    assert code == 1
    assert "set the clock" in said


def test_it_measures_this_process(doctor):
    _, printed = doctor()
    for about in ("GEMM", "memory", "disk"):
        assert any(
            line[8:].startswith(about) and line.endswith("/s")
            for line in printed.splitlines()
        ), about
    assert "clocks" not in printed  # there is one rank


@pytest.mark.slow
def test_it_starts_ranks_and_compares_them(monkeypatch, tmp_path):
    def report(*more):
        result = CliRunner().invoke(
            main,
            ["doctor", "--directory", str(tmp_path), "--devices", "2", "--json", *more],
        )
        return result.exit_code, json.loads(result.output)

    code, found = report()
    assert code == int(any(each["level"] == "fix" for each in found["findings"]))
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert all(
        set(rank["speeds"]) >= {"GEMM", "memory", "all-reduce"}
        for rank in found["ranks"]
    )
    assert "disk" not in found["ranks"][1]["speeds"], "once for each machine"
    versions = survey.versions
    monkeypatch.setattr(
        survey,
        "versions",
        lambda device: {**versions(device), "torch": "1." + os.environ.get("RANK", "")},
    )
    code, found = report()  # forked ranks have the change
    assert code == 1
    (wrong,) = [
        each
        for each in found["findings"]
        if each["about"] == "versions" and each["level"] == "fix"
    ]
    assert wrong["text"].startswith("torch 1.1 on rank 1 (")


@pytest.mark.slow
def test_under_a_launcher_rank_0_reports_for_all(tmp_path):
    words = [
        "launch",
        "--quiet",
        "--cpu",
        "--num_processes=2",
        "-m",
        "trainer_kit",
        "doctor",
        f"--directory={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trainer_kit", *words],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.startswith("fix ")]
    assert done.returncode == int(bool(wrong)), done.stdout + done.stderr
    assert sum(" checks: " in line for line in lines) == 1
    assert sum(line[8:].startswith("python") for line in lines) == 1
    assert any(
        line[8:].startswith("versions") and "equal on 2 ranks" in line for line in lines
    )
    assert any(
        line[8:].startswith("ports") and "connects the 2 ranks" in line
        for line in lines
    )
    assert any(
        line[8:].startswith("ranks") and "rank 0 of 2 (torchrun)" in line
        for line in lines
    )


@pytest.mark.slow
def test_ranks_that_do_not_connect(doctor, monkeypatch):
    monkeypatch.setattr(command, "_TIMEOUT", timedelta(seconds=1))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    code, printed = doctor()
    assert code == 1
    (line,) = [line for line in printed.splitlines() if "do not connect" in line]
    assert line.startswith("fix     ranks ")
    assert "python" in printed


def test_a_measurement_that_fails_is_a_line(doctor, monkeypatch):
    monkeypatch.setattr(command, "_measure_alone", lambda directory: 1 / 0)
    code, printed = doctor()
    assert code == 1
    assert "ZeroDivisionError: division by zero" in printed
    assert "python" in printed
