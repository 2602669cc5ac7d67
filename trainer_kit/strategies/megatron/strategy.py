"""Megatron: its layers, its gradient reduction and its optimizer, under the loop of the Trainer or of the user."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.arguments import check_timeout
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.costs import Costs
from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.core.state_names import (
    load_module_weights,
    named_state,
    plain_state,
    without_wrappers,
)
from trainer_kit.core.tensors import local
from trainer_kit.core.torch_private import mark_stepped
from trainer_kit.core.types import Function, SavedState, StateDict
from trainer_kit.precision.precision import EXCHANGING, Precision
from trainer_kit.strategies.gradients import clip_parts
from trainer_kit.strategies.megatron.config import (
    check_model,
    megatron_model,
    optimizer_options,
)
from trainer_kit.strategies.megatron.state import (
    Stepper,
    TensorLayout,
    find_flat_shards,
    load_state,
    megatron_costs,
    optimizer_states,
)
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    borrowed_buffers,
    join_world,
)
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import (
    FlatShard,
    GroupOptions,
    States,
    gather_flat,
    load_optimizer_state,
    optimizer_state,
    shard_like,
)
from trainer_kit.strategies.strategy import Strategy

__all__ = ["MegatronScaler", "MegatronStrategy"]


_Wrapper: TypeAlias = Any
"""Megatron's data parallel wrapper, or its model; the library has no types, and need not be installed."""
_REFUSED_LAYERS: Final = "the engine casts and partitions weights in its own way, which exchanged layers do not survive"


@final
class MegatronStrategy(Strategy):
    """megatron-core (https://docs.nvidia.com/megatron-core/): data and tensor parallel, for models of its layers.

    ``configure_model`` builds the model, as ``self.net = GPTModel(TransformerConfig(...), ...)``, with the sizes of
    this strategy; ``training_step`` calls it and returns a loss. Megatron's schedule runs forward and backward, its
    wrapper sums gradients, its optimizer (float32 masters for half precision) scales and steps. In a custom training
    loop the model is built after the Accelerator, and the loop calls backward.

    Args:
        device: where this rank computes; the Trainer sets it.
        tensor_parallel: ranks that compute each layer together; the rest is data parallel.
        sequence_parallel: tensor ranks split norms and dropout along the sequence.
        distributed_optimizer: a data rank reduces, steps and holds the state of its part of all parameters (ZeRO's
            stage 1, in Megatron's buffers); Adam and AdamW only. Checkpoints are the same with and without it.
        gradient_clipping: largest norm of all gradients in a custom training loop, where the engine clips in each
            step; 0: it does not. A Trainer has ``gradient_clip_val``.
        timeout: how long a collective may take.

    Raises:
        StrategyError: megatron-core is not installed.

    Example:
        >>> from trainer_kit.core.errors import StrategyError
        >>> try:
        ...     strategy = MegatronStrategy(tensor_parallel=2, distributed_optimizer=True)
        ... except StrategyError as error:  # megatron-core is not installed
        ...     assert error.fix
    """

    name = "megatron"
    engine = "megatron"
    refused_precisions: ClassVar[Mapping[str, str]] = {
        "64-true": "this engine keeps weights in float32 at most",
        **dict.fromkeys(EXCHANGING, _REFUSED_LAYERS),
    }
    data: ProcessGroup
    lockstep = True
    """Megatron's schedule needs a loss for each micro-batch."""
    keeps_gradients = True
    completes_gradients = True
    own_buffers = True
    why_not_averaged = "Megatron's optimizer steps copies of the weights"
    why_not_recomputed = (
        "Megatron's layers do that: TransformerConfig(recompute_granularity=...)"
    )
    why_not_again = "Megatron steps copies of the parameters"
    why_not_in_threads = (
        "Megatron keeps its groups in variables of its modules, one set for a process"
    )

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
        distributed_optimizer: bool = False,
        gradient_clipping: float = 0.0,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if importlib.util.find_spec("megatron") is None:
            raise StrategyError(
                "megatron-core is not installed",
                fix='pip install "megatron-core>=0.16"',
            )
        self.device = torch.device(device)
        check_timeout(timeout, "MegatronStrategy")
        self.tensor_parallel = tensor_parallel
        self.sequence_parallel = sequence_parallel
        self.distributed_optimizer = distributed_optimizer
        self.gradient_clipping = gradient_clipping
        self.timeout = timeout
        self.sharded = tensor_parallel > 1
        self._wrapped: _Wrapper = None
        self._optimizer: Any = None
        # None in a custom training loop, whose code calls forward and backward.
        self._run_schedule: Any = None
        self._scaler = MegatronScaler()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._flat_shards: dict[nn.Parameter, FlatShard] = {}
        self._layout = TensorLayout(tensor_parallel)
        self._is_in_forward = False
        self._half_precision = ""

    def places(self, processes: int) -> dict[str, int]:
        """The numbers of data ranks and tensor ranks."""
        if processes % self.tensor_parallel:
            raise StrategyError(
                f"{plural(processes, 'process is', 'processes are')} not a multiple of {self.tensor_parallel}",
                found=f"tensor_parallel={self.tensor_parallel}",
                fix="launch a multiple of tensor_parallel",
            )
        return {
            "data": processes // self.tensor_parallel,
            "tensor": self.tensor_parallel,
        }

    def start(self) -> None:
        """Join the process group, and create Megatron's groups from it."""
        # Megatron's kernels and its gradient buffers are written for CUDA; it would fail inside of its first layer.
        if not torch.cuda.is_available():
            raise StrategyError(
                "Megatron runs on CUDA only",
                found="no CUDA device",
                fix="use MeshStrategy(tp=), which runs on any device",
            )
        self.world: ProcessGroup = join_world(
            self.device, None, self.timeout, alone=True
        )
        self.places(self.world.size)
        # One seed for all ranks: Megatron derives the seeds of the tensor ranks from it.
        seed = self.world.broadcast(torch.initial_seed() % 2**31)
        groups = _create_groups(self.tensor_parallel, self.timeout, seed)
        self.data = ProcessGroup(self.device, groups.get_data_parallel_group())
        self.losses = self.reports = self.data
        self.reporter = self.world.rank

    def stop(self) -> None:
        """Detach the wrapper from the module; its state stays, for a checkpoint after the run."""
        if self._wrapped is not None:
            _unwrap(self._wrapped).__dict__.pop("forward", None)

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Wrap Megatron's model as Megatron's own training does; every data rank gets the weights of the first."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if manual:
            raise StrategyError(
                "Megatron runs the optimizer step",
                fix="set automatic_optimization = True, or use another strategy",
            )
        # Asked after the groups exist, whose sizes decide which schedule it is.
        self._run_schedule = get_forward_backward_func()
        # The loop weights losses, so Megatron sums gradients and divides nothing.
        self._prepare(module, precision, summed=True)
        self._wrapped.config.no_sync_func = self._wrapped.no_sync
        self._wrapped.config.finalize_model_grads_func = _finalize_gradients

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Wrap the model for a custom training loop, whose losses are weighted for averaged gradients."""
        if self._wrapped is not None and "forward" in _unwrap(self._wrapped).__dict__:
            raise StrategyError(
                "Megatron trains one model",
                fix="call prepare_model(other, evaluation_mode=True) for a second model, or accelerator.clear() first",
            )
        self._run_schedule = None
        self._prepare(module, precision, summed=False)
        return module

    def _prepare(self, module: nn.Module, precision: Precision, summed: bool) -> None:
        model = megatron_model(module)
        config: Any = model.config
        sizes = {
            "tensor_model_parallel_size": self.tensor_parallel,
            "sequence_parallel": self.sequence_parallel,
        }
        # Sizes that this strategy does not set: a model built for another run must not bring its own.
        fixed_sizes = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1}
        check_model(config, {**sizes, **fixed_sizes}, precision.name)
        self._half_precision = ""
        if config.bf16:
            self._half_precision = "bf16"
        elif config.fp16:
            self._half_precision = "fp16"
            # Megatron scales the loss itself: two scalers would divide gradients twice.
            precision.hand_over(self._scaler, True)
        module.to(self.device)
        self._wrapped = _wrap_model(
            model, self._half_precision, summed, self.distributed_optimizer
        )
        # A second fit wraps the model again; the optimizer of the first has the buffers of the first wrapper.
        self._optimizer = None
        self._gradients = {}
        self._flat_shards = {}
        # In __dict__, which has priority over the class and is removed again in `stop`.
        model.__dict__["forward"] = partial(self._call_wrapped, model.forward)

    def _call_wrapped(
        self, model_forward: Function, *args: object, **kwargs: object
    ) -> Any:
        """Replaces the model's ``forward``, so that the user's module calls Megatron's wrapper."""
        # The wrapper calls the model, whose forward this is.
        if self._is_in_forward:
            return model_forward(*args, **kwargs)
        self._is_in_forward = True
        try:
            return self._wrapped(*args, **kwargs)
        finally:
            self._is_in_forward = False

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Create the Megatron optimizer that steps in place of this one, and reads its options in each step."""
        if self._optimizer is not None:
            raise StrategyError(
                "Megatron steps one optimizer",
                fix="return one from configure_optimizers",
            )
        if self._wrapped is None:
            raise StrategyError(
                "Megatron needs the model before its optimizer",
                fix="prepare the model together with its optimizer, or before it",
            )
        self._optimizer = _create_optimizer(
            self._wrapped, optimizer, self._half_precision, self.distributed_optimizer
        )
        trained = [p for p in self._wrapped.parameters() if p.requires_grad]
        self._flat_shards = find_flat_shards(
            self._stepping_optimizer(), trained, self.distributed_optimizer
        )
        self._scaler.follow(self._stepping_optimizer())
        if self._run_schedule is None:
            optimizer.zero_grad = self._zero_gradients  # type: ignore[method-assign]  # on the user's object: gradients are Megatron's

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """The method itself, which calls the model through its wrapper."""
        if several:
            raise StrategyError(
                "Megatron runs one backward per micro-batch",
                fix="return one loss, or use DDP",
            )
        return method

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """Megatron's schedule calls backward; in a custom training loop autograd does, on a scaled loss in float16."""
        if backward is not None:
            raise StrategyError(
                "Megatron runs backward", found="backward is overridden"
            )
        if self._run_schedule is None and self._half_precision == "fp16":
            return self._scaled_backward
        return None

    def _scaled_backward(self, loss: Tensor, **options: object) -> None:
        self._wrapped.config.grad_scale_func(loss).backward(**options)

    def _zero_gradients(self, set_to_none: bool = True) -> None:
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Average gradients over the data ranks; returns those that Megatron's wrapper keeps."""
        _finalize_gradients([self._wrapped])
        return [
            self._gradient(parameter)
            for parameter in optimizer.param_groups[0]["params"]
        ]

    def _gradient(self, parameter: Any) -> Tensor:
        """This rank's part of a parameter's gradient; the other elements of the buffer are not reduced."""
        gradient = self._gradients.get(parameter)
        if gradient is None:
            shard = self._flat_shards[parameter]
            if shard.is_sharded:
                gradient = shard.view_in_parameter(parameter.main_grad)
            else:
                gradient = self._layout.as_dtensor(parameter.main_grad, parameter)
            self._gradients[parameter] = gradient
        return gradient

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """Megatron's step, with the current learning rate and weight decay."""

        def step(closure: Any = None) -> None:
            options = optimizer.param_groups[0]
            if self._run_schedule is None and closure is not None:
                raise StrategyError(
                    "Megatron steps without a closure",
                    fix="call accelerator.backward(loss), then step()",
                )
            if self._run_schedule is None and self.gradient_clipping > 0:
                self.clip_gradients(options["params"], self.gradient_clipping, "norm")
            # Schedulers change the options of torch's optimizer, Megatron's has copies of them.
            for group in self._optimizer.param_groups:
                group["lr"] = options["lr"]
                group["weight_decay"] = options["weight_decay"]
            updated, *_ = self._optimizer.step()
            self._scaler.skipped = not updated
            # Clears `.grad` only, not the buffers of the wrapper.
            if self._run_schedule is None:
                self._optimizer.zero_grad()
            mark_stepped(optimizer)

        return step

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run all micro-batches through Megatron's schedule, which calls backward and sums gradients at the end."""
        if micro.has_backward_hooks:
            raise StrategyError(
                "Megatron runs backward, so on_before_backward and on_after_backward would not be called",
                fix="use on_before_optimizer_step",
            )
        if self._optimizer is None:
            raise StrategyError(
                "Megatron needs an optimizer",
                fix="return an optimizer from configure_optimizers",
            )

        def forward(
            indices: Any, model: Any
        ) -> tuple[Tensor, Callable[[Tensor], object]]:
            index = next(indices)
            if index:
                micro.end(index - 1)
            micro.begin(index)
            loss = micro.forward(index)
            if loss is None:
                raise StrategyError(
                    "training_step returned no loss, and Megatron's schedule needs one",
                    fix="return a loss; one that is multiplied by zero has no effect",
                )
            # After the first forward, as in the loop: its hooks may still read the gradients of the window before.
            if not index:
                micro.start_gradients()
                self._zero_gradients()
            return loss, _pass_on_loss

        # The hook of a micro-batch's end follows its backward, which the schedule runs before the next forward.
        self._run_schedule(
            forward_step_func=forward,
            data_iterator=iter(range(micro.count)),
            model=[self._wrapped],
            num_microbatches=micro.count,
            seq_length=1,  # only pipelines read this and the next
            micro_batch_size=1,
            forward_only=False,
        )
        micro.end(micro.count - 1)

    def clip_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        value: float,
        algorithm: str,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Clip the wrapper's gradients, also over tensor ranks; Megatron itself would read the norm on the host."""
        scale: Any = 1.0
        if self._half_precision == "fp16":
            # Gradients are still scaled here, so the limit is scaled too. As a tensor: reading it would be a sync
            # point.
            scale = self._optimizer.get_loss_scale().reshape(())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [self._gradient(parameter) for parameter in trained]
        if not self.distributed_optimizer:
            norm = clip_parts(gradients, value * scale, algorithm, norm_type)
        else:
            # Empty gradients, too: a rank may have none, and takes part in the sum.
            counted = [
                gradient if self._layout.counts_in_norm(parameter) else gradient[:0]
                for parameter, gradient in zip(trained, gradients, strict=True)
            ]
            norm = clip_parts(
                gradients,
                value * scale,
                algorithm,
                norm_type,
                stages=self.world,
                counted=counted,
            )
        if norm is None:
            return None
        unscaled: Tensor = norm / scale
        return unscaled

    def module_state(self, module: nn.Module) -> dict[str, object]:
        """The state by the module's names: master weights in place of rounded ones, parts as ``DTensor``."""
        parameters = named_state(module)
        # Errors are raised on all ranks before the ranks exchange anything.
        local_state = fail_together(self.world, lambda: plain_state(module))
        state: StateDict = {}
        for name, value in local_state.items():
            if not isinstance(value, Tensor):
                continue
            parameter = parameters.get(name)
            shard = None if parameter is None else self._flat_shards.get(parameter)
            if shard is not None and shard.master.dtype != value.dtype:
                value = gather_flat(
                    shard,
                    value.shape,
                    shard.master,
                    self._writes_values,
                    self.data.group,
                )
            state[name] = self._layout.as_dtensor(value, parameter)
        return state

    @property
    def _writes_values(self) -> bool:
        """Whether a checkpoint needs the values of this rank."""
        return self.sharded or self.world.rank == 0

    def load_module_state(
        self, module: nn.Module, state: SavedState, strict: bool
    ) -> None:
        """Restore this rank's part."""
        parameters = named_state(module)
        # Entries that are no tensors, such as those of fp8, keep their values.
        loaded: StateDict = {}
        present: dict[str, Tensor] = {}
        for name, value in plain_state(module).items():
            if isinstance(value, Tensor):
                present[name] = self._layout.as_dtensor(value, parameters.get(name))
            else:
                loaded[name] = value
        for name, value in without_wrappers(state).items():
            if name in present:
                value = local(shard_like(value, present[name]))
            loaded[name] = value
        load_module_weights(module, loaded, strict)
        # Masters of the weights as they are loaded, before those that a checkpoint has more exactly.
        if self._optimizer is not None:
            self._optimizer.reload_model_params()
        for name, parameter in parameters.items():
            shard = self._flat_shards.get(parameter)
            # The checkpoint may be more precise than the weights.
            if shard is not None and name in loaded:
                master = shard.view_in_master(shard.master)
                master.copy_(shard.view_in_parameter(loaded[name]))

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], States]:
        """The state of Megatron's optimizer, by the module's parameters."""
        groups, _ = optimizer_state(optimizer)
        return groups, optimizer_states(
            self._stepping_optimizer(),
            self._flat_shards,
            self._layout,
            self.data,
            self._writes_values,
        )

    def load_optimizer_state(
        self, optimizer: Optimizer, groups: GroupOptions, state: States
    ) -> None:
        """Restore this rank's parts, and the options of torch's optimizer."""
        load_optimizer_state(optimizer, groups, {})
        load_state(self._stepping_optimizer(), self._flat_shards, state, self._layout)

    def _stepping_optimizer(self) -> Any:
        """Megatron's optimizer that holds torch's."""
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        if len(chained) != 1:
            raise StrategyError(
                "Megatron made several optimizers",
                found=f"{len(chained)}, where one is known",
            )
        return chained[0]

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, every data rank has the buffers of data rank 0."""
        return borrowed_buffers(module, self.data)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """What one tensor rank holds and sends."""
        data_ranks = ranks // self.tensor_parallel
        return megatron_costs(
            module,
            precision.name,
            data_ranks,
            self.tensor_parallel,
            self.distributed_optimizer,
        )

    def describe(self) -> str:
        """One line for ``explain()``."""
        line = f"Megatron on {self.device.type}, {plural(self.tensor_parallel, 'tensor rank')}"
        if self.started:
            line += f", {plural(self.data.size, 'data rank')}"
        if self.distributed_optimizer:
            line += ", distributed optimizer"
        return line


def _create_groups(tensor_parallel: int, timeout: timedelta, seed: int) -> Any:
    """Make Megatron's process groups; returns its module ``parallel_state``, which holds them.

    Args:
        tensor_parallel: ranks that compute each layer together.
        timeout: how long a collective may take.
        seed: the same on all ranks; Megatron derives one for each tensor rank.
    """
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as layers

    # Groups of an earlier run in this process may have had other sizes.
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=1,
        distributed_timeout_minutes=int(timeout.total_seconds() // 60),
    )
    layers.model_parallel_cuda_manual_seed(seed)
    return parallel_state


def _wrap_model(model: Any, half: str, summed: bool, distributed: bool) -> Any:
    """Put Megatron's wrapper around a model, and give every data rank the weights of the first.

    Args:
        model: on its device.
        half: ``"bf16"`` or ``"fp16"``, else empty.
        summed: gradients are summed over the ranks, not averaged.
        distributed: each data rank gets only its part of the gradients.
    """
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.transformer.module import Float16Module

    config = model.config
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(
            parameter
        )
    config.calculate_per_token_loss = summed
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    if half:
        model = Float16Module(config, model)
    wrapped = DistributedDataParallel(config, settings, model)
    wrapped.broadcast_params()
    return wrapped


def _create_optimizer(
    wrapped: _Wrapper, optimizer: Optimizer, half: str, distributed: bool
) -> Any:
    """Make the optimizer of Megatron that steps as this one of torch does.

    Args:
        wrapped: the wrapper that `_wrap_model` returned.
        optimizer: of torch.
        half: as for `_wrap_model`.
        distributed: each data rank steps its part, and holds only the state of that part.

    Raises:
        StrategyError: Megatron does not support this optimizer, or would step other parameters.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = optimizer_options(optimizer, distributed)
    # Megatron takes parameters from its wrapper, not from this optimizer: the two must be the same.
    trained = {id(p) for p in wrapped.parameters() if p.requires_grad}
    if {id(p) for p in optimizer.param_groups[0]["params"]} != trained:
        raise StrategyError(
            "Megatron steps all parameters with requires_grad",
            fix="freeze the rest: parameter.requires_grad_(False)",
        )
    if half:
        options[half] = True
    config = OptimizerConfig(
        clip_grad=0.0, use_distributed_optimizer=distributed, **options
    )
    # No overrides: Megatron's defaults do not decay vectors, torch's optimizer does.
    megatron_optimizer = get_megatron_optimizer(config, [wrapped], config_overrides={})
    if half == "fp16":
        wrapped.config.grad_scale_func = megatron_optimizer.scale_loss
    return megatron_optimizer


def _finalize_gradients(
    model: list[Any], num_tokens: Any = None, **options: object
) -> None:
    """Reduce gradients as Megatron does, but without dividing by the number of tokens: losses are weighted already."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **options)


def _pass_on_loss(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, object]]:
    """What Megatron's schedule asks of a loss: the loss, which is weighted already, and a number of tokens (unused)."""
    return loss, torch.ones((), dtype=torch.int, device=loss.device), {}


def _unwrap(wrapped: _Wrapper) -> Any:
    """The model inside of Megatron's wrappers."""
    while hasattr(wrapped, "module"):
        wrapped = wrapped.module
    return wrapped


@final
class MegatronScaler:
    """The loss scale of the current optimizer in float16; its state has the keys of ``torch.amp.GradScaler``.

    Attributes:
        skipped: whether the last step was skipped because gradients overflowed.
    """

    def __init__(self) -> None:
        self.skipped = False
        self._scaler: Any = None

    def follow(self, stepper: Stepper) -> None:
        """Read the loss scale of this optimizer from now on."""
        self.skipped = False
        self._scaler = getattr(stepper, "grad_scaler", None)

    def state_dict(self) -> dict[str, object]:
        """The scale and its counters under GradScaler's keys, for any other engine, and Megatron's own counter."""
        scaler = self._scaler
        if scaler is None:
            return {}
        return {
            "scale": float(scaler.scale),  # sync point: a checkpoint
            "growth_factor": 2.0,  # fixed in Megatron, as is the next one
            "backoff_factor": 0.5,
            "growth_interval": scaler.growth_interval,
            "_growth_tracker": scaler._growth_tracker,
            "megatron": {"hysteresis_tracker": scaler._hysteresis_tracker},
        }

    def load_state_dict(self, state: SavedState) -> None:
        """Restore `state_dict`, or the state of a GradScaler.

        Args:
            state: empty where nothing was scaled.
        """
        scaler = self._scaler
        if scaler is None or not state:
            return
        counters = state.get("megatron", {"hysteresis_tracker": scaler.hysteresis})
        tracker = int(state["_growth_tracker"]) % int(scaler.growth_interval)
        scaler.load_state_dict(
            {
                "scale": torch.tensor([state["scale"]]),
                "growth_tracker": tracker,
                **counters,
            }
        )
