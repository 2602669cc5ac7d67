"""The rank of this process, as set by a launcher, and the devices it may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import torch

from trainer_kit.core.devices import count_accelerators, present_accelerator
from trainer_kit.core.display import plural
from trainer_kit.core.errors import LaunchError, StrategyError

__all__ = [
    "START_DIRECTORY",
    "Environment",
    "available_devices",
    "backends",
    "count_devices",
    "first_host",
    "list_devices",
    "patch_environment",
    "pick_device",
    "preserved_variables",
    "usable_cores",
]

_Source = Literal["plain", "torchrun", "slurm", "submitit", "mpi"]

_DEFAULT_PORT: Final = 29500
_SLURM_SHELL: Final = "4294967290"
"""The step id of the shell that ``salloc`` runs on a node."""
try:
    START_DIRECTORY: Final = os.getcwd()
except OSError:
    # The directory was deleted. Only one of the two assignments runs, which mypy does not see.
    START_DIRECTORY = os.path.sep  # type: ignore[misc]
"""The working directory when the library was imported: relative paths on the command line refer to it."""

# Variables for rank, size, local rank and local size: of Open MPI, then of MPICH and Intel MPI.
_MPI: Final = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class Environment:
    """One process of a run, read from environment variables.

    Attributes:
        rank: index of this process, from 0.
        world_size: number of processes.
        local_rank: index of this process on its machine, from 0.
        local_world_size: number of processes on this machine.
        node_rank: index of this machine, from 0.
        master_addr: the host of rank 0.
        master_port: the rendezvous port on that host.
        source: the launcher; ``torchrun`` includes every launcher that sets its variables.
        restart_count: how often the launcher has restarted this run.

    Example:
        >>> Environment.detect({}).launched
        False
        >>> here = Environment.detect({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        ...                            "MASTER_ADDR": "node7", "MASTER_PORT": "4000"})
        >>> here.rank, here.node_rank, here.source
        (5, 1, 'torchrun')
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = _DEFAULT_PORT
    source: _Source = "plain"
    restart_count: int = 0

    @property
    def launched(self) -> bool:
        """Whether a launcher started this process."""
        return self.source != "plain"

    @property
    def num_nodes(self) -> int:
        """Number of machines, if each runs as many processes as this one."""
        return -(-self.world_size // self.local_world_size)

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Read torchrun's variables, else SLURM's, else those of submitit's local jobs or of an MPI launcher.

        SLURM's are used only inside a step (``srun``): the batch script and an interactive shell are plain processes.
        Jobs that submitit starts on a cluster are steps of SLURM.

        Args:
            environ: the variables.

        Raises:
            LaunchError: variables are missing, unreadable or contradict each other; the message names them.
        """
        variables = _Variables(environ)
        # torchrun's first: inside a SLURM step or under mpirun it starts several ranks, which inherit the variables of
        # their one launcher process.
        environment = (
            _torchrun(variables)
            or _slurm(variables)
            or _submitit(variables)
            or _mpi(variables)
        )
        if environment is None:
            return cls()
        if not environment.is_consistent():
            raise LaunchError(
                "the environment variables of the rank are inconsistent",
                found=variables.seen(),
                fix="start every process with the same launcher (torchrun or srun), or unset these variables",
            )
        # torchrun passes --master-port 0 on unchanged.
        if not 0 < environment.master_port < 65536:
            raise LaunchError(
                "the ranks cannot connect at this port",
                found=variables.seen(),
                fix="choose a free port, such as --master-port 29500; torchrun --standalone chooses one by itself",
            )
        return environment

    def is_consistent(self) -> bool:
        """Whether each index is within its number."""
        return (
            0 <= self.rank < self.world_size
            and 0 <= self.local_rank < self.local_world_size <= self.world_size
            and 0 <= self.node_rank < self.world_size
        )


class _Variables:
    """Reads variables, and records which ones for error messages."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.names: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return bool(self.environ.get(name))

    def seen(self) -> str:
        names = [name for name in self.names if name in self]
        return ", ".join(f"{name}={self.environ[name]}" for name in names)

    def text(self, name: str, default: str | None = None) -> str:
        self.names[name] = None
        value = self.environ.get(name) or default
        if value is None:
            raise LaunchError(
                f"the rank environment lacks {name}",
                found=self.seen() or "none of its variables",
                fix=f"set {name}, or start with a launcher that does (torchrun, srun)",
            )
        return value

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of ``names`` that is set."""
        name = next(filter(self.__contains__, names), names[0])
        default_text = None
        if default is not None:
            default_text = str(default)
        value = self.text(name, default_text)
        try:
            return int(value)
        except ValueError:
            raise LaunchError(
                f"{name} is not an integer", found=f"{name}={value}"
            ) from None


def _torchrun(variables: _Variables) -> Environment | None:
    if "RANK" not in variables and "LOCAL_RANK" not in variables:
        return None
    rank = variables.number("RANK")
    world = variables.number("WORLD_SIZE")
    local_rank = variables.number("LOCAL_RANK", default=0)
    # Some launchers omit the number of processes per machine. One that sets no local rank starts one per machine.
    master = variables.environ.get("MASTER_ADDR", "127.0.0.1")
    guess = None
    if "LOCAL_RANK" not in variables:
        guess = 1
    elif master in ("127.0.0.1", "localhost", "::1"):
        guess = world
    local_world = variables.number("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=guess)
    # On one machine the defaults suffice; across machines only the launcher knows where rank 0 is.
    default_host = None
    default_port = None
    if local_world >= world:
        default_host = "127.0.0.1"
        default_port = _DEFAULT_PORT
    return Environment(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        node_rank=variables.number(
            "GROUP_RANK", "NODE_RANK", default=rank // max(local_world, 1)
        ),
        master_addr=variables.text("MASTER_ADDR", default_host),
        master_port=variables.number("MASTER_PORT", default=default_port),
        source="torchrun",
        restart_count=variables.number(
            "TRAINER_KIT_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", default=0
        ),
    )


def _slurm(variables: _Variables) -> Environment | None:
    # The batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but only a step starts the other tasks.
    environ = variables.environ
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    # Steps that `srun` starts from the shell of `salloc` inherit its job name, so the name alone is not enough.
    is_bash = environ.get("SLURM_JOB_NAME") == "bash" and "SLURM_PTY_PORT" in variables
    is_shell = step == _SLURM_SHELL or is_bash
    if "SLURM_PROCID" not in variables or not step or is_shell:
        return None
    rank = variables.number("SLURM_PROCID")
    world = variables.number("SLURM_NTASKS", "SLURM_NPROCS")
    node = variables.number("SLURM_NODEID", default=0)
    local_rank = variables.number("SLURM_LOCALID")
    tasks = _tasks_per_node(variables, world)
    if node >= len(tasks):
        raise LaunchError(
            "SLURM_NODEID is beyond the nodes of the step", found=variables.seen()
        )
    hosts = "SLURM_STEP_NODELIST"
    if hosts not in variables:
        hosts = "SLURM_JOB_NODELIST"
    master = environ.get("MASTER_ADDR")
    # By convention rank 0 is on the first node of the step.
    if not master:
        master = first_host(variables.text(hosts, "127.0.0.1"))
    job = variables.number("SLURM_JOB_ID", default=0)
    step_id = variables.number("SLURM_STEP_ID", default=0)
    return Environment(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=tasks[node],
        node_rank=node,
        master_addr=master,
        # Every rank must derive the same port without communication; it is below the kernel's ephemeral range.
        master_port=variables.number(
            "MASTER_PORT", default=15000 + (job * 31 + step_id) % 17000
        ),
        source="slurm",
        restart_count=variables.number("SLURM_RESTART_COUNT", default=0),
    )


def _tasks_per_node(variables: _Variables, world: int) -> list[int]:
    """Parse the tasks on each node: ``"2(x3),1"`` is 2, 2, 2 and 1 on four nodes."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in variables:
        name = "SLURM_TASKS_PER_NODE"
    text = variables.text(name, str(world))
    tasks: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise LaunchError(f"{name} cannot be read", found=f"{name}={text}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _submitit(variables: _Variables) -> Environment | None:
    """The tasks of a job of submitit's local executor, which sets none of torchrun's variables by itself."""
    if "SUBMITIT_LOCAL_GLOBALID" not in variables:
        return None
    rank = variables.number("SUBMITIT_LOCAL_GLOBALID")
    world = variables.number("SUBMITIT_LOCAL_NTASKS")
    # The process of a job of one task may start ranks of its own.
    if world == 1:
        return None
    job = variables.number("SUBMITIT_LOCAL_JOB_ID", default=0)
    return Environment(
        rank=rank,
        world_size=world,
        local_rank=variables.number("SUBMITIT_LOCAL_LOCALID", default=rank),
        # A local job has one machine.
        local_world_size=world,
        # Every rank must derive the same port, and jobs on one machine different ones.
        master_port=variables.number("MASTER_PORT", default=15000 + job * 31 % 17000),
        source="submitit",
    )


def _mpi(variables: _Variables) -> Environment | None:
    for rank_name, size_name, local_rank_name, local_size_name in _MPI:
        if rank_name not in variables and size_name not in variables:
            continue
        rank = variables.number(rank_name)
        world = variables.number(size_name)
        # A single process needs no launcher.
        if world == 1:
            return None
        local_rank = variables.number(local_rank_name, default=rank)
        local_world = variables.number(local_size_name, default=world)
        # MPI sets no host: across machines the user has to name that of rank 0.
        default_host = None
        if local_world >= world:
            default_host = "127.0.0.1"
        return Environment(
            rank=rank,
            world_size=world,
            local_rank=local_rank,
            local_world_size=local_world,
            node_rank=variables.number(
                "NODE_RANK", default=rank // max(local_world, 1)
            ),
            master_addr=variables.text("MASTER_ADDR", default_host),
            master_port=variables.number("MASTER_PORT", default=_DEFAULT_PORT),
            source="mpi",
        )
    return None


def first_host(hosts: str) -> str:
    """The first name of a SLURM host list.

    Args:
        hosts: names, with ranges in brackets.

    Raises:
        LaunchError: the list has no name.

    Example:
        >>> first_host("node[03-05,7],login1"), first_host("r[1-2]n[08,11]-ib"), first_host("single,other")
        ('node03', 'r1n08-ib', 'single')
    """
    # Up to the first comma outside of brackets.
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+(?=,|$)", hosts.strip())
    name = ""
    if first:
        # Of each bracket the first number, with its leading zeros.
        name = re.sub(r"\[\s*([^-,\]]*)[^\]]*\]", r"\1", first[0])
    if not name:
        raise LaunchError("no host can be read from SLURM's list", found=repr(hosts))
    return name


@contextmanager
def preserved_variables() -> Iterator[None]:
    """A context after which the environment variables are as before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        # In place: other modules hold this very object.
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Context in which these environment variables, in upper case, have these values.

    Example:
        >>> with patch_environment(my_flag=1):
        ...     os.environ["MY_FLAG"]
        '1'
    """
    settings = {key.upper(): str(value) for key, value in kwargs.items()}
    previous = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def usable_cores() -> int:
    """The number of CPU cores that this process may use."""
    # In a container or under taskset these are fewer than the machine has; macOS and Windows do not tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def backends(*names: str) -> list[str]:
    """Return those of the given ``torch.distributed`` backends that torch is built with."""
    import torch.distributed as dist

    available = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    return [name for name in names if available[name]()]


def _accelerator() -> str | None:
    """The type of the accelerator that torch can use here, or None."""
    device = present_accelerator()
    if device is None:
        return None
    return device.type


def _resolve(accelerator: str) -> str:
    """Resolve ``accelerator`` to a device type of this machine."""
    name = str(accelerator).lower()
    available = _accelerator()
    if name == "cpu" or (name == "auto" and available is None):
        return "cpu"
    if available is None:
        found = "torch sees no accelerator on this machine"
        fix = 'use accelerator="auto" or "cpu"'
    elif name in ("auto", "gpu", available):
        return available
    else:
        found = f"torch sees {available!r}"
        fix = f'use accelerator="auto", "{available}" or "cpu"'
    raise StrategyError(
        f"accelerator={accelerator!r} is not available", found=found, fix=fix
    )


def available_devices(accelerator: str = "auto") -> int:
    """The number of devices of this kind on this machine; 1 for a CPU.

    Args:
        accelerator: ``auto``, ``cpu``, ``gpu`` (any accelerator that torch can use), or a device type such as ``cuda``.

    Raises:
        StrategyError: this machine has no such accelerator.

    Example:
        >>> available_devices("cpu")
        1
    """
    if _resolve(accelerator) == "cpu":
        return 1
    return count_accelerators()


def list_devices(
    devices: int | str | Sequence[int] = "auto", accelerator: str = "auto"
) -> list[int]:
    """The indices of the devices to use on this machine, one process each.

    Args:
        devices: a number, ``"auto"`` or -1 (all), or the indices themselves: a list, or ``"0,2"``. On a CPU
            only a number of processes, or ``"auto"`` for one.
        accelerator: as for `available_devices`.

    Raises:
        StrategyError: ``devices`` is invalid, or requests devices that this machine does not have.

    Example:
        >>> list_devices(2, "cpu"), list_devices("auto", "cpu")
        ([0, 1], [0])
    """
    kind = _resolve(accelerator)
    wanted = _read(devices)
    if kind == "cpu":
        # One process by default: its threads use all cores.
        if wanted == "all":
            return [0]
        if isinstance(wanted, list):
            raise StrategyError(
                "single CPU cores cannot be selected",
                found=f"devices={devices!r}",
                fix=f"use devices={len(wanted)}",
            )
        return list(range(wanted))
    count = count_accelerators()
    fix = f"use at most {count}"
    if isinstance(wanted, list):
        indices = wanted
        fix = f"use indices below {count}"
    elif wanted == "all":
        indices = list(range(count))
    else:
        indices = list(range(wanted))
    if max(indices) >= count:
        raise StrategyError(
            "more devices are requested than exist on this machine",
            found=f"devices={devices!r}, and {count} of type {kind!r}",
            fix=fix,
        )
    return indices


def _read(devices: object) -> int | list[int] | Literal["all"]:
    """Parse ``devices`` into a positive number, indices, or all."""
    # The user may pass anything here, also what the annotations exclude: True, a float, a mapping.
    parsed = devices
    if isinstance(devices, str):
        parsed = _read_text(devices.strip().lower())
    if isinstance(parsed, int) and not isinstance(parsed, bool):
        if parsed == -1:
            return "all"
        if parsed > 0:
            return parsed
    elif isinstance(parsed, Iterable) and not isinstance(parsed, (str, Mapping)):
        members = list(parsed)
        indices = []
        for index in members:
            if isinstance(index, int) and not isinstance(index, bool):
                indices.append(int(index))
        # Each member is an index, and none occurs twice.
        if indices and len(set(indices)) == len(members):
            if min(indices) >= 0:
                return indices
    raise StrategyError(
        "devices= is not understood",
        found=f"devices={devices!r}",
        fix='give a number, "auto", -1, or different indices such as [0, 2] or "0,2"',
    )


def _read_text(text: str) -> int | list[int] | None:
    """Parse ``"2"``, ``"-1"``, ``"auto"`` or ``"0,2"``; None if it is none of these."""
    if text == "auto":
        return -1
    try:
        numbers = [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        return None
    if "," in text:
        return numbers
    if not numbers:
        return None
    return numbers[0]


def count_devices(
    devices: int | str | Sequence[int] = "auto", accelerator: str = "auto"
) -> int:
    """The number of processes to run on this machine: the length of `list_devices`.

    Example:
        >>> count_devices("auto", "cpu"), count_devices("2", "cpu"), count_devices(3, "cpu")
        (1, 2, 3)
    """
    return len(list_devices(devices, accelerator))


def pick_device(
    accelerator: str = "auto",
    local_rank: int = 0,
    devices: int | str | Sequence[int] = "auto",
) -> torch.device:
    """The device of one process.

    Args:
        accelerator: as for `available_devices`.
        local_rank: the index of the process on its machine.
        devices: as for `list_devices`; the process uses the index at position ``local_rank``.

    Raises:
        StrategyError: this machine has no such accelerator, or fewer devices than processes.

    Example:
        >>> pick_device("cpu", 3)
        device(type='cpu')
    """
    kind = _resolve(accelerator)
    if kind == "cpu":
        return torch.device("cpu")
    count = count_accelerators()
    # SLURM may show each task only its own device.
    if count == 1 and Environment.detect().source == "slurm":
        return torch.device(kind, 0)
    wanted = _read(devices)
    indices: Sequence[int] = range(count)
    if isinstance(wanted, list):
        indices = wanted
    if local_rank >= len(indices) or indices[local_rank] >= count:
        raise StrategyError(
            "there are more processes than devices on this machine",
            found=f"local rank {local_rank}, {count} of type {kind!r}, devices={devices!r}",
            fix=f"start at most {plural(min(count, len(indices)), 'process')} on each machine",
        )
    return torch.device(kind, indices[local_rank])
