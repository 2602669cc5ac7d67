"""The agent: runs this program again on several ranks, supervises them, and ends as they end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

from trainer_kit.core.environment import START_DIRECTORY, Environment
from trainer_kit.core.errors import LaunchError
from trainer_kit.launch.command import rerun_command
from trainer_kit.launch.failure import RankFailure, describe, read_reports, root_first
from trainer_kit.launch.machines import Machines, PeerFailed, interface_of
from trainer_kit.launch.process_monitor import Watch

if TYPE_CHECKING:
    from trainer_kit.launch.output import Output

__all__ = ["run_agent", "run_ranks"]

_BOOTSTRAP: Final = Path(__file__).with_name("bootstrap.py")
_STOP: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_FORWARD: Final = ("SIGUSR1", "SIGUSR2")
_ANSWER_TIME: Final = 60.0
"""Seconds in which other machines tell how they ended, once one has failed: their ranks may need half of it to end."""


def run_agent(
    nproc: int,
    *,
    extra_env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    peer_grace: float = 3.0,
    signal_grace: float = 25.0,
) -> NoReturn:
    """Run this program again from its start, as ``nproc`` ranks on this machine, and exit with their code.

    The ranks are started by torch's elastic agent with the variables that torchrun sets; they meet on a port of the
    loopback interface. When one fails, the others are ended and its exception is printed; what the others then say
    about broken connections is one line. SIGTERM, SIGINT, SIGHUP and SIGQUIT go on to the ranks, which have
    ``signal_grace`` seconds (a second signal ends them at once); SIGUSR1 and SIGUSR2 are only passed on. Ranks die with
    their agent, however it dies.

    The exit code is that of the rank that failed first, 128 + n for signal n, or 0.

    Args:
        nproc: number of ranks.
        extra_env: variables for the ranks, beside those of torchrun.
        max_restarts: how often all ranks are started again after a failure. A code of 128 or more (a signal) is final.
        peer_grace: seconds in which the other ranks must end once one has failed.
        signal_grace: seconds in which ranks must end once the agent was told to stop.

    Raises:
        LaunchError: where this program cannot be run again, or is itself a rank.
        SystemExit: always, in the end.
    """
    here = Environment.detect()
    if here.launched:
        raise LaunchError("a rank does not start ranks", found=f"rank {here.rank} of {here.world_size} ({here.source})")
    options, words = rerun_command()
    os.chdir(START_DIRECTORY)
    run_ranks(
        words,
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
    """Run a script as ``nproc`` ranks on this machine, beside as many on every other, and exit with their code.

    Args:
        words: ``[script, *arguments]``, ``["-m", module, *arguments]``, or ``["--exec", program, *arguments]``.
        nproc: number of ranks on this machine.
        options: of the interpreter.
        machines: all machines of the run; by default this one alone, on its loopback interface.
        extra_env: as for `run_agent`, like the arguments below.
        max_restarts: the same on every machine.
        peer_grace: see `run_agent`.
        signal_grace: see `run_agent`.
        output: of the ranks.
        monitor_interval: seconds between two looks of torch's agent at the ranks.

    Raises:
        LaunchError: where machines do not meet.
        SystemExit: always, in the end.
    """
    if nproc < 1:
        raise LaunchError("at least one rank is needed", found=f"nproc={nproc}")
    together = machines or Machines()
    os.environ.update(_environment(nproc, together, extra_env or {}))
    sys.stdout.flush()
    together.meet({"num_machines": together.count, "processes": nproc, "max_restarts": max_restarts})
    arguments = [*options, str(_BOOTSTRAP), *words]
    status = 1
    for attempt in range(max_restarts + 1):
        os.environ["TRAINER_KIT_RESTART_COUNT"] = str(attempt)
        one = _Attempt(nproc, arguments, together, attempt, peer_grace, signal_grace)
        status, said = one.run(output, monitor_interval)
        if said:
            print(said, file=sys.stderr, flush=True)
        if status == 0 or status >= 128 or attempt == max_restarts or together.gone:
            break
        print(f"restart {attempt + 1} of {max_restarts}", file=sys.stderr, flush=True)
    together.leave(attempt)
    raise SystemExit(status)


def _environment(nproc: int, machines: Machines, extra: Mapping[str, str]) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    # The ranks listen where machine 0 is reached, and nowhere else: on one machine alone, to nobody outside.
    interface = interface_of(machines.address)
    if interface is not None:
        chosen["GLOO_SOCKET_IFNAME"] = interface
        if machines.count > 1:
            chosen["NCCL_SOCKET_IFNAME"] = interface
    return {
        **{name: value for name, value in chosen.items() if name not in os.environ},
        **extra,
        "TRAINER_KIT_AGENT_PID": str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # they are handled here
    }


@final
class _Attempt:
    """One start of all ranks."""

    def __init__(
        self,
        nproc: int,
        arguments: Sequence[str],
        machines: Machines,
        number: int,
        peer_grace: float,
        signal_grace: float,
    ) -> None:
        self.nproc, self.arguments, self.machines, self.number = nproc, arguments, machines, number
        self.peer_grace, self.signal_grace = peer_grace, signal_grace
        self.world_size = nproc * machines.count

    def run(self, output: Output | None, monitor_interval: float) -> tuple[int, str]:
        """The exit status, and what to tell the user."""
        from torch.distributed.elastic.multiprocessing import SignalException

        _silence()
        with tempfile.TemporaryDirectory(prefix="trainer_kit-", ignore_cleanup_errors=True) as directory:
            agent = self._agent(directory, output, monitor_interval)
            pids = _once_started(agent, self.nproc)
            watch = Watch(pids, Path(directory), peer_grace=self.peer_grace, signal_grace=self.signal_grace)
            failed = True
            watch.start()
            try:
                with _signals(watch):
                    result = agent.run()
                failed = result.is_failed()
            except SignalException:
                return self._stopped(watch, Path(directory), watch.stop_signal or signal.SIGTERM)
            except PeerFailed as error:
                return self._ended(self._followers(pids()), 1, str(error))
            finally:
                watch.stop(sweep=failed)
            failures = self._failures(result.failures, watch, read_reports(Path(directory))) if failed else []
            status = root_first(failures)[0].exit_status if failures else 0
            if status - 128 in watch.forwarded:  # they obeyed
                return self._stopped(watch, Path(directory), status - 128)
            return self._ended(failures, status, "")

    def _followers(self, pids: Mapping[int, int]) -> list[RankFailure]:
        """The ranks of this machine, which ended because another machine failed."""
        host, now = socket.gethostname(), time.time_ns()
        return [RankFailure(rank, None, now, host=host, pid=pid, stopped=True) for rank, pid in pids.items()]

    def _ended(self, mine: list[RankFailure], status: int, why: str) -> tuple[int, str]:
        """The same on every machine; the traceback is told where it happened."""
        failures, worst = self.machines.outcome(self.number, mine, status, _ANSWER_TIME)
        causes = [failure for failure in failures if not failure.stopped]
        if self.machines.gone:
            why = f"machine {', '.join(map(str, self.machines.gone))} is gone"
        if not causes or (why and all(failure.followed for failure in causes)):
            return worst, why or ("" if worst == 0 else "another machine was told to stop")
        told = describe(failures, self.world_size)
        return root_first(causes)[0].exit_status, told if root_first(causes)[0] in mine else told.splitlines()[0]

    def _agent(self, directory: str, output: Output | None, monitor_interval: float) -> Any:
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

        from trainer_kit.launch.output import Output
        from trainer_kit.launch.rendezvous import Rendezvous

        streams = output or Output()
        spec = WorkerSpec(
            role=streams.role,
            local_world_size=self.nproc,
            entrypoint=sys.executable,
            args=tuple(self.arguments),
            rdzv_handler=Rendezvous(self.machines, self.number),
            max_restarts=0,  # restarts are ours: with a fresh store, and never after a signal
            monitor_interval=monitor_interval,
            master_addr=self.machines.address,
            local_addr=self.machines.address,
        )
        agent: Any = LocalElasticAgent(spec, logs_specs=streams.files(directory))
        if self.machines.count > 1:
            # torch would wait 300 s for a machine that has failed: how the others end is asked in `_ended`.
            agent._exit_barrier = lambda: None
        return agent

    def _stopped(self, watch: Watch, directory: Path, number: int) -> tuple[int, str]:
        """After a signal. Exceptions are worth a word, the ranks' own ways to obey are not."""
        told = [
            _told(report)
            for report in read_reports(directory).values()
            if report["type"] not in ("SystemExit", "KeyboardInterrupt")
        ]
        lines = [describe(told, self.world_size)] if told else []
        if watch.killed:
            ranks = ", ".join(map(str, sorted(watch.killed)))
            lines.append(f"ranks {ranks} did not end by themselves and were killed")
        lines.append(f"{signal.Signals(number).name}: {self.nproc} ranks ended")
        self.machines.outcome(self.number, [], 128 + number, 0)
        return 128 + number, "\n".join(lines)

    def _failures(self, failures: Mapping[int, Any], watch: Watch, reports: Mapping[int, Any]) -> list[RankFailure]:
        first = min(watch.deaths.values(), default=0)
        alone = sum(at == first for at in watch.deaths.values()) == 1
        known = []
        for rank, failure in failures.items():
            death, code = watch.deaths.get(rank, 0), failure.exitcode
            # torch's agent ends the others with SIGTERM: whoever died of it first was not ended by that.
            told_to = code in (-signal.SIGTERM, 128 + signal.SIGTERM) and not (alone and death == first)
            stopped = rank in watch.killed or told_to
            if rank in reports and not stopped:
                known.append(_told(reports[rank]))
            else:
                known.append(
                    RankFailure(rank, code, death, host=socket.gethostname(), pid=failure.pid, stopped=stopped)
                )
        return known


def _told(report: Mapping[str, Any]) -> RankFailure:
    return RankFailure(
        rank=report["rank"],
        exit_code=report["exit_code"],
        time_ns=report["time_ns"],
        type=report["type"],
        message=report["text"],
        traceback=report["py_callstack"],
        host=report["host"],
        pid=report["pid"],
        where=report["where"],
    )


def _once_started(agent: Any, nproc: int) -> Callable[[], dict[int, int]]:
    """The processes by rank; none while the agent still starts them."""

    def pids() -> dict[int, int]:
        workers = agent.get_worker_group().workers
        found = {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}
        return found if len(found) == nproc else {}

    return pids


def _silence() -> None:
    """What torch's agent logs, our headline says better."""
    logger = logging.getLogger("torch.distributed.elastic")
    if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(logging.NullHandler())
    logger.propagate = False


@contextmanager
def _signals(watch: Watch) -> Iterator[None]:
    """The first signal stops the ranks in order, a second one at once."""
    from torch.distributed.elastic.multiprocessing import SignalException

    def stop(number: int, frame: FrameType | None) -> None:
        if watch.stop_signal is not None:
            watch.kill()
            return
        watch.note_signal(number)
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    def forward(number: int, frame: FrameType | None) -> None:
        watch.forward(number)

    handlers = {**dict.fromkeys(_STOP, stop), **dict.fromkeys(_FORWARD, forward)}
    before = {}
    for name, handler in handlers.items():
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
