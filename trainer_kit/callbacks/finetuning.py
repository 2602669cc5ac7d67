"""Finetuning: freeze parts of a module before training, and unfreeze them at a later epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

from torch import nn
from torch.optim import Optimizer

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.torch_private import BatchNorm, direct_parameters
from trainer_kit.core.types import ParamGroup, SavedState

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "LayerWiseUnfreezing",
    "multiplicative",
]

_Modules = nn.Module | Iterable["nn.Module | Iterable[Any]"]
"""A module, or any nesting of lists of modules."""


class BaseFinetuning(Callback):
    """Freeze parts of a module before training, and train them from a later epoch on.

    Override `freeze_before_training`, which runs before ``configure_optimizers``, and `finetune_function`, which runs
    once at the start of each epoch. Build the optimizer from the parameters that are trained then:
    ``filter(lambda p: p.requires_grad, self.parameters())``. A resumed run has the flags and parameter groups of its
    checkpoint. Learning-rate schedulers follow: a group that is added keeps its ratio to the first group.

    Layers must exist before ``setup`` ends: what ``configure_model`` builds cannot be frozen here.

    Example:
        >>> class TrainBodyLater(BaseFinetuning):
        ...     def freeze_before_training(self, pl_module):
        ...         self.freeze(pl_module.body)
        ...     def finetune_function(self, pl_module, epoch, optimizer):
        ...         if epoch == 3:
        ...             self.unfreeze_and_add_param_group(pl_module.body, optimizer)
    """

    never_called: ClassVar[Mapping[str, str]] = {
        "_store": "parameter groups are in every checkpoint"
    }
    # Whether it adds groups by itself, so that a second optimizer would step the same parameters.
    _adds_groups: ClassVar[bool] = False

    def __init__(self) -> None:
        # The epoch for which finetune_function ran last.
        self._last_epoch = -1
        # Of a checkpoint: by batch norm, whether it updates running statistics.
        self._tracking: dict[str, bool] = {}
        self._module: nn.Module | None = None

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze the layers that are not trained at first; called in a fit's ``setup``, before the optimizers exist.

        Args:
            pl_module: the module that is trained; `freeze` freezes a part of it.

        Raises:
            NotImplementedError: the subclass does not override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must override freeze_before_training(self, pl_module)"
        )

    def finetune_function(
        self, pl_module: Any, epoch: int, optimizer: Optimizer
    ) -> None:
        """Unfreeze the layers that are trained from now on; called for each optimizer when ``epoch`` starts.

        Args:
            pl_module: the module that is trained.
            epoch: the epoch that starts, counted from 0.
            optimizer: one optimizer of the run; `unfreeze_and_add_param_group` adds parameters to it.

        Raises:
            NotImplementedError: the subclass does not override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must override finetune_function(self, pl_module, epoch, optimizer)"
        )

    @staticmethod
    def flatten_modules(modules: _Modules) -> list[nn.Module]:
        """The modules that hold parameters or have no children, each once.

        Args:
            modules: a module, or modules in nested lists; their submodules count too.

        Example:
            >>> body = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
            >>> [type(one).__name__ for one in BaseFinetuning.flatten_modules([body, body[0]])]
            ['Linear', 'ReLU']
        """
        if isinstance(modules, nn.Module):
            candidates = list(modules.modules())
        else:
            candidates = []
            for member in modules:
                candidates += BaseFinetuning.flatten_modules(member)
        # A dict: each module once, in order.
        flat: dict[nn.Module, None] = {}
        for module in candidates:
            has_children = any(True for _ in module.children())
            # A container with parameters of its own, besides its children, is kept for those.
            if direct_parameters(module) or not has_children:
                flat[module] = None
        return list(flat)

    @staticmethod
    def filter_params(
        modules: _Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Iterable[nn.Parameter]:
        """The parameters of these modules that are trainable, or those that are frozen.

        Args:
            modules: a module, or modules in nested lists; their submodules count too.
            train_bn: False leaves out the parameters of batch norms.
            requires_grad: True for trainable parameters, False for frozen ones.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, BatchNorm) and not train_bn:
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad == requires_grad:
                    yield parameter

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of one module, not of its children; a batch norm keeps its running statistics.

        Args:
            module: the module, changed in place.
        """
        _set_trainable(module, False)

    @staticmethod
    def make_trainable(modules: _Modules) -> None:
        """Make the parameters of these modules trainable; batch norms update their running statistics.

        Args:
            modules: a module, or modules in nested lists; their submodules count too.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, True)

    @staticmethod
    def freeze(modules: _Modules, train_bn: bool = True) -> None:
        """Freeze the parameters of these modules.

        Args:
            modules: a module, or modules in nested lists; their submodules count too.
            train_bn: True leaves batch norms trainable, with running statistics that are updated; False freezes them
                too.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, train_bn and isinstance(module, BatchNorm))

    @staticmethod
    def filter_on_optimizer(
        optimizer: Optimizer, params: Iterable[nn.Parameter]
    ) -> list[nn.Parameter]:
        """The parameters that the optimizer does not have.

        Args:
            optimizer: the optimizer whose parameter groups are searched.
            params: the parameters to look for, compared by identity.
        """
        # By identity: tensors compare by their elements.
        optimizer_ids: set[int] = set()
        for group in optimizer.param_groups:
            optimizer_ids.update(id(parameter) for parameter in group["params"])
        return [parameter for parameter in params if id(parameter) not in optimizer_ids]

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: _Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Train these modules, and add those of their parameters that the optimizer lacks, as a new group.

        Frozen parameters that the optimizer has already keep the learning rate of their group, with a warning.

        Args:
            modules: the modules to unfreeze.
            optimizer: the optimizer that gets the new group.
            lr: the learning rate of the new group; None: that of the first group, divided by ``initial_denom_lr``.
            initial_denom_lr: see ``lr``.
            train_bn: False leaves out batch norms.
        """
        frozen = list(
            BaseFinetuning.filter_params(modules, train_bn, requires_grad=False)
        )
        frozen_outside = BaseFinetuning.filter_on_optimizer(optimizer, frozen)
        frozen_inside = len(frozen) - len(frozen_outside)
        if frozen_inside:
            warnings.warn(
                f"{plural(frozen_inside, 'frozen parameter is', 'frozen parameters are')} in the optimizer already,"
                " and keep the learning rate of their group:"
                " give the optimizer filter(lambda p: p.requires_grad, self.parameters())",
                stacklevel=2,
            )
        # After the count above, which looks for frozen parameters.
        BaseFinetuning.make_trainable(modules)
        if lr is None:
            lr = optimizer.param_groups[0]["lr"] / initial_denom_lr
        trained = BaseFinetuning.filter_params(modules, train_bn)
        new_params = BaseFinetuning.filter_on_optimizer(optimizer, trained)
        if new_params:
            optimizer.add_param_group({"params": new_params, "lr": lr})

    def state_dict(self) -> SavedState:
        tracking = {}
        if self._module is not None:
            for name, norm in _batch_norms(self._module):
                tracking[name] = norm.track_running_stats
        return {"epoch": self._last_epoch, "tracking": tracking}

    def load_state_dict(self, state_dict: SavedState) -> None:
        self._last_epoch = int(state_dict["epoch"])
        self._tracking = dict(state_dict["tracking"])

    def setup(self, trainer: TrainerLike, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._last_epoch = -1
            self._tracking = {}
            self._module = pl_module
            # In `setup`: the optimizers, which follow, leave out parameters that need no gradient.
            self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: TrainerLike, pl_module: Any) -> None:
        if self._adds_groups and len(trainer.optimizers) > 1:
            raise ConfigurationError(
                f"{type(self).__name__} adds parameters to one optimizer",
                found=f"{plural(len(trainer.optimizers), 'optimizer')}, and each would step the added parameters",
                fix="subclass BaseFinetuning: its finetune_function is called for each optimizer",
            )
        for name, norm in _batch_norms(pl_module):
            if name in self._tracking:
                norm.track_running_stats = self._tracking[name]
        # A resumed optimizer has the groups that were added, and the new schedulers do not know them.
        for optimizer in trainer.optimizers:
            _update_schedulers(trainer, optimizer, [])

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        epoch = trainer.current_epoch
        # A resumed run is inside this epoch: its layers are unfrozen, and its groups restored.
        if epoch == self._last_epoch:
            return
        self._last_epoch = epoch
        for optimizer in trainer.optimizers:
            # The user's function may set rates, which a scheduler would overwrite from its own list in the next step.
            rates_before = [group["lr"] for group in optimizer.param_groups]
            self.finetune_function(pl_module, epoch, optimizer)
            changed = []
            for index, rate in enumerate(rates_before):
                if optimizer.param_groups[index]["lr"] != rate:
                    changed.append(index)
            _update_schedulers(trainer, optimizer, changed)


def _set_trainable(module: nn.Module, is_trainable: bool) -> None:
    if isinstance(module, BatchNorm):
        module.track_running_stats = is_trainable
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(is_trainable)


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, BatchNorm]]:
    for name, submodule in module.named_modules():
        if isinstance(submodule, BatchNorm):
            yield name, submodule


def _update_schedulers(
    trainer: TrainerLike, optimizer: Optimizer, changed: Sequence[int]
) -> None:
    """Keep the schedulers' own lists as long as the optimizer's groups; otherwise torch refuses the next step.

    Args:
        trainer: the Trainer with the schedulers.
        optimizer: the optimizer, which may have new groups.
        changed: indices of the groups with a new learning rate.
    """
    # Imported here: it imports the code of states, which is not needed at the start.
    from trainer_kit.state.optimizer_states import scheduler_parts

    for config in trainer.lr_scheduler_configs:
        if config.optimizer is not optimizer:
            continue
        for scheduler in scheduler_parts(config.scheduler):
            _update_base_rates(scheduler, optimizer.param_groups, changed)


def _update_base_rates(
    scheduler: object, groups: Sequence[ParamGroup], changed: Sequence[int]
) -> None:
    # torch's schedulers have these lists or not, by their kind.
    base_rates = vars(scheduler).get("base_lrs")
    lambdas = vars(scheduler).get("lr_lambdas")
    if not base_rates:
        return
    # How far the schedule has moved the first group; the others follow it.
    ratio = 1.0
    if groups[0]["lr"]:
        ratio = base_rates[0] / groups[0]["lr"]
    for index in changed:
        if index < len(base_rates):
            base_rates[index] = groups[index]["lr"] * ratio
    for group in groups[len(base_rates) :]:
        base_rates.append(group["lr"] * ratio)
    # `LambdaLR` calls one function for each group.
    if lambdas:
        missing = len(groups) - len(lambdas)
        lambdas += [lambdas[0]] * missing


def multiplicative(epoch: int) -> float:
    """The default growth of the backbone's learning rate: twice as much each epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Train ``module.backbone`` from an epoch on, with a learning rate that grows to that of the rest.

    Args:
        unfreeze_backbone_at_epoch: the epoch from which it is trained.
        lambda_func: returns, for an epoch, the factor of its learning rate at the start of that epoch.
        backbone_initial_ratio_lr: its first learning rate, as a fraction of that of the first group.
        backbone_initial_lr: its first learning rate, in place of that fraction.
        should_align: stop its learning rate at that of the first group; False: let it grow further.
        initial_denom_lr: if both are None, its first learning rate is that of the first group, divided by this.
        train_bn: train the batch norms of the backbone from the start.
        verbose: print both learning rates at the start of each epoch.
        rounding: the number of printed digits.

    Raises:
        ConfigurationError: before the first step, for a module without ``backbone``, and with several optimizers.

    Example:
        >>> BackboneFinetuning(5, lambda_func=lambda epoch: 1.5).unfreeze_backbone_at_epoch
        5
    """

    _adds_groups = True

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float | None = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        if unfreeze_backbone_at_epoch < 0:
            raise ConfigurationError(
                "epochs count from 0",
                found=f"unfreeze_backbone_at_epoch={unfreeze_backbone_at_epoch}",
            )
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None
        # The index of the backbone's group in the optimizer.
        self._group_index = -1
        self._print: Callable[[str], None] = print

    def state_dict(self) -> SavedState:
        return {
            **super().state_dict(),
            "previous_backbone_lr": self.previous_backbone_lr,
            "group": self._group_index,
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        self._group_index = int(state_dict["group"])
        super().load_state_dict(state_dict)

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        backbone = getattr(pl_module, "backbone", None)
        if stage == "fit" and not isinstance(backbone, nn.Module):
            raise ConfigurationError(
                "BackboneFinetuning trains module.backbone",
                found=f"{type(pl_module).__name__} has no submodule of this name",
                fix="name it self.backbone in __init__, or subclass BaseFinetuning",
            )
        self.previous_backbone_lr = None
        self._print = trainer.print
        super().setup(trainer, pl_module, stage)

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(
        self, pl_module: Any, epoch: int, optimizer: Optimizer
    ) -> None:
        groups = optimizer.param_groups
        rate = groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch:
            first_rate = self._first_backbone_rate(rate)
            self._group_index = len(groups)
            self.previous_backbone_lr = first_rate
            self.unfreeze_and_add_param_group(
                pl_module.backbone, optimizer, first_rate, train_bn=self.train_bn
            )
        elif epoch > self.unfreeze_backbone_at_epoch:
            self._grow_backbone_rate(epoch, groups)
        if self.verbose and self.previous_backbone_lr is not None:
            shown_rate = round(float(rate), self.rounding)
            backbone_rate = round(float(self.previous_backbone_lr), self.rounding)
            self._print(
                f"epoch {epoch}: lr {shown_rate}, of the backbone {backbone_rate}"
            )

    def _first_backbone_rate(self, rate: float) -> float:
        if self.backbone_initial_lr is not None:
            return self.backbone_initial_lr
        if self.backbone_initial_ratio_lr is not None:
            return rate * self.backbone_initial_ratio_lr
        return rate / self.initial_denom_lr

    def _grow_backbone_rate(self, epoch: int, groups: list[dict[str, Any]]) -> None:
        # None in a run that began after the epoch of the unfreezing.
        if self.previous_backbone_lr is None:
            return
        rate = groups[0]["lr"]
        backbone_rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
        if self.should_align and backbone_rate > rate:
            backbone_rate = rate
        self.previous_backbone_lr = backbone_rate
        # No group was added if the optimizer had all parameters of the backbone.
        if self._group_index < len(groups):
            groups[self._group_index]["lr"] = backbone_rate


@final
class LayerWiseUnfreezing(BaseFinetuning):
    """Gradual unfreezing: train one layer of a module after the other, lower layers with smaller learning rates.

    All named parts are frozen at first. From ``unfreeze_at_epoch`` on, one more of them is trained every
    ``every_n_epochs``, in the given order; usually from the last layer to the first (Howard and Ruder 2018,
    https://arxiv.org/abs/1801.06146).

    Args:
        layers: names of submodules, as in ``named_modules``.
        unfreeze_at_epoch: when the first one is trained.
        every_n_epochs: epochs between two layers.
        lr_factor: the i-th part (from 1) is trained with the learning rate of the first group times ``lr_factor**i``.
        train_bn: train batch norms from the start.

    Raises:
        ConfigurationError: before the first step, for a name that the module does not have, with several optimizers,
            and for numbers below 1.

    Example:
        >>> LayerWiseUnfreezing(["encoder.1", "encoder.0"], lr_factor=1 / 2.6).layers
        ('encoder.1', 'encoder.0')
    """

    _adds_groups = True

    def __init__(
        self,
        layers: Sequence[str],
        unfreeze_at_epoch: int = 1,
        every_n_epochs: int = 1,
        lr_factor: float = 1.0,
        train_bn: bool = True,
    ) -> None:
        super().__init__()
        is_in_range = every_n_epochs >= 1 and unfreeze_at_epoch >= 0
        if isinstance(layers, str) or not is_in_range or lr_factor <= 0:
            raise ConfigurationError(
                "LayerWiseUnfreezing takes a list of names, an epoch, and a positive interval and factor",
                found=f"layers={layers!r}, unfreeze_at_epoch={unfreeze_at_epoch}, every_n_epochs={every_n_epochs},"
                f" lr_factor={lr_factor}",
            )
        self.layers = tuple(layers)
        self.unfreeze_at_epoch = unfreeze_at_epoch
        self.every_n_epochs = every_n_epochs
        self.lr_factor = lr_factor
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module: Any) -> None:
        submodules = dict(pl_module.named_modules())
        for name in self.layers:
            if name not in submodules:
                raise ConfigurationError(
                    f"{type(pl_module).__name__} has no submodule {name!r}",
                    found=f"layers={list(self.layers)}",
                    fix=did_you_mean(name, submodules),
                )
            self.freeze(submodules[name], train_bn=self.train_bn)

    def finetune_function(
        self, pl_module: Any, epoch: int, optimizer: Optimizer
    ) -> None:
        epochs_since_start = epoch - self.unfreeze_at_epoch
        index, epochs_since_layer = divmod(epochs_since_start, self.every_n_epochs)
        if epochs_since_layer or not 0 <= index < len(self.layers):
            return
        factor = self.lr_factor ** (index + 1)
        rate = optimizer.param_groups[0]["lr"] * factor
        layer = pl_module.get_submodule(self.layers[index])
        self.unfreeze_and_add_param_group(
            layer, optimizer, rate, train_bn=self.train_bn
        )
