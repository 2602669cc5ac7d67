"""Several loaders at once: training cycles the shorter ones, evaluation takes one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import trainer_kit as tk

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def loader(count: int, first: int = 0, **options: Any) -> DataLoader[Any]:
    """Batches of two numbers."""
    return DataLoader(
        torch.arange(first, first + count).float(), batch_size=2, **options
    )


class Sees(tk.TrainModule):
    """Notes what its steps are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append({name: part.tolist() for name, part in batch.items()})
        x = torch.cat(list(batch.values())).unsqueeze(1) / 10
        return self.layer(x).pow(2).mean()

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append((dataloader_idx, batch_idx, batch.tolist()))
        self.log("mean", batch.mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return (dataloader_idx, batch.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(
    loaders: Any, module: Sees | None = None, ckpt_path: Any = None, **options: Any
) -> tuple[tk.Trainer, Sees]:
    module = module or Sees()
    trainer = tk.Trainer(
        **{"max_epochs": 1, "enable_checkpointing": False, **OPTIONS, **options}
    )
    trainer.fit(module, loaders, ckpt_path=ckpt_path)
    return trainer, module


def test_a_dict_of_training_loaders_ends_with_the_longest_and_starts_shorter_ones_again(
    capsys: Any,
) -> None:
    loaders = {"long": loader(6), "short": loader(2, 10)}
    trainer, module = fit(loaders)
    assert [seen["long"] for seen in module.seen] == [[0, 1], [2, 3], [4, 5]]
    assert [seen["short"] for seen in module.seen] == [[10, 11]] * 3
    assert trainer.num_training_batches == 3
    captured = capsys.readouterr()
    assert (
        "max_size_cycle: an epoch ends with the longest, the others restart"
        in captured.out + captured.err
    )
    assert "max_size_cycle" in trainer.explain(Sees(), loaders)


def test_each_mode_of_combination_is_honored(capsys: Any) -> None:
    both = tk.CombinedLoader({"long": loader(6), "short": loader(2, 10)}, "min_size")
    trainer, module = fit(both)
    assert (len(module.seen), trainer.num_training_batches) == (1, 1)
    captured = capsys.readouterr()
    assert "min_size: an epoch ends with the shortest" in captured.out + captured.err


def test_a_run_inside_a_second_pass_resumes_there(tmp_path: Path) -> None:
    def loaders() -> Any:
        return {
            "long": loader(14, shuffle=True),
            "short": loader(6, 20, shuffle=True),
            "list": [torch.ones(2)] * 2,
        }

    start = Sees().state_dict()
    results = {}
    for name in ("whole", "cut"):
        module = Sees()
        module.load_state_dict(start)
        options = {"max_epochs": 2, "seed": 5, "default_root_dir": tmp_path / name}
        if name == "whole":
            fit(loaders(), module, **options)
        else:
            trainer, _ = fit(
                loaders(), module, max_steps=12, **{**options, "max_epochs": 3}
            )
            trainer.save_checkpoint(
                tmp_path / "middle"
            )  # step 5 of 7 of the second epoch
            seen, module = module.seen, Sees()
            fit(loaders(), module, tmp_path / "middle", **options)
            module.seen[:0] = seen
        results[name] = module
    assert results["cut"].seen == results["whole"].seen
    assert len(results["whole"].seen) == 14
    for ours, theirs in zip(
        results["cut"].parameters(), results["whole"].parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_overfitting_a_dict_sees_the_same_batches_unshuffled() -> None:
    _, module = fit(
        {"a": loader(20, shuffle=True), "b": loader(20, 20, shuffle=True)},
        overfit_batches=2,
        max_epochs=2,
    )
    assert (
        module.seen == [{"a": [0, 1], "b": [20, 21]}, {"a": [2, 3], "b": [22, 23]}] * 2
    )


SEVERAL = {
    "CombinedLoader": lambda: tk.CombinedLoader(
        [loader(4), loader(3, 10)], "sequential"
    ),
    "dict": lambda: {"a": loader(4), "b": loader(3, 10)},
    "nested": lambda: {"a": loader(4), "b": [loader(3, 10)]},
    "CombinedLoader of a dict": lambda: tk.CombinedLoader(
        {"a": loader(4), "b": loader(3, 10)}, "sequential"
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_sequential_evaluation_equals_a_list_of_loaders(name: str) -> None:
    def outcome(make: Any) -> Any:
        module, trainer = (
            Sees(),
            tk.Trainer(max_epochs=1, enable_checkpointing=False, **OPTIONS),
        )
        results = (
            trainer.validate(module, make()),
            trainer.test(module, make()),
            trainer.predict(module, make()),
        )
        counts = (
            trainer.num_val_batches,
            trainer.num_test_batches,
            trainer.num_predict_batches,
        )
        few = tk.Trainer(limit_val_batches=1, enable_checkpointing=False, **OPTIONS)
        few.validate(module, make())
        return results, counts, module.seen

    results, counts, seen = expected = outcome(lambda: [loader(4), loader(3, 10)])
    assert results[0] == [
        {"mean/dataloader_idx_0": 1.5},
        {"mean/dataloader_idx_1": 11.0},
    ]
    assert counts == ([2, 2], [2, 2], [2, 2])
    assert [index for index, *_ in seen] == [0, 0, 1, 1] * 2 + [0, 1]
    assert outcome(SEVERAL[name]) == expected


def test_sequential_validation_inside_fit_equals_a_list_of_loaders() -> None:
    def values(loaders: Any) -> Any:
        trainer = tk.Trainer(max_epochs=1, enable_checkpointing=False, **OPTIONS)
        trainer.fit(Sees(), {"a": loader(2)}, loaders)
        return dict(trainer.callback_metrics)

    several = values([loader(4), loader(3, 10)])
    assert several.keys() == {"mean/dataloader_idx_0", "mean/dataloader_idx_1"}
    assert (
        values(tk.CombinedLoader([loader(4), loader(3, 10)], "sequential")) == several
    )
    assert values(tk.CombinedLoader([loader(4)], "sequential")).keys() == {"mean"}
