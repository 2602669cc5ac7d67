"""Every test runs in its own directory and leaves the process as it found it."""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

pytest_plugins = ["trainer_kit.testing.pytest_plugin"]

_ROOT = Path(__file__).parents[1]
# A shell starts background jobs with these ignored, and what is ignored stays so in every process below.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PYTEST_OWN = {"PYTEST_CURRENT_TEST"}
_ONCE_PER_PROCESS = {
    "CUDA_MODULE_LOADING",
    "KINETO_LOG_LEVEL",
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn
    "KMP_INIT_AT_FORK",
    "KINETO_USE_DAEMON",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # DeepSpeed, which Transformers imports where Accelerate is installed
    "TF2_BEHAVIOR",
}
"""What a library sets when it is first imported; nobody can undo it."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _defaults() -> dict[str, object]:
    """Settings that hold for the whole process."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic warn-only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "profiler": torch.autograd._profiler_enabled(),
        "step hooks of all optimizers": [
            *_global_optimizer_pre_hooks.values(),
            *_global_optimizer_post_hooks.values(),
        ],
        "sys.excepthook": sys.excepthook,
        "signal handlers": {
            number.name: signal.getsignal(number) for number in _SIGNALS
        },
        "sys.path": list(sys.path),
    }


def _undo(defaults: dict[str, object]) -> None:
    """So that one leak fails one test."""
    torch.set_default_dtype(defaults["default dtype"])
    torch.set_default_device(defaults["default device"])
    torch.use_deterministic_algorithms(
        defaults["deterministic algorithms"],
        warn_only=defaults["deterministic warn-only"],
    )
    torch.backends.cudnn.benchmark = defaults["cudnn.benchmark"]
    torch.backends.cudnn.deterministic = defaults["cudnn.deterministic"]
    torch.set_float32_matmul_precision(defaults["float32 matmul precision"])
    torch.set_num_threads(defaults["num_threads"])
    torch.set_grad_enabled(defaults["grad mode"])
    torch.set_anomaly_enabled(defaults["anomaly mode"])
    torch.set_autocast_enabled("cpu", defaults["autocast"])
    sys.excepthook = defaults["sys.excepthook"]
    for name, handler in defaults["signal handlers"].items():
        signal.signal(signal.Signals[name], handler)
    sys.path[:] = defaults["sys.path"]


def _children() -> set[int]:
    """Child processes, except multiprocessing's two servants, which live as long as the session."""
    servants = {
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    if not Path("/proc/self/task").exists():
        return {child.pid for child in multiprocessing.active_children()}
    multiprocessing.active_children()  # collects those of its own that have ended
    listed: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread that ended meanwhile
            listed.update(map(int, (task / "children").read_text().split()))
    return listed - servants


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith("pytest_timeout")
    }


def _left(now: Callable[[], set], before: set) -> set:
    """What is new, once it has had a moment to end and the collector has run."""
    if not now() - before:
        return set()
    _collect_all()
    deadline = time.monotonic() + 2
    while (left := now() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _collect_all() -> None:
    """Collect what a fork of a test froze, too, and freeze what is left: each collection would take 0.4 s."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


_ended = 0
"""Tests since the last collection of everything: to count the frozen objects takes 0.1 s."""


def _environ() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _PYTEST_OWN | _ONCE_PER_PROCESS
    }


def _files() -> set[str]:
    return {
        name
        for name in os.listdir(_ROOT)
        if not name.startswith(".") and name != "__pycache__"
    }


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path: Path) -> Iterator[None]:
    """Run in ``tmp_path``; fail a test that leaves anything in the process or in the checkout."""
    global _ended
    directory, environ, defaults, files = os.getcwd(), _environ(), _defaults(), _files()
    threads, children = _threads(), _children()
    os.chdir(tmp_path)
    try:
        yield
    finally:
        os.chdir(directory)
    leaks = []
    _ended = (_ended + 1) % 100
    if not _ended:  # what forks froze, and large imports
        _collect_all()
    if dist.is_initialized():
        leaks.append("a process group")
        dist.destroy_process_group()
    if left := _left(_threads, threads):
        leaks.append(f"threads {sorted(thread.name for thread in left)}")
    if left := _left(_children, children):
        leaks.append(f"child processes {sorted(left)}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    now = _environ()
    if changed := sorted(
        name
        for name in environ.keys() | now.keys()
        if environ.get(name) != now.get(name)
    ):
        leaks.append(f"environment variables {changed}")
        for name in changed:
            os.environ.pop(name, None)
            if name in environ:
                os.environ[name] = environ[name]
    after = _defaults()
    hooks = "step hooks of all optimizers"
    if after[hooks] != defaults[hooks]:
        # An Accelerator takes its hook away when it is collected.
        _collect_all()
        after = _defaults()
    if other := [
        f"{name}: {before} -> {after[name]}"
        for name, before in defaults.items()
        if before != after[name]
    ]:
        leaks.append(f"process-wide settings ({'; '.join(other)})")
        _undo(defaults)
    if written := sorted(_files() - files):
        leaks.append(f"files in the checkout {written}")
    if leaks:
        pytest.fail("the test leaves behind: " + ", ".join(leaks), pytrace=False)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The server that runs scripts without importing torch for each; see `tests.programs`."""
    from tests.programs import Programs

    made = Programs(tmp_path_factory.mktemp("programs"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _forget_the_seed():
    """What one test seeded is not the order of another test's data."""
    from trainer_kit.core import seed

    before = seed._last_seed
    yield
    seed._last_seed = before


# Files and folders whose tests are all slow: left out of `make test-quick`. Most start programs that import torch.
_SLOW = (
    "accelerator/test_streams.py",  # nearly all on two or more ranks
    "docs/test_docstrings.py",
    "docs/test_pages.py",
    "docs/test_readme.py",
    "faults/",
    "launch/test_agent.py",
    "launch/test_notebook.py",
    "parity/test_ddp.py",
    "parity/test_ddp_around_training.py",
    "parity/test_other_ranks.py",
    "parity/test_out_of_memory.py",
    "test_architecture.py",  # part of `make check`
    "testing/test_leaks.py",
    "testing/test_run_distributed.py",  # every test on several ranks runs by it
    "testing/test_world_size_mark.py",
    "test_public_names.py",
    "training/test_no_reads.py",
    "training/test_ranks_that_differ.py",
    "training/test_signals.py",
    "tuner/",
)
# Left out of `make test` too: variants of what a quicker test shows in one case. `make test-all` runs them.
_LONG = (
    "accelerator/test_scripts.py",
    "benchmarks/",
    "commands/test_trial.py",
    "examples/test_examples.py",
    "examples/test_lm.py",
    "faults/test_hostile_checkpoints.py",
    "faults/test_kills.py",
    "faults/test_remote.py",
    "faults/test_resume_auto.py",
    "faults/test_slurm.py",
    "gpu/",
    "loggers/test_wandb.py",
    "parity/test_between_strategies.py",
    "parity/test_every_step.py",
    "parity/test_mesh_memory.py",
    "parity/test_tensor_parallel.py",
)


_TESTS = Path(__file__).parent
_LEFT_OUT = {"not slow": (*_LONG, *_SLOW), "not long": _LONG}
"""By ``-m``: what is left out as a whole, and so need not be imported."""
gc.disable()  # until all tests are found: the imports make millions of objects, and hardly any garbage


def pytest_ignore_collect(collection_path, config):
    left_out = _LEFT_OUT.get(config.option.markexpr)
    if left_out is None or not collection_path.is_relative_to(_TESTS):
        return None
    path = collection_path.relative_to(_TESTS).as_posix()
    asked = any(argument.partition("::")[0].endswith(path) for argument in config.args)
    return True if path.startswith(left_out) and not asked else None


def pytest_collection_finish():
    """No later collection looks at what the imports made."""
    gc.enable()
    _collect_all()


def pytest_collection_modifyitems(items):
    for item in items:
        if not item.path.is_relative_to(_TESTS):
            continue
        path = item.path.relative_to(_TESTS).as_posix()
        if path.startswith(_LONG):
            item.add_marker(pytest.mark.long)
        if path.startswith(_SLOW) or item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.slow)
