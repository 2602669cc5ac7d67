"""One rank does at step or batch 5 what the first argument says.

Further arguments: the limit; the rank, where there are two; fit, validate, test or predict.
"""

import ctypes
import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import trainer_kit as tk
from trainer_kit.testing import TinyModule

FAULT, LIMIT = sys.argv[1], float(sys.argv[2])
VICTIM, STAGE = int([*sys.argv, "0", "0"][3]), [*sys.argv[4:], "fit"][0]
RANKS = 2 if len(sys.argv) > 3 else 1


class Data(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if FAULT == "worker" and index == 33:
            time.sleep(300)
        return torch.full((32,), index / 4000.0)


class Faulty(TinyModule):
    def training_step(self, batch, batch_idx):
        if FAULT == "sizes" and self.global_step == 5:
            torch.distributed.all_reduce(
                torch.ones(3000 if self.trainer.is_global_zero else 1)
            )
        self.fault_at(self.global_step)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fault_at(batch_idx)
        if STAGE != "predict":
            self.log("value", batch.mean())

    test_step = predict_step = validation_step

    def fault_at(self, index):
        if index == 5 and self.trainer.global_rank == VICTIM:
            print("fault at", time.time(), flush=True)
            fault()


def fault():
    if FAULT == "sleep":
        time.sleep(300)
    elif FAULT == "stop":
        time.sleep(0.5)  # until the others know it
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "locked":
        lock_interpreter()
    elif FAULT == "other":
        torch.distributed.all_gather([torch.empty(3)] * 2, torch.ones(3))
    elif FAULT == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(300)


def lock_interpreter():
    """Wait in C code that holds the interpreter's lock, and that no signal interrupts."""
    mutex, code = ctypes.create_string_buffer(128), ctypes.PyDLL(None)
    code.pthread_mutex_lock(mutex)
    code.pthread_mutex_lock(mutex)


if __name__ == "__main__":
    trainer = tk.Trainer(
        max_steps=20,
        devices=RANKS,
        accelerator="cpu",
        strategy="ddp" if RANKS > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="runs",
        hang_timeout=LIMIT,
    )
    getattr(trainer, STAGE)(
        Faulty(),
        DataLoader(Data(), batch_size=4, num_workers=2 if FAULT == "worker" else 0),
    )
    print("trained", flush=True)
