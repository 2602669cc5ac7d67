"""Take one module from a notebook to two processes, to a cluster, and through a crash, without changing it.

    python examples/tutorials/notebook_to_cluster.py

It needs `pip install scikit-learn`. This file is a notebook as well: editors such as VS Code and PyCharm run its cells,
`jupytext --to ipynb` converts it.
"""

# %% [markdown]
# ## In a notebook
#
# Write the module and try it on a little data. `fast_dev_run=True` runs one batch of training and validation and
# writes nothing: the fastest way to find a wrong shape.

# %%
from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint


class Net(tk.TrainModule):
    def __init__(self, width: int = 64, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


tk.seed_everything(0)
digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
)
train, val = random_split(data, [0.8, 0.2])
loaders = (
    DataLoader(train, batch_size=64, shuffle=True),
    DataLoader(val, batch_size=256),
)

tk.Trainer(fast_dev_run=True, enable_progress_bar=False).fit(Net(), *loaders)

# %% [markdown]
# A notebook has no command line, so the options have defaults; `parse_known_args` ignores what Jupyter adds.
#
# `global_batch_size=64` is the number of samples of one step over *all* processes: the steps stay the same on one
# process, on two, or on sixteen, and so do the curves, but for rounding and for what dropout draws. With `batch_size`
# alone, each process would take 64.
#
# `resume="auto"` costs nothing now, and matters below.

# %%
parser = argparse.ArgumentParser()
parser.add_argument("--devices", default="auto", help="processes on each machine")
parser.add_argument("--accelerator", default="auto")
parser.add_argument("--strategy", default="auto")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--root", default="runs")
options, _ = parser.parse_known_args()

module = Net()
trainer = tk.Trainer(
    accelerator=options.accelerator,
    devices=options.devices,
    strategy=options.strategy,
    max_epochs=options.epochs,
    global_batch_size=64,
    resume="auto",
    callbacks=ModelCheckpoint(every_n_train_steps=10, save_last=True),
    default_root_dir=options.root,
    log_every_n_steps=5,
)
trainer.fit(module, *loaders)
(results,) = trainer.validate(module, loaders[1], verbose=False)
trainer.print(
    f"world size {trainer.world_size}: loss {results['val_loss']:.6f}, accuracy {results['val_acc']:.4f}"
)
trainer.print(f"curves: {trainer.log_dir}/report.html")

# %% [markdown]
# *How do I use two GPUs in the notebook?* `Trainer(devices=2, strategy="ddp_notebook")` forks two processes; weights
# and metrics come back into the notebook. On a machine without GPUs it uses two CPU processes.
#
# ## On two processes
#
# Save the notebook as a script, and start it. Each line trains the same model on the same samples in each step:
#
# ```bash
# python notebook_to_cluster.py --devices 2                       # the script starts its processes itself
# torchrun --nproc-per-node 2 notebook_to_cluster.py              # torch's launcher
# trainer-kit launch --num_processes 2 notebook_to_cluster.py     # ours; it reads Accelerate's configuration files
# ```
#
# Every process runs the whole script. So `trainer.print` prints once, `print` prints twice, and a file is written where
# `trainer.is_global_zero`. The processes divide each batch of 64, and each sample of the validation data counts once.
#
# *What will it do?* `print(trainer.explain(module, loaders[0]))` lists the processes, the batch of each, the memory of
# a rank, and which hooks run.
#
# ## After a crash
#
# Kill it, with Ctrl-C or with `kill -9`, and start the same line again. `resume="auto"` finds the unfinished run of
# this script, continues from its newest complete checkpoint, and ends with the weights of a run that was never killed:
#
# ```
# resuming from step 120 (verified) of run /data/runs/trainer_kit_logs/version_0
# ```
#
# The number of processes may be another one than before.
#
# ## On a cluster
#
# `examples/slurm.sbatch` is a job for SLURM on two machines with two processes each. It
# starts any script of a Trainer:
#
# ```bash
# sbatch examples/slurm.sbatch notebook_to_cluster.py --root /scratch/me/runs
# ```
#
# Nothing in the script names SLURM: `srun` starts one task for each process, and the Trainer finds their number and
# their addresses in the environment. Two minutes before the time limit SLURM sends SIGUSR1; the Trainer saves a
# checkpoint, asks SLURM to run the job again, and the second start resumes. The directory of the runs must be on a file
# system that all machines see, or a URL such as `s3://bucket/runs`.
#
# With `torchrun` instead, on each machine:
#
# ```bash
# torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint first-machine:29500 notebook_to_cluster.py
# ```
#
# ## When the model no longer fits
#
# `--strategy fsdp` divides weights, gradients and optimizer state over the processes; the module, the loaders and the
# checkpoints stay as they are ([more](../guide/distributed.md#fsdp)). The
# [language model](lm.md) does the same with tensor and pipeline parallelism.
