"""Directories that DeepSpeed's own ``save_checkpoint`` wrote: what is read of them, and the command for the others."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainer_kit as tk
from tests.parity.plain import Classifier, make_batches, make_net, same_state
from trainer_kit.checkpoint import read_weights
from trainer_kit.core.errors import CheckpointError
from trainer_kit.strategies.deepspeed_library import deepspeed_of, quiet
from trainer_kit.testing import run_distributed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


def write(directory: str) -> None:
    deepspeed = deepspeed_of(torch.device("cpu"))
    for stage in (0, 2, 3):
        model = Classifier(make_net(norm=True))
        model.forward = lambda x, net=model.net: net(x)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
        with quiet():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for x, _ in make_batches(2):
            engine.backward(engine(x).square().sum())
            engine.step()
        engine.save_checkpoint(f"{directory}/{stage}", tag="global_step2")
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            if dist.get_rank() == 0:
                torch.save({n: v.clone() for n, v in model.state_dict().items()}, f"{directory}/{stage}.pt")
        dist.barrier()


def run(*command: str) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=120)


@pytest.mark.timeout(240)
def test_what_deepspeed_itself_wrote(tmp_path: Path) -> None:
    run_distributed(write, 2, str(tmp_path), timeout=150)
    wanted = {stage: torch.load(tmp_path / f"{stage}.pt", weights_only=True) for stage in (0, 2, 3)}
    same_state(read_weights(tmp_path / "0"), wanted[0])

    # Parts of several ranks: refused before the first step, with a command that works.
    trainer = tk.Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=1)
    for stage in (2, 3):
        for path in (tmp_path / f"{stage}", tmp_path / f"{stage}" / "global_step2"):
            for read in (
                lambda path=path: read_weights(path),
                lambda path=path: tk.TrainModule.load_from_checkpoint(path),
                lambda path=path: trainer.fit(Classifier(make_net(norm=True)), make_batches(2), ckpt_path=path),
                lambda path=path: tk.Accelerator(cpu=True).load_state(path),
            ):
                with pytest.raises(CheckpointError, match=r"zero_to_fp32\.py") as caught:
                    read()
        assert trainer.global_step == 0
        command = re.search(r"python (.*--safe_serialization)", str(caught.value))
        assert command is not None
        run(sys.executable, *shlex.split(command[1]))
        same_state(read_weights(tmp_path / f"{stage}-weights"), wanted[stage])

    # What ds_to_universal makes of them, by the directory of the step or the one above it.
    source, made = tmp_path / "2" / "global_step2", tmp_path / "universal" / "global_step2"
    options = ("--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state")
    module = "deepspeed.checkpoint.ds_to_universal"
    run(sys.executable, "-m", module, "--input_folder", str(source), "--output_folder", str(made), *options)
    for path in (made, made.parent):
        same_state(read_weights(path), wanted[2])
        with pytest.raises(CheckpointError, match="holds weights, not a run"):
            trainer.fit(Classifier(make_net(norm=True)), make_batches(2), ckpt_path=path)
        with pytest.raises(CheckpointError, match="holds weights, not a run"):
            tk.Accelerator(cpu=True).load_state(path)
    loaded = Classifier(make_net(seed=4, norm=True))
    trainer.validate(Judged(loaded.net), make_batches(1), ckpt_path=made, verbose=False)
    same_state(loaded.state_dict(), wanted[2])

    # A tensor that is none, or larger than its file.
    one = made / "zero" / "net.0.bias" / "fp32.pt"
    for content, part in [({"param": 3}, "a int where"), ({"param": torch.zeros(1).expand(10**9)}, "larger than its")]:
        torch.save(content, one)
        with pytest.raises(CheckpointError, match=part):
            read_weights(made)


class Judged(Classifier):
    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
