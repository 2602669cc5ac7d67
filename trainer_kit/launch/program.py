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
    remaining = list(command[1:])
    while remaining and remaining[0].startswith("-") and remaining[0] != "-":
        argument = remaining.pop(0)
        if argument.startswith("--"):
            options.append(argument)
            # The only long option of the interpreter that has a value.
            if argument == "--check-hash-based-pycs":
                options.append(remaining.pop(0))
            continue
        letters = ""
        for index, letter in enumerate(argument[1:], start=1):
            value = argument[index + 1 :]
            # What follows them is the program, and everything after that its arguments.
            if letter in "cm":
                if letters:
                    options.append(f"-{letters}")
                if value:
                    remaining.insert(0, value)
                return options, [f"-{letter}", *remaining]
            if letter in "WX":
                options.append(f"-{letters}{letter}{value}")
                if not value:
                    options.append(remaining.pop(0))
                letters = ""
                break
            # A rank that became interactive at its end would never end.
            if letter != "i":
                letters += letter
        if letters:
            options.append(f"-{letters}")
    return options, remaining


def rerun_command() -> tuple[list[str], list[str]]:
    """How to run this program again from its start: the interpreter's options, and the script or module with arguments.

    Raises:
        LaunchError: the program cannot be run again: in an interactive session, a notebook, ``python -c``, a
            test under pytest, a child process, or off the main thread.
    """
    options, program = split_command(sys.orig_argv)
    script = None
    if program and not program[0].startswith("-"):
        script = _find_script(program[0])
    reason = None
    # The first reason that applies is named: a child of a notebook, for example, is a child.
    if multiprocessing.parent_process() is not None:
        reason = "a child process of multiprocessing"
    elif "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        reason = "a test under pytest"
    elif hasattr(builtins, "get_ipython"):
        reason = "a notebook or an IPython session"
    elif program and program[0] == "-c":
        reason = "code given with python -c"
    elif hasattr(sys, "ps1") or not program or program[0] == "-":
        reason = "an interactive session or code from standard input"
    elif script is not None and not script.exists():
        reason = f"{program[0]}, which does not exist any more"
    elif not sys.executable or getattr(sys, "frozen", False):
        reason = "a frozen program without a Python interpreter"
    elif threading.current_thread() is not threading.main_thread():
        reason = "a thread other than the main one"
    if reason is not None:
        raise LaunchError(
            "the program cannot be restarted on several processes",
            found=reason,
            fix='move it into a script (python train.py), or use strategy="ddp_notebook"',
        )
    if script is not None:
        program[0] = str(script)
    return options, program


def _find_script(argument: str) -> Path:
    """The script's absolute path, also when the program has changed its directory."""
    # Python has resolved the argument itself, in the directory of the start.
    running = getattr(sys.modules["__main__"], "__file__", None)
    if running is not None and Path(running).name == Path(argument).name:
        return Path(running).absolute()
    return Path(START_DIRECTORY, argument)


def script() -> str | None:
    """The absolute path of the script, or of the module's file under ``python -m``; None without a program file.

    There is none in a notebook, an interactive session, ``python -c``, and a test under pytest.
    """
    if hasattr(builtins, "get_ipython") or (
        "PYTEST_CURRENT_TEST" in os.environ and _under_pytest()
    ):
        return None
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return None
    return str(Path(file).absolute())


def _under_pytest() -> bool:
    return "_pytest" in sys.modules or multiprocessing.parent_process() is not None


def arguments(words: list[str] | None = None) -> list[str]:
    """The arguments of the script, with values that look like secrets masked.

    Example:
        >>> arguments(["--lr", "0.1", "--api-key=abc", "--hf-token", "def", "store=s3://me:pw@host/data"])
        ['--lr', '0.1', '--api-key=***', '--hf-token', '***', 'store=s3://me:***@host/data']
    """
    command_line = sys.argv[1:]
    if words is not None:
        command_line = words
    masked = []
    # Of the option whose value is the next argument: it says whether that is a secret.
    name = ""
    for argument in command_line:
        option = _OPTION.fullmatch(argument)
        if option is not None:
            flag, value = option.groups()
            masked.append(f"{flag}={mask_secrets(value, flag.lstrip('-'))}")
            name = ""
        else:
            masked.append(mask_secrets(argument, name))
            name = ""
            if argument.startswith("-"):
                name = argument.lstrip("-")
    return masked


def handed_over(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The run that all ranks and restarts of our agent share: ``id``, ``seed``, the state of ``loggers``; or {}."""
    try:
        run = json.loads(environ.get(HANDED_OVER, "{}"))
    except ValueError:
        return {}
    # A variable may have any content.
    if not isinstance(run, dict):
        return {}
    return run


def launches(environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """The launchers of this process, by a name that stays the same across restarts, and whether this is a restart.

    Args:
        environ: the variables of SLURM, torchrun and our agent.

    Example:
        >>> launches({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "exp4"})
        {'slurm 71': True, 'torchrun exp4': False}
    """
    restarted: dict[str, bool] = {}
    host = socket.gethostname()
    job = environ.get("SLURM_JOB_ID")
    agent = environ.get("TRAINER_KIT_AGENT_PID")
    run = environ.get("TORCHELASTIC_RUN_ID")
    if job:
        restarted[f"slurm {job}"] = _is_positive(environ, "SLURM_RESTART_COUNT")
    if agent:
        name = handed_over(environ).get("id", f"{agent} on {host}")
        launcher = f"agent {name}"
        restarted[launcher] = _is_positive(environ, "TRAINER_KIT_RESTART_COUNT")
    # Our agent runs inside torch's, which sets the variables of torchrun too.
    elif run:
        # Without a rendezvous torchrun names every run "none": the launching process identifies the run instead.
        name = run
        if run == "none":
            name = f"{os.getppid()} on {host}"
        launcher = f"torchrun {name}"
        restarted[launcher] = _is_positive(environ, "TORCHELASTIC_RESTART_COUNT")
    return restarted


def _is_positive(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "0")
    return value.isdigit() and int(value) > 0


def requeue() -> str:
    """Ask SLURM to requeue this job. Returns the result as a message; "" outside of a job.

    SLURM refuses jobs that may not run again (``--no-requeue``, interactive jobs).
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return ""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    name = job
    # Of a job array only this task: the array's own number would requeue all of them.
    if array and task:
        name = f"{array}_{task}"
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
