"""One process a device on XLA, against a recording stand-in: torch_xla's CPU cannot run several processes."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainer_kit as tk
from trainer_kit.build import choose_strategy
from trainer_kit.core.errors import ConfigurationError, LaunchError, StrategyError
from trainer_kit.launch import each_device
from trainer_kit.precision import make_precision
from trainer_kit.strategies.xla.strategy import XLAGroup, XLAStrategy


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch_xla as process 1 of 2 sees it; process 0 holds the same values plus one."""
    made: list[Any] = []

    def all_reduce(
        kind: str, tensors: list[Tensor], scale: float = 1.0
    ) -> list[Tensor]:
        made.append(("all_reduce", kind, len(tensors), scale))
        for tensor in tensors:
            other = tensor + 1
            together = {
                "sum": tensor + other,
                "min": torch.minimum(tensor, other),
                "max": torch.maximum(tensor, other),
            }
            tensor.copy_(together[kind] * scale)
        return tensors

    def rendezvous(tag: str, payload: bytes = b"") -> list[bytes]:
        made.append(("rendezvous", tag))
        asked = (
            tag == "broadcast" and pickle.loads(payload) is None
        )  # process 0 says it
        return [pickle.dumps(7) if asked else payload, payload]

    def all_gather(tensor: Tensor) -> Tensor:
        return torch.cat([tensor + 1, tensor])

    root, core, model, runtime = (
        ModuleType(f"torch_xla{name}")
        for name in ("", ".core", ".core.xla_model", ".runtime")
    )
    root.__spec__ = importlib.util.spec_from_loader("torch_xla", None)
    vars(root).update(
        core=core,
        launch=lambda run, args: run(1, *args),
        runtime=runtime,
        device=lambda: torch.device("cpu"),
        sync=lambda: made.append("sync"),
        _XLAC=type(
            "C", (), {"_xla_runtime_is_initialized": staticmethod(lambda: True)}
        ),
    )
    vars(core).update(xla_model=model)
    vars(model).update(
        all_reduce=all_reduce, rendezvous=rendezvous, all_gather=all_gather
    )
    vars(runtime).update(
        local_process_count=lambda: 2,
        world_size=lambda: 2,
        global_ordinal=lambda: 1,
        local_ordinal=lambda: 1,
    )
    for module in (root, core, model, runtime):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def started(**options: Any) -> XLAStrategy:
    strategy = XLAStrategy(**options)
    strategy.start()
    return strategy


def test_a_group_over_its_collectives(calls: list[Any]) -> None:
    group = XLAGroup()
    assert (group.rank, group.size) == (1, 2)
    for op, expected in (("sum", 5.0), ("mean", 2.5), ("min", 2.0), ("max", 3.0)):
        tensor = torch.tensor([2.0])
        assert group.all_reduce(tensor, op).item() == expected
        assert tensor.item() == expected
    with pytest.raises(ConfigurationError, match="unknown reduction 'product'"):
        group.all_reduce(torch.zeros(1), "product")
    assert group.all_gather(torch.tensor([1.0, 2.0])).tolist() == [
        [2.0, 3.0],
        [1.0, 2.0],
    ]
    assert group.all_gather_object({"a": (1, "b")}) == [{"a": (1, "b")}] * 2
    assert group.broadcast(torch.tensor([1.0])).tolist() == [2.0]
    assert group.broadcast({"run": 3}, source=1) == {"run": 3}
    assert group.agree([1.5, float("inf")]) == [[1.5, float("inf")]] * 2
    group.barrier()
    assert calls[-1] == ("rendezvous", "barrier")


def test_gradients_are_averaged_in_one_exchange_after_the_last_micro_batch(
    calls: list[Any],
) -> None:
    strategy, module = started(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    strategy.prepare_module(module, False, make_precision("32-true", "cpu"))
    assert strategy.gradient_divisor == strategy.data.size == 2
    calls.clear()

    class MicroBatches:
        count = 2

        def begin(self, index: int) -> None:
            calls.append(f"begin {index}")

        def forward(self, index: int) -> Tensor:
            return module[0](
                torch.ones(1, 2)
            ).sum()  # the second layer has no gradient here

        def backward(self, index: int, loss: Tensor) -> None:
            loss.backward()

        def end(self, index: int) -> None:
            calls.append(f"end {index}")

    strategy.forward_backward(MicroBatches())
    assert calls == [
        "begin 0",
        "end 0",
        "begin 1",
        "end 1",
        ("all_reduce", "sum", 4, 0.5),
    ]
    assert module[0].bias.grad is not None
    assert module[0].bias.grad.tolist() == [
        2.5,
        2.5,
    ]  # two micro-batches here; one more there: (2 + 3) / 2
    assert module[1].bias.grad is not None
    assert module[1].bias.grad.tolist() == [0.5]
    module[0].requires_grad_(False)
    module[0].zero_grad()
    module[0].weight.requires_grad_()  # what trains may change from step to step
    module[1].bias.requires_grad_(False)
    module[1].zero_grad()
    strategy.forward_backward(MicroBatches())
    assert [parameter.grad is not None for parameter in module.parameters()] == [
        True,
        False,
        True,
        False,
    ]
    module.requires_grad_(False)
    strategy.prepare_module(module, False, make_precision("32-true", "cpu"))
    module.requires_grad_()
    calls.clear()
    strategy.forward_backward(MicroBatches())
    assert calls[-1] == ("all_reduce", "sum", 4, 0.5)
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    calls.clear()
    strategy.bind_step(optimizer)()
    assert calls == ["sync"]
    assert strategy.describe() == "torch_xla, 2 processes, one device each"


def test_a_loop_of_the_user_s_own(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_RANK", "1")  # as torch_xla.launch has it
    accelerator = tk.Accelerator(gradient_accumulation_steps=2)
    assert (
        accelerator.process_index,
        accelerator.local_process_index,
        accelerator.num_processes,
    ) == (1, 1, 2)
    assert (accelerator.distributed_type, accelerator.backend) == (
        tk.DistributedType.XLA,
        "cpu",
    )
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader([torch.ones(2)] * 12, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    calls.clear()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                calls.append(
                    round(
                        float(accelerator.clip_grad_norm_(model.parameters(), 100.0)), 3
                    )
                )
            optimizer.step()
            optimizer.zero_grad()
        calls.append("batch")
    # Over there a gradient is one more. The norm is of the averages, sqrt(3 * 1.5 ** 2), and nothing is averaged twice;
    # the second window is of one batch, whose gradient, half of it, is corrected behind the exchange.
    exchanged = ("all_reduce", "sum", 2, 0.5)
    assert calls == [
        "batch",
        exchanged,
        2.598,
        "sync",
        "batch",
        "sync",
        exchanged,
        3.464,
        "sync",
        "batch",
        "sync",
    ]
    with (
        pytest.raises(ConfigurationError, match="every step needs all processes"),
        accelerator.join_uneven_inputs([model]),
    ):
        pass


def test_a_script_in_a_process_for_each_device(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys; print(__name__, sys.argv, os.environ['RANK'], os.environ['WORLD_SIZE'])"
    )
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for told, ran in (("2", True), ("4", False)):
        monkeypatch.setenv("TRAINER_KIT_NUM_PROCESSES", told)
        out = StringIO()
        with (
            redirect_stdout(out),
            nullcontext()
            if ran
            else pytest.raises(LaunchError, match="for each device"),
        ):
            each_device.main([str(script), "--lr", "1"])
        assert out.getvalue() == (
            f"__main__ {[str(script), '--lr', '1']} 1 2\n" if ran else ""
        )


def test_options_unsupported_on_several_processes_are_refused_before_the_first_step(
    calls: list[Any],
) -> None:
    with pytest.raises(StrategyError, match="sharded weights need one process"):
        started(shard_parameters=True)
    with pytest.raises(StrategyError, match="sharded weights need one process"):
        XLAStrategy(shard_parameters=True, spmd=False)
    with pytest.raises(StrategyError, match="manual optimization on XLA"):
        started().prepare_module(
            nn.Linear(1, 1), True, make_precision("32-true", "cpu")
        )


@pytest.mark.parametrize(
    ("strategy", "accelerator"),
    [("xla", "auto"), ("auto", "tpu"), (XLAStrategy(), "auto")],
)
def test_without_torch_xla_the_error_names_it(
    strategy: Any, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_kit.core.environment import Environment

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StrategyError, match="torch_xla is not installed"):
        choose_strategy(strategy, accelerator, "auto", 1, Environment.detect({}))
