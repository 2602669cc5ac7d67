"""What scripts for Accelerate use beside the loop: states of loaders, hooks of DDP, debug mode, launchers."""

from __future__ import annotations

import importlib.util
import pickle
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainer_kit as tk
from trainer_kit import Accelerator, PartialState
from trainer_kit.core.errors import (
    CheckpointError,
    ConfigurationError,
    LaunchError,
    RankError,
    StrategyError,
)

DATA = TensorDataset(torch.arange(26.0).unsqueeze(1))


class Stream(IterableDataset[Tensor]):
    """Numbers, and a place of its own."""

    def __init__(self, samples: int = 24) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < self.samples:
            self.at += 1
            yield torch.tensor([float(self.at - 1)])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def numbers(batch: Any) -> list[float]:
    return (batch[0] if isinstance(batch, (list, tuple)) else batch).flatten().tolist()


def check_loader_states() -> None:
    for make in (
        lambda: DataLoader(DATA, batch_size=4, shuffle=True),
        lambda: DataLoader(Stream(), batch_size=4),
    ):
        whole = [
            numbers(batch) for batch in Accelerator(cpu=True, seed=1).prepare(make())
        ]
        loader = Accelerator(cpu=True, seed=1).prepare(make())
        seen = iter(loader)
        assert [numbers(next(seen)) for _ in range(2)] == whole[:2]
        state = loader.state_dict()
        other = Accelerator(cpu=True, seed=9).prepare(make())
        other.load_state_dict(state)
        assert [numbers(batch) for batch in other] == whole[2:]


def test_a_prepared_loader_loads_its_state() -> None:
    check_loader_states()
    accelerator = Accelerator(cpu=True)
    seen = iter(loader := accelerator.prepare(DataLoader(Stream(), batch_size=4)))
    next(seen)
    state, other = (
        loader.state_dict(),
        accelerator.prepare(DataLoader(Stream(), batch_size=2)),
    )
    with pytest.raises(CheckpointError, match="1 batch had 4 samples"):
        other.load_state_dict(state)


def step(accelerator: Accelerator, parts: Any, factor: float = 1.0) -> None:
    model, optimizer = parts
    accelerator.backward(model(torch.ones(2, 2)).sum() * factor)
    optimizer.step()
    optimizer.zero_grad()


def linear(accelerator: Accelerator) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def check_hooks_of_ddp() -> None:
    word = tk.DDPCommunicationHookType
    for hook, wrapper, options in (
        (word.FP16, word.NO, {}),
        ("bf16", word.FP16, {}),
        (
            word.POWER_SGD,
            "bf16",
            {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
        ),
        (
            word.BATCHED_POWER_SGD,
            "no",
            {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
        ),
    ):
        handler = tk.DistributedDataParallelKwargs(
            comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options
        )
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        parts = linear(accelerator)
        for _ in range(3):
            step(accelerator, parts)
        plain = linear(Accelerator(cpu=True))
        for _ in range(3):
            step(accelerator, plain)
        torch.testing.assert_close(
            parts[0].module.weight, plain[0].module.weight, rtol=0, atol=0.02
        )


def check_debug_mode(rank: int) -> None:
    def differ() -> None:
        with pytest.raises(RankError, match="make different calls"):
            tk.reduce(torch.ones(1)) if rank else tk.gather(torch.ones(1))

    accelerator = Accelerator(cpu=True)
    assert not PartialState(cpu=True).debug
    accelerator.state.debug = True
    differ()
    accelerator.state.debug = False
    PartialState(cpu=True).debug = True
    try:
        differ()
        assert tk.gather_object([rank]) == [0, 1]
        assert tk.broadcast_object_list([rank]) == [0]
        assert tk.pad_across_processes(torch.ones(rank + 1)).tolist() == [
            1.0,
            float(rank),
        ]
        assert tk.broadcast(torch.tensor(rank)) == 0
        tk.synchronize_rng_states(["torch"])
    finally:
        PartialState(cpu=True).debug = False
    assert tk.reduce(torch.ones(1), "sum") == 2


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_USE_CPU", "1")
    check_loader_states()
    check_hooks_of_ddp()
    accelerator = Accelerator(cpu=True)
    check_debug_mode(accelerator.process_index)
    assert repr(accelerator).startswith(
        "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo\nNum proc"
    )
    model, _ = linear(accelerator)
    accelerator.prepare(DataLoader(DATA, batch_size=2))
    assert len(pickle.loads(pickle.dumps(accelerator))._dataloaders) == 1
    # Every sample of a stream is there once, also where a process has no part of the last turn.
    for samples in (13, 15):
        stream = accelerator.prepare(DataLoader(Stream(samples), batch_size=2))
        mine = []
        warned = pytest.warns(
            UserWarning, match="only supported for map-style datasets"
        )  # there, not here
        with warned, accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in stream:
                accelerator.backward(model(batch.expand(-1, 2)).mean())
                mine += numbers(batch)
        assert sorted(tk.gather_object(mine)) == list(range(samples))


def test_hooks_of_ddp_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="unknown communication hook"):
        tk.DistributedDataParallelKwargs(comm_hook="power")
    with pytest.raises(StrategyError, match="a wrapper needs a communication hook"):
        tk.DistributedDataParallelKwargs(comm_wrapper="fp16")
    with pytest.raises(StrategyError, match="only PowerSGD has a state with arguments"):
        tk.DistributedDataParallelKwargs(
            comm_hook="fp16", comm_state_option={"matrix_approximation_rank": 2}
        )
    with pytest.raises(StrategyError, match="unknown wrapper"):
        tk.DistributedDataParallelKwargs(comm_hook="fp16", comm_wrapper="power_sgd")


def test_native_amp_can_be_set_to_what_it_is() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.native_amp = True
    assert accelerator.native_amp
    with pytest.raises(
        ConfigurationError, match="precision of an Accelerator cannot change"
    ):
        accelerator.native_amp = False


def test_the_scale_adapts_at_the_step() -> None:
    scaling = tk.GradScalerKwargs(init_scale=1024.0, growth_interval=2)
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[scaling]
    )
    parts, others = linear(accelerator), linear(accelerator)
    scaler, found = accelerator.scaler, []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        step(accelerator, parts, factor)
        found.append(scaler.get_scale())
    assert found == [1024, 512, 512, 1024]
    # Two optimizers of one step: the scale stays until both are through.
    for model, _ in (parts, others):
        accelerator.backward(model(torch.ones(2, 2)).sum() * float("inf"))
    parts[1].step()
    assert scaler.get_scale() == 1024
    others[1].step()
    assert scaler.get_scale() == 512


def test_a_state_prints_as_accelerate_prints_it() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    lines = "Distributed environment: DistributedType.NO\nNum processes: 1\nProcess index: 0\nLocal process index: 0\n"
    assert str(PartialState(cpu=True)) == f"{lines}Device: cpu\n"
    assert (
        str(accelerator.state) == f"{lines}Device: cpu\n\nMixed precision type: bf16\n"
    )


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_an_accelerator_pickles_with_all_that_is_prepared(precision: str) -> None:
    scaling = tk.GradScalerKwargs(init_scale=8.0)
    options = {
        "mixed_precision": precision,
        "gradient_accumulation_steps": 2,
        "kwargs_handlers": [scaling],
    }
    accelerator = Accelerator(cpu=True, seed=3, **options)
    model, optimizer = linear(accelerator)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader, _ = accelerator.prepare(
        DataLoader(DATA, batch_size=4, shuffle=True), scheduler
    )
    pickle.dumps(accelerator)
    seen = iter(loader)
    with accelerator.accumulate(model):
        step(accelerator, (model, optimizer))
    first = numbers(next(seen))
    copy = pickle.loads(pickle.dumps(accelerator))
    rest = [numbers(batch) for batch in seen]
    assert [numbers(batch) for batch in copy._dataloaders[0]] == rest
    assert (
        sorted(first + [number for batch in rest for number in batch])
        == DATA.tensors[0].flatten().tolist()
    )
    with copy.accumulate(copy._models[0]):
        step(copy, (copy._models[0], copy._optimizers[0]))
    assert not torch.equal(copy._models[0].weight, model.weight)


def test_the_copy_of_an_accelerator_logs_to_its_trackers(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0}, step=1)
    copy = pickle.loads(pickle.dumps(accelerator))
    copy.log({"loss": 2.0}, step=2)
    copy.end_training()
    accelerator.end_training()
    written = "".join(file.read_text() for file in tmp_path.rglob("metrics.csv"))
    assert "1.0" in written
    assert "2.0" in written


def test_no_batch_size_that_fits_is_a_runtime_error() -> None:
    @tk.find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        raise RuntimeError("CUDA out of memory.")

    with pytest.raises(RuntimeError, match="no executable batch size"):
        train()


def fails_at_first(file: Path) -> str:
    # Another process would read the file while this one writes it.
    if not PartialState(cpu=True).is_main_process:
        return "done"
    tries = int(file.read_text()) if file.exists() else 0
    file.write_text(str(tries + 1))
    if tries < 2:
        raise ValueError(f"try {tries}")
    return "done"


def test_a_notebook_starts_its_processes_again(tmp_path: Path) -> None:
    file = tmp_path / "tries"
    with pytest.warns(UserWarning, match="restart") as told:
        assert (
            tk.notebook_launcher(
                fails_at_first, (file,), num_processes=2, max_restarts=3
            )
            == "done"
        )
    assert file.read_text() == "3"
    found = re.findall(r"restart \d of 3", " ".join(str(one.message) for one in told))
    assert found == ["restart 1 of 3", "restart 2 of 3"]
    file.unlink()
    with (
        pytest.warns(UserWarning, match="restart 1 of 1"),
        pytest.raises(ValueError, match="try 1"),
    ):
        tk.notebook_launcher(fails_at_first, (file,), num_processes=2, max_restarts=1)
    with pytest.raises(ConfigurationError, match="0 or more"):
        tk.notebook_launcher(fails_at_first, (file,), num_processes=2, max_restarts=-1)
    with pytest.raises(TypeError, match="unexpected argument 'max_restart'"):
        tk.notebook_launcher(fails_at_first, (file,), num_processes=2, max_restart=1)
    with pytest.warns(UserWarning, match="is not started again"):
        assert (
            tk.notebook_launcher(
                len, ("alone",), num_processes=1, max_restarts=1, rdzv_id="x"
            )
            == 5
        )


class Unpicklable(ValueError):
    """Its constructor takes other arguments than it keeps."""

    def __init__(self, step: int, *, why: str) -> None:
        super().__init__(f"{why} at {step}")


def raises(error: BaseException) -> None:
    if PartialState(cpu=True).process_index == 1:
        raise error
    time.sleep(60)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("bad label"), ValueError, "bad label"),
        (KeyError("label"), KeyError, "'label'"),
        (
            FileNotFoundError(2, "not here", "data.bin"),
            FileNotFoundError,
            "[Errno 2] not here: 'data.bin'",
        ),
        (
            ConfigurationError("no", found="1", fix="2"),
            ConfigurationError,
            "no\n  found: 1\n  fix:   2",
        ),
        (Unpicklable(3, why="late"), RankError, "rank 1 of 2 failed"),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            UnicodeDecodeError,
            "'utf-8' codec can't decode",
        ),
        (
            SyntaxError("bad", ("f.py", 1, 2, "a b", 1, 3)),
            SyntaxError,
            "bad (f.py, line 1)",
        ),
    ],
)
def test_the_error_of_a_process_is_torchs_too(
    error: Exception, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as found:
        tk.notebook_launcher(raises, (error,), num_processes=2)
    made = found.value
    assert isinstance(made, ChildFailedError)
    assert type(made).__name__ == kind.__name__
    assert str(made).startswith(text)
    assert "rank 1 of 2 failed" in "".join([str(made), *getattr(made, "__notes__", [])])
    rank, first = made.get_first_failure()
    assert (rank, first.exitcode, made.name) == (1, 1, "raises")
    assert type(error).__name__ in first.message
    assert sorted(made.failures) == [0, 1]
    if isinstance(made, OSError):
        assert (made.errno, made.filename) == (2, "data.bin")


def test_a_notebook_names_an_import_that_uses_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    with pytest.raises(RuntimeError, match="bitsandbytes was imported") as found:
        tk.notebook_launcher(len, ("ab",), num_processes=2)
    assert isinstance(found.value, LaunchError)
    assert tk.notebook_launcher(len, ("ab",), num_processes=1) == 2


def test_all_trackers_are_those_that_are_installed(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    accelerator = Accelerator(cpu=True, log_with="all", project_dir=tmp_path)
    services = ["mlflow", "comet_ml", "clearml", "aim", "dvclive", "swanlab", "trackio"]
    there = [name for name in services if importlib.util.find_spec(name) is not None]
    assert sorted(accelerator.log_with) == sorted(
        ["csv", "jsonl", "tensorboard", "wandb", *there]
    )
