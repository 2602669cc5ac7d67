"""Callbacks: code that runs around the loop. Subclass `Callback`, override hooks, and pass it to the Trainer."""

from typing import TYPE_CHECKING

from trainer_kit.core.hooks import Callback
from trainer_kit.core.lazy import alias_package, lazy_names

if (
    __name__ != "trainer_kit.callbacks"
):  # imported through the link at the top of a checkout
    alias_package(__name__, "trainer_kit.callbacks")

if TYPE_CHECKING:
    from trainer_kit.callbacks.bad_steps import NaNGuard, SpikeDetection
    from trainer_kit.callbacks.early_stopping import EarlyStopping
    from trainer_kit.callbacks.finetuning import (
        BackboneFinetuning,
        BaseFinetuning,
        LayerWiseUnfreezing,
    )
    from trainer_kit.callbacks.gradient_accumulation import (
        GradientAccumulation,
        GradientAccumulationScheduler,
    )
    from trainer_kit.callbacks.health_check import HealthCheck
    from trainer_kit.callbacks.lambda_callback import FunctionCallback, LambdaCallback
    from trainer_kit.callbacks.leaving import OnExceptionCheckpoint, Preemption
    from trainer_kit.callbacks.model_checkpoint import ModelCheckpoint
    from trainer_kit.callbacks.model_summary import ModelSummary
    from trainer_kit.callbacks.monitors import (
        DeviceStatsMonitor,
        LearningRateMonitor,
        ThroughputMonitor,
    )
    from trainer_kit.callbacks.prediction_writer import (
        BasePredictionWriter,
        PredictionWriter,
    )
    from trainer_kit.callbacks.profilers import (
        AdvancedProfiler,
        PyTorchProfiler,
        SimpleProfiler,
    )
    from trainer_kit.callbacks.progress_bar import ProgressBar, TQDMProgressBar
    from trainer_kit.callbacks.pruning import ModelPruning
    from trainer_kit.callbacks.repeated_steps import AutoMicroBatch, ReplayCheck
    from trainer_kit.callbacks.rich_displays import RichModelSummary, RichProgressBar
    from trainer_kit.callbacks.timer import Timer
    from trainer_kit.callbacks.tuning import BatchSizeFinder, LearningRateFinder
    from trainer_kit.callbacks.weight_averaging import (
        EMAWeightAveraging,
        StochasticWeightAveraging,
        WeightAveraging,
    )

__all__ = [
    "AdvancedProfiler",
    "AutoMicroBatch",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "FunctionCallback",
    "GradientAccumulation",
    "GradientAccumulationScheduler",
    "HealthCheck",
    "LambdaCallback",
    "LayerWiseUnfreezing",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "NaNGuard",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "Preemption",
    "ProgressBar",
    "PyTorchProfiler",
    "ReplayCheck",
    "RichModelSummary",
    "RichProgressBar",
    "SimpleProfiler",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]

_HOME = {
    "AutoMicroBatch": "repeated_steps",
    "AdvancedProfiler": "profilers",
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "tuning",
    "DeviceStatsMonitor": "monitors",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "FunctionCallback": "lambda_callback",
    "GradientAccumulation": "gradient_accumulation",
    "GradientAccumulationScheduler": "gradient_accumulation",
    "HealthCheck": "health_check",
    "LambdaCallback": "lambda_callback",
    "LayerWiseUnfreezing": "finetuning",
    "LearningRateFinder": "tuning",
    "LearningRateMonitor": "monitors",
    "ModelCheckpoint": "model_checkpoint",
    "ModelPruning": "pruning",
    "ModelSummary": "model_summary",
    "NaNGuard": "bad_steps",
    "OnExceptionCheckpoint": "leaving",
    "PredictionWriter": "prediction_writer",
    "Preemption": "leaving",
    "ProgressBar": "progress_bar",
    "PyTorchProfiler": "profilers",
    "ReplayCheck": "repeated_steps",
    "RichModelSummary": "rich_displays",
    "RichProgressBar": "rich_displays",
    "SimpleProfiler": "profilers",
    "SpikeDetection": "bad_steps",
    "StochasticWeightAveraging": "weight_averaging",
    "TQDMProgressBar": "progress_bar",
    "ThroughputMonitor": "monitors",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
