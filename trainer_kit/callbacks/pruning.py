"""`ModelPruning`: weights that matter least become zero, and stay zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike

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
        structured, norm = (
            pruning_fn.endswith("_structured"),
            pruning_fn == "ln_structured",
        )
        if structured != (pruning_dim is not None) or norm != (
            pruning_norm is not None
        ):
            raise ConfigurationError(
                "structured methods need pruning_dim, ln_structured also pruning_norm, and no other method takes them",
                found=f"{pruning_fn} with pruning_dim={pruning_dim}, pruning_norm={pruning_norm}",
            )
        self.pruning_fn, self.amount = pruning_fn, amount
        self._given, self._names = (
            parameters_to_prune,
            tuple(parameter_names or ("weight",)),
        )
        self._together = use_global_unstructured and not structured
        self._applies, self._rewinds = apply_pruning, use_lottery_ticket_hypothesis
        self._dim, self._norm, self.verbose = pruning_dim, pruning_norm, verbose
        self._pruned: dict[str, nn.Parameter] = {}
        self._masks: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    @property
    def sparsity(self) -> float:
        """Which part of the parameters that are pruned is zero by its mask; reads from the device."""
        total = sum(mask.numel() for mask in self._masks.values())
        left = sum(
            int(mask.sum()) for mask in self._masks.values()
        )  # sync point: asked for
        return 1 - left / total if total else 0.0

    def state_dict(self) -> Mapping[str, Any]:
        return {"masks": dict(self._masks), "first": dict(self._first)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._masks, self._first = dict(state_dict["masks"]), dict(state_dict["first"])

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            self._pruned, self._masks, self._first = {}, {}, {}

    def on_fit_start(self, trainer: TrainerLike, pl_module: Any) -> None:
        strategy = trainer.strategy
        if strategy.sharded or strategy.keeps_gradients or strategy.owns_step:
            raise ConfigurationError(
                "ModelPruning needs whole parameters with their gradients, and this strategy divides or copies them",
                found=strategy.describe(),
                fix='use strategy="ddp"',
            )
        self._pruned = self._find(pl_module)
        if not self._pruned:
            raise ConfigurationError(
                "ModelPruning found nothing to prune",
                found=f"{type(pl_module).__name__} has no parameter called {' or '.join(self._names)}",
                fix="pass parameter_names=[...] or parameters_to_prune=[(module, name), ...]",
            )
        for kept in (self._masks, self._first):  # of a checkpoint
            kept.update(
                {
                    name: tensor.to(self._pruned[name].device)
                    for name, tensor in kept.items()
                }
            )
        if self._rewinds and not self._first:
            self._first = {
                name: parameter.detach().clone()
                for name, parameter in self._pruned.items()
            }

    def on_before_optimizer_step(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        for name, mask in self._masks.items():
            gradient = self._pruned[name].grad
            if gradient is not None:
                gradient.mul_(mask)

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._zero()

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        epoch = trainer.current_epoch
        applies = self._applies(epoch) if callable(self._applies) else self._applies
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not trainer.epoch_is_whole or not applies or not amount:
            return
        self._prune(amount)
        for name, parameter in self._pruned.items():
            trainer.strategy.data.broadcast(
                self._masks[name]
            )  # random methods draw on each rank
            if self._rewinds(epoch) if callable(self._rewinds) else self._rewinds:
                parameter.data.copy_(self._first[name])
        self._zero()
        if self.verbose:
            trainer.print(
                f"pruned {self.sparsity:.1%} of {len(self._pruned)} parameters after epoch {epoch}"
            )

    def _find(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """By name in the module, the parameters to prune."""
        wanted = None
        if self._given is not None:
            wanted = {id(getattr(owner, name)) for owner, name in self._given}
        return {
            name: parameter
            for name, parameter in module.named_parameters()
            if (
                name.rpartition(".")[2] in self._names
                if wanted is None
                else id(parameter) in wanted
            )
        }

    def _zero(self) -> None:
        for name, mask in self._masks.items():
            self._pruned[name].data.mul_(mask)

    def _prune(self, amount: int | float) -> None:
        for name, parameter in self._pruned.items():
            self._masks.setdefault(name, torch.ones_like(parameter.data))
        if not self._together:
            for name, parameter in self._pruned.items():
                self._masks[name] = self._smaller(
                    parameter.detach(), self._masks[name], amount
                )
            return
        weights = torch.cat(
            [parameter.detach().flatten() for parameter in self._pruned.values()]
        )
        masks = torch.cat([self._masks[name].flatten() for name in self._pruned])
        parts = torch.split(
            self._smaller(weights, masks, amount),
            [p.numel() for p in self._pruned.values()],
        )
        for (name, parameter), part in zip(self._pruned.items(), parts, strict=True):
            self._masks[name] = part.view_as(parameter).clone()

    def _smaller(self, weights: Tensor, mask: Tensor, amount: int | float) -> Tensor:
        """The mask with ``amount`` less of what it has left."""
        kind = _METHODS[self.pruning_fn]
        if self._dim is None:
            left = mask.bool()
            mask = mask.clone()
            mask[left] = kind(amount).compute_mask(weights[left], mask[left])  # type: ignore[call-arg, no-untyped-call]
            return mask
        options = (
            [amount, self._norm, self._dim]
            if self._norm is not None
            else [amount, self._dim]
        )
        dims = [dim for dim in range(mask.dim()) if dim != self._dim % mask.dim()]
        kept = mask.sum(dims).nonzero().flatten()  # sync point: at the end of an epoch
        rest = kind(*options).compute_mask(
            weights.index_select(self._dim, kept), mask.index_select(self._dim, kept)
        )  # type: ignore[no-untyped-call]
        return torch.zeros_like(mask).index_copy_(self._dim, kept, rest)
