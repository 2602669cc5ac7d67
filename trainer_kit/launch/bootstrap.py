"""The first code of a rank that our agent starts: it binds the rank to the agent, runs the script, reports its failure.

The agent runs this file with the command line of the user's script as arguments. It uses the standard library only:
nothing else may be imported before the first line of the script.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

__all__ = [
    "die_with_parent",
    "main",
    "position_of_rank",
    "qualified_name",
    "report_errors",
    "run_words",
    "write_report",
]


@final
class _Reporter:
    """Writes the exception that ends this process into the file the agent reads."""

    def __init__(self) -> None:
        self.pid = 0
        self.where: Callable[[], str] | None = None
        self.reported: BaseException | None = None
        self.next_hook: Callable[..., Any] = sys.excepthook

    def install(self) -> None:
        # A forked child inherits the hook, but must not report in the name of the rank.
        if self.pid != os.getpid():
            self.pid = os.getpid()
            self.next_hook = sys.excepthook
            sys.excepthook = self.hook

    def hook(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        reported = self.pid == os.getpid() and (
            isinstance(error, KeyboardInterrupt) or self.write(error)
        )
        if reported and not isinstance(error, KeyboardInterrupt):
            _ignore_end_of_launch()
        # Our agent prints one traceback for all ranks; another launcher prints none.
        if not (reported and "TRAINER_KIT_AGENT_PID" in os.environ):
            self.next_hook(kind, error, trace)

    def write(self, error: BaseException) -> bool:
        """Report ``error`` in the format of torch's elastic agents; return whether the file could be written."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        # `main` reports an error first, and then the hook gets the same one.
        if self.reported is error or path is None:
            return path is not None
        # The user's exception class may raise when its text is asked for, and a rank must still report.
        try:
            text = str(error)
            position = position_of_rank()
        except Exception as second:
            text = f"<its message cannot be printed: {second!r}>"
            position = ""
        cause = _cause_elsewhere(error, position)
        if cause:
            text += f"\n{cause}"
        # The intended code: an interpreter with a live process group sometimes aborts at exit.
        code = 1
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code & 0xFF
        rank = int(os.environ.get("RANK", "0"))
        stack = "".join(_format(error))
        if not write_report(
            path, rank, qualified_name(error), text, stack, position, code, self.pid
        ):
            return False
        self.reported = error
        return True


def _ignore_end_of_launch() -> None:
    """Let the exit handlers write the last values and the page of the run, although the launcher ends all ranks now.

    This rank ends anyway; if it hangs there, the launcher kills it after some seconds.
    """
    # A handler of the script knows better what to do. Only the main thread may set one.
    with contextlib.suppress(ValueError):
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def write_report(
    path: str,
    rank: int,
    kind: str,
    text: str,
    stack: str,
    where: str,
    code: int,
    pid: int,
    delay: int = 0,
) -> bool:
    """Write the error report of a rank for its agent; return whether the file could be written.

    Args:
        path: the file that the agent reads.
        rank: the global rank.
        kind: the class of the exception.
        text: its message.
        stack: its traceback.
        where: the position in the run.
        code: the exit code that the rank intends.
        pid: its process ID.
        delay: seconds to add to the time of the failure; the earliest failure becomes the headline.
    """
    now = time.time_ns() + delay * 10**9
    fields = {
        "py_callstack": stack,
        "timestamp": str(now // 10**9),
        "time_ns": now,
        "type": kind,
        "text": text,
        "where": where,
        "exit_code": code,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": pid,
    }
    try:
        report = json.dumps(
            {"message": {"message": f"{kind}: {text}", "extraInfo": fields}}
        )
        # The agent looks for this file while ranks run: it must be whole once it has its name.
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            file.write(report)
        os.replace(f"{path}.part", path)
    except (OSError, ValueError):
        return False
    return True


def qualified_name(error: BaseException) -> str:
    """The class of an exception, with its module unless it is a builtin or defined in the script."""
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__name__}"


def _format(error: BaseException) -> list[str]:
    """Format the traceback, starting at the script's first frame.

    An error of this library says in its text what to do: of its traceback only the frames of the user's code stay.
    """
    trace = error.__traceback__
    # The frames of this file and of runpy come first, and the user has not called them.
    launcher = (
        __file__,
        "<frozen runpy>",
        os.path.join(os.path.dirname(os.__file__), "runpy.py"),
    )
    while (
        trace is not None
        and trace.tb_next is not None
        and trace.tb_frame.f_code.co_filename in launcher
    ):
        trace = trace.tb_next
    if _explains_itself(error):
        frames = [
            frame for frame in traceback.extract_tb(trace) if _is_users(frame.filename)
        ]
        lines = [
            *traceback.format_list(frames),
            *traceback.format_exception_only(type(error), error),
        ]
    else:
        lines = traceback.format_exception(type(error), error, trace)
    # Later versions of Python print the notes themselves.
    if sys.version_info < (3, 11):
        lines += [f"{note}\n" for note in getattr(error, "__notes__", [])]
    return lines


def _is_users(file: str) -> bool:
    """Whether a frame is neither of this library nor of the standard library."""
    file = os.path.abspath(file)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    library = os.path.dirname(os.__file__)
    # Packages may lie inside the directory of the standard library.
    installed = "site-packages" in file or "dist-packages" in file
    if file.startswith(package + os.sep):
        return False
    return installed or not file.startswith(library + os.sep)


def _explains_itself(error: BaseException) -> bool:
    """Whether this is an error of this library without another error as its cause."""
    # Not imported here: if the program has not imported it, the error is not of this class.
    errors = sys.modules.get("trainer_kit.core.errors")
    if errors is None or not isinstance(error, errors.TrainerKitError):
        return False
    return error.__cause__ is None and (
        error.__context__ is None or error.__suppress_context__
    )


_REPORTER = _Reporter()


def report_errors(where: Callable[[], str] | None = None) -> None:
    """Report the exception that ends this rank to its agent, torch's or ours.

    Without an agent nothing is reported. A later call with ``where`` replaces it.

    Args:
        where: called when an exception ends the process; returns a short text such as ``"step 25"``.
    """
    if where is not None:
        _REPORTER.where = where
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    _REPORTER.install()
    # Our agent tells the ranks itself when one has ended.
    if "TRAINER_KIT_AGENT_PID" not in os.environ:
        _note_running(path)


def position_of_rank() -> str:
    """The position in the run that `report_errors` was given a function for; empty without one."""
    if _REPORTER.where is None:
        return ""
    return _REPORTER.where()


def _note_running(path: str) -> None:
    """Leave this rank's process ID where other ranks of the machine find it: torchrun does not tell them of its end."""
    rank = os.environ.get("RANK", "0")
    directory = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    process = {"pid": os.getpid(), "host": socket.gethostname()}
    with (
        contextlib.suppress(OSError),
        open(os.path.join(directory, f"running-{rank}"), "w", encoding="utf-8") as file,
    ):
        json.dump(process, file)


def _cause_elsewhere(error: BaseException, position: str) -> str:
    """Under torchrun, name the rank whose end broke this rank's connection, as a note of ``error`` too; or empty."""
    failure = sys.modules.get("trainer_kit.launch.failure")
    errors = sys.modules.get("trainer_kit.core.errors")
    if failure is None or errors is None or "TRAINER_KIT_AGENT_PID" in os.environ:
        return ""
    cause = failure.find_cause(error, qualified_name(error), position)
    if cause is None:
        return ""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    headline: str = failure.describe([cause], world_size).partition("\n")[0]
    errors.add_note(error, headline)
    return headline


def die_with_parent() -> None:
    """Ask the Linux kernel to kill this process when its parent ends."""
    import ctypes

    # 1 is PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _die_with(agent: int) -> None:
    """Die with the agent, however it dies."""
    if sys.platform == "linux":
        die_with_parent()
    else:
        import threading

        threading.Thread(target=_watch_parent, args=(agent,), daemon=True).start()
    # The agent died before the kernel was asked, and no signal will come.
    if os.getppid() != agent:
        os._exit(1)


def _watch_parent(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(0.5)
    os._exit(1)


def run_words(words: list[str]) -> None:
    """Run ``[script, *arguments]`` or ``["-m", module, *arguments]`` as the interpreter does.

    With ``["--exec", program, *arguments]`` this process becomes the program.
    """
    import runpy

    if words[0] == "--exec":
        os.execvp(words[1], words[1:])
    # Under -P or -I Python itself adds no directory to the path.
    own_path = not getattr(sys.flags, "safe_path", sys.flags.isolated)
    if words[0] == "-m":
        sys.argv = words[1:]
        if own_path:
            sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    script = os.path.abspath(words[0])
    sys.argv = words
    if own_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Run the command line in ``sys.argv[1:]`` as a rank."""
    _die_with(int(os.environ["TRAINER_KIT_AGENT_PID"]))
    # The Trainer imports this module later and must get this instance, with its reporter.
    sys.modules["trainer_kit.launch.bootstrap"] = sys.modules["__main__"]
    report_errors()
    # C++ code may abort the process, as gloo does when sizes differ between ranks: print the Python stack then.
    faulthandler.enable()
    # It is for the agent only: torchrun in the script would handle no signals.
    os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # Whole lines, even under -u: several ranks share one pipe.
            reconfigure(line_buffering=True, write_through=False)
    try:
        run_words(sys.argv[1:])
    except SystemExit as exit_:
        if not exit_.code:
            _leave()
        # Python calls no exception hook for it.
        _REPORTER.write(exit_)
        raise
    except KeyboardInterrupt:
        # The agent has got the signal too, and reports it once for all ranks.
        raise
    except BaseException as error:
        # At once: an exception hook of the script may not call this module's hook.
        _REPORTER.write(error)
        raise
    _leave()


def _leave() -> None:
    """End a rank that succeeded: run Python's exit handlers, but skip the destructors of C++.

    torch's process groups may abort there ("terminate called without an active exception") after all work is done.
    """
    import atexit
    import threading

    # In the order of the interpreter: it waits for threads that are no daemons, and then calls the exit handlers.
    threading._shutdown()  # type: ignore[attr-defined]  # a private function of the interpreter
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
