"""Megatron: its layers, its reduction of gradients and its optimizer, under our loop."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import MicroSteps, Precision
from trainer_kit.strategies.megatron_config import check_model, megatron_model, optimizer_options
from trainer_kit.strategies.process_group import ProcessGroup, borrowed_buffers, join_world
from trainer_kit.strategies.state import load_optimizer_state, optimizer_state, part_of

__all__ = ["MegatronStrategy"]


@final
class MegatronStrategy:
    """megatron-core (https://docs.nvidia.com/megatron-core/): data and tensor parallel, for models of its layers.

    ``configure_model`` builds the model, as ``self.net = GPTModel(TransformerConfig(...), ...)``, with the sizes that
    this strategy has; ``training_step`` calls it and returns a loss. Megatron's schedule runs forward and backward, its
    wrapper adds gradients up, its optimizer (float32 masters for half precision) scales, clips and steps.

    Args:
        device: where this rank computes; the Trainer fills it in.
        tensor_parallel: ranks that compute each layer together; the rest is data parallel.
        sequence_parallel: norms and dropout are divided along the sequence among them.
        timeout: how long a collective may take.

    Raises:
        StrategyError: megatron-core is not installed.
    """

    name = "megatron"
    lockstep = True  # its schedule wants a loss for each micro-batch
    shard_batch = None
    gradient_divisor = 1  # it adds up

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if importlib.util.find_spec("megatron") is None:
            raise StrategyError("megatron-core is not installed", fix='pip install "megatron-core>=0.16"')
        self.device = torch.device(device)
        self.tensor_parallel, self.sequence_parallel, self.timeout = tensor_parallel, sequence_parallel, timeout
        self.sharded = tensor_parallel > 1
        self._chunk: Any = None
        self._optimizer: Any = None
        self._schedule: Any = None
        self._inside = False
        self._half = ""

    def places(self, world: int) -> None:
        """Whether so many processes can be divided."""
        if world % self.tensor_parallel:
            raise StrategyError(
                f"{world} processes are no multiple of {self.tensor_parallel}",
                found=f"tensor_parallel={self.tensor_parallel}",
                fix="launch a multiple of it",
            )

    def start(self) -> None:
        """Join the process group, and make Megatron's groups of it."""
        if not torch.cuda.is_available():
            raise StrategyError(
                "Megatron runs on CUDA only", found="no CUDA device", fix="MeshStrategy(tp=), which runs anywhere"
            )
        from megatron.core import parallel_state, tensor_parallel

        self.world: ProcessGroup = join_world(self.device, None, self.timeout)
        self.places(self.world.size)
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor_parallel,
            pipeline_model_parallel_size=1,
            distributed_timeout_minutes=int(self.timeout.total_seconds() // 60),
        )
        # The same on all ranks; it makes of it what differs among tensor ranks.
        tensor_parallel.model_parallel_cuda_manual_seed(self.world.broadcast(torch.initial_seed() % 2**31))
        self.data = ProcessGroup(self.device, parallel_state.get_data_parallel_group())
        self.losses = self.reports = self.data
        self.reporter = self.world.rank

    def stop(self) -> None:
        """Take the wrapper out of the module's way; a checkpoint of what was trained may still be asked for."""
        if self._chunk is not None:
            _unwrapped(self._chunk).__dict__.pop("forward", None)

    def init_context(self) -> AbstractContextManager[Any]:
        """Layers are built where they run, each rank its part."""
        return torch.device(self.device)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move the module."""
        module.to(self.device)

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """Wrap Megatron's model as its own training does; every data rank gets the weights of the first."""
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module

        if manual:
            raise StrategyError("Megatron steps by itself", fix="automatic_optimization = True, or another strategy")
        model = megatron_model(module)
        config: Any = model.config
        sizes = {"tensor_model_parallel_size": self.tensor_parallel, "sequence_parallel": self.sequence_parallel}
        others = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1}
        check_model(config, {**sizes, **others}, precision.name)
        self._half = "bf16" if config.bf16 else "fp16" if config.fp16 else ""
        if precision.scales:
            precision.hand_over()  # type: ignore[attr-defined]
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        module.to(self.device)
        # Losses are weighed by the loop: gradients are added up, and nothing is divided by anybody.
        config.calculate_per_token_loss = True
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        inner = Float16Module(config, model) if self._half else model
        self._chunk = DistributedDataParallel(config, settings, inner)
        self._chunk.broadcast_params()
        config.no_sync_func = self._chunk.no_sync
        config.finalize_model_grads_func = _finalize
        self._schedule, self._optimizer = get_forward_backward_func(), None
        model.__dict__["forward"] = partial(self._called, model.forward)

    def _called(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module calls the model; it is the wrapper's turn first."""
        if self._inside:
            return own(*args, **kwargs)
        self._inside = True
        try:
            return self._chunk(*args, **kwargs)
        finally:
            self._inside = False

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Not in a loop of the user's own, whose backward is not Megatron's."""
        raise StrategyError("Megatron runs under a Trainer only", fix="tk.Trainer(strategy=MegatronStrategy(...))")

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Megatron's optimizer in place of this one, whose options it follows from step to step."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        if self._optimizer is not None:
            raise StrategyError("Megatron steps one optimizer", fix="return one from configure_optimizers")
        options = optimizer_options(optimizer)
        trained = {id(p) for p in self._chunk.parameters() if p.requires_grad}
        if {id(p) for p in optimizer.param_groups[0]["params"]} != trained:
            raise StrategyError(
                "Megatron steps all that requires a gradient", fix="freeze the rest: parameter.requires_grad_(False)"
            )
        half = {self._half: True} if self._half else {}
        config = OptimizerConfig(clip_grad=0.0, use_distributed_optimizer=False, **half, **options)
        # No overrides: by default it would not decay vectors, which torch's optimizer does.
        self._optimizer = get_megatron_optimizer(config, [self._chunk], config_overrides={})
        if self._half == "fp16":
            self._chunk.config.grad_scale_func = self._optimizer.scale_loss

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """The method itself: the wrapper is where it calls the model."""
        if several:
            raise StrategyError("Megatron runs one backward a micro-batch", fix="return one loss, or use DDP")
        return method

    def bind_evaluation(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method itself."""
        return method

    def bind_backward(self, backward: Callable[..., None] | None) -> Callable[..., None] | None:
        """Its schedule's."""
        if backward is not None:
            raise StrategyError("Megatron runs backward by itself", found="backward is overridden")
        return None

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Megatron's, with the learning rate and the weight decay of now."""

        def step(closure: Any = None) -> None:
            now = optimizer.param_groups[0]
            for group in self._optimizer.param_groups:
                group["lr"], group["weight_decay"] = now["lr"], now["weight_decay"]
            self._optimizer.step()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # its schedulers ask whether it was stepped
            self._bottom().config.clip_grad = 0.0

        return step

    def forward_backward(self, micro: MicroSteps) -> None:
        """All micro-batches through its schedule, which calls backward and, in the end, adds gradients up."""
        if micro.hears_backward:
            raise StrategyError(
                "on_before_backward and on_after_backward are not called: Megatron runs backward by itself",
                fix="use on_before_optimizer_step",
            )
        chunk, optimizer = self._chunk, self._optimizer
        if optimizer is None:
            raise StrategyError("Megatron has nothing to step", fix="return an optimizer from configure_optimizers")

        def forward(indices: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            index = next(indices)
            if index:
                micro.end(index - 1)
            micro.begin(index)
            loss = micro.forward(index)
            if loss is None:
                raise StrategyError(
                    "training_step returned no loss, and Megatron's schedule wants one",
                    fix="return one; what is multiplied by zero adds nothing",
                )
            if not index:
                micro.start_gradients()
                chunk.zero_grad_buffer()
                optimizer.zero_grad()
            return loss, _weighed

        self._schedule(
            forward_step_func=forward,
            data_iterator=iter(range(micro.count)),
            model=[chunk],
            num_microbatches=micro.count,
            seq_length=1,  # this and the next are read by pipelines alone
            micro_batch_size=1,
            forward_only=False,
        )
        micro.end(micro.count - 1)

    def arm(self, loss: Tensor) -> None:
        """There is no manual optimization."""

    def clip_gradients(self, parameters: Sequence[nn.Parameter], value: float, algorithm: str) -> None:
        """Its optimizer clips all gradients in its step, over the tensor ranks too, by norm."""
        if algorithm != "norm":
            raise StrategyError("Megatron clips by norm only", found=repr(algorithm), fix='algorithm="norm"')
        self._bottom().config.clip_grad = value

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """By the module's names; what tensor ranks have parts of as what it is one of."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
        return {name: self._placed(value, parameters.get(name)) for name, value in state.items()}

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Each rank takes its part."""
        like = self.module_state(module)
        parts = {name: _local(part_of(value, like[name])) if name in like else value for name, value in state.items()}
        extra = {name: value for name, value in module.state_dict().items() if not isinstance(value, Tensor)}
        module.load_state_dict({**extra, **parts}, strict=strict)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], Mapping[nn.Parameter, Mapping[str, Any]]]:
        """What Megatron's optimizer keeps, by the module's parameters; masters of half precision among it."""
        groups, _ = optimizer_state(optimizer)
        inner, state = self._bottom().optimizer.state, {}
        scaler = getattr(self._bottom(), "grad_scaler", None)
        for parameter in groups[0]:
            main = getattr(parameter, "main_param", parameter)
            own = dict(inner.get(main, {}))
            if main is not parameter and own:
                own["main_param"] = main
            if own and scaler is not None:
                own["grad_scaler"], scaler = scaler.state_dict(), None  # one is enough
            if own:
                state[parameter] = {
                    name: self._placed(value, parameter) if _is_part(value, main) else value
                    for name, value in own.items()
                }
        return groups, state

    def load_optimizer_state(
        self,
        optimizer: Optimizer,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> None:
        """Each rank takes its parts; the options are torch's."""
        load_optimizer_state(optimizer, groups, {})
        inner = self._bottom().optimizer.state
        for parameter, saved in state.items():
            main = getattr(parameter, "main_param", parameter)
            whole = self._placed(main.detach(), parameter)
            own = {name: _local(part_of(v, whole)) if isinstance(v, Tensor) else v for name, v in saved.items()}
            if (scale := own.pop("grad_scaler", None)) is not None and self._half == "fp16":
                self._bottom().grad_scaler.load_state_dict(scale)
            with torch.no_grad():
                if (kept := own.pop("main_param", None)) is not None and main is not parameter:
                    main.copy_(kept)
            inner[main] = {k: v.to(main.device) if isinstance(v, Tensor) and v.dim() else v for k, v in own.items()}

    def _bottom(self) -> Any:
        """What holds torch's optimizer, and is asked in a step."""
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        if len(chained) != 1:
            raise StrategyError("Megatron made several optimizers", found=f"{len(chained)}, where one is known")
        return chained[0]

    def _placed(self, value: Tensor, parameter: Any) -> Tensor:
        """With its place among the tensor ranks, where it is a part."""
        if self.tensor_parallel == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return value
        from megatron.core import parallel_state
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(parallel_state.get_tensor_model_parallel_group(), self.device.type)
        place = [Shard(parameter.partition_dim)]
        return DTensor.from_local(value.detach(), mesh, place, run_check=False)

    @property
    def own_buffers(self) -> bool:
        """Nobody exchanges them."""
        return True

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, buffers are those of data rank 0."""
        return borrowed_buffers(module, self.data)

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        self.world.barrier()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """A value of rank ``src`` for everyone."""
        return self.world.broadcast(value, src)

    def describe(self) -> str:
        """One line for ``explain()``."""
        size = f", {self.data.size} data ranks" if hasattr(self, "data") else ""
        return f"Megatron on {self.device.type}, {self.tensor_parallel} tensor ranks{size}"


def _finalize(model: list[Any], num_tokens: Any = None, **options: Any) -> None:
    """Its own, without the division by the number of tokens: the loop's weights have done that."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **options)


def _weighed(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The loss is weighed already; the number of tokens is not looked at."""
    return loss, torch.ones((), dtype=torch.int, device=loss.device), {}


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _is_part(value: Any, of: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == of.shape


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value
