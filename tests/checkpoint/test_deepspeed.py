"""Directories that DeepSpeed's own ``save_checkpoint`` wrote: what is read of them, and the command for the others."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainer_kit as tk
from tests.parity.plain import Classifier, make_batches, make_net, same_state
from trainer_kit.checkpoint import read_weights
from trainer_kit.core.errors import CheckpointError
from trainer_kit.strategies.deepspeed.engine import import_deepspeed, quiet
from trainer_kit.testing import run_distributed
from trainer_kit.testing.conformance import assert_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed",
    ),
]


def make_model(seed: int = 0) -> Any:
    """With running statistics, a bias that is frozen, and a weight that two layers share."""
    model = Classifier(make_net(seed, norm=True))
    model.net.extend([nn.Linear(4, 4), nn.Linear(4, 4)])
    model.net[6].weight = model.net[5].weight
    model.net[0].bias.requires_grad_(False)
    model.forward = lambda x: model.net(x)
    return model


def make_optimizer(model: nn.Module) -> tuple[Any, Any]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = [parameter for parameter in trained if parameter.dim() == 1]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": flat, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


def write(directory: str) -> None:
    """Two steps, a checkpoint, and two steps more, with batches that every rank has."""
    deepspeed = import_deepspeed(torch.device("cpu"))
    for stage, half in ((0, False), (0, True), (2, False), (3, False)):
        torch.manual_seed(0)
        model = make_model()
        if half:
            model.net[1] = (
                nn.Identity()
            )  # its statistics are float32, which bfloat16 does not meet
        optimizer, schedule = make_optimizer(model)
        config = {
            "train_batch_size": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        config["gradient_clipping"] = 0.0  # by itself it clips
        name = f"{stage}-half" if half else f"{stage}"
        with quiet():
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                lr_scheduler=schedule,
                config={**config, "bf16": {"enabled": half}},
            )
        for number, (x, _) in enumerate(make_batches(4)):
            if number == 2:
                engine.save_checkpoint(f"{directory}/{name}", tag="global_step2")
            if number == 2 and half and dist.get_rank() == 0:
                torch.save(engine.optimizer.fp32_groups, f"{directory}/masters.pt")
            if number == 2:
                keep(deepspeed, model, f"{directory}/{name}.pt")
            engine.backward(engine(x.bfloat16() if half else x).float().square().sum())
            engine.step()
        keep(deepspeed, model, f"{directory}/{name}-later.pt")
        dist.barrier()


def keep(deepspeed: Any, model: nn.Module, path: str) -> None:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if dist.get_rank() == 0:
            torch.save({n: v.clone() for n, v in model.state_dict().items()}, path)


def goes_on(path: Path, **options: Any) -> tuple[tk.Accelerator, Any]:
    """The two steps that come after the checkpoint, in one process without DeepSpeed."""
    accelerator = tk.Accelerator(
        cpu=True, scheduler_steps_per_process=False, **options
    )  # as DeepSpeed counts
    model = make_model(seed=4)
    optimizer, schedule = make_optimizer(model)
    prepared, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.load_state(path)
    assert accelerator.step == 2
    for x, _ in make_batches(4)[2:]:
        accelerator.backward(prepared(x).square().sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert schedule.get_last_lr() == pytest.approx([0.02 * 0.7**4] * 2)
    return accelerator, model


def go_on_divided(directory: str) -> None:
    later = {
        stage: torch.load(f"{directory}/{stage}-later.pt", weights_only=True)
        for stage in (2, 3)
    }
    for stage, options in (
        (2, {"fsdp_plugin": tk.FullyShardedDataParallelPlugin(fsdp_version=2)}),
        (
            3,
            {
                "deepspeed_plugin": tk.DeepSpeedPlugin(
                    zero_stage=1, gradient_clipping=0.0
                )
            },
        ),
    ):
        accelerator, _ = goes_on(Path(directory) / f"{stage}-universal", **options)
        found = accelerator.get_state_dict(accelerator._models[0])
        if accelerator.is_main_process:
            assert_same(found, later[stage], 1e-6)
        accelerator.free_memory()


def run(*command: str) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, check=True, env=environment, capture_output=True, timeout=120
    )


@pytest.mark.long
@pytest.mark.timeout(240)
def test_files_written_by_deepspeed_are_imported(tmp_path: Path) -> None:
    run_distributed(write, 2, str(tmp_path), timeout=150)
    wanted = {
        stage: torch.load(tmp_path / f"{stage}.pt", weights_only=True)
        for stage in (0, 2, 3)
    }
    later = {
        stage: torch.load(tmp_path / f"{stage}-later.pt", weights_only=True)
        for stage in (0, 2, 3)
    }
    same_state(read_weights(tmp_path / "0"), wanted[0])
    assert_same(goes_on(tmp_path / "0")[1].state_dict(), later[0], 1e-6)
    # Masters of half precision have no names: the optimizer that is prepared says whose they are.
    accelerator, model = tk.Accelerator(cpu=True), make_model(seed=4)
    model.net[1] = nn.Identity()
    accelerator.prepare(model, *make_optimizer(model))
    accelerator.load_state(tmp_path / "0-half")
    masters = torch.load(tmp_path / "masters.pt", weights_only=True)
    for group, known in zip(
        accelerator._optimizers[0].param_groups, masters, strict=True
    ):
        for parameter, master in zip(group["params"], known, strict=True):
            assert torch.equal(parameter, master)
            assert not torch.equal(master, master.bfloat16().float())

    # Parts of several ranks: refused before the first step, with a command that works.
    trainer = tk.Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=1)
    for stage in (2, 3):
        for path in (tmp_path / f"{stage}", tmp_path / f"{stage}" / "global_step2"):
            for read in (
                lambda path=path: read_weights(path),
                lambda path=path: tk.TrainModule.load_from_checkpoint(path),
                lambda path=path: trainer.fit(
                    make_model(), make_batches(2), ckpt_path=path
                ),
                lambda path=path: tk.Accelerator(cpu=True).load_state(path),
            ):
                with pytest.raises(
                    CheckpointError, match=r"python -m deepspeed\.checkpoint"
                ) as caught:
                    read()
        assert trainer.global_step == 0
        command = re.search(r"python (.*--inject_missing_state)", str(caught.value))
        assert command is not None
        run(
            sys.executable,
            *shlex.split(command[1]),
            "--num_extract_workers",
            "1",
            "--num_merge_workers",
            "1",
        )

    # What ds_to_universal makes of them, by the directory of the step or the one above it.
    for stage in (3, 2):
        made = tmp_path / f"{stage}-universal" / "global_step2"
        for path in (made, made.parent):
            same_state(read_weights(path), wanted[stage])
            with pytest.raises(
                CheckpointError, match="holds only weights, and cannot be resumed"
            ):
                trainer.fit(make_model(), make_batches(2), ckpt_path=path)
            assert_same(goes_on(path)[1].state_dict(), later[stage], 1e-6)
    run_distributed(go_on_divided, 2, str(tmp_path), timeout=100)
    with pytest.raises(
        CheckpointError, match="one model and one optimizer, not 0 models"
    ):
        tk.Accelerator(cpu=True).load_state(made)
    for kind, schedule, told in (
        (torch.optim.SGD, None, "moments of Adam, and SGD is prepared"),
        (
            torch.optim.AdamW,
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            "not the state of ReduceLROnPlateau",
        ),
    ):
        accelerator, model = tk.Accelerator(cpu=True), make_model()
        optimizer = kind(model.parameters(), lr=0.1)
        accelerator.prepare(
            model, optimizer, *([] if schedule is None else [schedule(optimizer)])
        )
        with pytest.raises(CheckpointError, match=told):
            accelerator.load_state(made)
    loaded = make_model(seed=4)
    trainer.validate(Judged(loaded.net), make_batches(1), ckpt_path=made, verbose=False)
    same_state(loaded.state_dict(), wanted[2])

    # A tensor that is none, or larger than its file.
    one = made / "zero" / "net.0.weight" / "fp32.pt"
    for content, part in [
        ({"param": 3}, "a int where"),
        ({"param": torch.zeros(1).expand(10**9)}, "larger than its"),
    ]:
        torch.save(content, one)
        with pytest.raises(CheckpointError, match=part):
            read_weights(made)


class Judged(Classifier):
    def validation_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
