"""A model of 400 MB in a process of its own: what it takes, measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from trainer_kit.checkpoint import export

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 2048, 24
LAYER = WIDTH * WIDTH * 4
WHOLE = LAYER * LAYERS  # 403 MB

CHILD = """
import gc, json, sys
import torch
from torch import nn
import trainer_kit as tk

def read(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def build():
    with tk.init_empty_weights():
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).eval()

build()
told = []
for device_map in [None, *json.loads(sys.argv[2])]:
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before, y = read("VmRSS"), torch.zeros(())
    model = build()
    if device_map is not None:
        tk.load_checkpoint_and_dispatch(model, sys.argv[1], device_map=device_map)
        with torch.no_grad():
            y = model(torch.linspace(0, 1, WIDTH)[None])
    told.append([read("VmHWM") - before, y.double().sum().item()])
    del model
print(json.dumps(told))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks are read from /proc"
)
def test_offloading_needs_memory_for_one_layer_and_no_copies(tmp_path: Path) -> None:
    weight = (
        torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        / WIDTH**0.5
    )
    hub = export(
        {f"{i}.weight": weight for i in range(LAYERS)},
        tmp_path / "hub",
        max_shard_size="100MB",
    )
    x = torch.linspace(0, 1, WIDTH)[None]
    for _ in range(LAYERS):
        x = F.linear(x, weight)
    half = {str(i): "cpu" if i < LAYERS // 2 else "disk" for i in range(LAYERS)}
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            CHILD.replace("WIDTH", str(WIDTH)).replace("LAYERS", str(LAYERS)),
            str(hub),
            json.dumps([{"": "disk"}, half, {"": "cpu"}]),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        # What was freed is given back to the system at once, so that each peak is a model's own.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )
    assert ran.returncode == 0, ran.stderr
    peaks = [peak / LAYER for peak, _ in json.loads(ran.stdout)]
    assert peaks[0] < 1, peaks  # nothing was loaded
    for peak, held in zip(peaks[1:], (0, LAYERS // 2, LAYERS), strict=True):
        assert held * 0.9 <= peak <= held + 4, peaks
    assert all(
        found == pytest.approx(x.double().sum().item(), rel=1e-4)
        for _, found in json.loads(ran.stdout)[1:]
    )
