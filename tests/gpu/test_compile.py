"""torch.compile on the device: the same losses, one compilation, and none more when the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from torch._dynamo.utils import counters

import trainer_kit as tk
from tests.gpu.devices import Net, batches, fit, on_each_device

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor"
    ),  # torch's compiler looks at it
    pytest.mark.filterwarnings(
        "ignore:TensorFloat32 tensor cores"
    ),  # its advice for such devices
]


class Plain(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class Losses(tk.Callback):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(outputs["loss"])

    def floats(self) -> list[float]:
        return [float(value) for value in self.values]


@on_each_device
@pytest.mark.parametrize("regional", [False, True])
def test_the_same_losses_and_one_compilation(
    kind: str, regional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tqdm.tqdm, "monitor_interval", 0
    )  # the compiler's bars would leave a thread
    # On the CPU graphs as the compiler makes them, without minutes of code generation.
    how: dict[str, Any] = {
        "backend": "aot_eager" if kind == "cpu" else "inductor",
        "regional": regional,
    }
    data = batches(6, last=6)  # as drop_last=True gives them
    module = Plain(dropout=0.0)
    kept = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)
    try:
        eager, compiled, resumed = Losses(), Losses(), Losses()
        fit(
            Plain(dropout=0.0),
            data,
            kind,
            callbacks=[eager],
            barebones=False,
            enable_checkpointing=False,
        )
        torch._dynamo.reset()
        counters.clear()
        fit(
            module, data, kind, compile=how, callbacks=[compiled, kept], barebones=False
        )
        graphs = counters["stats"]["unique_graphs"]
        # Blocks of a class share a graph, and so do epochs; only the first block's input needs no gradient.
        assert graphs == (2 if regional else 1)
        assert compiled.floats() == pytest.approx(eager.floats(), rel=1e-3, abs=1e-4)
        start = {
            "ckpt_path": tmp_path / "step-00000003",
            "enable_checkpointing": False,
            "barebones": False,
        }
        fit(module, data, kind, compile=how, callbacks=[resumed], **start)
        assert counters["stats"]["unique_graphs"] == graphs, (
            "what was compiled serves the run that goes on"
        )
        assert resumed.floats() == pytest.approx(compiled.floats()[6:], rel=1e-6)
    finally:
        torch._dynamo.reset()
        counters.clear()
