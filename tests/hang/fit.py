"""A fit in which one rank does what the first argument says, at step 5: for the tests of hangs."""

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
VICTIM = 1 if "RANK" in os.environ or len(sys.argv) > 3 else 0


class Data(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if FAULT == "worker" and index == 33:
            time.sleep(300)
        return torch.full((32,), index / 4000.0)


class Faulty(TinyModule):
    def training_step(self, batch, batch_idx):
        if self.global_step == 5 and self.trainer.global_rank == VICTIM:
            print("fault at", time.time(), flush=True)
            fault()
        return super().training_step(batch, batch_idx)


def fault():
    if FAULT == "sleep":
        time.sleep(300)
    elif FAULT == "stop":
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
        devices=2 if VICTIM else 1,
        accelerator="cpu",
        strategy="ddp" if VICTIM else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="runs",
        hang_timeout=LIMIT,
    )
    trainer.fit(Faulty(), DataLoader(Data(), batch_size=4, num_workers=2 if FAULT == "worker" else 0))
    print("trained", flush=True)
