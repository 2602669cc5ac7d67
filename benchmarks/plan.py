"""How long a plan of 4.36 billion parameters on 256 ranks takes: ``python benchmarks/plan.py``.

All strategies that make sense for the module, in float32 and in mixed bfloat16, on tensors without storage.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import trainer_kit as tk
from tests.planning.workloads import GPT, LanguageModel


def main() -> None:
    """Print the time of each measurement, and of the whole plan."""
    with torch.device("meta"):
        module = LanguageModel(
            GPT(width=4096, depth=20, vocabulary=40_000, heads=32, tied=False)
        )
    loader = [torch.zeros(4, 513, dtype=torch.long)]
    trainer = tk.Trainer(strategy="fsdp", accelerator="cpu", devices=1, logger=False)
    began = time.monotonic()
    plan = trainer.plan(module, loader, world=256, device="h200")
    seconds = time.monotonic() - began
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(
        f"{parameters / 1e9:.2f} B parameters, 256 ranks: {len(plan.rows)} configurations in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
