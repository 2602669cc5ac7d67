"""The agent: real scripts on real ranks, and everything that ends them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# Starts its own ranks, as a Trainer does; then the mode decides what a rank does.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

mode = sys.argv[1]
if "RANK" not in os.environ:
    from trainer_kit.launch import run_agent
    sys.argv.append("edited")
    Path("elsewhere").mkdir(exist_ok=True)
    os.chdir("elsewhere")
    run_agent(2, extra_env={"TRAINER_KIT_SEED": "7"}, max_restarts=int(os.environ.get("RESTARTS", "0")),
              peer_grace=1.0, signal_grace=float(os.environ.get("GRACE", "20")))

rank = int(os.environ["RANK"])
attempt = os.environ["TRAINER_KIT_RESTART_COUNT"]
Path(f"pid-{rank}").write_text(str(os.getpid()))


class OfTheScript(Exception):
    pass


def wait_for_the_other():
    while not Path(f"pid-{1 - rank}").exists():
        time.sleep(0.01)


if mode == "show":
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS",
                 "TRAINER_KIT_SEED", "TORCHELASTIC_RESTART_COUNT"):
        print(rank, name, os.environ[name])
    print(rank, "argv", sys.argv[1:], "name", __name__, "spec", __spec__ and __spec__.name)
    print(rank, "path", sys.path[0] == str(Path(__file__).parent), "dev", sys.flags.dev_mode, "cwd", Path.cwd().name)
    import pickle
    print(rank, "pickle", pickle.loads(pickle.dumps(OfTheScript())).__class__ is OfTheScript)
if mode == "early" and rank == 1:
    wait_for_the_other()
    raise OfTheScript("before anything was imported")
if mode in ("echo", "killed"):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        if mode == "echo":
            from trainer_kit.launch import report_errors
            report_errors(lambda: "step 25")
            raise ValueError("bad label -1\\nand a second line")
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
if mode in ("exit", "abort") and rank == 1:
    wait_for_the_other()
    if mode == "abort":
        import atexit
        atexit.register(os.abort)
    sys.exit(3)
if mode == "busy":
    if rank == 1:
        wait_for_the_other()
        sys.exit("nothing to do")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if mode == "second" and attempt == "0" and rank == 0:
    wait_for_the_other()
    sys.exit(75)
if mode == "preempted":
    if rank == 0:
        wait_for_the_other()
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
if mode in ("wait", "obey", "deaf"):
    def obey(number, frame):
        print(rank, "saved", flush=True)
        if mode == "obey":
            sys.exit(143)
    if mode != "wait":
        signal.signal(signal.SIGTERM, obey)
        signal.signal(signal.SIGUSR1, obey)
    Path(f"ready-{rank}").touch()
    while True:
        time.sleep(0.05)
print(rank, "done in attempt", attempt)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _environ(**more: str) -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST")
    }
    return {**own, "PYTHONPATH": str(ROOT), "TMPDIR": os.getcwd(), **more}


def _run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=_environ(**environ),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def _become(
    command: list[str],
    directory: str,
    environ: dict[str, str],
    streams: list[Connection],
) -> None:
    """Turn a fork of a process that has imported torch into ``python *command``."""
    import trainer_kit.core.environment
    import trainer_kit.launch.agent
    import trainer_kit.launch.program

    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # else it cannot be run again
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    for module in (
        trainer_kit.core.environment,
        trainer_kit.launch.agent,
        trainer_kit.launch.program,
    ):
        module.START_DIRECTORY = directory  # type: ignore[attr-defined]
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", closefd=False),
        os.fdopen(2, "w", closefd=False),
    )
    sys.argv, sys.orig_argv = list(command), [sys.executable, *command]
    runpy.run_path(os.path.abspath(command[0]), run_name="__main__")


class _Forked:
    """An agent as a fork, with the methods of ``subprocess.Popen`` that the tests use."""

    def __init__(self, command: tuple[str, ...], environ: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["trainer_kit.launch.agent"])
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        words = (list(command), os.getcwd(), environ, [writer for _, writer in pipes])
        self.process = context.Process(target=_become, args=words)
        self.process.start()
        for _, writer in pipes:
            writer.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes
        )
        for reader, _ in pipes:
            reader.close()

    def __enter__(self) -> _Forked:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.stdout.close()
        self.stderr.close()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.process.join(timeout)
        assert self.process.exitcode is not None, "the agent did not end"
        return self.stdout.read(), self.stderr.read()


def _start(*command: str, **environ: str) -> _Forked:
    return _Forked(command, _environ(**environ))


def _forked(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    with _start(*command, **environ) as agent:
        out, err = agent.communicate(timeout=100)
    assert agent.returncode is not None
    return subprocess.CompletedProcess(command, agent.returncode, out, err)


def _until(what: str) -> None:
    deadline = time.monotonic() + 60
    while not all(Path(f"{what}-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)


def _no_rank_lives(within: float = 5.0) -> bool:
    pids = [int(Path(f"pid-{rank}").read_text()) for rank in range(2)]
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(
            Path(f"/proc/{pid}").exists() and "(zombie)" not in _state(pid)
            for pid in pids
        ):
            return True
        time.sleep(0.05)
    return False


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "(zombie)"


def test_ranks_get_the_script_its_arguments_and_torchruns_variables(
    script: Path, tmp_path: Path
) -> None:
    ran = _run(
        "-X",
        "dev",
        "-W",
        "error",
        "train.py",
        "show",
        "--flag=a b",
        OMP_NUM_THREADS="3",
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = sorted(ran.stdout.splitlines())
    for rank in "01":
        for told in (
            "WORLD_SIZE 2",
            f"LOCAL_RANK {rank}",
            "LOCAL_WORLD_SIZE 2",
            "MASTER_ADDR 127.0.0.1",
            "OMP_NUM_THREADS 3",
            "TRAINER_KIT_SEED 7",
            "TORCHELASTIC_RESTART_COUNT 0",
            "argv ['show', '--flag=a b'] name __main__ spec None",
            f"path True dev True cwd {tmp_path.name}",
            "pickle True",
            "done in attempt 0",
        ):
            assert f"{rank} {told}" in lines
    assert not list(tmp_path.glob("trainer_kit-*"))


def test_python_m(script: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    script.rename(package / "__main__.py")
    ran = _run("-m", "package", "show")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (
        "1 argv ['show'] name __main__ spec package.__main__" in ran.stdout.splitlines()
    )


def test_the_first_exception_is_the_headline(script: Path) -> None:
    ran = _forked("train.py", "echo")
    assert ran.returncode == 1
    told = ran.stderr.splitlines()
    at = next(
        number
        for number, line in enumerate(told)
        if line.startswith("rank 1 of 2 failed at step 25 (")
    )
    assert told[at].endswith("): ValueError: bad label -1")
    assert told[at + 1] == "  Traceback (most recent call last):"
    assert "train.py" in told[at + 2]
    assert "bootstrap" not in ran.stderr
    assert told[-3:-1] == ["  ValueError: bad label -1", "  and a second line"]
    assert told[-1] in (
        "after it: rank 0 lost the connection",
        "after it: rank 0 stopped",
    )
    assert ran.stderr.count("Traceback") == 1
    assert _no_rank_lives()


@pytest.mark.slow
def test_an_exception_before_anything_is_imported(script: Path) -> None:
    ran = _forked("train.py", "early")
    assert ran.returncode == 1
    assert "OfTheScript: before anything was imported" in ran.stderr.splitlines()[0]


def test_kill_9_of_one_rank(script: Path) -> None:
    ran = _forked("train.py", "killed")
    assert ran.returncode == 128 + 9
    headline = next(
        line for line in ran.stderr.splitlines() if line.startswith("rank ")
    )
    assert headline.startswith("rank 1 of 2 failed (")
    assert "killed by SIGKILL" in headline
    assert "after it: rank 0" in ran.stderr
    assert _no_rank_lives()


@pytest.mark.parametrize("mode", ["exit", "abort"])
def test_exit_codes_pass_through(script: Path, mode: str) -> None:
    ran = _forked("train.py", mode)
    assert ran.returncode == 3
    assert "): exited with code 3" in ran.stderr


@pytest.mark.slow
def test_a_rank_that_does_not_follow_is_killed(script: Path) -> None:
    ran = _forked("train.py", "busy")
    assert ran.returncode == 1
    assert "): exited with code 1 (nothing to do)" in ran.stderr
    assert ran.stderr.endswith("after it: rank 0 stopped\n")
    assert _no_rank_lives()


def test_a_code_of_75_is_restarted(script: Path) -> None:
    ran = _forked("train.py", "second", RESTARTS="2")
    assert ran.returncode == 0
    assert "restart 1 of 2" in ran.stderr
    done = sorted(
        line for line in ran.stdout.splitlines() if line.endswith("in attempt 1")
    )
    assert done == ["0 done in attempt 1", "1 done in attempt 1"]


@pytest.mark.slow
def test_a_signal_is_final(script: Path) -> None:
    ran = _forked("train.py", "preempted", RESTARTS="2")
    assert ran.returncode == 143
    assert "rank 0 of 2 failed" in ran.stderr
    assert "restart" not in ran.stderr
    assert _no_rank_lives()


@pytest.mark.parametrize(
    ("mode", "number"), [("wait", "SIGTERM"), ("obey", "SIGTERM"), ("wait", "SIGHUP")]
)
def test_a_signal_to_the_agent_ends_all(script: Path, mode: str, number: str) -> None:
    with _start("train.py", mode) as agent:
        _until("ready")
        agent.send_signal(signal.Signals[number])
        out, err = agent.communicate(timeout=60)
    assert agent.returncode == 128 + signal.Signals[number]
    assert err.splitlines()[-1] == f"{number}: 2 ranks ended"
    assert sorted(out.splitlines()) == (
        ["0 saved", "1 saved"] if mode == "obey" else []
    )
    assert _no_rank_lives()


@pytest.mark.slow
def test_deaf_ranks_are_killed_after_the_grace(script: Path) -> None:
    with _start("train.py", "deaf", GRACE="0.5") as agent:
        _until("ready")
        agent.terminate()
        _, err = agent.communicate(timeout=60)
    assert agent.returncode == 143
    assert "ranks 0, 1 did not end by themselves" in err
    assert _no_rank_lives()


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(script: Path) -> None:
    with _start("train.py", "deaf", GRACE="300") as agent:
        _until("ready")
        agent.terminate()
        assert agent.stdout is not None
        assert {agent.stdout.readline() for _ in range(2)} == {"0 saved\n", "1 saved\n"}
        agent.send_signal(signal.SIGINT)
        agent.communicate(timeout=60)
    assert agent.returncode == 143
    assert _no_rank_lives()


@pytest.mark.slow
def test_usr1_only_passes_through(script: Path) -> None:
    with _start("train.py", "deaf", GRACE="0.5") as agent:
        _until("ready")
        agent.send_signal(signal.SIGUSR1)
        assert agent.stdout is not None
        assert {agent.stdout.readline() for _ in range(2)} == {"0 saved\n", "1 saved\n"}
        assert agent.poll() is None
        agent.terminate()
        agent.communicate(timeout=60)
    assert _no_rank_lives()


def test_ranks_die_with_an_agent_that_is_killed(script: Path) -> None:
    with _start("train.py", "deaf") as agent:
        _until("ready")
        agent.kill()
        agent.communicate(timeout=60)
    assert _no_rank_lives()


def test_code_that_cannot_run_again_is_refused() -> None:
    ran = _run("-c", "from trainer_kit.launch import run_agent; run_agent(2)")
    assert ran.returncode == 1
    assert "cannot be restarted on several processes" in ran.stderr
    assert "found: code given with python -c" in ran.stderr
    assert 'strategy="ddp_notebook"' in ran.stderr.splitlines()[-1]
