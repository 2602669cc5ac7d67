"""Programs with the calls of Lightning's Fabric examples, in their order; prints the trained numbers of each.

The first argument is the package that has ``Fabric`` and ``seed_everything``. Shuffled loaders have generators of their
own, because the order of other ones is a function of seed and epoch here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

package = import_module(sys.argv[1])
SAMPLES = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(SAMPLES, torch.arange(40) % 3)
EPOCHS = 2


def start() -> Any:
    return package.Fabric(accelerator="cpu", devices=1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=8, **options)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers_of(*modules: nn.Module) -> list[float]:
    vectors = [nn.utils.parameters_to_vector(module.parameters()) for module in modules]
    return [number for vector in vectors for number in vector.tolist()]


def train_epoch(fabric: Any, model: Any, optimizer: Any, batches: Any) -> None:
    model.train()
    for inputs, targets in batches:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()


@torch.no_grad()
def evaluate(model: Any, batches: Any) -> float:
    model.eval()
    total = 0.0
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets, reduction="sum")
        total += loss.item()
    return total


def image_classifier() -> list[float]:
    fabric = start()
    package.seed_everything(1)
    with fabric.rank_zero_first(local=False):
        train, test = loader(), loader()
    train, test = fabric.setup_dataloaders(train, test)
    model = network()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for _ in range(EPOCHS):
        train_epoch(fabric, model, optimizer, train)
        scheduler.step()
        loss = fabric.all_gather(evaluate(model, test)).sum() / len(test.dataset)
        losses.append(float(loss))
    return [*numbers_of(model), *losses]


def dcgan() -> list[float]:
    package.seed_everything(999)
    fabric = start()
    fabric.launch()
    batches = loader(shuffle=True, generator=generator(5))
    next(iter(batches))
    maker = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)
    )
    judge = nn.Sequential(
        nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid()
    )
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=0.002, betas=(0.5, 0.999))
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.002, betas=(0.5, 0.999))
    judge, judge_optimizer = fabric.setup(judge, judge_optimizer)
    maker, maker_optimizer = fabric.setup(maker, maker_optimizer)
    batches = fabric.setup_dataloaders(batches)

    def judged(samples: Tensor, label: float) -> None:
        labels = torch.full((len(samples),), label, device=fabric.device)
        fabric.backward(F.binary_cross_entropy(judge(samples).view(-1), labels))

    for _ in range(EPOCHS):
        for samples, _ in batches:
            judge.zero_grad()
            judged(samples, 1.0)
            noise = torch.randn(len(samples), 4, device=fabric.device)
            fakes = maker(noise)
            judged(fakes.detach(), 0.0)
            judge_optimizer.step()
            maker.zero_grad()
            judged(fakes, 1.0)
            maker_optimizer.step()
            fabric.barrier()
    return numbers_of(judge, maker)


def kfold_cv() -> list[float]:
    fabric = start()
    package.seed_everything(1)
    folds = [(range(20), range(20, 40)), (range(20, 40), range(20))]
    models: list[Any] = [network() for _ in folds]
    pairs = []
    for model in models:
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
        pairs.append(fabric.setup(model, optimizer))
    losses = []
    for epoch in range(EPOCHS):
        for (train, test), (model, optimizer) in zip(folds, pairs, strict=True):
            train_sampler = SubsetRandomSampler(train, generator(epoch))
            test_sampler = SubsetRandomSampler(test, generator(epoch))
            train_batches, test_batches = fabric.setup_dataloaders(
                loader(sampler=train_sampler), loader(sampler=test_sampler)
            )
            train_epoch(fabric, model, optimizer, train_batches)
            losses.append(evaluate(model, test_batches))
    return [*numbers_of(*models), *losses]


def language_model() -> list[float]:
    package.seed_everything(42)
    fabric = start()
    train, test = loader(shuffle=True, generator=generator(3)), loader()
    model: Any = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    train, test = fabric.setup_dataloaders(train, test)
    losses = []
    for _ in range(EPOCHS):
        model.train()
        for inputs, targets in train:
            fabric.backward(F.cross_entropy(model(inputs), targets))
            fabric.clip_gradients(model, optimizer, clip_val=0.25)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(evaluate(model, test))
    return [*numbers_of(model), *losses]


def meta_learning() -> list[float]:
    fabric = start()
    package.seed_everything(42 + fabric.global_rank)
    model = fabric.to_device(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def loss_of(weights: dict[str, Tensor], task: tuple[Tensor, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(model, weights, task[0])
        return F.cross_entropy(outputs, task[1])

    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for _ in range(4):
            task = fabric.to_device((torch.randn(6, 6), torch.randint(3, (6,))))
            weights = dict(model.named_parameters())
            gradients = torch.autograd.grad(
                loss_of(weights, task), list(weights.values()), create_graph=True
            )
            adapted = {}
            for (name, weight), gradient in zip(
                weights.items(), gradients, strict=True
            ):
                adapted[name] = weight - 0.5 * gradient
            fabric.backward(loss_of(adapted, task))
        for parameter in model.parameters():
            parameter.grad.data.mul_(1 / 4)
        optimizer.step()
    return numbers_of(model)


PROGRAMS: list[Callable[[], list[float]]] = [
    image_classifier,
    dcgan,
    kfold_cv,
    language_model,
    meta_learning,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {program.__name__: program() for program in PROGRAMS}
    print("RESULTS", json.dumps(results))
