"""No rank of a mesh holds more of a model than its part, not even for a moment."""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainer_kit as tk
from tests.parity.plain import case
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.strategies import MeshStrategy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(),
        reason="needs /proc to measure peaks",
    ),
]
MB = 2**20
BLOCKS, WIDTH = 12, 1024
SLACK = 16 * MB


class Large(tk.TrainModule):
    """Blocks of two matrices, of 8 MiB each where ``width`` is 1024: 192 MiB in all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        def block() -> nn.Module:
            ends = (
                nn.Linear(self.width, 2 * self.width),
                nn.Linear(2 * self.width, self.width),
            )
            return nn.Sequential(ends[0], nn.Tanh(), ends[1], nn.Tanh())

        self.net = nn.Sequential(*(block() for _ in range(BLOCKS)))

    def configure_parallel(self, mesh: Any) -> ParallelPlan:
        return ParallelPlan(tensor={"net.*.0": "colwise", "net.*.2": "rowwise"})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def memory(field: str) -> int:
    return (
        int(
            re.search(
                rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()
            ).group(1)
        )
        * 1024
    )  # type: ignore[union-attr]


def return_what_is_freed() -> None:
    """glibc keeps what is as large as what was freed before."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, MB)  # M_MMAP_THRESHOLD
    libc.malloc_trim(0)


class Peak:
    """How far this process has grown at most since it was made."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.start = memory("VmRSS")

    def __call__(self) -> int:
        return memory("VmHWM") - self.start


def run(axes: dict[str, int], width: int, path: str) -> list[int]:
    """The peaks of getting ready for a fit, and for one that takes up its checkpoint."""
    peaks: list[int] = []
    for start in (None, path):
        trainer = tk.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=MeshStrategy(**{"dp_shard": 1, **axes}),  # type: ignore[arg-type]
            max_steps=1 if start is None else 2,
            accumulate_grad_batches=2,
            barebones=True,
            seed=0,
        )
        module, peak = Large(width), Peak()
        module.on_train_start = lambda peak=peak: peaks.append(peak())  # type: ignore[method-assign, misc]
        trainer.fit(module, [torch.ones(2, width)] * 4, ckpt_path=start)
        if start is None:
            trainer.save_checkpoint(path)
        del trainer, module
    return peaks


def check(axes: dict[str, int], ranks: int) -> None:
    return_what_is_freed()
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    run(axes, 8, f"{box[0]}/small")  # what is imported and kept on the way
    built, resumed = run(axes, WIDTH, f"{box[0]}/large")
    layer = 4 * WIDTH * 2 * WIDTH
    whole = BLOCKS * 2 * layer
    mine = whole // ranks
    # The first rank has the weights to begin with, and lets go of them one by one.
    allowed = mine + (whole if dist.get_rank() == 0 else 2 * layer) + SLACK
    with case(
        axes=axes,
        rank=dist.get_rank(),
        built=built // MB,
        resumed=resumed // MB,
        whole=whole // MB,
    ):
        assert built < allowed
        # What is read, and the pages of the file that it is read from.
        assert resumed < max(allowed, 3 * mine + SLACK)
    dist.barrier()
    shutil.rmtree(box[0], ignore_errors=True)


@pytest.mark.world_size(2, timeout=240)
def test_two_ranks() -> None:
    check({"tp": 2}, 2)
    check({"pp": 2}, 2)


@pytest.mark.world_size(4, timeout=240)
def test_four_ranks() -> None:
    check({"dp_shard": 2, "tp": 2}, 4)
    check({"pp": 2, "tp": 2}, 4)
    check({"pp": 2, "dp_shard": 2}, 4)
