"""The checks of one machine: versions, devices, network, ports, disk, shared memory, limits and the clock."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, final

from trainer_kit.core.display import in_units, plural
from trainer_kit.core.errors import TrainerKitError

__all__ = [
    "Finding",
    "check_disk",
    "check_machine",
    "check_shared_memory",
    "driver_version",
    "make_findings",
]

_DISTRIBUTION: Final = "trainer-kit"
_RELEASE_TIME: Final = 1_767_225_600
"""The start of 2026: an earlier clock is wrong."""
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@final
@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        about: the subject.
        text: the observation.
        level: OK; "warning": training works, but may be slow or fail later; "fix": training fails.
        fix: how to repair it; not shown for OK.
        host: of the machine, where there are several.
    """

    about: str
    text: str
    level: str = "OK"
    fix: str = ""
    host: str = ""


def check_machine(directory: Path) -> list[Finding]:
    """Check the machine of this process.

    Args:
        directory: of runs.

    Returns:
        One finding or more for each check; a check that fails becomes a warning.
    """
    return make_findings(
        {
            "packages": _versions,
            "devices": _devices,
            "ranks": _processes,
            "network": _network,
            "ports": _ports,
            "disk": partial(check_disk, directory),
            "/dev/shm": check_shared_memory,
            "open files": _limits,
            "clock": partial(_clock, directory),
        }
    )


def make_findings(checks: dict[str, Callable[[], Iterator[Finding]]]) -> list[Finding]:
    """Run the checks, by their subject; one that raises an error becomes a warning."""
    findings: list[Finding] = []
    for subject, check in checks.items():
        try:
            findings += check()
        except Exception as error:
            # A check may fail on an unusual machine, and must not hide what the others find.
            text = f"the check failed: {type(error).__name__}: {error}"
            findings.append(Finding(subject, text, "warning"))
    return findings


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    try:
        required = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "trainer_kit",
            "is not installed as a package: versions are not checked",
            "warning",
            "pip install it",
        )
        return
    unsupported = []
    for line in required:
        requirement = Requirement(line)
        # Only what every installation needs: the extras are of the user's choice.
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unsupported.append(str(requirement))
            yield Finding(
                "packages",
                f"{requirement.name} is missing",
                "fix",
                f"pip install '{requirement}'",
            )
            continue
        # With prereleases: a nightly build of torch is none of the versions otherwise.
        if not requirement.specifier.contains(version, prereleases=True):
            unsupported.append(str(requirement))
            text = f"{requirement.name} {version}, where {requirement.specifier} is supported"
            yield Finding("packages", text, "fix", f"pip install '{requirement}'")
    if not unsupported:
        yield Finding(
            "packages",
            f"trainer_kit {importlib.metadata.version(_DISTRIBUTION)}; supported dependencies",
        )


def _devices() -> Iterator[Finding]:
    import torch

    from trainer_kit.core.devices import count_accelerators, present_accelerator
    from trainer_kit.core.environment import usable_cores

    platform_version = torch.version.cuda or getattr(torch.version, "hip", None)
    build = "built without CUDA"
    if platform_version:
        build = f"built for CUDA/ROCm {platform_version}"
    yield Finding("torch", f"{torch.__version__}, {build}")
    device = present_accelerator()
    driver = driver_version()
    if device is not None:
        name = device.type
        if device.type == "cuda":
            name = torch.cuda.get_device_name(0)
        text = f"{count_accelerators()} x {name}"
        if driver:
            text += f", driver {driver}"
        yield Finding("devices", text)
    # The most frequent fault of a new machine: a device that torch cannot use, so that training runs on the CPU.
    elif driver or any(Path("/dev").glob("nvidia[0-9]*")):
        reason = "torch is built without CUDA"
        fix = "install a CUDA build of torch"
        if platform_version:
            reason = "torch does not see it"
            fix = "compare the driver's CUDA version with torch's"
        text = f"an NVIDIA device (driver {driver or 'unknown'}), and {reason}"
        yield Finding("devices", text, "fix", fix)
    else:
        yield Finding("devices", "no accelerator; training runs on the CPU")
    yield Finding(
        "cores",
        f"{usable_cores()} for this process, {plural(torch.get_num_threads(), 'thread')}",
    )


def driver_version() -> str:
    """The version of the NVIDIA driver; "" where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    # With a limit of time: nvidia-smi hangs where the driver does.
    with suppress(OSError, subprocess.SubprocessError):
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.split("\n")[0].strip()
    return ""


def _processes() -> Iterator[Finding]:
    import torch.distributed

    from trainer_kit.core.environment import Environment, backends

    try:
        environment = Environment.detect()
    except TrainerKitError as error:
        yield Finding(
            "ranks", f"{error.problem}: {error.found}", "fix", error.fix or ""
        )
    else:
        text = "not started by a launcher"
        if environment.launched:
            rank = f"rank {environment.rank} of {environment.world_size}"
            text = f"{rank} ({environment.source})"
        yield Finding("ranks", f"this process is {text}")
    if not torch.distributed.is_available():
        yield Finding(
            "backends",
            "torch is built without distributed training",
            "fix",
            "install another build of torch",
        )
        return
    # Gloo works on GPUs too, but copies through the host: a warning, since training is slow and not wrong.
    names = ", ".join(backends("gloo", "nccl"))
    if torch.cuda.is_available() and "nccl" not in names:
        text = f"{names}; GPUs without nccl"
        fix = "install a build of torch with NCCL"
        yield Finding("backends", text, "warning", fix)
    else:
        yield Finding("backends", names)


def _network() -> Iterator[Finding]:
    interfaces = [name for _, name in socket.if_nameindex()]
    yield Finding("network", f"interfaces {', '.join(interfaces)}")
    for variable in _INTERFACES:
        value = os.environ.get(variable, "")
        # NCCL takes prefixes of names, `=` before exact ones and `^` before those to leave out.
        for name in filter(None, value.lstrip("^=").split(",")):
            if not any(interface.startswith(name) for interface in interfaces):
                yield Finding(
                    "network",
                    f"{variable}={value} names no interface",
                    "fix",
                    f"unset {variable}",
                )
    # Port 0 is any free port, so only the interface can be at fault.
    error_of_loopback = _error_of_port(0)
    if error_of_loopback:
        text = f"loopback does not work: {error_of_loopback}"
        yield Finding("network", text, "fix", "bring up the interface lo")
    for name in filter(None, (socket.gethostname(), os.environ.get("MASTER_ADDR"))):
        try:
            start = time.monotonic()
            addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
            seconds = time.monotonic() - start
        except OSError as error:
            text = f"{name} does not resolve: {error}"
            # The machine's own name matters to few libraries; without MASTER_ADDR no rank finds the others.
            if name == socket.gethostname():
                fix = f"add a line for {name} to /etc/hosts"
                yield Finding("network", text, "warning", fix)
            else:
                fix = "set MASTER_ADDR to a name or address that resolves"
                yield Finding("network", text, "fix", fix)
            continue
        text = f"{name} is {', '.join(sorted(addresses))}"
        # Every rank resolves it when it starts, and some libraries do so for each connection.
        if seconds > 1:
            text += f", resolved after {seconds:.1f} s"
            yield Finding("network", text, "warning", f"add {name} to /etc/hosts")
        else:
            yield Finding("network", text)


def _error_of_port(port: int) -> OSError | None:
    """The error of listening at a port of the loopback interface, if any."""
    try:
        with socket.socket() as probe:
            # A port of a run that has just ended counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        return error
    return None


def _ports() -> Iterator[Finding]:
    import torch.distributed

    from trainer_kit.core.environment import Environment

    # In a started group rank 0 itself listens there: a test of the port would find it taken.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = Environment.detect()
        address = f"{world.master_addr}:{world.master_port}"
        yield Finding(
            "ports", f"{address} connects the {plural(world.world_size, 'rank')}"
        )
        return
    port = os.environ.get("MASTER_PORT") or str(Environment().master_port)
    if not port.isdigit() or not 0 < int(port) < 65536:
        yield Finding(
            "ports",
            f"MASTER_PORT={port} is not a port",
            "fix",
            "unset it, or set a number up to 65535",
        )
        return
    error = _error_of_port(int(port))
    if error is None:
        yield Finding("ports", f"{port} is free")
        return
    # The default port matters for runs on several machines only; one that the user set is needed.
    level = "warning"
    if "MASTER_PORT" in os.environ:
        level = "fix"
    text = (
        f"{port}, the rendezvous port of several machines, "
        f"cannot be used: {error.strerror}"
    )
    yield Finding("ports", text, level, "set MASTER_PORT to a port that is free")


def check_disk(directory: Path) -> Iterator[Finding]:
    """Whether the directory, and that of temporary files, can be written to, and how much is free."""
    directories = {
        "disk": directory.resolve(),
        "temporary": Path(tempfile.gettempdir()),
    }
    for subject, path in directories.items():
        try:
            with tempfile.NamedTemporaryFile(dir=path) as file:
                # A quota or a full disk is reported only when the bytes arrive.
                file.write(b"\0" * 4096)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            text = f"{path} cannot be written to: {error.strerror}"
            yield Finding(subject, text, "fix", "use another directory")
            continue
        free = shutil.disk_usage(path).free
        level = _level(free, 10e9, 1e9)
        fix = "make room: a checkpoint may be gigabytes"
        yield Finding(subject, f"{in_units(free)} free in {path}", level, fix)


def _level(amount: float, enough: float, usable: float) -> str:
    if amount >= enough:
        return "OK"
    if amount >= usable:
        return "warning"
    return "fix"


def check_shared_memory() -> Iterator[Finding]:
    """How much of ``/dev/shm`` is free; loader workers send batches through it."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return
    usage = shutil.disk_usage(path)
    text = f"{in_units(usage.free)} free of {in_units(usage.total)}, for loader workers"
    fix = "in a container: --shm-size=8g or --ipc=host; elsewhere: num_workers=0"
    yield Finding("/dev/shm", text, _level(usage.free, 1e9, 128e6), fix)


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:
        # Windows has none.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    # RLIM_INFINITY is -1, and would compare as the lowest limit.
    amount = float(soft)
    if soft == resource.RLIM_INFINITY:
        amount = math.inf
    level = _level(amount, 4096, 1024)
    if soft == hard:
        fix = (
            "in a container --ulimit nofile=65536, elsewhere /etc/security/limits.conf"
        )
    elif unlimited or hard >= 65536:
        fix = "ulimit -n 65536 before training"
    else:
        fix = f"ulimit -n {hard} before training"
    maximum = str(hard)
    if unlimited:
        maximum = "unlimited"
    yield Finding("open files", f"at most {soft} (up to {maximum})", level, fix)


def _clock(directory: Path) -> Iterator[Finding]:
    now = time.time()
    if now < _RELEASE_TIME:
        yield Finding(
            "clock",
            f"it shows {time.strftime('%Y-%m-%d')}",
            "fix",
            "set the clock, or start ntpd",
        )
        return
    # On network storage the server sets the times of files, by its own clock.
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        difference = os.stat(file.name).st_mtime - time.time()
    if abs(difference) > 5:
        text = f"the files' clock is {difference:+.0f} s from this machine's"
        yield Finding(
            "clock",
            text,
            "warning",
            "synchronize both clocks with NTP; training does not depend on it",
        )
    else:
        yield Finding("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))
