"""Scripts run as by ``python -W error``, without the seconds that each would need to import torch.

Run as a program this file is a server: it imports everything once, and forks for each script. A script is an ordinary
process, with the directory, environment, arguments and streams that it is given, and an ordinary end. Scripts that
start themselves again on several ranks read their interpreter's own command line: those are started as anybody would.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer_kit.launch.bootstrap import _leave
from trainer_kit.launch.processes import local_environment

ROOT = Path(__file__).resolve().parents[1]
DIE_WITH_PARENT = 1  # of prctl

COMMAND = """
import os, sys
from trainer_kit.commands.main import main

sys.path[0] = os.getcwd()  # as `python -m trainer_kit`
main(prog_name="trainer-kit")
"""


class Programs:
    """The server, as a child process of the tests.

    Attributes:
        queued: seconds for which the last scripts were ready to run while other processes had the cores.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.queued = 0.0
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        script: Path | str,
        *words: str,
        environment: Mapping[str, str] = os.environ,
        given: str = "",
        timeout: float = 110.0,
        anew: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` returns of a script that is run in the working directory.

        Args:
            script: its file.
            words: its arguments.
            environment: its variables.
            given: what it reads from its standard input.
            timeout: seconds after which it is killed.
            anew: in an interpreter of its own, which a script needs that starts itself again on several ranks.
        """
        if anew:
            return subprocess.run(
                [sys.executable, "-W", "error", str(script), *words],
                env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                input=given,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        return self._run([environment], [str(script), *words], given, timeout)[0]

    def run_command(
        self,
        *words: str,
        environment: Mapping[str, str] = os.environ,
        given: str = "",
        timeout: float = 110.0,
    ) -> subprocess.CompletedProcess[str]:
        """The same of ``trainer-kit``, with ``words`` as its arguments."""
        script = self.place / "trainer-kit"
        script.write_text(COMMAND, encoding="utf-8")
        return self.run(
            script, *words, environment=environment, given=given, timeout=timeout
        )

    def run_ranks(
        self, count: int, script: Path | str, *words: str, timeout: float = 110.0
    ) -> list[subprocess.CompletedProcess[str]]:
        """The same of ``count`` processes at once, each told its rank as any launcher does."""
        shared = {**os.environ, **local_environment(count)}
        ranks = [
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(count)
        ]
        return self.run_together(ranks, script, *words, timeout=timeout)

    def run_together(
        self,
        environments: Sequence[Mapping[str, str]],
        script: Path | str,
        *words: str,
        timeout: float = 110.0,
    ) -> list[subprocess.CompletedProcess[str]]:
        """The same of one process for each of these environments, at once."""
        return self._run(environments, [str(script), *words], "", timeout)

    def _run(
        self,
        environments: Sequence[Mapping[str, str]],
        argv: list[str],
        given: str,
        timeout: float,
    ) -> list[subprocess.CompletedProcess[str]]:
        (self.place / "given").write_text(given)
        streams = [
            [str(self.place / f"{name}-{rank}") for name in ("out", "err")]
            for rank in range(len(environments))
        ]
        command = {
            "environments": list(map(dict, environments)),
            "argv": argv,
            "directory": os.getcwd(),
        }
        command |= {
            "given": str(self.place / "given"),
            "streams": streams,
            "timeout": timeout,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        codes, self.queued = json.loads(self.process.stdout.readline())
        return [
            subprocess.CompletedProcess(
                argv, code, *(Path(path).read_text() for path in paths)
            )
            for code, paths in zip(codes, streams, strict=True)
        ]

    def run_code(
        self, code: str, *words: str, timeout: float = 110.0
    ) -> subprocess.CompletedProcess[str]:
        """The same of a script that is given as text."""
        script = self.place / "code.py"
        script.write_text(code)
        return self.run(script, *words, timeout=timeout)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


def serve() -> None:
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # what the first optimizer of a process imports
    import torch.utils.tensorboard  # noqa: F401

    import trainer_kit as tk
    import trainer_kit.commands.cli
    import trainer_kit.trainer

    for name in tk.__all__:
        getattr(tk, name)
    gc.freeze()  # no collection in a script looks at, and so copies, what is here
    for line in sys.stdin:
        command = json.loads(line)
        pids = []
        for rank in range(len(command["environments"])):
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # newer versions of Python warn of threads, which no script inherits
                pids.append(os.fork())
            if pids[-1] == 0:
                become(command, rank)
                return
        print(json.dumps(supervise(pids, command["timeout"])), flush=True)


def become(command: dict[str, Any], rank: int) -> None:
    """The script, as the interpreter runs it."""
    ctypes.CDLL(None).prctl(
        DIE_WITH_PARENT, signal.SIGKILL
    )  # not inherited: its children are its own business
    os.environ.clear()
    os.environ.update(command["environments"][rank])
    os.chdir(command["directory"])
    os.dup2(os.open(command["given"], os.O_RDONLY), 0)
    for stream, path in enumerate(command["streams"][rank], 1):
        os.dup2(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600),
            stream,
        )
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the server's has read ahead
    sys.argv = command["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise
    _leave()  # as a rank does: taking the interpreter to pieces costs 0.3 s after a fork


def supervise(pids: list[int], timeout: float) -> tuple[list[int], float]:
    """The exit code of each, and for how many seconds they were ready to run but had no core."""
    began = time.monotonic()
    codes: dict[int, int] = {}
    queued: dict[Path, int] = {}
    looked = began
    while len(codes) < len(pids):
        if time.monotonic() - looked > 0.05:
            looked = time.monotonic()
            for pid in set(pids) - codes.keys():
                queued |= queue_times(pid)
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > began + timeout:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[pid] for pid in pids], sum(queued.values()) / 1e9


def queue_times(pid: int) -> dict[Path, int]:
    """The nanoseconds that each thread of a process has waited for a core, as Linux counts them."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it ended meanwhile
            found[thread] = int(thread.read_text().split()[1])
    return found


if __name__ == "__main__":
    serve()
