"""Run as a program: it imports everything once, then forks a run that saves and prunes for each command.

One command a line on standard input, one answer a line on standard output, both JSON. The run goes on from what is in
the directory for two steps, and saves each. From the moment that is asked for on, ``strace`` or an audit hook watches
its file operations, and kills it at one of them or lets that one fail.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import TinyModule

SAVED, REPORTED, REFUSED, BROKEN = 0, 10, 11, 12
EVENTS = {
    "open",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "os.listdir",
}


class Run(tk.Callback):
    """Calls ``watch`` when it is time, and hears which checkpoints exist."""

    def __init__(self, moment: str, watch: Callable[[], None]) -> None:
        self.moment, self.watch = moment, watch

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.moment == "save":
            self.moment = ""
            self.watch()


def fit(directory: Path, steps: int, moment: str, watch: Callable[[], None]) -> int:
    """Exit code: every save was reported done, or one failed, or the run was refused before its first step."""
    keeper, said, trained = ModelCheckpoint(directory, every_n_train_steps=1), [], []

    class Says(Run):
        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            trained.append(trainer.global_step)

    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = tk.Trainer(
        max_steps=steps, callbacks=[keeper, Says(moment, watch)], **options
    )
    trainer.print = lambda *values, **_: said.append(" ".join(map(str, values)))
    if moment == "start":
        watch()
    try:
        trainer.fit(TinyModule(), [torch.ones(2, 32)] * steps, ckpt_path="last")
    except CheckpointError:
        if trained:
            raise
        return REFUSED
    return REPORTED if any(line.startswith("save of step") for line in said) else SAVED


def become(command: dict[str, Any]) -> None:
    directory, code = Path(command["directory"]), BROKEN
    count = command["steps"]
    try:
        warnings.simplefilter(
            "ignore" if command["fault"] else "error"
        )  # that something was not deleted is a warning
        watches = {
            "strace": stop,
            "audit": lambda: audit(command),
            "none": lambda: None,
        }
        code = fit(directory, count, command["moment"], watches[command["by"]])
    except BaseException:
        Path(command["said"]).write_text(traceback.format_exc())
    finally:
        os._exit(code)


def stop() -> None:
    """Until the tracer is there."""
    os.kill(os.getpid(), signal.SIGSTOP)


def audit(command: dict[str, Any]) -> None:
    """File operations in the directory, as far as Python knows of them: all but writes to open files."""
    within, fault, real = str(command["directory"]), command["fault"], os.fsync
    count, in_tree = 0, False
    trace = os.open(command["trace"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def operation(call: str, *paths: str) -> None:
        nonlocal count
        count += 1
        os.write(trace, (json.dumps([call, *paths]) + "\n").encode())
        if fault and count == fault["at"]:
            if fault["error"] == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(
                getattr(errno, fault["error"]),
                os.strerror(getattr(errno, fault["error"])),
            )

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal in_tree
        if (
            event == "shutil.rmtree"
        ):  # whose files are named relative to an open directory
            in_tree = within in str(arguments[0])
        if event not in EVENTS or not isinstance(
            arguments[0], str | bytes | os.PathLike
        ):
            return
        relative = event in ("os.remove", "os.rmdir") and arguments[-1] not in (
            None,
            -1,
        )
        if (relative and in_tree) or within in str(arguments[0]):
            writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            call = "create" if writes else event.removeprefix("os.")
            operation(
                call,
                *(
                    str(path)
                    for path in arguments[: 2 if call in ("rename", "link") else 1]
                ),
            )

    def fsync(descriptor: int) -> None:
        operation("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    os.fsync = fsync
    sys.addaudithook(hear)


def run(command: dict[str, Any]) -> dict[str, Any]:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)
        become(command)
    tracer = None
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        fault = command["fault"]
        inject = (
            [f"inject={fault['call']}:{fault['how']}:when={fault['at']}"]
            if fault
            else []
        )
        arguments = [
            part
            for expression in [f"trace={command['calls']}", *inject]
            for part in ("-e", expression)
        ]
        strace = [
            "strace",
            "-f",
            "-y",
            "-s",
            "0",
            "-o",
            command["trace"],
            *arguments,
            "-p",
            str(pid),
        ]
        tracer = subprocess.Popen(
            strace, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        first = tracer.stderr.readline()
        if "attached" not in first:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            tracer.communicate()
            return {"ended": None, "said": first}
        os.kill(pid, signal.SIGCONT)
    if tracer is not None:
        tracer.communicate()
    said = Path(command["said"])
    answer = {
        "ended": os.waitstatus_to_exitcode(status),
        "said": said.read_text() if said.exists() else "",
    }
    said.unlink(missing_ok=True)
    return answer


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory
    ):  # whatever is imported when it is first needed
        fit(Path(directory), 1, "", stop)
    gc.freeze()  # no collection in a run looks at, and so copies, what is here
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
