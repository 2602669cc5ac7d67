"""One model as stages: on each rank its forward runs as it is written, and only what the rank holds computes.

A stage runs the model's own ``forward``. What belongs to other stages is a stand-in there: ahead of the stage it gives
tensors of the right shapes without a meaning, the last stand-in gives what the stage before has sent, and behind the
stage the first stand-in ends the forward. A value without a meaning that reaches anything real is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.transforms.stages import Layout

__all__ = ["Stage", "StandIn", "Turn", "make_stages", "whole_names"]


class _Meaningless(Tensor):
    """A value of the right shape. Whatever torch computes from it is one again."""


class _Left(BaseException):
    """The forward ends here: the stage is over. No ``except Exception`` of the model's stops it."""


@final
class StandIn(nn.Module):
    """Stands in for a module of another stage: its attributes, the shapes of its outputs, and no parameter."""

    def __init__(self, original: nn.Module, name: str, device: torch.device) -> None:
        super().__init__()
        held = [*original.parameters(), *original.buffers()]
        memo = {id(tensor): _without_storage(tensor) for tensor in held}
        # Past nn.Module's own, which would make its parameters this module's.
        self.__dict__.update(twin=copy.deepcopy(original, memo), name=name, device=device, known={})
        self.arrived: Sequence[Tensor] | None = None
        self.is_entry = self.is_exit = False

    def __getattr__(self, name: str) -> Any:
        if "twin" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["twin"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_exit:
            raise _Left
        leaves, spec = self._outputs(args, kwargs)
        if not self.is_entry:
            made = [
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.device).as_subclass(_Meaningless)
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
            return tree_unflatten(made, spec)
        if self.arrived is None:
            raise StrategyError(
                f"{self.name} is called more than once in a forward",
                fix="a pipeline takes a model whose blocks run one after the other, each of them once",
            )
        arrived, self.arrived = iter(self.arrived), None
        return tree_unflatten([next(arrived) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def _outputs(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """What the original returns for inputs of these shapes, without storage."""
        key = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else _plain(leaf)
            for leaf in tree_leaves((args, kwargs))
        )
        if key not in self.known:
            with torch.no_grad():
                args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
                self.known[key] = tree_flatten(self.twin(*args, **kwargs))
        leaves, spec = self.known[key]
        return list(leaves), spec


def whole_names(module: nn.Module) -> list[str]:
    """The names of all submodules, with those that only other stages hold."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, StandIn):
            found += [f"{name}.{inner}" if inner else name for inner, _ in part.twin.named_modules()]
        elif name:
            found.append(name)
    return found


def _without_storage(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, type(None))) else type(value)


@final
@dataclass(frozen=True)
class Turn:
    """One micro-batch: the arguments of the model, on the last stage what is made of its output, and what it draws."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    finish: Callable[[Any], Any] | None = None
    noise: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass
class _Slot:
    """A place in the model that a stage of this rank fills, and what stands there while another one runs."""

    stage: int
    parent: nn.Module
    key: str
    real: Any
    stand_in: Any

    def put(self, real: bool) -> None:
        if isinstance(self.real, nn.Parameter):
            if real:
                self.parent.__dict__.pop(self.key, None)
                self.parent._parameters[self.key] = self.real
            else:
                self.parent._parameters.pop(self.key, None)
                self.parent.__dict__[self.key] = self.stand_in
        else:
            self.parent._modules[self.key] = self.real if real else self.stand_in


@final
@dataclass(frozen=True)
class _Borders:
    """Where a stage lies in the model; kept apart from it, so that none of these modules is a child of the stage.

    Attributes:
        forward: the model's own.
        slots: of this rank's other stages.
        entry: stands where what the stage before has sent comes in; None on the first.
        exit: stands behind the stage; None on the last.
        end: the stage's last block.
    """

    forward: Callable[..., Any]
    slots: Sequence[_Slot]
    entry: StandIn | None
    exit: StandIn | None
    end: nn.Module


@final
class Stage(nn.Module):
    """The modules that one stage holds, and the model's forward from its first to its last.

    Args:
        index: of the stage.
        last: whether it is the last one.
        held: the modules, by name.
        loose: where it has parameters that are directly the model's.
        borders: where it lies in the model.

    Attributes:
        turns: the micro-batches, in the order in which they come.
        context: what the forward runs in.
    """

    def __init__(
        self,
        index: int,
        last: bool,
        held: Mapping[str, nn.Module],
        loose: Sequence[_Slot],
        borders: _Borders,
    ) -> None:
        super().__init__()
        self.index, self.last, self.borders = index, last, borders
        self.held = nn.ModuleList(held.values())
        self._loose = list(loose)
        self.find_loose()
        self._output: Any = None
        self._hooked = False
        self.names = list(held)
        self.turns: Iterator[Turn] = iter(())
        self.context: AbstractContextManager[Any] | None = None
        self.running = False

    def find_loose(self) -> None:
        """Look again for parameters that are directly the model's: others may have taken their places."""
        for slot in self._loose:
            slot.real = slot.parent._parameters[slot.key]
        self.loose = nn.ParameterList([slot.real for slot in self._loose])

    def forward(self, *arrived: Tensor) -> Any:
        """The outputs of its last block, flat; on the last stage what is made of the model's output.

        Args:
            arrived: what the stage before returned.
        """
        if not self._hooked:
            self._hook()
        turn = next(self.turns)
        with self._alone(arrived), turn.noise(), self.context or nullcontext():
            try:
                output = self.borders.forward(*turn.args, **turn.kwargs)
            except _Left:
                output = None
        if self.last:
            _check(output, "what the model returns")
            return output if turn.finish is None else turn.finish(output)
        left, self._output = self._output, None
        if left is None:
            raise StrategyError(
                f"stage {self.index} of the pipeline did not reach its end",
                found="the forward was over ahead of its last block",
                fix="a pipeline takes a model whose blocks run one after the other, each of them once",
            )
        _check(left, f"the output of stage {self.index}")
        return tuple(leaf for leaf in tree_leaves(left) if isinstance(leaf, Tensor))

    def _hook(self) -> None:
        """Behind the hooks of everything that was made of these modules since: what they return is what leaves."""
        self._hooked = True
        for name, module in zip(self.names, self.held, strict=True):
            module.register_forward_pre_hook(_checker(name), with_kwargs=True, prepend=True)

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self.running:
                self._output = output

        self.borders.end.register_forward_hook(keep)

    @contextmanager
    def _alone(self, arrived: Sequence[Tensor]) -> Iterator[None]:
        """Every other stage's places are taken by stand-ins, the entry has what arrived."""
        borders = self.borders
        for slot in borders.slots:
            slot.put(real=False)
        if borders.entry is not None:
            borders.entry.is_entry, borders.entry.arrived = True, arrived
        if borders.exit is not None:
            borders.exit.is_exit = True
        self.running = True
        try:
            yield
        finally:
            self.running = False
            if borders.entry is not None:
                borders.entry.is_entry, borders.entry.arrived = False, None
            if borders.exit is not None:
                borders.exit.is_exit = False
            for slot in borders.slots:
                slot.put(real=True)


def _checker(name: str) -> Callable[..., None]:
    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        _check((args, kwargs), f"the input of {name}")

    return check


def _check(values: Any, what: str) -> None:
    if any(isinstance(leaf, _Meaningless) for leaf in tree_leaves(values)):
        raise StrategyError(
            f"{what} depends on what another stage of the pipeline computed",
            found="more than what one block hands to the next crosses the border between two stages",
            fix="hand it on through the blocks; or name the module it comes from in PipelinePlan(first=, last= or "
            "everywhere=), where the order in which the model defines its modules is not that in which it calls them",
        )


def make_stages(model: nn.Module, layout: Layout, own: Sequence[int], device: torch.device) -> list[Stage]:
    """Leave of a model, in place, what some stages of it hold.

    Args:
        model: the whole.
        layout: which of its modules belong to which stage.
        own: the stages of this rank.
        device: where it computes.
    """
    slots: list[_Slot] = []
    stand_ins: dict[str, StandIn] = {}
    for name, stage in layout.owners.items():
        parent, _, key = name.rpartition(".")
        home = model.get_submodule(parent)
        real = home._parameters.get(key) if key in home._parameters else home._modules[key]
        stand_in: Any
        if isinstance(real, nn.Parameter):
            stand_in = torch.zeros_like(real, device=device).detach().as_subclass(_Meaningless)
        else:
            assert real is not None
            stand_in = stand_ins[name] = StandIn(real, name, device)
        slots.append(_Slot(stage, home, key, real, stand_in))
    for slot in slots:
        if slot.stage not in own:
            slot.put(real=False)
            slot.real = None
    forward, made = model.forward, []
    mine = list(zip(layout.owners, slots, strict=True))
    last = len(layout.blocks) - 1
    for index in own:
        held = {name: slot.real for name, slot in mine if slot.stage == index}
        borders = _Borders(
            forward,
            [slot for slot in slots if slot.stage in own and slot.stage != index],
            None if index == 0 else stand_ins[layout.blocks[index - 1][-1]],
            None if index == last else stand_ins[layout.blocks[index + 1][0]],
            held[layout.blocks[index][-1]],
        )
        modules = {name: real for name, real in held.items() if isinstance(real, nn.Module)}
        loose = [slot for _, slot in mine if slot.stage == index and isinstance(slot.real, nn.Parameter)]
        made.append(Stage(index, index == last, modules, loose, borders))
    return made
