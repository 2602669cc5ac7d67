"""The agent: runs this program again on several ranks, supervises them, and exits with their code.

torch's elastic agent starts the ranks and waits for them. Beside it, a thread (`_ProcessMonitor`) sees each end at
once, gives the other ranks a grace period, and kills what does not end in it. Signals arrive in the main thread, which
is inside torch's agent at that time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, final

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not export it to type checkers
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    Std,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from trainer_kit.core.display import plural
from trainer_kit.core.environment import START_DIRECTORY, Environment, usable_cores
from trainer_kit.core.errors import LaunchError
from trainer_kit.launch.failure import (
    AGENT_DIRECTORY,
    RankFailure,
    describe,
    note_end,
    read_reports,
    root_first,
    with_early_ends,
)
from trainer_kit.launch.machines import Machines, PeerFailed, interface_of
from trainer_kit.launch.program import rerun_command
from trainer_kit.launch.torch_private import skip_exit_barrier

__all__ = ["Output", "run_agent", "run_ranks"]

_BOOTSTRAP: Final = Path(__file__).with_name("bootstrap.py")
_STOP: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_FORWARD: Final = ("SIGUSR1", "SIGUSR2")
_REPLY_TIME: Final = 60.0
"""Seconds in which the other machines must report their end after one has failed; their ranks may need half of it."""
_PERIOD: Final = 0.02
"""Seconds between two looks of the monitor at the ranks, where the system cannot wake it."""
_EXIT_TIME: Final = 30.0
"""Seconds that a rank has to end after it has reported its exception."""


@final
@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the output of one machine's ranks goes, as under torchrun.

    Attributes:
        tee: streams to write to a file and, with a prefix, to the console: "0" none, "1" stdout, "2" stderr, "3" both;
            or "0:1,1:3", by local rank. None: both if there is a ``log_dir``, else nothing.
        log_dir: the directory of the log files; None: a new temporary directory, whose path is printed.
        role: the label in the prefix.

    Example:
        >>> Output(tee="1", log_dir=Path("logs")).role
        'rank'
    """

    tee: str | None = None
    log_dir: Path | None = None
    role: str = "rank"

    def files(self, reports: str) -> DefaultLogsSpecs:
        """Create the log specification for torch's agent; without log files, torch writes its own files to ``reports``.

        Args:
            reports: a directory that only this attempt uses.
        """
        tee = self.tee
        directory = reports
        if self.log_dir is not None:
            tee = tee or "3"
            directory = str(self.log_dir)
        elif tee and tee != "0":
            # Not in `reports`, which is deleted at the end of the attempt.
            directory = tempfile.mkdtemp(prefix="trainer_kit-logs-")
            print(
                f"trainer-kit: the output of the ranks is saved in {directory}",
                file=sys.stderr,
                flush=True,
            )
        return _Files(reports, log_dir=directory, tee=Std.from_str(tee or "0"))


@final
class _Files(DefaultLogsSpecs):
    """Log files in their own directory, error reports in the directory that the agent of this attempt reads."""

    def __init__(self, reports: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._reports = Path(reports)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        process_context = super().reify(envs)
        for rank, environ in envs.items():
            path = self._reports / str(rank) / "error.json"
            path.parent.mkdir(exist_ok=True)
            # The rank writes to the one, torch's agent reads the other.
            environ["TORCHELASTIC_ERROR_FILE"] = str(path)
            process_context.error_files[rank] = str(path)
        return process_context


def run_agent(
    nproc: int,
    *,
    extra_env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    peer_grace: float = 3.0,
    signal_grace: float = 25.0,
) -> NoReturn:
    """Run this program again from its start, as ``nproc`` ranks on this machine, and exit with their code.

    torch's elastic agent starts the ranks with the variables that torchrun sets; they rendezvous on a port of the
    loopback interface. When one rank fails, the agent ends the others and prints the exception; it summarizes their
    connection errors in one line. The agent forwards SIGTERM, SIGINT, SIGHUP and SIGQUIT to the ranks, which
    have ``signal_grace`` seconds to end (a second signal kills them at once), and forwards SIGUSR1 and SIGUSR2. Ranks
    die with their agent, however it dies.

    The exit code is that of the rank that failed first, 128 + n for signal n, or 0.

    Args:
        nproc: number of ranks.
        extra_env: variables for the ranks, in addition to those of torchrun.
        max_restarts: how often to restart all ranks after a failure. An exit code of 128 or more (a signal) is final.
        peer_grace: seconds in which the other ranks must end after one has failed.
        signal_grace: seconds in which ranks must end after the agent has received a stop signal.

    Raises:
        LaunchError: this program cannot be run again, or is itself a rank.
        SystemExit: always, after all ranks have ended.
    """
    environment = Environment.detect()
    if environment.launched:
        raise LaunchError(
            "a rank cannot start ranks",
            found=f"rank {environment.rank} of {environment.world_size} ({environment.source})",
        )
    options, command = rerun_command()
    # The program may have changed its directory, and runs again from its start.
    os.chdir(START_DIRECTORY)
    run_ranks(
        command,
        nproc,
        options=options,
        extra_env=extra_env,
        max_restarts=max_restarts,
        peer_grace=peer_grace,
        signal_grace=signal_grace,
    )


def run_ranks(
    words: Sequence[str],
    nproc: int,
    *,
    options: Sequence[str] = (),
    machines: Machines | None = None,
    extra_env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    peer_grace: float = 3.0,
    signal_grace: float = 25.0,
    output: Output | None = None,
    monitor_interval: float = 0.1,
) -> NoReturn:
    """Run a script as ``nproc`` ranks on every machine of the run, and exit with their code.

    Args:
        words: ``[script, *arguments]``, ``["-m", module, *arguments]``, or ``["--exec", program, *arguments]``.
        nproc: number of ranks on this machine.
        options: options of the Python interpreter.
        machines: all machines of the run; by default only this one, on its loopback interface.
        extra_env: see `run_agent`.
        max_restarts: the same on every machine.
        peer_grace: see `run_agent`.
        signal_grace: see `run_agent`.
        output: where the ranks' output goes.
        monitor_interval: seconds between two polls of the ranks by torch's agent.

    Raises:
        LaunchError: the machines do not rendezvous.
        SystemExit: always, after all ranks have ended.
    """
    if nproc < 1:
        raise LaunchError("at least one rank is needed", found=f"nproc={nproc}")
    machines = machines or Machines()
    # Ranks inherit the environment of this process.
    os.environ.update(_environment(nproc, machines, extra_env or {}))
    # What this process has printed comes before the output of the ranks.
    sys.stdout.flush()
    machines.meet(
        {
            "num_machines": machines.count,
            "processes": nproc,
            "max_restarts": max_restarts,
        }
    )
    arguments = (*options, str(_BOOTSTRAP), *words)
    status = 1
    for attempt in range(max_restarts + 1):
        os.environ["TRAINER_KIT_RESTART_COUNT"] = str(attempt)
        start = _Attempt(
            nproc,
            arguments,
            machines,
            attempt,
            peer_grace,
            signal_grace,
            monitor_interval,
        )
        status, message = start.run(output or Output())
        if message:
            print(message, file=sys.stderr, flush=True)
        # A signal ended the run on purpose, and a machine that is gone cannot take part. All machines know the same
        # status, so they decide alike.
        if status == 0 or status >= 128 or attempt == max_restarts or machines.gone:
            break
        print(f"restart {attempt + 1} of {max_restarts}", file=sys.stderr, flush=True)
    machines.leave(attempt)
    raise SystemExit(status)


def _environment(
    nproc: int, machines: Machines, extra: Mapping[str, str]
) -> dict[str, str]:
    # torch starts one thread for each core in every process: several ranks would compete for the cores.
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // nproc))}
    # The ranks listen only on the interface of machine 0's address: a single machine is not reachable from outside.
    interface = interface_of(machines.address)
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
        if machines.count > 1:
            defaults["NCCL_SOCKET_IFNAME"] = interface
    # What the user has set counts more than these defaults.
    environ = {
        name: value for name, value in defaults.items() if name not in os.environ
    }
    environ.update(extra)
    environ["TRAINER_KIT_AGENT_PID"] = str(os.getpid())
    # torch's agent would replace the handlers of this module, which give ranks a longer grace period.
    environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    return environ


@final
@dataclass(frozen=True)
class _Attempt:
    """One start of all ranks."""

    nproc: int
    arguments: tuple[str, ...]
    machines: Machines
    number: int
    peer_grace: float
    signal_grace: float
    monitor_interval: float

    def run(self, output: Output) -> tuple[int, str]:
        """Run the attempt; return its exit status and the message for the user."""
        _silence_torch()
        # A rank that could not be killed may still write there.
        with tempfile.TemporaryDirectory(
            prefix=AGENT_DIRECTORY, ignore_cleanup_errors=True
        ) as name:
            reports = Path(name)
            agent = self._make_agent(output.files(name), output.role)
            monitor = _ProcessMonitor(
                agent, self.nproc, reports, self.peer_grace, self.signal_grace
            )
            # Until torch's agent says otherwise: then `finally` kills what the ranks left running.
            failed = True
            monitor.start()
            try:
                with _handle_signals(monitor):
                    result = agent.run()
                failed = result.is_failed()
            except SignalException:
                number = monitor.stop_signal or signal.SIGTERM
                return self._describe_stop(monitor, reports, number)
            except PeerFailed as error:
                stopped = self._stopped_by_peer(monitor.pids())
                return self._describe_end(stopped, 1, str(error))
            finally:
                monitor.stop(sweep=failed)
            failures: list[RankFailure] = []
            if failed:
                reported = read_reports(reports)
                failures = self._collect_failures(result.failures, monitor, reported)
            status = 0
            if failures:
                status = root_first(failures)[0].exit_status
            # The ranks ended because of a forwarded signal, on purpose.
            if status - 128 in monitor.forwarded:
                return self._describe_stop(monitor, reports, status - 128)
            return self._describe_end(failures, status, "")

    def _make_agent(self, logs: DefaultLogsSpecs, role: str) -> LocalElasticAgent:
        spec = WorkerSpec(
            role=role,
            local_world_size=self.nproc,
            entrypoint=sys.executable,
            args=self.arguments,
            rdzv_handler=_Rendezvous(self.machines, self.number),
            # `run_ranks` restarts: with a new store, and never after a signal.
            max_restarts=0,
            monitor_interval=self.monitor_interval,
            master_addr=self.machines.address,
            local_addr=self.machines.address,
        )
        agent = LocalElasticAgent(spec, logs_specs=logs)
        if self.machines.count > 1:
            # Otherwise it would wait for a machine that has failed; `_describe_end` asks how the others ended.
            skip_exit_barrier(agent)
        return agent

    def _stopped_by_peer(self, pids: Mapping[int, int]) -> list[RankFailure]:
        """Describe this machine's ranks as stopped because another machine failed."""
        host = socket.gethostname()
        stopped_at = time.time_ns()
        return [
            RankFailure(rank, None, stopped_at, host=host, pid=pid, stopped=True)
            for rank, pid in pids.items()
        ]

    def _describe_end(
        self, local: list[RankFailure], status: int, reason: str
    ) -> tuple[int, str]:
        """Return the same status and headline on every machine; only the failed rank's machine gets the traceback."""
        # All machines report before any of them decides, so all show the same cause and exit with the same code.
        failures, worst = self.machines.outcome(self.number, local, status, _REPLY_TIME)
        causes = [failure for failure in failures if not failure.stopped]
        if self.machines.gone:
            reason = f"machine {', '.join(map(str, self.machines.gone))} is gone"
        if not causes or (reason and all(failure.followed for failure in causes)):
            if worst != 0 and not reason:
                reason = "another machine received a stop signal"
            return worst, reason
        message = describe(failures, self.nproc * self.machines.count)
        root = root_first(causes)[0]
        # The traceback is printed once, where the rank ran.
        if root not in local:
            message = message.splitlines()[0]
        return root.exit_status, message

    def _describe_stop(
        self, monitor: _ProcessMonitor, reports: Path, number: int
    ) -> tuple[int, str]:
        """Return status and message after a signal; ranks that ended regularly are not listed."""
        failures = [
            failure
            for failure in read_reports(reports).values()
            if failure.type not in ("SystemExit", "KeyboardInterrupt")
        ]
        lines = []
        if failures:
            lines.append(describe(failures, self.nproc * self.machines.count))
        if monitor.killed:
            ranks = ", ".join(map(str, sorted(monitor.killed)))
            lines.append(f"ranks {ranks} did not end by themselves and were killed")
        lines.append(
            f"{signal.Signals(number).name}: {plural(self.nproc, 'rank')} ended"
        )
        # So that the other machines end too; this one has to end, and does not wait for their reports.
        self.machines.outcome(self.number, [], 128 + number, 0)
        return 128 + number, "\n".join(lines)

    def _collect_failures(
        self,
        failures: Mapping[int, Any],
        monitor: _ProcessMonitor,
        reports: Mapping[int, RankFailure],
    ) -> list[RankFailure]:
        # If several ended in one look of the monitor, none of them is known to be the first.
        first = min(monitor.deaths.values(), default=0)
        first_is_unique = list(monitor.deaths.values()).count(first) == 1
        host = socket.gethostname()
        collected = []
        for rank, failure in failures.items():
            death = monitor.deaths.get(rank, 0)
            code = failure.exitcode
            # torch's agent ends the others with SIGTERM; a rank that SIGTERM ended first was not ended by the agent.
            died_first = first_is_unique and death == first
            by_sigterm = code in (-signal.SIGTERM, 128 + signal.SIGTERM)
            stopped = rank in monitor.killed or (by_sigterm and not died_first)
            if rank in reports and not stopped:
                collected.append(reports[rank])
                continue
            collected.append(
                RankFailure(
                    rank, code, death, host=host, pid=failure.pid, stopped=stopped
                )
            )
        return with_early_ends(collected, monitor.ends.values())


def _silence_torch() -> None:
    """Drop the log of torch's agent: the headline of a failed run replaces it."""
    logger = logging.getLogger("torch.distributed.elastic")
    if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(logging.NullHandler())
    logger.propagate = False


@contextlib.contextmanager
def _handle_signals(monitor: _ProcessMonitor) -> Iterator[None]:
    """The first stop signal gives the ranks a grace period to end; a second one kills them."""

    def stop(number: int, frame: FrameType | None) -> None:
        if monitor.stop_signal is not None:
            monitor.kill()
            return
        monitor.note_signal(number)
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    def forward(number: int, frame: FrameType | None) -> None:
        monitor.forward(number)

    handlers = {**dict.fromkeys(_STOP, stop), **dict.fromkeys(_FORWARD, forward)}
    before = {}
    for name, handler in handlers.items():
        number = getattr(signal, name, None)
        # Not every system has every signal; what nohup ignores stays ignored.
        if number is None or signal.getsignal(number) is signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            # None: a handler that C code installed, which Python cannot set again.
            if earlier is None:
                earlier = signal.SIG_DFL
            signal.signal(number, earlier)


@final
class _ProcessMonitor(threading.Thread):
    """A thread that notices at once when a rank ends; torch's agent waits 30 s for a rank that does not react.

    Args:
        agent: torch's agent, which starts the ranks; each rank leads a process group.
        nproc: number of ranks.
        reports: the directory in which ranks leave their error files.
        peer_grace: seconds that the others have after a rank has failed.
        signal_grace: seconds that all have after the agent has received a stop signal.

    Attributes:
        deaths: when the monitor saw each rank end, in nanoseconds of the clock.
        killed: the ranks that did not end in time and were killed.
        stop_signal: the signal that stopped the agent.
        forwarded: the signals that were forwarded without stopping the agent.
    """

    def __init__(
        self,
        agent: LocalElasticAgent,
        nproc: int,
        reports: Path,
        peer_grace: float,
        signal_grace: float,
    ) -> None:
        super().__init__(name="trainer_kit-process-monitor", daemon=True)
        self.deaths: dict[int, int] = {}
        self.killed: set[int] = set()
        self.stop_signal: int | None = None
        self.forwarded: set[int] = set()
        # Of ranks that ended with exit code 0, which may have left the others too early.
        self.ends: dict[int, RankFailure] = {}
        self._agent = agent
        self._nproc = nproc
        self._reports = reports
        self._peer_grace = peer_grace
        self._signal_grace = signal_grace
        self._deadline: float | None = None
        self._handles: dict[int, int] = {}
        self._over = threading.Event()

    def pids(self) -> dict[int, int]:
        """Process IDs by rank; empty while the agent is still starting the ranks."""
        # torch's agent changes this list in the main thread while it starts the ranks.
        workers = self._agent.get_worker_group().workers
        pids = {
            worker.global_rank: worker.id
            for worker in workers
            if isinstance(worker.id, int)
        }
        if len(pids) != self._nproc:
            return {}
        return pids

    def _living(self) -> dict[int, int]:
        return {
            rank: pid for rank, pid in self.pids().items() if rank not in self.deaths
        }

    def run(self) -> None:
        next_look = 0.0
        try:
            while not self._over.is_set():
                self._wait()
                for rank, pid in self._living().items():
                    code = self._exit_code(rank, pid)
                    if code is None:
                        continue
                    self.deaths[rank] = time.time_ns()
                    if code != 0:
                        self._set_deadline(self._peer_grace)
                    else:
                        self._note_early_end(rank, pid)
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + 1.0
                    # A rank may hang after it has reported its exception.
                    if any(self._reports.rglob("error.json")):
                        self._set_deadline(_EXIT_TIME)
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self.kill()
        finally:
            for handle in self._handles.values():
                os.close(handle)

    def _note_early_end(self, rank: int, pid: int) -> None:
        self.ends[rank] = RankFailure(
            rank, 0, self.deaths[rank], host=socket.gethostname(), pid=pid
        )
        # The last rank that ends leaves no other behind.
        if self._living():
            note_end(self._reports, self.ends[rank])

    def _wait(self) -> None:
        """Return when a rank ends, or after one period."""
        # Linux 5.3 and later wake the thread when a process ends; other systems are asked every period.
        open_process = getattr(os, "pidfd_open", None)
        if open_process is None:
            self._over.wait(_PERIOD)
            return
        poll = select.poll()
        for rank, pid in self._living().items():
            if rank not in self._handles:
                with contextlib.suppress(OSError):
                    self._handles[rank] = open_process(pid)
            if rank in self._handles:
                poll.register(self._handles[rank], select.POLLIN)
        poll.poll(_PERIOD * 1000)

    def _exit_code(self, rank: int, pid: int) -> int | None:
        """The exit code of a rank that has ended (negative for a signal); torch's agent still collects the process."""
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            result = os.waitid(os.P_PID, pid, options)
        except ChildProcessError:
            # Rare: torch's agent was faster. A reported exception still shows the failure.
            return int(rank in read_reports(self._reports))
        if result is None:
            return None
        if result.si_code == os.CLD_EXITED:
            return result.si_status
        return -result.si_status

    def _set_deadline(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        # The signal has set a longer deadline: ranks that end because of it are no failure.
        if self.stop_signal is not None:
            return
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline

    def note_signal(self, number: int) -> None:
        """Record the signal that stops the agent: from now on the ranks have the longer grace period."""
        self._deadline = time.monotonic() + self._signal_grace
        self.stop_signal = number

    def forward(self, number: int) -> None:
        """Send a signal to every living rank."""
        self.forwarded.add(number)
        for pid in self._living().values():
            _send(os.kill, pid, number)

    def kill(self) -> None:
        """Kill every living rank and the processes that it started."""
        for rank, pid in self._living().items():
            self.killed.add(rank)
            # Its process group: workers of data loaders would keep its pipes and devices open.
            _send(os.killpg, pid, signal.SIGKILL)

    def stop(self, sweep: bool) -> None:
        """End the monitor.

        Args:
            sweep: also kill processes that the ranks started and left running.
        """
        self._over.set()
        self.join()
        if sweep:
            for pid in self.pids().values():
                _send(os.killpg, pid, signal.SIGKILL)


def _send(send: Callable[[int, int], None], pid: int, number: int) -> None:
    # It has ended in the meantime, for which systems raise different errors.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)


@final
class _Rendezvous(RendezvousHandler):
    """The rendezvous of one attempt. Unlike torch's handlers, it does not listen on every interface.

    Args:
        machines: the machines of the run.
        attempt: the number of earlier attempts.
    """

    def __init__(self, machines: Machines, attempt: int) -> None:
        self._machines = machines
        self._attempt = attempt
        # The prefix of all keys: the same on every machine, which is why several cannot draw it.
        self._run_id = f"attempt-{attempt}"
        if machines.count == 1:
            self._run_id = uuid.uuid4().hex

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the agent's store; rank 0 opens none."""
        return True

    def get_backend(self) -> str:
        """The name of this rendezvous."""
        return "trainer_kit"

    def next_rendezvous(self) -> RendezvousInfo:
        """Open or join the store."""
        store, port = self._machines.store(self._attempt)
        info = RendezvousStoreInfo(self._machines.address, port)
        return RendezvousInfo(
            PrefixStore(self._run_id, store),
            self._machines.rank,
            self._machines.count,
            info,
        )

    def is_closed(self) -> bool:
        """A rendezvous is never closed early."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Always 0: no machine joins later. torch's agent calls this often, so it also looks for failed machines."""
        self._machines.check(self._attempt)
        return 0

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with the attempt."""
        return True
