"""Which program this process runs, and who started it: what a restart has in common with the start before."""

from __future__ import annotations

import builtins
import json
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainer_kit.core.display import mask_secrets

__all__ = ["HANDED_OVER", "arguments", "handed_over", "launches", "script"]

HANDED_OVER: Final = "TRAINER_KIT_RUN"
"""The variable in which our agent gives every rank, and every restart, the run that it drew."""

_OPTION: Final = re.compile(r"(-{0,2}[A-Za-z][\w.\-]*)=(.*)", re.DOTALL)


def script() -> str | None:
    """The absolute path of the script, or of the module's file under ``python -m``; None where code is typed in.

    That is in a notebook, an interactive session, ``python -c``, and a test under pytest.
    """
    if hasattr(builtins, "get_ipython") or ("PYTEST_CURRENT_TEST" in os.environ and _under_pytest()):
        return None
    file = getattr(sys.modules["__main__"], "__file__", None)
    return None if file is None else str(Path(file).absolute())


def _under_pytest() -> bool:
    return "_pytest" in sys.modules or multiprocessing.parent_process() is not None


def arguments(words: list[str] | None = None) -> list[str]:
    """The command line behind the script, with what looks like a secret masked.

    Example:
        >>> arguments(["--lr", "0.1", "--api-key=abc", "--hf-token", "def", "store=s3://me:pw@host/data"])
        ['--lr', '0.1', '--api-key=***', '--hf-token', '***', 'store=s3://me:***@host/data']
    """
    masked, name = [], ""
    for word in sys.argv[1:] if words is None else words:
        option = _OPTION.fullmatch(word)
        if option is not None:
            masked.append(f"{option[1]}={mask_secrets(option[2], option[1].lstrip('-'))}")
        else:
            masked.append(mask_secrets(word, name))
        name = word.lstrip("-") if word.startswith("-") and option is None else ""
    return masked


def handed_over(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What our agent drew for all ranks and restarts: ``id``, ``seed``, the state of the ``loggers``; else nothing."""
    try:
        drawn = json.loads(environ.get(HANDED_OVER, "{}"))
    except ValueError:
        return {}
    return drawn if isinstance(drawn, dict) else {}


def launches(environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """Who started this process, by a name that its restarts share, and whether this is a restart.

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
        # Without a rendezvous every run is called "none": then it is the one process that starts the ranks here.
        name = run if run != "none" else f"{os.getppid()} on {here}"
        found[f"torchrun {name}"] = _counts(environ, "TORCHELASTIC_RESTART_COUNT")
    return found


def _counts(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "0")
    return value.isdigit() and int(value) > 0
