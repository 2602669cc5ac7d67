"""The data axes of a mesh with a pipeline: each stage is sharded by itself, and a schedule runs all stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.core.state_names import (
    plain_state,
    report_differences,
    state_name,
    without_wrappers,
)
from trainer_kit.core.types import SavedState
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.fsdp import (
    FSDPStrategy,
    reset_unit,
    reshard_after,
    sharded_units,
)
from trainer_kit.strategies.gradients import spread_overflow
from trainer_kit.strategies.mesh_layout import MeshGroups
from trainer_kit.strategies.process_group import average_gradients
from trainer_kit.strategies.rank_sync import agree_on_rng
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import load_module_parts
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.torch_private import has_compiled_function
from trainer_kit.strategies.transforms.pipeline import Pipeline, bubble

__all__ = ["StagedStrategy"]


@final
class StagedStrategy(Strategy):
    """The data axes of a mesh with a pipeline: FSDP2 shards each stage separately.

    Args:
        pipeline: the stages of this rank.
        groups: the process groups of the mesh.
        sharding: shards each stage; None if no other rank has these stages.
    """

    name = "staged"

    def __init__(
        self, pipeline: Pipeline, groups: MeshGroups, sharding: FSDPStrategy | None
    ) -> None:
        self.pipeline = pipeline
        self.groups = groups
        self.sharding = sharding
        self._units: list[FSDPModule] = []
        self._scales = False
        self._has_run_window = False

    def start(self) -> None:
        """Do nothing: the mesh has joined the process group."""

    def describe(self) -> str:
        """One line about the pipeline."""
        return self.pipeline.describe()

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Shard each stage."""
        if self.sharding is not None:
            self._shard_stages(self.sharding, module, precision)
        self.pipeline.find_parameters(module)
        self._units = []
        for stage in self.pipeline.stages:
            self._units += sharded_units(stage)
        self._has_run_window = False

    def _shard_stages(
        self, sharding: FSDPStrategy, module: nn.Module, precision: Precision
    ) -> None:
        # Some schedules compute the gradients of weights after those of activations, and need the weights that the
        # forward used: keep them gathered.
        reshards = False if self.pipeline.splits_backward else None
        for stage in self.pipeline.stages:
            sharding.shard(
                stage, precision, [stage], whole=[stage.loose], reshards=reshards
            )
        # After all stages are sharded: a second call would fill nothing.
        assert sharding.weights is not None
        sharding.weights.distribute(module, sharding.device, sharding.parameters_on)

    def configure(self, **facts: Any) -> str | None:
        """Return a warning if windows are too short to keep all stages busy, else None."""
        batches = facts.get("accumulation")
        if batches is None:
            return None
        return bubble(batches, self.pipeline.count)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Remove the parameters of other stages from groups created before the model was split."""
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not self._is_removed(p)]

    def _is_removed(self, parameter: nn.Parameter) -> bool:
        """Whether only other ranks have a parameter. Ids are reused, so the object itself is compared."""
        if parameter.is_meta:
            return True
        reference = self.pipeline.removed.get(id(parameter))
        return reference is not None and reference() is parameter

    def load_module_state(
        self, module: nn.Module, state: SavedState, strict: bool
    ) -> None:
        """Load this rank's part of the state of the whole module; a missing name is an error on every rank."""
        state = without_wrappers(state)
        names = dict.fromkeys(map(state_name, self.pipeline.names))
        missing = [name for name in names if name not in state]
        unexpected = [name for name in state if name not in names]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}:"
                f" missing {missing}, unexpected {unexpected}"
            )
        report_differences(missing, unexpected)
        # The differences are known for all stages; this rank loads strictly what it has.
        names_on_rank = plain_state(module).keys()
        state_on_rank = {
            name: value for name, value in state.items() if name in names_on_rank
        }
        load_module_parts(module, state_on_rank, strict=True)

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Shard each stage; the schedule runs backward.

        Raises:
            StrategyError: optimization is manual, or loss scaling is used and a rank has no trainable parameter.
        """
        if manual:
            raise _unsupported_in_pipeline(
                "manual optimization",
                "set automatic_optimization = True, or train without pp=",
            )
        self.place_module(module, precision)
        self._scales = precision.scales
        if self._scales:
            self._check_trained_everywhere(module)

    def _check_trained_everywhere(self, module: nn.Module) -> None:
        # The scaler of a rank without gradients would not know of an overflow on the others.
        is_trained = any(p.requires_grad for p in module.parameters())
        rows = self.pipeline.world.agree([is_trained])
        idle_ranks = [str(rank) for rank, row in enumerate(rows) if not row[0]]
        if idle_ranks:
            raise StrategyError(
                "gradient scaling needs trainable parameters on every rank of a pipeline",
                found=f"nothing on ranks {', '.join(idle_ranks)}",
                fix='use precision="bf16-mixed", which needs no scaling, or other split_points',
            )

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """Bind the step: every rank runs it up to the call of the model, the last rank all of it."""
        if has_compiled_function(method):
            raise StrategyError(
                "no stage of a pipeline has a whole step to compile",
                found=f"pp={self.groups.stage_group.size}",
                fix='use compile={"regional": True}, which compiles each block of a stage',
            )
        if several:
            raise _unsupported_in_pipeline(
                "several named losses", "use one optimizer, or a mesh without pp="
            )
        return self.pipeline.bind(method)

    def bind_evaluation(self, method: StepMethod, whole: bool = False) -> StepMethod:
        """Bind evaluation to all stages; weights are resharded after each call, for hooks and checkpoints."""
        call = self.pipeline.bind_evaluation(method)
        return reshard_after(call, self._units)

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """Return None: the schedule runs backward. A module's own backward is an error."""
        if backward is not None:
            raise _unsupported_in_pipeline(
                "a backward of the module's own",
                "leave it out, or use a mesh without pp=",
            )
        return None

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """The optimizer's own step.

        Raises:
            StrategyError: copies of one parameter on several stages have different optimizer options.
        """
        self.pipeline.ties.check_groups(optimizer)
        return optimizer.step

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run a window as one schedule; then average the gradients that FSDP2 does not reduce."""
        # Hooks may have drawn random numbers on one rank only.
        groups = dict(self.groups.same)
        # Within an epoch the stages may differ: in each window `Pipeline` draws a seed for each of them.
        if self._has_run_window and micro.first != 0:
            del groups["pp"]
        agree_on_rng(list(groups.values()), self.pipeline.device)
        self._has_run_window = True
        # An error in the middle of a schedule leaves units whose reduction is deferred.
        try:
            self.pipeline.forward_backward(micro)
        except BaseException:
            for unit in self._units:
                reset_unit(unit)
            raise
        self._reduce_remaining_gradients()

    def _reduce_remaining_gradients(self) -> None:
        """Average the gradients that FSDP2 does not reduce; an overflow on one stage skips the step on all stages."""
        loose = self.pipeline.loose
        # Before the overflow is spread: an average with a rank that overflowed is not finite either.
        if self.sharding is not None and loose:
            average_gradients(loose, self.groups.losses)
        # A scaler reads its own rank's gradients only, and a stage that steps alone would train another model.
        if not self._scales:
            return
        gradients: list[Tensor] = []
        for stage in self.pipeline.stages:
            gradients += [p.grad for p in stage.parameters() if p.grad is not None]
        spread_overflow(gradients, self.groups.stage_group.group)

    def held_elsewhere(self, module: nn.Module) -> Collection[str]:
        """The names in the state that only other stages have."""
        # A tied parameter has one name in checkpoints, which may be that of another stage.
        names_on_rank = module.state_dict().keys() | set(
            self.pipeline.ties.names.values()
        )
        return set(self.pipeline.names) - names_on_rank

    def names_on_all_ranks(self) -> Sequence[str] | None:
        """The names of all stages."""
        return list(self.pipeline.names)

    def shared_names(self, module: nn.Module) -> Mapping[str, str]:
        """The names of parameters that another stage has under another name."""
        return self.pipeline.ties.names


def _unsupported_in_pipeline(feature: str, fix: str) -> StrategyError:
    return StrategyError(
        f"{feature} is not supported in a pipeline",
        found="MeshStrategy(pp=...)",
        fix=fix,
    )
