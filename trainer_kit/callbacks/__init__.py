"""Callbacks: code that runs around the loop. Subclass `Callback`, override hooks, and pass it to the Trainer."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import alias_package, lazy_names, locate_names

# Imported through the link at the top of a checkout.
if __name__ != "trainer_kit.callbacks":
    alias_package(__name__, "trainer_kit.callbacks")

_HOMES: Final = {
    "bad_steps": "NaNGuard SpikeDetection",
    "early_stopping": "EarlyStopping",
    "finetuning": "BackboneFinetuning BaseFinetuning LayerWiseUnfreezing",
    "gradient_accumulation": "GradientAccumulation GradientAccumulationScheduler",
    "health_check": "HealthCheck",
    "lambda_callback": "FunctionCallback LambdaCallback",
    "leaving": "OnExceptionCheckpoint Preemption",
    "model_checkpoint": "ModelCheckpoint",
    "model_summary": "ModelSummary",
    "monitors": "DeviceStatsMonitor LearningRateMonitor ThroughputMonitor",
    "prediction_writer": "BasePredictionWriter PredictionWriter",
    "profilers": "AdvancedProfiler PyTorchProfiler SimpleProfiler",
    "progress_bar": "ProgressBar TQDMProgressBar",
    "pruning": "ModelPruning",
    "repeated_steps": "AutoMicroBatch ReplayCheck",
    "rich_displays": "RichModelSummary RichProgressBar",
    "timer": "Timer",
    "tuning": "BatchSizeFinder LearningRateFinder",
    "weight_averaging": "EMAWeightAveraging StochasticWeightAveraging WeightAveraging",
    ".core.hooks": "Callback",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
