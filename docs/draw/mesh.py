"""Writes docs/pictures/mesh.svg: what ``explain(format="svg")`` shows of eight ranks, for ``make pictures``."""

from __future__ import annotations

import runpy
from pathlib import Path

import trainer_kit as tk
from trainer_kit.strategies import MeshStrategy

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "mesh.svg"


def render() -> str:
    """The language model of the tutorial on two stages, two shards and two tensor ranks."""
    example = runpy.run_path(str(ROOT / "examples" / "lm.py"))
    trainer = tk.Trainer(
        strategy=MeshStrategy(pp=2, dp_shard=2, tp=2), accelerator="cpu", devices=8, accumulate_grad_batches=4,
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    return trainer.explain(example["LanguageModel"](), format="svg")


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(render(), encoding="utf-8")
    print("wrote docs/pictures/mesh.svg")
