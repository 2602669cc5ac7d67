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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_kit.launch.bootstrap import _leave

ROOT = Path(__file__).resolve().parents[1]
DIE_WITH_PARENT = 1  # of prctl


class Programs:
    """The server, as a child process of the tests."""

    def __init__(self, place: Path) -> None:
        self.said = place
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
        streams = [self.said / name for name in ("given", "out", "err")]
        streams[0].write_text(given)
        command = {"argv": [str(script), *words], "directory": os.getcwd(), "environment": dict(environment)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**command, "streams": list(map(str, streams)), "timeout": timeout}) + "\n")
        self.process.stdin.flush()
        code = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess(command["argv"], code, streams[1].read_text(), streams[2].read_text())

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
        pid = os.fork()
        if pid == 0:
            become(command)
            return
        print(json.dumps(supervise(pid, command["timeout"])), flush=True)


def become(command: dict[str, Any]) -> None:
    """The script, as the interpreter runs it."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)  # not inherited: its children are its own business
    os.environ.clear()
    os.environ.update(command["environment"])
    os.chdir(command["directory"])
    given, out, err = command["streams"]
    os.dup2(os.open(given, os.O_RDONLY), 0)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the server's has read ahead
    sys.argv = command["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise
    _leave()  # as a rank does: taking the interpreter to pieces costs 0.3 s after a fork


def supervise(pid: int, timeout: float) -> int:
    """Its exit code."""
    deadline = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


if __name__ == "__main__":
    serve()
