"""What a mesh does along its data axes where the module is a pipeline: each stage is divided by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.fsdp import FSDPStrategy
from trainer_kit.strategies.gradients import spread_overflow
from trainer_kit.strategies.process_group import ProcessGroup, average_gradients
from trainer_kit.strategies.transforms.fully_shard import abandon, sharded_units
from trainer_kit.strategies.transforms.pipeline import Pipeline

__all__ = ["Staged"]


@final
class Staged:
    """The stages of a pipeline, each divided over the data axes by FSDP2.

    Args:
        pipeline: the stages of this rank.
        group: of the ranks that have the same stages.
        sharding: how each is divided; None where this rank is alone with its stages.
    """

    def __init__(self, pipeline: Pipeline, group: ProcessGroup, sharding: FSDPStrategy | None) -> None:
        self.pipeline, self.group, self.sharding = pipeline, group, sharding
        self._units: list[FSDPModule] = []
        self._scales = False

    def stop(self) -> None:
        """The module stays divided."""

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Divide each stage."""
        if self.sharding is None:
            return
        for stage in self.pipeline.stages:
            # Weights get their gradients apart from activations in some schedules, and are looked for where they were.
            keeps = False if self.pipeline.splits_backward else None
            shard = self.sharding.sharding(stage, precision, whole=[stage.loose], reshard_after_forward=keeps)
            shard.apply(stage, self.sharding.mesh)
        self._units = [unit for stage in self.pipeline.stages for unit in sharded_units(stage)]

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """The same; backward is the schedule's."""
        if manual:
            raise _not_here("manual optimization", "set automatic_optimization = True, or train without pp=")
        self.place_module(module, precision)
        self._take_scale(module, precision)

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """The same; it is called as it was before."""
        self.place_module(module, precision)
        self._take_scale(module, precision)
        self.pipeline.take_calls()
        return module

    def _take_scale(self, module: nn.Module, precision: Precision) -> None:
        self._scales = precision.scales
        if self._scales:
            rows = self.pipeline.world.agree([any(p.requires_grad for p in module.parameters())])
            if not all(row[0] for row in rows):
                raise StrategyError(
                    "each rank of a pipeline needs something to train where gradients are scaled",
                    found=f"nothing on ranks {', '.join(str(rank) for rank, row in enumerate(rows) if not row[0])}",
                    fix='use precision="bf16-mixed", which needs no scaling, or other split_points',
                )

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """Up to the model on every rank, and through it on the last."""
        if several:
            raise _not_here("several named losses", "use one optimizer, or a mesh without pp=")
        return self.pipeline.bind(method)

    def bind_evaluation(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Through all stages; weights are divided again after each call, as hooks and checkpoints look for them."""
        call, units = self.pipeline.bind_evaluation(method), self._units

        def evaluate(*arguments: Any) -> Any:
            output = call(*arguments)
            for unit in units:
                unit.reshard()
            return output

        return evaluate

    def bind_backward(self, backward: Callable[..., None] | None) -> Callable[..., None] | None:
        """The schedule's own."""
        if backward is not None:
            raise _not_here("a backward of the module's own", "leave it out, or use a mesh without pp=")
        return None

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """The optimizer's own step."""
        return optimizer.step

    def forward_backward(self, micro: MicroSteps) -> None:
        """A window is a schedule; what no stage's modules hold is averaged behind it."""
        with self._giving_up():
            self.pipeline.forward_backward(micro)
        self._average()

    def complete(self) -> None:
        """The same for the calls of a loop of the user's own."""
        with self._giving_up():
            found = self.pipeline.complete()
        if found:
            self._average()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for unit in self._units:
                abandon(unit)
            raise

    def _average(self) -> None:
        loose = self.pipeline.loose
        if self.sharding is not None and loose:
            average_gradients(loose, self.group)
        if self._scales:  # what a stage alone does not see, it would step
            gradients = [p.grad for stage in self.pipeline.stages for p in stage.parameters() if p.grad is not None]
            spread_overflow(gradients, self.pipeline.group)

    def arm(self, loss: Tensor) -> None:
        """There is no manual optimization here."""


def _not_here(what: str, fix: str) -> StrategyError:
    return StrategyError(f"{what} has no place in a pipeline", found="MeshStrategy(pp=...)", fix=fix)
