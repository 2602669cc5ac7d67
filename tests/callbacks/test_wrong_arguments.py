"""A wrong argument of a callback is answered when the callback is made, not in an epoch where it is used first."""

from __future__ import annotations

import pickle
from pathlib import Path, PurePath
from typing import Any

import pytest

from trainer_kit import callbacks
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.progress import Duration

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("AutoMicroBatch", {"parts": 1.5}),
    ("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 1.5}),
    ("BackboneFinetuning", {"unfreeze_backbone_at_epoch": -1}),
    ("BackboneFinetuning", {"lambda_func": 2.0}),
    ("BatchSizeFinder", {"max_trials": "25"}),
    ("DeviceStatsMonitor", {"cpu_stats": "yes"}),
    ("EMAWeightAveraging", {"update_every_n_steps": 1.5}),
    ("EarlyStopping", {"monitor": "val_loss", "patience": "3"}),
    ("EarlyStopping", {"monitor": "val_loss", "patience": 1.5}),
    ("EarlyStopping", {"monitor": None}),
    ("LayerWiseUnfreezing", {"layers": ["a"], "every_n_epochs": 0.5}),
    ("LearningRateFinder", {"num_training_steps": "100"}),
    ("ModelCheckpoint", {"monitor": 3}),
    ("ModelCheckpoint", {"dirpath": 3}),
    ("ModelPruning", {"pruning_fn": "l1_unstructured", "amount": "half"}),
    ("NaNGuard", {"max_skips": 1.5}),
    ("OnExceptionCheckpoint", {"dirpath": None}),
    ("PredictionWriter", {"output_dir": None}),
    ("Preemption", {"sources": "signal", "every": "often"}),
    ("PyTorchProfiler", {"row_limit": "all"}),
    ("SimpleProfiler", {"dirpath": 3}),
    ("RichProgressBar", {"theme": 3}),
    ("SpikeDetection", {"warmup": "1"}),
    ("SpikeDetection", {"warmup": -1}),
    ("SpikeDetection", {"rtol": float("nan")}),
    ("StochasticWeightAveraging", {"swa_lrs": None}),
    ("StochasticWeightAveraging", {"swa_lrs": "x"}),
    ("StochasticWeightAveraging", {"swa_lrs": [0.1, "x"]}),
    ("TQDMProgressBar", {"refresh_rate": "fast"}),
    ("ThroughputMonitor", {"batch_size_fn": 32}),
]


@pytest.mark.parametrize(("name", "arguments"), WRONG)
def test_a_wrong_argument_is_answered_at_once(
    name: str, arguments: dict[str, Any]
) -> None:
    wrong, value = list(arguments.items())[-1]
    with pytest.raises(ConfigurationError) as raised:
        getattr(callbacks, name)(**arguments)
    assert wrong in str(raised.value)
    assert str(value) in str(raised.value)


def test_what_fits_is_taken() -> None:
    import numpy as np

    assert (
        callbacks.EarlyStopping(
            "loss", patience=np.int64(3), min_delta=1, verbose=1
        ).patience
        == 3
    )
    assert callbacks.EarlyStopping("loss", verbose=np.bool_(True)).verbose
    assert callbacks.SpikeDetection(rtol=2).rtol == 2
    assert callbacks.PredictionWriter(PurePath("written")).output_dir == Path("written")
    assert callbacks.ReplayCheck(Duration.parse("100st")).replays_every == 100
    with pytest.raises(TypeError, match="unexpected keyword argument 'patient'"):
        callbacks.EarlyStopping("loss", patient=3)
    assert pickle.loads(pickle.dumps(callbacks.SpikeDetection(window=5))).window == 5
