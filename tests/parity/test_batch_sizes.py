"""How many samples a batch has is what its loader drew, however the batch is laid out: against the plain loop."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
)

import trainer_kit as tk
from tests.parity.plain import (
    assert_close,
    ddp,
    doubled,
    make_batches,
    make_net,
    merged,
    plain_loop,
    sgd,
    train,
)

COUNT, SIZE = 22, 4  # five whole batches and one of two samples
EVERYTHING = doubled(make_batches(1, size=COUNT))[0]


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        x, y = EVERYTHING
        return x[index], y[index]


class Stream(IterableDataset[Any]):
    """The same samples; with workers, each reads every n-th."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        rank, size = (0, 1) if info is None else (info.id, info.num_workers)
        x, y = EVERYTHING
        return iter([(x[i], y[i]) for i in range(rank, COUNT, size)])


class Graph:
    """A batch of somebody else's library: nobody can look inside."""

    def __init__(self, samples: Any) -> None:
        xs, ys = zip(*samples, strict=True)
        self.hidden = torch.stack(xs), torch.stack(ys)


def transposed(samples: Any) -> Any:
    x, y = Graph(samples).hidden
    return x.T.contiguous(), y


def unpacked(batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch.hidden if isinstance(batch, Graph) else batch
    return (x.T, y) if x.shape[0] == 8 else (x, y)


def wrong(net: nn.Module, batch: Any) -> Tensor:
    x, y = unpacked(batch)
    return (net(x).argmax(1) != y).double().mean()


class Net(tk.TrainModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = unpacked(batch)
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("wrong", wrong(self.net, batch))

    def configure_optimizers(self) -> Any:
        return sgd(self.net)


def of_sizes(sizes: tuple[int, ...]) -> list[list[int]]:
    """Indices in batches of these sizes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


SIZES = (4, 4, 4, 4, 4, 2)
OWN = (5, 1, 7, 3, 2, 4)


class Bulk(Samples):
    """Is asked for whole batches, as torch documents it for ``batch_size=None``."""

    def __getitem__(self, index: Any) -> Any:
        return transposed([super(Bulk, self).__getitem__(i) for i in index])


LOADERS = {
    "object": (lambda: DataLoader(Samples(), batch_size=SIZE, collate_fn=Graph), SIZES),
    "transposed": (
        lambda: DataLoader(Samples(), batch_size=SIZE, collate_fn=transposed),
        SIZES,
    ),
    "object from workers": (
        lambda: DataLoader(Samples(), SIZE, collate_fn=Graph, num_workers=2),
        SIZES,
    ),
    "batch sampler": (
        lambda: DataLoader(Samples(), batch_sampler=of_sizes(OWN), collate_fn=Graph),
        OWN,
    ),
    "bulk": (
        lambda: DataLoader(
            Bulk(),
            sampler=BatchSampler(SequentialSampler(Samples()), SIZE, drop_last=False),
            batch_size=None,
        ),
        SIZES,
    ),
    "stream": (lambda: DataLoader(Stream(), batch_size=SIZE, collate_fn=Graph), SIZES),
    "transposed stream": (
        lambda: DataLoader(Stream(), batch_size=SIZE, collate_fn=transposed),
        SIZES,
    ),
    "several": (
        lambda: tk.CombinedLoader(
            [DataLoader(Samples(), SIZE, collate_fn=Graph)], "sequential"
        ),
        SIZES,
    ),
}
for_each_loader = pytest.mark.parametrize("name", LOADERS)


def batches_of(sizes: tuple[int, ...]) -> list[Any]:
    x, y = EVERYTHING
    return [(x[indices], y[indices]) for indices in of_sizes(sizes)]


def windows(sizes: tuple[int, ...], length: int) -> list[Any]:
    """What a step sees: the samples of ``length`` batches as one."""
    return batches_of(
        tuple(sum(sizes[at : at + length]) for at in range(0, len(sizes), length))
    )


@for_each_loader
def test_accumulation_weighs_batches_by_the_samples_that_the_loader_drew(
    name: str,
) -> None:
    make, sizes = LOADERS[name]
    net, mine = make_net().double(), make_net().double()
    plain_loop(net, [windows(sizes, 4)] * 2, sgd(net))
    trainer = train(Net(mine), make(), max_epochs=2, accumulate_grad_batches=4)
    assert_close(mine, net)
    assert trainer.progress.samples == 2 * COUNT


@for_each_loader
def test_means_are_those_over_all_samples(name: str) -> None:
    make, sizes = LOADERS[name]
    net, mine, losses = make_net().double(), make_net().double(), 0.0
    optimizer = sgd(net)
    for x, y in batches_of(sizes):
        losses += F.cross_entropy(net(x), y).item() * len(y)
        plain_loop(net, [[(x, y)]], optimizer)
    trainer = train(
        Net(mine),
        make(),
        make(),
        barebones=False,
        logger=False,
        enable_checkpointing=False,
    )
    assert_close(mine, net)
    assert trainer.callback_metrics["loss"] == pytest.approx(losses / COUNT)
    assert trainer.callback_metrics["wrong"] == pytest.approx(
        wrong(net, EVERYTHING).item()
    )
    assert trainer.progress.samples == COUNT


def test_workers_of_a_stream_end_with_short_batches_each() -> None:
    """Two workers read 11 samples each: 4, 4 and 3."""
    loader = DataLoader(Stream(), batch_size=SIZE, collate_fn=Graph, num_workers=2)
    net, mine = make_net().double(), make_net().double()
    x, y = EVERYTHING
    turns = [
        list(range(worker, COUNT, 2))[at : at + SIZE]
        for at in range(0, 11, SIZE)
        for worker in (0, 1)
    ]
    steps = [[i for turn in turns[at : at + 3] for i in turn] for at in (0, 3)]
    plain_loop(net, [[(x[step], y[step]) for step in steps]], sgd(net))
    trainer = train(Net(mine), loader, accumulate_grad_batches=3)
    assert_close(mine, net)
    assert trainer.progress.samples == COUNT


@pytest.mark.world_size(2)
def test_two_ranks_weight_their_batches_by_drawn_samples() -> None:
    for name in ("object", "transposed", "batch sampler", "stream"):
        make, sizes = LOADERS[name]
        net, mine = make_net().double(), make_net().double()
        # A rank's batch has SIZE samples, or is one of the sampler's.
        plain_loop(net, [windows(sizes, 2)], sgd(net))
        trainer = ddp(
            Net(mine),
            make(),
            make(),
            barebones=False,
            logger=False,
            enable_checkpointing=False,
        )
        assert_close(mine, net)
        assert trainer.progress.samples == COUNT, name
        assert trainer.callback_metrics["wrong"] == pytest.approx(
            wrong(net, EVERYTHING).item()
        ), name


def test_resuming_inside_an_epoch_keeps_the_sizes(tmp_path: Any) -> None:
    make, _ = LOADERS["batch sampler"]
    whole, first, second = (make_net().double() for _ in range(3))
    options: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "barebones": False,
        "logger": False,
    }
    options |= {"enable_progress_bar": False, "default_root_dir": tmp_path}
    train(Net(whole), make(), **options)
    trainer = train(Net(first), make(), max_steps=2, **options)
    trainer.save_checkpoint(tmp_path / "middle")
    resumed = tk.Trainer(
        max_epochs=1,
        accelerator="cpu",
        **{k: v for k, v in options.items() if k != "barebones"},
    )
    resumed.fit(Net(second), make(), ckpt_path=tmp_path / "middle")
    assert_close(second, whole)
    assert resumed.progress.samples == COUNT


class Backwards(DataLoader[Any]):
    """Its batches come in another order than that in which they were drawn."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


def test_a_loader_with_its_own_iteration_is_read_batch_by_batch() -> None:
    net, mine = make_net().double(), make_net().double()
    batches = batches_of(SIZES)[::-1]
    plain_loop(net, [[merged(batches[:4]), merged(batches[4:])]], sgd(net))
    trainer = train(
        Net(mine), Backwards(Samples(), batch_size=SIZE), accumulate_grad_batches=4
    )
    assert_close(mine, net)
    assert trainer.progress.samples == COUNT


# -- what no loader knows is asked for ---------------------------------------------------------------------------------


def graphs() -> list[Graph]:
    x, y = EVERYTHING
    return [Graph([(x[i], y[i]) for i in indices]) for indices in of_sizes(SIZES)]


ASKED = r"number of samples.*Graph.*loss_weight"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_that_cannot_be_counted_are_asked_for_once(accumulate: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(
            Net(make_net().double()),
            graphs(),
            max_epochs=2,
            accumulate_grad_batches=accumulate,
        )
    (asked,) = [
        str(one.message) for one in caught if re.search(ASKED, str(one.message))
    ]
    assert ("batch_size=" in asked) == (
        accumulate == 1
    )  # the mean that is logged, or the step


@pytest.mark.filterwarnings("default")
def test_a_mean_over_an_evaluation_asks_too() -> None:
    trainer = tk.Trainer(barebones=True, accelerator="cpu", devices=1)
    with pytest.warns(UserWarning, match=ASKED):
        trainer.validate(Net(make_net().double()), graphs())


@pytest.mark.filterwarnings("default")
def test_tensors_of_different_lengths_are_asked_for() -> None:
    batches = [
        transposed([(x, y) for x, y in zip(*batch, strict=True)])
        for batch in batches_of(SIZES)
    ]
    with pytest.warns(
        UserWarning, match=r"its tensors have 8 and 4 rows.*8 are counted"
    ):
        train(Net(make_net().double()), batches, accumulate_grad_batches=2)


def test_given_batch_sizes_are_used_without_a_warning() -> None:
    class Gives(Net):
        def loss_weight(self, batch: Any) -> int:
            return len(batch.hidden[1])

    class Says(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = unpacked(batch)
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_epoch=True, batch_size=len(y))
            self.log("largest", loss, on_epoch=True, reduce_fx="max")
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log(
                "wrong", wrong(self.net, batch), batch_size=len(unpacked(batch)[1])
            )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net, mine = make_net().double(), make_net().double()
        plain_loop(net, [windows(SIZES, 4)], sgd(net))
        train(Gives(mine), graphs(), graphs(), accumulate_grad_batches=4)
        assert_close(mine, net)
        trainer = train(
            Says(mine),
            graphs(),
            graphs(),
            barebones=False,
            logger=False,
            enable_checkpointing=False,
        )
        assert trainer.callback_metrics["wrong"] == pytest.approx(
            wrong(mine, EVERYTHING).item()
        )


# -- a loop of the user's own ------------------------------------------------------------------------------------------


def loop(accelerator: tk.Accelerator, net: nn.Module, loader: Any) -> None:
    net, optimizer, loader = accelerator.prepare(net, sgd(net), loader)
    for batch in loader:
        with accelerator.accumulate(net):
            x, y = unpacked(batch)
            accelerator.backward(F.cross_entropy(net(x), y))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "name", [name for name in LOADERS if name != "several"]
)  # which it does not prepare
def test_an_accelerator_accumulates_by_samples(name: str) -> None:
    make, sizes = LOADERS[name]
    net, mine = make_net().double(), make_net().double()
    plain_loop(net, [windows(sizes, 4)], sgd(net))
    loop(tk.Accelerator(cpu=True, gradient_accumulation_steps=4), mine, make())
    assert_close(mine, net)


@pytest.mark.world_size(2)
def test_results_for_metrics_are_those_of_each_sample_once() -> None:
    accelerator = tk.Accelerator(cpu=True)
    for dispatch in (False, True):
        accelerator.dataloader_config.dispatch_batches = dispatch
        loader = accelerator.prepare_data_loader(
            DataLoader(Samples(), batch_size=SIZE, collate_fn=Graph)
        )
        labels = [accelerator.gather_for_metrics(batch.hidden[1]) for batch in loader]
        assert torch.equal(torch.cat(labels), EVERYTHING[1]), dispatch


@pytest.mark.filterwarnings("default")
def test_an_accelerator_asks_too() -> None:
    accelerator = tk.Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = accelerator.prepare_data_loader(graphs())
    with pytest.warns(
        UserWarning, match=r"number of samples.*Graph.*backward\(loss, weight="
    ):
        loop(accelerator, make_net().double(), loader)
