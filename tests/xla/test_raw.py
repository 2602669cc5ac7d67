"""Loops of the user's own on torch_xla's CPU, on one device and on four, beside torch's: `make test-xla`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.checkpoint.read import read_checkpoint

torch_xla = pytest.importorskip(
    "torch_xla", reason="torch_xla has an environment of its own: make test-xla"
)

from torch_xla.debug import metrics  # noqa: E402

pytestmark = pytest.mark.slow
DEVICES = int(os.environ.get("CPU_NUM_DEVICES", "1"))


def rows(count: int = 46) -> DataLoader[Any]:
    """Of the batches of eight that they make, the last one is ragged."""
    generator = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(
            torch.randn(count, 16, generator=generator),
            torch.randint(0, 4, (count,), generator=generator),
        ),
        batch_size=8,
        shuffle=True,
    )


def made(xla: bool, **options: Any) -> tk.Accelerator:
    with pytest.MonkeyPatch.context() as patch:
        if xla:
            patch.setenv("TRAINER_KIT_DISTRIBUTED_TYPE", "XLA")
        return tk.Accelerator(cpu=not xla, seed=0, **options)


def prepared(accelerator: tk.Accelerator, loader: Any = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return accelerator.prepare(
        model, optimizer, rows() if loader is None else loader, scheduler
    )


def epoch(
    accelerator: tk.Accelerator, things: Any, tokens: bool = False, each: Any = None
) -> list[Tensor | None]:
    model, optimizer, loader, scheduler = things
    norms = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y, reduction="sum" if tokens else "mean")
            accelerator.backward(loss, weight=len(y) if tokens else None)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.2))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if each is not None:
            each()
    return norms


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("tokens", [False, True])
def test_it_is_the_same_loop(tokens: bool, tmp_path: Path) -> None:
    there, here = (
        made(True, gradient_accumulation_steps=2),
        made(False, gradient_accumulation_steps=2),
    )
    assert there.distributed_type == tk.DistributedType.XLA
    assert (there.device.type, there.num_processes, there.is_main_process) == (
        "xla",
        1,
        True,
    )
    mine, theirs = prepared(there), prepared(here)
    assert all(
        p.device.type == "xla"
        for group in mine[1].param_groups
        for p in group["params"]
    )
    norms = list(
        zip(epoch(there, mine, tokens), epoch(here, theirs, tokens), strict=True)
    )
    assert sum(one is not None for one, _ in norms) == 3
    for one, other in norms:
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.cpu(), other)
    torch.testing.assert_close(
        weights(mine[0]), weights(theirs[0]), rtol=1e-5, atol=1e-6
    )

    # A state of it, in the middle of an epoch, in one process of the host; and back.
    there.save_state(tmp_path / "state")
    assert {
        tensor.device.type
        for tensor in read_checkpoint(tmp_path / "state")["model"].values()
    } == {"cpu"}
    there.save_model(mine[0], tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    epoch(here, theirs, tokens)
    ended = weights(theirs[0])
    for xla in (False, True):
        other = made(xla, gradient_accumulation_steps=2)
        things = prepared(other)
        other.load_state(tmp_path / "state")
        epoch(other, things, tokens)
        torch.testing.assert_close(weights(things[0]), ended, rtol=1e-5, atol=1e-6)


def test_graphs_end_at_the_expected_points() -> None:
    """One graph a step, the same one each time; evaluation compiles one too, for all of its batches."""
    accelerator = made(True, gradient_accumulation_steps=2)
    things = prepared(accelerator, rows(48))
    compiled: list[int] = []

    def count() -> None:
        compiled.append((metrics.metric_data("CompileTime") or (0,))[0])

    epoch(accelerator, things)
    epoch(accelerator, things, each=count)
    assert len(compiled) == 6
    assert len(set(compiled)) == 1
    model, right = things[0].eval(), []
    compiled.clear()
    with torch.no_grad():
        for x, y in accelerator.prepare(rows(48)):
            count()
            right.append(
                accelerator.gather_for_metrics((model(x).argmax(1) == y).float().mean())
            )
    assert len(set(compiled[2:])) == 1
    assert 0 <= float(torch.stack(right).mean().cpu()) <= 1


SCRIPT = """
import torch, trainer_kit as tk
accelerator = tk.Accelerator()
model, optimizer = torch.nn.Linear(2, 1), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(4, 2, device=accelerator.device)).mean())
optimizer.step()
print("trained on", next(model.parameters()).device.type, accelerator.mixed_precision, tk.PartialState().device.type)
print(accelerator.strategy.describe())
"""


def test_the_launcher_starts_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tpu.yaml").write_text(
        "distributed_type: TPU\nmixed_precision: bf16\nnum_processes: 1\ntpu_env: [A=1]\n"
    )
    command = [
        sys.executable,
        "-m",
        "trainer_kit",
        "launch",
        "--config_file",
        "tpu.yaml",
        "train.py",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "trained on xla bf16 xla" in done.stdout
    devices = (
        "one process for 4 devices" if DEVICES == 4 else "1 process, one device each"
    )
    assert devices in done.stdout
