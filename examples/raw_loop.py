"""A custom training loop: handwritten digits, with gradient accumulation, clipping, evaluation and resuming.

    python examples/raw_loop.py
    torchrun --nproc-per-node 2 examples/raw_loop.py --batch-size 16
    python examples/raw_loop.py --resume                    continues from the newest saved state

The loop is plain PyTorch except for the lines with ``accelerator``; it trains the same model on one process and on two.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        help="samples of a micro-batch on each process",
    )
    parser.add_argument("--precision", default="no", help="no, bf16 or fp16")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop-after", type=int, help="leave after this many epochs")
    parser.add_argument(
        "--root", default="runs/raw_loop", help="where states and values are written"
    )
    args = parser.parse_args()

    tk.set_seed(1)
    project = tk.ProjectConfiguration(
        args.root, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = tk.Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=args.precision,
        log_with="csv",
        project_config=project,
    )
    accelerator.init_trackers("digits", config=vars(args))

    images, digits = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    train, test = (
        TensorDataset(images[270:], digits[270:]),
        TensorDataset(images[:270], digits[:270]),
    )
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    steps = -(-len(loader) // (2 * accelerator.num_processes)) * args.epochs
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=steps
    )
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    evaluation = accelerator.prepare(DataLoader(test, batch_size=64))

    if args.resume:
        accelerator.load_state()
    for epoch in range(loader.iteration, args.epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = []
        for x, y in evaluation:
            with torch.no_grad():
                found = model(x).argmax(1)
            right.append(accelerator.gather_for_metrics(found == y))
        accuracy = torch.cat(right).float().mean().item()
        accelerator.log({"loss": loss, "accuracy": accuracy}, step=epoch)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        accelerator.save_state()
        if epoch + 1 == args.stop_after:
            break

    accelerator.save_model(model, f"{args.root}/model")
    accelerator.print(f"test accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
