"""SLURM: running a job again that asked to be told before its time is over."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Final

__all__ = ["requeue"]

_PATIENCE: Final = 60.0


def requeue(environ: Mapping[str, str] = os.environ) -> str:
    """Ask SLURM to run this job again; what became of it in words, and "" outside of a job.

    A job that may not run again (``--no-requeue``, an interactive one) is refused by SLURM itself.

    Args:
        environ: the variables of the job.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return ""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else job
    try:
        subprocess.run(
            ["scontrol", "requeue", name], check=True, capture_output=True, text=True, timeout=_PATIENCE, env=environ
        )
    except FileNotFoundError:
        return f"job {name} is not requeued: there is no scontrol here"
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stderr or error.stdout or f"exit code {error.returncode}").split())
        return f"job {name} is not requeued: {said}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"job {name} is not requeued: {error}"
    return f"job {name} is requeued"
