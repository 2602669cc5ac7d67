"""A stand-in for megatron-core, which needs CUDA: it records what it is told, and trains."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Calls = list[Any]


class Model(nn.Module):
    """What of a GPTModel a strategy looks at."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        usual = {
            "bf16": False,
            "fp16": False,
            "num_moe_experts": None,
            "mtp_num_layers": None,
        }
        sizes = {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
        }
        self.config = SimpleNamespace(
            **{
                **usual,
                **sizes,
                "sequence_parallel": False,
                "grad_scale_func": None,
                **config,
            }
        )
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def set_input_tensor(self, tensor: Any) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Wrapper(nn.Module):
    """Megatron's: gradients go to buffers of its own."""

    def __init__(
        self, calls: Calls, config: Any, settings: Any, module: nn.Module
    ) -> None:
        super().__init__()
        self.config, self.module, self.calls = config, module, calls
        self.divided = settings.use_distributed_optimizer
        calls.append(("wrap", vars(settings), config.calculate_per_token_loss))
        trained = [
            parameter for parameter in self.parameters() if parameter.requires_grad
        ]
        # One bucket, filled up so that the last rank has almost nothing but what fills it.
        count, self.ranges = 0, {}
        for parameter in trained:
            self.ranges[parameter] = (count, count := count + parameter.numel())
        self.part = -(-count // dist.get_world_size()) + 20
        size = self.part * dist.get_world_size()
        self.gradients, self.weights = (
            torch.zeros(size),
            torch.zeros(size, dtype=trained[0].dtype),
        )
        for parameter, (start, end) in self.ranges.items():
            parameter.main_grad = self.gradients[start:end].view(parameter.shape)
            self.weights[start:end].copy_(parameter.detach().view(-1))
            parameter.data = self.weights[start:end].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(_keep)

    def no_sync(self) -> Any: ...

    def forward(self, *args: Any) -> Any:
        self.calls.append("forward")
        return self.module(*args)

    def broadcast_params(self) -> None:
        self.calls.append("broadcast_params")

    def zero_grad_buffer(self) -> None:
        self.calls.append("zero_grad_buffer")
        self.gradients.zero_()


def _keep(parameter: Any) -> None:
    parameter.main_grad += parameter.grad
    parameter.grad = None


class Half(nn.Module):
    """Megatron's Float16Module."""

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__()
        self.dtype = torch.bfloat16 if config.bf16 else torch.float16
        self.module = module.to(self.dtype)

    def forward(self, x: Tensor) -> Any:
        return self.module(x.to(self.dtype)).float()


class FusedAdam(torch.optim.Optimizer):
    """As Apex and TransformerEngine have it: AdamW, whose steps are counted by group."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            own = [self.state[p] for p in group["params"]]
            for parameter, state in zip(group["params"], own, strict=True):
                if not state:
                    state.update(
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
            torch.optim._functional.adamw(
                group["params"], [p.grad for p in group["params"]], [state["exp_avg"] for state in own],
                [state["exp_avg_sq"] for state in own], [], [torch.tensor(group["step"] - 1.0) for _ in own],
                amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip


class Scaler:
    """Megatron's DynamicGradScaler."""

    def __init__(self) -> None:
        self._scale, self._growth_tracker, self._hysteresis_tracker = (
            torch.tensor([2.0**20]),
            0,
            2,
        )
        self.growth_interval, self.hysteresis = 1000, 2

    @property
    def scale(self) -> Tensor:
        return self._scale

    def update(self, overflowed: bool) -> None:
        self._growth_tracker = 0 if overflowed else self._growth_tracker + 1
        if overflowed:
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = self._scale / 2

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale = state["scale"]
        self._growth_tracker, self._hysteresis_tracker = (
            state["growth_tracker"],
            state["hysteresis_tracker"],
        )


class Distributed:
    """Megatron's DistributedOptimizer: each rank steps its range of the buffer, and gathers what others stepped."""

    def __init__(
        self, calls: Calls, config: Any, chunks: list[Any], config_overrides: Any
    ) -> None:
        calls.append(("optimizer", vars(config), config_overrides))
        (self.chunk,), self.calls, self.config = chunks, calls, config
        first = self.chunk.part * dist.get_rank()
        here, masters = [], []
        self.places = {}
        for parameter, (start, end) in self.chunk.ranges.items():
            begin, stop = max(start, first), min(end, first + self.chunk.part)
            if begin < stop:
                self.places[parameter] = {
                    "param": SimpleNamespace(start=begin - start, end=stop - start)
                }
                piece = parameter.detach().view(-1)[begin - start : stop - start]
                here.append(parameter)
                masters.append(
                    piece if piece.dtype == torch.float32 else piece.clone().float()
                )
        half = self.chunk.weights.dtype != torch.float32
        none: list[list[Any]] = [[]]
        self.model_fp32_groups, self.shard_fp32_groups = (
            (none, none) if half else ([here], [masters])
        )
        self.model_float16_groups, self.shard_fp32_from_float16_groups = (
            ([here], [masters]) if half else (none, none)
        )
        self.pairs = list(zip(here, masters, strict=True))
        # No group of torch's takes an empty list of parameters.
        options = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "eps": config.adam_eps,
        }
        self.optimizer = FusedAdam(
            [{"params": []}],
            {**options, "betas": (config.adam_beta1, config.adam_beta2)},
        )
        self.optimizer.param_groups[0]["params"] = masters
        self.param_groups, self.chained_optimizers = self.optimizer.param_groups, [self]
        self.grad_scaler = Scaler() if getattr(config, "fp16", False) else None

    def _get_model_param_range_map(self, parameter: nn.Parameter) -> Any:
        return self.places[parameter]

    def get_loss_scale(self) -> Any:
        return self.grad_scaler.scale  # type: ignore[union-attr]

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.get_loss_scale()

    def zero_grad(self) -> None: ...

    def reload_model_params(self) -> None:
        for parameter, master in self.pairs:
            place = self.places[parameter]["param"]
            master.copy_(parameter.detach().view(-1)[place.start : place.end])

    def step(self) -> tuple[bool, None, None]:
        for parameter, master in self.pairs:
            place = self.places[parameter]["param"]
            master.grad = parameter.main_grad.reshape(-1)[
                place.start : place.end
            ].float()
        if self.grad_scaler is not None:
            gradients = [master.grad for _, master in self.pairs]
            found = torch.stack(
                [torch.zeros(()), *[(~g.isfinite()).any().float() for g in gradients]]
            ).max()
            dist.all_reduce(found, dist.ReduceOp.MAX)
            torch._foreach_div_(gradients, float(self.grad_scaler.scale))
            self.grad_scaler.update(bool(found))
            if found:
                return False, None, None
        with torch.no_grad():
            self.optimizer.step()
        weights, rank, part = self.chunk.weights, dist.get_rank(), self.chunk.part
        for parameter, master in self.pairs:
            place = self.places[parameter]["param"]
            parameter.data.view(-1)[place.start : place.end].copy_(master)
        mine = weights[rank * part : (rank + 1) * part].clone()
        dist.all_gather(list(weights.chunk(dist.get_world_size())), mine)
        self.calls.append(("step", self.config.clip_grad, self.param_groups[0]["lr"]))
        return True, None, None


def make_stepper(
    calls: Calls, config: Any, chunks: list[Any], config_overrides: Any
) -> Any:
    """``get_megatron_optimizer``."""
    kind = Distributed if config.use_distributed_optimizer else Stepper
    return kind(calls, config, chunks, config_overrides)


class Stepper:
    """Megatron's optimizer around torch's; it steps with the wrapper's gradients, and clips by its configuration."""

    def __init__(
        self, calls: Calls, config: Any, chunks: list[Any], config_overrides: Any
    ) -> None:
        calls.append(("optimizer", vars(config), config_overrides))
        self.calls, self.config = calls, config
        self.pairs = []
        for p in chunks[0].parameters():
            if p.requires_grad:
                if p.dtype != torch.float32:
                    p.main_param = p.detach().clone().float()
                self.pairs.append((p, getattr(p, "main_param", p)))
        parameters = [{"params": [master for _, master in self.pairs]}]
        options = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.optimizer == "sgd":
            self.optimizer: Any = torch.optim.SGD(
                parameters, momentum=config.sgd_momentum, **options
            )
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            self.optimizer = torch.optim.AdamW(
                parameters, betas=betas, eps=config.adam_eps, **options
            )
        self.chained_optimizers, self.param_groups = [self], self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")
        for parameter, _ in self.pairs:
            parameter.grad = None

    def reload_model_params(self) -> None:
        for parameter, master in self.pairs:
            master.data.copy_(parameter.detach())

    def step(self) -> tuple[bool, None, None]:
        for parameter, master in self.pairs:
            master.grad = parameter.main_grad
        if self.config.clip_grad > 0:
            nn.utils.clip_grad_norm_(
                self.param_groups[0]["params"], self.config.clip_grad
            )
        self.calls.append(("step", self.config.clip_grad, self.param_groups[0]["lr"]))
        self.optimizer.step()
        for parameter, master in self.pairs:
            parameter.data.copy_(master.detach())
        return True, None, None


def schedule(calls: Calls, **said: Any) -> None:
    """As Megatron's without a pipeline: forward, the loss function, backward; in the end gradients are finalized."""
    (chunk,) = said["model"]
    calls.append(
        ("schedule", {k: v for k, v in said.items() if isinstance(v, (int, bool))})
    )
    for _ in range(said["num_microbatches"]):
        output, loss_func = said["forward_step_func"](said["data_iterator"], chunk)
        loss, tokens, _ = loss_func(output)
        assert (tokens.dtype, tokens.shape) == (torch.int, ())
        loss.backward()
    chunk.config.finalize_model_grads_func(
        [chunk], tokens, pg_collection="groups", force_all_reduce=False
    )


def finalize(calls: Calls, model: list[Any], tokens: Any, **said: Any) -> None:
    calls.append(("finalize", len(model), tokens, said))
    (chunk,) = model
    if not chunk.config.calculate_per_token_loss:
        chunk.gradients /= dist.get_world_size()
    dist.all_reduce(chunk.gradients)
    if (
        chunk.divided
    ):  # what is not this rank's is not added up, and nobody should look at it
        first, last = chunk.part * dist.get_rank(), chunk.part * (dist.get_rank() + 1)
        chunk.gradients[:first], chunk.gradients[last:] = torch.nan, torch.nan


def make_groups(calls: Calls, groups: dict[str, Any], **said: Any) -> None:
    """Tensor ranks are neighbors."""
    calls.append(("initialize", said))
    size, world = said["tensor_model_parallel_size"], range(dist.get_world_size())
    layout = {
        "tensor": [world[i : i + size] for i in world[::size]],
        "data": [world[i::size] for i in range(size)],
    }
    for name, several in layout.items():
        for ranks in several:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[name] = group


def install() -> Calls:
    """The stand-in, in a process of its own."""
    made: Calls = []
    core, state, tensor, distributed, optimizer, pipeline, transformer, module = (
        ModuleType(f"megatron.core{name}")
        for name in (
            "", ".parallel_state", ".tensor_parallel", ".distributed", ".optimizer", ".pipeline_parallel",
            ".transformer", ".transformer.module",
        )
    )  # fmt: skip
    root = ModuleType("megatron")
    root.__spec__ = importlib.util.spec_from_loader("megatron", None)
    vars(core).update(parallel_state=state, tensor_parallel=tensor)
    groups: dict[str, Any] = {}
    vars(state).update(
        model_parallel_is_initialized=lambda: False,
        initialize_model_parallel=partial(make_groups, made, groups),
        get_data_parallel_group=lambda: groups["data"],
        get_tensor_model_parallel_group=lambda: groups["tensor"],
        get_tensor_model_parallel_rank=lambda: dist.get_rank(groups["tensor"]),
    )
    vars(tensor).update(
        model_parallel_cuda_manual_seed=lambda seed: made.append("seed"),
        set_defaults_if_not_set_tensor_model_parallel_attributes=lambda parameter: None,
    )
    vars(distributed).update(
        DistributedDataParallel=partial(Wrapper, made),
        DistributedDataParallelConfig=SimpleNamespace,
        finalize_model_grads=partial(finalize, made),
    )
    vars(optimizer).update(
        OptimizerConfig=SimpleNamespace,
        get_megatron_optimizer=partial(make_stepper, made),
    )
    vars(pipeline).update(get_forward_backward_func=lambda: partial(schedule, made))
    vars(module).update(Float16Module=Half)
    for one in (
        root,
        core,
        state,
        tensor,
        distributed,
        optimizer,
        pipeline,
        transformer,
        module,
    ):
        sys.modules[one.__name__] = one
    torch.cuda.is_available = lambda: True
    return made
