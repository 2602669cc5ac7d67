"""The GAN of ``gan_named.py`` with manual optimization: alternating steps, each with the latest weights of the other.

    python examples/gan_manual.py

``training_step`` decides when backward runs and which optimizer steps. ``manual_backward`` and the optimizers
from ``self.optimizers()`` apply the strategy and the precision, so 16-mixed and DDP work here too.
"""

# %% [markdown]
# ## Manual optimization: alternating steps
#
# If the order of the steps matters, or one network takes more steps than the other, set
# `automatic_optimization = False`.

# %%
from __future__ import annotations

import argparse

import torch
from gan_named import GAN, report, ring
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import trainer_kit as tk


class ManualGAN(GAN):
    def __init__(self, noise: int = 8, lr: float = 5e-4) -> None:
        super().__init__(noise, lr)
        self.automatic_optimization = False

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()

        with self.toggled_optimizer(discriminator):
            loss_d = (
                softplus(self.discriminator(self(len(real)))).mean()
                + softplus(-self.discriminator(real)).mean()
            )
            discriminator.zero_grad()
            self.manual_backward(loss_d)
            discriminator.step()

        with self.toggled_optimizer(generator):
            loss_g = softplus(-self.discriminator(self(len(real)))).mean()
            generator.zero_grad()
            self.manual_backward(loss_g)
            generator.step()

        self.log_dict({"generator": loss_g, "discriminator": loss_d}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return list(super().configure_optimizers().values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", default="auto", help="how many; on a CPU: processes"
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--root", default="runs", help="where runs are written")
    args = parser.parse_args()

    tk.seed_everything(1)
    trainer = tk.Trainer(
        devices=args.devices, max_steps=args.steps, default_root_dir=args.root
    )
    module = ManualGAN()
    trainer.fit(module, DataLoader(ring(64 * 400), batch_size=64, shuffle=True))
    trainer.print(report(module))


if __name__ == "__main__":
    main()

# %% [markdown]
# *Which of the two should I use?* Named optimizers, if each optimizer takes one step per batch. *Why
# `self.manual_backward` and not `loss.backward()`?* It applies the precision and the strategy: it scales the loss in
# `16-mixed` and averages gradients over processes. *How do I see the curves?* `report.html` in the run directory shows
# both losses.
