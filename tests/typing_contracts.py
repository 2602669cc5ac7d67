"""Every implementation, assigned to its contract: `make check` runs ``mypy --strict`` on this file, which never runs.

Strategies and precisions are abstract classes, which mypy checks where they are defined; the assignments here show that
what the package hands out as one of these contracts is one. A user's module at the end reads the Trainer by its types:
a comment that ignores an error fails the check where there is no such error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from trainer_kit.callbacks import (
        AutoMicroBatch,
        GradientAccumulation,
        HealthCheck,
        NaNGuard,
        ReplayCheck,
    )
    from trainer_kit.core.module import TrainModule
    from trainer_kit.core.protocols import (
        ActsAtIntervals,
        DoublesParts,
        Group,
        LeavesOutSteps,
        Logger,
        MicroSteps,
        ModuleLike,
        ReplaysSteps,
        SetsAccumulation,
        TrainerLike,
    )
    from trainer_kit.loggers import (
        CSVLogger,
        DummyLogger,
        JSONLLogger,
        TensorBoardLogger,
        WandbLogger,
    )
    from trainer_kit.loggers.run_logger import RunLogger
    from trainer_kit.precision import (
        BitsandbytesPrecision,
        Float8Precision,
        MixedPrecision,
        QATPrecision,
        TransformerEnginePrecision,
        TruePrecision,
    )
    from trainer_kit.precision.precision import Precision
    from trainer_kit.step.window import Window
    from trainer_kit.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        MegatronStrategy,
        MeshStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
        Strategy,
        XLAStrategy,
    )
    from trainer_kit.strategies.process_group import ProcessGroup
    from trainer_kit.strategies.single import Alone
    from trainer_kit.strategies.transforms.blocks import (
        ActivationCheckpointing,
        Compile,
    )
    from trainer_kit.strategies.transforms.context import ContextParallel
    from trainer_kit.strategies.transforms.pipeline import PipelineParallel
    from trainer_kit.strategies.transforms.tensor import TensorParallel
    from trainer_kit.strategies.transforms.transform import Transform
    from trainer_kit.strategies.xla.strategy import XLAGroup
    from trainer_kit.trainer import Trainer

    def callbacks(
        accumulating: GradientAccumulation,
        splitting: AutoMicroBatch,
        replaying: ReplayCheck,
        leaving_out: NaNGuard,
        checking: HealthCheck,
    ) -> tuple[
        SetsAccumulation, DoublesParts, ReplaysSteps, LeavesOutSteps, ActsAtIntervals
    ]:
        return accumulating, splitting, replaying, leaving_out, checking

    def strategies(
        single: SingleDeviceStrategy,
        ddp: DDPStrategy,
        fsdp: FSDPStrategy,
        mesh: MeshStrategy,
        model_parallel: ModelParallelStrategy,
        deepspeed: DeepSpeedStrategy,
        megatron: MegatronStrategy,
        xla: XLAStrategy,
    ) -> list[Strategy]:
        return [single, ddp, fsdp, mesh, model_parallel, deepspeed, megatron, xla]

    def transforms(
        pipeline: PipelineParallel,
        tensor: TensorParallel,
        context: ContextParallel,
        recomputed: ActivationCheckpointing,
        compiled: Compile,
    ) -> list[Transform]:
        return [pipeline, tensor, context, recomputed, compiled]

    def precisions(
        true: TruePrecision,
        mixed: MixedPrecision,
        float8: Float8Precision,
        bitsandbytes: BitsandbytesPrecision,
        qat: QATPrecision,
        transformer_engine: TransformerEnginePrecision,
    ) -> list[Precision]:
        return [true, mixed, float8, bitsandbytes, qat, transformer_engine]

    def groups(alone: Alone, processes: ProcessGroup, xla: XLAGroup) -> list[Group]:
        return [alone, processes, xla]

    def loggers(
        csv: CSVLogger,
        dummy: DummyLogger,
        jsonl: JSONLLogger,
        tensorboard: TensorBoardLogger,
        wandb: WandbLogger,
        run: RunLogger[object],
    ) -> list[Logger]:
        return [csv, dummy, jsonl, tensorboard, wandb, run]

    def one_window(window: Window) -> MicroSteps:
        return window

    def facade(trainer: Trainer) -> TrainerLike:
        return trainer

    def module(module: TrainModule) -> ModuleLike:
        return module

    class UsersModule(TrainModule):
        def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
            steps: int = (
                self.trainer.global_step
                + self.trainer.current_epoch
                + self.trainer.accumulate_grad_batches
            )
            ranks: list[int] = [
                self.trainer.global_rank,
                self.trainer.local_rank,
                self.trainer.world_size,
            ]
            planned: int | float = self.trainer.estimated_stepping_batches
            limits: tuple[int | None, int] = (
                self.trainer.max_epochs,
                self.trainer.max_steps,
            )
            optimizers: list[Optimizer] = self.trainer.optimizers
            loss: Tensor | None = self.trainer.callback_metrics.get("loss")
            where: tuple[str, str | None] = (
                self.trainer.default_root_dir,
                self.trainer.log_dir,
            )
            stage: bool = (
                self.trainer.training
                or self.trainer.validating
                or self.trainer.sanity_checking
            )
            batches: int | float = self.trainer.num_training_batches
            self.trainer.print(
                steps, ranks, planned, limits, optimizers, loss, where, stage, batches
            )
            self.trainer.print(
                self.trainer.strategy.device,
                self.trainer.logger,
                self.trainer.datamodule,
            )
            self.trainer.should_stop = True
            self.trainer.save_checkpoint("now")
            self.trainer.global_step = 3  # type: ignore[misc]
            self.trainer.print(self.trainer.global_steps)  # type: ignore[attr-defined]
            return batch.sum()
