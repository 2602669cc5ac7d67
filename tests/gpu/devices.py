"""Bodies that name no device: each runs on the CPU as an ordinary test, and on the accelerator where there is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from tests.ports import free_port

Batch = tuple[Tensor, Tensor]

# cuBLAS reads it when it is first used, and the hand-written loops here are the first to.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# The compiler would leave a pool of processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available(), reason="needs an accelerator"
        ),
    ],
)
on_each_device = pytest.mark.parametrize("kind", ["cpu", GPU])
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def device_of(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)


def batches(
    count: int = 7, size: int = 6, last: int = 3, width: int = 16
) -> list[Batch]:
    """On the host; the last window's batches differ in weight."""
    draw = torch.Generator().manual_seed(1)
    sizes = [size] * (count - 1) + [last]
    return [
        (torch.randn(n, width, generator=draw), torch.randint(4, (n,), generator=draw))
        for n in sizes
    ]


class Net(tk.TrainModule):
    """Blocks with a norm and noise, which is drawn on the device.

    No bias ahead of the norm: its gradient is rounding alone, and Adam would make steps of it.
    """

    def __init__(
        self, dropout: float = 0.1, configure: Callable[[nn.Module], Any] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(
                nn.Linear(16, 32, bias=False),
                nn.BatchNorm1d(32),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(32, 16),
            )
            for _ in range(2)
        ]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(16, 4)
        self.configure = configure
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        if self.configure is not None:
            return self.configure(self)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def by_hand(
    module: Any,
    data: Sequence[Batch],
    device: torch.device,
    *,
    epochs: int = 2,
    window: int = 2,
    clip: float | None = 0.5,
    autocast: torch.dtype | None = None,
    cast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """The loop as one writes it for this device: a window's loss is the mean over all of its samples."""
    module.to(device)
    optimizer = module.configure_optimizers()
    torch.manual_seed(5)
    for _ in range(epochs):
        for start in range(0, len(data), window):
            part = [
                (x.to(device, cast), y.to(device))
                for x, y in data[start : start + window]
            ]
            total = sum(len(y) for _, y in part)
            optimizer.zero_grad()
            for x, y in part:
                with (
                    torch.autocast(device.type, autocast) if autocast else nullcontext()
                ):
                    loss = module.loss((x, y))
                loss = loss if len(part) == 1 else loss * (len(y) / total)
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    return optimizer


def fit(module: Any, data: Any, kind: str, **options: Any) -> tk.Trainer:
    """The same training under a Trainer; ``gpu`` is the word for whatever accelerator is here."""
    start, seed = options.pop("ckpt_path", None), options.pop("seed_device", 5)
    if options.get("barebones", True):
        options["barebones"] = True
    else:
        options = {**QUIET, **options}
    trainer = tk.Trainer(
        accelerator="cpu" if kind == "cpu" else "gpu",
        devices=1,
        **{
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            **options,
        },
    )
    torch.manual_seed(seed)
    trainer.fit(module, data, ckpt_path=start)
    return trainer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """Equal in every bit."""
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    different = {
        n: float((left[n].float() - right[n].float()).abs().max())
        for n in left
        if not left[n].equal(right[n])
    }
    assert not different, different


@contextmanager
def deterministic() -> Iterator[None]:
    """For the loops by hand, in the place of ``Trainer(deterministic=True)``."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a launcher would have started it, alone; its group ends with it."""
    told = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_PORT": free_port(),
    }
    with monkeypatch.context() as patch:
        for name, value in {
            **told,
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }.items():
            patch.setenv(name, str(value))
        patch.setattr(sys, "excepthook", sys.excepthook)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
