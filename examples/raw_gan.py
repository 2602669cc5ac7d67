"""A GAN in a custom training loop: two models, two optimizers, alternating steps.

    python examples/raw_gan.py
    torchrun --nproc-per-node 2 examples/raw_gan.py --batch-size 32

This is the GAN of ``gan_named.py`` and ``gan_manual.py`` without a module or a Trainer. On two processes, each gets
half of every batch, and both train the same two models.
"""

from __future__ import annotations

import argparse

import torch
from gan_named import CENTERS, network, ring
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import trainer_kit as tk

NOISE = 8


@torch.no_grad()
def report(generator: nn.Module, device: torch.device) -> str:
    """How many centers the generator reaches, and how far from the nearest one its points are."""
    distances = torch.cdist(
        generator(torch.randn(4096, NOISE, device=device)).cpu(), CENTERS
    )
    nearest = distances.argmin(dim=1)
    reached = sum(
        bool((nearest == center).float().mean() > 1 / 40) for center in range(8)
    )
    return f"centers reached: {reached} of 8, mean distance to the nearest: {distances.amin(dim=1).mean():.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=64, help="on each process")
    parser.add_argument("--precision", default="no", help="no, bf16 or fp16")
    args = parser.parse_args()

    tk.set_seed(1)
    accelerator = tk.Accelerator(mixed_precision=args.precision)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=5e-4, betas=(0.5, 0.9))
        for m in (generator, discriminator)
    ]
    loader = DataLoader(ring(64 * 400), batch_size=args.batch_size, shuffle=True)
    generator, discriminator, step_g, step_d, loader = accelerator.prepare(
        generator, discriminator, *optimizers, loader
    )
    tk.set_seed(
        2, device_specific=True
    )  # each process draws different noise from here on

    def fake(real: Tensor) -> Tensor:
        return generator(torch.randn(len(real), NOISE, device=accelerator.device))

    done = 0
    while done < args.steps:
        for real in loader:
            step_d.zero_grad()
            loss_d = (
                softplus(discriminator(fake(real).detach())).mean()
                + softplus(-discriminator(real)).mean()
            )
            accelerator.backward(loss_d)
            step_d.step()

            step_g.zero_grad()
            loss_g = softplus(-discriminator(fake(real))).mean()
            accelerator.backward(loss_g)
            step_g.step()

            done += 1
            if done % 1000 == 0:
                accelerator.print(
                    f"step {done}: generator {loss_g.item():.3f}, discriminator {loss_d.item():.3f}"
                )
            if done == args.steps:
                break

    accelerator.print(report(accelerator.unwrap_model(generator), accelerator.device))
    accelerator.end_training()


if __name__ == "__main__":
    main()
