"""``on_load_checkpoint`` sees what ``on_save_checkpoint`` added, on every way into a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import trainer_kit as tk
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.read import RUN_PARTS
from trainer_kit.testing import TinyModule

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
}


class Keeps(TinyModule):
    """Has a vocabulary that is no parameter, and renames a layer of an older version."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.words: list[str] = []
        self.seen: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vocabulary"] = {"words": ["a", "b"], "counts": torch.tensor([3, 4])}
        checkpoint["state_dict"] = {
            f"old.{name}": value for name, value in checkpoint["state_dict"].items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = dict(checkpoint)
        self.words = checkpoint["vocabulary"]["words"]
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name.removeprefix("old."): value for name, value in weights.items()
        }


def batches(count: int = 4) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(4, 32, generator=draw) for _ in range(count)]


def fit(
    module: TinyModule,
    *,
    epochs: int = 1,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> tk.Trainer:
    made = tk.Trainer(max_epochs=epochs, **{**QUIET, "devices": 1, **(trainer or {})})
    made.fit(module, batches(), **options)
    return made


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Keeps, Path, Path]:
    module = Keeps(lr=0.2)
    trainer = fit(module)
    trainer.save_checkpoint(tmp_path / "full")
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    return module, tmp_path / "full", tmp_path / "weights"


def check(module: Keeps, like: Keeps) -> None:
    assert module.words == ["a", "b"]
    assert torch.equal(module.seen["vocabulary"]["counts"], torch.tensor([3, 4]))
    assert torch.equal(module.layer.weight, like.layer.weight)


def test_load_from_checkpoint(saved: tuple[Keeps, Path, Path]) -> None:
    for path in saved[1:]:
        module = Keeps.load_from_checkpoint(path)
        check(module, saved[0])
        assert module.lr == 0.2
        assert module.seen["global_step"] == 4
        assert ("optimizer_states" in module.seen) == (path == saved[1]), (
            "everything that is there"
        )


class Starts(Keeps):
    """Does not train, so that its weights are those that were loaded."""

    def configure_optimizers(self) -> Any:
        return None


def test_a_new_run_from_the_weights(saved: tuple[Keeps, Path, Path]) -> None:
    for path in saved[1:]:
        module = Starts()
        trainer = fit(module, ckpt_path=path, load_weights_only=True)
        check(module, saved[0])
        assert trainer.global_step == 4, "it starts at step 0"
        assert (module.seen["global_step"], module.seen["hyper_parameters"]) == (
            4,
            {"lr": 0.2},
        )
        assert not module.seen.keys() & RUN_PARTS


def test_evaluation_and_a_resumed_run(saved: tuple[Keeps, Path, Path]) -> None:
    module = Keeps()
    tk.Trainer(**QUIET).validate(module, batches(1), ckpt_path=saved[1])
    check(module, saved[0])
    again = Keeps()
    assert fit(again, ckpt_path=saved[1]).global_step == 4
    check(again, saved[0])


def test_a_file_that_lightning_wrote(
    saved: tuple[Keeps, Path, Path], tmp_path: Path
) -> None:
    content = {
        "state_dict": saved[0].state_dict(),
        "hyper_parameters": {"lr": 0.2},
        "epoch": 1,
        "global_step": 4,
    }
    content |= {
        "optimizer_states": [{}],
        "loops": {},
        "pytorch-lightning_version": "2.6.0",
    }
    saved[0].on_save_checkpoint(content)
    torch.save(content, tmp_path / "theirs.ckpt")
    check(Keeps.load_from_checkpoint(tmp_path / "theirs.ckpt"), saved[0])
    module = Starts()
    fit(module, ckpt_path=tmp_path / "theirs.ckpt", load_weights_only=True)
    check(module, saved[0])
    other = Keeps()
    tk.Trainer(**QUIET).validate(other, batches(1), ckpt_path=tmp_path / "theirs.ckpt")
    check(other, saved[0])


def test_modules_without_the_hook_read_weights_and_hyperparameters_alone(
    saved: tuple[Keeps, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fit(TinyModule(lr=0.3))
    trainer.save_checkpoint("plain")
    from trainer_kit.checkpoint import weights

    read: list[Any] = []
    real = weights.read_checkpoint

    def note(path: Any, parts: Any, **options: Any) -> Any:
        read.append(set(parts))
        return real(path, parts, **options)

    monkeypatch.setattr(weights, "read_checkpoint", note)
    assert TinyModule.load_from_checkpoint("plain").lr == 0.3
    assert read == [{"model", "hyper_parameters"}]


def test_a_full_checkpoint_adds_only_the_listed_parts_of_a_run(
    saved: tuple[Keeps, Path, Path],
) -> None:
    full, alone = (set(read_manifest(path)["parts"]) for path in saved[1:])
    assert full - alone <= RUN_PARTS
    assert alone == {"model", "hyper_parameters", "epoch", "global_step", "vocabulary"}


class KeepsParts(TinyModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vocabulary"] = {"words": ["a", "b"], "counts": torch.tensor([3, 4])}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.vocabulary = checkpoint["vocabulary"]

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.lr else None


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_ranks_that_hold_parts(tmp_path: Path) -> None:
    trains = {"strategy": "fsdp", "devices": 2}
    module, again = KeepsParts(lr=0.1), KeepsParts(lr=0.0)
    fit(module, trainer=trains).save_checkpoint(tmp_path / "full")
    fit(again, trainer=trains, ckpt_path=tmp_path / "full", load_weights_only=True)
    assert again.vocabulary["words"] == ["a", "b"]
    assert torch.equal(whole(again.vocabulary["counts"]), torch.tensor([3, 4]))
    assert torch.equal(whole(again.layer.weight), whole(module.layer.weight))
    assert KeepsParts.load_from_checkpoint(tmp_path / "full").vocabulary["words"] == [
        "a",
        "b",
    ]
