"""Training on torch_xla's CPU, on one device and on four, beside a plain loop on torch's: `make test-xla`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainer_kit as tk
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.errors import StrategyError

torch_xla = pytest.importorskip(
    "torch_xla", reason="torch_xla has an environment of its own: make test-xla"
)

from torch_xla.debug import metrics  # noqa: E402

from trainer_kit.strategies.xla.strategy import XLAStrategy  # noqa: E402

DEVICES = int(os.environ.get("CPU_NUM_DEVICES", "1"))
PARTS = [False] if DEVICES == 1 else [False, True]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("parts", PARTS)]


class Rows(Dataset[dict[str, Tensor]]):
    """46 rows: the last of six batches of eight is ragged."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(46, 16, generator=generator)
        self.y = torch.randint(0, 4, (46,), generator=generator)

    def __len__(self) -> int:
        return 46

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Net(tk.TrainModule):
    def __init__(self, dropout: float = 0.0, weighs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4)
        )
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch["x"])
        self.dtypes.add(logits.dtype)
        loss = nn.functional.cross_entropy(logits, batch["y"])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log(
            "accuracy", (self.net(batch["x"]).argmax(1) == batch["y"]).float().mean()
        )

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Tokens(Net):
    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["y"].sum() + 1


def rows() -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=8)


def trainer(parts: bool | None, root: Path, **options: Any) -> tk.Trainer:
    where: dict[str, Any] = (
        {"accelerator": "cpu"}
        if parts is None
        else {"strategy": XLAStrategy(shard_parameters=parts)}
    )
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return tk.Trainer(
        **{**where, **quiet, "max_epochs": 2, "default_root_dir": root, **options}
    )


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "accumulated", "clipped"])
@pytest.mark.parametrize("kind", [Net, Tokens])
def test_it_is_the_same_training(
    parts: bool, options: dict[str, Any], kind: type[Net], tmp_path: Path
) -> None:
    there, here = kind(), kind()
    run = trainer(parts, tmp_path / "xla", **options)
    run.fit(there, rows(), rows())
    plain = trainer(None, tmp_path / "cpu", **options)
    plain.fit(here, rows(), rows())
    assert all(p.device.type == "xla" for p in there.parameters())
    torch.testing.assert_close(weights(there), weights(here), rtol=1e-5, atol=1e-6)
    assert run.callback_metrics.keys() == plain.callback_metrics.keys()
    for name, value in plain.callback_metrics.items():
        torch.testing.assert_close(
            run.callback_metrics[name].cpu(), value, rtol=1e-5, atol=1e-6
        )


def test_a_step_is_compiled_once(parts: bool, tmp_path: Path) -> None:
    compiled: list[int] = []

    class Counts(tk.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.current_epoch > 0 and batch_idx > 1:
                compiled.append((metrics.metric_data("CompileTime") or (0,))[0])

    run = trainer(
        parts, tmp_path, max_epochs=3, callbacks=[Counts()], enable_checkpointing=False
    )
    run.fit(Net(), DataLoader(Rows(), batch_size=8, drop_last=True))
    assert len(compiled) == 6
    assert len(set(compiled)) == 1, "the rate changes each step, and no graph with it"


def test_evaluation_and_prediction(parts: bool, tmp_path: Path) -> None:
    run, plain = trainer(parts, tmp_path), trainer(None, tmp_path)
    (found,), (expected,) = run.validate(Net(), rows()), plain.validate(Net(), rows())
    assert found == pytest.approx(expected)
    there = torch.cat([part.cpu() for part in run.predict(Net(), rows())])
    here = torch.cat(list(plain.predict(Net(), rows())))
    assert there.shape == (46, 4)
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_ends_with_the_same_bits_and_any_engine_reads_its_state(
    parts: bool, tmp_path: Path
) -> None:
    whole = Net(dropout=0.3)
    tk.seed_everything(5)
    trainer(parts, tmp_path / "whole").fit(whole, rows())
    tk.seed_everything(5)
    trainer(parts, tmp_path / "part", max_steps=4).fit(Net(dropout=0.3), rows())
    (last,) = (tmp_path / "part").glob("checkpoints/*/manifest.json")
    resumed = Net(dropout=0.3)
    tk.seed_everything(6)
    trainer(parts, tmp_path / "rest").fit(resumed, rows(), ckpt_path=last.parent)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name
    state = read_checkpoint(last.parent)
    assert state["progress"]["step"] == 4
    assert {tensor.device.type for tensor in state["model"].values()} == {"cpu"}
    elsewhere = Net()
    plain = trainer(None, tmp_path / "cpu", max_epochs=1)
    plain.fit(elsewhere, rows(), ckpt_path=last.parent)
    assert plain.global_step == 6


@pytest.mark.parametrize(("word", "near"), [("bf16-true", 2e-2), ("64-true", 1e-8)])
def test_other_precisions(parts: bool, word: str, near: float, tmp_path: Path) -> None:
    there, here = Net(), Net()
    trainer(parts, tmp_path / "xla", precision=word).fit(there, rows())
    trainer(None, tmp_path / "cpu", precision=word).fit(here, rows())
    torch.testing.assert_close(weights(there), weights(here), rtol=0, atol=near)


@pytest.mark.parametrize("how", [True, {"regional": True}])
def test_compiling_twice_is_refused(parts: bool, how: Any, tmp_path: Path) -> None:
    module = Net()
    module.net = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))
    with pytest.raises(StrategyError, match="XLA always compiles the step"):
        trainer(parts, tmp_path, compile=how).fit(module, rows())


def test_mixed_precision_is_autocast(parts: bool, tmp_path: Path) -> None:
    there, here = Net(), Net()
    trainer(parts, tmp_path / "xla", precision="bf16-mixed").fit(there, rows())
    trainer(None, tmp_path / "cpu", precision="bf16-mixed").fit(here, rows())
    assert there.dtypes == {torch.bfloat16}
    assert {p.dtype for p in there.parameters()} == {torch.float32}
    torch.testing.assert_close(weights(there), weights(here), rtol=0, atol=2e-2)


def test_weights_and_their_momentum_are_on_the_device(
    parts: bool, tmp_path: Path
) -> None:
    module = Net()
    run = trainer(parts, tmp_path)
    run.fit(module, rows())
    spec = torch_xla._XLAC._get_xla_sharding_spec
    momenta = [state["momentum_buffer"] for state in run.optimizers[0].state.values()]
    assert len(momenta) == 4
    for tensor in [*module.parameters(), *momenta]:
        assert ("devices=[" in spec(tensor)) == parts, spec(tensor)
    said = run.strategy.describe()
    assert said == (
        "torch_xla, 1 process, one device each"
        if DEVICES == 1
        else f"torch_xla, one process for 4 devices{'; sharded weights' if parts else ''}"
    )
