"""Writes the table of docs/explain/scale.md, for ``make docs``; a test holds that the page is current.

The library's own code runs in a world of 1,000 ranks, and of 10,000, whose other ranks answer as this one does.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch.utils.data import DataLoader

PAGE = Path(__file__).parent / "explain" / "scale.md"
sys.path.insert(0, str(Path(__file__).parents[1]))

import trainer_kit as tk  # noqa: E402
from benchmarks.recording_world import (  # noqa: E402
    Exchange,
    RecordingWorld,
    busiest,
    patterns,
    recording_world,
    total,
)
from trainer_kit.checkpoint.sharded import read_sharded, write_sharded  # noqa: E402
from trainer_kit.testing import TinyModule  # noqa: E402
from trainer_kit.training.settle import Settler  # noqa: E402

SIZES = (1_000, 10_000)
BEGIN = "<!-- Written by docs/generate_scale.py, until the end of the table. -->"
END = "<!-- End of the table. -->"
Scenes = dict[str, list[Exchange]]
STEPS_BETWEEN_LOGS = 4
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


class _Logs(TinyModule):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self(batch).sum()
        self.log("loss", loss)
        return loss


class _Scenes(tk.Callback):
    """Notes what a fit exchanges, by scene."""

    def __init__(self, world: RecordingWorld, start: str) -> None:
        self.scenes: Scenes = {}
        self._world = world
        self._start = start

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:  # type: ignore[no-untyped-def]
        if self._start not in self.scenes:
            self.scenes[self._start] = self._world.new()

    def on_train_step_end(self, trainer, module) -> None:  # type: ignore[no-untyped-def]
        step = trainer.global_step
        # Until here, whatever followed the step before.
        exchanges = [e for e in self._world.new() if e.kind != "all_reduce"]
        if step == 3:
            self.scenes["a step, beside its gradients"] = exchanges
        if step == STEPS_BETWEEN_LOGS + 1:
            name = "after a step: requests, signals, values that were logged"
            self.scenes[name] = exchanges


def _trainer(world: RecordingWorld, root: str, start: str, steps: int) -> tk.Trainer:
    return tk.Trainer(
        max_steps=steps,
        strategy="ddp",
        accelerator="cpu",
        devices=8,
        num_nodes=world.ranks // 8,
        callbacks=[_Scenes(world, start)],
        default_root_dir=root,
        hang_timeout=False,
        log_every_n_steps=STEPS_BETWEEN_LOGS,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )


def _fit(world: RecordingWorld, root: str) -> Scenes:
    steps = STEPS_BETWEEN_LOGS + 2
    loader = DataLoader(torch.randn(2 * steps * world.ranks, 32), batch_size=1)
    trainer = _trainer(world, root, "start", steps)
    trainer.fit(_Logs(), loader)
    scenes = dict(trainer.callbacks[0].scenes)
    world.new()
    path = f"{root}/checkpoint"
    trainer.save_checkpoint(path)
    scenes["a checkpoint that rank 0 writes (DDP)"] = world.new()
    resumed = _trainer(world, root, "start from a checkpoint", steps + 1)
    resumed.fit(_Logs(), loader, ckpt_path=path)
    scenes.update(resumed.callbacks[0].scenes)
    return scenes


def _sharded_state() -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {f"layer.{index}.weight": torch.zeros(8) for index in range(100)}}


def _sharded(world: RecordingWorld, root: str) -> Scenes:
    state = _sharded_state()
    world.new()
    write_sharded(f"{root}/sharded", state)
    scenes = {"a checkpoint that all ranks write, 100 tensors": world.new()}
    read_sharded(f"{root}/readable", state)
    scenes["reading it"] = world.new()
    return scenes


PARTS: tuple[Callable[[RecordingWorld, str], Scenes], ...] = (_fit, _sharded)


def count(ranks: int) -> Scenes:
    """What so many ranks exchange, by scene."""
    scenes: Scenes = {}
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as root,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        # By this process alone: in the world, nobody writes the files of the other ranks.
        write_sharded(f"{root}/readable", _sharded_state())
        # Ranks look at signals once a second: at every step here, however fast the steps are.
        looks = mock.patch.object(Settler, "_steps_until_look", return_value=1)
        with looks, recording_world(ranks) as world:
            for part in PARTS:
                scenes.update(part(world, root))
    return scenes


def readable_bytes(size: int) -> str:
    """Rounded to a whole number of its unit: some messages hold paths and names of machines."""
    power = 0
    while size >= 1000:
        size = round(size / 1000)
        power += 1
    return f"{size} {UNITS[power]}"


def table(by_size: dict[int, Scenes]) -> str:
    """The table of the page."""
    lines = [
        "| what | who to whom | ranks | busiest rank | bytes there | all ranks | bytes in all |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    names = next(iter(by_size.values()))
    for name in names:
        for ranks, scenes in by_size.items():
            exchanges = scenes[name]
            one, every = busiest(exchanges), total(exchanges)
            cells = [
                name if ranks == min(by_size) else "",
                patterns(exchanges) if ranks == min(by_size) else "",
                f"{ranks:,}",
                f"{one.messages:,}",
                readable_bytes(one.size),
                f"{every.messages:,}",
                readable_bytes(every.size),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render(by_size: dict[int, Scenes]) -> str:
    """The whole page, with the table of these counts."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(by_size)}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render({ranks: count(ranks) for ranks in SIZES}), encoding="utf-8")
    print(f"wrote {PAGE}")
