"""An Accelerator on FSDP: the loop of one process, its states, and its weights."""

from __future__ import annotations

import errno
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import case, doubled, make_batches, make_net, merged
from trainer_kit.accelerator import checkpoints, state_directories
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.errors import CheckpointError, ConfigurationError, RankError
from trainer_kit.testing.conformance import assert_same, whole

SAMPLES = TensorDataset(*merged(doubled(make_batches(1, size=26))))


def loop(accelerator: tk.Accelerator, size: int) -> tuple[nn.Module, list[float]]:
    """Two epochs by hand, with accumulation and clipping; the norms of their gradients."""
    model = make_net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(SAMPLES, batch_size=size)
    )
    norms: list[float] = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    norms.append(
                        float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                    )
                optimizer.step()
                optimizer.zero_grad()
    return model, norms


def made(**options: Any) -> tk.Accelerator:
    return tk.Accelerator(cpu=True, gradient_accumulation_steps=2, seed=0, **options)


def by_weight(accelerator: tk.Accelerator) -> tuple[nn.Module, nn.Module]:
    """Sums with their weights, steps of many parameters at once, and a model that is read before it is stepped."""
    model, teacher = (make_net(seed=seed).double() for seed in (0, 1))
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.05, foreach=True)
        for net in (model, teacher)
    ]
    model, teacher, *optimizers, loader = accelerator.prepare(
        model, teacher, *optimizers, DataLoader(SAMPLES, batch_size=3)
    )
    for x, y in loader:
        with accelerator.accumulate(model, teacher):
            loss = F.cross_entropy(model(x), y, reduction="sum") + F.cross_entropy(
                teacher(x), y, reduction="sum"
            )
            accelerator.backward(loss, weight=len(y))
            with torch.no_grad():
                model(x)
                teacher(x)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return model, teacher


def check_an_optimizer_that_comes_before_its_model() -> None:
    found = []
    for plugin in (tk.FullyShardedDataParallelPlugin(ignored_modules="0"), None):
        accelerator, model = made(fsdp_plugin=plugin), make_net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)
        optimizer, loader, model = [
            accelerator.prepare(one)
            for one in (optimizer, DataLoader(SAMPLES, batch_size=3), model)
        ]
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        found.append(whole(accelerator.unwrap_model(model).state_dict()))
    assert_same(*found, 1e-9)


def check_any_norm() -> None:
    """Of parts, of whole parameters beside them, and of a part of which this process has nothing."""
    found = []
    for options in (
        {"fsdp_plugin": tk.FullyShardedDataParallelPlugin(ignored_modules=r"0\.0")},
        {},
    ):
        accelerator = tk.Accelerator(cpu=True, seed=0, **options)
        model = nn.Sequential(make_net(), nn.Linear(4, 1)).double()
        model = accelerator.prepare(model)
        accelerator.backward(model(SAMPLES.tensors[0]).square().mean())
        norms = [
            float(accelerator.clip_grad_norm_(model.parameters(), 1e9, p))
            for p in (1, 2, 3.5, "inf")
        ]
        accelerator.clip_grad_norm_(model.parameters(), 1e-3, norm_type=1)
        found.append(
            (
                norms,
                whole(
                    {
                        n: p.grad
                        for n, p in accelerator.unwrap_model(model).named_parameters()
                    }
                ),
            )
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    assert_same(found[0][1], found[1][1], 1e-12)


def check_a_mix_of_whole_and_divided() -> None:
    plugin = tk.FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP", ignored_modules="0"
    )
    accelerator = made(fsdp_plugin=plugin)
    with (
        pytest.raises(ConfigurationError, match="every step needs all processes"),
        accelerator.join_uneven_inputs([], even_batches=False),
    ):
        pass
    mine, theirs = by_weight(accelerator), by_weight(made())
    assert not hasattr(mine[0][0].weight, "placements")
    for one, other in zip(mine, theirs, strict=True):
        assert_same(
            whole(one.state_dict()), accelerator.unwrap_model(other).state_dict(), 1e-9
        )
    held = weakref.ref(mine[0][0].weight), weakref.ref(mine[0][3].weight)
    del mine, one
    accelerator.free_memory()
    assert [one() for one in held] == [None, None]


@pytest.mark.slow
def check_models_with_the_same_names(path: Path) -> None:
    """Each is read in its own parts: the shapes of the last one were those of all, and others were read whole."""

    def prepared() -> tuple[tk.Accelerator, list[Any]]:
        accelerator = made(fsdp_plugin=tk.FullyShardedDataParallelPlugin())
        models = accelerator.prepare(nn.Linear(4, 6), nn.Linear(2, 8))
        return accelerator, list(models)

    accelerator, saved = prepared()
    accelerator.save_state(str(path))
    accelerator, models = prepared()
    state = accelerator.checkpoints._read(path)
    for part, model in zip(("model", "model_1"), saved, strict=True):
        for name, tensor in model.state_dict().items():
            assert state[part][name].placements == tensor.placements, (part, name)
    accelerator.load_state(str(path))
    for model, other in zip(models, saved, strict=True):
        assert_same(whole(model.state_dict()), whole(other.state_dict()), 0.0)


@pytest.mark.world_size(2)
def test_it_trains_and_saves_as_one_process(tmp_path: Path) -> None:
    check_any_norm()
    check_a_mix_of_whole_and_divided()
    check_an_optimizer_that_comes_before_its_model()
    accelerator = made(
        fsdp_plugin=tk.FullyShardedDataParallelPlugin(
            min_num_params=10, auto_wrap_policy="size_based_wrap"
        )
    )
    assert accelerator.strategy.name == "fsdp"
    mine, norms = loop(accelerator, 3)
    theirs, own_norms = loop(made(), 3)  # DDP
    assert norms == pytest.approx(own_norms, rel=1e-9)
    found = whole(mine.state_dict())
    assert_same(found, accelerator.unwrap_model(theirs).state_dict(), 1e-9)
    handed = accelerator.get_state_dict(mine)
    if accelerator.is_main_process:
        assert_same(handed, found, 0.0)
    else:
        assert handed == {}
    assert all(hasattr(p, "placements") for p in mine.parameters())

    # A state of it, into it and into DDP; of DDP into it.
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(mine, tmp_path / "model")
    for other in (made(fsdp_plugin=tk.FullyShardedDataParallelPlugin()), made()):
        model = make_net(seed=3).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer, _ = other.prepare(
            model, optimizer, DataLoader(SAMPLES, batch_size=3)
        )
        other.load_state(tmp_path / "state")
        assert_same(whole(other.unwrap_model(model).state_dict()), found, 0.0)
        moments = optimizer.state[next(iter(model.parameters()))]["exp_avg"]
        before = accelerator._optimizers[0].state[next(iter(mine.parameters()))][
            "exp_avg"
        ]
        parts = [
            value.full_tensor() if hasattr(value, "full_tensor") else value
            for value in (moments, before)
        ]
        assert torch.equal(*parts)
        other.save_state(tmp_path / other.strategy.name)
    back = made(fsdp_plugin=tk.FullyShardedDataParallelPlugin())
    model = make_net(seed=4).double()
    model, _, _ = back.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(SAMPLES, batch_size=3)
    )
    back.load_state(tmp_path / "ddp")
    assert_same(whole(model.state_dict()), found, 0.0)
    alone = make_net(seed=5).double()
    alone.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert_same(alone.state_dict(), found, 0.0)
    for options in ({"fsdp_plugin": tk.FullyShardedDataParallelPlugin()}, {}):
        statistics_are_each_process_s_own(options, tmp_path / f"own-{len(options)}")
    check_models_with_the_same_names(tmp_path / "two")
    what_fails_on_one_process_ends_all(tmp_path / "fails")


def statistics_are_each_process_s_own(options: dict[str, Any], path: Path) -> None:
    def prepared() -> tuple[tk.Accelerator, nn.Module]:
        norm = nn.BatchNorm1d(4)
        accelerator = made(**options)
        return accelerator, accelerator.prepare(
            nn.Sequential(norm, nn.Linear(4, 4), norm)
        )

    accelerator, model = prepared()
    rank = accelerator.process_index
    mean = accelerator.unwrap_model(model)[0].running_mean
    mean.fill_(rank + 1.0)
    accelerator.save_state(path)
    saved = read_checkpoint(path)["model"]
    assert (
        saved["0.running_mean"].tolist()
        == saved["2.running_mean"].tolist()
        == [1.0] * 4
    )
    accelerator, model = prepared()
    accelerator.load_state(path)
    assert accelerator.unwrap_model(model)[0].running_mean.tolist() == [rank + 1.0] * 4


def what_fails_on_one_process_ends_all(path: Path) -> None:
    class Breaks:
        breaks = False

        def state_dict(self) -> dict[str, Any]:
            self.load_state_dict({})
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.breaks:
                raises()

    def raises(*given: Any, **options: Any) -> None:
        raise ValueError("of a user")

    breaks = Breaks()
    for kind, options in (
        ("read_checkpoint", {}),
        ("local_tensors", {"fsdp_plugin": tk.FullyShardedDataParallelPlugin()}),
    ):
        accelerator = made(project_dir=path.with_name(kind), **options)
        accelerator.register_for_checkpointing(breaks)
        accelerator.prepare(make_net())
        rank, world = accelerator.process_index, accelerator.world
        kept = accelerator.save_state()
        for module, name, act, failing in (
            (checkpoints, kind, accelerator.load_state, 1),
            (state_directories, "newest_verified", accelerator.load_state, 0),
            (state_directories, "_entries", accelerator.save_state, 0),
        ):
            with pytest.MonkeyPatch.context() as patch:
                if rank == failing:
                    patch.setattr(module, name, raises)
                with (
                    case(name=name),
                    pytest.raises(
                        ValueError if rank == failing else RankError, match="of a user"
                    ),
                ):
                    act()
        breaks.breaks = rank == 1
        for act in (accelerator.save_state, accelerator.load_state):
            with (
                case(act=act),
                pytest.raises(ValueError if rank else RankError, match="of a user"),
            ):
                act()
        breaks.breaks = False
        accelerator.load_state(kept)
    if rank == 0:
        path.mkdir()  # empty: there is to be room in its place
    world.barrier()

    def fails(self: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Path, "rmdir", fails)
        with pytest.raises(CheckpointError, match="Input/output error"):
            accelerator.save_state(path)
