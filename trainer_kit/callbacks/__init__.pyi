# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
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
from trainer_kit.core.hooks import Callback
from trainer_kit.core.lazy import NameLookup

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

__getattr__: NameLookup
