"""`ModelPruning`: weights that matter least become zero, and stay zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.types import SavedState

__all__ = ["ModelPruning"]

_METHODS: Final[Mapping[str, type[prune.BasePruningMethod]]] = {
    "l1_unstructured": prune.L1Unstructured,
    "random_unstructured": prune.RandomUnstructured,
    "ln_structured": prune.LnStructured,
    "random_structured": prune.RandomStructured,
}


@final
class ModelPruning(Callback):
    """Prune by the methods of ``torch.nn.utils.prune`` at the end of epochs; pruned elements stay zero.

    Masks are kept here and in every checkpoint; parameters keep their names and are plain tensors, so that a checkpoint
    is pruned for good. After a pruning, the gradients of pruned weights are dropped before each optimizer step, and the
    weights are set to zero after it: training equals that with torch's hooks. Each pruning takes its amount of what is
    left. All ranks have the same masks; strategies that divide or copy parameters (FSDP, DeepSpeed) are refused.

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"`` or ``"random_structured"``.
        parameters_to_prune: pairs of a module and the name of its parameter; None: see ``parameter_names``.
        parameter_names: of all modules those parameters (default: ``["weight"]``; modules without one are left out).
        use_global_unstructured: whether an unstructured method compares the weights of all parameters together.
        amount: a fraction of what is left, a number of weights, or a function of the epoch that returns one.
        apply_pruning: whether to prune when an epoch ends, or a function of the epoch.
        use_lottery_ticket_hypothesis: whether weights that are left go back to their values before training (Frankle
            and Carbin 2019, https://arxiv.org/abs/1803.03635), or a function of the epoch.
        pruning_dim: of the structured methods, the dim whose slices are pruned.
        pruning_norm: of ``ln_structured``, the norm of a slice.
        verbose: print how much is zero after each pruning.

    Raises:
        ConfigurationError: for another word; before the first step, where there is nothing to prune, or the strategy
            divides parameters.

    Example:
        >>> ModelPruning("l1_unstructured", amount=0.2).sparsity
        0.0
    """

    never_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("filter_parameters_to_prune", "make_pruning_permanent", "apply_pruning"),
        "pass parameters_to_prune=, or subclass Callback",
    )

    def __init__(
        self,
        pruning_fn: Literal[
            "l1_unstructured",
            "random_unstructured",
            "ln_structured",
            "random_structured",
        ],
        parameters_to_prune: Sequence[tuple[nn.Module, str]] | None = None,
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        *,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: bool = False,
    ) -> None:
        if pruning_fn not in _METHODS:
            raise ConfigurationError(
                "unknown pruning method",
                found=f"pruning_fn={pruning_fn!r}",
                fix=did_you_mean(str(pruning_fn), _METHODS),
            )
        # "unstructured" ends with "structured", but not with "_structured".
        is_structured = pruning_fn.endswith("_structured")
        dim_fits = is_structured == (pruning_dim is not None)
        norm_fits = (pruning_fn == "ln_structured") == (pruning_norm is not None)
        if not dim_fits or not norm_fits:
            raise ConfigurationError(
                "structured methods need pruning_dim, ln_structured also pruning_norm, and no other method takes them",
                found=f"{pruning_fn} with pruning_dim={pruning_dim}, pruning_norm={pruning_norm}",
            )
        self.pruning_fn = pruning_fn
        self.amount = amount
        self.verbose = verbose
        self._parameters_to_prune = parameters_to_prune
        self._parameter_names = tuple(parameter_names or ("weight",))
        self._is_global = use_global_unstructured and not is_structured
        self._applies = apply_pruning
        self._rewinds = use_lottery_ticket_hypothesis
        self._dim = pruning_dim
        self._norm = pruning_norm
        self._parameters: dict[str, nn.Parameter] = {}
        self._masks: dict[str, Tensor] = {}
        # The values before training, for the lottery ticket hypothesis.
        self._initial_values: dict[str, Tensor] = {}

    @property
    def sparsity(self) -> float:
        """Which part of the parameters that are pruned is zero by its mask; reads from the device."""
        masks = self._masks.values()
        total = sum(mask.numel() for mask in masks)
        if not total:
            return 0.0
        remaining = sum(int(mask.sum()) for mask in masks)  # sync point: asked for
        return 1 - remaining / total

    def state_dict(self) -> SavedState:
        return {"masks": dict(self._masks), "first": dict(self._initial_values)}

    def load_state_dict(self, state_dict: SavedState) -> None:
        self._masks = dict(state_dict["masks"])
        self._initial_values = dict(state_dict["first"])

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            self._parameters = {}
            self._masks = {}
            self._initial_values = {}

    def on_fit_start(self, trainer: TrainerLike, pl_module: Any) -> None:
        strategy = trainer.strategy
        if strategy.sharded or strategy.keeps_gradients or strategy.owns_step:
            raise ConfigurationError(
                "ModelPruning needs unsharded parameters with their gradients, but this strategy shards or copies them",
                found=strategy.describe(),
                fix='use strategy="ddp"',
            )
        self._parameters = self._find_parameters(pl_module)
        if not self._parameters:
            names = " or ".join(self._parameter_names)
            raise ConfigurationError(
                "ModelPruning found nothing to prune",
                found=f"{type(pl_module).__name__} has no parameter called {names}",
                fix="pass parameter_names=[...] or parameters_to_prune=[(module, name), ...]",
            )
        # Those of a checkpoint are on the CPU.
        for tensors in (self._masks, self._initial_values):
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(self._parameters[name].device)
        if self._rewinds and not self._initial_values:
            for name, parameter in self._parameters.items():
                self._initial_values[name] = parameter.detach().clone()

    def on_before_optimizer_step(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        # Momentum of a pruned weight would otherwise grow, and move it in later steps.
        for name, mask in self._masks.items():
            gradient = self._parameters[name].grad
            if gradient is not None:
                gradient.mul_(mask)

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        # Weight decay and momentum from before the pruning still move pruned weights: they are set to zero again.
        self._apply_masks()

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        epoch = trainer.current_epoch
        applies = _value_of_epoch(self._applies, epoch)
        amount = _value_of_epoch(self.amount, epoch)
        # A run that resumes inside this epoch would prune a second time at its end.
        if not trainer.epoch_is_whole or not applies or not amount:
            return
        self._prune(amount)
        for name, parameter in self._parameters.items():
            # Random methods draw on each rank.
            trainer.strategy.data.broadcast(self._masks[name])
            if _value_of_epoch(self._rewinds, epoch):
                parameter.data.copy_(self._initial_values[name])
        self._apply_masks()
        if self.verbose:
            trainer.print(
                f"pruned {self.sparsity:.1%} of {plural(len(self._parameters), 'parameter')} after epoch {epoch}"
            )

    def _find_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """By name in the module, the parameters to prune."""
        named = module.named_parameters()
        if self._parameters_to_prune is not None:
            pairs = self._parameters_to_prune
            ids = {id(getattr(owner, name)) for owner, name in pairs}
            return {
                name: parameter for name, parameter in named if id(parameter) in ids
            }
        parameters = {}
        for name, parameter in named:
            _, _, last_name = name.rpartition(".")
            if last_name in self._parameter_names:
                parameters[name] = parameter
        return parameters

    def _apply_masks(self) -> None:
        for name, mask in self._masks.items():
            self._parameters[name].data.mul_(mask)

    def _prune(self, amount: int | float) -> None:
        for name, parameter in self._parameters.items():
            self._masks.setdefault(name, torch.ones_like(parameter.data))
        if self._is_global:
            self._prune_together(amount)
            return
        for name, parameter in self._parameters.items():
            mask = self._masks[name]
            self._masks[name] = self._shrink(parameter.detach(), mask, amount)

    def _prune_together(self, amount: int | float) -> None:
        """Compare the weights of all parameters, as one vector."""
        weights = []
        masks = []
        for name, parameter in self._parameters.items():
            vector = parameter.detach().flatten()
            weights.append(vector)
            masks.append(self._masks[name].flatten())
        # As one vector, so that a layer of small weights loses more of them than others.
        joined_mask = self._shrink(torch.cat(weights), torch.cat(masks), amount)
        start = 0
        for name, parameter in self._parameters.items():
            size = parameter.numel()
            mask = joined_mask[start : start + size]
            start += size
            # A copy: a view would hold the whole vector in memory.
            self._masks[name] = mask.view_as(parameter).clone()

    def _shrink(self, weights: Tensor, mask: Tensor, amount: int | float) -> Tensor:
        """Return the mask with ``amount`` less of what it has left."""
        method = _METHODS[self.pruning_fn]
        if self._dim is None:
            # Only what is left: the weights that were pruned before are zeros, and would be chosen again.
            remaining = mask.bool()
            smaller = method(amount).compute_mask(weights[remaining], mask[remaining])  # type: ignore[call-arg, no-untyped-call]  # the base class takes no arguments
            mask = mask.clone()
            mask[remaining] = smaller
            return mask
        arguments: list[int | float] = [amount, self._dim]
        if self._norm is not None:
            arguments.insert(1, self._norm)
        dim = self._dim % mask.dim()
        other_dims = [other for other in range(mask.dim()) if other != dim]
        # sync point: at the end of an epoch
        slices = mask.sum(other_dims).nonzero().flatten()
        smaller = method(*arguments).compute_mask(
            weights.index_select(dim, slices), mask.index_select(dim, slices)
        )  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return torch.zeros_like(mask).index_copy_(dim, slices, smaller)


_Value = TypeVar("_Value", bool, int | float)


def _value_of_epoch(value: _Value | Callable[[int], _Value], epoch: int) -> _Value:
    """The value of an argument that may be a function of the epoch."""
    if callable(value):
        return value(epoch)
    return value
