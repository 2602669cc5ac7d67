"""Scripts that are started, watched and killed by `killing`, from a test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Server:
    """`killing` as a child process."""

    def __init__(self, directory: Path) -> None:
        # On another file system than the checkpoints, where there is one: a rename from there would be a copy.
        other = Path("/dev/shm")
        elsewhere = (
            other.is_dir()
            and other.stat().st_dev != directory.stat().st_dev
            and os.access(other, os.W_OK)
        )
        self.temporary = tempfile.mkdtemp(dir=other if elsewhere else directory)
        environment = {
            **os.environ,
            "TMPDIR": self.temporary,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [sys.executable, str(Path(__file__).with_name("killing.py"))]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, do: str, **command: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(
        self,
        directory: Path,
        text: str,
        ranks: int = 1,
        words: tuple[str, ...] = (),
        **kill: Any,
    ) -> Any:
        """Start the script, anew or again; see `killing.supervise`."""
        script = directory.parent / "script.py"
        script.write_text(text)
        directory.mkdir(exist_ok=True)
        options = {
            "delay": None,
            "point": None,
            "victim": 0,
            "within": str(directory / "kept"),
            **kill,
        }
        command = {
            "script": [str(script), str(ranks), *words],
            "directory": str(directory),
            "ranks": ranks,
        }
        return self.ask("run", **command, **options)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)
        shutil.rmtree(self.temporary, ignore_errors=True)
