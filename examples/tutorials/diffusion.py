"""Train a diffusion model that generates handwritten digits, and check its samples.

    python examples/tutorials/diffusion.py

It needs `pip install scikit-learn matplotlib`. On two CPU cores it takes about a minute, and writes `diffusion.png`:

![Digits 0 to 9, drawn by the model: ten rows, one digit each](../pictures/diffusion.png)
"""

# %% [markdown]
# ## The idea
#
# Noise is added to an image in 100 small steps until only noise is left. A network learns to predict the added noise.
# To generate an image, start from pure noise and remove the predicted noise step by step. The digit is also an input of
# the network, so you can choose which digit to generate. Source: Ho, Jain and Abbeel, Denoising Diffusion Probabilistic
# Models, NeurIPS 2020.

# %%
from __future__ import annotations

import sys

import matplotlib.image
import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import trainer_kit as tk
from trainer_kit.callbacks import EMAWeightAveraging

SMALL = "--small" in sys.argv  # what the tests run: a narrower network and fewer steps
NOISE_STEPS = 100

digits = load_digits()
images = (
    torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
)  # (1797, 64), -1 to 1
labels = torch.tensor(digits.target)
train, val = random_split(
    TensorDataset(images, labels), [0.9, 0.1], torch.Generator().manual_seed(0)
)

# %% [markdown]
# ## The network
#
# With only 64 pixels, a residual network of linear layers is enough; the step and the digit scale and shift each block.
# For larger images, use a U-Net instead: the rest of the script does not depend on the network.


# %%
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.condition = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.condition(condition).chunk(2, dim=1)
        return x + self.down(F.silu(self.up(self.norm(x) * (1 + scale) + shift)))


class Denoiser(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.steps, self.digits = (
            nn.Embedding(NOISE_STEPS, width),
            nn.Embedding(10, width),
        )
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, noisy: Tensor, step: Tensor, digit: Tensor) -> Tensor:
        condition, x = F.silu(self.steps(step) + self.digits(digit)), self.first(noisy)
        for block in self.blocks:
            x = block(x, condition)
        return self.last(x)


# %% [markdown]
# ## The module
#
# `kept` is the fraction of the image that remains after each step. It is a buffer, so the Trainer moves it to the
# device with the weights, and `training_step` needs no `.cuda()`. Random numbers are drawn on the device with
# `randn_like` and `device=`; a resumed run continues the same sequence.
#
# Validation draws noise too. The Trainer restores the random number generators afterwards, so validation does not
# change training.


# %%
class Diffusion(tk.TrainModule):
    def __init__(self, width: int = 256, blocks: int = 4, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Denoiser(width, blocks)
        angles = torch.linspace(0.02, 1, NOISE_STEPS) * torch.pi / 2 * 0.98
        self.register_buffer("kept", angles.cos() ** 2)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, digit = batch
        step = torch.randint(NOISE_STEPS, (len(image),), device=self.device)
        noise, kept = torch.randn_like(image), self.kept[step, None]
        return F.mse_loss(
            self.net(kept.sqrt() * image + (1 - kept).sqrt() * noise, step, digit),
            noise,
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    @torch.no_grad()
    def draw(self, digit: Tensor) -> Tensor:
        """One image of each digit asked for, shape (n, 64), values from -1 to 1."""
        image = torch.randn(len(digit), 64, device=self.device)
        before = torch.cat([self.kept.new_ones(1), self.kept[:-1]])
        for step in reversed(range(NOISE_STEPS)):
            kept, share = self.kept[step], self.kept[step] / before[step]
            noise = self.net(image, torch.full_like(digit, step), digit)
            image = (image - (1 - share) / (1 - kept).sqrt() * noise) / share.sqrt()
            if step:
                image = image + (
                    (1 - share) * (1 - before[step]) / (1 - kept)
                ).sqrt() * torch.randn_like(image)
        return image.clamp(-1, 1)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


# %% [markdown]
# ## Training, with averaged weights
#
# Diffusion models are used with an exponential moving average of their weights. `EMAWeightAveraging` computes it:
# training steps use the trained weights, validation and checkpoints use the average, and after `fit` the module has the
# average ([more](../guide/weight-averaging.md)).
#
# *How long will it take, and where does the time go?* The last lines of the output show it; `trainer.explain(module)`
# describes the run before it starts.

# %%
tk.seed_everything(0)
module = Diffusion(width=128, blocks=2) if SMALL else Diffusion()
trainer = tk.Trainer(
    max_epochs=30 if SMALL else 120,
    check_val_every_n_epoch=20,
    callbacks=EMAWeightAveraging(decay=0.995),
    default_root_dir="runs",
)
trainer.fit(
    module,
    DataLoader(train, batch_size=64, shuffle=True, drop_last=True),
    DataLoader(val, batch_size=256),
)

# %% [markdown]
# ## Does it draw digits?
#
# The noise prediction loss says little about image quality. A classifier trained on the real images measures how often
# it recognizes the requested digit.

# %%
asked = torch.arange(10).repeat_interleave(20)
drawn = module.eval().draw(asked.to(module.device)).cpu()
judge = SVC(gamma=0.05).fit(images, labels)
recognized = (torch.tensor(judge.predict(drawn)) == asked).float().mean()
trainer.print(f"recognized: {recognized:.3f} of {len(asked)} drawn digits")

framed = F.pad(drawn.view(10, 20, 8, 8)[:, :12], (1, 1, 1, 1), value=-1)
grid = framed.permute(0, 2, 1, 3).reshape(100, 120)  # a row for each digit
matplotlib.image.imsave(
    "diffusion.png", grid.repeat_interleave(4, 0).repeat_interleave(4, 1), cmap="gray"
)
trainer.print(f"pictures: diffusion.png, curves: {trainer.log_dir}/report.html")

# %% [markdown]
# *How do I resume an interrupted run?* Add `resume="auto"` to the Trainer, and run the same command again: weights,
# averages, optimizer, random number generators and data order are restored ([resuming](../guide/resuming.md)).
