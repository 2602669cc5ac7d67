"""Modules and strategies for the tests of `verify`: healthy ones, and each with one fault."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import trainer_kit as tk
from trainer_kit.strategies import DDPStrategy, FSDPStrategy


def data(count=64):
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, 8, generator=draw),
        torch.randint(4, (count,), generator=draw),
    )


def loader(count=64, size=4, **options):
    return DataLoader(data(count), batch_size=size, **{"shuffle": True, **options})


class Classifier(tk.TrainModule):
    """An MLP with a norm; ``dropout`` makes it random."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Tied(tk.TrainModule):
    """Token ids through an embedding whose weight is the head's too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch, batch_idx):
        ids = batch[1]
        return F.cross_entropy(
            self.head(torch.tanh(self.middle(self.embed(ids)))), (ids + 1) % 16
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ranked():
    """Whether this is a rank of several: where the faults below act."""
    return dist.is_initialized() and dist.get_world_size() > 1


class OtherEps(DDPStrategy):
    def prepare_module(self, module, manual, precision):
        module.net[1].eps = 1e-2
        super().prepare_module(module, manual, precision)


class NoExchange(DDPStrategy):
    def forward_backward(self, micro):
        for index in range(micro.count):
            micro.begin(index)
            with self._ddp.no_sync():
                micro.backward(index, micro.forward(index))
            micro.end(index)


class WrongDivisor(DDPStrategy):
    """Divides by twice the micro-batches of the window."""

    def forward_backward(self, micro):
        micro.factors = [
            factor / micro.count for factor in micro.factors or [1.0] * micro.count
        ]
        super().forward_backward(micro)


class Untied(FSDPStrategy):
    def prepare_module(self, module, manual, precision):
        module.head.weight = nn.Parameter(module.embed.weight.detach().clone())
        super().prepare_module(module, manual, precision)


class AveragedTwice(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / dist.get_world_size() if ranked() else loss


class OwnDropout(nn.Module):
    """Dropout with a generator that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.draw = None

    def forward(self, x):
        if self.draw is None:
            self.draw = torch.Generator().manual_seed(5)
        return x * (torch.rand(x.shape, generator=self.draw) > 0.5).to(x.dtype)


class OwnMasks(Classifier):
    def __init__(self):
        super().__init__()
        self.net[3] = OwnDropout()


class Running(nn.Module):
    """Keeps the mean of what it saw in a buffer that no rank sends."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0).to(self.mean.dtype), alpha=0.1)
        return x


class RunningMean(Classifier):
    def __init__(self):
        super().__init__()
        self.net[2] = nn.Sequential(nn.GELU(), Running())


class Repeating(Sampler):
    """Every rank reads the same samples."""

    def __iter__(self):
        return iter(range(64))

    def __len__(self):
        return 64


class Counting(Dataset):
    """Its noise depends on how many samples this process has read."""

    def __init__(self):
        self.data, self.read = data(), 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.read += 1
        x, y = self.data[index]
        return x + 0.01 * self.read, y


class CountsValidation(Classifier):
    """Its learning depends on whether validation has run."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.scale = 0.5


class BringsValidation(CountsValidation):
    """Has its validation loader itself."""

    def val_dataloader(self):
        return loader(8)


class Unseeded(Classifier):
    """Draws from the system, so no two runs are alike."""

    def training_step(self, batch, batch_idx):
        noise = torch.rand(
            (),
            generator=torch.Generator().manual_seed(
                int.from_bytes(__import__("os").urandom(4))
            ),
        )
        return (
            super().training_step(batch, batch_idx) * (1 + 0.0 * noise)
            if not ranked()
            else (super().training_step(batch, batch_idx) * (1 + 1e-5 * noise))
        )


class Normed(Classifier):
    """Normalizes over the batch, whose size is that of a rank."""

    def __init__(self):
        super().__init__()
        self.net[1] = nn.BatchNorm1d(16)


class Teacher(Classifier):
    """A teacher follows the weights after each step, and batches are told apart by their index."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        with torch.no_grad():
            for weight in self.teacher.parameters():
                weight.mul_(2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(
            self.net(batch[0]), self.teacher(batch[0]).softmax(-1)
        ) / (1 + batch_idx % 3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for weight, other in zip(
                self.teacher.parameters(), self.net.parameters(), strict=True
            ):
                weight.lerp_(other, 0.1 * self.global_step)


class AsksTrainer(Classifier):
    """Asks for what only a running fit has."""

    def training_step(self, batch, batch_idx):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.log("lr", optimizer.param_groups[0]["lr"])
        return super().training_step(batch, batch_idx) * (
            1 + scheduler.get_last_lr()[0]
        )

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        warm = self.trainer.num_training_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (step + 1) / warm
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Casting(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].float(), batch[1]), batch_idx)


class Residual(nn.Module):
    """A convolution with a batch norm beside the identity."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
        )

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class SmallResNet(Classifier):
    """Convolutions with batch norms."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 4)),
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            Residual(),
            Residual(),
            nn.Flatten(),
            nn.Linear(32, 4),
        )

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        length = {"epochs": self.trainer.max_epochs, "steps_per_epoch": 4}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, **length)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Pairs(Classifier):
    """Each sample is compared with the others of its batch."""

    def training_step(self, batch, batch_idx):
        features = F.normalize(self.net(batch[0]), dim=1)
        return F.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))


class IgnoredTokens(Classifier):
    """A mean over the targets that are not ignored; ``weighs``: with the right weight of a batch."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=-100)


class WeighedTokens(IgnoredTokens):
    def loss_weight(self, batch):
        return (batch[1] != -100).sum()


def masked(size=4):
    x, y = data().tensors
    y = y.clone()
    y[::3] = -100
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True)


class BatchFeature(nn.Module):
    """Adds how far the samples of the batch are apart, as discriminators do."""

    def forward(self, x):
        return x + x.std(0).mean()


class Apart(Classifier):
    def __init__(self):
        super().__init__()
        self.net[2] = BatchFeature()


class GAN(tk.TrainModule):
    """Two optimizers by hand, noise in the step, and batch norms in the generator; its step takes no number."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 8)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)
        )

    def training_step(self, batch):
        real = batch[0]
        generator, discriminator = self.optimizers()
        noise = torch.randn(len(real), 4).type_as(real)
        self.toggle_optimizer(generator)
        fooled = self.discriminator(self.generator(noise))
        loss = F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))
        self.log("g_loss", loss)
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        with discriminator.toggle_model():
            found = torch.cat(
                [
                    self.discriminator(real),
                    self.discriminator(self.generator(noise).detach()),
                ]
            )
            loss = F.binary_cross_entropy_with_logits(
                found, torch.cat([torch.ones_like(fooled), torch.zeros_like(fooled)])
            )
            self.log("d_loss", loss)
            self.manual_backward(loss)
            self.clip_gradients(discriminator, 0.5)
            discriminator.step()
            discriminator.zero_grad()
        self.lr_schedulers().step()

    def configure_optimizers(self):
        made = [
            torch.optim.Adam(part.parameters(), lr=0.01)
            for part in (self.generator, self.discriminator)
        ]
        return made, [torch.optim.lr_scheduler.ExponentialLR(made[0], 0.5)]


class LocalGAN(GAN):
    """Backward as outside of a Trainer: no rank gets the gradients of the others."""

    def manual_backward(self, loss):
        loss.backward()


class Overrides(Classifier):
    """The hooks of a step, a learning rate that depends on the ranks, and a scheduler that watches the loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("watched", loss, on_step=True, on_epoch=True)
        return loss

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = (
                0.01
                * (self.trainer.global_step + 1)
                * self.trainer.world_size
                / (1 + batch_idx + epoch)
            )
        assert float(optimizer_closure()) > 0
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=True)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, 0.1, "norm")


class Plateau(Classifier):
    """A scheduler that halves the learning rate with each value of the loss, which it calls worse."""

    monitor, interval = "loss", "step"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=1e9
        )
        config = {
            "scheduler": schedule,
            "monitor": self.monitor,
            "interval": self.interval,
        }
        return {"optimizer": optimizer, "lr_scheduler": config}

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(metric)


class PlateauOfValidation(Plateau):
    monitor, interval = "val_loss", "epoch"


class Spectral(Classifier):
    """Its buffers change with each forward, and change the outputs."""

    def __init__(self):
        super().__init__()
        self.net[4] = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))


class SyncedNorm(nn.SyncBatchNorm):
    """As torch's, which needs an accelerator, by all-reduces on the CPU; ``together``: False plants a fault."""

    together = True

    def forward(self, input):
        if not ranked() or not self.together:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                0.1,
                self.eps,
            )
        count = dist.nn.functional.all_reduce(
            torch.tensor(float(input.numel() // input.shape[1]), dtype=input.dtype)
        )
        inner = [dim for dim in range(input.ndim) if dim != 1]
        shape = [1, -1, *[1] * (input.ndim - 2)]
        mean = dist.nn.functional.all_reduce(input.sum(inner)) / count
        far = input - mean.view(shape)
        variance = dist.nn.functional.all_reduce((far**2).sum(inner)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), 0.1)
            self.running_var.lerp_(
                (variance * count / (count - 1)).to(self.running_var.dtype), 0.1
            )
        return far / (variance.view(shape) + self.eps).sqrt() * self.weight.view(
            shape
        ) + self.bias.view(shape)


class SyncedResNet(SmallResNet):
    """Its batch norms normalize the samples of all ranks, but for one."""

    def __init__(self):
        super().__init__()
        self.net[2], self.net[5].norm = SyncedNorm(4), SyncedNorm(4)


def verify(module, batches=None, val=None, steps=4, local=False, **options):
    """What `Trainer.verify` finds of DDP on two ranks of the CPU, or under other options.

    Args:
        module: of this file, or with its batches.
        batches: by default this file's.
        val: validation batches.
        steps: that are compared.
        local: whether ranks are threads of this process.
        options: of the Trainer.
    """
    options = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "logger": False,
        "seed": 1,
        **options,
    }
    torch.manual_seed(0)
    trainer = tk.Trainer(**options)
    return trainer.verify(module, batches or loader(), val, steps=steps, local=local)
