"""This program: its command line, who started it, and how it is started again after a failure or a preemption."""

from __future__ import annotations

import builtins
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.environment import START_DIRECTORY
from trainer_kit.core.errors import LaunchError

__all__ = [
    "HANDED_OVER",
    "arguments",
    "handed_over",
    "launches",
    "requeue",
    "rerun_command",
    "script",
    "split_command",
]

HANDED_OVER: Final = "TRAINER_KIT_RUN"
"""The environment variable through which our agent passes the run's identity to every rank and restart."""

_OPTION: Final = re.compile(r"(-{0,2}[A-Za-z][\w.\-]*)=(.*)", re.DOTALL)
_REQUEUE_TIME: Final = 60.0


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a Python command line into the interpreter's options and the rest.

    Args:
        command: as in ``sys.orig_argv``: the interpreter first.

    Returns:
        The options without ``-i``, and ``[script, *arguments]``, ``["-m", module, *arguments]``,
        ``["-c", code, *arguments]``, or nothing.

    Example:
        >>> split_command(["python", "-uW", "error", "-X", "dev", "train.py", "--lr", "1"])
        (['-uW', 'error', '-X', 'dev'], ['train.py', '--lr', '1'])
        >>> split_command(["python", "-Om", "package.module", "-v"])
        (['-O'], ['-m', 'package.module', '-v'])
    """
    options: list[str] = []
    rest = list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word.startswith("--"):
            options += (
                [word, rest.pop(0)] if word == "--check-hash-based-pycs" else [word]
            )
            continue
        letters = ""
        for at, letter in enumerate(word[1:], start=1):
            value = word[at + 1 :]
            if letter in "cm":
                options += [f"-{letters}"] if letters else []
                return options, [f"-{letter}", *([value] if value else []), *rest]
            if letter in "WX":
                options += [
                    f"-{letters}{letter}{value}",
                    *([] if value else [rest.pop(0)]),
                ]
                letters = ""
                break
            letters += letter if letter != "i" else ""
        options += [f"-{letters}"] if letters else []
    return options, rest


def rerun_command() -> tuple[list[str], list[str]]:
    """How to run this program again from its start: the interpreter's options, and the script or module with arguments.

    Raises:
        LaunchError: the program cannot be run again: in an interactive session, a notebook, ``python -c``, a
            test under pytest, a child process, or off the main thread.
    """
    options, words = split_command(sys.orig_argv)
    script = _script(words[0]) if words and not words[0].startswith("-") else None
    reason = None
    if multiprocessing.parent_process() is not None:
        reason = "a child process of multiprocessing"
    elif "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        reason = "a test under pytest"
    elif hasattr(builtins, "get_ipython"):
        reason = "a notebook or an IPython session"
    elif words and words[0] == "-c":
        reason = "code given with python -c"
    elif hasattr(sys, "ps1") or not words or words[0] == "-":
        reason = "an interactive session or code from standard input"
    elif script is not None and not script.exists():
        reason = f"{words[0]}, which does not exist any more"
    elif not sys.executable or getattr(sys, "frozen", False):
        reason = "a frozen program without a Python interpreter"
    elif threading.current_thread() is not threading.main_thread():
        reason = "a thread other than the main one"
    if reason is not None:
        raise LaunchError(
            "the program cannot be started again on several processes",
            found=reason,
            fix='move it into a script (python train.py), or use strategy="ddp_notebook"',
        )
    return options, words if script is None else [str(script), *words[1:]]


def _script(word: str) -> Path:
    """The script's absolute path, also when the program has changed its directory."""
    running = getattr(sys.modules["__main__"], "__file__", None)
    if running is not None and Path(running).name == Path(word).name:
        return Path(running).absolute()
    return Path(START_DIRECTORY, word)


def script() -> str | None:
    """The absolute path of the script, or of the module's file under ``python -m``; None without a program file.

    There is none in a notebook, an interactive session, ``python -c``, and a test under pytest.
    """
    if hasattr(builtins, "get_ipython") or (
        "PYTEST_CURRENT_TEST" in os.environ and _under_pytest()
    ):
        return None
    file = getattr(sys.modules["__main__"], "__file__", None)
    return None if file is None else str(Path(file).absolute())


def _under_pytest() -> bool:
    return "_pytest" in sys.modules or multiprocessing.parent_process() is not None


def arguments(words: list[str] | None = None) -> list[str]:
    """The arguments of the script, with values that look like secrets masked.

    Example:
        >>> arguments(["--lr", "0.1", "--api-key=abc", "--hf-token", "def", "store=s3://me:pw@host/data"])
        ['--lr', '0.1', '--api-key=***', '--hf-token', '***', 'store=s3://me:***@host/data']
    """
    masked, name = [], ""
    for word in sys.argv[1:] if words is None else words:
        option = _OPTION.fullmatch(word)
        if option is not None:
            masked.append(
                f"{option[1]}={mask_secrets(option[2], option[1].lstrip('-'))}"
            )
        else:
            masked.append(mask_secrets(word, name))
        name = word.lstrip("-") if word.startswith("-") and option is None else ""
    return masked


def handed_over(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The run that all ranks and restarts of our agent share: ``id``, ``seed``, the state of ``loggers``; or {}."""
    try:
        found = json.loads(environ.get(HANDED_OVER, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def launches(environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """The launchers of this process, by a name that stays the same across restarts, and whether this is a restart.

    Args:
        environ: the variables of SLURM, torchrun and our agent.

    Example:
        >>> launches({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "exp4"})
        {'slurm 71': True, 'torchrun exp4': False}
    """
    found: dict[str, bool] = {}
    here = socket.gethostname()
    if job := environ.get("SLURM_JOB_ID"):
        found[f"slurm {job}"] = _counts(environ, "SLURM_RESTART_COUNT")
    if agent := environ.get("TRAINER_KIT_AGENT_PID"):
        name = handed_over(environ).get("id", f"{agent} on {here}")
        found[f"agent {name}"] = _counts(environ, "TRAINER_KIT_RESTART_COUNT")
    elif run := environ.get("TORCHELASTIC_RUN_ID"):
        # Without a rendezvous torchrun names every run "none": the launching process identifies the run instead.
        name = run if run != "none" else f"{os.getppid()} on {here}"
        found[f"torchrun {name}"] = _counts(environ, "TORCHELASTIC_RESTART_COUNT")
    return found


def _counts(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "0")
    return value.isdigit() and int(value) > 0


def requeue() -> str:
    """Ask SLURM to requeue this job. Returns the result as a message; "" outside of a job.

    SLURM refuses jobs that may not run again (``--no-requeue``, interactive jobs).
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return ""
    array, task = (
        os.environ.get("SLURM_ARRAY_JOB_ID"),
        os.environ.get("SLURM_ARRAY_TASK_ID"),
    )
    name = f"{array}_{task}" if array and task else job
    try:
        subprocess.run(
            ["scontrol", "requeue", name],
            check=True,
            capture_output=True,
            text=True,
            timeout=_REQUEUE_TIME,
        )
    except FileNotFoundError:
        return f"job {name} is not requeued: this machine has no scontrol"
    except subprocess.CalledProcessError as error:
        reason = " ".join(
            (error.stderr or error.stdout or f"exit code {error.returncode}").split()
        )
        return f"job {name} is not requeued: {reason}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"job {name} is not requeued: {error}"
    return f"job {name} is requeued"
