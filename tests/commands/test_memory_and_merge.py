"""`trainer-kit estimate-memory` and `trainer-kit merge-weights`, in processes of their own where it matters."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.distributed import checkpoint as dcp

from trainer_kit.checkpoint import export, read_weights, write_sharded
from trainer_kit.commands.main import main

BOMB = "{a: [&a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"
for _old, _new in ("ab", "bc", "cd", "de"):
    BOMB += f", &{_new} [" + ", ".join([f"*{_old}"] * 10) + "]"
BOMB += "]}"
ROOT = Path(__file__).resolve().parents[2]
MODELS = """
import torch
from torch import nn
import trainer_kit as tk

class Net(nn.Module):
    def __init__(self, width: int, head: int = 2) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(width, width, bias=False), nn.Linear(width, head, bias=False)

class Late(tk.TrainModule):
    def configure_model(self):
        self.layer = nn.Linear(1000, 1000, bias=False)

class Reads(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.bias.sum().item()

not_a_module = dict
"""


def call(*words):
    result = CliRunner().invoke(main, list(map(str, words)))
    return result.exit_code, result.output


def process(directory, *words, **options):
    (directory / "models.py").write_text(MODELS)
    return subprocess.run(
        [sys.executable, "-m", "trainer_kit", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )


@pytest.mark.slow
def test_a_class_larger_than_this_machine(tmp_path):
    def little_memory():
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))

    done = process(
        tmp_path,
        "estimate-memory",
        "models:Net",
        "--args",
        "{width: 300000}",
        preexec_fn=little_memory,
    )
    assert done.returncode == 0, done.stderr
    first, header, *rows = done.stdout.splitlines()
    assert (
        first
        == "models:Net: 90,000,600,000 parameters, 90,000,600,000 trainable; largest layer: 'body'"
    )
    assert header.split("  ")[0] == "DTYPE"
    assert rows[0].split() == [
        "float32",
        "360",
        "GB",
        "360",
        "GB",
        "720",
        "GB",
        "1.44",
        "TB",
        "360",
        "GB",
    ]
    assert rows[5].split() == ["int4", "45", "GB", "-", "-", "-", "45", "GB"]


def test_a_module_that_is_built_late_and_mistakes(tmp_path, monkeypatch):
    (tmp_path / "late_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, said = call("estimate-memory", "late_models:Late")
    assert (code, said.splitlines()[2].split()[1:3]) == (0, ["4", "MB"])
    said = call(
        "estimate-memory",
        "torch.nn:Linear",
        "--args",
        "{in_features: 2, out_features: 3}",
    )[1]
    assert said.startswith(
        "torch.nn:Linear: 9 parameters, 9 trainable; largest layer: the model itself\n"
    )
    wrong = {
        ("late_models:Net",): "missing 1 required positional argument: 'width'",
        ("late_models:Nte",): "did you mean 'Net'?",
        ("late_models:Reads",): "cannot be constructed without its weights",
        ("late_models:not_a_module",): "not_a_module is not a module",
        ("nowhere.at.all:Net",): "nowhere.at.all cannot be imported",
        ("nowhere",): "this is not a model",
        ("late_models:Net", "--args", "{width: "): "--args cannot be read",
        (
            "late_models:Net",
            "--args",
            BOMB,
        ): "--args cannot be read: more than 5000 values",
        ("late_models:Net", "--args", "[1]"): "--args must map names to values",
    }
    for words, expected in wrong.items():
        code, said = call("estimate-memory", *words)
        assert (code, expected in said, "Traceback" in said) == (2, True, False), said


def test_weights_are_measured_by_their_headers(tmp_path):
    weights = {
        "layer.weight": torch.ones(10, 10),
        "layer.bias": torch.ones(10),
        "count": torch.tensor([1]),
    }
    told = {
        call("estimate-memory", place)[1].partition(": ")[2]
        for place in (
            export(weights, tmp_path / "w.safetensors"),
            export(weights, tmp_path / "hub", max_shard_size=100),
            write_sharded(tmp_path / "ranks", {"model": weights}),
        )
    }
    (one,) = told
    assert one.startswith("110 parameters, 110 trainable; largest layer: 'layer'\n")
    assert "float32   448 B" in one


@pytest.mark.slow
def test_a_config_of_transformers(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 16}'
    )
    code, said = call("estimate-memory", tmp_path)
    try:
        import transformers  # noqa: F401
    except ImportError:
        assert (code, "pip install transformers" in said) == (2, True)
    else:
        assert (code, "1,816 parameters" in said) == (0, True)


def test_merge_of_every_kind(tmp_path):
    weights = {f"layer.{n}": torch.full((4,), float(n)) for n in range(5)}
    shards = export(weights, tmp_path / "hub", max_shard_size=32)
    ranks = write_sharded(
        tmp_path / "step-1", {"model": weights, "progress": {"step": 1}}
    )
    for number, source in enumerate((shards, ranks)):
        target = tmp_path / f"{number}.safetensors"
        assert call("merge-weights", source, target) == (0, f"{target}\n")
        merged = read_weights(target)
        assert merged.keys() == weights.keys()
        assert all(torch.equal(merged[name], weights[name]) for name in weights)
    assert (
        call("merge-weights", shards, tmp_path / "fewer", "--max-shard-size", "48")[0]
        == 0
    )
    assert len(list((tmp_path / "fewer").glob("*.safetensors"))) == 2
    assert call("merge-weights", shards, tmp_path / "fewer")[0] == 1
    assert call("merge-weights", tmp_path / "none", tmp_path / "x")[0] == 2


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_of_torch_is_merged(tmp_path):
    weights = {
        "a.w": torch.arange(6.0).reshape(2, 3),
        "a.n": torch.tensor(3),
        "a.empty": torch.empty(0, 2),
    }
    weights["b.h"] = torch.ones(2, dtype=torch.bfloat16)
    dcp.save(
        {"model": weights},
        checkpoint_id=str(tmp_path / "state" / "pytorch_model_fsdp_0"),
        no_dist=True,
    )
    dcp.save(
        {"optim": {"w": torch.ones(2)}},
        checkpoint_id=str(tmp_path / "state" / "optimizer_0"),
        no_dist=True,
    )
    assert (
        call("merge-weights", tmp_path / "state", tmp_path / "out.safetensors")[0] == 0
    )
    merged = read_weights(tmp_path / "out.safetensors")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    (damaged,) = (tmp_path / "state" / "pytorch_model_fsdp_0").glob("*.distcp")
    damaged.write_bytes(damaged.read_bytes()[:-900])
    code, said = call(
        "merge-weights", tmp_path / "state", tmp_path / "again.safetensors"
    )
    assert code == 1
    assert "pytorch_model_fsdp_0" in said
    assert not (tmp_path / "again.safetensors").exists()
