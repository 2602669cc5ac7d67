"""What the monitors log of real fits: rates, FLOPs, and parts of the time that add up."""

from __future__ import annotations

import time

import pytest
import torch

from tests.callbacks.fits import BATCH, Scripted, fit, trainer
from trainer_kit import TrainModule
from trainer_kit.callbacks import (
    Callback,
    DeviceStatsMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
)
from trainer_kit.callbacks.monitors import SECTIONS, find_straggler
from trainer_kit.core.device_table import device_peak
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule


class Slow(Scripted):
    """Each part takes a time of its own."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        time.sleep(0.01)
        loss.backward()

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        time.sleep(0.015)
        optimizer.step(closure)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.04)

    def on_save_checkpoint(self, checkpoint):
        time.sleep(0.03)


class Batches:
    def __len__(self):
        return 4

    def __iter__(self):
        for _ in range(4):
            time.sleep(0.005)
            yield BATCH


class Wall(Callback):
    """The time of training by another clock; between the monitor's own first and last hook."""

    order = "late"

    def on_train_start(self, trainer, module):
        self.began = time.perf_counter()

    def on_train_end(self, trainer, module):
        self.seconds = time.perf_counter() - self.began


def test_the_parts_of_the_time_add_up(tmp_path):
    wall, monitor, keeper = (
        Wall(),
        ThroughputMonitor(),
        ModelCheckpoint(tmp_path, every_n_train_steps=2),
    )
    made = trainer(
        monitor, wall, keeper, max_epochs=2, log_every_n_steps=4, async_save=False
    )
    made.fit(Slow(), Batches(), [BATCH])
    split = monitor.time_split()
    assert tuple(split) == SECTIONS
    assert sum(split.values()) == pytest.approx(wall.seconds, rel=0.01)
    least = {
        "data": 0.02,
        "forward": 0.16,
        "backward": 0.08,
        "step": 0.12,
        "validation": 0.08,
        "checkpoint": 0.06,
    }
    for name, seconds in least.items():
        assert split[name] >= 0.95 * seconds, (name, split)
    step, values = made.logged[-1]
    assert step == 8
    parts = [values[f"train/time/{name}"] for name in SECTIONS]
    assert sum(parts) == pytest.approx(1.0)
    assert values["train/goodput"] == pytest.approx(sum(parts[1:5]))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_changes_no_bit_and_counts_flops(accumulate):
    def weights(*callbacks):
        torch.manual_seed(0)
        module = TinyModule()
        made = trainer(
            *callbacks,
            max_epochs=2,
            log_every_n_steps=1,
            accumulate_grad_batches=accumulate,
        )
        made.fit(
            module,
            list(torch.randn(7, 4, 32, generator=torch.Generator().manual_seed(1))),
        )
        return made, module.layer.weight

    made, ours = weights(ThroughputMonitor(peak_flops=1e9))
    _, plain = weights()
    assert torch.equal(ours, plain)
    values = {
        name: value for _, logged in made.logged for name, value in logged.items()
    }
    rate = values["train/device/batches_per_sec"]
    # 4 samples through 32 → 2: a product forward, and one for the gradient of the weight.
    assert values["train/device/flops_per_sec"] == pytest.approx(
        rate * 2 * (2 * 4 * 32 * 2)
    )
    assert values["train/device/mfu"] == pytest.approx(
        values["train/device/flops_per_sec"] / 1e9
    )
    assert values["train/global/samples_per_sec"] == pytest.approx(4 * rate)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_flops_of_several_backward_passes():
    """Manual optimization: only the first of the two was counted."""

    class Two(TinyModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.other = False, torch.nn.Linear(32, 2)

        def training_step(self, batch, batch_idx):
            for layer, optimizer in zip(
                (self.layer, self.other), self.optimizers(), strict=True
            ):
                optimizer.zero_grad()
                self.manual_backward(layer(batch).pow(2).sum())
                optimizer.step()

        def configure_optimizers(self):
            return [
                torch.optim.SGD(layer.parameters(), lr=0.1)
                for layer in (self.layer, self.other)
            ]

    made = trainer(ThroughputMonitor(), max_epochs=1, log_every_n_steps=2)
    made.fit(Two(), [BATCH] * 4)
    values = made.logged[-1][1]
    one = 2 * (2 * len(BATCH) * 32 * 2)
    assert values["train/device/flops_per_sec"] == pytest.approx(
        2 * one * values["train/device/batches_per_sec"]
    )


def test_tokens_and_the_users_own_counts():
    own = ThroughputMonitor(
        lambda batch: len(batch) // 2, lambda batch: 5, flops_per_batch=1e6
    )
    values = fit(own, batches=4, tokens=3, log_every_n_steps=2).logged[-1][1]
    rate = values["train/global/batches_per_sec"]
    for name, count in (("samples", 1), ("items", 5), ("tokens", 3)):
        assert values[f"train/global/{name}_per_sec"] == pytest.approx(count * rate)
    assert values["train/device/flops_per_sec"] == pytest.approx(1e6 * rate)
    assert "train/device/mfu" not in values, "nothing is known of this CPU"


def test_time_of_before_a_restart_counts(tmp_path):
    first, second = ThroughputMonitor(), ThroughputMonitor()
    fit(first, batches=4).save_checkpoint(tmp_path / "four")
    before = first.time_split()
    fit(second, batches=4, epochs=2, ckpt_path=tmp_path / "four")
    assert all(
        second.time_split()[name] >= before[name]
        for name in ("data", "forward", "backward", "step")
    )
    fit(second, batches=1)
    assert second.time_split()["forward"] < before["forward"], (
        "a new fit starts at zero"
    )


def test_an_exception_removes_the_flop_counter():
    class Fails(TrainModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(32, 1)

        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise ValueError("stop here")
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="stop here"):
        trainer(ThroughputMonitor(), max_epochs=1).fit(Fails(), [BATCH] * 3)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_memory_of_this_process():
    made = fit(DeviceStatsMonitor(), batches=4, log_every_n_steps=2)
    assert [step for step, _ in made.logged] == [2, 4]
    values = made.logged[-1][1]
    assert values["cpu/memory_peak"] >= values["cpu/memory"] > 50e6
    assert values["cpu/percent"] > 0
    assert (
        fit(DeviceStatsMonitor(cpu_stats=False), batches=2, log_every_n_steps=1).logged
        == []
    )


def test_peaks_of_devices():
    assert device_peak("NVIDIA A100-SXM4-80GB", "16-mixed") == 312e12
    assert device_peak("NVIDIA H100 PCIe", "bf16-true") == 756e12
    assert device_peak("NVIDIA GeForce RTX 4090", "32-true") == 82.6e12
    assert device_peak("Tesla T4", "64-true") is None
    assert device_peak("NVIDIA L4", "bf16-mixed") == 121e12
    assert device_peak("Tesla V100-PCIE-32GB", "16-mixed") == 112e12
    assert device_peak("Tesla V100-SXM2-16GB", "bf16-mixed") is None, "it has no bf16"
    assert device_peak("NVIDIA H200 NVL", "bf16-mixed") == 835e12
    assert device_peak("NVIDIA GB200", "bf16-mixed") == 2500e12
    assert device_peak("AMD Instinct MI250X", "bf16-mixed") == 191.5e12, (
        "a device is half of a card"
    )
    for other in (
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
    ):
        assert device_peak(other, "16-mixed") is None
    assert device_peak("NVIDIA GeForce RTX 3090 Ti", "16-mixed") == 80e12
    assert device_peak("NVIDIA H100 80GB HBM3", "transformer-engine") is None
    with pytest.raises(ConfigurationError, match="peak_flops=0"):
        ThroughputMonitor(peak_flops=0)


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rates_are_of_all_ranks(strategy):
    monitors = ThroughputMonitor(lambda batch: 7), DeviceStatsMonitor()
    made = trainer(
        *monitors, max_epochs=1, log_every_n_steps=2, devices=2, strategy=strategy
    )
    made.fit(TinyModule(), [BATCH] * 8)
    logged = {
        name: value for _, values in made.logged for name, value in values.items()
    }
    assert logged["train/global/samples_per_sec"] == pytest.approx(
        7 * logged["train/global/batches_per_sec"]
    )
    assert logged["train/device/batches_per_sec"] == pytest.approx(
        logged["train/global/batches_per_sec"] / 2
    )
    assert logged["train/device/flops_per_sec"] > 0
    assert logged["cpu/memory"] > 50e6


def test_a_waiting_rank_is_not_a_straggler():
    fast, slow = (
        [0.1, 1, 5, 0, 0, 0, 0, 0],
        [4.1, 1, 1, 0, 0, 0, 0, 0],
    )  # the fast ones wait in backward
    assert find_straggler([fast, slow])[:2] == (1, "data")
    assert find_straggler([fast, fast, slow, fast])[:2] == (2, "data")
    late = [
        0.1,
        5,
        1,
        0,
        0,
        3,
        0,
        0,
    ]  # callbacks come after the exchange, so that the others wait in the next forward
    assert find_straggler([[0.1, 8, 1, 0, 0, 0, 0, 0], late])[:2] == (1, "callbacks")
    assert find_straggler([[1.0] * 8] * 4) is None
    assert find_straggler([[1.0] * 8]) is None
    assert (
        find_straggler([[0.001, 1, 1, 0, 0, 0, 0, 0], [0.01, 1, 1, 0, 0, 0, 0, 0]])
        is None
    ), "too small to matter"
    late = [[0.001, 0.01, 0.01, 0, 0, 0, 0, 0], [0.011, 0.01, 0.01, 0, 0, 0, 0, 0]]
    assert find_straggler(late) is None, (
        "10 ms in a logging interval of 20 ms: one turn of another process"
    )
    assert find_straggler([[100 * part for part in row] for row in late])[:2] == (
        1,
        "data",
    )


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_is_slow_to_read_data_is_named(strategy):
    """By a clock that only reading data moves, so that the load of the machine does not matter."""
    now = [0.0]

    class SlowData(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            now[0] += (
                0.02 if index % 4 >= 2 else 0.002
            )  # the second half of a global batch: rank 1
            return torch.ones(32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_kit.callbacks.monitors.perf_counter", lambda: now[0])
        made = trainer(
            ThroughputMonitor(),
            max_epochs=1,
            log_every_n_steps=4,
            devices=2,
            strategy=strategy,
        )
        made.fit(TinyModule(), torch.utils.data.DataLoader(SlowData(), batch_size=2))
    lines = [line for line in made.printed if line.startswith("straggler")]
    if made.global_rank == 0:
        assert lines == [
            "straggler: rank 1, data: 0.16 s, 10.0 times the median of the ranks"
        ]
    else:
        assert lines == []
