"""Behind a fit nothing keeps DDP's wrapper: a reducer that outlives its process group aborts the process at its end."""

from __future__ import annotations

import gc

import torch
from torch.nn.parallel import DistributedDataParallel

from trainer_kit import Trainer
from trainer_kit.testing import TinyModule, run_distributed


def wrappers_left() -> int:
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=1, barebones=True)
    trainer.fit(TinyModule(), [torch.randn(4, 32)] * 4)
    gc.collect()
    left = sum(type(thing) is DistributedDataParallel for thing in gc.get_objects())
    return left if trainer.global_step == 2 else -1


def test_no_wrapper_remains_after_a_fit() -> None:
    assert run_distributed(wrappers_left, 2) == [0, 0]
