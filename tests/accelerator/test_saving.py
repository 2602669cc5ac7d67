"""What an `Accelerator` writes: tied weights once, what hooks write inside of the state, on one process and on two."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer_kit import (
    Accelerator,
    Fabric,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    load_checkpoint_in_model,
)
from trainer_kit.checkpoint import (
    diff,
    read_checkpoint,
    read_weights,
    verify_checkpoint,
    write_checkpoint,
)
from trainer_kit.checkpoint.manifest import dump_manifest
from trainer_kit.core.errors import CheckpointError


class Tied(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.body = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(words)))


ONCE = ["body.bias", "body.weight", "embedding.weight"]


def trained(accelerator: Accelerator, seed: int = 0) -> nn.Module:
    model = Tied(seed)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.1)
    )
    accelerator.backward(model(torch.tensor([[0, 1, 2]])).square().mean())
    optimizer.step()
    return model


def check_tied(accelerator: Accelerator, path: Path) -> dict[str, Tensor]:
    model = trained(accelerator)
    accelerator.save_model(model, path / "model")
    accelerator.save_model(model, path / "shards", max_shard_size=100)
    accelerator.save_model(model, path / "pickle", safe_serialization=False)
    accelerator.save_state(path / "state")
    assert sorted(load_file(path / "model" / "model.safetensors")) == ONCE
    shards = [
        load_file(file) for file in sorted((path / "shards").glob("*.safetensors"))
    ]
    assert sorted(name for shard in shards for name in shard) == ONCE
    stored = sum(file.stat().st_size for file in path.glob("state/model*.safetensors"))
    assert (
        stored < sum(4 * p.numel() for p in Tied().parameters()) + 1500
    )  # bytes, with headers
    pickled = torch.load(path / "pickle" / "pytorch_model.bin", weights_only=True)
    assert pickled["head.weight"].data_ptr() == pickled["embedding.weight"].data_ptr()
    found = read_weights(path / "state")
    for other in (read_weights(path / "model"), read_weights(path / "shards"), pickled):
        assert other.keys() == found.keys() == Tied().state_dict().keys()
        assert all(torch.equal(other[name], found[name]) for name in found)
    return found


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    found = check_tied(accelerator, tmp_path)
    assert all(
        torch.equal(value, found[name])
        for name, value in accelerator._models[0].state_dict().items()
    )
    other = Accelerator(cpu=True)
    model = trained(other, seed=1)
    other.load_state(tmp_path / "state")
    assert all(
        torch.equal(value, found[name]) for name, value in model.state_dict().items()
    )
    assert model.head.weight is model.embedding.weight


@pytest.mark.world_size(2)
def test_tied_weights_of_divided_models_are_written_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    found = check_tied(Accelerator(cpu=True, **options), tmp_path)
    for into in (options, {}):
        other = Accelerator(cpu=True, **into)
        model = trained(other, seed=1)
        other.load_state(tmp_path / "state")
        assert all(
            torch.equal(value, found[name])
            for name, value in other.get_state_dict(model).items()
        )


@pytest.mark.world_size(2)
def test_processes_that_name_other_directories_share_that_of_the_main_process(
    tmp_path: Path,
) -> None:
    """Scripts make temporary directories, and each process gets another one."""
    accelerator = Accelerator(cpu=True)
    model = trained(accelerator)
    mine = tmp_path / f"temporary-{accelerator.process_index}"
    saved = accelerator.get_state_dict(model)["head.weight"].clone()
    assert accelerator.save_state(mine) == str(tmp_path / "temporary-0")
    with torch.no_grad():
        model.module.head.weight.zero_()
    accelerator.load_state(mine)
    assert torch.equal(accelerator.get_state_dict(model)["head.weight"], saved)
    assert os.listdir(tmp_path) == ["temporary-0"]


def with_hooks(accelerator: Accelerator, seed: int = 0) -> nn.Module:
    """As published scripts have them: the model is saved by its own means, in a directory that the hook is given."""
    model = trained(accelerator, seed)

    def save(
        models: list[nn.Module], weights: list[dict[str, Tensor]], output_dir: str
    ) -> None:
        whole = accelerator.get_state_dict(models[0])
        weights.pop()
        if accelerator.is_main_process:
            os.makedirs(os.path.join(output_dir, "unet", ".cache"))
            torch.save(whole, os.path.join(output_dir, "unet", "weights.bin"))
            Path(output_dir, "unet", ".cache", "note").write_text("hidden")
            Path(output_dir, "model.safetensors").write_text("the hook's own")

    def load(models: list[nn.Module], input_dir: str) -> None:
        model, path = models.pop(), os.path.join(input_dir, "unet", "weights.bin")
        state = torch.load(path, weights_only=True)
        accelerator.strategy.load_module_state(
            accelerator.unwrap_model(model), state, strict=True
        )

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return model


def check_hooks(path: Path, **options: Any) -> None:
    accelerator = Accelerator(cpu=True, **options)
    model = with_hooks(accelerator)
    for step in (5, 6, 6):
        accelerator.save_state(path / f"checkpoint-{step}")
    assert sorted(int(name.split("-")[1]) for name in os.listdir(path)) == [5, 6]
    state = path / "checkpoint-6"
    manifest = verify_checkpoint(state)
    assert list(manifest["extra"]) == [
        "model.safetensors",
        "unet/.cache/note",
        "unet/weights.bin",
    ]
    assert "model" not in manifest["parts"]
    assert (state / "model.safetensors").read_text() == "the hook's own"
    other = Accelerator(cpu=True, **options)
    again = with_hooks(other, seed=1)
    other.load_state(state)
    pairs = zip(
        other.get_state_dict(again).values(),
        accelerator.get_state_dict(model).values(),
        strict=True,
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_files_of_hooks_are_part_of_the_state(tmp_path: Path) -> None:
    check_hooks(tmp_path / "run")
    state = tmp_path / "run" / "checkpoint-6"
    other = Accelerator(cpu=True)
    with_hooks(other)
    written = state / "unet" / "weights.bin"
    content = bytearray(written.read_bytes())
    content[-1] ^= 1
    written.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"unet/weights\.bin: damaged"):
        verify_checkpoint(state)
    with pytest.raises(CheckpointError, match=r"unet/weights\.bin: damaged"):
        other.load_state(state)
    written.unlink()
    with pytest.raises(
        CheckpointError, match=r"unet/weights\.bin: the file is missing"
    ):
        other.load_state(state)


@pytest.mark.world_size(2)
def test_files_of_hooks_of_divided_models_are_part_of_the_state(tmp_path: Path) -> None:
    check_hooks(tmp_path, fsdp_plugin=FullyShardedDataParallelPlugin())


def test_a_script_adds_files_to_a_state_and_they_stay_when_it_is_saved_again(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    with_hooks(accelerator)
    state = tmp_path / "checkpoint-5"
    accelerator.save_state(state)
    (state / "pytorch_lora_weights.safetensors").write_text("mine")
    (state / "logs").mkdir()
    verify_checkpoint(state)
    accelerator.load_state(state)
    (state / "unet" / "weights.bin").unlink()  # a hook's file is written again
    accelerator.save_state(state)
    accelerator.load_state(state)
    assert (state / "pytorch_lora_weights.safetensors").read_text() == "mine"
    assert (state / "logs").is_dir()
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_numbered_states_with_hooks_are_pruned_whole(tmp_path: Path) -> None:
    naming = ProjectConfiguration(
        str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = Accelerator(cpu=True, project_config=naming)
    with_hooks(accelerator)
    for _ in range(3):
        accelerator.save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_2"]
    accelerator.load_state()


def marked(directory: Path, mark: float, **options: Any) -> Accelerator:
    """An Accelerator with one prepared layer whose weight is ``mark``, which names its states itself."""
    naming = ProjectConfiguration(
        str(directory), automatic_checkpoint_naming=True, **options
    )
    accelerator = Accelerator(cpu=True, project_config=naming)
    fill(accelerator.prepare(nn.Linear(2, 2)), mark)
    return accelerator


def fill(model: nn.Module, mark: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(mark)


def loaded_mark(directory: Path) -> float:
    accelerator = marked(directory, 0.0)
    accelerator.load_state()
    return float(next(accelerator._models[0].parameters()).detach().flatten()[0])


def test_a_second_run_in_a_project_keeps_what_it_has_just_written(
    tmp_path: Path,
) -> None:
    """The first run left numbers 1 and 2: the free number 0 is the lowest, not the oldest."""
    states = tmp_path / "checkpoints"
    first = marked(tmp_path, 1.0, total_limit=2)
    for _ in range(3):
        first.save_state()
    second = marked(tmp_path, 2.0, total_limit=2)
    assert second.save_state() == str(states / "checkpoint_3")
    assert sorted(os.listdir(states)) == ["checkpoint_2", "checkpoint_3"]
    assert loaded_mark(tmp_path) == 2.0


def test_the_order_of_commits_is_the_age_of_states(tmp_path: Path) -> None:
    """Not the number, not the step that the script counts, and not the times of files, which a copy does not keep."""
    states = tmp_path / "checkpoints"
    first = marked(tmp_path, 1.0)
    first.step = 100
    first.save_state()
    first.save_state()
    again = marked(tmp_path, 2.0)
    again.project_configuration.automatic_checkpoint_naming = False
    again.save_state(states / "checkpoint_0")
    for seconds, name in enumerate(["checkpoint_0", "checkpoint_1"]):
        os.utime(states / name / "manifest.json", (seconds, seconds))
    assert loaded_mark(tmp_path) == 2.0
    third = marked(tmp_path, 3.0, total_limit=2)
    assert third.save_state() == str(states / "checkpoint_2")
    assert sorted(os.listdir(states)) == ["checkpoint_0", "checkpoint_2"], (
        "checkpoint_1 is the oldest"
    )


def test_the_number_of_a_state_that_was_set_aside_is_not_used_again(
    tmp_path: Path,
) -> None:
    accelerator = marked(tmp_path, 1.0)
    for _ in range(2):
        accelerator.save_state()
    states = tmp_path / "checkpoints"
    os.rename(states / "checkpoint_1", states / "checkpoint_1.damaged")
    assert marked(tmp_path, 2.0).save_state() == str(states / "checkpoint_2")


@pytest.mark.world_size(2)
def test_two_processes_continue_above_the_highest_number(tmp_path: Path) -> None:
    for mark in (1.0, 2.0):
        accelerator = marked(tmp_path, mark, total_limit=1)
        for _ in range(2):
            accelerator.save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_3"]
    assert loaded_mark(tmp_path) == 2.0


@pytest.mark.parametrize("kind", [FileNotFoundError, ValueError, CheckpointError])
def test_a_missing_state_is_an_error_that_says_what_exists(
    tmp_path: Path, kind: type[Exception]
) -> None:
    accelerator = marked(tmp_path, 1.0)
    with pytest.raises(kind, match="contains no checkpoint that can be loaded"):
        accelerator.load_state()
    accelerator.save_state()
    accelerator.save_state()
    with pytest.raises(kind, match="this path contains no checkpoint") as error:
        accelerator.load_state(tmp_path / "nope")
    exists = (
        f"{tmp_path / 'checkpoints'} has checkpoint_0 and, the newest, checkpoint_1"
    )
    assert exists in str(error.value)
    with pytest.raises(kind, match="did you mean"):
        accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_7")
    with pytest.raises(kind) as error:
        read_checkpoint(tmp_path / "nope")
    assert exists in str(error.value)
    fabric = Fabric(accelerator="cpu")
    readers = [
        read_weights,
        fabric.load,
        lambda path: fabric.load_raw(path, nn.Linear(1, 1)),
    ]
    readers += [
        lambda path: load_checkpoint_in_model(nn.Linear(1, 1), path),
        lambda path: diff(path, path),
    ]
    for read in readers:
        with pytest.raises(kind) as error:
            read(tmp_path / "nope")
        assert exists in str(error.value)


def test_a_hook_that_fails_or_takes_a_name_of_ours_leaves_the_state_before(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    with_hooks(accelerator)
    accelerator.save_state(tmp_path / "state")

    def fails(models: Any, weights: Any, output_dir: str) -> None:
        raise OSError("no space")

    def takes(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, "state.json").write_text("{}")

    for hook, kind, told in (
        (fails, OSError, "no space"),
        (takes, CheckpointError, "a hook wrote state.json"),
    ):
        handle = accelerator.register_save_state_pre_hook(hook)
        with pytest.raises(kind, match=told):
            accelerator.save_state(tmp_path / "state")
        handle.remove()
        assert os.listdir(tmp_path) == ["state"]
        verify_checkpoint(tmp_path / "state")


KILLED = """
import os, signal, sys
import torch
from trainer_kit import Accelerator

accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(1, 1))

def hook(models, weights, output_dir):
    os.makedirs(f"{output_dir}/unet")
    open(f"{output_dir}/unet/weights.bin", "w").write("half")
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

accelerator.register_save_state_pre_hook(hook)
accelerator.save_state(sys.argv[1])
print(sorted(os.listdir(os.path.dirname(sys.argv[1]))))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
def test_a_kill_inside_a_hook_leaves_nothing_that_the_next_save_does_not_clean(
    tmp_path: Path, programs: Any
) -> None:
    killed = programs.run_code(KILLED, str(tmp_path / "run" / "checkpoint-5"), "kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = os.listdir(tmp_path / "run")
    assert left.startswith(".checkpoint-5.")
    after = programs.run_code(KILLED, str(tmp_path / "run" / "checkpoint-6"), "save")
    assert after.stdout.strip() == "['checkpoint-6']", after.stderr


def test_a_state_of_the_old_layout_with_files_of_hooks_loads(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = with_hooks(accelerator)
    accelerator.save_state(tmp_path / "new")
    # As earlier versions wrote it.
    info = {"step": 0, "world_size": 1, "iteration": 0}
    write_checkpoint(tmp_path / "old", read_checkpoint(tmp_path / "new"), info=info)
    (tmp_path / "new" / "unet").rename(tmp_path / "unet")
    (tmp_path / "old.files").mkdir()
    (tmp_path / "unet").rename(tmp_path / "old.files" / "unet")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.body.weight.zero_()
    accelerator.load_state(tmp_path / "old")
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize(
    "name",
    [
        "../out",
        "/etc/x",
        "a/../../x",
        "",
        "a//b",
        "state.json/x",
        "manifest.json",
        "./x",
    ],
)
def test_a_manifest_cannot_lead_out_of_the_state(name: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with_hooks(accelerator)
    accelerator.save_state(tmp_path / "state")
    file = tmp_path / "state" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["sha256"]
    manifest["extra"][name] = {"size": 1, "xxh3_64": "0"}
    file.write_bytes(dump_manifest(manifest))
    with pytest.raises(CheckpointError, match="lead out of the checkpoint"):
        accelerator.load_state(tmp_path / "state")


SAVE_HOOKS: dict[str, Any] = {
    "the first": lambda models, weights: weights.pop(0),
    "the second": lambda models, weights: weights.pop(),
    "by its model": lambda models, weights: weights.pop(models.index(models[0])),
    "all": lambda models, weights: weights.clear(),
    "all, one by one": lambda models, weights: [weights.pop() for _ in models],
    "none": lambda models, weights: None,
    "replaced": lambda models, weights: weights.__setitem__(0, dict(weights[0])),
}
LOAD_HOOKS: dict[str, Any] = {
    "the first": lambda models: [models.pop(0)],
    "the second": lambda models: [models.pop()],
    "by its model": lambda models: [models.pop(0)],
    "all": lambda models: [models.pop() for _ in range(len(models))],
    "all, one by one": lambda models: [models.pop() for _ in range(len(models))],
    "none": lambda models: [],
    "replaced": lambda models: [],
}


@pytest.mark.parametrize("name", SAVE_HOOKS)
def test_hooks_take_out_some_of_the_models(tmp_path: Path, name: str) -> None:
    accelerator = Accelerator(cpu=True)
    layers = [nn.Linear(1, 1), nn.Linear(2, 1)]
    optimizers = [
        torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9) for layer in layers
    ]
    models = accelerator.prepare(*layers, *optimizers)[:2]
    before = [
        {name: value.clone() for name, value in layer.state_dict().items()}
        for layer in layers
    ]

    def load(models: list[nn.Module], path: str) -> None:
        for model in LOAD_HOOKS[name](models):
            model.load_state_dict(before[model.in_features - 1])

    accelerator.register_save_state_pre_hook(
        lambda models, weights, path: SAVE_HOOKS[name](models, weights)
    )
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(tmp_path / "state")
    for layer in layers:
        nn.init.zeros_(layer.weight)
    accelerator.load_state(tmp_path / "state")
    for model, saved in zip(models, before, strict=True):
        assert torch.equal(model.weight, saved["weight"])


def test_a_model_that_no_hook_loads_and_that_has_no_weights_is_named(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1), nn.Bilinear(2, 1, 1))
    accelerator.register_save_state_pre_hook(
        lambda models, weights, path: weights.pop()
    )
    accelerator.register_load_state_pre_hook(lambda models, path: models.pop(0))
    accelerator.save_state(tmp_path / "state")
    with pytest.raises(
        CheckpointError,
        match=r"no weights of model 1 \(Bilinear\): a hook removed them",
    ):
        accelerator.load_state(tmp_path / "state")
