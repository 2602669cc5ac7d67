"""Planted faults, each with the kind and place that `verify` must name, and healthy configurations, none accused."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

import trainer_kit as tk
from tests.verify import verified
from tests.verify.test_local import verify
from trainer_kit.strategies import DDPStrategy, FSDPStrategy

pytestmark = pytest.mark.slow


def rank():
    return dist.get_rank() if verified.ranked() else 0


class Base(verified.Classifier):
    """Every part can be replaced."""

    def training_step(self, batch, batch_idx):
        x, y = self.change(batch[0], batch[1])
        loss = self.loss(self.net(x), y)
        self.log("loss", loss.detach())
        return loss

    def change(self, x, y):
        return x, y

    def loss(self, outputs, y):
        return F.cross_entropy(outputs, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def module(**methods):
    return lambda: type("Net", (Base,), methods)()


def scaled_loss(factor):
    return lambda self, outputs, y: (
        F.cross_entropy(outputs, y) * (factor if verified.ranked() else 1)
    )


def with_layer(index, make):
    def build():
        net = Base()
        net.net[index] = make()
        return net

    return build


class Strategy(DDPStrategy):
    """Changes the module on the ranks, behind `plant`."""

    def __init__(self, plant):
        super().__init__()
        self.plant = plant

    def prepare_module(self, module, manual, precision):
        self.plant(module)
        super().prepare_module(module, manual, precision)


def set_layer(index, make):
    def plant(module):
        module.net[index] = make()

    return lambda: Strategy(plant)


def add_to_weight(module):
    module.net[4].weight.data += 0.1


def freeze(module):
    module.net[4].weight.requires_grad_(False)


class ScaledBackward(torch.autograd.Function):
    """A backward with another scale where ``bad`` is true."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


class LowBackward(nn.Module):
    """Scales the gradient in one dtype only."""

    def __init__(self, dtype, scale):
        super().__init__()
        self.dtype, self.scale = dtype, scale

    def forward(self, x):
        return ScaledBackward.apply(x, self.scale if x.dtype == self.dtype else 1.0)


class RankBackward(nn.Module):
    def forward(self, x):
        return ScaledBackward.apply(x, 0.5 if verified.ranked() else 1.0)


class Summed(nn.Module):
    """A running mean that ranks sum."""

    divide = 1

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        mean = x.detach().mean(0).to(self.mean.dtype)
        if verified.ranked():
            dist.all_reduce(mean)
            mean = mean / self.divide
        self.mean.lerp_(mean, 0.1)
        return x


class Averaged(Summed):
    divide = 2


class OneRankMoves(nn.Module):
    """A running mean that only one rank moves."""

    def __init__(self, moving=0):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.moving = moving

    def forward(self, x):
        if not verified.ranked() or rank() == self.moving:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.1)
        return x


class Counter(nn.Module):
    """Counts samples in a buffer; ``wrong``: the batches of ranks by another number."""

    def __init__(self, extra=0):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.extra = extra

    def forward(self, x):
        self.seen += len(x) + (self.extra if verified.ranked() else 0)
        return x


class Momentum(Base):
    """A teacher in frozen parameters, moved in the step; ``everywhere``: by each rank."""

    everywhere = True

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if self.everywhere or rank() == 0:
            with torch.no_grad():
                for slow, fast in zip(
                    self.teacher.parameters(), self.net.parameters(), strict=True
                ):
                    slow.lerp_(fast, 0.5)
        target = self.teacher(batch[0]).softmax(-1).detach()
        return F.cross_entropy(self.net(batch[0]), target) + F.cross_entropy(
            self.net(batch[0]), batch[1]
        )


class LazyMomentum(Momentum):
    everywhere = False


class SameOrder(Sampler):
    """Divides the data, and shuffles each epoch in the same way."""

    def __init__(self):
        self.num_replicas, self.rank = 1, 0

    def __len__(self):
        return 64

    def __iter__(self):
        return iter(
            torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
        )


class ByRank(Dataset):
    """Its samples depend on the rank."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x, y = verified.data()[index]
        return x + rank(), y


def on_ranks(change):
    def hook(self, *arguments):
        if verified.ranked():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    change(parameter.grad)

    return hook


def optimizer_of(change):
    def configure(self):
        return change(self, verified.ranked())

    return configure


def skips_bias(self, bad):
    parameters = [
        value
        for name, value in self.named_parameters()
        if not (bad and name.endswith("bias"))
    ]
    return torch.optim.SGD(parameters, lr=0.1)


def step_lr(self, bad):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1 if bad else 0.5)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def masked_mean(self, outputs, y):
    return F.cross_entropy(outputs, y, ignore_index=0)


def valid(self, batch):
    return (batch[1] != 0).sum()


def system_noise(self, x, y):
    return x + 0.01 * np.random.default_rng().random(), y


class Remembers(Base):
    """Its loss depends on the loss of the last step, which no checkpoint holds."""

    last = 1.0

    def loss(self, outputs, y):
        loss = F.cross_entropy(outputs, y)
        scaled = loss * self.last
        self.last = float(loss.detach())
        return scaled


class History(Base):
    """Keeps a list that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def loss(self, outputs, y):
        self.steps.append(len(self.steps))
        return F.cross_entropy(outputs, y) / len(self.steps)


class EvalForever(Base):
    """Validation leaves a dropout switched off."""

    def __init__(self):
        super().__init__()
        self.net[3] = nn.Dropout(0.5)

    def on_validation_end(self):
        self.net[3].p = 0.0


class WritesInValidation(Base):
    def validation_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].weight.mul_(1.01)


class ClipsParts(Base):
    """Clips the gradient of each micro-batch, before that of the step is complete."""

    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class KeepsGradients(Base):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if not verified.ranked():
            optimizer.zero_grad()


class SchedulesTwice(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        if verified.ranked():
            scheduler.step()


class Dropout(Base):
    def __init__(self):
        super().__init__()
        self.net[3] = nn.Dropout(0.5)


class EvaluatesOnRanks(Dropout):
    def training_step(self, batch, batch_idx):
        if verified.ranked():
            self.eval()
        return super().training_step(batch, batch_idx)


class FreezesInValidation(Base):
    def on_validation_end(self):
        self.net[0].requires_grad_(False)


class SeedsInValidation(Dropout):
    """The Trainer keeps the random state of training away from validation, so that this harms nobody."""

    def on_validation_end(self):
        torch.manual_seed(0)


class Warmup(Base):
    """Its learning rate follows a counter that no checkpoint holds."""

    steps = 0

    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / self.steps
        optimizer.step(closure)


class CopiedTeacher(Momentum):
    """A teacher that ranks replace, and one process moves by half."""

    def training_step(self, batch, batch_idx):
        target = self.teacher(batch[0]).softmax(-1).detach()
        imitation = F.cross_entropy(self.net(batch[0]), target)
        return imitation + F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        share = 1.0 if verified.ranked() else 0.5
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, share)


class Imitates(Momentum):
    """Starts as its teacher: the first gradients cancel, and are rounding errors alone."""

    def training_step(self, batch, batch_idx):
        target = self.teacher(batch[0]).softmax(-1).detach()
        return F.cross_entropy(self.net(batch[0]), target)


class LowNorm(nn.Module):
    """A norm whose eps is far too large in bfloat16."""

    def forward(self, x):
        eps = 1.0 if x.dtype == torch.bfloat16 else 1e-6
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def smoothed(self, outputs, y):
    return F.cross_entropy(
        outputs, y, label_smoothing=0.1 if verified.ranked() else 0.0
    )


def half_on_ranks(self, x, y):
    return (x[:2], y[:2]) if verified.ranked() else (x, y)


def rolled_on_ranks(self, x, y):
    return x, y.roll(1) if verified.ranked() else y


ONE = {"devices": 1, "strategy": "auto"}
TWO = {}
BF16 = {**ONE, "precision": "bf16-true"}
FAULTS = {
    # loss and its weighting
    "loss halved on ranks": (module(loss=scaled_loss(0.5)), TWO, ("loss", "")),
    "loss doubled on ranks": (module(loss=scaled_loss(2)), TWO, ("loss", "")),
    "loss negated on ranks": (module(loss=scaled_loss(-1)), TWO, ("loss", "")),
    "loss summed": (
        module(loss=lambda self, o, y: F.cross_entropy(o, y, reduction="sum")), TWO, ("layout", ""),
    ),
    "mean over valid targets": (module(loss=masked_mean), TWO, ("layout", "")),
    "window of valid targets": (module(loss=masked_mean), {**ONE, "accumulate_grad_batches": 2}, ("layout", "")),
    "window of sums": (
        module(loss=lambda self, o, y: F.cross_entropy(o, y, reduction="sum") / (1 + (y == 0).sum())),
        {**ONE, "accumulate_grad_batches": 2}, ("layout", ""),
    ),
    "window of valid targets on ranks": (
        module(loss=masked_mean), {"accumulate_grad_batches": 2}, ("layout", ""),
    ),
    "weight of another key": (
        module(loss=masked_mean, loss_weight=lambda self, batch: (batch[1] != 1).sum()),
        {**ONE, "accumulate_grad_batches": 2}, ("layout", ""),
    ),
    "weight of the inputs": (
        module(loss_weight=lambda self, batch: batch[0].abs().sum()),
        {**ONE, "accumulate_grad_batches": 2}, ("layout", ""),
    ),
    "weight of a rank": (
        module(loss_weight=lambda self, batch: torch.tensor(1.0 + rank())), TWO, ("backward", "net.5"),
    ),
    "label smoothing on ranks": (module(loss=smoothed), TWO, ("backward", "net.5")),
    "half of the batch on ranks": (module(change=half_on_ranks), TWO, ("loss", "")),
    "pairs of a rank": (verified.Pairs, TWO, ("layout", "")),
    "statistics of the batch": (verified.Apart, TWO, ("layout", "net.2")),
    # layers
    "another eps": (Base, {"strategy": set_layer(1, lambda: nn.LayerNorm(16, eps=0.1))}, ("forward", "net.1")),
    "another activation": (Base, {"strategy": set_layer(2, nn.ReLU)}, ("forward", "net.2")),
    "tanh GELU": (Base, {"strategy": set_layer(2, lambda: nn.GELU("tanh"))}, ("forward", "net.2")),
    "a weight moved": (Base, {"strategy": lambda: Strategy(add_to_weight)}, ("forward", "net.4")),
    "norm left out": (Base, {"strategy": set_layer(1, nn.Identity)}, ("forward", "net.1")),
    "evaluation mode on ranks": (EvaluatesOnRanks, TWO, ("forward", "net.3")),
    "another dropout": (Base, {"strategy": set_layer(3, lambda: nn.Dropout(0.5))}, ("forward", "net.3")),
    "softmax over samples": (Base, {"strategy": set_layer(3, lambda: nn.Softmax(0))}, ("forward", "net.3")),
    "backward halved on ranks": (with_layer(3, RankBackward), TWO, ("backward", "net.2")),
    "detached": (
        module(change=lambda self, x, y: (x, y), loss=lambda self, o, y: F.cross_entropy(
            o.detach() + 0 * o if rank() else o, y)), TWO, ("backward", "net.5"),
    ),
    "frozen on ranks": (Base, {"strategy": lambda: Strategy(freeze)}, ("gradients", "net.4.weight")),
    # gradients
    "not exchanged": (Base, {"strategy": verified.NoExchange}, ("gradients", "net.0.weight")),
    "divided twice": (
        Base, {"strategy": verified.WrongDivisor, "accumulate_grad_batches": 2}, ("gradients", "net.0.weight"),
    ),
    "gradients doubled in a hook": (
        module(on_before_optimizer_step=on_ranks(lambda g: g.mul_(2))), TWO, ("weights", "net.0.weight"),
    ),
    "gradients clamped in a hook": (
        module(on_before_optimizer_step=on_ranks(lambda g: g.clamp_(-1e-3, 1e-3))), TWO, ("weights", "net.0.weight"),
    ),
    "gradients zeroed in a hook": (
        module(on_before_optimizer_step=on_ranks(lambda g: g.zero_())), TWO, ("weights", "net.0.weight"),
    ),
    "gradients kept on ranks": (KeepsGradients, TWO, ("gradients", "net.0.weight")),
    "clipped before the exchange": (ClipsParts, TWO, ("gradients", "net.0.weight")),
    "clipped in each micro-batch": (ClipsParts, {**ONE, "accumulate_grad_batches": 2}, ("layout", "")),
    # optimizers and schedules
    "a schedule stepped twice": (SchedulesTwice, TWO, ("weights", "net.0.weight")),
    "biases skipped": (module(configure_optimizers=optimizer_of(skips_bias)), TWO, ("gradients", "net.0.bias")),
    "another rate": (
        module(configure_optimizers=optimizer_of(lambda m, bad: torch.optim.SGD(m.parameters(), 0.2 if bad else 0.1))),
        TWO, ("weights", "net.0.weight"),
    ),
    "another momentum": (
        module(configure_optimizers=optimizer_of(
            lambda m, bad: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9 if bad else 0.5))),
        TWO, ("weights", "net.0.weight"),
    ),
    "weight decay": (
        module(configure_optimizers=optimizer_of(
            lambda m, bad: torch.optim.SGD(m.parameters(), 0.1, weight_decay=0.1 if bad else 0))),
        TWO, ("weights", "net.0.weight"),
    ),
    "another schedule": (module(configure_optimizers=optimizer_of(step_lr)), TWO, ("weights", "net.0.weight")),
    # buffers
    "a mean that ranks sum": (with_layer(3, Summed), TWO, ("buffers", "net.3.mean")),
    "a mean that rank 1 never moves": (with_layer(3, OneRankMoves), TWO, ("buffers", "net.3.mean")),
    "a mean that rank 0 never moves": (with_layer(3, lambda: OneRankMoves(1)), TWO, ("buffers", "net.3.mean")),
    "a count of other batches": (with_layer(3, lambda: Counter(1)), TWO, ("buffers", "net.3.seen")),
    "a teacher that rank 1 never moves": (LazyMomentum, TWO, ("forward", "teacher.0")),
    "a teacher that ranks copy": (CopiedTeacher, TWO, ("forward", "teacher.0")),
    "tied weights apart": (verified.Tied, {"strategy": verified.Untied}, ("tied", "embed.weight and head.weight")),
    # data
    "a sampler that repeats": (Base, {"use_distributed_sampler": False}, ("samples", "sample 0")),
    "samples of a rank": (Base, TWO, ("data", None)),
    "state in the data": (Base, TWO, ("data", None)),
    "an order without epochs": (Base, ONE, ("samples", "")),
    "input shifted by rank": (module(change=lambda self, x, y: (x + rank(), y)), TWO, ("forward", "net.0")),
    "targets of rank 1": (module(change=lambda self, x, y: (x, (y + rank()) % 4)), TWO, ("backward", "net.5")),
    "targets rolled on ranks": (module(change=rolled_on_ranks), TWO, ("backward", "net.5")),
    # precision
    "bfloat16 norm with a large eps": (with_layer(1, LowNorm), BF16, ("precision", None)),
    "bfloat16 backward negated": (with_layer(3, lambda: LowBackward(torch.bfloat16, -1.0)), BF16, ("precision", None)),
    "bfloat16 backward at 0.9": (with_layer(3, lambda: LowBackward(torch.bfloat16, 0.9)), BF16, ("precision", None)),
    "bfloat16 backward at 0": (with_layer(3, lambda: LowBackward(torch.bfloat16, 0.0)), BF16, ("precision", None)),
    "bfloat16 backward doubled on ranks": (
        with_layer(3, lambda: LowBackward(torch.bfloat16, 2.0)), {"precision": "bf16-true"}, ("precision", None),
    ),
    "float32 backward at 0.5": (with_layer(3, lambda: LowBackward(torch.float32, 0.5)), ONE, ("precision", None)),
    # random numbers and state
    "noise of the system": (module(change=system_noise), ONE, ("repeat", None)),
    "a loss that is remembered": (Remembers, ONE, ("resume", "last")),
    "a list that is forgotten": (History, ONE, ("resume", "steps")),
    "a generator that is forgotten": (verified.OwnMasks, ONE, ("resume", "net.3")),
    "a rate that is forgotten": (Warmup, ONE, ("resume", "steps")),
    "frozen by validation": (FreezesInValidation, ONE, ("validation", "net.0.weight")),
    "dropout switched off": (EvalForever, ONE, ("validation", "net.3")),
    "weights written in validation": (WritesInValidation, ONE, ("validation", "net.0")),
    "a scale set by validation": (verified.CountsValidation, ONE, ("validation", "scale")),
}  # fmt: skip
LOADERS = {
    "a sampler that repeats": lambda: verified.loader(
        sampler=verified.Repeating(), shuffle=None
    ),
    "samples of a rank": lambda: DataLoader(ByRank(), batch_size=4, shuffle=True),
    "state in the data": lambda: DataLoader(verified.Counting(), batch_size=4),
    "an order without epochs": lambda: verified.loader(
        sampler=SameOrder(), shuffle=None
    ),
}
QUICK = ("loss halved on ranks", "window of valid targets", "tanh GELU", "a mean that ranks sum", "targets of rank 1",
         "bfloat16 backward at 0.9", "an order without epochs", "a mean that rank 1 never moves")  # fmt: skip


def cases(names):
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
        for name in names
    ]


def run(build, options, name, steps=2):
    options = {
        key: value() if callable(value) else value for key, value in options.items()
    }
    loader = LOADERS[name]() if name in LOADERS else None
    val = verified.loader(8) if "validation" in name or "switched" in name else None
    return verify(build(), loader, val, steps=steps, **options)


@pytest.mark.parametrize("name", cases(FAULTS))
def test_a_planted_fault_is_the_headline(name):
    build, options, (kind, where) = FAULTS[name]
    result = run(build, options, name)
    assert result.first is not None, str(result)
    assert result.first.kind == kind, str(result)
    assert where is None or result.first.where == where, str(result)


class Spread(Base):
    """Its loader, sampler and length come from the module; its step takes no number."""

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self):
        return verified.loader(size=8 // self.trainer.world_size)


class Hooks(Base):
    """Reads and logs in every hook."""

    def on_train_batch_start(self, batch, batch_idx):
        self.log("size", float(len(batch[0])))

    def on_before_zero_grad(self, optimizer):
        assert all(torch.isfinite(value).all() for value in self.parameters())

    def on_after_backward(self):
        assert any(value.grad is not None for value in self.parameters())


class Normalizes(Base):
    """Changes its own fresh batch in place, which harms nobody."""

    def change(self, x, y):
        return x.sub_(x.mean(1, keepdim=True)), y


class Queue(Base):
    """A buffer of past features, written by each rank."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 8))

    def change(self, x, y):
        self.queue.copy_(x.detach()[:4])
        return x, y


class Gathered(Base):
    """Logs a value of all ranks."""

    def loss(self, outputs, y):
        self.log("all", self.all_gather(outputs.detach().mean()).mean())
        return F.cross_entropy(outputs, y)


class Weighted(Base):
    loss, loss_weight = masked_mean, valid


def optimizer(make):
    return module(configure_optimizers=lambda self: make(self.parameters()))


def scheduled(make):
    def configure(self):
        chosen = torch.optim.SGD(self.parameters(), lr=0.1)
        return [chosen], [{"scheduler": make(chosen), "interval": "step"}]

    return module(configure_optimizers=configure)


def python_noise(self, x, y):
    return x + 0.01 * random.random(), y


def numpy_noise(self, x, y):
    return x + 0.01 * np.random.rand(), y


FLOAT16 = {**ONE, "precision": "16-true"}
WINDOW = {"accumulate_grad_batches": 2}
HEALTHY = {
    "plain": (Base, TWO),
    "one process": (Base, ONE),
    "fsdp": (Base, {"strategy": FSDPStrategy}),
    "own buffers": (Base, {"strategy": lambda: DDPStrategy(broadcast_buffers=False)}),
    "window": (Base, {**ONE, **WINDOW}),
    "window on ranks": (Base, WINDOW),
    "clipped by norm": (Base, {"gradient_clip_val": 0.1}),
    "clipped by value": (
        Base,
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "bf16-true": (Base, BF16),
    "bf16-mixed": (Base, {**ONE, "precision": "bf16-mixed"}),
    "bf16-mixed on ranks": (Base, {"precision": "bf16-mixed"}),
    "16-true": (Base, FLOAT16),
    "64-true": (Base, {**ONE, "precision": "64-true"}),
    "adam": (optimizer(lambda p: torch.optim.Adam(p, 0.01)), TWO),
    "adagrad": (optimizer(lambda p: torch.optim.Adagrad(p, 0.1)), ONE),
    "rmsprop": (optimizer(lambda p: torch.optim.RMSprop(p, 0.01)), ONE),
    "nesterov": (
        optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
        TWO,
    ),
    "cosine": (
        scheduled(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)),
        TWO,
    ),
    "one cycle": (
        scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=9)),
        ONE,
    ),
    "batch norm": (with_layer(1, lambda: nn.BatchNorm1d(16)), TWO),
    "batch norm in a window": (with_layer(1, lambda: nn.BatchNorm1d(16)), WINDOW),
    "batch norm in bfloat16": (
        with_layer(1, lambda: nn.BatchNorm1d(16)),
        {**ONE, "precision": "bf16-mixed"},
    ),
    "dropout": (lambda: verified.Classifier(dropout=0.3), TWO),
    "dropout in a window": (
        lambda: verified.Classifier(dropout=0.3),
        {**ONE, **WINDOW},
    ),
    "relu": (with_layer(2, nn.ReLU), TWO),
    "a mean that ranks average": (with_layer(3, Averaged), TWO),
    "a mean of each rank": (with_layer(3, verified.Running), TWO),
    "a count of samples": (with_layer(3, Counter), TWO),
    "a count in a window": (with_layer(3, Counter), {**ONE, **WINDOW}),
    "momentum encoder": (Momentum, TWO),
    "momentum encoder in a window": (Momentum, WINDOW),
    "spectral norm": (verified.Spectral, TWO),
    "tied": (verified.Tied, TWO),
    "weighted targets": (Weighted, WINDOW),
    "weighted targets in a window": (Weighted, {**ONE, **WINDOW}),
    "python's random": (module(change=python_noise), TWO),
    "numpy's random": (module(change=numpy_noise), TWO),
    "hooks": (Hooks, TWO),
    "batch changed in place": (Normalizes, TWO),
    "a queue": (Queue, TWO),
    "values of all ranks": (Gathered, TWO),
    "own loader": (Spread, TWO),
    "manual optimization": (verified.GAN, TWO),
    "imitates its own start": (Imitates, ONE),
    "seeded by validation": (SeedsInValidation, ONE),
    "teacher by hook": (verified.Teacher, WINDOW),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) for name in HEALTHY]
)
def test_a_healthy_configuration_is_not_accused(name):
    build, options = HEALTHY[name]
    options = {
        key: value() if callable(value) else value for key, value in options.items()
    }
    if name == "own loader":
        trainer = tk.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", logger=False, seed=1
        )
        result = trainer.verify(build(), steps=2, local=True)
    else:
        val = verified.loader(8) if "validation" in name else None
        result = verify(build(), None, val, **options)
    assert result.ok, str(result)
    assert {check.status for check in result.checks if check.name == "training"} == {
        "ok"
    }, str(result)


def test_the_table_is_as_large_as_its_page_says():
    assert (len(FAULTS), len(HEALTHY)) == (69, 46)
