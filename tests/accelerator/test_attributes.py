"""Every public attribute of Accelerate's objects at each point of one script, as Accelerate has it."""

from __future__ import annotations

import enum
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from trainer_kit import Accelerator, set_seed
from trainer_kit.state import AcceleratorState, GradientState, PartialState

RECORDED = json.loads(
    Path(__file__).with_name("accelerate_attributes.json").read_text()
)["rows"]
"""Printed by `run` with the library and version that the file names; "there": a method, or an object of a class."""
ANOTHER: Final = {
    "Accelerator.context_parallel_rank": "0, where Accelerate raises without a ParallelismConfig",
    "Accelerator.data_parallel_rank": "the rank, where Accelerate raises without a ParallelismConfig",
    "Accelerator.data_parallel_shard_rank": "likewise",
    "Accelerator.deepspeed_ulysses_dl_adapter": "DeepSpeed shards no sequences here: cp_size does",
    "Accelerator.device": "a process on the CPU computes on cpu, without an index",
    "Accelerator.flag_tensor": "a tensor at any time, None in Accelerate until set_trigger",
    "Accelerator.fp8_backend": "a string that equals the member of Accelerate's enumeration",
    "Accelerator.pipeline_parallel_rank": "0, where Accelerate raises without a ParallelismConfig",
    "Accelerator.profile_handler": "the default options, None in Accelerate until they are given",
    "Accelerator.rng_types": "None: the order of the data is the same on every process without a copy of generators",
    "Accelerator.tensor_parallel_rank": "0, where Accelerate raises without a ParallelismConfig",
    "Accelerator.use_seedable_sampler": "True: the order is always a function of seed and epoch",
    "Accelerator.use_stateful_dataloader": "True: a saved state always has the positions of loaders",
    "AcceleratorState.deepspeed_plugins": "an empty mapping, None in Accelerate",
    "AcceleratorState.device": "a process on the CPU computes on cpu, without an index",
    "GradientState.adjust_scheduler": "True, the default of the plugin; Accelerate reads False where it was not given",
    "PartialState.device": "a process on the CPU computes on cpu, without an index",
}
"""Differences that are wanted, each with its reason."""


def shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"enum {value.value}"
    if value is None or isinstance(value, int | float | bool | str):
        return repr(value)
    if isinstance(value, torch.device):
        return f"device {value}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key}: {shown(each)}" for key, each in value.items())
            + "}"
        )
    return "object"


def attribute(owner: Any, name: str) -> str:
    try:
        value = getattr(owner, name)
    except Exception as error:
        return f"raises {type(error).__name__}"
    text = "object" if callable(value) else shown(value)
    return "there" if text == "object" else text


def run(names: list[str], directory: str) -> dict[str, list[str]]:
    """The values of attributes at each point: made, prepared, in both epochs, saved, loaded, freed."""
    points: dict[str, list[str]] = {name: [] for name in names}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def look() -> None:
        owners = {
            "Accelerator": accelerator,
            "AcceleratorState": AcceleratorState(),
            "PartialState": PartialState(),
            "GradientState": GradientState(),
        }
        for name, values in points.items():
            owner, _, field = name.partition(".")
            values.append(attribute(owners[owner], field))

    look()
    set_seed(1)
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader: Any = DataLoader([torch.randn(2) for _ in range(11)], batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    look()
    for _ in range(2):
        for batch in loader:
            look()
            with accelerator.accumulate(model):
                look()
                accelerator.backward(model(batch).sum())
                optimizer.step()
                scheduler.step()
                look()
                optimizer.zero_grad()
            accelerator.gather_for_metrics(batch)
            look()
        look()
    accelerator.save_state(f"{directory}/state")
    accelerator.wait_for_everyone()
    look()
    accelerator.load_state(f"{directory}/state")
    look()
    with accelerator.no_sync(model):
        look()
    accelerator.free_memory()
    look()
    accelerator.end_training()
    look()
    return points


def compare(recorded: dict[str, str | list[str]], directory: str) -> None:
    values = run(list(recorded), directory)
    differing = {}
    for name, expected in recorded.items():
        points = values[name]
        row = expected if isinstance(expected, list) else [expected] * len(points)
        if points != row:
            different = [
                pair for pair in zip(points, row, strict=True) if pair[0] != pair[1]
            ]
            differing[name] = different[0]
    assert not differing.keys() - ANOTHER.keys(), differing


def test_one_process(tmp_path: Path) -> None:
    compare(RECORDED["1 process"], str(tmp_path))


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_two_processes() -> None:
    with tempfile.TemporaryDirectory() as directory:
        box = [directory]
        dist.broadcast_object_list(box, 0)
        compare(RECORDED[f"rank {dist.get_rank()} of 2"], box[0])
        dist.barrier()


def test_states_of_a_launch_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_kit.utils import GradientAccumulationPlugin

    from trainer_kit.accelerator.launchers import debug_launcher

    assert not PartialState(cpu=True).fork_launched
    plugin = GradientAccumulationPlugin(
        num_steps=3, adjust_scheduler=False, sync_with_dataloader=False
    )
    state = Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_state
    assert state.plugin_kwargs == {
        "num_steps": 3,
        "adjust_scheduler": False,
        "sync_with_dataloader": False,
    }

    def check() -> None:
        accelerator = Accelerator(cpu=True)
        assert accelerator.fork_launched
        assert accelerator.should_save_model == accelerator.is_local_main_process

    debug_launcher(check, num_processes=2)
