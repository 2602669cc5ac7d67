"""The command line of this process, to run it again."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from trainer_kit.core.environment import START_DIRECTORY
from trainer_kit.core.errors import LaunchError

__all__ = ["rerun_command", "split_command"]


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
            options += [word, rest.pop(0)] if word == "--check-hash-based-pycs" else [word]
            continue
        letters = ""
        for at, letter in enumerate(word[1:], start=1):
            value = word[at + 1 :]
            if letter in "cm":
                options += [f"-{letters}"] if letters else []
                return options, [f"-{letter}", *([value] if value else []), *rest]
            if letter in "WX":
                options += [f"-{letters}{letter}{value}", *([] if value else [rest.pop(0)])]
                letters = ""
                break
            letters += letter if letter != "i" else ""
        options += [f"-{letters}"] if letters else []
    return options, rest


def rerun_command() -> tuple[list[str], list[str]]:
    """How to run this program again from its start: the interpreter's options, and the script or module with arguments.

    Raises:
        LaunchError: when there is no program to run again: in an interactive session, a notebook, ``python -c``, a
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
        reason = "a program without a Python interpreter of its own"
    elif threading.current_thread() is not threading.main_thread():
        reason = "a thread other than the main one"
    if reason is not None:
        raise LaunchError(
            "the program cannot be started again on several processes",
            found=reason,
            fix='put it in a script (python train.py), or use strategy="ddp_notebook"',
        )
    return options, words if script is None else [str(script), *words[1:]]


def _script(word: str) -> Path:
    """The script's absolute path, also when the program has changed its directory."""
    running = getattr(sys.modules["__main__"], "__file__", None)
    if running is not None and Path(running).name == Path(word).name:
        return Path(running).absolute()
    return Path(START_DIRECTORY, word)
