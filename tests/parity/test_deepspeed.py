"""DeepSpeed's stages train as one process does on the same global batches, and go on from each other's checkpoints."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    adamw,
    case,
    make_batches,
    make_net,
    merged,
    plain_loop,
    same_state,
    sgd,
    train,
)
from trainer_kit.state.resume import read_state, resolve_source
from trainer_kit.strategies import DeepSpeedStrategy
from trainer_kit.testing.conformance import whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed",
    ),
]

STAGES = [0, 1, 2, 3]
PER_RANK = 3


def samples(count: int) -> TensorDataset:
    return TensorDataset(*merged(make_batches(1, size=count)))


def loader(count: int, size: int = PER_RANK) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=size)


def make(**options: Any) -> DeepSpeedStrategy:
    gc.freeze()  # the engine collects garbage when it is made: seconds, for all that was imported
    return DeepSpeedStrategy(**options)


def fit(
    module: tk.TrainModule, data: Any, stage: int, val: Any = None, **options: Any
) -> tk.Trainer:
    options = {
        "strategy": make(stage=stage),
        "devices": dist.get_world_size(),
        **options,
    }
    return train(module, data, val, **options)


def weights(trainer: tk.Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Whole, on every rank."""
    state = trainer.strategy.module_state(module)
    return trainer.strategy.world.broadcast(state)


def assert_equal(
    trainer: tk.Trainer, module: Classifier, net: nn.Module, tolerance: float = 1e-6
) -> None:
    mine = weights(trainer, module)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(
            mine[f"net.{name}"],
            value,
            rtol=0,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


class Tokens(Classifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=-1)

    def loss_weight(self, batch: Batch) -> Tensor:
        return (batch[1] >= 0).sum()


class Skipping(Classifier):
    """No loss of these batches."""

    def __init__(self, net: nn.Module, skipped: set[int]) -> None:
        super().__init__(net)
        self.skipped = skipped

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return (
            super().training_step(batch, batch_idx)
            if batch_idx not in self.skipped
            else None
        )


class Leaving(tk.Callback):
    """Leaves the first epoch inside a window."""

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> int | None:
        return -1 if trainer.current_epoch == 0 and batch_idx == 3 else None


class Clipped(Classifier):
    """Clips in the first step only."""

    def configure_gradient_clipping(
        self, optimizer: Any, value: Any = None, algorithm: Any = None
    ) -> None:
        if self.global_step == 0:
            self.clip_gradients(optimizer, 0.05)


def weights_are_those_of_one_process(tmp_path: Path) -> None:
    for stage in STAGES:
        for count, length, limit in [
            (18, 1, None),
            (25, 3, 0.2),
            (32, 2, 0.05),
            (19, 1, None),
        ]:  # ragged, and ranks that end early
            with case(stage=stage, count=count, length=length, limit=limit):
                net, mine = make_net(), make_net(seed=dist.get_rank())
                clipping = (
                    None
                    if limit is None
                    else partial(nn.utils.clip_grad_norm_, max_norm=limit)
                )
                plain_loop(
                    net,
                    [list(loader(count, 2 * PER_RANK * length))] * 2,
                    sgd(net),
                    clip=clipping,
                )
                options = {
                    "max_epochs": 2,
                    "accumulate_grad_batches": length,
                    "gradient_clip_val": limit,
                }
                trainer = fit(Classifier(mine), loader(count), stage, **options)
                assert_equal(trainer, trainer.module, net)
                assert trainer.progress.samples == 2 * count
        with case(stage=stage, what="token weights"):
            batches = make_batches(5, size=6)
            for (_, y), kept in zip(batches, (6, 1, 4, 2, 5), strict=True):
                y[kept:] = -1
            plain, module = Tokens(make_net()), Tokens(make_net())
            optimizer = sgd(plain.net)
            for i in range(0, 5, 4):
                optimizer.zero_grad()
                plain.training_step(merged(batches[i : i + 4]), 0).backward()
                optimizer.step()
            assert_equal(
                fit(module, batches, stage, accumulate_grad_batches=2),
                module,
                plain.net,
            )
        with case(stage=stage, what="clipping by hand"):
            net, module = make_net(), Clipped(make_net())
            limits = iter([0.05, 1e9, 1e9])
            clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, next(limits))  # noqa: B023, E731
            plain_loop(net, [list(loader(18, 6))], sgd(net), clip=clip)
            assert_equal(fit(module, loader(18), stage), module, net)


def windows_without_a_loss_and_windows_that_end_early(tmp_path: Path) -> None:
    for stage in STAGES:
        batches = list(loader(36, 6))
        with case(stage=stage, what="skipped"):
            # Windows of two: the second has no loss at its end, the third none at all.
            net, module = make_net(), Skipping(make_net(), {3, 4, 5})
            optimizer = sgd(net)
            for window, weight in [(batches[0:2], 12), (batches[2:3], 12)]:
                optimizer.zero_grad()
                x, y = merged(window)
                (F.cross_entropy(net(x), y, reduction="sum") / weight).backward()
                optimizer.step()
            assert_equal(
                fit(module, loader(36), stage, accumulate_grad_batches=2), module, net
            )
        with case(stage=stage, what="left"):
            # The first epoch ends inside its second window, of which nothing stays.
            net, mine = make_net(), make_net()
            plain_loop(
                net,
                [
                    [merged(batches[0:2])],
                    [merged(batches[i : i + 2]) for i in (0, 2, 4)],
                ],
                sgd(net),
            )
            options = {
                "accumulate_grad_batches": 2,
                "callbacks": [Leaving()],
                "max_epochs": 2,
            }
            trainer = fit(
                Classifier(mine), loader(36), stage, barebones=False, **QUIET, **options
            )
            assert_equal(trainer, trainer.module, net)


class Judged(Classifier):
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def evaluation_in_training_after_it_and_alone(tmp_path: Path) -> None:
    x, y = samples(19).tensors  # one rank has a batch more
    for stage in STAGES:
        with case(stage=stage):
            net, module = make_net(), Judged(make_net())
            plain_loop(net, [list(loader(18, 6))], sgd(net))
            trainer = fit(module, loader(18), stage, loader(19))
            expected = F.cross_entropy(net(x), y).item()
            assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(
                expected, abs=1e-6
            )
            (tested,) = trainer.test(module, loader(19), verbose=False)
            assert tested["val_loss"] == pytest.approx(expected, abs=1e-6)
            predicted = torch.cat(trainer.predict(module, loader(19)))
            torch.testing.assert_close(predicted, net(x), rtol=0, atol=1e-6)
            # And once more: a second fit takes the module over from the first.
            plain_loop(net, [list(loader(18, 6))], sgd(net))
            again = fit(module, loader(18), stage)
            assert_equal(again, module, net)
            alone = tk.Trainer(
                strategy=make(stage=stage), devices=2, accelerator="cpu", barebones=True
            )
            (tested,) = alone.test(Judged(net), loader(19), verbose=False)
            assert tested["val_loss"] == pytest.approx(
                F.cross_entropy(net(x), y).item(), abs=1e-6
            )


def with_everything_that_is_on_by_default(tmp_path: Path) -> None:
    for stage in STAGES:
        with case(stage=stage):
            root, module = tmp_path / f"run-{stage}", Judged(make_net())
            keeper = tk.callbacks.ModelCheckpoint(
                monitor="val_loss", save_top_k=2, save_last=True
            )
            options = {
                "max_epochs": 3,
                "default_root_dir": root,
                "callbacks": [keeper],
                "log_every_n_steps": 1,
            }
            trainer = tk.Trainer(
                strategy=make(stage=stage), devices=2, accelerator="cpu", **options
            )
            trainer.fit(module, loader(19), loader(18))
            trainer.save_checkpoint(root / "after")
            best = keeper.best_model_score
            for path, expected in [
                (root / "after", trainer.callback_metrics["val_loss"]),
                (keeper.best_model_path, best),
            ]:
                alone = tk.Trainer(
                    strategy=make(stage=stage),
                    devices=2,
                    accelerator="cpu",
                    barebones=True,
                )
                (found,) = alone.validate(
                    Judged(make_net(seed=5)), loader(18), ckpt_path=path, verbose=False
                )
                assert found["val_loss"] == pytest.approx(float(expected), abs=1e-6)


class Built(Classifier):
    """Is made under the strategy's care."""

    def __init__(self) -> None:
        super().__init__(nn.Module())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Sequential):
            return
        self.net = make_net()
        self.divided = [
            hasattr(parameter, "ds_id") for parameter in self.net.parameters()
        ]

    def configure_optimizers(self) -> Any:
        return sgd(self.net)


class Forked(Classifier):
    """Uses one of two heads."""

    def __init__(self) -> None:
        super().__init__(make_net())
        torch.manual_seed(3)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(
            self.heads[batch_idx // 2 % 2](self.net(batch[0])), batch[1]
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.parameters(), lr=0.1
        )  # without momentum no gradient is a gradient of zeros


def parameters_that_a_step_does_not_use(tmp_path: Path) -> None:
    batches = list(loader(48, 6))
    for options, length in product(
        [*({"stage": stage} for stage in STAGES), *HOSTED], [1, 4]
    ):
        with case(length=length, **options):
            plain, module = Forked(), Forked()
            optimizer = plain.configure_optimizers()
            for start in range(0, 8, length):
                optimizer.zero_grad()
                for index in range(start, start + length):
                    (plain.training_step(batches[index], index) / length).backward()
                optimizer.step()
            trainer = fit(
                module,
                loader(48),
                0,
                strategy=make(**options),
                accumulate_grad_batches=length,
            )
            found = weights(trainer, module)
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def offloaded_in_bfloat16_and_built_in_parts(tmp_path: Path) -> None:
    for options in HOSTED:
        with case(**options):
            net, mine = make_net(), make_net()
            clip = partial(nn.utils.clip_grad_norm_, max_norm=0.1)
            plain_loop(net, [list(loader(32, 12))] * 2, sgd(net), clip=clip)
            chosen = {
                "strategy": make(**options),
                "accumulate_grad_batches": 2,
                "gradient_clip_val": 0.1,
            }
            trainer = fit(Classifier(mine), loader(32), 0, max_epochs=2, **chosen)
            assert_equal(trainer, trainer.module, net)
    for stage, precision in product(STAGES, ["bf16-mixed", "bf16-true"]):
        with case(stage=stage, precision=precision):
            net, mine = make_net(), make_net()
            plain_loop(net, [list(loader(36, 12))] * 2, sgd(net))
            trainer = fit(
                Classifier(mine),
                loader(36),
                stage,
                precision=precision,
                accumulate_grad_batches=2,
                max_epochs=2,
            )
            assert_equal(trainer, trainer.module, net, 5e-3)
            assert {p.dtype for p in mine.parameters()} == {torch.bfloat16}
            masters = weights(trainer, trainer.module)
            assert {value.dtype for value in masters.values()} == {torch.float32}
            assert any(
                (value != value.bfloat16()).any() for value in masters.values()
            ), "rounded"
    net, module = make_net(), Built()
    plain_loop(net, [list(loader(18, 6))], sgd(net))
    assert_equal(fit(module, loader(18), 3), module, net)
    assert module.divided == [True] * 4


HOSTED: list[dict[str, Any]] = [
    {"stage": 2, "offload_optimizer": True},
    {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
]


def resumed(
    module: Classifier, path: Path | None, steps: int, size: int, **options: Any
) -> tk.Trainer:
    """A run up to this step; a ragged batch is in it."""
    trainer = tk.Trainer(max_steps=steps, accelerator="cpu", seed=1, **QUIET, **options)
    trainer.fit(module, loader(34, size), ckpt_path=path)
    return trainer


def single(
    module: Classifier, path: Path | None, steps: int, **options: Any
) -> tk.Trainer:
    return resumed(
        module,
        path,
        steps,
        2 * PER_RANK,
        strategy="single_device",
        devices=1,
        **options,
    )


def divided(
    module: Classifier, path: Path | None, steps: int, **options: Any
) -> tk.Trainer:
    stages = {name: options.pop(name) for name in tuple(options) if name != "precision"}
    return resumed(
        module, path, steps, PER_RANK, strategy=make(**stages), devices=2, **options
    )


def every_stage_and_one_process_go_on_from_each_other(tmp_path: Path) -> None:
    straight = Classifier(make_net())
    single(straight, None, 8)
    one = tmp_path / f"one-{dist.get_rank()}"
    single(Classifier(make_net()), None, 3).save_checkpoint(one)
    for stage in STAGES:
        with case(stage=stage):
            path, other = tmp_path / f"{stage}", STAGES[stage - 1]
            divided(Classifier(make_net()), None, 3, stage=stage).save_checkpoint(path)
            # On the same ranks in every bit.
            module, again = Classifier(make_net()), Classifier(make_net(seed=7))
            expected = weights(divided(module, None, 8, stage=stage), module)
            same_state(weights(divided(again, path, 8, stage=stage), again), expected)
            # In one process, which goes on as if it had been one from the start; and from others.
            module = Classifier(make_net(seed=7))
            single(module, path, 8)
            for name, value in straight.net.state_dict().items():
                torch.testing.assert_close(
                    module.net.state_dict()[name], value, rtol=0, atol=1e-6
                )
            for start, to in [(path, other), (tmp_path / "one-0", stage)]:
                module = Classifier(make_net(seed=9))
                assert_equal(divided(module, start, 8, stage=to), module, straight.net)
    for word, to, start in [("fsdp", 3, 2), ("ddp", 1, 3)]:
        with case(word=word):
            other = {"strategy": word, "devices": 2}
            path = tmp_path / word
            resumed(Classifier(make_net()), None, 3, PER_RANK, **other).save_checkpoint(
                path
            )
            module = Classifier(make_net(seed=9))
            assert_equal(divided(module, path, 8, stage=to), module, straight.net)
            module = Classifier(make_net(seed=9))
            trainer = resumed(module, tmp_path / f"{start}", 8, PER_RANK, **other)
            found = whole(trainer.strategy.module_state(module))
            for name, value in straight.net.state_dict().items():
                torch.testing.assert_close(
                    found[f"net.{name}"], value, rtol=0, atol=1e-6
                )


def states(path: Path) -> tuple[Any, Any]:
    state = read_state(resolve_source(path), False)
    return state["state_dict"], state["optimizer_states"][0]["state"]


def every_bit_of_weights_and_moments_arrives(tmp_path: Path) -> None:
    ring = [*({"stage": stage} for stage in STAGES), *HOSTED]
    for precision in ["32-true", "bf16-mixed"]:
        for number, options in enumerate(ring):
            with case(precision=precision, **options):
                path = tmp_path / f"{precision}-{number}"
                divided(
                    Classifier(make_net(), adamw),
                    None,
                    3,
                    precision=precision,
                    **options,
                ).save_checkpoint(path)
                there = divided(
                    Classifier(make_net(seed=8), adamw),
                    path,
                    3,
                    precision=precision,
                    **ring[number - 1],
                )
                there.save_checkpoint(f"{path}-again")
                same_state(states(tmp_path / f"{path.name}-again"), states(path))
                here = single(
                    Classifier(make_net(seed=8), adamw), path, 3, precision=precision
                )
                here.save_checkpoint(tmp_path / f"{path.name}-{dist.get_rank()}")
                same_state(
                    states(tmp_path / f"{path.name}-{dist.get_rank()}"), states(path)
                )
                _, moments = states(path)
                assert {int(one["step"]) for one in moments.values()} == {3}
                assert all((one["exp_avg"] != 0).any() for one in moments.values())


def frozen_weights_are_copied_on_rank_0_only(tmp_path: Path) -> None:
    for stage in STAGES:
        with case(stage=stage):
            net, fixed = make_net(), make_net().state_dict()["0.weight"]
            net[0].weight.requires_grad_(False)
            module = Classifier(
                net,
                lambda net: torch.optim.SGD(
                    [p for p in net.parameters() if p.requires_grad], 0.1
                ),
            )
            trainer = fit(module, loader(12), stage)
            there = trainer.strategy.module_state(module)["net.0.weight"]
            assert there.shape == fixed.shape
            if dist.get_rank() == 0:
                assert torch.equal(there, fixed)
            elif stage == 3:
                assert there.untyped_storage().nbytes() == there.element_size()
            assert torch.equal(weights(trainer, module)["net.0.weight"], fixed)


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


CHECKS: list[Callable[[Path], None]] = [
    weights_are_those_of_one_process,
    windows_without_a_loss_and_windows_that_end_early,
    evaluation_in_training_after_it_and_alone,
    with_everything_that_is_on_by_default,
    parameters_that_a_step_does_not_use,
    offloaded_in_bfloat16_and_built_in_parts,
    every_stage_and_one_process_go_on_from_each_other,
    every_bit_of_weights_and_moments_arrives,
    frozen_weights_are_copied_on_rank_0_only,
]


@pytest.mark.long
# One start: DeepSpeed takes as long to import as everything here to run.
@pytest.mark.timeout(240)
@pytest.mark.world_size(2, timeout=200)
def test_every_stage(tmp_path: Path) -> None:
    for check in CHECKS:
        with case(check=check.__name__):
            check(tmp_path)
