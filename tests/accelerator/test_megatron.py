"""An Accelerator on Megatron: against a stand-in that trains, beside DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import make_batches, merged
from tests.strategies.megatron_stand_in import Model, install
from trainer_kit.checkpoint import read_weights
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.testing.conformance import assert_same

SAMPLES = TensorDataset(*merged(make_batches(1, size=35)))


def made(megatron: bool, **options: Any) -> tk.Accelerator:
    engine = {"megatron_lm_plugin": tk.MegatronLMPlugin(**options)} if megatron else {}
    return tk.Accelerator(cpu=True, gradient_accumulation_steps=2, seed=0, **engine)


def prepared(accelerator: tk.Accelerator, adam: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9
    )
    if adam:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.05, eps=1e-2, weight_decay=0.1
        )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accelerator.prepare(
        model, optimizer, DataLoader(SAMPLES, batch_size=3), scheduler
    )


def loop(
    accelerator: tk.Accelerator, things: Any, clip: float | None, tokens: bool = False
) -> tuple[Any, list[Tensor]]:
    """An epoch of six batches, the last one of fewer samples; and the norms of gradients."""
    model, optimizer, loader, scheduler = things
    norms: list[Tensor] = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y, reduction="sum" if tokens else "mean")
            accelerator.backward(loss, weight=len(y) + int(y.sum()) if tokens else None)
            if accelerator.sync_gradients and clip is not None:
                norms += [
                    accelerator.clip_grad_norm_(model.parameters(), limit, p)
                    for limit, p in ((1e9, "inf"), (clip, 2))
                ]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).state_dict(), norms


def weights(state: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_it_trains_and_saves_as_ddp_does(tmp_path: Path) -> None:
    ddp = made(False)
    things = prepared(ddp)
    first, norms = loop(ddp, things, 0.1)
    first = weights(first)
    ddp.save_state(tmp_path / "ddp")
    second = weights(loop(ddp, things, 0.2)[0])
    third = weights(loop(ddp, things, 0.2, tokens=True)[0])

    calls = install()
    accelerator = made(True, gradient_clipping=0.2)  # at each step, by itself
    assert accelerator.distributed_type == tk.DistributedType.MEGATRON_LM
    assert "Megatron on cpu" in accelerator.explain()
    things = prepared(accelerator)
    assert things[0] is accelerator.unwrap_model(things[0])
    own, own_norms = loop(accelerator, things, 0.1)
    assert_same(own, first, 1e-5)
    torch.testing.assert_close(own_norms, norms)
    steps = [call for call in calls if call[0] == "step"]
    assert [said[2] for said in steps] == pytest.approx(
        [0.1, 0.05, 0.025]
    )  # the scheduler's, on two processes
    assert sum(call[0] == "finalize" for call in calls) == len(steps) == 3
    assert not any(call[0] == "schedule" for call in calls)
    accelerator.save_state(tmp_path / "megatron")
    assert_same(loop(accelerator, things, None)[0], second, 1e-5)
    assert_same(loop(accelerator, things, None, tokens=True)[0], third, 1e-5)
    with pytest.raises(StrategyError, match="Megatron trains one model"):
        accelerator.prepare(Model())
    with pytest.raises(StrategyError, match="without a closure"):
        things[1].step(lambda: 0.0)
    accelerator.clear()

    # Moments and all, from one into the other and back; Megatron by the launcher's word.
    for path, megatron in (("ddp", True), ("megatron", False), ("megatron", True)):
        with pytest.MonkeyPatch.context() as patch:
            if megatron:
                patch.setenv("TRAINER_KIT_DISTRIBUTED_TYPE", "MEGATRON_LM")
            other = made(False)
        assert other.strategy.name == ("megatron" if megatron else "ddp")
        things = prepared(other)
        other.load_state(tmp_path / path)
        assert_same(loop(other, things, 0.2)[0], second, 1e-5)
        other.clear()

    # A data rank steps, and has gradients of, a part only: norms are those of the whole.
    ddp = made(False)
    things = prepared(ddp, adam=True)
    first, norms = loop(ddp, things, 0.1)
    first = weights(first)
    second = weights(loop(ddp, things, 0.2, tokens=True)[0])
    divided = made(True, use_distributed_optimizer=True)
    things = prepared(divided, adam=True)
    own, own_norms = loop(divided, things, 0.1)
    assert_same(own, first, 1e-5)
    torch.testing.assert_close(own_norms, norms, check_dtype=False)
    divided.save_state(tmp_path / "divided")
    assert_same(loop(divided, things, 0.2, tokens=True)[0], second, 1e-5)
    divided.clear()
    divided = made(True, use_distributed_optimizer=True)
    things = prepared(divided, adam=True)
    divided.load_state(tmp_path / "divided")
    assert_same(loop(divided, things, 0.2, tokens=True)[0], second, 1e-5)
    divided.clear()

    # Weights of which tensor ranks have parts are whole where they are handed out.
    both, rank = made(True, tp_degree=2), torch.distributed.get_rank()
    model, whole = Model(tensor_model_parallel_size=2), Model().state_dict()
    for value in whole.values():
        torch.distributed.broadcast(value, 0)
    model.load_state_dict(whole)
    part: Any = torch.nn.Parameter(whole["up.weight"].chunk(2)[rank].clone())
    part.tensor_model_parallel, part.partition_dim = True, 0
    model.up.weight = part
    model = both.prepare(model)
    both.save_model(model, tmp_path / "weights")
    if rank == 0:
        assert_same(read_weights(tmp_path / "weights"), whole, 0.0)


def test_options_set_elsewhere_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for options, told in (
        ({"pp_degree": 2}, "megatron_lm_pp_degree.*MeshStrategy"),
        (
            {"use_precision_aware_optimizer": True},
            "megatron_lm_use_precision_aware_optimizer",
        ),
        ({"num_micro_batches": 4}, "gradient_accumulation_steps"),
        ({"expert_model_parallel_size": 2}, "experts are not supported yet"),
        ({"recompute_activations": True}, "TransformerConfig"),
        (
            {"lr_warmup_iters": 10},
            "lr_warmup_iters is an option of Megatron-LM's own training script",
        ),
    ):
        with pytest.raises(ConfigurationError, match=f"(?s){told}"):
            tk.MegatronLMPlugin(**options)
    with pytest.raises(TypeError, match="'tp'"):
        tk.MegatronLMPlugin(tp=2)
    assert tk.MegatronLMPlugin(
        num_micro_batches=1, gradient_clipping=0, other_megatron_args=None
    ).options == {
        "tensor_parallel": 1,
        "sequence_parallel": False,
        "distributed_optimizer": False,
        "gradient_clipping": 0.0,
    }
    monkeypatch.setenv("TRAINER_KIT_MEGATRON_LM_TP_DEGREE", "4")
    monkeypatch.setenv("TRAINER_KIT_MEGATRON_LM_GRADIENT_CLIPPING", "0.5")
    found = tk.MegatronLMPlugin(sequence_parallelism=True).options
    sizes = {
        "tensor_parallel": 4,
        "sequence_parallel": True,
        "distributed_optimizer": False,
    }
    assert found == {**sizes, "gradient_clipping": 0.5}
    with pytest.raises(StrategyError, match="megatron-core is not installed"):
        tk.Accelerator(cpu=True, megatron_lm_plugin=tk.MegatronLMPlugin())


@pytest.mark.world_size(2)
def test_a_strategy_object_is_described_by_itself_not_by_the_environment() -> None:
    """The variables are of another launch: a pipeline, which the plugin refuses, and other sizes."""
    install()
    options = {
        "tensor_parallel": 1,
        "sequence_parallel": False,
        "distributed_optimizer": True,
        "gradient_clipping": 0.25,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("PP_DEGREE", "2"),
            ("TP_DEGREE", "2"),
            ("GRADIENT_CLIPPING", "0.5"),
            ("RECOMPUTE_ACTIVATIONS", "true"),
        ):
            patch.setenv(f"ACCELERATE_MEGATRON_LM_{name}", value)
        accelerator = tk.Accelerator(
            cpu=True, strategy=tk.strategies.MegatronStrategy(**options)
        )
    assert accelerator.state.megatron_lm_plugin.options == options
