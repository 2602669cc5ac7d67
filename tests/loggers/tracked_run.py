"""A program: one run with a tracker, ``first``: fit, validate, test, media; ``resumed``: the fit continues."""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image

if os.environ.get("STAND_INS"):
    sys.path.insert(0, os.environ["STAND_INS"])
else:
    warnings.simplefilter("default")  # the trackers' own

import trainer_kit as tk
from trainer_kit.testing import TinyModule

KINDS = {
    "mlflow": (
        "MLFlowLogger",
        {"experiment_name": "project", "run_name": "first", "tags": {"kind": "tiny"}},
    ),
    "comet_ml": (
        "CometLogger",
        {"project": "project", "online": False, "name": "first", "tags": ["tiny"]},
    ),
    "clearml": (
        "ClearMLLogger",
        {"project_name": "project", "task_name": "first", "offline": True},
    ),
    "trackio": ("TrackioLogger", {"project": "project", "name": "first"}),
    "swanlab": (
        "SwanLabLogger",
        {"project": "project", "experiment_name": "first", "mode": "offline"},
    ),
    "dvclive": ("DVCLiveLogger", {"run_name": "first"}),
    "aim": ("AimLogger", {"experiment": "project", "run_name": "first"}),
}


class Figure:
    """What matplotlib's figures have."""

    def savefig(self, stream, format, bbox_inches):
        Image.new("RGB", (6, 2)).save(stream, format)


class Model(TinyModule):
    def __init__(self, lr=0.5, optim=None, api_key=""):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        self.log("train/at", float(self.global_step))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/score", 10.0 + self.global_step)
        self.log("shared", 1.0)

    def test_step(self, batch, batch_idx):
        self.log("test/score", 20.0 + self.global_step)
        self.log("shared", 2.0)


def media(logger):
    picture = torch.zeros(3, 4, 8)
    picture[0] = 1.0
    pictures = [picture, np.full((4, 8), 255, np.uint8), Image.new("RGB", (8, 4))]
    logger.log_image("pictures/in", pictures, 6, caption=list("abc"))
    logger.log_figure("figure", Figure(), 6)
    logger.log_text("note", "a sentence", 6)
    logger.log_histogram(
        "weights", torch.tensor([0.0, 1.0, 1.0, float("nan")]), 6, bins=2
    )
    logger.log_table("answers", ["id", "text"], [[1, "yes"], [2, "no"]], step=6)
    Path("kept.txt").write_text("kept")
    logger.log_artifact("kept.txt", "things/renamed.txt")
    Path("folder").mkdir()
    Path("folder/inside.txt").write_text("inside")
    logger.log_artifact("folder")
    logger.finalize("success")


def main(word, phase):
    name, options = KINDS[word]
    logger = getattr(tk.loggers, name)(save_dir="logs", log_model=True, **options)
    model = Model(0.25, {"name": "sgd", "betas": [0.5, float("inf")]}, api_key="hidden")
    data = [torch.randn(2, 32) for _ in range(3)]
    trainer = tk.Trainer(
        max_epochs=2 if phase == "first" else 3,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[tk.callbacks.ModelCheckpoint(dirpath="checkpoints", save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if phase == "first":
        trainer.fit(model, data, data[:1])
        trainer.validate(model, data[:1])
        trainer.test(model, data[:1])
        if trainer.is_global_zero:
            media(logger)
    else:
        trainer.fit(model, data, data[:1], ckpt_path="last")
    children = [
        file.read_text() for file in Path("/proc/self/task").glob("*/children")
    ]  # empty where it is missing
    Path(f"{phase}-children.txt").write_text("".join(children).strip())
    Path(f"{phase}-{trainer.global_rank}.txt").write_text(str(logger.version))


main(*sys.argv[1:])
