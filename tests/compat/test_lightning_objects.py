"""Lightning's accelerators, registries, checkpoint files, throughput and parsing, by their effect."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_kit.accelerators import (  # type: ignore[import-not-found]
    Accelerator,
    AcceleratorRegistry,
    CPUAccelerator,
    CUDAAccelerator,
    find_usable_cuda_devices,
)
from trainer_kit.plugins.io import CheckpointIO, TorchCheckpointIO  # type: ignore[import-not-found]

import trainer_kit as tk
from trainer_kit import ConfigurationError, Trainer, seed_everything
from trainer_kit.checkpoint.weights import read_weights
from trainer_kit.compat.fabric_names import (
    convert_zero_checkpoint_to_fp32_state_dict,
    lazy_load,
)
from trainer_kit.compat.lightning_parsing import (
    clean_namespace,
    collect_init_args,
    get_init_args,
)
from trainer_kit.compat.throughput import Throughput, ThroughputMonitor
from trainer_kit.core.seed import reset_seed
from trainer_kit.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry  # type: ignore[attr-defined]
from trainer_kit.testing import TinyModule


def _trainer(**options: Any) -> Trainer:
    return Trainer(
        **{
            "max_epochs": 1,
            "barebones": True,
            "accelerator": "cpu",
            "devices": 1,
            **options,
        }
    )


def test_the_trainer_takes_an_accelerator_object_and_has_one() -> None:
    trainer = _trainer(accelerator=CPUAccelerator())
    trainer.fit(TinyModule(), [torch.ones(2, 32)])
    assert isinstance(trainer.accelerator, CPUAccelerator)
    assert isinstance(trainer.accelerator, Accelerator)
    assert trainer.accelerator.get_parallel_devices(2) == [trainer.strategy.device] * 2
    assert trainer.arguments["accelerator"] == "cpu"


def test_accelerators_count_the_devices_of_the_machine() -> None:
    count = torch.cuda.device_count()
    assert (CUDAAccelerator.is_available(), CUDAAccelerator.auto_device_count()) == (
        count > 0,
        count,
    )
    assert CUDAAccelerator.parse_devices("0, 2") == [0, 2]
    assert CUDAAccelerator.parse_devices(2) == [0, 1]
    assert CUDAAccelerator.get_parallel_devices([1]) == [torch.device("cuda", 1)]
    assert len(find_usable_cuda_devices()) <= count
    with pytest.raises(ConfigurationError, match="fewer usable CUDA devices"):
        find_usable_cuda_devices(count + 1)
    with pytest.raises(ConfigurationError, match="drives devices of type cuda"):
        CUDAAccelerator().setup_device(torch.device("cpu"))


def test_an_accelerator_of_the_user_is_refused_with_what_to_write() -> None:
    class Own(CPUAccelerator):  # type: ignore[misc]
        pass

    with pytest.raises(
        ConfigurationError, match=r"(?s)accelerator=Own\(\).*device type of torch"
    ):
        _trainer(accelerator=Own())
    with pytest.raises(ConfigurationError, match="accelerators cannot be registered"):
        AcceleratorRegistry.register("own", Own)
    assert isinstance(AcceleratorRegistry.get("cuda"), CUDAAccelerator)
    with pytest.raises(KeyError, match="no accelerator is called"):
        AcceleratorRegistry.get("cdua")


def test_a_registered_strategy_is_a_word_of_the_trainer() -> None:
    @StrategyRegistry.register("registered_for_a_test", description="one device")
    class Own(SingleDeviceStrategy):  # type: ignore[misc, unused-ignore]
        pass

    assert "registered_for_a_test" in StrategyRegistry.available_strategies()
    trainer = _trainer(strategy="registered_for_a_test")
    trainer.fit(TinyModule(), [torch.ones(2, 32)])
    assert type(trainer.strategy) is Own
    assert isinstance(
        StrategyRegistry.get("ddp_find_unused_parameters_true"), DDPStrategy
    )
    with pytest.raises(KeyError, match="no strategy is called"):
        StrategyRegistry.get("no_such_strategy")


def test_a_checkpoint_file_is_written_read_and_removed(tmp_path: Path) -> None:
    path, plugin = tmp_path / "below" / "model.ckpt", TorchCheckpointIO()
    plugin.save_checkpoint({"state_dict": {"w": torch.arange(3)}, "epoch": 2}, path)
    assert torch.load(path, weights_only=True)["epoch"] == 2
    assert plugin.load_checkpoint(path)["state_dict"]["w"].tolist() == [0, 1, 2]
    assert lazy_load(path)["state_dict"]["w"].sum() == 3
    plugin.remove_checkpoint(path)
    assert not path.exists()
    plugin.remove_checkpoint(path)
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, path, storage_options={"a": 1})


def test_a_checkpoint_plugin_is_refused_with_what_to_write() -> None:
    class Own(TorchCheckpointIO):  # type: ignore[misc]
        pass

    assert issubclass(Own, CheckpointIO)
    with pytest.raises(
        ConfigurationError, match=r"(?s)plugins=Own\(\).*on_checkpoint_committed"
    ):
        _trainer(plugins=[Own()])


def test_weights_of_a_checkpoint_directory_become_one_float32_file(
    tmp_path: Path,
) -> None:
    trainer, module = (
        _trainer(barebones=False, logger=False, enable_progress_bar=False),
        TinyModule(),
    )
    trainer.fit(module, [torch.ones(2, 32)])
    trainer.save_checkpoint(tmp_path / "saved")
    state = convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "saved", tmp_path / "whole.pt"
    )
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert (
        whole["hyper_parameters"] == state["hyper_parameters"] == dict(module.hparams)
    )
    for name, value in read_weights(tmp_path / "saved").items():
        assert whole["state_dict"][name].dtype is torch.float32
        assert torch.equal(whole["state_dict"][name], value)
    assert (
        type(module).load_from_checkpoint(tmp_path / "whole.pt").hparams
        == module.hparams
    )


def test_reset_seed_repeats_the_last_seed() -> None:
    seed_everything(5)
    first = torch.rand(3)
    torch.rand(7)
    reset_seed()
    assert torch.equal(torch.rand(3), first)


def test_rates_over_a_window() -> None:
    throughput = Throughput(available_flops=1e3, world_size=2, window_size=3)
    for count in range(1, 5):
        throughput.update(
            time=count * 0.5,
            batches=count,
            samples=4 * count,
            lengths=8 * count,
            flops=50,
        )
    values = throughput.compute()
    assert values == {
        "time": 2.0,
        "batches": 4,
        "samples": 16,
        "lengths": 32,
        "device/batches_per_sec": 2.0,
        "batches_per_sec": 4.0,
        "device/samples_per_sec": 8.0,
        "samples_per_sec": 16.0,
        "device/items_per_sec": 16.0,
        "items_per_sec": 32.0,
        "device/flops_per_sec": 100.0,
        "flops_per_sec": 200.0,
        "device/mfu": 0.1,
    }
    with pytest.raises(ConfigurationError, match="totals since the loop began"):
        throughput.update(time=1.0, batches=5, samples=20, lengths=40)
    throughput.reset()
    with pytest.raises(ConfigurationError, match="nothing to compute"):
        throughput.compute()


def test_the_monitor_logs_through_its_fabric() -> None:
    class Logger:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def log_metrics(
            self, metrics: dict[str, float], step: int | None = None
        ) -> None:
            self.rows.append((metrics, step))

    logger = Logger()
    monitor = ThroughputMonitor(
        tk.Fabric(accelerator="cpu", devices=1, loggers=logger), window_size=2
    )
    for count in (1, 2):
        monitor.update(time=float(count), batches=count, samples=3 * count)
    assert monitor.compute_and_log(step=7)["device/samples_per_sec"] == 3.0
    assert logger.rows == [(monitor.compute(), 7)]


def test_arguments_of_constructors() -> None:
    class Parent:
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.collected = collect_init_args(inspect.currentframe(), [])  # type: ignore[arg-type]

    class Child(Parent):
        def __init__(
            self, width: int, *rest: int, act: str = "relu", **options: int
        ) -> None:
            self.arguments = get_init_args(inspect.currentframe())  # type: ignore[arg-type]
            super().__init__(depth=3)

    child = Child(8, act="gelu", heads=2)
    assert child.arguments == {"width": 8, "act": "gelu", "heads": 2}
    assert child.collected == [{"depth": 3}, {"width": 8, "act": "gelu", "heads": 2}]
    hparams = {"lr": 0.1, "act": lambda x: x}
    with pytest.warns(UserWarning, match="'act' is removed"):
        clean_namespace(hparams)
    assert hparams == {"lr": 0.1}


def test_the_log_directory_without_a_logger_is_the_root(tmp_path: Path) -> None:
    trainer = _trainer(default_root_dir=tmp_path)
    assert trainer.log_dir == str(tmp_path)
    with pytest.raises(AttributeError, match=r"trainer\.lr_scheduler_configs"):
        _ = trainer.lr_schedulers


def test_layers_on_meta_are_initialized() -> None:
    from trainer_kit.compat.fabric_names import materialize_meta_tensors

    net = nn.Sequential(
        nn.Linear(2, 3, device="meta"), nn.BatchNorm1d(3, device="meta")
    )
    materialize_meta_tensors(net, torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in net.state_dict().values())
    assert net[1].running_var.tolist() == [1, 1, 1]
