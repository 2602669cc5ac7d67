"""An Accelerator on a mesh: the loop of one process, its states and its weights, however the work is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.parity.language import assert_alike, make_language, make_texts, whole
from tests.parity.plain import case
from trainer_kit.core.errors import ConfigurationError, StrategyError

pytestmark = pytest.mark.slow
OTHER_NORMS = (1, 3.5, "inf")
PLAN = tk.ParallelPlan(tensor="llama")
SEQUENCES = tk.ParallelPlan(tensor="llama", sequence_parallel=True)


def texts(count: int, padded: bool) -> list[tuple[Tensor, Tensor]]:
    ((tokens, targets),) = make_texts([count], padded=padded)
    return list(zip(tokens, targets, strict=True))


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def by_hand(weighed: bool, **options: Any) -> tuple[nn.Module, list[float]]:
    """One process, global batches of 4, steps of 2 of them, or of what is left."""
    model = make_language(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches, norms = list(DataLoader(texts(20, weighed), batch_size=4)), []
    for _ in range(2):
        for start in range(0, len(batches), 2):
            x, y = (
                torch.cat(part)
                for part in zip(*batches[start : start + 2], strict=True)
            )
            cross_entropy(model(x), y, "mean").backward()
            norms += [
                float(nn.utils.clip_grad_norm_(model.parameters(), 1e9, p))
                for p in OTHER_NORMS
            ]
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
    return model, norms


def made(**options: Any) -> tk.Accelerator:
    return tk.Accelerator(cpu=True, gradient_accumulation_steps=2, seed=0, **options)


def prepared(
    accelerator: tk.Accelerator, data: Any, seed: int = 0, **options: Any
) -> Any:
    model = make_language(seed=seed, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    size = 4 // accelerator.strategy.data.size
    return accelerator.prepare(model, optimizer, DataLoader(data, batch_size=size))


def loop(
    accelerator: tk.Accelerator,
    weighed: bool,
    load: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> tuple[nn.Module, list[float]]:
    """As a user writes it; the same on every mesh. A state is saved behind four batches, in mid-epoch."""
    model, optimizer, loader = prepared(accelerator, texts(20, weighed), **options)
    norms = []
    if load is not None:
        accelerator.load_state(load)
    while loader.iteration < 2:
        for number, (x, y) in enumerate(loader):
            with (
                accelerator.accumulate(model),
                accelerator.maybe_context_parallel([x, y], [1, 1], {x, y}),
            ):
                if weighed:
                    total, count = (
                        cross_entropy(model(x), y, "sum"),
                        int((y != -100).sum()),
                    )
                    accelerator.backward(total, weight=count)
                else:
                    accelerator.backward(cross_entropy(model(x), y, "mean"))
                if accelerator.sync_gradients:
                    norms += [
                        float(accelerator.clip_grad_norm_(model.parameters(), 1e9, p))
                        for p in OTHER_NORMS
                    ]
                    norms.append(
                        float(accelerator.clip_grad_norm_(model.parameters(), 0.3))
                    )
                optimizer.step()
                optimizer.zero_grad()
            if save is not None and (loader.iteration, number) == (1, 3):
                accelerator.save_state(save)
    return model, norms


def compare(
    config: Any, save: Path | None = None, both: bool = True, **options: Any
) -> tuple[tk.Accelerator, nn.Module]:
    for weighed in (False, True) if both else (True,):
        with case(config=config, weighed=weighed):
            one, expected = by_hand(weighed, **options)
            accelerator = made(**config)
            mine, norms = loop(
                accelerator, weighed, save=save if weighed else None, **options
            )
            assert norms == pytest.approx(expected, rel=1e-9)
            assert_alike(mine, one)
    return accelerator, mine


def axes(plan: Any = PLAN, **sizes: int) -> dict[str, Any]:
    return {
        "parallelism_config": tk.ParallelismConfig(
            plan=plan, **{f"{k}_size": v for k, v in sizes.items()}
        )
    }


def what_is_gathered_is_there_once(accelerator: tk.Accelerator) -> None:
    ranks = accelerator.strategy.data.size
    loader = accelerator.prepare(DataLoader(torch.arange(11.0), batch_size=4 // ranks))
    found = [accelerator.gather_for_metrics(batch) for batch in loader]
    assert torch.cat(found).tolist() == list(range(11))
    found = [
        accelerator.gather_for_metrics([str(int(x)) for x in batch]) for batch in loader
    ]
    assert [text for texts in found for text in texts] == list(map(str, range(11)))


def states_load_anywhere(
    accelerator: tk.Accelerator, model: nn.Module, others: list[Any], path: Path
) -> None:
    """Into this mesh, another one, and DDP; from each of them back."""
    expected = whole(model)
    accelerator.save_state(path / "state")
    accelerator.save_model(model, path / "model")
    alone = make_language(seed=5)
    alone.load_state_dict(load_file(path / "model" / "model.safetensors"))
    assert_alike(alone, model, 0.0)
    handed = accelerator.get_state_dict(model)
    assert bool(handed) == accelerator.is_main_process
    before = accelerator._optimizers[0].state[next(iter(model.parameters()))]["exp_avg"]
    for number, config in enumerate(others):
        with case(into=config):
            other = made(**config)
            mine, optimizer, loader = prepared(other, texts(20, True), seed=3)
            other.load_state(path / "state")
            assert_alike(other.unwrap_model(mine), model, 0.0)
            moments = optimizer.state[next(iter(mine.parameters()))]["exp_avg"]
            pair = [
                value.full_tensor() if hasattr(value, "full_tensor") else value
                for value in (moments, before)
            ]
            assert torch.equal(*pair)
            assert loader.iteration == 2
            torch.manual_seed(accelerator.process_index)
            other.save_state(path / str(number))
            resumed, norms = loop(made(**config), True, load=path / "middle")
            assert len(norms) == 4 * (1 + len(OTHER_NORMS))
            assert_alike(other.unwrap_model(resumed), model)
            back = made(**axes(tp=accelerator.num_processes))
            again, *_ = prepared(back, texts(20, True), seed=4)
            back.load_state(path / str(number))
            found = whole(again)
            assert all(
                torch.equal(found[name], value) for name, value in expected.items()
            )
            # They get the same batches, and must draw the same for them.
            assert (
                len(
                    {float(row[0]) for row in back.world.agree([float(torch.rand(()))])}
                )
                == 1
            )


@pytest.mark.world_size(2, timeout=240)
def test_two_processes(tmp_path: Path) -> None:
    accelerator, model = compare(axes(tp=2), tmp_path / "middle")
    what_a_mesh_says(accelerator)
    states_load_anywhere(accelerator, model, [{}, axes(dp_shard=2)], tmp_path)
    what_is_gathered_is_there_once(accelerator)
    compare(axes(SEQUENCES, tp=2), both=False, tied=True, normed=True)
    plugin = made(torch_tp_plugin=tk.TorchTensorParallelPlugin(tp_size=2, plan=PLAN))
    assert plugin.parallelism_config.tp_size == 2


@pytest.mark.world_size(2, timeout=240)
def test_sequences() -> None:
    compare(axes(cp=2))
    compare(axes(cp=2), both=False, heads=1)
    buffers_are_whole_again(made(**axes(cp=2)))
    assert made(**axes(dp_replicate=2)).strategy.name == "ddp"
    what_is_refused()


def what_a_mesh_says(accelerator: tk.Accelerator) -> None:
    assert (
        "mesh tp=2 on cpu; the same batches on ranks 0 1; this rank holds"
        in accelerator.explain()
    )
    assert "parallelism_config_tp_size" in accelerator.explain()
    assert (
        accelerator.parallelism_config.tp_size
        == accelerator.parallelism_config.total_size
        == 2
    )
    assert accelerator.torch_device_mesh["tp"].size() == 2
    assert (accelerator.tensor_parallel_rank, accelerator.data_parallel_rank) == (
        accelerator.process_index,
        0,
    )
    assert accelerator.is_composable_parallelism_enabled
    assert accelerator.unwrap_model(accelerator._models[0]) is accelerator._models[0]
    with pytest.raises(ConfigurationError, match="LocalSGD under 'mesh'"):
        tk.LocalSGD(accelerator, accelerator._models[0], 8)
    with accelerator.join_uneven_inputs(accelerator._models, even_batches=False):
        assert not accelerator.accumulation.joining
    with accelerator.maybe_context_parallel(
        buffers=[torch.ones(3)], buffer_seq_dims=[0]
    ):
        pass  # there is nothing to divide among


def buffers_are_whole_again(accelerator: tk.Accelerator) -> None:
    model, optimizer, _ = prepared(accelerator, texts(4, False))
    for _ in range(2):
        x, y = make_texts([2])[0]
        before = x.clone()
        with accelerator.maybe_context_parallel(
            buffers=[x, y], buffer_seq_dims=[1, 1], no_restore_buffers={y}
        ):
            assert x.shape == y.shape == (2, 4)
            accelerator.backward(cross_entropy(model(x), y, "mean"))
        assert torch.equal(x, before)
        assert y.shape == (2, 4)
    optimizer.zero_grad()
    for buffers, dims, told in (
        ([x], [], "1 buffers, 0 dimensions"),
        ([torch.ones(2, 3)], [1], "length 3"),
    ):
        with (
            pytest.raises(StrategyError, match=told),
            accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=dims),
        ):
            pass
    other = made(**axes(cp=2))
    with (
        pytest.raises(StrategyError, match="no call of scaled_dot_product_attention"),
        other.maybe_context_parallel([x], [1]),
    ):
        x + 1


def what_is_refused() -> None:
    with pytest.raises(StrategyError, match="mesh needs 4 ranks, but 2 processes"):
        made(**axes(tp=4))
    with pytest.raises(ConfigurationError, match=r"tp_size=0"):
        axes(tp=0)
    with pytest.raises(ConfigurationError, match="use cp_size"):
        axes(sp=2)
    with pytest.raises(ConfigurationError, match="set twice"):
        made(**axes(tp=2), torch_tp_plugin=tk.TorchTensorParallelPlugin(2))
    forgotten = tk.ParallelPlan(tensor={"lm_head": "colwise_rep"}, loss_parallel=True)
    with pytest.raises(StrategyError, match="loss_parallel=True"):
        made(**axes(forgotten, tp=2)).prepare(make_language())
    staged = made(**axes(pp=2))
    assert "parallelism_config_pp_size" in staged.explain()
    with pytest.raises(
        StrategyError,
        match=r"need a Trainer that runs whole steps(.|\n)*pp=2(.|\n)*use pp=1",
    ):
        staged.prepare(make_language())


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        ("cpu_offload", {"cpu_offload": True}),
        ("ignored_modules", {"ignored_modules": "head"}),
        (
            "mixed_precision",
            {
                "mixed_precision_policy": MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16
                )
            },
        ),
    ],
)
def test_options_of_fsdp_are_refused_where_nothing_is_sharded(
    name: str, plugin: dict[str, Any]
) -> None:
    import trainer_kit.build  # noqa: F401  # registers the strategies

    options = tk.FullyShardedDataParallelPlugin(**plugin)
    with pytest.raises(
        tk.ConfigurationError,
        match=r"found: tp_size=2 alone\n  fix:   dp_shard_size=2 or more",
    ) as error:
        tk.ParallelismConfig(tp_size=2).make_strategy(options)
    assert error.value.problem.endswith("needs ranks that shard parameters")
    tk.ParallelismConfig(tp_size=2, dp_shard_size=2).make_strategy(
        tk.FullyShardedDataParallelPlugin(cpu_offload=True)
    )


@pytest.mark.long
@pytest.mark.world_size(4, timeout=240)
def test_four_processes(tmp_path: Path) -> None:
    accelerator, model = compare(axes(dp_shard=2, tp=2), tmp_path / "middle")
    states_load_anywhere(accelerator, model, [axes(dp_shard=4)], tmp_path)
    what_is_gathered_is_there_once(accelerator)
    plugin = tk.FullyShardedDataParallelPlugin(
        transformer_cls_names_to_wrap=["Block"], reshard_after_forward=False
    )
    accelerator, _ = compare(
        {"fsdp_plugin": plugin, **axes(dp_replicate=2, tp=2)}, both=False
    )
    assert "dp_replicate=2 × tp=2" in accelerator.explain()
    two_models_of_one_loop(made(**axes(dp_shard=2, tp=2)))


@pytest.mark.long
@pytest.mark.world_size(4, timeout=240)
def test_replicas_combined_with_another_axis_train_alike() -> None:
    for sizes in (
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "cp": 2},
    ):
        accelerator, _ = compare(axes(**sizes), both=False)
        what_is_gathered_is_there_once(accelerator)


def two_models_of_one_loop(accelerator: tk.Accelerator) -> None:
    """What steps one of them has read the other."""
    nets = [make_language(seed=seed) for seed in (0, 1)]
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.05, foreach=True) for net in nets
    ]
    one, two, first, second, loader = accelerator.prepare(
        *nets, *optimizers, DataLoader(texts(8, False), batch_size=2)
    )
    alone = [make_language(seed=seed) for seed in (0, 1)]
    steps = [torch.optim.SGD(net.parameters(), lr=0.05) for net in alone]

    def train(
        nets: Any, optimizers: Any, batches: Any, backward: Any, count: int
    ) -> None:
        for index, (x, y) in enumerate(batches):
            mine, other = index // count % 2, 1 - index // count % 2
            with torch.no_grad():
                teacher = nets[other](x)
            backward(
                cross_entropy(nets[mine](x), y, "mean")
                + F.mse_loss(nets[mine](x), teacher)
            )
            optimizers[mine].step()
            optimizers[mine].zero_grad()

    accelerator.gradient_accumulation_steps = 1
    train((one, two), (first, second), loader, accelerator.backward, 1)
    train(
        alone,
        steps,
        DataLoader(texts(8, False), batch_size=4),
        lambda loss: loss.backward(),
        1,
    )
    assert_alike(one, alone[0])
    assert_alike(two, alone[1])
