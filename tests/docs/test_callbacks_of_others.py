"""Every callback of Lightning, Composer and Transformers has a class of its name here, or a line in the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer_kit import callbacks

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "callbacks.md").read_text(
    encoding="utf-8"
)
SECTION = GUIDE.partition("## Equivalents of Lightning")[2]
# `__all__` of lightning.pytorch.callbacks 2.6.6, of composer.callbacks and composer.algorithms 0.32.1, and the
# subclasses of TrainerCallback in transformers 5.23.0.
LIGHTNING = """
    BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback Checkpoint DeviceStatsMonitor
    EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback LearningRateFinder LearningRateMonitor
    ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint ProgressBar RichModelSummary RichProgressBar
    SpikeDetection StochasticWeightAveraging TQDMProgressBar ThroughputMonitor Timer WeightAveraging
"""
COMPOSER = """
    ActivationMonitor CheckpointSaver EarlyStopper ExportForInferenceCallback FreeOutputs Generate ImageVisualizer
    LRMonitor LoadCheckpoint MLPerfCallback MemoryMonitor MemorySnapshot NaNMonitor OOMObserver OptimizerMonitor
    RuntimeEstimator SpeedMonitor SystemMetricsMonitor ThresholdStopper
    Alibi AugMix BlurPool ChannelsLast ColOut CutMix CutOut EMA Factorize GatedLinearUnits GhostBatchNorm
    GradientClipping GyroDropout LabelSmoothing LayerFreezing LowPrecisionGroupNorm LowPrecisionLayerNorm MixUp
    ProgressiveResizing RandAugment SAM SWA SelectiveBackprop SeqLengthWarmup SqueezeExcite StochasticDepth
    WeightStandardization
"""
TRANSFORMERS = """
    AzureMLCallback ClearMLCallback CodeCarbonCallback CometCallback DVCLiveCallback DagsHubCallback DefaultFlowCallback
    EarlyStoppingCallback FlyteCallback KubeflowCallback MLflowCallback NeptuneCallback PrinterCallback ProgressCallback
    SwanLabCallback TensorBoardCallback TrackioCallback WandbCallback
"""


@pytest.mark.parametrize("name", LIGHTNING.split())
def test_a_callback_of_lightning_has_its_name_here_or_a_line(name: str) -> None:
    assert name in callbacks.__all__ or f"`{name}`" in SECTION


@pytest.mark.parametrize("name", [*COMPOSER.split(), *TRANSFORMERS.split()])
def test_a_callback_of_composer_and_transformers_has_a_line(name: str) -> None:
    assert f"`{name}`" in SECTION


def test_what_the_lines_name_exists() -> None:
    """Classes of this library, by their endings; other names in the second column are of other libraries."""
    second = "".join(
        line.rpartition(" | ")[2]
        for line in SECTION.splitlines()
        if line.startswith("| ")
    )
    named = set(
        re.findall(
            r"`([A-Z]\w+(?:Monitor|Averaging|Unfreezing|Guard|Stopping|Bar|Checkpoint|Batch))\b",
            second,
        )
    )
    assert len(named) >= 9
    assert named <= set(callbacks.__all__)
