"""Several ranks: values, predictions, stops and checkpoints are those of one process, and nobody waits for anybody."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    adamw,
    assert_close,
    assert_same,
    case,
    copy_of,
    ddp,
    doubled,
    make_batches,
    make_net,
    merged,
    plain_loop,
    sgd,
    train,
)
from trainer_kit.core.errors import LogError
from trainer_kit.strategies import DDPStrategy


def samples(count: int) -> TensorDataset:
    return TensorDataset(*merged(doubled(make_batches(1, size=count))))


def loader(count: int, size: int = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=size, **options)


def rank() -> int:
    return dist.get_rank()


# -- logged values ---------------------------------------------------------------------------------------------------


class Logging(Classifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("loss", loss.double(), on_step=True, on_epoch=True)
        self.log(
            "seen", float(len(batch[1])), on_step=False, on_epoch=True, reduce_fx="sum"
        )
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        out = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(out, batch[1]))
        self.log("val_acc", (out.argmax(1) == batch[1]).double().mean())
        self.log("val_seen", float(len(batch[1])), reduce_fx="sum")

    test_step = validation_step


class Values:
    """A logger."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.values.setdefault(step, {}).update(metrics)


def fit_logged(
    run: Any, size: int, count: int, val: int, **options: Any
) -> tuple[tk.Trainer, Values]:
    values = Values()
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    options = {
        "barebones": False,
        "logger": values,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        **quiet,
        **options,
    }
    trainer = run(
        Logging(make_net().double()), loader(count, size), loader(val, size), **options
    )
    return trainer, values


@pytest.mark.world_size(2)
def test_logged_values_are_those_of_one_process() -> None:
    # 23: two global batches of 6 and one of 5 after them; 7 validation samples: one is left for one rank alone.
    for count, every in product([18, 19, 23], [1, 50]):
        with case(count=count, every=every):
            one, ours = fit_logged(train, 6, count, 7, log_every_n_steps=every)
            both, theirs = fit_logged(ddp, 3, count, 7, log_every_n_steps=every)
            whole = {name: value.item() for name, value in one.callback_metrics.items()}
            split = {
                name: value.item() for name, value in both.callback_metrics.items()
            }
            for name in (
                "worst",
                "loss",
                "loss_step",
            ):  # the size of a batch shows in these
                whole.pop(name), split.pop(name)
            assert split == pytest.approx(whole, rel=1e-6)
            if rank() == 0:
                assert {
                    "loss_epoch",
                    "seen",
                    "val_loss",
                    "val_acc",
                    "val_seen",
                } <= whole.keys()
                for step, expected in ours.values.items():
                    expected.pop("worst", None), theirs.values[step].pop("worst", None)
                    assert theirs.values[step] == pytest.approx(expected, rel=1e-9), (
                        step
                    )
            else:
                assert theirs.values == {}, "only rank 0 writes"


@pytest.mark.world_size(2)
def test_an_epoch_without_any_flush_still_has_its_values() -> None:
    trainer, _ = fit_logged(ddp, 3, 12, 6, log_every_n_steps=0)
    assert trainer.callback_metrics["seen"] == 12
    assert trainer.callback_metrics["val_seen"] == 6


class Names(Classifier):
    """Logs another name on the rank ``odd``, at some place."""

    def __init__(self, where: str, odd: int, **options: Any) -> None:
        super().__init__(make_net().double())
        self.where, self.odd, self.options = where, odd, options

    def say(self, where: str) -> None:
        if where == self.where:
            self.log("rare" if rank() == self.odd else "usual", 1.0, **self.options)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.say("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.say("validation_step")

    def on_train_epoch_end(self) -> None:
        self.say("on_train_epoch_end")


@pytest.mark.world_size(2)
def test_ranks_that_log_different_names_get_an_error_with_the_names() -> None:
    for where, odd in product(
        ["training_step", "validation_step", "on_train_epoch_end"], [0, 1]
    ):
        with case(where=where, odd=odd):
            with pytest.raises(
                LogError, match="the ranks logged different names"
            ) as caught:
                ddp(Names(where, odd), loader(18), loader(6), log_every_n_steps=1)
            dist.barrier()
            assert f"rank {odd}: rare" in str(caught.value)
            assert f"rank {1 - odd}: usual" in str(caught.value)


@pytest.mark.world_size(2)
def test_a_name_on_one_rank_only_is_an_error_too() -> None:
    class One(Names):
        def say(self, where: str) -> None:
            if rank() == self.odd:
                super().say(where)

    for where in ["training_step", "validation_step", "on_train_epoch_end"]:
        with case(where=where):
            with pytest.raises(LogError, match="rank 0: nothing; rank 1: rare"):
                ddp(One(where, 1), loader(18), loader(6), log_every_n_steps=1)
            dist.barrier()


@pytest.mark.world_size(2)
def test_names_of_one_rank_that_are_meant_so() -> None:
    for options in ({"sync_dist": False}, {"rank_zero_only": True}):
        with case(options=options):
            trainer = ddp(
                Names("training_step", 1, **options), loader(18), log_every_n_steps=1
            )
            mine = "rare" if rank() == 1 else "usual"
            if rank() == 0 or "sync_dist" in options:
                assert trainer.callback_metrics[mine] == 1.0


@pytest.mark.world_size(2)
def test_names_may_come_in_another_order_on_each_rank() -> None:
    class Turned(Classifier):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            for name in ("a", "b") if (batch_idx + rank()) % 2 else ("b", "a"):
                self.log(name, float(ord(name)) + rank(), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = ddp(Turned(make_net().double()), loader(18), log_every_n_steps=1)
    assert trainer.callback_metrics["a"] == 97.5
    assert trainer.callback_metrics["b"] == 98.5


class Heard(tk.Callback):
    """Batches as the hooks are told of them."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append((batch_idx, len(batch[1])))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert outputs is not None
        self.batches.append((batch_idx, len(batch[1])))


class Uneven(IterableDataset[Batch]):
    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        yield from (samples(20)[i] for i in range(self.counts[rank()]))


@pytest.mark.world_size(2)
def test_no_hook_is_called_for_a_padding_batch() -> None:
    for length in (1, 3):
        with case(length=length):
            heard = Heard()
            module = Logging(make_net().double())
            options = {
                "use_distributed_sampler": False,
                "accumulate_grad_batches": length,
                "log_every_n_steps": 1,
            }
            trainer = ddp(
                module,
                DataLoader(Uneven(14, 2), batch_size=2),
                callbacks=[heard],
                **options,
            )
            assert sorted(heard.batches) == sorted(
                [(i, 2) for i in range((7, 1)[rank()])] * 2
            )
            assert trainer.callback_metrics["seen"] == 16


# -- evaluation ------------------------------------------------------------------------------------------------------


class Predicting(Logging):
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return {"number": batch[0][:, 0], "out": self.net(batch[0])}


def numbered(count: int) -> TensorDataset:
    x, y = samples(count).tensors
    x = x.clone()
    x[:, 0] = torch.arange(count)
    return TensorDataset(x, y)


def check_evaluation(world: int) -> None:
    for count in (1, 5, 12, 13, 14):
        with case(count=count):
            module, data = Predicting(make_net().double()), numbered(count)
            alone = tk.Trainer(
                barebones=True, accelerator="cpu", devices=1, inference_mode=False
            )
            expected = alone.test(
                module, DataLoader(data, batch_size=2 * world), verbose=False
            )
            options = {"strategy": "ddp"} if world > 1 else {}
            trainer = tk.Trainer(
                barebones=True, accelerator="cpu", devices=world, **options
            )
            for shuffle in (False, True):
                for verb in (trainer.test, trainer.validate):
                    (values,) = verb(
                        module,
                        DataLoader(data, batch_size=2, shuffle=shuffle),
                        verbose=False,
                    )
                    assert values == pytest.approx(expected[0], rel=1e-12)
                    assert values["val_seen"] == count
            outputs = trainer.predict(module, DataLoader(data, batch_size=2))
            assert torch.cat([output["number"] for output in outputs]).tolist() == list(
                range(count)
            )
            with torch.no_grad():
                expected_out = module.net.eval()(data.tensors[0])
            torch.testing.assert_close(
                torch.cat([output["out"] for output in outputs]), expected_out
            )
            batches = [
                (data.tensors[0][i : i + 2], data.tensors[1][i : i + 2])
                for i in range(0, count, 2)
            ]
            outputs = trainer.predict(module, batches)
            assert torch.cat([output["number"] for output in outputs]).tolist() == list(
                range(count)
            )


def test_one_process_counts_each_sample_once() -> None:
    check_evaluation(1)


@pytest.mark.world_size(2)
def test_two_ranks_count_each_sample_once() -> None:
    check_evaluation(2)


@pytest.mark.world_size(3)
def test_three_ranks_count_each_sample_once() -> None:
    check_evaluation(3)


@pytest.mark.world_size(2)
def test_values_of_several_loaders_are_separate_and_in_order() -> None:
    class Two(Predicting):
        def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
            self.log("size", float(len(batch[1])), reduce_fx="sum")

        def predict_step(
            self, batch: Batch, batch_idx: int, dataloader_idx: int
        ) -> Tensor:
            return batch[0][:, 0] + 100 * dataloader_idx

    trainer = tk.Trainer(barebones=True, accelerator="cpu", devices=2, strategy="ddp")
    loaders = [DataLoader(numbered(count), batch_size=2) for count in (5, 1)]
    first, second = trainer.test(Two(make_net().double()), loaders, verbose=False)
    assert first == {"size/dataloader_idx_0": 5.0}
    assert second == {"size/dataloader_idx_1": 1.0}
    outputs = trainer.predict(Two(make_net().double()), loaders)
    assert [torch.cat(part).tolist() for part in outputs] == [[0, 1, 2, 3, 4], [100]]


@pytest.mark.world_size(2)
def test_evaluation_uses_the_weights_and_buffers_of_rank_0() -> None:
    module = Logging(make_net(seed=rank(), norm=True).double())
    module.net[1].running_mean += rank()
    expected = Logging(make_net(seed=0, norm=True).double())
    alone = tk.Trainer(barebones=True, accelerator="cpu", devices=1)
    trainer = tk.Trainer(barebones=True, accelerator="cpu", devices=2, strategy="ddp")
    values = trainer.test(module, loader(12), verbose=False)
    assert values[0] == pytest.approx(
        alone.test(expected, loader(12), verbose=False)[0]
    )
    assert_same(module, expected)


class Statistics(Classifier):
    """What the running statistics are when validation begins, and while training."""

    def __init__(self) -> None:
        super().__init__(make_net(norm=True).double())
        self.means: list[Tensor] = []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.means.append(self.net[1].running_mean.clone())


@pytest.mark.world_size(2)
def test_running_statistics_follow_rank_0_in_evaluation() -> None:
    module = Statistics()
    trainer = ddp(module, loader(18), loader(6), max_epochs=2)
    for mean in module.means:
        both = trainer.strategy.world.all_gather(mean)
        assert torch.equal(both[0], both[1])
        assert not torch.equal(both[0], torch.zeros(16, dtype=torch.float64))


@pytest.mark.world_size(2)
def test_validation_never_changes_training() -> None:
    class Noisy(Logging):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            torch.rand(3 + rank())
            super().validation_step(batch, batch_idx)

    def run(val: Any, **options: Any) -> tuple[Noisy, list[int]]:
        torch.manual_seed(rank())
        module = Noisy(make_net(dropout=0.3, norm=True).double(), adamw)
        ddp(module, loader(22, shuffle=True), val, max_epochs=2, seed=1, **options)
        return module, torch.get_rng_state().tolist()

    plain, drawn = run(None)
    for options in ({}, {"val_check_interval": 1}):
        with case(options=options):
            module, left = run(loader(5), **options)
            assert_same(module, plain)
            assert left == drawn


@pytest.mark.world_size(2)
def test_buffers_that_are_each_ranks_own_are_so_after_validation_too() -> None:
    class Own(Logging):
        """Counts its rank into a buffer, and scales its loss by it."""

        def __init__(self) -> None:
            super().__init__(make_net().double())
            self.register_buffer("mine", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.mine += 1 + rank()
            return super().training_step(batch, batch_idx) * self.mine

    ends = []
    for val in (None, loader(6)):
        module = Own()
        strategy = DDPStrategy(broadcast_buffers=False)
        train(
            module, loader(18), val, devices=2, strategy=strategy, val_check_interval=1
        )
        assert module.mine == 3 * (1 + rank())
        ends.append(module)
    assert_same(*ends)


# -- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_early_stopping_on_a_value_of_one_rank_stops_all_at_the_same_step() -> None:
    class Local(Logging):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            # One rank gets worse, the other better and better; rank 0 decides for both.
            self.log(
                "mine",
                float(self.global_step) * (1 if rank() == self.worse else -1),
                sync_dist=False,
            )

    for worse, expected in ((0, (9, 3)), (1, (15, 5))):
        with case(worse=worse):
            module = Local(make_net().double())
            module.worse = worse
            stopping = tk.callbacks.EarlyStopping("mine", patience=2)
            trainer = ddp(
                module, loader(18), loader(6), max_epochs=5, callbacks=[stopping]
            )
            reached = (trainer.global_step, trainer.current_epoch)
            assert trainer.strategy.world.all_gather_object(reached) == [
                expected,
                expected,
            ]


@pytest.mark.world_size(2)
def test_a_stop_request_of_one_rank_reaches_all() -> None:
    class Ask(tk.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if rank() == 1 and trainer.global_step == 4:
                trainer.stop("seen enough")

    trainer = ddp(
        Classifier(make_net().double()), loader(18 * 6), max_epochs=5, callbacks=[Ask()]
    )
    steps = trainer.strategy.world.all_gather_object(trainer.global_step)
    assert steps[0] == steps[1]
    assert 4 <= steps[0] <= 18


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_a_resumed_run_ends_as_the_uninterrupted_one(tmp_path: Path) -> None:
    class Drawing(Logging):
        def __init__(self) -> None:
            super().__init__(make_net(dropout=0.3, norm=True).double(), adamw)

    def run(module: Any, ckpt: Any = None) -> tuple[list[int], dict[str, float]]:
        torch.manual_seed(rank() if ckpt is None else 50)
        saving = tk.callbacks.ModelCheckpoint(
            tmp_path, every_n_train_steps=1, save_top_k=-1
        )
        quiet = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
        }
        trainer = tk.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=3,
            callbacks=[saving],
            seed=4,
            accumulate_grad_batches=2,
            **quiet,
        )
        trainer.fit(module, loader(34, shuffle=True), loader(5), ckpt_path=ckpt)
        return torch.get_rng_state().tolist(), {
            name: value.item() for name, value in trainer.callback_metrics.items()
        }

    whole = Drawing()
    expected = run(whole)
    for step in (2, 3, 5):
        with case(step=step):
            again = Drawing()
            nn.init.zeros_(again.net[0].weight)
            assert run(again, tmp_path / f"step-{step:08d}") == expected
            assert_same(again, whole)


@pytest.mark.world_size(2)
def test_a_checkpoint_of_two_ranks_resumes_in_one_process(tmp_path: Path) -> None:
    def run(
        module: Any, devices: int, size: int, ckpt: Any = None, **options: Any
    ) -> None:
        saving = (
            tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
            if ckpt is None
            else None
        )
        quiet = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "accelerator": "cpu",
        }
        options = {
            "callbacks": saving,
            "enable_checkpointing": saving is not None,
            **quiet,
            **options,
        }
        trainer = tk.Trainer(devices=devices, max_epochs=2, seed=4, **options)
        trainer.fit(module, loader(20, size, shuffle=True), ckpt_path=ckpt)

    whole, again = Classifier(make_net().double()), Classifier(make_net().double())
    run(whole, 2, 3, strategy="ddp")
    run(again, 1, 6, tmp_path / "step-00000003")
    assert_close(again, whole)


@pytest.mark.world_size(2)
def test_a_fit_on_one_rank_does_not_affect_the_others() -> None:
    net = make_net().double()
    mine = copy_of(net)
    if rank() == 1:
        plain_loop(net, [list(loader(18))], sgd(net))
        train(Classifier(mine), list(loader(18)))
        assert_same(mine, net)
    both = make_net().double()
    ddp(Classifier(both), loader(18))
    reference = make_net().double()
    plain_loop(reference, [list(loader(18, 6))], sgd(reference))
    assert_close(both, reference)


@pytest.mark.world_size(2)
def test_nothing_of_the_wrapper_is_left_on_the_parameters() -> None:
    mine = make_net().double()
    for _ in range(2):
        trainer = ddp(Classifier(mine), loader(18))
        assert trainer.global_step == 3
        mine.zero_grad()
        if rank() == 1:  # alone: whoever exchanged here would wait for ever
            for value in (1.0, 2.0):
                (mine(torch.full((2, 8), value, dtype=torch.float64)).sum()).backward()
            assert mine[3].bias.grad.tolist() == [4.0] * 4
    dist.barrier()
    reference = make_net().double()
    for _ in range(2):
        plain_loop(reference, [list(loader(18, 6))], sgd(reference))
    assert_close(mine, reference)
