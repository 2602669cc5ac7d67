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

from trainer_kit.core.collective_errors import together
from trainer_kit.core.costs import Costs
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.fields import check_timeout
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.flat_shards import Piece, whole_of
from trainer_kit.strategies.gradients import clip_parts, local
from trainer_kit.strategies.megatron.config import check_model, megatron_model
from trainer_kit.strategies.megatron.costs import megatron_costs
from trainer_kit.strategies.megatron.library import finalize, make_groups, make_optimizer, unwrapped, weighed, wrap
from trainer_kit.strategies.megatron.scaler import MegatronScaler
from trainer_kit.strategies.megatron.state import TensorParts, find_pieces, keep_state, kept_state
from trainer_kit.strategies.process_group import ProcessGroup, borrowed_buffers, join_world
from trainer_kit.strategies.state import load_optimizer_state, optimizer_state, part_of
from trainer_kit.strategies.strategy import Strategy

__all__ = ["MegatronStrategy"]


@final
class MegatronStrategy(Strategy):
    """megatron-core (https://docs.nvidia.com/megatron-core/): data and tensor parallel, for models of its layers.

    ``configure_model`` builds the model, as ``self.net = GPTModel(TransformerConfig(...), ...)``, with the sizes that
    this strategy has; ``training_step`` calls it and returns a loss. Megatron's schedule runs forward and backward, its
    wrapper adds gradients up, its optimizer (float32 masters for half precision) scales and steps. In a loop of the
    user's own the model is built after the Accelerator, and backward is the loop's.

    Args:
        device: where this rank computes; the Trainer fills it in.
        tensor_parallel: ranks that compute each layer together; the rest is data parallel.
        sequence_parallel: norms and dropout are divided along the sequence among them.
        distributed_optimizer: a data rank gets, steps and keeps the state of its part of all parameters (ZeRO's
            stage 1, in Megatron's buffers); Adam and AdamW only. Checkpoints are the same with it and without.
        gradient_clipping: largest norm of all gradients in a loop of the user's own, where Accelerate clips by itself;
            0: it does not. A Trainer has ``gradient_clip_val``.
        timeout: how long a collective may take.

    Raises:
        StrategyError: megatron-core is not installed.
    """

    name = "megatron"
    engine = "megatron"
    data: ProcessGroup
    lockstep = True  # its schedule wants a loss for each micro-batch
    keeps_gradients = completes_gradients = own_buffers = True
    why_not_averaged = "Megatron's optimizer steps copies of its own of the weights"
    why_not_again = "Megatron steps parameters of its own"

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
            raise StrategyError("megatron-core is not installed", fix='pip install "megatron-core>=0.16"')
        self.device = torch.device(device)
        check_timeout(timeout, "MegatronStrategy")
        self.tensor_parallel, self.sequence_parallel, self.timeout = tensor_parallel, sequence_parallel, timeout
        self.sharded, self.gradient_clipping = tensor_parallel > 1, gradient_clipping
        self.distributed_optimizer = distributed_optimizer
        self._chunk: Any = None
        self._optimizer: Any = None
        self._schedule: Any = None  # None: the loop is the user's own
        self._scaler = MegatronScaler()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._pieces: dict[nn.Parameter, Piece] = {}
        self._parts = TensorParts(tensor_parallel)
        self._inside = False
        self._half = ""

    def places(self, processes: int) -> dict[str, int]:
        """The data ranks and the tensor ranks."""
        if processes % self.tensor_parallel:
            raise StrategyError(
                f"{processes} processes are no multiple of {self.tensor_parallel}",
                found=f"tensor_parallel={self.tensor_parallel}",
                fix="launch a multiple of it",
            )
        return {"data": processes // self.tensor_parallel, "tensor": self.tensor_parallel}

    def start(self) -> None:
        """Join the process group, and make Megatron's groups of it."""
        if not torch.cuda.is_available():
            raise StrategyError(
                "Megatron runs on CUDA only", found="no CUDA device", fix="MeshStrategy(tp=), which runs anywhere"
            )
        self.world: ProcessGroup = join_world(self.device, None, self.timeout, alone=True)
        self.places(self.world.size)
        seed = self.world.broadcast(torch.initial_seed() % 2**31)
        groups = make_groups(self.tensor_parallel, self.timeout, seed)
        self.data = ProcessGroup(self.device, groups.get_data_parallel_group())
        self.losses = self.reports = self.data
        self.reporter = self.world.rank

    def stop(self) -> None:
        """Take the wrapper out of the module's way; a checkpoint of what was trained may still be asked for."""
        if self._chunk is not None:
            unwrapped(self._chunk).__dict__.pop("forward", None)

    def init_context(self) -> AbstractContextManager[Any]:
        """Layers are built where they run, each rank its part."""
        return torch.device(self.device)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move the module."""
        module.to(self.device)

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """Wrap Megatron's model as its own training does; every data rank gets the weights of the first."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if manual:
            raise StrategyError("Megatron steps by itself", fix="automatic_optimization = True, or another strategy")
        self._schedule = get_forward_backward_func()
        # Losses are weighed by the loop: gradients are added up, and nothing is divided by anybody.
        self._prepare(module, precision, added_up=True)
        self._chunk.config.no_sync_func = self._chunk.no_sync
        self._chunk.config.finalize_model_grads_func = finalize

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """The same for a loop of the user's own, whose losses are weighed for gradients that are averaged."""
        if self._chunk is not None and "forward" in unwrapped(self._chunk).__dict__:
            raise StrategyError(
                "Megatron trains one model", fix="prepare_model(other, evaluation_mode=True), or accelerator.clear()"
            )
        self._schedule = None
        self._prepare(module, precision, added_up=False)
        return module

    def _prepare(self, module: nn.Module, precision: Precision, added_up: bool) -> None:
        model = megatron_model(module)
        config: Any = model.config
        sizes = {"tensor_model_parallel_size": self.tensor_parallel, "sequence_parallel": self.sequence_parallel}
        others = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1}
        check_model(config, {**sizes, **others}, precision.name)
        self._half = "bf16" if config.bf16 else "fp16" if config.fp16 else ""
        if self._half == "fp16":
            precision.hand_over(self._scaler, True)
        module.to(self.device)
        self._chunk = wrap(model, self._half, added_up, self.distributed_optimizer)
        self._optimizer, self._gradients, self._pieces = None, {}, {}
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

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Megatron's optimizer in place of this one, whose options it follows from step to step."""
        if self._optimizer is not None:
            raise StrategyError("Megatron steps one optimizer", fix="return one from configure_optimizers")
        if self._chunk is None:
            raise StrategyError("Megatron has no model to step", fix="prepare the model with its optimizer, or before")
        self._optimizer = make_optimizer(self._chunk, optimizer, self._half, self.distributed_optimizer)
        trained = [p for p in self._chunk.parameters() if p.requires_grad]
        self._pieces = find_pieces(self._bottom(), trained, self.distributed_optimizer)
        self._scaler.follow(self._bottom())
        if self._schedule is None:
            optimizer.zero_grad = self._zero_gradients  # type: ignore[method-assign]  # those that Megatron keeps

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """The method itself: the wrapper is where it calls the model."""
        if several:
            raise StrategyError("Megatron runs one backward a micro-batch", fix="return one loss, or use DDP")
        return method

    def bind_backward(self, backward: Callable[..., None] | None) -> Callable[..., None] | None:
        """Its schedule's; autograd's in a loop of the user's own, where its optimizer scales the loss for float16."""
        if backward is not None:
            raise StrategyError("Megatron runs backward by itself", found="backward is overridden")
        return self._scaled_backward if self._schedule is None and self._half == "fp16" else None

    def _scaled_backward(self, loss: Tensor, **options: Any) -> None:
        self._chunk.config.grad_scale_func(loss).backward(**options)

    def _zero_gradients(self, set_to_none: bool = True) -> None:
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Average them over the data ranks; what its wrapper keeps of them."""
        finalize([self._chunk])
        return [self._gradient(parameter) for parameter in optimizer.param_groups[0]["params"]]

    def _gradient(self, parameter: Any) -> Tensor:
        """What this rank has of it once gradients are complete; the rest of the buffer is not added up."""
        kept = self._gradients
        if parameter not in kept:
            piece, gradient = self._pieces[parameter], parameter.main_grad
            kept[parameter] = piece.in_whole(gradient) if piece.divided else self._parts.placed(gradient, parameter)
        return kept[parameter]

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Megatron's, with the learning rate and the weight decay of now."""

        def step(closure: Any = None) -> None:
            now = optimizer.param_groups[0]
            if self._schedule is None and closure is not None:
                raise StrategyError("Megatron steps without a closure", fix="accelerator.backward(loss), then step()")
            if self._schedule is None and self.gradient_clipping > 0:
                self.clip_gradients(now["params"], self.gradient_clipping, "norm")
            for group in self._optimizer.param_groups:
                group["lr"], group["weight_decay"] = now["lr"], now["weight_decay"]
            updated, *_ = self._optimizer.step()
            self._scaler.skipped = not updated
            if self._schedule is None:
                self._optimizer.zero_grad()  # only lets go of `.grad`, which may be what its wrapper adds up
            optimizer._opt_called = True  # type: ignore[attr-defined]  # its schedulers ask whether it was stepped

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
                self._zero_gradients()
            return loss, weighed

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

    def clip_gradients(
        self, parameters: Sequence[nn.Parameter], value: float, algorithm: str, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip what its wrapper keeps, over the tensor ranks too; its optimizer would read the norm on the host."""
        scale = self._optimizer.get_loss_scale().reshape(()) if self._half == "fp16" else 1.0
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [self._gradient(parameter) for parameter in trained]
        if not self.distributed_optimizer:
            norm = clip_parts(gradients, value * scale, algorithm, norm_type)
        else:
            # Empty ones, too: a rank may have nothing, and takes part in the sum.
            counted = [g if self._parts.counts(p) else g[:0] for p, g in zip(trained, gradients, strict=True)]
            norm = clip_parts(gradients, value * scale, algorithm, norm_type, stages=self.world, counted=counted)
        return None if norm is None else norm / scale

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """By the module's names; masters in place of weights that are rounded, parts with what they are parts of."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        own = together(self.world, lambda: dict(module.state_dict()))  # ahead of what ranks exchange
        state = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        for name, value in state.items():
            parameter = parameters.get(name)
            piece = None if parameter is None else self._pieces.get(parameter)
            if piece is not None and piece.master.dtype != value.dtype:
                value = whole_of(piece, value.shape, piece.master, self._keeps, self.data.group)
            state[name] = self._parts.placed(value, parameter)
        return state

    @property
    def _keeps(self) -> bool:
        """Whether a checkpoint wants the values of this rank."""
        return self.sharded or self.world.rank == 0

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Each rank takes its part."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        extra = {name: value for name, value in module.state_dict().items() if not isinstance(value, Tensor)}
        like = {n: self._parts.placed(v, parameters.get(n)) for n, v in module.state_dict().items() if n not in extra}
        parts = {name: local(part_of(value, like[name])) if name in like else value for name, value in state.items()}
        module.load_state_dict({**extra, **parts}, strict=strict)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()
        for name, parameter in parameters.items():
            piece = self._pieces.get(parameter)
            if piece is not None and name in parts:  # what is read has digits that the model's dtype may not have
                piece.of(piece.master).copy_(piece.in_whole(parts[name]))

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], Mapping[nn.Parameter, Mapping[str, Any]]]:
        """What Megatron's optimizer keeps, by the module's parameters."""
        groups, _ = optimizer_state(optimizer)
        return groups, kept_state(self._bottom(), self._pieces, self._parts, self.data, self._keeps)

    def load_optimizer_state(
        self,
        optimizer: Optimizer,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> None:
        """Each rank takes its parts; the options are torch's."""
        load_optimizer_state(optimizer, groups, {})
        keep_state(self._bottom(), self._pieces, state, self._parts)

    def _bottom(self) -> Any:
        """What holds torch's optimizer, and is asked in a step."""
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        if len(chained) != 1:
            raise StrategyError("Megatron made several optimizers", found=f"{len(chained)}, where one is known")
        return chained[0]

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, buffers are those of data rank 0."""
        return borrowed_buffers(module, self.data)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """Of a tensor rank, as it was built."""
        data_ranks = ranks // self.tensor_parallel
        return megatron_costs(module, precision.name, data_ranks, self.tensor_parallel, self.distributed_optimizer)

    def describe(self) -> str:
        """One line for ``explain()``."""
        size = f", {self.data.size} data ranks" if self.started else ""
        divided = ", distributed optimizer" if self.distributed_optimizer else ""
        return f"Megatron on {self.device.type}, {self.tensor_parallel} tensor ranks{size}{divided}"
