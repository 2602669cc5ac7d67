"""The power fails while a run saves: what it had reported saved is there when the file system comes back.

An ext4 image is shut down as by a power cut: what was not synced is lost, the file system's journal included. The run's
own journal holds every value up to the step of the newest checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.mounts import mounted
from trainer_kit import Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.read import read_info, verify_checkpoint
from trainer_kit.checkpoint.store import newest_verified
from trainer_kit.loggers import read_journal
from trainer_kit.testing import TinyModule

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("mkfs.ext4"),
    reason="needs root on Linux, mkfs.ext4 and loop devices",
)
LOSSES = int(os.environ.get("LOSSES", "6"))
SHUT_DOWN, WITHOUT_JOURNAL = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN and its flag
QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "log_every_n_steps": 1,
}


class Reports:
    """A logger that is told which checkpoints exist."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def log_metrics(self, metrics, step=None):
        pass

    def after_save_checkpoint(self, path):
        os.write(self.descriptor, f"{path}\n".encode())


class Logs(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def fit(directory, steps, keep, logger=False, ckpt_path=None):
    # With lr=0.1 the loss is infinite at step 54, and a fast machine gets there before the power fails.
    keeper = ModelCheckpoint(directory / "kept", every_n_train_steps=1, save_top_k=keep)
    trainer = Trainer(
        max_steps=steps,
        callbacks=keeper,
        logger=logger,
        default_root_dir=directory / "run",
        **QUIET,
    )
    trainer.fit(Logs(lr=0.01), [torch.ones(2, 32)] * 50, ckpt_path=ckpt_path)
    return trainer


def start(directory, keep):
    """A run in a process of its own, and the pipe in which it reports."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
            warnings.simplefilter("ignore")
            fit(directory, 100_000, keep, Reports(writing))
        finally:
            os._exit(0)
    os.close(writing)
    return pid, reading


def lose_power(directory):
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUT_DOWN, struct.pack("I", WITHOUT_JOURNAL))
    except OSError as error:
        pytest.skip(f"this kernel does not shut ext4 down: {error}")
    finally:
        os.close(descriptor)


@pytest.mark.timeout(0 if "LOSSES" in os.environ else 120)
@pytest.mark.parametrize("keep", [-1, 1])
def test_reported_checkpoints_survive_a_power_loss(tmp_path, capsys, keep):
    image, disk = tmp_path / "image", tmp_path / "disk"
    draw, count = random.Random(f"power {keep}"), 0
    for number in range(LOSSES // 2):
        with open(image, "wb") as file:
            file.truncate(256 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
        with mounted(disk, "-o", "loop", image):
            pid, reading = start(disk, keep)
            try:
                assert select.select([reading], [], [], 60)[0], (
                    "nothing was saved in a minute"
                )
                time.sleep(draw.uniform(0, 0.4))
                before = os.read(
                    reading, 1 << 20
                )  # no process reports anything once its machine is off
                lose_power(disk)
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(reading)
            paths = [Path(line) for line in before.decode().split("\n")[:-1]]
        with mounted(disk, "-o", "loop", image):
            for path in paths if keep == -1 else paths[-1:]:
                if (
                    keep == -1 or path.exists()
                ):  # else it gave way to one that was not yet reported
                    verify_checkpoint(path)
            found, damaged = newest_verified(disk / "kept")
            assert not damaged, number
            step = read_info(found)["step"]
            assert step >= int(paths[-1].name[-8:]), number
            records = read_journal(
                disk / "run" / "trainer_kit_logs" / "version_0" / "journal.jsonl"
            )
            logged = [record["step"] for record in records if "loss" in record]
            assert logged[:step] == list(range(1, step + 1)), number
            assert fit(disk, step + 2, keep, ckpt_path="last").global_step == step + 2
            assert f"resuming from step {step} " in capsys.readouterr().out
            left = [name for name in os.listdir(disk / "kept") if name.startswith(".")]
            assert not left, number
            count += len(paths)
        image.unlink()
    assert count >= LOSSES // 2


def test_the_message_about_a_full_disk_is_true(tmp_path, capsys):
    disk, size = tmp_path / "disk", 400_000
    with mounted(disk, "-t", "tmpfs", "-o", f"size={size}", "none"):
        fit(disk, 1, -1)
        [first] = (path for path in (disk / "kept").iterdir() if path.is_dir())
        needed = sum(
            file.stat().st_size
            for file in first.iterdir()
            if file.name != "manifest.json"
        )
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - needed // 2))
        free = shutil.disk_usage(disk).free
        fit(disk, 2, -1, ckpt_path="last")
        said = capsys.readouterr().out
        found = re.search(
            r"No space left on device \(need ([\d.]+) kB, free ([\d.]+) k?B\); kept step 1; ",
            said,
        )
        assert found, said
        assert float(found[1]) == pytest.approx(needed / 1000, rel=0.05)
        assert (
            abs(float(found[2]) * 1000 - free) < 10_000
            or abs(float(found[2]) - free) < 10_000
        )
        assert [path.name for path in (disk / "kept").iterdir() if path.is_dir()] == [
            first.name
        ]
