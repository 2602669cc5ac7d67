"""The stages of a pipeline train as one process does."""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.parity.language import Counting as Tokens
from tests.parity.language import make_language, make_texts
from tests.parity.plain import case
from tests.strategies.pipelines import Writer, stages, texts, words
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import ContextPlan, ParallelPlan, PipelinePlan
from trainer_kit.strategies.transforms.pipeline import SCHEDULES
from trainer_kit.testing.conformance import whole

pytestmark = pytest.mark.slow

RAGGED = (4,) * 10 + (3,)


def train(
    module: Any, strategy: Any, batches: Any, val: Any = None, **options: Any
) -> tk.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    alone = strategy == "single_device"
    devices = 1 if alone else dist.get_world_size()
    options = {"max_epochs": 2, "accumulate_grad_batches": 4, **options}
    start = options.pop("ckpt_path", None)
    trainer = tk.Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, **quiet, **options
    )
    trainer.fit(module, batches, val, ckpt_path=start)
    return trainer


def both(
    make: Any, schedule: str = "1F1B", batches: Any = None, **options: Any
) -> tuple[Any, Any]:
    """The trainers of one process and of a pipeline, compared."""
    batches = texts(RAGGED) if batches is None else batches
    one, mine = make(), make()
    start = {name: value.clone() for name, value in one.state_dict().items()}
    alone = train(one, "single_device", batches, **options)
    staged = train(mine, stages(schedule), batches, **options)
    whole, own = one.state_dict(), mine.state_dict()
    everyone = staged.strategy.world.all_gather_object(list(own))
    assert sorted(name for names in everyone for name in names) == sorted(
        whole
    )  # each on one rank
    assert all(len(names) < len(whole) for names in everyone)
    for name, value in own.items():
        torch.testing.assert_close(
            value,
            whole[name],
            rtol=1e-12,
            atol=1e-12,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    assert any(not torch.equal(start[name], value) for name, value in own.items())
    assert {name for name, _ in mine.named_parameters()} <= own.keys()
    assert staged.callback_metrics.keys() == alone.callback_metrics.keys()
    for name, value in alone.callback_metrics.items():
        torch.testing.assert_close(
            staged.callback_metrics[name], value, rtol=1e-6, atol=1e-6
        )
    assert (staged.progress.samples, staged.global_step) == (
        alone.progress.samples,
        alone.global_step,
    )
    return alone, staged


class Weighed(Writer):
    def loss_weight(self, batch: Tensor) -> float:
        return float((batch > 3).sum())


class Noisy(Writer):
    """Draws in its step, once ahead of the model and once behind it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        noise = torch.randint(11, batch.shape)
        logits = self.net(noise)["logits"]
        self.heard.append(noise)
        return F.cross_entropy(logits.flatten(0, 1), noise.flatten()) + 0 * torch.rand(
            ()
        )


@pytest.mark.world_size(2)
def test_two_ranks() -> None:
    for schedule in SCHEDULES:
        with case(schedule=schedule):
            alone, staged = both(Writer, schedule, max_epochs=1)
            heard = staged.module.heard
            assert sorted(heard) == sorted(alone.module.heard)
            assert heard[:8] == [("start", i) for i in range(4)] + [
                ("end", i, 4) for i in range(4)
            ]
    check_evaluation()


@pytest.mark.world_size(2)
def test_two_ranks_with_options() -> None:
    check_options()


@pytest.mark.world_size(2)
def test_two_ranks_draw_and_compute_as_one() -> None:
    check_what_a_step_draws()
    check_random_data()
    check_that_stages_drop_by_themselves()
    check_what_a_step_does_to_its_batch()
    check_other_models()
    check_precision()


@pytest.mark.world_size(2)
def test_two_ranks_share_weights_and_scales() -> None:
    check_scaled_gradients()
    check_that_evaluations_draw_the_same_after_a_resume()
    check_tied_weights()
    check_that_tied_weights_go_on_elsewhere()


def check_options() -> None:
    for options in (
        {"accumulate_grad_batches": 1, "max_steps": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
        {"loss_weighting": False},
        {"accumulate_grad_batches": 3, "limit_train_batches": 8},
    ):
        with case(**options):
            both(Writer, **options)
    with case(module="Weighed"):
        both(Weighed)
        both(Weighed, batches=texts((2, 4, 4, 3, 4, 4, 1)))
    with case(plan="by name"):
        both(lambda: Writer(plan=PipelinePlan(model="net", split_points=["layers.1"])))


class Counting(Writer):
    """A metric object that adds up, and would show what is counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.trained = torchmetrics.SumMetric(), torchmetrics.SumMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.trained(len(batch))
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return outputs

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen(len(batch))
        self.log("seen", self.seen)


def check_evaluation() -> None:
    counted = train(
        Counting(), stages(), texts(RAGGED), texts((3, 4, 2)), max_epochs=1
    ).callback_metrics
    assert (int(counted["seen"]), int(counted["trained"])) == (9, 43)
    val = texts((3, 4, 2), seed=7)
    alone, staged = both(Writer, val=val, max_epochs=1)
    assert "val_loss" in staged.callback_metrics
    results = [
        trainer.validate(trainer.module, val, verbose=False)[0]["val_loss"]
        for trainer in (alone, staged)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    with warnings.catch_warnings():
        one, other = (
            trainer.predict(trainer.module, val) for trainer in (alone, staged)
        )
    for theirs, mine in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    fresh = tk.Trainer(
        accelerator="cpu", strategy=stages(), devices=2, barebones=True
    )  # without training
    torch.testing.assert_close(
        fresh.predict(Writer(), val)[0], Writer().predict_step(val[0], 0).detach()
    )


def check_what_a_step_draws() -> None:
    torch.manual_seed(dist.get_rank())
    module = Noisy()
    staged = train(module, stages(), texts((4,) * 8), max_epochs=1)
    drawn = [value for value in module.heard if isinstance(value, Tensor)]
    if staged.strategy.pipeline.last:
        assert len(drawn) == 8
        assert not torch.equal(drawn[0], drawn[1])
    last = staged.strategy.world.all_gather(torch.rand(()))
    assert (
        last[0] == last[1]
    )  # outside of steps, too: collate functions and hooks draw there


class Masked(Writer):
    """Batches are masked at random when they arrive; the model drops activations."""

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.where(torch.rand(batch.shape) > 0.3, 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(batch)


def check_random_data() -> None:
    """Stages get the same batches although the noise in their layers is their own."""
    net = words()
    for layer in net.layers:
        layer.down = nn.Sequential(
            layer.down, nn.Dropout(0.5 if layer in net.layers[:4] else 0.0)
        )
    module = Masked(net)
    torch.manual_seed(dist.get_rank())
    staged = train(
        module,
        stages(),
        DataLoader(torch.cat(texts(RAGGED)), 4, collate_fn=shifted),
        max_epochs=2,
    )
    theirs = staged.strategy.world.all_gather_object(
        [value for value in module.heard if isinstance(value, Tensor)]
    )
    assert len(theirs[0]) == 22
    for one, other in zip(*theirs, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(theirs[0][0], theirs[0][11])


def shifted(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples).roll(int(torch.randint(6, ())), 1)


class Drops(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        kept = super().forward(torch.ones_like(x))
        if self.training and x.requires_grad:
            self.masks.append(kept)
        return x * kept


def check_that_stages_drop_by_themselves() -> None:
    """Each stage's noise is its own, and a resume draws it again."""

    def fit(
        steps: int, path: str | None = None
    ) -> tuple[tk.Trainer, Writer, list[Tensor]]:
        torch.manual_seed(steps)  # what is drawn after a resume is the checkpoint's
        net, masks = words(), []
        for layer in net.layers:
            layer.down = nn.Sequential(layer.down, Drops(0.5))
            layer.down[1].masks = masks
        module = Masked(net)
        trainer = tk.Trainer(
            accelerator="cpu",
            strategy=stages(),
            devices=2,
            barebones=True,
            max_epochs=1,
            max_steps=steps,
            accumulate_grad_batches=2,
            seed=0,
        )
        torch.manual_seed(9)
        trainer.fit(module, texts((4,) * 12), ckpt_path=path)
        return trainer, module, masks

    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    fit(3)[0].save_checkpoint(f"{box[0]}/three")
    (trainer, one, masks), (_, other, _) = fit(6), fit(6, f"{box[0]}/three")
    for name, value in other.state_dict().items():
        assert torch.equal(value, one.state_dict()[name]), name
    own = trainer.strategy.world.all_gather_object(masks[:8])
    assert len({tuple(mask.flatten().tolist()) for mask in own[0] + own[1]}) == 16
    dist.barrier()
    shutil.rmtree(box[0], ignore_errors=True)


class AlwaysDrops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, True)


class Guessing(Writer):
    """Draws in evaluation: in the step, and on both stages."""

    def __init__(self) -> None:
        net = words()
        for layer in net.layers:
            layer.down = nn.Sequential(layer.down, AlwaysDrops())
        super().__init__(net)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + torch.rand(()))


def check_that_evaluations_draw_the_same_after_a_resume() -> None:
    def fit(seed: int, **options: Any) -> tk.Trainer:
        torch.manual_seed(seed + dist.get_rank())
        options = {"max_epochs": 2, "accumulate_grad_batches": 2, "seed": 0, **options}
        return train(
            Guessing(), stages(), texts((4,) * 6), texts((3, 4), seed=7), **options
        )

    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    whole = fit(1).callback_metrics["val_loss"]
    began = fit(2, max_steps=4)
    began.save_checkpoint(f"{box[0]}/four")
    assert fit(3, ckpt_path=f"{box[0]}/four").callback_metrics["val_loss"] == whole
    assert began.callback_metrics["val_loss"] != whole
    everyone = began.strategy.world.all_gather_object(whole)
    assert everyone[0] == everyone[1]
    dist.barrier()
    shutil.rmtree(box[0], ignore_errors=True)


class Pops(Writer):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        targets = batch.pop("targets")
        return F.cross_entropy(
            self.net(batch["words"])["logits"].flatten(0, 1), targets.flatten()
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class Writes(Writer):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        batch.clamp_(max=3)
        return self.loss(batch)


def check_what_a_step_does_to_its_batch() -> None:
    def batches() -> list[Any]:
        return [{"words": batch, "targets": batch.flip(1)} for batch in texts(RAGGED)]

    one, mine = Pops(), Pops()
    train(one, "single_device", batches(), max_epochs=1)
    train(mine, stages(), batches(), max_epochs=1)
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(
            value, one.state_dict()[name], rtol=1e-12, atol=1e-12
        )
    module = Writes()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(
        StrategyError, match=r"changes its batch in place(.|\n)*shape \(4, 6\)"
    ):
        train(module, stages(), texts(RAGGED))
    assert all(
        torch.equal(before[name], value) for name, value in module.state_dict().items()
    )


class Line(tk.TrainModule):
    """A Sequential of changing shapes, called as the module itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.Tanh(),
            nn.Linear(16, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 2),
        ).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch.double()).square().mean()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Itself(Line):
    def configure_parallel(self, mesh: Any) -> Any:
        return tk.ParallelPlan(pipeline=PipelinePlan(model=""))


class Transposes(nn.Module):
    """What it returns is not contiguous, nor is the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.transpose(1, 2)).transpose(1, 2))


class Mixer(Line):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (3, 2)), *(Transposes() for _ in range(4))
        ).double()


def check_other_models() -> None:
    for make in (Line, Itself):
        with case(model=make.__name__):
            both(
                make, "GPipe"
            )  # with running statistics, which the look at shapes leaves alone
    for schedule in ("1F1B", "ZBVZeroBubble"):
        with case(model="Mixer", schedule=schedule):
            both(Mixer, schedule)


def check_precision() -> None:
    one, mine = Writer(words().float()), Writer(words().float())
    for module, strategy in ((one, "single_device"), (mine, stages())):
        train(module, strategy, texts(RAGGED), precision="bf16-mixed")
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(value, one.state_dict()[name], rtol=1e-5, atol=1e-5)
    assert not torch.is_autocast_enabled("cpu")


class Overflows(Writer):
    """The second step overflows on the first stage alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        net.layers[0].up.weight.register_hook(
            lambda g: g * float("inf") if self.trainer.global_step == 1 else g
        )

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def check_scaled_gradients() -> None:
    """A step that overflows on one stage is skipped on all, and the scale adapts alike."""
    for tied in ("", "ends"):
        with case(tied=tied):
            one, mine = (Overflows(words(tied=tied).float()) for _ in range(2))
            alone = train(one, "single_device", texts(RAGGED), precision="16-mixed")
            staged = train(
                mine,
                stages(),
                texts(RAGGED),
                precision="16-mixed",
                gradient_clip_val=1e9,
            )
            for name, value in mine.state_dict().items():
                torch.testing.assert_close(
                    value, one.state_dict()[name], rtol=0, atol=2e-3
                )
            scale = staged.precision_plugin.state_dict()
            assert scale == alone.precision_plugin.state_dict()
            assert scale["scale"] == 2.0**15


class Built(Writer):
    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        self.net = self.net or words(tied="ends, blocks")


def check_tied_weights() -> None:
    for schedule, tied in (
        ("1F1B", "ends, blocks"),
        ("Interleaved1F1B", "ends, blocks"),
        ("ZBVZeroBubble", "ends"),
    ):
        with case(schedule=schedule):
            both(
                lambda tied=tied: Writer(words(tied=tied)),
                schedule,
                max_epochs=1,
                gradient_clip_val=0.05,
            )
    one, mine = Built(), Built()  # the second stage without storage, at first
    for module, strategy in ((one, "single_device"), (mine, stages())):
        train(module, strategy, texts(RAGGED), max_epochs=1)
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(
            value, one.state_dict()[name], rtol=1e-12, atol=1e-12
        )
    with pytest.raises(
        StrategyError,
        match=r"each weight's gradient separately(.|\n)*layers.6.up.weight and layers.7",
    ):
        train(Writer(words(tied="blocks")), stages("ZBVZeroBubble"), texts(RAGGED))

    class Apart(Writer):
        def configure_optimizers(self) -> Any:
            named = list(self.named_parameters())
            groups = [
                [p for n, p in named if ("embedding" in n) == first]
                for first in (True, False)
            ]
            return torch.optim.SGD(
                [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}],
                lr=0.1,
            )

    with pytest.raises(
        StrategyError,
        match=r"embedding.weight and net.head.weight are one(.|\n)*weight_decay': 0.1",
    ):
        train(Apart(words(tied="ends, blocks")), stages(), texts(RAGGED))


def check_that_tied_weights_go_on_elsewhere() -> None:
    """One name stands for the optimizer's state of both."""
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    whole = Writer(words(tied="ends, blocks"))
    train(whole, "single_device", texts(RAGGED), max_epochs=-1, max_steps=5)
    for first, then in (("single_device", stages()), (stages(), "single_device")):
        path = f"{box[0]}/{then}-{dist.get_rank() if first == 'single_device' else 0}"
        began = train(
            Writer(words(tied="ends, blocks")),
            first,
            texts(RAGGED),
            max_epochs=-1,
            max_steps=3,
        )
        began.save_checkpoint(path)
        dist.barrier()
        state = tk.checkpoint.read_checkpoint(path, parts=["model", "optimizer_states"])
        assert "net.head.weight" in state["model"]
        kept = state["optimizer_states"][0]
        assert "net.head.weight" not in [
            *kept["state"],
            *kept["param_groups"][0]["params"],
        ]
        assert "net.embedding.weight" in kept["state"]
        module = Writer(words(tied="ends, blocks", seed=5))
        train(module, then, texts(RAGGED), max_epochs=-1, max_steps=5, ckpt_path=path)
        with case(then=str(then)):
            for name, value in module.state_dict().items():
                torch.testing.assert_close(
                    value, whole.state_dict()[name], rtol=1e-12, atol=1e-12
                )
    dist.barrier()
    shutil.rmtree(box[0], ignore_errors=True)


def compared_on(strategy: Any, batch: int, count: int, **options: Any) -> None:
    """Loaders that are divided over the data ranks, which are more than one."""
    one, mine = Writer(), Writer()
    data, val = torch.cat(texts((count,))), torch.cat(texts((8,), seed=7))
    ranks = strategy.sizes["dp_shard"] * strategy.sizes["dp_replicate"]
    alone = train(
        one,
        "single_device",
        DataLoader(data, batch * ranks),
        DataLoader(val, 2 * ranks),
        **options,
    )
    split = train(
        mine, strategy, DataLoader(data, batch), DataLoader(val, 2), **options
    )
    expected = one.state_dict()
    for name, value in whole(mine.state_dict()).items():
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=1e-12,
            atol=1e-12,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    for name, value in alone.callback_metrics.items():
        torch.testing.assert_close(
            split.callback_metrics[name], value, rtol=1e-6, atol=1e-6
        )
    assert split.progress.samples == alone.progress.samples
    one_said, mine_said = (
        t.predict(t.module, DataLoader(val, 2)) for t in (alone, split)
    )
    torch.testing.assert_close(
        torch.cat(mine_said), torch.cat(one_said), rtol=1e-12, atol=1e-12
    )
    held, total = (
        sum(value.numel() for value in local(mine)),
        sum(p.numel() for p in one.parameters()),
    )
    everyone = split.strategy.world.all_gather_object(held)
    assert max(everyone) < 0.75 * total


def local(module: nn.Module) -> list[Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]


@pytest.mark.long
@pytest.mark.world_size(4)
def test_four_ranks() -> None:
    for schedule in ("1F1B", "Interleaved1F1B"):
        with case(schedule=schedule):
            both(Writer, schedule, max_epochs=1)
    clipped: dict[str, Any] = {"gradient_clip_val": 0.05}
    for sizes, schedule, count, options in (
        ({"dp_shard": 2}, "1F1B", 46, clipped),
        ({"dp_replicate": 2}, "1F1B", 45, {}),  # at the end one of them has nothing
        ({"dp_shard": 2}, "ZBVZeroBubble", 45, clipped),
        ({"tp": 2}, "GPipe", 46, clipped),
    ):
        with case(sizes=sizes, schedule=schedule):
            compared_on(stages(schedule, **sizes), 2, count, **options)


@pytest.mark.long
@pytest.mark.world_size(4)
def test_four_ranks_share_weights_and_sequences() -> None:
    check_divided_ties()
    check_with_context()


def check_divided_ties() -> None:
    """Copies in parts; a window of two schedules; and a scale."""
    for sizes, schedule, precision in (
        ({"dp_shard": 2}, "1F1B", "64-true"),
        ({"dp_shard": 2}, "ZBVZeroBubble", "64-true"),  # both copies on one rank
        ({"dp_replicate": 2}, "1F1B", "16-mixed"),
    ):
        with case(sizes=sizes, schedule=schedule, precision=precision):
            net = words(tied="ends")
            one, mine = (
                Writer(copy.deepcopy(net.float() if precision == "16-mixed" else net))
                for _ in range(2)
            )
            data = torch.cat(texts((46,)))
            options: dict[str, Any] = {
                "max_epochs": 1,
                "gradient_clip_val": 0.05,
                "precision": precision,
            }
            train(one, "single_device", DataLoader(data, 4), **options)
            split = train(
                mine, stages(schedule, **sizes), DataLoader(data, 2), **options
            )
            held, expected = whole(mine.state_dict()), one.state_dict()
            near = (
                {"rtol": 0, "atol": 2e-3}
                if precision == "16-mixed"
                else {"rtol": 1e-12, "atol": 1e-12}
            )
            for name, value in held.items():
                torch.testing.assert_close(value, expected[name], **near)
            assert split.global_step == 3


def check_with_context() -> None:
    """Each stage's attention is over the whole sequence."""
    plan = ParallelPlan(context=ContextPlan(), pipeline=PipelinePlan(model="net"))
    one, mine = Tokens(make_language(tied=True)), Tokens(make_language(tied=True), plan)
    val = make_texts([3, 4], padded=True, seed=2)
    trainers = [
        train(module, strategy, make_texts([4] * 6 + [3], padded=True), val)
        for module, strategy in ((one, "single_device"), (mine, stages(cp=2)))
    ]
    expected = one.state_dict()
    for name, value in whole(mine.state_dict()).items():
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=1e-10,
            atol=1e-10,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    for name, value in trainers[0].callback_metrics.items():
        torch.testing.assert_close(
            trainers[1].callback_metrics[name], value, rtol=1e-6, atol=1e-6
        )
    said = [torch.cat(trainer.predict(trainer.module, val)) for trainer in trainers]
    torch.testing.assert_close(said[1], said[0], rtol=1e-10, atol=1e-10)


@pytest.mark.long
@pytest.mark.world_size(8)
def test_eight_ranks_along_three_axes() -> None:
    compared_on(
        stages("Interleaved1F1B", dp_shard=2, tp=2), 2, 46, gradient_clip_val=0.05
    )
