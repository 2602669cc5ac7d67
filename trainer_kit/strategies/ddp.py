"""Data parallelism: every rank has a replica, and torch's DistributedDataParallel averages the gradients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_kit.core.arguments import check_timeout
from trainer_kit.core.costs import Costs, shard_costs
from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.core.types import Function, StateDict
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.adaptive_ddp import AdaptiveDDP, LoopDDP
from trainer_kit.strategies.local_sgd import PostLocalSGD, Replicas, fill_absent
from trainer_kit.strategies.optimizer_step import direct_step
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    average_gradients,
    average_in_backward,
    borrowed_buffers,
    broadcast_buffers,
    join_world,
)
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import States, optimizer_state, refuse_unprepared
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.torch_private import sync_buffers

__all__ = ["DDPStrategy", "check_comm_hook", "register_comm_hook"]

_Wrapper = TypeVar("_Wrapper", bound=AdaptiveDDP)


@final
class DDPStrategy(Strategy):
    """torch's DistributedDataParallel (Li et al., VLDB 2020; https://pytorch.org/docs/stable/notes/ddp.html).

    Gradients are synchronized once per optimizer step, with the last micro-batch of an accumulation window. A rank
    without data for a window contributes zeros, so ranks with unequal data finish together.

    Args:
        device: the device of this rank; the Trainer sets it.
        find_unused_parameters: support steps that do not use every parameter.
        static_graph: the autograd graph never changes, which allows more overlap.
        gradient_as_bucket_view: keep gradients inside the communication buckets: less memory, no copy.
        broadcast_buffers: copy rank 0's buffers to all ranks at each synchronization.
        bucket_cap_mb: the size of a bucket in MiB; torch's default when None.
        ddp_comm_hook: ``"fp16"``, ``"bf16"``, ``"powersgd"``, ``"batched_powersgd"`` (faster, less accurate), or a hook
            for torch's ``register_comm_hook``.
        ddp_comm_state: the state of that hook, or a dict with the arguments of PowerSGD's state. Checkpoints do not
            hold it: a resumed run starts PowerSGD again with its uncompressed first steps.
        ddp_comm_wrapper: ``"fp16"`` or ``"bf16"``: cast the gradients before the hook sees them; or a function that
            takes the hook and returns one.
        local_sgd: average the weights at the intervals of a `PostLocalSGD`; None: average the gradients in each step.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; by default torch's choice for the device.
        timeout: the limit for one collective.
        process_group: torch's group of the ranks that train together in a custom training loop; by default all ranks.

    Example:
        >>> from trainer_kit import Trainer
        >>> strategy = DDPStrategy(find_unused_parameters=True)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
        >>> trainer.strategy.name, trainer.num_devices
        ('ddp', 2)
    """

    world: ProcessGroup
    name = "ddp"
    engine = "ddp"
    needs_processes = True

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        ddp_comm_hook: str | Function | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: str | Function | None = None,
        local_sgd: PostLocalSGD | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_comm_hook(ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        if local_sgd is not None and static_graph:
            raise StrategyError(
                "static_graph=True needs a gradient exchange in each step, and local SGD has none",
                found="both",
            )
        self.device = torch.device(device)
        self.local_sgd = local_sgd
        self.sharded = local_sgd is not None
        self.per_rank_state = local_sgd is not None
        self._replicas: Replicas
        self.wrapper_options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self.comm_hook = ddp_comm_hook
        self.comm_state = ddp_comm_state
        self.comm_wrapper = ddp_comm_wrapper
        check_timeout(timeout, "DDPStrategy")
        self.backend = process_group_backend
        self.timeout = timeout
        no_member = type(dist.GroupMember.NON_GROUP_MEMBER)
        if not isinstance(process_group, (dist.ProcessGroup, type(None), no_member)):
            raise StrategyError(
                "process_group= is a group of torch.distributed",
                found=f"{process_group!r}",
                fix="torch.distributed.new_group([1, 2]), or leave it out for all processes",
            )
        self.process_group = process_group
        self.spans_world = process_group is None
        self._step = _Step(nn.Module())
        self._ddp: AdaptiveDDP | None = None
        self._hooks: list[RemovableHandle] = []
        # The modules of a custom loop, which may prepare several.
        self._modules: list[nn.Module] = []
        # Whether the next window is the first of a static graph, which DDP learns from it.
        self._is_learning_graph = False
        # Whether any parameter is trained in this window: without one there is nothing to exchange.
        self._has_trained = True
        self._backward: Literal["one", "several", "manual"] = "one"

    @property
    def gradient_divisor(self) -> int:
        """DDP averages over the ranks."""
        return self.world.size

    def start(self) -> None:
        """Join the process group, or create one.

        Raises:
            StrategyError: this process is not in ``process_group``, or that group has no side on the CPU.
        """
        if not isinstance(self.process_group, (dist.ProcessGroup, type(None))):
            raise StrategyError(
                "this process is not in the process group that trains",
                found=f"rank {dist.get_rank()} of the world",
                fix="create the strategy, and the Fabric or Accelerator that uses it, only on the ranks of the group",
            )
        self.world = join_world(self.device, self.backend, self.timeout)
        if self.process_group is not None:
            backends = str(dist.get_backend_config(self.process_group))
            if "gloo" not in backends:
                raise StrategyError(
                    "the process group has no CPU backend, which the ranks need for control messages",
                    found=backends,
                    fix='init_process_group("cpu:gloo,cuda:nccl"), or TorchCollective().setup()',
                )
            self.world = ProcessGroup(self.device, self.process_group)
        self.data = self.losses = self.reports = self.world
        self.reporter = self.world.rank
        self._replicas = Replicas(self.local_sgd, self.world)

    def stop(self) -> None:
        """Release the wrapper and its hooks on the parameters; the process group stays until the process ends."""
        self._ddp = None
        self._step = _Step(nn.Module())
        self._modules.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move the module to the device, and broadcast rank 0's weights."""
        module.to(self.device)
        # As the wrapper does for trained modules, which broadcasts in its constructor.
        for parameter in module.parameters():
            self.world.broadcast(parameter.data)
        broadcast_buffers(module, self.world)

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Move and wrap the module; broadcast rank 0's weights."""
        if self.local_sgd is not None and (manual or precision.scales):
            reason = f"precision={precision.name!r}, where each may skip a step"
            if manual:
                reason = "manual optimization"
            raise StrategyError(
                "local SGD needs all ranks to step at the same time",
                found=reason,
                fix="use automatic optimization, and bf16 in place of fp16; or leave local_sgd out",
            )
        self._backward = "manual" if manual else "one"
        if not any(p.is_floating_point() for p in module.parameters()):
            self.place_module(module, precision)
            return
        module.to(self.device)
        # In manual optimization each backward reaches only the parameters of one optimizer.
        static_graph = bool(self.wrapper_options["static_graph"])
        finds_unused = bool(self.wrapper_options["find_unused_parameters"])
        finds_unused = finds_unused or (manual and not static_graph)
        self._step = _Step(module, finds_unused)
        self._is_learning_graph = static_graph
        self._ddp = self._wrap(AdaptiveDDP, self._step, finds_unused)
        if self._ddp.follow_trained():
            self._rebuild_buckets(module)

    def _rebuild_buckets(self, module: nn.Module) -> None:
        """Make DDP rebuild its buckets now, with a backward of zeros in the order of parameter registration.

        DDP rebuilds them once, after its first backward. Without this, the first step after a resume would add
        gradients in another order than the same step of an uninterrupted run.
        """
        # The sum over three or more ranks depends on the position of a gradient in its bucket.
        if self.world.size < 3:
            return
        if self.wrapper_options["find_unused_parameters"] or self._backward == "manual":
            return  # DDP does not rebuild the buckets of a graph that may change
        # A static graph is learned in the first window, and other hooks have a state that one more call would change.
        if self._is_learning_graph or self.comm_hook not in (None, "fp16", "bf16"):
            return
        assert self._ddp is not None
        # This backward is in addition to those of steps: it must leave no gradient behind.
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        with self._step.contributing_zeros():
            self._ddp().backward()
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Move the module, and wrap it if it has trained parameters; broadcast rank 0's weights.

        A frozen module stays callable under its own names; each backward averages its gradients if it is trained later.
        """
        if self.local_sgd is not None:
            raise StrategyError(
                "the local SGD of a strategy is not available in a custom training loop",
                fix="use with LocalSGD(accelerator, model, 8):",
            )
        self._modules.append(module)
        # Not wrapped: the wrapper would hide the module's own methods for nothing that is exchanged now.
        if not any(p.requires_grad for p in module.parameters()):
            self.place_module(module, precision)
            self._hooks += average_in_backward(module.parameters(), self.world)
            return module
        finds_unused = bool(self.wrapper_options["find_unused_parameters"])
        return self._wrap(LoopDDP, module.to(self.device), finds_unused)

    def _wrap(
        self, wrapper: type[_Wrapper], module: nn.Module, finds_unused: bool
    ) -> _Wrapper:
        options = {**self.wrapper_options, "find_unused_parameters": finds_unused}
        torch_options = inspect.signature(DistributedDataParallel).parameters
        # torch 2.13 renamed it, and warns of the old name.
        if "forward_sync_buffers" in torch_options:
            options["forward_sync_buffers"] = options.pop("broadcast_buffers")
        # The constructor broadcasts rank 0's weights.
        wrapped = wrapper(module, process_group=self.world.group, **options)
        if self.comm_hook is not None:
            register_comm_hook(
                wrapped, self.comm_hook, self.comm_state, self.comm_wrapper
            )
        return wrapped

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """Call the method through the wrapper, whose forward prepares the gradient synchronization.

        Several backward passes per micro-batch bypass the wrapper and are synchronized once, after the last of the
        window: the wrapper expects each parameter to be ready once. In manual optimization each backward prepares it.
        """
        # The wrapper is called as a module: its forward is the user's step, see `_Step`.
        if several:
            self._backward = "several"
        if self._ddp is None or self._backward != "one":
            return method
        self._step.redirect(method)
        return self._ddp

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """The optimizer's own step, of parameters whose gradients are averaged."""
        if self.local_sgd is not None:
            return self._replicas.bind_step(optimizer)
        return refuse_unprepared(
            optimizer, direct_step(optimizer), self._prepared_parameters, "DDP"
        )

    def _prepared_parameters(self) -> list[nn.Parameter]:
        parameters = list(self._step.module.parameters())
        for module in self._modules:
            parameters += module.parameters()
        return parameters

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run one micro-batch after the other; the last backward synchronizes gradients."""
        last = micro.count - 1
        local = self.local_sgd is not None and self._replicas.begin(micro.started)
        if local:
            # No micro-batch of this window exchanges gradients.
            last = -1
            # Otherwise the first forward of a rank with a batch broadcasts rank 0's buffers.
            if self._ddp is not None:
                self._ddp.require_forward_param_sync = False
        for index in range(micro.count):
            micro.begin(index)
            if self._ddp is not None:
                self._follow_trained_parameters(self._ddp)
            if self._backward == "one" and self._ddp is not None:
                # DDP learns a static graph in the first window, from synchronized backwards; extra ones change no sum.
                if self._has_trained and (index == last or self._is_learning_graph):
                    self._run_with_exchange(micro, index)
                else:
                    with self._ddp.no_sync():
                        _run_without_exchange(micro, index)
                        if micro.batch is None and self._has_trained:
                            # The wrapper's forward may broadcast buffers or rebuild buckets: no rank may skip it,
                            # for hooks exchange values between two micro-batches.
                            with self._step.contributing_zeros():
                                self._ddp()
            else:
                _run_without_exchange(micro, index)
                # In manual optimization each backward of the user's has exchanged its own.
                if index == last and self._backward == "several":
                    average_gradients(self._step.parameters(), self.world)
            micro.end(index)
        # A rank without a batch steps too: its momentum and its step count stay those of the others.
        if local and not micro.contributed:
            fill_absent(self._step.used_parameters or self._step.parameters())
        if self._is_learning_graph:
            self._is_learning_graph = False
            self._step.find_used()

    def _follow_trained_parameters(self, ddp: AdaptiveDDP) -> None:
        """Prepare the wrapper for parameters that were frozen, unfrozen or added since the last micro-batch."""
        # These exchange without the wrapper, whose reducer is then not used.
        if self._backward == "several" or self.local_sgd is not None:
            return
        reducer = ddp.reducer
        self._has_trained = ddp.follow_trained()
        # A new reducer has new buckets, and learns a static graph again.
        if ddp.reducer is not reducer:
            self._is_learning_graph = bool(self.wrapper_options["static_graph"])
            self._rebuild_buckets(self._step.module)

    def without_exchange(self) -> Callable[[], AbstractContextManager[object]] | None:
        """The wrapper's ``no_sync``; None if a hook, a static graph or local SGD controls the synchronization."""
        ddp = self._ddp
        if ddp is None or self._backward != "one" or self._is_learning_graph:
            return None
        if self.local_sgd is not None or self.comm_hook is not None:
            return None

        @contextmanager
        def without_exchange() -> Iterator[None]:
            # Each attempt begins with rank 0's buffers. They are sent here, not in the first forward: a rank whose
            # memory is full before its forward would leave the others waiting for it.
            ddp.require_forward_param_sync = True
            if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]  # torch's
                sync_buffers(ddp)
            ddp.require_forward_param_sync = False
            with ddp.no_sync():
                yield
            ddp.require_forward_param_sync = True  # the next step begins with them too

        return without_exchange

    def exchange_gradients(self) -> None:
        """Average all gradients over the ranks."""
        average_gradients(self._step.parameters(), self.world)

    def _run_with_exchange(self, micro: MicroSteps, index: int) -> None:
        loss = micro.forward(index)
        if loss is not None:
            micro.backward(index, loss)
            return
        assert self._ddp is not None
        with self._step.contributing_zeros():
            self._ddp().backward()

    def arm(self, loss: Tensor) -> None:
        """In manual optimization: make the next backward, of ``loss``, synchronize gradients."""
        if self._ddp is not None:
            # What the wrapper's forward does, which manual optimization bypasses.
            self._ddp.require_backward_grad_sync = True
            self._ddp.follow_trained()
            self._ddp.reducer.prepare_for_backward([loss])

    def module_state(self, module: nn.Module) -> StateDict:
        """The module's own."""
        return self._replicas.module_state(module)

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], States]:
        """The optimizer's own."""
        parameters, state = optimizer_state(optimizer)
        return parameters, self._replicas.optimizer_state(parameters, state)

    @property
    def own_buffers(self) -> bool:
        """Whether each rank keeps its own buffers; False if the wrapper's forward broadcasts those of rank 0."""
        if self.local_sgd is not None or self._ddp is None or self._backward != "one":
            return True
        return not self.wrapper_options["broadcast_buffers"]

    @contextmanager
    def shared_buffers(self, module: nn.Module) -> Iterator[None]:
        """A context with rank 0's running statistics and equal weights on all ranks, as checkpoints hold them."""
        with borrowed_buffers(module, self.world), self._replicas.averaged(module):
            yield

    def own_state(self) -> AbstractContextManager[object]:
        """A context in which states are this rank's own, not the average over the ranks."""
        return self._replicas.unaveraged()

    def finish(self, module: nn.Module) -> None:
        """Average weights that differ from rank to rank."""
        self._replicas.average_weights(module)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """A full replica on each rank; one all-reduce of all gradients per step."""
        layout = f"{plural(ranks, 'rank')}, each with whole parameters, gradients and optimizer state"
        return shard_costs(module, layout, self._describe_exchanges(module, ranks))

    def _describe_exchanges(self, module: nn.Module, ranks: int) -> list[str]:
        if ranks == 1:
            return []
        if self.local_sgd is not None:
            period = self.local_sgd.period
            return [
                f"weights: all-reduce over {plural(ranks, 'rank')}, every {plural(period, 'step')}"
            ]
        operation = "own communication hook"
        if self.comm_hook is None:
            operation = "all-reduce"
        elif isinstance(self.comm_hook, str):
            operation = f"{self.comm_hook} communication hook"
        lines = [f"gradients: {operation} over {plural(ranks, 'rank')}"]
        has_buffers = next(module.buffers(), None) is not None
        if self.wrapper_options["broadcast_buffers"] and has_buffers:
            lines.append("buffers: broadcast from rank 0")
        return lines

    def places(self, processes: int) -> dict[str, int]:
        """Every process is a replica."""
        return {"dp_replicate": processes}

    def describe(self) -> str:
        """One line for ``explain()``."""
        line = "DistributedDataParallel"
        if self.started:
            line += f" over {plural(self.world.size, 'rank')}"
        enabled = [
            name for name, value in self.wrapper_options.items() if value is True
        ]
        line += f" on {self.device.type}: {', '.join(enabled)}"
        if self.local_sgd is not None:
            line += f"; weights averaged every {plural(self.local_sgd.period, 'step')}"
        return line


def _run_without_exchange(micro: MicroSteps, index: int) -> None:
    loss = micro.forward(index)
    if loss is not None:
        micro.backward(index, loss)


class _Step(nn.Module):
    """The module that DDP wraps; its ``forward`` is the user's ``training_step``.

    Args:
        module: the user's module.
        finds_unused: whether steps may leave parameters unused. A rank without data then uses only an extra parameter:
            if all parameters counted as used, momentum would move them.

    Attributes:
        used_parameters: the parameters that get zero gradients on a rank without data; empty: all.
    """

    def __init__(self, module: nn.Module, finds_unused: bool = False) -> None:
        super().__init__()
        self.module = module
        self.used_parameters: list[nn.Parameter] = []
        if finds_unused:
            device = next(module.parameters()).device
            self.placeholder = nn.Parameter(torch.zeros((), device=device))
            self.used_parameters.append(self.placeholder)

    def find_used(self) -> None:
        """Take the parameters that have a gradient now as those that steps use."""
        self.used_parameters = [p for p in self.parameters() if p.grad is not None]

    def redirect(self, method: StepMethod) -> None:
        # In __dict__, so that DDP calls the user's method without a frame of ours in between.
        self.__dict__["forward"] = method

    @contextmanager
    def contributing_zeros(self) -> Iterator[None]:
        """A context in which the forward gives zero gradients to every parameter that other ranks use."""
        method = self.__dict__.get("forward")
        parameters = self.used_parameters or [
            p for p in self.parameters() if p.requires_grad
        ]
        # The sum over no elements: exact zeros for any weights.
        self.__dict__["forward"] = lambda: sum(
            p.reshape(-1)[:0].sum() for p in parameters
        )
        try:
            yield
        finally:
            self.__dict__["forward"] = method


_HOOKS: Final = ("fp16", "bf16", "powersgd", "batched_powersgd")


def check_comm_hook(hook: object, state: object, wrapper: object) -> None:
    """Check the arguments of a communication hook.

    Raises:
        StrategyError: an unknown name, a wrapper without a hook, or a state for a hook that takes none.
    """
    if isinstance(hook, str) and hook not in _HOOKS:
        raise StrategyError(
            "unknown communication hook",
            found=repr(hook),
            fix=f"use {', '.join(map(repr, _HOOKS))}",
        )
    if isinstance(wrapper, str) and wrapper not in ("fp16", "bf16"):
        raise StrategyError(
            "unknown wrapper of a communication hook",
            found=repr(wrapper),
            fix="use 'fp16' or 'bf16'",
        )
    if wrapper is not None and hook is None:
        raise StrategyError(
            "a wrapper needs a communication hook",
            found=f"ddp_comm_wrapper={wrapper!r}",
        )
    if isinstance(state, Mapping) and hook not in ("powersgd", "batched_powersgd"):
        raise StrategyError(
            "only PowerSGD has a state with arguments",
            found=f"{dict(state)} for {hook!r}",
            fix='use hook "powersgd"',
        )


def register_comm_hook(
    ddp: DistributedDataParallel,
    hook: str | Function,
    state: Any,
    wrapper: Any = None,
) -> None:
    """Register a communication hook.

    Args:
        ddp: the wrapped module.
        hook: one of the names, or a function for torch.
        state: the state of the hook, or the arguments of PowerSGD's state.
        wrapper: ``"fp16"``, ``"bf16"``, or a function that takes the hook and returns one.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # torch's hooks take their process group as the state; without one they use the world, not the user's group.
    is_powersgd = hook in ("powersgd", "batched_powersgd")
    if is_powersgd and (state is None or isinstance(state, Mapping)):
        state = powerSGD_hook.PowerSGDState(ddp.process_group, **(state or {}))
    if hook in ("fp16", "bf16") and state is None:
        state = ddp.process_group
    # PowerSGD waits for exchanges in gloo's two threads: with two buckets under way none would be left for them.
    waits = is_powersgd and ddp.device_type == "cpu"
    named_hooks: dict[object, Function] = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "powersgd": powerSGD_hook.powerSGD_hook,
        "batched_powersgd": _batched_powersgd,
    }
    reduce_bucket = hook if callable(hook) else named_hooks[hook]
    if wrapper is not None:
        named_wrappers: dict[object, Function] = {
            "fp16": default_hooks.fp16_compress_wrapper,
            "bf16": default_hooks.bf16_compress_wrapper,
        }
        reduce_bucket = named_wrappers.get(wrapper, wrapper)(reduce_bucket)

    def unannotated(state, bucket):  # type: ignore[no-untyped-def]  # on purpose
        # torch compares annotations by identity, so those of `from __future__ import annotations` are refused. It also
        # asks for NCCL where a hook is named like its own one for bfloat16, although that runs on gloo as well.
        reduced: torch.futures.Future[Tensor] = reduce_bucket(state, bucket)
        if waits:
            reduced.wait()
        return reduced

    ddp.register_comm_hook(state, unannotated)


@final
class _SquareBucket:
    """A bucket as one square gradient, padded with zeros."""

    def __init__(self, bucket: Any) -> None:
        flat = bucket.buffer()
        # The smallest square that holds them.
        side = math.isqrt(max(flat.numel() - 1, 0)) + 1
        self._matrix = nn.functional.pad(flat, (0, side * side - flat.numel())).view(
            side, side
        )
        self.index = bucket.index
        self.is_last = bucket.is_last

    def buffer(self) -> Tensor:
        return self._matrix.view(-1)

    def gradients(self) -> list[Tensor]:
        return [self._matrix]


def _batched_powersgd(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """PowerSGD of whole buckets; torch's own hook for this fails in its first compressed step."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    flat = bucket.buffer()
    square: Any = _SquareBucket(bucket)
    reduced = powerSGD_hook(state, square)
    return reduced.then(lambda future: flat.copy_(future.value()[: flat.numel()]))
