"""Take one module from a notebook to two processes, to a cluster, and through a crash, without changing it.

    python examples/tutorials/notebook_to_cluster.py

It needs `pip install scikit-learn`. This file is also a notebook: editors such as VS Code and PyCharm run its cells,
and `jupytext --to ipynb` converts it.
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
# `global_batch_size=64` is the number of samples per step over *all* processes. The steps and the curves are the same
# on one process, two, or sixteen, except for rounding and dropout's random numbers. With `batch_size` alone, each
# process would take 64.
#
# `resume="auto"` has no effect yet; it is used below.

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
# and metrics are returned to the notebook. On a machine without GPUs it uses two CPU processes.
#
# ## On two processes
#
# Save the notebook as a script and run it. Each of these commands trains the same model on the same samples in each
# step:
#
# ```bash
# python notebook_to_cluster.py --devices 2                       # the script launches its own processes
# torchrun --nproc-per-node 2 notebook_to_cluster.py              # torch's launcher
# trainer-kit launch --num_processes 2 notebook_to_cluster.py     # ours; it reads Accelerate's configuration files
# ```
#
# Every process runs the whole script. So `trainer.print` prints once, `print` prints twice, and files should be written
# only if `trainer.is_global_zero`. The processes split each batch of 64, and each validation sample counts once.
#
# *How do I check the setup?* `print(trainer.explain(module, loaders[0]))` lists the processes, the batch size of each,
# the memory per rank, and which hooks run.
#
# ## Resume after a crash
#
# Kill the run with Ctrl-C or `kill -9`, and run the same command again. `resume="auto"` finds the unfinished run of
# this script, continues from its newest complete checkpoint, and ends with the weights of a run that was never killed:
#
# ```
# resuming from step 120 (verified) of run /data/runs/trainer_kit_logs/version_0
# ```
#
# The number of processes may differ from the first run.
#
# ## On a cluster
#
# `examples/slurm.sbatch` is a job for SLURM on two machines with two processes each. It starts any script that uses a
# Trainer:
#
# ```bash
# sbatch examples/slurm.sbatch notebook_to_cluster.py --root /scratch/me/runs
# ```
#
# The script contains nothing specific to SLURM: `srun` starts one task per process, and the Trainer reads their number
# and addresses from the environment. Two minutes before the time limit, SLURM sends SIGUSR1. The Trainer saves a
# checkpoint and requeues the job, which then resumes. The run directory must be on a file system shared by all
# machines, or a URL such as `s3://bucket/runs`.
#
# With `torchrun` instead, on each machine:
#
# ```bash
# torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint first-machine:29500 notebook_to_cluster.py
# ```
#
# ## When the model no longer fits
#
# `--strategy fsdp` shards weights, gradients and optimizer state over the processes; the module, the loaders and the
# checkpoints do not change ([more](../guide/distributed.md#fsdp)). The [language model](lm.md) does the same with
# tensor and pipeline parallelism.
