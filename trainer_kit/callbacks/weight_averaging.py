"""Averages of the weights: `WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from operator import is_, methodcaller
from typing import Any, ClassVar, Final, Literal, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.state_names import plain_state, state_name
from trainer_kit.core.tensors import local
from trainer_kit.strategies.state import shard_like

__all__ = [
    "Averages",
    "EMAWeightAveraging",
    "StochasticWeightAveraging",
    "WeightAveraging",
]

_AvgFn = Callable[[Tensor, Tensor, Any], Tensor]
_MultiAvgFn = Callable[[Any, Any, Any], None]

_VALUES: Final = methodcaller("values")
_NARROW: Final = (torch.float16, torch.bfloat16)
"""An average moves by less than these can tell apart: it is kept in 32 bits."""


@final
class Averages:
    """Running averages of floating-point parameters and buffers; integer buffers are copied.

    The average of a sharded parameter is sharded in the same way: nothing is gathered, and ranks do not communicate.

    Before each use, the parameters of the module are compared with those that are averaged. If a name has another
    parameter, or one of another shape, its average restarts from that parameter, as for a new name. The average of a
    removed name is dropped. A buffer that the module reassigns keeps its average.

    Args:
        module: the module whose weights are averaged, after it was sharded.
        use_buffers: also average the buffers in its ``state_dict``.
        device: the device of the averages; None for that of the weights.
        avg_fn: computes the new average from (average, weight, number averaged), as in ``torch.optim.swa_utils``.
        multi_avg_fn: the same for lists, in place. Without either, the mean.
        report: is called with a message when averages restart.

    Attributes:
        count: how many weights are averaged; no average exists before the first.
        lent: by name, the weights of the module while the averages are swapped in.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> averages = Averages(layer)
        >>> for weight in (1.0, 3.0):
        ...     layer.weight.data.fill_(weight); averages.update()
        tensor([[1.]])
        tensor([[3.]])
        >>> averages.put_in(); layer.weight.item()
        2.0
        >>> averages.take_out(); layer.weight.item()
        3.0
    """

    def __init__(
        self,
        module: nn.Module,
        use_buffers: bool = True,
        device: torch.device | None = None,
        avg_fn: _AvgFn | None = None,
        multi_avg_fn: _MultiAvgFn | None = None,
        report: Callable[[str], Any] | None = None,
    ) -> None:
        self.device, self._avg_fn, self._report = device, avg_fn, report
        self._given = multi_avg_fn is not None
        self._multi_avg_fn: _MultiAvgFn = multi_avg_fn or get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        self.count = 0
        self.lent: dict[str, Tensor] = {}
        self._module, self._use_buffers = module, use_buffers
        self._kept: dict[str, Tensor] = {}
        self._since: dict[
            str, int
        ] = {}  # by name, the count at which an average began that began later
        self._moved: list[tuple[int, list[Tensor], list[Tensor]]] = []
        self._copied: list[tuple[Tensor, Tensor]] = []
        _divide_again(module)
        self._find()

    def _find(self) -> None:
        module = self._module
        parameters = module.named_parameters(remove_duplicate=False)
        named: list[tuple[str, Tensor]] = [
            (state_name(name), parameter) for name, parameter in parameters
        ]
        owners: dict[str, nn.Module] = {}
        if self._use_buffers:
            saved = plain_state(module)
            buffers = [
                (n, b)
                for n, b in module.named_buffers(remove_duplicate=False)
                if state_name(n) in saved
            ]
            owners = {
                state_name(name): module.get_submodule(name.rpartition(".")[0])
                for name, _ in buffers
            }
            named += [(state_name(name), buffer) for name, buffer in buffers]
        first: dict[int, str] = {}
        self._names: dict[str, list[str]] = {}  # tied weights have several
        self._live: dict[str, Tensor] = {}
        for name, tensor in named:
            if id(tensor) in first:
                self._names[first[id(tensor)]].append(name)
            elif _counts(tensor):
                first[id(tensor)] = name
                self._names[name], self._live[name] = [name], tensor
        self._owners = owners
        kinds = [
            "_modules",
            "_parameters",
            *(["_buffers"] if self._use_buffers else []),
        ]
        self._places = [vars(part)[kind] for part in module.modules() for kind in kinds]
        self._found = [*chain.from_iterable(map(_VALUES, self._places)), None]

    def follow(self) -> None:
        """Find the parameters of the module again, if they have changed."""
        # This runs in every step, so it builds no names while nothing has changed.
        now = chain(chain.from_iterable(map(_VALUES, self._places)), (None,))
        if all(map(is_, now, self._found)):
            return
        _divide_again(self._module)
        before, owners = self._live, self._owners
        self._find()
        same = {
            name
            for name, tensor in self._live.items()
            if name in before
            and tensor.shape == before[name].shape
            and (
                self._owners[name] is owners.get(name)
                if name in self._owners
                else tensor is before[name]
            )
        }
        self.lent = {name: tensor for name, tensor in self.lent.items() if name in same}
        if self.count == 0:
            return
        self._kept = {
            n: self._kept[n] if n in same else self._like(t)
            for n, t in self._live.items()
        }
        new = [name for name in self._live if name not in same]
        self._since = {
            **{n: begun for n, begun in self._since.items() if n in same},
            **dict.fromkeys(new, self.count),
        }
        self._sort()
        if new and self._report is not None:
            names = ", ".join(new[:3]) + (", ..." if len(new) > 3 else "")
            self._report(
                f"the averages of {len(new)} weights restart, because the module replaced these weights: {names}"
            )

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the averages, with one fused operation per dtype."""
        self.follow()
        if self.count == 0:
            self._begin()
        for since, kept, live in self._moved:
            number = self.count - since
            same = live[0].device == kept[0].device and live[0].dtype == kept[0].dtype
            now = [
                local(t) if same else local(t).to(kept[0].device, kept[0].dtype)
                for t in live
            ]
            if number == 0:
                torch._foreach_copy_(kept, now)
                continue
            count = (
                torch.tensor(number)
                if self._given or self._avg_fn is not None
                else number
            )
            if self._avg_fn is None:
                self._multi_avg_fn(kept, now, count)
            else:
                for average, weight in zip(kept, now, strict=True):
                    average.copy_(self._avg_fn(average, weight, count))
        for copy, live_one in self._copied:
            copy.copy_(local(live_one))
        self.count += 1

    def _begin(self) -> None:
        self._kept, self._since = (
            {name: self._like(tensor) for name, tensor in self._live.items()},
            {},
        )
        self._sort()

    def _sort(self) -> None:
        alike: dict[tuple[Any, ...], tuple[int, list[Tensor], list[Tensor]]] = {}
        self._copied = []
        for name, kept in self._kept.items():
            live, since = self._live[name], self._since.get(name, 0)
            if kept.is_floating_point() or kept.is_complex():
                lists = alike.setdefault(
                    (live.device, live.dtype, since), (since, [], [])
                )
                lists[1].append(local(kept))
                lists[2].append(live)
            else:
                self._copied.append((local(kept), live))
        self._moved = list(alike.values())

    def _like(self, tensor: Tensor) -> Tensor:
        made = tensor.detach().clone()
        wide = torch.float32 if made.dtype in _NARROW else made.dtype
        return (
            made.to(dtype=wide) if self.device is None else made.to(self.device, wide)
        )

    @torch.no_grad()
    def put_in(self) -> None:
        """Swap the averages into the module, until `take_out`; does nothing before the first average."""
        if self.lent or self.count == 0:
            return
        self.follow()
        self.lent = {
            name: tensor.detach().clone() for name, tensor in self._live.items()
        }
        for name, average in self._kept.items():
            local(self._live[name]).copy_(local(average))

    @torch.no_grad()
    def take_out(self) -> None:
        """Restore the weights of the module; safe to call again after an interruption."""
        for name, tensor in self.lent.items():
            local(self._place(name)).copy_(local(tensor))
        self.lent = {}

    def _place(self, name: str) -> Tensor:
        """The live tensor; the module may have reassigned a buffer since the last search."""
        owner, live = self._owners.get(name), self._live[name]
        now = None if owner is None else owner._buffers.get(name.rpartition(".")[2])
        return live if now is None or now.shape != live.shape else now

    def own_weights(self) -> dict[str, Tensor]:
        """`lent`, under every name of each weight."""
        return self._by_every_name(self.lent)

    def averaged(self) -> dict[str, Tensor]:
        """The averages under every name, in the dtype of the weights."""
        return self._by_every_name(
            {n: average.to(self._live[n].dtype) for n, average in self._kept.items()}
        )

    def state(self, beside: bool) -> dict[str, Any]:
        """The state for a checkpoint: the count, and the averages that the checkpoint does not hold as weights.

        Args:
            beside: the checkpoint holds the averages as its weights, in the dtype of the weights.
        """
        kept = {
            n: a
            for n, a in self._kept.items()
            if not beside or a.dtype != self._live[n].dtype
        }
        state: dict[str, Any] = {"n_averaged": self.count, "averages": kept}
        return {**state, "since": dict(self._since)} if self._since else state

    @torch.no_grad()
    def load(
        self,
        state: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        shared: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Restore `state`.

        Args:
            state: from `state`, of any layout.
            weights: those of the same checkpoint, by name.
            shared: by name here, the name of the same weight in another layout.

        Returns:
            Names of weights without an average in `state`: their averages start from the current weights.
        """
        self.count = int(state["n_averaged"])
        if self.count == 0:
            return []
        self._begin()
        begun, new = state.get("since", {}), []
        for name, average in self._kept.items():
            names = [name, *([shared[name]] if shared and name in shared else [])]
            # Averages first, under any name: the weights are rounded copies of them.
            found = next(
                (
                    part[n]
                    for part in (state["averages"], weights)
                    for n in names
                    if n in part
                ),
                None,
            )
            if found is None or found.shape != average.shape:
                new.append(name)
                self._since[name] = self.count
                continue
            local(average).copy_(local(shard_like(found, average)))
            for other in begun.keys() & set(names):
                self._since[name] = int(begun[other])
        self._sort()
        return sorted(new)

    def _by_every_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            alias: tensor
            for name, tensor in tensors.items()
            for alias in self._names[name]
        }


def _counts(tensor: Tensor) -> bool:
    """Whether to average the tensor; frozen weights in a tensor subclass of a library (packed weights) are left out."""
    if isinstance(tensor, nn.Parameter) and not (
        tensor.is_floating_point() or tensor.is_complex()
    ):
        return False
    return (
        tensor.requires_grad
        or type(tensor.detach()) is Tensor
        or hasattr(tensor, "placements")
    )


def _divide_again(module: Any) -> None:
    """Reshard FSDP modules, so that their parameters are the shards and not gathered copies."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()


class WeightAveraging(Callback):
    """Keep a running average of the weights: by default the mean of those after every optimizer step.

    Validation during ``fit`` runs on the averages, and after training the module holds them. The weights of a
    checkpoint (its ``state_dict``) are the averages, for deployment; ``current_model_state`` holds the weights that
    training continues from. A resumed run restores both exactly. Before the first average, this callback changes
    nothing.

    A sharded module (FSDP, tensor and pipeline parallel) has averages that are sharded in the same way: nothing is
    gathered, and a step costs one fused operation on the shards of a rank. Averages of 16-bit weights are kept in 32
    bits, because 16 bits would round the change of one step away.

    A parameter that is replaced during training (a submodule was replaced, a tie was cut) starts a new average, and a
    line reports it once; the other averages continue. The next update, validation or checkpoint finds the replacement.

    Override `should_update` to choose the steps.

    Args:
        device: where the averages are kept; None: where the weights are.
        use_buffers: average buffers (running statistics) as well; False leaves them as training has them.
        avg_fn: (average, weight, number averaged) to the new average, as for ``torch.optim.swa_utils.AveragedModel``.
        multi_avg_fn: the same for lists, in place.

    Raises:
        ConfigurationError: before the first step, for an engine that steps its own copies of the weights, and for a
            second callback that averages weights.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> class Late(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return step_idx is not None and step_idx >= 2
        >>> module, late = TinyModule(), Late()
        >>> trainer = Trainer(max_steps=4, barebones=True, callbacks=late)
        >>> trainer.fit(module, [torch.randn(8, 32)] * 4)  # the mean of the weights after steps 3 and 4
        >>> late.n_averaged
        2
    """

    order: ClassVar[Literal["early", "normal", "late"]] = (
        "early"  # validation hooks of other callbacks see the averages
    )

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: _AvgFn | None = None,
        multi_avg_fn: _MultiAvgFn | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError(
                "only one averaging function can be used",
                found="avg_fn and multi_avg_fn",
                fix="give one",
            )
        self.device = None if device is None else torch.device(device)
        self.use_buffers, self._avg_fn, self._multi_avg_fn = (
            use_buffers,
            avg_fn,
            multi_avg_fn,
        )
        self._averages: Averages | None = None
        self._lending = ExitStack()
        self._fits = False

    def __getstate__(self) -> dict[str, Any]:
        # The averages belong to a fit, whose module a pickled Trainer does not keep either.
        return {
            **vars(self),
            "_averages": None,
            "_lending": ExitStack(),
            "_fits": False,
        }

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        """Whether to update the averages: called after every optimizer step and after every complete epoch.

        Args:
            step_idx: the number of the step, from 0; None after an epoch.
            epoch_idx: the number of the epoch, from 0; None after a step.
        """
        return step_idx is not None

    @property
    def n_averaged(self) -> int:
        """The number of updates of the averages."""
        return 0 if self._averages is None else self._averages.count

    @property
    def lent_weights(self) -> Mapping[str, Tensor]:
        """By name, the live weights while the averages are swapped in."""
        return {} if self._averages is None else self._averages.own_weights()

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._fits = stage == "fit"
        if self._fits:
            self._averages = None
            _refuse_averaging(self, trainer, self.device)

    def on_load_checkpoint(
        self, trainer: TrainerLike, pl_module: ModuleLike, checkpoint: dict[str, Any]
    ) -> None:
        if not self._fits or "optimizer_states" not in checkpoint:
            return  # only weights are loaded; in a checkpoint of this callback they are the averages
        if "averaging_state" not in checkpoint:
            trainer.print(
                "weight averaging begins here: the checkpoint is of a run without it"
            )
            return
        self._averages = self._made(trainer, pl_module)
        shared = trainer.strategy.shared_names(pl_module)
        new = self._averages.load(
            checkpoint["averaging_state"], checkpoint["state_dict"], shared
        )
        if new:
            trainer.print(
                f"weight averaging begins here for {len(new)} weights that were not averaged: {new[0]}, ..."
            )

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self.should_update(step_idx=trainer.progress.step - 1):
            self._update(trainer, pl_module)

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        # A run that ends inside an epoch resumes there: the epoch must count once.
        if trainer.epoch_is_whole and self.should_update(
            epoch_idx=trainer.current_epoch
        ):
            self._update(trainer, pl_module)

    def _update(self, trainer: TrainerLike, module: ModuleLike) -> None:
        if self._averages is None:
            self._averages = self._made(trainer, module)
        self._averages.update()

    def _made(self, trainer: TrainerLike, module: Any) -> Averages:
        average = self._average()
        return Averages(
            module, self.use_buffers, self.device, self._avg_fn, average, trainer.print
        )

    def _average(self) -> _MultiAvgFn | None:
        return self._multi_avg_fn

    def on_validation_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._fits and self.n_averaged:
            assert self._averages is not None
            _divide_again(pl_module)
            self._averages.put_in()
            # Every rank averages its own buffers; validation uses those of rank 0, as without averages.
            self._lending.enter_context(trainer.strategy.shared_buffers(pl_module))

    def on_validation_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._fits:
            self._take_out()

    def _take_out(self) -> None:
        self._lending.close()
        if self._averages is not None:
            self._averages.take_out()

    def on_train_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self._averages is not None:
            self._averages.put_in()

    def on_exception(
        self, trainer: TrainerLike, pl_module: ModuleLike, exception: BaseException
    ) -> None:
        if self._fits:
            self._take_out()

    def on_save_checkpoint(
        self, trainer: TrainerLike, pl_module: ModuleLike, checkpoint: dict[str, Any]
    ) -> None:
        from trainer_kit.state.collect import (
            weights_to_write,
        )  # imports the checkpoint code, which is not needed at the start

        averages = self._averages
        if averages is None or averages.count == 0:
            if "optimizer_states" in checkpoint:
                checkpoint["averaging_state"] = {"n_averaged": 0, "averages": {}}
            return
        averages.follow()
        weights, mine = checkpoint["state_dict"], averages.own_weights()
        averaged = averages.averaged()
        if (
            not mine
        ):  # otherwise the averages are swapped in, and may have been changed there
            mine = {name: weights[name] for name in averaged if name in weights}
            checkpoint["state_dict"] = {**weights, **averaged}
        if "optimizer_states" in checkpoint:
            state = averages.state(beside=True)
            checkpoint["current_model_state"] = weights_to_write(
                trainer.strategy,
                pl_module,  # type: ignore[arg-type]
                mine,
            )
            state["averages"] = weights_to_write(
                trainer.strategy,
                pl_module,  # type: ignore[arg-type]
                state["averages"],
            )
            checkpoint["averaging_state"] = state


def _refuse_averaging(
    callback: Callback, trainer: TrainerLike, device: torch.device | None = None
) -> None:
    """Raise before the first step if ``callback`` cannot average the weights of this run."""
    strategy = trainer.strategy
    name = type(callback).__name__
    why = strategy.why_not_averaged
    if why is not None:
        raise ConfigurationError(
            f"{name} cannot average the weights of this engine",
            found=why,
            fix="train with DDP, FSDP or a mesh",
        )
    if strategy.per_rank_state:
        raise ConfigurationError(
            f"{name} needs equal weights on all ranks; with local SGD they differ between two exchanges",
            found="local SGD",
            fix="leave local_sgd out",
        )
    if device is not None and strategy.sharded and device.type != strategy.device.type:
        raise ConfigurationError(
            f"{name} keeps averages of sharded weights on the device of the weights",
            found=f"device={str(device)!r} and weights on {strategy.device}",
            fix="leave device out: each rank holds only its shard",
        )
    others = [
        one
        for one in trainer.callbacks
        if one is not callback and isinstance(one, WeightAveraging)
    ]
    if others:
        raise ConfigurationError(
            "two callbacks average the weights, but a checkpoint holds one average",
            found=f"{name} and {type(others[0]).__name__}",
            fix="leave one of them out",
        )


@final
class EMAWeightAveraging(WeightAveraging):
    """Keep an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weight``.

    See `WeightAveraging` for what is evaluated, deployed and saved.

    Args:
        device: where the averages are kept; None: where the weights are.
        use_buffers: average buffers (running statistics) as well.
        decay: between 0 and 1.
        update_every_n_steps: optimizer steps, counted from the first of the run.
        update_starting_at_step: no update before this step (from 0); the first one copies the weights.
        update_starting_at_epoch: from this epoch (from 0) on also update after each epoch.

    Raises:
        ConfigurationError: for numbers out of range, and as for `WeightAveraging`.

    Example:
        >>> ema = EMAWeightAveraging(decay=0.99, update_every_n_steps=2, update_starting_at_step=3)
        >>> [step for step in range(8) if ema.should_update(step_idx=step)]
        [4, 6]
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0 or update_every_n_steps < 0:
            raise ConfigurationError(
                "an exponential moving average has a decay from 0 to 1, and an interval in steps",
                found=f"decay={decay}, update_every_n_steps={update_every_n_steps}",
            )
        super().__init__(device, use_buffers)
        self.decay, self.update_every_n_steps = decay, update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        if step_idx is not None:
            start = self.update_starting_at_step or 0
            return (
                step_idx >= start
                and self.update_every_n_steps > 0
                and step_idx % self.update_every_n_steps == 0
            )
        first = self.update_starting_at_epoch
        return epoch_idx is not None and first is not None and epoch_idx >= first

    def _average(self) -> _MultiAvgFn:
        # Made for each fit: torch returns a closure, which cannot be pickled with the callback.
        average: _MultiAvgFn = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        return average


@final
class StochasticWeightAveraging(WeightAveraging):
    """Stochastic weight averaging (Izmailov et al., UAI 2018; https://arxiv.org/abs/1803.05407).

    From the start of epoch ``swa_epoch_start`` torch's ``SWALR`` sets the learning rate, in place of the module's
    schedulers, and the weights at the end of each epoch from this one on are averaged. The rates are Lightning's: the
    first such epoch keeps the rate that it found, and each epoch's end anneals it further. See
    `WeightAveraging` for what is evaluated, deployed and saved. Running statistics are averaged, too;
    ``torch.optim.swa_utils.update_bn`` after training computes them from data.

    Args:
        swa_lrs: the learning rate: one for all parameter groups, or one for each.
        swa_epoch_start: the first epoch that is averaged: its number, counted from 1, or the fraction of ``max_epochs``
            that gives this number, rounded down.
        annealing_epochs: epochs from the old rate to the new one: 0, and the first epoch has the new rate; 2, and the
            third has it.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: (average, weight, number averaged) to the new average; None for the mean.
        device: where the average is kept; None: where the weights are.

    Raises:
        ConfigurationError: before the first step, for arguments out of range, for a fraction without ``max_epochs``,
            for manual optimization, and for more than one optimizer.

    Example:
        >>> StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.75).n_averaged
        0
    """

    never_called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("avg_fn", "update_parameters"), "pass avg_fn= to the constructor"
        ),
        **dict.fromkeys(
            (
                "transfer_weights",
                "reset_batch_norm_and_save_state",
                "reset_momenta",
                "pl_module_contains_batch_norm",
            ),
            "call torch.optim.swa_utils.update_bn after training for running statistics",
        ),
    }

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: _AvgFn | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(device, avg_fn=avg_fn)
        rates = [swa_lrs] if isinstance(swa_lrs, (int, float)) else list(swa_lrs)
        fraction = isinstance(swa_epoch_start, float)
        in_range = 0 <= swa_epoch_start <= 1 if fraction else swa_epoch_start >= 1
        known = annealing_strategy in ("cos", "linear") and annealing_epochs >= 0
        if not rates or min(rates) <= 0 or not in_range or not known:
            raise ConfigurationError(
                "stochastic weight averaging has positive learning rates, an epoch from 1 or a fraction of them, and "
                'anneals in 0 or more epochs by "cos" or "linear"',
                found=f"swa_lrs={swa_lrs}, swa_epoch_start={swa_epoch_start}, annealing_epochs={annealing_epochs}, "
                f"annealing_strategy={annealing_strategy!r}",
            )
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = (
            annealing_epochs,
            annealing_strategy,
        )
        self._first = 0  # epoch, counted from 0 (`swa_epoch_start` counts from 1)
        self._anneals = False

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        return epoch_idx is not None and epoch_idx >= self._first

    def state_dict(self) -> dict[str, Any]:
        return {"anneals": self._anneals}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._anneals = bool(state_dict["anneals"])

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._anneals = False
        if isinstance(self.swa_epoch_start, float):
            if trainer.max_epochs in (None, -1):
                raise ConfigurationError(
                    "swa_epoch_start is a fraction of an unknown number of epochs",
                    found=f"swa_epoch_start={self.swa_epoch_start}, max_epochs=-1",
                    fix="give swa_epoch_start as the number of an epoch, or max_epochs",
                )
            self._first = max(int(self.swa_epoch_start * trainer.max_epochs) - 1, 0)
        else:
            self._first = self.swa_epoch_start - 1
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "stochastic weight averaging sets the learning rate, but in manual optimization the module does",
                fix="use WeightAveraging, and torch's SWALR in your training_step",
            )

    def on_load_checkpoint(
        self, trainer: TrainerLike, pl_module: ModuleLike, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if self._fits and checkpoint.get("callbacks", {}).get(self.state_key, {}).get(
            "anneals"
        ):
            (optimizer,) = trainer.optimizers
            configured = [group["lr"] for group in optimizer.param_groups]
            self._anneal(trainer)  # what is restored next is its state
            for group, rate in zip(optimizer.param_groups, configured, strict=True):
                group["lr"] = rate  # it is compared with what was configured then

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        rates = 1 if isinstance(self.swa_lrs, (int, float)) else len(self.swa_lrs)
        if len(groups) != 1 or rates not in (1, groups[0]):
            raise ConfigurationError(
                "stochastic weight averaging sets the learning rates of one optimizer",
                found=f"{len(groups)} optimizers with {groups} parameter groups, {rates} learning rates",
                fix="use WeightAveraging for several optimizers; give one learning rate, or one for each group",
            )

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not self._anneals and trainer.current_epoch >= self._first:
            self._anneal(trainer)

    def _anneal(self, trainer: TrainerLike) -> None:
        from trainer_kit.step.optimizers import LRSchedulerConfig

        (optimizer,) = trainer.optimizers
        rates: Any = (
            self.swa_lrs
            if isinstance(self.swa_lrs, (int, float))
            else list(self.swa_lrs)
        )
        scheduler = SWALR(
            optimizer, rates, self.annealing_epochs, self.annealing_strategy
        )
        # The loop holds the step as it was before SWALR wrapped it, so torch would warn of an epoch without a step.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        trainer.lr_scheduler_configs[:] = [
            LRSchedulerConfig(scheduler, optimizer=optimizer)
        ]
        self._anneals = True
