"""DDP without its reducer, whose compiled code refuses tensors without storage: the same buckets and exchanges."""

from __future__ import annotations

import sys
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.ddp import DDPStrategy
from trainer_kit.strategies.process_group import ProcessGroup, broadcast_buffers, join_world
from trainer_kit.strategies.strategy import Strategy

__all__ = ["FakeReplicas"]

_MIB: Final = 2**20
_CAP: Final = 25 * _MIB
_FIRST: Final = 1 * _MIB
"""torch's size of a bucket, and of the one that is exchanged first."""


@final
class FakeReplicas(Strategy):
    """What `DDPStrategy` holds and sends, for tensors without storage.

    The reducer (torch/csrc/distributed/c10d/reducer.cpp) holds all gradients in buckets from the beginning. A backward
    that exchanges copies each gradient into its bucket when it is complete, and lets the parameter's ``grad`` be that
    part of the bucket. A backward that does not exchange leaves a separate gradient beside the bucket.

    Args:
        real: the strategy, for its options.
    """

    name = "ddp"
    engine = "ddp"

    def __init__(self, real: DDPStrategy) -> None:
        super().__init__(real.device)
        self._real = real
        self._module: nn.Module
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._buckets: list[Tensor] = []
        self._waiting: list[int] = []
        self._sizes: list[int] = []
        self._order: list[nn.Parameter] = []
        self._laid_out = False
        self._exchanges = False
        self._hooks: list[Any] = []

    @property
    def gradient_divisor(self) -> int:
        """DDP averages over the ranks."""
        return self.world.size

    def start(self) -> None:
        """Join the process group."""
        self.world: ProcessGroup = join_world(self.device)
        self.data = self.losses = self.reports = self.world
        self.reporter = self.world.rank

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def describe(self) -> str:
        """As the real strategy."""
        return self._real.describe()

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """Make the buckets, and watch gradients."""
        module.to(self.device)
        self._module = module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._fill(list(reversed(trained)), sys.maxsize)
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _fill(self, parameters: list[nn.Parameter], first: int) -> None:
        """Lay out buckets for these parameters, in their order."""
        cap = self._real.wrapper_options["bucket_cap_mb"]
        most = _CAP if cap is None else int(cap * _MIB)
        self._views, self._bucket_of, self._buckets = {}, {}, []
        groups: list[list[nn.Parameter]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            limit, held = min(first, most) if first != sys.maxsize else first, 0
            group: list[nn.Parameter] = []
            for parameter in (one for one in parameters if one.dtype == dtype):
                group.append(parameter)
                held += parameter.numel() * parameter.element_size()
                if held >= limit:
                    groups.append(group)
                    group, held, limit = [], 0, most
            groups += [group] if group else []
        for index, group in enumerate(groups):
            bucket = torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype, device=self.device)
            self._buckets.append(bucket)
            for parameter, part in zip(group, torch.split(bucket, [p.numel() for p in group]), strict=True):
                self._views[parameter] = part.view_as(parameter)
                self._bucket_of[parameter] = index
        self._waiting = [len(group) for group in groups]
        self._sizes = list(self._waiting)

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._exchanges or parameter.grad is None:
            return
        if not self._laid_out:
            self._order.append(parameter)
        view, index = self._views[parameter], self._bucket_of[parameter]
        with torch.no_grad():
            view.copy_(parameter.grad)
            if self._real.wrapper_options["gradient_as_bucket_view"]:
                parameter.grad = view
            self._waiting[index] -= 1
            if self._waiting[index] == 0:
                dist.all_reduce(self._buckets[index], group=self.world.group)
                self._waiting[index] = self._sizes[index]

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run one micro-batch after the other; the last backward exchanges gradients."""
        last = micro.count - 1
        for index in range(micro.count):
            micro.begin(index)
            if index == 0 and self._real.wrapper_options["broadcast_buffers"]:
                broadcast_buffers(self._module, self.world)
            self._exchanges = index == last
            loss = micro.forward(index)
            if loss is not None:
                micro.backward(index, loss)
            self._exchanges = False
            micro.end(index)
        if self._order and not self._laid_out:  # buckets are laid out again, once, in the order of the first backward
            self._laid_out = True
            self._fill(self._order, _FIRST)
            for parameter, view in self._views.items():
                parameter.grad = view
